//! Reads, evictions and admissions in many orders of their steps, tried by shuttle.
//!
//! Slots and index are compiled here once more, over shuttle's locks and atomics.

#![allow(clippy::unwrap_used, unreachable_pub, dead_code)]

#[path = "../src/index.rs"]
mod index;
#[path = "../src/slots.rs"]
mod slots;

/// The modules find this in place of the crate's own.
mod sync {
    pub(crate) use shuttle::sync::{
        Mutex, MutexGuard,
        atomic::{AtomicU32, AtomicU64, Ordering},
    };

    pub(crate) const SEGMENT: usize = 64;
}

use std::{ops::Range, sync::Arc};

use burgeon_cache::{ChunkKey, Place};
use index::KeyIndex;
use shuttle::{
    sync::{Mutex, atomic::AtomicU64, atomic::Ordering::SeqCst},
    thread,
};
use slots::{About, Chunk, Location, Slots};

/// Orders that are tried of each test.
const ORDERS: usize = 1500;

#[derive(Clone, Copy, PartialEq)]
enum How {
    Well,
    /// An injected bug: the chunk is found before it is written.
    FoundEarly,
}

struct Cell {
    slots: Slots,
    index: KeyIndex,
    /// The content of each block of the arena: the number of a chunk, or 0.
    arena: Vec<AtomicU64>,
    /// The next block, as the store's lock guards it.
    next: Mutex<u32>,
    how: How,
}

fn key(n: u64) -> ChunkKey {
    ChunkKey::from([n as u8; 16])
}

impl Cell {
    fn new(how: How) -> Arc<Self> {
        let arena = (0..8).map(|_| AtomicU64::new(0)).collect();
        Arc::new(Self {
            slots: Slots::default(),
            index: KeyIndex::new(7),
            arena,
            next: Mutex::new(0),
            how,
        })
    }

    /// All chunks take slot 0, one after another.
    fn admit(&self, n: u64) -> Option<Place> {
        let block = {
            let mut next = self.next.lock().unwrap();
            *next += 1;
            *next - 1
        };
        let write = || self.arena[block as usize].store(n, SeqCst);
        if self.how != How::FoundEarly {
            write();
        }
        let location = Location { arena: 0, block };
        let place = {
            let _admin = self.next.lock().unwrap();
            let chunk = Chunk { key: key(n), location, about: About::new(1, 0) };
            let place = self.slots.fill(0, &chunk);
            self.index.insert(&key(n), 0, &self.slots).unwrap();
            place
        };
        if self.how == How::FoundEarly {
            write();
        }
        place
    }

    fn evict(&self) {
        let freed = {
            let _admin = self.next.lock().unwrap();
            let Some(chunk) = self.slots.chunk(0) else { return };
            assert!(self.index.remove(&chunk.key, 0, &self.slots));
            self.slots.vacate(0);
            chunk.location
        };
        self.arena[freed.block as usize].store(0, SeqCst);
    }

    /// The bytes at the place, if it is not stale.
    fn read(&self, place: Place) -> Option<u64> {
        let (location, _) = self.slots.resolve(place)?;
        Some(self.arena[location.block as usize].load(SeqCst))
    }

    fn find(&self, n: u64) -> Option<Place> {
        let slot = self.index.find(&key(n), &self.slots)?;
        let place = self.slots.place(slot)?;
        (self.slots.key(slot)? == key(n)).then_some(place)
    }
}

fn find_while_admitted(how: How) {
    shuttle::check_random(
        move || {
            let cell = Cell::new(how);
            let admits = {
                let cell = cell.clone();
                thread::spawn(move || cell.admit(1))
            };
            for _ in 0..8 {
                if let Some(place) = cell.find(1) {
                    assert_eq!(cell.read(place), Some(1), "found before it was written");
                }
            }
            admits.join().unwrap();
            assert_eq!(cell.read(cell.find(1).unwrap()), Some(1));
        },
        ORDERS,
    );
}

#[test]
fn a_chunk_is_found_after_it_was_written() {
    find_while_admitted(How::Well);
}

#[test]
#[should_panic(expected = "found before it was written")]
fn shuttle_finds_a_chunk_that_is_found_early() {
    find_while_admitted(How::FoundEarly);
}

/// Looks three times: the place `first` of chunk 1, and those of `chunks`, give their own chunk,
/// zeros, or nothing.
fn look_at(cell: &Cell, first: Place, chunks: Range<u64>) {
    for _ in 0..3 {
        let read = cell.read(first);
        assert!(matches!(read, None | Some(0 | 1)), "{read:?}");
        for n in chunks.clone() {
            if let Some(place) = cell.find(n) {
                let read = cell.read(place);
                assert!(read.is_none_or(|read| read == 0 || read == n), "{n}: {read:?}");
            }
        }
    }
}

#[test]
fn a_place_reads_its_chunk_or_zeros_or_nothing() {
    shuttle::check_random(
        || {
            let cell = Cell::new(How::Well);
            let first = cell.admit(1).unwrap();
            let changes = {
                let cell = cell.clone();
                thread::spawn(move || {
                    cell.evict();
                    cell.admit(2).unwrap();
                    cell.evict();
                    cell.admit(3).unwrap();
                })
            };
            look_at(&cell, first, 1..4);
            changes.join().unwrap();
            assert_eq!(cell.read(first), None, "a stale place");
            assert_eq!(cell.read(cell.find(3).unwrap()), Some(3));
        },
        ORDERS,
    );
}

/// The lock of the store orders an eviction and an admission that come at once; readers take none.
#[test]
fn a_reader_beside_an_eviction_and_an_admission_gets_its_chunk_or_none() {
    shuttle::check_random(
        || {
            let cell = Cell::new(How::Well);
            let first = cell.admit(1).unwrap();
            let evicts = {
                let cell = cell.clone();
                thread::spawn(move || cell.evict())
            };
            let admits = {
                let cell = cell.clone();
                thread::spawn(move || {
                    // The slot is given again once it is vacant.
                    for _ in 0..4 {
                        if cell.slots.chunk(0).is_none() {
                            return cell.admit(2).is_some();
                        }
                        thread::yield_now();
                    }
                    false
                })
            };
            look_at(&cell, first, 1..3);
            evicts.join().unwrap();
            assert_eq!(cell.read(first), None, "a stale place");
            if admits.join().unwrap() {
                assert_eq!(cell.read(cell.find(2).unwrap()), Some(2));
            }
        },
        ORDERS,
    );
}
