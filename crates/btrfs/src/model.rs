//! The checked tree: a `Tree` and facts derived from it (links to each inode, and their order).
//! Code with a [`Model`] need not check again.

mod links;
mod validate;

use crate::{
    format::{FILE_TYPE_DIRECTORY, file_type},
    tree::{BlobRange, Inode, Tree},
};

/// A tree that satisfies every rule stated in `tree.rs`, indexed.
pub(crate) struct Model<'a> {
    pub(crate) tree: &'a Tree,
    /// For each inode, its first entry in `dirents` if it is a directory: `children[i] ..
    /// children[i] + child_count[i]`.
    children: Vec<u32>,
    child_count: Vec<u32>,
    /// For each directory, 2 × the length of all names in it: its size.
    dir_size: Vec<u64>,
    /// Parallel to `dirents`: hash << 32 | dirent, ascending within each directory.
    hashed: Vec<u64>,
    /// `links[link_start[i]..link_start[i + 1]]` are the dirents that name inode `i`, ascending.
    link_start: Vec<u32>,
    links: Vec<u32>,
}

/// Several names that share one key, and therefore one item.
pub(crate) struct Merged<T> {
    pub(crate) key_offset: u64,
    pub(crate) len: usize,
    pub(crate) members: Vec<T>,
}

impl Model<'_> {
    pub(crate) fn inodes(&self) -> usize {
        self.tree.inodes.len()
    }

    pub(crate) fn inode(&self, inode: usize) -> &Inode {
        &self.tree.inodes[inode]
    }

    pub(crate) fn is_dir(&self, inode: usize) -> bool {
        file_type(self.inode(inode).mode) == Some(FILE_TYPE_DIRECTORY)
    }

    /// The dirents of a directory, as indices.
    pub(crate) fn children(&self, inode: usize) -> std::ops::Range<usize> {
        let first = self.children[inode] as usize;
        first..first + self.child_count[inode] as usize
    }

    /// The size of a directory, as btrfs counts it.
    pub(crate) fn dir_size(&self, inode: usize) -> u64 {
        self.dir_size[inode]
    }

    /// Hash and dirent of entries `range` of all dirents, sorted by hash within each directory.
    pub(crate) fn hashed(
        &self,
        range: std::ops::Range<usize>,
    ) -> impl Iterator<Item = (u32, usize)> + '_ {
        self.hashed[range].iter().map(|packed| ((packed >> 32) as u32, *packed as u32 as usize))
    }

    /// The key offset of a dirent's DIR_INDEX. 0 and 1 stand for `.` and `..`.
    pub(crate) fn dir_index(&self, dirent: usize) -> u64 {
        let parent = self.tree.dirents[dirent].parent as usize;
        2 + (dirent - self.children[parent] as usize) as u64
    }

    /// The dirents that name an inode.
    pub(crate) fn links(&self, inode: usize) -> &[u32] {
        &self.links[self.link_start[inode] as usize..self.link_start[inode + 1] as usize]
    }

    pub(crate) fn span(&self, span: BlobRange) -> &[u8] {
        self.tree.bytes(span)
    }

    pub(crate) fn name(&self, dirent: usize) -> &[u8] {
        self.span(self.tree.dirents[dirent].name)
    }
}
