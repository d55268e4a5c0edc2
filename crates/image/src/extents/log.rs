//! The files of a map, behind a trait: tests replace it to crash, tear and corrupt.

use std::{
    fs::{File, OpenOptions},
    io,
    ops::Deref,
    os::unix::fs::{FileExt as _, OpenOptionsExt as _},
    path::{Path, PathBuf},
};

use burgeon_block::{Error, ErrorKind, Result};
use rustix::fs::{FlockOperation, OFlags, flock};

use crate::{mapped::Mapped, open_own};

/// An append-only file. Writes, and its length, are volatile and unordered until `sync`.
pub trait LogFile: Send + Sync {
    /// Its length in bytes.
    fn size(&self) -> Result<u64>;
    /// A view of the first `len` bytes.
    fn view(&self, len: u64) -> Result<LogView>;
    /// Writes all of `bytes` at `offset`.
    fn write_at(&self, offset: u64, bytes: &[u8]) -> Result<()>;
    /// Makes everything done before durable.
    fn sync(&self) -> Result<()>;
}

/// The first bytes of a log: mapped, or a copy.
pub struct LogView(Mapped);

impl From<Vec<u8>> for LogView {
    fn from(bytes: Vec<u8>) -> Self {
        Self(Mapped::Owned(bytes))
    }
}

impl Deref for LogView {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.0
    }
}

/// A log in a file.
pub struct FileLog {
    file: File,
    path: PathBuf,
}

impl FileLog {
    /// Opens `path` to follow the appends of another process.
    pub(super) fn open(path: &Path) -> Result<Self> {
        Self::with(path, OpenOptions::new().read(true))
    }

    /// Opens `path` to append; `Unavailable` while another process has it open so.
    pub(super) fn open_to_write(path: &Path) -> Result<Self> {
        let log = Self::with(path, OpenOptions::new().read(true).write(true))?;
        flock(&log.file, FlockOperation::NonBlockingLockExclusive).map_err(|error| {
            let what = format!("{} is in use by another process", log.path.display());
            Error::with_source(ErrorKind::Unavailable, what, io::Error::from(error))
        })?;
        Ok(log)
    }

    /// Creates `path` with `content`, durably and atomically. An existing file stays.
    pub(super) fn create(path: &Path, content: &[u8]) -> Result<()> {
        let tmp = path.with_extension("tmp");
        let write = || {
            let mut options = OpenOptions::new();
            options.write(true).create(true).truncate(true).mode(0o600);
            let file = open_own(&tmp, &mut options, OFlags::NONBLOCK)?;
            file.write_all_at(content, 0)?;
            file.sync_all()?;
            std::fs::rename(&tmp, path)?;
            File::open(path.parent().unwrap_or(Path::new("/")))?.sync_all()
        };
        write().map_err(|error| Error::io(format!("cannot make {}", path.display()), error))
    }

    fn with(path: &Path, options: &mut OpenOptions) -> Result<Self> {
        let file = open_own(path, options, OFlags::NONBLOCK)
            .map_err(|error| Error::io(format!("cannot open {}", path.display()), error))?;
        Ok(Self { file, path: path.to_owned() })
    }

    fn failed<'a>(&'a self, doing: &'a str) -> impl Fn(io::Error) -> Error + 'a {
        move |error| Error::io(format!("cannot {doing} {}", self.path.display()), error)
    }
}

impl LogFile for FileLog {
    fn size(&self) -> Result<u64> {
        Ok(self.file.metadata().map_err(self.failed("look at"))?.len())
    }

    fn view(&self, len: u64) -> Result<LogView> {
        if self.size()? < len {
            let error = io::Error::from(io::ErrorKind::UnexpectedEof);
            return Err(self.failed("read")(error));
        }
        Mapped::of(&self.file, len as usize).map(LogView).map_err(self.failed("map"))
    }

    fn write_at(&self, offset: u64, bytes: &[u8]) -> Result<()> {
        self.file.write_all_at(bytes, offset).map_err(self.failed("write"))
    }

    fn sync(&self) -> Result<()> {
        self.file.sync_all().map_err(self.failed("sync"))
    }
}
