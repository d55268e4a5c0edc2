//! The manifest for Kubernetes, read as its own types, and its steps on a node that is a namespace.
//! Needs root and Go.

#![allow(clippy::unwrap_used)]

use std::{
    fs,
    os::unix::fs::{MetadataExt, PermissionsExt},
    path::{Path, PathBuf},
    process::{Child, Command, Output, Stdio},
};

use testkit::{PATIENCE, Space, go_tests, wait_until};

const PROGRAM: &str = env!("CARGO_BIN_EXE_burgeon");

fn dist(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../dist").join(name)
}

#[test]
fn the_manifest_is_of_kubernetes_own_types() {
    let output = Command::new(go_tests("kubernetes"))
        .arg("-test.v")
        .env("MANIFEST", dist("kubernetes/burgeon.yaml"))
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && said.matches("--- PASS").count() == 2, "{said}");
}

/// A process with namespaces of its own for mounts, in which the node's folders and programs are
/// others, and for processes: it does not see what runs beside the test.
struct Node {
    /// The parent of the node's first process, which dies with it.
    unshare: Child,
    process: u32,
    /// The requests to its systemctl and udevadm.
    calls: PathBuf,
    files: PathBuf,
}

impl Node {
    fn new(space: &Space) -> Self {
        let programs = space.make_folder("programs");
        let calls = space.path("calls");
        let record = format!("#!/bin/sh\necho \"${{0##*/}} $*\" >> {}\n", calls.display());
        let version = "#!/bin/sh\necho containerd github.com/containerd/containerd 1.7.2 x\n";
        let stubs = [("systemctl", &*record), ("udevadm", &record), ("modprobe", &record)];
        for (name, text) in stubs.into_iter().chain([("containerd", version)]) {
            let path = programs.join(name);
            fs::write(&path, text).unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        }
        // The container's files: those of the tarball.
        let files = space.make_folder("files");
        fs::copy(PROGRAM, files.join("burgeon")).unwrap();
        for name in ["burgeon.service", "burgeon-snapshotter.service", "65-burgeon.rules"] {
            fs::copy(dist(name), files.join(name)).unwrap();
        }
        fs::create_dir_all(space.path("etc/containerd")).unwrap();
        fs::write(
            space.path("etc/containerd/config.toml"),
            "version = 2\nimports = [\"/etc/containerd/conf.d/*.toml\"]\n",
        )
        .unwrap();
        let ready = space.path("ready");
        let script = "mkdir -p \"$1/etc/udev/rules.d\" \"$1/local/bin\" \"$1/run\" &&
            mount --bind \"$1/etc\" /etc && mount --bind \"$1/local\" /usr/local &&
            mount --bind \"$1/run\" /run && touch \"$1/ready\" && exec sleep 100000";
        let unshare = Command::new("unshare")
            .args(["--mount", "--propagation=private", "--pid", "--fork", "--kill-child"])
            .args(["--mount-proc", "sh", "-c", script, "sh"])
            .arg(space.folder())
            .stdin(Stdio::null())
            .spawn()
            .unwrap();
        let mut node = Self { unshare, process: 0, calls, files };
        assert!(wait_until(PATIENCE, || ready.exists()), "no node");
        let id = node.unshare.id();
        let children = fs::read_to_string(format!("/proc/{id}/task/{id}/children")).unwrap();
        node.process = children.trim().parse().unwrap();
        node
    }

    /// Runs a step of the pod, beside the node's programs.
    fn step(&self, space: &Space, step: &str) -> Output {
        let path = std::env::var("PATH").unwrap();
        Command::new(dist("kubernetes/node"))
            .arg(step)
            .env("NODE_PID", self.process.to_string())
            .env("BURGEON_FILES", &self.files)
            .env("TRUST", "registry.example/team/* other.example/app")
            .env("PATH", format!("{}:{path}", space.path("programs").display()))
            .output()
            .unwrap()
    }

    fn install(&self, space: &Space) -> String {
        let _ = fs::remove_file(&self.calls);
        let output = self.step(space, "install");
        assert!(output.status.success(), "{output:?}");
        fs::read_to_string(&self.calls).unwrap_or_default()
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        let _ = self.unshare.kill();
        let _ = self.unshare.wait();
    }
}

#[test]
fn a_node_is_installed_once_and_changed_only_where_it_differs() {
    let space = Space::new("kubernetes");
    let node = Node::new(&space);
    let calls = node.install(&space);
    let restart = "systemctl restart burgeon-snapshotter containerd\n";
    assert!(calls.ends_with(restart), "{calls}");
    assert!(calls.contains("udevadm control --reload\n"), "{calls}");
    assert!(calls.contains("systemctl enable --quiet --now burgeon burgeon-snapshotter\n"));
    let installed = space.path("local/bin/burgeon");
    assert_eq!(fs::read(&installed).unwrap(), fs::read(PROGRAM).unwrap());
    assert_eq!(fs::metadata(&installed).unwrap().permissions().mode() & 0o777, 0o755);
    let etc = space.path("etc");
    let drop_in = etc.join("systemd/system/burgeon-snapshotter.service.d/trust.conf");
    let text = fs::read_to_string(&drop_in).unwrap();
    assert!(text.contains("--trust registry.example/team/* --trust other.example/app"), "{text}");
    assert!(etc.join("containerd/conf.d/burgeon.toml").exists());
    assert!(etc.join("systemd/system/burgeon.service").exists());
    // Once more: nothing is restarted.
    let calls = node.install(&space);
    assert!(!calls.contains("restart") && !calls.contains("reload"), "{calls}");
    // Another program, and a step that was killed half way.
    fs::write(&installed, "another").unwrap();
    assert!(node.install(&space).ends_with(restart));
    fs::write(space.path("run/burgeon-node.pending"), "").unwrap();
    assert!(node.install(&space).ends_with(restart));
    assert!(!space.path("run/burgeon-node.pending").exists());
}

#[test]
fn a_node_whose_containerd_would_not_read_the_file_is_left_alone() {
    let space = Space::new("kubernetes-refused");
    let node = Node::new(&space);
    fs::write(space.path("etc/containerd/config.toml"), "version = 2\n").unwrap();
    let output = node.step(&space, "install");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && said.contains("problem: "), "{output:?}");
    assert!(said.contains("imports = [\"/etc/containerd/conf.d/*.toml\"]"), "{said}");
    assert!(!space.path("etc/containerd/conf.d").exists());
    let output = node.step(&space, "unknown");
    assert_eq!(output.status.code(), Some(2));
}

#[test]
fn only_a_containerd_of_the_node_itself_has_to_see_its_mounts() {
    let space = Space::new("kubernetes-namespaces");
    let node = Node::new(&space);
    // A process with this name: first as in a container, then as a service with PrivateMounts.
    let other = space.path("programs/other/containerd");
    fs::create_dir_all(other.parent().unwrap()).unwrap();
    fs::copy("/bin/sleep", &other).unwrap();
    let file = fs::metadata(&other).unwrap().ino();
    let running = || {
        let processes = fs::read_dir("/proc").unwrap().flatten();
        let programs = processes.filter_map(|one| fs::metadata(one.path().join("exe")).ok());
        programs.filter(|program| program.ino() == file).count()
    };
    let start = |namespaces: &[&str]| {
        let before = running();
        let process = Command::new("nsenter")
            .args(["--target", &node.process.to_string(), "--mount", "--pid", "unshare"])
            .args(namespaces)
            .args([other.to_str().unwrap(), "100000"])
            .stdin(Stdio::null())
            .spawn()
            .unwrap();
        assert!(wait_until(PATIENCE, || running() > before), "it does not run: {namespaces:?}");
        process
    };
    let inner = start(&["--mount", "--pid", "--fork", "--kill-child"]);
    node.install(&space);
    let beside = start(&["--mount"]);
    let output = node.step(&space, "install");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(
        !output.status.success() && said.contains("problem: containerd (process "),
        "{output:?}"
    );
    assert!(said.contains(") is in another mount namespace"), "{said}");
    // The end of the node's first process ends them.
    drop(node);
    for mut process in [inner, beside] {
        process.wait().unwrap();
    }
}
