//! Recreates damaged or lost files of a prepared image: all of them can be derived from the image.
//!
//! ```text
//!   images/<digest>/…   a process checks them, and prepares the image once more if necessary
//!   writes/<name>/      the same, then: digests as in the record? ─► linked into the folder
//! ```
//!
//! Files are replaced and never changed, because other processes may have mapped them.

use std::{fs, path::Path};

use burgeon_block::{Digest, Error, ErrorKind, Result};
use burgeon_source::{Access, Location};

use super::process::{PreparedFiles, run_process};
use crate::state::{
    access, complete,
    files::{self, Lock, make_folder},
    paths::StateDir,
    prepared::{KEPT, digest_file, has_lengths, keep_file, len_of, read_info},
    record::MountRecord,
    writes::{self, WritesRecord},
};

/// Recreates the damaged files that the mount of `record` is served from; false if none was
/// damaged. `Corrupt` if preparing the image gives other files than those that named writes are
/// based on.
pub(crate) fn mend(state: &StateDir, record: &MountRecord) -> Result<bool> {
    let attach = &record.attach;
    let access = access::kept(&state.mount(attach.id))?;
    if let Ok(name) = attach.seed.strip_prefix(state.writes()) {
        let Some(record) = writes::find(state, &name.to_string_lossy())? else { return Ok(false) };
        return mend_kept(state, &attach.store, &access, &record);
    }
    let virtual_bytes = attach.seed.file_name().and_then(|name| name.to_str());
    let virtual_bytes = virtual_bytes.and_then(|name| name.strip_prefix("virtual-"));
    let virtual_bytes = virtual_bytes.and_then(|bytes| bytes.parse().ok()).unwrap_or(0);
    let before = inode(&attach.seed.join("map"));
    let files = PreparedFiles::Mended { virtual_bytes };
    prepare_in(&attach.seed, &attach.store, &access, &record.digest.0, files)?;
    Ok(before != inode(&attach.seed.join("map")))
}

/// Makes the files of a prepared image in `folder`.
fn prepare_in(
    folder: &Path,
    store: &Location,
    access: &Access,
    digest: &Digest,
    files: PreparedFiles,
) -> Result<()> {
    make_folder(folder)?;
    let _lock = Lock::take(&folder.join("lock"))?;
    run_process(store, access, digest, folder, files, || {})
}

/// Recreates the damaged files that named writes are based on.
pub(crate) fn mend_kept(
    state: &StateDir,
    store: &Location,
    access: &Access,
    record: &WritesRecord,
) -> Result<bool> {
    let folder = writes::folder(state, &record.name);
    if is_kept(&folder, record) {
        return Ok(false);
    }
    let mut image = state.image(&record.manifest.0);
    make_folder(&image)?;
    if record.virtual_bytes > 0 {
        image.push(format!("virtual-{}", record.virtual_bytes));
    }
    let mut images = vec![image];
    if record.virtual_bytes == 0 && complete::has_sums(state, &record.manifest.0) {
        images.push(complete::folder(state, &record.manifest.0));
    }
    // The digests find damage that the first attempt misses: changed bytes of the template.
    let virtual_bytes = record.virtual_bytes;
    let ways = [PreparedFiles::Mended { virtual_bytes }, PreparedFiles::Seed { virtual_bytes }];
    for (image, needed) in images.iter().flat_map(|image| ways.map(|way| (image, way))) {
        prepare_in(image, store, access, &record.manifest.0, needed)?;
        if is_base(image, record)? {
            KEPT.iter().try_for_each(|file| keep_file(image, &folder, file))?;
            files::sync_parent(&folder.join("map"))?;
            return Ok(true);
        }
    }
    let what = format!(
        "files in {} are damaged, and this version makes other files of the image {} than the \
         version that made the writes: restore the folder from a backup",
        folder.display(),
        record.image
    );
    Err(Error::new(ErrorKind::Corrupt, what))
}

/// True if all files that named writes are based on are unchanged.
fn is_kept(folder: &Path, record: &WritesRecord) -> bool {
    len_of(&folder.join("manifest")) > 0
        && read_info(folder).is_ok()
        && is_base(folder, record).unwrap_or(false)
}

/// True if `folder` has the template and the map that named writes are based on.
fn is_base(folder: &Path, record: &WritesRecord) -> Result<bool> {
    if !has_lengths(folder, record) {
        return Ok(false);
    }
    let (map, _) = digest_file(&folder.join("map"))?;
    let (template, _) = digest_file(&folder.join("seed"))?;
    Ok(map == record.map_digest.0 && template == record.template_digest.0)
}

fn inode(file: &Path) -> Option<u64> {
    use std::os::unix::fs::MetadataExt;
    fs::metadata(file).ok().map(|metadata| metadata.ino())
}
