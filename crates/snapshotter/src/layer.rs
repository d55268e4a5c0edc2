//! Writes changes as a layer of an image: a tar archive as containerd's own differ writes it.
//!
//! ```text
//!   removed a/b          ─► a/, a/.wh.b
//!   a/c, new or changed  ─► a/, a/c and its data      one inode with several names: links to the first
//! ```
//!
//! Invariants: the folders that an entry lies in come before it, each once; a file that several
//! names share comes once, with its data, if one of them is new or changed; at most [`PATHS_MAX`]
//! bytes of paths are remembered.

use std::{
    collections::{HashMap, HashSet},
    ffi::{CStr, CString},
    io::{self, Write},
    os::fd::{AsFd, OwnedFd},
};

use rustix::fs::{FileType, Stat, fstat, major, minor, readlinkat};

use crate::{
    tar::{Header, Kind, Tar},
    tree::{attribute, is_folder, kind, open_file, open_folder},
};

/// Most bytes of the paths of folders and of files with several names.
const PATHS_MAX: usize = 128 << 20;

/// The latest time of an entry: seconds since 1970, and nanoseconds.
pub(crate) type Epoch = (i64, i64);

/// A layer that is being written.
#[derive(Debug)]
pub(crate) struct LayerWriter<W> {
    tar: Tar<W>,
    /// The changed tree.
    root: OwnedFd,
    epoch: Option<Epoch>,
    /// Folders that were written.
    folders: HashSet<Vec<u8>>,
    /// The first written name of a file with several names.
    first: HashMap<(u64, u64), Vec<u8>>,
    /// Unchanged names of such a file, which become links once it is written.
    waiting: HashMap<(u64, u64), Vec<Vec<u8>>>,
    /// Bytes of all these paths.
    remembered: usize,
}

impl<W: Write> LayerWriter<W> {
    /// A layer with entries of the tree `root`, none newer than `epoch`.
    pub(crate) fn new(to: W, root: OwnedFd, epoch: Option<Epoch>) -> Self {
        let tar = Tar::new(to);
        let (folders, first, waiting) = Default::default();
        Self { tar, root, epoch, folders, first, waiting, remembered: 0 }
    }

    /// An entry of the layers below is gone.
    pub(crate) fn remove(&mut self, path: &[u8]) -> io::Result<()> {
        let name = path.iter().rposition(|byte| *byte == b'/').map_or(0, |at| at + 1);
        let hidden = [&path[..name], b".wh.", &path[name..]].concat();
        self.enter(&hidden)?;
        self.tar.entry(&Header::whiteout(hidden), io::empty())
    }

    /// An entry in `folder` is new or changed. One that is `same` is written only if another name
    /// of it is.
    pub(crate) fn add(
        &mut self,
        (folder, name): (&OwnedFd, &CStr),
        path: &[u8],
        stat: &Stat,
        same: bool,
    ) -> io::Result<()> {
        if kind(stat) == FileType::Socket {
            return Ok(());
        }
        let is_shared = !is_folder(stat) && stat.st_nlink > 1;
        let id = (stat.st_dev, stat.st_ino);
        let mut links = Vec::new();
        if is_shared {
            if let Some(first) = self.first.get(&id) {
                let link = first.clone();
                let header = self.header((folder, name), path, stat)?;
                return self.link(header, path, link);
            }
            self.remember(path)?;
            if same {
                self.waiting.entry(id).or_default().push(path.to_owned());
                return Ok(());
            }
            self.first.insert(id, path.to_owned());
            links = self.waiting.remove(&id).unwrap_or_default();
        } else if same {
            return Ok(());
        }
        self.enter(path)?;
        let mut header = self.header((folder, name), path, stat)?;
        match header.kind {
            Kind::File => {
                let file = open_file(folder, name)?;
                // It may have grown since: its size is that of the open file.
                header.size = file.metadata()?.len();
                self.tar.entry(&header, file)?;
            }
            _ => self.tar.entry(&header, io::empty())?,
        }
        if header.kind == Kind::Folder {
            self.remember(path)?;
            self.folders.insert(path.to_owned());
        }
        links.into_iter().try_for_each(|link| self.link(header.clone(), &link, path.to_owned()))
    }

    fn link(&mut self, mut header: Header, path: &[u8], to: Vec<u8>) -> io::Result<()> {
        self.enter(path)?;
        (header.path, header.kind, header.link, header.size) =
            (path.to_owned(), Kind::HardLink, to, 0);
        self.tar.entry(&header, io::empty())
    }

    /// Writes the folders that the path lies in, if they were not.
    fn enter(&mut self, path: &[u8]) -> io::Result<()> {
        let Some(end) = path.iter().rposition(|byte| *byte == b'/') else { return Ok(()) };
        if self.folders.contains(&path[..end]) {
            return Ok(());
        }
        let mut at = self.root.try_clone()?;
        let mut begin = 0;
        while begin < end {
            let slash = path[begin..].iter().position(|byte| *byte == b'/');
            let here = slash.map_or(end, |slash| begin + slash);
            let name = CString::new(&path[begin..here])?;
            let next = open_folder(&at, &name)?;
            if !self.folders.contains(&path[..here]) {
                let header = self.header((&at, &name), &path[..here], &fstat(&next)?)?;
                self.tar.entry(&header, io::empty())?;
                self.remember(&path[..here])?;
                self.folders.insert(path[..here].to_owned());
            }
            (at, begin) = (next, here + 1);
        }
        Ok(())
    }

    fn header(
        &self,
        (folder, name): (&OwnedFd, &CStr),
        path: &[u8],
        stat: &Stat,
    ) -> io::Result<Header> {
        let mut path = path.to_owned();
        let mut link = Vec::new();
        let kind = match kind(stat) {
            FileType::RegularFile => Kind::File,
            FileType::Directory => Kind::Folder,
            FileType::Symlink => Kind::Symlink,
            FileType::CharacterDevice => Kind::CharacterDevice,
            FileType::BlockDevice => Kind::BlockDevice,
            FileType::Fifo => Kind::Fifo,
            other => return Err(io::Error::other(format!("an entry of the kind {other:?}"))),
        };
        match kind {
            Kind::Folder => path.push(b'/'),
            Kind::Symlink => link = readlinkat(folder, name, Vec::new())?.into_bytes(),
            _ => {}
        }
        let is_device = matches!(kind, Kind::CharacterDevice | Kind::BlockDevice);
        let device = if is_device { (major(stat.st_rdev), minor(stat.st_rdev)) } else { (0, 0) };
        let time = (stat.st_mtime, stat.st_mtime_nsec as i64);
        Ok(Header {
            path,
            kind,
            link,
            mode: stat.st_mode & 0o7777,
            uid: stat.st_uid,
            gid: stat.st_gid,
            size: 0,
            modified: self.epoch.map_or(time, |epoch| time.min(epoch)).0,
            device,
            capability: attribute(folder.as_fd(), name, c"security.capability")?,
        })
    }

    fn remember(&mut self, path: &[u8]) -> io::Result<()> {
        self.remembered += path.len() + size_of::<[u64; 8]>();
        match self.remembered > PATHS_MAX {
            true => Err(io::Error::other(format!(
                "the paths of its changed folders and linked files take more than {PATHS_MAX} bytes"
            ))),
            false => Ok(()),
        }
    }

    /// Writes the end.
    pub(crate) fn finish(self) -> io::Result<W> {
        self.tar.finish()
    }
}
