//! The images that this host has built from its own files, and the rights that their mounts get.
//!
//! ```text
//!   build DIRECTORY ──► built/<digest>   the attributes that the directory's own mount honours
//!   mount ──► resolve ──► digest ──► found there: as recorded; not found: nosuid,nodev
//! ```
//!
//! An image gives each file an owner and perhaps a set-user-ID bit. For a directory of this host
//! the kernel has enforced these; for an archive, a layer or an image of another host nothing has.
//! The record lies in this host's state directory and names a digest: neither a manifest nor a name
//! can claim to be built here, and an image from a registry with a recorded digest is the image
//! that was built here.
//!
//! Invariants (`crates/cli/tests/attributes.rs`): no record means `nosuid,nodev`; only a build
//! makes a record; an unreadable record counts as none.

use std::path::Path;

use burgeon_block::{Digest, Error, ErrorKind, Result};
use burgeon_image::builder::Honours;
use burgeon_source::Location;
use serde::{Deserialize, Serialize};

use crate::state::{
    attributes::{AttributesRequest, MountAttributes},
    files,
    paths::StateDir,
};

/// The version of [`BuiltRecord`] that this program writes and reads.
const FORMAT: u32 = 1;

/// Contents of `built/<digest>`.
#[derive(Serialize, Deserialize)]
struct BuiltRecord {
    format: u32,
    suid: bool,
    dev: bool,
    /// The store of the image: the record is useful as long as the image is there.
    store: Location,
}

/// Records that this host has built the image `digest` from its own files.
pub fn remember_built(
    state: &StateDir,
    store: &Location,
    digest: &Digest,
    honours: Honours,
) -> Result<()> {
    let Honours { suid, dev } = honours;
    let record = BuiltRecord { format: FORMAT, suid, dev, store: store.clone() };
    files::publish_json(&state.built(digest), &record)
}

/// The default attributes for mounts of the image `digest`.
pub fn honoured(state: &StateDir, digest: &Digest) -> Honours {
    match read(&state.built(digest)) {
        Ok(BuiltRecord { suid, dev, .. }) => Honours { suid, dev },
        // No record, or an unreadable one.
        Err(_) => Honours { suid: false, dev: false },
    }
}

/// The attributes of a mount of the image `digest`.
pub(crate) fn attributes(
    state: &StateDir,
    digest: &Digest,
    wanted: AttributesRequest,
) -> MountAttributes {
    let honours = honoured(state, digest);
    MountAttributes {
        suid: wanted.suid.unwrap_or(honours.suid),
        dev: wanted.dev.unwrap_or(honours.dev),
        others: wanted.others,
    }
}

/// Removes the records of images that were built into `store` and are not in `keep`.
pub(crate) fn sweep(state: &StateDir, store: &Location, keep: &[Digest]) -> Result<()> {
    let folder = state.all_built();
    let entries = std::fs::read_dir(&folder)
        .map_err(|e| Error::io(format!("cannot list {}", folder.display()), e))?;
    for entry in entries.flatten() {
        let name = entry.file_name();
        let digest = name.to_str().and_then(|name| name.parse::<Digest>().ok());
        if let Some(digest) = digest.filter(|digest| !keep.contains(digest)) {
            sweep_one(state, store, &digest)?;
        }
    }
    Ok(())
}

/// Removes the record of the image `digest` if it was built into `store`.
pub(crate) fn sweep_one(state: &StateDir, store: &Location, digest: &Digest) -> Result<()> {
    let path = state.all_built().join(digest.to_string());
    match read(&path).is_ok_and(|record| record.store == *store) {
        true => files::remove_file(&path),
        false => Ok(()),
    }
}

fn read(path: &Path) -> Result<BuiltRecord> {
    let record: BuiltRecord = files::read_json(path)?;
    if record.format == FORMAT {
        return Ok(record);
    }
    let what = format!("{} has the unknown format {}", path.display(), record.format);
    Err(Error::new(ErrorKind::UnsupportedFormat, what))
}

#[cfg(test)]
mod tests {
    use burgeon_block::Digest;
    use burgeon_image::builder::Honours;

    use super::{attributes, honoured, remember_built, sweep, sweep_one};
    use crate::state::{attributes::AttributesRequest, paths::StateDir};

    const NOTHING: Honours = Honours { suid: false, dev: false };

    #[test]
    fn only_images_built_here_are_honoured_and_only_as_far_as_their_source() {
        let temp = tempfile::tempdir().unwrap();
        let state = StateDir::open(temp.path()).unwrap();
        let store = state.store().into();
        let (own, stick, pulled) = (Digest::of(b"own"), Digest::of(b"stick"), Digest::of(b"x"));
        let honours = Honours { suid: true, dev: true };
        remember_built(&state, &store, &own, honours).unwrap();
        remember_built(&state, &store, &stick, NOTHING).unwrap();
        assert_eq!(honoured(&state, &own), honours);
        assert_eq!(honoured(&state, &stick), NOTHING);
        assert_eq!(honoured(&state, &pulled), NOTHING);
        let wanted = AttributesRequest { suid: Some(true), ..AttributesRequest::default() };
        let asked_for = attributes(&state, &pulled, wanted);
        assert!(asked_for.suid && !asked_for.dev);
        std::fs::write(state.built(&own), "{").unwrap();
        assert_eq!(honoured(&state, &own), NOTHING);
    }

    #[test]
    fn a_collection_forgets_only_images_missing_from_its_own_store() {
        let temp = tempfile::tempdir().unwrap();
        let state = StateDir::open(temp.path()).unwrap();
        let (here, there) = (state.store().into(), temp.path().join("there").into());
        let honours = Honours { suid: true, dev: true };
        let digests = [b"kept", b"gone", b"away"].map(|bytes| Digest::of(bytes));
        for (digest, store) in digests.iter().zip([&here, &here, &there]) {
            remember_built(&state, store, digest, honours).unwrap();
        }
        let honoured = || digests.map(|digest| honoured(&state, &digest).suid);
        sweep(&state, &here, &digests[..1]).unwrap();
        assert_eq!(honoured(), [true, false, true]);
        sweep_one(&state, &here, &digests[2]).unwrap();
        assert_eq!(honoured(), [true, false, true]);
        sweep_one(&state, &here, &digests[0]).unwrap();
        assert_eq!(honoured(), [false, false, true]);
    }
}
