//! The threads that read requests: one of each mount that stays, and helpers while requests come.
//!
//! ```text
//!   idle ── a request ─► the first thread takes a buffer ── another ─► it calls a helper
//!    ▲                                                                 │ which at its first request
//!    │                                                                 ▼ has the next one called …
//!    └── no read for IDLE: interrupted; helpers leave, the first gives its buffer back
//! ```
//!
//! An idle mount has one thread in the kernel's read of `/dev/fuse`, and no buffer. A busy one has all of
//! its threads there, as if they had always been: a hit costs nothing more, and neither do two at
//! once. Interrupting a read loses no request (`stop.rs`).
//!
//! Invariants (held by `tests/transport.rs`):
//! - The helpers of all mounts that share a [`Helpers`] are never more than it has.
//! - A thread is signalled only while its handle is in the list, and it takes that out before it ends.

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

/// A mount without a read for so long, and at most twice as long, is idle.
pub(super) const IDLE: Duration = Duration::from_secs(1);

/// Buffers that are kept for mounts that begin to be read from. The others are freed.
const SPARE_BUFFERS: usize = 2;

/// Reader threads that mounts share, beyond the one that each has. A clone is the same.
#[derive(Clone)]
pub struct Helpers(Arc<Shared>);

struct Shared {
    left: AtomicUsize,
    /// Somebody wanted one when there was none left.
    wanted: AtomicBool,
    spare: Mutex<Vec<Pages>>,
}

impl Helpers {
    /// At most `most` at once.
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
    /// Whoever gets the next request calls a helper first.
    calling: AtomicBool,
    /// Nobody reads: helpers leave, and the first gives its buffer back.
    calm: AtomicBool,
    /// Helpers that are to leave to another mount.
    shed: AtomicUsize,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    threads: Vec<JoinHandle<()>>,
    helping: usize,
    /// The first thread has its buffer.
    stirred: bool,
    /// Somebody looks whether the mount is idle.
    watched: bool,
    /// Reads that had been answered when it was looked last.
    answered: u64,
}

/// What is to come after a look at the mount.
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
            calling: AtomicBool::new(false),
            calm: AtomicBool::new(false),
            shed: AtomicUsize::new(0),
            state: Mutex::default(),
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // No code that can panic runs under this lock.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds the thread that stays.
    pub(super) fn add_first(&self, thread: JoinHandle<()>) {
        self.state().threads.push(thread);
    }

    /// The first thread has taken its buffer: the next request is worth a helper. True if the caller
    /// has to see to it that [`Self::look`] is called every [`IDLE`].
    #[must_use]
    pub(super) fn stir(&self) -> bool {
        self.calm.store(false, Relaxed);
        self.calling.store(self.most > 0, Relaxed);
        let mut state = self.state();
        state.stirred = true;
        !std::mem::replace(&mut state.watched, true)
    }

    /// Whether the caller, which has a request, is to call a helper. One look at memory that is
    /// hardly ever written to.
    pub(super) fn calls(&self) -> bool {
        self.calling.load(Relaxed) && self.calling.swap(false, Relaxed)
    }

    /// Calls a helper, if there may be one more: `start` starts its thread. Without a thread, or
    /// memory for one, the others go on alone.
    pub(super) fn call(
        &self,
        is_stopping: impl Fn() -> bool,
        start: impl FnOnce() -> std::io::Result<JoinHandle<()>>,
    ) {
        let mut state = self.state();
        // Under the lock, so that whoever stops finds all threads in the list.
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

    /// A helper has got its first request: there is work for another.
    pub(super) fn helper_works(&self) {
        self.calling.store(true, Relaxed);
    }

    /// Whether a helper is to leave.
    pub(super) fn lets_go(&self) -> bool {
        self.calm.load(Relaxed) || self.is_shed()
    }

    /// The same in the middle of work: only for another mount.
    pub(super) fn is_shed(&self) -> bool {
        self.shed.load(Relaxed) > 0
            && self.shed.fetch_update(AcqRel, Acquire, |shed| shed.checked_sub(1)).is_ok()
    }

    /// A helper leaves; it owns no slot any more.
    pub(super) fn leave(&self) {
        let me = thread::current().id();
        let mut state = self.state();
        state.helping -= 1;
        // Not there if somebody waits for its end.
        state.threads.retain(|thread| thread.thread().id() != me);
        drop(state);
        self.helpers.give_back();
    }

    /// The first thread was interrupted: whether it is to give its buffer back.
    pub(super) fn first_rests(&self) -> bool {
        let rests = self.calm.load(Relaxed);
        if rests {
            self.calling.store(false, Relaxed);
            self.state().stirred = false;
        }
        rests
    }

    /// Looks whether the mount is read from, and lets its threads go if it is not. A signal that came
    /// before its thread's read had begun was in vain: the next look sends another.
    pub(super) fn look(&self, counters: &Counters) -> Watch {
        let answered = counters.hits.get() + counters.misses.get() + counters.failed_reads.get();
        let mut state = self.state();
        let is_idle = std::mem::replace(&mut state.answered, answered) == answered;
        self.calm.store(is_idle, Relaxed);
        if is_idle {
            state.threads.iter().for_each(stop::interrupt);
        } else if state.helping < self.most {
            // There may be helpers left again.
            self.calling.store(true, Relaxed);
        }
        if !is_idle && state.helping > 1 && self.helpers.0.wanted.swap(false, Relaxed) {
            self.shed.store(1, Relaxed);
        }
        let ends = is_idle && state.helping == 0 && !state.stirred;
        state.watched = !ends;
        if ends { Watch::End } else { Watch::On }
    }

    /// Ends all threads, which must be leaving, and waits for them.
    pub(super) fn end(&self) {
        let threads = std::mem::take(&mut self.state().threads);
        for thread in threads {
            stop::interrupt_until_finished(&thread);
            // A panic outside the device's code would be a bug here; its slot is replayed.
            let _ = thread.join();
        }
    }
}
