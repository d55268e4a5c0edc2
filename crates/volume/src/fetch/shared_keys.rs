//! The single-flight of the whole process: one fetch a key of the cache, whichever image asks.
//!
//! ```text
//!   fetch task of a chunk ──► begin ── nobody has the key ──► fetch, keep ──► the key is free
//!                               └── another image's fetch has it ──► wait ──► in the cache now?
//!                                                                              └ no: fetch anyway
//! ```
//!
//! Invariants, and the tests that hold them:
//! - A task waits for another image's fetch once, for [`WAIT_MAX`] and half of its own time at
//!   most: then it asks its own source, whatever became of the other (`tests/shared_keys.rs`).
//! - Background work does not fetch what another image fetches now (`tests/shared_keys.rs`).
//! - Only equal keys wait for each other, and keys of different domains are never equal: a mount
//!   learns nothing from another's credentials.

use std::{
    collections::HashMap,
    fmt,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use burgeon_cache::ChunkKey;
use tokio::{
    sync::watch,
    time::{Instant, timeout_at},
};

/// Longest wait for another image's fetch: the permits of those that wait for a dead store are
/// missing elsewhere.
const WAIT_MAX: Duration = Duration::from_secs(2);

type Keys = HashMap<ChunkKey, watch::Receiver<()>>;

/// The keys whose chunks are fetched now. Clones share them.
#[derive(Clone, Default)]
pub struct SharedKeys(Arc<Mutex<Keys>>);

/// The right to fetch a key's chunk alone, given back when dropped.
pub(crate) struct FetchRight {
    keys: SharedKeys,
    key: ChunkKey,
    /// Wakes those that wait, when it goes.
    _end: watch::Sender<()>,
}

/// The result of asking for a key.
pub(crate) type Claim = Result<FetchRight, Other>;

/// The end of another image's fetch.
pub(crate) struct Other(watch::Receiver<()>);

impl SharedKeys {
    fn guard(&self) -> MutexGuard<'_, Keys> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// True if the chunk of `key` is being fetched.
    pub(crate) fn has(&self, key: &ChunkKey) -> bool {
        self.guard().contains_key(key)
    }

    /// Takes `key`, or says who has it.
    pub(crate) fn begin(&self, key: ChunkKey) -> Claim {
        let mut keys = self.guard();
        if let Some(other) = keys.get(&key) {
            return Err(Other(other.clone()));
        }
        let (end, other) = watch::channel(());
        keys.insert(key, other);
        Ok(FetchRight { keys: self.clone(), key, _end: end })
    }
}

impl fmt::Debug for SharedKeys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SharedKeys").field("keys", &self.guard().len()).finish()
    }
}

impl Drop for FetchRight {
    fn drop(&mut self) {
        self.keys.guard().remove(&self.key);
    }
}

impl Other {
    /// Waits until the fetch has ended, its cache write included; for [`WAIT_MAX`] and half of the
    /// time until `deadline` at most.
    pub(crate) async fn ended(mut self, deadline: Instant) {
        let now = Instant::now();
        let wait = (deadline.saturating_duration_since(now) / 2).min(WAIT_MAX);
        // Nothing is ever sent: an error says that the sender has gone.
        let _ = timeout_at(now + wait, self.0.changed()).await;
    }
}
