//! A small cache in a folder whose chunks are lent.

use std::{path::Path, sync::Arc};

use burgeon_cache::{
    Amount, Cache, ChunkStore as _, LentRange, Why, arena_name,
    disk::{CacheDisk as _, DiskFolder, IoMode},
    policy::Forecast,
};

use super::{BLOCK, key, settings};

pub const LEN: u64 = 16 * BLOCK;
pub const LIMIT: u64 = 4 << 20;
/// Chunks that fit.
pub const FIT: u64 = LIMIT / LEN;
/// Chunks that take half of it.
pub const HALF: u64 = FIT / 2;

pub fn bytes(n: u64) -> Vec<u8> {
    vec![(n % 255) as u8 + 1; LEN as usize]
}

pub fn open(path: &Path, lent: Vec<LentRange>) -> Arc<Cache> {
    let disk = Arc::new(DiskFolder::new(path).unwrap());
    let policy = Box::new(Forecast::new(LIMIT, 7));
    Arc::new(Cache::over_lending(disk, settings(LIMIT), policy, lent))
}

pub fn admit(cache: &Cache, chunks: std::ops::Range<u64>) {
    for n in chunks {
        cache.admit(key(n), &bytes(n), Why::Read);
        cache.upkeep();
        assert!(cache.report().used <= LIMIT, "{:?}", cache.report());
    }
}

/// The ranges of these chunks, as one who clones them names them.
pub fn lent(cache: &Cache, path: &Path, chunks: std::ops::Range<u64>) -> Vec<LentRange> {
    let disk = DiskFolder::new(path).unwrap();
    let of = |n| {
        let range = cache.range_of(&key(n)).unwrap();
        assert_eq!(u64::from(range.blocks) * BLOCK, LEN);
        let file = disk.open(&arena_name(range.arena), IoMode::Bytes).unwrap();
        let mut read = vec![0; LEN as usize];
        file.read_at(u64::from(range.block) * BLOCK, &mut read).unwrap();
        assert!(read == bytes(n), "the chunk lies there");
        LentRange { identity: file.identity(), range }
    };
    chunks.map(of).collect()
}

/// A cache whose chunks 0 to [`HALF`] are lent, and their ranges.
pub fn half_lent(path: &Path) -> (Arc<Cache>, Vec<LentRange>) {
    let cache = open(path, Vec::new());
    admit(&cache, 0..HALF);
    let ranges = lent(&cache, path, 0..HALF);
    cache.lend(ranges.clone());
    (cache, ranges)
}

pub fn read(cache: &Cache, n: u64) -> bool {
    let mut buf = vec![0; LEN as usize];
    cache.find(&key(n)).is_some_and(|place| cache.read(place, 0, &mut buf) && buf == bytes(n))
}

/// Lent chunks neither go nor take room, however much comes, and whatever is asked for.
pub fn stay(path: &Path) {
    let cache = open(path, Vec::new());
    // The policy would give up the latest first.
    admit(&cache, 500..500 + HALF / 2);
    admit(&cache, 0..HALF);
    cache.lend(lent(&cache, path, 0..HALF));
    let lent = cache.report().lent;
    admit(&cache, 1000..1000 + 3 * FIT);
    let report = cache.report();
    assert!((0..HALF).all(|n| read(&cache, n)), "{report:?}");
    assert!(report.used > LIMIT / 2 && report.lent == lent, "{report:?}");
    // The policy names a chunk that is held, and then none.
    let hold = cache.hold(&[key(500)]).unwrap();
    cache.evict(u64::MAX / 2);
    let report = cache.report();
    assert_eq!((report.used, report.held, report.chunks), (LEN, LEN, HALF + 1), "{report:?}");
    drop(hold);
    cache.evict(u64::MAX / 2);
    cache.resize(Some(Amount::Bytes(1 << 20)), Amount::Bytes(0));
    let report = cache.report();
    assert_eq!((report.used, report.chunks), (0, HALF), "{report:?}");
    assert!((0..HALF).all(|n| read(&cache, n)));
}

/// A chunk that leaves its lent place counts again: moved, or forgotten and fetched again.
pub fn count_elsewhere(path: &Path) {
    let (cache, ranges) = half_lent(path);
    // Others came, so that some may move.
    (1000..1000 + 4 * FIT).for_each(|n| {
        cache.admit(key(n), &bytes(n), Why::Read);
        cache.upkeep();
    });
    cache.evict(u64::MAX / 2);
    let lent = cache.report().lent;
    let arena = ranges[0].range.arena;
    let of_arena = ranges.iter().filter(|lent| lent.range.arena == arena).count() as u64;
    cache.empty_arena_of(&key(0)).unwrap();
    let report = cache.report();
    assert_eq!(report.lent, lent - of_arena * LEN, "{report:?}");
    let here = (0..HALF).filter(|n| cache.find(&key(*n)).is_some()).count() as u64;
    let moved = here - (HALF - of_arena);
    assert!(moved > 0, "{report:?}");
    assert_eq!(report.used, moved * LEN, "{report:?}");
    assert!((0..HALF).filter(|n| read(&cache, *n)).count() as u64 == here);
    cache.drop_keys(&(0..HALF).map(key).collect::<Vec<_>>());
    cache.upkeep();
    let report = cache.report();
    assert_eq!((report.used, report.lent, report.chunks), (0, 0, 0), "{report:?}");
}
