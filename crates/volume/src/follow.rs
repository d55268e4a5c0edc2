//! Following a profile: brings what a start will read, in that order, before it is read.
//!
//! ```text
//!   chunks in order ─► rows: the next one, and others of the profile that lie beside it in its
//!                      object ─► as many requests as the source takes (pace.rs) ─► flights
//! ```
//!
//! Priorities: readers fetch what they wait for themselves, from seats that are theirs; while they
//! do, half as much is in flight for the profile: it is what they will read next. Fill begins after the profile. A profile
//! is a hint: what cannot be had is left to the readers, and a source that is away ends it.

use std::{
    collections::{HashSet, VecDeque},
    sync::Arc,
};

use burgeon_block::{BlockSource, ByteRange, LocalFile};
use tokio::{
    sync::{mpsc, watch},
    task::JoinHandle,
    time::Instant,
};

use crate::{
    Budget, Volume,
    brought::Brought,
    flights::{Background, Seats},
    fly::{Boarded, Purpose},
    limits::FLIGHTS_MAX,
    pace::{Pace, Sent},
};

/// So many requests in a row without an answer, and the source is away.
const FAILURES_MAX: u32 = 4;

/// How following a profile stands.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FollowState {
    /// It brings data.
    Running,
    /// All of it is here, or came and could not be kept.
    Done,
    /// It was told to stop, or the source or the cache takes no more.
    Stopped,
    /// The mount's fetch limit does not allow the rest.
    OverLimit,
}

/// How far it is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FollowProgress {
    /// What it does.
    pub state: FollowState,
    /// Bytes of the chunks that the profile touches, uncompressed.
    pub total_bytes: u64,
    /// Of these, bytes that need not be asked for any more.
    pub done_bytes: u64,
    /// Bytes that were asked for and came, as stored.
    pub fetched_bytes: u64,
    /// Requests that it took.
    pub requests: u64,
}

/// A profile that is followed. Dropping it stops it; what is under way still lands.
pub struct Follow {
    progress: watch::Receiver<FollowProgress>,
    task: JoinHandle<()>,
}

impl Follow {
    /// How far it is.
    pub fn progress(&self) -> FollowProgress {
        *self.progress.borrow()
    }

    /// Waits until it has ended, cache writes included.
    pub fn ended(&self) -> impl Future<Output = FollowProgress> + Send + 'static {
        let mut progress = self.progress.clone();
        async move {
            // An error means that the task is gone: what it said last stands.
            let _ = progress.wait_for(|now| now.state != FollowState::Running).await;
            *progress.borrow()
        }
    }
}

impl Drop for Follow {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// What became of a request.
struct Answer {
    sent: Sent,
    /// Bytes that were asked for, and those of them that the source had to fetch.
    bytes: u64,
    fetched: u64,
    /// When they came, if they did.
    at: Option<Instant>,
}

/// Chunks to be brought.
struct Wanted {
    order: VecDeque<u32>,
    left: HashSet<u32>,
}

impl<S, F> Volume<S, F>
where
    S: BlockSource + 'static,
    F: LocalFile + 'static,
{
    /// Starts to bring the chunks of `ranges`, in this order, as far as the `budget` goes. Ranges that are no lazy data are passed over.
    pub fn follow(
        self: &Arc<Self>,
        ranges: impl Iterator<Item = ByteRange>,
        budget: Option<Arc<Budget>>,
    ) -> Follow {
        self.brought.get_or_init(|| Brought::new(self.map.data_range()));
        let mut wanted = Wanted { order: VecDeque::new(), left: HashSet::new() };
        let mut total_bytes = 0;
        for range in ranges.filter_map(|range| range.intersect(self.map.data_range())) {
            let mut at = range.start();
            while let Some(index) = self.map.chunk_at(at).filter(|_| at < range.end()) {
                let chunk = self.map.chunk(index).range;
                at = chunk.end();
                if !self.is_through(index) && wanted.left.insert(index) {
                    wanted.order.push_back(index);
                    total_bytes += chunk.len();
                }
            }
        }
        let (progress, watcher) = watch::channel(FollowProgress {
            state: FollowState::Running,
            total_bytes,
            done_bytes: 0,
            fetched_bytes: 0,
            requests: 0,
        });
        let volume = Arc::clone(self);
        let task = tokio::spawn(async move {
            let state = volume.follow_all(wanted, budget, &progress).await;
            progress.send_modify(|now| now.state = state);
        });
        Follow { progress: watcher, task }
    }

    async fn follow_all(
        self: &Arc<Self>,
        mut wanted: Wanted,
        budget: Option<Arc<Budget>>,
        progress: &watch::Sender<FollowProgress>,
    ) -> FollowState {
        let mut pace = Pace::new();
        let (answer, mut answers) = mpsc::channel::<Answer>(FLIGHTS_MAX);
        // Nothing is ever sent: it closes when everything has landed.
        let (landing, mut landed) = mpsc::channel(1);
        let (mut requests, mut bytes, mut fetching, mut failures) = (0, 0, 0, 0);
        let mut state = FollowState::Done;
        let before = budget.as_ref().map_or(0, |budget| budget.spent());
        loop {
            // What came a moment ago may not have been charged yet.
            let brought = before.saturating_add(progress.borrow().fetched_bytes);
            let over = budget
                .as_ref()
                .is_some_and(|budget| budget.limit() <= budget.spent().max(brought) + bytes);
            if over {
                let done = self.pass_over_local(&mut wanted);
                progress.send_modify(|now| now.done_bytes += done);
                if !wanted.order.is_empty() {
                    state = FollowState::OverLimit;
                    wanted.order.clear();
                }
            }
            if failures == FAILURES_MAX || !self.cache.may_write() {
                state = FollowState::Stopped;
                wanted.order.clear();
            }
            if wanted.order.is_empty() && requests == 0 {
                break;
            }
            // Half of the way is theirs while readers fetch what has not been brought yet.
            let share = if self.readers.fetching() > 0 { 2 } else { 1 };
            let full =
                wanted.order.is_empty() || (requests > 0 && fetching >= pace.window() / share);
            let answered = if full { answers.recv().await } else { answers.try_recv().ok() };
            if let Some(Answer { sent, bytes: len, fetched, at }) = answered {
                (requests, bytes, fetching) = (requests - 1, bytes - len, fetching - fetched);
                failures = if at.is_some() { 0 } else { failures + 1 };
                if let Some(at) = at {
                    pace.answered(&sent, at);
                    progress.send_modify(|now| now.fetched_bytes += len);
                }
                continue;
            }
            let (row, done) = self.board_row(&mut wanted, pace.request(), budget.as_ref()).await;
            let len = row.iter().map(|boarded| self.map.chunk(boarded.index).stored.len()).sum();
            progress.send_modify(|now| {
                now.done_bytes += done;
                now.requests += u64::from(!row.is_empty());
            });
            if row.is_empty() {
                continue;
            }
            let fetched = self.bytes_to_fetch(&row);
            (requests, bytes, fetching) = (requests + 1, bytes + len, fetching + fetched);
            let sent = pace.sent(fetched, Instant::now());
            let (volume, answer, landing) = (Arc::clone(self), answer.clone(), landing.clone());
            tokio::spawn(async move {
                let good = volume.fly_together(row, Purpose::Profile, landing).await;
                let at = good.then(Instant::now);
                // Nobody listens any more when following was stopped.
                let _ = answer.send(Answer { sent, bytes: len, fetched, at }).await;
            });
        }
        drop(landing);
        landed.recv().await;
        state
    }

    /// The next chunk that is not here, and what is wanted beside it, up to `len_max` stored
    /// bytes, with flights of their own; and the bytes of all chunks that were taken off the
    /// list. Empty when nothing is left that is neither here nor on its way.
    async fn board_row(
        self: &Arc<Self>,
        wanted: &mut Wanted,
        len_max: u64,
        payer: Option<&Arc<Budget>>,
    ) -> (Vec<Boarded>, u64) {
        let of_background = |seat| Background { _seat: seat, payer: payer.cloned() };
        let mut done = 0;
        while let Some(first) = wanted.order.front().copied() {
            let here = self.cache.has(self.map.chunk(first).range);
            if here || !wanted.left.contains(&first) {
                wanted.order.pop_front();
                done +=
                    if wanted.left.remove(&first) { self.map.chunk(first).range.len() } else { 0 };
                continue;
            }
            let background = self.background_seats.take().await;
            let Some(seat) = self.seats.take().await else { break };
            wanted.order.pop_front();
            wanted.left.remove(&first);
            done += self.map.chunk(first).range.len();
            let background = background.map(of_background);
            let seats = Seats { _flight: seat, background };
            let Some(boarded) = self.board_absent(first, seats) else { continue };
            let mut row = VecDeque::from([boarded]);
            let mut len = self.map.chunk(first).stored.len();
            let (mut low, mut high) = (first, first);
            loop {
                let next = high.checked_add(1).filter(|next| self.adjoins(high, *next, wanted));
                let before = low.checked_sub(1).filter(|before| self.adjoins(*before, low, wanted));
                let Some(index) = next.or(before) else { break };
                let more = self.map.chunk(index).stored.len();
                if len + more > len_max {
                    break;
                }
                let Some(background) = self.background_seats.try_take() else { break };
                let Some(seat) = self.seats.try_take() else { break };
                let background = Some(of_background(background));
                let seats = Seats { _flight: seat, background };
                let Some(boarded) = self.board_absent(index, seats) else { break };
                wanted.left.remove(&index);
                done += self.map.chunk(index).range.len();
                len += more;
                if index > high {
                    high = index;
                    row.push_back(boarded);
                } else {
                    low = index;
                    row.push_front(boarded);
                }
            }
            return (row.into(), done);
        }
        (Vec::new(), done)
    }

    /// Takes what is here off the list: its bytes.
    fn pass_over_local(&self, wanted: &mut Wanted) -> u64 {
        let Wanted { order, left } = wanted;
        let mut done = 0;
        order.retain(|index| {
            let chunk = self.map.chunk(*index).range;
            let absent = left.contains(index) && !self.cache.has(chunk);
            done += if !absent && left.remove(index) { chunk.len() } else { 0 };
            absent
        });
        done
    }

    /// Whether `second`, a chunk that may not be there, lies right behind `first` in its object,
    /// and whichever of them is not taken yet is wanted.
    fn adjoins(&self, first: u32, second: u32, wanted: &Wanted) -> bool {
        if second >= self.map.chunk_count() {
            return false;
        }
        let (before, after) = (self.map.chunk(first), self.map.chunk(second));
        (wanted.left.contains(&first) || wanted.left.contains(&second))
            && before.object == after.object
            && before.stored.end() == after.stored.start()
    }

    /// A flight of a chunk that is neither here nor on its way.
    pub(crate) fn board_absent(&self, index: u32, seats: Seats) -> Option<Boarded> {
        let mut table = self.flights.lock();
        if table.join(index.into()).is_some() || self.cache.has(self.map.chunk(index).range) {
            return None;
        }
        let (flight, _) = table.insert(index.into());
        Some(Boarded { index, flight, seats })
    }
}
