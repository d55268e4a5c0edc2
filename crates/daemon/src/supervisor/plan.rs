//! The plan of a mount, decided before anything is made: its seed, the fsid, and the place of
//! writes.

use std::{
    fs,
    path::{Path, PathBuf},
};

use burgeon_block::{ByteRange, Digest, Error, ErrorKind, Result};
use burgeon_image::{
    ExtentWriter,
    catalog::{self, ReservedName},
};
use burgeon_source::{Location, Store};

use crate::{
    id::{Fsid, MountId},
    ipc::protocol::{MountRequest, ProfileRequest, SproutRequest, WritesRequest},
    prepare,
    state::{
        files::{self, Lock},
        images::AREA,
        known_digests::known_digest,
        paths::StateDir,
        prepared::{self, Prepared},
        record::{SproutState, WritesState},
        roots, space,
        writes::{self, RECORD_FORMAT, WritesRecord},
    },
    supervisor::profile::Fetching,
};

/// Called with an image, the file of its address map, and its profile that is being fetched.
pub(crate) type OnMapped<'a> = &'a dyn Fn(Digest, &Path, &Fetching);

/// The plan of one mount.
pub(crate) struct Plan {
    /// The seed's template, the map and the manifest.
    pub(crate) base: Prepared,
    /// The location of the chunks.
    pub(crate) store: Location,
    /// The seed's fsid: a new one, or the one that the writes were made on.
    pub(crate) seed_fsid: Fsid,
    /// The place of writes; `None` for a read-only mount.
    pub(crate) sprout: Option<Sprout>,
    /// Reserves the writes' name while it is held.
    pub(crate) lock: Option<Lock>,
    /// The folder of the virtual area's map, if the mount has one.
    pub(crate) area: Option<PathBuf>,
    /// Notes for the user.
    pub(crate) notes: Vec<String>,
}

/// A writable device, new or with data on it.
pub(crate) struct Sprout {
    pub(crate) path: PathBuf,
    /// True for a user's block device, false for a file in the state directory.
    pub(crate) is_device: bool,
    pub(crate) limit: u64,
    pub(crate) thin: bool,
    pub(crate) reserved: u64,
    /// True until it has been added to its seed for the first time.
    pub(crate) is_new: bool,
    /// The record of named writes.
    pub(crate) record: Option<WritesRecord>,
}

impl Plan {
    /// Makes the plan. Takes the lock on the writes' name, and prepares the image if necessary;
    /// `mapped` is called as soon as the image's address map exists.
    pub(crate) fn make(
        state: &StateDir,
        request: &MountRequest,
        store: &Location,
        id: MountId,
        mapped: OnMapped<'_>,
    ) -> Result<Self> {
        match &request.writes {
            WritesRequest::ReadOnly => Self::on_new_seed(state, request, store, id, None, mapped),
            WritesRequest::Kept(sprout) => match &sprout.name {
                Some(name) => Self::named(state, request, store, id, sprout, name, mapped),
                None => {
                    let folder = state.mount(id);
                    let sprout = new_sprout(state, sprout, folder.join("sprout"))?;
                    Self::on_new_seed(state, request, store, id, Some(sprout), mapped)
                }
            },
        }
    }

    fn on_new_seed(
        state: &StateDir,
        request: &MountRequest,
        store: &Location,
        id: MountId,
        sprout: Option<Sprout>,
        mapped: OnMapped<'_>,
    ) -> Result<Self> {
        // One store for all requests, because a connection costs a round trip.
        let open = Store::open(store, &request.access)?;
        let digest = resolve(&open, request)?;
        let tell = (!request.store_away).then_some(&open);
        let notes = roots::require(state, store, tell, &digest, id)?.into_iter().collect();
        let (access, virtual_bytes) = (&request.access, request.virtual_bytes);
        // With a fetch limit only a served mount prefetches.
        let wanted = match request.fetch_limit {
            None if !request.store_away => &request.profile,
            _ => &ProfileRequest::None,
        };
        let profile = Fetching::begin(wanted, &open, digest);
        let mapped = |map: &Path| mapped(digest, map, &profile);
        let base = prepare::prepare(state, store, access, digest, virtual_bytes, mapped)?;
        let base = match virtual_bytes {
            0 => prepare::with_sums(state, store, access, base),
            _ => base,
        };
        Ok(Self {
            base,
            store: store.clone(),
            seed_fsid: Fsid::random()?,
            area: (request.virtual_bytes > 0).then(|| state.mount(id).join(AREA)),
            sprout,
            lock: None,
            notes,
        })
    }

    fn named(
        state: &StateDir,
        request: &MountRequest,
        store: &Location,
        id: MountId,
        wanted: &SproutRequest,
        name: &str,
        mapped: OnMapped<'_>,
    ) -> Result<Self> {
        let lock = Some(writes::take(state, name)?);
        if let Some(record) = writes::find(state, name)?.filter(|record| record.sprouted) {
            return Ok(Self { lock, ..Self::on_record(state, request, id, wanted, record)? });
        }
        writes::refuse_lost_record(state, name)?;
        // The folder has no data of value: an earlier mount failed before it handed out anything.
        let folder = writes::folder(state, name);
        writes::discard(&folder)?;
        let sprout = new_sprout(state, wanted, folder.join("sprout"))?;
        let mut plan = Self::on_new_seed(state, request, store, id, Some(sprout), mapped)?;
        let record = record(&plan.base, plan.seed_fsid, name, request)?;
        if let Some(sprout) = &mut plan.sprout {
            let device = sprout.is_device.then(|| sprout.path.clone());
            sprout.record =
                Some(WritesRecord { device, limit: sprout.limit, thin: sprout.thin, ..record });
        }
        plan.area = plan.area.map(|_| folder.join(AREA));
        Ok(Self { lock, ..plan })
    }

    /// Plans a mount of existing named writes: everything as recorded, wherever the image is now.
    fn on_record(
        state: &StateDir,
        request: &MountRequest,
        id: MountId,
        wanted: &SproutRequest,
        record: WritesRecord,
    ) -> Result<Self> {
        refuse_misfit(request, &record)?;
        let mut notes = Vec::new();
        let folder = writes::folder(state, &record.name);
        // A moved store gets its new name; the digests identify the chunks.
        let moved = request.store.is_some() && request.store != record.store;
        let mut record = record;
        if moved {
            record.store = request.store.clone();
        }
        let store = record.store.clone().unwrap_or_else(|| state.store().into());
        let open = Store::open(&store, &request.access)?;
        let tell = (!request.store_away).then_some(&open);
        notes.extend(roots::require(state, &store, tell, &record.manifest.0, id)?);
        let now = tell.map(|open| resolve(open, request));
        if now.is_some_and(|now| now.is_ok_and(|now| now != record.manifest.0)) {
            notes.push(format!(
                "{} was built anew after these writes were made; the writes stay on their \
                 earlier image",
                request.image
            ));
        }
        if wanted.limit.is_some_and(|limit| limit != record.limit) {
            notes.push(format!("the write limit stays at {} bytes, as it was made", record.limit));
        }
        if moved {
            writes::publish(state, &record)?;
        }
        let path = record.device.clone().unwrap_or_else(|| folder.join("sprout"));
        let reserved = match record.device {
            Some(_) => record.limit,
            // A sprout's file is as long as its reserved size.
            None => space::reserved(&path)?,
        };
        Ok(Self {
            base: prepare::kept(state, &store, &request.access, &record)?,
            store,
            area: (record.virtual_bytes > 0).then(|| folder.join(AREA)),
            seed_fsid: record.seed_fsid,
            sprout: Some(Sprout {
                path,
                is_device: record.device.is_some(),
                limit: record.limit,
                thin: record.thin,
                reserved,
                is_new: false,
                record: Some(record),
            }),
            lock: None,
            notes,
        })
    }

    /// Makes the sprout and, for named writes, keeps the files that it is based on.
    pub(crate) fn reserve(&mut self, state: &StateDir) -> Result<()> {
        let Some(sprout) = &mut self.sprout else { return Ok(()) };
        if !sprout.is_new {
            return if sprout.is_device { Ok(()) } else { space::reserve_holes(&sprout.path) };
        }
        if let Some(record) = &sprout.record {
            let folder = writes::folder(state, &record.name);
            files::make_folder(&folder)?;
            prepared::keep(&self.base, &folder)?;
            // From now on the mount itself is made from the kept files.
            self.base.folder = folder;
        }
        if !sprout.is_device {
            sprout.reserved = space::create_sprout(&sprout.path, sprout.limit, sprout.thin)?;
        }
        if let Some(area) = &self.area {
            files::make_folder(area)?;
            let info = prepared::read_info(&self.base.folder)?;
            ExtentWriter::create(area, info.virtual_area.map_or(0, ByteRange::len))?;
            files::sync_parent(area)?;
        }
        match &sprout.record {
            Some(record) => writes::publish(state, record),
            None => Ok(()),
        }
    }

    /// The sprout belongs to its seed now: from here on it holds the user's data.
    pub(crate) fn sprouted(&mut self, state: &StateDir, fsid: Fsid) -> Result<()> {
        let Some(sprout) = &mut self.sprout else { return Ok(()) };
        let is_known = |record: &WritesRecord| record.sprouted && record.sprout_fsid == Some(fsid);
        if let Some(record) = sprout.record.as_mut().filter(|record| !is_known(record)) {
            record.sprouted = true;
            record.sprout_fsid = Some(fsid);
            writes::publish(state, record)?;
        }
        sprout.is_new = false;
        Ok(())
    }

    /// Removes the unused named writes of a mount that failed.
    pub(crate) fn undo(&self, state: &StateDir) {
        let Some(sprout) = self.sprout.as_ref().filter(|sprout| sprout.is_new) else { return };
        if let Some(record) = sprout.record.as_ref().filter(|record| !record.sprouted) {
            let folder = writes::folder(state, &record.name);
            // A failure costs space until the name is used again, and no data.
            let _ = writes::discard(&folder);
        }
    }

    /// The place of writes, for the user.
    pub(crate) fn state(&self) -> WritesState {
        match &self.sprout {
            None => WritesState::ReadOnly,
            Some(sprout) => WritesState::Sprout(SproutState {
                name: sprout.record.as_ref().map(|record| record.name.clone()),
                path: sprout.path.clone(),
                limit: sprout.limit,
                reserved: sprout.reserved,
                thin: sprout.thin,
            }),
        }
    }
}

/// Resolves the requested image to the digest of its manifest. `NotFound` lists the existing names.
fn resolve(store: &Store, request: &MountRequest) -> Result<Digest> {
    match request.digest {
        Some(digest) => Ok(digest.0),
        // Anyone with write access to the store can set this name; a client that knows the digest
        // sends it.
        None if catalog::is_reserved(&request.image) => {
            let what = format!(
                "this host has checked no image {:?}: mount it by its reference, \
                such as oci://…",
                request.image
            );
            Err(Error::new(ErrorKind::NotFound, what))
        }
        None => catalog::resolve(store, &request.image)?.digest(),
    }
}

/// The record of new named writes on `base`.
fn record(
    base: &Prepared,
    seed_fsid: Fsid,
    name: &str,
    request: &MountRequest,
) -> Result<WritesRecord> {
    let (template_digest, template_len) = known_digest(&base.folder.join("seed"))?;
    let (map_digest, map_len) = known_digest(&base.folder.join("map"))?;
    Ok(WritesRecord {
        format: RECORD_FORMAT,
        name: name.to_owned(),
        image: request.image.clone(),
        manifest: base.digest.into(),
        store: request.store.clone(),
        seed_fsid,
        template_digest: template_digest.into(),
        template_len,
        map_digest: map_digest.into(),
        map_len,
        device: None,
        limit: 0,
        thin: false,
        sprouted: false,
        sprout_fsid: None,
        virtual_bytes: request.virtual_bytes,
    })
}

/// Refuses a mount of existing writes on another image, or with another virtual area.
fn refuse_misfit(request: &MountRequest, record: &WritesRecord) -> Result<()> {
    let is_same = request.digest.is_some_and(|digest| digest.0 == record.manifest.0);
    if !is_same && image_of(&record.image) != image_of(&request.image) {
        return Err(Error::new(
            ErrorKind::Invalid,
            format!(
                "the writes {:?} were made on the image {:?}, not on {:?}: take another name for \
                 them, or mount that image",
                record.name, record.image, request.image
            ),
        ));
    }
    if request.virtual_bytes > 0 && request.virtual_bytes != record.virtual_bytes {
        return Err(Error::new(
            ErrorKind::Invalid,
            format!(
                "the writes {:?} were made with a virtual area of {} bytes, which cannot be \
                 changed: leave --virtual away, or take another name for them",
                record.name, record.virtual_bytes
            ),
        ));
    }
    Ok(())
}

fn new_sprout(state: &StateDir, wanted: &SproutRequest, path: PathBuf) -> Result<Sprout> {
    let (path, limit, is_device) = match &wanted.device {
        Some(device) => {
            if wanted.limit.is_some() {
                return Err(Error::new(
                    ErrorKind::Invalid,
                    "--write-limit does not apply to --writes-device, which has its own size: \
                     leave it out",
                ));
            }
            let device = fs::canonicalize(device)
                .map_err(|e| Error::io(format!("cannot use {}", device.display()), e))?;
            let size = space::device_size(&device)?;
            writes::refuse_device_in_use(state, &device)?;
            (device, size, true)
        }
        None => (path, space::limit(state.root(), wanted.limit)?, false),
    };
    Ok(Sprout {
        path,
        is_device,
        limit,
        thin: wanted.thin && !is_device,
        reserved: if is_device { limit } else { 0 },
        is_new: true,
        record: None,
    })
}

/// Strips a name to the image that it stands for. An OCI image has several names, because it can be
/// indexed as a whole, by an index or by tables of contents; writes continue on their original one.
fn image_of(name: &str) -> &str {
    ReservedName::oci(name).map_or(name, |name| name.digest)
}

#[cfg(test)]
mod tests;
