//! The volume of one image: answers reads of its lazy address space, for all its mounts.
//!
//! ```text
//!   try_read ──► each piece of a chunk: read, verify ──► Served     (hit: nothing else is asked)
//!                                   │     └ no, wrong ─► Absent
//!                                   └ on a disk ───────► Local ──► (engine reads) ──► verify
//!   read ──► each piece of a chunk: join or start ──┬─► resident: read, verify; wrong: fetch
//!            (in order, a few fetches at once)      └─► in flight: wait for its bytes ──► copy
//! ```
//!
//! It joins the parts: `residency/` (the host's cache), `verify.rs` (checksums), `fetch/` (all
//! other bytes) and `background/` (fetches that no reader asked for). No part knows another one. So
//! work that needs several of them is a method of the volume, one file for each: how a
//! chunk is fetched (`fetch/chunk.rs`), a run of chunks (`run.rs`), a chunk that the cache may hold
//! (`cached.rs`), an object that is never cached (`through.rs`), and what begins such work
//! (`background/`: profile, read-ahead, fill, requests). Those files keep no state of their own.
//!
//! Invariant: a miss asks for residency once outside the single-flight table's lock, in `try_read`,
//! and once inside it (`tests/shared_keys.rs`). Only a chunk that the cache may hold all the same,
//! because another image was fetching it or its bytes were wrong, is looked for again.

use std::{collections::VecDeque, os::fd::BorrowedFd, sync::Arc};

use burgeon_block::{
    BLOCK_SIZE, BlockSource, ByteRange, Counter, Counters, Error, ErrorKind, FileRange, LocalFile,
    Now, ObjectId, ObjectKind, Result, Verdict,
};
use burgeon_cache::{Domain, Here};
use burgeon_image::{AddressMap, Codec};
use tokio::time::Instant;

use crate::{
    CacheAccess, CacheState, PrefetchedBytes, VolumeLimits,
    background::{BackgroundWork, prefetched::Purpose},
    fetch::{FetchEngine, Joined, in_flight::Waiter},
    pool::Pool,
    residency::Residency,
    verify::Checksums,
    waits::WaitRecord,
};

/// The lazy data of one image: a map, a source of bytes and the host's cache.
///
/// Mounts of one image share one volume; each brings its own [`Counters`] to every read. Fetches
/// that no reader asked for or waited for are counted in [`Volume::background`]. A volume counts
/// fetches and wrong bytes; hits, misses, failed reads and latencies are counted by the frontend,
/// which sees whole requests.
pub struct Volume<S, F> {
    pub(crate) map: Arc<AddressMap>,
    /// The first lazy address.
    start: u64,
    pub(crate) source: S,
    pub(crate) residency: Residency<Arc<AddressMap>>,
    pub(crate) checksums: Checksums<F>,
    pub(crate) engine: FetchEngine,
    pub(crate) limits: VolumeLimits,
    pub(crate) cpu: Pool,
    pub(crate) writers: Pool,
    pub(crate) background_work: BackgroundWork,
    pub(crate) uncached_chunks: Counter,
    /// By object: read straight through, never cached.
    through: Box<[bool]>,
    any_through: bool,
}

/// A look at a volume's health, for `status`.
#[derive(Clone, Debug)]
pub struct VolumeStatus {
    /// Resident bytes; each is still verified when read. Of very large images an estimate.
    pub materialised_bytes: u64,
    /// The state of the cache: fetched chunks are kept, or not.
    pub cache: CacheState,
    /// Chunks that were served and not kept.
    pub uncached_chunks: u64,
    /// Fetches in flight now, their cache writes included.
    pub in_flight: usize,
    /// Reads that wait for a chunk now.
    pub waiting_readers: usize,
    /// The last failure of the source.
    pub last_source_error: Option<String>,
    /// A checksum of the map is wrong: the chunk's digest was right.
    pub is_map_damaged: bool,
    /// Bytes that were read ahead.
    pub read_ahead: PrefetchedBytes,
}

/// Objects outside the store, which are local already or cost nothing to compute again.
fn is_through(object: &ObjectId) -> bool {
    matches!(object.kind(), Some(ObjectKind::File | ObjectKind::Computed))
}

impl<S, F> Volume<S, F>
where
    S: BlockSource + 'static,
    F: LocalFile + 'static,
{
    /// A volume over `cache`, which may hold anything at all.
    pub fn new(
        map: Arc<AddressMap>,
        source: S,
        cache: CacheAccess,
        limits: VolumeLimits,
    ) -> Arc<Self> {
        Self::over(map, source, (cache, None), limits)
    }

    /// The same of an image without checksums ([`AddressMap::lacks_checksums`]): those of its
    /// blocks are recorded in `checksums` when the blocks are fetched,
    /// [`crate::RECORDED_CHECKSUM_LEN`] bytes each. [`Self::new`] caches nothing of such an
    /// image.
    pub fn without_checksums(
        map: Arc<AddressMap>,
        source: S,
        cache: CacheAccess,
        checksums: F,
        limits: VolumeLimits,
    ) -> Arc<Self> {
        Self::over(map, source, (cache, Some(checksums)), limits)
    }

    fn over(
        map: Arc<AddressMap>,
        source: S,
        (cache, checksums): (CacheAccess, Option<F>),
        limits: VolumeLimits,
    ) -> Arc<Self> {
        let through: Box<[bool]> = map.objects().iter().map(is_through).collect();
        let (data, checksums) = (map.data_range(), Checksums::new(&map, checksums, &limits));
        let residency = match checksums {
            Checksums::Nowhere => Residency::closed(cache, Arc::clone(&map)),
            _ => Residency::open(cache, Arc::clone(&map)),
        };
        Arc::new(Self {
            start: data.start(),
            residency,
            checksums,
            engine: FetchEngine::new(&limits),
            any_through: through.contains(&true),
            through,
            cpu: Pool::new(limits.cpu_threads),
            writers: Pool::new(limits.write_threads),
            background_work: BackgroundWork::new(data),
            uncached_chunks: Counter::default(),
            map,
            source,
            limits,
        })
    }

    /// The map this volume answers by.
    pub fn map(&self) -> &Arc<AddressMap> {
        &self.map
    }

    /// Source of its bytes.
    pub fn source(&self) -> &S {
        &self.source
    }

    /// The account of fetches that no reader waited for.
    pub fn background(&self) -> &Counters {
        &self.engine.unclaimed
    }

    /// The domain of trust that this image's chunks are kept in.
    pub fn domain(&self) -> Domain {
        self.residency.domain()
    }

    /// Resident bytes of lazy data. Each block is still verified when it is read. Of images with
    /// more than 65,536 chunks an estimate.
    pub fn materialised_bytes(&self) -> u64 {
        self.residency.resident_bytes()
    }

    /// The volume's health.
    pub fn status(&self) -> VolumeStatus {
        let prefetched_bytes = |purpose| self.background_work.prefetched_bytes(purpose);
        VolumeStatus {
            materialised_bytes: self.materialised_bytes(),
            cache: match self.checksums.state() {
                CacheState::Writing => self.residency.state(),
                closed => closed,
            },
            uncached_chunks: self.uncached_chunks.get(),
            in_flight: self.engine.in_flight(),
            waiting_readers: self.background_work.waiting_readers(),
            last_source_error: self.engine.outage.last(),
            is_map_damaged: self.engine.outage.is_map_damaged(),
            read_ahead: prefetched_bytes(Purpose::ReadAhead).unwrap_or_default(),
        }
    }

    /// Makes the cache durable. Nothing depends on it: lost blocks are fetched again.
    pub fn sync(&self) -> Result<()> {
        self.checksums.sync()?;
        self.residency.sync()
    }

    /// Answers from local data: verified bytes, or [`Now::Absent`], or [`Now::Local`] where the
    /// cache is on a disk; [`Self::verify`] then judges what was read there. No allocation, no
    /// wait for I/O; the first read of a chunk takes a short lock of the cache. `range` is whole
    /// blocks of [`AddressMap::data_range`], `buf` as long as it and aligned to 4 KiB; anything
    /// else is `Invalid`.
    pub fn try_read(&self, range: ByteRange, buf: &mut [u8]) -> Result<Now> {
        self.read_here(range, buf, false)
    }

    /// The same, but it reads the cache's disk itself; `false` if something is absent.
    pub fn read_local(&self, range: ByteRange, buf: &mut [u8]) -> Result<bool> {
        Ok(self.read_here(range, buf, true)? == Now::Served)
    }

    #[inline(always)]
    fn read_here(&self, range: ByteRange, buf: &mut [u8], may_wait: bool) -> Result<Now> {
        self.check(range, buf)?;
        let mut at = range.start();
        while at < range.end() {
            let (index, piece) = self.piece(at, range)?;
            let out = part(buf, range, piece);
            let is_served = if self.is_through(index) {
                self.read_through_now(index, piece, out)
            } else {
                match self.try_resident(index, piece, out) {
                    Here::Read => self.is_good(piece, out),
                    Here::Gone => false,
                    // A place stands for the first bytes only.
                    Here::Local(_) if may_wait || at > range.start() => {
                        self.read_resident(index, piece, out)
                    }
                    Here::Local(from) => {
                        let rest = ByteRange::new(piece.end(), range.end());
                        return Ok(Now::Local(self.adjoining(from, rest, buf)));
                    }
                }
            };
            if !is_served {
                return Ok(Now::Absent);
            }
            at = piece.end();
        }
        self.background_work.was_read(range);
        Ok(Now::Served)
    }

    /// The place `from` with those of the pieces of `rest` that adjoin it: one read of the disk.
    #[cold]
    fn adjoining(&self, mut from: FileRange, rest: Option<ByteRange>, buf: &mut [u8]) -> FileRange {
        let Some(rest) = rest else { return from };
        let mut at = rest.start();
        while at < rest.end() {
            let Ok((index, piece)) = self.piece(at, rest) else { break };
            let out = &mut buf[from.range.len() as usize..][..piece.len() as usize];
            if self.is_through(index) {
                break;
            }
            match self.try_resident(index, piece, out) {
                Here::Local(next)
                    if next.file == from.file && next.range.start() == from.range.end() =>
                {
                    let joined = ByteRange::new(from.range.start(), next.range.end());
                    from.range = joined.unwrap_or(from.range);
                }
                _ => break,
            }
            at = piece.end();
        }
        from
    }

    /// Judges `bytes`, which were read at the place that [`Self::try_read`] named for `range`. No
    /// allocation, no wait; of wrong bytes it asks for the place again, under a short lock.
    pub fn verify(&self, range: ByteRange, bytes: &[u8]) -> Verdict {
        if self.check(range, bytes).is_ok() && self.is_good(range, bytes) {
            self.background_work.was_read(range);
            return Verdict::Good;
        }
        let last = range.end().checked_sub(BLOCK_SIZE).and_then(|last| self.map.chunk_at(last));
        if let (Some(first), Some(last)) = (self.map.chunk_at(range.start()), last) {
            self.residency.distrust(first..=last);
        }
        Verdict::AskAgain
    }

    /// The cache's file of this number, for [`Now::Local`].
    pub fn local_file(&self, file: u32) -> Option<BorrowedFd<'_>> {
        self.residency.local_file(file)
    }

    /// Answers from wherever the bytes are. Waits at most `limits.deadline` for an answer of the
    /// source, its wait for a permit included. `Corrupt` when the source insists on wrong bytes,
    /// `Unavailable` when it gave none. May be dropped at any await.
    pub async fn read(
        self: &Arc<Self>,
        range: ByteRange,
        buf: &mut [u8],
        counters: &Counters,
    ) -> Result<()> {
        self.read_and_tell(range, buf, counters, &WaitRecord::default()).await
    }

    /// The same; tells of the fetches that it has waited for, also if it fails.
    pub(crate) async fn read_and_tell(
        self: &Arc<Self>,
        range: ByteRange,
        buf: &mut [u8],
        counters: &Counters,
        record: &WaitRecord,
    ) -> Result<()> {
        self.check(range, buf)?;
        let _waiting = self.background_work.reader_waits();
        self.read_pieces(range, buf, counters, record).await?;
        self.background_work.was_read(range);
        Ok(())
    }

    /// Bytes that profiles have prefetched, if there was one since the volume was opened.
    pub fn profile_prefetched(&self) -> Option<PrefetchedBytes> {
        self.background_work.prefetched_bytes(Purpose::Profile)
    }

    fn check(&self, range: ByteRange, buf: &[u8]) -> Result<()> {
        let whole = range.start().is_multiple_of(BLOCK_SIZE)
            && range.end().is_multiple_of(BLOCK_SIZE)
            && range.len() == buf.len() as u64;
        if whole && self.map.data_range().covers(range) { Ok(()) } else { Err(beyond(range)) }
    }

    pub(crate) fn is_through(&self, index: u32) -> bool {
        if !self.any_through {
            return false;
        }
        // A chunk that is stored compressed cannot be read in part.
        let chunk = self.map.chunk(index);
        chunk.codec == Codec::Raw && self.through[chunk.object as usize]
    }

    /// Offset of `range` in the image's data.
    pub(crate) fn offset(&self, range: ByteRange) -> u64 {
        range.start() - self.start
    }

    /// Fills `buf` with the bytes of `piece` of chunk `index`; `false` if they are not resident, or
    /// wrong.
    fn read_resident(&self, index: u32, piece: ByteRange, buf: &mut [u8]) -> bool {
        let offset = piece.start() - self.map.chunk_range(index).start();
        self.residency.read(index, offset as u32, buf) && self.is_good(piece, buf)
    }

    /// The same without a wait, and not verified.
    #[inline(always)]
    fn try_resident(&self, index: u32, piece: ByteRange, buf: &mut [u8]) -> Here {
        let offset = piece.start() - self.map.chunk_range(index).start();
        self.residency.try_read(index, offset as u32, buf)
    }

    #[inline(always)]
    fn is_good(&self, range: ByteRange, bytes: &[u8]) -> bool {
        self.checksums.verify(self.offset(range), bytes, |_, _| {}).unwrap_or(false)
    }

    /// The part of `range` from `at` on that lies in one chunk.
    fn piece(&self, at: u64, range: ByteRange) -> Result<(u32, ByteRange)> {
        let rest = ByteRange::new(at, range.end()).ok_or_else(|| beyond(range))?;
        let index = self.map.chunk_at(at).ok_or_else(|| beyond(rest))?;
        let piece = self.map.chunk_range(index).intersect(rest).ok_or_else(|| beyond(rest))?;
        Ok((index, piece))
    }

    /// Keeps up to `fetches_per_read` fetches in flight and copies their bytes out in order. It
    /// waits for a permit only while it waits for no fetch, so readers cannot starve each other.
    async fn read_pieces(
        self: &Arc<Self>,
        range: ByteRange,
        buf: &mut [u8],
        counters: &Counters,
        record: &WaitRecord,
    ) -> Result<()> {
        let mut pending = Pending::default();
        let arrived = Instant::now();
        let mut at = range.start();
        // The resident bytes of the piece at `at` were wrong: its fetch looks at the whole chunk.
        let mut wrong = false;
        loop {
            if at < range.end() && pending.len() < self.limits.fetches_per_read.max(1) {
                let (index, piece) = self.piece(at, range)?;
                let out = part(buf, range, piece);
                if self.is_through(index) {
                    if !self.read_through_now(index, piece, out) {
                        self.read_through(index, piece, out, arrived, counters, record).await?;
                    }
                    at = piece.end();
                    continue;
                }
                let patient = pending.is_empty();
                match self.join_or_start(index, arrived, patient, wrong).await? {
                    Joined::Resident(()) => {
                        wrong = !self.read_resident(index, piece, out);
                        at = if wrong { at } else { piece.end() };
                        continue;
                    }
                    Joined::InFlight(waiter) => {
                        pending.push(self.map.chunk(index).range, piece, waiter);
                        (at, wrong) = (piece.end(), false);
                        continue;
                    }
                    Joined::NoPermit => {}
                }
            }
            if !pending.copy_next(range, buf, counters, record).await? {
                return Ok(());
            }
        }
    }
}

/// The fetches that one read waits for, in the order of its bytes.
#[derive(Default)]
pub(crate) struct Pending(VecDeque<(ByteRange, ByteRange, Waiter)>);

impl Pending {
    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Waits for the fetch of `whole`, of which `piece` is wanted.
    pub(crate) fn push(&mut self, whole: ByteRange, piece: ByteRange, waiter: Waiter) {
        self.0.push_back((whole, piece, waiter));
    }

    /// Waits for the first of them, and copies its piece into `buf`, which holds `range`; `false`
    /// if there is none.
    pub(crate) async fn copy_next(
        &mut self,
        range: ByteRange,
        buf: &mut [u8],
        counters: &Counters,
        record: &WaitRecord,
    ) -> Result<bool> {
        let Some((whole, piece, mut waiter)) = self.0.pop_front() else { return Ok(false) };
        let fetched = waiter.fetched().await?;
        fetched.claim(counters);
        record.fetched(fetched.failed_tries());
        let skip = (piece.start() - whole.start()) as usize;
        let bytes = &fetched.bytes()?[skip..][..piece.len() as usize];
        part(buf, range, piece).copy_from_slice(bytes);
        Ok(true)
    }
}

/// The part of `buf`, which holds `range`, that holds `piece`.
pub(crate) fn part(buf: &mut [u8], range: ByteRange, piece: ByteRange) -> &mut [u8] {
    let skip = (piece.start() - range.start()) as usize;
    &mut buf[skip..][..piece.len() as usize]
}

fn beyond(range: ByteRange) -> Error {
    Error::new(ErrorKind::Invalid, format!("{range} are not lazy data of this image"))
}
