use std::{
    fs::{File, OpenOptions},
    io,
    ops::Deref,
    path::Path,
    ptr::NonNull,
};

use burgeon_block::{Error, Result};
use rustix::{
    fs::OFlags,
    mm::{MapFlags, ProtFlags},
};

use crate::open_own;

/// The bytes of a file: in memory, or mapped, so that only the pages in use take memory.
pub(crate) enum Mapped {
    Owned(Vec<u8>),
    File { start: NonNull<u8>, len: usize },
}

// SAFETY: the mapping is private and read-only, and no other code has its address.
unsafe impl Send for Mapped {}
// SAFETY: as above: shared access only reads.
unsafe impl Sync for Mapped {}

impl Mapped {
    /// Maps the whole file at `path`. Burgeon writes such files once and never changes them; if
    /// another process truncates one, SIGBUS kills this process, as a broken disk would.
    pub(crate) fn open(path: &Path) -> Result<Self> {
        let failed = |error| Error::io(format!("cannot open {}", path.display()), error);
        let file = open_own(path, OpenOptions::new().read(true), OFlags::NONBLOCK);
        let file = file.map_err(failed)?;
        let len = file.metadata().map_err(failed)?.len() as usize;
        Self::of(&file, len).map_err(failed)
    }

    /// Maps the first `len` bytes of `file`, which must be at least as long and stay so.
    pub(crate) fn of(file: &File, len: usize) -> io::Result<Self> {
        if len == 0 {
            return Ok(Self::Owned(Vec::new()));
        }
        // SAFETY: a new mapping at an address chosen by the kernel affects no existing memory.
        let start = unsafe {
            let (prot, flags) = (ProtFlags::READ, MapFlags::PRIVATE);
            rustix::mm::mmap(std::ptr::null_mut(), len, prot, flags, file, 0)
        }?;
        match NonNull::new(start.cast()) {
            Some(start) => Ok(Self::File { start, len }),
            None => Ok(Self::Owned(Vec::new())),
        }
    }
}

impl Deref for Mapped {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match self {
            Self::Owned(bytes) => bytes,
            // SAFETY: the mapping of `len` bytes lives as long as `self`.
            Self::File { start, len } => unsafe {
                std::slice::from_raw_parts(start.as_ptr(), *len)
            },
        }
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        if let Self::File { start, len } = self {
            // SAFETY: the mapping is owned and no longer referenced. A failure would leak it.
            let _ = unsafe { rustix::mm::munmap(start.as_ptr().cast(), *len) };
        }
    }
}
