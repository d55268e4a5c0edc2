//! Layers that a test decides about.

#![allow(clippy::unwrap_used, dead_code, unreachable_pub)]

use std::{
    collections::BTreeSet,
    fs::File,
    path::Path,
    sync::{
        Mutex,
        atomic::{AtomicBool, AtomicI64, AtomicUsize, Ordering::Relaxed},
    },
    time::{Duration, SystemTime},
};

use burgeon_block::{Error, ErrorKind, Result};
use burgeon_snapshotter::{
    IndexMade, IndexPolicy,
    model::Labels,
    remote::{LayerChain, Layers},
};
use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};

/// Claims what does not begin with `local`.
#[derive(Debug)]
pub struct Fake {
    pub asked: AtomicUsize,
    /// Chains are mounted, as empty file systems; else the registry is away.
    pub mounts: bool,
    /// The number of calls until one fails, whether it had an effect or not.
    pub calls_left: AtomicI64,
    pub fails_late: AtomicBool,
    /// Ids of snapshots that have writes.
    pub writes: Mutex<BTreeSet<u64>>,
    /// Ids of snapshots whose writes were removed.
    pub removed: Mutex<Vec<u64>>,
    pub policy: Mutex<IndexPolicy>,
    /// Manifests of the images that have an index.
    pub indexes: Mutex<BTreeSet<String>>,
    /// Why the next index cannot be made.
    pub refusal: Mutex<Option<Result<IndexMade>>>,
    /// The time that each attempt to make one takes.
    pub takes: Mutex<Duration>,
    /// The time.
    pub now: Mutex<SystemTime>,
    /// The index that cannot be removed.
    pub stuck: Mutex<Option<String>>,
}

impl Default for Fake {
    fn default() -> Self {
        Self {
            asked: AtomicUsize::new(0),
            mounts: false,
            calls_left: AtomicI64::new(i64::MAX),
            fails_late: AtomicBool::new(false),
            writes: Mutex::default(),
            removed: Mutex::default(),
            policy: Mutex::new(IndexPolicy { is_on: true, kept: u64::MAX }),
            indexes: Mutex::default(),
            refusal: Mutex::default(),
            takes: Mutex::default(),
            now: Mutex::new(SystemTime::now()),
            stuck: Mutex::default(),
        }
    }
}

impl Fake {
    /// Does something that may fail before or after it had its effect.
    fn step<T>(&self, what: impl FnOnce() -> Result<T>) -> Result<T> {
        let fails = self.calls_left.fetch_sub(1, Relaxed) == 1;
        let away = || Error::new(ErrorKind::Unavailable, "the test lets this fail");
        match (fails, self.fails_late.load(Relaxed)) {
            (false, _) => what(),
            (true, false) => Err(away()),
            (true, true) => what().and(Err(away())),
        }
    }

    fn mount_empty(&self, source: &str, at: &Path) -> Result<()> {
        if !self.mounts {
            return Err(Error::new(ErrorKind::Unavailable, format!("{source} is away")));
        }
        let failed = |e: rustix::io::Errno| Error::io("cannot mount", e.into());
        mount("fake", at, "tmpfs", MountFlags::empty(), Some(c"size=1m")).map_err(failed)
    }
}

impl Layers for Fake {
    fn claim(&self, wanted: &LayerChain) -> Result<String, String> {
        self.asked.fetch_add(1, Relaxed);
        self.step(|| Ok(())).map_err(|e| e.to_string())?;
        if self.indexes.lock().unwrap().contains(&wanted.manifest) {
            return Ok(format!("{}@{}#{}", wanted.image, wanted.manifest, wanted.chain));
        }
        match wanted.image.starts_with("local") {
            true => Err("it is local".to_owned()),
            false if wanted.image == "panic" => panic!("as a test"),
            false => Ok(format!("{}#{}", wanted.image, wanted.chain)),
        }
    }

    fn refused(&self, source: &str) -> Option<String> {
        source.starts_with("forged").then(|| format!("{source} is forged"))
    }

    fn mount(&self, source: &str, at: &Path) -> Result<()> {
        self.step(|| self.mount_empty(source, at))
    }

    fn mount_native(&self, source: &str, at: &Path, id: u64) -> Result<()> {
        self.step(|| {
            self.writes.lock().unwrap().insert(id);
            self.mount_empty(source, at)
        })
    }

    fn remove_writes(&self, id: u64) -> Result<()> {
        self.step(|| {
            self.writes.lock().unwrap().remove(&id);
            self.removed.lock().unwrap().push(id);
            Ok(())
        })
    }

    fn image_at(&self, _: &Path) -> Result<Option<String>> {
        Ok(None)
    }

    fn have_same_extents(&self, _: &File, _: &File) -> bool {
        false
    }

    fn serve(&self) -> Result<()> {
        self.step(|| Ok(()))
    }

    fn unmount(&self, at: &Path) -> Result<()> {
        let failed = |e: rustix::io::Errno| Error::io("cannot unmount", e.into());
        self.step(|| unmount(at, UnmountFlags::DETACH).map_err(failed))
    }

    fn index_policy(&self) -> Result<IndexPolicy> {
        Ok(*self.policy.lock().unwrap())
    }

    fn has_index(&self, _: &str, manifest: &str) -> bool {
        self.indexes.lock().unwrap().contains(manifest)
    }

    fn make_index(&self, _: &str, manifest: &str) -> Result<IndexMade> {
        *self.now.lock().unwrap() += *self.takes.lock().unwrap();
        if let Some(refusal) = self.refusal.lock().unwrap().take() {
            return refusal;
        }
        self.step(|| match self.indexes.lock().unwrap().insert(manifest.to_owned()) {
            true => Ok(IndexMade::Made { bytes: 10 }),
            false => Ok(IndexMade::WasThere { bytes: 10 }),
        })
    }

    fn remove_index(&self, _: &str, manifest: &str) -> Result<()> {
        if self.stuck.lock().unwrap().as_deref() == Some(manifest) {
            return Err(Error::new(ErrorKind::LocalIo, "the test keeps this index"));
        }
        self.step(|| {
            self.indexes.lock().unwrap().remove(manifest);
            Ok(())
        })
    }
}

/// The labels of a layer of an image; with `is_top` of its topmost one.
pub fn labels_of(chain: &str, image: &str, manifest: &str, is_top: bool) -> Labels {
    let pairs = [
        ("containerd.io/snapshot.ref", chain),
        ("containerd.io/snapshot/cri.image-ref", image),
        ("containerd.io/snapshot/cri.manifest-digest", manifest),
        ("containerd.io/snapshot/cri.layer-digest", "sha256:l"),
        (
            "containerd.io/snapshot/cri.image-layers",
            if is_top { "sha256:l" } else { "sha256:l,sha256:m" },
        ),
    ];
    pairs.map(|(key, value)| (key.to_owned(), value.to_owned())).into()
}
