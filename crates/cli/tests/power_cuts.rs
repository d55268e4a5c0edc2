//! ext4, XFS and btrfs on an accelerated device in write-back, whose slow device and cache device
//! lose power at once: of the writes that were not flushed, some are lost, and some are torn.
//!
//! ```text
//!   slow file ◄─ dm-log-writes ◄─┐
//!                                ├─ burgeon accelerate ◄─ file system: durable files, and others
//!   cache file ◄─ dm-log-writes ◄┘
//!   a cut: the server stops; a mark in both logs; it goes on. Afterwards both images of each cut are
//!   made of the logs, and looked at as another machine would.
//! ```
//!
//! `CUTS` is the number of cuts of each file system. `make soak` runs it in the lab, which has
//! dm-log-writes. Needs root and the Debian package dmsetup.

#![allow(clippy::unwrap_used)]

mod log_writes;
mod slow;

use std::{
    fs::{self, File, OpenOptions},
    path::{Path, PathBuf},
    process::Command,
    sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst},
    thread,
};

use log_writes::Logged;
use slow::{Ends, PROGRAM, Slow, content, file_of, mount, run, server_of};
use testkit::{Burgeon, PATIENCE, Rng, Space, wait_until};

/// Files, which are written again and again.
const FILES: u64 = 24;

fn cuts() -> u64 {
    std::env::var("CUTS").ok().and_then(|text| text.parse().ok()).unwrap_or(5)
}

#[test]
fn an_ext4_survives_power_cuts() {
    survives("cuts-ext4", &["mkfs.ext4", "-q", "-F"], &["e2fsck", "-fn"]);
}

#[test]
fn an_xfs_survives_power_cuts() {
    survives("cuts-xfs", &["mkfs.xfs", "-q", "-f"], &["xfs_repair", "-n", "-f"]);
}

#[test]
fn a_btrfs_survives_power_cuts() {
    survives("cuts-btrfs", &["mkfs.btrfs", "-q", "-f"], &["btrfs", "check", "-q"]);
}

/// A moment without power.
struct Cut {
    /// The first so many writes were durable before it.
    durable: u64,
    /// No later write had begun.
    begun: u64,
}

fn survives(name: &str, mkfs: &[&str], check: &[&str]) {
    run(Command::new("modprobe").args(["-a", "dm-log-writes"]));
    let space = Space::new(name);
    let slow = file_of(&space, "slow", 320);
    run(Command::new(mkfs[0]).args(&mkfs[1..]).arg(&slow));
    let cache = space.path("cache");
    let burgeon = Burgeon::new(PROGRAM, &space);
    let create = ["accelerate", "create", "fast", "--cache", cache.to_str().unwrap()];
    burgeon.ok(&[&create[..], &["--size", "48M", "--log-size", "12M"]].concat());
    burgeon.ok(&["accelerate", "destroy", "fast"]);
    // The cache is made on the device that logs.
    let (slow_base, cache_base) = (copy(&slow, "slow-base"), copy(&cache, "cache-base"));
    let logged = [(&slow, "slow"), (&cache, "cache")]
        .map(|(file, what)| Logged::over(file, &format!("{name}-{what}")));
    let cuts = write_and_cut(&space, &burgeon, name, &logged);
    let mut logs = logged.map(Logged::end);
    let bases = [&slow_base, &cache_base]
        .map(|path| OpenOptions::new().read(true).write(true).open(path).unwrap());
    let mut rng = Rng::new(name.len() as u64 * 7919);
    let mut lost = 0;
    for (number, cut) in cuts.iter().enumerate() {
        let mark = format!("cut-{number}");
        let images = [0, 1].map(|disk| {
            logs[disk].replay_until(&mark, &bases[disk]);
            let base = [&slow_base, &cache_base][disk];
            let image = copy(base, "cut");
            lost += logs[disk].lose_some(&mut rng, &image, &bases[disk]);
            image
        });
        is_whole_after(name, cut, &images, check);
        images.iter().for_each(|image| fs::remove_file(image).unwrap());
    }
    println!("{name}: {} cuts, {lost} writes that were not flushed", cuts.len());
    assert!(lost > 0, "nothing could be lost, so nothing was shown");
}

/// A copy beside it.
fn copy(from: &Path, extension: &str) -> PathBuf {
    let to = from.with_extension(extension);
    run(Command::new("cp").args(["--reflink=auto", "--sparse=always"]).arg(from).arg(&to));
    to
}

/// The bytes of write number `write`.
fn bytes_of(write: u64) -> Vec<u8> {
    content(write % FILES, write / FILES)
}

fn path_of(at: &Path, write: u64) -> PathBuf {
    at.join(format!("file-{}", write % FILES))
}

/// Writes files, each durably, beside a file that nobody flushes, and cuts the power meanwhile.
fn write_and_cut(space: &Space, burgeon: &Burgeon, name: &str, logged: &[Logged; 2]) -> Vec<Cut> {
    let ends = Ends(burgeon);
    let [slow, cache] = logged.each_ref().map(Logged::path);
    let (slow, cache) = (slow.to_str().unwrap(), cache.to_str().unwrap());
    burgeon.ok(&["accelerate", "create", "fast", "--cache", cache, "--log-size", "12M", "--force"]);
    let attach = ["accelerate", "attach", "fast", slow, "--name", name, "--mode", "write-back"];
    let device = PathBuf::from(burgeon.ok(&attach).trim());
    burgeon.ok(&["accelerate", "set", name, "dirty-limit=20%", "dirty-age=1"]);
    let at = space.make_folder("mnt");
    let mounted = mount(&device, &at);
    let (begun, durable, stop) = (AtomicU64::new(0), AtomicU64::new(0), AtomicBool::new(false));
    let made = thread::scope(|scope| {
        let writer = scope.spawn(|| {
            for write in (0..).take_while(|_| !stop.load(SeqCst)) {
                begun.store(write + 1, SeqCst);
                let path = path_of(&at, write);
                fs::write(&path, bytes_of(write)).unwrap();
                File::open(path).unwrap().sync_all().unwrap();
                durable.store(write + 1, SeqCst);
            }
        });
        let others = scope.spawn(|| {
            let to = format!("of={}", at.join("other").display());
            let how = ["bs=16k", "count=40", "oflag=direct", "conv=notrunc"];
            while !stop.load(SeqCst) {
                run(Command::new("dd").arg("if=/dev/urandom").arg(&to).args(how));
            }
        });
        let _ends = EndsWriters(&stop);
        let mut rng = Rng::new(5);
        let made: Vec<_> = (0..cuts())
            .map(|number| {
                let until = durable.load(SeqCst) + 3 + rng.below(12);
                let goes_on = || durable.load(SeqCst) >= until || writer.is_finished();
                assert!(wait_until(PATIENCE, goes_on), "nothing is written");
                let server = server_of(burgeon).unwrap();
                let durable = durable.load(SeqCst);
                let stopped = Stopped::new(server);
                assert!(wait_until(PATIENCE, || is_stopped(server)), "the server does not stop");
                let cut = Cut { durable, begun: begun.load(SeqCst) };
                logged.iter().for_each(|device| device.cut(&format!("cut-{number}")));
                drop(stopped);
                cut
            })
            .collect();
        stop.store(true, SeqCst);
        writer.join().unwrap();
        others.join().unwrap();
        made
    });
    drop(mounted);
    burgeon.ok(&["accelerate", "detach", name]);
    burgeon.ok(&["accelerate", "destroy", "fast"]);
    drop(ends);
    made
}

/// Ends the writers, also after a failure.
struct EndsWriters<'a>(&'a AtomicBool);

impl Drop for EndsWriters<'_> {
    fn drop(&mut self) {
        self.0.store(true, SeqCst);
    }
}

/// A process that does nothing as long as this lives.
struct Stopped(u32);

impl Stopped {
    fn new(process: u32) -> Self {
        run(Command::new("kill").arg("-STOP").arg(process.to_string()));
        Self(process)
    }
}

impl Drop for Stopped {
    fn drop(&mut self) {
        let _ = Command::new("kill").arg("-CONT").arg(self.0.to_string()).status();
    }
}

/// True if no thread runs, and none waits for a disk: then no request is on its way.
fn is_stopped(process: u32) -> bool {
    let threads = fs::read_dir(format!("/proc/{process}/task")).unwrap().flatten();
    threads.map(|thread| fs::read_to_string(thread.path().join("stat")).unwrap()).all(|stat| {
        let state = stat.rsplit(") ").next().unwrap();
        state.starts_with('T')
    })
}

/// Mounts and unmounts once; then every durable file is there, and the checker finds nothing, also
/// without the cache.
fn is_whole_after(name: &str, cut: &Cut, [slow, cache]: &[PathBuf; 2], check: &[&str]) {
    let space = Space::new(&format!("{name}-after"));
    let burgeon = Burgeon::new(PROGRAM, &space);
    let ends = Ends(&burgeon);
    let at = space.make_folder("mnt");
    let read = |device: &Path| {
        let mounted = mount(device, &at);
        let last = (0..FILES).filter_map(|file| {
            let is_its = |write: &u64| write % FILES == file;
            (0..cut.durable)
                .rev()
                .find(is_its)
                .filter(|_| !(cut.durable..cut.begun).any(|write| is_its(&write)))
        });
        for write in last {
            let bytes = fs::read(path_of(&at, write)).unwrap();
            assert!(bytes == bytes_of(write), "write {write} of {} is lost", cut.durable);
        }
        drop(mounted);
    };
    burgeon.ok(&["accelerate", "adopt", "fast", "--cache", cache.to_str().unwrap()]);
    let slow_path = slow.to_str().unwrap();
    let attach = ["accelerate", "attach", "fast", slow_path, "--name", name];
    let device = PathBuf::from(burgeon.ok(&attach).trim());
    read(&device);
    burgeon.ok(&["accelerate", "check", name]);
    burgeon.ok(&["accelerate", "detach", name]);
    run(Command::new(check[0]).args(&check[1..]).arg(slow));
    let alone = Slow::new(slow, &[]);
    read(&alone.path);
    drop(alone);
    burgeon.ok(&["accelerate", "destroy", "fast"]);
    drop(ends);
}
