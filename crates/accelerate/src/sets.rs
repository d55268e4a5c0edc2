//! The index of clean blocks: sets of 16 slots, 4 bytes a slot.
//!
//! ```text
//!   set: 16 words of 32 bits, one line of the processor's cache; the slot is the position
//!   word: used (1 bit) │ tag (29 bits) │ clock (2 bits)
//!   check: of each slot, the CRC-32C of its key and its 4 KiB
//! ```
//!
//! A cache that has grown has an extent of sets for each growth, with a mapping of keys of its own.
//! A new block goes to the extent that its number draws, a larger one more often. Blocks that were
//! cached before a growth stay in their sets, so a lookup asks all extents, the drawn one first.
//!
//! Lookups take no lock. A slot is changed by the one owner of its reservation (`policy`): first
//! the word becomes 0, then the slot's bytes change, then its check, then the word.
//!
//! Invariants:
//! - A word with a tag is published after the slot's bytes and its check were written.
//! - A reader that got bytes from a slot compares them with the check, which covers the key: bytes
//!   of another block, or of a slot in the middle of a change, never pass.
//! - Every change marks its part of the index as changed after the change is visible, so a
//!   checkpoint that misses a change leaves its mark (`take_changed`).
//! - A key is in one slot at most, of all extents: only a key that was not found is admitted.

use std::sync::atomic::{
    AtomicU32, AtomicU64,
    Ordering::{Relaxed, SeqCst},
};

use crate::keys::{Key, KeyMapping, SetTag, mixed};

/// Slots of a set.
pub const WAYS: usize = 16;
/// Sets of which one block of the stored index tells.
pub const SETS_A_PART: u32 = 31;

const USED: u32 = 1 << 31;
const CLOCK: u32 = 3;
/// Odd, so that each extent draws by other numbers.
const STEP: u64 = 0x9e37_79b9_7f4a_7c15;

/// Number of a slot: its place on the cache device.
pub type Slot = u32;

/// Sets that a cache got at once.
struct Extent {
    keys: KeyMapping,
    first_set: u32,
    sets: u32,
    first_part: u32,
}

/// The index.
pub struct Sets {
    extents: Box<[Extent]>,
    words: Box<[AtomicU32]>,
    checks: Box<[AtomicU32]>,
    /// A bit for each part of the stored index: it has changed since it was taken.
    changed: Box<[AtomicU64]>,
}

impl Sets {
    /// An empty index of `sets` sets.
    pub fn new(sets: u32) -> Self {
        Self::of(&[sets])
    }

    /// An empty index with an extent of each of these numbers of sets.
    pub(crate) fn of(extents: &[u32]) -> Self {
        let (mut first_set, mut first_part) = (0, 0);
        let extents = extents.iter().map(|&sets| {
            let extent = Extent { keys: KeyMapping::new(sets), first_set, sets, first_part };
            first_set += sets;
            first_part += sets.div_ceil(SETS_A_PART);
            extent
        });
        let extents = extents.collect();
        let slots = first_set as usize * WAYS;
        Self {
            extents,
            words: (0..slots).map(|_| AtomicU32::new(0)).collect(),
            checks: (0..slots).map(|_| AtomicU32::new(0)).collect(),
            changed: (0..first_part.div_ceil(64)).map(|_| AtomicU64::new(0)).collect(),
        }
    }

    /// The set into which `key` is admitted.
    #[inline]
    pub fn home(&self, key: Key) -> u32 {
        let extent = &self.extents[self.drawn(key)];
        extent.first_set + extent.keys.place(key).set
    }

    /// The extent that the key draws. From the newest to the oldest, each takes its share of the
    /// sets up to it: so a growth changes the draws of those keys alone that it takes.
    #[inline]
    fn drawn(&self, key: Key) -> usize {
        let has_place = |extent: &Extent| key.block < extent.keys.blocks_max();
        for (at, extent) in self.extents.iter().enumerate().skip(1).rev() {
            let number = mixed(key).wrapping_mul(STEP.wrapping_mul(2 * at as u64 + 1)) >> 32;
            let all = u64::from(extent.first_set) + u64::from(extent.sets);
            if has_place(extent) && (number * all) >> 32 < u64::from(extent.sets) {
                return at;
            }
        }
        // A small extent has no places for the last blocks of a huge device.
        self.extents.iter().position(has_place).unwrap_or(0)
    }

    fn extent_of(&self, slot: Slot) -> &Extent {
        let set = slot / WAYS as u32;
        let found = self.extents.iter().rev().find(|extent| extent.first_set <= set);
        found.unwrap_or(&self.extents[0])
    }

    /// Number of slots.
    pub fn slots(&self) -> u32 {
        self.words.len() as u32
    }

    /// Number of sets.
    pub fn sets(&self) -> u32 {
        (self.words.len() / WAYS) as u32
    }

    /// The slot that holds `key`.
    #[inline]
    pub fn find(&self, key: Key) -> Option<Slot> {
        let drawn = self.drawn(key);
        let others = (0..self.extents.len()).filter(|at| *at != drawn);
        std::iter::once(drawn).chain(others).find_map(|at| self.find_in(&self.extents[at], key))
    }

    #[inline]
    fn find_in(&self, extent: &Extent, key: Key) -> Option<Slot> {
        if key.block >= extent.keys.blocks_max() {
            return None;
        }
        let place = extent.keys.place(key);
        let first = (extent.first_set + place.set) as usize * WAYS;
        let wanted = USED | place.tag << 2;
        let set = &self.words[first..first + WAYS];
        let way = set.iter().position(|word| word.load(SeqCst) & !CLOCK == wanted)?;
        Some((first + way) as Slot)
    }

    /// Counts a hit: the slot stays longer.
    #[inline]
    pub fn touch(&self, slot: Slot) {
        let word = &self.words[slot as usize];
        let now = word.load(Relaxed);
        if now & USED != 0 && now & CLOCK != CLOCK {
            // A lost race is a hit that is not counted.
            let _ = word.compare_exchange(now, now + 1, Relaxed, Relaxed);
        }
    }

    /// The check of a slot's bytes.
    #[inline]
    pub fn check(&self, slot: Slot) -> u32 {
        self.checks[slot as usize].load(SeqCst)
    }

    /// True if the slot holds a block.
    pub fn is_used(&self, slot: Slot) -> bool {
        self.words[slot as usize].load(SeqCst) & USED != 0
    }

    /// The key of the block in `slot`.
    pub fn key_of(&self, slot: Slot) -> Option<Key> {
        let word = self.words[slot as usize].load(SeqCst);
        let extent = self.extent_of(slot);
        (word & USED != 0).then(|| extent.keys.key_at(extent.place_of(slot, word)))
    }

    /// The slot's hits since the hand passed it: 0 to 3.
    pub(crate) fn clock(&self, slot: Slot) -> u32 {
        self.words[slot as usize].load(Relaxed) & CLOCK
    }

    /// Takes one from the slot's clock.
    pub(crate) fn age(&self, slot: Slot) {
        let word = &self.words[slot as usize];
        let now = word.load(Relaxed);
        if now & USED != 0 && now & CLOCK != 0 {
            let _ = word.compare_exchange(now, now - 1, Relaxed, Relaxed);
        }
    }

    /// Empties a slot; for the owner of its reservation.
    pub fn clear(&self, slot: Slot) {
        self.words[slot as usize].store(0, SeqCst);
        self.note(slot);
    }

    /// Shows that `slot` holds `key`; for the owner of its reservation, after the bytes.
    pub fn publish(&self, slot: Slot, key: Key, check: u32) {
        let extent = self.extent_of(slot);
        let place = extent.keys.place(key);
        debug_assert_eq!(extent.first_set + place.set, slot / WAYS as u32);
        self.checks[slot as usize].store(check, SeqCst);
        self.words[slot as usize].store(USED | place.tag << 2, SeqCst);
        self.note(slot);
    }

    fn note(&self, slot: Slot) {
        let extent = self.extent_of(slot);
        let part = extent.first_part + (slot / WAYS as u32 - extent.first_set) / SETS_A_PART;
        self.changed[part as usize / 64].fetch_or(1 << (part % 64), SeqCst);
    }

    /// Slots in use.
    pub fn used(&self) -> u64 {
        self.words.iter().filter(|word| word.load(Relaxed) & USED != 0).count() as u64
    }

    /// Parts of the stored index.
    pub fn parts(&self) -> u32 {
        self.extents.iter().map(|extent| extent.sets.div_ceil(SETS_A_PART)).sum()
    }

    /// True if `part` has changed since the last call; asked before its words are read.
    pub fn take_changed(&self, part: u32) -> bool {
        let bit = 1 << (part % 64);
        self.changed[part as usize / 64].fetch_and(!bit, SeqCst) & bit != 0
    }

    /// Marks a part as changed again: it could not be stored.
    pub fn give_back(&self, part: u32) {
        self.changed[part as usize / 64].fetch_or(1 << (part % 64), SeqCst);
    }

    /// Words and checks of a part, in the order of the slots.
    pub fn part(&self, part: u32) -> impl Iterator<Item = (u32, u32)> + '_ {
        let load = |slot: usize| (self.words[slot].load(SeqCst), self.checks[slot].load(SeqCst));
        self.slots_of(part).map(load)
    }

    /// Takes stored words and checks over, without those that cannot be right.
    pub fn load_part(&self, part: u32, stored: impl Iterator<Item = (u32, u32)>) {
        for (slot, (word, check)) in self.slots_of(part).zip(stored) {
            if word & USED == 0 {
                continue;
            }
            let extent = self.extent_of(slot as Slot);
            let place = extent.place_of(slot as Slot, word);
            let key = extent.keys.key_at(place);
            if extent.keys.place(key) == place && self.find(key).is_none() {
                self.checks[slot].store(check, SeqCst);
                self.words[slot].store(word, SeqCst);
            } else {
                self.note(slot as Slot);
            }
        }
    }

    fn slots_of(&self, part: u32) -> std::ops::Range<usize> {
        let found = self.extents.iter().rev().find(|extent| extent.first_part <= part);
        let extent = found.unwrap_or(&self.extents[0]);
        let first = extent.first_set + (part - extent.first_part) * SETS_A_PART;
        let end = (first + SETS_A_PART).min(extent.first_set + extent.sets);
        first as usize * WAYS..end as usize * WAYS
    }
}

impl Extent {
    fn place_of(&self, slot: Slot, word: u32) -> SetTag {
        SetTag { set: slot / WAYS as u32 - self.first_set, tag: (word & !USED) >> 2 }
    }
}

/// The check of `bytes` as the content of `key`.
pub fn check_of(key: Key, bytes: &[u8]) -> u32 {
    let mut head = [0; 9];
    head[0] = key.device;
    head[1..].copy_from_slice(&key.block.to_le_bytes());
    burgeon_block::crc32c_append(burgeon_block::crc32c(&head), bytes)
}

#[cfg(test)]
mod tests {
    use super::{Sets, WAYS, check_of};
    use crate::keys::Key;

    fn key(block: u64) -> Key {
        Key { device: 1, block }
    }

    #[test]
    fn a_block_is_found_until_its_slot_is_emptied() {
        let sets = Sets::new(100);
        let slot = sets.home(key(7)) * WAYS as u32 + 3;
        assert_eq!(sets.find(key(7)), None);
        sets.publish(slot, key(7), 99);
        assert_eq!((sets.find(key(7)), sets.key_of(slot)), (Some(slot), Some(key(7))));
        assert_eq!((sets.check(slot), sets.used()), (99, 1));
        for clock in [1, 2, 3, 3] {
            sets.touch(slot);
            assert_eq!((sets.clock(slot), sets.find(key(7))), (clock, Some(slot)));
        }
        sets.clear(slot);
        assert_eq!((sets.find(key(7)), sets.used()), (None, 0));
    }

    #[test]
    fn a_stored_part_comes_back_without_what_cannot_be_right() {
        let sets = Sets::new(40);
        let slots: Vec<u32> = (0..50)
            .filter_map(|block| {
                let first = sets.home(key(block)) * WAYS as u32;
                let slot = (first..first + WAYS as u32).find(|slot| !sets.is_used(*slot))?;
                sets.publish(slot, key(block), block as u32);
                Some(slot)
            })
            .collect();
        let stored: Vec<Vec<_>> = (0..sets.parts()).map(|part| sets.part(part).collect()).collect();
        let loaded = Sets::new(40);
        for (part, words) in stored.iter().enumerate() {
            loaded.load_part(part as u32, words.iter().copied());
        }
        assert_eq!(loaded.used(), slots.len() as u64);
        for block in 0..50 {
            assert_eq!(loaded.find(key(block)), sets.find(key(block)));
        }
        // One block in two slots of a set: the first counts.
        let hostile = Sets::new(1);
        hostile.load_part(0, [(1 << 31, 1), (1 << 31, 2)].into_iter());
        assert_eq!(hostile.used(), 1);
        assert!(hostile.take_changed(0) && !hostile.take_changed(0));
    }

    /// Fills free slots of the homes; returns the keys that are in the index.
    fn fill(sets: &Sets, keys: impl Iterator<Item = Key>) -> Vec<Key> {
        keys.filter(|key| {
            let first = sets.home(*key) * WAYS as u32;
            let free = (first..first + WAYS as u32).find(|slot| !sets.is_used(*slot));
            free.into_iter().for_each(|slot| sets.publish(slot, *key, key.block as u32));
            free.is_some()
        })
        .collect()
    }

    #[test]
    fn a_growth_keeps_every_block_and_spreads_new_ones_over_all_sets() {
        let small = Sets::of(&[100]);
        let keys = fill(&small, (0..1000).map(key));
        let grown = Sets::of(&[100, 40, 300]);
        for part in 0..small.parts() {
            grown.load_part(part, small.part(part));
        }
        assert_eq!((grown.used(), grown.sets()), (keys.len() as u64, 440));
        for key in &keys {
            let slot = grown.find(*key).unwrap();
            assert_eq!((small.find(*key), grown.key_of(slot)), (Some(slot), Some(*key)));
        }
        let more = fill(&grown, (1000..8000).map(key));
        assert!(
            more.iter().chain(&keys).all(|key| {
                grown.find(*key).is_some_and(|slot| grown.key_of(slot) == Some(*key))
            })
        );
        assert!(more.len() > 5000, "{}", more.len());
        // Into each extent as many as it has room for.
        for (sets, first) in [(100, 0), (40, 100), (300, 140)] {
            let slots = first * WAYS as u32..(first + sets) * WAYS as u32;
            let used = slots.filter(|slot| grown.is_used(*slot)).count();
            assert!(used > sets as usize * WAYS * 3 / 4, "{sets}: {used}");
        }
        // All of it comes back from its parts.
        let loaded = Sets::of(&[100, 40, 300]);
        (0..grown.parts()).for_each(|part| loaded.load_part(part, grown.part(part)));
        assert_eq!(loaded.used(), grown.used());
        assert!(more.iter().all(|key| loaded.find(*key) == grown.find(*key)));
        // A growth changes the draw of those blocks alone that its extent takes.
        let again = Sets::of(&[100, 40, 300, 20]);
        let moved = more.iter().filter(|key| again.home(**key) != grown.home(**key));
        assert!(moved.clone().all(|key| again.home(*key) >= 440));
        assert!(moved.count() < more.len() / 10);
    }

    #[test]
    fn blocks_of_a_huge_device_get_places_in_the_extents_that_have_some() {
        let sets = Sets::of(&[1 << 10, 4]);
        for block in (0..1 << 31).step_by(100_000_007) {
            let slot = sets.home(key(block)) * WAYS as u32;
            sets.publish(slot, key(block), 1);
            assert_eq!((sets.find(key(block)), sets.key_of(slot)), (Some(slot), Some(key(block))));
        }
    }

    #[test]
    fn a_check_covers_the_key() {
        let bytes = [5; 4096];
        assert_ne!(check_of(key(1), &bytes), check_of(key(2), &bytes));
        assert_ne!(check_of(Key { device: 2, block: 1 }, &bytes), check_of(key(1), &bytes));
        assert_ne!(check_of(key(1), &bytes), check_of(key(1), &[6; 4096]));
    }
}
