//! The programs that are started, the tree that they are in, and when they are ready.

use std::{
    fs,
    io::{BufRead, BufReader},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::Instant,
};

use anyhow::{Result, bail};

use crate::bench::machine::{Mount, finish, mount, run};

/// The packages of the tree in addition to a minimal Debian.
const PACKAGES: &str = "python3-pandas,nodejs,openjdk-17-jre-headless,postgresql-15";
/// A database that the server starts on, in the tree.
const DATABASE: &str = "srv/db";
const POSTGRES: &str = "/usr/lib/postgresql/15/bin";

/// A program to be started.
pub(in crate::bench) struct Program {
    pub(in crate::bench) name: &'static str,
    pub(in crate::bench) user: &'static str,
    pub(in crate::bench) command: &'static [&'static str],
    /// Its output when it is ready; empty if it is ready when it ends.
    pub(in crate::bench) ready: Option<&'static str>,
}

pub(in crate::bench) const PROGRAMS: [Program; 4] = [
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

impl Program {
    /// The name of its file.
    pub(in crate::bench) fn word(&self) -> &str {
        self.command[0].rsplit('/').next().unwrap_or_default()
    }

    /// Options of a mount for its writes. Only a server writes; the others need no room for writes,
    /// whose reservation would take time in memory.
    pub(super) fn writes(&self) -> &'static [&'static str] {
        match self.ready {
            Some(_) => &["--write-limit", "256M"],
            None => &["--read-only"],
        }
    }
}

/// The tree, made with debootstrap where it is missing, and whether it was there.
pub(super) fn tree(path: &Path) -> Result<(PathBuf, bool)> {
    let was_there = path.join(DATABASE).join("PG_VERSION").exists();
    if !was_there {
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
    Ok((path.canonicalize()?, was_there))
}

/// The root that the programs need.
pub(super) fn prepare(root: &Path) -> Result<Mount> {
    let _ = fs::remove_file(root.join(DATABASE).join("postmaster.pid"));
    mount(&["-t", "proc", "proc"], &root.join("proc"))
}

pub(super) fn chroot(program: &Program, root: &Path) -> Vec<String> {
    let user = format!("--userspec={}", program.user);
    let root = root.to_string_lossy();
    let words = ["chroot", &user, &root].into_iter().chain(program.command.iter().copied());
    words.map(str::to_owned).collect()
}

/// Starts `program` in `root`; seconds from `begun` until it was ready.
pub(super) fn start(program: &Program, root: &Path, begun: Instant) -> Result<f64> {
    let _proc = prepare(root)?;
    let words = chroot(program, root);
    let mut command = Command::new(&words[0]);
    command.args(&words[1..]).env_clear().env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin");
    let at = run_to_ready(&mut command, program)?;
    Ok((at - begun).as_secs_f64())
}

/// Runs `command` until `program` is ready in it, then to its end.
pub(super) fn run_to_ready(command: &mut Command, program: &Program) -> Result<Instant> {
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
    let below = run("pgrep", &["-o", "-x", program.word()]).unwrap_or_default();
    let id = below.trim().parse().unwrap_or(child.id() as libc::pid_t);
    // SAFETY: only sends a signal; in the benchmark's own namespace of processes there is no other
    // program of this name.
    unsafe { libc::kill(id, libc::SIGINT) };
    Ok(())
}
