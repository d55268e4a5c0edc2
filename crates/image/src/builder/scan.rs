//! Reads the names and attributes of a directory tree.
//!
//! Level by level, all directories of a level in parallel. Every directory is opened below the
//! root without following symlinks, so a concurrent change to the tree cannot lead outside it.

use std::{
    collections::{HashMap, HashSet},
    ffi::{CString, OsStr},
    fs::File,
    io,
    os::{fd::AsFd, unix::ffi::OsStrExt},
    path::{Path, PathBuf},
};

use burgeon_block::{ByteRange, Error, ErrorKind, Result};
use rayon::prelude::*;
use rustix::{
    fs::{Access, AtFlags, Dir, Mode, OFlags, RawMode, Statx, StatxFlags},
    io::Errno,
};

use super::{
    Honours,
    nodes::{Node, Numbering, S_IFBLK, S_IFCHR, S_IFLNK, S_IFREG, rdev},
    xattrs,
};
use crate::{Profile, XATTR_MAX};

/// A scanned tree.
pub(super) struct Scan {
    pub(super) root: File,
    pub(super) root_path: PathBuf,
    pub(super) nodes: Vec<Node>,
    /// Regular files that have data, in the order in which they will be stored.
    pub(super) files: Vec<ScannedFile>,
    /// For each directory, its parent and its index there; the root has no entry.
    dir_names: HashMap<u32, (u32, u32)>,
    /// Mount points below the root; their contents were left out.
    pub(super) mounts: Vec<PathBuf>,
    /// Rights that the source's mount allows; `None` if several mounts may be involved.
    pub(super) honours: Option<Honours>,
    pub(super) bytes: u64,
}

/// A regular file that has data.
#[derive(Clone, Copy)]
pub(super) struct ScannedFile {
    pub(super) node: u32,
    dir: u32,
    place: u32,
    /// It may have holes.
    pub(super) sparse: bool,
}

/// The contents of one directory.
struct Listing {
    entries: Vec<(Box<[u8]>, Node, Statx)>,
    /// Files that this process may not read, and entries that cannot be stored.
    problems: Vec<(Box<[u8]>, Error)>,
    mounts: Vec<Box<[u8]>>,
}

impl Scan {
    /// Reads the tree below `path`. Fails with a list if something in it cannot be read.
    pub(super) fn read(path: &Path, cross_mounts: bool) -> Result<Self> {
        let cannot =
            |error: Errno| Error::io(format!("cannot read {}", path.display()), error.into());
        let flags = OFlags::DIRECTORY | OFlags::RDONLY | OFlags::CLOEXEC;
        let root = rustix::fs::open(path, flags, Mode::empty()).map_err(cannot)?;
        let statx = stat(root.as_fd(), c"", AtFlags::EMPTY_PATH).map_err(cannot)?;
        let mut node = node_of(&statx);
        node.xattrs = xattrs::of_open_file(root.as_fd()).map_err(cannot)?;
        let honours = (!cross_mounts).then(|| Honours::of(&root)).transpose()?;
        let mut scan = Self {
            root: root.into(),
            root_path: path.to_owned(),
            nodes: vec![node],
            files: Vec::new(),
            dir_names: HashMap::new(),
            mounts: Vec::new(),
            honours,
            bytes: 0,
        };
        let mount = (!cross_mounts).then_some(statx.stx_mnt_id);
        let mut links = HashMap::new();
        let mut sparse = HashSet::new();
        let mut problems = Vec::new();
        let mut level = vec![0];
        while !level.is_empty() {
            let listings: Vec<_> =
                level.par_iter().map(|dir| (*dir, scan.list(*dir, mount))).collect();
            level.clear();
            for (dir, listing) in listings {
                match listing {
                    Ok(listing) => {
                        scan.add(dir, listing, &mut links, &mut sparse, &mut level, &mut problems);
                    }
                    Err(error) => problems.push((scan.path_of(dir), error)),
                }
            }
        }
        refuse(&problems)?;
        scan.order_files(&sparse);
        Ok(scan)
    }

    fn add(
        &mut self,
        dir: u32,
        listing: Listing,
        links: &mut HashMap<(u32, u32, u64), u32>,
        sparse: &mut HashSet<u32>,
        level: &mut Vec<u32>,
        problems: &mut Vec<(PathBuf, Error)>,
    ) {
        let path = |scan: &Self, name: &[u8]| scan.path_of(dir).join(OsStr::from_bytes(name));
        for (name, error) in listing.problems {
            problems.push((path(self, &name), error));
        }
        self.mounts.extend(listing.mounts.iter().map(|name| path(self, name)).collect::<Vec<_>>());
        let mut children = Vec::with_capacity(listing.entries.len());
        for (place, (name, node, statx)) in (0u32..).zip(listing.entries) {
            let id = (statx.stx_dev_major, statx.stx_dev_minor, statx.stx_ino);
            let (is_dir, hard_linked) = (node.is_dir(), statx.stx_nlink > 1);
            let known = links.get(&id).filter(|_| hard_linked && !is_dir);
            if let Some(number) = known {
                children.push((name, *number));
                continue;
            }
            let number = self.nodes.len() as u32;
            if is_dir {
                self.dir_names.insert(number, (dir, place));
                // The contents of a mount point are not part of this tree.
                if !listing.mounts.contains(&name) {
                    level.push(number);
                }
            } else if hard_linked {
                links.insert(id, number);
            }
            if statx.stx_blocks.saturating_mul(512) < statx.stx_size {
                sparse.insert(number);
            }
            self.nodes.push(node);
            children.push((name, number));
        }
        self.nodes[dir as usize].children = children;
    }

    /// Orders files by inode number, so that those of one directory are adjacent.
    fn order_files(&mut self, sparse: &HashSet<u32>) {
        let mut seen = vec![false; self.nodes.len()];
        let mut files = Vec::new();
        let dirs = Numbering::of(&self.nodes).order;
        for dir in dirs.iter().filter(|dir| self.nodes[**dir as usize].is_dir()) {
            for (place, (_, node)) in (0u32..).zip(&self.nodes[*dir as usize].children) {
                let child = &self.nodes[*node as usize];
                let again = std::mem::replace(&mut seen[*node as usize], true);
                if !again && child.kind() == S_IFREG && child.size > 0 {
                    self.bytes = self.bytes.saturating_add(child.size);
                    let sparse = sparse.contains(node);
                    files.push(ScannedFile { node: *node, dir: *dir, place, sparse });
                }
            }
        }
        self.files = files;
    }

    /// The ranges of `profile` that exist in this tree: file number and range, in the profile's
    /// order.
    pub(super) fn find(&self, profile: &Profile) -> Vec<(usize, ByteRange)> {
        let number_of: HashMap<u32, usize> =
            self.files.iter().enumerate().map(|(number, file)| (file.node, number)).collect();
        let find = |path: &Vec<u8>| {
            let mut parts = path.split(|byte| *byte == b'/').filter(|part| !part.is_empty());
            let node = parts.try_fold(0u32, |at, part| {
                let children = &self.nodes[at as usize].children;
                let place = children.binary_search_by(|(name, _)| (**name).cmp(part)).ok()?;
                Some(children[place].1)
            });
            number_of.get(&node?).copied()
        };
        let files: Vec<_> = profile.files.iter().map(find).collect();
        let reads = profile.reads.iter().filter_map(|read| {
            Some((files[read.file as usize]?, ByteRange::at(read.offset, read.len)?))
        });
        reads.collect()
    }

    fn list(&self, dir: u32, mount: Option<u64>) -> Result<Listing> {
        let opened = self.open_dir(dir)?;
        let cannot = |error: Errno| Error::io("cannot list it", error.into());
        let mut names = Vec::new();
        for entry in Dir::read_from(&opened).map_err(cannot)? {
            let name = entry.map_err(cannot)?.file_name().to_owned();
            if name.as_c_str() != c"." && name.as_c_str() != c".." {
                names.push(name);
            }
        }
        names.sort();
        let mut listing =
            Listing { entries: Vec::with_capacity(names.len()), problems: vec![], mounts: vec![] };
        // A directory may have a million entries: process them in parallel.
        let entries: Vec<_> =
            names.par_iter().with_min_len(64).map(|name| entry(&opened, name)).collect();
        for (name, entry) in names.iter().zip(entries) {
            let bytes: Box<[u8]> = name.as_bytes().into();
            match entry {
                // Removed since it was listed: treated as if it had never been there.
                Err(error) if error.kind() == ErrorKind::NotFound => {}
                Err(error) => listing.problems.push((bytes, error)),
                Ok((node, statx)) => {
                    if node.is_dir() && mount.is_some_and(|mount| mount != statx.stx_mnt_id) {
                        listing.mounts.push(bytes.clone());
                    }
                    listing.entries.push((bytes, node, statx));
                }
            }
        }
        Ok(listing)
    }

    /// Opens a directory of the tree, component by component from the root if the path is too
    /// long for one call.
    pub(super) fn open_dir(&self, dir: u32) -> Result<File> {
        let cannot = |error: Errno| Error::io("cannot open it", error.into());
        let mut names = Vec::new();
        let mut at = dir;
        while let Some((parent, place)) = self.dir_names.get(&at) {
            names.push(&self.nodes[*parent as usize].children[*place as usize].0);
            at = *parent;
        }
        let flags = OFlags::DIRECTORY | OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        let mut opened =
            rustix::fs::openat(&self.root, c".", flags, Mode::empty()).map_err(cannot)?;
        for name in names.iter().rev() {
            opened = rustix::fs::openat(&opened, &***name, flags, Mode::empty()).map_err(cannot)?;
        }
        Ok(opened.into())
    }

    /// Opens a file for reading, in its directory `dir` (opened by [`Self::open_dir`]).
    pub(super) fn open_file(&self, dir: &File, file: &ScannedFile) -> io::Result<File> {
        let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOFOLLOW | OFlags::NONBLOCK;
        // Avoids changing access times where possible.
        let quiet =
            rustix::fs::openat(dir, self.name(file), flags | OFlags::NOATIME, Mode::empty());
        let opened = match quiet {
            Err(Errno::PERM) => rustix::fs::openat(dir, self.name(file), flags, Mode::empty()),
            result => result,
        };
        Ok(opened?.into())
    }

    /// The directory of `file`.
    pub(super) fn dir_of(&self, file: &ScannedFile) -> u32 {
        file.dir
    }

    fn name(&self, file: &ScannedFile) -> &[u8] {
        &self.nodes[file.dir as usize].children[file.place as usize].0
    }

    /// The path of `file`, for messages.
    pub(super) fn file_path(&self, file: &ScannedFile) -> PathBuf {
        self.path_of(file.dir).join(OsStr::from_bytes(self.name(file)))
    }

    /// The path of a directory, for messages.
    pub(super) fn path_of(&self, dir: u32) -> PathBuf {
        let mut names = Vec::new();
        let mut at = dir;
        while let Some((parent, place)) = self.dir_names.get(&at) {
            // A directory's entries are not in the tree while it is being added.
            let child = self.nodes[*parent as usize].children.get(*place as usize);
            names.push(child.map_or(&b"?"[..], |(name, _)| name));
            at = *parent;
        }
        let names = names.iter().rev().map(|name| OsStr::from_bytes(name));
        names.fold(self.root_path.clone(), |path, name| path.join(name))
    }
}

fn entry(dir: &File, name: &CString) -> Result<(Node, Statx)> {
    let cannot = |error: Errno| Error::io("cannot read its attributes", error.into());
    let statx = stat(dir.as_fd(), name, AtFlags::SYMLINK_NOFOLLOW).map_err(cannot)?;
    let mut node = node_of(&statx);
    if node.kind() == S_IFLNK {
        let target = rustix::fs::readlinkat(dir, name, Vec::new()).map_err(cannot)?;
        node.target = target.as_bytes().into();
    }
    node.xattrs = xattrs::of_entry(dir.as_fd(), name).map_err(cannot)?;
    for (name, value) in &node.xattrs {
        if name.len() + value.len() > XATTR_MAX {
            let name = String::from_utf8_lossy(name);
            let what =
                format!("its attribute {name} has {} bytes, more than btrfs can hold", value.len());
            return Err(Error::new(ErrorKind::Invalid, what));
        }
    }
    if node.kind() == S_IFREG && !rustix::process::geteuid().is_root() {
        let readable = rustix::fs::accessat(dir, name, Access::READ_OK, AtFlags::EACCESS);
        readable.map_err(|error| Error::io("cannot read it", error.into()))?;
    }
    Ok((node, statx))
}

fn stat(
    dir: std::os::fd::BorrowedFd<'_>,
    name: &std::ffi::CStr,
    flags: AtFlags,
) -> rustix::io::Result<Statx> {
    // STATX_MNT_ID (since Linux 5.8) distinguishes a mount point from a btrfs subvolume.
    const MNT_ID: StatxFlags = StatxFlags::MNT_ID;
    rustix::fs::statx(dir, name, flags, StatxFlags::BASIC_STATS | MNT_ID)
}

fn node_of(statx: &Statx) -> Node {
    let mode = RawMode::from(statx.stx_mode);
    let mut node = Node {
        mode,
        uid: statx.stx_uid,
        gid: statx.stx_gid,
        mtime_s: statx.stx_mtime.tv_sec,
        mtime_ns: statx.stx_mtime.tv_nsec,
        ..Node::default()
    };
    match node.kind() {
        S_IFREG => node.size = statx.stx_size,
        S_IFCHR | S_IFBLK => node.rdev = rdev(statx.stx_rdev_major, statx.stx_rdev_minor),
        _ => {}
    }
    node
}

/// Combines the errors into one that lists the first of them.
pub(super) fn refuse(problems: &[(PathBuf, Error)]) -> Result<()> {
    let Some((_, first)) = problems.first() else { return Ok(()) };
    const SHOWN: usize = 20;
    let mut what = format!("{} files cannot be put into an image:", problems.len());
    for (path, error) in problems.iter().take(SHOWN) {
        what += &format!("\n  {}: {error}", path.display());
    }
    if problems.len() > SHOWN {
        what += &format!("\n  and {} more", problems.len() - SHOWN);
    }
    if !rustix::process::geteuid().is_root() {
        what += "\nrun as root to read files of other users";
    }
    Err(Error::new(first.kind(), what))
}
