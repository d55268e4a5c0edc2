//! A cache that fails costs speed, never a read; a file of recorded checksums that fails, neither.

#![allow(clippy::unwrap_used)]

mod common;

use std::{sync::Arc, time::Duration};

use burgeon_block::{BLOCK_SIZE, ByteRange, Counters, LocalFile};
use burgeon_cache::testing::{Fault, MemoryStore};
use burgeon_volume::{
    CacheState, ChecksumFile, FillState, RECORDED_CHECKSUM_LEN, Volume, VolumeLimits,
};
use common::{
    CHUNKS, FlakyFile, FlakyState, Image, Source, image, image_without_checksums, public,
};

struct Setup<F> {
    image: Image,
    source: Source,
    store: MemoryStore,
    volume: Arc<Volume<Source, F>>,
    counters: Counters,
}

fn setup() -> Setup<ChecksumFile> {
    let (image, store) = (image(5), MemoryStore::new(4 << 20));
    let source = Source::of(&image);
    let (map, cache) = (Arc::clone(&image.map), public(&store));
    let volume = Volume::new(map, source.clone(), cache, VolumeLimits::default());
    Setup { image, source, store, volume, counters: Counters::default() }
}

/// The same of an image whose checksums are recorded in a file that can fail.
fn setup_recorded() -> (Setup<FlakyFile>, Arc<FlakyState>) {
    let dir = tempfile::tempdir().unwrap();
    let (image, store) = (image_without_checksums(5), MemoryStore::new(4 << 20));
    let source = Source::of(&image);
    let state = Arc::new(FlakyState::default());
    let len = image.bytes.len() as u64 / BLOCK_SIZE * RECORDED_CHECKSUM_LEN;
    let inner = ChecksumFile::open(&dir.path().join("checksums"), len).unwrap();
    let file = FlakyFile { inner, state: Arc::clone(&state) };
    let (map, cache, limits) = (Arc::clone(&image.map), public(&store), VolumeLimits::default());
    let volume = Volume::without_checksums(map, source.clone(), cache, file, limits);
    (Setup { image, source, store, volume, counters: Counters::default() }, state)
}

impl<F: LocalFile + 'static> Setup<F> {
    async fn read(&self, range: ByteRange) {
        common::read(&self.volume, &self.image, range, &self.counters).await.unwrap();
        while self.volume.status().in_flight > 0 {
            tokio::task::yield_now().await;
        }
    }

    fn all(&self) -> ByteRange {
        self.image.map.data_range()
    }

    fn first_block(&self) -> ByteRange {
        ByteRange::at(self.all().start(), BLOCK_SIZE).unwrap()
    }
}

#[tokio::test]
async fn a_cache_that_keeps_nothing_is_passed_by_until_it_does() {
    let setup = setup();
    setup.store.fail(Some(Fault::NoSpace));
    for _ in 0..300 {
        setup.read(setup.first_block()).await;
    }
    let status = setup.volume.status();
    assert!(matches!(&status.cache, CacheState::NoSpace { .. }));
    assert_eq!((status.uncached_chunks, status.materialised_bytes), (300, 0));
    let fill = setup.volume.fill();
    assert_eq!(fill.ended().await.state, FillState::CacheFull);
    assert_eq!(setup.source.reads(), 300, "a fill fetches nothing that is not kept");

    setup.store.fail(None);
    setup.read(setup.all()).await;
    assert_eq!(setup.volume.status().cache, CacheState::Writing);
    setup.read(setup.all()).await;
    assert_eq!((setup.counters.hits.get(), setup.counters.failed_reads.get()), (1, 0));
}

#[tokio::test(start_paused = true)]
async fn a_full_disk_of_checksums_is_tried_again_ever_more_rarely() {
    let (setup, state) = setup_recorded();
    *state.write_error.lock().unwrap() = Some(libc::ENOSPC);
    for _ in 0..300 {
        setup.read(setup.first_block()).await;
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
    // After 1, 2, 4, … 32, then every 60 seconds: about ten tries in five minutes.
    assert!((9..=12).contains(&state.writes()), "{} tries", state.writes());
    let status = setup.volume.status();
    let is_told = |reason: &str| reason.contains("checksums");
    assert!(matches!(&status.cache, CacheState::NoSpace { reason } if is_told(reason)));
    assert_eq!((status.uncached_chunks, status.materialised_bytes), (300, 0));

    *state.write_error.lock().unwrap() = None;
    tokio::time::sleep(VolumeLimits::default().no_space_pause_max).await;
    setup.read(setup.all()).await;
    assert_eq!(setup.volume.status().cache, CacheState::Writing);
    setup.read(setup.all()).await;
    assert_eq!((setup.counters.hits.get(), setup.counters.failed_reads.get()), (1, 0));
}

#[tokio::test(start_paused = true)]
async fn a_failed_file_of_checksums_is_not_written_again_but_still_read() {
    let (setup, state) = setup_recorded();
    setup.read(setup.first_block()).await;
    *state.write_error.lock().unwrap() = Some(libc::EIO);
    let second = ByteRange::at(setup.all().start() + CHUNKS[0] * BLOCK_SIZE, BLOCK_SIZE).unwrap();
    setup.read(second).await;
    *state.write_error.lock().unwrap() = None;
    tokio::time::sleep(Duration::from_secs(3600)).await;
    setup.read(second).await;
    setup.read(setup.first_block()).await;
    assert_eq!(state.writes(), 2, "one good, one failed, none after");
    assert_eq!((setup.counters.hits.get(), setup.counters.misses.get()), (1, 3));
    let status = setup.volume.status();
    assert!(matches!(status.cache, CacheState::Stopped { .. }));
    assert_eq!(status.uncached_chunks, 2);

    let fill = setup.volume.fill();
    assert_eq!(fill.ended().await.state, FillState::CacheFull);
}

#[tokio::test]
async fn an_unreadable_cache_is_a_miss() {
    let setup = setup();
    setup.read(setup.all()).await;
    setup.store.fail(Some(Fault::Read));
    setup.read(setup.all()).await;
    assert_eq!(setup.source.reads(), 2 * CHUNKS.len() as u64);
    setup.store.fail(None);
    setup.read(setup.all()).await;
    assert_eq!(setup.counters.hits.get(), 1);
    assert_eq!(setup.counters.failed_reads.get(), 0);
    assert_eq!(setup.counters.cache_corrupt_blocks.get(), 0);
}

#[tokio::test]
async fn unreadable_checksums_are_a_miss() {
    let (setup, state) = setup_recorded();
    setup.read(setup.all()).await;
    *state.read_error.lock().unwrap() = Some(libc::EIO);
    setup.read(setup.all()).await;
    *state.read_error.lock().unwrap() = None;
    setup.read(setup.all()).await;
    assert_eq!((setup.counters.hits.get(), setup.counters.misses.get()), (1, 2));
    assert_eq!(setup.counters.failed_reads.get(), 0);
    assert_eq!(setup.counters.cache_corrupt_blocks.get(), 0);
}
