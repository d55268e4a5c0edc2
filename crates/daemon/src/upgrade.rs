//! Putting this program in the place of the one that runs, while mounts are in use.
//!
//! ```text
//!   kill supervisor ─► start one of this program ─► it adopts the server ─► kill server ─► it starts another
//! ```
//!
//! The supervisor first: only a new one starts a new server. Each death costs readers a wait and
//! nothing else (`crates/cli/tests/kill.rs`); under a `--fast` mount the server's costs errors, so
//! there it is left alone (`crates/cli/tests/upgrade.rs`).

use std::{
    fs,
    os::unix::fs::MetadataExt,
    path::Path,
    thread,
    time::{Duration, Instant},
};

use burgeon_block::{Error, ErrorKind, Result};
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    io::Errno,
    process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal},
};

use crate::{
    ipc::{
        client::Client,
        protocol::{Reply, Request, Status},
    },
    state::{paths::StateDir, record::Transport},
};

/// How long the old supervisor may take to die, and systemd to start the unit again: a hundred times
/// its `RestartSec`.
const RESTART_TIMEOUT: Duration = Duration::from_secs(10);
/// How long a new supervisor may take to adopt the server, or a new server to serve all mounts: a
/// server that has died is started within half a second.
const SERVE_TIMEOUT: Duration = Duration::from_secs(60);
const PAUSE: Duration = Duration::from_millis(20);

/// What [`upgrade`] has come to.
#[derive(Debug)]
pub struct Upgraded {
    /// The daemon as it is now.
    pub status: Status,
    /// Whether the serving process was replaced, too. Not if a mount is `--fast`: until that is
    /// unmounted, the old program serves.
    pub server_replaced: bool,
}

/// Replaces the daemon's processes by this program's; `None` if no daemon runs.
///
/// Nothing is asked of the old daemon, whose version may speak otherwise. `Unavailable` if the new
/// one does not come up; then any start of a daemon goes on with it.
pub fn upgrade(state: &StateDir) -> Result<Option<Upgraded>> {
    let Some(old) = Client::connect(state)? else { return Ok(None) };
    end(old.supervisor()?)?;
    await_restart(state)?;
    let before = await_serving(state, None)?;
    refuse_another_program(before.supervisor_pid)?;
    let fast = Transport::Rings { connection: 0 }.name();
    if before.mounts.iter().any(|mount| mount.transport == fast) {
        return Ok(Some(Upgraded { status: before, server_replaced: false }));
    }
    if let Some(server) = before.server_pid {
        end(pid(server)?)?;
    }
    let status = await_serving(state, before.server_pid)?;
    Ok(Some(Upgraded { status, server_replaced: true }))
}

/// systemd starts a unit again whose main process was killed; elsewhere this does it.
fn await_restart(state: &StateDir) -> Result<()> {
    let deadline = Instant::now() + RESTART_TIMEOUT;
    while Path::new("/run/systemd/system").is_dir() && Instant::now() < deadline {
        if Client::connect(state)?.is_some() {
            return Ok(());
        }
        thread::sleep(PAUSE);
    }
    Client::connect_or_start(state).map(drop)
}

/// systemd starts the program that its unit names, which may be another: nothing is lost by it, but
/// nothing is upgraded.
fn refuse_another_program(supervisor: u32) -> Result<()> {
    let exe = format!("/proc/{supervisor}/exe");
    let file = |exe: &str| -> Result<(u64, u64)> {
        let metadata = fs::metadata(exe);
        let metadata = metadata.map_err(|e| Error::io(format!("cannot look at {exe}"), e))?;
        Ok((metadata.dev(), metadata.ino()))
    };
    if file(&exe)? == file("/proc/self/exe")? {
        return Ok(());
    }
    let started = fs::read_link(&exe).unwrap_or_default();
    Err(unavailable(format!(
        "systemd has started {}, and not this program: install it there, and run `burgeon upgrade` \
         again",
        started.display()
    )))
}

/// Waits until there is a server other than `old`, and all that can be served is.
fn await_serving(state: &StateDir, old: Option<u32>) -> Result<Status> {
    let deadline = Instant::now() + SERVE_TIMEOUT;
    loop {
        let status = match Client::connect_or_start(state)?.call(&Request::Status)?.0 {
            Reply::Status(status) => *status,
            _ => return Err(unavailable("the daemon gave an answer to something else")),
        };
        let is_there = status.server_pid.is_some_and(|server| Some(server) != old);
        // A mount that failed is not the server's to wait for.
        let done = |state: &str| matches!(state, "serving" | "failed");
        if is_there && status.mounts.iter().all(|mount| done(&mount.state)) {
            return Ok(status);
        }
        if Instant::now() > deadline {
            return Err(unavailable(
                "the new serving process does not come up: `burgeon status` and `burgeon doctor` \
                 say more, and readers of data that is not local wait until it does",
            ));
        }
        thread::sleep(PAUSE);
    }
}

fn unavailable(what: impl Into<String>) -> Error {
    Error::new(ErrorKind::Unavailable, what)
}

fn pid(number: u32) -> Result<Pid> {
    let pid = i32::try_from(number).ok().and_then(Pid::from_raw);
    pid.ok_or_else(|| unavailable("the daemon names no process of its own"))
}

/// Kills `process` and waits until it is gone: as long as it has not closed everything, its socket
/// takes connections that nobody answers.
fn end(process: Pid) -> Result<()> {
    let failed = |e: Errno| Error::io("cannot end the old daemon's process", e.into());
    let process = match pidfd_open(process, PidfdFlags::empty()) {
        Err(Errno::SRCH) => return Ok(()),
        process => process.map_err(failed)?,
    };
    match pidfd_send_signal(&process, Signal::KILL) {
        Ok(()) | Err(Errno::SRCH) => {}
        Err(e) => return Err(failed(e)),
    }
    let limit = Timespec { tv_sec: RESTART_TIMEOUT.as_secs() as i64, tv_nsec: 0 };
    match poll(&mut [PollFd::new(&process, PollFlags::IN)], Some(&limit)) {
        Ok(0) => Err(unavailable("the old daemon's process does not end")),
        result => result.map(drop).map_err(failed),
    }
}
