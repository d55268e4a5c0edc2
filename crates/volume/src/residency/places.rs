//! The places of chunks, by index: a table that readers share without a lock.

use burgeon_cache::Place;

use crate::sync::{AtomicU64, Ordering};

/// A word a chunk: the bits of its place, or 0 while it is unknown. An entry may be stale.
pub(crate) struct Places(Box<[AtomicU64]>);

impl Places {
    /// Nothing is known of `chunks` chunks.
    pub(crate) fn new(chunks: u32) -> Self {
        Self((0..chunks).map(|_| AtomicU64::new(0)).collect())
    }

    /// The place of chunk `index`, as far as is known.
    #[inline]
    pub(crate) fn get(&self, index: u32) -> Option<Place> {
        Place::from_bits(self.0[index as usize].load(Ordering::Acquire))
    }

    /// Chunk `index` is at `place` from now on, or its place is unknown.
    pub(crate) fn set(&self, index: u32, place: Option<Place>) {
        let bits = place.map_or(0, Place::to_bits);
        self.0[index as usize].store(bits, Ordering::Release);
    }
}
