//! A model against the cache on a disk that crashes and lies: after whatever happened, a key gives
//! its bytes or a miss, once the caller has verified them; and limits hold.

use std::{collections::BTreeSet, sync::Arc, time::Duration};

use burgeon_cache::{
    Cache, CacheSettings, ChunkStore, Why, policy::Forecast, testing::CrashingDisk,
};
use testkit::Rng;

use super::{chunk, is_here, key, settings};

pub const LIMIT: u64 = 2 << 20;
pub const KEYS: u64 = 60;

pub fn open(disk: &CrashingDisk) -> Cache {
    let pause = Duration::ZERO;
    let short = CacheSettings {
        journal_len: 4000,
        pause_min: pause,
        pause_max: pause,
        memory: 64 << 10,
        ..settings(LIMIT)
    };
    Cache::over(Arc::new(disk.clone()), short, Box::new(Forecast::new(1 << 20, 7)))
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
                // An earlier crash may have left a record without its bytes.
                let is_found = |n: &u64| {
                    let place = cache.find(&key(*n)).filter(|place| cache.is_lasting(*place));
                    let mut bytes = vec![0; chunk(*n).len()];
                    place.is_some_and(|at| cache.read(at, 0, &mut bytes) && bytes == chunk(*n))
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

/// Runs `lives` lives of a cache; the power fails after `off_after` changes of its files. One of
/// `lies` writes is lost, and one goes elsewhere. Returns the number of changes.
pub fn run(seed: u64, lives: u64, off_after: u64, lies: u64) -> u64 {
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

/// A server is killed when it has written its records; the next one syncs, and then the power
/// fails.
pub fn handed_on(seed: u64) {
    let disk = CrashingDisk::new(LIMIT * 8, seed);
    let cache = open(&disk);
    for n in 0..20 {
        cache.admit(key(n), &chunk(n), Why::Read);
    }
    cache.flush();
    drop(cache);
    let disk = disk.reboot();
    let cache = open(&disk);
    cache.sync().unwrap();
    let here: Vec<u64> = (0..20).filter(|n| is_here(&cache, *n)).collect();
    assert!(here.len() > 10, "seed {seed}: {here:?}");
    drop(cache);
    let cache = open(&disk.crash());
    here.iter().for_each(|n| assert!(is_here(&cache, *n), "seed {seed}: {n} was synced"));
}

/// A server is killed before it has written its records; the next one fills the cache again.
pub fn left_over(seed: u64) {
    let disk = CrashingDisk::new(LIMIT * 8, seed);
    let mut disk = disk;
    for life in 0..3 {
        let cache = open(&disk);
        for n in 100 * life..100 * life + 60 {
            cache.admit(key(n), &chunk(n), Why::Read);
            // The arena of the others is not empty then.
            if n % 100 == 5 {
                cache.flush();
            }
        }
        drop(cache);
        disk = disk.reboot();
    }
    assert!(disk.arenas_peak() <= LIMIT, "seed {seed}: {}", disk.arenas_peak());
}

/// Others take the disk, and give it back.
pub fn full(seed: u64) {
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
    let is_lasting = cache.find(&key(1)).is_some_and(|place| cache.is_lasting(place));
    assert!(is_lasting, "seed {seed}: it is written again");
}

/// The power fails before the change `off_after` of a time in which checkpoints are written, and
/// nothing that was synced is evicted.
pub fn checkpointed(off_after: u64) {
    let disk = CrashingDisk::new(LIMIT * 8, off_after);
    let cache = open(&disk);
    for n in 0..10 {
        cache.admit(key(n), &chunk(n), Why::Read);
    }
    cache.sync().unwrap();
    disk.off_after(off_after);
    for n in 1000..1080 {
        cache.admit(key(n), &chunk(n), Why::Read);
        cache.drop_keys(&[key(n)]);
        cache.flush();
    }
    drop(cache);
    let cache = open(&disk.crash());
    (0..10).for_each(|n| assert!(is_here(&cache, n), "off {off_after}: {n} was synced"));
}
