use std::{
    sync::{
        Mutex,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

/// Time between two reports.
const INTERVAL: Duration = Duration::from_millis(100);

/// Counts work and reports it at limited frequency. The callback receives the raw bytes waiting
/// for compression and the bytes stored.
pub(super) struct Meter<'a> {
    pending: AtomicU64,
    stored: AtomicU64,
    last: Mutex<Instant>,
    report: &'a (dyn Fn(u64, u64) + Sync),
}

impl<'a> Meter<'a> {
    /// Creates a meter and reports the beginning.
    pub(super) fn new(report: &'a (dyn Fn(u64, u64) + Sync)) -> Self {
        report(0, 0);
        let (pending, stored) = (AtomicU64::new(0), AtomicU64::new(0));
        Self { pending, stored, last: Mutex::new(Instant::now()), report }
    }

    /// Adds `bytes` to those waiting for compression.
    pub(super) fn pending(&self, bytes: u64) {
        self.pending.fetch_add(bytes, Relaxed);
    }

    /// Subtracts `bytes` from those waiting for compression.
    pub(super) fn done(&self, bytes: u64) {
        self.pending.fetch_sub(bytes, Relaxed);
        self.tick();
    }

    /// Packs now hold `bytes`.
    pub(super) fn stored(&self, bytes: u64) {
        self.stored.store(bytes, Relaxed);
        self.tick();
    }

    /// Reports the end.
    pub(super) fn end(&self) {
        (self.report)(self.pending.load(Relaxed), self.stored.load(Relaxed));
    }

    fn tick(&self) {
        // If the lock is held, another thread is reporting.
        let Ok(mut last) = self.last.try_lock() else { return };
        if last.elapsed() >= INTERVAL {
            *last = Instant::now();
            self.end();
        }
    }
}
