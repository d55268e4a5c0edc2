//! Creates mappings: the only process that appends.

use std::path::Path;

use burgeon_block::{BLOCK_SIZE, ByteRange, Error, ErrorKind, ObjectId, ObjectKind, Result};
use rustix::rand::{GetRandomFlags, getrandom};
use zerocopy::IntoBytes as _;

use super::{
    CHECKSUMS_MAX, Content, ExtentSource, FileLog, LogFile, Mapping, MappingInfo, block_range,
    blocks_of, check_size,
    format::{
        ENTRY_ALIGN, EXTENTS, HEADER_LEN, LABEL_MAX, LogHeader, MapRecord, MappingEntry,
        RECORD_LEN, SOURCES, push_mapping, push_source,
    },
    reader::{View, check_headers},
};
use crate::invalid;

/// Size of the write buffer: 1 MiB, so that a tree of a million files takes some two hundred
/// writes and little memory.
const GATHER: usize = 1 << 20;

/// The writer of a map. It holds a lock on the map, so there is only one at a time.
pub struct ExtentWriter<L = FileLog> {
    logs: [L; 2],
    size: u64,
    id: u64,
    state: Option<State>,
}

/// The committed state.
#[derive(Clone)]
struct State {
    records: u64,
    /// The end of the source table.
    table_end: u64,
    next_block: u64,
    next_checksum: u64,
    last_mapping: u64,
}

impl ExtentWriter {
    /// Creates an empty map of an area of `size` bytes in `folder`, durably. `Invalid` if there
    /// is one already.
    pub fn create(folder: &Path, size: u64) -> Result<()> {
        let mut id = [0; 8];
        getrandom(&mut id, GetRandomFlags::empty())
            .map_err(|error| Error::io("cannot draw a number", error.into()))?;
        if folder.join("extents").exists() {
            return Err(invalid(format!("{} holds an extent map already", folder.display())));
        }
        let [extents, sources] = Self::headers(size, u64::from_le_bytes(id))?;
        // Extents last: a map exists when its extents file does.
        FileLog::create(&folder.join("sources"), &sources)?;
        FileLog::create(&folder.join("extents"), &extents)
    }

    /// Opens the map in `folder` and discards the remains of a crash. `Unavailable` while another
    /// process has it open to write.
    pub fn open(folder: &Path) -> Result<Self> {
        let logs = ["extents", "sources"].map(|name| FileLog::open_to_write(&folder.join(name)));
        let [extents, sources] = logs;
        Self::over([extents?, sources?])
    }

    /// The contents of the two files of an empty map.
    pub fn headers(size: u64, id: u64) -> Result<[Vec<u8>; 2]> {
        check_size(size)?;
        let header = |format, unit| LogHeader::new(format, unit, size, id).as_bytes().to_vec();
        Ok([header(EXTENTS, RECORD_LEN), header(SOURCES, ENTRY_ALIGN)])
    }
}

impl<L: LogFile> ExtentWriter<L> {
    /// Opens a map in the given logs: extents and sources.
    pub fn over(logs: [L; 2]) -> Result<Self> {
        let (size, id) = check_headers(&logs, true)?;
        let mut writer = Self { logs, size, id, state: None };
        writer.state = Some(writer.recover()?);
        Ok(writer)
    }

    /// Length of the area in bytes.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// All mappings, oldest first.
    pub fn mappings(&self) -> Result<Vec<MappingInfo>> {
        View::open(&self.logs, self.id, None)?.mappings()
    }

    /// Bytes that can still be mapped.
    pub fn free(&self) -> u64 {
        let next = self.state.as_ref().map_or(0, |state| state.next_block);
        (self.size / BLOCK_SIZE).saturating_sub(next) * BLOCK_SIZE
    }

    /// Maps `mapping` and returns its range in the area: whole blocks, never allocated before.
    /// Durable on return; after an error or a crash nothing of it is mapped. Costs three syncs
    /// for any number of extents. `NoSpace` at the end of the area.
    pub fn map(&mut self, mapping: &Mapping) -> Result<ByteRange> {
        let state = match self.state.take() {
            Some(state) => state,
            // The previous mapping failed half-way.
            None => self.recover()?,
        };
        let (blocks, checksums) = match self.check(&state, mapping) {
            Ok(wanted) => wanted,
            Err(error) => {
                self.state = Some(state);
                return Err(error);
            }
        };
        let range = block_range(state.next_block, blocks)?;
        self.state = Some(self.append(state, mapping, blocks, checksums)?);
        Ok(range)
    }

    /// Continues after the last END: later records are overwritten, but their addresses stay
    /// allocated.
    fn recover(&self) -> Result<State> {
        let [extents, sources] = &self.logs;
        // The state relied on now must be durable, even if its writer was killed before its sync.
        sources.sync()?;
        extents.sync()?;
        let view = View::open(&self.logs, self.id, None)?;
        let (next_block, next_checksum) = view.given_away()?;
        Ok(State {
            records: view.records,
            table_end: sources.size()?.max(HEADER_LEN).next_multiple_of(ENTRY_ALIGN),
            next_block,
            next_checksum,
            last_mapping: view.last()?.map_or(0, |(_, at, _)| at),
        })
    }

    /// Number of blocks and checksums that `mapping` takes.
    fn check(&self, state: &State, mapping: &Mapping) -> Result<(u64, u64)> {
        if mapping.label.len() > LABEL_MAX || mapping.origin.len() > LABEL_MAX {
            return Err(invalid(format!("a mapping's name has more than {LABEL_MAX} bytes")));
        }
        if mapping.extents.is_empty() {
            return Err(invalid(format!("{} has no content to map", mapping.origin)));
        }
        let (mut blocks, mut checksums) = (0u64, 0u64);
        for content in &mapping.extents {
            check_content(content)?;
            blocks = blocks.saturating_add(blocks_of(content.len));
        }
        for source in distinct(&mapping.extents) {
            checksums = checksums.saturating_add(checksums_of(source));
        }
        if blocks > self.free_blocks(state) {
            let free = self.free_blocks(state) * BLOCK_SIZE;
            let message = format!(
                "{} takes {} bytes, and the virtual area has {free} left: addresses are never used again, so make one that is larger",
                mapping.origin,
                blocks.saturating_mul(BLOCK_SIZE)
            );
            return Err(Error::new(ErrorKind::NoSpace, message));
        }
        if state.next_checksum.saturating_add(checksums) > CHECKSUMS_MAX {
            let message =
                format!("{}: no room for the checksums of so large files", mapping.origin);
            return Err(Error::new(ErrorKind::NoSpace, message));
        }
        Ok((blocks, checksums))
    }

    fn free_blocks(&self, state: &State) -> u64 {
        (self.size / BLOCK_SIZE).saturating_sub(state.next_block)
    }

    fn append(&self, state: State, mapping: &Mapping, blocks: u64, sums: u64) -> Result<State> {
        let [extents, sources] = &self.logs;
        let mut table = Gathered::new(sources, state.table_end);
        let mut records = Gathered::new(extents, HEADER_LEN + state.records * RECORD_LEN);
        let (mut block, mut index, mut checksum) =
            (state.next_block, state.records, state.next_checksum);
        let mut entry_at = 0;
        let mut before: Option<&ExtentSource> = None;
        for content in &mapping.extents {
            if before != Some(&content.source) {
                entry_at = table.end();
                push_source(&mut table.bytes, self.id, entry_at, &content.source, checksum);
                checksum += checksums_of(&content.source);
                before = Some(&content.source);
                table.flush(GATHER)?;
            }
            let record = MapRecord::extent(self.id, index, block, content.offset, entry_at);
            records.bytes.extend_from_slice(record.as_bytes());
            records.flush(GATHER)?;
            block += blocks_of(content.len);
            index += 1;
        }
        let mapping_at = table.end();
        let entry = MappingEntry {
            first_block: state.next_block,
            blocks,
            extents: mapping.extents.len() as u64,
            len: mapping.extents.iter().map(|content| content.len).sum(),
            previous: state.last_mapping,
            checksums_end: state.next_checksum + sums,
            label: mapping.label.clone(),
            origin: mapping.origin.clone(),
        };
        push_mapping(&mut table.bytes, self.id, mapping_at, &entry);
        if table.end() / ENTRY_ALIGN >= u64::from(u32::MAX) {
            return Err(Error::new(ErrorKind::NoSpace, "the source table is full"));
        }
        table.flush(0)?;
        records.flush(0)?;
        // This order matters: an END states that its mapping is durable.
        sources.sync()?;
        extents.sync()?;
        let end = MapRecord::end(self.id, index, block, mapping_at);
        records.bytes.extend_from_slice(end.as_bytes());
        records.flush(0)?;
        extents.sync()?;
        Ok(State {
            records: index + 1,
            table_end: table.end(),
            next_block: block,
            next_checksum: entry.checksums_end,
            last_mapping: mapping_at,
        })
    }
}

/// Buffered bytes for the end of a log.
struct Gathered<'a, L> {
    log: &'a L,
    bytes: Vec<u8>,
    written_to: u64,
}

impl<'a, L: LogFile> Gathered<'a, L> {
    fn new(log: &'a L, at: u64) -> Self {
        Self { log, bytes: Vec::new(), written_to: at }
    }

    fn end(&self) -> u64 {
        self.written_to + self.bytes.len() as u64
    }

    /// Writes the buffer if it holds more than `keep` bytes.
    fn flush(&mut self, keep: usize) -> Result<()> {
        if self.bytes.len() > keep {
            self.log.write_at(self.written_to, &self.bytes)?;
            self.written_to = self.end();
            self.bytes.clear();
        }
        Ok(())
    }
}

/// The sources of `extents`; equal neighbours are merged.
fn distinct(extents: &[Content]) -> impl Iterator<Item = &ExtentSource> {
    let mut before = None;
    extents.iter().map(|content| &content.source).filter(move |source| {
        let new = before != Some(*source);
        before = Some(*source);
        new
    })
}

fn checksums_of(source: &ExtentSource) -> u64 {
    match source {
        ExtentSource::File { identity, .. } => blocks_of(identity.size),
        ExtentSource::Computed(_) | ExtentSource::Image(_) => 0,
    }
}

fn check_content(content: &Content) -> Result<()> {
    let Content { source, offset, len } = content;
    let end = offset.checked_add(*len).filter(|end| *len > 0 && *end <= super::AREA_MAX);
    let (Some(end), true) = (end, offset.is_multiple_of(BLOCK_SIZE)) else {
        let what = format!(
            "{len} bytes from {offset} of {source:?} cannot be mapped: extents begin at multiples of {BLOCK_SIZE} and hold a byte"
        );
        return Err(invalid(what));
    };
    let named = |object: &ObjectId, kind: ObjectKind| match object.is(kind) {
        true => Ok(()),
        false => Err(invalid(format!("{object} is not below {}/", kind.folder()))),
    };
    let whole = end.is_multiple_of(BLOCK_SIZE);
    match source {
        ExtentSource::Computed(object) => named(object, ObjectKind::Computed),
        ExtentSource::File { object, identity } if end > identity.size => Err(invalid(format!(
            "{object} has {} bytes, too few for {end} to be mapped",
            identity.size
        ))),
        ExtentSource::File { object, identity } if !whole && end < identity.size => Err(invalid(
            format!("{object} can be cut at multiples of {BLOCK_SIZE} only, not at {end}"),
        )),
        ExtentSource::File { object, .. } => named(object, ObjectKind::File),
        ExtentSource::Image(digest) if !whole => {
            Err(invalid(format!("image {digest} has whole blocks only, not {len} bytes")))
        }
        ExtentSource::Image(_) => Ok(()),
    }
}
