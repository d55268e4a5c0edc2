//! containerd with `burgeon snapshotter`, and images for it.

#![allow(clippy::unwrap_used, dead_code, unreachable_pub)]

use std::{
    fs::{self, File},
    os::unix::fs::symlink,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::atomic::{AtomicU32, Ordering},
};

use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use testkit::{Estargz, Mounted, OciLayout, PATIENCE, Space, go_tests, skopeo_copy, wait_until};

pub mod pods;

const PROGRAM: &str = env!("CARGO_BIN_EXE_burgeon");
/// Number of nodes of this process.
static NODES: AtomicU32 = AtomicU32::new(0);
pub const IMAGE: &str = "registry.example/app:latest";

/// Changes of each kind that a container can make.
pub const SCRIPT: &str = "cd /; echo new > new; echo changed > etc/changed; rm etc/removed; \
    rm -r old; mkdir old; echo x > old/x; chmod 711 etc; chown 7:8 etc/owned; \
    mv etc/moved moved; ln -s new link; mkfifo -m 600 pipe; ln etc/linked hard";

/// A process that is killed in the end.
pub struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The configuration, of this version, of a containerd that has Burgeon as a snapshotter, and lacks
/// these plugins.
pub fn without_plugins(space: &Space, version: u32, plugins: &[&str]) -> String {
    let folder = space.folder().display();
    format!(
        r#"
version = {version}
root = "{folder}/containerd"
state = "{folder}/containerd-state"
disabled_plugins = {plugins:?}
[grpc]
  address = "{folder}/c.sock"
[ttrpc]
  address = "{folder}/c.ttrpc"
[proxy_plugins.burgeon]
  type = "snapshot"
  address = "{folder}/s.sock"
"#
    )
}

pub struct Node<'a> {
    pub space: &'a Space,
    pub snapshotter: Option<Running>,
    /// Its own: runc knows containers of all containerds by namespace and name.
    pub namespace: String,
    /// The folder with the programs of containerd; `None`: Debian's.
    programs: Option<PathBuf>,
    config: PathBuf,
    containerd: Option<Running>,
}

impl<'a> Node<'a> {
    pub fn start(space: &'a Space, options: &[&str]) -> Self {
        let config = space.path("containerd.toml");
        let plugins = ["io.containerd.grpc.v1.cri"];
        fs::write(&config, without_plugins(space, 2, &plugins)).unwrap();
        let number = NODES.fetch_add(1, Ordering::Relaxed);
        let namespace = format!("test-{}-{number}", std::process::id());
        Self::configured(space, namespace, config, None, options)
    }

    /// With a configuration, and containerd's programs in a folder.
    pub fn configured(
        space: &'a Space,
        namespace: String,
        config: PathBuf,
        programs: Option<PathBuf>,
        options: &[&str],
    ) -> Self {
        let snapshotter = Some(serve(space, options));
        let mut node = Self { space, snapshotter, namespace, programs, config, containerd: None };
        node.start_containerd();
        node
    }

    /// Kills containerd if it runs, and starts it.
    pub fn start_containerd(&mut self) {
        self.containerd = None;
        let mut containerd = self.program("containerd");
        containerd.arg("--config").arg(&self.config);
        let log = File::options().append(true).create(true).open(self.space.path("c.log"));
        self.containerd = Some(start(containerd.stderr(log.unwrap())));
        let runs = wait_until(PATIENCE, || self.ctr(&["version"]).is_ok());
        let log = || fs::read_to_string(self.space.path("c.log")).unwrap();
        assert!(runs, "containerd does not run: {}", log());
    }

    /// A program of containerd, which finds the others of its version first.
    pub fn program(&self, name: &str) -> Command {
        let Some(programs) = &self.programs else { return Command::new(name) };
        let mut command = Command::new(programs.join(name));
        let path = std::env::var("PATH").unwrap_or_default();
        command.env("PATH", format!("{}:{path}", programs.display()));
        command
    }

    /// Kills the snapshotter, starts it again, and waits until containerd has connected to it,
    /// which gRPC does after a moment.
    pub fn serve(&mut self, options: &[&str]) {
        self.snapshotter = None;
        self.snapshotter = Some(serve(self.space, options));
        let probe = |verb: &str| {
            self.ctr(&["snapshots", "--snapshotter", "burgeon", verb, "probe"]).is_ok()
        };
        assert!(wait_until(PATIENCE, || probe("prepare")), "containerd does not come back");
        assert!(probe("rm"));
    }

    /// The same where nothing can be made, as on a full disk.
    pub fn serve_unprobed(&mut self, options: &[&str]) {
        self.snapshotter = None;
        self.snapshotter = Some(serve(self.space, options));
        let lists = || self.ctr(&["snapshots", "--snapshotter", "burgeon", "ls"]).is_ok();
        assert!(wait_until(PATIENCE, lists), "containerd does not come back");
    }

    /// Runs `ctr`; its output, or what it said.
    pub fn ctr(&self, arguments: &[&str]) -> Result<String, String> {
        let output = self.ctr_command(arguments).output().unwrap();
        let said = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        match output.status.success() {
            true => Ok(said(&output.stdout)),
            false => Err(said(&output.stderr)),
        }
    }

    /// The command `ctr`.
    pub fn ctr_command(&self, arguments: &[&str]) -> Command {
        let mut command = self.program("ctr");
        command.env("CONTAINERD_NAMESPACE", &self.namespace);
        command.arg("--address").arg(self.space.path("c.sock")).args(arguments);
        command.stdin(Stdio::null());
        command
    }

    pub fn run(&self, snapshotter: &str, name: &str, script: &str) -> String {
        self.run_image(snapshotter, IMAGE, name, script)
    }

    /// The output of `script` in a new container. Not by containerd's pipes: two seconds after the
    /// end it gives up what they still hold.
    pub fn run_image(&self, snapshotter: &str, image: &str, name: &str, script: &str) -> String {
        self.try_run(snapshotter, image, name, script).unwrap()
    }

    fn try_run(
        &self,
        snapshotter: &str,
        image: &str,
        name: &str,
        script: &str,
    ) -> Result<String, String> {
        let folder = self.space.make_folder("said");
        let bound = format!("type=bind,src={},dst=/dev/said,options=rbind:rw", folder.display());
        let options = ["run", "--rm", "--snapshotter", snapshotter, "--mount", &bound];
        let script = format!("{{ {script}; }} > /dev/said/{name}");
        let words = [image, name, "/bin/sh", "-c", &script];
        self.ctr(&[&options[..], &words].concat())?;
        Ok(fs::read_to_string(folder.join(name)).unwrap())
    }

    /// The changes of a stopped container: a line an entry, without its time, and all data.
    pub fn diff(&self, snapshotter: &str, name: &str) -> (Vec<String>, String) {
        let archive = self.space.path("diff.tar.gz");
        let mut diff = self.ctr_command(&["snapshots", "--snapshotter", snapshotter, "diff", name]);
        assert!(diff.stdout(File::create(&archive).unwrap()).status().unwrap().success());
        let tar = |options: &[&str]| {
            let output = Command::new("tar").args(options).arg(&archive).output().unwrap();
            assert!(output.status.success(), "{output:?}");
            String::from_utf8_lossy(&output.stdout).into_owned()
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

    /// Pulls with the labels for remote snapshotters, as kubelet and nerdctl do.
    pub fn pull(&self, image: &str) -> Result<(), String> {
        self.client("^TestPull$", &[("IMAGE", image)])
    }

    /// Commits a container of an image as the image `to`, as nerdctl does.
    pub fn commit(&self, container: &str, image: &str, to: &str) -> Result<(), String> {
        let variables = [("CONTAINER", container), ("IMAGE", image), ("COMMITTED", to)];
        self.client("^TestCommit$", &variables)
    }

    /// Runs what a client of containerd does, in dev/containerd.
    fn client(&self, test: &str, variables: &[(&str, &str)]) -> Result<(), String> {
        let output = Command::new(go_tests("containerd"))
            .args(["-test.run", test])
            .env("ADDRESS", self.space.path("c.sock"))
            .env("CONTAINERD_NAMESPACE", &self.namespace)
            .envs(variables.iter().copied())
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        if output.status.success() && said.contains("PASS") { Ok(()) } else { Err(said) }
    }

    /// Runs a script in a container of `image`.
    pub fn run_in(&self, image: &str, name: &str, script: &str) -> Result<String, String> {
        self.try_run("burgeon", image, name, script)
    }

    /// A new snapshot above the committed one `chain`, mounted as containerd would.
    pub fn mounted(&self, snapshotter: &str, name: &str, chain: &str) -> Mounted {
        let at = self.space.make_folder(name);
        let snapshots = |words: [&str; 3]| {
            self.ctr(&[&["snapshots", "--snapshotter", snapshotter][..], &words].concat())
        };
        snapshots(["prepare", name, chain]).unwrap();
        let script = snapshots(["mounts", at.to_str().unwrap(), name]).unwrap();
        let mounted = Command::new("sh").args(["-c", &script]).status().unwrap().success();
        assert!(mounted, "{script}");
        Mounted::at(&at)
    }

    /// The kinds of all snapshots.
    pub fn kinds(&self) -> Vec<String> {
        let kind = |one: &Value| one["kind"].as_str().unwrap().to_owned();
        self.snapshots().iter().map(kind).collect()
    }

    /// True if containerd has fetched a layer of the image.
    pub fn has_fetched(&self, image: &Pushed) -> bool {
        let content = self.ctr(&["content", "ls", "-q"]).unwrap();
        image.layers.iter().any(|layer| content.contains(layer))
    }

    pub fn snapshots(&self) -> Vec<Value> {
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

pub fn start(command: &mut Command) -> Running {
    Running(command.stdin(Stdio::null()).stdout(Stdio::null()).spawn().unwrap())
}

pub fn serve(space: &Space, options: &[&str]) -> Running {
    let mut command = Command::new(PROGRAM);
    command.arg("--state-dir").arg(space.path("state"));
    if !options.contains(&"--config") {
        command.args(["--config", "none"]);
    }
    command.args(["snapshotter", "--root"]).arg(space.path("root"));
    command.arg("--socket").arg(space.path("s.sock"));
    if !options.contains(&"--containerd") {
        command.arg("--containerd").arg(space.path("c.sock"));
    }
    command.args(options);
    let running = start(command.stderr(File::create(space.path("s.log")).unwrap()));
    let connects = || std::os::unix::net::UnixStream::connect(space.path("s.sock")).is_ok();
    assert!(wait_until(PATIENCE, connects), "the snapshotter does not run");
    running
}

/// An image of two layers with busybox.
pub fn image(space: &Space) -> OciLayout {
    image_with(space, "layout", "layer")
}

/// The same in a folder of its own, with `second` in the file of its second layer.
fn image_with(space: &Space, folder: &str, second: &str) -> OciLayout {
    let layout = OciLayout::new(&space.path(folder)).unwrap();
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
    layout.change(|root| fs::write(root.join("second"), second).unwrap()).unwrap();
    layout
}

/// The unpacked form of a layer of gzip, and its digest.
pub fn unpacked(layer: &[u8], space: &Space) -> (Vec<u8>, String) {
    let path = space.path("layer.gz");
    fs::write(&path, layer).unwrap();
    let tar = Command::new("gzip").arg("-dc").arg(&path).output().unwrap().stdout;
    let hex: String = Sha256::digest(&tar).iter().map(|byte| format!("{byte:02x}")).collect();
    (tar, format!("sha256:{hex}"))
}

/// The chain ID of all these layers.
pub fn chain_of(diff_ids: &[String]) -> String {
    let above = |chain: String, id: &String| {
        let digest = Sha256::digest(format!("{chain} {id}"));
        let hex: String = digest.iter().map(|byte| format!("{byte:02x}")).collect();
        format!("sha256:{hex}")
    };
    diff_ids[1..].iter().fold(diff_ids[0].clone(), above)
}

/// An image in a registry.
pub struct Pushed {
    /// `REGISTRY/REPOSITORY:TAG`.
    pub name: String,
    /// Digest of its manifest.
    pub digest: String,
    /// Digests of its layers.
    pub layers: Vec<String>,
    /// The diff IDs that its configuration states.
    pub diff_ids: Vec<String>,
}

impl Pushed {
    /// As Burgeon's commands name it.
    pub fn reference(&self) -> String {
        format!("oci://{}@{}", self.name.rsplit_once(':').unwrap().0, self.digest)
    }
}

/// The image with layers of eStargz, `second` in its second one, in the registry. Its configuration
/// states its own diff IDs, or `stated`.
pub fn push_estargz(space: &Space, name: &str, second: &str, stated: Option<&[String]>) -> Pushed {
    let plain = image_with(space, &format!("layout-{second}"), second);
    push_estargz_of(space, &plain, name, second, stated)
}

/// The same of another image, through the new folder `estargz-LABEL`.
pub fn push_estargz_of(
    space: &Space,
    plain: &OciLayout,
    name: &str,
    label: &str,
    stated: Option<&[String]>,
) -> Pushed {
    push_listed(space, plain, name, (label, stated), |_| ())
}

/// An image with `second` in its second layer, whose tables of contents `meddle` changes.
pub fn push_meddled(space: &Space, name: &str, second: &str, meddle: fn(&mut Value)) -> Pushed {
    let plain = image_with(space, &format!("layout-{second}"), second);
    push_listed(space, &plain, name, (second, None), meddle)
}

fn push_listed(
    space: &Space,
    plain: &OciLayout,
    name: &str,
    (label, stated): (&str, Option<&[String]>),
    meddle: fn(&mut Value),
) -> Pushed {
    let read = |path: &Path| serde_json::from_slice::<Value>(&fs::read(path).unwrap()).unwrap();
    let blob = |digest: &Value| {
        let hex = digest.as_str().unwrap().strip_prefix("sha256:").unwrap();
        plain.folder().join("blobs/sha256").join(hex)
    };
    let index = read(&plain.folder().join("index.json"));
    let manifest = read(&blob(&index["manifests"][0]["digest"]));
    let layers = manifest["layers"].as_array().unwrap().iter();
    let made: Vec<_> = layers
        .map(|layer| {
            let (tar, _) = unpacked(&fs::read(blob(&layer["digest"])).unwrap(), space);
            Estargz::new(&tar, 1 << 20, meddle).unwrap()
        })
        .collect();
    let own = || made.iter().map(|layer| unpacked(&layer.blob, space).1).collect();
    let diff_ids = stated.map_or_else(own, <[String]>::to_vec);
    let ids: Vec<_> = diff_ids.iter().map(String::as_str).collect();
    let kind = "application/vnd.oci.image.layer.v1.tar+gzip";
    let blobs: Vec<_> = made.iter().map(|layer| (kind, layer.blob.clone())).collect();
    let mut layers = Vec::new();
    let annotate = |manifest: &mut Value| {
        for (layer, made) in manifest["layers"].as_array_mut().unwrap().iter_mut().zip(&made) {
            layer["annotations"] =
                json!({ "containerd.io/snapshot/stargz/toc.digest": made.digest });
            layers.push(layer["digest"].as_str().unwrap().to_owned());
        }
    };
    let folder = space.path(&format!("estargz-{label}"));
    OciLayout::by_hand(&folder, Some(&ids), &blobs, annotate).unwrap();
    let from = format!("oci:{}", folder.display());
    skopeo_copy(&["--preserve-digests"], &from, &format!("docker://{name}")).unwrap();
    let digest =
        read(&folder.join("index.json"))["manifests"][0]["digest"].as_str().unwrap().to_owned();
    Pushed { name: name.to_owned(), digest, layers, diff_ids }
}
