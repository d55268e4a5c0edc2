//! The virtual area of a mount: answers reads of addresses to which content was mapped.
//!
//! ```text
//!   offset ─► extent map ─┬─ computed ─► the source, at once
//!                         ├─ image ────► that image's Volume: its residency, checksums and fetches
//!                         ├─ file ─────► one fetch a chunk: read, same identity? ─► same checksums
//!                         │              as at first? ─► every waiter
//!                         └─ nothing ──► Unmapped: EIO, counted
//! ```
//!
//! Invariants, and the tests that hold them:
//! - An address answers with the same bytes or an error, for ever (the simulator;
//!   `tests/area.rs`).
//! - A file that is not the one that was mapped is an error that names it; a block that was read
//!   once is never answered with other bytes, whatever its attributes claim (`tests/area.rs`).
//! - Without its map every read is an error, and counted (`tests/area.rs`).
//! - Computed bytes count as fetched, so that a fetch limit holds for them, too.

mod file;
mod mapped;

use std::{
    collections::HashMap,
    path::Path,
    sync::{Arc, Mutex, PoisonError, RwLock},
};

use burgeon_block::{
    BlockSource, ByteRange, Counter, Counters, Digest, Error, ErrorKind, LocalFile, Now, ObjectId,
    Result,
};
use burgeon_image::DATA_START;
use burgeon_image::{
    Extent, ExtentMap, ExtentSource,
    extents::{CHECKSUMS_MAX, FileLog, LogFile},
};

use bytes::Bytes;
use tokio::time::Instant;

use self::mapped::{Mapped, MappedSlot};
use crate::{
    Volume, VolumeLimits,
    fetch::{FetchEngine, in_flight::Bill, read_object, retry::FetchRequest},
    pool::Pool,
    recorded::{RECORDED_CHECKSUM_LEN, RecordedChecksums},
    volume::part,
};

/// Finds the volume of the image with this manifest; it may wait for a disk.
pub type OpenImage<S, F> = Box<dyn Fn(&Digest) -> Result<Arc<Volume<S, F>>> + Send + Sync>;

/// Opens the checksums of mapped files, of this length in bytes.
pub type OpenChecksums<F> = Box<dyn Fn(u64) -> Result<F> + Send + Sync>;

/// Ranges of the lazy addresses of images.
pub(crate) type Ranges<S, F> = Vec<(Arc<Volume<S, F>>, ByteRange)>;

type Images<S, F> = HashMap<Digest, Arc<Volume<S, F>>>;

/// The lazy blocks of one mount to which content is mapped while it runs.
///
/// `L` is the file type of the map. Each read brings the mount's [`Counters`], as for [`Volume`].
pub struct VirtualArea<S, F, L = FileLog> {
    mapped: MappedSlot<F, L>,
    source: S,
    images: RwLock<Images<S, F>>,
    open_image: Arc<OpenImage<S, F>>,
    limits: VolumeLimits,
    cpu: Pool,
    engine: FetchEngine,
    unmapped_reads: Counter,
    changed_reads: Counter,
    last: Mutex<Last>,
}

#[derive(Clone, Default)]
struct Last {
    unmapped: Option<u64>,
    changed: Option<String>,
}

/// A look at an area's health, for `status`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct AreaHealth {
    /// Length in bytes.
    pub size: u64,
    /// Why the map cannot be used: then nothing that is mapped can be read.
    pub problem: Option<String>,
    /// Reads that failed because of that.
    pub lost_reads: u64,
    /// Extents, and ends of mappings.
    pub records: u64,
    /// Reads of addresses to which nothing is mapped.
    pub unmapped_reads: u64,
    /// The last of these addresses.
    pub last_unmapped: Option<u64>,
    /// Fetches of files that were replaced or changed since they were mapped.
    pub changed_reads: u64,
    /// The last of these, with the file's name.
    pub last_changed: Option<String>,
    /// The last failure of the source.
    pub last_source_error: Option<String>,
    /// Fetches of chunks of files in flight now.
    pub in_flight: usize,
}

impl<S, F, L> std::fmt::Debug for VirtualArea<S, F, L> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("VirtualArea").finish_non_exhaustive()
    }
}

impl<S: BlockSource + 'static, F: LocalFile + 'static> VirtualArea<S, F> {
    /// Opens the area of `size` bytes whose map lies in `folder`. The checksums of mapped files are
    /// opened by `open_checksums`; mapped images are found with `open_image` when they are first
    /// read. A map that cannot be used is no error here: it is one of each read
    /// ([`AreaHealth::problem`]).
    pub fn open(
        folder: &Path,
        size: u64,
        source: S,
        open_image: OpenImage<S, F>,
        open_checksums: OpenChecksums<F>,
        limits: VolumeLimits,
    ) -> Arc<Self> {
        let folder = folder.to_owned();
        let name = folder.display().to_string();
        let open = move || {
            let map = ExtentMap::open(&folder)?;
            // Sparse: 8 bytes for a block that was read.
            let recorded = open_checksums(CHECKSUMS_MAX * RECORDED_CHECKSUM_LEN)?;
            Ok(Mapped { map, recorded: RecordedChecksums::new(recorded, 0) })
        };
        let mapped = MappedSlot::open(name, size, Box::new(open));
        Self::over(mapped, source, open_image, limits)
    }
}

impl<S, F, L> VirtualArea<S, F, L>
where
    S: BlockSource + 'static,
    F: LocalFile + 'static,
    L: LogFile + 'static,
{
    /// The same over any files, for the simulation.
    pub fn over_files(
        map: ExtentMap<L>,
        source: S,
        recorded: F,
        open_image: OpenImage<S, F>,
        limits: VolumeLimits,
    ) -> Arc<Self> {
        let mapped = MappedSlot::of(Mapped { map, recorded: RecordedChecksums::new(recorded, 0) });
        Self::over(mapped, source, open_image, limits)
    }

    fn over(
        mapped: MappedSlot<F, L>,
        source: S,
        open_image: OpenImage<S, F>,
        limits: VolumeLimits,
    ) -> Arc<Self> {
        Arc::new(Self {
            mapped,
            source,
            images: RwLock::default(),
            open_image: Arc::new(open_image),
            cpu: Pool::new(limits.cpu_threads),
            engine: FetchEngine::new(&limits),
            unmapped_reads: Counter::default(),
            changed_reads: Counter::default(),
            last: Mutex::default(),
            limits,
        })
    }

    /// Length in bytes.
    pub fn size(&self) -> u64 {
        self.mapped.size()
    }

    /// Sees new mappings, and a map that can be used again; forgets images whose sources have
    /// failed, so that they are looked for anew.
    pub fn refresh(&self) -> Result<()> {
        let mut images = self.images.write().unwrap_or_else(PoisonError::into_inner);
        images.retain(|_, volume| volume.status().last_source_error.is_none());
        drop(images);
        self.mapped.refresh()
    }

    /// Makes the recorded checksums of mapped files durable.
    pub fn sync(&self) -> Result<()> {
        self.mapped.get().map_or(Ok(()), |mapped| mapped.recorded.sync())
    }

    /// The area's health.
    pub fn status(&self) -> AreaHealth {
        let last = self.last.lock().unwrap_or_else(PoisonError::into_inner).clone();
        AreaHealth {
            size: self.mapped.size(),
            problem: self.mapped.problem(),
            lost_reads: self.mapped.lost_reads(),
            records: self.mapped.get().map_or(0, |mapped| mapped.map.records()),
            unmapped_reads: self.unmapped_reads.get(),
            last_unmapped: last.unmapped,
            changed_reads: self.changed_reads.get(),
            last_changed: last.changed,
            last_source_error: self.engine.outage.last().or_else(|| self.error_of_images()),
            in_flight: self.engine.in_flight(),
        }
    }

    fn error_of_images(&self) -> Option<String> {
        let images = self.images.read().unwrap_or_else(PoisonError::into_inner);
        images.values().find_map(|volume| volume.status().last_source_error)
    }

    /// The account of fetches that no reader waited for.
    pub fn background(&self) -> &Counters {
        &self.engine.unclaimed
    }

    /// Answers from local bytes. `range` is whole blocks of the area; without `may_fetch` bytes
    /// that would have to be computed are `Absent`, too. `Unmapped` where nothing is mapped.
    pub fn try_read(
        &self,
        range: ByteRange,
        buf: &mut [u8],
        counters: &Counters,
        may_fetch: bool,
    ) -> Result<Now> {
        let mut at = range.start();
        while at < range.end() {
            let (extent, piece, offset) = self.piece(at, range)?;
            let out = part(buf, range, piece);
            let served = match &*extent.source {
                ExtentSource::Computed(object) => {
                    may_fetch && self.compute_now(object, offset, out, counters)?
                }
                ExtentSource::Image(digest) => match self.image_now(digest) {
                    Some(volume) => {
                        let lazy = lazy_range(offset, piece.len())?;
                        volume.read_local(lazy, out)?
                    }
                    None => false,
                },
                // The kernel's page cache is the only one a local file needs.
                ExtentSource::File { .. } => false,
            };
            if !served {
                return Ok(Now::Absent);
            }
            at = piece.end();
        }
        Ok(Now::Served)
    }

    /// Answers from wherever the bytes are. Waits at most `limits.deadline` for an answer of a
    /// source, its wait for a permit included. May be dropped at any await.
    pub async fn read(
        self: &Arc<Self>,
        range: ByteRange,
        buf: &mut [u8],
        counters: &Counters,
    ) -> Result<()> {
        let mut at = range.start();
        while at < range.end() {
            let (extent, piece, offset) = self.piece(at, range)?;
            let out = part(buf, range, piece);
            match &*extent.source {
                ExtentSource::Computed(object) => {
                    self.compute(object, offset, out, counters).await?
                }
                ExtentSource::Image(digest) => {
                    let lazy = lazy_range(offset, piece.len())?;
                    self.image(digest).await?.read(lazy, out, counters).await?;
                }
                ExtentSource::File { .. } => self.read_file(&extent, offset, out, counters).await?,
            }
            at = piece.end();
        }
        Ok(())
    }

    /// The parts of `range` that are content of images: their volumes, and the ranges of their
    /// lazy addresses. Other content and unmapped addresses are left out.
    pub(crate) async fn of_images(&self, range: ByteRange) -> Result<Ranges<S, F>> {
        let (mut found, mut at) = (Vec::new(), range.start());
        while at < range.end() {
            let extent = match self.mapped.map()?.find(at) {
                Ok(extent) => extent,
                Err(error) if error.kind() == ErrorKind::Unmapped => break,
                Err(error) => return Err(error),
            };
            let end = extent.range.end().min(range.end());
            if let ExtentSource::Image(digest) = &*extent.source {
                let offset = extent.offset.saturating_add(at - extent.range.start());
                found.push((self.image(digest).await?, lazy_range(offset, end - at)?));
            }
            at = end;
        }
        Ok(found)
    }

    /// The extent at `at`, its part in `range`, and where that begins in the source.
    fn piece(&self, at: u64, range: ByteRange) -> Result<(Extent, ByteRange, u64)> {
        let extent = self.mapped.map_for_read()?.find(at).inspect_err(|error| {
            if error.kind() == ErrorKind::Unmapped {
                self.unmapped_reads.add(1);
                self.last.lock().unwrap_or_else(PoisonError::into_inner).unmapped = Some(at);
            }
        })?;
        let rest = ByteRange::new(at, range.end());
        let piece = rest.and_then(|rest| extent.range.intersect(rest));
        let offset = extent.offset.checked_add(at - extent.range.start());
        match piece.zip(offset) {
            Some((piece, offset)) => Ok((extent, piece, offset)),
            None => {
                let error = Error::new(
                    ErrorKind::Corrupt,
                    format!("the extent of the map at {at} is impossible"),
                );
                tracing::error!(area = self.mapped.name(), %range, %error, "readers get an I/O error");
                Err(error)
            }
        }
    }

    fn compute_now(
        &self,
        object: &ObjectId,
        offset: u64,
        out: &mut [u8],
        counters: &Counters,
    ) -> Result<bool> {
        let range = source_range(offset, out.len() as u64)?;
        let answered = matches!(self.source.read_now(object, range, out), Some(Ok(())));
        if answered {
            counters.fetched_bytes.add(range.len());
        }
        Ok(answered)
    }

    async fn compute(
        &self,
        object: &ObjectId,
        offset: u64,
        out: &mut [u8],
        counters: &Counters,
    ) -> Result<()> {
        if self.compute_now(object, offset, out, counters)? {
            return Ok(());
        }
        let range = source_range(offset, out.len() as u64)?;
        let deadline = self.engine.outage.deadline(Instant::now());
        let mut request = Computed { source: &self.source, object, range };
        let mut bill = Bill::to(counters);
        out.copy_from_slice(&self.engine.ask(&mut request, deadline, bill.cost()).await?);
        Ok(())
    }

    fn image_now(&self, digest: &Digest) -> Option<Arc<Volume<S, F>>> {
        self.images.read().unwrap_or_else(PoisonError::into_inner).get(digest).cloned()
    }

    async fn image(&self, digest: &Digest) -> Result<Arc<Volume<S, F>>> {
        if let Some(volume) = self.image_now(digest) {
            return Ok(volume);
        }
        let (open, wanted) = (Arc::clone(&self.open_image), *digest);
        let volume = self.cpu.run(move || open(&wanted)).await?.map_err(|error| {
            let what = format!("image {digest}, which is mapped, cannot be used");
            let error = Error::with_source(ErrorKind::Unavailable, what, error);
            self.engine.outage.note(None, &error);
            error
        })?;
        let mut images = self.images.write().unwrap_or_else(PoisonError::into_inner);
        Ok(Arc::clone(images.entry(*digest).or_insert(volume)))
    }
}

/// The request for computed bytes, which only their name vouches for.
struct Computed<'a, S> {
    source: &'a S,
    object: &'a ObjectId,
    range: ByteRange,
}

impl<S: BlockSource> FetchRequest for Computed<'_, S> {
    type Answer = Bytes;
    type Verified = Bytes;

    fn key(&self) -> Option<u64> {
        None
    }

    fn name(&self) -> String {
        format!("{} of {}", self.range, self.object.shown())
    }

    fn len_asked(&self) -> u64 {
        self.range.len()
    }

    async fn ask(&mut self) -> Result<Bytes> {
        read_object(self.source, self.object, self.range).await
    }

    async fn verify(&mut self, bytes: Bytes) -> Result<Bytes> {
        Ok(bytes)
    }
}

fn source_range(offset: u64, len: u64) -> Result<ByteRange> {
    ByteRange::at(offset, len).ok_or_else(|| {
        let message = format!("{len} bytes at {offset} are beyond the end of any source");
        Error::new(ErrorKind::Corrupt, message)
    })
}

/// Range of `len` bytes from `offset` of an image's data in its lazy address space.
fn lazy_range(offset: u64, len: u64) -> Result<ByteRange> {
    source_range(offset.saturating_add(DATA_START), len)
}
