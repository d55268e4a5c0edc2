//! The state of the log of dirty blocks, under its one lock; see `log.rs`. No I/O is done under it.

use std::collections::{BTreeMap, HashMap, VecDeque};

use burgeon_block::{BLOCK_SIZE, ErrorKind, Pages, Result};

use crate::{
    dirty_version::DirtyVersion,
    keys::Key,
    record::{BLOCKS_MAX, LogRecord},
};

const BLOCK: usize = BLOCK_SIZE as usize;

/// A part of the log that is filled and retired as a whole.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Segment {
    Free,
    /// Full, or left: its records are numbered from `first` on.
    Closed {
        first: u64,
        /// When its first record was written, in seconds of the caller's clock.
        born: u64,
    },
    /// Free, but a dead process may still write to it.
    Avoided,
}

/// The dirty versions, the segments, and the queue of those who append.
pub(crate) struct State {
    pub(crate) map: BTreeMap<Key, DirtyVersion>,
    pub(crate) segments: Vec<Segment>,
    /// The open segment, its first record, its birth, and its next free block.
    pub(crate) open: Option<(u32, u64, u64, u32)>,
    pub(crate) last_opened: u32,
    pub(crate) next: u64,
    pub(crate) generation: u64,
    pub(crate) first: u64,
    /// All records below this number are durable.
    pub(crate) durable: u64,
    pub(crate) queue: VecDeque<Queued>,
    pub(crate) tickets: u64,
    pub(crate) done: HashMap<u64, Result<(), Outcome>>,
    pub(crate) is_writing: bool,
    pub(crate) avoided: Option<u32>,
    /// Nothing is appended any more.
    pub(crate) has_failed: bool,
    /// A sync failed, so records that were volatile may be lost.
    pub(crate) has_lost: bool,
    pub(crate) clock: u64,
}

/// Blocks that wait for a record.
pub(crate) struct Queued {
    pub(crate) ticket: u64,
    pub(crate) first: Key,
    pub(crate) bytes: Pages,
}

/// Why blocks were not logged.
#[derive(Clone)]
pub(crate) enum Outcome {
    Full,
    Failed(ErrorKind, String),
}

impl State {
    pub(crate) fn refuse_all(&mut self, outcome: &Outcome) {
        while let Some(queued) = self.queue.pop_front() {
            self.done.insert(queued.ticket, Err(outcome.clone()));
        }
    }

    /// The write of `record` at `place` has ended. After a failure: it is known that the record
    /// does not count (`true`), or not.
    pub(crate) fn note_written(
        &mut self,
        record: &LogRecord,
        place: u32,
        outcome: &Result<(), (Outcome, bool)>,
    ) {
        match outcome {
            Ok(()) => {
                for (index, (key, check)) in record.blocks.iter().enumerate() {
                    let place = place + 1 + index as u32;
                    let entry = DirtyVersion { number: record.number, place, check: *check };
                    self.map.insert(*key, entry);
                }
                self.next += 1;
                if let Some((.., at)) = &mut self.open {
                    *at += record.blocks.len() as u32 + 1;
                }
            }
            Err((_, true)) => {
                self.generation += 1;
                self.first = record.number;
                self.close();
            }
            Err((_, false)) => {
                // It may count at the next start, and may not: then the version before it does, so
                // that must not be retired.
                self.has_failed = true;
                for (key, _) in &record.blocks {
                    let former = self.map.get(key).map_or(record.number, |entry| entry.number);
                    self.map.insert(*key, DirtyVersion::lost(former));
                }
            }
        }
    }

    pub(crate) fn close(&mut self) {
        if let Some((segment, first, born, _)) = self.open.take() {
            self.segments[segment as usize] = Segment::Closed { first, born };
        }
    }

    /// A free segment, the next after the one that was opened last.
    pub(crate) fn choose(&self) -> Option<u32> {
        let count = self.segments.len() as u32;
        let order = (1..=count).map(|step| (self.last_opened + step) % count);
        order
            .into_iter()
            .find(|at| self.segments[*at as usize] == Segment::Free && self.avoided != Some(*at))
    }

    /// The first of the queue that fit into `blocks`; at least one.
    pub(crate) fn take_batch(&mut self, blocks: usize) -> Vec<Queued> {
        let mut batch = Vec::new();
        let mut left = blocks.min(BLOCKS_MAX);
        while let Some(first) = self.queue.front() {
            let len = first.bytes.bytes().len() / BLOCK;
            if len > left {
                break;
            }
            left -= len;
            batch.extend(self.queue.pop_front());
        }
        batch
    }
}
