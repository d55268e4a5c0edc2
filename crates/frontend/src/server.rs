//! Answers the kernel's requests to one FUSE file from a [`BlockDevice`].
//!
//! ```text
//!            ┌──────────── reader thread ────────────┐   one; more while requests come (`readers.rs`)
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
mod readers;
mod rings;
mod stop;

use std::{
    io,
    os::fd::{AsRawFd, OwnedFd},
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Arc, Weak},
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use burgeon_block::{BLOCK_SIZE, BlockDevice, Error, ErrorKind, Now, Pages, Result};
use tokio::{runtime::Handle, sync::Semaphore};

pub use self::{control::End, readers::Helpers};
use self::{
    control::{Control, Parked},
    readers::{IDLE, Readers, Watch},
};
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
    /// Reader threads while requests come: each serves one hit at a time and has a buffer of 256 KiB.
    /// An idle file has one, without a buffer.
    pub threads: usize,
    /// Where all of them but one come from: clones share them.
    pub helpers: Helpers,
    /// Memory that misses may take at once, in bytes; at least 256 KiB.
    pub miss_bytes_max: usize,
    /// Serve over io_uring: the connection must have been made for it, and no successor can go on
    /// from here.
    pub rings: bool,
}

impl ServeOptions {
    /// Two threads a CPU, between 2 and 8; two helpers a CPU for all clones of this; 32 MiB for
    /// misses.
    pub fn new(runtime: Handle) -> Self {
        let cpus = thread::available_parallelism().map_or(1, usize::from);
        let helpers = Helpers::new(2 * cpus);
        let threads = (2 * cpus).clamp(2, 8);
        Self { runtime, threads, helpers, miss_bytes_max: 32 << 20, rings: false }
    }
}

/// A running server of one file. Dropping it stops it without waiting for misses.
pub struct Server {
    control: Arc<Control>,
    readers: Arc<Readers>,
    /// Over rings: theirs.
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
    // Over rings, one thread is enough for the little that does not come that way.
    let threads = if options.rings { 1 } else { options.threads };
    let threads = threads.clamp(1, SLOT_COUNT as usize / 2);
    let readers = Arc::new(Readers::new(options.helpers.clone(), threads));
    let worker = Arc::new(Worker {
        control: control.clone(),
        readers: readers.clone(),
        device,
        runtime: options.runtime.clone(),
        miss_blocks: Semaphore::new(options.miss_bytes_max.max(READ_MAX) / BLOCK_SIZE as usize),
    });
    let mut server = Server { control, readers, threads: Vec::new() };
    let first = worker.clone();
    let first = start_thread(move || first.run(Role::First));
    server.readers.add_first(first.map_err(|e| failed("cannot start a reader thread", e))?);
    if options.rings {
        server.threads.extend(rings::start(&worker)?);
    }
    Ok(server)
}

fn start_thread(run: impl FnOnce() + Send + 'static) -> io::Result<JoinHandle<()>> {
    thread::Builder::new().name("fuse-reader".into()).spawn(run)
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
        self.readers.end();
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
    readers: Arc<Readers>,
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

/// Which reader thread it is.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Role {
    /// The one that stays.
    First,
    Helper,
}

/// What a reader thread has to itself.
struct Reader {
    role: Role,
    /// `None` until its first read, and while the mount is idle.
    buffer: Option<Pages>,
    /// Of a helper: it has had a request.
    has_worked: bool,
}

/// A helper leaves, whatever ends it.
struct Leaving(Option<Arc<Readers>>);

impl Drop for Leaving {
    fn drop(&mut self) {
        self.0.iter().for_each(|readers| readers.leave());
    }
}

impl<D: BlockDevice> Worker<D> {
    /// A reader thread's life.
    fn run(self: Arc<Self>, role: Role) {
        let _leaving = Leaving((role == Role::Helper).then(|| self.readers.clone()));
        stop::accept_interrupts();
        let mut reader = Reader { role, buffer: None, has_worked: false };
        while let Some(slot) = self.control.next_replay() {
            self.call_for_help(&mut reader);
            if self.replay(slot, &mut reader) == Handled::Answered {
                self.control.free(slot);
            }
        }
        let mut scratch = [0; READ_BUFFER_MIN];
        let mut held = None;
        let mut failures = 0;
        while let Some(slot) = held.take().or_else(|| self.control.take_free()) {
            if self.control.is_stopping() || (role == Role::Helper && self.readers.is_shed()) {
                self.control.free(slot);
                break;
            }
            match self.read_request(slot, &mut scratch) {
                Ok(()) => {
                    failures = 0;
                    self.call_for_help(&mut reader);
                    if self.handle(slot, &mut reader, false) == Handled::Answered {
                        held = Some(slot);
                    }
                    continue;
                }
                Err(libc::EINTR) => {
                    if self.rests(&mut reader) {
                        self.control.slots.clear(slot);
                        self.control.free(slot);
                        break;
                    }
                }
                // Whoever asked went away while the kernel handed it out.
                Err(libc::EAGAIN | libc::ENOENT) => {}
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
        reader.buffer.into_iter().for_each(|buffer| self.readers.helpers.keep_buffer(buffer));
    }

    /// Lets another helper come, if there is work for one.
    fn call_for_help(self: &Arc<Self>, reader: &mut Reader) {
        if reader.role == Role::Helper && !reader.has_worked {
            reader.has_worked = true;
            self.readers.helper_works();
        } else if self.readers.calls() {
            let helper = self.clone();
            let start = || start_thread(move || helper.run(Role::Helper));
            self.readers.call(|| self.control.is_stopping(), start);
        }
    }

    /// The thread's read was interrupted: lets its buffer go if the mount is idle. True if the thread
    /// is to end.
    fn rests(&self, reader: &mut Reader) -> bool {
        if reader.role == Role::Helper {
            return self.readers.lets_go();
        }
        if reader.buffer.is_some() && self.readers.first_rests() {
            let buffer = reader.buffer.take();
            buffer.into_iter().for_each(|buffer| self.readers.helpers.keep_buffer(buffer));
        }
        false
    }

    /// Gets the buffer that a reader thread has while requests come.
    #[cold]
    fn take_buffer(self: &Arc<Self>, role: Role) -> Option<Pages> {
        let buffer = self.readers.helpers.buffer()?;
        if role == Role::First && self.readers.stir() {
            // Without hold of anything: serving ends without waiting for this.
            self.runtime.spawn(watch(Arc::downgrade(self)));
        }
        Some(buffer)
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

    fn replay(self: &Arc<Self>, slot: u32, reader: &mut Reader) -> Handled {
        let control = &self.control;
        if control.slots.begin_replay(slot) < REPLAYS_MAX {
            return self.handle(slot, reader, true);
        }
        if let Some(request) = Request::parse(&control.slots.request(slot)) {
            control.fail(request.unique, libc::EIO);
        }
        control.slots.clear(slot);
        Handled::Answered
    }

    /// Answers the request in `slot`, now or with a task.
    fn handle(self: &Arc<Self>, slot: u32, reader: &mut Reader, replayed: bool) -> Handled {
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
                    return self.read(slot, read, reader);
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

    fn read(self: &Arc<Self>, slot: u32, read: BlockRead, reader: &mut Reader) -> Handled {
        let control = &self.control;
        if reader.buffer.is_none() {
            reader.buffer = self.take_buffer(reader.role);
        }
        let Some(buffer) = &mut reader.buffer else {
            control.fail(read.unique, libc::ENOMEM);
            control.slots.clear(slot);
            return Handled::Answered;
        };
        let bytes = &mut buffer.bytes_mut()[..read.len];
        match self.try_now(read, bytes) {
            Ok(Now::Served) => control.reply(read.unique, bytes),
            Ok(Now::Absent | Now::Local(_)) => {
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
    fn try_now(&self, read: BlockRead, bytes: &mut [u8]) -> Result<Now, i32> {
        let tried = catch_unwind(AssertUnwindSafe(|| self.device.try_read(read.offset, bytes)));
        let tried = tried.map_err(|_panic| libc::EIO)?.map_err(|error| error.errno())?;
        if tried == Now::Served {
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

/// Looks again and again whether anybody reads, until nobody does.
async fn watch<D: BlockDevice>(worker: Weak<Worker<D>>) {
    loop {
        tokio::time::sleep(IDLE).await;
        let Some(worker) = worker.upgrade() else { return };
        if worker.readers.look(worker.control.slots.counters()) == Watch::End {
            return;
        }
    }
}
