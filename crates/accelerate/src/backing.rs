//! A slow device, and what of it a flush still has to make durable.
//!
//! ```text
//!   changes that bypass the log ── begin, end ──► pending ── sync ──► durable
//!   blocks of the log ── write_back ──► sync: a failure costs nothing, they stay in the log
//! ```
//!
//! Invariant: a failed sync fails all later flushes and changes if a change may be lost by it,
//! because the kernel reports a loss once.

use std::sync::{
    Arc, Mutex, PoisonError,
    atomic::{AtomicBool, AtomicU64, Ordering::SeqCst},
};

use burgeon_block::{ByteRange, Erase, Error, ErrorKind, LocalFile, Result};

use crate::{
    counters::{Count, Counts},
    identity::Identity,
    throttle::Load,
};

/// A slow device: its writes are volatile until `sync`.
pub trait SlowDevice: LocalFile {
    /// Size in bytes.
    fn size(&self) -> u64;

    /// A number that no other device has, if there is one.
    fn serial(&self) -> Option<String> {
        None
    }

    /// Erases a range. `UnsupportedFormat` if the device cannot.
    fn erase(&self, range: ByteRange, how: Erase) -> Result<()>;
}

/// Changes that went to the slow device itself.
#[derive(Default)]
pub(crate) struct Pending {
    in_flight: AtomicU64,
    returned: AtomicBool,
}

/// A slow device with its name and counters.
pub(crate) struct Backing {
    pub(crate) slow: Arc<dyn SlowDevice>,
    pub(crate) name: String,
    pub(crate) counts: Counts,
    pub(crate) pending: Arc<Pending>,
    pub(crate) identity: Arc<Identity>,
    pub(crate) load: Load,
    /// Held by whoever makes the slow device durable.
    syncing: Mutex<()>,
}

/// A change in flight, until it is dropped.
pub(crate) struct Change<'a>(&'a Pending);

impl Pending {
    /// The changes of an earlier process may be volatile.
    pub(crate) fn after_another() -> Self {
        Self { returned: AtomicBool::new(true), ..Self::default() }
    }

    /// A change of the slow device begins.
    pub(crate) fn begin(&self) -> Change<'_> {
        self.in_flight.fetch_add(1, SeqCst);
        Change(self)
    }

    /// True if a change may be volatile.
    pub(crate) fn is_any(&self) -> bool {
        self.in_flight.load(SeqCst) > 0 || self.returned.load(SeqCst)
    }
}

impl Drop for Change<'_> {
    fn drop(&mut self) {
        // In this order: a sync that comes in between sees one of them.
        self.0.returned.store(true, SeqCst);
        self.0.in_flight.fetch_sub(1, SeqCst);
    }
}

impl Backing {
    pub(crate) fn new(
        slow: Arc<dyn SlowDevice>,
        name: &str,
        counts: Counts,
        pending: Arc<Pending>,
        identity: Arc<Identity>,
    ) -> Self {
        let (name, load, syncing) = (name.to_owned(), Load::default(), Mutex::default());
        Self { slow, name, counts, pending, identity, load, syncing }
    }

    /// An error once a flush has failed, of this process or an earlier one that counted in the same
    /// memory.
    pub(crate) fn check(&self) -> Result<()> {
        if self.counts.has_lost() {
            let what = format!("a flush of {} has failed: nothing is written any more", self.name);
            return Err(Error::new(ErrorKind::LocalIo, what));
        }
        Ok(())
    }

    /// A flush failed.
    pub(crate) fn note_lost(&self, error: &Error) {
        self.counts.note_lost();
        tracing::error!(device = %self.name, %error, "a flush failed: nothing is written any more");
    }

    /// Makes every change durable that returned before.
    pub(crate) fn sync(&self) -> Result<()> {
        // One at a time: the kernel reports a loss once, and those that wait here must learn of it.
        let _turn = self.syncing.lock().unwrap_or_else(PoisonError::into_inner);
        self.check()?;
        self.pending.returned.store(false, SeqCst);
        self.slow.sync().inspect_err(|error| {
            self.note_lost(error);
            self.counts.add(Count::SlowErrors, 1);
        })
    }

    /// Makes blocks durable that the log still has.
    pub(crate) fn sync_logged(&self) -> Result<()> {
        let _turn = self.syncing.lock().unwrap_or_else(PoisonError::into_inner);
        let loses = self.pending.is_any();
        self.pending.returned.store(false, SeqCst);
        self.slow.sync().inspect_err(|error| {
            // Also what came meanwhile: its own sync would not be told.
            if loses || self.pending.is_any() {
                self.note_lost(error);
            }
            self.counts.add(Count::SlowErrors, 1);
        })
    }
}
