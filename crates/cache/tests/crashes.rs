//! A model against the cache on a disk that crashes, lies and is full: after whatever happened, a
//! key gives its bytes or a miss, once the caller has verified them.

#![allow(clippy::unwrap_used)]

mod common;

use std::{collections::BTreeSet, sync::Arc, time::Duration};

use burgeon_cache::{
    Amount, Cache, ChunkStore, Settings, Why, policy::Clock, testing::CrashingDisk,
};
use common::{chunk, is_here, key, settings};
use testkit::Rng;

const LIMIT: u64 = 2 << 20;
const KEYS: u64 = 60;

fn open(disk: &CrashingDisk) -> Cache {
    let pause = Duration::ZERO;
    let short = Settings {
        journal_len: 4000,
        pause_min: pause,
        pause_max: pause,
        memory: 64 << 10,
        ..settings(LIMIT)
    };
    Cache::over(Arc::new(disk.clone()), short, Box::<Clock>::default())
}

/// The keys that are durable: found at the last successful sync, and not forgotten since.
#[derive(Default)]
struct Model {
    durable: BTreeSet<u64>,
    /// Bytes evicted or moved before that: a moved chunk is as new as one that was just admitted.
    gone: u64,
}

fn gone(cache: &Cache) -> u64 {
    let report = cache.report();
    report.evicted + report.moved
}

fn step(cache: &Cache, rng: &mut Rng, model: &mut Model) {
    let n = rng.below(KEYS);
    match rng.below(20) {
        0..10 => {
            let why = *rng.pick(&[Why::Read, Why::Read, Why::Prefetch, Why::Fill]);
            cache.admit(key(n), &chunk(n), why);
        }
        10..15 => drop(is_here(cache, n)),
        15 => drop(cache.evict(rng.below(LIMIT / 8))),
        16 => drop(cache.make_room(rng.below(LIMIT / 4))),
        17 => cache.drop_keys(&[key(n)]),
        18 => {
            if cache.sync().is_ok() {
                let is_found = |n: &u64| {
                    let place = cache.find(&key(*n));
                    place.is_some_and(|place| place.to_bits() >> 63 == 0)
                };
                model.durable = (0..KEYS).filter(is_found).collect();
                model.gone = gone(cache);
            }
        }
        _ => cache.upkeep(),
    }
    if gone(cache) != model.gone {
        model.durable.clear();
    }
}

fn run(seed: u64, lives: u64, off_after: u64, lies: u64) -> u64 {
    let disk = CrashingDisk::new(LIMIT * 8, seed);
    let mut rng = Rng::new(seed);
    let mut disk = disk;
    for life in 0..lives {
        let cache = open(&disk);
        disk.off_after(off_after);
        disk.lie(lies);
        let mut model = Model { gone: gone(&cache), ..Model::default() };
        for _ in 0..150 {
            step(&cache, &mut rng, &mut model);
            let report = cache.report();
            assert!(report.used <= LIMIT, "seed {seed} {report:?}");
        }
        drop(cache);
        assert!(disk.arenas_peak() <= LIMIT + 64 * lies * 4096, "seed {seed}");
        disk.lie(0);
        disk = if rng.below(3) == 0 {
            disk.off_after(u64::MAX);
            disk.reboot()
        } else {
            disk.crash()
        };
        let cache = open(&disk);
        // Its start may evict, to have headroom below the limit again.
        let is_complete = gone(&cache) == 0;
        let here: BTreeSet<u64> = (0..KEYS).filter(|n| is_here(&cache, *n)).collect();
        if lies == 0 && is_complete {
            let missing: Vec<_> = model.durable.difference(&here).collect();
            assert!(missing.is_empty(), "seed {seed} off {off_after} life {life}: {missing:?}");
        }
        // It goes on as if nothing had been.
        (0..4).for_each(|_| cache.upkeep());
        assert!(cache.admit(key(KEYS), &chunk(KEYS), Why::Read).is_some());
        assert!(is_here(&cache, KEYS), "seed {seed} off {off_after}");
        drop(cache);
        disk = disk.reboot();
    }
    disk.changes()
}

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
    for seed in 100..200 {
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
    for seed in 0..20 {
        let disk = CrashingDisk::new(LIMIT * 2, seed);
        let cache = open(&disk);
        for n in 0..40 {
            cache.admit(key(n), &chunk(n), Why::Read);
        }
        disk.others_take(LIMIT * 2);
        for n in 0..KEYS {
            cache.admit(key(n), &chunk(n), Why::Read);
            is_here(&cache, n);
        }
        cache.upkeep();
        assert_eq!(cache.report().chunks, 0, "others want all of it");
        disk.others_take(0);
        cache.upkeep();
        assert!(cache.admit(key(1), &chunk(1), Why::Read).is_some() && is_here(&cache, 1));
    }
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
        let bounds = Settings {
            limit: Some(Amount::Bytes(limit)),
            keep_free: Amount::Bytes(keep_free),
            ..settings(limit)
        };
        let cache = Cache::over(Arc::new(disk.clone()), bounds, Box::<Clock>::default());
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
