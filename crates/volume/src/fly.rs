//! The tasks of flights: from the source to the readers, and into the cache.
//!
//! ```text
//!   fly            one chunk:  fetch, as often tried as the limits allow ─┐ (and begins to read ahead)
//!   fly_together   a row of chunks that lie one after another: one        ├─► land: readers, cache
//!                  request ─► cut ─► verify each ─────────────────────────┘
//!                               └── what is wrong or missing flies on alone
//! ```

use std::sync::Arc;

use burgeon_block::{BlockSource, ByteRange, LocalFile, Pages, Result};
use burgeon_image::Chunk;
use bytes::Bytes;
use tokio::time::Instant;

use crate::{
    Volume,
    brought::Brought,
    fetch::Tries,
    flights::{Cost, Flight, Landed, Seats},
};

/// What a row of chunks is brought for, to tell whether it was of use.
#[derive(Clone, Copy)]
pub(crate) enum Purpose {
    /// A profile names them.
    Profile,
    /// They lie behind what a reader reads.
    Ahead,
}

/// A chunk that has a flight, and room for it.
pub(crate) struct Boarded {
    pub(crate) index: u32,
    pub(crate) flight: Flight,
    pub(crate) seats: Seats,
}

impl<S, F> Volume<S, F>
where
    S: BlockSource + 'static,
    F: LocalFile + 'static,
{
    /// A flight from take-off to the cache: readers are answered as soon as the bytes are good.
    pub(crate) async fn fly(
        self: Arc<Self>,
        index: u32,
        flight: Flight,
        seats: Seats,
        deadline: Instant,
    ) {
        let mut cost = Cost::default();
        // What nobody waits for has a seat of the background.
        let own = seats.background.is_none().then(|| self.readers.fetch());
        if own.is_some() {
            self.read_ahead(index);
        }
        let chunk = self.map.chunk(index);
        let fetched = self.source.bytes_to_fetch(self.map.object(chunk.object), chunk.stored);
        let begun = Instant::now();
        let result = self.fetch(index, deadline, &mut cost).await;
        if result.is_ok() && fetched > 0 && cost.source_errors + cost.source_corrupt_chunks == 0 {
            self.way.note(fetched, begun.elapsed());
        }
        drop(own);
        self.land(index, flight, seats, result, cost).await;
    }

    /// Readers get what came, then the cache.
    async fn land(
        self: Arc<Self>,
        index: u32,
        flight: Flight,
        seats: Seats,
        result: Result<Pages>,
        cost: Cost,
    ) {
        let good = result.is_ok();
        let landed = Arc::new(Landed::new(result, cost, Arc::clone(&self.background), seats));
        flight.land(Arc::clone(&landed));
        if good {
            self.keep(index, landed).await;
        }
        // Only now, with the presence bits set, may another flight of this chunk start.
        drop(flight);
    }

    async fn keep(self: &Arc<Self>, index: u32, landed: Arc<Landed>) {
        if !self.cache.may_write() {
            self.cache.uncached_chunks.add(1);
            return;
        }
        let this = Arc::clone(self);
        let write = move || {
            let range = this.map.chunk(index).range;
            let written = landed.bytes().and_then(|bytes| this.cache.write(range, bytes));
            if written.is_err() {
                this.cache.uncached_chunks.add(1);
            }
        };
        // An error means that the runtime ends: the bytes are then fetched again one day.
        let _ = self.writers.run(write).await;
    }

    /// The first chunk of a row, and where the row is stored; `None` for an empty one.
    fn stored_row(&self, row: &[Boarded]) -> Option<(Chunk, ByteRange)> {
        let [first, last] = [row.first()?, row.last()?].map(|it| self.map.chunk(it.index));
        Some((first, ByteRange::new(first.stored.start(), last.stored.end())?))
    }

    /// Bytes of a row that the source has to fetch.
    pub(crate) fn bytes_to_fetch(&self, row: &[Boarded]) -> u64 {
        let bytes = |(first, range): (Chunk, _)| {
            self.source.bytes_to_fetch(self.map.object(first.object), range)
        };
        self.stored_row(row).map_or(0, bytes)
    }

    /// Fetches a row of chunks of one object, the stored bytes of each behind those of the one
    /// before, with one request; whether that gave all of it. Returns when it was answered: what
    /// it takes to verify and keep the chunks is behind that, in `landing`.
    pub(crate) async fn fly_together(
        self: Arc<Self>,
        row: Vec<Boarded>,
        purpose: Purpose,
        landing: Landing,
    ) -> bool {
        let Some((chunk, range)) = self.stored_row(&row) else { return true };
        let mut cost = Cost::default();
        let deadline = self.retrying.deadline(Instant::now());
        let tries = Tries::new(&self.limits, deadline);
        let answer = self.ask(&chunk, range, &tries, &mut cost).await.inspect_err(|error| {
            self.retrying.note(error);
            self.background.source_errors.add(cost.source_errors);
        });
        let start = chunk.stored.start();
        for boarded in row {
            let stored = self.map.chunk(boarded.index).stored;
            let at = (stored.start() - start) as usize;
            let bytes = answer.as_ref().ok().map(|all| all.slice(at..at + stored.len() as usize));
            let (this, landing) = (Arc::clone(&self), landing.clone());
            tokio::spawn(async move {
                this.arrive(boarded, purpose, bytes, deadline).await;
                drop(landing);
            });
        }
        answer.is_ok()
    }

    /// One chunk of a row; it flies on alone if its bytes did not come, or are wrong.
    async fn arrive(
        self: Arc<Self>,
        boarded: Boarded,
        purpose: Purpose,
        stored: Option<Bytes>,
        deadline: Instant,
    ) {
        let Boarded { index, flight, seats } = boarded;
        let range = self.map.chunk(index).range;
        let Some(stored) = stored else {
            return self.fly(index, flight, seats, deadline).await;
        };
        let mut cost = Cost { fetched_bytes: stored.len() as u64, ..Cost::default() };
        let result = match self.unpack(index, stored, &mut cost).await {
            Ok(pages) => {
                (cost.fetches, cost.materialised_bytes) = (1, range.len());
                Ok(pages)
            }
            Err(error) => {
                self.retrying.note(&error);
                self.fetch(index, deadline, &mut cost).await
            }
        };
        if result.is_ok() {
            let brought = match purpose {
                Purpose::Profile => &self.brought,
                Purpose::Ahead => &self.ahead,
            };
            brought.get_or_init(|| Brought::new(self.map.data_range())).note(range);
        }
        self.land(index, flight, seats, result, cost).await;
    }
}

/// Held by chunks that are not in the cache yet, or known not to get there.
pub(crate) type Landing = tokio::sync::mpsc::Sender<()>;
