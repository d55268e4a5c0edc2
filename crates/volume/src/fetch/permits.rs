//! Permits bound the chunks in memory: a fetch takes one of its volume and one of its process.
//!
//! ```text
//!   volume A: 32 ─┐
//!   volume B: 32 ─┼─► the process: 64      taken in this order, given back together
//!   volume C: 32 ─┘
//! ```
//!
//! The process's permits bound its memory, however many images are busy; the volume's keep one
//! image whose store is away from taking all of them. Invariant: a fetch that waits for a permit of
//! the process holds one of a volume and no other, and a fetch that has both needs no further
//! permit to end. So permits always come free (`tests/interleavings.rs`).
//!
//! Chunks of one request share permits: those of one fetch are for up to [`CHUNK_MAX`] bytes, so
//! that short chunks get as many bytes in flight as long ones.

use std::sync::Arc;

use burgeon_image::CHUNK_MAX;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::budget::Budget;

/// The permits that the volumes of one process share.
#[derive(Clone, Debug)]
pub struct SharedPermits {
    pub(crate) fetches: Arc<Semaphore>,
    pub(crate) background: Arc<Semaphore>,
}

impl SharedPermits {
    /// Permits for `fetches` chunks in memory at once, `background` of them for background work.
    pub fn new(fetches: usize, background: usize) -> Self {
        let permits = |count: usize| Arc::new(Semaphore::new(count.max(1)));
        Self { fetches: permits(fetches), background: permits(background) }
    }
}

/// The permits that one volume may take.
#[derive(Debug)]
pub(crate) struct PermitPool {
    own: Arc<Semaphore>,
    shared: Arc<Semaphore>,
}

/// One permit, given back when dropped.
#[derive(Debug)]
pub(crate) struct Permit {
    _own: OwnedSemaphorePermit,
    _shared: OwnedSemaphorePermit,
}

impl PermitPool {
    pub(crate) fn new(own: usize, shared: Arc<Semaphore>) -> Self {
        Self { own: Arc::new(Semaphore::new(own.max(1))), shared }
    }

    /// A permit, after a wait for it. `None` never comes: the semaphores are never closed.
    pub(crate) async fn take(&self) -> Option<Permit> {
        let own = Arc::clone(&self.own).acquire_owned().await.ok()?;
        let shared = Arc::clone(&self.shared).acquire_owned().await.ok()?;
        Some(Permit { _own: own, _shared: shared })
    }

    /// A permit, if there is one now.
    pub(crate) fn try_take(&self) -> Option<Permit> {
        let own = Arc::clone(&self.own).try_acquire_owned().ok()?;
        let shared = Arc::clone(&self.shared).try_acquire_owned().ok()?;
        Some(Permit { _own: own, _shared: shared })
    }
}

/// The permits of one fetch. Clones share them; they are given back with the last one.
#[derive(Clone)]
pub(crate) struct Permits {
    _fetch: Arc<Permit>,
    background: Option<Arc<BackgroundPermit>>,
}

/// The permit of a fetch that no reader asked for, and the mount that pays for it, if one does.
pub(crate) struct BackgroundPermit {
    _permit: Permit,
    payer: Option<Arc<Budget>>,
}

impl BackgroundPermit {
    pub(crate) fn new(permit: Permit, payer: Option<Arc<Budget>>) -> Self {
        Self { _permit: permit, payer }
    }
}

impl Permits {
    pub(crate) fn new(fetch: Permit, background: Option<BackgroundPermit>) -> Self {
        Self { _fetch: Arc::new(fetch), background: background.map(Arc::new) }
    }

    /// True if no reader asked for the fetch.
    pub(crate) fn is_background(&self) -> bool {
        self.background.is_some()
    }

    pub(crate) fn payer(&self) -> Option<&Arc<Budget>> {
        self.background.as_ref().and_then(|background| background.payer.as_ref())
    }
}

/// The permits of the chunks of one request: one fetch's for each [`CHUNK_MAX`] of their bytes.
#[derive(Default)]
pub(crate) struct RunPermits {
    newest: Option<Permits>,
    /// Bytes that may still share the newest.
    room: u64,
}

impl RunPermits {
    /// Begins with a chunk of `len` bytes that has these.
    pub(crate) fn of(permits: &Permits, len: u64) -> Self {
        let room = u64::from(CHUNK_MAX).saturating_sub(len);
        Self { newest: Some(permits.clone()), room }
    }

    /// Permits for a further chunk of `len` bytes; `more` gives those of another fetch.
    pub(crate) fn take(
        &mut self,
        len: u64,
        more: impl FnOnce() -> Option<Permits>,
    ) -> Option<Permits> {
        match &self.newest {
            Some(permits) if len <= self.room => {
                self.room -= len;
                Some(permits.clone())
            }
            _ => {
                let permits = more()?;
                *self = Self::of(&permits, len);
                Some(permits)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{CHUNK_MAX, PermitPool, Permits, RunPermits, SharedPermits};

    #[test]
    fn chunks_of_a_run_share_permits_up_to_the_longest_chunk() {
        let shared = SharedPermits::new(2, 2);
        let pool = PermitPool::new(2, shared.fetches);
        let more = || pool.try_take().map(|permit| Permits::new(permit, None));
        let (mut run, quarter) = (RunPermits::default(), u64::from(CHUNK_MAX) / 4);
        let mut held: Vec<_> = (0..9).filter_map(|_| run.take(quarter, more)).collect();
        assert_eq!(held.len(), 8, "four for each of two permits");
        assert!(run.take(1, more).is_none());
        drop(run);
        held.truncate(1);
        let given_back = more();
        assert!(given_back.is_some() && more().is_none(), "that of the last four");
        held.clear();
        assert!(more().is_some());
    }

    #[test]
    fn a_volume_takes_its_own_share_and_the_process_bounds_all() {
        let shared = SharedPermits::new(3, 1);
        let [a, b] = [(); 2].map(|()| PermitPool::new(2, shared.fetches.clone()));
        let of_a: Vec<_> = (0..3).filter_map(|_| a.try_take()).collect();
        assert_eq!(of_a.len(), 2, "its own share");
        let of_b: Vec<_> = (0..3).filter_map(|_| b.try_take()).collect();
        assert_eq!(of_b.len(), 1, "the rest of the process's");
        drop(of_a);
        assert!(b.try_take().is_some());
    }
}
