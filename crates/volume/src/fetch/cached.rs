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
//! right digests and wrong checksums could empty the cache of all others (held by the
//! simulator). Hashing is bounded by the permits of fetches, one at a time a chunk, and for
//! an image with wrong checksums by a pause between two (`outage.rs`).

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

/// The defect of a chunk in the cache.
enum Problem {
    /// The disk gives no bytes.
    Unreadable,
    /// So many of its blocks are not those that were stored.
    Wrong { blocks: u64 },
}

impl<S, F> Volume<S, F>
where
    S: BlockSource + 'static,
    F: LocalFile + 'static,
{
    /// The chunk `index`, if the cache holds it after all.
    pub(super) async fn from_cache(self: &Arc<Self>, index: u32, cost: &mut Cost) -> Cached {
        let Some(found) = self.residency.look_up(index) else { return Cached::Absent };
        if let Some(turn) = self.engine.outage.hash_turn() {
            tokio::time::sleep_until(turn).await;
        }
        let this = Arc::clone(self);
        let looked = self.cpu.run(move || this.judge(index, found)).await;
        // An error means that the runtime ends, or that the bytes are fetched.
        let (cached, problem) = looked.unwrap_or((Cached::Absent, None));
        let range = self.map.chunk(index).range;
        match problem {
            Some(Problem::Unreadable) => self.engine.outage.cached_unreadable(range),
            Some(Problem::Wrong { blocks }) => {
                cost.cache_corrupt_blocks += blocks;
                self.engine.outage.cached_wrong(range, blocks);
            }
            None => {}
        }
        cached
    }

    /// Hashes a chunk of the cache. If its bytes are wrong, the cache has forgotten it.
    fn judge(&self, index: u32, found: CachedChunk) -> (Cached, Option<Problem>) {
        let chunk = self.map.chunk(index);
        let Some(mut pages) = Pages::zeroed(chunk.range.len()) else {
            return (Cached::Absent, None);
        };
        if !self.residency.read_found(&found, pages.bytes_mut()) {
            // If it is still there, it has to be written elsewhere.
            let is_there = self.residency.doubt(index, &found);
            return (Cached::Absent, is_there.then_some(Problem::Unreadable));
        }
        let bytes = pages.bytes();
        if chunk.codec == Codec::Verified {
            let offset = self.offset(chunk.range);
            let recorded = self.checksums.verify(offset, bytes, |_, _| {});
            return match recorded {
                Ok(true) => (Cached::Right(pages), None),
                _ => (Cached::Unknown(pages, found), None),
            };
        }
        if Digest::of(bytes) != chunk.digest {
            let is_corrupt = self.residency.doubt(index, &found) && !is_hole(bytes);
            let problem = is_corrupt
                .then(|| Problem::Wrong { blocks: self.wrong_blocks(index, bytes).max(1) });
            return (Cached::Absent, problem);
        }
        if !self.map.lacks_checksums()
            && check_blocks(&self.map, chunk.range.start(), bytes).is_err()
        {
            self.engine.outage.map_is_damaged();
        }
        (Cached::Right(pages), None)
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
            let range = self.map.chunk(index).range;
            self.engine.outage.cached_wrong(range, differing as u64);
            cost.cache_corrupt_blocks += differing as u64;
        }
    }
}
