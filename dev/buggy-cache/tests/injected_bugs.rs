//! Tests that find nothing prove nothing: each bug of `bugs.rs` must be found by what the cache's
//! own tests do, `crates/cache/tests/common`, or by one of the promises below.

#![allow(clippy::unwrap_used)]

extern crate buggy_cache as burgeon_cache;

#[path = "../../../crates/cache/tests/common/mod.rs"]
mod common;

use std::{
    ops::Range,
    panic::{AssertUnwindSafe, catch_unwind, set_hook},
    sync::{Arc, atomic::AtomicBool},
};

use buggy_cache::{
    Cache, ChunkKey, ChunkOwner, ChunkStore, Domain, KeyKind, Scope, Why,
    bugs::turn_on,
    list::{BUGS, Bug},
    policy::{Clock, Forecast},
    testing::CrashingDisk,
};
use common::{
    chunk, is_here, key,
    lives::{LIMIT, checkpointed, full, handed_on, left_over, run},
    loans, settings,
};

use testkit::Space;

/// Seeds that are tried for each bug.
const SEEDS: u64 = 60;

fn fresh(disk: &CrashingDisk) -> Cache {
    Cache::over(Arc::new(disk.clone()), settings(LIMIT), Box::<Clock>::default())
}

fn admit(cache: &Cache, chunks: Range<u64>, why: Why) {
    for n in chunks {
        cache.admit(key(n), &chunk(n), why);
    }
}

fn lives() {
    for seed in 0..SEEDS {
        run(seed, 3, seed * 7 % 331, 0);
        run(seed, 2, u64::MAX, 0);
    }
}

/// The first changes of a seed, as the last ones; all of them take minutes.
fn crashes() {
    for seed in 1..3 {
        let changes = run(seed, 1, u64::MAX, 0);
        for off_after in 0..changes {
            run(seed, 1, off_after, 0);
        }
    }
}

fn scrubbed() {
    for seed in 0..SEEDS {
        let disk = CrashingDisk::new(LIMIT * 8, seed);
        let cache = fresh(&disk);
        disk.lie(3);
        admit(&cache, 0..40, Why::Read);
        disk.lie(0);
        cache.scrub(u64::MAX, &AtomicBool::new(false));
        let found = (0..40).filter(|n| cache.find(&key(*n)).is_some());
        found.for_each(|n| assert!(is_here(&cache, n), "seed {seed}: a wrong chunk is found"));
    }
}

fn held() {
    let cache = fresh(&CrashingDisk::new(LIMIT * 8, 1));
    let first: Vec<ChunkKey> = (0..10).map(key).collect();
    let _hold = cache.hold(&first).unwrap();
    admit(&cache, 0..10, Why::Pin);
    admit(&cache, 100..400, Why::Read);
    cache.upkeep();
    (0..10).for_each(|n| assert!(is_here(&cache, n), "{n} is held"));
    let here: Vec<_> = (0..400).map(key).filter(|key| cache.find(key).is_some()).collect();
    assert!(cache.hold(&here).is_err(), "all of the cache is held");
}

fn filled() {
    let cache = fresh(&CrashingDisk::new(LIMIT * 8, 1));
    admit(&cache, 0..20, Why::Read);
    let before: Vec<u64> = (0..20).filter(|n| is_here(&cache, *n)).collect();
    admit(&cache, 100..400, Why::Fill);
    cache.upkeep();
    before.iter().for_each(|n| assert!(is_here(&cache, *n), "{n} was read before"));
    assert!(cache.report().used <= LIMIT / 5 * 4, "{:?}", cache.report());
}

/// Chunks that were read stay, whatever is prefetched: in the whole cache, and within a limit.
fn prefetched() {
    let policy = Box::new(Forecast::new(LIMIT, 1));
    let disk = Arc::new(CrashingDisk::new(LIMIT * 8, 1));
    let cache = Cache::over(disk, settings(LIMIT), policy);
    admit(&cache, 0..20, Why::Read);
    admit(&cache, 1000..1002, Why::Prefetch);
    let before: Vec<u64> = (0..20).filter(|n| is_here(&cache, *n)).collect();
    for n in 2000..2030 {
        admit(&cache, n..n + 1, Why::Prefetch);
        cache.upkeep();
    }
    before.iter().for_each(|n| assert!(is_here(&cache, *n), "{n} was read before"));

    let cache = Arc::new(fresh(&CrashingDisk::new(LIMIT * 8, 1)));
    let owner = ChunkOwner { image: "a".to_owned(), store: "s".to_owned() };
    let owned = cache.for_owner(&owner);
    cache.limit_owners(vec![(Scope::Image("a".to_owned()), LIMIT / 4)]);
    let admit = |n: u64, why| owned.admit(key(n), &chunk(n), why);
    let before: Vec<u64> = (0..4).filter(|n| admit(*n, Why::Read).is_some()).collect();
    before.iter().for_each(|n| assert!(is_here(&cache, *n)));
    (100..200).for_each(|n| {
        let _ = admit(n, Why::Prefetch);
    });
    before.iter().for_each(|n| assert!(is_here(&cache, *n), "{n} was read before"));
}

fn apart() {
    let of = |domain: &Domain| ChunkKey::new(domain, KeyKind::Chunk, b"digest");
    assert_ne!(of(&Domain::of(b"a")), of(&Domain::PUBLIC));
}

/// Calls `promise` with a folder.
fn in_folder(promise: impl FnOnce(&std::path::Path)) {
    promise(Space::new("buggy-cache").path("cache").as_path());
}

/// The promises, the cheap ones first.
const PROMISES: [(&str, fn()); 13] = [
    ("apart", apart),
    ("loans", || in_folder(loans::stay)),
    ("ended loans", || in_folder(loans::count_elsewhere)),
    ("held", held),
    ("filled", filled),
    ("prefetched", prefetched),
    ("scrubbed", scrubbed),
    ("full", || (0..SEEDS).for_each(full)),
    ("handed on", || (0..SEEDS).for_each(handed_on)),
    ("checkpointed", || (0..400).for_each(checkpointed)),
    ("left over", || (0..SEEDS).for_each(left_over)),
    ("lives", lives),
    ("crashes", crashes),
];

/// The first promise that is broken.
fn broken() -> Option<&'static str> {
    let breaks = |promise: &fn()| catch_unwind(AssertUnwindSafe(promise)).is_err();
    PROMISES.iter().find(|(_, promise)| breaks(promise)).map(|(name, _)| *name)
}

#[test]
fn the_copy_without_a_bug_is_sound_and_every_bug_is_found() {
    // Else the bugs might be found because the copy is broken.
    assert_eq!(broken(), None);
    // Hundreds of expected panics, each with a trace of the stack, would take most of the time.
    set_hook(Box::new(|_| ()));
    let mut missed = Vec::new();
    for Bug { name, says, .. } in BUGS {
        let _on = turn_on(name);
        match broken() {
            Some(promise) => println!("{name} ({says}): {promise}"),
            None => missed.push(*name),
        }
    }
    assert!(missed.is_empty(), "not found: {missed:?}");
}
