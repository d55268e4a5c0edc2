//! `burgeon snapshotter index`, a command of the snapshotter's own: makes or removes the index of
//! an image that containerd has unpacked, in the background.
//!
//! ```text
//!   snapshotter ── spawns, holds a socket ──► snapshotter index IMAGE: low priority, dies with it
//!        │                                       ├─► documents: too small or too large? an index here already?
//!        │                                       └─► burgeon __read: containerd's blobs, else the registry
//!        ◄── JSON: what became of it ─────────────────┘
//! ```
//!
//! The image is named by the digest of its manifest. That comes from the registry, by the login
//! that later reads take, so no index is made of an image that could not be mounted by it. Its
//! layers are compared with their digests and diff IDs, wherever they are read from.

use std::{
    io,
    os::fd::AsFd,
    path::{Path, PathBuf},
    process::ExitCode,
};

use anyhow::Result;
use burgeon_block::{Error, ErrorKind, ObjectStore};
use burgeon_daemon::{roots, sweep_one};
use burgeon_image::catalog::{self, ImageRecord, NameForm, OciName};
use burgeon_oci::{OciImage, Source};
use burgeon_snapshotter::IndexMade;
use burgeon_source::{Store, registry::OciDigest};
use serde::{Deserialize, Serialize};

use super::super::{Context, oci_image, reading};
use crate::output;

/// The folder of blobs below containerd's content store; each is named by its SHA-256.
pub(super) const BLOBS: &str = "blobs/sha256";

/// Options of `index`.
#[derive(clap::Args, Debug)]
pub(super) struct Index {
    /// The image by its digest, oci://REPOSITORY@DIGEST
    pub(super) image: String,
    /// Bytes of the layers of the smallest image that gets an index
    #[arg(long, default_value_t = 0)]
    pub(super) min: u64,
    /// Bytes of the layers of the largest image that gets an index
    #[arg(long, default_value_t = u64::MAX)]
    pub(super) max: u64,
    /// containerd's content store, from which layers are read if it has them
    #[arg(long, value_name = "DIR")]
    pub(super) content: Option<PathBuf>,
    /// Remove the index
    #[arg(long)]
    pub(super) remove: bool,
}

/// The end of the command, for the snapshotter.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Said {
    Made { bytes: u64 },
    WasThere { bytes: u64 },
    LeftOut(String),
}

/// Reads the output of the command.
pub(super) fn understand(output: &str) -> burgeon_block::Result<IndexMade> {
    let said: Said = serde_json::from_str(output.trim()).map_err(|e| {
        Error::with_source(ErrorKind::LocalIo, "unexpected answer of `snapshotter index`", e)
    })?;
    Ok(match said {
        Said::Made { bytes } => IndexMade::Made { bytes },
        Said::WasThere { bytes } => IndexMade::WasThere { bytes },
        Said::LeftOut(why) => IndexMade::LeftOut(why),
    })
}

pub(super) fn index(context: &Context, args: &Index) -> Result<ExitCode> {
    if !burgeon_daemon::give_way(io::stdin().as_fd())? {
        anyhow::bail!("the snapshotter starts this command itself; yours is `burgeon index`");
    }
    oci_image::need_own_store(context)?;
    let invalid = || {
        let what = format!("{} is not an image by its digest", args.image);
        Error::new(ErrorKind::Invalid, what)
    };
    let source = Source::parse(&args.image).ok_or_else(invalid)??;
    let digest = source.pinned().ok_or_else(invalid)?;
    if args.remove {
        remove(context, digest)?;
        return Ok(ExitCode::SUCCESS);
    }
    output::print_json(&make(context, args, &source, digest)?)?;
    Ok(ExitCode::SUCCESS)
}

fn make(
    context: &Context,
    args: &Index,
    source: &Source,
    digest: &OciDigest,
) -> burgeon_block::Result<Said> {
    let store =
        context.create_store().map_err(|e| Error::new(ErrorKind::LocalIo, e.to_string()))?;
    if let Some(found) = oci_image::checked(context, &args.image)? {
        return Ok(Said::WasThere { bytes: size(&store, &found.image)? });
    }
    let image = documents(context, &args.image, source, digest)?;
    let bytes = image.layers.iter().fold(0u64, |sum, layer| sum.saturating_add(layer.size));
    if let Some(why) = why_not(bytes, args.min, args.max) {
        return Ok(Said::LeftOut(why));
    }
    let content = args.content.as_deref().map(|folder| folder.join(BLOBS));
    let content = content.as_deref().filter(|folder| Path::is_dir(folder));
    let made = reading::index(context, &args.image, source, false, content)?;
    Ok(Said::Made { bytes: size(&store, &made.record)? })
}

/// Why an image with so many bytes of layers gets no index.
fn why_not(bytes: u64, min: u64, max: u64) -> Option<String> {
    let (shown, key, limit) = match bytes {
        bytes if bytes < min => ("less", "index-min", min),
        bytes if bytes > max => ("more", "index-max", max),
        _ => return None,
    };
    let (bytes, limit) = (output::bytes(bytes), output::bytes(limit));
    Some(format!("its layers have {bytes}, {shown} than snapshotter.{key}, {limit}"))
}

fn size(store: &Store, image: &ImageRecord) -> burgeon_block::Result<u64> {
    burgeon_oci::stored_bytes(store, image)
}

/// The documents of the image, which are read if they are not kept.
pub(super) fn documents(
    context: &Context,
    text: &str,
    source: &Source,
    digest: &OciDigest,
) -> burgeon_block::Result<OciImage> {
    if let Some(image) = context.documents().image(digest) {
        return Ok(image);
    }
    reading::documents(context, text, source)?;
    let lost = || Error::new(ErrorKind::LocalIo, format!("the documents of {text} are lost"));
    context.documents().image(digest).ok_or_else(lost)
}

/// Removes the index, and what nothing else needs of it. Leaves all else as it is: this is no
/// `burgeon gc`, which a user may have put off.
fn remove(context: &Context, digest: &OciDigest) -> Result<()> {
    let (location, store) = (context.store_location(), context.open_store()?);
    let name = OciName::of(digest.as_str()).form(NameForm::Index).to_string();
    let image = match catalog::resolve(&store, &name) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
        record => record?.digest()?,
    };
    let needed = roots::refresh(&context.state, &location, &store)?;
    if !catalog::gc_image(&store, &needed, &name)? {
        let what = format!("{name} is removed later: it is mounted, or a build is running");
        return Err(Error::new(ErrorKind::Unavailable, what).into());
    }
    // Another name may keep it.
    if store.len(&catalog::manifest_object(&image)?)?.is_some() {
        return Ok(());
    }
    context.provenance().forget(&image)?;
    Ok(sweep_one(&context.state, &location, &image)?)
}

#[cfg(test)]
mod tests {
    use super::why_not;

    #[test]
    fn small_and_large_images_get_no_index() {
        assert_eq!(why_not(10, 10, 20), None);
        assert_eq!(why_not(20, 10, 20), None);
        assert!(why_not(9, 10, 20).unwrap().contains("index-min"));
        assert!(why_not(21, 10, 20).unwrap().contains("index-max"));
    }
}
