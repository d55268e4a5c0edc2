//! `burgeon let-go`: a mount that needs no process any more. Needs root.

#![allow(clippy::unwrap_used)]

use std::{
    fs,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    process::Stdio,
    sync::atomic::{AtomicBool, Ordering::Relaxed},
    thread,
    time::Duration,
};

use rustix::mount::{UnmountFlags, unmount};
use testkit::{Burgeon, Mounted, PATIENCE, Rng, Space, drop_caches, wait_until};

const PROGRAM: &str = env!("CARGO_BIN_EXE_burgeon");
const FILES: u64 = 12;
const FILE_LEN: usize = 3 << 20;
/// Options of mounts over FUSE, which can be let go.
const FUSE: [&str; 4] = ["--transport", "fuse", "--profile", "none"];
const WRITABLE: [&str; 6] = ["--transport", "fuse", "--profile", "none", "--write-limit", "600M"];

struct Set {
    burgeon: Burgeon,
    tree: PathBuf,
    at: PathBuf,
}

fn set_up(space: &Space) -> Set {
    let tree = space.make_folder("tree");
    for number in 0..FILES {
        let bytes = Rng::new(number).bytes(FILE_LEN + 4097 * number as usize);
        fs::write(tree.join(format!("f{number}")), bytes).unwrap();
    }
    let burgeon = Burgeon::new(PROGRAM, space);
    burgeon.build(&tree, "image");
    Set { burgeon, tree, at: space.path("at") }
}

fn assert_same(tree: &Path, at: &Path) {
    drop_caches();
    for number in 0..FILES {
        let name = format!("f{number}");
        assert!(fs::read(tree.join(&name)).unwrap() == fs::read(at.join(&name)).unwrap(), "{name}");
    }
}

fn let_go(set: &Set) -> String {
    set.burgeon.ok(&["let-go", set.at.to_str().unwrap()])
}

/// States of the mounts at these places.
fn states(burgeon: &Burgeon) -> Vec<String> {
    let status = burgeon.status();
    let mounts = status["mounts"].as_array().unwrap().iter();
    mounts.map(|mount| mount["state"].as_str().unwrap().to_owned()).collect()
}

fn folders_of_mounts(burgeon: &Burgeon) -> usize {
    fs::read_dir(burgeon.state().join("mounts")).unwrap().count()
}

#[test]
fn a_mount_that_was_let_go_outlives_every_process() {
    let space = Space::new("let-go-alone");
    let set = set_up(&space);
    let mounted = set.burgeon.mount("image", &set.at, &WRITABLE);
    fs::write(set.at.join("own"), b"written before").unwrap();
    let said = let_go(&set);
    assert!(said.contains("no process of Burgeon is needed"), "{said}");
    assert_eq!(states(&set.burgeon), ["let go"]);
    // Again: nothing is left to do.
    let_go(&set);

    set.burgeon.kill_daemon();
    assert_same(&set.tree, &set.at);
    assert_eq!(fs::read(set.at.join("own")).unwrap(), b"written before");
    fs::write(set.at.join("f1"), Rng::new(77).bytes(FILE_LEN)).unwrap();
    drop_caches();
    assert!(fs::read(set.at.join("f1")).unwrap() == Rng::new(77).bytes(FILE_LEN));
    // All that the limit promised is reserved: nobody has to grow it.
    let big = fs::File::create(set.at.join("big")).unwrap();
    let block = vec![7; 1 << 20];
    (0..300).for_each(|mib| big.write_all_at(&block, mib << 20).unwrap());
    big.sync_all().unwrap();
    drop(big);

    unmount(&set.at, UnmountFlags::empty()).unwrap();
    std::mem::forget(mounted);
    // The next daemon removes what the mount has left.
    let other = space.path("other");
    let again = set.burgeon.mount("image", &other, &FUSE);
    assert!(wait_until(PATIENCE, || folders_of_mounts(&set.burgeon) == 1));
    assert_same(&set.tree, &other);
    set.burgeon.umount(again);
}

#[test]
fn the_next_supervisor_knows_a_mount_that_was_let_go() {
    let space = Space::new("let-go-next");
    let set = set_up(&space);
    let options = [&FUSE[..], &["--read-only"]].concat();
    let mounted = set.burgeon.mount("image", &set.at, &options);
    let_go(&set);
    set.burgeon.kill_daemon();
    let other = space.path("other");
    let second = set.burgeon.mount("image", &other, &FUSE);
    assert!(states(&set.burgeon).contains(&"let go".to_owned()));
    let path = set.at.join("f1");
    set.burgeon.fails(&["pin", path.to_str().unwrap()], 1, "let-go");
    assert_same(&set.tree, &set.at);
    set.burgeon.umount(mounted);
    assert_eq!((states(&set.burgeon).len(), folders_of_mounts(&set.burgeon)), (1, 1));
    set.burgeon.umount(second);
}

#[test]
fn readers_and_writers_do_not_notice() {
    let space = Space::new("let-go-busy");
    let set = set_up(&space);
    let mounted = set.burgeon.mount("image", &set.at, &WRITABLE);
    let done = AtomicBool::new(false);
    let written = thread::scope(|scope| {
        let readers: Vec<_> = (0..2)
            .map(|seed| {
                let (set, done) = (&set, &done);
                scope.spawn(move || {
                    let mut rng = Rng::new(seed);
                    while !done.load(Relaxed) {
                        let name = format!("f{}", rng.below(FILES));
                        let was = fs::read(set.tree.join(&name)).unwrap();
                        assert!(fs::read(set.at.join(&name)).unwrap() == was, "{name}");
                        drop_caches();
                    }
                })
            })
            .collect();
        let writer = scope.spawn(|| {
            let file = fs::File::create(set.at.join("log")).unwrap();
            let mut lines = 0;
            while !done.load(Relaxed) {
                file.write_all_at(&u64::to_le_bytes(lines), lines * 8).unwrap();
                lines += 1;
            }
            lines
        });
        let_go(&set);
        done.store(true, Relaxed);
        readers.into_iter().for_each(|reader| reader.join().unwrap());
        writer.join().unwrap()
    });
    drop_caches();
    let log = fs::read(set.at.join("log")).unwrap();
    let lines: Vec<_> = (0..written).flat_map(u64::to_le_bytes).collect();
    assert!(log == lines, "{} bytes of {written} lines", log.len());
    assert_same(&set.tree, &set.at);
    set.burgeon.umount(mounted);
}

#[test]
fn deaths_during_the_exchange_cost_nothing() {
    let space = Space::new("let-go-deaths");
    let set = set_up(&space);
    let beside = space.path("beside");
    for delay in [0, 5, 20, 60, 150, 400] {
        let mounted = set.burgeon.mount("image", &set.at, &WRITABLE);
        fs::write(set.at.join("own"), b"own").unwrap();
        let mut command = set.burgeon.command(&["let-go", set.at.to_str().unwrap()]);
        let mut command = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        let is_copied = || {
            let folders = fs::read_dir(set.burgeon.state().join("mounts")).unwrap().flatten();
            folders.into_iter().any(|folder| folder.path().join("plain").exists())
        };
        assert!(wait_until(PATIENCE, || is_copied() || command.try_wait().unwrap().is_some()));
        // The moment of the death, not a wait for something.
        thread::sleep(Duration::from_millis(delay));
        set.burgeon.kill_both();
        let done = command.wait().unwrap().success();
        // Starts the next daemon.
        let other = set.burgeon.mount("image", &beside, &FUSE);
        let served = || {
            let states = states(&set.burgeon);
            states.iter().all(|state| state == "serving" || state == "let go")
        };
        assert!(wait_until(PATIENCE, served), "after {delay} ms: {:?}", states(&set.burgeon));
        let is_let_go = states(&set.burgeon).contains(&"let go".to_owned());
        println!("killed after {delay} ms: the command succeeded: {done}, let go: {is_let_go}");
        assert!(is_let_go || !done, "it was let go, and is not any more");
        assert_same(&set.tree, &set.at);
        assert_eq!(fs::read(set.at.join("own")).unwrap(), b"own");
        fs::write(set.at.join("own"), b"still writable").unwrap();
        set.burgeon.umount(mounted);
        set.burgeon.umount(other);
        assert!(wait_until(PATIENCE, || folders_of_mounts(&set.burgeon) == 0));
    }
}

#[test]
fn a_mount_that_cannot_be_let_go_stays_as_it_is() {
    let space = Space::new("let-go-refused");
    let set = set_up(&space);
    let at = set.at.to_str().unwrap();
    let mounted = set.burgeon.mount("image", &set.at, &WRITABLE);
    set.burgeon.ok(&["cache", "resize", "--keep-free", "99%"]);
    set.burgeon.fails(&["let-go", at], 6, "the cache's floor");
    set.burgeon.ok(&["cache", "resize", "--keep-free", "0"]);
    set.burgeon.fails(&["let-go", "/"], 1, "in no mount");
    let still_served = |mounted: &Mounted| {
        assert_eq!(states(&set.burgeon), ["serving"]);
        let folder = fs::read_dir(set.burgeon.state().join("mounts")).unwrap().next().unwrap();
        let copies = fs::read_dir(folder.unwrap().path()).unwrap();
        let is_copy = |name: &str| name == "plain";
        assert!(!copies.flatten().any(|entry| is_copy(entry.file_name().to_str().unwrap())));
        assert!(mounted.path().join("f0").exists());
    };
    still_served(&mounted);
    // A command that is killed has changed nothing, and the next one begins again.
    let mut killed = set.burgeon.command(&["let-go", at]);
    let mut killed = killed.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let new = || {
        let folders = fs::read_dir(set.burgeon.state().join("mounts")).unwrap().flatten();
        folders.map(|folder| folder.path().join("plain.new")).find(|path| path.exists())
    };
    wait_until(PATIENCE, || new().is_some() || killed.try_wait().unwrap().is_some());
    killed.kill().unwrap();
    killed.wait().unwrap();
    let_go(&set);
    assert_same(&set.tree, &set.at);
    set.burgeon.umount(mounted);

    let area = [&WRITABLE[..], &["--virtual", "1G", "--writes", "kept"]].concat();
    let mounted = set.burgeon.mount("image", &set.at, &area);
    set.burgeon.fails(&["let-go", at], 5, "virtual area");
    still_served(&mounted);
    set.burgeon.umount(mounted);
}
