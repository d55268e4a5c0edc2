//! Remote layers: chains that are mounted, and never unpacked. Which ones can be, and how, is the
//! business of the program that serves; this crate knows [`Layers`].
//!
//! containerd asks for a chain by labels of a `Prepare`. The answer that it exists already makes a
//! committed snapshot out of it, and containerd then fetches no layer. A claim holds for every
//! image with that chain ID, so it is made only for chains that can be trusted.

use std::{
    fmt::Debug,
    fs::File,
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
        mpsc,
    },
    thread,
    time::Duration,
};

use burgeon_block::Result;

use crate::{
    image_index::{IndexMade, IndexPolicy, hex_of},
    model::{Labels, Snapshot, SnapshotKind},
};

/// The label with the wanted chain ID, of a snapshot into which a layer is to be unpacked.
pub(crate) const REF: &str = "containerd.io/snapshot.ref";
pub(crate) const IMAGE: &str = "containerd.io/snapshot/cri.image-ref";
pub(crate) const MANIFEST: &str = "containerd.io/snapshot/cri.manifest-digest";
pub(crate) const LAYER: &str = "containerd.io/snapshot/cri.layer-digest";
/// The layer and those above it.
pub(crate) const LAYERS: &str = "containerd.io/snapshot/cri.image-layers";

/// The longest time for a claim: containerd's pull waits for it.
pub const CLAIM_TIME: Duration = Duration::from_secs(5);

/// A chain of layers, as containerd's labels describe it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct LayerChain {
    /// The chain ID.
    pub chain: String,
    /// The image as it was typed, such as `docker.io/library/python:3.12`.
    pub image: String,
    /// The digest of its manifest.
    pub manifest: String,
    /// The digest of the topmost layer of the chain.
    pub layer: String,
}

impl LayerChain {
    /// The chain that a `Prepare` asks for; the reason if its labels do not tell.
    pub(crate) fn of(chain: &str, labels: &Labels) -> Result<Self, String> {
        let label = |key: &str| {
            let missing = || {
                format!(
                    "containerd gives no label {key}: its configuration turns annotations off \
                     (disable_snapshot_annotations, enable_remote_snapshot_annotations)"
                )
            };
            labels.get(key).cloned().ok_or_else(missing)
        };
        let (image, manifest, layer) = (label(IMAGE)?, label(MANIFEST)?, label(LAYER)?);
        Ok(Self { chain: chain.to_owned(), image, manifest, layer })
    }
}

/// Mounts chains. Implementations may wait for networks; no lock is held meanwhile.
pub trait Layers: Debug + Send + Sync + 'static {
    /// A reference from which the chain can be mounted without fetching its layers; or the reason
    /// why it is unpacked like any other. A claim is a statement about all images that have the
    /// chain.
    fn claim(&self, wanted: &LayerChain) -> Result<String, String>;
    /// The reason why nothing more may be made above a chain of this source: one of its layers is
    /// not what its image states. Asks no network.
    fn refused(&self, source: &str) -> Option<String>;
    /// Mounts a chain read-only on an empty folder.
    fn mount(&self, source: &str, at: &Path) -> Result<()>;
    /// Mounts a chain writable on an empty folder. Writes are kept as those of snapshot `id`, and
    /// found again by it.
    fn mount_native(&self, source: &str, at: &Path, id: u64) -> Result<()>;
    /// Removes the kept writes of snapshot `id`, if there are any.
    fn remove_writes(&self, id: u64) -> Result<()>;
    /// The digest of the image that is mounted there, if one is.
    fn image_at(&self, at: &Path) -> Result<Option<String>>;
    /// True if all data of both files, of two mounts of one image, lies at the same place; false if
    /// that is not known.
    fn have_same_extents(&self, one: &File, other: &File) -> bool;
    /// Has the mounted chains served again if nothing serves them.
    fn serve(&self) -> Result<()>;
    /// Unmounts a chain, without waiting for its users.
    fn unmount(&self, at: &Path) -> Result<()>;
    /// The configuration of indexes as it is now.
    fn index_policy(&self) -> Result<IndexPolicy>;
    /// True if that image has an index.
    fn has_index(&self, image: &str, manifest: &str) -> bool;
    /// Makes the index of the image `image`, as it was typed, with the manifest `manifest`, by
    /// which a later claim of its chains may succeed. It may take long, and gives others priority.
    /// One that was not finished is never used.
    fn make_index(&self, image: &str, manifest: &str) -> Result<IndexMade>;
    /// Removes the index of that image, if there is one.
    fn remove_index(&self, image: &str, manifest: &str) -> Result<()>;
}

/// Claims that are asked for at the same time: those of a registry that hangs outlive their limit.
const CLAIMS_MAX: usize = 32;

/// Asks within `limit`; a later answer is ignored, and its thread ends by itself. `running` counts
/// the threads.
pub(crate) fn claim_within(
    limit: Duration,
    layers: &Arc<dyn Layers>,
    running: &Arc<AtomicUsize>,
    wanted: LayerChain,
) -> Result<String, String> {
    let (answer, asked) = mpsc::sync_channel(1);
    let layers = Arc::clone(layers);
    let one = Running(Arc::clone(running));
    if running.fetch_add(1, Ordering::Relaxed) >= CLAIMS_MAX {
        return Err(format!("{CLAIMS_MAX} other layers wait for their registries"));
    }
    let ask = move || {
        let _one = one;
        // Nobody may be waiting any more.
        let _ = answer.send(layers.claim(&wanted));
    };
    let started = thread::Builder::new().name("claim".into()).spawn(ask);
    started.map_err(|e| format!("cannot start a thread: {e}"))?;
    let late = |_| format!("the registry did not answer within {} s", limit.as_secs());
    asked.recv_timeout(limit).map_err(late)?
}

/// Uncounts a thread when it ends, also by a panic.
struct Running(Arc<AtomicUsize>);

impl Drop for Running {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// The image and the digest of its manifest, if these are the labels of its topmost layer.
/// containerd lists a layer and those above it, and cuts long lists, but never to the first entry.
fn top_of(labels: &Labels) -> Option<(&str, &str)> {
    let label = |key: &str| labels.get(key).map(String::as_str);
    let is_top = label(LAYER)? == label(LAYERS)?;
    let manifest = label(MANIFEST).filter(|manifest| hex_of(manifest).is_some());
    Some((label(IMAGE)?, manifest?)).filter(|_| is_top)
}

/// The digest in a reference, `REPOSITORY@DIGEST#chain=CHAIN`.
fn manifest_of(source: &str) -> Option<&str> {
    let image = source.split_once('#').map_or(source, |(image, _)| image);
    image.rsplit_once('@').map(|(_, digest)| digest)
}

/// The digests of the manifests that the snapshot may be mounted from, or was unpacked from.
pub(crate) fn manifests(snapshot: &Snapshot) -> impl Iterator<Item = &str> {
    let label = snapshot.labels.get(MANIFEST).map(String::as_str);
    let sources = snapshot.remote.iter().flat_map(|remote| &remote.sources);
    label.into_iter().chain(sources.filter_map(|source| manifest_of(source)))
}

/// The image and the digest of its manifest, if the layer completes one that was unpacked.
pub(crate) fn completed_image(snapshot: &Snapshot) -> Option<(&str, &str)> {
    let is_unpacked = snapshot.kind == SnapshotKind::Committed && snapshot.why_local.is_some();
    top_of(&snapshot.labels).filter(|_| is_unpacked)
}
