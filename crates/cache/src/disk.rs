//! The file system below the cache: the seam at which tests lose writes, tear and misdirect them,
//! fill the disk and crash.

use std::{
    fs::{self, File, OpenOptions},
    io,
    os::{
        fd::{AsFd, BorrowedFd},
        unix::fs::{FileExt, MetadataExt, OpenOptionsExt},
    },
    path::{Path, PathBuf},
    sync::{Mutex, PoisonError},
};

use burgeon_block::{BLOCK_SIZE, ByteRange, Error, ErrorKind, Pages, Result, read_or_zeros};
use rustix::fs::{
    AtFlags, FallocateFlags, FlockOperation, OFlags, StatxFlags, fallocate, flock, fstatvfs, statx,
    syncfs,
};

/// Space of a file system, in bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Space {
    /// Its size.
    pub size: u64,
    /// Free, for users other than root.
    pub free: u64,
}

/// The mode in which a file is read and written.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum IoMode {
    /// In whole blocks, past the page cache where the file system allows it.
    Blocks,
    /// In any lengths, through the page cache.
    Bytes,
}

/// A folder of files, which one server at a time uses.
pub trait CacheDisk: Send + Sync + 'static {
    /// Takes the folder for this server, and makes it if it is not there. False if another server
    /// has it.
    fn take(&self) -> Result<bool>;
    /// An error if the folder that was taken is not there any more.
    fn check(&self) -> Result<()>;
    /// The names of its files.
    fn list(&self) -> Result<Vec<String>>;
    /// Makes the file, which must not be there.
    fn create(&self, name: &str, access: IoMode) -> Result<Box<dyn DiskFile>>;
    /// Opens the file.
    fn open(&self, name: &str, access: IoMode) -> Result<Box<dyn DiskFile>>;
    /// Renames a file, and replaces another. Durable after [`Self::sync`].
    fn rename(&self, from: &str, to: &str) -> Result<()>;
    /// Removes the file.
    fn remove(&self, name: &str) -> Result<()>;
    /// Makes names durable.
    fn sync(&self) -> Result<()>;
    /// Space of the file system now.
    fn space(&self) -> Result<Space>;
    /// Waits until freed space is counted as free.
    fn settle(&self) -> Result<()>;
}

/// A file of a [`CacheDisk`].
pub trait DiskFile: Send + Sync {
    /// Fills `buf` from `offset`; zeros in holes and beyond the end.
    fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<()>;
    /// Writes all of `buf` at `offset`.
    fn write_at(&self, offset: u64, buf: &[u8]) -> Result<()>;
    /// Frees the space of a range, which reads as zeros from then on.
    fn punch(&self, range: ByteRange) -> Result<()>;
    /// Cuts the file to no bytes.
    fn clear(&self) -> Result<()>;
    /// Length, and bytes that it takes on the disk.
    fn sizes(&self) -> Result<(u64, u64)>;
    /// Makes what was written durable.
    fn sync(&self) -> Result<()>;
    /// Tells the file from all others of its file system, also from those made after its removal;
    /// 0 if that is unknown ([`identity`]).
    fn identity(&self) -> u64;
    /// Its descriptor, if its reads wait for a disk; `None` if they find their bytes in memory.
    fn waiting_fd(&self) -> Option<BorrowedFd<'_>>;
}

/// The folder of a real cache.
pub struct DiskFolder {
    path: PathBuf,
    /// The lock file, open as long as the folder is taken.
    lock: Mutex<Option<File>>,
    /// The magic number of the file system.
    kind: u64,
}

pub(crate) const LOCK: &str = "lock";
const BTRFS: u64 = 0x9123_683e;
/// File systems in memory, tmpfs and ramfs: they may take `O_DIRECT`, and wait for no disk.
const IN_MEMORY: [u64; 2] = [0x0102_1994, 0x8584_58f6];

impl DiskFolder {
    /// The folder `path`, made with its parents if it is not there.
    pub fn new(path: &Path) -> Result<Self> {
        make(path)?;
        let statfs =
            rustix::fs::statfs(path).map_err(|error| failed("look at", path, error.into()))?;
        Ok(Self { path: path.to_owned(), lock: Mutex::new(None), kind: statfs.f_type as u64 })
    }

    fn options(direct: bool) -> OpenOptions {
        let mut flags = OFlags::NOFOLLOW | OFlags::NONBLOCK;
        flags.set(OFlags::DIRECT, direct);
        let mut options = OpenOptions::new();
        options.read(true).write(true).mode(0o600).custom_flags(flags.bits() as i32);
        options
    }

    fn file(&self, name: &str, access: IoMode, create: bool) -> Result<Box<dyn DiskFile>> {
        let path = self.path.join(name);
        let open = |direct: bool, create| Self::options(direct).create_new(create).open(&path);
        let in_memory = IN_MEMORY.contains(&self.kind);
        let wrap = |file, direct| {
            let (identity, path) = (identity(&file), path.clone());
            Ok(Box::new(FolderFile { file, identity, path, direct, in_memory }) as _)
        };
        let error = |error| failed("open", &path, error);
        if access == IoMode::Bytes {
            return wrap(open(false, create).map_err(error)?, false);
        }
        match open(true, create).and_then(|file| probe(&file).map(|()| file)) {
            Ok(file) => wrap(file, true),
            // The file system may have made the file before it refused the flag.
            Err(refused) if refused.kind() == io::ErrorKind::InvalidInput => {
                let file = open(false, false).or_else(|_| open(false, create)).map_err(error)?;
                wrap(file, false)
            }
            Err(other) => Err(error(other)),
        }
    }
}

fn make(path: &Path) -> Result<()> {
    use std::os::unix::fs::DirBuilderExt;
    let mut builder = fs::DirBuilder::new();
    builder.recursive(true).mode(0o700).create(path).map_err(|error| failed("make", path, error))
}

/// Some file systems take `O_DIRECT` and refuse the first read.
fn probe(file: &File) -> io::Result<()> {
    let mut page = Pages::zeroed(BLOCK_SIZE).ok_or(io::ErrorKind::OutOfMemory)?;
    file.read_at(page.bytes_mut(), 0).map(drop)
}

fn failed(doing: &str, path: &Path, error: io::Error) -> Error {
    Error::io(format!("cannot {doing} {} of the cache", path.display()), error)
}

impl CacheDisk for DiskFolder {
    fn take(&self) -> Result<bool> {
        // The lock belongs to the open file: a second one would wait for the first.
        let is_held = self.lock.lock().unwrap_or_else(PoisonError::into_inner).is_some();
        if is_held && self.check().is_ok() {
            return Ok(true);
        }
        make(&self.path)?;
        let path = self.path.join(LOCK);
        let file = Self::options(false).create(true).open(&path);
        let file = file.map_err(|error| failed("open", &path, error))?;
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {}
            Err(rustix::io::Errno::WOULDBLOCK) => return Ok(false),
            Err(error) => return Err(failed("lock", &path, error.into())),
        }
        *self.lock.lock().unwrap_or_else(PoisonError::into_inner) = Some(file);
        // Another server may have removed the file between its opening and its lock.
        self.check().map(|()| true)
    }

    fn check(&self) -> Result<()> {
        let path = self.path.join(LOCK);
        let is = fs::metadata(&path).map_err(|error| failed("find", &path, error))?;
        let lock = self.lock.lock().unwrap_or_else(PoisonError::into_inner);
        let was = match lock.as_ref() {
            Some(file) => file.metadata().map_err(|error| failed("look at", &path, error))?,
            None => return Ok(()),
        };
        if (is.dev(), is.ino()) == (was.dev(), was.ino()) {
            return Ok(());
        }
        let what = format!("{} was replaced: the cache begins anew", path.display());
        Err(Error::new(ErrorKind::NotFound, what))
    }

    fn list(&self) -> Result<Vec<String>> {
        let error = |error| failed("list", &self.path, error);
        let mut names = Vec::new();
        for entry in fs::read_dir(&self.path).map_err(error)? {
            names.extend(entry.map_err(error)?.file_name().into_string().ok());
        }
        Ok(names)
    }

    fn create(&self, name: &str, access: IoMode) -> Result<Box<dyn DiskFile>> {
        self.file(name, access, true)
    }

    fn open(&self, name: &str, access: IoMode) -> Result<Box<dyn DiskFile>> {
        self.file(name, access, false)
    }

    fn rename(&self, from: &str, to: &str) -> Result<()> {
        let (from, to) = (self.path.join(from), self.path.join(to));
        fs::rename(&from, to).map_err(|error| failed("rename", &from, error))
    }

    fn remove(&self, name: &str) -> Result<()> {
        let path = self.path.join(name);
        fs::remove_file(&path).map_err(|error| failed("remove", &path, error))
    }

    fn sync(&self) -> Result<()> {
        let folder = File::open(&self.path).and_then(|folder| folder.sync_all());
        folder.map_err(|error| failed("sync", &self.path, error))
    }

    fn space(&self) -> Result<Space> {
        let lock = self.lock.lock().unwrap_or_else(PoisonError::into_inner);
        let space = match lock.as_ref() {
            Some(file) => fstatvfs(file),
            None => rustix::fs::statvfs(&self.path),
        };
        let space = space.map_err(|error| failed("look at", &self.path, error.into()))?;
        let unit = space.f_frsize.max(1);
        Ok(Space {
            size: space.f_blocks.saturating_mul(unit),
            free: space.f_bavail.saturating_mul(unit),
        })
    }

    fn settle(&self) -> Result<()> {
        if self.kind != BTRFS {
            return Ok(());
        }
        let folder = File::open(&self.path).map_err(|error| failed("open", &self.path, error))?;
        syncfs(&folder).map_err(|error| failed("sync", &self.path, error.into()))
    }
}

/// A folder that this process may not use: every call fails with the reason.
pub struct Refused {
    why: String,
}

impl Refused {
    /// A folder that cannot be used because of `why`.
    pub fn new(why: String) -> Self {
        Self { why }
    }

    fn error<T>(&self) -> Result<T> {
        Err(Error::new(ErrorKind::Unavailable, self.why.clone()))
    }
}

impl CacheDisk for Refused {
    fn take(&self) -> Result<bool> {
        self.error()
    }

    fn check(&self) -> Result<()> {
        self.error()
    }

    fn list(&self) -> Result<Vec<String>> {
        self.error()
    }

    fn create(&self, _name: &str, _mode: IoMode) -> Result<Box<dyn DiskFile>> {
        self.error()
    }

    fn open(&self, _name: &str, _mode: IoMode) -> Result<Box<dyn DiskFile>> {
        self.error()
    }

    fn rename(&self, _from: &str, _to: &str) -> Result<()> {
        self.error()
    }

    fn remove(&self, _name: &str) -> Result<()> {
        self.error()
    }

    fn sync(&self) -> Result<()> {
        self.error()
    }

    fn space(&self) -> Result<Space> {
        self.error()
    }

    fn settle(&self) -> Result<()> {
        self.error()
    }
}

/// Tells a file from all others of its file system, also from those made after its removal: inodes
/// are used again. 0 if the file system does not say when the file was made.
pub fn identity(file: &File) -> u64 {
    let asked = StatxFlags::INO | StatxFlags::BTIME;
    let Ok(is) = statx(file, "", AtFlags::EMPTY_PATH, asked) else { return 0 };
    if !StatxFlags::from_bits_retain(is.stx_mask).contains(asked) {
        return 0;
    }
    // Without the device, whose number may be another one after a restart of the machine.
    let born = is.stx_btime;
    let words = [is.stx_ino, born.tv_sec as u64, born.tv_nsec.into()].map(u64::to_le_bytes);
    let hash = blake3::hash(words.as_flattened());
    hash.as_bytes().first_chunk().map_or(0, |first| u64::from_le_bytes(*first))
}

struct FolderFile {
    file: File,
    identity: u64,
    path: PathBuf,
    direct: bool,
    in_memory: bool,
}

impl FolderFile {
    /// True if the kernel takes this buffer as it is.
    fn fits(&self, offset: u64, buf: &[u8]) -> bool {
        let whole = |n: u64| n.is_multiple_of(BLOCK_SIZE);
        !self.direct
            || whole(offset) && whole(buf.len() as u64) && whole(buf.as_ptr().addr() as u64)
    }

    /// Whole aligned blocks around `buf`; only callers with unaligned buffers come here.
    fn bounced(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        let range = ByteRange::at(offset, buf.len() as u64).ok_or(io::ErrorKind::InvalidInput)?;
        let blocks = range.to_blocks();
        let mut pages = Pages::zeroed(blocks.len()).ok_or(io::ErrorKind::OutOfMemory)?;
        read_or_zeros(&self.file, blocks.start(), pages.bytes_mut())?;
        let skip = (offset - blocks.start()) as usize;
        buf.copy_from_slice(&pages.bytes()[skip..][..buf.len()]);
        Ok(())
    }
}

impl DiskFile for FolderFile {
    fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<()> {
        let read = match self.fits(offset, buf) {
            true => read_or_zeros(&self.file, offset, buf),
            false => self.bounced(offset, buf),
        };
        read.map_err(|error| failed("read", &self.path, error))
    }

    fn write_at(&self, offset: u64, buf: &[u8]) -> Result<()> {
        let written = if self.fits(offset, buf) {
            self.file.write_all_at(buf, offset)
        } else {
            // The rest of the last block is this chunk's padding.
            Pages::zeroed(buf.len() as u64).ok_or(io::ErrorKind::OutOfMemory.into()).and_then(
                |mut pages| {
                    pages.bytes_mut()[..buf.len()].copy_from_slice(buf);
                    self.file.write_all_at(pages.bytes(), offset)
                },
            )
        };
        written.map_err(|error| failed("write", &self.path, error))
    }

    fn punch(&self, range: ByteRange) -> Result<()> {
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        rustix::io::retry_on_intr(|| fallocate(&self.file, flags, range.start(), range.len()))
            .map_err(|error| failed("free space of", &self.path, error.into()))
    }

    fn clear(&self) -> Result<()> {
        self.file.set_len(0).map_err(|error| failed("cut", &self.path, error))
    }

    fn sizes(&self) -> Result<(u64, u64)> {
        let metadata =
            self.file.metadata().map_err(|error| failed("look at", &self.path, error))?;
        Ok((metadata.size(), metadata.blocks().saturating_mul(512)))
    }

    fn sync(&self) -> Result<()> {
        self.file.sync_data().map_err(|error| failed("sync", &self.path, error))
    }

    fn identity(&self) -> u64 {
        self.identity
    }

    fn waiting_fd(&self) -> Option<BorrowedFd<'_>> {
        (self.direct && !self.in_memory).then(|| self.file.as_fd())
    }
}
