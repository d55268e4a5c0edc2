//! Opens files of this host: in this process, or in another one that may.
//!
//! ```text
//!   Reference, Directory, layers ──► opened ─┬─ no opener ─► here
//!                                            └─ an opener ─► its descriptor, or its error
//! ```
//!
//! A server has no right to the user's files. It installs an opener once ([`open_files_by`]), and
//! reads from the descriptors that it gets.

use std::{
    fs::File,
    future::Future,
    io,
    os::{fd::OwnedFd, unix::fs::FileTypeExt},
    path::{Path, PathBuf},
    pin::Pin,
    sync::OnceLock,
};

use burgeon_block::Result;
use rustix::fs::{Mode, OFlags};

use crate::{
    beneath::{open_again, open_beneath, open_within, open_without_symlinks},
    blocking, waiting,
};

/// Manner of opening a file; always for reading.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Manner {
    /// A file of a store, through the page cache.
    Stored,
    /// A file or block device that an image refers to by its path; direct I/O if it has that.
    /// Follows symlinks, so a folder may have moved: the image's digests detect other content.
    Referred,
    /// The same without following symlinks: a user's own file system can forge identities.
    Identified,
    /// A folder, to see that it is there.
    Folder,
}

/// The opened file, or an error: of the kind `TimedOut` if the opener did not answer.
pub type Opening = Pin<Box<dyn Future<Output = io::Result<File>> + Send>>;

/// Another process that opens files for this one.
pub trait Opener: Send + Sync {
    /// True for a path that this process is not to open itself.
    fn is_for(&self, path: &Path) -> bool;

    /// Opens `path`.
    fn open(&self, path: &Path, manner: Manner) -> Opening;
}

static OPENER: OnceLock<Box<dyn Opener>> = OnceLock::new();

/// Makes `opener` open the files of this process from now on. Only the first call has an effect.
pub fn open_files_by(opener: impl Opener + 'static) {
    let _ = OPENER.set(Box::new(opener));
}

/// Opens `path`, whose type is checked first: opening a device or a FIFO may block or have side
/// effects. For an opener; blocks on the disk.
pub fn open_checked(path: &Path, manner: Manner) -> io::Result<File> {
    let found = match manner {
        Manner::Identified => open_without_symlinks(path, OFlags::PATH)?,
        _ => rustix::fs::open(path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?,
    };
    open_found(found, manner)
}

/// [`open_checked`] for the relative path `name` in or below the directory `folder`. `EXDEV` if a
/// part of the name leads out of it.
pub fn open_checked_beneath(folder: &Path, name: &Path, manner: Manner) -> io::Result<File> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let found = match manner {
        Manner::Identified => {
            open_beneath(open_without_symlinks(folder, flags)?, name, OFlags::PATH)?
        }
        _ => open_within(rustix::fs::open(folder, flags, Mode::empty())?, name, OFlags::PATH)?,
    };
    open_found(found, manner)
}

fn open_found(found: OwnedFd, manner: Manner) -> io::Result<File> {
    let found = File::from(found);
    let kind = found.metadata()?.file_type();
    match manner {
        Manner::Folder if kind.is_dir() => Ok(found),
        Manner::Folder => Err(io::ErrorKind::NotADirectory.into()),
        Manner::Stored if kind.is_file() => open_again(&found, OFlags::empty()),
        Manner::Referred | Manner::Identified if kind.is_file() || kind.is_block_device() => {
            direct(found.into())
        }
        Manner::Stored | Manner::Referred | Manner::Identified => Err(not_a_file(manner)),
    }
}

/// The error for a folder, FIFO, socket or device at the path of a file.
pub fn not_a_file(manner: Manner) -> io::Error {
    let what = match manner {
        Manner::Stored => "it is not a regular file",
        _ => "it is neither a file nor a block device now",
    };
    io::Error::new(io::ErrorKind::InvalidData, what)
}

/// The error for a file that the opener may not open for this process.
pub fn not_granted() -> io::Error {
    let what = "no mount may read this file: it lies outside of the stores, layouts and files that \
        were named when something was mounted or mapped, or a symlink leads out of them; name the \
        folder that really holds it, and mount or map again";
    io::Error::new(io::ErrorKind::PermissionDenied, what)
}

fn direct(found: OwnedFd) -> io::Result<File> {
    match open_again(&found, OFlags::DIRECT) {
        // tmpfs before 6.6, and some network file systems, have no direct I/O.
        Err(error) if error.kind() == io::ErrorKind::InvalidInput => {
            open_again(&found, OFlags::empty())
        }
        result => result,
    }
}

/// Calls `work` with the opened `path` on a thread that may block. The wait for an opener blocks
/// no thread.
pub(crate) async fn with_opened<T: Send + 'static>(
    path: PathBuf,
    manner: Manner,
    work: impl FnOnce(&Path, io::Result<File>) -> Result<T> + Send + 'static,
) -> Result<T> {
    let opened = match opener_for(&path) {
        Some(opener) => Some(opener.open(&path, manner).await),
        None => None,
    };
    let work = move || work(&path, opened.unwrap_or_else(|| open_checked(&path, manner)));
    blocking(work).await
}

/// Opens `path`, by the opener or here. For a thread that may block.
pub(crate) fn opened_now(path: &Path, manner: Manner) -> io::Result<File> {
    match opener_for(path) {
        Some(opener) => waiting(opener.open(path, manner)),
        None => open_checked(path, manner),
    }
}

/// True if an opener is to open `path`.
pub(crate) fn is_elsewhere(path: &Path) -> bool {
    opener_for(path).is_some()
}

fn opener_for(path: &Path) -> Option<&'static dyn Opener> {
    OPENER.get().map(|opener| &**opener).filter(|opener| opener.is_for(path))
}
