//! Forecast: evicts the chunk with the least chance of a use for each moment that it stays.
//!
//! ```text
//!   missed, touched ──► clock ──► age since the last use ─┐
//!                        │        number of uses ─────────┴──► cell ──► index of the cell
//!   census of slots      ▼                                                  │ the smallest of
//!   and ghosts ──────► hazards: uses in a cell ÷ exposure to it             ▼ a sample
//!                                                                   admit, victim
//! ```
//!
//! Chunks of one cell (age since the last use × number of uses) are alike. How soon they are used
//! is learnt from all chunks, stored or not; ghosts show the uses that eviction prevented. A
//! cell's index is the greatest ratio, over all times to give up, of the chance of a use to the
//! expected residence (Gittins, 1979; for caches: LHD, Beckmann, Chen, Cidon, NSDI 2018). Bytes
//! are what is counted, so a chunk's length cancels out. Nothing says that younger is better: on a
//! loop larger than the cache, the old chunks are the next to be used, and the new ones go.
//!
//! Time is counted in bytes used, and a *turn* is as many as the cache holds.
//!
//! The learnt hazards say nothing about a scan that has just begun. So new chunks, used once at
//! most, take the place of others only up to a fifth of the cache; beyond, they push out each
//! other. And the first use of a byte counts half, so that chunks in use do not age while others
//! are scanned.
//!
//! Invariants, held by `tests/policy.rs`:
//! - A victim is stored; a slot that was passed over is not offered again while others are left.
//! - A scan costs little of later hits.
//! - Prefetched chunks push out only those that nobody has read: what they owe is evicted first.
//! - At most 13 bytes a chunk: 8 a slot (with a sixteenth of slack), 4 a ghost.

mod ghosts;
mod hazards;
mod unread;

use self::{
    ghosts::Ghosts,
    hazards::{AGES, CLASSES, Hazards, bucket},
    unread::Unread,
};
use super::{
    ChunkPolicy, Pressure,
    rng::{Rng, mix},
};
use crate::Why;

/// Ticks in a turn.
const AGE_UNIT: u32 = 512;

/// A second use within a 128th of a turn is the same use: one read comes as many requests.
const SAME_USE: u16 = (AGE_UNIT / 128) as u16;

/// Slots drawn for each eviction, and the best of them that are kept for the next one: together
/// nearly as good as the best of all (Psounis, Prabhakar, INFOCOM 2001).
const DRAWN: usize = 16;
const KEPT: usize = 32;

/// The part of the stored chunks, one of so many, that new chunks take from others.
const NEW_SHARE: usize = 5;

/// Entries that the census visits at each event: it is through in an eighth of a turn.
const CENSUS: usize = 16;

const USES_MAX: u32 = CLASSES as u32 - 1;

/// See the module.
pub struct Forecast {
    slots: Vec<Slot>,
    stored: usize,
    /// Those of them that were used once, or not yet.
    new: usize,
    stored_units: u64,
    ghosts: Ghosts,
    hazards: Hazards,
    candidates: Vec<u32>,
    offered: Option<u32>,
    unread: Unread,
    rng: Rng,
    used_bytes: u64,
    tick_bytes: u64,
    census: Census,
}

struct Census {
    next: usize,
    population: [[f64; AGES]; CLASSES],
    began: u64,
}

/// A chunk that is stored.
///
/// ```text
///   hash: 32 bits │ last use: 16 bits │ 4 KiB units: 11 bits │ passed over: 1 │ stored: 1 │ uses: 3
/// ```
#[derive(Clone, Copy, Default)]
struct Slot {
    hash: u32,
    at: u16,
    state: u16,
}

const UNIT: u32 = 4096;
const UNITS_MAX: u32 = (1 << 11) - 1;
const PASSED: u16 = 1 << 4;
const STORED: u16 = 1 << 3;

impl Slot {
    fn new(hash: u32, at: u16, bytes: u32, uses: u32) -> Self {
        let units = bytes.div_ceil(UNIT).clamp(1, UNITS_MAX);
        Self { hash, at, state: (units as u16) << 5 | STORED | uses as u16 }
    }

    fn is_stored(self) -> bool {
        self.state & STORED != 0
    }

    fn was_passed(self) -> bool {
        self.state & PASSED != 0
    }

    fn units(self) -> u32 {
        u32::from(self.state >> 5)
    }

    fn uses(self) -> u32 {
        u32::from(self.state & 7)
    }

    fn is_new(self) -> bool {
        self.uses() <= 1
    }

    fn use_at(&mut self, now: u16) {
        self.at = now;
        self.state = self.state & !7 | more(self.uses()) as u16;
    }

    fn age(self, now: u16) -> u16 {
        now.wrapping_sub(self.at)
    }
}

fn is_unread(slots: &[Slot], slot: u32) -> bool {
    slots.get(slot as usize).is_some_and(|it| it.is_stored() && it.uses() == 0)
}

fn more(uses: u32) -> u32 {
    (uses + 1).min(USES_MAX)
}

fn hash(key_hash: u64) -> u32 {
    (mix(key_hash) >> 32) as u32
}

impl Forecast {
    /// A policy for a store of `limit` bytes, whose samples follow from `seed`.
    pub fn new(limit: u64, seed: u64) -> Self {
        Self {
            slots: Vec::new(),
            stored: 0,
            new: 0,
            stored_units: 0,
            ghosts: Ghosts::default(),
            hazards: Hazards::new(),
            candidates: Vec::new(),
            offered: None,
            unread: Unread::default(),
            rng: Rng::new(seed),
            used_bytes: 0,
            tick_bytes: (limit / u64::from(AGE_UNIT)).max(1),
            census: Census { next: 0, population: [[0.0; AGES]; CLASSES], began: 0 },
        }
    }

    /// Bytes of memory that grow with the number of chunks.
    pub fn memory(&self) -> usize {
        self.slots.capacity() * size_of::<Slot>() + self.ghosts.memory() + self.unread.memory()
    }

    /// The clock of slots, which wraps after 128 turns.
    fn now(&self) -> u16 {
        (self.used_bytes / self.tick_bytes) as u16
    }

    fn index(&self, slot: u32) -> f32 {
        let slot = self.slots[slot as usize];
        self.hazards.index(slot.uses() as usize, slot.age(self.now()))
    }

    fn is_candidate(&self, slot: u32) -> bool {
        self.slots.get(slot as usize).is_some_and(|it| it.is_stored() && !it.was_passed())
    }

    /// The candidate with the smallest index; of equals, the oldest. A new one, if there are more
    /// than their share.
    fn worst(&mut self) -> Option<u32> {
        self.draw();
        let now = self.now();
        let rank = |slot: &u32| (self.index(*slot), self.slots[*slot as usize].age(now));
        let mut ranked: Vec<_> = self.candidates.iter().map(|slot| (rank(slot), *slot)).collect();
        ranked.sort_by(|(a, _), (b, _)| a.0.total_cmp(&b.0).then(b.1.cmp(&a.1)));
        let has_share = self.new <= self.stored / NEW_SHARE;
        let may_go = |slot: u32| has_share || self.slots[slot as usize].is_new();
        let chosen = ranked.iter().map(|(_, slot)| *slot).find(|slot| may_go(*slot));
        let worst = chosen.or(ranked.first().map(|(_, slot)| *slot));
        ranked.truncate(KEPT);
        self.candidates.clear();
        self.candidates.extend(ranked.iter().map(|(_, slot)| *slot));
        worst
    }

    fn draw(&mut self) {
        let mut candidates = std::mem::take(&mut self.candidates);
        candidates.retain(|slot| self.is_candidate(*slot));
        let count = self.slots.len() as u32;
        for _ in 0..if self.stored > 0 { DRAWN } else { 0 } {
            let slot = self.rng.below(count);
            if self.is_candidate(slot) && !candidates.contains(&slot) {
                candidates.push(slot);
            }
        }
        if candidates.is_empty() && self.stored > 0 {
            candidates.extend(self.search());
        }
        self.candidates = candidates;
    }

    /// A stored slot where nearly none is left; those passed over get their turn again when no
    /// other is left.
    fn search(&mut self) -> Option<u32> {
        if let Some(slot) = (0..self.slots.len() as u32).find(|slot| self.is_candidate(*slot)) {
            return Some(slot);
        }
        self.slots.iter_mut().for_each(|it| it.state &= !PASSED);
        let from = self.offered.map_or(0, |slot| slot as usize + 1);
        let places = (from..self.slots.len()).chain(0..from.min(self.slots.len()));
        places.map(|place| place as u32).find(|slot| self.is_candidate(*slot))
    }

    /// Counts the cells of the next few slots and ghosts. After the last one, the hazards learn.
    fn visit(&mut self) {
        // No time has passed in which they could have been used: the store starts.
        if self.used_bytes == 0 {
            return;
        }
        let now = self.now();
        let mean = self.stored_units as f64 / self.stored.max(1) as f64 * f64::from(UNIT);
        for _ in 0..CENSUS {
            let next = self.census.next;
            self.census.next += 1;
            if let Some(slot) = self.slots.get_mut(next) {
                if slot.age(now) > i16::MAX as u16 {
                    slot.at = now.wrapping_sub(i16::MAX as u16);
                }
                slot.state &= !PASSED;
                if slot.is_stored() {
                    let bytes = f64::from(slot.units() * UNIT);
                    let row = &mut self.census.population[slot.uses() as usize];
                    row[bucket(slot.age(now))] += bytes;
                }
                continue;
            }
            let index = next - self.slots.len();
            if index >= self.ghosts.len() {
                self.learn();
                return;
            }
            if let Some(ghost) = self.ghosts.at(index, now) {
                self.census.population[ghost.uses as usize][bucket(ghost.age)] += mean;
            }
        }
    }

    fn learn(&mut self) {
        let ticks = (self.used_bytes - self.census.began) as f64 / self.tick_bytes as f64;
        self.hazards.learn(&self.census.population, ticks, self.tick_bytes as f64);
        let population = [[0.0; AGES]; CLASSES];
        self.census = Census { next: 0, population, began: self.used_bytes };
        self.ghosts.fit(self.stored);
    }

    /// Slots grow by a sixteenth, not by doubling: they are most of the policy's memory.
    fn grow(&mut self, slot: u32) {
        let wanted = slot as usize + 1;
        if wanted > self.slots.capacity() {
            self.slots.reserve_exact(wanted + wanted / 16 + 64 - self.slots.len());
        }
        if wanted > self.slots.len() {
            self.slots.resize(wanted, Slot::default());
        }
    }
}

impl ChunkPolicy for Forecast {
    fn expect(&mut self, chunks: usize) {
        self.slots.reserve_exact(chunks.saturating_sub(self.slots.len()));
        self.ghosts.fit(chunks);
    }

    /// A chunk that was read is admitted if it is worth more than the one that would go. Prefetched
    /// chunks only push out each other, and a fill pushes out nothing.
    fn admit(&mut self, key_hash: u64, bytes: u32, why: Why, pressure: Pressure) -> bool {
        if pressure == Pressure::Room || why == Why::Pin {
            return true;
        }
        if why == Why::Prefetch {
            return self.unread.may_push_out(bytes.div_ceil(UNIT));
        }
        let Some(worst) = self.worst().filter(|_| why != Why::Fill) else { return false };
        let now = self.now();
        let uses = self.ghosts.find(hash(key_hash), now).map_or(1, |ghost| ghost.uses);
        self.hazards.index(uses as usize, 0) >= self.index(worst)
    }

    fn inserted(&mut self, slot: u32, key_hash: u64, bytes: u32, why: Why) {
        self.grow(slot);
        if self.slots[slot as usize].is_stored() {
            self.removed(slot);
        }
        let (hash, now) = (hash(key_hash), self.now());
        let known = self.ghosts.take(hash, now).map(|ghost| ghost.uses);
        let uses = known.unwrap_or(u32::from(why == Why::Read));
        self.slots[slot as usize] = Slot::new(hash, now, bytes, uses);
        self.stored += 1;
        let units = self.slots[slot as usize].units();
        self.stored_units += u64::from(units);
        self.new += usize::from(self.slots[slot as usize].is_new());
        if uses == 0 {
            let Self { unread, slots, .. } = self;
            unread.came(slot, units, |slot| is_unread(slots, slot));
        }
        self.visit();
    }

    fn removed(&mut self, slot: u32) {
        let now = self.now();
        let Some(gone) = self.slots.get_mut(slot as usize).filter(|it| it.is_stored()) else {
            return;
        };
        let gone = std::mem::take(gone);
        self.stored -= 1;
        self.new -= usize::from(gone.is_new());
        self.stored_units -= u64::from(gone.units());
        match gone.uses() {
            0 => self.unread.went(gone.units()),
            uses => self.ghosts.put(gone.hash, gone.at, uses, now),
        }
        if self.offered == Some(slot) {
            self.offered = None;
        }
    }

    fn touched(&mut self, slot: u32) {
        let now = self.now();
        let Some(touched) = self.slots.get_mut(slot as usize).filter(|it| it.is_stored()) else {
            return;
        };
        let age = touched.age(now);
        if age < SAME_USE && touched.uses() > 0 {
            return;
        }
        let (uses, bytes) = (touched.uses() as usize, touched.units() * UNIT);
        if uses == 0 {
            self.unread.was_read(touched.units());
        }
        touched.use_at(now);
        self.new -= usize::from(uses <= 1 && !touched.is_new());
        self.hazards.count_use(uses, age, f64::from(bytes));
        self.used_bytes += u64::from(bytes);
        self.visit();
    }

    fn missed(&mut self, key_hash: u64, bytes: u32) {
        let (hash, now) = (hash(key_hash), self.now());
        let uses = match self.ghosts.take(hash, now) {
            Some(ghost) if ghost.age < SAME_USE => ghost.uses,
            Some(ghost) => {
                self.hazards.count_use(ghost.uses as usize, ghost.age, f64::from(bytes));
                more(ghost.uses)
            }
            None => 1,
        };
        self.ghosts.put(hash, now, uses, now);
        self.used_bytes += u64::from(if uses == 1 { bytes / 2 } else { bytes });
        self.visit();
    }

    fn victim(&mut self) -> Option<u32> {
        if let Some(slot) = self.offered
            && self.slots[slot as usize].is_stored()
        {
            self.slots[slot as usize].state |= PASSED;
        }
        let Self { unread, slots, .. } = self;
        let owed = unread.next_owed(|slot| is_unread(slots, slot));
        self.offered = owed.or_else(|| self.worst());
        self.offered
    }
}
