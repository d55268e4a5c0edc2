//! The metadata file between its making and a mount: a bit flips, and must be found.

#![allow(clippy::unwrap_used)]

use std::sync::Mutex;

use burgeon_block::{BLOCK_SIZE, ChecksumKind, Digest, Result};
use burgeon_btrfs::{
    BlobRange, DATA_START, Dirent, FileExtent, Identity, Inode, InodeBody, NODE_SIZE, NodeSink,
    NodeSource, Patcher, SeedInfo, SeedOptions, Tree, Uuids, check, write_seed,
};
use testkit::Rng;

const FILES: u32 = 300;
const STARTS: [u64; 2] = [1 << 20, 128 << 20];
const IDENTITY: Identity = Identity { fsid: *b"one of many fsid" };

/// A metadata device: the nodes of its two chunks.
#[derive(Default)]
struct Nodes(Mutex<[Vec<u8>; 2]>);

fn place(physical: u64) -> (usize, usize) {
    let piece = usize::from(physical >= STARTS[1]);
    (piece, (physical - STARTS[piece]) as usize)
}

impl NodeSink for Nodes {
    fn write(&self, physical: u64, nodes: &[u8]) -> Result<()> {
        let (piece, at) = place(physical);
        let piece = &mut self.0.lock().unwrap()[piece];
        piece.resize(piece.len().max(at + nodes.len()), 0);
        piece[at..at + nodes.len()].copy_from_slice(nodes);
        Ok(())
    }
}

impl NodeSource for Nodes {
    fn read(&self, physical: u64, nodes: &mut [u8]) -> Result<()> {
        let (piece, at) = place(physical);
        nodes.copy_from_slice(&self.0.lock().unwrap()[piece][at..at + nodes.len()]);
        Ok(())
    }
}

fn inode(mode: u32, body: InodeBody, size: u64) -> Inode {
    Inode {
        mode,
        uid: 0,
        gid: 0,
        rdev: 0,
        size,
        mtime_s: 1,
        mtime_ns: 2,
        body,
        xattr_first: 0,
        xattr_count: 0,
        nodatasum: false,
    }
}

/// A template of a folder with files of one block each.
fn template(checksum: ChecksumKind) -> (SeedInfo, [Vec<u8>; 2]) {
    let mut tree = Tree::default();
    tree.inodes.push(inode(0o040755, InodeBody::None, 0));
    for n in 0..FILES {
        let name = format!("file {n}");
        let span = BlobRange { start: tree.blob.len() as u64, len: name.len() as u32 };
        tree.blob.extend(name.bytes());
        tree.dirents.push(Dirent { parent: 0, inode: n + 1, name: span });
        let address = DATA_START + u64::from(n) * BLOCK_SIZE;
        tree.extents.push(FileExtent { file_offset: 0, address, len: BLOCK_SIZE });
        tree.inodes.push(inode(0o100644, InodeBody::Extents { first: n, count: 1 }, BLOCK_SIZE));
    }
    let data_end = DATA_START + u64::from(FILES) * BLOCK_SIZE;
    let mut options = SeedOptions::new(data_end, Uuids::derive(&Digest::of(b"a test")));
    options.checksum = checksum;
    let sums = Rng::new(1).bytes(FILES as usize * checksum.size());
    let nodes = Nodes::default();
    let info = write_seed(&tree, &sums, &options, &nodes).unwrap();
    (info, nodes.0.into_inner().unwrap())
}

/// The injected bug: the checksum is computed anew over the node, damaged or not.
fn patch_and_mend(info: &SeedInfo, physical: u64, nodes: &mut [u8]) {
    Patcher::new(info, &IDENTITY).patch(physical, nodes).unwrap();
    let size = info.checksum.size();
    for node in nodes.chunks_mut(NODE_SIZE) {
        let sum = info.checksum.of(&node[32..]).to_le_bytes();
        node[..size].copy_from_slice(&sum[..size]);
    }
}

/// Flips a bit in each of many copies of the template, patches and checks them; how many of the
/// damaged seeds pass.
fn unnoticed(checksum: ChecksumKind, mend: bool) -> usize {
    let (info, pieces) = template(checksum);
    let mut rng = Rng::new(7);
    let flips = 400;
    let passed = (0..flips).filter(|_| {
        let mut pieces = pieces.clone();
        let piece = rng.below(2) as usize;
        let node = rng.below((pieces[piece].len() / NODE_SIZE) as u64) as usize * NODE_SIZE;
        // The part of the checksum field that this kind does not use is covered by nothing.
        let byte = match rng.below(NODE_SIZE as u64) as usize {
            byte if byte < 32 => byte % checksum.size(),
            byte => byte,
        };
        pieces[piece][node + byte] ^= 1 << rng.below(8);
        for (piece, start) in pieces.iter_mut().zip(STARTS) {
            match mend {
                true => patch_and_mend(&info, start, piece),
                false => Patcher::new(&info, &IDENTITY).patch(start, piece).unwrap(),
            }
        }
        check(&info, &IDENTITY, &Nodes(Mutex::new(pieces))).is_ok()
    });
    passed.count()
}

#[test]
fn a_flipped_bit_in_the_metadata_file_is_found_and_the_bug_that_hides_it_too() {
    for checksum in [ChecksumKind::Crc32c, ChecksumKind::Xxhash64] {
        assert_eq!(unnoticed(checksum, false), 0, "{checksum}: damage passes");
        assert!(unnoticed(checksum, true) > 0, "{checksum}: this test cannot see the bug");
    }
}
