//! The daemon, which may die or be replaced (`burgeon upgrade`) while a plain file is made.
//!
//! Invariants (`crates/cli/tests/let_go.rs`):
//! - The end of a daemon costs a request, not the copy: the next daemon is asked again, once it
//!   serves the mount. So every request must be one that may be sent twice.
//! - A command that fails leaves no reader of the mount without a daemon.

use std::{
    thread,
    time::{Duration, Instant},
};

use burgeon_block::{ErrorKind, Result};

use super::unexpected;
use crate::{
    id::MountId,
    ipc::{
        client::Client,
        protocol::{CacheRequest, ChunkPlaces, HostCache, MountStatus, Reply, Request},
    },
    state::{paths::StateDir, record::read_record},
};

/// Interval of looking at a mount.
const LOOK: Duration = Duration::from_millis(100);
/// Time for a new daemon, or a new server, to serve the mount.
const SERVED_WITHIN: Duration = Duration::from_secs(30);

/// The daemon that serves a mount.
pub(super) struct Daemon<'a> {
    state: &'a StateDir,
    id: MountId,
    first: &'a Client,
    /// The connection with the daemon that came after the first one.
    next: Option<Client>,
}

impl<'a> Daemon<'a> {
    /// The daemon at `client`, for the mount `id`.
    pub(super) fn new(state: &'a StateDir, client: &'a Client, id: MountId) -> Self {
        Self { state, id, first: client, next: None }
    }

    fn client(&self) -> &Client {
        self.next.as_ref().unwrap_or(self.first)
    }

    /// Sends a request; once more if the daemon has ended, or its server.
    pub(super) fn call(&mut self, request: &Request) -> Result<Reply> {
        let error = match self.client().call(request) {
            Ok((reply, _)) => return Ok(reply),
            Err(error) => error,
        };
        let has_ended = self.client().has_ended();
        if !has_ended && error.kind() != ErrorKind::Unavailable {
            return Err(error);
        }
        tracing::info!(%error, has_ended, "the daemon is asked once more");
        if has_ended {
            self.next = Some(running(self.state)?);
        }
        self.await_served();
        match self.client().call(request) {
            Ok((reply, _)) => Ok(reply),
            // The same daemon may have undone something meanwhile, and names only that.
            Err(again) => Err(if has_ended { again } else { error }),
        }
    }

    /// Has the server do something with the cache; returns its figures afterwards.
    pub(super) fn of_cache(&mut self, request: CacheRequest) -> Result<HostCache> {
        match self.call(&Request::Cache(request))? {
            Reply::Cache(answer) => Ok(answer.cache),
            _ => Err(unexpected()),
        }
    }

    /// The places that the server knows from chunk `first` on; `None` if it cannot tell.
    pub(super) fn places(&mut self, first: u32) -> Option<ChunkPlaces> {
        match self.call(&Request::Places { id: self.id, first }) {
            Ok(Reply::Places(places)) => Some(places),
            Ok(_) => None,
            Err(error) => {
                tracing::info!(%error, "the data is copied: nobody tells where the cache holds it");
                None
            }
        }
    }

    /// The status of the mount; `None` if there is none, or it cannot be told.
    pub(super) fn mount(&mut self) -> Option<MountStatus> {
        let Ok((Reply::Status(status), _)) = self.client().call(&Request::Status) else {
            return None;
        };
        status.mounts.into_iter().find(|mount| mount.id == self.id)
    }

    /// Waits as long as the mount is being connected with a server.
    fn await_served(&mut self) {
        let begun = Instant::now();
        while self.mount().is_some_and(|mount| mount.state == "recovering")
            && begun.elapsed() < SERVED_WITHIN
        {
            thread::sleep(LOOK);
        }
    }

    /// Starts a daemon if none runs any more, and the mount needs one.
    pub(super) fn leave(&self) {
        let record = read_record(self.state, self.id);
        if record.is_ok_and(|record| record.is_alive() && !record.plain)
            && let Err(error) = running(self.state)
        {
            tracing::warn!(%error, "no daemon serves the mount: its readers wait");
        }
    }
}

/// A connection with the daemon, after starting one if none runs.
fn running(state: &StateDir) -> Result<Client> {
    // A daemon that was just killed accepts connections for a moment.
    match Client::connect_and_ask(state)? {
        Some((client, _)) => Ok(client),
        None => Client::connect_or_start(state),
    }
}
