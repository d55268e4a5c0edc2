use std::{
    future::Future,
    path::{Path, PathBuf},
};

use bytes::Bytes;

use crate::{ByteRange, Error, ErrorKind, ObjectId, Result};

/// What tells one state of a local file from another without reading it. The device number is not
/// part of it: it may change when the machine starts again, while a file that is another one has
/// another inode or another change time, which nobody can set.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct FileIdentity {
    /// Number of the inode.
    pub inode: u64,
    /// Length in bytes.
    pub size: u64,
    /// Time of the last change of its content, in nanoseconds since 1970.
    pub mtime_ns: i64,
    /// Time of the last change of its content or attributes, in nanoseconds since 1970.
    pub ctime_ns: i64,
}

/// Reads ranges of objects. What comes back is exactly `range` or an error, and is not verified:
/// that is the reader's part.
pub trait BlockSource: Send + Sync {
    /// The bytes of `range` of `object`. A range beyond the object's end is `Corrupt`: the object
    /// is shorter than its description says.
    fn read(
        &self,
        object: &ObjectId,
        range: ByteRange,
    ) -> impl Future<Output = Result<Bytes>> + Send;

    /// The bytes of `range` of a local file, and which state of the file they are of: it was this
    /// before the read and after it. `Unavailable` if it changed meanwhile, `Invalid` from sources
    /// that have no local files.
    fn read_identified(
        &self,
        object: &ObjectId,
        _range: ByteRange,
    ) -> impl Future<Output = Result<(FileIdentity, Bytes)>> + Send {
        let error = Error::new(ErrorKind::Invalid, format!("{object} is no local file"));
        std::future::ready(Err(error))
    }

    /// The same as [`Self::read`] into `buf`, for sources that can answer without waiting, as bytes that are
    /// computed; `None` from all others: ask [`Self::read`].
    fn read_now(
        &self,
        _object: &ObjectId,
        _range: ByteRange,
        _buf: &mut [u8],
    ) -> Option<Result<()>> {
        None
    }

    /// Bytes that [`Self::read`] would have to bring from where the object is, as far as is known: none
    /// of what is here, or on its way.
    fn bytes_to_fetch(&self, _object: &ObjectId, range: ByteRange) -> u64 {
        range.len()
    }

    /// What [`Self::read`] gave was not what was stored: whoever has it from somewhere else, too, or
    /// keeps what it has read, gives something else next time.
    fn refuted(&self, _object: &ObjectId, _range: ByteRange) {}
}

/// What a store promises one of its writers or its collector, until dropped.
pub struct Lease {
    scratch: PathBuf,
    _guard: Box<dyn Send + Sync>,
}

impl Lease {
    /// A lease with the folder `scratch`, given back when `guard` is dropped.
    pub fn new(scratch: PathBuf, guard: Box<dyn Send + Sync>) -> Self {
        Self { scratch, _guard: guard }
    }

    /// A folder of this writer's own, from which `publish_file` is a rename; removed with the
    /// lease, or by the next collector if the writer is killed.
    pub fn scratch(&self) -> &Path {
        &self.scratch
    }
}

/// What a collector finds when it begins.
pub struct Collecting {
    /// Keeps new writers waiting.
    pub lease: Lease,
    /// Writers at work: nothing they may rely on can be removed.
    pub writers: usize,
    /// Bytes that killed writers had left, now removed.
    pub stale_bytes: u64,
}

/// A store that objects can be published to. Publishing is atomic and durable: an object is
/// there whole or not at all, also after a power loss.
pub trait ObjectStore: Send + Sync {
    /// Publishes the local file `from` as `object`, consuming the file. Replaces what was there.
    fn publish_file(&self, object: &ObjectId, from: &Path) -> Result<()>;
    /// Publishes `bytes` as `object`. Replaces what was there.
    fn publish(&self, object: &ObjectId, bytes: &[u8]) -> Result<()>;
    /// All of a small object, such as a manifest; `Invalid` if longer than `len_max` bytes.
    fn get(&self, object: &ObjectId, len_max: u64) -> Result<Bytes>;
    /// Length in bytes, or `None` if there is no such object.
    fn len(&self, object: &ObjectId) -> Result<Option<u64>>;
    /// Names below `prefix` (a folder), sorted.
    fn list(&self, prefix: &str) -> Result<Vec<ObjectId>>;
    /// Removes `object`; it is no error if it is not there.
    fn remove(&self, object: &ObjectId) -> Result<()>;
    /// Announces a writer: while its lease lives, a collector knows of it.
    fn begin_write(&self) -> Result<Lease>;
    /// Announces the collector: no writer begins while its lease lives. The collector publishes
    /// nothing (publishing would wait for it).
    fn begin_collect(&self) -> Result<Collecting>;
}

/// A local file of the cache or of user data: the seam where tests crash, tear and corrupt.
/// Writes are volatile and unordered until `sync` returns.
pub trait LocalFile: Send + Sync {
    /// Fills `buf` from `offset`; bytes beyond the end and in holes read as zeros.
    fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<()>;
    /// Writes all of `buf` at `offset`.
    fn write_at(&self, offset: u64, buf: &[u8]) -> Result<()>;
    /// Gives the space of a range back; it reads as zeros from then on.
    fn punch_hole(&self, range: ByteRange) -> Result<()>;
    /// The next range at or after `offset` that may hold data; `None` when only holes follow.
    fn next_data(&self, offset: u64) -> Result<Option<ByteRange>>;
    /// Makes everything written before durable.
    fn sync(&self) -> Result<()>;
}
