//! The places where a mount is visible.

use std::path::{Path, PathBuf};

use burgeon_daemon::mountinfo;

use crate::holders;

/// The places of this namespace where the btrfs `fsid` is mounted, the innermost first.
pub(crate) fn places_of(fsid: burgeon_daemon::Fsid) -> Vec<PathBuf> {
    let mounts = mountinfo::read(Path::new("/proc/thread-self/mountinfo")).unwrap_or_default();
    let is_of_it = holders::is_of(fsid);
    let of_it = mounts.into_iter().filter(is_of_it);
    let mut places: Vec<_> = of_it.map(|mount| mount.target).collect();
    places.reverse();
    places
}
