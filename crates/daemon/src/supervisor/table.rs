//! The supervisor's in-memory state: the mounts, and the connection to their server.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::Shutdown,
    os::{
        fd::{AsFd, OwnedFd},
        unix::net::UnixStream,
    },
    time::Instant,
};

use burgeon_block::{Error, Result};
use burgeon_frontend::{Connection, Slots};

use crate::{
    host::system::Identity,
    id::MountId,
    ipc::{
        link::{CacheOrder, END_SCRUB, FromServer, MountReport, ToServer, Understands, VERSION},
        protocol::{CacheAnswer, ChunkPlaces, HostCache, WaitStatus, WireError},
        wire,
    },
    opener::{self, ToOpener},
    state::{files::Lock, record::MountRecord},
};

/// The server's answer to a mount's `Attach`.
#[derive(Debug)]
pub(crate) enum Serving {
    /// No server has answered yet.
    Awaited,
    /// The server serves the mount.
    Yes,
    /// The server cannot serve it, and answers its reads with `EIO`.
    Refusing(Error),
    /// The server cannot serve it, and its readers wait.
    No(Error),
}

/// State of recording the mount's reads.
#[derive(Debug, Default)]
pub(crate) enum Recording {
    /// Not recording. A new server starts in this state.
    #[default]
    Off,
    /// The server was told to start or stop, and has not answered.
    Awaited,
    /// Recording.
    On,
    /// Recording has ended; true if there were more reads than fit.
    Done(bool),
    /// The server cannot record.
    Failed(Error),
}

/// A pending reconnect of a mount.
pub(crate) struct Reconnect {
    pub(crate) record: MountRecord,
    /// The connection that is to replace the dead one.
    pub(crate) connection: Connection,
}

/// One mount.
pub(crate) struct MountEntry {
    pub(crate) record: MountRecord,
    /// The `/dev/fuse` descriptor: as long as it is open, the kernel waits for a server. `None`
    /// for a ublk device, whose requests the kernel keeps by itself.
    pub(crate) fuse: Option<OwnedFd>,
    /// In-flight requests and counters, shared with the server.
    pub(crate) slots: Slots,
    pub(crate) serving: Serving,
    /// The number of its last `Attach`: answers to earlier ones come from dead servers.
    pub(crate) attach_number: u64,
    /// `Attach`es so far: more than one if a server has died, or was told of a change.
    pub(crate) attaches: u64,
    /// The process that has opened its ublk device for its server.
    pub(crate) opener: Option<u32>,
    /// The number of the last `Attach` that was answered.
    pub(crate) attach_answered: u64,
    /// Refreshes that a client waits for, and their results.
    pub(crate) refreshes: BTreeMap<u64, Option<Result<()>>>,
    /// A thread repairs its files (`mend.rs`).
    pub(crate) mending: bool,
    /// False until the mount's descriptor has been handed out.
    pub(crate) handed_out: bool,
    /// The kernel has closed the FUSE file.
    pub(crate) ended: bool,
    /// A thread waits for the end of its devices, and then cleans up.
    pub(crate) releasing: bool,
    /// It was let go, and no record says so yet.
    pub(crate) is_noting: bool,
    /// The mount continues on a dead FUSE file, so the end of its new one means nothing.
    pub(crate) lost: bool,
    /// The time when its ublk device was stopped, after its last user.
    pub(crate) stopped: Option<Instant>,
    /// A new connection that is to replace the dead one.
    pub(crate) reconnect: Option<Reconnect>,
    /// A thread handles `reconnect`.
    pub(crate) reconnecting: bool,
    /// State of recording its reads.
    pub(crate) recording: Recording,
    /// A thread grows its sprout.
    pub(crate) growing: bool,
    /// The time of the last failed attempt to grow.
    pub(crate) growth_failed: Option<Instant>,
    /// Its file system is read-only: growing it is not attempted again.
    pub(crate) growth_ended: bool,
    /// Its descriptors are held by the holder (`hold.rs`), or will be.
    pub(crate) held: bool,
    /// Lock on named writes while they are mounted.
    pub(crate) _writes_lock: Option<Lock>,
}

impl MountEntry {
    /// A mount that is not served yet, and was not handed out.
    pub(crate) fn new(record: MountRecord, fuse: Option<OwnedFd>, slots: Slots) -> Self {
        Self {
            record,
            fuse,
            slots,
            serving: Serving::Awaited,
            attach_number: 0,
            attaches: 0,
            opener: None,
            attach_answered: 0,
            refreshes: BTreeMap::new(),
            mending: false,
            handed_out: false,
            ended: false,
            releasing: false,
            is_noting: false,
            lost: false,
            stopped: None,
            reconnect: None,
            reconnecting: false,
            recording: Recording::Off,
            growing: false,
            growth_failed: None,
            growth_ended: false,
            held: false,
            _writes_lock: None,
        }
    }

    /// A failure means that the server is dead; its successor is told again.
    fn send_attach(&self, link: &UnixStream, folders: &[Option<Identity>]) {
        let message = ToServer::Attach {
            version: VERSION,
            number: Some(self.attach_number),
            // An unfinished mount fails instead.
            refuse: self.handed_out,
            folders: folders.to_vec(),
            attach: self.record.attach.clone(),
        };
        let fuse = self.fuse.as_ref().map(AsFd::as_fd);
        let fds: Vec<_> = fuse.into_iter().chain([self.slots.fd()]).collect();
        let _ = wire::send(link, &message, &fds);
    }
}

/// The work that follows from a message of the server, beyond the table.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum ToDo {
    /// Repair the mount's files, if that is what it lacks.
    Mend(MountId),
    /// The kernel has closed the mount: clean up after it.
    Release { id: MountId, is_damaged: bool },
    /// Run a credential helper, and hand its output to [`Table::helper_said`].
    AskHelper { question: Question, helper: String, registry: String },
}

/// A question of one server, which no other gets the answer to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Question {
    /// The number of the connection.
    connection: u64,
    number: u64,
}

/// A server's answer to an `Attach`.
struct Attached {
    id: MountId,
    number: Option<u64>,
    error: Option<WireError>,
    served: bool,
    refused: bool,
    opener: Option<u32>,
}

/// Most credential helpers that run at once for servers: each is a process and a thread.
const HELPERS_MAX: usize = 32;

/// Answers to questions that may lie here: clients that have given up take none.
const ANSWERS_MAX: usize = 64;

/// The server's answer to a question.
pub(crate) enum Answer {
    /// The last reads that had to wait.
    Waits(Vec<WaitStatus>),
    /// Places of chunks in the cache.
    Places(ChunkPlaces),
}

/// The state behind the supervisor's one lock.
#[derive(Default)]
pub(crate) struct Table {
    pub(crate) mounts: BTreeMap<MountId, MountEntry>,
    /// The stream to the server, while there is one.
    pub(crate) link: Option<UnixStream>,
    /// The messages that this server understands.
    pub(crate) understands: Option<Understands>,
    /// The stream to the opener, while there is one, and its process id.
    pub(crate) opener: Option<(UnixStream, u32)>,
    /// Numbered messages sent to servers so far.
    numbered: u64,
    /// The folders that a server writes to, as seen when it was connected, or at the last mount.
    pub(crate) folders: Vec<Option<Identity>>,
    pub(crate) server_pid: Option<u32>,
    pub(crate) server_restarts: u64,
    /// Servers connected so far.
    connections: u64,
    /// Credential helpers that run.
    helpers: usize,
    /// No new mounts, and no new server.
    pub(crate) stopping: bool,
    /// End as soon as no mount needs the daemon.
    pub(crate) end_when_idle: bool,
    /// Clients that wait for a mount to be released.
    pub(crate) release_waiters: usize,
    /// Mounts in use whose records cannot be read, with their loop devices.
    pub(crate) unread: BTreeMap<MountId, String>,
    /// A thread looks after growing sprouts.
    pub(crate) tending_thin: bool,
    /// That thread must look now.
    pub(crate) tend_now: bool,
    pub(crate) reports: BTreeMap<MountId, MountReport>,
    /// Reports received so far, to wait for the next.
    pub(crate) report_count: u64,
    /// The server did not answer the last request for a report in time.
    pub(crate) server_is_silent: bool,
    /// The host's cache as the last report has it.
    pub(crate) cache: Option<HostCache>,
    /// Orders about it that this server has not answered.
    cache_orders: BTreeSet<u64>,
    /// The last of these that began a scrub.
    scrub: Option<u64>,
    /// Answers to questions that the server has sent and nobody has taken, by number: the latest
    /// ones.
    pub(crate) answers: BTreeMap<u64, Answer>,
    /// Answers to orders about it that nobody has taken yet, by number.
    pub(crate) cache_answers: BTreeMap<u64, (CacheAnswer, Option<WireError>)>,
}

impl Table {
    /// Adds a mount and tells the server of it. A server that is just being started will be told of
    /// it with all the others.
    pub(crate) fn add(&mut self, entry: MountEntry) {
        let id = entry.record.attach.id;
        self.mounts.insert(id, entry);
        self.attach(id);
    }

    /// Gives the server an order about the host's cache. Returns its number; `None` if there is no
    /// server, or one of an earlier version.
    pub(crate) fn order(&mut self, order: CacheOrder) -> Option<u64> {
        if !self.understands.is_some_and(|understands| understands.cache) {
            return None;
        }
        self.numbered += 1;
        let number = self.numbered;
        if matches!(order, CacheOrder::Scrub { .. }) {
            self.scrub = Some(number);
        }
        let is_told = self.send(&ToServer::Cache { number, order });
        is_told.then(|| {
            self.cache_orders.insert(number);
            number
        })
    }

    /// The server's answer to an order, if it has come; one that comes later is dropped.
    pub(crate) fn take_answer(&mut self, number: u64) -> Option<(CacheAnswer, Option<WireError>)> {
        self.cache_orders.remove(&number);
        self.cache_answers.remove(&number)
    }

    /// Ends the scrub that the order `number` began, if no other has ended it.
    pub(crate) fn end_scrub(&mut self, number: u64) {
        if self.scrub.take_if(|scrub| *scrub == number).is_some() {
            // Nobody waits for the answer.
            let number = self.next_number();
            let order = CacheOrder::Scrub { bytes_per_second: END_SCRUB };
            self.send(&ToServer::Cache { number, order });
        }
    }

    /// A number for a message that no other has.
    pub(crate) fn next_number(&mut self) -> u64 {
        self.numbered += 1;
        self.numbered
    }

    /// Makes a server that was there before this supervisor look at the cache's bounds again.
    pub(crate) fn refresh_cache(&mut self) {
        if self.understands.is_some_and(|understands| understands.cache) {
            self.numbered += 1;
            // Nobody waits for the answer.
            let number = self.numbered;
            self.send(&ToServer::Cache { number, order: CacheOrder::Resize });
        }
    }

    /// Has the server look at the chunks that are lent to plain files: one of these has ended.
    pub(crate) fn look_at_loans(&mut self) {
        if self.understands.is_some_and(|understands| understands.cache) {
            // Nobody waits for the answer.
            let number = self.next_number();
            self.send(&ToServer::Cache { number, order: CacheOrder::Show });
        }
    }

    /// Keeps the answer to the question `number` until it is taken.
    pub(crate) fn answered(&mut self, number: u64, answer: Answer) {
        self.answers.insert(number, answer);
        if self.answers.len() > ANSWERS_MAX {
            self.answers.pop_first();
        }
    }

    /// Tells a new server of every mount, and makes it the current server.
    pub(crate) fn connect(&mut self, link: UnixStream, pid: Option<u32>, understands: Understands) {
        self.link = Some(link);
        self.connections += 1;
        self.cache_orders.clear();
        self.cache_answers.clear();
        self.server_pid = pid;
        self.server_is_silent = false;
        self.understands = Some(understands);
        self.introduce_opener();
        let ids: Vec<_> = self.mounts.keys().copied().collect();
        for id in ids {
            if let Some(entry) = self.mounts.get_mut(&id) {
                entry.recording = Recording::Off;
            }
            self.attach(id);
        }
    }

    /// The mounts that need the daemon: those that were let go do not.
    pub(crate) fn served(&self) -> impl Iterator<Item = &MountEntry> {
        self.mounts.values().filter(|entry| !entry.record.plain || entry.is_noting)
    }

    /// Connects the server with the opener, once both are there. An opener that does not take the
    /// message is replaced.
    pub(crate) fn introduce_opener(&mut self) {
        let understands = self.understands.is_some_and(|understands| understands.opener);
        let (Some(link), Some((opener, _)), true) = (&self.link, &self.opener, understands) else {
            return;
        };
        let introduced = opener::pair().map_err(|e| Error::io("cannot make a socket", e)).and_then(
            |(servers, openers)| {
                wire::send(opener, &ToOpener::Serve, &[openers.as_fd()])?;
                wire::send(link, &ToServer::Opener, &[servers.as_fd()])
            },
        );
        if let Err(e) = introduced {
            tracing::error!(error = %e, "the server cannot have files opened");
            let _ = opener.shutdown(Shutdown::Both);
        }
    }

    /// Sends the opener a message. An opener that does not take it is replaced.
    pub(crate) fn tell_opener(&mut self, message: &ToOpener) {
        let Some((opener, _)) = &self.opener else { return };
        if let Err(e) = wire::send(opener, message, &[]) {
            tracing::error!(error = %e, "the opener takes no message");
            let _ = opener.shutdown(Shutdown::Both);
        }
    }

    /// Tells the server of a mount, or tells it again.
    pub(crate) fn attach(&mut self, id: MountId) {
        let (Some(link), Some(entry)) = (&self.link, self.mounts.get_mut(&id)) else { return };
        if entry.record.plain {
            return;
        }
        self.numbered += 1;
        entry.attach_number = self.numbered;
        entry.attaches += 1;
        // A refused mount keeps its last answer until the server gives a new one.
        if !matches!(entry.serving, Serving::Refusing(_) | Serving::No(_)) {
            entry.serving = Serving::Awaited;
        }
        entry.send_attach(link, &self.folders);
    }

    /// Makes the server see new mappings and pins. Returns the number of its answer (in
    /// [`MountEntry::refreshes`]). Without a server, the next server's answer to its `Attach`
    /// counts as the answer. `None` if there is no such mount.
    pub(crate) fn refresh(&mut self, id: MountId) -> Option<u64> {
        let entry = self.mounts.get_mut(&id)?;
        self.numbered += 1;
        let number = self.numbered;
        entry.refreshes.insert(number, None);
        if let Some(link) = &self.link {
            match self.understands.is_some_and(|understands| understands.refreshes) {
                true => drop(wire::send(link, &ToServer::Refresh { number, id }, &[])),
                false => entry.send_attach(link, &self.folders),
            }
        }
        Some(number)
    }

    /// Handles a message of the server, and returns the work that is left to the supervisor.
    pub(crate) fn handle_message(&mut self, message: FromServer) -> Option<ToDo> {
        match message {
            FromServer::Attached { id, number, error, served, refused, opener } => {
                if let Some(failure) = &error {
                    tracing::error!(mount = %id, error = %failure.what, "the server cannot serve the mount as told");
                }
                let answer = Attached { id, number, error, served, refused, opener };
                return self.attached(answer).then_some(ToDo::Mend(id));
            }
            FromServer::Refreshed { id, number, error } => self.refreshed(id, number, error),
            FromServer::Recorded { id, on, cut_short, error } => {
                if let Some(entry) = self.mounts.get_mut(&id) {
                    entry.recording = match error {
                        Some(failure) => Recording::Failed(failure.into()),
                        None if on => Recording::On,
                        None => Recording::Done(cut_short),
                    };
                }
            }
            FromServer::Ended { id, is_damaged } => {
                return Some(ToDo::Release { id, is_damaged });
            }
            FromServer::Report { mounts, cache } => {
                self.cache = cache;
                self.reports = mounts.into_iter().map(|report| (report.id, report)).collect();
                self.report_count += 1;
                self.server_is_silent = false;
            }
            FromServer::Cache { number, answer, error } => {
                // Nobody waits any more for an answer that comes after its server's end.
                if self.cache_orders.remove(&number) {
                    self.cache_answers.insert(number, (answer, error));
                }
            }
            FromServer::Waits { number, waits } => {
                self.answered(number, Answer::Waits(waits));
            }
            FromServer::Places { number, places } => {
                self.answered(number, Answer::Places(places));
            }
            FromServer::AskHelper { number, helper, registry } => {
                if self.helpers < HELPERS_MAX {
                    self.helpers += 1;
                    let question = Question { connection: self.connections, number };
                    return Some(ToDo::AskHelper { question, helper, registry });
                }
                let said = Err("too many credential helpers run at once: try again".to_owned());
                self.send(&ToServer::HelperSaid { number, said });
            }
            FromServer::Serving(_) | FromServer::Adopted { .. } => {}
            FromServer::Unknown => {
                tracing::warn!(own = VERSION, "ignoring a message of a later server");
            }
        }
        None
    }

    /// Handles the server's answer to an `Attach`; false if it is stale.
    fn attached(&mut self, answer: Attached) -> bool {
        let Attached { id, number, error, served, refused, opener } = answer;
        let Some(entry) = self.mounts.get_mut(&id) else { return false };
        if number.is_some_and(|number| number != entry.attach_number) {
            return false;
        }
        entry.attach_answered = entry.attach_number;
        entry.opener = opener.or(self.server_pid);
        // It has read everything anew; a server of an earlier version answers a refresh this way,
        // too.
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

    /// Tells the server what a helper said, unless another server has taken its place: a password
    /// must not reach who has asked for another registry's.
    pub(crate) fn helper_said(&mut self, question: Question, said: Result<String, String>) {
        self.helpers = self.helpers.saturating_sub(1);
        if question.connection == self.connections {
            self.send(&ToServer::HelperSaid { number: question.number, said });
        }
    }

    /// Handles the server's answer to a `Refresh`.
    fn refreshed(&mut self, id: MountId, number: u64, error: Option<WireError>) {
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
pub(super) mod tests;
