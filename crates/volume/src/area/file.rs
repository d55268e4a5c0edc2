//! Mapped local files: read in place, as long as they are what they were.

use std::{collections::VecDeque, sync::Arc};

use burgeon_block::{
    BLOCK_SIZE, BlockSource, ByteRange, Counters, Error, ErrorKind, FileIdentity, LocalFile,
    ObjectId, Pages, Result,
};
use burgeon_image::{Extent, Source, extents::LogFile};
use bytes::Bytes;
use tokio::time::{Instant, timeout_at};

use super::{VirtualArea, source_range};
use crate::{
    fetch::{Tries, check_len},
    flights::{Cost, Flight, Landed, Seats, Waiter},
    volume::part,
};

/// Blocks of a file that are read, compared and served as one: 64 KiB. A local disk gives them in
/// the time of one block, and it bounds what a 4 KiB read costs.
const CHUNK_BLOCKS: u64 = 16;

/// A piece of a mapped file, at a multiple of [`CHUNK_BLOCKS`] of it: the same for all mappings
/// that share its source, so that its checksums have one writer.
struct FileChunk {
    source: Arc<Source>,
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
                let message = format!("byte {offset} is beyond the end of what was mapped");
                Err(Error::new(ErrorKind::Corrupt, message))
            }
        }
    }
}

fn file_of(source: &Source) -> Result<(&ObjectId, &FileIdentity)> {
    match source {
        Source::File { object, identity } => Ok((object, identity)),
        Source::Computed(_) | Source::Image(_) => {
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
    /// Fills `out` from `offset` of a file on. Keeps up to `flights_per_read` chunks under way and
    /// waits for a seat only while it holds none.
    pub(super) async fn read_file(
        self: &Arc<Self>,
        extent: &Extent,
        offset: u64,
        out: &mut [u8],
        counters: &Counters,
    ) -> Result<()> {
        let range = source_range(offset, out.len() as u64)?;
        let mut flying: VecDeque<(ByteRange, ByteRange, Waiter)> = VecDeque::new();
        let (mut at, arrived) = (offset, Instant::now());
        while at < range.end() || !flying.is_empty() {
            if at < range.end() && flying.len() < self.limits.flights_per_read.max(1) {
                let chunk = FileChunk::new(extent, at)?;
                let blocks = chunk.range.to_blocks();
                let piece = ByteRange::new(at, range.end().min(blocks.end())).unwrap_or(range);
                if let Some(waiter) = self.board(chunk, flying.is_empty(), arrived).await? {
                    flying.push_back((blocks, piece, waiter));
                    at = piece.end();
                    continue;
                }
            }
            if let Some((blocks, piece, mut waiter)) = flying.pop_front() {
                let landed = waiter.landed().await?;
                landed.claim(counters);
                let skip = (piece.start() - blocks.start()) as usize;
                let bytes = &landed.bytes()?[skip..][..piece.len() as usize];
                part(out, range, piece).copy_from_slice(bytes);
            }
        }
        Ok(())
    }

    /// Joins or starts the flight of `chunk` for a reader that came at `arrived`. `None` if there is no
    /// seat and it is not `patient`.
    async fn board(
        self: &Arc<Self>,
        chunk: FileChunk,
        patient: bool,
        arrived: Instant,
    ) -> Result<Option<Waiter>> {
        let mut seat = None;
        loop {
            let deadline = self.retrying.deadline(arrived);
            {
                let mut table = self.flights.lock();
                if let Some(waiter) = table.join(chunk.checksum) {
                    return Ok(Some(waiter));
                }
                self.retrying.check(chunk.checksum)?;
                if let Some(seat) = seat.take().or_else(|| self.seats.try_take()) {
                    let (flight, waiter) = table.insert(chunk.checksum);
                    let seats = Seats { _flight: seat, background: None };
                    drop(table);
                    tokio::spawn(Arc::clone(self).fly(flight, seats, chunk, deadline));
                    return Ok(Some(waiter));
                }
            }
            if !patient {
                return Ok(None);
            }
            seat = match timeout_at(deadline, self.seats.take()).await {
                Ok(seat) => seat,
                Err(_) if self.retrying.deadline(arrived) > deadline => continue,
                Err(_) => return Err(self.retrying.no_room()),
            };
        }
    }

    async fn fly(
        self: Arc<Self>,
        flight: Flight,
        seats: Seats,
        chunk: FileChunk,
        deadline: Instant,
    ) {
        let mut cost = Cost::default();
        let result = self.fetch(&chunk, deadline, &mut cost).await;
        flight.land(Arc::new(Landed::new(result, cost, Arc::clone(&self.background), seats)));
    }

    /// The bytes of a chunk, as they were when they were first read.
    async fn fetch(
        self: &Arc<Self>,
        chunk: &FileChunk,
        deadline: Instant,
        cost: &mut Cost,
    ) -> Result<Pages> {
        let (object, identity) = file_of(&chunk.source)?;
        let mut tries = Tries::new(&self.limits, deadline);
        loop {
            let answer = async {
                let (now, bytes) = self.source.read_identified(object, chunk.range).await?;
                check_len(object, chunk.range, &bytes).map(|()| (now, bytes))
            };
            let error = match tries.wait_for(answer, cost).await {
                Ok((now, bytes)) => {
                    cost.fetched_bytes += chunk.range.len();
                    match self.compare(chunk, identity, &now, bytes).await {
                        Ok(pages) => {
                            cost.fetches += 1;
                            self.retrying.good();
                            return Ok(pages);
                        }
                        // Our own disk's failure is no reason to ask the source again.
                        Err(error) if error.kind() == ErrorKind::LocalIo => return Err(error),
                        Err(error) => {
                            cost.source_corrupt_chunks += 1;
                            self.note_changed(object, &error)
                        }
                    }
                }
                Err(error) => error,
            };
            self.retrying.note(&error);
            let again = tries.after(error, format!("{} of {object}", chunk.range)).await;
            again.inspect_err(|error| {
                self.retrying.gave_up(chunk.checksum, error, tries.timed_out)
            })?;
        }
    }

    async fn compare(
        self: &Arc<Self>,
        chunk: &FileChunk,
        then: &FileIdentity,
        now: &FileIdentity,
        bytes: Bytes,
    ) -> Result<Pages> {
        if then != now {
            let why = difference(then, now);
            return Err(Error::new(
                ErrorKind::Corrupt,
                format!("it is not what was mapped: {why}"),
            ));
        }
        let (this, checksum) = (Arc::clone(self), chunk.checksum);
        let compare = move || {
            let mut pages = Pages::zeroed(bytes.len() as u64)
                .ok_or_else(|| Error::new(ErrorKind::LocalIo, "no memory for a chunk"))?;
            pages.bytes_mut()[..bytes.len()].copy_from_slice(&bytes);
            // The chunk was found in the map, so there is one.
            if let Some(mapped) = this.mapped.get() {
                mapped.first_seen.check(checksum, pages.bytes())?;
            }
            Ok(pages)
        };
        self.cpu.run(compare).await?
    }

    fn note_changed(&self, object: &ObjectId, error: &Error) -> Error {
        let named = Error::new(error.kind(), format!("{object} was changed: {error}"));
        self.changed_reads.add(1);
        let mut last = self.last.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        last.changed = Some(named.to_string());
        named
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
