//! Reconnects mounts over FUSE that lost supervisor and server, or a server that they were bound to
//! by io_uring, without an umount. (A ublk device just waits for its next server.)
//!
//! ```text
//!   btrfs ── loop ── a FUSE file whose connection is dead: EIO
//!                └── LOOP_CHANGE_FD ──► a new FUSE file, with a server
//! ```
//!
//! The kernel treats the exchange as a media change: from 6.17 on it then drops every inode that is
//! not open, *with its dirty data* (measured on 6.18: a file written a second before came out
//! empty). So a writable file system is frozen around the exchange: frozen, it has no dirty data.
//! From 6.19 on the kernel would shut the file system down; there it is left alone, and an umount
//! and mount restore it.
//!
//! A helper process does it (`exchange.rs`), because a kill must not interrupt a thaw. If the
//! helper is killed, too, the record says that it was about to freeze, and the next supervisor
//! thaws (`crates/cli/tests/kill.rs`).
//!
//! A mount that is being unmounted is never exchanged: `exchange/order.rs` says why, and how.

use std::{os::fd::OwnedFd, path::PathBuf, sync::Arc, thread};

use burgeon_block::{Error, ErrorKind, Result};
use burgeon_frontend::{Connection, Slots};

use super::{
    LOST_INTERVAL, Supervisor,
    table::{MountEntry, Reconnect, Serving},
};
use crate::{
    id::MountId,
    state::record::{MountRecord, Transport, WritesState},
    supervisor::{
        exchange::Exchange,
        helper::{self, Task},
    },
    transport,
};

impl Supervisor {
    /// Adds the mount to the table and locks the name of its writes, so that they cannot be mounted
    /// a second time meanwhile.
    pub(super) fn begin_reconnect(&self, mut record: MountRecord) -> Result<()> {
        let id = record.attach.id;
        let (connection, fuse, transport) = connect_anew(&record)?;
        record.attach.transport = transport;
        let entry = self.entry(record.clone(), Some(fuse), Slots::create()?)?;
        let reconnect = Some(Reconnect { record, connection });
        self.table().add(MountEntry { lost: true, reconnecting: true, reconnect, ..entry });
        self.note_transport(id, transport);
        Ok(())
    }

    /// A server has died, and with it the requests that it received over io_uring. Fails those
    /// requests at once, and starts to reconnect their mounts. The server must be dead; its
    /// successor is told of the new connections.
    pub(super) fn reconnect_rings(self: &Arc<Self>) {
        let records: Vec<_> =
            self.table().mounts.values().map(|entry| entry.record.clone()).collect();
        for record in records {
            let Transport::Rings { connection } = record.attach.transport else { continue };
            let id = record.attach.id;
            if let Err(e) = Connection::abort(connection) {
                tracing::error!(mount = %id, error = %e, "cannot abort the old FUSE connection: readers of the mount may hang");
            }
            if let Err(e) = self.reconnect(record) {
                tracing::error!(mount = %id, error = %e, "the mount has lost its server for good");
                if let Some(entry) = self.table().mounts.get_mut(&id) {
                    entry.serving = Serving::No(e);
                }
            }
        }
    }

    fn reconnect(self: &Arc<Self>, record: MountRecord) -> Result<()> {
        let id = record.attach.id;
        let (connection, fuse, transport) = connect_anew(&record)?;
        let begin = {
            let mut table = self.table();
            let Some(entry) = table.mounts.get_mut(&id) else { return Ok(()) };
            if !entry.handed_out {
                // The thread that makes the mount sees the failure and clears up.
                return Ok(());
            }
            // The request numbers belong to the old connection and mean other requests on the new
            // one.
            entry.slots.forget_requests();
            entry.fuse = Some(fuse);
            entry.record.attach.transport = transport;
            (entry.serving, entry.lost) = (Serving::Awaited, true);
            entry.reconnect = Some(Reconnect { record: entry.record.clone(), connection });
            let begin = !std::mem::replace(&mut entry.reconnecting, true);
            table.attach(id);
            begin
        };
        self.note_transport(id, transport);
        if begin {
            self.spawn_reconnect(id);
        }
        Ok(())
    }

    fn note_transport(&self, id: MountId, transport: Transport) {
        // On a full disk this fails; serving the mount again matters more.
        if let Err(e) = self.update(id, |record| record.attach.transport = transport) {
            tracing::warn!(mount = %id, error = %e, "cannot write down how the mount is served");
        }
    }

    /// Handles the mount's reconnects: another may be needed before one is done.
    pub(super) fn spawn_reconnect(self: &Arc<Self>, id: MountId) {
        let supervisor = Arc::clone(self);
        thread::spawn(move || {
            while let Some(reconnect) = supervisor.next_reconnect(id) {
                supervisor.finish_reconnect(id, reconnect);
            }
        });
    }

    /// The mount's next reconnect; `None` ends its thread.
    fn next_reconnect(&self, id: MountId) -> Option<Reconnect> {
        let mut table = self.table();
        let entry = table.mounts.get_mut(&id)?;
        let next = entry.reconnect.take();
        entry.reconnecting = next.is_some();
        next
    }

    /// Puts the new FUSE file below the mount's loop device. If that fails, the mount stays as it
    /// is, and is cleared up after its umount.
    fn finish_reconnect(self: &Arc<Self>, id: MountId, reconnect: Reconnect) {
        let Reconnect { record, connection } = reconnect;
        let reconnected = self.await_taken_on(id).and_then(|()| {
            // A helper of an earlier supervisor may have to finish first.
            self.change_over(&record, &connection)
        });
        if reconnected.is_ok() {
            self.hold(id);
        }
        if let Some(entry) = self.table().mounts.get_mut(&id) {
            // Its server has died, too: this result no longer matters.
            if entry.reconnect.is_some() {
                return;
            }
            match reconnected {
                Ok(()) => {
                    tracing::info!(mount = %id, "served again");
                    entry.lost = false;
                    return;
                }
                Err(e) => {
                    match record.is_alive() {
                        true => {
                            tracing::error!(mount = %id, error = %e, "the mount has lost its server for good")
                        }
                        false => tracing::info!(mount = %id, "unmounted before it was reconnected"),
                    }
                    entry.serving = Serving::No(e);
                }
            }
        }
        drop(connection);
        if record.frozen {
            self.thaw(&record);
        }
        while record.is_alive() {
            thread::sleep(LOST_INTERVAL);
            if self.table().mounts.get(&id).is_some_and(|entry| entry.reconnect.is_some()) {
                return;
            }
        }
        if let Some(entry) = self.table().mounts.get_mut(&id) {
            entry.lost = false;
        }
        self.release(id);
    }
}

impl Supervisor {
    fn change_over(&self, record: &MountRecord, connection: &Connection) -> Result<()> {
        if !self.may_reconnect() {
            let what = "this kernel cannot change the file below a mounted file system: unmount it \
                        and mount it again";
            return Err(Error::new(ErrorKind::Unavailable, what));
        }
        let Some(exchange) = self.exchange(record) else { return Ok(()) };
        let (id, is_writable) = (record.attach.id, exchange.writable);
        // Recorded first: if the helper is killed, too, the next supervisor has to thaw. On a full
        // disk this fails; serving the mount again matters more.
        if is_writable {
            self.note_frozen(id, true);
        }
        let abort = || {
            if let Err(e) = connection.number().and_then(Connection::abort) {
                tracing::error!(mount = %id, error = %e, "processes that wait for the mount may hang");
            }
        };
        let fuse = [connection.mount()];
        let changed = helper::run(&self.state, &Task::Exchange(exchange), &fuse, abort);
        match changed {
            Ok(_) if is_writable => self.note_frozen(id, false),
            Err(_) if is_writable => self.thaw(record),
            _ => {}
        }
        changed.map(drop)
    }

    /// Thaws a file system that may have been left frozen.
    pub(super) fn thaw(&self, record: &MountRecord) {
        let Some(exchange) = self.exchange(record).filter(|exchange| exchange.writable) else {
            return;
        };
        if !record.is_alive() {
            return;
        }
        match helper::run(&self.state, &Task::Thaw(exchange), &[], || {}) {
            Ok(_) => self.note_frozen(record.attach.id, false),
            Err(e) => {
                tracing::error!(mount = %record.attach.id, error = %e, "the file system may stay frozen")
            }
        }
    }

    pub(super) fn exchange(&self, record: &MountRecord) -> Option<Exchange> {
        let data_device = record.data_device.clone()?;
        let sprout = writable_device(record);
        let metadata = || record.loops.iter().find(|device| **device != data_device).cloned();
        Some(Exchange {
            fsid: record.fsid?,
            writable: sprout.is_some(),
            local_device: sprout.or_else(metadata)?,
            data_device,
            lock: self.state.exchange_lock(record.attach.id),
        })
    }

    pub(super) fn note_frozen(&self, id: MountId, frozen: bool) {
        if let Err(e) = self.update(id, |record| record.frozen = frozen) {
            tracing::warn!(mount = %id, error = %e, "cannot write down whether the file system is frozen");
        }
    }
}

/// Opens a new connection for the mount, of the same kind as far as the kernel still allows it.
/// Returns both ends and the kind.
fn connect_anew(record: &MountRecord) -> Result<(Connection, OwnedFd, Transport)> {
    let rings = matches!(record.attach.transport, Transport::Rings { .. });
    let (connection, transport) = transport::connect(record.attach.id, rings)?;
    let fuse = connection.device().try_clone_to_owned();
    let fuse = fuse.map_err(|e| Error::io("cannot keep the FUSE device", e))?;
    Ok((connection, fuse, transport))
}

/// The device of a mount's sprout: the last of its loops, or the user's.
pub(super) fn writable_device(record: &MountRecord) -> Option<PathBuf> {
    let WritesState::Sprout(sprout) = &record.writes else { return None };
    if sprout.path.starts_with("/dev") {
        return Some(sprout.path.clone());
    }
    record.loops.last().cloned()
}
