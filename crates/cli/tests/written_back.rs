//! `burgeon accelerate` in write-back: what was flushed survives all processes, and is on the slow
//! device after `detach`. Needs root, and a kernel that sends the requests of a dead server again
//! (Linux 6.9).

#![allow(clippy::unwrap_used)]

mod slow;

use std::{
    fs::{self, File, OpenOptions},
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    process::Command,
    sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst},
    thread,
};

use burgeon_accelerator::{control::ControlRequest, folder::CacheFolder};
use serde_json::Value;
use slow::{
    Ends, MIB, PROGRAM, Slow, content, file_of, hash_of, is_dirty, kill_all, mount, read_files,
    replace_server, run, server_of, status, survives_its_server,
};
use testkit::{Burgeon, Mounted, PATIENCE, Space, kill, processes_with, wait_until};

/// A mode that the server has refused is not that of the next server.
#[test]
fn a_refused_mode_is_not_remembered() {
    let space = Space::new("back-refused");
    let burgeon = Burgeon::new(PROGRAM, &space);
    let ends = Ends(&burgeon);
    let cache = space.path("cache");
    let path = cache.to_str().unwrap();
    let create = ["accelerate", "create", "fast", "--cache", path, "--size", "16M"];
    burgeon.ok(&[&create[..], &["--log-size", "0"]].concat());
    let slow = file_of(&space, "slow", 16);
    let slow = slow.to_str().unwrap();
    let attach = ["accelerate", "attach", "fast", slow, "--name", "back-refused"];
    burgeon.ok(&[&attach[..], &["--mode", "write-around"]].concat());
    let set = burgeon.run(&["accelerate", "set", "back-refused", "mode=write-back"]);
    assert_ne!(set.code, Some(0), "{set:#?}");
    let first = server_of(&burgeon).unwrap();
    kill(first);
    let next = || server_of(&burgeon).is_some_and(|server| server != first);
    assert!(wait_until(PATIENCE, next), "no server follows");
    let mode = || {
        let text = burgeon.run(&["--json", "accelerate", "status"]).stdout;
        let document: Value = serde_json::from_str(&text).unwrap_or_default();
        document["caches"][0]["devices"][0]["mode"].clone()
    };
    assert!(wait_until(PATIENCE, || mode().is_string()), "the next server does not answer");
    assert_eq!(mode(), "write-around");
    burgeon.ok(&["accelerate", "detach", "back-refused"]);
    burgeon.ok(&["accelerate", "destroy", "fast"]);
    drop(ends);
}

/// The places of two cache devices are exchanged, as names of disks may be at a restart.
#[test]
fn a_cache_in_the_place_of_another_is_not_destroyed_for_it() {
    let space = Space::new("back-swap");
    let burgeon = Burgeon::new(PROGRAM, &space);
    let [one, two, away] = ["one", "two", "away"].map(|name| space.path(name));
    for (name, path) in [("one", &one), ("two", &two)] {
        let path = path.to_str().unwrap();
        burgeon.ok(&["accelerate", "create", name, "--cache", path, "--size", "16M"]);
    }
    for (from, to) in [(&one, &away), (&two, &one), (&away, &two)] {
        fs::rename(from, to).unwrap();
    }
    let before = [&one, &two].map(|path| hash_of(path));
    for name in ["one", "two"] {
        let done = burgeon.run(&["accelerate", "destroy", name, "--accept-loss"]);
        assert_eq!(done.code, Some(0), "{done:#?}");
        assert!(done.stderr.contains("is another cache device now"), "{done:#?}");
    }
    assert!([&one, &two].map(|path| hash_of(path)) == before);
}

/// Dirty blocks are written back on request alone.
const LAZY: [&str; 2] = ["dirty-limit=100%", "dirty-age=1000000"];

/// A cache `fast` with a log of a quarter.
fn create(burgeon: &Burgeon, space: &Space, mib: u64) -> PathBuf {
    let cache = space.path("cache");
    let (path, size) = (cache.to_str().unwrap(), format!("{mib}M"));
    let log = format!("{}M", mib / 4);
    burgeon.ok(&[
        "accelerate",
        "create",
        "fast",
        "--cache",
        path,
        "--size",
        &size,
        "--log-size",
        &log,
    ]);
    cache
}

/// The arguments that attach a device in write-back.
fn attach<'a>(slow: &'a str, name: &'a str) -> [&'a str; 10] {
    [
        "accelerate",
        "attach",
        "fast",
        slow,
        "--name",
        name,
        "--mode",
        "write-back",
        "--sequential-cutoff",
        "off",
    ]
}

/// Attaches it so; `None` where the kernel cannot, and says so.
fn attached(burgeon: &Burgeon, slow: &str, name: &str) -> Option<PathBuf> {
    let done = burgeon.ok(&[&["--json"], &attach(slow, name)[..]].concat());
    let done: Value = serde_json::from_str(&done).unwrap();
    let device = PathBuf::from(done["device"].as_str().unwrap());
    if done["mode"] == "write-back" {
        let set = ["accelerate", "set", name];
        burgeon.ok(&[&set[..], &LAZY].concat());
        return Some(device);
    }
    assert_eq!(done["mode"], "write-through");
    assert!(done["note"].as_str().unwrap().contains("Linux 6.9"), "{done}");
    burgeon.fails(&["accelerate", "set", name, "mode=write-back"], 4, "Linux 6.9");
    burgeon.ok(&["accelerate", "detach", name]);
    None
}

fn write_durably(path: &Path, bytes: &[u8]) {
    fs::write(path, bytes).unwrap();
    File::open(path).unwrap().sync_all().unwrap();
}

#[test]
fn an_ext4_in_write_back_survives_its_server() {
    let (mkfs, check) = (["mkfs.ext4", "-q", "-F"], ["e2fsck", "-fn"]);
    survives_its_server("back-ext4", "write-back", &mkfs, &check);
}

#[test]
fn an_xfs_in_write_back_survives_its_server() {
    survives_its_server("back-xfs", "write-back", &["mkfs.xfs", "-q", "-f"], &["xfs_repair", "-n"]);
}

/// All that was flushed lies in the log of the cache alone; nothing else gets at it, and it comes
/// back.
#[test]
fn flushed_writes_survive_supervisor_and_server() {
    let space = Space::new("back-dead");
    let burgeon = Burgeon::new(PROGRAM, &space);
    let ends = Ends(&burgeon);
    // The kernel would zero inode tables later, round the cache, and the parts of the device where
    // that happens tell nothing about it.
    let mkfs = ["-q", "-F", "-E", "nodiscard,lazy_itable_init=0,lazy_journal_init=0"];
    let image = file_of(&space, "slow", 64);
    run(Command::new("mkfs.ext4").args(mkfs).arg(&image));
    let slow = Slow::new(&image, &[]);
    let cache = create(&burgeon, &space, 64);
    let Some(device) = attached(&burgeon, slow.text(), "back-dead") else { return };
    let before = hash_of(&image);
    let at = space.make_folder("mnt");
    let mounted = mount(&device, &at);
    (0..8)
        .for_each(|number| write_durably(&at.join(format!("file-{number}")), &content(number, 0)));
    assert!(is_dirty(&burgeon) && hash_of(&image) == before, "it is written back already");
    let text = burgeon.ok(&["accelerate", "status"]);
    assert!(text.contains(" dirty since "), "{text}");
    kill_all(&burgeon);
    drop(mounted);
    assert!(hash_of(&image) == before, "the slow device was written to");

    // It is told, and nothing goes on without it.
    let text = burgeon.ok(&["accelerate", "status"]);
    assert!(text.contains("back-dead IS NOT ATTACHED"), "{text}");
    let doctor = burgeon.run(&["doctor"]);
    assert!(doctor.stdout.contains("has newer content of back-dead"), "{}", doctor.stdout);
    assert_eq!(doctor.code, Some(1));
    burgeon.fails(&["accelerate", "destroy", "fast"], 5, "--accept-loss");
    let path = cache.to_str().unwrap();
    let other = ["accelerate", "create", "other", "--cache", path, "--force"];
    burgeon.fails(&other, 5, "--accept-loss");
    let second = space.path("second");
    let second = second.to_str().unwrap();
    burgeon.ok(&["accelerate", "create", "second", "--cache", second, "--size", "16M"]);
    let elsewhere = ["accelerate", "attach", "second", slow.text(), "--name", "back-dead2"];
    burgeon.fails(&elsewhere, 5, "the cache fast has newer content");
    let over = ["accelerate", "create", "third", "--cache", slow.text(), "--force"];
    burgeon.fails(&over, 5, "the cache fast has newer content");
    let renamed = ["accelerate", "attach", "fast", slow.text(), "--name", "back-dead2"];
    burgeon.fails(&renamed, 5, "the cache fast has newer content");
    burgeon.ok(&["accelerate", "destroy", "second"]);
    let foreign = file_of(&space, "foreign", 64);
    run(Command::new("mkfs.ext4").args(mkfs).arg(&foreign));
    let unchanged = hash_of(&foreign);
    burgeon.fails(&attach(foreign.to_str().unwrap(), "back-dead"), 1, "this is another device");
    assert!(hash_of(&foreign) == unchanged, "another device was written to");

    // Its own device has everything.
    let device = attached(&burgeon, slow.text(), "back-dead").unwrap();
    assert!(is_dirty(&burgeon));
    let mounted = mount(&device, &at);
    read_files(&at, &[0; 8]);
    write_durably(&at.join("file-3"), &content(3, 1));
    drop(mounted);
    let seen = hash_of(&device);
    // The slow device lacks what is left in the cache, until it is detached in order.
    burgeon.ok(&["accelerate", "detach", "back-dead", "--leave-dirty"]);
    assert!(hash_of(&image) == before, "--leave-dirty writes back");
    assert!(burgeon.ok(&["accelerate", "status"]).contains("back-dead IS NOT ATTACHED"));
    // Without serving it, and not twice.
    let marks = || {
        let marks = fs::read_dir("/run/burgeon-accelerated").into_iter().flatten().flatten();
        marks.filter(|mark| fs::read(mark.path()).is_ok_and(|name| name == b"back-dead")).count()
    };
    assert!(marks() > 0, "udev is not told that the slow device lacks content");
    let offline = ["accelerate", "flush", "back-dead", "--offline"];
    burgeon.ok(&offline);
    assert_eq!(marks(), 0, "the slow device stays hidden");
    assert!(hash_of(&image) == seen, "the slow device differs");
    burgeon.fails(&offline, 3, "no cache has dirty blocks");
    assert!(!burgeon.ok(&["accelerate", "status"]).contains("NOT ATTACHED"));
    run(Command::new("e2fsck").args(["-fn"]).arg(&slow.path));
    let mounted = mount(&slow.path, &at);
    read_files(&at, &[0, 0, 0, 1, 0, 0, 0, 0]);
    drop(mounted);
    burgeon.ok(&["accelerate", "destroy", "fast"]);
    drop(ends);
}

/// All processes die in the middle of writes, again and again: each file whose `fsync` returned is
/// there.
#[test]
fn synced_files_survive_the_death_of_all_processes() {
    let space = Space::new("back-kill");
    let burgeon = Burgeon::new(PROGRAM, &space);
    let ends = Ends(&burgeon);
    let image = file_of(&space, "slow", 96);
    run(Command::new("mkfs.ext4").args(["-q", "-F"]).arg(&image));
    let slow = Slow::new(&image, &[]);
    create(&burgeon, &space, 64);
    let at = space.make_folder("mnt");
    let name = |round: u64, number: u64| at.join(format!("file-{round}-{number}"));
    let mut synced = Vec::new();
    for round in 0..3 {
        let Some(device) = attached(&burgeon, slow.text(), "back-kill") else { return };
        if round == 2 {
            // Its log is written back meanwhile.
            burgeon.ok(&["accelerate", "set", "back-kill", "dirty-limit=0%"]);
        }
        let mounted = mount(&device, &at);
        let count = AtomicU64::new(0);
        thread::scope(|scope| {
            let writer = scope.spawn(|| {
                for number in 0.. {
                    let written = File::create(name(round, number)).and_then(|file| {
                        file.write_all_at(&content(number % 60, round), 0)?;
                        file.sync_all()
                    });
                    if written.is_err() {
                        return;
                    }
                    count.store(number + 1, SeqCst);
                }
            });
            let enough = || count.load(SeqCst) >= 12 || writer.is_finished();
            assert!(wait_until(PATIENCE, enough), "nothing is written");
            kill_all(&burgeon);
        });
        drop(mounted);
        let count = count.load(SeqCst);
        assert!(count >= 12, "{count}");
        synced.extend((0..count).map(|number| (round, number)));
    }
    let device = attached(&burgeon, slow.text(), "back-kill").unwrap();
    let check = |device: &Path| {
        let mounted = mount(device, &at);
        for (round, number) in &synced {
            let bytes = fs::read(name(*round, *number)).unwrap();
            assert!(bytes == content(number % 60, *round), "file {number} of round {round}");
        }
        drop(mounted);
    };
    check(&device);
    let seen = hash_of(&device);
    burgeon.ok(&["accelerate", "detach", "back-kill"]);
    assert!(hash_of(&image) == seen, "the slow device differs");
    run(Command::new("e2fsck").args(["-fn"]).arg(&slow.path));
    check(&slow.path);
    burgeon.ok(&["accelerate", "destroy", "fast"]);
    drop(ends);
}

/// The server goes on in write-through, and writes everything back before it ends.
#[test]
fn a_server_without_its_supervisor_leaves_nothing_dirty() {
    let space = Space::new("back-orphan");
    let burgeon = Burgeon::new(PROGRAM, &space);
    let ends = Ends(&burgeon);
    let image = file_of(&space, "slow", 64);
    run(Command::new("mkfs.ext4").args(["-q", "-F"]).arg(&image));
    let slow = Slow::new(&image, &[]);
    create(&burgeon, &space, 64);
    let Some(device) = attached(&burgeon, slow.text(), "back-orphan") else { return };
    let at = space.make_folder("mnt");
    let mounted = mount(&device, &at);
    write_durably(&at.join("file-0"), &content(0, 0));
    assert!(is_dirty(&burgeon));
    let server = server_of(&burgeon).unwrap();
    processes_with(&burgeon.state().join("accelerate")).into_iter().for_each(kill);
    let mode = || status(&burgeon)["caches"][0]["devices"][0]["mode"].clone();
    assert!(wait_until(PATIENCE, || mode() == "write-through"), "it stays in write-back");
    burgeon.fails(&["accelerate", "set", "back-orphan", "mode=write-back"], 5, "supervisor");
    write_durably(&at.join("file-1"), &content(1, 0));
    drop(mounted);
    let ended = || !Path::new(&format!("/proc/{server}")).exists();
    assert!(wait_until(PATIENCE, ended), "the server does not end");
    let link = Path::new("/dev/burgeon/back-orphan");
    assert!(link.symlink_metadata().is_err(), "its link leads to the next user of that number");
    assert!(!burgeon.ok(&["accelerate", "status"]).contains("NOT ATTACHED"));
    let mounted = mount(&slow.path, &at);
    read_files(&at, &[0, 0]);
    drop(mounted);
    burgeon.ok(&["accelerate", "destroy", "fast"]);
    drop(ends);
}

/// A slow device without room keeps its dirty blocks, and keeps no other device from anything.
#[test]
fn a_slow_device_that_fails_is_told_and_stops_no_other() {
    let space = Space::new("back-full");
    let burgeon = Burgeon::new(PROGRAM, &space);
    let ends = Ends(&burgeon);
    let small = space.make_folder("small");
    run(Command::new("mount").args(["-t", "tmpfs", "-o", "size=4M", "none"]).arg(&small));
    let memory = Mounted::at(&small);
    let (full, good) = (small.join("slow"), file_of(&space, "good", 16));
    File::create(&full).unwrap().set_len(16 * MIB).unwrap();
    create(&burgeon, &space, 64);
    let Some(device) = attached(&burgeon, full.to_str().unwrap(), "back-full") else { return };
    let other = attached(&burgeon, good.to_str().unwrap(), "back-good").unwrap();
    let write = |device: &Path, mib: u64, byte: u8| {
        let file = OpenOptions::new().write(true).open(device).unwrap();
        (0..mib).for_each(|at| file.write_all_at(&vec![byte; MIB as usize], at * MIB).unwrap());
        file.sync_all().unwrap();
    };
    write(&device, 8, 7);
    write(&other, 8, 8);
    burgeon.fails(&["accelerate", "flush", "back-full"], 6, "slow");
    burgeon.ok(&["accelerate", "flush", "back-good"]);
    assert_eq!(fs::read(&good).unwrap()[..8 * MIB as usize], vec![8; 8 * MIB as usize]);
    // Also by itself, and beside a log that is full: all of the other's blocks three times.
    burgeon.ok(&["accelerate", "set", "back-good", "dirty-limit=0%"]);
    let is_told = || burgeon.ok(&["accelerate", "status"]).contains("NOT WRITTEN BACK");
    assert!(wait_until(PATIENCE, is_told), "the error is not told");
    (1..4).for_each(|byte| write(&other, 16, byte));
    burgeon.fails(&["accelerate", "detach", "back-full"], 6, "--leave-dirty");
    burgeon.ok(&["accelerate", "detach", "back-good"]);
    assert!(fs::read(&good).unwrap() == vec![3; 16 * MIB as usize], "the other device differs");
    run(Command::new("mount").args(["-o", "remount,size=32M"]).arg(&small));
    burgeon.ok(&["accelerate", "detach", "back-full"]);
    assert!(fs::read(&full).unwrap()[..8 * MIB as usize] == vec![7; 8 * MIB as usize]);
    burgeon.ok(&["accelerate", "destroy", "fast"]);
    drop(memory);
    drop(ends);
}

/// Bytes written before a flush are on the slow device after it, while a writer goes on and
/// servers die.
#[test]
fn a_flush_ends_under_writes() {
    let space = Space::new("back-flush");
    let burgeon = Burgeon::new(PROGRAM, &space);
    let ends = Ends(&burgeon);
    let image = file_of(&space, "slow", 16);
    create(&burgeon, &space, 64);
    let Some(device) = attached(&burgeon, image.to_str().unwrap(), "back-flush") else { return };
    let file = OpenOptions::new().read(true).write(true).open(&device).unwrap();
    let slow = File::open(&image).unwrap();
    let (stop, written) = (AtomicBool::new(false), AtomicU64::new(0));
    thread::scope(|scope| {
        scope.spawn(|| {
            let writer = file.try_clone().unwrap();
            for round in 1u64.. {
                for block in 256..1024 {
                    writer.write_all_at(&[round as u8; 4096], block * 4096).unwrap();
                }
                writer.sync_all().unwrap();
                written.store(round, SeqCst);
                if stop.load(SeqCst) {
                    break;
                }
            }
        });
        for round in 1..=6u8 {
            let before = written.load(SeqCst);
            file.write_all_at(&[round; 8192], u64::from(round) * 8192).unwrap();
            file.sync_all().unwrap();
            burgeon.ok(&["accelerate", "flush", "back-flush"]);
            let mut bytes = [0; 8192];
            slow.read_exact_at(&mut bytes, u64::from(round) * 8192).unwrap();
            assert!(bytes == [round; 8192], "round {round}");
            assert!(wait_until(PATIENCE, || written.load(SeqCst) > before), "the writer waits");
            if round % 2 == 0 {
                replace_server(&burgeon);
            }
        }
        stop.store(true, SeqCst);
    });
    // Settings outlive the servers; a live change of mode leaves nothing behind.
    let cache = status(&burgeon)["caches"][0].clone();
    assert_eq!((&cache["dirty_limit"], &cache["dirty_age"]), (&100.into(), &1_000_000.into()));
    burgeon.ok(&["accelerate", "set", "back-flush", "mode=write-through", "writeback-rate=64M"]);
    file.write_all_at(&[9; 4096], 0).unwrap();
    file.sync_all().unwrap();
    let mut bytes = [0; 4096];
    slow.read_exact_at(&mut bytes, 0).unwrap();
    assert!(bytes == [9; 4096], "a write in write-through is not on the slow device");
    burgeon.ok(&["accelerate", "set", "back-flush", "dirty-limit=0%"]);
    assert!(wait_until(PATIENCE, || !is_dirty(&burgeon)), "it stays dirty");
    let seen = hash_of(&device);
    drop(file);
    let folder = CacheFolder::of(burgeon.state(), "fast").unwrap();
    // Nothing is dirty any more, which is known a moment later.
    assert!(wait_until(PATIENCE, || folder.dirty().is_empty()), "it counts as dirty");
    assert!(folder.ask_server(&ControlRequest::Status).is_ok());
    burgeon.ok(&["accelerate", "detach", "back-flush"]);
    assert!(hash_of(&image) == seen, "the slow device differs");
    burgeon.ok(&["accelerate", "destroy", "fast"]);
    drop(ends);
}

/// The device of the cache is another one: what the former one had is not given up silently.
#[test]
fn a_cache_device_that_was_exchanged_is_refused() {
    let space = Space::new("back-gone");
    let burgeon = Burgeon::new(PROGRAM, &space);
    let ends = Ends(&burgeon);
    let image = file_of(&space, "slow", 16);
    let cache = create(&burgeon, &space, 64);
    let slow = image.to_str().unwrap();
    let Some(device) = attached(&burgeon, slow, "back-gone") else { return };
    let file = OpenOptions::new().write(true).open(&device).unwrap();
    file.write_all_at(&[5; 8192], 0).unwrap();
    file.sync_all().unwrap();
    drop(file);
    burgeon.ok(&["accelerate", "detach", "back-gone", "--leave-dirty"]);
    let away = space.path("away");
    fs::rename(&cache, &away).unwrap();
    burgeon.fails(&attach(slow, "back-gone"), 3, "cache");
    burgeon.fails(&["accelerate", "destroy", "fast"], 5, "--accept-loss");
    let path = cache.to_str().unwrap();
    burgeon.ok(&["accelerate", "create", "other", "--cache", path, "--size", "64M"]);
    burgeon.fails(&attach(slow, "back-gone"), 1, "on another cache device");
    let accepted = [&attach(slow, "back-gone")[..], &["--accept-loss"]].concat();
    burgeon.ok(&accepted);
    let device = fs::read_link("/dev/burgeon/back-gone").unwrap();
    let mut bytes = [1; 8192];
    File::open(device).unwrap().read_exact_at(&mut bytes, 0).unwrap();
    assert!(bytes == [0; 8192]);
    burgeon.ok(&["accelerate", "detach", "back-gone"]);
    burgeon.ok(&["accelerate", "destroy", "fast"]);
    burgeon.ok(&["accelerate", "destroy", "other"]);
    drop(ends);
}
