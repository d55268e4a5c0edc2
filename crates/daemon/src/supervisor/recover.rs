//! Recovers the state that earlier supervisors have left.
//!
//! | killed | leftovers | recovery |
//! |---|---|---|
//! | the supervisor | a server that goes on serving | it is adopted with all it holds, unnoticed |
//! | both | mounts whose readers wait, with their descriptors held | the next server answers them (`hold.rs`) |
//! | | … over ublk | the next server takes the device over |
//! | both and the holder; both under a `--fast` mount | mounts whose lazy data gives EIO | each gets a new FUSE file (`reconnect.rs`) |
//! | the machine | folders of mounts that have ended | they are removed; named writes are elsewhere |

use std::{os::fd::OwnedFd, sync::Arc, thread};

use burgeon_block::{ErrorKind, Result};
use burgeon_frontend::Slots;

use super::{
    LOST_INTERVAL, Supervisor,
    release::forget,
    server_monitor,
    table::{MountEntry, Serving},
};
use crate::{
    host::backing_devices,
    id::MountId,
    state::{
        complete, files, grants,
        paths::StateDir,
        record::{MountRecord, WritesState, mount_ids, read_record},
        recycled_seed, writes,
    },
};

impl Supervisor {
    /// Adopts a server that outlived its supervisor; returns the stream to it.
    pub(super) fn recover(self: &Arc<Self>) -> Result<Option<server_monitor::Orphan>> {
        let Some((orphan, inherited)) = server_monitor::adopt(&self.state)? else {
            return Ok(None);
        };
        let mut table = self.table();
        for mount in inherited {
            let id = mount.attach.id;
            let entry = read_record(&self.state, id)
                .and_then(|record| self.entry(record, mount.fuse, Slots::from_fd(mount.slots)?));
            match entry {
                Ok(entry) => {
                    if entry.record.frozen {
                        let (supervisor, record) = (Arc::clone(self), entry.record.clone());
                        thread::spawn(move || supervisor.thaw(&record));
                    }
                    table.mounts.insert(id, MountEntry { serving: Serving::Yes, ..entry });
                }
                Err(e) => {
                    tracing::error!(mount = %id, error = %e, "a mount is served on, but is not known any more")
                }
            }
        }
        tracing::info!(mounts = table.mounts.len(), "took over from a supervisor that had died");
        Ok(Some(orphan))
    }

    /// Reconnects every mount that has lost its server, and removes the folders of mounts that have
    /// ended.
    pub(super) fn reconnect_lost(self: &Arc<Self>) {
        for id in mount_ids(&self.state) {
            if self.table().mounts.contains_key(&id) {
                continue;
            }
            match read_record(&self.state, id) {
                Ok(record) if record.plain && record.is_alive() => match self.keep_plain(record) {
                    Ok(()) => {}
                    Err(e) => {
                        tracing::error!(mount = %id, error = %e, "nothing will clean up after the mount")
                    }
                },
                Ok(record) if record.is_alive() && record.attach.transport.device().is_some() => {
                    match Slots::create().and_then(|slots| self.entry(record, None, slots)) {
                        Ok(entry) => self.table().add(entry),
                        Err(e) => {
                            tracing::error!(mount = %id, error = %e, "the mount has lost its server for good")
                        }
                    }
                }
                Ok(record) if record.is_alive() => match self.begin_reconnect(record) {
                    Ok(()) => self.spawn_reconnect(id),
                    Err(e) => {
                        tracing::error!(mount = %id, error = %e, "the mount has lost its server for good")
                    }
                },
                Err(e) if e.kind() == ErrorKind::UnsupportedFormat => {
                    tracing::error!(mount = %id, error = %e, "cannot read the record");
                    if let Some(device) = backing_devices::loop_below(&self.state.mount(id)) {
                        // Its folder is left to the version that made it.
                        self.keep_unread(id, device, || {});
                    }
                }
                record => match backing_devices::loop_below(&self.state.mount(id)) {
                    None => clear_up(&self.state, id, record.ok()),
                    // Without its record it cannot be served again, but it is still mounted.
                    Some(device) => {
                        tracing::error!(mount = %id, %device, "the mount is in use, but its record cannot be read");
                        let supervisor = Arc::clone(self);
                        let clear_up = move || clear_up(&supervisor.state, id, record.ok());
                        self.keep_unread(id, device, clear_up);
                    }
                },
            }
        }
    }

    /// Keeps the daemon while a mount without a readable record is in use on `device`; `then`, once
    /// it is not.
    fn keep_unread(
        self: &Arc<Self>,
        id: MountId,
        device: String,
        then: impl FnOnce() + Send + 'static,
    ) {
        self.table().unread.insert(id, device);
        let supervisor = Arc::clone(self);
        thread::spawn(move || {
            while backing_devices::loop_below(&supervisor.state.mount(id)).is_some() {
                thread::sleep(LOST_INTERVAL);
            }
            then();
            supervisor.table().unread.remove(&id);
        });
    }

    /// The table entry of a mount that exists already.
    pub(super) fn entry(
        &self,
        record: MountRecord,
        fuse: Option<OwnedFd>,
        slots: Slots,
    ) -> Result<MountEntry> {
        let writes_lock = match &record.writes {
            WritesState::Sprout(sprout) => match &sprout.name {
                Some(name) => Some(writes::lock(&self.state, name)?),
                None => None,
            },
            WritesState::ReadOnly => None,
        };
        let entry = MountEntry::new(record, fuse, slots);
        Ok(MountEntry { handed_out: true, _writes_lock: writes_lock, ..entry })
    }
}

/// Removes the folder of a mount that has ended.
fn clear_up(state: &StateDir, id: MountId, record: Option<MountRecord>) {
    grants::revoke(state, id);
    forget(state, id, &[]);
    if let Some(record) = record {
        complete::give_back(state, &record);
        recycled_seed::keep(state, &record);
    }
    if let Err(e) = files::remove_folder(&state.mount(id))
        .and_then(|()| files::remove_file(&state.recorded_reads(id)))
    {
        tracing::warn!(mount = %id, error = %e, "cannot clear up after a mount");
    }
}
