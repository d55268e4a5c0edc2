//! The disk of the host's cache dies, is full or becomes read-only under readers: none of them
//! notices, the failure has a name, and a repaired disk is used again. Needs root.

#![allow(clippy::unwrap_used)]

use std::{
    fs::{self, File},
    path::{Path, PathBuf},
    process::Command,
    sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    thread,
};

use rustix::fs::{FallocateFlags, fallocate, statvfs};
use serde_json::Value;
use testkit::{
    Burgeon, Ends, Mounted, PATIENCE, Rng, Space, break_disk, drop_caches, kill,
    make_read_only_by_an_error, wait_until,
};

const PROGRAM: &str = env!("CARGO_BIN_EXE_burgeon");
const FILES: u64 = 24;
const FILE_LEN: usize = 1 << 20;
const ALL: u64 = FILES * FILE_LEN as u64;
const READERS: u64 = 4;

/// A mounted image whose cache lies on a disk of its own.
struct Host {
    burgeon: Burgeon,
    tree: PathBuf,
    at: PathBuf,
    mounted: Mounted,
    server: Value,
}

/// An image, and the folder of a cache below which a disk is to be mounted.
struct Built {
    burgeon: Burgeon,
    tree: PathBuf,
    at: PathBuf,
    folder: PathBuf,
}

impl Built {
    fn new(space: &Space) -> Self {
        let (store, state) = (space.path("store"), space.make_folder("state"));
        let burgeon = Burgeon::with_state(PROGRAM, state.clone()).option("--store").option(store);
        let tree = space.make_folder("tree");
        for number in 0..FILES {
            fs::write(tree.join(number.to_string()), Rng::new(number).bytes(FILE_LEN)).unwrap();
        }
        burgeon.build(&tree, "image");
        Self { burgeon, tree, at: space.path("at"), folder: state.join("cache") }
    }

    fn mount(self) -> Host {
        let Self { burgeon, tree, at, .. } = self;
        let mounted = mount(&burgeon, &at);
        let server = burgeon.status()["server_pid"].clone();
        Host { burgeon, tree, at, mounted, server }
    }
}

impl Host {
    fn cache(&self) -> Value {
        let said = self.burgeon.ok(&["cache", "status", "--json"]);
        serde_json::from_str::<Value>(&said).unwrap()["cache"].clone()
    }

    fn used(&self) -> u64 {
        self.cache()["used"].as_u64().unwrap()
    }

    fn state(&self) -> Value {
        self.burgeon.status()["mounts"][0]["cache"]["state"].clone()
    }

    fn read(&self, number: u64) {
        let name = number.to_string();
        let read = fs::read(self.at.join(&name)).unwrap();
        assert!(read == fs::read(self.tree.join(&name)).unwrap(), "{name}");
    }

    /// Every byte, neither from the page cache of the mount nor from that of the disk.
    fn read_all(&self) {
        drop_caches();
        (0..FILES).for_each(|number| self.read(number));
    }

    /// Does `break_it` beside readers, who go on until the failure has been noticed and all of the
    /// image was read once more.
    fn breaks(&self, break_it: impl FnOnce(), state: &str) {
        let (ends, passes) = (AtomicBool::new(false), AtomicU64::new(0));
        thread::scope(|scope| {
            // A failed assertion must end them, too.
            let end = Ends(&ends);
            for reader in 0..READERS {
                let (ends, passes) = (&ends, &passes);
                scope.spawn(move || {
                    while !ends.load(Relaxed) {
                        drop_caches();
                        (0..FILES).for_each(|number| self.read((number + 6 * reader) % FILES));
                        passes.fetch_add(1, Relaxed);
                    }
                });
            }
            assert!(wait_until(PATIENCE, || passes.load(Relaxed) > 0));
            break_it();
            assert!(wait_until(PATIENCE, || self.state() == state), "{:#}", self.burgeon.status());
            let then = passes.load(Relaxed);
            assert!(wait_until(PATIENCE, || passes.load(Relaxed) > then + READERS));
            drop(end);
        });
        self.read_all();
        self.is_named(state);
    }

    /// The failure has a name and a remedy, and no reader or server has died of it.
    fn is_named(&self, state: &str) {
        let status = self.burgeon.status();
        assert_eq!(status["mounts"][0]["reads"]["failed_reads"], 0, "{status:#}");
        assert_eq!(status["server_pid"], self.server, "the server lives");
        let said = self.burgeon.ok(&["status"]);
        let shown = if state == "stopped" { "STOPPED" } else { "FULL" };
        assert!(said.contains(shown), "{said}");
        let cache = self.cache();
        assert!(!cache["problem"].as_str().unwrap().is_empty(), "{cache:#}");
        let doctor = self.burgeon.run(&["doctor", "--json"]).stdout;
        let doctor: Value = serde_json::from_str(&doctor).unwrap();
        let findings = doctor["findings"].as_array().unwrap().iter();
        let is_bad = |finding: &&Value| finding["subject"] == "cache" && finding["level"] != "ok";
        let bad: Vec<_> = findings.filter(is_bad).collect();
        assert!(bad.iter().any(|finding| finding.to_string().contains("disk")), "{doctor:#}");
        let log = fs::read_to_string(self.burgeon.state().join("run/daemon.log")).unwrap();
        assert!(log.contains("caching is paused"), "{log}");
        let is_counted = || {
            let metrics = self.burgeon.ok(&["metrics"]);
            let errors = metrics.lines().find(|line| line.starts_with("burgeon_cache_write_err"));
            errors.is_some_and(|line| !line.ends_with(" 0"))
        };
        assert!(wait_until(PATIENCE, is_counted), "{}", self.burgeon.ok(&["metrics"]));
    }

    /// A server that finds the disk dead serves, too. Everything can be cached again after a
    /// restart on the repaired disk.
    fn restarts(self, repair: impl FnOnce()) {
        kill(self.server.as_u64().unwrap() as u32);
        self.read_all();
        let status = self.burgeon.status();
        assert_eq!(status["mounts"][0]["reads"]["failed_reads"], 0, "{status:#}");
        assert!(!self.cache()["problem"].as_str().unwrap().is_empty(), "{status:#}");
        self.burgeon.umount(self.mounted);
        self.burgeon.ok(&["shutdown"]);
        repair();
        let mounted = mount(&self.burgeon, &self.at);
        let host = Self { mounted, ..self };
        host.fills_again();
        host.ends();
    }

    fn fills_again(&self) {
        let is_full = || {
            self.read_all();
            self.used() >= ALL && self.state() == "writing"
        };
        assert!(wait_until(PATIENCE, is_full), "{:#}", self.cache());
        let before = self.cache()["read"]["hit"].as_u64().unwrap();
        self.read_all();
        let hit = self.cache()["read"]["hit"].as_u64().unwrap() - before;
        assert!(hit >= ALL / 10 * 9, "{hit}");
    }

    fn ends(self) {
        self.burgeon.umount(self.mounted);
        self.burgeon.ok(&["shutdown"]);
    }
}

fn mount(burgeon: &Burgeon, at: &Path) -> Mounted {
    burgeon.mount("image", at, &["--read-only", "--profile", "none"])
}

fn run(program: &str, arguments: &[&str], at: &Path) {
    let done = Command::new(program).args(arguments).arg(at).output().unwrap();
    assert!(done.status.success(), "{program} {arguments:?}: {done:?}");
}

/// A disk below the folder of a cache, which is shut down by the kernel under its readers.
fn is_shut_down(name: &str, mkfs: &[&str], size: u64) {
    let space = Space::new(name);
    let built = Built::new(&space);
    let folder = built.folder.clone();
    let disk = space.disk_with(&folder, size, mkfs);
    let host = built.mount();
    host.breaks(|| break_disk(&folder), "stopped");
    host.restarts(|| {
        drop(disk);
        // Its journal makes it whole.
        run("mount", &["-o", "loop", space.path("disk.img").to_str().unwrap()], &folder);
    });
    drop(Mounted::at(&folder));
}

#[test]
fn an_ext4_that_is_shut_down_costs_no_reader_an_error() {
    is_shut_down("cache-dies-ext4", &["mkfs.ext4", "-q", "-F"], 96 << 20);
}

#[test]
fn an_xfs_that_is_shut_down_costs_no_reader_an_error() {
    is_shut_down("cache-dies-xfs", &["mkfs.xfs", "-q"], 320 << 20);
}

#[test]
fn a_disk_that_becomes_read_only_costs_no_reader_an_error() {
    let space = Space::new("cache-read-only");
    let built = Built::new(&space);
    let folder = built.folder.clone();
    let disk = space.disk(&folder, 96 << 20);
    let host = built.mount();
    // Something has to be written, or nobody notices.
    let breaks = || {
        make_read_only_by_an_error(&folder);
        let _ = host.burgeon.run(&["cache", "evict", "8M"]);
    };
    host.breaks(breaks, "stopped");
    host.restarts(|| {
        drop(disk);
        let image = space.path("disk.img");
        // It corrects the error of which the kernel was told.
        let _ = Command::new("e2fsck").arg("-fy").arg(&image).output().unwrap();
        run("mount", &["-o", "loop", image.to_str().unwrap()], &folder);
    });
    drop(Mounted::at(&folder));
}

/// The disk is a sparse file on a file system that fills up: writes fail with `EIO`.
#[test]
fn a_disk_that_loses_its_backing_costs_no_reader_an_error() {
    let space = Space::new("cache-backing");
    let built = Built::new(&space);
    let folder = built.folder.clone();
    fs::create_dir_all(&folder).unwrap();
    let backing = space.small_disk("backing", 24 << 20);
    let image = backing.path().join("disk.img");
    File::create(&image).unwrap().set_len(96 << 20).unwrap();
    run("mkfs.ext4", &["-q", "-F"], &image);
    run("mount", &["-o", "loop", image.to_str().unwrap()], &folder);
    let disk = Mounted::at(&folder);
    let host = built.mount();
    host.breaks(|| (), "stopped");
    host.restarts(|| {
        run("mount", &["-o", "remount,size=128M"], backing.path());
        drop(disk);
        let _ = Command::new("e2fsck").arg("-fy").arg(&image).output().unwrap();
        run("mount", &["-o", "loop", image.to_str().unwrap()], &folder);
    });
    drop(Mounted::at(&folder));
}

/// A foreign file takes the last byte, without a floor that would warn; then it goes.
#[test]
fn a_disk_that_others_fill_to_the_last_byte_costs_no_reader_an_error() {
    let space = Space::new("cache-last-byte");
    let built = Built::new(&space);
    let folder = built.folder.clone();
    let disk = space.disk(&folder, 96 << 20);
    let host = built.mount();
    /// Free space that ext4 gives to nobody.
    const FILE_SYSTEMS: u64 = 4 << 20;
    let others = folder.join("others");
    let free = || {
        let disk = statvfs(&folder).unwrap();
        disk.f_bfree * disk.f_frsize
    };
    let fill = || {
        let file = File::create(&others).unwrap();
        // Root may take more than others, down to the last block.
        for step in [16 << 20, 1 << 20, 64 << 10, 4096] {
            let mut len = file.metadata().unwrap().len();
            while fallocate(&file, FallocateFlags::empty(), len, step).is_ok() {
                len += step;
            }
        }
    };
    (0..FILES).for_each(|number| host.read(number));
    fill();
    // They take all that the cache gives up, until it has nothing.
    let all_is_taken = || {
        fill();
        host.read_all();
        host.used() == 0 && free() < FILE_SYSTEMS
    };
    let is_full = wait_until(PATIENCE, all_is_taken);
    assert!(is_full, "{:#}, {} bytes are free", host.cache(), free());
    host.read_all();
    let status = host.burgeon.status();
    assert_eq!(status["mounts"][0]["reads"]["failed_reads"], 0, "{status:#}");
    assert_eq!(status["server_pid"], host.server);
    fs::remove_file(&others).unwrap();
    // No restart is needed. Chunks that were refused lie in memory, and would be read from there.
    let is_written = || {
        host.burgeon.ok(&["cache", "drop", "image"]);
        host.read_all();
        host.used() > ALL / 2
    };
    assert!(wait_until(PATIENCE, is_written), "{:#}", host.cache());
    host.fills_again();
    host.ends();
    drop(disk);
}
