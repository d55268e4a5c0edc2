//! The bytes that all mounts have read, now and over a while: hits and misses of the cache.
//!
//! ```text
//!   counters of each mount (shared memory, they outlive a server) ──► what is new since the last look
//!                                                                        │ added
//!                          a sample every ten seconds, for an hour ◄── total of this server
//! ```
//!
//! Invariant: a total never goes down, whatever mounts come and go
//! (`tests::totals_grow_while_mounts_come_and_go`).

use std::{
    collections::{HashMap, VecDeque},
    time::{Duration, Instant},
};

use crate::{id::MountId, ipc::protocol::ReadBytes};

/// Time between two samples.
pub(super) const PERIOD: Duration = Duration::from_secs(10);
/// Age of the oldest sample.
const KEPT: Duration = Duration::from_secs(3600);

/// The bytes read since this server was started.
#[derive(Default)]
pub(super) struct Reads {
    /// The counters of each mount at the last look.
    last: HashMap<MountId, ReadBytes>,
    total: ReadBytes,
    /// The oldest first: at most one a period.
    samples: VecDeque<(Instant, ReadBytes)>,
}

impl Reads {
    /// Looks at the counters of all `mounts`. Those of a mount that is seen first count from now
    /// on: they may be its last server's.
    pub(super) fn look(&mut self, mounts: impl Iterator<Item = (MountId, ReadBytes)>) {
        let mut last = HashMap::new();
        for (id, now) in mounts {
            let before = self.last.get(&id).copied().unwrap_or(now);
            self.total.hit += now.hit.saturating_sub(before.hit);
            self.total.miss += now.miss.saturating_sub(before.miss);
            self.total.fetched += now.fetched.saturating_sub(before.fetched);
            last.insert(id, now);
        }
        self.last = last;
    }

    /// Keeps the total of the last look as that of `now`.
    pub(super) fn sample(&mut self, now: Instant) {
        self.samples.push_back((now, self.total));
        // The oldest that is kept is as old as that, or older.
        while self.samples.get(1).is_some_and(|(at, _)| now.duration_since(*at) >= KEPT) {
            self.samples.pop_front();
        }
    }

    /// All that was read.
    pub(super) fn total(&self) -> ReadBytes {
        self.total
    }

    /// The bytes read in the time before `now`, to the precision of the samples.
    pub(super) fn within(&self, now: Instant, time: Duration) -> ReadBytes {
        // No sample is that old: this server is younger, and its reads count from its start.
        let old = |(at, _): &&(Instant, ReadBytes)| now.duration_since(*at) >= time;
        let before = self.samples.iter().rev().find(old).map_or(ReadBytes::default(), |it| it.1);
        ReadBytes {
            hit: self.total.hit - before.hit,
            miss: self.total.miss - before.miss,
            fetched: self.total.fetched - before.fetched,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::{PERIOD, Reads};
    use crate::{id::MountId, ipc::protocol::ReadBytes};

    fn bytes(hit: u64, miss: u64) -> ReadBytes {
        ReadBytes { hit, miss, fetched: miss }
    }

    #[test]
    fn totals_grow_while_mounts_come_and_go() {
        let [one, other] = [(); 2].map(|()| MountId::random().unwrap());
        let mut reads = Reads::default();
        // The count of an earlier server is not this one's.
        reads.look([(one, bytes(70, 7))].into_iter());
        assert_eq!(reads.total(), bytes(0, 0));
        reads.look([(one, bytes(75, 7)), (other, bytes(0, 0))].into_iter());
        reads.look([(other, bytes(10, 20))].into_iter());
        assert_eq!(reads.total(), bytes(15, 20));
        reads.look([].into_iter());
        assert_eq!(reads.total(), bytes(15, 20));
        assert_eq!(bytes(15, 20).hit_ratio().unwrap().round(), 43.0);
        assert_eq!(bytes(0, 0).hit_ratio(), None);
    }

    #[test]
    fn a_minute_and_an_hour_end_now() {
        let (id, start) = (MountId::random().unwrap(), Instant::now());
        let mut reads = Reads::default();
        reads.look([(id, bytes(0, 0))].into_iter());
        let minute = Duration::from_secs(60);
        // A byte a second for two hours.
        for step in 1..=720 {
            reads.look([(id, bytes(step * 10, step))].into_iter());
            reads.sample(start + PERIOD * step as u32);
            let now = start + PERIOD * step as u32;
            assert_eq!(reads.within(now, minute).hit, (step * 10).min(60));
            assert_eq!(reads.within(now, minute * 60).hit, (step * 10).min(3600));
        }
        assert_eq!(reads.total(), bytes(7200, 720));
        assert!(reads.samples.len() <= 362, "{}", reads.samples.len());
    }
}
