//! What lies beside an image: artifacts that have it for their subject.
//!
//! ```text
//!   put:   blobs ──► artifact, by its digest ──► OCI-Subject: the registry lists it by itself
//!                                            └─► none: the list under the tag sha256-<hex>, and one more
//!   find:  referrers/<digest> ──► no such thing: the list under the tag sha256-<hex>
//! ```
//!
//! Invariants: an artifact is there before the list that names it; whatever else is on the list
//! stays, and what is no list is not replaced. Of two who change a list in the same moment one may
//! be missing from it: its artifact is there, and known by its digest.

use burgeon_block::{Error, ErrorKind, Result};
use burgeon_source::{
    Access,
    registry::{DOCUMENT_MAX, Digest, EMPTY, MANIFEST_TYPE, Uploads},
};
use bytes::Bytes;
use serde_json::{Value, json};

use crate::{
    Source,
    document::{OCI_INDEX, referrers, referrers_of},
    image::Blobs,
    index::none_has,
    layout::Layout,
    source::{Kind, Wanted},
};

/// Artifacts of one image that are told of.
const TOLD_MAX: usize = 8;

/// A place where artifacts are put beside images.
pub(crate) enum Shelf {
    Layout(Layout),
    Registry(Uploads),
}

/// An artifact that is to lie beside an image.
pub(crate) struct Artifact<'a> {
    /// What it is.
    pub(crate) kind: &'a str,
    /// An OCI manifest, with its subject.
    pub(crate) document: &'a [u8],
    /// What the manifest names.
    pub(crate) blobs: &'a [Bytes],
}

impl Shelf {
    /// The place where the image of `source` is. A registry is asked whether it can be written to,
    /// by writing the configuration that says nothing.
    pub(crate) fn open(source: &Source, access: &Access) -> Result<Self> {
        match &source.0 {
            Kind::Layout { folder, .. } => Ok(Self::Layout(Layout::open(folder)?)),
            Kind::Registry(name) => {
                let uploads = Uploads::open(name, access)?;
                let empty = Bytes::from_static(EMPTY);
                uploads.put(&Digest::of(&empty), &empty).map_err(cannot)?;
                Ok(Self::Registry(uploads))
            }
            Kind::Archive(_) => Err(none_has()),
        }
    }

    /// Puts `artifact` beside `image`, which is one of `blobs`.
    pub(crate) fn put(&self, blobs: &Blobs, image: &Digest, artifact: &Artifact<'_>) -> Result<()> {
        self.try_put(blobs, image, artifact).map_err(cannot)
    }

    fn try_put(&self, blobs: &Blobs, image: &Digest, artifact: &Artifact<'_>) -> Result<()> {
        let Artifact { kind, document, blobs: parts } = artifact;
        parts.iter().try_for_each(|part| self.put_blob(part))?;
        if self.put_document(None, MANIFEST_TYPE, document)?.as_ref() == Some(image) {
            return Ok(());
        }
        let digest = Digest::of(document).to_string();
        let mut all = tagged(blobs, image)?;
        all.retain(|other| other["digest"] != digest.as_str());
        all.push(json!({
            "mediaType": MANIFEST_TYPE, "artifactType": kind, "digest": digest,
            "size": document.len(),
        }));
        let list = json!({ "schemaVersion": 2, "mediaType": OCI_INDEX, "manifests": all });
        let list = list.to_string();
        if list.len() as u64 > DOCUMENT_MAX {
            let what = format!("so much refers to {image} that no list has room for more");
            return Err(Error::new(ErrorKind::Invalid, what));
        }
        self.put_document(Some(&tag_of(image)), OCI_INDEX, list.as_bytes())?;
        Ok(())
    }

    fn put_blob(&self, bytes: &Bytes) -> Result<()> {
        match self {
            Self::Layout(layout) => layout.put(bytes),
            Self::Registry(uploads) => {
                let digest = Digest::of(bytes);
                if uploads.has(&digest)? { Ok(()) } else { uploads.put(&digest, bytes) }
            }
        }
    }

    /// Puts a document, under a tag if it has one; says what it is listed beside from now on.
    fn put_document(&self, tag: Option<&str>, kind: &str, bytes: &[u8]) -> Result<Option<Digest>> {
        match (self, tag) {
            (Self::Layout(layout), None) => layout.put(bytes).map(|()| None),
            (Self::Layout(layout), Some(tag)) => layout.tag(tag, bytes, kind).map(|()| None),
            (Self::Registry(uploads), tag) => Ok(uploads.put_document(tag, kind, bytes)?.subject),
        }
    }
}

fn cannot(error: Error) -> Error {
    let what = "nothing can be put beside the image (without --push, this host reads it lazily all \
                the same; for others, copy the image with skopeo to where you may write)";
    Error::with_source(error.kind(), what, error)
}

/// The tag of the list of what refers to an image, where nobody can be asked for that.
fn tag_of(image: &Digest) -> String {
    format!("sha256-{}", image.hex())
}

/// Whether a tag is that of such a list.
pub(crate) fn is_tag_of_list(tag: &str) -> bool {
    let digest = tag.strip_prefix("sha256-").map(|digits| format!("sha256:{digits}"));
    digest.is_some_and(|digest| digest.parse::<Digest>().is_ok())
}

/// What refers to `image` by the list that has a tag, whatever it is.
fn tagged(blobs: &Blobs, image: &Digest) -> Result<Vec<Value>> {
    match blobs.document(&Wanted::Tag(tag_of(image))) {
        Ok((bytes, _)) => referrers(&bytes),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(Vec::new()),
        Err(error) => Err(error),
    }
}

/// The digests of the artifacts of type `kind` that lie beside `image`; none where nobody can say.
pub(crate) fn find(blobs: &Blobs, image: &Digest, kind: &str) -> Vec<Digest> {
    match blobs.referrers(image, kind) {
        Ok(Some(pages)) => told(pages.iter().map(|page| &page[..]), kind),
        Ok(None) => match blobs.document(&Wanted::Tag(tag_of(image))) {
            Ok((list, _)) => told([&list[..]], kind),
            Err(_) => Vec::new(),
        },
        Err(_) => Vec::new(),
    }
}

/// The digests of the artifacts of type `kind` on the pages of a list.
pub(crate) fn told<'a>(pages: impl IntoIterator<Item = &'a [u8]>, kind: &str) -> Vec<Digest> {
    // One that makes no sense does not spoil the others.
    let of = |page| referrers_of(page, kind, TOLD_MAX).unwrap_or_default();
    pages.into_iter().flat_map(of).take(TOLD_MAX).collect()
}
