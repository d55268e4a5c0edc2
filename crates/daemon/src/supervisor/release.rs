//! What happens when the kernel lets go of a mount, by whatever `umount`.
//!
//! ```text
//!   last umount ─► btrfs closes its devices ─► the loops detach themselves ─► the FUSE file system
//!   goes ─► the server's reads end ─► Ended ─► here: wait for the loops, take the folder away,
//!   give the writes' name back
//! ```

use std::{
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};

use burgeon_block::{Error, ErrorKind, Result};
use burgeon_frontend::btrfs_mount;

use super::{Supervisor, table::Entry};
use crate::{chain, files, id::MountId};

/// How long the loops may take to detach after the FUSE file is closed. They do it within
/// milliseconds; a host that is this slow loses nothing but the wait.
const LOOPS_TIMEOUT: Duration = Duration::from_secs(10);

impl Supervisor {
    /// The kernel has closed the FUSE file of `id`: takes away what the mount had.
    pub(super) fn release(&self, id: MountId) {
        let loops = {
            let mut table = self.table();
            let Some(entry) = table.mounts.get_mut(&id) else { return };
            if entry.lost {
                return;
            }
            if !entry.handed_out {
                // Its maker sees the failure and clears up.
                entry.ended = true;
                return;
            }
            entry.record.loops.clone()
        };
        await_loops(&self.state.mount(id), &self.state.writes(), &loops);
        forget(&loops);
        if let Err(e) = files::remove_folder(&self.state.mount(id)) {
            log!("mount {id} is released, but: {e}");
        }
        let entry = self.table().mounts.remove(&id);
        log!("released {}", entry.as_ref().map_or("a mount".into(), describe));
        // Gives the writes' name and the descriptors back before anybody who waits is woken.
        drop(entry);
        self.changed.notify_all();
        let idle = {
            let table = self.table();
            table.end_when_idle && table.mounts.is_empty()
        };
        if idle && self.try_stop(false).is_ok() {
            self.end();
        }
    }

    /// The mount's descriptor has been sent: from now on its end is the user's doing.
    pub(super) fn handed_out(self: &Arc<Self>, id: MountId) {
        let ended = match self.table().mounts.get_mut(&id) {
            Some(entry) => {
                entry.handed_out = true;
                entry.ended
            }
            None => false,
        };
        if ended {
            self.release(id);
        } else {
            self.tend_thin();
        }
    }

    /// A mount that could not be made: everything it had has been closed by the caller.
    pub(super) fn abandon(&self, id: MountId) {
        let entry = self.table().mounts.remove(&id);
        let loops = entry.as_ref().map(|entry| entry.record.loops.clone()).unwrap_or_default();
        // Closing the last descriptor of /dev/fuse aborts the connection, if it still lives.
        drop(entry);
        await_loops(&self.state.mount(id), &self.state.writes(), &loops);
        forget(&loops);
        if let Err(e) = files::remove_folder(&self.state.mount(id)) {
            log!("a mount that could not be made left something behind: {e}");
        }
        self.changed.notify_all();
    }

    /// Waits until `id` is released; says who may still hold it.
    pub(super) fn await_release(&self, id: MountId, timeout: Duration) -> Result<()> {
        let table = self.table();
        let waited = self
            .changed
            .wait_timeout_while(table, timeout, |table| table.mounts.contains_key(&id))
            .map(|(table, _)| table.mounts.contains_key(&id))
            .unwrap_or(false);
        match waited {
            false => Ok(()),
            true => Err(Error::new(
                ErrorKind::Unavailable,
                "it is unmounted here, but something else still holds it, such as another mount \
                 namespace (a container, a service) or a lazy umount; it is released with that",
            )),
        }
    }
}

fn describe(entry: &Entry) -> String {
    format!("{} at {}", entry.record.image, entry.record.target.display())
}

/// Waits until none of `loops` is attached to a file of this mount.
fn await_loops(mount: &Path, writes: &Path, loops: &[PathBuf]) {
    let begun = Instant::now();
    while loops.iter().any(|device| is_ours(device, mount, writes)) {
        if begun.elapsed() > LOOPS_TIMEOUT {
            log!("a loop device of {} does not go away", mount.display());
            return;
        }
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// btrfs remembers devices it was told of, by number, and the numbers will be used again.
fn forget(loops: &[PathBuf]) {
    for device in loops {
        // What it remembers wrongly only costs a warning in the kernel's log.
        let _ = btrfs_mount::forget(device);
    }
}

fn is_ours(device: &Path, mount: &Path, writes: &Path) -> bool {
    let Some(name) = device.file_name() else { return false };
    let sys = Path::new("/sys/block").join(name);
    chain::backing_file(&sys)
        .is_some_and(|file| file.starts_with(mount) || file.starts_with(writes))
}
