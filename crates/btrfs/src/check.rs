//! Reads a seed back and checks it against every rule that the kernel, `btrfs check` and Burgeon
//! rely on. Independent of the writer: they share only constants, so that each finds mistakes of
//! the other.
//!
//! ```text
//!   chunk tree ─► devices, chunks ──┐        superblock facts (SeedInfo) ─► root tree
//!   dev tree   ─► device extents ───┤
//!   extent tree ─► block groups ────┼─ one table of chunks, used to the byte
//!              └─► extents ─┬───────┤
//!   free space tree ────────│───────┘
//!   checksum tree ──────────┼─ blocks with checksums = blocks of files that need them
//!   subvolume ─► file extents ┘  names ⇄ back references ⇄ inodes
//!   all walks ─► nodes ⇄ metadata items: each node is visited once, and none is left over
//!   virtual area's subvolume ─► one file that maps the area block by block
//! ```
//! The rule that keeps mounts lazy and safe: a lazy extent's logical address equals its physical
//! one, no two overlap, and all lie in the lazy data or the virtual area. Each rule is broken by
//! a case of `tests/check`.

mod chunks;
mod files;
mod inode;
mod nodes;
mod roots;
mod space;

use burgeon_block::{Error, ErrorKind, Result};

use crate::{
    SUBVOLUME,
    format::{VIRTUAL_SUBVOLUME, object},
    info::SeedInfo,
    patch::Identity,
};
use nodes::Reader;

/// The source from which `check` reads nodes.
pub trait NodeSource: Sync {
    /// Fills `nodes` with the whole nodes at address `physical` (bytes) of the metadata device.
    fn read(&self, physical: u64, nodes: &mut [u8]) -> Result<()>;
}

/// The contents of a valid seed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct CheckReport {
    /// Metadata nodes.
    pub nodes: u64,
    /// Inodes of the tree, its root included.
    pub inodes: u64,
    /// Directory entries.
    pub names: u64,
    /// Lazy extents.
    pub extents: u64,
    /// Bytes of lazy extents.
    pub extent_bytes: u64,
}

/// Checks all metadata of the seed `info` as patched for `identity`, or as a template
/// ([`Identity::TEMPLATE`]).
///
/// Errors: `Corrupt` with the first broken rule and its position; errors of `source`.
pub fn check(
    info: &SeedInfo,
    identity: &Identity,
    source: &impl NodeSource,
) -> Result<CheckReport> {
    let reader = Reader::new(info, identity, source);
    let roots = roots::read(&reader)?;
    let chunks = chunks::read(&reader, roots.of(object::DEV_TREE)?)?;
    let space = space::read(&reader, &roots, &chunks)?;
    let files = files::read(&reader, SUBVOLUME, roots.of(SUBVOLUME)?)?;
    let area = match info.virtual_area {
        Some(_) => files::read(&reader, VIRTUAL_SUBVOLUME, roots.of(VIRTUAL_SUBVOLUME)?)?,
        None => files::Files::default(),
    };
    roots::check_small(&reader, &roots)?;
    space.check_files(&files)?;
    space.check_virtual_area(info, &area)?;
    let visited = reader.visited();
    space.check_nodes(&visited)?;
    roots.check_sizes(&visited)?;
    Ok(CheckReport {
        nodes: (info.system_used + info.metadata_used) / crate::NODE_SIZE as u64,
        inodes: files.inodes,
        names: files.names,
        extents: space.extents.len() as u64,
        extent_bytes: space.extents.iter().map(|extent| extent.len).sum(),
    })
}

/// Calls `visit` with object id, type, offset and content of each item of the tree `tree`, in
/// order; verifies only the tree's nodes. Errors: `Corrupt`; `NotFound` if the tree does not
/// exist; errors of `source` and `visit`.
pub fn for_each_item(
    info: &SeedInfo,
    identity: &Identity,
    source: &impl NodeSource,
    tree: u64,
    mut visit: impl FnMut((u64, u8, u64), &[u8]) -> Result<()>,
) -> Result<()> {
    let reader = Reader::new(info, identity, source);
    let root = match tree {
        object::CHUNK_TREE => info.chunk_root,
        object::ROOT_TREE => info.root,
        _ => roots::read(&reader)?.of(tree)?,
    };
    for batch in reader.walk(tree, root)? {
        reader.leaves(&batch, |key, item| visit((key.objectid, key.kind, key.offset), item))?;
    }
    Ok(())
}

fn corrupt(what: impl Into<String>) -> Error {
    Error::new(ErrorKind::Corrupt, format!("the seed's metadata is damaged: {}", what.into()))
}

/// Fails unless `good`; `what` describes the problem.
fn ensure(good: bool, what: impl FnOnce() -> String) -> Result<()> {
    if good { Ok(()) } else { Err(corrupt(what())) }
}

/// Takes fields off the front of an item.
struct Take<'a>(&'a [u8]);

impl<'a> Take<'a> {
    fn bytes(&mut self, len: usize) -> Result<&'a [u8]> {
        let (head, tail) =
            self.0.split_at_checked(len).ok_or_else(|| corrupt("an item is too short"))?;
        self.0 = tail;
        Ok(head)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N]> {
        let mut array = [0; N];
        array.copy_from_slice(self.bytes(N)?);
        Ok(array)
    }

    fn u8(&mut self) -> Result<u8> {
        Ok(self.array::<1>()?[0])
    }

    fn u16(&mut self) -> Result<u16> {
        Ok(u16::from_le_bytes(self.array()?))
    }

    fn u32(&mut self) -> Result<u32> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    fn u64(&mut self) -> Result<u64> {
        Ok(u64::from_le_bytes(self.array()?))
    }

    fn u64s<const N: usize>(&mut self) -> Result<[u64; N]> {
        let mut values = [0; N];
        for value in &mut values {
            *value = self.u64()?;
        }
        Ok(values)
    }

    fn key(&mut self) -> Result<crate::format::Key> {
        Ok(crate::format::Key::new(self.u64()?, self.u8()?, self.u64()?))
    }

    fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    fn end(&self) -> Result<()> {
        ensure(self.is_empty(), || "an item is too long".into())
    }
}
