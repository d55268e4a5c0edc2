//! A [`BlockDevice`] as `/dev/ublkbN`: requests come and go over io_uring, without a file system
//! or a loop device between.
//!
//! ```text
//!   /dev/ublkbN ── blk-mq, a queue for each group of CPUs
//!      │ descriptors in shared memory, completions of fetch commands
//!   queue thread, with its ring                         (no lock, nothing shared with other queues)
//!      │  try_read ─► Served ─► pwrite the bytes ─► commit and fetch       all of a batch at once
//!      │     └─► Absent: the tag stays with a task
//!      ▼
//!   tokio task: wait for memory ─► read().await ─► pwrite the bytes ─► mailbox ─► the thread commits
//! ```
//!
//! The bytes are checked in the server's own buffer and only then copied into the request
//! (`UBLK_F_USER_COPY`): with the driver's zero copy nobody could check them before they are
//! used. That also means one buffer a queue instead of one a tag.
//!
//! The device belongs to nobody's process. When its server dies, its requests wait in the kernel,
//! those in flight among them; whoever calls [`serve`] next takes them over.
//!
//! Our own control code and not the crate `libublk`: what is needed of the interface is ten
//! commands and five small structures. `libublk` 0.4 brings an executor of its own into every
//! queue thread and allocates a future for each tag, its next release changes that executor, and
//! recovery under a supervisor is not among what it does.
//!
//! The threads are not pinned to their queues' CPUs: there a reader that has more to ask for would be
//! interrupted by each of its own requests, instead of having them served beside it
//! (`docs/performance.md` has the figures).
//!
//! Invariants (held by `tests/ublk.rs` and `tests/ublk_kill.rs`):
//! - A tag is in the kernel (fetching), in a thread's hands, or with one task.
//! - The descriptor of `/dev/ublkcN` stays open until the last task has ended, so a successor
//!   cannot take over while a task may still write into a request.
//! - Stopping leaves requests that are not answered to a successor.

mod control;
mod mailbox;
mod queue;
mod uapi;

use std::{
    fs::{File, OpenOptions},
    io,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst},
        mpsc,
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use burgeon_block::{BLOCK_SIZE, BlockDevice, Error, ErrorKind, Result};
use tokio::{
    runtime::Handle,
    sync::{Semaphore, watch},
};

pub use self::control::{Control, Device, Queues, block_path, numbers};
use self::{mailbox::Mailbox, queue::Queue};
use crate::{
    fuse::READ_MAX,
    server::{End, ServeOptions},
    slots::Slots,
    sys::failed,
};

/// How long cancelled tasks may take to notice.
const CANCEL_MAX: Duration = Duration::from_secs(10);

/// A running server of one device. Dropping it leaves the device to a successor.
pub struct Server {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

/// What the threads and tasks of all queues share: nothing here is locked to answer a hit.
struct Shared {
    /// `/dev/ublkcN`: the bytes of requests go through it.
    file: File,
    slots: Arc<Slots>,
    mailboxes: Vec<Arc<Mailbox>>,
    runtime: Handle,
    miss_blocks: Semaphore,
    stopping: AtomicBool,
    /// Queues whose thread runs.
    running: AtomicUsize,
    /// Requests with tasks.
    parked: AtomicUsize,
    cancel: watch::Sender<bool>,
    end: watch::Sender<Option<End>>,
}

/// Serves `device` as the ublk device `number`, and counts in `slots`. A device that was added is
/// then to be started ([`Control::start`]); one whose server has died goes on by itself.
///
/// Returns when all queues are served. Waits, at most half a minute, for the end of a server that
/// is just dying. `Invalid` if the sizes differ.
pub fn serve<D: BlockDevice>(
    number: u32,
    slots: Arc<Slots>,
    device: Arc<D>,
    options: &ServeOptions,
) -> Result<Server> {
    let mut control = Control::open()?;
    let Some(description) = control.device(number)? else {
        let what = format!("there is no ublk device {number}");
        return Err(Error::new(ErrorKind::NotFound, what));
    };
    let (size, expected) = (device.size(), control.size(number)?);
    if size != expected {
        return Err(Error::new(
            ErrorKind::Invalid,
            format!("the ublk device {number} has {expected} bytes, and not the {size} to serve"),
        ));
    }
    if description.started {
        control.begin_recovery(number)?;
    }
    let mailboxes = (0..description.queues).map(|_| Mailbox::new(description.depth).map(Arc::new));
    let mailboxes = mailboxes.collect::<io::Result<Vec<_>>>();
    let shared = Arc::new(Shared {
        file: open(number)?,
        slots,
        mailboxes: mailboxes.map_err(|e| failed("cannot make an eventfd", e))?,
        runtime: options.runtime.clone(),
        miss_blocks: Semaphore::new(options.miss_bytes_max.max(READ_MAX) / BLOCK_SIZE as usize),
        stopping: AtomicBool::new(false),
        running: AtomicUsize::new(usize::from(description.queues)),
        parked: AtomicUsize::new(0),
        cancel: watch::Sender::new(false),
        end: watch::Sender::new(None),
    });
    let mut server = Server { shared: shared.clone(), threads: Vec::new() };
    let (ready, becomes_ready) = mpsc::channel();
    for number_of_queue in 0..description.queues {
        let (shared, device, ready) = (shared.clone(), device.clone(), ready.clone());
        let thread = thread::Builder::new()
            .name("ublk-queue".into())
            .spawn(move || {
                match Queue::new(number_of_queue, description.depth, shared.clone(), device) {
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
        control.end_recovery(number)?;
    }
    Ok(server)
}

/// Opens `/dev/ublkcN`, which one process at a time can have.
fn open(number: u32) -> Result<File> {
    let path = control::char_path(number);
    let file = OpenOptions::new().read(true).write(true).open(&path);
    file.map_err(|e| failed(format!("cannot open {}", path.display()), e))
}

impl Server {
    /// Waits until serving is over, for whichever reason: [`End::Unmounted`] when the device was
    /// stopped.
    pub fn ended(&self) -> impl Future<Output = End> + Send + 'static {
        let mut end = self.shared.end.subscribe();
        async move {
            match end.wait_for(Option::is_some).await {
                Ok(end) => end.unwrap_or(End::Stopped),
                Err(_) => End::Stopped,
            }
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.shared.end(End::Stopped);
        self.shared.stopping.store(true, SeqCst);
        self.shared.mailboxes.iter().for_each(|mailbox| mailbox.ring());
        self.shared.cancel.send_replace(true);
        for thread in self.threads.drain(..) {
            // A panic outside the device's code would be a bug here; its requests are reissued.
            let _ = thread.join();
        }
        let deadline = Instant::now() + CANCEL_MAX;
        while self.shared.parked.load(SeqCst) > 0 && Instant::now() < deadline {
            thread::sleep(Duration::from_millis(1));
        }
    }
}

impl Shared {
    fn is_stopping(&self) -> bool {
        self.stopping.load(SeqCst)
    }

    /// Serving is over; the first reason counts.
    fn end(&self, end: End) {
        self.end.send_if_modified(|now| {
            let first = now.is_none();
            now.get_or_insert(end);
            first
        });
    }

    /// A queue's thread leaves: with the last one serving is over, and when one fails.
    fn queue_ended(&self, end: End) {
        let last = self.running.fetch_sub(1, SeqCst) == 1;
        if last || matches!(end, End::Failed(_)) {
            self.end(end);
        }
    }

    /// Resolves when tasks are to leave their requests to a successor.
    async fn cancelled(&self) {
        // The sender lives in `self`, so this is no error.
        let _ = self.cancel.subscribe().wait_for(|cancelled| *cancelled).await;
    }
}
