//! The cache on a real file system that is full. Needs root.

#![allow(clippy::unwrap_used)]

mod common;

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use burgeon_block::{BLOCK_SIZE, Counters};
use burgeon_cache::{Amount, Cache, CacheSettings, Domain, policy::Clock};
use burgeon_volume::{CacheAccess, VolumeLimits};
use common::{CHUNKS, Source, TestVolume, image};
use rustix::mount::MountFlags;
use testkit::Space;

#[test]
fn a_full_disk_slows_reads_down_and_no_more() {
    let space = Space::new("full");
    // Its threads share the namespace of the space.
    tokio::runtime::Runtime::new().unwrap().block_on(on_a_full_disk(&space));
}

async fn on_a_full_disk(space: &Space) {
    // Room for the first chunk (64 blocks) and not for the fourth (64 more).
    let disk = space.small_disk("disk", 80 * BLOCK_SIZE);
    let image = image(9);
    let pause_max = Duration::from_millis(100);
    let (keep_free, memory, pause_min) = (Amount::Bytes(0), 0, pause_max);
    let settings =
        CacheSettings { keep_free, memory, pause_min, pause_max, ..CacheSettings::default() };
    let cache = Cache::open(&disk.path().join("cache"), settings, Box::<Clock>::default()).unwrap();
    let store = Arc::new(cache);
    let access = CacheAccess { store: Arc::clone(&store) as _, domain: Domain::PUBLIC };
    let (source, counters) = (Source::of(&image), Counters::default());
    let (map, limits) = (Arc::clone(&image.map), VolumeLimits::default());
    let volume = TestVolume::new(map, source.clone(), access, limits);
    let all = image.map.data_range();
    let read = async || {
        common::read(&volume, &image, all, &counters).await.unwrap();
        while volume.status().in_flight > 0 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    read().await;
    assert!(volume.materialised_bytes() < all.len());
    read().await;
    assert!(source.reads() > CHUNKS.len() as u64, "what was not kept is fetched again");

    rustix::mount::mount_remount(disk.path(), MountFlags::empty(), c"size=16m").unwrap();
    let begin = Instant::now();
    while volume.materialised_bytes() < all.len() {
        assert!(
            begin.elapsed() < Duration::from_secs(5),
            "{:?} {:?}",
            store.report(),
            volume.status()
        );
        tokio::time::sleep(Duration::from_millis(50)).await;
        read().await;
    }
    let before = source.reads();
    read().await;
    assert_eq!(source.reads(), before);
    assert_eq!((counters.failed_reads.get(), counters.cache_corrupt_blocks.get()), (0, 0));
}
