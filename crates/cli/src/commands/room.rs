//! Space for an image that a command is about to store, on the disk of the host's cache.
//!
//! ```text
//!   pull, build ─► estimate of the bytes ─► more than are free above the floor? ─► daemon: the
//!                                            cache evicts the rest
//!   layers ─► a piece ─► lock: free above the floor? ─► allocated ┐ no ─► daemon: the cache evicts
//!                        ▲                                        │       the rest, or no room
//!                        └────────────────────────────────────────┘
//! ```
//!
//! The estimate is no limit: the command stores what it has to, and reports a full disk. Layers are
//! part of the cache, so they end at its floor. Without a daemon nobody evicts.
//!
//! Invariant: no command allocates a piece of a layer below the floor, whatever others store
//! (`tests/cache_layers.rs`).
//!
//! Archives on standard input have no size, and those of others state one that nobody has checked.
//! A child that reads them therefore asks for room step by step, just ahead of what it has stored
//! ([`StepByStep`]): a stated size evicts nothing.

use std::{
    fs::{self, File},
    io,
    os::unix::fs::{MetadataExt, OpenOptionsExt},
    path::{Path, PathBuf},
    sync::atomic::{AtomicU64, Ordering::Relaxed},
};

use burgeon_block::{Error, Result};
use burgeon_daemon::{
    Client, floor_of,
    protocol::{CacheRequest, Reply, Request},
};
use burgeon_image::catalog::ImageRecord;
use rustix::{
    fs::{FallocateFlags, FlockOperation, OFlags, fallocate, flock, statvfs},
    io::{Errno, retry_on_intr},
};

use super::{Context, disk_errors::free_in};

/// The room that a child asks for ahead of what it has stored.
pub(super) const STEP: u64 = 64 << 20;

/// Beside the image: for the file system's own blocks and for records.
const MARGIN: u64 = 64 << 20;

/// Free space that a layer leaves above the floor for chunks that the server writes at that moment,
/// which it allowed by an earlier look: 64 fetches at once (`volume/src/limits.rs`) of 256 KiB.
const IN_FLIGHT: u64 = 16 << 20;

/// Evictions for one piece of a layer: readers may take the space first.
const TRIES: usize = 8;

/// Bytes of the unit in which `stat` counts.
const SECTOR: u64 = 512;

/// Has the cache evict until about `bytes` and a margin are free in `folder`, a store, as far as it
/// can. That it cannot is no error: perhaps the image fits nevertheless.
pub(super) fn make(context: &Context, folder: &Path, bytes: u64) {
    _ = try_make(context, folder, bytes);
}

fn try_make(context: &Context, folder: &Path, bytes: u64) -> Result<()> {
    let Some(free) = free_in(folder).filter(|_| shares_disk(context, folder)) else {
        return Ok(());
    };
    let wanted = bytes.saturating_add(MARGIN.max(floor_of(&context.state, folder)?));
    if free < wanted {
        // An image that cannot fit anyway costs no cached data. The margin may be missing.
        evict(context, wanted - free, bytes.saturating_sub(free))?;
    }
    Ok(())
}

/// Has the cache evict `bytes`, if it has as many as are `needed`. Returns the evicted bytes.
fn evict(context: &Context, bytes: u64, needed: u64) -> Result<u64> {
    let Some(client) = Client::connect(&context.state)? else { return Ok(0) };
    let ask = |request| client.call(&Request::Cache(request));
    let (Reply::Cache(answer), _) = ask(CacheRequest::Show)? else { return Ok(0) };
    if needed > answer.cache.used.saturating_add(answer.cache.layers.unwrap_or(0)) {
        return Ok(0);
    }
    match ask(CacheRequest::Evict { bytes })? {
        (Reply::Cache(answer), _) => Ok(answer.bytes),
        _ => Ok(0),
    }
}

/// Allocates a piece of `file`, a layer that is being stored, of an offset and a length. False if
/// less than the floor of its disk would stay free.
pub(super) fn allocate(context: &Context, file: &File, piece: (u64, u64)) -> bool {
    try_allocate(context, file, piece).unwrap_or(false)
}

fn try_allocate(context: &Context, file: &File, (offset, len): (u64, u64)) -> Result<bool> {
    let failed = |error| Error::io("cannot allocate space for a layer", error);
    let store = context.state.store();
    let metadata = file.metadata().map_err(failed)?;
    // A child that reads hostile data says what it likes.
    if !metadata.is_file() || Some(metadata.dev()) != disk(&store) || len > STEP {
        return Ok(false);
    }
    let is_shared = shares_disk(context, &store);
    let in_flight = if is_shared { IN_FLIGHT } else { 0 };
    let wanted = floor_of(&context.state, &store)?.saturating_add(in_flight).saturating_add(len);
    let mut in_vain = 0;
    for attempt in 0..TRIES {
        let lacking = {
            let _alone = lock(context).map_err(failed)?;
            let lacking = wanted.saturating_sub(free_in(&store).unwrap_or(0));
            if lacking == 0 {
                return match fallocate(file, FallocateFlags::KEEP_SIZE, offset, len) {
                    Ok(()) => Ok(true),
                    // A file system that cannot: the bytes are written next.
                    Err(Errno::OPNOTSUPP) => Ok(true),
                    Err(error) => Err(failed(error.into())),
                };
            }
            lacking
        };
        // Readers have taken what was free a moment ago: more and more is asked for.
        let ahead = attempt as u64 * IN_FLIGHT;
        let is_in_vain = !is_shared || evict(context, lacking.saturating_add(ahead), 0)? == 0;
        // Once, others may have evicted it all at the same moment.
        in_vain += u32::from(is_in_vain);
        if !is_shared || in_vain > 1 {
            break;
        }
    }
    Ok(false)
}

/// Keeps other commands from allocating space for layers.
fn lock(context: &Context) -> io::Result<File> {
    let flags = (OFlags::NOFOLLOW | OFlags::NONBLOCK).bits() as i32;
    let mut options = File::options();
    options.create(true).truncate(false).write(true).mode(0o600).custom_flags(flags);
    let file = options.open(context.state.room_lock())?;
    retry_on_intr(|| flock(&file, FlockOperation::LockExclusive))?;
    Ok(file)
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
pub(super) fn make_for_file(context: &Context, folder: &Path, file: &File) {
    make(context, folder, file.metadata().map_or(0, |it| it.blocks().saturating_mul(SECTOR)));
}

/// Does the same for the files of `tree`, whose sizes are added up only if they may not fit.
pub(super) fn make_for_tree(context: &Context, folder: &Path, tree: &Path) {
    let Ok(source) = statvfs(tree) else { return };
    let in_use = source.f_blocks.saturating_sub(source.f_bfree).saturating_mul(source.f_frsize);
    let is_tight = free_in(folder).is_some_and(|free| {
        free < in_use.saturating_add(MARGIN.max(floor_of(&context.state, folder).unwrap_or(0)))
    });
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
