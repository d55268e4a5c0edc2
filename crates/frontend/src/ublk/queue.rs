//! One queue: its ring, its descriptors, its thread's life, and the answers of its tasks.

use std::{
    io, mem,
    os::{
        fd::{AsRawFd, BorrowedFd},
        unix::fs::FileExt,
    },
    ptr::{self, NonNull},
    sync::Arc,
};

use burgeon_block::{BlockDevice, Erase, Pages};
use io_uring::{IoUring, opcode, squeue, types};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use zerocopy::IntoBytes;

use super::{Shared, uapi::*};
use crate::engine::{
    self, Answer, Arrival, Call, Changes, End, Engine, LEN_MAX, Load, Loading, Request,
};

/// `user_data` of the read that waits for the mailbox. That of a tag's command is the tag; a read
/// of a local file for it has this bit, too.
const WAKE: u64 = u64::MAX;
const LOAD: u64 = 1 << 32;

/// Buffers of a queue beside the thread's: reads of local files that are in work at once. With all
/// of them in use, the thread reads the next place itself.
const LOADS_MAX: usize = 8;

pub(super) struct Queue<D, A> {
    // Dropped first: it waits for the kernel to let go of the ring's buffers.
    ring: Ring,
    engine: Arc<Engine<D, A>>,
}

/// The part of a queue that does not depend on its device.
struct Ring {
    number: u16,
    ring: IoUring,
    descriptors: Descriptors,
    /// Buffer of hits.
    buffer: Pages,
    /// Buffers for reads of local files; at most [`LOADS_MAX`] with those in use.
    spare: Vec<Pages>,
    /// By tag: its read of a local file that is under way, and the buffer.
    loads: Vec<Option<(Load, Pages)>>,
    loading: usize,
    /// Buffer for the count that the mailbox's eventfd is read into.
    wakes: Box<u64>,
    /// Tags whose fetch command is in the kernel.
    fetching: u16,
    /// Tags that tasks have.
    parked: u16,
    shared: Arc<Shared>,
}

/// An event of a queue's ring.
enum Event {
    Woken,
    Request(u16),
    /// The device is being stopped: the tag is not fetched with again.
    Gone,
    Loaded(u16, io::Result<usize>),
    Failed(i32),
}

impl<D: BlockDevice, A: Changes<D>> Queue<D, A> {
    /// Sets everything up and fetches with all tags. On the thread that is to run it.
    pub(super) fn new(
        number: u16,
        depth: u16,
        shared: Arc<Shared>,
        engine: Arc<Engine<D, A>>,
    ) -> io::Result<Self> {
        Ok(Self { ring: Ring::new(number, depth, shared)?, engine })
    }

    /// The thread's life: until the device is stopped, or the server is told to leave.
    pub(super) fn run(mut self) -> End {
        loop {
            match self.ring.wait() {
                Ok(()) => {}
                Err(e) => return End::Failed(e.raw_os_error().unwrap_or(libc::EIO)),
            }
            while let Some(event) = self.ring.next() {
                match event {
                    Event::Woken => self.ring.commit_answered(),
                    Event::Request(tag) => self.handle(tag),
                    Event::Gone => {}
                    Event::Loaded(tag, result) => self.resume(tag, result),
                    Event::Failed(errno) => return End::Failed(errno),
                }
            }
            if self.ring.shared.life.is_stopping() {
                return End::Stopped;
            }
            if self.ring.fetching == 0 && self.ring.parked == 0 && self.ring.loading == 0 {
                return End::Unmounted;
            }
        }
    }

    /// Answers the request of `tag`, now or with a task.
    fn handle(&mut self, tag: u16) {
        let arrival = Arrival::now();
        match request(self.ring.descriptors.get(tag)) {
            Ok(request) => {
                let call = TagCall { ring: &mut self.ring, tag, own: None };
                self.engine.serve(request, arrival, call);
            }
            Err(errno) => self.ring.push_command(COMMIT_AND_FETCH_REQ, tag, -errno),
        }
    }

    /// Goes on with a read whose piece of a local file is in its buffer.
    fn resume(&mut self, tag: u16, result: io::Result<usize>) {
        if let Some((load, pages)) = self.ring.loads[usize::from(tag)].take() {
            let call = TagCall { ring: &mut self.ring, tag, own: Some(pages) };
            self.engine.resume(load, result, call);
        }
    }
}

/// The request of a descriptor. The error is an errno.
#[inline]
fn request(descriptor: Descriptor) -> Result<Request, i32> {
    let bytes = u64::from(descriptor.sectors) << SECTOR_SHIFT;
    let at = descriptor.start_sector.checked_mul(1 << SECTOR_SHIFT).ok_or(libc::EINVAL);
    let (flags, len) = (descriptor.op_flags, bytes as usize);
    Ok(match flags & OP_MASK {
        OP_READ => Request::Read { at: at?, len },
        OP_WRITE => Request::Write { at: at?, len, fua: flags & OP_FUA != 0 },
        // It has no place: the driver passes on a sector of all ones.
        OP_FLUSH => Request::Flush,
        OP_DISCARD => Request::Erase { at: at?, len: bytes, how: Erase::Discard },
        OP_WRITE_ZEROES => {
            let how = Erase::Zeroes { unmap: flags & OP_NO_UNMAP == 0 };
            Request::Erase { at: at?, len: bytes, how }
        }
        _ => return Err(libc::EOPNOTSUPP),
    })
}

impl Ring {
    fn new(number: u16, depth: u16, shared: Arc<Shared>) -> io::Result<Self> {
        // Room for every tag's command and the mailbox's read, so that pushing never fails.
        let entries = (u32::from(depth) + 1).next_power_of_two();
        let ring = IoUring::builder()
            .setup_single_issuer()
            .setup_coop_taskrun()
            .setup_defer_taskrun()
            .build(entries)?;
        let buffer = Pages::zeroed(LEN_MAX as u64).ok_or(io::ErrorKind::OutOfMemory)?;
        let mut queue = Self {
            number,
            ring,
            descriptors: Descriptors::map(&shared.file, number, depth)?,
            buffer,
            spare: Vec::with_capacity(LOADS_MAX),
            loads: (0..depth).map(|_| None).collect(),
            loading: 0,
            wakes: Box::new(0),
            fetching: 0,
            parked: 0,
            shared,
        };
        queue.listen();
        for tag in 0..depth {
            queue.push_command(FETCH_REQ, tag, 0);
        }
        queue.ring.submit()?;
        Ok(queue)
    }

    /// Sends the committed answers, and waits until there is an event.
    fn wait(&mut self) -> io::Result<()> {
        match self.ring.submit_and_wait(1) {
            Ok(_) => Ok(()),
            Err(e) if matches!(e.raw_os_error(), Some(libc::EINTR | libc::EBUSY)) => Ok(()),
            Err(e) => Err(e),
        }
    }

    /// The next event, if there is one.
    #[inline]
    fn next(&mut self) -> Option<Event> {
        let done = self.ring.completion().next()?;
        let (data, result) = (done.user_data(), done.result());
        if data == WAKE {
            return Some(Event::Woken);
        }
        let tag = data as u16;
        if data & LOAD != 0 {
            self.loading -= 1;
            let read = usize::try_from(result);
            let read = read.map_err(|_| io::Error::from_raw_os_error(-result));
            return Some(Event::Loaded(tag, read));
        }
        self.fetching -= 1;
        Some(match -result {
            0 => Event::Request(tag),
            libc::ENODEV => Event::Gone,
            errno => Event::Failed(errno),
        })
    }

    /// Commits the answers of tasks.
    fn commit_answered(&mut self) {
        let shared = self.shared.clone();
        shared.mailboxes[usize::from(self.number)].take(|tag, result| {
            self.parked -= 1;
            self.push_command(COMMIT_AND_FETCH_REQ, tag, result);
        });
        self.listen();
    }

    /// A buffer for a read of a local file, unless [`LOADS_MAX`] are in use.
    fn spare_buffer(&mut self) -> Option<Pages> {
        match self.spare.pop() {
            Some(pages) => Some(pages),
            None if self.loading < LOADS_MAX => Pages::zeroed(LEN_MAX as u64),
            None => None,
        }
    }

    /// Takes the buffer of an answered or parked request, if it is not the thread's.
    #[inline]
    fn give_back(&mut self, own: Option<Pages>) {
        if let Some(pages) = own {
            self.spare.push(pages);
        }
    }

    /// Reads a place of a local file into `pages`, with the next [`Ring::wait`].
    fn load(&mut self, tag: u16, load: Load, file: BorrowedFd<'_>, mut pages: Pages) {
        let piece = &mut pages.bytes_mut()[load.part()];
        let (start, len) = (piece.as_mut_ptr(), piece.len() as u32);
        let read = opcode::Read::new(types::Fd(file.as_raw_fd()), start, len);
        let read = read.offset(load.range().start()).build().user_data(LOAD | u64::from(tag));
        self.loads[usize::from(tag)] = Some((load, pages));
        self.loading += 1;
        self.push(read);
    }

    fn push_command(&mut self, op: u32, tag: u16, result: i32) {
        self.fetching += 1;
        let command = IoCommand { queue: self.number, tag, result, address: 0 };
        let mut inline = [0; 16];
        inline.copy_from_slice(command.as_bytes());
        let file = types::Fd(self.shared.file.as_raw_fd());
        let entry = opcode::UringCmd16::new(file, op).cmd(inline).build();
        self.push(entry.user_data(tag.into()));
    }

    /// Waits for the mailbox in the ring.
    fn listen(&mut self) {
        let mailbox = types::Fd(self.shared.mailboxes[usize::from(self.number)].fd());
        let wakes = ptr::from_mut(&mut *self.wakes).cast();
        self.push(opcode::Read::new(mailbox, wakes, 8).build().user_data(WAKE));
    }

    fn push(&mut self, entry: squeue::Entry) {
        // SAFETY: commands refer to no memory, and the mailbox's read to `wakes`, which outlives
        // the ring: its drop order is that of the fields. A read of a local file refers to a buffer
        // in `loads`, which stays there until the read has ended (`drop`), and to a file that the
        // device keeps open; the queue has the device.
        let pushed = unsafe { self.ring.submission().push(&entry) };
        assert!(pushed.is_ok(), "the ring has room for all tags");
    }
}

impl Drop for Ring {
    /// Waits until no read of a local file is in work: the kernel writes into the buffers no more.
    fn drop(&mut self) {
        while self.loading > 0 {
            match self.wait() {
                Ok(()) => while self.next().is_some() {},
                // It cannot be waited for: the memory is given up instead.
                Err(_) => return mem::forget(mem::take(&mut self.loads)),
            }
        }
    }
}

/// A request that a queue's thread owns.
struct TagCall<'a> {
    ring: &'a mut Ring,
    tag: u16,
    /// Its buffer, where it is not the thread's.
    own: Option<Pages>,
}

impl Call for TagCall<'_> {
    type Parked = Parked;

    #[inline]
    fn buffer(&mut self, len: usize) -> Result<&mut [u8], i32> {
        let pages = self.own.as_mut().unwrap_or(&mut self.ring.buffer);
        Ok(&mut pages.bytes_mut()[..len])
    }

    fn load(mut self, load: Load, file: BorrowedFd<'_>) -> Loading<Self> {
        let (tag, own) = (self.tag, self.own.take());
        // The thread's buffer holds the loaded bytes, and is needed for the next request.
        let pages = own.or_else(|| {
            let spare = self.ring.spare_buffer()?;
            Some(mem::replace(&mut self.ring.buffer, spare))
        });
        match pages {
            Some(pages) => {
                self.ring.load(tag, load, file, pages);
                Loading::Later
            }
            None => {
                let result = load.read_now(file, self.ring.buffer.bytes_mut());
                Loading::Here(self, result)
            }
        }
    }

    #[inline]
    fn reply(self, answer: Result<usize, i32>) {
        let Self { ring, tag, own } = self;
        let result = match answer {
            Ok(len) => {
                let pages = own.as_ref().unwrap_or(&ring.buffer);
                ring.shared.put(ring.number, tag, &pages.bytes()[..len])
            }
            Err(errno) => -errno,
        };
        ring.give_back(own);
        ring.push_command(COMMIT_AND_FETCH_REQ, tag, result);
    }

    fn park(self) -> Parked {
        let Self { ring, tag, own } = self;
        ring.give_back(own);
        ring.parked += 1;
        Parked { shared: ring.shared.clone(), queue: ring.number, tag }
    }
}

impl Shared {
    /// Puts the bytes of an answer into its request; returns the result to commit.
    fn put(&self, queue: u16, tag: u16, bytes: &[u8]) -> i32 {
        match self.file.write_all_at(bytes, data_offset(queue, tag)) {
            Ok(()) => bytes.len() as i32,
            // The device is being stopped, or the reader's memory is gone.
            Err(e) => -e.raw_os_error().unwrap_or(libc::EIO),
        }
    }
}

/// A request that belongs to a task. Dropped without an answer it stays for a successor. While it
/// lives, the descriptor of `/dev/ublkcN` does.
struct Parked {
    shared: Arc<Shared>,
    queue: u16,
    tag: u16,
}

impl engine::Parked for Parked {
    fn copy_payload(&mut self, into: &mut [u8]) -> Result<(), i32> {
        let copied = self.shared.file.read_exact_at(into, data_offset(self.queue, self.tag));
        copied.map_err(|e| e.raw_os_error().unwrap_or(libc::EIO))
    }

    fn answer(self, answer: Answer<'_>) {
        let result = match answer {
            Answer::Bytes(bytes) => self.shared.put(self.queue, self.tag, bytes),
            Answer::Written(len) => len as i32,
            Answer::Done => 0,
            Answer::Failed(errno) => -errno,
            // A request has no memory of its own here.
            Answer::Own(_) => -libc::EIO,
        };
        self.shared.mailboxes[usize::from(self.queue)].post(self.tag, result);
    }
}

/// The requests of a queue, by tag, in memory that the driver writes.
struct Descriptors {
    map: NonNull<Descriptor>,
    depth: u16,
}

// SAFETY: the mapping belongs to this value alone.
unsafe impl Send for Descriptors {}

impl Descriptors {
    fn map(file: &std::fs::File, queue: u16, depth: u16) -> io::Result<Self> {
        let len = Self::len(depth);
        let flags = MapFlags::SHARED | MapFlags::POPULATE;
        // SAFETY: a new mapping at an address of the kernel's choice.
        let map = unsafe {
            mmap(ptr::null_mut(), len, ProtFlags::READ, flags, file, descriptors_offset(queue))
        }?;
        let map = NonNull::new(map.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self { map, depth })
    }

    /// The length that the driver wants mapped: whole pages.
    fn len(depth: u16) -> usize {
        let len = usize::from(depth) * size_of::<Descriptor>();
        len.next_multiple_of(rustix::param::page_size())
    }

    /// A copy of the request of `tag`, which the driver has handed out.
    fn get(&self, tag: u16) -> Descriptor {
        assert!(tag < self.depth, "the driver knows no tag {tag}");
        // SAFETY: within the mapping, and the driver writes a descriptor only before it completes
        // the tag's fetch command. Volatile, because the compiler knows nothing of the driver.
        unsafe { self.map.add(usize::from(tag)).read_volatile() }
    }
}

impl Drop for Descriptors {
    fn drop(&mut self) {
        // SAFETY: mapped by `map` with this length. Unmapping a whole mapping does not fail.
        let _ = unsafe { munmap(self.map.as_ptr().cast(), Self::len(self.depth)) };
    }
}

#[cfg(test)]
mod hits;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn descriptors_are_understood() {
        let parsed = |op_flags, sectors, start_sector| {
            request(Descriptor { op_flags, sectors, start_sector, address: 0 })
        };
        let (at, len) = (8 << 9, 4096);
        assert_eq!(parsed(OP_READ, 8, 8), Ok(Request::Read { at, len }));
        assert_eq!(parsed(OP_READ, 8, u64::MAX), Err(libc::EINVAL));
        assert_eq!(parsed(OP_WRITE, 8, 8), Ok(Request::Write { at, len, fua: false }));
        assert_eq!(parsed(OP_WRITE | OP_FUA, 8, 8), Ok(Request::Write { at, len, fua: true }));
        assert_eq!(parsed(OP_FLUSH, 0, u64::MAX), Ok(Request::Flush));
        for (op, how) in [
            (OP_DISCARD, Erase::Discard),
            (OP_WRITE_ZEROES, Erase::Zeroes { unmap: true }),
            (OP_WRITE_ZEROES | OP_NO_UNMAP, Erase::Zeroes { unmap: false }),
        ] {
            assert_eq!(parsed(op, 8, 8), Ok(Request::Erase { at, len: 4096, how }));
        }
        assert_eq!(parsed(9, 8, 8), Err(libc::EOPNOTSUPP));
    }
}
