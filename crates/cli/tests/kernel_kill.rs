//! kill -9 of the serving process, a hundred times (fewer in the lab), under load: no read fails,
//! no byte is wrong.
//!
//! The stall of the readers is printed and not asserted: it is the time of a `fork`, an `exec` and
//! a few reads of small files, which on a busy machine is the scheduler's and the disk's time, not
//! ours. The order of events is ours, and is asserted: a dead server costs exactly one new one, and
//! that one answers *every* reader, also those that were waiting when the old one died, before it
//! is killed in turn.

// Helpers outside test functions are tests, too.
#![allow(clippy::unwrap_used)]

use std::{
    path::Path,
    sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    thread,
    time::Duration,
};

use testkit::{
    AlignedBlock, Burgeon, Fio, PATIENCE, Pattern, Rng, Space, btrfs_check, kill, preload, scaled,
    ublk_expected, wait_until,
};

const BURGEON: &str = env!("CARGO_BIN_EXE_burgeon");
const READERS: usize = 3;

struct Load {
    pattern: Pattern,
    stop: AtomicBool,
    /// Done by each reader.
    reads: [AtomicU64; READERS],
    slowest_us: AtomicU64,
}

impl Load {
    /// Reads random blocks past the page cache and checks each, until told to stop.
    fn read(&self, path: &Path, reader: usize) {
        let seed = self.pattern.seed + reader as u64;
        let file = Pattern::open_direct(path).unwrap();
        let (mut rng, mut buffer) = (Rng::new(seed), AlignedBlock::default());
        while !self.stop.load(Relaxed) {
            let block = rng.below(self.pattern.blocks);
            let took = self.pattern.check(&file, block, &mut buffer);
            let took = took.unwrap_or_else(|error| panic!("reader {seed}: {error:#}"));
            self.reads[reader].fetch_add(1, Relaxed);
            self.slowest_us.fetch_max(took.as_micros() as u64, Relaxed);
        }
    }
}

impl Load {
    fn reads(&self) -> [u64; READERS] {
        std::array::from_fn(|reader| self.reads[reader].load(Relaxed))
    }
}

/// The serving process's id, once there is one that is not `old`.
fn server(burgeon: &Burgeon, old: Option<u64>) -> u64 {
    let mut pid = None;
    let there = wait_until(PATIENCE, || {
        let status = burgeon.status();
        pid = status["server_pid"].as_u64().filter(|pid| Some(*pid) != old);
        let serving = |mount: &serde_json::Value| mount["state"] == "serving";
        pid.is_some() && status["mounts"].as_array().is_some_and(|m| m.iter().all(serving))
    });
    assert!(there, "no serving process after {PATIENCE:?}: {}", burgeon.status());
    pid.unwrap_or_default()
}

#[test]
fn a_hundred_kills_under_load_cost_no_error() {
    let seed = 4242;
    let space = Space::new("kill");
    let burgeon = Burgeon::new(BURGEON, &space);
    let tree = space.make_folder("tree");
    let kills = scaled(100, 12);
    let pattern = Pattern { seed, blocks: scaled(1 << 17, 1 << 13) };
    pattern.write(&tree.join("pattern")).unwrap();
    burgeon.build(&tree, "pattern");
    std::fs::remove_dir_all(&tree).unwrap();
    let mounted = burgeon.mount("pattern", &space.path("at"), &["--write-limit", "1G", "--fill"]);
    let at = mounted.path();

    let load = Load {
        pattern,
        stop: AtomicBool::new(false),
        reads: Default::default(),
        slowest_us: AtomicU64::new(0),
    };
    let written = at.join("written");
    let fio = [
        "--rw=randwrite",
        "--bs=16k",
        scaled("--size=64m", "--size=8m"),
        "--ioengine=psync",
        "--direct=1",
        "--verify=crc32c",
        "--do_verify=1",
        "--verify_fatal=1",
        "--fsync=64",
    ];
    let mut rng = Rng::new(seed);
    let mut fio_runs = 0;
    let stop_on_panic = StopOnDrop(&load.stop);
    thread::scope(|scope| {
        for reader in 0..READERS {
            let (load, path) = (&load, at.join("pattern"));
            scope.spawn(move || load.read(&path, reader));
        }
        let writer = scope.spawn(|| {
            let mut runs = 0;
            while !load.stop.load(Relaxed) {
                let result = Fio::new(&written, &fio).run(space.folder());
                result.unwrap_or_else(|error| panic!("fio, run {runs}: {error:#}"));
                runs += 1;
            }
            runs
        });
        let _stop = StopOnDrop(&load.stop);
        let mut pid = server(&burgeon, None);
        for number in 0..kills {
            thread::sleep(Duration::from_millis(rng.below(150)));
            kill(pid as u32);
            pid = server(&burgeon, Some(pid));
            let before = load.reads();
            // The first of them may have waited since before the kill.
            let all = || load.reads().iter().zip(before).all(|(now, before)| *now >= before + 2);
            let answered = wait_until(PATIENCE, all);
            assert!(answered, "a reader waits after kill {number} of seed {seed}");
        }
        load.stop.store(true, Relaxed);
        fio_runs = writer.join().unwrap();
    });
    drop(stop_on_panic);

    let status = burgeon.status();
    let reads = &status["mounts"][0]["reads"];
    println!(
        "{} reads, slowest {} ms, {fio_runs} fio runs; {reads}",
        load.reads().iter().sum::<u64>(),
        load.slowest_us.load(Relaxed) / 1000
    );
    assert_eq!(reads["failed_reads"], 0, "{status}");
    assert_eq!(status["server_restarts"], kills, "one new server a kill: {status}");
    // Over ublk it is the kernel that issues them again, and nobody counts.
    let taken_over = ublk_expected() || reads["replayed"].as_u64().unwrap() > 0;
    assert!(taken_over, "no kill met a request in flight: {status}");
    btrfs_check(at).unwrap();
    burgeon.umount(mounted);
}

/// Ends the load when the test fails, too: a scope waits for its threads.
struct StopOnDrop<'a>(&'a AtomicBool);

impl Drop for StopOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Relaxed);
    }
}

#[test]
fn kills_during_mount_and_umount_leave_nothing_stuck() {
    let seed = 777;
    let space = Space::new("kill-mount");
    let burgeon = Burgeon::new(BURGEON, &space);
    let tree = space.make_folder("tree");
    let pattern = Pattern { seed, blocks: 2000 };
    pattern.write(&tree.join("pattern")).unwrap();
    burgeon.build(&tree, "pattern");
    let keep = burgeon.mount("pattern", &space.path("keep"), &["--read-only"]);
    let mut rng = Rng::new(seed);
    let at = space.make_folder("at");
    for round in 0..scaled(20, 4) {
        let pid = server(&burgeon, None);
        let killer = thread::spawn({
            let pause = Duration::from_micros(rng.below(120_000));
            move || {
                thread::sleep(pause);
                kill(pid as u32);
            }
        });
        let arguments = ["mount", "pattern", at.to_str().unwrap(), "--read-only"];
        let mounting = burgeon.run(&arguments);
        killer.join().unwrap();
        assert_eq!(mounting.code, Some(0), "round {round} of seed {seed}: {mounting:?}");
        let file = Pattern::open_direct(&at.join("pattern")).unwrap();
        let mut buffer = AlignedBlock::default();
        let block = rng.below(pattern.blocks);
        pattern.check(&file, block, &mut buffer).unwrap();
        drop(file);
        burgeon.ok(&["umount", at.to_str().unwrap()]);
    }
    burgeon.umount(keep);
}

/// A library to preload: the first process that makes a mount while the file `ONCE` is there kills
/// the server beside it, and waits for its end.
const KILLER: &str = r#"
#define _GNU_SOURCE
#include <dirent.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
static long read_of(const char *pid, const char *name, char *text, size_t len) {
    char path[300];
    snprintf(path, sizeof path, "/proc/%s/%s", pid, name);
    int fd = open(path, O_RDONLY);
    long got = fd < 0 ? -1 : read(fd, text, len - 1);
    if (fd >= 0) close(fd);
    text[got < 0 ? 0 : got] = 0;
    return got;
}
__attribute__((constructor)) static void kill_server(void) {
    char line[4096], stat[4096];
    long len = read_of("self", "cmdline", line, sizeof line);
    const char *once = getenv("ONCE");
    if (len <= 0 || !once || !memmem(line, len, "__help", 6) || unlink(once) != 0) return;
    DIR *all = opendir("/proc");
    for (struct dirent *entry; all && (entry = readdir(all));) {
        int parent = 0;
        len = read_of(entry->d_name, "cmdline", line, sizeof line);
        if (len <= 0 || !memmem(line, len, "__serve", 7)) continue;
        read_of(entry->d_name, "stat", stat, sizeof stat);
        char *end = strrchr(stat, ')');
        if (!end || sscanf(end, ") %*c %d", &parent) != 1 || parent != getppid()) continue;
        kill(atoi(entry->d_name), SIGKILL);
        while (read_of(entry->d_name, "cmdline", line, sizeof line) > 0) usleep(1000);
    }
    if (all) closedir(all);
}
"#;

/// On Linux 6.12 a ublk device whose server dies before its start is lost, and a read of it would
/// wait for ever.
#[test]
fn a_server_killed_before_its_device_starts_costs_the_mount_nothing() {
    let space = Space::new("kill-start");
    let burgeon = Burgeon::new(BURGEON, &space);
    let tree = space.make_folder("tree");
    let pattern = Pattern { seed: 778, blocks: 200 };
    pattern.write(&tree.join("pattern")).unwrap();
    burgeon.build(&tree, "pattern");
    let (at, once) = (space.make_folder("at"), space.path("once"));
    let library = preload(&space, KILLER);
    let mount = |arguments: &[&str]| {
        let mut command = burgeon.command(&["mount", "pattern", at.to_str().unwrap()]);
        command.args(arguments).envs(library.clone()).env("ONCE", &once);
        command.output().unwrap()
    };
    // The daemon starts, and with it processes that make no mount.
    assert!(mount(&["--read-only"]).status.success());
    burgeon.ok(&["umount", at.to_str().unwrap()]);
    for (round, writes) in
        [&["--read-only"][..], &["--writes", "w", "--write-limit", "256M"]].into_iter().enumerate()
    {
        std::fs::write(&once, "").unwrap();
        let mounting = mount(writes);
        assert!(mounting.status.success(), "{mounting:?}");
        assert!(!once.exists(), "no process of a mount has killed the server");
        let file = Pattern::open_direct(&at.join("pattern")).unwrap();
        pattern.check(&file, 7, &mut AlignedBlock::default()).unwrap();
        drop(file);
        let status = burgeon.status();
        assert_eq!(status["server_restarts"], round + 1, "{status:#}");
        assert_eq!(status["mounts"].as_array().map(Vec::len), Some(1), "{status:#}");
        burgeon.ok(&["umount", at.to_str().unwrap()]);
        assert_eq!(std::fs::read_dir(burgeon.state().join("mounts")).unwrap().count(), 0);
    }
    burgeon.ok(&["shutdown"]);
}
