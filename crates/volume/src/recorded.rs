//! Recorded checksums: those of data whose checksums nobody knew before it was read.
//!
//! ```text
//!   8 bytes a block:  CRC-32C of the block │ CRC-32C of (place, the first four)      zeros: not recorded
//!                                                        └── of an image: and its identity
//! ```
//!
//! Of mapped files the first read fixes the bytes, from then on
//! ([`RecordedChecksums::hold_to_first`]). Of images without checksums the source decides at each
//! fetch; a record only tells whether the cache still holds the fetched bytes
//! ([`RecordedChecksums::record`], [`RecordedChecksums::compare`]).
//!
//! Invariants: an entry that does not match itself counts as not recorded, so a torn or rotten
//! entry makes nothing unreadable (`tests::an_entry_is_valid_in_its_place_only`). Entries of a
//! chunk are written by its fetch task alone, so two writers never race for one.

use burgeon_block::{BLOCK_SIZE, ChecksumKind, Error, ErrorKind, LocalFile, Result};

/// Why a resident block is not served.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Mismatch {
    /// Its bytes are wrong.
    Wrong,
    /// Nothing is known of it: a crash may have taken its recorded checksum alone.
    NotRecorded,
}

const ENTRY: usize = 8;
/// Length of the record of one block, in bytes.
pub const RECORDED_CHECKSUM_LEN: u64 = ENTRY as u64;
/// Entries that are compared at a time, on the stack.
const AT_ONCE: usize = 64;

/// Recorded checksums by the index of a block, in a sparse file.
pub(crate) struct RecordedChecksums<F> {
    file: F,
    /// Part of every place, so that the records of one image are void for another.
    salt: u64,
}

impl<F: LocalFile> RecordedChecksums<F> {
    /// The records in `file` of data that `salt` distinguishes from other data.
    pub(crate) fn new(file: F, salt: u64) -> Self {
        Self { file, salt }
    }

    /// Compares `blocks` with the first ones that were read at `index`; records new ones before it
    /// returns. `Corrupt` if a block differs, `LocalIo` if it cannot be compared or recorded.
    pub(crate) fn hold_to_first(&self, index: u64, blocks: &[u8]) -> Result<()> {
        let mut entries = vec![0; blocks.len() / BLOCK_SIZE as usize * ENTRY];
        let at = index.saturating_mul(ENTRY as u64);
        self.file.read_at(at, &mut entries).map_err(local)?;
        let mut new = false;
        let pairs = entries.chunks_exact_mut(ENTRY).zip(blocks.chunks_exact(BLOCK_SIZE as usize));
        for (index, (entry, block)) in (index..).zip(pairs) {
            let place = index ^ self.salt;
            let right = seal(place, ChecksumKind::Crc32c.of(block) as u32);
            if is_sealed(place, entry) {
                if *entry != right {
                    return Err(Error::new(
                        ErrorKind::Corrupt,
                        "its bytes are not those that were read at first",
                    ));
                }
            } else {
                entry.copy_from_slice(&right);
                new = true;
            }
        }
        if new { self.file.write_at(at, &entries).map_err(local) } else { Ok(()) }
    }

    /// Records the checksums of `blocks`, whatever was recorded at `index` before.
    pub(crate) fn record(&self, index: u64, blocks: &[u8]) -> Result<()> {
        let blocks = blocks.chunks_exact(BLOCK_SIZE as usize);
        let entries: Vec<u8> = (index..)
            .zip(blocks)
            .flat_map(|(index, block)| {
                seal(index ^ self.salt, ChecksumKind::Crc32c.of(block) as u32)
            })
            .collect();
        self.file.write_at(index.saturating_mul(ENTRY as u64), &entries)
    }

    /// Compares `blocks` with their records at `index`; calls `not_good` for each that differs or
    /// has none. Allocates nothing.
    pub(crate) fn compare(
        &self,
        index: u64,
        blocks: &[u8],
        mut not_good: impl FnMut(u64, Mismatch),
    ) -> Result<()> {
        let mut index = index;
        for blocks in blocks.chunks(AT_ONCE * BLOCK_SIZE as usize) {
            let mut entries = [0; AT_ONCE * ENTRY];
            let entries = &mut entries[..blocks.len() / BLOCK_SIZE as usize * ENTRY];
            self.file.read_at(index.saturating_mul(ENTRY as u64), entries)?;
            let pairs = entries.chunks_exact(ENTRY).zip(blocks.chunks_exact(BLOCK_SIZE as usize));
            for (entry, block) in pairs {
                let place = index ^ self.salt;
                if *entry != seal(place, ChecksumKind::Crc32c.of(block) as u32) {
                    not_good(
                        index,
                        match is_sealed(place, entry) {
                            true => Mismatch::Wrong,
                            false => Mismatch::NotRecorded,
                        },
                    );
                }
                index += 1;
            }
        }
        Ok(())
    }

    pub(crate) fn sync(&self) -> Result<()> {
        self.file.sync()
    }

    #[cfg(test)]
    pub(crate) fn file(&self) -> &F {
        &self.file
    }
}

fn local(error: Error) -> Error {
    let what = "the checksums of mapped files cannot be kept, so they cannot be read";
    Error::with_source(ErrorKind::LocalIo, what, error)
}

fn seal(place: u64, checksum: u32) -> [u8; ENTRY] {
    let mut covered = [0; 12];
    covered[..8].copy_from_slice(&place.to_le_bytes());
    covered[8..].copy_from_slice(&checksum.to_le_bytes());
    let mut entry = [0; ENTRY];
    entry[..4].copy_from_slice(&checksum.to_le_bytes());
    entry[4..].copy_from_slice(&(ChecksumKind::Crc32c.of(&covered) as u32).to_le_bytes());
    entry
}

fn is_sealed(place: u64, entry: &[u8]) -> bool {
    match entry.first_chunk() {
        Some(checksum) => entry == seal(place, u32::from_le_bytes(*checksum)),
        None => false,
    }
}

#[cfg(test)]
mod tests {
    use super::{is_sealed, seal};

    #[test]
    fn an_entry_is_valid_in_its_place_only() {
        let entry = seal(7, 0x1234_5678);
        assert!(is_sealed(7, &entry) && !is_sealed(8, &entry));
        for index in 0..100 {
            assert!(!is_sealed(index, &[0; 8]), "zeros are no entry, at {index}");
        }
        for bit in 0..64 {
            let mut rotten = entry;
            rotten[bit / 8] ^= 1 << (bit % 8);
            assert!(!is_sealed(7, &rotten), "bit {bit}");
        }
    }
}
