//! FUSE over io_uring: a thread and a queue for each CPU, each pinned to its CPU, so that a
//! request is answered on its reader's CPU and wakes no thread of another.
//!
//! ```text
//!                ┌──────────────── ring thread of CPU n ────────────────┐
//!   completion ─►│ Engine::serve into the entry ─► answered ─► commit   │   no allocation, no lock
//!                │     ▲ resume      ├─► a local file, by the ring ──┐  │
//!                │     └─────────────┼───────────────────────────────┘  │
//!                │                   └─► parked ─┐          ▲           │
//!                └───────────────────────────────┼──────────┼───────────┘
//!                         the entry goes along   ▼          │ eventfd: a wake-up
//!                                 engine's task, in the entry ─► done list
//! ```
//!
//! Requests that rings do not carry (FORGET, INTERRUPT), and all requests before the last ring is
//! registered, come over `/dev/fuse` to a reader thread.
//!
//! No request survives the process: the kernel keeps the requests of a killed server's rings, but
//! hands them to no other server, so their readers get EIO when the connection is aborted.
//!
//! Invariants (held by `tests/rings.rs`):
//! - An entry is with the kernel, a thread, a task, or on the done list.
//! - The done list never grows beyond the entries of its queue.

use std::{
    fs, io, mem,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::{Arc, Mutex, PoisonError, mpsc},
    thread::{self, JoinHandle},
};

use burgeon_block::{BlockDevice, Result};
use rustix::event::{EventfdFlags, eventfd};
use zerocopy::IntoBytes;

use super::{
    Worker,
    control::Control,
    queue::{Event, Queue, RingEntry},
    stop,
};
use crate::{
    engine::{self, Answer, Arrival, Call, Changes, End, LEN_MAX, Load, Loading},
    fuse::{self, Operation, OutHeader, Request, small_payload},
    sys::failed,
};

/// Address space for the entries of all queues of a mount, where the CPUs are so few that
/// [`ENTRIES_MAX`] does not limit it first. Only pages that answers have touched take memory.
const MEMORY_MAX: usize = 64 << 20;
/// Entries of a queue: more than a loop device sends from one CPU at a depth of 64 with two.
const ENTRIES_MAX: usize = 32;
/// Fewer would let one miss stop all hits of a CPU.
const ENTRIES_MIN: usize = 4;

/// Entries that misses have answered, for the ring thread to commit.
struct Done {
    entries: Mutex<Vec<RingEntry>>,
    event: OwnedFd,
}

impl Done {
    fn new(entries: u32) -> io::Result<Self> {
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Self { entries: Mutex::new(Vec::with_capacity(entries as usize)), event })
    }

    fn push(&self, entry: RingEntry) {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner).push(entry);
        // Fails only when the counter is full, and then the thread is woken anyway.
        let _ = rustix::io::write(&self.event, &1u64.to_ne_bytes());
    }

    /// Resets the eventfd, before the answers are taken: a later push wakes again.
    fn reset(&self) {
        let _ = rustix::io::read(&self.event, &mut [0; 8]);
    }

    fn pop(&self) -> Option<RingEntry> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner).pop()
    }
}

/// A ring thread's queue, with the parts that its answers need.
struct Ring {
    queue: Queue,
    done: Arc<Done>,
    control: Arc<Control>,
    /// The first commit that failed.
    outcome: io::Result<()>,
}

impl Ring {
    fn commit(&mut self, entry: RingEntry) {
        if let Err(error) = self.queue.commit(entry) {
            self.outcome = Err(error);
        }
    }

    /// Commits the answers of tasks.
    fn commit_done(&mut self) -> io::Result<()> {
        self.done.reset();
        self.queue.await_wake(self.done.event.as_fd())?;
        while let Some(entry) = self.done.pop() {
            self.queue.commit(entry)?;
        }
        Ok(())
    }
}

/// A request in a ring thread's hands.
struct RingCall<'a> {
    ring: &'a mut Ring,
    entry: RingEntry,
    unique: u64,
}

impl Call for RingCall<'_> {
    type Parked = Parked;

    #[inline]
    fn buffer(&mut self, len: usize) -> Result<&mut [u8], i32> {
        Ok(&mut self.entry.payload()[..len])
    }

    fn load(self, load: Load, file: BorrowedFd<'_>) -> Loading<Self> {
        self.ring.queue.load(self.entry, load, file);
        Loading::Later
    }

    #[inline]
    fn reply(mut self, answer: Result<usize, i32>) {
        answer_in(&mut self.entry, self.unique, answer);
        self.ring.commit(self.entry);
    }

    fn park(self) -> Parked {
        Parked {
            control: self.ring.control.clone(),
            done: self.ring.done.clone(),
            entry: Some(self.entry),
            unique: self.unique,
        }
    }
}

/// An entry in the hands of a task. Dropped without an answer (its task was cancelled), the request
/// fails: there is no successor that could answer it.
struct Parked {
    control: Arc<Control>,
    done: Arc<Done>,
    entry: Option<RingEntry>,
    unique: u64,
}

impl Parked {
    fn finish(&mut self, result: Result<usize, i32>) {
        if let Some(mut entry) = self.entry.take() {
            answer_in(&mut entry, self.unique, result);
            self.done.push(entry);
        }
    }
}

impl engine::Parked for Parked {
    fn memory(&mut self, len: usize) -> Option<&mut [u8]> {
        self.entry.as_mut().map(|entry| &mut entry.payload()[..len])
    }

    fn copy_payload(&mut self, _into: &mut [u8]) -> Result<(), i32> {
        // A write's bytes lie in its entry.
        Err(libc::EIO)
    }

    fn answer(mut self, answer: Answer<'_>) {
        let mut put = |bytes: &[u8]| {
            if let Some(entry) = &mut self.entry {
                entry.payload()[..bytes.len()].copy_from_slice(bytes);
            }
            Ok(bytes.len())
        };
        let result = match answer {
            Answer::Own(len) => Ok(len),
            Answer::Bytes(bytes) => put(bytes),
            Answer::Written(len) => put(&fuse::written(len)),
            Answer::Done => Ok(0),
            Answer::Failed(errno) => Err(errno),
        };
        self.finish(result);
    }
}

impl Drop for Parked {
    fn drop(&mut self) {
        if self.entry.as_ref().is_some_and(|entry| is_read(&entry.request())) {
            self.control.slots.counters().failed_reads.add(1);
        }
        self.finish(Err(libc::EIO));
    }
}

/// True for the request of a read.
fn is_read(request: &[u8]) -> bool {
    let operation = Request::parse(request).map(|request| request.operation);
    matches!(operation, Some(Operation::Device(engine::Request::Read { .. })))
}

/// Puts an answer into an entry: so many bytes of its payload, or an errno.
fn answer_in(entry: &mut RingEntry, unique: u64, result: Result<usize, i32>) {
    let (header, len) = match result {
        Ok(len) => (OutHeader::answer(unique, len), len),
        Err(errno) => (OutHeader::error(unique, errno), 0),
    };
    let mut bytes = [0; size_of::<OutHeader>()];
    bytes.copy_from_slice(header.as_bytes());
    entry.answer(bytes, len);
}

/// Starts a ring thread for each possible CPU, and returns when the kernel has all rings.
pub(super) fn start<D: BlockDevice, A: Changes<D>>(
    worker: &Arc<Worker<D, A>>,
) -> Result<Vec<JoinHandle<()>>> {
    let what = "cannot serve over io_uring; mount without --fast";
    let cpus = possible_cpus().map_err(|e| failed(what, e))?;
    let entries = (MEMORY_MAX / LEN_MAX / usize::from(cpus)).clamp(ENTRIES_MIN, ENTRIES_MAX) as u32;
    let (ready, results) = mpsc::channel();
    let mut threads = Vec::new();
    for cpu in 0..cpus {
        let (worker, ready) = (worker.clone(), ready.clone());
        let thread = thread::Builder::new().name(format!("fuse-ring-{cpu}")).spawn(move || {
            stop::accept_interrupts();
            pin(cpu);
            // The ring belongs to the thread that makes it.
            let made = Done::new(entries).and_then(|done| {
                let mut queue = Queue::new(worker.control.fuse.as_fd(), cpu, entries)?;
                queue.await_wake(done.event.as_fd())?;
                Ok((queue, Arc::new(done)))
            });
            match made {
                Ok((queue, done)) => {
                    let _ = ready.send(Ok(()));
                    drop(ready);
                    let control = worker.control.clone();
                    worker.run_ring(Ring { queue, done, control, outcome: Ok(()) }, entries);
                }
                Err(error) => {
                    let _ = ready.send(Err(error));
                }
            }
        });
        threads.push(thread.map_err(|e| failed(what, e))?);
    }
    drop(ready);
    let mut failure = None;
    for result in results {
        failure = failure.or(result.err());
    }
    match failure {
        None => Ok(threads),
        Some(error) => {
            worker.control.request_stop();
            for thread in threads {
                stop::interrupt_until_finished(&thread);
                let _ = thread.join();
            }
            Err(failed(what, error))
        }
    }
}

impl<D: BlockDevice, A: Changes<D>> Worker<D, A> {
    /// A ring thread's life.
    fn run_ring(self: Arc<Self>, mut ring: Ring, entries: u32) {
        let mut lost = 0;
        while lost < entries && !self.control.is_stopping() {
            match ring.queue.wait() {
                Ok(()) => {}
                Err(error) if error.raw_os_error() == Some(libc::EINTR) => continue,
                Err(error) => return self.fail_ring(&error),
            }
            while let Some(event) = ring.queue.next() {
                match event {
                    Event::Request(entry) => self.handle_entry(entry, &mut ring),
                    Event::Loaded(entry, load, result) => {
                        self.resume(entry, load, result, &mut ring)
                    }
                    Event::Woken => ring.outcome = ring.commit_done(),
                    Event::Lost => lost += 1,
                }
                if let Err(error) = &ring.outcome {
                    return self.fail_ring(error);
                }
            }
        }
    }

    fn fail_ring(&self, error: &io::Error) {
        self.control.end(End::Failed(error.raw_os_error().unwrap_or(libc::EIO)));
    }

    /// Answers a request, now or with a task.
    fn handle_entry(&self, mut entry: RingEntry, ring: &mut Ring) {
        let arrival = Arrival::now();
        let Some(request) = Request::parse(&entry.request()) else {
            // The kernel makes no such request. Without its number there is no right answer, and
            // the wrong one is an error at its reader.
            answer_in(&mut entry, 0, Err(libc::EIO));
            return ring.commit(entry);
        };
        let unique = request.unique;
        let result = match request.operation {
            Operation::Device(request) => {
                let request = request.cut_to(self.engine.shape().size);
                self.engine.serve(request, arrival, RingCall { ring, entry, unique });
                return;
            }
            Operation::Refuse(errno) => Err(errno),
            operation => {
                let mut small = [0; 104];
                let bytes = small_payload(operation, self.engine.shape(), &mut small);
                entry.payload()[..bytes.len()].copy_from_slice(bytes);
                Ok(bytes.len())
            }
        };
        answer_in(&mut entry, unique, result);
        ring.commit(entry);
    }

    /// Goes on with a read whose piece of a local file is in its entry.
    fn resume(&self, entry: RingEntry, load: Load, result: io::Result<usize>, ring: &mut Ring) {
        let Some(request) = Request::parse(&entry.request()) else { return };
        let call = RingCall { ring, entry, unique: request.unique };
        self.engine.resume(load, result, call);
    }
}

/// Number of queues that the kernel wants: one for each CPU that there might ever be.
fn possible_cpus() -> io::Result<u16> {
    let list = fs::read_to_string("/sys/devices/system/cpu/possible")?;
    parse_cpus(&list).ok_or_else(|| io::Error::other(format!("{list:?} is not a list of CPUs")))
}

/// One more than the last number of a list such as `0-7` or `0,2-5`.
fn parse_cpus(list: &str) -> Option<u16> {
    let last = list.trim().rsplit([',', '-']).next()?;
    last.parse::<u16>().ok()?.checked_add(1)
}

/// Binds the calling thread to `cpu`. One that is offline, or not ours to use, is no harm: it
/// then runs anywhere.
fn pin(cpu: u16) {
    // SAFETY: a `cpu_set_t` on the stack; only this thread's affinity changes.
    unsafe {
        let mut set: libc::cpu_set_t = mem::zeroed();
        if usize::from(cpu) < libc::CPU_SETSIZE as usize {
            libc::CPU_SET(usize::from(cpu), &mut set);
            libc::sched_setaffinity(0, size_of_val(&set), &set);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{is_read, parse_cpus};

    #[test]
    fn a_read_is_told_from_a_write() {
        // The opcode of a header of 40 bytes, and 40 bytes of arguments.
        let request = |opcode: u32| {
            let mut bytes = [0; 80];
            bytes[4..8].copy_from_slice(&opcode.to_ne_bytes());
            bytes
        };
        assert_eq!([15, 16, 20].map(|opcode| is_read(&request(opcode))), [true, false, false]);
    }

    #[test]
    fn cpus_are_counted_from_the_kernels_list() {
        for (list, count) in [("0\n", 1), ("0-1\n", 2), ("0-3,8-127", 128), ("0,2", 3)] {
            assert_eq!(parse_cpus(list), Some(count), "{list:?}");
        }
        for list in ["", "0-", "65535", "x"] {
            assert_eq!(parse_cpus(list), None, "{list:?}");
        }
    }
}
