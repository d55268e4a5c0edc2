//! Examines the machine and the leftovers of crashes, and suggests a remedy for each finding.
//!
//! ```text
//!   examine ─┬─ machine     kernel, devices, privileges, space
//!            ├─ cache       its folder, and earlier ones
//!            ├─ damage      of plain files, as btrfs counts it
//!            ├─ leftovers   of dead daemons and killed builds      ◄── repair
//!            └─ writes      named writes; area: the mappings in them
//! ```
//! `health` asks a running daemon a few of these questions, quickly.
//!
//! Repair does the same as any start of the daemon (see `supervisor/recover.rs`): it adopts a
//! server that lost its supervisor, reconnects mounts that lost their server, and removes the
//! folders of mounts that have ended. It also removes the leftovers of killed builds in the store,
//! and ublk devices without a daemon and folder. It never touches `writes/`.

mod area;
mod cache;
mod damage;
mod health;
mod leftovers;
mod machine;
mod writes;

use std::{
    path::Path,
    thread,
    time::{Duration, Instant},
};

use burgeon_block::{Error, ErrorKind, ObjectStore, Result};
use burgeon_source::Directory;
use serde::Serialize;

pub use self::health::{Health, health};
use self::leftovers::{builds, leftover_devices, leftovers, stale_builds};
pub use self::leftovers::{
    mounts_let_go, mounts_without_daemon, orphan_serves as is_served_without_supervisor,
};
use crate::{
    host::{cgroup::remove_leftovers, own_root, system},
    ipc::{
        client::Client,
        protocol::{DaemonStatus, MountStatus, Reply, Request},
    },
    read_only,
    state::{paths::StateDir, record::mount_ids},
    supervisor::remove_unused_loops,
    transport,
};

/// Time limit for a daemon to report its status.
const SILENCE_MAX: Duration = Duration::from_secs(10);

/// Time limit for its server to report.
const SERVER_SILENCE_MAX: Duration = Duration::from_secs(5);

/// Time limit for a new daemon to serve a mount again that has lost its server, and the interval of
/// checks.
const SERVE_MAX: Duration = Duration::from_secs(60);
const PAUSE: Duration = Duration::from_millis(20);

/// Severity of a finding.
#[derive(Serialize, Clone, Copy, PartialEq, Eq, Debug)]
#[serde(rename_all = "kebab-case")]
pub enum Level {
    /// No problem.
    Fine,
    /// Works, but could be better.
    Warning,
    /// Something does not work.
    Problem,
}

/// The result of one check.
#[derive(Serialize, Clone, Debug)]
pub struct Finding {
    /// The subject of the check, in a word or two.
    pub subject: String,
    /// Severity.
    pub level: Level,
    /// The state found.
    pub found: String,
    /// The harm while nobody does anything: every finding that is not fine has this.
    pub cost: Option<String>,
    /// The suggested remedy.
    pub remedy: Option<String>,
    /// True if `--repair` does that.
    pub repairable: bool,
}

impl Finding {
    fn fine(subject: &str, found: impl Into<String>) -> Self {
        Self {
            subject: subject.to_owned(),
            level: Level::Fine,
            found: found.into(),
            cost: None,
            remedy: None,
            repairable: false,
        }
    }

    fn bad(
        level: Level,
        subject: &str,
        found: impl Into<String>,
        cost: &str,
        remedy: &str,
    ) -> Self {
        let (cost, remedy) = (Some(cost.to_owned()), Some(remedy.to_owned()));
        Self { level, cost, remedy, ..Self::fine(subject, found) }
    }

    fn repairable(subject: &str, found: impl Into<String>, cost: &str, remedy: &str) -> Self {
        Self { repairable: true, ..Self::bad(Level::Problem, subject, found, cost, remedy) }
    }
}

/// Runs all checks: this machine, the state directory, and leftovers of builds in `store`, if that
/// is a folder. (In a bucket builds leave nothing but a mark, which expires.)
pub fn examine(state: &StateDir, store: Option<&Path>) -> Vec<Finding> {
    let mut findings = machine::examine(state);
    let mut runs = ask(state);
    let left = leftovers(state, &runs);
    let is_served = matches!(&runs, Ok(Some(status)) if status.server_pid.is_some());
    findings.extend(cache::examine(state, is_served));
    if let Ok(Some(status)) = &mut runs {
        findings.extend(unserved(status));
        findings.extend(status.server_pid.and_then(user_of_server));
        findings.extend(health::server(status, SERVER_SILENCE_MAX));
        findings.extend(health::cache(status));
        findings.extend(leftovers::lost_records(state));
        read_only::note(status);
        findings.extend(status.mounts.iter().filter_map(forced_read_only));
        findings.extend(status.mounts.iter().filter_map(damage::damaged));
    }
    findings.push(daemon(runs));
    findings.extend(left);
    findings.extend(leftover_devices(state));
    findings.extend(store.and_then(builds));
    findings.extend(writes::examine(state));
    findings
}

/// Makes all possible repairs; false if there was nothing to do. Waits for mounts that have lost
/// their server; [`examine`] reports those that are not served then.
pub fn repair(state: &StateDir, store: Option<&Path>) -> Result<bool> {
    let store = store.filter(|store| stale_builds(store) > 0);
    if let Some(store) = store {
        // Removes the leftovers of dead writers before it returns the lease.
        drop(Directory::open(store)?.begin_collect()?);
    }
    let devices = transport::leftover_devices(&mount_ids(state));
    devices.iter().try_for_each(|number| transport::remove_leftover_device(*number))?;
    remove_unused_loops();
    if !leftovers(state, &ask(state)).iter().any(|finding| finding.repairable) {
        let had_cgroup = remove_leftovers(&state.tag());
        return Ok(store.is_some() || !devices.is_empty() || had_cgroup);
    }
    let client = Client::connect_or_start(state)?;
    let begun = Instant::now();
    while begun.elapsed() < SERVE_MAX {
        let Reply::Status(status) = client.call(&Request::Status)?.0 else { break };
        if !status.mounts.iter().any(|mount| mount.state == "recovering") {
            break;
        }
        thread::sleep(PAUSE);
    }
    Ok(true)
}

fn daemon(runs: Result<Option<DaemonStatus>>) -> Finding {
    match runs {
        Ok(Some(_)) => Finding::fine("daemon", "runs and answers"),
        Ok(None) => Finding::fine("daemon", "does not run; `burgeon mount` starts it"),
        Err(e) => Finding::bad(
            Level::Problem,
            "daemon",
            e.to_string(),
            "no command on mounts works; mounts are served",
            "end its processes, then `burgeon doctor --repair`",
        ),
    }
}

/// The status of a running daemon, or `None`, also for one that is ending but still takes
/// connections. An error if it does not answer.
fn ask(state: &StateDir) -> Result<Option<DaemonStatus>> {
    let Some(client) = Client::connect(state)? else { return Ok(None) };
    client.wait_at_most(SILENCE_MAX);
    let asked = Instant::now();
    if let Ok(Some(status)) = health::ask_for_status(&client, SERVER_SILENCE_MAX) {
        return Ok(Some(status));
    }
    if asked.elapsed() < SILENCE_MAX {
        return Ok(None);
    }
    let what = format!("process {} does not answer", client.supervisor()?.as_raw_nonzero());
    Err(Error::new(ErrorKind::Unavailable, what))
}

/// The user whose files the server can reach.
fn user_of_server(server: u32) -> Option<Finding> {
    let user = match system::effective_user(server)? {
        own_root::USER => format!("a user of its own, {}", own_root::USER),
        0 => "root, without capabilities: its log tells why it has no user of its own".to_owned(),
        other => format!("user {other}"),
    };
    Some(Finding::fine("server", user))
}

/// Mounts that the running daemon does not serve.
fn unserved(status: &DaemonStatus) -> Vec<Finding> {
    let finding = |mount: &MountStatus| {
        let subject = format!("mount {}", mount.target.display());
        match mount.state.as_str() {
            "failed" => Some(Finding::bad(
                Level::Problem,
                &subject,
                format!(
                    "is not served: {}",
                    mount.problem.as_deref().unwrap_or("its server has said no more")
                ),
                "reads of data that is not in memory give EIO",
                "remove the cause, and the daemon serves it again by itself; or unmount it and \
                 mount it again",
            )),
            "recovering" => Some(Finding::bad(
                Level::Warning,
                &subject,
                "is not served yet: its server is being started",
                "reads of data that is not in memory wait",
                "run doctor again in a moment; the daemon's log names the cause",
            )),
            _ => None,
        }
    };
    status.mounts.iter().filter_map(finding).collect()
}

fn forced_read_only(mount: &MountStatus) -> Option<Finding> {
    let (found, remedy) = mount.read_only_problem()?;
    let subject = format!("mount {}", mount.target.display());
    Some(Finding::bad(Level::Problem, &subject, found, "nothing can be written to it", remedy))
}

#[cfg(test)]
mod tests {
    use super::{Level, examine, repair};
    use crate::state::{
        paths::StateDir,
        writes::{self, WritesRecord, tests::record},
    };

    #[test]
    fn a_fresh_directory_has_no_leftovers_and_a_stale_folder_is_one() {
        let temp = tempfile::tempdir().unwrap();
        let state = StateDir::open(temp.path()).unwrap();
        assert!(!repair(&state, Some(&state.store())).unwrap());
        std::fs::create_dir(state.mounts().join("0a1b2c3d")).unwrap();
        let findings = examine(&state, Some(&state.store()));
        let stale: Vec<_> = findings.iter().filter(|finding| finding.repairable).collect();
        assert_eq!(stale.len(), 1, "{findings:?}");
        assert_eq!(stale[0].level, Level::Warning);
        assert!(stale[0].subject.contains("0a1b2c3d"));
    }
    #[test]
    fn unused_writes_may_lack_all_files() {
        let temp = tempfile::tempdir().unwrap();
        let state = StateDir::open(temp.path()).unwrap();
        std::fs::create_dir(writes::folder(&state, "b")).unwrap();
        for (sprouted, level) in [(false, Level::Fine), (true, Level::Problem)] {
            writes::publish(&state, &WritesRecord { sprouted, ..record("b") }).unwrap();
            let findings = examine(&state, None);
            let found = findings.iter().find(|finding| finding.subject == "writes b").unwrap();
            assert_eq!(found.level, level, "{found:?}");
        }
    }
}
