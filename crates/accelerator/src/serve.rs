//! The server of a cache: serves all its devices to the kernel.
//!
//! ```text
//!   supervisor ── standard input: Plan, the numbers of inherited descriptors ──► server
//!          ◄── standard output: "ready", or an error, as an Answer ──
//!   each 5 s, and at the end: Cached::tidy of each device
//! ```
//!
//! Invariants:
//! - It opens no device itself: those that it has are the supervisor's, whose claims outlive it.
//! - Without its supervisor, it goes on until its devices are unmounted.
//! - It holds no descriptor of a FUSE file or a loop device, so no thread of it waits for itself.

use std::{
    fs::{self, File},
    io::{stdin, stdout},
    os::{
        fd::{FromRawFd, OwnedFd, RawFd},
        unix::net::UnixListener,
    },
    path::{Path, PathBuf},
    process::ExitCode,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering::SeqCst},
    },
    time::{Duration, Instant},
};

use burgeon_accelerate::{Cached, Count, Counts, Options, Store, Trust, policy::Kind, read_super};
use burgeon_block::{Error, ErrorKind, Result};
use burgeon_frontend::{Connection, End, ServeOptions, Server, Slots, serve_writable};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tokio::signal::unix::{SignalKind, signal};

use crate::{
    control::{Answer, Ask, Set, answer, parse_mode, receive, send},
    device::Served,
    disk::Disk,
    harden::harden,
    shared::SharedCells,
};

/// Time between two looks for idle regions.
const TIDY: Duration = Duration::from_secs(5);
/// Time between two looks of a server without a supervisor for the end of its devices.
const LOOK: Duration = Duration::from_millis(200);
/// Time that requests in work get when the server is stopped.
const DRAIN: Duration = Duration::from_secs(30);

/// Time, and the most slots, that one request to check takes.
const CHECK: Duration = Duration::from_millis(100);
const SLOTS_A_CHECK: u32 = 4096;

/// What a server is to serve.
#[derive(Serialize, Deserialize, Debug)]
pub(crate) struct Plan {
    pub(crate) cache: PathBuf,
    pub(crate) cache_fd: RawFd,
    pub(crate) listener_fd: RawFd,
    /// Is made when the content must not be used any more.
    pub(crate) distrust: PathBuf,
    pub(crate) policy: String,
    /// Content of an earlier server may be used.
    pub(crate) warm: bool,
    /// A cache that cannot be opened is gone round.
    pub(crate) goes_round: bool,
    pub(crate) devices: Vec<PlanDevice>,
}

#[derive(Serialize, Deserialize, Debug)]
pub(crate) struct PlanDevice {
    pub(crate) name: String,
    pub(crate) slow: PathBuf,
    pub(crate) slow_fd: RawFd,
    pub(crate) fuse_fd: RawFd,
    pub(crate) slots_fd: RawFd,
    pub(crate) counters_fd: RawFd,
    pub(crate) mode: String,
    pub(crate) cutoff: u64,
    pub(crate) warm: bool,
    /// Its users wait, so it is served without a cache that cannot be used.
    pub(crate) is_in_use: bool,
}

/// A served device.
struct Device {
    cached: Arc<Cached<Disk, Disk>>,
    /// `None` once it was stopped.
    server: Mutex<Option<Server>>,
    /// The kernel has let go of the device.
    ended: Arc<AtomicBool>,
}

/// The main function of the process.
pub fn serve_process() -> ExitCode {
    harden();
    let begun = receive::<Plan>(stdin().lock()).and_then(begin);
    match begun {
        Ok((runtime, served)) => runtime.block_on(served.run()),
        Err(error) => {
            let _ = send(&mut stdout(), &Answer::from(Err(error)));
            ExitCode::FAILURE
        }
    }
}

/// What all parts of the server share.
struct Serving {
    store: Arc<Store<Disk>>,
    devices: Vec<Device>,
    listener: UnixListener,
}

fn begin(plan: Plan) -> Result<(tokio::runtime::Runtime, Serving)> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .max_blocking_threads(128)
        .enable_all()
        .build()
        .map_err(|e| Error::io("cannot start threads", e))?;
    let policy = named(&plan.policy, Kind::parse, "policy")?;
    let store = Arc::new(open(&plan, policy)?);
    let listener = UnixListener::from(take(plan.listener_fd));
    let mut devices = Vec::new();
    for device in plan.devices {
        let slow = Disk::adopt(File::from(take(device.slow_fd)), &device.slow)?;
        let (fuse, slots) = (take(device.fuse_fd), take(device.slots_fd));
        let mode = named(&device.mode, parse_mode, "mode")?;
        let trust = if device.warm { Trust::Warm } else { Trust::Cold };
        let options =
            Options { cutoff: device.cutoff, is_in_use: device.is_in_use, ..Options::new(mode) };
        let cached = Cached::attach(store.clone(), slow, &device.name, trust, options)?;
        let cells = SharedCells::map(&take(device.counters_fd))?;
        let cached = Arc::new(cached.count_in(Counts::shared(Arc::new(cells))));
        let slots = Arc::new(Slots::from_fd(slots)?);
        let options = ServeOptions::new(runtime.handle().clone());
        let server = serve_writable(fuse, slots, Arc::new(Served(cached.clone())), &options)?;
        let ended = Arc::new(AtomicBool::new(false));
        let (ending, flag) = (server.ended(), ended.clone());
        runtime.spawn(async move {
            if ending.await == End::Unmounted {
                flag.store(true, SeqCst);
            }
        });
        devices.push(Device { cached, server: Mutex::new(Some(server)), ended });
    }
    Ok((runtime, Serving { store, devices, listener }))
}

/// The descriptor of this number, which the supervisor has passed on.
fn take(number: RawFd) -> OwnedFd {
    // SAFETY: the supervisor has left this number open for this process, and names each once; nothing in
    // this process has opened or closed a descriptor of that number before.
    unsafe { OwnedFd::from_raw_fd(number) }
}

pub(crate) fn named<T>(name: &str, parse: impl Fn(&str) -> Option<T>, what: &str) -> Result<T> {
    let unknown = || Error::new(ErrorKind::Invalid, format!("there is no {what} {name:?}"));
    parse(name).ok_or_else(unknown)
}

fn open(plan: &Plan, policy: Kind) -> Result<Store<Disk>> {
    let file = Disk::adopt(File::from(take(plan.cache_fd)), &plan.cache)?;
    let size = file.size();
    let trust = if plan.warm { Trust::Warm } else { Trust::Cold };
    let place = plan.distrust.clone();
    let distrust = Box::new(move |_: &[burgeon_accelerate::Dirty]| record_distrust(&place));
    let copy = file.descriptor()?;
    // It may have blocks that the slow device does not have: it is never gone round, either.
    if read_super(&file, size).is_ok_and(|head| head.layout.log_blocks != 0) {
        let what = format!(
            "{} has a log for write-back, which this version of Burgeon does not serve: use the version that made \
             it",
            plan.cache.display()
        );
        return Err(Error::new(ErrorKind::UnsupportedFormat, what));
    }
    match Store::open(file, size, trust, policy, distrust) {
        Ok(store) => {
            // Only here: nothing is served yet, so nobody can have recorded a newer failure.
            if !plan.warm {
                let _ = fs::remove_file(&plan.distrust);
            }
            Ok(store)
        }
        Err(error) if plan.goes_round => {
            let cache = plan.cache.display();
            tracing::error!(%cache, %error, "the cache cannot be opened: requests go round it");
            record_distrust(&plan.distrust)?;
            Store::failed(Disk::adopt(File::from(copy), &plan.cache)?, Vec::new())
        }
        Err(error) => Err(Error::with_source(
            error.kind(),
            format!("cannot use the cache {}", plan.cache.display()),
            error,
        )),
    }
}

/// Records, durably and not on the cache device, that the content must not be used.
fn record_distrust(place: &Path) -> Result<()> {
    let failed = |e| Error::io(format!("cannot write {}", place.display()), e);
    File::create(place).and_then(|file| file.sync_all()).map_err(failed)?;
    let folder = place.parent().unwrap_or(Path::new("/"));
    File::open(folder).and_then(|folder| folder.sync_all()).map_err(failed)
}

impl Serving {
    async fn run(self) -> ExitCode {
        let supervisor = rustix::process::getppid();
        let Ok(mut terminated) = signal(SignalKind::terminate()) else { return ExitCode::FAILURE };
        if send(&mut stdout(), &Answer::Done(json!("ready"))).is_err() {
            return ExitCode::FAILURE;
        }
        let serving = Arc::new(self);
        let answering = serving.clone();
        // It ends with the process.
        std::thread::spawn(move || answering.answer_all());
        let mut tidy = tokio::time::interval(TIDY);
        let mut look = tokio::time::interval(LOOK);
        loop {
            tokio::select! {
                _ = terminated.recv() => break,
                _ = tidy.tick() => tokio::task::block_in_place(|| serving.tidy()),
                _ = look.tick(), if rustix::process::getppid() != supervisor => {
                    if serving.devices.iter().all(|device| device.ended.load(SeqCst)) {
                        break;
                    }
                }
            }
        }
        tokio::task::block_in_place(|| {
            for device in &serving.devices {
                let server = device.server.lock().unwrap_or_else(PoisonError::into_inner).take();
                if let Some(server) = server {
                    server.stop(DRAIN);
                }
            }
            serving.tidy();
        });
        ExitCode::SUCCESS
    }

    fn tidy(&self) {
        for device in &self.devices {
            if let Err(error) = device.cached.tidy() {
                tracing::error!(device = device.cached.name(), %error, "cannot write the marks of the device");
            }
        }
    }

    fn answer_all(&self) {
        for stream in self.listener.incoming() {
            match stream {
                Ok(stream) => answer(stream, |question| self.answer(question)),
                Err(_) => std::thread::sleep(Duration::from_millis(10)),
            }
        }
    }

    fn device(&self, name: &str) -> Result<&Cached<Disk, Disk>> {
        let found = self.devices.iter().find(|device| device.cached.name() == name);
        let missing = || Error::new(ErrorKind::NotFound, format!("no device {name} is attached"));
        Ok(&found.ok_or_else(missing)?.cached)
    }

    fn answer(&self, question: Ask) -> Result<Value> {
        match question {
            Ask::Status => Ok(self.status()),
            Ask::Set(Set { name, mode, policy, cutoff }) => {
                let device = self.device(&name)?;
                let mode = mode.map(|mode| named(&mode, parse_mode, "mode")).transpose()?;
                let policy = policy.map(|p| named(&p, Kind::parse, "policy")).transpose()?;
                mode.map(|mode| device.set_mode(mode)).transpose()?;
                policy.into_iter().for_each(|policy| self.store.set_policy(policy));
                cutoff.into_iter().for_each(|cutoff| device.set_cutoff(cutoff));
                Ok(self.status())
            }
            Ask::Flush { name } => {
                let device = self.device(&name)?;
                device.flush()?;
                device.tidy()?;
                Ok(json!({ "name": name, "marked_regions": device.marked() }))
            }
            Ask::Check { name, from } => self.check(&name, from),
            Ask::Attach(_) | Ask::Detach { .. } => Err(Error::new(
                ErrorKind::Invalid,
                "only the supervisor of a cache attaches and detaches: use `burgeon accelerate`",
            )),
        }
    }

    /// Compares blocks for a moment, so that others that ask do not wait for long.
    fn check(&self, name: &str, from: u32) -> Result<Value> {
        let device = self.device(name)?;
        let (mut next, end) = (from, self.store.sets().slots());
        let last = next.saturating_add(SLOTS_A_CHECK).min(end);
        let until = Instant::now() + CHECK;
        let (mut compared, mut wrong) = (0, 0);
        while next < last {
            let stop = (next + 16).min(last);
            let found = device.compare(next..stop)?;
            (compared, wrong, next) = (compared + found.0, wrong + found.1, stop);
            // At least some each time, however busy the machine is.
            if Instant::now() >= until {
                break;
            }
        }
        // Slots of a cache that was given up are older than what was written since.
        if self.store.has_failed() {
            let what = "the cache device has failed: nothing is served from it, so there is nothing to check; \
                        detach and attach the devices with another one";
            return Err(Error::new(ErrorKind::Unavailable, what));
        }
        let next = (next < end).then_some(next);
        Ok(json!({ "compared_blocks": compared, "wrong_blocks": wrong, "next": next }))
    }

    fn status(&self) -> Value {
        let sets = self.store.sets();
        let devices = self.devices.iter().map(|device| {
            let cached = &device.cached;
            let counts = Count::ALL.map(|(count, name)| (name, cached.counts().get(count)));
            let counters = counts.into_iter().collect::<std::collections::BTreeMap<_, _>>();
            json!({
                "name": cached.name(),
                "slow": cached.slow().path(),
                "size": cached.slow().size(),
                "mode": cached.mode().name(),
                "sequential_cutoff": cached.cutoff(),
                "marked_regions": cached.marked(),
                "flush_failed": cached.is_broken(),
                "counters": counters,
            })
        });
        json!({
            "cache": self.store.file().path(),
            "state": if self.store.has_failed() { "failed" } else { "good" },
            "policy": self.store.policy().name(),
            "blocks": sets.slots(),
            "used_blocks": sets.used(),
            "memory_blocks": self.store.in_memory(),
            "pid": std::process::id(),
            "devices": devices.collect::<Vec<_>>(),
        })
    }
}

/// The FUSE connection and the slots of a new device.
pub(crate) fn connect(name: &str) -> Result<(Connection, Slots)> {
    Ok((Connection::writable(&format!("burgeon/{name}"))?, Slots::create()?))
}
