//! The program installed as a user would install it, in the lab with systemd; and what the tests of
//! that share.

#![allow(dead_code, reason = "not every test program uses all of it")]

use std::{
    fs,
    os::unix::fs::{PermissionsExt, symlink},
    path::Path,
    process::{Command, Output},
};

use testkit::{PATIENCE, copy_program, wait_until};

const PROGRAM: &str = env!("CARGO_BIN_EXE_burgeon");
pub(crate) const INSTALLED: &str = "/usr/local/bin/burgeon";
pub(crate) const INSTALLED_UNIT: &str = "/etc/systemd/system/burgeon.service";
pub(crate) const STATE: &str = "/var/lib/burgeon";
const UNIT: &str = include_str!("../../../../dist/burgeon.service");
const RETRY: &str = include_str!("../../../../dist/burgeon-retry@.timer");
const RULES: &str = include_str!("../../../../dist/65-burgeon.rules");

pub(crate) fn output(program: &str, arguments: &[&str]) -> Output {
    Command::new(program).args(arguments).output().unwrap()
}

/// Runs a command that has to succeed and returns its output.
pub(crate) fn run(program: &str, arguments: &[&str]) -> String {
    let output = output(program, arguments);
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{program} {arguments:?}: {text}{errors}");
    text.trim().to_owned()
}

pub(crate) fn property(unit: &str, name: &str) -> String {
    run("systemctl", &["show", "--value", "--property", name, unit])
}

/// Waits for `good`, which depends on other processes alone.
pub(crate) fn await_that(what: &str, good: impl FnMut() -> bool) {
    assert!(wait_until(PATIENCE, good), "still not so: {what}");
}

pub(crate) fn drop_caches() {
    fs::write("/proc/sys/vm/drop_caches", "3").unwrap();
}

/// Bytes that compress badly and differ from file to file.
pub(crate) fn content(file: u64) -> Vec<u8> {
    let mut state = file + 1;
    let mut next = || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 33) as u8
    };
    (0..600_000).map(|_| next()).collect()
}

/// The image mounted in the tests.
pub(crate) fn tree() {
    fs::create_dir_all("/tmp/tree").unwrap();
    (0..8).for_each(|n| fs::write(format!("/tmp/tree/{n}"), content(n)).unwrap());
}

/// Puts the program at `path`, as a new file: the present one may be running. At no time is
/// there none: a unit that is ending runs it, too.
pub(crate) fn place(path: &str) {
    let new = format!("{path}.new");
    copy_program(Path::new(PROGRAM), Path::new(&new));
    fs::set_permissions(&new, fs::Permissions::from_mode(0o755)).unwrap();
    fs::rename(new, path).unwrap();
}

/// Does the same as `make install`, once.
pub(crate) fn install() {
    let init = fs::read_to_string("/proc/1/comm").unwrap();
    assert_eq!(init.trim(), "systemd", "this test needs the lab with LAB_INIT=systemd");
    place(INSTALLED);
    if Path::new(INSTALLED_UNIT).exists() {
        return;
    }
    // The lab's root is an overlay; state belongs on a plain file system, such as the lab's disk.
    if !Path::new("/lab-disk").exists() {
        fs::create_dir_all(STATE).unwrap();
        run("mount", &["-t", "tmpfs", "-o", "size=700m", "tmpfs", STATE]);
    }
    fs::write(INSTALLED_UNIT, UNIT).unwrap();
    fs::write("/etc/systemd/system/burgeon-retry@.timer", RETRY).unwrap();
    fs::write("/etc/udev/rules.d/65-burgeon.rules", RULES).unwrap();
    run("udevadm", &["control", "--reload"]);
    symlink(INSTALLED, "/sbin/mount.burgeon").unwrap();
    run("systemctl", &["daemon-reload"]);
}
