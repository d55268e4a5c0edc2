//! Read-ahead: a reader of a far source finds the next chunk resident, and nobody else pays for it.

#![allow(clippy::unwrap_used)]

mod common;

use std::time::Duration;

use burgeon_block::BLOCK_SIZE;
use burgeon_volume::PrefetchedBytes;
use common::{CHUNKS, Setup, setup};

const FAR: Duration = Duration::from_millis(20);
/// From this chunk on the way is known.
const KNOWN: usize = 4;

/// Reads the first block of each of the first `chunks`, one after another.
async fn read_first(setup: &Setup, chunks: usize) {
    for index in 0..chunks {
        setup.read(setup.blocks(CHUNKS[..index].iter().sum(), 1)).await.unwrap();
        setup.settle().await;
    }
}

#[tokio::test(start_paused = true)]
async fn of_a_far_source_the_next_chunk_comes_along() {
    let setup = setup();
    setup.source.slow_down(FAR);
    read_first(&setup, KNOWN).await;
    assert_eq!(setup.source.reads(), KNOWN as u64, "nothing is known of the way yet");
    read_first(&setup, KNOWN + 1).await;
    assert_eq!(setup.source.reads(), CHUNKS.len() as u64);
    let len = CHUNKS[KNOWN + 1] * BLOCK_SIZE;
    assert_eq!(setup.volume.status().read_ahead, PrefetchedBytes { prefetched: len, read: 0 });
    let misses = setup.counters.misses.get();
    read_first(&setup, CHUNKS.len()).await;
    assert_eq!(setup.source.reads(), CHUNKS.len() as u64);
    assert_eq!(setup.counters.misses.get(), misses, "it is a hit");
    assert!(setup.volume.status().read_ahead.read > 0);
}

#[tokio::test(start_paused = true)]
async fn nothing_comes_along_where_that_does_not_help_or_is_not_wanted() {
    let near = setup();
    near.source.slow_down(Duration::from_millis(2));
    let limited = setup();
    limited.source.slow_down(FAR);
    limited.volume.stop_reading_ahead();
    for setup in [near, limited] {
        read_first(&setup, KNOWN + 1).await;
        assert_eq!(setup.source.reads(), KNOWN as u64 + 1);
        assert_eq!(setup.volume.status().read_ahead, PrefetchedBytes::default());
    }
}
