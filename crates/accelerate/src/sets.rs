//! The index of clean blocks: sets of 16 slots, 4 bytes a slot.
//!
//! ```text
//!   set: 16 words of 32 bits, one line of the processor's cache; the slot is the position
//!   word: used (1 bit) │ tag (29 bits) │ clock (2 bits)
//!   check: of each slot, the CRC-32C of its key and its 4 KiB
//! ```
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

use std::sync::atomic::{
    AtomicU32, AtomicU64,
    Ordering::{Relaxed, SeqCst},
};

use crate::keys::{Key, KeyMapping, SetTag};

/// Slots of a set.
pub const WAYS: usize = 16;
/// Sets of which one block of the stored index tells.
pub const SETS_A_PART: u32 = 31;

const USED: u32 = 1 << 31;
const CLOCK: u32 = 3;

/// Number of a slot: its place on the cache device.
pub type Slot = u32;

/// The index.
pub struct Sets {
    keys: KeyMapping,
    words: Box<[AtomicU32]>,
    checks: Box<[AtomicU32]>,
    /// A bit for each part of the stored index: it has changed since it was taken.
    changed: Box<[AtomicU64]>,
}

impl Sets {
    /// An empty index of `sets` sets.
    pub fn new(sets: u32) -> Self {
        let slots = sets as usize * WAYS;
        let parts = sets.div_ceil(SETS_A_PART) as usize;
        Self {
            keys: KeyMapping::new(sets),
            words: (0..slots).map(|_| AtomicU32::new(0)).collect(),
            checks: (0..slots).map(|_| AtomicU32::new(0)).collect(),
            changed: (0..parts.div_ceil(64)).map(|_| AtomicU64::new(0)).collect(),
        }
    }

    /// The arithmetic of keys.
    pub fn keys(&self) -> &KeyMapping {
        &self.keys
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
        self.find_at(self.keys.place(key))
    }

    /// The slot that holds the key of `place`.
    #[inline]
    pub(crate) fn find_at(&self, place: SetTag) -> Option<Slot> {
        let first = place.set as usize * WAYS;
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
        (word & USED != 0).then(|| self.keys.key_at(self.place_of(slot, word)))
    }

    fn place_of(&self, slot: Slot, word: u32) -> SetTag {
        SetTag { set: slot / WAYS as u32, tag: (word & !USED) >> 2 }
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
        let place = self.keys.place(key);
        debug_assert_eq!(place.set, slot / WAYS as u32);
        self.checks[slot as usize].store(check, SeqCst);
        self.words[slot as usize].store(USED | place.tag << 2, SeqCst);
        self.note(slot);
    }

    fn note(&self, slot: Slot) {
        let part = slot / WAYS as u32 / SETS_A_PART;
        self.changed[part as usize / 64].fetch_or(1 << (part % 64), SeqCst);
    }

    /// Slots in use.
    pub fn used(&self) -> u64 {
        self.words.iter().filter(|word| word.load(Relaxed) & USED != 0).count() as u64
    }

    /// Parts of the stored index.
    pub fn parts(&self) -> u32 {
        self.sets().div_ceil(SETS_A_PART)
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
            let place = self.place_of(slot as Slot, word);
            let known = self.keys.place(self.keys.key_at(place)) == place;
            if known && self.find_at(place).is_none() {
                self.checks[slot].store(check, SeqCst);
                self.words[slot].store(word, SeqCst);
            } else {
                self.note(slot as Slot);
            }
        }
    }

    fn slots_of(&self, part: u32) -> std::ops::Range<usize> {
        let slots = SETS_A_PART as usize * WAYS;
        let first = part as usize * slots;
        first..(first + slots).min(self.words.len())
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
        let place = sets.keys().place(key(7));
        let slot = place.set * WAYS as u32 + 3;
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
                let first = sets.keys().place(key(block)).set * WAYS as u32;
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

    #[test]
    fn a_check_covers_the_key() {
        let bytes = [5; 4096];
        assert_ne!(check_of(key(1), &bytes), check_of(key(2), &bytes));
        assert_ne!(check_of(Key { device: 2, block: 1 }, &bytes), check_of(key(1), &bytes));
        assert_ne!(check_of(key(1), &bytes), check_of(key(1), &[6; 4096]));
    }
}
