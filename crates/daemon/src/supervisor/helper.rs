//! Runs kernel calls that may wait for the server, or that a kill must not interrupt, in a separate
//! process.
//!
//! ```text
//!   supervisor ── Task, descriptors ──────► burgeon __help STATE-DIR: open the FUSE file, attach
//!        ▲                                       │ loops, mount, freeze, change over, thaw, grow
//!        └─────── Outcome, descriptors ──────────┘
//!   no answer in time: the FUSE connection is aborted; its calls fail, and the helper ends
//! ```
//!
//! A thread that waits for a FUSE server in the kernel cannot be killed, and its process keeps
//! every descriptor until the wait is over. In the supervisor that wait would never end, because
//! its own `/dev/fuse` descriptor keeps the connection alive.
//!
//! Mounting a btrfs, scanning for one, and making btrfs forget a device all take one kernel lock
//! (`uuid_mutex`). A mount holds it while it reads the superblocks of its devices, and those of a
//! new mount are answered by its server. So all of these calls are made here, also for mounts of
//! other servers. The supervisor itself only calls `LOOP_GET_STATUS64`, which the kernel answers
//! from the FUSE file's attributes; these are cached for ever (`crates/cli/tests/kill_calls.rs`
//! tests both).
//!
//! A kill must not interrupt a thaw either: a thaw of btrfs reads the superblock again, takes an
//! interrupted read for a changed superblock ("got modified unexpectedly"), and forces the file
//! system read-only (measured on 6.18: within ten kills). A kill of the supervisor does not end its
//! helper.
//!
//! Invariants:
//! - A helper never holds `/dev/fuse` or the state directory's lock. When the supervisor dies and
//!   no other process holds the connection, the helper's calls fail and it ends.
//! - A helper that makes a mount dies with its supervisor; one that freezes or thaws does not.
//! - No call of the supervisor waits for a helper longer than its bound.
//! - A helper is in its sandbox before it opens a file: the kernel parses the images that it
//!   mounts, and the helper the kernel's answers.

pub(crate) mod process;

use std::{
    os::{
        fd::{BorrowedFd, OwnedFd},
        unix::net::UnixStream,
    },
    path::PathBuf,
    process::Child,
    thread,
    time::Duration,
};

use burgeon_block::{Error, ErrorKind, Result};
use serde::{Deserialize, Serialize};

use crate::{
    host::program,
    id::MountId,
    ipc::{protocol::WireError, wire},
    state::paths::StateDir,
    supervisor::{
        exchange::Exchange,
        grow::{Grow, Step},
        plumbing::parts::{MountParts, Plumbed},
    },
};

/// Time limit for a helper. A mount takes milliseconds, and a freeze as long as the writes in
/// progress; the rest allows for a server restart and a busy machine.
const ANSWER_MAX: Duration = Duration::from_secs(120);

/// Time limit for a helper to end after its connection was aborted.
const ABORTED_MAX: Duration = Duration::from_secs(10);

/// A task for a helper.
#[derive(Serialize, Deserialize, Debug)]
#[serde(tag = "task", rename_all = "kebab-case")]
pub(crate) enum Task {
    /// Make the block devices of a mount, and mount them. Over FUSE, the detached mount of the FUSE
    /// file is sent along, or a plain file; the btrfs mount is returned.
    Plumb(MountParts),
    /// Go on with that: the server of the device that was started lives.
    Proceed,
    /// Put the FUSE file of the mount that is sent along below a loop device.
    Exchange(Exchange),
    /// Put the plain file that is sent along below a loop device.
    ChangeToPlain(Exchange),
    /// Try an exchange on a scratch file system.
    TryExchange,
    /// Thaw a file system that an exchange has left frozen.
    Thaw(Exchange),
    /// Make a sprout larger.
    Grow(Grow),
    /// Open the file of the virtual area of the writable file system on `device` and return it.
    OpenArea { device: PathBuf },
    /// Make btrfs forget the loop devices of a mount that has ended, and remove its ublk device.
    Forget { id: MountId, loops: Vec<PathBuf> },
}

/// The result of a task.
#[derive(Serialize, Deserialize, Debug)]
#[serde(tag = "outcome", rename_all = "kebab-case")]
pub(crate) enum Outcome {
    /// The mount's ublk device was started; the helper waits for [`Task::Proceed`].
    Started,
    /// Sent with the mount's descriptor.
    Plumbed(Plumbed),
    Grown {
        step: Step,
    },
    Tried {
        can_exchange: bool,
    },
    /// Sent with the opened file, if the task opens one.
    Done,
    Failed(WireError),
}

/// Runs `task` in a helper. If it does not answer in time, `abort` ends its wait.
pub(crate) fn run(
    state: &StateDir,
    task: &Task,
    fds: &[BorrowedFd<'_>],
    abort: impl FnOnce(),
) -> Result<(Outcome, Vec<OwnedFd>)> {
    run_in_steps(state, task, fds, || Ok(()), abort)
}

/// As [`run`]. When the helper has started a ublk device, it goes on if `may_proceed`, and ends if
/// not: that error is returned.
pub(crate) fn run_in_steps(
    state: &StateDir,
    task: &Task,
    fds: &[BorrowedFd<'_>],
    may_proceed: impl FnOnce() -> Result<()>,
    abort: impl FnOnce(),
) -> Result<(Outcome, Vec<OwnedFd>)> {
    let failed = |e| Error::io("cannot start a process for mounting", e);
    let (ours, theirs) = UnixStream::pair().map_err(failed)?;
    let child = program::start("__help", state.root(), theirs).map_err(failed)?;
    let answer = ask(&ours, task, fds, may_proceed, abort);
    drop(ours);
    reap(child, answer.is_ok());
    match answer? {
        (Outcome::Failed(failure), _) => Err(failure.into()),
        answer => Ok(answer),
    }
}

fn ask(
    stream: &UnixStream,
    task: &Task,
    fds: &[BorrowedFd<'_>],
    may_proceed: impl FnOnce() -> Result<()>,
    abort: impl FnOnce(),
) -> Result<(Outcome, Vec<OwnedFd>)> {
    let failed = |e| Error::io("cannot talk to the process that mounts", e);
    stream.set_read_timeout(Some(ANSWER_MAX)).map_err(failed)?;
    stream.set_write_timeout(Some(ANSWER_MAX)).map_err(failed)?;
    wire::send(stream, task, fds)?;
    let mut answer = wire::receive(stream);
    if let Ok(Some((Outcome::Started, _))) = answer {
        may_proceed()?;
        wire::send(stream, &Task::Proceed, &[])?;
        answer = wire::receive(stream);
    }
    match answer {
        Ok(Some(answer)) => Ok(answer),
        Ok(None) => Err(Error::new(
            ErrorKind::LocalIo,
            "the process that mounts ended early: see the daemon's log and the kernel's (dmesg)",
        )),
        Err(_) => {
            abort();
            stream.set_read_timeout(Some(ABORTED_MAX)).map_err(failed)?;
            // The helper's own error, if there is one, says more.
            if let Ok(Some(answer @ (Outcome::Failed(_), _))) = wire::receive(stream) {
                return Ok(answer);
            }
            Err(Error::new(
                ErrorKind::Unavailable,
                format!(
                    "the kernel does not answer within {} s: the serving process or a disk hangs",
                    ANSWER_MAX.as_secs()
                ),
            ))
        }
    }
}

/// Waits for the helper to end: while it has a mount's descriptor, an umount fails with EBUSY. Does
/// not wait for a helper that has not `answered`, because it may be stuck in the kernel.
fn reap(mut child: Child, answered: bool) {
    let mut wait = move || {
        if let Ok(status) = child.wait()
            && !status.success()
        {
            tracing::warn!(%status, "a helper ended");
        }
    };
    match answered {
        true => wait(),
        false => drop(thread::spawn(wait)),
    }
}
