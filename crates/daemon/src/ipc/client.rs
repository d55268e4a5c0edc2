//! The client of the API: finds the daemon, starts it if none runs, and sends requests.

use std::{
    fs::File,
    io,
    os::{
        fd::{BorrowedFd, OwnedFd},
        unix::{fs::OpenOptionsExt, net::UnixStream},
    },
    path::PathBuf,
    sync::{
        OnceLock,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    thread,
    time::{Duration, Instant},
};

use burgeon_block::{Error, ErrorKind, Result};
use burgeon_source::beneath::link_to;
use rustix::{fs::OFlags, process::Pid};

use crate::{
    host::own_root,
    ipc::{
        protocol::{DaemonStatus, Reply, Request},
        silence::{Patience, ask, has_gone, is_readable},
        wire,
    },
    state::paths::StateDir,
};

/// The name of the daemon's socket in the `run/` folder.
pub(crate) const API: &str = "api.sock";

/// Time limit for a daemon to end.
const ENDING_TIMEOUT: Duration = Duration::from_secs(5);

/// Time limit for a status: a supervisor gives it within two seconds.
const STATUS_TIMEOUT: Duration = Duration::from_secs(30);

/// Interval of checking if it has ended.
const PAUSE: Duration = Duration::from_millis(10);

/// A connection to the daemon of one state directory. It waits for an answer as long as the daemon
/// gives signs of life, unless [`Client::wait_at_most`] has set a limit.
#[derive(Debug)]
pub struct Client {
    state: StateDir,
    stream: UnixStream,
    /// The limit in milliseconds, or [`NO_LIMIT`].
    limit: AtomicU64,
    /// The time that was waited in vain. A late answer would be taken for that to the next request,
    /// so the connection is not used any more.
    silent_for: OnceLock<Duration>,
}

/// No limit of [`Client::wait_at_most`].
const NO_LIMIT: u64 = u64::MAX;

impl Client {
    /// Connects to a running daemon; `None` if there is none.
    pub fn connect(state: &StateDir) -> Result<Option<Self>> {
        match connect_to(state, API) {
            Ok(stream) => Self::over(state, stream).map(Some),
            // There is no socket, or a dead daemon has left it.
            Err(e) if e.kind() == ErrorKind::NotFound => Ok(None),
            Err(e) => Err(e),
        }
    }

    /// A running daemon and its status; `None` if there is none. A daemon that is ending, or was
    /// just killed, accepts connections and does not answer: this waits until it has ended.
    pub fn connect_and_ask(state: &StateDir) -> Result<Option<(Self, DaemonStatus)>> {
        let begun = Instant::now();
        loop {
            let Some(client) = Self::connect(state)? else { return Ok(None) };
            client.wait_at_most(STATUS_TIMEOUT);
            match client.call(&Request::Status) {
                Ok((Reply::Status(status), _)) => {
                    client.limit.store(NO_LIMIT, Relaxed);
                    return Ok(Some((client, *status)));
                }
                Err(e) if begun.elapsed() >= STATUS_TIMEOUT => return Err(e),
                Ok(_) => {
                    return Err(Error::new(
                        ErrorKind::Corrupt,
                        "unexpected answer from the daemon: is it of another version? `burgeon upgrade` replaces it",
                    ));
                }
                Err(e)
                    if e.kind() == ErrorKind::Unavailable && begun.elapsed() < ENDING_TIMEOUT =>
                {
                    thread::sleep(PAUSE);
                }
                Err(e) => return Err(e),
            }
        }
    }

    /// Sends a request and waits for the reply. A [`Reply::Failed`] is returned as the original
    /// error.
    pub fn call(&self, request: &Request) -> Result<(Reply, Vec<OwnedFd>)> {
        self.call_with(request, &[])
    }

    /// The same, with descriptors.
    pub fn call_with(
        &self,
        request: &Request,
        fds: &[BorrowedFd<'_>],
    ) -> Result<(Reply, Vec<OwnedFd>)> {
        // If the daemon has ended, sending fails, too, and receiving reports the end of the stream.
        let sent = wire::send(&self.stream, request, fds);
        let answer = match sent {
            Ok(()) => self.receive()?,
            Err(e) => match self.receive() {
                Ok(None) => None,
                _ => return Err(e),
            },
        };
        match answer {
            Some((Reply::Failed(failure), _)) => Err(failure.into()),
            Some(answer) => Ok(answer),
            None => Err(Error::new(
                ErrorKind::Unavailable,
                "the daemon ended before it answered: try again; `burgeon doctor` lists its \
                 leftovers",
            )),
        }
    }
}

impl Client {
    fn over(state: &StateDir, stream: UnixStream) -> Result<Self> {
        // For the parts of a message: the wait for an answer has limits of its own.
        let limit = Some(Patience::USUAL.limit);
        let set = stream.set_read_timeout(limit).and_then(|()| stream.set_write_timeout(limit));
        set.map_err(|e| Error::io("cannot set how long to wait for the daemon", e))?;
        Ok(Self {
            state: state.clone(),
            stream,
            limit: AtomicU64::new(NO_LIMIT),
            silent_for: OnceLock::new(),
        })
    }

    /// Sets a time limit for answers from now on.
    pub fn wait_at_most(&self, time: Duration) {
        let limit = u64::try_from(time.as_millis()).unwrap_or(NO_LIMIT - 1);
        self.limit.store(limit, Relaxed);
    }

    /// True if an answer was waited for in vain: no request will get one any more.
    pub fn is_silent(&self) -> bool {
        self.silent_for.get().is_some()
    }

    /// True if the daemon has closed the connection.
    pub(crate) fn has_ended(&self) -> bool {
        has_gone(&self.stream)
    }

    /// The next answer; `None` at the end of the connection.
    fn receive(&self) -> Result<Option<(Reply, Vec<OwnedFd>)>> {
        if let Some(waited) = self.silent_for.get() {
            return Err(self.silence(*waited));
        }
        let (waited, has_come) = match self.limit.load(Relaxed) {
            NO_LIMIT => {
                // A daemon that is ending has no socket any more.
                let ask_again = || {
                    let (_folder, socket) = socket_path(&self.state, API).ok()?;
                    ask(&socket)
                };
                let patience = Patience::USUAL;
                (patience.quiet + patience.limit, patience.await_answer(&self.stream, ask_again))
            }
            limit => {
                let limit = Duration::from_millis(limit);
                (limit, is_readable(&self.stream, limit))
            }
        };
        match has_come {
            Ok(true) => wire::receive(&self.stream),
            Ok(false) => Err(self.silence(*self.silent_for.get_or_init(|| waited))),
            Err(e) => Err(Error::io("cannot wait for the daemon", e)),
        }
    }

    /// The error of a daemon that keeps a client waiting.
    fn silence(&self, waited: Duration) -> Error {
        let process = self.supervisor().map_or(0, |pid| pid.as_raw_nonzero().get());
        let what = format!(
            "the daemon of {} (process {process}) does not answer within {} s: it was stopped, or \
             waits for a disk; mounts are served meanwhile. Look at its log, and if it stays so, \
             end that process and run `burgeon doctor --repair`",
            self.state.root().display(),
            waited.as_secs()
        );
        Error::new(ErrorKind::Unavailable, what)
    }

    /// The listening process: the supervisor.
    pub(crate) fn supervisor(&self) -> Result<Pid> {
        rustix::net::sockopt::socket_peercred(&self.stream)
            .map(|peer| peer.pid)
            .map_err(|e| Error::io("cannot tell which process the daemon is", e.into()))
    }

    /// Waits until the daemon has ended, which closes the connection; an error if it gives no sign
    /// of life before.
    pub fn wait_for_end(self) -> Result<()> {
        while self.receive()?.is_some() {}
        Ok(())
    }
}

/// Connects to the socket `name` in the `run/` folder; `NotFound` if no process listens there. The
/// listener must be this user or root, because credentials and descriptors are sent to it.
pub(crate) fn connect_to(state: &StateDir, name: &str) -> Result<UnixStream> {
    connect(state, name, &[])
}

/// The same for a server without a supervisor, which may have a user of its own.
pub(crate) fn connect_to_orphan(state: &StateDir) -> Result<UnixStream> {
    connect(state, "adopt.sock", &[own_root::USER])
}

fn connect(state: &StateDir, name: &str, also: &[u32]) -> Result<UnixStream> {
    let (_folder, path) = socket_path(state, name)?;
    let stream = UnixStream::connect(&path).map_err(|e| {
        let what = format!("cannot connect to the daemon of {}", state.root().display());
        match e.kind() {
            io::ErrorKind::ConnectionRefused => Error::new(ErrorKind::NotFound, what),
            _ => Error::io(what, e),
        }
    })?;
    let peer = rustix::net::sockopt::socket_peercred(&stream)
        .map_err(|e| Error::io("cannot determine the user of the daemon", e.into()))?;
    let is_welcome = peer.uid.is_root() || also.contains(&peer.uid.as_raw());
    if is_welcome || peer.uid == rustix::process::geteuid() {
        return Ok(stream);
    }
    let what = format!(
        "a process of another user (uid {}) listens on {}: nothing was sent to it; end it, and remove the \
         socket",
        peer.uid.as_raw(),
        state.run().join(name).display()
    );
    Err(Error::new(ErrorKind::Invalid, what))
}

/// A path to a socket in the `run/` folder that is short enough for any state directory: it goes
/// through a descriptor of the folder, which must stay open while the path is used.
pub(crate) fn socket_path(state: &StateDir, name: &str) -> Result<(File, PathBuf)> {
    let run = state.run();
    let flags = (OFlags::DIRECTORY | OFlags::NOFOLLOW).bits() as i32;
    let folder = File::options().read(true).custom_flags(flags).open(&run);
    let folder = folder.map_err(|e| Error::io(format!("cannot open {}", run.display()), e))?;
    let path = link_to(&folder).join(name);
    Ok((folder, path))
}

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::net::UnixListener, time::Duration};

    use super::{API, Client};
    use crate::{
        ipc::{
            protocol::{Reply, Request},
            wire,
        },
        state::paths::StateDir,
    };

    #[test]
    fn a_late_answer_is_not_taken_for_that_to_the_next_request() {
        let folder = tempfile::tempdir().unwrap();
        let state = StateDir::open(folder.path()).unwrap();
        fs::create_dir_all(state.run()).unwrap();
        let daemon = UnixListener::bind(state.run().join(API)).unwrap();
        let client = Client::connect(&state).unwrap().unwrap();
        let (stream, _) = daemon.accept().unwrap();
        client.wait_at_most(Duration::from_millis(5));
        assert!(!client.is_silent());
        let process = format!("(process {})", std::process::id());
        for _ in 0..2 {
            let error = client.call(&Request::Status).unwrap_err().to_string();
            assert!(error.contains(&process) && error.contains("does not answer"), "{error}");
            wire::send(&stream, &Reply::Done, &[]).unwrap();
        }
        assert!(client.is_silent());
        client.wait_for_end().unwrap_err();
    }
}
