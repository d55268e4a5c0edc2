//! Verification of blocks: the checksum that each block of an image must have.
//!
//! ```text
//!   fetched chunk ── digest (fetch/chunk.rs) ──► checksums of the map ──► readers, residency
//!                                                 or, without: recorded ──► recorded.rs
//!   resident block ── Checksums::verify ──► good
//!                          └── not_good(block, why): the caller doubts the block
//! ```
//!
//! Invariant: no resident byte is served that this module has not compared, at every read (the
//! simulator's bugs `SkipCachedChecksum`, `CheckFirstBlockOnly` and `TrustReopenedCache`).

use std::sync::Arc;

use burgeon_block::{BLOCK_SIZE, Error, ErrorKind, LocalFile, Result};
use burgeon_image::AddressMap;

use crate::recorded::RecordedChecksums;

/// Why a resident block is not served.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Mismatch {
    /// Its bytes are wrong.
    Wrong,
    /// Nothing is known of it: a crash may have taken its recorded checksum alone.
    NotRecorded,
}

/// Where the checksums of an image's blocks are.
pub(crate) enum Checksums<F> {
    /// In its address map.
    OfMap {
        /// The map.
        map: Arc<AddressMap>,
        /// Its first lazy address.
        start: u64,
    },
    /// In a file: the image has none, and each block's was recorded when the block was fetched.
    Recorded(RecordedChecksums<F>),
    /// Nowhere: no block can be verified later, so none is kept.
    Nowhere,
}

impl<F: LocalFile> Checksums<F> {
    /// Those of the image of `map`; `file` is for recorded ones.
    pub(crate) fn new(map: &Arc<AddressMap>, file: Option<F>) -> Self {
        match (map.is_unsummed(), file) {
            (false, _) => Self::OfMap { map: Arc::clone(map), start: map.data_range().start() },
            (true, Some(file)) => Self::Recorded(RecordedChecksums::new(file, map.identity())),
            (true, None) => Self::Nowhere,
        }
    }

    /// Whether `bytes` are the blocks from `offset` of the data on. Calls `not_good` for each block that
    /// is not, with its index. An error if that cannot be said.
    #[inline]
    pub(crate) fn verify(
        &self,
        offset: u64,
        bytes: &[u8],
        mut not_good: impl FnMut(u64, Mismatch),
    ) -> Result<bool> {
        let mut index = offset / BLOCK_SIZE;
        let mut good = true;
        match self {
            Self::OfMap { map, start } => {
                let kind = map.checksum_kind();
                let mut address = start + offset;
                for block in bytes.chunks_exact(BLOCK_SIZE as usize) {
                    if kind.of(block) != map.block_checksum(address) {
                        good = false;
                        not_good(index, Mismatch::Wrong);
                    }
                    address += BLOCK_SIZE;
                    index += 1;
                }
            }
            Self::Recorded(recorded) => recorded.compare(index, bytes, |block, why| {
                good = false;
                not_good(block, why);
            })?,
            Self::Nowhere => good = false,
        }
        Ok(good)
    }

    /// Records the checksums of the fetched blocks from `offset` on, where they have to be, before the
    /// blocks are kept.
    pub(crate) fn record(&self, offset: u64, bytes: &[u8]) -> Result<()> {
        match self {
            Self::Recorded(recorded) => recorded.record(offset / BLOCK_SIZE, bytes),
            Self::OfMap { .. } | Self::Nowhere => Ok(()),
        }
    }

    /// Makes the recorded ones durable.
    pub(crate) fn sync(&self) -> Result<()> {
        match self {
            Self::Recorded(recorded) => recorded.sync(),
            Self::OfMap { .. } | Self::Nowhere => Ok(()),
        }
    }
}

/// Verifies fetched blocks from the lazy address `start` by the map: `Corrupt` if one is wrong.
pub(crate) fn check_blocks(map: &AddressMap, start: u64, bytes: &[u8]) -> Result<()> {
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
