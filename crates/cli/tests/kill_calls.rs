//! Processes of the daemon die, or do not answer, at chosen places in the kernel's calls.

#![allow(clippy::unwrap_used)]

use std::{
    collections::BTreeSet,
    fs::{self, File},
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    process::Stdio,
    thread,
};

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    process::{Pid, PidfdFlags, Signal, kill_process, pidfd_open},
};
use testkit::{Burgeon, Mounted, PATIENCE, Rng, Space, kill, preload, wait_until};

const PROGRAM: &str = env!("CARGO_BIN_EXE_burgeon");

struct Set {
    burgeon: Burgeon,
    at: PathBuf,
    mounted: Mounted,
    expected: Vec<u8>,
}

fn set_up(space: &Space, seed: u64, options: &[&str]) -> Set {
    let tree = space.make_folder("tree");
    let expected = Rng::new(seed).bytes(3_000_000);
    fs::write(tree.join("data"), &expected).unwrap();
    let burgeon = Burgeon::new(PROGRAM, space);
    burgeon.build(&tree, "sample");
    let at = space.path("at");
    let mounted = burgeon.mount("sample", &at, options);
    Set { burgeon, at, mounted, expected }
}

/// True if a thread of the process waits for the answer to a FUSE request.
fn waits_for_a_server(process: u32) -> bool {
    let threads = fs::read_dir(format!("/proc/{process}/task")).into_iter().flatten().flatten();
    let mut places = threads.filter_map(|one| fs::read_to_string(one.path().join("wchan")).ok());
    places.any(|place| place.contains("request_wait_answer"))
}

fn drop_caches() {
    fs::write("/proc/sys/vm/drop_caches", "3").unwrap();
}

fn write_synced(path: &Path) {
    let file = File::create(path).unwrap();
    file.write_all_at(b"x", 0).unwrap();
    file.sync_all().unwrap();
}

/// A library to preload. Where a file system is about to be thawed, the process that does it dies
/// if `AT_THAW` is `itself`; otherwise it writes the number of its supervisor into the file of that
/// name, and waits for its death. With `AT_ATTRIBUTES`, a server that has read the question for the
/// FUSE file's attributes does not answer; nor one that was asked for data while the file
/// `AT_READS` is there.
const FAULTS: &str = r#"
#define _GNU_SOURCE
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
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
        FILE *file = fopen(who, "w");
        fprintf(file, "%d\n", parent);
        fclose(file);
        while (getppid() == parent) usleep(1000);
    }
    return syscall(SYS_ioctl, fd, request, argument);
}
ssize_t readv(int fd, const struct iovec *parts, int count) {
    long len = syscall(SYS_readv, fd, parts, count);
    unsigned int asked = len >= 40 ? ((unsigned int *)parts[0].iov_base)[1] : 0;
    const char *reads = getenv("AT_READS");
    int is_silent = asked == 15 && reads && !faccessat(AT_FDCWD, reads, F_OK, AT_EACCESS);
    if ((asked == 3 && getenv("AT_ATTRIBUTES")) || is_silent)
        for (;;) pause();
    return len;
}
"#;

/// True if the record of a mount says that its file system may be frozen.
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
    let library = preload(&space, FAULTS);
    burgeon.kill_daemon();
    // The next daemon serves the mount again; its helpers die before they have thawed.
    let mut repair = burgeon.command(&["doctor", "--repair"]);
    repair.envs(library).env("AT_THAW", "itself").output().unwrap();
    let log = burgeon.state().join("run/daemon.log");
    let left = || fs::read_to_string(&log).unwrap_or_default().contains("may stay frozen");
    assert!(wait_until(PATIENCE, left) && is_frozen(&burgeon));
    burgeon.kill_daemon();
    burgeon.ok(&["doctor", "--repair"]);
    assert_writable(&at, "written-while-frozen");
    assert!(wait_until(PATIENCE, || !is_frozen(&burgeon)));
    drop_caches();
    assert!(fs::read(at.join("data")).unwrap() == expected);
    burgeon.umount(mounted);
}

/// A kill in the middle of a thaw makes btrfs force the file system read-only.
#[test]
fn a_killed_supervisor_does_not_interrupt_a_thaw() {
    let space = Space::new("kill-thaw");
    let Set { burgeon, at, mounted, expected } =
        set_up(&space, 15, &["--writes", "w", "--write-limit", "256M", "--transport", "fuse"]);
    let library = preload(&space, FAULTS);
    burgeon.kill_daemon();
    let mut repair = burgeon.command(&["doctor", "--repair"]);
    let mark = space.path("supervisor");
    repair.envs(library).env("AT_THAW", &mark).stderr(Stdio::null());
    let mut repair = repair.spawn().unwrap();
    let mut supervisor = None;
    assert!(wait_until(PATIENCE, || {
        let text = fs::read_to_string(&mark).unwrap_or_default();
        supervisor = text.strip_suffix('\n').map(|number| number.parse().unwrap());
        supervisor.is_some()
    }));
    kill(supervisor.unwrap());
    repair.wait().unwrap();
    // It dies where its helper is about to thaw, and there is no other that could. Only the server
    // and its opener are left.
    let can_thaw = |process: u32| {
        let line = fs::read(format!("/proc/{process}/cmdline")).unwrap_or_default();
        line.split(|byte| *byte == 0).any(|word| word == b"__help" || word == b"__supervise")
    };
    let nobody_can = || !burgeon.processes().into_iter().any(can_thaw);
    assert!(wait_until(PATIENCE, || is_frozen(&burgeon) && nobody_can()));
    assert_writable(&at, "written-without-a-supervisor");
    burgeon.ok(&["doctor", "--repair"]);
    assert!(wait_until(PATIENCE, || !is_frozen(&burgeon)));
    drop_caches();
    assert!(fs::read(at.join("data")).unwrap() == expected);
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
    let (at, library) = (space.make_folder("at"), preload(&space, FAULTS));
    let connections = Connections::new(&space);
    let mut mount = burgeon.command(&["mount", "sample", at.to_str().unwrap(), "--read-only"]);
    mount.args(["--transport", "fuse"]).envs(library).env("AT_ATTRIBUTES", "silent");
    let mut mount = mount.spawn().unwrap();
    let waits = || burgeon.processes().into_iter().any(waits_for_a_server);
    assert!(wait_until(PATIENCE, waits), "no server was asked");
    assert!(connections.can_be_killed(&burgeon), "a thread of it waits for its server, unkillably");
    assert!(!mount.wait().unwrap().success());
    let mounted = burgeon.mount("sample", &at, &["--read-only"]);
    assert_eq!(fs::read(at.join("data")).unwrap(), b"data");
    burgeon.umount(mounted);
}

/// The kernel's list of FUSE connections, to end those of a test that fails.
struct Connections {
    control: PathBuf,
    before: BTreeSet<PathBuf>,
}

impl Connections {
    fn new(space: &Space) -> Self {
        let control = space.make_folder("fusectl");
        let flags = rustix::mount::MountFlags::empty();
        rustix::mount::mount("none", &control, "fusectl", flags, None).unwrap();
        let before = Self::list(&control);
        Self { control, before }
    }

    fn list(control: &Path) -> BTreeSet<PathBuf> {
        fs::read_dir(control).unwrap().map(|entry| entry.unwrap().path()).collect()
    }

    /// Kills supervisor and server; whether both are gone then. If not, connections made since are
    /// aborted.
    fn can_be_killed(&self, burgeon: &Burgeon) -> bool {
        let processes = ["supervisor_pid", "server_pid"];
        let is_whole = || processes.iter().all(|process| burgeon.status()[process].is_number());
        assert!(wait_until(PATIENCE, is_whole), "{}", burgeon.status());
        let status = burgeon.status();
        let killed = processes.map(|process| {
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
            for connection in Self::list(&self.control).difference(&self.before) {
                let _ = fs::write(connection.join("abort"), "1");
            }
        }
        gone
    }
}

impl Drop for Connections {
    fn drop(&mut self) {
        let _ = rustix::mount::unmount(&self.control, rustix::mount::UnmountFlags::DETACH);
    }
}

/// Number of threads of a process that wait in the kernel where no signal wakes them.
fn unwakeable(process: u32) -> usize {
    let tasks = fs::read_dir(format!("/proc/{process}/task")).into_iter().flatten().flatten();
    let states = tasks.filter_map(|task| fs::read_to_string(task.path().join("stat")).ok());
    states.filter(|stat| stat.rsplit(')').next().is_some_and(|rest| rest.starts_with(" D"))).count()
}

/// The kernel holds a lock while somebody has it read a superblock of a btrfs, here a stranger
/// whose read waits for a server. A supervisor that waited for that lock could not be killed, and
/// it holds the descriptor that keeps the read waiting.
#[test]
fn a_supervisor_can_be_killed_while_a_mount_waits_for_the_lock_of_a_stranger() {
    let space = Space::new("kill-lock");
    let tree = space.make_folder("tree");
    fs::write(tree.join("data"), "data").unwrap();
    let burgeon = Burgeon::new(PROGRAM, &space).envs(preload(&space, FAULTS));
    // The server sees its own folders alone.
    let silent = burgeon.state().join("run/silent");
    let burgeon = burgeon.env("AT_READS", &silent);
    burgeon.build(&tree, "sample");
    let at = space.path("at");
    let connections = Connections::new(&space);
    let options = ["--writes", "w", "--write-limit", "256M", "--virtual", "1T"];
    let mounted = burgeon.mount("sample", &at, &[&options[..], &["--transport", "fuse"]].concat());
    let device = lazy_device(&burgeon);
    File::create(&silent).unwrap();
    drop_caches();
    let mut scan = std::process::Command::new("btrfs");
    let mut scan = scan.args(["device", "scan", &device]).spawn().unwrap();
    let is_waiting = |pid: u32| unwakeable(pid) > 0;
    assert!(wait_until(PATIENCE, || is_waiting(scan.id())), "it does not wait for the server");
    // Mapping mounts the file system once more.
    let new = at.join("new");
    let map = ["map", new.to_str().unwrap(), "--computed", "zeros", "--size", "5000"];
    let mut mapping = burgeon.command(&map).spawn().unwrap();
    // Linux 6.18 lets it wait for the stranger; 6.12 holds no lock at that point.
    let mut is_done = || mapping.try_wait().unwrap().is_some();
    let settled = || is_done() || burgeon.processes().into_iter().any(is_waiting);
    assert!(wait_until(PATIENCE, settled), "it neither waits for the lock nor ends");
    assert!(connections.can_be_killed(&burgeon), "a thread of it waits for a lock, unkillably");
    let is_mapped = mapping.wait().unwrap().success();

    fs::remove_file(&silent).unwrap();
    burgeon.ok(&["doctor", "--repair"]);
    scan.wait().unwrap();
    assert_eq!(fs::read(at.join("data")).unwrap(), b"data");
    if !is_mapped {
        burgeon.ok(&map);
    }
    assert_eq!(fs::read(&new).unwrap(), vec![0; 5000]);
    burgeon.umount(mounted);
}

/// The loop device of the lazy data, of the mount whose sprout lies in the state directory.
fn lazy_device(burgeon: &Burgeon) -> String {
    let sprout = format!("loop{}", sprout_number(burgeon));
    let mounts = fs::read_dir("/sys/fs/btrfs").unwrap().flatten();
    let mut devices = mounts.map(|mount| mount.path().join("devices"));
    let devices = devices.find(|devices| devices.join(&sprout).exists()).unwrap();
    let names = fs::read_dir(devices).unwrap().map(|entry| entry.unwrap().file_name());
    let mut names = names.map(|name| name.into_string().unwrap());
    let of_state = |name: &String| {
        let backing = fs::read_to_string(format!("/sys/block/{name}/loop/backing_file")).unwrap();
        Path::new(backing.trim_end()).starts_with(burgeon.state())
    };
    format!("/dev/{}", names.find(|name| !of_state(name)).unwrap())
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
