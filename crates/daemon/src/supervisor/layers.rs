//! Stored layers under the limit and the floor of the host's cache.
//!
//! ```text
//!   each second:  layers, limit ─► at most half of the limit: the rest is evicted
//!                               └► what they leave is the limit of chunks ── run/layers.json ─► server
//!                 free space below the floor for two looks ─► layers are evicted, too
//! ```
//!
//! The server keeps the floor by evicting chunks, within a second; layers follow when that was not
//! enough. Without a limit, layers and chunks share what is free above the floor. A command that
//! stores a layer asks for room first. On a disk without chunks, where it would ask in vain, some
//! room is kept above the floor for the next layers.

use std::{
    fs,
    path::Path,
    thread,
    time::{Duration, SystemTime},
};

use burgeon_block::Result;
use rustix::fs::statvfs;

use super::Supervisor;
use crate::{
    ipc::link::CacheOrder,
    state::{
        cache::Bounds,
        cache_dir::CacheDir,
        layers::{LayerShare, evict, evictable},
        paths::StateDir,
        space::shares_disk,
    },
};

/// Time between two looks.
const PERIOD: Duration = Duration::from_secs(1);

/// Looks below the floor after which layers go: the first one is the server's.
const SHORT_MAX: u32 = 2;

/// Room for new layers above the floor of a disk without chunks, at most this share of it.
const AHEAD: u64 = 64 << 20;
const AHEAD_SHARE: u64 = 64;

/// Size and free bytes of the file system of a folder.
fn disk(folder: &Path) -> Option<(u64, u64)> {
    let disk = statvfs(folder).ok()?;
    let [size, free] = [disk.f_blocks, disk.f_bavail].map(|it| it.saturating_mul(disk.f_frsize));
    Some((size, free))
}

/// The times at which layers and lists of them came or went.
fn changes(state: &StateDir) -> [Option<SystemTime>; 2] {
    ["layers", "held"].map(|folder| fs::metadata(state.store().join(folder)).ok()?.modified().ok())
}

/// The limit of chunks and layers together, if there is one.
fn limit(state: &StateDir) -> Result<Option<u64>> {
    let (limit, _) = Bounds::read(state)?.without_layers();
    let cache = CacheDir::read(state).folder(state);
    Ok(limit.and_then(|limit| Some(limit.of(disk(&cache)?.0))))
}

fn share(limit: Option<u64>, bytes: u64) -> LayerShare {
    LayerShare { bytes, left: limit.map(|limit| limit.saturating_sub(bytes)) }
}

/// Tells the server what the layers leave of a limit that was changed just now.
pub(super) fn renew_share(state: &StateDir) -> Result<()> {
    share(limit(state)?, LayerShare::read(state).bytes).write(state)
}

/// The findings of one look.
#[derive(Default)]
pub(super) struct Look {
    changes: Option<[Option<SystemTime>; 2]>,
    bytes: u64,
    share: Option<LayerShare>,
    /// Looks in turn below the floor.
    short: u32,
    is_failing: bool,
}

impl Supervisor {
    /// Bounds the layers as long as this process lives.
    pub(super) fn bound_layers_for_ever(&self) {
        let mut look = Look::default();
        loop {
            let bounded = self.bound_layers(&mut look);
            if let (Err(error), false) = (&bounded, look.is_failing) {
                tracing::warn!(%error, "stored layers are not bounded");
            }
            look.is_failing = bounded.is_err();
            thread::sleep(PERIOD);
        }
    }

    pub(super) fn bound_layers(&self, look: &mut Look) -> Result<()> {
        let state = &self.state;
        let changes = changes(state);
        if look.changes != Some(changes) {
            look.bytes = evictable(state)?.iter().map(|layer| layer.bytes).sum();
            look.changes = Some(changes);
        }
        let (_, keep_free) = Bounds::read(state)?.without_layers();
        let limit = limit(state)?;
        let beyond = limit.map_or(0, |limit| look.bytes.saturating_sub(limit / 2));
        let below = disk(&state.store()).map_or(0, |(size, free)| {
            let is_alone = !shares_disk(&CacheDir::read(state).folder(state), &state.store());
            let ahead = if is_alone { AHEAD.min(size / AHEAD_SHARE) } else { 0 };
            (keep_free.of(size) + ahead).saturating_sub(free)
        });
        look.short = if below > 0 { look.short + 1 } else { 0 };
        let short = if look.short >= SHORT_MAX { below } else { 0 };
        let wanted = beyond.max(short).min(look.bytes);
        if wanted > 0 {
            look.bytes = look.bytes.saturating_sub(evict(state, wanted)?);
            look.changes = None;
        }
        let share = share(limit, look.bytes);
        if look.share != Some(share) {
            if LayerShare::read(state) != share {
                share.write(state)?;
            }
            // A server that is not there reads the file when it starts.
            let is_told = self.ordered(CacheOrder::Resize, None).is_some();
            look.share = (is_told || self.table().server_pid.is_none()).then_some(share);
        }
        Ok(())
    }
}
