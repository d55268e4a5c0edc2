//! Kernel calls that may wait for the serving process, or that a kill must not cut short, in a
//! process of their own.
//!
//! ```text
//!   supervisor ── Task, descriptors ──────► burgeon __help STATE-DIR: open the FUSE file, attach
//!        ▲                                       │ loops, mount, freeze, change over, thaw, grow
//!        └─────── Outcome, descriptors ──────────┘
//!   no answer in time: the FUSE connection is aborted; its calls fail, and the helper ends
//! ```
//!
//! A thread that waits for a FUSE server in the kernel cannot be killed, and its process keeps every
//! descriptor until the wait is over. If that were the supervisor, whose `/dev/fuse` descriptor keeps
//! the connection alive, the wait would never end.
//!
//! Whoever mounts a btrfs, scans for one, or makes btrfs forget a device waits for one lock of the
//! kernel (`uuid_mutex`), and whoever mounts has it while the superblocks of its devices are read. Those
//! of a mount that is being made come from its server. So all of that is done here, also for mounts
//! that have nothing to do with that server. What the supervisor itself asks of loop devices
//! (`LOOP_GET_STATUS64`) the kernel answers from the FUSE file's attributes, which it knows for ever
//! (`crates/cli/tests/kill_calls.rs` holds both).
//!
//! A kill must not interrupt a thaw either: btrfs reads the superblock again in it, takes a read
//! that was interrupted for a changed superblock ("got modified unexpectedly"), and forces the file
//! system read-only (measured on 6.18: within ten kills). A kill of the supervisor leaves its helper
//! alone.
//!
//! Invariants:
//! - A helper never holds `/dev/fuse` or the state directory's lock. When the supervisor dies and
//!   nobody else holds the connection, the helper's calls fail and it ends.
//! - A helper that makes a mount dies with its supervisor; one that freezes or thaws does not.
//! - No call of the supervisor waits for a helper longer than its bound.

use std::{
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::net::UnixStream,
    },
    path::PathBuf,
    process::{Child, ExitCode, Stdio},
    thread,
    time::Duration,
};

use burgeon_block::{Error, ErrorKind, Result};
use serde::{Deserialize, Serialize};

use crate::{
    host::{
        program::{dies_with_its_parent, this_program},
        signals,
    },
    id::MountId,
    ipc::{protocol::Failure, wire},
    state::paths::StateDir,
    supervisor::{
        exchange::{self, Exchange},
        grow::{self, Grow, Step},
        map,
        plumbing::{self, Parts, Plumbed},
        release,
    },
    transport,
};

/// How long a helper may take. A mount takes milliseconds, and a freeze as long as the writes that
/// are under way; the rest is for a server that is started again, and for a busy machine.
const ANSWER_MAX: Duration = Duration::from_secs(120);

/// How long a helper may take to end after its connection was aborted.
const ABORTED_MAX: Duration = Duration::from_secs(10);

/// What a helper is asked for.
#[derive(Serialize, Deserialize, Debug)]
#[serde(tag = "task", rename_all = "kebab-case")]
pub(crate) enum Task {
    /// Make the block devices of a mount, and mount them. Over FUSE, the detached mount of the FUSE
    /// file comes along; the btrfs mount comes back.
    Plumb(Parts),
    /// Put the FUSE file whose mount comes along below a loop device.
    Exchange(Exchange),
    /// Thaw what an exchange has left frozen.
    Thaw(Exchange),
    /// Make a sprout larger.
    Grow(Grow),
    /// Open the file of the virtual area of the writable file system on `device`; it comes back.
    OpenArea { device: PathBuf },
    /// Let btrfs forget the loop devices of a mount that is gone, and remove its ublk device.
    Forget { id: MountId, loops: Vec<PathBuf> },
}

/// What became of it.
#[derive(Serialize, Deserialize, Debug)]
#[serde(tag = "outcome", rename_all = "kebab-case")]
pub(crate) enum Outcome {
    /// The mount's descriptor comes along.
    Plumbed(Plumbed),
    Grown {
        step: Step,
    },
    /// What was to be opened comes along.
    Done,
    Failed(Failure),
}

/// Has `task` done by a helper. `abort` ends what it waits for if it does not answer in time.
pub(crate) fn run(
    state: &StateDir,
    task: &Task,
    fds: &[BorrowedFd<'_>],
    abort: impl FnOnce(),
) -> Result<(Outcome, Vec<OwnedFd>)> {
    let failed = |e| Error::io("cannot start a process for mounting", e);
    let (ours, theirs) = UnixStream::pair().map_err(failed)?;
    let child = this_program("__help")
        .arg(state.root())
        .stdin(Stdio::from(OwnedFd::from(theirs)))
        .stdout(Stdio::null())
        .current_dir("/")
        .spawn()
        .map_err(failed)?;
    let answer = ask(&ours, task, fds, abort);
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
    abort: impl FnOnce(),
) -> Result<(Outcome, Vec<OwnedFd>)> {
    let failed = |e| Error::io("cannot talk to the process that mounts", e);
    stream.set_read_timeout(Some(ANSWER_MAX)).map_err(failed)?;
    stream.set_write_timeout(Some(ANSWER_MAX)).map_err(failed)?;
    wire::send(stream, task, fds)?;
    match wire::receive(stream) {
        Ok(Some(answer)) => Ok(answer),
        Ok(None) => Err(Error::new(
            ErrorKind::LocalIo,
            "the process that mounts ended early: see the daemon's log and the kernel's (dmesg)",
        )),
        Err(_) => {
            abort();
            stream.set_read_timeout(Some(ABORTED_MAX)).map_err(failed)?;
            // Its own error says more, if there is one.
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

/// Waits for the helper's end: as long as it has a mount's descriptor, a umount is refused (EBUSY).
/// Nobody waits for one that has not `answered`, as it may be in the kernel still.
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

/// The whole life of the process `burgeon __help STATE-DIR`.
pub fn help() -> ExitCode {
    // What ends the supervisor's session or terminal does not end a thaw.
    let _ = rustix::process::setsid();
    let _ = signals::block_termination();
    let Ok(stream) = std::io::stdin().as_fd().try_clone_to_owned() else {
        return ExitCode::FAILURE;
    };
    let stream = UnixStream::from(stream);
    let Ok(Some((task, fds))) = wire::receive::<Task>(&stream) else { return ExitCode::FAILURE };
    // The next supervisor removes what a mount that was never made has left. It would wait for ever for
    // a ublk device in whose start this process waits for a server that was told to stop.
    if matches!(task, Task::Plumb(_)) && !dies_with_its_parent(&stream) {
        return ExitCode::FAILURE;
    }
    let (outcome, fd) = match perform(task, fds) {
        Ok(done) => done,
        Err(e) => (Outcome::Failed(e.into()), None),
    };
    let fds: Vec<_> = fd.as_ref().map(AsFd::as_fd).into_iter().collect();
    // A supervisor that has died is not there to be told; what was made goes with this process.
    match wire::send(&stream, &outcome, &fds) {
        Ok(()) => ExitCode::SUCCESS,
        Err(_) => ExitCode::FAILURE,
    }
}

fn perform(task: Task, fds: Vec<OwnedFd>) -> Result<(Outcome, Option<OwnedFd>)> {
    let fuse = fds.into_iter().next();
    match task {
        Task::Plumb(parts) => {
            let (plumbed, mount) = plumbing::assemble(&parts, fuse)?;
            Ok((Outcome::Plumbed(plumbed), Some(mount)))
        }
        Task::Exchange(exchange) => {
            let fuse = fuse.ok_or_else(|| missing("the FUSE file's mount"))?;
            exchange::change_over(&exchange, &fuse)?;
            Ok((Outcome::Done, None))
        }
        Task::Thaw(exchange) => {
            exchange::thaw(&exchange)?;
            Ok((Outcome::Done, None))
        }
        Task::Grow(task) => Ok((Outcome::Grown { step: grow::grow(&task)? }, None)),
        Task::OpenArea { device } => Ok((Outcome::Done, Some(map::open_area(&device)?.into()))),
        Task::Forget { id, loops } => {
            release::forget_loops(&loops);
            transport::remove_devices(id);
            Ok((Outcome::Done, None))
        }
    }
}

fn missing(what: &str) -> Error {
    Error::new(ErrorKind::Invalid, format!("{what} did not come along"))
}
