//! The property of checksums on which `Volume` relies when it believes one.

use burgeon_block::{BLOCK_SIZE, ChecksumKind};

#[test]
fn a_block_with_any_bit_flipped_has_another_checksum() {
    for kind in [ChecksumKind::Crc32c, ChecksumKind::Xxhash64] {
        let mut block = testkit::Rng::new(1).bytes(BLOCK_SIZE as usize);
        let right = kind.of(&block);
        for bit in 0..BLOCK_SIZE as usize * 8 {
            block[bit / 8] ^= 1 << (bit % 8);
            assert_ne!(kind.of(&block), right, "{kind}, bit {bit}");
            block[bit / 8] ^= 1 << (bit % 8);
        }
    }
}
