//! Finds the dirty blocks in the log of a cache that is opened.
//!
//! Each segment is read from its beginning, record by record, to the first that does not count; of
//! records behind it counts only what they say about others. The newest version of each block
//! counts whose bytes are whole. One that is torn was never flushed, and the version before it
//! counts; but if its generation had made it durable, the block is lost.
//!
//! Invariants: a record that its generation has made durable is found, or the log is `Corrupt`.
//! Nothing is written.

use std::collections::{BTreeMap, BTreeSet};

use burgeon_block::{BLOCK_SIZE, Error, ErrorKind, LocalFile, Pages, Result};

use crate::{
    format::{DEVICES_MAX, LogHead},
    keys::Key,
    layout::Layout,
    log::{DirtyVersion, Recovered, Segment},
    record::LogRecord,
    sets::check_of,
};

const BLOCK: usize = BLOCK_SIZE as usize;

/// A record, and which of its blocks are whole.
struct Read {
    record: LogRecord,
    place: u32,
    whole: Vec<bool>,
}

/// The dirty blocks of the log, without blocks from number `blocks_max` of their device on, and
/// without records below the tail of their device.
pub(crate) fn recover(
    file: &impl LocalFile,
    layout: &Layout,
    head: &LogHead,
    id: [u8; 16],
    blocks_max: u64,
    tails: &[u64; DEVICES_MAX],
) -> Result<Recovered> {
    let (size, count) = (layout.segment_blocks(), layout.segments());
    let mut reads = Vec::new();
    let mut segments = Vec::new();
    let mut durable = Durable::default();
    let mut pages = Pages::zeroed(u64::from(size) * BLOCK_SIZE)
        .ok_or_else(|| Error::new(ErrorKind::Unavailable, "no memory to read the log"))?;
    for segment in 0..count {
        let first = segment * size;
        file.read_at(layout.log_at(first), pages.bytes_mut())?;
        let found = read_segment(pages.bytes(), first, head, id, &mut durable);
        segments.push(
            found.first().map_or(Segment::Free, |read| Segment::Closed {
                first: read.record.number,
                born: 0,
            }),
        );
        reads.extend(found);
    }
    reads.sort_by_key(|read| read.record.number);
    let numbers: BTreeSet<u64> = reads.iter().map(|read| read.record.number).collect();
    if numbers.len() != reads.len() {
        return Err(damaged("two records have one number"));
    }
    let durable = durable.0;
    for (first, end) in durable.values() {
        let range = (*first).max(head.tail)..*end;
        let expected = range.end.saturating_sub(range.start);
        if !range.is_empty() && numbers.range(range).count() as u64 != expected {
            return Err(damaged("a record is missing"));
        }
    }
    let mut map = BTreeMap::new();
    for Read { record, place, whole } in &reads {
        let is_durable =
            durable.get(&record.generation).is_some_and(|(_, end)| record.number < *end);
        for (index, ((key, check), whole)) in record.blocks.iter().zip(whole).enumerate() {
            if key.block >= blocks_max {
                return Err(damaged("a record names a block that no device has"));
            }
            let (number, place) = (record.number, place + 1 + index as u32);
            if tails.get(usize::from(key.device)).is_some_and(|tail| number < *tail) {
                continue;
            }
            if *whole {
                map.insert(*key, DirtyVersion { number, place, check: *check });
            } else if is_durable {
                map.insert(*key, DirtyVersion::lost(number));
            }
        }
    }
    let (generation, first) = head.starts.last().copied().unwrap_or((1, 1));
    let next = numbers.last().map_or(0, |last| last + 1).max(first).max(head.tail);
    let avoided = head.open.filter(|open| *open < count);
    if let Some(open) = avoided
        && segments[open as usize] == Segment::Free
    {
        segments[open as usize] = Segment::Avoided;
    }
    Ok(Recovered { map, segments, next, generation, first, avoided })
}

fn damaged(why: &str) -> Error {
    let what = format!("the log of its cache is damaged: {why}");
    Error::new(ErrorKind::Corrupt, what)
}

/// The records of a segment whose first block is `first`; what others in it say goes to `durable`.
fn read_segment(
    bytes: &[u8],
    first: u32,
    head: &LogHead,
    id: [u8; 16],
    durable: &mut Durable,
) -> Vec<Read> {
    let mut reads: Vec<Read> = Vec::new();
    let mut at = 0;
    let decode = |at: usize| {
        let block = bytes.get(at * BLOCK..(at + 1) * BLOCK)?;
        let record = LogRecord::decode(block, first + at as u32, id)?;
        head.counts(record.generation, record.number).then_some(record)
    };
    while let Some(record) = decode(at) {
        let grows = reads.last().is_none_or(|last| last.record.number < record.number);
        let data = bytes.get((at + 1) * BLOCK..(at + 1 + record.blocks.len()) * BLOCK);
        let Some(data) = data.filter(|_| grows) else { break };
        let is_whole =
            |((key, check), bytes): (&(Key, u32), &[u8])| check_of(*key, bytes) == *check;
        let whole = record.blocks.iter().zip(data.chunks_exact(BLOCK)).map(is_whole).collect();
        durable.note(&record);
        let place = first + at as u32;
        at += 1 + record.blocks.len();
        reads.push(Read { record, place, whole });
    }
    // A record cannot be believed behind a broken one, but it tells whether that was durable.
    (at..bytes.len() / BLOCK).filter_map(decode).for_each(|record| durable.note(&record));
    reads
}

/// Of each generation, the first record and the one below which all were durable.
#[derive(Default)]
struct Durable(BTreeMap<u64, (u64, u64)>);

impl Durable {
    fn note(&mut self, record: &LogRecord) {
        let known = self.0.entry(record.generation).or_insert((record.first, record.durable));
        known.1 = known.1.max(record.durable);
    }
}
