//! The throttle of write-back.
//!
//! A [`Throttle`] is asked before each write to a slow device, and may let time pass: the core has
//! no clock. It holds up neither a writer that waits for room in the log nor a flush, because it
//! is told of them.

use std::sync::atomic::{AtomicU64, Ordering::SeqCst};

use burgeon_block::Result;

/// Requests of users to a slow device.
#[derive(Default)]
pub struct Load {
    in_flight: AtomicU64,
    begun: AtomicU64,
}

/// A request in flight, until it is dropped.
pub(crate) struct Request<'a>(&'a Load);

impl Load {
    pub(crate) fn begin(&self) -> Request<'_> {
        self.begun.fetch_add(1, SeqCst);
        self.in_flight.fetch_add(1, SeqCst);
        Request(self)
    }

    /// Requests that have not returned.
    pub fn in_flight(&self) -> u64 {
        self.in_flight.load(SeqCst)
    }

    /// All requests so far.
    pub fn begun(&self) -> u64 {
        self.begun.load(SeqCst)
    }
}

impl Drop for Request<'_> {
    fn drop(&mut self) {
        self.0.in_flight.fetch_sub(1, SeqCst);
    }
}

/// The moment before a write.
pub struct Moment<'a> {
    /// The slow device's other requests.
    pub load: &'a Load,
    /// Bytes to be written.
    pub bytes: u64,
    /// Threads that wait until more is written back.
    pub waiting: &'a AtomicU64,
}

/// Slows write-back down.
pub trait Throttle {
    /// Called before each write. An error ends the writing back; its blocks stay in the log.
    fn pause(&self, moment: &Moment<'_>) -> Result<()>;
}

/// No pause.
pub struct AtOnce;

impl Throttle for AtOnce {
    fn pause(&self, _moment: &Moment<'_>) -> Result<()> {
        Ok(())
    }
}

/// A thread that waits until more is written back.
pub(crate) struct Waiting<'a>(&'a AtomicU64);

impl<'a> Waiting<'a> {
    pub(crate) fn new(waiting: &'a AtomicU64) -> Self {
        waiting.fetch_add(1, SeqCst);
        Self(waiting)
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, SeqCst);
    }
}
