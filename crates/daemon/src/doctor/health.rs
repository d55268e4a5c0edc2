//! The health of a running daemon: a few questions that are answered at once, for machines that ask
//! every few seconds. `examine` looks at the whole host, and takes longer.

use std::time::Duration;

use burgeon_block::Result;

use super::{Finding, Level, forced_read_only, unserved};
use crate::{
    ipc::{
        client::Client,
        protocol::{Reply, Request, Status},
    },
    read_only,
    state::paths::StateDir,
};

/// The health of a state directory's daemon.
#[derive(Debug)]
pub struct Health {
    /// A daemon runs and answers.
    pub is_running: bool,
    /// Its mounts, or those that it has left.
    pub mounts: usize,
    /// All that is not as it should be.
    pub findings: Vec<Finding>,
}

impl Health {
    /// True if nothing keeps programs from their data.
    pub fn is_good(&self) -> bool {
        self.findings.iter().all(|finding| finding.level != Level::Problem)
    }
}

/// Asks the daemon; one that does not answer in `patience` is a problem. No daemon is fine as long
/// as nothing is mounted.
pub fn health(state: &StateDir, patience: Duration) -> Health {
    match ask(state, patience) {
        Ok(Some(mut status)) => {
            read_only::note(&mut status);
            let mut findings = unserved(&status);
            findings.extend(status.mounts.iter().filter_map(forced_read_only));
            findings.extend(server(&status));
            findings.extend(cache(&status));
            Health { is_running: true, mounts: status.mounts.len(), findings }
        }
        Ok(None) => {
            let mounts = super::mounts_without_daemon(state);
            let finding = (mounts > 0).then(|| {
                Finding::repairable(
                    "daemon",
                    format!("does not run, and {mounts} mounts are in use"),
                    "programs that read data which is not in memory wait or get EIO",
                    "start the daemon, which serves them again",
                )
            });
            Health { is_running: false, mounts, findings: finding.into_iter().collect() }
        }
        Err(error) => {
            let finding = Finding::bad(
                Level::Problem,
                "daemon",
                format!("does not answer within {} s: {error}", patience.as_secs_f32()),
                "no command on mounts works; mounts may still be served",
                "look at its log; `burgeon doctor` examines the host",
            );
            Health { is_running: false, mounts: 0, findings: vec![finding] }
        }
    }
}

fn ask(state: &StateDir, patience: Duration) -> Result<Option<Status>> {
    let Some(client) = Client::connect(state)? else { return Ok(None) };
    client.wait_at_most(patience)?;
    match client.call(&Request::Status)?.0 {
        Reply::Status(status) => Ok(Some(*status)),
        _ => Ok(None),
    }
}

fn server(status: &Status) -> Option<Finding> {
    let is_missing = status.server_pid.is_none() && !status.mounts.is_empty();
    is_missing.then(|| {
        Finding::bad(
            Level::Problem,
            "server",
            "does not run",
            "reads of data that is not in memory wait",
            "it is started again by itself; if it stays so, its log names the cause",
        )
    })
}

/// A cache that takes nothing fails no read.
fn cache(status: &Status) -> Option<Finding> {
    let caches = status.mounts.iter().filter_map(|mount| mount.cache.as_ref());
    let bad = caches.into_iter().find(|cache| cache.state != "writing")?;
    let reason = bad.reason.as_deref().unwrap_or("its server has said no more");
    Some(Finding::bad(
        Level::Warning,
        "cache",
        format!("{}: {reason}", bad.state),
        "fetched data is not kept, and is fetched again",
        "free space on its disk, or check that disk; `burgeon cache status` shows both",
    ))
}
