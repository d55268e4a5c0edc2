//! Starts this program as a child.

use std::{
    io,
    os::{
        fd::OwnedFd,
        unix::{net::UnixStream, process::CommandExt},
    },
    path::Path,
    process::{Child, Command, Stdio},
};

/// A command that runs this very program as `verb`, even if its file has been replaced. Process
/// lists show it as `burgeon`.
pub(crate) fn this_program(verb: &str) -> Command {
    let mut command = Command::new("/proc/self/exe");
    command.arg0("burgeon").arg(verb);
    command
}

/// Starts this program as `verb` on the state directory `state`. The child talks through `socket`,
/// its standard input; its current directory, `/`, keeps no mount busy.
pub(crate) fn start(verb: &str, state: &Path, socket: impl Into<OwnedFd>) -> io::Result<Child> {
    this_program(verb)
        .arg(state)
        .stdin(Stdio::from(socket.into()))
        .stdout(Stdio::null())
        .current_dir("/")
        .spawn()
}

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
