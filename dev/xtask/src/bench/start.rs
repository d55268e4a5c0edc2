//! Cold starts of real programs over a network: time to ready, bytes, requests.
//!
//! ```text
//!   nginx ──► link: 20 ms, 200 Mbit/s ──► download and unpack ─┐
//!                                    └──► mount ───────────────┴─► chroot: the program ─► ready
//! ```
//!
//! One Debian tree with all of the programs, so that each reads a small part of it. Everything but
//! the page cache of the served files is cold: a new state directory each time, whose daemon runs
//! (on a tiny image) before the clock starts. `needed` is what the link has to carry at least: the
//! manifest, and the stored chunks that the profile names.

use std::{
    fs,
    io::{BufRead, BufReader},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;
use testkit::{Link, WebServer};

use super::{
    Bench,
    burgeon::Burgeon,
    machine::{Mount, finish, mount, run, tmpfs, wait_until},
    median,
    table::{Aim, Table},
};

const LATENCY: Duration = Duration::from_millis(20);
const BYTES_PER_SECOND: u64 = 200_000_000 / 8;
/// What the tree holds besides a minimal Debian.
const PACKAGES: &str = "python3-pandas,nodejs,openjdk-17-jre-headless,postgresql-15";
/// A database that the server starts on, in the tree.
const DATABASE: &str = "srv/db";
const POSTGRES: &str = "/usr/lib/postgresql/15/bin";

/// A program to be started.
struct Program {
    name: &'static str,
    user: &'static str,
    command: &'static [&'static str],
    /// What it says when it is ready; nothing if it is when it ends.
    ready: Option<&'static str>,
}

const PROGRAMS: [Program; 4] = [
    Program {
        name: "python3, import pandas",
        user: "root",
        command: &["python3", "-c", "import pandas"],
        ready: None,
    },
    Program {
        name: "node",
        user: "root",
        command: &["node", "-e", "require('http').createServer()"],
        ready: None,
    },
    Program { name: "java -version", user: "root", command: &["java", "-version"], ready: None },
    Program {
        name: "postgres",
        user: "postgres",
        command: &[
            "/usr/lib/postgresql/15/bin/postgres",
            "-D",
            "/srv/db",
            "-c",
            "unix_socket_directories=/tmp",
            "-c",
            "listen_addresses=",
        ],
        ready: Some("ready to accept connections"),
    },
];

/// One measured start.
struct Start {
    seconds: f64,
    /// Of these, until it was mounted.
    mounted: f64,
    bytes: u64,
    requests: u64,
}

pub(crate) fn measure(bench: &Bench<'_>, table: &mut Table) -> Result<()> {
    let tree = tree(&bench.options.start_tree)?;
    let served = bench.path("served");
    let store = served.join("store");
    let builder = Burgeon::with_store(&bench.program, bench.path("start-builder"), store.clone());
    builder.run(&["build", &tree.to_string_lossy(), "plain"])?;
    let tiny = bench.path("tiny");
    fs::create_dir_all(&tiny)?;
    fs::write(tiny.join("file"), "tiny")?;
    builder.run(&["build", &tiny.to_string_lossy(), "tiny"])?;
    let archive = served.join("tree.tar.zst");
    let pack = format!("tar -C {tree:?} -c . | zstd -3 -T0 -q -o {archive:?}");
    run("sh", &["-c", &pack])?;
    // Bound to its place in memory: what nginx's user may see.
    let web = WebServer::nginx(&served, &bench.path("start-nginx"))?;
    let stage = Stage { bench, web, store, tree };
    for program in &PROGRAMS {
        stage.measure(program, table).with_context(|| format!("starting {}", program.name))?;
    }
    Ok(())
}

/// The tree, made with debootstrap where it is missing.
fn tree(path: &Path) -> Result<PathBuf> {
    if !path.join(DATABASE).join("PG_VERSION").exists() {
        let shown = path.to_string_lossy();
        if !path.join("usr/bin/node").exists() {
            let include = format!("--include={PACKAGES}");
            run("debootstrap", &["--variant=minbase", &include, "bookworm", &shown])?;
        }
        let initdb = format!(
            "apt-get clean && install -d -o postgres -g postgres /{DATABASE} && \
             setpriv --reuid postgres --regid postgres --clear-groups {POSTGRES}/initdb --no-sync \
             --locale=C -D /{DATABASE}"
        );
        run("chroot", &[&shown, "sh", "-c", &initdb])?;
    }
    Ok(path.canonicalize()?)
}

/// What all measurements share.
struct Stage<'a> {
    bench: &'a Bench<'a>,
    web: WebServer,
    store: PathBuf,
    tree: PathBuf,
}

impl Stage<'_> {
    fn measure(&self, program: &Program, table: &mut Table) -> Result<()> {
        let profile = self.record(program)?;
        let ordered = format!("ordered-{}", program.command[0].rsplit('/').next().unwrap_or(""));
        let builder = self.builder();
        let (tree, file) = (self.tree.to_string_lossy(), profile.to_string_lossy());
        builder.run(&["build", &tree, &ordered, "--profile", &file])?;
        let (mut unpacked, mut lazy, mut led, mut packed) = (vec![], vec![], vec![], vec![]);
        let (mut needed, mut needed_packed, mut warm) = (0, 0, vec![]);
        for round in 0..self.bench.options.rounds {
            unpacked.push(self.unpack(program)?);
            lazy.push(self.mount(program, round, "plain", "none")?.0);
            let (start, bytes) = self.mount(program, round, "plain", &file)?;
            (needed, _) = (bytes, led.push(start));
            let (start, bytes) = self.mount(program, round, &ordered, "auto")?;
            (needed_packed, _) = (bytes, packed.push(start));
            warm.push(self.warm(program)?);
        }
        let seconds =
            |starts: &[Start]| median(&starts.iter().map(|s| s.seconds).collect::<Vec<_>>());
        let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
        let note = |starts: &[Start]| {
            let Some(last) = starts.last() else { return String::new() };
            let mount = match last.mounted {
                0.0 => String::new(),
                mounted => format!("; mounted after {mounted:.2} s"),
            };
            format!("{:.1} MiB, {} requests{mount}", mib(last.bytes), last.requests)
        };
        let bound = |bytes: u64| bytes as f64 / BYTES_PER_SECOND as f64 + LATENCY.as_secs_f64();
        let (unpack, without) = (seconds(&unpacked), seconds(&lazy));
        let (with, with_packed) = (seconds(&led), seconds(&packed));
        let share = mib(needed) / mib(unpacked.last().map_or(1, |start| start.bytes)) * 100.0;
        table.heading(format!(
            "Cold start at 20 ms and 200 Mbit/s: {} ({share:.1} % of the image is read)",
            program.name
        ));
        table.row("download and unpack (tar.zst)", unpack, "s", Aim::None, note(&unpacked));
        table.row("lazy, no profile", without, "s", Aim::None, note(&lazy));
        table.row("lazy, profile", with, "s", Aim::None, note(&led));
        table.row("lazy, profile, built by it", with_packed, "s", Aim::None, note(&packed));
        let text =
            format!("{:.1} MiB needed; {:.2} s when all is in memory", mib(needed), median(&warm));
        table.row("bound", bound(needed), "s", Aim::None, text);
        let text = format!("{:.1} MiB needed", mib(needed_packed));
        table.row("bound, built by the profile", bound(needed_packed), "s", Aim::None, text);
        table.row("no profile ÷ download and unpack", without / unpack, "x", Aim::AtMost(0.3), "");
        table.row("profile ÷ bound", with / bound(needed), "x", Aim::AtMost(1.2), "");
        let ratio = with_packed / bound(needed_packed);
        table.row("profile, built by it ÷ bound", ratio, "x", Aim::AtMost(1.2), "");
        table.row("profile, built by it ÷ no profile", with_packed / without, "x", Aim::None, "");
        Ok(())
    }

    fn builder(&self) -> Burgeon {
        let state = self.bench.path("start-builder");
        Burgeon::with_store(&self.bench.program, state, self.store.clone())
    }

    /// The profile of one start, from a mount whose store is near.
    fn record(&self, program: &Program) -> Result<PathBuf> {
        let file = self.bench.path("recorded");
        let (at, burgeon) = (self.bench.path("record-at"), self.builder());
        fs::create_dir_all(&at)?;
        let shown = at.to_string_lossy().into_owned();
        burgeon.run(&["mount", "plain", &shown, "--write-limit", "512M", "--profile", "none"])?;
        {
            let _proc = prepare(&at)?;
            let output = file.to_string_lossy().into_owned();
            let mut arguments = vec!["record", &shown, "--output", &output, "--"];
            let inner = chroot(program, &at);
            arguments.extend(inner.iter().map(String::as_str));
            let mut command = burgeon.command(&arguments);
            run_to_ready(&mut command, program)?;
        }
        burgeon.umount(&at)?;
        ensure!(file.exists(), "nothing was recorded");
        Ok(file)
    }

    fn link(&self) -> Result<Link> {
        Ok(Link::new(self.web.address(), LATENCY, BYTES_PER_SECOND)?)
    }

    fn unpack(&self, program: &Program) -> Result<Start> {
        let link = self.link()?;
        let at = self.bench.path("unpacked");
        let memory = tmpfs(&at)?;
        let begun = Instant::now();
        let url = format!("http://{}/tree.tar.zst", link.address());
        let unpack = format!("curl -sSf {url} | zstd -dc | tar -x -C {at:?}");
        run("sh", &["-c", &unpack])?;
        let seconds = start(program, &at, begun)?;
        drop(memory);
        Ok(Start { seconds, mounted: 0.0, bytes: link.bytes(), requests: link.requests() })
    }

    /// The start from a mount that has nothing, and the bytes that it needed at least.
    fn mount(
        &self,
        program: &Program,
        round: usize,
        image: &str,
        profile: &str,
    ) -> Result<(Start, u64)> {
        let state = self.bench.path("start-state");
        let _ = fs::remove_dir_all(&state);
        let link = self.link()?;
        let near = Burgeon::with_store(&self.bench.program, state.clone(), self.store.clone());
        near.mount("tiny", &self.bench.path("tiny-at"))?;
        let url = format!("http://{}/store", link.address());
        let burgeon = Burgeon::with_store(&self.bench.program, state, url.into());
        let at = self.bench.path(&format!("start-at-{round}"));
        fs::create_dir_all(&at)?;
        let shown = at.to_string_lossy().into_owned();
        // Room for writes is reserved, which takes its time in memory: a server alone writes.
        let writes: &[&str] = match program.ready {
            Some(_) => &["--write-limit", "256M"],
            None => &["--read-only"],
        };
        let begun = Instant::now();
        burgeon.run(&[&["mount", image, &shown, "--profile", profile][..], writes].concat())?;
        let mounted = begun.elapsed().as_secs_f64();
        let seconds = start(program, &at, begun)?;
        let start = Start { seconds, mounted, bytes: link.bytes(), requests: link.requests() };
        let done = || {
            let status = burgeon.status().unwrap_or_default();
            let state = find(&status, &at)["profile"]["state"].clone();
            state == "done" || state.is_null()
        };
        wait_until("the profile", done)?;
        let fetched = find(&burgeon.status()?, &at)["profile"]["fetched_bytes"].as_u64();
        let images: Value = serde_json::from_str(&burgeon.run(&["inspect", image, "--json"])?)?;
        let manifest = images["image"]["manifest_bytes"].as_u64();
        burgeon.umount(&at)?;
        burgeon.umount(&self.bench.path("tiny-at"))?;
        Ok((start, fetched.unwrap_or(0) + manifest.unwrap_or(0)))
    }

    /// Seconds of a start from memory.
    fn warm(&self, program: &Program) -> Result<f64> {
        let at = self.bench.path("warm");
        let _memory = tmpfs(&at)?;
        run("cp", &["-a", &format!("{}/.", self.tree.display()), &at.to_string_lossy()])?;
        start(program, &at, Instant::now())?;
        start(program, &at, Instant::now())
    }
}

fn find(status: &Value, at: &Path) -> Value {
    let mounts = status["mounts"].as_array().cloned().unwrap_or_default();
    let target = at.to_string_lossy();
    mounts.into_iter().find(|mount| mount["target"] == *target).unwrap_or_default()
}

/// What the programs want of a root.
fn prepare(root: &Path) -> Result<Mount> {
    let _ = fs::remove_file(root.join(DATABASE).join("postmaster.pid"));
    mount(&["-t", "proc", "proc"], &root.join("proc"))
}

fn chroot(program: &Program, root: &Path) -> Vec<String> {
    let user = format!("--userspec={}", program.user);
    let root = root.to_string_lossy();
    let words = ["chroot", &user, &root].into_iter().chain(program.command.iter().copied());
    words.map(str::to_owned).collect()
}

/// Starts `program` in `root`; seconds from `begun` until it was ready.
fn start(program: &Program, root: &Path, begun: Instant) -> Result<f64> {
    let _proc = prepare(root)?;
    let words = chroot(program, root);
    let mut command = Command::new(&words[0]);
    command.args(&words[1..]).env_clear().env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin");
    let at = run_to_ready(&mut command, program)?;
    Ok((at - begun).as_secs_f64())
}

/// Runs `command` until `program` is ready in it, then to its end.
fn run_to_ready(command: &mut Command, program: &Program) -> Result<Instant> {
    let Some(ready) = program.ready else {
        let output = command.stdin(Stdio::null()).output();
        finish(output, program.name)?;
        return Ok(Instant::now());
    };
    let mut child =
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped()).spawn()?;
    let lines = child.stderr.take().map(BufReader::new).into_iter().flat_map(BufRead::lines);
    let mut at = None;
    let mut said = String::new();
    for line in lines {
        let line = line?;
        if at.is_none() && line.contains(ready) {
            at = Some(Instant::now());
            end(&child, program)?;
        }
        said = line;
    }
    child.wait()?;
    match at {
        Some(at) => Ok(at),
        None => bail!("{} never became ready: {said}", program.name),
    }
}

/// Tells the server below `child`, which may be ours or a recorder's, to end.
fn end(child: &Child, program: &Program) -> Result<()> {
    let name = program.command[0].rsplit('/').next().unwrap_or_default();
    let below = run("pgrep", &["-o", "-x", name]).unwrap_or_default();
    let id = below.trim().parse().unwrap_or(child.id() as libc::pid_t);
    // SAFETY: only sends a signal; in the benchmark's own namespace of processes there is no other
    // program of this name.
    unsafe { libc::kill(id, libc::SIGINT) };
    Ok(())
}
