//! This host's references into a store, which protect objects from every collector.
//!
//! ```text
//!   mounts/<id>/needs.json ──┐
//!   writes/*/record.json ────┼─► roots/<host> in the store     read by every collection there
//!   */area/images/<digest>/ ─┘
//! ```
//!
//! Invariants: a mount writes its `needs.json` before it asks for its manifest to be kept, and asks
//! for that before it reads anything from the store; so does `images.rs` for mapped images. Only a
//! collection of this host shortens the record, and it counts all of these. A damaged record is
//! written anew from them. The lock is one of this store: a store that does not answer, and keeps
//! its lock, blocks no mount from another one.

use std::{collections::BTreeSet, fs, os::unix::fs::MetadataExt, path::PathBuf};

use burgeon_block::{Digest, Error, ErrorKind, ObjectStore, Result};
use burgeon_image::catalog;
use burgeon_source::{Location, Store};
use serde::{Deserialize, Serialize};

use crate::{
    id::{DigestText, MountId},
    state::{
        files::{self, Lock},
        images,
        paths::StateDir,
        writes,
    },
};

/// The references of one mount.
#[derive(Serialize, Deserialize)]
struct Needs {
    store: Location,
    manifest: DigestText,
}

/// Makes `store` keep `manifest` for the mount `id` from now on. Returns a note for the user if the
/// store cannot record that; nothing is recorded if `store` is `None`. `NotFound` if the manifest
/// was collected meanwhile.
pub(crate) fn require(
    state: &StateDir,
    location: &Location,
    store: Option<&Store>,
    manifest: &Digest,
    id: MountId,
) -> Result<Option<String>> {
    let needs = Needs { store: location.clone(), manifest: (*manifest).into() };
    files::publish_json(&state.mount(id).join("needs.json"), &needs)?;
    let Some(store) = store else {
        return Ok(Some(unknown("it was not asked")));
    };
    announce(state, location, store, manifest)
}

fn unknown(why: impl std::fmt::Display) -> String {
    format!(
        "the store does not know that this host needs the image, so its data may be collected: {why}"
    )
}

/// Makes `store` keep `manifest`. The caller has recorded the need on this host already.
pub(crate) fn announce(
    state: &StateDir,
    location: &Location,
    store: &Store,
    manifest: &Digest,
) -> Result<Option<String>> {
    if let Err(read_only) = store.check_writable() {
        // An object that a registry names by its digest can only be removed by the registry.
        let known = matches!(store, Store::Artifact(_));
        return Ok((!known).then(|| unknown(read_only)));
    }
    let published = {
        let host = host(state)?;
        let _lock = lock(state, location)?;
        let mut known = match recorded(store, &host)? {
            Some(known) if known.contains(manifest) => return Ok(None),
            Some(known) => known,
            None => needed(state, location, store)?,
        };
        known.insert(*manifest);
        publish(store, &host, &known)
    };
    // Checked after the reference is recorded: the manifest could have been collected before.
    if store.len(&catalog::manifest_object(manifest)?)?.is_none() {
        return Err(Error::new(
            ErrorKind::NotFound,
            format!("the manifest {manifest} is no longer in the store: build the image again"),
        ));
    }
    Ok(published.err().map(unknown))
}

/// Records the references of this host into `store`, and returns them: the manifests of every mount
/// and of all kept writes.
pub fn refresh(state: &StateDir, location: &Location, store: &Store) -> Result<Vec<Digest>> {
    store.check_writable()?;
    // A host without a name has no references on record; so a full disk does not prevent a
    // collection.
    if known_host(state)?.is_none() && needed(state, location, store)?.is_empty() {
        return Ok(Vec::new());
    }
    let host = host(state)?;
    let _lock = lock(state, location)?;
    let needed = needed(state, location, store)?;
    if recorded(store, &host)?.as_ref() != Some(&needed) {
        publish(store, &host, &needed)?;
    }
    Ok(needed.into_iter().collect())
}

/// A unique name for this state directory: the host's name and some random digits.
fn host(state: &StateDir) -> Result<String> {
    if let Some(host) = known_host(state)? {
        return Ok(host);
    }
    let _lock = Lock::take(&state.root().join("roots.lock"))?;
    if let Some(host) = known_host(state)? {
        return Ok(host);
    }
    let name: String = crate::host::system::host_name()
        .chars()
        .filter(|c| c.is_ascii_alphanumeric() || *c == '-')
        .take(32)
        .collect();
    let host = format!("{name}-{}", MountId::random()?);
    files::publish_json(&host_id(state), &host)?;
    Ok(host)
}

/// The name, if there is one yet: it is assigned with the first reference.
pub fn known_host(state: &StateDir) -> Result<Option<String>> {
    match files::read_json(&host_id(state)) {
        Ok(host) => Ok(Some(host)),
        Err(e) if e.kind() == ErrorKind::NotFound => Ok(None),
        Err(e) => Err(e),
    }
}

fn host_id(state: &StateDir) -> PathBuf {
    state.root().join("host-id")
}

/// Locks this host's record in one store.
fn lock(state: &StateDir, location: &Location) -> Result<Lock> {
    Lock::take(&lock_path(state, location)?)
}

/// The same for each path of a folder.
fn lock_path(state: &StateDir, location: &Location) -> Result<PathBuf> {
    let store = match location {
        Location::Folder(path) => {
            let folder = fs::metadata(path)
                .map_err(|e| Error::io(format!("cannot look at {}", path.display()), e))?;
            format!("{:x}-{:x}", folder.dev(), folder.ino())
        }
        _ => Digest::of(location.to_string().as_bytes()).to_string(),
    };
    Ok(state.root().join(format!("roots-{store}.lock")))
}

/// The references that the store has on record for `host`; `None` if the record is damaged.
fn recorded(store: &Store, host: &str) -> Result<Option<BTreeSet<Digest>>> {
    match catalog::read_host_roots(store, host) {
        Ok(Some(record)) => Ok(Some(record.digests()?.into_iter().collect())),
        Ok(None) => Ok(Some(BTreeSet::new())),
        Err(error) if error.kind() == ErrorKind::Corrupt => {
            tracing::warn!(host, %error, "a host's record of references in a store is written anew");
            Ok(None)
        }
        Err(error) => Err(error),
    }
}

/// Publishes the references. A missing manifest is ignored here: its user will report it.
fn publish(store: &Store, host: &str, needed: &BTreeSet<Digest>) -> Result<()> {
    let needed: Vec<_> = needed.iter().copied().collect();
    match catalog::publish_roots(store, host, &needed) {
        Err(e) if e.kind() != ErrorKind::NotFound => Err(e),
        _ => Ok(()),
    }
}

/// The references into `store`. A store can have several paths (links, mounts), so a reference
/// counts if the path matches or the manifest is there: under another path, nothing may get lost.
fn needed(state: &StateDir, location: &Location, store: &Store) -> Result<BTreeSet<Digest>> {
    let mut needed = BTreeSet::new();
    let is_here = |other: &Location, manifest: &Digest| -> Result<bool> {
        Ok(other == location || store.len(&catalog::manifest_object(manifest)?)?.is_some())
    };
    let folders = fs::read_dir(state.mounts()).into_iter().flatten().flatten();
    for folder in folders {
        match files::read_json::<Needs>(&folder.path().join("needs.json")) {
            Ok(needs) => {
                if is_here(&needs.store, &needs.manifest.0)? {
                    needed.insert(needs.manifest.0);
                }
            }
            // A folder that is being made or removed.
            Err(e) if e.kind() == ErrorKind::NotFound => {}
            Err(e) => return Err(e),
        }
    }
    for name in writes::names(state)? {
        // Writes with an unreadable record have unknown needs: keep everything.
        if let Some(record) = writes::find(state, &name)?
            && is_here(&record.store.unwrap_or_else(|| state.store().into()), &record.manifest.0)?
        {
            needed.insert(record.manifest.0);
        }
    }
    for image in images::all(state)? {
        if is_here(&image.store, &image.digest)? {
            needed.insert(image.digest);
        }
    }
    Ok(needed)
}

#[cfg(test)]
mod tests {
    use burgeon_block::{Digest, ObjectStore};
    use burgeon_image::catalog;
    use burgeon_source::{Directory, Location};

    use super::{Needs, lock_path, refresh};
    use crate::{
        id::{DigestText, MountId},
        state::{files, paths::StateDir},
    };

    #[test]
    fn a_store_under_another_path_keeps_what_is_needed() {
        let temp = tempfile::tempdir().unwrap();
        let state = StateDir::open(&temp.path().join("state")).unwrap();
        let (real, link) = (temp.path().join("real"), temp.path().join("link"));
        let store = Directory::create(&real).unwrap();
        std::os::unix::fs::symlink(&real, &link).unwrap();
        let manifest = Digest::of(b"manifest");
        store.publish(&catalog::manifest_object(&manifest).unwrap(), b"manifest").unwrap();
        let id = MountId::random().unwrap();
        std::fs::create_dir(state.mount(id)).unwrap();
        let needs = Needs { store: real.clone().into(), manifest: DigestText(manifest) };
        files::publish_json(&state.mount(id).join("needs.json"), &needs).unwrap();
        for path in [&real, &link] {
            let (location, other) = (Location::from(path.clone()), Directory::open(path).unwrap());
            let needed = refresh(&state, &location, &other.into()).unwrap();
            assert_eq!(needed, [manifest], "{}", path.display());
            let roots = catalog::read_roots(&store).unwrap();
            assert_eq!(roots[0].digests().unwrap(), [manifest], "{}", path.display());
        }
        let other = temp.path().join("other");
        let empty = Directory::create(&other).unwrap();
        assert!(refresh(&state, &other.into(), &empty.into()).unwrap().is_empty());
    }

    /// A store that does not answer keeps its lock.
    #[test]
    fn each_store_has_a_lock_of_its_own_and_one_under_all_its_paths() {
        let temp = tempfile::tempdir().unwrap();
        let state = StateDir::open(&temp.path().join("state")).unwrap();
        let [a, b, link] = ["a", "b", "link"].map(|name| temp.path().join(name));
        std::fs::create_dir(&a).unwrap();
        std::fs::create_dir(&b).unwrap();
        std::os::unix::fs::symlink(&a, &link).unwrap();
        let of = |location: Location| lock_path(&state, &location).unwrap();
        let [a, b, link] = [a, b, link].map(|path| of(path.into()));
        let bucket = |url: &str| of(Location::parse(url).unwrap());
        assert!(a == link && a != b);
        assert_ne!(bucket("s3://bucket/a"), bucket("s3://bucket/b"));
    }
}
