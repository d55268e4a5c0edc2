//! The last reads of a mount that had to wait: who asks "why was it slow?" finds them here.
//!
//! ```text
//!   device.read (a miss) ─► WaitRecord: tries, by the volume ─► Waits: a ring of the last 256
//! ```
//!
//! Invariants: a hit takes no part in it; a wait below [`SHORTEST`] takes no lock, unless its read
//! failed; a ring has at most [`KEPT`] waits, and one in which nothing waits takes no memory.

use std::{
    collections::VecDeque,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use burgeon_block::{ByteRange, ErrorKind, Result};

/// Waits that a mount remembers.
pub const KEPT: usize = 256;

/// Waits below this are not remembered, unless their read failed: a millisecond is what a store in
/// a local network takes.
pub const SHORTEST: Duration = Duration::from_millis(1);

/// The volume's account of one read.
#[derive(Default, Debug)]
pub(crate) struct WaitRecord {
    /// Failed attempts to fetch.
    failed_tries: AtomicU64,
    /// It waited for a fetch.
    fetched: AtomicBool,
}

impl WaitRecord {
    /// A fetch that the read has waited for.
    pub(crate) fn fetched(&self, failed_tries: u64) {
        self.fetched.store(true, Relaxed);
        self.failed_tries.fetch_add(failed_tries, Relaxed);
    }
}

/// One read that waited.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wait {
    /// Its number in the mount: later waits have higher ones.
    pub number: u64,
    /// Its end, in microseconds since 1970.
    pub ended_unix_us: u64,
    /// Its length in time.
    pub took: Duration,
    /// The bytes, by the addresses of the device.
    pub range: ByteRange,
    /// It waited for a fetch; else for the cache.
    pub fetched: bool,
    /// Failed attempts to fetch.
    pub failed_tries: u64,
    /// The error with which it was answered.
    pub error: Option<ErrorKind>,
}

/// The last waits of a mount.
#[derive(Default, Debug)]
pub(crate) struct Waits {
    last: Mutex<(u64, VecDeque<Wait>)>,
}

impl Waits {
    /// Remembers a read of `range` that has ended.
    pub(crate) fn note(
        &self,
        range: ByteRange,
        took: Duration,
        record: &WaitRecord,
        result: &Result<()>,
    ) {
        if took < SHORTEST && result.is_ok() {
            return;
        }
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        let (number, waits) = &mut *last;
        *number += 1;
        if waits.len() == KEPT {
            waits.pop_front();
        }
        waits.push_back(Wait {
            number: *number,
            ended_unix_us: u64::try_from(now.as_micros()).unwrap_or(u64::MAX),
            took,
            range,
            fetched: record.fetched.load(Relaxed),
            failed_tries: record.failed_tries.load(Relaxed),
            error: result.as_ref().err().map(burgeon_block::Error::kind),
        });
    }

    /// The waits after number `after`, the oldest first.
    pub(crate) fn after(&self, after: u64) -> Vec<Wait> {
        let last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        last.1.iter().filter(|wait| wait.number > after).cloned().collect()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use burgeon_block::{ByteRange, Error, ErrorKind};

    use super::{KEPT, SHORTEST, WaitRecord, Waits};

    #[test]
    fn the_last_waits_are_kept_and_numbered() {
        let waits = Waits::default();
        let range = ByteRange::new(4096, 8192).unwrap();
        waits.note(range, SHORTEST - Duration::from_nanos(1), &WaitRecord::default(), &Ok(()));
        assert!(waits.after(0).is_empty());
        let refused = Err(Error::new(ErrorKind::Unavailable, "given up a moment ago"));
        waits.note(range, Duration::ZERO, &WaitRecord::default(), &refused);
        assert_eq!(waits.after(0)[0].error, Some(ErrorKind::Unavailable));
        let waits = Waits::default();
        let record = WaitRecord::default();
        record.fetched(2);
        let failed = Err(Error::new(ErrorKind::Unavailable, "away"));
        for _ in 0..KEPT + 5 {
            waits.note(range, SHORTEST, &record, &failed);
        }
        let kept = waits.after(0);
        assert_eq!((kept.len(), kept[0].number), (KEPT, 6));
        assert_eq!((kept[0].failed_tries, kept[0].fetched), (2, true));
        assert_eq!(kept[0].error, Some(ErrorKind::Unavailable));
        assert_eq!(waits.after(KEPT as u64 + 4).len(), 1);
    }
}
