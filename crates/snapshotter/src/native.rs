//! Containers with a mount of their own: Burgeon's, of the chain, with writes that are kept under
//! the snapshot's id.
//!
//! ```text
//!   Prepare ─► record ─► mount chains/ID ─► its space when it is new, into the record
//!   Mounts  ─► mount chains/ID if a reboot took it, with its writes
//!   Commit  ─► difference to the chain (difference.rs) ─► snapshots/ID/fs: a layer like any other
//!   Remove  ─► record gone ─► the cleaner: unmount chains/ID, its writes, and the mount point last
//! ```
//!
//! Invariants: there is a mount point as long as there may be writes, so that none is forgotten; no
//! name is taken while something is mounted.

use std::path::{Path, PathBuf};

use burgeon_block::{Error, ErrorKind, Result};
use rustix::fs::statvfs;

use crate::{
    api, difference,
    disk::RootAttributes,
    model::{Labels, Native, RemoteLayer, Snapshot, SnapshotKind, Usage},
    overlay, remote,
    snapshotter::{CallResult, Snapshotter},
};

/// Disk space that is reserved for the writes of each native container.
const RESERVED: u64 = 256 << 20;
/// Share of the disk that all native containers may reserve: a tenth.
const SHARE: u64 = 10;

impl Snapshotter {
    /// `Ok` if an active snapshot is to be native; else the reason, if it would be native but for
    /// that.
    pub(crate) fn choose_native(
        &self,
        kind: SnapshotKind,
        key: &str,
        parent: Option<&str>,
        labels: &Labels,
    ) -> std::result::Result<(), Option<String>> {
        let (Some(parent), SnapshotKind::Active, false) =
            (parent, kind, labels.contains_key(remote::REF))
        else {
            return Err(None);
        };
        let count = {
            let all = self.lock();
            let parent = all.get(parent).map_err(|_| None)?;
            if parent.remote.is_none() || !self.containers.is_native(key, labels, parent) {
                return Err(None);
            }
            all.iter().filter(|one| one.native.is_some()).count() as u64
        };
        let root = self.disk.chains();
        let disk = statvfs(&root).map_err(|e| Some(format!("cannot measure the disk: {e}")))?;
        match has_room(count, disk.f_blocks.saturating_mul(disk.f_frsize)) {
            true => Ok(()),
            false => Err(Some(format!(
                "{count} native containers have reserved a tenth of the disk, {} MiB each",
                RESERVED >> 20
            ))),
        }
    }

    /// Makes a native container, after its record was written; its mounts.
    pub(crate) fn mount_new_native(&self, snapshot: &Snapshot) -> CallResult<Vec<api::Mount>> {
        let mounts = self.native_mounts(snapshot)?;
        let used = used(&self.native_at(snapshot.id))?;
        let _taken = self.take(&[&snapshot.name], None)?;
        let mut now = self.stat(&snapshot.name)?;
        if now.id == snapshot.id && now.kind == SnapshotKind::Active {
            now.native = Some(Native { used_at_first: Some(used) });
            self.disk.write(&now)?;
            self.lock().put(Some(&snapshot.name), now);
        }
        Ok(mounts)
    }

    /// The mounts of a native container, which is mounted if it is not.
    pub(crate) fn native_mounts(&self, snapshot: &Snapshot) -> CallResult<Vec<api::Mount>> {
        let (chains, remote) = (self.chains()?, self.remote_parent(snapshot)?);
        let at = chains.native(snapshot.id, &remote)?;
        Ok(vec![overlay::bind(&at, "rw", &snapshot.labels)])
    }

    fn native_at(&self, id: u64) -> PathBuf {
        self.disk.chains().join(id.to_string())
    }

    fn remote_parent(&self, snapshot: &Snapshot) -> CallResult<RemoteLayer> {
        let all = self.lock();
        let parent = snapshot.parent.as_deref().map(|parent| all.get(parent)).transpose()?;
        let missing = || {
            let what = format!("{:?} is native, and lies on no remote layer", snapshot.name);
            Error::new(ErrorKind::Corrupt, what)
        };
        Ok(parent.and_then(|parent| parent.remote.clone()).ok_or_else(missing)?)
    }

    /// The bytes that a native container takes beyond those of the new mount; 0 while it is not
    /// mounted, as after a reboot.
    pub(crate) fn native_usage(&self, id: u64, native: &Native) -> Result<Usage> {
        let at = self.native_at(id);
        let bytes = match crate::chains::is_mounted(&at) {
            Ok(true) => used(&at)?.saturating_sub(native.used_at_first.unwrap_or(0)),
            _ => 0,
        };
        // btrfs counts no inodes.
        Ok(Usage { bytes, inodes: 0 })
    }

    /// Mounts what [`Self::write_difference`] reads.
    pub(crate) fn ready_to_commit(&self, snapshot: &Snapshot) -> CallResult<PathBuf> {
        self.native_mounts(snapshot)?;
        let below = self.below(&snapshot.name, 1)?;
        let missing = || Error::new(ErrorKind::Corrupt, "a native container lies on no chain");
        Ok(self.folders(below)?.pop().ok_or_else(missing)?)
    }

    /// Writes what a native container changed into the folder of its snapshot, anew.
    pub(crate) fn write_difference(&self, id: u64, before: &Path) -> Result<()> {
        let at = self.native_at(id);
        self.disk.discard(id)?;
        self.disk.make_folder(id, RootAttributes::of(&at)?, true)?;
        let failed = |e| Error::io(format!("cannot copy the changes of {}", at.display()), e);
        difference::write(&at, before, &self.disk.layer(id)).map_err(failed)
    }
}

/// True if one more than `count` native containers may be on a disk of so many bytes.
fn has_room(count: u64, disk: u64) -> bool {
    count < disk / SHARE / RESERVED
}

/// Bytes in use on the file system at `at`.
fn used(at: &Path) -> Result<u64> {
    let failed =
        |e: rustix::io::Errno| Error::io(format!("cannot measure {}", at.display()), e.into());
    let found = statvfs(at).map_err(failed)?;
    Ok(found.f_blocks.saturating_sub(found.f_bfree).saturating_mul(found.f_frsize))
}

#[cfg(test)]
mod tests {
    use super::has_room;

    #[test]
    fn native_containers_reserve_a_tenth_of_the_disk_at_most() {
        // 25.6 GiB are ten of them.
        assert!(has_room(9, 27_487_790_720) && !has_room(10, 27_487_790_720));
        assert!(!has_room(0, 1 << 30), "a small disk has none");
    }
}
