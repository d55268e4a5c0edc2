//! `cargo xtask fail-over`: a cluster of two guests of the lab, with Pacemaker and a Ceph, in which
//! an accelerated RBD image goes from one node to the other: on command, and when a node dies.
//!
//! ```text
//!   network namespace without a way out:  br0 10.99.0.1 ── Ceph
//!                                          ├─ tap1 ── guest lab1 ┐ group: rbd ─► burgeon accelerate ─► ext4
//!                                          └─ tap2 ── guest lab2 ┘ in write-back the cache lies on DRBD
//! ```
//!
//! A node dies by SIGKILL of its emulator, while it writes files and makes each durable. All these
//! files are compared on the other node, and once more on the image without its cache. Guests run
//! `dev/lab/cluster-node`, whose functions this asks for through the shared folder.

mod guest;

use std::{
    fs,
    io::{BufRead, BufReader},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::Instant,
};

use anyhow::{Context, Result, bail, ensure};
use testkit::wait_until;

use self::guest::Guest;

/// Unpacked for the guests alone: installed, they would have others of this machine upgraded.
const PACKAGES: [&str; 8] = [
    "pacemaker",
    "corosync",
    "pacemaker-cli-utils",
    "resource-agents",
    "ceph-resource-agents",
    "drbd-utils",
    "udev",
    "psmisc",
];

/// The network: a bridge with a tap for each guest, and nothing else.
const NETWORK: &str = "
    set -e
    ip link set lo up
    ip link add br0 type bridge
    ip address add 10.99.0.1/24 dev br0
    ip link set br0 up
    for tap in tap1 tap2; do
        ip tuntap add $tap mode tap
        ip link set $tap master br0 up
    done
    echo up
    exec sleep infinity";

#[derive(clap::Args)]
pub(crate) struct Options {
    /// The program, which the guests run.
    #[arg(long)]
    burgeon: PathBuf,
    /// write-through, with a cache on each node, or write-back, with one cache on DRBD; both by
    /// default.
    #[arg(long, value_parser = ["write-through", "write-back"])]
    mode: Option<String>,
}

pub(crate) fn run(root: &Path, options: &Options) -> Result<()> {
    let program = fs::canonicalize(&options.burgeon)
        .with_context(|| format!("cannot find {}", options.burgeon.display()))?;
    let layer = Command::new(root.join("dev/lab/packages")).args(PACKAGES).output()?;
    ensure!(layer.status.success(), "{}", String::from_utf8_lossy(&layer.stderr));
    let layer = PathBuf::from(String::from_utf8(layer.stdout)?.trim());
    // In the network of the guests it could not download the kernel.
    let boot = Command::new(root.join("dev/lab/run")).args(["6.12", "true"]).status()?;
    ensure!(boot.success(), "the lab does not work");
    let modes = match &options.mode {
        Some(mode) => vec![mode.as_str()],
        None => vec!["write-through", "write-back"],
    };
    for mode in modes {
        let out = root.join("target/lab/fail-over").join(mode);
        if out.exists() {
            fs::remove_dir_all(&out)?;
        }
        fs::create_dir_all(&out)?;
        println!("fail-over in {mode}; logs in {}", out.display());
        let cluster = Cluster { network: Network::make(root, &out)?, mode, began: Instant::now() };
        cluster.network.start_ceph()?;
        let start = |number| Guest::start(&cluster.network, number, &program, &layer);
        let mut guests = [start(1)?, start(2)?];
        let result = cluster.run(&mut guests);
        if result.is_err() {
            guests.iter().for_each(Guest::tell);
        }
        result?;
        fs::write(out.join("quit"), "")?;
        guests.into_iter().try_for_each(Guest::wait)?;
    }
    println!("fail-over: all files that were durable are there");
    Ok(())
}

/// The namespace, and the Ceph in it.
struct Network {
    holder: Child,
    root: PathBuf,
    /// The folder that the guests share.
    out: PathBuf,
}

impl Network {
    fn make(root: &Path, out: &Path) -> Result<Self> {
        let mut hold = Command::new("unshare");
        let mut holder =
            hold.args(["--net", "sh", "-c", NETWORK]).stdout(Stdio::piped()).spawn()?;
        let stdout = holder.stdout.take().context("there is no output")?;
        let network = Self { holder, root: root.to_owned(), out: out.to_owned() };
        let mut line = String::new();
        BufReader::new(stdout).read_line(&mut line)?;
        ensure!(line == "up\n", "cannot make the network of the guests");
        Ok(network)
    }

    /// A program in it.
    fn command(&self, program: impl AsRef<Path>) -> Command {
        let mut command = Command::new("nsenter");
        command.arg(format!("--net=/proc/{}/ns/net", self.holder.id())).arg(program.as_ref());
        command.env("CEPH_CONF", self.ceph().join("ceph.conf")).stdin(Stdio::null());
        command
    }

    fn ceph(&self) -> PathBuf {
        self.out.join("ceph")
    }

    fn start_ceph(&self) -> Result<()> {
        let mut start = self.command(self.root.join("dev/ceph"));
        let started =
            start.arg("start").arg(self.ceph()).env("CEPH_ADDRESS", "10.99.0.1").status()?;
        ensure!(started.success(), "Ceph does not start");
        let made = self.command("rbd").args(["create", "--size", "512M", "img"]).status()?;
        ensure!(made.success(), "cannot make an image");
        Ok(())
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        let mut stop = self.command(self.root.join("dev/ceph"));
        let _ = stop.arg("stop").arg(self.ceph()).status();
        let _ = self.holder.kill();
        let _ = self.holder.wait();
    }
}

struct Cluster<'a> {
    network: Network,
    mode: &'a str,
    began: Instant,
}

impl Cluster<'_> {
    /// Asks a guest, and shows the answer.
    fn ask(&self, guest: &mut Guest, words: &str) -> Result<String> {
        let said = guest.ask(words)?;
        let seconds = self.began.elapsed().as_secs();
        println!("  {seconds:>4} s  {}: {words}", guest.name());
        said.lines()
            .filter(|line| !line.is_empty())
            .for_each(|line| println!("            {line}"));
        Ok(said)
    }

    fn run(&self, guests: &mut [Guest; 2]) -> Result<()> {
        let [lab1, lab2] = guests;
        let is_write_back = self.mode == "write-back";
        for guest in [&mut *lab1, &mut *lab2] {
            self.ask(guest, "prepare")?;
            self.ask(guest, if is_write_back { "configure_drbd" } else { "make_cache" })?;
        }
        if is_write_back {
            self.ask(lab1, "make_drbd_cache")?;
        }
        self.ask(lab1, "make_file_system")?;
        // Each waits for the other.
        lab1.begin_to_ask("begin")?;
        self.ask(lab2, "begin")?;
        lab1.answer()?;
        self.ask(lab1, &format!("load {}", self.mode))?;
        self.ask(lab1, "status")?;

        println!("  a move on command");
        if is_write_back {
            self.ask(lab1, "drbd_synced")?;
        }
        self.ask(lab1, "write_files 1 20")?;
        self.ask(lab1, "standby lab1 on")?;
        self.ask(lab2, "await lab2")?;
        self.ask(lab2, "check_files")?;
        self.ask(lab1, "standby lab1 off")?;

        println!("  the death of the node that writes");
        if is_write_back {
            self.ask(lab2, "drbd_synced")?;
        }
        self.ask(lab2, "write_on")?;
        let files = || self.durable().saturating_sub(20);
        ensure!(wait_until(guest::LIMIT, || files() >= 30), "only {} files are written", files());
        if is_write_back {
            let dirty: u64 = self.ask(lab2, "dirty")?.trim().parse()?;
            ensure!(dirty > 0, "the cache has no dirty blocks, so it shows nothing");
        }
        lab2.kill()?;
        self.ask(lab1, "await lab1")?;
        println!("  {} files were durable", self.durable());
        self.ask(lab1, "check_files")?;
        self.ask(lab1, "status")?;
        self.ask(lab1, "write_files 21 30")?;
        self.ask(lab1, "check_image")?;
        if !is_write_back {
            self.ask(lab1, "ocf_tester")?;
        }
        Ok(())
    }

    /// Files that a guest has made durable.
    fn durable(&self) -> usize {
        let listed = fs::read_to_string(self.network.out.join("fsynced")).unwrap_or_default();
        listed.lines().count()
    }
}

/// An error that names the guest, and has what it said.
fn failed(guest: &str, words: &str, said: &str) -> Result<String> {
    bail!("{guest}: {words} fails:\n{said}")
}
