//! The server monitor: keeps a server running.
//!
//! ```text
//!   adopt an orphan, or spawn ──► tell it every mount ──► listen ──► its stream ends: it is dead
//!          ▲                                                                   │
//!          └────────────── at once; after quick deaths, a doubling pause ◄─────┘
//! ```
//!
//! The requests of the dead server lie in the slots, or with the kernel; the mount's readers wait,
//! and the next server answers them. Requests that came over FUSE's io_uring are lost with the
//! server: those mounts get a new connection (`reconnect.rs`).

use std::{
    os::{fd::OwnedFd, unix::net::UnixStream},
    process::Child,
    sync::{Arc, PoisonError},
    thread,
    time::{Duration, Instant},
};

use burgeon_block::{Error, Result};
use burgeon_source::registry::ask_helper;

use super::{Supervisor, table::ToDo};
use crate::{
    host::{
        program,
        system::{Identity, identity},
    },
    ipc::{
        client::connect_to_orphan,
        link::{FromServer, Understands, VERSION, sort_descriptors},
        wire,
    },
    roles,
    state::{
        cache::remove_earlier, cache_dir::CacheDir, files::Lock, paths::StateDir, record::Attach,
    },
};

/// A server that lived this long was healthy: its successor is started at once.
const HEALTHY: Duration = Duration::from_secs(10);

/// The pause after the second quick death in a row; it doubles up to [`PAUSE_MAX`].
const PAUSE_MIN: Duration = Duration::from_millis(20);

/// The longest pause. Readers wait this long plus the start of a server, which stays below a second
/// however often it dies; two starts a second are no load.
const PAUSE_MAX: Duration = Duration::from_millis(500);

/// Time limit for a server to notice its supervisor's death, or to end, and the interval of checks.
/// The kernel notifies it at once; the rest allows for a busy machine.
const ORPHAN_PATIENCE: Duration = Duration::from_secs(20);
const ORPHAN_PAUSE: Duration = Duration::from_millis(10);

/// Waits before a process is started again that lived for `life`; returns the pause, for the next
/// time.
pub(super) fn pause_after(life: Duration, last: Duration) -> Duration {
    let pause = match (life >= HEALTHY, last) {
        (true, _) => Duration::ZERO,
        (false, Duration::ZERO) => PAUSE_MIN,
        (false, last) => (2 * last).min(PAUSE_MAX),
    };
    // The first death after a healthy life costs no pause.
    if pause > PAUSE_MIN {
        thread::sleep(pause);
    }
    pause
}

/// A running server: a child, or an adopted orphan.
pub(super) struct Running {
    pub(super) stream: UnixStream,
    pub(super) child: Option<Child>,
    pub(super) pid: Option<u32>,
    pub(super) understands: Understands,
}

impl Supervisor {
    /// Runs until the supervisor stops. `orphan` is a server that outlived its supervisor.
    pub(super) fn monitor_server(self: &Arc<Self>, orphan: Option<Orphan>) {
        let mut orphan = orphan;
        let mut pause = Duration::ZERO;
        loop {
            let begun = Instant::now();
            let running = match orphan.take() {
                Some(Orphan { stream, understands }) => {
                    Ok(Running { pid: peer_pid(&stream), stream, child: None, understands })
                }
                None => self.spawn(),
            };
            match running {
                Ok(running) => self.listen(running),
                Err(e) => tracing::error!(error = %e, "cannot start the server"),
            }
            if self.table().stopping {
                return;
            }
            self.reconnect_rings();
            pause = pause_after(begun.elapsed(), pause);
            self.table().server_restarts += 1;
        }
    }

    fn spawn(&self) -> Result<Running> {
        let failed = |e| Error::io("cannot start the serving process", e);
        remove_earlier(&self.state);
        if let Err(error) = CacheDir::settle(&self.state) {
            tracing::warn!(%error, "cannot record the cache's folder: it is that of the state directory");
        }
        let (ours, theirs) = UnixStream::pair().map_err(failed)?;
        let child = program::start("__serve", self.state.root(), theirs).map_err(failed)?;
        let understands = Understands::ALL;
        Ok(Running { pid: Some(child.id()), stream: ours, child: Some(child), understands })
    }

    /// The folders that a server uses, as the host sees them now.
    pub(super) fn folders_of_server(&self) -> Vec<Option<Identity>> {
        roles::folders_of_server(&self.state).iter().map(|folder| identity(folder)).collect()
    }

    /// Sends the server every mount, then handles its messages until it dies.
    pub(super) fn listen(self: &Arc<Self>, running: Running) {
        let Running { stream, child, pid, understands } = running;
        match stream.try_clone() {
            Ok(link) => {
                let folders = self.folders_of_server();
                let mut table = self.table();
                table.folders = folders;
                table.connect(link, pid, understands);
                if child.is_none() {
                    table.refresh_cache();
                }
            }
            Err(e) => tracing::error!(error = %e, "cannot talk to the server"),
        }
        loop {
            match wire::receive::<FromServer>(&stream) {
                Ok(Some((message, _))) => self.handle_message(message),
                Ok(None) => break,
                Err(e) => {
                    tracing::error!(error = %e, "cannot understand the server");
                    break;
                }
            }
        }
        {
            let mut table = self.table();
            table.link = None;
            table.server_pid = None;
        }
        self.changed.notify_all();
        drop(stream);
        if let Some(mut child) = child {
            match child.wait() {
                Ok(status) if status.success() => tracing::info!("the server ended"),
                Ok(status) => tracing::warn!(%status, "the server ended"),
                Err(e) => tracing::warn!(error = %e, "cannot wait for the server"),
            }
        }
    }

    fn handle_message(self: &Arc<Self>, message: FromServer) {
        let to_do = self.table().handle_message(message);
        match to_do {
            Some(ToDo::Mend(id)) => self.mend_if_needed(id),
            Some(ToDo::Release { id, is_damaged }) => {
                // Removing the mount's folder may wait for a disk; the server's messages must not.
                let supervisor = Arc::clone(self);
                thread::spawn(move || {
                    if is_damaged {
                        supervisor.doubt(id);
                    }
                    supervisor.release(id);
                });
            }
            Some(ToDo::AskHelper { question, helper, registry }) => {
                let supervisor = Arc::clone(self);
                thread::spawn(move || {
                    let said = ask_helper(&helper, &registry);
                    supervisor.table().helper_said(question, said);
                });
            }
            None => {}
        }
        self.changed.notify_all();
    }
}

/// A mount that an orphan serves, as it reports it.
pub(super) struct Inherited {
    pub(super) attach: Attach,
    pub(super) fuse: Option<OwnedFd>,
    pub(super) slots: OwnedFd,
}

/// A server that outlived its supervisor.
pub(super) struct Orphan {
    stream: UnixStream,
    understands: Understands,
}

/// Finds a server that outlived its supervisor and takes over its mounts.
pub(super) fn adopt(state: &StateDir) -> Result<Option<(Orphan, Vec<Inherited>)>> {
    let Some(stream) = orphan(state)? else { return Ok(None) };
    let mut mounts = Vec::new();
    loop {
        match wire::receive::<FromServer>(&stream)? {
            Some((FromServer::Serving(attach), fds)) => {
                if let Some((fuse, slots)) = sort_descriptors(attach.transport, fds) {
                    mounts.push(Inherited { attach, fuse, slots });
                }
            }
            Some((FromServer::Adopted { refreshes, version }, _)) => {
                tracing::debug!(version, own = VERSION, "adopted a server");
                let understands = Understands::as_told(refreshes, version);
                return Ok(Some((Orphan { stream, understands }, mounts)));
            }
            Some(_) => {}
            // It has died meanwhile: there is nothing to adopt.
            None => return Ok(None),
        }
    }
}

/// Connects to a server without a supervisor. One that has not noticed its supervisor's death yet
/// will listen soon; its mounts must not be treated as lost.
fn orphan(state: &StateDir) -> Result<Option<UnixStream>> {
    let begun = Instant::now();
    loop {
        if let Ok(stream) = connect_to_orphan(state) {
            return Ok(Some(stream));
        }
        // A server holds this lock as long as it lives.
        if Lock::try_take(&state.run().join("server.lock"))?.is_some() {
            return Ok(None);
        }
        if begun.elapsed() > ORPHAN_PATIENCE {
            tracing::error!("a server is alive that takes no new supervisor");
            return Ok(None);
        }
        thread::sleep(ORPHAN_PAUSE);
    }
}

fn peer_pid(stream: &UnixStream) -> Option<u32> {
    let peer = rustix::net::sockopt::socket_peercred(stream).ok()?;
    u32::try_from(peer.pid.as_raw_nonzero().get()).ok()
}

impl Supervisor {
    /// Locks the table. A panicked thread leaves it consistent, because every change is one
    /// statement.
    pub(super) fn table(&self) -> std::sync::MutexGuard<'_, super::table::Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
