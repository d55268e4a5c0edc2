//! The daemon's mount namespace on a host whose mounts are private: it holds no file system that
//! the host unmounts, and sees those that the host mounts later.

#![allow(clippy::unwrap_used)]

use std::{
    fs,
    process::{Command, Stdio},
};

use testkit::{Rng, Space};

const PROGRAM: &str = env!("CARGO_BIN_EXE_burgeon");

/// The beginning of every script: an image, and empty folders beside a `tree` and a `disk`.
const BEGIN: &str = r#"
    burgeon() { "$PROGRAM" --state-dir "$FOLDER/state" "$@"; }
    # The loop devices on the disk. One that is mounted nowhere has detached itself.
    held() { losetup --associated disk --output NAME --noheadings | sed 's/^/held: /'; }
    cd "$FOLDER"
    mkdir other at second
    burgeon build tree image:1
"#;

/// Runs a script as process 1 of new namespaces of mounts and processes, which end with it: a host
/// whose mounts are private. Returns its standard output.
#[track_caller]
fn on_a_private_host(space: &Space, script: &str) -> String {
    let tree = space.make_folder("tree");
    fs::write(tree.join("data"), Rng::new(18).bytes(300_000)).unwrap();
    let disk = space.path("disk");
    fs::File::create(&disk).unwrap().set_len(64 << 20).unwrap();
    let made = Command::new("mkfs.ext4").args(["-q", "-F"]).arg(&disk).status();
    assert!(made.unwrap().success());
    let mut command = Command::new("unshare");
    command.args(["--mount", "--propagation", "private", "--mount-proc"]);
    command.args(["--pid", "--fork", "--kill-child", "sh", "-euxc"]);
    command.arg(format!("{BEGIN}{script}")).stdin(Stdio::null());
    command.env("PROGRAM", PROGRAM).env("FOLDER", space.folder());
    let output = command.output().unwrap();
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn a_file_system_that_the_host_unmounts_is_not_held_by_the_daemon() {
    let space = Space::new("unmounted");
    let script = r#"
        mount -o loop disk other
        held
        burgeon mount image:1 "$FOLDER/at" --write-limit 256M
        umount other
        echo unmounted
        held
        cmp tree/data at/data
        burgeon umount "$FOLDER/at"
        burgeon shutdown
    "#;
    let said = on_a_private_host(&space, script);
    let (before, after) = said.split_once("\nunmounted\n").unwrap();
    assert!(before.contains("held: /dev/loop") && !after.contains("held"), "{said}");
}

#[test]
fn a_store_that_the_host_mounts_later_is_visible_to_the_daemon() {
    let space = Space::new("later");
    let script = r#"
        burgeon mount image:1 "$FOLDER/at" --read-only
        mount -o loop disk other
        burgeon --store "$FOLDER/other/store" build tree late
        burgeon --store "$FOLDER/other/store" mount late "$FOLDER/second" --read-only
        cmp tree/data second/data
        burgeon shutdown --unmount
    "#;
    on_a_private_host(&space, script);
}
