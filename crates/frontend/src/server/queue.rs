//! One queue of FUSE-over-io_uring: its memory, its ring, and the two commands it takes.
//!
//! ```text
//!   entry n:  ┌ 4 KiB: header ────────────────────────────────────┐┌ LEN_MAX: payload ┐
//!             │ in/out 128 │ arguments 128 │ commit id, length 32 ││ bytes of a read   │
//!             └───────────────────────────────────────────────────┘└───────────────────┘
//!
//!   REGISTER ──► with the kernel ──completion──► with its owner ──COMMIT_AND_FETCH──► with the kernel
//! ```
//!
//! Layouts are those of `linux/fuse.h` (`fuse_uring_req_header`, `fuse_uring_cmd_req`), 7.42.
//!
//! Invariant: an entry's memory is touched by the kernel, or by the one owner of its [`RingEntry`].

use std::{
    io,
    ops::Range,
    os::fd::{AsRawFd, BorrowedFd},
    ptr::{self, NonNull},
    sync::Arc,
};

use io_uring::{IoUring, cqueue, opcode, squeue::Entry128, types::Fixed};
use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};

use crate::{
    engine::{LEN_MAX, Load},
    fuse::RING_REQUEST_LEN,
};

const REGISTER: u32 = 1;
const COMMIT_AND_FETCH: u32 = 2;

const HEADER_LEN: usize = 288;
const ARGUMENTS_OFFSET: usize = 128;
const COMMIT_ID_OFFSET: usize = 256 + 8;
const PAYLOAD_LEN_OFFSET: usize = 256 + 16;

const PAYLOAD_OFFSET: usize = 4096;
const ENTRY_LEN: usize = PAYLOAD_OFFSET + LEN_MAX;

/// `user_data` of the wait for a wake-up. That of an entry's command is its index; a read of a
/// local file into it has this bit, too.
const WAKE: u64 = u64::MAX;
const LOAD: u64 = 1 << 32;

/// The memory of a queue's entries. Pages that no request has touched take no memory.
struct Memory {
    map: NonNull<u8>,
    len: usize,
}

// SAFETY: the mapping belongs to this value alone; its parts are reached through `RingEntry`s, and
// of each there is one.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

impl Memory {
    fn new(entries: u32) -> io::Result<Self> {
        let len = entries as usize * ENTRY_LEN;
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: a new mapping at an address of the kernel's choice.
        let map = unsafe {
            mmap_anonymous(ptr::null_mut(), len, ProtFlags::READ | ProtFlags::WRITE, flags)?
        };
        let map = NonNull::new(map.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self { map, len })
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: mapped by `new` with this length; entries and the ring hold an `Arc` of it.
        let _ = unsafe { munmap(self.map.as_ptr().cast(), self.len) };
    }
}

/// An entry that the kernel has handed out: a request, and room for its answer.
pub(super) struct RingEntry {
    memory: Arc<Memory>,
    index: u32,
}

impl RingEntry {
    fn part(&self, range: Range<usize>) -> NonNull<u8> {
        assert!(range.end <= ENTRY_LEN);
        // SAFETY: within the mapping: indexes come from completions that `Queue` has checked.
        unsafe { self.memory.map.add(self.index as usize * ENTRY_LEN + range.start) }
    }

    fn get<const N: usize>(&self, offset: usize) -> [u8; N] {
        // SAFETY: within the entry; every bit pattern is valid, and only this owner accesses
        // the bytes now.
        unsafe { self.part(offset..offset + N).cast::<[u8; N]>().read_unaligned() }
    }

    fn put<const N: usize>(&mut self, offset: usize, bytes: [u8; N]) {
        // SAFETY: as in `get`.
        unsafe { self.part(offset..offset + N).cast::<[u8; N]>().write_unaligned(bytes) }
    }

    /// The request, as `/dev/fuse` would have given its first bytes.
    pub(super) fn request(&self) -> [u8; RING_REQUEST_LEN] {
        let mut request = [0; RING_REQUEST_LEN];
        let (header, arguments) = request.split_at_mut(40);
        header.copy_from_slice(&self.get::<40>(0));
        arguments.copy_from_slice(&self.get::<{ RING_REQUEST_LEN - 40 }>(ARGUMENTS_OFFSET));
        request
    }

    /// Buffer for the answer's bytes: [`LEN_MAX`] of them, aligned to 4 KiB.
    pub(super) fn payload(&mut self) -> &mut [u8] {
        let start = self.part(PAYLOAD_OFFSET..ENTRY_LEN);
        // SAFETY: within the mapping and initialised (zeros at first); only this borrow of the
        // entry accesses it.
        unsafe { std::slice::from_raw_parts_mut(start.as_ptr(), LEN_MAX) }
    }

    /// Puts the answer's header, and the length of the payload that belongs to it, in place.
    pub(super) fn answer(&mut self, header: [u8; 16], payload_len: usize) {
        self.put(0, header);
        self.put(PAYLOAD_LEN_OFFSET, (payload_len as u32).to_ne_bytes());
    }
}

/// An event of a queue.
pub(super) enum Event {
    /// A request.
    Request(RingEntry),
    /// An entry is lost: the connection has ended, or the kernel refused the commit.
    Lost,
    /// The eventfd of [`Queue::await_wake`] was written to.
    Woken,
    /// [`Queue::load`] has ended.
    Loaded(RingEntry, Load, io::Result<usize>),
}

/// One CPU's ring. It belongs to the thread that made it.
pub(super) struct Queue {
    ring: IoUring<Entry128, cqueue::Entry>,
    memory: Arc<Memory>,
    id: u16,
    entries: u32,
    /// By entry: the read of a local file into it that is under way.
    loads: Vec<Option<Load>>,
    loading: usize,
}

impl Queue {
    /// Registers `entries` entries as the queue `id`. When the last of all possible CPUs has
    /// registered its own, the kernel begins to send requests.
    pub(super) fn new(fuse: BorrowedFd<'_>, id: u16, entries: u32) -> io::Result<Self> {
        // Every entry can be with the kernel at once, and the wake-up beside them.
        let ring = IoUring::builder()
            .setup_single_issuer()
            .setup_coop_taskrun()
            .setup_defer_taskrun()
            .build((entries + 1).next_power_of_two())?;
        ring.submitter().register_files(&[fuse.as_raw_fd()])?;
        let (memory, loads) = (Arc::new(Memory::new(entries)?), vec![None; entries as usize]);
        let mut queue = Self { ring, memory, id, entries, loads, loading: 0 };
        let parts: Vec<_> = (0..entries).map(|index| queue.parts(index)).collect();
        for (index, parts) in (0..).zip(&parts) {
            queue.push(queue.register(index, parts))?;
        }
        // The kernel reads `parts` in this call.
        queue.ring.submit()?;
        // An entry that could not be registered has completed already, with the reason.
        let refusal = queue.ring.completion().next();
        match refusal {
            Some(refusal) => Err(io::Error::from_raw_os_error(-refusal.result())),
            None => Ok(queue),
        }
    }

    /// Sends the committed answers, and waits until there is an event. An interrupt is an error.
    pub(super) fn wait(&mut self) -> io::Result<()> {
        self.ring.submit_and_wait(1).map(|_| ())
    }

    /// The next event, if there is one.
    pub(super) fn next(&mut self) -> Option<Event> {
        let completion = self.ring.completion().next()?;
        Some(match (completion.user_data(), completion.result()) {
            (WAKE, _) => Event::Woken,
            (index, 0) if index < u64::from(self.entries) => {
                Event::Request(RingEntry { memory: Arc::clone(&self.memory), index: index as u32 })
            }
            (load, result) if load & LOAD != 0 => {
                let index = load as u32;
                let Some(load) = self.loads.get_mut(index as usize).and_then(Option::take) else {
                    return Some(Event::Lost);
                };
                self.loading -= 1;
                let entry = RingEntry { memory: Arc::clone(&self.memory), index };
                let read = usize::try_from(result);
                let read = read.map_err(|_| io::Error::from_raw_os_error(-result));
                Event::Loaded(entry, load, read)
            }
            _ => Event::Lost,
        })
    }

    /// Reads `load`'s place of `file` into the entry, with the next [`Queue::wait`]. The file must
    /// stay open until this has ended.
    pub(super) fn load(&mut self, mut entry: RingEntry, load: Load, file: BorrowedFd<'_>) {
        let index = entry.index;
        let place = load.range().start();
        let piece = &mut entry.payload()[load.part()];
        let (start, len) = (piece.as_mut_ptr(), piece.len() as u32);
        let read = opcode::Read::new(io_uring::types::Fd(file.as_raw_fd()), start, len);
        let read = read.offset(place).build().user_data(LOAD | u64::from(index));
        // An entry is in one place at a time, so there is room for this as for its commit.
        if self.push(read.into()).is_ok() {
            self.loads[index as usize] = Some(load);
            self.loading += 1;
        }
    }

    /// Waits until no read of a local file is in work: the kernel writes into the entries no more.
    fn settle(&mut self) {
        while self.loading > 0 {
            match self.wait() {
                Ok(()) => while self.next().is_some() {},
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => {
                    // It cannot be waited for: the memory is given up instead.
                    std::mem::forget(Arc::clone(&self.memory));
                    return;
                }
            }
        }
    }

    /// Gives an answered entry back to the kernel, with the next [`Queue::wait`].
    pub(super) fn commit(&mut self, entry: RingEntry) -> io::Result<()> {
        let command = self.command(entry.get(COMMIT_ID_OFFSET));
        let command = opcode::UringCmd80::new(Fixed(0), COMMIT_AND_FETCH).cmd(command).build();
        self.push(command.user_data(u64::from(entry.index)))
    }

    /// Asks for one [`Event::Woken`] when the eventfd `event` has been written to.
    pub(super) fn await_wake(&mut self, event: BorrowedFd<'_>) -> io::Result<()> {
        let poll =
            opcode::PollAdd::new(io_uring::types::Fd(event.as_raw_fd()), libc::POLLIN as u32);
        self.push(poll.build().user_data(WAKE).into())
    }

    fn push(&mut self, entry: Entry128) -> io::Result<()> {
        // SAFETY: the targets of the entries (entry memory, an eventfd) live as long as the ring,
        // and the memory until no read into it is in work (`settle`); the parts of a registration
        // live until it is submitted.
        let pushed = unsafe { self.ring.submission().push(&entry) };
        // There is room for every entry at once.
        pushed.map_err(|_| io::ErrorKind::OutOfMemory.into())
    }

    fn parts(&self, index: u32) -> [libc::iovec; 2] {
        let entry = RingEntry { memory: Arc::clone(&self.memory), index };
        let part = |start, len| libc::iovec {
            iov_base: entry.part(start..start + len).as_ptr().cast(),
            iov_len: len,
        };
        [part(0, HEADER_LEN), part(PAYLOAD_OFFSET, LEN_MAX)]
    }

    fn register(&self, index: u32, parts: &[libc::iovec; 2]) -> Entry128 {
        let command = opcode::UringCmd80::new(Fixed(0), REGISTER)
            .cmd(self.command([0; 8]))
            .addr(Some(parts.as_ptr() as u64))
            .build()
            .user_data(u64::from(index));
        // SAFETY: an `Entry128` is a `struct io_uring_sqe` of 128 plain bytes.
        let mut bytes: [u8; 128] = unsafe { std::mem::transmute(command) };
        // `sqe.len`, the number of parts, which the builder has no word for.
        bytes[24..28].copy_from_slice(&(parts.len() as u32).to_ne_bytes());
        // SAFETY: as above.
        unsafe { std::mem::transmute(bytes) }
    }

    /// `struct fuse_uring_cmd_req`: flags, the commit's id, the queue's id.
    fn command(&self, commit_id: [u8; 8]) -> [u8; 80] {
        let mut command = [0; 80];
        command[8..16].copy_from_slice(&commit_id);
        command[16..18].copy_from_slice(&self.id.to_ne_bytes());
        command
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        self.settle();
    }
}

#[cfg(test)]
mod tests {
    use super::{COMMIT_ID_OFFSET, Memory, PAYLOAD_LEN_OFFSET, RingEntry};
    use crate::engine::LEN_MAX;

    #[test]
    fn entries_lie_apart_and_have_the_kernels_layout() {
        let memory = std::sync::Arc::new(Memory::new(2).unwrap());
        let mut entries = [0, 1].map(|index| RingEntry { memory: memory.clone(), index });
        entries[1].put(COMMIT_ID_OFFSET, 77u64.to_ne_bytes());
        entries[1].put(0, [1; 40]);
        entries[1].put(128, [2; 40]);
        entries[0].payload().fill(9);
        assert_eq!(entries[1].request()[..40], [1; 40]);
        assert_eq!(entries[1].request()[40..], [2; 40]);
        assert_eq!(entries[1].payload().len(), LEN_MAX);
        assert_eq!(entries[1].payload().as_ptr() as usize % 4096, 0);
        assert!(entries[1].payload().iter().all(|byte| *byte == 0));
        entries[1].answer([3; 16], 4096);
        assert_eq!(entries[1].get::<16>(0), [3; 16]);
        assert_eq!(entries[1].get(PAYLOAD_LEN_OFFSET), 4096u32.to_ne_bytes());
        assert_eq!(entries[1].get(COMMIT_ID_OFFSET), 77u64.to_ne_bytes());
    }
}
