//! Replaces the running program by this one while mounts are in use.
//!
//! ```text
//!   rehearsal: can this program start here? ─► kill supervisor ─► start one of this program
//!     ─► it adopts the server ─► kill server ─► the supervisor starts another
//! ```
//!
//! All checks precede any kill: the rehearsal, and the program that systemd would start instead of
//! this one.
//!
//! The supervisor first: only a new one starts a new server. Each death makes readers wait, without
//! errors (`crates/cli/tests/kill.rs`); under a `--fast` mount the server's death costs errors, so
//! then the server is left alone (`crates/cli/tests/upgrade.rs`).

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
        protocol::{DaemonStatus, Reply, Request},
    },
    rehearsal::rehearse,
    start,
    state::{
        cache_dir::{CACHE_DIR, CacheDir},
        paths::StateDir,
        record::Transport,
    },
};

/// Time limit for the old supervisor to die, and for systemd to restart the unit: a hundred times
/// its `RestartSec`.
const RESTART_TIMEOUT: Duration = Duration::from_secs(10);
/// Time limit for a new supervisor to adopt the server, or for a new server to serve all mounts: a
/// dead server is replaced within half a second.
const SERVE_TIMEOUT: Duration = Duration::from_secs(60);
const PAUSE: Duration = Duration::from_millis(20);

/// The result of [`upgrade`].
#[derive(Debug)]
pub struct Upgraded {
    /// The daemon's new status.
    pub status: DaemonStatus,
    /// The server was replaced, too. False if a mount is `--fast`: until its umount, the old
    /// program serves.
    pub server_replaced: bool,
}

/// Replaces the daemon's processes by this program's; `None` if no daemon runs.
///
/// Sends nothing to the old daemon, whose version may have another protocol. `Unavailable` if the
/// new one does not come up; then any start of a daemon continues.
pub fn upgrade(state: &StateDir) -> Result<Option<Upgraded>> {
    let Some(old) = Client::connect(state)? else { return Ok(None) };
    prove(state)?;
    // Without systemd this process starts the new one, which shall have the same folder.
    if let Some(dir) = CacheDir::read(state).given(state) {
        start::pass_on(CACHE_DIR, dir.into());
    }
    end(old.supervisor()?)?;
    await_restart(state)?;
    let before = await_serving(state, None)?;
    refuse_another_program(Path::new(&format!("/proc/{}/exe", before.supervisor_pid)))?;
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

/// An error if [`upgrade`] would fail, as far as that can be known; false if no daemon runs.
/// Changes nothing.
pub fn check(state: &StateDir) -> Result<bool> {
    match Client::connect(state)? {
        Some(_) => prove(state).map(|()| true),
        None => Ok(false),
    }
}

fn prove(state: &StateDir) -> Result<()> {
    start::program_of_unit(state).map_or(Ok(()), |program| refuse_another_program(&program))?;
    rehearse(state)
}

/// Waits for systemd to restart the unit whose main process was killed; without systemd starts the
/// daemon itself.
fn await_restart(state: &StateDir) -> Result<()> {
    let deadline = Instant::now() + RESTART_TIMEOUT;
    while Path::new("/run/systemd/system").is_dir() && Instant::now() < deadline {
        if Client::connect(state)?.is_some() {
            return Ok(());
        }
        thread::sleep(PAUSE);
    }
    match Client::connect(state)? {
        Some(_) => Ok(()),
        None => start::start_successor(state),
    }
}

/// Refuses a unit of systemd that starts another program: nothing is lost by it, but nothing is
/// upgraded.
fn refuse_another_program(started: &Path) -> Result<()> {
    let file = |exe: &Path| -> Result<(u64, u64)> {
        let failed = |e| Error::io(format!("cannot look at {}", exe.display()), e);
        let metadata = fs::metadata(exe).map_err(failed)?;
        Ok((metadata.dev(), metadata.ino()))
    };
    if file(started)? == file(Path::new("/proc/self/exe"))? {
        return Ok(());
    }
    let named = fs::read_link(started).unwrap_or_else(|_| started.to_owned());
    Err(unavailable(format!(
        "systemd starts {}, and not this program: install it there, and run `burgeon upgrade` again",
        named.display()
    )))
}

/// Waits until there is a server other than `old`, and all mounts that can be served are.
fn await_serving(state: &StateDir, old: Option<u32>) -> Result<DaemonStatus> {
    let deadline = Instant::now() + SERVE_TIMEOUT;
    loop {
        let status = match Client::connect_or_start(state)?.call(&Request::Status)?.0 {
            Reply::Status(status) => *status,
            _ => {
                return Err(unavailable(
                    "unexpected answer from the daemon: is it of another version? `burgeon upgrade` replaces it",
                ));
            }
        };
        let is_there = status.server_pid.is_some_and(|server| Some(server) != old);
        // A failed mount is not awaited.
        let done = |state: &str| matches!(state, "serving" | "failed" | "let go");
        if is_there && status.mounts.iter().all(|mount| done(&mount.state)) {
            return Ok(status);
        }
        if Instant::now() > deadline {
            return Err(unavailable(
                "the new serving process does not start: `burgeon status` and `burgeon doctor` \
                 say why; readers of data that is not local wait for it",
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

/// Kills `process` and waits until it has ended: until it has closed everything, its socket still
/// accepts connections, but nothing answers them.
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
