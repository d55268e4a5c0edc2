use std::{
    io::IoSlice,
    os::fd::OwnedFd,
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use tokio::sync::watch;
use zerocopy::IntoBytes;

use crate::{
    fuse::{Operation, OutHeader, small_payload},
    slots::{SLOT_COUNT, Slots},
};

/// How long cancelled tasks may take to notice.
const CANCEL_MAX: Duration = Duration::from_secs(10);

/// Why a server ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum End {
    /// The last user of the file is gone, or the connection was aborted: clean up the mount.
    Unmounted,
    /// It was told to stop; unanswered requests wait in the slots.
    Stopped,
    /// Reading requests failed again and again with this errno: start another server.
    Failed(i32),
}

/// The part of a server that does not depend on its device: descriptor, slots, who owns which.
pub(super) struct Control {
    pub(super) fuse: OwnedFd,
    pub(super) slots: Arc<Slots>,
    stopping: AtomicBool,
    owners: Mutex<Owners>,
    /// A slot was freed, a task ended, or it is time to stop.
    changed: Condvar,
    end: watch::Sender<Option<End>>,
    cancel: watch::Sender<bool>,
}

/// Which slots nobody owns. All its vectors have their final capacity from the start.
struct Owners {
    replay: Vec<u32>,
    free: Vec<u32>,
    parked: usize,
}

impl Control {
    pub(super) fn new(fuse: OwnedFd, slots: Arc<Slots>) -> Self {
        let mut owners = Owners {
            replay: Vec::with_capacity(SLOT_COUNT as usize),
            free: Vec::with_capacity(SLOT_COUNT as usize),
            parked: 0,
        };
        for slot in (0..SLOT_COUNT).rev() {
            match slots.is_unanswered(slot) {
                true => owners.replay.push(slot),
                false => owners.free.push(slot),
            }
        }
        Self {
            fuse,
            slots,
            stopping: AtomicBool::new(false),
            owners: Mutex::new(owners),
            changed: Condvar::new(),
            end: watch::Sender::new(None),
            cancel: watch::Sender::new(false),
        }
    }

    fn owners(&self) -> MutexGuard<'_, Owners> {
        // No code that can panic runs under this lock.
        self.owners.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A slot that a predecessor left unanswered; the caller owns it.
    pub(super) fn next_replay(&self) -> Option<u32> {
        if self.is_stopping() { None } else { self.owners().replay.pop() }
    }

    /// An empty slot; waits for one. `None` when stopping.
    pub(super) fn take_free(&self) -> Option<u32> {
        let mut owners = self.owners();
        loop {
            if self.is_stopping() {
                return None;
            }
            if let Some(slot) = owners.free.pop() {
                return Some(slot);
            }
            owners = self.changed.wait(owners).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Gives an empty slot back.
    pub(super) fn free(&self, slot: u32) {
        self.owners().free.push(slot);
        self.changed.notify_one();
    }

    /// Hands a slot from a thread to a task.
    pub(super) fn park(self: &Arc<Self>, slot: u32, unique: u64) -> Parked {
        self.owners().parked += 1;
        Parked { control: self.clone(), slot, unique, answered: false }
    }

    pub(super) fn is_stopping(&self) -> bool {
        self.stopping.load(Relaxed)
    }

    pub(super) fn request_stop(&self) {
        self.end(End::Stopped);
    }

    /// Serving is over; the first reason counts. Threads leave at their next step.
    pub(super) fn end(&self, end: End) {
        self.end.send_if_modified(|now| {
            let first = now.is_none();
            now.get_or_insert(end);
            first
        });
        {
            // Under the lock, so that nobody looks at the flag just before and waits just after.
            let _owners = self.owners();
            self.stopping.store(true, Relaxed);
        }
        self.changed.notify_all();
        if end != End::Stopped {
            self.cancel.send_replace(true);
        }
    }

    pub(super) fn ended(&self) -> impl Future<Output = End> + Send + 'static {
        let mut end = self.end.subscribe();
        async move {
            match end.wait_for(Option::is_some).await {
                Ok(end) => end.unwrap_or(End::Stopped),
                // The server was dropped.
                Err(_) => End::Stopped,
            }
        }
    }

    /// Resolves when tasks are to leave their requests to a successor.
    pub(super) async fn cancelled(&self) {
        let mut cancel = self.cancel.subscribe();
        // The sender lives in `self`, so this is no error.
        let _ = cancel.wait_for(|cancelled| *cancelled).await;
    }

    /// Waits up to `limit` for the tasks, then cancels the rest.
    pub(super) fn drain(&self, limit: Duration) {
        if !self.wait_for_tasks(limit) {
            self.cancel.send_replace(true);
            self.wait_for_tasks(CANCEL_MAX);
        }
    }

    fn wait_for_tasks(&self, limit: Duration) -> bool {
        let deadline = Instant::now() + limit;
        let mut owners = self.owners();
        while owners.parked > 0 {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            owners =
                self.changed.wait_timeout(owners, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        true
    }

    pub(super) fn reply(&self, unique: u64, payload: &[u8]) {
        let header = OutHeader::answer(unique, payload.len());
        self.send(&[IoSlice::new(header.as_bytes()), IoSlice::new(payload)]);
    }

    pub(super) fn reply_error(&self, unique: u64, errno: i32) {
        self.send(&[IoSlice::new(OutHeader::error(unique, errno).as_bytes())]);
    }

    /// Answers a read with an error, and counts that.
    pub(super) fn fail(&self, unique: u64, errno: i32) {
        self.slots.counters().failed_reads.add(1);
        self.reply_error(unique, errno);
    }

    pub(super) fn reply_small(&self, unique: u64, operation: Operation, size: u64) {
        self.reply(unique, small_payload(operation, size, &mut [0; 104]));
    }

    /// A reply is taken whole or refused, and refused only if nobody waits for it any more: the
    /// asker was killed, the connection is gone, or a predecessor answered.
    fn send(&self, parts: &[IoSlice<'_>]) {
        let _ = rustix::io::retry_on_intr(|| rustix::io::writev(&self.fuse, parts));
    }
}

/// A slot that belongs to a task. Dropped without [`Parked::answered`], its request stays for a
/// successor; unless the task panicked, for then a successor would, too: it gets EIO.
pub(super) struct Parked {
    control: Arc<Control>,
    slot: u32,
    unique: u64,
    answered: bool,
}

impl Parked {
    pub(super) fn answered(mut self) {
        self.answered = true;
    }
}

impl Drop for Parked {
    fn drop(&mut self) {
        let control = &self.control;
        if !self.answered && std::thread::panicking() {
            control.fail(self.unique, libc::EIO);
            self.answered = true;
        }
        let mut owners = control.owners();
        owners.parked -= 1;
        if self.answered {
            control.slots.clear(self.slot);
            owners.free.push(self.slot);
        }
        drop(owners);
        control.changed.notify_all();
    }
}
