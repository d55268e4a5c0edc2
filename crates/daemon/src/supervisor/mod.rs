//! The supervisor: the small process that holds everything that must survive the server.
//!
//! ```text
//!   commands ──► api.sock ──► api: one thread a client ──► mount, status, …
//!                                                            │
//!   table: every mount's /dev/fuse descriptor and slots ◄────┘
//!   watch: removes ublk devices after their last user
//!   unreachable: ends an idle daemon that no command can reach
//!   abandoned: unmounts file systems that the daemon's copied mount namespace alone has mounted
//!      │ told to each server in turn
//!   server_monitor ──► server (a child, or an orphan that was adopted)
//!   opener_monitor ──► opener (a child), which opens files of the host for the server
//!   grants ──► the files that it may open, a record for each mount
//!   totals ──► lifetime totals of reads, durable; status_socket ──► readers of metrics
//!   hold ──► copies of /dev/fuse and slots, with systemd or a process
//! ```
//!
//! Each request of a client and each thread is a file, with the methods of [`Supervisor`] for it:
//! they all need the table, under its one lock, and the state directory. What can be decided
//! without them is a part of its own (`table`, `plan`, `grants`, `totals`, `exchange`), with tests
//! that have no supervisor.
//!
//! Invariants:
//! - One supervisor per state directory: it holds `run/lock` as long as it lives.
//! - It takes over the descriptors held for it (`hold.rs`) before it starts a server.
//! - It serves nothing itself, so its threads may wait for the kernel, which waits for the server.
//! - It keeps no reference to a mount once its descriptor has been handed out: a plain `umount`
//!   releases everything.
//! - Everything it needs after a crash is on disk (`mounts/<id>/mount.json`).

mod abandoned;
mod api;
mod cache;
pub(crate) mod exchange;
mod exchangeable;
mod first_server;
mod grants;
mod grow;
pub(crate) mod helper;
mod hold;
mod layers;
mod logging;
mod map;
mod mend;
mod mount;
mod opener_monitor;
mod plain;
mod plan;
pub(crate) mod plumbing;
mod profile;
mod questions;
mod reconnect;
mod record;
mod recover;
mod release;
mod server_monitor;
mod status;
mod status_socket;
mod table;
mod thin;
mod totals;
mod unreachable;
mod watch;

use std::{
    net::Shutdown,
    path::Path,
    process::ExitCode,
    sync::{Arc, Condvar, Mutex},
    thread,
};

use burgeon_block::{Error, ErrorKind, Result};
use burgeon_source::Directory;

use crate::{
    holder,
    host::{backing_devices, cgroup::OwnCgroup, harden, namespace, program, signals},
    ipc::{self, client::socket_path, protocol::WireError},
    log, start,
    state::{
        cache::Bounds,
        files::{self, Lock},
        paths::StateDir,
        recycled_seed,
    },
    transport,
};

use hold::Holder;
pub(crate) use release::{await_loops, forget_loops, remove_unused_loops};
use table::Table;
pub(crate) use thin::growth;

/// Interval at which a mount that cannot be served again is checked, to clear up after its umount.
const LOST_INTERVAL: std::time::Duration = std::time::Duration::from_secs(1);

/// The supervisor's shared state.
pub(crate) struct Supervisor {
    state: StateDir,
    table: Mutex<Table>,
    /// Notified at every change of the table.
    changed: Condvar,
    cgroup: OwnCgroup,
    holder: Holder,
    lock: Lock,
    /// Held by the one thread that writes a mount's grants.
    granting: Mutex<()>,
    /// Lifetime totals.
    counting: totals::Counting,
    /// The last status that a reader was given.
    recent: status_socket::Recent,
}

/// Runs a supervisor until it is told to end. This is the main function of the process `burgeon
/// __supervise STATE-DIR`.
pub fn supervise(state_dir: &Path) -> ExitCode {
    program::take_serving_name("__supervise", state_dir);
    match begin(state_dir) {
        // It returns only if another supervisor has the state directory.
        Ok(()) => {
            say(start::TAKEN);
            ExitCode::FAILURE
        }
        Err(e) => {
            log::prepare_to_end();
            tracing::error!(error = %e, "the daemon cannot start");
            say(&serde_json::to_string(&WireError::from(e)).unwrap_or_default());
            ExitCode::FAILURE
        }
    }
}

/// Sends a message to the process that started this one. Under systemd it goes to the log.
fn say(words: &str) {
    log::Stream::new(rustix::stdio::stdout()).say(words);
}

fn begin(state_dir: &Path) -> Result<()> {
    // First, because systemd passes descriptors by number.
    let inherited = holder::inherited();
    harden::end_on_panic();
    // It fails if the process leads a group already, as under systemd; then it is not needed.
    let _ = rustix::process::setsid();
    rustix::process::umask(rustix::fs::Mode::from_raw_mode(0o077));
    let signals = signals::block_termination().map_err(|e| Error::io("cannot block signals", e))?;
    let state = StateDir::open(state_dir)?;
    backing_devices::refuse_burgeon(state.root(), "the state directory")?;
    let Some(lock) = Lock::try_take(&state.lock_file())? else { return Ok(()) };
    let (cgroup, mut missing) = OwnCgroup::enter(&state.tag());
    let is_copied = namespace::leave_transient()?;
    missing.extend(harden::harden(false));
    for sentence in missing {
        tracing::warn!("{sentence}");
    }
    if let Err(error) = Bounds::publish_configured(&state) {
        tracing::warn!(%error, "the configured bounds of the cache are not used");
    }
    // Sockets are files, too; XFS makes room for many at a time. It is reserved again below.
    recycled_seed::lend(&state);
    let socket = bind(&state)?;
    let status = ipc::status_socket::bind(&state);
    let (holder, held) = Holder::find(&state, inherited);
    let supervisor = Arc::new(Supervisor {
        counting: totals::Counting::begin(&state),
        recent: Mutex::default(),
        state,
        table: Mutex::default(),
        changed: Condvar::new(),
        cgroup,
        holder,
        lock,
        granting: Mutex::default(),
    });
    let orphan = supervisor.recover()?;
    supervisor.take_over(held);
    // Before there is an opener of this version.
    supervisor.grant_recovered();
    // An orphan may be in the copy that its supervisor made.
    if is_copied || orphan.is_some() {
        supervisor.in_thread(move |it| it.release_abandoned(is_copied));
    }
    transport::load_driver();
    supervisor.in_thread(|it| it.monitor_opener());
    supervisor.in_thread(|it| it.monitor_server(orphan));
    supervisor.reconnect_lost();
    supervisor.hold_the_rest();
    supervisor.in_thread(|it| {
        remove_unused_loops();
        // Removes the leftovers of images that are not mounted again.
        Directory::open(it.state.store()).iter().for_each(Directory::sweep);
    });
    recycled_seed::refill(&supervisor.state);
    supervisor.tend_thin();
    supervisor.in_thread(|it| it.count_for_ever());
    supervisor.in_thread(|it| it.bound_layers_for_ever());
    match status {
        Ok(status) => supervisor.in_thread(move |it| it.tell_status(&status)),
        Err(error) => {
            tracing::warn!(%error, "cannot open the status socket: metrics are unavailable")
        }
    }
    supervisor.in_thread(|it| it.watch_devices());
    supervisor.in_thread(move |it| it.end_when_unreachable(is_copied));
    supervisor.in_thread(move |it| it.handle_signals(&signals));
    tracing::info!(state = %supervisor.state.root().display(), "the daemon is ready");
    say(start::READY);
    close_stdout();
    start::notify_systemd();
    supervisor.accept(&socket)
}

fn bind(state: &StateDir) -> Result<std::os::unix::net::UnixListener> {
    let (_folder, path) = socket_path(state, "api.sock")?;
    // We hold the lock, so the process that listened here is dead.
    files::remove_file(&path)?;
    std::os::unix::net::UnixListener::bind(&path)
        .map_err(|e| Error::io(format!("cannot listen in {}", state.run().display()), e))
}

/// Closes standard output, which tells the starting process that this one is ready.
fn close_stdout() {
    if let Ok(null) = std::fs::File::options().write(true).open("/dev/null") {
        let _ = rustix::stdio::dup2_stdout(null);
    }
}

impl Supervisor {
    /// Does `work` in a thread of its own.
    fn in_thread(self: &Arc<Self>, work: impl FnOnce(Arc<Self>) + Send + 'static) {
        let this = Arc::clone(self);
        thread::spawn(move || work(this));
    }

    /// On a termination signal, ends as soon as nothing is mounted any more. A unit of systemd ends
    /// at once and leaves the mounts to the server, which ends with the last of them: a stop of the
    /// unit, or a shutdown, neither unmounts nor waits, and no read fails.
    fn handle_signals(&self, signals: &signals::TerminationSignals) {
        while let Ok(signal) = signals.wait() {
            let mounts = self.table().served().count();
            if start::is_unit() {
                log::prepare_to_end();
            }
            tracing::info!(signal, mounts, "ending by a signal");
            if self.try_stop(false).is_ok() {
                self.end();
            }
            if start::is_unit() {
                std::process::exit(0);
            }
            self.table().end_when_idle = true;
        }
    }

    /// Decides to stop: no new mounts from now on. Refused while a mount needs the daemon.
    fn try_stop(&self, force: bool) -> Result<()> {
        let mut table = self.table();
        let served = table.served().next();
        if let Some(entry) = served.filter(|_| !force) {
            let others = table.served().count() - 1;
            let others = if others > 0 { format!(" and {others} more") } else { String::new() };
            return Err(Error::new(
                ErrorKind::Unavailable,
                format!(
                    "still mounted: {}{others}; unmount first, or use `burgeon shutdown \
                     --unmount`",
                    entry.record.target.display()
                ),
            ));
        }
        if let Some((id, device)) = table.unread.iter().next().filter(|_| !force) {
            let what = format!(
                "still mounted: the mount {id} on {device}, whose record cannot be read; unmount \
                 it first (`findmnt -t btrfs` lists mounts), or use `burgeon shutdown --force`"
            );
            return Err(Error::new(ErrorKind::Unavailable, what));
        }
        table.stopping = true;
        Ok(())
    }

    /// Ends the process. The server is told first; all of its state can be recreated.
    fn end(&self) -> ! {
        self.count();
        self.table().send(&crate::ipc::link::ToServer::Stop);
        // Another state directory may be in this one's place, with a daemon of its own.
        if self.lock.is_at(&self.state.lock_file()) {
            for name in ["api.sock", "adopt.sock", "hold.sock"] {
                let _ = files::remove_file(&self.state.run().join(name));
            }
            let _ = files::remove_file(&ipc::status_socket::path(self.state.root()));
        }
        // Wait for both, so that after "shut down" no process is left.
        let table = self.table();
        table.opener.as_ref().map(|(stream, _)| stream.shutdown(Shutdown::Both));
        let waited =
            self.changed.wait_timeout_while(table, std::time::Duration::from_secs(5), |table| {
                table.link.is_some() || table.opener.is_some()
            });
        let left: Vec<_> = match waited {
            Ok((table, _)) => table.mounts.keys().copied().collect(),
            Err(_) => Vec::new(),
        };
        // After a forced end readers must not wait for a server: they get EIO.
        left.into_iter().for_each(transport::remove_devices);
        self.holder.end();
        self.cgroup.leave();
        log::prepare_to_end();
        tracing::info!("the daemon has ended");
        std::process::exit(0);
    }
}

#[cfg(test)]
mod tests;
