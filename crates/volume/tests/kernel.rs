//! The cache file on real file systems: one without direct I/O, and one that is full. Needs root.

#![allow(clippy::unwrap_used)]

mod common;

use std::sync::Arc;

use burgeon_block::{BLOCK_SIZE, Counters, LocalFile, Pages};
use burgeon_volume::{Access, CacheState, DirectFile, Limits, Volume};
use common::{CHUNKS, Source, image};
use rustix::mount::{MountFlags, mount};
use testkit::Space;

#[test]
fn a_file_system_without_direct_io_is_used_through_the_page_cache() {
    let space = Space::new("buffered");
    let folder = space.make_folder("ram");
    mount("ramfs", &folder, "ramfs", MountFlags::empty(), None).unwrap();
    let file = DirectFile::open(&folder.join("cache"), 1 << 20).unwrap();
    assert!(matches!(file.access(), Access::Buffered { reason } if !reason.is_empty()));
    assert!(file.access().to_string().contains("refused"), "{}", file.access());
    let mut block = Pages::zeroed(BLOCK_SIZE).unwrap();
    block.bytes_mut().fill(3);
    file.write_at(8192, block.bytes()).unwrap();
    block.bytes_mut().fill(0);
    file.read_at(8192, block.bytes_mut()).unwrap();
    assert!(block.bytes().iter().all(|byte| *byte == 3));
    assert!(file.next_data(0).unwrap().is_some());
    file.sync().unwrap();
}

#[test]
fn a_full_disk_slows_reads_down_and_no_more() {
    let space = Space::new("full");
    // Room for the first chunk (64 blocks) and not for the fourth (64 more).
    let disk = space.small_disk("disk", 80 * BLOCK_SIZE);
    let image = image(9);
    let file = DirectFile::open(&disk.path().join("cache"), image.bytes.len() as u64).unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .start_paused(true)
        .build()
        .unwrap();
    runtime.block_on(async {
        let (source, counters) = (Source::of(&image), Counters::default());
        let map = Arc::clone(&image.map);
        let volume = Volume::new(map, source.clone(), file, Limits::default());
        let all = image.map.data_range();
        let read = async || {
            common::read(&volume, &image, all, &counters).await.unwrap();
            while volume.status().in_flight > 0 {
                tokio::task::yield_now().await;
            }
        };
        read().await;
        assert!(matches!(volume.status().cache, CacheState::NoSpace { .. }));
        assert!(volume.materialised_bytes() < all.len());
        read().await;
        assert!(source.reads() > CHUNKS.len() as u64, "what was not kept is fetched again");

        rustix::mount::mount_remount(disk.path(), MountFlags::empty(), c"size=4m").unwrap();
        tokio::time::sleep(Limits::default().no_space_pause_max).await;
        read().await;
        assert_eq!(volume.status().cache, CacheState::Writing);
        assert_eq!(volume.materialised_bytes(), all.len());
        assert_eq!((counters.failed_reads.get(), counters.cache_corrupt_blocks.get()), (0, 0));
    });
}
