//! Writing into mounts: it works as on any btrfs, stays where it belongs, and room that ends is
//! an error the writer sees and can recover from.

// Helpers outside test functions are tests, too.
#![allow(clippy::unwrap_used)]

use std::{
    fs::{self, File, OpenOptions},
    io::{self, Write},
    os::unix::fs::FileExt,
    path::Path,
};

use testkit::{
    Burgeon, PATIENCE, Pattern, Rng, Space, Torture, TortureSize, btrfs_check, compare,
    drop_caches, reflink, snapshot, take_room, wait_until,
};

const BURGEON: &str = env!("CARGO_BIN_EXE_burgeon");
const LIMIT: &[&str] = &["--write-limit", "512M"];

fn small_image(space: &Space, burgeon: &Burgeon) -> std::path::PathBuf {
    let tree = space.path("tree");
    Torture::make(&tree, 31, TortureSize::Small).unwrap();
    burgeon.build(&tree, "tree:1");
    tree
}

#[test]
fn writes_reflinks_snapshots_and_renames_work() {
    let space = Space::new("writes");
    let burgeon = Burgeon::new(BURGEON, &space);
    let tree = small_image(&space, &burgeon);
    let mounted = burgeon.mount("tree:1", &space.path("at"), LIMIT);
    let at = mounted.path();
    let original = fs::read(tree.join("sizes/large")).unwrap();

    // In the middle of a lazy file: the neighbours come from the image.
    let mut expected = original.clone();
    expected[100_000..100_003].copy_from_slice(b"new");
    let file = OpenOptions::new().write(true).open(at.join("sizes/large")).unwrap();
    file.write_all_at(b"new", 100_000).unwrap();
    file.sync_all().unwrap();
    reflink(&at.join("sizes/large"), &at.join("clone")).unwrap();
    file.write_all_at(b"NEW", 100_000).unwrap();
    drop(file);
    snapshot(at, &at.join("snapshot")).unwrap();
    fs::rename(at.join("sizes/large-edited"), at.join("moved")).unwrap();
    fs::remove_dir_all(at.join("many")).unwrap();
    OpenOptions::new().append(true).open(at.join("moved")).unwrap().write_all(b"tail").unwrap();
    File::options().write(true).open(at.join("sizes/repeated")).unwrap().set_len(5000).unwrap();
    drop_caches();

    assert!(fs::read(at.join("clone")).unwrap() == expected, "the clone keeps what it shared");
    expected[100_000..100_003].copy_from_slice(b"NEW");
    assert!(fs::read(at.join("sizes/large")).unwrap() == expected);
    assert!(fs::read(at.join("snapshot/sizes/large")).unwrap() == expected);
    assert!(at.join("snapshot/many/entry-7").exists() && !at.join("many").exists());
    let mut moved = fs::read(tree.join("sizes/large-edited")).unwrap();
    moved.extend(b"tail");
    assert!(fs::read(at.join("moved")).unwrap() == moved);
    let cut = fs::read(at.join("sizes/repeated")).unwrap();
    assert!(cut == fs::read(tree.join("sizes/repeated")).unwrap()[..5000]);
    btrfs_check(at).unwrap();
    burgeon.umount(mounted);
}

#[test]
fn parallel_mounts_of_one_image_do_not_see_each_others_writes() {
    let space = Space::new("parallel");
    let burgeon = Burgeon::new(BURGEON, &space);
    let tree = small_image(&space, &burgeon);
    let mounts: Vec<_> = (0..4)
        .map(|n| {
            let options = if n == 0 { &["--read-only"][..] } else { LIMIT };
            burgeon.mount("tree:1", &space.path(&format!("at-{n}")), options)
        })
        .collect();
    for (n, mount) in mounts.iter().enumerate().skip(1) {
        fs::write(mount.path().join("names/a"), format!("mine {n}")).unwrap();
        fs::write(mount.path().join(format!("only-{n}")), "x").unwrap();
    }
    sync_folder(mounts[1].path());
    drop_caches();
    for (n, mount) in mounts.iter().enumerate().skip(1) {
        let text = fs::read_to_string(mount.path().join("names/a")).unwrap();
        assert_eq!(text, format!("mine {n}"));
        assert!((1..4).all(|m| mount.path().join(format!("only-{m}")).exists() == (m == n)));
    }
    compare(&tree, mounts[0].path()).unwrap().assert_same();
    assert_eq!(burgeon.status()["mounts"].as_array().unwrap().len(), 4);
    mounts.into_iter().for_each(|mount| burgeon.umount(mount));
}

fn sync_folder(at: &Path) {
    File::open(at).unwrap().sync_all().unwrap();
}

#[test]
fn named_writes_are_found_again_and_others_are_not() {
    let space = Space::new("named");
    let burgeon = Burgeon::new(BURGEON, &space);
    let tree = small_image(&space, &burgeon);
    let at = space.path("at");
    let named = ["--writes", "mine", "--write-limit", "512M"];
    for round in 0..4 {
        let mounted = burgeon.mount("tree:1", &at, &named);
        for earlier in 0..round {
            let text = fs::read_to_string(at.join(format!("round-{earlier}"))).unwrap();
            assert_eq!(text, format!("{earlier}"));
        }
        fs::write(at.join(format!("round-{round}")), format!("{round}")).unwrap();
        fs::rename(at.join("names/a"), at.join("names/a-moved"))
            .or_else(|_| fs::rename(at.join("names/a-moved"), at.join("names/a")))
            .unwrap();
        burgeon.umount(mounted);
        // The image is rebuilt as another and then removed: the writes keep their base.
        match round {
            1 => {
                fs::write(tree.join("names/b"), "another image").unwrap();
                burgeon.build(&tree, "tree:1");
            }
            2 => {
                burgeon.ok(&["shutdown"]);
            }
            _ => {}
        }
    }
    let discarded = burgeon.mount("tree:1", &at, LIMIT);
    assert!(!at.join("round-0").exists());
    fs::write(at.join("gone"), "").unwrap();
    burgeon.umount(discarded);
    let again = burgeon.mount("tree:1", &at, LIMIT);
    assert!(!at.join("gone").exists());
    burgeon.umount(again);
    assert!(burgeon.ok(&["writes", "list"]).contains("mine"));
    burgeon.ok(&["writes", "rm", "mine"]);
    assert!(!burgeon.ok(&["writes", "list"]).contains("mine"));
}

/// Writes blocks that cannot be compressed until the room ends; gives how many bytes went in and
/// the error.
fn fill(path: &Path, bytes_max: u64) -> (u64, Option<io::Error>) {
    let mut rng = Rng::new(77);
    let file = File::create(path).unwrap();
    let mut written = 0;
    while written < bytes_max {
        match take_room(&file, written, &rng.bytes(1 << 20)) {
            Ok(taken) => written += taken,
            Err(error) => return (written, Some(error)),
        }
    }
    (written, None)
}

/// The space was used up: the writer saw ENOSPC, fsynced data is there, and files can be removed.
fn recovers(at: &Path, kept: &[u8], error: Option<io::Error>) {
    let error = error.expect("the room ends");
    assert_eq!(error.raw_os_error(), Some(28), "ENOSPC: {error}");
    assert!(fs::read(at.join("kept")).unwrap() == kept, "what was fsynced survives");
    fs::remove_file(at.join("filler")).unwrap();
    // btrfs gives removed blocks out again after a commit. Its cleaner drops the file then, which
    // is another commit's work if blocks of the file were still being written when it was removed.
    let written = wait_until(PATIENCE, || {
        rustix::fs::syncfs(File::open(at).unwrap()).unwrap();
        match try_keep(at, "after", kept) {
            Err(error) if error.kind() == io::ErrorKind::StorageFull => false,
            kept => {
                kept.unwrap();
                true
            }
        }
    });
    assert!(written, "freeing is not enough: still ENOSPC");
    drop_caches();
    assert!(fs::read(at.join("after")).unwrap() == kept, "writing goes on");
}

fn keep(at: &Path) -> Vec<u8> {
    let kept = Rng::new(78).bytes(3_000_000);
    try_keep(at, "kept", &kept).unwrap();
    kept
}

/// Writes a file and makes it durable.
fn try_keep(at: &Path, name: &str, content: &[u8]) -> io::Result<()> {
    let mut file = File::create(at.join(name))?;
    file.write_all(content)?;
    file.sync_all()
}

#[test]
fn a_full_sprout_is_enospc_and_freeing_is_enough() {
    let space = Space::new("full");
    let burgeon = Burgeon::new(BURGEON, &space);
    small_image(&space, &burgeon);
    let mounted = burgeon.mount("tree:1", &space.path("at"), &["--write-limit", "300M"]);
    let at = mounted.path();
    let kept = keep(at);
    let (written, error) = fill(&at.join("filler"), 400 << 20);
    assert!(written > 20 << 20, "{written} bytes fit");
    recovers(at, &kept, error);
    btrfs_check(at).unwrap();
    burgeon.umount(mounted);
}

#[test]
fn a_full_host_takes_no_room_from_a_sprout() {
    let space = Space::new("full-host");
    let disk = space.small_disk("disk", 900 << 20);
    let burgeon = Burgeon::with_state(BURGEON, disk.path().join("state"));
    small_image(&space, &burgeon);
    let options = ["--write-limit", "300M", "--reserve"];
    let mounted = burgeon.mount("tree:1", &space.path("at"), &options);
    let at = mounted.path();
    let kept = keep(at);
    // The host's disk fills up; the sprout's room is its own.
    let (_, error) = fill(&disk.path().join("hog"), 2 << 30);
    assert_eq!(error.and_then(|e| e.raw_os_error()), Some(28));
    let (written, error) = fill(&at.join("filler"), 400 << 20);
    assert!(written > 20 << 20, "{written} bytes fit");
    recovers(at, &kept, error);
    burgeon.umount(mounted);
    drop(burgeon);
}

#[test]
fn writes_grow_and_a_full_host_is_enospc_there() {
    let space = Space::new("grow");
    let disk = space.small_disk("disk", 2500 << 20);
    let burgeon = Burgeon::with_state(BURGEON, disk.path().join("state"));
    small_image(&space, &burgeon);
    let mounted = burgeon.mount("tree:1", &space.path("at"), &["--write-limit", "8G"]);
    let at = mounted.path();
    let kept = keep(at);
    let status = burgeon.status()["mounts"][0]["writes"].clone();
    assert_eq!(status["thin"], true, "{status}");
    assert!(status["reserved"].as_u64().unwrap() < status["limit"].as_u64().unwrap());
    let (written, error) = fill(&at.join("filler"), 4 << 30);
    assert!(written > 100 << 20, "{written} bytes fit");
    recovers(at, &kept, error);
    burgeon.umount(mounted);
    drop(burgeon);
}

#[test]
fn named_writes_survive_a_daemon_that_is_killed() {
    let space = Space::new("named-killed");
    let burgeon = Burgeon::new(BURGEON, &space);
    small_image(&space, &burgeon);
    let at = space.path("at");
    let named = ["--writes", "mine", "--write-limit", "512M"];
    let mounted = burgeon.mount("tree:1", &at, &named);
    let pattern = Pattern { seed: 3, blocks: 500 };
    pattern.write(&at.join("pattern")).unwrap();
    burgeon.kill_daemon();
    drop(mounted);
    let repaired = burgeon.run(&["doctor", "--repair"]);
    let mounted = burgeon.mount("tree:1", &at, &named);
    let file = Pattern::open_direct(&at.join("pattern")).unwrap();
    let mut buffer = testkit::AlignedBlock::default();
    for block in 0..pattern.blocks {
        let read = pattern.check(&file, block, &mut buffer);
        read.unwrap_or_else(|error| panic!("{error:#}; {repaired:?}"));
    }
    drop(file);
    btrfs_check(&at).unwrap();
    burgeon.umount(mounted);
}
