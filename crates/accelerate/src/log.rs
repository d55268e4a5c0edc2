//! The log of dirty blocks: what write-back has acknowledged and the slow device does not have yet.
//!
//! ```text
//!   log       segments; one is open, and is filled record by record; one record is written at a time
//!   append    blocks wait in a queue; whoever finds nobody writing writes a record of all that fit
//!   barrier   one sync of the cache device makes all records durable that were written before
//!   retire    (write_back) oldest segments: slow write, slow sync, index and log synced, the tail of
//!             the superblock moved past them; only then they are free
//! ```
//!
//! A block is in the map from its record until its segment is retired, also when the slow device
//! has it already: so long a later start would write it there again.
//!
//! Invariants (`dev/accelerate-simulator`):
//! - A version in the map is never overwritten in place, and its record counts at the next start.
//! - A record that failed never counts: the superblock begins a new generation with its number. If
//!   that fails, too, its blocks are lost, and nothing is appended any more.
//! - The segment that an earlier process had open is not written to by its successor, because a
//!   write of the dead may still land there. Such a record does not count: the successor has begun
//!   a generation with its number.

use std::{
    collections::{BTreeMap, HashMap, VecDeque},
    sync::{
        Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering::SeqCst},
    },
};

use burgeon_block::{BLOCK_SIZE, Error, ErrorKind, LocalFile, Pages, Result};

pub(crate) use crate::{dirty_version::DirtyVersion, log_state::Segment};
use crate::{
    keys::Key,
    layout::Layout,
    log_state::{Outcome, Queued, State},
    record::{BLOCKS_MAX, LogRecord},
    sets::check_of,
};

const BLOCK: usize = BLOCK_SIZE as usize;
/// The most segments that are retired at once, unless all are: a slow disk needs minutes for 64
/// MiB.
const RETIRED_MAX: usize = 4;

/// Changes of the superblock that the log needs, durable when they return.
pub(crate) trait Heads {
    /// The segment is about to be filled.
    fn open_segment(&self, segment: u32) -> Result<()>;
    /// A generation begins with the record `first`; no segment is open.
    fn begin_generation(&self, generation: u64, first: u64) -> Result<()>;
    /// So many bytes were written beside the blocks.
    fn note_overhead(&self, bytes: u64);
}

/// The choice of dirty blocks to write back.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum WriteBackScope {
    /// The oldest segment, to make room.
    Room,
    /// Up to [`RETIRED_MAX`] segments that were begun before this second.
    Older(u64),
    /// Everything.
    All,
}

/// The result of recovery.
pub(crate) struct Recovered {
    pub(crate) map: BTreeMap<Key, DirtyVersion>,
    pub(crate) segments: Vec<Segment>,
    /// Not below any number that a record has had.
    pub(crate) next: u64,
    pub(crate) generation: u64,
    /// The first record of the generation.
    pub(crate) first: u64,
    /// Not to be opened.
    pub(crate) avoided: Option<u32>,
}

/// Why nothing was appended.
#[derive(Debug)]
pub(crate) enum Refused {
    /// No segment is free: retire some.
    Full,
    Failed(Error),
}

/// The log of a cache.
pub(crate) struct Log {
    layout: Layout,
    id: [u8; 16],
    state: Mutex<State>,
    turn: Condvar,
    /// Blocks in the map, so that a read of a cache without dirty blocks takes no lock.
    used: AtomicU64,
}

/// The key of the block `index` behind `first`.
fn key_behind(first: Key, index: usize) -> Key {
    Key { block: first.block + index as u64, ..first }
}

impl Log {
    pub(crate) fn new(layout: Layout, id: [u8; 16], found: Recovered) -> Self {
        let used = AtomicU64::new(found.map.len() as u64);
        let state = State {
            map: found.map,
            segments: found.segments,
            open: None,
            last_opened: found.avoided.unwrap_or(0),
            next: found.next,
            generation: found.generation,
            first: found.first,
            // Records of an earlier process may be volatile.
            durable: 0,
            queue: VecDeque::new(),
            tickets: 0,
            done: HashMap::new(),
            is_writing: false,
            avoided: found.avoided,
            has_failed: false,
            has_lost: false,
            clock: 0,
        };
        Self { layout, id, state: Mutex::new(state), turn: Condvar::new(), used }
    }

    pub(crate) fn state(&self) -> MutexGuard<'_, State> {
        // No code that can panic runs under this lock.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait<'a>(&'a self, state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        self.turn.wait(state).unwrap_or_else(PoisonError::into_inner)
    }

    /// The segment of a block of the log.
    pub(crate) fn segment_of(&self, place: u32) -> u32 {
        place / self.layout.segment_blocks()
    }

    /// The most blocks of one call of [`Self::append`].
    pub(crate) fn blocks_max(&self) -> usize {
        BLOCKS_MAX.min(self.layout.segment_blocks() as usize - 1)
    }

    /// The dirty version of a block.
    pub(crate) fn find(&self, key: Key) -> Option<DirtyVersion> {
        if self.used.load(SeqCst) == 0 {
            return None;
        }
        self.state().map.get(&key).copied()
    }

    /// The first block of the map from `first` on, below `end`.
    pub(crate) fn first_in(&self, first: Key, end: u64) -> Option<Key> {
        if self.used.load(SeqCst) == 0 || first.block >= end {
            return None;
        }
        let end = Key { block: end, ..first };
        self.state().map.range(first..end).next().map(|(key, _)| *key)
    }

    /// Blocks in the map of a device, or of all.
    pub(crate) fn count(&self, device: Option<u8>) -> u64 {
        match device {
            None => self.used.load(SeqCst),
            Some(device) => {
                let (first, end) = (Key { device, block: 0 }, Key { device, block: u64::MAX });
                self.state().map.range(first..end).count() as u64
            }
        }
    }

    /// Blocks of the log that hold no free segment, and blocks in all.
    pub(crate) fn fill(&self) -> (u64, u64) {
        let state = self.state();
        let taken = state.segments.iter().filter(|segment| **segment != Segment::Free).count();
        let taken = taken as u64 * u64::from(self.layout.segment_blocks());
        (taken, u64::from(self.layout.log_blocks))
    }

    /// Tells the time, in seconds.
    pub(crate) fn set_clock(&self, seconds: u64) {
        self.state().clock = seconds;
    }

    /// Logs blocks whose lock the caller holds, one after another from `first` on; returns when
    /// their record is written. At most [`Self::blocks_max`] of them.
    pub(crate) fn append(
        &self,
        file: &impl LocalFile,
        heads: &impl Heads,
        first: Key,
        bytes: Pages,
    ) -> Result<(), Refused> {
        let mut state = self.state();
        let ticket = state.tickets;
        state.tickets += 1;
        state.queue.push_back(Queued { ticket, first, bytes });
        loop {
            if let Some(done) = state.done.remove(&ticket) {
                return done.map_err(|outcome| match outcome {
                    Outcome::Full => Refused::Full,
                    Outcome::Failed(kind, what) => Refused::Failed(Error::new(kind, what)),
                });
            }
            if state.is_writing {
                state = self.wait(state);
                continue;
            }
            state.is_writing = true;
            state = self.write(state, file, heads);
            state.is_writing = false;
            self.turn.notify_all();
        }
    }

    /// Writes a record of the first blocks of the queue, for the one who writes; without the lock.
    fn write<'a>(
        &'a self,
        mut state: MutexGuard<'a, State>,
        file: &impl LocalFile,
        heads: &impl Heads,
    ) -> MutexGuard<'a, State> {
        if state.has_failed {
            let what = "the log of the cache has failed: nothing is written to it any more";
            state.refuse_all(&Outcome::Failed(ErrorKind::LocalIo, what.to_owned()));
            return state;
        }
        state = self.ensure_open(state, heads);
        // All were refused where there is none.
        let Some((segment, _, _, at)) = state.open else { return state };
        let size = self.layout.segment_blocks();
        let batch = state.take_batch((size - at) as usize - 1);
        let place = segment * size + at;
        let blocks = batch.iter().flat_map(|queued| {
            let bytes = queued.bytes.bytes().chunks_exact(BLOCK).enumerate();
            bytes.map(|(index, bytes)| (key_behind(queued.first, index), bytes))
        });
        let record = LogRecord {
            number: state.next,
            generation: state.generation,
            first: state.first,
            durable: state.durable,
            blocks: blocks.map(|(key, bytes)| (key, check_of(key, bytes))).collect(),
        };
        drop(state);
        let done = self.write_record(file, place, &record, &batch);
        heads.note_overhead(BLOCK_SIZE);
        let outcome = match done {
            Ok(()) => Ok(()),
            Err(error) => {
                let cut = heads.begin_generation(record.generation + 1, record.number);
                Err((Outcome::Failed(error.kind(), error.to_string()), cut.is_ok()))
            }
        };
        let mut state = self.state();
        state.note_written(&record, place, &outcome);
        self.used.store(state.map.len() as u64, SeqCst);
        let outcome = outcome.map_err(|(outcome, _)| outcome);
        for queued in &batch {
            state.done.insert(queued.ticket, outcome.clone());
        }
        state
    }

    /// Opens a segment with room for the first of the queue, unless there is one. If that fails,
    /// refuses the whole queue, and none is open.
    fn ensure_open<'a>(
        &'a self,
        mut state: MutexGuard<'a, State>,
        heads: &impl Heads,
    ) -> MutexGuard<'a, State> {
        let size = self.layout.segment_blocks();
        let wanted = state.queue.front().map_or(0, |first| first.bytes.bytes().len() / BLOCK);
        if state.open.is_some_and(|(.., at)| (size - at) as usize > wanted) {
            return state;
        }
        state.close();
        let Some(segment) = state.choose() else {
            state.refuse_all(&Outcome::Full);
            return state;
        };
        drop(state);
        let opened = heads.open_segment(segment);
        state = self.state();
        if let Err(error) = opened {
            state.refuse_all(&Outcome::Failed(error.kind(), error.to_string()));
            return state;
        }
        state.last_opened = segment;
        state.open = Some((segment, state.next, state.clock, 0));
        state
    }

    fn write_record(
        &self,
        file: &impl LocalFile,
        place: u32,
        record: &LogRecord,
        batch: &[Queued],
    ) -> Result<()> {
        let no_memory = || Error::new(ErrorKind::Unavailable, "no memory for a record of the log");
        let len = (record.blocks.len() as u64 + 1) * BLOCK_SIZE;
        let mut pages = Pages::zeroed(len).ok_or_else(no_memory)?;
        let (head, mut rest) = pages.bytes_mut().split_at_mut(BLOCK);
        head.copy_from_slice(&record.encode(place, self.id).0);
        for queued in batch {
            let (part, further) = rest.split_at_mut(queued.bytes.bytes().len());
            part.copy_from_slice(queued.bytes.bytes());
            rest = further;
        }
        file.write_at(self.layout.log_at(place), pages.bytes())
    }

    /// Makes all records durable that were written before.
    pub(crate) fn barrier(&self, file: &impl LocalFile) -> Result<()> {
        let next = {
            let state = self.state();
            if state.has_lost {
                let what = "a sync of the cache device has failed: dirty blocks may be lost";
                return Err(Error::new(ErrorKind::LocalIo, what));
            }
            if state.durable >= state.next {
                return Ok(());
            }
            state.next
        };
        file.sync().inspect_err(|_| self.note_lost())?;
        let mut state = self.state();
        state.durable = state.durable.max(next);
        Ok(())
    }

    /// A sync of the cache device failed, which the kernel reports once: no later barrier may
    /// succeed.
    pub(crate) fn note_lost(&self) {
        let mut state = self.state();
        state.has_lost |= state.is_writing || state.durable < state.next;
    }

    /// Nothing is appended any more, and no record is being written.
    pub(crate) fn end(&self) {
        let mut state = self.state();
        state.has_failed = true;
        while state.is_writing {
            state = self.wait(state);
        }
    }

    /// The second in which the oldest segment was begun that is in use.
    pub(crate) fn oldest_birth(&self) -> Option<u64> {
        let state = self.state();
        let closed = state.segments.iter().filter_map(|segment| match segment {
            Segment::Closed { born, .. } => Some(*born),
            Segment::Free | Segment::Avoided => None,
        });
        closed.chain(state.open.map(|(_, _, born, _)| born)).min()
    }

    /// False once nothing is appended any more.
    pub(crate) fn takes_more(&self) -> bool {
        !self.state().has_failed
    }

    /// Reads a version. False if it is damaged, or is not there any more.
    pub(crate) fn read(
        &self,
        file: &impl LocalFile,
        key: Key,
        entry: DirtyVersion,
        bytes: &mut [u8],
    ) -> Result<bool> {
        if entry.is_lost() {
            return Ok(false);
        }
        file.read_at(self.layout.log_at(entry.place), bytes)?;
        Ok(check_of(key, bytes) == entry.check)
    }

    /// Closes the open segment, once nobody writes to it, if it was begun before this second.
    pub(crate) fn close_before(&self, before: u64) {
        let mut state = self.state();
        while state.is_writing {
            state = self.wait(state);
        }
        if state.open.is_some_and(|(_, _, born, _)| born < before) {
            state.close();
        }
    }

    /// True if a segment is free.
    pub(crate) fn has_room(&self) -> bool {
        self.state().choose().is_some()
    }

    /// The segments that are to be retired, the oldest first.
    pub(crate) fn oldest(&self, want: WriteBackScope) -> Vec<u32> {
        let state = self.state();
        let closed = state.segments.iter().enumerate().filter_map(|(at, segment)| match segment {
            Segment::Closed { first, born } => Some((*first, *born, at as u32)),
            Segment::Free | Segment::Avoided => None,
        });
        let mut closed: Vec<_> = closed.collect();
        closed.sort_unstable();
        let count = match want {
            WriteBackScope::Room => 1,
            WriteBackScope::Older(before) => {
                closed.iter().take(RETIRED_MAX).take_while(|(_, born, _)| *born < before).count()
            }
            WriteBackScope::All => closed.len(),
        };
        closed.into_iter().take(count).map(|(.., at)| at).collect()
    }

    /// The tail once these segments, the oldest, are retired; and their versions by address, with
    /// all that are lost.
    pub(crate) fn versions(&self, segments: &[u32]) -> (u64, Vec<(Key, DirtyVersion)>) {
        let state = self.state();
        let stays = state.segments.iter().enumerate().filter_map(|(at, segment)| match segment {
            Segment::Closed { first, .. } if !segments.contains(&(at as u32)) => Some(*first),
            _ => None,
        });
        let open = state.open.map(|(_, first, ..)| first);
        let tail = stays.chain(open).min().unwrap_or(state.next);
        let is_there = |entry: &DirtyVersion| match entry.is_lost() {
            true => entry.number < tail,
            false => segments.contains(&self.segment_of(entry.place)),
        };
        let versions = state.map.iter().filter(|(_, entry)| is_there(entry));
        (tail, versions.map(|(key, entry)| (*key, *entry)).collect())
    }

    /// Not below the number of any record, and that of the next one.
    pub(crate) fn next(&self) -> u64 {
        self.state().next
    }

    /// The first record of the segments that were begun in this second or later.
    pub(crate) fn younger(&self, second: u64) -> u64 {
        let state = self.state();
        let closed = state.segments.iter().filter_map(|segment| match segment {
            Segment::Closed { first, born } if *born >= second => Some(*first),
            _ => None,
        });
        let open = state.open.filter(|(_, _, born, _)| *born >= second);
        closed.chain(open.map(|(_, first, ..)| first)).min().unwrap_or(state.next)
    }

    /// Versions of a device below the record `before`, about `blocks` of the oldest, by address;
    /// the record below which they all are; and the number of the others.
    pub(crate) fn oldest_of(
        &self,
        device: u8,
        before: u64,
        blocks: usize,
    ) -> (u64, Vec<(Key, DirtyVersion)>, u64) {
        let state = self.state();
        let (first, end) = (Key { device, block: 0 }, Key { device, block: u64::MAX });
        let before = before.min(state.next);
        let is_old = |(_, entry): &(&Key, &DirtyVersion)| entry.number < before;
        let mut versions: Vec<_> =
            state.map.range(first..end).filter(is_old).map(|(key, entry)| (*key, *entry)).collect();
        drop(state);
        let all = versions.len();
        let mut tail = before;
        if all > blocks {
            versions.sort_unstable_by_key(|(_, entry)| entry.number);
            // Whole records alone: a tail lies between two.
            let last = versions[blocks.saturating_sub(1)].1.number;
            versions.retain(|(_, entry)| entry.number <= last);
            versions.sort_unstable_by_key(|(key, _)| *key);
            tail = last + 1;
        }
        let left = (all - versions.len()) as u64;
        (tail, versions, left)
    }

    /// The versions of a device below the record `tail` are on it, or given up.
    pub(crate) fn remove(&self, device: u8, tail: u64) {
        let mut state = self.state();
        state.map.retain(|key, entry| key.device != device || entry.number >= tail);
        self.used.store(state.map.len() as u64, SeqCst);
    }

    /// These segments are retired: their versions leave the map.
    pub(crate) fn free(&self, segments: &[u32]) {
        let size = self.layout.segment_blocks();
        let mut state = self.state();
        let State { map, segments: all, avoided, .. } = &mut *state;
        map.retain(|_, entry| entry.is_lost() || !segments.contains(&(entry.place / size)));
        for at in segments {
            let is_avoided = *avoided == Some(*at);
            all[*at as usize] = if is_avoided { Segment::Avoided } else { Segment::Free };
        }
        self.used.store(state.map.len() as u64, SeqCst);
    }
}
