//! The daemon's mount namespace.
//!
//! ```text
//!   started in the namespace of process 1 ── stays there: nothing is copied, nothing is held
//!   in any other (`unshare`, a service) ──── a copy, which follows mounts where they propagate
//! ```
//!
//! The namespace of process 1 outlives the daemon, so the daemon never prolongs it; and the daemon
//! puts no mount onto a path, so nobody sees it there. An umount on the host releases the file
//! system at once, and a new mount is visible to the daemon, whether or not mounts propagate.
//!
//! Any other namespace ends with its processes, and its Burgeon mounts are then released. A daemon
//! in it would keep it, so the daemon makes a copy. Copies of Burgeon mounts would pin their file
//! systems after the user's umount, so they are unmounted here at once; the user's own mount stays.
//! So are namespaces that are bound to a path (`ip netns`, container engines), which would survive
//! their removal; they contain no files to open.
//!
//! If mounts are private there, the other file systems stay mounted in the copy after their umount,
//! until [`super::abandoned`] finds that nobody else has them mounted. Before, they may be needed:
//! images by reference and mapped files may lie on any of them, and are opened by path when they
//! are read.
//!
//! The holder process (`holder/`) outlives the daemon and opens nothing, so its namespace has none
//! of these mounts.

use std::{collections::BTreeSet, path::Path};

use burgeon_block::{Error, Result};
use rustix::{
    mount::{MountPropagationFlags, UnmountFlags, mount_change, unmount},
    thread::{UnshareFlags, unshare_unsafe},
};

use crate::host::{
    backing_devices,
    mountinfo::{self, MountInfo},
};

/// Moves the calling process into a mount namespace of its own, unless it is in that of process 1;
/// returns whether it did so. The process must have only one thread.
pub(crate) fn leave_transient() -> Result<bool> {
    let first = mountinfo::read(Path::new("/proc/1/mountinfo")).unwrap_or_default();
    let own = mountinfo::read(Path::new("/proc/self/mountinfo"))?;
    if are_of_one_namespace(&own, &first) {
        return Ok(false);
    }
    enter(MountPropagationFlags::DOWNSTREAM)?;
    for mount in mountinfo::read(Path::new("/proc/self/mountinfo"))? {
        let is_namespace = mount.fs_type == "nsfs";
        if is_namespace
            || mount.fs_type == "btrfs" && backing_devices::is_burgeon_device(&mount.source)
        {
            let _ = unmount(&mount.target, UnmountFlags::DETACH);
        }
    }
    Ok(true)
}

/// True if two lists of mounts are of the same namespace. Each mount belongs to one namespace and
/// has a number that no other mount has meanwhile; reading the link `ns/mnt` of process 1 takes
/// capabilities that `burgeon.service` does not have.
fn are_of_one_namespace(one: &[MountInfo], other: &[MountInfo]) -> bool {
    let ids: BTreeSet<_> = one.iter().map(|mount| mount.id).collect();
    other.iter().any(|mount| ids.contains(&mount.id))
}

/// Moves the calling process into a mount namespace with the root file system and `/proc` alone. It
/// must have only one thread.
pub(crate) fn enter_bare() -> Result<()> {
    enter(MountPropagationFlags::PRIVATE)?;
    let mounts = mountinfo::read(Path::new("/proc/self/mountinfo"))?;
    // The last mount at a place hides the others.
    for mount in mounts.iter().rev().filter(|mount| !is_bare(&mount.target)) {
        let _ = unmount(&mount.target, UnmountFlags::DETACH);
    }
    Ok(())
}

fn is_bare(place: &Path) -> bool {
    place == Path::new("/") || place == Path::new("/proc")
}

/// Enters a new namespace; no change of its mounts reaches another one.
pub(super) fn enter(propagation: MountPropagationFlags) -> Result<()> {
    let failed = |e: rustix::io::Errno| {
        Error::io(
            "cannot make a mount namespace of the daemon's own (CAP_SYS_ADMIN is needed)",
            e.into(),
        )
    };
    // SAFETY: with one thread and no CLONE_FILES, unsharing cannot take a descriptor from another
    // user; only the view of mounts changes.
    unsafe { unshare_unsafe(UnshareFlags::NEWNS) }.map_err(failed)?;
    mount_change("/", MountPropagationFlags::REC | propagation).map_err(failed)
}
