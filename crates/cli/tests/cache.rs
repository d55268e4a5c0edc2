//! The host's cache, as its users see it: shared, bounded, and theirs to change. Needs root.

#![allow(clippy::unwrap_used)]

use std::{
    fs::{self, File},
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::Command,
    thread,
    time::{Duration, Instant},
};

use rustix::fs::{FallocateFlags, fallocate};
use serde_json::Value;
use testkit::{Burgeon, OciLayout, PATIENCE, Rng, Space, drop_caches, kill, wait_until};

const PROGRAM: &str = env!("CARGO_BIN_EXE_burgeon");
const FILES: u64 = 20;
const FILE_LEN: usize = 1 << 20;
/// Bytes of a disk for the journal and the file system's own blocks, beside the chunks.
const OWN: u64 = 2 << 20;

/// A tree whose last `own` files depend on `seed`, and the others on nothing.
fn tree(space: &Space, name: &str, own: u64, seed: u64) -> PathBuf {
    let tree = space.make_folder(name);
    for number in 0..FILES {
        let seed = if number < FILES - own { number } else { seed + number };
        let path = tree.join(format!("f{number:02}"));
        fs::write(path, Rng::new(seed).bytes(FILE_LEN)).unwrap();
    }
    tree
}

fn assert_same(tree: &Path, at: &Path) {
    for number in 0..FILES {
        let name = format!("f{number:02}");
        let equal = fs::read(tree.join(&name)).unwrap() == fs::read(at.join(&name)).unwrap();
        assert!(equal, "{name}");
    }
}

fn cache(burgeon: &Burgeon, arguments: &[&str]) -> Value {
    let said = burgeon.ok(&[&["cache"], arguments, &["--json"]].concat());
    serde_json::from_str(&said).unwrap()
}

fn shown(burgeon: &Burgeon, field: &str) -> u64 {
    cache(burgeon, &["status"])["cache"][field].as_u64().unwrap()
}

#[test]
fn users_see_and_change_the_cache() {
    let space = Space::new("cache-command");
    let burgeon = Burgeon::new(PROGRAM, &space);
    let tree = tree(&space, "tree", 2, 1000);
    let at = space.path("at");
    burgeon.build(&tree, "image");
    burgeon.fails(&["cache", "status"], 5, "no daemon runs");
    let mounted = burgeon.mount("image", &at, &["--read-only", "--profile", "none"]);
    assert_same(&tree, &at);
    let all = FILES * FILE_LEN as u64;
    assert!(wait_until(PATIENCE, || shown(&burgeon, "used") >= all));
    assert!(burgeon.ok(&["status"]).contains("the host's cache takes"));
    // The server looks when it is asked, and not only every ten seconds.
    let read = cache(&burgeon, &["status"])["cache"]["read"].clone();
    assert!(read["miss"].as_u64().unwrap() > 0, "{read}");
    let before = read["hit"].as_u64().unwrap();
    drop_caches();
    assert_same(&tree, &at);
    let after = cache(&burgeon, &["status"])["cache"]["read"]["hit"].as_u64().unwrap();
    // A page in use at that moment stays in memory.
    assert!(after - before >= all / 10 * 9, "{before}, {after}");
    let said = burgeon.ok(&["cache", "status"]);
    assert!(said.contains("% in a minute") && said.contains("% in all"), "{said}");
    // Some 80 chunks, read again and again: a cache of any of these sizes would have had them.
    let estimated = || cache(&burgeon, &["status"])["cache"]["hit_permille"].clone();
    let is_estimated = wait_until(PATIENCE, || {
        drop_caches();
        assert_same(&tree, &at);
        // Few chunks are looked at: each reading adds to the hits.
        estimated()[0].as_u64() > Some(300)
    });
    assert!(is_estimated, "{}", estimated());
    assert!(burgeon.ok(&["cache", "status"]).contains("% at twice the size"));

    let evicted = cache(&burgeon, &["evict", "4M"]);
    assert!(evicted["bytes"].as_u64() >= Some(4 << 20), "{evicted}");
    cache(&burgeon, &["resize", "8M"]);
    let log = fs::read_to_string(burgeon.state().join("run/daemon.log")).unwrap();
    assert!(log.contains("the cache has done as told"), "{log}");
    assert!(shown(&burgeon, "used") <= 8 << 20 && shown(&burgeon, "limit") == 8 << 20);
    drop_caches();
    assert_same(&tree, &at);
    assert!(shown(&burgeon, "used") <= 8 << 20);
    let scrubbed = cache(&burgeon, &["scrub", "--rate", "1G"]);
    assert_eq!(scrubbed["chunks"], 0, "{scrubbed}");
    let dropped = cache(&burgeon, &["drop", "image"]);
    assert!(dropped["chunks"].as_u64() > Some(0), "{dropped}");
    assert_eq!(shown(&burgeon, "chunks"), 0);
    burgeon.fails(&["cache", "resize", "101%"], 2, "101%");
    burgeon.fails(&["cache", "scrub", "--rate", "0"], 2, "nothing is ever read");

    // A scrub ends with its command.
    drop_caches();
    assert_same(&tree, &at);
    let is_scrubbing = || cache(&burgeon, &["status"])["cache"]["scrubbing"] == true;
    let mut scrub = burgeon.command(&["cache", "scrub", "--rate", "1"]).spawn().unwrap();
    assert!(wait_until(PATIENCE, is_scrubbing));
    assert!(burgeon.ok(&["cache", "status"]).contains("scrub      runs"));
    scrub.kill().unwrap();
    scrub.wait().unwrap();
    assert!(wait_until(PATIENCE, || !is_scrubbing()));

    // The limit outlives the server and the daemon.
    kill(burgeon.status()["server_pid"].as_u64().unwrap() as u32);
    drop_caches();
    assert_same(&tree, &at);
    assert!(wait_until(PATIENCE, || shown(&burgeon, "limit") == 8 << 20));
    burgeon.umount(mounted);
    burgeon.ok(&["shutdown"]);
    let mounted = burgeon.mount("image", &at, &["--read-only", "--profile", "none"]);
    assert_eq!(shown(&burgeon, "limit"), 8 << 20);
    burgeon.umount(mounted);
}

#[test]
fn an_image_whose_map_lies_in_named_writes_is_dropped() {
    let space = Space::new("cache-drop-writes");
    let burgeon = Burgeon::new(PROGRAM, &space);
    let trees = [tree(&space, "one", FILES, 1000), tree(&space, "two", FILES, 2000)];
    let [at, other] = ["at", "other"].map(|name| space.path(name));
    burgeon.build(&trees[0], "one");
    burgeon.build(&trees[1], "two");
    let kept = burgeon.mount("one", &at, &["--writes", "w", "--profile", "none"]);
    assert_same(&trees[0], &at);
    let all = FILES * FILE_LEN as u64;
    assert!(wait_until(PATIENCE, || shown(&burgeon, "used") >= all));
    let forget_prepared = || {
        for image in fs::read_dir(burgeon.state().join("images")).unwrap().flatten() {
            let _ = fs::remove_file(image.path().join("map"));
        }
    };
    let drop_one = || cache(&burgeon, &["drop", "one"])["chunks"].as_u64().unwrap();
    // While it is mounted, and while it is not.
    forget_prepared();
    assert!(drop_one() > 0);
    drop_caches();
    assert_same(&trees[0], &at);
    assert!(wait_until(PATIENCE, || shown(&burgeon, "used") >= all));
    let mounted = burgeon.mount("two", &other, &["--read-only", "--profile", "none"]);
    burgeon.umount(kept);
    forget_prepared();
    assert!(drop_one() > 0);
    assert_same(&trees[1], &other);
    burgeon.umount(mounted);
}

/// The effective user of the server.
fn user_of_server(burgeon: &Burgeon) -> String {
    let server = burgeon.status()["server_pid"].as_u64().unwrap();
    let status = fs::read_to_string(format!("/proc/{server}/status")).unwrap();
    let users = status.lines().find_map(|line| line.strip_prefix("Uid:")).unwrap();
    users.split_whitespace().nth(1).unwrap().to_owned()
}

/// The findings of `doctor` about `subject`.
fn found(burgeon: &Burgeon, subject: &str) -> Vec<Value> {
    let said = burgeon.run(&["doctor", "--json"]).stdout;
    let said: Value = serde_json::from_str(&said).unwrap();
    let all = said["findings"].as_array().unwrap().iter();
    all.filter(|finding| finding["subject"] == subject).cloned().collect()
}

#[test]
fn the_cache_may_lie_on_another_disk() {
    let space = Space::new("cache-dir");
    let burgeon = Burgeon::new(PROGRAM, &space);
    let tree = tree(&space, "tree", 2, 1000);
    let all = FILES * FILE_LEN as u64;
    let (at, disk_at, own) = (space.path("at"), space.path("disk"), burgeon.state().join("cache"));
    let dir = disk_at.join("cache");
    burgeon.build(&tree, "image");
    let none = ["--read-only", "--profile", "none"];
    let read = |options: &[&str], stays: bool| {
        let mounted = burgeon.mount("image", &at, &[&none, options].concat());
        drop_caches();
        assert_same(&tree, &at);
        if stays {
            assert!(wait_until(PATIENCE, || shown(&burgeon, "used") >= all));
        }
        let shown = cache(&burgeon, &["status"])["cache"].clone();
        (mounted, shown)
    };
    let end = |mounted| {
        burgeon.umount(mounted);
        burgeon.ok(&["shutdown"]);
    };
    let (mounted, shown_now) = read(&[], true);
    let user = user_of_server(&burgeon);
    assert_eq!(shown_now["folder"], own.to_str().unwrap());
    end(mounted);

    let disk = space.disk(&disk_at, 128 << 20);
    let elsewhere = ["--cache-dir", dir.to_str().unwrap()];
    let refused = |code, message| {
        let mount = ["mount", "image", at.to_str().unwrap()];
        burgeon.fails(&[&mount[..], &elsewhere].concat(), code, message);
    };
    refused(3, "it is not there; mount its disk, or make it");
    fs::create_dir(&dir).unwrap();
    let mode = |mode| fs::set_permissions(&dir, fs::Permissions::from_mode(mode)).unwrap();
    mode(0o777);
    refused(1, "others can write to");
    mode(0o700);
    fs::write(dir.join("letters"), b"").unwrap();
    refused(1, "it holds other files");
    fs::remove_file(dir.join("letters")).unwrap();
    std::os::unix::fs::chown(&dir, Some(1), None).unwrap();
    refused(1, "belongs to user 1");
    std::os::unix::fs::chown(&dir, Some(0), None).unwrap();
    let read_only = |flag: &str| {
        let options = format!("remount,{flag}");
        let done = Command::new("mount").args(["-o", &options]).arg(&disk_at).status();
        assert!(done.unwrap().success());
    };
    read_only("ro");
    refused(1, "mounted read-only");
    read_only("rw");
    let filler = File::create(disk_at.join("filler")).unwrap();
    fallocate(&filler, FallocateFlags::empty(), 0, 100 << 20).unwrap();
    let settings = burgeon.state().join("cache.json");
    let keep_free = |bytes: u64| {
        fs::write(&settings, format!(r#"{{"keep_free":{{"bytes":{bytes}}}}}"#)).unwrap();
    };
    keep_free(64 << 20);
    refused(6, "its disk is full");
    keep_free(0);
    fs::remove_file(disk_at.join("filler")).unwrap();
    drop(filler);
    let (mounted, shown_now) = read(&elsewhere, true);
    assert_eq!(shown_now["folder"], dir.to_str().unwrap());
    assert_eq!(shown_now["earlier"][0], own.to_str().unwrap());
    assert_eq!(user_of_server(&burgeon), user, "the folder is mapped like the state directory");
    let is_arena = |name: &str| name.starts_with("arena-");
    let arenas = || {
        let names = fs::read_dir(&dir).unwrap().flatten().map(|entry| entry.file_name());
        names.filter(|name| is_arena(&name.to_string_lossy())).count()
    };
    assert!(arenas() > 0, "the chunks are on the disk");
    assert!(burgeon.ok(&["cache", "status"]).contains("nobody uses it"));
    assert!(found(&burgeon, "cache")[0]["found"].as_str().unwrap().contains("/disk/cache"));
    assert_eq!(found(&burgeon, "earlier cache").len(), 1);
    // A server that takes over has the folder, too.
    kill(burgeon.status()["server_pid"].as_u64().unwrap() as u32);
    drop_caches();
    assert_same(&tree, &at);
    let is_kept = || cache(&burgeon, &["status"])["cache"]["folder"] == dir.to_str().unwrap();
    assert!(is_kept(), "a killed server's successor");
    burgeon.ok(&["upgrade"]);
    assert!(is_kept(), "an upgrade keeps the folder of the option");
    // Without the folder, it serves the mounts and keeps nothing.
    let away = disk_at.join("away");
    fs::rename(&dir, &away).unwrap();
    burgeon.ok(&["upgrade"]);
    let problem = cache(&burgeon, &["status"])["cache"]["problem"].clone();
    assert!(problem.as_str().is_some_and(|why| why.contains("it is not there")), "{problem}");
    drop_caches();
    assert_same(&tree, &at);
    fs::rename(&away, &dir).unwrap();
    burgeon.ok(&["upgrade"]);
    assert!(is_kept(), "the folder is back");
    drop_caches();
    assert_same(&tree, &at);
    assert!(wait_until(PATIENCE, || shown(&burgeon, "used") >= all));
    // A copy of a mount lies in the state directory: no chunk makes room for it on this disk.
    let filler = File::create(disk_at.join("filler")).unwrap();
    let free = rustix::fs::statvfs(&disk_at).unwrap();
    let len = (free.f_bavail * free.f_frsize).saturating_sub(4 << 20);
    fallocate(&filler, FallocateFlags::empty(), 0, len).unwrap();
    let evicted = shown(&burgeon, "evicted");
    burgeon.ok(&["let-go", at.to_str().unwrap()]);
    assert_eq!(shown(&burgeon, "evicted"), evicted);
    fs::remove_file(disk_at.join("filler")).unwrap();
    drop(filler);
    // Another daemon finds it locked: it reads everything, and keeps nothing.
    let beside = Burgeon::with_state(PROGRAM, space.path("beside"));
    beside.build(&tree, "image");
    let beside_at = space.path("beside-at");
    let second = beside.mount("image", &beside_at, &[&none[..], &elsewhere].concat());
    assert_same(&tree, &beside_at);
    let shown_now = cache(&beside, &["status"])["cache"].clone();
    assert_eq!(shown_now["chunks"], 0);
    assert!(shown_now["problem"].as_str().unwrap().contains("another server has"), "{shown_now}");
    beside.umount(second);
    beside.ok(&["shutdown"]);
    let other = burgeon.run(&["--cache-dir", own.to_str().unwrap(), "status"]);
    assert!(other.stderr.contains("the running daemon has its cache in"), "{other:?}");
    end(mounted);

    // The configuration says the same; without the disk nothing is kept, and every read is right.
    let config = space.path("config.toml");
    fs::write(&config, format!("cache.dir = {dir:?}\n")).unwrap();
    let configured = ["--config", config.to_str().unwrap()];
    let (mounted, shown_now) = read(&configured, true);
    assert!(shown_now["folder"] == dir.to_str().unwrap() && shown_now["admitted"] == 0);
    end(mounted);
    drop(disk);
    let (mounted, shown_now) = read(&configured, false);
    let problem = shown_now["problem"].as_str().unwrap();
    assert!(problem.contains("it is not there") && shown_now["chunks"] == 0, "{shown_now}");
    assert_eq!(found(&burgeon, "cache")[0]["level"], "problem");
    end(mounted);
    // Back again: the earlier one is this one, and nobody speaks of it any more.
    let (mounted, shown_now) = read(&[], true);
    assert!(shown_now["folder"] == own.to_str().unwrap() && shown_now["earlier"].is_null());
    end(mounted);
}

#[test]
fn a_small_ext4_is_never_filled_beyond_the_floor() {
    never_fills("cache-ext4", &["mkfs.ext4", "-q", "-F"], 96 << 20, OWN);
}

#[test]
fn a_small_xfs_is_never_filled_beyond_the_floor() {
    never_fills("cache-xfs", &["mkfs.xfs", "-q"], 320 << 20, OWN);
}

#[test]
fn a_small_btrfs_is_never_filled_beyond_the_floor() {
    // It gives space back with its next commits, and takes metadata in large pieces.
    never_fills("cache-btrfs", &["mkfs.btrfs", "-q"], 256 << 20, 16 << 20);
}

#[test]
fn a_small_tmpfs_is_never_filled_beyond_the_floor() {
    never_fills("cache-tmpfs", &["tmpfs"], 96 << 20, OWN);
}

/// The length of the reads: `CACHE_SECONDS`, or ten seconds.
fn length() -> Duration {
    let given = std::env::var("CACHE_SECONDS");
    Duration::from_secs(given.map_or(10, |seconds| seconds.parse().unwrap()))
}

/// The server, if one runs that has evicted something.
fn evicting(burgeon: &Burgeon) -> Option<u32> {
    let ask = |of: &[&str]| serde_json::from_str::<Value>(&burgeon.run(of).stdout).ok();
    let evicted = ask(&["cache", "status", "--json"])?["cache"]["evicted"].as_u64()?;
    let server = ask(&["status", "--json"])?["server_pid"].as_u64()?;
    (evicted > 0).then_some(server as u32)
}

/// Readers of more than there is room for compare every byte, while the server dies, and then
/// others take the disk, of which `own` bytes are not the chunks'.
fn never_fills(name: &str, mkfs: &[&str], size: u64, own: u64) {
    /// Room above the floor: half of what the readers read.
    const ROOM: u64 = 20 << 20;
    const BETWEEN_KILLS: Duration = Duration::from_secs(3);
    let space = Space::new(name);
    let (store, state) = (space.path("store"), space.make_folder("state"));
    let burgeon = Burgeon::with_state(PROGRAM, state.clone()).option("--store").option(&store);
    let trees = [tree(&space, "one", 18, 1000), tree(&space, "two", 18, 2000)];
    for (tree, name) in trees.iter().zip(["one", "two"]) {
        burgeon.build(tree, name);
    }
    let folder = state.join("cache");
    let disk = space.disk_with(&folder, size, mkfs);
    let disk_now = || rustix::fs::statvfs(&folder).unwrap();
    let free = || disk_now().f_bavail * disk_now().f_frsize;
    let floor = disk_now().f_blocks * disk_now().f_frsize / 100 * 25;
    let take = |name: &str, mut bytes: u64| {
        let file = File::create(folder.join(name)).unwrap();
        // btrfs gives less than it says.
        while let Err(error) = fallocate(&file, FallocateFlags::empty(), 0, bytes) {
            assert!(error == rustix::io::Errno::NOSPC && bytes > 1 << 20, "{error}");
            bytes -= bytes / 8;
        }
        file.sync_all().unwrap();
    };
    take("others", free() - floor - ROOM);
    // As users have it: the testkit's own settings have no floor.
    fs::write(state.join("cache.json"), "{}").unwrap();
    let places = [space.path("at-one"), space.path("at-two")];
    let none = ["--read-only", "--profile", "none"];
    let mounted =
        ["one", "two"].iter().zip(&places).map(|(name, at)| burgeon.mount(name, at, &none));
    let mounted: Vec<_> = mounted.collect();
    assert_eq!(shown(&burgeon, "floor"), floor, "25 % is left free by default");
    let mut least = u64::MAX;
    let until = Instant::now() + length();
    thread::scope(|scope| {
        let readers: Vec<_> = trees
            .iter()
            .zip(&places)
            .map(|(tree, at)| {
                scope.spawn(move || {
                    while Instant::now() < until {
                        drop_caches();
                        assert_same(tree, at);
                    }
                })
            })
            .collect();
        let (mut kills, mut killed) = (0, Instant::now());
        while readers.iter().any(|reader| !reader.is_finished()) {
            least = least.min(free());
            // While it evicts: what it has forgotten is not all punched and recorded. Its counts
            // begin anew with each server.
            if (kills == 0 || killed.elapsed() > BETWEEN_KILLS)
                && let Some(server) = evicting(&burgeon)
            {
                kill(server);
                (kills, killed) = (kills + 1, Instant::now());
            }
            thread::sleep(Duration::from_millis(5));
        }
        println!("{name}: the server was killed {kills} times");
        assert!(kills > 0, "there was room for all");
    });
    println!("{name}: the least that was free: {least}; the floor: {floor}");
    assert!(least + own >= floor, "{least} bytes were free, and {floor} should be");
    // Others take nearly all of it: the cache gives way, and then passes everything through.
    take("hog", free() - (1 << 20));
    // The last server may have been killed just now.
    let gave_way = || {
        let said = burgeon.run(&["cache", "status", "--json"]).stdout;
        let said = serde_json::from_str::<Value>(&said).unwrap_or_default();
        let used = said["cache"]["used"].as_u64();
        used.is_some_and(|used| free() >= floor.min(used + (1 << 20)))
    };
    assert!(wait_until(PATIENCE, gave_way));
    drop_caches();
    trees.iter().zip(&places).for_each(|(tree, at)| assert_same(tree, at));
    let failed = |mount: &Value| mount["reads"]["failed_reads"].as_u64() > Some(0);
    let status = burgeon.status();
    assert!(!status["mounts"].as_array().unwrap().iter().any(failed), "{status:#}");
    mounted.into_iter().for_each(|mounted| burgeon.umount(mounted));
    burgeon.ok(&["shutdown"]);
    drop(disk);
}

#[test]
fn the_cache_makes_room_for_writes() {
    /// The smallest sprout, and what the host keeps.
    const WANTED: u64 = (256 + 64) << 20;
    let space = Space::new("cache-room");
    let folder = space.make_folder("disk");
    let disk = space.disk(&folder, 520 << 20);
    let burgeon = Burgeon::with_state(PROGRAM, folder.join("state"));
    let tree = tree(&space, "tree", 2, 1000);
    burgeon.build(&tree, "image");
    let places = [space.path("at"), space.path("writable")];
    let reading = burgeon.mount("image", &places[0], &["--read-only", "--profile", "none"]);
    assert_same(&tree, &places[0]);
    assert!(wait_until(PATIENCE, || shown(&burgeon, "used") >= FILES * FILE_LEN as u64));
    let free = || {
        let disk = rustix::fs::statvfs(&folder).unwrap();
        disk.f_bavail * disk.f_frsize
    };
    let hog = File::create(folder.join("hog")).unwrap();
    fallocate(&hog, FallocateFlags::empty(), 0, free() - WANTED + (12 << 20)).unwrap();
    assert!(free() < WANTED);
    let options = ["--write-limit", "256M", "--reserve", "--profile", "none"];
    let writing = burgeon.mount("image", &places[1], &options);
    assert!(shown(&burgeon, "evicted") >= 8 << 20);
    fs::write(places[1].join("own"), b"own").unwrap();
    drop_caches();
    assert_same(&tree, &places[1]);
    [reading, writing].into_iter().for_each(|mounted| burgeon.umount(mounted));
    burgeon.ok(&["shutdown"]);
    drop(disk);
}

#[test]
fn the_cache_makes_room_for_builds_and_pulls() {
    /// Beside the estimate, a command has this much free.
    const MARGIN: u64 = 64 << 20;
    let space = Space::new("cache-image-room");
    let folder = space.make_folder("disk");
    let disk = space.disk(&folder, 320 << 20);
    let burgeon = Burgeon::with_state(PROGRAM, folder.join("state"));
    let trees = [tree(&space, "one", 2, 1000), tree(&space, "two", FILES, 2000)];
    let data = FILES * FILE_LEN as u64;
    burgeon.build(&trees[0], "one");
    let at = space.path("at");
    let reading = burgeon.mount("one", &at, &["--read-only", "--profile", "none"]);
    // Otherwise the cache itself would leave a quarter free before anybody asks.
    cache(&burgeon, &["resize", "--keep-free", "1M"]);
    assert_same(&trees[0], &at);
    assert!(wait_until(PATIENCE, || shown(&burgeon, "used") >= data));
    let free = || {
        let disk = rustix::fs::statvfs(&folder).unwrap();
        disk.f_bavail * disk.f_frsize
    };
    // 8 MiB are missing for a build of 20.
    let left = data + MARGIN - (8 << 20);
    let hog = File::create(folder.join("hog")).unwrap();
    fallocate(&hog, FallocateFlags::empty(), 0, free() - left).unwrap();
    let before = shown(&burgeon, "evicted");
    burgeon.build(&trees[1], "two");
    let for_build = shown(&burgeon, "evicted");
    assert!(for_build >= before + (7 << 20), "{before}, then {for_build} bytes");
    // The build took what was free beside the margin: a pull lacks all that it stores, and the
    // cache has less than that.
    let other = space.path("other");
    let third = tree(&space, "three", FILES, 3000);
    let from = other.to_str().unwrap();
    burgeon.ok(&["--store", from, "build", third.to_str().unwrap(), "three"]);
    assert_eq!(shown(&burgeon, "evicted"), for_build, "that store is on another disk");
    burgeon.ok(&["pull", "--eager", "three", "--store", from, "--as", "pulled"]);
    let for_pull = shown(&burgeon, "evicted");
    assert!(for_pull >= for_build + (7 << 20), "{for_build}, then {for_pull} bytes");
    drop_caches();
    assert_same(&trees[0], &at);
    burgeon.umount(reading);
    burgeon.ok(&["shutdown"]);
    drop(disk);
}

#[test]
fn the_cache_makes_room_for_images_of_unknown_size() {
    /// A child asks for this much ahead of what it has stored; a command has as much beside it.
    const AHEAD: u64 = (64 + 64) << 20;
    let space = Space::new("cache-unknown-room");
    let folder = space.make_folder("disk");
    let disk = space.disk(&folder, 320 << 20);
    let burgeon = Burgeon::with_state(PROGRAM, folder.join("state"));
    let trees = [1000, 2000, 3000].map(|seed| tree(&space, &format!("{seed}"), FILES, seed));
    let data = FILES * FILE_LEN as u64;
    burgeon.build(&trees[0], "one");
    let at = space.path("at");
    let reading = burgeon.mount("one", &at, &["--read-only", "--profile", "none"]);
    cache(&burgeon, &["resize", "--keep-free", "1M"]);
    let free = || {
        let disk = rustix::fs::statvfs(&folder).unwrap();
        disk.f_bavail * disk.f_frsize
    };
    let mut archives = trees[1..].iter().map(|tree| {
        let tar = Command::new("tar").args(["-cf", "-", "-C"]).arg(tree).arg(".").output().unwrap();
        assert!(tar.status.success(), "{tar:?}");
        tar.stdout
    });
    let evicts = |what: &str, work: &dyn Fn()| {
        drop_caches();
        assert_same(&trees[0], &at);
        assert!(wait_until(PATIENCE, || shown(&burgeon, "used") >= data));
        let hog = File::create(folder.join("hog")).unwrap();
        fallocate(&hog, FallocateFlags::empty(), 0, free() - AHEAD + (8 << 20)).unwrap();
        let before = shown(&burgeon, "evicted");
        work();
        let after = shown(&burgeon, "evicted");
        assert!(after >= before + (7 << 20), "{what}: {before}, then {after} bytes");
        fs::remove_file(folder.join("hog")).unwrap();
    };
    let archive = space.path("archive.tar");
    fs::write(&archive, archives.next().unwrap()).unwrap();
    evicts("build from standard input", &|| {
        let stdin = File::open(&archive).unwrap();
        let built = burgeon.command(&["build", "-", "piped"]).stdin(stdin).output().unwrap();
        assert!(built.status.success(), "{built:?}");
    });
    let layout = space.path("layout");
    let layer = ("application/vnd.oci.image.layer.v1.tar", archives.next().unwrap());
    OciLayout::by_hand(&layout, None, &[layer], |_| ()).unwrap();
    let layout = format!("oci-layout:{}", layout.display());
    evicts("build from a layout", &|| drop(burgeon.ok(&["build", &layout, "copied"])));
    evicts("pull from a layout", &|| drop(burgeon.ok(&["pull", &layout])));
    assert_same(&trees[0], &at);
    burgeon.umount(reading);
    burgeon.ok(&["shutdown"]);
    drop(disk);
}
