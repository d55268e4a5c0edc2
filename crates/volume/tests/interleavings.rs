//! The single-flight table and the table of places in many orders of their steps, tried by shuttle.
//!
//! The modules are compiled here once more, over shuttle's locks and atomics. An operation of
//! tokio's channels counts as one step.

#![allow(clippy::unwrap_used, unreachable_pub, dead_code)]

#[path = "../src/background/block_bits.rs"]
mod block_bits;
#[path = "../src/budget.rs"]
mod budget;
#[path = "../src/fetch/in_flight.rs"]
mod in_flight;
#[path = "../src/fetch/permits.rs"]
mod permits;
#[path = "../src/residency/places.rs"]
mod places;

/// The modules find this in place of the crate's own.
mod sync {
    pub(crate) use shuttle::sync::{
        Mutex, MutexGuard,
        atomic::{AtomicBool, AtomicU64, Ordering},
    };
}

use std::sync::Arc;

use block_bits::BlockBits;
use burgeon_block::{Counters, Error, ErrorKind, Pages};
use burgeon_cache::Place;
use in_flight::{Cost, Fetched, InFlight, InFlightTable, Waiter};
use permits::{PermitPool, Permits, SharedPermits};
use places::Places;
use shuttle::{
    future,
    sync::{Mutex, atomic::AtomicU64, atomic::Ordering::SeqCst},
    thread,
};

/// Orders that are tried of each test.
const ORDERS: usize = 3000;
const CHUNK: u64 = 7;
const INDEX: u32 = 7;

/// The part of a volume that decides who fetches, with counters in place of sources and files.
struct Cell {
    table: InFlightTable,
    places: Places,
    /// The cache: the number of its last place, and 0 if the chunk is not there any more.
    last: AtomicU64,
    cached: Mutex<u64>,
    fetches: AtomicU64,
    at_once: AtomicU64,
    shared: SharedPermits,
    permits: PermitPool,
    unclaimed: Arc<Counters>,
    how: How,
}

#[derive(Clone, Copy, PartialEq)]
enum How {
    Well,
    /// The first fetch fails.
    FailFirst,
    /// An injected bug: the fetch leaves the table before the cache finds the chunk.
    LeaveEarly,
}

impl Cell {
    fn new(how: How) -> Arc<Self> {
        let shared = SharedPermits::new(8, 1);
        Arc::new(Self {
            table: InFlightTable::default(),
            places: Places::new(8),
            last: AtomicU64::new(0),
            cached: Mutex::new(0),
            fetches: AtomicU64::new(0),
            at_once: AtomicU64::new(0),
            permits: PermitPool::new(8, shared.fetches.clone()),
            shared,
            unclaimed: Arc::default(),
            how,
        })
    }

    fn admit(&self) {
        let number = self.last.fetch_add(1, SeqCst) + 1;
        *self.cached.lock().unwrap() = number;
        self.places.set(INDEX, Place::from_bits(number));
    }

    /// The chunk leaves the cache, and no place knows it.
    fn evict(&self) {
        *self.cached.lock().unwrap() = 0;
    }

    /// Reads the chunk, first at its known place; false if it is not in the cache.
    fn read(&self) -> bool {
        let known = self.places.get(INDEX).map(Place::to_bits);
        if known == Some(*self.cached.lock().unwrap()) {
            return true;
        }
        let found = Place::from_bits(*self.cached.lock().unwrap());
        self.places.set(INDEX, found);
        found.is_some_and(|place| place.to_bits() == *self.cached.lock().unwrap())
    }

    fn join_or_start(self: &Arc<Self>) -> Option<Waiter> {
        let (in_flight, waiter) = {
            let mut table = self.table.lock();
            if let Some(waiter) = table.join(CHUNK) {
                return Some(waiter);
            }
            if self.read() {
                return None;
            }
            table.insert(CHUNK)
        };
        let permits = Permits::new(self.permits.try_take().unwrap(), None);
        future::spawn(Arc::clone(self).fetch_task(in_flight, permits));
        Some(waiter)
    }

    async fn fetch_task(self: Arc<Self>, in_flight: InFlight, permits: Permits) {
        assert_eq!(self.at_once.fetch_add(1, SeqCst), 0, "two fetches of one chunk");
        future::yield_now().await;
        let first = self.fetches.fetch_add(1, SeqCst) == 0;
        let result = if first && self.how == How::FailFirst {
            Err(Error::new(ErrorKind::Unavailable, "not yet"))
        } else {
            Ok(Pages::zeroed(4096).unwrap())
        };
        let good = result.is_ok();
        let cost = Cost { fetches: 1, ..Cost::default() };
        let fetched = Fetched::new(result, cost, Arc::clone(&self.unclaimed), permits);
        in_flight.publish(Arc::new(fetched));
        self.at_once.fetch_sub(1, SeqCst);
        let in_flight = (self.how != How::LeaveEarly).then_some(in_flight);
        if good {
            future::yield_now().await;
            self.admit();
        }
        if let Some(in_flight) = in_flight {
            in_flight.end(good);
        }
    }

    /// Reads until it has the bytes; counts its misses.
    async fn serve(self: Arc<Self>, counters: Arc<Counters>) {
        loop {
            if self.read() {
                assert!(self.last.load(SeqCst) > 0, "found before it is written");
                return;
            }
            let Some(mut waiter) = self.join_or_start() else { continue };
            let fetched = waiter.fetched().await.unwrap();
            fetched.claim(&counters);
            if fetched.bytes().is_ok() {
                return;
            }
        }
    }
}

fn readers(how: How) {
    let cell = Cell::new(how);
    let counters: Arc<Counters> = Arc::default();
    let readers: Vec<_> =
        (0..3).map(|_| future::spawn(Arc::clone(&cell).serve(Arc::clone(&counters)))).collect();
    // One more takes a look and goes away.
    drop(cell.join_or_start());
    future::block_on(async {
        for reader in readers {
            reader.await.unwrap();
        }
        // Every permit is free again, in the end; or shuttle runs out of steps.
        while cell.table.len() > 0 || cell.shared.fetches.available_permits() < 8 {
            future::yield_now().await;
        }
    });
    let fetches = cell.fetches.load(SeqCst);
    assert_eq!(fetches, 1 + u64::from(how == How::FailFirst), "fetched once it could be");
    assert!(cell.read());
    assert_eq!(counters.fetches.get() + cell.unclaimed.fetches.get(), fetches, "counted once");
}

#[test]
fn one_fetch_for_all_waiters() {
    shuttle::check_random(|| readers(How::Well), ORDERS);
}

#[test]
fn a_failed_fetch_lets_the_next_one_start() {
    shuttle::check_random(|| readers(How::FailFirst), ORDERS);
}

#[test]
fn a_fetch_that_leaves_the_table_too_early_is_found() {
    let tried = std::panic::catch_unwind(|| {
        shuttle::check_random(|| readers(How::LeaveEarly), ORDERS);
    });
    assert!(tried.is_err(), "shuttle does not see that the chunk is fetched twice");
}

#[test]
fn a_dropped_fetch_leaves_nobody_waiting() {
    let check = || {
        let table = InFlightTable::default();
        let (in_flight, mut first) = table.lock().insert(CHUNK);
        let mut second = table.lock().join(CHUNK).unwrap();
        let dies = thread::spawn(move || drop(in_flight));
        let waits = thread::spawn(move || future::block_on(second.fetched()).is_err());
        assert!(future::block_on(first.fetched()).is_err());
        assert!(waits.join().unwrap());
        dies.join().unwrap();
        assert_eq!(table.len(), 0);
    };
    shuttle::check_random(check, ORDERS);
}

#[test]
fn a_waiter_for_the_end_learns_whether_the_chunk_was_kept() {
    let check = || {
        for kept in [true, false] {
            let table = InFlightTable::default();
            let (in_flight, waiter) = table.lock().insert(CHUNK);
            let ends = thread::spawn(move || in_flight.end(kept));
            assert_eq!(future::block_on(waiter.ended()), kept);
            ends.join().unwrap();
        }
    };
    shuttle::check_random(check, ORDERS);
}

#[test]
fn a_chunk_that_is_evicted_under_its_readers_is_fetched_again() {
    let check = || {
        let (cell, counters) = (Cell::new(How::Well), Arc::default());
        let readers: Vec<_> =
            (0..2).map(|_| future::spawn(Arc::clone(&cell).serve(Arc::clone(&counters)))).collect();
        let evicts = Arc::clone(&cell);
        let evictor = thread::spawn(move || evicts.evict());
        future::block_on(async {
            for reader in readers {
                reader.await.unwrap();
            }
            while cell.table.len() > 0 {
                future::yield_now().await;
            }
        });
        evictor.join().unwrap();
        let fetches = cell.fetches.load(SeqCst);
        assert!((1..=2).contains(&fetches), "once, and once more after the eviction: {fetches}");
    };
    shuttle::check_random(check, ORDERS);
}

#[test]
fn block_bits_keep_their_count() {
    let check = || {
        let bits = Arc::new(BlockBits::new(128));
        let threads: Vec<_> = [(0, 70), (60, 128)]
            .map(|(start, end)| {
                let bits = Arc::clone(&bits);
                thread::spawn(move || {
                    bits.set(start..end);
                    bits.clear(62..66);
                })
            })
            .into();
        for thread in threads {
            thread.join().unwrap();
        }
        let model = (0..128).filter(|block| bits.any(*block..*block + 1)).count() as u64;
        assert_eq!(bits.count(), model);
    };
    shuttle::check_random(check, ORDERS);
}

#[test]
fn block_bits_agree_with_a_naive_set() {
    let check = || {
        let bits = BlockBits::new(300);
        let mut model = [false; 300];
        let mut rng = testkit::Rng::new(1);
        for _ in 0..3000 {
            let (a, b) = (rng.below(301), rng.below(301));
            let (start, end) = (a.min(b), a.max(b));
            let part = &mut model[start as usize..end as usize];
            match rng.below(4) {
                0 => {
                    bits.set(start..end);
                    part.fill(true);
                }
                1 => {
                    bits.clear(start..end);
                    part.fill(false);
                }
                _ => assert_eq!(bits.any(start..end), part.iter().any(|bit| *bit)),
            }
            assert_eq!(bits.count(), model.iter().filter(|bit| **bit).count() as u64);
        }
    };
    shuttle::check_random(check, 1);
}
