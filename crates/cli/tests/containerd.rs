//! Debian's containerd with `burgeon snapshotter`: images and containers as with its own overlayfs.

#![allow(clippy::unwrap_used)]

use std::{
    fs::{self, File},
    io::Write,
    os::unix::fs::symlink,
    path::Path,
    process::{Child, Command, Stdio},
};

use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use testkit::{
    Burgeon, Estargz, OciLayout, PATIENCE, Registry, Space, go_tests, skopeo_copy, wait_until,
};

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
    fn start(space: &'a Space, trust: &[&str]) -> Self {
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
        let snapshotter = Some(serve(space, trust));
        let mut containerd = Command::new("containerd");
        containerd.arg("--config").arg(config).stderr(File::create(space.path("c.log")).unwrap());
        let node = Self { space, snapshotter, _containerd: start(&mut containerd) };
        assert!(wait_until(PATIENCE, || node.ctr(&["version"]).is_ok()), "containerd does not run");
        node
    }

    /// Kills the snapshotter, starts it again, and waits until containerd has connected to it, which
    /// gRPC does after a moment.
    fn serve(&mut self, trust: &[&str]) {
        self.snapshotter = None;
        self.snapshotter = Some(serve(self.space, trust));
        let probe = |verb: &str| {
            self.ctr(&["snapshots", "--snapshotter", "burgeon", verb, "probe"]).is_ok()
        };
        assert!(wait_until(PATIENCE, || probe("prepare")), "containerd does not come back");
        assert!(probe("rm"));
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

fn serve(space: &Space, trust: &[&str]) -> Running {
    let mut command = Command::new(PROGRAM);
    command.arg("--state-dir").arg(space.path("state")).args(["--config", "none"]);
    command.args(["snapshotter", "--root"]).arg(space.path("root"));
    command.arg("--socket").arg(space.path("s.sock"));
    for pattern in trust {
        command.args(["--trust", pattern]);
    }
    let running = start(command.stderr(File::create(space.path("s.log")).unwrap()));
    let connects = || std::os::unix::net::UnixStream::connect(space.path("s.sock")).is_ok();
    assert!(wait_until(PATIENCE, connects), "the snapshotter does not run");
    running
}

/// An image of two layers with busybox.
fn image(space: &Space) -> OciLayout {
    let layout = OciLayout::new(&space.path("layout")).unwrap();
    let first = |root: &Path| {
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
    layout
}

/// An archive of it.
fn archive(space: &Space) -> String {
    let layout = image(space);
    let archive = space.path("image.tar");
    let mut tar = Command::new("tar");
    tar.arg("-C").arg(layout.folder()).arg("-cf").arg(&archive).arg(".");
    assert!(tar.status().unwrap().success());
    archive.display().to_string()
}

#[test]
fn containers_run_change_and_go_as_on_overlayfs() {
    let space = Space::new("containerd");
    let archive = archive(&space);
    let mut node = Node::start(&space, &[]);
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
    node.serve(&[]);
    let list = node.ctr(&["snapshots", "--snapshotter", "burgeon", "ls"]).unwrap();
    assert!(list.contains("long"), "{list}");
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

/// The unpacked form of a layer of gzip, and its digest.
fn unpacked(layer: &[u8], space: &Space) -> (Vec<u8>, String) {
    let path = space.path("layer.gz");
    fs::write(&path, layer).unwrap();
    let tar = Command::new("gzip").arg("-dc").arg(&path).output().unwrap().stdout;
    let hex: String = Sha256::digest(&tar).iter().map(|byte| format!("{byte:02x}")).collect();
    (tar, format!("sha256:{hex}"))
}

/// The same image with layers of eStargz, in the registry; the digests of its layers.
fn push_estargz(space: &Space, reference: &str) -> Vec<String> {
    let plain = image(space);
    let read = |path: &Path| serde_json::from_slice::<Value>(&fs::read(path).unwrap()).unwrap();
    let blob = |digest: &Value| {
        let hex = digest.as_str().unwrap().strip_prefix("sha256:").unwrap();
        plain.folder().join("blobs/sha256").join(hex)
    };
    let index = read(&plain.folder().join("index.json"));
    let manifest = read(&blob(&index["manifests"][0]["digest"]));
    let layers = manifest["layers"].as_array().unwrap().iter();
    let layers: Vec<_> = layers
        .map(|layer| {
            let (tar, _) = unpacked(&fs::read(blob(&layer["digest"])).unwrap(), space);
            Estargz::new(&tar, 1 << 20, |_| ()).unwrap()
        })
        .collect();
    let diff_ids: Vec<_> = layers.iter().map(|layer| unpacked(&layer.blob, space).1).collect();
    let diff_ids: Vec<_> = diff_ids.iter().map(String::as_str).collect();
    let kind = "application/vnd.oci.image.layer.v1.tar+gzip";
    let blobs: Vec<_> = layers.iter().map(|layer| (kind, layer.blob.clone())).collect();
    let mut digests = Vec::new();
    let annotate = |manifest: &mut Value| {
        for (layer, made) in manifest["layers"].as_array_mut().unwrap().iter_mut().zip(&layers) {
            layer["annotations"] =
                json!({ "containerd.io/snapshot/stargz/toc.digest": made.digest });
            digests.push(layer["digest"].as_str().unwrap().to_owned());
        }
    };
    let folder = space.path("estargz");
    OciLayout::by_hand(&folder, Some(&diff_ids), &blobs, annotate).unwrap();
    let from = format!("oci:{}", folder.display());
    skopeo_copy(&["--preserve-digests"], &from, &format!("docker://{reference}")).unwrap();
    digests
}

#[test]
fn layers_of_trusted_repositories_are_mounted_when_a_container_needs_them() {
    let space = Space::new("containerd-lazy");
    let burgeon = Burgeon::new(PROGRAM, &space);
    let registry = Registry::start(&space.path("registry"), None).unwrap();
    let image = format!("{}/team/app:1", registry.address());
    let layers = push_estargz(&space, &image);
    let mut node = Node::start(&space, &[]);
    let pull = |node: &Node<'_>| {
        let output = Command::new(go_tests("containerd"))
            .args(["-test.run", "^TestPull$"])
            .env("ADDRESS", node.space.path("c.sock"))
            .env("IMAGE", &image)
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success() && said.contains("PASS"), "{said}");
    };
    let kinds = |node: &Node<'_>| -> Vec<String> {
        let kind = |one: &Value| one["kind"].as_str().unwrap().to_owned();
        node.snapshots().iter().map(kind).collect()
    };
    // Not trusted: local layers, and the reason.
    pull(&node);
    assert_eq!(kinds(&node), ["local", "local"]);
    let why = node.snapshots()[0]["why_local"].to_string();
    assert!(why.contains("/team/app is not trusted"), "{why}");
    node.ctr(&["images", "rm", "--sync", &image]).unwrap();
    assert!(wait_until(PATIENCE, || node.snapshots().is_empty()), "{:?}", node.snapshots());
    // Trusted: no layer is fetched, and nothing is mounted.
    let trust = format!("{}/team/*", registry.address());
    node.serve(&[&trust]);
    pull(&node);
    assert_eq!(kinds(&node), ["remote", "remote"], "{:?}", node.snapshots());
    let content = node.ctr(&["content", "ls", "-q"]).unwrap();
    assert!(layers.iter().all(|layer| !content.contains(layer)), "{content}");
    let chains = || space.path("root/chains").read_dir().unwrap().count();
    assert_eq!(chains(), 0);
    // Containers share one mount, which a kill of the snapshotter does not end.
    let run = |node: &Node<'_>, name: &str, script: &str| {
        let options = ["run", "--rm", "--snapshotter", "burgeon", &image, name];
        node.ctr(&[&options[..], &["/bin/sh", "-c", script]].concat()).unwrap()
    };
    assert_eq!(run(&node, "first", "cat /second /etc/changed"), "layerchanged");
    let detached = ["run", "-d", "--snapshotter", "burgeon", &image, "long"];
    node.ctr(&[&detached[..], &["/bin/sleep", "1000"]].concat()).unwrap();
    assert_eq!(chains(), 1);
    assert!(kinds(&node).contains(&"overlay".to_owned()), "{:?}", node.snapshots());
    node.serve(&[]);
    let exec = ["tasks", "exec", "--exec-id", "e", "long"];
    let said = node.ctr(&[&exec[..], &["/bin/sh", "-c", "echo x > /new; cat /etc/owned"]].concat());
    assert_eq!(said.unwrap(), "owned");
    assert_eq!(run(&node, "second", "cat /second"), "layer", "a claimed chain needs no trust");
    // The mount is made again when it is missing, without the registry.
    node.ctr(&["tasks", "rm", "--force", "long"]).unwrap();
    let mount = space.path("root/chains").read_dir().unwrap().next().unwrap().unwrap().path();
    burgeon.ok(&["umount", mount.to_str().unwrap()]);
    drop(registry);
    let diff = node.diff("burgeon", "long");
    assert!(diff.0.iter().any(|line| line.ends_with(" new")), "{diff:?}");
    // Nothing is left once the image is gone.
    node.ctr(&["containers", "rm", "long"]).unwrap();
    node.ctr(&["images", "rm", "--sync", &image]).unwrap();
    assert!(wait_until(PATIENCE, || node.snapshots().is_empty()), "{:?}", node.snapshots());
    assert!(wait_until(PATIENCE, || chains() == 0), "a chain is still mounted");
}

#[test]
fn containerd_takes_the_configuration_of_setup() {
    let space = Space::new("containerd-setup");
    let setup = |options: &[&str]| {
        let mut command = Command::new(PROGRAM);
        command.args([
            "--config",
            "none",
            "--state-dir",
            "/var/lib/burgeon-test",
            "snapshotter",
            "setup",
        ]);
        command.arg("--prefix").arg(space.folder()).args(options).output().unwrap()
    };
    let etc = space.path("etc");
    let said = setup(&["--trust", "registry.example/team/*"]);
    let words = String::from_utf8_lossy(&said.stdout).into_owned();
    assert_eq!(said.status.code(), Some(1), "config.toml is missing: {words}");
    assert!(words.contains("imports = "), "{words}");
    assert!(!etc.exists(), "it writes nothing");
    let said = setup(&["--trust", "registry.example/team/*", "--write"]);
    assert!(said.stderr.is_empty(), "{said:?}");
    let unit = etc.join("systemd/system/burgeon-snapshotter.service.d/trust.conf");
    assert!(fs::read_to_string(&unit).unwrap().contains("--trust registry.example/team/*\n"));
    // Without the option, trust is taken back.
    setup(&["--write"]);
    let text = fs::read_to_string(&unit).unwrap();
    assert!(text.contains(" --state-dir /var/lib/burgeon-test snapshotter"), "{text}");
    assert!(!text.contains("--trust"), "{text}");
    // Imported as an administrator would, at the path that this folder has.
    let config = etc.join("containerd/config.toml");
    let imports = format!("{}/*.toml", etc.join("containerd/conf.d").display());
    fs::write(&config, format!("version = 2\nimports = [\"{imports}\"]\n")).unwrap();
    let mut dump = Command::new("containerd");
    let dump = dump.arg("--config").arg(&config).args(["config", "dump"]).output().unwrap();
    let dump = String::from_utf8(dump.stdout).unwrap();
    let plugin = dump.split("[proxy_plugins.burgeon]").nth(1).unwrap_or_default();
    assert!(plugin.contains("address = \"/run/burgeon/snapshotter.sock\""), "{dump}");
    for line in ["snapshotter = \"burgeon\"", "disable_snapshot_annotations = false"] {
        assert!(dump.lines().any(|other| other.trim() == line), "{line}: {dump}");
    }
    // A section of CRI in config.toml stays in force, and gets its lines from the administrator.
    let section = "[plugins.\"io.containerd.grpc.v1.cri\"]\n  sandbox_image = \"own/pause:1\"\n";
    let imports = "version = 2\nimports = [\"/etc/containerd/conf.d/*.toml\"]\n";
    fs::write(&config, format!("{imports}{section}")).unwrap();
    let said = setup(&["--write"]);
    let words = String::from_utf8_lossy(&said.stdout).into_owned();
    assert!(words.contains("below [plugins.\"io.containerd.grpc.v1.cri\".containerd]"), "{words}");
    let text = fs::read_to_string(etc.join("containerd/conf.d/burgeon.toml")).unwrap();
    assert!(!text.contains("cri"), "{text}");
    let lines = "  [plugins.\"io.containerd.grpc.v1.cri\".containerd]\n    snapshotter = \"burgeon\"\n    \
                 disable_snapshot_annotations = false\n";
    fs::write(&config, format!("{imports}{section}{lines}")).unwrap();
    let said = setup(&[]);
    assert!(!String::from_utf8_lossy(&said.stdout).contains("below [plugins"), "{said:?}");
}
