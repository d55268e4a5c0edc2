//! Converts OCI images and tar archives into images of a store.
//!
//! ```text
//!   oci-layout:DIR:TAG  ─► Layout   ┐ index ─► manifest ─► layers, checked ─► merged ┐
//!   oci://HOST/REPO:TAG ─► Registry ┘                                                ├─► store
//!   https://HOST/X.tar  ─► Archive   ────────────────────────────────────────────────┘
//!   a Burgeon image     ─► push      ─► blobs, manifest: mounted from the registry as it is
//! ```
//!
//! The crate can run in a sandboxed process: it reads no credential files, and it returns facts
//! about an image instead of writing them into the state directory.
//!
//! An image of a registry or layout is named by its digest in the store, so it is found again
//! without the registry. Others can write to a store, so such a name is trusted only if this
//! host's provenance vouches for it. Invariants: every byte of an image comes from a blob that
//! matches its digest in the manifest, or matches a digest in a table of contents that matches its
//! own digest in the manifest; the manifest matches the image's digest; all input from a registry
//! is bounded before it is read.

mod archive;
mod blobs;
mod chain;
mod document;
#[doc(hidden)]
pub mod fuzz;
mod image;
mod index;
mod kept;
mod layout;
mod part;
mod push;
mod referrers;
mod settings;
mod source;
mod spool;
mod tags;
mod toc;
mod unpacked;

use std::{fs::File, panic::resume_unwind, path::Path, thread};

use burgeon_block::{Error, ErrorKind, ObjectStore, Result};
use burgeon_image::{
    builder::{BuildOptions, BuildReport, OnProgress},
    catalog::{self, ImageRecord, NameForm, NamedPart, OciName},
};
use burgeon_source::{
    Access, Directory, LayersAt,
    registry::{Name, OciDigest},
};
use serde::{Deserialize, Serialize};

use self::{
    archive::Archive,
    blobs::{Blobs, Resolved, Target, not_built},
    document::architecture,
    image::Tocs,
    part::Part,
    source::{Kind, archive_has_no_index, part_has_no_index},
};
pub use self::{
    index::{Indexed, index, is_whole, layer_bytes, layer_list, stored_bytes, stored_layer_bytes},
    kept::{Documents, OciImage, OciLayer},
    push::{Pushed, push},
    settings::ImageSettings,
    source::Source,
    tags::{PATIENCE, Pull, TagRecord, Tags, is_no_answer, never},
    unpacked::{DiffIdCheck, ReadLayers, Unpacked, Unpackings, unpack},
};

/// Progress callback, called from any thread: bytes of layers fetched, and bytes in total.
pub type OnFetch<'a> = &'a (dyn Fn(u64, u64) + Sync);

/// Allocates a piece of a file, an offset and a length, in the own store; called from any thread.
/// False, and nothing is allocated, if the disk would have less free space than is to be left.
pub type Allocate<'a> = &'a (dyn Fn(&File, u64, u64) -> bool + Sync);

/// The environment of a build.
pub struct Work<'a> {
    /// Access to registries.
    pub access: &'a Access,
    /// A folder with room for the compressed layers of the image during the build.
    pub spool: &'a Path,
    /// This host's own store, if images are made there. It keeps the fetched layers; images read
    /// them through an index, and they are not fetched again.
    pub own: Option<&'a Directory>,
    /// Another folder with blobs, each named by the hexadecimal digits of its SHA-256. Layers are
    /// read from it if they are there, and checked like any others.
    pub content: Option<&'a Path>,
    /// Space for these layers.
    pub allocate: Allocate<'a>,
    /// The records of tags, and when to resolve tags again.
    pub tags: Tags<'a>,
    /// The documents that this host keeps; this crate only reads them.
    pub documents: &'a Documents,
    /// Options of the build.
    pub options: &'a BuildOptions,
    /// Takes the layers that are read to their end.
    pub read: &'a ReadLayers,
    /// Progress of fetching layers.
    pub fetching: OnFetch<'a>,
    /// Progress of the build.
    pub building: OnProgress<'a>,
}

impl Work<'_> {
    /// The image with the reserved name `name` in `store`, if this host vouches for it.
    pub(crate) fn vouched(&self, store: &impl ObjectStore, name: &str) -> Option<ImageRecord> {
        let provenance = self.options.provenance.as_ref()?;
        catalog::resolve(store, name).ok().filter(|record| provenance.vouches_for(record))
    }

    /// Vouches for `record`, which this process has made or checked, under its reserved name.
    pub(crate) fn vouch(&self, record: &ImageRecord) -> Result<()> {
        self.options.provenance.as_ref().map_or(Ok(()), |provenance| provenance.vouch(record))
    }
}

/// The required form of an OCI image.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ImageForm<'a> {
    /// The image or its index if it is in the store; else one described by its tables of contents;
    /// else all of the image.
    Any,
    /// The image or its index if it is in the store; else the index with this digest, which the
    /// user trusts, from the referrers of the image.
    Index(&'a str),
    /// The image or its index if it is in the store; else all of the image. Never one described by
    /// its tables of contents, which are not compared with what the layers unpack to.
    Checked,
    /// All of the image.
    Whole,
}

/// Result of [`find_or_build`].
#[derive(Debug, Serialize, Deserialize)]
pub enum Found {
    /// An image in the store.
    Image(Box<FoundImage>),
    /// A Burgeon image in a registry: it needs no build.
    Ours(Name),
}

/// An image that was found in a store, or made there.
#[derive(Debug, Serialize, Deserialize)]
pub struct FoundImage {
    /// The image, by its name in the store. Callers must use only its digest: others may write to
    /// the store.
    pub image: ImageRecord,
    /// Report of the build, if the image was not in the store.
    pub report: Option<BuildReport>,
    /// Origin of its data in the store.
    pub how: How,
    /// Digests of indexes among the image's referrers that are not trusted, so not used.
    pub unused: Vec<String>,
    /// Notes for the user, such as why a table of contents was not used.
    pub notes: Vec<String>,
    /// True if the image is read from its layers.
    pub is_lazy: bool,
    /// The digest that the source's tag or archive has just resolved to, for the records.
    pub tag_digest: Option<String>,
    /// The digest of the OCI image, or of the index that it was chosen from.
    pub oci_digest: Option<String>,
    /// Documents of the image that are to be kept.
    pub documents: Vec<String>,
}

/// Origin of an image's data in a store.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum How {
    /// It was built, with chunks of its own.
    Built,
    /// All of its layers were fetched, and it is read from them.
    Fetched,
    /// It is read from its layers, which tables of contents describe.
    Listed,
}

/// Finds the image of `source` in `store` in the required form, without network access: by its
/// digest, or by the recorded digest of its tag if `--pull` permits.
pub fn find_here(
    store: &impl ObjectStore,
    source: &Source,
    want: ImageForm<'_>,
    work: &Work<'_>,
) -> Result<Option<FoundImage>> {
    let here = Here::new(store, source, want, work)?;
    if let Some(pinned) = source.pinned()
        && let Some(image) = here.of_digest(pinned)?
    {
        return here.found(Made::known(image).of_digest(pinned)).map(Some);
    }
    match (work.tags.pull, here.recalled()?) {
        (Pull::Never | Pull::Missing, Some(recalled)) => here.found(recalled.made()).map(Some),
        (Pull::Never, None) if !matches!(source.0, Kind::Layout { .. }) => {
            Err(never(&source.to_string()))
        }
        _ => Ok(None),
    }
}

/// Lookups of the image of a source on this host.
struct Here<'a, S> {
    store: &'a S,
    source: &'a Source,
    want: ImageForm<'a>,
    work: &'a Work<'a>,
    /// The digest of the required index.
    index: Option<OciDigest>,
    at: Option<LayersAt>,
}

impl<'a, S: ObjectStore> Here<'a, S> {
    fn new(
        store: &'a S,
        source: &'a Source,
        want: ImageForm<'a>,
        work: &'a Work<'a>,
    ) -> Result<Self> {
        let index = match want {
            ImageForm::Index(digest) => Some(digest.parse::<OciDigest>()?),
            ImageForm::Any | ImageForm::Checked | ImageForm::Whole => None,
        };
        let at = source.layers_at()?;
        if index.is_some() && at.is_none() {
            return Err(archive_has_no_index());
        }
        if index.is_some() && source.1 != Part::All {
            return Err(part_has_no_index());
        }
        Ok(Self { store, source, want, work, index, at })
    }

    /// The image of this name in the required form. A whole image is preferred to a lazy one.
    fn known(&self, name: OciName<'_>) -> Option<ImageRecord> {
        let will_do = |image: &ImageRecord| {
            let unlisted = || matches!(index::is_listed(self.store, image), Ok(false));
            match self.want {
                ImageForm::Any => true,
                ImageForm::Index(_) | ImageForm::Checked => unlisted(),
                ImageForm::Whole => unlisted() && matches!(is_whole(self.store, image), Ok(true)),
            }
        };
        let forms = [NameForm::Whole, NameForm::Index, NameForm::Tocs].into_iter();
        let names = forms.map(|form| name.form(form).to_string());
        names.filter_map(|name| self.work.vouched(self.store, &name)).find(will_do)
    }

    /// The image with the digest `digest` of an image or index, or its wanted part.
    fn of_digest(&self, digest: &OciDigest) -> Result<Option<ImageRecord>> {
        let part = &self.source.1;
        if *part == Part::All {
            let names = [OciName::of(digest.as_str()), alias(digest)];
            return Ok(names.into_iter().find_map(|name| self.known(name)));
        }
        // The number of layers decides about the name of a part.
        let Some(image) = self.work.documents.image(digest) else { return Ok(None) };
        let count = part.count(&image)?;
        Ok(self.known(part::name(&image.digest.parse()?, count, image.layers.len())))
    }

    /// The record of the tag or archive, and its image, if that is in the store.
    fn recalled(&self) -> Result<Option<Recalled>> {
        if let Kind::Archive(url) = &self.source.0 {
            let find = || {
                let record = self.work.tags.recall_archive(url)?;
                let image = self.work.vouched(self.store, record.image()?)?;
                (image.digest().ok() == record.manifest()).then_some((record, image))
            };
            return Ok(find().map(|(record, image)| Recalled { record, image, digest: None }));
        }
        let record = self.source.tagged().and_then(|name| self.work.tags.recall(name));
        let Some(record) = record else { return Ok(None) };
        let Ok(digest) = record.digest().parse::<OciDigest>() else { return Ok(None) };
        let image = self.of_digest(&digest)?;
        Ok(image.map(|image| Recalled { record, image, digest: Some(digest) }))
    }

    /// The result for an image that was in the store.
    fn found(&self, made: Made) -> Result<FoundImage> {
        let is_lazy = match &self.at {
            Some(at) => index::refresh(self.store, &made.image, at)?,
            None => false,
        };
        Ok(made.found(is_lazy))
    }
}

/// The image that the record of a tag or archive names.
struct Recalled {
    record: TagRecord,
    image: ImageRecord,
    /// The digest of the OCI image or index.
    digest: Option<OciDigest>,
}

impl Recalled {
    fn made(self) -> Made {
        Made { oci_digest: self.digest, ..Made::known(self.image) }
    }
}

/// Finds the image of `source` in `store` in the required form, or makes it there.
///
/// A digest that is in the store is found without network access.
pub fn find_or_build(
    store: &impl ObjectStore,
    source: &Source,
    want: ImageForm<'_>,
    work: &Work<'_>,
) -> Result<Found> {
    if let Some(found) = find_here(store, source, want, work)? {
        return Ok(Found::Image(Box::new(found)));
    }
    let here = Here::new(store, source, want, work)?;
    let (index, at) = (&here.index, &here.at);
    let image = |found: FoundImage| Ok(Found::Image(Box::new(found)));
    let Some((blobs, selector)) = source.blobs(work.access)? else {
        let Kind::Archive(url) = &source.0 else { unreachable!("all others have blobs") };
        return image(archive_in(&here, url)?);
    };
    let recalled = here.recalled()?;
    // The index is fetched by its own digest, so in parallel with resolving the image.
    let (target, pinned) = thread::scope(|scope| {
        let fetch = |digest: &OciDigest| index::Pinned::fetch(&blobs, digest.clone());
        let pinned = index.as_ref().map(|digest| scope.spawn(move || fetch(digest)));
        let target = match work.tags.pull {
            Pull::Newer if recalled.is_some() => blobs.find_within(PATIENCE, &selector),
            _ => blobs.find(&selector),
        };
        let pinned =
            pinned.map(|pinned| pinned.join().unwrap_or_else(|panic| resume_unwind(panic)));
        (target, pinned)
    });
    let target = match (target, recalled) {
        (Err(error), Some(recalled)) if work.tags.pull == Pull::Newer && is_no_answer(&error) => {
            let notes = vec![recalled.record.note(&error)];
            return image(here.found(Made { notes, ..recalled.made() })?);
        }
        (target, _) => target.map_err(|error| by_digest(source, error))?,
    };
    let mut resolved = match (target, &source.0) {
        (Target::Oci(resolved), _) => *resolved,
        (Target::Ours(_), _) if index.is_some() => return Err(archive_has_no_index()),
        (Target::Ours(_), _) if source.1 != Part::All => return Err(no_layers(source)),
        (Target::Ours(digest), Kind::Registry(name)) => return Ok(Found::Ours(name.at(digest))),
        (Target::Ours(digest), _) => return Err(not_built(&digest)),
    };
    blobs.take_part(&mut resolved, &source.1)?;
    let resolved = resolved;
    let found = match (here.known(resolved.name()), pinned, at) {
        (Some(image), ..) => here.found(Made::known(image))?,
        (None, Some(pinned), Some(at)) => {
            // The configuration is to be kept; reading it takes no time of its own here.
            let image = thread::scope(|scope| {
                scope.spawn(|| blobs.configuration(&resolved).map(drop));
                pinned.adopt(store, &blobs, &resolved, at)
            })?;
            work.vouch(&image)?;
            Made::known(image).found(true)
        }
        _ => {
            // Referrers are only reported, so they are listed while layers are fetched.
            let (made, unused) = thread::scope(|scope| {
                let list = || index::among_referrers(&blobs, &resolved.digest);
                let lists = at.is_some() && !resolved.is_part();
                let unused = lists.then(|| scope.spawn(list));
                let made = store_or_build(store, &blobs, &resolved, at.as_ref(), want, work);
                (made, unused.and_then(|unused| unused.join().ok()))
            });
            let made = Made { unused: unused.unwrap_or_default(), ..made? };
            work.vouch(&made.image)?;
            let is_lazy = made.how != How::Built;
            made.found(is_lazy)
        }
    };
    renew_alias(store, &resolved, &found.image, want, work)?;
    let answered = resolved.index.as_ref().unwrap_or(&resolved.digest);
    let tag_digest = source.tagged().map(|_| answered.to_string());
    let mut found = FoundImage { tag_digest, oci_digest: Some(answered.to_string()), ..found };
    keep_documents(&mut found, &blobs, &resolved, work);
    image(found)
}

/// Gives `image` the name of its image index, unless an image of that name serves as well: one with
/// checksums replaces one without.
fn renew_alias(
    store: &impl ObjectStore,
    resolved: &Resolved,
    image: &ImageRecord,
    want: ImageForm<'_>,
    work: &Work<'_>,
) -> Result<()> {
    let Some(index) = resolved.index.as_ref().filter(|_| !resolved.is_part()) else {
        return Ok(());
    };
    let alias = alias(index).to_string();
    let serves = |old: &ImageRecord| {
        // The digests are usually the same, which is cheap to see.
        matches!((old.digest(), image.digest()), (Ok(old), Ok(new)) if old == new)
            || !matches!(index::is_listed(store, old), Ok(true))
            || !matches!(index::is_listed(store, image), Ok(false))
    };
    let is_served = || work.vouched(store, &alias).is_some_and(|old| serves(&old));
    if want == ImageForm::Whole || !is_served() {
        work.vouch(&catalog::publish_alias(store, image, &alias)?)?;
    }
    Ok(())
}

/// Adds the documents of the image to `found`, unless they are kept already. The image works
/// without them, so a failure is a note.
fn keep_documents(found: &mut FoundImage, blobs: &Blobs, resolved: &Resolved, work: &Work<'_>) {
    let answered = resolved.index.as_ref().unwrap_or(&resolved.digest);
    if work.documents.image(answered).is_some() {
        return;
    }
    match blobs.documents(resolved) {
        Ok(Some(documents)) => found.documents = documents,
        Ok(None) => found.notes.push(format!(
            "the configuration of {} is not kept, because it is too large or no text; the image \
             cannot be run",
            resolved.digest
        )),
        Err(error) => found.notes.push(format!("the image's configuration is not kept: {error}")),
    }
}

/// Reads the documents of the image `source`, and no layer. Returns the digest of the image or
/// index, and the documents.
pub fn documents(source: &Source, access: &Access) -> Result<(String, Vec<String>)> {
    let (blobs, selector) = source.blobs(access)?.ok_or_else(|| no_layers(source))?;
    let Target::Oci(resolved) = blobs.find(&selector)? else { return Err(no_layers(source)) };
    let documents = blobs.documents(&resolved)?.ok_or_else(|| {
        let what = format!("the documents of {source} are too large to be kept, or no text");
        Error::new(ErrorKind::OverLimit, what)
    })?;
    let answered = resolved.index.as_ref().unwrap_or(&resolved.digest);
    Ok((answered.to_string(), documents))
}

/// The error for an image that is no OCI image, and so has neither layers nor settings.
pub(crate) fn no_layers(source: &Source) -> Error {
    let what = format!("{source} is not an OCI image, so it has neither layers nor settings");
    Error::new(ErrorKind::Invalid, what)
}

/// An image in the store.
struct Made {
    image: ImageRecord,
    oci_digest: Option<OciDigest>,
    report: Option<BuildReport>,
    how: How,
    unused: Vec<String>,
    notes: Vec<String>,
}

impl Made {
    /// An image that was in the store.
    fn known(image: ImageRecord) -> Self {
        let (oci_digest, report, how) = (None, None, How::Built);
        Self { image, oci_digest, report, how, unused: Vec::new(), notes: Vec::new() }
    }

    fn of_digest(self, digest: &OciDigest) -> Self {
        Self { oci_digest: Some(digest.clone()), ..self }
    }

    fn of(report: BuildReport) -> Self {
        Self { report: Some(report.clone()), ..Self::known(report.image) }
    }

    fn found(self, is_lazy: bool) -> FoundImage {
        let Self { image, oci_digest, report, how, unused, notes } = self;
        let oci_digest = oci_digest.map(|digest| digest.to_string());
        let (tag_digest, documents) = (None, Vec::new());
        FoundImage { image, report, how, unused, notes, is_lazy, tag_digest, oci_digest, documents }
    }
}

/// Makes the image in the required form: read from its layers, with or without fetching them, if
/// possible; else built.
fn store_or_build(
    store: &impl ObjectStore,
    blobs: &Blobs,
    resolved: &Resolved,
    at: Option<&LayersAt>,
    want: ImageForm<'_>,
    work: &Work<'_>,
) -> Result<Made> {
    let tocs = Tocs::default();
    if let (Some(own), Some(at)) = (work.own, at) {
        let must = matches!(want, ImageForm::Whole);
        let store_layers = |tocs| index::store_layers(own, blobs, resolved, at, work, (tocs, must));
        let stored = match store_layers(
            (!matches!(want, ImageForm::Whole | ImageForm::Checked)).then_some(&tocs),
        ) {
            // Each TOC is valid, but together they describe no valid tree.
            Err(_) if tocs.is_unfit() => store_layers(None),
            stored => stored,
        };
        if let Some((report, note)) = stored? {
            let listed = tocs.is_used() && !tocs.is_unfit();
            let how = if listed { How::Listed } else { How::Fetched };
            let notes = tocs.into_refused().into_iter().chain(note).collect();
            return Ok(Made { how, notes, ..Made::of(report) });
        }
    }
    let report = blobs.build(resolved, store, &resolved.name().to_string(), work)?;
    if let Some(own) = work.own {
        index::remove_unneeded_layers(own, blobs, resolved);
    }
    Ok(Made { notes: tocs.into_refused(), ..Made::of(report) })
}

/// Builds the image `name` of `source` in `store`, even if it is there.
pub fn build(
    store: &impl ObjectStore,
    source: &Source,
    name: &str,
    work: &Work<'_>,
) -> Result<BuildReport> {
    let Some((blobs, selector)) = source.blobs(work.access)? else {
        let Kind::Archive(url) = &source.0 else { unreachable!("all others have blobs") };
        return Archive::open(url, None)?.build(store, name, (work.options, None), work.building);
    };
    let mut resolved = blobs.resolve(&selector)?;
    blobs.take_part(&mut resolved, &source.1)?;
    blobs.build(&resolved, store, name, work)
}

/// The image of the archive at `url`: the current version, or the recorded one if the server does
/// not answer.
fn archive_in(here: &Here<'_, impl ObjectStore>, url: &reqwest::Url) -> Result<FoundImage> {
    let (store, work) = (here.store, here.work);
    let recalled = here.recalled()?.filter(|_| work.tags.pull == Pull::Newer);
    let limit = recalled.is_some().then_some(PATIENCE);
    let archive = match (Archive::open(url, limit), recalled) {
        (Err(error), Some(recalled)) if is_no_answer(&error) => {
            let notes = vec![recalled.record.note(&error)];
            return Ok(Made { notes, ..recalled.made() }.found(false));
        }
        (archive, _) => archive?,
    };
    let name = archive.name();
    let made = match name.as_ref().and_then(|name| work.vouched(store, name)) {
        Some(image) => Made::known(image),
        None => {
            let name = name.unwrap_or_else(|| archive.unversioned_name());
            let report = archive.build(store, &name, (work.options, work.own), work.building)?;
            work.vouch(&report.image)?;
            Made::of(report)
        }
    };
    let tag_digest = Some(made.image.digest()?.to_string());
    Ok(FoundImage { tag_digest, ..made.found(false) })
}

/// The store's name for an image index; it includes the architecture of the chosen image.
fn alias(index: &OciDigest) -> OciName<'_> {
    OciName::of(index.as_str()).part(NamedPart::Architecture(architecture()))
}

/// Adds to an error how to name the image without the registry.
fn by_digest(source: &Source, error: Error) -> Error {
    if error.kind() != ErrorKind::Unavailable || source.pinned().is_some() {
        return error;
    }
    let what = "cannot resolve the name to a digest (an image that was mounted before is found \
        without the registry by its digest, oci://…@sha256:…)";
    Error::with_source(ErrorKind::Unavailable, what, error)
}
