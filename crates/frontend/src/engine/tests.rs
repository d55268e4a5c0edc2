//! The engine under a transport and a device of the test's own, without a kernel.
//!
//! ```text
//!   Line (the transport) ─ Call, Parked ─► Engine ─► Fake (the device: a script of answers)
//!     └─ log of sent answers: Bytes, Failed, Left, …
//! ```

#![allow(clippy::unwrap_used)]

use std::{
    collections::VecDeque,
    fs::File,
    os::{fd::AsFd, unix::fs::FileExt},
    sync::{
        Mutex,
        atomic::{AtomicUsize, Ordering::SeqCst},
        mpsc,
    },
    time::Duration,
};

use burgeon_block::{Error, ErrorKind, WritableDevice};
use tokio::{runtime::Runtime, sync::watch};

use super::*;

const SIZE: u64 = 1 << 20;
const BLOCK: usize = BLOCK_SIZE as usize;

/// An answer of the device to `try_read`.
#[derive(Clone, Copy)]
enum Say {
    Served,
    Absent,
    Local(FileRange),
    Fail,
    Panic,
}

/// A device that gives scripted answers, and holds bytes in memory and in a file.
struct Fake {
    shape: Shape,
    script: Mutex<VecDeque<Say>>,
    verdicts: Mutex<VecDeque<Verdict>>,
    /// Offsets and lengths that `try_read` was asked for.
    asked: Mutex<Vec<(u64, usize)>>,
    file: File,
    bytes: Mutex<Vec<u8>>,
    /// `read` and changes wait for this.
    gate: watch::Sender<bool>,
    panics: bool,
    in_read: AtomicUsize,
    in_read_max: AtomicUsize,
    /// Changes, in order.
    changes: Mutex<Vec<Request>>,
}

impl Fake {
    fn new() -> Self {
        let bytes: Vec<u8> = (0..SIZE).map(|at| (at / BLOCK_SIZE) as u8).collect();
        let file = tempfile::tempfile().unwrap();
        file.write_all_at(&bytes, 0).unwrap();
        Self {
            shape: Shape { cache: WriteCache::Volatile, ..Shape::read_only(SIZE) },
            script: Mutex::default(),
            verdicts: Mutex::default(),
            asked: Mutex::default(),
            file,
            bytes: Mutex::new(bytes),
            gate: watch::Sender::new(true),
            panics: false,
            in_read: AtomicUsize::new(0),
            in_read_max: AtomicUsize::new(0),
            changes: Mutex::default(),
        }
    }

    fn saying(script: impl IntoIterator<Item = Say>) -> Self {
        let this = Self::new();
        this.script.lock().unwrap().extend(script);
        this
    }

    async fn pass(&self) {
        let _ = self.gate.subscribe().wait_for(|open| *open).await;
        assert!(!self.panics, "as told");
    }

    fn changed(&self, change: Request) {
        self.changes.lock().unwrap().push(change);
    }
}

impl BlockDevice for Fake {
    fn name(&self) -> &str {
        "0a1b2c3d"
    }

    fn shape(&self) -> Shape {
        self.shape
    }

    fn try_read(&self, offset: u64, buf: &mut [u8]) -> Result<Now> {
        self.asked.lock().unwrap().push((offset, buf.len()));
        match self.script.lock().unwrap().pop_front().unwrap_or(Say::Absent) {
            Say::Served => {
                buf.copy_from_slice(&self.bytes.lock().unwrap()[offset as usize..][..buf.len()]);
                Ok(Now::Served)
            }
            Say::Absent => Ok(Now::Absent),
            Say::Local(from) => Ok(Now::Local(from)),
            Say::Fail => Err(Error::new(ErrorKind::NoSpace, "as told")),
            Say::Panic => panic!("as told"),
        }
    }

    fn local_file(&self, file: u32) -> Option<BorrowedFd<'_>> {
        (file == 7).then(|| self.file.as_fd())
    }

    fn verify(&self, offset: u64, bytes: &[u8], _from: FileRange) -> Verdict {
        let told = self.verdicts.lock().unwrap().pop_front();
        told.unwrap_or_else(|| {
            assert_eq!(bytes, &self.bytes.lock().unwrap()[offset as usize..][..bytes.len()]);
            Verdict::Good
        })
    }

    async fn read(&self, offset: u64, buf: &mut [u8]) -> Result<()> {
        let inside = self.in_read.fetch_add(1, SeqCst) + 1;
        self.in_read_max.fetch_max(inside, SeqCst);
        self.pass().await;
        self.in_read.fetch_sub(1, SeqCst);
        buf.copy_from_slice(&self.bytes.lock().unwrap()[offset as usize..][..buf.len()]);
        Ok(())
    }
}

impl WritableDevice for Fake {
    async fn write(&self, offset: u64, bytes: &[u8], fua: bool) -> Result<()> {
        self.pass().await;
        self.bytes.lock().unwrap()[offset as usize..][..bytes.len()].copy_from_slice(bytes);
        self.changed(Request::Write { at: offset, len: bytes.len(), fua });
        Ok(())
    }

    async fn erase(&self, range: ByteRange, how: Erase) -> Result<()> {
        self.pass().await;
        self.bytes.lock().unwrap()[range.start() as usize..range.end() as usize].fill(0);
        self.changed(Request::Erase { at: range.start(), len: range.len(), how });
        Ok(())
    }

    async fn flush(&self) -> Result<()> {
        self.pass().await;
        self.changed(Request::Flush);
        Ok(())
    }
}

/// The end of a request.
#[derive(Clone, PartialEq, Eq, Debug)]
enum Sent {
    Bytes(Vec<u8>),
    Own(Vec<u8>),
    Written(usize),
    Done,
    Failed(i32),
    /// Left to the transport without an answer.
    Left,
}

/// A transport's way of reading local files, and of giving memory to its requests.
#[derive(Clone, Copy, PartialEq, Eq, Default)]
struct Ways {
    later: bool,
    own_memory: bool,
}

/// A transport.
struct Line {
    ways: Ways,
    /// The payload of writes.
    payload: Vec<u8>,
    log: mpsc::Sender<Sent>,
    /// A read of a local file that the transport has not finished.
    loading: Mutex<Option<(Load, Vec<u8>)>>,
}

struct LineCall<'a> {
    line: &'a Line,
    buffer: Vec<u8>,
}

impl<'a> Call for LineCall<'a> {
    type Parked = LineParked;

    fn buffer(&mut self, len: usize) -> Result<&mut [u8], i32> {
        self.buffer.resize(LEN_MAX, 0xee);
        Ok(&mut self.buffer[..len])
    }

    fn load(mut self, load: Load, file: BorrowedFd<'_>) -> Loading<Self> {
        let read = load.read_now(file, self.buffer(load.read_len()).unwrap());
        if self.line.ways.later {
            assert_eq!(read.unwrap() as u64, load.range().len());
            *self.line.loading.lock().unwrap() = Some((load, self.buffer));
            return Loading::Later;
        }
        Loading::Here(self, read)
    }

    fn reply(self, answer: Result<usize, i32>) {
        let sent = match answer {
            Ok(0) => Sent::Done,
            Ok(len) => Sent::Bytes(self.buffer[..len].to_vec()),
            Err(errno) => Sent::Failed(errno),
        };
        self.line.log.send(sent).unwrap();
    }

    fn park(self) -> LineParked {
        let Line { ways, payload, log, .. } = self.line;
        let memory = ways.own_memory.then(|| payload.clone());
        LineParked { log: Some(log.clone()), payload: payload.clone(), memory }
    }
}

struct LineParked {
    log: Option<mpsc::Sender<Sent>>,
    payload: Vec<u8>,
    memory: Option<Vec<u8>>,
}

impl Parked for LineParked {
    fn memory(&mut self, len: usize) -> Option<&mut [u8]> {
        self.memory.as_mut().map(|memory| {
            memory.resize(len, 0);
            &mut memory[..]
        })
    }

    fn copy_payload(&mut self, into: &mut [u8]) -> Result<(), i32> {
        into.copy_from_slice(&self.payload);
        Ok(())
    }

    fn answer(mut self, answer: Answer<'_>) {
        let sent = match answer {
            Answer::Bytes(bytes) => Sent::Bytes(bytes.to_vec()),
            Answer::Own(len) => Sent::Own(self.memory.take().unwrap()[..len].to_vec()),
            Answer::Written(len) => Sent::Written(len),
            Answer::Done => Sent::Done,
            Answer::Failed(errno) => Sent::Failed(errno),
        };
        self.log.take().unwrap().send(sent).unwrap();
    }
}

impl Drop for LineParked {
    fn drop(&mut self) {
        if let Some(log) = self.log.take() {
            let _ = log.send(Sent::Left);
        }
    }
}

/// An engine with its device, a transport, and the answers that it has sent.
struct Rig<A = Writable> {
    device: Arc<Fake>,
    engine: Arc<Engine<Fake, A>>,
    line: Line,
    sent: mpsc::Receiver<Sent>,
    runtime: Runtime,
}

impl<A: Changes<Fake>> Rig<A> {
    fn new(device: Fake) -> Self {
        Self::with(device, Ways::default(), 1 << 20)
    }

    fn with(device: Fake, ways: Ways, memory_max: usize) -> Self {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .enable_all()
            .build()
            .unwrap();
        let (device, slots) = (Arc::new(device), Arc::new(Slots::create().unwrap()));
        let handle = runtime.handle().clone();
        let engine = Engine::new(device.clone(), slots, handle, memory_max).unwrap();
        let (log, sent) = mpsc::channel();
        let line = Line { ways, payload: vec![0xaa; 2 * BLOCK], log, loading: Mutex::default() };
        Self { device, engine: Arc::new(engine), line, sent, runtime }
    }

    fn serve(&self, request: Request) -> Handled {
        let call = LineCall { line: &self.line, buffer: Vec::new() };
        self.engine.serve(request, Arrival::now(), call)
    }

    fn read(&self, block: u64, count: usize) -> Handled {
        self.serve(Request::Read { at: block * BLOCK_SIZE, len: count * BLOCK })
    }

    /// Lets the transport finish its read of a local file.
    fn resume(&self, result: impl FnOnce(usize) -> io::Result<usize>) -> Handled {
        let (load, buffer) = self.line.loading.lock().unwrap().take().unwrap();
        let result = result(load.part().len());
        self.engine.resume(load, result, LineCall { line: &self.line, buffer })
    }

    fn sent(&self) -> Sent {
        self.sent.recv_timeout(Duration::from_secs(60)).unwrap()
    }

    fn counted(&self) -> [u64; 5] {
        let counters = self.engine.counters();
        let bytes = (counters.hit_bytes.get(), counters.miss_bytes.get());
        [counters.hits.get(), bytes.0, counters.misses.get(), bytes.1, counters.failed_reads.get()]
    }
}

fn blocks(first: u64, count: u64) -> Sent {
    Sent::Bytes((first..first + count).flat_map(|block| [block as u8; BLOCK]).collect())
}

fn local(block: u64, count: u64) -> Say {
    let range = ByteRange::at(block * BLOCK_SIZE, count * BLOCK_SIZE).unwrap();
    Say::Local(FileRange { file: 7, range })
}

#[test]
fn a_hit_is_answered_and_counted_at_once() {
    let rig = Rig::<ReadOnly>::new(Fake::saying([Say::Served]));
    assert_eq!(rig.read(3, 2), Handled::Answered);
    assert_eq!(rig.sent(), blocks(3, 2));
    assert_eq!(rig.counted(), [1, 8192, 0, 0, 0]);
    assert_eq!(rig.engine.counters().hit_latency.snapshot().count(), 1);
}

#[test]
fn a_miss_goes_to_a_task_and_is_counted_before_its_answer() {
    for own_memory in [false, true] {
        let ways = Ways { own_memory, ..Ways::default() };
        let rig = Rig::<ReadOnly>::with(Fake::new(), ways, 0);
        assert_eq!(rig.read(5, 1), Handled::Parked);
        let Sent::Bytes(expected) = blocks(5, 1) else { unreachable!() };
        let expected = if own_memory { Sent::Own(expected) } else { Sent::Bytes(expected) };
        assert_eq!(rig.sent(), expected);
        assert_eq!(rig.counted(), [0, 0, 1, 4096, 0]);
    }
}

#[test]
fn requests_beyond_the_device_or_of_part_of_a_block_are_refused() {
    let rig = Rig::<Writable>::new(Fake::new());
    let (end, over) = (SIZE - BLOCK_SIZE, LEN_MAX + BLOCK);
    for (at, len) in [(end, 2 * BLOCK), (u64::MAX - 4095, BLOCK), (100, BLOCK), (0, 100), (0, over)]
    {
        for request in [
            Request::Read { at, len },
            Request::Write { at, len, fua: false },
            Request::Erase { at, len: len as u64 + SIZE, how: Erase::Discard },
        ] {
            assert_eq!(rig.serve(request), Handled::Answered, "{request:?}");
            assert_eq!(rig.sent(), Sent::Failed(libc::EINVAL), "{request:?}");
        }
    }
    assert!(rig.device.asked.lock().unwrap().is_empty());
    let cut = Request::Read { at: end, len: 2 * BLOCK }.cut_to(SIZE);
    assert_eq!(cut, Request::Read { at: end, len: BLOCK });
    assert_eq!(
        Request::Read { at: 2 * SIZE, len: 1 }.cut_to(SIZE),
        Request::Read { at: 2 * SIZE, len: 0 }
    );
}

#[test]
fn errors_and_panics_reach_the_reader_as_an_errno() {
    let rig = Rig::<ReadOnly>::new(Fake::saying([Say::Fail, Say::Panic]));
    let events = testkit::Events::gather();
    for errno in [libc::ENOSPC, libc::EIO] {
        assert_eq!(rig.read(0, 1), Handled::Answered);
        assert_eq!(rig.sent(), Sent::Failed(errno));
    }
    let said = events.take();
    let told = "ERROR the code of the device panicked: the request gets an I/O error \
                mount=\"0a1b2c3d\" request=Read { at: 0, len: 4096 }";
    assert_eq!(said, [told]);
    let rig2 = Rig::<Writable>::new(Fake { panics: true, ..Fake::new() });
    assert_eq!(rig2.read(0, 1), Handled::Parked);
    assert_eq!(rig2.sent(), Sent::Failed(libc::EIO));
    assert_eq!(rig2.serve(Request::Flush), Handled::Parked);
    assert_eq!(rig2.sent(), Sent::Failed(libc::EIO));
    assert_eq!((rig.counted()[4], rig2.counted()[4]), (2, 1));
}

#[test]
fn a_place_in_a_local_file_is_read_and_verified() {
    for later in [false, true] {
        let device = Fake::saying([local(4, 3)]);
        let rig = Rig::<ReadOnly>::with(device, Ways { later, ..Ways::default() }, 0);
        if later {
            assert_eq!(rig.read(4, 3), Handled::Parked);
            assert_eq!(rig.counted()[0], 0);
            assert_eq!(rig.resume(Ok), Handled::Answered);
        } else {
            assert_eq!(rig.read(4, 3), Handled::Answered);
        }
        assert_eq!(rig.sent(), blocks(4, 3));
        assert_eq!(rig.counted(), [1, 12288, 0, 0, 0]);
        assert_eq!(*rig.device.asked.lock().unwrap(), [(4 * BLOCK_SIZE, 3 * BLOCK)]);
    }
}

#[test]
fn the_rest_of_a_read_is_asked_for_by_itself() {
    // Two places that lie apart, and bytes from memory.
    let device = Fake::saying([local(1, 1), local(2, 2), Say::Served]);
    let rig = Rig::<ReadOnly>::new(device);
    assert_eq!(rig.read(1, 4), Handled::Answered);
    assert_eq!(rig.sent(), blocks(1, 4));
    let at = |block: u64, count: usize| (block * BLOCK_SIZE, count * BLOCK);
    assert_eq!(*rig.device.asked.lock().unwrap(), [at(1, 4), at(2, 3), at(4, 1)]);
    assert_eq!(rig.counted(), [1, 16384, 0, 0, 0]);
    // One missing block makes all of the read a miss.
    let rig = Rig::<ReadOnly>::new(Fake::saying([local(1, 1), Say::Absent]));
    assert_eq!(rig.read(1, 2), Handled::Parked);
    assert_eq!(rig.sent(), blocks(1, 2));
    assert_eq!(rig.counted(), [0, 0, 1, 8192, 0]);
}

#[test]
fn bytes_that_are_not_good_are_never_answered() {
    // The place holds other blocks. The device is asked again, and names the right one.
    let device = Fake::saying([local(9, 1), local(2, 1)]);
    device.verdicts.lock().unwrap().push_back(Verdict::AskAgain);
    let rig = Rig::<ReadOnly>::new(device);
    assert_eq!(rig.read(2, 1), Handled::Answered);
    assert_eq!(rig.sent(), blocks(2, 1));
    // A device that never learns is not asked for ever.
    let device = Fake::saying([local(9, 1); 10]);
    device.verdicts.lock().unwrap().extend([Verdict::AskAgain; 10]);
    let rig = Rig::<ReadOnly>::new(device);
    assert_eq!(rig.read(2, 1), Handled::Parked);
    assert_eq!(rig.sent(), blocks(2, 1));
    assert_eq!(rig.device.asked.lock().unwrap().len(), usize::from(DOUBTS_MAX) + 1);
    assert_eq!(rig.counted(), [0, 0, 1, 4096, 0]);
}

#[test]
fn a_local_file_that_cannot_be_read_is_a_miss() {
    for result in [|len| Ok(len - 1), |_| Ok(0), |_| Err(io::Error::other("as told"))] {
        let ways = Ways { later: true, ..Ways::default() };
        let rig = Rig::<ReadOnly>::with(Fake::saying([local(2, 1)]), ways, 0);
        assert_eq!(rig.read(2, 1), Handled::Parked);
        assert_eq!(rig.resume(result), Handled::Parked);
        assert_eq!(rig.sent(), blocks(2, 1));
        assert_eq!(rig.counted(), [0, 0, 1, 4096, 0]);
    }
}

#[test]
fn places_that_make_no_sense_are_a_miss() {
    let range = |len| ByteRange::at(0, len).unwrap();
    for (file, len) in [(8, BLOCK_SIZE), (7, 0), (7, 100), (7, 2 * BLOCK_SIZE)] {
        let odd = Say::Local(FileRange { file, range: range(len) });
        let rig = Rig::<ReadOnly>::new(Fake::saying([odd]));
        assert_eq!(rig.read(2, 1), Handled::Parked, "file {file}, {len} bytes");
        assert_eq!(rig.sent(), blocks(2, 1));
    }
}

#[test]
fn changes_of_a_read_only_device_are_refused() {
    let rig = Rig::<ReadOnly>::new(Fake::new());
    for request in [
        Request::Write { at: 0, len: BLOCK, fua: false },
        Request::Erase { at: 0, len: BLOCK_SIZE, how: Erase::Zeroes { unmap: true } },
    ] {
        assert_eq!(rig.serve(request), Handled::Answered);
        assert_eq!(rig.sent(), Sent::Failed(libc::EROFS));
    }
    assert_eq!(rig.serve(Request::Flush), Handled::Answered);
    assert_eq!(rig.sent(), Sent::Done);
    assert!(rig.device.changes.lock().unwrap().is_empty());
}

#[test]
fn writes_erasures_and_flushes_reach_the_device() {
    for own_memory in [false, true] {
        let ways = Ways { own_memory, ..Ways::default() };
        let rig = Rig::<Writable>::with(Fake::new(), ways, 0);
        let write = |fua| Request::Write { at: BLOCK_SIZE, len: 2 * BLOCK, fua };
        let erase = Request::Erase { at: BLOCK_SIZE, len: BLOCK_SIZE, how: Erase::Discard };
        let requests = [write(false), write(true), erase, Request::Flush];
        let answers = [Sent::Written(2 * BLOCK), Sent::Written(2 * BLOCK), Sent::Done, Sent::Done];
        for (request, answer) in requests.into_iter().zip(answers) {
            assert_eq!(rig.serve(request), Handled::Parked);
            assert_eq!(rig.sent(), answer, "{request:?}");
        }
        assert_eq!(*rig.device.changes.lock().unwrap(), requests);
        let bytes = rig.device.bytes.lock().unwrap();
        assert_eq!(bytes[BLOCK..3 * BLOCK], [[0; BLOCK], [0xaa; BLOCK]].concat());
    }
    let shape = Shape { cache: WriteCache::Through, ..Fake::new().shape };
    let rig = Rig::<Writable>::new(Fake { shape, ..Fake::new() });
    assert_eq!(rig.serve(Request::Flush), Handled::Parked);
    assert_eq!(rig.sent(), Sent::Done);
    // The writes are durable already.
    assert!(rig.device.changes.lock().unwrap().is_empty());
}

#[test]
fn misses_take_turns_for_their_memory() {
    let rig = Rig::<ReadOnly>::with(Fake::new(), Ways::default(), LEN_MAX);
    for _ in 0..6 {
        // More than half of the room each.
        assert_eq!(rig.read(0, 40), Handled::Parked);
    }
    (0..6).for_each(|_| assert_eq!(rig.sent(), blocks(0, 40)));
    assert_eq!(rig.device.in_read_max.load(SeqCst), 1);
}

#[test]
fn cancelled_requests_are_left_to_the_transport() {
    let rig = Rig::<Writable>::new(Fake::new());
    rig.device.gate.send_replace(false);
    let write = Request::Write { at: 0, len: 2 * BLOCK, fua: false };
    assert_eq!((rig.read(0, 1), rig.serve(write)), (Handled::Parked, Handled::Parked));
    rig.engine.life().drain(Duration::ZERO);
    // All has been let go of when the drain returns.
    assert_eq!((rig.sent.try_recv(), rig.sent.try_recv()), (Ok(Sent::Left), Ok(Sent::Left)));
    assert_eq!(rig.counted(), [0; 5]);
    assert!(rig.device.changes.lock().unwrap().is_empty());
}

#[test]
fn a_drain_waits_for_answers_and_a_lost_runtime_leaves_requests() {
    let rig = Rig::<ReadOnly>::new(Fake::new());
    rig.device.gate.send_replace(false);
    assert_eq!(rig.read(0, 1), Handled::Parked);
    let (life, device) = (rig.engine.life().clone(), rig.device.clone());
    let drain = std::thread::spawn(move || life.drain(Duration::from_secs(60)));
    device.gate.send_replace(true);
    drain.join().unwrap();
    assert_eq!(rig.sent.try_recv(), Ok(blocks(0, 1)));

    rig.device.gate.send_replace(false);
    assert_eq!(rig.read(0, 1), Handled::Parked);
    rig.runtime.shutdown_timeout(Duration::from_secs(60));
    assert_eq!(rig.sent.recv_timeout(Duration::from_secs(60)), Ok(Sent::Left));
}

#[test]
fn the_first_reason_of_the_end_counts() {
    let life = Arc::new(Life::default());
    let ended = life.ended();
    life.end(End::Failed(5));
    life.end(End::Stopped);
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    assert_eq!(runtime.block_on(ended), End::Failed(5));
    let late = life.ended();
    drop(life);
    assert_eq!(runtime.block_on(late), End::Failed(5));
}

#[test]
fn a_shape_that_does_not_fit_is_refused() {
    let refused = |shape, what: &str| {
        let device = Arc::new(Fake { shape, ..Fake::new() });
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let slots = Arc::new(Slots::create().unwrap());
        let engine = Engine::<_, Writable>::new(device, slots, runtime.handle().clone(), 0);
        let error = engine.err().unwrap();
        assert_eq!(error.kind(), ErrorKind::Invalid);
        assert!(error.to_string().contains(what), "{error}");
    };
    refused(Shape { size: 100, ..Fake::new().shape }, "whole blocks");
    refused(Shape::read_only(SIZE), "read-only");
}
