//! A reconnect of a mount and its umount keep apart. The kernel would let them wait for each other
//! for ever: `crates/daemon/tests/exchange.rs` shows that on a model.

#![allow(clippy::unwrap_used)]

use std::{
    fs::{self, File},
    path::{Path, PathBuf},
    thread,
};

use rustix::{
    fs::{FlockOperation, flock, inotify},
    mount::{UnmountFlags, unmount},
};
use testkit::{Burgeon, Mounted, PATIENCE, Rng, Space, kill, wait_until};

const PROGRAM: &str = env!("CARGO_BIN_EXE_burgeon");

struct Set {
    burgeon: Burgeon,
    at: PathBuf,
    mounted: Mounted,
    expected: Vec<u8>,
}

/// A mount over FUSE that has lost all of its processes.
fn set_up(space: &Space, seed: u64, options: &[&str]) -> Set {
    let tree = space.make_folder("tree");
    let expected = Rng::new(seed).bytes(3_000_000);
    fs::write(tree.join("data"), &expected).unwrap();
    let burgeon = Burgeon::new(PROGRAM, space);
    burgeon.build(&tree, "sample");
    let at = space.path("at");
    let mounted = burgeon.mount("sample", &at, &[&["--transport", "fuse"], options].concat());
    burgeon.kill_daemon();
    Set { burgeon, at, mounted, expected }
}

/// The lock of the mount's exchanges, taken as by a helper at work.
struct Exchange {
    _lock: File,
    opened: rustix::fd::OwnedFd,
}

impl Exchange {
    fn begin(burgeon: &Burgeon) -> Self {
        let mut folders = fs::read_dir(burgeon.state().join("mounts")).unwrap();
        let path = folders.next().unwrap().unwrap().path().join("exchange.lock");
        let lock = File::options().write(true).create(true).truncate(false).open(&path).unwrap();
        flock(&lock, FlockOperation::LockExclusive).unwrap();
        let opened = inotify::init(inotify::CreateFlags::NONBLOCK).unwrap();
        inotify::add_watch(&opened, &path, inotify::WatchFlags::OPEN).unwrap();
        Self { _lock: lock, opened }
    }

    /// True if another process has tried to take the lock since the last call.
    fn is_wanted(&self) -> bool {
        rustix::io::read(&self.opened, &mut [0; 64]).is_ok()
    }
}

fn is_mounted(space: &Space, at: &Path) -> bool {
    space.mounts().contains(&at.to_owned())
}

fn folders(burgeon: &Burgeon) -> usize {
    fs::read_dir(burgeon.state().join("mounts")).unwrap().count()
}

#[test]
fn a_command_waits_for_an_exchange_before_it_unmounts() {
    let space = Space::new("apart-command");
    for command in ["umount", "shutdown"] {
        let Set { burgeon, at, mounted, .. } = set_up(&space, 51, &["--write-limit", "256M"]);
        // No daemon can be started, so the command works without one.
        let lock = File::open(burgeon.state().join("run/lock")).unwrap();
        if command == "shutdown" {
            flock(&lock, FlockOperation::LockExclusive).unwrap();
        }
        let exchange = Exchange::begin(&burgeon);
        let target = at.to_str().unwrap();
        let last = if command == "umount" { target } else { "--unmount" };
        let mut child = burgeon.command(&[command, last]).spawn().unwrap();
        let mut tries = 0;
        let has_tried = wait_until(PATIENCE, || {
            tries += u32::from(exchange.is_wanted());
            tries > 1 || child.try_wait().unwrap().is_some()
        });
        assert!(has_tried && is_mounted(&space, &at), "{command} unmounts during an exchange");
        drop((exchange, lock));
        assert!(child.wait().unwrap().success());
        assert!(!is_mounted(&space, &at));
        std::mem::forget(mounted);
        assert!(wait_until(PATIENCE, || folders(&burgeon) == 0));
        burgeon.ok(&["shutdown"]);
    }
}

/// Another program unmounts it just before the exchange, with a file left open or without.
#[test]
fn an_exchange_finds_out_that_its_mount_is_over() {
    let space = Space::new("apart-over");
    for options in [&["--read-only"][..], &["--write-limit", "256M"]] {
        let Set { burgeon, at, mounted, .. } = set_up(&space, 52, options);
        let exchange = Exchange::begin(&burgeon);
        // The daemon is ready, and its helper waits for the lock.
        let repair = thread::scope(|scope| {
            let repair = scope.spawn(|| burgeon.run(&["doctor", "--repair"]));
            assert!(wait_until(PATIENCE, || exchange.is_wanted()), "it exchanges nothing");
            unmount(&at, UnmountFlags::empty()).unwrap();
            std::mem::forget(mounted);
            drop(exchange);
            repair.join().unwrap()
        });
        assert!(wait_until(PATIENCE, || folders(&burgeon) == 0), "{repair:?}");
        let log = fs::read_to_string(burgeon.state().join("run/log")).unwrap_or_default();
        assert!(!log.contains("lost its server for good"), "{log}");
        burgeon.ok(&["doctor"]);
        burgeon.ok(&["shutdown"]);
    }
}

/// A mount with a busy file is detached; its user gets its data again nevertheless.
#[test]
fn a_detached_mount_with_an_open_file_is_reconnected() {
    let space = Space::new("apart-detached");
    for options in [&["--read-only"][..], &["--write-limit", "256M"]] {
        let Set { burgeon, at, mounted, expected } = set_up(&space, 53, options);
        let file = File::open(at.join("data")).unwrap();
        unmount(&at, UnmountFlags::DETACH).unwrap();
        std::mem::forget(mounted);
        burgeon.run(&["doctor", "--repair"]);
        let serving = || burgeon.status()["mounts"][0]["state"] == "serving";
        assert!(wait_until(PATIENCE, serving), "{:#}", burgeon.status());
        fs::write("/proc/sys/vm/drop_caches", "3").unwrap();
        let mut read = Vec::new();
        std::io::Read::read_to_end(&mut &file, &mut read).unwrap();
        assert!(read == expected);
        drop(file);
        assert!(wait_until(PATIENCE, || folders(&burgeon) == 0));
        burgeon.ok(&["shutdown"]);
    }
}

/// The helper's exchange is killed with everything else while it waits; the next one goes through.
#[test]
fn a_killed_exchange_is_done_by_the_next_daemon() {
    let space = Space::new("apart-killed");
    let Set { burgeon, at, mounted, expected } = set_up(&space, 54, &["--write-limit", "256M"]);
    let exchange = Exchange::begin(&burgeon);
    thread::scope(|scope| {
        let repair = scope.spawn(|| burgeon.run(&["doctor", "--repair"]));
        assert!(wait_until(PATIENCE, || exchange.is_wanted()), "it exchanges nothing");
        burgeon.processes().into_iter().for_each(kill);
        repair.join().unwrap();
    });
    drop(exchange);
    burgeon.ok(&["doctor", "--repair"]);
    fs::write("/proc/sys/vm/drop_caches", "3").unwrap();
    assert!(fs::read(at.join("data")).unwrap() == expected);
    burgeon.umount(mounted);
}
