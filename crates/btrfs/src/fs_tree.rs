//! The subvolume's tree: inodes, names, attributes, file extents.
//!
//! Items of an inode, by key: INODE_ITEM, INODE_REF…, INODE_EXTREF…, XATTR_ITEM…, then for a
//! directory DIR_ITEM (by hash) and DIR_INDEX (by order), for a file or symlink EXTENT_DATA.

use std::ops::Range;

use crate::{
    FIRST_INODE,
    extents::{Extents, Run},
    format::{
        DIR_ENTRY, EXTREF_HEAD, FILE_TYPE_XATTR, GENERATION, INODE_ITEM_LEN, INODE_NODATASUM,
        INODE_REF_HEAD, InodeFields, Key, Put, file_type, kind, put_dir_entry,
    },
    model::Model,
    nodes::{ItemOut, Items, SEGMENT_BYTES},
    tree::InodeBody,
};

const EXTENT_DATA_LEN: usize = 53;
const INLINE_HEAD: usize = 21;
const EXTENT_INLINE: u8 = 0;
const EXTENT_REGULAR: u8 = 1;

/// A segment of the tree's items. Inodes are not split unless one fills a segment by itself.
enum FsSegment {
    Inodes(Range<usize>),
    /// INODE_ITEM, names and attributes of one inode.
    Head(usize),
    /// DIR_ITEMs of a directory: a range of `Model::hashed`.
    DirItems(usize, Range<usize>),
    /// DIR_INDEXes of a directory: a range of dirents.
    DirIndexes(usize, Range<usize>),
    /// EXTENT_DATA of a file: a range of its runs.
    Runs(usize, Range<usize>),
}

pub(crate) struct FsTree<'a> {
    model: &'a Model<'a>,
    extents: &'a Extents,
    segments: Vec<FsSegment>,
}

impl Items for FsTree<'_> {
    fn segments(&self) -> usize {
        self.segments.len()
    }

    fn emit(&self, segment: usize, out: &mut impl ItemOut) {
        match &self.segments[segment] {
            FsSegment::Inodes(range) => range.clone().for_each(|inode| self.inode(inode, out)),
            FsSegment::Head(inode) => self.head(*inode, out),
            FsSegment::DirItems(inode, range) => self.dir_items(*inode, range.clone(), out),
            FsSegment::DirIndexes(inode, range) => self.dir_indexes(*inode, range.clone(), out),
            FsSegment::Runs(inode, range) => {
                let runs = &self.extents.runs(*inode)[range.clone()];
                runs.iter().for_each(|run| self.run(*inode, run, out));
            }
        }
    }
}

impl<'a> FsTree<'a> {
    pub(crate) fn new(model: &'a Model<'a>, extents: &'a Extents) -> Self {
        let mut tree = Self { model, extents, segments: Vec::new() };
        let (mut first, mut bytes) = (0, 0);
        for inode in 0..model.inodes() {
            let (head, rest) = tree.cost(inode);
            if rest > SEGMENT_BYTES {
                tree.push_inodes(first..inode);
                tree.split(inode);
                (first, bytes) = (inode + 1, 0);
                continue;
            }
            if bytes + head + rest > SEGMENT_BYTES {
                tree.push_inodes(first..inode);
                (first, bytes) = (inode, 0);
            }
            bytes += head + rest;
        }
        tree.push_inodes(first..model.inodes());
        tree
    }

    /// Approximate bytes of the tree's leaves: a lower bound that is cheap to compute.
    pub(crate) fn bytes(&self) -> u64 {
        (0..self.model.inodes())
            .map(|inode| self.cost(inode))
            .fold(0, |sum, (head, rest)| sum + head + rest)
    }

    fn push_inodes(&mut self, range: Range<usize>) {
        if !range.is_empty() {
            self.segments.push(FsSegment::Inodes(range));
        }
    }

    /// Approximate bytes of an inode's items: its head, and the items that a [`FsSegment`] can
    /// split.
    fn cost(&self, i: usize) -> (u64, u64) {
        const ITEM: u64 = 25;
        let inode = self.model.inode(i);
        let names = self.model.links(i).len() as u64 * 48;
        let xattrs = self.model.tree.xattrs_of(inode);
        let xattrs = xattrs.iter().map(|x| 55 + u64::from(x.name.len) + u64::from(x.value.len));
        let head = ITEM + INODE_ITEM_LEN as u64 + names + xattrs.sum::<u64>();
        let rest = if self.model.is_dir(i) {
            2 * 55 * self.model.children(i).len() as u64 + self.model.dir_size(i)
        } else if let InodeBody::Inline(span) = inode.body {
            ITEM + (INLINE_HEAD as u64) + u64::from(span.len)
        } else {
            self.extents.count(i) * (ITEM + EXTENT_DATA_LEN as u64)
        };
        (head, rest)
    }

    fn split(&mut self, inode: usize) {
        // With names of ten bytes this many entries or runs fill a segment.
        const ENTRIES: usize = (SEGMENT_BYTES / 65) as usize;
        self.segments.push(FsSegment::Head(inode));
        if self.model.is_dir(inode) {
            let all = self.model.children(inode);
            let mut start = all.start;
            while start < all.end {
                let mut end = (start + ENTRIES).min(all.end);
                // Names with the same hash share an item.
                let hash = |at: usize| self.model.hashed(at..at + 1).next().map(|(hash, _)| hash);
                while end < all.end && hash(end) == hash(end - 1) {
                    end += 1;
                }
                self.segments.push(FsSegment::DirItems(inode, start..end));
                start = end;
            }
            for start in all.clone().step_by(ENTRIES) {
                let range = start..(start + ENTRIES).min(all.end);
                self.segments.push(FsSegment::DirIndexes(inode, range));
            }
        } else {
            let runs = self.extents.runs(inode).len();
            for start in (0..runs).step_by(ENTRIES) {
                self.segments.push(FsSegment::Runs(inode, start..(start + ENTRIES).min(runs)));
            }
        }
    }

    fn inode(&self, inode: usize, out: &mut impl ItemOut) {
        self.head(inode, out);
        if self.model.is_dir(inode) {
            let all = self.model.children(inode);
            self.dir_items(inode, all.clone(), out);
            self.dir_indexes(inode, all, out);
            return;
        }
        match self.model.inode(inode).body {
            InodeBody::Inline(span) if span.len > 0 => {
                let content = self.model.span(span);
                let key = Key::new(objectid(inode), kind::EXTENT_DATA, 0);
                out.item(key, INLINE_HEAD + content.len(), |to| {
                    let mut put = Put::new(to);
                    put.u64s(&[GENERATION, content.len() as u64]).zeros(4).u8(EXTENT_INLINE);
                    put.bytes(content).end();
                });
            }
            _ => self.extents.runs(inode).iter().for_each(|run| self.run(inode, run, out)),
        }
    }

    fn head(&self, i: usize, out: &mut impl ItemOut) {
        out.item(Key::new(objectid(i), kind::INODE_ITEM, 0), INODE_ITEM_LEN, |to| {
            self.fields(i).write(to);
        });
        self.refs(i, out);
        if self.model.inode(i).xattr_count > 0 {
            for item in self.model.xattr_items(i) {
                out.item(
                    Key::new(objectid(i), kind::XATTR_ITEM, item.key_offset),
                    item.len,
                    |to| {
                        let mut put = Put::new(to);
                        for xattr in &item.members {
                            let xattr = self.model.tree.xattrs[*xattr];
                            let (name, value) =
                                (self.model.span(xattr.name), self.model.span(xattr.value));
                            put_dir_entry(&mut put, Key::default(), FILE_TYPE_XATTR, name, value);
                        }
                        put.end();
                    },
                );
            }
        }
    }

    fn fields(&self, i: usize) -> InodeFields {
        let inode = self.model.inode(i);
        let (size, bytes) = match inode.body {
            _ if self.model.is_dir(i) => (self.model.dir_size(i), 0),
            InodeBody::Inline(_) => (inode.size, inode.size),
            _ => (inode.size, self.extents.bytes(i)),
        };
        InodeFields {
            size,
            bytes,
            links: self.model.links(i).len().max(1) as u32,
            uid: inode.uid,
            gid: inode.gid,
            mode: inode.mode,
            rdev: inode.rdev,
            flags: if inode.nodatasum { INODE_NODATASUM } else { 0 },
            time_s: inode.mtime_s,
            time_ns: inode.mtime_ns,
        }
    }

    fn refs(&self, i: usize, out: &mut impl ItemOut) {
        let put_ref = |put: &mut Put, link: usize| {
            let name = self.model.name(link);
            put.u64(self.model.dir_index(link)).u16(name.len() as u16).bytes(name);
        };
        match self.model.links(i) {
            [] => put_root_ref(out),
            [link] => {
                let link = *link as usize;
                let parent = objectid(self.model.tree.dirents[link].parent as usize);
                let len = INODE_REF_HEAD + self.model.name(link).len();
                out.item(Key::new(objectid(i), kind::INODE_REF, parent), len, |to| {
                    put_ref(&mut Put::new(to), link);
                });
            }
            _ => {
                let items = self.model.link_items(i);
                for item in &items.refs {
                    let key = Key::new(objectid(i), kind::INODE_REF, item.key_offset);
                    out.item(key, item.len, |to| {
                        let mut put = Put::new(to);
                        item.members.iter().for_each(|link| put_ref(&mut put, *link));
                        put.end();
                    });
                }
                for item in &items.extrefs {
                    let key = Key::new(objectid(i), kind::INODE_EXTREF, item.key_offset);
                    out.item(key, item.len, |to| {
                        let mut put = Put::new(to);
                        for link in &item.members {
                            put.u64(objectid(self.model.tree.dirents[*link].parent as usize));
                            put_ref(&mut put, *link);
                        }
                        put.end();
                    });
                }
            }
        }
    }

    fn put_entry(&self, put: &mut Put, dirent: usize) {
        let inode = self.model.tree.dirents[dirent].inode as usize;
        let location = Key::new(objectid(inode), kind::INODE_ITEM, 0);
        let kind = file_type(self.model.inode(inode).mode).unwrap_or(0);
        put_dir_entry(put, location, kind, self.model.name(dirent), &[]);
    }

    fn dir_items(&self, inode: usize, range: Range<usize>, out: &mut impl ItemOut) {
        let mut entries = self.model.hashed(range).peekable();
        let mut same = Vec::new();
        while let Some((hash, dirent)) = entries.next() {
            let key = Key::new(objectid(inode), kind::DIR_ITEM, u64::from(hash));
            let mut len = DIR_ENTRY + self.model.name(dirent).len();
            same.clear();
            while let Some((_, other)) = entries.next_if(|(other, _)| *other == hash) {
                len += DIR_ENTRY + self.model.name(other).len();
                same.push(other);
            }
            out.item(key, len, |to| {
                let mut put = Put::new(to);
                self.put_entry(&mut put, dirent);
                same.iter().for_each(|other| self.put_entry(&mut put, *other));
                put.end();
            });
        }
    }

    fn dir_indexes(&self, inode: usize, range: Range<usize>, out: &mut impl ItemOut) {
        for dirent in range {
            let key = Key::new(objectid(inode), kind::DIR_INDEX, self.model.dir_index(dirent));
            out.item(key, DIR_ENTRY + self.model.name(dirent).len(), |to| {
                self.put_entry(&mut Put::new(to), dirent);
            });
        }
    }

    fn run(&self, inode: usize, run: &Run, out: &mut impl ItemOut) {
        let mut offset = run.file_offset;
        for extent in &self.extents.all[run.extent as usize..][..run.extents as usize] {
            put_file_extent(objectid(inode), offset, extent.start, extent.len, out);
            offset += extent.len;
        }
    }
}

fn objectid(inode: usize) -> u64 {
    FIRST_INODE + inode as u64
}

/// Puts the whole extent at `start` at `offset` of a file.
pub(crate) fn put_file_extent(
    inode: u64,
    offset: u64,
    start: u64,
    len: u64,
    out: &mut impl ItemOut,
) {
    out.item(Key::new(inode, kind::EXTENT_DATA, offset), EXTENT_DATA_LEN, |to| {
        let mut put = Put::new(to);
        put.u64s(&[GENERATION, len]).zeros(4).u8(EXTENT_REGULAR);
        put.u64s(&[start, len, 0, len]).end();
    });
}

/// The INODE_REF of a tree's root directory: `..`, to itself.
pub(crate) fn put_root_ref(out: &mut impl ItemOut) {
    out.item(Key::new(FIRST_INODE, kind::INODE_REF, FIRST_INODE), INODE_REF_HEAD + 2, |to| {
        Put::new(to).u64(0).u16(2).bytes(b"..").end();
    });
}

const _: () = assert!(EXTREF_HEAD == INODE_REF_HEAD + 8);
