//! The server: answers the kernel's reads of lazy data, for every mount.
//!
//! ```text
//!   supervisor ── Attach + descriptors ──► the mount's task: open map, cache, store ─► LazyDevice
//!                             └─► frontend::serve or ublk::serve: hit threads, miss tasks
//!   supervisor ── Refresh, Record ───────► the mount's task
//!   kernel closes the FUSE file, or the ublk device is stopped
//!                                    ────► the mount's task ─► Ended ─► supervisor
//! ```
//!
//! It may be killed at any moment: its state can be recreated, and requests it has taken lie in
//! shared memory or with the kernel. It holds no descriptor of its own FUSE files, loop devices or
//! mounts, so it can never wait for itself.
//!
//! When its supervisor dies it goes on serving and waits for the next one (`run/adopt.sock`). Until
//! then it stops unused ublk devices itself.

mod background;
mod cache;
mod cache_parts;
mod helpers;
mod mounts;
mod places;
mod reads;
mod refusing;
mod served;
mod status;
mod tasks;
mod volumes;

use std::{
    collections::{BTreeSet, HashMap},
    ops::Deref,
    os::{
        fd::{AsFd, OwnedFd},
        unix::net::{UnixListener, UnixStream},
    },
    panic::{AssertUnwindSafe, catch_unwind},
    path::{Path, PathBuf},
    process::ExitCode,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
    thread,
    time::{Duration, Instant},
};

use burgeon_block::{Counters, Error, Result};
use burgeon_cache::Cache;
use burgeon_frontend::{
    ServeOptions, Slots,
    ublk::{Driver, OpenDevice},
};
use burgeon_source::{
    opening::{Manner, Opener, Opening, open_files_by},
    registry::ask_helpers_by,
};
use burgeon_volume::VolumeLimits;
use tokio::runtime::{Builder, Handle, Runtime};

use self::{
    background::Warmed,
    cache_parts::Claimed,
    helpers::Helpers,
    mounts::Job,
    reads::Reads,
    served::{Mount, Refused},
    tasks::Tasks,
    volumes::Openings,
};
use crate::{
    host::{
        harden,
        system::{Identity, identity},
    },
    id::MountId,
    ipc::{
        client::socket_path,
        link::{FromServer, ToServer, VERSION},
        wire,
    },
    log, opener,
    roles::{self, ServingIo},
    state::{
        files::{self, Lock},
        loans,
        paths::StateDir,
        record::{Attach, Transport},
    },
};

/// Threads of the fetch runtime. Fetching is waiting; two also keep a fast store busy.
const RUNTIME_THREADS: usize = 2;

/// Threads that may wait for a disk at once, for fetches from a local store.
const BLOCKING_THREADS: usize = 8;

/// Interval at which an orphan looks for unused ublk devices.
const UNUSED_INTERVAL: Duration = Duration::from_millis(500);

/// Interval of trying to listen for a new supervisor.
const LISTEN_INTERVAL: Duration = Duration::from_secs(1);

/// Time limit for the tasks of mounts to end before a new supervisor is told of the served mounts.
const TASKS_PATIENCE: Duration = Duration::from_secs(10);

struct Serving {
    state: StateDir,
    io: ServingIo,
    /// The folders that it may write to, with device and inode of each.
    folders: Vec<(PathBuf, Option<Identity>)>,
    /// Held for life: it tells `doctor` that there is a server.
    _lock: Lock,
    runtime: Runtime,
    /// Shared by all volumes, and with it one memory limit.
    limits: VolumeLimits,
    /// Shared by all volumes, too.
    cache: Arc<Cache>,
    /// The bytes that all mounts have read.
    reads: Mutex<Reads>,
    /// Ends the scrub of the cache that runs.
    scrub: Mutex<Option<Arc<AtomicBool>>>,
    claimed: Mutex<Claimed>,
    /// The records of plain files whose chunks are lent.
    loans: Mutex<BTreeSet<loans::Seen>>,
    /// The pending jobs of each mount: the only way to change the served devices.
    tasks: Tasks<MountId, Job>,
    mounts: Mutex<HashMap<MountId, Mount>>,
    /// Mounts whose files cannot be used.
    refused: Mutex<HashMap<MountId, Refused>>,
    /// Numbers the servers of mounts, to tell the end of an earlier one from that of its successor.
    servers: AtomicU64,
    volumes: Openings,
    /// Options for serving; all mounts share the helper threads.
    options: ServeOptions,
    /// Mounts that are being made, and the progress of their profiles. Locked before `mounts`.
    warmed: Mutex<HashMap<MountId, Warmed>>,
    /// The supervisor, while there is one.
    link: Mutex<Option<UnixStream>>,
    /// Opens files of this host.
    opener: Arc<opener::Client>,
    helpers: Helpers,
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

/// Serves until told to stop. This is the main function of the process `burgeon __serve STATE-DIR`,
/// whose standard input is the stream to its supervisor.
pub fn serve_forever(state_dir: &Path) -> ExitCode {
    match begin(state_dir) {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            log::prepare_to_end();
            tracing::error!(error = %e, "the server cannot go on");
            ExitCode::FAILURE
        }
    }
}

fn begin(state_dir: &Path) -> Result<()> {
    for sentence in harden::harden(true) {
        tracing::warn!("{sentence}");
    }
    let failed = |e| Error::io("cannot start the serving process", e);
    let state = StateDir::open(state_dir)?;
    let io = ServingIo::of_this_kernel();
    let driver = driver(io);
    let folders = roles::folders_of_server(&state);
    let folders: Vec<_> =
        folders.into_iter().map(|folder| (folder.clone(), identity(&folder))).collect();
    if !roles::serving(&state, io)?.enter()? {
        tracing::warn!("this kernel has no Landlock: the server can write files outside its state");
    }
    let opener = Arc::new(opener::Client::default());
    open_files_by(ByOpener::new(&opener, &state));
    let stdin =
        rustix::io::fcntl_dupfd_cloexec(rustix::stdio::stdin(), 3).map_err(|e| failed(e.into()))?;
    let runtime = Builder::new_multi_thread()
        .worker_threads(RUNTIME_THREADS)
        .max_blocking_threads(BLOCKING_THREADS)
        .enable_all()
        .build()
        .map_err(failed)?;
    let driver = driver.opened_by(device_opened_by(&opener, runtime.handle()));
    let driver = Arc::new(driver);
    let options = ServeOptions { driver, ..ServeOptions::new(runtime.handle().clone()) };
    let lock = the_only_server(&state)?;
    let (lent_to, lent) = loans::read_all(&state);
    let cache = cache::open(&state, lent)?;
    let serving = Arc::new(Serving {
        io,
        options,
        runtime,
        folders,
        _lock: lock,
        cache,
        loans: Mutex::new(lent_to),
        reads: Mutex::default(),
        scrub: Mutex::default(),
        claimed: Mutex::default(),
        state,
        limits: VolumeLimits::default(),
        tasks: Tasks::default(),
        mounts: Mutex::default(),
        refused: Mutex::default(),
        servers: AtomicU64::default(),
        volumes: Openings::default(),
        warmed: Mutex::default(),
        link: Mutex::default(),
        opener,
        helpers: Helpers::default(),
    });
    ask_supervisor_for_helpers(&serving);
    sample_reads(&serving);
    serve_supervisors(&serving, UnixStream::from(stdin))
}

/// Has credential helpers run by the supervisor: this process may execute nothing.
fn ask_supervisor_for_helpers(serving: &Arc<Serving>) {
    let asking = Arc::downgrade(serving);
    ask_helpers_by(Box::new(move |helper, registry| {
        let serving = asking.upgrade().ok_or("the server is ending")?;
        let (helper, registry) = (helper.to_owned(), registry.to_owned());
        let message = |number| FromServer::AskHelper { number, helper, registry };
        serving.helpers.ask(|number| serving.try_tell(&message(number)))
    }));
}

/// Starts the thread that looks at the bytes read now and then.
fn sample_reads(serving: &Arc<Serving>) {
    let reader = Arc::downgrade(serving);
    thread::spawn(move || {
        while let Some(serving) = reader.upgrade() {
            serving.look_at_reads().sample(Instant::now());
            serving.look_after_loans();
            drop(serving);
            thread::sleep(reads::PERIOD);
        }
    });
}

/// Handles the messages of one supervisor after another, until one says stop or nothing is left to
/// serve.
fn serve_supervisors(serving: &Arc<Serving>, mut stream: UnixStream) -> Result<()> {
    let failed = |e| Error::io("cannot keep the stream to the supervisor", e);
    loop {
        *lock(&serving.link) = Some(stream.try_clone().map_err(failed)?);
        if serving.handle_messages(&stream)? == Disconnect::Stop {
            serving.cache.flush();
            return Ok(());
        }
        *lock(&serving.link) = None;
        serving.helpers.supervisor_died();
        serving.end_scrub();
        lock(&serving.warmed).clear();
        if serving.is_idle() {
            return Ok(());
        }
        tracing::warn!("the supervisor has died: serving without it until the next one");
        let orphan = Arc::downgrade(serving);
        thread::spawn(move || {
            while orphan.upgrade().is_some_and(|serving| serving.stop_unused_devices()) {
                thread::sleep(UNUSED_INTERVAL);
            }
        });
        stream = serving.await_adoption()?;
    }
}

/// The way to the ublk driver, made while this process is an administrator.
fn driver(io: ServingIo) -> Driver {
    let driver = if io.ublk { Driver::confined() } else { Ok(Driver::direct()) };
    // Other mounts can be served.
    driver.unwrap_or_else(|e| {
        tracing::error!(error = %e, "mounts over ublk cannot be served");
        Driver::direct()
    })
}

/// Has devices of ublk opened by the opener. The threads that serve them may block.
fn device_opened_by(opener: &Arc<opener::Client>, runtime: &Handle) -> OpenDevice {
    let (opener, runtime) = (Arc::clone(opener), runtime.clone());
    Box::new(move |number| runtime.block_on(opener.open_ublk(number)))
}

/// Has files of this host opened by the opener. Its own this process opens itself, so that a store
/// in the state directory depends on nobody.
struct ByOpener {
    client: Arc<opener::Client>,
    /// The state directory.
    own: PathBuf,
    /// The store in it, if that is a link to somewhere else.
    elsewhere: Option<PathBuf>,
}

impl ByOpener {
    fn new(client: &Arc<opener::Client>, state: &StateDir) -> Self {
        let elsewhere = Some(state.store()).filter(|store| store.is_symlink());
        Self { client: Arc::clone(client), own: state.root().to_owned(), elsewhere }
    }
}

impl Opener for ByOpener {
    fn is_for(&self, path: &Path) -> bool {
        let is_elsewhere = self.elsewhere.as_ref().is_some_and(|store| path.starts_with(store));
        is_elsewhere || !path.starts_with(&self.own)
    }

    fn open(&self, path: &Path, manner: Manner) -> Opening {
        self.client.open(path, manner)
    }
}

/// Takes the server's lock: the requests in the slots have one owner. The previous server is dead,
/// or about to end.
fn the_only_server(state: &StateDir) -> Result<Lock> {
    Lock::take(&state.run().join("server.lock"))
}

/// Reason for the end of the connection to a supervisor.
#[derive(PartialEq, Eq)]
enum Disconnect {
    Stop,
    Orphaned,
}

impl Serving {
    /// Handles the supervisor's messages until the stream ends.
    fn handle_messages(self: &Arc<Self>, stream: &UnixStream) -> Result<Disconnect> {
        loop {
            let (message, mut fds) = match wire::receive::<ToServer>(stream) {
                Ok(Some(received)) => received,
                Ok(None) => return Ok(Disconnect::Orphaned),
                Err(e) => {
                    tracing::error!(error = %e, "cannot understand the supervisor");
                    return Ok(Disconnect::Orphaned);
                }
            };
            match message {
                ToServer::Attach { version, number, refuse, folders, attach } => {
                    tracing::debug!(mount = %attach.id, version, own = VERSION, "told to serve");
                    let (id, attach) = (attach.id, Box::new(attach));
                    self.add(id, Job::Attach { number, refuse, folders, attach, fds });
                }
                ToServer::Opener => {
                    fds.pop().into_iter().for_each(|socket| self.opener.connect(socket));
                }
                ToServer::Refresh { number, id } => self.add(id, Job::Refresh { number }),
                ToServer::Warm(warm) => self.warm(warm),
                ToServer::Cool { id } => drop(lock(&self.warmed).remove(&id)),
                ToServer::Record { id, on } => self.add(id, Job::Record { on }),
                ToServer::Report => self.tell(&FromServer::Report {
                    mounts: self.report(),
                    cache: Some(self.host_cache()),
                }),
                ToServer::Cache { number, order } => self.order(number, order),
                ToServer::Log { level, json } => {
                    crate::log::change(level.parse().ok(), Some(json));
                    tracing::info!(level, json, "the log was changed");
                }
                ToServer::Waits { number, id, after } => {
                    self.tell(&FromServer::Waits { number, waits: self.waits(id, after) });
                }
                ToServer::Places { number, id, first } => self.tell_places(number, id, first),
                ToServer::HelperSaid { number, said } => self.helpers.answered(number, said),
                ToServer::Stop => return Ok(Disconnect::Stop),
                ToServer::Unknown => {
                    tracing::warn!(own = VERSION, "ignoring a message of a later supervisor");
                }
            }
        }
    }

    /// Adds `job` to the mount's task. The caller handles other mounts, too, and must not wait for
    /// a disk.
    fn add(self: &Arc<Self>, id: MountId, job: Job) {
        if !self.tasks.add(id, job) {
            return;
        }
        let serving = Arc::clone(self);
        thread::spawn(move || {
            while let Some(job) = serving.tasks.next(id) {
                // A panic is a bug here; it must not block the mount's next job for ever.
                let done = catch_unwind(AssertUnwindSafe(|| serving.perform(id, job)));
                if done.is_err() {
                    tracing::error!(mount = %id, "a job of the mount's task ended in a panic");
                }
            }
        });
    }

    /// Ends this process if only its successor can serve `transport`, because the kernel
    /// offers it only since this server entered its sandbox. Readers wait for the successor.
    fn make_way_for(&self, id: MountId, transport: Transport) {
        if !self.io.serves(transport) && ServingIo::of_this_kernel().serves(transport) {
            log::prepare_to_end();
            tracing::warn!(mount = %id, "ending: only a new server can use io_uring for this mount");
            std::process::exit(1);
        }
    }

    /// Ends this process if a folder that it writes to was removed and made anew, or lies below a
    /// new mount: its sandbox allows the earlier one. Readers wait for the successor. `folders` are
    /// those that the supervisor sees, if it says so.
    fn make_way_if_replaced(&self, folders: &[Option<Identity>]) {
        let now = |place: usize, folder: &Path| match folders.get(place) {
            Some(seen) => *seen,
            None => identity(folder),
        };
        let mut known = self.folders.iter().enumerate();
        let is_another = |(place, (folder, known)): &(usize, &(PathBuf, Option<Identity>))| {
            let now = now(*place, folder);
            now.is_some() && now != *known
        };
        if let Some((_, (folder, _))) = known.find(is_another) {
            let folder = folder.display();
            log::prepare_to_end();
            tracing::warn!(%folder, "ending: the folder was made anew, and only a new server sees it");
            std::process::exit(1);
        }
    }

    /// The number of a mount's next server.
    fn next_server(&self) -> u64 {
        self.servers.fetch_add(1, Relaxed)
    }

    /// True if there is nothing to serve.
    fn is_idle(&self) -> bool {
        lock(&self.mounts).is_empty() && lock(&self.refused).is_empty()
    }

    /// Tells the supervisor, if there is one; the next one is told everything anyway.
    fn tell(&self, message: &FromServer) {
        self.try_tell(message);
    }

    /// The same; false if there is no supervisor.
    fn try_tell(&self, message: &FromServer) -> bool {
        lock(&self.link).as_ref().is_some_and(|link| wire::send(link, message, &[]).is_ok())
    }

    /// Stops the ublk devices without a file system, so that an orphan ends with its last mount;
    /// false once there is a supervisor again, whose job this is.
    fn stop_unused_devices(&self) -> bool {
        let devices: Vec<_> = {
            let transports = self.channels(|attach, _, _| Ok(attach.transport));
            transports.unwrap_or_default().into_iter().filter_map(Transport::device).collect()
        };
        let is_unused = |number: &u32| {
            let unused = self.runtime.block_on(self.opener.is_unused_ublk(*number));
            unused.unwrap_or_else(|e| {
                tracing::warn!(error = %e, number, "cannot see if a ublk device is in use");
                false
            })
        };
        for number in devices.into_iter().filter(is_unused) {
            if lock(&self.link).is_some() {
                return false;
            }
            if let Err(e) = self.options.driver.stop(number) {
                tracing::warn!(error = %e, number, "an unused ublk device stays");
            }
        }
        lock(&self.link).is_none()
    }

    /// Waits for a new supervisor and hands its state over.
    fn await_adoption(&self) -> Result<UnixStream> {
        let (_folder, path) = socket_path(&self.state, "adopt.sock")?;
        let failed = |e| Error::io("cannot wait for a new supervisor", e);
        let listener = listen_patiently(&path);
        loop {
            let (stream, _) = listener.accept().map_err(failed)?;
            let peer =
                rustix::net::sockopt::socket_peercred(&stream).map_err(|e| failed(e.into()))?;
            if !peer.uid.is_root() && peer.uid != rustix::process::geteuid() {
                continue;
            }
            match self.hand_over(&stream) {
                Ok(()) => {
                    if let Err(error) = files::remove_file(&path) {
                        tracing::warn!(
                            path = %path.display(),
                            %error,
                            "the socket for a new supervisor stays"
                        );
                    }
                    return Ok(stream);
                }
                Err(e) => tracing::error!(error = %e, "a new supervisor could not take over"),
            }
        }
    }

    fn hand_over(&self, stream: &UnixStream) -> Result<()> {
        for mount in self.tasks.wait_until_idle(TASKS_PATIENCE) {
            tracing::warn!(%mount, "a new supervisor takes over while the mount is being attached");
        }
        self.channels(|attach, fuse, slots| {
            let message = FromServer::Serving(attach.clone());
            let fuse = fuse.as_ref().map(AsFd::as_fd);
            let fds: Vec<_> = fuse.into_iter().chain([slots.fd()]).collect();
            wire::send(stream, &message, &fds)
        })?;
        wire::send(stream, &FromServer::Adopted { refreshes: true, version: VERSION }, &[])
    }

    /// Calls `look` on each mount, served or refused.
    fn channels<T>(
        &self,
        look: impl Fn(&Attach, &Option<OwnedFd>, &Slots) -> Result<T>,
    ) -> Result<Vec<T>> {
        let (mounts, refused) = (lock(&self.mounts), lock(&self.refused));
        let served = mounts.values().map(|mount| look(&mount.attach, &mount.fuse, &mount.slots));
        let others = refused.values().map(|mount| look(&mount.attach, &mount.fuse, &mount.slots));
        served.chain(others).collect()
    }
}

/// Listens at `path`. A file system that takes no socket, because it is read-only since an error or
/// full, takes no supervisor either, and mounts are served until it does.
fn listen_patiently(path: &Path) -> UnixListener {
    let mut is_told = false;
    loop {
        let failed = |e| Error::io("cannot listen for a new supervisor", e);
        let bound =
            files::remove_file(path).and_then(|()| UnixListener::bind(path).map_err(failed));
        match bound {
            Ok(listener) => return listener,
            Err(error) => {
                if !std::mem::replace(&mut is_told, true) {
                    tracing::error!(
                        path = %path.display(),
                        %error,
                        "cannot listen for a new supervisor: serving without one, and trying again"
                    );
                }
                thread::sleep(LISTEN_INTERVAL);
            }
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
