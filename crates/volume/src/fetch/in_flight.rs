//! The single-flight table: one fetch for each key, shared by all that wait for it.
//!
//! ```text
//!   reader ──► join or start ── in the table? ── yes ─► Waiter ◄───┐
//!                                 │ no: insert, start the task     │ publish: the result, once
//!                                 ▼                                │
//!                               InFlight (owned by the task) ──────┘
//!                                 │ drop: leave the table, then the waiters see the end
//! ```
//!
//! A fetch stays in the table until its chunk is resident (or is known not to become so). So
//! a reader that finds neither an in-flight fetch nor resident bytes under the table's lock is the
//! first. A task that panics or is cancelled drops its [`InFlight`], too: its waiters get an
//! error, not silence. The tests are in `tests/interleavings.rs`: they try many orders of the
//! steps.

use std::{
    collections::HashMap,
    sync::{Arc, PoisonError},
};

use burgeon_block::{Counters, Error, ErrorKind, Pages, Result};
use tokio::sync::watch;

use super::permits::Permits;
use crate::sync::{AtomicBool, Mutex, MutexGuard, Ordering};

/// The cost of a fetch, for the account that pays for it.
#[derive(Clone, Copy, Default, Debug)]
pub(crate) struct Cost {
    pub(crate) fetches: u64,
    pub(crate) fetched_bytes: u64,
    pub(crate) materialised_bytes: u64,
    pub(crate) cache_corrupt_blocks: u64,
    pub(crate) source_corrupt_chunks: u64,
    pub(crate) source_errors: u64,
}

impl Cost {
    /// An answer that was counted as wrong was right: what it was compared with was wrong.
    pub(crate) fn acquit(&mut self) {
        self.source_corrupt_chunks -= 1;
        self.fetches += 1;
    }

    /// Attempts that failed.
    pub(crate) fn failed_tries(&self) -> u64 {
        self.source_errors + self.source_corrupt_chunks
    }

    pub(crate) fn add_to(&self, counters: &Counters) {
        counters.fetches.add(self.fetches);
        counters.fetched_bytes.add(self.fetched_bytes);
        counters.materialised_bytes.add(self.materialised_bytes);
        counters.cache_corrupt_blocks.add(self.cache_corrupt_blocks);
        counters.source_corrupt_chunks.add(self.source_corrupt_chunks);
        counters.source_errors.add(self.source_errors);
    }
}

/// The cost of a read that nobody shares, charged when it ends, however it ends.
pub(crate) struct Bill<'a> {
    cost: Cost,
    counters: &'a Counters,
}

impl<'a> Bill<'a> {
    pub(crate) fn to(counters: &'a Counters) -> Self {
        Self { cost: Cost::default(), counters }
    }

    pub(crate) fn cost(&mut self) -> &mut Cost {
        &mut self.cost
    }
}

impl Drop for Bill<'_> {
    fn drop(&mut self) {
        self.cost.add_to(self.counters);
    }
}

/// The outcome of a fetch. Its permits are given back when nobody holds its bytes any more.
pub(crate) struct Fetched {
    result: Result<Pages>,
    cost: Cost,
    claimed: AtomicBool,
    /// Counters of the fetches that no reader claims.
    unclaimed: Arc<Counters>,
    permits: Permits,
}

impl Fetched {
    pub(crate) fn new(
        result: Result<Pages>,
        cost: Cost,
        unclaimed: Arc<Counters>,
        permits: Permits,
    ) -> Self {
        Self { result, cost, claimed: AtomicBool::new(false), unclaimed, permits }
    }

    /// The chunk's bytes, or the error, once for each who asks.
    pub(crate) fn bytes(&self) -> Result<&[u8]> {
        match &self.result {
            Ok(pages) => Ok(pages.bytes()),
            Err(error) => Err(Error::new(error.kind(), error.to_string())),
        }
    }

    /// Attempts of it that failed.
    pub(crate) fn failed_tries(&self) -> u64 {
        self.cost.failed_tries()
    }

    /// Charges the fetch to `counters`, if nobody was charged yet.
    pub(crate) fn claim(&self, counters: &Counters) {
        if !self.claimed.swap(true, Ordering::Relaxed) {
            self.cost.add_to(counters);
        }
    }
}

impl Drop for Fetched {
    fn drop(&mut self) {
        if let (Some(payer), false) = (self.permits.payer(), self.claimed.load(Ordering::Relaxed)) {
            payer.charge(self.cost.fetched_bytes);
        }
        self.claim(&self.unclaimed);
    }
}

type Outcome = Option<Arc<Fetched>>;

/// The fetches in flight, by key.
#[derive(Clone, Default)]
pub(crate) struct InFlightTable(Arc<Mutex<Entries>>);

type Entries = HashMap<u64, Waiter>;

impl InFlightTable {
    /// The table, for a look and perhaps a [`LockedTable::insert`]; never held across an await or
    /// I/O.
    pub(crate) fn lock(&self) -> LockedTable<'_> {
        LockedTable { table: self, entries: self.guard() }
    }

    fn guard(&self) -> MutexGuard<'_, Entries> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn len(&self) -> usize {
        self.guard().len()
    }
}

/// The table under its lock.
pub(crate) struct LockedTable<'a> {
    table: &'a InFlightTable,
    entries: MutexGuard<'a, Entries>,
}

impl LockedTable<'_> {
    /// Waits with the others, if `key` is in flight.
    pub(crate) fn join(&self, key: u64) -> Option<Waiter> {
        self.entries.get(&key).cloned()
    }

    /// Begins a fetch of `key`: its task's end of it, and a waiter.
    pub(crate) fn insert(&mut self, key: u64) -> (InFlight, Waiter) {
        let ((publish, outcome), (ended, end)) = (watch::channel(None), watch::channel(false));
        let waiter = Waiter { outcome, end };
        self.entries.insert(key, waiter.clone());
        (InFlight { table: self.table.clone(), key, publish, ended }, waiter)
    }
}

/// The task's end of an in-flight fetch.
pub(crate) struct InFlight {
    table: InFlightTable,
    key: u64,
    publish: watch::Sender<Outcome>,
    ended: watch::Sender<bool>,
}

impl InFlight {
    /// Wakes all waiters; those who join from now on until the drop get the result at once.
    pub(crate) fn publish(&self, fetched: Arc<Fetched>) {
        self.publish.send_replace(Some(fetched));
    }

    /// Ends the fetch, and tells whether the chunk was `kept`.
    pub(crate) fn end(self, kept: bool) {
        self.ended.send_replace(kept);
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        self.table.guard().remove(&self.key);
    }
}

/// A reader's end of an in-flight fetch. Dropping it changes nothing for the others.
#[derive(Clone)]
pub(crate) struct Waiter {
    outcome: watch::Receiver<Outcome>,
    /// True if the chunk was kept; closes when the fetch has ended. It holds no bytes, unlike
    /// `outcome`.
    end: watch::Receiver<bool>,
}

impl Waiter {
    /// Waits until the bytes, or the error, are in memory.
    pub(crate) async fn fetched(&mut self) -> Result<Arc<Fetched>> {
        let outcome = self.outcome.wait_for(Option::is_some).await;
        let fetched = outcome.ok().and_then(|outcome| outcome.clone());
        fetched.ok_or_else(|| {
            Error::new(ErrorKind::Unavailable, "the fetch was given up; reading again starts anew")
        })
    }

    /// Waits until the fetch has ended, its cache write included, without holding its bytes;
    /// whether the chunk was kept.
    pub(crate) async fn ended(self) -> bool {
        let Self { outcome, mut end } = self;
        drop(outcome);
        // The last change is the closing: it comes with the drop of `InFlight`.
        while end.changed().await.is_ok() {}
        *end.borrow()
    }
}
