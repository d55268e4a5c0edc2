//! Seals: what tells whether the cache still has the bytes of a chunk of which no digest is known.
//!
//! ```text
//!   bytes of the chunk, whole blocks │ seal: BLAKE3 of its key and its bytes, 32 │ zeros
//!                                    └── one block ───────────────────────────────────┘
//! ```
//!
//! Bytes and seal are written at once, after the source has verified the bytes. An image that finds
//! the chunk of another one has no record of its checksums: the seal takes its place once, and the
//! image records them. Invariants: a seal is of one key, so that of a chunk that lies elsewhere, or
//! that was there before, does not fit; a torn, rotten or missing seal makes the chunk a miss
//! (`tests::a_seal_fits_its_bytes_and_its_key_only`, `tests/verified.rs`, the simulator).

use burgeon_block::{BLOCK_SIZE, Pages};
use burgeon_cache::ChunkKey;

/// Length of the block that holds a seal.
pub(super) const SEAL_LEN: u32 = BLOCK_SIZE as u32;

/// BLAKE3's context.
const SEAL: &str = "burgeon 2026 seal of a chunk in the cache";

fn of(key: &ChunkKey, bytes: &[u8]) -> blake3::Hash {
    let mut hasher = blake3::Hasher::new_derive_key(SEAL);
    hasher.update(key.as_bytes()).update(bytes);
    hasher.finalize()
}

/// `bytes` and their seal, as the cache has them; `None` without memory.
pub(super) fn sealed(key: &ChunkKey, bytes: &[u8]) -> Option<Pages> {
    let mut pages = Pages::zeroed(bytes.len() as u64 + u64::from(SEAL_LEN))?;
    let (data, block) = pages.bytes_mut().split_at_mut(bytes.len());
    data.copy_from_slice(bytes);
    let seal = of(key, bytes);
    block[..seal.as_bytes().len()].copy_from_slice(seal.as_bytes());
    Some(pages)
}

/// True if `block` begins with the seal of `bytes`.
pub(super) fn fits(block: &[u8], key: &ChunkKey, bytes: &[u8]) -> bool {
    block.starts_with(of(key, bytes).as_bytes())
}

#[cfg(test)]
mod tests {
    use burgeon_cache::ChunkKey;

    use super::{SEAL_LEN, fits, sealed};

    #[test]
    fn a_seal_fits_its_bytes_and_its_key_only() {
        let (key, other) = (ChunkKey::from([1; 16]), ChunkKey::from([2; 16]));
        let bytes = vec![7; 8192];
        let pages = sealed(&key, &bytes).unwrap();
        let (data, block) = pages.bytes().split_at(bytes.len());
        assert!(data == bytes && block.len() == SEAL_LEN as usize);
        assert!(fits(block, &key, data) && !fits(block, &other, data));
        assert!(!fits(&[0; SEAL_LEN as usize], &key, data) && !fits(&block[..31], &key, data));
        for at in [0, 4096, 8191] {
            let mut rotten = bytes.clone();
            rotten[at] ^= 1;
            assert!(!fits(block, &key, &rotten), "byte {at}");
        }
        for at in 0..32 {
            let mut rotten = block.to_vec();
            rotten[at] ^= 0x80;
            assert!(!fits(&rotten, &key, data), "byte {at} of the seal");
        }
    }
}
