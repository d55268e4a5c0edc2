//! A cache on a disk: a hit names the place of its bytes, and the frontend reads them there.

#![allow(clippy::unwrap_used)]

mod common;

use std::{fs::OpenOptions, os::unix::fs::FileExt, path::Path, sync::Arc};

use burgeon_block::{BlockDevice, ByteRange, Counters, FileRange, Now, Pages, Verdict};
use burgeon_cache::{Amount, Cache, CacheSettings, Domain, policy::Clock};
use burgeon_volume::{CacheAccess, ChecksumFile, LazyDevice, VolumeLimits};
use common::{CHUNKS, DATA_START, Setup, Source, hit, image};

type Device = LazyDevice<Source, ChecksumFile>;

/// A volume of the image of these tests over a cache in `folder`, all of it resident, its chunks
/// one after another.
fn resident(folder: &Path) -> (Setup, Arc<Cache>, Device) {
    let setup = common::setup_with(image(1), VolumeLimits::default());
    let settings = CacheSettings { keep_free: Amount::Bytes(0), ..CacheSettings::default() };
    let cache = Arc::new(Cache::open(folder, settings, Box::<Clock>::default()).unwrap());
    let access = CacheAccess { store: cache.clone(), domain: Domain::PUBLIC };
    let volume =
        common::open(&setup.dir, &setup.image, &setup.source, access, VolumeLimits::default());
    let setup = Setup { volume, ..setup };
    runtime().block_on(async {
        let mut first = 0;
        for blocks in CHUNKS {
            setup.read(setup.blocks(first, blocks)).await.unwrap();
            setup.settle().await;
            first += blocks;
        }
    });
    let end = setup.volume.map().data_range().end();
    let device =
        LazyDevice::new(setup.volume.clone(), Arc::new(Counters::default()), end, Vec::new());
    (setup, cache, device.unwrap())
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap()
}

/// A folder on a disk that takes direct I/O.
fn on_a_disk() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

/// The place of `range`, which is on a disk.
fn place(device: &Device, range: ByteRange) -> FileRange {
    let mut pages = Pages::zeroed(range.len()).unwrap();
    match device.try_read(range.start(), pages.bytes_mut()).unwrap() {
        Now::Local(from) => from,
        other => panic!("{other:?} for {range}"),
    }
}

/// Reads `range` wherever it is, compares it, and waits until it is kept.
fn read(setup: &Setup, device: &Device, range: ByteRange) {
    let mut pages = Pages::zeroed(range.len()).unwrap();
    runtime().block_on(async {
        device.read(range.start(), pages.bytes_mut()).await.unwrap();
        setup.settle().await;
    });
    assert!(pages.bytes() == setup.expected(range));
}

#[test]
fn chunks_that_adjoin_are_one_read_of_the_disk() {
    let folder = on_a_disk();
    let (setup, _cache, device) = resident(folder.path());
    // All of the first chunk but a block, the next two, and a block of the fourth.
    let range = setup.blocks(1, 63 + 1 + 3 + 1);
    assert_eq!(place(&device, range).range.len(), range.len());
    let mut pages = Pages::zeroed(range.len()).unwrap();
    assert!(hit(&device, range.start(), pages.bytes_mut()).unwrap());
    assert!(pages.bytes() == setup.expected(range));
}

#[test]
fn wrong_bytes_at_a_place_are_refused_and_healed() {
    let folder = on_a_disk();
    let (setup, _cache, device) = resident(folder.path());
    let range = setup.blocks(66, 2);
    let from = place(&device, range);
    let arena = folder.path().join("arena-00000001");
    let arena = OpenOptions::new().write(true).open(arena).unwrap();
    arena.write_all_at(&[7; 4096], from.range.start()).unwrap();
    arena.sync_all().unwrap();

    let mut pages = Pages::zeroed(range.len()).unwrap();
    let fetched = setup.source.reads();
    assert!(!hit(&device, range.start(), pages.bytes_mut()).unwrap(), "the place stays wrong");
    let events = testkit::Events::gather();
    read(&setup, &device, range);
    let said = events.take();
    let is_told = |line: &String| {
        line.starts_with("ERROR the cache held wrong bytes")
            && line.contains(" blocks=1")
            && line.contains(" range=")
    };
    assert_eq!(said.iter().filter(|line| is_told(line)).count(), 1, "{said:?}");
    assert_eq!(setup.source.reads(), fetched + 1);
    assert!(hit(&device, range.start(), pages.bytes_mut()).unwrap());
    assert!(pages.bytes() == setup.expected(range));
}

#[test]
fn a_place_that_was_evicted_before_its_read_is_a_miss() {
    let folder = on_a_disk();
    let (setup, cache, device) = resident(folder.path());
    let range = setup.blocks(0, 1);
    let from = place(&device, range);
    assert!(cache.evict(u64::MAX) > 0);
    // A hole by now.
    assert_eq!(device.verify(DATA_START, &[0; 4096], from), Verdict::AskAgain);
    let mut pages = Pages::zeroed(range.len()).unwrap();
    assert_eq!(device.try_read(range.start(), pages.bytes_mut()).unwrap(), Now::Absent);
    read(&setup, &device, range);
}

#[test]
fn a_cache_in_memory_serves_at_once() {
    let folder = tempfile::tempdir_in("/dev/shm").unwrap();
    let (setup, _cache, device) = resident(folder.path());
    let range = setup.volume.map().data_range();
    let mut pages = Pages::zeroed(range.len()).unwrap();
    let answer = device.try_read(range.start(), pages.bytes_mut()).unwrap();
    assert_eq!(answer, Now::Served);
    assert!(pages.bytes() == setup.expected(range));
}
