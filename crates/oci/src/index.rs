//! Indexes of ordinary images: what it takes to read them lazily, in the layers as they are.
//!
//! ```text
//!   index:  layers, read once ──► manifest of ours ──► data in derived/<digest> ──► table: where in
//!                                                                                   which layer
//!   push:   both as an artifact ──► beside the image, its subject
//!   mount:  artifact, by the digest that was pinned ──► checked ──► store
//! ```
//!
//! Invariants: of an index that was made elsewhere nothing is believed but by the digest that the
//! user has given; it is used for the very image, and the very layers, that it was made of.

use std::{collections::HashSet, thread};

use burgeon_block::{Error, ErrorKind, ObjectId, ObjectKind, ObjectStore, Result};
use burgeon_image::{
    Limits, Manifest,
    builder::{self, Origin, Report},
    catalog::{self, ImageRecord},
};
use burgeon_layer::{Stretch, TABLE_MAX, Table, TableLayer};
use burgeon_source::{
    Directory, LayersAt, derived_object, held_object, layer_object, origin_object,
    registry::{Digest, EMPTY, EMPTY_TYPE, MANIFEST_TYPE},
};
use bytes::Bytes;
use serde::{Deserialize, Serialize};
use serde_json::json;

use crate::{
    Source, Work,
    beside::{self, Artifact, Shelf},
    document::{Descriptor, IndexArtifact},
    image::{Blobs, Keep, Resolved, Tables},
    source::{Kind, Wanted},
};

/// What an index is, and its parts: a manifest and a table of ours.
const ARTIFACT: &str = "application/vnd.burgeon.index.v1";
const MANIFEST: &str = "application/vnd.burgeon.manifest.v1";
const TABLE: &str = "application/vnd.burgeon.derived.v1";
/// Longest manifest of an index: 512 MiB, 100 bytes for each of four million entries and
/// as much for checksums of data.
const MANIFEST_MAX: u64 = 512 << 20;

/// An index.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Indexed {
    /// Its digest, to pin it by.
    pub digest: String,
    /// The digest of the image that it is of.
    pub image: String,
    /// The image that it makes, in the store.
    pub record: ImageRecord,
    /// Bytes of it.
    pub bytes: u64,
    /// Bytes of the image's layers, as they are stored.
    pub image_bytes: u64,
    /// Whether it lies beside the image now.
    pub pushed: bool,
}

/// The name that the index of the image `digest` has in a store.
pub(crate) fn name_of(digest: &str) -> String {
    format!("{digest}/index")
}

/// The name of the image `digest` in a store, where it is known by tables of contents.
pub(crate) fn listed_name_of(digest: &str) -> String {
    format!("{digest}/contents")
}

/// Makes the index of the image of `source` in `store`, unless it is there; with `push` puts it
/// beside the image.
///
/// Errors: `Invalid` for images of which no index is of use.
pub fn index(
    store: &impl ObjectStore,
    source: &Source,
    push: bool,
    work: &Work<'_>,
) -> Result<Indexed> {
    let (Some(at), Some((blobs, wanted))) = (source.layers_at()?, source.blobs(work.access)?)
    else {
        return Err(none_has());
    };
    let shelf = push.then(|| Shelf::open(source, work.access)).transpose()?;
    let resolved = blobs.resolve(&wanted)?;
    let name = name_of(&resolved.digest.to_string());
    let image = match work.vouched(store, &name) {
        Some(image) => image,
        None => {
            let whole = work.vouched(store, &resolved.digest.to_string());
            let derived = |image: &ImageRecord| matches!(derived_of(store, image), Ok(Some(_)));
            let image = match whole.filter(derived) {
                Some(whole) => catalog::publish_alias(store, &whole, &name)?,
                None => {
                    let names = Names { name: &name, listed: None };
                    make(store, &blobs, &resolved, (&names, &at), work, None)??.image
                }
            };
            work.vouch(&image)?;
            image
        }
    };
    refresh(store, &image, &at)?;
    let (document, parts) = artifact(store, &image, &resolved)?;
    if let Some(shelf) = shelf {
        let artifact = Artifact { kind: ARTIFACT, document: &document, blobs: &parts };
        shelf.put(&blobs, &resolved.digest, &artifact)?;
    }
    Ok(Indexed {
        digest: Digest::of(&document).to_string(),
        image: resolved.digest.to_string(),
        record: image,
        bytes: parts.iter().map(|part| part.len() as u64).sum(),
        image_bytes: resolved.manifest.layers.iter().map(|layer| layer.size).sum(),
        pushed: push,
    })
}

/// What an image is to be called in a store.
struct Names<'a> {
    name: &'a str,
    /// If tables of contents were used, which they are only where there is a name for it.
    listed: Option<(&'a str, &'a Tables)>,
}

/// Publishes the index of the image by its name, and its layers with it if there is somewhere to `keep`
/// them. The inner error is of layers that cannot be read from the middle.
fn make(
    store: &impl ObjectStore,
    blobs: &Blobs,
    resolved: &Resolved,
    (names, at): (&Names<'_>, &LayersAt),
    work: &Work<'_>,
    keep: Option<&Keep<'_>>,
) -> Result<Result<Report>> {
    let tables = names.listed.map(|(_, tables)| tables);
    let (descriptions, restarts) = blobs.describe(resolved, work, keep, tables)?;
    let restarts = match restarts.into_iter().collect::<Result<Vec<_>>>() {
        Ok(restarts) => restarts,
        Err(error) => return Ok(Err(error)),
    };
    let layers = || resolved.manifest.layers.iter();
    let object = |origins: &[Origin], object_len: u64| {
        let table = Table {
            image: resolved.digest.bytes(),
            object_len,
            layers: layers()
                .zip(&restarts)
                .map(|(layer, restarts)| TableLayer {
                    digest: layer.digest.bytes(),
                    restarts: restarts.clone(),
                })
                .collect(),
            stretches: stretches(origins),
        };
        let object = publish_table(store, &table.encode()?, at)?;
        // Of an image all of whose layers have tables none is held.
        if keep.is_some() && tables.is_none_or(|tables| tables.used() < restarts.len()) {
            let mut list = String::new();
            for layer in layers() {
                list.extend([layer_object(&layer.digest.bytes())?.as_str(), "\n"]);
            }
            store.publish(&held_object(&object)?, list.as_bytes())?;
        }
        Ok(object)
    };
    let name = match names.listed {
        Some((listed, tables)) if tables.is_used() => listed,
        _ => names.name,
    };
    let described = builder::describe_layers(store, name, descriptions, work.options, &object);
    if let (Err(error), Some(tables)) = (&described, tables)
        && tables.is_used()
        && matches!(error.kind(), ErrorKind::Corrupt | ErrorKind::Invalid)
    {
        tables.unfit(&resolved.digest, error);
    }
    described.map(Ok)
}

/// Takes the image into this host's `own` store by an index that is made while its layers come, and
/// holds these: it needs nobody else then. With `tables`, layers that have a table of contents stay where
/// they are. Returns what was made, or `None` for an image whose layers cannot be read from the middle;
/// they are here now, to build it of.
pub(crate) fn hold(
    own: &Directory,
    blobs: &Blobs,
    resolved: &Resolved,
    at: &LayersAt,
    work: &Work<'_>,
    tables: Option<&Tables>,
) -> Result<Option<Report>> {
    let lease = own.begin_write()?;
    let name = resolved.digest.to_string();
    let listed = listed_name_of(&name);
    let names = Names { name: &name, listed: tables.map(|tables| (listed.as_str(), tables)) };
    let keep = Keep { own, scratch: lease.scratch() };
    let made = make(own, blobs, resolved, (&names, at), work, Some(&keep)).inspect_err(|error| {
        // What has come of an image whose registry went away is not fetched again.
        if error.kind() != ErrorKind::Unavailable {
            release(own, resolved);
        }
    });
    match made? {
        Ok(report) => {
            if derived_of(own, &report.image)?.is_none() {
                release(own, resolved);
            }
            Ok(Some(report))
        }
        Err(error) if error.kind() == ErrorKind::Invalid => Ok(None),
        Err(error) => Err(error),
    }
}

/// Removes the layers of the image from `own` that no image there is read from; `gc` does where this
/// fails.
pub(crate) fn release(own: &Directory, resolved: &Resolved) {
    let remove = || -> Result<()> {
        let mut needed = HashSet::new();
        for list in own.list("held")? {
            needed.extend(catalog::held_layers(own, &list)?);
        }
        for layer in &resolved.manifest.layers {
            let object = layer_object(&layer.digest.bytes())?;
            if !needed.contains(&object) {
                own.remove(&object)?;
            }
        }
        Ok(())
    };
    let _ = remove();
}

/// Joins what lies together.
fn stretches(origins: &[Origin]) -> Vec<Stretch> {
    let mut stretches: Vec<Stretch> = Vec::with_capacity(origins.len());
    for Origin { at, layer, offset, len } in origins.iter().copied() {
        if let Some(last) = stretches.last_mut()
            && (last.layer, last.at + u64::from(last.len)) == (layer, at)
            && last.offset + u64::from(last.len) == offset
            && let Some(sum) = last.len.checked_add(len)
        {
            last.len = sum;
        } else {
            stretches.push(Stretch { at, offset, len, layer });
        }
    }
    stretches
}

fn publish_table(store: &impl ObjectStore, table: &[u8], at: &LayersAt) -> Result<ObjectId> {
    let object = derived_object(table)?;
    store.publish(&object, table)?;
    store.publish(&origin_object(&object)?, at.to_text()?.as_bytes())?;
    Ok(object)
}

/// The derived object that `image` has its data in, if it has.
fn derived_of(store: &impl ObjectStore, image: &ImageRecord) -> Result<Option<ObjectId>> {
    derived_in(store, &image.digest()?)
}

fn derived_in(
    store: &impl ObjectStore,
    manifest: &burgeon_block::Digest,
) -> Result<Option<ObjectId>> {
    let bytes = catalog::load_bytes(store, manifest)?;
    let objects = Manifest::decode_objects(&bytes, &Limits::default())?;
    Ok(objects.into_iter().find(|object| object.is(ObjectKind::Derived)))
}

/// Whether all of `image` is in `store`, the host's own: not in layers elsewhere.
pub fn is_whole(store: &impl ObjectStore, image: &ImageRecord) -> Result<bool> {
    match derived_of(store, image)? {
        Some(object) => all_held(store, &held_object(&object)?),
        None => Ok(true),
    }
}

/// Bytes on the disk of `store` that `image` takes up, as far as nothing shares them: its chunks and
/// manifest; of one that is read from layers, those that are held, and the table of what is where in
/// them. What is computed, or read from files in place, takes none.
pub fn stored_bytes(store: &impl ObjectStore, image: &ImageRecord) -> Result<u64> {
    let own = image.stored_bytes + image.manifest_bytes;
    // Only of these it is not known what they take up; the manifest of any other need not be read.
    if image.stored_bytes > 0 || image.data_bytes == 0 || store.list("derived")?.is_empty() {
        return Ok(own);
    }
    let Ok(Some(object)) = derived_of(store, image) else { return Ok(own) };
    let list = held_object(&object)?;
    let mut bytes = own + store.len(&object)?.unwrap_or(0);
    if store.len(&list)?.is_some() {
        let layers: HashSet<ObjectId> = catalog::held_layers(store, &list)?.into_iter().collect();
        for layer in layers {
            bytes += store.len(&layer)?.unwrap_or(0);
        }
    }
    Ok(bytes)
}

/// Whether the image of a source, by any of its names in `store`, is known by tables of contents.
pub(crate) fn is_listed(store: &impl ObjectStore, image: &ImageRecord) -> Result<bool> {
    match image.name.split_once('/') {
        None | Some((_, "index")) => return Ok(false),
        Some((_, "contents")) => return Ok(true),
        // Of an index of platforms: whatever was known of the image when it got that name.
        Some(_) => {}
    }
    let bytes = catalog::load_bytes(store, &image.digest()?)?;
    Manifest::decode_lacks_checksums(&bytes, &Limits::default())
}

/// Bytes of the data of the image with the manifest `digest` that lie in `store`, the host's own, in
/// layers that are held: reading them fetches nothing. Zero of an image that is not read from layers.
pub fn held_bytes(store: &impl ObjectStore, digest: &burgeon_block::Digest) -> Result<u64> {
    let Some(object) = derived_in(store, digest)? else { return Ok(0) };
    let list = held_object(&object)?;
    if store.len(&list)?.is_none() {
        return Ok(0);
    }
    let table = Table::decode(&store.get(&object, TABLE_MAX)?)?;
    let is_held = |layer: &TableLayer| Ok(store.len(&layer_object(&layer.digest)?)?.is_some());
    let held = table.layers.iter().map(is_held).collect::<Result<Vec<bool>>>()?;
    if held.iter().all(|held| *held) {
        // The zeros between stretches come from nowhere.
        return Ok(table.object_len);
    }
    let stretches = table.stretches.iter().filter(|it| held.get(it.layer as usize) == Some(&true));
    Ok(stretches.map(|stretch| u64::from(stretch.len)).sum())
}

/// Whether all layers of the list are there, and there is one.
fn all_held(store: &impl ObjectStore, list: &ObjectId) -> Result<bool> {
    if store.len(list)?.is_none() {
        return Ok(false);
    }
    for layer in catalog::held_layers(store, list)? {
        if store.len(&layer)?.is_none() {
            return Ok(false);
        }
    }
    Ok(true)
}

/// From now on the layers of `image` are read `at`, if that has its data in layers: tells whether it
/// has.
pub(crate) fn refresh(
    store: &impl ObjectStore,
    image: &ImageRecord,
    at: &LayersAt,
) -> Result<bool> {
    if store.list("origins")?.is_empty() {
        return Ok(false);
    }
    let Some(object) = derived_of(store, image)? else { return Ok(false) };
    let (origin, text) = (origin_object(&object)?, at.to_text()?);
    let known = store.get(&origin, TABLE_MAX);
    if !known.is_ok_and(|known| known == text.as_bytes()) {
        let _lease = store.begin_write()?;
        store.publish(&origin, text.as_bytes())?;
    }
    Ok(true)
}

/// The index `image` of `store`, as it is published: its document, and `{}`, manifest, table.
fn artifact(
    store: &impl ObjectStore,
    image: &ImageRecord,
    resolved: &Resolved,
) -> Result<(Vec<u8>, [Bytes; 3])> {
    let manifest = catalog::load_bytes(store, &image.digest()?)?;
    let table = derived_of(store, image)?.ok_or_else(|| {
        let what = "the image has no data to be read lazily: an index is of no use";
        Error::new(ErrorKind::Invalid, what)
    })?;
    let parts = [Bytes::from_static(EMPTY), manifest, store.get(&table, TABLE_MAX)?];
    let part = |kind: &str, bytes: &[u8]| {
        let digest = Digest::of(bytes).to_string();
        json!({ "mediaType": kind, "digest": digest, "size": bytes.len() })
    };
    let document = json!({
        "schemaVersion": 2,
        "mediaType": MANIFEST_TYPE,
        "artifactType": ARTIFACT,
        "config": part(EMPTY_TYPE, &parts[0]),
        "layers": [part(MANIFEST, &parts[1]), part(TABLE, &parts[2])],
        "subject": {
            "mediaType": resolved.media_type, "digest": resolved.digest.to_string(),
            "size": resolved.len,
        },
    });
    Ok((document.to_string().into_bytes(), parts))
}

/// The digests of the indexes that lie beside `image`; none where nobody can say.
pub(crate) fn beside(blobs: &Blobs, image: &Digest) -> Vec<String> {
    beside::find(blobs, image, ARTIFACT).iter().map(Digest::to_string).collect()
}

/// An index that the user believes, by its digest, and what it consists of.
pub(crate) struct Pinned {
    digest: Digest,
    artifact: Result<IndexArtifact>,
}

impl Pinned {
    /// Asks for the index `digest`.
    pub(crate) fn fetch(blobs: &Blobs, digest: Digest) -> Self {
        let document = blobs.document(&Wanted::Digest(digest.clone()));
        let artifact = document.and_then(|(document, _)| IndexArtifact::parse(&document));
        Self { digest, artifact }
    }

    /// Takes the index, which lies beside the image, into `store`.
    ///
    /// Errors: `NotFound` if it is not there, `Corrupt` if it is not what its digest says or of
    /// another image.
    pub(crate) fn adopt(
        self,
        store: &impl ObjectStore,
        blobs: &Blobs,
        resolved: &Resolved,
        at: &LayersAt,
    ) -> Result<ImageRecord> {
        let parts = self.artifact.and_then(|artifact| read_parts(blobs, resolved, artifact));
        let (manifest, table) = parts.map_err(|error| {
            let what = format!("cannot use the index {}", self.digest);
            Error::with_source(error.kind(), what, error)
        })?;
        let _lease = store.begin_write()?;
        publish_table(store, &table, at)?;
        let name = name_of(&resolved.digest.to_string());
        catalog::publish_image(store, &name, &manifest)
    }
}

/// Manifest and table of an index of the image, if it is one.
fn read_parts(
    blobs: &Blobs,
    resolved: &Resolved,
    artifact: IndexArtifact,
) -> Result<(Vec<u8>, Vec<u8>)> {
    let corrupt = |what: String| Error::new(ErrorKind::Corrupt, what);
    let IndexArtifact { artifact_type, layers, subject } = artifact;
    let kinds: Vec<&str> = layers.iter().map(|part| part.media_type.as_str()).collect();
    if artifact_type.as_deref() != Some(ARTIFACT) || kinds != [MANIFEST, TABLE] {
        return Err(corrupt("it is none".to_owned()));
    }
    let subject = subject.digest()?;
    if subject != resolved.digest {
        return Err(corrupt(format!("it is of {subject}, not of {}", resolved.digest)));
    }
    let read = |part: &Descriptor, max| blobs.read(&part.digest()?, part.size_below(max)?);
    // Each takes a round trip; the link is the same for both.
    let (manifest, table) = thread::scope(|scope| {
        let table = scope.spawn(|| -> Result<_> {
            let table = read(&layers[1], TABLE_MAX)?;
            Ok((Table::decode(&table)?, table))
        });
        let manifest = read(&layers[0], MANIFEST_MAX);
        (manifest, table.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
    });
    let (manifest, (decoded, table)) = (manifest?, table?);
    let same = |(of_table, of_image): (&TableLayer, &crate::document::Layer)| {
        of_table.digest == of_image.digest.bytes()
            && of_table.stored_len() == of_image.size
            && of_table.codec() == of_image.compression.codec()
    };
    let image_layers = &resolved.manifest.layers;
    if decoded.image != resolved.digest.bytes()
        || decoded.layers.len() != image_layers.len()
        || !decoded.layers.iter().zip(image_layers).all(same)
    {
        return Err(corrupt("its table is of other layers".to_owned()));
    }
    let objects = Manifest::decode_objects(&manifest, &Limits::default())?;
    if Manifest::decode_lacks_checksums(&manifest, &Limits::default())? {
        return Err(corrupt("it has no digests of the image's data".to_owned()));
    }
    if objects != [derived_object(&table)?] {
        return Err(corrupt("its manifest has its data elsewhere".to_owned()));
    }
    Ok((manifest, table))
}

impl Source {
    /// Where the layers are, for those who read them later; `None` where they cannot be read later.
    pub(crate) fn layers_at(&self) -> Result<Option<LayersAt>> {
        match &self.0 {
            Kind::Layout { folder, .. } => {
                let cannot = |error| Error::io(format!("cannot use {}", folder.display()), error);
                Ok(Some(LayersAt::Layout(std::path::absolute(folder).map_err(cannot)?)))
            }
            Kind::Registry(name) => Ok(Some(LayersAt::Registry(name.clone()))),
            Kind::Archive(_) => Ok(None),
        }
    }
}

/// Only what can be read later has an index.
pub(crate) fn none_has() -> Error {
    let what = "an archive has no index: only images of registries and layouts have one";
    Error::new(ErrorKind::Invalid, what)
}
