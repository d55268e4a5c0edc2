//! Decides when to look at a sprout, and when to grow it.
//!
//! ```text
//!   is any memory on the host dirty? ──no──► look at each sprout once a second
//!     └─yes─► usage of each sprout ──► it changes: again in 25 ms ──► too little headroom: grow
//! ```
//!
//! Writes stay in memory before they reach a sprout, and a quarter of a GiB accumulates within a
//! tenth of a second: with one look per second, 5 of 12 bursts into an idle mount met ENOSPC. The
//! amount that the whole host has dirtied is one number for all mounts, so it is cheap to read
//! often.

use std::{
    collections::VecDeque,
    fs,
    path::Path,
    time::{Duration, Instant},
};

use crate::id::Fsid;

/// Interval of looking at a sprout that is being written to.
const INTERVAL_MOVING: Duration = Duration::from_millis(25);

/// Interval of looking at an idle sprout.
const INTERVAL_IDLE: Duration = Duration::from_secs(1);

/// Interval of reading the host's dirtied memory: one file of procfs.
pub(super) const INTERVAL_HOST: Duration = Duration::from_millis(50);

/// Bytes that the host may dirty before sprouts are looked at: a small part of each one's headroom.
const DIRTIED_MAX: u64 = 8 << 20;

/// A sprout counts as written to after this many bytes; an occasional line of a log does not count.
const MOVED_MIN: u64 = 4 << 20;

/// A sprout counts as being written to for this long after it was created or last written to.
const MOVING: Duration = Duration::from_secs(3);

/// Minimum headroom for btrfs, in bytes; half of a small sprout that has never been written to.
const HEADROOM_MIN: u64 = 256 << 20;

/// The bytes taken within this time are added to the headroom: a step takes well below it.
const WINDOW: Duration = Duration::from_secs(1);

/// Usage of a sprout.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Usage {
    /// Bytes of block groups, including the seed's.
    pub(super) allocated: u64,
    /// Bytes of data that lie in them, or are still in memory with a place there.
    pub(super) data: u64,
}

impl Usage {
    /// Reads the usage of a mounted btrfs.
    pub(super) fn of(fsid: Fsid) -> Option<Self> {
        let folder = Path::new("/sys/fs/btrfs").join(fsid.to_string()).join("allocation");
        let number =
            |name: &str| fs::read_to_string(folder.join(name)).ok()?.trim().parse::<u64>().ok();
        let allocated = ["data/disk_total", "metadata/disk_total", "system/disk_total"];
        let data = ["data/bytes_used", "data/bytes_may_use"];
        let sum = |names: &[&str]| names.iter().map(|name| number(name)).sum::<Option<u64>>();
        Some(Self { allocated: sum(&allocated)?, data: sum(&data)? })
    }
}

/// Tracks the memory that the host dirties, to leave sprouts alone while that is little.
#[derive(Default)]
pub(super) struct Host {
    /// Bytes dirtied since the host's start, as of the last look at the sprouts.
    last: Option<u64>,
}

impl Host {
    /// True if the host has written enough, anywhere, to look at the sprouts.
    pub(super) fn has_moved(&mut self) -> bool {
        self.see(dirtied())
    }

    fn see(&mut self, now: Option<u64>) -> bool {
        let since = now.zip(self.last).map(|(now, last)| now.wrapping_sub(last));
        // An unknown amount counts as enough.
        let moved = since.is_none_or(|bytes| bytes >= DIRTIED_MAX);
        if moved {
            self.last = now;
        }
        moved
    }
}

fn dirtied() -> Option<u64> {
    let text = fs::read_to_string("/proc/vmstat").ok()?;
    let pages = text.lines().find_map(|line| line.strip_prefix("nr_dirtied "))?;
    Some(pages.parse::<u64>().ok()?.wrapping_mul(rustix::param::page_size() as u64))
}

/// Recent usage of a sprout.
pub(super) struct Watched {
    /// Times of looks within [`WINDOW`], and the usage at each.
    marks: VecDeque<(Instant, Usage)>,
    /// Time of the last change, or of creation, and the usage then.
    moved: (Instant, Option<Usage>),
    /// It has changed since the first look.
    is_written: bool,
}

impl Watched {
    pub(super) fn new(now: Instant) -> Self {
        Self { marks: VecDeque::new(), moved: (now, None), is_written: false }
    }

    /// The time for which it may be left alone while the host is idle.
    pub(super) fn pause(&self, now: Instant) -> Duration {
        match now.duration_since(self.moved.0) < MOVING {
            true => INTERVAL_MOVING,
            false => INTERVAL_IDLE,
        }
    }

    /// True if it is time to look again.
    pub(super) fn is_due(&self, now: Instant) -> bool {
        // A thread may wake a little early.
        let pause = self.pause(now) - INTERVAL_MOVING / 5;
        self.marks.back().is_none_or(|(at, _)| now.duration_since(*at) >= pause)
    }

    /// Notes the current usage; returns the bytes taken within [`WINDOW`].
    pub(super) fn see(&mut self, now: Instant, usage: Usage) -> u64 {
        match self.moved.1 {
            None => self.moved.1 = Some(usage),
            Some(before) if differs(before, usage) => {
                (self.moved, self.is_written) = ((now, Some(usage)), true);
            }
            Some(_) => {}
        }
        self.marks.push_back((now, usage));
        while self.marks.len() > 1 && now.duration_since(self.marks[1].0) >= WINDOW {
            self.marks.pop_front();
        }
        let first = self.marks[0].1;
        let allocated = usage.allocated.saturating_sub(first.allocated);
        allocated.max(usage.data.saturating_sub(first.data))
    }

    /// The size to grow to, if `used` bytes of block groups leave too little of `reserved`, given
    /// `taken` bytes taken lately.
    pub(super) fn next_size(
        &self,
        reserved: u64,
        used: u64,
        taken: u64,
        limit: u64,
    ) -> Option<u64> {
        let least = match self.is_written {
            true => HEADROOM_MIN,
            false => HEADROOM_MIN.min(reserved / 2),
        };
        let headroom = taken.max(least);
        if reserved >= limit || reserved.saturating_sub(used) >= headroom {
            return None;
        }
        Some((2 * reserved).max(used.saturating_add(headroom)).min(limit))
    }
}

fn differs(a: Usage, b: Usage) -> bool {
    a.allocated != b.allocated || a.data.abs_diff(b.data) >= MOVED_MIN
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::{DIRTIED_MAX, Host, INTERVAL_IDLE, INTERVAL_MOVING, Usage, Watched, dirtied};

    const MIB: u64 = 1 << 20;

    fn usage(allocated: u64, data: u64) -> Usage {
        Usage { allocated: allocated * MIB, data: data * MIB }
    }

    #[test]
    fn a_sprout_doubles_before_its_headroom_is_used() {
        let (begun, limit) = (Instant::now(), 10_000 * MIB);
        let mut watched = Watched::new(begun);
        watched.see(begun, usage(70, 0));
        // A new sprout: the space that btrfs itself takes does not make it grow.
        for reserved in [256, 460, 1024] {
            assert_eq!(watched.next_size(reserved * MIB, 110 * MIB, 0, limit), None);
        }
        assert_eq!(watched.next_size(256 * MIB, 129 * MIB, 0, limit), Some(512 * MIB));
        watched.see(begun, usage(70, 20));
        assert_eq!(watched.next_size(256 * MIB, 70 * MIB, 0, limit), Some(512 * MIB));
        assert_eq!(watched.next_size(1024 * MIB, 768 * MIB, 0, limit), None);
        assert_eq!(watched.next_size(1024 * MIB, 769 * MIB, 0, limit), Some(2048 * MIB));
        // The headroom covers one more second at the same rate, however high.
        assert_eq!(watched.next_size(2048 * MIB, 1000 * MIB, 1500 * MIB, limit), Some(4096 * MIB));
        assert_eq!(watched.next_size(1024 * MIB, 1000 * MIB, 3000 * MIB, limit), Some(4000 * MIB));
        assert_eq!(watched.next_size(8192 * MIB, 8000 * MIB, 0, limit), Some(limit));
        assert_eq!(watched.next_size(limit, limit, MIB, limit), None);
    }

    #[test]
    fn taken_bytes_count_for_a_second_and_movement_for_three() {
        let begun = Instant::now();
        let at = |ms| begun + Duration::from_millis(ms);
        let mut watched = Watched::new(begun);
        assert_eq!(watched.pause(begun), INTERVAL_MOVING);
        assert_eq!(watched.see(at(0), usage(100, 0)), 0);
        assert_eq!(watched.see(at(500), usage(300, 0)), 200 * MIB);
        assert_eq!(watched.see(at(900), usage(300, 250)), 250 * MIB);
        // Counts from the last look before that second: rather too much than too little.
        assert_eq!(watched.see(at(1600), usage(350, 250)), 250 * MIB);
        // A line of a log.
        assert_eq!(watched.see(at(4000), usage(350, 252)), 2 * MIB);
        assert_eq!(watched.pause(at(4000)), INTERVAL_MOVING);
        assert_eq!(watched.pause(at(4600)), INTERVAL_IDLE);
        assert!(!watched.is_due(at(4800)) && watched.is_due(at(5000)));
        assert_eq!(watched.marks.len(), 2);
    }

    #[test]
    fn sprouts_of_an_idle_host_are_not_looked_at() {
        let mut host = Host::default();
        assert!(host.see(Some(0)) && !host.see(Some(DIRTIED_MAX - 1)));
        assert!(host.see(Some(DIRTIED_MAX)) && !host.see(Some(DIRTIED_MAX + 1)));
        assert!(host.see(None) && host.see(Some(0)));
        assert!(dirtied().is_some_and(|bytes| bytes > 0));
    }
}
