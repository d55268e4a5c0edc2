//! Background fill: complete, polite, stoppable, patient.

mod common;

use std::{sync::Arc, time::Duration};

use burgeon_block::BLOCK_SIZE;
use burgeon_volume::{Budget, FillState, LazyDevice, VolumeLimits};
use common::{CHUNKS, Fault, setup, setup_with};
use tokio::time::{Instant, sleep};

#[tokio::test]
async fn a_fill_makes_everything_resident_and_reports_it() {
    let setup = setup();
    setup.read(setup.blocks(64, 1)).await.unwrap();
    let all = setup.volume.map().data_range();
    let fill = setup.volume.fill();
    let end = fill.ended().await;
    assert_eq!((end.state, end.failed_bytes), (FillState::Done, 0));
    assert_eq!((end.total_bytes, end.done_bytes), (all.len(), all.len()));
    assert_eq!(setup.volume.materialised_bytes(), all.len());
    assert_eq!(setup.source.reads(), CHUNKS.len() as u64);
    setup.read(all).await.unwrap();
    assert_eq!(setup.counters.hits.get(), 1);
    let elsewhere = setup.volume.background().fetches.get();
    assert_eq!(elsewhere + setup.counters.fetches.get(), CHUNKS.len() as u64);
}

#[tokio::test(start_paused = true)]
async fn a_fill_stands_back_for_readers_for_a_second() {
    let setup = setup();
    setup.source.close();
    let (volume, counters) = (Arc::clone(&setup.volume), Arc::clone(&setup.counters));
    let last = setup.blocks(150, 1);
    let reader = tokio::spawn(async move {
        let mut buf = vec![0; BLOCK_SIZE as usize];
        volume.read(last, &mut buf, &counters).await
    });
    sleep(Duration::from_millis(1)).await;
    let fill = setup.volume.fill();
    let fill_yield = VolumeLimits::default().fill_yield;
    sleep(fill_yield / 2).await;
    assert_eq!(setup.volume.status().in_flight, 1, "only the reader's");
    sleep(fill_yield).await;
    assert_eq!(setup.volume.status().in_flight, 2, "one chunk after a second");
    setup.source.open();
    reader.await.unwrap().unwrap();
    let start = Instant::now();
    assert_eq!(fill.ended().await.state, FillState::Done);
    assert!(start.elapsed() < fill_yield, "nobody waits: no more pauses");
}

#[tokio::test(start_paused = true)]
async fn a_fill_ends_at_stop_and_at_drop() {
    let setup = setup_with(
        common::image(6),
        VolumeLimits { background_fetches: 2, ..VolumeLimits::default() },
    );
    setup.source.close();
    let fill = setup.volume.fill();
    sleep(Duration::from_millis(1)).await;
    assert_eq!(setup.volume.status().in_flight, 2, "no more than allowed");
    fill.stop();
    assert_eq!(fill.ended().await.state, FillState::Stopped);
    drop(fill);
    drop(setup.volume.fill());
    sleep(Duration::from_secs(1)).await;
    setup.source.open();
    setup.settle().await;
    assert_eq!(setup.source.reads(), 2, "those in flight end, no others start");
    assert_eq!(setup.volume.fill().ended().await.state, FillState::Done);
}

#[tokio::test(start_paused = true)]
async fn a_fill_outlives_an_outage_and_skips_a_bad_chunk() {
    let setup = setup();
    setup.source.fail_always(Fault::Unavailable);
    let fill = setup.volume.fill();
    sleep(VolumeLimits::default().deadline * 5).await;
    assert_eq!(fill.progress().state, FillState::Running);
    assert_eq!(setup.volume.materialised_bytes(), 0);
    setup.source.fail_always(None);
    setup.source.fail([Fault::WrongByte; 2]);
    let limits = VolumeLimits { background_fetches: 1, ..VolumeLimits::default() };
    let end = fill.ended().await;
    assert_eq!(end.state, FillState::Done);
    assert_eq!(end.done_bytes + end.failed_bytes, end.total_bytes);

    // One chunk at a time, so both wrong answers are for the same chunk.
    let alone = setup_with(common::image(7), limits);
    alone.source.fail([Fault::WrongByte; 2]);
    let end = alone.volume.fill().ended().await;
    assert_eq!((end.state, end.failed_bytes), (FillState::Done, CHUNKS[0] * BLOCK_SIZE));
    assert_eq!(end.done_bytes, end.total_bytes - CHUNKS[0] * BLOCK_SIZE);
}

#[tokio::test(start_paused = true)]
async fn a_fill_uses_every_background_permit() {
    let setup = setup();
    setup.source.close();
    let fill = setup.volume.fill();
    sleep(Duration::from_millis(1)).await;
    assert_eq!(
        setup.volume.status().in_flight,
        CHUNKS.len(),
        "one after another takes a round trip each"
    );
    setup.source.open();
    assert_eq!(fill.ended().await.state, FillState::Done);
}

#[tokio::test]
async fn a_fill_ends_at_the_fetch_limit() {
    let setup = setup_with(
        common::image(8),
        VolumeLimits { background_fetches: 1, ..VolumeLimits::default() },
    );
    let stored = setup.image.packs[0].1.len() as u64;
    let first = CHUNKS[0] * BLOCK_SIZE;
    // The first chunk, and the one that is taken before the limit is reached.
    let limit = first + 1;
    let budget = Budget::new(Arc::clone(&setup.counters), limit);
    for reads in [2, 2] {
        let end = setup.volume.fill_for(Arc::clone(&budget)).ended().await;
        assert_eq!((end.state, end.failed_bytes), (FillState::OverLimit, 0));
        assert_eq!(end.done_bytes, (CHUNKS[0] + CHUNKS[1]) * BLOCK_SIZE, "what is here counts");
        assert_eq!(setup.source.reads(), reads);
    }
    assert!(!budget.may_fetch());
    let fetched = setup.counters.background_bytes.get();
    assert!((limit..stored).contains(&fetched), "{fetched} of {stored}");
    assert_eq!(setup.counters.fetched_bytes.get(), 0);

    // Readers, pins and fill of one mount have one limit; other mounts have their own.
    let device = |limit| {
        let (volume, counters) = (Arc::clone(&setup.volume), Arc::clone(&setup.counters));
        let device = LazyDevice::new(volume, counters, 1 << 42, Vec::new()).unwrap();
        device.with_fetch_limit(limit)
    };
    let all = setup.volume.map().data_range();
    let over = device(limit);
    let mut pinned = over.fill_ranges(&[all]).await.unwrap();
    assert_eq!(pinned.pop().unwrap().ended().await.state, FillState::OverLimit);
    assert_eq!(over.fill().ended().await.state, FillState::OverLimit);
    let mut pages = burgeon_block::Pages::zeroed(BLOCK_SIZE).unwrap();
    let last = all.end() - BLOCK_SIZE;
    let refused = burgeon_block::BlockDevice::read(&over, last, pages.bytes_mut()).await;
    assert_eq!(refused.unwrap_err().kind(), burgeon_block::ErrorKind::OverLimit);
    assert_eq!(device(stored + 1).fill().ended().await.state, FillState::Done);
    assert_eq!(setup.counters.background_bytes.get(), stored);
    assert_eq!(over.fill().ended().await.state, FillState::Done, "nothing is left to fetch");
}
