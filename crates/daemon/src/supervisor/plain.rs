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
//! Invariants, and the tests that hold them (`crates/cli/tests/let_go.rs`):
//! - The record says `plain` only after the plain file is below the mount. After a crash before
//!   that, the next supervisor reconnects the mount, as it does any other.
//! - A plain mount's sprout is reserved to its limit: nobody grows it.
//! - A plain mount is in the table until its devices have ended, and then cleaned up.

use std::{
    fs::File,
    os::{fd::AsFd, unix::fs::MetadataExt},
    sync::Arc,
    thread,
};

use burgeon_block::{Error, ErrorKind, Result};
use burgeon_frontend::Slots;

use super::{
    Supervisor,
    helper::{self, Task},
    table::{MountEntry, Serving},
};
use crate::{
    id::MountId,
    ipc::protocol::Request,
    state::{files, record::MountRecord},
};

impl Supervisor {
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
                    entry.record.plain = true;
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
            if let Err(e) = files::remove_file(&path) {
                tracing::warn!(mount = %id, error = %e, "an unused copy of the mount's data stays");
            }
            return Err(error);
        }
        // Without the record the next supervisor would serve the mount again.
        let noted = self.update(id, |record| record.plain = true);
        tracing::info!(mount = %id, "let go: its data is a plain file");
        let supervisor = Arc::clone(self);
        thread::spawn(move || supervisor.release(id));
        noted
    }

    /// The record of a mount that can be changed now, and is kept from being reconnected; `None` if
    /// it is plain already.
    fn begin_change(&self, id: MountId) -> Result<Option<MountRecord>> {
        let mut table = self.table();
        let entry = table.mounts.get_mut(&id);
        let Some(entry) = entry.filter(|entry| entry.handed_out && !entry.ended) else {
            return Err(Error::new(ErrorKind::NotFound, format!("there is no mount {id}")));
        };
        let record = &entry.record;
        if record.plain {
            return Ok(None);
        }
        record.check_let_go()?;
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
        let supervisor = Arc::clone(self);
        thread::spawn(move || supervisor.release(id));
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
