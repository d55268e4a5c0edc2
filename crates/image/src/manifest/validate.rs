//! The rules for manifests. A manifest that breaks any is refused as a whole, before it is
//! mounted.
//!
//! Names: 1 to 255 bytes, no `/`, no NUL, neither `.` nor `..`, unique in their directory. Every
//! inode can be reached from the root, a directory by exactly one name, so there is no cycle.
//! Extents of a file are in order, do not overlap, end within the file, and lie in the lazy
//! address space, which the chunks fill without a gap. Nothing exceeds btrfs's limits.

use std::collections::HashSet;

use burgeon_block::{ObjectKind, Result};
use burgeon_btrfs::{FileExtent, Inode, InodeBody};

use super::*;
use crate::{CHUNK_MAX, FILE_MAX, INLINE_MAX, XATTR_MAX, corrupt, invalid, paths::path_of};

const S_IFMT: u32 = 0o170000;
const S_IFDIR: u32 = 0o040000;
const S_IFREG: u32 = 0o100000;
const S_IFLNK: u32 = 0o120000;
const S_IFCHR: u32 = 0o020000;
const S_IFBLK: u32 = 0o060000;
const S_IFIFO: u32 = 0o010000;
const S_IFSOCK: u32 = 0o140000;

const SYMLINK_MAX: u64 = 4095;
/// btrfs's BTRFS_LINK_MAX.
const LINK_MAX: u32 = 65535;

impl Manifest {
    /// Checks every rule. `Corrupt` names the broken rule, `Invalid` the exceeded limit.
    pub fn validate(&self, limits: &ManifestLimits) -> Result<()> {
        let blocks = (self.block_checksums.len() / self.checksum.size()) as u64;
        chunk_table(&self.chunks, &self.objects, Some(blocks))?;
        if !self.block_checksums.len().is_multiple_of(self.checksum.size()) {
            return Err(corrupt("the block checksums are cut short"));
        }
        self.tree_of_names()?;
        let (data, lacks_checksums) = (self.data_range(), self.lacks_checksums());
        if lacks_checksums && self.block_checksums.iter().any(|byte| *byte != 0) {
            return Err(corrupt("the manifest has checksums of blocks that nobody has read"));
        }
        for (number, inode) in self.tree.inodes.iter().enumerate() {
            let claims = lacks_checksums
                && matches!(inode.body, InodeBody::Extents { .. })
                && !inode.nodatasum;
            let fits = match check_inode(&self.tree, inode, data) {
                Ok(()) if claims => Err("its file has checksums, but the manifest has none"),
                fits => fits,
            };
            fits.map_err(|why| {
                corrupt(format!("inode {number} ({}): {why}", path_of(&self.tree, number as u32)))
            })?;
        }
        self.item_count(limits)
    }

    /// Names and the shape of the tree.
    fn tree_of_names(&self) -> Result<()> {
        let tree = &self.tree;
        let is_dir = |inode: u32| {
            tree.inodes.get(inode as usize).is_some_and(|inode| inode.mode & S_IFMT == S_IFDIR)
        };
        if !is_dir(0) {
            return Err(corrupt("the manifest's tree has no root directory"));
        }
        let mut links = vec![0u32; tree.inodes.len()];
        let mut parent_of = vec![0u32; tree.inodes.len()];
        let mut listed = vec![false; tree.inodes.len()];
        for group in tree.dirents.chunk_by(|a, b| a.parent == b.parent) {
            let parent = group[0].parent;
            if !is_dir(parent) || std::mem::replace(&mut listed[parent as usize], true) {
                return Err(corrupt(format!(
                    "names in inode {parent}, which is not a directory or is listed twice"
                )));
            }
            let mut names = HashSet::with_capacity(group.len());
            for dirent in group {
                let name = tree.bytes(dirent.name);
                check_name(name)?;
                if !names.insert(name) {
                    let name = String::from_utf8_lossy(name);
                    return Err(corrupt(format!("the name {name:?} is twice in one directory")));
                }
                let Some(count) = links.get_mut(dirent.inode as usize) else {
                    return Err(corrupt("a name of the manifest stands for no inode"));
                };
                *count += 1;
                parent_of[dirent.inode as usize] = parent;
            }
        }
        for (inode, links) in (0u32..).zip(&links) {
            let right = match inode {
                0 => *links == 0,
                _ if is_dir(inode) => *links == 1,
                _ => (1..=LINK_MAX).contains(links),
            };
            if !right {
                return Err(corrupt(format!("inode {inode} has {links} names")));
            }
        }
        self.no_cycle(&parent_of)
    }

    /// Every directory's chain of parents ends at the root.
    fn no_cycle(&self, parent_of: &[u32]) -> Result<()> {
        // Number of the walk that visited each directory, 0 for none; the root ends every walk.
        let mut walk_of = vec![0; parent_of.len()];
        walk_of[0] = u32::MAX;
        for (walk, start) in (1u32..).zip(0..parent_of.len()) {
            let mut at = start;
            while walk_of[at] == 0 {
                walk_of[at] = walk;
                at = parent_of[at] as usize;
            }
            if walk_of[at] == walk {
                return Err(corrupt("directories of the manifest contain each other"));
            }
        }
        Ok(())
    }

    /// Bounds the number of extent items: the btrfs writer cuts every extent wherever another one
    /// begins or ends.
    fn item_count(&self, limits: &ManifestLimits) -> Result<()> {
        let extents = &self.tree.extents;
        let mut cuts: Vec<u64> = extents
            .iter()
            .flat_map(|extent| [extent.address, extent.address + extent.len])
            .collect();
        cuts.sort_unstable();
        cuts.dedup();
        let inside = |extent: &FileExtent| {
            let first = cuts.partition_point(|cut| *cut <= extent.address);
            let last = cuts.partition_point(|cut| *cut < extent.address + extent.len);
            // Plus one for each border of a data chunk or longest extent (128 MiB).
            (last - first) as u64 + 1 + (extent.len >> 27)
        };
        let items = extents.iter().fold(0u64, |sum, extent| sum.saturating_add(inside(extent)));
        if items > limits.items_max {
            return Err(invalid(format!(
                "the image's files share data in {items} pieces, above the limit"
            )));
        }
        Ok(())
    }
}

/// Checks the chunk table against the objects and, if given, the number of blocks.
pub(super) fn chunk_table(
    chunks: &[ChunkEntry],
    objects: &[ObjectId],
    blocks: Option<u64>,
) -> Result<()> {
    for object in objects {
        check_object(object)?;
    }
    let mut total = 0;
    for (index, chunk) in chunks.iter().enumerate() {
        let stored = chunk.stored.len();
        let stored_fits = match chunk.codec {
            Codec::Raw | Codec::Verified => {
                stored <= chunk.len() && stored + BLOCK_SIZE > chunk.len()
            }
            Codec::Zstd => stored < chunk.len(),
        };
        let blocks_fit = (1..=CHUNK_MAX as u64 / BLOCK_SIZE).contains(&chunk.blocks.into());
        let object_fits = (chunk.object as usize) < objects.len();
        // Only derived objects have tables with digests of their own.
        let source_fits = chunk.codec != Codec::Verified
            || object_fits && objects[chunk.object as usize].is(ObjectKind::Derived);
        if !blocks_fit || !object_fits || !stored_fits || !source_fits || stored == 0 {
            return Err(corrupt(format!("chunk {index} of the manifest is impossible: {chunk:?}")));
        }
        total += u64::from(chunk.blocks);
    }
    match blocks {
        Some(blocks) if blocks != total => {
            Err(corrupt("the chunks do not fill the lazy address space"))
        }
        _ => Ok(()),
    }
}

/// An object that holds chunks must be a pack of the store, an object outside it, or derived from
/// objects outside it.
fn check_object(object: &ObjectId) -> Result<()> {
    let fits = match object.kind() {
        Some(kind @ (ObjectKind::Pack | ObjectKind::Derived)) => object.digest(kind).is_some(),
        Some(ObjectKind::File | ObjectKind::Computed) => true,
        _ => false,
    };
    if fits { Ok(()) } else { Err(corrupt(format!("{object} cannot hold chunks"))) }
}

fn check_name(name: &[u8]) -> Result<()> {
    let fits = (1..=255).contains(&name.len())
        && name != b"."
        && name != b".."
        && !name.contains(&b'/')
        && !name.contains(&0);
    if fits {
        return Ok(());
    }
    Err(corrupt(format!("{:?} is not a file name", String::from_utf8_lossy(name))))
}

fn check_inode(tree: &Tree, inode: &Inode, data: ByteRange) -> Result<(), &'static str> {
    let kind = inode.mode & S_IFMT;
    if inode.mode & !(S_IFMT | 0o7777) != 0 || inode.mtime_ns >= 1_000_000_000 {
        return Err("its mode or time does not exist");
    }
    if inode.rdev != 0 && kind != S_IFCHR && kind != S_IFBLK {
        return Err("it has a device number but is not a device");
    }
    match (kind, inode.body) {
        (S_IFDIR | S_IFCHR | S_IFBLK | S_IFIFO | S_IFSOCK, InodeBody::None) if inode.size == 0 => {}
        (S_IFREG, _) if inode.size > FILE_MAX => return Err("it is longer than a file can be"),
        (S_IFREG, InodeBody::None) => {}
        (S_IFREG, InodeBody::Inline(span))
            if inode.size == u64::from(span.len) && (1..=INLINE_MAX).contains(&span.len) => {}
        (S_IFREG, InodeBody::Extents { .. }) => check_extents(inode, tree.extents_of(inode), data)?,
        (S_IFLNK, InodeBody::Inline(span))
            if inode.size == u64::from(span.len)
                && (1..=SYMLINK_MAX).contains(&inode.size)
                && !tree.bytes(span).contains(&0) => {}
        _ => return Err("its type, size and content do not fit"),
    }
    check_xattrs(tree, inode)
}

fn check_extents(
    inode: &Inode,
    extents: &[FileExtent],
    data: ByteRange,
) -> Result<(), &'static str> {
    let mut end = 0;
    for extent in extents {
        let aligned = [extent.file_offset, extent.address, extent.len]
            .iter()
            .all(|value| value.is_multiple_of(BLOCK_SIZE));
        let range = ByteRange::at(extent.address, extent.len);
        if !aligned || extent.len == 0 || !range.is_some_and(|range| data.covers(range)) {
            return Err("an extent lies outside the lazy data");
        }
        if extent.file_offset < end {
            return Err("its extents overlap or are out of order");
        }
        end = extent.file_offset.checked_add(extent.len).ok_or("an extent ends nowhere")?;
    }
    match end <= inode.size.next_multiple_of(BLOCK_SIZE) && !extents.is_empty() {
        true => Ok(()),
        false => Err("an extent lies beyond its end"),
    }
}

fn check_xattrs(tree: &Tree, inode: &Inode) -> Result<(), &'static str> {
    let xattrs = tree.xattrs_of(inode);
    if xattrs.len() != inode.xattr_count as usize || xattrs.len() > usize::from(u16::MAX) {
        return Err("its xattrs are missing or too many");
    }
    let mut names = HashSet::with_capacity(xattrs.len());
    for xattr in xattrs {
        let (name, value) = (tree.bytes(xattr.name), tree.bytes(xattr.value));
        if name.is_empty() || name.len() > 255 || name.contains(&0) {
            return Err("an xattr has no possible name");
        }
        if name.len() + value.len() > XATTR_MAX {
            return Err("an xattr is too long");
        }
        if !names.insert(name) {
            return Err("two xattrs have one name");
        }
    }
    Ok(())
}
