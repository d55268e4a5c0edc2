//! The fetch of one chunk of an image: from the source to the readers, and into residency.
//!
//! ```text
//!   fetch_task ──► ask: source ──► decompress, digest, checksums ──► publish ──► readers
//!       │ begins to read ahead                                          │
//!       └─────────────────────────────────── keep: checksums, residency ◄┘──► end
//! ```
//!
//! Invariants: readers never wait for the cache write; the fetch ends after the presence bits are
//! set, so nobody fetches the chunk in between (the simulator, `tests/failing_cache.rs`).

use std::sync::Arc;

use burgeon_block::{BlockSource, ByteRange, Error, ErrorKind, LocalFile, ObjectId, Pages, Result};
use burgeon_image::{AddressMap, Chunk, decode_chunk};
use bytes::Bytes;
use tokio::time::Instant;

use super::{
    Begun, Joined,
    in_flight::{Cost, Fetched, InFlight},
    permits::{BackgroundPermit, Permits},
    read_object,
    retry::Question,
};
use crate::{Volume, residency::Place, verify::check_blocks};

impl<S, F> Volume<S, F>
where
    S: BlockSource + 'static,
    F: LocalFile + 'static,
{
    /// Joins or starts the fetch of a chunk of which `piece` is wanted, for a reader. If `patient`,
    /// it waits for a permit. If `wrong`, resident bytes do not count: they were wrong.
    pub(crate) async fn join_or_start(
        self: &Arc<Self>,
        index: u32,
        piece: ByteRange,
        arrived: Instant,
        patient: bool,
        wrong: bool,
    ) -> Result<Joined<Place>> {
        let resident = || self.find(piece).filter(|_| !wrong);
        let start = |begun| self.start(index, begun);
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
    ) -> Joined<Place> {
        let resident = || self.find(self.map.chunk(index).range);
        let start = |begun| self.start(index, begun);
        self.engine.join_or_start_in_background(index.into(), permit, resident, start).await
    }

    /// Begins to fetch a chunk that is neither resident nor in flight; the caller runs the fetch.
    pub(crate) fn begin_new(&self, index: u32, permits: Permits) -> Option<Begun> {
        let resident = || self.find(self.map.chunk(index).range);
        self.engine.begin_new(index.into(), permits, resident)
    }

    pub(crate) fn start(self: &Arc<Self>, index: u32, begun: Begun) {
        tokio::spawn(Arc::clone(self).fetch_task(index, begun));
    }

    /// Fetches one chunk; readers are answered as soon as its bytes are verified.
    pub(crate) async fn fetch_task(self: Arc<Self>, index: u32, begun: Begun) {
        let Begun { in_flight, permits, deadline } = begun;
        let mut cost = Cost::default();
        let of_a_reader = (!permits.is_background()).then(|| self.readers.fetch());
        if of_a_reader.is_some() {
            self.read_ahead(index);
        }
        let result = self.fetch(index, deadline, &mut cost).await;
        drop(of_a_reader);
        self.finish(index, in_flight, permits, result, cost).await;
    }

    /// The verified bytes of a chunk.
    pub(super) async fn fetch(
        &self,
        index: u32,
        deadline: Instant,
        cost: &mut Cost,
    ) -> Result<Pages> {
        let pages = self.engine.ask(&mut ChunkQuestion::new(self, index), deadline, cost).await?;
        cost.materialised_bytes += pages.bytes().len() as u64;
        Ok(pages)
    }

    /// Readers get the result, then residency.
    pub(super) async fn finish(
        self: Arc<Self>,
        index: u32,
        in_flight: InFlight,
        permits: Permits,
        result: Result<Pages>,
        cost: Cost,
    ) {
        let good = result.is_ok();
        let unclaimed = Arc::clone(&self.engine.unclaimed);
        let fetched = Arc::new(Fetched::new(result, cost, unclaimed, permits));
        in_flight.publish(Arc::clone(&fetched));
        let kept = good && self.keep(index, fetched).await;
        // Only now, with the presence bits set, may this chunk be fetched again.
        in_flight.end(kept);
    }

    async fn keep(self: &Arc<Self>, index: u32, fetched: Arc<Fetched>) -> bool {
        if !self.residency.may_admit() {
            self.uncached_chunks.add(1);
            return false;
        }
        let this = Arc::clone(self);
        let write = move || {
            let kept = fetched.bytes().is_ok_and(|bytes| this.admit(index, bytes).is_ok());
            if !kept {
                this.uncached_chunks.add(1);
            }
            kept
        };
        // An error means that the runtime ends: the bytes are fetched again one day.
        self.writers.run(write).await.unwrap_or(false)
    }

    fn admit(&self, index: u32, bytes: &[u8]) -> Result<()> {
        let offset = self.offset(self.map.chunk(index).range);
        self.checksums.record(offset, bytes).inspect_err(|error| self.residency.failed(error))?;
        self.residency.admit(offset, bytes)
    }
}

/// The question for the stored bytes of a chunk.
pub(super) struct ChunkQuestion<'a, S, F> {
    volume: &'a Volume<S, F>,
    index: u32,
    chunk: Chunk,
}

impl<'a, S: BlockSource + 'static, F: LocalFile + 'static> ChunkQuestion<'a, S, F> {
    pub(super) fn new(volume: &'a Volume<S, F>, index: u32) -> Self {
        Self { volume, index, chunk: volume.map.chunk(index) }
    }
}

impl<S: BlockSource + 'static, F: LocalFile + 'static> Question for ChunkQuestion<'_, S, F> {
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
