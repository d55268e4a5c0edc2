//! The attributes of mounts: the builder of an image decides the rights of its files here.

#![allow(clippy::unwrap_used)]

use std::{
    fs::{self, File, Permissions},
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use rustix::fs::{CWD, FileType, Mode, XattrFlags, makedev, mknodat, setxattr};
use rustix::mount::{MountFlags, mount_remount};
use testkit::{Burgeon, Mounted, Space, copy_program, mounts_of};

const PROGRAM: &str = env!("CARGO_BIN_EXE_burgeon");
const LIMIT: [&str; 2] = ["--write-limit", "256M"];

/// `struct vfs_cap_data`, revision 2: CAP_DAC_READ_SEARCH, permitted and effective.
const READS_EVERYTHING: [u8; 20] = [1, 0, 0, 2, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];

/// A tree by which uid 65534 would like to become root: a set-user-ID program, one with a
/// capability, a device, and a secret to read.
fn make_tree(root: &Path) {
    fs::create_dir_all(root).unwrap();
    let program = |name: &str, mode| {
        let path = root.join(name);
        copy_program(&Path::new("/usr/bin").join(name), &path);
        fs::set_permissions(&path, Permissions::from_mode(mode)).unwrap();
        path
    };
    program("id", 0o4755);
    let capable = program("cat", 0o755);
    setxattr(&capable, "security.capability", &READS_EVERYTHING, XattrFlags::empty()).unwrap();
    mknodat(CWD, root.join("null"), FileType::CharacterDevice, Mode::from(0o666), makedev(1, 3))
        .unwrap();
    // The file mode is masked when it is made.
    fs::set_permissions(root.join("null"), Permissions::from_mode(0o666)).unwrap();
    fs::write(root.join("secret"), "secret").unwrap();
    fs::set_permissions(root.join("secret"), Permissions::from_mode(0o600)).unwrap();
    fs::set_permissions(root, Permissions::from_mode(0o755)).unwrap();
}

/// True if uid 65534 can, in the folder `at`: become root, use a capability, open a device.
fn powers(at: &Path) -> [bool; 3] {
    let run = |program: &[&str]| {
        let mut shell = Command::new("sh");
        shell.args(["-c", "exec setpriv --reuid=65534 --regid=65534 --clear-groups \"$@\"", "sh"]);
        // Folders above may be closed to it: its commands use relative paths.
        let output = shell.args(program).current_dir(at).output().unwrap();
        (output.status.success(), String::from_utf8(output.stdout).unwrap())
    };
    let (ran, user) = run(&["./id", "-u"]);
    assert!(ran, "the program can be run at all");
    let [is_root, reads] = [user.trim() == "0", run(&["./cat", "secret"]).1 == "secret"];
    [is_root, reads, run(&["/usr/bin/cat", "null"]).0]
}

/// The options of the mount at `at`, as the kernel has them.
fn options(at: &Path) -> String {
    let mounts = mounts_of("thread-self").unwrap();
    mounts.into_iter().find(|mount| mount.at == at).unwrap().options
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

fn mount(burgeon: &Burgeon, image: &str, at: &Path, more: &[&str]) -> Mounted {
    burgeon.mount(image, at, &[&LIMIT, more].concat())
}

/// Mounts `image` with the options `more`; returns the abilities of uid 65534 there.
fn powers_of(burgeon: &Burgeon, image: &str, at: &Path, more: &[&str]) -> [bool; 3] {
    let mounted = mount(burgeon, image, at, more);
    let powers = powers(at);
    burgeon.umount(mounted);
    powers
}

/// An archive of `tree` and of one file more: an image of the very same files would be the same
/// image.
fn tar(tree: &Path, to: PathBuf) -> PathBuf {
    fs::write(tree.join("of-the-archive"), "").unwrap();
    let mut tar = Command::new("tar");
    tar.args(["--format=pax", "--xattrs", "--xattrs-include=*", "-cf"]);
    assert!(tar.arg(&to).arg("-C").arg(tree).arg(".").status().unwrap().success());
    to
}

#[test]
fn only_what_this_host_built_of_its_own_files_has_powers_by_itself() {
    let space = Space::new("powers");
    let burgeon = Burgeon::new(PROGRAM, &space);
    let (tree, at) = (space.path("tree"), space.path("at"));
    make_tree(&tree);
    burgeon.build(&tree, "own");
    burgeon.ok(&["build", "--by-reference", text(&tree), "referred"]);
    let archive = tar(&tree, space.path("tree.tar"));
    burgeon.build(&archive, "tar");
    let mut piped = burgeon.command(&["build", "-", "piped"]);
    piped.stdin(Stdio::from(File::open(&archive).unwrap()));
    assert!(piped.output().unwrap().status.success());

    assert_eq!(powers(&tree), [true; 3], "the tree itself");
    assert_eq!(powers_of(&burgeon, "own", &at, &[]), [true; 3]);
    assert_eq!(powers_of(&burgeon, "referred", &at, &[]), [true; 3]);
    assert_eq!(powers_of(&burgeon, "own", &at, &["-o", "nosuid"]), [false, false, true]);
    assert_eq!(powers_of(&burgeon, "own", &at, &["-o", "nodev"]), [true, true, false]);
    for image in ["tar", "piped"] {
        assert_eq!(powers_of(&burgeon, image, &at, &[]), [false; 3], "{image}");
        assert_eq!(powers_of(&burgeon, image, &at, &["--suid"]), [true, true, false], "{image}");
        assert_eq!(powers_of(&burgeon, image, &at, &["--suid", "--dev"]), [true; 3], "{image}");
    }
    // An image honours no bits that the mount of its files does not honour.
    let stick = space.small_disk("stick", 16 << 20);
    make_tree(stick.path());
    mount_remount(stick.path(), MountFlags::NOSUID | MountFlags::NODEV, c"").unwrap();
    burgeon.build(stick.path(), "stick");
    assert_eq!(powers_of(&burgeon, "stick", &at, &[]), [false; 3]);
    drop(stick);
}

#[test]
fn a_name_does_not_make_an_image_one_of_this_host() {
    let space = Space::new("elsewhere");
    let there = Burgeon::with_state(PROGRAM, space.path("there"));
    let (tree, at) = (space.path("tree"), space.path("at"));
    make_tree(&tree);
    there.build(&tree, "app");
    let store = there.state().join("store");

    let here = Burgeon::with_state(PROGRAM, space.path("here"));
    let own = space.make_folder("own");
    here.build(&own, "app");
    here.ok(&["pull", "--eager", "app", "--store", text(&store), "--as", "pulled"]);
    assert_eq!(powers_of(&here, "pulled", &at, &[]), [false; 3]);
    let of_store = ["--store", text(&store)];
    assert_eq!(powers_of(&here, "app", &at, &of_store), [false; 3]);
    // Kept writes have the attributes of their image, also when they are found again.
    for _ in 0..2 {
        assert_eq!(powers_of(&here, "pulled", &at, &["--writes", "w"]), [false; 3]);
    }
    // The same bytes, built here: then it is this host's.
    here.build(&tree, "same");
    assert_eq!(powers_of(&here, "pulled", &at, &[]), [true; 3]);
    // A state directory of before there was a record.
    fs::remove_dir_all(there.state().join("built")).unwrap();
    assert_eq!(powers_of(&there, "app", &at, &[]), [false; 3]);
}

#[test]
fn a_mapped_file_has_no_powers_that_its_source_lacks() {
    let space = Space::new("mapped");
    let burgeon = Burgeon::new(PROGRAM, &space);
    let (tree, at) = (space.path("tree"), space.path("at"));
    make_tree(&tree);
    burgeon.build(&tree, "own");
    burgeon.build(&tar(&tree, space.path("tree.tar")), "tar");
    let stick = space.small_disk("stick", 16 << 20);
    make_tree(stick.path());
    mount_remount(stick.path(), MountFlags::NOSUID | MountFlags::NODEV, c"").unwrap();

    let mounted = mount(&burgeon, "own", &at, &["--virtual", "1P"]);
    let map = |name: &str, from: &str| {
        let said = burgeon.ok(&["map", text(&at.join(name)), "--from", from]);
        (powers(&at.join(name)), said)
    };
    assert_eq!(map("own", "own").0, [true; 3]);
    assert_eq!(map("tree", text(&tree)).0, [true; 3]);
    let (powers_of_tar, said) = map("tar", "tar");
    assert_eq!(powers_of_tar, [false; 3]);
    assert!(said.contains("1 program ") && said.contains("1 device "), "{said}");
    assert_eq!(map("stick", text(stick.path())).0, [false; 3]);
    burgeon.ok(&["map", text(&at.join("one")), "--from", "tar:/id"]);
    assert_eq!(fs::metadata(at.join("one")).unwrap().permissions().mode() & 0o7777, 0o755);
    burgeon.umount(mounted);
    drop(stick);
}

#[test]
fn attributes_are_the_kernels_and_outlive_the_daemon() {
    let space = Space::new("options");
    let burgeon = Burgeon::new(PROGRAM, &space);
    let (tree, at) = (space.path("tree"), space.path("at"));
    make_tree(&tree);
    let archive = tar(&tree, space.path("tree.tar"));
    burgeon.build(&archive, "tar");
    let wanted = "noexec,nodiratime,noatime,nosymfollow";
    let mounted = mount(&burgeon, "tar", &at, &["-o", wanted]);
    let expected = "rw,nosuid,nodev,noexec,noatime,nodiratime,nosymfollow";
    assert_eq!(options(&at), expected);
    burgeon.kill_daemon();
    burgeon.ok(&["doctor", "--repair"]);
    assert_eq!(options(&at), expected);
    let attributes = burgeon.status()["mounts"][0]["attributes"].clone();
    assert_eq!(attributes["suid"], false, "{attributes}");
    assert_eq!(attributes["atime"], "noatime", "{attributes}");
    let said = burgeon.ok(&["status"]);
    assert!(said.contains(expected), "{said}");
    burgeon.umount(mounted);

    let mounted = burgeon.mount("tar", &at, &["-o", "ro,strictatime", "--writes", "w"]);
    assert_eq!(options(&at), "ro,nosuid,nodev");
    assert_eq!(fs::write(at.join("new"), "").unwrap_err().raw_os_error(), Some(30));
    burgeon.umount(mounted);
    // Without a place for writes, none is made.
    let mounted = burgeon.mount("tar", &at, &["-o", "ro,suid,dev"]);
    assert_eq!(options(&at), "ro,relatime");
    assert_eq!(burgeon.status()["mounts"][0]["writes"]["kind"], "read-only");
    burgeon.umount(mounted);

    burgeon.fails(&["mount", "tar", text(&at), "-o", "nosiud"], 2, "nosuid");
    burgeon.fails(&["mount", "tar", text(&at), "-o", "nosuid", "--suid"], 1, "contradict");
}
