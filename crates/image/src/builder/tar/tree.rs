use std::collections::BTreeMap;

use burgeon_block::{Error, ErrorKind, MemoryMeter, Result};

use super::{
    super::nodes::{Node, S_IFBLK, S_IFCHR, S_IFDIR, S_IFLNK, S_IFREG, rdev},
    entry::{TarEntry, show},
    resolve::{self, Followed, Names, PATH_MAX},
};
use crate::{XATTR_MAX, corrupt};

const S_IFIFO: u32 = 0o010000;
/// Memory of a directory without an entry in the archive, without its name.
pub(super) const FOLDER_COST: u64 = 352;

/// The tree of an archive's entries. A later entry replaces an earlier one of the same name, as
/// in unpacking; a directory keeps its contents and takes the later attributes. A name below a
/// symlink belongs to the directory that the symlink leads to within the tree.
pub(super) struct ArchiveTree<'a> {
    meter: &'a MemoryMeter,
    nodes: Vec<Node>,
    /// Names in each node, if it is a directory.
    names: Vec<BTreeMap<Box<[u8]>, u32>>,
    followed: Followed,
    /// Files whose textual ACL was left out.
    pub(super) text_acls: u64,
}

impl<'a> ArchiveTree<'a> {
    pub(super) fn new(meter: &'a MemoryMeter) -> Self {
        let root = Node { mode: S_IFDIR | 0o755, ..Node::default() };
        let (nodes, names) = (vec![root], vec![BTreeMap::new()]);
        Self { meter, nodes, names, followed: Followed::default(), text_acls: 0 }
    }

    /// Adds an entry; returns its node if it is a regular file, whose data follows.
    pub(super) fn add(&mut self, entry: TarEntry) -> Result<Option<u32>> {
        let parts = safe_parts(&entry.path)?;
        self.text_acls += u64::from(entry.text_acl);
        if entry.kind == b'1' {
            return self.add_link(&entry, &parts).map(|()| None);
        }
        let node = node_of(&entry)?;
        let kind = node.kind();
        let number = self.put(&parts, node, &entry.path)?;
        Ok((kind == S_IFREG).then_some(number))
    }

    fn add_link(&mut self, entry: &TarEntry, path: &[&[u8]]) -> Result<()> {
        let wrong = || {
            corrupt(format!(
                "{} in the archive is a hard link to {}, which is not an earlier file of it",
                show(&entry.path),
                show(&entry.link)
            ))
        };
        let target = safe_parts(&entry.link).map_err(|_| wrong())?;
        let (name, parents) = target.split_last().ok_or_else(wrong)?;
        let dir = resolve::directory(self, parents, |_, _, _| Ok(None))?.ok_or_else(wrong)?;
        let target = self.child(dir, name).ok_or_else(wrong)?;
        if self.nodes[target as usize].is_dir() {
            return Err(wrong());
        }
        let (dir, name) = self.place(path, &entry.path)?;
        let before = self.child(dir, name);
        if before.is_some_and(|before| self.nodes[before as usize].is_dir()) {
            return Err(replaces_directory(&entry.path));
        }
        self.names[dir as usize].insert(name.into(), target);
        Ok(())
    }

    /// Puts `node` at `path`.
    fn put(&mut self, path: &[&[u8]], node: Node, shown: &[u8]) -> Result<u32> {
        if path.is_empty() {
            if !node.is_dir() {
                return Err(replaces_directory(b"/"));
            }
            self.nodes[0] = node;
            return Ok(0);
        }
        let (dir, name) = self.place(path, shown)?;
        if let Some(before) = self.child(dir, name)
            && self.nodes[before as usize].is_dir()
        {
            if !node.is_dir() {
                return Err(replaces_directory(shown));
            }
            self.nodes[before as usize] = node;
            return Ok(before);
        }
        let number = self.push(node)?;
        self.names[dir as usize].insert(name.into(), number);
        Ok(number)
    }

    /// The parent directory and the last name of `path`. Follows symlinks of the archive above the
    /// last name, and creates directories that the archive omits.
    fn place<'p>(&mut self, path: &[&'p [u8]], shown: &[u8]) -> Result<(u32, &'p [u8])> {
        let Some((name, parents)) = path.split_last() else {
            return Err(replaces_directory(b"/"));
        };
        let make = |tree: &mut Self, dir: u32, name: Box<[u8]>| {
            tree.meter.take(FOLDER_COST + 2 * name.len() as u64)?;
            let number = tree.push(Node { mode: S_IFDIR | 0o755, ..Node::default() })?;
            tree.names[dir as usize].insert(name, number);
            Ok(Some(number))
        };
        let not_there = || {
            corrupt(format!(
                "{} in the archive lies below something that is not a directory",
                show(shown)
            ))
        };
        let dir = resolve::directory(self, parents, make)?.ok_or_else(not_there)?;
        Ok((dir, name))
    }

    fn push(&mut self, node: Node) -> Result<u32> {
        let number = u32::try_from(self.nodes.len())
            .map_err(|_| Error::new(ErrorKind::Invalid, "the archive holds too many files"))?;
        self.nodes.push(node);
        self.names.push(BTreeMap::new());
        Ok(number)
    }

    /// The nodes, each directory's names sorted.
    pub(super) fn into_nodes(mut self) -> Vec<Node> {
        for (node, names) in self.nodes.iter_mut().zip(self.names) {
            node.children = names.into_iter().collect();
        }
        self.nodes
    }
}

impl Names for ArchiveTree<'_> {
    fn child(&self, dir: u32, name: &[u8]) -> Option<u32> {
        self.names[dir as usize].get(name).copied()
    }

    fn node(&self, number: u32) -> &Node {
        &self.nodes[number as usize]
    }

    fn followed(&mut self) -> &mut Followed {
        &mut self.followed
    }
}

/// The node of an entry that is not a hard link.
pub(super) fn node_of(entry: &TarEntry) -> Result<Node> {
    let wrong = |why: &str| corrupt(format!("{} in the archive {why}", show(&entry.path)));
    let kind = match entry.kind {
        _ if entry.is_regular() => S_IFREG,
        b'2' => S_IFLNK,
        b'3' => S_IFCHR,
        b'4' => S_IFBLK,
        b'5' | b'D' => S_IFDIR,
        b'6' => S_IFIFO,
        other => {
            let why = format!("has the type {:?}, which is unknown", char::from(other));
            return Err(wrong(&why));
        }
    };
    if kind == S_IFLNK && !(1..=4095).contains(&entry.link.len()) || entry.link.contains(&0) {
        return Err(wrong("is a symlink to nothing, or to a name above 4095 bytes"));
    }
    if entry.xattrs.iter().any(|(name, value)| {
        name.len() > 255 || name.contains(&0) || name.len() + value.len() > XATTR_MAX
    }) {
        let what = format!("{} has an attribute longer than btrfs can hold", show(&entry.path));
        return Err(Error::new(ErrorKind::Invalid, what));
    }
    let device = kind == S_IFCHR || kind == S_IFBLK;
    // Linux has 12 bits of one and 20 of the other. A longer minor number would change the major.
    if device && (entry.major > 0xfff || entry.minor > 0xf_ffff) {
        let (major, minor) = (entry.major, entry.minor);
        return Err(wrong(&format!(
            "is the device {major}:{minor}; Linux has none above 4095:1048575: leave it out of \
             the archive"
        )));
    }
    Ok(Node {
        mode: kind | entry.mode,
        uid: entry.uid,
        gid: entry.gid,
        rdev: if device { rdev(entry.major, entry.minor) } else { 0 },
        size: if kind == S_IFREG { entry.size } else { 0 },
        mtime_s: entry.mtime_s,
        mtime_ns: entry.mtime_ns,
        target: if kind == S_IFLNK { entry.link.as_slice().into() } else { [].into() },
        xattrs: entry.xattrs.clone(),
        children: Vec::new(),
    })
}

pub(super) fn unsafe_name(path: &[u8]) -> Error {
    let what = "is not a safe name: absolute, with `..`, empty, or longer than 255 bytes a part";
    corrupt(format!("{} in the archive {what}", show(path)))
}

fn replaces_directory(path: &[u8]) -> Error {
    corrupt(format!("{} in the archive replaces a directory by something else", show(path)))
}

/// The components of a path that is safe and valid in Linux.
pub(super) fn safe_parts(path: &[u8]) -> Result<Vec<&[u8]>> {
    if path.len() > PATH_MAX {
        let len = path.len();
        return Err(corrupt(format!(
            "a path in the archive has {len} bytes, above the limit of {PATH_MAX}"
        )));
    }
    parts(path).ok_or_else(|| unsafe_name(path))
}

/// The components of a path of an archive; `None` if it is not safe.
fn parts(path: &[u8]) -> Option<Vec<&[u8]>> {
    if path.is_empty() || path.starts_with(b"/") || path.contains(&0) {
        return None;
    }
    let parts = path.split(|byte| *byte == b'/').filter(|part| !part.is_empty() && *part != b".");
    let parts: Vec<_> = parts.collect();
    parts.iter().all(|part| *part != b".." && part.len() <= 255).then_some(parts)
}
