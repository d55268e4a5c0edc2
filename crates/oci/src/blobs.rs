//! The blobs of an image in a layout or registry, and the image that a name resolves to.
//!
//! ```text
//!   Source ──► Blobs ─► find: tag or digest ─► index ─► … ─► manifest of this machine's platform
//!                   └─► read: blob, by its digest
//! ```
//!
//! Invariants: a document and the result of `read` match their digests; the readers of `blob` and
//! `blob_from` are not checked, which is up to the caller.

use std::{
    io::{Read, Seek, SeekFrom},
    sync::OnceLock,
    time::Duration,
};

use burgeon_block::{Error, ErrorKind, ObjectId, Result};
use burgeon_image::catalog::OciName;
use burgeon_source::{
    Access, layer_object,
    registry::{Checked, OciDigest, Registry, body_error},
};
use bytes::Bytes;

use crate::{
    document::{DescriptorExt, Document, Manifest, for_this_machine},
    kept::{OciImage, to_keep},
    layout::Layout,
    part::{self, Part},
    source::{Kind, Selector, Source},
};

/// Largest nesting depth of indexes.
const INDEXES_MAX: usize = 4;

/// The location of an image's blobs.
pub(crate) enum Blobs {
    Layout(Layout),
    Registry(Registry),
}

/// The OCI image that a name resolves to.
pub(crate) struct Resolved {
    /// Digest of the image for this machine's platform.
    pub(crate) digest: OciDigest,
    /// Digest of the index that named the image, if there was one.
    pub(crate) index: Option<OciDigest>,
    /// Length of the image's manifest, in bytes.
    pub(crate) len: u64,
    /// After [`Blobs::take_part`] only with the layers of that part.
    pub(crate) manifest: Manifest,
    /// Number of layers of the whole image.
    pub(crate) layers: usize,
    /// The documents that led to the image, and its manifest.
    documents: Vec<Vec<u8>>,
    /// The configuration, once it was read.
    config: OnceLock<Vec<u8>>,
}

impl Resolved {
    /// The image's name in a store, or that of its part.
    pub(crate) fn name(&self) -> OciName<'_> {
        part::name(&self.digest, self.manifest.layers.len(), self.layers)
    }

    /// True if only the first layers are wanted.
    pub(crate) fn is_part(&self) -> bool {
        self.manifest.layers.len() < self.layers
    }
}

/// The image of either kind that a name resolves to.
pub(crate) enum Target {
    Oci(Box<Resolved>),
    /// A Burgeon image.
    Ours(OciDigest),
}

impl Source {
    /// Opens the blobs of the source, and returns the image to select; `None` for an archive.
    pub(crate) fn blobs(&self, access: &Access) -> Result<Option<(Blobs, Selector)>> {
        Ok(match &self.0 {
            Kind::Layout { folder, selector } => {
                Some((Blobs::Layout(Layout::open(folder)?), selector.clone()))
            }
            Kind::Registry(name) => {
                Some((Blobs::Registry(Registry::open(name, access)?), Selector::Only))
            }
            Kind::Archive(_) => None,
        })
    }
}

impl Blobs {
    /// The object of the layer `digest` once it is stored here.
    pub(crate) fn layer_object(&self, digest: &OciDigest) -> Result<ObjectId> {
        match self {
            Self::Layout(layout) => {
                layer_object(&layout.folder().to_string_lossy(), &digest.bytes())
            }
            Self::Registry(registry) => layer_object(registry.name().registry(), &digest.bytes()),
        }
    }

    /// Resolves `selector` to an OCI image for this machine.
    pub(crate) fn resolve(&self, selector: &Selector) -> Result<Resolved> {
        match self.find(selector)? {
            Target::Oci(resolved) => Ok(*resolved),
            Target::Ours(digest) => Err(not_built(&digest)),
        }
    }

    /// Like `find`, but a registry must answer within `limit` in total.
    pub(crate) fn find_within(&self, limit: Duration, selector: &Selector) -> Result<Target> {
        let Self::Registry(registry) = self else { return self.find(selector) };
        registry.answer_within(Some(limit));
        let found = self.find(selector);
        registry.answer_within(None);
        found
    }

    /// Resolves `selector` to an image for this machine.
    pub(crate) fn find(&self, selector: &Selector) -> Result<Target> {
        let (mut bytes, mut digest) = self.document(selector)?;
        let (mut index, mut documents) = (None, Vec::new());
        for _ in 0..INDEXES_MAX {
            match Document::parse(&bytes)? {
                Document::Manifest(manifest) => {
                    let len = bytes.len() as u64;
                    let layers = manifest.layers.len();
                    documents.push(bytes);
                    let config = OnceLock::new();
                    return Ok(Target::Oci(Box::new(Resolved {
                        digest,
                        index,
                        len,
                        manifest,
                        layers,
                        documents,
                        config,
                    })));
                }
                Document::Ours => return Ok(Target::Ours(digest)),
                Document::Index(all) => {
                    let chosen = for_this_machine(&all)?;
                    chosen.document_size()?;
                    let chosen = chosen.sha256()?;
                    index.get_or_insert(digest);
                    documents.push(bytes);
                    (bytes, digest) = self.document(&Selector::Digest(chosen))?;
                }
            }
        }
        let what = format!("indexes of images are nested deeper than {INDEXES_MAX}");
        Err(Error::new(ErrorKind::Corrupt, what))
    }

    /// The configuration of the image; it is read once.
    pub(crate) fn configuration<'a>(&self, resolved: &'a Resolved) -> Result<&'a [u8]> {
        if let Some(config) = resolved.config.get() {
            return Ok(config);
        }
        let descriptor = &resolved.manifest.config;
        let config = self.read(&descriptor.sha256()?, descriptor.document_size()?)?;
        Ok(resolved.config.get_or_init(|| config))
    }

    /// Leaves only the layers of `part` in the manifest of `resolved`.
    pub(crate) fn take_part(&self, resolved: &mut Resolved, part: &Part) -> Result<()> {
        if *part == Part::All {
            return Ok(());
        }
        let config = self.configuration(resolved)?;
        let image = OciImage::of(&resolved.digest, &resolved.manifest, config)?;
        let count = part.count(&image)?;
        resolved.manifest.layers.truncate(count);
        Ok(())
    }

    /// The documents of the image for the process that keeps them; `None` if they are too large,
    /// or no text.
    pub(crate) fn documents(&self, resolved: &Resolved) -> Result<Option<Vec<String>>> {
        let config = self.configuration(resolved)?;
        let documents = resolved.documents.iter().map(Vec::as_slice).chain([config]);
        Ok(to_keep(&documents.collect::<Vec<_>>()))
    }

    /// Reads an index or manifest and checks its digest.
    pub(crate) fn document(&self, selector: &Selector) -> Result<(Vec<u8>, OciDigest)> {
        match self {
            Self::Layout(layout) => layout.document(selector),
            Self::Registry(registry) => match selector {
                Selector::Digest(digest) => registry.document(Some(digest)),
                Selector::Tag(tag) => registry.document_tagged(tag),
                Selector::Only => registry.document(None),
            },
        }
    }

    /// Opens a blob; its bytes are not checked.
    pub(crate) fn blob(&self, digest: &OciDigest) -> Result<Box<dyn Read + Send>> {
        self.blob_from(digest, 0)
    }

    /// Opens a blob at `offset`; its bytes are not checked.
    pub(crate) fn blob_from(
        &self,
        digest: &OciDigest,
        offset: u64,
    ) -> Result<Box<dyn Read + Send>> {
        match self {
            Self::Layout(layout) => {
                let mut blob = layout.blob(digest)?;
                let moved = blob.seek(SeekFrom::Start(offset));
                moved.map_err(|error| Error::io(format!("cannot read {digest}"), error))?;
                Ok(Box::new(blob))
            }
            Self::Registry(registry) => Ok(Box::new(registry.blob(digest, offset)?)),
        }
    }

    /// The pages of the list of referrers of `image` of type `kind`; `None` without the referrers
    /// API.
    pub(crate) fn referrers(&self, image: &OciDigest, kind: &str) -> Result<Option<Vec<Bytes>>> {
        match self {
            Self::Layout(_) => Ok(None),
            Self::Registry(registry) => registry.referrers(image, kind),
        }
    }

    /// Reads and checks a whole blob of `len` bytes.
    pub(crate) fn read(&self, digest: &OciDigest, len: u64) -> Result<Vec<u8>> {
        let mut bytes = Vec::new();
        let mut blob = Checked::new(self.blob(digest)?, digest.clone(), len);
        blob.read_to_end(&mut bytes)
            .map_err(|error| body_error(&format!("read {digest}"), error))?;
        Ok(bytes)
    }
}

/// The error for building a Burgeon image, which has no layers.
pub(crate) fn not_built(digest: &OciDigest) -> Error {
    let what = format!(
        "{digest} is a Burgeon image already: copy it to a registry with `skopeo copy`, then \
         `burgeon pull` or `burgeon mount` it from there"
    );
    Error::new(ErrorKind::Invalid, what)
}
