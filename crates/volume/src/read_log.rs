//! The reads of a mount, in order of first use, while a user records them.

use std::sync::{
    Mutex, MutexGuard, PoisonError,
    atomic::{AtomicBool, Ordering::Relaxed},
};

use burgeon_block::{ByteRange, RangeSet};
use burgeon_image::READS_MAX;

/// A recorder of reads. While it is off, a read costs one load. While it is on, each takes a lock
/// and may allocate, at most for [`READS_MAX`] ranges: the user has asked for that.
#[derive(Default)]
pub(crate) struct ReadLog {
    on: AtomicBool,
    recording: Mutex<Recording>,
}

/// The reads of a recording.
#[derive(Default, Debug)]
pub struct Recording {
    /// Lazy addresses in order of first use; none is there twice.
    pub reads: Vec<ByteRange>,
    /// True if there was more than [`READS_MAX`] ranges.
    pub cut_short: bool,
    known: RangeSet,
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

    /// Ends, and returns the reads.
    pub(crate) fn finish(&self) -> Recording {
        self.on.store(false, Relaxed);
        std::mem::take(&mut *self.recording())
    }

    /// Takes note of a read, whether it could be answered or not.
    #[inline]
    pub(crate) fn note(&self, range: ByteRange) {
        if self.on.load(Relaxed) {
            self.add(range);
        }
    }

    #[cold]
    fn add(&self, range: ByteRange) {
        self.recording().add(range);
    }
}

impl Recording {
    fn add(&mut self, range: ByteRange) {
        if self.cut_short {
            // The set of known ranges is bounded, too.
            return;
        }
        for new in self.known.insert(range) {
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
        let remembered = |n| recording.known.clone().insert(every_other(n)).is_empty();
        assert!(remembered(0) && !remembered(many - 1), "the set grows on");
    }
}
