//! `burgeon doctor --report FILE`: one text file with what support needs to know.
//!
//! ```text
//!   ===== name =====      findings, status, metrics, configuration, the host, the end of the log
//! ```
//!
//! Nothing of it is a secret by design: status and log have none (`crates/cli/tests/health.rs`).
//! Still `redact` masks what looks like one, because names, messages of servers and configurations
//! come from outside. Invariants: each part is bounded; a part that cannot be had says so; the file
//! is new, and its owner's alone.

use std::{
    fmt::Write as _,
    fs::{self, File, OpenOptions},
    io::{self, Read, Seek, SeekFrom, Write as _},
    os::unix::fs::OpenOptionsExt,
    path::Path,
    process::{Command, Stdio},
    time::Duration,
};

use anyhow::{Context as _, Result};
use burgeon_block::Error;
use burgeon_daemon::{
    Client,
    doctor::Finding,
    protocol::{Reply, Request},
    status_socket,
};
use burgeon_metrics::Disks;

use super::Context;
use crate::redact;

/// The longest part, in bytes.
const PART_MAX: u64 = 1 << 20;

/// The longest wait for the daemon's status.
const ANSWER_MAX: Duration = Duration::from_secs(3);

/// Lines of the journal.
const LINES: &str = "2000";

/// Writes the report.
pub(super) fn write(context: &Context, findings: &[Finding], path: &Path) -> Result<()> {
    let failed = || format!("cannot write the report {}", path.display());
    let written = |e| Error::io(failed(), e);
    let mut options = OpenOptions::new();
    let made = options.write(true).create_new(true).mode(0o600).open(path);
    if made.as_ref().is_err_and(|e| e.kind() == io::ErrorKind::AlreadyExists) {
        anyhow::bail!("{}: a file is there already; name another one, or remove it", failed());
    }
    let mut file = made.map_err(written)?;
    let mut text = String::new();
    for (name, part) in parts(context, findings) {
        let part = part.unwrap_or_else(|error| format!("not there: {error:#}"));
        let _ = writeln!(text, "===== {name} =====\n{}\n", redact::text(part.trim_end()));
    }
    // A part of it would keep the next attempt from this name.
    let done = file.write_all(text.as_bytes()).and_then(|()| file.sync_all());
    done.inspect_err(|_| drop(fs::remove_file(path))).map_err(written)?;
    Ok(())
}

fn parts(context: &Context, findings: &[Finding]) -> Vec<(&'static str, Result<String>)> {
    let root = context.state.root();
    let unit = [
        "show",
        "burgeon.service",
        "--property=LoadState,ActiveState,SubState,NRestarts,\
        MainPID,Result,FragmentPath,DropInPaths,ExecMainStatus,MemoryCurrent,TasksCurrent",
    ];
    let journal = ["--no-pager", "--output=short-iso", "--lines", LINES, "--unit", "burgeon*"];
    vec![
        ("version", Ok(format!("burgeon {}, state {}", env!("CARGO_PKG_VERSION"), root.display()))),
        ("findings", Ok(serde_json::to_string_pretty(findings).unwrap_or_default())),
        ("status", status(context)),
        ("metrics", metrics(root)),
        ("configuration", Ok(configuration(context))),
        ("kernel", read(Path::new("/proc/version"))),
        ("distribution", read(Path::new("/etc/os-release"))),
        ("memory", read(Path::new("/proc/meminfo"))),
        ("load", read(Path::new("/proc/loadavg"))),
        ("file systems", read(Path::new("/proc/filesystems"))),
        ("mounts", read(Path::new("/proc/self/mountinfo")).map(|text| of_btrfs(&text))),
        ("unit", run("systemctl", &unit)),
        ("log", end_of(&context.state.log_file())),
        ("journal", run("journalctl", &journal)),
    ]
}

fn status(context: &Context) -> Result<String> {
    let client = Client::connect(&context.state)?.context("no daemon runs")?;
    client.wait_at_most(ANSWER_MAX);
    match client.call(&Request::Status)?.0 {
        Reply::Status(status) => Ok(serde_json::to_string_pretty(&status)?),
        _ => anyhow::bail!("the daemon is of another version"),
    }
}

fn metrics(state: &Path) -> Result<String> {
    let snapshot = status_socket::ask(&status_socket::path(state))?;
    Ok(burgeon_metrics::render(Some(&snapshot), &Disks::default()))
}

fn configuration(context: &Context) -> String {
    let mut text = String::new();
    for path in &context.config.files {
        let part = read(path).unwrap_or_else(|error| format!("{error:#}"));
        let _ = writeln!(text, "# {}\n{part}", path.display());
    }
    if text.is_empty() { "no file\n".to_owned() } else { text }
}

/// The lines of file systems that Burgeon makes, or could have made.
fn of_btrfs(text: &str) -> String {
    let lines = text.lines().filter(|line| line.contains(" - btrfs ") || line.contains("burgeon"));
    lines.map(|line| format!("{line}\n")).collect()
}

fn read(path: &Path) -> Result<String> {
    let mut bytes = Vec::new();
    File::open(path)?.take(PART_MAX).read_to_end(&mut bytes)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// The end of a log.
fn end_of(path: &Path) -> Result<String> {
    let length = fs::metadata(path)?.len();
    let mut file = File::open(path)?;
    file.seek(SeekFrom::Start(length.saturating_sub(PART_MAX)))?;
    let mut bytes = Vec::new();
    file.take(PART_MAX).read_to_end(&mut bytes)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// The output of a program that asks systemd, within a time.
fn run(program: &str, arguments: &[&str]) -> Result<String> {
    let mut command = Command::new("timeout");
    command.args(["20", program]).args(arguments).stdin(Stdio::null()).stderr(Stdio::null());
    let output = command.output()?;
    anyhow::ensure!(output.status.success(), "{program}: {}", output.status);
    let start = output.stdout.len().saturating_sub(PART_MAX as usize);
    Ok(String::from_utf8_lossy(&output.stdout[start..]).into_owned())
}
