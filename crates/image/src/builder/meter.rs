use std::{
    sync::{
        Mutex,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

/// Reports are this far apart.
const INTERVAL: Duration = Duration::from_millis(100);

/// Counts what is done and reports it, not too often. The report is told the raw bytes that wait
/// to be compressed and the bytes stored.
pub(super) struct Meter<'a> {
    pending: AtomicU64,
    stored: AtomicU64,
    last: Mutex<Instant>,
    report: &'a (dyn Fn(u64, u64) + Sync),
}

impl<'a> Meter<'a> {
    /// A meter that has reported the beginning.
    pub(super) fn new(report: &'a (dyn Fn(u64, u64) + Sync)) -> Self {
        report(0, 0);
        let (pending, stored) = (AtomicU64::new(0), AtomicU64::new(0));
        Self { pending, stored, last: Mutex::new(Instant::now()), report }
    }

    /// `bytes` more wait to be compressed.
    pub(super) fn pending(&self, bytes: u64) {
        self.pending.fetch_add(bytes, Relaxed);
    }

    /// `bytes` of those wait no longer.
    pub(super) fn done(&self, bytes: u64) {
        self.pending.fetch_sub(bytes, Relaxed);
        self.tick();
    }

    /// Packs hold `bytes`.
    pub(super) fn stored(&self, bytes: u64) {
        self.stored.store(bytes, Relaxed);
        self.tick();
    }

    /// Reports the end.
    pub(super) fn end(&self) {
        (self.report)(self.pending.load(Relaxed), self.stored.load(Relaxed));
    }

    fn tick(&self) {
        // Whoever finds it locked need not report: somebody else does.
        let Ok(mut last) = self.last.try_lock() else { return };
        if last.elapsed() >= INTERVAL {
            *last = Instant::now();
            self.end();
        }
    }
}
