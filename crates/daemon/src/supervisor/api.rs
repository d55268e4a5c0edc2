//! Serves the API socket: one thread per client, at most [`CLIENTS_MAX`] of them.

use std::{
    fs::File,
    os::{
        fd::{AsFd, OwnedFd},
        unix::net::{UnixListener, UnixStream},
    },
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::SeqCst},
    },
    thread,
    time::Duration,
};

use burgeon_block::{Error, ErrorKind, Result};

use super::Supervisor;
use crate::{
    host::peer::Peer,
    ipc::{
        protocol::{CacheRequest, Reply, Request},
        wire,
    },
};

/// Concurrent clients. Each is a command that waits for one answer.
const CLIENTS_MAX: usize = 64;

/// Write timeout towards a client.
const PATIENCE: Duration = Duration::from_secs(30);

/// Time limit for mounts that were unmounted to be released, before a shutdown calls them mounted.
const UNMOUNTED_MAX: Duration = Duration::from_secs(5);

/// Stack size of a client's thread. Messages lie on the heap, but a mount may contact a registry:
/// verifying a certificate took more than 256 KiB in an unoptimised build. Only touched pages use
/// memory.
const STACK: usize = 1 << 20;

impl Supervisor {
    /// Accepts clients for ever.
    pub(super) fn accept(self: &Arc<Self>, socket: &UnixListener) -> ! {
        let clients = Arc::new(AtomicUsize::new(0));
        loop {
            let stream = match socket.accept() {
                Ok((stream, _)) => stream,
                Err(e) => {
                    tracing::error!(error = %e, "cannot take a client");
                    // Most likely out of descriptors: a pause is better than a busy loop.
                    thread::sleep(Duration::from_millis(100));
                    continue;
                }
            };
            if clients.fetch_add(1, SeqCst) >= CLIENTS_MAX {
                clients.fetch_sub(1, SeqCst);
                continue;
            }
            let (supervisor, clients_here) = (Arc::clone(self), Arc::clone(&clients));
            let spawned = thread::Builder::new().stack_size(STACK).spawn(move || {
                if let Err(e) = supervisor.converse(&stream) {
                    tracing::warn!(error = %e, "a client was cut off");
                }
                clients_here.fetch_sub(1, SeqCst);
            });
            if spawned.is_err() {
                clients.fetch_sub(1, SeqCst);
            }
        }
    }

    fn converse(self: &Arc<Self>, stream: &UnixStream) -> Result<()> {
        let failed = |e| Error::io("cannot set up a client's socket", e);
        check_peer(stream)?;
        let peer = Peer::of(stream).ok();
        // No read timeout: between two requests a client may wait for an umount that writes back
        // gigabytes.
        stream.set_write_timeout(Some(PATIENCE)).map_err(failed)?;
        let mut recorded = None;
        let ended = loop {
            let (request, fds) = match wire::receive::<Request>(stream) {
                Ok(Some(request)) => request,
                Ok(None) => break Ok(()),
                Err(e) => break Err(e),
            };
            let checked = match changes(&request) {
                true => self.check_administrator(peer.as_ref()),
                false => Ok(()),
            };
            if let Err(refusal) = checked.and_then(|()| self.refuse_plain(&request)) {
                wire::send(stream, &refuse(request.name(), refusal), &[])?;
                continue;
            }
            match request {
                Request::Record { id } => recorded = Some(id),
                Request::Recorded { .. } => recorded = None,
                _ => {}
            }
            if let Err(e) = self.answer(stream, request, fds) {
                break Err(e);
            }
        };
        if let Some(id) = recorded {
            self.stop_recording(id);
        }
        ended
    }

    /// Only an administrator changes mounts: another process could have any file mapped and granted
    /// to it, as the server, which has this uid, or a service that is root without capabilities.
    fn check_administrator(&self, peer: Option<&Peer>) -> Result<()> {
        let server = self.table().server_pid;
        let is_server = |peer: &Peer| u32::try_from(peer.pid.as_raw_nonzero().get()).ok() == server;
        if peer.is_some_and(|peer| peer.is_administrator() && !is_server(peer)) {
            return Ok(());
        }
        // Without a descriptor to spare, nothing is known of it.
        drop(File::open("/proc/self/uid_map").map_err(|e| {
            Error::io("the daemon cannot look at the process that asks: raise its limit of open files (ulimit -n)", e)
        })?);
        let what = "the daemon changes mounts only for processes with CAP_SYS_ADMIN, which this one \
            lacks: run the command as root on the host, or give that capability to its service or \
            container";
        Err(Error::new(ErrorKind::Invalid, what))
    }

    pub(super) fn answer(
        self: &Arc<Self>,
        stream: &UnixStream,
        request: Request,
        fds: Vec<OwnedFd>,
    ) -> Result<()> {
        let name = request.name();
        match self.answer_with_descriptor(stream, request, fds) {
            Ok(Answered::Sent(sent)) => sent,
            Ok(Answered::No(request)) => {
                let reply = self.reply(stream, request).unwrap_or_else(|e| refuse(name, e));
                wire::send(stream, &reply, &[])
            }
            Err(e) => wire::send(stream, &refuse(name, e), &[]),
        }
    }

    /// Answers a request whose answer has a descriptor.
    fn answer_with_descriptor(
        self: &Arc<Self>,
        stream: &UnixStream,
        request: Request,
        fds: Vec<OwnedFd>,
    ) -> Result<Answered> {
        let sent = match request {
            Request::Mount(request) => {
                let (mounted, mount) = self.mount(*request)?;
                let id = mounted.id;
                let sent = wire::send(stream, &Reply::Mounted(mounted), &[mount.as_fd()]);
                drop(mount);
                self.handed_out(id);
                sent
            }
            Request::Map(request) => {
                let (start, notes, area) = self.map(&request, fds.into_iter().next())?;
                wire::send(stream, &Reply::Mapped { start, notes }, &[area.as_fd()])
            }
            Request::Recorded { id } => {
                let (cut_short, reads) = self.finish_recording(id)?;
                wire::send(stream, &Reply::Recorded { cut_short }, &[reads.as_fd()])
            }
            request => return Ok(Answered::No(request)),
        };
        Ok(Answered::Sent(sent))
    }

    /// The answer to any other request.
    fn reply(self: &Arc<Self>, stream: &UnixStream, request: Request) -> Result<Reply> {
        let done = |()| Reply::Done;
        match request {
            Request::Mount(_) | Request::Map(_) | Request::Recorded { .. } => {
                let what =
                    "this request is only accepted from a client that can receive a descriptor";
                Err(Error::new(ErrorKind::Invalid, what))
            }
            Request::Mappings { id } => self.mappings(id),
            Request::Pin { id, path, ranges } => self.pin(id, &path, &ranges).map(done),
            Request::Placed { id, target } => self.placed(id, target).map(done),
            Request::Record { id } => self.start_recording(id).map(done),
            Request::AskHelper { helper, registry } => {
                let said = burgeon_source::registry::ask_helper(&helper, &registry);
                Ok(Reply::HelperSaid(said))
            }
            Request::Status => Ok(Reply::Status(Box::new(self.status()))),
            Request::Cache(request) => self.cache(request, Some(stream)).map(Reply::Cache),
            Request::BeginLetGo { id, reserve } => {
                self.begin_let_go(id, reserve).map(|later| Reply::LetGo { later })
            }
            Request::LetGo { id } => self.change_to_plain(id).map(done),
            Request::Log { level, json } => {
                let (level, json) = self.change_log(level.as_deref(), json)?;
                Ok(Reply::Log { level, json })
            }
            Request::Waits { id, after } => {
                self.waits(id, after).map(|waits| Reply::Waits { waits })
            }
            Request::Places { id, first } => self.places(id, first).map(Reply::Places),
            Request::AwaitRelease { id, timeout_ms } => {
                self.await_release(id, Duration::from_millis(timeout_ms)).map(done)
            }
            Request::Shutdown { force } => {
                if !force {
                    self.await_unmounted(UNMOUNTED_MAX);
                }
                self.try_stop(force)?;
                let _ = wire::send(stream, &Reply::Done, &[]);
                self.end();
            }
        }
    }
}

/// The outcome of a request that may have been answered.
enum Answered {
    /// With a descriptor; the answer was sent, or could not be.
    Sent(Result<()>),
    /// Not yet.
    No(Request),
}

/// The answer to a client whose request, called `name`, is refused or has failed.
fn refuse(name: &str, error: Error) -> Reply {
    tracing::info!(request = name, %error, "a request was refused");
    Reply::Failed(error.into())
}

/// False for requests that only look, and for those of servers of earlier versions.
fn changes(request: &Request) -> bool {
    match request {
        Request::Mount(_)
        | Request::Placed { .. }
        | Request::Map(_)
        | Request::Record { .. }
        | Request::Recorded { .. }
        | Request::Pin { .. }
        | Request::BeginLetGo { .. }
        | Request::LetGo { .. }
        | Request::Shutdown { .. } => true,
        Request::Log { level, json } => level.is_some() || json.is_some(),
        Request::Cache(request) => !matches!(request, CacheRequest::Show),
        Request::AskHelper { .. }
        | Request::Mappings { .. }
        | Request::Status
        | Request::Waits { .. }
        | Request::Places { .. }
        | Request::AwaitRelease { .. } => false,
    }
}

/// Admits only root and the daemon's own user: others, the servers' among them, must not control
/// mounts or read data.
fn check_peer(stream: &UnixStream) -> Result<()> {
    let peer = rustix::net::sockopt::socket_peercred(stream)
        .map_err(|e| Error::io("cannot determine the user of the client", e.into()))?;
    if peer.uid.is_root() || peer.uid == rustix::process::geteuid() {
        return Ok(());
    }
    Err(Error::new(
        ErrorKind::Invalid,
        format!(
            "user {} may not use this daemon: only root and the daemon's own user may",
            peer.uid.as_raw()
        ),
    ))
}
