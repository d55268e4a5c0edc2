//! Chunks that nobody has read since they were prefetched, in the order in which they came.
//!
//! ```text
//!   a prefetched chunk comes while the cache is full ──► so many units are owed
//!   the next victims ◄── the oldest that are not read yet, until nothing is owed
//! ```
//!
//! Invariant: no more is owed than is unread, so a prefetched chunk never pushes out one that was
//! read (`tests/policy.rs`).

use std::collections::{HashSet, VecDeque};

/// Entries of slots that have other chunks by now, beyond which they are looked for.
const STALE_MAX: usize = 1024;

#[derive(Default)]
pub(super) struct Unread {
    /// Slots; of those that were read or given again since, the caller knows.
    queue: VecDeque<u32>,
    chunks: usize,
    units: u64,
    owed: u64,
}

impl Unread {
    /// A chunk of `units` came into `slot`.
    pub(super) fn came(&mut self, slot: u32, units: u32, is_unread: impl Fn(u32) -> bool) {
        self.queue.push_back(slot);
        self.chunks += 1;
        self.units += u64::from(units);
        if self.queue.len() > 2 * self.chunks + STALE_MAX {
            // A slot may have been given to several chunks, one after another.
            let mut known = HashSet::new();
            self.queue.retain(|slot| is_unread(*slot) && known.insert(*slot));
        }
    }

    /// One was evicted.
    pub(super) fn went(&mut self, units: u32) {
        self.owed = self.owed.saturating_sub(units.into());
        self.was_read(units);
    }

    /// One was read.
    pub(super) fn was_read(&mut self, units: u32) {
        self.chunks = self.chunks.saturating_sub(1);
        self.units = self.units.saturating_sub(units.into());
        self.owed = self.owed.min(self.units);
    }

    /// True if a prefetched chunk may come, for which others of the same size then go.
    pub(super) fn may_push_out(&mut self, units: u32) -> bool {
        let owed = self.owed + u64::from(units);
        let may = owed <= self.units;
        self.owed = if may { owed } else { self.owed };
        may
    }

    /// The slot that goes next for a prefetched chunk; `None` if nothing is owed.
    pub(super) fn next_owed(&mut self, is_unread: impl Fn(u32) -> bool) -> Option<u32> {
        while self.owed > 0 {
            let slot = self.queue.pop_front()?;
            if is_unread(slot) {
                return Some(slot);
            }
        }
        None
    }

    /// Bytes of memory.
    pub(super) fn memory(&self) -> usize {
        self.queue.capacity() * size_of::<u32>()
    }
}
