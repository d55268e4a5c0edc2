//! Mounts that need no process of ours any more: their lazy data is a plain file.
//!
//! ```text
//!   btrfs ── loop ── a FUSE file, and our server
//!                └── LOOP_CHANGE_FD ──► mounts/<id>/plain     a copy, which the command has made
//! ```
//!
//! The command copies the mount's data device (`crate::let_go`): all of it was verified by the
//! server when it was read. The FUSE file is served while it is exchanged, so no reader sees an
//! error; its server ends it afterwards, as after an umount.
//!
//! Where the file cannot be exchanged, the copy is the image's (`state/complete.rs`), and the next
//! mount of the image begins with it.
//!
//! Invariants, and the tests that hold them (`crates/cli/tests/let_go.rs`):
//! - The record says `plain` only after the plain file is below the mount. After a crash before
//!   that, the next supervisor reconnects the mount, as it does any other.
//! - A plain mount's sprout is reserved to its limit: nobody grows it.
//! - A plain mount is in the table until its devices have ended, and then cleaned up: one thread
//!   watches all of them (`watch.rs`).

use std::{
    fs::File,
    os::{fd::AsFd, unix::fs::MetadataExt},
    sync::Arc,
};

use burgeon_block::{Error, ErrorKind, Result};
use burgeon_btrfs::SeedInfo;
use burgeon_frontend::Slots;

use super::{
    Supervisor,
    helper::{self, Task},
    plan::Plan,
    table::{MountEntry, Serving},
};
use crate::{
    id::MountId,
    ipc::protocol::{MountRequest, Request, TransportRequest},
    state::{
        complete, files, loans,
        record::{MountRecord, Plain},
    },
};

impl Supervisor {
    /// The manner in which the mount `id` can be let go: `None` if its file can be exchanged, else
    /// the reason why only the next mount can have the plain file. With `reserve`, reserves its
    /// sprout to the limit in the first case.
    pub(super) fn begin_let_go(&self, id: MountId, reserve: bool) -> Result<Option<String>> {
        let record = self.table().mounts.get(&id).map(|entry| entry.record.clone());
        let gone = || Error::new(ErrorKind::NotFound, format!("there is no mount {id}"));
        let record = record.ok_or_else(gone)?;
        record.check_copy()?;
        if let Err(why) = record.check_exchange() {
            return Ok(Some(why.to_owned()));
        }
        match self.can_exchange() {
            Ok(true) => {}
            Ok(false) => {
                let why = "this kernel shuts a file system down whose device is exchanged";
                return Ok(Some(why.to_owned()));
            }
            // Not knowing is no leave.
            Err(error) => {
                let why = format!("an attempt to exchange a device failed: {error}");
                return Ok(Some(why));
            }
        }
        if reserve {
            self.reserve_whole(id)?;
        }
        Ok(None)
    }

    /// The plain file of the image, for a mount that is made now; `None` if it has to be served.
    pub(super) fn take_plain(
        &self,
        id: MountId,
        request: &MountRequest,
        plan: &Plan,
        info: &SeedInfo,
    ) -> Option<(File, Plain)> {
        let is_served = plan.area.is_some() || request.transport == TransportRequest::Ublk;
        if is_served {
            return None;
        }
        complete::take(&self.state, &plan.base, id, (info, plan.seed_fsid))
    }

    /// Reserves the sprout of a mount that began with a plain file; a note if that is not possible.
    pub(super) fn reserve_plain(&self, id: MountId) -> Option<String> {
        let is_plain = self.table().mounts.get(&id).is_some_and(|entry| entry.record.plain);
        if !is_plain {
            return None;
        }
        let failed = self.reserve_whole(id).err()?;
        Some(format!("its writes can grow only while the daemon runs: {failed}"))
    }

    /// Puts the plain file of mount `id` below it. The client has made the file.
    pub(super) fn change_to_plain(self: &Arc<Self>, id: MountId) -> Result<()> {
        let path = self.state.plain_file(id);
        let Some(record) = self.begin_change(id)? else { return Ok(()) };
        let changed = self.change_file(&record);
        let reconnect = {
            let mut table = self.table();
            let Some(entry) = table.mounts.get_mut(&id) else { return changed };
            entry.reconnecting = false;
            match &changed {
                // A server that has died meanwhile is not needed any more.
                Ok(()) => {
                    (entry.reconnect, entry.lost) = (None, false);
                    (entry.record.plain, entry.is_noting) = (true, true);
                    entry.fuse = None;
                    false
                }
                Err(_) => std::mem::replace(&mut entry.reconnecting, entry.reconnect.is_some()),
            }
        };
        if reconnect {
            self.spawn_reconnect(id);
        }
        if let Err(error) = changed {
            if let Err(e) = loans::forget(&path).and_then(|()| files::remove_file(&path)) {
                tracing::warn!(mount = %id, error = %e, "an unused copy of the mount's data stays");
            }
            return Err(error);
        }
        // Without the record the next supervisor would serve the mount again.
        let noted = self.update(id, |record| record.plain = true);
        tracing::info!(mount = %id, "let go: its data is a plain file");
        if noted.is_ok() {
            self.table().mounts.entry(id).and_modify(|entry| entry.is_noting = false);
        }
        // Watched until its end (`watch.rs`).
        self.changed.notify_all();
        noted
    }

    /// The record of a mount that can be changed now, and is kept from being reconnected; `None` if
    /// it is plain already.
    fn begin_change(&self, id: MountId) -> Result<Option<MountRecord>> {
        if !self.can_exchange()? {
            let what = "this kernel would shut the file system down; the mount is served on";
            return Err(Error::new(ErrorKind::Unavailable, what));
        }
        let mut table = self.table();
        let entry = table.mounts.get_mut(&id);
        let Some(entry) = entry.filter(|entry| entry.handed_out && !entry.ended) else {
            return Err(Error::new(ErrorKind::NotFound, format!("there is no mount {id}")));
        };
        let record = &entry.record;
        if record.plain {
            return Ok(None);
        }
        record.check_copy()?;
        record.check_exchange().map_err(|why| Error::new(ErrorKind::Unavailable, why))?;
        if !matches!(entry.serving, Serving::Yes) || entry.lost || entry.reconnecting {
            let what = "it is not served now: `burgeon status` says why; try again when it is";
            return Err(Error::new(ErrorKind::Unavailable, what));
        }
        entry.reconnecting = true;
        Ok(Some(record.clone()))
    }

    fn change_file(&self, record: &MountRecord) -> Result<()> {
        let id = record.attach.id;
        self.reserve_whole(id)?;
        let path = self.state.plain_file(id);
        let failed = |e| Error::io(format!("cannot open {}", path.display()), e);
        let file = files::open(&path, File::options().read(true)).map_err(failed)?;
        // A copy that is not all there, or that others can write to, is not this program's.
        let is_private = file.metadata().map_err(failed)?.mode() & 0o077 == 0;
        let Some(exchange) = self.exchange(record).filter(|_| is_private) else {
            let what = format!("{} is not a copy of the mount's data", path.display());
            return Err(Error::new(ErrorKind::Invalid, what));
        };
        let is_writable = exchange.writable;
        if is_writable {
            self.note_frozen(id, true);
        }
        let changed =
            helper::run(&self.state, &Task::ChangeToPlain(exchange), &[file.as_fd()], || {});
        match changed {
            Ok(_) if is_writable => self.note_frozen(id, false),
            Err(_) if is_writable => self.thaw(record),
            _ => {}
        }
        changed.map(drop)
    }

    /// Knows a mount that an earlier supervisor has let go, and cleans up after it.
    pub(super) fn keep_plain(self: &Arc<Self>, record: MountRecord) -> Result<()> {
        let id = record.attach.id;
        if record.frozen {
            self.thaw(&record);
        }
        let entry = self.entry(record, None, Slots::create()?)?;
        self.table().mounts.insert(id, MountEntry { serving: Serving::Yes, ..entry });
        // Watched until its end (`watch.rs`).
        self.changed.notify_all();
        Ok(())
    }

    /// Refuses requests that need a server of a mount that has none.
    pub(super) fn refuse_plain(&self, request: &Request) -> Result<()> {
        let id = match request {
            Request::Map(request) => request.id,
            Request::Mappings { id } | Request::Pin { id, .. } | Request::Record { id } => *id,
            _ => return Ok(()),
        };
        if self.table().mounts.get(&id).is_none_or(|entry| !entry.record.plain) {
            return Ok(());
        }
        let what = "all data of this mount is in a plain file (`burgeon let-go`), so nothing is \
                    fetched, recorded or mapped any more";
        Err(Error::new(ErrorKind::Invalid, what))
    }
}
