//! What a cached device counted: 64-bit numbers that only grow, kept on the cache device.

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
    /// Bytes of bitmaps and index written to the cache device.
    CacheMetaBytes,
    /// Bytes that went round the cache because of the sequential cut-off.
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

/// The counters of one device.
#[derive(Default)]
pub struct Counts([Counter; COUNTERS]);

impl Counts {
    /// Counters that go on from stored ones.
    pub(crate) fn from_stored(stored: [u64; COUNTERS]) -> Self {
        let counts = Self::default();
        counts.0.iter().zip(stored).for_each(|(counter, value)| counter.add(value));
        counts
    }

    /// Adds `n`.
    #[inline]
    pub fn add(&self, count: Count, n: u64) {
        self.0[count as usize].add(n);
    }

    /// The current value.
    pub fn get(&self, count: Count) -> u64 {
        self.0[count as usize].get()
    }

    pub(crate) fn all(&self) -> [u64; COUNTERS] {
        std::array::from_fn(|at| self.0[at].get())
    }
}
