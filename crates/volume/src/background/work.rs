//! The state of a volume's background work: who reads meanwhile, and which chunks were prefetched.

use std::{
    sync::{
        OnceLock,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Duration,
};

use burgeon_block::ByteRange;
use tokio::{
    sync::{Mutex, Notify},
    time::{Instant, timeout_at},
};

use super::prefetched::{Prefetched, PrefetchedBytes, Purpose};

/// The background work of one volume.
pub(crate) struct BackgroundWork {
    /// The volume's lazy data.
    data: ByteRange,
    waiting: AtomicUsize,
    fetching: AtomicUsize,
    none_waits: Notify,
    standing_back: Mutex<()>,
    /// Made with the first profile prefetch, and with the first read-ahead.
    profile: OnceLock<Prefetched>,
    read_ahead: OnceLock<Prefetched>,
    reads_no_more_ahead: AtomicBool,
}

impl BackgroundWork {
    pub(crate) fn new(data: ByteRange) -> Self {
        Self {
            data,
            waiting: AtomicUsize::new(0),
            fetching: AtomicUsize::new(0),
            none_waits: Notify::new(),
            standing_back: Mutex::default(),
            profile: OnceLock::new(),
            read_ahead: OnceLock::new(),
            reads_no_more_ahead: AtomicBool::new(false),
        }
    }

    /// A read waits until the guard is dropped: fill stands back for it.
    pub(crate) fn reader_waits(&self) -> WaitingReader<'_> {
        self.waiting.fetch_add(1, Ordering::Relaxed);
        WaitingReader(self)
    }

    /// Reads that wait now.
    pub(crate) fn waiting_readers(&self) -> usize {
        self.waiting.load(Ordering::Relaxed)
    }

    /// A chunk is fetched for a reader until the guard is dropped: a profile prefetch has half as
    /// much in flight.
    pub(crate) fn fetches_for_reader(&self) -> ReadersFetch<'_> {
        self.fetching.fetch_add(1, Ordering::Relaxed);
        ReadersFetch(self)
    }

    /// `range` was read: if it was prefetched, that was of use. Never waits, and allocates nothing.
    pub(crate) fn was_read(&self, range: ByteRange) {
        for prefetched in [&self.profile, &self.read_ahead] {
            if let Some(prefetched) = prefetched.get() {
                prefetched.read(range);
            }
        }
    }

    /// The chunk at `range` was fetched for `purpose`.
    pub(crate) fn was_prefetched(&self, range: ByteRange, purpose: Purpose) {
        self.prefetched(purpose).note(range);
    }

    /// Bytes that were fetched for `purpose`; `None` if none were to be since the volume was
    /// opened.
    pub(crate) fn prefetched_bytes(&self, purpose: Purpose) -> Option<PrefetchedBytes> {
        self.cell(purpose).get().map(Prefetched::bytes)
    }

    /// Begins to count what is fetched for `purpose`.
    pub(super) fn prefetched(&self, purpose: Purpose) -> &Prefetched {
        self.cell(purpose).get_or_init(|| Prefetched::new(self.data))
    }

    fn cell(&self, purpose: Purpose) -> &OnceLock<Prefetched> {
        match purpose {
            Purpose::Profile => &self.profile,
            Purpose::ReadAhead => &self.read_ahead,
        }
    }

    /// True while a chunk is fetched for a reader.
    pub(super) fn is_fetching_for_readers(&self) -> bool {
        self.fetching.load(Ordering::Relaxed) > 0
    }

    /// Waits until no reader waits, for `longest` at most.
    pub(super) async fn stand_back(&self, longest: Duration) {
        // One after another, so that one chunk is fetched for each time that this takes too long.
        let _turn = self.standing_back.lock().await;
        let until = Instant::now() + longest;
        loop {
            let gone = self.none_waits.notified();
            if self.waiting_readers() == 0 || timeout_at(until, gone).await.is_err() {
                return;
            }
        }
    }

    pub(super) fn stop_reading_ahead(&self) {
        self.reads_no_more_ahead.store(true, Ordering::Relaxed);
    }

    pub(super) fn reads_ahead(&self) -> bool {
        !self.reads_no_more_ahead.load(Ordering::Relaxed)
    }
}

/// One fetch for a reader.
pub(crate) struct ReadersFetch<'a>(&'a BackgroundWork);

impl Drop for ReadersFetch<'_> {
    fn drop(&mut self) {
        self.0.fetching.fetch_sub(1, Ordering::Relaxed);
    }
}

/// One waiting read; dropped also when the read is cancelled.
pub(crate) struct WaitingReader<'a>(&'a BackgroundWork);

impl Drop for WaitingReader<'_> {
    fn drop(&mut self) {
        if self.0.waiting.fetch_sub(1, Ordering::Relaxed) == 1 {
            self.0.none_waits.notify_waiters();
        }
    }
}
