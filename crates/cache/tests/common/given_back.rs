//! A full cache with readers on a small file system of which others take a part.
//!
//! ```text
//!   size ─┬─ floor ──────────────┬─ room: chunks, and readers of them ─┐
//!         └─ free ◄── others take ┘◄── the cache gives back, until the floor is free or it is empty
//! ```

use std::{
    fs::{self, File},
    path::{Path, PathBuf},
    sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    thread,
    time::{Duration, Instant},
};

use burgeon_cache::{
    Amount, Cache, CacheSettings, ChunkKey, ChunkStore, Domain, KeyKind, Why, policy::Forecast,
};
use rustix::{
    fs::{FallocateFlags, fallocate, statvfs, syncfs},
    io::Errno,
};
use testkit::{Ends, Mounted, Rng, Space};

/// File systems, by the commands that make them.
pub const DISKS: [(&str, &[&str]); 3] = [
    ("ext4", &["mkfs.ext4", "-q", "-F"]),
    ("XFS", &["mkfs.xfs", "-q"]),
    ("btrfs", &["mkfs.btrfs", "-q"]),
];

const CHUNK_LEN: usize = 256 << 10;
const READERS: u64 = 2;
/// Longest wait for a cache that is to fill or to give back.
const PATIENCE: Duration = Duration::from_secs(120);

/// The space that a cache gave back.
#[derive(Debug)]
pub struct GivenBack {
    /// Bytes that others took below the floor.
    pub lacking: u64,
    /// Bytes that were free again after a second.
    pub in_a_second: u64,
    /// From the moment at which others began to take, until the floor was free again.
    pub took: Duration,
    /// Bytes that the cache has punched by then.
    pub punched: u64,
    /// Reads of chunks meanwhile, all of them right.
    pub reads: u64,
}

fn key(n: u64) -> ChunkKey {
    ChunkKey::new(&Domain::PUBLIC, KeyKind::Chunk, &n.to_le_bytes())
}

fn chunk(n: u64) -> Vec<u8> {
    (n << 1 | 1).to_le_bytes().repeat(CHUNK_LEN / 8)
}

fn free(folder: &Path) -> u64 {
    let disk = statvfs(folder).unwrap();
    disk.f_bavail * disk.f_frsize
}

/// Reads any of `chunks`; true if it is here, and then it is right.
fn read(cache: &Cache, rng: &mut Rng, chunks: u64, buf: &mut [u8]) -> bool {
    let n = rng.below(chunks);
    let Some(place) = cache.find(&key(n)) else { return false };
    let is_read = cache.read(place, 0, buf);
    cache.touch(place);
    // An evicted chunk reads as zeros, which its reader takes for a miss.
    let is_hole = buf.iter().all(|byte| *byte == 0);
    assert!(!is_read || is_hole || buf == chunk(n), "{n}");
    is_read && !is_hole
}

/// A full cache on a file system of its own.
struct Full {
    at: PathBuf,
    _disk: Mounted,
    floor: u64,
    cache: Cache,
    chunks: u64,
}

/// A cache that takes `room` of a file system of `size` bytes.
fn full(space: &Space, mkfs: &[&str], (size, room): (u64, u64)) -> Full {
    let at = space.path("disk");
    let _disk = space.disk_with(&at, size, mkfs);
    let folder = at.join("cache");
    fs::create_dir(&folder).unwrap();
    let floor = free(&at) - room;
    let settings =
        CacheSettings { keep_free: Amount::Bytes(floor), memory: 0, ..CacheSettings::default() };
    let cache = Cache::open(&folder, settings, Box::new(Forecast::new(room, 1))).unwrap();
    let chunks = room / CHUNK_LEN as u64;
    let until = Instant::now() + PATIENCE;
    for n in 0..chunks {
        // The last ones are refused.
        cache.admit(key(n), &chunk(n), Why::Read);
    }
    while cache.report().used < room / 4 * 3 {
        assert!(Instant::now() < until, "{:?}", cache.report());
        (0..chunks).for_each(|n| {
            if cache.find(&key(n)).is_none() {
                cache.admit(key(n), &chunk(n), Why::Read);
            }
        });
    }
    Full { at, _disk, floor, cache, chunks }
}

/// Evicts half of a cache that takes `room` of a file system of `size` bytes. Returns the bytes
/// that it says it has freed, and those that are free more than before.
pub fn evict_half(space: &Space, mkfs: &[&str], (size, room): (u64, u64)) -> (u64, u64) {
    let full = full(space, mkfs, (size, room));
    // Near its floor the cache waits for freed space in any case.
    full.cache.resize(None, Amount::Bytes(0));
    syncfs(File::open(&full.at).unwrap()).unwrap();
    let before = free(&full.at);
    let freed = full.cache.evict(room / 2);
    (freed, free(&full.at).saturating_sub(before))
}

/// A cache takes `room` of a file system of `size` bytes, and others take `share` per cent of that.
pub fn give_back(space: &Space, mkfs: &[&str], (size, room): (u64, u64), share: u64) -> GivenBack {
    let Full { at, _disk, floor, cache, chunks } = full(space, mkfs, (size, room));
    let (ends, reads) = (AtomicBool::new(false), AtomicU64::new(0));
    let mut given = thread::scope(|scope| {
        for reader in 0..READERS {
            let (cache, ends, reads) = (&cache, &ends, &reads);
            scope.spawn(move || {
                let (mut rng, mut buf) = (Rng::new(reader), vec![0; CHUNK_LEN]);
                while !ends.load(Relaxed) {
                    reads.fetch_add(read(cache, &mut rng, chunks, &mut buf).into(), Relaxed);
                }
            });
        }
        // They are ended by a failure, too.
        let end = Ends(&ends);
        let hog = File::create(at.join("others")).unwrap();
        // btrfs counts space with its commits, and gives less than it says.
        syncfs(&hog).unwrap();
        // Nothing, if the file system has taken a little for itself with that.
        let above = free(&at).saturating_sub(floor);
        let mut take = above + room / 100 * share;
        let begun = Instant::now();
        while let Err(error) = fallocate(&hog, FallocateFlags::empty(), 0, take) {
            assert!(error == Errno::NOSPC && take > above, "{error}");
            take -= room / 64;
        }
        syncfs(&hog).unwrap();
        let lacking = take.saturating_sub(above);
        let given = wait_for_space(&cache, &at, (floor, lacking), begun);
        drop(end);
        given
    });
    given.reads = reads.into_inner();
    given
}

fn wait_for_space(
    cache: &Cache,
    at: &Path,
    (floor, lacking): (u64, u64),
    begun: Instant,
) -> GivenBack {
    let mut in_a_second = 0;
    loop {
        let (now, after) = (free(at), begun.elapsed());
        if after <= Duration::from_secs(1) {
            in_a_second = now.saturating_sub(floor - lacking).min(lacking);
        }
        if now >= floor {
            let punched = cache.report().punched;
            return GivenBack { lacking, in_a_second, took: after, punched, reads: 0 };
        }
        assert!(after < PATIENCE, "{now} of {floor} bytes are free: {:?}", cache.report());
        thread::sleep(Duration::from_millis(1));
    }
}
