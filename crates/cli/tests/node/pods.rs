//! A containerd with CRI, as a kubelet uses it: Debian's, or 2.x, which is made from its Go module.
//!
//! The configuration is that of `snapshotter setup`, imported by one with what belongs to this
//! machine.

use std::{
    ffi::OsStr,
    fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use testkit::{
    PATIENCE, Space, busybox_image, go_programs, kill, processes_with, skopeo_copy, wait_until,
};

use super::{Node, PROGRAM, serve};

/// The packages of containerd 2.x, and the command that speaks CRI.
pub const PACKAGES: [&str; 4] = [
    "github.com/containerd/containerd/v2/cmd/containerd",
    "github.com/containerd/containerd/v2/cmd/containerd-shim-runc-v2",
    "github.com/containerd/containerd/v2/cmd/ctr",
    "./cri",
];

/// A containerd's version.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Version {
    /// Debian's.
    V1,
    /// The one of dev/containerd.
    V2,
}

/// A node that runs pods, whose containers and processes end with it.
pub struct Pods<'a> {
    pub node: Node<'a>,
    programs: PathBuf,
    folder: PathBuf,
}

/// A running pod of one container.
pub struct Pod {
    pub sandbox: String,
    pub container: String,
}

impl<'a> Pods<'a> {
    /// Starts it with options of the snapshotter. Sandboxes are containers of the image `pause`.
    pub fn start(space: &'a Space, version: Version, pause: &str, options: &[&str]) -> Self {
        let programs = go_programs("containerd", &PACKAGES);
        let own = (version == Version::V2).then(|| programs.clone());
        let config = space.make_folder("etc/containerd").join("config.toml");
        fs::write(&config, text(space, version, pause)).unwrap();
        set_up(space, own.as_deref());
        let node = Node::configured(space, "k8s.io".to_owned(), config, own, options);
        let pods = Self { node, programs, folder: space.folder().to_owned() };
        pods.wait();
        pods
    }

    /// Waits until CRI answers, which is later than containerd does.
    fn wait(&self) {
        assert!(wait_until(PATIENCE, || self.cri(&["pods"]).is_ok()), "{:?}", self.cri(&["pods"]));
    }

    /// Kills containerd and starts it.
    pub fn restart_containerd(&mut self) {
        self.node.start_containerd();
        self.wait();
    }

    /// Kills the snapshotter and containerd, and starts them in the order of their units: images
    /// whose snapshotter is away when containerd starts are unknown to CRI.
    pub fn restart_both(&mut self, options: &[&str]) {
        self.node.snapshotter = None;
        self.node.snapshotter = Some(serve(self.node.space, options));
        self.restart_containerd();
    }

    /// Makes a call of CRI; its output, or the error.
    pub fn cri(&self, words: &[&str]) -> Result<String, String> {
        let mut command = Command::new(self.programs.join("cri"));
        command.arg(self.folder.join("c.sock")).args(words).env("TMPDIR", &self.folder);
        let output = command.stdin(Stdio::null()).output().unwrap();
        let said = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        match output.status.success() {
            true => Ok(said(&output.stdout)),
            false => Err(said(&output.stderr)),
        }
    }

    /// A pod whose container waits.
    pub fn run(&self, name: &str, image: &str) -> Pod {
        let said = self.cri(&["run", name, image, "/bin/sleep", "100000"]).unwrap();
        let mut words = said.split_whitespace().map(str::to_owned);
        Pod { sandbox: words.next().unwrap(), container: words.next().unwrap() }
    }

    /// Runs a script in the container.
    pub fn exec(&self, pod: &Pod, script: &str) -> Result<String, String> {
        self.cri(&["exec", &pod.container, "/bin/sh", "-c", script])
    }
}

impl Drop for Pods<'_> {
    fn drop(&mut self) {
        // Containers outlive their containerd: those that a failed test has left end here.
        let runc = self.folder.join("runc");
        for namespace in fs::read_dir(&runc).into_iter().flatten().flatten() {
            for container in fs::read_dir(namespace.path()).into_iter().flatten().flatten() {
                let mut delete = Command::new("runc");
                delete.arg("--root").arg(namespace.path()).args(["delete", "--force"]);
                let _ = delete.arg(container.file_name()).stderr(Stdio::null()).status();
            }
        }
        let is_shim = |id: &u32| {
            let name = fs::read_link(format!("/proc/{id}/exe")).unwrap_or_default();
            name.file_name() == Some(OsStr::new("containerd-shim-runc-v2"))
        };
        processes_with(&self.folder).into_iter().filter(is_shim).for_each(kill);
    }
}

/// Pushes an image for sandboxes, which no layer of is lazy.
pub fn push_pause(space: &Space, name: &str) {
    let set = |settings: &mut serde_json::Value| {
        settings["Cmd"] = serde_json::json!(["/bin/sleep", "100000"]);
    };
    let image = busybox_image(&space.path("pause"), set).unwrap();
    let from = image.replace("oci-layout:", "oci:");
    skopeo_copy(&[], &from, &format!("docker://{name}")).unwrap();
}

/// Things of this machine: folders and the image of sandboxes. Tests may lack the privilege
/// to lower the score of a process for the kernel's choice when memory is short.
fn text(space: &Space, version: Version, pause: &str) -> String {
    let folder = space.folder().display();
    let number = if version == Version::V1 { 2 } else { 3 };
    let common = format!(
        r#"
version = {number}
imports = ["{folder}/etc/containerd/conf.d/*.toml"]
root = "{folder}/containerd"
state = "{folder}/containerd-state"
[grpc]
  address = "{folder}/c.sock"
[ttrpc]
  address = "{folder}/c.ttrpc"
"#
    );
    let own = match version {
        // One section: an imported one would replace it as a whole, so `setup` asks for its lines.
        Version::V1 => format!(
            r#"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{pause}"
  restrict_oom_score_adj = true
  [plugins."io.containerd.grpc.v1.cri".containerd]
    snapshotter = "burgeon"
    disable_snapshot_annotations = false
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
      [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
        Root = "{folder}/runc"
"#
        ),
        Version::V2 => format!(
            r#"
[plugins.'io.containerd.cri.v1.images'.pinned_images]
  sandbox = "{pause}"
[plugins.'io.containerd.cri.v1.runtime']
  restrict_oom_score_adj = true
  [plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
    [plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc.options]
      Root = "{folder}/runc"
"#
        ),
    };
    common + &own
}

/// Writes the file of `snapshotter setup` for this containerd.
fn set_up(space: &Space, programs: Option<&Path>) {
    let path = std::env::var("PATH").unwrap_or_default();
    let mut setup = Command::new(PROGRAM);
    if let Some(programs) = programs {
        setup.env("PATH", format!("{}:{path}", programs.display()));
    }
    setup.arg("--state-dir").arg(space.path("state")).args(["--config", "none"]);
    setup.args(["snapshotter", "setup", "--write", "--prefix"]).arg(space.folder());
    setup.arg("--root").arg(space.path("root")).arg("--socket").arg(space.path("s.sock"));
    // Two problems are the test's own: a containerd beside it in another mount namespace, and the
    // floor with which tests use all of the disk.
    let output = setup.output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    let has_other = |line: &str| {
        line.starts_with("problem: ")
            && !line.contains("mount namespace")
            && !line.contains("cache resize")
    };
    assert!(output.stderr.is_empty() && !said.lines().any(has_other), "{output:?}");
}
