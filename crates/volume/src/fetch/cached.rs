//! A chunk that is fetched although the cache holds it: a read has found its bytes wrong, or it
//! has been admitted since.
//!
//! ```text
//!   whole chunk ── its digest is right ──► these are the bytes: the map's checksum is wrong, or
//!        │                                 another image has just admitted them
//!        ├── wrong ──► still at this place? ── no: a miss
//!        │                    └── yes: the cache forgets it; counted as corrupt, unless it is a hole
//!        └── no digest is known ──► the fetched bytes tell
//! ```
//!
//! Invariant: a map's checksums alone never make the cache forget a chunk, because an image with
//! right digests and wrong checksums could empty the cache of all others (the simulator's bug
//! `DoubtByTheMapAlone`). Hashing is bounded by the permits of fetches: one at a time a chunk.

use std::sync::Arc;

use burgeon_block::{BLOCK_SIZE, BlockSource, Digest, LocalFile, Pages};
use burgeon_image::Codec;

use super::in_flight::Cost;
use crate::{Volume, recorded::Mismatch, residency::CachedChunk, verify::check_blocks};

/// True for the bytes of a chunk that was evicted when the server was killed: the space is free,
/// and the cache's record of that is lost.
fn is_hole(bytes: &[u8]) -> bool {
    bytes.iter().all(|byte| *byte == 0)
}

/// A chunk of the cache, looked at as a whole.
pub(super) enum Cached {
    /// It is not there, or was wrong.
    Absent,
    /// Its bytes are right.
    Right(Pages),
    /// Its bytes, which nothing here can verify.
    Unknown(Pages, CachedChunk),
}

impl<S, F> Volume<S, F>
where
    S: BlockSource + 'static,
    F: LocalFile + 'static,
{
    /// The chunk `index`, if the cache holds it after all.
    pub(super) async fn from_cache(self: &Arc<Self>, index: u32, cost: &mut Cost) -> Cached {
        let Some(found) = self.residency.look_up(index) else { return Cached::Absent };
        let this = Arc::clone(self);
        let looked = self.cpu.run(move || this.judge(index, found)).await;
        // An error means that the runtime ends, or that the bytes are fetched.
        let (cached, corrupt_blocks) = looked.unwrap_or((Cached::Absent, 0));
        cost.cache_corrupt_blocks += corrupt_blocks;
        cached
    }

    /// Hashes a chunk of the cache. Returns also the number of its corrupt blocks.
    fn judge(&self, index: u32, found: CachedChunk) -> (Cached, u64) {
        let chunk = self.map.chunk(index);
        let Some(mut pages) = Pages::zeroed(chunk.range.len()) else { return (Cached::Absent, 0) };
        if !self.residency.read_found(&found, pages.bytes_mut()) {
            // If it is still there, it has to be written elsewhere.
            self.residency.doubt(index, &found);
            return (Cached::Absent, 0);
        }
        let bytes = pages.bytes();
        if chunk.codec == Codec::Verified {
            let offset = self.offset(chunk.range);
            let recorded = self.checksums.verify(offset, bytes, |_, _| {});
            return match recorded {
                Ok(true) => (Cached::Right(pages), 0),
                _ => (Cached::Unknown(pages, found), 0),
            };
        }
        if Digest::of(bytes) != chunk.digest {
            let is_corrupt = self.residency.doubt(index, &found) && !is_hole(bytes);
            let blocks = if is_corrupt { self.wrong_blocks(index, bytes).max(1) } else { 0 };
            return (Cached::Absent, blocks);
        }
        if !self.map.lacks_checksums()
            && check_blocks(&self.map, chunk.range.start(), bytes).is_err()
        {
            self.engine.outage.map_is_damaged();
        }
        (Cached::Right(pages), 0)
    }

    /// Blocks of the chunk's `bytes` that have another checksum than is known of them.
    fn wrong_blocks(&self, index: u32, bytes: &[u8]) -> u64 {
        let (offset, mut wrong) = (self.offset(self.map.chunk(index).range), 0);
        let count = |_, why| wrong += u64::from(why == Mismatch::Wrong);
        let verified = self.checksums.verify(offset, bytes, count);
        if verified.is_ok() { wrong } else { 0 }
    }

    /// The chunk was fetched: if the cache holds other bytes than these, it forgets them.
    pub(super) fn settle(
        &self,
        index: u32,
        cached: &(Pages, CachedChunk),
        right: &[u8],
        cost: &mut Cost,
    ) {
        let (pages, found) = cached;
        let blocks = |bytes| <[u8]>::chunks(bytes, BLOCK_SIZE as usize);
        let differing = blocks(pages.bytes()).zip(blocks(right)).filter(|(a, b)| a != b).count();
        if differing > 0 && self.residency.doubt(index, found) && !is_hole(pages.bytes()) {
            cost.cache_corrupt_blocks += differing as u64;
        }
    }
}
