//! The seam between volumes and the cache.

use std::{fmt, num::NonZeroU64, os::fd::BorrowedFd};

use burgeon_block::{FileRange, Result};

use crate::ChunkKey;

/// Longest chunk, in bytes.
pub const CHUNK_LEN_MAX: u32 = 4 << 20;

/// The place of an admitted chunk. It is never given to another chunk, and survives no restart.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub struct Place(NonZeroU64);

impl Place {
    /// The place with these bits; `None` for 0, which a table of places may use for "unknown".
    pub fn from_bits(bits: u64) -> Option<Self> {
        NonZeroU64::new(bits).map(Self)
    }

    /// Its bits; never 0.
    pub fn to_bits(self) -> u64 {
        self.0.get()
    }
}

/// The reason for which a chunk was fetched.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum Why {
    /// A reader waits for it.
    Read,
    /// It will probably be read: read-ahead or a profile.
    Prefetch,
    /// The whole image is to be here.
    Fill,
    /// The user pinned its file.
    Pin,
}

/// The state of the cache: fetched chunks are kept, or not.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum CacheState {
    /// They are.
    Writing,
    /// The file system is full: writes start again by themselves.
    NoSpace {
        /// The error that said so.
        reason: String,
    },
    /// The cache's files cannot be written. After a while, new files are tried.
    Stopped {
        /// The error that said so.
        reason: String,
    },
}

/// The answer of [`ChunkStore::try_read`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Here {
    /// The buffer holds the bytes.
    Read,
    /// A read would wait for a disk; the bytes are at this place of a local file.
    Local(FileRange),
    /// The place is stale, or its file cannot be read.
    Gone,
}

/// Keeps chunks from eviction until it is dropped.
#[must_use = "the chunks are held as long as this lives"]
pub struct Hold {
    _release: Box<dyn Send + Sync>,
}

impl Hold {
    /// A hold that ends when `release` is dropped.
    pub fn new(release: impl Send + Sync + 'static) -> Self {
        Self { _release: Box::new(release) }
    }
}

impl fmt::Debug for Hold {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Hold")
    }
}

/// A store of verified chunks that forgets what it likes.
///
/// `find` and `is_at` may be asked from any thread, and take a short lock. `read`, `try_read`,
/// `local_file` and `touch` take no lock and allocate nothing. The others may block.
pub trait ChunkStore: Send + Sync + 'static {
    /// The place of the chunk with this key, if it was admitted and is not forgotten.
    fn find(&self, key: &ChunkKey) -> Option<Place>;

    /// True if [`Self::find`] gives `place` for this key. It does not count as another find.
    fn is_at(&self, place: Place, key: &ChunkKey) -> bool {
        self.find(key) == Some(place)
    }

    /// Fills `buf` with the bytes from `offset` of the chunk at `place`. They are not verified: a
    /// stale place gives zeros, or `false` as a failing file does. It may wait for a disk.
    fn read(&self, place: Place, offset: u32, buf: &mut [u8]) -> bool;

    /// The same without waiting for a disk.
    fn try_read(&self, place: Place, offset: u32, buf: &mut [u8]) -> Here {
        if self.read(place, offset, buf) { Here::Read } else { Here::Gone }
    }

    /// The file of this number of [`Here::Local`], open as long as the store lives.
    fn local_file(&self, _file: u32) -> Option<BorrowedFd<'_>> {
        None
    }

    /// False for a place that is in memory only, and soon given up.
    fn is_lasting(&self, _place: Place) -> bool {
        true
    }

    /// Reports a hit; at most an atomic.
    fn touch(&self, place: Place);

    /// Forgets `key`, if `place` is still its place. The caller has hashed the whole chunk again,
    /// and it is wrong; a mismatch with an image's checksums alone proves nothing.
    fn doubt(&self, place: Place, key: &ChunkKey);

    /// False if [`Self::admit`] would refuse the chunk for certain; a cheap hint.
    fn may_admit(&self, key: &ChunkKey, len: u32, why: Why) -> bool;

    /// Writes `bytes`, at most [`CHUNK_LEN_MAX`] of them, which the caller has just verified to be
    /// those of `key`, and then makes them found. `None` if they were refused or the write failed.
    fn admit(&self, key: ChunkKey, bytes: &[u8], why: Why) -> Option<Place>;

    /// Keeps these chunks, present or yet to come, from eviction while the hold lives. All holds
    /// keep at most 80 % of the limit: `NoSpace`, with the numbers, beyond.
    fn hold(&self, keys: &[ChunkKey]) -> Result<Hold>;

    /// Evicts until `bytes` are free above the floor; returns the bytes that are.
    fn make_room(&self, bytes: u64) -> u64;

    /// States that chunks are kept, or the reason why not.
    fn state(&self) -> CacheState;

    /// Makes the admitted chunks durable.
    fn sync(&self) -> Result<()>;
}
