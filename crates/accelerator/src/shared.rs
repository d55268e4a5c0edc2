//! Counters in memory that the supervisor holds, so that the death of a server loses none.

use std::{
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    ptr::{self, NonNull},
};

use burgeon_accelerate::Cells;
use burgeon_block::{Error, Result};
use rustix::{
    fs::{MemfdFlags, ftruncate, memfd_create},
    mm::{MapFlags, ProtFlags, mmap, munmap},
};

const LEN: usize = size_of::<Cells>();

/// The counters of one device, mapped.
pub(crate) struct SharedCells {
    map: NonNull<Cells>,
}

/// The memory of the counters of a new device: zeros.
pub(crate) fn memory() -> Result<OwnedFd> {
    let failed = |e: rustix::io::Errno| Error::io("cannot make memory for counters", e.into());
    let memory = memfd_create("burgeon-counters", MemfdFlags::CLOEXEC).map_err(failed)?;
    ftruncate(&memory, LEN as u64).map_err(failed)?;
    Ok(memory)
}

impl SharedCells {
    /// Maps the counters in `memory`, which the supervisor has made.
    pub(crate) fn map(memory: &OwnedFd) -> Result<Self> {
        let memory: BorrowedFd<'_> = memory.as_fd();
        let (protection, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED);
        // SAFETY: a new mapping at a place that the kernel chooses; the memory has `LEN` bytes, which
        // nobody shortens.
        let map = unsafe { mmap(ptr::null_mut(), LEN, protection, flags, memory, 0) };
        let failed = |e: rustix::io::Errno| Error::io("cannot map counters", e.into());
        let map = NonNull::new(map.map_err(failed)?.cast());
        map.map(|map| Self { map }).ok_or_else(|| failed(rustix::io::Errno::FAULT))
    }
}

impl AsRef<Cells> for SharedCells {
    fn as_ref(&self) -> &Cells {
        // SAFETY: the mapping lives as long as this value; the cells are atomics, aligned to a page,
        // and every bit pattern is valid.
        unsafe { self.map.as_ref() }
    }
}

impl Drop for SharedCells {
    fn drop(&mut self) {
        // SAFETY: the mapping is this value's alone. A failure would only leave it mapped.
        let _ = unsafe { munmap(self.map.as_ptr().cast(), LEN) };
    }
}

// SAFETY: the mapping belongs to this value, and holds nothing but atomics.
unsafe impl Send for SharedCells {}
// SAFETY: as above.
unsafe impl Sync for SharedCells {}
