//! The values that are counted: of a mount, of a store, of the cache.
//!
//! Invariants: a value is stored at a fixed place, and new ones are added at the end, so that a
//! record of an earlier version is read as one whose new values are zero; sums saturate.

use burgeon_block::Counters;
use serde::{Deserialize, Serialize};

/// The upper bounds of latencies, as powers of two in nanoseconds: 4 µs to 17 s. Powers, because
/// only those are bounds of the buckets in which reads are counted.
pub const BOUNDS: [u32; 12] = [12, 14, 16, 18, 20, 22, 24, 26, 28, 30, 32, 34];

/// Reads that took as long as this, in the power of two of nanoseconds, have stalled: 1.07 s.
const STALL: u32 = 30;

/// The values of a tier: bytes, a count of reads for each bound, their number, their time.
const TIER_LEN: usize = BOUNDS.len() + 3;
const OTHERS: usize = 2 * TIER_LEN;
const LEN: usize = OTHERS + 8;

/// The place where a read has found its bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ReadTier {
    /// On this host.
    Cache,
    /// At their source: the read had to wait for a fetch.
    Source,
}

impl ReadTier {
    /// Both.
    pub const ALL: [Self; 2] = [Self::Cache, Self::Source];

    /// Its name in a label.
    pub fn name(self) -> &'static str {
        match self {
            Self::Cache => "cache",
            Self::Source => "source",
        }
    }

    fn start(self) -> usize {
        match self {
            Self::Cache => 0,
            Self::Source => TIER_LEN,
        }
    }
}

/// The counters of a mount's or a store's reads.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(from = "Vec<u64>", into = "Vec<u64>")]
pub struct Values([u64; LEN]);

impl Default for Values {
    fn default() -> Self {
        Self([0; LEN])
    }
}

impl From<Vec<u64>> for Values {
    fn from(list: Vec<u64>) -> Self {
        let mut values = Self::default();
        values.0.iter_mut().zip(list).for_each(|(value, known)| *value = known);
        values
    }
}

impl From<Values> for Vec<u64> {
    fn from(values: Values) -> Self {
        values.0.to_vec()
    }
}

impl Values {
    /// The present values of a mount's counters.
    pub fn of(counters: &Counters) -> Self {
        let mut values = Self::default();
        let tiers = [
            (ReadTier::Cache, &counters.hit_bytes, &counters.hit_latency),
            (ReadTier::Source, &counters.miss_bytes, &counters.miss_latency),
        ];
        for (tier, bytes, latency) in tiers {
            let (start, latency) = (tier.start(), latency.snapshot());
            values.0[start] = bytes.get();
            for (index, power) in BOUNDS.iter().enumerate() {
                values.0[start + 1 + index] = latency.below(*power);
            }
            values.0[start + TIER_LEN - 2] = latency.count();
            values.0[start + TIER_LEN - 1] = latency.sum();
        }
        let others = [
            &counters.failed_reads,
            &counters.fetches,
            &counters.fetched_bytes,
            &counters.background_bytes,
            &counters.source_errors,
            &counters.cache_corrupt_blocks,
            &counters.source_corrupt_chunks,
            &counters.replayed,
        ];
        for (index, counter) in others.into_iter().enumerate() {
            values.0[OTHERS + index] = counter.get();
        }
        values
    }

    /// Bytes of the reads of a tier.
    pub fn bytes(&self, tier: ReadTier) -> u64 {
        self.0[tier.start()]
    }

    /// The number of reads of a tier that took less than each of [`BOUNDS`].
    pub fn below(&self, tier: ReadTier) -> &[u64] {
        &self.0[tier.start() + 1..][..BOUNDS.len()]
    }

    /// The number of reads of a tier.
    pub fn reads(&self, tier: ReadTier) -> u64 {
        self.0[tier.start() + TIER_LEN - 2]
    }

    /// The time of all reads of a tier, in nanoseconds.
    pub fn nanoseconds(&self, tier: ReadTier) -> u64 {
        self.0[tier.start() + TIER_LEN - 1]
    }

    /// The number of reads of both tiers that took a second or more.
    pub fn stalled(&self) -> u64 {
        let at = BOUNDS.iter().position(|power| *power == STALL).unwrap_or(BOUNDS.len() - 1);
        let slow = |tier| self.reads(tier).saturating_sub(self.below(tier)[at]);
        slow(ReadTier::Cache).saturating_add(slow(ReadTier::Source))
    }

    /// Reads that were answered with an error.
    pub fn failed_reads(&self) -> u64 {
        self.0[OTHERS]
    }

    /// Fetches for readers.
    pub fn fetches(&self) -> u64 {
        self.0[OTHERS + 1]
    }

    /// Bytes of these, as stored.
    pub fn fetched_bytes(&self) -> u64 {
        self.0[OTHERS + 2]
    }

    /// Bytes that were fetched without a reader.
    pub fn background_bytes(&self) -> u64 {
        self.0[OTHERS + 3]
    }

    /// Attempts to read from the source that failed.
    pub fn source_errors(&self) -> u64 {
        self.0[OTHERS + 4]
    }

    /// Cached blocks whose checksum was wrong.
    pub fn corrupt_in_cache(&self) -> u64 {
        self.0[OTHERS + 5]
    }

    /// Chunks that arrived with a wrong digest.
    pub fn corrupt_at_source(&self) -> u64 {
        self.0[OTHERS + 6]
    }

    /// Requests that a new server took over from its predecessor.
    pub fn replayed(&self) -> u64 {
        self.0[OTHERS + 7]
    }

    /// Adds `other`.
    pub(crate) fn add(&mut self, other: &Self) {
        let sums = self.0.iter_mut().zip(other.0);
        sums.for_each(|(value, more)| *value = value.saturating_add(more));
    }

    /// The difference from `before`. Counters that have gone down were made anew.
    pub(crate) fn since(&self, before: &Self) -> Option<Self> {
        let mut new = Self::default();
        for (index, value) in new.0.iter_mut().enumerate() {
            *value = self.0[index].checked_sub(before.0[index])?;
        }
        Some(new)
    }

    /// True if nothing was counted.
    pub(crate) fn is_zero(&self) -> bool {
        self.0 == [0; LEN]
    }
}

/// The counters of the host's cache.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct CacheValues {
    /// Bytes of chunks that came.
    pub admitted: u64,
    /// Bytes of chunks that were not taken.
    pub refused: u64,
    /// Bytes of chunks that went.
    pub evicted: u64,
    /// Bytes written to the disk.
    pub written: u64,
    /// Chunks that were wrong.
    pub doubted: u64,
    /// Reads that failed.
    pub read_errors: u64,
    /// Writes that failed.
    pub write_errors: u64,
}

impl CacheValues {
    /// `self` and `other`, value by value; `None` if `combine` is once.
    fn zip(self, other: Self, combine: impl Fn(u64, u64) -> Option<u64>) -> Option<Self> {
        Some(Self {
            admitted: combine(self.admitted, other.admitted)?,
            refused: combine(self.refused, other.refused)?,
            evicted: combine(self.evicted, other.evicted)?,
            written: combine(self.written, other.written)?,
            doubted: combine(self.doubted, other.doubted)?,
            read_errors: combine(self.read_errors, other.read_errors)?,
            write_errors: combine(self.write_errors, other.write_errors)?,
        })
    }

    pub(crate) fn plus(self, more: Self) -> Self {
        self.zip(more, |value, more| Some(value.saturating_add(more))).unwrap_or(self)
    }

    pub(crate) fn since(self, before: Self) -> Option<Self> {
        self.zip(before, u64::checked_sub)
    }
}
