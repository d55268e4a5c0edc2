//! Profile prefetch: fetches the chunks that the start of a program will read, in that order,
//! before it reads them.
//!
//! ```text
//!   chunks in order ─► runs: the next one, and others of the profile that lie beside it in its
//!                      object ─► as many requests as the path takes (request_window.rs)
//! ```
//!
//! While readers fetch, half as much is in flight: they will read that data next. Fill begins
//! after the profile. A source that is away ends the prefetch, and the chunks are left to the
//! readers. The tests are in `tests/profile.rs`.

use std::{
    collections::{HashSet, VecDeque},
    sync::Arc,
};

use burgeon_block::{BlockSource, ByteRange, LocalFile};
use burgeon_cache::Why;
use tokio::{
    sync::{mpsc, watch},
    task::JoinHandle,
    time::Instant,
};

use super::{prefetched::Purpose, request_window::RequestWindow};
use crate::{
    Budget, Volume,
    fetch::{
        path::Sent,
        permits::{BackgroundPermit, Permits, RunPermits},
        run::RunChunk,
    },
    limits::FETCHES_MAX,
};

/// So many requests one after another without an answer, and the source is away.
const FAILURES_MAX: u32 = 4;

/// The state of a profile prefetch.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ProfileState {
    /// It fetches.
    Running,
    /// Every chunk is resident, or was fetched and could not be kept.
    Done,
    /// It was stopped, or the source is away, or the cache takes no more.
    Stopped,
    /// The mount's fetch limit does not allow the rest.
    OverLimit,
}

/// The progress of a profile prefetch.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ProfileProgress {
    /// Its state.
    pub state: ProfileState,
    /// Bytes of the chunks that the profile touches, uncompressed.
    pub total_bytes: u64,
    /// Of these, bytes that need not be fetched any more.
    pub done_bytes: u64,
    /// Fetched bytes, as stored.
    pub fetched_bytes: u64,
    /// Requests so far.
    pub requests: u64,
}

/// A running profile prefetch. Dropping it stops it; fetches in flight still end.
pub struct ProfilePrefetch {
    progress: watch::Receiver<ProfileProgress>,
    task: JoinHandle<()>,
}

impl ProfilePrefetch {
    /// Its progress.
    pub fn progress(&self) -> ProfileProgress {
        *self.progress.borrow()
    }

    /// Waits until it has ended, cache writes included.
    pub fn ended(&self) -> impl Future<Output = ProfileProgress> + Send + 'static {
        let mut progress = self.progress.clone();
        async move {
            // An error means that the task is gone: its last progress stands.
            let _ = progress.wait_for(|now| now.state != ProfileState::Running).await;
            *progress.borrow()
        }
    }
}

impl Drop for ProfilePrefetch {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// The end of a request.
struct Answer {
    sent: Sent,
    /// Bytes that were asked for, and those of them that the source had to fetch.
    bytes: u64,
    to_fetch: u64,
    good: bool,
}

/// Chunks that are still to be fetched.
struct Remaining {
    order: VecDeque<u32>,
    left: HashSet<u32>,
}

impl<S, F> Volume<S, F>
where
    S: BlockSource + 'static,
    F: LocalFile + 'static,
{
    /// Starts to fetch the chunks of `ranges`, in this order, as far as the `budget` goes. Ranges
    /// that are no lazy data are passed over.
    pub fn prefetch_profile(
        self: &Arc<Self>,
        ranges: impl Iterator<Item = ByteRange>,
        budget: Option<Arc<Budget>>,
    ) -> ProfilePrefetch {
        self.background_work.prefetched(Purpose::Profile);
        let mut remaining = Remaining { order: VecDeque::new(), left: HashSet::new() };
        let mut total_bytes = 0;
        for range in ranges.filter_map(|range| range.intersect(self.map.data_range())) {
            let mut at = range.start();
            while let Some(index) = self.map.chunk_at(at).filter(|_| at < range.end()) {
                let chunk = self.map.chunk(index).range;
                at = chunk.end();
                if !self.is_through(index) && remaining.left.insert(index) {
                    remaining.order.push_back(index);
                    total_bytes += chunk.len();
                }
            }
        }
        let (progress, watcher) = watch::channel(ProfileProgress {
            state: ProfileState::Running,
            total_bytes,
            done_bytes: 0,
            fetched_bytes: 0,
            requests: 0,
        });
        let volume = Arc::clone(self);
        let task = tokio::spawn(async move {
            let state = volume.prefetch_all(remaining, budget, &progress).await;
            progress.send_modify(|now| now.state = state);
        });
        ProfilePrefetch { progress: watcher, task }
    }

    async fn prefetch_all(
        self: &Arc<Self>,
        mut remaining: Remaining,
        budget: Option<Arc<Budget>>,
        progress: &watch::Sender<ProfileProgress>,
    ) -> ProfileState {
        let mut window = RequestWindow::new();
        let (answer, mut answers) = mpsc::channel::<Answer>(FETCHES_MAX);
        // Nothing is ever sent: it closes when every chunk is kept, or known not to be.
        let (ending, mut all_ended) = mpsc::channel(1);
        let (mut requests, mut bytes, mut to_fetch, mut failures) = (0, 0, 0, 0);
        let mut state = ProfileState::Done;
        let before = budget.as_ref().map_or(0, |budget| budget.spent());
        loop {
            // Bytes that have just come may not have been charged yet.
            let fetched = before.saturating_add(progress.borrow().fetched_bytes);
            let over = budget
                .as_ref()
                .is_some_and(|budget| budget.limit() <= budget.spent().max(fetched) + bytes);
            if over {
                let done = self.pass_over_resident(&mut remaining);
                progress.send_modify(|now| now.done_bytes += done);
                if !remaining.order.is_empty() {
                    state = ProfileState::OverLimit;
                    remaining.order.clear();
                }
            }
            let may_keep = |index| self.may_keep(index, Why::Prefetch);
            let next = remaining.order.front().copied();
            if failures == FAILURES_MAX || !next.is_none_or(may_keep) {
                state = ProfileState::Stopped;
                remaining.order.clear();
            }
            if remaining.order.is_empty() && requests == 0 {
                break;
            }
            let share = if self.background_work.is_fetching_for_readers() { 2 } else { 1 };
            let full =
                remaining.order.is_empty() || (requests > 0 && to_fetch >= window.bytes() / share);
            let answered = if full { answers.recv().await } else { answers.try_recv().ok() };
            if let Some(Answer { sent, bytes: len, to_fetch: of_these, good }) = answered {
                (requests, bytes, to_fetch) = (requests - 1, bytes - len, to_fetch - of_these);
                failures = if good { 0 } else { failures + 1 };
                if good {
                    window.answered(&sent, &self.engine.path.now());
                    progress.send_modify(|now| now.fetched_bytes += len);
                }
                continue;
            }
            let (run, done) =
                self.next_run(&mut remaining, window.request(), budget.as_ref()).await;
            let len = run.iter().map(|chunk| self.map.chunk(chunk.index).stored.len()).sum();
            progress.send_modify(|now| {
                now.done_bytes += done;
                now.requests += u64::from(!run.is_empty());
            });
            if run.is_empty() {
                continue;
            }
            let of_these = self.bytes_to_fetch(&run);
            (requests, bytes, to_fetch) = (requests + 1, bytes + len, to_fetch + of_these);
            let sent = self.engine.path.sent(of_these, Instant::now());
            let (volume, answer, ending) = (Arc::clone(self), answer.clone(), ending.clone());
            tokio::spawn(async move {
                let good = volume.fetch_run(run, Purpose::Profile, ending).await;
                // Nobody listens any more after the prefetch was stopped.
                let _ = answer.send(Answer { sent, bytes: len, to_fetch: of_these, good }).await;
            });
        }
        drop(ending);
        all_ended.recv().await;
        state
    }

    /// Begins the fetch of the next chunk that is neither resident nor in flight, and of wanted
    /// ones beside it, up to `len_max` stored bytes; and the bytes of all chunks that were taken
    /// off the list. The run is empty when nothing is left to fetch.
    async fn next_run(
        self: &Arc<Self>,
        remaining: &mut Remaining,
        len_max: u64,
        payer: Option<&Arc<Budget>>,
    ) -> (Vec<RunChunk>, u64) {
        let mut done = 0;
        while let Some(first) = remaining.order.front().copied() {
            let range = self.map.chunk(first).range;
            if self.residency.has(first) || !remaining.left.contains(&first) {
                remaining.order.pop_front();
                done += if remaining.left.remove(&first) { range.len() } else { 0 };
                continue;
            }
            let background = self.engine.background_permits.take().await;
            let Some(fetch) = self.engine.permits.take().await else { break };
            remaining.order.pop_front();
            remaining.left.remove(&first);
            done += range.len();
            let background = background.map(|permit| BackgroundPermit::new(permit, payer.cloned()));
            let permits = Permits::new(fetch, background);
            let run_permits = RunPermits::of(&permits, range.len());
            let Some(begun) = self.begin_new(first, permits) else { continue };
            let first = RunChunk { index: first, begun };
            let (run, more) = self.extend_run(first, run_permits, remaining, (len_max, payer));
            return (run, done + more);
        }
        (Vec::new(), done)
    }

    /// A run that begins with one chunk, and the bytes of those that were added to it.
    fn extend_run(
        &self,
        first: RunChunk,
        mut run_permits: RunPermits,
        remaining: &mut Remaining,
        (len_max, payer): (u64, Option<&Arc<Budget>>),
    ) -> (Vec<RunChunk>, u64) {
        let (mut low, mut high) = (first.index, first.index);
        let mut len = self.map.chunk(first.index).stored.len();
        let (mut run, mut done) = (VecDeque::from([first]), 0);
        loop {
            let next = high.checked_add(1).filter(|next| self.adjoins(high, *next, remaining));
            let before = low.checked_sub(1).filter(|before| self.adjoins(*before, low, remaining));
            let Some(index) = next.or(before) else { break };
            let chunk = self.map.chunk(index);
            if len + chunk.stored.len() > len_max {
                break;
            }
            let more = || self.engine.try_background_permits(payer.cloned());
            let Some(permits) = run_permits.take(chunk.range.len(), more) else { break };
            let Some(begun) = self.begin_new(index, permits) else { break };
            remaining.left.remove(&index);
            done += chunk.range.len();
            len += chunk.stored.len();
            if index > high {
                high = index;
                run.push_back(RunChunk { index, begun });
            } else {
                low = index;
                run.push_front(RunChunk { index, begun });
            }
        }
        (run.into(), done)
    }

    /// Takes resident chunks off the list: their bytes.
    fn pass_over_resident(&self, remaining: &mut Remaining) -> u64 {
        let Remaining { order, left } = remaining;
        let mut done = 0;
        order.retain(|index| {
            let chunk = self.map.chunk(*index).range;
            let absent = left.contains(index) && !self.residency.has(*index);
            done += if !absent && left.remove(index) { chunk.len() } else { 0 };
            absent
        });
        done
    }

    /// True if `second`, a chunk that may not be there, lies right behind `first` in its object,
    /// and whichever of them is not taken yet is wanted.
    fn adjoins(&self, first: u32, second: u32, remaining: &Remaining) -> bool {
        if second >= self.map.chunk_count() {
            return false;
        }
        let (before, after) = (self.map.chunk(first), self.map.chunk(second));
        (remaining.left.contains(&first) || remaining.left.contains(&second))
            && before.object == after.object
            && before.stored.end() == after.stored.start()
    }
}
