//! One bit a block, which readers and writers share without a lock.

use std::ops::Range;

use crate::sync::{AtomicU64, Ordering};

const BITS: u64 = u64::BITS as u64;

/// A bitmap of blocks.
pub(crate) struct BlockBits {
    words: Box<[AtomicU64]>,
    count: AtomicU64,
}

impl BlockBits {
    /// None of `blocks` blocks is set.
    pub(crate) fn new(blocks: u64) -> Self {
        Self {
            words: (0..blocks.div_ceil(BITS)).map(|_| AtomicU64::new(0)).collect(),
            count: AtomicU64::new(0),
        }
    }

    /// True if a block of `blocks` is set.
    pub(crate) fn any(&self, blocks: Range<u64>) -> bool {
        parts(blocks).any(|(word, mask)| self.words[word].load(Ordering::Relaxed) & mask != 0)
    }

    /// Sets `blocks`.
    pub(crate) fn set(&self, blocks: Range<u64>) {
        for (word, mask) in parts(blocks) {
            let before = self.words[word].fetch_or(mask, Ordering::Relaxed);
            self.count.fetch_add(u64::from((mask & !before).count_ones()), Ordering::Relaxed);
        }
    }

    /// Clears `blocks`.
    pub(crate) fn clear(&self, blocks: Range<u64>) {
        for (word, mask) in parts(blocks) {
            let before = self.words[word].fetch_and(!mask, Ordering::Relaxed);
            self.count.fetch_sub(u64::from((mask & before).count_ones()), Ordering::Relaxed);
        }
    }

    /// Number of set blocks. Wraps for a moment when a set and a clear of one block cross;
    /// never stays wrong.
    pub(crate) fn count(&self) -> u64 {
        let count = self.count.load(Ordering::Relaxed);
        if count > self.words.len() as u64 * BITS { 0 } else { count }
    }
}

/// The words that `blocks` touches, each with the mask of its bits.
fn parts(blocks: Range<u64>) -> impl Iterator<Item = (usize, u64)> {
    let mut next = blocks.start;
    std::iter::from_fn(move || {
        if next >= blocks.end {
            return None;
        }
        let (word, first) = (next / BITS, next % BITS);
        let bits = (BITS - first).min(blocks.end - next);
        next += bits;
        Some((word as usize, (u64::MAX >> (BITS - bits)) << first))
    })
}
