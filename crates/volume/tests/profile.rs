//! Profile prefetch: in order, in few requests, behind readers; and how much of it was read.

mod common;

use std::sync::Arc;

use burgeon_block::{BLOCK_SIZE, ByteRange};
use burgeon_volume::{Budget, LazyDevice, ProfileState, VolumeLimits};
use common::{CHUNKS, DATA_START, Fault, Setup, setup, setup_with};

fn all(setup: &Setup) -> ByteRange {
    setup.volume.map().data_range()
}

#[tokio::test]
async fn adjacent_chunks_come_with_one_request() {
    let setup = setup();
    let prefetch = setup.volume.prefetch_profile([all(&setup)].into_iter(), None);
    let end = prefetch.ended().await;
    assert_eq!(
        (end.state, end.total_bytes, end.done_bytes),
        (ProfileState::Done, all(&setup).len(), all(&setup).len(),)
    );
    // The first chunk fills a request, the others fit in one.
    assert_eq!(end.requests, 2);
    assert_eq!(setup.source.reads(), end.requests);
    assert_eq!(end.fetched_bytes, setup.image.packs[0].1.len() as u64);
    assert_eq!(setup.volume.materialised_bytes(), all(&setup).len());
    assert_eq!(setup.volume.background().fetches.get(), CHUNKS.len() as u64);
    setup.read(all(&setup)).await.unwrap();
    assert_eq!(setup.counters.hits.get(), 1);
    // Once more there is nothing to ask for.
    let again = setup.volume.prefetch_profile([all(&setup)].into_iter(), None).ended().await;
    assert_eq!((again.state, again.requests, again.fetched_bytes), (ProfileState::Done, 0, 0));
}

#[tokio::test]
async fn short_chunks_of_a_request_share_permits() {
    // A permit is for 256 KiB.
    let limits = VolumeLimits { background_fetches: 1, ..VolumeLimits::default() };
    let setup = setup_with(common::image(3), limits);
    let short = setup.blocks(CHUNKS[..4].iter().sum(), CHUNKS[4..].iter().sum());
    let end = setup.volume.prefetch_profile([short].into_iter(), None).ended().await;
    assert_eq!((end.state, end.done_bytes, end.requests), (ProfileState::Done, short.len(), 1));
}

#[tokio::test]
async fn unread_prefetched_bytes_are_counted() {
    let setup = setup();
    assert!(setup.volume.profile_prefetched().is_none());
    let first = setup.blocks(0, 64);
    setup.volume.prefetch_profile([first, setup.blocks(65, 1)].into_iter(), None).ended().await;
    let prefetched = setup.volume.profile_prefetched().unwrap();
    assert_eq!((prefetched.prefetched, prefetched.read), ((64 + 3) * BLOCK_SIZE, 0));
    setup.read(setup.blocks(3, 2)).await.unwrap();
    setup.read(setup.blocks(4, 2)).await.unwrap();
    // A chunk that the profile did not bring is nobody's useless prefetch.
    setup.read(setup.blocks(64, 1)).await.unwrap();
    assert_eq!(setup.volume.profile_prefetched().unwrap().read, 3 * BLOCK_SIZE);
}

#[tokio::test(start_paused = true)]
async fn a_reader_joins_what_is_on_its_way_and_passes_what_is_not() {
    let limits = VolumeLimits { background_fetches: 1, ..VolumeLimits::default() };
    let setup = setup_with(common::image(3), limits);
    setup.source.close();
    let order = [setup.blocks(0, 1), setup.blocks(68, 1), setup.blocks(149, 1)];
    let prefetch = setup.volume.prefetch_profile(order.into_iter(), None);
    while setup.volume.status().in_flight < 1 {
        tokio::task::yield_now().await;
    }
    let readers: Vec<_> = [setup.blocks(5, 1), setup.blocks(132, 1)]
        .into_iter()
        .map(|range| {
            let (volume, counters) = (Arc::clone(&setup.volume), Arc::clone(&setup.counters));
            tokio::spawn(async move {
                let mut buf = vec![0; BLOCK_SIZE as usize];
                volume.read(range, &mut buf, &counters).await.map(|()| buf)
            })
        })
        .collect();
    while setup.volume.status().in_flight < 2 {
        tokio::task::yield_now().await;
    }
    assert_eq!(
        setup.source.reads(),
        2,
        "one for the profile, which a reader shares, one for a reader"
    );
    setup.source.open();
    for (reader, block) in readers.into_iter().zip([5, 132]) {
        assert_eq!(reader.await.unwrap().unwrap(), setup.expected(setup.blocks(block, 1)));
    }
    assert_eq!(prefetch.ended().await.state, ProfileState::Done);
    assert_eq!(setup.volume.profile_prefetched().unwrap().read, BLOCK_SIZE);
}

#[tokio::test(start_paused = true)]
async fn wrong_and_missing_answers_are_mended_chunk_by_chunk() {
    for fault in [Fault::Unavailable, Fault::Truncated, Fault::WrongByte] {
        let setup = setup();
        setup.source.fail([fault]);
        let end = setup.volume.prefetch_profile([all(&setup)].into_iter(), None).ended().await;
        assert_eq!(end.state, ProfileState::Done, "{fault:?}");
        setup.settle().await;
        assert_eq!(setup.volume.materialised_bytes(), all(&setup).len(), "{fault:?}");
        setup.read(all(&setup)).await.unwrap();
    }
}

#[tokio::test(start_paused = true)]
async fn a_source_that_is_away_a_limit_and_nonsense_end_it() {
    let setup = setup_with(
        common::image(4),
        VolumeLimits { background_fetches: 1, ..VolumeLimits::default() },
    );
    setup.source.fail_always(Fault::Unavailable);
    let end = setup.volume.prefetch_profile([all(&setup)].into_iter(), None).ended().await;
    assert_eq!((end.state, end.fetched_bytes), (ProfileState::Stopped, 0));
    assert!(end.requests < CHUNKS.len() as u64, "{end:?}");
    setup.source.fail_always(None);
    let budget = Budget::new(Arc::clone(&setup.counters), 1);
    for requests in [1, 0] {
        let prefetch =
            setup.volume.prefetch_profile([all(&setup)].into_iter(), Some(Arc::clone(&budget)));
        let end = prefetch.ended().await;
        assert_eq!((end.state, end.requests), (ProfileState::OverLimit, requests));
    }
    setup.settle().await;
    assert_eq!(setup.counters.background_bytes.get(), CHUNKS[0] * BLOCK_SIZE);
    // Resident chunks need no budget.
    let here =
        setup.volume.prefetch_profile([setup.blocks(0, 1)].into_iter(), Some(budget)).ended().await;
    assert_eq!((here.state, here.done_bytes), (ProfileState::Done, here.total_bytes));
    let nonsense =
        [0, DATA_START - 4096, u64::MAX - 4096].map(|at| ByteRange::at(at, 4096).unwrap());
    let end = setup.volume.prefetch_profile(nonsense.into_iter(), None).ended().await;
    assert_eq!((end.state, end.total_bytes), (ProfileState::Done, 0));
    drop(setup.volume.prefetch_profile([all(&setup)].into_iter(), None));
    setup.settle().await;
}

#[tokio::test]
async fn reads_are_recorded_in_order_of_first_use_also_those_of_the_cache() {
    use burgeon_block::{BlockDevice, Pages};
    let setup = setup();
    setup.read(setup.blocks(0, 64)).await.unwrap();
    setup.settle().await;
    let end = all(&setup).end();
    let device =
        LazyDevice::new(setup.volume.clone(), setup.counters.clone(), end, Vec::new()).unwrap();
    let mut pages = Pages::zeroed(1 << 18).unwrap();
    let mut read = |block: u64, blocks: u64| {
        let len = (blocks * BLOCK_SIZE) as usize;
        device.try_read(DATA_START + block * BLOCK_SIZE, &mut pages.bytes_mut()[..len]).unwrap()
    };
    read(9, 1);
    device.start_recording();
    read(70, 2);
    read(5, 2);
    read(7, 1);
    read(4, 6);
    device.try_read(0, &mut [0; 4096]).unwrap();
    let recording = device.finish_recording();
    let expected = [(70, 2), (5, 3), (4, 1), (8, 2)].map(|(at, n)| setup.blocks(at, n));
    assert_eq!((recording.reads, recording.cut_short), (expected.to_vec(), false));
    assert!(device.finish_recording().reads.is_empty(), "it is over");
}
