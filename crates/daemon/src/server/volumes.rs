//! The data sources of a mount's reads: the volume of its image, its virtual area, and the volumes
//! of the images that are mapped there.
//!
//! ```text
//!   LazyDevice of a mount ─┬─► volume of its image ◄── other mounts, areas
//!                          └─► VirtualArea ─► volume of a mapped image ◄── other mounts, areas
//! ```
//!
//! Invariant: one volume for all users of the same map and store with the same credentials. All
//! volumes share the host's cache.

use std::{
    collections::HashMap,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, Weak},
};

use burgeon_block::{BLOCK_SIZE, Digest, Error, ErrorKind, ObjectId, ObjectKind, Result};
use burgeon_btrfs::{DeviceNo, Identity, superblock, superblock_offsets};
use burgeon_cache::ChunkOwner;
use burgeon_frontend::Slots;
use burgeon_image::AddressMap;
use burgeon_source::{Access, Location, Objects, References, Store};
use burgeon_volume::{
    ChecksumFile, LazyDevice, RECORDED_CHECKSUM_LEN, VirtualArea, Volume, VolumeLimits,
};

use super::{Serving, SharedCounters, lock};
use crate::{
    id::MountId,
    ipc::link::Warm,
    state::{
        access,
        checksums::{CHECKSUMS, ChecksumPath},
        images,
        prepared::read_info,
        record::Attach,
    },
};

pub(super) type ImageVolume = Volume<Objects, ChecksumFile>;
pub(super) type Area = VirtualArea<Objects, ChecksumFile>;
pub(super) type Device = LazyDevice<Objects, ChecksumFile, SharedCounters>;

/// The location of an image's data and the parameters of its use.
#[derive(Clone, PartialEq, Eq, Hash)]
pub(super) struct Origin {
    /// The file that was the image's own cache in earlier versions; it lies beside the map.
    cache: PathBuf,
    store: Location,
    access: Access,
}

impl Origin {
    /// Of the mounted image.
    pub(super) fn of(attach: &Attach, access: &Access) -> Self {
        let Attach { cache, store, .. } = attach;
        Self { cache: cache.clone(), store: store.clone(), access: access.for_location(store) }
    }

    /// Of an image that is not mounted yet.
    pub(super) fn of_warm(warm: &Warm, access: &Access) -> Self {
        let Warm { cache, store, .. } = warm;
        Self { cache: cache.clone(), store: store.clone(), access: access.for_location(store) }
    }
}

impl Origin {
    /// The owner of its chunks in the cache: the folder of a prepared image is named by its digest.
    pub(super) fn owner(&self) -> ChunkOwner {
        let folder = self.cache.parent().and_then(Path::file_name).unwrap_or_default();
        ChunkOwner { image: folder.to_string_lossy().into_owned(), store: self.store.to_string() }
    }
}

/// Every volume that is open, or being opened. Each origin is opened by one thread at a time, and
/// never waits for the opening of another.
#[derive(Default)]
pub(super) struct Openings(Mutex<HashMap<Origin, Arc<Opening>>>);

/// Locked while the volume is opened.
type Opening = Mutex<Weak<ImageVolume>>;

impl Openings {
    fn of(&self, origin: &Origin) -> Arc<Opening> {
        Arc::clone(lock(&self.0).entry(origin.clone()).or_default())
    }

    /// The open volumes of the image in `folder`, one for each store and domain of trust.
    pub(super) fn of_image(&self, folder: &Path) -> Vec<Arc<ImageVolume>> {
        let of_image = |(origin, opening): (&Origin, &Arc<Opening>)| {
            (origin.cache.parent() == Some(folder)).then(|| Arc::clone(opening))
        };
        // An entry may be locked until a store answers: not with the lock of all.
        let openings: Vec<_> = lock(&self.0).iter().filter_map(of_image).collect();
        openings.iter().filter_map(|opening| lock(opening).upgrade()).collect()
    }

    /// The open volumes, without those that are being opened.
    pub(super) fn open_now(&self) -> Vec<(Origin, Arc<ImageVolume>)> {
        let openings = lock(&self.0);
        let open = openings.iter().filter_map(|(origin, opening)| {
            let volume = opening.try_lock().ok()?.upgrade()?;
            Some((origin.clone(), volume))
        });
        open.collect()
    }

    /// Drops the volumes without users.
    pub(super) fn sweep(&self) {
        // An entry held by another thread is being opened; the other locks are free.
        let in_use = |opening: &Arc<Opening>| {
            Arc::strong_count(opening) > 1 || lock(opening).strong_count() > 0
        };
        lock(&self.0).retain(|_, opening| in_use(opening));
    }
}

impl Serving {
    /// Returns the volume of the image whose address map is the file `map`.
    pub(super) fn volume(
        &self,
        origin: Origin,
        map: &Path,
        references: References,
    ) -> Result<Arc<ImageVolume>> {
        let opening = self.volumes.of(&origin);
        let mut opened = lock(&opening);
        if let Some(volume) = opened.upgrade() {
            return Ok(volume);
        }
        let map = AddressMap::open(map)?;
        let reference = map.objects().iter().find(|object| object.is_outside_store());
        if let (References::Refuse, Some(object)) = (references, reference) {
            return Err(refused_reference(object));
        }
        let store = Store::open(&origin.store, &origin.access)?;
        let owner = origin.owner();
        let cache = self.cache_for(&map, &store, (&origin.store, &origin.access), &owner);
        let objects = Objects::new(store, references).with_access(&origin.access);
        let _runtime = self.runtime.enter();
        let image = owner.image.as_str().into();
        let (map, limits) = (Arc::new(map), VolumeLimits { image, ..self.limits.clone() });
        let volume = match map.lacks_checksums() {
            false => Volume::new(map, objects, cache, limits),
            true => {
                let len = map.data_range().len() / BLOCK_SIZE * RECORDED_CHECKSUM_LEN;
                let checksums = self.checksums(&origin.cache.with_file_name(CHECKSUMS), len)?;
                Volume::without_checksums(map, objects, cache, checksums, limits)
            }
        };
        *opened = Arc::downgrade(&volume);
        self.claim_if_limited(owner, &volume);
        Ok(volume)
    }

    /// The file of recorded checksums at `path`, of `len` bytes. The opener opens it, because this
    /// process may not write to its folder.
    fn checksums(&self, path: &Path, len: u64) -> Result<ChecksumFile> {
        let below = path.strip_prefix(self.state.root()).ok().and_then(ChecksumPath::new);
        let below = below.ok_or_else(|| {
            let what = format!("{} is not a file of recorded checksums", path.display());
            Error::new(ErrorKind::Invalid, what)
        })?;
        let file = self.runtime.block_on(self.opener.open_checksums(&below));
        let file = file.map_err(|e| Error::io(format!("cannot open {}", path.display()), e))?;
        ChecksumFile::over(file, path, len)
    }

    /// The block device that the kernel sees: this mount's superblocks over the shared volume, and
    /// its virtual area.
    pub(super) fn lazy_device(
        self: &Arc<Self>,
        attach: &Attach,
        access: &Access,
        volume: &Arc<ImageVolume>,
        slots: &Arc<Slots>,
    ) -> Result<Device> {
        let info = read_info(&attach.seed)?;
        let identity = Identity { fsid: attach.fsid.0 };
        let mut superblocks = Vec::new();
        for (mirror, offset) in superblock_offsets(&info, DeviceNo::Data).iter().enumerate() {
            if let Some(block) = superblock(&info, &identity, DeviceNo::Data, mirror) {
                const { assert!(burgeon_btrfs::SUPERBLOCK_SIZE as u64 == BLOCK_SIZE) };
                superblocks.push((*offset, Box::new(block)));
            }
        }
        let counters = SharedCounters(Arc::clone(slots));
        let mut device =
            LazyDevice::new(Arc::clone(volume), counters, info.data_device_size(), superblocks)?
                .named(attach.id.to_string());
        if let (Some(folder), Some(range)) = (&attach.area, info.virtual_area) {
            let area = self.area(attach, access, folder, range.len())?;
            device = device.with_area(range.start(), area)?;
        }
        Ok(match attach.fetch_limit {
            Some(bytes) => {
                volume.stop_reading_ahead();
                device.with_fetch_limit(bytes)
            }
            None => device,
        })
    }

    /// Opens the virtual area of a mount, of `size` bytes. A user of this host has mapped its
    /// contents, so files of the host are trusted.
    fn area(
        self: &Arc<Self>,
        attach: &Attach,
        access: &Access,
        folder: &Path,
        size: u64,
    ) -> Result<Arc<Area>> {
        let access = access.for_location(&attach.store);
        let objects = Objects::new(Store::open(&attach.store, &access)?, References::Allow);
        let (serving, id, area) = (Arc::downgrade(self), attach.id, folder.to_owned());
        let open = move |digest: &Digest| match serving.upgrade() {
            Some(serving) => serving.mapped_image(id, &area, digest),
            None => Err(ending()),
        };
        let (serving, path) = (Arc::downgrade(self), folder.join(CHECKSUMS));
        let checksums = move |len| match serving.upgrade() {
            Some(serving) => serving.checksums(&path, len),
            None => Err(ending()),
        };
        let (open, checksums, limits) = (Box::new(open), Box::new(checksums), self.limits.clone());
        let area = VirtualArea::open(folder, size, objects, open, checksums, limits);
        if let Some(problem) = area.status().problem {
            tracing::error!(mount = %id, error = %problem, "cannot serve content that is mapped into the mount");
        }
        Ok(area)
    }

    /// Returns the volume of an image that is mapped into `area` of mount `id`.
    fn mapped_image(&self, id: MountId, area: &Path, digest: &Digest) -> Result<Arc<ImageVolume>> {
        let image = images::find(&self.state, area, digest)?;
        let folder = self.state.image(digest);
        // Read now: since the mount, images with further credentials may have been mapped.
        let access = access::kept(&self.state.mount(id))?.for_location(&image.store);
        let own = image.store.folder() == Some(&*self.state.store());
        let references = if own { References::Allow } else { References::Refuse };
        let origin = Origin { cache: folder.join("cache"), store: image.store, access };
        let volume = self.volume(origin, &image.map, references)?;
        let limit = lock(&self.mounts).get(&id).and_then(|mount| mount.attach.fetch_limit);
        if limit.is_some() {
            volume.stop_reading_ahead();
        }
        Ok(volume)
    }
}

fn ending() -> Error {
    Error::new(ErrorKind::Unavailable, "the server is ending")
}

/// An image that names files of this host, or layers elsewhere, is trusted only if this host's own
/// store has it.
fn refused_reference(object: &ObjectId) -> Error {
    let Some(file) = object.below(ObjectKind::File) else {
        let what = "the image's data is in the layers of an OCI image, to which only an image in \
                    the state directory's own store may refer: mount the OCI image";
        return Error::new(ErrorKind::Invalid, what);
    };
    Error::new(
        ErrorKind::Invalid,
        format!(
            "the image refers to the local /{file}, which only an image in the state directory's own \
             store may do: build it there, or build it without --by-reference"
        ),
    )
}
