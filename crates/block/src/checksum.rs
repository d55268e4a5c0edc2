use std::fmt;

/// The checksum of blocks and metadata nodes in btrfs, and so in Burgeon.
///
/// The discriminants are btrfs's `csum_type` numbers.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
#[repr(u8)]
pub enum ChecksumKind {
    /// CRC-32C (Castagnoli): the default; affine, so a node's fsid can be changed without reading
    /// the node.
    Crc32c = 0,
    /// xxHash64 with seed 0.
    Xxhash64 = 1,
}

impl ChecksumKind {
    /// The kind with btrfs's number `number`.
    pub fn from_number(number: u16) -> Option<Self> {
        match number {
            0 => Some(Self::Crc32c),
            1 => Some(Self::Xxhash64),
            _ => None,
        }
    }

    /// Bytes a checksum takes in a checksum table.
    pub fn size(self) -> usize {
        match self {
            Self::Crc32c => 4,
            Self::Xxhash64 => 8,
        }
    }

    /// The checksum of `bytes`; stored as `size()` little-endian bytes.
    pub fn of(self, bytes: &[u8]) -> u64 {
        match self {
            Self::Crc32c => u64::from(crc32c::crc32c(bytes)),
            Self::Xxhash64 => xxhash_rust::xxh64::xxh64(bytes, 0),
        }
    }
}

impl fmt::Display for ChecksumKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Crc32c => "crc32c",
            Self::Xxhash64 => "xxhash64",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::ChecksumKind;

    #[test]
    fn known_answers() {
        assert_eq!(ChecksumKind::Crc32c.of(b"123456789"), 0xe306_9283);
        assert_eq!(ChecksumKind::Xxhash64.of(b""), 0xef46_db37_51d8_e999);
    }
}
