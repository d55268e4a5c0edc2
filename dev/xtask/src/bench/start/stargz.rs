//! containerd and stargz-snapshotter: makes eStargz images, and starts programs from them lazily.
//!
//! ```text
//!   ctr-remote rpull ──► containerd ──► stargz (dev/stargz) ──► FUSE, layer by layer ─┐
//!   ctr-remote snapshots prepare ──────────────────────────► overlay on it ◄──────────┘
//! ```
//!
//! Debian's package has `ctr-remote` and no daemon; that is made of Debian's package of its
//! libraries.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
    time::Instant,
};

use anyhow::{Result, ensure};

use super::{Program, Stage, Start, start};
use crate::bench::{
    Bench,
    machine::{Background, mount, run, wait_until},
};

/// The daemon of the snapshotter.
pub(in crate::bench) struct Stargz {
    pub(in crate::bench) program: PathBuf,
}

impl Stargz {
    /// Compiles it.
    pub(in crate::bench) fn make(bench: &Bench<'_>) -> Result<Self> {
        let program = bench.path("stargz");
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../stargz/main.go");
        let mut go = Command::new("/usr/bin/go");
        // Of Debian's packages alone.
        go.env("GOPATH", "/usr/share/gocode").env("GO111MODULE", "off").env("GOFLAGS", "");
        go.env_remove("GOROOT");
        go.env("GOCACHE", bench.path("go-cache"));
        go.args(["build", "-o"]).arg(&program).arg(source);
        crate::bench::machine::finish(go.output(), "go build")?;
        fs::remove_dir_all(bench.path("go-cache"))?;
        Ok(Self { program })
    }

    /// The start from the image `name` of the registry behind `link`, whose only layer has the
    /// chain id `chain`, on a host that has nothing.
    pub(super) fn start(
        &self,
        stage: &Stage<'_>,
        program: &Program,
        link: &testkit::Link,
        (name, chain): (&str, &str),
    ) -> Result<Start> {
        let containerd = Containerd::start(&stage.bench.path("containerd"), Some(&self.program))?;
        let at = stage.bench.path("stargz-at");
        let reference = format!("{}/{name}", link.address());
        let begun = Instant::now();
        let pull = ["images", "rpull", "--plain-http", "--snapshotter", "stargz", &reference];
        containerd.control(&pull)?;
        let snapshot = ["snapshots", "--snapshotter", "stargz", "prepare", "--target"];
        let shown = at.to_string_lossy();
        let said = containerd.control(&[&snapshot[..], &[&shown, "root", chain]].concat())?;
        // `mount -t overlay overlay TARGET -o OPTIONS`
        let options = said.trim().rsplit_once(" -o ").map(|(_, options)| options);
        ensure!(said.contains("-t overlay") && options.is_some(), "ctr-remote said {said:?}");
        let root = mount(&["-t", "overlay", "-o", options.unwrap_or_default(), "overlay"], &at)?;
        let mounted = begun.elapsed().as_secs_f64();
        let seconds = start(program, &at, begun)?;
        let start = Start { seconds, mounted, bytes: link.bytes(), requests: link.requests() };
        drop(root);
        Ok(start)
    }
}

/// A containerd that has nothing. Fields are dropped in this order.
pub(in crate::bench) struct Containerd {
    _snapshotter: Option<Background>,
    _daemon: Background,
    socket: PathBuf,
}

impl Containerd {
    /// With its state in the folder `own`, which is made anew, and with a snapshotter, if any.
    pub(in crate::bench) fn start(own: &Path, snapshotter: Option<&Path>) -> Result<Self> {
        if own.exists() {
            fs::remove_dir_all(own)?;
        }
        fs::create_dir_all(own)?;
        let (shown, proxy) = (own.display(), own.join("stargz.sock"));
        let plugin = match snapshotter {
            Some(_) => {
                format!("[proxy_plugins.stargz]\ntype = \"snapshot\"\naddress = {proxy:?}\n")
            }
            None => String::new(),
        };
        let text = format!(
            "version = 2\nroot = \"{shown}/root\"\nstate = \"{shown}/state\"\n\
             disabled_plugins = [\"io.containerd.grpc.v1.cri\"]\n\
             [grpc]\naddress = \"{shown}/sock\"\n\
             [plugins.\"io.containerd.internal.v1.opt\"]\npath = \"{shown}/opt\"\n{plugin}"
        );
        let config = own.join("config.toml");
        fs::write(&config, text)?;
        let log = |name: &str| fs::File::create(own.join(name));
        let snapshotter = snapshotter.map(|program| {
            let mut command = Command::new(program);
            command.arg(&proxy).arg(own.join("stargz")).stderr(log("stargz.log")?);
            let started = Background::start(&mut command)?;
            wait_until("a socket of the snapshotter", || proxy.exists())?;
            anyhow::Ok(started)
        });
        let snapshotter = snapshotter.transpose()?;
        let mut command = Command::new("containerd");
        command.arg("--config").arg(&config).stderr(log("containerd.log")?);
        let containerd = Self {
            _snapshotter: snapshotter,
            _daemon: Background::start(&mut command)?,
            socket: own.join("sock"),
        };
        wait_until("an answer of containerd", || containerd.control(&["version"]).is_ok())?;
        Ok(containerd)
    }

    /// Makes the eStargz image `to` of the image `from`, both in registries without encryption.
    pub(in crate::bench) fn convert(&self, from: &str, to: &str) -> Result<()> {
        self.control(&["content", "fetch", "--plain-http", from])?;
        self.control(&["images", "convert", "--estargz", "--oci", from, to])?;
        self.control(&["images", "push", "--plain-http", to]).map(drop)
    }

    fn control(&self, arguments: &[&str]) -> Result<String> {
        let socket = self.socket.to_string_lossy();
        run("ctr-remote", &[&["--address", &socket][..], arguments].concat())
    }
}
