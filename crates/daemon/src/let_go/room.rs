//! Room for a plain file.

use std::{fs::File, path::Path};

use burgeon_block::{Error, ErrorKind, Result};
use rustix::fs::syncfs;

use super::daemon::Daemon;
use crate::{
    ipc::protocol::CacheRequest,
    state::{cache_dir::CacheDir, paths::StateDir, space},
};

/// Makes room for a copy of `data` bytes, and for the bytes that `writes` may still take: the cache
/// evicts down to its floor, if it lies on the same disk.
pub(super) fn make_room(
    state: &StateDir,
    daemon: &mut Daemon<'_>,
    data: u64,
    writes: u64,
) -> Result<()> {
    let mib = |bytes: u64| bytes.div_ceil(1 << 20);
    if !space::shares_disk(&CacheDir::read(state).folder(state), &state.mounts()) {
        let free = space::free_space(&state.mounts())?;
        if free >= data.saturating_add(writes).saturating_add(space::HOST_LEFT) {
            return Ok(());
        }
        let what = format!(
            "a copy of its data takes {} MiB in the state directory, and its writes may still take {} \
             MiB; {} MiB are free there, of which {} MiB are left to the host: free some space",
            mib(data),
            mib(writes),
            mib(free),
            mib(space::HOST_LEFT)
        );
        return Err(Error::new(ErrorKind::NoSpace, what));
    }
    let mut cache = daemon.of_cache(CacheRequest::Show)?;
    let wanted = data.saturating_add(writes).saturating_add(cache.floor);
    if cache.free < wanted {
        daemon.of_cache(CacheRequest::Evict { bytes: wanted - cache.free })?;
        // The answer has the figures before stored layers were evicted, if chunks were not enough,
        // and btrfs frees these with a commit.
        settle(&state.mounts())?;
        cache = daemon.of_cache(CacheRequest::Show)?;
    }
    if cache.free >= wanted {
        return Ok(());
    }
    let remedy = match cache.free.checked_sub(data.saturating_add(writes)).map(|left| left >> 20) {
        Some(left @ 1..) => format!("lower the floor (`burgeon cache resize --keep-free {left}M`)"),
        _ if writes > 0 => "mount it with a smaller --write-limit".to_owned(),
        _ => "mount it from another disk (--state-dir)".to_owned(),
    };
    let what = format!(
        "a copy of its data takes {} MiB, and its writes may still take {} MiB; {} MiB are free, and \
         {} MiB have to stay free (the cache's floor): free some space, or {remedy}",
        mib(data),
        mib(writes),
        mib(cache.free),
        mib(cache.floor)
    );
    Err(Error::new(ErrorKind::NoSpace, what))
}

/// Waits until removed files of the file system of `folder` count as free space.
fn settle(folder: &Path) -> Result<()> {
    let synced = File::open(folder).and_then(|folder| Ok(syncfs(&folder)?));
    synced.map_err(|e| Error::io(format!("cannot sync the disk of {}", folder.display()), e))
}
