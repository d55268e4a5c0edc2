//! Two images that have their chunks in common, over one cache: who fetches, and who waits.
#![allow(clippy::unwrap_used)]

mod common;

use std::{sync::Arc, time::Duration};

use burgeon_block::{Counters, ErrorKind};
use burgeon_cache::{Domain, testing::MemoryStore};
use burgeon_volume::{CacheAccess, Limits};
use common::{Fault, Image, Source, TestVolume, image_at, open, public};

/// An image in a store of its own.
struct Mounted {
    image: Image,
    source: Source,
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
    let (dir, limits) = (tempfile::tempdir().unwrap(), Limits::default());
    let store = MemoryStore::new(16 << 20);
    let mut packs = ["packs/one", "packs/two"].into_iter();
    domains.map(|domain| {
        let image = image_at(1, packs.next().unwrap());
        let source = Source::of(&image);
        let cache = CacheAccess { domain, ..public(&store) };
        let volume = open(&dir, &image, &source, cache, limits.clone());
        Mounted { image, source, volume, counters: Counters::default() }
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
