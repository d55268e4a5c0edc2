//! A Burgeon image in a registry, as a read-only store.
//!
//! ```text
//!   oci://HOST/REPOSITORY@sha256:…  ──► OCI manifest, of that digest ──► object ─► blob
//!      read(packs/ab12…, range)     ──► a range of the blob         (unverified, as of any store)
//!      get(manifests/cd34…)         ──► the whole blob, checked against its digest
//! ```
//!
//! Invariants: the manifest has the digest in the name; each object has one blob, a valid object
//! name, and not a byte more than the manifest states.

use std::{collections::BTreeMap, fmt, io::Read, sync::Arc};

use burgeon_block::{
    BlockSource, ByteRange, Collecting, Error, ErrorKind, Lease, ObjectId, ObjectKind, ObjectStore,
    Result,
};
use bytes::Bytes;
use oci_spec::image::ImageManifest;
use serde_json::{Value, json};
use tokio::sync::OnceCell;

use super::{Checked, DOCUMENT_MAX, Name, OciDigest, Registry, body_error};
use crate::{Access, check_len, too_short, waiting, web};

/// The artifact type of a Burgeon image.
pub const ARTIFACT_TYPE: &str = "application/vnd.burgeon.image.v1";
/// The annotation of a blob that names its object.
const OBJECT: &str = "vnd.burgeon.object";
/// The media type of OCI manifests.
pub const MANIFEST_TYPE: &str = "application/vnd.oci.image.manifest.v1+json";
/// The media type of the empty configuration.
pub const EMPTY_TYPE: &str = "application/vnd.oci.empty.v1+json";
/// The empty configuration.
pub const EMPTY: &[u8] = b"{}";

/// The kinds of objects in an image, with their media types.
const MEDIA_TYPES: [(ObjectKind, &str); 4] = [
    (ObjectKind::Name, "application/vnd.burgeon.name.v1+json"),
    (ObjectKind::Manifest, "application/vnd.burgeon.manifest.v1"),
    (ObjectKind::Pack, "application/vnd.burgeon.pack.v1"),
    (ObjectKind::Profile, "application/vnd.burgeon.profile.v1"),
];

/// The blob of an object.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Blob {
    /// Digest of its bytes.
    pub digest: OciDigest,
    /// Length in bytes.
    pub size: u64,
}

/// The objects of an image, each with its blob.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct ObjectBlobs(BTreeMap<ObjectId, Blob>);

impl ObjectBlobs {
    /// Adds `object`. `Invalid` if images have no such kind of object, or it is already there.
    pub fn add(&mut self, object: ObjectId, blob: Blob) -> Result<()> {
        if media_type(&object).is_none() {
            return Err(Error::new(
                ErrorKind::Invalid,
                format!(
                    "{object} is not a part of an \
                image"
                ),
            ));
        }
        match self.0.insert(object.clone(), blob) {
            None => Ok(()),
            Some(_) => Err(Error::new(ErrorKind::Invalid, format!("{object} is listed twice"))),
        }
    }

    /// Encodes the OCI manifest; equal objects give equal bytes. `Invalid` if it is longer than
    /// registries accept.
    pub fn encode(&self) -> Result<Vec<u8>> {
        let descriptor = |media_type, digest: &OciDigest, size: u64, annotations: Value| {
            json!({
                "mediaType": media_type, "digest": digest.to_string(), "size": size,
                "annotations": annotations,
            })
        };
        let blobs = self.0.iter().map(|(object, blob)| {
            let media_type = media_type(object).unwrap_or_default();
            descriptor(media_type, &blob.digest, blob.size, json!({ OBJECT: object.as_str() }))
        });
        let config = descriptor(EMPTY_TYPE, &OciDigest::of(EMPTY), EMPTY.len() as u64, json!({}));
        let manifest = json!({
            "schemaVersion": 2,
            "mediaType": MANIFEST_TYPE,
            "artifactType": ARTIFACT_TYPE,
            "config": config,
            "layers": blobs.collect::<Vec<_>>(),
        });
        let bytes = manifest.to_string().into_bytes();
        if bytes.len() as u64 <= DOCUMENT_MAX {
            return Ok(bytes);
        }
        let what = format!(
            "the image has {} objects, whose list is longer than the {DOCUMENT_MAX} bytes that \
             registries take: keep it in a bucket or folder",
            self.0.len()
        );
        Err(Error::new(ErrorKind::Invalid, what))
    }

    /// Decodes a manifest from an untrusted source. `UnsupportedFormat` if it is not a Burgeon
    /// image.
    pub fn decode(manifest: &[u8]) -> Result<Self> {
        let corrupt = |why: String| Error::new(ErrorKind::Corrupt, format!("the image {why}"));
        let manifest: ImageManifest = serde_json::from_slice(manifest).map_err(|error| {
            // The error can quote the document.
            let why: String = error.to_string().chars().take(200).collect();
            let why = why.escape_debug();
            Error::new(ErrorKind::Corrupt, format!("the image's manifest is invalid: {why}"))
        })?;
        let kind = manifest.artifact_type().as_ref().map_or("", AsRef::as_ref);
        if manifest.schema_version() != 2 || kind != ARTIFACT_TYPE {
            let kind: String = kind.chars().take(100).collect();
            let what =
                format!("this is not a Burgeon image of a known version, but of type {kind:?}");
            return Err(Error::new(ErrorKind::UnsupportedFormat, what));
        }
        let mut objects = Self::default();
        for blob in manifest.layers() {
            // Later versions may add blobs that are not objects; this one ignores them.
            let annotations = blob.annotations().as_ref();
            let Some(object) = annotations.and_then(|all| all.get(OBJECT)) else { continue };
            let object = ObjectId::new(object.as_str()).and_then(|object| {
                let blob = Blob { digest: blob.digest().as_ref().parse()?, size: blob.size() };
                objects.add(object, blob)
            });
            object.map_err(|error| {
                corrupt(format!("has a list of objects that Burgeon did not make: {error}"))
            })?;
        }
        let names = objects.0.keys().filter(|object| object.is(ObjectKind::Name));
        match names.count() {
            1 => Ok(objects),
            names => Err(corrupt(format!("has {names} names instead of one"))),
        }
    }
}

fn media_type(object: &ObjectId) -> Option<&'static str> {
    let is_one = |(kind, _): &&(ObjectKind, &str)| {
        object.below(*kind).is_some_and(|name| !name.contains('/'))
    };
    MEDIA_TYPES.iter().find(is_one).map(|(_, media_type)| *media_type)
}

/// A Burgeon image in a registry, as a store. Cheap to clone.
#[derive(Clone)]
pub struct Artifact(Arc<Inner>);

struct Inner {
    registry: Registry,
    digest: OciDigest,
    objects: OnceCell<ObjectBlobs>,
}

impl Artifact {
    /// Opens the image `name`, which must include a digest. Sends nothing.
    pub(crate) fn open(name: &Name, access: &Access) -> Result<Self> {
        let digest = name.digest().cloned().ok_or_else(|| {
            let what = format!("{name} has no digest: name the image as {name}@sha256:…");
            Error::new(ErrorKind::Invalid, what)
        })?;
        let registry = Registry::open(name, access)?;
        Ok(Self(Arc::new(Inner { registry, digest, objects: OnceCell::new() })))
    }

    /// `Invalid`: content named by its digest cannot change.
    pub(crate) fn read_only(&self) -> Error {
        let what = format!(
            "the store {} can only be read: write to another one, and `burgeon push` the image",
            self.0.registry.name()
        );
        Error::new(ErrorKind::Invalid, what)
    }

    async fn objects(&self, retries: u32) -> Result<&ObjectBlobs> {
        let ask = || async {
            let document = self.0.registry.fetch_document(Some(&self.0.digest), retries).await?;
            ObjectBlobs::decode(&document.0)
        };
        self.0.objects.get_or_try_init(ask).await
    }

    async fn blob(&self, object: &ObjectId, retries: u32) -> Result<&Blob> {
        self.objects(retries).await?.0.get(object).ok_or_else(|| {
            let what = format!("{object} is not in {}", self.0.registry.name());
            Error::new(ErrorKind::NotFound, what)
        })
    }

    /// Blocking [`BlockSource::read`].
    pub(crate) fn read_blocking(&self, object: &ObjectId, range: ByteRange) -> Result<Bytes> {
        waiting(self.read(object, range))
    }
}

impl BlockSource for Artifact {
    async fn read(&self, object: &ObjectId, range: ByteRange) -> Result<Bytes> {
        check_len(object, range)?;
        let blob = self.blob(object, 0).await?;
        if range.end() > blob.size {
            return Err(too_short(object, range));
        }
        self.0.registry.blob_range(&blob.digest, range).await
    }
}

impl ObjectStore for Artifact {
    fn publish_file(&self, _object: &ObjectId, _from: &std::path::Path) -> Result<()> {
        Err(self.read_only())
    }

    fn publish(&self, _object: &ObjectId, _bytes: &[u8]) -> Result<()> {
        Err(self.read_only())
    }

    fn get(&self, object: &ObjectId, len_max: u64) -> Result<Bytes> {
        let Blob { digest, size } = waiting(self.blob(object, web::RETRIES))?.clone();
        let name = self.0.registry.name();
        if size > len_max {
            let what =
                format!("{object} of {name} has {size} bytes, more than the {len_max} allowed");
            return Err(Error::new(ErrorKind::Invalid, what));
        }
        let mut blob = Checked::new(self.0.registry.blob(&digest, 0)?, digest, size);
        let mut bytes = Vec::new();
        blob.read_to_end(&mut bytes)
            .map_err(|error| body_error(&format!("read {object} of {name}"), error))?;
        Ok(bytes.into())
    }

    fn len(&self, object: &ObjectId) -> Result<Option<u64>> {
        Ok(waiting(self.objects(web::RETRIES))?.0.get(object).map(|blob| blob.size))
    }

    fn list(&self, prefix: &str) -> Result<Vec<ObjectId>> {
        let folder = format!("{}/", prefix.trim_end_matches('/'));
        let all = waiting(self.objects(web::RETRIES))?.0.keys();
        Ok(all.filter(|object| object.as_str().starts_with(&folder)).cloned().collect())
    }

    fn remove(&self, _object: &ObjectId) -> Result<()> {
        Err(self.read_only())
    }

    fn begin_write(&self) -> Result<Lease> {
        Err(self.read_only())
    }

    fn begin_collect(&self) -> Result<Collecting> {
        Err(self.read_only())
    }
}

impl fmt::Debug for Artifact {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Artifact").field(&self.0.registry.name()).finish()
    }
}

#[cfg(test)]
mod tests {
    use burgeon_block::ErrorKind;
    use testkit::Rng;

    use super::{Blob, MEDIA_TYPES, ObjectBlobs, OciDigest};

    /// The digest of a pushed image depends on every byte of it.
    #[test]
    fn the_manifest_of_an_image_stays_the_same_bytes() {
        let mut objects = ObjectBlobs::default();
        let digest = OciDigest::of(b"x");
        let blob = Blob { digest: digest.clone(), size: 7 };
        objects.add(MEDIA_TYPES[1].0.object(digest.hex()).unwrap(), blob).unwrap();
        let (hex, empty) = (digest.hex(), OciDigest::of(b"{}"));
        let expected = [
            r#"{"artifactType":"application/vnd.burgeon.image.v1","config":{"annotations":{},"#,
            &format!(r#""digest":"{empty}","mediaType":"application/vnd.oci.empty.v1+json","#),
            r#""size":2},"layers":[{"annotations":{"vnd.burgeon.object":"manifests/"#,
            &format!(r#"{hex}"}},"digest":"{digest}","#),
            r#""mediaType":"application/vnd.burgeon.manifest.v1","size":7}],"#,
            r#""mediaType":"application/vnd.oci.image.manifest.v1+json","schemaVersion":2}"#,
        ];
        assert_eq!(String::from_utf8(objects.encode().unwrap()).unwrap(), expected.concat());
    }

    #[test]
    fn damaged_manifests_fail_cleanly_or_round_trip() {
        let mut sound = ObjectBlobs::default();
        for (number, (kind, _)) in MEDIA_TYPES.iter().enumerate() {
            let digest = OciDigest::of(&[number as u8]);
            let object = kind.object(digest.hex()).unwrap();
            sound.add(object, Blob { digest, size: 1000 + number as u64 }).unwrap();
        }
        let bytes = sound.encode().unwrap();
        assert_eq!(ObjectBlobs::decode(&bytes).unwrap(), sound);
        let mut taken = 0;
        for seed in 0..5000 {
            let mut rng = Rng::new(seed);
            let bytes = rng.meddle(&bytes);
            match ObjectBlobs::decode(&bytes) {
                Ok(objects) => {
                    let again = objects.encode().unwrap();
                    assert_eq!(ObjectBlobs::decode(&again).unwrap(), objects, "{seed}");
                    taken += 1;
                }
                Err(error) => {
                    let expected = [ErrorKind::Corrupt, ErrorKind::UnsupportedFormat];
                    assert!(expected.contains(&error.kind()), "{seed}: {error}");
                }
            }
        }
        // Damage outside the objects goes unnoticed.
        assert!((1..2500).contains(&taken), "{taken}");
    }
}
