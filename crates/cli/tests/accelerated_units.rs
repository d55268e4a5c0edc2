//! `burgeon accelerate` on a machine with systemd and udev: the lab. A slow device and the device
//! in front of it hold one file system; who mounts it by its UUID gets the one in front.

#![allow(clippy::unwrap_used)]

mod installed;

use std::{fs, path::PathBuf};

use installed::{INSTALLED, await_that, content, install, output, property, run};

const UUID: &str = "0b0e6c60-5f0a-4c3e-9d5e-2f6a4f0c7a11";
const AT: &str = "/mnt/data";

/// The device to which the link by the UUID leads.
fn by_uuid() -> Option<PathBuf> {
    fs::canonicalize(format!("/dev/disk/by-uuid/{UUID}")).ok()
}

/// True if systemd takes the device for ready.
fn is_ready(device: &str) -> bool {
    !run("udevadm", &["info", "--query=property", device]).contains("SYSTEMD_READY=0")
}

/// The units of caches.
fn units() -> String {
    let list = ["list-units", "--plain", "--no-legend", "--state=active", "burgeon-accelerate-*"];
    run("systemctl", &list)
}

#[test]
fn a_file_system_is_mounted_from_the_device_in_front() {
    install();
    let [slow, cache] = ["slow", "cache"].map(|name| format!("/tmp/accelerated-{name}"));
    run("truncate", &["--size=64M", &slow]);
    run("mkfs.ext4", &["-q", "-U", UUID, &slow]);
    let device = run("losetup", &["--find", "--show", &slow]);
    await_that("udev has found the file system", || by_uuid() == Some(PathBuf::from(&device)));
    assert!(is_ready(&device));

    run("burgeon", &["accelerate", "create", "fast", "--cache", &cache, "--size", "32M"]);
    let attach = ["accelerate", "attach", "fast", &device, "--name", "data"];
    run("burgeon", &attach);
    let front = fs::canonicalize("/dev/burgeon/data").unwrap();
    await_that("the link leads to the device in front", || by_uuid().as_ref() == Some(&front));
    await_that("systemd leaves the slow device alone", || !is_ready(&device));
    let unit = units().split(' ').next().unwrap().to_owned();
    assert!(unit.starts_with("burgeon-accelerate-fast-"), "{unit}");
    assert_eq!(property(&unit, "DefaultDependencies"), "no", "nothing stops it at shutdown");
    let command = fs::read(format!("/proc/{}/cmdline", property(&unit, "MainPID"))).unwrap();
    assert!(command.starts_with(b"@burgeon\0__accelerate-supervise\0"), "{command:?}");

    fs::create_dir_all(AT).unwrap();
    run("mount", &[&format!("UUID={UUID}"), AT]);
    let mounts = fs::read_to_string("/proc/self/mounts").unwrap();
    let line = mounts.lines().find(|line| line.contains(AT)).unwrap();
    assert!(line.starts_with(front.to_str().unwrap()), "{line}");
    fs::write(format!("{AT}/file"), content(1)).unwrap();
    let busy = output(INSTALLED, &["accelerate", "detach", "data"]);
    assert!(!busy.status.success(), "it is mounted");
    assert!(!is_ready(&device), "a detachment that is refused changes nothing");
    run("umount", &[AT]);
    run("burgeon", &["accelerate", "detach", "data"]);
    await_that("the slow device is back", || by_uuid() == Some(PathBuf::from(&device)));
    await_that("systemd may use it", || is_ready(&device));
    await_that("the unit has ended", || units().is_empty());

    // udev gives a ublk device no link by itself.
    run("burgeon", &[&attach[..], &["--transport", "ublk"]].concat());
    let over_ublk = fs::canonicalize("/dev/burgeon/data").unwrap();
    assert!(over_ublk.starts_with("/dev") && over_ublk != front, "{over_ublk:?}");
    await_that("the link leads to the ublk device", || by_uuid().as_ref() == Some(&over_ublk));
    run("burgeon", &["accelerate", "detach", "data"]);
    await_that("the slow device is back", || by_uuid() == Some(PathBuf::from(&device)));

    // Detached with newer content in the cache, it stays out of reach.
    run("burgeon", &["accelerate", "destroy", "fast"]);
    let create = ["accelerate", "create", "fast", "--cache", &cache, "--log-size", "8M"];
    run("burgeon", &create);
    run("burgeon", &[&attach[..], &["--mode", "write-back"]].concat());
    run("burgeon", &["accelerate", "set", "data", "dirty-limit=100%", "dirty-age=1000000"]);
    run("mount", &["/dev/burgeon/data", AT]);
    fs::write(format!("{AT}/newer"), content(2)).unwrap();
    run("umount", &[AT]);
    run("burgeon", &["accelerate", "detach", "data", "--leave-dirty"]);
    let is_dirty = run("burgeon", &["accelerate", "status"]).contains("NOT ATTACHED");
    run("udevadm", &["settle"]);
    assert_eq!(is_ready(&device), !is_dirty, "dirty: {is_dirty}");
    run("burgeon", &attach);
    run("burgeon", &["accelerate", "detach", "data"]);
    await_that("the slow device is back", || by_uuid() == Some(PathBuf::from(&device)));
    run("mount", &[&device, AT]);
    assert!(fs::read(format!("{AT}/newer")).unwrap() == content(2));
    run("umount", &[AT]);
    run("burgeon", &["accelerate", "destroy", "fast"]);
    run("losetup", &["--detach", &device]);
}
