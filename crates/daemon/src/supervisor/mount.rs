//! Makes a mount.
//!
//! ```text
//!   resolve ─► prepare (once an image); the server starts the profile prefetch with its map
//!     ─► reserve the sprout ─► copy the seed under its own fsid
//!     ─► FUSE connection or ublk device, slots ─► the server attaches ─► its block device,
//!     loops on the seed and the sprout ─► btrfs: seed, sprout added, writable
//!     ─► a detached mount of the subvolume
//! ```
//!
//! On a failure everything made so far is closed with its descriptors or removed by the mount's id;
//! the folder is removed last.

use std::{
    fs,
    os::fd::OwnedFd,
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};

use burgeon_block::{Digest, Error, ErrorKind, Result};
use burgeon_frontend::Slots;
use burgeon_source::{Access, Location};

use super::{
    Supervisor, grants,
    table::{MountEntry, Serving},
};
use crate::{
    host::backing_devices,
    id::MountId,
    ipc::{
        link::{ToServer, Warm},
        protocol::{MountRequest, Mounted},
    },
    prepare::mend,
    state::{
        access, built, complete,
        files::{self, make_folder},
        images, prepared,
        record::{Attach, MOUNT_FORMAT, MountRecord, ProfileSource, Transport},
        recycled_seed, writes,
    },
    supervisor::{
        plan::Plan,
        plumbing,
        profile::{self, Fetching},
    },
    transport::{Channel, TransportOptions},
};

/// Time limit for a server to say that it can serve a mount. It reads a map and opens two files;
/// the rest allows for a few restarts.
pub(super) const ATTACH_TIMEOUT: Duration = Duration::from_secs(60);

/// Attempts to make a mount. One fails if the server dies while its block device is started.
const ATTEMPTS: usize = 3;

/// The end of an attempt to make a mount.
enum Attempt {
    Made(Mounted, OwnedFd),
    /// The files to serve it from were damaged, and have been made again.
    Mended,
    /// The server of its new block device has died.
    ServerDied(Error),
}

impl Supervisor {
    /// Makes the requested mount and returns its descriptor, detached.
    pub(super) fn mount(self: &Arc<Self>, mut request: MountRequest) -> Result<(Mounted, OwnedFd)> {
        {
            let table = self.table();
            if table.stopping || table.end_when_idle {
                return Err(Error::new(ErrorKind::Unavailable, "the daemon is ending: try again"));
            }
        }
        if request.access.is_empty() {
            // The settings of the service's unit apply to clients that have none.
            request.access = Access::from_env();
        }
        let store = request.store.clone().unwrap_or_else(|| self.state.store().into());
        if let (Some(identity), Some(folder)) = (request.store_identity, store.folder()) {
            identity.check(folder)?;
        }
        if let (Some(_), Some(folder)) = (&request.store, store.folder()) {
            backing_devices::refuse_burgeon(folder, "the store")?;
        }
        let begun = Instant::now();
        if let Some(bytes) = request.writes.first_bytes() {
            self.make_room(bytes);
        }
        if request.writes.name().is_some() {
            recycled_seed::lend(&self.state);
        }
        let made = self.attempt(&request, &store);
        recycled_seed::refill(&self.state);
        let (mounted, mount) = made.map_err(|e| recycled_seed::explain(&self.state, e))?;
        let (id, image, ms) = (mounted.id, mounted.digest.0, begun.elapsed().as_millis());
        tracing::info!(mount = %id, name = request.image, %image, ms, "mounted");
        Ok((mounted, mount))
    }

    /// Makes the mount, again if the cause of a failure is gone.
    fn attempt(
        self: &Arc<Self>,
        request: &MountRequest,
        store: &Location,
    ) -> Result<(Mounted, OwnedFd)> {
        let (name, mut has_mended, mut attempts) = (&request.image, false, 1);
        loop {
            match self.mount_as(MountId::random()?, request, store)? {
                Attempt::Made(mounted, mount) => return Ok((mounted, mount)),
                Attempt::Mended if has_mended => {
                    let what = "the image's prepared files are damaged again and again: check the disk of the state directory";
                    return Err(Error::new(ErrorKind::Corrupt, what));
                }
                Attempt::Mended => {
                    tracing::warn!(name, "prepared files were damaged, and have been made again");
                    has_mended = true;
                }
                Attempt::ServerDied(error) if attempts == ATTEMPTS => return Err(error),
                Attempt::ServerDied(error) => {
                    tracing::warn!(name, %error, "the server died: mounting the image once more");
                    attempts += 1;
                }
            }
        }
    }

    fn mount_as(
        self: &Arc<Self>,
        id: MountId,
        request: &MountRequest,
        store: &Location,
    ) -> Result<Attempt> {
        let folder = self.state.mount(id);
        fs::create_dir(&folder)
            .map_err(|e| Error::io(format!("cannot make {}", folder.display()), e))?;
        let mapped = |image, map: &Path, fetching: &Fetching| {
            self.warm(id, request, store, (image, map), fetching);
        };
        let planned = Plan::make(&self.state, request, store, id, &mapped);
        let mut plan = planned.inspect_err(|_| self.abandon(id))?;
        // The record names the files to serve it from.
        let mut record = None;
        let error = match self.make(id, request, &mut plan, &mut record) {
            Ok((mounted, mount)) => return Ok(Attempt::Made(mounted, mount)),
            Err(error) => error,
        };
        // A damaged version is one that nobody knows.
        let is_damage = matches!(error.kind(), ErrorKind::Corrupt | ErrorKind::UnsupportedFormat);
        let has_lost_server = self.has_lost_first_server(id);
        let mended = record.filter(|_| is_damage).map(|record| mend(&self.state, &record));
        self.abandon(id);
        plan.undo(&self.state);
        match mended {
            Some(Ok(true)) => Ok(Attempt::Mended),
            _ if has_lost_server => Ok(Attempt::ServerDied(error)),
            _ => Err(error),
        }
    }

    /// Lets the server prefetch the profile's data while the rest of the mount is made. This is a
    /// hint: an error in it recurs later and is reported there.
    fn warm(
        &self,
        id: MountId,
        request: &MountRequest,
        store: &Location,
        (image, map): (Digest, &Path),
        fetching: &Fetching,
    ) {
        // Only a served mount has a fetch limit, and a complete image fetches nothing.
        if request.fetch_limit.is_some() || complete::is_here(&self.state, &image) {
            return;
        }
        let folder = self.state.mount(id);
        let (access, cache) = (&request.access, self.state.image(&image));
        let ready = access::keep(&folder, store, access)
            .and_then(|()| make_folder(&cache))
            .and_then(|()| profile::source(&self.state, &request.profile, image, &folder));
        let Ok(Some(profile)) = ready else { return };
        let Ok(profile) = fetching.arrived(profile, &folder) else { return };
        let references = store.folder() == Some(&*self.state.store());
        let granted = self.grant(id, grants::of_image(store, map, references, access));
        if granted.is_err() {
            return;
        }
        self.table().send(&ToServer::Warm(Warm {
            id,
            map: map.to_owned(),
            cache: cache.join("cache"),
            store: store.clone(),
            references,
            profile,
        }));
    }

    fn make(
        self: &Arc<Self>,
        id: MountId,
        request: &MountRequest,
        plan: &mut Plan,
        made_of: &mut Option<MountRecord>,
    ) -> Result<(Mounted, OwnedFd)> {
        let folder = self.state.mount(id);
        let digest = plan.base.digest;
        make_folder(&self.state.image(&digest))?;
        let profile = profile::source(&self.state, &request.profile, digest, &folder)?;
        plan.reserve(&self.state)?;
        if let Some(name) = request.writes.name() {
            recycled_seed::take(&self.state, name, &folder.join("seed"));
        }
        let seed = prepared::personalise(&plan.base, plan.seed_fsid, &folder.join("seed"))?;
        let taken = self.take_plain(id, request, plan, &seed.info);
        let plain_of_image = taken.as_ref().map(|(_, plain)| *plain);
        let channel = match taken {
            Some((file, _)) => Channel::Plain(file),
            None => {
                let options = TransportOptions { transport: request.transport, fast: request.fast };
                let (channel, note) = Channel::open(options, id, seed.info.data_device_size())?;
                plan.notes.extend(note);
                channel
            }
        };
        let fuse = channel.kept()?;
        if fuse.is_some() {
            self.prepare_to_hold();
        }
        let attributes = built::attributes(&self.state, &plan.base.digest, request.attributes);
        let record = MountRecord {
            format: MOUNT_FORMAT,
            image: request.shown.clone().unwrap_or_else(|| request.image.clone()),
            name: request.image.clone(),
            digest: plan.base.digest.into(),
            target: request.target.clone(),
            writes: plan.state(),
            attributes,
            attach: self.attach_of(request, plan, (id, channel.transport(), profile)),
            fsid: None,
            data_device: None,
            loops: Vec::new(),
            data_bytes: seed.info.data_end - burgeon_btrfs::DATA_START,
            growth: None,
            frozen: false,
            plain: channel.is_plain(),
            plain_of_image,
        };
        *made_of = Some(record.clone());
        let (opener, attach) = self.have_served(record, request, plan, fuse)?;
        let data = (&channel, opener.unwrap_or_default());
        let is_served = || self.hear_from_server(id, attach);
        let (plumbed, mount) = plumbing::plumb(&self.state, id, data, plan, attributes, is_served)?;
        let transport = channel.name().to_owned();
        drop(channel);
        plan.notes.extend(self.lost_area(id));
        plan.sprouted(&self.state, plumbed.fsid)?;
        self.note(id, &plumbed)?;
        plan.notes.extend(self.reserve_plain(id));
        plan.notes.extend(self.useless_cache());
        // Not earlier: until here a helper may wait for the connection, which must end with us.
        self.hold(id);
        let mounted = Mounted {
            id,
            digest: plan.base.digest.into(),
            device: plumbed.data_device.clone(),
            transport,
            metadata_bytes: seed.metadata_bytes,
            writes: plan.state(),
            attributes,
            notes: plan.notes.clone(),
        };
        Ok((mounted, mount))
    }

    /// Grants what the mount of `record` needs, writes its record, and waits until the server
    /// serves it. Returns the process that has opened its ublk device, and the number of the
    /// `Attach`.
    fn have_served(
        &self,
        record: MountRecord,
        request: &MountRequest,
        plan: &mut Plan,
        fuse: Option<OwnedFd>,
    ) -> Result<(Option<u32>, u64)> {
        let id = record.attach.id;
        let folder = self.state.mount(id);
        access::keep(&folder, &plan.store, &request.access)?;
        if let Some(area) = &plan.area {
            images::keep_access(&self.state, id, area, &request.access)?;
        }
        let access = access::kept(&folder)?;
        self.grant(id, grants::of_mount(&self.state, &record.attach, &access))?;
        files::publish_json(&folder.join("mount.json"), &record)?;
        let folders = self.folders_of_server();
        self.table().folders = folders;
        // The kernel itself reads a plain file.
        let serving = if record.plain { Serving::Yes } else { Serving::Awaited };
        let entry = MountEntry::new(record, fuse, Slots::create()?);
        self.table().add(MountEntry { serving, _writes_lock: plan.lock.take(), ..entry });
        self.await_serving(id)?;
        let table = self.table();
        let entry = table.mounts.get(&id);
        Ok(entry.map_or((None, 0), |entry| (entry.opener, entry.attach_number)))
    }

    /// All that the server needs to know of a planned mount.
    fn attach_of(
        &self,
        request: &MountRequest,
        plan: &Plan,
        (id, transport, profile): (MountId, Transport, Option<ProfileSource>),
    ) -> Attach {
        let pins = match request.writes.name() {
            Some(name) => writes::folder(&self.state, name),
            None => self.state.mount(id),
        };
        Attach {
            id,
            seed: plan.base.folder.clone(),
            cache: self.state.image(&plan.base.digest).join("cache"),
            store: plan.store.clone(),
            references: plan.store.folder() == Some(&*self.state.store()),
            fsid: plan.seed_fsid,
            fill: request.fill,
            transport,
            area: plan.area.clone(),
            fetch_limit: request.fetch_limit,
            profile,
            pins: pins.join("pins.json"),
        }
    }

    /// A note for the user if the mount has a virtual area that cannot be read.
    fn lost_area(&self, id: MountId) -> Option<String> {
        self.table().mounts.get(&id)?.record.attach.area.as_ref()?;
        let problem = self.fresh_table().reports.get(&id)?.area.as_ref()?.problem.clone()?;
        Some(format!(
            "reads of mapped data give I/O errors: {problem}; `burgeon doctor` names \
            the remedy"
        ))
    }

    /// A note for the user if the cache keeps nothing, as far as the server has told.
    fn useless_cache(&self) -> Option<String> {
        let last = self.table().cache.clone();
        // The first mount of a daemon finds no report.
        let cache = match last {
            None => self.fresh_table().cache.clone()?,
            Some(cache) => cache,
        };
        let why = cache.problem.clone().or_else(|| cache.lacks_space())?;
        Some(format!(
            "the cache keeps nothing, so what is read is fetched, and perhaps again later: {why}; \
             see `burgeon cache status`"
        ))
    }

    /// Waits until the server serves `id`, or returns the reason why it cannot.
    pub(super) fn await_serving(&self, id: MountId) -> Result<()> {
        self.await_answer(id, false)
    }

    /// Like `await_serving`, but also succeeds if the server refuses the mount's reads.
    pub(super) fn await_taken_on(&self, id: MountId) -> Result<()> {
        self.await_answer(id, true)
    }

    fn await_answer(&self, id: MountId, may_refuse: bool) -> Result<()> {
        let waited = self.changed.wait_timeout_while(self.table(), ATTACH_TIMEOUT, |table| {
            table.mounts.get(&id).is_some_and(|entry| matches!(entry.serving, Serving::Awaited))
        });
        let table = match waited {
            Ok((table, _)) => table,
            Err(poisoned) => poisoned.into_inner().0,
        };
        let Some(entry) = table.mounts.get(&id) else {
            return Err(Error::new(
                ErrorKind::Unavailable,
                "the mount ended while it was made: try again",
            ));
        };
        match &entry.serving {
            Serving::Yes => Ok(()),
            Serving::Refusing(_) if may_refuse => Ok(()),
            Serving::No(error) | Serving::Refusing(error) => {
                Err(Error::new(error.kind(), error.to_string()))
            }
            Serving::Awaited => Err(self.silent_server()),
        }
    }

    /// Makes the server see new mappings and pins of `id`, and waits until it has.
    pub(super) fn refresh(&self, id: MountId) -> Result<()> {
        let gone = || Error::new(ErrorKind::NotFound, format!("there is no mount {id}"));
        let number = self.table().refresh(id).ok_or_else(gone)?;
        let waited = self.changed.wait_timeout_while(self.table(), ATTACH_TIMEOUT, |table| {
            let entry = table.mounts.get(&id);
            entry.is_some_and(|entry| matches!(entry.refreshes.get(&number), Some(None)))
        });
        let mut table = match waited {
            Ok((table, _)) => table,
            Err(poisoned) => poisoned.into_inner().0,
        };
        let entry = table.mounts.get_mut(&id).ok_or_else(gone)?;
        entry.refreshes.remove(&number).flatten().unwrap_or_else(|| Err(self.silent_server()))
    }

    fn silent_server(&self) -> Error {
        Error::new(
            ErrorKind::Unavailable,
            format!("the serving process does not start: see {}", self.state.log_file().display()),
        )
    }

    /// Records the names that the kernel has assigned, so that a later supervisor finds them.
    fn note(&self, id: MountId, plumbed: &plumbing::parts::Plumbed) -> Result<()> {
        self.update(id, |record| {
            record.fsid = Some(plumbed.fsid);
            record.data_device = Some(plumbed.data_device.clone());
            record.loops = plumbed.loops.clone();
            record.growth = plumbed.growth.clone();
        })
    }

    /// Records that the mount has been moved into place.
    pub(super) fn placed(&self, id: MountId, target: PathBuf) -> Result<()> {
        self.update(id, |record| record.target = target)
    }

    pub(super) fn update(&self, id: MountId, change: impl FnOnce(&mut MountRecord)) -> Result<()> {
        let record = {
            let mut table = self.table();
            let Some(entry) = table.mounts.get_mut(&id) else {
                return Err(Error::new(ErrorKind::NotFound, format!("there is no mount {id}")));
            };
            change(&mut entry.record);
            entry.record.clone()
        };
        files::publish_json(&self.state.mount(id).join("mount.json"), &record)
    }
}
