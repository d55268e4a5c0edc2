//! Ordinary images and archives, as others publish them, become images of a store.
//!
//! ```text
//!   oci-layout:DIR:TAG  ─► Layout   ┐ index ─► manifest ─► layers, checked ─► merged ┐
//!   oci://HOST/REPO:TAG ─► Registry ┘                                                ├─► store
//!   https://HOST/X.tar  ─► Archive   ────────────────────────────────────────────────┘
//! ```
//!
//! The image of a registry or layout has its digest for a name: what was seen once is found again
//! without the registry. Invariants: every byte that gets into an image was in a blob that matches
//! the digest which the manifest gives, and the manifest that which the image is named by; whatever
//! a registry sends has a bound before it is read.

mod archive;
mod document;
mod image;
mod layout;
mod source;

use std::path::Path;

use burgeon_block::{Error, ErrorKind, ObjectStore, Result};
use burgeon_image::{
    build::{OnProgress, Options, Report},
    catalog,
};
use burgeon_source::{
    Access,
    registry::{Digest, Registry},
};

pub use self::source::Source;
use self::{
    archive::{Archive, has},
    document::architecture,
    image::Blobs,
    layout::Layout,
    source::{Kind, Wanted},
};

/// Told how many bytes of layers have come, of how many, from any thread.
pub type OnFetch<'a> = &'a (dyn Fn(u64, u64) + Sync);

/// What a build works with.
pub struct Work<'a> {
    /// What it takes to use registries.
    pub access: &'a Access,
    /// A folder with room for the image's layers, compressed, until it is built.
    pub spool: &'a Path,
    /// How to build.
    pub options: &'a Options,
    /// Told about layers that come.
    pub fetching: OnFetch<'a>,
    /// Told about the build.
    pub building: OnProgress<'a>,
}

/// Finds the image of `source` in `store`, or builds it there. Returns its name, and what a build
/// made.
///
/// A digest that was seen before is found without asking anybody.
pub fn find_or_build(
    store: &impl ObjectStore,
    source: &Source,
    work: &Work<'_>,
) -> Result<(String, Option<Report>)> {
    if let Some(pinned) = source.pinned() {
        let known = [pinned.to_string(), alias(pinned)].into_iter().find(|name| has(store, name));
        if let Some(name) = known {
            return Ok((name, None));
        }
    }
    let (blobs, wanted) = match &source.0 {
        Kind::Layout { folder, wanted } => (Blobs::Layout(Layout::open(folder)?), wanted),
        Kind::Registry(name) => {
            (Blobs::Registry(Registry::open(name, work.access)?), &Wanted::Only)
        }
        Kind::Archive(url) => return archive_in(store, url, work),
    };
    let resolved = blobs.resolve(wanted).map_err(|error| by_digest(source, error))?;
    let name = resolved.digest.to_string();
    let report = match has(store, &name) {
        true => None,
        false => {
            let progress = (work.fetching, work.building);
            Some(blobs.build(&resolved, store, &name, work.spool, work.options, progress)?)
        }
    };
    if let Some(index) = &resolved.index
        && !has(store, &alias(index))
    {
        catalog::publish_alias(store, &catalog::resolve(store, &name)?, &alias(index))?;
    }
    Ok((name, report))
}

/// Builds the image `name` of `source` in `store`, whether or not it is known.
pub fn build(
    store: &impl ObjectStore,
    source: &Source,
    name: &str,
    work: &Work<'_>,
) -> Result<Report> {
    let progress = (work.fetching, work.building);
    let (blobs, wanted) = match &source.0 {
        Kind::Layout { folder, wanted } => (Blobs::Layout(Layout::open(folder)?), wanted),
        Kind::Registry(name) => {
            (Blobs::Registry(Registry::open(name, work.access)?), &Wanted::Only)
        }
        Kind::Archive(url) => {
            return Archive::open(url)?.build(store, name, work.options, work.building);
        }
    };
    let resolved = blobs.resolve(wanted)?;
    blobs.build(&resolved, store, name, work.spool, work.options, progress)
}

fn archive_in(
    store: &impl ObjectStore,
    url: &reqwest::Url,
    work: &Work<'_>,
) -> Result<(String, Option<Report>)> {
    let archive = Archive::open(url)?;
    let name = match archive.name() {
        Some(name) if has(store, &name) => return Ok((name, None)),
        Some(name) => name,
        None => archive.unversioned_name(),
    };
    let report = archive.build(store, &name, work.options, work.building)?;
    Ok((name, Some(report)))
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
