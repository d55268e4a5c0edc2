//! Distributions of durations and sizes of a device's requests. An average would hide the few slow
//! ones that users notice.
//!
//! ```text
//!   read  ─► from memory, the cache or the slow device: the slowest that it took a block from
//!   write ─► until it returned; flush (and FUA) ─► until it was durable
//! ```
//!
//! They lie in the memory of the counters, and outlive it in the state directory
//! ([`crate::lasting`]). Hits that the request engine reads through its ring are in its own
//! counters; [`Times::with`] adds the two.

use std::time::Instant;

use burgeon_accelerate::HitTier;
use burgeon_block::{Counters, Histogram, HistogramSnapshot};

/// The kinds, with their names in JSON.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(usize)]
pub(crate) enum Kind {
    /// Nanoseconds of a read from memory.
    ReadMemory,
    /// Nanoseconds of a read from the cache device.
    ReadCache,
    /// Nanoseconds of a read from the slow device.
    ReadSlow,
    /// Nanoseconds of a write, an erasure included.
    Write,
    /// Nanoseconds of a flush, and of a write with FUA.
    Flush,
    /// Bytes of a read that the request engine did not answer by itself, block by block.
    ReadSize,
    /// Bytes of a write.
    WriteSize,
}

const COUNT: usize = 7;

impl Kind {
    /// Those of durations.
    pub(crate) const DURATIONS: [(Self, &str); 5] = [
        (Self::ReadMemory, "read_memory_ns"),
        (Self::ReadCache, "read_cache_ns"),
        (Self::ReadSlow, "read_slow_ns"),
        (Self::Write, "write_ns"),
        (Self::Flush, "flush_ns"),
    ];

    /// Those of sizes.
    pub(crate) const SIZES: [(Self, &str); 2] =
        [(Self::ReadSize, "read_bytes"), (Self::WriteSize, "write_bytes")];

    /// All, with their names in JSON.
    pub(crate) fn all() -> impl Iterator<Item = (Self, &'static str)> {
        Self::DURATIONS.into_iter().chain(Self::SIZES)
    }

    pub(crate) fn of_read(tier: HitTier) -> Self {
        match tier {
            HitTier::Memory => Self::ReadMemory,
            HitTier::Cache => Self::ReadCache,
            HitTier::Slow => Self::ReadSlow,
        }
    }
}

/// Memory that outlives the process: atomics, valid as zeros.
#[derive(Default)]
#[repr(C)]
pub(crate) struct Times([Histogram; COUNT]);

impl Times {
    pub(crate) fn of(&self, kind: Kind) -> &Histogram {
        &self.0[kind as usize]
    }

    /// The distribution of a kind. `engine` has the counters of the request engine: of its hits,
    /// each is a block of the cache device.
    pub(crate) fn with(&self, engine: &Counters, kind: Kind) -> HistogramSnapshot {
        let own = self.of(kind).snapshot();
        if kind == Kind::ReadCache { own.with(&engine.hit_latency.snapshot()) } else { own }
    }

    /// Notes a request that began at `begun` and ends now.
    pub(crate) fn ended(&self, kind: Kind, begun: Instant) {
        self.of(kind).record(u64::try_from(begun.elapsed().as_nanos()).unwrap_or(u64::MAX));
    }
}
