//! Background work: fetches that no reader waits for.
//!
//! ```text
//!   reader ─────────────────────────────► its own permits: background work never takes them
//!   profile.rs      a profile, in order ──► runs ──┐ half as much in flight while readers fetch
//!   read_ahead.rs   behind a reader ──────► runs ──┼─► background permits
//!   fill.rs         everything ───────────► chunks ┘ begins nothing while readers wait, for 1 s
//! ```
//!
//! Invariants: background work takes background permits, which leave some for readers, and
//! read-ahead waits for none (`tests/profile.rs`, `tests/fill.rs`, `tests/read_ahead.rs`). All of
//! it is a hint: a fetch that fails here is left to the readers.

mod block_bits;
mod fill;
pub(crate) mod prefetched;
mod profile;
mod read_ahead;
mod request_window;

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use tokio::sync::Notify;

pub use self::{
    fill::{Fill, FillProgress, FillState},
    prefetched::PrefetchedBytes,
    profile::{ProfilePrefetch, ProfileProgress, ProfileState},
};

/// The switch of read-ahead.
#[derive(Default)]
pub(crate) struct ReadAhead {
    stopped: AtomicBool,
}

impl ReadAhead {
    fn stop(&self) {
        self.stopped.store(true, Ordering::Relaxed);
    }

    fn is_stopped(&self) -> bool {
        self.stopped.load(Ordering::Relaxed)
    }
}

/// Reads that wait now, and fetches for them: background work stands back for both.
#[derive(Default)]
pub(crate) struct Readers {
    waiting: AtomicUsize,
    fetching: AtomicUsize,
    none_waits: Notify,
}

impl Readers {
    /// A read waits until the guard is dropped.
    pub(crate) fn arrive(&self) -> Waiting<'_> {
        self.waiting.fetch_add(1, Ordering::Relaxed);
        Waiting(self)
    }

    pub(crate) fn waiting(&self) -> usize {
        self.waiting.load(Ordering::Relaxed)
    }

    /// A chunk is fetched for a reader until the guard is dropped.
    pub(crate) fn fetch(&self) -> Fetching<'_> {
        self.fetching.fetch_add(1, Ordering::Relaxed);
        Fetching(self)
    }

    fn fetching(&self) -> usize {
        self.fetching.load(Ordering::Relaxed)
    }
}

/// One fetch for a reader.
pub(crate) struct Fetching<'a>(&'a Readers);

impl Drop for Fetching<'_> {
    fn drop(&mut self) {
        self.0.fetching.fetch_sub(1, Ordering::Relaxed);
    }
}

/// One waiting read; dropped also when the read is cancelled.
pub(crate) struct Waiting<'a>(&'a Readers);

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        if self.0.waiting.fetch_sub(1, Ordering::Relaxed) == 1 {
            self.0.none_waits.notify_waiters();
        }
    }
}
