//! The number of ublk devices: the kernel's limit for other programs is none for mounts, and none
//! outlives its use. Their server has no rights of an administrator. Needs `ublk_drv`, so the lab
//! runs it on Linux 6.12.

#![allow(clippy::unwrap_used)]

use std::{fs, path::PathBuf};

use burgeon_frontend::ublk::{Control, numbers};
use testkit::{Burgeon, PATIENCE, Rng, Space, drop_caches, kill, ublk_devices, wait_until};

const PROGRAM: &str = env!("CARGO_BIN_EXE_burgeon");

/// The report of a server of mounts over ublk. `tests/roles.rs` has the same for its role.
const SERVER_CAN: &str = "probe: __serve: landlock, connect, io_uring, io_uring connect";

fn set_up(space: &Space) -> (Burgeon, PathBuf) {
    let tree = space.make_folder("tree");
    fs::write(tree.join("data"), Rng::new(1).bytes(1_000_000)).unwrap();
    let burgeon = Burgeon::new(PROGRAM, space);
    burgeon.build(&tree, "sample");
    (burgeon, tree)
}

/// The kernel's limit of devices for users without privileges, set for a test and put back.
struct Most(String);

impl Most {
    const PATH: &str = "/sys/module/ublk_drv/parameters/ublks_max";

    fn set(most: usize) -> Self {
        let before = fs::read_to_string(Self::PATH).unwrap();
        fs::write(Self::PATH, most.to_string()).unwrap();
        Self(before)
    }
}

impl Drop for Most {
    fn drop(&mut self) {
        let _ = fs::write(Self::PATH, self.0.trim());
    }
}

#[test]
fn the_limit_for_other_users_is_none_for_mounts() {
    let space = Space::new("ublks-max");
    let (burgeon, tree) = set_up(&space);
    // Older kernels count root's devices, too; `control.rs` tests the message there.
    let _most = Most::set(ublk_devices().len());
    let places = ["a", "b", "c"].map(|name| space.path(name));
    let options = ["--read-only", "--transport", "ublk"];
    let mounted = places.each_ref().map(|at| burgeon.mount("sample", at, &options));
    for at in &places {
        assert_eq!(fs::read(at.join("data")).unwrap(), fs::read(tree.join("data")).unwrap());
    }
    mounted.into_iter().for_each(|mounted| burgeon.umount(mounted));
}

/// The capabilities of a process, without the one that locks memory.
fn capabilities(pid: u64) -> u64 {
    const IPC_LOCK: u64 = 1 << 14;
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("CapPrm:")).unwrap();
    u64::from_str_radix(line.trim(), 16).unwrap() & !IPC_LOCK
}

#[test]
fn the_server_has_no_capability_and_takes_devices_over_without() {
    let space = Space::new("ublk-rights");
    let (burgeon, tree) = set_up(&space);
    let burgeon = burgeon.env("BURGEON_PROBE", "1");
    let at = space.path("at");
    let mounted = burgeon.mount("sample", &at, &["--read-only", "--transport", "ublk"]);
    let server = || burgeon.status()["server_pid"].as_u64();
    let first = server().unwrap();
    assert_eq!(capabilities(first), 0);
    kill(first as u32);
    assert_eq!(fs::read(at.join("data")).unwrap(), fs::read(tree.join("data")).unwrap());
    let second = server().unwrap();
    assert_ne!(first, second);
    assert_eq!(capabilities(second), 0);
    let log = fs::read_to_string(burgeon.state().join("run/daemon.log")).unwrap();
    let found: Vec<_> = log.lines().filter(|line| line.starts_with("probe: __serve: ")).collect();
    assert_eq!(found, [SERVER_CAN; 2]);
    burgeon.umount(mounted);
}

/// The kernel gives a device to the next server when the last descriptor of it is closed.
#[test]
fn the_opener_keeps_no_device_and_may_die_with_the_server() {
    let space = Space::new("ublk-opener");
    let (burgeon, tree) = set_up(&space);
    let at = space.path("at");
    let before = numbers();
    let mounted = burgeon.mount("sample", &at, &["--read-only", "--transport", "ublk"]);
    let number = numbers().into_iter().find(|number| !before.contains(number)).unwrap();
    for _ in 0..3 {
        let (mut opener, mut server) = (None, None);
        let both = wait_until(PATIENCE, || {
            let status = burgeon.status();
            let id = |name: &str| status[name].as_u64().and_then(|id| u32::try_from(id).ok());
            (opener, server) = (id("opener_pid"), id("server_pid"));
            opener.is_some() && server.is_some()
        });
        assert!(both, "{:#}", burgeon.status());
        let opener = opener.unwrap();
        // Later kernels compare it.
        let device = Control::open().unwrap().device(number).unwrap().unwrap();
        assert_eq!(device.opener, Some(opener));
        let open = fs::read_dir(format!("/proc/{opener}/fd")).unwrap();
        let open: Vec<_> = open.filter_map(|fd| fs::read_link(fd.unwrap().path()).ok()).collect();
        let is_device = |path: &PathBuf| path.to_string_lossy().starts_with("/dev/ublk");
        assert!(!open.iter().any(is_device), "{open:?}");
        kill(opener);
        server.into_iter().for_each(kill);
        drop_caches();
        assert_eq!(fs::read(at.join("data")).unwrap(), fs::read(tree.join("data")).unwrap());
    }
    burgeon.umount(mounted);
}

#[test]
fn the_device_of_a_dead_daemon_is_found_and_removed_with_its_folder_or_without() {
    for folder_is_there in [true, false] {
        let space = Space::new("ublk-left");
        let (burgeon, _tree) = set_up(&space);
        let before = ublk_devices();
        let mounted = burgeon.mount("sample", &space.path("at"), &["--read-only"]);
        let device = burgeon.status()["mounts"][0]["device"].as_str().unwrap().to_owned();
        assert_ne!(ublk_devices(), before);
        burgeon.kill_daemon();
        let folders = burgeon.state().join("mounts");
        if !folder_is_there {
            // A mounted device is in use, even if its folder is lost.
            fs::remove_dir_all(&folders).unwrap();
            burgeon.ok(&["doctor", "--repair"]);
            assert_ne!(ublk_devices(), before);
        }
        drop(mounted);
        assert_ne!(ublk_devices(), before, "nobody lives who could remove it");
        let found = burgeon.run(&["doctor"]);
        assert!(found.code == Some(1) && found.stdout.contains(&device), "{found:#?}");
        burgeon.ok(&["doctor", "--repair"]);
        assert!(wait_until(PATIENCE, || ublk_devices() == before), "{:?}", ublk_devices());
        burgeon.ok(&["doctor"]);
    }
}
