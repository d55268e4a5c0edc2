//! Memory that outlives the serving process: the mount's counters, and the requests that the
//! kernel has handed out and no server has answered yet.
//!
//! ```text
//!   memfd, sealed to its size; mapped by the supervisor and by each server in turn
//!   0      Header: magic, version, the sizes below
//!   4096   Counters
//!   12288  512 slots of 256 bytes:  attempts │ … 64 │ request: its first 192 bytes
//!                                                     └ length (u32): 0 = nothing to answer
//!
//!   empty ──the kernel copies a request in──► unanswered ──reply written, length = 0──► empty
//!                                                 │ the server dies
//!                                                 └──► its successor answers, then length = 0
//! ```
//!
//! A reader thread lets `read(2)` on `/dev/fuse` write straight into a slot, and the kernel
//! finishes that copy even when the thread is killed in it. So there is no moment at which a
//! request has left the kernel and is not in a slot. A server killed between its reply and the
//! zero leaves an answered request: the successor's second answer gets ENOENT and does no harm,
//! because the kernel never uses a request's number again.
//!
//! A slot holds the head of a request only. Everything that is ever answered differently for what
//! follows the first 80 bytes is refused by its opcode alone, so the rest goes to scratch memory.
//!
//! Layouts: an upgrade hands the memory of the earlier version to a server of this one, so a server
//! serves all layouts of version 1. They differ in `counters_len` only: counters are added at their
//! end, within the 8192 bytes up to the slots, and are zero where the earlier version had none. If
//! they no longer fit there, that is version 2, beside which version 1 has to be served.
//!
//! Invariants (held by the tests below and `tests/kill.rs`):
//! - `length != 0` exactly while the slot's request may be unanswered.
//! - All pages are present and writable from the start: the kernel's copy into them cannot fail
//!   because the process is being killed.
//! - At most one live process serves the slots. The supervisor waits for the old one's end first.

use std::{
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    ptr::{self, NonNull},
    sync::atomic::{
        AtomicU32,
        Ordering::{Acquire, Relaxed, Release},
    },
};

use burgeon_block::{Counters, Error, ErrorKind, Result};
use rustix::{
    fs::{MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, fstat, ftruncate, memfd_create},
    io::Errno,
    mm::{MapFlags, ProtFlags, mmap, munmap},
};
use zerocopy::{FromBytes, Immutable, IntoBytes};

use crate::sys::failed;

/// Requests a mount can have in work at once: the kernel's 256 background reads, as many single
/// ones, and one armed slot for each reader thread.
pub(crate) const SLOT_COUNT: u32 = 512;
/// Bytes of a request that a slot keeps.
pub(crate) const REQUEST_LEN: usize = 192;

const SLOT_LEN: usize = 256;
const REQUEST_OFFSET: usize = SLOT_LEN - REQUEST_LEN;
const COUNTERS_OFFSET: usize = 4096;
const SLOTS_OFFSET: usize = COUNTERS_OFFSET + size_of::<Counters>().next_multiple_of(4096);
const MAP_LEN: usize = SLOTS_OFFSET + SLOT_COUNT as usize * SLOT_LEN;
const SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::SEAL);

/// Bytes of the counters in the first layout, which had no `background_bytes`.
const COUNTERS_LEN_MIN: u32 = 8032;
const _: () = assert!(SLOTS_OFFSET == 12288, "the counters of version 1 end before its slots");

/// The first bytes. A server of another version than its predecessor sees here whether it can take
/// over.
#[derive(FromBytes, IntoBytes, Immutable, PartialEq, Eq)]
#[repr(C)]
struct Header {
    magic: [u8; 8],
    version: u32,
    counters_len: u32,
    slot_len: u32,
    slot_count: u32,
}

const HEADER: Header = Header {
    magic: *b"burgslot",
    version: 1,
    counters_len: size_of::<Counters>() as u32,
    slot_len: SLOT_LEN as u32,
    slot_count: SLOT_COUNT,
};

impl Header {
    /// True if this version serves slots with this header.
    fn is_served(&self) -> bool {
        let counters = COUNTERS_LEN_MIN..=(SLOTS_OFFSET - COUNTERS_OFFSET) as u32;
        counters.contains(&self.counters_len)
            && *self == Self { counters_len: self.counters_len, ..HEADER }
    }
}

/// The shared memory of one mount. Give its descriptor to each new server; both sides may read
/// the counters at any time.
pub struct Slots {
    memory: OwnedFd,
    map: NonNull<u8>,
}

// SAFETY: the mapping belongs to this value alone and lives as long as it does. Header and slot
// heads are written by the slot's owner, counters are atomics.
unsafe impl Send for Slots {}
// SAFETY: as above; a slot's index is handed to one thread at a time by the server's free list.
unsafe impl Sync for Slots {}

impl Slots {
    /// New, empty slots and counters at zero: about 140 KiB of memory.
    pub fn create() -> Result<Self> {
        let new = || -> Result<OwnedFd, Errno> {
            let memory = memfd_create(
                "burgeon-slots",
                MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING | MemfdFlags::NOEXEC_SEAL,
            )
            // NOEXEC_SEAL is new in 6.3.
            .or_else(|_| {
                memfd_create("burgeon-slots", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)
            })?;
            ftruncate(&memory, MAP_LEN as u64)?;
            fcntl_add_seals(&memory, SEALS)?;
            rustix::io::pwrite(&memory, HEADER.as_bytes(), 0)?;
            Ok(memory)
        };
        Self::map(new().map_err(|e| failed("cannot make the shared memory of a mount", e))?)
    }

    /// The slots behind a descriptor that [`Slots::create`] made, perhaps in another process and
    /// by another version: `UnsupportedFormat` if this one does not serve its layout.
    pub fn from_fd(memory: OwnedFd) -> Result<Self> {
        let what = "cannot take over the shared memory of a mount";
        let len = fstat(&memory).map_err(|e| failed(what, e))?.st_size;
        let sealed = fcntl_get_seals(&memory).is_ok_and(|seals| seals.contains(SEALS));
        let mut header = [0; size_of::<Header>()];
        let read = rustix::io::pread(&memory, &mut header, 0).map_err(|e| failed(what, e))?;
        let served = read == header.len()
            && Header::read_from_bytes(&header).is_ok_and(|header| header.is_served());
        if !sealed || len != MAP_LEN as i64 || !served {
            return Err(Error::new(
                ErrorKind::UnsupportedFormat,
                "the requests in flight were left by another version of Burgeon, whose table of \
                 slots this one does not know: run that version again, or unmount first",
            ));
        }
        Self::map(memory)
    }

    fn map(memory: OwnedFd) -> Result<Self> {
        let flags = MapFlags::SHARED | MapFlags::POPULATE;
        // SAFETY: a new mapping at an address of the kernel's choice; the file is sealed, so it
        // cannot be cut short under it.
        let map = unsafe {
            mmap(ptr::null_mut(), MAP_LEN, ProtFlags::READ | ProtFlags::WRITE, flags, &memory, 0)
        };
        let map = map.map_err(|e| failed("cannot map the shared memory of a mount", e))?;
        let map = NonNull::new(map.cast())
            .ok_or_else(|| failed("cannot map the shared memory of a mount", Errno::NOMEM))?;
        Ok(Self { memory, map })
    }

    /// The memory's descriptor, to hand to a server (`SCM_RIGHTS`).
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.memory.as_fd()
    }

    /// The mount's counters since it was made, over all its servers.
    pub fn counters(&self) -> &Counters {
        // SAFETY: the mapping is long enough, aligned, lives as long as `self`, and `Counters` is
        // atomics, for which every bit pattern is valid.
        unsafe { self.map.byte_add(COUNTERS_OFFSET).cast().as_ref() }
    }

    /// Number of requests that can be in work at once.
    pub fn slot_count(&self) -> usize {
        SLOT_COUNT as usize
    }

    /// Number of slots that hold a request that may be unanswered.
    pub fn unanswered(&self) -> usize {
        (0..SLOT_COUNT).filter(|slot| self.is_unanswered(*slot)).count()
    }

    pub(crate) fn is_unanswered(&self, slot: u32) -> bool {
        self.request_len(slot).load(Acquire) != 0
    }

    /// Counts one more try at the slot's request and returns how many there were before.
    pub(crate) fn begin_replay(&self, slot: u32) -> u32 {
        self.attempts(slot).fetch_add(1, Relaxed)
    }

    /// The slot's request is answered.
    pub(crate) fn clear(&self, slot: u32) {
        self.attempts(slot).store(0, Relaxed);
        self.request_len(slot).store(0, Release);
    }

    /// Drops all requests: their connection is gone, or the kernel sends them again. No server may
    /// use the slots meanwhile.
    pub fn forget_requests(&self) {
        (0..SLOT_COUNT).for_each(|slot| self.clear(slot));
    }

    /// Buffer for the kernel to write a request to: [`REQUEST_LEN`] bytes, valid while `self`
    /// lives.
    pub(crate) fn request_pointer(&self, slot: u32) -> *mut u8 {
        // SAFETY: within the mapping, as `slot()` checks.
        unsafe { self.slot(slot).add(REQUEST_OFFSET).as_ptr() }
    }

    /// A copy of the head of the slot's request. The caller owns the slot.
    pub(crate) fn request(&self, slot: u32) -> [u8; REQUEST_LEN] {
        let mut copy = [0; REQUEST_LEN];
        // SAFETY: both are `REQUEST_LEN` bytes, apart from each other; the kernel writes to the
        // slot only within a `read` of its owner, which is the caller.
        unsafe {
            ptr::copy_nonoverlapping(self.request_pointer(slot), copy.as_mut_ptr(), REQUEST_LEN);
        }
        copy
    }

    fn attempts(&self, slot: u32) -> &AtomicU32 {
        // SAFETY: within the mapping and aligned to 256 bytes; accessed as an atomic only.
        unsafe { self.slot(slot).cast().as_ref() }
    }

    /// The first field of `fuse_in_header`: the request's length.
    fn request_len(&self, slot: u32) -> &AtomicU32 {
        // SAFETY: within the mapping and aligned to 64 bytes; others than the kernel access it as
        // an atomic only, or own the slot.
        unsafe { self.slot(slot).add(REQUEST_OFFSET).cast().as_ref() }
    }

    fn slot(&self, slot: u32) -> NonNull<u8> {
        assert!(slot < SLOT_COUNT, "there is no slot {slot}");
        // SAFETY: within the mapping: `MAP_LEN` has room for `SLOT_COUNT` slots.
        unsafe { self.map.byte_add(SLOTS_OFFSET + slot as usize * SLOT_LEN) }
    }
}

impl AsRef<Counters> for Slots {
    fn as_ref(&self) -> &Counters {
        self.counters()
    }
}

impl Drop for Slots {
    fn drop(&mut self) {
        // SAFETY: the mapping was made by `map` with this length, and no borrow outlives `self`.
        // Unmapping a whole mapping does not fail.
        let _ = unsafe { munmap(self.map.as_ptr().cast(), MAP_LEN) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Does to a slot as the kernel does when it copies a request.
    fn put(slots: &Slots, slot: u32, bytes: &[u8]) {
        // SAFETY: shorter than a slot's request.
        unsafe {
            ptr::copy_nonoverlapping(bytes.as_ptr(), slots.request_pointer(slot), bytes.len());
        }
    }

    #[test]
    fn a_successor_sees_requests_and_counters() {
        let first = Slots::create().unwrap();
        assert_eq!(first.unanswered(), 0);
        first.counters().hits.add(3);
        put(&first, 511, &80u32.to_ne_bytes());
        let second = Slots::from_fd(first.fd().try_clone_to_owned().unwrap()).unwrap();
        drop(first);
        assert_eq!(second.counters().hits.get(), 3);
        assert_eq!(second.unanswered(), 1);
        assert!(second.is_unanswered(511));
        assert_eq!(second.request(511)[..4], 80u32.to_ne_bytes());
        assert_eq!((second.begin_replay(511), second.begin_replay(511)), (0, 1));
        second.clear(511);
        assert_eq!((second.unanswered(), second.begin_replay(511)), (0, 0));
        put(&second, 3, &80u32.to_ne_bytes());
        second.forget_requests();
        assert_eq!((second.unanswered(), second.counters().hits.get()), (0, 3));
    }

    /// The header that the first version wrote.
    const RECORDED: [u8; 24] = *b"burgslot\x01\0\0\0\x60\x1f\0\0\x00\x01\0\0\x00\x02\0\0";

    #[test]
    fn slots_of_the_layout_before_are_served() {
        let before = Slots::create().unwrap();
        rustix::io::pwrite(before.fd(), &RECORDED, 0).unwrap();
        // A hit, and a request that nobody has answered.
        rustix::io::pwrite(before.fd(), &1u64.to_ne_bytes(), 4096).unwrap();
        rustix::io::pwrite(before.fd(), &80u32.to_ne_bytes(), 12288 + 7 * 256 + 64).unwrap();
        let slots = Slots::from_fd(before.fd().try_clone_to_owned().unwrap()).unwrap();
        let counters = slots.counters();
        assert_eq!((counters.hits.get(), counters.background_bytes.get()), (1, 0));
        assert!(slots.is_unanswered(7) && slots.unanswered() == 1);
        counters.background_bytes.add(5);
        assert_eq!((slots.unanswered(), before.counters().background_bytes.get()), (1, 5));
    }

    #[test]
    fn another_version_is_refused() {
        let refused = |at: u64, word: u32| {
            let slots = Slots::create().unwrap();
            rustix::io::pwrite(slots.fd(), &word.to_ne_bytes(), at).unwrap();
            let error = Slots::from_fd(slots.fd().try_clone_to_owned().unwrap()).err().unwrap();
            assert_eq!(error.kind(), ErrorKind::UnsupportedFormat, "{at} {word}");
        };
        refused(8, 2);
        refused(12, COUNTERS_LEN_MIN - 8);
        refused(12, 8192 + 8);
        refused(16, 512);
        refused(20, 1024);
        let file: OwnedFd = tempfile::tempfile().unwrap().into();
        assert!(Slots::from_fd(file).is_err());
    }

    #[test]
    fn slots_lie_apart_and_in_pages() {
        let slots = Slots::create().unwrap();
        for slot in 0..SLOT_COUNT {
            put(&slots, slot, &[slot as u8 | 1; REQUEST_LEN]);
        }
        for slot in 0..SLOT_COUNT {
            assert_eq!(slots.request(slot), [slot as u8 | 1; REQUEST_LEN]);
            assert_eq!(slots.begin_replay(slot), 0);
        }
        assert_eq!(slots.request_pointer(0) as usize % 4096, REQUEST_OFFSET);
    }
}
