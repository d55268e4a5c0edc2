//! Garbage collection of the state directory: removes prepared images that are no longer needed.

use std::{fs, path::Path};

use burgeon_block::{Digest, Error, Result};
use burgeon_source::Location;

use crate::state::{built, files, images, paths::StateDir, prepared::Ready};

/// Removes the images prepared from `store` that are not in `keep`, used by a mount, or the base of
/// kept writes. Returns their number and their bytes.
pub fn sweep(
    state: &StateDir,
    store: &Location,
    keep: &[Digest],
    dry_run: bool,
) -> Result<(u64, u64)> {
    let (mut images, mut bytes) = (0, 0);
    if !dry_run {
        built::sweep(state, store, keep)?;
    }
    // Mapped images have only a cache here, which does not name its store.
    let mapped = images::all(state)?;
    let is_mapped = |digest: &Digest| mapped.iter().any(|image| image.digest == *digest);
    let folders = fs::read_dir(state.images())
        .map_err(|e| Error::io(format!("cannot list {}", state.images().display()), e))?;
    for folder in folders.flatten().map(|entry| entry.path()) {
        let name = folder.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        let Ok(digest) = name.parse::<Digest>() else { continue };
        if keep.contains(&digest) || !is_of(&folder, store) || is_mapped(&digest) {
            continue;
        }
        images += 1;
        bytes += allocated(&folder);
        if !dry_run {
            remove(state, &digest)?;
        }
    }
    Ok((images, bytes))
}

/// Removes the record of the image `digest`, and the image prepared from `store`. The caller knows
/// that nothing needs it.
pub fn sweep_one(state: &StateDir, store: &Location, digest: &Digest) -> Result<()> {
    built::sweep_one(state, store, digest)?;
    let mapped = images::all(state)?;
    if !is_of(&state.image(digest), store) || mapped.iter().any(|image| image.digest == *digest) {
        return Ok(());
    }
    remove(state, digest)
}

/// False if the image in `folder` was prepared from another store.
fn is_of(folder: &Path, store: &Location) -> bool {
    let ready = files::read_json::<Ready>(&folder.join("ready.json"));
    ready.map_or(true, |ready| ready.store == *store)
}

fn remove(state: &StateDir, digest: &Digest) -> Result<()> {
    files::remove_folder(&state.image(digest))?;
    files::remove_file(&state.profile(digest))
}

/// Bytes allocated to the files of a folder and of those in it.
fn allocated(folder: &Path) -> u64 {
    use std::os::unix::fs::MetadataExt;
    let of = |folder: &Path| fs::read_dir(folder).into_iter().flatten().flatten();
    let bytes = |file: fs::DirEntry| file.metadata().map_or(0, |metadata| metadata.blocks() * 512);
    let inner = of(folder).flat_map(|entry| of(&entry.path())).map(bytes).sum::<u64>();
    of(folder).map(bytes).sum::<u64>() + inner
}
