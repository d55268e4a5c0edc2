//! The supervisor's memory: what is mounted, and who serves it.

use std::{
    collections::BTreeMap,
    os::{
        fd::{AsFd, OwnedFd},
        unix::net::UnixStream,
    },
    time::Instant,
};

use burgeon_block::{Error, Result};
use burgeon_frontend::Slots;

use super::revive::Revival;
use crate::{
    id::MountId,
    ipc::{
        link::{MountReport, ToServer, VERSION},
        protocol::Failure,
        wire,
    },
    state::{files::Lock, record::MountRecord},
};

/// Whether the server has taken a mount on.
#[derive(Debug)]
pub(crate) enum Serving {
    /// Not answered yet, by this server or any.
    Awaited,
    /// It has.
    Yes,
    /// It cannot, and answers its reads with `EIO`.
    Refusing(Error),
    /// It cannot, and its readers wait.
    No(Error),
}

/// Whether the server takes note of what is read.
#[derive(Debug, Default)]
pub(crate) enum Recording {
    /// It does not. A new server does not, either.
    #[default]
    Off,
    /// It was told to begin, or to end, and has not answered.
    Awaited,
    /// It does.
    On,
    /// It has ended; whether there was more than could be taken note of.
    Done(bool),
    /// It cannot.
    Failed(Error),
}

/// One mount.
pub(crate) struct Entry {
    pub(crate) record: MountRecord,
    /// The `/dev/fuse` descriptor: as long as it is open, the kernel waits for a server. `None`
    /// for a ublk device, whose requests the kernel keeps by itself.
    pub(crate) fuse: Option<OwnedFd>,
    /// Requests in flight and counters, shared with the server.
    pub(crate) slots: Slots,
    pub(crate) serving: Serving,
    /// The number of its last `Attach`: answers to earlier ones are of servers that are dead.
    pub(crate) attach_number: u64,
    /// The number of the last one that was answered.
    pub(crate) attach_answered: u64,
    /// Refreshes that somebody waits for, and their results.
    pub(crate) refreshes: BTreeMap<u64, Option<Result<()>>>,
    /// A thread makes its files again (`mend.rs`).
    pub(crate) mending: bool,
    /// False until the mount's descriptor has been handed out.
    pub(crate) handed_out: bool,
    /// The kernel has closed the FUSE file.
    pub(crate) ended: bool,
    /// The mount lives on with a dead FUSE file, so the end of its new one means nothing.
    pub(crate) lost: bool,
    /// When its ublk device was stopped, after its last user.
    pub(crate) stopped: Option<Instant>,
    /// A connection that is to take the place of the dead one.
    pub(crate) revival: Option<Revival>,
    /// A thread looks after `revival`.
    pub(crate) reviving: bool,
    /// Whether somebody records what is read.
    pub(crate) recording: Recording,
    /// A thread makes its sprout larger.
    pub(crate) growing: bool,
    /// When that could not be done, the last time that it was tried.
    pub(crate) growth_failed: Option<Instant>,
    /// Its file system is read-only: it is not tried again.
    pub(crate) growth_ended: bool,
    /// What its readers wait by is held once more (`hold.rs`), or is to be.
    pub(crate) held: bool,
    /// Held while named writes are mounted.
    pub(crate) _writes_lock: Option<Lock>,
}

impl Entry {
    /// A failure means that the server is dead; its successor is told again.
    fn send_attach(&self, link: &UnixStream) {
        let message = ToServer::Attach {
            version: VERSION,
            number: Some(self.attach_number),
            // A mount that is being made fails instead.
            refuse: self.handed_out,
            attach: self.record.attach.clone(),
        };
        let fuse = self.fuse.as_ref().map(AsFd::as_fd);
        let fds: Vec<_> = fuse.into_iter().chain([self.slots.fd()]).collect();
        let _ = wire::send(link, &message, &fds);
    }
}

/// A server's answer to an `Attach`.
pub(crate) struct Attached {
    pub(crate) id: MountId,
    pub(crate) number: Option<u64>,
    pub(crate) error: Option<Failure>,
    pub(crate) served: bool,
    pub(crate) refused: bool,
}

/// Everything behind the supervisor's one lock.
#[derive(Default)]
pub(crate) struct Table {
    pub(crate) mounts: BTreeMap<MountId, Entry>,
    /// Where messages to the server go, while there is one.
    pub(crate) link: Option<UnixStream>,
    /// Whether that server knows `Refresh`.
    pub(crate) refreshes: bool,
    /// How many messages to servers had a number.
    numbered: u64,
    pub(crate) server_pid: Option<u32>,
    pub(crate) server_restarts: u64,
    /// No new mounts, and no new server.
    pub(crate) stopping: bool,
    /// End as soon as nothing is mounted.
    pub(crate) end_when_idle: bool,
    /// Clients that wait for a mount to be released.
    pub(crate) release_waiters: usize,
    /// A thread looks after growing sprouts…
    pub(crate) tending_thin: bool,
    /// …and is to do so at once.
    pub(crate) tend_now: bool,
    pub(crate) reports: BTreeMap<MountId, MountReport>,
    /// How many reports came, to wait for the next.
    pub(crate) report_count: u64,
}

impl Table {
    /// Adds a mount and tells the server of it. A server that is just being started is told with
    /// all the others.
    pub(crate) fn add(&mut self, entry: Entry) {
        let id = entry.record.attach.id;
        self.mounts.insert(id, entry);
        self.attach(id);
    }

    /// Tells a new server of every mount, then makes it the one that is told. `refreshes`: whether it
    /// knows `Refresh`.
    pub(crate) fn connect(&mut self, link: UnixStream, pid: Option<u32>, refreshes: bool) {
        self.link = Some(link);
        self.server_pid = pid;
        self.refreshes = refreshes;
        let ids: Vec<_> = self.mounts.keys().copied().collect();
        for id in ids {
            if let Some(entry) = self.mounts.get_mut(&id) {
                entry.recording = Recording::Off;
            }
            self.attach(id);
        }
    }

    /// Tells the server of a mount, again if need be.
    pub(crate) fn attach(&mut self, id: MountId) {
        let (Some(link), Some(entry)) = (&self.link, self.mounts.get_mut(&id)) else { return };
        self.numbered += 1;
        entry.attach_number = self.numbered;
        // What it has said of a mount that it cannot serve holds until it says something else.
        if !matches!(entry.serving, Serving::Refusing(_) | Serving::No(_)) {
            entry.serving = Serving::Awaited;
        }
        entry.send_attach(link);
    }

    /// Tells the server to see what has been mapped and pinned meanwhile; the number under which its
    /// answer comes ([`Self::answered`]). Without a server, the next one's answer to its `Attach` is
    /// taken for it. `None` if there is no such mount.
    pub(crate) fn refresh(&mut self, id: MountId) -> Option<u64> {
        let entry = self.mounts.get_mut(&id)?;
        self.numbered += 1;
        let number = self.numbered;
        entry.refreshes.insert(number, None);
        if let Some(link) = &self.link {
            match self.refreshes {
                true => drop(wire::send(link, &ToServer::Refresh { number, id }, &[])),
                false => entry.send_attach(link),
            }
        }
        Some(number)
    }

    /// Takes the server's answer to an `Attach`; false if it is of no interest, as one to an earlier
    /// one.
    pub(crate) fn attached(&mut self, answer: Attached) -> bool {
        let Attached { id, number, error, served, refused } = answer;
        let Some(entry) = self.mounts.get_mut(&id) else { return false };
        if number.is_some_and(|number| number != entry.attach_number) {
            return false;
        }
        entry.attach_answered = entry.attach_number;
        // It has read everything anew; a server of an earlier version answers a refresh so, too.
        let until = number.unwrap_or(u64::MAX);
        let open = entry.refreshes.range_mut(..until).filter(|(_, result)| result.is_none());
        for (_, result) in open {
            *result = Some(match &error {
                None => Ok(()),
                Some(failure) => Err(failure.clone().into()),
            });
        }
        entry.serving = match error {
            None => Serving::Yes,
            Some(_) if served => Serving::Yes,
            Some(failure) if refused => Serving::Refusing(failure.into()),
            Some(failure) => Serving::No(failure.into()),
        };
        true
    }

    /// Takes the server's answer to a `Refresh`.
    pub(crate) fn refreshed(&mut self, id: MountId, number: u64, error: Option<Failure>) {
        let entry = self.mounts.get_mut(&id);
        if let Some(result) = entry.and_then(|entry| entry.refreshes.get_mut(&number)) {
            *result = Some(error.map_or(Ok(()), |failure| Err(failure.into())));
        }
    }

    /// Sends a message without descriptors; false if there is no server.
    pub(crate) fn send(&self, message: &ToServer) -> bool {
        self.link.as_ref().is_some_and(|link| wire::send(link, message, &[]).is_ok())
    }
}

#[cfg(test)]
mod tests;
