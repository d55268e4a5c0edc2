//! Walks a tree by descriptor, and appends each of its files to an archive.
//!
//! ```text
//!   folder ─► entry (O_PATH, no symlink followed) ─► statx, attributes ─► file: its ranges of data
//!                                                                         folder: goes on there
//!   after a file or folder was read: statx again ─► differs ─► named as changed
//! ```
//! The archive gets exactly the bytes that the entry's header announces, also of a file that was
//! truncated meanwhile.

use std::{
    collections::HashMap,
    fs::File,
    os::{
        fd::{AsFd, AsRawFd, OwnedFd},
        unix::fs::FileExt,
    },
    path::PathBuf,
};

use anyhow::Result;
use burgeon_block::Error;
use burgeon_image::builder::xattrs_of;
use rustix::{
    fs::{
        AtFlags, Dir, FileType, Mode, OFlags, SeekFrom, Statx, StatxFlags, openat, readlinkat,
        seek, statx,
    },
    io::Errno,
    process::{Resource, getrlimit, setrlimit},
};

use super::{
    archive::{Archive, ArchiveEntry, Content},
    text,
};

/// Bytes of a file that are read at once.
const PIECE: usize = 1 << 20;

/// Most ranges of data of one file; data and holes after that are stored as one range.
const RANGES_MAX: usize = 1 << 20;

/// Most changed files whose names are kept; each is printed.
const NAMED_MAX: usize = 1000;

/// Open files of a walk: one for each folder above the present one, in trees of the greatest depth.
const OPEN_MAX: u64 = 8192;

/// The result of a walk.
#[derive(Default)]
pub(super) struct Walked {
    pub(super) entries: u64,
    /// Number of files and folders that changed while they were read.
    pub(super) changed: u64,
    /// The first of them.
    pub(super) named: Vec<Vec<u8>>,
    /// Sockets, which an archive cannot hold.
    pub(super) sockets: u64,
}

pub(super) struct Walk<'a> {
    /// The tree, for messages.
    shown: &'a str,
    archive: &'a mut Archive,
    /// The path in the archive of the first name of a file with several, and the number of its
    /// names to come, by device and inode.
    linked: HashMap<(u32, u32, u64), (Vec<u8>, u32)>,
    buffer: Vec<u8>,
    walked: Walked,
}

/// A folder that is being read.
struct Folder {
    open: OwnedFd,
    names: Dir,
    stat: Statx,
    /// Its path in the archive, with a slash at the end; empty for the root.
    path: Vec<u8>,
}

impl<'a> Walk<'a> {
    pub(super) fn new(shown: &'a str, archive: &'a mut Archive) -> Self {
        let (linked, walked) = (HashMap::new(), Walked::default());
        Self { shown, archive, linked, buffer: vec![0; PIECE], walked }
    }

    /// Appends the tree below `root`.
    pub(super) fn run(mut self, root: &OwnedFd) -> Result<Walked> {
        allow_open_files();
        let stat = self.stat(root, b".")?;
        if FileType::from_raw_mode(u32::from(stat.stx_mode)) != FileType::Directory {
            let what = format!("cannot export {}: it is not a directory", self.shown);
            return Err(Error::new(burgeon_block::ErrorKind::Invalid, what).into());
        }
        let mut above = Vec::new();
        let mut folder = self.enter(root, stat, Vec::new())?;
        loop {
            match self.next_name(&mut folder)? {
                Some(name) => {
                    if let Some(below) = self.entry(&folder, &name)? {
                        above.push(std::mem::replace(&mut folder, below));
                    }
                }
                None => {
                    self.check(&folder.open, &folder.stat, &folder.path)?;
                    match above.pop() {
                        Some(parent) => folder = parent,
                        None => return Ok(self.walked),
                    }
                }
            }
        }
    }

    /// Appends a folder, and opens it for reading.
    fn enter(&mut self, at: &OwnedFd, stat: Statx, path: Vec<u8>) -> Result<Folder> {
        let shown = if path.is_empty() { b"./" } else { &path[..] };
        self.begin(at, &stat, shown, &Content::None)?;
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOATIME | OFlags::CLOEXEC;
        let failed = |e| self.cannot_read(shown, e);
        let open = openat(at, ".", flags, Mode::empty()).map_err(failed)?;
        let names = Dir::read_from(&open).map_err(failed)?;
        Ok(Folder { open, names, stat, path })
    }

    fn next_name(&self, folder: &mut Folder) -> Result<Option<Vec<u8>>> {
        loop {
            match folder.names.next().transpose().map_err(|e| self.cannot_read(&folder.path, e))? {
                None => return Ok(None),
                Some(entry) => match entry.file_name().to_bytes() {
                    b"." | b".." => {}
                    name => return Ok(Some(name.to_owned())),
                },
            }
        }
    }

    /// Appends the entry `name`; returns a folder to go on in.
    fn entry(&mut self, folder: &Folder, name: &[u8]) -> Result<Option<Folder>> {
        let mut path = [&folder.path, name].concat();
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let at = match openat(&folder.open, name, flags, Mode::empty()) {
            Ok(at) => at,
            Err(Errno::NOENT) => {
                self.changed(&path, "was removed");
                return Ok(None);
            }
            Err(e) => return Err(self.cannot_read(&path, e).into()),
        };
        let stat = self.stat(&at, &path)?;
        let kind = FileType::from_raw_mode(u32::from(stat.stx_mode));
        match kind {
            FileType::Directory => {
                path.push(b'/');
                return self.enter(&at, stat, path).map(Some);
            }
            FileType::Socket => {
                self.walked.sockets += 1;
                eprintln!("note: {} is a socket, and left out", text(&path));
                return Ok(None);
            }
            _ => {}
        }
        if self.is_linked(&at, &stat, &path)? {
            return Ok(None);
        }
        match kind {
            FileType::Symlink => {
                let target = readlinkat(&at, "", Vec::new());
                let target = target.map_err(|e| self.cannot_read(&path, e))?;
                self.begin(&at, &stat, &path, &Content::Symlink(target.to_bytes()))?;
            }
            FileType::RegularFile => self.file(&at, &stat, &path)?,
            _ => self.begin(&at, &stat, &path, &Content::None)?,
        }
        Ok(None)
    }

    /// Appends a hard link, if an earlier entry is the same file.
    fn is_linked(&mut self, at: &OwnedFd, stat: &Statx, path: &[u8]) -> Result<bool> {
        if stat.stx_nlink < 2 {
            return Ok(false);
        }
        let key = (stat.stx_dev_major, stat.stx_dev_minor, stat.stx_ino);
        let Some((first, rest)) = self.linked.remove(&key) else {
            self.linked.insert(key, (path.to_owned(), stat.stx_nlink - 1));
            return Ok(false);
        };
        self.begin(at, stat, path, &Content::HardLink(&first))?;
        if rest > 1 {
            self.linked.insert(key, (first, rest - 1));
        }
        Ok(true)
    }

    fn file(&mut self, at: &OwnedFd, stat: &Statx, path: &[u8]) -> Result<()> {
        let flags = OFlags::RDONLY | OFlags::NOATIME | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let failed = |this: &Self, e| this.cannot_read(path, e);
        let file = rustix::fs::open(link(at), flags, Mode::empty());
        let file = File::from(file.map_err(|e| failed(self, e))?);
        let size = stat.stx_size;
        let ranges = data_ranges(&file, size).map_err(|e| failed(self, e))?;
        let is_whole = ranges == [(0, size)] || size == 0;
        match is_whole {
            true => self.begin(at, stat, path, &Content::Whole(size))?,
            false => self.begin(at, stat, path, &Content::Sparse(size, &ranges))?,
        }
        let mut total = 0;
        for (offset, len) in ranges {
            self.range(&file, offset, len, path)?;
            total += len;
        }
        // The map of a sparse file fills whole blocks.
        self.archive.end_of_data(total)?;
        self.check(at, stat, path)
    }

    /// Appends `len` bytes of `file`; zeros in place of those that are gone.
    fn range(&mut self, file: &File, offset: u64, len: u64, path: &[u8]) -> Result<()> {
        let (mut at, end) = (offset, offset + len);
        while at < end {
            let wanted = usize::try_from(end - at).unwrap_or(PIECE).min(PIECE);
            let read = match file.read_at(&mut self.buffer[..wanted], at) {
                Ok(0) => {
                    self.buffer[..wanted].fill(0);
                    wanted
                }
                Ok(read) => read,
                Err(e) if e.kind() == std::io::ErrorKind::Interrupted => continue,
                Err(e) => {
                    let what = format!(
                        "cannot read {} of {}: `burgeon status` shows what is wrong with its source",
                        text(path),
                        self.shown
                    );
                    return Err(Error::io(what, e).into());
                }
            };
            self.archive.data(&self.buffer[..read])?;
            at += read as u64;
        }
        Ok(())
    }

    fn begin(
        &mut self,
        at: &OwnedFd,
        stat: &Statx,
        path: &[u8],
        content: &Content<'_>,
    ) -> Result<()> {
        let xattrs = xattrs_of(&link(at)).map_err(|e| {
            Error::io(format!("cannot read the attributes of {} of {}", text(path), self.shown), e)
        })?;
        self.walked.entries += 1;
        self.archive.begin(&ArchiveEntry { path, stat, xattrs: &xattrs }, content)
    }

    fn stat(&self, at: impl AsFd, path: &[u8]) -> Result<Statx> {
        let stat = statx(at, "", AtFlags::EMPTY_PATH, StatxFlags::BASIC_STATS);
        Ok(stat.map_err(|e| self.cannot_read(path, e))?)
    }

    /// Notes if the file or folder differs from `before`.
    fn check(&mut self, at: impl AsFd, before: &Statx, path: &[u8]) -> Result<()> {
        let now = self.stat(at, path)?;
        let state = |stat: &Statx| {
            let [changed, modified] = [stat.stx_ctime, stat.stx_mtime];
            let time = |time: rustix::fs::StatxTimestamp| (time.tv_sec, time.tv_nsec);
            (stat.stx_size, time(changed), time(modified))
        };
        if state(&now) != state(before) {
            self.changed(path, "changed while it was read");
        }
        Ok(())
    }

    fn changed(&mut self, path: &[u8], how: &str) {
        let path = if path.is_empty() { b"./" } else { path };
        eprintln!("burgeon: {} {how}", text(path));
        self.walked.changed += 1;
        if self.walked.named.len() < NAMED_MAX {
            self.walked.named.push(path.to_owned());
        }
    }

    fn cannot_read(&self, path: &[u8], errno: Errno) -> Error {
        Error::io(format!("cannot read {} of {}", text(path), self.shown), errno.into())
    }
}

/// A path that leads to an open file of any type.
fn link(at: &OwnedFd) -> PathBuf {
    PathBuf::from(format!("/proc/self/fd/{}", at.as_raw_fd()))
}

/// The ranges of `file` that hold data: offset and length.
fn data_ranges(file: &File, size: u64) -> rustix::io::Result<Vec<(u64, u64)>> {
    let (mut ranges, mut at) = (Vec::new(), 0);
    while at < size {
        let from = match seek(file, SeekFrom::Data(at)) {
            Ok(from) if from < size => from,
            Ok(_) | Err(Errno::NXIO) => break,
            Err(e) => return Err(e),
        };
        if ranges.len() + 1 == RANGES_MAX {
            ranges.push((from, size - from));
            break;
        }
        let to = match seek(file, SeekFrom::Hole(from)) {
            // It was truncated just now; the check after the reading names it.
            Err(Errno::NXIO) => size,
            to => to?.min(size),
        };
        ranges.push((from, to - from));
        at = to;
    }
    Ok(ranges)
}

/// Raises the limit of open files for deep trees, as far as the process may.
fn allow_open_files() {
    let mut limit = getrlimit(Resource::Nofile);
    let wanted = limit.maximum.map_or(OPEN_MAX, |maximum| maximum.min(OPEN_MAX));
    if limit.current.is_some_and(|current| current < wanted) {
        limit.current = Some(wanted);
        // Without it, a tree that is too deep gives an error.
        let _ = setrlimit(Resource::Nofile, limit);
    }
}
