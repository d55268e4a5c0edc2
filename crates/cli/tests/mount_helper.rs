//! `mount.burgeon`, as mount(8) and an administrator call it.

#![allow(clippy::unwrap_used)]

use std::{
    fs,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
    process::{Child, Command, Output, Stdio},
    thread,
    time::Duration,
};

use rustix::{
    mount::{UnmountFlags, unmount},
    process::{Pid, Signal, kill_process},
};
use testkit::{
    Burgeon, Mounted, OciLayout, PATIENCE, Registry, Space, bind_mount, mounts_of, skopeo_copy,
    wait_until,
};

const PROGRAM: &str = env!("CARGO_BIN_EXE_burgeon");

/// The helper, and an installation with the images `image:1` and `other`.
struct Helper<'a> {
    space: &'a Space,
    burgeon: Burgeon,
    program: PathBuf,
    at: PathBuf,
}

impl<'a> Helper<'a> {
    fn new(space: &'a Space) -> Self {
        Self::of(space, Burgeon::new(PROGRAM, space))
    }

    fn of(space: &'a Space, burgeon: Burgeon) -> Self {
        let tree = space.make_folder("tree");
        fs::write(tree.join("file"), "content").unwrap();
        burgeon.build(&tree, "image:1");
        fs::write(tree.join("file"), "other").unwrap();
        burgeon.build(&tree, "other");
        // mount(8) finds it in /sbin.
        let program = space.make_folder("sbin").join("mount.burgeon");
        symlink(PROGRAM, &program).unwrap();
        let at = space.make_folder("at");
        Self { space, burgeon, program, at }
    }

    /// The command; `options` come after the state directory.
    fn command(&self, spec: &str, at: &Path, options: &str, flags: &[&str]) -> Command {
        let mut command = Command::new(&self.program);
        command.arg(spec).arg(at).args(flags).arg("-o").arg(self.options(options));
        command.stdin(Stdio::null());
        command
    }

    fn options(&self, more: &str) -> String {
        let state = self.burgeon.state().display();
        format!("rw,state-dir={state},write-limit=256M,{more}")
    }

    #[track_caller]
    fn run(&self, spec: &str, options: &str, flags: &[&str]) -> Output {
        self.command(spec, &self.at, options, flags).output().unwrap()
    }

    #[track_caller]
    fn ok(&self, spec: &str, options: &str) {
        let output = self.run(spec, options, &[]);
        assert!(output.status.success(), "{output:?}");
        assert!(output.stdout.is_empty() && output.stderr.is_empty(), "{output:?}");
    }

    #[track_caller]
    fn fails(&self, spec: &str, options: &str, flags: &[&str], code: i32, message: &str) {
        assert_fails(&self.run(spec, options, flags), code, message);
    }

    fn read(&self) -> String {
        fs::read_to_string(self.at.join("file")).unwrap()
    }

    /// Number of mounts at the mount point.
    fn mounts(&self) -> usize {
        mounts_of("thread-self").unwrap().iter().filter(|mount| mount.at == self.at).count()
    }

    fn attributes(&self) -> String {
        let mounts = mounts_of("thread-self").unwrap();
        mounts.into_iter().find(|mount| mount.at == self.at).unwrap().options
    }

    fn mounted(&self) -> Mounted {
        Mounted::at(&self.at)
    }
}

#[track_caller]
fn assert_fails(output: &Output, code: i32, message: &str) {
    let said = String::from_utf8_lossy(&output.stderr);
    let as_expected = output.status.code() == Some(code) && said.contains(message);
    assert!(as_expected, "no {code} and {message:?}: {output:?}");
}

#[test]
fn a_line_of_fstab_is_mounted_once() {
    let space = Space::new("helper");
    let helper = Helper::new(&space);
    let options = "_netdev,nofail,x-systemd.automount,writes=w,noatime,user";
    helper.ok("image:1", options);
    assert_eq!(helper.read(), "content");
    assert_eq!(helper.attributes(), "rw,nosuid,nodev,noexec,noatime");
    fs::write(helper.at.join("new"), "kept").unwrap();
    // The kernel shows a btrfs on some device, so mount(8) calls again.
    helper.ok("image:1", options);
    assert_eq!(helper.mounts(), 1);
    let output = helper.run("image:1", options, &["-v"]);
    assert!(String::from_utf8_lossy(&output.stdout).contains("mounted already"), "{output:?}");
    helper.fails("other", options, &[], 32, "image:1 with the writes \"w\" is mounted there");
    helper.fails("image:1", "writes=w2", &[], 32, "is mounted there");
    helper.fails("image:1", "", &[], 32, "is mounted there");
    // The same, after the death of all processes.
    helper.burgeon.kill_daemon();
    helper.ok("image:1", options);
    assert_eq!(helper.burgeon.status()["mounts"][0]["state"], "serving");
    assert_eq!(fs::read_to_string(helper.at.join("new")).unwrap(), "kept");
    helper.burgeon.umount(helper.mounted());
    let output = helper.run("image:1", options, &["-v"]);
    assert!(String::from_utf8_lossy(&output.stdout).contains("mounted"), "{output:?}");
    assert_eq!(fs::read_to_string(helper.at.join("new")).unwrap(), "kept");
    helper.burgeon.umount(helper.mounted());
    // systemd restarts a unit: a plain umount, and a mount at once.
    for _ in 0..3 {
        helper.ok("image:1", options);
        unmount(&helper.at, UnmountFlags::empty()).unwrap();
    }
    // Something else is there.
    let foreign = bind_mount(&space.make_folder("foreign"), &helper.at);
    helper.fails("image:1", options, &[], 32, "something is mounted there already");
    drop(foreign);
}

/// A line of /etc/fstab may name an image of a registry by its digest, with a port and a tag.
#[test]
fn an_image_of_a_registry_is_mounted_by_its_digest() {
    let space = Space::new("helper-digest");
    let helper = Helper::new(&space);
    let layout = OciLayout::new(&space.path("layout")).unwrap();
    layout.change(|root| fs::write(root.join("file"), "of a registry").unwrap()).unwrap();
    let registry = Registry::start(&space.path("registry"), None).unwrap();
    let name = format!("{}/team/app:1", registry.address());
    let from = format!("oci:{}", layout.folder().display());
    skopeo_copy(&[], &from, &format!("docker://{name}")).unwrap();
    let fetched = helper.run(&format!("oci://{name}"), "ro", &[]);
    assert!(fetched.status.success(), "{fetched:?}");
    let list: serde_json::Value =
        serde_json::from_str(&helper.burgeon.ok(&["list", "--json"])).unwrap();
    let mut names = list["images"].as_array().unwrap().iter().map(|it| it["name"].as_str());
    let digest = names.find_map(|name| name.filter(|it| it.starts_with("sha256:"))).unwrap();
    helper.burgeon.umount(helper.mounted());
    let spec = format!("oci://{name}@{digest}");
    // A digest needs nobody.
    drop(registry);
    for _ in 0..2 {
        helper.ok(&spec, "ro");
        assert_eq!((helper.mounts(), helper.read().as_str()), (1, "of a registry"));
    }
    let other = spec.replace(&digest[7..15], "00000000");
    helper.fails(&other, "ro", &[], 32, "is mounted there");
    helper.burgeon.umount(helper.mounted());
}

#[test]
fn mistakes_have_the_exit_codes_of_mount() {
    let space = Space::new("helper-mistakes");
    let helper = Helper::new(&space);
    helper.fails("image:1", "subvol=x", &[], 1, "unknown option \"subvol=x\"");
    helper.fails("image:1", "writes", &[], 1, "needs a value");
    helper.fails("image:1", "noatiem", &[], 1, "did you mean noatime?");
    helper.fails("image:1", "write-limit=much", &[], 1, "'-o write-limit");
    helper.fails("image:1", "write-limit=1M", &[], 1, "btrfs needs at least 256 MiB");
    helper.fails("image:1", "writes=", &[], 1, "not a valid name for writes");
    helper.fails("image:1", "store=\"/a,b", &[], 1, "a quotation mark is not closed");
    helper.fails("image:1", "transport=pigeon", &[], 1, "pigeon");
    helper.fails("image:1", "", &["-t", "burgeon.x"], 1, "no subtypes");
    helper.fails("image:1", "", &["-x"], 1, "-x");
    helper.fails("image:1", "store=ftp://x", &[], 1, "ftp://");
    helper.fails("none", "", &[], 32, "none");
    helper.fails("image:1", "", &["-N", "/dev/null"], 32, "not a mount namespace");
    assert_fails(&Command::new(&helper.program).output().unwrap(), 1, "Usage");
    let run = |at: &Path| helper.command("image:1", at, "", &[]).output().unwrap();
    assert_fails(&run(&space.path("missing")), 32, "make it with mkdir");
    assert_fails(&run(&space.path("tree/file")), 32, "not a directory");
    assert_fails(&run(&space.path("tree")), 32, "it is not empty");
    let mut other = Command::new("setpriv");
    other.args(["--reuid=65534", "--regid=65534", "--clear-groups"]);
    // Folders above may be closed to others.
    let program = fs::File::open(PROGRAM).unwrap();
    other.arg("bash").arg("-c").arg("exec -a mount.burgeon /dev/stdin image:1 / -o ro");
    assert_fails(&other.stdin(program).output().unwrap(), 1, "CAP_SYS_ADMIN");
    // A fake mount finds mistakes of the same kinds, and mounts nothing.
    helper.fails("image:1", "subvol=x", &["-f"], 1, "unknown option");
    let output = helper.run("image:1", "", &["-fv"]);
    assert!(output.status.success() && helper.mounts() == 0, "{output:?}");
    assert!(String::from_utf8_lossy(&output.stdout).contains("would mount"), "{output:?}");
    // A typing error makes another state directory, and is told.
    let typed = format!("state-dir={}", space.path("typo").display());
    let output = helper.run("image:1", &typed, &["-f"]);
    assert!(String::from_utf8_lossy(&output.stderr).contains("it is made now"), "{output:?}");
    let output = helper.run("image:1", "subvol=x,nosiud", &["-sn", "-t", "burgeon"]);
    assert!(output.status.success() && helper.mounts() == 1, "{output:?}");
    helper.burgeon.umount(helper.mounted());
}

#[test]
fn a_remount_changes_the_attributes() {
    let space = Space::new("helper-remount");
    let helper = Helper::new(&space);
    helper.fails("image:1", "remount,ro", &[], 32, "it is not a mount of the state directory");
    helper.ok("image:1", "writes=w");
    helper.fails("image:1", "remount,writes=other", &[], 32, "is mounted there");
    helper.fails("image:2", "remount,writes=w", &[], 32, "changes nothing but attributes");
    helper.ok("image:1", "writes=w,remount,ro,noatime,nosuid");
    assert_eq!(helper.attributes(), "ro,nosuid,noatime");
    assert!(fs::write(helper.at.join("new"), "").is_err());
    let output = helper.run("image:1", "writes=w,remount,rw", &["-f", "-v"]);
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(said.ends_with(" with nosuid,relatime\n"), "{said}");
    assert!(output.status.success(), "{output:?}");
    assert_eq!(helper.attributes(), "ro,nosuid,noatime");
    helper.ok("image:1", "writes=w,remount,rw");
    // Rights that no option names stay as they are.
    assert_eq!(helper.attributes(), "rw,nosuid,relatime");
    fs::write(helper.at.join("new"), "").unwrap();
    helper.burgeon.umount(helper.mounted());
    helper.ok("image:1", "ro");
    helper.fails("image:1", "remount,rw", &[], 32, "without a place for writes");
    helper.ok("image:1", "remount,ro,noexec");
    assert_eq!(helper.attributes(), "ro,noexec,relatime");
    helper.burgeon.umount(helper.mounted());
}

/// A process in a mount namespace of its own.
struct Elsewhere(Child);

impl Elsewhere {
    fn new() -> Self {
        let mut command = Command::new("unshare");
        command.args(["--mount", "--propagation=private", "sleep", "infinity"]);
        let this = Self(command.spawn().unwrap());
        let own = fs::read_link("/proc/thread-self/ns/mnt").unwrap();
        let has_its_own = || {
            let name = fs::read_to_string(format!("/proc/{}/comm", this.0.id()));
            name.is_ok_and(|name| name == "sleep\n")
        };
        assert!(wait_until(PATIENCE, has_its_own));
        assert_ne!(fs::read_link(format!("/proc/{}/ns/mnt", this.0.id())).unwrap(), own);
        this
    }
}

impl Drop for Elsewhere {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn a_mount_can_be_made_in_another_namespace() {
    let space = Space::new("helper-namespace");
    let helper = Helper::new(&space);
    let elsewhere = Elsewhere::new();
    let id = elsewhere.0.id().to_string();
    for namespace in [id.clone(), format!("/proc/{id}/ns/mnt")] {
        let output = helper.run("image:1", "ro", &["-N", &namespace]);
        assert!(output.status.success(), "{output:?}");
        assert_eq!(helper.mounts(), 0, "it is mounted here");
        let there: PathBuf = [Path::new("/proc"), Path::new(&id), Path::new("root")]
            .iter()
            .copied()
            .chain([helper.at.strip_prefix("/").unwrap()])
            .collect();
        assert_eq!(fs::read_to_string(there.join("file")).unwrap(), "content");
        // The same once more, and by the other name.
        let again = helper.run("image:1", "ro", &["-v", "-N", &id]);
        assert!(String::from_utf8_lossy(&again.stdout).contains("already"), "{again:?}");
        // A relative path is one of the caller's.
        let name = Path::new(helper.at.file_name().unwrap());
        let mut again = helper.command("image:1", name, "ro", &["-v", "-N", &id]);
        let again = again.current_dir(helper.at.parent().unwrap()).output().unwrap();
        assert!(String::from_utf8_lossy(&again.stdout).contains("already"), "{again:?}");
    }
    drop(elsewhere);
}

#[test]
fn an_interrupted_mount_says_so_and_leaves_nothing() {
    let space = Space::new("helper-interrupted");
    let helper = Helper::new(&space);
    let first = helper.burgeon.mount("other", &space.path("first"), &["--read-only"]);
    let supervisor = helper.burgeon.status()["supervisor_pid"].as_i64().unwrap();
    let supervisor = Pid::from_raw(i32::try_from(supervisor).unwrap()).unwrap();
    kill_process(supervisor, Signal::STOP).unwrap();
    let mut command = helper.command("image:1", &helper.at, "ro", &[]);
    let mut child = command.spawn().unwrap();
    // It waits for the supervisor.
    thread::sleep(Duration::from_millis(500));
    kill_process(Pid::from_child(&child), Signal::TERM).unwrap();
    let status = child.wait().unwrap();
    kill_process(supervisor, Signal::CONT).unwrap();
    assert_eq!((status.code(), helper.mounts()), (Some(8), 0));
    let is_alone = || helper.burgeon.status()["mounts"].as_array().unwrap().len() == 1;
    assert!(wait_until(PATIENCE, is_alone), "{:#}", helper.burgeon.status());
    helper.burgeon.umount(first);
}

/// mount(8) looks for helpers in /sbin; in this test's namespace that holds nothing but ours.
#[test]
fn mount_8_calls_the_helper() {
    let space = Space::new("helper-mount");
    let helper = Helper::new(&space);
    let at = space.make_folder("at two");
    let fstab = space.path("fstab");
    let escaped = at.to_str().unwrap().replace(' ', "\\040");
    let line =
        |at: &str, options: &str| format!("image:1 {at} burgeon {} 0 0\n", helper.options(options));
    let first = line(helper.at.to_str().unwrap(), "_netdev,nofail,writes=w");
    fs::write(&fstab, first + &line(&escaped, "ro,x-note=1")).unwrap();
    let sbin = bind_mount(&helper.space.path("sbin"), &fs::canonicalize("/sbin").unwrap());
    let mount = |arguments: &[&str]| {
        let mut command = Command::new("mount");
        let output = command.arg("-T").arg(&fstab).args(arguments).output().unwrap();
        assert!(output.status.success(), "mount {arguments:?}: {output:?}");
    };
    mount(&["-f", "-a"]);
    assert_eq!(helper.mounts(), 0);
    for _ in 0..2 {
        mount(&["-a"]);
        assert_eq!((helper.mounts(), helper.read().as_str()), (1, "content"));
        assert_eq!(fs::read_to_string(at.join("file")).unwrap(), "content");
    }
    mount(&["-o", "remount,ro", helper.at.to_str().unwrap()]);
    assert!(helper.attributes().starts_with("ro,"), "{}", helper.attributes());
    let output = Command::new("mount")
        .args(["-t", "burgeon", "none", helper.at.to_str().unwrap(), "-o", &helper.options("")])
        .output()
        .unwrap();
    assert_fails(&output, 32, "is mounted there");
    drop(sbin);
    helper.burgeon.umount(helper.mounted());
    helper.burgeon.umount(Mounted::at(&at));
}

/// mount(8) has a code of its own for it.
#[test]
fn a_disk_without_room_is_a_system_error() {
    let space = Space::new("helper-room");
    let disk = space.small_disk("disk", 64 << 20);
    let helper = Helper::of(&space, Burgeon::with_state(PROGRAM, disk.path().join("state")));
    helper.fails("image:1", "", &[], 2, "free");
    assert_eq!(helper.mounts(), 0);
    helper.ok("image:1", "ro");
    drop(helper.mounted());
    helper.burgeon.ok(&["shutdown"]);
    drop(helper);
}
