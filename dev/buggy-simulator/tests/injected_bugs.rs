//! A simulator that finds nothing proves nothing: each bug of `dev/buggy-volume` must be found.

use buggy_simulator::{crash_at_every_write, simulate, simulate_mapped_file, simulate_shared};
use burgeon_volume::{
    bugs::turn_on,
    list::{BUGS, Bug, Of},
};

/// Seeds that are tried for each bug; most are found within ten.
const SEEDS: u64 = 1000;

/// The bugs of which no seed breaks a promise of `simulate`.
fn missed(of: Of, simulate: impl Fn(u64) -> Result<(), String>) -> Vec<&'static str> {
    let bugs = BUGS.iter().filter(|bug| bug.of == of);
    let is_missed = |bug: &&Bug| {
        let _on = turn_on(bug.name);
        match (0..SEEDS).find_map(|seed| simulate(seed).err()) {
            Some(error) => {
                let error = error.lines().next().unwrap_or_default();
                println!("{} ({}): {error}", bug.name, bug.says);
                false
            }
            None => true,
        }
    };
    bugs.filter(is_missed).map(|bug| bug.name).collect()
}

#[test]
fn every_bug_of_the_volume_is_found() {
    let missed = missed(Of::Image, |seed| simulate(seed).map(drop));
    assert!(missed.is_empty(), "not found in {SEEDS} seeds each: {missed:?}");
}

#[test]
fn every_bug_of_mapped_files_is_found() {
    let missed = missed(Of::MappedFile, |seed| simulate_mapped_file(seed).map(drop));
    assert!(missed.is_empty(), "not found in {SEEDS} seeds each: {missed:?}");
}

#[test]
fn every_bug_of_images_that_share_a_cache_is_found() {
    let missed = missed(Of::SharedCache, |seed| simulate_shared(seed).map(drop));
    assert!(missed.is_empty(), "not found in {SEEDS} seeds each: {missed:?}");
}

/// Else the bugs above might be found because the copy is broken.
#[test]
fn the_copy_without_a_bug_keeps_its_promise() {
    for seed in 0..100 {
        simulate(seed).unwrap_or_else(|error| panic!("{error}"));
        simulate_mapped_file(seed).unwrap_or_else(|error| panic!("{error}"));
        simulate_shared(seed).unwrap_or_else(|error| panic!("{error}"));
    }
}

/// The bugs that a power failure alone brings to light, without a random walk.
#[test]
fn crashing_at_every_write_finds_what_it_is_there_to_find() {
    for (bug, verified) in [
        ("TrustLoadedChunks", false),
        ("SkipCachedChecksum", false),
        ("SkipCachedChecksum", true),
        ("WriteOneBlockOff", false),
        ("WriteOneBlockOff", true),
    ] {
        assert!(BUGS.iter().any(|known| known.name == bug), "{bug} is not in the list");
        let _on = turn_on(bug);
        let found = crash_at_every_write(1, 5, verified);
        println!("{bug}: {}", found.expect_err("a bug was not found"));
    }
}
