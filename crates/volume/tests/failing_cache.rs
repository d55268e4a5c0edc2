//! A cache that fails costs speed, never a read.

#![allow(clippy::unwrap_used)]

mod common;

use std::{sync::Arc, time::Duration};

use burgeon_block::{BLOCK_SIZE, ByteRange, Counters};
use burgeon_volume::{CacheState, FillState, Limits, Volume};
use common::{CHUNKS, FlakyFile, FlakyState, Image, Source, cache_file, image};

struct Setup {
    _dir: tempfile::TempDir,
    image: Image,
    source: Source,
    state: Arc<FlakyState>,
    volume: Arc<Volume<Source, FlakyFile>>,
    counters: Counters,
}

fn setup() -> Setup {
    let dir = tempfile::tempdir().unwrap();
    let image = image(5);
    let source = Source::of(&image);
    let state = Arc::new(FlakyState::default());
    let file = FlakyFile { inner: cache_file(&dir, &image), state: Arc::clone(&state) };
    let map = Arc::clone(&image.map);
    let volume = Volume::new(map, source.clone(), file, Limits::default());
    Setup { _dir: dir, image, source, state, volume, counters: Counters::default() }
}

impl Setup {
    async fn read(&self, range: ByteRange) {
        common::read(&self.volume, &self.image, range, &self.counters).await.unwrap();
        while self.volume.status().in_flight > 0 {
            tokio::task::yield_now().await;
        }
    }

    fn all(&self) -> ByteRange {
        self.volume.map().data_range()
    }

    fn first_block(&self) -> ByteRange {
        ByteRange::at(self.all().start(), BLOCK_SIZE).unwrap()
    }
}

#[tokio::test(start_paused = true)]
async fn a_full_file_system_is_tried_again_ever_more_rarely() {
    let setup = setup();
    *setup.state.write_error.lock().unwrap() = Some(libc::ENOSPC);
    for _ in 0..300 {
        setup.read(setup.first_block()).await;
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
    // After 1, 2, 4, … 32, then every 60 seconds: about ten tries in five minutes.
    assert!((9..=12).contains(&setup.state.writes()), "{} tries", setup.state.writes());
    let status = setup.volume.status();
    assert!(matches!(&status.cache, CacheState::NoSpace { reason } if reason.contains("cache")));
    assert_eq!(status.cache_write_errors, setup.state.writes());
    assert_eq!(status.uncached_chunks, 300);
    assert_eq!(status.materialised_bytes, 0);

    *setup.state.write_error.lock().unwrap() = None;
    tokio::time::sleep(Limits::default().no_space_pause_max).await;
    setup.read(setup.all()).await;
    assert_eq!(setup.volume.status().cache, CacheState::Writing);
    setup.read(setup.all()).await;
    assert_eq!(setup.counters.hits.get(), 1);
    assert_eq!(setup.counters.failed_reads.get(), 0);
}

#[tokio::test(start_paused = true)]
async fn a_failed_file_is_not_written_again_but_still_read() {
    let setup = setup();
    setup.read(setup.first_block()).await;
    *setup.state.write_error.lock().unwrap() = Some(libc::EIO);
    let second = ByteRange::at(setup.all().start() + CHUNKS[0] * BLOCK_SIZE, BLOCK_SIZE).unwrap();
    setup.read(second).await;
    *setup.state.write_error.lock().unwrap() = None;
    tokio::time::sleep(Duration::from_secs(3600)).await;
    setup.read(second).await;
    setup.read(setup.first_block()).await;
    assert_eq!(setup.state.writes(), 2, "one good, one failed, none after");
    assert_eq!((setup.counters.hits.get(), setup.counters.misses.get()), (1, 3));
    let status = setup.volume.status();
    assert!(matches!(status.cache, CacheState::Stopped { .. }));
    assert_eq!((status.cache_write_errors, status.uncached_chunks), (1, 2));

    let fill = setup.volume.fill();
    assert_eq!(fill.ended().await.state, FillState::CacheFull);
}

#[tokio::test]
async fn an_unreadable_cache_is_a_miss() {
    let setup = setup();
    setup.read(setup.all()).await;
    *setup.state.read_error.lock().unwrap() = Some(libc::EIO);
    setup.read(setup.all()).await;
    assert_eq!(setup.source.reads(), 2 * CHUNKS.len() as u64);
    assert!(setup.volume.status().cache_read_errors >= 1);
    *setup.state.read_error.lock().unwrap() = None;
    setup.read(setup.all()).await;
    assert_eq!(setup.counters.hits.get(), 1);
    assert_eq!(setup.counters.failed_reads.get(), 0);
    assert_eq!(setup.counters.cache_corrupt_blocks.get(), 0);
}
