//! Programs in smartctl's place that hang, print without end, or leave children.

#![allow(clippy::unwrap_used)]

use std::{
    fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    sync::{Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use burgeon_block::ErrorKind;
use burgeon_disks::{Smartctl, Trouble};

/// One test at a time: a process that another test starts meanwhile would hold the script open for
/// writing until it runs its program, and the script could not be run ("text file busy").
fn alone() -> MutexGuard<'static, ()> {
    static ONE: Mutex<()> = Mutex::new(());
    ONE.lock().unwrap_or_else(PoisonError::into_inner)
}

fn program(folder: &Path, script: &str) -> Smartctl {
    let program = folder.join("smartctl");
    fs::write(&program, format!("#!/bin/sh\n{script}\n")).unwrap();
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
    Smartctl { program, time: Duration::from_secs(60) }
}

fn device() -> PathBuf {
    "/dev/sdx".into()
}

#[test]
fn a_report_is_read_whatever_the_exit_code() {
    let _alone = alone();
    let folder = tempfile::tempdir().unwrap();
    let message = r#"{"smartctl":{"messages":[{"string":"open failed: Permission denied"}]}}"#;
    let smartctl = program(folder.path(), &format!("echo '{message}'; exit 66"));
    assert_eq!(smartctl.ask(&device()).unwrap().trouble, Some(Trouble::Denied));
}

#[test]
fn it_gets_an_environment_of_ours() {
    let _alone = alone();
    let folder = tempfile::tempdir().unwrap();
    let to = folder.path().join("environment");
    let script = format!("env > {}; echo \"$@\" >> {0}; echo {{}}", to.display());
    let smartctl = program(folder.path(), &script);
    assert_eq!(smartctl.ask(&device()).unwrap_err().kind(), ErrorKind::Corrupt);
    let told = fs::read_to_string(to).unwrap();
    for line in told.lines().filter(|line| line.contains('=') && !line.starts_with("--")) {
        let name = line.split('=').next().unwrap();
        assert!(["PATH", "LC_ALL", "PWD", "SHLVL", "_", "OLDPWD"].contains(&name), "{line}");
    }
    assert!(told.contains("--nocheck=standby") && told.contains("/dev/sdx"), "{told}");
}

#[test]
fn one_that_hangs_is_ended_with_its_children() {
    let _alone = alone();
    let folder = tempfile::tempdir().unwrap();
    let pid = folder.path().join("pid");
    let script = format!("sleep 1000 & echo $! > {}; wait", pid.display());
    let mut smartctl = program(folder.path(), &script);
    smartctl.time = Duration::from_secs(2);
    let error = smartctl.ask(&device()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    assert!(error.to_string().contains("did not end within 2 s"), "{error}");
    let child = fs::read_to_string(pid).unwrap();
    let stat = format!("/proc/{}/stat", child.trim());
    // Ended: gone, or waiting for its new parent.
    let is_over = || fs::read_to_string(&stat).map_or(true, |stat| stat.contains(") Z "));
    let patience = Instant::now() + Duration::from_secs(60);
    while !is_over() {
        assert!(Instant::now() < patience, "the child {child} still runs");
        std::thread::yield_now();
    }
}

#[test]
fn one_that_prints_without_end_is_ended() {
    let _alone = alone();
    let folder = tempfile::tempdir().unwrap();
    for script in ["exec head -c 1100000 /dev/zero", "exec yes 0123456789"] {
        let error = program(folder.path(), script).ask(&device()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Corrupt, "{error}");
        assert!(error.to_string().contains("printed more than"), "{error}");
    }
}

#[test]
fn one_that_cannot_run_is_an_error() {
    let smartctl =
        Smartctl { program: "/nonexistent/smartctl".into(), time: Duration::from_secs(9) };
    assert_eq!(smartctl.ask(&device()).unwrap_err().kind(), ErrorKind::NotFound);
}
