//! The place of writes, their lifetime, and the files that they are kept with.

#![allow(clippy::unwrap_used)]

use std::{
    fs::{self, File},
    io::Write,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    process::Command,
};

use rustix::fs::{FallocateFlags, fallocate};
use testkit::{Burgeon, Mounted, Rng, Space, kill, scaled, take_room};

const PROGRAM: &str = env!("CARGO_BIN_EXE_burgeon");
const LIMIT: &str = "256M";

fn tree(space: &Space, name: &str, seed: u64) -> PathBuf {
    let root = space.make_folder(name);
    fs::write(root.join("data"), Rng::new(seed).bytes(5_000_000)).unwrap();
    root
}

fn write_synced(path: &Path, bytes: &[u8]) {
    let mut file = File::create(path).unwrap();
    file.write_all(bytes).unwrap();
    file.sync_all().unwrap();
}

/// Goes on writing to `file`, so many bytes at a time, until there is no space.
fn fill(file: &File, len: usize) {
    let chunk = Rng::new(6).bytes(len);
    let mut end = file.metadata().unwrap().len();
    let error = loop {
        match take_room(file, end, &chunk) {
            Ok(taken) => end += taken,
            Err(error) => break error,
        }
    };
    assert_eq!(error.raw_os_error(), Some(28), "{error}");
}

/// The same with a file at `path`, which is removed then.
fn fill_and_free(path: &Path, len: usize) {
    fill(&File::create(path).unwrap(), len);
    fs::remove_file(path).unwrap();
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

#[test]
fn named_writes_are_found_again_and_others_are_not() {
    let space = Space::new("named");
    let tree = tree(&space, "tree", 1);
    let burgeon = Burgeon::new(PROGRAM, &space);
    burgeon.build(&tree, "sample");
    let at = space.path("at");
    let options = ["--writes", "mine", "--write-limit", LIMIT];
    let mounted = burgeon.mount("sample", &at, &options);
    write_synced(&at.join("new"), b"kept");
    fs::remove_file(at.join("data")).unwrap();
    let said = burgeon.ok(&["umount", text(&at)]);
    assert!(said.contains("kept as \"mine\""), "{said}");
    std::mem::forget(mounted);
    let mounted = burgeon.mount("sample", &at, &["--write-limit", LIMIT]);
    assert!(!at.join("new").exists() && at.join("data").exists());
    fs::write(at.join("discarded"), "x").unwrap();
    let said = burgeon.ok(&["umount", text(&at)]);
    assert!(said.contains("discarded"), "{said}");
    std::mem::forget(mounted);
    burgeon.ok(&["shutdown"]);
    let mounted = burgeon.mount("sample", &at, &["--writes", "mine"]);
    assert_eq!(fs::read(at.join("new")).unwrap(), b"kept");
    assert!(!at.join("data").exists() && !at.join("discarded").exists());
    burgeon.umount(mounted);
}

#[test]
fn a_name_is_for_one_mount_and_one_image() {
    let space = Space::new("name");
    let burgeon = Burgeon::new(PROGRAM, &space);
    burgeon.build(&tree(&space, "one", 2), "one");
    burgeon.build(&tree(&space, "two", 3), "two");
    let (a, b) = (space.path("a"), space.make_folder("b"));
    let mounted = burgeon.mount("one", &a, &["--writes", "w", "--write-limit", LIMIT]);
    burgeon.fails(&["mount", "one", text(&b), "--writes", "w"], 5, "mounted already");
    burgeon.fails(&["writes", "rm", "w"], 5, "mounted already");
    burgeon.umount(mounted);
    burgeon.fails(&["mount", "two", text(&b), "--writes", "w"], 1, "\"one\"");
    burgeon.fails(
        &["mount", "one", text(&b), "--writes", "../w"],
        2,
        "not a valid name for writes",
    );
    let list = burgeon.ok(&["writes", "list", "--json"]);
    let list: serde_json::Value = serde_json::from_str(&list).unwrap();
    assert_eq!(list["writes"][0]["record"]["image"], "one");
    assert_eq!(list["writes"][0]["state"], "kept");
    burgeon.ok(&["writes", "rm", "w"]);
    burgeon.fails(&["writes", "rm", "w"], 3, "this state directory has none");
    assert_eq!(
        fs::read_dir(burgeon.state().join("writes"))
            .unwrap()
            .flatten()
            .filter(|e| e.path().is_dir())
            .count(),
        0
    );
}

#[test]
fn writes_outlive_an_image_that_is_built_anew() {
    let space = Space::new("anew");
    let burgeon = Burgeon::new(PROGRAM, &space);
    let first = tree(&space, "first", 4);
    burgeon.build(&first, "sample");
    let at = space.path("at");
    let mounted = burgeon.mount("sample", &at, &["--writes", "w", "--write-limit", LIMIT]);
    write_synced(&at.join("new"), b"on the first image");
    burgeon.umount(mounted);
    let second = tree(&space, "second", 5);
    burgeon.build(&second, "sample");
    burgeon.ok(&["shutdown"]);
    // All that was prepared of the first image goes, its cache too; the writes keep their own.
    fs::remove_dir_all(burgeon.state().join("images")).unwrap();
    let said = burgeon.ok(&["mount", "sample", text(&at), "--writes", "w"]);
    assert!(said.contains("built anew"), "{said}");
    assert_eq!(fs::read(at.join("data")).unwrap(), fs::read(first.join("data")).unwrap());
    assert_eq!(fs::read(at.join("new")).unwrap(), b"on the first image");
    burgeon.ok(&["umount", text(&at)]);
    let mounted = burgeon.mount("sample", &at, &["--read-only"]);
    assert_eq!(fs::read(at.join("data")).unwrap(), fs::read(second.join("data")).unwrap());
    burgeon.umount(mounted);
}

#[test]
fn space_is_reserved_and_a_full_sprout_is_enospc_and_nothing_worse() {
    let space = Space::new("full");
    let burgeon = Burgeon::new(PROGRAM, &space);
    burgeon.build(&tree(&space, "tree", 6), "sample");
    let at = space.path("at");
    let options = ["--writes", "w", "--write-limit", "400M", "--reserve"];
    let mounted = burgeon.mount("sample", &at, &options);
    let sprout = burgeon.state().join("writes/w/sprout");
    let reserved = || fs::metadata(&sprout).unwrap().blocks() * 512;
    assert!(reserved() >= 400 << 20, "{} bytes are reserved", reserved());
    // One call can have it.
    let large = File::create(at.join("large")).unwrap();
    fallocate(&large, FallocateFlags::empty(), 0, 250 << 20).unwrap();
    drop(large);
    write_synced(&at.join("before"), b"synced");
    fill_and_free(&at.join("filler"), 1 << 20);
    write_synced(&at.join("after"), b"still writable");
    // Freed space stays the sprout's: with discard it would have melted.
    assert!(reserved() >= 400 << 20, "{} bytes are reserved", reserved());
    burgeon.umount(mounted);
    let mounted = burgeon.mount("sample", &at, &["--writes", "w"]);
    assert_eq!(fs::read(at.join("before")).unwrap(), b"synced");
    assert_eq!(fs::read(at.join("after")).unwrap(), b"still writable");
    burgeon.umount(mounted);
}

#[test]
fn a_sprout_begins_small_and_grows_before_it_is_full() {
    let space = Space::new("growing");
    let burgeon = Burgeon::new(PROGRAM, &space);
    burgeon.build(&tree(&space, "tree", 7), "sample");
    let at = space.path("at");
    let other = burgeon.mount("sample", &space.path("other"), &["--write-limit", "8G"]);
    let mounted = burgeon.mount("sample", &at, &["--writes", "w", "--write-limit", "8G"]);
    let sprout = burgeon.state().join("writes/w/sprout");
    let reserved = || fs::metadata(&sprout).unwrap().blocks() * 512;
    let before = reserved();
    assert!((256 << 20..=1100 << 20).contains(&before), "{before} bytes are reserved at first");
    // A program that writes as quickly as memory takes it.
    let mut file = File::create(at.join("filler")).unwrap();
    let chunk = Rng::new(7).bytes(1 << 20);
    for taken in 0..(before >> 20) + scaled(700, 100) {
        file.write_all(&chunk).unwrap_or_else(|error| {
            panic!("after {taken} MiB of at first {} MiB: {error}", before >> 20)
        });
    }
    drop(file);
    assert!(reserved() > before);
    // It is written down when the step is done.
    let mut status = burgeon.status();
    assert!(testkit::wait_until(testkit::PATIENCE, || {
        status = burgeon.status();
        let known = written_by(&status, "w")["reserved"].as_u64();
        known == Some(fs::metadata(&sprout).unwrap().len())
    }));
    let writes = written_by(&status, "w");
    assert_eq!((&writes["thin"], &writes["limit"]), (&true.into(), &(8u64 << 30).into()));
    // Nobody has written to the other one.
    let mounts = status["mounts"].as_array().unwrap();
    let idle = mounts.iter().find(|mount| mount["writes"]["name"].is_null()).unwrap();
    let idle = idle["writes"]["reserved"].as_u64().unwrap();
    assert!((256 << 20..=1 << 30).contains(&idle), "{status:#}");
    burgeon.umount(mounted);
    burgeon.umount(other);
    burgeon.ok(&["writes", "rm", "w"]);
}

/// The status of the writes `name`.
fn written_by<'a>(status: &'a serde_json::Value, name: &str) -> &'a serde_json::Value {
    let mounts = status["mounts"].as_array().unwrap();
    &mounts.iter().find(|mount| mount["writes"]["name"] == name).unwrap()["writes"]
}

#[test]
fn a_step_that_was_not_taken_to_its_end_is_taken_by_the_next_mount() {
    let space = Space::new("half-grown");
    let burgeon = Burgeon::new(PROGRAM, &space);
    burgeon.build(&tree(&space, "tree", 13), "sample");
    let at = space.path("at");
    let available = || {
        let stat = rustix::fs::statvfs(&at).unwrap();
        stat.f_bavail * stat.f_frsize
    };
    let mounted = burgeon.mount("sample", &at, &["--writes", "w", "--write-limit", "8G"]);
    let before = available();
    // More than there is at once is refused by btrfs, and costs nothing.
    let large = File::create(at.join("large")).unwrap();
    let refused = fallocate(&large, FallocateFlags::empty(), 0, 6 << 30).unwrap_err();
    assert_eq!(refused, rustix::io::Errno::NOSPC);
    drop(large);
    write_synced(&at.join("after"), b"still writable");
    burgeon.umount(mounted);
    // The file has grown and btrfs does not know it: the process that grew it was killed.
    let file = File::options().write(true).open(burgeon.state().join("writes/w/sprout")).unwrap();
    let len = file.metadata().unwrap().len();
    fallocate(&file, FallocateFlags::empty(), len, 512 << 20).unwrap();
    drop(file);
    let mounted = burgeon.mount("sample", &at, &["--writes", "w"]);
    let after = available();
    assert!(after >= before + (400 << 20), "{} MiB, then {}", before >> 20, after >> 20);
    assert_eq!(fs::read(at.join("after")).unwrap(), b"still writable");
    burgeon.umount(mounted);
    burgeon.ok(&["writes", "rm", "w"]);
}

#[test]
fn a_full_host_lets_a_growing_sprout_go_on() {
    let space = Space::new("full-host");
    let burgeon = Burgeon::new(PROGRAM, &space);
    let disk = space.small_disk("disk", 2 << 30);
    let burgeon = {
        drop(burgeon);
        Burgeon::with_state(PROGRAM, disk.path().join("state"))
    };
    burgeon.build(&tree(&space, "tree", 8), "sample");
    let at = space.path("at");
    let mounted = burgeon.mount("sample", &at, &["--writes", "w", "--write-limit", "64G"]);
    write_synced(&at.join("before"), b"synced");
    let hog = disk.path().join("hog");
    let hog_file = File::create(&hog).unwrap();
    fill(&hog_file, 1 << 20);
    fill_and_free(&at.join("filler"), 8 << 20);
    write_synced(&at.join("after"), b"still writable");
    drop(hog_file);
    fs::remove_file(hog).unwrap();
    burgeon.umount(mounted);
    let mounted = burgeon.mount("sample", &at, &["--writes", "w"]);
    assert_eq!(fs::read(at.join("after")).unwrap(), b"still writable");
    burgeon.umount(mounted);
    drop(burgeon);
    drop(disk);
}

/// An installation whose state directory is in `disk`, and whose store is elsewhere, with the named
/// writes `w` mounted at `at`.
fn with_state_on(space: &Space, disk: &Path) -> (Burgeon, Mounted) {
    let burgeon = Burgeon::with_state(PROGRAM, disk.join("state"));
    let burgeon = burgeon.option("--store").option(space.path("store"));
    burgeon.build(&tree(space, "tree", 10), "sample");
    let at = space.path("at");
    let mounted = burgeon.mount("sample", &at, &["--writes", "w", "--write-limit", LIMIT]);
    write_synced(&at.join("before"), b"synced");
    (burgeon, mounted)
}

#[test]
fn named_writes_are_mounted_again_on_a_disk_without_a_free_byte() {
    let space = Space::new("no-byte");
    let disk = space.small_disk("disk", 1 << 30);
    let (burgeon, mounted) = with_state_on(&space, disk.path());
    let at = space.path("at");
    burgeon.umount(mounted);
    let hog = File::create(disk.path().join("hog")).unwrap();
    [1 << 20, 4096, 1].into_iter().for_each(|len| fill(&hog, len));
    assert_eq!(rustix::fs::statvfs(disk.path()).unwrap().f_bavail, 0);
    for round in 0..3 {
        let mounted = burgeon.mount("sample", &at, &["--writes", "w"]);
        assert_eq!(fs::read(at.join("before")).unwrap(), b"synced");
        write_synced(&at.join(format!("round-{round}")), b"also");
        burgeon.umount(mounted);
        // Space that has come free meanwhile is taken by somebody else.
        fill(&hog, 4096);
        if round == 1 {
            burgeon.ok(&["shutdown"]);
        }
    }
    // A mount that needs more than the reserve names the remedy.
    burgeon.fails(&["mount", "sample", text(&at), "--read-only"], 6, "burgeon gc");
    drop(hog);
    fs::remove_file(disk.path().join("hog")).unwrap();
    let mounted = burgeon.mount("sample", &at, &["--writes", "w"]);
    (0..3).for_each(|round| assert!(at.join(format!("round-{round}")).exists()));
    burgeon.umount(mounted);
    drop(burgeon);
}

/// XFS makes inodes in groups, and may have no room for the socket of a new supervisor.
#[test]
fn a_daemon_begins_on_a_disk_without_a_free_block() {
    let space = Space::new("no-inode");
    let disk = space.disk_with(&space.path("disk"), 900 << 20, &["mkfs.xfs", "-q"]);
    let (burgeon, mounted) = with_state_on(&space, disk.path());
    let at = space.path("at");
    let hog = File::create(disk.path().join("hog")).unwrap();
    [1 << 20, 4096, 1].into_iter().for_each(|len| fill(&hog, len));
    // Inodes that are left over are taken as well.
    let taken = (0..).map(|n| File::create(disk.path().join(format!("inode-{n}"))));
    let full = taken.map_while(|made| made.err().map_or(Some(None), |e| Some(Some(e))));
    let full = full.flatten().next().unwrap();
    assert_eq!(full.kind(), std::io::ErrorKind::StorageFull);
    let status = burgeon.status();
    for process in ["supervisor_pid", "server_pid"] {
        kill(status[process].as_u64().unwrap() as u32);
    }
    burgeon.ok(&["doctor", "--repair"]);
    assert_eq!(fs::read(at.join("before")).unwrap(), b"synced");
    burgeon.umount(mounted);
    burgeon.ok(&["shutdown"]);
    let mounted = burgeon.mount("sample", &at, &["--writes", "w"]);
    assert_eq!(fs::read(at.join("before")).unwrap(), b"synced");
    burgeon.umount(mounted);
    drop(burgeon);
}

/// Without their space, btrfs would lose what it has accepted as soon as the host is full.
#[test]
fn writes_that_a_backup_has_made_sparse_are_reserved_again() {
    let space = Space::new("restored");
    let tree = tree(&space, "tree", 1);
    let burgeon = Burgeon::new(PROGRAM, &space);
    burgeon.build(&tree, "sample");
    let at = space.path("at");
    let options = ["--writes", "mine", "--write-limit", LIMIT];
    let mounted = burgeon.mount("sample", &at, &options);
    write_synced(&at.join("new"), b"kept");
    burgeon.umount(mounted);
    let sprout = burgeon.state().join("writes/mine/sprout");
    let copy = space.path("backup");
    let mut cp = Command::new("cp");
    let copied = cp.args(["-a", "--sparse=always"]).args([&sprout, &copy]).status().unwrap();
    assert!(copied.success());
    fs::rename(&copy, &sprout).unwrap();
    let holes = |path: &Path| {
        let metadata = fs::metadata(path).unwrap();
        metadata.len().saturating_sub(metadata.blocks() * 512)
    };
    assert!(holes(&sprout) > 0, "the copy is sparse");
    let mounted = burgeon.mount("sample", &at, &options);
    assert_eq!(holes(&sprout), 0);
    assert_eq!(fs::read(at.join("new")).unwrap(), b"kept");
    burgeon.umount(mounted);
}

/// Failed writes of the cache, and failed reads of the first mount.
fn mount_errors(status: &serde_json::Value) -> u64 {
    let mount = &status["mounts"][0];
    let counts = [&mount["cache"]["write_errors"], &mount["reads"]["failed_reads"]];
    counts.into_iter().map(|count| count.as_u64().unwrap()).sum()
}

#[test]
fn a_cache_that_is_full_is_said_with_what_to_do() {
    let space = Space::new("full-cache");
    let disk = space.small_disk("disk", 64 << 20);
    let store = space.path("store");
    let burgeon = Burgeon::with_state(PROGRAM, disk.path().join("state"));
    let burgeon = burgeon.option("--store").option(&store);
    let tree = tree(&space, "tree", 11);
    burgeon.build(&tree, "sample");
    let at = space.path("at");
    let mounted = burgeon.mount("sample", &at, &["--read-only"]);
    let status = burgeon.status();
    assert_eq!(status["mounts"][0]["cache"]["state"], "writing", "{status:#}");
    let hog = File::create(disk.path().join("hog")).unwrap();
    [1 << 20, 4096].into_iter().for_each(|len| fill(&hog, len));
    // The cache is none of a reader's business.
    assert_eq!(fs::read(at.join("data")).unwrap(), fs::read(tree.join("data")).unwrap());
    let is_full = || burgeon.status()["mounts"][0]["cache"]["state"] == "full";
    assert!(testkit::wait_until(std::time::Duration::from_secs(20), is_full));
    let status = burgeon.status();
    let cache = &status["mounts"][0]["cache"];
    assert!(cache["reason"].as_str().unwrap().contains("space"), "{status:#}");
    // The cache writes nothing that would not fit, and keeps some chunks in memory.
    assert!(status["cache"]["refused"].as_u64() > Some(0), "{status:#}");
    assert_eq!(mount_errors(&status), 0, "{status:#}");
    let said = burgeon.ok(&["status"]);
    assert!(said.contains("FULL") && said.contains("--keep-free"), "{said}");
    burgeon.umount(mounted);
    drop(burgeon);
}

#[test]
fn a_cache_whose_disk_breaks_is_stopped_and_readers_do_not_notice() {
    let space = Space::new("broken-cache");
    let store = space.path("store");
    let burgeon = Burgeon::new(PROGRAM, &space).option("--store").option(&store);
    let tree = tree(&space, "tree", 12);
    burgeon.build(&tree, "sample");
    let cache = burgeon.state().join("cache");
    let disk = space.disk(&cache, 64 << 20);
    let at = space.path("at");
    let mounted = burgeon.mount("sample", &at, &["--read-only"]);
    testkit::break_disk(&cache);
    assert_eq!(fs::read(at.join("data")).unwrap(), fs::read(tree.join("data")).unwrap());
    let is_stopped = || burgeon.status()["mounts"][0]["cache"]["state"] == "stopped";
    assert!(testkit::wait_until(testkit::PATIENCE, is_stopped), "{:#}", burgeon.status());
    let status = burgeon.status();
    let mount = &status["mounts"][0];
    assert!(mount["cache"]["write_errors"].as_u64() > Some(0), "{status:#}");
    assert!(status["cache"]["refused"].as_u64() > Some(0), "{status:#}");
    assert_eq!(mount["reads"]["failed_reads"], 0, "{status:#}");
    let said = burgeon.ok(&["status"]);
    assert!(said.contains("STOPPED") && said.contains("check the disk"), "{said}");

    // It comes from memory or from the store again: the disk gives back no data.
    testkit::drop_caches();
    assert_eq!(fs::read(at.join("data")).unwrap(), fs::read(tree.join("data")).unwrap());
    burgeon.umount(mounted);
    burgeon.ok(&["shutdown"]);
    drop(disk);
}

#[test]
fn writes_go_to_a_device_of_the_users() {
    let space = Space::new("device");
    let burgeon = Burgeon::new(PROGRAM, &space);
    burgeon.build(&tree(&space, "tree", 9), "sample");
    let file = space.path("disk");
    File::create(&file).unwrap().set_len(512 << 20).unwrap();
    let device = Attached::new(&file);
    let at = space.path("at");
    let options = ["--writes", "w", "--writes-device", device.0.as_str()];
    let mounted = burgeon.mount("sample", &at, &options);
    write_synced(&at.join("new"), b"on the device");
    burgeon.umount(mounted);
    let mounted = burgeon.mount("sample", &at, &["--writes", "w"]);
    assert_eq!(fs::read(at.join("new")).unwrap(), b"on the device");
    burgeon.umount(mounted);
    burgeon.fails(
        &["mount", "sample", text(&at), "--writes-device", text(&file)],
        1,
        "not a block device",
    );

    // Nobody of ours is alive to say that the device is in use: the kernel does.
    let mounted = burgeon.mount("sample", &at, &["--writes", "w"]);
    burgeon.kill_daemon();
    burgeon.fails(&["writes", "rm", "w"], 5, "are mounted already, at");
    assert_eq!(state_of_writes(&burgeon), "mounted");
    burgeon.umount(mounted);
    assert_eq!(state_of_writes(&burgeon), "kept");
    burgeon.ok(&["writes", "rm", "w"]);
}

fn state_of_writes(burgeon: &Burgeon) -> String {
    let list = burgeon.ok(&["writes", "list", "--json"]);
    let list: serde_json::Value = serde_json::from_str(&list).unwrap();
    list["writes"][0]["state"].as_str().unwrap().to_owned()
}

#[test]
fn a_usage_error_is_a_document_too() {
    let space = Space::new("usage");
    let burgeon = Burgeon::new(PROGRAM, &space);
    let finished = burgeon.run(&["mount", "--json", "--no-such-option"]);
    assert_eq!(finished.code, Some(2));
    let document: serde_json::Value = serde_json::from_str(&finished.stdout).unwrap();
    assert_eq!(document["error"]["kind"], "usage");
}

/// A loop device of the test's own.
struct Attached(String);

impl Attached {
    fn new(file: &Path) -> Self {
        let output = std::process::Command::new("losetup")
            .args(["--find", "--show"])
            .arg(file)
            .output()
            .unwrap();
        assert!(output.status.success(), "{output:?}");
        Self(String::from_utf8(output.stdout).unwrap().trim().to_owned())
    }
}

impl Drop for Attached {
    fn drop(&mut self) {
        let _ = std::process::Command::new("losetup").args(["--detach", &self.0]).status();
    }
}

/// As quickly as memory takes it, into a mount with default options, again and again: a sprout
/// grows ahead of the written data, and never beyond its limit. Only `make soak` has the time, and
/// says how often.
#[test]
fn default_mounts_take_four_gigabytes_each() {
    let rounds = std::env::var("ROUNDS").ok().and_then(|rounds| rounds.parse::<u32>().ok());
    let Some(rounds) = rounds else { return };
    let space = Space::new("gigabytes");
    let burgeon = Burgeon::new(PROGRAM, &space);
    burgeon.build(&tree(&space, "tree", 14), "sample");
    for round in 0..rounds {
        let mounted = burgeon.mount("sample", &space.path("at"), &[]);
        let written = Command::new("dd")
            .args(["if=/dev/zero", "bs=1M", "count=4096", "conv=fsync"])
            .arg(format!("of={}", mounted.path().join("large").display()))
            .output()
            .unwrap();
        assert!(written.status.success(), "round {round}: {written:?}");
        let status = burgeon.status();
        let writes = &status["mounts"][0]["writes"];
        let (reserved, limit) = (writes["reserved"].as_u64(), writes["limit"].as_u64());
        assert!(reserved <= limit, "round {round}: {status:#}");
        burgeon.umount(mounted);
    }
}
