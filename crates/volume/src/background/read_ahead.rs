//! Read-ahead: a reader's fetch takes a round trip, and the chunks behind it can come in the same
//! time.
//!
//! ```text
//!   reader's chunk      ── request ──────► ◄── bytes ──
//!   those behind it         ── request ──────► ◄══ as much as the path carries in one round trip ══
//! ```
//!
//! A second request, so that the reader does not wait for it. Its size is twice rate × latency of
//! the path by the present estimate. As the estimate grows, the size approaches the bytes that the
//! path carries while a reader's own request is in flight. If a round trip is short, nothing is
//! read ahead; if little of it is ever read, less (`tests`), but small files come with their
//! neighbours in any case: their chunks are short for the sake of images that share them.
//! Invariant: it takes background permits, and only those that are free.

use std::{sync::Arc, time::Duration};

use burgeon_block::{BlockSource, ByteRange, LocalFile};
use tokio::sync::mpsc;

use super::prefetched::{PrefetchedBytes, Purpose};
use crate::{
    Volume,
    fetch::{path::Estimate, permits::RunPermits, run::RunChunk},
};

/// Below this, waiting for one chunk after another costs less than bytes that nobody wants.
const LATENCY_MIN: Duration = Duration::from_millis(8);
/// Bytes read ahead at a time, at most: four of the largest chunks, so that several readers find
/// permits.
const WINDOW_MAX: u64 = 1 << 20;
/// A short chunk and those behind it come together, up to this length.
const TOGETHER: u64 = 128 << 10;
/// Bytes that are taken for useful before anything is known.
const TRUSTED: u64 = 4 << 20;

/// Bytes to read ahead over `path` of a chunk of `len` bytes, when of the `so_far` prefetched ones
/// so many were read.
fn window(path: &Estimate, so_far: PrefetchedBytes, len: u64) -> u64 {
    let Some(latency) = path.recent_latency.filter(|latency| *latency >= LATENCY_MIN) else {
        return 0;
    };
    let window = ((2.0 * path.rate * latency.as_secs_f64()) as u64).min(WINDOW_MAX);
    let useful = (so_far.read + TRUSTED) as f64 / (so_far.prefetched + TRUSTED) as f64;
    let window = match useful {
        0.5.. => window,
        0.25.. => window / 2,
        0.1.. => window / 4,
        _ => 0,
    };
    window.max(TOGETHER.saturating_sub(len))
}

impl<S, F> Volume<S, F>
where
    S: BlockSource + 'static,
    F: LocalFile + 'static,
{
    /// Ends read-ahead, for mounts that have a fetch limit.
    pub fn stop_reading_ahead(&self) {
        self.background_work.stop_reading_ahead();
    }

    /// A reader is about to fetch the chunk `index`: begins to fetch those behind it.
    pub(crate) fn read_ahead(self: &Arc<Self>, index: u32) {
        if !self.background_work.reads_ahead() {
            return;
        }
        let so_far = self.background_work.prefetched_bytes(Purpose::ReadAhead);
        let mut last = self.map.chunk(index);
        let (path, so_far) = (self.engine.path.now(), so_far.unwrap_or_default());
        let len_max = window(&path, so_far, last.range.len());
        let (mut run, mut run_permits) = (Vec::new(), RunPermits::default());
        let start = last.stored.end();
        for index in index + 1..self.map.chunk_count() {
            let chunk = self.map.chunk(index);
            let adjoins = chunk.object == last.object && chunk.stored.start() == last.stored.end();
            let Some(range) = ByteRange::new(start, chunk.stored.end()).filter(|_| adjoins) else {
                break;
            };
            // A source that unpacks may have to fetch much for little.
            let len = self.source.bytes_to_fetch(self.map.object(chunk.object), range);
            if len.max(range.len()) > len_max || self.is_through(index) {
                break;
            }
            let more = || self.engine.try_background_permits(None);
            let Some(permits) = run_permits.take(chunk.range.len(), more) else { break };
            let Some(begun) = self.begin_new(index, permits) else { break };
            run.push(RunChunk { index, begun });
            last = chunk;
        }
        if !run.is_empty() {
            tokio::spawn(Arc::clone(self).fetch_ahead(run));
        }
    }

    async fn fetch_ahead(self: Arc<Self>, run: Vec<RunChunk>) {
        // The reader's own request goes first.
        tokio::task::yield_now().await;
        let (ending, _) = mpsc::channel(1);
        self.fetch_run(run, Purpose::ReadAhead, ending).await;
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::time::Instant;

    use super::{PrefetchedBytes, TOGETHER, WINDOW_MAX, window};
    use crate::fetch::path::{Estimate, PathEstimate};

    const LONG: u64 = 256 << 10;

    /// The windows of a reader whose requests go over a path of `rate` bytes a second.
    fn windows(rate: f64, latency: Duration, so_far: PrefetchedBytes) -> Vec<u64> {
        let (path, mut now) = (PathEstimate::default(), Instant::now());
        let mut request = |bytes: u64| {
            let sent = path.sent(bytes, now);
            now += latency + Duration::from_secs_f64(bytes as f64 / rate);
            path.answered(&sent, now);
        };
        let read = |_| {
            request(100_000);
            let window = window(&path.now(), so_far, LONG);
            if window > 0 {
                request(window);
            }
            window
        };
        (0..40).map(read).collect()
    }

    #[test]
    fn it_is_what_the_path_carries_while_the_reader_waits() {
        for (mbit, ms) in [(200, 20), (100, 50), (10, 100), (50, 10)] {
            let (rate, latency) = (f64::from(mbit) * 125_000.0, Duration::from_millis(ms));
            let windows = windows(rate, latency, PrefetchedBytes::default());
            assert_eq!(windows[..3], [0, 0, 0], "the path is not known yet");
            let meanwhile = (rate * latency.as_secs_f64()) as u64 + 100_000;
            let last = windows[39];
            let near = meanwhile / 2..=meanwhile * 2;
            assert!(near.contains(&last), "{mbit}, {ms}, {meanwhile}: {windows:?}");
        }
    }

    #[test]
    fn it_is_nothing_where_it_does_not_help() {
        let near = windows(1e9, Duration::from_millis(1), PrefetchedBytes::default());
        assert!(near.iter().all(|window| *window == 0), "{near:?}");
        let far = |read| {
            let so_far = PrefetchedBytes { prefetched: 1 << 30, read };
            windows(1e9, Duration::from_millis(50), so_far)[39]
        };
        assert_eq!(far(1 << 30), WINDOW_MAX);
        assert!((1..WINDOW_MAX / 2).contains(&far(300 << 20)), "a third is read");
        assert_eq!(far(0), 0, "nobody reads it");
    }

    #[test]
    fn small_files_come_with_their_neighbours_even_if_few_are_read() {
        let unread = PrefetchedBytes { prefetched: 1 << 30, read: 0 };
        let latency = Some(Duration::from_millis(50));
        let path = Estimate { recent_latency: latency, ..PathEstimate::default().now() };
        assert_eq!(window(&path, unread, 20_000), TOGETHER - 20_000);
        assert_eq!(window(&path, unread, LONG), 0);
        assert_eq!(window(&PathEstimate::default().now(), unread, 20_000), 0, "it is near");
    }
}
