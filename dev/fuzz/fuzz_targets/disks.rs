//! Outputs of smartctl and the state file of disks: any bytes are refused, or are a report whose
//! texts are short, or a state that encodes to itself; continuing a record with any report neither
//! panics nor lets a total go down.

#![no_main]

use burgeon_disks::{DiskRecord, DiskRecords, DriveReport, Observation, Sectors};
use burgeon_fuzz::edits;
use libfuzzer_sys::fuzz_target;

const REPORT: &str = concat!(
    r#"{"smartctl":{"messages":[{"string":"x STANDBY"}]},"model_name":"m","serial_number":"s","#,
    r#""in_smartctl_database":true,"logical_block_size":512,"power_on_time":{"hours":9},"#,
    r#""ata_smart_attributes":{"table":[{"id":241,"name":"Total_LBAs_Written","value":9,"#,
    r#""raw":{"value":4294967000}},{"id":242,"name":"Host_Reads_32MiB","value":9,"#,
    r#""raw":{"value":77}},{"id":177,"name":"Wear_Leveling_Count","value":98,"raw":{"value":1}}]},"#,
    r#""scsi_error_counter_log":{"read":{"gigabytes_processed":"12.345"}}}"#
);

fn observation(n: u64, drive: DriveReport) -> Observation {
    let sectors = Sectors { read: n.wrapping_mul(1 << 60), written: n << 20 };
    Observation {
        boot: (n / 3).to_string(),
        since_boot_ns: n,
        time_s: n * 9000,
        appearance: Some(n / 2),
        before: sectors,
        after: sectors,
        drive: Some(drive),
    }
}

/// Continues `record` by each report, and then checks that the state is one.
fn follow(mut record: DiskRecord, reports: &[DriveReport]) {
    for (n, report) in reports.iter().enumerate() {
        let (read, written) = (record.read_bytes, record.written_bytes);
        record.observe(&observation(n as u64 + 1, report.clone()));
        assert!(record.read_bytes >= read && record.written_bytes >= written);
    }
    let mut state = DiskRecords::default();
    *state.record("key") = record;
    let bytes = state.encode().expect("a state encodes");
    assert_eq!(DiskRecords::decode(&bytes).expect("and decodes"), state);
}

/// The state `body` with a sound digest.
fn sealed(body: &[u8]) -> Vec<u8> {
    let head = format!("burgeon disks 1 {}\n", burgeon_block::Digest::of(body));
    [head.as_bytes(), body].concat()
}

fuzz_target!(|input: &[u8]| {
    let Some((how, rest)) = input.split_first() else { return };
    let mut report = REPORT.as_bytes().to_vec();
    let base = DriveReport::parse(&report).expect("the sample is sound");
    let mut state = DiskRecords::default();
    let record = state.record("key");
    for n in 1..4 {
        record.observe(&observation(n, base.clone()));
    }
    let encoded = state.encode().expect("a state encodes");
    let body = encoded.iter().position(|b| *b == b'\n').map_or(0, |end| end + 1);
    let mut body = encoded[body..].to_vec();
    match how % 4 {
        0 => report = rest.to_vec(),
        1 => edits(&mut report, rest),
        2 => body = rest.to_vec(),
        _ => edits(&mut body, rest),
    }
    let reports: Vec<_> = DriveReport::parse(&report).into_iter().chain([base]).collect();
    assert!(reports.iter().all(|report| report.model.len() <= 64 && report.serial.len() <= 64));
    let _ = DiskRecords::decode(rest);
    if let Ok(state) = DiskRecords::decode(&sealed(&body)) {
        state.disks.into_values().for_each(|record| follow(record, &reports));
    }
});
