//! The stored record of one disk, and its update by an observation. Pure.
//!
//! ```text
//!   kernel   raw 100 … raw 700 │ boot │ raw 50          total 100 … 700 … 750
//!   drive    raw 2³²−5 … raw 3 (wrapped)                total 2³²−5 … 2³²+3
//! ```
//!
//! The kernel's counters begin at zero with each boot and each appearance of the device. The
//! kernel numbers appearances (`diskseq`), so a counter that is smaller within one has wrapped.
//!
//! Invariants: no total ever goes down; an observation that is older than the record changes
//! nothing. Held by `totals_never_go_down_and_lose_nothing_seen`.

use serde::{Deserialize, Serialize};

use crate::{
    report::{DriveReport, Figure, Unit},
    units::{Evidence, Window},
};

const SECTOR: u64 = 512;
const WRAP: u64 = 1 << 32;
/// A counter wraps from its last quarter into its first; other falls are resets.
const QUARTER: u64 = WRAP / 4;
/// Bytes an hour that no ATA link can pass: 600 MB/s.
const ATA_BYTES_PER_HOUR: u128 = 600_000_000 * 3600;
/// Bytes an hour that no link of another drive can pass: 16 GB/s, four lanes of PCIe 5.0.
const BYTES_PER_HOUR: u128 = 16_000_000_000 * 3600;
/// Bytes by which a drive may lag behind the kernel.
const LAG_BYTES: u64 = 1 << 30;
const DAY_S: u64 = 24 * 3600;
/// The shortest time of which a rate is taken.
const RATE_TIME_MIN_S: u64 = 3600;

/// Sectors that the kernel has read and written, of 512 bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct Sectors {
    /// Read.
    pub read: u64,
    /// Written.
    pub written: u64,
}

/// One look at a disk.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Observation {
    /// Identity of the running system's boot.
    pub boot: String,
    /// Time since that boot, in nanoseconds, before the counters were read.
    pub since_boot_ns: u64,
    /// Time of day, in seconds since 1970.
    pub time_s: u64,
    /// The kernel's number of this appearance of the device, if it has one that counts.
    pub appearance: Option<u64>,
    /// The kernel's counters before the drive was asked.
    pub before: Sectors,
    /// The same after it.
    pub after: Sectors,
    /// The drive's answer.
    pub drive: Option<DriveReport>,
}

/// The record of one disk.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct DiskRecord {
    /// Time of the first observation, in seconds since 1970.
    pub first_s: u64,
    /// Time of the last.
    pub last_s: u64,
    boot: String,
    since_boot_ns: u64,
    appearance: Option<u64>,
    raw: Sectors,
    /// Bytes read, as seen by this host.
    pub read_bytes: u64,
    /// Bytes written, as seen by this host.
    pub written_bytes: u64,
    /// The serial number that the drive has told: adapters may have one of their own.
    drive: String,
    read: Option<Counter>,
    written: Option<Counter>,
    day: Option<Mark>,
    day_before: Option<Mark>,
}

/// A counter of the drive.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
struct Counter {
    place: String,
    raw: u64,
    /// Ticks before the last wrap or reset.
    base: u64,
    wraps: u64,
    resets: u64,
    anchor: Option<Anchor>,
    evidence: Evidence,
}

/// The beginning of a window.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
struct Anchor {
    ticks: u64,
    bytes_before: u64,
    bytes_after: u64,
}

/// The drive's bytes written at a time.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
struct Mark {
    time_s: u64,
    bytes: u64,
}

/// The origin of a certain unit.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum UnitOrigin {
    /// A standard.
    Standard,
    /// The name of the attribute.
    Name,
    /// Measured against the kernel's counters.
    Measured,
}

/// A total of the drive.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
pub struct DriveTotal {
    /// Bytes of all hosts over the drive's life.
    pub bytes: u64,
    /// Bytes of one unit of its counter.
    pub unit_bytes: u64,
    /// The origin of the unit.
    pub unit_source: UnitOrigin,
    /// Times that the counter has passed 2³².
    pub wraps: u64,
    /// Times that the counter has begun anew.
    pub resets: u64,
}

/// The figures that a record and an observation give together.
#[derive(Clone, Copy, PartialEq, Debug, Default, Serialize)]
pub struct Figures {
    /// The drive's data read, if its unit is certain.
    pub read: Option<DriveTotal>,
    /// The drive's data written, if its unit is certain.
    pub written: Option<DriveTotal>,
    /// Endurance used, in percent.
    pub endurance_used_percent: Option<u64>,
    /// Bytes written a second by all hosts, over at least the last hour and at most about two
    /// days of observation.
    pub written_bytes_per_second: Option<f64>,
    /// Years until the endurance is used up, at that rate.
    pub years_left: Option<f64>,
}

impl DiskRecord {
    /// Continues the record. Call it with the observations of one disk only.
    pub fn observe(&mut self, seen: &Observation) -> Figures {
        let is_new = self.boot.is_empty();
        let same_boot = self.boot == seen.boot;
        if same_boot && seen.since_boot_ns < self.since_boot_ns {
            // Another command has looked later and was faster.
            return seen
                .drive
                .as_ref()
                .map_or(Figures::default(), |drive| self.figures(seen, drive));
        }
        if is_new {
            self.first_s = seen.time_s;
        }
        let unbroken = same_boot && self.continues(seen);
        let wraps = unbroken && self.appearance.is_some();
        self.read_bytes = advance(self.read_bytes, self.raw.read, seen.after.read, unbroken, wraps);
        self.written_bytes =
            advance(self.written_bytes, self.raw.written, seen.after.written, unbroken, wraps);
        self.boot.clone_from(&seen.boot);
        self.since_boot_ns = seen.since_boot_ns;
        self.appearance = seen.appearance;
        self.raw = seen.after;
        self.last_s = seen.time_s;
        let Some(drive) = seen.drive.as_ref().map(plausible) else {
            return Figures::default();
        };
        let drive = &drive;
        self.observe_drive(seen, drive, unbroken);
        let mut figures = self.figures(seen, drive);
        figures.written_bytes_per_second =
            figures.written.and_then(|total| self.rate(seen.time_s, total.bytes));
        figures.years_left = years_left(&figures);
        figures
    }

    /// True if the counters of `seen` are those of the record, further on.
    fn continues(&self, seen: &Observation) -> bool {
        let is_smaller = seen.after.read < self.raw.read || seen.after.written < self.raw.written;
        match self.appearance.is_some() && seen.appearance.is_some() {
            true if self.appearance != seen.appearance => false,
            true => {
                has_wrapped_or_grown(self.raw.read, seen.after.read)
                    && has_wrapped_or_grown(self.raw.written, seen.after.written)
            }
            false => !is_smaller,
        }
    }

    fn observe_drive(&mut self, seen: &Observation, drive: &DriveReport, unbroken: bool) {
        if drive.read.is_none() && drive.written.is_none() {
            return;
        }
        if self.drive != drive.serial {
            self.drive.clone_from(&drive.serial);
            (self.read, self.written, self.day, self.day_before) = (None, None, None, None);
        }
        let inside = |after: u64, before: u64| after.saturating_sub(before).saturating_mul(SECTOR);
        let read = inside(seen.after.read, seen.before.read);
        let written = inside(seen.after.written, seen.before.written);
        continue_counter(&mut self.read, drive.read.as_ref(), self.read_bytes, read, unbroken);
        continue_counter(
            &mut self.written,
            drive.written.as_ref(),
            self.written_bytes,
            written,
            unbroken,
        );
    }

    fn figures(&self, seen: &Observation, drive: &DriveReport) -> Figures {
        let total =
            |figure: Option<&Figure>, own: &Option<Counter>, other: &Option<Counter>, kernel| {
                let (figure, counter) = (figure?, own.as_ref()?);
                if counter.place != figure.counter {
                    return None;
                }
                let other = other.as_ref().map(|other| &other.evidence);
                let measured = || Some((counter.evidence.certain(other)?, UnitOrigin::Measured));
                let total = |(unit, source)| counter.total(unit, source);
                let is_possible = |total: &DriveTotal| {
                    !figure.is_ata || is_possible(total, kernel, drive.power_on_hours)
                };
                let stated = match figure.unit {
                    Unit::Standard(bytes) => Some((bytes, UnitOrigin::Standard)),
                    Unit::Name(bytes) => Some((bytes, UnitOrigin::Name)),
                    Unit::Unknown => None,
                };
                let unit = match (stated, measured()) {
                    // A name that complete measurements disprove: nobody knows.
                    (Some((name, UnitOrigin::Name)), Some((found, _))) if name != found => None,
                    (stated, measured) => stated.or(measured),
                };
                // A stated unit that is impossible does not become certain by a measurement: the
                // two contradict each other.
                unit.and_then(total).filter(is_possible)
            };
        let kernel = |sectors: u64| sectors.saturating_mul(SECTOR);
        let (read, written) = (kernel(seen.before.read), kernel(seen.before.written));
        Figures {
            read: total(drive.read.as_ref(), &self.read, &self.written, read),
            written: total(drive.written.as_ref(), &self.written, &self.read, written),
            endurance_used_percent: drive.endurance_used_percent,
            ..Figures::default()
        }
    }

    /// Bytes a second since the earlier of two marks, which are a day apart.
    fn rate(&mut self, time_s: u64, bytes: u64) -> Option<f64> {
        let is_past = |mark: &Mark| mark.time_s <= time_s && mark.bytes <= bytes;
        if !self.day.as_ref().is_some_and(is_past) {
            // The first reading, a clock that was set back, or another unit.
            (self.day, self.day_before) = (Some(Mark { time_s, bytes }), None);
            return None;
        }
        self.day_before = self.day_before.filter(is_past);
        let day = self.day?;
        let from = self.day_before.unwrap_or(day);
        if time_s - day.time_s >= DAY_S {
            self.day_before = Some(day);
            self.day = Some(Mark { time_s, bytes });
        }
        let seconds = time_s - from.time_s;
        (seconds >= RATE_TIME_MIN_S).then(|| (bytes - from.bytes) as f64 / seconds as f64)
    }
}

impl Counter {
    fn ticks(&self) -> u64 {
        self.base.saturating_add(self.raw)
    }

    fn total(&self, unit_bytes: u64, unit_source: UnitOrigin) -> Option<DriveTotal> {
        let bytes = self.ticks().checked_mul(unit_bytes)?;
        let (wraps, resets) = (self.wraps, self.resets);
        Some(DriveTotal { bytes, unit_bytes, unit_source, wraps, resets })
    }

    /// Takes the value `raw`.
    fn advance(&mut self, raw: u64, may_wrap: bool) {
        if raw < self.raw {
            let wrapped = may_wrap && (WRAP - QUARTER..WRAP).contains(&self.raw) && raw < QUARTER;
            if wrapped {
                self.wraps = self.wraps.saturating_add(1);
                self.base = self.base.saturating_add(WRAP);
            } else {
                self.resets = self.resets.saturating_add(1);
                self.base = self.base.saturating_add(self.raw);
                self.anchor = None;
            }
        }
        self.raw = raw;
    }

    /// Ends the window that has evidence, and begins the next one.
    fn measure(&mut self, now: Anchor) {
        let Some(anchor) = self.anchor else {
            self.anchor = Some(now);
            return;
        };
        let window = Window {
            ticks: now.ticks.saturating_sub(anchor.ticks),
            bytes: (
                now.bytes_before.saturating_sub(anchor.bytes_after),
                now.bytes_after.saturating_sub(anchor.bytes_before),
            ),
        };
        if self.evidence.add(window) {
            self.anchor = Some(now);
        }
    }
}

/// Takes a reading of the drive. `inside` are the bytes that moved while the drive was asked.
fn continue_counter(
    counter: &mut Option<Counter>,
    figure: Option<&Figure>,
    kernel_bytes: u64,
    inside: u64,
    unbroken: bool,
) {
    let Some(figure) = figure else { return };
    let known = counter.take().filter(|counter| counter.place == figure.counter);
    let is_known = known.is_some();
    let mut next = known.unwrap_or_else(|| Counter {
        place: figure.counter.clone(),
        raw: figure.raw,
        ..Counter::default()
    });
    // Some drives answer with zeros while they are busy.
    if figure.raw > 0 || next.raw == 0 {
        next.advance(figure.raw, figure.may_wrap);
        if !unbroken || !is_known {
            next.anchor = None;
        }
        let (bytes_after, ticks) = (kernel_bytes, next.ticks());
        next.measure(Anchor {
            ticks,
            bytes_before: bytes_after.saturating_sub(inside),
            bytes_after,
        });
    }
    *counter = Some(next);
}

/// The kernel's total after its raw counter went from `last` to `now`.
fn advance(total: u64, last: u64, now: u64, unbroken: bool, may_wrap: bool) -> u64 {
    let sectors = match unbroken {
        true if now >= last => now - last,
        true if may_wrap => now.saturating_add(WRAP).saturating_sub(last),
        _ => now,
    };
    total.saturating_add(sectors.saturating_mul(SECTOR))
}

/// False if the counter has begun anew. Counters of 32-bit kernels wrap.
fn has_wrapped_or_grown(last: u64, now: u64) -> bool {
    now >= last || (WRAP - QUARTER..WRAP).contains(&last) && now < QUARTER
}

/// False if the drive would have moved more than its link can since it was made, or less than the
/// kernel has since it found the drive: the unit is wrong.
fn is_possible(total: &DriveTotal, kernel_bytes: u64, power_on_hours: Option<u64>) -> bool {
    let slack = total.unit_bytes.saturating_mul(2).saturating_add(LAG_BYTES);
    let enough = total.bytes.saturating_add(slack) >= kernel_bytes / 20 * 19;
    let most = |hours: u64| (u128::from(hours) + 1) * ATA_BYTES_PER_HOUR;
    enough && power_on_hours.is_none_or(|hours| u128::from(total.bytes) <= most(hours))
}

/// The report without readings that no drive can have reached in its hours: one of them would spoil
/// the total for good, because a total never goes down. Where the kernel's bytes can disprove the
/// unit, they decide later.
fn plausible(drive: &DriveReport) -> DriveReport {
    let most = drive.power_on_hours.map(|hours| (u128::from(hours) + 1) * BYTES_PER_HOUR);
    let is_plausible = |figure: &Figure| match figure.unit {
        Unit::Standard(unit) | Unit::Name(unit) if !figure.is_ata => {
            let bytes = u128::from(figure.raw) * u128::from(unit);
            u64::try_from(bytes).is_ok() && most.is_none_or(|most| bytes <= most)
        }
        _ => true,
    };
    let mut drive = drive.clone();
    drive.read = drive.read.filter(is_plausible);
    drive.written = drive.written.filter(is_plausible);
    drive
}

/// The rest of the endurance over its use: so much endurance for all bytes so far, so many bytes
/// a second.
fn years_left(figures: &Figures) -> Option<f64> {
    const YEAR_S: f64 = 365.25 * 24.0 * 3600.0;
    let used = figures.endurance_used_percent.filter(|used| *used > 0)? as f64;
    if used >= 100.0 {
        return Some(0.0);
    }
    let rate = figures.written_bytes_per_second.filter(|rate| *rate > 0.0)?;
    let bytes_left = figures.written?.bytes as f64 / used * (100.0 - used);
    Some(bytes_left / rate / YEAR_S)
}

#[cfg(test)]
#[path = "record_tests.rs"]
mod tests;
