//! Impossible requests are refused with a sentence that says why; nothing is lost or left over.

// Helpers outside test functions are tests, too.
#![allow(clippy::unwrap_used)]

use std::{
    ffi::OsStr,
    fs,
    os::unix::ffi::OsStrExt,
    path::{Path, PathBuf},
    process::Command,
};

use rustix::mount::MountFlags;
use testkit::{Burgeon, Mounted, Space, bind_mount, copy_program};

const BURGEON: &str = env!("CARGO_BIN_EXE_burgeon");
const LIMIT: [&str; 2] = ["--write-limit", "300M"];

// The exit codes that `burgeon --help` documents.
const FAILED: i32 = 1;
const USAGE: i32 = 2;
const NOT_FOUND: i32 = 3;
const DAMAGED: i32 = 4;
const UNUSABLE: i32 = 5;
const NO_SPACE: i32 = 6;
const NOT_PERMITTED: i32 = 7;

/// An installation with one small image, `image:1`.
struct Installation {
    burgeon: Burgeon,
    space: Space,
    tree: PathBuf,
}

impl Installation {
    fn new(label: &str) -> Self {
        let space = Space::new(label);
        let burgeon = Burgeon::new(BURGEON, &space);
        let tree = small_tree(&space);
        burgeon.build(&tree, "image:1");
        Self { burgeon, space, tree }
    }

    /// `mount image:1 AT OPTIONS` must fail.
    #[track_caller]
    fn refuses(&self, at: &Path, options: &[&str], code: i32, message: &str) {
        let at = at.to_str().unwrap();
        let arguments = [&["mount", "image:1", at][..], options].concat();
        self.burgeon.fails(&arguments, code, message);
    }

    /// And the same still works where nothing is wrong.
    #[track_caller]
    fn still_mounts(&self) {
        let mounted = self.burgeon.mount("image:1", &self.space.path("sound"), &LIMIT);
        assert_eq!(fs::read_to_string(mounted.path().join("file")).unwrap(), "content");
        self.burgeon.umount(mounted);
    }
}

fn small_tree(space: &Space) -> PathBuf {
    let tree = space.make_folder("tree");
    fs::write(tree.join("file"), "content").unwrap();
    fs::write(tree.join("larger"), "content ".repeat(10_000)).unwrap();
    tree
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

#[test]
fn a_bad_mount_point() {
    let at = Installation::new("mount-point");
    let space = &at.space;
    at.refuses(&space.path("missing"), &[], NOT_FOUND, "mkdir");
    at.refuses(&at.tree.join("file"), &[], FAILED, "not a directory");
    at.refuses(&at.tree, &[], FAILED, "not empty");
    let disk = space.small_disk("disk", 1 << 20);
    at.refuses(disk.path(), &[], UNUSABLE, "mounted there already");
    let mounted = at.burgeon.mount("image:1", &space.path("at"), &LIMIT);
    at.refuses(mounted.path(), &LIMIT, UNUSABLE, "mounted there already");
    at.burgeon.umount(mounted);
    // Of two mounts there, one would hide the other's files.
    let taken = fs::File::open(space.path("at")).unwrap();
    taken.lock().unwrap();
    at.refuses(&space.path("at"), &LIMIT, UNUSABLE, "locked it");
    drop(taken);
    at.still_mounts();
}

#[test]
fn limits_of_the_shell_that_starts_the_daemon() {
    let at = Installation::new("limits");
    let point = at.space.make_folder("at");
    let mount = at.burgeon.command(&["mount", "image:1", text(&point), LIMIT[0], LIMIT[1]]);
    // Blocks of 512 or 1024 bytes: large enough for a log, and for nothing that is mounted.
    let limited = |limit: &str| {
        let mut shell = Command::new("sh");
        shell.args(["-c", &format!("ulimit {limit}; exec \"$@\""), "sh"]);
        shell.arg(mount.get_program()).args(mount.get_args()).output().unwrap()
    };
    let output = limited("-f 1000");
    assert_eq!(output.status.code(), Some(FAILED), "{output:?}");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(said.contains("File too large"), "{said}");
    at.burgeon.ok(&["shutdown"]);
    let output = limited("-S -n 16");
    assert!(output.status.success(), "{output:?}");
    at.burgeon.ok(&["umount", text(&point)]);
}

#[test]
fn doctor_sees_where_nothing_can_be_mounted() {
    let at = Installation::new("doctor");
    let state = at.burgeon.state();
    let command = at.burgeon.command(&["doctor"]);
    let inside = |options: &[&str]| {
        let mut unshare = Command::new("unshare");
        unshare.args(options).arg(command.get_program()).args(command.get_args());
        String::from_utf8(unshare.output().unwrap().stdout).unwrap()
    };
    let said = inside(&["--user", "--map-root-user"]);
    assert!(said.contains("warning  privileges: CAP_SYS_ADMIN is that of a user"), "{said}");
    let read_only = bind_mount(state, state);
    let flags = MountFlags::BIND | MountFlags::RDONLY;
    rustix::mount::mount_remount(state, flags, c"").unwrap();
    let finished = at.burgeon.run(&["doctor"]);
    drop(read_only);
    assert_eq!(finished.code, Some(FAILED), "{finished:?}");
    assert!(finished.stdout.contains("its file system is read-only"), "{finished:?}");
    at.burgeon.ok(&["doctor"]);
}

#[test]
fn paths_that_no_message_can_hold() {
    let at = Installation::new("no-text");
    let odd = at.space.folder().join(OsStr::from_bytes(b"odd\xff"));
    fs::create_dir(&odd).unwrap();
    let mount = [OsStr::new("mount"), OsStr::new("image:1"), odd.as_os_str()];
    at.burgeon.fails(&mount, FAILED, "its name is not UTF-8");
    let other = Burgeon::before_state(BURGEON, odd.join("state"));
    other.fails(&["list"], FAILED, "the state directory");
    assert!(!odd.join("state").exists());
    at.still_mounts();
}

#[test]
fn a_place_that_is_no_name_of_an_image() {
    let at = Installation::new("place");
    for place in ["oci://registry.example/app:7", "s3://bucket/app", "oci-layout:folder:7"] {
        at.burgeon.fails(&["build", text(&at.tree), place], FAILED, "burgeon push");
    }
    assert_eq!(at.burgeon.ok(&["list"]).lines().count(), 2);
}

#[test]
fn an_image_that_is_not_there() {
    let at = Installation::new("no-image");
    let point = at.space.make_folder("at");
    for arguments in [
        &["mount", "imag:1", text(&point)][..],
        &["inspect", "imag:1"],
        &["verify", "imag:1"],
        &["rm", "imag:1"],
    ] {
        at.burgeon.fails(arguments, NOT_FOUND, "image:1");
    }
    at.burgeon.fails(&["writes", "rm", "none"], NOT_FOUND, "none");
    at.still_mounts();
}

#[test]
fn a_command_line_without_sense() {
    let at = Installation::new("usage");
    for arguments in [
        &["mount", "image:1"][..],
        &["mount", "image:1", "/x", "--read-only", "--writes", "w"],
        &["mount", "image:1", "/x", "--write-limit", "many"],
        &["build", "/x"],
        &["explode"],
        &[],
    ] {
        let finished = at.burgeon.run(arguments);
        assert_eq!(finished.code, Some(USAGE), "{arguments:?}: {finished:#?}");
        assert!(finished.stderr.contains("--help"), "{arguments:?}: {finished:#?}");
    }
}

#[test]
fn without_the_privilege_to_mount() {
    let at = Installation::new("privilege");
    let point = at.space.make_folder("at");
    let command = at.burgeon.command(&["mount", "image:1", text(&point)]);
    let output = Command::new("setpriv")
        .args(["--bounding-set=-sys_admin", "--inh-caps=-sys_admin"])
        .arg(command.get_program())
        .args(command.get_args())
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(NOT_PERMITTED), "{output:?}");
    assert!(said.contains("CAP_SYS_ADMIN"), "{said}");
    at.still_mounts();
}

#[test]
fn building_inspecting_and_verifying_need_no_privilege() {
    let space = Space::new("no-privilege");
    let burgeon = Burgeon::new(BURGEON, &space);
    let tree = small_tree(&space);
    for arguments in [
        &["build", text(&tree), "image:1"][..],
        &["inspect", "image:1", "--map"],
        &["verify", "image:1"],
        &["list"],
    ] {
        let command = burgeon.command(arguments);
        let output = Command::new("setpriv")
            .args(["--bounding-set=-all", "--inh-caps=-all"])
            .arg(command.get_program())
            .args(command.get_args())
            .output()
            .unwrap();
        assert!(output.status.success(), "{arguments:?}: {output:?}");
    }
}

#[test]
fn another_users_state_directory() {
    let at = Installation::new("anothers");
    // Below folders that everybody may enter: only the state directory itself is denied.
    let folder = tempfile::tempdir().unwrap();
    fs::set_permissions(folder.path(), std::os::unix::fs::PermissionsExt::from_mode(0o755))
        .unwrap();
    let program = folder.path().join("burgeon");
    copy_program(Path::new(BURGEON), &program);
    let state = folder.path().join("state");
    fs::create_dir(&state).unwrap();
    fs::set_permissions(&state, std::os::unix::fs::PermissionsExt::from_mode(0o700)).unwrap();
    let new = folder.path().join("new");
    for (state, verb) in [
        (&state, &["list", "--json"][..]),
        (&state.join("deeper"), &["list", "--json"]),
        (&new, &["build", "/etc", "x"]),
    ] {
        let output = Command::new("setpriv")
            .args(["--reuid=65534", "--regid=65534", "--clear-groups", "--inh-caps=-all"])
            .arg(&program)
            .args(verb)
            .args(["--state-dir", text(state)])
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(NOT_PERMITTED), "{state:?}: {output:?}");
        assert!(said.contains("CAP_DAC_OVERRIDE") && said.contains("--state-dir"), "{said}");
    }
    at.still_mounts();
}

#[test]
fn a_store_or_a_manifest_that_is_not_there() {
    let at = Installation::new("no-store");
    let (typo, point) = (at.space.path("typo"), at.space.make_folder("at"));
    for arguments in [
        &["list"][..],
        &["inspect", "image:1"],
        &["verify", "image:1"],
        &["mount", "image:1", text(&point)],
        &["gc"],
        &["doctor"],
    ] {
        let arguments = [&["--store", text(&typo)], arguments].concat();
        let finished = at.burgeon.run(&arguments);
        let expected = if arguments.contains(&"doctor") { 0 } else { NOT_FOUND };
        assert_eq!(finished.code, Some(expected), "{arguments:?}: {finished:#?}");
        assert!(!typo.exists(), "{arguments:?} made the folder");
    }
    let manifests = at.burgeon.state().join("store/manifests");
    let manifest = fs::read_dir(&manifests).unwrap().next().unwrap().unwrap().path();
    let hidden = at.space.path("hidden");
    fs::rename(&manifest, &hidden).unwrap();
    for verb in ["inspect", "verify"] {
        at.burgeon.fails(&[verb, "image:1"], NOT_FOUND, "build the image again");
    }
    at.refuses(&point, &LIMIT, NOT_FOUND, "build the image again");
    fs::rename(&hidden, &manifest).unwrap();
    at.still_mounts();
}

#[test]
fn a_copy_of_writes_that_are_mounted() {
    let at = Installation::new("copy");
    let options = [&LIMIT[..], &["--writes", "w"]].concat();
    let mounted = at.burgeon.mount("image:1", &at.space.path("at"), &options);
    fs::write(mounted.path().join("new"), "kept").unwrap();
    at.burgeon.umount(mounted);
    at.burgeon.ok(&["shutdown"]);
    let copy = at.space.path("copy");
    let copied = Command::new("cp")
        .args(["-a", "--sparse=always"])
        .args([at.burgeon.state(), &copy])
        .status();
    assert!(copied.unwrap().success());
    let other = Burgeon::with_state(BURGEON, copy);
    let mounted = at.burgeon.mount("image:1", &at.space.path("at"), &options);
    let point = at.space.make_folder("point");
    let again = ["mount", "image:1", text(&point), "--writes", "w"];
    other.fails(&again, UNUSABLE, "are a copy");
    at.burgeon.umount(mounted);
    let mounted = other.mount("image:1", &point, &["--writes", "w"]);
    assert_eq!(fs::read_to_string(point.join("new")).unwrap(), "kept");
    other.umount(mounted);
    drop(other);
    at.still_mounts();
}

#[test]
fn no_loop_device() {
    let at = Installation::new("no-loop");
    // The daemon, which the first mount starts, sees the files that its starter sees.
    let hidden: Mounted = bind_mount(Path::new("/dev/null"), Path::new("/dev/loop-control"));
    let point = at.space.make_folder("at");
    let finished = at.burgeon.run(&["mount", "image:1", text(&point)]);
    drop(hidden);
    assert!(finished.code != Some(0) && finished.stderr.contains("loop"), "{finished:#?}");
    at.burgeon.ok(&["shutdown"]);
    at.still_mounts();
}

#[test]
fn a_full_state_directory() {
    let space = Space::new("full-state");
    let disk = space.small_disk("disk", 64 << 20);
    let store = space.path("store");
    let tree = small_tree(&space);
    let state = disk.path().join("state");
    let burgeon = Burgeon::with_state(BURGEON, state).option("--store").option(&store);
    burgeon.build(&tree, "image:1");
    let point = space.make_folder("at");
    // Not enough for the writes that are asked for: said before anything is mounted.
    burgeon.fails(
        &["mount", "image:1", text(&point), "--write-limit", "300M"],
        NO_SPACE,
        "cannot reserve 256 MiB for writes",
    );
    // Nothing left at all.
    let hog = disk.path().join("hog");
    let _ = fs::write(&hog, vec![1; 64 << 20]);
    burgeon.fails(&["mount", "image:1", text(&point), "--read-only"], NO_SPACE, "space");
    fs::remove_file(&hog).unwrap();
    let mounted = burgeon.mount("image:1", &point, &["--read-only"]);
    burgeon.umount(mounted);
    drop(burgeon);
}

#[test]
fn a_state_directory_or_store_on_a_mount_of_burgeon() {
    let at = Installation::new("on-itself");
    let mounted = at.burgeon.mount("image:1", &at.space.path("at"), &LIMIT);
    let state = mounted.path().join("state");
    let point = at.space.make_folder("point");
    let inner = Burgeon::with_state(BURGEON, state);
    inner.fails(&["mount", "image:1", text(&point)], FAILED, "Burgeon mount");
    drop(inner);
    let store = mounted.path().join("store");
    let other = Burgeon::with_state(BURGEON, at.space.path("other-state"));
    let other = other.option("--store").option(&store);
    let built = other.run(&["build", text(&at.tree), "image:1"]);
    assert!(
        built.code != Some(0) || {
            let finished = other.run(&["mount", "image:1", text(&point)]);
            finished.code == Some(FAILED) && finished.stderr.contains("Burgeon mount")
        }
    );
    drop(other);
    at.burgeon.umount(mounted);
    at.still_mounts();
}

#[test]
fn writes_in_use_or_of_another_image() {
    let at = Installation::new("writes-in-use");
    let named = ["--writes", "mine", "--write-limit", "300M"];
    let mounted = at.burgeon.mount("image:1", &at.space.path("at"), &named);
    let second = at.space.make_folder("second");
    at.refuses(&second, &named, UNUSABLE, "mine");
    at.burgeon.fails(&["writes", "rm", "mine"], UNUSABLE, "mine");
    at.burgeon.fails(&["shutdown"], UNUSABLE, "mounted");
    at.burgeon.umount(mounted);
    fs::write(at.tree.join("file"), "another").unwrap();
    at.burgeon.build(&at.tree, "image:2");
    let arguments = ["mount", "image:2", text(&second), "--writes", "mine"];
    at.burgeon.fails(&arguments, FAILED, "mine");
    for name in ["", "..", "a/b"] {
        let arguments = ["mount", "image:1", text(&second), "--writes", name];
        let finished = at.burgeon.run(&arguments);
        assert_eq!(finished.code, Some(2), "{name:?} is not a name for writes: {finished:#?}");
    }
    at.still_mounts();
}

#[test]
fn a_second_daemon_on_one_state_directory() {
    let at = Installation::new("two-daemons");
    let mounted = at.burgeon.mount("image:1", &at.space.path("at"), &LIMIT);
    let second = Command::new(BURGEON).arg("__supervise").arg(at.burgeon.state()).output().unwrap();
    assert_eq!(String::from_utf8_lossy(&second.stdout).trim(), "taken", "{second:?}");
    assert_eq!(fs::read_to_string(mounted.path().join("file")).unwrap(), "content");
    at.burgeon.umount(mounted);
}

#[test]
fn umount_of_something_else_or_in_use() {
    let at = Installation::new("umount");
    let disk = at.space.small_disk("disk", 1 << 20);
    at.burgeon.fails(&["umount", text(disk.path())], NOT_FOUND, "not a mount of this Burgeon");
    at.burgeon.fails(&["umount", "/no/such/place"], NOT_FOUND, "/no/such/place");
    let mounted = at.burgeon.mount("image:1", &at.space.path("at"), &LIMIT);
    let file = fs::File::open(mounted.path().join("file")).unwrap();
    let own = std::process::id().to_string();
    at.burgeon.fails(&["umount", text(mounted.path())], UNUSABLE, &own);
    drop(file);
    at.burgeon.umount(mounted);
}

#[test]
fn a_plain_umount_releases_everything() {
    let at = Installation::new("plain-umount");
    // Other tests' devices come and go meanwhile.
    let own_loop = |l: &testkit::LoopDevice| l.backing.starts_with(at.burgeon.state());
    let attached = || testkit::loop_devices().iter().any(own_loop);
    let mounted = at.burgeon.mount("image:1", &at.space.path("at"), &LIMIT);
    assert!(attached());
    let done = Command::new("umount").arg(mounted.path()).status().unwrap();
    assert!(done.success());
    let gone = testkit::wait_until(testkit::PATIENCE, || {
        at.burgeon.status()["mounts"].as_array().is_some_and(Vec::is_empty) && !attached()
    });
    assert!(gone, "{}", at.burgeon.status());
    at.still_mounts();
}

#[test]
fn trees_and_archives_that_make_no_image() {
    let at = Installation::new("no-tree");
    let space = &at.space;
    at.burgeon.fails(&["build", text(&space.path("none")), "x"], NOT_FOUND, "none");
    at.burgeon.fails(&["build", text(&at.tree.join("file")), "x"], DAMAGED, "tree/file");
    let archive = space.path("cut.tar");
    let tar =
        Command::new("tar").arg("-cf").arg(&archive).arg("-C").arg(&at.tree).arg(".").status();
    assert!(tar.unwrap().success());
    let whole = fs::read(&archive).unwrap();
    fs::write(&archive, &whole[..30_000]).unwrap();
    let cut = at.burgeon.run(&["build", text(&archive), "x"]);
    assert!(cut.code != Some(0) && cut.stderr.contains("cut.tar"), "{cut:#?}");
    for name in ["../escape", "/absolute"] {
        let archive = space.path("bad.tar");
        let mut tar = Command::new("tar");
        tar.args(["-P", "-cf"]).arg(&archive).arg("-C").arg(&at.tree);
        tar.arg(format!("--transform=s|file|{name}|")).arg("file");
        assert!(tar.status().unwrap().success());
        let built = at.burgeon.run(&["build", text(&archive), "bad"]);
        if built.code == Some(0) {
            // A leading slash may be dropped, as tar does; nothing may leave the tree.
            let mounted = at.burgeon.mount("bad", &space.path("at"), &["--read-only"]);
            assert!(mounted.path().join("absolute").exists(), "{name}");
            at.burgeon.umount(mounted);
        } else {
            assert!(
                built.stderr.contains("escape") || built.stderr.contains("absolute"),
                "{built:#?}"
            );
        }
    }
    for name in ["", "a\nb"] {
        let built = at.burgeon.run(&["build", text(&at.tree), name]);
        assert!(built.code != Some(0), "{name:?} is not a name for an image: {built:#?}");
    }
    assert!(!at.burgeon.ok(&["list"]).contains('x'), "nothing of it is visible");
    at.still_mounts();
}

#[test]
fn a_build_killed_half_way_leaves_nothing_that_gc_cannot_remove() {
    let at = Installation::new("killed-build");
    let big = at.space.make_folder("big");
    for seed in 0..40 {
        testkit::Pattern { seed, blocks: 1024 }.write(&big.join(seed.to_string())).unwrap();
    }
    let store = at.burgeon.state().join("store");
    for pause_ms in [50, 150, 300] {
        let mut build = at.burgeon.command(&["build", text(&big), "big"]).spawn().unwrap();
        std::thread::sleep(std::time::Duration::from_millis(pause_ms));
        build.kill().unwrap();
        let ended = build.wait().unwrap();
        // The kill may come after the image was published: then it is all there.
        if !ended.success() && at.burgeon.ok(&["list"]).contains("big") {
            at.burgeon.ok(&["verify", "big"]);
            at.burgeon.ok(&["rm", "big"]);
        }
    }
    // Killed while it wrote: nothing locks its leftovers.
    fs::create_dir(store.join("tmp/1-1-dead")).unwrap();
    fs::write(store.join("tmp/1-1-dead/scratch"), vec![1; 300_000]).unwrap();
    let findings = at.burgeon.ok(&["doctor"]);
    assert!(findings.contains("killed builds"), "{findings}");
    at.burgeon.ok(&["doctor", "--repair", "--dry-run"]);
    assert!(store.join("tmp/1-1-dead").exists());
    let findings = at.burgeon.ok(&["doctor", "--repair"]);
    assert!(findings.contains("repaired  killed builds"), "{findings}");
    assert_eq!(fs::read_dir(store.join("tmp")).unwrap().count(), 0);
    let _ = at.burgeon.run(&["rm", "big"]);
    at.burgeon.ok(&["gc"]);
    let left = size(&store);
    assert!(left < 1 << 20, "{left} bytes are left in the store");
    at.burgeon.ok(&["verify", "image:1"]);
    at.still_mounts();
}

fn size(folder: &Path) -> u64 {
    let entries = fs::read_dir(folder).unwrap().map(Result::unwrap);
    let sizes = entries.map(|entry| match entry.metadata() {
        Ok(metadata) if metadata.is_dir() => size(&entry.path()),
        Ok(metadata) => metadata.len(),
        Err(_) => 0,
    });
    sizes.sum()
}
