//! The daemon's mount namespace where mounts are private: it holds no file system that others
//! unmount. On a host, it sees those that are mounted later.

#![allow(clippy::unwrap_used)]

use std::{
    fs,
    process::{Command, Stdio},
};

use testkit::{
    Burgeon, PATIENCE, Rng, Space, compare, kill, loop_devices, mounts_of, processes_with,
    wait_until,
};

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

/// The daemon is in a copy of this thread's namespace. With `orphaned`, its server is in another
/// copy, which was made for the supervisor before: on overlayfs, where it has no root of its own.
#[track_caller]
fn release_from_copies(space: &Space, orphaned: bool) {
    let other = space.disk(&space.path("other"), 64 << 20);
    let kept = space.small_disk("kept", 16 << 20);
    let tree = kept.path().join("tree");
    fs::create_dir(&tree).unwrap();
    fs::write(tree.join("data"), Rng::new(18).bytes(300_000)).unwrap();
    let on_disk = |device: &testkit::LoopDevice| device.backing.starts_with(space.path("disk.img"));
    let is_held = || loop_devices().iter().any(on_disk);
    let overlay = orphaned.then(|| space.overlay("overlay"));
    let folder = overlay.as_ref().map_or(space.folder(), |overlay| overlay.path());
    let burgeon = Burgeon::with_state(PROGRAM, folder.join("state"));
    burgeon.ok(&["build", tree.to_str().unwrap(), "image:1", "--by-reference"]);
    let mut mounted = vec![burgeon.mount("image:1", &space.path("at"), &["--read-only"])];
    let has = |process: &str, place: &std::path::Path| {
        let mounts = mounts_of(&burgeon.status()[process].to_string()).unwrap();
        mounts.iter().any(|mount| mount.at == place)
    };
    if orphaned {
        kill(u32::try_from(burgeon.status()["supervisor_pid"].as_u64().unwrap()).unwrap());
        mounted.push(burgeon.mount("image:1", &space.path("second"), &["--read-only"]));
    }
    let processes = match orphaned {
        true => vec!["supervisor_pid", "server_pid"],
        false => vec!["supervisor_pid", "opener_pid"],
    };
    assert!(processes.iter().all(|process| has(process, other.path())) && is_held());
    drop(other);
    assert!(wait_until(PATIENCE, || !is_held()), "the daemon holds what nobody else has mounted");
    // This thread alone has the disk with the tree, which has not been read before.
    assert!(processes.iter().all(|process| has(process, kept.path())));
    compare(&tree, &space.path("at")).unwrap().assert_same();
    mounted.into_iter().for_each(|mounted| burgeon.umount(mounted));
    burgeon.ok(&["shutdown"]);
}

#[test]
fn a_file_system_that_nobody_else_has_mounted_is_released_from_a_copied_namespace() {
    release_from_copies(&Space::new("copied"), false);
}

#[test]
fn a_file_system_that_nobody_else_has_mounted_is_released_from_the_copy_of_an_orphaned_server() {
    release_from_copies(&Space::new("orphaned"), true);
}

#[test]
fn an_idle_daemon_ends_when_its_state_directory_is_in_no_namespace_but_its_own() {
    let space = Space::new("vanished");
    let tree = space.make_folder("tree");
    fs::write(tree.join("data"), Rng::new(18).bytes(300_000)).unwrap();
    let disk = space.make_folder("tmpfs");
    let script = r#"
        burgeon() { "$PROGRAM" --state-dir "$FOLDER/tmpfs/state" "$@"; }
        mount -t tmpfs none "$FOLDER/tmpfs"
        mkdir "$FOLDER/at"
        burgeon build "$FOLDER/tree" image:1
        burgeon mount image:1 "$FOLDER/at" --read-only
        umount --lazy "$FOLDER/tmpfs"
        umount "$FOLDER/at"
    "#;
    let mut command = Command::new("unshare");
    command.args(["--mount", "--propagation", "private", "sh", "-euxc", script]);
    command.env("PROGRAM", PROGRAM).env("FOLDER", space.folder()).stdin(Stdio::null());
    let output = command.output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let ended = wait_until(PATIENCE, || processes_with(&disk).is_empty());
    let left = processes_with(&disk);
    left.iter().copied().for_each(kill);
    assert!(ended, "nobody can reach {left:?}");
}

#[test]
fn an_idle_daemon_ends_when_another_state_directory_is_in_its_place() {
    let space = Space::new("replaced");
    let tree = space.make_folder("tree");
    fs::write(tree.join("data"), "data").unwrap();
    let burgeon = Burgeon::new(PROGRAM, &space);
    let start = || {
        burgeon.build(&tree, "image:1");
        burgeon.umount(burgeon.mount("image:1", &space.path("at"), &["--read-only"]));
        burgeon.status()["supervisor_pid"].clone()
    };
    let first = start();
    fs::rename(burgeon.state(), space.path("renamed")).unwrap();
    let second = start();
    assert_ne!(first, second);
    let is_gone = || !fs::exists(format!("/proc/{first}")).unwrap();
    assert!(wait_until(PATIENCE, is_gone), "nobody can reach {first}");
    // It has left the other's sockets alone.
    assert_eq!(burgeon.status()["supervisor_pid"], second);
    burgeon.ok(&["shutdown"]);
}
