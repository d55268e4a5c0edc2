//! One task per mount: jobs of one mount run one after the other, those of different mounts
//! concurrently.
//!
//! ```text
//!   add(mount, job) ─► the mount has no task ──► the caller runs one: job, …, None: it ends
//!                   └► it has one ─────────────► the job waits in its queue
//! ```
//!
//! Invariants (held by `tests/interleavings.rs`):
//! - A mount has at most one task. It exists exactly while the mount has a queue.
//! - Jobs of a mount run in the order in which they were added, and none is lost.
//!
//! A task is a thread that ends with its queue, so an idle mount has none. The queue needs no bound
//! of its own: the supervisor adds a job on behalf of a waiting client, and bounds its clients.

use std::{
    collections::{HashMap, VecDeque},
    hash::Hash,
    sync::PoisonError,
    time::{Duration, Instant},
};

use crate::sync::{Condvar, Mutex, MutexGuard};

/// The queues of all mounts that have a task.
pub(super) struct Tasks<K, J> {
    queues: Mutex<HashMap<K, VecDeque<J>>>,
    /// Notified when a task has ended.
    ended: Condvar,
}

impl<K, J> Default for Tasks<K, J> {
    fn default() -> Self {
        Self { queues: Mutex::new(HashMap::new()), ended: Condvar::new() }
    }
}

impl<K: Copy + Eq + Hash, J> Tasks<K, J> {
    /// Adds a job. True if the mount has no task: then the caller must run one, which takes its
    /// jobs from [`Self::next`] until there is none.
    #[must_use]
    pub(super) fn add(&self, mount: K, job: J) -> bool {
        let mut queues = self.queues();
        let has_task = queues.contains_key(&mount);
        queues.entry(mount).or_default().push_back(job);
        !has_task
    }

    /// The next job of the mount's task; `None` ends the task.
    pub(super) fn next(&self, mount: K) -> Option<J> {
        let mut queues = self.queues();
        let next = queues.get_mut(&mount).and_then(VecDeque::pop_front);
        if next.is_none() {
            queues.remove(&mount);
            self.ended.notify_all();
        }
        next
    }

    /// Waits until no mount has a task; returns those that still have one after `limit`.
    pub(super) fn wait_until_idle(&self, limit: Duration) -> Vec<K> {
        let deadline = Instant::now() + limit;
        let mut queues = self.queues();
        while !queues.is_empty() {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            let waited = self.ended.wait_timeout(queues, left);
            queues = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        queues.keys().copied().collect()
    }

    fn queues(&self) -> MutexGuard<'_, HashMap<K, VecDeque<J>>> {
        self.queues.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
