//! Reading ahead: what a reader waits for takes a round trip, and its neighbours can come in it.
//!
//! ```text
//!   reader's chunk      ── request ──────► ◄── bytes ──
//!   those behind it         ── request ──────► ◄══ as much as the way carries in one round trip ══
//! ```
//!
//! A second request, so that the reader does not wait for it. How much: twice what was brought so far
//! in the time of the quickest request. From below that ends near what the way carries while a
//! reader's own request is under way. Where a round
//! trip is short, nothing is read ahead, and where little of it is ever read, less. Invariant: it
//! takes seats of the background, and only those that are free.

use std::{
    collections::VecDeque,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use burgeon_block::{BlockSource, ByteRange, LocalFile};
use tokio::{sync::mpsc, time::Instant};

use crate::{
    Volume,
    brought::BroughtBytes,
    flights::{Background, Seats},
    fly::{Boarded, Purpose},
};

/// Round trips that are remembered, and how many it takes to know the way: the quickest of several
/// is not a machine's that was busy.
const REMEMBERED: usize = 16;
const KNOWN: usize = 4;
/// Below this, waiting for one chunk after another costs less than bytes that nobody wants.
const LATENCY_MIN: Duration = Duration::from_millis(8);
/// Bytes read ahead at a time, at most: four of the largest chunks, so that several readers find
/// seats.
const WINDOW_MAX: u64 = 1 << 20;
/// Bytes that are taken for useful before anything is known.
const TRUSTED: u64 = 4 << 20;

/// What is known of the way to a source.
#[derive(Default)]
pub(crate) struct Way(Mutex<Known>);

#[derive(Default)]
struct Known {
    /// Nothing is to be read ahead.
    stopped: bool,
    took: VecDeque<Duration>,
    /// Bytes a second that one request brought, its round trip included.
    rate: f64,
}

impl Way {
    /// A request for `bytes` was answered after `took`.
    pub(crate) fn note(&self, bytes: u64, took: Duration) {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if known.took.len() == REMEMBERED {
            known.took.pop_front();
        }
        known.took.push_back(took);
        let rate = bytes as f64 / took.max(Duration::from_micros(1)).as_secs_f64();
        // What was the best once need not be it for ever.
        known.rate = rate.max(known.rate * 0.99);
    }

    /// From now on nothing is read ahead.
    fn stop(&self) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).stopped = true;
    }

    /// Bytes to read ahead, when of those that were brought so far so many were read.
    pub(crate) fn window(&self, so_far: BroughtBytes) -> u64 {
        let known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(latency) = known.took.iter().min().filter(|_| known.took.len() >= KNOWN) else {
            return 0;
        };
        if known.stopped || *latency < LATENCY_MIN {
            return 0;
        }
        let window = ((2.0 * known.rate * latency.as_secs_f64()) as u64).min(WINDOW_MAX);
        let useful = (so_far.read + TRUSTED) as f64 / (so_far.brought + TRUSTED) as f64;
        match useful {
            0.5.. => window,
            0.25.. => window / 2,
            0.1.. => window / 4,
            _ => 0,
        }
    }
}

impl<S, F> Volume<S, F>
where
    S: BlockSource + 'static,
    F: LocalFile + 'static,
{
    /// From now on only what is read, or asked for otherwise, is fetched: for mounts that have a
    /// limit.
    pub fn stop_reading_ahead(&self) {
        self.way.stop();
    }

    /// A reader is about to fetch the chunk `index`: begins to bring those behind it.
    pub(crate) fn read_ahead(self: &Arc<Self>, index: u32) {
        let len_max = self.way.window(self.ahead());
        let mut row = Vec::new();
        let mut last = self.map.chunk(index);
        let start = last.stored.end();
        for index in index + 1..self.map.chunk_count() {
            let chunk = self.map.chunk(index);
            let beside = chunk.object == last.object && chunk.stored.start() == last.stored.end();
            let Some(range) = ByteRange::new(start, chunk.stored.end()).filter(|_| beside) else {
                break;
            };
            // A source that unpacks may have to fetch much for little.
            let len = self.source.bytes_to_fetch(self.map.object(chunk.object), range);
            if len.max(range.len()) > len_max || self.is_through(index) {
                break;
            }
            let Some(background) = self.background_seats.try_take() else { break };
            let Some(flight) = self.seats.try_take() else { break };
            let background = Some(Background { _seat: background, payer: None });
            let seats = Seats { _flight: flight, background };
            let Some(boarded) = self.board_absent(index, seats) else { break };
            row.push(boarded);
            last = chunk;
        }
        if !row.is_empty() {
            tokio::spawn(Arc::clone(self).bring_ahead(row));
        }
    }

    async fn bring_ahead(self: Arc<Self>, row: Vec<Boarded>) {
        // The reader's own request goes first.
        tokio::task::yield_now().await;
        let fetched = self.bytes_to_fetch(&row);
        let asked = Instant::now();
        let (landing, _) = mpsc::channel(1);
        let answered = Arc::clone(&self).fly_together(row, Purpose::Ahead, landing).await;
        if answered && fetched > 0 {
            self.way.note(fetched, asked.elapsed());
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::{WINDOW_MAX, Way};
    use crate::brought::BroughtBytes;

    /// The windows of a reader whose requests go over a way of `rate` bytes a second.
    fn windows(rate: f64, latency: Duration, so_far: BroughtBytes) -> Vec<u64> {
        let way = Way::default();
        let answer = |bytes: u64| latency + Duration::from_secs_f64(bytes as f64 / rate);
        let read = |_| {
            way.note(100_000, answer(100_000));
            let window = way.window(so_far);
            if window > 0 {
                way.note(window, answer(window));
            }
            window
        };
        (0..40).map(read).collect()
    }

    #[test]
    fn it_is_what_the_way_carries_while_the_reader_waits() {
        for (mbit, ms) in [(200, 20), (100, 50), (10, 100), (50, 10)] {
            let (rate, latency) = (f64::from(mbit) * 125_000.0, Duration::from_millis(ms));
            let windows = windows(rate, latency, BroughtBytes::default());
            assert_eq!(windows[..3], [0, 0, 0], "the way is not known yet");
            let meanwhile = (rate * latency.as_secs_f64()) as u64 + 100_000;
            let last = windows[39];
            let near = meanwhile / 2..=meanwhile * 2;
            assert!(near.contains(&last), "{mbit}, {ms}, {meanwhile}: {windows:?}");
        }
    }

    #[test]
    fn it_is_nothing_where_it_does_not_help() {
        let near = windows(1e9, Duration::from_millis(1), BroughtBytes::default());
        assert!(near.iter().all(|window| *window == 0), "{near:?}");
        let far = |read| {
            let so_far = BroughtBytes { brought: 1 << 30, read };
            windows(1e9, Duration::from_millis(50), so_far)[39]
        };
        assert_eq!(far(1 << 30), WINDOW_MAX);
        assert!((1..WINDOW_MAX / 2).contains(&far(300 << 20)), "a third is read");
        assert_eq!(far(0), 0, "nobody reads it");
    }
}
