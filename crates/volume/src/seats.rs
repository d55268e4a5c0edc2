//! Room for chunks in memory: a flight takes a seat of its volume and one of its process.
//!
//! ```text
//!   volume A: 32 ─┐
//!   volume B: 32 ─┼─► the process: 64      taken in this order, given back together
//!   volume C: 32 ─┘
//! ```
//!
//! The process's seats bound its memory, however many images are busy; the volume's keep one
//! image whose store is away from taking all of them. Whoever waits for a process's seat holds
//! a volume's and no other, and a flight that has both needs nothing more to land: so seats
//! always come free.

use std::sync::Arc;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// The seats that the volumes of one process share.
#[derive(Clone, Debug)]
pub struct Room {
    pub(crate) flights: Arc<Semaphore>,
    pub(crate) background: Arc<Semaphore>,
}

impl Room {
    /// Room for `flights` chunks in memory at once, `background` of them for fill and prefetch.
    pub fn new(flights: usize, background: usize) -> Self {
        let seats = |count: usize| Arc::new(Semaphore::new(count.max(1)));
        Self { flights: seats(flights), background: seats(background) }
    }
}

/// The seats that one volume may take.
#[derive(Debug)]
pub(crate) struct SeatPool {
    own: Arc<Semaphore>,
    shared: Arc<Semaphore>,
}

/// One seat, given back when dropped.
#[derive(Debug)]
pub(crate) struct Seat {
    _own: OwnedSemaphorePermit,
    _shared: OwnedSemaphorePermit,
}

impl SeatPool {
    pub(crate) fn new(own: usize, shared: Arc<Semaphore>) -> Self {
        Self { own: Arc::new(Semaphore::new(own.max(1))), shared }
    }

    /// A seat, after a wait for it. `None` never comes: the semaphores are never closed.
    pub(crate) async fn take(&self) -> Option<Seat> {
        let own = Arc::clone(&self.own).acquire_owned().await.ok()?;
        let shared = Arc::clone(&self.shared).acquire_owned().await.ok()?;
        Some(Seat { _own: own, _shared: shared })
    }

    /// A seat, if there is one now.
    pub(crate) fn try_take(&self) -> Option<Seat> {
        let own = Arc::clone(&self.own).try_acquire_owned().ok()?;
        let shared = Arc::clone(&self.shared).try_acquire_owned().ok()?;
        Some(Seat { _own: own, _shared: shared })
    }
}
