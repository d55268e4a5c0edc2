//! Prepares images for mounting, in processes of their own.
//!
//! ```text
//!   mount, map, pull ──► prepare ──► lock images/<digest>/lock ──► ready.json is valid? done
//!                                         │ no
//!                                         ▼
//!                        burgeon __prepare (process): sandbox; manifest ──► seed, map, ready.json
//! ```
//!
//! Invariants: concurrent requests prepare an image once; untrusted manifests are parsed in the
//! child alone, in a sandbox and in bounded memory.

mod mend;
mod process;

use std::path::Path;

use burgeon_block::{Digest, Result};
use burgeon_source::{Access, Location};

pub(crate) use self::mend::{mend, mend_kept};
pub use self::process::prepare_process;
use self::process::{PreparedFiles, run_process};
use crate::state::{
    complete,
    files::{self, Lock, make_folder},
    paths::StateDir,
    prepared::{Prepared, is_complete, is_ready, keep_file, take_doubt},
    writes::{self, WritesRecord},
};

/// Prepares the image `digest` of `store` with a virtual area of `virtual_bytes` (0: none), unless
/// that has been done. Calls `mapped` as soon as the address map exists: prefetching can start
/// while the rest is being made.
pub(crate) fn prepare(
    state: &StateDir,
    store: &Location,
    access: &Access,
    digest: Digest,
    virtual_bytes: u64,
    mapped: impl FnOnce(&Path),
) -> Result<Prepared> {
    let mut mapped = Some(mapped);
    let mut folder = state.image(&digest);
    if virtual_bytes > 0 {
        make_folder(&folder)?;
        folder.push(format!("virtual-{virtual_bytes}"));
    }
    if take_doubt(&folder) {
        check_again(store, access, &digest, &folder, PreparedFiles::Mended { virtual_bytes });
    }
    if !is_ready(&folder, store) {
        make_folder(&folder)?;
        // Two concurrent mounts of a new image prepare it once.
        let _lock = Lock::take(&folder.join("lock"))?;
        if !is_ready(&folder, store) {
            let map = folder.join("map");
            let on_map = || mapped.take().into_iter().for_each(|mapped| mapped(&map));
            run_process(
                store,
                access,
                &digest,
                &folder,
                PreparedFiles::Seed { virtual_bytes },
                on_map,
            )?;
        }
    }
    if let Some(mapped) = mapped {
        mapped(&folder.join("map"));
    }
    Ok(Prepared { folder, digest })
}

/// The same image prepared with the checksums of a complete copy of its data, if there are any;
/// `base` without.
pub(crate) fn with_sums(
    state: &StateDir,
    store: &Location,
    access: &Access,
    base: Prepared,
) -> Prepared {
    if !complete::has_sums(state, &base.digest) {
        return base;
    }
    let folder = complete::folder(state, &base.digest);
    if take_doubt(&folder) {
        let mended = PreparedFiles::Mended { virtual_bytes: 0 };
        check_again(store, access, &base.digest, &folder, mended);
    }
    let wanted = PreparedFiles::Seed { virtual_bytes: 0 };
    let prepare = || {
        let _lock = Lock::take(&folder.join("lock"))?;
        match is_ready(&folder, store) {
            true => Ok(()),
            false => run_process(store, access, &base.digest, &folder, wanted, || {}),
        }
    };
    match prepare() {
        Ok(()) => Prepared { folder, ..base },
        Err(error) => {
            tracing::warn!(%error, "the mount has no checksums in btrfs");
            base
        }
    }
}

/// Has the files of a doubted folder checked, and made again if they are damaged. If the image's
/// store is away, they serve as well as before.
fn check_again(
    store: &Location,
    access: &Access,
    digest: &Digest,
    folder: &Path,
    wanted: PreparedFiles,
) {
    let checked = Lock::take(&folder.join("lock"))
        .and_then(|_lock| run_process(store, access, digest, folder, wanted, || {}));
    match checked {
        Ok(()) => tracing::warn!(folder = %folder.display(), "a damaged map was made again"),
        Err(error) => {
            let folder = folder.display();
            tracing::error!(%folder, %error, "cannot make a damaged map again");
        }
    }
}

/// Fetches everything needed to mount the image `digest` of `store`, so that the next mount need
/// not.
pub fn make_ready(
    state: &StateDir,
    store: &Location,
    access: &Access,
    digest: Digest,
) -> Result<()> {
    prepare(state, store, access, digest, 0, |_| {}).map(drop)
}

/// Puts the address map of the image `digest` of `store` into `folder`, durably.
pub(crate) fn keep_map(
    state: &StateDir,
    store: &Location,
    access: &Access,
    digest: Digest,
    folder: &Path,
) -> Result<()> {
    let prepared = state.image(&digest);
    // Its cache will be there, too.
    make_folder(&prepared)?;
    let _lock = Lock::take(&prepared.join("lock"))?;
    if is_ready(&prepared, store) {
        return keep_file(&prepared, folder, "map")
            .and_then(|()| files::sync_parent(&folder.join("map")));
    }
    run_process(store, access, &digest, folder, PreparedFiles::Map, || {})
}

/// The files that the named writes of `record` are based on. Missing or truncated files are
/// recreated from the image in `store`.
pub(crate) fn kept(
    state: &StateDir,
    store: &Location,
    access: &Access,
    record: &WritesRecord,
) -> Result<Prepared> {
    let folder = writes::folder(state, &record.name);
    let is_doubted = take_doubt(&folder);
    if !is_complete(&folder, record) {
        mend_kept(state, store, access, record)?;
    } else if is_doubted && let Err(error) = mend_kept(state, store, access, record) {
        // They serve as well as before.
        tracing::error!(writes = record.name, %error, "cannot make a damaged map again");
    }
    Ok(Prepared { folder, digest: record.manifest.0 })
}
