//! Reports in the layout that smartctl prints for drives of many makes, and their meaning.

#![allow(clippy::unwrap_used)]

use std::{fs, path::PathBuf};

use burgeon_disks::{
    CANDIDATES, DiskRecord, DriveReport, Figure, Figures, Observation, REPORT_MAX, Sectors,
    Trouble, Unit, UnitOrigin,
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

/// Reports of real drives, without serial numbers and without the parts that are not read here, as
/// users have sent them to prometheus-community/smartctl_exporter (`testdata`). All were made by
/// hosts with other work, so each number is one that a drive has counted.
const RECORDED: &[(&str, Meaning, Meaning, Option<u64>)] = {
    use Unit::{Name, Standard, Unknown};
    const NVME: Unit = Standard(512_000);
    const MIB_32: Unit = Name(32 << 20);
    const GIB: Unit = Name(1 << 30);
    const LBA: Unit = Name(512);
    const SCSI: Unit = Standard(1_000_000);
    &[
        ("ct250p2ssd8", Some((4_932_757, NVME)), Some((1_002_900, NVME)), Some(0)),
        ("hgst-hus726020ale614", None, None, None),
        ("hitachi-h109060sesun600g", Some((162_438_759, SCSI)), Some((127_551_260, SCSI)), None),
        ("intel-mempek1w032ga", Some((3_539_278, NVME)), Some((4_744_607, NVME)), Some(1)),
        ("intel-ssdpe2kx080t8", Some((20_126_802, NVME)), Some((184_919_244, NVME)), Some(0)),
        ("intel-ssdsc2bb480g4", Some((4_566_495, MIB_32)), Some((1_209_471, MIB_32)), Some(5)),
        ("intel-ssdsc2kb960g8", Some((47_096, MIB_32)), Some((215_581, MIB_32)), Some(0)),
        ("kingston-sa400m8120g", Some((937, GIB)), Some((398, GIB)), Some(2)),
        ("kingston-skc400s371t", Some((1_837_742, GIB)), Some((391_741, GIB)), None),
        ("kxg60znv512g-toshiba", Some((15_794_760, NVME)), Some((3_861_802, NVME)), Some(1)),
        ("micron-5210-mtfddak960qde", None, Some((272_291_616, LBA)), Some(0)),
        ("micron-5300-mtfddak1t9tds", None, Some((130_006_927_240, LBA)), Some(0)),
        ("micron-7450-mtfdkcb3t8tfr", Some((2_430_296, NVME)), Some((27_054_698, NVME)), Some(0)),
        (
            "samsung-mz7l3240hchq-00a07",
            Some((28_190_000_396, LBA)),
            Some((652_566_252, LBA)),
            Some(2),
        ),
        (
            "samsung-mz7l3480hchq-00a07",
            Some((50_913_750, Unknown)),
            Some((1_304_884_573, Unknown)),
            Some(2),
        ),
        ("samsung-mz7wd240hafv-00003", None, Some((216_456_537_880, LBA)), Some(9)),
        (
            "samsung-ssd-970-evo-plus-250gb",
            Some((2_025_034, NVME)),
            Some((1_969_459, NVME)),
            Some(0),
        ),
        ("seagate-st373453lc", Some((11_523_849, SCSI)), Some((11_151_772, SCSI)), None),
        ("ssdsckjb240g7r", Some((573_613, Unknown)), Some((129_493, MIB_32)), Some(0)),
        ("st10000nm0016-1tt101", Some((100_392_633_118, LBA)), Some((336_030_386_452, LBA)), None),
        ("st16000nm001g-2kk103", Some((150_964_211_289, LBA)), Some((385_165_652_077, LBA)), None),
        ("st3500418as", Some((910_143_200, LBA)), Some((3_022_432_698, LBA)), None),
        (
            "st8000nm017b-2tj103",
            Some((60_841_830_299_295, Unknown)),
            Some((401_457_943_888, Unknown)),
            None,
        ),
        ("toshiba-mg09aca18te", Some((1_843_674_429, LBA)), Some((368_942_236_632, LBA)), None),
        ("ts32gmts400", Some((72_455, MIB_32)), Some((30_245, MIB_32)), Some(0)),
        ("wdc-wd20efrx-68euzn0", None, None, None),
        ("wuh721818ale6l4", Some((1_738_553_973, LBA)), Some((54_506_376_968, LBA)), None),
    ]
};

#[test]
fn recorded_reports_are_read() {
    for (name, read, written, used) in RECORDED {
        let report = parsed(&format!("recorded/{name}"));
        assert_eq!(meaning(&report.read), *read, "{name}");
        assert_eq!(meaning(&report.written), *written, "{name}");
        assert_eq!(report.endurance_used_percent, *used, "{name}");
        assert!(!report.model.is_empty() && report.power_on_hours > Some(0), "{report:?}");
    }
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/drives/recorded");
    assert_eq!(fs::read_dir(folder).unwrap().count(), RECORDED.len());
}

/// The unit of a drive's name is believed until its counters go at another rate; what is said to be
/// certain is never wrong for longer than the windows that show it.
#[test]
fn no_recorded_drive_is_certain_of_a_wrong_unit() {
    let is_ata = |name: &str| String::from_utf8(fixture(name)).unwrap().contains("ata_smart");
    let mut drives = 0;
    for (name, read, written, _) in RECORDED {
        let name = format!("recorded/{name}");
        if !is_ata(&name) || (read.is_none() && written.is_none()) {
            continue;
        }
        drives += 1;
        for unit in CANDIDATES {
            let last = rounds(&name, *unit, 12).pop().unwrap();
            for found in [last.read, last.written].into_iter().flatten() {
                assert_eq!(found.unit_bytes, *unit, "{name}");
            }
        }
    }
    assert!(drives >= 15, "{drives}");
}

/// The fixture after `moved` bytes, with counters of `unit`.
fn later(name: &str, unit: u64, moved: u64) -> DriveReport {
    let mut report: Value = serde_json::from_slice(&fixture(name)).unwrap();
    // A unit of a TiB would be more than its link could have moved in 3,000 hours.
    report["power_on_time"] = json!({ "hours": 10_000_000 });
    for entry in report["ata_smart_attributes"]["table"].as_array_mut().unwrap() {
        if [225, 241, 242, 246].contains(&entry["id"].as_u64().unwrap()) {
            let raw = entry["raw"]["value"].as_u64().unwrap();
            entry["raw"] = json!({ "value": raw + moved / unit });
        }
    }
    DriveReport::parse(&serde_json::to_vec(&report).unwrap()).unwrap()
}

/// The figures of each of some rounds, between which the kernel moves the same number of bytes.
fn rounds(name: &str, unit: u64, rounds: u64) -> Vec<Figures> {
    let mut record = DiskRecord::default();
    let observed = |round| {
        let moved = unit * 777 * round;
        let sectors = Sectors { read: moved / 512, written: moved / 512 };
        record.observe(&Observation {
            boot: "a".to_owned(),
            since_boot_ns: 1 + round,
            time_s: 1 + round,
            appearance: Some(1),
            before: sectors,
            after: sectors,
            drive: Some(later(name, unit, moved)),
        })
    };
    (0..rounds).map(observed).collect()
}

#[test]
fn the_unit_of_each_candidate_is_measured_from_later_reports() {
    for name in ["unknown-dramless", "unknown-attribute", "gb-in-the-name"] {
        for unit in CANDIDATES {
            let found: Vec<_> = rounds(name, *unit, 7);
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
