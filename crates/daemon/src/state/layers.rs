//! Stored layers: the other half of what the cache may take. Those that can be had again may be
//! evicted; a mount reads them from their registry then.
//!
//! ```text
//!   held/DIGEST     the stored layers of an image ─┐
//!   origins/DIGEST  where its layers come from ────┴► a registry: may go    a layout, unknown: stays
//!   kept/DIGEST     `pull` has promised that the image needs nothing else: stays
//!   layers/NAME     one layer, of any number of images of one place; the oldest access goes first. The
//!                   lists stay: an image may read those of its layers that are still here
//! ```
//!
//! Invariants: a layer that one image could not get again stays; while something is being stored,
//! its layers stay, as do those that no image lists yet. Writers that go by a listed one read it
//! from its registry if it is evicted, or look for it again after they have marked it as kept.

use std::{
    collections::HashSet,
    fs::{self, File},
    os::unix::fs::MetadataExt,
    path::Path,
    time::{Duration, SystemTime},
};

use burgeon_block::{Error, ErrorKind, ObjectId, ObjectKind, ObjectStore, Result};
use burgeon_image::catalog;
use burgeon_source::{
    Directory, LayersAt, Store, layers_at,
    opening::{Manner, open_checked},
};
use rustix::{
    fs::{FlockOperation, flock},
    io::Errno,
};
use serde::{Deserialize, Serialize};

use super::{files, paths::StateDir};

/// A layer that may be evicted.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct StoredLayer {
    object: ObjectId,
    /// Bytes that it takes on the disk.
    pub(crate) bytes: u64,
    /// The last access; most file systems note one a day.
    used: SystemTime,
}

/// The space of stored layers, which the supervisor tells the server (`run/layers.json`).
#[derive(Serialize, Deserialize, Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(crate) struct LayerShare {
    /// Bytes that they take.
    pub(crate) bytes: u64,
    /// The part of the cache's limit that they leave to chunks; `None` without a limit.
    pub(crate) left: Option<u64>,
}

impl LayerShare {
    pub(crate) fn read(state: &StateDir) -> Self {
        files::read_json(&state.layer_share()).unwrap_or_default()
    }

    pub(crate) fn write(&self, state: &StateDir) -> Result<()> {
        files::publish_json(&state.layer_share(), self)
    }
}

/// The stored layers that may be evicted, the longest unused first.
pub(crate) fn evictable(state: &StateDir) -> Result<Vec<StoredLayer>> {
    evictable_of(state, Layers::All)
}

/// Layers that may be looked at.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Layers {
    All,
    /// Only those of images that are complete.
    Listed,
}

fn evictable_of(state: &StateDir, which: Layers) -> Result<Vec<StoredLayer>> {
    let directory = match Directory::open(state.store()) {
        Ok(directory) => directory,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(error),
    };
    let store = Store::Directory(directory.clone());
    let (mut stay, mut listed) = (HashSet::new(), HashSet::new());
    for list in directory.list(ObjectKind::StoredLayers.folder())? {
        let Some(digest) = list.below(ObjectKind::StoredLayers) else { continue };
        let at = ObjectKind::Derived.object(digest).and_then(|image| layers_at(&store, &image));
        let layers = catalog::stored_layers(&directory, &list)?;
        if !matches!(at, Ok(LayersAt::Registry(_))) || state.kept_layers().join(digest).exists() {
            stay.extend(layers);
        } else if which == Layers::Listed {
            listed.extend(layers);
        }
    }
    let may_go = |layer: &ObjectId| {
        !stay.contains(layer) && (which == Layers::All || listed.contains(layer))
    };
    let layer = |object: ObjectId| {
        let metadata = fs::metadata(directory.path_of(&object)).ok()?;
        let accessed = u64::try_from(metadata.atime().max(metadata.mtime())).unwrap_or(0);
        Some(StoredLayer {
            object,
            bytes: metadata.blocks() * 512,
            used: SystemTime::UNIX_EPOCH + Duration::from_secs(accessed),
        })
    };
    let all = directory.list(ObjectKind::Layer.folder())?.into_iter();
    let mut layers: Vec<_> = all.filter(may_go).filter_map(layer).collect();
    layers.sort_by(|a, b| (a.used, &a.object).cmp(&(b.used, &b.object)));
    Ok(layers)
}

/// The layers of the image with this list are not evicted any more: its user was told that it needs
/// nothing but this host.
pub fn keep_layers(state: &StateDir, list: &ObjectId) -> Result<()> {
    let Some(digest) = list.below(ObjectKind::StoredLayers) else { return Ok(()) };
    let path = state.kept_layers().join(digest);
    let failed = |e| Error::io(format!("cannot make {}", path.display()), e);
    let directory = Directory::open(state.store())?;
    fs::create_dir_all(state.kept_layers()).map_err(failed)?;
    File::create(&path).and_then(|file| file.sync_all()).map_err(failed)?;
    // An eviction that has not seen the mark ends before this begins: what it has left, stays.
    directory.begin_write().map(drop)
}

/// Evicts the longest unused layers until they have freed `bytes`. Returns the bytes that they
/// took.
pub(crate) fn evict(state: &StateDir, bytes: u64) -> Result<u64> {
    let directory = match Directory::open(state.store()) {
        Ok(directory) => directory,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(0),
        Err(error) => return Err(error),
    };
    let collecting = directory.begin_collect()?;
    let which = if collecting.writers > 0 { Layers::Listed } else { Layers::All };
    let mut freed = 0;
    for layer in evictable_of(state, which)? {
        if freed >= bytes {
            break;
        }
        if is_being_stored(&directory.path_of(&layer.object)) {
            continue;
        }
        directory.remove(&layer.object)?;
        freed += layer.bytes;
        tracing::info!(object = %layer.object, bytes = layer.bytes, "a stored layer was evicted");
    }
    drop(collecting);
    Ok(freed)
}

/// True if a writer holds the layer's file until its image is complete (`oci/src/image.rs`).
fn is_being_stored(path: &Path) -> bool {
    let Ok(file) = open_checked(path, Manner::Stored) else { return false };
    flock(&file, FlockOperation::NonBlockingLockExclusive) == Err(Errno::WOULDBLOCK)
}

#[cfg(test)]
mod tests {
    use std::{
        fs::{self, File},
        thread,
        time::{Duration, Instant, SystemTime},
    };

    use burgeon_block::{ObjectId, ObjectStore};
    use burgeon_source::Directory;
    use rustix::fs::FlockOperation;

    use super::{LayerShare, evict, evictable, keep_layers};
    use crate::state::paths::StateDir;

    const LEN: usize = 8192;

    fn object(name: &str) -> ObjectId {
        ObjectId::new(name).unwrap()
    }

    fn digest(byte: char) -> String {
        byte.to_string().repeat(64)
    }

    fn layer(byte: char) -> ObjectId {
        object(&format!("layers/{}", digest(byte)))
    }

    /// A store with an image of these layers, the later ones used later.
    fn image(state: &StateDir, name: char, origin: &str, layers: &str) {
        let store = Directory::create(state.store()).unwrap();
        let list: String = layers.chars().map(|byte| format!("{}\n", layer(byte))).collect();
        store.publish(&object(&format!("held/{}", digest(name))), list.as_bytes()).unwrap();
        store.publish(&object(&format!("origins/{}", digest(name))), origin.as_bytes()).unwrap();
        for byte in layers.chars() {
            store.publish(&layer(byte), &[7; LEN]).unwrap();
            let used = SystemTime::UNIX_EPOCH + Duration::from_secs(1_000_000 + byte as u64);
            let file = File::open(store.path_of(&layer(byte))).unwrap();
            file.set_times(fs::FileTimes::new().set_accessed(used).set_modified(used)).unwrap();
        }
    }

    fn left(state: &StateDir) -> String {
        let store = Directory::open(state.store()).unwrap();
        let layers = store.list("layers").unwrap();
        layers.iter().map(|layer| layer.to_string().chars().last().unwrap()).collect()
    }

    const REGISTRY: &str = "oci://registry.example/team/app\n";

    #[test]
    fn the_longest_unused_layers_of_registries_go_first() {
        let folder = tempfile::tempdir().unwrap();
        let state = StateDir::open(folder.path()).unwrap();
        assert_eq!((evictable(&state).unwrap(), evict(&state, 1).unwrap()), (vec![], 0));
        image(&state, '1', REGISTRY, "abc");
        // A layout's layers, one of which the other image has, too; and an unknown origin.
        image(&state, '2', "oci-layout:/srv/layout\n", "bd");
        image(&state, '3', "what?", "e");
        let all = evictable(&state).unwrap();
        assert_eq!(
            all.iter().map(|it| it.object.clone()).collect::<Vec<_>>(),
            ['a', 'c'].map(layer)
        );
        let bytes = all[0].bytes;
        assert!(bytes >= LEN as u64);
        assert_eq!(evict(&state, 1).unwrap(), bytes);
        assert_eq!(left(&state), "bcde");
        // Its image may read those that are left.
        assert_eq!(Directory::open(state.store()).unwrap().list("held").unwrap().len(), 3);
        assert_eq!(evict(&state, u64::MAX).unwrap(), bytes);
        assert_eq!(left(&state), "bde");
    }

    #[test]
    fn the_layers_of_a_pulled_image_stay() {
        let folder = tempfile::tempdir().unwrap();
        let state = StateDir::open(folder.path()).unwrap();
        image(&state, '1', REGISTRY, "ab");
        image(&state, '2', REGISTRY, "bc");
        keep_layers(&state, &object(&format!("held/{}", digest('2')))).unwrap();
        evict(&state, u64::MAX).unwrap();
        assert_eq!(left(&state), "bc");
    }

    #[test]
    fn an_eviction_that_has_not_seen_the_mark_ends_before_layers_are_kept() {
        let folder = tempfile::tempdir().unwrap();
        let state = StateDir::open(folder.path()).unwrap();
        image(&state, '1', REGISTRY, "a");
        let list = object(&format!("held/{}", digest('1')));
        let store = Directory::open(state.store()).unwrap();
        // Another writer has no part in it.
        let _writer = store.begin_write().unwrap();
        let evicting = store.begin_collect().unwrap();
        thread::scope(|scope| {
            let keeping = scope.spawn(|| keep_layers(&state, &list));
            let mark = state.kept_layers().join(digest('1'));
            let begun = Instant::now();
            while !mark.exists() && begun.elapsed() < Duration::from_secs(10) {
                thread::sleep(Duration::from_millis(1));
            }
            let (is_marked, is_done) = (mark.exists(), keeping.is_finished());
            drop(evicting);
            keeping.join().unwrap().unwrap();
            assert!(is_marked && !is_done, "marked: {is_marked}, kept: {is_done}");
        });
    }

    #[test]
    fn layers_that_are_being_stored_stay() {
        let folder = tempfile::tempdir().unwrap();
        let state = StateDir::open(folder.path()).unwrap();
        image(&state, '1', REGISTRY, "b");
        let store = Directory::open(state.store()).unwrap();
        let lease = store.begin_write().unwrap();
        store.publish(&layer('a'), &[7; LEN]).unwrap();
        assert!(evict(&state, u64::MAX).unwrap() > 0);
        assert_eq!(left(&state), "a", "its image is not listed yet");
        image(&state, '3', REGISTRY, "ab");
        let held = File::open(store.path_of(&layer('a'))).unwrap();
        rustix::fs::flock(&held, FlockOperation::LockShared).unwrap();
        assert!(evict(&state, u64::MAX).unwrap() > 0);
        assert_eq!(left(&state), "a", "it was stored again");
        drop(held);
        drop(lease);
        assert!(evict(&state, u64::MAX).unwrap() > 0);
        assert_eq!(left(&state), "");
        // An object that cannot be read may name any layer.
        image(&state, '2', REGISTRY, "a");
        store.publish(&object(&format!("held/{}", digest('4'))), b"../../etc/passwd\n").unwrap();
        evict(&state, 1).unwrap_err();
        assert_eq!(left(&state), "a");
    }

    #[test]
    fn the_share_is_kept() {
        let folder = tempfile::tempdir().unwrap();
        let state = StateDir::open(folder.path()).unwrap();
        fs::create_dir_all(state.run()).unwrap();
        assert_eq!(LayerShare::read(&state), LayerShare::default());
        let share = LayerShare { bytes: 7, left: Some(9) };
        share.write(&state).unwrap();
        assert_eq!(LayerShare::read(&state), share);
    }
}
