//! A simulator that finds nothing proves nothing: each bug of `dev/buggy-accelerate` must be found.

use buggy_accelerate_simulator::{
    crash_while_growing, crash_while_tidying, die_at_every_write, simulate,
};
use burgeon_accelerate::{bugs::turn_on, list::BUGS};

/// Seeds that are tried for each bug; most are found within ten.
const SEEDS: u64 = 160;
/// Seeds of which the power then fails while marks are cleared.
const TIDIED: u64 = 200;
/// Seeds of which the process then dies at each write.
const DYING: u64 = 2;
/// Seeds of which the power then fails while the cache grows.
const GROWING: u64 = 8;

#[test]
fn every_bug_is_found() {
    let mut missed = Vec::new();
    for bug in BUGS {
        let _on = turn_on(bug.name);
        // A bug may also show as a panic of an assertion.
        let caught = |run: &dyn Fn() -> Result<(), String>| {
            let run = std::panic::catch_unwind(std::panic::AssertUnwindSafe(run));
            run.unwrap_or_else(|_| Err("a panic".to_owned())).err()
        };
        let random = |seed| caught(&|| simulate(seed).map(drop));
        let tidying = |seed| caught(&|| crash_while_tidying(seed));
        let dying = |seed| caught(&|| die_at_every_write(2 * seed + 1).map(drop));
        let found = (0..SEEDS).find_map(random);
        let found = found.or_else(|| (0..TIDIED).find_map(tidying));
        let found = found.or_else(|| (0..DYING).find_map(dying));
        let growing = |seed| caught(&|| crash_while_growing(seed).map(drop));
        let found = found.or_else(|| (0..GROWING).find_map(growing));
        match found {
            Some(error) => println!("{} ({}): {error}", bug.name, bug.says),
            None => missed.push(bug.name),
        }
    }
    assert!(missed.is_empty(), "not found in {SEEDS} seeds each: {missed:?}");
}

/// Else the bugs above might be found because the copy is broken.
#[test]
fn the_copy_without_a_bug_keeps_its_promise() {
    for seed in 0..20 {
        simulate(seed).unwrap_or_else(|error| panic!("{error}"));
    }
}
