//! Random deaths, damage, full disks and failing sources beside readers and writers that compare
//! every byte.
//!
//! ```text
//!   store (folder) ── nginx ── proxy that spoils ──► burgeon, its state on a small disk ──► three mounts
//!                                                        ▲                                    │
//!   deeds: kill, damage, fill, spoil, remount ───────────┘          load: readers, writers ◄──┘
//!                                                                         │ every error needs an excuse
//!   watch: D states, waits without end ──────────────► violations ◄───────┘
//! ```
//!
//! Invariants: a wrong byte is a violation, whatever happened; an error is one unless the deed
//! under way excuses it (`docs/cli.md`, "Effects of killed processes"); so is a wait beyond its
//! bound; and at the end nothing is left.
//!
//! `TORMENT_SECONDS` and `TORMENT_SEED` choose length and seed; `cargo xtask torment` sets them.

// Helpers outside test functions are tests, too.
#![allow(clippy::unwrap_used)]

mod deeds;
mod load;
mod watch;
mod world;

use std::{
    env,
    io::{Write, stderr},
    str::FromStr,
    time::{Duration, Instant, SystemTime},
};

use testkit::{Rng, scaled};

use self::{deeds::Deed, world::World};

/// Length of a run that nobody gave a length.
fn default_seconds() -> u64 {
    scaled(60, 120)
}

fn variable<T: FromStr>(name: &str) -> Option<T> {
    env::var(name).ok()?.parse().ok()
}

/// Prints past the capture of the test harness: the log of a passed test, too, is enough to repeat
/// the run.
fn say(words: &str) {
    let _ = writeln!(stderr(), "{words}");
}

#[test]
fn nothing_wrong_is_read_whatever_dies() {
    let seconds = variable("TORMENT_SECONDS").unwrap_or_else(default_seconds);
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    let seed = variable("TORMENT_SEED").unwrap_or(now.subsec_nanos().into());
    say(&format!("torment: cargo xtask torment --minutes {} --seed {seed}", seconds.div_ceil(60)));
    let mut world = World::new(seed);
    let load = world.load();
    let watch = watch::Watch::start(&world);
    let mut rng = Rng::new(seed);
    let end = Instant::now() + Duration::from_secs(seconds);
    while Instant::now() < end && world.ledger.is_clean() {
        let deed = Deed::pick(&mut rng);
        deed.perform(&mut world, &mut rng);
    }
    world.ledger.stop();
    let stuck = load.join();
    let longest_d = watch.finish();
    say(&format!("torment: seed {seed}: {}; longest D state {longest_d:?}", world.ledger.report()));
    let violations = world.ledger.violations();
    let waiting =
        if stuck > 0 { format!("; {stuck} threads of the load hang") } else { String::new() };
    let found = violations.join("\n");
    assert!(violations.is_empty() && stuck == 0, "seed {seed}: {found}{waiting}");
    world.end();
}
