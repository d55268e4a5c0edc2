//! `burgeon snapshotter` as containerd's own tests use it, and killed at random moments.

#![allow(clippy::unwrap_used)]

use std::{
    collections::BTreeSet,
    os::unix::process::CommandExt,
    path::Path,
    process::{Child, Command, Stdio},
};

use serde_json::Value;
use testkit::{Burgeon, PATIENCE, Space, go_tests, wait_until};

const PROGRAM: &str = env!("CARGO_BIN_EXE_burgeon");

/// The cases of containerd 2.4's suite. It excuses what is named overlayfs from nothing but renames
/// of lower directories, which it then expects to fail.
const CASES: [&str; 21] = [
    "128LayersMount",
    "Basic",
    "Chown",
    "CloseTwice",
    "DeletedFilesInChildSnapshot",
    "DirectoryPermissionOnCommit",
    "LayerFileupdate",
    "MoveFileFromLowerLayer",
    "PreareViewFailingtest",
    "Remove",
    "RemoveDirectoryInLowerLayer",
    "RemoveIntermediateSnapshot",
    "Rename",
    "RootPermission",
    "StatActive",
    "StatComitted",
    "StatInWalk",
    "TransitivityTest",
    "Update",
    "ViewReadonly",
    "Walk",
];

/// Runs tests of dev/containerd, and returns the lines that name a result.
fn suite(space: &Space, run: &str) -> String {
    let output = Command::new(go_tests("containerd"))
        .args(["-test.root", "-test.v", "-test.run", run])
        .env("BURGEON", PROGRAM)
        .env("SUITE_NAME", "overlayfs")
        .env("TMPDIR", space.make_folder("suite"))
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    // The log of each mount has all its layers.
    let short = said.lines().filter(|line| line.len() < 500).collect::<Vec<_>>().join("\n");
    assert!(output.status.success(), "{short}\n{}", String::from_utf8_lossy(&output.stderr));
    short
}

#[test]
fn containerds_own_suite_passes() {
    let space = Space::new("snapshotter-suite");
    let said = suite(&space, "^TestSuite$");
    let passed = |line: &str| {
        let case = line.trim().strip_prefix("--- PASS: TestSuite/")?;
        Some(case.split(' ').next()?.to_owned())
    };
    let found: BTreeSet<_> = said.lines().filter_map(passed).collect();
    assert_eq!(found, CASES.map(str::to_owned).into(), "{said}");
    assert_eq!(space.mounts(), [] as [&Path; 0]);
}

#[test]
fn a_killed_server_has_what_it_answered() {
    let space = Space::new("snapshotter-killed");
    let said = suite(&space, "^TestKilled$");
    assert!(said.contains("--- PASS: TestKilled"), "{said}");
}

/// A running snapshotter.
struct Running(Child);

impl Running {
    fn start(space: &Space) -> Self {
        let mut command = Command::new(PROGRAM);
        command.arg("--state-dir").arg(space.path("state")).args(["--config", "none"]);
        command.args(["snapshotter", "--root"]).arg(space.path("root"));
        command.arg("--socket").arg(space.path("run/s.sock"));
        let running = Self(command.stderr(Stdio::null()).spawn().unwrap());
        let connects = || std::os::unix::net::UnixStream::connect(space.path("run/s.sock")).is_ok();
        assert!(wait_until(PATIENCE, connects), "nobody listens");
        running
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Runs a shell as a user without rights; true if it succeeds.
fn another_user_can(script: &str) -> bool {
    let mut command = Command::new("sh");
    command.args(["-c", script]).uid(65534).gid(65534).stderr(Stdio::null());
    command.status().unwrap().success()
}

#[test]
fn status_reads_records_and_others_enter_nothing() {
    let space = Space::new("snapshotter-status");
    let burgeon = Burgeon::new(PROGRAM, &space);
    let root = space.path("root");
    let status = ["snapshotter", "status", "--root", root.to_str().unwrap()];
    let missing = burgeon.run(&status);
    assert_eq!(missing.code, Some(3), "{missing:?}");
    let running = Running::start(&space);
    let shown: Value =
        serde_json::from_str(&burgeon.ok(&[&status[..], &["--json"]].concat())).unwrap();
    assert_eq!(shown["snapshots"], Value::Array(Vec::new()));
    let socket = space.path("run/s.sock");
    // The folders above are open: what keeps the user out is ours.
    assert!(another_user_can(&format!("test -S {}", socket.display())));
    assert!(!another_user_can(&format!("test -w {}", socket.display())));
    assert!(!another_user_can(&format!("test -e {}/records", root.display())));
    // A second server is refused at the root, and at the socket.
    let socket = socket.to_str().unwrap();
    let serve = ["snapshotter", "--root", root.to_str().unwrap()];
    let second = burgeon.run(&[&serve[..], &["--socket", "/nonexistent/s"]].concat());
    assert_eq!(second.code, Some(5), "{second:?}");
    let other = space.path("other");
    let other = ["snapshotter", "--root", other.to_str().unwrap(), "--socket", socket];
    let second = burgeon.run(&other);
    assert_eq!(second.code, Some(5), "{second:?}");
    assert!(second.stderr.contains("another process listens"), "{second:?}");
    drop(running);
    // The socket of a killed one is replaced.
    drop(Running::start(&space));
    // A damaged record is named, and the code says so.
    std::fs::write(root.join("records/7"), "burgeon snapshot 1 x\n{}").unwrap();
    let damaged = burgeon.run(&status);
    assert_eq!(damaged.code, Some(1), "{damaged:?}");
    assert!(damaged.stdout.contains("records/7"), "{damaged:?}");
}
