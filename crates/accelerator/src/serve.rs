//! The server of a cache: serves all its devices to the kernel.
//!
//! ```text
//!   supervisor ── standard input: Plan, the numbers of inherited descriptors ──► server
//!          ◄── standard output: "ready", or an error, as an Answer ──
//!   each 5 s, and at the end: CachedDevice::tidy of each device       writing_back: a thread
//! ```
//!
//! Invariants:
//! - It opens no cache and no slow device itself: they are the supervisor's, whose claims outlive
//!   it.
//! - Without its supervisor, it goes on until its devices are unmounted, without write-back: if it
//!   died, the kernel would fail all requests, and a file system's log would end in the cache
//!   alone.
//! - A device has a document in `dirty` before it can have dirty blocks.
//! - It holds no descriptor of a FUSE file or a block device in front, so no thread of it waits for
//!   itself.

mod front;
mod open;

use std::{
    fs::File,
    io::{stdin, stdout},
    os::{
        fd::{FromRawFd, OwnedFd, RawFd},
        unix::net::UnixListener,
    },
    process::ExitCode,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicU32, Ordering::SeqCst},
    },
    time::{Duration, Instant},
};

use burgeon_accelerate::{
    CacheStore, CachedDevice, Counts, DeviceOptions, Mode, Trust, policy::PolicyKind,
};
use burgeon_block::{BLOCK_SIZE, Error, ErrorKind, Result};
use burgeon_frontend::Slots;
use serde_json::{Value, json};
use tokio::signal::unix::{SignalKind, signal};

use self::front::FrontServer;
use crate::{
    announced::Announced,
    control::{ControlAnswer, ControlRequest, Set, answer, receive, send},
    device::Served,
    dirty::{DirtyOwner, Owners},
    disk::Disk,
    harden::harden,
    lasting::Lasting,
    plan::{Plan, PlanDevice},
    shared::SharedCells,
    status::{distributions, document},
    writing_back::{WriteBackSettings, WritingBack},
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
/// Time that one request to write back takes, and the blocks that it writes at once: 8 MiB.
const WRITE_BACK: Duration = Duration::from_millis(500);
const BLOCKS_AT_ONCE: usize = 2048;
/// Questions that are answered at once.
const ANSWERS_MAX: u32 = 16;

/// A served device.
struct Device {
    cached: Arc<CachedDevice<Disk, Disk>>,
    cells: Arc<SharedCells>,
    lasting: Lasting,
    slots: Arc<Slots>,
    resends: bool,
    /// Requests that begin write-back: its document stays meanwhile.
    beginning: AtomicU32,
    /// Nothing of it is to be dirty at the end.
    ends: AtomicBool,
    front: FrontServer,
}

/// Why write-back is refused here.
pub(crate) const NO_RESEND: &str = "this kernel does not send the requests of a dead server again, so it would lose \
                                    writes: write-back needs Linux 6.9 or later";

/// The main function of the process.
pub fn serve_process() -> ExitCode {
    harden();
    let begun = receive::<Plan>(stdin().lock()).and_then(begin);
    match begun {
        Ok((runtime, served)) => runtime.block_on(served.run()),
        Err(error) => {
            let _ = send(&mut stdout(), &ControlAnswer::from(Err(error)));
            ExitCode::FAILURE
        }
    }
}

/// The state that all parts of the server share.
struct Serving {
    store: Arc<CacheStore<Disk>>,
    devices: Vec<Device>,
    listener: UnixListener,
    writing_back: WritingBack,
    /// Held while a document is written or removed.
    owners: Mutex<Owners>,
    answering: AtomicU32,
    /// Its supervisor is dead.
    is_orphan: AtomicBool,
    /// The result of the change that the plan asked for.
    changed: Option<ControlAnswer>,
}

fn begin(plan: Plan) -> Result<(tokio::runtime::Runtime, Serving)> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .max_blocking_threads(128)
        .enable_all()
        .build()
        .map_err(|e| Error::io("cannot start threads", e))?;
    let policy = named(&plan.policy, PolicyKind::parse, "policy")?;
    let (store, changed) = open::open(&plan, policy)?;
    let store = Arc::new(store);
    let listener = UnixListener::from(take(plan.listener_fd));
    let owners = Owners::at(&plan.owners);
    if !store.has_failed() {
        let is_lost = |name: &str| plan.devices.iter().any(|d| d.name == name && d.accept_loss);
        owners.check(store.id(), is_lost)?;
    }
    let mut devices = Vec::new();
    for device in plan.devices {
        let slow = Disk::adopt(File::from(take(device.slow_fd)), &device.slow)?;
        let slots = take(device.slots_fd);
        let mode = mode_of(&device, &store)?;
        let is_changed = owners.is_changed(&device.name, &slow, device.accept_loss)?;
        let trust = if device.warm { Trust::Warm } else { Trust::Cold };
        let options = DeviceOptions {
            mode,
            cutoff: device.cutoff,
            is_in_use: device.is_in_use,
            is_changed,
            accepts_loss: device.accept_loss,
        };
        let cached = CachedDevice::attach(store.clone(), slow, &device.name, trust, options)?;
        let cells = Arc::new(SharedCells::map(&take(device.counters_fd))?);
        let cached = Arc::new(cached.count_in(Counts::shared(cells.clone())));
        let lasting = Lasting::of(&plan.histograms, &device.name);
        cells.restore_once(|times| lasting.restore(times));
        // Before it is served, and not before it is the right device.
        if !cached.is_settled() && !store.has_failed() {
            owners.put(&device.name, &DirtyOwner::of(cached.slow(), store.id()))?;
        }
        let slots = Arc::new(Slots::from_fd(slots)?);
        let name = device.name.clone();
        let served = Arc::new(Served { name, cached: cached.clone(), cells: cells.clone() });
        let front = FrontServer::begin(&device, slots.clone(), served, runtime.handle())?;
        let (resends, beginning) = (device.resends, AtomicU32::new(0));
        let ends = AtomicBool::new(false);
        devices.push(Device { cached, cells, lasting, slots, resends, beginning, ends, front });
    }
    record_absent(&store, &devices, &owners)?;
    let serving = Serving {
        store,
        devices,
        listener,
        writing_back: WritingBack::new(plan.writing_back),
        owners: Mutex::new(owners),
        answering: AtomicU32::new(0),
        is_orphan: AtomicBool::new(false),
        changed: changed.map(ControlAnswer::from),
    };
    Ok((runtime, serving))
}

/// The mode of a device at the start: one in use goes on without write-back rather than not at all.
fn mode_of(device: &PlanDevice, store: &CacheStore<Disk>) -> Result<Mode> {
    let mode = named(&device.mode, Mode::parse, "mode")?;
    if mode != Mode::WriteBack {
        return Ok(mode);
    }
    match need_write_back(store, device.resends) {
        Err(error) if device.is_in_use => {
            tracing::warn!(device = device.name, %error, "the device goes on in write-through");
            Ok(Mode::WriteThrough)
        }
        done => done.map(|()| mode),
    }
}

/// The descriptor of this number, which the supervisor has passed on.
fn take(number: RawFd) -> OwnedFd {
    // SAFETY: the supervisor has left this number open for this process, and names each once;
    // nothing in this process has opened or closed a descriptor of that number before.
    unsafe { OwnedFd::from_raw_fd(number) }
}

pub(crate) fn named<T>(name: &str, parse: impl Fn(&str) -> Option<T>, what: &str) -> Result<T> {
    let unknown = || Error::new(ErrorKind::Invalid, format!("there is no {what} {name:?}"));
    parse(name).ok_or_else(unknown)
}

/// `Invalid` if the cache has no log, `UnsupportedFormat` if the kernel loses writes of a dead
/// server.
fn need_write_back(store: &CacheStore<Disk>, resends: bool) -> Result<()> {
    if !resends {
        return Err(Error::new(ErrorKind::UnsupportedFormat, NO_RESEND));
    }
    if store.has_log() || store.has_failed() {
        return Ok(());
    }
    let what = format!(
        "{} has no log for write-back: make it anew (`burgeon accelerate destroy`, `create`), 4 MiB or \
         larger, or use the mode write-through",
        store.file().path().display()
    );
    Err(Error::new(ErrorKind::Invalid, what))
}

/// Records absent devices that have dirty blocks in the cache, which may come from another host,
/// and removes the records of those that have none.
fn record_absent(store: &CacheStore<Disk>, devices: &[Device], owners: &Owners) -> Result<()> {
    if store.has_failed() {
        return Ok(());
    }
    let attached = |name: &str| devices.iter().find(|device| device.cached.name() == name);
    let dirty = store.dirty_devices();
    for dirty in dirty.iter().filter(|dirty| attached(&dirty.name).is_none()) {
        owners.note(&dirty.name, store.id())?;
    }
    let has = |name: &str| attached(name).is_some() || dirty.iter().any(|dirty| dirty.name == name);
    let clean = owners.all().into_iter().map(|(name, _)| name).filter(|name| !has(name));
    clean.for_each(|name| owners.remove(&name));
    Ok(())
}

impl Serving {
    async fn run(self) -> ExitCode {
        let supervisor = rustix::process::getppid();
        let Ok(mut terminated) = signal(SignalKind::terminate()) else { return ExitCode::FAILURE };
        let ready = json!({ "changed": self.changed });
        if send(&mut stdout(), &ControlAnswer::Done(ready)).is_err() {
            return ExitCode::FAILURE;
        }
        let serving = Arc::new(self);
        let answering = serving.clone();
        // It ends with the process.
        std::thread::spawn(move || answering.answer_all());
        let writing = serving.clone();
        let writing = std::thread::spawn(move || writing.writing_back.run(&writing.store));
        let mut tidy = tokio::time::interval(TIDY);
        let mut look = tokio::time::interval(LOOK);
        loop {
            tokio::select! {
                _ = terminated.recv() => break,
                _ = tidy.tick() => tokio::task::block_in_place(|| serving.tidy(false)),
                _ = look.tick(), if rustix::process::getppid() != supervisor => {
                    if !serving.is_orphan.swap(true, SeqCst) {
                        tokio::task::block_in_place(|| serving.without_supervisor());
                    }
                    tokio::task::block_in_place(|| {
                        serving.devices.iter().for_each(|device| device.front.end_if_unused());
                    });
                    if serving.devices.iter().all(|device| device.front.has_ended()) {
                        break;
                    }
                }
            }
        }
        tokio::task::block_in_place(|| {
            serving.devices.iter().for_each(|device| device.front.stop(DRAIN));
            serving.writing_back.end();
            // A thread that panicked has said so.
            let _ = writing.join();
            serving.write_back_at_the_end();
            // Nothing is written any more: what is clean stays so, and is known to be.
            for device in &serving.devices {
                let _ = device.cached.set_mode(Mode::WriteThrough);
            }
            serving.tidy(true);
            if serving.is_orphan.load(SeqCst) {
                serving.withdraw();
            }
        });
        ExitCode::SUCCESS
    }

    /// Takes away what the dead supervisor has announced of devices that have ended: the links
    /// would lead to devices of others.
    fn withdraw(&self) {
        for device in self.devices.iter().filter(|device| device.front.has_ended()) {
            let mut announced = Announced::of(device.cached.name(), device.cached.slow());
            if device.cached.is_dirty() {
                announced.stay_marked();
            }
        }
    }

    /// Ends write-back.
    fn without_supervisor(&self) {
        for device in &self.devices {
            if device.cached.mode() == Mode::WriteBack {
                tracing::error!(
                    device = device.cached.name(),
                    "the supervisor is dead: the device goes on in write-through, and is written back"
                );
                // It cannot fail: write-back alone can.
                let _ = device.cached.set_mode(Mode::WriteThrough);
            }
        }
        self.writing_back.write_all();
    }

    /// Writes back what nobody else would: without a supervisor; and what users have written since
    /// the supervisor asked for all of it, because a block that is dirty stays so while it is
    /// rewritten.
    fn write_back_at_the_end(&self) {
        let is_orphan = self.is_orphan.load(SeqCst);
        for device in self.devices.iter().filter(|it| is_orphan || it.ends.load(SeqCst)) {
            let all = self.store.log_position();
            let done = loop {
                match device.cached.write_back(all, BLOCKS_AT_ONCE) {
                    Ok(0) => break Ok(()),
                    Ok(_) => {}
                    Err(error) => break Err(error),
                }
            };
            if let Err(error) = done {
                let device = device.cached.name();
                tracing::error!(device, %error, "dirty blocks are not written back, and stay in the cache");
            }
        }
    }

    fn tidy(&self, is_last: bool) {
        for device in &self.devices {
            device.store_times(is_last);
            self.forget_owner(device);
            if let Err(error) = device.cached.tidy() {
                tracing::error!(device = device.cached.name(), %error, "cannot write the marks of the device");
            }
        }
    }

    /// Forgets that a device may have dirty blocks, if it has none and gets none.
    fn forget_owner(&self, device: &Device) {
        let owners = self.owners.lock().unwrap_or_else(PoisonError::into_inner);
        let begins = device.beginning.load(SeqCst) > 0;
        if !begins && device.cached.is_settled() && !self.store.has_failed() {
            owners.remove(device.cached.name());
        }
    }

    /// Changes a mode; write-back is recorded before.
    fn set_mode(&self, device: &Device, mode: Mode) -> Result<()> {
        device.ends.store(false, SeqCst);
        if mode != Mode::WriteBack {
            return device.cached.set_mode(mode);
        }
        need_write_back(&self.store, device.resends)?;
        device.beginning.fetch_add(1, SeqCst);
        let done = self.begin_write_back(&device.cached);
        device.beginning.fetch_sub(1, SeqCst);
        done
    }

    fn begin_write_back(&self, device: &CachedDevice<Disk, Disk>) -> Result<()> {
        {
            let owners = self.owners.lock().unwrap_or_else(PoisonError::into_inner);
            owners.put(device.name(), &DirtyOwner::of(device.slow(), self.store.id()))?;
        }
        device.set_mode(Mode::WriteBack)?;
        // Afterwards, because the supervisor may die in between.
        if self.is_orphan.load(SeqCst) {
            device.set_mode(Mode::WriteThrough)?;
            let what = "the supervisor of the cache is dead, so there is no write-back: unmount its devices, and \
                        attach them again";
            return Err(Error::new(ErrorKind::Unavailable, what));
        }
        Ok(())
    }

    fn set(&self, set: Set) -> Result<Value> {
        let device = self.device(&set.name)?;
        let mode = set.mode.map(|mode| named(&mode, Mode::parse, "mode")).transpose()?;
        let policy = set.policy.map(|p| named(&p, PolicyKind::parse, "policy")).transpose()?;
        mode.map_or(Ok(()), |mode| self.set_mode(device, mode))?;
        policy.into_iter().for_each(|policy| self.store.set_policy(policy));
        set.cutoff.into_iter().for_each(|cutoff| device.cached.set_cutoff(cutoff));
        let WriteBackSettings { percent, seconds, rate } = self.writing_back.settings();
        self.writing_back.set(WriteBackSettings {
            percent: set.dirty_limit.unwrap_or(percent),
            seconds: set.dirty_age.unwrap_or(seconds),
            rate: set.writeback_rate.unwrap_or(rate),
        });
        Ok(self.status())
    }

    /// Writes back for a moment.
    fn write_back(&self, name: &str, before: Option<u64>, ends: bool) -> Result<Value> {
        let served = self.device(name)?;
        let device = &served.cached;
        if ends {
            served.ends.store(true, SeqCst);
            device.set_mode(Mode::WriteThrough)?;
        }
        let before = before.unwrap_or_else(|| self.store.log_position());
        let until = Instant::now() + WRITE_BACK;
        let mut left = device.write_back(before, BLOCKS_AT_ONCE)?;
        while left > 0 && Instant::now() < until {
            left = device.write_back(before, BLOCKS_AT_ONCE)?;
        }
        // Of a cache that has failed, nothing is written back.
        if let Some(gone) = self.store.gone().iter().find(|gone| gone.name == name) {
            let what = format!(
                "{} bytes of {name} are in the cache alone, whose device has failed",
                gone.bytes()
            );
            return Err(Error::new(ErrorKind::LocalIo, what));
        }
        self.forget_owner(served);
        Ok(json!({ "name": name, "dirty_bytes": left * BLOCK_SIZE, "before": before }))
    }

    /// A slow device that does not answer holds up the questions about itself alone.
    fn answer_all(self: Arc<Self>) {
        for stream in self.listener.incoming() {
            let Ok(stream) = stream else {
                std::thread::sleep(Duration::from_millis(10));
                continue;
            };
            let answering = Answering::of(&self);
            if self.answering.load(SeqCst) > ANSWERS_MAX {
                answer(stream, |question| self.answer(question));
                continue;
            }
            let answer = move || answer(stream, |question| answering.0.answer(question));
            if let Err(error) = std::thread::Builder::new().spawn(answer) {
                tracing::warn!(%error, "cannot start a thread that answers");
            }
        }
    }

    fn device(&self, name: &str) -> Result<&Device> {
        let found = self.devices.iter().find(|device| device.cached.name() == name);
        let missing = || Error::new(ErrorKind::NotFound, format!("no device {name} is attached"));
        found.ok_or_else(missing)
    }

    fn answer(&self, question: ControlRequest) -> Result<Value> {
        match question {
            ControlRequest::Status => Ok(self.status()),
            ControlRequest::Set(set) => self.set(set),
            ControlRequest::WriteBack { name, before, ends } => {
                self.write_back(&name, before, ends)
            }
            ControlRequest::Flush { name } => {
                let served = self.device(&name)?;
                let device = &served.cached;
                device.flush()?;
                device.tidy()?;
                served.store_times(true);
                Ok(json!({ "name": name, "marked_regions": device.marked() }))
            }
            ControlRequest::Check { name, from } => self.check(&name, from),
            ControlRequest::Histogram { name } => self.distributions(&name),
            ControlRequest::Attach(_)
            | ControlRequest::Detach { .. }
            | ControlRequest::Grow { .. }
            | ControlRequest::Replace { .. } => {
                let what = "this is a question for the supervisor: use `burgeon accelerate`";
                Err(Error::new(ErrorKind::Invalid, what))
            }
        }
    }

    /// Compares blocks for a moment, so that others that ask do not wait for long.
    fn check(&self, name: &str, from: u32) -> Result<Value> {
        let device = &self.device(name)?.cached;
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
        let devices = self.devices.iter().map(|it| (&*it.cached, it.front.transport()));
        document(&self.store, devices, &self.writing_back)
    }

    fn distributions(&self, name: &str) -> Result<Value> {
        let device = self.device(name)?;
        Ok(distributions(name, device.cells.times(), device.slots.counters()))
    }
}

impl Device {
    /// Stores the distributions, if it is time or the caller wants it `now`.
    fn store_times(&self, now: bool) {
        let stored = self.lasting.store(self.cells.times(), self.slots.counters(), now);
        if let Err(error) = stored {
            tracing::warn!(device = self.cached.name(), %error, "cannot store histograms");
        }
    }
}

/// A question that is being answered, until it is dropped.
struct Answering(Arc<Serving>);

impl Answering {
    fn of(serving: &Arc<Serving>) -> Self {
        serving.answering.fetch_add(1, SeqCst);
        Self(serving.clone())
    }
}

impl Drop for Answering {
    fn drop(&mut self) {
        self.0.answering.fetch_sub(1, SeqCst);
    }
}
