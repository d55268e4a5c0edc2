//! Images in a store: the promises of `build`, `list`, `inspect`, `verify`, `rm` and `gc`, and that
//! nothing which a mount or kept writes need is ever removed.

#![allow(clippy::unwrap_used)]

use std::{
    fs,
    io::Write,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use rustix::mount::{MountFlags, mount_remount};
use serde_json::Value;
use testkit::{Burgeon, Rng, Space, compare};

const PROGRAM: &str = env!("CARGO_BIN_EXE_burgeon");

fn tree(space: &Space, name: &str, seed: u64) -> PathBuf {
    let root = space.make_folder(name);
    fs::create_dir(root.join("folder")).unwrap();
    fs::write(root.join("folder/data"), Rng::new(seed).bytes(3_000_000)).unwrap();
    fs::write(root.join("small"), "small").unwrap();
    root
}

fn json(burgeon: &Burgeon, arguments: &[&str]) -> Value {
    let mut arguments = arguments.to_vec();
    arguments.push("--json");
    let text = burgeon.ok(&arguments);
    serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error} in {text}"))
}

fn packs(store: &Path) -> Vec<PathBuf> {
    let mut packs: Vec<_> =
        fs::read_dir(store.join("packs")).unwrap().map(|entry| entry.unwrap().path()).collect();
    packs.sort();
    packs
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

fn text_of(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).unwrap()
}

#[test]
fn output_that_nobody_takes_is_no_panic() {
    let space = Space::new("output");
    let burgeon = Burgeon::new(PROGRAM, &space);
    burgeon.build(&tree(&space, "tree", 1), "sample");
    let full = || fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
    for arguments in [&["list"][..], &["list", "--json"], &["inspect", "sample", "--map"]] {
        // The reader has seen enough: that is no failure.
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let left = burgeon.command(arguments).stdout(writer).output().unwrap();
        assert_eq!((left.status.code(), text_of(&left.stderr)), (Some(0), ""), "{arguments:?}");
        let lost = burgeon.command(arguments).stdout(full()).output().unwrap();
        assert_eq!(lost.status.code(), Some(6), "{arguments:?}");
        let said = text_of(&lost.stderr);
        assert!(said.starts_with("burgeon: cannot write to standard output: "), "{said}");
    }
    let unheard = burgeon.command(&["inspect", "other"]).stderr(full()).status().unwrap();
    assert_eq!(unheard.code(), Some(3));
}

fn make_fifo(path: &Path) {
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder).unwrap();
    }
    let made = Command::new("mkfifo").arg(path).status().unwrap();
    assert!(made.success());
}

/// A shared folder belongs to others, too.
#[test]
fn a_fifo_in_a_store_blocks_nothing() {
    let space = Space::new("store-fifo");
    let burgeon = Burgeon::new(PROGRAM, &space);
    let tree = tree(&space, "tree", 1);
    burgeon.build(&tree, "near:1");
    let store = space.path("shared");
    let shared = ["--store", text(&store)];
    let with = |arguments: &[&'static str]| [arguments, &shared[..]].concat();
    burgeon.ok(&[&["build", text(&tree), "x:1"], &shared[..]].concat());
    // Another host's record concerns its collections, not this host's mounts.
    let record = store.join("roots/other");
    make_fifo(&record);
    let mount = burgeon.mount("x:1", &space.path("shared-mount"), &shared);
    compare(&tree, mount.path()).unwrap();
    burgeon.umount(mount);
    burgeon.fails(&with(&["gc"]), 4, "is not a regular file");
    fs::remove_file(&record).unwrap();
    // A name.
    make_fifo(&store.join("images/zz"));
    burgeon.fails(&with(&["verify", "zz"]), 4, "is not a regular file");
    burgeon.fails(&with(&["gc", "--dry-run"]), 4, "is not a regular file");
    let at = space.make_folder("zz");
    burgeon.fails(&[&["mount", "zz", text(&at)], &shared[..]].concat(), 4, "is not a regular file");
    burgeon.run(&with(&["list"]));
    burgeon.ok(&with(&["rm", "zz"]));
    // A manifest.
    let manifests: Vec<_> = fs::read_dir(store.join("manifests")).unwrap().flatten().collect();
    fs::remove_file(manifests[0].path()).unwrap();
    make_fifo(&manifests[0].path());
    burgeon.fails(&with(&["verify", "x:1"]), 4, "is not a regular file");
    burgeon.fails(&with(&["inspect", "x:1"]), 4, "is not a regular file");
    // The lock of writers. Another store has its own.
    fs::remove_file(store.join("lock")).unwrap();
    make_fifo(&store.join("lock"));
    burgeon.fails(&with(&["gc"]), 1, "is not a regular file");
    let mount = burgeon.mount("near:1", &space.path("near"), &[]);
    burgeon.umount(mount);
}

#[test]
fn this_hosts_damaged_record_is_written_anew() {
    let space = Space::new("store-record");
    let burgeon = Burgeon::new(PROGRAM, &space);
    let tree = tree(&space, "tree", 1);
    burgeon.build(&tree, "x:1");
    let mount = burgeon.mount("x:1", &space.path("first"), &[]);
    let roots = space.path("state/store/roots");
    let record = fs::read_dir(&roots).unwrap().next().unwrap().unwrap().path();
    let sound: Value = serde_json::from_slice(&fs::read(&record).unwrap()).unwrap();
    burgeon.build(&self::tree(&space, "other", 2), "y:1");
    for damage in [&b""[..], b"{", b"{\"format\":1}", &[0; 100]] {
        fs::write(&record, damage).unwrap();
        let second = burgeon.mount("y:1", &space.path("second"), &[]);
        let now: Value = serde_json::from_slice(&fs::read(&record).unwrap()).unwrap();
        let manifests = now["manifests"].as_array().unwrap();
        assert_eq!(manifests.len(), 2, "{now}");
        assert!(manifests.contains(&sound["manifests"][0]), "{now}");
        burgeon.umount(second);
        fs::write(&record, damage).unwrap();
        burgeon.ok(&["gc"]);
        let now: Value = serde_json::from_slice(&fs::read(&record).unwrap()).unwrap();
        assert_eq!(now["manifests"], sound["manifests"]);
        burgeon.build(&space.path("other"), "y:1");
    }
    burgeon.umount(mount);
}

#[test]
fn images_are_listed_inspected_and_verified() {
    let space = Space::new("store");
    let burgeon = Burgeon::before_state(PROGRAM, space.path("state"));
    burgeon.fails(&["list"], 3, "there is no state directory");
    burgeon.build(&tree(&space, "tree", 1), "sample:1");
    let list = json(&burgeon, &["list"]);
    assert_eq!(list["images"][0]["name"], "sample:1");
    let facts = json(&burgeon, &["inspect", "sample:1"]);
    assert_eq!((facts["files"].as_u64(), facts["directories"].as_u64()), (Some(2), Some(2)));
    let map = json(&burgeon, &["inspect", "sample:1", "--map"]);
    let pieces = map["map"].as_array().unwrap();
    let covered: u64 = pieces.iter().map(|piece| piece["length"].as_u64().unwrap()).sum();
    assert_eq!(covered, 3_000_000u64.next_multiple_of(4096));
    assert!(pieces.iter().all(|piece| piece["path"] == "/folder/data"));
    let verified = json(&burgeon, &["verify", "sample:1"]);
    assert_eq!(verified["damage"].as_array().unwrap().len(), 0);
    burgeon.fails(&["inspect", "sample:2"], 3, "sample:1");
    let error = burgeon.run(&["--json", "inspect", "sample:2"]);
    let document: Value = serde_json::from_str(&error.stdout).unwrap();
    assert_eq!(document["error"]["kind"], "not-found");
}

#[test]
fn room_is_made_on_a_full_disk() {
    let space = Space::new("full-store");
    let disk = space.small_disk("disk", 64 << 20);
    let burgeon = Burgeon::with_state(PROGRAM, disk.path().join("state"));
    burgeon.build(&tree(&space, "tree", 1), "sample");
    let mut filler = fs::File::create(disk.path().join("filler")).unwrap();
    let full = loop {
        if let Err(error) = filler.write_all(&[0; 4096]) {
            break error;
        }
    };
    assert_eq!(full.kind(), std::io::ErrorKind::StorageFull);
    burgeon.ok(&["rm", "sample"]);
    let collected = json(&burgeon, &["gc"]);
    assert!(collected["bytes"].as_u64().unwrap() >= 3_000_000, "{collected:#}");
    drop(burgeon);
}

#[test]
fn a_limit_of_file_sizes_is_named_and_leaves_nothing() {
    let space = Space::new("file-limit");
    let burgeon = Burgeon::new(PROGRAM, &space);
    let tree = tree(&space, "tree", 1);
    let mut command = Command::new("prlimit");
    command.args(["--fsize=1000000:1000000", PROGRAM, "--state-dir", text(burgeon.state())]);
    command.args(["--config", "none", "build", text(&tree), "sample"]);
    let output = command.output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("File too large"), "{said}");
    let left = fs::read_dir(burgeon.state().join("store/tmp")).unwrap().count();
    assert_eq!(left, 0, "leftovers of the build");
}

#[test]
fn a_dry_run_removes_no_leftover_of_a_killed_build() {
    let space = Space::new("dry-run");
    let burgeon = Burgeon::new(PROGRAM, &space);
    burgeon.build(&tree(&space, "tree", 1), "sample");
    let left = burgeon.state().join("store/tmp/1-2-3.part");
    fs::write(&left, [1; 4096]).unwrap();
    assert_eq!(json(&burgeon, &["gc", "--dry-run"])["stale_bytes"], 4096);
    assert!(left.exists());
    assert_eq!(json(&burgeon, &["gc"])["stale_bytes"], 4096);
    assert!(!left.exists());
}

/// Whatever lies in the place of the folder of records.
#[test]
fn records_that_are_no_folder_are_named() {
    let space = Space::new("records");
    let burgeon = Burgeon::new(PROGRAM, &space);
    let tree = tree(&space, "tree", 1);
    burgeon.build(&tree, "sample");
    let records = burgeon.state().join("provenance");
    fs::remove_dir_all(&records).unwrap();
    rustix::fs::mknodat(
        rustix::fs::CWD,
        &records,
        rustix::fs::FileType::Fifo,
        rustix::fs::Mode::from(0o600),
        0,
    )
    .unwrap();
    burgeon.fails(&["build", text(&tree), "other"], 1, "Not a directory");
    let verified = burgeon.run(&["verify", "sample"]);
    assert_eq!(verified.code, Some(0), "{verified:#?}");
    assert!(verified.stderr.contains("is not recorded"), "{verified:#?}");
}

#[test]
fn a_read_only_disk_is_named_with_its_remedy() {
    let space = Space::new("read-only-store");
    let disk = space.small_disk("disk", 64 << 20);
    let burgeon = Burgeon::with_state(PROGRAM, disk.path().join("state"));
    let tree = tree(&space, "tree", 1);
    burgeon.build(&tree, "sample");
    mount_remount(disk.path(), MountFlags::RDONLY, c"").unwrap();
    for arguments in [&["build", tree.to_str().unwrap(), "other"][..], &["gc"], &["disks"]] {
        burgeon.fails(arguments, 1, "mount that file system writable");
    }
    // The verdict needs no writes.
    let finished = burgeon.run(&["verify", "sample"]);
    assert_eq!(finished.code, Some(0), "{finished:#?}");
    assert!(finished.stderr.contains("is not recorded"), "{finished:#?}");
    burgeon.fails(&["snapshotter", "status"], 3, "no snapshotter has had the root");
    mount_remount(disk.path(), MountFlags::empty(), c"").unwrap();
    drop(burgeon);
}

#[test]
fn a_flipped_bit_is_found_and_its_file_is_named() {
    let space = Space::new("flip");
    let burgeon = Burgeon::new(PROGRAM, &space);
    burgeon.build(&tree(&space, "tree", 2), "sample");
    let pack = packs(&burgeon.state().join("store")).remove(0);
    let mut bytes = fs::read(&pack).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 4;
    fs::write(&pack, bytes).unwrap();
    let finished = burgeon.run(&["verify", "sample"]);
    assert_eq!(finished.code, Some(4), "{finished:#?}");
    assert!(finished.stdout.contains("/folder/data"), "{finished:#?}");
    let name = pack.file_name().unwrap().to_str().unwrap();
    assert!(finished.stdout.contains(name), "{finished:#?}");
    // The advice of the message helps.
    assert!(finished.stdout.contains("remove them there and build"), "{finished:#?}");
    fs::remove_file(&pack).unwrap();
    burgeon.build(&space.path("tree"), "sample");
    let verified = json(&burgeon, &["verify", "sample"]);
    assert_eq!(verified["damage"].as_array().unwrap().len(), 0);
}

#[test]
fn archives_and_trees_give_the_same_mount() {
    let space = Space::new("archive");
    let tree = tree(&space, "tree", 3);
    let burgeon = Burgeon::new(PROGRAM, &space);
    let archive = space.path("tree.tar");
    let tar = Command::new("tar")
        .args(["--format=posix", "-cf"])
        .arg(&archive)
        .arg("-C")
        .arg(&tree)
        .arg(".")
        .status();
    assert!(tar.unwrap().success());
    burgeon.ok(&["build", text(&archive), "from-file"]);
    let piped = burgeon
        .command(&["build", "-", "from-stdin"])
        .stdin(Stdio::from(fs::File::open(&archive).unwrap()))
        .output()
        .unwrap();
    assert!(piped.status.success(), "{piped:?}");
    let digests: Vec<_> = json(&burgeon, &["list"])["images"]
        .as_array()
        .unwrap()
        .iter()
        .map(|image| image["manifest"].clone())
        .collect();
    assert_eq!(digests[0], digests[1]);
    let at = space.path("at");
    let mounted = burgeon.mount("from-stdin", &at, &["--read-only"]);
    compare(&tree, &at).unwrap().assert_same();
    burgeon.umount(mounted);
}

#[test]
fn gc_keeps_what_mounts_and_writes_need_and_removes_the_rest() {
    let space = Space::new("gc");
    let burgeon = Burgeon::new(PROGRAM, &space);
    let store = burgeon.state().join("store");
    for (name, seed) in [("mounted", 4), ("written", 5), ("unneeded", 6), ("named", 7)] {
        burgeon.build(&tree(&space, name, seed), name);
    }
    let (a, b) = (space.path("a"), space.path("b"));
    let mounted = burgeon.mount("mounted", &a, &["--read-only"]);
    let written = burgeon.mount("written", &b, &["--writes", "w", "--write-limit", "256M"]);
    fs::write(b.join("new"), "kept").unwrap();
    burgeon.umount(written);
    for name in ["mounted", "written", "unneeded"] {
        burgeon.ok(&["rm", name]);
    }
    assert_eq!(json(&burgeon, &["gc", "--dry-run"])["manifests"], 1);
    let before = packs(&store).len();
    let collected = json(&burgeon, &["gc"]);
    assert_eq!(collected["manifests"], 1, "{collected:#}");
    assert!(packs(&store).len() < before);
    assert_eq!(json(&burgeon, &["gc"])["manifests"], 0);
    // Neither has been read before, so all of their data comes from the store now.
    assert_eq!(
        fs::read(a.join("folder/data")).unwrap(),
        fs::read(space.path("mounted/folder/data")).unwrap()
    );
    burgeon.umount(mounted);
    let written = burgeon.mount("written", &b, &["--writes", "w"]);
    assert_eq!(
        fs::read(b.join("folder/data")).unwrap(),
        fs::read(space.path("written/folder/data")).unwrap()
    );
    assert_eq!(fs::read(b.join("new")).unwrap(), b"kept");
    burgeon.umount(written);
    burgeon.ok(&["writes", "rm", "w"]);
    let collected = json(&burgeon, &["gc"]);
    assert_eq!(collected["manifests"], 2, "{collected:#}");
    let verified = json(&burgeon, &["verify", "named"]);
    assert_eq!(verified["damage"].as_array().unwrap().len(), 0);
}

#[test]
fn manifests_that_another_host_needs_stay() {
    let space = Space::new("hosts");
    let store = space.path("shared");
    let option = |burgeon: Burgeon| burgeon.option("--store").option(store.as_os_str());
    let here = option(Burgeon::with_state(PROGRAM, space.path("here")));
    let there = option(Burgeon::with_state(PROGRAM, space.path("there")));
    let tree = tree(&space, "tree", 8);
    here.build(&tree, "sample");
    let at = space.path("at");
    let mounted = there.mount("sample", &at, &["--read-only"]);
    here.fails(&["rm", "sample"], 1, "the host");
    // Removing the name by hand does not take the data away either.
    fs::remove_file(store.join("images/sample")).unwrap();
    assert_eq!(json(&here, &["gc"])["manifests"], 0);
    compare(&tree, &at).unwrap().assert_same();
    there.umount(mounted);
    json(&there, &["gc"]);
    assert!(packs(&store).is_empty());
}

#[test]
fn a_store_that_goes_away_is_an_error_until_it_is_back() {
    let space = Space::new("away");
    let store = space.path("shared");
    let burgeon = Burgeon::new(PROGRAM, &space).option("--store").option(store.as_os_str());
    let tree = tree(&space, "tree", 9);
    burgeon.build(&tree, "sample");
    let at = space.path("at");
    let mounted = burgeon.mount("sample", &at, &["--read-only"]);
    let hidden = space.path("hidden");
    fs::rename(&store, &hidden).unwrap();
    let other = space.make_folder("other");
    burgeon.fails(&["mount", "sample", text(&other)], 3, "shared");
    let reader = {
        let file = at.join("folder/data");
        std::thread::spawn(move || fs::read(file))
    };
    // The reader waits for the store, and gets its bytes when that is back.
    let waits = testkit::wait_until(testkit::PATIENCE, || {
        !burgeon.status()["mounts"][0]["last_source_error"].is_null()
    });
    assert!(waits, "{:#}", burgeon.status());
    fs::rename(&hidden, &store).unwrap();
    let read = reader.join().unwrap().unwrap();
    assert_eq!(read, fs::read(tree.join("folder/data")).unwrap());
    burgeon.umount(mounted);
}

#[test]
fn nothing_is_built_where_the_own_store_was() {
    let space = Space::new("own-away");
    let burgeon = Burgeon::new(PROGRAM, &space);
    let tree = tree(&space, "tree", 9);
    burgeon.build(&tree, "sample");
    let (own, away) = (burgeon.state().join("store"), space.path("away"));
    fs::rename(&own, &away).unwrap();
    burgeon.fails(&["list"], 3, "restore it");
    burgeon.fails(&["build", text(&tree), "sample"], 3, "restore it");
    fs::rename(&away, &own).unwrap();
    burgeon.ok(&["verify", "sample"]);
}

#[test]
fn references_to_local_files_are_for_the_own_store_only() {
    let space = Space::new("references");
    let burgeon = Burgeon::new(PROGRAM, &space);
    let file = tree(&space, "tree", 9).join("folder/data");
    let (at, other) = (space.make_folder("at"), space.path("other"));
    let elsewhere = ["--store", text(&other)];
    burgeon.ok(&[&elsewhere[..], &["build", "--by-reference", text(&file), "it"]].concat());
    let mount = [&elsewhere[..], &["mount", "it", text(&at), "--read-only"]].concat();
    burgeon.fails(&mount, 1, "refers to the local");
    burgeon.ok(&["build", "--by-reference", text(&file), "it"]);
    let mounted = burgeon.mount("it", &at, &["--read-only"]);
    assert_eq!(fs::read(at.join("data")).unwrap(), fs::read(&file).unwrap());
    burgeon.umount(mounted);
    // A folder, too: a changed file is an error, and never wrong data.
    let folder = file.parent().unwrap().parent().unwrap();
    burgeon.ok(&["build", "--by-reference", text(folder), "folder"]);
    let packs = fs::read_dir(burgeon.state().join("store/packs"));
    assert_eq!(packs.map_or(0, |packs| packs.count()), 0);
    let mounted = burgeon.mount("folder", &at, &["--write-limit", "256M"]);
    compare(folder, &at).unwrap().assert_same();
    burgeon.umount(mounted);
    let changed = fs::File::options().write(true).open(&file).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&changed, b"changed", 2_000_000).unwrap();
    changed.sync_all().unwrap();
    burgeon.ok(&["shutdown"]);
    fs::remove_dir_all(burgeon.state().join("images")).unwrap();
    fs::write("/proc/sys/vm/drop_caches", "3").unwrap();
    let mounted = burgeon.mount("folder", &at, &["--read-only"]);
    assert_eq!(fs::read(at.join("small")).unwrap(), b"small");
    let error = fs::read(at.join("folder/data")).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(5), "{error}");
    burgeon.umount(mounted);
    burgeon.ok(&["shutdown"]);
}

#[test]
fn a_build_that_fills_its_disk_leaves_nothing_of_it() {
    let space = Space::new("full-build");
    let disk = space.disk(&space.path("disk"), 64 << 20);
    let burgeon = Burgeon::with_state(PROGRAM, disk.path().join("state"));
    let small = space.make_folder("small");
    fs::write(small.join("data"), Rng::new(1).bytes(1_000_000)).unwrap();
    burgeon.build(&small, "small");
    let large = space.make_folder("large");
    for n in 0..5 {
        fs::write(large.join(format!("data-{n}")), Rng::new(2 + n).bytes(20_000_000)).unwrap();
    }
    let free = || rustix::fs::statvfs(disk.path()).unwrap().f_bfree;
    let before = free();
    let failed = burgeon.run(&["build", large.to_str().unwrap(), "large"]);
    assert_eq!(failed.code, Some(6), "{failed:#?}");
    // Either nothing is left, or the message names the command that removes it.
    let packs = || fs::read_dir(burgeon.state().join("store/packs")).unwrap().count();
    assert_eq!(packs(), 1, "{failed:#?}");
    assert!(!failed.stderr.contains("stay in the store"), "{failed:#?}");
    let remedy = "`burgeon gc` removes unneeded data), or name a folder on another disk";
    let shown = format!(" in {}", burgeon.state().join("store").display());
    assert!(failed.stderr.contains(remedy) && failed.stderr.contains(&shown), "{failed:#?}");
    assert!(before - free() < 1024, "{} blocks are lost: {failed:#?}", before - free());
    burgeon.ok(&["verify", "small"]);
    burgeon.build(&small, "again");
}
