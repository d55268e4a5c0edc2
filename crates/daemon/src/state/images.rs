//! Images that are mapped into a virtual area, and the files needed to read them as long as the
//! area exists.
//!
//! ```text
//!   area/images/<digest>/   image.json   which store has the chunks: a root of collections
//!                           map          address ──► chunk, block checksums, as of a mounted image
//! ```
//!
//! Invariants: `image.json` is durable before the store is asked to keep the manifest, and the map
//! before an address of the image is assigned; nothing here is removed before the area. So an image
//! stays readable after its name and `images/<digest>/` are gone.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use burgeon_block::{Digest, Error, ErrorKind, Result};
use burgeon_image::ExtentMap;
use burgeon_source::{Access, Location};
use serde::{Deserialize, Serialize};

use crate::{
    id::MountId,
    state::{
        access,
        files::{self, Lock},
        paths::StateDir,
    },
};

/// The version of [`MappedImageRecord`] that this program writes and reads.
const FORMAT: u32 = 1;

/// Images of one area. The server keeps two descriptors open for each one that is read, and has
/// 1024 by default.
const IMAGES_MAX: usize = 256;

/// Contents of `image.json`.
#[derive(Serialize, Deserialize)]
struct MappedImageRecord {
    format: u32,
    /// The store with the chunks; `None` is the state directory's own.
    store: Option<Location>,
}

/// A mapped image.
pub(crate) struct Image {
    pub(crate) digest: Digest,
    /// The store with its chunks.
    pub(crate) store: Location,
    /// Its address map.
    pub(crate) map: PathBuf,
}

fn folder(area: &Path) -> PathBuf {
    area.join("images")
}

/// The folder of an image that is being mapped.
pub(crate) struct Added {
    pub(crate) folder: PathBuf,
    /// The store with the image's chunks.
    pub(crate) store: Location,
    /// Two clients may map one image concurrently.
    _lock: Lock,
}

/// Records durably that the image `digest` of `store` is mapped into `area`. The caller then makes
/// its address map.
pub(crate) fn add(
    state: &StateDir,
    area: &Path,
    store: Option<&Location>,
    digest: &Digest,
) -> Result<Added> {
    let all = folder(area);
    let own = all.join(digest.to_string());
    files::make_folder(&all)?;
    let lock = Lock::take(&all.join("lock"))?;
    if !own.exists() && list(state, area)?.len() >= IMAGES_MAX {
        let message = format!("more than {IMAGES_MAX} images cannot be mapped into one mount");
        return Err(Error::new(ErrorKind::NoSpace, message));
    }
    files::make_folder(&own)?;
    files::sync_parent(&all)?;
    files::sync_parent(&own)?;
    let record = MappedImageRecord { format: FORMAT, store: store.cloned() };
    files::publish_json(&own.join("image.json"), &record)?;
    Ok(Added { folder: own, store: location(state, record.store), _lock: lock })
}

/// The image `digest` of `area`.
pub(crate) fn find(state: &StateDir, area: &Path, digest: &Digest) -> Result<Image> {
    let own = folder(area).join(digest.to_string());
    let path = own.join("image.json");
    let record: MappedImageRecord = files::read_json(&path)?;
    if record.format != FORMAT {
        let message = format!("{} has the unknown format {}", path.display(), record.format);
        return Err(Error::new(ErrorKind::UnsupportedFormat, message));
    }
    Ok(Image { digest: *digest, store: location(state, record.store), map: own.join("map") })
}

/// All images of `area`. An error if the needs of one of them cannot be determined.
pub(crate) fn list(state: &StateDir, area: &Path) -> Result<Vec<Image>> {
    let all = folder(area);
    let entries = match fs::read_dir(&all) {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries.map_err(|e| Error::io(format!("cannot list {}", all.display()), e))?,
    };
    let mut images = Vec::new();
    for entry in entries.flatten() {
        let name = entry.file_name();
        let Some(digest) = name.to_str().and_then(|name| name.parse().ok()) else { continue };
        match find(state, area, &digest) {
            // Its folder is being made or removed, and nothing relies on it.
            Err(e) if e.kind() == ErrorKind::NotFound => {}
            image => images.push(image?),
        }
    }
    Ok(images)
}

/// The images mapped into any area of this state directory: running mounts and kept writes, also
/// those without their record. An image named by a map counts, whatever other files are there.
pub(crate) fn all(state: &StateDir) -> Result<Vec<Image>> {
    let mut images = Vec::new();
    for folder in [state.mounts(), state.writes()] {
        let owners = fs::read_dir(&folder)
            .map_err(|e| Error::io(format!("cannot list {}", folder.display()), e))?;
        for owner in owners.flatten() {
            let area = owner.path().join(AREA);
            match fs::metadata(&area) {
                Ok(_) => {}
                Err(e)
                    if matches!(
                        e.kind(),
                        io::ErrorKind::NotFound | io::ErrorKind::NotADirectory
                    ) =>
                {
                    continue;
                }
                Err(e) => return Err(Error::io(format!("cannot look at {}", area.display()), e)),
            }
            let known = list(state, &area)?;
            let mapped = match ExtentMap::open(&area) {
                // It is being made, or was lost and may be restored: the images kept with it count.
                Err(e) if e.kind() == ErrorKind::NotFound => Vec::new(),
                map => map?.images()?,
            };
            let lost = mapped.iter().filter(|digest| known.iter().all(|i| i.digest != **digest));
            images.extend(lost.map(|digest| Image {
                digest: *digest,
                store: location(state, None),
                map: PathBuf::new(),
            }));
            images.extend(known);
        }
    }
    Ok(images)
}

/// The folder of a virtual area's map, next to the sprout, whose files refer to it.
pub(crate) const AREA: &str = "area";

fn location(state: &StateDir, store: Option<Location>) -> Location {
    store.unwrap_or_else(|| state.store().into())
}

/// Gives the server of mount `id` access to the stores of the images that are mapped into `area`.
pub(crate) fn keep_access(
    state: &StateDir,
    id: MountId,
    area: &Path,
    access: &Access,
) -> Result<()> {
    for image in list(state, area)? {
        access::add(&state.mount(id), &image.store, access)?;
    }
    Ok(())
}
