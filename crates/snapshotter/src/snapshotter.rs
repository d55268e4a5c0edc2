//! Snapshots on this host: the state machine of `model.rs`, made durable by `disk.rs`.
//!
//! ```text
//!   a call ─► names taken (keys.rs) ─► planned (model.rs) ─► on the disk (disk.rs) ─► applied
//!                                          short lock            no lock            short lock
//! ```
//!
//! Calls block their thread; `service.rs` gives each one of its own. Removed folders are deleted by
//! one thread in the background, so neither `Remove` nor `Cleanup` waits for a tree to be deleted.

use std::{
    collections::{BTreeMap, HashSet},
    path::{Path, PathBuf},
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, SystemTime},
};

use burgeon_block::{Error, ErrorKind, Result};

use crate::{
    api,
    chains::Chains,
    containers::Containers,
    disk::{Disk, RootAttributes},
    filter::Filter,
    image_index::ImageIndex,
    keys::{NamesInUse, Taken},
    model::{Labels, Native, Refusal, RemoteLayer, Snapshot, SnapshotKind, Snapshots, Usage},
    overlay,
    remote::{self, CLAIM_TIME, LayerChain, Layers},
    walk,
};

/// The reason why a call did not succeed.
#[derive(Debug)]
pub enum CallError {
    /// The request does not fit the snapshots.
    Refused(Refusal),
    /// This host failed.
    Failed(Error),
    /// Another call about the same snapshot takes too long.
    Busy(String),
}

impl From<Refusal> for CallError {
    fn from(refusal: Refusal) -> Self {
        Self::Refused(refusal)
    }
}

impl From<Error> for CallError {
    fn from(error: Error) -> Self {
        Self::Failed(error)
    }
}

/// A result of a call.
pub type CallResult<T> = std::result::Result<T, CallError>;

/// All snapshots below one root.
#[derive(Debug)]
pub struct Snapshotter {
    pub(crate) disk: Disk,
    all: Mutex<Snapshots>,
    keys: NamesInUse,
    options: overlay::Options,
    trash: Bell,
    /// Rings when an image was unpacked or removed.
    pub(crate) images: Bell,
    /// A snapshot of an image was removed, and `images` has not rung since.
    has_removed_image: AtomicBool,
    /// By the digest of the manifest. The indexer's thread alone changes them.
    indexes: Mutex<BTreeMap<String, ImageIndex>>,
    /// `None`: all layers are local.
    pub(crate) chains: Option<Chains>,
    pub(crate) containers: Containers,
    /// The socket of the containerd whose content store gets differences.
    pub(crate) containerd: Option<PathBuf>,
    /// Chains whose refusal is in the log.
    refused: Mutex<HashSet<u64>>,
}

/// The nearest folders below a snapshot, and the remote chain that all of them lie on.
#[derive(Debug)]
pub(crate) struct Below {
    local: Vec<u64>,
    remote: Option<(u64, RemoteLayer)>,
}

/// Tells a thread that there is something to do.
#[derive(Debug, Default)]
pub(crate) struct Bell {
    has_rung: Mutex<bool>,
    rings: Condvar,
    is_over: AtomicBool,
}

impl Snapshotter {
    /// Opens a root, which is made if it is missing. Nothing is mounted and nothing is asked from a
    /// network.
    pub fn open(root: &Path) -> Result<Self> {
        let (disk, loaded) = Disk::open(root)?;
        for problem in &loaded.damaged {
            tracing::error!(%problem, "a snapshot is lost");
        }
        let last_id = loaded.last_id();
        let indexes = loaded.indexes.into_iter().map(ImageIndex::at_start);
        Ok(Self {
            disk,
            all: Mutex::new(Snapshots::new(loaded.snapshots, last_id)),
            keys: NamesInUse::default(),
            options: overlay::Options::of_kernel(),
            // An earlier process may have left something.
            trash: Bell { has_rung: Mutex::new(true), ..Bell::default() },
            images: Bell::default(),
            has_removed_image: AtomicBool::new(false),
            indexes: Mutex::new(indexes.map(|one| (one.manifest.clone(), one)).collect()),
            chains: None,
            containers: Containers::default(),
            containerd: None,
            refused: Mutex::default(),
        })
    }

    /// Writes differences into the content store of the containerd at this socket.
    pub fn with_containerd(mut self, socket: PathBuf) -> Self {
        self.containerd = Some(socket);
        self
    }

    /// Has layers mounted by `layers` where it can.
    pub fn with_layers(mut self, layers: Arc<dyn Layers>) -> Self {
        self.chains = Some(Chains::new(self.disk.chains(), layers));
        self
    }

    /// Decides about the form of containers above remote chains.
    pub fn with_containers(mut self, containers: Containers) -> Self {
        self.containers = containers;
        self
    }

    /// Starts the thread that deletes removed folders. It ends after [`Self::end`].
    pub fn start_cleaner(self: &Arc<Self>) -> std::io::Result<thread::JoinHandle<()>> {
        let this = Arc::clone(self);
        thread::Builder::new().name("cleaner".into()).spawn(move || {
            while this.trash.wait(None) {
                // Before the trash is emptied: another one may be removed meanwhile.
                let is_image = this.has_removed_image.swap(false, Ordering::Relaxed);
                match this.empty_trash() {
                    // Unmounted, so its index can be removed.
                    Ok(()) if is_image => this.images.ring(),
                    Ok(()) => {}
                    // The next Remove, or containerd's next Cleanup, tries again.
                    Err(error) => {
                        this.has_removed_image.fetch_or(is_image, Ordering::Relaxed);
                        tracing::warn!(%error, "a removed snapshot stays for now");
                    }
                }
            }
        })
    }

    /// Ends the threads of [`Self::start_cleaner`] and [`Self::start_indexer`].
    pub fn end(&self) {
        for bell in [&self.trash, &self.images] {
            bell.is_over.store(true, Ordering::Relaxed);
            bell.ring();
        }
    }

    /// Makes an active snapshot or a view, and returns its mounts.
    pub fn create(
        &self,
        kind: SnapshotKind,
        key: &str,
        parent: Option<&str>,
        labels: Labels,
    ) -> CallResult<Vec<api::Mount>> {
        let why_local = match labels.get(remote::REF).cloned() {
            Some(chain) if kind == SnapshotKind::Active => {
                self.lock().check_create(key, parent, &labels)?;
                match self.claim(&chain, parent, &labels)? {
                    Ok(()) => return Err(Refusal::Exists(format!("{chain:?} is mounted")).into()),
                    Err(why) => Some(why),
                }
            }
            _ => None,
        };
        match self.choose_native(kind, key, parent, &labels) {
            Ok(()) => {
                let made = self.create_as(kind, key, parent, (labels.clone(), None, None), true);
                let Err(CallError::Failed(error)) = made else { return made };
                tracing::warn!(%key, %error, "a container cannot be native");
                let why = Some(error.to_string());
                self.create_as(kind, key, parent, (labels, None, why), false)
            }
            Err(why) => self.create_as(kind, key, parent, (labels, why_local, why), false),
        }
    }

    /// Makes a snapshot, with the reasons why it is local, or no native container.
    fn create_as(
        &self,
        kind: SnapshotKind,
        key: &str,
        parent: Option<&str>,
        (labels, why_local, why_overlay): (Labels, Option<String>, Option<String>),
        is_native: bool,
    ) -> CallResult<Vec<api::Mount>> {
        // Before names are taken, because it may wait for a network.
        let above = match parent {
            Some(parent) => {
                let below = self.below(parent, 0)?;
                self.check_remote(&below)?;
                // The root of a native container is that of its own mount.
                if is_native { None } else { self.folders(below)?.into_iter().next() }
            }
            None => None,
        };
        let taken = self.take(&[key], parent)?;
        let planned = self.lock().plan_create(kind, key, parent, labels, SystemTime::now());
        // The parent may be gone since its chain was mounted: the cleaner looks.
        let mut snapshot = planned.inspect_err(|_| self.trash.ring())?;
        (snapshot.why_local, snapshot.why_overlay) = (why_local, why_overlay);
        snapshot.native = is_native.then(Native::default);
        let made = self.root_attributes(&snapshot, above.as_deref()).and_then(|attributes| {
            if is_native {
                self.chains()?.clear(snapshot.id)?;
            }
            self.disk.make_folder(snapshot.id, attributes, kind == SnapshotKind::Active)?;
            self.disk.write(&snapshot)
        });
        if let Err(error) = made {
            // Perhaps the record was renamed, and only its sync failed.
            if self.disk.remove_record(snapshot.id).is_ok() {
                self.disk.discard_some_time(snapshot.id);
            }
            self.trash.ring();
            return Err(error.into());
        }
        self.lock().put(None, snapshot.clone());
        tracing::info!(key, parent, native = is_native, "made a snapshot");
        if !is_native {
            return self.mounts_of(&snapshot);
        }
        // It keeps its parent, so nothing can happen to that meanwhile.
        drop(taken);
        self.mount_new_native(&snapshot).inspect_err(|_| {
            // Perhaps it was removed meanwhile, and its mount was made after that.
            drop(self.remove(key));
            self.trash.ring();
        })
    }

    /// Claims a chain, or tells why its layers are local.
    fn claim(
        &self,
        chain: &str,
        parent: Option<&str>,
        labels: &Labels,
    ) -> CallResult<std::result::Result<(), String>> {
        let Some(chains) = &self.chains else { return Ok(Err("all layers are local".into())) };
        let claimed =
            LayerChain::of(chain, labels).and_then(|wanted| chains.claim(CLAIM_TIME, wanted));
        let source = match claimed {
            Ok(source) => source,
            Err(why) => {
                tracing::debug!(%chain, %why, "a layer is local");
                return Ok(Err(why));
            }
        };
        let _taken = self.take(&[chain], parent)?;
        let now = SystemTime::now();
        let planned = self.lock().plan_claim(chain, parent, labels.clone(), source, now);
        let snapshot = match planned {
            Ok(snapshot) => snapshot,
            Err(refusal) => return Ok(Err(refusal.to_string())),
        };
        self.disk.write(&snapshot)?;
        let is_used_again = {
            let known = self.known_indexes();
            let mut known = remote::manifests(&snapshot).filter_map(|it| known.get(it));
            known.any(|index| index.unused_since.is_some())
        };
        let mut all = self.lock();
        let before = all.get(chain).is_ok().then_some(chain);
        all.put(before, snapshot);
        drop(all);
        if is_used_again {
            self.images.ring();
        }
        Ok(Ok(()))
    }

    /// The mounts of an active snapshot or a view.
    pub fn mounts(&self, key: &str) -> CallResult<Vec<api::Mount>> {
        self.mounts_of(&self.stat(key)?)
    }

    fn mounts_of(&self, snapshot: &Snapshot) -> CallResult<Vec<api::Mount>> {
        if snapshot.kind == SnapshotKind::Committed {
            let what = format!("{:?} is committed, and has no mounts", snapshot.name);
            return Err(Refusal::Precondition(what).into());
        }
        if snapshot.native.is_some() {
            return self.native_mounts(snapshot);
        }
        let below = self.below(&snapshot.name, 1)?;
        let lower = self.folders(below)?;
        let own = self.disk.folder(snapshot.id);
        Ok(overlay::mounts(snapshot.kind, &snapshot.labels, &own, lower, self.options))
    }

    /// The snapshot and those below it but the first `skip`, down to the first remote one.
    pub(crate) fn below(&self, name: &str, skip: usize) -> CallResult<Below> {
        let all = self.lock();
        let mut below = Below { local: Vec::new(), remote: None };
        for snapshot in all.lineage(name)?.into_iter().skip(skip) {
            match &snapshot.remote {
                Some(remote) => {
                    below.remote = Some((snapshot.id, remote.clone()));
                    break;
                }
                None => below.local.push(snapshot.id),
            }
        }
        Ok(below)
    }

    /// Refuses a chain of which a layer is not what its image states. If another source is left and
    /// nothing is made above the chain, it is unmounted, to be mounted from there.
    fn check_remote(&self, below: &Below) -> CallResult<()> {
        let (Some((id, remote)), Some(chains)) = (&below.remote, &self.chains) else {
            return Ok(());
        };
        let Some((why, is_all)) = chains.refused(remote) else { return Ok(()) };
        let (chain, users) = {
            let all = self.lock();
            let chain = all.iter().find(|one| one.id == *id).map(|one| one.name.clone());
            let users = all.above_chain(*id);
            (chain.unwrap_or_default(), users)
        };
        if self.refused.lock().unwrap_or_else(PoisonError::into_inner).insert(*id) {
            tracing::error!(%chain, %why, ?users, "a remote layer is not what its image states");
        }
        if !is_all && users.is_empty() {
            return Ok(chains.unmount_one(*id)?);
        }
        let what = format!(
            "nothing more is made above {chain}: {why}; remove its containers and images{}",
            if users.is_empty() {
                String::new()
            } else {
                format!("; above it: {}", users.join(", "))
            }
        );
        Err(Refusal::Precondition(what).into())
    }

    /// Their folders, the nearest first. Mounts the remote chain if it is not mounted.
    pub(crate) fn folders(&self, below: Below) -> CallResult<Vec<PathBuf>> {
        let mut folders: Vec<_> = below.local.iter().map(|id| self.disk.layer(*id)).collect();
        if let Some((id, remote)) = &below.remote {
            folders.push(self.chains()?.mounted(*id, remote)?);
        }
        Ok(folders)
    }

    pub(crate) fn chains(&self) -> Result<&Chains> {
        let none = || Error::new(ErrorKind::Unavailable, "this process mounts no remote layers");
        self.chains.as_ref().ok_or_else(none)
    }

    /// Commits an active snapshot under a name. The data is durable when this returns.
    pub fn commit(
        &self,
        key: &str,
        name: &str,
        parent: Option<&str>,
        labels: Labels,
    ) -> CallResult<()> {
        let active = self.stat(key)?;
        let before = match active.native.is_some() && active.kind == SnapshotKind::Active {
            true => Some(self.ready_to_commit(&active)?),
            false => None,
        };
        let _taken = self.take(&[key, name], None)?;
        let mut snapshot = self.lock().plan_commit(key, name, parent, labels, SystemTime::now())?;
        if let (Some(_), Some(before)) = (snapshot.native.take(), &before) {
            self.write_difference(snapshot.id, before)?;
        }
        // The record promises the data, so the data is durable first.
        self.disk.sync_layer(snapshot.id)?;
        snapshot.usage = Some(self.measure(snapshot.id)?);
        self.disk.write(&snapshot)?;
        let completes = remote::completed_image(&snapshot).is_some();
        self.lock().put(Some(key), snapshot);
        if completes {
            self.images.ring();
        }
        if before.is_some() {
            // Its mount and its writes are not needed any more.
            self.trash.ring();
        }
        tracing::info!(key, name, "committed a snapshot");
        Ok(())
    }

    /// Removes a snapshot. Its files are deleted later.
    pub fn remove(&self, key: &str) -> CallResult<()> {
        let _taken = self.take(&[key], None)?;
        let snapshot = self.lock().plan_remove(key)?;
        self.disk.remove_record(snapshot.id)?;
        self.lock().forget(key);
        if remote::manifests(&snapshot).next().is_some() {
            self.has_removed_image.store(true, Ordering::Relaxed);
        }
        if snapshot.remote.is_none() {
            self.disk.discard_some_time(snapshot.id);
        }
        self.trash.ring();
        tracing::info!(key, "removed a snapshot");
        Ok(())
    }

    /// The snapshot with this name.
    pub fn stat(&self, key: &str) -> CallResult<Snapshot> {
        Ok(self.lock().get(key)?.clone())
    }

    /// Changes labels, and returns the changed snapshot.
    pub fn update(&self, name: &str, labels: &Labels, paths: &[String]) -> CallResult<Snapshot> {
        let _taken = self.take(&[name], None)?;
        let snapshot = self.lock().plan_update(name, labels, paths, SystemTime::now())?;
        self.disk.write(&snapshot)?;
        self.lock().put(Some(name), snapshot.clone());
        Ok(snapshot)
    }

    /// The snapshots that the filter matches, by name.
    pub fn list(&self, filter: &Filter) -> Vec<Snapshot> {
        self.lock().iter().filter(|snapshot| filter.matches(snapshot)).cloned().collect()
    }

    /// The disk space of a snapshot alone; of a committed one as it was measured then.
    pub fn usage(&self, key: &str) -> CallResult<Usage> {
        let snapshot = self.stat(key)?;
        if let Some(usage) = snapshot.usage {
            return Ok(usage);
        }
        let measured = match &snapshot.native {
            Some(native) => self.native_usage(snapshot.id, native),
            None => self.measure(snapshot.id),
        };
        match measured {
            // Removed while it was measured: that is what there is to say.
            Err(error) => Err(self.stat(key).err().unwrap_or(error.into())),
            Ok(usage) => Ok(usage),
        }
    }

    /// Has the rest of earlier removals done.
    pub fn cleanup(&self) {
        self.trash.ring();
    }

    fn measure(&self, id: u64) -> Result<Usage> {
        let layer = self.disk.layer(id);
        walk::usage(&layer).map_err(|e| Error::io(format!("cannot measure {}", layer.display()), e))
    }

    /// The root of a container has the owner and mode of its image's, because overlayfs shows those
    /// of the topmost folder; with mapped ids, the owner is the container's root.
    fn root_attributes(&self, snapshot: &Snapshot, above: Option<&Path>) -> Result<RootAttributes> {
        let own = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
        let mut attributes = match above {
            Some(above) => RootAttributes::of(above)?,
            None => RootAttributes { uid: own.0, gid: own.1, mode: 0o755 },
        };
        if let Some((uid, gid)) = overlay::mapped_root(&snapshot.labels)? {
            (attributes.uid, attributes.gid) = (uid, gid);
        }
        Ok(attributes)
    }

    pub(crate) fn take(&self, alone: &[&str], shared: Option<&str>) -> CallResult<Taken<'_>> {
        let busy = || {
            let what = format!("another call about {:?} takes too long: try again", alone[0]);
            CallError::Busy(what)
        };
        self.keys.take(alone, shared).ok_or_else(busy)
    }

    pub(crate) fn known_indexes(&self) -> MutexGuard<'_, BTreeMap<String, ImageIndex>> {
        self.indexes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, Snapshots> {
        self.all.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// For tests: the disk fails after so many more steps, as if this process had died.
    #[doc(hidden)]
    pub fn die_after(&self, steps: i64) {
        self.disk.steps_left.store(steps, Ordering::Relaxed);
    }

    /// For tests: the disk is full at the step with this number, and has space again after it.
    #[doc(hidden)]
    pub fn be_full_at(&self, step: i64) {
        self.disk.steps_until_full.store(step, Ordering::Relaxed);
    }

    /// For tests: the number of steps until the disk is full; 0 or less afterwards.
    #[doc(hidden)]
    pub fn steps_until_full(&self) -> i64 {
        self.disk.steps_until_full.load(Ordering::Relaxed)
    }

    /// The background thread's work: deletes removed folders, unmounts removed chains.
    #[doc(hidden)]
    pub fn empty_trash(&self) -> Result<()> {
        let unmounted = self.chains.as_ref().map_or(Ok(()), |chains| {
            let is_mounted = |one: &Snapshot| one.remote.is_some() || one.native.is_some();
            chains.unmount_others(|id| {
                // The files that it has written are all that is left of a snapshot whose record is
                // damaged.
                self.disk.is_damaged(id)
                    || self.lock().iter().any(|snapshot| snapshot.id == id && is_mounted(snapshot))
            })
        });
        unmounted.and(self.disk.empty_trash())
    }
}

impl Bell {
    pub(crate) fn ring(&self) {
        *self.has_rung.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.rings.notify_all();
    }

    pub(crate) fn is_over(&self) -> bool {
        self.is_over.load(Ordering::Relaxed)
    }

    /// Waits until it rings, or until `limit` has passed; false at the end.
    pub(crate) fn wait(&self, limit: Option<Duration>) -> bool {
        let has_rung = self.has_rung.lock().unwrap_or_else(PoisonError::into_inner);
        let is_quiet = |has_rung: &mut bool| !*has_rung;
        let mut has_rung = match limit {
            None => {
                self.rings.wait_while(has_rung, is_quiet).unwrap_or_else(PoisonError::into_inner)
            }
            Some(limit) => {
                let waited = self.rings.wait_timeout_while(has_rung, limit, is_quiet);
                waited.unwrap_or_else(PoisonError::into_inner).0
            }
        };
        *has_rung = false;
        !self.is_over()
    }
}

impl CallError {
    /// True if the failure is one of this host, and so belongs into the log.
    pub fn is_of_host(&self) -> bool {
        !matches!(self, Self::Refused(_))
    }
}

impl std::fmt::Display for CallError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Refused(refusal) => refusal.fmt(f),
            Self::Failed(error) => error.fmt(f),
            Self::Busy(what) => f.write_str(what),
        }
    }
}

impl CallError {
    /// The kind of an error of this host.
    pub fn kind(&self) -> Option<ErrorKind> {
        match self {
            Self::Failed(error) => Some(error.kind()),
            _ => None,
        }
    }
}
