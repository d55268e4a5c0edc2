//! Serving over io_uring: a thread and a queue for each CPU, each pinned to its CPU, so that a
//! request is answered where it was asked and wakes nobody on another CPU.
//!
//! ```text
//!                ┌──────────────── ring thread of CPU n ────────────────┐
//!   completion ─►│ try_read into the entry ─► Served ─► commit          │   no allocation, no lock
//!                │                     └────► Absent ─┐     ▲           │
//!                └────────────────────────────────────┼─────┼───────────┘
//!                         the entry goes along        ▼     │ eventfd: come and take it
//!                         tokio task: read().await into the entry ─► done list
//! ```
//!
//! What rings do not carry (FORGET, INTERRUPT), and everything before the last ring is there,
//! comes over `/dev/fuse` to an ordinary reader thread.
//!
//! Nothing of this survives the process: a request that a killed server had in hand is with the
//! kernel, which tells nobody, so its readers get EIO when the connection is aborted.
//!
//! Invariants (held by `tests/rings.rs`):
//! - An entry is with the kernel, a thread, a task, or on the done list.
//! - The done list never grows beyond the entries of its queue.

use std::{
    fs, io, mem,
    os::fd::{AsFd, OwnedFd},
    sync::{Arc, Mutex, PoisonError, mpsc},
    thread::{self, JoinHandle},
};

use burgeon_block::{BlockDevice, Now, Result};
use rustix::event::{EventfdFlags, eventfd};
use zerocopy::IntoBytes;

use super::{
    BlockRead, End, Worker,
    control::Control,
    queue::{Entry, Event, Queue},
    stop,
};
use crate::{
    fuse::{Operation, OutHeader, READ_MAX, Request, small_payload},
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
    entries: Mutex<Vec<Entry>>,
    event: OwnedFd,
}

impl Done {
    fn new(entries: u32) -> io::Result<Self> {
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Self { entries: Mutex::new(Vec::with_capacity(entries as usize)), event })
    }

    fn push(&self, entry: Entry) {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner).push(entry);
        // Fails only when the counter is full, and then the thread is woken anyway.
        let _ = rustix::io::write(&self.event, &1u64.to_ne_bytes());
    }

    /// The eventfd is reset first: what is pushed from then on wakes again.
    fn reset(&self) {
        let _ = rustix::io::read(&self.event, &mut [0; 8]);
    }

    fn pop(&self) -> Option<Entry> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner).pop()
    }
}

/// The entry of a miss. Dropped without an answer (its task was cancelled, or panicked), the read
/// fails: there is no successor that could answer it.
struct Parked {
    control: Arc<Control>,
    done: Arc<Done>,
    entry: Option<Entry>,
    unique: u64,
}

impl Parked {
    fn payload(&mut self, len: usize) -> &mut [u8] {
        match &mut self.entry {
            Some(entry) => &mut entry.payload()[..len],
            None => &mut [],
        }
    }

    fn answer(mut self, result: Result<usize, i32>) {
        self.finish(result);
    }

    fn finish(&mut self, result: Result<usize, i32>) {
        if let Some(mut entry) = self.entry.take() {
            self.control.slots.counters().failed_reads.add(u64::from(result.is_err()));
            answer(&mut entry, self.unique, result);
            self.done.push(entry);
        }
    }
}

impl Drop for Parked {
    fn drop(&mut self) {
        self.finish(Err(libc::EIO));
    }
}

fn answer(entry: &mut Entry, unique: u64, result: Result<usize, i32>) {
    let (header, len) = match result {
        Ok(len) => (OutHeader::answer(unique, len), len),
        Err(errno) => (OutHeader::error(unique, errno), 0),
    };
    let mut bytes = [0; size_of::<OutHeader>()];
    bytes.copy_from_slice(header.as_bytes());
    entry.answer(bytes, len);
}

/// Starts a ring thread for each possible CPU, and returns when the kernel has all rings.
pub(super) fn start<D: BlockDevice>(worker: &Arc<Worker<D>>) -> Result<Vec<JoinHandle<()>>> {
    let what = "cannot serve over io_uring; mount without --fast";
    let cpus = possible_cpus().map_err(|e| failed(what, e))?;
    let entries =
        (MEMORY_MAX / READ_MAX / usize::from(cpus)).clamp(ENTRIES_MIN, ENTRIES_MAX) as u32;
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
                    worker.run_ring(queue, &done, entries);
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

impl<D: BlockDevice> Worker<D> {
    /// A ring thread's life.
    fn run_ring(self: Arc<Self>, mut queue: Queue, done: &Arc<Done>, entries: u32) {
        let mut lost = 0;
        while lost < entries && !self.control.is_stopping() {
            match queue.wait() {
                Ok(()) => {}
                Err(error) if error.raw_os_error() == Some(libc::EINTR) => continue,
                Err(error) => return self.fail_ring(&error),
            }
            while let Some(event) = queue.next() {
                let result = match event {
                    Event::Request(entry) => match self.handle_entry(entry, done) {
                        Some(answered) => queue.commit(answered),
                        None => Ok(()),
                    },
                    Event::Woken => self.commit_done(&mut queue, done),
                    Event::Lost => {
                        lost += 1;
                        Ok(())
                    }
                };
                if let Err(error) = result {
                    return self.fail_ring(&error);
                }
            }
        }
    }

    fn fail_ring(&self, error: &io::Error) {
        self.control.end(End::Failed(error.raw_os_error().unwrap_or(libc::EIO)));
    }

    fn commit_done(&self, queue: &mut Queue, done: &Arc<Done>) -> io::Result<()> {
        done.reset();
        queue.await_wake(done.event.as_fd())?;
        while let Some(entry) = done.pop() {
            queue.commit(entry)?;
        }
        Ok(())
    }

    /// Answers a request; `None` if its entry went along with a task.
    fn handle_entry(self: &Arc<Self>, mut entry: Entry, done: &Arc<Done>) -> Option<Entry> {
        let begun = std::time::Instant::now();
        let Some(request) = Request::parse(&entry.request()) else {
            // The kernel makes no such request. Without its number there is no right answer, and
            // the wrong one is an error at its reader.
            answer(&mut entry, 0, Err(libc::EIO));
            return Some(entry);
        };
        let unique = request.unique;
        let result = match request.operation {
            Operation::Read { offset, len } => match self.block_read(offset, len) {
                Ok(len) => {
                    let read = BlockRead { unique, offset, len, begun, replayed: false };
                    match self.try_now(read, &mut entry.payload()[..len]) {
                        Ok(Now::Served) => Ok(len),
                        Ok(Now::Absent | Now::Local(_)) => {
                            let parked = Parked {
                                control: self.control.clone(),
                                done: done.clone(),
                                entry: Some(entry),
                                unique,
                            };
                            self.runtime.spawn(self.clone().miss_of_ring(parked, read));
                            return None;
                        }
                        Err(errno) => {
                            self.control.slots.counters().failed_reads.add(1);
                            Err(errno)
                        }
                    }
                }
                Err(errno) => Err(errno),
            },
            Operation::Refuse(errno) => Err(errno),
            operation => {
                let mut small = [0; 104];
                let bytes = small_payload(operation, self.device.size(), &mut small);
                entry.payload()[..bytes.len()].copy_from_slice(bytes);
                Ok(bytes.len())
            }
        };
        answer(&mut entry, unique, result);
        Some(entry)
    }

    /// The task of a read that has to wait.
    async fn miss_of_ring(self: Arc<Self>, mut parked: Parked, read: BlockRead) {
        let result = tokio::select! {
            biased;
            () = self.control.cancelled() => return,
            result = self.device.read(read.offset, parked.payload(read.len)) => result,
        };
        match result {
            Ok(()) => {
                self.count_miss(read);
                parked.answer(Ok(read.len));
            }
            Err(error) => parked.answer(Err(error.errno())),
        }
    }
}

/// How many queues the kernel wants: one for each CPU that there might ever be.
fn possible_cpus() -> io::Result<u16> {
    let list = fs::read_to_string("/sys/devices/system/cpu/possible")?;
    parse_cpus(&list).ok_or_else(|| io::Error::other(format!("{list:?} is no list of CPUs")))
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
    use super::parse_cpus;

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
