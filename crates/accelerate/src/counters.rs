//! Counters of a cached device: 64-bit numbers that only grow, kept on the cache device.

use std::sync::Arc;

use burgeon_block::Counter;

use crate::format::COUNTERS;

/// The counters of one device, in the order in which they are stored.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(usize)]
pub enum Count {
    /// Bytes asked for by reads.
    ReadBytes,
    /// Of these, bytes from the cache device.
    CacheHitBytes,
    /// Of these, bytes from memory.
    MemoryHitBytes,
    /// Of these, bytes from the slow device.
    MissBytes,
    /// Bytes of writes.
    WrittenBytes,
    /// Bytes erased.
    ErasedBytes,
    /// Flushes, and writes with FUA.
    Flushes,
    /// Bytes read from the slow device.
    SlowReadBytes,
    /// Bytes written to the slow device.
    SlowWrittenBytes,
    /// Bytes of blocks written to the cache device.
    CacheWrittenBytes,
    /// Other bytes written to the cache device: superblocks, bitmaps, index, heads of the log.
    CacheMetaBytes,
    /// Bytes that bypassed the cache because of the sequential cut-off.
    BypassedBytes,
    /// Cached blocks whose check was wrong: never served.
    CorruptBlocks,
    /// Errors of the cache device.
    CacheErrors,
    /// Errors of the slow device.
    SlowErrors,
    /// Blocks that were dropped because of an unclean stop or another owner.
    DroppedBlocks,
}

impl Count {
    /// All, with their names in JSON.
    pub const ALL: [(Self, &str); COUNTERS] = [
        (Self::ReadBytes, "read_bytes"),
        (Self::CacheHitBytes, "cache_hit_bytes"),
        (Self::MemoryHitBytes, "memory_hit_bytes"),
        (Self::MissBytes, "miss_bytes"),
        (Self::WrittenBytes, "written_bytes"),
        (Self::ErasedBytes, "erased_bytes"),
        (Self::Flushes, "flushes"),
        (Self::SlowReadBytes, "slow_read_bytes"),
        (Self::SlowWrittenBytes, "slow_written_bytes"),
        (Self::CacheWrittenBytes, "cache_written_bytes"),
        (Self::CacheMetaBytes, "cache_meta_bytes"),
        (Self::BypassedBytes, "bypassed_bytes"),
        (Self::CorruptBlocks, "corrupt_blocks"),
        (Self::CacheErrors, "cache_errors"),
        (Self::SlowErrors, "slow_errors"),
        (Self::DroppedBlocks, "dropped_blocks"),
    ];
}

/// Memory of counters, which may outlive the process.
#[derive(Default)]
#[repr(C)]
pub struct Cells {
    counters: [Counter; COUNTERS],
    /// More than 0 once the slow device has lost writes. It is not stored on the cache device.
    lost: Counter,
}

/// The counters of one device.
#[derive(Clone)]
pub struct Counts(Arc<dyn AsRef<Cells> + Send + Sync>);

/// Counters that end with the process.
#[derive(Default)]
struct Own(Cells);

impl AsRef<Cells> for Own {
    fn as_ref(&self) -> &Cells {
        &self.0
    }
}

impl Default for Counts {
    fn default() -> Self {
        Self(Arc::new(Own::default()))
    }
}

impl Counts {
    /// Counters in memory that others see, too.
    pub fn shared(cells: Arc<dyn AsRef<Cells> + Send + Sync>) -> Self {
        Self(cells)
    }

    fn cells(&self) -> &Cells {
        (*self.0).as_ref()
    }

    /// Counters that go on from stored ones.
    pub(crate) fn from_stored(stored: [u64; COUNTERS]) -> Self {
        let counts = Self::default();
        counts.add_all(stored);
        counts
    }

    pub(crate) fn add_all(&self, values: [u64; COUNTERS]) {
        self.cells().counters.iter().zip(values).for_each(|(counter, value)| counter.add(value));
    }

    /// Adds `n`.
    #[inline]
    pub fn add(&self, count: Count, n: u64) {
        self.cells().counters[count as usize].add(n);
    }

    /// The current value.
    pub fn get(&self, count: Count) -> u64 {
        self.cells().counters[count as usize].get()
    }

    /// Notes that the slow device has lost writes.
    pub(crate) fn note_lost(&self) {
        self.cells().lost.add(1);
    }

    /// True if the slow device has lost writes since this memory was made.
    pub fn has_lost(&self) -> bool {
        self.cells().lost.get() > 0
    }

    pub(crate) fn all(&self) -> [u64; COUNTERS] {
        std::array::from_fn(|at| self.cells().counters[at].get())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::{Counts, Own};

    #[test]
    fn a_loss_outlives_its_process() {
        let memory = Arc::new(Own::default());
        let (before, after) = (Counts::shared(memory.clone()), Counts::shared(memory));
        assert!(!after.has_lost());
        before.note_lost();
        assert!(after.has_lost());
    }
}
