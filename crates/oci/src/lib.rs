//! Ordinary images and archives, as others publish them, become images of a store.
//!
//! ```text
//!   oci-layout:DIR:TAG  ─► Layout   ┐ index ─► manifest ─► layers, checked ─► merged ┐
//!   oci://HOST/REPO:TAG ─► Registry ┘                                                ├─► store
//!   https://HOST/X.tar  ─► Archive   ────────────────────────────────────────────────┘
//!   an image of ours    ─► push      ─► blobs, manifest: mounted from the registry as it is
//! ```
//!
//! Nothing here looks into a file that holds credentials, and what it makes of an image is noted and
//! returned rather than written into the state directory: a process in a sandbox can do it.
//!
//! The image of a registry or layout has its digest for a name: what was seen once is found again
//! without the registry. Others can write to a store, too, so such a name is believed only where this
//! host's provenance vouches for it. Invariants: every byte that gets into an image was in a blob that matches
//! the digest which the manifest gives, or matches a digest in a table of contents that the manifest
//! gives the digest of, and the manifest that which the image is named by; whatever a registry sends
//! has a bound before it is read.

mod archive;
mod beside;
mod contents;
mod document;
#[doc(hidden)]
pub mod fuzz;
mod image;
mod index;
mod layout;
mod push;
mod source;
mod spool;
mod tags;

use std::{panic::resume_unwind, path::Path, thread};

use burgeon_block::{Error, ErrorKind, ObjectStore, Result};
use burgeon_image::{
    builder::{OnProgress, Options, Report},
    catalog::{self, ImageRecord},
};
use burgeon_source::{
    Access, Directory, LayersAt,
    registry::{Digest, Name},
};
use serde::{Deserialize, Serialize};

use self::{
    archive::Archive,
    document::architecture,
    image::{Blobs, Resolved, Tables, Target, not_built},
    source::Kind,
};
pub use self::{
    index::{Indexed, held_bytes, index, is_whole, stored_bytes},
    push::{Pushed, push},
    source::Source,
    tags::{PATIENCE, Pull, Record, Tags, is_no_answer, never},
};

/// Told how many bytes of layers have come, of how many, from any thread.
pub type OnFetch<'a> = &'a (dyn Fn(u64, u64) + Sync);

/// What a build works with.
pub struct Work<'a> {
    /// What it takes to use registries.
    pub access: &'a Access,
    /// A folder with room for the image's layers, compressed, until it is built.
    pub spool: &'a Path,
    /// This host's own store, if images are made there: it holds layers as they come, which are read
    /// by their index then, and are not fetched again.
    pub own: Option<&'a Directory>,
    /// What tags stood for, and whether to ask for what they stand for now.
    pub tags: Tags<'a>,
    /// How to build.
    pub options: &'a Options,
    /// Told about layers that come.
    pub fetching: OnFetch<'a>,
    /// Told about the build.
    pub building: OnProgress<'a>,
}

impl Work<'_> {
    /// The image that has the reserved name `name` in `store`, if this host has checked that it is what
    /// the name says.
    pub(crate) fn vouched(&self, store: &impl ObjectStore, name: &str) -> Option<ImageRecord> {
        let provenance = self.options.provenance.as_ref()?;
        catalog::resolve(store, name).ok().filter(|record| provenance.vouches_for(record))
    }

    /// Records that `record`, which this process has made or checked, is what its reserved name says.
    pub(crate) fn vouch(&self, record: &ImageRecord) -> Result<()> {
        self.options.provenance.as_ref().map_or(Ok(()), |provenance| provenance.vouch(record))
    }
}

/// How much of an ordinary image is wanted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Want<'a> {
    /// What is here, all of it or an index; else what its tables of contents tell; else all of it.
    Any,
    /// What is here; else the index of this digest, which the user believes, from beside the image.
    Index(&'a str),
    /// All of it.
    Whole,
}

/// What [`find_or_build`] found.
#[derive(Debug, Serialize, Deserialize)]
pub enum Found {
    /// An image of the store.
    Image(Box<FoundImage>),
    /// One of ours, in a registry: there is nothing to build.
    Ours(Name),
}

/// What was found in a store, or made there.
#[derive(Debug, Serialize, Deserialize)]
pub struct FoundImage {
    /// The image, by its name in the store. Only the digest is to be believed from then on: others
    /// may write to the store.
    pub image: ImageRecord,
    /// What was made, if it was not there.
    pub report: Option<Report>,
    /// What was done for that.
    pub how: How,
    /// Digests of indexes beside the image that nobody has vouched for.
    pub unused: Vec<String>,
    /// Why tables of contents were not used.
    pub notes: Vec<String>,
    /// Whether its layers are read again, where they are.
    pub is_lazy: bool,
    /// What a registry has just said that the source's tag stands for, or a server that its archive is, to
    /// be remembered.
    pub tag_digest: Option<String>,
}

/// How an image came into a store.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum How {
    /// It has chunks of its own.
    Built,
    /// All of its layers have come, and it is read from them.
    Fetched,
    /// It is read from its layers, and tables of contents have told what is in them.
    Listed,
}

/// Finds the image of `source` in `store`, as far as it is wanted, where nobody need be asked: its digest
/// was seen before, or what its tag stood for will do.
pub fn find_here(
    store: &impl ObjectStore,
    source: &Source,
    want: Want<'_>,
    work: &Work<'_>,
) -> Result<Option<FoundImage>> {
    let here = Here::new(store, source, want, work)?;
    if let Some(pinned) = source.pinned()
        && let Some(image) =
            [pinned.to_string(), alias(pinned)].iter().find_map(|name| here.known(name))
    {
        return here.found(Made::known(image)).map(Some);
    }
    match (work.tags.pull, here.recalled()) {
        (Pull::Never | Pull::Missing, Some((_, image))) => here.found(Made::known(image)).map(Some),
        (Pull::Never, None) if !matches!(source.0, Kind::Layout { .. }) => {
            Err(never(&source.to_string()))
        }
        _ => Ok(None),
    }
}

/// What this host has of the image of a source.
struct Here<'a, S> {
    store: &'a S,
    source: &'a Source,
    want: Want<'a>,
    work: &'a Work<'a>,
    /// The index that is wanted.
    index: Option<Digest>,
    at: Option<LayersAt>,
}

impl<'a, S: ObjectStore> Here<'a, S> {
    fn new(store: &'a S, source: &'a Source, want: Want<'a>, work: &'a Work<'a>) -> Result<Self> {
        let index = match want {
            Want::Index(digest) => Some(digest.parse::<Digest>()?),
            Want::Any | Want::Whole => None,
        };
        let at = source.layers_at()?;
        if index.is_some() && at.is_none() {
            return Err(index::none_has());
        }
        Ok(Self { store, source, want, work, index, at })
    }

    /// The image of this name that will do. What lies here as a whole goes before what can be read
    /// lazily.
    fn known(&self, name: &str) -> Option<ImageRecord> {
        let will_do = |image: &ImageRecord| {
            let unlisted = || matches!(index::is_listed(self.store, image), Ok(false));
            match self.want {
                Want::Any => true,
                Want::Index(_) => unlisted(),
                Want::Whole => unlisted() && matches!(is_whole(self.store, image), Ok(true)),
            }
        };
        let names = [name.to_owned(), index::name_of(name), index::listed_name_of(name)];
        names.iter().filter_map(|name| self.work.vouched(self.store, name)).find(will_do)
    }

    /// What the tag stood for, or the archive was, if that is here.
    fn recalled(&self) -> Option<(Record, ImageRecord)> {
        if let Kind::Archive(url) = &self.source.0 {
            let record = self.work.tags.recall_archive(url)?;
            let image = self.work.vouched(self.store, record.image()?)?;
            return (image.digest().ok() == record.manifest()).then_some((record, image));
        }
        let record = self.work.tags.recall(self.source.tagged()?)?;
        let digest: Digest = record.digest().parse().ok()?;
        let names = [digest.to_string(), alias(&digest)];
        let image = names.iter().find_map(|name| self.known(name))?;
        Some((record, image))
    }

    /// An image that was here.
    fn found(&self, made: Made) -> Result<FoundImage> {
        let is_lazy = match &self.at {
            Some(at) => index::refresh(self.store, &made.image, at)?,
            None => false,
        };
        Ok(made.found(is_lazy))
    }
}

/// Finds the image of `source` in `store`, or makes it there, as far as it is wanted.
///
/// A digest that was seen before is found without asking anybody.
pub fn find_or_build(
    store: &impl ObjectStore,
    source: &Source,
    want: Want<'_>,
    work: &Work<'_>,
) -> Result<Found> {
    if let Some(found) = find_here(store, source, want, work)? {
        return Ok(Found::Image(Box::new(found)));
    }
    let here = Here::new(store, source, want, work)?;
    let (index, at) = (&here.index, &here.at);
    let image = |found: FoundImage| Ok(Found::Image(Box::new(found)));
    let Some((blobs, wanted)) = source.blobs(work.access)? else {
        let Kind::Archive(url) = &source.0 else { unreachable!("all others have blobs") };
        return image(archive_in(&here, url)?);
    };
    let recalled = here.recalled();
    // An index that is believed has its digest: it need not wait until the image is known.
    let (target, pinned) = thread::scope(|scope| {
        let fetch = |digest: &Digest| index::Pinned::fetch(&blobs, digest.clone());
        let pinned = index.as_ref().map(|digest| scope.spawn(move || fetch(digest)));
        let target = match work.tags.pull {
            Pull::Newer if recalled.is_some() => blobs.find_within(PATIENCE, &wanted),
            _ => blobs.find(&wanted),
        };
        let pinned =
            pinned.map(|pinned| pinned.join().unwrap_or_else(|panic| resume_unwind(panic)));
        (target, pinned)
    });
    let target = match (target, recalled) {
        (Err(error), Some((record, name)))
            if work.tags.pull == Pull::Newer && is_no_answer(&error) =>
        {
            let notes = vec![record.note(&error)];
            return image(here.found(Made { notes, ..Made::known(name) })?);
        }
        (target, _) => target.map_err(|error| by_digest(source, error))?,
    };
    let resolved = match (target, &source.0) {
        (Target::Ordinary(resolved), _) => *resolved,
        (Target::Ours(_), _) if index.is_some() => return Err(index::none_has()),
        (Target::Ours(digest), Kind::Registry(name)) => return Ok(Found::Ours(name.at(digest))),
        (Target::Ours(digest), _) => return Err(not_built(&digest)),
    };
    let digest = resolved.digest.to_string();
    let found = match (here.known(&digest), pinned, at) {
        (Some(image), ..) => here.found(Made::known(image))?,
        (None, Some(pinned), Some(at)) => {
            let image = pinned.adopt(store, &blobs, &resolved, at)?;
            work.vouch(&image)?;
            Made::known(image).found(true)
        }
        _ => {
            // What lies beside the image is only told of: nobody waits for it while layers come.
            let (made, unused) = thread::scope(|scope| {
                let beside = || index::beside(&blobs, &resolved.digest);
                let unused = at.as_ref().map(|_| scope.spawn(beside));
                let made = hold_or_build(store, &blobs, &resolved, at.as_ref(), want, work);
                (made, unused.and_then(|unused| unused.join().ok()))
            });
            let made = Made { unused: unused.unwrap_or_default(), ..made? };
            work.vouch(&made.image)?;
            let is_lazy = made.how != How::Built;
            made.found(is_lazy)
        }
    };
    // What names more of the image than before is renewed.
    let better = |old: &ImageRecord| {
        // Commonly they are the same, which is quickly seen.
        !matches!((old.digest(), found.image.digest()), (Ok(old), Ok(new)) if old == new)
            && matches!(index::is_listed(store, old), Ok(true))
            && matches!(index::is_listed(store, &found.image), Ok(false))
    };
    if let Some(index) = &resolved.index
        && (want == Want::Whole
            || work.vouched(store, &alias(index)).is_none_or(|old| better(&old)))
    {
        work.vouch(&catalog::publish_alias(store, &found.image, &alias(index))?)?;
    }
    let answered = resolved.index.as_ref().unwrap_or(&resolved.digest);
    let tag_digest = source.tagged().map(|_| answered.to_string());
    image(FoundImage { tag_digest, ..found })
}

/// An image of the store.
struct Made {
    image: ImageRecord,
    report: Option<Report>,
    how: How,
    unused: Vec<String>,
    notes: Vec<String>,
}

impl Made {
    /// One that was there.
    fn known(image: ImageRecord) -> Self {
        Self { image, report: None, how: How::Built, unused: Vec::new(), notes: Vec::new() }
    }

    fn of(report: Report) -> Self {
        Self { report: Some(report.clone()), ..Self::known(report.image) }
    }

    fn found(self, is_lazy: bool) -> FoundImage {
        let Self { image, report, how, unused, notes } = self;
        FoundImage { image, report, how, unused, notes, is_lazy, tag_digest: None }
    }
}

/// Brings an image, as far as it is wanted: what tables of contents tell of its layers, or these as they
/// are, where that will do, else an image of the store's own kind.
fn hold_or_build(
    store: &impl ObjectStore,
    blobs: &Blobs,
    resolved: &Resolved,
    at: Option<&LayersAt>,
    want: Want<'_>,
    work: &Work<'_>,
) -> Result<Made> {
    let tables = Tables::default();
    if let (Some(own), Some(at)) = (work.own, at) {
        let hold = |tables| index::hold(own, blobs, resolved, at, work, tables);
        let held = match hold((want != Want::Whole).then_some(&tables)) {
            // Each table makes sense, but not what they add up to.
            Err(_) if tables.is_unfit() => hold(None),
            held => held,
        };
        if let Some(report) = held? {
            let listed = tables.is_used() && !tables.is_unfit();
            let how = if listed { How::Listed } else { How::Fetched };
            return Ok(Made { how, notes: tables.into_refused(), ..Made::of(report) });
        }
    }
    let digest = resolved.digest.to_string();
    let report = blobs.build(resolved, store, &digest, work)?;
    if let Some(own) = work.own {
        index::release(own, resolved);
    }
    Ok(Made { notes: tables.into_refused(), ..Made::of(report) })
}

/// Builds the image `name` of `source` in `store`, whether or not it is known.
pub fn build(
    store: &impl ObjectStore,
    source: &Source,
    name: &str,
    work: &Work<'_>,
) -> Result<Report> {
    let Some((blobs, wanted)) = source.blobs(work.access)? else {
        let Kind::Archive(url) = &source.0 else { unreachable!("all others have blobs") };
        return Archive::open(url, None)?.build(store, name, (work.options, None), work.building);
    };
    let resolved = blobs.resolve(&wanted)?;
    blobs.build(&resolved, store, name, work)
}

/// The image of the archive at `url`: the version that the server has now, or without an answer the one
/// that is here.
fn archive_in(here: &Here<'_, impl ObjectStore>, url: &reqwest::Url) -> Result<FoundImage> {
    let (store, work) = (here.store, here.work);
    let recalled = here.recalled().filter(|_| work.tags.pull == Pull::Newer);
    let limit = recalled.is_some().then_some(PATIENCE);
    let archive = match (Archive::open(url, limit), recalled) {
        (Err(error), Some((record, image))) if is_no_answer(&error) => {
            let notes = vec![record.note(&error)];
            return Ok(Made { notes, ..Made::known(image) }.found(false));
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

/// The name that an index has here: what it stands for depends on the machine.
fn alias(index: &Digest) -> String {
    format!("{index}/{}", architecture())
}

/// Says what works without the registry.
fn by_digest(source: &Source, error: Error) -> Error {
    if error.kind() != ErrorKind::Unavailable || source.pinned().is_some() {
        return error;
    }
    let what = "which image the name stands for is unknown (by its digest, oci://…@sha256:…, one \
                that was mounted before is found without the registry)";
    Error::with_source(ErrorKind::Unavailable, what, error)
}
