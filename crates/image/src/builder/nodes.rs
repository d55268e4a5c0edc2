//! The tree while it is being built, before inodes have their numbers.

use burgeon_block::Result;
use burgeon_btrfs::{BlobRange, DATA_START, Dirent, FileExtent, Inode, InodeBody, Tree, Xattr};

use super::{
    assemble::{Extent, Placed},
    xattrs::Xattrs,
};
use crate::invalid;

pub(super) const S_IFMT: u32 = 0o170000;
pub(super) const S_IFDIR: u32 = 0o040000;
pub(super) const S_IFREG: u32 = 0o100000;
pub(super) const S_IFLNK: u32 = 0o120000;
pub(super) const S_IFCHR: u32 = 0o020000;
pub(super) const S_IFBLK: u32 = 0o060000;

/// A file of any type.
#[derive(Clone, Debug, Default)]
pub(super) struct Node {
    pub(super) mode: u32,
    pub(super) uid: u32,
    pub(super) gid: u32,
    pub(super) rdev: u64,
    pub(super) size: u64,
    pub(super) mtime_s: i64,
    pub(super) mtime_ns: u32,
    /// Target of a symlink.
    pub(super) target: Box<[u8]>,
    /// Names and values, sorted by name.
    pub(super) xattrs: Xattrs,
    /// Names in a directory, sorted.
    pub(super) children: Vec<(Box<[u8]>, u32)>,
}

impl Node {
    pub(super) fn kind(&self) -> u32 {
        self.mode & S_IFMT
    }

    pub(super) fn is_dir(&self) -> bool {
        self.kind() == S_IFDIR
    }
}

/// A device number in btrfs's encoding.
pub(super) fn rdev(major: u32, minor: u32) -> u64 {
    u64::from(major) << 20 | u64::from(minor)
}

/// Inode numbers: a directory's entries one after another, by name, then its subdirectories, so
/// that files listed together are adjacent.
pub(super) struct Numbering {
    /// Node of each inode.
    pub(super) order: Vec<u32>,
    /// Directory (inode), child (inode), and the child's index in its node's list.
    dirents: Vec<(u32, u32, u32)>,
}

impl Numbering {
    /// Numbers the nodes that are reachable from node 0.
    pub(super) fn of(nodes: &[Node]) -> Self {
        let mut number_of = vec![u32::MAX; nodes.len()];
        let mut numbering = Self { order: vec![0], dirents: Vec::with_capacity(nodes.len()) };
        let mut stack = vec![0u32];
        if let Some(root) = number_of.first_mut() {
            *root = 0;
        }
        while let Some(dir) = stack.pop() {
            let first_of_dir = stack.len();
            for (place, (_, child)) in (0u32..).zip(&nodes[dir as usize].children) {
                let number = &mut number_of[*child as usize];
                if *number == u32::MAX {
                    *number = numbering.order.len() as u32;
                    numbering.order.push(*child);
                    if nodes[*child as usize].is_dir() {
                        stack.push(*child);
                    }
                }
                numbering.dirents.push((
                    number_of[dir as usize],
                    number_of[*child as usize],
                    place,
                ));
            }
            stack[first_of_dir..].reverse();
        }
        numbering
    }
}

/// Makes the tree of `nodes`; `placed` holds the positions of the files' bytes, `addresses` the
/// address of each chunk.
pub(super) fn finish(nodes: &[Node], mut placed: Placed, addresses: &[u64]) -> Result<Tree> {
    let numbering = Numbering::of(nodes);
    placed.extents.sort_by_key(|extent| (extent.node, extent.file_offset));
    placed.inline.sort_by_key(|(node, _)| *node);
    let mut tree = Tree::default();
    for (parent, inode, place) in &numbering.dirents {
        let dir = &nodes[numbering.order[*parent as usize] as usize];
        let name = push(&mut tree, &dir.children[*place as usize].0)?;
        tree.dirents.push(Dirent { parent: *parent, inode: *inode, name });
    }
    for number in &numbering.order {
        let node = &nodes[*number as usize];
        let body = body(&mut tree, *number, node, &placed, addresses)?;
        let xattr_first = if node.xattrs.is_empty() { 0 } else { tree.xattrs.len() as u32 };
        for (name, value) in &node.xattrs {
            let xattr = Xattr { name: push(&mut tree, name)?, value: push(&mut tree, value)? };
            tree.xattrs.push(xattr);
        }
        tree.inodes.push(Inode {
            mode: node.mode,
            uid: node.uid,
            gid: node.gid,
            rdev: node.rdev,
            size: if node.kind() == S_IFLNK { node.target.len() as u64 } else { node.size },
            mtime_s: node.mtime_s,
            mtime_ns: node.mtime_ns,
            body,
            xattr_first,
            xattr_count: node.xattrs.len() as u32,
            nodatasum: false,
        });
    }
    Ok(tree)
}

fn push(tree: &mut Tree, bytes: &[u8]) -> Result<BlobRange> {
    tree.push_bytes(bytes).ok_or_else(|| {
        invalid(format!(
            "a name, an attribute or a link's target in the source has {} bytes, above the limit \
             of 4 GiB: shorten it there and build again",
            bytes.len()
        ))
    })
}

fn body(
    tree: &mut Tree,
    number: u32,
    node: &Node,
    placed: &Placed,
    addresses: &[u64],
) -> Result<InodeBody> {
    if node.kind() == S_IFLNK {
        return Ok(InodeBody::Inline(push(tree, &node.target)?));
    }
    if node.kind() != S_IFREG {
        return Ok(InodeBody::None);
    }
    if let Ok(index) = placed.inline.binary_search_by_key(&number, |(node, _)| *node) {
        return Ok(InodeBody::Inline(push(tree, &placed.inline[index].1)?));
    }
    let start = placed.extents.partition_point(|extent| extent.node < number);
    let first = tree.extents.len() as u32;
    for extent in placed.extents[start..].iter().take_while(|extent| extent.node == number) {
        push_extent(&mut tree.extents, first, extent, addresses);
    }
    match tree.extents.len() as u32 - first {
        0 => Ok(InodeBody::None),
        count => Ok(InodeBody::Extents { first, count }),
    }
}

/// Appends `extent`, or extends the file's last one if both file offset and address are
/// contiguous.
fn push_extent(extents: &mut Vec<FileExtent>, first: u32, extent: &Extent, addresses: &[u64]) {
    let address = addresses.get(extent.chunk as usize).copied().unwrap_or(DATA_START);
    let address = address + u64::from(extent.offset);
    let (file_offset, len) = (extent.file_offset, u64::from(extent.len));
    if let Some(last) = extents[first as usize..].last_mut()
        && last.file_offset + last.len == file_offset
        && last.address + last.len == address
    {
        last.len += len;
        return;
    }
    extents.push(FileExtent { file_offset, address, len });
}
