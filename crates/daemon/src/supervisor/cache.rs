//! Requests about the host's cache, which its server carries out.
//!
//! ```text
//!   client ── Cache ──► supervisor: keeps new bounds ── Cache, number ──► server
//!          ◄── Cache ──            waits            ◄── Cache, number ──
//! ```

use std::{os::unix::net::UnixStream, path::Path, sync::PoisonError, time::Duration};

use burgeon_block::{Error, ErrorKind, Result};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::Supervisor;
use crate::{
    ipc::{
        link::CacheOrder,
        protocol::{CacheAnswer, CacheRequest, HostCache},
    },
    state::{cache::Bounds, cache_dir::CacheDir, complete, space},
};

/// Pause between two looks whether the client of a scrub is still there.
const LOOK: Duration = Duration::from_secs(1);

/// True if the process at the other end has closed the connection.
fn has_gone(client: &UnixStream) -> bool {
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    let mut end = [PollFd::new(client, PollFlags::RDHUP)];
    let gone = PollFlags::RDHUP | PollFlags::HUP;
    poll(&mut end, Some(&now)).is_ok() && end[0].revents().intersects(gone)
}

impl Supervisor {
    /// Does what a client asks of the cache. It waits as long as the server works on it, but ends a
    /// scrub whose `client` is gone.
    pub(super) fn cache(
        &self,
        request: CacheRequest,
        client: Option<&UnixStream>,
    ) -> Result<CacheAnswer> {
        let dropped = match &request {
            CacheRequest::Drop { digest } => Some(digest.0),
            _ => None,
        };
        let order = match request {
            CacheRequest::Show => CacheOrder::Show,
            CacheRequest::Resize { limit, keep_free, parts } => {
                let bounds = Bounds::changed(&self.state).unwrap_or_default();
                let limit = limit.or(bounds.limit);
                let keep_free = keep_free.or(bounds.keep_free);
                let bounds = Bounds { limit, keep_free, ..bounds }.with_parts(parts);
                bounds.write(&self.state)?;
                CacheOrder::Resize
            }
            CacheRequest::Evict { bytes } => CacheOrder::Evict { bytes },
            CacheRequest::Drop { digest } => CacheOrder::Drop { digest },
            CacheRequest::Scrub { bytes_per_second } => CacheOrder::Scrub { bytes_per_second },
        };
        let scrubber = client.filter(|_| matches!(order, CacheOrder::Scrub { .. }));
        let mut table = self.table();
        let server = table.server_pid;
        let number = table.order(order).ok_or_else(no_server)?;
        let is_pending = |table: &mut super::table::Table| {
            !table.cache_answers.contains_key(&number) && table.server_pid == server
        };
        loop {
            let waited = self.changed.wait_timeout_while(table, LOOK, is_pending);
            let (guard, timeout) = waited.unwrap_or_else(PoisonError::into_inner);
            table = guard;
            if !timeout.timed_out() {
                break;
            }
            if scrubber.is_some_and(has_gone) {
                table.end_scrub(number);
                break;
            }
        }
        let answered = table.take_answer(number);
        // Looking at folders may take long.
        drop(table);
        match answered {
            Some((answer, None)) => {
                let freed = dropped.map_or(Ok(0), |image| complete::forget(&self.state, &image))?;
                let dir = CacheDir::read(&self.state);
                let cache = HostCache {
                    folder: Some(dir.folder(&self.state)),
                    earlier: dir.earlier(),
                    ..answer.cache.clone()
                };
                Ok(CacheAnswer { bytes: answer.bytes + freed, cache, ..answer })
            }
            Some((_, Some(failure))) => Err(failure.into()),
            None => Err(no_server()),
        }
    }
}

impl Supervisor {
    /// Has the cache evict until `bytes` are free on its disk, as far as it can. Only for files of
    /// the state directory, which lie there, too; what it cannot free, their reservation reports.
    pub(super) fn make_room(&self, bytes: u64) {
        let free = |folder: &Path| space::free_space(folder).ok();
        let Some(free) = free(&self.state.mounts()).filter(|free| *free < bytes) else { return };
        let cache = CacheDir::read(&self.state).folder(&self.state);
        if !space::shares_disk(&cache, &self.state.mounts()) {
            return;
        }
        match self.cache(CacheRequest::Evict { bytes: bytes - free }, None) {
            Ok(answer) => tracing::info!(bytes = answer.bytes, "the cache made room for writes"),
            Err(error) => tracing::debug!(%error, "the cache makes no room"),
        }
    }
}

fn no_server() -> Error {
    let what = "no server of this version has the cache now: one runs while something is mounted; a new size is \
                kept for the next one";
    Error::new(ErrorKind::Unavailable, what)
}
