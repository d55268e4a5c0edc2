//! `burgeon health`: for orchestrators, an answer within a time limit and an exit code.

use std::{path::PathBuf, process::ExitCode, time::Duration};

use anyhow::Result;
use burgeon_daemon::doctor::health;
use serde_json::json;

use super::{Context, finding::show, without_daemon::no_daemon};
use crate::output;

pub(crate) const EXAMPLES: &str = "\
Examples:
  burgeon health                  exit code 0: everything mounted is served
  burgeon health /mnt/a           the same for one mount
  burgeon health --json --timeout 2

Exit code 1 means that programs wait for data, get EIO, or cannot write because btrfs forced the
mount read-only; that the supervisor of mounts is dead; or that nothing is mounted at the path.
Without a path, a daemon that does not run is fine while nothing is mounted.

`burgeon doctor` examines the whole host.";

#[derive(clap::Args, Debug)]
pub(crate) struct Health {
    /// Only this mount, and what all mounts need
    mount: Option<PathBuf>,
    /// Seconds within which the daemon has to answer
    #[arg(long, value_name = "SECONDS", default_value = "5")]
    #[arg(value_parser = clap::value_parser!(u64).range(1..=600))]
    timeout: u64,
}

pub(super) fn report(context: &Context, options: &Health) -> Result<ExitCode> {
    let patience = Duration::from_secs(options.timeout);
    // A path that does not exist is one where nothing is mounted.
    let mount = options.mount.as_ref().map(|path| path.canonicalize().unwrap_or(path.clone()));
    let health = health(&context.state, patience, mount.as_deref());
    let code = if health.is_good() { ExitCode::SUCCESS } else { ExitCode::FAILURE };
    if context.json {
        output::print_json(&json!({
            "healthy": health.is_good(),
            "running": health.is_running,
            "mounts": health.mounts,
            "findings": health.findings,
        }))?;
        return Ok(code);
    }
    health.findings.iter().for_each(show);
    match (health.is_good(), health.is_running) {
        (true, true) => println!("healthy: mounted and served: {}", health.mounts),
        (true, false) => println!("healthy: {}", no_daemon(context)),
        (false, _) => println!("NOT healthy"),
    }
    Ok(code)
}
