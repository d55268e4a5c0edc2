//! Shared by the fuzz targets: a good manifest to damage, and checksums made good again.
//!
//! A parser that checks a checksum first hides the rest of itself from a fuzzer. So an input is a
//! list of edits to a sound file whose sections are not compressed; after the edits all checksums
//! are computed anew, as an attacker would.

mod archives;

pub use archives::{Oblivion, build, options, seal, sealed};
use burgeon_block::{ByteRange, ChecksumKind, Digest, ObjectId};
use burgeon_btrfs::{DATA_START, Dirent, FileExtent, Inode, InodeBody, NodeSink, Tree, Xattr};
use burgeon_image::{ChunkEntry, Codec, Manifest};

// The outer form of manifests and maps: docs/format.md, "Files of sections".
const HEADER: usize = 64;
const ENTRY: usize = 48;
const SECTIONS_MAX: usize = 256;
/// Raw bytes of a compressed frame.
const FRAME: usize = 1 << 20;

/// Applies the edits that `input` describes: each takes three bytes, an offset and the new byte.
pub fn edits(bytes: &mut [u8], input: &[u8]) {
    for edit in input.chunks_exact(3) {
        let offset = usize::from(u16::from_le_bytes([edit[0], edit[1]])) % bytes.len();
        bytes[offset] = edit[2];
    }
}

/// A file of sections with sound checksums: what `input` holds after a zero, else `base` with the
/// edits that it describes. `None` of no input.
pub fn damaged(base: &[u8], input: &[u8]) -> Option<Vec<u8>> {
    let (kind, rest) = input.split_first()?;
    if *kind != 0 {
        return Some(edited(base, rest));
    }
    let mut bytes = rest.to_vec();
    repair(&mut bytes);
    Some(bytes)
}

/// `base`, a file of sections, with the edits of `input` and sound checksums.
fn edited(base: &[u8], input: &[u8]) -> Vec<u8> {
    let mut bytes = base.to_vec();
    edits(&mut bytes, input);
    repair(&mut bytes);
    bytes
}

/// Takes the nodes of a seed, and forgets them.
pub struct Nowhere;

impl NodeSink for Nowhere {
    fn write(&self, _: u64, _: &[u8]) -> burgeon_block::Result<()> {
        Ok(())
    }
}

/// Computes all checksums of a file of sections anew, as far as its table makes sense.
fn repair(bytes: &mut [u8]) {
    if bytes.len() < HEADER {
        return;
    }
    let sections = u32_at(bytes, 12) as usize;
    let table = HEADER + ENTRY * sections;
    if sections > SECTIONS_MAX || table > bytes.len() {
        return;
    }
    for entry in (HEADER..table).step_by(ENTRY) {
        let (start, len) = (u64_at(bytes, entry + 8) as usize, u64_at(bytes, entry + 16) as usize);
        let stored = start.checked_add(len).and_then(|end| bytes.get(start..end));
        let Some(sum) = stored.map(|stored| xxhash_rust::xxh64::xxh64(stored, 0)) else { continue };
        bytes[entry + 32..entry + 40].copy_from_slice(&sum.to_le_bytes());
    }
    bytes[HEADER - 8..HEADER].fill(0);
    let sum = xxhash_rust::xxh64::xxh64(&bytes[..table], 0);
    bytes[HEADER - 8..HEADER].copy_from_slice(&sum.to_le_bytes());
}

/// The same file of sections with nothing compressed.
pub fn unpacked(bytes: &[u8]) -> Vec<u8> {
    let sections = u32_at(bytes, 12) as usize;
    let mut out = bytes[..HEADER + ENTRY * sections].to_vec();
    for entry in (HEADER..HEADER + ENTRY * sections).step_by(ENTRY) {
        let (start, len) = (u64_at(bytes, entry + 8) as usize, u64_at(bytes, entry + 16) as usize);
        let raw_len = u64_at(bytes, entry + 24) as usize;
        let stored = &bytes[start..start + len];
        let raw = match u32_at(bytes, entry + 4) {
            0 => stored.to_vec(),
            _ => frames(stored, raw_len),
        };
        let offset = out.len() as u64;
        out[entry + 4..entry + 8].fill(0);
        out[entry + 8..entry + 16].copy_from_slice(&offset.to_le_bytes());
        out[entry + 16..entry + 24].copy_from_slice(&(raw.len() as u64).to_le_bytes());
        out.extend(raw);
    }
    let len = out.len() as u64;
    out[40..48].copy_from_slice(&len.to_le_bytes());
    repair(&mut out);
    out
}

fn frames(stored: &[u8], raw_len: usize) -> Vec<u8> {
    let count = raw_len.div_ceil(FRAME);
    let mut at = 4 * count;
    let mut raw = Vec::new();
    for frame in 0..count {
        let len = u32_at(stored, 4 * frame) as usize;
        raw.extend(zstd::bulk::decompress(&stored[at..at + len], FRAME).expect("a sound frame"));
        at += len;
    }
    raw
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"))
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"))
}

/// A manifest with one of everything.
pub fn sample() -> Manifest {
    let mut tree = Tree::default();
    let mut add = |parent: u32, name: &[u8], mode: u32, edit: &dyn Fn(&mut Tree, &mut Inode)| {
        let mut inode = Inode { mode, mtime_s: 1_700_000_000, mtime_ns: 5, ..Inode::default() };
        edit(&mut tree, &mut inode);
        let number = tree.inodes.len() as u32;
        tree.inodes.push(inode);
        if number > 0 {
            let name = tree.push_bytes(name).expect("short");
            tree.dirents.push(Dirent { parent, inode: number, name });
        }
        number
    };
    add(0, b"", 0o40755, &|_, _| {});
    let folder = add(0, b"folder", 0o40700, &|_, _| {});
    add(0, b"large", 0o100644, &|tree, inode| {
        inode.size = 3 * 4096 - 5;
        inode.body = InodeBody::Extents { first: tree.extents.len() as u32, count: 2 };
        tree.extents.push(FileExtent { file_offset: 0, address: DATA_START, len: 4096 });
        tree.extents.push(FileExtent { file_offset: 8192, address: DATA_START + 8192, len: 4096 });
    });
    add(0, b"null", 0o20666, &|_, inode| inode.rdev = 1 << 20 | 3);
    add(0, b"link", 0o120777, &|tree, inode| {
        inode.body = InodeBody::Inline(tree.push_bytes(b"folder/small").expect("short"));
        inode.size = 12;
    });
    let twice = add(0, b"twice", 0o100600, &|tree, inode| {
        inode.size = 4096;
        inode.body = InodeBody::Extents { first: tree.extents.len() as u32, count: 1 };
        tree.extents.push(FileExtent { file_offset: 0, address: DATA_START, len: 4096 });
    });
    add(folder, b"small", 0o104755, &|tree, inode| {
        inode.body = InodeBody::Inline(tree.push_bytes(b"inline").expect("short"));
        inode.size = 6;
        inode.xattr_first = tree.xattrs.len() as u32;
        inode.xattr_count = 2;
        for (name, value) in [("user.one", "value"), ("user.two", "")] {
            let name = tree.push_bytes(name.as_bytes()).expect("short");
            let value = tree.push_bytes(value.as_bytes()).expect("short");
            tree.xattrs.push(Xattr { name, value });
        }
    });
    let name = tree.push_bytes(b"once more").expect("short");
    tree.dirents.push(Dirent { parent: folder, inode: twice, name });
    let chunk = |blocks: u8, start: u64, codec| ChunkEntry {
        blocks,
        object: 0,
        stored: ByteRange::at(start, 1000).expect("short"),
        codec,
        digest: Digest::of(&[blocks]),
    };
    Manifest {
        tree,
        checksum: ChecksumKind::Crc32c,
        chunks: vec![chunk(2, 64, Codec::Zstd), chunk(1, 2000, Codec::Raw)],
        objects: vec![ObjectId::new(format!("packs/{}", Digest::of(b"pack"))).expect("a name")],
        block_checksums: vec![7; 3 * 4],
    }
}
