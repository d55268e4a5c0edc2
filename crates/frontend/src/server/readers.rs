//! The threads that read requests: one permanent thread a mount, and helper threads while requests
//! come.
//!
//! ```text
//!   idle ── a request ─► the first thread takes a buffer ── another ─► it starts a helper, and each
//!    ▲                                                                 helper, at its first request,
//!    │                                                                 the next one
//!    └── no read for IDLE: all are interrupted; helpers end, the first thread frees its buffer
//!
//!   all threads wait for a disk ─► one more helper, up to WAITING_MAX of them
//! ```
//!
//! A thread reads a place of a local file itself, so a cache on a disk would be asked by as few
//! threads as there are processors. Such a disk answers many reads at once.
//!
//! An idle mount has one thread in the kernel's read of `/dev/fuse`, and no buffer. In a busy mount
//! all threads wait there, so starting them on demand costs a hit nothing. Interrupting a read
//! loses no request (`stop.rs`).
//!
//! Invariants (held by `tests/transport.rs`):
//! - The helpers of all mounts that share a [`Helpers`] are never more than it has, and
//!   [`WAITING_SHARED`] for those that wait.
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

/// Helpers of one mount beyond its others, while all of its threads wait for a disk: with two
/// processors, eight gave the most reads of 4 KiB at depths of 16 and 64.
const WAITING_MAX: usize = 8;

/// Such helpers of all mounts together.
const WAITING_SHARED: usize = 32;

/// Buffers that are kept for the next mount that becomes active; more are freed.
const SPARE_BUFFERS: usize = 2;

/// The helper threads that all mounts share. Clones share them, too.
#[derive(Clone)]
pub struct Helpers(Arc<Shared>);

struct Shared {
    left: AtomicUsize,
    /// Of those beyond, for threads that wait.
    waiting_left: AtomicUsize,
    /// A mount asked for one when none was left.
    wanted: AtomicBool,
    spare: Mutex<Vec<Pages>>,
}

impl Helpers {
    /// At most `most` threads at once.
    pub fn new(most: usize) -> Self {
        let spare = Mutex::new(Vec::with_capacity(SPARE_BUFFERS));
        let (left, wanted) = (AtomicUsize::new(most), AtomicBool::new(false));
        let waiting_left = AtomicUsize::new(WAITING_SHARED);
        Self(Arc::new(Shared { left, waiting_left, wanted, spare }))
    }

    fn take_waiting(&self) -> bool {
        let left = &self.0.waiting_left;
        left.fetch_update(AcqRel, Acquire, |left| left.checked_sub(1)).is_ok()
    }

    fn give_waiting_back(&self) {
        self.0.waiting_left.fetch_add(1, AcqRel);
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
    /// A helper is about to end for that.
    taken_for_others: AtomicBool,
    /// Threads that wait for a disk, and all threads.
    waiting: AtomicUsize,
    running: AtomicUsize,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    threads: Vec<JoinHandle<()>>,
    helping: usize,
    /// Of these, the helpers beyond, for threads that wait.
    beyond: usize,
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
            taken_for_others: AtomicBool::new(false),
            waiting: AtomicUsize::new(0),
            running: AtomicUsize::new(1),
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
            Ok(thread) => self.started(&mut state, thread),
            Err(_) => self.helpers.give_back(),
        }
    }

    fn started(&self, state: &mut State, thread: JoinHandle<()>) {
        state.helping += 1;
        state.threads.push(thread);
        self.running.fetch_add(1, Relaxed);
    }

    /// Calls `read`, which waits for a disk. If all other threads of the mount wait, too, `start`
    /// starts the thread of one more helper before.
    pub(super) fn wait_for_disk<T>(
        &self,
        is_stopping: impl Fn() -> bool,
        start: impl FnOnce() -> std::io::Result<JoinHandle<()>>,
        read: impl FnOnce() -> T,
    ) -> T {
        let waiting = self.waiting.fetch_add(1, Relaxed) + 1;
        if waiting >= self.running.load(Relaxed) {
            self.start_helper_beyond(is_stopping, start);
        }
        let read = read();
        self.waiting.fetch_sub(1, Relaxed);
        read
    }

    #[cold]
    fn start_helper_beyond(
        &self,
        is_stopping: impl Fn() -> bool,
        start: impl FnOnce() -> std::io::Result<JoinHandle<()>>,
    ) {
        let mut state = self.state();
        let is_most = state.beyond >= WAITING_MAX;
        if is_stopping() || is_most || !self.helpers.take_waiting() {
            return;
        }
        match start() {
            Ok(thread) => {
                state.beyond += 1;
                self.started(&mut state, thread);
            }
            Err(_) => self.helpers.give_waiting_back(),
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
        let is_surplus = self.surplus.load(Relaxed) > 0
            && self.surplus.fetch_update(AcqRel, Acquire, |count| count.checked_sub(1)).is_ok();
        if is_surplus {
            self.taken_for_others.store(true, Relaxed);
        }
        is_surplus
    }

    /// A helper ends; it owns no slot any more.
    pub(super) fn leave(&self) {
        let me = thread::current().id();
        let mut state = self.state();
        state.helping -= 1;
        self.running.fetch_sub(1, Relaxed);
        // `end` has taken it out if it waits for this thread.
        state.threads.retain(|thread| thread.thread().id() != me);
        // A thread that ends in favour of another mount gives its place back.
        let is_for_others = self.taken_for_others.swap(false, Relaxed);
        let has_usual = state.helping + 1 > state.beyond;
        let is_beyond = state.beyond > 0 && !(is_for_others && has_usual);
        state.beyond -= usize::from(is_beyond);
        drop(state);
        match is_beyond {
            true => self.helpers.give_waiting_back(),
            false => self.helpers.give_back(),
        }
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

#[cfg(test)]
mod tests {
    use std::{
        sync::{Arc, Barrier},
        thread,
    };

    use super::{Helpers, Readers, WAITING_MAX};

    #[test]
    fn a_mount_whose_threads_all_wait_gets_more_up_to_its_bound() {
        let helpers = Helpers::new(1);
        let readers = Arc::new(Readers::new(helpers.clone(), 2));
        let beyond = |readers: &Readers| readers.state().beyond;
        let wait = |readers: &Readers, meanwhile: &dyn Fn()| {
            readers.wait_for_disk(|| false, || Ok(thread::spawn(|| ())), meanwhile);
        };
        // The first thread alone: it waits, so there is one more, which does not.
        wait(&readers, &|| assert_eq!(beyond(&readers), 1));
        wait(&readers, &|| assert_eq!(beyond(&readers), 1));
        // As many wait as there may be threads, and some more.
        let waiting = WAITING_MAX + 4;
        let (all, over) = (Barrier::new(waiting + 1), Barrier::new(waiting + 1));
        thread::scope(|scope| {
            for _ in 0..waiting {
                scope.spawn(|| {
                    wait(&readers, &|| {
                        all.wait();
                        over.wait();
                    });
                });
            }
            all.wait();
            assert_eq!(beyond(&readers), WAITING_MAX);
            over.wait();
        });
        for _ in 0..WAITING_MAX {
            readers.leave();
        }
        assert_eq!((beyond(&readers), readers.state().helping), (0, 0));
        // The usual helpers are still to be had, and no more than these.
        assert!(helpers.take() && !helpers.take());
        wait(&readers, &|| assert_eq!(beyond(&readers), 1));
    }
}
