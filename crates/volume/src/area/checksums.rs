//! What was first seen of mapped files: one checksum a block, kept in a sparse file.
//!
//! ```text
//!   8 bytes a block:  CRC-32C of the block │ CRC-32C of (place, the first four)      zeros: not seen yet
//! ```
//!
//! An entry that does not match itself counts as not seen: a torn or rotten one can make nothing
//! unreadable. Entries of a chunk are written by its flight alone, so there is no race for one.

use burgeon_block::{BLOCK_SIZE, ChecksumKind, Error, ErrorKind, LocalFile, Result};

use crate::{Bug, Sabotage};

const ENTRY: usize = 8;

/// Where entry `index` lies, and how long `count` of them are.
pub(super) struct FirstSeen<F>(F);

impl<F: LocalFile> FirstSeen<F> {
    pub(super) fn new(file: F) -> Self {
        Self(file)
    }

    /// Compares `blocks` with what was first seen at `index`; what is new is written down before
    /// this returns. `Corrupt` if a block differs, `LocalIo` if it cannot be compared or kept.
    pub(super) fn check(&self, sabotage: &impl Sabotage, index: u64, blocks: &[u8]) -> Result<()> {
        let mut entries = vec![0; blocks.len() / BLOCK_SIZE as usize * ENTRY];
        let at = index.saturating_mul(ENTRY as u64);
        self.0.read_at(at, &mut entries).map_err(local)?;
        let mut new = false;
        let pairs = entries.chunks_exact_mut(ENTRY).zip(blocks.chunks_exact(BLOCK_SIZE as usize));
        for (index, (entry, block)) in (index..).zip(pairs) {
            let right = seal(index, ChecksumKind::Crc32c.of(block) as u32);
            if is_sealed(index, entry) {
                if *entry != right && !sabotage.has(Bug::SkipFirstSeen) {
                    return Err(Error::new(
                        ErrorKind::Corrupt,
                        "its bytes are not those that were read at first",
                    ));
                }
            } else if !new || !sabotage.has(Bug::KeepFirstChecksumOnly) {
                entry.copy_from_slice(&right);
                new = true;
            }
        }
        if new { self.0.write_at(at, &entries).map_err(local) } else { Ok(()) }
    }

    pub(super) fn sync(&self) -> Result<()> {
        self.0.sync()
    }
}

fn local(error: Error) -> Error {
    let what = "the checksums of mapped files cannot be kept, so they cannot be read";
    Error::with_source(ErrorKind::LocalIo, what, error)
}

fn seal(index: u64, checksum: u32) -> [u8; ENTRY] {
    let mut covered = [0; 12];
    covered[..8].copy_from_slice(&index.to_le_bytes());
    covered[8..].copy_from_slice(&checksum.to_le_bytes());
    let mut entry = [0; ENTRY];
    entry[..4].copy_from_slice(&checksum.to_le_bytes());
    entry[4..].copy_from_slice(&(ChecksumKind::Crc32c.of(&covered) as u32).to_le_bytes());
    entry
}

fn is_sealed(index: u64, entry: &[u8]) -> bool {
    match entry.first_chunk() {
        Some(checksum) => entry == seal(index, u32::from_le_bytes(*checksum)),
        None => false,
    }
}

#[cfg(test)]
mod tests {
    use super::{is_sealed, seal};

    #[test]
    fn an_entry_is_believed_in_its_place_alone() {
        let entry = seal(7, 0x1234_5678);
        assert!(is_sealed(7, &entry) && !is_sealed(8, &entry));
        for index in 0..100 {
            assert!(!is_sealed(index, &[0; 8]), "zeros are nothing, at {index}");
        }
        for bit in 0..64 {
            let mut rotten = entry;
            rotten[bit / 8] ^= 1 << (bit % 8);
            assert!(!is_sealed(7, &rotten), "bit {bit}");
        }
    }
}
