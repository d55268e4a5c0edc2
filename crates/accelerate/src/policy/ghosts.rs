//! Blocks that were seen and not kept, or evicted: 2 bytes each.
//!
//! Buckets of 16 fingerprints; a new one takes the oldest's place in its bucket. About one question
//! in 4,000 is answered wrongly with yes, which costs one write to the cache device.

use crate::keys::{Key, mixed};

const WAYS: usize = 16;

/// A bounded set of keys, the oldest of which are forgotten.
pub(super) struct Ghosts {
    marks: Box<[u16]>,
    oldest: Box<[u8]>,
}

impl Ghosts {
    /// Room for about `count` keys.
    pub(super) fn new(count: u64) -> Self {
        let buckets = (count as usize / WAYS).max(1);
        Self {
            marks: vec![0; buckets * WAYS].into_boxed_slice(),
            oldest: vec![0; buckets].into_boxed_slice(),
        }
    }

    fn place(&self, key: Key) -> (usize, u16) {
        let mixed = mixed(key);
        let bucket = (u128::from(mixed) * self.oldest.len() as u128) >> 64;
        // 0 is no fingerprint.
        (bucket as usize, (mixed as u16).max(1))
    }

    pub(super) fn add(&mut self, key: Key) {
        let (bucket, mark) = self.place(key);
        let way = &mut self.oldest[bucket];
        self.marks[bucket * WAYS + usize::from(*way)] = mark;
        *way = (*way + 1) % WAYS as u8;
    }

    /// True if `key` is a ghost; it is none any more.
    pub(super) fn take(&mut self, key: Key) -> bool {
        let (bucket, mark) = self.place(key);
        let marks = &mut self.marks[bucket * WAYS..(bucket + 1) * WAYS];
        let found = marks.iter_mut().find(|found| **found == mark);
        found.map(|found| *found = 0).is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::Ghosts;
    use crate::keys::Key;

    #[test]
    fn a_ghost_is_found_once_and_the_oldest_are_forgotten() {
        let mut ghosts = Ghosts::new(16_384);
        let key = |block| Key { device: 0, block };
        (0..8192).for_each(|block| ghosts.add(key(block)));
        let found = (0..8192).filter(|block| ghosts.take(key(*block))).count();
        assert!(found > 8000, "{found}");
        assert!((0..8192).filter(|block| ghosts.take(key(*block))).count() < 20);
        (0..100_000).for_each(|block| ghosts.add(key(block)));
        assert!((0..10_000).filter(|block| ghosts.take(key(*block))).count() < 100);
    }
}
