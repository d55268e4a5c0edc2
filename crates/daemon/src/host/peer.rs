//! The process at the other end of a socket, and its privileges.

use std::{
    fs, io,
    os::{
        fd::{AsFd, AsRawFd, FromRawFd, OwnedFd},
        unix::net::UnixStream,
    },
};

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    process::{Pid, PidfdFlags, pidfd_open},
    thread::{CapabilitySet, capabilities},
};

/// The process that connected, which is told from a later one of the same number.
pub(crate) struct Peer {
    pub(crate) pid: Pid,
    process: OwnedFd,
}

impl Peer {
    /// The process that connected `stream`. An error if it has ended.
    pub(crate) fn of(stream: &UnixStream) -> io::Result<Self> {
        let pid = rustix::net::sockopt::socket_peercred(stream)?.pid;
        // Before Linux 6.5, a process may take the number of one that ended just now.
        let process = match peer_pidfd(stream) {
            Err(e) if e.raw_os_error() == Some(libc::ENOPROTOOPT) => {
                pidfd_open(pid, PidfdFlags::empty())?
            }
            process => process?,
        };
        Ok(Self { pid, process })
    }

    /// True if it lives and has `CAP_SYS_ADMIN` in this process's user namespace.
    pub(crate) fn is_administrator(&self) -> bool {
        let has = capabilities(Some(self.pid));
        let has = has.is_ok_and(|has| has.effective.contains(CapabilitySet::SYS_ADMIN));
        // The number was still its own, so these were its capabilities.
        has && self.has_our_users() && self.is_alive()
    }

    /// False if it is in another user namespace, where every process may make itself an
    /// administrator. Looking at the namespace itself would take the right to trace it.
    fn has_our_users(&self) -> bool {
        let users = |process: &str| fs::read(format!("/proc/{process}/uid_map")).ok();
        let own = users("self");
        own.is_some() && users(&self.pid.as_raw_nonzero().to_string()) == own
    }

    fn is_alive(&self) -> bool {
        let mut polled = [PollFd::new(&self.process, PollFlags::IN)];
        poll(&mut polled, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).is_ok_and(|ended| ended == 0)
    }
}

fn peer_pidfd(stream: &UnixStream) -> io::Result<OwnedFd> {
    let (mut fd, mut len) = (-1, size_of::<libc::c_int>() as libc::socklen_t);
    // SAFETY: the kernel writes at most `len` bytes to `fd`, which has as many.
    let got = unsafe {
        let socket = stream.as_fd().as_raw_fd();
        let value = (&raw mut fd).cast();
        libc::getsockopt(socket, libc::SOL_SOCKET, libc::SO_PEERPIDFD, value, &raw mut len)
    };
    match got {
        // SAFETY: the kernel has just made this descriptor, and nothing else owns it.
        0 => Ok(unsafe { OwnedFd::from_raw_fd(fd) }),
        _ => Err(io::Error::last_os_error()),
    }
}
