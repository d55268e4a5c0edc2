//! A part of a repository: its path, and what a host has to be able to do to answer for it.

use std::fmt;

use super::OciDigest;

/// A document, a blob, or a list of a repository.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Resource {
    /// The document with a tag: the host decides which one.
    Tag(String),
    /// An index or manifest, verified by its digest.
    Manifest(OciDigest),
    /// Verified by its digest.
    Blob(OciDigest),
    /// The place where uploads of blobs begin.
    Uploads,
    /// A page of a list of referrers, by its path: the host decides what is in it.
    Referrers(String),
}

impl Resource {
    /// The first page of the referrers of `image` with artifact type `kind`.
    pub(super) fn referrers(image: &OciDigest, kind: &str) -> Self {
        Self::Referrers(format!("referrers/{image}?artifactType={kind}"))
    }
}

/// Its path, relative to the repository.
impl fmt::Display for Resource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tag(tag) => write!(f, "manifests/{tag}"),
            Self::Manifest(digest) => write!(f, "manifests/{digest}"),
            Self::Blob(digest) => write!(f, "blobs/{digest}"),
            Self::Uploads => f.write_str("blobs/uploads/"),
            Self::Referrers(path) => f.write_str(path),
        }
    }
}
