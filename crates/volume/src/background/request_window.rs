//! Bytes in flight of a profile prefetch: as many as the path takes, and no more.
//!
//! ```text
//!   bytes in flight ──► doubled each round while that makes it quicker ──► then 1.5 × rate × latency
//!   bytes a request ──► a quarter of that
//! ```
//!
//! More in flight than rate × latency only waits in queues, and so does a reader's request behind
//! it (`tests::it_fills_the_path_and_does_not_flood_it`). Time, rate and latency come from
//! [`PathEstimate`](crate::fetch::path::PathEstimate).

use crate::fetch::path::{Estimate, Sent};

/// Bytes in flight at first, and at least: four of the largest chunks. At 20 ms a round trip
/// that is 50 MB/s.
const WINDOW_MIN: u64 = 1 << 20;
/// Bytes in flight at most: all permits of a volume.
const WINDOW_MAX: u64 = 8 << 20;
/// Bytes of a request: at least the largest chunk, and at most 40 ms at 200 Mbit/s, because a
/// reader may have to wait for all of it when its chunk comes with others.
const REQUEST_MIN: u64 = 256 << 10;
const REQUEST_MAX: u64 = 1 << 20;
/// A round that is not quicker by a quarter is flat; so many flat rounds end the growth.
const GROWTH: f64 = 1.25;
const FLAT_ROUNDS: u32 = 2;
/// In flight, of rate × latency. The rest keeps the path busy while answers are handled.
const GAIN: f64 = 1.5;

/// The window of one sequence of requests.
pub(super) struct RequestWindow {
    bytes: u64,
    /// The best rate when the window was last doubled.
    rate_before: f64,
    /// A round ends with the answer to a request that was sent after so many bytes were delivered.
    round: u64,
    flat: u32,
}

impl RequestWindow {
    pub(super) fn new() -> Self {
        Self { bytes: WINDOW_MIN, rate_before: 0.0, round: 0, flat: 0 }
    }

    /// Bytes to have in flight.
    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Bytes to ask for at once.
    pub(super) fn request(&self) -> u64 {
        (self.bytes / 4).clamp(REQUEST_MIN, REQUEST_MAX)
    }

    /// A request was answered, and this is the `path` after it.
    pub(super) fn answered(&mut self, sent: &Sent, path: &Estimate) {
        // Bytes that had not to be fetched say nothing about the path.
        if sent.bytes == 0 || sent.delivered < self.round {
            return;
        }
        self.round = path.delivered;
        if self.flat < FLAT_ROUNDS {
            if path.rate >= self.rate_before * GROWTH {
                (self.rate_before, self.flat) = (path.rate, 0);
                self.bytes = (self.bytes * 2).min(WINDOW_MAX);
                return;
            }
            self.flat += 1;
        }
        if self.flat == FLAT_ROUNDS {
            let enough = (path.rate * path.latency.as_secs_f64() * GAIN) as u64;
            self.bytes = enough.clamp(WINDOW_MIN, WINDOW_MAX);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{collections::VecDeque, time::Duration};

    use tokio::time::Instant;

    use super::{RequestWindow, WINDOW_MAX, WINDOW_MIN};
    use crate::fetch::path::PathEstimate;

    /// Fetches `total` bytes over a path of `rate` bytes a second and `latency`: the window at
    /// the end, and how much longer it took than the path needs.
    fn fetch(total: u64, rate: f64, latency: Duration) -> (RequestWindow, f64) {
        let start = Instant::now();
        let (path, mut window) = (PathEstimate::default(), RequestWindow::new());
        let (mut now, mut free) = (start, start);
        let (mut left, mut in_flight, mut bytes_in_flight) = (total, VecDeque::new(), 0);
        while left > 0 || !in_flight.is_empty() {
            while left > 0 && (in_flight.is_empty() || bytes_in_flight < window.bytes()) {
                let bytes = window.request().min(left);
                // The server answers after the latency, one byte after another.
                free = free.max(now + latency) + Duration::from_secs_f64(bytes as f64 / rate);
                in_flight.push_back((path.sent(bytes, now), free, bytes));
                (left, bytes_in_flight) = (left - bytes, bytes_in_flight + bytes);
            }
            if let Some((sent, at, bytes)) = in_flight.pop_front() {
                now = at;
                bytes_in_flight -= bytes;
                path.answered(&sent, now);
                window.answered(&sent, &path.now());
            }
        }
        let bound = total as f64 / rate + latency.as_secs_f64();
        (window, (now - start).as_secs_f64() / bound)
    }

    #[test]
    fn bytes_at_hand_say_nothing_about_the_path() {
        let start = Instant::now();
        let both = [(); 2].map(|()| (PathEstimate::default(), RequestWindow::new()));
        let [(path, mut window), (other_path, mut other)] = both;
        for round in 0..40 {
            let at = start + Duration::from_millis(100) * round;
            for (path, window) in [(&path, &mut window), (&other_path, &mut other)] {
                let sent = path.sent(window.request(), at);
                path.answered(&sent, at + Duration::from_millis(40));
                window.answered(&sent, &path.now());
            }
            let near = path.sent(0, at);
            path.answered(&near, at + Duration::from_micros(5));
            window.answered(&near, &path.now());
        }
        assert_eq!(path.now().latency, Duration::from_millis(40));
        assert_eq!(window.bytes(), other.bytes());
    }

    #[test]
    fn it_fills_the_path_and_does_not_flood_it() {
        for (mbit, ms) in [(200, 20), (1000, 20), (1000, 50), (50, 100), (10, 20)] {
            let (rate, latency) = (f64::from(mbit) * 125_000.0, Duration::from_millis(ms));
            let (window, slower) = fetch(128 << 20, rate, latency);
            assert!(slower < 1.15, "{mbit} Mbit/s, {ms} ms: {slower} times the bound");
            let product = (rate * latency.as_secs_f64()) as u64;
            let most = (4 * product).clamp(WINDOW_MIN, WINDOW_MAX);
            assert!(window.bytes() <= most, "{mbit}, {ms}: {} of {product}", window.bytes());
        }
    }
}
