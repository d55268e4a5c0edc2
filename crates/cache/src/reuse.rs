//! Estimated hits at other sizes: the reuse distances of a sample of the chunks.
//!
//! ```text
//!   newest  ■ ■ ■ ■ ■ ■ ■ ■ ■ ■ ■ ■  oldest        one entry a sampled chunk, and its length
//!           ├─ distance ─┤ of the chunk that is read now: a cache of more bytes, times the rate,
//!                          that evicts by age, has it
//! ```
//!
//! One chunk in `rate` is in the sample, chosen by its hash; distances are multiplied by the rate,
//! which doubles when the sample grows too large.
//! The source is C. Waldspurger et al., "Efficient MRC Construction with SHARDS", FAST 2015. A
//! chunk that is hit several times between two looks counts once. The cache's own policy does
//! better than age, so the difference between two sizes says more than each figure.
//!
//! Invariant: at most [`ENTRIES_MAX`] entries, whatever the size of the cache
//! (`tests::the_sample_is_bounded`).

use std::collections::VecDeque;

/// Most entries of the sample.
const ENTRIES_MAX: usize = 2048;
/// Reads of sampled chunks that are remembered; then each counts half, so that old ones fade.
const READS_MAX: u64 = 1 << 16;
/// With fewer reads nothing is said.
const READS_MIN: u64 = 100;

/// Hits in thousandths of reads, of caches of half the size, this size, and twice the size.
pub type HitPermille = [u16; 3];

pub(crate) struct Reuse {
    /// Power of two; it only grows.
    rate: u64,
    /// Newest first: the hash of a chunk's key, and its length.
    recent: VecDeque<(u64, u32)>,
    /// Bytes of the chunks in the sample.
    bytes: u64,
    /// Reads of sampled chunks.
    sampled: u64,
    /// All reads, as far as the sample tells, and hits.
    reads: u64,
    hits: [u64; 3],
    /// The cache's size in bytes that these hits are about, or nearly.
    size: u64,
}

impl Default for Reuse {
    fn default() -> Self {
        let (rate, recent) = (1, VecDeque::new());
        Self { rate, recent, bytes: 0, sampled: 0, reads: 0, hits: [0; 3], size: 0 }
    }
}

impl Reuse {
    /// A cache of `size` bytes has read, or looked for, the chunk with this hash.
    pub(crate) fn read(&mut self, hash: u64, len: u32, size: u64) {
        if !is_sampled(hash, self.rate) {
            return;
        }
        if size / 4 > self.size || self.size / 4 > size {
            (self.sampled, self.reads, self.hits, self.size) = (0, 0, [0; 3], size);
        }
        let mut distance = u64::from(len);
        let found = self.recent.iter().position(|(known, len)| {
            let is_it = *known == hash;
            distance += if is_it { 0 } else { u64::from(*len) };
            is_it
        });
        if let Some((_, len)) = found.and_then(|at| self.recent.remove(at)) {
            self.bytes -= u64::from(len);
            let distance = distance.saturating_mul(self.rate);
            for (hits, size) in self.hits.iter_mut().zip([size / 2, size, size.saturating_mul(2)]) {
                *hits += if distance <= size { self.rate } else { 0 };
            }
        }
        self.sampled += 1;
        self.reads += self.rate;
        if self.sampled >= READS_MAX {
            let counts = self.hits.iter_mut().chain([&mut self.sampled, &mut self.reads]);
            counts.for_each(|count| *count /= 2);
        }
        self.recent.push_front((hash, len));
        self.bytes += u64::from(len);
        self.trim(size.saturating_mul(2));
    }

    /// Forgets what even a cache of `most` bytes would not have, and takes a smaller sample if this
    /// one is too large.
    fn trim(&mut self, most: u64) {
        while self.bytes.saturating_mul(self.rate) > most && self.recent.len() > 1 {
            let oldest = self.recent.pop_back();
            self.bytes -= oldest.map_or(0, |(_, len)| u64::from(len));
        }
        if self.recent.len() > ENTRIES_MAX {
            self.rate *= 2;
            self.recent.retain(|(hash, _)| is_sampled(*hash, self.rate));
            self.bytes = self.recent.iter().map(|(_, len)| u64::from(*len)).sum();
        }
    }

    /// The estimate, once there is enough of a sample.
    pub(crate) fn hit_permille(&self) -> Option<HitPermille> {
        let permille = |hits: u64| (hits * 1000 / self.reads.max(1)) as u16;
        (self.sampled >= READS_MIN).then(|| self.hits.map(permille))
    }
}

/// The low bits of a hash choose the shard of the index, and the highest its place.
fn is_sampled(hash: u64, rate: u64) -> bool {
    (hash >> 20) & (rate - 1) == 0
}

#[cfg(test)]
mod tests {
    use super::{ENTRIES_MAX, READS_MAX, Reuse};

    const LEN: u32 = 256 << 10;
    /// A hash whose sampled bits are as random as those of keys.
    fn hash(number: u64) -> u64 {
        (number + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15)
    }

    #[test]
    fn a_loop_is_hit_by_caches_that_hold_it_and_by_no_other() {
        for (chunks, expected) in [(100, [1, 1, 1]), (300, [0, 1, 1]), (600, [0, 0, 1])] {
            let mut reuse = Reuse::default();
            for number in (0..chunks).cycle().take(40 * chunks as usize) {
                reuse.read(hash(number), LEN, 400 * u64::from(LEN));
            }
            let said = reuse.hit_permille().unwrap();
            assert_eq!(said.map(|permille| u8::from(permille > 900)), expected, "{said:?}");
            assert!(said.iter().all(|permille| *permille < 50 || *permille > 900), "{said:?}");
        }
    }

    #[test]
    fn a_sample_says_the_same_as_all_chunks() {
        // A cache 256 times as large as the sample; uniform reads of twice its size.
        let size = 16 << 30;
        let chunks = 2 * size / u64::from(LEN);
        let mut reuse = Reuse::default();
        let mut state = 1u64;
        for _ in 0..3_000_000 {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            reuse.read(hash((state >> 33) % chunks), LEN, size);
        }
        let said = reuse.hit_permille().unwrap();
        // By age: a quarter, a half; and nearly all, but for the first reads.
        for (said, least, most) in [(said[0], 170, 300), (said[1], 380, 520), (said[2], 700, 1000)]
        {
            assert!((least..=most).contains(&said), "{said} is not from {least} to {most}");
        }
    }

    #[test]
    fn the_sample_is_bounded() {
        let mut reuse = Reuse::default();
        (0..100_000).for_each(|number| reuse.read(hash(number), 4096, 1 << 40));
        assert!((ENTRIES_MAX / 4..=ENTRIES_MAX).contains(&reuse.recent.len()));
        assert!(reuse.sampled < READS_MAX && reuse.rate >= 100_000 / ENTRIES_MAX as u64);
        assert_eq!(reuse.hit_permille(), Some([0; 3]));
        // No cache of this size, and none of twice the size, would have the older ones.
        (0..1000).for_each(|number| reuse.read(hash(number), 4096, 64 << 20));
        assert!(reuse.bytes * reuse.rate <= 128 << 20);
        // A statement about one size is none about another.
        let sampled = (0..).map(hash).find(|hash| super::is_sampled(*hash, reuse.rate)).unwrap();
        reuse.read(sampled, 4096, 1 << 30);
        assert_eq!(reuse.hit_permille(), None);
    }
}
