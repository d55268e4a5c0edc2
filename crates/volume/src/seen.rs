//! What was first seen of data whose checksums nobody knew: one a block, kept in a sparse file.
//!
//! ```text
//!   8 bytes a block:  CRC-32C of the block │ CRC-32C of (place, the first four)      zeros: not seen yet
//!                                                        └── of an image: its identity, too
//! ```
//!
//! Of mapped files the first look decides what the bytes are, from then on ([`FirstSeen::check`]).
//! Of images that nobody has read their source decides, each time; what is kept here is only to tell
//! whether the cache still holds it ([`FirstSeen::keep`], [`FirstSeen::holds`]).
//!
//! An entry that does not match itself counts as not seen: a torn or rotten one can make nothing
//! unreadable. Entries of a chunk are written by its flight alone, so there is no race for one.

use burgeon_block::{BLOCK_SIZE, ChecksumKind, Error, ErrorKind, LocalFile, Result};

const ENTRY: usize = 8;
/// Length of what is kept of a block, in bytes.
pub const SEEN_LEN: u64 = ENTRY as u64;
/// Entries that are compared at a time, on the stack.
const AT_ONCE: usize = 64;

/// What was seen, by the number of a block.
pub(crate) struct FirstSeen<F> {
    file: F,
    /// Part of every place, so that what was seen of one image says nothing of another.
    salt: u64,
}

impl<F: LocalFile> FirstSeen<F> {
    /// Of data that `salt` tells from other data.
    pub(crate) fn new(file: F, salt: u64) -> Self {
        Self { file, salt }
    }

    /// Compares `blocks` with what was first seen at `index`; what is new is written down before
    /// this returns. `Corrupt` if a block differs, `LocalIo` if it cannot be compared or kept.
    pub(crate) fn check(&self, index: u64, blocks: &[u8]) -> Result<()> {
        let mut entries = vec![0; blocks.len() / BLOCK_SIZE as usize * ENTRY];
        let at = index.saturating_mul(ENTRY as u64);
        self.file.read_at(at, &mut entries).map_err(local)?;
        let mut new = false;
        let pairs = entries.chunks_exact_mut(ENTRY).zip(blocks.chunks_exact(BLOCK_SIZE as usize));
        for (index, (entry, block)) in (index..).zip(pairs) {
            let index = index ^ self.salt;
            let right = seal(index, ChecksumKind::Crc32c.of(block) as u32);
            if is_sealed(index, entry) {
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

    /// Writes down what `blocks` are, whatever was there at `index`.
    pub(crate) fn keep(&self, index: u64, blocks: &[u8]) -> Result<()> {
        let blocks = blocks.chunks_exact(BLOCK_SIZE as usize);
        let entries: Vec<u8> = (index..)
            .zip(blocks)
            .flat_map(|(index, block)| {
                seal(index ^ self.salt, ChecksumKind::Crc32c.of(block) as u32)
            })
            .collect();
        self.file.write_at(index.saturating_mul(ENTRY as u64), &entries)
    }

    /// Compares `blocks` with what was written down at `index`; tells `bad` of each that differs
    /// (`true`), or was not written down. Allocates nothing.
    pub(crate) fn holds(
        &self,
        index: u64,
        blocks: &[u8],
        mut bad: impl FnMut(u64, bool),
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
                    bad(index, is_sealed(place, entry));
                }
                index += 1;
            }
        }
        Ok(())
    }

    pub(crate) fn sync(&self) -> Result<()> {
        self.file.sync()
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
