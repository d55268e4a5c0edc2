//! The reads of a mount that waited, from its server.

use std::{sync::PoisonError, time::Duration};

use burgeon_block::{Error, ErrorKind, Result};

use super::Supervisor;
use crate::{
    id::MountId,
    ipc::{link::ToServer, protocol::WaitStatus},
};

/// Time limit for the server's answer, which takes it microseconds.
const ANSWER_MAX: Duration = Duration::from_secs(5);

impl Supervisor {
    /// The waits of a mount after number `after`.
    pub(super) fn waits(&self, id: MountId, after: u64) -> Result<Vec<WaitStatus>> {
        let mut table = self.table();
        if !table.mounts.contains_key(&id) {
            return Err(Error::new(ErrorKind::NotFound, format!("there is no mount {id}")));
        }
        let server = table.server_pid;
        let number = table.ask_for_waits(id, after).ok_or_else(unanswered)?;
        let waited = self.changed.wait_timeout_while(table, ANSWER_MAX, |table| {
            !table.waits.contains_key(&number) && table.server_pid == server
        });
        let mut table = waited.unwrap_or_else(PoisonError::into_inner).0;
        table.waits.remove(&number).ok_or_else(unanswered)
    }
}

fn unanswered() -> Error {
    let what = "no server has answered: it is being started, or hangs (`burgeon health`), or is of \
                another version, which `burgeon upgrade` replaces; try again";
    Error::new(ErrorKind::Unavailable, what)
}

impl super::table::Table {
    /// Asks the server; returns the number of its answer.
    fn ask_for_waits(&mut self, id: MountId, after: u64) -> Option<u64> {
        let number = self.next_number();
        self.send(&ToServer::Waits { number, id, after }).then_some(number)
    }
}
