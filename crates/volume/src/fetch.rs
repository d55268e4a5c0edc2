//! From a chunk's description to its verified bytes: ask, retry, decompress, check.

use std::{sync::Arc, time::Duration};

use burgeon_block::{
    BLOCK_SIZE, BlockSource, ByteRange, Counters, Error, ErrorKind, LocalFile, ObjectId, Pages,
    Result,
};
use burgeon_image::{AddressMap, Chunk, decode_chunk};
use bytes::Bytes;
use tokio::time::{Instant, sleep, timeout};

use crate::{Limits, Volume, flights::Cost};

/// When to try again and when to give up.
pub(crate) struct Tries {
    deadline: Instant,
    pause: Duration,
    pause_max: Duration,
    refetches: u32,
    tries: u32,
    try_timeout: Duration,
    /// Whether the deadline ended them.
    pub(crate) timed_out: bool,
}

impl Tries {
    pub(crate) fn new(limits: &Limits, deadline: Instant) -> Self {
        Self {
            deadline,
            pause: limits.backoff_min,
            pause_max: limits.backoff_max,
            refetches: limits.refetches,
            tries: 1,
            timed_out: false,
            try_timeout: limits.try_timeout,
        }
    }

    /// The answer, or `Unavailable` if it takes too long. A failure is counted in `cost`.
    pub(crate) async fn wait_for<T>(
        &self,
        answer: impl Future<Output = Result<T>>,
        cost: &mut Cost,
    ) -> Result<T> {
        let left = self.deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(Error::new(ErrorKind::Unavailable, "there is no time left to ask"));
        }
        let patience = self.try_timeout.min(left);
        let answer = timeout(patience, answer).await.unwrap_or_else(|_| {
            let message = format!("no answer within {:.1} s", patience.as_secs_f64());
            Err(Error::new(ErrorKind::Unavailable, message))
        });
        answer.inspect_err(|_| cost.source_errors += 1)
    }

    /// Waits until the next try is due, or returns `error` as the last word: a source that cannot
    /// be reached is tried until the deadline, a wrong answer is asked for once more.
    pub(crate) async fn after(&mut self, error: Error, what: String) -> Result<()> {
        self.tries += 1;
        if error.kind() == ErrorKind::Unavailable {
            if Instant::now() + self.pause < self.deadline {
                sleep(self.pause).await;
                self.pause = (self.pause * 2).min(self.pause_max);
                return Ok(());
            }
            self.timed_out = true;
        } else if self.refetches > 0 {
            self.refetches -= 1;
            return Ok(());
        }
        // Readers of a device understand EIO: that a pack is not there is no ENOENT to them.
        let kind = match error.kind() {
            kind @ (ErrorKind::Corrupt | ErrorKind::LocalIo) => kind,
            _ => ErrorKind::Unavailable,
        };
        let message = format!("cannot fetch {what}, given up after {} tries", self.tries - 1);
        Err(Error::with_source(kind, message, error))
    }
}

impl<S, F> Volume<S, F>
where
    S: BlockSource + 'static,
    F: LocalFile + 'static,
{
    /// The verified bytes of a chunk, as often tried as the limits allow, until `deadline`. What it took
    /// is added to `cost`.
    pub(crate) async fn fetch(
        &self,
        index: u32,
        deadline: Instant,
        cost: &mut Cost,
    ) -> Result<Pages> {
        let chunk = self.map.chunk(index);
        let object = self.map.object(chunk.object);
        let mut tries = Tries::new(&self.limits, deadline);
        loop {
            let error = match self.fetch_once(index, &chunk, &tries, cost).await {
                Ok(pages) => {
                    cost.fetches += 1;
                    cost.materialised_bytes += chunk.range.len();
                    return Ok(pages);
                }
                Err(error) => error,
            };
            self.retrying.note(&error);
            let what = format!("chunk {index} ({} of {object})", chunk.stored);
            let again = tries.after(error, what).await;
            again
                .inspect_err(|error| self.retrying.gave_up(index.into(), error, tries.timed_out))?;
        }
    }

    async fn fetch_once(
        &self,
        index: u32,
        chunk: &Chunk,
        tries: &Tries,
        cost: &mut Cost,
    ) -> Result<Pages> {
        let stored = self.ask(chunk, chunk.stored, tries, cost).await?;
        self.unpack(index, stored, cost).await
    }

    /// The verified bytes of a chunk of which `stored` came.
    pub(crate) async fn unpack(&self, index: u32, stored: Bytes, cost: &mut Cost) -> Result<Pages> {
        let (map, chunk) = (Arc::clone(&self.map), self.map.chunk(index));
        let unpacked = self.cpu.run(move || unpack(&map, index, &chunk, &stored)).await?;
        if unpacked.as_ref().is_err_and(|error| error.kind() == ErrorKind::Corrupt) {
            cost.source_corrupt_chunks += 1;
            let chunk = self.map.chunk(index);
            self.source.refuted(self.map.object(chunk.object), chunk.stored);
        }
        if unpacked.is_ok() {
            self.retrying.good();
        }
        unpacked
    }

    /// One question to the source; the answer is as long as asked for.
    pub(crate) async fn ask(
        &self,
        chunk: &Chunk,
        range: ByteRange,
        tries: &Tries,
        cost: &mut Cost,
    ) -> Result<Bytes> {
        let object = self.map.object(chunk.object);
        let answer = async {
            let bytes = self.source.read(object, range).await?;
            check_len(object, range, &bytes).map(|()| bytes)
        };
        let bytes = tries.wait_for(answer, cost).await?;
        cost.fetched_bytes += range.len();
        Ok(bytes)
    }

    /// Reads `piece` of a chunk whose object is not to be cached, straight into `buf`.
    pub(crate) async fn read_through(
        &self,
        index: u32,
        piece: ByteRange,
        buf: &mut [u8],
        arrived: Instant,
        counters: &Counters,
    ) -> Result<()> {
        let chunk = self.map.chunk(index);
        let object = self.map.object(chunk.object);
        let Some(range) = stored_piece(&chunk, piece) else {
            buf.fill(0);
            return check_blocks(&self.map, piece.start(), buf);
        };
        self.retrying.check(index.into())?;
        let deadline = self.retrying.deadline(arrived);
        let mut tries = Tries::new(&self.limits, deadline);
        loop {
            let mut cost = Cost::default();
            let answer = self.ask(&chunk, range, &tries, &mut cost).await;
            let answer = answer.and_then(|bytes| {
                let (data, padding) = buf.split_at_mut(bytes.len());
                data.copy_from_slice(&bytes);
                padding.fill(0);
                check_blocks(&self.map, piece.start(), buf)
                    .inspect_err(|_| {
                        cost.source_corrupt_chunks = 1;
                        self.source.refuted(object, range);
                    })
                    .inspect(|()| cost.fetches = 1)
            });
            cost.add_to(counters);
            let Err(error) = answer else {
                self.retrying.good();
                return Ok(());
            };
            self.retrying.note(&error);
            let again = tries.after(error, format!("{range} of {object}")).await;
            again
                .inspect_err(|error| self.retrying.gave_up(index.into(), error, tries.timed_out))?;
        }
    }

    /// The same for sources that answer without waiting; `false` if this one does not, or if what
    /// it gave is wrong.
    pub(crate) fn read_through_now(&self, index: u32, piece: ByteRange, buf: &mut [u8]) -> bool {
        let chunk = self.map.chunk(index);
        let Some(range) = stored_piece(&chunk, piece) else { return false };
        let (data, padding) = buf.split_at_mut(range.len() as usize);
        padding.fill(0);
        let answer = self.source.read_now(self.map.object(chunk.object), range, data);
        matches!(answer, Some(Ok(()))) && check_blocks(&self.map, piece.start(), buf).is_ok()
    }
}

/// Where the bytes of `piece` of a chunk stored raw lie in its object; shorter than `piece` where
/// the padding of the last block is not stored, `None` where nothing is.
fn stored_piece(chunk: &Chunk, piece: ByteRange) -> Option<ByteRange> {
    let start = chunk.stored.start() + (piece.start() - chunk.range.start());
    ByteRange::at(start, piece.len())?.intersect(chunk.stored)
}

/// Refuses an answer that is not as long as it was asked to be.
pub(crate) fn check_len(object: &ObjectId, range: ByteRange, bytes: &Bytes) -> Result<()> {
    if bytes.len() as u64 == range.len() {
        return Ok(());
    }
    let message = format!("{object} gave {} bytes for {range}", bytes.len());
    Err(Error::new(ErrorKind::Corrupt, message))
}

pub(crate) fn beyond(range: ByteRange) -> Error {
    Error::new(ErrorKind::Invalid, format!("{range} are not lazy data of this image"))
}

/// Decompresses and verifies a chunk. Runs on the CPU pool.
fn unpack(map: &AddressMap, index: u32, chunk: &Chunk, stored: &[u8]) -> Result<Pages> {
    // The output can never be longer than the map says: the buffer is its bound.
    let mut pages = Pages::zeroed(chunk.range.len())
        .ok_or_else(|| Error::new(ErrorKind::LocalIo, "no memory for a chunk"))?;
    let out = pages.bytes_mut();
    decode_chunk(chunk.codec, stored, out, &chunk.digest).map_err(|error| {
        let object = map.object(chunk.object);
        Error::with_source(error.kind(), format!("chunk {index} from {object}"), error)
    })?;
    if map.is_unsummed() {
        return Ok(pages);
    }
    // The digest says that these are the bytes: if a checksum differs, it is the map's.
    check_blocks(map, chunk.range.start(), out).map_err(|error| {
        Error::with_source(ErrorKind::LocalIo, "the image's map file is damaged", error)
    })?;
    Ok(pages)
}

/// Verifies the blocks of `bytes` from the lazy address `start`.
fn check_blocks(map: &AddressMap, start: u64, bytes: &[u8]) -> Result<()> {
    let kind = map.checksum_kind();
    let mut address = start;
    for block in bytes.chunks_exact(BLOCK_SIZE as usize) {
        if kind.of(block) != map.block_checksum(address) {
            let message = format!("the block for address {address} has a wrong {kind} checksum");
            return Err(Error::new(ErrorKind::Corrupt, message));
        }
        address += BLOCK_SIZE;
    }
    Ok(())
}
