//! Requests about the host's cache, which its server carries out.
//!
//! ```text
//!   client ── Cache ──► supervisor: keeps new bounds ── Cache, number ──► server
//!          ◄── Cache ──            waits            ◄── Cache, number ──
//! ```

use std::{os::unix::net::UnixStream, path::Path, sync::PoisonError, time::Duration};

use burgeon_block::{Error, ErrorKind, Result};

use super::{Supervisor, layers::renew_share};
use crate::{
    ipc::{
        link::CacheOrder,
        protocol::{CacheAnswer, CacheRequest, HostCache, WireError},
        silence::has_gone,
    },
    state::{
        cache::{Bounds, floor_of},
        cache_dir::CacheDir,
        complete,
        layers::{self, LayerShare},
        space::{self, HOST_LEFT},
    },
};

/// Pause between two looks whether the client of a scrub is still there.
const LOOK: Duration = Duration::from_secs(1);

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
                renew_share(&self.state)?;
                CacheOrder::Resize
            }
            CacheRequest::Evict { bytes } => CacheOrder::Evict { bytes },
            CacheRequest::Drop { digest } => CacheOrder::Drop { digest },
            CacheRequest::Scrub { bytes_per_second } => CacheOrder::Scrub { bytes_per_second },
        };
        let wanted = match order {
            CacheOrder::Evict { bytes } => bytes,
            _ => 0,
        };
        let change = (!matches!(order, CacheOrder::Show)).then(|| format!("{order:?}"));
        let Some((answer, failure)) = self.ordered(order, client) else { return Err(no_server()) };
        if let Some(failure) = failure {
            return Err(failure.into());
        }
        if let Some(order) = change {
            tracing::info!(order, bytes = answer.bytes, "the cache has done as told");
        }
        let mut freed = 0;
        if let Some(image) = dropped {
            freed += complete::forget(&self.state, &image)?;
            self.table().look_at_loans();
        }
        // Chunks go first: those that are read again come back one by one.
        if let Some(wanted) = wanted.checked_sub(answer.bytes).filter(|wanted| *wanted > 0) {
            freed += layers::evict(&self.state, wanted)?;
        }
        let dir = CacheDir::read(&self.state);
        let cache = HostCache {
            folder: Some(dir.folder(&self.state)),
            earlier: dir.earlier(),
            // After an eviction, the share is a second old.
            layers: Some(layers::evictable(&self.state)?.iter().map(|layer| layer.bytes).sum()),
            ..with_layers(answer.cache.clone(), LayerShare::read(&self.state))
        };
        Ok(CacheAnswer { bytes: answer.bytes + freed, cache, ..answer })
    }

    /// Has the server carry out an order; `None` if there is no server, or it dies meanwhile.
    pub(super) fn ordered(
        &self,
        order: CacheOrder,
        client: Option<&UnixStream>,
    ) -> Option<(CacheAnswer, Option<WireError>)> {
        let scrubber = client.filter(|_| matches!(order, CacheOrder::Scrub { .. }));
        let mut table = self.table();
        let server = table.server_pid;
        let number = table.order(order)?;
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
        table.take_answer(number)
    }
}

impl Supervisor {
    /// Has the cache evict until `bytes` are free on its disk above its floor and what is left to
    /// the host, as far as it can. Only for files of the state directory, which lie there, too;
    /// what it cannot free, their reservation reports.
    pub(super) fn make_room(&self, bytes: u64) {
        let floor = floor_of(&self.state, &self.state.mounts()).unwrap_or(0);
        let bytes = bytes.saturating_add(floor.max(HOST_LEFT));
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

/// The server's figures, which know nothing of stored layers, with these.
pub(super) fn with_layers(cache: HostCache, share: LayerShare) -> HostCache {
    let of_limit = if share.left.is_some() { share.bytes } else { 0 };
    HostCache { layers: Some(share.bytes), limit: cache.limit.saturating_add(of_limit), ..cache }
}

fn no_server() -> Error {
    let what = "no server of this version runs, and only a server opens the cache: one runs while an \
                image is mounted; a new size takes effect when it starts";
    Error::new(ErrorKind::Unavailable, what)
}
