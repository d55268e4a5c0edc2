//! The cache on a disk that crashes, lies and is full (`common/lives.rs`).

#![allow(clippy::unwrap_used)]

mod common;

use std::sync::Arc;

use burgeon_cache::{
    Amount, Cache, CacheSettings, ChunkStore, Why, policy::Forecast, testing::CrashingDisk,
};
use common::{
    chunk, is_here, key,
    lives::{LIMIT, checkpointed, full, handed_on, left_over, open, run},
    settings,
};

#[test]
fn every_change_of_a_seed_may_be_the_last() {
    for seed in 1..5 {
        let changes = run(seed, 1, u64::MAX, 0);
        assert!(changes > 60, "{changes}");
        for off_after in 0..changes {
            run(seed, 1, off_after, 0);
        }
    }
}

#[test]
fn many_seeds_with_crashes() {
    for seed in 0..200 {
        run(seed, 3, seed * 7 % 331, 0);
    }
}

#[test]
fn lost_and_misdirected_writes_cost_misses() {
    for seed in 1000..1060 {
        run(seed, 3, u64::MAX, 2 + seed % 30);
    }
}

#[test]
fn a_full_disk_costs_misses_and_the_cache_recovers() {
    (0..20).for_each(full);
}

#[test]
fn a_sync_makes_the_records_of_a_killed_server_durable() {
    (0..40).for_each(handed_on);
}

#[test]
fn no_moment_of_a_checkpoint_loses_what_was_synced() {
    (0..400).for_each(checkpointed);
}

#[test]
fn remains_of_a_killed_server_count() {
    (0..20).for_each(left_over);
}

#[test]
fn a_small_cache_is_not_emptied_by_its_start() {
    let disk = CrashingDisk::new(LIMIT * 8, 1);
    let cache = open(&disk);
    let here: Vec<u64> =
        (0..20).filter(|n| cache.admit(key(*n), &chunk(*n), Why::Read).is_some()).collect();
    cache.sync().unwrap();
    drop(cache);
    let cache = open(&disk.crash());
    (0..4).for_each(|_| cache.upkeep());
    assert!(here.len() > 10 && here.iter().all(|n| is_here(&cache, *n)));
}

#[test]
fn limit_and_floor_hold_while_many_admit() {
    for (limit, keep_free) in [(LIMIT, 0), (LIMIT * 8, LIMIT * 3)] {
        let disk = CrashingDisk::new(LIMIT * 4, 1);
        disk.slow_down(50);
        let bounds = CacheSettings {
            limit: Some(Amount::Bytes(limit)),
            keep_free: Amount::Bytes(keep_free),
            ..settings(limit)
        };
        let cache =
            Cache::over(Arc::new(disk.clone()), bounds, Box::new(Forecast::new(1 << 20, 7)));
        std::thread::scope(|scope| {
            for thread in 0..8 {
                let cache = &cache;
                scope.spawn(move || {
                    for n in 0..150 {
                        let n = thread * 1000 + n;
                        cache.admit(key(n), &chunk(n), Why::Read);
                        if n % 7 == 0 {
                            cache.upkeep();
                        }
                        is_here(cache, n);
                    }
                });
            }
        });
        let report = cache.report();
        assert!(report.admitted > LIMIT, "{report:?}");
        assert!(disk.arenas_peak() <= limit, "{report:?}");
        // Journals and checkpoints are small, and come out of the headroom.
        let records = LIMIT / 64;
        assert!(disk.free_least() + records >= keep_free, "{} {report:?}", disk.free_least());
    }
}
