//! The credentials for a mount's store, kept for every server that will serve the mount.
//!
//! ```text
//!   mounts/<id>/access.json    variables of the environment, secrets among them: mode 0600 in
//!                              folders of mode 0700, and gone with the mount
//! ```
//!
//! Invariant: no secret is in `mount.json`, in a message between processes after the request, in
//! the log, or on a command line.

use std::path::Path;

use burgeon_block::{Error, ErrorKind, Result};
use burgeon_source::{Access, Location};

use crate::state::files;

const FILE: &str = "access.json";

/// Keeps the part of `access` that concerns `store` in the mount's `folder`.
pub(crate) fn keep(folder: &Path, store: &Location, access: &Access) -> Result<()> {
    let access = access.for_location(store);
    if access.is_empty() {
        return Ok(());
    }
    files::publish_json(&folder.join(FILE), &access)
}

/// Adds the part of `access` that concerns `store`. `Invalid` if different credentials are kept for
/// stores of this kind: a mount has one set for all of them, and a mixture would be worse than
/// none.
pub(crate) fn add(folder: &Path, store: &Location, access: &Access) -> Result<()> {
    let known = kept(folder)?;
    let (own, more) = (known.for_location(store), access.for_location(store));
    if more.is_empty() || own == more {
        return Ok(());
    }
    if own.is_empty() {
        return files::publish_json(&folder.join(FILE), &known.and(more));
    }
    let message = format!(
        "the mount reads stores of the kind of {store} with other settings than this command's \
         ({}): use the same settings, or another mount",
        own.differing(&more).join(", ")
    );
    Err(Error::new(ErrorKind::Invalid, message))
}

/// The credentials kept by [`keep`] and [`add`].
pub(crate) fn kept(folder: &Path) -> Result<Access> {
    match files::read_json(&folder.join(FILE)) {
        Err(e) if e.kind() == ErrorKind::NotFound => Ok(Access::default()),
        access => access,
    }
}
