//! The mounts of remote chains: one read-only mount a chain, for all containers above it.
//!
//! ```text
//!   chains/ID   an empty folder, or the mount of snapshot ID: of a chain, or of a native container
//! ```
//!
//! A chain is mounted when a call first needs it, so nothing is mounted at a start, and a mount
//! that a reboot took is made again. It is unmounted when its snapshot is gone, by the cleaner's
//! thread. A mount point is removed by `rmdir` alone, which fails while it is mounted.

use std::{
    fs::{DirBuilder, File},
    io,
    os::unix::fs::DirBuilderExt,
    path::{Path, PathBuf},
    sync::{Arc, atomic::AtomicUsize},
    time::Duration,
};

use burgeon_block::{Error, ErrorKind, Result};
use rustix::fs::{AtFlags, CWD, StatxAttributes, StatxFlags, statx};

use crate::{
    image_index::{ImageIndex, IndexMade, IndexPolicy},
    keys::NamesInUse,
    model::RemoteLayer,
    remote::{self, LayerChain, Layers},
};

#[derive(Debug)]
pub(crate) struct Chains {
    folder: PathBuf,
    /// Chains that are being mounted or unmounted.
    keys: NamesInUse,
    layers: Arc<dyn Layers>,
    /// Number of claims that are being asked for.
    claims: Arc<AtomicUsize>,
}

impl Chains {
    pub(crate) fn new(folder: PathBuf, layers: Arc<dyn Layers>) -> Self {
        Self { folder, keys: NamesInUse::default(), layers, claims: Arc::default() }
    }

    /// A reference to mount the chain from, or why its layers are local.
    pub(crate) fn claim(&self, limit: Duration, wanted: LayerChain) -> Result<String, String> {
        remote::claim_within(limit, &self.layers, &self.claims, wanted)
    }

    pub(crate) fn index_policy(&self) -> Result<IndexPolicy> {
        self.layers.index_policy()
    }

    pub(crate) fn has_index(&self, index: &ImageIndex) -> bool {
        self.layers.has_index(&index.image, &index.manifest)
    }

    pub(crate) fn make_index(&self, index: &ImageIndex) -> Result<IndexMade> {
        self.layers.make_index(&index.image, &index.manifest)
    }

    pub(crate) fn remove_index(&self, index: &ImageIndex) -> Result<()> {
        self.layers.remove_index(&index.image, &index.manifest)
    }

    /// Why nothing more may be made above the chain: the first source that is refused, and whether
    /// all are.
    pub(crate) fn refused(&self, remote: &RemoteLayer) -> Option<(String, bool)> {
        let mut refused: Vec<_> =
            remote.sources.iter().filter_map(|source| self.layers.refused(source)).collect();
        let is_all = refused.len() == remote.sources.len();
        (!refused.is_empty()).then(|| (refused.swap_remove(0), is_all))
    }

    /// True if both mounts are of one seed: their files have the same inodes and extents until they
    /// are changed.
    pub(crate) fn has_same_seed(&self, one: &Path, other: &Path) -> Result<bool> {
        let (one, other) = (self.layers.image_at(one)?, self.layers.image_at(other)?);
        Ok(one.is_some() && one == other)
    }

    /// True if two files of mounts of one seed have the same data for certain.
    pub(crate) fn have_same_extents(&self, one: &File, other: &File) -> bool {
        self.layers.have_same_extents(one, other)
    }

    /// Unmounts the chain of snapshot `id`.
    pub(crate) fn unmount_one(&self, id: u64) -> Result<()> {
        let name = id.to_string();
        let at = self.folder.join(&name);
        let Some(_taken) = self.keys.take(&[&name], None) else { return Ok(()) };
        if at.symlink_metadata().is_err() {
            return Ok(());
        }
        self.unmount(&at)
    }

    /// Removes what an earlier snapshot of this number may have left: its root may have been
    /// removed without its writes, and a new container must not find them.
    pub(crate) fn clear(&self, id: u64) -> Result<()> {
        match self.folder.join(id.to_string()).symlink_metadata() {
            Ok(_) => self.unmount_one(id),
            Err(_) => self.layers.remove_writes(id),
        }
    }

    /// The mount of the native container `id` above a chain, which is mounted if it is not.
    pub(crate) fn native(&self, id: u64, remote: &RemoteLayer) -> Result<PathBuf> {
        self.mounted_by(id, remote, true)
    }

    /// The mount of snapshot `id`, which is mounted if it is not. Each source is tried that is not
    /// refused.
    pub(crate) fn mounted(&self, id: u64, remote: &RemoteLayer) -> Result<PathBuf> {
        self.mounted_by(id, remote, false)
    }

    fn mounted_by(&self, id: u64, remote: &RemoteLayer, is_native: bool) -> Result<PathBuf> {
        let name = id.to_string();
        let at = self.folder.join(&name);
        let busy = || {
            let what = format!("{} is being mounted for too long: try again", at.display());
            Error::new(ErrorKind::Unavailable, what)
        };
        let _taken = self.keys.take(&[&name], None).ok_or_else(busy)?;
        let failed = |e| Error::io(format!("cannot make {}", at.display()), e);
        match DirBuilder::new().mode(0o700).create(&at) {
            Err(e) if e.kind() != io::ErrorKind::AlreadyExists => return Err(failed(e)),
            // Durable before there are writes, which are removed with it.
            _ if is_native => {
                let folder = File::open(&self.folder).and_then(|folder| folder.sync_all());
                folder.map_err(failed)?;
            }
            _ => {}
        }
        if is_mounted(&at)? {
            // Its server may have died.
            self.layers.serve()?;
            return Ok(at);
        }
        let mut last = Error::new(ErrorKind::NotFound, format!("{} has no source", at.display()));
        for source in &remote.sources {
            if let Some(why) = self.layers.refused(source) {
                last = Error::new(ErrorKind::Corrupt, why);
                continue;
            }
            let mounted = match is_native {
                true => self.layers.mount_native(source, &at, id),
                false => self.layers.mount(source, &at),
            };
            match mounted {
                Ok(()) if is_mounted(&at)? => return Ok(at),
                Ok(()) => {
                    let what = format!("{source} was mounted elsewhere than on {}", at.display());
                    last = Error::new(ErrorKind::LocalIo, what);
                }
                Err(error) => {
                    tracing::warn!(%source, %error, "a remote layer cannot be mounted from here");
                    last = error;
                }
            }
        }
        Err(last)
    }

    /// Unmounts all chains that are not `wanted`. Goes on after an error, and returns the first
    /// one.
    pub(crate) fn unmount_others(&self, wanted: impl Fn(u64) -> bool) -> Result<()> {
        let failed = |e| Error::io(format!("cannot read {}", self.folder.display()), e);
        let mut first = Ok(());
        for entry in self.folder.read_dir().map_err(failed)? {
            let name = entry.map_err(failed)?.file_name().to_string_lossy().into_owned();
            let Some(_taken) = self.keys.take(&[&name], None) else { continue };
            // Asked while it is taken: a claim writes its record before anything mounts it.
            if name.parse().is_ok_and(&wanted) {
                continue;
            }
            first = first.and(self.unmount(&self.folder.join(&name)));
        }
        first
    }

    fn unmount(&self, at: &Path) -> Result<()> {
        if is_mounted(at)? {
            self.layers.unmount(at)?;
        }
        if let Some(id) = at.file_name().and_then(|name| name.to_str()?.parse().ok()) {
            self.layers.remove_writes(id)?;
        }
        match std::fs::remove_dir(at) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => {
                Err(Error::io(format!("cannot remove {}", at.display()), e))
            }
            _ => Ok(()),
        }
    }
}

/// True if the path is the root of a mount.
pub(crate) fn is_mounted(at: &Path) -> Result<bool> {
    let flags = AtFlags::SYMLINK_NOFOLLOW | AtFlags::NO_AUTOMOUNT;
    let found = statx(CWD, at, flags, StatxFlags::TYPE)
        .map_err(|e| Error::io(format!("cannot look at {}", at.display()), e.into()))?;
    Ok(found.stx_attributes.contains(StatxAttributes::MOUNT_ROOT))
}
