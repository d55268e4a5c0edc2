//! The estimate of the path to a source: one for all that is fetched over it.
//!
//! ```text
//!   sent ─── bytes delivered meanwhile, by all requests ───► answered
//!     └──────────────────── took ──────────────────────────────┘
//!   rate    = delivered ÷ took, the best of late        latency = the shortest took
//! ```
//!
//! Background work derives its windows from it (`background/request_window.rs`,
//! `background/read_ahead.rs`). Delivered bytes of all requests count, so requests that share the
//! path do not look slow to each other. Invariants: bytes that the source had at hand say nothing
//! about the path (`tests::bytes_at_hand_say_nothing`); a rate that was reached once fades
//! (`tests::an_old_rate_fades`).

use std::{
    collections::VecDeque,
    sync::{Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use tokio::time::Instant;

/// Answers that the recent latency is taken from.
const RECENT: usize = 16;
/// Answers before the recent latency is known: the quickest of several is not that of a busy
/// machine.
const KNOWN: usize = 4;
/// The best rate fades to this share of itself with each answer.
const FADE: f64 = 0.99;

/// The estimate of one path.
#[derive(Default)]
pub(crate) struct PathEstimate(Mutex<Known>);

#[derive(Default)]
struct Known {
    delivered: u64,
    /// Bytes a second.
    rate: f64,
    shortest: Option<Duration>,
    recent: VecDeque<Duration>,
}

/// A request that was sent over the path.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sent {
    at: Instant,
    /// Bytes that had been delivered before.
    pub(crate) delivered: u64,
    /// Bytes that it fetches.
    pub(crate) bytes: u64,
}

/// The estimate at one moment.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Estimate {
    /// Bytes delivered so far.
    pub(crate) delivered: u64,
    /// Bytes a second.
    pub(crate) rate: f64,
    /// The shortest time of an answer ever: without queues, for bounds of the bytes in flight.
    pub(crate) latency: Duration,
    /// The shortest of late, as soon as enough is known.
    pub(crate) recent_latency: Option<Duration>,
}

impl PathEstimate {
    fn known(&self) -> MutexGuard<'_, Known> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A request for `bytes` goes out.
    pub(crate) fn sent(&self, bytes: u64, now: Instant) -> Sent {
        Sent { at: now, delivered: self.known().delivered, bytes }
    }

    /// It was answered.
    pub(crate) fn answered(&self, sent: &Sent, now: Instant) {
        if sent.bytes == 0 {
            return;
        }
        let took = now.saturating_duration_since(sent.at).max(Duration::from_micros(1));
        let mut known = self.known();
        known.delivered += sent.bytes;
        let rate = (known.delivered - sent.delivered) as f64 / took.as_secs_f64();
        known.rate = rate.max(known.rate * FADE);
        known.shortest = Some(known.shortest.map_or(took, |shortest| shortest.min(took)));
        if known.recent.len() == RECENT {
            known.recent.pop_front();
        }
        known.recent.push_back(took);
    }

    /// The estimate now.
    pub(crate) fn now(&self) -> Estimate {
        let known = self.known();
        let recent = known.recent.iter().min().filter(|_| known.recent.len() >= KNOWN);
        Estimate {
            delivered: known.delivered,
            rate: known.rate,
            latency: known.shortest.unwrap_or(Duration::MAX),
            recent_latency: recent.copied(),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::time::Instant;

    use super::PathEstimate;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn requests_that_share_the_path_count_together() {
        let (path, start) = (PathEstimate::default(), Instant::now());
        let sent = [(); 4].map(|()| path.sent(100_000, start));
        sent.iter().for_each(|sent| path.answered(sent, start + 100 * MS));
        let now = path.now();
        assert_eq!((now.delivered, now.rate as u64), (400_000, 4_000_000));
        assert_eq!((now.latency, now.recent_latency), (100 * MS, Some(100 * MS)));
    }

    #[test]
    fn bytes_at_hand_say_nothing() {
        let (path, start) = (PathEstimate::default(), Instant::now());
        path.answered(&path.sent(1000, start), start + 40 * MS);
        let before = path.now();
        path.answered(&path.sent(0, start), start);
        let after = path.now();
        assert_eq!((after.delivered, after.latency), (before.delivered, before.latency));
    }

    #[test]
    fn an_old_rate_fades() {
        let (path, mut now) = (PathEstimate::default(), Instant::now());
        let mut request = |took: Duration| {
            let sent = path.sent(100_000, now);
            now += took;
            path.answered(&sent, now);
        };
        request(MS);
        (0..300).for_each(|_| request(20 * MS));
        let now = path.now();
        assert!((4.9e6..8e6).contains(&now.rate), "{now:?}");
        assert_eq!((now.latency, now.recent_latency), (MS, Some(20 * MS)));
    }
}
