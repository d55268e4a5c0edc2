//! The cache through random and through exhaustive failures.

use accelerate_simulator::{
    Report, crash_at_every_write, crash_while_growing, crash_while_replacing, crash_while_tidying,
    die_at_every_write, simulate,
};

fn seeds(default: u64) -> u64 {
    std::env::var("SIMULATION_SEEDS").ok().and_then(|text| text.parse().ok()).unwrap_or(default)
}

#[test]
fn no_seed_breaks_the_promise() {
    let mut sum = Report::default();
    for seed in 0..seeds(120) {
        let report = simulate(seed).unwrap_or_else(|error| panic!("{error}"));
        sum.operations += report.operations;
        sum.power_failures += report.power_failures;
        sum.kills += report.kills;
        sum.stops += report.stops;
        sum.warm += report.warm;
        sum.hit_bytes += report.hit_bytes;
        sum.dead_caches += report.dead_caches;
        sum.inherited += report.inherited;
        sum.late += report.late;
        sum.growths += report.growths;
        sum.cut_growths += report.cut_growths;
        sum.replacements += report.replacements;
        sum.cut_replacements += report.cut_replacements;
    }
    println!("{sum:?}");
    let happened =
        [sum.power_failures, sum.kills, sum.stops, sum.warm, sum.hit_bytes, sum.dead_caches];
    let happened = happened.into_iter().chain([sum.inherited, sum.late]);
    assert!(happened.into_iter().all(|count| count > 0), "{sum:?}");
    // Not in a few seeds alone.
    let changes = [sum.growths, sum.cut_growths, sum.replacements, sum.cut_replacements];
    assert!(changes.into_iter().all(|count| count > 10), "{sum:?}");
}

#[test]
fn the_same_seed_is_the_same_run() {
    for seed in 0..10 {
        assert_eq!(simulate(seed), simulate(seed), "seed {seed}");
    }
}

#[test]
fn the_power_fails_at_every_write() {
    for seed in 0..seeds(2).min(20) {
        let failures = crash_at_every_write(seed).unwrap_or_else(|error| panic!("{error}"));
        assert!(failures > 60, "{failures}");
    }
}

#[test]
fn the_power_fails_while_marks_are_cleared() {
    for seed in 0..seeds(40) {
        crash_while_tidying(seed).unwrap_or_else(|error| panic!("{error}"));
    }
}

#[test]
fn the_power_fails_at_every_write_of_a_growth() {
    for seed in 0..seeds(12) {
        let (within, all) = crash_while_growing(seed).unwrap_or_else(|error| panic!("{error}"));
        // Two writes and two syncs.
        assert!(within == 4 && all > 6, "{within}, {all}");
    }
}

#[test]
fn the_power_fails_at_every_write_of_a_replacement() {
    for seed in 0..seeds(8) {
        let (within, all) = crash_while_replacing(seed).unwrap_or_else(|error| panic!("{error}"));
        // Two writes and a sync, on either disk.
        assert!(within == 6 && all > 12, "{within}, {all}");
    }
}

#[test]
fn the_process_dies_at_every_write_of_the_log() {
    for seed in 0..seeds(1).min(20) {
        let deaths = die_at_every_write(2 * seed + 1).unwrap_or_else(|error| panic!("{error}"));
        assert!(deaths > 60, "{deaths}");
    }
}
