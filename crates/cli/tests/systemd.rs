//! The systemd unit as it is shipped, on a machine whose first process is systemd: the lab.
//!
//! Installs the program and `dist/burgeon.service` where a user would, with the default state
//! directory, and then only does what a user and bad luck do.

#![allow(clippy::unwrap_used)]

use std::{
    fs,
    os::unix::fs::PermissionsExt,
    path::Path,
    process::{Command, Output},
    thread::sleep,
    time::{Duration, Instant},
};

const PROGRAM: &str = env!("CARGO_BIN_EXE_burgeon");
const UNIT: &str = include_str!("../../../dist/burgeon.service");

fn output(program: &str, arguments: &[&str]) -> Output {
    Command::new(program).args(arguments).output().unwrap()
}

/// Runs a command that has to succeed and returns what it printed.
fn run(program: &str, arguments: &[&str]) -> String {
    let output = output(program, arguments);
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{program} {arguments:?}: {text}{errors}");
    text.trim().to_owned()
}

fn property(unit: &str, name: &str) -> String {
    run("systemctl", &["show", "--value", "--property", name, unit])
}

/// Waits for `good`, which depends on other processes alone; a minute is for emulation.
fn await_that(what: &str, mut good: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !good() {
        assert!(begun.elapsed() < Duration::from_secs(60), "still not so: {what}");
        sleep(Duration::from_millis(50));
    }
}

fn drop_caches() {
    fs::write("/proc/sys/vm/drop_caches", "3").unwrap();
}

/// Bytes that compress badly and differ from file to file.
fn content(file: u64) -> Vec<u8> {
    let mut state = file + 1;
    let mut next = || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 33) as u8
    };
    (0..600_000).map(|_| next()).collect()
}

#[test]
fn the_unit_keeps_mounts_alive() {
    let init = fs::read_to_string("/proc/1/comm").unwrap();
    assert_eq!(init.trim(), "systemd", "this test needs the lab with LAB_INIT=systemd");
    install();
    fs::create_dir_all("/tmp/tree").unwrap();
    (0..8).for_each(|n| fs::write(format!("/tmp/tree/{n}"), content(n)).unwrap());
    fs::create_dir_all("/mnt/a").unwrap();
    run("burgeon", &["build", "/tmp/tree", "tree"]);
    // A session that ends takes its processes along, but not the daemon it started.
    run(
        "systemd-run",
        &[
            "--quiet",
            "--wait",
            "--pipe",
            "--collect",
            "burgeon",
            "mount",
            "tree",
            "/mnt/a",
            "--writes",
            "w",
            "--write-limit",
            "256M",
        ],
    );
    assert_eq!(property("burgeon.service", "ActiveState"), "active");
    assert_eq!(property("burgeon.service", "KillMode"), "process");
    fs::write("/mnt/a/written", "before").unwrap();
    assert_eq!(fs::read("/mnt/a/0").unwrap(), content(0));

    // The supervisor dies: systemd starts another, which takes over what the first left.
    let first = property("burgeon.service", "MainPID");
    run("kill", &["-KILL", &first]);
    await_that("systemd starts the daemon again", || {
        let now = property("burgeon.service", "MainPID");
        now != first && now != "0" && property("burgeon.service", "ActiveState") == "active"
    });
    drop_caches();
    await_that("data that was never read can be read", || {
        fs::read("/mnt/a/1").is_ok_and(|bytes| bytes == content(1))
    });
    assert_eq!(fs::read_to_string("/mnt/a/written").unwrap(), "before");

    // An administrator restarts the unit: the clean stop unmounts; named writes are there after.
    run("systemctl", &["stop", "burgeon.service"]);
    await_that("the unit is inactive", || property("burgeon.service", "ActiveState") == "inactive");
    assert!(!Path::new("/mnt/a/0").exists(), "stopping the unit unmounts what nobody uses");
    run("burgeon", &["mount", "tree", "/mnt/a", "--writes", "w"]);
    assert_eq!(fs::read_to_string("/mnt/a/written").unwrap(), "before");
    assert_eq!(fs::read("/mnt/a/7").unwrap(), content(7));
    run("burgeon", &["umount", "/mnt/a"]);
    run("burgeon", &["shutdown"]);
}

fn install() {
    fs::copy(PROGRAM, "/usr/local/bin/burgeon").unwrap();
    fs::set_permissions("/usr/local/bin/burgeon", fs::Permissions::from_mode(0o755)).unwrap();
    // The lab's root is an overlay; state belongs on a plain file system.
    fs::create_dir_all("/var/lib/burgeon").unwrap();
    run("mount", &["-t", "tmpfs", "-o", "size=700m", "tmpfs", "/var/lib/burgeon"]);
    fs::write("/etc/systemd/system/burgeon.service", UNIT).unwrap();
    run("systemctl", &["daemon-reload"]);
}
