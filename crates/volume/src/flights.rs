//! The flight table: one fetch a chunk, shared by all who wait for it.
//!
//! ```text
//!   reader ──► board ── in the table? ── yes ─► Waiter ◄──────┐
//!                         │ no: insert, start the task        │ land: result, once
//!                         ▼                                   │
//!                       Flight (owned by the task) ───────────┘
//!                         │ drop: leave the table, then the waiters see the end
//! ```
//!
//! A flight stays in the table until its chunk is in the cache (or is known not to get there),
//! so who finds neither a flight nor presence bits under the table's lock is the first. A task
//! that panics or is cancelled drops its flight, too: its waiters get an error, not silence.

use std::{
    collections::HashMap,
    sync::{Arc, PoisonError},
};

use burgeon_block::{Counters, Error, ErrorKind, Pages, Result};
use tokio::sync::watch;

use crate::{
    budget::Budget,
    seats::Seat,
    sync::{AtomicBool, Mutex, MutexGuard, Ordering},
};

/// What a fetch took, for whoever accounts for it.
#[derive(Clone, Copy, Default, Debug)]
pub(crate) struct Cost {
    pub(crate) fetches: u64,
    pub(crate) fetched_bytes: u64,
    pub(crate) materialised_bytes: u64,
    pub(crate) source_corrupt_chunks: u64,
    pub(crate) source_errors: u64,
}

impl Cost {
    pub(crate) fn add_to(&self, counters: &Counters) {
        counters.fetches.add(self.fetches);
        counters.fetched_bytes.add(self.fetched_bytes);
        counters.materialised_bytes.add(self.materialised_bytes);
        counters.source_corrupt_chunks.add(self.source_corrupt_chunks);
        counters.source_errors.add(self.source_errors);
    }
}

/// The room a flight takes: given back when nobody holds its bytes any more.
pub(crate) struct Seats {
    pub(crate) _flight: Seat,
    /// For what no reader asked for.
    pub(crate) background: Option<Background>,
}

/// The room of a flight that no reader asked for, and the mount it is for, if it is for one.
pub(crate) struct Background {
    pub(crate) _seat: Seat,
    pub(crate) payer: Option<Arc<Budget>>,
}

/// The outcome of a flight.
pub(crate) struct Landed {
    result: Result<Pages>,
    cost: Cost,
    claimed: AtomicBool,
    /// Counts what no reader claims.
    background: Arc<Counters>,
    seats: Seats,
}

impl Landed {
    pub(crate) fn new(
        result: Result<Pages>,
        cost: Cost,
        background: Arc<Counters>,
        seats: Seats,
    ) -> Self {
        Self { result, cost, claimed: AtomicBool::new(false), background, seats }
    }

    /// The chunk's bytes, or the error, once for each who asks.
    pub(crate) fn bytes(&self) -> Result<&[u8]> {
        match &self.result {
            Ok(pages) => Ok(pages.bytes()),
            Err(error) => Err(Error::new(error.kind(), error.to_string())),
        }
    }

    /// Charges the fetch to `counters`, if nobody was charged yet.
    pub(crate) fn claim(&self, counters: &Counters) {
        if !self.claimed.swap(true, Ordering::Relaxed) {
            self.cost.add_to(counters);
        }
    }
}

impl Drop for Landed {
    fn drop(&mut self) {
        let payer = self.seats.background.as_ref().and_then(|background| background.payer.as_ref());
        if let (Some(payer), false) = (payer, self.claimed.load(Ordering::Relaxed)) {
            payer.charge(self.cost.fetched_bytes);
        }
        self.claim(&self.background);
    }
}

type Outcome = Option<Arc<Landed>>;

/// The flights under way, by chunk.
#[derive(Clone, Default)]
pub(crate) struct FlightTable(Arc<Mutex<Entries>>);

type Entries = HashMap<u64, Entry>;

/// What a flight shows to those who join it.
#[derive(Clone)]
struct Entry {
    outcome: watch::Receiver<Outcome>,
    /// Closes when the flight is over; holds nothing, unlike `outcome`.
    over: watch::Receiver<()>,
}

impl FlightTable {
    /// The table, for a look and perhaps a [`Self::insert`]; never held across an await or I/O.
    pub(crate) fn lock(&self) -> LockedTable<'_> {
        LockedTable { table: self, flights: self.guard() }
    }

    fn guard(&self) -> MutexGuard<'_, Entries> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn len(&self) -> usize {
        self.guard().len()
    }
}

/// The flight table under its lock.
pub(crate) struct LockedTable<'a> {
    table: &'a FlightTable,
    flights: MutexGuard<'a, Entries>,
}

impl LockedTable<'_> {
    /// Waits with the others, if `chunk` is on its way.
    pub(crate) fn join(&self, chunk: u64) -> Option<Waiter> {
        self.flights.get(&chunk).map(|entry| Waiter { entry: entry.clone() })
    }

    /// Opens a flight for `chunk`; what the task keeps and what its starter waits on.
    pub(crate) fn insert(&mut self, chunk: u64) -> (Flight, Waiter) {
        let ((landing, outcome), (ending, over)) = (watch::channel(None), watch::channel(()));
        let entry = Entry { outcome, over };
        self.flights.insert(chunk, entry.clone());
        let flight = Flight { table: self.table.clone(), chunk, landing, _ending: ending };
        (flight, Waiter { entry })
    }
}

/// The task's end of a flight.
pub(crate) struct Flight {
    table: FlightTable,
    chunk: u64,
    landing: watch::Sender<Outcome>,
    _ending: watch::Sender<()>,
}

impl Flight {
    /// Wakes everybody who waits, and everybody who joins before the flight is dropped at once.
    pub(crate) fn land(&self, landed: Arc<Landed>) {
        self.landing.send_replace(Some(landed));
    }
}

impl Drop for Flight {
    fn drop(&mut self) {
        self.table.guard().remove(&self.chunk);
    }
}

/// A reader's end of a flight. Dropping it changes nothing for the others.
pub(crate) struct Waiter {
    entry: Entry,
}

impl Waiter {
    /// Waits until the bytes, or the error, are in memory.
    pub(crate) async fn landed(&mut self) -> Result<Arc<Landed>> {
        let outcome = self.entry.outcome.wait_for(Option::is_some).await;
        let landed = outcome.ok().and_then(|outcome| outcome.clone());
        landed.ok_or_else(|| {
            Error::new(ErrorKind::Unavailable, "the fetch was given up; reading again starts anew")
        })
    }

    /// Waits until the flight is over, its cache write included, without holding its bytes.
    pub(crate) async fn settled(self) {
        let mut over = self.entry.over;
        drop(self.entry.outcome);
        // Nothing is ever sent: this ends when the flight is dropped.
        while over.changed().await.is_ok() {}
    }
}
