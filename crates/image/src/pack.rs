//! Packs: objects that hold chunks.
//!
//! ```text
//!   Header 64 │ chunk │ chunk │ …           named packs/<BLAKE3 of all of it>
//! ```
//!
//! A pack has no index: manifests hold the position and digest of each chunk. Invariant: a pack
//! that exists under its name is complete.

use std::{
    fs::File,
    io::{BufWriter, Write},
    path::{Path, PathBuf},
    sync::mpsc::{self, SyncSender},
    thread,
};

use burgeon_block::{
    ByteRange, Digest, Error, ErrorKind, ObjectId, ObjectKind, ObjectStore, Result,
};
use zerocopy::{
    FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned,
    little_endian::{U32, U64},
};

use crate::{
    catalog::Added,
    container::{Format, VERSION, check_words},
    corrupt,
};

const FORMAT: Format = Format { magic: *b"BURGPACK", what: "pack" };

/// Stored bytes after which a pack is closed and the next begins: 32 MiB. Large enough to keep
/// the number of objects in a folder or bucket low, small enough to be rewritten if damaged.
const PACK_LEN: u64 = 32 << 20;
/// Longest pack that is read as a whole.
pub(crate) const LEN_MAX: u64 = 1 << 30;

/// The header of a pack.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned, Clone, Copy)]
#[repr(C)]
struct Header {
    magic: [u8; 8],
    version: U32,
    header_len: U32,
    compat: U64,
    ro_compat: U64,
    incompat: U64,
    reserved: [U64; 3],
}

const HEADER_LEN: u64 = size_of::<Header>() as u64;

/// Checks the first 64 bytes of a pack.
pub(crate) fn check_header(bytes: &[u8]) -> Result<()> {
    let (header, _) =
        Header::read_from_prefix(bytes).map_err(|_| corrupt("the pack is truncated"))?;
    check_words(FORMAT, header.magic, header.version.get(), header.incompat.get())
}

/// The object that holds the pack with `digest`.
pub(crate) fn object(digest: &Digest) -> Result<ObjectId> {
    ObjectKind::Pack.object(digest)
}

/// Packs that may wait for publication; with more, the writer waits for the disk.
const QUEUE_LEN: usize = 4;

/// Writes chunks into packs. Another thread publishes full packs, because publication waits for
/// the disk.
pub(crate) struct PackWriter {
    scratch: PathBuf,
    open: Option<OpenPack>,
    /// Closed packs, in order; the open one has the next index.
    closed: Vec<ObjectId>,
    publisher: SyncSender<(ObjectId, PathBuf)>,
    stored_bytes: u64,
}

struct OpenPack {
    path: PathBuf,
    file: BufWriter<File>,
    hasher: blake3::Hasher,
    len: u64,
}

impl OpenPack {
    fn write(&mut self, bytes: &[u8]) -> Result<()> {
        self.hasher.update(bytes);
        self.len += bytes.len() as u64;
        let written = self.file.write_all(bytes);
        written.map_err(|error| Error::io(format!("cannot write {}", self.path.display()), error))
    }
}

/// Calls `work` with a writer whose unfinished packs are in the folder `scratch`. On `Ok`, all
/// packs are in `store`, durably; new ones are in `added`, even after an error.
pub(crate) fn write_packs<T>(
    store: &impl ObjectStore,
    scratch: &Path,
    added: &Added,
    work: impl FnOnce(PackWriter) -> Result<T>,
) -> Result<T> {
    thread::scope(|scope| {
        let (publisher, queue) = mpsc::sync_channel::<(ObjectId, PathBuf)>(QUEUE_LEN);
        let published = scope.spawn(move || {
            queue.iter().try_for_each(|(object, path)| {
                let is_new = store.len(&object)?.is_none();
                store.publish_file(&object, &path)?;
                if is_new {
                    added.push(object);
                }
                Ok(())
            })
        });
        let scratch = scratch.to_owned();
        let (open, closed) = (None, Vec::new());
        let result = work(PackWriter { scratch, open, closed, publisher, stored_bytes: 0 });
        match published.join() {
            // The publisher's error is the cause of the writer's.
            Ok(Err(error)) => Err(error),
            Ok(Ok(())) => result,
            Err(panic) => std::panic::resume_unwind(panic),
        }
    })
}

impl PackWriter {
    /// A writer for builds without stored data; nothing can be appended.
    pub(crate) fn none() -> Self {
        let (publisher, _) = mpsc::sync_channel(0);
        let (scratch, open, closed) = Default::default();
        Self { scratch, open, closed, publisher, stored_bytes: 0 }
    }

    /// Appends a chunk's stored bytes. Returns the index of its pack and its range there.
    pub(crate) fn append(&mut self, stored: &[u8]) -> Result<(u32, ByteRange)> {
        if self.open.as_ref().is_some_and(|open| open.len + stored.len() as u64 > PACK_LEN) {
            self.close()?;
        }
        let index = self.closed.len() as u32;
        if self.open.is_none() {
            self.open = Some(begin(self.scratch.join(format!("pack-{index}")))?);
        }
        let Some(open) = &mut self.open else { unreachable!("it was opened just now") };
        let start = open.len;
        open.write(stored)?;
        self.stored_bytes += stored.len() as u64;
        match ByteRange::new(start, open.len) {
            Some(range) => Ok((index, range)),
            None => unreachable!("a pack only grows"),
        }
    }

    /// Bytes of chunks appended so far.
    pub(crate) fn stored_bytes(&self) -> u64 {
        self.stored_bytes
    }

    /// Ends the current pack: the next chunk goes to another one.
    pub(crate) fn close(&mut self) -> Result<()> {
        let Some(open) = self.open.take() else { return Ok(()) };
        let failed = |error| Error::io(format!("cannot write {}", open.path.display()), error);
        open.file.into_inner().map_err(|error| failed(error.into_error()))?;
        let object = object(&open.hasher.finalize().into())?;
        self.closed.push(object.clone());
        let queued = self.publisher.send((object, open.path));
        queued.map_err(|_| Error::new(ErrorKind::LocalIo, "publishing packs has stopped"))
    }

    /// Closes the last pack. Returns all packs, in the order of their indices.
    pub(crate) fn finish(mut self) -> Result<Vec<ObjectId>> {
        self.close()?;
        Ok(self.closed)
    }
}

fn begin(path: PathBuf) -> Result<OpenPack> {
    let file = File::create_new(&path)
        .map_err(|error| Error::io(format!("cannot create {}", path.display()), error))?;
    let file = BufWriter::with_capacity(1 << 20, file);
    let mut open = OpenPack { path, file, hasher: blake3::Hasher::new(), len: 0 };
    let header = Header {
        magic: FORMAT.magic,
        version: VERSION.into(),
        header_len: (HEADER_LEN as u32).into(),
        compat: 0.into(),
        ro_compat: 0.into(),
        incompat: 0.into(),
        reserved: [0.into(); 3],
    };
    open.write(header.as_bytes())?;
    Ok(open)
}
