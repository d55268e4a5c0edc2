//! A chunk that is fetched although the cache holds it: a read has found its bytes wrong, or it
//! has been admitted since.
//!
//! ```text
//!   whole chunk ── its digest is right ──► these are the bytes: the map's checksum is wrong, another
//!        │         or its seal             image has just admitted them, or has done so before, and
//!        │                                 this one has no record of their checksums yet
//!        └── wrong ──► still at this place? ── no: a miss
//!                         └── yes: the cache forgets it; counted as corrupt, unless it is a hole
//! ```
//!
//! Invariant: checksums of an image alone never make the cache forget a chunk, because an image
//! with right digests and wrong checksums could empty the cache of all others (held by the
//! simulator). Hashing is bounded by the permits of fetches, one at a time a chunk, and for
//! an image with wrong checksums by a pause between two (`outage.rs`).

use std::sync::Arc;

use burgeon_block::{BlockSource, Digest, LocalFile, Pages};
use burgeon_image::Codec;

use super::in_flight::Cost;
use crate::{Volume, recorded::Mismatch, residency::CachedChunk, verify::check_blocks};

/// True for the bytes of a chunk that was evicted when the server was killed: the space is free,
/// and the cache's record of that is lost.
fn is_hole(bytes: &[u8]) -> bool {
    bytes.iter().all(|byte| *byte == 0)
}

/// A chunk of the cache whose bytes are right.
pub(super) struct Cached {
    pub(super) pages: Pages,
    /// It was kept for more than a while.
    pub(super) is_lasting: bool,
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
    pub(super) async fn from_cache(
        self: &Arc<Self>,
        index: u32,
        cost: &mut Cost,
    ) -> Option<Cached> {
        let found = self.residency.look_up(index)?;
        if let Some(turn) = self.engine.outage.hash_turn() {
            tokio::time::sleep_until(turn).await;
        }
        let this = Arc::clone(self);
        // An error means that the runtime ends, or that the bytes are fetched.
        let judged = self.cpu.run(move || this.judge(index, &found)).await.ok()?;
        let range = self.map.chunk(index).range;
        match judged {
            Ok(pages) => {
                let is_lasting = self.residency.is_lasting(&found);
                return pages.map(|pages| Cached { pages, is_lasting });
            }
            Err(Problem::Unreadable) => self.engine.outage.cached_unreadable(range),
            Err(Problem::Wrong { blocks }) => {
                cost.cache_corrupt_blocks += blocks;
                self.engine.outage.cached_wrong(range, blocks);
            }
        }
        None
    }

    /// The bytes of a chunk of the cache, hashed. If they are wrong, the cache has forgotten them;
    /// `None` if there is nothing to say about that.
    fn judge(&self, index: u32, found: &CachedChunk) -> Result<Option<Pages>, Problem> {
        let chunk = self.map.chunk(index);
        let Some(mut pages) = Pages::zeroed(chunk.range.len()) else { return Ok(None) };
        let Some(has_seal) = self.residency.read_found(index, found, pages.bytes_mut()) else {
            // If it is still there, it has to be written elsewhere.
            let is_there = self.residency.doubt(index, found);
            return if is_there { Err(Problem::Unreadable) } else { Ok(None) };
        };
        let bytes = pages.bytes();
        let is_right = match chunk.codec {
            Codec::Verified => has_seal,
            Codec::Raw | Codec::Zstd => Digest::of(bytes) == chunk.digest,
        };
        if !is_right {
            let is_corrupt = self.residency.doubt(index, found) && !is_hole(bytes);
            let wrong = || Problem::Wrong { blocks: self.wrong_blocks(index, bytes).max(1) };
            return if is_corrupt { Err(wrong()) } else { Ok(None) };
        }
        if !self.map.lacks_checksums()
            && check_blocks(&self.map, chunk.range.start(), bytes).is_err()
        {
            self.engine.outage.map_is_damaged();
        }
        Ok(Some(pages))
    }

    /// Blocks of the chunk's `bytes` that have another checksum than is known of them.
    fn wrong_blocks(&self, index: u32, bytes: &[u8]) -> u64 {
        let (offset, mut wrong) = (self.offset(self.map.chunk(index).range), 0);
        let count = |_, why| wrong += u64::from(why == Mismatch::Wrong);
        let verified = self.checksums.verify(offset, bytes, count);
        if verified.is_ok() { wrong } else { 0 }
    }
}
