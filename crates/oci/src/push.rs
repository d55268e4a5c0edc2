//! Pushes a Burgeon image to a registry.
//!
//! Invariant: the manifest is written last, so the tag changes atomically and only when all blobs
//! are there. The next push reuses the blobs of an interrupted one.

use std::sync::{
    Mutex, PoisonError,
    atomic::{AtomicU64, Ordering::Relaxed},
};

use burgeon_block::{Error, ErrorKind, ObjectStore, Result};
use burgeon_image::catalog::{self, ImageRecord};
use burgeon_source::{
    Access,
    registry::{Blob, EMPTY, MANIFEST_TYPE, Name, ObjectBlobs, OciDigest, Put, Uploads},
};
use bytes::Bytes;

use crate::OnFetch;

/// Result of a push.
#[derive(Clone, Debug)]
pub struct Pushed {
    /// The pushed image, by digest.
    pub name: Name,
    /// Bytes sent.
    pub new_bytes: u64,
    /// Bytes that the registry already had.
    pub there_bytes: u64,
}

/// Pushes `image` of `store` to `to`. `progress` gets the bytes done and in total.
pub fn push(
    store: &impl ObjectStore,
    image: &ImageRecord,
    to: &Name,
    access: &Access,
    progress: OnFetch<'_>,
) -> Result<Pushed> {
    if to.digest().is_some() {
        let what =
            format!("cannot push to the digest of {to}: name a tag, oci://REGISTRY/REPOSITORY:TAG");
        return Err(Error::new(ErrorKind::Invalid, what));
    }
    let mut parts = catalog::parts(store, image)?;
    parts.push(catalog::name_part(image)?);
    let uploads = Uploads::open(to, access)?;
    let sizes = catalog::sizes(store, &parts)?;
    let total: u64 = sizes.iter().sum();
    let (done, sent) = (AtomicU64::new(0), AtomicU64::new(0));
    let objects = Mutex::new(ObjectBlobs::default());
    let publish = |bytes: Bytes| {
        let (digest, size) = (OciDigest::of(&bytes), bytes.len() as u64);
        if !uploads.has(&digest)? {
            uploads.put(&digest, &bytes)?;
            sent.fetch_add(size, Relaxed);
        }
        Ok(Blob { digest, size })
    };
    catalog::in_lanes(parts.len(), |number| {
        let (object, size) = (&parts[number], sizes[number]);
        let bytes = catalog::read_part(store, object)?;
        if bytes.len() as u64 != size {
            let what = format!("{object} was changed in the store meanwhile: push again");
            return Err(Error::new(ErrorKind::Unavailable, what));
        }
        let blob = publish(bytes)?;
        progress(done.fetch_add(size, Relaxed) + size, total);
        objects.lock().unwrap_or_else(PoisonError::into_inner).add(object.clone(), blob)
    })?;
    let objects = objects.into_inner().unwrap_or_else(PoisonError::into_inner);
    let manifest = objects.encode()?;
    publish(Bytes::from_static(EMPTY))?;
    let Put { digest, .. } = uploads.put_document(Some(to.tag()), MANIFEST_TYPE, &manifest)?;
    let new_bytes = sent.into_inner();
    let there_bytes = total.saturating_sub(new_bytes);
    Ok(Pushed { name: to.at(digest), new_bytes, there_bytes })
}
