//! Supervisor and server are killed together. Another process holds the connection that readers
//! wait on, so they wait for the next daemon. Each death costs as much as `docs/cli.md` says.

#![allow(clippy::unwrap_used)]

use std::{
    fs::{self, File},
    io,
    path::{Path, PathBuf},
    process::Command,
    thread::{self, JoinHandle},
};

use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};
use testkit::{
    Burgeon, Mounted, PATIENCE, Rng, Space, kill, make_read_only_by_an_error, preload,
    processes_with, wait_until,
};

const PROGRAM: &str = env!("CARGO_BIN_EXE_burgeon");

const EIO: i32 = 5;

/// A library to preload: a server that has taken a read into a slot does not answer it while the
/// file `SILENT` is there.
const SILENT_SERVER: &str = r#"
#include <fcntl.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>
ssize_t readv(int fd, const struct iovec *parts, int count) {
    long len = syscall(SYS_readv, fd, parts, count);
    const char *silent = getenv("SILENT");
    if (len >= 40 && silent && ((unsigned int *)parts[0].iov_base)[1] == 15
            && faccessat(AT_FDCWD, silent, F_OK, AT_EACCESS) == 0)
        for (;;) pause();
    return len;
}
"#;

struct Set {
    _release: ReleaseOnPanic,
    burgeon: Burgeon,
    at: PathBuf,
    mounted: Mounted,
    expected: Vec<u8>,
    silent: PathBuf,
}

/// Lets readers go that a failed test would leave waiting, and with them any process that waits for
/// all file systems of this machine.
struct ReleaseOnPanic(PathBuf);

impl Drop for ReleaseOnPanic {
    fn drop(&mut self) {
        if thread::panicking() {
            processes_with(&self.0).into_iter().for_each(kill);
        }
    }
}

/// A mount over FUSE whose server can be silenced.
fn set_up(space: &Space, seed: u64, options: &[&str]) -> Set {
    let tree = space.make_folder("tree");
    let expected = Rng::new(seed).bytes(3_000_000);
    fs::write(tree.join("data"), &expected).unwrap();
    let burgeon = Burgeon::new(PROGRAM, space).envs(preload(space, SILENT_SERVER));
    // The server sees its own folders alone.
    let (at, silent) = (space.path("at"), burgeon.state().join("run/silent"));
    let burgeon = burgeon.env("SILENT", &silent);
    burgeon.build(&tree, "sample");
    let mounted = burgeon.mount("sample", &at, &[&["--transport", "fuse"], options].concat());
    let _release = ReleaseOnPanic(burgeon.state().to_owned());
    Set { _release, burgeon, at, mounted, expected, silent }
}

/// Reads the whole file in a thread.
struct Reader(JoinHandle<io::Result<Vec<u8>>>);

fn reader(at: &Path) -> Reader {
    let path = at.join("data");
    Reader(thread::spawn(move || fs::read(path)))
}

impl Reader {
    fn is_finished(&self) -> bool {
        self.0.is_finished()
    }

    /// Its result. Panics if it still waits.
    fn result(self) -> io::Result<Vec<u8>> {
        assert!(wait_until(PATIENCE, || self.is_finished()), "a reader waits");
        self.0.join().unwrap()
    }
}

fn drop_caches() {
    fs::write("/proc/sys/vm/drop_caches", "3").unwrap();
}

/// One of the mount's counters.
fn reads(burgeon: &Burgeon, which: &str) -> u64 {
    burgeon.status()["mounts"][0]["reads"][which].as_u64().unwrap()
}

fn folders(burgeon: &Burgeon) -> usize {
    fs::read_dir(burgeon.state().join("mounts")).unwrap().count()
}

/// True if a thread of the process sleeps in `pause`, where the library has silenced it.
fn is_silenced(process: u32) -> bool {
    let tasks = fs::read_dir(format!("/proc/{process}/task")).into_iter().flatten().flatten();
    let pause = format!("{} ", libc::SYS_pause);
    let mut calls = tasks.filter_map(|task| fs::read_to_string(task.path().join("syscall")).ok());
    calls.any(|call| call.starts_with(&pause))
}

#[test]
fn readers_wait_while_both_are_dead_and_get_their_data() {
    let space = Space::new("held");
    let set = set_up(&space, 31, &["--writes", "w", "--write-limit", "256M"]);
    let burgeon = &set.burgeon;
    File::create(&set.silent).unwrap();
    drop_caches();
    let waiting = reader(&set.at);
    let server = burgeon.status()["server_pid"].as_u64().unwrap() as u32;
    assert!(wait_until(PATIENCE, || is_silenced(server)), "no read lies in a slot");
    burgeon.kill_both();
    // Another one asks while nobody reads the kernel's requests.
    let later = reader(&set.at);
    // Local data goes on meanwhile.
    fs::write(set.at.join("written"), "without a server").unwrap();
    File::open(set.at.join("written")).unwrap().sync_all().unwrap();
    let found = burgeon.run(&["doctor"]);
    assert!(
        found.code == Some(1) && found.stdout.contains("readers of data wait for it"),
        "{found:?}"
    );
    assert_eq!(burgeon.status()["mounts_without_daemon"], 1);
    assert!(burgeon.ok(&["shutdown"]).contains("readers of mounts wait for one"));
    assert!(!waiting.is_finished() && !later.is_finished(), "an answer while nobody serves");

    fs::remove_file(&set.silent).unwrap();
    burgeon.ok(&["doctor", "--repair"]);
    for reader in [waiting, later] {
        let read = reader.result();
        assert!(read.is_ok_and(|bytes| bytes == set.expected), "it waited for an error");
    }
    assert_eq!(reads(burgeon, "failed_reads"), 0);
    assert!(reads(burgeon, "replayed") > 0, "the read in the slot was lost");
    assert_eq!(fs::read(set.at.join("written")).unwrap(), b"without a server");
    burgeon.umount(set.mounted);
    assert_eq!(folders(burgeon), 0);
}

#[test]
fn any_death_leaves_somebody_who_holds() {
    let space = Space::new("held-again");
    let set = set_up(&space, 32, &["--read-only"]);
    let burgeon = &set.burgeon;
    let read = |after: &str| {
        drop_caches();
        let read = fs::read(set.at.join("data"));
        assert!(read.is_ok_and(|bytes| bytes == set.expected), "after {after}");
    };
    // A supervisor that is killed holds nothing back from the next one, which adopts the server.
    let supervisor = burgeon.status()["supervisor_pid"].as_u64().unwrap() as u32;
    let holder = burgeon.holder().unwrap();
    kill(supervisor);
    burgeon.ok(&["doctor", "--repair"]);
    assert_eq!(burgeon.holder(), Some(holder));
    // The holder dies: another one holds the same.
    kill(holder);
    let is_there = || burgeon.holder().is_some_and(|next| next != holder && holds(burgeon));
    assert!(wait_until(PATIENCE, is_there), "nobody holds");
    for round in ["the first kill of both", "the second"] {
        burgeon.kill_both();
        drop_caches();
        let waiting = reader(&set.at);
        let said = burgeon.run(&["mount", "sample", set.at.to_str().unwrap(), "--read-only"]);
        assert!(said.code == Some(0) && said.stdout.contains("resumed"), "{said:?}");
        assert!(waiting.result().is_ok_and(|bytes| bytes == set.expected), "{round}");
        read(round);
    }
    assert_eq!(reads(burgeon, "failed_reads"), 0);
    burgeon.umount(set.mounted);
}

/// True if the process that holds has a descriptor of `/dev/fuse`.
fn holds(burgeon: &Burgeon) -> bool {
    let folder = burgeon.holder().map(|id| format!("/proc/{id}/fd"));
    let files = folder.and_then(|folder| fs::read_dir(folder).ok()).into_iter().flatten().flatten();
    let mut files = files.filter_map(|file| fs::read_link(file.path()).ok());
    // Seen from here, it lies in a namespace that may be gone.
    files.any(|file| file.ends_with("fuse"))
}

#[test]
fn a_mount_without_a_daemon_is_released_by_whatever_unmounts_it() {
    let space = Space::new("held-umount");
    for by_command in [false, true] {
        let set = set_up(&space, 33, &["--write-limit", "256M"]);
        set.burgeon.kill_both();
        assert!(holds(&set.burgeon));
        match by_command {
            true => set.burgeon.umount(set.mounted),
            false => {
                unmount(&set.at, UnmountFlags::empty()).unwrap();
                std::mem::forget(set.mounted);
                let gone = wait_until(PATIENCE, || set.burgeon.processes().is_empty());
                assert!(gone, "it holds what is gone: {:?}", set.burgeon.processes());
                set.burgeon.ok(&["doctor", "--repair"]);
            }
        }
        assert_eq!(folders(&set.burgeon), 0);
    }
}

/// A umount would wait for the data that a killed reader has requested.
#[test]
fn umount_starts_the_daemon_that_readers_wait_for() {
    let space = Space::new("held-pending");
    let set = set_up(&space, 34, &["--read-only"]);
    set.burgeon.kill_both();
    drop_caches();
    let nowhere = File::options().write(true).open("/dev/null").unwrap();
    let mut cat = Command::new("cat").arg(set.at.join("data")).stdout(nowhere).spawn().unwrap();
    let status = || fs::read_to_string(format!("/proc/{}/stat", cat.id())).unwrap_or_default();
    let waits = || status().rsplit(')').next().is_some_and(|rest| rest.starts_with(" D"));
    assert!(wait_until(PATIENCE, waits), "it does not wait");
    cat.kill().unwrap();
    cat.wait().unwrap();
    set.burgeon.umount(set.mounted);
    assert_eq!(folders(&set.burgeon), 0);
}

#[test]
fn reads_that_wait_can_be_given_up() {
    let space = Space::new("held-given-up");
    let set = set_up(&space, 35, &["--read-only"]);
    let burgeon = &set.burgeon;
    burgeon.kill_both();
    drop_caches();
    // No daemon can be started: somebody has its lock.
    let lock = File::open(burgeon.state().join("run/lock")).unwrap();
    rustix::fs::flock(&lock, rustix::fs::FlockOperation::LockExclusive).unwrap();
    let waiting = reader(&set.at);
    let said = burgeon.run(&["shutdown", "--force"]);
    assert!(said.code == Some(0) && said.stderr.contains("readers get I/O errors"), "{said:?}");
    assert_eq!(waiting.result().unwrap_err().raw_os_error(), Some(EIO));
    assert!(wait_until(PATIENCE, || burgeon.holder().is_none()), "it holds nothing");
    assert!(!space.mounts().contains(&set.at), "no daemon is needed to unmount it");
    drop(lock);
    std::mem::forget(set.mounted);
    let options = ["--read-only", "--transport", "fuse"];
    let mounted = burgeon.mount("sample", &set.at, &options);
    let device = burgeon.status()["mounts"][0]["device"].as_str().unwrap().to_owned();
    // An administrator aborts the connection: it is a mount without a server then.
    burgeon.kill_both();
    drop_caches();
    let holder = burgeon.holder();
    let waiting = reader(&set.at);
    abort_connection(&space, &device);
    assert_eq!(waiting.result().unwrap_err().raw_os_error(), Some(EIO));
    assert!(wait_until(PATIENCE, || burgeon.holder() != holder), "it holds a dead connection");
    burgeon.ok(&["doctor", "--repair"]);
    assert!(fs::read(set.at.join("data")).unwrap() == set.expected);
    burgeon.umount(mounted);
}

#[test]
fn shutdown_unmounts_what_no_process_serves_or_holds() {
    let space = Space::new("held-by-nobody");
    for option in ["--force", "--unmount"] {
        let set = set_up(&space, 36, &["--write-limit", "256M"]);
        let burgeon = &set.burgeon;
        burgeon.kill_daemon();
        assert_eq!(burgeon.holder(), None);
        assert!(burgeon.ok(&["status"]).contains("1 mount exists"));
        assert!(burgeon.ok(&["shutdown"]).contains("1 mount exists"));
        let said = burgeon.ok(&["shutdown", option]);
        assert!(!space.mounts().contains(&set.at), "{option}: {said}");
        std::mem::forget(set.mounted);
        assert_eq!((folders(burgeon), burgeon.processes().len()), (0, 0), "{option}: {said}");
    }
}

/// As `docs/cli.md` says it.
fn abort_connection(space: &Space, device: &str) {
    let asked =
        Command::new("losetup").args(["-n", "-O", "BACK-MAJ:MIN", device]).output().unwrap();
    let number = String::from_utf8(asked.stdout).unwrap();
    let number = number.trim().split(':').next_back().unwrap().to_owned();
    let control = space.make_folder("fusectl");
    mount("none", &control, "fusectl", MountFlags::empty(), None).unwrap();
    let aborted = fs::write(control.join(number).join("abort"), "1");
    unmount(&control, UnmountFlags::DETACH).unwrap();
    aborted.unwrap();
}

#[test]
fn a_mount_whose_record_is_damaged_holds_up_no_umount() {
    let space = Space::new("held-damaged");
    let Set { burgeon, at, mounted, .. } = set_up(&space, 7, &["--read-only"]);
    let status = burgeon.status();
    let id = status["mounts"][0]["id"].as_str().unwrap().to_owned();
    for name in ["supervisor_pid", "server_pid"] {
        kill(u32::try_from(status[name].as_u64().unwrap()).unwrap());
    }
    let record = burgeon.state().join("mounts").join(id).join("mount.json");
    File::options().write(true).open(&record).unwrap().set_len(50).unwrap();
    let at = at.to_str().unwrap();
    for _ in 0..2 {
        let said = burgeon.run(&["umount", at]);
        assert!(said.code != Some(0) && said.stderr.contains("shutdown --force"), "{said:?}");
    }
    let found = burgeon.run(&["doctor"]).stdout;
    assert!(found.contains("mount.json cannot be read") && found.contains("--force"), "{found}");
    burgeon.ok(&["shutdown", "--force"]);
    burgeon.ok(&["umount", at]);
    drop(mounted);
}

/// Of two mounts, the record of one is damaged: the next daemon serves the other, and cannot end
/// while that one is in use.
#[test]
fn a_running_daemon_does_not_forget_a_mount_without_a_record() {
    let space = Space::new("held-unread");
    let Set { burgeon, at, mounted, expected, .. } = set_up(&space, 9, &["--read-only"]);
    let second = space.path("second");
    let other = burgeon.mount("sample", &second, &["--read-only", "--transport", "fuse"]);
    let mounts = burgeon.status()["mounts"].as_array().unwrap().clone();
    let of_first = mounts.iter().find(|mount| mount["target"] == at.to_str().unwrap()).unwrap();
    let folder = burgeon.state().join("mounts").join(of_first["id"].as_str().unwrap());
    burgeon.kill_both();
    let record = fs::read(folder.join("mount.json")).unwrap();
    fs::write(folder.join("mount.json"), "").unwrap();
    let said = burgeon.run(&["doctor", "--repair"]);
    assert!(said.code == Some(1) && said.stdout.contains("cannot be read"), "{said:?}");
    drop_caches();
    assert!(fs::read(second.join("data")).unwrap() == expected);
    for command in ["doctor", "health"] {
        let said = burgeon.run(&[command]);
        assert!(said.code == Some(1), "{said:?}");
        assert!(said.stdout.contains("record mount.json cannot be read"), "{said:?}");
    }
    burgeon.umount(other);
    burgeon.fails(&["shutdown"], 5, "whose record cannot be read");
    // Nor if a later version has made it.
    burgeon.kill_both();
    let later = String::from_utf8(record.clone()).unwrap();
    let later = later.replacen("\"format\":", "\"format\":9", 1);
    fs::write(folder.join("mount.json"), later).unwrap();
    burgeon.umount(burgeon.mount("sample", &second, &["--read-only"]));
    burgeon.fails(&["shutdown"], 5, "whose record cannot be read");
    fs::write(folder.join("mount.json"), record).unwrap();
    burgeon.ok(&["shutdown", "--force"]);
    let gone = || {
        let _ = unmount(&at, UnmountFlags::DETACH);
        !space.mounts().contains(&at)
    };
    assert!(wait_until(PATIENCE, gone));
    std::mem::forget(mounted);
}

/// The disk of the state directory fails: no socket, no lock and no record can be made there.
#[test]
fn a_read_only_disk_ends_no_server_and_holds_up_no_umount() {
    let space = Space::new("held-read-only");
    let disk = space.disk(&space.path("state"), 256 << 20);
    let Set { burgeon, at, mounted, expected, .. } = set_up(&space, 8, &["--read-only"]);
    let status = burgeon.status();
    let [supervisor, server] = ["supervisor_pid", "server_pid"]
        .map(|name| u32::try_from(status[name].as_u64().unwrap()).unwrap());
    make_read_only_by_an_error(disk.path());
    for command in ["doctor", "health"] {
        let said = burgeon.run(&[command]);
        assert!(said.code == Some(1), "{said:?}");
        assert!(said.stdout.contains("its file system is read-only"), "{said:?}");
    }
    kill(supervisor);
    drop_caches();
    assert!(fs::read(at.join("data")).unwrap() == expected, "the server goes on");
    let said = burgeon.run(&["health"]);
    assert!(said.stdout.contains("its server goes on serving"), "{said:?}");
    let said = burgeon.ok(&["status"]);
    assert!(said.contains("which a server goes on serving"), "{said}");

    kill(server);
    drop_caches();
    let waiting = reader(&at);
    assert!(wait_until(PATIENCE, || burgeon.holder().is_some()));
    let said = burgeon.run(&["umount", at.to_str().unwrap()]);
    assert!(said.stderr.contains("readers get I/O errors"), "{said:?}");
    assert_eq!(waiting.result().unwrap_err().raw_os_error(), Some(EIO));
    // The reader may have had its file open a moment longer.
    let gone = || {
        let _ = burgeon.run(&["umount", at.to_str().unwrap()]);
        !space.mounts().contains(&at)
    };
    assert!(wait_until(PATIENCE, gone));
    std::mem::forget(mounted);
    assert!(wait_until(PATIENCE, || burgeon.processes().is_empty()));
    drop(burgeon);
    drop(disk);
}
