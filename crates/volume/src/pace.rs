//! How much to ask of a source at once: as much as it takes, and no more.
//!
//! ```text
//!   bytes in flight ──► doubled each round while that makes it quicker ──► then 1.5 × rate × latency
//!   bytes a request ──► a quarter of that
//! ```
//!
//! More in flight than rate × latency only waits in queues, and so does a reader's request behind
//! it. The time is the caller's, so that tests need none.

use std::time::Duration;

use tokio::time::Instant;

/// Bytes in flight to begin with, and at least: four of the largest chunks. At 20 ms a round trip
/// that is 50 MB/s.
const WINDOW_MIN: u64 = 1 << 20;
/// Bytes in flight at most: what all seats of a volume hold.
const WINDOW_MAX: u64 = 8 << 20;
/// Bytes of a request: at least the largest chunk, at most what a reader may have to wait for
/// because its chunk comes with others (40 ms at 200 Mbit/s).
const REQUEST_MIN: u64 = 256 << 10;
const REQUEST_MAX: u64 = 1 << 20;
/// A round that is not quicker by a quarter is flat; so many flat rounds end the growth.
const GROWTH: f64 = 1.25;
const FLAT_ROUNDS: u32 = 2;
/// In flight, of rate × latency. The rest keeps the way busy while answers are looked at.
const GAIN: f64 = 1.5;

/// The pace of one sequence of requests.
pub(crate) struct Pace {
    window: u64,
    /// The quickest answer so far.
    latency: Duration,
    /// Bytes a second: the best of the last rounds.
    rate: f64,
    /// The best when the window was last doubled.
    rate_before: f64,
    delivered: u64,
    /// A round ends with the answer to a request that was sent after this was delivered.
    round: u64,
    flat: u32,
}

/// A request on its way.
#[derive(Clone, Copy)]
pub(crate) struct Sent {
    at: Instant,
    delivered: u64,
    bytes: u64,
}

impl Pace {
    pub(crate) fn new() -> Self {
        Self {
            window: WINDOW_MIN,
            latency: Duration::MAX,
            rate: 0.0,
            rate_before: 0.0,
            delivered: 0,
            round: 0,
            flat: 0,
        }
    }

    /// Bytes to have in flight.
    pub(crate) fn window(&self) -> u64 {
        self.window
    }

    /// Bytes to ask for at once.
    pub(crate) fn request(&self) -> u64 {
        (self.window / 4).clamp(REQUEST_MIN, REQUEST_MAX)
    }

    /// A request for `bytes` goes out.
    pub(crate) fn sent(&self, bytes: u64, now: Instant) -> Sent {
        Sent { at: now, delivered: self.delivered, bytes }
    }

    /// It was answered. What had not to be fetched says nothing about the way.
    pub(crate) fn answered(&mut self, sent: &Sent, now: Instant) {
        if sent.bytes == 0 {
            return;
        }
        let took = now.saturating_duration_since(sent.at).max(Duration::from_micros(1));
        self.delivered += sent.bytes;
        self.latency = self.latency.min(took);
        self.rate = self.rate.max((self.delivered - sent.delivered) as f64 / took.as_secs_f64());
        if sent.delivered < self.round {
            return;
        }
        self.round = self.delivered;
        if self.flat < FLAT_ROUNDS {
            if self.rate >= self.rate_before * GROWTH {
                (self.rate_before, self.flat) = (self.rate, 0);
                self.window = (self.window * 2).min(WINDOW_MAX);
                return;
            }
            self.flat += 1;
        }
        if self.flat == FLAT_ROUNDS {
            let enough = (self.rate * self.latency.as_secs_f64() * GAIN) as u64;
            self.window = enough.clamp(WINDOW_MIN, WINDOW_MAX);
            // What was the best once need not be it for ever.
            self.rate *= 0.98;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{collections::VecDeque, time::Duration};

    use tokio::time::Instant;

    use super::{Pace, WINDOW_MAX, WINDOW_MIN};

    /// Brings `total` bytes over a way of `rate` bytes a second and `latency`: the pace at the
    /// end, and how much longer it took than the way needs.
    fn bring(total: u64, rate: f64, latency: Duration) -> (Pace, f64) {
        let start = Instant::now();
        let (mut pace, mut now, mut free) = (Pace::new(), start, start);
        let (mut left, mut flying, mut on_the_way) = (total, VecDeque::new(), 0);
        while left > 0 || !flying.is_empty() {
            while left > 0 && (flying.is_empty() || on_the_way < pace.window()) {
                let bytes = pace.request().min(left);
                // The server answers after the latency, one byte after another.
                free = free.max(now + latency) + Duration::from_secs_f64(bytes as f64 / rate);
                flying.push_back((pace.sent(bytes, now), free, bytes));
                (left, on_the_way) = (left - bytes, on_the_way + bytes);
            }
            if let Some((sent, at, bytes)) = flying.pop_front() {
                now = at;
                on_the_way -= bytes;
                pace.answered(&sent, now);
            }
        }
        let bound = total as f64 / rate + latency.as_secs_f64();
        (pace, (now - start).as_secs_f64() / bound)
    }

    #[test]
    fn what_was_there_says_nothing_about_the_way() {
        let start = Instant::now();
        let (mut pace, mut other) = (Pace::new(), Pace::new());
        for round in 0..40 {
            let at = start + Duration::from_millis(100) * round;
            for pace in [&mut pace, &mut other] {
                let sent = pace.sent(pace.request(), at);
                pace.answered(&sent, at + Duration::from_millis(40));
            }
            let near = pace.sent(0, at);
            pace.answered(&near, at + Duration::from_micros(5));
        }
        assert_eq!(pace.latency, Duration::from_millis(40));
        assert_eq!(pace.window(), other.window());
    }

    #[test]
    fn it_fills_the_way_and_does_not_flood_it() {
        for (mbit, ms) in [(200, 20), (1000, 20), (1000, 50), (50, 100), (10, 20)] {
            let (rate, latency) = (f64::from(mbit) * 125_000.0, Duration::from_millis(ms));
            let (pace, slower) = bring(128 << 20, rate, latency);
            assert!(slower < 1.15, "{mbit} Mbit/s, {ms} ms: {slower} times the bound");
            let product = (rate * latency.as_secs_f64()) as u64;
            let most = (4 * product).clamp(WINDOW_MIN, WINDOW_MAX);
            assert!(pace.window() <= most, "{mbit}, {ms}: {} of {product}", pace.window());
        }
    }
}
