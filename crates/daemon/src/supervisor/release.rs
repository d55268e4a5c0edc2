//! Cleans up when the kernel releases a mount, after any kind of `umount`.
//!
//! ```text
//!   last umount ─► btrfs closes its devices ─► the loops detach themselves ─► the FUSE file system
//!   ends ─► the server's reads end ─► Ended ─► here: wait for the loops, remove the folder,
//!   unlock the writes' name
//!
//!   over ublk: watch.rs stops the device ─► the server's requests end ─► Ended ─► here
//!   over a plain file: watch.rs ─► here
//! ```

use std::{
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};

use burgeon_block::{Error, ErrorKind, Result};
use burgeon_frontend::btrfs_mount;

use super::{
    Supervisor,
    helper::{self, Task},
    table::MountEntry,
};
use crate::{
    host::backing_devices,
    id::MountId,
    ipc::link::ToServer,
    state::{
        complete, files, grants,
        paths::StateDir,
        prepared::doubt,
        record::{MountRecord, WritesState},
        recycled_seed,
    },
};

/// Time limit for the loops to detach after the FUSE file is closed, before a warning: normally
/// they take milliseconds.
const LOOPS_PATIENCE: Duration = Duration::from_secs(10);

/// Interval at which the loops are checked; it doubles up to the longest.
const LOOPS_PAUSE_MIN: Duration = Duration::from_millis(2);
const LOOPS_PAUSE_MAX: Duration = Duration::from_secs(1);

impl Supervisor {
    /// The server has found the map of the mount's image damaged: the next mount checks it. A
    /// server marks no image itself, because it may not write to an image's folder.
    pub(super) fn doubt(&self, id: MountId) {
        let seed = self.table().mounts.get(&id).map(|entry| entry.record.attach.seed.clone());
        if let Some(seed) = seed {
            doubt(&seed);
        }
    }

    /// The kernel has closed the data of `id`: removes the mount's resources.
    pub(super) fn release(&self, id: MountId) {
        let record = {
            let mut table = self.table();
            let Some(entry) = table.mounts.get_mut(&id) else { return };
            if entry.lost {
                return;
            }
            if !entry.handed_out {
                // The thread that makes the mount sees the failure and clears up.
                entry.ended = true;
                return;
            }
            // The FUSE file of a mount that was let go has ended, but not the mount.
            if entry.record.plain && entry.record.is_alive() {
                return;
            }
            // Of a plain mount, both the end of its FUSE file and its watcher ask for this.
            if std::mem::replace(&mut entry.releasing, true) {
                return;
            }
            entry.record.clone()
        };
        self.let_go(id);
        // Until they are detached, however long that takes, the writes are in use and their name is
        // locked. This thread has nothing else to do.
        if !await_loops(&self.state, &record, LOOPS_PATIENCE) {
            tracing::warn!(mount = %id, "a loop device does not go away: the mount is released when it does");
            await_loops(&self.state, &record, Duration::MAX);
        }
        grants::revoke(&self.state, id);
        forget(&self.state, id, &record.loops);
        recycled_seed::keep(&self.state, &record);
        complete::give_back(&self.state, &record);
        if let Err(e) = files::remove_folder(&self.state.mount(id))
            .and_then(|()| files::remove_file(&self.state.recorded_reads(id)))
        {
            tracing::warn!(mount = %id, error = %e, "cannot remove all files of a mount that is released");
        }
        if record.plain {
            self.table().look_at_loans();
        }
        recycled_seed::refill(&self.state);
        self.count_last(id);
        let entry = self.table().mounts.remove(&id);
        // Content may have been mapped until now.
        grants::revoke(&self.state, id);
        if let Some(entry) = &entry {
            tracing::info!(mount = %id, "released {}", describe(entry));
        }
        // Releases the writes' name and the descriptors before waiting clients are woken.
        drop(entry);
        self.changed.notify_all();
        let idle = {
            let table = self.table();
            table.end_when_idle && table.served().next().is_none()
        };
        if idle && self.try_stop(false).is_ok() {
            self.end();
        }
    }

    /// The mount's descriptor has been sent: from now on the user decides when the mount ends.
    pub(super) fn handed_out(self: &Arc<Self>, id: MountId) {
        let ended = match self.table().mounts.get_mut(&id) {
            Some(entry) => {
                entry.handed_out = true;
                entry.ended
            }
            None => false,
        };
        // From now on `watch.rs` looks for the end of a mount that nothing else tells of.
        self.changed.notify_all();
        if ended {
            self.release(id);
        } else {
            self.tend_thin();
        }
    }

    /// Cleans up a mount that could not be made; the caller has closed all of its descriptors.
    pub(super) fn abandon(&self, id: MountId) {
        self.let_go(id);
        grants::revoke(&self.state, id);
        let entry = {
            let mut table = self.table();
            table.send(&ToServer::Cool { id });
            table.mounts.remove(&id)
        };
        let (record, lock) = match entry {
            // Closing the last descriptor of /dev/fuse aborts the connection, if it still lives.
            Some(MountEntry { record, _writes_lock, .. }) => (Some(record), _writes_lock),
            None => (None, None),
        };
        let state = self.state.clone();
        let kept = record.clone();
        let clear_up = move || {
            let loops = kept.as_ref().map(|record| &record.loops[..]);
            forget(&state, id, loops.unwrap_or_default());
            if let Some(record) = &kept {
                recycled_seed::keep(&state, record);
                complete::give_back(&state, record);
            }
            if let Err(e) = files::remove_folder(&state.mount(id)) {
                tracing::warn!(mount = %id, error = %e, "a mount that could not be made left something behind");
            }
            drop(lock);
        };
        if let Some(record) = record
            && !await_loops(&self.state, &record, LOOPS_PATIENCE)
        {
            tracing::warn!(mount = %id, "a loop device of a mount that could not be made does not go away");
            let state = self.state.clone();
            std::thread::spawn(move || {
                await_loops(&state, &record, Duration::MAX);
                clear_up();
            });
            return;
        }
        clear_up();
        self.changed.notify_all();
    }

    /// Waits until `id` is released. On a timeout, the error names possible users.
    pub(super) fn await_release(&self, id: MountId, timeout: Duration) -> Result<()> {
        let mut table = self.table();
        table.release_waiters += 1;
        // Makes the watcher of ublk devices look more often.
        self.changed.notify_all();
        let waited = self
            .changed
            .wait_timeout_while(table, timeout, |table| table.mounts.contains_key(&id))
            .map(|(mut table, _)| {
                table.release_waiters -= 1;
                table.mounts.contains_key(&id)
            })
            .unwrap_or(false);
        match waited {
            false => Ok(()),
            true => Err(Error::new(
                ErrorKind::Unavailable,
                "it is unmounted here, but another mount namespace (a container, a service), an \
                 open file or a lazy umount still holds it; it is released when they let go",
            )),
        }
    }

    /// Waits for mounts whose file system the kernel has released, and of which that is not noticed
    /// yet: whoever unmounts with umount(8) and stops the daemon then has nothing mounted.
    pub(super) fn await_unmounted(&self, timeout: Duration) {
        let entries: Vec<_> = {
            let table = self.table();
            let handed_out = table.mounts.values().filter(|entry| entry.handed_out && !entry.lost);
            handed_out.map(|entry| entry.record.clone()).collect()
        };
        let deadline = Instant::now() + timeout;
        for record in entries.iter().filter(|record| !record.is_alive()) {
            // The caller names what is still there.
            let left = deadline.saturating_duration_since(Instant::now());
            let _ = self.await_release(record.attach.id, left);
        }
    }
}

fn describe(entry: &MountEntry) -> String {
    format!("{} at {}", entry.record.image, entry.record.target.display())
}

/// Waits until none of the mount's loops is attached to a file of it; false if one still is after
/// `timeout`.
pub(crate) fn await_loops(state: &StateDir, record: &MountRecord, timeout: Duration) -> bool {
    let mount = state.mount(record.attach.id);
    // Loop numbers are reused, also for other mounts of this state directory.
    let sprout = match &record.writes {
        WritesState::Sprout(sprout) => Some(sprout.path.as_path()),
        WritesState::ReadOnly => None,
    };
    let is_ours = |device: &PathBuf| {
        backing_file(device)
            .is_some_and(|file| file.starts_with(&mount) || Some(file.as_path()) == sprout)
    };
    let begun = Instant::now();
    let mut pause = LOOPS_PAUSE_MIN;
    while record.loops.iter().any(is_ours) {
        if begun.elapsed() > timeout {
            return false;
        }
        std::thread::sleep(pause);
        pause = (2 * pause).min(LOOPS_PAUSE_MAX);
    }
    true
}

/// Attempts to remove a loop number that another process, such as udev, has open.
const REMOVALS: u32 = 50;
const REMOVAL_PAUSE: Duration = Duration::from_millis(20);

/// Lets a helper forget the block devices of a mount that has ended: that may wait for other
/// mounts.
pub(super) fn forget(state: &StateDir, id: MountId, loops: &[PathBuf]) {
    let task = Task::Forget { id, loops: loops.to_vec() };
    if let Err(e) = helper::run(state, &task, &[], || {}) {
        tracing::warn!(mount = %id, error = %e, "block devices of the mount may be left");
    }
}

/// Makes btrfs forget these devices: it remembers them by number, and numbers are reused. A number
/// in use again is not ours any more: its new owner's scan replaces btrfs's entry.
pub(crate) fn forget_loops(loops: &[PathBuf]) {
    for device in loops.iter().filter(|device| backing_file(device).is_none()) {
        // A stale entry costs only a warning in the kernel's log. The device may be in use by now:
        // a mount in progress scans its devices again.
        let _ = btrfs_mount::forget(device);
    }
    remove_unused_loops();
}

/// Removes the loop numbers made for mounts that have ended, also those of killed daemons: these
/// devices have no discard, and must not be given to other users.
pub(crate) fn remove_unused_loops() {
    for _ in 0..REMOVALS {
        match burgeon_frontend::remove_unused_loops() {
            Ok(0) => return,
            Ok(_) => std::thread::sleep(REMOVAL_PAUSE),
            Err(e) => {
                tracing::warn!(error = %e, "a loop number without discard stays");
                return;
            }
        }
    }
}

fn backing_file(device: &Path) -> Option<PathBuf> {
    backing_devices::backing_file(&Path::new("/sys/block").join(device.file_name()?))
}
