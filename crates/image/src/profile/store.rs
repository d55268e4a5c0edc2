//! Storage of profiles: `profiles/<digest of the image's manifest>`, next to the image.

use burgeon_block::{Digest, Error, ErrorKind, ObjectId, ObjectKind, ObjectStore, Result};

use super::{PROFILE_MAX, Profile};
use crate::corrupt;

/// The object for the profile of `image`.
pub fn profile_object(image: &Digest) -> Result<ObjectId> {
    ObjectKind::Profile.object(image)
}

/// The profile of `image`, if `store` has one.
pub fn load_profile(store: &impl ObjectStore, image: &Digest) -> Result<Option<Profile>> {
    let object = profile_object(image)?;
    let bytes = match store.get(&object, PROFILE_MAX) {
        Ok(bytes) => bytes,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error),
    };
    let profile = Profile::decode(&bytes).map_err(|error| {
        let what = format!("cannot use {object}: remove it with `burgeon profile rm`");
        Error::with_source(error.kind(), what, error)
    })?;
    if profile.image != *image {
        return Err(corrupt(format!("{object} is the profile of another image")));
    }
    Ok(Some(profile))
}

/// Publishes `profile`, replacing the existing one of its image.
pub fn publish_profile(store: &impl ObjectStore, profile: &Profile) -> Result<()> {
    let bytes = profile.encode()?;
    let _lease = store.begin_write()?;
    store.publish(&profile_object(&profile.image)?, &bytes)
}

/// Removes the profile of `image`, if there is one; returns whether there was.
pub fn remove_profile(store: &impl ObjectStore, image: &Digest) -> Result<bool> {
    let object = profile_object(image)?;
    let there = store.len(&object)?.is_some();
    store.remove(&object)?;
    Ok(there)
}

/// The images with a profile in `store`.
pub fn list_profiles(store: &impl ObjectStore) -> Result<Vec<Digest>> {
    let objects = store.list("profiles")?;
    Ok(objects.iter().filter_map(|object| object.digest(ObjectKind::Profile)).collect())
}
