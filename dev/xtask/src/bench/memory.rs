//! Memory of the daemon's processes with idle mounts.

use std::{fs, io::BufWriter, process::Stdio};

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use super::{
    Bench,
    burgeon::Burgeon,
    table::{Aim, Table},
    trees::small_files,
};

const MOUNTS: usize = 10;
const FILES: u64 = 100_000;

pub(crate) fn measure(bench: &Bench, table: &mut Table) -> Result<()> {
    let burgeon = Burgeon::new(&bench.program, bench.path("memory-state"));
    let mut command = burgeon.command(&["build", "-", "idle"]);
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::null()).spawn()?;
    let mut out = BufWriter::with_capacity(1 << 20, child.stdin.take().context("no stdin")?);
    small_files(&mut out, FILES)?;
    drop(out);
    ensure!(child.wait()?.success(), "burgeon build failed");
    let points: Vec<_> = (0..MOUNTS).map(|n| bench.path(&format!("memory-{n}"))).collect();
    for point in &points {
        burgeon.mount("idle", point)?;
    }
    let status = burgeon.status()?;
    let pids = ["supervisor_pid", "server_pid", "opener_pid"];
    let pids: Vec<u64> = pids.iter().filter_map(|pid| status[*pid].as_u64()).collect();
    ensure!(pids.len() == 3, "status names no processes: {}", Value::to_string(&status));
    let mut sizes = Vec::new();
    for pid in pids {
        sizes.push(proportional_mib(pid)?);
    }
    table.heading(format!("Memory of the daemon, {MOUNTS} idle mounts of {FILES} files"));
    let [supervisor, server, opener] = sizes[..] else { return Ok(()) };
    let note = format!("supervisor {supervisor:.1}, server {server:.1}, opener {opener:.1}");
    table.row("proportional set size", sizes.iter().sum(), "MiB", Aim::AtMost(64.0), note);
    points.iter().try_for_each(|point| burgeon.umount(point))
}

/// A process's share of memory (Pss), in MiB.
fn proportional_mib(pid: u64) -> Result<f64> {
    let path = format!("/proc/{pid}/smaps_rollup");
    let text = fs::read_to_string(&path).with_context(|| path.clone())?;
    let line = text.lines().find_map(|line| line.strip_prefix("Pss:"));
    let kib =
        line.and_then(|rest| rest.split_whitespace().next()).and_then(|n| n.parse::<f64>().ok());
    Ok(kib.with_context(|| format!("no Pss in {path}"))? / 1024.0)
}
