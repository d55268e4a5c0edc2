//! `burgeon let-go` where the file system shares blocks between files: chunks in the cache are
//! cloned, and lent. Needs root.

#![allow(clippy::unwrap_used)]

use std::{
    fs,
    os::unix::fs::{FileExt, MetadataExt},
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use rustix::fs::{SeekFrom, seek};
use serde_json::{Value, json};
use testkit::{Burgeon, Mounted, OciLayout, PATIENCE, Rng, Space, drop_caches, kill, wait_until};

const PROGRAM: &str = env!("CARGO_BIN_EXE_burgeon");
const BTRFS: &[&str] = &["mkfs.btrfs", "-q", "-f"];
const XFS: &[&str] = &["mkfs.xfs", "-q"];
const EXT4: &[&str] = &["mkfs.ext4", "-q", "-F"];
const SIZE: u64 = 1 << 30;
const FILES: u64 = 8;
const FILE_LEN: usize = 4 << 20;
const DATA: u64 = FILES * FILE_LEN as u64;
const FUSE: [&str; 5] = ["--transport", "fuse", "--profile", "none", "--read-only"];

/// An installation with its state on a file system of its own, and a mount of an image.
struct Set {
    burgeon: Burgeon,
    at: PathBuf,
    other: PathBuf,
    disk: Mounted,
}

impl Set {
    fn new(space: &Space, mkfs: &[&str]) -> Self {
        let set = Self::without_image(space, mkfs);
        // The store is elsewhere: what changes on the disk is the cache and the plain file.
        let burgeon = set.burgeon.option("--store").option(space.path("store"));
        burgeon.build(&space.path("tree"), "image");
        Self { burgeon, ..set }
    }

    /// The same with the state directory's store, and only the tree of an image.
    fn without_image(space: &Space, mkfs: &[&str]) -> Self {
        let disk = space.disk_with(&space.path("disk"), SIZE, mkfs);
        let burgeon = Burgeon::with_state(PROGRAM, disk.path().join("state"));
        let tree = space.make_folder("tree");
        for number in 0..FILES {
            fs::write(tree.join(format!("f{number}")), content(number)).unwrap();
        }
        Self { burgeon, at: space.path("at"), other: space.path("other"), disk }
    }

    fn mount(&self) -> Mounted {
        self.burgeon.mount("image", &self.at, &FUSE)
    }

    /// A mount whose data is all in the cache, and recorded there: a server that is killed soon
    /// after an admission forgets it.
    fn mount_resident(&self) -> Mounted {
        let mounted = self.mount_read("image");
        assert_eq!(self.of_cache("used"), DATA);
        mounted
    }

    /// A mount of `image` whose data is all in the cache, and recorded there.
    fn mount_read(&self, image: &str) -> Mounted {
        let mounted = self.burgeon.mount(image, &self.at, &FUSE);
        self.assert_same(&self.at);
        self.burgeon.umount(mounted);
        self.burgeon.ok(&["shutdown"]);
        self.burgeon.mount(image, &self.at, &FUSE)
    }

    fn let_go(&self) -> Value {
        let said = self.burgeon.ok(&["let-go", self.at.to_str().unwrap(), "--json"]);
        serde_json::from_str::<Value>(&said).unwrap()["let_go"][0].clone()
    }

    fn assert_same(&self, at: &Path) {
        drop_caches();
        for number in 0..FILES {
            let read = fs::read(at.join(format!("f{number}"))).unwrap();
            assert!(read == content(number), "f{number}");
        }
    }

    fn cache(&self) -> Value {
        let said = self.burgeon.ok(&["cache", "status", "--json"]);
        serde_json::from_str::<Value>(&said).unwrap()["cache"].clone()
    }

    fn of_cache(&self, name: &str) -> u64 {
        self.cache()[name].as_u64().unwrap()
    }

    /// Bytes that are taken on the disk.
    fn taken(&self) -> u64 {
        fs::File::open(self.disk.path())
            .and_then(|folder| Ok(rustix::fs::syncfs(folder)?))
            .unwrap();
        let disk = rustix::fs::statvfs(self.disk.path()).unwrap();
        (disk.f_blocks - disk.f_bfree) * disk.f_frsize
    }

    /// The plain file of the one mount that has one.
    fn plain(&self) -> PathBuf {
        let folders = fs::read_dir(self.burgeon.state().join("mounts")).unwrap().flatten();
        let mut plain = folders.map(|it| it.path().join("plain")).filter(|it| it.exists());
        plain.next().unwrap()
    }

    fn end(self, mounted: Mounted) {
        self.burgeon.umount(mounted);
        self.burgeon.ok(&["shutdown"]);
        drop(self.burgeon);
    }
}

fn content(number: u64) -> Vec<u8> {
    Rng::new(number).bytes(FILE_LEN)
}

/// Number of shared extents, as the kernel reports them.
fn shared_extents(path: &Path) -> usize {
    let said = Command::new("filefrag").arg("-v").arg(path).output().unwrap();
    let said = String::from_utf8_lossy(&said.stdout).into_owned();
    said.lines().filter(|line| line.contains("shared")).count()
}

fn is_cloned(name: &str, mkfs: &[&str]) {
    let space = Space::new(name);
    let set = Set::new(&space, mkfs);
    let mounted = set.mount_resident();
    let before = set.taken();
    let gone = set.let_go();
    let taken = set.taken().saturating_sub(before);
    println!("{mkfs:?}: {gone}, and {taken} bytes more are taken");
    assert_eq!((&gone["cloned"], &gone["copied"]), (&json!(DATA), &json!(0)), "{gone}");
    assert!(taken < DATA / 4, "{taken} bytes more are taken");
    assert!(shared_extents(&set.plain()) > 0);
    // The server counts those chunks no more.
    let cache = set.cache();
    assert_eq!((&cache["used"], &cache["lent"]), (&json!(0), &json!(DATA)), "{cache}");
    set.burgeon.kill_daemon();
    set.assert_same(&set.at);
    // The next daemon's server knows that they are lent.
    let other = set.burgeon.mount("image", &set.other, &FUSE);
    assert_eq!(set.of_cache("lent"), DATA);
    let fetched = set.of_cache("admitted");
    set.assert_same(&set.other);
    assert_eq!(set.of_cache("admitted"), fetched, "another mount reads what is lent");
    // They stay, whatever comes; all else goes.
    set.burgeon.ok(&["cache", "evict", "1G"]);
    let said = set.burgeon.ok(&["cache", "drop", "image"]);
    assert!(said.contains("0 chunks") && said.contains("let go share them"), "{said}");
    assert_eq!((set.of_cache("lent"), set.of_cache("used")), (DATA, 0));
    set.burgeon.umount(mounted);
    let cache = set.cache();
    assert_eq!((&cache["used"], &cache["lent"]), (&json!(DATA), &json!(0)), "{cache}");
    set.burgeon.ok(&["cache", "evict", "1G"]);
    assert_eq!(set.of_cache("used"), 0);
    set.assert_same(&set.other);
    set.end(other);
}

#[test]
fn resident_chunks_are_cloned_on_btrfs() {
    is_cloned("reflink-btrfs", BTRFS);
}

#[test]
fn resident_chunks_are_cloned_on_xfs() {
    is_cloned("reflink-xfs", XFS);
}

/// The chunks of an image of which only the table of contents is known have a seal in the cache.
#[test]
fn chunks_with_a_seal_are_cloned() {
    for (name, mkfs) in [("reflink-toc-btrfs", BTRFS), ("reflink-toc-xfs", XFS)] {
        let space = Space::new(name);
        let set = Set::without_image(&space, mkfs);
        let (layout, tree) = (space.path("layout"), space.path("tree"));
        let listed = OciLayout::listed(&layout, &tree, 256 << 10).unwrap();
        let mounted = set.mount_read(&listed);
        let used = set.of_cache("used");
        assert!(used > DATA, "{used} bytes with seals");
        let before = set.taken();
        let gone = set.let_go();
        let taken = set.taken().saturating_sub(before);
        println!("{mkfs:?}: {gone}, and {taken} bytes more are taken");
        assert!(gone["at_next_mount"].is_string(), "{gone}");
        // The table of contents lies in the tree as a file, which only read-ahead may have read.
        let [cloned, copied] = ["cloned", "copied"].map(|name| gone[name].as_u64().unwrap());
        assert!(cloned >= DATA && copied < DATA / 100, "{gone}");
        assert!(taken < DATA / 4, "{taken} bytes more are taken");
        // With the seals, which nobody shares.
        assert_eq!(set.of_cache("lent"), used);
        set.burgeon.ok(&["cache", "evict", "1G"]);
        assert_eq!((set.of_cache("used"), set.of_cache("lent")), (0, used));
        set.assert_same(&set.at);
        set.burgeon.umount(mounted);
        let mounted = set.burgeon.mount(&listed, &set.at, &FUSE);
        assert_eq!(set.burgeon.status()["mounts"][0]["state"], "let go");
        assert_eq!((set.of_cache("used"), set.of_cache("lent")), (0, used));
        set.burgeon.kill_daemon();
        set.assert_same(&set.at);
        set.burgeon.umount(mounted);
    }
}

#[test]
fn on_ext4_all_is_copied() {
    let space = Space::new("reflink-ext4");
    let set = Set::new(&space, EXT4);
    let mounted = set.mount();
    set.assert_same(&set.at);
    let before = set.taken();
    let gone = set.let_go();
    assert_eq!((&gone["cloned"], &gone["copied"]), (&json!(0), &json!(DATA)), "{gone}");
    assert!(set.taken() - before >= DATA);
    assert_eq!(set.of_cache("lent"), 0);
    set.burgeon.kill_daemon();
    set.assert_same(&set.at);
    set.burgeon.umount(mounted);
}

/// Chunks that the cache lacks are copied; wrong bytes of an arena do not get into the plain file.
#[test]
fn missing_and_spoilt_chunks_are_copied() {
    for (name, mkfs) in [("reflink-part-btrfs", BTRFS), ("reflink-part-xfs", XFS)] {
        let space = Space::new(name);
        let set = Set::new(&space, mkfs);
        let mounted = set.mount();
        let half = FILES / 2;
        for number in 0..half {
            fs::read(set.at.join(format!("f{number}"))).unwrap();
        }
        // A byte rots; another chunk is punched, as if it were evicted just after it was named.
        let arenas = set.burgeon.arenas();
        let arena = arenas.iter().max_by_key(|arena| arena.metadata().unwrap().blocks()).unwrap();
        let file = fs::File::options().read(true).write(true).open(arena).unwrap();
        let data = seek(&file, SeekFrom::Data(0)).unwrap();
        let mut byte = [0];
        file.read_exact_at(&mut byte, data + 70_000).unwrap();
        file.write_all_at(&[!byte[0]], data + 70_000).unwrap();
        let flags = rustix::fs::FallocateFlags::PUNCH_HOLE | rustix::fs::FallocateFlags::KEEP_SIZE;
        rustix::fs::fallocate(&file, flags, data + (1 << 20), 64 << 10).unwrap();
        file.sync_all().unwrap();
        drop(file);
        let gone = set.let_go();
        let cloned = gone["cloned"].as_u64().unwrap();
        let resident = half * FILE_LEN as u64;
        assert!(cloned >= resident / 2 && cloned < resident, "{gone}");
        assert_eq!(gone["copied"], json!(DATA - cloned));
        assert_eq!(set.of_cache("lent"), cloned);
        set.burgeon.kill_daemon();
        set.assert_same(&set.at);
        set.burgeon.umount(mounted);
    }
}

/// A symlink to bytes that are right: it is not followed.
fn put_symlink(arena: &Path, moved: &Path) {
    std::os::unix::fs::symlink(moved, arena).unwrap();
}

fn put_other_bytes(arena: &Path, moved: &Path) {
    let len = moved.metadata().unwrap().len();
    fs::write(arena, Rng::new(99).bytes(len as usize)).unwrap();
}

fn put_fifo(arena: &Path, _: &Path) {
    let (kind, mode) = (rustix::fs::FileType::Fifo, rustix::fs::Mode::from_raw_mode(0o600));
    rustix::fs::mknodat(rustix::fs::CWD, arena, kind, mode, 0).unwrap();
}

/// A server that lies about places: its files are none of the cache's, or its bytes are others.
#[test]
fn arenas_that_are_exchanged_spoil_nothing() {
    type Put = fn(&Path, &Path);
    let puts: [(&str, Put); 3] =
        [("symlink", put_symlink), ("other", put_other_bytes), ("fifo", put_fifo)];
    for (name, put) in puts {
        let space = Space::new(&format!("reflink-exchanged-{name}"));
        let set = Set::new(&space, BTRFS);
        let mounted = set.mount();
        set.assert_same(&set.at);
        let arenas = set.burgeon.arenas();
        assert!(!arenas.is_empty());
        for (number, arena) in arenas.iter().enumerate() {
            let moved = set.disk.path().join(format!("moved-{number}"));
            fs::rename(arena, &moved).unwrap();
            put(arena, &moved);
        }
        let gone = set.let_go();
        assert_eq!(gone["cloned"], json!(0), "{name}: {gone}");
        set.burgeon.kill_daemon();
        set.assert_same(&set.at);
        set.burgeon.umount(mounted);
    }
}

/// Only what is copied needs room above the floor.
#[test]
fn cloned_bytes_need_no_room_above_the_floor() {
    let space = Space::new("reflink-floor");
    let set = Set::new(&space, XFS);
    let mounted = set.mount();
    set.assert_same(&set.at);
    let free = set.of_cache("free");
    // Half of the data is free above the floor, and the cache has evicted nothing for it.
    let floor = (free - DATA / 2).to_string();
    set.burgeon.ok(&["cache", "resize", "--keep-free", &floor]);
    let evicted = set.of_cache("evicted");
    let gone = set.let_go();
    assert_eq!(gone["cloned"], json!(DATA), "{gone}");
    assert_eq!(set.of_cache("evicted"), evicted);
    set.burgeon.umount(mounted);
    // The same by copying is refused: nothing is resident, and there is no room.
    set.burgeon.ok(&["cache", "resize", "--keep-free", "0"]);
    let mounted = set.mount();
    set.burgeon.ok(&["cache", "evict", "1G"]);
    let floor = (set.of_cache("free") - DATA / 2).to_string();
    set.burgeon.ok(&["cache", "resize", "--keep-free", &floor]);
    let at = set.at.to_str().unwrap();
    set.burgeon.fails(&["let-go", at], 6, "the cache's floor");
    let left = fs::read_dir(set.burgeon.state().join("mounts")).unwrap().flatten();
    let left = left.flat_map(|mount| fs::read_dir(mount.path()).unwrap().flatten());
    let left: Vec<_> = left.map(|file| file.file_name().into_string().unwrap()).collect();
    assert!(!left.iter().any(|name| name.starts_with("plain")), "{left:?}");
    assert_eq!(set.of_cache("lent"), 0);
    set.end(mounted);
}

#[test]
fn a_command_that_is_killed_leaves_a_mount_that_the_next_one_lets_go() {
    let space = Space::new("reflink-killed");
    let set = Set::new(&space, BTRFS);
    let mounted = set.mount();
    set.assert_same(&set.at);
    let at = set.at.to_str().unwrap();
    let exists = |name: &str| {
        let folders = fs::read_dir(set.burgeon.state().join("mounts")).unwrap().flatten();
        folders.into_iter().any(|folder| folder.path().join(name).exists())
    };
    for name in ["plain.new", "plain.lent"] {
        let mut command = set.burgeon.command(&["let-go", at]);
        let mut command = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        wait_until(PATIENCE, || exists(name) || command.try_wait().unwrap().is_some());
        command.kill().unwrap();
        command.wait().unwrap();
        set.assert_same(&set.at);
    }
    let gone = set.let_go();
    println!("after two kills: {gone}");
    set.burgeon.kill_daemon();
    set.assert_same(&set.at);
    set.burgeon.umount(mounted);
}

/// The cache goes on within its limit beside an image that is lent, also in a new server.
#[test]
fn a_lent_image_leaves_limit_and_eviction() {
    let space = Space::new("reflink-limit");
    let set = Set::new(&space, BTRFS);
    let second = space.make_folder("second");
    for number in 0..FILES {
        fs::write(second.join(format!("f{number}")), content(100 + number)).unwrap();
    }
    set.burgeon.build(&second, "second");
    let mounted = set.mount_resident();
    set.let_go();
    let limit = DATA / 2;
    set.burgeon.ok(&["cache", "resize", &limit.to_string()]);
    let other = set.burgeon.mount("second", &set.other, &FUSE);
    let read = || {
        drop_caches();
        for number in 0..FILES {
            let name = format!("f{number}");
            assert!(fs::read(set.other.join(name)).unwrap() == content(100 + number));
        }
    };
    read();
    let cache = set.cache();
    let used = cache["used"].as_u64().unwrap();
    assert!(used > limit / 2 && used <= limit, "{cache}");
    assert_eq!(cache["lent"], json!(DATA));
    kill(set.burgeon.status()["server_pid"].as_u64().unwrap() as u32);
    read();
    let cache = set.cache();
    assert!(cache["used"].as_u64().unwrap() <= limit && cache["lent"] == DATA, "{cache}");
    let shown = set.burgeon.ok(&["cache", "status"]);
    assert!(shown.contains("lent"), "{shown}");
    // Counted again, they are beyond the limit.
    set.burgeon.umount(mounted);
    let within = || {
        let cache = set.cache();
        cache["lent"] == 0 && cache["used"].as_u64().unwrap() <= limit
    };
    assert!(wait_until(PATIENCE, within), "{}", set.cache());
    read();
    set.end(other);
}

#[test]
fn fill_and_let_go_at_once_clone_what_was_filled() {
    let space = Space::new("reflink-fill");
    let set = Set::new(&space, XFS);
    let at = space.make_folder("at");
    let mount =
        [&["mount", "image", at.to_str().unwrap(), "--fill", "--let-go", "--json"][..], &FUSE];
    let said: Value = serde_json::from_str(&set.burgeon.ok(&mount.concat())).unwrap();
    let mounted = Mounted::at(&at);
    assert_eq!(said["let_go"]["cloned"], json!(DATA), "{said}");
    assert_eq!(set.of_cache("lent"), DATA);
    set.burgeon.kill_daemon();
    set.assert_same(&at);
    set.burgeon.umount(mounted);
}
