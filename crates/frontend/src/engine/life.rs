//! The end of serving, and the tasks that are still in work then.
//!
//! ```text
//!   serving ── stop ──► threads leave, tasks go on ── drain's limit ──► cancelled: tasks leave
//!      │                                                                   ▲ their requests
//!      └── the kernel ends the device ─────────────────────────────────────┘
//! ```

use std::{
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering::SeqCst},
    },
    time::{Duration, Instant},
};

use tokio::sync::watch;

/// Limit for cancelled tasks to end.
const CANCEL_MAX: Duration = Duration::from_secs(10);

/// Why a server ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum End {
    /// The last user of the device is gone, or the kernel's side of it was ended: clean up the
    /// mount.
    Unmounted,
    /// It was told to stop; a successor answers the unanswered requests.
    Stopped,
    /// Taking requests failed again and again with this errno: start another server.
    Failed(i32),
}

/// The end of a server, as its threads and tasks see it.
#[derive(Default)]
pub(crate) struct Life {
    stopping: AtomicBool,
    end: watch::Sender<Option<End>>,
    cancel: watch::Sender<bool>,
    tasks: Mutex<usize>,
    /// The last task has ended.
    idle: Condvar,
}

/// A task that [`Life::drain`] waits for, until this is dropped.
pub(crate) struct InWork(Arc<Life>);

impl Drop for InWork {
    fn drop(&mut self) {
        let mut tasks = self.0.tasks();
        *tasks -= 1;
        if *tasks == 0 {
            self.0.idle.notify_all();
        }
    }
}

impl Life {
    fn tasks(&self) -> MutexGuard<'_, usize> {
        // No code that can panic runs under this lock.
        self.tasks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A task begins.
    pub(super) fn enter(self: &Arc<Self>) -> InWork {
        *self.tasks() += 1;
        InWork(self.clone())
    }

    /// Serving is over; the first reason counts.
    pub(crate) fn end(&self, end: End) {
        self.end.send_if_modified(|now| {
            let first = now.is_none();
            now.get_or_insert(end);
            first
        });
    }

    /// Waits until serving is over.
    pub(crate) fn ended(&self) -> impl Future<Output = End> + Send + 'static {
        let mut end = self.end.subscribe();
        async move {
            match end.wait_for(Option::is_some).await {
                Ok(end) => end.unwrap_or(End::Stopped),
                // The server was dropped.
                Err(_) => End::Stopped,
            }
        }
    }

    /// Threads leave at their next step.
    pub(crate) fn stop(&self) {
        self.stopping.store(true, SeqCst);
    }

    pub(crate) fn is_stopping(&self) -> bool {
        self.stopping.load(SeqCst)
    }

    /// Tasks leave their requests to the transport.
    pub(crate) fn cancel(&self) {
        self.cancel.send_replace(true);
    }

    /// Resolves when tasks are to leave.
    pub(super) async fn cancelled(&self) {
        // The sender lives in `self`, so this is no error.
        let _ = self.cancel.subscribe().wait_for(|cancelled| *cancelled).await;
    }

    /// Waits up to `limit` for the tasks, then cancels the rest.
    pub(crate) fn drain(&self, limit: Duration) {
        if !self.wait_for_tasks(limit) {
            self.cancel();
            self.wait_for_tasks(CANCEL_MAX);
        }
    }

    fn wait_for_tasks(&self, limit: Duration) -> bool {
        let deadline = Instant::now() + limit;
        let mut tasks = self.tasks();
        while *tasks > 0 {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            let waited = self.idle.wait_timeout(tasks, left);
            tasks = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        true
    }
}
