//! Cleans up a mount without a supervisor that a command unmounts. Otherwise its folder, with up to
//! `--write-limit` of reserved space, would stay until the next daemon starts.
//!
//! ```text
//!   find (before the umount) ─► umount ─► the kernel releases it ─► run/lock ─► remove folder
//! ```
//!
//! [`Orphan::keep_apart`] keeps a reconnect of the mount away from its umount, with a daemon and
//! without one: the helper of a killed daemon may still run.
//!
//! Invariant: the folder is removed only under the supervisor's own lock, after the kernel has
//! released every device. A supervisor that starts meanwhile has the lock and clears up by itself;
//! a killed one has it until the kernel has ended its last thread.

use std::{
    path::Path,
    thread,
    time::{Duration, Instant},
};

use burgeon_block::{Digest, Error, ErrorKind, Result};
use burgeon_source::Location;

use crate::{
    host::cgroup::remove_leftovers,
    id::Fsid,
    state::{
        files::{self, Lock},
        paths::StateDir,
        record::{MountRecord, WritesState, mount_ids, read_record},
        recycled_seed,
    },
    supervisor::{await_loops, forget_loops},
    transport,
};

/// Interval of checking if the kernel has released the mount.
const PAUSE: Duration = Duration::from_millis(10);

/// Time limit for a reconnect to finish before an umount: it takes milliseconds, unless its server
/// or a disk hangs.
const RECONNECT_MAX: Duration = Duration::from_secs(30);

/// A mount that has a folder in the state directory.
#[derive(Debug)]
pub struct Orphan {
    record: MountRecord,
}

/// The mount with the file system `fsid`, found by its folder.
pub fn find(state: &StateDir, fsid: Fsid) -> Option<Orphan> {
    let mut records = mount_ids(state).into_iter().filter_map(|id| read_record(state, id).ok());
    records.find(|record| record.fsid == Some(fsid)).map(|record| Orphan { record })
}

/// The mounts in the state directory that the kernel still has.
pub fn all(state: &StateDir) -> Vec<Orphan> {
    let records = mount_ids(state).into_iter().filter_map(|id| read_record(state, id).ok());
    records.filter(MountRecord::is_alive).map(|record| Orphan { record }).collect()
}

impl Orphan {
    /// The mount's file system.
    pub fn fsid(&self) -> Option<Fsid> {
        self.record.fsid
    }

    /// The place where it was mounted.
    pub fn target(&self) -> &Path {
        &self.record.target
    }

    /// The image as the user typed it.
    pub fn image(&self) -> &str {
        &self.record.image
    }

    /// The image's name in its store.
    pub fn name(&self) -> &str {
        &self.record.name
    }

    /// The digest of the image's manifest.
    pub fn digest(&self) -> Digest {
        self.record.digest.0
    }

    /// The image's store.
    pub fn store(&self) -> &Location {
        &self.record.attach.store
    }

    /// The place of its writes.
    pub fn writes(&self) -> &WritesState {
        &self.record.writes
    }

    /// Waits for a reconnect of the mount to finish, and lets none begin until the result is
    /// dropped: hold it during the umount. `Unavailable` if a reconnect does not finish.
    pub fn keep_apart(&self, state: &StateDir) -> Result<Option<Lock>> {
        match Lock::take_within(&state.exchange_lock(self.record.attach.id), RECONNECT_MAX) {
            Ok(Some(lock)) => Ok(Some(lock)),
            Ok(None) => Err(Error::new(
                ErrorKind::Unavailable,
                format!(
                    "its daemon has been reconnecting it for {} s: try again, or detach it with \
                     `burgeon umount --lazy`; the kernel's log (dmesg) says what hangs",
                    RECONNECT_MAX.as_secs()
                ),
            )),
            // Its folder is gone, or the disk is full: the helper's own checks have to do.
            Err(_) => Ok(None),
        }
    }

    /// Waits until the kernel has released the mount, then removes its folder, unless a new
    /// supervisor does that. `Unavailable` if something still holds the mount after `timeout`.
    pub fn release(&self, state: &StateDir, timeout: Duration) -> Result<()> {
        let (id, record) = (self.record.attach.id, &self.record);
        let begun = Instant::now();
        while record.is_alive() && begun.elapsed() < timeout {
            thread::sleep(PAUSE);
        }
        let rest = timeout.saturating_sub(begun.elapsed());
        if record.is_alive() || !await_loops(state, record, rest) {
            return Err(Error::new(
                ErrorKind::Unavailable,
                "it is unmounted here, but another mount namespace (a container, a service), an \
                 open file or a lazy umount still holds it; no daemon runs to clean up after it: \
                 run `burgeon doctor --repair` later",
            ));
        }
        // The lock's holder clears up, or is a killed supervisor that the kernel is still ending.
        let lock = loop {
            // It may have been reconnected and released again meanwhile.
            if !state.mount(id).exists() || record.is_alive() {
                return Ok(());
            }
            match Lock::try_take(&state.lock_file())? {
                Some(lock) => break lock,
                None if begun.elapsed() < timeout => thread::sleep(PAUSE),
                None => return Ok(()),
            }
        };
        if !state.mount(id).exists() || record.is_alive() {
            return Ok(());
        }
        forget_loops(&record.loops);
        transport::remove_devices(id);
        recycled_seed::keep(state, record);
        let removed = files::remove_folder(&state.mount(id));
        // A server that was killed has left its cgroup, unless it still ends in it.
        remove_leftovers(&state.tag());
        drop(lock);
        removed
    }
}
