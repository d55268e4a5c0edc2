//! Profiles of images that are kept on this host, because the store is read-only.

use std::{
    fs::File,
    io::{self, Read},
    path::Path,
};

use burgeon_block::{ByteRange, Digest, Error, Result};
use burgeon_image::{PROFILE_MAX, Profile, load_profile};
use burgeon_source::Store;

use crate::{
    id::MountId,
    state::{files, paths::StateDir, record::ProfileSource},
};

/// Reads the profile in the file `path`, if it exists. `path` may be anywhere.
pub fn read_profile(path: &Path) -> Result<Option<Profile>> {
    let opened = files::open_at_once(path).and_then(|file| match file.metadata()?.is_file() {
        true => Ok(file),
        false => Err(io::Error::new(io::ErrorKind::InvalidData, "it is not a regular file")),
    });
    read_opened(path, opened)
}

fn read_opened(path: &Path, opened: io::Result<File>) -> Result<Option<Profile>> {
    let failed = |e| Error::io(format!("cannot read the profile {}", path.display()), e);
    let file = match opened {
        Ok(file) => file,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(failed(e)),
    };
    let mut bytes = Vec::new();
    file.take(PROFILE_MAX + 1).read_to_end(&mut bytes).map_err(failed)?;
    let profile = Profile::decode(&bytes).map_err(|e| {
        Error::with_source(
            e.kind(),
            format!("{} is not a profile that can be used", path.display()),
            e,
        )
    })?;
    Ok(Some(profile))
}

/// Writes `profile` to the file `path`, atomically and durably.
pub(crate) fn write_profile(path: &Path, profile: &Profile) -> Result<()> {
    files::publish(path, &profile.encode()?)
}

/// Keeps `profile` on this host, because its image's store is read-only.
pub fn keep_profile(state: &StateDir, profile: &Profile) -> Result<()> {
    write_profile(&state.profile(&profile.image), profile)
}

/// The profile of `image` kept by [`keep_profile`].
pub fn kept_profile(state: &StateDir, image: &Digest) -> Result<Option<Profile>> {
    let path = state.profile(image);
    read_opened(&path, files::open(&path, File::options().read(true)))
}

/// A file in a mount's folder: a profile of its image was recorded since the mount.
const RECORDED: &str = "recorded";

/// Notes that the image of mount `id` has got a profile since the mount, or has none again. Only
/// the next mount asks the image's store, which may be far away; other readers look here.
pub fn note_recorded(state: &StateDir, id: MountId, is_there: bool) -> Result<()> {
    let path = state.mount(id).join(RECORDED);
    match is_there {
        true => files::publish(&path, b""),
        false => files::remove_file(&path),
    }
}

/// The note made by [`note_recorded`] for mount `id`.
pub fn was_recorded(state: &StateDir, id: MountId) -> bool {
    state.mount(id).join(RECORDED).is_file()
}

/// The images whose profiles are kept on this host.
pub fn kept_profiles(state: &StateDir) -> Vec<Digest> {
    let entries = std::fs::read_dir(state.profiles()).into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect()
}

/// Removes the profile of `image` kept by [`keep_profile`]; false if there was none.
pub fn forget_profile(state: &StateDir, image: &Digest) -> Result<bool> {
    let path = state.profile(image);
    let there = path.exists();
    files::remove_file(&path)?;
    Ok(there)
}

/// Loads the profile of `source` as lazy addresses in prefetch order: those of the
/// profile recorded on this host, then those of the store's. `None` if there is neither.
pub(crate) fn load(source: &ProfileSource, store: &Store) -> Result<Option<Vec<ByteRange>>> {
    let image = source.image.0;
    let kept = read_profile(&source.file)?.filter(|profile| profile.image == image);
    let stored = match &source.stored {
        Some(stored) => read_profile(stored)?.filter(|profile| profile.image == image),
        None if source.auto => load_profile(store, &image)?,
        None => None,
    };
    if kept.is_none() && stored.is_none() {
        return Ok(None);
    }
    Ok(Some([kept, stored].iter().flatten().flat_map(Profile::addresses).collect()))
}

#[cfg(test)]
mod tests {
    use rustix::fs::{CWD, FileType, Mode, mknodat};

    use super::read_profile;

    #[test]
    fn a_fifo_is_no_profile_and_nobody_waits_for_its_writer() {
        let temp = tempfile::tempdir().unwrap();
        let fifo = temp.path().join("fifo");
        mknodat(CWD, &fifo, FileType::Fifo, Mode::from_raw_mode(0o600), 0).unwrap();
        for path in [fifo.as_path(), temp.path(), "/dev/zero".as_ref()] {
            let error = read_profile(path).unwrap_err();
            assert!(format!("{error:?}").contains("not a regular file"), "{error:?}");
        }
        assert!(read_profile(&temp.path().join("missing")).unwrap().is_none());
    }
}
