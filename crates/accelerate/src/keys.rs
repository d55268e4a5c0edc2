//! The names of cached blocks, and the places that they may have.
//!
//! ```text
//!   key   = device (8 bits) │ block (up to 40 bits)             "which block of which slow device"
//!   mixed = an invertible permutation of the key                spreads neighbours over all sets
//!   set   = ⌊mixed × sets ÷ 2^bits⌋        tag = its number in the set, below 2^29
//! ```
//!
//! Set and tag together are the key: a tag that is equal in its set is the same block. So the index
//! needs 4 bytes a block, and every slot's key is known without a second table.
//!
//! Invariants (held by the tests below): `place` is injective, and `key_at` inverts it.

/// Bits of a tag.
pub const TAG_BITS: u32 = 29;
/// Bits of a device's number within a key.
pub const DEVICE_BITS: u32 = 8;
/// The most bits of a block's number.
const BLOCK_BITS_MAX: u32 = 40;

/// Odd multipliers of the permutation's rounds.
const ROUNDS: [u64; 3] = [0x9e37_79b9_7f4a_7c15, 0xbf58_476d_1ce4_e5b9, 0x94d0_49bb_1331_11eb];

/// A block of a slow device: the device's number and the number of 4 KiB on it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Key {
    /// Number of the device in this cache.
    pub device: u8,
    /// Offset on the device, in blocks.
    pub block: u64,
}

/// The place of a key in the index: no other key has the same.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SetTag {
    /// Number of the set.
    pub set: u32,
    /// Below 2^29.
    pub tag: u32,
}

/// The arithmetic of keys for one number of sets.
#[derive(Clone, Copy, Debug)]
pub struct KeyMapping {
    sets: u64,
    /// Bits of a key.
    bits: u32,
    /// Inverses of [`ROUNDS`] modulo 2^64.
    inverses: [u64; 3],
}

impl KeyMapping {
    /// KeyMapping for `sets` sets; at least one.
    pub fn new(sets: u32) -> Self {
        let sets = sets.max(1);
        let bits = (TAG_BITS + sets.ilog2()).min(DEVICE_BITS + BLOCK_BITS_MAX);
        Self { sets: sets.into(), bits, inverses: ROUNDS.map(inverse) }
    }

    /// Blocks that a slow device can have, for all of them to have a place.
    pub fn blocks_max(&self) -> u64 {
        1 << (self.bits - DEVICE_BITS)
    }

    /// The place of `key`, whose block is below [`Self::blocks_max`].
    #[inline]
    pub fn place(&self, key: Key) -> SetTag {
        let mixed = self.mix(self.number(key));
        let product = u128::from(mixed) * u128::from(self.sets);
        let rest = (product as u64) & self.mask();
        SetTag { set: (product >> self.bits) as u32, tag: (rest / self.sets) as u32 }
    }

    /// The key at `place`; some number for a place that no key has.
    pub fn key_at(&self, place: SetTag) -> Key {
        let first = (u128::from(place.set) << self.bits).div_ceil(u128::from(self.sets)) as u64;
        let number = self.unmix((first + u64::from(place.tag)) & self.mask());
        let block_bits = self.bits - DEVICE_BITS;
        Key { device: (number >> block_bits) as u8, block: number & ((1 << block_bits) - 1) }
    }

    fn mask(&self) -> u64 {
        (1 << self.bits) - 1
    }

    fn number(&self, key: Key) -> u64 {
        u64::from(key.device) << (self.bits - DEVICE_BITS) | key.block
    }

    fn mix(&self, mut number: u64) -> u64 {
        for factor in ROUNDS {
            number ^= number >> (self.bits / 2);
            number = number.wrapping_mul(factor) & self.mask();
        }
        number ^ (number >> (self.bits / 2))
    }

    fn unmix(&self, mut number: u64) -> u64 {
        let fold = |number: u64| {
            // A shift by at least a third is undone by two more.
            let half = self.bits / 2;
            number ^ (number >> half) ^ (number >> (2 * half))
        };
        for factor in self.inverses.iter().rev() {
            number = fold(number).wrapping_mul(*factor) & self.mask();
        }
        fold(number)
    }
}

/// A well mixed number of a key, the same in all runs.
pub(crate) fn mixed(key: Key) -> u64 {
    let mut number = u64::from(key.device) << 56 ^ key.block;
    number = (number ^ (number >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    number = (number ^ (number >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    number ^ (number >> 31)
}

/// The inverse of an odd number modulo 2^64: Newton's iteration doubles the right bits.
fn inverse(odd: u64) -> u64 {
    let mut inverse = odd;
    for _ in 0..6 {
        inverse = inverse.wrapping_mul(2u64.wrapping_sub(odd.wrapping_mul(inverse)));
    }
    inverse
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use proptest::prelude::*;

    use super::{Key, KeyMapping, TAG_BITS};

    proptest! {
        #[test]
        fn a_place_is_one_key(sets in 1u32..1 << 25, device: u8, block: u64) {
            let keys = KeyMapping::new(sets);
            let key = Key { device, block: block % keys.blocks_max() };
            let place = keys.place(key);
            prop_assert!(place.set < sets && place.tag < 1 << TAG_BITS);
            prop_assert_eq!(keys.key_at(place), key);
        }
    }

    #[test]
    fn neighbours_spread_evenly_over_the_sets() {
        for sets in [1000, 1024, 65_535] {
            let keys = KeyMapping::new(sets);
            let mut blocks = vec![0u32; sets as usize];
            let mut places = HashSet::new();
            for block in 0..u64::from(sets) * 16 {
                let place = keys.place(Key { device: 3, block });
                blocks[place.set as usize] += 1;
                assert!(places.insert((place.set, place.tag)));
            }
            // Of a random spread, with a mean of 16, sets above 48 are practically impossible.
            assert!(blocks.iter().all(|count| *count < 48), "{:?}", blocks.iter().max());
        }
    }

    #[test]
    fn a_small_cache_takes_devices_of_tebibytes_and_a_large_one_of_pebibytes() {
        assert_eq!(KeyMapping::new(256).blocks_max() * 4096, 2 << 40);
        assert_eq!(KeyMapping::new(1 << 24).blocks_max() * 4096, 4 << 50);
    }
}
