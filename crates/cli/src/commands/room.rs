//! Space for an image that a command is about to store, on the disk of the host's cache.
//!
//! ```text
//!   pull, build ──► estimate of the bytes ──► more than are free? ──► daemon: the cache evicts the rest
//! ```
//!
//! The estimate is no limit: the command stores what it has to, and reports a full disk. Without a
//! daemon nobody evicts.
//!
//! Archives on standard input have no size, and those of others state one that nobody has checked.
//! A child that reads them therefore asks for room step by step, just ahead of what it has stored
//! ([`StepByStep`]): a stated size evicts nothing.

use std::{
    fs,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    sync::atomic::{AtomicU64, Ordering::Relaxed},
};

use burgeon_block::Result;
use burgeon_daemon::{
    Client,
    protocol::{CacheRequest, Reply, Request},
};
use burgeon_image::catalog::ImageRecord;
use rustix::fs::statvfs;

use super::{Context, disk_errors::free_in};

/// The room that a child asks for ahead of what it has stored.
pub(super) const STEP: u64 = 64 << 20;

/// Beside the image: for the file system's own blocks and for records.
const MARGIN: u64 = 64 << 20;

/// Bytes of the unit in which `stat` counts.
const SECTOR: u64 = 512;

/// Has the cache evict until about `bytes` and a margin are free in `folder`, a store, as far as it
/// can. That it cannot is no error: perhaps the image fits nevertheless.
pub(super) fn make(context: &Context, folder: &Path, bytes: u64) {
    _ = try_make(context, folder, bytes);
}

fn try_make(context: &Context, folder: &Path, bytes: u64) -> Result<()> {
    let wanted = bytes.saturating_add(MARGIN);
    let Some(free) = free_in(folder).filter(|free| *free < wanted && shares_disk(context, folder))
    else {
        return Ok(());
    };
    let Some(client) = Client::connect(&context.state)? else { return Ok(()) };
    let ask = |request| client.call(&Request::Cache(request));
    let (Reply::Cache(answer), _) = ask(CacheRequest::Show)? else { return Ok(()) };
    // An image that cannot fit anyway costs no cached data. The margin may be missing.
    if bytes.saturating_sub(free) <= answer.cache.used {
        ask(CacheRequest::Evict { bytes: wanted - free })?;
    }
    Ok(())
}

/// An estimate of the seed and the map of an image, which are made before its data is needed.
pub(super) fn for_metadata(image: &ImageRecord) -> u64 {
    // The manifest is compressed; a seed has some hundred bytes for each file.
    image.manifest_bytes.saturating_mul(4).saturating_add(image.inodes.saturating_mul(1024))
}

/// Asks for room while data is stored, so that there is a [`STEP`] ahead of it.
pub(super) struct StepByStep<'a> {
    ask: &'a (dyn Fn(u64) + Sync),
    /// The position at which it asks next.
    next: AtomicU64,
}

impl<'a> StepByStep<'a> {
    /// Asks by `ask`.
    pub(super) fn new(ask: &'a (dyn Fn(u64) + Sync)) -> Self {
        Self { ask, next: AtomicU64::new(0) }
    }

    /// So many bytes are stored.
    pub(super) fn reached(&self, bytes: u64) {
        let next = self.next.load(Relaxed);
        // One of several threads asks.
        let then = bytes.saturating_add(STEP / 2);
        if bytes >= next && self.next.compare_exchange(next, then, Relaxed, Relaxed).is_ok() {
            (self.ask)(STEP);
        }
    }
}

/// True if what is evicted from the cache becomes free in `folder`.
fn shares_disk(context: &Context, folder: &Path) -> bool {
    disk(folder).is_some() && disk(folder) == disk(&burgeon_daemon::cache_dirs(&context.state).0)
}

/// The same for an archive, which may be sparse.
pub(super) fn make_for_file(context: &Context, folder: &Path, file: &fs::File) {
    make(context, folder, file.metadata().map_or(0, |it| it.blocks().saturating_mul(SECTOR)));
}

/// Does the same for the files of `tree`, whose sizes are added up only if they may not fit.
pub(super) fn make_for_tree(context: &Context, folder: &Path, tree: &Path) {
    let Ok(source) = statvfs(tree) else { return };
    let in_use = source.f_blocks.saturating_sub(source.f_bfree).saturating_mul(source.f_frsize);
    let is_tight = free_in(folder).is_some_and(|free| free < in_use.saturating_add(MARGIN));
    if is_tight && shares_disk(context, folder) {
        make(context, folder, allocated(tree));
    }
}

/// Bytes that the files below `tree` have on its file system. It skips what it cannot read, which
/// the build reports.
fn allocated(tree: &Path) -> u64 {
    let own = disk(tree);
    let mut folders: Vec<PathBuf> = vec![tree.to_owned()];
    let mut sum = 0_u64;
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
            let Ok(metadata) = entry.metadata() else { continue };
            if metadata.is_dir() && Some(metadata.dev()) == own {
                folders.push(entry.path());
            }
            sum = sum.saturating_add(metadata.blocks().saturating_mul(SECTOR));
        }
    }
    sum
}

/// The number of the file system of `path`.
fn disk(path: &Path) -> Option<u64> {
    fs::metadata(path).ok().map(|metadata| metadata.dev())
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::{STEP, StepByStep};

    #[test]
    fn room_is_asked_for_ahead_of_what_is_stored() {
        let asked = Mutex::new(Vec::new());
        let ask = |bytes| asked.lock().unwrap().push(bytes);
        let steps = StepByStep::new(&ask);
        let mut furthest = 0;
        for reached in (0..=4 * STEP).step_by(1 << 20) {
            let before = asked.lock().unwrap().len();
            steps.reached(reached);
            if asked.lock().unwrap().len() > before {
                furthest = reached + STEP;
            }
            assert!(furthest >= reached + STEP / 2, "at {reached}");
        }
        let asked = asked.into_inner().unwrap();
        assert!(asked.len() <= 10 && asked.iter().all(|bytes| *bytes == STEP), "{asked:?}");
    }
}
