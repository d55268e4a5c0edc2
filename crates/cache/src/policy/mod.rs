//! Eviction and admission: which chunk goes, and which comes.
//!
//! A policy knows chunks by the slot that they have while they are here, and by a hash of their
//! key. The store calls it under a lock of its own, and never on the path of a hit: touches arrive
//! in batches.
//!
//! The host's cache has [`Forecast`]. The others are there to be compared with it.

mod clock;
mod forecast;
mod lirs;
mod order;
mod random;
mod rng;
mod sketch;
mod tiny_lfu;

pub use clock::Clock;
pub use forecast::Forecast;
pub use lirs::Lirs;
pub use random::Random;
pub use tiny_lfu::TinyLfu;

use crate::Why;

/// The fill level of the cache.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Pressure {
    /// There is room: everything is admitted.
    Room,
    /// Each admission evicts.
    Full,
}

/// Chooses what is evicted and what is admitted.
pub trait ChunkPolicy: Send {
    /// About so many chunks are inserted next, when the store starts.
    fn expect(&mut self, chunks: usize) {
        let _ = chunks;
    }

    /// True if the chunk is worth the eviction of others. Not asked while there is room.
    fn admit(&mut self, key_hash: u64, bytes: u32, why: Why, pressure: Pressure) -> bool;

    /// The chunk is in `slot` now. A slot is given again after [`Self::removed`] only.
    fn inserted(&mut self, slot: u32, key_hash: u64, bytes: u32, why: Why);

    /// The chunk in `slot` is gone: evicted, or forgotten for another reason.
    fn removed(&mut self, slot: u32);

    /// The chunk in `slot` was read, once or several times since the last batch.
    fn touched(&mut self, slot: u32);

    /// A chunk was looked for and is not here.
    fn missed(&mut self, key_hash: u64, bytes: u32);

    /// The slot to evict next, which is still inserted; `None` if there is none. The store may
    /// skip it, because it is held, and ask again: the answer is then another one, as long as
    /// there are others.
    fn victim(&mut self) -> Option<u32>;
}
