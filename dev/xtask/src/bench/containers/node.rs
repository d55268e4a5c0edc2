//! A node that has nothing: Debian's containerd with CRI, one snapshotter, and the image of
//! sandboxes.
//!
//! ```text
//!   cri (dev/containerd/cri) ──► containerd ──┬─► overlayfs
//!                                             ├─► stargz (dev/stargz)
//!                                             └─► burgeon snapshotter ──► the daemon, which runs already
//! ```
//!
//! Its files lie in a folder on a disk, as those of a node do: in memory, a reservation for writes
//! would take time, and a file would be its own page cache. The folder goes with the node.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, ensure};
use serde::Deserialize;
use testkit::processes_with;

use super::Site;
use crate::bench::{
    burgeon::Burgeon,
    machine::{Background, Folder, run, wait_until},
};

/// A snapshotter, and the form of containers above its layers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Form {
    Overlayfs,
    Stargz,
    /// Burgeon: one mount for all containers, below an overlayfs each.
    Overlay,
    /// Burgeon: a mount for each container.
    Native,
}

impl Form {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Overlayfs => "overlayfs",
            Self::Stargz => "stargz-snapshotter",
            Self::Overlay => "burgeon, overlay",
            Self::Native => "burgeon, native",
        }
    }

    /// The snapshotter, as containerd knows it.
    fn snapshotter(self) -> &'static str {
        match self {
            Self::Overlayfs => "overlayfs",
            Self::Stargz => "stargz",
            Self::Overlay | Self::Native => "burgeon",
        }
    }
}

/// Seconds of a pod's start, as `cri time` prints them.
#[derive(Clone, Deserialize, Debug)]
pub(super) struct Times {
    pub(super) pod: String,
    pub(super) sandbox: f64,
    pub(super) pull: f64,
    pub(super) create: f64,
    pub(super) start: f64,
    /// From the start of the process until the program was ready.
    pub(super) ready: f64,
}

impl Times {
    /// Without the sandbox, which a kubelet makes before it pulls the image.
    pub(super) fn of_cold_pod(&self) -> f64 {
        self.pull + self.create + self.start + self.ready
    }

    /// With the sandbox, where the image is there.
    pub(super) fn of_warm_pod(&self) -> f64 {
        self.sandbox + self.create + self.start + self.ready
    }
}

/// A pod's command, and when it is ready.
pub(super) struct Job<'a> {
    pub(super) user: &'a str,
    pub(super) command: &'a [&'a str],
    /// Its output when it is ready; empty if it is ready when it ends.
    pub(super) ready: &'a str,
}

/// Fields are dropped in this order, after the pods were removed.
pub(super) struct Node<'a> {
    site: &'a Site<'a>,
    _containerd: Background,
    _snapshotter: Option<Background>,
    /// Only of Burgeon: the host's daemon.
    burgeon: Option<Burgeon>,
    folder: Folder,
}

impl<'a> Node<'a> {
    /// With profiles that this host has recorded earlier: files, by the digest of their image.
    pub(super) fn start(site: &'a Site<'a>, form: Form, profile: Option<&Profile>) -> Result<Self> {
        let folder = Folder::new(site.disk.path().join("node"))?;
        let at = folder.path();
        // The files of the node before this one are not written out at this one's expense.
        run("sync", &["--file-system", &at.to_string_lossy()])?;
        let socket = at.join("s.sock");
        let (burgeon, snapshotter) = match form {
            Form::Overlayfs => (None, None),
            Form::Stargz => {
                let mut command = Command::new(&site.stargz.program);
                command.arg(&socket).arg(at.join("stargz"));
                (None, Some(command))
            }
            Form::Overlay | Form::Native => {
                let (burgeon, command) = burgeon(site, at, form, profile)?;
                (Some(burgeon), Some(command))
            }
        };
        let log = |name: &str| fs::File::create(at.join(name));
        let snapshotter = snapshotter.map(|mut command| {
            let started = Background::start(command.stderr(log("snapshotter.log")?))?;
            wait_until("a socket of the snapshotter", || socket.exists())?;
            anyhow::Ok(started)
        });
        let snapshotter = snapshotter.transpose()?;
        let config = at.join("config.toml");
        fs::write(&config, text(at, form, &site.pause))?;
        let mut command = Command::new("containerd");
        command.arg("--config").arg(&config).env("TMPDIR", at).stderr(log("containerd.log")?);
        let containerd = Background::start(&mut command)?;
        let node =
            Self { site, _containerd: containerd, _snapshotter: snapshotter, burgeon, folder };
        wait_until("an answer of CRI", || node.cri(&["pods"]).is_ok())?;
        // On a busy machine, containerd's first attempt to reach a snapshotter may time out.
        if wait_until("a pull", || node.cri(&["pull", &site.pause]).is_ok()).is_err() {
            node.cri(&["pull", &site.pause])?;
        }
        Ok(node)
    }

    /// A call of CRI; its output.
    pub(super) fn cri(&self, words: &[&str]) -> Result<String> {
        let mut command = Command::new(&self.site.cri);
        command.arg(self.folder.path().join("c.sock")).args(words);
        command.env("TMPDIR", self.folder.path());
        crate::bench::machine::finish(command.output(), &format!("cri {}", words[0]))
    }

    /// Starts a pod, after a pull of its image or with the one that is there.
    pub(super) fn pod(&self, name: &str, image: &str, pulls: bool, job: &Job<'_>) -> Result<Times> {
        let pull = if pulls { "pull" } else { "" };
        let words = ["time", name, image, pull, job.user, job.ready];
        let said = self.cri(&[&words[..], job.command].concat()).with_context(|| {
            let log = |name: &str| tail(&self.folder.path().join(name));
            format!("{}\n{}", log("containerd.log"), log("snapshotter.log"))
        })?;
        serde_json::from_str(&said).with_context(|| format!("cri says {said:?}"))
    }

    /// Starts a pod of one container, which goes on.
    pub(super) fn run(&self, name: &str, image: &str, pulls: bool, command: &[&str]) -> Result<()> {
        if pulls {
            self.cri(&["pull", image])?;
        }
        self.cri(&[&["run", name, image][..], command].concat()).map(drop)
    }

    pub(super) fn remove(&self, times: &Times) -> Result<()> {
        self.cri(&["remove", &times.pod]).map(drop)
    }

    /// Kinds of Burgeon's snapshots: `remote`, `overlay`, `native`, `local`.
    pub(super) fn kinds(&self) -> Result<Vec<String>> {
        let Some(burgeon) = &self.burgeon else { return Ok(Vec::new()) };
        let root = self.folder.path().join("root");
        let status = ["--json", "snapshotter", "status", "--root", &root.to_string_lossy()];
        let status: serde_json::Value = serde_json::from_str(&burgeon.run(&status)?)?;
        let all = status["snapshots"].as_array().into_iter().flatten();
        Ok(all.filter_map(|one| Some(one["kind"].as_str()?.to_owned())).collect())
    }
}

impl Drop for Node<'_> {
    fn drop(&mut self) {
        let pods = self.cri(&["pods"]).unwrap_or_default();
        for pod in pods.lines() {
            let _ = self.cri(&["remove", pod]);
        }
    }
}

/// The profile of an image in a file.
pub(super) struct Profile {
    pub(super) file: PathBuf,
    /// The image's digest.
    pub(super) image: String,
}

impl Profile {
    pub(super) fn of(burgeon: &Burgeon, file: PathBuf) -> Result<Self> {
        let shown = burgeon.run(&["--json", "profile", "show", &file.to_string_lossy()])?;
        let shown: serde_json::Value = serde_json::from_str(&shown)?;
        let image = shown["image"].as_str().context("a profile names no image")?.to_owned();
        ensure!(shown["reads"].as_array().is_some_and(|reads| !reads.is_empty()), "it is empty");
        Ok(Self { file, image })
    }
}

/// A daemon that runs, and the command that serves containerd.
fn burgeon(
    site: &Site<'_>,
    at: &Path,
    form: Form,
    profile: Option<&Profile>,
) -> Result<(Burgeon, Command)> {
    let state = at.join("state");
    let burgeon = site.stage.new_host(&state)?;
    // Else a disk that is rather full has an empty cache measured.
    burgeon.run(&["cache", "resize", "--keep-free", "0"])?;
    if let Some(profile) = profile {
        let profiles = state.join("profiles");
        fs::create_dir_all(&profiles)?;
        fs::copy(&profile.file, profiles.join(&profile.image))?;
    }
    let mut command = Command::new(&site.stage.bench.program);
    command.args(["--config", "none", "--state-dir"]).arg(&state);
    command.args(["snapshotter", "--trust", "*", "--containers"]);
    command.arg(if form == Form::Native { "native" } else { "overlay" });
    command.arg("--root").arg(at.join("root")).arg("--socket").arg(at.join("s.sock"));
    command.arg("--content-store").arg(at.join("containerd/io.containerd.content.v1.content"));
    Ok((burgeon, command))
}

/// The configuration of containerd. A machine that measures may lack the privilege to lower the
/// score of a process for the kernel's choice when memory is short.
fn text(at: &Path, form: Form, pause: &str) -> String {
    let (at, name) = (at.display(), form.snapshotter());
    let proxy = match form {
        Form::Overlayfs => String::new(),
        _ => {
            format!("[proxy_plugins.{name}]\n  type = \"snapshot\"\n  address = \"{at}/s.sock\"\n")
        }
    };
    format!(
        r#"
version = 2
root = "{at}/containerd"
state = "{at}/containerd-state"
[grpc]
  address = "{at}/c.sock"
[ttrpc]
  address = "{at}/c.ttrpc"
{proxy}
[plugins."io.containerd.internal.v1.opt"]
  path = "{at}/opt"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{pause}"
  restrict_oom_score_adj = true
  [plugins."io.containerd.grpc.v1.cri".containerd]
    snapshotter = "{name}"
    disable_snapshot_annotations = false
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
      [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
        Root = "{at}/runc"
"#
    )
}

/// The path of a file in the root of the container whose command has this word. Its program may
/// have to be fetched first.
pub(super) fn path_in(word: &str, file: &str) -> Result<PathBuf> {
    let find = || processes_with(Path::new(word)).first().copied();
    wait_until(&format!("a process of the pod {word:?}"), || find().is_some())?;
    let id = find().with_context(|| format!("the process of the pod {word:?} has ended"))?;
    Ok(format!("/proc/{id}/root/{file}").into())
}

/// The last lines of a log.
fn tail(log: &Path) -> String {
    let text = fs::read_to_string(log).unwrap_or_default();
    let lines: Vec<_> = text.lines().collect();
    lines[lines.len().saturating_sub(20)..].join("\n")
}
