//! This program, as a child.

use std::{os::unix::process::CommandExt, process::Command};

/// This very program, also when its file has been replaced, to run as `verb`. It shows as
/// `burgeon` in lists of processes.
pub(crate) fn this_program(verb: &str) -> Command {
    let mut command = Command::new("/proc/self/exe");
    command.arg0("burgeon").arg(verb);
    command
}
