//! Tests of records: bridges, windows and rates, against a model of a disk.

use proptest::prelude::*;

use super::{DiskRecord, Figures, Observation, Sectors, UnitOrigin};
use crate::report::{DriveReport, Figure, Unit};

const GIB: u64 = 1 << 30;

/// A disk whose kernel counters and drive counters can be moved.
struct Disk {
    seen: Observation,
    unit: u64,
    /// Bytes of all hosts.
    moved: u64,
    modulus: u64,
}

impl Disk {
    fn new(unit: u64, moved: u64) -> Self {
        let figure = |place: &str| Figure {
            counter: place.to_owned(),
            raw: 0,
            unit: Unit::Unknown,
            may_wrap: true,
            is_ata: true,
        };
        let drive = DriveReport {
            model: "M".to_owned(),
            serial: "S".to_owned(),
            read: Some(figure("attribute 242")),
            written: Some(figure("attribute 241")),
            ..DriveReport::default()
        };
        let seen = Observation {
            boot: "a".to_owned(),
            since_boot_ns: 1,
            time_s: 1_000_000,
            appearance: Some(1),
            before: Sectors::default(),
            after: Sectors::default(),
            drive: Some(drive),
        };
        Self { seen, unit, moved, modulus: u64::MAX }
    }

    /// This host moves `bytes` in each direction, others `foreign`.
    fn moves(&mut self, bytes: u64, foreign: u64) {
        let sectors = bytes / 512;
        self.seen.after.read += sectors;
        self.seen.after.written += sectors;
        self.seen.before = self.seen.after;
        self.moved += sectors * 512 + foreign;
        let raw = self.moved / self.unit % self.modulus;
        if let Some(drive) = &mut self.seen.drive {
            drive.read.iter_mut().chain(&mut drive.written).for_each(|figure| figure.raw = raw);
        }
    }

    fn look(&mut self, record: &mut DiskRecord) -> Figures {
        self.seen.since_boot_ns += 1;
        self.seen.time_s += 3600;
        record.observe(&self.seen)
    }

    fn states(&mut self, unit: Unit) {
        let drive = self.seen.drive.as_mut().unwrap();
        drive.read.iter_mut().chain(&mut drive.written).for_each(|figure| figure.unit = unit);
    }
}

#[test]
fn a_reading_that_no_drive_can_have_reached_is_passed_over() {
    let unit = 512_000;
    let mut disk = Disk::new(unit, 40 * GIB);
    disk.states(Unit::Standard(unit));
    let drive = disk.seen.drive.as_mut().unwrap();
    drive.power_on_hours = Some(20_000);
    drive.read.iter_mut().chain(&mut drive.written).for_each(|figure| figure.is_ata = false);
    let mut record = DiskRecord::default();
    disk.moves(GIB, 0);
    let before = disk.look(&mut record).written.unwrap();
    for raw in [5_000_000_000_000, u64::MAX] {
        disk.seen.drive.as_mut().unwrap().written.as_mut().unwrap().raw = raw;
        assert_eq!(disk.look(&mut record).written, None, "{raw}");
    }
    disk.moves(GIB, 0);
    let after = disk.look(&mut record).written.unwrap();
    assert_eq!((after.resets, after.bytes / unit), (0, disk.moved / unit));
    assert!(after.bytes > before.bytes);
}

#[test]
fn a_unit_is_measured_and_then_both_totals_are_known() {
    let mut disk = Disk::new(32 << 20, 77 * GIB);
    let mut record = DiskRecord::default();
    for round in 0..5 {
        disk.moves(8 * GIB, 0);
        let figures = disk.look(&mut record);
        assert_eq!(figures.written.is_some(), round == 4, "{round}");
    }
    disk.moves(8 * GIB, 0);
    let written = disk.look(&mut record).written.unwrap();
    assert_eq!((written.unit_source, written.unit_bytes), (UnitOrigin::Measured, 32 << 20));
    assert_eq!(written.bytes, 125 * GIB);
}

#[test]
fn writes_of_another_host_leave_the_unit_unknown() {
    let mut disk = Disk::new(32 << 20, 0);
    let mut record = DiskRecord::default();
    for round in 0..40 {
        disk.moves(8 * GIB, GIB + round * 300_000_000);
        assert_eq!(disk.look(&mut record).written, None, "{round}");
    }
}

#[test]
fn a_reboot_breaks_the_window() {
    let mut disk = Disk::new(32 << 20, 0);
    let mut record = DiskRecord::default();
    for round in 0..40 {
        disk.moves(8 * GIB, 0);
        assert_eq!(disk.look(&mut record).written, None, "{round}");
        disk.seen.boot = round.to_string();
        (disk.seen.before, disk.seen.after) = Default::default();
    }
}

#[test]
fn a_counter_of_32_bits_is_bridged_and_a_reset_is_noticed() {
    let mut disk = Disk::new(512, ((1 << 32) - 1000) * 512);
    disk.modulus = 1 << 32;
    disk.states(Unit::Name(512));
    let mut record = DiskRecord::default();
    disk.moves(0, 0);
    assert_eq!(disk.look(&mut record).written.unwrap().bytes, disk.moved);
    disk.moves(GIB, 0);
    let written = disk.look(&mut record).written.unwrap();
    assert_eq!((written.bytes, written.wraps, written.resets), (disk.moved, 1, 0));
    // A fall from the middle is no wrap.
    let before = written.bytes;
    let drive = disk.seen.drive.as_mut().unwrap();
    drive.written.as_mut().unwrap().raw = 7;
    let written = disk.look(&mut record).written.unwrap();
    assert_eq!((written.bytes, written.wraps, written.resets), (before + 7 * 512, 1, 1));
    // Zeros are no reading.
    disk.seen.drive.as_mut().unwrap().written.as_mut().unwrap().raw = 0;
    let same = disk.look(&mut record).written.unwrap();
    assert_eq!((same.bytes, same.resets), (written.bytes, 1));
}

#[test]
fn a_named_unit_that_the_kernel_disproves_is_unknown() {
    let mut disk = Disk::new(32 << 20, 0);
    disk.states(Unit::Name(512));
    let mut record = DiskRecord::default();
    disk.moves(100 * GIB, 0);
    let figures = disk.look(&mut record);
    assert_eq!((figures.read, figures.written), (None, None));
    disk.states(Unit::Name(32 << 20));
    assert_eq!(disk.look(&mut record).written.unwrap().bytes, 100 * GIB);
    // More than its link could have moved in its life.
    disk.states(Unit::Name(1 << 40));
    disk.seen.drive.as_mut().unwrap().power_on_hours = Some(10);
    assert_eq!(disk.look(&mut record).written, None);
}

/// The name says GiB, and the drive counts 32 MiB: no rate of its link disproves it.
#[test]
fn a_named_unit_that_measurements_disprove_is_unknown() {
    let mut disk = Disk::new(32 << 20, 0);
    disk.states(Unit::Name(GIB));
    let mut record = DiskRecord::default();
    let mut seen = Vec::new();
    for _ in 0..6 {
        disk.moves(8 * GIB, 0);
        seen.push(disk.look(&mut record).written.map(|written| written.unit_bytes));
    }
    assert_eq!(seen.last(), Some(&None), "{seen:?}");
    disk.states(Unit::Name(32 << 20));
    disk.moves(8 * GIB, 0);
    assert_eq!(disk.look(&mut record).written.unwrap().unit_source, UnitOrigin::Name);
}

#[test]
fn years_left_follow_from_endurance_and_rate() {
    let mut disk = Disk::new(512, 1000 * GIB);
    disk.states(Unit::Standard(512));
    disk.seen.drive.as_mut().unwrap().endurance_used_percent = Some(10);
    let mut record = DiskRecord::default();
    disk.moves(0, 0);
    assert_eq!(disk.look(&mut record).years_left, None);
    disk.moves(GIB, 0);
    let figures = disk.look(&mut record);
    let rate = figures.written_bytes_per_second.unwrap();
    assert!((rate - GIB as f64 / 3600.0).abs() < 1.0, "{rate}");
    // 9,009 GiB are left at a GiB an hour.
    let years = figures.years_left.unwrap();
    assert!((years - 9009.0 / 24.0 / 365.25).abs() < 0.01, "{years}");
    // The rate is that of the last two days.
    for _ in 0..100 {
        disk.moves(3 * GIB, 0);
        disk.look(&mut record);
    }
    disk.moves(3 * GIB, 0);
    let rate = disk.look(&mut record).written_bytes_per_second.unwrap();
    assert!((rate - 3.0 * GIB as f64 / 3600.0).abs() < 1.0, "{rate}");
    disk.seen.drive.as_mut().unwrap().endurance_used_percent = Some(0);
    assert_eq!(disk.look(&mut record).years_left, None);
    disk.seen.drive.as_mut().unwrap().endurance_used_percent = Some(130);
    assert_eq!(disk.look(&mut record).years_left, Some(0.0));
}

#[test]
fn another_drive_behind_the_same_adapter_has_its_own_counters() {
    let mut disk = Disk::new(512, 1000 * GIB);
    disk.states(Unit::Standard(512));
    let mut record = DiskRecord::default();
    disk.moves(0, 0);
    disk.look(&mut record);
    disk.seen.drive.as_mut().unwrap().serial = "T".to_owned();
    disk.moved = GIB;
    disk.moves(0, 0);
    let written = disk.look(&mut record).written.unwrap();
    assert_eq!((written.bytes, written.resets), (GIB, 0));
}

#[derive(Clone, Debug)]
enum Event {
    Moves(u64, u64),
    Reboot,
    Replug,
    Look,
    LookLate,
}

fn event() -> impl Strategy<Value = Event> {
    prop_oneof![
        (0..GIB, 0..GIB).prop_map(|(read, written)| Event::Moves(read, written)),
        Just(Event::Reboot),
        Just(Event::Replug),
        Just(Event::Look),
        Just(Event::LookLate),
    ]
}

proptest! {
    #[test]
    fn totals_never_go_down_and_lose_nothing_seen(
        events in prop::collection::vec(event(), 1..60),
        wraps: bool,
    ) {
        let mut disk = Disk::new(512, 0);
        let mut record = DiskRecord::default();
        if wraps {
            disk.seen.after = Sectors { read: super::WRAP - 9000, written: super::WRAP - 9000 };
            disk.look(&mut record);
        }
        // Bytes that a look has seen, and those since.
        let mut sum = disk.seen.after;
        let mut boots = 0;
        let mut late: Option<Observation> = None;
        for event in events {
            match event {
                Event::Moves(read, written) => {
                    let sectors = Sectors { read: read / 4096, written: written / 4096 };
                    let after = &mut disk.seen.after;
                    after.read += sectors.read;
                    after.written += sectors.written;
                    if wraps {
                        after.read %= super::WRAP;
                        after.written %= super::WRAP;
                    }
                    sum.read += sectors.read;
                    sum.written += sectors.written;
                }
                // All was seen before: what moved since is not lost.
                Event::Reboot | Event::Replug => {
                    disk.look(&mut record);
                    boots += 1;
                    match event {
                        Event::Reboot => disk.seen.boot = format!("boot {boots}"),
                        _ => disk.seen.appearance = Some(boots + 1),
                    }
                    disk.seen.after = Sectors::default();
                    late = None;
                }
                Event::Look => {
                    disk.look(&mut record);
                    late.get_or_insert(disk.seen.clone());
                    prop_assert_eq!(record.read_bytes, sum.read * 512);
                    prop_assert_eq!(record.written_bytes, sum.written * 512);
                }
                // A command that looked earlier comes later.
                Event::LookLate => {
                    let before = record.clone();
                    if let Some(mut late) = late.take() {
                        late.since_boot_ns -= 1;
                        record.observe(&late);
                        prop_assert_eq!(&before, &record);
                    }
                }
            }
        }
    }
}
