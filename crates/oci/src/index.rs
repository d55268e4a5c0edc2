//! Indexes of OCI images, by which these are read lazily from their unchanged layers.
//!
//! ```text
//!   index:  layers, read once ──► Burgeon manifest ──► data in derived/<digest> ──► table: layer
//!                                                                                   and offset
//!   push:   both as an artifact ──► referrer of the image
//!   mount:  artifact, by its pinned digest ──► checked ──► store
//! ```
//!
//! Invariants: an index made elsewhere is trusted only by the digest that the user has given; it
//! is used only for the image, and the layers, that it was made from.

use std::{
    collections::HashSet,
    sync::{Mutex, atomic::AtomicUsize},
    thread,
};

use burgeon_block::{Error, ErrorKind, ObjectId, ObjectKind, ObjectStore, Result};
use burgeon_image::{
    ChunkEntry, Codec, Manifest, ManifestLimits,
    builder::{self, BuildReport, Origin},
    catalog::{self, ImageRecord, NameForm, NamedPart, OciName, ReservedName},
};
use burgeon_layer::{Stretch, TABLE_MAX, Table, TableLayer};
use burgeon_source::{
    Directory, LayersAt, derived_object, origin_object,
    registry::{EMPTY, EMPTY_TYPE, MANIFEST_TYPE, OciDigest},
    stored_layers_object,
};
use bytes::Bytes;
use oci_spec::image::{Descriptor, ImageManifest};
use serde::{Deserialize, Serialize};
use serde_json::json;

use crate::{
    Source, Work,
    blobs::{Blobs, Resolved},
    document::{DescriptorExt, index_artifact},
    image::{Keep, Tocs},
    part::Part,
    referrers::{self, NewReferrer, ReferrerStore},
    source::{Kind, Selector, archive_has_no_index, part_has_no_index},
};

/// The artifact type of an index, and the media types of its two parts.
const ARTIFACT: &str = "application/vnd.burgeon.index.v1";
const MANIFEST: &str = "application/vnd.burgeon.manifest.v1";
const TABLE: &str = "application/vnd.burgeon.derived.v1";
/// Longest manifest of an index: 512 MiB. Four million entries of 100 bytes, and about as much for
/// checksums of data.
const MANIFEST_MAX: u64 = 512 << 20;

/// An index.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Indexed {
    /// Digest of the index, for pinning it.
    pub digest: String,
    /// Digest of the indexed image.
    pub image: String,
    /// The resulting image in the store.
    pub record: ImageRecord,
    /// Size of the index in bytes.
    pub bytes: u64,
    /// Size of the image's compressed layers in bytes.
    pub image_bytes: u64,
    /// True if it was pushed as a referrer of the image.
    pub pushed: bool,
    /// The documents of the image, to be kept.
    pub documents: Vec<String>,
}

/// The store's name for the image `digest` read by an index.
fn name_of(digest: &OciDigest) -> String {
    OciName::of(digest.as_str()).form(NameForm::Index).to_string()
}

/// Makes the index of the image of `source` in `store`, unless it is there. With `push`, pushes it
/// as a referrer of the image.
///
/// Errors: `Invalid` for an image that cannot be read lazily.
pub fn index(
    store: &impl ObjectStore,
    source: &Source,
    push: bool,
    work: &Work<'_>,
) -> Result<Indexed> {
    let (Some(at), Some((blobs, selector))) = (source.layers_at()?, source.blobs(work.access)?)
    else {
        return Err(archive_has_no_index());
    };
    if source.1 != Part::All {
        return Err(part_has_no_index());
    }
    let referrer_store = push.then(|| ReferrerStore::open(source, work.access)).transpose()?;
    let resolved = blobs.resolve(&selector)?;
    let name = name_of(&resolved.digest);
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
    if let Some(referrer_store) = referrer_store {
        let artifact = NewReferrer { kind: ARTIFACT, document: &document, blobs: &parts };
        referrer_store.put(&blobs, &resolved.digest, &artifact)?;
    }
    Ok(Indexed {
        digest: OciDigest::of(&document).to_string(),
        image: resolved.digest.to_string(),
        record: image,
        bytes: parts.iter().map(|part| part.len() as u64).sum(),
        image_bytes: resolved.manifest.layers.iter().map(|layer| layer.size).sum(),
        pushed: push,
        documents: blobs.documents(&resolved)?.unwrap_or_default(),
    })
}

/// The names for an image in a store.
struct Names<'a> {
    name: &'a str,
    /// The name to use if TOCs were used. `None` forbids their use.
    listed: Option<(&'a str, &'a Tocs)>,
}

/// Publishes the index of the image under its name, and with `keep` its layers too. The inner
/// error is for layers that cannot be read from the middle.
fn make(
    store: &impl ObjectStore,
    blobs: &Blobs,
    resolved: &Resolved,
    (names, at): (&Names<'_>, &LayersAt),
    work: &Work<'_>,
    keep: Option<&Keep<'_>>,
) -> Result<Result<BuildReport>> {
    let tocs = names.listed.map(|(_, tocs)| tocs);
    let (descriptions, restarts) = blobs.describe(resolved, work, keep, tocs)?;
    let restarts = match restarts.into_iter().collect::<Result<Vec<_>>>() {
        Ok(restarts) => restarts,
        Err(error) => return Ok(Err(error)),
    };
    let layers = || resolved.manifest.layers.iter();
    let object = |origins: &[Origin], chunks: &mut [ChunkEntry]| {
        let table = Table {
            image: resolved.digest.bytes(),
            object_len: chunks.last().map_or(0, |last| last.stored.end()),
            layers: layers()
                .zip(&restarts)
                .map(|(layer, restarts)| TableLayer {
                    digest: layer.digest.bytes(),
                    restarts: restarts.clone(),
                })
                .collect(),
            stretches: stretches(origins),
        };
        for chunk in chunks.iter_mut().filter(|chunk| chunk.codec == Codec::Verified) {
            chunk.digest = table.identity(chunk.stored).ok_or_else(unlisted)?;
        }
        let object = publish_table(store, &table.encode()?, at)?;
        // If all layers have a TOC, none is stored.
        if keep.is_some() && tocs.is_none_or(|tocs| tocs.used() < restarts.len()) {
            let mut list = String::new();
            for layer in layers() {
                list.extend([blobs.layer_object(&layer.digest)?.as_str(), "\n"]);
            }
            store.publish(&stored_layers_object(&object)?, list.as_bytes())?;
        }
        Ok(object)
    };
    let name = match names.listed {
        Some((listed, tocs)) if tocs.is_used() => listed,
        _ => names.name,
    };
    let described = builder::describe_layers(store, name, descriptions, work.options, &object);
    if let (Err(error), Some(tocs)) = (&described, tocs)
        && tocs.is_used()
        && matches!(error.kind(), ErrorKind::Corrupt | ErrorKind::Invalid)
    {
        tocs.unfit(&resolved.digest, error);
    }
    described.map(Ok)
}

/// Fetches the layers of the image, and indexes and stores them in this host's `own` store: the
/// image then works without the registry. With `tocs`, layers with a TOC are not
/// fetched. Returns the report and perhaps a note for the user, or `None` if the layers cannot be
/// read from the middle; they are stored by then, for a build. Layers without room are not stored;
/// with `must` this is an error.
pub(crate) fn store_layers(
    own: &Directory,
    blobs: &Blobs,
    resolved: &Resolved,
    at: &LayersAt,
    work: &Work<'_>,
    (tocs, must): (Option<&Tocs>, bool),
) -> Result<Option<(BuildReport, Option<String>)>> {
    let lease = own.begin_write()?;
    let listed = resolved.name().form(NameForm::Tocs).to_string();
    let name = resolved.name().to_string();
    let names = Names { name: &name, listed: tocs.map(|tocs| (listed.as_str(), tocs)) };
    let (unstored, stored) = (AtomicUsize::new(0), Mutex::default());
    let keep = Keep { own, scratch: lease.scratch(), must, unstored, stored };
    let made = make(own, blobs, resolved, (&names, at), work, Some(&keep)).inspect_err(|error| {
        // If the registry failed, the fetched layers are kept for the next try.
        if error.kind() != ErrorKind::Unavailable {
            remove_unneeded_layers(own, blobs, resolved);
        }
    });
    match made? {
        Ok(report) => {
            if derived_of(own, &report.image)?.is_none() {
                remove_unneeded_layers(own, blobs, resolved);
            }
            Ok(Some((report, keep.note())))
        }
        Err(error) if error.kind() == ErrorKind::Invalid => Ok(None),
        Err(error) => Err(error),
    }
}

/// Removes the layers of the image that no image in `own` needs. If this fails, `gc` removes them
/// later.
pub(crate) fn remove_unneeded_layers(own: &Directory, blobs: &Blobs, resolved: &Resolved) {
    let remove = || -> Result<()> {
        let mut needed = HashSet::new();
        for list in own.list("held")? {
            needed.extend(catalog::stored_layers(own, &list)?);
        }
        for layer in &resolved.manifest.layers {
            let object = blobs.layer_object(&layer.digest)?;
            if !needed.contains(&object) {
                own.remove(&object)?;
            }
        }
        Ok(())
    };
    let _ = remove();
}

fn unlisted() -> Error {
    Error::new(ErrorKind::Corrupt, "a layer that was not read has no table of contents")
}

/// Joins adjacent origins.
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

/// The derived object with the data of `image`, if there is one.
fn derived_of(store: &impl ObjectStore, image: &ImageRecord) -> Result<Option<ObjectId>> {
    derived_in(store, &image.digest()?)
}

fn derived_in(
    store: &impl ObjectStore,
    manifest: &burgeon_block::Digest,
) -> Result<Option<ObjectId>> {
    let bytes = catalog::load_bytes(store, manifest)?;
    let objects = Manifest::decode_objects(&bytes, &ManifestLimits::default())?;
    Ok(objects.into_iter().find(|object| object.is(ObjectKind::Derived)))
}

/// True if `store`, the host's own, has all data of `image`, so that no layer elsewhere is needed.
pub fn is_whole(store: &impl ObjectStore, image: &ImageRecord) -> Result<bool> {
    match derived_of(store, image)? {
        Some(object) => all_stored(store, &stored_layers_object(&object)?),
        None => Ok(true),
    }
}

/// The list of the stored layers of `image`, an object that there is once they were stored; `None`
/// for an image that is not read from layers.
pub fn layer_list(store: &impl ObjectStore, image: &ImageRecord) -> Result<Option<ObjectId>> {
    derived_of(store, image)?.map(|object| stored_layers_object(&object)).transpose()
}

/// Disk space in bytes that `image` takes in `store`, not counting sharing: its chunks and
/// manifest, or, for an image read from layers, its stored layers and its table. Computed data and
/// files read in place take none.
pub fn stored_bytes(store: &impl ObjectStore, image: &ImageRecord) -> Result<u64> {
    let own = image.stored_bytes + image.manifest_bytes;
    // Only an image without chunks but with data can have a derived object.
    if image.stored_bytes > 0 || image.data_bytes == 0 || store.list("derived")?.is_empty() {
        return Ok(own);
    }
    let Ok(Some(object)) = derived_of(store, image) else { return Ok(own) };
    let list = stored_layers_object(&object)?;
    let mut bytes = own + store.len(&object)?.unwrap_or(0);
    if store.len(&list)?.is_some() {
        let layers: HashSet<ObjectId> = catalog::stored_layers(store, &list)?.into_iter().collect();
        for layer in layers {
            bytes += store.len(&layer)?.unwrap_or(0);
        }
    }
    Ok(bytes)
}

/// True if TOCs describe the image, which may have any name of its source in
/// `store`.
pub(crate) fn is_listed(store: &impl ObjectStore, image: &ImageRecord) -> Result<bool> {
    match ReservedName::oci(&image.name) {
        Some(OciName { form: NameForm::Tocs, .. }) => return Ok(true),
        Some(OciName { form: NameForm::Index, .. } | OciName { part: NamedPart::All, .. }) => {
            return Ok(false);
        }
        // An alias of an image index can name either kind.
        Some(_) | None => {}
    }
    let bytes = catalog::load_bytes(store, &image.digest()?)?;
    Manifest::decode_lacks_checksums(&bytes, &ManifestLimits::default())
}

/// Bytes of the image with the manifest `digest` that can be read from stored layers in `store`,
/// the host's own, without a fetch. Zero for an image that is not read from layers.
pub fn stored_layer_bytes(store: &impl ObjectStore, digest: &burgeon_block::Digest) -> Result<u64> {
    let Some(object) = derived_in(store, digest)? else { return Ok(0) };
    let list = stored_layers_object(&object)?;
    if store.len(&list)?.is_none() {
        return Ok(0);
    }
    let table = Table::decode(&store.get(&object, TABLE_MAX)?)?;
    let layers = catalog::stored_layers(store, &list)?;
    let is_stored = |layer: &ObjectId| Ok(store.len(layer)?.is_some());
    let stored = layers.iter().map(is_stored).collect::<Result<Vec<bool>>>()?;
    if stored.iter().all(|stored| *stored) {
        // This includes the zeros between stretches.
        return Ok(table.object_len);
    }
    let stretches =
        table.stretches.iter().filter(|it| stored.get(it.layer as usize) == Some(&true));
    Ok(stretches.map(|stretch| u64::from(stretch.len)).sum())
}

/// Disk space in bytes of the layers in `store` that the image with the manifest `digest` is read
/// from, whether all of them are there or not. Zero for an image that is not read from layers.
pub fn layer_bytes(store: &impl ObjectStore, digest: &burgeon_block::Digest) -> Result<u64> {
    let Some(object) = derived_in(store, digest)? else { return Ok(0) };
    let list = stored_layers_object(&object)?;
    if store.len(&list)?.is_none() {
        return Ok(0);
    }
    let layers: HashSet<_> = catalog::stored_layers(store, &list)?.into_iter().collect();
    layers.iter().try_fold(0, |sum, layer| Ok(sum + store.len(layer)?.unwrap_or(0)))
}

/// True if the list exists and all layers in it are stored.
fn all_stored(store: &impl ObjectStore, list: &ObjectId) -> Result<bool> {
    if store.len(list)?.is_none() {
        return Ok(false);
    }
    for layer in catalog::stored_layers(store, list)? {
        if store.len(&layer)?.is_none() {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Sets the location of the layers of `image` to `at`. Returns whether the image is read from
/// layers.
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

/// The artifact for the index `image` of `store`: its document, and the blobs `{}`, manifest and
/// table.
fn artifact(
    store: &impl ObjectStore,
    image: &ImageRecord,
    resolved: &Resolved,
) -> Result<(Vec<u8>, [Bytes; 3])> {
    let manifest = catalog::load_bytes(store, &image.digest()?)?;
    let table = derived_of(store, image)?.ok_or_else(|| {
        let what = "the image has no data that could be read lazily, so it needs no index";
        Error::new(ErrorKind::Invalid, what)
    })?;
    let parts = [Bytes::from_static(EMPTY), manifest, store.get(&table, TABLE_MAX)?];
    let part = |kind: &str, bytes: &[u8]| {
        let digest = OciDigest::of(bytes).to_string();
        json!({ "mediaType": kind, "digest": digest, "size": bytes.len() })
    };
    let document = json!({
        "schemaVersion": 2,
        "mediaType": MANIFEST_TYPE,
        "artifactType": ARTIFACT,
        "config": part(EMPTY_TYPE, &parts[0]),
        "layers": [part(MANIFEST, &parts[1]), part(TABLE, &parts[2])],
        "subject": {
            "mediaType": resolved.manifest.media_type, "digest": resolved.digest.to_string(),
            "size": resolved.len,
        },
    });
    Ok((document.to_string().into_bytes(), parts))
}

/// The digests of the indexes among the referrers of `image`; empty if they cannot be listed.
pub(crate) fn among_referrers(blobs: &Blobs, image: &OciDigest) -> Vec<String> {
    referrers::find(blobs, image, ARTIFACT).iter().map(OciDigest::to_string).collect()
}

/// An index that the user trusts by its digest.
pub(crate) struct Pinned {
    digest: OciDigest,
    artifact: Result<ImageManifest>,
}

impl Pinned {
    /// Fetches the index `digest`.
    pub(crate) fn fetch(blobs: &Blobs, digest: OciDigest) -> Self {
        let document = blobs.document(&Selector::Digest(digest.clone()));
        let artifact = document.and_then(|(document, _)| index_artifact(&document));
        Self { digest, artifact }
    }

    /// Publishes the image in `store` by this index.
    ///
    /// Errors: `NotFound` if the index does not exist, `Corrupt` if it does not match its digest
    /// or belongs to another image.
    pub(crate) fn adopt(
        self,
        store: &impl ObjectStore,
        blobs: &Blobs,
        resolved: &Resolved,
        at: &LayersAt,
    ) -> Result<ImageRecord> {
        let parts = self.artifact.and_then(|artifact| read_parts(blobs, resolved, &artifact));
        let (manifest, table) = parts.map_err(|error| {
            let what = format!("cannot use the index {}", self.digest);
            Error::with_source(error.kind(), what, error)
        })?;
        let _lease = store.begin_write()?;
        publish_table(store, &table, at)?;
        let name = name_of(&resolved.digest);
        catalog::publish_image(store, &name, &manifest)
    }
}

/// Reads and checks the manifest and table of an index of the image.
fn read_parts(
    blobs: &Blobs,
    resolved: &Resolved,
    artifact: &ImageManifest,
) -> Result<(Vec<u8>, Vec<u8>)> {
    let corrupt = |what: String| Error::new(ErrorKind::Corrupt, what);
    let layers = artifact.layers();
    let kinds: Vec<&str> = layers.iter().map(|part| part.media_type().as_ref()).collect();
    let artifact_type = artifact.artifact_type().as_ref().map(AsRef::as_ref);
    let (Some(ARTIFACT), [MANIFEST, TABLE], Some(subject)) =
        (artifact_type, &kinds[..], artifact.subject())
    else {
        return Err(corrupt("it is not an index that Burgeon has made".to_owned()));
    };
    let subject = subject.sha256()?;
    if subject != resolved.digest {
        return Err(corrupt(format!("it is the index of {subject}, not of {}", resolved.digest)));
    }
    let read = |part: &Descriptor, max| blobs.read(&part.sha256()?, part.size_below(max)?);
    // In parallel, to save a round trip.
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
        return Err(corrupt("its table describes other layers than those of the image".to_owned()));
    }
    let objects = Manifest::decode_objects(&manifest, &ManifestLimits::default())?;
    if Manifest::decode_lacks_checksums(&manifest, &ManifestLimits::default())? {
        return Err(corrupt("its manifest has no digests of the image's data".to_owned()));
    }
    if objects != [derived_object(&table)?] {
        return Err(corrupt(
            "its manifest refers to data that its table does not describe".to_owned(),
        ));
    }
    Ok((manifest, table))
}

impl Source {
    /// The location of the layers for later reads; `None` if they cannot be read later.
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
