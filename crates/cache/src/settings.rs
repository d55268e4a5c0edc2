use std::time::Duration;

/// An amount of space.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Amount {
    /// This many bytes.
    Bytes(u64),
    /// This share of the file system's size, at most 100.
    Percent(u8),
}

impl Amount {
    /// The bytes on a file system of `size` bytes.
    pub fn of(self, size: u64) -> u64 {
        match self {
            Self::Bytes(bytes) => bytes,
            Self::Percent(percent) => size / 100 * u64::from(percent.min(100)),
        }
    }
}

/// The bounds of a cache.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CacheSettings {
    /// Most that the cache takes; `None` for all that is free above the floor.
    pub limit: Option<Amount>,
    /// The floor: space of the file system that the cache leaves free.
    pub keep_free: Amount,
    /// Bytes of memory for chunks that were refused while the cache was full.
    pub memory: u64,
    /// Longest arena file in bytes, at most 16 GiB; smaller caches have shorter ones.
    pub arena_len: u64,
    /// Bytes of journal after which a checkpoint is written.
    pub journal_len: u64,
    /// Longest wait of a record for its journal: what a killed server forgets.
    pub record_age: Duration,
    /// First pause after a failed write; it doubles as long as writes fail.
    pub pause_min: Duration,
    /// Longest such pause.
    pub pause_max: Duration,
}

impl Default for CacheSettings {
    fn default() -> Self {
        Self {
            limit: None,
            keep_free: Amount::Percent(25),
            memory: 64 << 20,
            arena_len: 16 << 30,
            journal_len: 64 << 20,
            record_age: Duration::from_secs(1),
            pause_min: Duration::from_secs(2),
            pause_max: Duration::from_secs(300),
        }
    }
}

/// The bounds at one moment, in bytes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Bounds {
    pub(crate) limit: u64,
    pub(crate) floor: u64,
    pub(crate) free: u64,
    /// `Admin::finished` before `free` was read.
    pub(crate) finished: u64,
    /// Kept free below the limit and above the floor, so that admissions need not wait.
    pub(crate) headroom: u64,
}
