//! Debian's containerd with `burgeon snapshotter`: images and containers as with its own overlayfs.

#![allow(clippy::unwrap_used)]

use std::{
    fs::{self, File},
    io::Write,
    os::unix::fs::symlink,
    process::{Child, Command, Stdio},
};

use serde_json::Value;
use testkit::{OciLayout, PATIENCE, Space, wait_until};

const PROGRAM: &str = env!("CARGO_BIN_EXE_burgeon");
const IMAGE: &str = "registry.example/app:latest";

/// Changes of each kind that a container can make.
const SCRIPT: &str = "cd /; echo new > new; echo changed > etc/changed; rm etc/removed; \
    rm -r old; mkdir old; echo x > old/x; chmod 711 etc; chown 7:8 etc/owned; \
    mv etc/moved moved; ln -s new link; mkfifo -m 600 pipe; ln etc/linked hard";

/// A process that is killed in the end.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

struct Node<'a> {
    space: &'a Space,
    snapshotter: Option<Running>,
    _containerd: Running,
}

impl<'a> Node<'a> {
    fn start(space: &'a Space) -> Self {
        let config = space.path("containerd.toml");
        let folder = space.folder().display();
        write!(
            File::create(&config).unwrap(),
            r#"
version = 2
root = "{folder}/containerd"
state = "{folder}/containerd-state"
disabled_plugins = ["io.containerd.grpc.v1.cri"]
[grpc]
  address = "{folder}/c.sock"
[ttrpc]
  address = "{folder}/c.ttrpc"
[proxy_plugins.burgeon]
  type = "snapshot"
  address = "{folder}/s.sock"
"#
        )
        .unwrap();
        let snapshotter = Some(serve(space));
        let mut containerd = Command::new("containerd");
        containerd.arg("--config").arg(config).stderr(File::create(space.path("c.log")).unwrap());
        let node = Self { space, snapshotter, _containerd: start(&mut containerd) };
        assert!(wait_until(PATIENCE, || node.ctr(&["version"]).is_ok()), "containerd does not run");
        node
    }

    /// Runs `ctr`; its output, or what it said.
    fn ctr(&self, arguments: &[&str]) -> Result<String, String> {
        let output = Command::new("ctr")
            .arg("--address")
            .arg(self.space.path("c.sock"))
            .args(arguments)
            .stdin(Stdio::null())
            .output()
            .unwrap();
        let said = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        match output.status.success() {
            true => Ok(said(&output.stdout)),
            false => Err(said(&output.stderr)),
        }
    }

    fn run(&self, snapshotter: &str, name: &str, script: &str) -> String {
        let options = ["run", "--rm", "--snapshotter", snapshotter, IMAGE, name];
        self.ctr(&[&options[..], &["/bin/sh", "-c", script]].concat()).unwrap()
    }

    /// The changes of a stopped container: a line an entry, without its time, and all data.
    fn diff(&self, snapshotter: &str, name: &str) -> (Vec<String>, String) {
        let archive = self.space.path("diff.tar.gz");
        let script = format!(
            "ctr --address {} snapshots --snapshotter {snapshotter} diff {name} > {}",
            self.space.path("c.sock").display(),
            archive.display()
        );
        assert!(Command::new("sh").args(["-c", &script]).status().unwrap().success());
        let tar = |options: &[&str]| {
            let output = Command::new("tar").args(options).arg(&archive).output().unwrap();
            assert!(output.status.success(), "{output:?}");
            String::from_utf8(output.stdout).unwrap()
        };
        let entries = tar(&["--numeric-owner", "-tvzf"]);
        let mut entries: Vec<_> = entries
            .lines()
            .map(|line| {
                let words: Vec<_> = line.split_whitespace().collect();
                [&words[..3], &words[5..]].concat().join(" ")
            })
            .collect();
        entries.sort();
        (entries, tar(&["-xOzf"]))
    }

    fn snapshots(&self) -> Vec<Value> {
        let root = self.space.path("root");
        let output = Command::new(PROGRAM)
            .args(["--config", "none", "--json", "snapshotter", "status", "--root"])
            .arg(root)
            .output()
            .unwrap();
        let shown: Value = serde_json::from_slice(&output.stdout).unwrap();
        shown["snapshots"].as_array().unwrap().clone()
    }
}

fn start(command: &mut Command) -> Running {
    Running(command.stdin(Stdio::null()).stdout(Stdio::null()).spawn().unwrap())
}

fn serve(space: &Space) -> Running {
    let mut command = Command::new(PROGRAM);
    command.arg("--state-dir").arg(space.path("state")).args(["--config", "none"]);
    command.args(["snapshotter", "--root"]).arg(space.path("root"));
    command.arg("--socket").arg(space.path("s.sock"));
    let running = start(command.stderr(File::create(space.path("s.log")).unwrap()));
    let connects = || std::os::unix::net::UnixStream::connect(space.path("s.sock")).is_ok();
    assert!(wait_until(PATIENCE, connects), "the snapshotter does not run");
    running
}

/// An archive of an image of two layers with busybox.
fn image(space: &Space) -> String {
    let layout = OciLayout::new(&space.path("layout")).unwrap();
    let first = |root: &std::path::Path| {
        for folder in ["bin", "etc", "old/below"] {
            fs::create_dir_all(root.join(folder)).unwrap();
        }
        let busybox =
            ["/bin/busybox", "/usr/bin/busybox"].iter().find(|path| File::open(path).is_ok());
        fs::copy(busybox.unwrap(), root.join("bin/busybox")).unwrap();
        for name in
            ["sh", "rm", "mkdir", "chmod", "chown", "mv", "ln", "mkfifo", "sleep", "cat", "tail"]
        {
            symlink("busybox", root.join("bin").join(name)).unwrap();
        }
        for name in ["changed", "removed", "owned", "moved", "linked"] {
            fs::write(root.join("etc").join(name), name).unwrap();
        }
    };
    layout.change(first).unwrap();
    layout.change(|root| fs::write(root.join("second"), "layer").unwrap()).unwrap();
    let archive = space.path("image.tar");
    let mut tar = Command::new("tar");
    tar.arg("-C").arg(layout.folder()).arg("-cf").arg(&archive).arg(".");
    assert!(tar.status().unwrap().success());
    archive.display().to_string()
}

#[test]
fn containers_run_change_and_go_as_on_overlayfs() {
    let space = Space::new("containerd");
    let archive = image(&space);
    let mut node = Node::start(&space);
    let base = IMAGE.rsplit_once(':').unwrap().0;
    for snapshotter in ["burgeon", "overlayfs"] {
        let import = ["images", "import", "--snapshotter", snapshotter, "--base-name", base];
        node.ctr(&[&import[..], &[&archive]].concat()).unwrap();
    }
    assert_eq!(node.run("burgeon", "first", "cat /second /etc/changed"), "layerchanged");
    // The same script, and the same difference.
    let mut diffs = Vec::new();
    for snapshotter in ["burgeon", "overlayfs"] {
        let options = ["run", "--snapshotter", snapshotter, IMAGE, snapshotter];
        node.ctr(&[&options[..], &["/bin/sh", "-c", SCRIPT]].concat()).unwrap();
        diffs.push(node.diff(snapshotter, snapshotter));
        node.ctr(&["containers", "rm", snapshotter]).unwrap();
    }
    let overlayfs = diffs.pop().unwrap();
    assert!(overlayfs.0.len() > 12, "{overlayfs:?}");
    assert_eq!(diffs[0], overlayfs);
    // A running container does not notice that the snapshotter is killed.
    let detached = ["run", "-d", "--snapshotter", "burgeon", IMAGE, "long"];
    node.ctr(&[&detached[..], &["/bin/sleep", "1000"]].concat()).unwrap();
    node.snapshotter = None;
    let exec = ["tasks", "exec", "--exec-id", "e", "long"];
    let said = node.ctr(&[&exec[..], &["/bin/sh", "-c", "echo kept > /kept; cat /kept"]].concat());
    assert_eq!(said.unwrap(), "kept\n");
    let refused = node.ctr(&["run", "--snapshotter", "burgeon", IMAGE, "none", "/bin/sh"]);
    assert!(refused.is_err());
    node.snapshotter = Some(serve(&space));
    // gRPC waits a moment before it connects again.
    let list = ["snapshots", "--snapshotter", "burgeon", "ls"];
    assert!(wait_until(PATIENCE, || node.ctr(&list).is_ok()), "containerd does not come back");
    assert!(node.ctr(&list).unwrap().contains("long"));
    assert_eq!(node.run("burgeon", "other", "cat /second"), "layer");
    node.ctr(&["tasks", "rm", "--force", "long"]).unwrap();
    assert!(node.diff("burgeon", "long").1.contains("kept"));
    // Nothing is left once the image is gone.
    node.ctr(&["containers", "rm", "long"]).unwrap();
    node.ctr(&["images", "rm", "--sync", IMAGE]).unwrap();
    assert!(wait_until(PATIENCE, || node.snapshots().is_empty()), "{:?}", node.snapshots());
    let is_empty = |part: &str| space.path("root").join(part).read_dir().unwrap().next().is_none();
    assert!(wait_until(PATIENCE, || is_empty("trash") && is_empty("snapshots")));
}
