//! The threads that read requests: one permanent thread a mount, and helper threads while requests
//! come.
//!
//! ```text
//!   idle ── a request ─► the first thread takes a buffer ── another ─► it starts a helper, and each
//!    ▲                                                                 helper, at its first request,
//!    │                                                                 the next one
//!    └── no read for IDLE: all are interrupted; helpers end, the first thread frees its buffer
//! ```
//!
//! An idle mount has one thread in the kernel's read of `/dev/fuse`, and no buffer. In a busy mount
//! all threads wait there, so starting them on demand costs a hit nothing. Interrupting a read
//! loses no request (`stop.rs`).
//!
//! Invariants (held by `tests/transport.rs`):
//! - The helpers of all mounts that share a [`Helpers`] are never more than it has.
//! - A thread is signalled only while its handle is in the list; it removes the handle before it
//!   ends.

use std::{
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{
            AtomicBool, AtomicUsize,
            Ordering::{AcqRel, Acquire, Relaxed},
        },
    },
    thread::{self, JoinHandle},
    time::Duration,
};

use burgeon_block::{Counters, Pages};

use super::stop;
use crate::engine::LEN_MAX;

/// A mount is idle after this time without a read, at the latest after twice the time.
pub(super) const IDLE: Duration = Duration::from_secs(1);

/// Buffers that are kept for the next mount that becomes active; more are freed.
const SPARE_BUFFERS: usize = 2;

/// The helper threads that all mounts share. Clones share them, too.
#[derive(Clone)]
pub struct Helpers(Arc<Shared>);

struct Shared {
    left: AtomicUsize,
    /// A mount asked for one when none was left.
    wanted: AtomicBool,
    spare: Mutex<Vec<Pages>>,
}

impl Helpers {
    /// At most `most` threads at once.
    pub fn new(most: usize) -> Self {
        let spare = Mutex::new(Vec::with_capacity(SPARE_BUFFERS));
        let (left, wanted) = (AtomicUsize::new(most), AtomicBool::new(false));
        Self(Arc::new(Shared { left, wanted, spare }))
    }

    fn take(&self) -> bool {
        let taken = self.0.left.fetch_update(AcqRel, Acquire, |left| left.checked_sub(1)).is_ok();
        if !taken {
            self.0.wanted.store(true, Relaxed);
        }
        taken
    }

    fn give_back(&self) {
        self.0.left.fetch_add(1, AcqRel);
    }

    fn spare(&self) -> MutexGuard<'_, Vec<Pages>> {
        self.0.spare.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A buffer for one request at a time; `None` when there is no memory.
    pub(super) fn buffer(&self) -> Option<Pages> {
        let spare = self.spare().pop();
        spare.or_else(|| Pages::zeroed(LEN_MAX as u64))
    }

    pub(super) fn keep_buffer(&self, buffer: Pages) {
        let mut spare = self.spare();
        if spare.len() < SPARE_BUFFERS {
            spare.push(buffer);
        }
    }
}

/// The reader threads of one mount.
pub(super) struct Readers {
    pub(super) helpers: Helpers,
    /// Helpers of this mount at once.
    most: usize,
    /// The thread that gets the next request starts a helper first.
    helper_wanted: AtomicBool,
    /// There are no reads: helpers end, and the first thread frees its buffer.
    idle: AtomicBool,
    /// Helpers that another mount needs more.
    surplus: AtomicUsize,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    threads: Vec<JoinHandle<()>>,
    helping: usize,
    /// The first thread has its buffer.
    first_active: bool,
    /// A task checks whether the mount is idle.
    watched: bool,
    /// Reads that had been answered at the last check.
    answered: u64,
}

/// The next step of the task that checks a mount.
#[derive(PartialEq, Eq)]
pub(super) enum Watch {
    On,
    End,
}

impl Readers {
    /// `most`: threads at once, the first among them.
    pub(super) fn new(helpers: Helpers, most: usize) -> Self {
        Self {
            helpers,
            most: most - 1,
            helper_wanted: AtomicBool::new(false),
            idle: AtomicBool::new(false),
            surplus: AtomicUsize::new(0),
            state: Mutex::default(),
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // No code that can panic runs under this lock.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds the permanent thread.
    pub(super) fn add_first(&self, thread: JoinHandle<()>) {
        self.state().threads.push(thread);
    }

    /// The first thread has taken its buffer: the next request is worth a helper. True if the
    /// caller has to start a task that calls [`Self::check`] every [`IDLE`].
    #[must_use]
    pub(super) fn activate(&self) -> bool {
        self.idle.store(false, Relaxed);
        self.helper_wanted.store(self.most > 0, Relaxed);
        let mut state = self.state();
        state.first_active = true;
        !std::mem::replace(&mut state.watched, true)
    }

    /// True if the caller, which has a request, is to start a helper. One load of memory that is
    /// hardly ever written to.
    pub(super) fn take_wish(&self) -> bool {
        self.helper_wanted.load(Relaxed) && self.helper_wanted.swap(false, Relaxed)
    }

    /// Starts a helper, if there may be one more: `start` starts its thread. If that fails, the
    /// other threads go on alone.
    pub(super) fn start_helper(
        &self,
        is_stopping: impl Fn() -> bool,
        start: impl FnOnce() -> std::io::Result<JoinHandle<()>>,
    ) {
        let mut state = self.state();
        // Under the lock, so that `end` finds all threads in the list.
        if is_stopping() || state.helping >= self.most || !self.helpers.take() {
            return;
        }
        match start() {
            Ok(thread) => {
                state.helping += 1;
                state.threads.push(thread);
            }
            Err(_) => self.helpers.give_back(),
        }
    }

    /// A helper has got its first request: there is work for one more.
    pub(super) fn helper_works(&self) {
        self.helper_wanted.store(true, Relaxed);
    }

    /// True if a helper that was interrupted is to end.
    pub(super) fn ends_helper(&self) -> bool {
        self.idle.load(Relaxed) || self.is_surplus()
    }

    /// True if a busy helper is to end, because another mount needs one more.
    pub(super) fn is_surplus(&self) -> bool {
        self.surplus.load(Relaxed) > 0
            && self.surplus.fetch_update(AcqRel, Acquire, |count| count.checked_sub(1)).is_ok()
    }

    /// A helper ends; it owns no slot any more.
    pub(super) fn leave(&self) {
        let me = thread::current().id();
        let mut state = self.state();
        state.helping -= 1;
        // `end` has taken it out if it waits for this thread.
        state.threads.retain(|thread| thread.thread().id() != me);
        drop(state);
        self.helpers.give_back();
    }

    /// The first thread was interrupted: whether it is to free its buffer.
    pub(super) fn deactivate(&self) -> bool {
        let idle = self.idle.load(Relaxed);
        if idle {
            self.helper_wanted.store(false, Relaxed);
            self.state().first_active = false;
        }
        idle
    }

    /// Checks whether the mount was read from since the last check, and interrupts its threads if
    /// it was not. A signal before the thread's read has begun has no effect: the next check sends
    /// another.
    pub(super) fn check(&self, counters: &Counters) -> Watch {
        let answered = counters.hits.get() + counters.misses.get() + counters.failed_reads.get();
        let mut state = self.state();
        let is_idle = std::mem::replace(&mut state.answered, answered) == answered;
        self.idle.store(is_idle, Relaxed);
        if is_idle {
            state.threads.iter().for_each(stop::interrupt);
        } else if state.helping < self.most {
            // Another mount may have given helpers back.
            self.helper_wanted.store(true, Relaxed);
        }
        if !is_idle && state.helping > 1 && self.helpers.0.wanted.swap(false, Relaxed) {
            self.surplus.store(1, Relaxed);
        }
        let ends = is_idle && state.helping == 0 && !state.first_active;
        state.watched = !ends;
        if ends { Watch::End } else { Watch::On }
    }

    /// Ends all threads, which must have been told to stop, and waits for them.
    pub(super) fn end(&self) {
        let threads = std::mem::take(&mut self.state().threads);
        for thread in threads {
            stop::interrupt_until_finished(&thread);
            // A panic outside the device's code would be a bug here; its slot is replayed.
            let _ = thread.join();
        }
    }
}
