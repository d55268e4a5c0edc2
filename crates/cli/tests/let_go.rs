//! `burgeon let-go`: a mount that needs no process any more. Needs root.

#![allow(clippy::unwrap_used)]

use std::{
    fs,
    os::unix::fs::{FileExt, MetadataExt},
    path::{Path, PathBuf},
    process::{Child, Stdio},
    sync::atomic::{AtomicBool, Ordering::Relaxed},
    thread,
    time::Duration,
};

use rustix::{
    fs::{SeekFrom, seek},
    io::Errno,
    mount::{UnmountFlags, unmount},
    process::{Pid, Signal, kill_process},
};
use serde_json::{Value, json};
use testkit::{Burgeon, Mounted, OciLayout, PATIENCE, Rng, Space, drop_caches, wait_until};

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

/// Has the daemon believe that the kernel of `boot` shuts file systems down whose devices are
/// exchanged.
fn forbid_exchanges(burgeon: &Burgeon, boot: &str) {
    let tried = json!({ "boot": boot, "can_exchange": false });
    fs::write(burgeon.state().join("exchange.json"), tried.to_string()).unwrap();
}

fn boot() -> String {
    fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap().trim().to_owned()
}

/// The plain files of mounts.
fn plain_files(burgeon: &Burgeon) -> Vec<PathBuf> {
    let folders = fs::read_dir(burgeon.state().join("mounts")).unwrap().flatten();
    folders.map(|folder| folder.path().join("plain")).filter(|path| path.exists()).collect()
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
    // Another boot may have had another kernel, so it is tried again.
    forbid_exchanges(&set.burgeon, "another boot");
    let said = let_go(&set);
    assert!(said.contains("no process of Burgeon is needed"), "{said}");
    let tried = fs::read_to_string(set.burgeon.state().join("exchange.json")).unwrap();
    assert!(tried.contains(&boot()) && tried.contains("true"), "{tried}");
    assert_eq!(states(&set.burgeon), ["let go"]);
    // Again: nothing is left to do.
    let_go(&set);

    set.burgeon.kill_daemon();
    for command in ["status", "health", "upgrade"] {
        let said = set.burgeon.ok(&[command]);
        assert!(!said.contains("repair"), "{command}: {said}");
    }
    set.burgeon.ok(&["health", set.at.to_str().unwrap()]);
    assert_eq!(set.burgeon.run(&["health", "/"]).code, Some(1), "nothing is mounted there");
    let said = set.burgeon.run(&["doctor"]).stdout;
    let of_mount = said.lines().find(|line| line.contains(set.at.to_str().unwrap()));
    assert!(of_mount.is_some_and(|line| line.contains("the kernel alone serves it")), "{said}");
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

/// Writes other bytes in the place of `block` in a sparse file.
fn spoil(path: &Path, block: &[u8]) {
    let file = fs::File::options().read(true).write(true).open(path).unwrap();
    let mut at = 0;
    let mut buf = vec![0; 4096];
    while let Ok(start) = seek(&file, SeekFrom::Data(at)) {
        at = seek(&file, SeekFrom::Hole(start)).unwrap();
        for place in (start..at).step_by(4096) {
            file.read_exact_at(&mut buf, place).unwrap();
            if buf == block {
                file.write_all_at(&[0xa5; 512], place).unwrap();
                return file.sync_all().unwrap();
            }
        }
    }
    panic!("the block is not in {path:?}");
}

#[test]
fn a_damaged_plain_file_is_told() {
    let space = Space::new("let-go-damaged");
    let set = set_up(&space);
    let mounted = set.burgeon.mount("image", &set.at, &FUSE);
    let_go(&set);
    set.burgeon.ok(&["health"]);
    let block = Rng::new(3).bytes(FILE_LEN + 4097 * 3)[8192..12288].to_vec();
    spoil(&plain_files(&set.burgeon)[0], &block);
    drop_caches();
    assert_eq!(fs::read(set.at.join("f3")).unwrap_err().raw_os_error(), Some(libc::EIO));
    let said = set.burgeon.run(&["health"]);
    assert!(said.code == Some(1) && said.stdout.contains("damaged"), "{said:?}");
    assert!(set.burgeon.run(&["doctor"]).stdout.contains("damaged or unreadable"));
    // The remedy.
    set.burgeon.umount(mounted);
    let mounted = set.burgeon.mount("image", &set.at, &FUSE);
    assert_same(&set.tree, &set.at);
    set.burgeon.ok(&["health"]);
    set.burgeon.umount(mounted);
}

#[test]
fn a_mount_can_be_filled_and_let_go_at_once() {
    let space = Space::new("let-go-at-once");
    let set = set_up(&space);
    let at = space.make_folder("at");
    let at = at.to_str().unwrap();
    let mount = [&["mount", "image", at, "--fill", "--let-go"][..], &WRITABLE].concat();
    let said = set.burgeon.ok(&mount);
    assert!(said.contains("no process of Burgeon is needed"), "{said}");
    assert_eq!(states(&set.burgeon), ["let go"]);
    let ended = set.burgeon.ok(&["shutdown"]);
    assert!(ended.contains("a mount that was let go stays"), "{ended}");
    assert_same(&set.tree, &set.at);
    unmount(&set.at, UnmountFlags::empty()).unwrap();
    // The next daemon cleans up.
    set.burgeon.run(&["list"]);
    set.burgeon.umount(set.burgeon.mount("image", &set.at, &FUSE));
    assert!(wait_until(PATIENCE, || folders_of_mounts(&set.burgeon) == 0));
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

/// A mount, and a command that lets it go and was stopped while it makes the plain file.
fn stopped_while_it_copies(set: &Set) -> (Mounted, Child) {
    loop {
        let mounted = set.burgeon.mount("image", &set.at, &WRITABLE);
        let mut command = set.burgeon.command(&["let-go", set.at.to_str().unwrap()]);
        let mut command = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        let is_copying = || {
            let folders = fs::read_dir(set.burgeon.state().join("mounts")).unwrap().flatten();
            folders.into_iter().any(|folder| folder.path().join("plain.new").exists())
        };
        wait_until(PATIENCE, || is_copying() || command.try_wait().unwrap().is_some());
        // On a busy machine it may have made the file already.
        if command.try_wait().unwrap().is_none() {
            send(&command, Signal::STOP);
            if is_copying() {
                return (mounted, command);
            }
            send(&command, Signal::CONT);
            command.wait().unwrap();
        }
        set.burgeon.umount(mounted);
    }
}

fn send(command: &Child, signal: Signal) {
    kill_process(Pid::from_child(command), signal).unwrap();
}

/// The command goes on with the next daemon, which it starts itself: a read of a device whose
/// daemon has died cannot be killed.
#[test]
fn a_daemon_that_dies_during_the_copy_costs_nothing() {
    let space = Space::new("let-go-copy");
    let set = set_up(&space);
    let (mounted, command) = stopped_while_it_copies(&set);
    set.burgeon.kill_both();
    send(&command, Signal::CONT);
    let done = command.wait_with_output().unwrap();
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    assert_eq!(states(&set.burgeon), ["let go"]);
    assert_same(&set.tree, &set.at);
    set.burgeon.umount(mounted);
}

/// A copy may take hours, and a daemon is replaced meanwhile.
#[test]
fn an_upgrade_during_the_copy_costs_nothing() {
    let space = Space::new("let-go-upgrade");
    let set = set_up(&space);
    let (mounted, command) = stopped_while_it_copies(&set);
    let before = set.burgeon.status()["supervisor_pid"].clone();
    set.burgeon.ok(&["upgrade"]);
    assert_ne!(set.burgeon.status()["supervisor_pid"], before);
    send(&command, Signal::CONT);
    let done = command.wait_with_output().unwrap();
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    assert_eq!(states(&set.burgeon), ["let go"]);
    set.burgeon.kill_daemon();
    assert_same(&set.tree, &set.at);
    set.burgeon.umount(mounted);
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
    set.burgeon.fails(&["let-go", "/"], 3, "in no mount");
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

#[test]
fn the_next_mount_begins_with_the_plain_file_if_no_device_can_be_exchanged() {
    let space = Space::new("let-go-later");
    let set = set_up(&space);
    let mounted = set.burgeon.mount("image", &set.at, &FUSE);
    forbid_exchanges(&set.burgeon, &boot());
    let said = let_go(&set);
    assert!(said.contains("shuts a file system down") && said.contains("the next mount"), "{said}");
    assert_eq!(states(&set.burgeon), ["serving"]);
    assert_same(&set.tree, &set.at);
    set.burgeon.umount(mounted);

    // Its description has the checksums, so named writes that are older can be mounted over it.
    let kept = ["--transport", "fuse", "--writes", "kept", "--write-limit", "300M"];
    let other = set.burgeon.mount("image", &space.path("other"), &FUSE);
    let mounted = set.burgeon.mount("image", &set.at, &kept);
    fs::write(set.at.join("own"), b"own").unwrap();
    set.burgeon.umount(mounted);
    set.burgeon.umount(other);
    let mounted = set.burgeon.mount("image", &set.at, &kept);
    assert_eq!(states(&set.burgeon), ["let go"]);
    assert_eq!(fs::read(set.at.join("own")).unwrap(), b"own");
    assert_same(&set.tree, &set.at);
    set.burgeon.umount(mounted);
}

/// An image of which only the table of contents is known, and its files.
struct Listed {
    burgeon: Burgeon,
    tree: PathBuf,
    source: String,
    at: PathBuf,
}

impl Listed {
    fn set_up(space: &Space) -> Self {
        let tree = space.make_folder("tree");
        for number in 0..FILES {
            let bytes = Rng::new(number).bytes(FILE_LEN / 8);
            fs::write(tree.join(format!("f{number}")), bytes).unwrap();
        }
        let source = OciLayout::listed(&space.path("layout"), &tree, 1 << 18).unwrap();
        Self { burgeon: Burgeon::new(PROGRAM, space), tree, source, at: space.path("at") }
    }

    fn mount(&self, at: &Path, options: &[&str]) -> Mounted {
        self.burgeon.mount(&self.source, at, options)
    }

    /// Makes the image complete: its next mount begins with the plain file.
    fn complete(&self) {
        let mounted = self.mount(&self.at, &WRITABLE);
        let said = self.burgeon.ok(&["let-go", self.at.to_str().unwrap()]);
        assert!(said.contains("is served on") && said.contains("the next mount"), "{said}");
        assert_eq!(states(&self.burgeon), ["serving"]);
        assert_same(&self.tree, &self.at);
        self.burgeon.umount(mounted);
    }
}

#[test]
fn a_complete_image_of_a_table_of_contents_gets_checksums() {
    let space = Space::new("let-go-sums");
    let set = Listed::set_up(&space);
    set.complete();
    let mounted = set.mount(&set.at, &FUSE);
    assert_eq!(states(&set.burgeon), ["let go"]);
    assert_same(&set.tree, &set.at);
    // A wrong byte on the disk is an error in its block, and no other byte.
    let [plain] = &plain_files(&set.burgeon)[..] else { panic!("one plain file") };
    let file = fs::File::options().read(true).write(true).open(plain).unwrap();
    let data = seek(&file, SeekFrom::Data(1 << 40)).unwrap();
    let mut byte = [0];
    file.read_exact_at(&mut byte, data + 100).unwrap();
    file.write_all_at(&[!byte[0]], data + 100).unwrap();
    file.sync_all().unwrap();
    drop_caches();
    let failed: Vec<_> = (0..FILES)
        .filter_map(|number| fs::read(set.at.join(format!("f{number}"))).err())
        .map(|error| error.raw_os_error())
        .collect();
    assert_eq!(failed, [Some(Errno::IO.raw_os_error())]);
    file.write_all_at(&byte, data + 100).unwrap();
    file.sync_all().unwrap();
    assert_same(&set.tree, &set.at);
    set.burgeon.umount(mounted);

    // Without that file the image is served again, and keeps its checksums.
    let list: Value = serde_json::from_str(&set.burgeon.ok(&["list", "--json"])).unwrap();
    let names = list["images"].as_array().unwrap().iter().map(|image| image["name"].as_str());
    let name = names.flatten().find(|name| name.ends_with("/contents")).unwrap();
    let mounted = set.mount(&set.at, &FUSE);
    let other = set.mount(&space.path("other"), &FUSE);
    set.burgeon.umount(mounted);
    set.burgeon.ok(&["cache", "drop", name]);
    let mounted = set.mount(&set.at, &FUSE);
    assert_eq!(states(&set.burgeon), ["serving", "serving"]);
    assert_same(&set.tree, &set.at);
    // The kernel knows them, so these mounts are let go at once.
    let said = set.burgeon.ok(&["let-go", set.at.to_str().unwrap()]);
    assert!(!said.contains("is served on"), "{said}");
    let mut both = states(&set.burgeon);
    both.sort();
    assert_eq!(both, ["let go", "serving"]);
    assert_same(&set.tree, &set.at);
    set.burgeon.umount(mounted);
    set.burgeon.umount(other);
}

#[test]
fn a_mount_begins_with_the_plain_file_of_its_image() {
    let space = Space::new("let-go-start");
    let set = Listed::set_up(&space);
    // Its seed has no checksums, so the kernel could not verify a plain file below it.
    let kept = ["--transport", "fuse", "--writes", "kept", "--write-limit", "300M"];
    let mounted = set.mount(&set.at, &kept);
    fs::write(set.at.join("own"), b"own").unwrap();
    set.burgeon.umount(mounted);
    set.complete();
    let mounted = set.mount(&set.at, &kept);
    assert_eq!(states(&set.burgeon), ["serving"]);
    assert_eq!(fs::read(set.at.join("own")).unwrap(), b"own");
    set.burgeon.umount(mounted);

    // Of two mounts at once one has the file; the other is served.
    let mounted = set.mount(&set.at, &WRITABLE);
    let other = set.mount(&space.path("other"), &FUSE);
    let mut both = states(&set.burgeon);
    both.sort();
    assert_eq!(both, ["let go", "serving"]);
    assert_same(&set.tree, other.path());
    set.burgeon.umount(other);
    let [plain] = &plain_files(&set.burgeon)[..] else { panic!("one plain file") };
    // Nobody has to grow its writes.
    let sprout = plain.with_file_name("sprout").metadata().unwrap();
    assert!(sprout.blocks() * 512 >= 600 << 20, "{} blocks", sprout.blocks());
    set.burgeon.kill_daemon();
    assert_same(&set.tree, &set.at);
    fs::write(set.at.join("own"), b"written without a process").unwrap();
    unmount(&set.at, UnmountFlags::empty()).unwrap();
    std::mem::forget(mounted);

    // The next daemon gives the file back to the image, and so does each umount.
    for options in [&[&FUSE[..], &["--read-only"]].concat()[..], &WRITABLE, &FUSE] {
        let mounted = set.mount(&set.at, options);
        let settled = || folders_of_mounts(&set.burgeon) == 1;
        assert!(wait_until(PATIENCE, settled));
        assert_eq!(states(&set.burgeon), ["let go"], "{options:?}");
        assert_same(&set.tree, &set.at);
        set.burgeon.umount(mounted);
        assert_eq!(folders_of_mounts(&set.burgeon), 0);
    }
}

#[test]
fn a_plain_file_that_is_cut_off_is_not_filled_up_with_zeros() {
    let space = Space::new("let-go-short");
    let set = Listed::set_up(&space);
    set.complete();
    let images = fs::read_dir(set.burgeon.state().join("images")).unwrap().flatten();
    let plain = images.map(|image| image.path().join("complete/summed")).find(|path| path.exists());
    let file = fs::File::options().write(true).open(plain.unwrap()).unwrap();
    file.set_len(file.metadata().unwrap().len() - 4096).unwrap();
    drop(file);
    let mounted = set.mount(&set.at, &FUSE);
    assert_eq!(states(&set.burgeon), ["serving"]);
    assert_same(&set.tree, &set.at);
    set.burgeon.umount(mounted);
}
