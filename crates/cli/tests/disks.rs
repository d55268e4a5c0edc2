//! `burgeon disks` on the disks of this machine, with a smartctl of ours.

#![allow(clippy::unwrap_used)]

use std::{
    fs,
    os::unix::fs::PermissionsExt,
    path::Path,
    sync::{Mutex, MutexGuard, PoisonError},
};

use serde_json::Value;
use testkit::{Burgeon, Space};

const PROGRAM: &str = env!("CARGO_BIN_EXE_burgeon");

/// One test at a time: a process that another test starts meanwhile would hold the script open for
/// writing until it runs its program, and the script could not be run ("text file busy").
fn alone() -> MutexGuard<'static, ()> {
    static ONE: Mutex<()> = Mutex::new(());
    ONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// An installation whose smartctl prints `report`.
fn installation(space: &Space, report: &str) -> Burgeon {
    let folder = space.make_folder("bin");
    let program = folder.join("smartctl");
    fs::write(&program, format!("#!/bin/sh\ncat <<'END'\n{report}\nEND\n")).unwrap();
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
    Burgeon::new(PROGRAM, space).env("PATH", folder)
}

fn document(burgeon: &Burgeon) -> Value {
    serde_json::from_str(&burgeon.ok(&["disks", "--json"])).unwrap()
}

#[test]
fn totals_grow_and_the_drives_figures_are_shown() {
    let _alone = alone();
    let space = Space::new("disks");
    let report = r#"{"smartctl":{},"model_name":"Model X","serial_number":"S",
        "nvme_smart_health_information_log":
        {"data_units_read":1000,"data_units_written":2000,"percentage_used":7}}"#;
    let burgeon = installation(&space, report);
    let (first, second) = (document(&burgeon), document(&burgeon));
    let found = first["disks"].as_array().unwrap();
    let again = second["disks"].as_array().unwrap();
    assert_eq!(found.len(), again.len());
    for (disk, later) in found.iter().zip(again) {
        for key in ["read_bytes", "written_bytes"] {
            assert!(later[key].as_u64().unwrap() >= disk[key].as_u64().unwrap(), "{disk} {later}");
        }
        assert_eq!(disk["drive"]["read"]["bytes"], 512_000_000);
        assert_eq!(disk["drive"]["written"]["bytes"], 1_024_000_000);
        assert_eq!(disk["drive"]["written"]["unit_source"], "standard");
        assert_eq!(disk["drive"]["endurance_used_percent"], 7);
        assert!(disk["drive"]["years_left"].is_null(), "{disk}");
    }
    let table = burgeon.ok(&["disks"]);
    match found.is_empty() {
        true => assert!(table.contains("no disks"), "{table}"),
        false => assert!(table.contains("Model X") && table.contains("977 MiB"), "{table}"),
    }
    assert!(burgeon.state().join("disks/state").is_file());
    burgeon.fails(&["disks", "loop0"], 3, "there is no disk loop0");
    fs::write(burgeon.state().join("disks/state"), "x").unwrap();
    fs::remove_file(burgeon.state().join("disks/state.old")).unwrap();
    burgeon.fails(&["disks"], 4, "move it away");
}

#[test]
fn missing_figures_have_a_reason() {
    let _alone = alone();
    let space = Space::new("disks-denied");
    let message = "Smartctl open device: /dev/x failed: Permission denied";
    let report = format!(r#"{{"smartctl":{{"messages":[{{"string":"{message}"}}]}}}}"#);
    let burgeon = installation(&space, &report);
    let table = burgeon.ok(&["disks"]);
    if table.contains("no disks") {
        return;
    }
    assert!(table.contains("smartctl needs root"), "{table}");
    let elsewhere = ["/usr/local/sbin", "/usr/sbin", "/sbin"];
    if elsewhere.iter().all(|folder| !Path::new(folder).join("smartctl").exists()) {
        fs::remove_file(space.path("bin/smartctl")).unwrap();
        let table = burgeon.ok(&["disks"]);
        assert!(table.contains("install smartmontools"), "{table}");
        assert!(document(&burgeon)["smartctl"].is_null());
    }
}
