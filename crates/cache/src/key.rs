use std::fmt;

/// The name of a chunk in the cache: 128 bits of BLAKE3 over domain, kind and digest.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ChunkKey([u8; ChunkKey::LEN]);

impl ChunkKey {
    /// Length in bytes.
    pub const LEN: usize = 16;

    /// The key of the chunk of this `kind` with `digest`, in `domain`.
    pub fn new(domain: &Domain, kind: KeyKind, digest: &[u8]) -> Self {
        // The domain has a fixed length, so no two inputs give the same bytes to hash.
        let mut hasher = blake3::Hasher::new_keyed(&domain.0);
        hasher.update(&[kind as u8]).update(digest);
        let mut key = [0; Self::LEN];
        key.copy_from_slice(&hasher.finalize().as_bytes()[..Self::LEN]);
        Self(key)
    }

    /// The raw bytes.
    pub fn as_bytes(&self) -> &[u8; Self::LEN] {
        &self.0
    }
}

impl From<[u8; ChunkKey::LEN]> for ChunkKey {
    fn from(bytes: [u8; ChunkKey::LEN]) -> Self {
        Self(bytes)
    }
}

impl fmt::Debug for ChunkKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// A domain of trust: a chunk that was read with one set of credentials is not found by a mount
/// that has another.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Domain([u8; 32]);

impl Domain {
    /// The domain of stores that are read without credentials.
    pub const PUBLIC: Self = Self([0; 32]);

    /// The domain of the set of credentials that `identity` names.
    pub fn of(identity: &[u8]) -> Self {
        Self(blake3::derive_key("burgeon 2026 domain of the chunk cache", identity))
    }
}

/// The content that a key's digest is made of.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
#[repr(u8)]
pub enum KeyKind {
    /// The unpacked bytes of the chunk: a digest of ours.
    Chunk = 1,
    /// The parts of pieces that a table of contents has digests of. The number 2 stood for them
    /// before a seal followed the bytes.
    Verified = 3,
}

#[cfg(test)]
mod tests {
    use super::{ChunkKey, Domain, KeyKind};

    #[test]
    fn domain_kind_and_digest_tell_keys_apart() {
        let a = Domain::of(b"a");
        let key = ChunkKey::new(&a, KeyKind::Chunk, b"digest");
        assert_eq!(key, ChunkKey::new(&Domain::of(b"a"), KeyKind::Chunk, b"digest"));
        let others = [
            ChunkKey::new(&Domain::PUBLIC, KeyKind::Chunk, b"digest"),
            ChunkKey::new(&Domain::of(b"b"), KeyKind::Chunk, b"digest"),
            ChunkKey::new(&a, KeyKind::Verified, b"digest"),
            ChunkKey::new(&a, KeyKind::Chunk, b"digesT"),
        ];
        assert!(others.iter().all(|other| *other != key));
    }
}
