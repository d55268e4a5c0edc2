//! The unit of a drive's counter, measured: the bytes that the kernel has moved over the ticks
//! that the counter has gone.
//!
//! ```text
//!   counter    ├─ anchor ────── ticks ──────────┤ now
//!   kernel   ├──┤ before, after            ├──┤ before, after
//!               └── bytes_min ─────────────┘
//!            └────── bytes_max ───────────────┘
//! ```
//!
//! A window gives an interval of possible units. It is evidence for a candidate if that is the
//! only one in the interval. A unit is certain after several such windows in a row, and only if
//! all of them together and the counter of the other direction say the same.
//!
//! Invariant: writes that the kernel has not seen make windows match no candidate, or different
//! ones; they never make a wrong unit certain. Held by `foreign_writes_never_give_a_unit`.

use serde::{Deserialize, Serialize};

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;
const MB: u64 = 1_000_000;
const GB: u64 = 1_000_000_000;

/// Units that vendors use, or might: bytes, ascending, neighbours at least 1.4 % apart.
pub const CANDIDATES: &[u64] = &[
    512,
    520,
    528,
    1000,
    KIB,
    2 * KIB,
    4 * KIB,
    4160,
    4224,
    8 * KIB,
    16 * KIB,
    32 * KIB,
    64 * KIB,
    128 * KIB,
    256 * KIB,
    512_000,
    512 * KIB,
    MB,
    MIB,
    2 * MB,
    2 * MIB,
    4 * MB,
    4_096_000,
    4 * MIB,
    5 * MB,
    8 * MB,
    8 * MIB,
    10 * MB,
    10 * MIB,
    16 * MB,
    16 * MIB,
    32 * MB,
    32_768_000,
    32 * MIB,
    64 * MB,
    65_536_000,
    64 * MIB,
    100 * MB,
    100 * MIB,
    128 * MB,
    128 * MIB,
    256 * MB,
    256 * MIB,
    512 * MB,
    512 * MIB,
    GB,
    GIB,
    2 * GB,
    2 * GIB,
    4 * GB,
    4 * GIB,
    8 * GB,
    8 * GIB,
    10 * GB,
    10 * GIB,
    16 * GB,
    16 * GIB,
    32 * GB,
    32 * GIB,
    64 * GB,
    64 * GIB,
    100 * GB,
    100 * GIB,
    128 * GB,
    128 * GIB,
    256 * GB,
    256 * GIB,
    1000 * GB,
    1024 * GIB,
];

/// Share by which a counter may be off besides its last tick.
const TOLERANCE: f64 = 0.005;
/// Ticks of a window below which a tick more or less could hide a neighbour.
const TICKS_MIN: u64 = 128;
/// The widest interval that is evidence, as high over low.
const SPREAD_MAX: f64 = 1.03;
/// Windows in a row that make a unit certain, if both directions have them.
const WINDOWS_BOTH: u32 = 4;
/// The same if only one direction has moved.
const WINDOWS_ALONE: u32 = 8;

/// The movement of a counter and of the kernel's bytes between two readings.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Window {
    /// Movement of the drive's counter.
    pub ticks: u64,
    /// Bytes that the kernel has moved at least and at most between the counter's two readings.
    pub bytes: (u64, u64),
}

/// The result of one window.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum UnitMatch {
    /// Too little has moved, or too much moved while the counters were read.
    NeedsMore,
    /// This candidate is the only one possible.
    Matches(u64),
    /// No candidate is possible: others use the disk, or the counter counts something else.
    MatchesNone,
}

impl Window {
    /// The candidate that this window allows.
    pub fn verdict(&self) -> UnitMatch {
        let (min, max) = (self.bytes.0 as f64, self.bytes.1 as f64);
        if self.ticks < TICKS_MIN {
            return UnitMatch::NeedsMore;
        }
        let low = min / (self.ticks as f64 + 1.0) * (1.0 - TOLERANCE);
        let high = max / (self.ticks as f64 - 1.0) * (1.0 + TOLERANCE);
        if high > low * SPREAD_MAX && high > 1.0 {
            return UnitMatch::NeedsMore;
        }
        let mut possible = CANDIDATES.iter().filter(|unit| (low..=high).contains(&(**unit as f64)));
        match (possible.next(), possible.next()) {
            (None, _) => UnitMatch::MatchesNone,
            (Some(unit), None) => UnitMatch::Matches(*unit),
            (Some(_), Some(_)) => UnitMatch::NeedsMore,
        }
    }

    /// True if the drive counted less than the kernel alone has moved: `unit` is too small, as
    /// other users of the disk can only add to its counter.
    fn shows_too_small(&self, unit: u64) -> bool {
        let most = (self.ticks as f64 + 1.0) * unit as f64 * (1.0 + TOLERANCE);
        self.ticks >= TICKS_MIN && most < self.bytes.0 as f64
    }
}

/// Consecutive windows of one counter that agree.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct Evidence {
    candidate: u64,
    windows: u32,
    ticks: u64,
    bytes_min: u64,
    bytes_max: u64,
}

impl Evidence {
    /// Takes a window into account. False if it needs more before it says something.
    pub fn add(&mut self, window: Window) -> bool {
        let verdict = window.verdict();
        if verdict == UnitMatch::NeedsMore {
            return false;
        }
        if self.windows >= WINDOWS_BOTH && verdict != UnitMatch::Matches(self.candidate) {
            // Writes of others make later windows differ; they do not change the unit.
            if window.shows_too_small(self.candidate) {
                *self = Self::default();
            }
            return true;
        }
        match verdict {
            UnitMatch::Matches(unit) if unit == self.candidate => {
                self.windows = self.windows.saturating_add(1);
                self.ticks = self.ticks.saturating_add(window.ticks);
                self.bytes_min = self.bytes_min.saturating_add(window.bytes.0);
                self.bytes_max = self.bytes_max.saturating_add(window.bytes.1);
                if self.all().verdict() != verdict {
                    *self = Self::default();
                }
            }
            UnitMatch::Matches(unit) => {
                *self = Self {
                    candidate: unit,
                    windows: 1,
                    ticks: window.ticks,
                    bytes_min: window.bytes.0,
                    bytes_max: window.bytes.1,
                };
            }
            _ => *self = Self::default(),
        }
        true
    }

    fn all(&self) -> Window {
        Window { ticks: self.ticks, bytes: (self.bytes_min, self.bytes_max) }
    }

    /// The unit, if this evidence and that of the `other` direction make it certain.
    pub fn certain(&self, other: Option<&Evidence>) -> Option<u64> {
        let other = other.filter(|other| other.windows > 0);
        let enough = match other {
            Some(other) if other.candidate != self.candidate => return None,
            Some(other) if other.windows >= WINDOWS_BOTH => WINDOWS_BOTH,
            _ => WINDOWS_ALONE,
        };
        // Evidence of a damaged record names any number.
        let known = CANDIDATES.contains(&self.candidate);
        (known && self.windows >= enough).then_some(self.candidate)
    }
}

#[cfg(test)]
mod tests {
    use super::{CANDIDATES, Evidence, UnitMatch, Window};

    /// Deterministic numbers.
    struct Numbers(u64);

    impl Numbers {
        fn below(&mut self, end: u64) -> u64 {
            self.0 ^= self.0 << 13;
            self.0 ^= self.0 >> 7;
            self.0 ^= self.0 << 17;
            self.0 % end
        }
    }

    /// Counters of the kernel and the drive after the kernel moved `bytes` and others `foreign`.
    fn window(unit: u64, bytes: u64, foreign: u64) -> Window {
        let ticks = (u128::from(bytes) + u128::from(foreign)) / u128::from(unit);
        Window { ticks: ticks as u64, bytes: (bytes, bytes) }
    }

    #[test]
    fn candidates_are_many_sorted_and_apart() {
        assert!(CANDIDATES.len() >= 64, "{}", CANDIDATES.len());
        for pair in CANDIDATES.windows(2) {
            assert!(pair[1] as f64 / pair[0] as f64 >= 1.014, "{pair:?}");
        }
    }

    #[test]
    fn each_candidate_is_found_and_no_other() {
        let mut numbers = Numbers(1);
        for unit in CANDIDATES {
            let (mut read, mut written) = (Evidence::default(), Evidence::default());
            for round in 0..8 {
                let bytes = unit * (400 + numbers.below(4000)) + numbers.below(*unit);
                let before = written.certain(Some(&read));
                assert_eq!(before, (round >= 4).then_some(*unit), "{unit} {round}");
                assert!(written.add(window(*unit, bytes, 0)) && read.add(window(*unit, bytes, 0)));
            }
            assert_eq!(written.certain(None), Some(*unit));
        }
    }

    #[test]
    fn too_little_movement_is_no_evidence() {
        let verdict = |ticks, low, high| Window { ticks, bytes: (low, high) }.verdict();
        assert_eq!(verdict(127, 127 << 20, 127 << 20), UnitMatch::NeedsMore);
        assert_eq!(verdict(256, 256 << 20, 256 << 20), UnitMatch::Matches(1 << 20));
        // The kernel moved as much while the drive was asked as before.
        assert_eq!(verdict(256, 256 << 20, 512 << 20), UnitMatch::NeedsMore);
        assert_eq!(verdict(1000, 0, 0), UnitMatch::MatchesNone);
        assert_eq!(verdict(u64::MAX, u64::MAX, u64::MAX), UnitMatch::MatchesNone);
    }

    #[test]
    fn foreign_writes_never_give_a_unit() {
        let mut numbers = Numbers(7);
        for unit in CANDIDATES {
            for _ in 0..50 {
                let (mut read, mut written) = (Evidence::default(), Evidence::default());
                for _ in 0..24 {
                    let bytes = unit * (300 + numbers.below(3000));
                    for side in [&mut read, &mut written] {
                        let foreign = bytes / 100 * (3 + numbers.below(400));
                        side.add(window(*unit, bytes, foreign));
                    }
                    let (one, other) = (read.certain(Some(&written)), written.certain(Some(&read)));
                    assert!(one.or(other).is_none_or(|found| found == *unit), "{unit} {one:?}");
                }
            }
        }
    }

    #[test]
    fn a_unit_stays_certain_with_foreign_writes_and_goes_when_it_is_too_small() {
        let mut evidence = Evidence::default();
        (0..8).for_each(|_| assert!(evidence.add(window(1 << 20, 1 << 30, 0))));
        evidence.add(window(1 << 20, 1 << 30, 1 << 30));
        assert_eq!(evidence.certain(None), Some(1 << 20));
        evidence.add(window(1 << 21, 1 << 30, 0));
        assert_eq!(evidence.certain(None), None);
    }

    #[test]
    fn directions_that_differ_are_both_unknown() {
        let (mut read, mut written) = (Evidence::default(), Evidence::default());
        for _ in 0..9 {
            read.add(window(1 << 20, 1 << 30, 0));
            written.add(window(1 << 21, 1 << 31, 0));
        }
        assert_eq!((read.certain(Some(&written)), written.certain(Some(&read))), (None, None));
    }
}
