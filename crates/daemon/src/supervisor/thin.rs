//! Grows sprouts: reserves space ahead of its use by btrfs, up to the limit.
//!
//! ```text
//!   the file, and so the device:  ├── used by btrfs ──┤── headroom ──┤╌╌╌╌ up to the limit ╌╌╌╌┤
//!                                                                    ▲ moved by doubling
//! ```
//!
//! btrfs only ever sees reserved space: the device grows after the file has. When the host is full
//! the device keeps its size, and writers get ENOSPC from btrfs as on any full disk; on a sparse
//! file btrfs's own writes would fail, and it would abort.
//!
//! To grow, the same devices are mounted once more, detached, for a moment, because the daemon
//! keeps no reference to the mount. This may wait, so a helper does it (`grow.rs`) and one thread
//! per step waits for the helper; the thread that looks at all sprouts never waits for one of them.
//! `policy` decides when to look and when to grow.
//!
//! Invariants:
//! - One step per sprout at a time.
//! - No step takes the last [`HOST_LEFT`](crate::state::space::HOST_LEFT) bytes of the host.
//! - A sprout without writes keeps its initial size (`crates/cli/tests/writes.rs`).
//! - After a file system was found read-only, it is left alone, because each attempt would try to
//!   make it writable.

mod policy;

use std::{
    collections::HashMap,
    path::{Path, PathBuf},
    sync::{Arc, PoisonError},
    thread,
    time::{Duration, Instant},
};

use burgeon_block::{Error, ErrorKind, Result};
use burgeon_frontend::btrfs_mount::Btrfs;

use self::policy::{Host, INTERVAL_HOST, Usage, Watched};
use super::{
    Supervisor,
    grow::{Grow, Step},
    helper::{self, Outcome, Task},
};
use crate::{
    id::{Fsid, MountId},
    state::record::{Growth, WritesState},
};

/// Time limit for a step in work to end, before the whole sprout is reserved.
const RESERVE_MAX: Duration = Duration::from_secs(120);
const RESERVE_PAUSE: Duration = Duration::from_millis(20);

/// The pause after a step for which the host had no space.
const FULL_PAUSE: Duration = Duration::from_secs(1);

/// A growing sprout in use.
struct Thin {
    id: MountId,
    fsid: Fsid,
    path: PathBuf,
    device: PathBuf,
    /// The device's number in its file system.
    device_id: u64,
    /// Bytes of block groups that lie on the seed.
    seed_bytes: u64,
    limit: u64,
    reserved: u64,
    /// A thread grows it now.
    growing: bool,
    /// The time of the last failure.
    failed: Option<Instant>,
}

impl Supervisor {
    /// Looks after growing sprouts as long as there are any; to be called for each new one.
    pub(super) fn tend_thin(self: &Arc<Self>) {
        {
            let mut table = self.table();
            table.tend_now = true;
            if std::mem::replace(&mut table.tending_thin, true) {
                drop(table);
                self.changed.notify_all();
                return;
            }
        }
        let supervisor = Arc::clone(self);
        thread::spawn(move || {
            let (mut watched, mut host) = (HashMap::new(), Host::default());
            while let Some(pause) = supervisor.look_at_thin(&mut watched, &mut host) {
                let table = supervisor.table();
                let until = |table: &mut super::table::Table| !std::mem::take(&mut table.tend_now);
                let waited = supervisor.changed.wait_timeout_while(table, pause, until);
                drop(waited.unwrap_or_else(PoisonError::into_inner));
            }
        });
    }

    /// Looks at the growing sprouts that are due; returns the time to do so again, or `None` if
    /// there are none.
    fn look_at_thin(
        self: &Arc<Self>,
        watched: &mut HashMap<MountId, Watched>,
        host: &mut Host,
    ) -> Option<Duration> {
        let sprouts = {
            let mut table = self.table();
            let sprouts = thin_sprouts(&table);
            // Under the same lock: the next sprout to be added starts the next thread.
            table.tending_thin = !sprouts.is_empty();
            sprouts
        };
        let (now, host_moves) = (Instant::now(), host.has_moved());
        watched.retain(|id, _| sprouts.iter().any(|sprout| sprout.id == *id));
        for sprout in &sprouts {
            let state = watched.entry(sprout.id).or_insert_with(|| Watched::new(now));
            if !host_moves && !state.is_due(now) {
                continue;
            }
            let Some(usage) = Usage::of(sprout.fsid) else { continue };
            let used = usage.allocated.saturating_sub(sprout.seed_bytes);
            let taken = state.see(now, usage);
            let rests = sprout.failed.is_some_and(|at| at.elapsed() < FULL_PAUSE);
            if let Some(to) = state.next_size(sprout.reserved, used, taken, sprout.limit)
                && !sprout.growing
                && !rests
            {
                self.begin_growing(sprout.id, to);
            }
        }
        watched.values().map(|state| state.pause(now).min(INTERVAL_HOST)).min()
    }

    /// Grows a sprout in a thread of its own.
    fn begin_growing(self: &Arc<Self>, id: MountId, to: u64) {
        let sprout = {
            let mut table = self.table();
            let Some(entry) = table.mounts.get_mut(&id) else { return };
            entry.growing = true;
            thin_sprout(entry)
        };
        let supervisor = Arc::clone(self);
        thread::spawn(move || {
            let grown = match sprout {
                Some(sprout) => supervisor.grow(sprout, to),
                None => Ok(Step::Gone),
            };
            supervisor.grown(id, grown);
        });
    }

    /// Grows the sprout of `id` to its limit, so that no process has to look after it. An error
    /// says how much room it lacks.
    pub(super) fn reserve_whole(&self, id: MountId) -> Result<()> {
        let begun = Instant::now();
        loop {
            let sprout = {
                let mut table = self.table();
                let Some(entry) = table.mounts.get_mut(&id) else { return Ok(()) };
                let sprout = thin_sprout(entry).filter(|sprout| sprout.reserved < sprout.limit);
                let Some(sprout) = sprout else { return Ok(()) };
                let is_growing = std::mem::replace(&mut entry.growing, true);
                (!is_growing).then_some(sprout)
            };
            let Some(sprout) = sprout else {
                if begun.elapsed() > RESERVE_MAX {
                    let what = "the sprout is being grown by another step, which does not end";
                    return Err(Error::new(ErrorKind::Unavailable, what));
                }
                thread::sleep(RESERVE_PAUSE);
                continue;
            };
            let (reserved, limit) = (sprout.reserved, sprout.limit);
            let step = self.grow(sprout, limit);
            let failed = match &step {
                Ok(Step::Taken(_)) => None,
                Ok(Step::Gone) => Some((ErrorKind::NotFound, "it is unmounted".to_owned())),
                Ok(Step::ReadOnly) => {
                    Some((ErrorKind::Unavailable, "the file system is read-only".to_owned()))
                }
                Err(error) => Some((error.kind(), error.to_string())),
            };
            self.grown(id, step);
            if let Some((kind, why)) = failed {
                let what = format!(
                    "cannot reserve the {} MiB that the writes of this mount may still take, which \
                     nobody could add later: {why}",
                    (limit - reserved) >> 20
                );
                return Err(Error::new(kind, what));
            }
        }
    }

    fn grow(&self, sprout: Thin, wanted: u64) -> Result<Step> {
        let Thin { fsid, path, device, device_id, reserved, .. } = sprout;
        self.make_room(wanted - reserved);
        let task = Task::Grow(Grow { fsid, path, device, device_id, reserved, wanted });
        match helper::run(&self.state, &task, &[], || {})?.0 {
            Outcome::Grown { step } => Ok(step),
            _ => Err(Error::new(
                ErrorKind::LocalIo,
                "unexpected answer from the process that grows the sprout",
            )),
        }
    }

    /// Records the result of a step; returns the sprout's new size, if it has one.
    fn grown(&self, id: MountId, grown: Result<Step>) {
        if let Ok(Step::Taken(to)) = grown {
            let noted = self.update(id, |record| {
                if let WritesState::Sprout(sprout) = &mut record.writes {
                    sprout.reserved = to;
                }
            });
            if let Err(e) = noted {
                // The next supervisor starts from the recorded size: repeating a step is harmless.
                tracing::warn!(mount = %id, error = %e, "cannot write down the size of the sprout");
            }
        }
        let mut table = self.table();
        let Some(entry) = table.mounts.get_mut(&id) else { return };
        entry.growing = false;
        let failed_before = entry.growth_failed.is_some();
        entry.growth_failed = grown.is_err().then(Instant::now);
        entry.growth_ended = matches!(grown, Ok(Step::ReadOnly));
        drop(table);
        if let Ok(Step::ReadOnly) = grown {
            tracing::error!(
                mount = %id,
                "the file system is read-only, so its sprout grows no more: `burgeon doctor` \
                 names the remedy"
            );
        }
        // A full host may stay full for hours: one message is enough.
        if let Some(e) = grown.err().filter(|_| !failed_before) {
            tracing::warn!(mount = %id, error = %e, "the sprout does not grow");
        }
    }
}

fn thin_sprouts(table: &super::table::Table) -> Vec<Thin> {
    let mounts = table
        .mounts
        .values()
        .filter(|entry| entry.handed_out && !entry.ended && !entry.growth_ended);
    mounts.filter_map(thin_sprout).collect()
}

fn thin_sprout(entry: &super::table::MountEntry) -> Option<Thin> {
    let record = &entry.record;
    let WritesState::Sprout(sprout) = &record.writes else { return None };
    let growth = record.growth.as_ref()?;
    Some(Thin {
        id: record.attach.id,
        fsid: record.fsid?,
        path: sprout.path.clone(),
        device: growth.device.clone(),
        device_id: growth.device_id,
        seed_bytes: growth.seed_bytes,
        limit: sprout.limit,
        reserved: sprout.reserved,
        growing: entry.growing,
        failed: entry.growth_failed,
    })
}

/// The parameters for growing the sprout on `device`, of `reserved` bytes, collected while its
/// mount is at hand. Also completes an interrupted step.
pub(crate) fn growth(mount: &Btrfs, device: &Path, reserved: u64) -> Result<Growth> {
    let devices = mount.devices()?;
    let sprout = devices.iter().find(|one| one.path == device).ok_or_else(|| {
        let what = format!("btrfs does not list {}", device.display());
        Error::new(ErrorKind::LocalIo, what)
    })?;
    if sprout.size < reserved {
        mount.grow_device(sprout.id)?;
    }
    let seed = devices.iter().filter(|one| one.id != sprout.id);
    Ok(Growth {
        device: device.to_owned(),
        device_id: sprout.id,
        seed_bytes: seed.map(|one| one.allocated).sum(),
    })
}
