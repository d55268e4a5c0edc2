//! Referrers of an image: artifacts that have it as their subject.
//!
//! ```text
//!   put:   blobs ──► artifact, by its digest ──► OCI-Subject header: the registry lists it
//!                                            └─► no header: add to the list tagged sha256-<hex>
//!   find:  referrers/<digest> ──► not supported: the list tagged sha256-<hex>
//! ```
//!
//! Invariants: an artifact is written before the list that names it; other entries of the list are
//! kept, and a document that is no list is not replaced. If two clients change a list at the same
//! time, one entry may get lost; its artifact can still be used by digest.

use burgeon_block::{Error, ErrorKind, Result};
use burgeon_source::{
    Access,
    registry::{DOCUMENT_MAX, EMPTY, MANIFEST_TYPE, OciDigest, Uploads},
};
use bytes::Bytes;
use serde_json::{Value, json};

use crate::{
    Source,
    blobs::Blobs,
    document::{OCI_INDEX, referrer_digests, referrer_entries, referrers_tag},
    layout::Layout,
    source::{Kind, Selector, archive_has_no_index},
};

/// Most referrers of one image that are reported.
const REPORTED_MAX: usize = 8;

/// A writable place for referrers.
pub(crate) enum ReferrerStore {
    Layout(Layout),
    Registry(Uploads),
}

/// A referrer to be written.
pub(crate) struct NewReferrer<'a> {
    /// Its artifact type.
    pub(crate) kind: &'a str,
    /// An OCI manifest with a subject.
    pub(crate) document: &'a [u8],
    /// The blobs that the manifest names.
    pub(crate) blobs: &'a [Bytes],
}

impl ReferrerStore {
    /// Opens the layout or repository of `source`. Write access to a registry is tested by
    /// uploading the empty configuration.
    pub(crate) fn open(source: &Source, access: &Access) -> Result<Self> {
        match &source.0 {
            Kind::Layout { folder, .. } => Ok(Self::Layout(Layout::open(folder)?)),
            Kind::Registry(name) => {
                let uploads = Uploads::open(name, access)?;
                let empty = Bytes::from_static(EMPTY);
                uploads.put(&OciDigest::of(&empty), &empty).map_err(cannot)?;
                Ok(Self::Registry(uploads))
            }
            Kind::Archive(_) => Err(archive_has_no_index()),
        }
    }

    /// Writes `artifact` as a referrer of `image`, which is one of `blobs`.
    pub(crate) fn put(
        &self,
        blobs: &Blobs,
        image: &OciDigest,
        artifact: &NewReferrer<'_>,
    ) -> Result<()> {
        self.try_put(blobs, image, artifact).map_err(cannot)
    }

    fn try_put(&self, blobs: &Blobs, image: &OciDigest, artifact: &NewReferrer<'_>) -> Result<()> {
        let NewReferrer { kind, document, blobs: parts } = artifact;
        parts.iter().try_for_each(|part| self.put_blob(part))?;
        if self.put_document(None, MANIFEST_TYPE, document)?.as_ref() == Some(image) {
            return Ok(());
        }
        let digest = OciDigest::of(document).to_string();
        let mut all = tagged(blobs, image)?;
        all.retain(|other| other["digest"] != digest.as_str());
        all.push(json!({
            "mediaType": MANIFEST_TYPE, "artifactType": kind, "digest": digest,
            "size": document.len(),
        }));
        let list = json!({ "schemaVersion": 2, "mediaType": OCI_INDEX, "manifests": all });
        let list = list.to_string();
        if list.len() as u64 > DOCUMENT_MAX {
            let what = format!("the list of referrers of {image} is full (4 MiB)");
            return Err(Error::new(ErrorKind::Invalid, what));
        }
        self.put_document(Some(&referrers_tag(image)), OCI_INDEX, list.as_bytes())?;
        Ok(())
    }

    fn put_blob(&self, bytes: &Bytes) -> Result<()> {
        match self {
            Self::Layout(layout) => layout.put(bytes),
            Self::Registry(uploads) => {
                let digest = OciDigest::of(bytes);
                if uploads.has(&digest)? { Ok(()) } else { uploads.put(&digest, bytes) }
            }
        }
    }

    /// Writes a document, under `tag` if given; returns the `OCI-Subject` of the response.
    fn put_document(
        &self,
        tag: Option<&str>,
        kind: &str,
        bytes: &[u8],
    ) -> Result<Option<OciDigest>> {
        match (self, tag) {
            (Self::Layout(layout), None) => layout.put(bytes).map(|()| None),
            (Self::Layout(layout), Some(tag)) => layout.tag(tag, bytes, kind).map(|()| None),
            (Self::Registry(uploads), tag) => Ok(uploads.put_document(tag, kind, bytes)?.subject),
        }
    }
}

fn cannot(error: Error) -> Error {
    let what = "cannot publish a referrer of the image (without --push, this host can still read \
        the image lazily; for other hosts, copy the image with skopeo to a registry that you can \
        write to)";
    Error::with_source(error.kind(), what, error)
}

/// The entries of the tagged list of referrers of `image`, of any type.
fn tagged(blobs: &Blobs, image: &OciDigest) -> Result<Vec<Value>> {
    match blobs.document(&Selector::Tag(referrers_tag(image))) {
        Ok((bytes, _)) => referrer_entries(&bytes),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(Vec::new()),
        Err(error) => Err(error),
    }
}

/// The digests of the referrers of `image` of type `kind`; empty if they cannot be listed.
pub(crate) fn find(blobs: &Blobs, image: &OciDigest, kind: &str) -> Vec<OciDigest> {
    let listed = match blobs.referrers(image, kind) {
        Ok(Some(pages)) => Ok(digests_on(pages.iter().map(|page| &page[..]), kind)),
        Ok(None) => blobs
            .document(&Selector::Tag(referrers_tag(image)))
            .map(|(list, _)| digests_on([&list[..]], kind)),
        Err(error) => Err(error),
    };
    listed.unwrap_or_else(|error| {
        // Most images have none.
        if error.kind() != ErrorKind::NotFound {
            tracing::warn!(object = %image, %error, "the referrers of the image cannot be listed");
        }
        Vec::new()
    })
}

/// The digests of the referrers of type `kind` on the pages of a list.
pub(crate) fn digests_on<'a>(
    pages: impl IntoIterator<Item = &'a [u8]>,
    kind: &str,
) -> Vec<OciDigest> {
    // An invalid page does not spoil the others.
    let of = |page| referrer_digests(page, kind, REPORTED_MAX).unwrap_or_default();
    pages.into_iter().flat_map(of).take(REPORTED_MAX).collect()
}
