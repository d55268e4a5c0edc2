//! How a mount gets its profile: from a file of the user's, from this host, or from the store, which
//! is asked while the mount is being made.

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

/// Where the server is to look for the profile that `request` asks for. A file of the user's is
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

/// The store's profile of an image, while it is fetched: beside the manifest, because the way to the store
/// costs time.
pub(crate) struct Fetching(Option<Receiver<Option<Profile>>>);

impl Fetching {
    /// Begins to fetch it, if `request` asks for it.
    pub(crate) fn begin(request: &ProfileRequest, store: &Store, image: Digest) -> Self {
        if *request != ProfileRequest::Auto {
            return Self(None);
        }
        let (send, receive) = mpsc::channel();
        let store = store.clone();
        // What goes wrong is left to the server, which asks again and says so.
        let fetch = move || load_profile(&store, &image).map(|profile| send.send(profile));
        let begun = thread::Builder::new().spawn(fetch);
        Self(begun.is_ok().then_some(receive))
    }

    /// `source`, for which the store need not be asked again if what it has is here by now: that is
    /// kept in the mount's `folder`.
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

    /// What `fetching` leads to, without the store.
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
    fn what_has_been_fetched_is_not_asked_for_again() {
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
        // What cannot be used is left to the server, which says so.
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
