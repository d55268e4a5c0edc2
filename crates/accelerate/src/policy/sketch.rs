//! Recent requests for each block, estimated: a count-min sketch of 4-bit counters, halved now and
//! then (Einziger, Friedman and Manes, 2017).

use crate::keys::{Key, mixed};

/// Estimated counts of keys, 0 to 15.
pub(super) struct Sketch {
    /// Sixteen counters each.
    words: Box<[u64]>,
    counted: u64,
    counted_max: u64,
}

impl Sketch {
    /// For a cache of `slots` slots: 16 counters for each.
    pub(super) fn new(slots: u64) -> Self {
        let words = slots.next_power_of_two().max(64) as usize;
        Self { words: vec![0; words].into_boxed_slice(), counted: 0, counted_max: 10 * slots }
    }

    fn places(&self, key: Key) -> [(usize, u32); 4] {
        let (mask, mut hash) = (self.words.len() - 1, mixed(key));
        [0, 1, 2, 3].map(|row| {
            hash = hash.wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29) ^ row;
            (hash as usize & mask, row as u32 * 16 + (hash >> 62) as u32 * 4)
        })
    }

    pub(super) fn count(&self, key: Key) -> u64 {
        let counts = self.places(key).map(|(word, shift)| (self.words[word] >> shift) & 15);
        counts.into_iter().min().unwrap_or(0)
    }

    pub(super) fn add(&mut self, key: Key) {
        let mut added = false;
        for (word, shift) in self.places(key) {
            if (self.words[word] >> shift) & 15 < 15 {
                self.words[word] += 1 << shift;
                added = true;
            }
        }
        self.counted += u64::from(added);
        if self.counted >= self.counted_max {
            self.counted /= 2;
            self.words.iter_mut().for_each(|word| *word = (*word >> 1) & 0x7777_7777_7777_7777);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Sketch;
    use crate::keys::Key;

    #[test]
    fn frequent_keys_count_more_and_old_counts_fade() {
        let key = |block| Key { device: 0, block };
        let mut sketch = Sketch::new(1000);
        (0..8).for_each(|_| sketch.add(key(1)));
        sketch.add(key(2));
        assert!(sketch.count(key(1)) == 8 && sketch.count(key(2)) == 1);
        assert_eq!(sketch.count(key(3)), 0);
        (0..40_000).for_each(|block| sketch.add(key(10 + block)));
        assert!(sketch.count(key(1)) < 5);
    }
}
