//! A simulator that finds nothing proves nothing: each of these bugs must be found.

use burgeon_block::{BLOCK_SIZE, ChecksumKind};
use burgeon_volume::Bug;
use simulator::{crash_at_every_write, simulate};

/// Seeds that are tried for each bug; most are found within ten.
const SEEDS: u64 = 1000;

#[test]
fn every_bug_of_the_volume_is_found() {
    let mut missed = Vec::new();
    for bug in Bug::ALL {
        match (0..SEEDS).find_map(|seed| simulate(seed, Some(bug)).err().map(|error| (seed, error)))
        {
            Some((seed, error)) => {
                println!("{bug:?}: seed {seed}: {}", error.lines().next().unwrap_or_default());
            }
            None => missed.push(bug),
        }
    }
    assert!(missed.is_empty(), "not found in {SEEDS} seeds each: {missed:?}");
}

/// The bugs that a power failure alone brings to light, without a random walk.
#[test]
fn crashing_at_every_write_finds_what_it_is_there_to_find() {
    for (bug, verified) in [
        (Bug::TrustReopenedCache, false),
        (Bug::SkipCachedChecksum, false),
        (Bug::SkipCachedChecksum, true),
        (Bug::WriteOneBlockOff, false),
        (Bug::WriteOneBlockOff, true),
    ] {
        let found = crash_at_every_write(1, 5, verified, Some(bug));
        println!("{bug:?}: {}", found.expect_err("a bug was not found"));
    }
}

/// What `Volume` relies on when it believes a block's checksum.
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
