//! A command that names the holders of a mount asks no other file system, which may never answer;
//! and a shutdown unmounts nothing while there are some.

#![allow(clippy::unwrap_used)]

use std::{
    fs::{self, File},
    os::fd::OwnedFd,
    path::PathBuf,
    process::{Child, Stdio},
};

use burgeon_frontend::Connection;
use rustix::{
    fs::CWD,
    mount::{MoveMountFlags, UnmountFlags, move_mount, unmount},
};
use testkit::{Burgeon, PATIENCE, Space, wait_until};

const PROGRAM: &str = env!("CARGO_BIN_EXE_burgeon");

/// A FUSE file system whose server has answered the first question and answers none any more. This
/// process has it open, and aborts it at the end by closing the server's descriptor.
struct Silent {
    mount: OwnedFd,
    _connection: Connection,
    place: PathBuf,
}

impl Silent {
    fn new(place: PathBuf) -> Self {
        let connection = Connection::new("silent").unwrap();
        let mount = connection.mount().try_clone_to_owned().unwrap();
        Self { mount, _connection: connection, place }
    }

    fn mount(&self) {
        File::create(&self.place).unwrap();
        let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH;
        move_mount(&self.mount, "", CWD, &self.place, flags).unwrap();
    }
}

impl Drop for Silent {
    fn drop(&mut self) {
        let _ = unmount(&self.place, UnmountFlags::DETACH);
    }
}

/// A command. If it waits, it ends when the connection is closed.
struct Command(Child);

impl Command {
    fn stderr(mut self) -> String {
        let has_ended = wait_until(PATIENCE, || self.0.try_wait().unwrap().is_some());
        assert!(has_ended, "it waits for the silent server");
        std::io::read_to_string(self.0.stderr.take().unwrap()).unwrap()
    }
}

#[test]
fn holders_are_named_while_a_foreign_file_system_does_not_answer() {
    let space = Space::new("holders-silent");
    let tree = space.make_folder("tree");
    std::fs::write(tree.join("file"), "text").unwrap();
    let burgeon = Burgeon::new(PROGRAM, &space);
    burgeon.build(&tree, "image:1");
    let mounted = burgeon.mount("image:1", &space.path("at"), &["--read-only"]);
    // Before the file: descriptors are looked at in their order, up to the first of the mount.
    let silent = Silent::new(space.path("silent"));
    let file = File::open(mounted.path().join("file")).unwrap();
    let own = format!("(process {}, an open file)", std::process::id());
    let path = mounted.path().to_str().unwrap().to_owned();
    // First it is mounted nowhere, as after a lazy umount.
    for is_placed in [false, true] {
        if is_placed {
            silent.mount();
        }
        let mut command = burgeon.command(&["umount", &path]);
        let child = command.stderr(Stdio::piped()).spawn().unwrap();
        let said = Command(child).stderr();
        assert!(said.contains(&own), "{said}");
    }
    drop((file, silent));
    burgeon.umount(mounted);
}

/// A running `sleep`.
struct Sleeping(Child);

impl Drop for Sleeping {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn a_process_whose_working_directory_is_in_the_mount_is_named() {
    let space = Space::new("holders-cwd");
    let tree = space.make_folder("tree");
    std::fs::create_dir(tree.join("folder")).unwrap();
    let burgeon = Burgeon::new(PROGRAM, &space);
    burgeon.build(&tree, "image:1");
    let mounted = burgeon.mount("image:1", &space.path("at"), &["--read-only"]);
    let mut sleep = std::process::Command::new("sleep");
    let sleep = sleep.arg("600").current_dir(mounted.path().join("folder")).spawn().unwrap();
    let sleeping = Sleeping(sleep);
    let refused = burgeon.run(&["umount", mounted.path().to_str().unwrap()]);
    let named = format!("(process {}, its working directory)", sleeping.0.id());
    assert!(refused.stderr.contains(&named), "{}", refused.stderr);
    drop(sleeping);
    burgeon.umount(mounted);
}

#[test]
fn a_shutdown_unmounts_all_or_nothing() {
    let space = Space::new("all-or-nothing");
    let burgeon = Burgeon::new(PROGRAM, &space);
    let tree = space.make_folder("tree");
    fs::write(tree.join("big"), vec![7; 100_000]).unwrap();
    burgeon.build(&tree, "image:1");
    let options = ["--write-limit", "256M"];
    let outer = burgeon.mount("image:1", &space.path("at"), &options);
    let below = outer.path().join("below");
    fs::create_dir(&below).unwrap();
    let inner = burgeon.mount("image:1", &below, &options);
    let file = File::open(inner.path().join("big")).unwrap();
    let holder = format!(
        "nothing was unmounted: {} is in use by {} (process {}, an open file)",
        below.display(),
        fs::read_to_string("/proc/self/comm").unwrap().trim_end(),
        std::process::id()
    );
    // Twice: what is looked at must not be unmounted by the next look.
    for _ in 0..2 {
        burgeon.fails(&["shutdown", "--unmount"], 5, &holder);
    }
    assert_eq!(burgeon.status()["mounts"].as_array().map(Vec::len), Some(2));
    burgeon.kill_daemon();
    burgeon.fails(&["shutdown", "--unmount"], 5, &holder);
    assert!(space.mounts().contains(&below));
    drop(file);
    // With systemd or without it.
    let said = burgeon.ok(&["umount", "--forget", below.to_str().unwrap()]);
    assert!(said.contains("it had no unit"), "{said}");
    burgeon.ok(&["shutdown", "--unmount"]);
    std::mem::forget((inner, outer));
    assert!(burgeon.processes().is_empty());
}
