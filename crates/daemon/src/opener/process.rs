//! The process `burgeon __open STATE-DIR`.
//!
//! ```text
//!   main thread:  control ─► Serve ─► a line; the supervisor has ended ─► wait for the lines' ends
//!   a line:       one idle thread at least ─► receives ─► opens, perhaps for ever ─► answers
//! ```

use std::{
    io,
    os::{
        fd::{AsFd, OwnedFd},
        unix::net::UnixStream,
    },
    path::{Path, PathBuf},
    process::ExitCode,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    thread,
};

use burgeon_block::{Error, Result};
use burgeon_source::opening::not_granted;
use rustix::net::{SendFlags, Shutdown, shutdown};

use super::{
    NOT_A_FILE, NOT_GRANTED, OpenAnswer, OpenRequest, OpenTarget, REQUEST_MAX, ToOpener, devices,
    granted::Granted, receive, send,
};
use crate::{
    host::{
        harden,
        system::{Identity, identity},
    },
    ipc::wire,
    log, roles,
    state::paths::StateDir,
    transport,
};

/// Threads of a line. The server waits for half as many requests at a time, so the others hang: a
/// new process is needed.
const THREADS_MAX: usize = 2 * super::client::AT_ONCE;

/// Threads that stay when nothing is asked.
const IDLE_MAX: usize = 2;

/// The main function of the process.
pub fn open_files(state_dir: &Path) -> ExitCode {
    match begin(&StateDir::looked_at(state_dir.to_owned())) {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            log::prepare_to_end();
            tracing::error!(error = %e, "the opener cannot go on");
            ExitCode::FAILURE
        }
    }
}

fn begin(state: &StateDir) -> Result<()> {
    let failed = |e: rustix::io::Errno| Error::io("cannot start the opener", e.into());
    for sentence in harden::harden(true) {
        tracing::warn!("{sentence}");
    }
    let control = rustix::io::fcntl_dupfd_cloexec(rustix::stdio::stdin(), 3).map_err(failed)?;
    let control = Arc::new(UnixStream::from(control));
    let has_ublk = transport::uses_ublk();
    let folders = roles::recorded_by_opener(state);
    let folders = folders.map(|folder| (identity(&folder), folder));
    roles::opening(state, has_ublk).enter()?;
    let recorded = Arc::new(Recorded { state: state.clone(), folders });
    let lines = Arc::new(Lines::default());
    let granted = Arc::new(Granted::new(state.grants()));
    while let Some((message, mut fds)) = wire::receive::<ToOpener>(&control)? {
        if let ToOpener::Log { level, json } = message {
            log::change(level.parse().ok(), Some(json));
            tracing::info!(level, json, "the log was changed");
        } else if let Some(socket) = fds.pop() {
            *lines.open() += 1;
            let (lines, control) = (Arc::clone(&lines), Arc::clone(&control));
            let (workers, granted) = (Mutex::default(), Arc::clone(&granted));
            let recorded = Arc::clone(&recorded);
            Line { socket, workers, lines, control, granted, recorded, has_ublk }.begin();
        }
    }
    // The supervisor has died, and a server may go on without it.
    let mut open = lines.open();
    while *open > 0 {
        open = lines.changed.wait(open).unwrap_or_else(PoisonError::into_inner);
    }
    Ok(())
}

/// The number of lines whose servers live.
#[derive(Default)]
struct Lines {
    open: Mutex<usize>,
    changed: Condvar,
}

impl Lines {
    fn open(&self) -> MutexGuard<'_, usize> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The files of recorded checksums.
struct Recorded {
    state: StateDir,
    /// The folders of the state directory that this process may write to.
    folders: [(Option<Identity>, PathBuf); 3],
}

impl Recorded {
    /// True if one of the folders was made anew: only another process may write to it.
    fn is_elsewhere(&self) -> bool {
        self.folders.iter().any(|(known, folder)| {
            let now = identity(folder);
            now.is_some() && now != *known
        })
    }
}

/// The socket to a server.
struct Line {
    socket: OwnedFd,
    workers: Mutex<Workers>,
    lines: Arc<Lines>,
    control: Arc<UnixStream>,
    granted: Arc<Granted>,
    recorded: Arc<Recorded>,
    /// This process may open devices of ublk.
    has_ublk: bool,
}

#[derive(Default)]
struct Workers {
    all: usize,
    idle: usize,
    has_ended: bool,
}

/// Next step of a thread after a change of [`Workers`].
enum Next {
    GoOn,
    AddOne,
    Leave,
    GiveUp,
}

impl Line {
    fn begin(self) {
        let mut workers = self.workers();
        (workers.all, workers.idle) = (1, 1);
        drop(workers);
        let line = Arc::new(self);
        thread::spawn(move || line.work());
    }

    fn workers(&self) -> MutexGuard<'_, Workers> {
        self.workers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn work(self: Arc<Self>) {
        let mut bytes = vec![0; REQUEST_MAX];
        while let Ok(Some((request, _))) = receive(&self.socket, &mut bytes) {
            match self.begins_to_open() {
                Next::AddOne => {
                    let line = Arc::clone(&self);
                    thread::spawn(move || line.work());
                }
                Next::GiveUp => self.give_up("every thread waits for a file"),
                Next::GoOn | Next::Leave => {}
            }
            let answered =
                OpenRequest::decode(request).is_some_and(|request| self.answer(&request).is_ok());
            if !answered {
                break;
            }
            if let Next::Leave = self.has_opened() {
                return;
            }
        }
        self.end();
    }

    /// This thread may hang from now on: another one has to receive.
    fn begins_to_open(&self) -> Next {
        let mut workers = self.workers();
        workers.idle -= 1;
        if workers.idle > 0 {
            return Next::GoOn;
        }
        if workers.all >= THREADS_MAX {
            return Next::GiveUp;
        }
        workers.all += 1;
        workers.idle += 1;
        Next::AddOne
    }

    fn has_opened(&self) -> Next {
        let mut workers = self.workers();
        if workers.idle >= IDLE_MAX {
            workers.all -= 1;
            return Next::Leave;
        }
        workers.idle += 1;
        Next::GoOn
    }

    fn answer(&self, request: &OpenRequest) -> io::Result<()> {
        let opened = match &request.wanted {
            OpenTarget::File(manner, path) => self.granted.open(path, *manner).map(Some),
            OpenTarget::Checksums(_) if self.recorded.is_elsewhere() => {
                self.give_up("a folder with checksums was made anew");
            }
            OpenTarget::Checksums(path) => path.open(&self.recorded.state).map(Some),
            OpenTarget::UblkQueues(_) | OpenTarget::UblkUnused(_)
                if !self.has_ublk && transport::uses_ublk() =>
            {
                self.give_up("the kernel has come to have ublk");
            }
            OpenTarget::UblkQueues(number) | OpenTarget::UblkUnused(number)
                if !self.granted.has_device(*number) =>
            {
                Err(not_granted())
            }
            OpenTarget::UblkQueues(number) => devices::open_queues(*number).map(Some),
            OpenTarget::UblkUnused(number) => match transport::is_unused(*number) {
                true => Ok(None),
                false => Err(io::Error::from_raw_os_error(libc::EBUSY)),
            },
        };
        let errno = match &opened {
            Ok(_) => 0,
            Err(e) => e.raw_os_error().unwrap_or(match e.kind() {
                io::ErrorKind::NotADirectory => libc::ENOTDIR,
                io::ErrorKind::InvalidData => NOT_A_FILE,
                io::ErrorKind::PermissionDenied => NOT_GRANTED,
                _ => libc::EINVAL,
            }),
        };
        let process = match request.wanted {
            OpenTarget::UblkQueues(_) => Some(std::process::id()),
            OpenTarget::File(..) | OpenTarget::Checksums(_) | OpenTarget::UblkUnused(_) => None,
        };
        let answer = OpenAnswer { number: request.number, errno, process };
        let fd = opened.as_ref().ok().and_then(Option::as_ref).map(AsFd::as_fd);
        // This process's own descriptor is closed at once: it would keep a device from its next
        // server.
        send(&self.socket, &answer.encode(), fd, SendFlags::empty())
    }

    /// The server has ended, or has another opener.
    fn end(&self) {
        let mut workers = self.workers();
        if !workers.has_ended {
            workers.has_ended = true;
            *self.lines.open() -= 1;
            self.lines.changed.notify_all();
        }
        let _ = shutdown(&self.socket, Shutdown::Both);
    }

    /// Ends this process, so that the supervisor starts another one. It shuts the sockets down
    /// first, because threads that cannot be killed keep them open.
    fn give_up(&self, why: &str) -> ! {
        log::prepare_to_end();
        tracing::error!("{why}: making way for another opener");
        let _ = shutdown(&self.socket, Shutdown::Both);
        let _ = self.control.shutdown(std::net::Shutdown::Both);
        std::process::exit(1);
    }
}
