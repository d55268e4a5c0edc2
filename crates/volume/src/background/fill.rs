//! Fill: fetches everything, or the pinned ranges, in address order, whenever no reader waits.
//!
//! ```text
//!   chunk ──► resident? ──► a background permit ──► no reader waits (or 1 s) ──► join or start ──► kept?
//!               ▲                                                                  │ unavailable
//!               └───────────────────── after a deadline ───────────────────────────┘
//! ```
//!
//! The tests are in `tests/fill.rs`.

use std::{collections::BTreeSet, sync::Arc};

use burgeon_block::{BlockSource, ByteRange, ErrorKind, LocalFile};
use burgeon_cache::{Hold, Why};
use tokio::{
    sync::watch,
    task::{JoinHandle, JoinSet},
    time::sleep,
};

use crate::{
    Budget, Volume,
    fetch::{Joined, permits::BackgroundPermit},
};

/// The state of a fill.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FillState {
    /// It fetches, or stands back for readers, or waits for the source to come back.
    Running,
    /// Every chunk was taken; see [`FillProgress::failed_bytes`].
    Done,
    /// It was told to stop.
    Stopped,
    /// The mount's fetch limit does not allow the rest.
    OverLimit,
    /// The cache did not take everything; see [`crate::Status::cache`]. Start it again when it
    /// does.
    CacheFull,
}

/// The progress of a fill.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FillProgress {
    /// Its state.
    pub state: FillState,
    /// Bytes that are to be in the cache.
    pub total_bytes: u64,
    /// Of these, bytes that are in the cache: found there or fetched.
    pub done_bytes: u64,
    /// Of these, bytes of chunks of which the source gave wrong bytes; reading them fails, too.
    pub failed_bytes: u64,
}

/// A running fill, or one that has ended. Dropping it stops it, and lets the cache evict pinned
/// chunks; fetches in flight still end.
pub struct Fill {
    progress: watch::Receiver<FillProgress>,
    stop: watch::Sender<Option<FillState>>,
    task: JoinHandle<()>,
    /// Keeps pinned chunks in the cache.
    _hold: Option<Hold>,
}

impl Fill {
    /// Its progress.
    pub fn progress(&self) -> FillProgress {
        *self.progress.borrow()
    }

    /// Tells it to stop and returns at once.
    pub fn stop(&self) {
        self.stop.send_replace(Some(FillState::Stopped));
    }

    /// Waits until it has ended.
    pub fn ended(&self) -> impl Future<Output = FillProgress> + Send + 'static {
        let mut progress = self.progress.clone();
        async move {
            // An error means that the task is gone: its last progress stands.
            let _ = progress.wait_for(|now| now.state != FillState::Running).await;
            *progress.borrow()
        }
    }
}

impl Drop for Fill {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl<S, F> Volume<S, F>
where
    S: BlockSource + 'static,
    F: LocalFile + 'static,
{
    /// Starts to fetch everything that is not in the cache, with at most
    /// `limits.background_fetches` chunks at once, and a new one only when no reader waits (or
    /// `limits.fill_yield` has passed). While the source is unavailable it waits and tries again.
    pub fn fill(self: &Arc<Self>) -> Fill {
        self.fill_chunks(0..self.map.chunk_count(), None, Why::Fill)
    }

    /// The same for a mount, as far as its `budget` goes.
    pub fn fill_for(self: &Arc<Self>, budget: Arc<Budget>) -> Fill {
        self.fill_chunks(0..self.map.chunk_count(), Some(budget), Why::Fill)
    }

    /// The same for the chunks that hold a byte of `ranges`, in any order; the cache keeps them as
    /// long as the fill lives. It is [`FillState::CacheFull`] at once if the cache cannot keep so
    /// many. Must be called within a runtime.
    pub fn fill_ranges(self: &Arc<Self>, ranges: &[ByteRange], budget: Arc<Budget>) -> Fill {
        let data = self.map.data_range();
        let mut chunks = BTreeSet::new();
        for range in ranges.iter().filter_map(|range| range.intersect(data)) {
            let last = range.end().saturating_sub(1);
            if let (Some(first), Some(last)) =
                (self.map.chunk_at(range.start()), self.map.chunk_at(last))
            {
                chunks.extend(first..=last);
            }
        }
        chunks.retain(|index| !self.is_through(*index));
        let chunks: Vec<u32> = chunks.into_iter().collect();
        let image = &*self.limits.image;
        let refused = |error: &_| tracing::warn!(image, %error, "pinned files cannot be kept");
        let hold = self.residency.hold(&chunks).inspect_err(refused).ok();
        let Some(hold) = hold else { return self.refused_fill(&chunks) };
        let mut fill = self.fill_chunks(chunks.into_iter(), Some(budget), Why::Pin);
        fill._hold = Some(hold);
        fill
    }

    /// A fill that has ended before it began, because the cache cannot keep all of `chunks`.
    fn refused_fill(&self, chunks: &[u32]) -> Fill {
        let len = |index: &u32| self.map.chunk(*index).range.len();
        let is_here = |index: &&u32| self.residency.has_lastingly(**index);
        let (_, progress) = watch::channel(FillProgress {
            state: FillState::CacheFull,
            total_bytes: chunks.iter().map(len).sum(),
            done_bytes: chunks.iter().filter(is_here).map(len).sum(),
            failed_bytes: 0,
        });
        let (stop, _) = watch::channel(None);
        Fill { progress, stop, task: tokio::spawn(async {}), _hold: None }
    }

    fn fill_chunks(
        self: &Arc<Self>,
        chunks: impl Iterator<Item = u32> + Clone + Send + 'static,
        budget: Option<Arc<Budget>>,
        why: Why,
    ) -> Fill {
        let cacheable = chunks.clone().filter(|index| !self.is_through(*index));
        let total_bytes = cacheable.map(|index| self.map.chunk(index).range.len()).sum();
        let (progress, watcher) = watch::channel(FillProgress {
            state: FillState::Running,
            total_bytes,
            done_bytes: 0,
            failed_bytes: 0,
        });
        let (stop, mut stopped) = watch::channel(None);
        let volume = Arc::clone(self);
        let task = tokio::spawn(async move {
            let state = tokio::select! {
                biased;
                state = async { *stopped.wait_for(Option::is_some).await.ok()? } => {
                    state.unwrap_or(FillState::Stopped)
                }
                state = volume.fill_all(chunks, budget, why, &progress) => state,
            };
            progress.send_modify(|progress| progress.state = state);
        });
        Fill { progress: watcher, stop, task, _hold: None }
    }

    async fn fill_all(
        self: &Arc<Self>,
        wanted: impl Iterator<Item = u32>,
        budget: Option<Arc<Budget>>,
        why: Why,
        progress: &watch::Sender<FillProgress>,
    ) -> FillState {
        let mut chunks = JoinSet::new();
        let (mut all_kept, mut refused) = (true, false);
        let mut next = wanted.filter(|index| !self.is_through(*index));
        loop {
            while chunks.len() < self.limits.background_fetches.max(1)
                && let Some(index) = next.next()
            {
                chunks.spawn(Arc::clone(self).fill_chunk(index, budget.clone(), why));
            }
            let Some(ended) = chunks.join_next().await else { break };
            // A chunk whose task panicked is one that was not kept.
            let (index, filled) = ended.unwrap_or((0, Filled::Lost));
            let len = self.map.chunk(index).range.len();
            match filled {
                Filled::Kept => progress.send_modify(|progress| progress.done_bytes += len),
                Filled::Failed => progress.send_modify(|progress| progress.failed_bytes += len),
                Filled::Refused => refused = true,
                Filled::Lost if !self.may_keep(index, why) => return FillState::CacheFull,
                Filled::Lost => all_kept = false,
            }
        }
        match (refused, all_kept) {
            (true, _) => FillState::OverLimit,
            (false, true) => FillState::Done,
            (false, false) => FillState::CacheFull,
        }
    }

    /// Makes one chunk resident. While the source is unavailable it waits and tries again, and
    /// holds no permit meanwhile.
    async fn fill_chunk(
        self: Arc<Self>,
        index: u32,
        budget: Option<Arc<Budget>>,
        why: Why,
    ) -> (u32, Filled) {
        let may_fetch = || budget.as_ref().is_none_or(|budget| budget.may_fetch());
        let mut is_second = false;
        loop {
            if self.residency.has_lastingly(index) {
                return (index, Filled::Kept);
            }
            if !may_fetch() {
                return (index, Filled::Refused);
            }
            let permit = self.engine.background_permits.take().await;
            self.background_work.stand_back(self.limits.fill_yield).await;
            // Fetches that ended meanwhile were charged before they gave their permits back.
            if !may_fetch() {
                continue;
            }
            if !self.may_keep(index, why) {
                return (index, Filled::Lost);
            }
            let permit = permit.map(|permit| BackgroundPermit::new(permit, budget.clone()));
            let mut waiter = match self.join_or_start_in_background(index, permit, why).await {
                Joined::InFlight(waiter) => waiter,
                Joined::Resident(_) => return (index, Filled::Kept),
                Joined::NoPermit => continue,
            };
            let error = match waiter.fetched().await {
                Ok(fetched) => fetched.bytes().err(),
                Err(error) => Some(error),
            };
            match error {
                None => {
                    let kept = waiter.ended().await;
                    if kept || is_second {
                        return (index, if kept { Filled::Kept } else { Filled::Lost });
                    }
                    // Somebody may have removed the cache just then.
                    is_second = true;
                    sleep(self.limits.backoff_max).await;
                }
                Some(error) if error.kind() == ErrorKind::Unavailable => {
                    drop(waiter);
                    sleep(self.limits.deadline).await;
                }
                Some(_) => return (index, Filled::Failed),
            }
        }
    }
}

/// The end of one chunk's fill.
enum Filled {
    /// It is resident.
    Kept,
    /// The budget does not allow its fetch.
    Refused,
    /// It was fetched, or could be, but not kept.
    Lost,
    /// The source gave no right bytes.
    Failed,
}
