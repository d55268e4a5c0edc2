//! Profiles of images on this host: where they lie when the store is only read.

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

/// The profile that lies in the file `path`, if it is there.
pub fn read_profile(path: &Path) -> Result<Option<Profile>> {
    read_opened(path, File::open(path))
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
        Error::with_source(e.kind(), format!("{} is no profile to use", path.display()), e)
    })?;
    Ok(Some(profile))
}

/// Writes `profile` to the file `path`, whole and durably.
pub(crate) fn write_profile(path: &Path, profile: &Profile) -> Result<()> {
    files::publish(path, &profile.encode()?)
}

/// Keeps `profile` on this host, because its image's store cannot be written to.
pub fn keep_profile(state: &StateDir, profile: &Profile) -> Result<()> {
    write_profile(&state.profile(&profile.image), profile)
}

/// What [`keep_profile`] kept of `image`.
pub fn kept_profile(state: &StateDir, image: &Digest) -> Result<Option<Profile>> {
    let path = state.profile(image);
    read_opened(&path, files::open(&path, File::options().read(true)))
}

/// The file in a mount's folder that says that a profile of its image was recorded since.
const RECORDED: &str = "recorded";

/// Notes whether the image of mount `id` has got a profile since it was mounted. The image's store is asked
/// by the next mount, and may be far away; whoever wants to know it before looks here.
pub fn note_recorded(state: &StateDir, id: MountId, is_there: bool) -> Result<()> {
    let path = state.mount(id).join(RECORDED);
    match is_there {
        true => files::publish(&path, b""),
        false => files::remove_file(&path),
    }
}

/// Whether [`note_recorded`] has noted that of mount `id`.
pub fn was_recorded(state: &StateDir, id: MountId) -> bool {
    state.mount(id).join(RECORDED).is_file()
}

/// The images of which this host keeps a profile.
pub fn kept_profiles(state: &StateDir) -> Vec<Digest> {
    let entries = std::fs::read_dir(state.profiles()).into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect()
}

/// Removes what [`keep_profile`] kept of `image`; whether there was anything.
pub fn forget_profile(state: &StateDir, image: &Digest) -> Result<bool> {
    let path = state.profile(image);
    let there = path.exists();
    files::remove_file(&path)?;
    Ok(there)
}

/// What `source` leads to, as lazy addresses in the order in which they are to be brought: what
/// this host has recorded, then what the store has. `None` where there is neither.
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
