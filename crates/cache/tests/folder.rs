//! The cache over a real folder.

#![allow(clippy::unwrap_used)]

mod common;

use std::{
    fs,
    os::unix::fs::{FileExt, MetadataExt},
    path::Path,
    sync::{Arc, atomic::AtomicBool},
};

use burgeon_block::ErrorKind;
use burgeon_cache::{
    Amount, Cache, CacheSettings, CacheState, ChunkStore, Why, arena_name,
    disk::{CacheDisk, DiskFolder},
    policy::Clock,
};
use common::{chunk, is_here, key, settings};

const MIB: u64 = 1 << 20;

fn open(path: &Path, settings: CacheSettings) -> Cache {
    Cache::over(Arc::new(DiskFolder::new(path).unwrap()), settings, Box::<Clock>::default())
}

fn fill(cache: &Cache, chunks: std::ops::Range<u64>) {
    for n in chunks {
        assert!(cache.admit(key(n), &chunk(n), Why::Read).is_some(), "{n}");
    }
}

/// Bytes that the arenas in `path` take.
fn taken(path: &Path) -> u64 {
    let sizes = fs::read_dir(path).unwrap().map(|entry| {
        let entry = entry.unwrap();
        let is_arena = entry.file_name().to_str().unwrap().starts_with("arena-");
        if is_arena { entry.metadata().unwrap().blocks() * 512 } else { 0 }
    });
    sizes.sum()
}

#[test]
fn admitted_chunks_are_found_again_after_a_restart() {
    let dir = tempfile::tempdir().unwrap();
    let cache = open(dir.path(), settings(64 * MIB));
    for n in 0..500 {
        assert!(cache.admit(key(n), &chunk(n), Why::Read).is_some());
    }
    cache.doubt(cache.find(&key(7)).unwrap(), &key(7));
    cache.sync().unwrap();
    drop(cache);

    let cache = open(dir.path(), settings(64 * MIB));
    assert!((0..500).all(|n| is_here(&cache, n) == (n != 7)));
    let report = cache.report();
    assert_eq!(report.chunks, 499);
    // A part of a chunk, into a buffer that direct I/O does not take.
    let place = cache.find(&key(3)).unwrap();
    let mut buf = vec![0; 1001];
    assert!(cache.read(place, 77, &mut buf) && buf == chunk(3)[77..1078]);
    let len = chunk(3).len() as u32;
    assert!(!cache.read(place, len - 1000, &mut buf), "beyond the chunk");
}

#[test]
fn unrecorded_chunks_are_freed_by_the_next_start() {
    let dir = tempfile::tempdir().unwrap();
    let cache = open(dir.path(), settings(64 * MIB));
    fill(&cache, 0..100);
    cache.sync().unwrap();
    fill(&cache, 100..200);
    drop(cache);
    let before = taken(dir.path());
    let cache = open(dir.path(), settings(64 * MIB));
    assert!((0..200).all(|n| is_here(&cache, n) == (n < 100)));
    (0..4).for_each(|_| cache.upkeep());
    let living: u64 = (0..100).map(|n| chunk(n).len() as u64).sum();
    assert_eq!(cache.report().used, living);
    assert!(taken(dir.path()) < before, "{} {before}", taken(dir.path()));
    assert!((0..100).all(|n| is_here(&cache, n)));
}

#[test]
fn the_limit_and_the_address_space_are_bounded() {
    let dir = tempfile::tempdir().unwrap();
    let limit = 32 * MIB;
    let cache = open(dir.path(), settings(limit));
    let (mut kept, mut last) = (0, Vec::new());
    for n in 0..10_000 {
        if cache.admit(key(n), &chunk(n), Why::Read).is_some() {
            kept += 1;
            last.push(n);
        }
        let report = cache.report();
        assert!(report.used <= limit, "{report:?}");
        assert!(report.address_space <= 2 * limit + 4 * MIB, "{report:?}");
        if n % 50 == 0 {
            cache.upkeep();
        }
    }
    let report = cache.report();
    assert!(kept > 9_000, "{kept} {report:?}");
    assert!(taken(dir.path()) <= limit + MIB, "{} {report:?}", taken(dir.path()));
    assert!(report.moved <= report.admitted / 10, "{report:?}");
    assert!(last.iter().rev().take(200).all(|n| is_here(&cache, *n)));
    let files = fs::read_dir(dir.path()).unwrap().count();
    assert!(files < 40, "{files} files");
    cache.upkeep();
    cache.sync().unwrap();
    let chunks = cache.report().chunks;
    drop(cache);
    let cache = open(dir.path(), settings(limit));
    assert_eq!(cache.report().chunks, chunks);
    assert!((0..10_000).filter(|n| is_here(&cache, *n)).count() as u64 == chunks);
}

#[test]
fn a_smaller_limit_evicts_at_once_and_holds_are_bounded() {
    let dir = tempfile::tempdir().unwrap();
    let cache = open(dir.path(), settings(64 * MIB));
    fill(&cache, 0..800);
    let keys: Vec<_> = (0..40).map(key).collect();
    let hold = cache.hold(&keys).unwrap();
    let all: Vec<_> = (0..800).map(key).collect();
    cache.resize(Some(Amount::Bytes(8 * MIB)), Amount::Bytes(0));
    let report = cache.report();
    assert!(report.used <= 8 * MIB && report.chunks > 40, "{report:?}");
    assert!((0..40).all(|n| is_here(&cache, n)));
    assert_eq!(cache.hold(&all).unwrap_err().kind(), ErrorKind::NoSpace);
    assert!(cache.evict(100 * MIB) > 0);
    assert_eq!(cache.report().chunks, 40);
    drop(hold);
    cache.evict(100 * MIB);
    assert_eq!((cache.report().chunks, cache.report().held), (0, 0));
    cache.upkeep();
    assert!(taken(dir.path()) < MIB);
}

#[test]
fn a_hold_that_is_renewed_stays_when_the_limit_is_lowered() {
    let dir = tempfile::tempdir().unwrap();
    let cache = open(dir.path(), settings(64 * MIB));
    fill(&cache, 0..200);
    let keys: Vec<_> = (0..100).map(key).collect();
    let hold = cache.hold(&keys).unwrap();
    let held = cache.report().held;
    cache.resize(Some(Amount::Bytes(held)), Amount::Bytes(0));
    // More than 80 % of the limit, so nothing new can be held.
    let now = cache.report().held;
    assert!(now > 0);
    let renewed = cache.hold(&keys).unwrap();
    drop(hold);
    assert_eq!(cache.report().held, now);
    drop(renewed);
    assert_eq!(cache.report().held, 0);
}

#[test]
fn a_scrub_forgets_what_rotted() {
    let dir = tempfile::tempdir().unwrap();
    let cache = open(dir.path(), settings(64 * MIB));
    fill(&cache, 0..100);
    cache.sync().unwrap();
    let arena = fs::File::options().write(true).open(dir.path().join("arena-00000001")).unwrap();
    arena.write_all_at(&[0xff; 4096], 40 * 4096).unwrap();
    arena.sync_all().unwrap();
    let events = testkit::Events::gather();
    let (read, forgotten) = cache.scrub(u64::MAX, &AtomicBool::new(false));
    let said = events.take();
    let is_told = |line: &String| {
        line.starts_with("ERROR a scrub of the cache has forgotten a chunk")
            && line.contains(" key=")
    };
    assert!(said.len() == 1 && said.iter().all(is_told), "{said:?}");
    assert_eq!((read, forgotten), ((0..100).map(|n| chunk(n).len() as u64).sum(), 1));
    assert_eq!((0..100).filter(|n| is_here(&cache, *n)).count(), 99);
}

/// A cut off, exchanged or removed arena, below a running cache and before the next start: its
/// chunks are misses, nothing else is lost, and the space is counted as it is.
#[test]
fn spoilt_arenas_cost_misses_and_no_more() {
    type Spoil = fn(&Path);
    let arena = |path: &Path, n: u32| path.join(arena_name(n));
    let spoils: [(&str, Spoil); 4] = [
        ("cut off", |path| {
            let file = fs::File::options().write(true).open(path.join("arena-00000001")).unwrap();
            file.set_len(MIB).unwrap();
        }),
        ("empty", |path| fs::write(path.join("arena-00000001"), b"").unwrap()),
        ("removed", |path| fs::remove_file(path.join("arena-00000001")).unwrap()),
        ("exchanged", |path| {
            let [one, two, aside] = ["arena-00000001", "arena-00000002", "aside"];
            for (from, to) in [(one, aside), (two, one), (aside, two)] {
                fs::rename(path.join(from), path.join(to)).unwrap();
            }
        }),
    ];
    for (what, spoil) in spoils {
        for is_running in [true, false] {
            let dir = tempfile::tempdir().unwrap();
            let mut cache = open(dir.path(), settings(64 * MIB));
            fill(&cache, 0..500);
            cache.sync().unwrap();
            assert!(arena(dir.path(), 3).exists(), "several arenas");
            if is_running {
                spoil(dir.path());
            }
            drop(cache);
            if !is_running {
                spoil(dir.path());
            }
            cache = open(dir.path(), settings(64 * MIB));
            let here = (0..500).filter(|n| is_here(&cache, *n)).count();
            assert!((100..500).contains(&here), "{what}: {here} chunks are left");
            // Doubted chunks are forgotten, and all can be kept again.
            cache.upkeep();
            fill(&cache, 0..500);
            assert!((0..500).all(|n| is_here(&cache, n)), "{what}");
            // A gap of an arena is closed in each round.
            (0..8).for_each(|_| cache.upkeep());
            let report = cache.report();
            let bytes: u64 = (0..500).map(|n| chunk(n).len() as u64).sum();
            assert_eq!((report.chunks, report.used), (500, bytes), "{what}");
            // The file system counts its own blocks of extents, too.
            let taken = taken(dir.path());
            assert!(taken <= bytes + (64 << 10), "{what}: {taken} of {bytes}");
        }
    }
}

#[test]
fn a_second_server_waits_for_the_folder() {
    let dir = tempfile::tempdir().unwrap();
    let settings = CacheSettings { memory: MIB, ..settings(64 * MIB) };
    let first = open(dir.path(), settings);
    first.admit(key(1), &chunk(1), Why::Read).unwrap();
    first.sync().unwrap();
    let second = open(dir.path(), settings);
    assert!(matches!(second.state(), CacheState::Stopped { .. }));
    assert!(!is_here(&second, 1));
    // It still keeps a few chunks in memory.
    second.admit(key(2), &chunk(2), Why::Read).unwrap();
    assert!(is_here(&second, 2));
    drop(first);
    second.upkeep();
    assert_eq!(second.state(), CacheState::Writing);
    assert!(is_here(&second, 1) && is_here(&second, 2));
}

#[test]
fn a_removed_folder_costs_misses_and_no_error() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("cache");
    let cache = open(&path, settings(64 * MIB));
    fill(&cache, 0..100);
    fs::remove_dir_all(&path).unwrap();
    cache.upkeep();
    // It begins anew at once, because pins are fetched again now and not after a pause.
    assert_eq!(cache.state(), CacheState::Writing);
    assert!((0..100).all(|n| !is_here(&cache, n)));
    fill(&cache, 0..100);
    assert!((0..100).all(|n| is_here(&cache, n)));
}

/// A first load may fail: the next round takes the folder again.
#[test]
fn a_server_takes_its_own_folder_again_and_no_other_ones() {
    let dir = tempfile::tempdir().unwrap();
    let [own, other] = [(); 2].map(|()| DiskFolder::new(dir.path()).unwrap());
    assert!(own.take().unwrap() && own.take().unwrap());
    assert!(!other.take().unwrap());
    drop(own);
    assert!(other.take().unwrap());
}

#[test]
fn a_place_in_memory_is_not_lasting() {
    let dir = tempfile::tempdir().unwrap();
    let cache = open(dir.path(), CacheSettings { memory: MIB, ..settings(64 * MIB) });
    let on_disk = cache.admit(key(1), &chunk(1), Why::Read).unwrap();
    assert!(cache.is_lasting(on_disk));
    cache.resize(Some(Amount::Bytes(0)), Amount::Bytes(0));
    let in_memory = cache.admit(key(2), &chunk(2), Why::Read).unwrap();
    assert!(is_here(&cache, 2) && !cache.is_lasting(in_memory));
}

#[test]
fn the_hits_of_other_sizes_are_estimated() {
    let dir = tempfile::tempdir().unwrap();
    let cache = open(dir.path(), settings(64 * MIB));
    fill(&cache, 0..200);
    for _ in 0..3 {
        (0..200).for_each(|n| cache.touch(cache.find(&key(n)).unwrap()));
        cache.upkeep();
    }
    let [half, same, twice] = cache.report().hit_permille.unwrap();
    assert!(half <= same && same <= twice && (600..=900).contains(&twice), "{half} {same} {twice}");
}
