//! The promises of a volume, one by one, over a cache in memory.

mod common;

use std::{sync::Arc, time::Duration};

use burgeon_block::{BLOCK_SIZE, ByteRange, Counters, ErrorKind, Now};
use burgeon_cache::{ChunkStore, Domain, Why, testing::MemoryStore};
use burgeon_volume::{CacheAccess, CacheState, SharedPermits, Volume, VolumeLimits};
use common::{
    CHUNKS, DATA_START, Fault, Setup, image, image_at, image_without_checksums, key, open, public,
    setup, setup_with,
};

fn all(setup: &Setup) -> ByteRange {
    setup.volume.map().data_range()
}

#[tokio::test]
async fn first_a_miss_then_a_hit_and_all_is_counted() {
    let setup = setup();
    setup.read(setup.blocks(1, 2)).await.unwrap();
    setup.settle().await;
    assert_eq!(setup.volume.materialised_bytes(), CHUNKS[0] * BLOCK_SIZE);
    setup.read(setup.blocks(0, 64)).await.unwrap();
    setup.read(all(&setup)).await.unwrap();
    setup.settle().await;
    setup.read(all(&setup)).await.unwrap();

    let counters = &setup.counters;
    assert_eq!(setup.source.reads(), CHUNKS.len() as u64, "each chunk is fetched once");
    assert_eq!((counters.misses.get(), counters.hits.get()), (2, 2));
    assert_eq!(counters.fetches.get(), CHUNKS.len() as u64);
    assert_eq!(counters.fetched_bytes.get(), setup.image.packs[0].1.len() as u64);
    assert_eq!(counters.materialised_bytes.get(), all(&setup).len());
    assert_eq!(setup.volume.materialised_bytes(), all(&setup).len());
    assert_eq!(setup.volume.background().fetches.get(), 0);
    assert_eq!(setup.volume.status().cache, CacheState::Writing);
}

#[tokio::test]
async fn ranges_outside_the_data_or_off_the_blocks_are_invalid() {
    let setup = setup();
    let mut buf = vec![0; 2 * BLOCK_SIZE as usize];
    let end = all(&setup).end();
    for (start, len) in [(DATA_START - 4096, 8192), (end - 4096, 8192), (DATA_START + 1, 4096)] {
        let range = ByteRange::at(start, len).unwrap();
        let buf = &mut buf[..len as usize];
        let error = setup.volume.try_read(range, buf).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid);
        let error = setup.volume.read(range, buf, &setup.counters).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid);
    }
    assert_eq!(setup.source.reads(), 0);
}

#[tokio::test(start_paused = true)]
async fn all_waiters_share_the_result_of_one_fetch() {
    let setup = setup();
    setup.source.close();
    let mut readers = Vec::new();
    for first in 0..20 {
        let (volume, counters) = (Arc::clone(&setup.volume), Arc::clone(&setup.counters));
        let (range, expected) =
            (setup.blocks(first, 3), setup.expected(setup.blocks(first, 3)).to_vec());
        readers.push(tokio::spawn(async move {
            let mut buf = vec![0; expected.len()];
            volume.read(range, &mut buf, &counters).await.unwrap();
            assert!(buf == expected);
        }));
    }
    tokio::time::sleep(Duration::from_millis(1)).await;
    assert_eq!(setup.volume.status().waiting_readers, 20);
    assert_eq!(setup.volume.status().in_flight, 1);
    // The reader that started the fetch goes away; the others do not notice.
    readers.remove(0).abort();
    setup.source.open();
    for reader in readers {
        reader.await.unwrap();
    }
    assert_eq!(setup.source.reads(), 1);
    assert_eq!(setup.counters.fetches.get(), 1);
    assert_eq!(setup.volume.status().waiting_readers, 0);
}

#[tokio::test(start_paused = true)]
async fn a_fetch_without_readers_is_kept_and_counted_apart() {
    let setup = setup();
    setup.source.close();
    let (volume, counters) = (Arc::clone(&setup.volume), Arc::clone(&setup.counters));
    let range = setup.blocks(0, 1);
    let reader = tokio::spawn(async move {
        let mut buf = vec![0; 4096];
        volume.read(range, &mut buf, &counters).await
    });
    tokio::time::sleep(Duration::from_millis(1)).await;
    reader.abort();
    assert!(reader.await.is_err());
    setup.source.open();
    setup.settle().await;
    assert_eq!(setup.counters.fetches.get(), 0);
    assert_eq!(setup.volume.background().fetches.get(), 1);
    setup.read(setup.blocks(0, 64)).await.unwrap();
    assert_eq!(setup.counters.hits.get(), 1);
}

#[tokio::test]
async fn wrong_bytes_are_asked_for_once_more_and_never_served() {
    for fault in [Fault::WrongByte, Fault::Truncated] {
        let setup = setup();
        // Chunk 0 is raw, chunk 3 compressed.
        for first in [0, 68] {
            setup.source.fail([fault]);
            setup.read(setup.blocks(first, 4)).await.unwrap();
        }
        assert_eq!(setup.source.reads(), 4);
        setup.source.fail([fault, fault]);
        let error = setup.read(setup.blocks(64, 1)).await.unwrap_err();
        assert_eq!((error.kind(), error.errno()), (ErrorKind::Corrupt, libc::EIO), "{error}");
        assert!(error.to_string().contains("packs/test"), "it names the object: {error}");
        setup.read(setup.blocks(64, 1)).await.unwrap();

        let counters = &setup.counters;
        assert_eq!(counters.failed_reads.get(), 1);
        let wrong = counters.source_corrupt_chunks.get() + counters.source_errors.get();
        assert_eq!(wrong, 4, "{fault:?}");
        assert_eq!(counters.cache_corrupt_blocks.get(), 0);
    }
}

#[tokio::test]
async fn a_bad_chunk_leaves_its_neighbours_readable() {
    let setup = setup();
    setup.source.fail_always(Fault::NotFound);
    let error = setup.read(setup.blocks(0, 1)).await.unwrap_err();
    assert_eq!(error.errno(), libc::EIO, "a missing pack is an I/O error: {error}");
    setup.source.fail_always(None);
    setup.read(setup.blocks(64, 80)).await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn an_unavailable_source_is_tried_until_the_deadline() {
    let setup = setup();
    setup.source.fail([Fault::Unavailable; 7]);
    setup.read(setup.blocks(0, 1)).await.unwrap();
    assert_eq!(setup.counters.source_errors.get(), 7);

    let limits = VolumeLimits::default();
    for fault in [Fault::Unavailable, Fault::Stall] {
        setup.source.fail_always(fault);
        let start = tokio::time::Instant::now();
        // The kernel asks again for a page whose read-ahead failed.
        for _ in 0..3 {
            let error = setup.read(setup.blocks(64, 1)).await.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Unavailable);
        }
        assert!(start.elapsed() <= limits.deadline, "{:?}", start.elapsed());
        assert!(start.elapsed() >= limits.deadline - limits.try_timeout, "{:?}", start.elapsed());
        tokio::time::sleep(limits.given_up_for).await;
    }
    assert!(setup.volume.status().last_source_error.is_some());
    setup.source.fail_always(None);
    setup.read(setup.blocks(64, 1)).await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_read_that_waits_for_a_permit_has_the_same_deadline() {
    let limits = VolumeLimits { fetches_max: 1, ..VolumeLimits::default() };
    let setup = setup_with(image(9), limits.clone());
    setup.source.fail_always(Fault::Stall);
    let start = tokio::time::Instant::now();
    let read = |block| setup.read(setup.blocks(block, 1));
    let (first, second, third) = tokio::join!(read(0), read(64), read(68));
    for error in [first, second, third].map(Result::unwrap_err) {
        assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    }
    assert!(start.elapsed() <= limits.deadline, "{:?}", start.elapsed());
    // A source that is slow, but answers, is waited for longer.
    setup.source.fail_always(None);
    setup.source.slow_down(limits.try_timeout * 9 / 10);
    tokio::time::sleep(limits.given_up_for).await;
    let mut readers = tokio::task::JoinSet::new();
    for chunk in 0..CHUNKS.len() {
        let range = setup.blocks(CHUNKS[..chunk].iter().sum(), 1);
        let (volume, counters) = (Arc::clone(&setup.volume), Arc::clone(&setup.counters));
        readers.spawn(async move { volume.read(range, &mut [0; 4096], &counters).await });
    }
    let start = tokio::time::Instant::now();
    while let Some(read) = readers.join_next().await {
        read.unwrap().unwrap();
    }
    assert!(start.elapsed() > limits.deadline, "{:?}", start.elapsed());
}

#[tokio::test(start_paused = true)]
async fn failures_of_the_source_are_reported_a_few_times_a_minute() {
    let events = testkit::Events::gather();
    let setup =
        setup_with(image(9), VolumeLimits { image: "image-9".into(), ..VolumeLimits::default() });
    setup.source.fail_always(Fault::Unavailable);
    setup.read(setup.blocks(64, 1)).await.unwrap_err();
    setup.source.fail_always(None);
    setup.read(setup.blocks(0, 1)).await.unwrap();
    let mut lines = events.take();
    lines.retain(|line| !line.starts_with("DEBUG"));
    let said = [
        "WARN the source fails: trying again image=\"image-9\" object=packs/test range=bytes ",
        "ERROR readers get an I/O error image=\"image-9\" object=packs/test range=bytes ",
        "INFO the source answers again image=\"image-9\" failed=",
    ];
    assert_eq!(lines.len(), said.len(), "{lines:?}");
    assert!(lines.iter().zip(said).all(|(line, said)| line.starts_with(said)), "{lines:?}");
    setup.source.fail([Fault::WrongByte]);
    tokio::time::sleep(Duration::from_secs(61)).await;
    setup.read(setup.blocks(65, 1)).await.unwrap();
    let lines = events.take();
    let wrong = lines.iter().filter(|line| line.starts_with("ERROR the source gave wrong bytes"));
    let told: Vec<_> = wrong.collect();
    assert!(told.len() == 1 && told[0].contains(" object=packs/test range=bytes "), "{lines:?}");
    setup.source.fail_always(Fault::NotFound);
    for _ in 0..50 {
        setup.read(setup.blocks(68, 1)).await.unwrap_err();
        tokio::time::sleep(Duration::from_secs(6)).await;
    }
    let mut lines = events.take();
    lines.retain(|line| !line.starts_with("DEBUG"));
    assert!((5..=18).contains(&lines.len()), "{lines:?}");
    assert!(lines.iter().any(|line| line.contains(" suppressed=")), "{lines:?}");
}

#[tokio::test]
async fn rotten_and_evicted_chunks_are_misses() {
    let setup = setup();
    setup.read(all(&setup)).await.unwrap();
    setup.settle().await;
    let before = setup.source.reads();
    assert!(setup.store.corrupt(&key(&setup.image, 0), 9 * BLOCK_SIZE as u32 + 4000));
    assert!(setup.store.corrupt(&key(&setup.image, 3), 2 * BLOCK_SIZE as u32));
    assert!(setup.store.forget(&key(&setup.image, 4)));

    let mut buf = burgeon_block::Pages::zeroed(2 * BLOCK_SIZE).unwrap();
    let answer = setup.volume.try_read(setup.blocks(8, 2), buf.bytes_mut());
    assert_eq!(answer.unwrap(), Now::Absent);
    let here = all(&setup).len() - CHUNKS[4] * BLOCK_SIZE;
    assert_eq!(setup.volume.materialised_bytes(), here, "a rotten chunk is not known to be one");
    setup.read(all(&setup)).await.unwrap();
    setup.settle().await;
    assert_eq!(setup.counters.cache_corrupt_blocks.get(), 2, "the evicted one is no corruption");
    assert_eq!(setup.source.reads(), before + 3);
    assert_eq!(setup.volume.materialised_bytes(), all(&setup).len(), "refetched and kept");
    setup.read(all(&setup)).await.unwrap();
    assert_eq!(setup.counters.hits.get(), 1);
}

#[tokio::test]
async fn images_share_chunks_within_a_domain_and_from_the_public_one() {
    let setup = setup();
    setup.read(setup.blocks(64, 4)).await.unwrap();
    setup.settle().await;
    let of = |domain| {
        let source = common::Source::of(&setup.image);
        let access = CacheAccess { store: Arc::new(setup.store.clone()), domain };
        let volume = open(&setup.dir, &setup.image, &source, access, VolumeLimits::default());
        (volume, source)
    };
    let read = async |volume: &Arc<common::TestVolume>, range| {
        common::read(volume, &setup.image, range, &setup.counters).await.unwrap();
        while volume.status().in_flight > 0 {
            tokio::task::yield_now().await;
        }
    };
    let ((a, from_a), (b, from_b)) = (of(Domain::of(b"a")), of(Domain::of(b"b")));
    assert_eq!(a.materialised_bytes(), 4 * BLOCK_SIZE);
    read(&a, setup.blocks(64, 4)).await;
    assert_eq!(from_a.reads(), 0, "the public domain has it");
    for (volume, source) in [(&a, &from_a), (&b, &from_b)] {
        read(volume, setup.blocks(0, 64)).await;
        assert_eq!(source.reads(), 1, "one's own chunks are nobody else's");
    }
    let (again, source) = of(Domain::of(b"a"));
    read(&again, setup.blocks(0, 68)).await;
    assert_eq!(source.reads(), 0, "opened again, it serves what was kept");
    assert_eq!(setup.volume.materialised_bytes(), 4 * BLOCK_SIZE, "not what others kept apart");
}

/// An image with right digests and wrong checksums must not empty the cache of the others, nor keep
/// the host busy with hashing.
#[tokio::test(start_paused = true)]
async fn an_images_checksums_alone_make_the_cache_forget_nothing() {
    let honest = setup();
    honest.read(all(&honest)).await.unwrap();
    honest.settle().await;
    // Read-ahead may have taken several chunks with one.
    let fetched = honest.source.reads();
    let hostile = common::image_with(1, "packs/test", |manifest| manifest.block_checksums.fill(7));
    let source = common::Source::of(&hostile);
    let access = public(&honest.store);
    let volume = open(&honest.dir, &hostile, &source, access, VolumeLimits::default());
    let counters = Counters::default();
    let begun = tokio::time::Instant::now();
    for _ in 0..10 {
        common::read(&volume, &hostile, all(&honest), &counters).await.unwrap();
        // The next read would join a fetch that has not ended.
        while volume.status().in_flight > 0 {
            tokio::task::yield_now().await;
        }
    }
    // Those of the first read, and one more, may begin before anybody knows of the damage.
    let paused = 9 * CHUNKS.len() as u32 - 1;
    let pause = std::time::Duration::from_millis(4);
    assert!(begun.elapsed() >= pause * paused, "{:?}", begun.elapsed());
    assert!(volume.status().is_map_damaged);
    assert_eq!((source.reads(), counters.cache_corrupt_blocks.get()), (0, 0));
    honest.read(all(&honest)).await.unwrap();
    assert_eq!((honest.counters.hits.get(), honest.source.reads()), (1, fetched));
}

/// A chunk may be admitted by another image while this one fetches it.
#[tokio::test]
async fn a_chunk_that_came_meanwhile_is_not_fetched() {
    let setup = setup();
    let (range, bytes) = (setup.blocks(64, 1), setup.expected(setup.blocks(64, 1)));
    let mut buf = burgeon_block::Pages::zeroed(BLOCK_SIZE).unwrap();
    assert_eq!(setup.volume.try_read(range, buf.bytes_mut()).unwrap(), Now::Absent);
    setup.store.admit(key(&setup.image, 1), bytes, Why::Read).unwrap();
    setup.volume.read(range, buf.bytes_mut(), &setup.counters).await.unwrap();
    assert!(buf.bytes() == bytes && setup.source.reads() == 0);
}

#[tokio::test(start_paused = true)]
async fn objects_outside_the_store_are_read_straight_through() {
    let setup = setup_with(image_at(3, "file/dev/disk"), VolumeLimits::default());
    // Compressed chunks cannot be read in part; the first chunk is raw.
    let events = testkit::Events::gather();
    setup.source.fail([Fault::Unavailable, Fault::WrongByte]);
    setup.read(setup.blocks(5, 7)).await.unwrap();
    let lines = events.take();
    let wrong = lines.iter().find(|line| line.starts_with("ERROR the source gave wrong bytes"));
    assert!(wrong.is_some_and(|line| line.contains(" object=file/dev/disk range=")), "{lines:?}");
    setup.read(setup.blocks(5, 7)).await.unwrap();
    // The whole chunk has shown that the source was wrong, and not the map.
    assert_eq!(setup.source.reads(), 4);
    assert!(!setup.volume.status().is_map_damaged);
    assert_eq!(setup.volume.materialised_bytes(), 0);
    assert_eq!(setup.counters.fetched_bytes.get(), (7 + 64 + 7) * BLOCK_SIZE);
    assert_eq!(setup.counters.source_corrupt_chunks.get(), 1);
    assert_eq!(setup.volume.prefetch(setup.blocks(0, 64)), 0);
}

#[tokio::test]
async fn a_fetch_task_that_panics_is_an_error_to_its_waiters() {
    let setup = setup();
    setup.source.fail([Fault::Panic]);
    let (a, b) = tokio::join!(setup.read(setup.blocks(0, 1)), setup.read(setup.blocks(5, 1)));
    for error in [a.unwrap_err(), b.unwrap_err()] {
        assert_eq!(error.kind(), ErrorKind::Unavailable);
    }
    assert_eq!(setup.volume.status().in_flight, 0);
    setup.read(setup.blocks(0, 1)).await.unwrap();
}

#[tokio::test]
async fn a_map_with_a_wrong_checksum_costs_a_digest_and_no_error() {
    let image = common::image_with(1, "packs/test", |manifest| manifest.block_checksums[9] ^= 1);
    let setup = setup_with(image, VolumeLimits::default());
    // The second read finds the block in the cache, and takes it for a bad one; the chunk's digest
    // shows that it is not.
    for _ in 0..2 {
        setup.read(setup.blocks(2, 1)).await.unwrap();
        setup.settle().await;
        assert_eq!(setup.source.reads(), 1);
    }
    assert!(setup.volume.status().is_map_damaged);
    assert_eq!(setup.counters.cache_corrupt_blocks.get(), 0, "nor is the cache");
    assert_eq!(setup.counters.source_corrupt_chunks.get(), 0, "the source is not to blame");
    setup.read(all(&setup)).await.unwrap();
}

/// The same of objects that are read in place, of which nothing is cached.
#[tokio::test]
async fn a_map_with_a_wrong_checksum_makes_no_error_of_a_file_that_is_read_in_place() {
    let events = testkit::Events::gather();
    let image = common::image_with(1, "file/test", |manifest| manifest.block_checksums[9] ^= 1);
    let setup = setup_with(image, VolumeLimits::default());
    for _ in 0..2 {
        setup.read(setup.blocks(2, 1)).await.unwrap();
    }
    assert!(setup.volume.status().is_map_damaged);
    // Only the whole chunk shows which of the two is wrong: one answer more a read.
    assert_eq!((setup.source.reads(), setup.counters.fetches.get()), (4, 4));
    setup.read(all(&setup)).await.unwrap();
    assert_eq!(setup.counters.source_corrupt_chunks.get(), 0, "the source is not to blame");
    let lines = events.take();
    assert!(lines.len() == 1 && lines[0].contains("map file is damaged"), "{lines:?}");
    // Bytes that are wrong stay an error.
    setup.source.fail([Fault::WrongByte; 6]);
    assert_eq!(setup.read(setup.blocks(2, 1)).await.unwrap_err().kind(), ErrorKind::Corrupt);
    assert_eq!(setup.counters.source_corrupt_chunks.get(), 2);
    let lines = events.take();
    let wrong = lines.iter().filter(|line| line.contains("the source gave wrong bytes"));
    assert_eq!(wrong.count(), 2, "{lines:?}");
}

#[tokio::test]
async fn a_chunk_that_unpacks_to_more_than_it_should_is_refused() {
    let bomb = |manifest: &mut burgeon_image::Manifest| {
        // Chunk 3 has 64 blocks; say that it has half, and that the next has the others.
        manifest.chunks[3].blocks = 32;
        manifest.chunks[4].blocks += 32;
    };
    let setup = setup_with(common::image_with(1, "packs/test", bomb), VolumeLimits::default());
    let error = setup.read(setup.blocks(68, 1)).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Corrupt);
    assert_eq!(setup.counters.source_corrupt_chunks.get(), 2);
}

#[tokio::test]
async fn the_smallest_limits_still_make_progress() {
    let limits = VolumeLimits {
        fetches_max: 1,
        fetches_per_read: 1,
        background_fetches: 1,
        cpu_threads: 1,
        write_threads: 1,
        ..VolumeLimits::default()
    };
    let setup = setup_with(image(4), limits);
    let whole = all(&setup);
    let (volume, counters) = (&setup.volume, &setup.counters);
    let (one, two) = tokio::join!(
        common::read(volume, &setup.image, whole, counters),
        common::read(volume, &setup.image, whole, counters),
    );
    one.unwrap();
    two.unwrap();
    assert_eq!(setup.source.reads(), CHUNKS.len() as u64);
}

#[tokio::test]
async fn busy_volumes_share_one_bound() {
    let limits = VolumeLimits { shared: SharedPermits::new(3, 1), ..VolumeLimits::default() };
    let (a, b) = (setup_with(image(5), limits.clone()), setup_with(image(6), limits));
    let under_way = || a.source.reads() + b.source.reads();
    [&a, &b].into_iter().for_each(|setup| setup.source.close());
    let watch = async {
        while under_way() < 3 {
            tokio::task::yield_now().await;
        }
        for _ in 0..1000 {
            tokio::task::yield_now().await;
        }
        assert_eq!(under_way(), 3, "each volume took permits as if it were alone");
        [&a, &b].into_iter().for_each(|setup| setup.source.open());
    };
    let (one, two, ()) = tokio::join!(a.read(all(&a)), b.read(all(&b)), watch);
    one.unwrap();
    two.unwrap();
    assert_eq!(under_way(), 2 * CHUNKS.len() as u64);
}

#[tokio::test]
async fn prefetch_starts_what_there_is_room_for() {
    let limits = VolumeLimits { background_fetches: 4, ..VolumeLimits::default() };
    let setup = setup_with(image(1), limits);
    setup.source.close();
    assert_eq!(setup.volume.prefetch(all(&setup)), 4);
    setup.source.open();
    setup.settle().await;
    assert_eq!(setup.volume.prefetch(all(&setup)), 2, "the rest");
    setup.settle().await;
    assert_eq!(setup.volume.prefetch(all(&setup)), 0);
    assert_eq!(setup.volume.materialised_bytes(), all(&setup).len());
    assert_eq!(setup.volume.background().fetches.get(), CHUNKS.len() as u64);
}

/// A volume is shared between threads and its reads are sent between them.
#[test]
fn volumes_and_their_reads_are_send() {
    fn send<T: Send>(_: &T) {}
    fn check(volume: &Arc<common::TestVolume>, range: ByteRange, counters: &Counters) {
        let mut buf = [0; 4096];
        send(volume);
        send(&volume.read(range, &mut buf, counters));
    }
    let _: fn(&Arc<Volume<_, _>>, ByteRange, &Counters) = check;
}

#[tokio::test]
async fn an_image_without_checksums_has_those_of_what_came() {
    let setup = setup_with(image_without_checksums(1), VolumeLimits::default());
    setup.read(all(&setup)).await.unwrap();
    setup.settle().await;
    let came = setup.source.reads();
    setup.read(all(&setup)).await.unwrap();
    // Also after it was opened anew, in any state of the cache.
    let reopen = |store: &MemoryStore| {
        open(&setup.dir, &setup.image, &setup.source, public(store), VolumeLimits::default())
    };
    let reread = async |volume: &Arc<common::TestVolume>| {
        common::read(volume, &setup.image, all(&setup), &setup.counters).await.unwrap();
        while volume.status().in_flight > 0 {
            tokio::task::yield_now().await;
        }
    };
    reread(&reopen(&setup.store)).await;
    assert_eq!(setup.source.reads(), came);
    let keys = setup.store.keys();
    assert!(keys.iter().all(|key| setup.store.corrupt(key, 5)));
    reread(&reopen(&setup.store)).await;
    assert_eq!(setup.source.reads(), came + CHUNKS.len() as u64);
    assert_eq!(setup.counters.cache_corrupt_blocks.get(), CHUNKS.len() as u64);
    reread(&reopen(&setup.store)).await;
    assert_eq!(setup.source.reads(), came + CHUNKS.len() as u64, "healed");
    // Checksums that a crash took are recorded again, by a digest or a seal.
    std::fs::write(setup.dir.path().join("checksums"), []).unwrap();
    for _ in 0..2 {
        reread(&reopen(&setup.store)).await;
        assert_eq!(setup.source.reads(), came + CHUNKS.len() as u64);
    }
    assert_eq!(setup.counters.cache_corrupt_blocks.get(), CHUNKS.len() as u64);
    // Of another image nothing is believed, though its checksums lie in the same place.
    let other = image_without_checksums(2);
    let source = common::Source::of(&other);
    let swapped = open(&setup.dir, &other, &source, public(&setup.store), VolumeLimits::default());
    common::read(&swapped, &other, other.map.data_range(), &setup.counters).await.unwrap();
    assert_eq!(source.reads(), CHUNKS.len() as u64);
    // Without a file for them nothing is cached, and everything is right.
    let map = Arc::clone(&setup.image.map);
    let cache = public(&setup.store);
    let without = Volume::new(map, setup.source.clone(), cache, VolumeLimits::default());
    for _ in 0..2 {
        let before = setup.source.reads();
        reread(&without).await;
        assert_eq!(setup.source.reads(), before + CHUNKS.len() as u64);
    }
}
