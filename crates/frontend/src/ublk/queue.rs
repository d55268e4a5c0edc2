//! One queue: its ring, its descriptors, its thread's life, and the tasks of its misses.

use std::{
    io,
    os::{fd::AsRawFd, unix::fs::FileExt},
    panic::{AssertUnwindSafe, catch_unwind},
    ptr::{self, NonNull},
    sync::{Arc, atomic::Ordering::SeqCst},
    time::Instant,
};

use burgeon_block::{BLOCK_SIZE, BlockDevice, Now, Pages};
use io_uring::{IoUring, opcode, squeue, types};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use zerocopy::IntoBytes;

use super::{Shared, uapi::*};
use crate::{fuse::READ_MAX, server::End};

/// `user_data` of the read that waits for the mailbox; others are tags.
const WAKE: u64 = u64::MAX;

pub(super) struct Queue<D> {
    number: u16,
    ring: IoUring,
    descriptors: Descriptors,
    buffer: Pages,
    /// Where the read of the mailbox's eventfd puts its count.
    wakes: Box<u64>,
    /// Tags whose fetch command is in the kernel.
    fetching: u16,
    /// Tags that tasks have.
    parked: u16,
    shared: Arc<Shared>,
    device: Arc<D>,
}

/// A read of whole blocks within the device.
#[derive(Clone, Copy)]
struct BlockRead {
    tag: u16,
    offset: u64,
    len: usize,
    begun: Instant,
}

impl<D: BlockDevice> Queue<D> {
    /// Sets everything up and fetches with all tags. On the thread that is to run it.
    pub(super) fn new(
        number: u16,
        depth: u16,
        shared: Arc<Shared>,
        device: Arc<D>,
    ) -> io::Result<Self> {
        // Room for every tag's command and the mailbox's read, so that pushing never fails.
        let entries = (u32::from(depth) + 1).next_power_of_two();
        let ring = IoUring::builder()
            .setup_single_issuer()
            .setup_coop_taskrun()
            .setup_defer_taskrun()
            .build(entries)?;
        let buffer = Pages::zeroed(READ_MAX as u64).ok_or(io::ErrorKind::OutOfMemory)?;
        let descriptors = Descriptors::map(&shared.file, number, depth)?;
        let wakes = Box::new(0);
        let (fetching, parked) = (0, 0);
        let mut queue =
            Self { number, ring, descriptors, buffer, wakes, fetching, parked, shared, device };
        queue.listen();
        for tag in 0..depth {
            queue.push_command(FETCH_REQ, tag, 0);
        }
        queue.ring.submit()?;
        Ok(queue)
    }

    /// The thread's life: until the device is stopped, or the server is told to leave.
    pub(super) fn run(mut self) -> End {
        loop {
            match self.ring.submit_and_wait(1) {
                Ok(_) => {}
                Err(e) if matches!(e.raw_os_error(), Some(libc::EINTR | libc::EBUSY)) => {}
                Err(e) => return End::Failed(e.raw_os_error().unwrap_or(libc::EIO)),
            }
            loop {
                let next = self.ring.completion().next();
                let Some(done) = next else { break };
                if done.user_data() == WAKE {
                    self.heed_mailbox();
                    continue;
                }
                self.fetching -= 1;
                match -done.result() {
                    0 => self.handle(done.user_data() as u16),
                    // The device is being stopped: the tag is not fetched with again.
                    libc::ENODEV => {}
                    errno => return End::Failed(errno),
                }
            }
            if self.shared.is_stopping() {
                return End::Stopped;
            }
            if self.fetching == 0 && self.parked == 0 {
                return End::Unmounted;
            }
        }
    }

    /// Commits what tasks have answered.
    fn heed_mailbox(&mut self) {
        let shared = self.shared.clone();
        shared.mailboxes[usize::from(self.number)].take(|tag, result| {
            self.parked -= 1;
            self.push_command(COMMIT_AND_FETCH_REQ, tag, result);
        });
        self.listen();
    }

    /// Answers the request of `tag`, now or with a task.
    fn handle(&mut self, tag: u16) {
        let begun = Instant::now();
        let result = match self.block_read(self.descriptors.get(tag)) {
            Err(errno) => -errno,
            Ok((offset, len)) => match self.read(BlockRead { tag, offset, len, begun }) {
                Some(result) => result,
                None => return,
            },
        };
        self.push_command(COMMIT_AND_FETCH_REQ, tag, result);
    }

    /// Offset and length of a read in bytes; anything else is refused.
    fn block_read(&self, request: Descriptor) -> Result<(u64, usize), i32> {
        if request.op_flags & OP_MASK != OP_READ {
            return Err(libc::EOPNOTSUPP);
        }
        let len = u64::from(request.sectors) << SECTOR_SHIFT;
        let offset = request.start_sector.checked_mul(1 << SECTOR_SHIFT).ok_or(libc::EINVAL)?;
        let within = offset.checked_add(len).is_some_and(|end| end <= self.device.size());
        let whole = offset.is_multiple_of(BLOCK_SIZE) && len.is_multiple_of(BLOCK_SIZE);
        if !within || !whole || len > READ_MAX as u64 {
            return Err(libc::EINVAL);
        }
        Ok((offset, len as usize))
    }

    /// The result of a read, or `None` if a task has it now.
    fn read(&mut self, read: BlockRead) -> Option<i32> {
        let bytes = &mut self.buffer.bytes_mut()[..read.len];
        let device = &self.device;
        let tried = catch_unwind(AssertUnwindSafe(|| device.try_read(read.offset, bytes)));
        let counters = self.shared.slots.counters();
        let error = match tried {
            Ok(Ok(Now::Served)) => {
                // Counted before the reply, so that whoever has read sees it counted.
                counters.hits.add(1);
                counters.hit_bytes.add(read.len as u64);
                counters.hit_latency.record(read.begun.elapsed().as_nanos() as u64);
                return Some(self.shared.put(self.number, read.tag, bytes));
            }
            Ok(Ok(Now::Absent | Now::Local(_))) => {
                self.parked += 1;
                let parked = Parked::new(self.shared.clone(), self.number, read.tag);
                let device = self.device.clone();
                self.shared.runtime.spawn(miss(parked, device, read));
                return None;
            }
            Ok(Err(error)) => error.errno(),
            Err(_panic) => libc::EIO,
        };
        counters.failed_reads.add(1);
        Some(-error)
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
        // the ring: its drop order is that of the fields.
        let pushed = unsafe { self.ring.submission().push(&entry) };
        assert!(pushed.is_ok(), "the ring has room for all tags");
    }
}

impl Shared {
    /// Puts the bytes of an answer into its request; returns what to commit.
    fn put(&self, queue: u16, tag: u16, bytes: &[u8]) -> i32 {
        match self.file.write_all_at(bytes, data_offset(queue, tag)) {
            Ok(()) => bytes.len() as i32,
            // The device is being stopped, or the reader's memory is gone.
            Err(e) => -e.raw_os_error().unwrap_or(libc::EIO),
        }
    }
}

/// A request that belongs to a task. Dropped without an answer it stays for a successor; unless
/// the task panicked, for then a successor would, too: it gets EIO.
struct Parked {
    shared: Arc<Shared>,
    queue: u16,
    tag: u16,
}

impl Parked {
    fn new(shared: Arc<Shared>, queue: u16, tag: u16) -> Self {
        shared.parked.fetch_add(1, SeqCst);
        Self { shared, queue, tag }
    }

    fn answer(&self, result: i32) {
        if result < 0 {
            self.shared.slots.counters().failed_reads.add(1);
        }
        self.shared.mailboxes[usize::from(self.queue)].post(self.tag, result);
    }
}

impl Drop for Parked {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.answer(-libc::EIO);
        }
        self.shared.parked.fetch_sub(1, SeqCst);
    }
}

/// The task of a read that has to wait.
async fn miss<D: BlockDevice>(parked: Parked, device: Arc<D>, read: BlockRead) {
    let shared = &parked.shared;
    let result = tokio::select! {
        biased;
        () = shared.cancelled() => return,
        result = fetch(shared, &*device, read) => result,
    };
    let result = match result {
        Ok(buffer) => {
            let counters = shared.slots.counters();
            counters.misses.add(1);
            counters.miss_bytes.add(read.len as u64);
            counters.miss_latency.record(read.begun.elapsed().as_nanos() as u64);
            shared.put(parked.queue, read.tag, &buffer.bytes()[..read.len])
        }
        Err(errno) => -errno,
    };
    parked.answer(result);
}

async fn fetch<D: BlockDevice>(shared: &Shared, device: &D, read: BlockRead) -> Result<Pages, i32> {
    let blocks = read.len.div_ceil(BLOCK_SIZE as usize) as u32;
    // Held until the reply is built; an error would mean a closed semaphore: none is.
    let _room = shared.miss_blocks.acquire_many(blocks).await.map_err(|_| libc::EIO)?;
    let mut buffer = Pages::zeroed(read.len as u64).ok_or(libc::ENOMEM)?;
    let bytes = &mut buffer.bytes_mut()[..read.len];
    device.read(read.offset, bytes).await.map_err(|error| error.errno())?;
    Ok(buffer)
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

    /// What the driver wants mapped: whole pages.
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
        // SAFETY: mapped by `map` with this length. Unmapping what was mapped does not fail.
        let _ = unsafe { munmap(self.map.as_ptr().cast(), Self::len(self.depth)) };
    }
}

#[cfg(test)]
mod hits;
