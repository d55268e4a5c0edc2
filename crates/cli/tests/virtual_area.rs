//! Content is mapped into a mounted file system, and stays what it was: after errors, kills and
//! another mount.

#![allow(clippy::unwrap_used)]

use std::{
    fs::{self, File, Permissions},
    os::unix::fs::{FileExt, MetadataExt, PermissionsExt, chown, symlink},
    path::{Path, PathBuf},
};

use testkit::{Burgeon, Rng, Space, drop_caches, kill, ublk_expected};

const PROGRAM: &str = env!("CARGO_BIN_EXE_burgeon");
const EIO: i32 = 5;
const TIB: u64 = 1 << 40;
const OPTIONS: [&str; 6] = ["--virtual", "16P", "--writes", "w", "--write-limit", "256M"];

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

fn build(space: &Space, burgeon: &Burgeon) {
    let tree = space.make_folder("tree");
    fs::write(tree.join("data"), Rng::new(1).bytes(1_000_000)).unwrap();
    burgeon.build(&tree, "sample");
}

fn block_number(file: &Path, block: u64) -> u64 {
    let mut bytes = [0; 8];
    File::open(file).unwrap().read_exact_at(&mut bytes, block * 4096 + 8).unwrap();
    u64::from_le_bytes(bytes)
}

fn is_eio(file: &Path) -> bool {
    fs::read(file).is_err_and(|error| error.raw_os_error() == Some(EIO))
}

/// A tree to be mapped: files below and above a block, an empty one, folders, a symlink.
fn source_tree(space: &Space) -> PathBuf {
    let root = space.make_folder("models");
    fs::create_dir_all(root.join("a/b")).unwrap();
    for (name, len) in [("one", 1_000_000), ("a/small", 10), ("a/b/odd", 4097), ("a/even", 8192)] {
        fs::write(root.join(name), Rng::new(len as u64).bytes(len)).unwrap();
    }
    fs::write(root.join("a/empty"), "").unwrap();
    fs::set_permissions(root.join("a/even"), Permissions::from_mode(0o4577)).unwrap();
    chown(root.join("a/b/odd"), Some(1234), Some(567)).unwrap();
    symlink("../one", root.join("a/link")).unwrap();
    root
}

fn check_tree(root: &Path, at: &Path) {
    for name in ["one", "a/small", "a/b/odd", "a/even", "a/empty"] {
        assert_eq!(fs::read(at.join(name)).unwrap(), fs::read(root.join(name)).unwrap(), "{name}");
        let (here, there) =
            (at.join(name).metadata().unwrap(), root.join(name).metadata().unwrap());
        let facts = |m: &fs::Metadata| (m.mode(), m.uid(), m.gid(), m.mtime_nsec());
        assert_eq!(facts(&here), facts(&there), "{name}");
    }
    assert_eq!(fs::read_link(at.join("a/link")).unwrap(), Path::new("../one"));
    assert_eq!(fs::read_dir(at.join("a")).unwrap().count(), 5);
}

#[test]
fn what_is_mapped_stays_whatever_dies() {
    let space = Space::new("virtual");
    let burgeon = Burgeon::new(PROGRAM, &space);
    build(&space, &burgeon);
    let root = source_tree(&space);
    let one = space.path("one.bin");
    fs::write(&one, Rng::new(7).bytes(3_000_001)).unwrap();
    let at = space.path("at");
    let mounted = burgeon.mount("sample", &at, &OPTIONS);
    let numbers = at.join("numbers");
    let said = burgeon.ok(&["map", text(&numbers), "--computed", "block-number", "--size", "3T"]);
    assert!(said.contains("3.00 TiB"), "{said}");
    burgeon.ok(&["map", text(&at.join("one")), "--from", text(&one)]);
    burgeon.ok(&["map", text(&at.join("models")), "--from", text(&root)]);
    let check = || {
        assert_eq!(numbers.metadata().unwrap().len(), 3 * TIB);
        for block in [0, 3 * TIB / 8192, 3 * TIB / 4096 - 1] {
            assert_eq!(block_number(&numbers, block), block);
        }
        assert_eq!(fs::read(at.join("one")).unwrap(), fs::read(&one).unwrap());
        check_tree(&root, &at.join("models"));
        let list = burgeon.ok(&["map", "--list", text(&at)]);
        assert!(list.contains("computed block-number") && list.contains("one.bin"), "{list}");
    };
    check();
    let status = burgeon.status();
    kill(status["server_pid"].as_u64().unwrap() as u32);
    drop_caches();
    check();
    // All of it dies, and the next daemon serves it again.
    let status = burgeon.status();
    kill(status["supervisor_pid"].as_u64().unwrap() as u32);
    kill(status["server_pid"].as_u64().unwrap() as u32);
    burgeon.ok(&["doctor", "--repair"]);
    drop_caches();
    check();
    burgeon.ok(&["map", text(&at.join("later")), "--computed", "zeros", "--size", "5000"]);
    assert_eq!(fs::read(at.join("later")).unwrap(), vec![0; 5000]);
    burgeon.umount(mounted);
    burgeon.fails(
        &["mount", "sample", text(&at), "--writes", "w", "--virtual", "1P"],
        1,
        "cannot be changed",
    );
    let mounted = burgeon.mount("sample", &at, &["--writes", "w"]);
    check();
    // A source that is another one now: its bytes are refused, those of others are not.
    fs::write(&one, Rng::new(8).bytes(3_000_001)).unwrap();
    drop_caches();
    assert!(is_eio(&at.join("one")));
    assert_eq!(block_number(&numbers, 77), 77);
    let status = burgeon.ok(&["status"]);
    assert!(status.contains("one.bin"), "{status}");
    burgeon.umount(mounted);
}

#[test]
fn what_cannot_be_mapped_leaves_nothing() {
    let space = Space::new("virtual-bad");
    let burgeon = Burgeon::new(PROGRAM, &space);
    build(&space, &burgeon);
    let (at, plain) = (space.path("at"), space.path("plain"));
    let mounted = burgeon.mount("sample", &at, &OPTIONS);
    let fails = |target: &Path, options: &[&str], code: i32, message: &str| {
        let arguments = [&["map", text(target)], options].concat();
        burgeon.fails(&arguments, code, message);
    };
    let computed = ["--computed", "zeros", "--size", "1G"];
    fails(&at.join("data"), &computed, 1, "is there already");
    fails(&at.join("new"), &["--computed", "zeros", "--size", "17P"], 6, "virtual area");
    fails(&at.join("new"), &["--computed", "nothing", "--size", "1G"], 3, "block-number");
    fails(&at.join("new"), &["--computed", "zeros", "--size", "0"], 1, "without content");
    fails(&at.join("new"), &["--from", "/nowhere"], 3, "/nowhere");
    fails(&at.join("new"), &["--from", "/dev/null"], 1, "neither");
    fails(&at.join("new"), &["--from", text(&at)], 1, "Burgeon");
    fails(&at.join("no/new"), &computed, 3, "make its folder");
    fails(&space.path("new"), &computed, 1, "in no mount");
    let names: Vec<_> = fs::read_dir(&at).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert_eq!(names, ["data"]);
    let other = burgeon.mount("sample", &plain, &["--write-limit", "256M"]);
    fails(&plain.join("new"), &computed, 1, "--virtual");
    burgeon.umount(other);
    burgeon.umount(mounted);
}

#[test]
fn an_empty_file_system_is_one_to_map_into() {
    let space = Space::new("virtual-empty");
    let burgeon = Burgeon::new(PROGRAM, &space);
    let at = space.make_folder("at");
    burgeon.ok(&["create-empty", text(&at), "--writes", "x", "--write-limit", "256M"]);
    assert_eq!(fs::read_dir(&at).unwrap().count(), 0);
    let numbers = at.join("numbers");
    burgeon.ok(&["map", text(&numbers), "--computed", "block-number", "--size", "16P"]);
    assert_eq!(block_number(&numbers, (1 << 42) - 1), (1 << 42) - 1);
    burgeon.fails(
        &["map", text(&at.join("more")), "--computed", "zeros", "--size", "1"],
        6,
        "virtual area",
    );
    burgeon.ok(&["umount", text(&at)]);
    burgeon.ok(&["create-empty", text(&at), "--writes", "x"]);
    assert_eq!(block_number(&numbers, 1 << 41), 1 << 41);
    burgeon.ok(&["umount", text(&at)]);
}

#[test]
fn an_area_of_4_eib_is_there_to_its_last_block() {
    let space = Space::new("virtual-4e");
    let burgeon = Burgeon::new(PROGRAM, &space);
    let at = space.make_folder("at");
    let options = ["--writes", "x", "--write-limit", "256M", "--virtual", "4E"];
    burgeon.ok(&[&["create-empty", text(&at)][..], &options].concat());
    let numbers = at.join("numbers");
    burgeon.ok(&["map", text(&numbers), "--computed", "block-number", "--size", "4E"]);
    let check = || {
        assert_eq!(numbers.metadata().unwrap().len(), 4 << 60);
        for block in [0, 1, 1 << 49, (1 << 50) - 1] {
            assert_eq!(block_number(&numbers, block), block);
        }
    };
    check();
    kill(burgeon.status()["server_pid"].as_u64().unwrap() as u32);
    drop_caches();
    check();
    let expected = if ublk_expected() { "ublk" } else { "FUSE file + loop" };
    assert_eq!(burgeon.status()["mounts"][0]["transport"], expected);
    burgeon.ok(&["umount", text(&at)]);
    burgeon.ok(&["create-empty", text(&at), "--writes", "x"]);
    check();
    burgeon.ok(&["umount", text(&at)]);
}

#[test]
fn prefetch_makes_local_what_it_is_given() {
    let space = Space::new("prefetch");
    let burgeon = Burgeon::new(PROGRAM, &space);
    build(&space, &burgeon);
    let at = space.path("at");
    let mounted = burgeon.mount("sample", &at, &["--write-limit", "256M"]);
    let local = || burgeon.status()["mounts"][0]["materialised_bytes"].as_u64().unwrap();
    assert_eq!(local(), 0);
    let said = burgeon.ok(&["prefetch", text(&at), "--rate", "1G", "--threads", "3"]);
    assert!(said.contains("fetched 1 files, 977 KiB"), "{said}");
    assert_eq!(local(), 1_000_000u64.next_multiple_of(4096));
    burgeon.fails(&["prefetch", text(&at.join("none"))], 3, "none");
    burgeon.fails(&["prefetch", text(&at), "--threads", "0"], 2, "--threads");
    burgeon.umount(mounted);
}

#[test]
fn a_fetch_limit_is_kept_and_told() {
    let space = Space::new("virtual-limit");
    let burgeon = Burgeon::new(PROGRAM, &space);
    build(&space, &burgeon);
    let at = space.path("at");
    let options = [&OPTIONS[..], &["--fetch-limit", "64M"]].concat();
    let mounted = burgeon.mount("sample", &at, &options);
    let numbers = at.join("numbers");
    burgeon.ok(&["map", text(&numbers), "--computed", "block-number", "--size", "1T"]);
    let mut file = File::open(&numbers).unwrap();
    let read = std::io::copy(&mut file, &mut std::io::sink()).unwrap_err();
    assert_eq!(read.raw_os_error(), Some(EIO));
    let status = burgeon.status();
    let mount = &status["mounts"][0];
    assert!(mount["over_limit_reads"].as_u64().unwrap() > 0, "{mount}");
    let fetched = mount["reads"]["fetched_bytes"].as_u64().unwrap();
    assert!(fetched < 128 << 20, "{fetched}");
    let said = burgeon.ok(&["status"]);
    assert!(said.contains("ALARM"), "{said}");
    drop(file);
    burgeon.fails(&["prefetch", text(&numbers)], 1, "could not be fetched");
    burgeon.umount(mounted);
}
