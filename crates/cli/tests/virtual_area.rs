//! Content is mapped into a mounted file system, and stays the same: after errors, kills and
//! another mount.

#![allow(clippy::unwrap_used)]

use std::{
    fs::{self, File, Permissions},
    os::unix::fs::{FileExt, MetadataExt, PermissionsExt, chown, symlink},
    path::{Path, PathBuf},
};

use testkit::{Burgeon, Mounted, Rng, Space, drop_caches, kill, ublk_expected};

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
fn mapped_content_stays_whatever_dies() {
    let space = Space::new("virtual");
    let burgeon = Burgeon::new(PROGRAM, &space);
    build(&space, &burgeon);
    let root = source_tree(&space);
    let one = space.path("one.bin");
    fs::write(&one, Rng::new(7).bytes(3_000_001)).unwrap();
    fs::set_permissions(&one, Permissions::from_mode(0o640)).unwrap();
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
        assert_eq!(at.join("one").metadata().unwrap().mode(), one.metadata().unwrap().mode());
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
    burgeon.kill_daemon();
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
    assert!(status.contains(&format!("{} was changed", one.display())), "{status}");
    // No command finds it in the image: the mapped file itself has changed.
    assert!(
        status.contains("fetches from mapped files that have changed: put them back"),
        "{status}"
    );
    assert!(!status.contains("burgeon verify"), "{status}");
    burgeon.umount(mounted);
}

#[test]
fn a_refused_mapping_leaves_nothing() {
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
    fails(&space.path("new"), &computed, 3, "in no mount");
    let names: Vec<_> = fs::read_dir(&at).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert_eq!(names, ["data"]);
    let other = burgeon.mount("sample", &plain, &["--write-limit", "256M"]);
    fails(&plain.join("new"), &computed, 1, "--virtual");
    burgeon.umount(other);
    burgeon.umount(mounted);
}

#[test]
fn a_source_that_shrinks_is_an_error_that_names_it() {
    let space = Space::new("virtual-shrink");
    let burgeon = Burgeon::new(PROGRAM, &space);
    build(&space, &burgeon);
    let (at, source) = (space.path("at"), space.path("shrinking.bin"));
    fs::write(&source, Rng::new(4).bytes(1 << 20)).unwrap();
    let mounted = burgeon.mount("sample", &at, &OPTIONS);
    let mapped = at.join("mapped");
    burgeon.ok(&["map", text(&mapped), "--from", text(&source)]);
    File::options().write(true).open(&source).unwrap().set_len(1 << 19).unwrap();
    assert!(is_eio(&mapped));
    assert_eq!(mapped.metadata().unwrap().len(), 1 << 20);
    let status = burgeon.ok(&["status"]);
    assert!(status.contains("shrinking.bin") && status.contains("1048576 bytes"), "{status}");
    fs::remove_file(&mapped).unwrap();
    burgeon.umount(mounted);
}

/// Fills the file system of `folder` to the last block.
fn fill(folder: &Path) -> PathBuf {
    let path = folder.join("filler");
    let file = File::create(&path).unwrap();
    let (mut at, mut len) = (0, 1 << 20);
    while len >= 4096 {
        match file.write_all_at(&Rng::new(at).bytes(len), at).and_then(|()| file.sync_all()) {
            Ok(()) => at += len as u64,
            Err(error) => {
                assert_eq!(error.kind(), std::io::ErrorKind::StorageFull);
                len /= 16;
            }
        }
    }
    path
}

#[test]
fn a_full_device_is_no_space_and_leaves_nothing_half_made() {
    let space = Space::new("virtual-full");
    let disk = space.small_disk("disk", 420 << 20);
    let burgeon = Burgeon::with_state(PROGRAM, disk.path().join("state"));
    build(&space, &burgeon);
    let root = space.make_folder("models");
    // Small files are copied, and of the others the ends; these take room in the map.
    for file in 0..2000 {
        let len = if file % 2 == 0 { 3000 } else { 5000 };
        fs::write(root.join(format!("{file}")), Rng::new(file).bytes(len)).unwrap();
    }
    let one = source_tree_file(&space, &root);
    let at = space.path("at");
    let mounted = burgeon.mount("sample", &at, &OPTIONS);
    let (tree, early) = (at.join("tree"), at.join("early"));
    burgeon.ok(&["map", text(&early), "--from", text(&one)]);

    // The writable device.
    let filler = fill(&at);
    burgeon.fails(&["map", text(&tree), "--from", text(&root)], 6, "No space");
    let mut names: Vec<_> = fs::read_dir(&at).unwrap().map(|e| e.unwrap().file_name()).collect();
    names.sort();
    assert_eq!(names, ["data", "early", "filler"]);
    fs::remove_file(filler).unwrap();
    rustix::fs::syncfs(File::open(&at).unwrap()).unwrap();

    // The host's disk, where the map lies.
    let filler = fill(disk.path());
    burgeon.fails(&["map", text(&tree), "--from", text(&root)], 6, "No space");
    assert!(!tree.exists());
    fs::remove_file(filler).unwrap();
    // Its space is free when the file system's journal says so.
    rustix::fs::syncfs(File::open(disk.path()).unwrap()).unwrap();

    burgeon.ok(&["map", text(&tree), "--from", text(&root)]);
    for name in ["7", "8", "large"] {
        assert_eq!(fs::read(tree.join(name)).unwrap(), fs::read(root.join(name)).unwrap());
    }
    assert_eq!(fs::read(&early).unwrap(), fs::read(&one).unwrap());
    burgeon.umount(mounted);
}

fn source_tree_file(space: &Space, root: &Path) -> PathBuf {
    let one = space.path("one.bin");
    for path in [&one, &root.join("large")] {
        fs::write(path, Rng::new(6).bytes(2_000_001)).unwrap();
    }
    one
}

/// A mount of `sample`, into which `zeros` and the image of the folder that is given back are
/// mapped.
fn map_two(space: &Space, burgeon: &Burgeon, at: &Path) -> (Mounted, PathBuf) {
    build(space, burgeon);
    let other = space.make_folder("other");
    fs::write(other.join("data"), Rng::new(2).bytes(500_000)).unwrap();
    burgeon.build(&other, "other");
    let mounted = burgeon.mount("sample", at, &OPTIONS);
    burgeon.ok(&["map", text(&at.join("zeros")), "--computed", "zeros", "--size", "1M"]);
    burgeon.ok(&["map", text(&at.join("image")), "--from", "other"]);
    (mounted, other)
}

#[test]
fn doctor_says_what_is_wrong_with_a_map_and_leaves_it_alone() {
    let space = Space::new("virtual-doctor");
    let burgeon = Burgeon::new(PROGRAM, &space);
    let at = space.path("at");
    let (mounted, other) = map_two(&space, &burgeon, &at);
    burgeon.umount(mounted);
    let area = burgeon.state().join("writes/w/area");
    let doctor = |problem: Option<&str>| {
        let finished = burgeon.run(&["doctor", "--repair"]);
        let line = finished.stdout.lines().find(|line| line.contains("mapped into w"));
        match problem {
            None => assert!(line.unwrap().contains("whole"), "{finished:#?}"),
            Some(problem) => {
                assert_eq!(finished.code, Some(1), "{finished:#?}");
                assert!(finished.stdout.contains(problem), "{problem}: {finished:#?}");
            }
        }
    };
    doctor(None);
    let extents = area.join("extents");
    let good = fs::read(&extents).unwrap();
    let mut damaged = good.clone();
    damaged[64 + 3] ^= 1;
    for (bytes, problem) in
        [(damaged.as_slice(), "record 0 of the extent map is damaged"), (&good[..40], "cut short")]
    {
        fs::write(&extents, bytes).unwrap();
        doctor(Some(problem));
        assert_eq!(fs::read(&extents).unwrap(), bytes, "it is left as it is");
    }
    // Killed writers leave the same as a file that was cut off behind its header.
    fs::write(&extents, &good[..64]).unwrap();
    let said = burgeon.run(&["doctor"]).stdout;
    assert!(said.contains("unfinished mappings: 2"), "{said}");
    fs::remove_file(&extents).unwrap();
    doctor(Some("restore"));
    fs::write(&extents, &good).unwrap();
    doctor(None);

    // The data needed to read the mapped image.
    let image = fs::read_dir(area.join("images")).unwrap().flatten().map(|image| image.path());
    let image = image.filter(|path| path.is_dir()).collect::<Vec<_>>().pop().unwrap();
    fs::remove_file(image.join("map")).unwrap();
    doctor(Some("map that image again"));
    let mounted = burgeon.mount("sample", &at, &["--writes", "w"]);
    let data = at.join("image/data");
    drop_caches();
    assert!(is_eio(&data));
    burgeon.ok(&["map", text(&at.join("again")), "--from", "other"]);
    assert_eq!(fs::read(&data).unwrap(), fs::read(other.join("data")).unwrap());
    burgeon.umount(mounted);
    doctor(None);
}

#[test]
fn a_mount_whose_map_is_lost_has_its_tree_and_its_writes() {
    let space = Space::new("virtual-lost");
    let burgeon = Burgeon::new(PROGRAM, &space);
    let at = space.path("at");
    let (mounted, other) = map_two(&space, &burgeon, &at);
    let (zeros, image, own) = (at.join("zeros"), at.join("image/data"), at.join("own"));
    fs::write(&own, "mine").unwrap();
    burgeon.umount(mounted);
    let area = burgeon.state().join("writes/w/area");
    let (extents, sources) = (area.join("extents"), area.join("sources"));
    let good = fs::read(&extents).unwrap();
    let changed = |at: usize| {
        let mut bytes = good.clone();
        bytes[at] ^= 2;
        bytes
    };
    let away = space.path("area");
    let damages: [(&str, &dyn Fn()); 5] = [
        ("cut short", &|| fs::write(&extents, &good[..40]).unwrap()),
        ("version", &|| fs::write(&extents, changed(8)).unwrap()),
        ("checksum", &|| fs::write(&extents, changed(40)).unwrap()),
        ("two different maps", &|| fs::write(&sources, empty_sources(&space)).unwrap()),
        ("No such file", &|| fs::rename(&area, &away).unwrap()),
    ];
    let table = fs::read(&sources).unwrap();
    let new =
        ["map", text(&at.join("new")), "--computed", "zeros", "--size", "1M"].map(str::to_owned);
    let new = new.each_ref().map(String::as_str);
    for (problem, damage) in damages {
        damage();
        let target = text(&at);
        let said = burgeon.ok(&["mount", "sample", target, "--writes", "w"]);
        assert!(said.contains("I/O errors") && said.contains(problem), "{said}");
        let check = |reads: u64| {
            drop_caches();
            assert_eq!(fs::read(at.join("data")).unwrap(), Rng::new(1).bytes(1_000_000));
            assert_eq!(fs::read(&own).unwrap(), b"mine");
            assert!(is_eio(&zeros) && is_eio(&image), "{problem}");
            let area = &burgeon.status()["mounts"][0]["area"];
            assert!(area["problem"].as_str().unwrap().contains(problem), "{area}");
            assert!(area["lost_reads"].as_u64().unwrap() >= reads, "{area}");
        };
        check(2);
        kill(burgeon.status()["server_pid"].as_u64().unwrap() as u32);
        check(2);
        assert!(burgeon.ok(&["status"]).contains("LOST"));
        let refused = burgeon.run(&new);
        assert!(refused.code != Some(0) && refused.stderr.contains("restore"), "{refused:#?}");
        assert!(burgeon.run(&["map", "--list", target]).stderr.contains(problem));
        let pin = burgeon.run(&["pin", text(&image)]);
        assert!(pin.code != Some(0) && pin.stderr.contains(problem), "{pin:#?}");
        burgeon.ok(&["pin", text(&image), "--remove"]);
        assert_eq!(burgeon.status()["mounts"][0]["state"], "serving");
        let doctor = burgeon.run(&["doctor"]);
        assert_eq!(doctor.code, Some(1), "{doctor:#?}");
        assert!(doctor.stdout.contains("mapped into w"), "{doctor:#?}");
        if problem == "No such file" {
            break;
        }
        burgeon.ok(&["umount", target]);
        fs::write(&extents, &good).unwrap();
        fs::write(&sources, &table).unwrap();
    }
    // The files beside a lost map count as used, and a map that comes back is used at once.
    fs::create_dir_all(&area).unwrap();
    fs::rename(away.join("images"), area.join("images")).unwrap();
    burgeon.ok(&["rm", "other"]);
    burgeon.ok(&["gc"]);
    fs::write(&extents, &good).unwrap();
    fs::write(&sources, &table).unwrap();
    burgeon.ok(&new);
    drop_caches();
    assert_eq!(fs::read(&zeros).unwrap(), vec![0; 1 << 20]);
    assert_eq!(fs::read(&image).unwrap(), fs::read(other.join("data")).unwrap());
    assert!(burgeon.status()["mounts"][0]["area"]["problem"].is_null());
    let list = burgeon.ok(&["map", "--list", text(&at)]);
    assert_eq!(list.matches("computed zeros").count(), 2, "{list}");
    burgeon.ok(&["umount", text(&at)]);
}

/// The source table of another map.
fn empty_sources(space: &Space) -> Vec<u8> {
    let folder = space.make_folder("another");
    burgeon_image::ExtentWriter::create(&folder, 16 << 50).unwrap();
    fs::read(folder.join("sources")).unwrap()
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
    assert!(said.contains("fetched 1 file, 977 KiB"), "{said}");
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
