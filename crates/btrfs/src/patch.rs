//! Patches a seed's template for one mount: puts the mount's fsid into every node.
//!
//! Every node contains the fsid, and two mounts of one image must not have the same one. In a
//! template the fsid is zero, so the patch is an exclusive or; and since CRC-32C is affine, the
//! checksum changes by a constant, whatever else is in the node:
//!
//! ```text
//!   crc(node ⊕ fsid) = crc(node) ⊕ crc(fsid) ⊕ crc(0)        each as long as a node
//! ```
//! So the checksum is never recomputed over unverified bytes: a corrupt node remains corrupt.
//! xxHash64 is not affine: there, each node is verified, and a corrupt one gets a checksum that
//! is certainly wrong.
//!
//! The DEV_ITEMs are the first items of the chunk tree, in its first leaf; each also ends in an
//! fsid.

use burgeon_block::{ByteRange, ChecksumKind, Result};

use crate::{
    format::{DEV_ITEM_LEN, FSID_AT, NODE_SIZE},
    geometry::SYSTEM_START,
    info::SeedInfo,
    invalid,
};

/// DEV_ITEMs at the end of the chunk tree's first node, one per device; they hold the fsid.
const DEV_ITEMS: usize = 2;

/// The fields that differ between two mounts of one seed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub struct Identity {
    /// The filesystem's id: random, not all zero.
    pub fsid: [u8; 16],
}

impl Identity {
    /// The identity of a template, as `write_seed` writes it.
    pub const TEMPLATE: Self = Self { fsid: [0; 16] };
}

/// Patches nodes of one seed for one mount. Cheap to create; reusable for many calls.
pub struct Patcher {
    fsid: [u8; 16],
    checksum: ChecksumKind,
    nodes: [ByteRange; 2],
    /// Added to the crc32c of a plain node, and of the node with the DEV_ITEMs.
    plain: u32,
    first: u32,
}

impl Patcher {
    /// A patcher for the mount `identity` of `info`.
    pub fn new(info: &SeedInfo, identity: &Identity) -> Self {
        let mut patcher = Self {
            fsid: identity.fsid,
            checksum: info.checksum,
            nodes: [info.chunk_nodes(), info.metadata_nodes()],
            plain: 0,
            first: 0,
        };
        let zero = vec![0; NODE_SIZE];
        let constant = |has_dev_items: bool| {
            let mut node = zero.clone();
            patcher.put_fsid(&mut node, has_dev_items);
            burgeon_block::crc32c(&node[FSID_AT..]) ^ burgeon_block::crc32c(&zero[FSID_AT..])
        };
        (patcher.plain, patcher.first) = (constant(false), constant(true));
        patcher
    }

    /// Patches whole nodes of the template, read at address `physical` (bytes) of the metadata
    /// device. Corrupt ones remain corrupt. `Invalid` if the range is not one of the seed's
    /// nodes.
    pub fn patch(&self, physical: u64, nodes: &mut [u8]) -> Result<()> {
        let range = ByteRange::at(physical, nodes.len() as u64);
        let inside = |range: ByteRange| {
            self.nodes.iter().any(|all| {
                let offset = range.start().wrapping_sub(all.start());
                all.covers(range) && offset.is_multiple_of(NODE_SIZE as u64)
            })
        };
        if !range.is_some_and(inside) || !nodes.len().is_multiple_of(NODE_SIZE) {
            return Err(invalid(format!(
                "{} bytes at {physical} are not whole nodes of this seed",
                nodes.len()
            )));
        }
        for (index, node) in nodes.chunks_exact_mut(NODE_SIZE).enumerate() {
            self.patch_node(physical + (index * NODE_SIZE) as u64 == SYSTEM_START, node);
        }
        Ok(())
    }

    fn patch_node(&self, has_dev_items: bool, node: &mut [u8]) {
        match self.checksum {
            ChecksumKind::Crc32c => {
                self.put_fsid(node, has_dev_items);
                let constant = if has_dev_items { self.first } else { self.plain };
                xor(&mut node[..4], &constant.to_le_bytes());
            }
            ChecksumKind::Xxhash64 => {
                let good = node[..8] == self.checksum.of(&node[FSID_AT..]).to_le_bytes();
                self.put_fsid(node, has_dev_items);
                let sum = self.checksum.of(&node[FSID_AT..]);
                node[..8].copy_from_slice(&if good { sum } else { !sum }.to_le_bytes());
            }
        }
    }

    /// Adds the fsid by exclusive or. Overwriting would repair a flipped bit there.
    fn put_fsid(&self, node: &mut [u8], has_dev_items: bool) {
        xor(&mut node[FSID_AT..FSID_AT + 16], &self.fsid);
        for item in 0..if has_dev_items { DEV_ITEMS } else { 0 } {
            let end = NODE_SIZE - item * DEV_ITEM_LEN;
            xor(&mut node[end - 16..end], &self.fsid);
        }
    }
}

/// Patches nodes once; see [`Patcher::patch`].
pub fn patch_nodes(
    info: &SeedInfo,
    identity: &Identity,
    physical: u64,
    nodes: &mut [u8],
) -> Result<()> {
    Patcher::new(info, identity).patch(physical, nodes)
}

fn xor(bytes: &mut [u8], with: &[u8]) {
    bytes.iter_mut().zip(with).for_each(|(byte, with)| *byte ^= with);
}
