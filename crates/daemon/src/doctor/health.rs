//! The health of a running daemon: a few questions that are answered at once, for machines that ask
//! every few seconds. `examine` looks at the whole host, and takes longer.

use std::{
    path::Path,
    thread,
    time::{Duration, Instant},
};

use burgeon_block::Result;

use super::{
    Finding, Level,
    damage::damaged,
    forced_read_only,
    leftovers::{lost_records, orphan_serves, without_supervisor},
    machine::{READ_ONLY, is_read_only},
    unserved,
};
use crate::{
    ipc::{
        client::Client,
        protocol::{DaemonStatus, Reply, Request},
    },
    read_only,
    state::paths::StateDir,
};

/// Interval of asking again while the server is silent.
const PAUSE: Duration = Duration::from_millis(100);

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

/// Asks the daemon; one that does not answer in `patience` is a problem, and so is its server. No
/// daemon is fine as long as nothing is mounted. With `only`, what concerns other mounts is left
/// out, and a path where nothing is mounted is a problem.
pub fn health(state: &StateDir, patience: Duration, only: Option<&Path>) -> Health {
    let mut health = asked(state, patience, only);
    if health.mounts > 0 && is_read_only(state.root()) {
        health.findings.push(Finding::bad(
            Level::Problem,
            "state directory",
            format!("{}: {READ_ONLY}", state.root().display()),
            "nothing is mounted, unmounted cleanly or upgraded, and mounts that write there fail",
            "mount it writable; then `burgeon doctor`",
        ));
    }
    health
}

fn asked(state: &StateDir, patience: Duration, only: Option<&Path>) -> Health {
    let begun = Instant::now();
    match ask(state, patience) {
        Ok(Some(mut status)) => {
            read_only::note(&mut status);
            status.mounts.retain(|mount| only.is_none_or(|only| mount.target == only));
            let mut findings = unserved(&status);
            findings.extend(status.mounts.iter().filter_map(forced_read_only));
            findings.extend(status.mounts.iter().filter_map(damaged));
            findings.extend(server(&status, patience));
            findings.extend(cache(&status));
            if only.is_none() {
                findings.extend(lost_records(state));
            }
            if status.mounts.is_empty() {
                findings.extend(only.map(|path| not_mounted(path, state)));
            }
            Health { is_running: true, mounts: status.mounts.len(), findings }
        }
        Ok(None) => {
            let mounts = super::mounts_without_daemon(state);
            let let_go = super::mounts_let_go(state);
            let waiting = mounts.saturating_sub(let_go.len());
            let finding = (waiting > 0).then(|| match orphan_serves(state) {
                true => without_supervisor(),
                false => Finding::repairable(
                    "daemon",
                    match waiting {
                        1 => "does not run, and 1 mount is in use".to_owned(),
                        more => format!("does not run, and {more} mounts are in use"),
                    },
                    "programs that read data which is not in memory wait or get EIO",
                    "start the daemon, which serves them again",
                ),
            });
            let only = only.filter(|path| !let_go.iter().any(|target| target == path));
            let finding = finding.or_else(|| only.map(|path| not_mounted(path, state)));
            Health { is_running: false, mounts, findings: finding.into_iter().collect() }
        }
        Err(error) => {
            let finding = Finding::bad(
                Level::Problem,
                "daemon",
                match begun.elapsed() < patience {
                    true => format!("has not answered: {error}"),
                    false => format!("does not answer within {} s", patience.as_secs_f32()),
                },
                "no command on mounts works; mounts may still be served",
                "look at its log; `burgeon doctor` examines the host",
            );
            Health { is_running: false, mounts: 0, findings: vec![finding] }
        }
    }
}

fn not_mounted(path: &Path, state: &StateDir) -> Finding {
    Finding::bad(
        Level::Problem,
        &format!("mount {}", path.display()),
        format!("is not a mount of the daemon of {}", state.root().display()),
        "programs see what lies below it",
        "mount it; or give the state directory of its daemon by --state-dir",
    )
}

fn ask(state: &StateDir, patience: Duration) -> Result<Option<DaemonStatus>> {
    let Some(client) = Client::connect(state)? else { return Ok(None) };
    client.wait_at_most(patience);
    ask_for_status(&client, patience)
}

/// The status; `None` for a daemon that gives none. While its server is silent, which a moment of
/// load may explain, asks again.
pub(super) fn ask_for_status(client: &Client, patience: Duration) -> Result<Option<DaemonStatus>> {
    let begun = Instant::now();
    loop {
        let Reply::Status(status) = client.call(&Request::Status)?.0 else { return Ok(None) };
        if status.server_answers || begun.elapsed() >= patience {
            return Ok(Some(*status));
        }
        thread::sleep(PAUSE);
    }
}

/// A server that is missing or silent while something is mounted.
pub(super) fn server(status: &DaemonStatus, patience: Duration) -> Option<Finding> {
    if status.mounts.is_empty() {
        return None;
    }
    let (found, remedy) = match (status.server_pid, status.server_answers) {
        (None, _) => (
            "does not run".to_owned(),
            "it is started again by itself; if it stays so, its log names the cause",
        ),
        (Some(pid), false) => (
            format!("process {pid} does not answer within {} s", patience.as_secs_f32()),
            "look at its log and at its state in `ps`; if it stays so, kill it: another one is \
             started, and readers wait meanwhile",
        ),
        (Some(_), true) => return None,
    };
    let cost = "reads of data that is not in memory wait";
    Some(Finding::bad(Level::Problem, "server", found, cost, remedy))
}

/// A cache that takes nothing fails no read.
pub(super) fn cache(status: &DaemonStatus) -> Option<Finding> {
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
