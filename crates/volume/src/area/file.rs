//! Mapped local files: read in place, as long as they are unchanged.
//!
//! ```text
//!   chunk of a file ──► join or start ──► read, with its identity ──► the mapped one? ──► the recorded
//!                                                                     checksums? ──► every waiter
//! ```
//!
//! Nothing is cached: the kernel's page cache has the bytes (held by the simulator and
//! `tests/area.rs`).

use std::{convert::Infallible, sync::Arc};

use burgeon_block::{
    BLOCK_SIZE, BlockSource, ByteRange, Counters, Error, ErrorKind, FileIdentity, LocalFile,
    ObjectId, Pages, Result,
};
use burgeon_image::{Extent, ExtentSource, extents::LogFile};
use bytes::Bytes;
use tokio::time::Instant;

use super::{VirtualArea, source_range};
use crate::{
    fetch::{
        Begun, Joined, check_len,
        in_flight::{Cost, Fetched},
        retry::FetchRequest,
    },
    volume::Pending,
    waits::WaitRecord,
};

/// Blocks of a file that are read, compared and served as one: 64 KiB. A local disk gives them in
/// the time of one block, and it bounds the cost of a 4 KiB read.
const CHUNK_BLOCKS: u64 = 16;

/// A piece of a mapped file, at a multiple of [`CHUNK_BLOCKS`] of it: the same for all mappings
/// that share its source, so that its checksums have one writer.
struct FileChunk {
    source: Arc<ExtentSource>,
    /// Of the file; whole blocks, but for the end of the file.
    range: ByteRange,
    /// The checksum of its first block.
    checksum: u64,
}

impl FileChunk {
    fn new(extent: &Extent, offset: u64) -> Result<Self> {
        let (_, identity) = file_of(&extent.source)?;
        let block = offset / BLOCK_SIZE / CHUNK_BLOCKS * CHUNK_BLOCKS;
        let chunk = source_range(block * BLOCK_SIZE, CHUNK_BLOCKS * BLOCK_SIZE)?;
        let whole = source_range(0, identity.size)?;
        let range = chunk.intersect(whole).filter(|range| range.contains(offset));
        match (range, extent.first_checksum.checked_add(block)) {
            (Some(range), Some(checksum)) => {
                Ok(Self { source: Arc::clone(&extent.source), range, checksum })
            }
            _ => {
                let message = format!("byte {offset} is beyond the end of the mapped file");
                Err(Error::new(ErrorKind::Corrupt, message))
            }
        }
    }
}

fn file_of(source: &ExtentSource) -> Result<(&ObjectId, &FileIdentity)> {
    match source {
        ExtentSource::File { object, identity } => Ok((object, identity)),
        ExtentSource::Computed(_) | ExtentSource::Image(_) => {
            Err(Error::new(ErrorKind::Invalid, "this extent is of no file"))
        }
    }
}

impl<S, F, L> VirtualArea<S, F, L>
where
    S: BlockSource + 'static,
    F: LocalFile + 'static,
    L: LogFile + 'static,
{
    /// Fills `out` from `offset` of a file on. Keeps up to `fetches_per_read` fetches in flight
    /// and waits for a permit only while it waits for no fetch.
    pub(super) async fn read_file(
        self: &Arc<Self>,
        extent: &Extent,
        offset: u64,
        out: &mut [u8],
        counters: &Counters,
    ) -> Result<()> {
        let range = source_range(offset, out.len() as u64)?;
        let mut pending = Pending::default();
        let (mut at, arrived) = (offset, Instant::now());
        loop {
            if at < range.end() && pending.len() < self.limits.fetches_per_read.max(1) {
                let chunk = FileChunk::new(extent, at)?;
                let blocks = chunk.range.to_blocks();
                let piece = ByteRange::new(at, range.end().min(blocks.end())).unwrap_or(range);
                match self.join_or_start(&Arc::new(chunk), arrived, pending.is_empty()).await? {
                    Joined::InFlight(waiter) => {
                        pending.push(blocks, piece, waiter);
                        at = piece.end();
                        continue;
                    }
                    Joined::NoPermit => {}
                }
            }
            if !pending.copy_next(range, out, counters, &WaitRecord::default()).await? {
                return Ok(());
            }
        }
    }

    async fn join_or_start(
        self: &Arc<Self>,
        chunk: &Arc<FileChunk>,
        arrived: Instant,
        patient: bool,
    ) -> Result<Joined<Infallible>> {
        let start = |begun| {
            tokio::spawn(Arc::clone(self).fetch_task(begun, Arc::clone(chunk)));
        };
        let (key, resident) = (chunk.checksum, || None);
        if patient {
            return self.engine.join_or_start_patiently(key, arrived, resident, start).await;
        }
        let deadline = self.engine.outage.deadline(arrived);
        self.engine.join_or_start(key, None, deadline, resident, start)
    }

    async fn fetch_task(self: Arc<Self>, begun: Begun, chunk: Arc<FileChunk>) {
        let Begun { in_flight, permits, deadline } = begun;
        let mut cost = Cost::default();
        let mut request = FileRequest { area: &self, chunk: &chunk };
        let result = self.engine.ask(&mut request, deadline, &mut cost).await;
        let unclaimed = Arc::clone(&self.engine.unclaimed);
        in_flight.publish(Arc::new(Fetched::new(result, cost, unclaimed, permits)));
        in_flight.end(false);
    }

    /// `bytes`, read from the file with the identity `now`, if they are the mapped ones.
    async fn compare(
        self: &Arc<Self>,
        chunk: &FileChunk,
        now: &FileIdentity,
        bytes: Bytes,
    ) -> Result<Pages> {
        let (_, then) = file_of(&chunk.source)?;
        if then != now {
            let why = difference(then, now);
            return Err(Error::new(
                ErrorKind::Corrupt,
                format!("it has changed since it was mapped: {why}"),
            ));
        }
        let (this, checksum) = (Arc::clone(self), chunk.checksum);
        let compare = move || {
            let mut pages = Pages::zeroed(bytes.len() as u64)
                .ok_or_else(|| Error::new(ErrorKind::LocalIo, "no memory for a chunk"))?;
            pages.bytes_mut()[..bytes.len()].copy_from_slice(&bytes);
            // The chunk was found in the map, so there is one.
            if let Some(mapped) = this.mapped.get() {
                mapped.recorded.hold_to_first(checksum, pages.bytes())?;
            }
            Ok(pages)
        };
        self.cpu.run(compare).await?
    }

    fn note_changed(&self, object: &ObjectId, error: &Error) -> Error {
        let named = Error::new(error.kind(), format!("{} was changed: {error}", object.shown()));
        self.changed_reads.add(1);
        let mut last = self.last.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        last.changed = Some(named.to_string());
        named
    }
}

/// The request for a chunk of a mapped file.
struct FileRequest<'a, S, F, L> {
    area: &'a Arc<VirtualArea<S, F, L>>,
    chunk: &'a FileChunk,
}

impl<S, F, L> FetchRequest for FileRequest<'_, S, F, L>
where
    S: BlockSource + 'static,
    F: LocalFile + 'static,
    L: LogFile + 'static,
{
    type Answer = (FileIdentity, Bytes);
    type Verified = Pages;

    fn key(&self) -> Option<u64> {
        Some(self.chunk.checksum)
    }

    fn name(&self) -> String {
        let object = file_of(&self.chunk.source).map(|(object, _)| object.shown());
        format!("{} of {}", self.chunk.range, object.unwrap_or_default())
    }

    fn asked(&self) -> Option<(&ObjectId, ByteRange)> {
        Some((file_of(&self.chunk.source).ok()?.0, self.chunk.range))
    }

    fn len_asked(&self) -> u64 {
        self.chunk.range.len()
    }

    async fn ask(&mut self) -> Result<(FileIdentity, Bytes)> {
        let (object, _) = file_of(&self.chunk.source)?;
        let (now, bytes) = self.area.source.read_identified(object, self.chunk.range).await?;
        check_len(object, self.chunk.range, &bytes).map(|()| (now, bytes))
    }

    async fn verify(&mut self, (now, bytes): (FileIdentity, Bytes)) -> Result<Pages> {
        let (object, _) = file_of(&self.chunk.source)?;
        let compared = self.area.compare(self.chunk, &now, bytes).await;
        compared.map_err(|error| match error.kind() {
            ErrorKind::Corrupt => self.area.note_changed(object, &error),
            _ => error,
        })
    }
}

fn difference(then: &FileIdentity, now: &FileIdentity) -> String {
    if then.inode != now.inode {
        return "another file has its name now".to_owned();
    }
    if then.size != now.size {
        return format!("it had {} bytes and has {}", then.size, now.size);
    }
    "it was written to, or its attributes changed, after it was mapped".to_owned()
}
