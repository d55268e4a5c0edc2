//! The daemon's own mount namespace.
//!
//! Mounts and unmounts on the host propagate to it (so that a store on a file system mounted later
//! is found), but no change of the daemon propagates to the host. Copies of Burgeon mounts in the
//! new namespace would pin their file systems after the user's umount, so they are unmounted here
//! at once; the user's own mount stays. So are namespaces that are bound to a path (`ip netns`,
//! container engines), which would survive their removal; they contain no files to open.
//!
//! If mounts are private, every other file system that was mounted when the daemon was started
//! stays mounted here after its umount on the host. Images by reference and mapped files may lie on
//! any of them, and are opened by path when they are read; an unmounted copy would not come back
//! when the host mounts the file system again.
//!
//! The holder process (`holder/`) outlives the daemon and opens nothing, so its namespace has none
//! of these mounts.

use std::path::Path;

use burgeon_block::{Error, Result};
use rustix::{
    mount::{MountPropagationFlags, UnmountFlags, mount_change, unmount},
    thread::{UnshareFlags, unshare_unsafe},
};

use crate::host::{backing_devices, mountinfo};

/// Moves the calling process into a mount namespace of its own. It must have only one thread.
pub(crate) fn enter_private() -> Result<()> {
    enter(MountPropagationFlags::DOWNSTREAM)?;
    for mount in mountinfo::read(Path::new("/proc/self/mountinfo"))? {
        let is_namespace = mount.fs_type == "nsfs";
        if is_namespace
            || mount.fs_type == "btrfs" && backing_devices::is_burgeon_device(&mount.source)
        {
            let _ = unmount(&mount.target, UnmountFlags::DETACH);
        }
    }
    Ok(())
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
fn enter(propagation: MountPropagationFlags) -> Result<()> {
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
