//! The fetch of one chunk of an image: from the source to the readers, and into residency.
//!
//! ```text
//!   start, fetch_task ──► another image's fetch? then in the cache? ──► ask: source ──► verify
//!       │ begins to read ahead    (shared_keys.rs, cached.rs)                             │
//!       └──────────── keep: checksums, residency ◄── readers ◄── publish ◄────────────────┘
//! ```
//!
//! Invariants: readers never wait for the cache write; the fetch ends after the chunk is found in
//! the cache, so nobody fetches it in between (the simulator, `tests/failing_cache.rs`). Bytes of
//! which the map has no digest are those of their key, or an error: the source that has verified
//! them says so (`tests/verified.rs`).

use std::sync::Arc;

use burgeon_block::{BlockSource, ByteRange, Error, ErrorKind, LocalFile, ObjectId, Pages, Result};
use burgeon_cache::Why;
use burgeon_image::{AddressMap, Chunk, Codec, decode_chunk};
use bytes::Bytes;
use tokio::time::Instant;

use super::{
    Begun, Joined,
    in_flight::{Cost, Fetched, InFlight},
    permits::{BackgroundPermit, Permits},
    read_object,
    retry::FetchRequest,
    shared_keys::{Claim, FetchRight},
};
use crate::{Volume, verify::check_blocks};

impl<S, F> Volume<S, F>
where
    S: BlockSource + 'static,
    F: LocalFile + 'static,
{
    /// Joins or starts the fetch of a chunk for a reader. If `patient`, it waits for a permit. If
    /// `wrong`, resident bytes do not count: they were wrong.
    pub(crate) async fn join_or_start(
        self: &Arc<Self>,
        index: u32,
        arrived: Instant,
        patient: bool,
        wrong: bool,
    ) -> Result<Joined<()>> {
        let resident = || (!wrong && self.residency.has(index)).then_some(());
        let start = |begun| self.start(index, begun, Why::Read, wrong);
        let key = index.into();
        if patient {
            return self.engine.join_or_start_patiently(key, arrived, resident, start).await;
        }
        let deadline = self.engine.outage.deadline(arrived);
        self.engine.join_or_start(key, None, deadline, resident, start)
    }

    /// The same for a whole chunk in the background.
    pub(crate) async fn join_or_start_in_background(
        self: &Arc<Self>,
        index: u32,
        permit: Option<BackgroundPermit>,
        why: Why,
    ) -> Joined<()> {
        let is_there = || match why {
            Why::Fill | Why::Pin => self.residency.has_lastingly(index),
            Why::Read | Why::Prefetch => self.residency.has(index),
        };
        let resident = || is_there().then_some(());
        // It may be in memory, which does not last.
        let may_be_there = matches!(why, Why::Fill | Why::Pin);
        let start = |begun| self.start(index, begun, why, may_be_there);
        self.engine.join_or_start_in_background(index.into(), permit, resident, start).await
    }

    /// Begins to fetch a chunk that is neither resident nor in flight, nor in flight for another
    /// image; the caller runs the fetch.
    pub(crate) fn begin_new(&self, index: u32, permits: Permits) -> Option<Begun> {
        let is_coming = || {
            let key = self.residency.own_key(index);
            key.is_some_and(|key| self.limits.shared_keys.has(&key))
        };
        let resident = || (self.residency.has(index) || is_coming()).then_some(());
        self.engine.begin_new(index.into(), permits, resident)
    }

    /// Starts the task of a fetch that has just begun. `may_be_cached` if the cache may hold the
    /// chunk all the same: its bytes were wrong, or do not last.
    pub(crate) fn start(self: &Arc<Self>, index: u32, begun: Begun, why: Why, may_be_cached: bool) {
        // Not in the task, which may run much later: another image's fetch that ends in between
        // would go unseen, and the chunk be fetched twice.
        let claim = self.claim(index);
        tokio::spawn(Arc::clone(self).fetch_task(index, begun, why, (claim, may_be_cached)));
    }

    /// Fetches one chunk; readers are answered as soon as its bytes are verified.
    pub(super) async fn fetch_task(
        self: Arc<Self>,
        index: u32,
        begun: Begun,
        why: Why,
        claim: (Option<Claim>, bool),
    ) {
        let Begun { in_flight, permits, deadline } = begun;
        let mut cost = Cost::default();
        let of_a_reader =
            (!permits.is_background()).then(|| self.background_work.fetches_for_reader());
        if of_a_reader.is_some() {
            self.read_ahead(index);
        }
        let (result, is_cached, turn) =
            self.fetch_unless_cached(index, claim, deadline, &mut cost).await;
        drop(of_a_reader);
        let why = (!is_cached).then_some(why);
        self.finish(index, in_flight, permits, (result, why), cost).await;
        // Only now do other images find it in the cache.
        drop(turn);
    }

    /// The right to fetch a chunk alone, or the fetch of another image; `None` if the chunk has no
    /// key.
    pub(super) fn claim(&self, index: u32) -> Option<Claim> {
        Some(self.limits.shared_keys.begin(self.residency.own_key(index)?))
    }

    /// The verified bytes of a chunk, from the cache if they are right there; true if they are, and
    /// stay there; and the right to fetch it alone, if this task has it.
    async fn fetch_unless_cached(
        self: &Arc<Self>,
        index: u32,
        (claim, mut may_be_cached): (Option<Claim>, bool),
        deadline: Instant,
        cost: &mut Cost,
    ) -> (Result<Pages>, bool, Option<FetchRight>) {
        let turn = match claim {
            Some(Ok(own)) => Some(own),
            Some(Err(other)) => {
                other.ended(deadline).await;
                may_be_cached = true;
                None
            }
            None => None,
        };
        // Else residency was asked when this fetch began.
        if may_be_cached && let Some(cached) = self.from_cache(index, cost).await {
            return (Ok(cached.pages), cached.is_lasting, turn);
        }
        (self.fetch(index, deadline, cost).await, false, turn)
    }

    /// The verified bytes of a chunk, from the source.
    pub(super) async fn fetch(
        &self,
        index: u32,
        deadline: Instant,
        cost: &mut Cost,
    ) -> Result<Pages> {
        let pages = self.engine.ask(&mut ChunkRequest::new(self, index), deadline, cost).await?;
        cost.materialised_bytes += pages.bytes().len() as u64;
        Ok(pages)
    }

    /// Readers get the result, then residency. `why` is `None` for bytes that the cache keeps:
    /// nothing but their checksums may be missing here.
    pub(super) async fn finish(
        self: Arc<Self>,
        index: u32,
        in_flight: InFlight,
        permits: Permits,
        (result, why): (Result<Pages>, Option<Why>),
        cost: Cost,
    ) {
        let good = result.is_ok();
        let unclaimed = Arc::clone(&self.engine.unclaimed);
        let fetched = Arc::new(Fetched::new(result, cost, unclaimed, permits));
        in_flight.publish(Arc::clone(&fetched));
        let kept = good && self.keep(index, fetched, why).await;
        // Only now, when the cache finds it, may this chunk be fetched again.
        in_flight.end(kept);
    }

    /// False if [`Self::admit`] would fail for certain.
    pub(crate) fn may_keep(&self, index: u32, why: Why) -> bool {
        self.checksums.may_record() && self.residency.may_admit(index, why)
    }

    async fn keep(self: &Arc<Self>, index: u32, fetched: Arc<Fetched>, why: Option<Why>) -> bool {
        if !why.map_or(self.checksums.may_record(), |why| self.may_keep(index, why)) {
            self.uncached_chunks.add(1);
            return false;
        }
        let this = Arc::clone(self);
        let write = move || {
            let kept = fetched.bytes().is_ok_and(|bytes| this.admit(index, bytes, why));
            if !kept {
                this.uncached_chunks.add(1);
            }
            kept
        };
        // An error means that the runtime ends: the bytes are fetched again one day.
        self.writers.run(write).await.unwrap_or(false)
    }

    fn admit(&self, index: u32, bytes: &[u8], why: Option<Why>) -> bool {
        let offset = self.offset(self.map.chunk(index).range);
        self.checksums.record(offset, bytes).is_ok()
            && why.is_none_or(|why| self.residency.admit(index, bytes, why))
    }
}

/// The request for the stored bytes of a chunk.
pub(super) struct ChunkRequest<'a, S, F> {
    volume: &'a Volume<S, F>,
    index: u32,
    chunk: Chunk,
}

impl<'a, S: BlockSource + 'static, F: LocalFile + 'static> ChunkRequest<'a, S, F> {
    pub(super) fn new(volume: &'a Volume<S, F>, index: u32) -> Self {
        Self { volume, index, chunk: volume.map.chunk(index) }
    }

    /// `Corrupt` unless the source verifies all bytes of the chunk, and they are those that its key
    /// stands for. The manifest could name another image's chunk.
    async fn check_identity(&self) -> Result<()> {
        let Chunk { codec: Codec::Verified, object, stored, digest, .. } = self.chunk else {
            return Ok(());
        };
        let object = self.volume.map.object(object);
        let identity = self.volume.source.identity(object, stored).await?;
        // Without an identity, the key stands for the object's table.
        if identity.is_some_and(|it| it == digest || self.chunk.lacks_identity()) {
            return Ok(());
        }
        let what = format!(
            "the image names another identity of chunk {} than the table of {} gives",
            self.index,
            object.shown()
        );
        Err(Error::new(ErrorKind::Corrupt, what))
    }
}

impl<S: BlockSource + 'static, F: LocalFile + 'static> FetchRequest for ChunkRequest<'_, S, F> {
    type Answer = Bytes;
    type Verified = Pages;

    fn key(&self) -> Option<u64> {
        Some(self.index.into())
    }

    fn name(&self) -> String {
        let object = self.volume.map.object(self.chunk.object).shown();
        format!("chunk {} ({} of {object})", self.index, self.chunk.stored)
    }

    fn asked(&self) -> Option<(&ObjectId, ByteRange)> {
        Some((self.volume.map.object(self.chunk.object), self.chunk.stored))
    }

    fn len_asked(&self) -> u64 {
        self.chunk.stored.len()
    }

    fn bytes_to_fetch(&self) -> u64 {
        let object = self.volume.map.object(self.chunk.object);
        self.volume.source.bytes_to_fetch(object, self.chunk.stored)
    }

    async fn ask(&mut self) -> Result<Bytes> {
        let object = self.volume.map.object(self.chunk.object);
        read_object(&self.volume.source, object, self.chunk.stored).await
    }

    async fn verify(&mut self, stored: Bytes) -> Result<Pages> {
        self.check_identity().await?;
        let (map, index, chunk) = (Arc::clone(&self.volume.map), self.index, self.chunk);
        let unpacked = self.volume.cpu.run(move || unpack(&map, index, &chunk, &stored)).await?;
        if unpacked.as_ref().is_err_and(|error| error.kind() == ErrorKind::Corrupt) {
            let object = self.volume.map.object(self.chunk.object);
            self.volume.source.refuted(object, self.chunk.stored);
        }
        let Unpacked { pages, is_map_right } = unpacked?;
        if !is_map_right {
            self.volume.engine.outage.map_is_damaged();
        }
        Ok(pages)
    }
}

/// A chunk whose digest is right.
pub(super) struct Unpacked {
    pub(super) pages: Pages,
    /// True if the map's checksums of its blocks are right, too.
    pub(super) is_map_right: bool,
}

/// Decompresses and verifies a chunk. Runs on the CPU pool.
pub(super) fn unpack(
    map: &AddressMap,
    index: u32,
    chunk: &Chunk,
    stored: &[u8],
) -> Result<Unpacked> {
    // The output can never be longer than the map says: the buffer is its bound.
    let mut pages = Pages::zeroed(chunk.range.len())
        .ok_or_else(|| Error::new(ErrorKind::LocalIo, "no memory for a chunk"))?;
    let out = pages.bytes_mut();
    decode_chunk(chunk.codec, stored, out, &chunk.digest).map_err(|error| {
        let object = map.object(chunk.object);
        Error::with_source(error.kind(), format!("chunk {index} from {}", object.shown()), error)
    })?;
    // The digest says that these are the bytes: a checksum that differs is the map's, which opening
    // does not verify.
    let is_map_right = map.lacks_checksums() || check_blocks(map, chunk.range.start(), out).is_ok();
    Ok(Unpacked { pages, is_map_right })
}
