//! Finds the profile of a mount: a file of the user's, one kept on this host, or the store's, which
//! is fetched while the mount is being made.

use std::{
    path::{Path, PathBuf},
    sync::mpsc::{self, Receiver},
    thread,
};

use burgeon_block::{Digest, Error, ErrorKind, Result};
use burgeon_image::{Profile, load_profile};
use burgeon_source::Store;

use crate::{
    ipc::protocol::ProfileRequest,
    state::{
        paths::StateDir,
        profile::{read_profile, write_profile},
        record::ProfileSource,
    },
};

/// The place where the server finds the profile that `request` asks for. A file of the user's is
/// checked now, and copied into the mount's `folder`.
pub(crate) fn source(
    state: &StateDir,
    request: &ProfileRequest,
    image: Digest,
    folder: &Path,
) -> Result<Option<ProfileSource>> {
    let (file, auto): (PathBuf, bool) = match request {
        ProfileRequest::None => return Ok(None),
        ProfileRequest::Auto => (state.profile(&image), true),
        ProfileRequest::File(path) => {
            let missing = || {
                let what = format!("there is no profile {}", path.display());
                Error::new(ErrorKind::NotFound, what)
            };
            let profile = read_profile(path)?.ok_or_else(missing)?;
            if profile.image != image {
                let what = format!(
                    "{} is the profile of another image, {}: record one of this image, or build it \
                     with `burgeon build --profile`",
                    path.display(),
                    profile.image
                );
                return Err(Error::new(ErrorKind::Invalid, what));
            }
            let copy = folder.join("profile");
            write_profile(&copy, &profile)?;
            (copy, false)
        }
    };
    Ok(Some(ProfileSource { image: image.into(), file, auto, stored: None }))
}

/// An image's profile in the store, fetched concurrently with the manifest to save a round trip.
pub(crate) struct Fetching(Option<Receiver<Option<Profile>>>);

impl Fetching {
    /// Starts the fetch if `request` asks for a profile.
    pub(crate) fn begin(request: &ProfileRequest, store: &Store, image: Digest) -> Self {
        if *request != ProfileRequest::Auto {
            return Self(None);
        }
        let (send, receive) = mpsc::channel();
        let store = store.clone();
        // Errors are left to the server, which fetches again and reports them.
        let fetch = move || load_profile(&store, &image).map(|profile| send.send(profile));
        let begun = thread::Builder::new().spawn(fetch);
        Self(begun.is_ok().then_some(receive))
    }

    /// Returns `source`, or the profile from the store if it has arrived by now: it is then kept in
    /// the mount's `folder`, and the store is not asked again.
    pub(crate) fn arrived(&self, source: ProfileSource, folder: &Path) -> Result<ProfileSource> {
        let fetched = self.0.as_ref().and_then(|receive| receive.try_recv().ok());
        let Some(fetched) = fetched.filter(|_| source.auto) else { return Ok(source) };
        let stored = match fetched {
            Some(profile) => {
                let path = folder.join("profile.stored");
                write_profile(&path, &profile)?;
                Some(path)
            }
            None => None,
        };
        Ok(ProfileSource { auto: false, stored, ..source })
    }
}

#[cfg(test)]
mod tests {
    use std::{fs, thread};

    use burgeon_block::{ByteRange, Digest};
    use burgeon_image::{Profile, ProfileRead, load_profile, publish_profile};
    use burgeon_source::{Directory, Store};

    use super::{Fetching, source};
    use crate::{
        ipc::protocol::ProfileRequest,
        state::{paths::StateDir, profile::load},
    };

    /// The result of `fetching`, without a store.
    fn arrives(fetching: &Fetching, state: &StateDir, image: Digest) -> Option<Vec<ByteRange>> {
        let folder = tempfile::tempdir().unwrap();
        let none = Store::from(Directory::create(folder.path().join("empty")).unwrap());
        let source = source(state, &ProfileRequest::Auto, image, folder.path()).unwrap().unwrap();
        loop {
            let arrived = fetching.arrived(source.clone(), folder.path()).unwrap();
            if !arrived.auto {
                return load(&arrived, &none).unwrap();
            }
            thread::yield_now();
        }
    }

    #[test]
    fn a_fetched_profile_is_not_fetched_again() {
        let folder = tempfile::tempdir().unwrap();
        let state = StateDir::open(&folder.path().join("state")).unwrap();
        let store = Directory::create(folder.path().join("store")).unwrap();
        fs::create_dir(folder.path().join("store/packs")).unwrap();
        let (image, other) = (Digest::of(b"image"), Digest::of(b"other"));
        let read = ProfileRead { file: 0, offset: 0, address: 1 << 40, len: 4096, age: 0 };
        let profile = Profile { image, runs: 1, files: vec![b"/a".to_vec()], reads: vec![read] };
        publish_profile(&store, &profile).unwrap();
        let store = Store::from(store);
        assert_eq!(load_profile(&store, &image).unwrap(), Some(profile));
        let begin = |image| Fetching::begin(&ProfileRequest::Auto, &store, image);
        assert_eq!(arrives(&begin(image), &state, image), Some(vec![read.addresses()]));
        assert_eq!(arrives(&begin(other), &state, other), None);
        // An unusable profile is left to the server, which reports it.
        let path = folder.path().join("store/profiles").join(image.to_string());
        fs::write(&path, "damaged").unwrap();
        let fetching = begin(image);
        let asked = source(&state, &ProfileRequest::Auto, image, folder.path()).unwrap().unwrap();
        let receive = fetching.0.as_ref().unwrap();
        assert!(receive.recv().is_err());
        assert!(fetching.arrived(asked.clone(), folder.path()).unwrap().auto);
        assert!(load(&asked, &store).is_err());
    }
}
