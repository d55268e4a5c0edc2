//! Removing names, and objects that no name and no host needs any more.

use std::collections::HashSet;

use burgeon_block::{Digest, Error, ErrorKind, ObjectId, ObjectKind, ObjectStore, Result};

use super::{ImageRecord, list, load_bytes, manifest_object, name_object, read_roots, resolve};
use crate::{Manifest, ManifestLimits};

/// Removes the name `name`. The next [`gc`] removes the image's data if nothing else needs it.
/// Refused (`Invalid`) while a host other than `this_host` needs the image and no other name
/// keeps it. Returns `None` if the name's record was damaged: such a record keeps no image, but
/// blocks every removal by [`gc`].
pub fn remove(
    store: &impl ObjectStore,
    name: &str,
    this_host: &str,
) -> Result<Option<ImageRecord>> {
    let record = match resolve(store, name) {
        Err(e) if e.kind() == ErrorKind::Corrupt => {
            store.remove(&name_object(name)?)?;
            return Ok(None);
        }
        record => record?,
    };
    let digest = record.digest()?;
    let other_names = list(store)?.into_iter().filter(|(other, _)| other != name);
    let kept = other_names
        .filter_map(|(_, record)| record.ok()?.digest().ok())
        .any(|other| other == digest);
    let roots = read_roots(store)?;
    for host in roots.iter().filter(|host| host.host != this_host && !kept) {
        if host.digests()?.contains(&digest) {
            return Err(Error::new(
                ErrorKind::Invalid,
                format!(
                    "{name:?} is not removed: the host {} has mounts or writes of it; remove those there first",
                    host.host
                ),
            ));
        }
    }
    store.remove(&name_object(name)?)?;
    Ok(Some(record))
}

/// The result of [`gc`].
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Collected {
    /// Manifests that nothing needed.
    pub manifests: u64,
    /// Packs that no remaining manifest needed.
    pub packs: u64,
    /// Bytes of both, and of the profiles of removed images.
    pub bytes: u64,
    /// Leftover bytes of killed builds.
    pub stale_bytes: u64,
    /// Running builds. If there are any, only leftovers of killed builds were removed.
    pub builds: usize,
    /// Images and hosts whose manifest is missing; `verify` reports details.
    pub missing: Vec<String>,
}

/// Longest list of stored layers, in bytes: 512 of them, twice over.
const HELD_MAX: u64 = 64 << 10;

/// Removes from `store` every manifest that is kept neither by a name, nor by a host's record,
/// nor by `needed` (the needs of this host that are not in its record), and every pack and
/// derived object that no kept manifest refers to, with its stored layers, and leftovers of killed
/// builds. With `dry_run` these are only counted.
///
/// Removes nothing if a name's record, a host's record or a kept manifest cannot be read, because
/// its needs are then unknown. Builds wait meanwhile; while one is running, only leftovers of
/// killed builds are removed.
pub fn gc(store: &impl ObjectStore, needed: &[Digest], dry_run: bool) -> Result<Collected> {
    gc_of(store, needed, dry_run, None)
}

/// Removes the name `name`, and then like [`gc`] its image, and what that alone needs; no stored
/// layers. Leaves everything else. False if nothing was removed, because this host needs the image
/// or a build is running. The name goes first, so that nobody finds half an image by it; after a
/// death in the middle, the next [`gc`] removes the rest.
pub fn gc_image(store: &impl ObjectStore, needed: &[Digest], name: &str) -> Result<bool> {
    let digest = match resolve(store, name) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(true),
        record => record?.digest()?,
    };
    if needed.contains(&digest) {
        return Ok(false);
    }
    let mut objects = HashSet::from([manifest_object(&digest)?]);
    objects.insert(ObjectKind::Profile.object(digest)?);
    let bytes = load_bytes(store, &digest);
    let needs = bytes.and_then(|it| Manifest::decode_objects(&it, &ManifestLimits::default()));
    let needs = match needs {
        // Nobody can tell any more: [`gc`] finds them once the name is gone.
        Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::Corrupt) => vec![],
        needs => needs?,
    };
    for object in needs {
        if let Some(table) = object.digest(ObjectKind::Derived) {
            objects.insert(ObjectKind::Origins.object(table)?);
            objects.insert(ObjectKind::StoredLayers.object(table)?);
        }
        objects.insert(object);
    }
    let only = Only { name: name_object(name)?, objects };
    gc_of(store, needed, false, Some(&only)).map(|collected| collected.builds == 0)
}

/// All that may be removed.
struct Only {
    name: ObjectId,
    objects: HashSet<ObjectId>,
}

fn gc_of(
    store: &impl ObjectStore,
    needed: &[Digest],
    dry_run: bool,
    only: Option<&Only>,
) -> Result<Collected> {
    let collecting = if dry_run { store.begin_count()? } else { store.begin_collect()? };
    let mut collected = Collected {
        stale_bytes: collecting.stale_bytes,
        builds: collecting.writers,
        ..Collected::default()
    };
    if collecting.writers > 0 {
        return Ok(collected);
    }
    if let Some(only) = only {
        store.remove(&only.name)?;
    }
    let remove = |object: &ObjectId| match only {
        Some(only) if !only.objects.contains(object) => Ok(0),
        _ => remove_object(store, object, dry_run),
    };
    let mut manifests = HashSet::new();
    let mut packs = HashSet::new();
    for (who, digest) in roots(store, needed)? {
        if !manifests.insert(digest) {
            continue;
        }
        match load_bytes(store, &digest) {
            Ok(bytes) => {
                let (_, objects) = Manifest::decode_chunks(&bytes, &ManifestLimits::default())
                    .map_err(|error| unknown_needs(&who, error))?;
                packs.extend(objects);
            }
            Err(error) if error.kind() == ErrorKind::NotFound => collected.missing.push(who),
            Err(error) => return Err(unknown_needs(&who, error)),
        }
    }
    // Manifests first: after an interruption, no manifest lacks a pack. Objects that are not
    // named by a digest are not Burgeon's.
    for object in store.list("manifests")? {
        if object.digest(ObjectKind::Manifest).is_some_and(|digest| !manifests.contains(&digest)) {
            collected.bytes += remove(&object)?;
            collected.manifests += 1;
        }
    }
    for object in store.list("profiles")? {
        if object.digest(ObjectKind::Profile).is_some_and(|digest| !manifests.contains(&digest)) {
            collected.bytes += remove(&object)?;
        }
    }
    for object in store.list("packs")? {
        if object.digest(ObjectKind::Pack).is_some() && !packs.contains(&object) {
            collected.bytes += remove(&object)?;
            collected.packs += 1;
        }
    }
    // Tables of derived objects, the origins of their layers, and lists of stored layers.
    let mut layers = HashSet::new();
    for kind in [ObjectKind::Derived, ObjectKind::Origins, ObjectKind::StoredLayers] {
        for object in store.list(kind.folder())? {
            let needed = object.digest(kind).map(|digest| ObjectKind::Derived.object(digest));
            match needed.transpose()?.map(|needed| packs.contains(&needed)) {
                Some(true) if kind == ObjectKind::StoredLayers => {
                    layers.extend(stored_layers(store, &object)?);
                }
                Some(false) => collected.bytes += remove(&object)?,
                _ => {}
            }
        }
    }
    for object in store.list("layers")? {
        if !layers.contains(&object) {
            collected.bytes += remove(&object)?;
        }
    }
    drop(collecting.lease);
    Ok(collected)
}

/// The stored layers that an image is read from, according to `list`, an object of `held/`.
pub fn stored_layers(store: &impl ObjectStore, list: &ObjectId) -> Result<Vec<ObjectId>> {
    let text = store.get(list, HELD_MAX)?;
    let layers: Result<_> = String::from_utf8_lossy(&text).lines().map(ObjectId::new).collect();
    layers.map_err(|error| {
        let what = format!("{list} of the store is damaged: remove the image that it belongs to");
        Error::with_source(ErrorKind::Corrupt, what, error)
    })
}

/// Removes `object`, unless `dry_run`; returns its length.
fn remove_object(store: &impl ObjectStore, object: &ObjectId, dry_run: bool) -> Result<u64> {
    let len = store.len(object)?.unwrap_or(0);
    if !dry_run {
        store.remove(object)?;
    }
    Ok(len)
}

/// Every needed digest, and the name or host that needs it.
fn roots(store: &impl ObjectStore, needed: &[Digest]) -> Result<Vec<(String, Digest)>> {
    let mut roots = Vec::new();
    for (name, record) in list(store)? {
        let who = format!("the image {name:?}");
        let digest = record.and_then(|record| record.digest());
        roots.push((who.clone(), digest.map_err(|error| unknown_needs(&who, error))?));
    }
    for host in read_roots(store)? {
        let who = format!("the host {}", host.host);
        roots.extend(host.digests()?.into_iter().map(|digest| (who.clone(), digest)));
    }
    let local = needed.iter().map(|digest| ("this host".to_owned(), *digest));
    roots.extend(local);
    Ok(roots)
}

fn unknown_needs(who: &str, error: Error) -> Error {
    let what = format!("nothing is removed, because the objects that {who} needs are unknown");
    Error::with_source(error.kind(), what, error)
}
