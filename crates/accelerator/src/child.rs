//! Processes that the supervisor of a cache starts: what they inherit, and their first answer.

use std::{
    os::fd::{BorrowedFd, OwnedFd},
    process::Child,
    sync::mpsc,
    thread,
    time::Duration,
};

use burgeon_block::{Error, ErrorKind, Result};
use rustix::{
    io::{FdFlags, fcntl_setfd},
    process::{Pid, PidfdFlags, pidfd_open},
};
use serde_json::Value;

use crate::control::{ControlAnswer, receive};

/// Descriptors that programs inherit until this is dropped.
pub(crate) struct Passed<'a>(Vec<BorrowedFd<'a>>);

impl<'a> Passed<'a> {
    pub(crate) fn new(fds: impl IntoIterator<Item = BorrowedFd<'a>>) -> Result<Self> {
        let mut passed = Self(Vec::new());
        for fd in fds {
            fcntl_setfd(fd, FdFlags::empty())
                .map_err(|e| Error::io("cannot pass a descriptor on", e.into()))?;
            passed.0.push(fd);
        }
        Ok(passed)
    }
}

impl Drop for Passed<'_> {
    fn drop(&mut self) {
        for fd in &self.0 {
            let _ = fcntl_setfd(fd, FdFlags::CLOEXEC);
        }
    }
}

/// A descriptor that tells of the end of a server.
pub(crate) fn pidfd_of(child: &Child) -> Result<OwnedFd> {
    let gone = || Error::new(ErrorKind::NotFound, "the server of the cache has ended");
    let pid = Pid::from_raw(child.id() as i32).ok_or_else(gone)?;
    pidfd_open(pid, PidfdFlags::empty()).map_err(|e| Error::io("cannot watch the server", e.into()))
}

/// The first document that a child prints, within `limit`.
pub(crate) fn first_answer(child: &mut Child, limit: Duration) -> Result<Value> {
    let what = || Error::new(ErrorKind::Unavailable, "a process of the cache does not answer");
    let stdout = child.stdout.take().ok_or_else(what)?;
    let (sender, receiver) = mpsc::channel();
    thread::spawn(move || sender.send(receive::<ControlAnswer>(stdout)));
    receiver.recv_timeout(limit).map_err(|_| what())??.into_result()
}
