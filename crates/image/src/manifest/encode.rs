use burgeon_block::{Digest, Result};
use burgeon_btrfs::{BlobRange, FileExtent, Inode, InodeBody, Tree, Xattr};
use zerocopy::IntoBytes;

use super::*;
use crate::{
    columns::Writer,
    container::{self, Section},
    objects,
};

impl Manifest {
    /// The manifest's bytes, compressed with zstd at `level`, and their digest, which is the
    /// image's identity. `Invalid` if the manifest breaks a rule of [`Self::decode`].
    pub fn encode(&self, level: i32) -> Result<(Vec<u8>, Digest)> {
        self.validate(&ManifestLimits::default())?;
        let tree = &self.tree;
        let (names, inline, xattr_bytes) = (names(tree), bodies(tree), xattr_bytes(tree));
        let objects = objects::encode(&self.objects);
        let params = Params {
            inodes: (tree.inodes.len() as u64).into(),
            dirents: (tree.dirents.len() as u64).into(),
            names_len: (names.len() as u64).into(),
            inline_len: (inline.len() as u64).into(),
            extents: (all_extents(tree).count() as u64).into(),
            xattrs: (all_xattrs(tree).count() as u64).into(),
            xattr_bytes_len: (xattr_bytes.len() as u64).into(),
            chunks: (self.chunks.len() as u64).into(),
            blocks: ((self.block_checksums.len() / self.checksum.size()) as u64).into(),
            objects: (self.objects.len() as u64).into(),
            objects_len: (objects.len() as u64).into(),
            checksum_kind: (self.checksum as u16).into(),
            reserved: [0; 6],
        };
        let zstd = |kind, raw| Section { kind, raw, level: Some(level) };
        let plain = |kind, raw| Section { kind, raw, level: None };
        let digests = self.chunks.iter().flat_map(|chunk| *chunk.digest.as_bytes()).collect();
        let sections = vec![
            plain(PARAMS, params.as_bytes().to_vec()),
            zstd(INODES, inodes(tree)),
            zstd(DIRENTS, dirents(tree)),
            zstd(NAMES, names),
            zstd(INLINE, inline),
            zstd(EXTENTS, extents(tree)),
            zstd(XATTRS, xattrs(tree)),
            zstd(XATTR_BYTES, xattr_bytes),
            zstd(CHUNKS, chunks(&self.chunks)),
            plain(DIGESTS, digests),
            plain(CHECKSUMS, self.block_checksums.clone()),
            zstd(OBJECTS, objects),
        ];
        let bytes = container::encode(FORMAT, sections)?;
        let digest = Digest::of(&bytes);
        Ok((bytes, digest))
    }
}

/// Extents in the order of their inodes, which is the order of the format.
fn all_extents(tree: &Tree) -> impl Iterator<Item = &FileExtent> {
    tree.inodes.iter().flat_map(|inode| tree.extents_of(inode))
}

/// Xattrs in the order of their inodes.
fn all_xattrs(tree: &Tree) -> impl Iterator<Item = &Xattr> {
    tree.inodes.iter().flat_map(|inode| tree.xattrs_of(inode))
}

fn names(tree: &Tree) -> Vec<u8> {
    tree.dirents.iter().flat_map(|dirent| tree.bytes(dirent.name)).copied().collect()
}

fn bodies(tree: &Tree) -> Vec<u8> {
    let mut bytes = Vec::new();
    for inode in &tree.inodes {
        if let InodeBody::Inline(span) = inode.body {
            bytes.extend_from_slice(tree.bytes(span));
        }
    }
    bytes
}

fn xattr_bytes(tree: &Tree) -> Vec<u8> {
    let mut bytes = Vec::new();
    for xattr in all_xattrs(tree) {
        bytes.extend_from_slice(tree.bytes(xattr.name));
        bytes.extend_from_slice(tree.bytes(xattr.value));
    }
    bytes
}

fn inodes(tree: &Tree) -> Vec<u8> {
    let all = || tree.inodes.iter();
    let mut writer = Writer::new(&INODE_WIDTHS, tree.inodes.len());
    writer.column(2, all().map(|inode| inode.mode.into()));
    writer.column(4, all().map(|inode| inode.uid.into()));
    writer.column(4, all().map(|inode| inode.gid.into()));
    writer.column(8, all().map(|inode| inode.rdev));
    writer.column(8, all().map(|inode| inode.size));
    writer.column(8, all().map(|inode| inode.mtime_s as u64));
    writer.column(4, all().map(|inode| inode.mtime_ns.into()));
    writer.column(1, all().map(body_byte));
    writer.column(
        4,
        all().map(|inode| match inode.body {
            InodeBody::Extents { count, .. } => count.into(),
            InodeBody::None | InodeBody::Inline(_) => 0,
        }),
    );
    writer.column(2, all().map(|inode| inode.xattr_count.into()));
    writer.finish()
}

fn body_byte(inode: &Inode) -> u64 {
    let body = match inode.body {
        InodeBody::None => BODY_NONE,
        InodeBody::Inline(_) => BODY_INLINE,
        InodeBody::Extents { .. } => BODY_EXTENTS,
    };
    body | if inode.nodatasum { NODATASUM } else { 0 }
}

fn dirents(tree: &Tree) -> Vec<u8> {
    let all = || tree.dirents.iter();
    let mut writer = Writer::new(&DIRENT_WIDTHS, tree.dirents.len());
    writer.column(4, deltas(all().map(|dirent| dirent.parent)));
    writer.column(4, deltas(all().map(|dirent| dirent.inode)));
    writer.column(1, all().map(|dirent| dirent.name.len.into()));
    writer.finish()
}

/// Differences of consecutive values: mostly 0 or 1 if neighbours belong together.
fn deltas(values: impl Iterator<Item = u32>) -> impl Iterator<Item = u64> {
    let mut before = 0;
    values.map(move |value: u32| {
        let delta = value.wrapping_sub(before);
        before = value;
        delta.into()
    })
}

fn extents(tree: &Tree) -> Vec<u8> {
    let all = || all_extents(tree);
    let mut writer = Writer::new(&EXTENT_WIDTHS, all().count());
    writer.column(8, all().map(|extent| extent.file_offset / BLOCK_SIZE));
    let mut expected = DATA_START;
    let addresses = all().map(|extent| {
        let delta = extent.address.wrapping_sub(expected);
        expected = extent.address.wrapping_add(extent.len);
        delta
    });
    writer.column(8, addresses);
    writer.column(8, all().map(|extent| extent.len / BLOCK_SIZE));
    writer.finish()
}

fn xattrs(tree: &Tree) -> Vec<u8> {
    let all = || all_xattrs(tree);
    let mut writer = Writer::new(&XATTR_WIDTHS, all().count());
    writer.column(1, all().map(|xattr| len(xattr.name)));
    writer.column(2, all().map(|xattr| len(xattr.value)));
    writer.finish()
}

fn len(span: BlobRange) -> u64 {
    span.len.into()
}

fn chunks(chunks: &[ChunkEntry]) -> Vec<u8> {
    let mut writer = Writer::new(&CHUNK_WIDTHS, chunks.len());
    writer.column(1, chunks.iter().map(|chunk| chunk.blocks.into()));
    writer.column(1, chunks.iter().map(|chunk| chunk.codec as u64));
    writer.column(4, deltas(chunks.iter().map(|chunk| chunk.object)));
    let mut expected = 0;
    let starts = chunks.iter().map(|chunk| {
        let delta = chunk.stored.start().wrapping_sub(expected);
        expected = chunk.stored.end();
        delta
    });
    writer.column(8, starts);
    writer.column(4, chunks.iter().map(|chunk| chunk.stored.len()));
    writer.finish()
}
