//! Copying all objects of one image.
//!
//! Invariants: every copied object was checked against its name; the caller gives the image its
//! local name afterwards. An interrupted copy is therefore not an image, and copied objects need
//! not be copied again.

use std::{
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed},
    },
    thread,
};

use burgeon_block::{Digest, Error, ErrorKind, ObjectId, ObjectKind, ObjectStore, Result};
use bytes::Bytes;
use serde::{Deserialize, Serialize};

use super::{ImageRecord, RECORD_MAX, load_bytes, manifest_object, name_object};
use crate::{
    Manifest, ManifestLimits, PROFILE_MAX, corrupt, invalid, manifest::ENCODED_MAX, pack,
    profile_object,
};

/// Objects in transfer at a time: each is in memory as a whole.
const LANES: usize = 4;
/// Longest pack that is copied: packs are closed at 32 MiB. Four take 256 MiB.
const PACK_MAX: u64 = 64 << 20;

/// The objects of the image of `record` except its name: packs, profile, manifest. `Invalid` if
/// its data is in files of this host.
pub fn parts(store: &impl ObjectStore, record: &ImageRecord) -> Result<Vec<ObjectId>> {
    let digest = record.digest()?;
    let (_, objects) =
        Manifest::decode_chunks(&load_bytes(store, &digest)?, &ManifestLimits::default())?;
    if let Some(file) = objects.iter().find_map(|object| object.below(ObjectKind::File)) {
        return Err(invalid(format!(
            "the image {:?} was built with --by-reference: its data is in files of this host, such \
             as /{file}, and goes nowhere else; build it without",
            record.name
        )));
    }
    if objects.iter().any(ObjectId::is_outside_store) {
        return Err(invalid(format!(
            "{:?} is the index of an OCI image, whose data is in that image's layers: others \
             read it from there (`burgeon index --push`); by the image's oci://… or oci-layout:… \
             name, `burgeon pull --eager` fetches all of it, and `burgeon build` makes one of it that \
             goes anywhere",
            record.name
        )));
    }
    let mut parts: Vec<ObjectId> =
        objects.into_iter().filter(|object| object.is(ObjectKind::Pack)).collect();
    let profile = profile_object(&digest)?;
    if store.len(&profile)?.is_some() {
        parts.push(profile);
    }
    parts.push(manifest_object(&digest)?);
    Ok(parts)
}

/// The object that is the name of the image of `record`.
pub fn name_part(record: &ImageRecord) -> Result<ObjectId> {
    name_object(&record.name)
}

/// All bytes of a part of an image, checked against its name if that is a digest.
pub fn read_part(store: &impl ObjectStore, object: &ObjectId) -> Result<Bytes> {
    let (len_max, name) = match object.kind() {
        Some(ObjectKind::Pack) => (PACK_MAX, object.below(ObjectKind::Pack)),
        Some(ObjectKind::Manifest) => (ENCODED_MAX, object.below(ObjectKind::Manifest)),
        Some(ObjectKind::Profile) => (PROFILE_MAX, None),
        _ => (RECORD_MAX, None),
    };
    let bytes = store.get(object, len_max)?;
    let digest = name.map(str::parse::<Digest>).transpose()?;
    if digest.is_some_and(|digest| digest != Digest::of(&bytes)) {
        return Err(corrupt(format!("{object} does not match its name: damaged, or another one")));
    }
    if object.is(ObjectKind::Pack) {
        pack::check_header(&bytes)?;
    }
    Ok(bytes)
}

/// The result of [`copy`].
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct Copied {
    /// Bytes that were copied.
    pub new_bytes: u64,
    /// Bytes that the target already had.
    pub there_bytes: u64,
}

/// Copies the image of `record` from one store to another, except its name. `progress` receives
/// the bytes done and the total. Objects that the target has are not copied again.
pub fn copy(
    from: &impl ObjectStore,
    to: &impl ObjectStore,
    record: &ImageRecord,
    progress: &(dyn Fn(u64, u64) + Sync),
) -> Result<Copied> {
    let _lease = to.begin_write()?;
    let parts = parts(from, record)?;
    let (done, there) = (AtomicU64::new(0), AtomicU64::new(0));
    let sizes = sizes(from, &parts)?;
    let total: u64 = sizes.iter().sum();
    // The manifest is last: without its packs it would refer to missing objects.
    let (manifest, packs) = parts.split_last().ok_or_else(|| invalid("an image has a manifest"))?;
    let put = |object: &ObjectId, size: u64| {
        let is_there = to.len(object)? == Some(size);
        if is_there {
            there.fetch_add(size, Relaxed);
        } else {
            to.publish(object, &read_part(from, object)?)?;
        }
        progress(done.fetch_add(size, Relaxed) + size, total);
        Ok(())
    };
    in_lanes(packs.len(), |number| put(&packs[number], sizes[number]))?;
    put(manifest, sizes[packs.len()])?;
    let there_bytes = there.into_inner();
    Ok(Copied { new_bytes: total - there_bytes, there_bytes })
}

/// The length of each of `parts`.
pub fn sizes(store: &impl ObjectStore, parts: &[ObjectId]) -> Result<Vec<u64>> {
    let sizes: Vec<AtomicU64> = parts.iter().map(|_| AtomicU64::new(0)).collect();
    in_lanes(parts.len(), |number| {
        let object = &parts[number];
        let missing = || Error::new(ErrorKind::NotFound, format!("{object} is missing"));
        sizes[number].store(store.len(object)?.ok_or_else(missing)?, Relaxed);
        Ok(())
    })?;
    Ok(sizes.into_iter().map(AtomicU64::into_inner).collect())
}

/// Calls `work` for each number below `count`, [`LANES`] at a time. After an error no new call
/// begins; the first error is returned.
pub fn in_lanes(count: usize, work: impl Fn(usize) -> Result<()> + Sync) -> Result<()> {
    let (next, failed) = (AtomicUsize::new(0), Mutex::new(None));
    thread::scope(|scope| {
        for _ in 0..LANES.min(count) {
            scope.spawn(|| {
                loop {
                    let number = next.fetch_add(1, Relaxed);
                    if number >= count {
                        return;
                    }
                    if let Err(error) = work(number) {
                        next.store(count, Relaxed);
                        failed.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
                    }
                }
            });
        }
    });
    let failed = failed.into_inner().unwrap_or_else(PoisonError::into_inner);
    failed.map_or(Ok(()), Err)
}
