//! Two images that have their chunks in common, over one cache: who fetches, and who waits.
#![allow(clippy::unwrap_used)]

mod common;

use std::{sync::Arc, time::Duration};

use burgeon_block::{ByteRange, Counters, ErrorKind};
use burgeon_cache::{Domain, testing::MemoryStore};
use burgeon_volume::{CacheAccess, VolumeLimits};
use common::{Fault, Image, Source, TestVolume, image_at, open, public};

/// An image in a store of its own.
struct Mounted {
    image: Image,
    source: Source,
    cache: CacheAccess,
    volume: Arc<TestVolume>,
    counters: Counters,
}

impl Mounted {
    /// Reads the first chunk.
    async fn read(&self) -> burgeon_block::Result<()> {
        let range = self.image.map.chunk(0).range;
        common::read(&self.volume, &self.image, range, &self.counters).await
    }
}

/// Images of the same bytes in different packs, each in its domain, as two stores have them.
fn two(domains: [Domain; 2]) -> [Mounted; 2] {
    let (dir, limits) = (tempfile::tempdir().unwrap(), VolumeLimits::default());
    let store = MemoryStore::new(16 << 20);
    let mut packs = ["packs/one", "packs/two"].into_iter();
    domains.map(|domain| {
        let image = image_at(1, packs.next().unwrap());
        let source = Source::of(&image);
        let cache = CacheAccess { domain, ..public(&store) };
        let volume = open(&dir, &image, &source, cache.clone(), limits.clone());
        Mounted { image, source, cache, volume, counters: Counters::default() }
    })
}

/// Waits until `mounted` has asked its store.
async fn asked(mounted: &Mounted) {
    while mounted.source.reads() == 0 {
        tokio::task::yield_now().await;
    }
}

#[tokio::test]
async fn a_chunk_that_another_image_fetches_now_is_not_fetched_again() {
    let [one, other] = two([Domain::PUBLIC; 2]);
    one.source.close();
    let begin_second = async {
        asked(&one).await;
        let second = other.read();
        tokio::pin!(second);
        // It waits: its own store is open, and would answer at once.
        let early = tokio::time::timeout(Duration::from_millis(50), &mut second).await;
        assert!(early.is_err());
        one.source.open();
        second.await.unwrap();
    };
    let (first, ()) = tokio::join!(one.read(), begin_second);
    first.unwrap();
    assert_eq!((one.source.reads(), other.source.reads()), (1, 0));
    assert_eq!((other.counters.fetches.get(), other.counters.misses.get()), (0, 1));
}

#[tokio::test]
async fn background_work_leaves_out_chunks_that_another_image_fetches_now() {
    let [one, other] = two([Domain::PUBLIC; 2]);
    let range = one.image.map.chunk(0).range;
    one.source.close();
    let prefetch = async {
        asked(&one).await;
        assert_eq!(other.volume.prefetch(range), 0);
        one.source.open();
    };
    let (first, ()) = tokio::join!(one.read(), prefetch);
    first.unwrap();
    assert_eq!(other.source.reads(), 0);
}

#[tokio::test]
async fn a_miss_asks_for_residency_once_outside_the_lock_and_once_under_it() {
    let (dir, store, image) =
        (tempfile::tempdir().unwrap(), MemoryStore::new(16 << 20), common::image(1));
    let source = Source::of(&image);
    let volume = open(&dir, &image, &source, public(&store), VolumeLimits::default());
    volume.stop_reading_ahead();
    let (range, counters) = (image.map.chunk(0).range, Counters::default());
    common::read(&volume, &image, range, &counters).await.unwrap();
    assert_eq!((store.finds(), source.reads()), (2, 1));
}

#[tokio::test(start_paused = true)]
async fn a_fetch_that_fails_or_hangs_elsewhere_is_tried_with_ones_own_store() {
    for fault in [Fault::NotFound, Fault::WrongByte, Fault::Stall, Fault::Panic] {
        let [one, other] = two([Domain::PUBLIC; 2]);
        one.source.fail_always(fault);
        let begin_second = async {
            asked(&one).await;
            other.read().await.unwrap();
        };
        let (first, ()) = tokio::join!(one.read(), begin_second);
        assert!(first.is_err(), "{fault:?}");
        assert_eq!(other.source.reads(), 1, "{fault:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn images_of_different_credentials_do_not_wait_for_each_other() {
    let [one, other] = two([Domain::of(b"a"), Domain::of(b"b")]);
    one.source.fail_always(Fault::Stall);
    let begin_second = async {
        asked(&one).await;
        let before = tokio::time::Instant::now();
        other.read().await.unwrap();
        assert_eq!(before.elapsed(), Duration::ZERO);
    };
    let (first, ()) = tokio::join!(one.read(), begin_second);
    assert_eq!(first.unwrap_err().kind(), ErrorKind::Unavailable);
}

/// It would read fewer bytes than the digest is of, find them wrong, and doubt the chunk of others.
#[tokio::test]
async fn a_map_with_a_wrong_length_takes_no_chunk_from_others() {
    let [honest, _] = two([Domain::PUBLIC; 2]);
    honest.read().await.unwrap();
    while honest.volume.status().in_flight > 0 {
        tokio::task::yield_now().await;
    }
    let forged = common::image_with(1, "packs/forged", |manifest| {
        let chunk = &mut manifest.chunks[0];
        chunk.blocks /= 2;
        chunk.stored = ByteRange::at(chunk.stored.start(), chunk.stored.len() / 2).unwrap();
        manifest.block_checksums.drain(..usize::from(chunk.blocks) * 4);
    });
    let source = Source::of(&forged);
    let (dir, access) = (tempfile::tempdir().unwrap(), honest.cache.clone());
    let volume = open(&dir, &forged, &source, access, VolumeLimits::default());
    let (range, counters) = (forged.map.chunk(0).range, Counters::default());
    assert!(common::read(&volume, &forged, range, &counters).await.is_err());
    let before = honest.source.reads();
    honest.read().await.unwrap();
    assert_eq!(honest.source.reads(), before, "the chunk is still in the cache");
}
