//! Short questions to the server about a mount, which it answers from memory: the reads that
//! waited, and the places of chunks in the host's cache.
//!
//! ```text
//!   client ──► supervisor ── number ──► server
//!          ◄──  waits     ◄─ number ──
//! ```
//!
//! Invariant: the table keeps a bounded number of answers that nobody has taken.

use std::{sync::PoisonError, time::Duration};

use burgeon_block::{Error, ErrorKind, Result};

use super::{Supervisor, table::Answer};
use crate::{
    id::MountId,
    ipc::{
        link::ToServer,
        protocol::{ChunkPlaces, WaitStatus},
    },
};

/// Time limit for the server's answer, which takes it microseconds to milliseconds.
const ANSWER_MAX: Duration = Duration::from_secs(5);

impl Supervisor {
    /// The waits of a mount after number `after`.
    pub(super) fn waits(&self, id: MountId, after: u64) -> Result<Vec<WaitStatus>> {
        match self.ask(id, |number| ToServer::Waits { number, id, after })? {
            Answer::Waits(waits) => Ok(waits),
            Answer::Places(_) => Err(unanswered()),
        }
    }

    /// The places of a mount's chunks in the host's cache, from chunk `first` on. An earlier server
    /// knows none.
    pub(super) fn places(&self, id: MountId, first: u32) -> Result<ChunkPlaces> {
        if !self.table().understands.is_some_and(|understands| understands.places) {
            return Ok(ChunkPlaces::default());
        }
        match self.ask(id, |number| ToServer::Places { number, id, first })? {
            Answer::Places(places) => Ok(places),
            Answer::Waits(_) => Err(unanswered()),
        }
    }

    fn ask(&self, id: MountId, question: impl FnOnce(u64) -> ToServer) -> Result<Answer> {
        let mut table = self.table();
        if !table.mounts.contains_key(&id) {
            return Err(Error::new(ErrorKind::NotFound, format!("there is no mount {id}")));
        }
        let server = table.server_pid;
        let number = table.next_number();
        if !table.send(&question(number)) {
            return Err(unanswered());
        }
        let waited = self.changed.wait_timeout_while(table, ANSWER_MAX, |table| {
            !table.answers.contains_key(&number) && table.server_pid == server
        });
        let mut table = waited.unwrap_or_else(PoisonError::into_inner).0;
        table.answers.remove(&number).ok_or_else(unanswered)
    }
}

fn unanswered() -> Error {
    let what = "no server has answered: it is being started, or hangs (`burgeon health`), or is of \
                another version, which `burgeon upgrade` replaces; try again";
    Error::new(ErrorKind::Unavailable, what)
}
