//! ublk: the transport that shows a device as `/dev/ublkbN`. Requests come and go over io_uring,
//! without a file system or a loop device between.
//!
//! ```text
//!   /dev/ublkbN ── blk-mq, a queue for each group of CPUs
//!      │ descriptors in shared memory, completions of fetch commands
//!   queue thread, with its ring                         (no lock, nothing shared with other queues)
//!      │  Engine::serve ─► answered ─► pwrite the bytes ─► commit and fetch   all of a batch at once
//!      │     ▲ resume └──► a local file, by the ring ─┐
//!      │     └────────────────────────────────────────┘
//!      ▼ parked: the tag stays with a task
//!   engine's task ─► pwrite the bytes ─► mailbox ─► the thread commits
//! ```
//!
//! The bytes are checked in the server's own buffer and only then copied into the request
//! (`UBLK_F_USER_COPY`): with the driver's zero copy they could not be checked before they are
//! used. That also means one buffer a queue instead of one a tag, and one more for each read of a
//! local file that is in work, at most eight.
//!
//! The device belongs to no process. When its server dies, its requests wait in the kernel, those
//! in flight among them; the next call of [`serve`] takes them over.
//!
//! Our own control code and not the crate `libublk`: the needed part of the interface is ten
//! commands and five small structures. `libublk` 0.4 brings an executor of its own into every
//! queue thread and allocates a future for each tag, its next release changes that executor, and
//! it cannot recover under a supervisor.
//!
//! The threads are not pinned to their queues' CPUs: there a reader that has more to ask for would
//! be interrupted by each of its own requests, instead of having them served beside it
//! (`docs/performance.md` has the figures).
//!
//! Invariants (held by `tests/ublk.rs` and `tests/ublk_kill.rs`):
//! - A tag is in the kernel (fetching), in a thread's hands, or with one task.
//! - The descriptor of `/dev/ublkcN` stays open until the last task has ended, so a successor
//!   cannot take over while a task may still write into a request.
//! - Stopping leaves requests that are not answered to a successor.
//! - Nothing is read from a device before it has started: a server that dies earlier would leave
//!   the reader waiting for ever.

mod control;
mod driver;
mod mailbox;
mod queue;
mod uapi;

use std::{
    fs::File,
    io,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::SeqCst},
        mpsc,
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use burgeon_block::{BlockDevice, Error, ErrorKind, Result, WritableDevice};
use rustix::thread::{CapabilitySet, capabilities, set_capabilities};

pub use self::{
    control::{Control, Queues, UblkDevice, block_path, numbers},
    driver::{Driver, OpenDevice},
};
use self::{mailbox::Mailbox, queue::Queue};
use crate::{
    engine::{Changes, End, Engine, Life, ReadOnly, Writable},
    server::ServeOptions,
    slots::Slots,
    sys::failed,
};

/// Limit for the kernel to close the files of a killed server.
const RECOVERY_TIMEOUT: Duration = Duration::from_secs(30);
/// Attempts to take a device over. An attempt fails if the process that opened the device has died.
const TRIES: usize = 3;

/// A running server of one device. Dropping it leaves the device to a successor.
pub struct UblkServer {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
    opener: u32,
}

/// The state that the threads and tasks of all queues share: a hit locks nothing of it.
struct Shared {
    /// `/dev/ublkcN`: the bytes of requests go through it.
    file: File,
    mailboxes: Vec<Mailbox>,
    /// Queues whose thread runs.
    running: AtomicUsize,
    life: Arc<Life>,
}

/// Serves `device` as the ublk device `number`, and counts in `slots`. A device that was added is
/// then to be started ([`Control::start`]); one whose server has died goes on by itself.
///
/// Returns when all queues are served. Waits, at most half a minute, for the end of a server that
/// is just dying. `Invalid` if the sizes differ. Changes are refused with EROFS.
pub fn serve<D: BlockDevice>(
    number: u32,
    slots: Arc<Slots>,
    device: Arc<D>,
    options: &ServeOptions,
) -> Result<UblkServer> {
    start::<D, ReadOnly>(number, slots, device, options)
}

/// As [`serve`], for a device that is written to, and was added with such a shape.
pub fn serve_writable<D: WritableDevice>(
    number: u32,
    slots: Arc<Slots>,
    device: Arc<D>,
    options: &ServeOptions,
) -> Result<UblkServer> {
    start::<D, Writable>(number, slots, device, options)
}

fn start<D: BlockDevice, A: Changes<D>>(
    number: u32,
    slots: Arc<Slots>,
    device: Arc<D>,
    options: &ServeOptions,
) -> Result<UblkServer> {
    let mut tries = 1;
    loop {
        match try_to_start::<D, A>(number, slots.clone(), device.clone(), options) {
            // Linux 6.17 and later want the process that has opened the device, alive.
            Err(e) if tries < TRIES && is_invalid(&e) => tries += 1,
            result => return result,
        }
    }
}

/// True if the driver refused a command's arguments.
fn is_invalid(error: &Error) -> bool {
    let cause = error.cause::<io::Error>().and_then(io::Error::raw_os_error);
    cause == Some(libc::EINVAL)
}

fn try_to_start<D: BlockDevice, A: Changes<D>>(
    number: u32,
    slots: Arc<Slots>,
    device: Arc<D>,
    options: &ServeOptions,
) -> Result<UblkServer> {
    let driver = &options.driver;
    let Some(description) = driver.with(|control| control.device(number))? else {
        let what = format!("there is no ublk device {number}");
        return Err(Error::new(ErrorKind::NotFound, what));
    };
    let (size, expected) = (device.size(), driver.size(number)?);
    if size != expected {
        return Err(Error::new(
            ErrorKind::Invalid,
            format!("the ublk device {number} has {expected} bytes, and not the {size} to serve"),
        ));
    }
    if description.started {
        begin_recovery(driver, number)?;
    }
    let (runtime, memory_max) = (options.runtime.clone(), options.miss_bytes_max);
    let engine = Arc::new(Engine::<D, A>::new(device, slots, runtime, memory_max)?);
    let mailboxes = (0..description.queues).map(|_| Mailbox::new(description.depth));
    let mailboxes = mailboxes.collect::<io::Result<Vec<_>>>();
    let (file, opener) = driver.open(number)?;
    let shared = Arc::new(Shared {
        file,
        mailboxes: mailboxes.map_err(|e| failed("cannot make an eventfd", e))?,
        running: AtomicUsize::new(usize::from(description.queues)),
        life: engine.life().clone(),
    });
    let mut server = UblkServer { shared: shared.clone(), threads: Vec::new(), opener };
    let (ready, becomes_ready) = mpsc::channel();
    for number_of_queue in 0..description.queues {
        let (shared, engine, ready) = (shared.clone(), engine.clone(), ready.clone());
        let thread = thread::Builder::new()
            .name("ublk-queue".into())
            .spawn(move || {
                leave_partitions_alone();
                match Queue::new(number_of_queue, description.depth, shared.clone(), engine) {
                    Ok(queue) => {
                        let _ = ready.send(Ok(()));
                        drop(ready);
                        let end = queue.run();
                        shared.queue_ended(end);
                    }
                    Err(e) => {
                        let _ = ready.send(Err(e));
                    }
                }
            })
            .map_err(|e| failed("cannot start a queue's thread", e))?;
        server.threads.push(thread);
    }
    drop(ready);
    becomes_ready
        .into_iter()
        .collect::<io::Result<()>>()
        .map_err(|e| failed(format!("cannot serve the queues of the ublk device {number}"), e))?;
    if description.started {
        driver.with(|control| control.end_recovery(number, opener))?;
    }
    Ok(server)
}

/// Gives up CAP_SYS_ADMIN in this thread, which then serves a queue. The kernel reads the partition
/// table of a device whose queues have it within its start: a server that dies then would stop that
/// for ever.
fn leave_partitions_alone() {
    let Ok(mut sets) = capabilities(None) else { return };
    for set in [&mut sets.effective, &mut sets.permitted, &mut sets.inheritable] {
        set.remove(CapabilitySet::SYS_ADMIN);
    }
    // A sandbox that forbids it has taken the capability already.
    let _ = set_capabilities(None, sets);
}

/// Waits until the kernel has closed the files of a dead server. Every try is a command of its own,
/// so that many devices can wait beside each other.
fn begin_recovery(driver: &Driver, number: u32) -> Result<()> {
    let begun = Instant::now();
    while !driver.with(|control| control.begin_recovery(number))? {
        if begun.elapsed() > RECOVERY_TIMEOUT {
            let busy = io::Error::from_raw_os_error(libc::EBUSY);
            return Err(control::cannot_take_over(number, busy));
        }
        thread::sleep(Duration::from_millis(1));
    }
    Ok(())
}

impl UblkServer {
    /// The process that has opened the device, for [`Control::start`].
    pub fn opener(&self) -> u32 {
        self.opener
    }

    /// Waits until serving is over, for whichever reason: [`End::Unmounted`] when the device was
    /// stopped.
    pub fn ended(&self) -> impl Future<Output = End> + Send + 'static {
        self.shared.life.ended()
    }

    /// Takes no more requests, and waits up to `drain` for those in work: when this returns, none
    /// of them changes the device any more, unless it takes still longer. The kernel issues them
    /// again to a successor. Blocks; not for a thread of the runtime that runs the misses.
    pub fn stop(mut self, drain: Duration) {
        self.halt(drain);
    }

    fn halt(&mut self, drain: Duration) {
        let life = &self.shared.life;
        life.end(End::Stopped);
        life.stop();
        self.shared.mailboxes.iter().for_each(Mailbox::ring);
        if drain.is_zero() {
            life.cancel();
        }
        for thread in self.threads.drain(..) {
            // A panic outside the device's code would be a bug here; its requests are reissued.
            let _ = thread.join();
        }
        life.drain(drain);
    }
}

impl Drop for UblkServer {
    fn drop(&mut self) {
        self.halt(Duration::ZERO);
    }
}

impl Shared {
    /// A queue's thread leaves: with the last one serving is over, and when one fails.
    fn queue_ended(&self, end: End) {
        let last = self.running.fetch_sub(1, SeqCst) == 1;
        if last || matches!(end, End::Failed(_)) {
            self.life.end(end);
        }
    }
}
