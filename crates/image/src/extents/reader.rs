//! Looks up addresses, in the process that serves them.

use std::{
    collections::HashMap,
    path::Path,
    sync::{Arc, PoisonError, RwLock},
};

use burgeon_block::{BLOCK_SIZE, ByteRange, Digest, Error, ErrorKind, ObjectId, Result};
use zerocopy::FromBytes as _;

use super::{
    ExtentSource, FileLog, LogFile, LogView, MappingInfo, block_range,
    format::{
        ENTRY_ALIGN, EXTENTS, HEADER_LEN, LogHeader, MapRecord, MappingEntry, Parsed, RECORD_LEN,
        SOURCES, parse_entry,
    },
    lookup::Lookup,
    unmapped,
};
use crate::corrupt;

/// Parsed sources that are kept, some 200 bytes each. Beyond this number all are dropped at once.
const PARSED_MAX: usize = 4096;

/// A reader's view of an extent map, as of its last refresh.
pub struct ExtentMap<L = FileLog> {
    logs: [L; 2],
    size: u64,
    id: u64,
    view: RwLock<Arc<View>>,
    parsed: RwLock<HashMap<u64, Parsing>>,
}

/// A source and the position of its first block checksum.
type Parsing = (Arc<ExtentSource>, u64);

/// A range of the area whose content is contiguous in one source.
#[derive(Clone, Debug)]
pub struct Extent {
    /// Bytes of the area, whole blocks.
    pub range: ByteRange,
    /// Source of the bytes.
    pub source: Arc<ExtentSource>,
    /// Offset of the first byte in the source.
    pub offset: u64,
    /// For a file: position of the checksum of its block 0, in checksums.
    pub first_checksum: u64,
}

/// The committed part of both files.
pub(super) struct View {
    id: u64,
    extents: LogView,
    sources: LogView,
    pub(super) records: u64,
    lookup: Lookup,
}

/// A mapping's entry, its position and its end in the table.
type Placed = (MappingEntry, u64, u64);

impl ExtentMap {
    /// Opens the map in `folder`, created by [`super::ExtentWriter`].
    pub fn open(folder: &Path) -> Result<Self> {
        open_logs(folder).and_then(Self::over).map_err(|error| named(folder, error))
    }

    /// Checks that `folder` contains a usable map, by its headers alone.
    pub fn check(folder: &Path) -> Result<()> {
        let checked = open_logs(folder).and_then(|logs| check_headers(&logs, false));
        checked.map(|_| ()).map_err(|error| named(folder, error))
    }
}

fn open_logs(folder: &Path) -> Result<[FileLog; 2]> {
    let open = |name| FileLog::open(&folder.join(name));
    Ok([open("extents")?, open("sources")?])
}

fn named(folder: &Path, error: Error) -> Error {
    let what = format!("cannot use the extent map in {}", folder.display());
    Error::with_source(error.kind(), what, error)
}

impl<L: LogFile> ExtentMap<L> {
    /// Opens a map in the given logs: extents and sources.
    pub fn over(logs: [L; 2]) -> Result<Self> {
        let (size, id) = check_headers(&logs, false)?;
        let view = RwLock::new(Arc::new(View::open(&logs, id, None)?));
        Ok(Self { logs, size, id, view, parsed: RwLock::default() })
    }

    /// Length of the area in bytes.
    pub fn size(&self) -> u64 {
        self.size
    }

    fn view(&self) -> Arc<View> {
        Arc::clone(&self.view.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// Makes appended mappings visible. A concurrent refresh may have read later and finished
    /// sooner: a view is never replaced by an older one.
    pub fn refresh(&self) -> Result<()> {
        let view = View::open(&self.logs, self.id, Some(&self.view()))?;
        let mut current = self.view.write().unwrap_or_else(PoisonError::into_inner);
        if view.records >= current.records {
            *current = Arc::new(view);
        }
        Ok(())
    }

    /// Number of extents and ends of mappings.
    pub fn records(&self) -> u64 {
        self.view().records
    }

    /// The extent at byte `offset` of the area. `Unmapped` if there is none, `Corrupt` if the map
    /// is damaged there.
    pub fn find(&self, offset: u64) -> Result<Extent> {
        let view = self.view();
        let (record, range) = view.locate(offset)?;
        let (source, first_checksum) = self.source(&view, record.entry_at())?;
        Ok(Extent { range, source, offset: record.offset(), first_checksum })
    }

    fn source(&self, view: &View, at: u64) -> Result<Parsing> {
        if let Some(known) = self.parsed.read().unwrap_or_else(PoisonError::into_inner).get(&at) {
            return Ok(known.clone());
        }
        let (source, first_checksum) = view.source(at)?;
        let source = (Arc::new(source), first_checksum);
        let mut parsed = self.parsed.write().unwrap_or_else(PoisonError::into_inner);
        if parsed.len() >= PARSED_MAX {
            parsed.clear();
        }
        parsed.insert(at, source.clone());
        Ok(source)
    }

    /// All mappings, oldest first.
    pub fn mappings(&self) -> Result<Vec<MappingInfo>> {
        self.view().mappings()
    }

    /// Checks every record, and every entry that one refers to; `Corrupt` describes the first
    /// damage. Returns the labels of mappings without an end, because their writer was killed or
    /// the end of the file is lost.
    pub fn verify(&self) -> Result<Vec<String>> {
        self.view().verify()
    }

    /// The manifests whose images are mapped, which must be kept.
    pub fn images(&self) -> Result<Vec<Digest>> {
        let mut images = Vec::new();
        self.view().each_source(&mut |source| match source {
            ExtentSource::Image(digest) if !images.contains(&digest) => images.push(digest),
            _ => {}
        })?;
        Ok(images)
    }

    /// Calls `found` for each file that is mapped, once or more.
    pub fn each_file(&self, found: &mut dyn FnMut(&ObjectId)) -> Result<()> {
        self.view().each_source(&mut |source| {
            if let ExtentSource::File { object, .. } = source {
                found(&object);
            }
        })
    }
}

/// Checks both headers; returns the area's length and the map's id.
pub(super) fn check_headers<L: LogFile>(logs: &[L; 2], writing: bool) -> Result<(u64, u64)> {
    let read = |log: &L, format, unit| {
        let len = log.size()?.min(HEADER_LEN);
        let view = log.view(len)?;
        let header = LogHeader::read_from_bytes(&view)
            .map_err(|_| corrupt("the header of the map is cut short"))?;
        header.check(format, unit, writing)
    };
    let extents = read(&logs[0], EXTENTS, RECORD_LEN)?;
    if extents != read(&logs[1], SOURCES, ENTRY_ALIGN)? {
        return Err(corrupt("the files of the extent map are of two different maps"));
    }
    Ok(extents)
}

fn record_at(extents: &[u8], index: u64) -> MapRecord {
    let at = (HEADER_LEN + index * RECORD_LEN) as usize;
    match MapRecord::read_from_bytes(&extents[at..at + RECORD_LEN as usize]) {
        Ok(record) => record,
        Err(_) => unreachable!("the slice has the struct's length"),
    }
}

/// Start of record `index`. A separate fast path, because a lookup calls it a hundred times.
fn start_at(extents: &[u8], index: u64) -> u64 {
    let at = (HEADER_LEN + index * RECORD_LEN) as usize + MapRecord::START_AT;
    match extents[at..].first_chunk() {
        Some(start) => u64::from_le_bytes(*start),
        None => unreachable!("a record is longer than its start"),
    }
}

impl View {
    /// Reads the committed state: everything up to the last valid END. `before` saves work.
    pub(super) fn open<L: LogFile>(logs: &[L; 2], id: u64, before: Option<&Self>) -> Result<Self> {
        let known = before.map_or(0, |before| before.records);
        let found = (logs[0].size()?.saturating_sub(HEADER_LEN) / RECORD_LEN).max(known);
        let all = logs[0].view(HEADER_LEN + found * RECORD_LEN)?;
        let is_end = |index: &u64| {
            let record = record_at(&all, *index);
            record.is_end() && record.is_sound(id, *index)
        };
        let records = (known..found).rev().find(is_end).map_or(known, |index| index + 1);
        let sources = logs[1].view(logs[1].size()?)?;
        let extents = logs[0].view(HEADER_LEN + records * RECORD_LEN)?;
        let mut lookup = before.map(|before| before.lookup.clone()).unwrap_or_default();
        lookup.extend(records, |record| {
            let known = record_at(&extents, record);
            known.is_sound(id, record).then(|| known.start())
        });
        Ok(Self { id, extents, sources, records, lookup })
    }

    /// The newest mapping. Lookups do not depend on its entry.
    pub(super) fn last(&self) -> Result<Option<Placed>> {
        let Some(end) = self.records.checked_sub(1) else { return Ok(None) };
        let at = self.record(end)?.offset();
        let (mapping, len) = self.mapping(at)?;
        Ok(Some((mapping, at, at.saturating_add(len))))
    }

    fn record(&self, index: u64) -> Result<MapRecord> {
        let record = record_at(&self.extents, index);
        if record.is_sound(self.id, index) {
            return Ok(record);
        }
        Err(corrupt(format!("record {index} of the extent map is damaged")))
    }

    /// The record that contains `offset`, and its range. Accepted only between two valid records:
    /// a damaged one can mislead a search, but never to a valid pair around `offset`.
    fn locate(&self, offset: u64) -> Result<(MapRecord, ByteRange)> {
        let block = offset / BLOCK_SIZE;
        let start = |record| start_at(&self.extents, record);
        let Some(low) = self.lookup.count(block, self.records, start) else {
            return Err(unmapped(offset));
        };
        let found = self.around(low, block).or_else(|_| {
            // A damaged record misled the search: use the valid ones alone.
            let near = self.lookup.near(block, self.records);
            let begins = |low: &u64| self.record(*low).is_ok_and(|r| r.start() <= block);
            self.around(near.clone().rev().find(begins).unwrap_or(near.start), block)
        });
        found?.ok_or_else(|| unmapped(offset))
    }

    /// The extent of record `low`, if it contains `block`; `None` if nothing is mapped there.
    /// `Corrupt` if the block is not between this record and the next.
    fn around(&self, low: u64, block: u64) -> Result<Option<(MapRecord, ByteRange)>> {
        let record = self.record(low)?;
        let next = if low + 1 < self.records { Some(self.record(low + 1)?) } else { None };
        let fits = record.start() <= block && next.is_none_or(|next| next.start() > block);
        if !fits {
            return Err(corrupt(format!("the extent map is damaged near record {low}")));
        }
        match next {
            Some(next) if !record.is_end() => {
                let range = block_range(record.start(), next.start() - record.start())?;
                Ok(Some((record, range)))
            }
            _ => Ok(None),
        }
    }

    fn source(&self, at: u64) -> Result<(ExtentSource, u64)> {
        match parse_entry(&self.sources, self.id, at)?.0 {
            Parsed::Source(source, first_checksum) => Ok((source, first_checksum)),
            Parsed::Mapping(_) => Err(corrupt(format!("entry {at} is the source of no extent"))),
        }
    }

    fn mapping(&self, at: u64) -> Result<(MappingEntry, u64)> {
        match parse_entry(&self.sources, self.id, at)? {
            (Parsed::Mapping(mapping), len) => Ok((mapping, len)),
            _ => Err(corrupt(format!("entry {at} of the source table is not a mapping"))),
        }
    }

    pub(super) fn mappings(&self) -> Result<Vec<MappingInfo>> {
        let mut mappings = Vec::new();
        let mut next = self.last()?.map(|(mapping, at, _)| (mapping, at));
        while let Some((mapping, at)) = next {
            mappings.push(MappingInfo {
                label: mapping.label,
                origin: mapping.origin,
                range: block_range(mapping.first_block, mapping.blocks)?,
                len: mapping.len,
                extents: mapping.extents,
            });
            next = match mapping.previous {
                0 => None,
                // Backwards only, so a hostile table cannot cause an endless loop.
                previous if previous < at => Some((self.mapping(previous)?.0, previous)),
                _ => return Err(corrupt("the mappings of the source table run in a circle")),
            };
        }
        mappings.reverse();
        Ok(mappings)
    }

    fn each_source(&self, found: &mut dyn FnMut(ExtentSource)) -> Result<()> {
        let mut at = HEADER_LEN;
        let end = self.last()?.map_or(HEADER_LEN, |(_, _, end)| end);
        while at < end {
            match parse_entry(&self.sources, self.id, at) {
                Ok((parsed, len)) => {
                    if let Parsed::Source(source, _) = parsed {
                        found(source);
                    }
                    at += len;
                }
                // Remains of a crash between two mappings, or damage: look for the next entry.
                Err(error) if error.kind() == ErrorKind::Corrupt => at += ENTRY_ALIGN,
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    fn verify(&self) -> Result<Vec<String>> {
        let (mut before, mut checked) = (0, None);
        for index in 0..self.records {
            let record = self.record(index)?;
            if record.start() < before {
                return Err(corrupt(format!("record {index} of the extent map is out of order")));
            }
            before = record.start();
            if record.is_end() {
                self.mapping(record.offset())?;
            } else if checked != Some(record.entry_at()) {
                self.source(record.entry_at())?;
                checked = Some(record.entry_at());
            }
        }
        Ok(self
            .unfinished(self.last()?.map_or(HEADER_LEN, |(_, _, end)| end))
            .map(|m| m.label)
            .collect())
    }

    /// Mappings whose entries lie from `begin` on, after the newest one that has an end.
    fn unfinished(&self, begin: u64) -> impl Iterator<Item = MappingEntry> {
        let places = (begin..self.sources.len() as u64).step_by(ENTRY_ALIGN as usize);
        places.filter_map(|at| match parse_entry(&self.sources, self.id, at) {
            Ok((Parsed::Mapping(lost), _)) => Some(lost),
            _ => None,
        })
    }

    /// The end of all addresses that may have been allocated, in blocks and checksums. Mappings
    /// whose END is lost count, too.
    pub(super) fn given_away(&self) -> Result<(u64, u64)> {
        let last = self.last()?;
        let mut given = last.as_ref().map_or((0, 0), |(mapping, _, _)| {
            (mapping.first_block.saturating_add(mapping.blocks), mapping.checksums_end)
        });
        let begin = last.map_or(HEADER_LEN, |(_, _, end)| end);
        for lost in self.unfinished(begin) {
            given.0 = given.0.max(lost.first_block.saturating_add(lost.blocks));
            given.1 = given.1.max(lost.checksums_end);
        }
        Ok(given)
    }
}
