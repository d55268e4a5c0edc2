//! The place of an OCI image's layers, on this host.

use std::{
    fs::File,
    io::{self, Read},
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    sync::{
        OnceLock,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
};

use burgeon_block::{ByteRange, Error, ErrorKind, ObjectId, ObjectKind, Result};
use bytes::Bytes;

use crate::{
    Access, Directory, Form,
    opening::{Manner, with_opened},
    registry::{Name, OciDigest, Registry},
};

/// Longest origin, in bytes.
pub(super) const ORIGIN_MAX: u64 = 8 << 10;

/// A failed read of a stored layer was told: on a bad disk, each one would be an event.
static TOLD: AtomicBool = AtomicBool::new(false);

/// Longest list of an image's stored layers, in bytes.
const LIST_MAX: u64 = 64 << 10;

/// A place that has layers, named by their digests.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum LayersAt {
    /// The absolute path of a folder in the OCI image layout.
    Layout(PathBuf),
    /// A repository; the image in the name does not matter.
    Registry(Name),
}

/// An opened [`LayersAt`], and the store with layers on this host.
pub(super) struct Blobs {
    stored: Option<StoredLayers>,
    place: BlobOrigin,
}

/// The layers of one image in the host's own store: those that its list names, and no others,
/// because the list was made when the image's own place had given them.
struct StoredLayers {
    directory: Directory,
    list: ObjectId,
    /// Known once the list is there: an image may be stored while it is mounted.
    objects: OnceLock<Vec<ObjectId>>,
}

impl StoredLayers {
    /// The object of the layer `number`, if the image has a list.
    async fn object(&self, number: u32) -> Result<Option<ObjectId>> {
        if self.objects.get().is_none() {
            let path = self.directory.path_of(&self.list);
            let read = |_: &Path, opened: io::Result<File>| Ok(opened.and_then(read_list).ok());
            let Some(objects) = with_opened(path, Manner::Stored, read).await? else {
                return Ok(None);
            };
            self.objects.get_or_init(|| objects);
        }
        Ok(self.objects.get().and_then(|objects| objects.get(number as usize)).cloned())
    }
}

fn read_list(file: File) -> io::Result<Vec<ObjectId>> {
    let mut text = String::new();
    file.take(LIST_MAX).read_to_string(&mut text)?;
    let objects: Result<Vec<_>> = text.lines().map(ObjectId::new).collect();
    let are_layers = |objects: &Vec<ObjectId>| objects.iter().all(|it| it.is(ObjectKind::Layer));
    objects.ok().filter(are_layers).ok_or_else(|| io::ErrorKind::InvalidData.into())
}

enum BlobOrigin {
    Layout(PathBuf),
    Registry(Registry),
}

/// The object of a stored layer: its name is the SHA-256 of the place that it came from and of the
/// layer's digest. So an image from elsewhere that only names the digest does not get its bytes.
pub fn layer_object(place: &str, digest: &[u8; 32]) -> Result<ObjectId> {
    let named = OciDigest::of(format!("burgeon-layer\0{place}\0{}", hex(digest)).as_bytes());
    ObjectKind::Layer.object(hex(&named.bytes()))
}

pub(super) fn hex(digest: &[u8; 32]) -> String {
    digest.iter().map(|byte| format!("{byte:02x}")).collect()
}

impl LayersAt {
    /// Parses the text of [`Self::to_text`].
    pub fn parse(text: &str) -> Result<Self> {
        let text = text.trim_end();
        match (Form::of(text), Name::parse(text)) {
            (Form::Layout(folder), _) if folder.starts_with('/') => Ok(Self::Layout(folder.into())),
            (Form::Registry, Some(name)) => name.map(Self::Registry),
            _ => {
                let what = "the record of the layers' location is damaged in the store: mount \
                    the image by its oci://… or oci-layout:… name";
                Err(Error::new(ErrorKind::Corrupt, what))
            }
        }
    }

    /// One line of text; `Invalid` for a folder whose name is not UTF-8.
    pub fn to_text(&self) -> Result<String> {
        let folder = match self {
            Self::Registry(name) => return Ok(format!("{name}\n")),
            Self::Layout(folder) => folder,
        };
        match folder.to_str() {
            Some(folder) if !folder.contains('\n') => Ok(format!("oci-layout:{folder}\n")),
            _ => Err(Error::new(
                ErrorKind::Invalid,
                format!(
                    "the path {} is not UTF-8 or has a line break: rename the folder",
                    folder.display()
                ),
            )),
        }
    }
}

impl Blobs {
    /// Opens the layers at `at` with the credentials in `access`, and those that the list `list` in
    /// `stored` names. Sends nothing.
    pub(super) fn open(
        at: LayersAt,
        access: &Access,
        (stored, list): (Option<Directory>, ObjectId),
    ) -> Result<Self> {
        let objects = OnceLock::new();
        let stored = stored.map(|directory| StoredLayers { directory, list, objects });
        let place = match at {
            LayersAt::Layout(folder) => BlobOrigin::Layout(folder),
            LayersAt::Registry(name) => BlobOrigin::Registry(Registry::open(&name, access)?),
        };
        Ok(Self { stored, place })
    }

    /// Bytes of the image's layer `number` that is stored; `None` if it is not, or no longer.
    pub(super) async fn stored(&self, number: u32, range: ByteRange) -> Result<Option<Bytes>> {
        let Some(stored) = &self.stored else { return Ok(None) };
        let Some(object) = stored.object(number).await? else { return Ok(None) };
        let path = stored.directory.path_of(&object);
        let failed = move |path: &Path, error: &io::Error| {
            let path = path.display();
            match TOLD.swap(true, Relaxed) {
                false => tracing::warn!(%path, %range, %error, "stored layers are fetched again"),
                true => tracing::debug!(%path, %range, %error, "a stored layer is fetched again"),
            }
        };
        let read = move |path: &Path, opened| {
            let bytes = read(opened, range).inspect_err(|error| match error.kind() {
                io::ErrorKind::NotFound => {}
                _ => failed(path, error),
            });
            Ok(bytes.ok())
        };
        with_opened(path, Manner::Stored, read).await
    }

    /// Bytes of the layer with this SHA-256, from its origin.
    pub(super) async fn read(&self, digest: &[u8; 32], range: ByteRange) -> Result<Bytes> {
        let folder = match &self.place {
            BlobOrigin::Registry(registry) => {
                return registry
                    .blob_range(&format!("sha256:{}", hex(digest)).parse()?, range)
                    .await;
            }
            BlobOrigin::Layout(folder) => folder,
        };
        let path = folder.join("blobs/sha256").join(hex(digest));
        let read = move |path: &Path, opened| {
            read(opened, range).map_err(|error| {
                let what = format!("cannot read the layer {}", path.display());
                // A missing folder may come back, as disks and shares do.
                Error::with_source(ErrorKind::Unavailable, what, error)
            })
        };
        with_opened(path, Manner::Stored, read).await
    }
}

fn read(opened: io::Result<File>, range: ByteRange) -> io::Result<Bytes> {
    let file = opened?;
    let mut bytes = vec![0; range.len() as usize];
    file.read_exact_at(&mut bytes, range.start())?;
    Ok(bytes.into())
}
