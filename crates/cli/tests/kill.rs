//! Processes of the daemon are killed under load. What each death costs is what `docs/cli.md`
//! says.

#![allow(clippy::unwrap_used)]

use std::{
    collections::BTreeSet,
    fs::{self, File},
    os::unix::fs::{FileExt, OpenOptionsExt},
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering::SeqCst},
    },
    thread,
    time::{Duration, Instant},
};

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    fs::inotify,
    process::{Pid, PidfdFlags, Resource, Rlimit, Signal, kill_process, pidfd_open, prlimit},
};
use testkit::{Burgeon, Mounted, PATIENCE, Rng, Space, scaled, wait_until};

const PROGRAM: &str = env!("CARGO_BIN_EXE_burgeon");

/// Length of one read.
const READ_LEN: usize = 64 << 10;

/// Length of the file that is read.
fn file_len() -> u64 {
    scaled(24 << 20, 6 << 20)
}

/// A reader that goes around the page cache, so that every read reaches the daemon, and compares
/// all it gets.
struct Load {
    stop: Arc<AtomicBool>,
    reads: Arc<AtomicU64>,
    slowest_us: Arc<AtomicU64>,
    thread: thread::JoinHandle<Result<(), String>>,
}

impl Load {
    fn start(file: PathBuf, expected: Arc<Vec<u8>>, seed: u64) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let reads = Arc::new(AtomicU64::new(0));
        let slowest_us = Arc::new(AtomicU64::new(0));
        let (stop_here, reads_here, slowest) = (stop.clone(), reads.clone(), slowest_us.clone());
        let thread = thread::spawn(move || {
            let direct = 0o40000;
            let file = File::options().read(true).custom_flags(direct).open(&file);
            let file = file.map_err(|e| e.to_string())?;
            let mut rng = Rng::new(seed);
            let mut memory = vec![0u8; READ_LEN + 4096];
            let skip = memory.as_ptr().align_offset(4096);
            let buffer = &mut memory[skip..skip + READ_LEN];
            while !stop_here.load(SeqCst) {
                let at = rng.below(file_len() / READ_LEN as u64) * READ_LEN as u64;
                let begun = Instant::now();
                file.read_exact_at(buffer, at).map_err(|e| format!("at {at}: {e}"))?;
                slowest.fetch_max(begun.elapsed().as_micros() as u64, SeqCst);
                if buffer[..] != expected[at as usize..at as usize + READ_LEN] {
                    return Err(format!("wrong bytes at {at}"));
                }
                reads_here.fetch_add(1, SeqCst);
            }
            Ok(())
        });
        Self { stop, reads, slowest_us, thread }
    }

    /// Waits until `count` more reads are done.
    fn await_reads(&self, count: u64) {
        let goal = self.reads.load(SeqCst) + count;
        let done =
            wait_until(PATIENCE, || self.reads.load(SeqCst) >= goal || self.thread.is_finished());
        assert!(done, "the reader hangs");
    }

    fn finish(self) -> (u64, u64) {
        self.stop.store(true, SeqCst);
        self.thread.join().unwrap().unwrap();
        (self.reads.load(SeqCst), self.slowest_us.load(SeqCst))
    }
}

struct Set {
    burgeon: Burgeon,
    at: PathBuf,
    mounted: Mounted,
    expected: Arc<Vec<u8>>,
}

fn set_up(space: &Space, seed: u64, options: &[&str]) -> Set {
    let tree = space.make_folder("tree");
    let mut expected = vec![0; file_len() as usize];
    Rng::new(seed).fill(&mut expected);
    fs::write(tree.join("data"), &expected).unwrap();
    let burgeon = Burgeon::new(PROGRAM, space);
    burgeon.build(&tree, "sample");
    let at = space.path("at");
    let mounted = burgeon.mount("sample", &at, options);
    Set { burgeon, at, mounted, expected: Arc::new(expected) }
}

fn pid(burgeon: &Burgeon, which: &str) -> Option<i32> {
    burgeon.status()[which].as_i64().and_then(|pid| i32::try_from(pid).ok())
}

fn kill(pid: i32) {
    testkit::kill(pid as u32);
}

fn drop_caches() {
    fs::write("/proc/sys/vm/drop_caches", "3").unwrap();
}

#[test]
fn killing_the_server_under_load_costs_no_error() {
    let space = Space::new("kill-server");
    let seed = 7;
    let Set { burgeon, at, mounted, expected } =
        set_up(&space, seed, &["--writes", "w", "--write-limit", "256M"]);
    let loads: Vec<_> =
        (0..3).map(|n| Load::start(at.join("data"), expected.clone(), seed + n)).collect();
    for round in 0..scaled(8, 3) {
        loads.iter().for_each(|load| load.await_reads(20));
        let server = pid(&burgeon, "server_pid");
        server.into_iter().for_each(kill);
        // Writes and commits go on meanwhile; they need no server at all.
        let path = at.join(format!("written-{round}"));
        let file = File::create(&path).unwrap();
        file.write_all_at(format!("{round}").as_bytes(), 0).unwrap();
        file.sync_all().unwrap();
        let next = wait_until(PATIENCE, || {
            pid(&burgeon, "server_pid").is_some_and(|next| Some(next) != server)
        });
        assert!(next, "no new server after round {round}, seed {seed}");
    }
    for load in loads {
        load.await_reads(20);
        let (reads, slowest_us) = load.finish();
        println!("{reads} reads, the slowest took {slowest_us} µs");
    }
    let status = burgeon.status();
    assert_eq!(status["mounts"][0]["reads"]["failed_reads"], 0, "{status:#}");
    assert!(status["server_restarts"].as_u64().unwrap() >= scaled(8, 3), "{status:#}");
    burgeon.umount(mounted);
}

#[test]
fn killing_the_supervisor_costs_nothing_and_the_next_one_takes_over() {
    let space = Space::new("kill-supervisor");
    let Set { burgeon, at, mounted, expected } =
        set_up(&space, 8, &["--writes", "w", "--write-limit", "256M"]);
    let load = Load::start(at.join("data"), expected, 8);
    load.await_reads(20);
    let server = pid(&burgeon, "server_pid");
    pid(&burgeon, "supervisor_pid").into_iter().for_each(kill);
    load.await_reads(50);
    assert_eq!(burgeon.run(&["doctor"]).code, Some(1));
    burgeon.ok(&["doctor", "--repair"]);
    load.await_reads(50);
    assert_eq!(pid(&burgeon, "server_pid"), server, "the server was not adopted");
    let mount = &burgeon.status()["mounts"][0];
    assert_eq!(mount["target"], at.to_str().unwrap());
    assert_eq!(mount["writes"]["name"], "w");
    // The adopted mount is as good as any: its server may die, and it can be unmounted.
    server.into_iter().for_each(kill);
    load.await_reads(50);
    load.finish();
    burgeon.umount(mounted);
}

#[test]
fn a_supervisor_dies_and_the_user_unmounts_before_there_is_another() {
    let space = Space::new("kill-umount");
    let Set { burgeon, at, mounted, .. } = set_up(&space, 9, &["--read-only"]);
    pid(&burgeon, "supervisor_pid").into_iter().for_each(kill);
    rustix::mount::unmount(&at, rustix::mount::UnmountFlags::empty()).unwrap();
    std::mem::forget(mounted);
    let gone = wait_until(PATIENCE, || burgeon.processes().is_empty());
    assert!(gone, "the orphan stays without a mount to serve: {:?}", burgeon.processes());
    burgeon.ok(&["doctor", "--repair"]);
    burgeon.ok(&["doctor"]);
    assert_eq!(fs::read_dir(burgeon.state().join("mounts")).unwrap().count(), 0);
}

#[test]
fn a_supervisor_that_cannot_start_a_thread_ends_and_the_next_one_takes_over() {
    let space = Space::new("no-threads");
    let set = set_up(&space, 5, &["--read-only", "--transport", "fuse"]);
    let (burgeon, at) = (&set.burgeon, set.mounted.path().to_path_buf());
    let supervisor = pid(burgeon, "supervisor_pid").unwrap();
    // Without memory for a stack, the thread that would take away what is unmounted cannot begin.
    let nothing = Rlimit { current: Some(0), maximum: Some(0) };
    prlimit(Pid::from_raw(supervisor), Resource::As, nothing).unwrap();
    rustix::mount::unmount(&at, rustix::mount::UnmountFlags::empty()).unwrap();
    std::mem::forget(set.mounted);
    assert!(wait_until(PATIENCE, || !burgeon.processes().contains(&(supervisor as u32))));
    let released = wait_until(PATIENCE, || {
        burgeon.ok(&["doctor", "--repair"]);
        fs::read_dir(burgeon.state().join("mounts")).unwrap().count() == 0
    });
    assert!(released);
}

#[test]
fn a_supervisor_that_does_not_answer_is_named_by_doctor() {
    let space = Space::new("stopped");
    let set = set_up(&space, 6, &["--read-only"]);
    let supervisor = pid(&set.burgeon, "supervisor_pid").unwrap();
    kill_process(Pid::from_raw(supervisor).unwrap(), Signal::STOP).unwrap();
    let found = set.burgeon.run(&["doctor"]);
    kill_process(Pid::from_raw(supervisor).unwrap(), Signal::CONT).unwrap();
    assert_eq!(found.code, Some(1), "{found:?}");
    let said = format!("PROBLEM  daemon: process {supervisor} does not answer");
    assert!(found.stdout.contains(&said), "{found:?}");
    set.burgeon.ok(&["doctor"]);
    set.burgeon.umount(set.mounted);
}

#[test]
fn killing_both_costs_errors_or_time_until_the_next_daemon() {
    let space = Space::new("kill-both");
    let Set { burgeon, at, mounted, expected } =
        set_up(&space, 10, &["--writes", "w", "--write-limit", "256M"]);
    fs::write(at.join("kept"), "by the sprout").unwrap();
    let waits = burgeon.status()["mounts"][0]["transport"] == "ublk";
    burgeon.kill_daemon();
    drop_caches();
    // Over ublk the kernel keeps the requests for the next server.
    let path = at.join("data");
    let mut reader = Some(thread::spawn(move || fs::read(path)));
    if !waits {
        let error = reader.take().unwrap().join().unwrap().unwrap_err();
        assert_eq!(error.raw_os_error(), Some(5), "{error}");
    }
    // Metadata and writes are local: they go on.
    assert_eq!(fs::read(at.join("kept")).unwrap(), b"by the sprout");
    write_synced(&at.join("written-without-a-server"));
    let status = burgeon.status();
    assert_eq!(status["mounts_without_daemon"], 1, "{status:#}");
    burgeon.fails(&["writes", "rm", "w"], 5, "unmount");
    let list = burgeon.ok(&["writes", "list"]);
    assert!(list.contains("mounted") && !list.contains("kept"), "{list}");
    assert!(reader.as_ref().is_none_or(|reader| !reader.is_finished()), "it did not wait");
    burgeon.ok(&["doctor", "--repair"]);
    if let Some(reader) = reader {
        assert!(reader.join().unwrap().unwrap() == *expected, "it waited, for wrong bytes");
    }
    drop_caches();
    let back = fs::read(at.join("data"));
    assert!(back.is_ok_and(|bytes| bytes == *expected), "it was said to be served again");
    burgeon.ok(&["doctor"]);
    burgeon.umount(mounted);
    let mounted = burgeon.mount("sample", &at, &["--writes", "w"]);
    assert_eq!(fs::read(at.join("kept")).unwrap(), b"by the sprout");
    assert!(at.join("written-without-a-server").exists());
    burgeon.umount(mounted);
}

#[test]
fn a_repaired_mount_is_served_when_that_is_said() {
    let space = Space::new("kill-repaired");
    let writable = ["--write-limit", "256M", "--transport", "fuse"];
    let Set { burgeon, at, mounted, expected } = set_up(&space, 15, &writable);
    let others: Vec<_> = (0..4)
        .map(|n| space.path(&format!("at-{n}")))
        .map(|at| burgeon.mount("sample", &at, &["--read-only", "--transport", "fuse"]))
        .collect();
    burgeon.kill_daemon();
    drop_caches();
    let said = burgeon.ok(&["doctor", "--repair"]);
    let places = others.iter().map(|mounted| mounted.path()).chain([at.as_path()]);
    for at in places {
        assert!(said.contains(&format!("repaired  mount {}: start", at.display())), "{said}");
        let data = fs::read(at.join("data"));
        assert!(data.is_ok_and(|data| data == *expected), "{} is not served", at.display());
    }
    others.into_iter().chain([mounted]).for_each(|mounted| burgeon.umount(mounted));
}

#[test]
fn mounting_the_same_again_brings_back_what_a_killed_daemon_has_left() {
    let space = Space::new("bring-back");
    let Set { burgeon, at, mounted, expected } =
        set_up(&space, 12, &["--writes", "w", "--write-limit", "256M"]);
    fs::write(at.join("kept"), "by the sprout").unwrap();
    let open = fs::File::open(at.join("kept")).unwrap();
    burgeon.kill_daemon();
    drop_caches();
    let path = at.to_str().unwrap();
    // Something else is refused, and the answer says what brings it back.
    burgeon.fails(&["mount", "sample", path], 5, "has lost its daemon; mount the same again");
    burgeon.fails(&["mount", "other", path, "--writes", "w"], 5, "\"w\" is mounted there");
    let said = burgeon.ok(&["mount", "sample", path, "--writes", "w"]);
    assert!(said.contains("brought back"), "{said}");
    assert!(fs::read(at.join("data")).unwrap() == expected[..]);
    assert_eq!(burgeon.status()["mounts"][0]["state"], "serving");
    assert_eq!(std::io::read_to_string(open).unwrap(), "by the sprout");
    burgeon.fails(&["mount", "sample", path, "--writes", "w"], 5, "mounted there already");
    burgeon.umount(mounted);
}

#[test]
fn umount_takes_the_folder_away_where_no_daemon_does() {
    let space = Space::new("kill-umount");
    for (with_server, writes) in [(false, &["--writes", "w"][..]), (true, &[])] {
        let options = [writes, &["--write-limit", "256M"]].concat();
        let Set { burgeon, at, mounted, .. } = set_up(&space, 12, &options);
        let server = pid(&burgeon, "server_pid").filter(|_| with_server);
        pid(&burgeon, "supervisor_pid").into_iter().for_each(kill);
        server.into_iter().for_each(kill);
        let folders = || fs::read_dir(burgeon.state().join("mounts")).unwrap().count();
        assert_eq!(folders(), 1);
        let said = burgeon.ok(&["umount", at.to_str().unwrap()]);
        std::mem::forget(mounted);
        let kept = if writes.is_empty() { "discarded" } else { "kept as \"w\"" };
        assert!(said.contains(kept), "{said}");
        assert_eq!(folders(), 0, "server killed, too: {with_server}");
        assert!(wait_until(PATIENCE, || burgeon.processes().is_empty()));
        // The lock that was taken to clear up is in nobody's way.
        let again = burgeon.mount("sample", &at, &["--read-only"]);
        burgeon.umount(again);
    }
}

/// What the kernel has not yet taken apart of a killed supervisor: its lock is held, and its socket
/// takes connections, which nobody answers.
#[test]
fn umount_waits_for_a_supervisor_that_is_dying() {
    let space = Space::new("kill-dying");
    let Set { burgeon, at, mounted, .. } = set_up(&space, 14, &["--write-limit", "256M"]);
    pid(&burgeon, "supervisor_pid").into_iter().for_each(kill);
    let run = burgeon.state().join("run");
    let lock = File::open(run.join("lock")).unwrap();
    assert!(wait_until(PATIENCE, || {
        rustix::fs::flock(&lock, rustix::fs::FlockOperation::NonBlockingLockExclusive).is_ok()
    }));
    let socket = run.join("api.sock");
    fs::remove_file(&socket).unwrap();
    let listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
    let opened = inotify::init(inotify::CreateFlags::NONBLOCK).unwrap();
    inotify::add_watch(&opened, run.join("lock"), inotify::WatchFlags::OPEN).unwrap();
    let ended = Arc::new(AtomicBool::new(false));
    let dying = thread::spawn({
        let ended = ended.clone();
        move || {
            drop(listener.accept().unwrap());
            drop(listener);
            // Whoever has tried to take the lock in vain tries again.
            let (mut tries, mut event) = (0, [0; 64]);
            wait_until(PATIENCE, || {
                tries += u32::from(rustix::io::read(&opened, &mut event).is_ok());
                tries > 1 || ended.load(SeqCst)
            });
            drop(lock);
        }
    });
    let said = burgeon.ok(&["umount", at.to_str().unwrap()]);
    ended.store(true, SeqCst);
    std::mem::forget(mounted);
    dying.join().unwrap();
    assert!(said.contains("discarded"), "{said}");
    assert_eq!(fs::read_dir(burgeon.state().join("mounts")).unwrap().count(), 0);
    assert!(wait_until(PATIENCE, || burgeon.processes().is_empty()));
}

#[test]
fn a_live_mount_whose_record_is_damaged_is_left_alone() {
    let space = Space::new("kill-record");
    let Set { burgeon, at, mounted, .. } =
        set_up(&space, 13, &["--writes", "w", "--write-limit", "256M"]);
    write_synced(&at.join("kept"));
    let server = pid(&burgeon, "server_pid");
    pid(&burgeon, "supervisor_pid").into_iter().for_each(kill);
    server.into_iter().for_each(kill);
    let folders = || {
        let entries = fs::read_dir(burgeon.state().join("mounts")).unwrap();
        entries.map(|entry| entry.unwrap().path()).collect::<Vec<_>>()
    };
    let folder = folders().remove(0);
    fs::write(folder.join("mount.json"), "{").unwrap();
    // A server that is dying may still be reached.
    let is_found = || {
        let found = burgeon.run(&["doctor"]);
        found.code == Some(1) && found.stdout.contains("unmount it")
    };
    assert!(wait_until(PATIENCE, is_found), "{:#?}", burgeon.run(&["doctor"]));
    // Any start of the daemon clears up after mounts that are gone; this one is not.
    let other = space.path("other");
    let mounted_other = burgeon.mount("sample", &other, &["--read-only"]);
    assert!(folders().contains(&folder));
    let again = ["mount", "sample", space.make_folder("again").to_str().unwrap(), "--writes", "w"]
        .map(str::to_owned);
    burgeon.fails(&again, 5, "are mounted on");
    write_synced(&at.join("written"));
    burgeon.umount(mounted);
    assert!(wait_until(PATIENCE, || !folder.exists()), "{:?}", folders());
    burgeon.umount(mounted_other);
    let mounted = burgeon.mount("sample", &at, &["--writes", "w"]);
    assert!(at.join("kept").exists() && at.join("written").exists());
    burgeon.umount(mounted);
}

/// A library to preload. `AT_THAW` names who dies where a file system is about to be thawed: the
/// process that does it, or the supervisor, for which it waits. The first server that has read the
/// question for the FUSE file's attributes removes the file `AT_ATTRIBUTES`, and does not answer.
const FAULTS: &str = r#"
#define _GNU_SOURCE
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>
static int is_helper(void) {
    char line[4096] = {0};
    int fd = open("/proc/self/cmdline", O_RDONLY);
    long len = read(fd, line, sizeof line - 1);
    close(fd);
    return len > 0 && memmem(line, len, "__help", 6) != NULL;
}
int ioctl(int fd, unsigned long request, ...) {
    va_list list;
    va_start(list, request);
    void *argument = va_arg(list, void *);
    va_end(list);
    const char *who = getenv("AT_THAW");
    if ((unsigned int)request == 0xc0045878u && who) {
        pid_t parent = getppid();
        if (!strcmp(who, "itself") || !is_helper()) kill(getpid(), SIGKILL);
        kill(parent, SIGKILL);
        while (getppid() == parent) usleep(1000);
    }
    return syscall(SYS_ioctl, fd, request, argument);
}
ssize_t readv(int fd, const struct iovec *parts, int count) {
    long len = syscall(SYS_readv, fd, parts, count);
    const char *file = getenv("AT_ATTRIBUTES");
    if (len >= 40 && file && ((unsigned int *)parts[0].iov_base)[1] == 3 && !unlink(file))
        for (;;) pause();
    return len;
}
"#;

/// Makes the library of [`FAULTS`].
fn faults(space: &Space) -> PathBuf {
    let (source, library) = (space.path("faults.c"), space.path("faults.so"));
    fs::write(&source, FAULTS).unwrap();
    let compiled = std::process::Command::new("cc")
        .args(["-shared", "-fPIC", "-o"])
        .args([&library, &source])
        .status();
    assert!(compiled.unwrap().success());
    library
}

/// Whether the record of a mount says that its file system may be frozen.
fn is_frozen(burgeon: &Burgeon) -> bool {
    let folders = fs::read_dir(burgeon.state().join("mounts")).unwrap();
    let mut records = folders.map(|entry| entry.unwrap().path().join("mount.json"));
    records.any(|path| {
        let text = fs::read_to_string(path).unwrap_or_default();
        text.contains("\"frozen\": true")
    })
}

/// Writes to the file system in a thread, and thaws it if the writer does not come back.
fn assert_writable(at: &Path, name: &str) {
    let path = at.join(name);
    let writer = thread::spawn(move || write_synced(&path));
    let thawed = wait_until(PATIENCE, || writer.is_finished());
    if !thawed {
        let _ = std::process::Command::new("fsfreeze").arg("--unfreeze").arg(at).status();
    }
    assert!(thawed, "the file system stayed frozen");
    writer.join().unwrap();
}

#[test]
fn a_file_system_that_a_killed_helper_left_frozen_is_thawed() {
    let space = Space::new("kill-frozen");
    let Set { burgeon, at, mounted, expected } =
        set_up(&space, 14, &["--writes", "w", "--write-limit", "256M", "--transport", "fuse"]);
    let library = faults(&space);
    burgeon.kill_daemon();
    // The next daemon serves the mount again; its helpers die before they have thawed.
    let mut repair = burgeon.command(&["doctor", "--repair"]);
    repair.env("LD_PRELOAD", &library).env("AT_THAW", "itself").output().unwrap();
    let log = burgeon.state().join("run/daemon.log");
    let left = || fs::read_to_string(&log).unwrap_or_default().contains("may stay frozen");
    assert!(wait_until(PATIENCE, left) && is_frozen(&burgeon));
    burgeon.kill_daemon();
    burgeon.ok(&["doctor", "--repair"]);
    assert_writable(&at, "written-while-frozen");
    assert!(wait_until(PATIENCE, || !is_frozen(&burgeon)));
    drop_caches();
    assert!(fs::read(at.join("data")).unwrap() == *expected);
    burgeon.umount(mounted);
}

/// A kill in the middle of a thaw makes btrfs force the file system read-only.
#[test]
fn a_killed_supervisor_does_not_interrupt_a_thaw() {
    let space = Space::new("kill-thaw");
    let Set { burgeon, at, mounted, expected } =
        set_up(&space, 15, &["--writes", "w", "--write-limit", "256M", "--transport", "fuse"]);
    let library = faults(&space);
    burgeon.kill_daemon();
    let mut repair = burgeon.command(&["doctor", "--repair"]);
    repair.env("LD_PRELOAD", &library).env("AT_THAW", "the supervisor").output().unwrap();
    // It dies where its helper is about to thaw, and there is no other that could.
    assert!(wait_until(PATIENCE, || is_frozen(&burgeon) && burgeon.processes().len() <= 1));
    assert_writable(&at, "written-without-a-supervisor");
    burgeon.ok(&["doctor", "--repair"]);
    assert!(wait_until(PATIENCE, || !is_frozen(&burgeon)));
    drop_caches();
    assert!(fs::read(at.join("data")).unwrap() == *expected);
    burgeon.umount(mounted);
}

/// A supervisor that waits for its own server in the kernel could not be killed: it holds the
/// descriptor that keeps the wait alive.
#[test]
fn a_supervisor_can_be_killed_while_its_server_does_not_answer() {
    let space = Space::new("kill-silent");
    let tree = space.make_folder("tree");
    fs::write(tree.join("data"), "data").unwrap();
    let burgeon = Burgeon::new(PROGRAM, &space);
    burgeon.build(&tree, "sample");
    let (at, library, silent) = (space.make_folder("at"), faults(&space), space.path("silent"));
    fs::write(&silent, "").unwrap();
    let control = space.make_folder("fusectl");
    rustix::mount::mount("none", &control, "fusectl", rustix::mount::MountFlags::empty(), None)
        .unwrap();
    let connections = || -> BTreeSet<PathBuf> {
        fs::read_dir(&control).unwrap().map(|entry| entry.unwrap().path()).collect()
    };
    let before = connections();
    let mut mount = burgeon.command(&["mount", "sample", at.to_str().unwrap(), "--read-only"]);
    mount.args(["--transport", "fuse"]).env("LD_PRELOAD", &library).env("AT_ATTRIBUTES", &silent);
    let mut mount = mount.spawn().unwrap();
    assert!(wait_until(PATIENCE, || !silent.exists()), "no server was asked");
    let status = burgeon.status();
    let killed = ["supervisor_pid", "server_pid"].map(|process| {
        let pid = Pid::from_raw(status[process].as_i64().unwrap() as i32).unwrap();
        let process = pidfd_open(pid, PidfdFlags::empty()).unwrap();
        kill_process(pid, Signal::KILL).unwrap();
        process
    });
    // Readable when the last thread is gone, and not before.
    let patience = Timespec { tv_sec: PATIENCE.as_secs() as i64, tv_nsec: 0 };
    let gone = killed.iter().all(|process| {
        poll(&mut [PollFd::new(process, PollFlags::IN)], Some(&patience)).unwrap() == 1
    });
    if !gone {
        for connection in connections().difference(&before) {
            let _ = fs::write(connection.join("abort"), "1");
        }
    }
    rustix::mount::unmount(&control, rustix::mount::UnmountFlags::DETACH).unwrap();
    assert!(gone, "a thread of it waits for its server, unkillably");
    assert!(!mount.wait().unwrap().success());
    let mounted = burgeon.mount("sample", &at, &["--read-only"]);
    assert_eq!(fs::read(at.join("data")).unwrap(), b"data");
    burgeon.umount(mounted);
}

fn write_synced(path: &Path) {
    let file = File::create(path).unwrap();
    file.write_all_at(b"x", 0).unwrap();
    file.sync_all().unwrap();
}

#[test]
fn a_supervisor_killed_while_it_mounts_leaves_nothing_that_stays() {
    let space = Space::new("kill-mount");
    let seed = 11;
    let Set { burgeon, at, mounted, expected } = set_up(&space, seed, &["--read-only"]);
    let mut rng = Rng::new(seed);
    let other = space.make_folder("other");
    for round in 0..scaled(8, 3) {
        let command = ["mount", "sample", other.to_str().unwrap(), "--writes", "w"];
        let mut command = burgeon.command(&command);
        let mut child = command.args(["--write-limit", "256M"]).spawn().unwrap();
        thread::sleep(Duration::from_millis(rng.below(120)));
        pid(&burgeon, "supervisor_pid").into_iter().for_each(kill);
        let succeeded = child.wait().unwrap().success();
        burgeon.ok(&["doctor", "--repair"]);
        let is_mounted = fs::read(other.join("data")).is_ok();
        assert!(is_mounted || !succeeded, "round {round}, seed {seed}: said to be mounted");
        if is_mounted {
            burgeon.ok(&["umount", other.to_str().unwrap()]);
        }
        // The first mount has been handed from supervisor to supervisor all the while.
        drop_caches();
        assert!(fs::read(at.join("data")).unwrap() == *expected, "round {round}, seed {seed}");
        let one_left = wait_until(PATIENCE, || {
            burgeon.status()["mounts"].as_array().is_some_and(|mounts| mounts.len() == 1)
                && fs::read_dir(burgeon.state().join("mounts")).unwrap().count() == 1
        });
        assert!(one_left, "round {round}, seed {seed}: {:#}", burgeon.status());
    }
    let again = burgeon.mount("sample", &other, &["--writes", "w", "--write-limit", "256M"]);
    burgeon.umount(again);
    burgeon.umount(mounted);
}

#[test]
fn a_loop_number_has_discard_when_its_mount_is_gone() {
    let space = Space::new("loop-number");
    let set = set_up(&space, 17, &["--write-limit", "256M"]);
    let number = sprout_number(&set.burgeon);
    let trimmed = format!("/sys/block/loop{number}/queue/discard_max_bytes");
    assert_eq!(fs::read_to_string(trimmed).unwrap().trim(), "0");
    set.burgeon.umount(set.mounted);
    assert_discards(&space, &number);

    let mounted = set.burgeon.mount("sample", &set.at, &["--write-limit", "256M"]);
    let number = sprout_number(&set.burgeon);
    set.burgeon.kill_daemon();
    rustix::mount::unmount(mounted.path(), rustix::mount::UnmountFlags::empty()).unwrap();
    std::mem::forget(mounted);
    set.burgeon.ok(&["doctor", "--repair"]);
    assert_discards(&space, &number);
}

/// The number of the loop device below the mount's sprout.
fn sprout_number(burgeon: &Burgeon) -> String {
    let sprout = |device: &testkit::LoopDevice| {
        device.backing.starts_with(burgeon.state()) && device.backing.ends_with("sprout")
    };
    let device = testkit::loop_devices().into_iter().find(sprout).unwrap();
    device.name.strip_prefix("loop").unwrap().to_owned()
}

/// Attaches a plain loop device of this number, as its next owner would, and discards through it.
fn assert_discards(space: &Space, number: &str) {
    let (device, path) = (format!("/dev/loop{number}"), space.path("plain"));
    let file = File::create(&path).unwrap();
    file.write_all_at(&[1; 1 << 20], 0).unwrap();
    file.sync_all().unwrap();
    let run = |program: &str, arguments: &[&str]| {
        std::process::Command::new(program).args(arguments).output().unwrap()
    };
    // Another test's mount may have the number meanwhile: it is ours when it did not exist.
    let is_gone = || !Path::new(&format!("/sys/block/loop{number}")).exists();
    let attached = wait_until(PATIENCE, || {
        is_gone() && run("losetup", &[&device, path.to_str().unwrap()]).status.success()
    });
    assert!(attached, "{device} cannot be attached");
    let discarded = run("blkdiscard", &[&device]);
    run("losetup", &["--detach", &device]);
    assert!(discarded.status.success(), "{device} has lost its discard: {discarded:?}");
    assert_eq!(std::os::unix::fs::MetadataExt::blocks(&file.metadata().unwrap()), 0);
}
