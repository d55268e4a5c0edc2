//! Two reboots of a real kernel, with mounts that come back: the lab, with systemd and a disk.
//!
//! ```text
//!   boot 1   installs; mounts by --persist and by a line of fstab; takes a store away ── reboot ─┐
//!            mounts a file system on a slow device with a cache in write-back
//!   boot 2   both are back, with their writes; the one without its store failed and heals; the slow device and
//!            its cache have all that was written  ── reboot ─┐
//!   boot 3   all three are back
//! ```
//! At each reboot a program uses a mount: it ends at systemd's last SIGTERM alone, and then still
//! reads data that nobody has fetched. The kernel's console shows whether everything was unmounted.

#![allow(clippy::unwrap_used)]

mod installed;

use std::{
    fs,
    os::unix::process::CommandExt,
    path::Path,
    process::{Command, Stdio},
    thread,
    time::Duration,
};

use installed::{await_that, content, drop_caches, install, output, property, run, tree};

/// On the root, which stays mounted to the end.
const FOLDER: &str = "/srv/reboot";
/// The mounts: of a unit of `--persist`, of a line of fstab, and of a unit whose store goes away.
const P: &str = "/mnt/p";
const F: &str = "/mnt/f";
const Q: &str = "/mnt/q";
/// The file system on an accelerated device.
const D: &str = "/mnt/d";

#[test]
fn mounts_outlive_reboots_and_the_programs_that_use_them() {
    let boot = std::env::var("LAB_BOOT").unwrap_or_default();
    match boot.as_str() {
        "1" => {
            prepare();
            accelerate();
            reboot("first", 6);
        }
        "2" => {
            assert_kept("first", 6);
            assert_accelerated();
            heal();
            reboot("second", 7);
        }
        "3" => {
            assert_kept("second", 7);
            assert_eq!(fs::read(format!("{Q}/5")).unwrap(), content(5), "mounted at boot");
        }
        _ => panic!("this test needs the lab with LAB_INIT=systemd and LAB_DISK_MB"),
    }
}

/// Installs the program, and mounts in both ways.
fn prepare() {
    install();
    run("systemctl", &["enable", "burgeon.service"]);
    tree();
    fs::create_dir_all(FOLDER).unwrap();
    [P, F, Q].into_iter().for_each(|at| fs::create_dir_all(at).unwrap());
    let [store, other] = ["store", "other"].map(|name| format!("{FOLDER}/{name}"));
    run("burgeon", &["build", "/tmp/tree", "tree", "--store", &store]);
    run("burgeon", &["build", "/tmp/tree", "tree", "--store", &other]);
    let writable = ["--writes", "p", "--write-limit", "256M", "--persist"];
    run("burgeon", &[&["mount", "tree", P, "--store", &store], &writable[..]].concat());
    run("burgeon", &["mount", "tree", Q, "--store", &other, "--read-only", "--persist"]);
    let line =
        format!("tree {F} burgeon _netdev,nofail,store={store},writes=f,write-limit=256M 0 0\n");
    fs::write("/etc/fstab", line).unwrap();
    run("systemctl", &["daemon-reload"]);
    run("mount", &["-a"]);
    // Its store is missing at the next boot.
    run("burgeon", &["umount", Q]);
    fs::rename(&other, format!("{FOLDER}/away")).unwrap();
}

/// Writes to both mounts, starts a program that keeps the first one busy, and reboots. The program
/// reads `file` of the image at its end.
fn reboot(generation: &str, file: u64) -> ! {
    for at in [P, F] {
        fs::write(format!("{at}/{generation}"), content(90)).unwrap();
    }
    fs::write(format!("{FOLDER}/expected"), content(file)).unwrap();
    // Its working directory, its shell's open file and its writes are on the mount.
    let script = format!(
        "cd {P} && exec 7>> {generation}.log || exit 1
         trap 'cmp {P}/{file} {FOLDER}/expected > {FOLDER}/last 2>&1 && echo read > {FOLDER}/last; sync; exit' TERM
         trap '' HUP INT
         echo begun >&7
         while :; do echo line >&7; sleep 0.2; done"
    );
    let mut user = Command::new("bash");
    user.args(["-c", &script]).process_group(0).stdin(Stdio::null()).stdout(Stdio::null());
    let mut user = user.stderr(Stdio::null()).spawn().unwrap();
    let log = format!("{P}/{generation}.log");
    await_that("a program uses the mount", || fs::read(&log).is_ok_and(|text| !text.is_empty()));
    let _ = fs::remove_file(format!("{FOLDER}/last"));
    drop_caches();
    run("systemctl", &["--no-block", "reboot"]);
    // The machine ends both processes.
    user.wait().unwrap();
    loop {
        thread::sleep(Duration::from_secs(1));
    }
}

/// The boot before has ended well, and its mounts are here.
fn assert_kept(generation: &str, file: u64) {
    let console = fs::read(std::env::var("LAB_CONSOLE").unwrap()).unwrap();
    let console = String::from_utf8_lossy(&console);
    for bad in [
        "Buffer I/O error",
        "BTRFS error",
        "BTRFS critical",
        "Could not detach",
        "blocked for more",
    ] {
        assert!(!console.contains(bad), "{console}");
    }
    let spared = "(burgeon) has been marked to be excluded from killing";
    assert!(console.contains(spared), "{console}");
    // systemd had ended all programs but ours: data that was never read came all the same.
    assert_eq!(
        fs::read_to_string(format!("{FOLDER}/last")).unwrap(),
        "read\n",
        "file {file}: {console}"
    );
    // Nothing waits, although the store of one is away.
    assert_eq!(property("multi-user.target", "ActiveState"), "active");
    for (at, unit) in [(P, "mnt-p.mount"), (F, "mnt-f.mount")] {
        // No target waits for it.
        await_that(at, || property(unit, "ActiveState") != "activating");
        assert_eq!(property(unit, "ActiveState"), "active", "{at}");
        assert_eq!(fs::read(format!("{at}/{generation}")).unwrap(), content(90), "{at}");
        drop_caches();
        assert_eq!(fs::read(format!("{at}/{}", file - 4)).unwrap(), content(file - 4), "{at}");
    }
    let log = fs::read_to_string(format!("{P}/{generation}.log")).unwrap();
    let (first, lines) = log.split_once('\n').unwrap();
    assert!(first == "begun" && lines.lines().all(|line| line == "line"), "{log:?}");
    let mounts = fs::read_to_string("/proc/self/mounts").unwrap();
    assert_eq!(mounts.matches(" btrfs ").count(), 2 + usize::from(Path::new(Q).join("0").exists()));
}

/// A file system on a device in front of a slow one, with a file that nobody has flushed.
fn accelerate() {
    let slow = format!("{FOLDER}/slow");
    run("truncate", &["--size=64M", &slow]);
    let cache = format!("{FOLDER}/cache");
    let create = ["accelerate", "create", "fast", "--cache", &cache, "--size", "64M"];
    run("burgeon", &[&create[..], &["--log-size", "16M"]].concat());
    attach(&["--mode", "write-back"]);
    run("mkfs.ext4", &["-q", "/dev/burgeon/data"]);
    fs::create_dir_all(D).unwrap();
    run("mount", &["/dev/burgeon/data", D]);
    fs::write(format!("{D}/file"), content(91)).unwrap();
}

/// Attaches the slow file by a loop device.
fn attach(more: &[&str]) {
    let device = run("losetup", &["--find", "--show", &format!("{FOLDER}/slow")]);
    let attach = ["accelerate", "attach", "fast", &device, "--name", "data"];
    run("burgeon", &[&attach[..], more].concat());
}

/// systemd has unmounted the file system before its devices went.
fn assert_accelerated() {
    attach(&[]);
    let state = run("dumpe2fs", &["-h", "/dev/burgeon/data"]);
    assert!(!state.contains("needs_recovery"), "it was not unmounted: {state}");
    run("mount", &["-o", "ro", "/dev/burgeon/data", D]);
    assert!(fs::read(format!("{D}/file")).unwrap() == content(91));
    run("umount", &[D]);
    run("burgeon", &["accelerate", "detach", "data"]);
}

/// The mount whose store was away failed, and comes with the store.
fn heal() {
    await_that("the mount without its store has failed", || {
        property("mnt-q.mount", "ActiveState") == "failed"
    });
    let said = output("burgeon", &["status"]);
    assert!(said.status.success(), "{said:?}");
    fs::rename(format!("{FOLDER}/away"), format!("{FOLDER}/other")).unwrap();
    await_that("systemd mounts it", || property("mnt-q.mount", "ActiveState") == "active");
    assert_eq!(fs::read(format!("{Q}/3")).unwrap(), content(3));
}
