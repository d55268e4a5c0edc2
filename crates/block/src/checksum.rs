use std::fmt;

use crc_fast::{CrcAlgorithm, Digest};

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
            Self::Crc32c => u64::from(crc32c(bytes)),
            Self::Xxhash64 => xxhash_rust::xxh64::xxh64(bytes, 0),
        }
    }
}

/// CRC-32C (Castagnoli), as of iSCSI and btrfs.
pub fn crc32c(bytes: &[u8]) -> u32 {
    crc_fast::crc32_iscsi(bytes)
}

/// The CRC-32C of what `crc` is that of, followed by `bytes`.
pub fn crc32c_append(crc: u32, bytes: &[u8]) -> u32 {
    let mut digest = Digest::new_with_init_state(CrcAlgorithm::Crc32Iscsi, u64::from(!crc));
    digest.update(bytes);
    digest.finalize() as u32
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
    use super::{ChecksumKind, crc32c, crc32c_append};

    /// One bit after another, as the polynomial is defined.
    fn slow(crc: u32, bytes: &[u8]) -> u32 {
        !bytes.iter().fold(!crc, |state, byte| {
            (0..8).fold(state ^ u32::from(*byte), |state, _| {
                if state & 1 == 0 { state >> 1 } else { (state >> 1) ^ 0x82f6_3b78 }
            })
        })
    }

    /// The library has a way of its own for each length and processor.
    #[test]
    fn crc32c_is_the_one_of_the_definition_at_any_length_and_place() {
        let bytes: Vec<u8> =
            (0..20_000_u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
        let mut lengths: Vec<usize> = (0..300).chain([511, 1000, 4095, 4096, 4097]).collect();
        lengths.push(16384);
        for (number, length) in lengths.into_iter().enumerate() {
            let at = number % 9;
            let part = &bytes[at..at + length];
            assert_eq!(crc32c(part), slow(0, part), "{length}");
            let (head, tail) = part.split_at(length / 3);
            assert_eq!(crc32c_append(crc32c(head), tail), crc32c(part), "{length}");
            assert_eq!(crc32c_append(0xdead_beef, part), slow(0xdead_beef, part), "{length}");
        }
    }

    #[test]
    fn known_answers() {
        assert_eq!(ChecksumKind::Crc32c.of(b"123456789"), 0xe306_9283);
        assert_eq!(ChecksumKind::Xxhash64.of(b""), 0xef46_db37_51d8_e999);
    }
}
