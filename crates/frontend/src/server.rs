//! FUSE over `/dev/fuse`: the transport that hands requests of one FUSE file to the engine.
//!
//! ```text
//!            ┌──────────── reader thread ────────────┐   one; more while requests come (`readers.rs`)
//!   readv ──►│ slot ─► Engine::serve ─► answered ─► writev, the slot is empty
//!            │               └────────► parked ─┐     │
//!            └──────────────────────────────────┼─────┘
//!                  the slot goes along          ▼      the thread takes a free slot and goes on
//!                                  engine's task ─► writev ─► slot is free
//!
//!   a successor first answers the requests in the slots, the same two ways
//! ```
//!
//! If the connection has rings, requests come over them instead (`rings.rs`).
//!
//! A slot holds the head of a request. The bytes of a WRITE do not fit, so a server that is killed
//! loses them: its successor has the kernel send all unanswered requests again (Linux 6.9). On
//! older kernels such a write fails with EIO.
//!
//! Limits: a request needs a slot, and waits for one ([`SLOT_COUNT`]).
//!
//! Invariants (held by `tests/kill.rs`, `tests/transport.rs`, `tests/writes.rs`):
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
    os::fd::{AsRawFd, BorrowedFd, OwnedFd},
    sync::{Arc, Weak},
    thread::{self, JoinHandle},
    time::Duration,
};

use burgeon_block::{BlockDevice, Pages, Result, WritableDevice};
use tokio::runtime::Handle;

pub use self::readers::Helpers;
use self::{
    control::{Control, Parked},
    readers::{IDLE, Readers, Watch},
};
use crate::{
    engine::{
        self, Arrival, Call, Changes, End, Engine, Handled, LEN_MAX, Life, Load, Loading, ReadOnly,
        Writable,
    },
    fuse::{Operation, READ_BUFFER_MIN, Request, WRITE_HEAD_LEN},
    slots::{REQUEST_LEN, SLOT_COUNT, Slots},
    sys::failed,
    ublk::Driver,
};

/// A request that so many servers in a row had when they died gets EIO, because it may be the
/// cause. The number is high enough for unrelated deaths during one fetch.
const REPLAYS_MAX: u32 = 32;
/// Reads of `/dev/fuse` that may fail in a row for no known reason, 1 ms apart.
const READ_FAILURES_MAX: u32 = 1000;

/// Options for serving one file.
#[derive(Clone)]
pub struct ServeOptions {
    /// Runtime for misses.
    pub runtime: Handle,
    /// Reader threads while requests come: each serves one hit at a time and has a buffer of 256
    /// KiB. An idle file has one, without a buffer.
    pub threads: usize,
    /// The source of all threads but one: clones share it.
    pub helpers: Helpers,
    /// Memory that misses may take at once, in bytes; at least 256 KiB.
    pub miss_bytes_max: usize,
    /// Serve over io_uring: the connection must have been made for it, and no successor can go on
    /// from here.
    pub rings: bool,
    /// Over ublk: the way to the driver.
    pub driver: Arc<Driver>,
}

impl ServeOptions {
    /// Two threads a CPU, between 2 and 8; two helpers a CPU for all clones of this, beside those
    /// that are started while a mount's threads wait for a disk; 32 MiB for
    /// misses; the ublk driver with the rights of this process.
    pub fn new(runtime: Handle) -> Self {
        let cpus = thread::available_parallelism().map_or(1, usize::from);
        let helpers = Helpers::new(2 * cpus);
        let threads = (2 * cpus).clamp(2, 8);
        let driver = Arc::new(Driver::direct());
        Self { runtime, threads, helpers, miss_bytes_max: 32 << 20, rings: false, driver }
    }
}

/// A running server of one file. Dropping it stops it without waiting for misses.
pub struct FuseServer {
    control: Arc<Control>,
    readers: Arc<Readers>,
    /// Over rings: theirs.
    threads: Vec<JoinHandle<()>>,
}

/// Serves `device` on `fuse`, after answering the requests that a predecessor left in `slots`.
/// Changes are refused with EROFS. Returns at once.
///
/// The predecessor's process must be gone (waited for): slots have one owner. `Invalid` if the
/// device's shape makes no sense.
pub fn serve<D: BlockDevice>(
    fuse: OwnedFd,
    slots: Arc<Slots>,
    device: Arc<D>,
    options: &ServeOptions,
) -> Result<FuseServer> {
    start::<D, ReadOnly>(fuse, slots, device, options)
}

/// As [`serve`], for a device that is written to. The connection must be made for it
/// ([`Connection::writable`](crate::Connection::writable)).
pub fn serve_writable<D: WritableDevice>(
    fuse: OwnedFd,
    slots: Arc<Slots>,
    device: Arc<D>,
    options: &ServeOptions,
) -> Result<FuseServer> {
    start::<D, Writable>(fuse, slots, device, options)
}

fn start<D: BlockDevice, A: Changes<D>>(
    fuse: OwnedFd,
    slots: Arc<Slots>,
    device: Arc<D>,
    options: &ServeOptions,
) -> Result<FuseServer> {
    let (runtime, memory_max) = (options.runtime.clone(), options.miss_bytes_max);
    let engine = Engine::<D, A>::new(device, slots.clone(), runtime, memory_max)?;
    stop::make_reads_interruptible().map_err(|e| failed("cannot install a signal handler", e))?;
    if A::WRITABLE {
        control::have_requests_sent_again(&fuse, &slots);
    }
    let control = Arc::new(Control::new(fuse, slots, engine.life().clone()));
    // Over rings, one thread is enough for the little that does not come that way.
    let threads = if options.rings { 1 } else { options.threads };
    let threads = threads.clamp(1, SLOT_COUNT as usize / 2);
    let readers = Arc::new(Readers::new(options.helpers.clone(), threads));
    let worker = Arc::new(Worker {
        control: control.clone(),
        readers: readers.clone(),
        engine: Arc::new(engine),
    });
    let mut server = FuseServer { control, readers, threads: Vec::new() };
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

impl FuseServer {
    /// Waits until serving is over, for whichever reason.
    pub fn ended(&self) -> impl Future<Output = End> + Send + 'static {
        self.life().ended()
    }

    /// Stops reading requests, waits up to `drain` for the misses in work and returns how many
    /// requests are left for a successor: none is dropped, as long as someone holds the FUSE
    /// descriptor and the slots. Blocks; not for a thread of the runtime that runs the misses.
    pub fn stop(mut self, drain: Duration) -> usize {
        self.halt(drain);
        self.control.slots.unanswered()
    }

    fn life(&self) -> &Life {
        &self.control.life
    }

    fn halt(&mut self, drain: Duration) {
        self.control.request_stop();
        self.readers.end();
        for thread in self.threads.drain(..) {
            stop::interrupt_until_finished(&thread);
            // A panic outside the device's code would be a bug here; its slot is replayed.
            let _ = thread.join();
        }
        self.life().drain(drain);
    }
}

impl Drop for FuseServer {
    fn drop(&mut self) {
        self.halt(Duration::ZERO);
    }
}

/// The state that all threads of a server share.
struct Worker<D, A> {
    control: Arc<Control>,
    readers: Arc<Readers>,
    engine: Arc<Engine<D, A>>,
}

/// Role of a reader thread.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Role {
    /// The permanent one.
    First,
    Helper,
}

/// The state of one reader thread.
struct Reader {
    role: Role,
    /// `None` until its first read, and while the mount is idle.
    buffer: Option<Pages>,
    /// Buffer for the part of a request that does not fit into its slot.
    tail: Vec<u8>,
    /// Of a helper: it has had a request.
    has_worked: bool,
}

/// Counts a helper out, for any reason of its end.
struct Leaving(Option<Arc<Readers>>);

impl Drop for Leaving {
    fn drop(&mut self) {
        self.0.iter().for_each(|readers| readers.leave());
    }
}

impl<D: BlockDevice, A: Changes<D>> Worker<D, A> {
    /// A reader thread's life.
    fn run(self: Arc<Self>, role: Role) {
        let _leaving = Leaving((role == Role::Helper).then(|| self.readers.clone()));
        stop::accept_interrupts();
        let tail = READ_BUFFER_MIN + if A::WRITABLE { LEN_MAX } else { 0 };
        // Not zeros, so that all pages are present: a copy that faults while the process is killed
        // fails, and the kernel answers the write with EIO instead of sending it again.
        let tail = vec![1; tail];
        let mut reader = Reader { role, buffer: None, tail, has_worked: false };
        while let Some(slot) = self.control.next_replay() {
            self.start_helper_if_wanted(&mut reader);
            if self.replay(slot, &mut reader) == Handled::Answered {
                self.control.free(slot);
            }
        }
        let mut held = None;
        let mut failures = 0;
        while let Some(slot) = held.take().or_else(|| self.control.take_free()) {
            if self.control.is_stopping() || (role == Role::Helper && self.readers.is_surplus()) {
                self.control.free(slot);
                break;
            }
            match self.read_request(slot, &mut reader.tail) {
                Ok(()) => {
                    failures = 0;
                    self.start_helper_if_wanted(&mut reader);
                    if self.handle(slot, &mut reader, Arrival::now()) == Handled::Answered {
                        held = Some(slot);
                    }
                    continue;
                }
                Err(libc::EINTR) => {
                    if self.ends_when_interrupted(&mut reader) {
                        self.control.slots.clear(slot);
                        self.control.free(slot);
                        break;
                    }
                }
                // The asker went away while the kernel handed the request out.
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

    /// Starts another helper, if there is work for one.
    fn start_helper_if_wanted(self: &Arc<Self>, reader: &mut Reader) {
        if reader.role == Role::Helper && !reader.has_worked {
            reader.has_worked = true;
            self.readers.helper_works();
        } else if self.readers.take_wish() {
            let start = || self.start_helper_thread();
            self.readers.start_helper(|| self.control.is_stopping(), start);
        }
    }

    fn start_helper_thread(self: &Arc<Self>) -> io::Result<JoinHandle<()>> {
        let helper = self.clone();
        start_thread(move || helper.run(Role::Helper))
    }

    /// The thread's read was interrupted: frees its buffer if the mount is idle. True if the thread
    /// is to end.
    fn ends_when_interrupted(&self, reader: &mut Reader) -> bool {
        if reader.role == Role::Helper {
            return self.readers.ends_helper();
        }
        if reader.buffer.is_some() && self.readers.deactivate() {
            let buffer = reader.buffer.take();
            buffer.into_iter().for_each(|buffer| self.readers.helpers.keep_buffer(buffer));
        }
        false
    }

    /// Gets the buffer that a reader thread has while requests come.
    #[cold]
    fn take_buffer(self: &Arc<Self>, role: Role) -> Option<Pages> {
        let buffer = self.readers.helpers.buffer()?;
        if role == Role::First && self.readers.activate() {
            // It holds nothing of the server, so serving ends without waiting for it.
            self.engine.runtime().spawn(watch(Arc::downgrade(self)));
        }
        Some(buffer)
    }

    /// Lets the kernel put the next request into `slot` and its tail; waits for one. The error is
    /// an errno.
    fn read_request(&self, slot: u32, tail: &mut [u8]) -> Result<(), i32> {
        let parts = [
            libc::iovec {
                iov_base: self.control.slots.request_pointer(slot).cast(),
                iov_len: REQUEST_LEN,
            },
            libc::iovec { iov_base: tail.as_mut_ptr().cast(), iov_len: tail.len() },
        ];
        // SAFETY: both parts are valid for their lengths; this thread owns the slot and `tail`.
        // Raw pointers, because other threads look at the slot's length meanwhile.
        let len = unsafe { libc::readv(self.control.fuse.as_raw_fd(), parts.as_ptr(), 2) };
        if len < 0 {
            return Err(io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO));
        }
        Ok(())
    }

    fn replay(self: &Arc<Self>, slot: u32, reader: &mut Reader) -> Handled {
        let control = &self.control;
        let tried = control.slots.begin_replay(slot);
        let Some(request) = Request::parse(&control.slots.request(slot)) else {
            control.slots.clear(slot);
            return Handled::Answered;
        };
        let write = matches!(request.operation, Operation::Device(engine::Request::Write { .. }));
        let read = matches!(request.operation, Operation::Device(engine::Request::Read { .. }));
        // The bytes of a write went with the server that had read them.
        if tried < REPLAYS_MAX && !(A::WRITABLE && write) {
            return self.handle(slot, reader, Arrival::replayed());
        }
        self.engine.counters().failed_reads.add(u64::from(read));
        control.reply_error(request.unique, libc::EIO);
        control.slots.clear(slot);
        Handled::Answered
    }

    /// Answers the request in `slot`, now or with a task.
    fn handle(self: &Arc<Self>, slot: u32, reader: &mut Reader, arrival: Arrival) -> Handled {
        let control = &self.control;
        let Some(request) = Request::parse(&control.slots.request(slot)) else {
            control.slots.clear(slot);
            return Handled::Answered;
        };
        let unique = request.unique;
        match request.operation {
            Operation::Device(request) => {
                let request = request.cut_to(self.engine.shape().size);
                let call = ReaderCall { worker: self, reader, slot, unique, payload: None };
                return self.engine.serve(request, arrival, call);
            }
            Operation::Refuse(errno) => control.reply_error(unique, errno),
            Operation::Silence => {}
            operation => control.reply_small(unique, operation, self.engine.shape()),
        }
        control.slots.clear(slot);
        Handled::Answered
    }
}

/// A request that a reader thread owns.
struct ReaderCall<'a, D, A> {
    worker: &'a Arc<Worker<D, A>>,
    reader: &'a mut Reader,
    slot: u32,
    unique: u64,
    /// The bytes of a write.
    payload: Option<Pages>,
}

impl<D: BlockDevice, A: Changes<D>> Call for ReaderCall<'_, D, A> {
    type Parked = Parked;

    #[inline]
    fn buffer(&mut self, len: usize) -> Result<&mut [u8], i32> {
        if self.reader.buffer.is_none() {
            self.reader.buffer = self.worker.take_buffer(self.reader.role);
        }
        let buffer = self.reader.buffer.as_mut().ok_or(libc::ENOMEM)?;
        Ok(&mut buffer.bytes_mut()[..len])
    }

    /// At once: the other threads go on meanwhile.
    fn load(mut self, load: Load, file: BorrowedFd<'_>) -> Loading<Self> {
        let worker = self.worker;
        let read = match self.buffer(load.read_len()) {
            Ok(buffer) => worker.readers.wait_for_disk(
                || worker.control.is_stopping(),
                || worker.start_helper_thread(),
                || load.read_now(file, buffer),
            ),
            Err(errno) => Err(io::Error::from_raw_os_error(errno)),
        };
        Loading::Here(self, read)
    }

    /// The thread reads its next request into the same memory.
    fn keep_payload(&mut self, len: usize) -> Result<(), i32> {
        let mut pages = Pages::zeroed(len as u64).ok_or(libc::ENOMEM)?;
        let head = self.worker.control.slots.request(self.slot);
        let in_slot = &head[WRITE_HEAD_LEN..];
        let (first, rest) = pages.bytes_mut()[..len].split_at_mut(len.min(in_slot.len()));
        first.copy_from_slice(&in_slot[..first.len()]);
        rest.copy_from_slice(&self.reader.tail[..rest.len()]);
        self.payload = Some(pages);
        Ok(())
    }

    #[inline]
    fn reply(self, answer: Result<usize, i32>) {
        let control = &self.worker.control;
        match (answer, &self.reader.buffer) {
            (Ok(len), Some(buffer)) => control.reply(self.unique, &buffer.bytes()[..len]),
            (Ok(_), None) => control.reply(self.unique, &[]),
            (Err(errno), _) => control.reply_error(self.unique, errno),
        }
        control.slots.clear(self.slot);
    }

    fn park(self) -> Parked {
        Parked::new(self.worker.control.clone(), self.slot, self.unique, self.payload)
    }
}

/// Checks every [`IDLE`] whether there are reads, until there are none.
async fn watch<D: BlockDevice, A: Changes<D>>(worker: Weak<Worker<D, A>>) {
    loop {
        tokio::time::sleep(IDLE).await;
        let Some(worker) = worker.upgrade() else { return };
        if worker.readers.check(worker.engine.counters()) == Watch::End {
            return;
        }
    }
}
