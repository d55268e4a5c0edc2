//! `burgeon accelerate` over ublk: the kernel keeps the requests of dead processes, and the next
//! ones answer them. Needs `ublk_drv`, so the lab runs it on Linux 6.12. `make soak` has the other
//! tests of accelerated devices run over ublk, too.

#![allow(clippy::unwrap_used)]

mod slow;

use std::{
    fs::{self, File, OpenOptions},
    os::{
        fd::AsRawFd,
        unix::fs::{FileExt, OpenOptionsExt},
    },
    path::{Path, PathBuf},
    process::Command,
    sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst},
    thread,
    time::Duration,
};

use burgeon_block::Pages;
use rustix::fs::OFlags;
use serde_json::Value;
use slow::{
    Ends, MIB, PROGRAM, Slow, content, counter, file_of, is_dirty, kill_all, mount, read_files,
    replace_server, run, server_of, status,
};
use testkit::{Burgeon, PATIENCE, Rng, Space, kill, processes_with, ublk_devices, wait_until};

const BLKDISCARD: libc::c_ulong = 0x1277;
const BLKZEROOUT: libc::c_ulong = 0x127f;

/// A cache `fast` of 64 MiB with a log of 16 MiB.
fn create(burgeon: &Burgeon, space: &Space) {
    let cache = space.path("cache");
    let cache = ["accelerate", "create", "fast", "--cache", cache.to_str().unwrap()];
    burgeon.ok(&[&cache[..], &["--size", "64M", "--log-size", "16M"]].concat());
}

fn attach<'a>(slow: &'a str, name: &'a str, mode: &'a str) -> [&'a str; 9] {
    ["--json", "accelerate", "attach", "fast", slow, "--name", name, "--mode", mode]
}

/// Attaches a device over ublk, and returns the document.
fn attached(burgeon: &Burgeon, slow: &str, name: &str, mode: &str) -> Value {
    let document: Value = serde_json::from_str(&burgeon.ok(&attach(slow, name, mode))).unwrap();
    assert_eq!((&document["transport"], &document["mode"]), (&"ublk".into(), &mode.into()));
    document
}

fn device_of(document: &Value) -> PathBuf {
    let device = document["device"].as_str().unwrap();
    assert!(device.starts_with("/dev/ublkb"), "{device}");
    device.into()
}

/// Readers and writers wait until the next attachment, which takes the device over. Nothing is
/// lost, and nobody sees an error.
#[test]
fn an_xfs_in_write_back_goes_on_after_the_death_of_all_processes() {
    let space = Space::new("ublk-dead");
    let burgeon = Burgeon::new(PROGRAM, &space);
    let ends = Ends(&burgeon);
    let image = file_of(&space, "slow", 384);
    run(Command::new("mkfs.xfs").args(["-q", "-f"]).arg(&image));
    let slow = Slow::new(&image, &[]);
    create(&burgeon, &space);
    let device = device_of(&attached(&burgeon, slow.text(), "ublk-dead", "write-back"));
    let at = space.make_folder("mnt");
    let mounted = mount(&device, &at);
    let (stop, count) = (AtomicBool::new(false), AtomicU64::new(0));
    let write = || {
        for number in 0.. {
            let file = File::create(at.join(format!("file-{number}"))).unwrap();
            file.write_all_at(&content(number, 0), 0).unwrap();
            file.sync_all().unwrap();
            count.store(number + 1, SeqCst);
            if stop.load(SeqCst) {
                break;
            }
        }
    };
    thread::scope(|scope| {
        let writer = scope.spawn(write);
        for round in 1..=2 {
            let before = count.load(SeqCst);
            let goes_on = || count.load(SeqCst) > before + 3 || writer.is_finished();
            assert!(wait_until(PATIENCE, goes_on), "round {round}: nothing is written any more");
            kill_all(&burgeon);
            assert!(burgeon.ok(&["accelerate", "status"]).contains("ublk-dead"));
            burgeon.fails(&["accelerate", "destroy", "fast", "--accept-loss"], 5, "waits");
            let again = attached(&burgeon, slow.text(), "ublk-dead", "write-back");
            assert_eq!(device_of(&again), device, "it is another device");
            assert!(again["note"].as_str().unwrap().contains("had died"), "{again}");
        }
        stop.store(true, SeqCst);
        writer.join().unwrap();
    });
    let again = attach(slow.text(), "ublk-dead", "write-back");
    burgeon.fails(&again, 1, "is attached");
    let versions = vec![0; count.load(SeqCst) as usize];
    testkit::drop_caches();
    read_files(&at, &versions);
    burgeon.fails(&["accelerate", "detach", "ublk-dead"], 5, "unmount");
    drop(mounted);
    burgeon.ok(&["accelerate", "check", "ublk-dead"]);
    burgeon.ok(&["accelerate", "detach", "ublk-dead"]);
    assert!(!device.exists() && ublk_devices().is_empty(), "{:?}", ublk_devices());
    run(Command::new("xfs_repair").arg("-n").arg(&slow.path));
    let mounted = mount(&slow.path, &at);
    read_files(&at, &versions);
    drop(mounted);
    burgeon.ok(&["accelerate", "destroy", "fast"]);
    drop(ends);
}

/// The supervisor alone dies: the server goes on until the umount, and the device goes with it.
#[test]
fn a_server_without_its_supervisor_removes_its_device_after_the_last_umount() {
    let space = Space::new("ublk-orphan");
    let burgeon = Burgeon::new(PROGRAM, &space);
    let ends = Ends(&burgeon);
    let image = file_of(&space, "slow", 64);
    run(Command::new("mkfs.ext4").args(["-q", "-F"]).arg(&image));
    let slow = Slow::new(&image, &[]);
    create(&burgeon, &space);
    let device = device_of(&attached(&burgeon, slow.text(), "ublk-orphan", "write-back"));
    let at = space.make_folder("mnt");
    let mounted = mount(&device, &at);
    fs::write(at.join("file-0"), content(0, 0)).unwrap();
    let server = server_of(&burgeon).unwrap();
    processes_with(&burgeon.state().join("accelerate")).into_iter().for_each(kill);
    let mode = || status(&burgeon)["caches"][0]["devices"][0]["mode"].clone();
    assert!(wait_until(PATIENCE, || mode() == "write-through"), "it stays in write-back");
    fs::write(at.join("file-1"), content(1, 0)).unwrap();
    drop(mounted);
    let ended = || !Path::new(&format!("/proc/{server}")).exists();
    assert!(wait_until(PATIENCE, ended), "the server does not end");
    assert!(wait_until(PATIENCE, || !device.exists()), "its device is left");
    let mounted = mount(&slow.path, &at);
    read_files(&at, &[0, 0]);
    drop(mounted);
    // The next attachment removes the rest of the device.
    let again = attached(&burgeon, slow.text(), "ublk-orphan", "write-back");
    assert_eq!(ublk_devices().len(), 1, "{:?}", ublk_devices());
    assert!(device_of(&again).exists());
    burgeon.ok(&["accelerate", "detach", "ublk-orphan"]);
    assert!(ublk_devices().is_empty());
    burgeon.ok(&["accelerate", "destroy", "fast"]);
    drop(ends);
}

/// The device in front has the limits of the slow device, and takes all requests of a disk with a
/// volatile cache: compared byte by byte, while its server dies.
#[test]
fn every_request_reaches_the_slow_device() {
    let space = Space::new("ublk-requests");
    let burgeon = Burgeon::new(PROGRAM, &space);
    let ends = Ends(&burgeon);
    let image = file_of(&space, "slow", 8);
    let slow = Slow::new(&image, &["--sector-size", "4096"]);
    create(&burgeon, &space);
    for mode in ["write-back", "write-through", "write-around"] {
        let device = device_of(&attached(&burgeon, slow.text(), "ublk-requests", mode));
        let limit = |device: &Path, name: &str| {
            let device = device.file_name().unwrap().to_str().unwrap().to_owned();
            fs::read_to_string(format!("/sys/block/{device}/queue/{name}"))
                .unwrap()
                .trim()
                .to_owned()
        };
        for name in ["logical_block_size", "discard_granularity"] {
            assert_eq!(limit(&device, name), limit(&slow.path, name), "{name}");
        }
        assert_eq!(
            (limit(&device, "fua"), limit(&device, "write_cache")),
            ("1".into(), "write back".into())
        );
        let (mut rng, mut model) = (Rng::new(77), fs::read(&image).unwrap());
        let mut last = vec![""; model.len() / 4096];
        for step in 0..100 {
            change(&device, &mut rng, &mut model, &mut last);
            if step % 50 == 25 {
                replace_server(&burgeon);
            }
        }
        assert!(counter(&burgeon, "flushes") > 0 && counter(&burgeon, "erased_bytes") > 0);
        assert_eq!(mode == "write-back", is_dirty(&burgeon));
        burgeon.ok(&["accelerate", "detach", "ublk-requests"]);
        assert!(fs::read(&image).unwrap() == model, "{mode}: the slow device differs");
    }
    burgeon.ok(&["accelerate", "destroy", "fast"]);
    drop(ends);
}

/// A write, with FUA or not, a flush, an erasure, or a read.
fn change(device: &Path, rng: &mut Rng, model: &mut [u8], last: &mut [&str]) {
    let durable = if rng.below(4) == 0 { OFlags::DSYNC } else { OFlags::empty() };
    let flags = (OFlags::DIRECT | durable).bits() as i32;
    let file = OpenOptions::new().read(true).write(true).custom_flags(flags).open(device).unwrap();
    let blocks = model.len() as u64 / 4096;
    let first = rng.below(blocks);
    let count = (1 + rng.below(100)).min(blocks - first);
    let (at, len) = (first * 4096, count * 4096);
    let changed = &mut last[first as usize..(first + count) as usize];
    let known = &mut model[at as usize..(at + len) as usize];
    let mut pages = Pages::zeroed(len).unwrap();
    let bytes = &mut pages.bytes_mut()[..len as usize];
    match rng.below(8) {
        0..4 => {
            known.copy_from_slice(&rng.bytes(len as usize));
            bytes.copy_from_slice(known);
            file.write_all_at(bytes, at).unwrap();
            changed.fill("written");
        }
        4 => file.sync_all().unwrap(),
        kind @ 5..7 => {
            let request = if kind == 5 { BLKDISCARD } else { BLKZEROOUT };
            // SAFETY: both requests read two 64-bit numbers.
            let done = unsafe { libc::ioctl(file.as_raw_fd(), request as _, [at, len].as_ptr()) };
            assert_eq!(done, 0, "{}", std::io::Error::last_os_error());
            file.read_exact_at(bytes, at).unwrap();
            // A slow device may keep what was discarded.
            let is_erased = |(found, known): (&[u8], &[u8])| {
                found.iter().all(|byte| *byte == 0) || kind == 5 && found == known
            };
            assert!(bytes.chunks(4096).zip(known.chunks(4096)).all(is_erased), "{first}, {count}");
            known.copy_from_slice(bytes);
            changed.fill(if kind == 5 { "discarded" } else { "zeroed" });
        }
        _ => {
            file.read_exact_at(bytes, at).unwrap();
            let mut blocks = bytes.chunks(4096).zip(known.chunks(4096));
            if let Some(wrong) = blocks.position(|(found, known)| found != known) {
                let (number, last) = (first as usize + wrong, changed[wrong]);
                panic!("block {number}, of {first} and {count}, was last {last}");
            }
        }
    }
}

/// A server dies while it takes one device over and begins to serve another: `attach` fails or
/// succeeds, and nothing is left that waits for ever.
#[test]
fn a_server_that_dies_during_an_attachment_leaves_nothing() {
    let space = Space::new("ublk-start");
    let burgeon = Burgeon::new(PROGRAM, &space);
    let ends = Ends(&burgeon);
    let [first, image] = ["first", "slow"].map(|name| file_of(&space, name, 16));
    let [first, slow] = [&first, &image].map(|file| Slow::new(file, &[]));
    create(&burgeon, &space);
    // Another device keeps the supervisor.
    attached(&burgeon, first.text(), "ublk-first", "write-back");
    let mut deaths = 0;
    for round in 0..3u64 {
        let before = server_of(&burgeon).unwrap();
        let done = thread::scope(|scope| {
            let command = attach(slow.text(), "ublk-start", "write-back");
            let (burgeon, asked) = (&burgeon, command);
            let attaching = scope.spawn(move || burgeon.run(&asked));
            let current = || {
                let children = processes_with(Path::new("__accelerate-serve"));
                children.into_iter().find(|pid| *pid != before)
            };
            let found = wait_until(PATIENCE, || current().is_some() || attaching.is_finished());
            assert!(found, "no server begins");
            // Another moment each time.
            thread::sleep(Duration::from_millis(round * 120));
            let current = current();
            deaths += usize::from(current.is_some());
            current.into_iter().for_each(kill);
            attaching.join().unwrap()
        });
        let answers = || server_of(&burgeon).is_some();
        assert!(wait_until(PATIENCE, answers), "round {round}: no server: {done:#?}");
        if done.code == Some(0) {
            burgeon.ok(&["accelerate", "detach", "ublk-start"]);
        }
        assert_eq!(ublk_devices().len(), 1, "round {round}: {:?}: {done:#?}", ublk_devices());
    }
    assert!(deaths > 0, "no server has died during an attachment");
    let device = device_of(&attached(&burgeon, slow.text(), "ublk-start", "write-back"));
    assert_eq!(fs::read(&device).unwrap().len() as u64, 16 * MIB);
    burgeon.ok(&["accelerate", "detach", "ublk-start"]);
    burgeon.ok(&["accelerate", "detach", "ublk-first"]);
    assert!(ublk_devices().is_empty());
    burgeon.ok(&["accelerate", "destroy", "fast"]);
    drop(ends);
}
