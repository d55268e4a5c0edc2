//! Processes of the daemon are killed under load. Each death costs as much as `docs/cli.md` says.

#![allow(clippy::unwrap_used)]

use std::{
    ffi::c_void,
    fs::{self, File},
    os::unix::fs::{FileExt, OpenOptionsExt},
    path::{Path, PathBuf},
    ptr,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering::SeqCst},
    },
    thread,
    time::{Duration, Instant},
};

use rustix::{
    fs::inotify,
    mm::{MapFlags, ProtFlags, mmap, munmap},
    process::{Pid, Resource, Rlimit, Signal, kill_process, prlimit},
};
use testkit::{Burgeon, Mounted, OciLayout, PATIENCE, Rng, Space, scaled, wait_until};

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
    // Without memory for a stack, the thread that removes ended mounts cannot begin.
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

/// The memory cgroups that exist under `name`, in the unified hierarchy and in version 1's.
fn cgroups(name: &str) -> Vec<PathBuf> {
    let tops = ["/sys/fs/cgroup", "/sys/fs/cgroup/memory", "/sys/fs/cgroup/unified"];
    tops.iter().map(|top| Path::new(top).join(name)).filter(|path| path.exists()).collect()
}

#[test]
fn a_killed_daemon_leaves_no_cgroup() {
    let space = Space::new("kill-cgroup");
    let Set { burgeon, mounted, .. } = set_up(&space, 13, &["--read-only"]);
    let pid = burgeon.status()["supervisor_pid"].as_u64().unwrap();
    let of = fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap();
    let name = of.split(['/', '\n']).find(|name| name.starts_with("burgeon-"));
    // A machine without a memory controller has none to leave.
    assert!(name.is_none_or(|name| !cgroups(name).is_empty()), "{of}");
    let name = name.unwrap_or("burgeon-none").to_owned();
    burgeon.kill_daemon();
    burgeon.umount(mounted);
    burgeon.run(&["doctor", "--repair"]);
    // The kernel may still be ending the killed processes.
    let is_gone = || {
        burgeon.run(&["doctor", "--repair"]);
        cgroups(&name).is_empty()
    };
    assert!(wait_until(PATIENCE, is_gone), "{:?}", cgroups(&name));
}

/// The pages of a file, locked in memory: `drop_caches` of any process leaves them.
struct Held {
    start: *mut c_void,
    len: usize,
}

impl Held {
    fn new(file: &Path) -> Self {
        let file = fs::File::open(file).unwrap();
        let len = file.metadata().unwrap().len() as usize;
        let (read, flags) = (ProtFlags::READ, MapFlags::SHARED | MapFlags::LOCKED);
        // SAFETY: a new mapping, which nobody reads.
        let start = unsafe { mmap(ptr::null_mut(), len, read, flags, &file, 0) }.unwrap();
        Self { start, len }
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        // SAFETY: `new` made this mapping, and nobody reads it.
        unsafe { munmap(self.start, self.len) }.unwrap();
    }
}

#[test]
fn killing_everything_costs_errors_or_time_until_the_next_daemon() {
    let space = Space::new("kill-both");
    let Set { burgeon, at, mounted, expected } =
        set_up(&space, 10, &["--writes", "w", "--write-limit", "256M"]);
    fs::write(at.join("kept"), "by the sprout").unwrap();
    let waits = burgeon.status()["mounts"][0]["transport"] == "ublk";
    // All of it has been fetched, and is in the page cache, where other tests must leave it.
    let held = Held::new(&at.join("data"));
    assert!(fs::read(at.join("data")).unwrap() == *expected);
    burgeon.kill_daemon();
    assert!(fs::read(at.join("data")).unwrap() == *expected);
    drop(held);
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
    burgeon.fails(&["top", "--count", "1"], 5, "1 mount exists: `burgeon doctor --repair`");
    let trace = ["trace", at.to_str().unwrap()];
    burgeon.fails(&trace, 5, "1 mount exists: `burgeon doctor --repair` serves them again");
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
fn mounting_the_same_again_resumes_what_a_killed_daemon_has_left() {
    let space = Space::new("resume");
    let Set { burgeon, at, mounted, expected } =
        set_up(&space, 12, &["--writes", "w", "--write-limit", "256M"]);
    fs::write(at.join("kept"), "by the sprout").unwrap();
    let open = fs::File::open(at.join("kept")).unwrap();
    burgeon.kill_daemon();
    drop_caches();
    let path = at.to_str().unwrap();
    // Something else is refused, and the answer names the command that resumes it.
    burgeon.fails(&["mount", "sample", path], 5, "has lost its daemon; mount the same again");
    burgeon.fails(&["mount", "other", path, "--writes", "w"], 5, "\"w\" is mounted there");
    let said = burgeon.ok(&["mount", "sample", path, "--writes", "w"]);
    assert!(said.contains("resumed"), "{said}");
    assert!(fs::read(at.join("data")).unwrap() == expected[..]);
    assert_eq!(burgeon.status()["mounts"][0]["state"], "serving");
    assert_eq!(std::io::read_to_string(open).unwrap(), "by the sprout");
    burgeon.fails(&["mount", "sample", path, "--writes", "w"], 5, "mounted there already");
    burgeon.umount(mounted);
}

/// An image is the same by any of its names.
#[test]
fn an_image_is_resumed_by_each_of_its_names() {
    let space = Space::new("resume-names");
    let layout = OciLayout::new(&space.path("layout")).unwrap();
    layout.change(|root| fs::write(root.join("text"), "of the image").unwrap()).unwrap();
    let burgeon = Burgeon::new(PROGRAM, &space);
    let at = space.make_folder("at");
    let path = at.to_str().unwrap();
    let folder = layout.folder().display().to_string();
    let typed = format!("oci-layout:{folder}:latest");
    burgeon.ok(&["mount", &typed, path, "--read-only"]);
    let name = burgeon.status()["mounts"][0]["name"].as_str().unwrap().to_owned();
    let digest = name.split('/').next().unwrap().strip_prefix("sha256:").unwrap();
    burgeon.build(&space.make_folder("empty"), "empty");
    for other in [format!("oci-layout:{folder}@sha256:{digest}"), digest[..12].to_owned()] {
        burgeon.kill_daemon();
        burgeon.fails(&["mount", "empty", path, "--read-only"], 5, "has lost its daemon");
        let said = burgeon.ok(&["mount", &other, path, "--read-only"]);
        assert!(said.contains("resumed"), "{other}: {said}");
    }
    drop_caches();
    assert_eq!(fs::read_to_string(at.join("text")).unwrap(), "of the image");
    burgeon.ok(&["umount", path]);
}

#[test]
fn umount_takes_the_folder_away_where_no_daemon_does() {
    let space = Space::new("kill-umount");
    for (with_server, writes) in [(false, &["--writes", "w"][..]), (true, &[])] {
        let options = [writes, &["--write-limit", "256M"]].concat();
        let Set { burgeon, at, mounted, .. } = set_up(&space, 12, &options);
        let server = pid(&burgeon, "server_pid").filter(|_| with_server);
        pid(&burgeon, "supervisor_pid").into_iter().for_each(kill);
        if let Some(server) = server {
            kill(server);
            burgeon.holder().into_iter().for_each(testkit::kill);
        }
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

/// The kernel needs time to end a killed supervisor: meanwhile its lock is held, and its socket
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
            // A command that could not take the lock tries again.
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
    burgeon.kill_daemon();
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

/// A scrub, whose command has failed with the supervisor, does not read on for nobody.
#[test]
fn a_scrub_ends_with_its_supervisor() {
    let space = Space::new("kill-scrub");
    let tree = space.make_folder("tree");
    fs::write(tree.join("data"), Rng::new(77).bytes(3_000_000)).unwrap();
    let burgeon = Burgeon::new(PROGRAM, &space);
    burgeon.build(&tree, "sample");
    let at = space.path("at");
    let mounted = burgeon.mount("sample", &at, &["--profile", "none"]);
    fs::read(at.join("data")).unwrap();
    let cache = || -> serde_json::Value {
        let said = burgeon.ok(&["cache", "status", "--json"]);
        serde_json::from_str::<serde_json::Value>(&said).unwrap()["cache"].clone()
    };
    assert!(wait_until(PATIENCE, || cache()["used"].as_u64() >= Some(3_000_000)));
    // For years.
    let mut scrub = burgeon.command(&["cache", "scrub", "--rate", "1"]).spawn().unwrap();
    assert!(wait_until(PATIENCE, || cache()["scrubbing"] == true));
    let server = pid(&burgeon, "server_pid");
    pid(&burgeon, "supervisor_pid").into_iter().for_each(kill);
    assert!(!scrub.wait().unwrap().success());
    burgeon.ok(&["doctor", "--repair"]);
    assert_eq!(pid(&burgeon, "server_pid"), server, "the server was not adopted");
    assert!(wait_until(PATIENCE, || cache()["scrubbing"] != true));
    burgeon.umount(mounted);
}
