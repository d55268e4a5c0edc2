//! Copies of this process, for what only another process can do, or may do wrong.
//!
//! Invariant: the process has one thread. A copy has that one alone, so nobody else holds a lock
//! that it may need; it ends without running destructors of what it shares with the original.

use std::{
    fs::{self, File},
    io::{self, Read, Write},
    os::fd::OwnedFd,
    process::abort,
};

use burgeon_block::{Error, ErrorKind, Result};
use rustix::{
    pipe::{PipeFlags, pipe_with},
    process::{Pid, WaitOptions, waitpid},
    thread::{UnshareFlags, unshare_unsafe},
};

/// The message of a copy that has no error.
const DONE: &str = "done";

/// Longest error that a copy tells.
const TOLD_MAX: u64 = 4096;

/// Does `task` in a copy of this process, which ends with it, and returns its error. Waits for the
/// result and not for the end of the copy, which may have to wait for this process.
pub(crate) fn in_a_copy(task: impl FnOnce() -> Result<()>) -> Result<()> {
    let failed = |e: io::Error| Error::io("cannot try in another process", e);
    let (mut told, tell) = pipe().map_err(failed)?;
    detached(|| {
        let text = task().map_or_else(|e| e.to_string(), |()| DONE.to_owned());
        File::from(tell).write_all(text.as_bytes()).is_ok()
    })
    .map_err(failed)?;
    let mut text = String::new();
    (&mut told).take(TOLD_MAX).read_to_string(&mut text).map_err(failed)?;
    match &*text {
        DONE => Ok(()),
        "" => Err(Error::new(ErrorKind::Invalid, "the attempt has ended without a result")),
        _ => Err(Error::new(ErrorKind::Invalid, text)),
    }
}

/// Starts a copy of this process that does `task`, and that no process of ours waits for.
pub(crate) fn detached(task: impl FnOnce() -> bool) -> io::Result<()> {
    // The child's child belongs to process 1.
    let child = fork(|| fork(task).is_ok())?;
    waitpid(Some(child), WaitOptions::empty())?;
    Ok(())
}

/// A user namespace that maps uid and gid 0 to `user`, and other groups to themselves.
pub(crate) fn user_namespace(user: u32) -> io::Result<OwnedFd> {
    let (mut ready, tell_ready) = pipe()?;
    let (held, hold) = pipe()?;
    let mut hold = Some(hold);
    let child = fork(|| {
        drop(hold.take());
        // SAFETY: only this process's users change; it does nothing but wait.
        let made = unsafe { unshare_unsafe(UnshareFlags::NEWUSER) };
        let mut tell_ready = File::from(tell_ready);
        let told = made.is_ok() && tell_ready.write_all(b"!").is_ok();
        drop(tell_ready);
        // Until the original has opened the namespace.
        let _ = { held }.read(&mut [0]);
        told
    })?;
    let opened = (|| {
        ready.read_exact(&mut [0])?;
        let process = format!("/proc/{}", child.as_raw_nonzero());
        fs::write(format!("{process}/uid_map"), format!("0 {user} 1"))?;
        // Files of other groups stay theirs: a file whose group has no number cannot be written.
        fs::write(format!("{process}/gid_map"), format!("0 {user} 1\n1 1 {}", user - 1))?;
        File::open(format!("{process}/ns/user"))
    })();
    drop(hold);
    waitpid(Some(child), WaitOptions::empty())?;
    Ok(opened?.into())
}

fn pipe() -> io::Result<(File, OwnedFd)> {
    let (read, write) = pipe_with(PipeFlags::CLOEXEC)?;
    Ok((read.into(), write))
}

/// Starts a copy of this process that does `task`; the task returns whether it succeeded.
fn fork(task: impl FnOnce() -> bool) -> io::Result<Pid> {
    // SAFETY: the process has one thread (above), so its copy is whole.
    match unsafe { libc::fork() } {
        -1 => Err(io::Error::last_os_error()),
        0 => {
            let done = std::panic::catch_unwind(std::panic::AssertUnwindSafe(task));
            // SAFETY: it only ends this process; nothing of the original is undone.
            unsafe { libc::_exit(i32::from(!done.unwrap_or(false))) }
        }
        child => Ok(Pid::from_raw(child).unwrap_or_else(|| abort())),
    }
}
