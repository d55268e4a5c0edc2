//! The identity of an image's chunks in the host's cache.
//!
//! ```text
//!   codec                        identified by                                kind of key
//!   raw, zstd                    digest of its bytes │ their length           Chunk
//!   verified                     identity of its parts │ its length           Verified
//!   verified, earlier versions   digest of its object's table │ its range     Verified
//! ```
//!
//! The table of a derived object has a SHA-256 for each piece of a layer. The identity is a hash of
//! the position in the chunk and in its piece, the length and the digest of each part, so images
//! with the same parts share the chunk. Before bytes are admitted under it, the source that has
//! verified the pieces confirms the identity (`fetch/chunk.rs`): a manifest's word is not enough.
//! The manifests of earlier versions have none; there, the digest of the table and a range
//! identify bytes. Nothing else identifies the bytes of a chunk whose digest is unknown.

use burgeon_block::{Digest, ObjectKind};
use burgeon_cache::{ChunkKey, Domain, KeyKind};
use burgeon_image::{AddressMap, Codec};

use crate::residency::ChunkKeys;

impl ChunkKeys for std::sync::Arc<AddressMap> {
    fn count(&self) -> u32 {
        self.chunk_count()
    }

    fn len(&self, index: u32) -> u32 {
        // A chunk has 256 KiB at most.
        self.chunk(index).range.len() as u32
    }

    fn key(&self, index: u32, domain: &Domain) -> Option<ChunkKey> {
        let chunk = self.chunk(index);
        if chunk.lacks_identity() {
            let table = self.object(chunk.object).digest(ObjectKind::Derived)?;
            let mut identity = [0; Digest::LEN + 24];
            let numbers = [chunk.stored.start(), chunk.stored.len(), chunk.range.len()];
            let parts = numbers.map(u64::to_le_bytes);
            identity[..Digest::LEN].copy_from_slice(table.as_bytes());
            identity[Digest::LEN..].copy_from_slice(parts.as_flattened());
            return Some(ChunkKey::new(domain, KeyKind::Verified, &identity));
        }
        // With the length: else a map with a wrong one could make the cache doubt the chunk.
        let mut identity = [0; Digest::LEN + 8];
        identity[..Digest::LEN].copy_from_slice(chunk.digest.as_bytes());
        identity[Digest::LEN..].copy_from_slice(&chunk.range.len().to_le_bytes());
        let kind = if self.is_sealed(index) { KeyKind::Verified } else { KeyKind::Chunk };
        Some(ChunkKey::new(domain, kind, &identity))
    }

    fn is_sealed(&self, index: u32) -> bool {
        self.chunk(index).codec == Codec::Verified
    }
}

/// The key of chunk `index` of the image of `map` in `domain`; `None` if nothing identifies its
/// bytes.
pub fn chunk_key(
    map: &std::sync::Arc<AddressMap>,
    index: u32,
    domain: &Domain,
) -> Option<ChunkKey> {
    map.key(index, domain)
}

/// Bytes that chunk `index` of the image of `map` takes in the cache: its own, and a block with a
/// seal after them if no digest of them is known.
pub fn cached_len(map: &std::sync::Arc<AddressMap>, index: u32) -> u64 {
    map.cached_len(index).into()
}

/// The keys of all chunks of the image of `map` in `domain`.
pub fn chunk_keys(map: &std::sync::Arc<AddressMap>, domain: &Domain) -> Vec<ChunkKey> {
    (0..map.count()).filter_map(|index| map.key(index, domain)).collect()
}
