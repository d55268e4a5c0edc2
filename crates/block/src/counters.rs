//! The counters of a mount: 64-bit, monotonic, data in bytes. They lie in memory that outlives the
//! serving process, so the layout is fixed: only atomics, in a struct that is valid when zeroed.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// A number that only grows.
#[derive(Default)]
#[repr(transparent)]
pub struct Counter(AtomicU64);

impl Counter {
    /// Adds `n`.
    pub fn add(&self, n: u64) {
        self.0.fetch_add(n, Relaxed);
    }

    /// The current value.
    pub fn get(&self) -> u64 {
        self.0.load(Relaxed)
    }
}

/// All counters of one mount.
#[derive(Default)]
#[repr(C)]
pub struct Counters {
    /// Reads answered from local bytes alone.
    pub hits: Counter,
    /// Bytes of those reads.
    pub hit_bytes: Counter,
    /// Reads that had to wait for a fetch.
    pub misses: Counter,
    /// Bytes of those reads.
    pub miss_bytes: Counter,
    /// Chunks fetched for this mount's readers.
    pub fetches: Counter,
    /// Bytes those fetches moved from the source, as stored (compressed).
    pub fetched_bytes: Counter,
    /// Bytes those fetches made readable (uncompressed).
    pub materialised_bytes: Counter,
    /// Cached blocks whose checksum was wrong: refetched, never served.
    pub cache_corrupt_blocks: Counter,
    /// Chunks whose digest was wrong when they arrived.
    pub source_corrupt_chunks: Counter,
    /// Reads from the source that failed (each try counts).
    pub source_errors: Counter,
    /// Reads answered with an error.
    pub failed_reads: Counter,
    /// Requests that a new serving process found in the slots of its predecessor and answered.
    pub replayed: Counter,
    /// Time of reads answered from local bytes, in nanoseconds.
    pub hit_latency: Histogram,
    /// Time of reads that had to wait for a fetch, in nanoseconds.
    pub miss_latency: Histogram,
    /// Bytes fetched for this mount that no reader waited for: by profile prefetch, for pinned
    /// files and to fill.
    pub background_bytes: Counter,
}

/// Sub-buckets per power of two: a quantile is exact to 1/8.
const SUB: u64 = 8;
const BUCKETS: usize = 62 * SUB as usize;

/// A log-linear histogram of 64-bit values: eight buckets per power of two.
#[repr(C)]
pub struct Histogram {
    buckets: [AtomicU64; BUCKETS],
}

impl Default for Histogram {
    fn default() -> Self {
        Self { buckets: [const { AtomicU64::new(0) }; BUCKETS] }
    }
}

impl Histogram {
    /// Counts one value.
    pub fn record(&self, value: u64) {
        self.buckets[bucket(value)].fetch_add(1, Relaxed);
    }

    /// A copy to compute with.
    pub fn snapshot(&self) -> HistogramSnapshot {
        HistogramSnapshot(self.buckets.iter().map(|b| b.load(Relaxed)).collect())
    }

    /// Replaces its content by that of a snapshot ([`HistogramSnapshot::filled`]), before anybody
    /// counts.
    pub fn restore(&self, filled: impl IntoIterator<Item = (u64, u64)>) {
        self.buckets.iter().for_each(|bucket| bucket.store(0, Relaxed));
        for (value, count) in filled {
            self.buckets[bucket(value)].fetch_add(count, Relaxed);
        }
    }
}

/// A histogram at one moment.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct HistogramSnapshot(Vec<u64>);

impl HistogramSnapshot {
    /// The values of both.
    pub fn with(mut self, other: &Self) -> Self {
        self.0.iter_mut().zip(&other.0).for_each(|(own, other)| *own += other);
        self
    }

    /// The largest value of each bucket that has values, and their number.
    pub fn filled(&self) -> impl Iterator<Item = (u64, u64)> + '_ {
        let buckets = self.0.iter().enumerate().filter(|(_, count)| **count > 0);
        buckets.map(|(index, count)| (upper_bound(index), *count))
    }

    /// Number of values.
    pub fn count(&self) -> u64 {
        self.0.iter().sum()
    }

    /// Number of values below two to the `power`: exact, because buckets end at powers of two.
    pub fn below(&self, power: u32) -> u64 {
        let end = if power >= u64::BITS { BUCKETS } else { bucket(1 << power) };
        self.0[..end].iter().sum()
    }

    /// The sum of all values, each taken as the middle of its bucket: exact to 1/16, and it never
    /// goes down while values are added.
    pub fn sum(&self) -> u64 {
        let middle = |index: usize| {
            let lower = if index == 0 { 0 } else { upper_bound(index - 1) + 1 };
            lower + (upper_bound(index) - lower) / 2
        };
        let products = self.0.iter().enumerate().filter(|(_, n)| **n > 0);
        products
            .fold(0, |sum: u64, (index, n)| sum.saturating_add(middle(index).saturating_mul(*n)))
    }

    /// The value at or below which a share `q` (0 to 1) of the values lie: the upper bound of its
    /// bucket. `None` without values.
    pub fn quantile(&self, q: f64) -> Option<u64> {
        let count = self.count();
        let rank = ((count as f64 * q).ceil() as u64).clamp(1, count.max(1));
        let mut seen = 0;
        for (index, n) in self.0.iter().enumerate() {
            seen += n;
            if *n > 0 && seen >= rank {
                return Some(upper_bound(index));
            }
        }
        None
    }
}

fn bucket(value: u64) -> usize {
    if value < SUB {
        return value as usize;
    }
    let shift = value.ilog2() - SUB.ilog2();
    ((u64::from(shift) + 1) * SUB + (value >> shift) - SUB) as usize
}

fn upper_bound(index: usize) -> u64 {
    let index = index as u64;
    if index < SUB {
        return index;
    }
    let (shift, sub) = (index / SUB - 1, index % SUB + SUB);
    (u128::from(sub + 1) << shift).wrapping_sub(1).min(u128::from(u64::MAX)) as u64
}

#[cfg(test)]
mod tests {
    use super::{BUCKETS, Histogram, bucket, upper_bound};

    #[test]
    fn every_value_has_a_bucket_and_its_bound_is_close() {
        for shift in 0..64 {
            for value in [1u64 << shift, (1u64 << shift) | 1, u64::MAX >> shift] {
                let index = bucket(value);
                assert!(index < BUCKETS, "{value}");
                let bound = upper_bound(index);
                assert!(bound >= value && bound - value <= value / 8, "{value} {bound}");
            }
        }
    }

    #[test]
    fn counts_below_a_power_are_exact_and_the_sum_is_close() {
        let histogram = Histogram::default();
        let values = [0, 1, 7, 8, 1023, 1024, 1025, 1 << 30, u64::MAX];
        values.iter().for_each(|value| histogram.record(*value));
        let snapshot = histogram.snapshot();
        for power in 0..=64 {
            let below = values.iter().filter(|value| u128::from(**value) < 1u128 << power).count();
            assert_eq!(snapshot.below(power), below as u64, "{power}");
        }
        histogram.record(u64::MAX);
        assert_eq!(histogram.snapshot().sum(), u64::MAX, "it saturates");
        let histogram = Histogram::default();
        (1..=100_000).for_each(|value| histogram.record(value));
        let (sum, exact) = (histogram.snapshot().sum(), 100_000 * 100_001 / 2);
        assert!(sum.abs_diff(exact) <= exact / 16, "{sum}");
    }

    #[test]
    fn a_snapshot_comes_back() {
        let histogram = Histogram::default();
        (0..64).for_each(|shift| histogram.record(u64::MAX >> shift));
        (0..100).for_each(|value| histogram.record(value * value));
        let (snapshot, other) = (histogram.snapshot(), Histogram::default());
        other.record(12_345);
        other.restore(snapshot.filled());
        assert_eq!(other.snapshot(), snapshot);
    }

    #[test]
    fn quantiles_follow_the_ranks() {
        let histogram = Histogram::default();
        assert_eq!(histogram.snapshot().quantile(0.5), None);
        (1..=1000).for_each(|value| histogram.record(value));
        let snapshot = histogram.snapshot();
        assert_eq!(snapshot.count(), 1000);
        let median = snapshot.quantile(0.5).unwrap();
        assert!((500..=563).contains(&median), "{median}");
        assert!(snapshot.quantile(1.0).unwrap() >= 1000);
    }
}
