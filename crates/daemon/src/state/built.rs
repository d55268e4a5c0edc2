//! The images that this host has built from its own files, and what their mounts may therefore do.
//!
//! ```text
//!   build DIRECTORY ──► built/<digest>   what the mount honoured that the directory lies on
//!   mount ──► resolve ──► digest ──► found there: as recorded; not found: nosuid,nodev
//! ```
//!
//! An image says of each file who owns it and with whose rights it runs. Of a directory of this host the
//! kernel has vouched for that; of an archive, a layer or an image of another host nobody has. The
//! record is this host's, in its state directory, and about a digest: neither a manifest nor a name
//! can claim to be built here, and an image that comes back from a registry with the digest of one
//! that was built here is that very image.
//!
//! Invariants (`crates/cli/tests/attributes.rs`): no record means `nosuid,nodev`; a record is made
//! by a build, and by nothing else; one that cannot be read counts as none.

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

/// The version of [`Record`] that this program writes and reads.
const FORMAT: u32 = 1;

/// What `built/<digest>` holds.
#[derive(Serialize, Deserialize)]
struct Record {
    format: u32,
    suid: bool,
    dev: bool,
    /// Where the image was put: the record is of use as long as it is there.
    store: Location,
}

/// Remembers that this host has built the image `digest` from its own files.
pub fn remember_built(
    state: &StateDir,
    store: &Location,
    digest: &Digest,
    honours: Honours,
) -> Result<()> {
    let Honours { suid, dev } = honours;
    let record = Record { format: FORMAT, suid, dev, store: store.clone() };
    files::publish_json(&state.built(digest), &record)
}

/// What mounts of the image `digest` honour if nobody says otherwise.
pub fn honoured(state: &StateDir, digest: &Digest) -> Honours {
    match read(&state.built(digest)) {
        Ok(Record { suid, dev, .. }) => Honours { suid, dev },
        // None, or none that can be read.
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

/// Forgets what was built into `store` and is not in `keep`.
pub(crate) fn sweep(state: &StateDir, store: &Location, keep: &[Digest]) -> Result<()> {
    let folder = state.all_built();
    let entries = std::fs::read_dir(&folder)
        .map_err(|e| Error::io(format!("cannot list {}", folder.display()), e))?;
    for entry in entries.flatten() {
        let name = entry.file_name();
        let digest = name.to_str().and_then(|name| name.parse::<Digest>().ok());
        let is_here = |record: Record| record.store == *store;
        let needed = digest.is_none_or(|digest| keep.contains(&digest));
        if !needed && read(&entry.path()).is_ok_and(is_here) {
            files::remove_file(&entry.path())?;
        }
    }
    Ok(())
}

fn read(path: &Path) -> Result<Record> {
    let record: Record = files::read_json(path)?;
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

    use super::{attributes, honoured, remember_built, sweep};
    use crate::state::{attributes::AttributesRequest, paths::StateDir};

    const NOTHING: Honours = Honours { suid: false, dev: false };

    #[test]
    fn only_what_was_built_here_is_honoured_and_only_as_far_as_its_source_was() {
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
    fn a_collection_forgets_what_is_gone_from_its_store_alone() {
        let temp = tempfile::tempdir().unwrap();
        let state = StateDir::open(temp.path()).unwrap();
        let (here, there) = (state.store().into(), temp.path().join("there").into());
        let honours = Honours { suid: true, dev: true };
        let digests = [b"kept", b"gone", b"away"].map(|bytes| Digest::of(bytes));
        for (digest, store) in digests.iter().zip([&here, &here, &there]) {
            remember_built(&state, store, digest, honours).unwrap();
        }
        sweep(&state, &here, &digests[..1]).unwrap();
        assert_eq!(digests.map(|digest| honoured(&state, &digest).suid), [true, false, true]);
    }
}
