//! Counters in memory that the supervisor holds, so that the death of a server loses none.
//!
//! ```text
//!   memfd   Cells (counters of the core) │ Times (distributions) │ these are restored
//! ```
//!
//! New fields come at the end: the memory of a supervisor of an earlier version is made longer.

use std::{
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    ptr::{self, NonNull},
    sync::atomic::{AtomicU64, Ordering::SeqCst},
};

use burgeon_accelerate::Cells;
use burgeon_block::{Error, Result};
use rustix::{
    fs::{MemfdFlags, fstat, ftruncate, memfd_create},
    mm::{MapFlags, ProtFlags, mmap, munmap},
};

use crate::times::Times;

/// All of the memory: atomics, in which every bit pattern is valid.
#[repr(C)]
struct Memory {
    cells: Cells,
    times: Times,
    /// 1 once the distributions of earlier attachments are in `times`.
    restored: AtomicU64,
}

const LEN: usize = size_of::<Memory>();

/// The counters of one device, mapped.
pub(crate) struct SharedCells {
    map: NonNull<Memory>,
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
        let unknown = |e: rustix::io::Errno| Error::io("cannot measure counters", e.into());
        if (fstat(memory).map_err(unknown)?.st_size as u64) < LEN as u64 {
            ftruncate(memory, LEN as u64).map_err(unknown)?;
        }
        let (protection, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED);
        // SAFETY: a new mapping at a place that the kernel chooses; the memory has `LEN` bytes,
        // which nobody shortens.
        let map = unsafe { mmap(ptr::null_mut(), LEN, protection, flags, memory, 0) };
        let failed = |e: rustix::io::Errno| Error::io("cannot map counters", e.into());
        let map = NonNull::new(map.map_err(failed)?.cast());
        map.map(|map| Self { map }).ok_or_else(|| failed(rustix::io::Errno::FAULT))
    }
}

impl SharedCells {
    fn memory(&self) -> &Memory {
        // SAFETY: the mapping lives as long as this value; it is aligned to a page, holds atomics
        // alone, and every bit pattern of them is valid.
        unsafe { self.map.as_ref() }
    }

    pub(crate) fn times(&self) -> &Times {
        &self.memory().times
    }

    /// Has `restore` replace the distributions of new memory, before anybody counts. If a server
    /// dies within it, the next one does it again.
    pub(crate) fn restore_once(&self, restore: impl FnOnce(&Times)) {
        if self.memory().restored.load(SeqCst) == 0 {
            restore(self.times());
            self.memory().restored.store(1, SeqCst);
        }
    }
}

impl AsRef<Cells> for SharedCells {
    fn as_ref(&self) -> &Cells {
        &self.memory().cells
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

#[cfg(test)]
mod tests {
    use burgeon_accelerate::{Cells, Count, Counts};
    use rustix::fs::ftruncate;

    use super::{SharedCells, memory};
    use crate::times::Kind;

    #[test]
    fn distributions_are_restored_once_and_whole() {
        let memory = memory().unwrap();
        let values = |cells: &SharedCells| cells.times().of(Kind::Write).snapshot().count();
        let first = SharedCells::map(&memory).unwrap();
        // A server that dies in the middle of it.
        first.times().of(Kind::Write).record(1);
        let second = SharedCells::map(&memory).unwrap();
        second.restore_once(|times| times.of(Kind::Write).restore([(1, 5)]));
        second.times().of(Kind::Write).record(1);
        let third = SharedCells::map(&memory).unwrap();
        third.restore_once(|times| times.of(Kind::Write).restore([(1, 5)]));
        assert_eq!(values(&third), 6);
    }

    #[test]
    fn the_memory_of_an_earlier_version_gets_distributions() {
        let memory = memory().unwrap();
        ftruncate(&memory, size_of::<Cells>() as u64).unwrap();
        let [before, after] = [0; 2].map(|_| SharedCells::map(&memory).unwrap());
        before.times().of(Kind::Flush).record(7);
        assert_eq!(after.times().of(Kind::Flush).snapshot().count(), 1);
        let [before, after] =
            [before, after].map(|cells| Counts::shared(std::sync::Arc::new(cells)));
        before.add(Count::Flushes, 3);
        assert_eq!(after.get(Count::Flushes), 3);
    }
}
