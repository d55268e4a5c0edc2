//! Mounts below programs that know nothing of Burgeon: podman, buildah, systemd-nspawn, bubblewrap.
//! Each test runs an example of docs/cli.md, "Other runtimes". Needs root.

#![allow(clippy::unwrap_used)]

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Output},
};

use testkit::{Burgeon, Space, busybox_image, skopeo_copy};

const PROGRAM: &str = env!("CARGO_BIN_EXE_burgeon");

/// podman's options for a container without control groups, network and log. The limits are those
/// that a machine allows that is itself a container.
const CONTAINER: [&str; 10] = [
    "run",
    "--rm",
    "--ulimit=nofile=1024:1024",
    "--ulimit=nproc=4096:4096",
    "--cgroups=disabled",
    "--network=none",
    "--log-driver=none",
    "--read-only=false",
    "--runtime=crun",
    "--pull=never",
];

/// A podman with folders of its own.
struct Podman {
    home: PathBuf,
    configuration: PathBuf,
}

impl Podman {
    /// Its settings name `stores` as additional stores of images.
    fn new(space: &Space, stores: &[&Path]) -> Self {
        let home = space.make_folder("podman");
        let configuration = space.path("storage.conf");
        let text = format!(
            "[storage]\ndriver = \"overlay\"\nrunroot = {:?}\ngraphroot = {:?}\n\
             [storage.options]\nadditionalimagestores = {stores:?}\n",
            home.join("run"),
            home.join("root"),
        );
        fs::write(&configuration, text).unwrap();
        Self { home, configuration }
    }

    fn run(&self, arguments: &[&str]) -> String {
        // crun refuses a machine that has both versions of control groups: it sees only the second.
        let script = "mount -t cgroup2 cgroup2 /sys/fs/cgroup && exec \"$@\"";
        let mut command = Command::new("unshare");
        command.args(["--mount", "sh", "-c", script, "sh", "podman", "--tmpdir"]);
        command.arg(self.home.join("tmp"));
        command.args(["--cgroup-manager=cgroupfs", "--events-backend=none"]).args(arguments);
        command.env("CONTAINERS_STORAGE_CONF", &self.configuration);
        said("podman", &command.output().expect("install podman"))
    }

    /// buildah with the same folders and stores.
    fn buildah(&self, arguments: &[&str]) -> String {
        let mut command = Command::new("buildah");
        command.args(arguments).env("CONTAINERS_STORAGE_CONF", &self.configuration);
        // It runs commands in a folder, without a runtime.
        command.env("BUILDAH_ISOLATION", "chroot").env("TMPDIR", &self.home);
        said("buildah", &command.output().expect("install buildah")).trim().to_owned()
    }

    fn container(&self, arguments: &[&str]) -> String {
        self.run(&[&CONTAINER[..], arguments].concat())
    }
}

fn said(program: &str, output: &Output) -> String {
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{program}: {errors}");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

#[test]
fn podman_runs_in_a_mount_and_in_an_overlay_of_it() {
    let space = Space::new("podman");
    let burgeon = Burgeon::new(PROGRAM, &space);
    let image = busybox_image(&space.path("layout"), |_| ()).unwrap();
    let mounted = burgeon.mount(&image, &space.path("root"), &[]);
    let at = mounted.path().to_str().unwrap();
    let podman = Podman::new(&space, &[]);
    let script = "id -u; cat /tmp/file; echo written > /tmp/file";
    let overlay = format!("{at}:O");
    let container = |root: &str| podman.container(&["--rootfs", root, "/bin/sh", "-c", script]);
    fs::write(mounted.path().join("tmp/file"), "first\n").unwrap();
    // Writes in an overlay leave the mount as it is; others land in it.
    assert_eq!(container(&overlay), "0\nfirst\n");
    assert_eq!(container(at), "0\nfirst\n");
    assert_eq!(container(&overlay), "0\nwritten\n");
    burgeon.umount(mounted);
}

#[test]
fn podman_takes_a_read_only_mount_for_a_store_of_images() {
    let space = Space::new("image-store");
    let burgeon = Burgeon::new(PROGRAM, &space);
    let image = busybox_image(&space.path("layout"), |config| {
        config["Cmd"] = serde_json::json!(["/bin/sh", "-c", "echo from the store; id -u"]);
    })
    .unwrap();
    let store = space.path("store");
    let from = image.replace("oci-layout:", "oci:");
    let to = format!(
        "containers-storage:[overlay@{}+{}]localhost/busy:latest",
        store.display(),
        space.path("store-run").display()
    );
    skopeo_copy(&[], &from, &to).unwrap();
    // It leaves its folder mounted onto itself.
    let _ = rustix::mount::unmount(store.join("overlay"), rustix::mount::UnmountFlags::DETACH);
    burgeon.build(&store, "catalogue");
    let mounted = burgeon.mount("catalogue", &space.path("at"), &["--read-only"]);
    let podman = Podman::new(&space, &[mounted.path()]);
    let images = podman.run(&["images", "--format", "{{.Repository}} {{.ReadOnly}}"]);
    assert_eq!(images, "localhost/busy true\n");
    assert_eq!(podman.container(&["localhost/busy"]), "from the store\n0\n");
    // buildah builds above it, and podman runs what it built.
    let container = podman.buildah(&["from", "--pull-never", "localhost/busy"]);
    podman.buildah(&["run", &container, "/bin/sh", "-c", "echo built > /srv/built"]);
    podman.buildah(&["config", "--cmd", "cat /srv/built", &container]);
    podman.buildah(&["commit", "--rm", &container, "localhost/built"]);
    assert_eq!(podman.container(&["localhost/built"]), "built\n");
    assert!(!mounted.path().join("srv/built").exists(), "the store is read-only");
    burgeon.umount(mounted);
}

#[test]
fn nspawn_and_bubblewrap_run_in_a_mount() {
    let space = Space::new("nspawn");
    let burgeon = Burgeon::new(PROGRAM, &space);
    let image = busybox_image(&space.path("layout"), |_| ()).unwrap();
    let mounted = burgeon.mount(&image, &space.path("root"), &[]);
    let at = mounted.path();
    // nspawn asks for it in whatever is to be a system.
    fs::create_dir(at.join("usr")).unwrap();
    let script = "cat /srv/file; echo written > /srv/file";
    let nspawn = |options: &[&str]| {
        let mut command = Command::new("systemd-nspawn");
        command.args(["--quiet", "--register=no", "--keep-unit", "--pipe"]).args(options);
        command.arg("-D").arg(at).args(["/bin/sh", "-c", script]);
        said("systemd-nspawn", &command.output().expect("install systemd-container"))
    };
    let bubblewrap = || {
        let mut command = Command::new("bwrap");
        command.arg("--bind").arg(at).args(["/", "--proc", "/proc", "--dev", "/dev"]);
        command.args(["--unshare-all", "/bin/sh", "-c", script]);
        said("bwrap", &command.output().expect("install bubblewrap"))
    };
    fs::write(at.join("srv/file"), "first\n").unwrap();
    // A copy, and a layer of memory: both leave the mount as it is.
    assert_eq!(nspawn(&["--ephemeral"]), "first\n");
    assert_eq!(nspawn(&["--volatile=overlay"]), "first\n");
    assert_eq!(bubblewrap(), "first\n");
    assert_eq!(nspawn(&[]), "written\n");
    burgeon.umount(mounted);
}
