//! From a folder to a mount and back: the promises of `build`, `mount`, `umount` and `status`.

#![allow(clippy::unwrap_used)]

use std::{
    fs,
    io::Read,
    path::Path,
    process::{Child, Command, Stdio},
    sync::mpsc,
    thread,
};

use rustix::{
    mount::{UnmountFlags, unmount},
    process::{Pid, Signal, kill_process},
    thread::{UnshareFlags, unshare_unsafe},
};
use serde_json::Value;
use testkit::{
    Burgeon, OpensOf, PATIENCE, Rng, Space, compare, mounts_of, ublk_expected, wait_until,
};

const PROGRAM: &str = env!("CARGO_BIN_EXE_burgeon");

/// Room for writes in these tests: the minimum of btrfs.
const LIMIT: &str = "256M";

/// A folder with small, large and linked files.
fn sample(space: &Space, seed: u64) -> std::path::PathBuf {
    let root = space.make_folder("tree");
    let mut rng = Rng::new(seed);
    for (name, len) in [("empty", 0), ("tiny", 100), ("block", 4096), ("big", 3_000_000)] {
        let mut bytes = vec![0; len];
        rng.fill(&mut bytes);
        fs::write(root.join(name), bytes).unwrap();
    }
    fs::create_dir(root.join("folder")).unwrap();
    fs::hard_link(root.join("big"), root.join("folder/link")).unwrap();
    std::os::unix::fs::symlink("../tiny", root.join("folder/symlink")).unwrap();
    root
}

fn same(original: &Path, mounted: &Path) {
    compare(original, mounted).unwrap().assert_same();
}

fn mounts(status: &Value) -> &Vec<Value> {
    status["mounts"].as_array().unwrap()
}

#[test]
fn a_store_that_only_the_client_sees_is_refused_by_name() {
    let space = Space::new("late-store");
    let burgeon = Burgeon::new(PROGRAM, &space);
    let tree = space.make_folder("tree");
    fs::write(tree.join("data"), Rng::new(3).bytes(300_000)).unwrap();
    burgeon.build(&tree, "early");
    let (at, late) = (space.path("at"), space.make_folder("late"));
    let options = ["--virtual", "1P", "--write-limit", "256M"];
    let mounted = burgeon.mount("early", &at, &options);
    // Where mounts are private, as they are here, the daemon keeps the empty folder below.
    let disk = space.small_disk("late", 16 << 20);
    let other =
        Burgeon::with_state(PROGRAM, burgeon.state().into()).option("--store").option(&late);
    other.build(&tree, "late");
    let second = space.make_folder("second");
    let mount = ["mount", "late", second.to_str().unwrap(), "--read-only"];
    other.fails(&mount, 5, "mounted after the daemon was started");
    let new = at.join("new");
    let map = ["map", new.to_str().unwrap(), "--from", "late"];
    other.fails(&map, 5, "burgeon shutdown");
    assert!(!new.exists() && fs::read(at.join("data")).is_ok());
    burgeon.umount(mounted);
    burgeon.ok(&["shutdown"]);
    let mounted = other.mount("late", &second, &["--read-only"]);
    compare(&tree, &second).unwrap().assert_same();
    other.umount(mounted);
    burgeon.ok(&["shutdown"]);
    drop(disk);
}

#[test]
fn a_folder_is_mounted_read_and_released() {
    let space = Space::new("thin");
    let tree = sample(&space, 1);
    let burgeon = Burgeon::new(PROGRAM, &space);
    burgeon.build(&tree, "sample:1");
    let at = space.path("at");
    let mounted = burgeon.mount("sample:1", &at, &["--read-only"]);
    same(&tree, &at);
    let status = burgeon.status();
    let mount = &mounts(&status)[0];
    assert_eq!(mount["image"], "sample:1");
    assert_eq!(mount["state"], "serving");
    let transport = if ublk_expected() { "ublk" } else { "FUSE file + loop" };
    assert_eq!(mount["transport"], transport);
    assert_eq!(mount["target"], at.to_str().unwrap());
    assert_eq!(mount["reads"]["failed_reads"], 0);
    assert!(mount["reads"]["fetches"].as_u64().unwrap() > 0);
    assert!(fs::write(at.join("new"), "x").is_err(), "a read-only mount took a write");
    burgeon.umount(mounted);
    assert!(mounts(&burgeon.status()).is_empty());
    assert_eq!(fs::read_dir(burgeon.state().join("mounts")).unwrap().count(), 0);
}

#[test]
fn a_plain_umount_releases_everything() {
    let space = Space::new("plain");
    let tree = sample(&space, 2);
    let burgeon = Burgeon::new(PROGRAM, &space);
    burgeon.build(&tree, "sample");
    let at = space.path("at");
    let mounted = burgeon.mount("sample", &at, &["--write-limit", LIMIT]);
    fs::write(at.join("new"), "lost at umount").unwrap();
    let before = burgeon.status();
    let device = mounts(&before)[0]["device"].as_str().unwrap().replace("/dev/", "");
    // A device that somebody else has attached meanwhile has another number of its own.
    let attached = || {
        let folder = Path::new("/sys/block").join(&device);
        let number = fs::read_to_string(folder.join("diskseq")).ok()?;
        let in_use = device.starts_with("ublkb") || folder.join("loop/backing_file").exists();
        in_use.then_some(number)
    };
    let ours = attached();
    assert!(ours.is_some());
    unmount(&at, UnmountFlags::empty()).unwrap();
    std::mem::forget(mounted);
    let released = wait_until(PATIENCE, || {
        mounts(&burgeon.status()).is_empty()
            && fs::read_dir(burgeon.state().join("mounts")).unwrap().count() == 0
    });
    assert!(released, "{:#}", burgeon.status());
    assert_ne!(attached(), ours, "{device} is still attached");
}

#[test]
fn the_daemons_processes_are_called_burgeon() {
    let space = Space::new("names");
    let burgeon = Burgeon::new(PROGRAM, &space);
    burgeon.build(&sample(&space, 3), "sample");
    let mounted = burgeon.mount("sample", &space.path("at"), &["--read-only"]);
    // A supervisor, a server and an opener; the requests of a ublk device are held by the kernel.
    let all = 3 + usize::from(!ublk_expected());
    let are_there = || burgeon.processes().len() == all;
    assert!(wait_until(PATIENCE, are_there), "{:?}", burgeon.processes());
    // One that is being started has no name yet.
    let named = |process: &u32| fs::read_to_string(format!("/proc/{process}/comm")).unwrap();
    let have_names = || burgeon.processes().iter().all(|process| named(process) == "burgeon\n");
    assert!(wait_until(PATIENCE, have_names), "{:?}", burgeon.processes());
    for process in burgeon.processes() {
        let line = fs::read(format!("/proc/{process}/cmdline")).unwrap();
        let program = line.split(|byte| *byte == 0).next().unwrap();
        assert_eq!(program, b"@burgeon", "{:?}", String::from_utf8_lossy(program));
    }
    burgeon.umount(mounted);
}

#[test]
fn the_transport_can_be_chosen() {
    let space = Space::new("transport");
    let tree = sample(&space, 9);
    let burgeon = Burgeon::new(PROGRAM, &space);
    burgeon.build(&tree, "sample");
    let at = space.path("at");
    let transport = || mounts(&burgeon.status())[0]["transport"].clone();
    let mounted = burgeon.mount("sample", &at, &["--read-only", "--transport", "fuse"]);
    assert_eq!(transport(), "FUSE file + loop");
    same(&tree, &at);
    burgeon.umount(mounted);
    let over_ublk = ["--read-only", "--transport", "ublk"];
    if ublk_expected() {
        let mounted = burgeon.mount("sample", &at, &over_ublk);
        assert_eq!(transport(), "ublk");
        same(&tree, &at);
        assert!(burgeon.run(&["doctor"]).stdout.contains("ublk: mounts use it"));
        burgeon.umount(mounted);
    } else {
        let at = at.to_str().unwrap();
        burgeon.fails(&[&["mount", "sample", at], &over_ublk[..]].concat(), 3, "ublk_drv");
        assert!(burgeon.run(&["doctor"]).stdout.contains("warning  ublk: "));
    }
    assert_eq!(fs::read_dir(burgeon.state().join("mounts")).unwrap().count(), 0);
}

#[test]
fn two_mounts_of_one_image_share_nothing_but_the_cache() {
    let space = Space::new("two");
    let tree = sample(&space, 3);
    let burgeon = Burgeon::new(PROGRAM, &space);
    burgeon.build(&tree, "sample");
    let (a, b) = (space.path("a"), space.path("b"));
    let mounted_a = burgeon.mount("sample", &a, &["--write-limit", LIMIT]);
    let mounted_b = burgeon.mount("sample", &b, &["--write-limit", LIMIT]);
    fs::write(a.join("only-in-a"), "a").unwrap();
    fs::remove_file(b.join("big")).unwrap();
    assert!(!b.join("only-in-a").exists());
    assert_eq!(fs::read(a.join("big")).unwrap(), fs::read(tree.join("big")).unwrap());
    let status = burgeon.status();
    let fsids: Vec<_> = mounts(&status).iter().map(|mount| mount["fsid"].clone()).collect();
    assert_eq!(fsids.len(), 2);
    assert_ne!(fsids[0], fsids[1]);
    burgeon.umount(mounted_a);
    assert_eq!(fs::read(b.join("folder/link")).unwrap(), fs::read(tree.join("big")).unwrap());
    burgeon.umount(mounted_b);
}

#[test]
fn a_refused_mount_names_the_reason() {
    let space = Space::new("errors");
    let tree = sample(&space, 4);
    let burgeon = Burgeon::new(PROGRAM, &space);
    burgeon.build(&tree, "sample");
    let empty = space.make_folder("empty");
    let path = |path: &Path| path.to_str().unwrap().to_owned();
    let missing = path(&space.path("missing"));
    burgeon.fails(&["mount", "sample", &missing], 3, "mkdir");
    burgeon.fails(&["mount", "sample", &path(&tree.join("tiny"))], 1, "not a directory");
    burgeon.fails(&["mount", "sample", &path(&tree)], 1, "not empty");
    burgeon.fails(&["mount", "sampel", &path(&empty)], 3, "sample");
    burgeon.fails(&["mount", "sample", &path(&empty), "--write-limit", "1M"], 2, "too small");
    let too_much = ["mount", "sample", &path(&empty), "--write-limit", "900T", "--reserve"];
    burgeon.fails(&too_much, 6, "leave --reserve out");
    burgeon.fails(&["umount", &path(&empty)], 3, "nothing is mounted");
    let mounted = burgeon.mount("sample", &empty, &["--read-only"]);
    burgeon.fails(&["mount", "sample", &path(&empty)], 5, "mounted there already");
    burgeon.fails(&["shutdown"], 5, &path(&empty));
    let open = fs::File::open(empty.join("big")).unwrap();
    let pid = format!("process {}", std::process::id());
    burgeon.fails(&["umount", &path(&empty)], 5, &pid);
    drop(open);
    // None of the failures may have left anything of its own behind.
    assert_eq!(fs::read_dir(burgeon.state().join("mounts")).unwrap().count(), 1);
    burgeon.umount(mounted);
}

#[test]
fn a_state_directory_or_store_on_a_burgeon_mount_is_refused() {
    let space = Space::new("chain");
    let tree = sample(&space, 5);
    let burgeon = Burgeon::new(PROGRAM, &space);
    burgeon.build(&tree, "sample");
    let at = space.path("at");
    let mounted = burgeon.mount("sample", &at, &["--write-limit", "512M"]);
    let other = space.make_folder("other");
    let inner = Burgeon::with_state(PROGRAM, at.join("state"));
    inner.build(&tree, "inner");
    inner.fails(&["mount", "inner", other.to_str().unwrap()], 1, "wait for itself");
    let store = at.join("state/store");
    burgeon.fails(
        &["--store", store.to_str().unwrap(), "mount", "inner", other.to_str().unwrap()],
        1,
        "wait for itself",
    );
    drop(inner);
    burgeon.umount(mounted);
}

#[test]
fn a_second_daemon_on_one_state_directory_is_refused() {
    let space = Space::new("second");
    let burgeon = Burgeon::new(PROGRAM, &space);
    let tree = sample(&space, 6);
    burgeon.build(&tree, "sample");
    let mounted = burgeon.mount("sample", &space.path("at"), &["--read-only"]);
    let first = burgeon.status()["supervisor_pid"].clone();
    let second = std::process::Command::new(PROGRAM)
        .arg("__supervise")
        .arg(burgeon.state())
        .output()
        .unwrap();
    assert!(!second.status.success());
    assert_eq!(String::from_utf8_lossy(&second.stdout).trim(), "taken");
    assert_eq!(burgeon.status()["supervisor_pid"], first);
    burgeon.umount(mounted);
}

#[test]
fn many_mounts_are_started_at_once_by_commands_that_find_no_daemon() {
    let space = Space::new("race");
    let burgeon = Burgeon::new(PROGRAM, &space);
    let tree = sample(&space, 7);
    burgeon.build(&tree, "sample");
    let places: Vec<_> = (0..4).map(|n| space.make_folder(&format!("at-{n}"))).collect();
    let commands: Vec<_> = places
        .iter()
        .map(|at| {
            let mut command = burgeon.command(&["mount", "sample", at.to_str().unwrap()]);
            command.arg("--read-only").spawn().unwrap()
        })
        .collect();
    for mut command in commands {
        assert!(command.wait().unwrap().success());
    }
    places.iter().for_each(|at| same(&tree, at));
    assert_eq!(mounts(&burgeon.status()).len(), 4);
    burgeon.ok(&["shutdown", "--unmount"]);
    assert!(burgeon.processes().is_empty());
}

#[test]
fn a_filled_mount_has_everything_and_needs_its_store_no_more() {
    let space = Space::new("fill");
    let burgeon = Burgeon::new(PROGRAM, &space);
    let tree = sample(&space, 8);
    burgeon.build(&tree, "sample");
    let at = space.path("at");
    let mounted = burgeon.mount("sample", &at, &["--read-only", "--fill"]);
    let filled = wait_until(PATIENCE, || mounts(&burgeon.status())[0]["fill"]["state"] == "done");
    let status = burgeon.status();
    assert!(filled, "{status:#}");
    let mount = &mounts(&status)[0];
    assert_eq!(mount["fill"]["done_bytes"], mount["fill"]["total_bytes"]);
    assert_eq!(mount["materialised_bytes"], mount["data_bytes"]);
    fs::rename(burgeon.state().join("store/packs"), space.path("gone")).unwrap();
    same(&tree, &at);
    burgeon.umount(mounted);
}

#[test]
fn one_mount_that_cannot_be_unmounted_keeps_no_other_from_it() {
    let space = Space::new("several");
    let burgeon = Burgeon::new(PROGRAM, &space);
    burgeon.build(&sample(&space, 9), "sample");
    let paths = ["a", "nope", "b", "c"].map(|name| space.path(name).to_str().unwrap().to_owned());
    let [a, nope, b, c] = paths.each_ref().map(String::as_str);
    let mount = |at: &str| burgeon.mount("sample", Path::new(at), &["--read-only"]);
    let mounted = [a, b, c].map(mount);
    let open = fs::File::open(Path::new(b).join("big")).unwrap();
    let finished = burgeon.run(&["--json", "umount", a, nope, b, c]);
    // The first error was that there is no such folder.
    assert_eq!(finished.code, Some(3), "{finished:#?}");
    let document: Value = serde_json::from_str(&finished.stdout).unwrap();
    assert_eq!(document["unmounted"], serde_json::json!([a, c]));
    assert_eq!(document["error"]["kind"], "not-found");
    let failed = document["failed"].as_array().unwrap();
    let seen: Vec<_> = failed.iter().map(|one| (&one["path"], &one["kind"])).collect();
    assert_eq!(seen, [(&nope.into(), &"not-found".into()), (&b.into(), &"busy".into())]);
    // A slow machine says that it waits for the kernel, too.
    assert_eq!(finished.stderr.matches(": cannot unmount").count(), 2, "{finished:#?}");
    drop(open);
    let said = burgeon.run(&["umount", nope, b]);
    assert!(said.code == Some(3) && said.stdout.contains(b), "{said:#?}");
    mounted.into_iter().for_each(std::mem::forget);
    assert!(mounts(&burgeon.status()).is_empty());
}

/// A process with a copy of this thread's mounts, from when it was started.
struct OtherNamespace(Child);

impl OtherNamespace {
    fn new() -> Self {
        let mut command = Command::new("unshare");
        command.args(["--mount", "--propagation", "private", "sh", "-c", "echo; exec sleep 600"]);
        let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
        let mut line = [0];
        child.stdout.as_mut().unwrap().read_exact(&mut line).unwrap();
        Self(child)
    }
}

impl Drop for OtherNamespace {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A thread of this process with a copy of the caller's mounts.
struct ThreadElsewhere {
    end: Option<mpsc::Sender<()>>,
    thread: Option<thread::JoinHandle<()>>,
}

impl ThreadElsewhere {
    fn new() -> Self {
        let ((tell, begun), (end, ended)) = (mpsc::channel(), mpsc::channel());
        let enter = move || {
            // SAFETY: only this thread gets mounts and a current directory of its own.
            unsafe { unshare_unsafe(UnshareFlags::NEWNS | UnshareFlags::FS) }.unwrap();
            tell.send(()).unwrap();
            let _ = ended.recv();
        };
        let thread = Some(thread::spawn(enter));
        begun.recv().unwrap();
        Self { end: Some(end), thread }
    }
}

impl Drop for ThreadElsewhere {
    fn drop(&mut self) {
        drop(self.end.take());
        self.thread.take().map(thread::JoinHandle::join);
    }
}

/// Mounts are private here, so the daemon's namespace does not follow an umount.
/// An open file makes an umount fail that comes at the same time.
#[test]
fn an_umount_opens_no_other_mount() {
    let space = Space::new("umount-beside");
    let burgeon = Burgeon::new(PROGRAM, &space);
    burgeon.build(&sample(&space, 18), "sample");
    let [at, beside] = ["at", "beside"].map(|name| space.path(name));
    let [mounted, other] =
        [&at, &beside].map(|at| burgeon.mount("sample", at, &["--write-limit", LIMIT]));
    let opens = OpensOf::directories(std::slice::from_ref(&beside));
    let mut umount = burgeon.command(&["umount", at.to_str().unwrap()]).spawn().unwrap();
    let ended = wait_until(PATIENCE, || umount.try_wait().unwrap().is_some());
    // A process that waits to open it goes on.
    drop(opens);
    assert!(umount.wait().unwrap().success());
    std::mem::forget(mounted);
    assert!(ended, "it opens another mount");
    burgeon.umount(other);
}

#[test]
fn a_bound_namespace_is_not_held_by_the_daemon() {
    let space = Space::new("bound");
    let burgeon = Burgeon::new(PROGRAM, &space);
    burgeon.build(&sample(&space, 1), "image:1");
    let bound = space.path("network");
    fs::write(&bound, "").unwrap();
    // The same as `ip netns add`.
    let mut command = Command::new("unshare");
    command.arg(format!("--net={}", bound.display())).arg("true");
    assert!(command.status().unwrap().success());
    let options = ["--write-limit", LIMIT];
    let mounted = burgeon.mount("image:1", &space.path("at"), &options);
    let is_held = |process: &str| mounts_of(process).unwrap().iter().any(|mount| mount.at == bound);
    assert!(is_held("thread-self"));
    let status = burgeon.status();
    for process in ["supervisor_pid", "server_pid"] {
        assert!(!is_held(&status[process].to_string()), "by the {process}");
    }
    burgeon.umount(mounted);
    rustix::mount::unmount(&bound, rustix::mount::UnmountFlags::empty()).unwrap();
}

#[test]
fn a_mount_that_something_still_holds_is_known_and_its_holder_named() {
    let space = Space::new("held");
    let burgeon = Burgeon::new(PROGRAM, &space);
    burgeon.build(&sample(&space, 1), "image:1");
    let options = ["--writes", "w", "--write-limit", LIMIT];
    let mounted = burgeon.mount("image:1", &space.path("at"), &options);
    let at = space.path("at");
    let path = at.to_str().unwrap();
    let remount = [&["mount", "image:1", path], &options[..]].concat();
    let second = space.make_folder("second");
    let elsewhere = [&["mount", "image:1", second.to_str().unwrap()], &options[..]].concat();
    let here = format!("the writes \"w\" are mounted already, at {path}");
    burgeon.fails(&elsewhere, 5, &here);
    burgeon.fails(&["writes", "rm", "w"], 5, &here);
    let other = OtherNamespace::new();
    let holder = format!("in the namespace of sleep (process {})", other.0.id());
    burgeon.fails(&["umount", path], 5, &holder);
    burgeon.fails(&["umount", path], 5, &holder);
    burgeon.fails(&remount, 5, &holder);
    burgeon.fails(&["writes", "rm", "w"], 5, &holder);
    burgeon.fails(&["shutdown"], 5, &holder);
    burgeon.fails(&["shutdown", "--unmount"], 5, &holder);
    let said = burgeon.ok(&["doctor"]);
    assert!(said.contains(&holder), "{said}");
    drop(other);
    let released = || burgeon.status()["mounts"].as_array().is_some_and(Vec::is_empty);
    assert!(wait_until(PATIENCE, released));
    assert!(!burgeon.ok(&["doctor"]).contains("held by"));
    // A namespace that a thread alone is in, of a process that is elsewhere.
    std::mem::forget(mounted);
    let mounted = burgeon.mount("image:1", &space.path("at"), &options);
    let thread = ThreadElsewhere::new();
    let (own, name) = (std::process::id(), fs::read_to_string("/proc/self/comm").unwrap());
    let holder = format!("in the namespace of a thread of {} (process {own})", name.trim_end());
    burgeon.fails(&["umount", path], 5, &holder);
    drop(thread);
    assert!(wait_until(PATIENCE, released));
    // A namespace that no process is in, kept alive by a file as `unshare --mount=FILE` does it.
    std::mem::forget(mounted);
    let bound = space.path("bound");
    fs::write(&bound, "").unwrap();
    let mounted = burgeon.mount("image:1", &space.path("at"), &options);
    // Linux 6.18 numbers namespaces for each CPU, and binds none in one of a higher number.
    let bind = |_| {
        let other = OtherNamespace::new();
        rustix::mount::mount_bind(format!("/proc/{}/ns/mnt", other.0.id()), &bound).ok()
    };
    assert!((0..200).find_map(bind).is_some(), "no namespace can be bound to {bound:?}");
    let holder = format!("the mount {path} in the namespace that is bound to {}", bound.display());
    burgeon.fails(&["umount", path], 5, &holder);
    burgeon.fails(&["shutdown"], 5, &holder);
    unmount(&bound, UnmountFlags::empty()).unwrap();
    assert!(wait_until(PATIENCE, released));
    // In use here: it goes away at once, and is released when nobody uses it.
    std::mem::forget(mounted);
    let mounted = burgeon.mount("image:1", &space.path("at"), &options);
    let file = fs::File::open(mounted.path().join("big")).unwrap();
    let own = format!("(process {}, an open file)", std::process::id());
    burgeon.fails(&["umount", path], 5, "burgeon umount --lazy");
    let said = [burgeon.ok(&["umount", "--lazy", path]), burgeon.ok(&["status"])];
    let names = |said: &String| said.contains(&own) && said.contains("released when they let go");
    assert!(said.iter().all(names), "{said:?}");
    std::mem::forget(mounted);
    assert_eq!(fs::read_dir(space.path("at")).unwrap().count(), 0);
    burgeon.fails(&["shutdown"], 5, &own);
    drop(file);
    assert!(wait_until(PATIENCE, released));
    burgeon.ok(&["shutdown"]);
}

#[test]
fn of_two_who_unmount_the_same_place_the_second_is_told_so() {
    let space = Space::new("twice");
    let burgeon = Burgeon::new(PROGRAM, &space);
    burgeon.build(&sample(&space, 1), "image:1");
    let mounted = burgeon.mount("image:1", &space.path("at"), &["--write-limit", LIMIT]);
    let supervisor = burgeon.status()["supervisor_pid"].as_i64().unwrap();
    let supervisor = Pid::from_raw(i32::try_from(supervisor).unwrap()).unwrap();
    // Both have seen the mount by the time they ask the supervisor, which answers when it goes on.
    kill_process(supervisor, Signal::STOP).unwrap();
    let start = || {
        let mut command = burgeon.command(&["umount", mounted.path().to_str().unwrap()]);
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    };
    let both = [start(), start()];
    let asks = |child: &Child| {
        let files = fs::read_dir(format!("/proc/{}/fd", child.id())).unwrap().flatten();
        let mut targets = files.filter_map(|file| fs::read_link(file.path()).ok());
        targets.any(|target| target.to_string_lossy().starts_with("socket:"))
    };
    let ask = wait_until(PATIENCE, || both.iter().all(asks));
    kill_process(supervisor, Signal::CONT).unwrap();
    assert!(ask, "they do not connect");
    let outputs = both.map(|child| child.wait_with_output().unwrap());
    std::mem::forget(mounted);
    let done = outputs.iter().filter(|output| output.status.success()).count();
    assert_eq!(done, 1, "{outputs:?}");
    let second = outputs.iter().find(|output| !output.status.success()).unwrap();
    let said = String::from_utf8_lossy(&second.stderr);
    assert!(said.contains("nothing is mounted at"), "{said}");
    assert_eq!(second.status.code(), Some(3), "{said}");
}

/// A number of kibibytes, or of threads, that the kernel tells of a process.
fn told(pid: u64, file: &str, field: &str) -> u64 {
    let text = fs::read_to_string(format!("/proc/{pid}/{file}")).unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix(field)).unwrap();
    line.trim_start_matches(':').split_whitespace().next().unwrap().parse().unwrap()
}

#[test]
fn idle_mounts_take_a_thread_each_and_little_memory() {
    const MOUNTS: u64 = 12;
    let space = Space::new("idle");
    let burgeon = Burgeon::new(PROGRAM, &space);
    burgeon.build(&sample(&space, 5), "sample");
    let mount = |number: u64| {
        let at = space.path(&format!("at-{number}"));
        let mounted = burgeon.mount("sample", &at, &["--read-only", "--transport", "fuse"]);
        // From two threads at once, so that more than one is worth having.
        std::thread::scope(|scope| {
            for _ in 0..2 {
                let path = mounted.path().join("big");
                scope.spawn(move || {
                    for _ in 0..4 {
                        testkit::drop_caches();
                        assert_eq!(fs::read(&path).unwrap().len(), 3_000_000);
                    }
                });
            }
        });
        mounted
    };
    let mut mounted = vec![mount(0)];
    let server = || burgeon.status()["server_pid"].as_u64().unwrap();
    let cpus = std::thread::available_parallelism().unwrap().get() as u64;
    let is_idle = |mounts| {
        // Without the two that keep the cache within its bounds and look at the reads.
        let threads = || told(server(), "status", "Threads") - 2;
        let few = wait_until(PATIENCE, || threads() <= mounts + 2 * cpus);
        assert!(few, "{} threads of {mounts} idle mounts", threads());
    };
    // Never pages that are mapped from files: they count for more when another daemon ends.
    let memory = || {
        let rollup = |field| told(server(), "smaps_rollup", field);
        rollup("Anonymous") + rollup("Pss_Shmem")
    };
    is_idle(1);
    let before = memory();
    mounted.extend((1..MOUNTS).map(mount));
    is_idle(MOUNTS);
    // 294 KiB on the lab's Linux 6.1, where the bound only keeps a lost buffer (1 MiB) out.
    let bound = testkit::scaled(256, 512);
    let each = || memory().saturating_sub(before) / (MOUNTS - 1);
    // The last thread of a mount frees its buffer some time after the others have ended.
    let little = wait_until(PATIENCE, || each() <= bound);
    assert!(little, "an idle mount takes {} KiB", each());
    mounted.into_iter().for_each(|mounted| burgeon.umount(mounted));
}
