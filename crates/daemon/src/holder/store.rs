//! systemd's descriptor store: `FDSTORE=1` to its notification socket; the descriptors are passed
//! to the next main process of the unit from number 3 on (`sd_listen_fds(3)`).
//!
//! `FDPOLL=0`, because the kernel would wake systemd for each request of a mount whose `/dev/fuse`
//! it polls.

use std::{
    env,
    io::IoSlice,
    mem::MaybeUninit,
    os::{
        fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd},
        unix::net::UnixDatagram,
    },
};

use burgeon_block::{Error, ErrorKind, Result};
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    fs::{FileType, fstat},
    io::{FdFlags, fcntl_setfd},
    net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg},
    pipe::{PipeFlags, pipe_with},
};

use super::Held;
use crate::{id::MountId, start::notification_socket};

/// The first descriptor that systemd passes.
const FIRST: i32 = 3;

/// Prefix of our descriptors' names; the mount's id follows.
const PREFIX: &str = "burgeon-";

/// Time limit for systemd to process its messages.
const BARRIER_MAX: Timespec = Timespec { tv_sec: 5, tv_nsec: 0 };

/// The store of this process's unit.
#[derive(Debug)]
pub(crate) struct Store(UnixDatagram);

impl Store {
    /// `None` without systemd, or if it stores nothing for the unit: one that was installed before
    /// the unit had `FileDescriptorStoreMax=`.
    pub(crate) fn find() -> Option<Self> {
        let store = Self(notification_socket()?);
        match store.keeps() {
            Ok(true) => Some(store),
            Ok(false) => {
                tracing::warn!(
                    "systemd keeps no descriptors for this unit (FileDescriptorStoreMax=): a process of \
                     ours does; install the unit of this version"
                );
                None
            }
            Err(e) => {
                tracing::warn!(error = %e, "systemd's descriptor store cannot be used");
                None
            }
        }
    }

    /// Stores a mount's descriptors, and returns when systemd has them: it ignores a message of a
    /// process that was killed before systemd has read it.
    pub(crate) fn hold(&self, id: MountId, fuse: impl AsFd, slots: impl AsFd) -> Result<()> {
        self.send(&add(&id.to_string()), &[fuse.as_fd(), slots.as_fd()])?;
        self.barrier()
    }

    pub(crate) fn let_go(&self, id: MountId) -> Result<()> {
        self.send(&remove(&id.to_string()), &[])
    }

    /// True if systemd keeps new descriptors: it closes those it has no room for.
    fn keeps(&self) -> Result<bool> {
        let (ours, theirs) = pipe()?;
        self.send(&add("probe"), &[theirs.as_fd()])?;
        drop(theirs);
        self.barrier()?;
        let kept = !is_closed(&ours, Timespec { tv_sec: 0, tv_nsec: 0 })?;
        self.send(&remove("probe"), &[])?;
        Ok(kept)
    }

    /// Waits until systemd has read all earlier messages.
    fn barrier(&self) -> Result<()> {
        let (ours, theirs) = pipe()?;
        self.send("BARRIER=1", &[theirs.as_fd()])?;
        drop(theirs);
        match is_closed(&ours, BARRIER_MAX)? {
            true => Ok(()),
            false => Err(Error::new(ErrorKind::Unavailable, "systemd does not answer")),
        }
    }

    fn send(&self, text: &str, fds: &[BorrowedFd<'_>]) -> Result<()> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() {
            control.push(SendAncillaryMessage::ScmRights(fds));
        }
        let parts = [IoSlice::new(text.as_bytes())];
        let sent = rustix::io::retry_on_intr(|| {
            sendmsg(&self.0, &parts, &mut control, SendFlags::NOSIGNAL)
        });
        sent.map(drop).map_err(|e| Error::io("cannot send to systemd", e.into()))
    }
}

fn add(name: &str) -> String {
    format!("FDSTORE=1\nFDPOLL=0\nFDNAME={PREFIX}{name}")
}

fn remove(name: &str) -> String {
    format!("FDSTOREREMOVE=1\nFDNAME={PREFIX}{name}")
}

fn pipe() -> Result<(OwnedFd, OwnedFd)> {
    pipe_with(PipeFlags::CLOEXEC).map_err(|e| Error::io("cannot make a pipe", e.into()))
}

/// True if all others have closed the pipe's other end, or do so before `limit`.
fn is_closed(ours: &OwnedFd, limit: Timespec) -> Result<bool> {
    let mut end = [PollFd::new(ours, PollFlags::IN)];
    rustix::io::retry_on_intr(|| poll(&mut end, Some(&limit)))
        .map_err(|e| Error::io("cannot wait for systemd", e.into()))?;
    Ok(end[0].revents().contains(PollFlags::HUP))
}

/// The descriptors that systemd has kept for this process. Call this once, before anything else
/// opens or closes descriptors or starts processes, which would inherit these.
pub(crate) fn inherited() -> Vec<Held> {
    let number = |name: &str| env::var(name).ok()?.parse::<u32>().ok();
    if number("LISTEN_PID") != Some(std::process::id()) {
        return Vec::new();
    }
    let names = env::var("LISTEN_FDNAMES").unwrap_or_default();
    let names: Vec<_> = names.split(':').collect();
    let count = number("LISTEN_FDS").unwrap_or_default() as i32;
    let fds = (0..count).filter_map(|index| {
        // SAFETY: systemd has opened these for this process, and nothing has used them yet.
        let fd = unsafe { OwnedFd::from_raw_fd(FIRST + index) };
        fcntl_setfd(&fd, FdFlags::CLOEXEC).ok()?;
        let id = names.get(index as usize)?.strip_prefix(PREFIX)?.parse::<MountId>().ok()?;
        Some((id, fd))
    });
    pair(fds.collect())
}

/// Pairs the two descriptors of each mount; they may arrive in any order.
fn pair(fds: Vec<(MountId, OwnedFd)>) -> Vec<Held> {
    let is_device = |fd: &OwnedFd| {
        fstat(fd)
            .is_ok_and(|stat| FileType::from_raw_mode(stat.st_mode) == FileType::CharacterDevice)
    };
    let (devices, mut others): (Vec<_>, Vec<_>) =
        fds.into_iter().partition(|(_, fd)| is_device(fd));
    let pairs = devices.into_iter().filter_map(|(id, fuse)| {
        let at = others.iter().position(|(other, _)| *other == id)?;
        Some(Held { id, fuse, slots: others.swap_remove(at).1 })
    });
    pairs.collect()
}

#[cfg(test)]
mod tests {
    use std::{
        fs::File,
        io::IoSliceMut,
        mem::MaybeUninit,
        os::{fd::OwnedFd, unix::net::UnixDatagram},
        thread,
    };

    use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};

    use super::{Store, pair};
    use crate::id::MountId;

    /// Imitates systemd for a unit that may keep `most` descriptors, until the other end is closed;
    /// returns the descriptors kept then.
    fn play_systemd(socket: &UnixDatagram, most: usize) -> Vec<(String, OwnedFd)> {
        let mut kept = Vec::new();
        loop {
            let (mut text, mut space) =
                ([0; 256], [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))]);
            let mut control = RecvAncillaryBuffer::new(&mut space);
            let mut parts = [IoSliceMut::new(&mut text)];
            let received = recvmsg(socket, &mut parts, &mut control, RecvFlags::empty()).unwrap();
            let rights = control.drain().filter_map(|message| match message {
                RecvAncillaryMessage::ScmRights(rights) => Some(rights),
                _ => None,
            });
            let fds: Vec<_> = rights.flatten().collect();
            let text = String::from_utf8(text[..received.bytes].to_vec()).unwrap();
            let lines: Vec<_> = text.lines().collect();
            let name = lines.iter().find_map(|line| line.strip_prefix("FDNAME="));
            match (lines[0], name) {
                ("FDSTORE=1", Some(name)) => {
                    assert!(lines.contains(&"FDPOLL=0"), "systemd would be woken for each request");
                    let room = most - kept.len();
                    kept.extend(fds.into_iter().take(room).map(|fd| (name.to_owned(), fd)));
                }
                ("FDSTOREREMOVE=1", Some(name)) => kept.retain(|(other, _)| other != name),
                // systemd's answer is to close the descriptor.
                ("BARRIER=1", None) => drop(fds),
                ("STOPPING=1", None) => return kept,
                other => panic!("{other:?}"),
            }
        }
    }

    #[test]
    fn systemd_keeps_descriptors_within_its_limit_until_release() {
        for (most, keeps) in [(0, false), (4, true)] {
            let (ours, theirs) = UnixDatagram::pair().unwrap();
            let systemd = thread::spawn(move || play_systemd(&theirs, most));
            let store = Store(ours);
            assert_eq!(store.keeps().unwrap(), keeps);
            let [a, b] = [1, 2].map(MountId::from_number);
            let file = tempfile::tempfile().unwrap();
            store.hold(a, &file, &file).unwrap();
            store.hold(b, &file, &file).unwrap();
            store.let_go(a).unwrap();
            store.send("STOPPING=1", &[]).unwrap();
            let names: Vec<_> = systemd.join().unwrap().into_iter().map(|(name, _)| name).collect();
            let expected = if keeps { vec![format!("burgeon-{b}"); 2] } else { Vec::new() };
            assert_eq!(names, expected);
        }
    }

    #[test]
    fn descriptors_are_told_apart_in_any_order() {
        let device = || File::open("/dev/null").unwrap().into();
        let memory = || tempfile::tempfile().unwrap().into();
        let [a, b, c] = [1, 2, 3].map(MountId::from_number);
        let fds = vec![(a, memory()), (b, device()), (c, device()), (a, device()), (b, memory())];
        let mut ids: Vec<_> = pair(fds).into_iter().map(|held| held.id).collect();
        ids.sort();
        assert_eq!(ids, [a, b]);
    }
}
