//! Reports in the layout that smartctl prints for drives of many makes, and their meaning.

#![allow(clippy::unwrap_used)]

use std::{fs, path::PathBuf};

use burgeon_disks::{
    CANDIDATES, DiskRecord, DriveReport, Figure, Observation, REPORT_MAX, Sectors, Trouble, Unit,
    UnitOrigin,
};
use serde_json::{Value, json};

fn fixture(name: &str) -> Vec<u8> {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/drives");
    fs::read(folder.join(format!("{name}.json"))).unwrap()
}

fn parsed(name: &str) -> DriveReport {
    DriveReport::parse(&fixture(name)).unwrap()
}

/// Counter and unit; bytes where the unit is certain.
type Meaning = Option<(u64, Unit)>;

fn meaning(figure: &Option<Figure>) -> Meaning {
    figure.as_ref().map(|figure| (figure.raw, figure.unit))
}

#[test]
fn drives_of_many_makes_are_read() {
    use Unit::{Name, Standard, Unknown};
    const NVME: Unit = Standard(512_000);
    const GIB: Unit = Name(1 << 30);
    let drives: &[(&str, Meaning, Meaning, Option<u64>)] = &[
        ("samsung-980-pro", Some((12_345_678, NVME)), Some((23_456_789, NVME)), Some(3)),
        ("wd-sn850x", Some((4_567_890, NVME)), Some((3_456_789, NVME)), Some(0)),
        ("intel-p4510", Some((987_654_321, NVME)), Some((1_234_567_890, NVME)), Some(12)),
        ("micron-7450", Some((55_555_555, NVME)), Some((66_666_666, NVME)), Some(1)),
        ("nvme-without-count", None, None, Some(0)),
        (
            "seagate-st1200mm",
            Some((123_456_789, Standard(1_000_000))),
            Some((65_432_100, Standard(1_000_000))),
            None,
        ),
        (
            "hgst-ss200",
            Some((777_000, Standard(1_000_000))),
            Some((888_001, Standard(1_000_000))),
            Some(2),
        ),
        ("samsung-860-evo", None, Some((54_321_098_765, Name(512))), Some(3)),
        (
            "samsung-pm883",
            Some((30_000_000_456, Standard(512))),
            Some((20_000_000_123, Standard(512))),
            Some(1),
        ),
        (
            "intel-s3510",
            Some((7_654_321, Name(32 << 20))),
            Some((1_234_567, Name(32 << 20))),
            Some(4),
        ),
        ("crucial-mx500", None, Some((40_404_040_404, Name(512))), Some(9)),
        ("kingston-a400", Some((6543, GIB)), Some((5432, GIB)), Some(12)),
        ("sandisk-ultra", Some((4321, GIB)), Some((3210, GIB)), None),
        ("micron-5300", None, Some((9_876_543_210, Name(512))), Some(1)),
        (
            "wd-red-wd40efrx",
            Some((88_888_888_888, Standard(512))),
            Some((33_333_333_333, Standard(512))),
            None,
        ),
        (
            "seagate-ironwolf",
            Some((99_999_999_999, Name(512))),
            Some((77_777_777_777, Name(512))),
            None,
        ),
        (
            "wd-4kn",
            Some((6_000_000_000, Standard(4096))),
            Some((5_000_000_000, Standard(4096))),
            None,
        ),
        // The default name of a drive that smartctl does not know tells no unit.
        ("unknown-dramless", Some((45_678, Unknown)), Some((34_567, Unknown)), None),
        ("unknown-attribute", Some((5432, Unknown)), Some((4321, Unknown)), None),
        ("gb-in-the-name", Some((1600, Unknown)), Some((1500, Unknown)), None),
        ("toshiba-two-parts", None, None, None),
        ("sleeping", None, None, None),
        ("denied", None, None, None),
    ];
    for (name, read, written, used) in drives {
        let report = parsed(name);
        assert_eq!(meaning(&report.read), *read, "{name}");
        assert_eq!(meaning(&report.written), *written, "{name}");
        assert_eq!(report.endurance_used_percent, *used, "{name}");
    }
    assert_eq!(parsed("samsung-860-evo").model, "Samsung SSD 860 EVO 500GB");
    assert_eq!(parsed("samsung-860-evo").power_on_hours, Some(8000));
    assert_eq!(parsed("sleeping").trouble, Some(Trouble::Standby));
    assert_eq!(parsed("denied").trouble, Some(Trouble::Denied));
}

/// The fixture after `moved` bytes, with counters of `unit`.
fn later(name: &str, unit: u64, moved: u64) -> DriveReport {
    let mut report: Value = serde_json::from_slice(&fixture(name)).unwrap();
    // A unit of a TiB would be more than its link could have moved in 3,000 hours.
    report["power_on_time"] = json!({ "hours": 10_000_000 });
    for entry in report["ata_smart_attributes"]["table"].as_array_mut().unwrap() {
        if [241, 242].contains(&entry["id"].as_u64().unwrap()) {
            let raw = entry["raw"]["value"].as_u64().unwrap();
            entry["raw"] = json!({ "value": raw + moved / unit });
        }
    }
    DriveReport::parse(&serde_json::to_vec(&report).unwrap()).unwrap()
}

#[test]
fn the_unit_of_each_candidate_is_measured_from_later_reports() {
    for name in ["unknown-dramless", "unknown-attribute", "gb-in-the-name"] {
        for unit in CANDIDATES {
            let mut record = DiskRecord::default();
            let mut found = Vec::new();
            for round in 0..7 {
                let moved = unit * 777 * round;
                let sectors = Sectors { read: moved / 512, written: moved / 512 };
                found.push(record.observe(&Observation {
                    boot: "a".to_owned(),
                    since_boot_ns: 1 + round,
                    time_s: 1 + round,
                    appearance: Some(1),
                    before: sectors,
                    after: sectors,
                    drive: Some(later(name, *unit, moved)),
                }));
            }
            assert!(found[..4].iter().all(|it| it.written.is_none()), "{name} {unit}");
            for total in [found[6].read, found[6].written] {
                let total = total.unwrap_or_else(|| panic!("{name} {unit}: {found:?}"));
                assert_eq!((total.unit_bytes, total.unit_source), (*unit, UnitOrigin::Measured));
            }
        }
    }
}

#[test]
fn hostile_reports_are_refused_or_without_figures() {
    let refused = |bytes: &[u8]| assert!(DriveReport::parse(bytes).is_err());
    refused(b"");
    refused(b"{}");
    refused(b"[]");
    refused(b"smartctl: no such option");
    refused(&b"[".repeat(100_000));
    refused(&[b"{\"smartctl\":{}, \"a\":", &b"[".repeat(5000)[..]].concat());
    refused(b"{\"smartctl\":{},\"x\":1e999}");
    refused(&[b"{\"smartctl\":{}}", &b" ".repeat(REPORT_MAX)[..]].concat());
    let huge = "123456789012345678901234567890";
    for value in [huge, "-1", "1.5", "\"7\"", "null", "[1]", "{}", "true", "1e300"] {
        let report = format!(
            r#"{{"smartctl":{{"messages":{value}}},"model_name":{value},"serial_number":{value},
            "power_on_time":{value},"logical_block_size":{value},
            "nvme_smart_health_information_log":{{"data_units_read":{value},"percentage_used":{value}}},
            "scsi_error_counter_log":{{"read":{{"gigabytes_processed":"{huge}.{huge}"}}}},
            "ata_device_statistics":{{"pages":[{{"table":[{{"name":"Logical Sectors Read",
            "flags":{{"valid":true}},"value":{value}}}]}}]}},
            "ata_smart_attributes":{{"table":[{value},{{"id":{value},"name":"Host_Writes_GiB"}},
            {{"id":241,"name":"Host_Writes_GiB","value":{value},"raw":{{"value":{value}}}}},
            {{"id":242,"name":{value},"raw":{value}}}]}}}}"#
        );
        let report = DriveReport::parse(report.as_bytes()).unwrap();
        assert_eq!((&report.read, &report.written), (&None, &None), "{value}");
        assert!(report.endurance_used_percent.is_none() && report.power_on_hours.is_none());
    }
    let long = "\u{1b}[31mé x ".repeat(1000);
    let report = json!({ "smartctl": {}, "model_name": long, "serial_number": long });
    let report = DriveReport::parse(&serde_json::to_vec(&report).unwrap()).unwrap();
    assert!(report.model.len() <= 64 && !report.model.contains('\u{1b}'), "{report:?}");
}
