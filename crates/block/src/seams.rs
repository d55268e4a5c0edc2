use std::{
    fs::File,
    future::Future,
    io,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
};

use bytes::Bytes;

use crate::{ByteRange, Digest, Error, ErrorKind, ObjectId, Result};

/// Distinguishes the states of a local file without reading it. The device number is not part of
/// it: it may change at a reboot, while another file has another inode or another change time,
/// which cannot be set.
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

/// Reads ranges of objects. A read returns exactly `range` or an error; the caller verifies the
/// bytes.
pub trait BlockSource: Send + Sync {
    /// The bytes of `range` of `object`. A range beyond the object's end is `Corrupt`: the object
    /// is shorter than described.
    fn read(
        &self,
        object: &ObjectId,
        range: ByteRange,
    ) -> impl Future<Output = Result<Bytes>> + Send;

    /// The bytes of `range` of a local file, with the file's identity, which was the same before
    /// and after the read. `Unavailable` if it changed meanwhile, `Invalid` from sources without
    /// local files.
    fn read_identified(
        &self,
        object: &ObjectId,
        _range: ByteRange,
    ) -> impl Future<Output = Result<(FileIdentity, Bytes)>> + Send {
        let error = Error::new(ErrorKind::Invalid, format!("{object} is not a local file"));
        std::future::ready(Err(error))
    }

    /// [`Self::read`] into `buf`, for sources that can answer without waiting, such as generated
    /// bytes; `None` from all others: call [`Self::read`].
    fn read_now(
        &self,
        _object: &ObjectId,
        _range: ByteRange,
        _buf: &mut [u8],
    ) -> Option<Result<()>> {
        None
    }

    /// The identity of the bytes of `range` of an object of which [`Self::read`] itself verifies
    /// every byte: ranges with equal identities have equal bytes, whatever their objects are.
    /// `None` if it does not verify them.
    fn identity(
        &self,
        _object: &ObjectId,
        _range: ByteRange,
    ) -> impl Future<Output = Result<Option<Digest>>> + Send {
        std::future::ready(Ok(None))
    }

    /// Bytes that [`Self::read`] would have to fetch from the origin, as far as is known; bytes
    /// that are here or being fetched do not count.
    fn bytes_to_fetch(&self, _object: &ObjectId, range: ByteRange) -> u64 {
        range.len()
    }

    /// Reports that [`Self::read`] returned wrong bytes. A source that has another copy, or caches
    /// reads, does not return them again.
    fn refuted(&self, _object: &ObjectId, _range: ByteRange) {}
}

/// A store's promise to a writer or collector, until dropped.
pub struct Lease {
    scratch: PathBuf,
    _guard: Box<dyn Send + Sync>,
}

impl Lease {
    /// A lease with the folder `scratch`, which ends when `guard` is dropped.
    pub fn new(scratch: PathBuf, guard: Box<dyn Send + Sync>) -> Self {
        Self { scratch, _guard: guard }
    }

    /// The writer's own folder, from which `publish_file` is a rename; removed with the lease, or
    /// by the next collector if the writer is killed.
    pub fn scratch(&self) -> &Path {
        &self.scratch
    }
}

/// The state of a store when a collector begins.
pub struct Collecting {
    /// Keeps new writers waiting.
    pub lease: Lease,
    /// Active writers: nothing they may rely on can be removed.
    pub writers: usize,
    /// Bytes of the leftovers of killed writers, now removed.
    pub stale_bytes: u64,
}

/// A store that objects can be published to. Publishing is atomic and durable: an object exists
/// whole or not at all, also after a power loss.
pub trait ObjectStore: Send + Sync {
    /// Publishes the local file `from` as `object`, consuming the file. Replaces an existing
    /// object.
    fn publish_file(&self, object: &ObjectId, from: &Path) -> Result<()>;
    /// Publishes `bytes` as `object`. Replaces an existing object.
    fn publish(&self, object: &ObjectId, bytes: &[u8]) -> Result<()>;
    /// All of a small object, such as a manifest; `Invalid` if longer than `len_max` bytes.
    fn get(&self, object: &ObjectId, len_max: u64) -> Result<Bytes>;
    /// Length in bytes, or `None` if there is no such object.
    fn len(&self, object: &ObjectId) -> Result<Option<u64>>;
    /// Names below `prefix` (a folder), sorted.
    fn list(&self, prefix: &str) -> Result<Vec<ObjectId>>;
    /// Removes `object`; a missing one is no error.
    fn remove(&self, object: &ObjectId) -> Result<()>;
    /// Announces a writer, which collectors see while its lease lives.
    fn begin_write(&self) -> Result<Lease>;
    /// Announces the collector: no writer begins while its lease lives. The collector publishes
    /// nothing (publishing would wait for it). Leftovers of killed writers are removed.
    fn begin_collect(&self) -> Result<Collecting>;
    /// As [`Self::begin_collect`], for one that only counts: the leftovers stay, if that is
    /// possible.
    fn begin_count(&self) -> Result<Collecting> {
        self.begin_collect()
    }
}

/// A local file of the cache or of user data: the seam at which tests inject crashes, torn writes
/// and corruption. Writes are volatile and unordered until `sync` returns.
pub trait LocalFile: Send + Sync {
    /// Fills `buf` from `offset`; bytes beyond the end and in holes read as zeros.
    fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<()>;
    /// Writes all of `buf` at `offset`.
    fn write_at(&self, offset: u64, buf: &[u8]) -> Result<()>;
    /// Makes everything written before durable.
    fn sync(&self) -> Result<()>;
}

/// Fills `buf` with the bytes of `file` from `offset`; those beyond its end are zeros.
pub fn read_or_zeros(file: &File, mut offset: u64, mut buf: &mut [u8]) -> io::Result<()> {
    while !buf.is_empty() {
        match file.read_at(buf, offset) {
            Ok(0) => {
                buf.fill(0);
                return Ok(());
            }
            Ok(n) => {
                buf = &mut buf[n..];
                offset += n as u64;
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}
