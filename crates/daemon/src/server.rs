//! The serving process: answers the kernel's reads of lazy data, for every mount.
//!
//! ```text
//!   supervisor ── Attach + descriptors ──► a thread: open map, cache, store ─► LazyDevice
//!                             └─► frontend::serve or ublk::serve: threads for hits, tasks for misses
//!   kernel lets go of the FUSE file, or the ublk device is stopped ──► Ended ──► supervisor
//! ```
//!
//! It may be killed at any moment: what it holds is re-creatable, and requests it has taken lie
//! in shared memory or with the kernel. It holds no descriptor of its own FUSE files, loop devices or mounts, so
//! nothing it does can wait for itself.
//!
//! When its supervisor dies it goes on serving and waits for the next one (`run/adopt.sock`).
//! Until then it stops ublk devices that nobody uses any more itself.

mod background;
mod volumes;

use std::{
    collections::HashMap,
    ops::Deref,
    os::{
        fd::OwnedFd,
        unix::net::{UnixListener, UnixStream},
    },
    path::Path,
    pin::Pin,
    process::ExitCode,
    sync::{Arc, Mutex, MutexGuard, PoisonError, Weak},
    thread,
    time::Duration,
};

use burgeon_block::{Counters, Error, ErrorKind, Result};
use burgeon_frontend::{End, ServeOptions, Server, Slots, serve, ublk, ublk::Control};
use burgeon_source::References;
use burgeon_volume::{CacheState, Fill, Limits};
use tokio::runtime::{Builder, Runtime};

use self::{
    background::{Following, Warmed, fill_status, pinned_status, profile_status},
    volumes::{Area, Device, ImageVolume, Origin},
};
use crate::{
    access,
    client::socket_path,
    files::{self, Lock},
    harden,
    id::MountId,
    link::{Attach, FromServer, MountReport, ToServer, sort_descriptors},
    paths::StateDir,
    pins::Pins,
    protocol::{AreaStatus, CacheStatus},
    roles::{self, ServingIo},
    transport::{self, Transport},
    wire,
};

/// Threads of the runtime that fetches. Fetching is waiting; two also keep a quick store busy.
const RUNTIME_THREADS: usize = 2;

/// Threads that may wait for a disk at once, on behalf of fetches from a local store.
const BLOCKING_THREADS: usize = 8;

/// How often an orphan looks whether its ublk devices are in use.
const UNUSED_INTERVAL: Duration = Duration::from_millis(500);

struct Serving {
    state: StateDir,
    io: ServingIo,
    /// Held for life: `doctor` sees by it that there is a server.
    _lock: Lock,
    runtime: Runtime,
    /// The same for all volumes, who share one bound of memory by them.
    limits: Limits,
    mounts: Mutex<HashMap<MountId, Mount>>,
    volumes: Mutex<HashMap<Origin, Weak<ImageVolume>>>,
    /// Mounts that are being made, and how far they are with their profiles. Locked before `mounts`.
    warmed: Mutex<HashMap<MountId, Warmed>>,
    /// The supervisor, while there is one.
    link: Mutex<Option<UnixStream>>,
}

/// One mount that is served, and all that an heir of the supervisor would need.
struct Mount {
    attach: Attach,
    volume: Arc<ImageVolume>,
    device: Arc<Device>,
    fuse: Option<OwnedFd>,
    slots: Arc<Slots>,
    server: AnyServer,
    following: Following,
    fill: Option<Fill>,
    /// What is pinned, on its way; `None` until it is known what that is.
    pinned: Option<Vec<Fill>>,
}

/// A mount's server; stopped when it is dropped.
#[expect(dead_code, reason = "held for what dropping them does")]
enum AnyServer {
    Fuse(Server),
    Ublk(ublk::Server),
}

/// The counters in the memory that mounts share with the supervisor.
#[derive(Clone)]
struct SharedCounters(Arc<Slots>);

impl Deref for SharedCounters {
    type Target = Counters;

    fn deref(&self) -> &Counters {
        self.0.counters()
    }
}

/// Serves until told to stop. This is the whole life of the process `burgeon __serve STATE-DIR`,
/// whose standard input is the stream to its supervisor.
pub fn serve_forever(state_dir: &Path) -> ExitCode {
    match begin(state_dir) {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            log!("the serving process cannot go on: {e}");
            ExitCode::FAILURE
        }
    }
}

fn begin(state_dir: &Path) -> Result<()> {
    for sentence in harden::harden(true) {
        log!("{sentence}");
    }
    let failed = |e| Error::io("cannot start the serving process", e);
    let state = StateDir::open(state_dir)?;
    let io = ServingIo::of_this_kernel();
    if !roles::serving(&state, io).enter()? {
        log!("this kernel has no Landlock: the serving process can write files outside its state");
    }
    let stdin =
        rustix::io::fcntl_dupfd_cloexec(rustix::stdio::stdin(), 3).map_err(|e| failed(e.into()))?;
    let runtime = Builder::new_multi_thread()
        .worker_threads(RUNTIME_THREADS)
        .max_blocking_threads(BLOCKING_THREADS)
        .enable_all()
        .build()
        .map_err(failed)?;
    let serving = Arc::new(Serving {
        io,
        runtime,
        _lock: the_only_server(&state)?,
        state,
        limits: Limits::default(),
        mounts: Mutex::default(),
        volumes: Mutex::default(),
        warmed: Mutex::default(),
        link: Mutex::default(),
    });
    let mut stream = UnixStream::from(stdin);
    loop {
        *lock(&serving.link) = Some(stream.try_clone().map_err(failed)?);
        if serving.obey(&stream)? == Parting::Stop {
            return Ok(());
        }
        *lock(&serving.link) = None;
        lock(&serving.warmed).clear();
        if lock(&serving.mounts).is_empty() {
            return Ok(());
        }
        log!("the supervisor has died; serving on and waiting for the next one");
        let orphan = Arc::downgrade(&serving);
        thread::spawn(move || {
            while orphan.upgrade().is_some_and(|serving| serving.stop_unused_devices()) {
                thread::sleep(UNUSED_INTERVAL);
            }
        });
        stream = serving.await_adoption()?;
    }
}

/// The requests in the slots have one owner, so the server before must be gone; it is, or will be
/// in a moment.
fn the_only_server(state: &StateDir) -> Result<Lock> {
    Lock::take(&state.run().join("server.lock"))
}

/// How the conversation with a supervisor came to its end.
#[derive(PartialEq, Eq)]
enum Parting {
    Stop,
    Orphaned,
}

impl Serving {
    /// Does what the supervisor says until it stops talking.
    fn obey(self: &Arc<Self>, stream: &UnixStream) -> Result<Parting> {
        loop {
            let (message, fds) = match wire::receive::<ToServer>(stream) {
                Ok(Some(received)) => received,
                Ok(None) => return Ok(Parting::Orphaned),
                Err(e) => {
                    log!("the supervisor is not understood: {e}");
                    return Ok(Parting::Orphaned);
                }
            };
            match message {
                ToServer::Attach(attach) => {
                    let serving = Arc::clone(self);
                    // Opening files may wait for a disk; other mounts must not.
                    thread::spawn(move || {
                        let id = attach.id;
                        let error = serving.attach(attach, fds).err().map(Into::into);
                        let served = lock(&serving.mounts).contains_key(&id);
                        serving.tell(&FromServer::Attached { id, error, served });
                    });
                }
                ToServer::Warm(warm) => self.warm(warm),
                ToServer::Cool { id } => drop(lock(&self.warmed).remove(&id)),
                ToServer::Record { id, on } => {
                    let (cut_short, error) = match self.record(id, on) {
                        Ok(cut_short) => (cut_short, None),
                        Err(e) => (false, Some(e.into())),
                    };
                    self.tell(&FromServer::Recorded { id, on, cut_short, error });
                }
                ToServer::Report => self.tell(&FromServer::Report { mounts: self.report() }),
                ToServer::Stop => return Ok(Parting::Stop),
            }
        }
    }

    fn attach(self: &Arc<Self>, attach: Attach, fds: Vec<OwnedFd>) -> Result<()> {
        let Some((fuse, slots)) = sort_descriptors(attach.transport, fds) else {
            return Err(Error::new(ErrorKind::Invalid, "a mount came without its descriptors"));
        };
        let served = lock(&self.mounts).get(&attach.id).map(|mount| Arc::clone(&mount.device));
        if let Some(device) = served {
            // Something has been mapped; or a supervisor that adopted us says what it was told.
            device.area().map_or(Ok(()), |area| area.refresh())?;
            return self.fetch_pinned(attach.id, &attach.pins);
        }
        self.make_way_for(attach.id, attach.transport);
        let slots = Arc::new(Slots::from_fd(slots)?);
        let access = access::kept(&self.state.mount(attach.id))?;
        let references = if attach.references { References::Allow } else { References::Refuse };
        let map = attach.seed.join("map");
        let volume = self.volume(Origin::of(&attach, &access), &map, references)?;
        let device = Arc::new(self.lazy_device(&attach, &access, &volume, &slots)?);
        let mut options = ServeOptions::new(self.runtime.handle().clone());
        options.rings = matches!(attach.transport, Transport::Rings { .. });
        let kept = fuse.as_ref().map(OwnedFd::try_clone).transpose();
        let kept = kept.map_err(|e| Error::io("cannot keep the FUSE device", e))?;
        let (server, ended): (_, Pin<Box<dyn Future<Output = End> + Send>>) =
            match (fuse, attach.transport) {
                (None, Transport::Ublk { number }) => {
                    let served = Arc::clone(&device);
                    let server = ublk::serve(number, Arc::clone(&slots), served, &options)?;
                    let ended = server.ended();
                    (AnyServer::Ublk(server), Box::pin(ended))
                }
                (Some(fuse), _) => {
                    let served = Arc::clone(&device);
                    let server = serve(fuse, Arc::clone(&slots), served, &options)?;
                    let ended = server.ended();
                    (AnyServer::Fuse(server), Box::pin(ended))
                }
                (None, Transport::Fuse | Transport::Rings { .. }) => {
                    return Err(Error::new(ErrorKind::Invalid, "a FUSE mount came without FUSE"));
                }
            };
        let transport = attach.transport;
        let (id, serving) = (attach.id, Arc::clone(self));
        let mount = Mount {
            attach,
            volume,
            device,
            fuse: kept,
            slots,
            server,
            following: Following::Loading,
            fill: None,
            pinned: None,
        };
        let pins = mount.attach.pins.clone();
        self.bring(id, mount);
        if let Err(e) = self.fetch_pinned(id, &pins) {
            // They are a matter of speed; the mount is served.
            log!("mount {id}: what is pinned is not fetched: {e}");
        }
        self.runtime.spawn(async move {
            let end = ended.await;
            if let (End::Failed(errno), Transport::Ublk { .. }) = (end, transport) {
                // The device lives on, and waits for a server.
                log!("mount {id} cannot be served on (errno {errno}): making way for a successor");
                std::process::exit(1);
            }
            // Joining the mount's threads is no work for the runtime.
            tokio::task::spawn_blocking(move || serving.forget(id, &format!("{end:?}")));
        });
        Ok(())
    }

    /// Ends this process if only its successor can serve `transport`: one that the kernel has come to
    /// offer since this server gave it up. Readers wait for the successor.
    fn make_way_for(&self, id: MountId, transport: Transport) {
        if !self.io.serves(transport) && ServingIo::of_this_kernel().serves(transport) {
            log!("mount {id} needs what this server has given up: making way for a successor");
            std::process::exit(1);
        }
    }

    /// Begins to fetch what the file `pins` says, and lets go of what was pinned before. Returns when
    /// it is known how much that is.
    fn fetch_pinned(&self, id: MountId, pins: &Path) -> Result<()> {
        let ranges = Pins::read(pins)?.ranges();
        let device = lock(&self.mounts).get(&id).map(|mount| Arc::clone(&mount.device));
        let Some(device) = device else { return Ok(()) };
        let fills = self.runtime.block_on(device.fill_ranges(&ranges))?;
        if let Some(mount) = lock(&self.mounts).get_mut(&id) {
            mount.pinned = Some(fills);
        }
        Ok(())
    }

    /// A mount is over.
    fn forget(&self, id: MountId, why: &str) {
        let Some(mount) = lock(&self.mounts).remove(&id) else { return };
        log!("mount {id} is over: {why}");
        if let Some(fill) = &mount.fill {
            fill.stop();
        }
        let Mount { server, fuse, volume, device, .. } = mount;
        drop(server);
        drop(device);
        drop(fuse);
        drop(volume);
        lock(&self.volumes).retain(|_, volume| volume.strong_count() > 0);
        self.tell(&FromServer::Ended { id });
        let orphaned = lock(&self.link).is_none();
        if orphaned && lock(&self.mounts).is_empty() {
            let _ = files::remove_file(&self.state.run().join("adopt.sock"));
            std::process::exit(0);
        }
    }

    fn report(&self) -> Vec<MountReport> {
        let mounts = lock(&self.mounts);
        let reports = mounts.values().map(|mount| {
            let status = mount.volume.status();
            let of_area = mount.device.area().and_then(|area| area.status().last_source_error);
            MountReport {
                id: mount.attach.id,
                materialised_bytes: status.materialised_bytes,
                last_source_error: status.last_source_error.clone().or(of_area),
                cache: cache_status(status),
                fill: mount.attach.fill.then(|| fill_status(mount)),
                profile: mount.attach.profile.is_some().then(|| profile_status(mount)),
                pinned: mount.pinned.as_deref().map(pinned_status),
                area: mount.device.area().map(|area| area_status(area)),
                over_limit_reads: mount.device.over_limit_reads(),
            }
        });
        reports.collect()
    }

    /// Tells the supervisor, if there is one; the next one is told everything anyway.
    fn tell(&self, message: &FromServer) {
        if let Some(link) = &*lock(&self.link) {
            let _ = wire::send(link, message, &[]);
        }
    }

    /// Stops the ublk devices that no file system is on, so that an orphan ends with its last
    /// mount; false once there is a supervisor again, whose work this is.
    fn stop_unused_devices(&self) -> bool {
        let devices: Vec<_> = {
            let mounts = lock(&self.mounts);
            let transports = mounts.values().map(|mount| mount.attach.transport);
            transports.filter_map(Transport::device).collect()
        };
        for number in devices.into_iter().filter(|number| transport::is_unused(*number)) {
            if lock(&self.link).is_some() {
                return false;
            }
            if let Err(e) = Control::open().and_then(|mut control| control.stop(number)) {
                log!("an unused device stays: {e}");
            }
        }
        lock(&self.link).is_none()
    }

    /// Waits for a new supervisor and gives it all it needs to be one.
    fn await_adoption(&self) -> Result<UnixStream> {
        let (_folder, path) = socket_path(&self.state, "adopt.sock")?;
        files::remove_file(&path)?;
        let failed = |e| Error::io("cannot wait for a new supervisor", e);
        let listener = UnixListener::bind(&path).map_err(failed)?;
        loop {
            let (stream, _) = listener.accept().map_err(failed)?;
            let peer =
                rustix::net::sockopt::socket_peercred(&stream).map_err(|e| failed(e.into()))?;
            if peer.uid != rustix::process::geteuid() {
                continue;
            }
            match self.hand_over(&stream) {
                Ok(()) => {
                    files::remove_file(&path)?;
                    return Ok(stream);
                }
                Err(e) => log!("a new supervisor could not take over: {e}"),
            }
        }
    }

    fn hand_over(&self, stream: &UnixStream) -> Result<()> {
        use std::os::fd::AsFd;
        for mount in lock(&self.mounts).values() {
            let message = FromServer::Serving(mount.attach.clone());
            let fuse = mount.fuse.as_ref().map(AsFd::as_fd);
            let fds: Vec<_> = fuse.into_iter().chain([mount.slots.fd()]).collect();
            wire::send(stream, &message, &fds)?;
        }
        wire::send(stream, &FromServer::Adopted, &[])
    }
}

fn area_status(area: &Area) -> AreaStatus {
    let status = area.status();
    AreaStatus {
        size: status.size,
        problem: status.problem,
        lost_reads: status.lost_reads,
        unmapped_reads: status.unmapped_reads,
        last_unmapped: status.last_unmapped,
        changed_reads: status.changed_reads,
        last_changed: status.last_changed,
    }
}

fn cache_status(status: burgeon_volume::Status) -> CacheStatus {
    let (state, reason) = match status.cache {
        CacheState::Writing => ("writing", None),
        CacheState::NoSpace { reason } => ("full", Some(reason)),
        CacheState::Stopped { reason } => ("stopped", Some(reason)),
    };
    CacheStatus {
        state: state.to_owned(),
        reason,
        read_errors: status.cache_read_errors,
        write_errors: status.cache_write_errors,
        uncached_chunks: status.uncached_chunks,
        flights: status.flights as u64,
        waiting_readers: status.waiting_readers as u64,
        ahead_bytes: status.ahead.brought,
        ahead_read_bytes: status.ahead.read,
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
