//! The volume through random and through exhaustive failures.

use simulator::{Report, SharedReport, crash_at_every_write, seeds, simulate, simulate_shared};

/// Some 20 seconds on two cores, unoptimised.
const SEEDS: u64 = 2000;
/// Some ten seconds.
const SHARED_SEEDS: u64 = 600;

#[test]
fn no_seed_breaks_the_promise() {
    let mut sum = Report::default();
    for seed in 0..seeds(SEEDS) {
        let report = simulate(seed).unwrap_or_else(|error| panic!("{error}"));
        sum.operations += report.operations;
        sum.power_failures += report.power_failures;
        sum.kills += report.kills;
        sum.swaps += report.swaps;
    }
    println!("{sum:?}");
    assert!(sum.operations > 0 && sum.power_failures > 0 && sum.kills > 0 && sum.swaps > 0);
}

#[test]
fn the_same_seed_is_the_same_run() {
    for seed in 0..20 {
        assert_eq!(simulate(seed), simulate(seed), "seed {seed}");
    }
}

#[test]
fn the_power_fails_at_every_write() {
    for seed in 0..seeds(4).min(16) {
        for verified in [false, true] {
            let tried = crash_at_every_write(seed, 5, verified);
            let tried = tried.unwrap_or_else(|error| panic!("{error}"));
            assert!(tried.writes >= 4, "{tried:?}");
            assert!(tried.crashes > tried.writes * tried.writes, "{tried:?}");
        }
    }
}

#[test]
fn images_that_share_a_cache_with_a_hostile_one_keep_their_promise() {
    let mut sum = SharedReport::default();
    for seed in 0..seeds(SHARED_SEEDS) {
        let report = simulate_shared(seed).unwrap_or_else(|error| panic!("{error}"));
        sum.operations += report.operations;
        sum.evicted += report.evicted;
        sum.shared += report.shared;
        sum.deaths += report.deaths;
        sum.exposed += report.exposed;
    }
    println!("{sum:?}");
    assert!(sum.evicted > 0 && sum.shared > 0 && sum.deaths > 0 && sum.exposed > 0, "{sum:?}");
}
