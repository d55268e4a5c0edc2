//! Chunks whose space another file shares: neither counted nor evicted.

#![allow(clippy::unwrap_used)]

mod common;

use std::{path::Path, sync::Arc};

use burgeon_cache::{
    Amount, Cache, ChunkOwner, ChunkStore, LentRange, Scope, Why,
    disk::{CacheDisk, DiskFolder, IoMode},
    policy::Forecast,
};
use common::{BLOCK, key, settings};

const LEN: u64 = 16 * BLOCK;
const LIMIT: u64 = 4 << 20;
/// Chunks that fit.
const FIT: u64 = LIMIT / LEN;
/// Chunks that take half of it.
const HALF: u64 = FIT / 2;

fn bytes(n: u64) -> Vec<u8> {
    vec![(n % 255) as u8 + 1; LEN as usize]
}

fn open(path: &Path, lent: Vec<LentRange>) -> Arc<Cache> {
    let disk = Arc::new(DiskFolder::new(path).unwrap());
    let policy = Box::new(Forecast::new(LIMIT, 7));
    Arc::new(Cache::over_lending(disk, settings(LIMIT), policy, lent))
}

fn admit(cache: &Cache, chunks: std::ops::Range<u64>) {
    for n in chunks {
        cache.admit(key(n), &bytes(n), Why::Read);
        cache.upkeep();
        assert!(cache.report().used <= LIMIT, "{:?}", cache.report());
    }
}

/// The ranges of these chunks, as one who clones them names them.
fn lent(cache: &Cache, path: &Path, chunks: std::ops::Range<u64>) -> Vec<LentRange> {
    let disk = DiskFolder::new(path).unwrap();
    let of = |n| {
        let range = cache.range_of(&key(n)).unwrap();
        assert_eq!(u64::from(range.blocks) * BLOCK, LEN);
        let file = disk.open(&format!("arena-{:08x}", range.arena), IoMode::Bytes).unwrap();
        let mut read = vec![0; LEN as usize];
        file.read_at(u64::from(range.block) * BLOCK, &mut read).unwrap();
        assert!(read == bytes(n), "the chunk lies there");
        LentRange { identity: file.identity(), range }
    };
    chunks.map(of).collect()
}

/// A cache whose chunks 0 to [`HALF`] are lent, and their ranges.
fn half_lent(path: &Path) -> (Arc<Cache>, Vec<LentRange>) {
    let cache = open(path, Vec::new());
    admit(&cache, 0..HALF);
    let ranges = lent(&cache, path, 0..HALF);
    cache.lend(ranges.clone());
    (cache, ranges)
}

fn read(cache: &Cache, n: u64) -> bool {
    let mut buf = vec![0; LEN as usize];
    cache.find(&key(n)).is_some_and(|place| cache.read(place, 0, &mut buf) && buf == bytes(n))
}

#[test]
fn lent_chunks_are_not_counted_and_stay_however_much_comes() {
    let dir = tempfile::tempdir().unwrap();
    let cache = open(dir.path(), Vec::new());
    admit(&cache, 0..HALF);
    let used = cache.report().used;
    cache.lend(lent(&cache, dir.path(), 0..HALF));
    let report = cache.report();
    assert_eq!((report.used, report.lent, report.chunks), (0, used, HALF));
    // Three times the limit comes and goes; lent chunks neither go nor take room.
    admit(&cache, 1000..1000 + 3 * FIT);
    let report = cache.report();
    assert!((0..HALF).all(|n| read(&cache, n)), "{report:?}");
    assert!(report.used > LIMIT / 2 && report.lent == used, "{report:?}");
    // Not on demand, either, nor by a smaller limit.
    cache.evict(u64::MAX / 2);
    cache.resize(Some(Amount::Bytes(1 << 20)), Amount::Bytes(0));
    let report = cache.report();
    assert_eq!((report.used, report.chunks), (0, HALF), "{report:?}");
    assert!((0..HALF).all(|n| read(&cache, n)));
}

#[test]
fn the_end_of_a_loan_counts_its_chunks_again_and_evicts_those_beyond_the_limit() {
    let dir = tempfile::tempdir().unwrap();
    let (cache, ranges) = half_lent(dir.path());
    admit(&cache, 1000..1000 + 2 * FIT);
    // A part of it ends.
    let (stay, end) = ranges.split_at(8);
    cache.lend(stay.to_vec());
    let report = cache.report();
    assert_eq!(report.lent, 8 * LEN);
    cache.upkeep();
    let report = cache.report();
    assert!(report.used <= LIMIT, "{report:?}");
    assert!(end.len() > 8 && (0..8).all(|n| read(&cache, n)));
    // The same again changes nothing.
    cache.lend(stay.to_vec());
    assert_eq!(cache.report().lent, 8 * LEN);
    cache.lend(Vec::new());
    cache.evict(u64::MAX / 2);
    let report = cache.report();
    assert_eq!((report.used, report.lent, report.chunks), (0, 0, 0), "{report:?}");
}

#[test]
fn a_new_server_evicts_no_lent_chunk() {
    let dir = tempfile::tempdir().unwrap();
    let (cache, ranges) = half_lent(dir.path());
    // Alone both fit, and together they do not.
    admit(&cache, 1000..1000 + 3 * FIT);
    let before = cache.report();
    assert!(before.used + before.lent > LIMIT, "{before:?}");
    cache.sync().unwrap();
    drop(cache);
    let cache = open(dir.path(), ranges);
    let report = cache.report();
    assert_eq!((report.lent, report.chunks), (before.lent, before.chunks), "{report:?}");
    assert!((0..HALF).all(|n| read(&cache, n)));
    drop(cache);
    // Without the loan they count, and are too many.
    let cache = open(dir.path(), Vec::new());
    cache.upkeep();
    let report = cache.report();
    assert!(report.lent == 0 && report.used <= LIMIT && report.chunks < before.chunks);
}

#[test]
fn a_lent_chunk_that_rots_or_is_dropped_leaves_and_its_successor_counts() {
    let dir = tempfile::tempdir().unwrap();
    let cache = open(dir.path(), Vec::new());
    admit(&cache, 0..8);
    cache.lend(lent(&cache, dir.path(), 0..8));
    let place = cache.find(&key(3)).unwrap();
    cache.doubt(place, &key(3));
    cache.drop_keys(&[key(4)]);
    cache.upkeep();
    let report = cache.report();
    assert_eq!((report.lent, report.used, report.chunks), (6 * LEN, 0, 6), "{report:?}");
    admit(&cache, 3..5);
    let report = cache.report();
    assert_eq!((report.lent, report.used), (6 * LEN, 2 * LEN), "{report:?}");
}

#[test]
fn ranges_of_another_cache_lend_nothing() {
    let [one, two] = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    let [first, second] = [&one, &two].map(|dir| open(dir.path(), Vec::new()));
    admit(&first, 0..8);
    admit(&second, 0..8);
    let ranges = lent(&first, one.path(), 0..8);
    second.lend(ranges.clone());
    assert_eq!(
        (second.report().lent, second.report().used),
        (0, 8 * LEN),
        "the names are the same"
    );
    let cut = |lent: &LentRange| {
        let mut lent = *lent;
        lent.range.blocks -= 1;
        lent
    };
    first.lend(vec![cut(&ranges[2])]);
    assert_eq!(first.report().lent, 0, "a part of a chunk is not lent");
    let unknown = LentRange { identity: 0, ..ranges[0] };
    first.lend(vec![unknown]);
    assert_eq!(first.report().lent, 0);
}

#[test]
fn lent_chunks_are_outside_of_the_limits_of_owners() {
    let dir = tempfile::tempdir().unwrap();
    let cache = open(dir.path(), Vec::new());
    let owner = ChunkOwner { image: "a".to_owned(), store: "s".to_owned() };
    let store = cache.for_owner(&owner);
    cache.limit_owners(vec![(Scope::Image("a".to_owned()), 8 * LEN)]);
    (0..8).for_each(|n| assert!(store.admit(key(n), &bytes(n), Why::Read).is_some()));
    cache.lend(lent(&cache, dir.path(), 0..8));
    assert_eq!(cache.owned_bytes().owners[0].1, 0);
    let keys: Vec<_> = (0..8).map(key).collect();
    cache.claim(&owner, &keys);
    assert_eq!(cache.owned_bytes().owners[0].1, 0, "nobody owns what is lent");
    (20..40).for_each(|n| assert!(store.admit(key(n), &bytes(n), Why::Read).is_some()));
    assert_eq!(cache.owned_bytes().owners[0].1, 8 * LEN);
    assert!((0..8).all(|n| read(&cache, n)));
    cache.lend(Vec::new());
    assert_eq!(cache.owned_bytes().unclaimed, 8 * LEN);
    cache.claim(&owner, &keys);
    let owned = cache.owned_bytes();
    assert!(owned.owners[0].1 <= 8 * LEN && owned.unclaimed == 0, "{owned:?}");
}

#[test]
fn more_may_be_lent_than_the_cache_may_hold() {
    let dir = tempfile::tempdir().unwrap();
    let cache = open(dir.path(), Vec::new());
    let mut ranges = Vec::new();
    for round in 0..12 {
        let chunks = round * 100..round * 100 + HALF;
        admit(&cache, chunks.clone());
        ranges.extend(lent(&cache, dir.path(), chunks));
        cache.lend(ranges.clone());
    }
    let report = cache.report();
    assert_eq!((report.used, report.lent), (0, 6 * LIMIT), "{report:?}");
    admit(&cache, 5000..5000 + 2 * FIT);
    let report = cache.report();
    assert!(report.used > LIMIT / 2, "its address space is not used up: {report:?}");
    assert!((0..12).all(|round| read(&cache, round * 100)));
}
