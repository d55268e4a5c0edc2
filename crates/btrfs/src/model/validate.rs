//! Converts an untrusted `Tree` to a [`Model`]: checks every rule and derives the indexes.

use burgeon_block::Result;
use rayon::prelude::*;

use super::{Merged, Model};
use crate::{
    format::{
        DIR_ENTRY, FILE_TYPE_DIRECTORY, INLINE_MAX, ITEM_HEADER, ITEM_MAX, LINK_MAX, NAME_MAX,
        XATTR_MAX, file_type, name_hash,
    },
    invalid,
    tree::{BlobRange, Inode, InodeBody, Tree},
};

/// The VFS's largest file.
const SIZE_MAX: u64 = i64::MAX as u64;
const NONE: u32 = u32::MAX;

impl<'a> Model<'a> {
    /// Checks `tree`. `bytes_max` limits its metadata, and therefore the work of checking.
    pub(crate) fn new(tree: &'a Tree, bytes_max: u64) -> Result<Self> {
        if tree.inodes.is_empty() {
            return Err(invalid("the tree has no root directory"));
        }
        // Inode numbers, dirents and links are kept in 32 bits.
        let counts = [tree.inodes.len(), tree.dirents.len(), tree.extents.len(), tree.xattrs.len()];
        if counts.iter().any(|count| *count >= NONE as usize) {
            return Err(invalid("the tree has more than 2^32 - 2 inodes, names or extents"));
        }
        // Inodes may share attributes: few stored ones can become many.
        let xattrs: u64 = tree.inodes.iter().map(|inode| u64::from(inode.xattr_count)).sum();
        if xattrs.saturating_mul((ITEM_HEADER + DIR_ENTRY) as u64) > bytes_max {
            return Err(invalid(format!("the tree needs {xattrs} extended attributes: too many")));
        }
        let inode = |(i, inode): (usize, &Inode)| {
            check_inode(tree, inode).map_err(|why| invalid(format!("inode {i}: {why}")))
        };
        tree.inodes.par_iter().enumerate().try_for_each(inode)?;
        if file_type(tree.inodes[0].mode) != Some(FILE_TYPE_DIRECTORY) {
            return Err(invalid("inode 0, the root, is not a directory"));
        }
        let hash = |dirent: usize| {
            let hash = check_dirent(tree, dirent)
                .map_err(|why| invalid(format!("directory entry {dirent}: {why}")))?;
            Ok(u64::from(hash) << 32 | dirent as u64)
        };
        let hashed = (0..tree.dirents.len()).into_par_iter().map(hash).collect::<Result<_>>()?;
        let mut model = Self {
            tree,
            children: vec![0; tree.inodes.len()],
            child_count: vec![0; tree.inodes.len()],
            dir_size: vec![0; tree.inodes.len()],
            hashed,
            link_start: vec![0; tree.inodes.len() + 1],
            links: vec![0; tree.dirents.len()],
        };
        model.group_children()?;
        model.sort_names()?;
        model.index_links()?;
        model.check_reachable()?;
        model.check_merged()?;
        Ok(model)
    }

    fn group_children(&mut self) -> Result<()> {
        let dirents = &self.tree.dirents;
        let mut first = 0;
        for group in dirents.chunk_by(|a, b| a.parent == b.parent) {
            let parent = group[0].parent as usize;
            if self.child_count[parent] != 0 {
                return Err(invalid(format!(
                    "directory entry {first}: the names of directory {parent} are not side by side"
                )));
            }
            self.children[parent] = first;
            self.child_count[parent] = group.len() as u32;
            self.dir_size[parent] = group.iter().map(|d| 2 * u64::from(d.name.len)).sum();
            first += group.len() as u32;
        }
        Ok(())
    }

    fn sort_names(&mut self) -> Result<()> {
        const PARALLEL: usize = 1 << 15;
        let mut hashed = std::mem::take(&mut self.hashed);
        let mut directories = Vec::new();
        let mut rest = &mut hashed[..];
        for group in self.tree.dirents.chunk_by(|a, b| a.parent == b.parent) {
            let (directory, after) = rest.split_at_mut(group.len());
            directories.push(directory);
            rest = after;
        }
        directories.par_iter_mut().try_for_each(|directory| {
            if directory.len() > PARALLEL {
                directory.par_sort_unstable();
            } else {
                directory.sort_unstable();
            }
            self.check_same_hash(directory)
        })?;
        self.hashed = hashed;
        Ok(())
    }

    /// Names with the same hash share a DIR_ITEM: they must fit, and differ.
    fn check_same_hash(&self, directory: &[u64]) -> Result<()> {
        for same in directory.chunk_by(|a, b| a >> 32 == b >> 32).filter(|same| same.len() > 1) {
            let names = || same.iter().map(|packed| self.name(*packed as u32 as usize));
            let directory = self.tree.dirents[same[0] as u32 as usize].parent;
            if names().map(|name| DIR_ENTRY + name.len()).sum::<usize>() > ITEM_MAX {
                return Err(invalid(format!(
                    "directory {directory}: too many names with one hash, such as {:?}",
                    self.name(same[0] as u32 as usize).escape_ascii().to_string()
                )));
            }
            for (i, name) in names().enumerate() {
                if names().take(i).any(|other| other == name) {
                    return Err(invalid(format!(
                        "directory {directory}: the name \"{}\" is there twice",
                        name.escape_ascii()
                    )));
                }
            }
        }
        Ok(())
    }

    fn index_links(&mut self) -> Result<()> {
        let mut count = vec![0u32; self.inodes()];
        self.tree.dirents.iter().for_each(|dirent| count[dirent.inode as usize] += 1);
        for (i, &count) in count.iter().enumerate() {
            let most = match (i, self.is_dir(i)) {
                (0, _) => 0,
                (_, true) => 1,
                _ => LINK_MAX,
            };
            if count > most || (count == 0 && i != 0) {
                return Err(invalid(format!("inode {i} has {count} names; at most {most} may be")));
            }
            self.link_start[i + 1] = self.link_start[i] + count;
        }
        let mut next = self.link_start.clone();
        for (i, dirent) in self.tree.dirents.iter().enumerate() {
            let slot = &mut next[dirent.inode as usize];
            self.links[*slot as usize] = i as u32;
            *slot += 1;
        }
        Ok(())
    }

    /// Every directory has one parent; it is reachable unless the chain of parents is a cycle.
    fn check_reachable(&self) -> Result<()> {
        let mut reached = vec![false; self.inodes()];
        reached[0] = true;
        let mut way = Vec::new();
        for start in (0..self.inodes()).filter(|&i| self.is_dir(i)) {
            let mut at = start;
            while !reached[at] {
                // Marked in advance: a cycle then ends here, not at the root.
                reached[at] = true;
                way.push(at);
                at = self.tree.dirents[self.links(at)[0] as usize].parent as usize;
            }
            if way.contains(&at) {
                return Err(invalid(format!("directory {at} is inside itself")));
            }
            way.clear();
        }
        Ok(())
    }

    fn check_merged(&self) -> Result<()> {
        let fits = |i: usize, what: &str, items: &[Merged<usize>]| match items
            .iter()
            .find(|item| item.len > ITEM_MAX)
        {
            Some(_) => Err(invalid(format!("inode {i}: too many {what} with one hash"))),
            None => Ok(()),
        };
        (0..self.inodes()).into_par_iter().try_for_each(|i| {
            if self.links(i).len() > 1 {
                fits(i, "names", &self.link_items(i).extrefs)?;
            }
            if self.inode(i).xattr_count > 1 {
                let items = self.xattr_items(i);
                fits(i, "extended attributes", &items)?;
                self.check_xattrs_differ(i, &items)?;
            }
            Ok(())
        })
    }

    fn check_xattrs_differ(&self, inode: usize, items: &[Merged<usize>]) -> Result<()> {
        for item in items {
            let name = |xattr: usize| self.span(self.tree.xattrs[xattr].name);
            for (i, &xattr) in item.members.iter().enumerate() {
                if item.members[..i].iter().any(|&other| name(other) == name(xattr)) {
                    return Err(invalid(format!(
                        "inode {inode}: the extended attribute \"{}\" is there twice",
                        name(xattr).escape_ascii()
                    )));
                }
            }
        }
        Ok(())
    }
}

/// A range of one of the tree's arrays; the error describes an invalid range.
fn entries<'t, T>(all: &'t [T], first: u32, count: u32, what: &str) -> Result<&'t [T], String> {
    let range = first as usize..first as usize + count as usize;
    all.get(range).ok_or_else(|| format!("its {what} are beyond the end of the table"))
}

fn bytes<'t>(tree: &'t Tree, span: BlobRange, what: &str) -> Result<&'t [u8], String> {
    let beyond = || format!("its {what} is beyond the end of the blob");
    let start = usize::try_from(span.start).map_err(|_| beyond())?;
    let end = start.checked_add(span.len as usize).ok_or_else(beyond)?;
    tree.blob.get(start..end).ok_or_else(beyond)
}

fn check_inode(tree: &Tree, inode: &Inode) -> Result<(), String> {
    let Some(kind) = file_type(inode.mode).filter(|_| inode.mode & !0o177777 == 0) else {
        return Err(format!("{:o} is not a file mode", inode.mode));
    };
    if inode.mtime_ns >= 1_000_000_000 {
        return Err(format!("{} nanoseconds are a second or more", inode.mtime_ns));
    }
    let is_device = matches!(kind, 3 | 4);
    if inode.rdev > u64::from(if is_device { u32::MAX } else { 0 }) {
        return Err(format!("its device number {:#x} is too large or not a device's", inode.rdev));
    }
    let is_file = kind == 1;
    if inode.size > SIZE_MAX || (inode.size > 0 && !matches!(kind, 1 | 7)) {
        return Err(format!("it cannot be {} bytes long", inode.size));
    }
    match inode.body {
        InodeBody::None if kind == 7 => return Err("a symlink needs a target".into()),
        InodeBody::None => {}
        InodeBody::Inline(span) => {
            let content = bytes(tree, span, "content")?;
            if !matches!(kind, 1 | 7) || u64::from(span.len) != inode.size || span.len > INLINE_MAX
            {
                return Err(format!("{} bytes inline do not fit it", span.len));
            }
            if kind == 7 && (content.is_empty() || content.contains(&0)) {
                return Err("its target is empty or contains a zero byte".into());
            }
        }
        InodeBody::Extents { first, count } if is_file => {
            entries(&tree.extents, first, count, "extents")?;
        }
        InodeBody::Extents { .. } => return Err("only a file can have extents".into()),
    }
    if inode.nodatasum && !is_file {
        return Err("only a file can go without checksums".into());
    }
    entries(&tree.xattrs, inode.xattr_first, inode.xattr_count, "extended attributes")?
        .iter()
        .try_for_each(|xattr| {
            let name = bytes(tree, xattr.name, "extended attribute's name")?;
            let value = bytes(tree, xattr.value, "extended attribute's value")?;
            let fits = name.len() <= NAME_MAX && name.len() + value.len() <= XATTR_MAX;
            if name.is_empty() || name.contains(&0) || !fits {
                return Err("an extended attribute's name or value is empty or too long".into());
            }
            Ok(())
        })
}

/// Checks one directory entry and returns its name's hash.
fn check_dirent(tree: &Tree, dirent: usize) -> Result<u32, String> {
    let dirent = &tree.dirents[dirent];
    let name = bytes(tree, dirent.name, "name")?;
    let bad_byte = name.iter().any(|byte| matches!(byte, 0 | b'/'));
    if name.is_empty() || name.len() > NAME_MAX || bad_byte || matches!(name, b"." | b"..") {
        return Err(format!("\"{}\" is not a file name", name.escape_ascii()));
    }
    if dirent.inode as usize >= tree.inodes.len() {
        return Err(format!("there is no inode {}", dirent.inode));
    }
    match tree.inodes.get(dirent.parent as usize) {
        Some(parent) if file_type(parent.mode) == Some(FILE_TYPE_DIRECTORY) => Ok(name_hash(name)),
        _ => Err(format!("its parent {} is not a directory", dirent.parent)),
    }
}
