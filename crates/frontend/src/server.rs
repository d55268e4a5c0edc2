//! Answers the kernel's requests to one FUSE file from a [`BlockDevice`].
//!
//! ```text
//!            ┌──────────── reader thread ────────────┐
//!   readv ──►│ slot ─► try_read ─► Served ─► writev   │   no allocation, no lock
//!            │              └────► Absent ─┐          │
//!            └────────────────────────────┼──────────┘
//!                the slot goes along      ▼      the thread takes a free slot and goes on
//!                     tokio task: wait for memory ─► read().await ─► writev ─► slot is free
//!
//!   a successor first answers what it finds in the slots, the same two ways
//! ```
//!
//! Where the connection has them, requests come over rings instead (`rings.rs`).
//!
//! Limits: a request needs a slot ([`SLOT_COUNT`]); a miss needs room for its bytes
//! ([`ServeOptions::miss_bytes_max`]). Who finds none waits; nothing is refused.
//!
//! Invariants (held by `tests/kill.rs`, `tests/transport.rs`, `tests/hit_path.rs`):
//! - A slot is owned by one thread or task, or is on the free list.
//! - A slot is cleared after its reply, never before.
//! - Stopping, or a runtime that goes away, leaves unanswered requests in their slots.

mod control;
mod queue;
mod rings;
mod stop;

use std::{
    io,
    os::fd::{AsRawFd, OwnedFd},
    panic::{AssertUnwindSafe, catch_unwind},
    sync::Arc,
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use burgeon_block::{BLOCK_SIZE, BlockDevice, Error, ErrorKind, Pages, Result, TryRead};
use tokio::{runtime::Handle, sync::Semaphore};

pub use self::control::End;
use self::control::{Control, Parked};
use crate::{
    fuse::{Operation, READ_BUFFER_MIN, READ_MAX, Request},
    slots::{REQUEST_LEN, SLOT_COUNT, Slots},
    sys::failed,
};

/// After so many servers died with the same request in hand, it gets EIO: it may be what kills
/// them. High enough for any row of unrelated deaths in the time a fetch takes.
const REPLAYS_MAX: u32 = 32;
/// Reads of `/dev/fuse` that may fail in a row for no known reason, 1 ms apart.
const READ_FAILURES_MAX: u32 = 1000;

/// How to serve one file.
#[derive(Clone)]
pub struct ServeOptions {
    /// Where misses run.
    pub runtime: Handle,
    /// Reader threads: each serves one hit at a time and has a buffer of 256 KiB.
    pub threads: usize,
    /// Memory that misses may take at once, in bytes; at least 256 KiB.
    pub miss_bytes_max: usize,
    /// Serve over io_uring: the connection must have been made for it, and no successor can go on
    /// from here.
    pub rings: bool,
}

impl ServeOptions {
    /// Two threads a CPU, between 2 and 8, and 32 MiB for misses.
    pub fn new(runtime: Handle) -> Self {
        let cpus = thread::available_parallelism().map_or(1, usize::from);
        Self { runtime, threads: (2 * cpus).clamp(2, 8), miss_bytes_max: 32 << 20, rings: false }
    }
}

/// A running server of one file. Dropping it stops it without waiting for misses.
pub struct Server {
    control: Arc<Control>,
    threads: Vec<JoinHandle<()>>,
}

/// Serves `device` on `fuse`, after answering what a predecessor left in `slots`. Returns at once.
///
/// The predecessor's process must be gone (waited for): slots have one owner. `Invalid` if the
/// device's size is not a whole number of blocks.
pub fn serve<D: BlockDevice>(
    fuse: OwnedFd,
    slots: Arc<Slots>,
    device: Arc<D>,
    options: &ServeOptions,
) -> Result<Server> {
    if !device.size().is_multiple_of(BLOCK_SIZE) {
        let what = format!("a device of {} bytes is not whole blocks of 4 KiB", device.size());
        return Err(Error::new(ErrorKind::Invalid, what));
    }
    stop::make_reads_interruptible().map_err(|e| failed("cannot install a signal handler", e))?;
    let control = Arc::new(Control::new(fuse, slots));
    let worker = Arc::new(Worker {
        control: control.clone(),
        device,
        runtime: options.runtime.clone(),
        miss_blocks: Semaphore::new(options.miss_bytes_max.max(READ_MAX) / BLOCK_SIZE as usize),
    });
    let mut server = Server { control, threads: Vec::new() };
    // Over rings, one thread is enough for the little that does not come that way.
    let threads = if options.rings { 1 } else { options.threads };
    for _ in 0..threads.clamp(1, SLOT_COUNT as usize / 2) {
        let buffer = Pages::zeroed(READ_MAX as u64)
            .ok_or_else(|| failed("no memory for a reader's buffer", rustix::io::Errno::NOMEM))?;
        let worker = worker.clone();
        let thread = thread::Builder::new()
            .name("fuse-reader".into())
            .spawn(move || worker.run(buffer))
            .map_err(|e| failed("cannot start a reader thread", e))?;
        server.threads.push(thread);
    }
    if options.rings {
        server.threads.extend(rings::start(&worker)?);
    }
    Ok(server)
}

impl Server {
    /// Waits until serving is over, for whichever reason.
    pub fn ended(&self) -> impl Future<Output = End> + Send + 'static {
        self.control.ended()
    }

    /// Stops reading requests, waits up to `drain` for the misses in work and returns how many
    /// requests are left for a successor: none is dropped, as long as someone holds the FUSE
    /// descriptor and the slots. Blocks; not for a thread of the runtime that runs the misses.
    pub fn stop(mut self, drain: Duration) -> usize {
        self.halt(drain);
        self.control.slots.unanswered()
    }

    fn halt(&mut self, drain: Duration) {
        self.control.request_stop();
        for thread in self.threads.drain(..) {
            stop::interrupt_until_finished(&thread);
            // A panic outside the device's code would be a bug here; its slot is replayed.
            let _ = thread.join();
        }
        self.control.drain(drain);
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.halt(Duration::ZERO);
    }
}

/// What all threads and tasks of a server share.
struct Worker<D> {
    control: Arc<Control>,
    device: Arc<D>,
    runtime: Handle,
    miss_blocks: Semaphore,
}

/// Whether the slot came back with the answer, or went along with a task.
#[derive(PartialEq, Eq)]
enum Handled {
    Answered,
    Parked,
}

/// A read of whole blocks within the device.
#[derive(Clone, Copy)]
struct BlockRead {
    unique: u64,
    offset: u64,
    len: usize,
    begun: Instant,
    replayed: bool,
}

impl<D: BlockDevice> Worker<D> {
    /// A reader thread's life.
    fn run(self: Arc<Self>, mut buffer: Pages) {
        stop::accept_interrupts();
        while let Some(slot) = self.control.next_replay() {
            if self.replay(slot, &mut buffer) == Handled::Answered {
                self.control.free(slot);
            }
        }
        let mut scratch = [0; READ_BUFFER_MIN];
        let mut held = None;
        let mut failures = 0;
        while let Some(slot) = held.take().or_else(|| self.control.take_free()) {
            if self.control.is_stopping() {
                self.control.free(slot);
                break;
            }
            match self.read_request(slot, &mut scratch) {
                Ok(()) => {
                    failures = 0;
                    if self.handle(slot, &mut buffer, false) == Handled::Answered {
                        held = Some(slot);
                    }
                    continue;
                }
                // Interrupted; or whoever asked went away while the kernel handed it out.
                Err(libc::EINTR | libc::EAGAIN | libc::ENOENT) => {}
                Err(libc::ENODEV | libc::ECONNABORTED) => self.control.end(End::Unmounted),
                Err(errno) if failures == READ_FAILURES_MAX => self.control.end(End::Failed(errno)),
                Err(_) => {
                    failures += 1;
                    thread::sleep(Duration::from_millis(1));
                }
            }
            self.control.slots.clear(slot);
            held = Some(slot);
        }
    }

    /// Lets the kernel put the next request into `slot`; waits for one. The error is an errno.
    fn read_request(&self, slot: u32, scratch: &mut [u8]) -> Result<(), i32> {
        let parts = [
            libc::iovec {
                iov_base: self.control.slots.request_pointer(slot).cast(),
                iov_len: REQUEST_LEN,
            },
            libc::iovec { iov_base: scratch.as_mut_ptr().cast(), iov_len: scratch.len() },
        ];
        // SAFETY: both parts are valid for their lengths; this thread owns the slot and `scratch`.
        // Raw pointers, because other threads look at the slot's length meanwhile.
        let len = unsafe { libc::readv(self.control.fuse.as_raw_fd(), parts.as_ptr(), 2) };
        if len < 0 {
            return Err(io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO));
        }
        Ok(())
    }

    fn replay(self: &Arc<Self>, slot: u32, buffer: &mut Pages) -> Handled {
        let control = &self.control;
        if control.slots.begin_replay(slot) < REPLAYS_MAX {
            return self.handle(slot, buffer, true);
        }
        if let Some(request) = Request::parse(&control.slots.request(slot)) {
            control.fail(request.unique, libc::EIO);
        }
        control.slots.clear(slot);
        Handled::Answered
    }

    /// Answers the request in `slot`, now or with a task.
    fn handle(self: &Arc<Self>, slot: u32, buffer: &mut Pages, replayed: bool) -> Handled {
        let control = &self.control;
        let begun = Instant::now();
        let Some(request) = Request::parse(&control.slots.request(slot)) else {
            control.slots.clear(slot);
            return Handled::Answered;
        };
        let unique = request.unique;
        match request.operation {
            Operation::Read { offset, len } => match self.block_read(offset, len) {
                Ok(len) => {
                    let read = BlockRead { unique, offset, len, begun, replayed };
                    return self.read(slot, read, buffer);
                }
                Err(errno) => control.reply_error(unique, errno),
            },
            Operation::Refuse(errno) => control.reply_error(unique, errno),
            Operation::Silence => {}
            operation => control.reply_small(unique, operation, self.device.size()),
        }
        control.slots.clear(slot);
        Handled::Answered
    }

    /// The bytes to answer a read with: fewer than asked for at the end. The loop's reads are
    /// whole blocks; others are refused.
    fn block_read(&self, offset: u64, len: u32) -> Result<usize, i32> {
        let whole = offset.is_multiple_of(BLOCK_SIZE) && u64::from(len) % BLOCK_SIZE == 0;
        if !whole || len as usize > READ_MAX {
            return Err(libc::EINVAL);
        }
        Ok(u64::from(len).min(self.device.size().saturating_sub(offset)) as usize)
    }

    fn read(self: &Arc<Self>, slot: u32, read: BlockRead, buffer: &mut Pages) -> Handled {
        let control = &self.control;
        let bytes = &mut buffer.bytes_mut()[..read.len];
        match self.try_now(read, bytes) {
            Ok(TryRead::Served) => control.reply(read.unique, bytes),
            Ok(TryRead::Absent) => {
                self.runtime.spawn(self.clone().miss(control.park(slot, read.unique), read));
                return Handled::Parked;
            }
            Err(errno) => control.fail(read.unique, errno),
        }
        control.slots.clear(slot);
        Handled::Answered
    }

    /// Tries to fill `bytes` from what is local. A hit is counted here, before the reply, so that
    /// whoever has read sees it counted.
    fn try_now(&self, read: BlockRead, bytes: &mut [u8]) -> Result<TryRead, i32> {
        let tried = catch_unwind(AssertUnwindSafe(|| self.device.try_read(read.offset, bytes)));
        let tried = tried.map_err(|_panic| libc::EIO)?.map_err(|error| error.errno())?;
        if tried == TryRead::Served {
            let counters = self.control.slots.counters();
            counters.hits.add(1);
            counters.hit_bytes.add(read.len as u64);
            counters.hit_latency.record(read.begun.elapsed().as_nanos() as u64);
            counters.replayed.add(u64::from(read.replayed));
        }
        Ok(tried)
    }

    fn count_miss(&self, read: BlockRead) {
        let counters = self.control.slots.counters();
        counters.misses.add(1);
        counters.miss_bytes.add(read.len as u64);
        counters.miss_latency.record(read.begun.elapsed().as_nanos() as u64);
        counters.replayed.add(u64::from(read.replayed));
    }

    /// The task of a read that has to wait. When it is dropped or cancelled, `parked` leaves the
    /// request to a successor.
    async fn miss(self: Arc<Self>, parked: Parked, read: BlockRead) {
        let result = tokio::select! {
            biased;
            () = self.control.cancelled() => return,
            result = self.fetch(read) => result,
        };
        match result {
            Ok(buffer) => {
                self.count_miss(read);
                self.control.reply(read.unique, &buffer.bytes()[..read.len]);
            }
            Err(errno) => self.control.fail(read.unique, errno),
        }
        parked.answered();
    }

    async fn fetch(&self, read: BlockRead) -> Result<Pages, i32> {
        let blocks = read.len.div_ceil(BLOCK_SIZE as usize) as u32;
        // Held until the reply is built; an error would mean a closed semaphore: none is.
        let _room = self.miss_blocks.acquire_many(blocks).await.map_err(|_| libc::EIO)?;
        let mut buffer = Pages::zeroed(read.len as u64).ok_or(libc::ENOMEM)?;
        let bytes = &mut buffer.bytes_mut()[..read.len];
        self.device.read(read.offset, bytes).await.map_err(|error| error.errno())?;
        Ok(buffer)
    }
}
