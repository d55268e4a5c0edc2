#![allow(clippy::unwrap_used, dead_code, unreachable_pub)]

pub mod lives;
pub mod loans;

use burgeon_cache::{Amount, Cache, CacheSettings, ChunkKey, ChunkStore, Domain, KeyKind};

pub const BLOCK: u64 = 4096;

pub fn key(n: u64) -> ChunkKey {
    ChunkKey::new(&Domain::PUBLIC, KeyKind::Chunk, &n.to_le_bytes())
}

/// The bytes of chunk `n`: 1 to 16 blocks, no two of them equal, none of zeros.
pub fn chunk(n: u64) -> Vec<u8> {
    let blocks = n.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 60;
    let block = |at: u64| (n << 20 | at << 1 | 1).to_le_bytes().repeat(BLOCK as usize / 8);
    (0..=blocks).map(block).collect::<Vec<_>>().concat()
}

/// True if `n` is found and its bytes are right; false for a miss, or for bytes that fail the
/// verification, which the caller then doubts.
pub fn is_here(cache: &Cache, n: u64) -> bool {
    let Some(place) = cache.find(&key(n)) else { return false };
    let right = chunk(n);
    let mut buf = vec![0; right.len()];
    if cache.read(place, 0, &mut buf) && buf == right {
        cache.touch(place);
        return true;
    }
    cache.doubt(place, &key(n));
    assert_ne!(cache.find(&key(n)), Some(place), "a doubted place is found no more");
    false
}

pub fn settings(limit: u64) -> CacheSettings {
    CacheSettings {
        limit: Some(Amount::Bytes(limit)),
        keep_free: Amount::Bytes(0),
        memory: 0,
        arena_len: 4 << 20,
        ..CacheSettings::default()
    }
}
