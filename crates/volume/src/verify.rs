//! Verification of blocks: the checksum that each block of an image must have.
//!
//! ```text
//!   fetched chunk ── digest (fetch/chunk.rs) ──► checksums of the map ──► readers, residency
//!                                                 or, without: recorded ──► recorded.rs
//!   resident block ── Checksums::verify ──► good
//!                          └── not_good(block, why)
//! ```
//!
//! Invariant: no resident byte is served that this module has not compared, at every read (held
//! by the simulator).

use std::sync::Arc;

use burgeon_block::{BLOCK_SIZE, Error, ErrorKind, LocalFile, Result};
use burgeon_image::AddressMap;

use crate::{
    CacheState, VolumeLimits,
    gate::Gate,
    recorded::{Mismatch, RecordedChecksums},
};

/// Place of the checksums of an image's blocks.
pub(crate) enum Checksums<F> {
    /// In its address map.
    OfMap {
        /// The map.
        map: Arc<AddressMap>,
        /// Its first lazy address.
        start: u64,
    },
    /// In a file: the image has none, and each block's was recorded when the block was fetched.
    Recorded(Recorded<F>),
    /// Nowhere: no block can be verified later, so none is kept.
    Nowhere,
}

/// Recorded checksums, and the gate before their file.
pub(crate) struct Recorded<F> {
    checksums: RecordedChecksums<F>,
    gate: Gate,
}

impl<F: LocalFile> Checksums<F> {
    /// Those of the image of `map`; `file` is for recorded ones.
    pub(crate) fn new(map: &Arc<AddressMap>, file: Option<F>, limits: &VolumeLimits) -> Self {
        match (map.lacks_checksums(), file) {
            (false, _) => Self::OfMap { map: Arc::clone(map), start: map.data_range().start() },
            (true, Some(file)) => {
                let checksums = RecordedChecksums::new(file, map.identity());
                Self::Recorded(Recorded { checksums, gate: Gate::new(limits) })
            }
            (true, None) => Self::Nowhere,
        }
    }

    /// True if `bytes` are the blocks from `offset` of the data on. Calls `not_good` for each
    /// block that is not, with its index. An error if that cannot be said.
    #[inline]
    pub(crate) fn verify(
        &self,
        offset: u64,
        bytes: &[u8],
        mut not_good: impl FnMut(u64, Mismatch),
    ) -> Result<bool> {
        let mut good = true;
        match self {
            Self::OfMap { map, start } => compare(map, start + offset, bytes, |address| {
                good = false;
                not_good((address - start) / BLOCK_SIZE, Mismatch::Wrong);
            }),
            Self::Recorded(recorded) => {
                recorded.checksums.compare(offset / BLOCK_SIZE, bytes, |block, why| {
                    good = false;
                    not_good(block, why);
                })?
            }
            Self::Nowhere => good = false,
        }
        Ok(good)
    }

    /// Records the checksums of the fetched blocks from `offset` on, where they have to be,
    /// before the blocks are kept.
    pub(crate) fn record(&self, offset: u64, bytes: &[u8]) -> Result<()> {
        match self {
            Self::Recorded(Recorded { checksums, gate }) => {
                let recorded = checksums.record(offset / BLOCK_SIZE, bytes);
                match &recorded {
                    Ok(()) => gate.written(),
                    Err(error) => gate.close(error),
                }
                recorded
            }
            Self::OfMap { .. } | Self::Nowhere => Ok(()),
        }
    }

    /// The state of their file, if they have one: checksums are recorded, or not.
    pub(crate) fn state(&self) -> CacheState {
        match self {
            Self::Recorded(recorded) => recorded.gate.state(),
            Self::OfMap { .. } | Self::Nowhere => CacheState::Writing,
        }
    }

    /// True if [`Self::record`] may be tried now.
    pub(crate) fn may_record(&self) -> bool {
        match self {
            Self::Recorded(recorded) => recorded.gate.is_open(),
            Self::OfMap { .. } | Self::Nowhere => true,
        }
    }

    /// Makes the recorded ones durable.
    pub(crate) fn sync(&self) -> Result<()> {
        match self {
            Self::Recorded(recorded) => recorded.checksums.sync(),
            Self::OfMap { .. } | Self::Nowhere => Ok(()),
        }
    }
}

/// Verifies fetched blocks from the lazy address `start` by the map: `Corrupt` if one is wrong.
pub(crate) fn check_blocks(map: &AddressMap, start: u64, bytes: &[u8]) -> Result<()> {
    let mut first = None;
    compare(map, start, bytes, |address| first = first.or(Some(address)));
    first.map_or(Ok(()), |address| {
        let kind = map.checksum_kind();
        let message = format!("the block for address {address} has a wrong {kind} checksum");
        Err(Error::new(ErrorKind::Corrupt, message))
    })
}

/// Calls `wrong` with the address of each block whose checksum is not the map's; `bytes` are the
/// blocks from the lazy address `start` on.
#[inline(always)]
fn compare(map: &AddressMap, start: u64, bytes: &[u8], mut wrong: impl FnMut(u64)) {
    let kind = map.checksum_kind();
    let mut address = start;
    for block in bytes.chunks_exact(BLOCK_SIZE as usize) {
        if kind.of(block) != map.block_checksum(address) {
            wrong(address);
        }
        address += BLOCK_SIZE;
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, atomic::Ordering::Relaxed};

    use burgeon_block::{BLOCK_SIZE, ByteRange, ChecksumKind, Digest, ObjectId};
    use burgeon_btrfs::Tree;
    use burgeon_image::{AddressMap, ChunkEntry, Codec, Manifest};

    use super::{Checksums, Mismatch, Recorded, check_blocks};
    use crate::{VolumeLimits, gate::Gate, memory::Memory, recorded::RecordedChecksums};

    const BLOCKS: usize = 4;
    const BLOCK: usize = BLOCK_SIZE as usize;

    /// The bytes of four blocks, each of which differs from the others.
    fn bytes() -> Vec<u8> {
        (0..BLOCKS).flat_map(|block| vec![block as u8 + 1; BLOCK]).collect()
    }

    fn map() -> Arc<AddressMap> {
        let (bytes, kind) = (bytes(), ChecksumKind::Crc32c);
        let sums = bytes.chunks(BLOCK).flat_map(|block| (kind.of(block) as u32).to_le_bytes());
        let chunk = ChunkEntry {
            blocks: BLOCKS as u8,
            object: 0,
            stored: ByteRange::at(0, bytes.len() as u64).unwrap(),
            codec: Codec::Raw,
            digest: Digest::of(&bytes),
        };
        let manifest = Manifest {
            tree: Tree::default(),
            checksum: kind,
            chunks: vec![chunk],
            objects: vec![ObjectId::new("packs/test").unwrap()],
            block_checksums: sums.collect(),
        };
        Arc::new(AddressMap::from_manifest(&manifest).unwrap())
    }

    /// The blocks that are not good, when `bytes` are taken for those from `first` on.
    fn not_good(checksums: &Checksums<Memory>, first: u64, bytes: &[u8]) -> Vec<(u64, Mismatch)> {
        let mut found = Vec::new();
        let good = checksums
            .verify(first * BLOCK_SIZE, bytes, |block, why| found.push((block, why)))
            .unwrap();
        assert_eq!(good, found.is_empty());
        found
    }

    #[test]
    fn each_block_is_held_to_its_own_checksum_of_the_map() {
        let (map, mut bytes) = (map(), bytes());
        let checksums = Checksums::<Memory>::new(&map, None, &VolumeLimits::default());
        assert_eq!(not_good(&checksums, 0, &bytes), []);
        assert_eq!(not_good(&checksums, 2, &bytes[2 * BLOCK..]), []);
        assert_eq!(not_good(&checksums, 1, &bytes[..BLOCK]), [(1, Mismatch::Wrong)]);
        bytes[3 * BLOCK + 9] ^= 1;
        assert_eq!(not_good(&checksums, 1, &bytes[BLOCK..]), [(3, Mismatch::Wrong)]);
        assert!(check_blocks(&map, map.data_range().start(), &bytes).is_err());
    }

    #[test]
    fn recorded_checksums_tell_wrong_blocks_from_unknown_ones() {
        let file = RecordedChecksums::new(Memory::new(8 * BLOCKS as u64), 77);
        let recorded = Recorded { checksums: file, gate: Gate::new(&VolumeLimits::default()) };
        let (checksums, mut bytes) = (Checksums::Recorded(recorded), bytes());
        checksums.record(BLOCK_SIZE, &bytes[BLOCK..3 * BLOCK]).unwrap();
        bytes[2 * BLOCK] ^= 1;
        let expected =
            [(0, Mismatch::NotRecorded), (2, Mismatch::Wrong), (3, Mismatch::NotRecorded)];
        assert_eq!(not_good(&checksums, 0, &bytes), expected);
        let Checksums::Recorded(recorded) = &checksums else { panic!() };
        recorded.checksums.file().fails.store(true, Relaxed);
        assert!(checksums.verify(0, &bytes, |_, _| {}).is_err(), "it cannot be said");
        checksums.record(0, &bytes).unwrap_err();
        assert!(!checksums.may_record());
    }

    #[test]
    fn without_any_checksum_nothing_is_good() {
        let checksums = Checksums::<Memory>::Nowhere;
        assert!(!checksums.verify(0, &bytes(), |_, _| {}).unwrap());
    }
}
