//! The request engine: the one place where a request of the kernel is served from a device.
//!
//! ```text
//!   transport's thread                                     task on the runtime
//!   Call ──► serve ── try_read ─┬─ Served ─► count ─► Call::reply
//!              ▲                ├─ Local ──► Call::load: the place of a file, into the buffer
//!              │                │               │ read at once, or by the transport's ring
//!              └── the rest ◄── verify ◄────────┘ (Engine::resume)
//!                               └─ Absent ─► Call::park ─► Parked ─► device.read ─► count ─┐
//!              write, erase, flush ────────► Call::park ─► Parked ─► device.write, …       │
//!                                                            Parked::answer ◄──────────────┘
//! ```
//!
//! A transport moves requests and bytes between the kernel and the engine: FUSE over `/dev/fuse`
//! (`server.rs`), FUSE over io_uring (`server/rings.rs`), ublk (`ublk/queue.rs`). It parses a
//! request, gives the buffer for the answer, and sends the answer. The engine decides all else:
//! bounds, hit or miss, memory for misses, counters, errors, panics of the device, and the end of
//! serving ([`Life`]).
//!
//! Limits: a miss waits for room for its bytes
//! ([`ServeOptions::miss_bytes_max`](crate::ServeOptions)), unless its request has memory of its
//! own. Nothing is refused for lack of room.
//!
//! Invariants (held by `engine/tests.rs`):
//! - A request is answered once, or left to its transport unanswered: [`Call`] and [`Parked`] are
//!   consumed by their answers.
//! - A hit neither locks nor allocates, and is counted before its answer (`tests/hit_path.rs`).
//! - Bytes of a local file are answered only after [`BlockDevice::verify`] has called them good.
//! - A request that was cancelled, or whose runtime is gone, is left to its transport. One whose
//!   device panics gets EIO.
//! - The last task has let go of its request before [`Life::drain`] returns.

mod changes;
mod life;
mod tasks;
#[cfg(test)]
mod tests;

use std::{
    io,
    marker::PhantomData,
    ops::Range,
    os::fd::BorrowedFd,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::Arc,
    time::Instant,
};

use burgeon_block::{
    BLOCK_SIZE, BlockDevice, ByteRange, Counters, Erase, Error, ErrorKind, FileRange, Now, Result,
    Shape, Verdict, WriteCache,
};
use tokio::{runtime::Handle, sync::Semaphore};

pub use self::life::End;
pub(crate) use self::{
    changes::{Changes, ReadOnly, Writable},
    life::Life,
};
use crate::slots::Slots;

/// The longest request that carries bytes: one chunk.
pub(crate) const LEN_MAX: usize = 256 << 10;

/// After so many verdicts [`Verdict::AskAgain`] in a row the request is treated as a miss.
const DOUBTS_MAX: u8 = 3;

/// A request of the kernel to the device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Request {
    Read { at: u64, len: usize },
    Write { at: u64, len: usize, fua: bool },
    Erase { at: u64, len: u64, how: Erase },
    Flush,
}

impl Request {
    /// The same, where a read that goes beyond the device's end stops there.
    #[inline]
    pub(crate) fn cut_to(self, size: u64) -> Self {
        match self {
            Self::Read { at, len } => {
                Self::Read { at, len: (len as u64).min(size.saturating_sub(at)) as usize }
            }
            change => change,
        }
    }
}

/// The time of a request's arrival, and its past.
#[derive(Clone, Copy)]
pub(crate) struct Arrival {
    begun: Instant,
    /// A server before this one had it in hand.
    replayed: bool,
}

impl Arrival {
    pub(crate) fn now() -> Self {
        Self { begun: Instant::now(), replayed: false }
    }

    pub(crate) fn replayed() -> Self {
        Self { replayed: true, ..Self::now() }
    }
}

/// A request that a transport's thread owns.
pub(crate) trait Call: Sized {
    /// The same request, owned by a task.
    type Parked: Parked;

    /// Buffer for a read's bytes: `len` of them, aligned to 4 KiB, the same ones at each call. The
    /// error is an errno.
    fn buffer(&mut self, len: usize) -> Result<&mut [u8], i32>;

    /// Reads `load`'s place of `file` into [`Load::part`] of the buffer: at once, or later, and
    /// then the transport calls [`Engine::resume`].
    fn load(self, load: Load, file: BorrowedFd<'_>) -> Loading<Self>;

    /// Keeps the payload of a write, `len` bytes, for [`Self::park`], where the thread's next
    /// request overwrites it. The error is an errno.
    fn keep_payload(&mut self, _len: usize) -> Result<(), i32> {
        Ok(())
    }

    /// Sends the answer: the first bytes of the buffer, or an errno.
    fn reply(self, answer: Result<usize, i32>);

    /// Hands the request to a task.
    fn park(self) -> Self::Parked;
}

/// A request that a task owns. Dropped without an answer it is left to the transport, which
/// keeps it for a successor where it can.
pub(crate) trait Parked: Send + 'static {
    /// The request's own memory, if it has some: a write's payload, or where a read's bytes go.
    fn memory(&mut self, _len: usize) -> Option<&mut [u8]> {
        None
    }

    /// Copies a write's payload; asked only of requests without memory of their own. The error is
    /// an errno.
    fn copy_payload(&mut self, into: &mut [u8]) -> Result<(), i32>;

    /// Sends the answer.
    fn answer(self, answer: Answer<'_>);
}

/// The answer of a task.
pub(crate) enum Answer<'a> {
    /// A read's bytes.
    Bytes(&'a [u8]),
    /// So many bytes in the request's own memory.
    Own(usize),
    /// So many bytes are written.
    Written(usize),
    /// Erased, or flushed.
    Done,
    /// An errno.
    Failed(i32),
}

/// The owner of a request after [`Engine::serve`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Handled {
    /// It is answered.
    Answered,
    /// A task, or the transport's ring, has it.
    Parked,
}

/// The errno of a request whose device has panicked.
#[cold]
fn panicked(mount: &str, request: Request) -> i32 {
    tracing::error!(
        mount,
        ?request,
        "the code of the device panicked: the request gets an I/O error"
    );
    libc::EIO
}

/// A read in work.
#[derive(Clone, Copy)]
pub(crate) struct Read {
    at: u64,
    len: usize,
    /// Bytes at its beginning that are in the buffer, and verified.
    done: usize,
    /// Verdicts [`Verdict::AskAgain`] in a row.
    doubts: u8,
    arrival: Arrival,
}

/// A piece of a read that a transport is to read from a local file.
#[derive(Clone, Copy)]
pub(crate) struct Load {
    read: Read,
    from: FileRange,
}

impl Load {
    /// Range in the file.
    pub(crate) fn range(&self) -> ByteRange {
        self.from.range
    }

    /// The part of the buffer that it fills.
    pub(crate) fn part(&self) -> Range<usize> {
        self.read.done..self.read.done + self.from.range.len() as usize
    }

    /// Reads the place into `buffer`, which is the whole read's; waits for the disk.
    pub(crate) fn read_now(&self, file: BorrowedFd<'_>, buffer: &mut [u8]) -> io::Result<usize> {
        let (piece, mut read) = (&mut buffer[self.part()], 0);
        while read < piece.len() {
            let at = self.from.range.start() + read as u64;
            match rustix::io::retry_on_intr(|| rustix::io::pread(file, &mut piece[read..], at))? {
                0 => break,
                len => read += len,
            }
        }
        Ok(read)
    }

    /// Length of the whole read, for [`Call::buffer`].
    pub(crate) fn read_len(&self) -> usize {
        self.read.len
    }
}

/// The state of a [`Load`] that was handed to a transport.
pub(crate) enum Loading<C> {
    /// So many bytes were read.
    Here(C, io::Result<usize>),
    /// The transport has the request.
    Later,
}

/// The next step of a read.
enum Next {
    Ask(Read),
    Hit(Read),
    Park(Read),
    Fail(i32),
}

/// Serves one device for all threads of a transport. `A` says whether it can be written to.
pub(crate) struct Engine<D, A> {
    device: Arc<D>,
    shape: Shape,
    slots: Arc<Slots>,
    runtime: Handle,
    /// Room for the bytes of misses and writes, in blocks.
    room: Semaphore,
    life: Arc<Life>,
    access: PhantomData<fn() -> A>,
}

impl<D: BlockDevice, A: Changes<D>> Engine<D, A> {
    /// Tasks run on `runtime`, and their memory is at most `memory_max` bytes, or one request's.
    /// `Invalid` if the device's shape is none, or a read-only one to be written to.
    pub(crate) fn new(
        device: Arc<D>,
        slots: Arc<Slots>,
        runtime: Handle,
        memory_max: usize,
    ) -> Result<Self> {
        let shape = device.shape();
        shape.check()?;
        if A::WRITABLE && shape.cache == WriteCache::ReadOnly {
            return Err(Error::new(ErrorKind::Invalid, "cannot write to a read-only device"));
        }
        let room = memory_max.max(LEN_MAX) / BLOCK_SIZE as usize;
        Ok(Self {
            device,
            shape,
            slots,
            runtime,
            room: Semaphore::new(room),
            life: Arc::default(),
            access: PhantomData,
        })
    }

    pub(crate) fn shape(&self) -> &Shape {
        &self.shape
    }

    pub(crate) fn life(&self) -> &Arc<Life> {
        &self.life
    }

    pub(crate) fn runtime(&self) -> &Handle {
        &self.runtime
    }

    pub(crate) fn counters(&self) -> &Counters {
        self.slots.counters()
    }

    /// Answers a request, now or with a task.
    #[inline]
    pub(crate) fn serve<C: Call>(
        self: &Arc<Self>,
        request: Request,
        arrival: Arrival,
        call: C,
    ) -> Handled {
        match request {
            Request::Read { at, len } if self.takes(at, len as u64) && len <= LEN_MAX => {
                self.begin_read(Read { at, len, done: 0, doubts: 0, arrival }, call)
            }
            Request::Read { .. } => {
                call.reply(Err(libc::EINVAL));
                Handled::Answered
            }
            change => self.begin_change(change, call),
        }
    }

    /// Goes on with a read whose piece of a local file the transport has read.
    pub(crate) fn resume<C: Call>(
        self: &Arc<Self>,
        load: Load,
        result: io::Result<usize>,
        mut call: C,
    ) -> Handled {
        match self.judge(load, result, &mut call) {
            Next::Ask(read) => self.begin_read(read, call),
            Next::Hit(read) => self.hit(&read, call),
            Next::Park(read) => self.miss(read, call),
            Next::Fail(errno) => self.fail(errno, call),
        }
    }

    /// True if a request is whole blocks within the device.
    #[inline]
    fn takes(&self, at: u64, len: u64) -> bool {
        let blocks = u64::from(self.shape.logical_block) - 1;
        (at | len) & blocks == 0 && at.checked_add(len).is_some_and(|end| end <= self.shape.size)
    }

    #[inline]
    fn begin_read<C: Call>(self: &Arc<Self>, read: Read, mut call: C) -> Handled {
        match self.try_read(&read, &mut call) {
            Ok(Now::Served) => self.hit(&read, call),
            answer => self.go_on(answer, read, call),
        }
    }

    #[inline]
    fn try_read<C: Call>(&self, read: &Read, call: &mut C) -> Result<Now, i32> {
        let rest = &mut call.buffer(read.len)?[read.done..];
        let at = read.at + read.done as u64;
        let tried = catch_unwind(AssertUnwindSafe(|| self.device.try_read(at, rest)));
        tried
            .map_err(|_panic| {
                let len = read.len - read.done;
                panicked(self.device.name(), Request::Read { at, len })
            })?
            .map_err(|error| error.errno())
    }

    /// Goes on after the device's answer, until the read is answered or handed on.
    #[inline(never)]
    fn go_on<C: Call>(
        self: &Arc<Self>,
        mut answer: Result<Now, i32>,
        mut read: Read,
        mut call: C,
    ) -> Handled {
        loop {
            let load = match answer {
                Ok(Now::Served) => return self.hit(&read, call),
                Ok(Now::Absent) => return self.miss(read, call),
                Ok(Now::Local(from)) => Load { read, from },
                Err(errno) => return self.fail(errno, call),
            };
            let Some(file) = self.file_of(&load) else { return self.miss(read, call) };
            let result;
            match call.load(load, file) {
                Loading::Here(back, loaded) => (call, result) = (back, loaded),
                Loading::Later => return Handled::Parked,
            }
            match self.judge(load, result, &mut call) {
                Next::Ask(rest) => read = rest,
                Next::Hit(read) => return self.hit(&read, call),
                Next::Park(read) => return self.miss(read, call),
                Next::Fail(errno) => return self.fail(errno, call),
            }
            answer = self.try_read(&read, &mut call);
        }
    }

    /// The file of a load that fits the read; `None` also after too many doubts.
    fn file_of(&self, load: &Load) -> Option<BorrowedFd<'_>> {
        let (len, rest) = (load.from.range.len(), load.read.len - load.read.done);
        let whole = len > 0 && len.is_multiple_of(self.shape.logical_block.into());
        let fits = whole && len <= rest as u64 && load.read.doubts < DOUBTS_MAX;
        if fits { self.device.local_file(load.from.file) } else { None }
    }

    /// The next step after a piece was read from a local file.
    fn judge<C: Call>(&self, load: Load, result: io::Result<usize>, call: &mut C) -> Next {
        let (Load { mut read, from }, into) = (load, load.part());
        if result.ok() != Some(into.len()) {
            // `read` meets the same file, and handles the failure.
            return Next::Park(read);
        }
        let bytes = match call.buffer(read.len) {
            Ok(buffer) => &buffer[into.clone()],
            Err(errno) => return Next::Fail(errno),
        };
        let at = read.at + into.start as u64;
        match catch_unwind(AssertUnwindSafe(|| self.device.verify(at, bytes, from))) {
            Ok(Verdict::Good) => (read.done, read.doubts) = (into.end, 0),
            Ok(Verdict::AskAgain) => read.doubts += 1,
            Err(_panic) => {
                let len = into.len();
                return Next::Fail(panicked(self.device.name(), Request::Read { at, len }));
            }
        }
        if read.done == read.len { Next::Hit(read) } else { Next::Ask(read) }
    }

    /// Counted before the answer, so that a reader that has its bytes sees them counted.
    #[inline]
    fn hit<C: Call>(&self, read: &Read, call: C) -> Handled {
        let counters = self.counters();
        counters.hits.add(1);
        counters.hit_bytes.add(read.len as u64);
        counters.hit_latency.record(read.arrival.begun.elapsed().as_nanos() as u64);
        if read.arrival.replayed {
            counters.replayed.add(1);
        }
        call.reply(Ok(read.len));
        Handled::Answered
    }

    #[cold]
    fn fail<C: Call>(&self, errno: i32, call: C) -> Handled {
        self.counters().failed_reads.add(1);
        call.reply(Err(errno));
        Handled::Answered
    }

    #[inline(never)]
    fn begin_change<C: Call>(self: &Arc<Self>, request: Request, mut call: C) -> Handled {
        match self.check_change(request, &mut call) {
            Ok(Change::Later) => self.change(request, call),
            Ok(Change::Nothing) => {
                call.reply(Ok(0));
                Handled::Answered
            }
            Err(errno) => {
                call.reply(Err(errno));
                Handled::Answered
            }
        }
    }

    /// Checks a write, an erasure or a flush, and decides how to go on; the error is an errno.
    fn check_change<C: Call>(&self, request: Request, call: &mut C) -> Result<Change, i32> {
        match request {
            Request::Flush if !A::WRITABLE => Ok(Change::Nothing),
            _ if !A::WRITABLE => Err(libc::EROFS),
            Request::Write { at, len, .. } if self.takes(at, len as u64) && len <= LEN_MAX => {
                call.keep_payload(len).map(|()| Change::Later)
            }
            Request::Erase { at, len, .. } if self.takes(at, len) => Ok(Change::Later),
            Request::Flush => Ok(Change::Later),
            _ => Err(libc::EINVAL),
        }
    }
}

/// Next step of a request that is no read.
enum Change {
    /// Nothing was written, so nothing is left to flush.
    Nothing,
    /// A task changes the device.
    Later,
}
