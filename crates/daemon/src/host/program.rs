//! Starts this program as a child.

use std::{
    io,
    os::{
        fd::{BorrowedFd, OwnedFd},
        unix::{net::UnixStream, process::CommandExt},
    },
    path::Path,
    process::{Child, Command, Stdio},
};

use burgeon_block::{Error, Result};
use burgeon_source::registry::Providers;

use crate::log;

/// `argv[0]` of the processes that serve mounts. At shutdown systemd kills all processes but those
/// of root whose `argv[0]` begins with `@` (its document `ROOT_STORAGE_DAEMONS`), and unmounts only
/// then: a program that has to be killed may still need data of its mount.
const SERVING: &str = "@burgeon";

/// A command that runs this very program as `verb`, even if its file has been replaced. Process
/// lists show it as `burgeon`.
pub(crate) fn this_program(verb: &str) -> Command {
    run_as("burgeon", verb)
}

/// The same for a process that serves mounts.
pub(crate) fn serving_program(verb: &str) -> Command {
    run_as(SERVING, verb)
}

fn run_as(name: &str, verb: &str) -> Command {
    let mut command = Command::new("/proc/self/exe");
    command.arg0(name).arg(verb);
    command.envs(log::variables()).envs(Providers::variables());
    // A panic that is printed with a backtrace reads symbols. If there is no memory for them, the
    // standard library waits for its own lock, and the process neither dies nor works.
    command.env_remove("RUST_BACKTRACE");
    command
}

/// Executes the program anew under the name [`SERVING`], unless it has that name: `systemd-run` and
/// people cannot choose it. The process stays the same, and so do its descriptors.
pub(crate) fn take_serving_name(verb: &str, state: &Path) {
    if std::env::args_os().next().is_some_and(|name| name == SERVING) {
        return;
    }
    let error = serving_program(verb).arg(state).exec();
    tracing::warn!(%error, "cannot take the name {SERVING}: systemd will kill this process early at shutdown");
}

/// Starts this program as `verb` on the state directory `state`, to serve mounts. The child talks
/// through `socket`, its standard input; its current directory, `/`, keeps no mount busy.
pub(crate) fn start(verb: &str, state: &Path, socket: impl Into<OwnedFd>) -> io::Result<Child> {
    serving_program(verb)
        .arg(state)
        .stdin(Stdio::from(socket.into()))
        .stdout(Stdio::null())
        .current_dir("/")
        .spawn()
}

/// Makes this process one of the background: it gives way to all others, the OOM killer may choose
/// it, and it dies with the thread that has started it, which has the other end of the socket
/// `stdin`. False if there is no such thread.
pub fn give_way(stdin: BorrowedFd<'_>) -> Result<bool> {
    let socket = UnixStream::from(stdin.try_clone_to_owned().map_err(|e| Error::io("stdin", e))?);
    if socket.peer_addr().is_err() || !dies_with_its_parent(&socket) {
        return Ok(false);
    }
    burgeon_sandbox::accept_the_oom_killer()?;
    let failed = |e: rustix::io::Errno| Error::io("cannot set the priority", e.into());
    rustix::process::setpriority_process(None, LOWEST).map_err(failed)?;
    Ok(true)
}

/// The lowest priority, which also puts reads and writes of the disk behind those of others.
const LOWEST: i32 = 19;

/// Makes the kernel kill this process with the thread that has started it and waits for it; false
/// if that thread is dead already.
pub(crate) fn dies_with_its_parent(stream: &UnixStream) -> bool {
    use rustix::{
        net::{RecvFlags, recv},
        process::{Signal, set_parent_process_death_signal},
    };
    if set_parent_process_death_signal(Some(Signal::KILL)).is_err() {
        return false;
    }
    // If it died before, its end of the stream is closed.
    let peek = RecvFlags::PEEK | RecvFlags::DONTWAIT;
    !matches!(recv(stream, &mut [0; 1], peek), Ok((0, _)))
}
