//! One bit a block: whether its bytes may be resident.

use std::ops::Range;

use crate::sync::{AtomicU64, Ordering};

const BITS: u64 = u64::BITS as u64;

/// A bitmap that readers and writers share without a lock. Setting a bit publishes the
/// bytes written before (release); a reader that sees the bit sees those bytes (acquire).
pub(crate) struct Presence {
    words: Box<[AtomicU64]>,
    count: AtomicU64,
}

impl Presence {
    /// No block of `blocks` present.
    pub(crate) fn new(blocks: u64) -> Self {
        Self {
            words: (0..blocks.div_ceil(BITS)).map(|_| AtomicU64::new(0)).collect(),
            count: AtomicU64::new(0),
        }
    }

    /// True if every block of `blocks` is present.
    #[inline]
    pub(crate) fn all(&self, blocks: Range<u64>) -> bool {
        // A hit of a few blocks has its bits in one word.
        let len = blocks.end.saturating_sub(blocks.start);
        let (word, first) = (blocks.start / BITS, blocks.start % BITS);
        if len > 0 && first + len <= BITS {
            let mask = (u64::MAX >> (BITS - len)) << first;
            return self.words[word as usize].load(Ordering::Acquire) & mask == mask;
        }
        parts(blocks).all(|(word, mask)| self.words[word].load(Ordering::Acquire) & mask == mask)
    }

    /// True if a block of `blocks` is present.
    pub(crate) fn any(&self, blocks: Range<u64>) -> bool {
        parts(blocks).any(|(word, mask)| self.words[word].load(Ordering::Relaxed) & mask != 0)
    }

    /// Marks `blocks` present.
    pub(crate) fn set(&self, blocks: Range<u64>) {
        for (word, mask) in parts(blocks) {
            let before = self.words[word].fetch_or(mask, Ordering::Release);
            self.count.fetch_add(u64::from((mask & !before).count_ones()), Ordering::Relaxed);
        }
    }

    /// Marks `blocks` absent.
    pub(crate) fn clear(&self, blocks: Range<u64>) {
        for (word, mask) in parts(blocks) {
            let before = self.words[word].fetch_and(!mask, Ordering::Relaxed);
            self.count.fetch_sub(u64::from((mask & before).count_ones()), Ordering::Relaxed);
        }
    }

    /// Number of present blocks. Wraps for a moment when a set and a clear of one block cross;
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
