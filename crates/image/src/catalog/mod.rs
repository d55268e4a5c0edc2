//! The images of a store: their names and records.
//!
//! A name is an object `images/<name>`, with special characters escaped, that holds a line of
//! JSON ([`ImageRecord`]). Invariant: a name's manifest and packs were published before it.

mod collect;
mod copy;
mod discard;
mod names;
mod provenance;
mod reserved;
mod roots;
mod verify;

use std::time::{SystemTime, UNIX_EPOCH};

use burgeon_block::{Digest, Error, ErrorKind, ObjectId, ObjectKind, ObjectStore, Result};
use serde::{Deserialize, Serialize};

pub use self::names::check_given_name;
use self::names::{escape, unescape};
pub use self::{
    collect::{Collected, gc, gc_image, remove, stored_layers},
    copy::{Copied, copy, in_lanes, name_part, parts, read_part, sizes},
    provenance::{ImageProvenance, Provenance},
    reserved::{EMPTY_IMAGE, NameForm, NamedPart, OciName, ReservedName, is_reserved},
    roots::{HostRoots, forget_host, publish_roots, read_host_roots, read_roots},
    verify::{Damage, Read, Verified, verify},
};
pub(crate) use self::{
    discard::{Added, discard},
    names::check_name,
};
use crate::{
    ManifestLimits, corrupt,
    manifest::{ENCODED_MAX, Manifest},
};

/// Version of the record of a name.
const RECORD_FORMAT: u32 = 1;
/// Longest record of a name, in bytes.
const RECORD_MAX: u64 = 64 << 10;

/// The record of a name: its image, and figures for display.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct ImageRecord {
    /// Version of this record.
    format: u32,
    /// The name.
    pub name: String,
    /// The image: digest of its manifest, in hexadecimal.
    manifest: String,
    /// Time the name was given, in seconds since 1970.
    pub created_s: u64,
    /// Files of any type, hard links counted once.
    pub inodes: u64,
    /// Bytes of regular files, as `du --apparent-size` counts them.
    pub file_bytes: u64,
    /// Bytes of lazy data: distinct, padded to blocks, not compressed.
    pub data_bytes: u64,
    /// Bytes of chunks in packs, compressed, including chunks stored by other images.
    pub stored_bytes: u64,
    /// Bytes of the manifest, which a first mount transfers.
    pub manifest_bytes: u64,
}

impl ImageRecord {
    pub(crate) fn of(name: &str, digest: Digest, manifest: &Manifest, manifest_bytes: u64) -> Self {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let sizes = manifest.tree.inodes.iter().map(|inode| inode.size);
        Self {
            format: RECORD_FORMAT,
            name: name.to_owned(),
            manifest: digest.to_string(),
            created_s: now.as_secs(),
            inodes: manifest.tree.inodes.len() as u64,
            // Holes cost nothing: three files can have more than 2⁶⁴ bytes together.
            file_bytes: sizes.fold(0, u64::saturating_add),
            data_bytes: manifest.data_range().len(),
            stored_bytes: stored_bytes(manifest),
            manifest_bytes,
        }
    }

    /// The record in `bytes`, which `object` names in errors. `Corrupt` if it is damaged;
    /// `UnsupportedFormat` if it is of another version.
    pub fn decode(bytes: &[u8], object: &ObjectId) -> Result<Self> {
        let damaged = |error| {
            let what =
                format!("{object} of the store is damaged; build the image again, or remove it");
            Error::with_source(ErrorKind::Corrupt, what, error)
        };
        #[derive(Deserialize)]
        struct Version {
            format: u32,
        }
        let version: Version = serde_json::from_slice(bytes).map_err(damaged)?;
        if version.format != RECORD_FORMAT {
            let what = format!(
                "{object} has format {}, unknown to this Burgeon: use a newer one",
                version.format
            );
            return Err(Error::new(ErrorKind::UnsupportedFormat, what));
        }
        let record: Self = serde_json::from_slice(bytes).map_err(damaged)?;
        record.digest()?;
        Ok(record)
    }

    /// The image: digest of its manifest.
    pub fn digest(&self) -> Result<Digest> {
        self.manifest.parse()
    }
}

/// Bytes of the chunks in packs; other chunks are computed, or read from their origin.
fn stored_bytes(manifest: &Manifest) -> u64 {
    let is_pack = |object: &ObjectId| object.is(ObjectKind::Pack);
    let is_pack: Vec<bool> = manifest.objects.iter().map(is_pack).collect();
    let stored = manifest.chunks.iter().filter(|chunk| is_pack[chunk.object as usize]);
    stored.map(|chunk| chunk.stored.len()).sum()
}

/// The object that holds the manifest with `digest`.
pub fn manifest_object(digest: &Digest) -> Result<ObjectId> {
    ObjectKind::Manifest.object(digest)
}

fn name_object(name: &str) -> Result<ObjectId> {
    check_name(name)?;
    ObjectKind::Name.object(escape(name))
}

pub(crate) fn publish_name(store: &impl ObjectStore, record: &ImageRecord) -> Result<()> {
    let failed = |error| {
        let what = format!("cannot write the record of {}", record.name);
        Error::with_source(ErrorKind::Invalid, what, error)
    };
    let mut line = serde_json::to_vec(record).map_err(failed)?;
    line.push(b'\n');
    store.publish(&name_object(&record.name)?, &line)
}

/// Publishes as `name` the image whose encoded manifest `bytes` was made elsewhere. The objects
/// with its data must exist.
///
/// Errors: `Corrupt` for a manifest that breaks a rule.
pub fn publish_image(store: &impl ObjectStore, name: &str, bytes: &[u8]) -> Result<ImageRecord> {
    let manifest = Manifest::decode(bytes, &ManifestLimits::default())?;
    let digest = Digest::of(bytes);
    store.publish(&manifest_object(&digest)?, bytes)?;
    let record = ImageRecord::of(name, digest, &manifest, bytes.len() as u64);
    publish_name(store, &record)?;
    Ok(record)
}

/// Gives the image of `record` the additional name `name`; returns its record.
pub fn publish_alias(
    store: &impl ObjectStore,
    record: &ImageRecord,
    name: &str,
) -> Result<ImageRecord> {
    let alias = ImageRecord { name: name.to_owned(), ..record.clone() };
    publish_name(store, &alias)?;
    Ok(alias)
}

/// All images of `store` by name. A name with an unreadable record has an error instead.
pub fn list(store: &impl ObjectStore) -> Result<Vec<(String, Result<ImageRecord>)>> {
    let objects = store.list("images")?;
    let named = objects.iter().filter_map(|object| {
        let name = unescape(object.below(ObjectKind::Name)?)?;
        let record = read_record(store, object);
        Some((name, record))
    });
    Ok(named.collect())
}

/// The record of `name`. `NotFound` suggests similar names.
pub fn resolve(store: &impl ObjectStore, name: &str) -> Result<ImageRecord> {
    let object = name_object(name)?;
    // Read without a prior check, because each request over a network is a round trip.
    match read_record(store, &object) {
        Err(error) if error.kind() == ErrorKind::NotFound => {}
        // A store that does not exist yet has no images.
        Err(_) if store.len(&object)?.is_none() => {}
        found => return found,
    }
    let objects = match store.list("images") {
        // A web server need not support listing: then there is nothing to suggest.
        Err(error) if error.kind() == ErrorKind::Invalid => {
            let what = format!("there is no image {name:?}, and the store cannot list its images");
            return Err(Error::with_source(ErrorKind::NotFound, what, error));
        }
        objects => objects?,
    };
    let names = objects.iter().filter_map(|object| unescape(object.below(ObjectKind::Name)?));
    let names: Vec<String> = names.collect();
    Err(Error::new(
        ErrorKind::NotFound,
        format!("there is no image {name:?}{}", names::suggest(name, &names)),
    ))
}

fn read_record(store: &impl ObjectStore, object: &ObjectId) -> Result<ImageRecord> {
    ImageRecord::decode(&store.get(object, RECORD_MAX)?, object)
}

/// Reads the manifest with `digest` and checks it against the digest.
pub fn load(
    store: &impl ObjectStore,
    digest: &Digest,
    limits: &ManifestLimits,
) -> Result<Manifest> {
    let object = manifest_object(digest)?;
    let bytes = load_bytes(store, digest)?;
    Manifest::decode(&bytes, limits)
        .map_err(|error| Error::with_source(error.kind(), format!("cannot use {object}"), error))
}

/// The bytes of the manifest with `digest`, checked against it.
pub fn load_bytes(store: &impl ObjectStore, digest: &Digest) -> Result<bytes::Bytes> {
    let object = manifest_object(digest)?;
    let bytes = store.get(&object, ENCODED_MAX).map_err(|error| match error.kind() {
        ErrorKind::NotFound => {
            let what = "the image's manifest is missing: restore it in the store, or build the \
                        image again";
            Error::with_source(ErrorKind::NotFound, what, error)
        }
        _ => error,
    })?;
    let mut hasher = blake3::Hasher::new();
    hasher.update_rayon(&bytes);
    if Digest::from(hasher.finalize()) == *digest {
        Ok(bytes)
    } else {
        Err(corrupt(format!("{object} of the store does not match its digest")))
    }
}
