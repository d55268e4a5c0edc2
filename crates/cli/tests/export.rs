//! `burgeon export`: plain GNU tar and bsdtar make the same tree of it.

#![allow(clippy::unwrap_used)]

use std::{
    fs::{self, File},
    io::Read,
    os::unix::fs::{MetadataExt, PermissionsExt, symlink},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::Duration,
};

use rustix::{
    fs::{CWD, FileType, Mode, Timespec, Timestamps, UTIME_NOW, mknodat, utimensat},
    process::{Pid, Signal, kill_process},
};
use testkit::{Burgeon, Space, Torture, TortureSize, compare, mounts_of};

const PROGRAM: &str = env!("CARGO_BIN_EXE_burgeon");
const LIMIT: [&str; 2] = ["--write-limit", "256M"];

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// Unpacks `archive` with GNU tar into a new folder.
fn unpack(space: &Space, archive: &Path, name: &str) -> PathBuf {
    let to = space.make_folder(name);
    let mut tar = Command::new("tar");
    // Of the tree's times GNU tar finds some implausible, and it knows no `hdrcharset`.
    tar.args(["--xattrs", "--xattrs-include=*", "--acls", "--same-owner"]);
    tar.args(["--warning=no-timestamp", "--warning=no-unknown-keyword", "-xpf"]);
    let output = tar.arg(archive).arg("-C").arg(&to).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && said.is_empty(), "{}", &said[..said.len().min(1000)]);
    to
}

/// Names in `folder` that begin with a dot.
fn hidden(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    entries.filter(|path| path.file_name().unwrap().to_str().unwrap().starts_with('.')).collect()
}

#[test]
fn gnu_tar_and_bsdtar_make_the_same_tree() {
    let space = Space::new("export");
    let burgeon = Burgeon::new(PROGRAM, &space);
    let tree = space.path("tree");
    Torture::make(&tree, 22, TortureSize::Small).unwrap();
    burgeon.build(&tree, "tree");
    let at = space.path("at");
    let mounted = burgeon.mount("tree", &at, &LIMIT);
    // Written data, beside the image's.
    fs::write(at.join("new"), vec![7; 3_000_000]).unwrap();
    let before_1970 = Timespec { tv_sec: -2, tv_nsec: 250_000_000 };
    let times = Timestamps { last_access: before_1970, last_modification: before_1970 };
    utimensat(CWD, at.join("new"), &times, rustix::fs::AtFlags::empty()).unwrap();
    rustix::fs::chownat(
        CWD,
        at.join("new"),
        Some(rustix::fs::Uid::from_raw(4_000_000_000)),
        Some(rustix::fs::Gid::from_raw(2_097_152)),
        rustix::fs::AtFlags::empty(),
    )
    .unwrap();
    // GNU tar escapes these in the keyword.
    let odd = "user.a=b%2%3D";
    rustix::fs::setxattr(at.join("new"), odd, b"x", rustix::fs::XattrFlags::empty()).unwrap();
    // A mount below, which hides a folder with a file.
    fs::create_dir(at.join("covered")).unwrap();
    fs::write(at.join("covered/file"), "covered").unwrap();
    let below = space.small_disk("at/covered", 1 << 20);
    fs::write(below.path().join("foreign"), "").unwrap();

    let archive = space.path("tree.tar");
    let finished = burgeon.run(&["export", text(&at), "-o", text(&archive)]);
    assert_eq!(finished.code, Some(0), "{finished:?}");
    assert!(finished.stderr.contains("socket"), "{finished:?}");
    assert_eq!(fs::metadata(&archive).unwrap().permissions().mode() & 0o7777, 0o600);
    drop(below);
    // The only thing that an archive cannot hold.
    fs::remove_file(at.join("special/socket")).unwrap();
    utimensat(CWD, at.join("special"), &modified(&tree.join("special")), no_flags()).unwrap();

    let unpacked = unpack(&space, &archive, "unpacked");
    compare(&at, &unpacked).unwrap().assert_same();
    assert_eq!(fs::metadata(unpacked.join("new")).unwrap().mtime_nsec(), 250_000_000);
    assert_eq!(fs::metadata(unpacked.join("new")).unwrap().uid(), 4_000_000_000);
    assert_eq!(fs::read(unpacked.join("covered/file")).unwrap(), b"covered");

    let with_bsdtar = space.make_folder("with-bsdtar");
    let mut bsdtar = Command::new("bsdtar");
    bsdtar
        .env("LC_ALL", "C.UTF-8")
        .args(["--xattrs", "--acls", "--same-owner", "--numeric-owner", "-xpf"])
        .arg(&archive);
    let output = bsdtar.arg("-C").arg(&with_bsdtar).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    // bsdtar takes the fraction of a time before 1970 for its opposite, and knows no escapes.
    let mut compared = compare(&at, &with_bsdtar).unwrap();
    compared.first.retain(|line| {
        !["mtime is -", "xattr \"user.a"].iter().any(|known| line.contains(known))
            && !line.starts_with(".: mtime")
    });
    assert!(compared.entries > 0 && compared.first.is_empty(), "{compared}");

    // The same bytes on standard output, and Burgeon reads its own archives.
    let mut export = burgeon.command(&["export", text(&at)]);
    let output = export.output().unwrap();
    assert!(output.status.success(), "{:?}", String::from_utf8_lossy(&output.stderr));
    let piped = space.path("piped.tar");
    fs::write(&piped, output.stdout).unwrap();
    compare(&at, &unpack(&space, &piped, "piped")).unwrap().assert_same();
    burgeon.umount(mounted);
    burgeon.build(&piped, "again");
    let mounted = burgeon.mount("again", &at, &["--read-only"]);
    let mut value = [0; 8];
    assert_eq!(rustix::fs::getxattr(at.join("new"), odd, &mut value), Ok(1));
    burgeon.umount(mounted);
}

fn no_flags() -> rustix::fs::AtFlags {
    rustix::fs::AtFlags::empty()
}

fn modified(path: &Path) -> Timestamps {
    let metadata = fs::metadata(path).unwrap();
    let now = Timespec { tv_sec: 0, tv_nsec: UTIME_NOW };
    let modified = Timespec { tv_sec: metadata.mtime(), tv_nsec: metadata.mtime_nsec() };
    Timestamps { last_access: now, last_modification: modified }
}

#[test]
fn kept_writes_are_exported_and_mounted_nowhere() {
    let space = Space::new("export-writes");
    let burgeon = Burgeon::new(PROGRAM, &space);
    let (tree, at) = (space.make_folder("tree"), space.path("at"));
    fs::write(tree.join("file"), "of the image").unwrap();
    burgeon.build(&tree, "image");
    let mounted = burgeon.mount("image", &at, &["--writes", "w", "--write-limit", "256M"]);
    fs::write(at.join("new"), "kept").unwrap();
    symlink("/etc/passwd", at.join("outside")).unwrap();
    let archive = space.path("w.tar");
    let export = ["export", "--writes", "w", "-o", text(&archive)];
    burgeon.fails(&export, 5, &format!("at {}", at.display()));
    assert!(!archive.exists());
    burgeon.umount(mounted);
    let before = mounts_of("thread-self").unwrap();
    for _ in 0..2 {
        let told = burgeon.ok(&[&["--json"], &export[..]].concat());
        let told: serde_json::Value = serde_json::from_str(&told).unwrap();
        assert_eq!((&told["entries"], &told["changed"]), (&4.into(), &serde_json::json!([])));
        assert_eq!(told["bytes"], fs::metadata(&archive).unwrap().len());
    }
    assert_eq!(mounts_of("thread-self").unwrap().len(), before.len());
    assert!(burgeon.status()["mounts"].as_array().unwrap().is_empty());
    let unpacked = unpack(&space, &archive, "unpacked");
    assert_eq!(fs::read_to_string(unpacked.join("new")).unwrap(), "kept");
    assert_eq!(fs::read_to_string(unpacked.join("file")).unwrap(), "of the image");
    assert_eq!(fs::read_link(unpacked.join("outside")).unwrap(), Path::new("/etc/passwd"));
    // They are as they were.
    let mounted = burgeon.mount("image", &at, &["--writes", "w"]);
    compare(&at, &unpacked).unwrap().assert_same();
    burgeon.umount(mounted);
}

/// A mount whose daemon has died is served again for it.
#[test]
fn a_mount_without_a_daemon_is_exported() {
    let space = Space::new("export-lost");
    let burgeon = Burgeon::new(PROGRAM, &space);
    let tree = space.path("tree");
    fs::create_dir(&tree).unwrap();
    fs::write(tree.join("a"), vec![7; 3_000_000]).unwrap();
    burgeon.build(&tree, "tree");
    let at = space.path("at");
    let mounted = burgeon.mount("tree", &at, &LIMIT);
    burgeon.kill_daemon();
    let archive = space.path("tree.tar");
    burgeon.ok(&["export", text(&at), "-o", text(&archive)]);
    compare(&tree, &unpack(&space, &archive, "unpacked")).unwrap().assert_same();
    burgeon.umount(mounted);
}

#[test]
fn mistakes_are_named() {
    let space = Space::new("export-mistakes");
    let burgeon = Burgeon::new(PROGRAM, &space);
    let tree = space.make_folder("tree");
    fs::write(tree.join("file"), "content").unwrap();
    burgeon.build(&tree, "image");
    let at = space.path("at");
    let mounted = burgeon.mount("image", &at, &["--read-only"]);
    let archive = space.path("a.tar");
    let (at, archive_text) = (text(&at), text(&archive));
    burgeon.fails(&["export"], 2, "--writes");
    burgeon.fails(&["export", at, "--writes", "w"], 2, "cannot be used with");
    burgeon.fails(&["export", at, "--format", "zip"], 2, "zip");
    burgeon.fails(&["export", "--json", at], 2, "-o FILE");
    burgeon.fails(&["export", "--writes", "none", "-o", archive_text], 3, "no writes \"none\"");
    burgeon.fails(&["export", text(&tree), "-o", archive_text], 3, "in no mount of Burgeon");
    burgeon.fails(&["export", text(&space.path("x")), "-o", archive_text], 3, "nothing is there");
    burgeon.fails(&["export", &format!("{at}/file"), "-o", archive_text], 1, "not a directory");
    burgeon.fails(&["export", at, "-o", text(&tree)], 1, "it is a directory");
    burgeon.fails(&["export", at, "-o", "/dev/null"], 1, "not a regular file");
    burgeon.fails(&["export", at, "-o", text(&space.path("no/a.tar"))], 3, "cannot write");
    assert!(!archive.exists());
    // A terminal, which `script` gives, and an output that is closed.
    let mut command = burgeon.command(&["export", at]);
    let program = command.get_program().to_owned();
    let line: Vec<_> = std::iter::once(program.as_os_str())
        .chain(command.get_args())
        .map(|word| format!("'{}'", word.to_str().unwrap()))
        .collect();
    let closed = format!("exec {} >&-", line.join(" "));
    let output = Command::new("sh").args(["-c", &closed]).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.code() == Some(2) && said.contains("is closed"), "{output:?}");
    let script = ["-qec", &line.join(" "), "/dev/null"];
    let output = Command::new("script").args(script).stdin(Stdio::null()).output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.code() == Some(2) && said.contains("terminal"), "{output:?}");
    // A reader that stops.
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    drop(command.spawn().unwrap().wait_with_output());
    // An earlier archive is replaced, also through a symlink, and not by half of a new one.
    fs::write(&archive, "old").unwrap();
    symlink(&archive, space.path("link.tar")).unwrap();
    burgeon.ok(&["export", at, "-o", text(&space.path("link.tar"))]);
    assert!(fs::symlink_metadata(space.path("link.tar")).unwrap().is_symlink());
    assert!(fs::metadata(&archive).unwrap().len() > 1024);
    assert!(hidden(space.folder()).is_empty());
    burgeon.umount(mounted);
}

/// A tree of 64 MiB.
fn large(space: &Space, burgeon: &Burgeon) {
    let tree = space.make_folder("large");
    for number in 0..16 {
        let bytes = testkit::Rng::new(number).bytes(4 << 20);
        fs::write(tree.join(number.to_string()), bytes).unwrap();
    }
    burgeon.build(&tree, "large");
}

#[test]
fn a_full_disk_and_a_kill_leave_no_half_archive() {
    let space = Space::new("export-full");
    let burgeon = Burgeon::new(PROGRAM, &space);
    large(&space, &burgeon);
    let at = space.path("at");
    let mounted = burgeon.mount("large", &at, &["--read-only"]);
    let disk = space.small_disk("disk", 16 << 20);
    let archive = disk.path().join("a.tar");
    burgeon.fails(&["export", text(&at), "-o", text(&archive)], 6, "No space left");
    assert_eq!(fs::read_dir(disk.path()).unwrap().count(), 0);
    // Standard output on a full disk.
    let mut export = burgeon.command(&["export", text(&at)]);
    let output = export.stdout(File::create(&archive).unwrap()).output().unwrap();
    assert_eq!(output.status.code(), Some(6), "{output:?}");
    drop(disk);

    // Killed while it waits for a source that does not answer: the daemon stands still.
    let archive = space.path("killed.tar");
    let status = burgeon.status();
    let pids = ["supervisor_pid", "server_pid"].map(|name| status[name].as_i64().unwrap());
    let pids = pids.map(|id| Pid::from_raw(i32::try_from(id).unwrap()).unwrap());
    pids.iter().for_each(|pid| kill_process(*pid, Signal::STOP).unwrap());
    fs::write("/proc/sys/vm/drop_caches", "3").unwrap();
    for signal in [Signal::TERM, Signal::KILL] {
        let mut export =
            burgeon.command(&["export", text(&at), "-o", text(&archive)]).spawn().unwrap();
        std::thread::sleep(Duration::from_millis(500));
        assert!(export.try_wait().unwrap().is_none(), "it does not wait for its source");
        kill_process(Pid::from_child(&export), signal).unwrap();
        pids.iter().for_each(|pid| kill_process(*pid, Signal::CONT).unwrap());
        export.wait().unwrap();
        assert!(!archive.exists());
        assert!(hidden(space.folder()).is_empty());
        pids.iter().for_each(|pid| kill_process(*pid, Signal::STOP).unwrap());
        fs::write("/proc/sys/vm/drop_caches", "3").unwrap();
    }
    pids.iter().for_each(|pid| kill_process(*pid, Signal::CONT).unwrap());
    burgeon.umount(mounted);
}

#[test]
fn files_that_change_are_named_and_the_archive_stays_readable() {
    let space = Space::new("export-changed");
    let burgeon = Burgeon::new(PROGRAM, &space);
    large(&space, &burgeon);
    let at = space.path("at");
    let mounted = burgeon.mount("large", &at, &LIMIT);
    mknodat(CWD, at.join("fifo"), FileType::Fifo, Mode::from(0o644), 0).unwrap();
    // The export waits for its reader in the midst of a file.
    let mut export = burgeon.command(&["export", text(&at)]);
    export.stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = export.spawn().unwrap();
    let mut pipe = child.stdout.take().unwrap();
    let mut bytes = vec![0; 1 << 20];
    pipe.read_exact(&mut bytes).unwrap();
    let mut archive = tar::Archive::new(bytes.as_slice());
    let mut entries = archive.entries().unwrap().map(|entry| entry.unwrap());
    let present = entries.find(|entry| entry.header().entry_type().is_file()).unwrap();
    let present = present.path().unwrap().into_owned();
    File::options().write(true).open(at.join(&present)).unwrap().set_len(5).unwrap();
    let removed = ["8", "9"].into_iter().find(|name| Path::new(name) != present).unwrap();
    fs::remove_file(at.join(removed)).unwrap();
    pipe.read_to_end(&mut bytes).unwrap();
    let output = child.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains(&format!("{} changed while it was read", present.display())), "{said}");
    let archive = space.path("a.tar");
    fs::write(&archive, &bytes).unwrap();
    let unpacked = unpack(&space, &archive, "unpacked");
    // As long as its header says, whatever became of it.
    assert_eq!(fs::metadata(unpacked.join(&present)).unwrap().len(), 4 << 20);
    assert!(unpacked.join("fifo").exists());
    assert!(said.contains(&format!("{removed} was removed")) || unpacked.join(removed).exists());
    burgeon.umount(mounted);
}
