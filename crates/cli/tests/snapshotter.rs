//! `burgeon snapshotter` as containerd's own tests use it, and killed at random moments.

#![allow(clippy::unwrap_used)]

use std::{
    collections::BTreeSet,
    os::unix::process::CommandExt,
    path::Path,
    process::{Child, Command, Stdio},
};

use serde_json::Value;
use sha2::{Digest, Sha256};
use testkit::{Burgeon, OciLayout, PATIENCE, Registry, Space, go_tests, skopeo_copy, wait_until};

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

/// Runs tests of dev/containerd, and returns the lines that name a result. `name` is the
/// snapshotter by which containerd's tests know what to excuse.
fn suite(space: &Space, name: &str, run: &str, variables: &[(&str, &str)]) -> String {
    let output = Command::new(go_tests("containerd"))
        .args(["-test.root", "-test.v", "-test.run", run])
        .env("BURGEON", PROGRAM)
        .env("SUITE_NAME", name)
        .env("TMPDIR", space.make_folder("suite"))
        .envs(variables.iter().copied())
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    // The log of each mount has all its layers.
    let short = said.lines().filter(|line| line.len() < 500).collect::<Vec<_>>().join("\n");
    assert!(output.status.success(), "{short}\n{}", String::from_utf8_lossy(&output.stderr));
    short
}

/// The cases of containerd's suite that passed.
fn passed(said: &str) -> BTreeSet<String> {
    let passed = |line: &str| {
        let (_, case) = line.trim().strip_prefix("--- PASS: ")?.split_once('/')?;
        Some(case.split(' ').next()?.to_owned())
    };
    said.lines().filter_map(passed).collect()
}

#[test]
fn containerds_own_suite_passes() {
    let space = Space::new("snapshotter-suite");
    let said = suite(&space, "overlayfs", "^TestSuite$", &[]);
    assert_eq!(passed(&said), CASES.map(str::to_owned).into(), "{said}");
    assert_eq!(space.mounts(), [] as [&Path; 0]);
}

/// Over a remote layer in the form `containers`. What is made above a layer that was committed here
/// is overlayfs's in each form, and so has its excuses.
fn remote_suite(space_name: &str, containers: &str) {
    let space = Space::new(space_name);
    let burgeon = Burgeon::new(PROGRAM, &space);
    let registry = Registry::start(&space.path("registry"), None).unwrap();
    let layer = empty_layer();
    let digest = |bytes: &[u8]| {
        let hex: String = Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect();
        format!("sha256:{hex}")
    };
    let (chain, folder) = (digest(&layer), space.path("image"));
    let kind = "application/vnd.oci.image.layer.v1.tar";
    OciLayout::by_hand(&folder, Some(&[&chain]), &[(kind, layer)], |_| ()).unwrap();
    let index = std::fs::read(folder.join("index.json")).unwrap();
    let index: Value = serde_json::from_slice(&index).unwrap();
    let manifest = index["manifests"][0]["digest"].as_str().unwrap().to_owned();
    let image = format!("{}/empty:1", registry.address());
    let from = format!("oci:{}", folder.display());
    skopeo_copy(&["--preserve-digests"], &from, &format!("docker://{image}")).unwrap();
    let reference = format!("oci://{}/empty@{manifest}", registry.address());
    burgeon.ok(&["pull", "--eager", "--as", "empty", &reference]);
    let state = space.path("state");
    let variables = [
        ("STATE", state.to_str().unwrap()),
        ("CONTAINERS", containers),
        ("CHAIN", &chain),
        ("IMAGE", &image),
        ("MANIFEST", &manifest),
        // Uncompressed.
        ("LAYER", &chain),
    ];
    let said = suite(&space, "overlayfs", "^TestRemote$", &variables);
    assert_eq!(passed(&said), CASES.map(str::to_owned).into(), "{said}");
    assert_eq!(space.mounts(), [] as [&Path; 0]);
}

/// An archive of a root alone.
fn empty_layer() -> Vec<u8> {
    let mut header = tar::Header::new_ustar();
    header.set_entry_type(tar::EntryType::Directory);
    header.set_path("./").unwrap();
    header.set_mode(0o755);
    header.set_size(0);
    header.set_mtime(1_700_000_000);
    header.set_cksum();
    let mut archive = tar::Builder::new(Vec::new());
    archive.append(&header, std::io::empty()).unwrap();
    archive.into_inner().unwrap()
}

#[test]
fn the_suite_passes_over_a_remote_layer_on_overlayfs() {
    remote_suite("snapshotter-overlay", "overlay");
}

#[test]
fn the_suite_passes_over_a_remote_layer_in_native_mounts() {
    remote_suite("snapshotter-native", "native");
}

#[test]
fn a_killed_server_has_what_it_answered() {
    let space = Space::new("snapshotter-killed");
    let said = suite(&space, "overlayfs", "^TestKilled$", &[]);
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
