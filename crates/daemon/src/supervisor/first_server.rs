//! Makes sure that a new ublk device is read only while the server that began to serve it lives.
//!
//! ```text
//!   server: fetches with all tags ─► "attached" ─► helper: START_DEV ─► a sign of life ─► first read
//!             └────────── dies here: the device is given up, and the mount is made again ──┘  │
//!                                       dies here: the kernel keeps its requests for the next ┘
//! ```
//!
//! Linux 6.12 does not notice the death of a server before the start of its device. It starts the
//! device, no other server can take it over, and a reader of it waits for ever: it cannot be
//! killed, and the device cannot be removed. While nobody has read it, it can.
//!
//! The end of a process shows late, when the kernel has dropped its requests already. An answer
//! shows more: its threads are killed together, so whoever answers a question that was asked after
//! the start had lost no thread before.

use std::sync::PoisonError;

use burgeon_block::{Error, ErrorKind, Result};

use super::{Supervisor, mount::ATTACH_TIMEOUT};
use crate::{id::MountId, state::record::Transport};

impl Supervisor {
    /// True if the mount `id`, which is being made, has a ublk device whose server has died.
    pub(super) fn has_lost_first_server(&self, id: MountId) -> bool {
        let table = self.table();
        let Some(entry) = table.mounts.get(&id).filter(|_| !table.stopping) else { return false };
        let is_ublk = matches!(entry.record.attach.transport, Transport::Ublk { .. });
        is_ublk && (table.link.is_none() || entry.attaches > 1)
    }

    /// Waits for an answer of the server that was told of `id` by the `Attach` numbered `attach`:
    /// `Unavailable` if it has died.
    pub(super) fn hear_from_server(&self, id: MountId, attach: u64) -> Result<()> {
        let died = || {
            let what = "the serving process died while the mount's block device was started";
            Error::new(ErrorKind::Unavailable, what)
        };
        let number = self.table().refresh(id).ok_or_else(died)?;
        let waited = self.changed.wait_timeout_while(self.table(), ATTACH_TIMEOUT, |table| {
            let entry = table.mounts.get(&id).filter(|entry| entry.attach_number == attach);
            let answer = entry.and_then(|entry| entry.refreshes.get(&number));
            table.link.is_some() && matches!(answer, Some(None))
        });
        let (mut table, _) = waited.unwrap_or_else(PoisonError::into_inner);
        let entry = table.mounts.get_mut(&id).filter(|entry| entry.attach_number == attach);
        // Any answer will do, an error as well.
        entry.and_then(|entry| entry.refreshes.remove(&number).flatten()).map(drop).ok_or_else(died)
    }
}
