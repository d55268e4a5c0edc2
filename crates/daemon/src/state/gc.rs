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
    let folders = fs::read_dir(state.images())
        .map_err(|e| Error::io(format!("cannot list {}", state.images().display()), e))?;
    for folder in folders.flatten().map(|entry| entry.path()) {
        let name = folder.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        let Ok(digest) = name.parse::<Digest>() else { continue };
        let ready = files::read_json::<Ready>(&folder.join("ready.json"));
        let elsewhere = ready.is_ok_and(|ready| ready.store != *store);
        if keep.contains(&digest) || mapped.iter().any(|image| image.digest == digest) || elsewhere
        {
            continue;
        }
        images += 1;
        bytes += allocated(&folder);
        if !dry_run {
            files::remove_folder(&folder)?;
            files::remove_file(&state.profile(&digest))?;
        }
    }
    Ok((images, bytes))
}

/// Bytes allocated to the files of a folder and of those in it.
fn allocated(folder: &Path) -> u64 {
    use std::os::unix::fs::MetadataExt;
    let of = |folder: &Path| fs::read_dir(folder).into_iter().flatten().flatten();
    let bytes = |file: fs::DirEntry| file.metadata().map_or(0, |metadata| metadata.blocks() * 512);
    let inner = of(folder).flat_map(|entry| of(&entry.path())).map(bytes).sum::<u64>();
    of(folder).map(bytes).sum::<u64>() + inner
}
