//! This program, as a child.

use std::{
    os::unix::{net::UnixStream, process::CommandExt},
    process::Command,
};

/// This very program, also when its file has been replaced, to run as `verb`. It shows as
/// `burgeon` in lists of processes.
pub(crate) fn this_program(verb: &str) -> Command {
    let mut command = Command::new("/proc/self/exe");
    command.arg0("burgeon").arg(verb);
    command
}

/// From now on this process is killed with the thread that has started it and waits for it; false if
/// that is dead already.
pub(crate) fn dies_with_its_parent(stream: &UnixStream) -> bool {
    use rustix::{
        net::{RecvFlags, recv},
        process::{Signal, set_parent_process_death_signal},
    };
    if set_parent_process_death_signal(Some(Signal::KILL)).is_err() {
        return false;
    }
    // Its end of the stream is closed if it died before.
    let peek = RecvFlags::PEEK | RecvFlags::DONTWAIT;
    !matches!(recv(stream, &mut [0; 1], peek), Ok((0, _)))
}
