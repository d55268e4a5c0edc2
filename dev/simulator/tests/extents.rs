//! The extent map of a virtual area through power failures, and the bugs that must be found.

use simulator::{MapBug, map_through_power_failures, seeds, simulate_mapped_file};

/// Power fails at each operation of a life of four mappings, and at some of the next.
fn all_failures(seed: u64, bug: Option<MapBug>) -> Result<u64, String> {
    let mut crashes = 0;
    let operations = map_through_power_failures(seed, u64::MAX, u64::MAX, bug)?;
    for first in 0..operations {
        for second in (0..operations).step_by(3) {
            crashes += 1;
            map_through_power_failures(seed ^ (first << 20) ^ (second << 40), first, second, bug)
                .map_err(|error| {
                format!("seed {seed}, power off at {first}, then {second}: {error}")
            })?;
        }
    }
    Ok(crashes)
}

#[test]
fn a_mapping_is_there_whole_or_not_at_all_and_for_ever() {
    let mut crashes = 0;
    for seed in 0..seeds(20) {
        crashes += all_failures(seed, None).unwrap_or_else(|error| panic!("{error}"));
    }
    assert!(crashes > 100, "{crashes}");
}

#[test]
fn every_bug_of_the_map_is_found() {
    for bug in MapBug::ALL {
        let found = (0..100).find_map(|seed| all_failures(seed, Some(bug)).err());
        println!("{bug:?}: {}", found.unwrap_or_else(|| panic!("{bug:?} was not found")));
    }
}

#[test]
fn a_mapped_file_reads_as_it_was_mapped_or_not_at_all() {
    let mut reads = 0;
    for seed in 0..seeds(500) {
        reads += simulate_mapped_file(seed).unwrap_or_else(|error| panic!("{error}"));
    }
    assert!(reads > 50, "{reads}");
}
