//! The host's cache on small file systems: a hundred small readers, a profile and `--fill` at
//! once, beside a filler that takes the disk's space and gives it back, while the server is killed
//! as it evicts. Needs root.

#![allow(clippy::unwrap_used)]

use std::{
    fs::{self, File},
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    thread,
    time::{Duration, Instant},
};

use rustix::fs::{Advice, FallocateFlags, fadvise, fallocate, statvfs, syncfs};
use serde_json::Value;
use testkit::{Burgeon, PATIENCE, Rng, Space, drop_caches, kill, wait_until};

const PROGRAM: &str = env!("CARGO_BIN_EXE_burgeon");
const FILES: u64 = 72;
const FILE_LEN: usize = 1 << 20;
/// Room above the floor: a third of the data.
const ROOM: u64 = FILES * FILE_LEN as u64 / 3;
/// Readers of small ranges, on each of two mounts.
const READERS: u64 = 50;
const READ_MAX: u64 = 64 << 10;
const BETWEEN_KILLS: Duration = Duration::from_secs(3);
/// The filler's pause, in which the floor is looked at.
const IDLE: Duration = Duration::from_millis(300);

/// The length of the reads: `CACHE_SECONDS`, or ten seconds.
fn length() -> Duration {
    let given = std::env::var("CACHE_SECONDS");
    Duration::from_secs(given.map_or(10, |seconds| seconds.parse().unwrap()))
}

#[test]
fn readers_beside_a_filler_on_ext4() {
    beside_a_filler("filler-ext4", &["mkfs.ext4", "-q", "-F"], 128 << 20, 2 << 20);
}

#[test]
fn readers_beside_a_filler_on_xfs() {
    beside_a_filler("filler-xfs", &["mkfs.xfs", "-q"], 320 << 20, 2 << 20);
}

#[test]
fn readers_beside_a_filler_on_btrfs() {
    // It gives space back with its next commits, and takes metadata in large pieces.
    beside_a_filler("filler-btrfs", &["mkfs.btrfs", "-q"], 256 << 20, 16 << 20);
}

#[test]
fn readers_beside_a_filler_on_tmpfs() {
    beside_a_filler("filler-tmpfs", &["tmpfs"], 128 << 20, 2 << 20);
}

/// The server, if one runs that has evicted something.
fn evicting(burgeon: &Burgeon) -> Option<u32> {
    let ask = |of: &[&str]| serde_json::from_str::<Value>(&burgeon.run(of).stdout).ok();
    let evicted = ask(&["cache", "status", "--json"])?["cache"]["evicted"].as_u64()?;
    let server = ask(&["status", "--json"])?["server_pid"].as_u64()?;
    (evicted > 0).then_some(server as u32)
}

/// Compares small ranges until the end. They come from the cache or the store: the page cache
/// forgets a range that was read.
fn read_small(tree: &Path, at: &Path, seed: u64, until: Instant) {
    let mut rng = Rng::new(seed);
    let [mut buf, mut right] = [(); 2].map(|()| vec![0; READ_MAX as usize]);
    while Instant::now() < until {
        let number = rng.below(FILES);
        let file = File::open(at.join(number.to_string())).unwrap();
        let offset = rng.below(FILE_LEN as u64 - READ_MAX);
        let len = 1 + rng.below(READ_MAX) as usize;
        let (buf, right) = (&mut buf[..len], &mut right[..len]);
        file.read_exact_at(buf, offset).unwrap_or_else(|error| panic!("file {number}: {error}"));
        let original = File::open(tree.join(number.to_string())).unwrap();
        original.read_exact_at(right, offset).unwrap();
        assert!(buf == right, "file {number} at {offset}");
        fadvise(&file, 0, None, Advice::DontNeed).unwrap();
    }
}

/// The disk of a cache.
struct Disk {
    folder: PathBuf,
    floor: u64,
    /// Bytes that are not the chunks'.
    own: u64,
}

impl Disk {
    fn free(&self) -> u64 {
        let disk = statvfs(&self.folder).unwrap();
        disk.f_bavail * disk.f_frsize
    }

    /// Allocates up to `bytes` in `file`; btrfs gives less than it says.
    fn take(&self, file: &File, mut bytes: u64) {
        while bytes > 1 << 20 && fallocate(file, FallocateFlags::empty(), 0, bytes).is_err() {
            bytes -= bytes / 8;
        }
        syncfs(file).unwrap();
    }

    /// Takes space and gives it back. Once the floor is free while nobody else takes anything, the
    /// cache never goes below it. Returns the looks at that, and the least that was free.
    fn fill(&self, until: Instant) -> (u64, u64) {
        let (mut rng, mut looks, mut least) = (Rng::new(1), 0, u64::MAX);
        let file = File::create(self.folder.join("filler")).unwrap();
        while Instant::now() < until {
            self.take(&file, rng.below(self.free() + ROOM / 2));
            thread::sleep(IDLE);
            file.set_len(0).unwrap();
            syncfs(&file).unwrap();
            let end = Instant::now() + IDLE;
            let mut is_free = false;
            while Instant::now() < end {
                let free = self.free();
                is_free |= free >= self.floor;
                if is_free {
                    (looks, least) = (looks + 1, least.min(free));
                }
                thread::sleep(Duration::from_millis(1));
            }
        }
        (looks, least)
    }
}

fn beside_a_filler(name: &str, mkfs: &[&str], size: u64, own: u64) {
    let space = Space::new(name);
    let (store, state) = (space.path("store"), space.make_folder("state"));
    let with = |state| Burgeon::with_state(PROGRAM, state).option("--store").option(&store);
    let burgeon = with(state.clone());
    let tree = space.make_folder("tree");
    for number in 0..FILES {
        fs::write(tree.join(number.to_string()), Rng::new(number).bytes(FILE_LEN)).unwrap();
    }
    burgeon.build(&tree, "image");
    record_profile(&with(space.path("recorder")), &space.path("recorded"));

    let folder = state.join("cache");
    let mounted_disk = space.disk_with(&folder, size, mkfs);
    let total = statvfs(&folder).unwrap();
    let floor = total.f_blocks * total.f_frsize / 100 * 25;
    let disk = Disk { folder, floor, own };
    let others = File::create(disk.folder.join("others")).unwrap();
    disk.take(&others, disk.free() - floor - ROOM);
    // As users have it: the testkit's own settings have no floor.
    fs::write(state.join("cache.json"), "{}").unwrap();
    let places = [space.path("filled"), space.path("read")];
    let filled = burgeon.mount("image", &places[0], &["--read-only", "--fill"]);
    let read = burgeon.mount("image", &places[1], &["--read-only", "--profile", "none"]);
    let until = Instant::now() + length();
    let (kills, ends) = (AtomicU64::new(0), AtomicBool::new(false));
    let (looks, least) = thread::scope(|scope| {
        for (number, at) in (0..READERS).flat_map(|n| places.iter().map(move |at| (n, at))) {
            let tree = &tree;
            scope.spawn(move || read_small(tree, at, number, until));
        }
        let (burgeon, kills, ends) = (&burgeon, &kills, &ends);
        scope.spawn(move || {
            let mut killed: Option<Instant> = None;
            while !ends.load(Relaxed) {
                if killed.is_none_or(|killed| killed.elapsed() > BETWEEN_KILLS)
                    && let Some(server) = evicting(burgeon)
                {
                    kill(server);
                    killed = Some(Instant::now());
                    kills.fetch_add(1, Relaxed);
                }
                thread::sleep(Duration::from_millis(5));
            }
        });
        let filled = disk.fill(until);
        ends.store(true, Relaxed);
        filled
    });
    let kills = kills.into_inner();
    println!("{name}: {kills} kills, {looks} looks; the least that was free: {least}, {floor}");
    assert!(kills > 0 && looks > 0, "{kills} kills, {looks} looks");
    assert!(least + disk.own >= floor, "{least} bytes were free, and {floor} should be");
    // A server that was killed just now is replaced.
    assert!(wait_until(PATIENCE, || burgeon.run(&["status", "--json"]).code == Some(0)));
    drop_caches();
    for (number, at) in (0..FILES).flat_map(|n| places.iter().map(move |at| (n, at))) {
        let bytes = fs::read(at.join(number.to_string())).unwrap();
        assert!(bytes == Rng::new(number).bytes(FILE_LEN), "{number}");
    }
    let status = burgeon.status();
    let failed = |mount: &Value| mount["reads"]["failed_reads"].as_u64() > Some(0);
    assert!(!status["mounts"].as_array().unwrap().iter().any(failed), "{status:#}");
    [filled, read].into_iter().for_each(|mounted| burgeon.umount(mounted));
    burgeon.ok(&["shutdown"]);
    drop(mounted_disk);
}

/// Publishes a profile of half of the files with the image.
fn record_profile(burgeon: &Burgeon, at: &Path) {
    let mounted = burgeon.mount("image", at, &["--read-only", "--profile", "none"]);
    let files = (0..FILES / 2).map(|number| at.join(number.to_string()).display().to_string());
    let mut arguments = vec!["record".to_owned(), at.display().to_string()];
    arguments.extend(["--", "cat"].map(str::to_owned));
    arguments.extend(files);
    burgeon.ok(&arguments);
    burgeon.umount(mounted);
    burgeon.ok(&["shutdown"]);
}
