use burgeon_block::Counter;

use crate::HitPermille;

/// The figures of a cache. Counts are of this process; bytes are of whole blocks.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct CacheReport {
    /// Bytes that the cache takes now, with those in flight and those not yet freed, without lent
    /// ones.
    pub used: u64,
    /// Most that it may take now.
    pub limit: u64,
    /// The floor: bytes of the file system that stay free.
    pub floor: u64,
    /// Bytes of the file system that are free now.
    pub free: u64,
    /// Chunks that are found.
    pub chunks: u64,
    /// Bytes of chunks that are lent.
    pub lent: u64,
    /// Bytes of chunks that holds keep.
    pub held: u64,
    /// Bytes of chunks admitted.
    pub admitted: u64,
    /// Bytes of chunks refused, because the cache was full, closed, or behind with its evictions.
    pub refused: u64,
    /// Bytes of chunks evicted or forgotten.
    pub evicted: u64,
    /// Bytes of chunks that an owner found, and another had brought.
    pub shared: u64,
    /// Bytes given back to the file system.
    pub punched: u64,
    /// Bytes moved to empty an arena.
    pub moved: u64,
    /// Bytes written: chunks, moved ones, journal and checkpoints.
    pub written: u64,
    /// Chunks that were forgotten, because their bytes were wrong.
    pub doubted: u64,
    /// Reads that failed.
    pub read_errors: u64,
    /// Writes that failed.
    pub write_errors: u64,
    /// Estimated hits at half the size, this size, and twice the size, once enough was read.
    pub hit_permille: Option<HitPermille>,
    /// Bytes of address space in all arenas: at most twice the limit, one arena, and those
    /// that hold lent chunks.
    pub address_space: u64,
}

#[derive(Default)]
pub(crate) struct Tally {
    pub(crate) admitted: Counter,
    pub(crate) refused: Counter,
    pub(crate) evicted: Counter,
    pub(crate) shared: Counter,
    pub(crate) punched: Counter,
    pub(crate) moved: Counter,
    pub(crate) written: Counter,
    pub(crate) doubted: Counter,
    pub(crate) read_errors: Counter,
    pub(crate) write_errors: Counter,
}
