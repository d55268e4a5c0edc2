//! Watches the mounts whose end nobody reports: those over ublk devices, which are removed after
//! their last user, and those over plain files.
//!
//! A loop device detaches itself, and its FUSE file goes with it; a ublk device stays until it is
//! removed. The kernel does not report that a file system releases a device, so this thread polls:
//!
//! ```text
//!   btrfs is gone from sysfs ─► the device is not held ─► stop it
//!     ─► the server sees the end of its requests ─► Ended ─► release
//!
//!   a plain file: btrfs is gone from sysfs, and the loop devices are detached ─► release
//! ```

use std::{
    sync::{Arc, PoisonError},
    thread,
    time::{Duration, Instant},
};

use burgeon_frontend::ublk::Control;

use super::{Supervisor, release::await_loops};
use crate::{id::MountId, state::record::MountRecord, transport};

/// Interval of looking at mounts while no client waits for one: two calls of `stat` per mount.
const INTERVAL: Duration = Duration::from_secs(1);

/// Interval while a client waits.
const INTERVAL_AWAITED: Duration = Duration::from_millis(2);

/// Time limit for the server to see that its device was stopped.
const ENDED_TIMEOUT: Duration = Duration::from_secs(5);

impl Supervisor {
    /// Watches them for ever.
    pub(super) fn watch_devices(self: &Arc<Self>) -> ! {
        loop {
            for (id, number, stopped) in self.left_devices() {
                match stopped {
                    None => self.stop_device(id, number),
                    Some(at) if at.elapsed() > ENDED_TIMEOUT => self.release(id),
                    Some(_) => {}
                }
            }
            for id in self.ended_plain() {
                // Removing a large file may take long; the other mounts must not wait for that.
                let supervisor = Arc::clone(self);
                thread::spawn(move || supervisor.release(id));
            }
            let table = self.table();
            let watched = table.mounts.values().any(|entry| {
                entry.record.plain || entry.record.attach.transport.device().is_some()
            });
            let interval = match (watched, table.release_waiters) {
                (true, 0) => INTERVAL,
                (true, _) => INTERVAL_AWAITED,
                // Every change notifies this thread, so any limit will do.
                (false, _) => Duration::from_secs(3600),
            };
            let waited = self.changed.wait_timeout(table, interval);
            drop(waited.unwrap_or_else(PoisonError::into_inner));
        }
    }

    /// The ublk devices whose file system is gone, and the time when each was stopped.
    fn left_devices(&self) -> Vec<(MountId, u32, Option<Instant>)> {
        let records: Vec<_> = {
            let table = self.table();
            let mounts = table.mounts.values().filter(|entry| entry.handed_out);
            mounts.map(|entry| (entry.record.clone(), entry.stopped)).collect()
        };
        let left = records.into_iter().filter_map(|(record, stopped)| {
            let number = record.attach.transport.device()?;
            let left = stopped.is_some() || !record.is_alive() && transport::is_unused(number);
            left.then_some((record.attach.id, number, stopped))
        });
        left.collect()
    }

    /// The mounts over plain files that the kernel has released.
    fn ended_plain(&self) -> Vec<MountId> {
        let records: Vec<_> = {
            let table = self.table();
            let mounts = table.mounts.values();
            let plain =
                mounts.filter(|entry| entry.handed_out && entry.record.plain && !entry.releasing);
            plain.map(|entry| entry.record.clone()).collect()
        };
        let is_over = |record: &MountRecord| {
            !record.is_alive() && await_loops(&self.state, record, Duration::ZERO)
        };
        let over = records.into_iter().filter(is_over);
        over.map(|record| record.attach.id).collect()
    }

    fn stop_device(self: &Arc<Self>, id: MountId, number: u32) {
        if let Err(e) = Control::open().and_then(|mut control| control.stop(number)) {
            tracing::warn!(mount = %id, error = %e, "cannot remove the device");
            // Tries again after a pause.
            thread::sleep(INTERVAL);
            return;
        }
        let served = {
            let mut table = self.table();
            let served = table.link.is_some();
            if let Some(entry) = table.mounts.get_mut(&id) {
                entry.stopped = Some(Instant::now());
            }
            served
        };
        if !served {
            self.release(id);
        }
    }
}
