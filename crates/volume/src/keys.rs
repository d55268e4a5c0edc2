//! The identity of an image's chunks in the host's cache.
//!
//! ```text
//!   codec              identified by                                       kind of key
//!   raw, zstd          digest of its bytes, and their length               Chunk
//!   verified           digest of its derived object's table, and range    Derived
//! ```
//!
//! The table of a derived object has a SHA-256 for each piece of a layer, and the source checks
//! the table against its digest, and pieces when it unpacks them. So that digest and a range
//! identify bytes, too. Nothing else identifies the bytes of a chunk whose digest is unknown.

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
        if chunk.codec != Codec::Verified {
            // With the length: else a map with a wrong one could make the cache doubt the chunk.
            let mut identity = [0; Digest::LEN + 8];
            identity[..Digest::LEN].copy_from_slice(chunk.digest.as_bytes());
            identity[Digest::LEN..].copy_from_slice(&chunk.range.len().to_le_bytes());
            return Some(ChunkKey::new(domain, KeyKind::Chunk, &identity));
        }
        let table = self.object(chunk.object).digest(ObjectKind::Derived)?;
        let mut identity = [0; Digest::LEN + 24];
        let numbers = [chunk.stored.start(), chunk.stored.len(), chunk.range.len()];
        let parts = numbers.map(u64::to_le_bytes);
        identity[..Digest::LEN].copy_from_slice(table.as_bytes());
        identity[Digest::LEN..].copy_from_slice(parts.as_flattened());
        Some(ChunkKey::new(domain, KeyKind::Derived, &identity))
    }
}

/// The keys of all chunks of the image of `map` in `domain`.
pub fn chunk_keys(map: &std::sync::Arc<AddressMap>, domain: &Domain) -> Vec<ChunkKey> {
    (0..map.count()).filter_map(|index| map.key(index, domain)).collect()
}
