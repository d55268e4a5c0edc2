//! What a mount reads, in order of first use, while somebody records it.

use std::sync::{
    Mutex, MutexGuard, PoisonError,
    atomic::{AtomicBool, Ordering::Relaxed},
};

use burgeon_block::{ByteRange, RangeSet};
use burgeon_image::READS_MAX;

/// A recorder of reads. While it is off, a read costs one load. While it is on, each takes a lock and
/// may allocate, at most for [`READS_MAX`] ranges: what a user who records has asked for.
#[derive(Default)]
pub(crate) struct ReadLog {
    on: AtomicBool,
    recording: Mutex<Recording>,
}

/// What was read while it was recorded.
#[derive(Default, Debug)]
pub struct Recording {
    /// Lazy addresses in order of first use; none is there twice.
    pub reads: Vec<ByteRange>,
    /// Whether there was more than [`READS_MAX`] ranges.
    pub cut_short: bool,
    seen: RangeSet,
}

impl ReadLog {
    fn recording(&self) -> MutexGuard<'_, Recording> {
        self.recording.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins anew.
    pub(crate) fn start(&self) {
        *self.recording() = Recording::default();
        self.on.store(true, Relaxed);
    }

    /// Ends, and gives what was read.
    pub(crate) fn finish(&self) -> Recording {
        self.on.store(false, Relaxed);
        std::mem::take(&mut *self.recording())
    }

    /// Takes note of a read, whether it could be answered or not.
    pub(crate) fn note(&self, range: ByteRange) {
        if self.on.load(Relaxed) {
            self.recording().add(range);
        }
    }
}

impl Recording {
    fn add(&mut self, range: ByteRange) {
        if self.cut_short {
            // What was seen has a bound, too.
            return;
        }
        for new in self.seen.insert(range) {
            if let Some(last) = self.reads.last_mut()
                && last.end() == new.start()
                && let Some(longer) = ByteRange::new(last.start(), new.end())
            {
                *last = longer;
            } else if self.reads.len() < READS_MAX {
                self.reads.push(new);
            } else {
                self.cut_short = true;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use burgeon_block::{BLOCK_SIZE, ByteRange};

    use super::{READS_MAX, ReadLog};

    #[test]
    fn a_recording_ends_where_its_memory_does() {
        let log = ReadLog::default();
        log.start();
        let every_other = |n: u64| ByteRange::at(2 * n * BLOCK_SIZE, BLOCK_SIZE).unwrap();
        let many = READS_MAX as u64 + 1000;
        (0..many).for_each(|n| log.note(every_other(n)));
        let recording = log.finish();
        assert!(recording.cut_short && recording.reads.len() == READS_MAX);
        let remembered = |n| recording.seen.clone().insert(every_other(n)).is_empty();
        assert!(remembered(0) && !remembered(many - 1), "what was seen grows on");
    }
}
