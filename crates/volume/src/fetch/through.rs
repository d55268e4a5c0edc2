//! Reads that are never cached: of objects that are local already, or cost nothing to compute
//! again.
//!
//! Each read asks the source for its own bytes, under the same retry policy, and verifies them by
//! the checksums of the map. If they differ, the policy's next try asks for the whole chunk, whose
//! digest tells a damaged map from a wrong answer of the source. Chunks that are stored compressed
//! cannot be read in part; they are fetched and cached as any other.

use std::sync::Arc;

use burgeon_block::{
    BlockSource, ByteRange, Counters, Error, ErrorKind, LocalFile, ObjectId, Result,
};
use burgeon_image::Chunk;
use bytes::Bytes;
use tokio::time::Instant;

use super::{chunk::unpack, in_flight::Bill, read_object, retry::FetchRequest};
use crate::{Volume, verify::check_blocks, waits::WaitRecord};

impl<S, F> Volume<S, F>
where
    S: BlockSource + 'static,
    F: LocalFile + 'static,
{
    /// Reads `piece` of a chunk straight into `buf`.
    pub(crate) async fn read_through(
        self: &Arc<Self>,
        index: u32,
        piece: ByteRange,
        buf: &mut [u8],
        arrived: Instant,
        counters: &Counters,
        record: &WaitRecord,
    ) -> Result<()> {
        let chunk = self.map.chunk(index);
        let stored = stored_piece(&chunk, piece);
        if stored.is_none() {
            buf.fill(0);
            if check_blocks(&self.map, piece.start(), buf).is_ok() {
                return Ok(());
            }
        }
        self.engine.outage.check(index.into())?;
        let deadline = self.engine.outage.deadline(arrived);
        let object = self.map.object(chunk.object);
        let (range, whole) = (stored.unwrap_or(chunk.stored), stored.is_none());
        let (dispute, is_map_wrong) = (None, false);
        let mut request =
            Piece { volume: self, index, piece, object, range, whole, buf, dispute, is_map_wrong };
        let mut bill = Bill::to(counters);
        let result = self.engine.ask(&mut request, deadline, bill.cost()).await;
        if request.is_map_wrong {
            bill.cost().acquit();
        }
        record.fetched(bill.cost().failed_tries());
        result
    }

    /// The same for sources that answer without waiting; `false` if this one does not, or if its
    /// bytes are wrong.
    pub(crate) fn read_through_now(&self, index: u32, piece: ByteRange, buf: &mut [u8]) -> bool {
        let chunk = self.map.chunk(index);
        let Some(range) = stored_piece(&chunk, piece) else { return false };
        let (data, padding) = buf.split_at_mut(range.len() as usize);
        padding.fill(0);
        let answer = self.source.read_now(self.map.object(chunk.object), range, data);
        matches!(answer, Some(Ok(()))) && check_blocks(&self.map, piece.start(), buf).is_ok()
    }
}

/// Range of `piece` of a raw chunk in the chunk's object; shorter than `piece` if the padding of
/// the last block is not stored, `None` if none of it is.
fn stored_piece(chunk: &Chunk, piece: ByteRange) -> Option<ByteRange> {
    let start = chunk.stored.start() + (piece.start() - chunk.range.start());
    ByteRange::at(start, piece.len())?.intersect(chunk.stored)
}

/// The request for a piece of a chunk, and the buffer for it.
struct Piece<'a, S, F> {
    volume: &'a Volume<S, F>,
    index: u32,
    piece: ByteRange,
    object: &'a ObjectId,
    /// The requested range.
    range: ByteRange,
    /// That is the whole chunk.
    whole: bool,
    buf: &'a mut [u8],
    /// An answer for the piece that the map contradicts: which of the two is wrong is not known.
    dispute: Option<(ByteRange, Error)>,
    /// The map was: the answer was counted as wrong, and was right.
    is_map_wrong: bool,
}

impl<S, F> Piece<'_, S, F> {
    /// Ends the dispute, if there is one: it is the source's fault unless the chunk has shown that
    /// the map is wrong.
    fn settle(&mut self) {
        let dispute = self.dispute.take();
        if let Some((range, error)) = dispute.filter(|_| !self.is_map_wrong) {
            self.volume.engine.outage.wrong(Some((self.object, range)), &error);
        }
    }
}

impl<S, F> Drop for Piece<'_, S, F> {
    /// The chunk may never have come.
    fn drop(&mut self) {
        self.settle();
    }
}

impl<S: BlockSource + 'static, F: LocalFile + 'static> Piece<'_, S, F> {
    /// `Corrupt` if the blocks are not those of the map.
    fn take_piece(&mut self, bytes: &[u8]) -> Result<()> {
        let (data, padding) = self.buf.split_at_mut(bytes.len());
        data.copy_from_slice(bytes);
        padding.fill(0);
        check_blocks(&self.volume.map, self.piece.start(), self.buf)
    }

    /// `Corrupt` if the chunk has another digest.
    async fn take_chunk(&mut self, stored: Bytes) -> Result<()> {
        let (map, index, chunk) =
            (Arc::clone(&self.volume.map), self.index, self.volume.map.chunk(self.index));
        let unpacked = self.volume.cpu.run(move || unpack(&map, index, &chunk, &stored)).await??;
        if !unpacked.is_map_right {
            self.volume.engine.outage.map_is_damaged();
        }
        let start = (self.piece.start() - chunk.range.start()) as usize;
        self.buf.copy_from_slice(&unpacked.pages.bytes()[start..start + self.buf.len()]);
        self.is_map_wrong = self.dispute.is_some()
            && check_blocks(&self.volume.map, self.piece.start(), self.buf).is_err();
        Ok(())
    }
}

impl<S: BlockSource + 'static, F: LocalFile + 'static> FetchRequest for Piece<'_, S, F> {
    type Answer = Bytes;
    type Verified = ();

    fn key(&self) -> Option<u64> {
        Some(self.index.into())
    }

    fn name(&self) -> String {
        format!("{} of {}", self.range, self.object.shown())
    }

    fn asked(&self) -> Option<(&ObjectId, ByteRange)> {
        Some((self.object, self.range))
    }

    fn len_asked(&self) -> u64 {
        self.range.len()
    }

    fn is_disputed(&self) -> bool {
        self.dispute.is_some()
    }

    async fn ask(&mut self) -> Result<Bytes> {
        read_object(&self.volume.source, self.object, self.range).await
    }

    async fn verify(&mut self, bytes: Bytes) -> Result<()> {
        let checked = match self.whole {
            false => self.take_piece(&bytes),
            true => self.take_chunk(bytes).await,
        };
        if self.whole {
            self.settle();
        }
        if let Err(error) = &checked
            && error.kind() == ErrorKind::Corrupt
        {
            self.volume.source.refuted(self.object, self.range);
            if !self.whole {
                let error = Error::new(error.kind(), error.to_string());
                self.dispute = Some((self.range, error));
            }
            (self.range, self.whole) = (self.volume.map.chunk(self.index).stored, true);
        }
        checked
    }
}
