//! The supervisor of a cache: holds the descriptors, and starts the server again when it dies.
//!
//! ```text
//!   burgeon accelerate attach ── supervise.sock ──► supervisor ── Plan, inherited descriptors ──► server
//!                                              │ claims on cache and slow devices         parses, serves
//!                                              │ /dev/fuse, slots, serve.sock
//!                                              ├── __accelerate-loop: opens the FUSE file, attaches a loop
//!                                              └── __accelerate-ublk: starts a ublk device
//! ```
//!
//! A server that dies costs its readers a wait: its successor answers their requests, and keeps the
//! cached content, because nobody else could have written meanwhile. Attaching and detaching stop
//! the server in order, and start one with the new list.
//!
//! Invariants:
//! - Content is kept only for devices that this supervisor has had without interruption.
//! - The supervisor waits for no server without a limit, and opens no FUSE file.
//! - Descriptors pass to a server only; they are closed in all other programs.
//! - A ublk device outlives this process: the next supervisor finds it by `attached`, with its
//!   users.

mod change;
mod devices;

use std::{
    fs::{self, File},
    io::{self, Write},
    os::{
        fd::{AsFd, AsRawFd, OwnedFd},
        unix::net::UnixListener,
    },
    path::{Path, PathBuf},
    process::{Child, ExitCode, Stdio},
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use burgeon_accelerate::{Counts, Mode, policy::PolicyKind};
use burgeon_block::{Error, ErrorKind, Result};
use burgeon_frontend::Slots;
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    process::{Pid, Signal, kill_process},
};
use serde_json::{Value, json};

use self::{
    change::{Change, Draining, Unsettled},
    devices::LastFlush,
};
use crate::{
    announced::Announced,
    attached::Attached,
    child::{Passed, first_answer, pidfd_of},
    control::{Attach, ControlAnswer, ControlRequest, Set, question, reply},
    disk::Disk,
    folder::{CacheFolder, serving, take_serving_name},
    front::Front,
    harden::harden,
    plan::{Plan, PlanDevice},
    serve::{NO_RESEND, named},
    shared::SharedCells,
    writing_back::WriteBackSettings,
};

/// Limit for a server to begin: it reads the index of the cache.
const BEGIN_MAX: Duration = Duration::from_secs(600);
/// Limit for a server to end in order.
const END_MAX: Duration = Duration::from_secs(60);
/// Time between two attempts to start a server.
const RETRY: Timespec = Timespec { tv_sec: 1, tv_nsec: 0 };
/// Servers that may die in a row before the supervisor waits longer between them.
const DEATHS_MAX: u32 = 5;

/// A device that the supervisor has.
struct Device {
    options: Attach,
    announced: Announced,
    slow: Disk,
    front: Front,
    slots: Slots,
    counters: OwnedFd,
    warm: bool,
    /// The device in front. The file keeps a loop device, which goes with its last user; it is
    /// closed by the first attempt to detach, which may have failed.
    shown: Option<(Option<File>, PathBuf)>,
    /// An earlier supervisor has attached it, and died; nobody has asked for it since.
    is_resumed: bool,
    /// A server has served it.
    has_begun: bool,
    flushed: Option<LastFlush>,
}

struct Supervisor {
    folder: CacheFolder,
    cache: Disk,
    control: UnixListener,
    serve: UnixListener,
    policy: String,
    writing_back: WriteBackSettings,
    devices: Vec<Device>,
    server: Option<Child>,
    /// Asked of the next server alone.
    change: Option<Change>,
    /// A server has ended within it: no other one begins before it is settled.
    unsettled: Option<Unsettled>,
    draining: Option<Draining>,
    /// The server has begun once, so the content is this supervisor's.
    warm: bool,
}

/// The main function of the process: `folder` is the cache's.
pub fn supervise_process(folder: &Path) -> ExitCode {
    take_serving_name(folder);
    // Its starter is gone before long; failure means that it leads a session already.
    let _ = rustix::process::setsid();
    harden();
    match Supervisor::begin(folder).and_then(Supervisor::run) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tracing::error!(cache = %CacheFolder::at(folder).name(), %error, "the supervisor of the cache ends");
            ExitCode::FAILURE
        }
    }
}

impl Supervisor {
    fn begin(folder: &Path) -> Result<Self> {
        let folder = CacheFolder::at(folder);
        let cache = Disk::open(&folder.cache()?)?;
        let listen = |path: PathBuf| {
            // The cache is claimed, so no other supervisor listens there.
            let _ = fs::remove_file(&path);
            UnixListener::bind(&path)
                .map_err(|e| Error::io(format!("cannot listen at {}", path.display()), e))
        };
        // In this order, and in the other one at the end: who finds that a server can be asked, and
        // no supervisor, takes the latter for dead.
        let control = listen(folder.supervise_socket())?;
        let serve = listen(folder.serve_socket())?;
        let policy = PolicyKind::Adaptive.name().to_owned();
        let mut this = Self {
            folder,
            cache,
            control,
            serve,
            policy,
            writing_back: WriteBackSettings::default(),
            devices: Vec::new(),
            server: None,
            change: None,
            unsettled: None,
            draining: None,
            warm: false,
        };
        this.resume()?;
        Ok(this)
    }

    /// Until the last device is detached.
    fn run(mut self) -> Result<()> {
        let mut deaths = 0;
        if !self.devices.is_empty()
            && let Err(error) = self.start_server()
        {
            self.tell_no_server(&error);
        }
        loop {
            let pidfd = self.server.as_ref().map(pidfd_of).transpose()?;
            let mut fds = vec![PollFd::new(&self.control, PollFlags::IN)];
            fds.extend(pidfd.as_ref().map(|fd| PollFd::new(fd, PollFlags::IN)));
            // A server that could not be started is tried again: its devices wait for it.
            let waits = self.server.is_none() && !self.devices.is_empty();
            match poll(&mut fds, (waits || self.draining.is_some()).then_some(&RETRY)) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(errno) => return Err(Error::io("cannot wait for requests", errno.into())),
            }
            let asked = !fds[0].revents().is_empty();
            let died = fds.get(1).is_some_and(|fd| !fd.revents().is_empty());
            if died {
                deaths += 1;
                let status = self.server.take().and_then(|mut server| server.wait().ok());
                let status = status.map(|status| status.to_string());
                let cache = self.folder.name();
                tracing::warn!(%cache, status, "the server of the cache died: starting another");
                if deaths > DEATHS_MAX {
                    thread::sleep(Duration::from_secs(1));
                }
                if let Err(error) = self.start_server() {
                    self.tell_no_server(&error);
                    thread::sleep(Duration::from_secs(1));
                }
            } else if waits && let Err(error) = self.start_server() {
                self.tell_no_server(&error);
            }
            self.end_draining();
            if asked {
                if let Ok((stream, _)) = self.control.accept() {
                    let asked = question(&stream);
                    let result = asked.and_then(|ask| self.answer(ask));
                    if self.devices.is_empty() {
                        // The client may use the cache as soon as it has the answer.
                        self.end();
                        reply(stream, result);
                        return Ok(());
                    }
                    reply(stream, result);
                }
                deaths = 0;
            }
        }
    }

    /// Its devices wait for a server.
    fn tell_no_server(&self, error: &Error) {
        let cache = self.folder.name();
        tracing::error!(%cache, %error, "cannot start the server of the cache: trying again");
    }

    /// Gives up the sockets and the cache.
    fn end(mut self) {
        self.stop_server();
        Attached::forget(&self.folder);
        let _ = fs::remove_file(self.folder.serve_socket());
        let _ = fs::remove_file(self.folder.supervise_socket());
    }

    fn answer(&mut self, ask: ControlRequest) -> Result<Value> {
        let (done, device, answer) = match ask {
            ControlRequest::Attach(attach) => {
                ("attached", attach.name.clone(), self.attach(attach)?)
            }
            ControlRequest::Detach { name, leave_dirty } => {
                let answer = self.detach(&name, leave_dirty)?;
                // Else there are dirty blocks, and it is asked again.
                if answer["is_detached"] != json!(true) {
                    return Ok(answer);
                }
                ("detached", name, answer)
            }
            ControlRequest::Grow { size } => ("cache grown", String::new(), self.grow(size)?),
            ControlRequest::Replace { cache, log_size } => {
                let answer = self.replace(&cache, log_size)?;
                if answer["is_replaced"] == json!(false) {
                    return Ok(answer);
                }
                ("cache device replaced", String::new(), answer)
            }
            ControlRequest::Set(set) => ("settings changed", set.name.clone(), self.remember(set)?),
            _ => return Err(Error::new(ErrorKind::Invalid, "this is a question for the server")),
        };
        self.record_attached();
        let settings = self.devices.iter().find(|it| it.options.name == device);
        let mode = settings.map(|it| it.options.mode.as_str());
        let (cache, policy) = (self.folder.name(), &self.policy);
        tracing::info!(%cache, device, mode, policy, "{done}");
        Ok(answer)
    }

    /// Remembers settings for the servers to come; the one that runs is asked by whoever asked
    /// this.
    fn remember(&mut self, set: Set) -> Result<Value> {
        let mode = set.mode.as_deref().map(|name| named(name, Mode::parse, "mode")).transpose()?;
        let policy = set.policy.as_deref().map(|name| named(name, PolicyKind::parse, "policy"));
        policy.transpose()?;
        let found = self.devices.iter_mut().find(|device| device.options.name == set.name);
        let what =
            || Error::new(ErrorKind::NotFound, format!("no device {} is attached", set.name));
        let device = found.ok_or_else(what)?;
        if mode == Some(Mode::WriteBack) && !device.front.resends() {
            return Err(Error::new(ErrorKind::UnsupportedFormat, NO_RESEND));
        }
        let options = &mut device.options;
        set.mode.into_iter().for_each(|mode| options.mode = mode);
        set.cutoff.into_iter().for_each(|cutoff| options.cutoff = cutoff);
        set.policy.into_iter().for_each(|policy| self.policy = policy);
        let WriteBackSettings { percent, seconds, rate } = self.writing_back;
        self.writing_back = WriteBackSettings {
            percent: set.dirty_limit.unwrap_or(percent),
            seconds: set.dirty_age.unwrap_or(seconds),
            rate: set.writeback_rate.unwrap_or(rate),
        };
        Ok(json!({ "name": set.name }))
    }

    fn restart_server(&mut self) -> Result<()> {
        self.stop_server();
        if self.devices.is_empty() { Ok(()) } else { self.start_server().map(drop) }
    }

    /// Ends the server in order; one that does not end is killed.
    fn stop_server(&mut self) {
        let Some(mut server) = self.server.take() else { return };
        let deadline = Instant::now() + END_MAX;
        if let Some(pid) = Pid::from_raw(server.id() as i32) {
            let _ = kill_process(pid, Signal::TERM);
        }
        while matches!(server.try_wait(), Ok(None)) {
            if Instant::now() > deadline {
                let _ = server.kill();
                let _ = server.wait();
                return;
            }
            thread::sleep(Duration::from_millis(5));
        }
    }

    /// Starts a server of all devices, and waits until it serves. Returns the result of a change
    /// that it was asked for. One that does not serve may have made it.
    fn start_server(&mut self) -> Result<Option<Result<Value>>> {
        self.settle_change()?;
        let change = self.change.take();
        let distrust = self.folder.distrust();
        let is_distrusted = distrust.exists();
        let warm = self.warm && !is_distrusted;
        let is_in_use = self.devices.iter().any(|device| device.shown.is_some());
        let plan = Plan {
            cache: self.cache.path().to_owned(),
            cache_fd: self.cache.as_fd().as_raw_fd(),
            listener_fd: self.serve.as_raw_fd(),
            distrust,
            policy: self.policy.clone(),
            writing_back: self.writing_back,
            owners: self.folder.owners(),
            histograms: self.folder.histograms(),
            is_distrusted,
            warm,
            // Of a cache that failed before, it is known which bytes went with it; else nobody
            // knows what of it is newer than the slow devices, and they wait for it.
            goes_round: is_in_use && (is_distrusted || self.folder.dirty().is_empty()),
            devices: self.devices.iter().map(Device::plan).collect(),
            change: change.as_ref().map(|change| change.plan(&self.folder)),
        };
        let text = serde_json::to_vec(&plan)
            .map_err(|e| Error::with_source(ErrorKind::Invalid, "cannot write a plan", e))?;
        let before = change.as_ref().map(|_| self.folder.recorded_id()).transpose()?;
        let new = change.as_ref().and_then(Change::descriptor);
        let inherited = [self.cache.as_fd(), self.serve.as_fd()].into_iter().chain(new);
        let devices = self.devices.iter().flat_map(|device| {
            let own = [device.slow.as_fd(), device.slots.fd(), device.counters.as_fd()];
            own.into_iter().chain(device.front.descriptor())
        });
        let passed = Passed::new(inherited.chain(devices))?;
        let spawned =
            serving("__accelerate-serve").stdin(Stdio::piped()).stdout(Stdio::piped()).spawn();
        drop(passed);
        let mut server = spawned.map_err(|e| Error::io("cannot start a server", e))?;
        if let Some(mut stdin) = server.stdin.take() {
            // A server that has died shows below.
            let _ = stdin.write_all(&text).and_then(|()| stdin.write_all(b"\n"));
        }
        match first_answer(&mut server, BEGIN_MAX) {
            Ok(ready) => {
                self.server = Some(server);
                self.warm = true;
                let answer = serde_json::from_value::<ControlAnswer>(ready["changed"].clone());
                let changed = answer.ok().map(ControlAnswer::into_result);
                if let (Some(Change::Replace(new, _)), Some(Ok(_))) = (change, &changed) {
                    // The claim on the former device ends.
                    self.cache = new;
                }
                for device in &mut self.devices {
                    device.warm = true;
                    device.has_begun = true;
                    // The accepted loss has happened by now.
                    device.options.accept_loss = false;
                    device.open_resumed();
                }
                Ok(changed)
            }
            Err(error) => {
                let _ = server.kill();
                let _ = server.wait();
                self.unsettled = change.zip(before).and_then(|(it, before)| it.unsettled(before));
                Err(error)
            }
        }
    }
}

impl Device {
    /// Half detached, it has no device in front, and its claim was never interrupted.
    fn is_in_use(&self) -> bool {
        self.shown.is_some() || self.has_begun
    }

    fn plan(&self) -> PlanDevice {
        PlanDevice {
            name: self.options.name.clone(),
            slow: self.slow.path().to_owned(),
            slow_fd: self.slow.as_fd().as_raw_fd(),
            front: self.front.plan(),
            slots_fd: self.slots.fd().as_raw_fd(),
            counters_fd: self.counters.as_raw_fd(),
            mode: self.options.mode.clone(),
            cutoff: self.options.cutoff,
            warm: self.warm,
            is_in_use: self.is_in_use(),
            accept_loss: self.options.accept_loss,
            resends: self.front.resends(),
        }
    }

    /// `LocalIo` if writes of this device, which is detached, were lost.
    fn tell_loss(&mut self) -> Result<()> {
        let failed = self.flushed.as_mut().and_then(LastFlush::failed);
        let has_lost = Counts::shared(Arc::new(SharedCells::map(&self.counters)?)).has_lost();
        let lost = failed.or_else(|| has_lost.then(|| io::Error::other("a flush has failed")));
        let what = || {
            format!(
                "{} is detached, but {} may lack writes since the last flush that succeeded: check \
                 its file system",
                self.options.name,
                self.slow.path().display()
            )
        };
        lost.map_or(Ok(()), |error| Err(Error::io(what(), error)))
    }
}
