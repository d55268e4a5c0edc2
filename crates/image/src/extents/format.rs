//! The bytes of an extent map: `docs/format.md`, "Extent map".

use burgeon_block::{ChecksumKind, Digest, ErrorKind, FileIdentity, ObjectId, Result};
use zerocopy::{
    FromBytes, FromZeros as _, Immutable, IntoBytes, KnownLayout, Unaligned,
    little_endian::{I64, U16, U32, U64},
};

use crate::{
    container::{Format, VERSION, check_words},
    corrupt,
};

use super::ExtentSource;

pub(super) const EXTENTS: Format = Format { magic: *b"BURGEXTS", what: "extent map" };
pub(super) const SOURCES: Format = Format { magic: *b"BURGSRCS", what: "source table" };

/// Alignment of entries in the source table, so that 32 bits address 64 GiB of them.
pub(super) const ENTRY_ALIGN: u64 = 16;
/// The source of a record that ends a mapping.
const END: u32 = u32::MAX;

/// The beginning of both files.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned, Clone, Copy)]
#[repr(C)]
pub(super) struct LogHeader {
    magic: [u8; 8],
    version: U32,
    unit: U32,
    compat: U64,
    ro_compat: U64,
    incompat: U64,
    /// Length of the area in bytes.
    size: U64,
    /// Random, the same in both files; part of every checksum.
    id: U64,
    /// xxHash64 of the fields before.
    checksum: U64,
}

pub(super) const HEADER_LEN: u64 = size_of::<LogHeader>() as u64;

impl LogHeader {
    pub(super) fn new(format: Format, unit: u64, size: u64, id: u64) -> Self {
        let mut header = Self {
            magic: format.magic,
            version: VERSION.into(),
            unit: (unit as u32).into(),
            compat: 0.into(),
            ro_compat: 0.into(),
            incompat: 0.into(),
            size: size.into(),
            id: id.into(),
            checksum: 0.into(),
        };
        header.checksum = header.sum().into();
        header
    }

    fn sum(&self) -> u64 {
        ChecksumKind::Xxhash64.of(&self.as_bytes()[..HEADER_LEN as usize - 8])
    }

    /// Returns the area's length and the files' id.
    pub(super) fn check(&self, format: Format, unit: u64, writing: bool) -> Result<(u64, u64)> {
        let what = format.what;
        check_words(format, self.magic, self.version.get(), self.incompat.get())?;
        if self.checksum.get() != self.sum() {
            return Err(corrupt(format!("the {what}'s header does not match its checksum")));
        }
        if writing && self.ro_compat.get() != 0 {
            let message = format!("the {what} uses features that this Burgeon cannot write");
            return Err(burgeon_block::Error::new(ErrorKind::UnsupportedFormat, message));
        }
        let size = self.size.get();
        if u64::from(self.unit.get()) != unit || super::check_size(size).is_err() {
            return Err(corrupt(format!("the {what}'s header is invalid")));
        }
        Ok((size, self.id.get()))
    }
}

/// An extent, or the end of a mapping. An extent ends where the next record begins.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned, Clone, Copy)]
#[repr(C)]
pub(super) struct MapRecord {
    /// First block, relative to the beginning of the area.
    start: U64,
    /// For an extent: its first byte in the source; for an end: position of the mapping's entry.
    offset: U64,
    /// Position of the source's entry, in units of [`ENTRY_ALIGN`].
    source: U32,
    checksum: U32,
}

pub(super) const RECORD_LEN: u64 = size_of::<MapRecord>() as u64;

impl MapRecord {
    /// Offset of `start` in a record.
    pub(super) const START_AT: usize = std::mem::offset_of!(Self, start);

    pub(super) fn extent(id: u64, index: u64, start: u64, offset: u64, entry_at: u64) -> Self {
        Self::new(id, index, start, offset, (entry_at / ENTRY_ALIGN) as u32)
    }

    pub(super) fn end(id: u64, index: u64, start: u64, mapping_at: u64) -> Self {
        Self::new(id, index, start, mapping_at, END)
    }

    fn new(id: u64, index: u64, start: u64, offset: u64, source: u32) -> Self {
        let mut record = Self {
            start: start.into(),
            offset: offset.into(),
            source: source.into(),
            checksum: 0.into(),
        };
        record.checksum = record.sum(id, index).into();
        record
    }

    /// Also covers the map's id and the index: a record is valid only at its own position.
    fn sum(&self, id: u64, index: u64) -> u32 {
        let mut covered = [0; 36];
        covered[..8].copy_from_slice(&id.to_le_bytes());
        covered[8..16].copy_from_slice(&index.to_le_bytes());
        covered[16..].copy_from_slice(&self.as_bytes()[..20]);
        ChecksumKind::Crc32c.of(&covered) as u32
    }

    pub(super) fn is_sound(&self, id: u64, index: u64) -> bool {
        self.checksum.get() == self.sum(id, index)
    }

    pub(super) fn is_end(&self) -> bool {
        self.source.get() == END
    }

    pub(super) fn start(&self) -> u64 {
        self.start.get()
    }

    pub(super) fn offset(&self) -> u64 {
        self.offset.get()
    }

    pub(super) fn entry_at(&self) -> u64 {
        u64::from(self.source.get()) * ENTRY_ALIGN
    }
}

/// Kinds of entries of the source table.
const COMPUTED: u8 = 1;
const FILE: u8 = 2;
const IMAGE: u8 = 3;
const MAPPING: u8 = 4;

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned, Clone, Copy)]
#[repr(C)]
struct RawEntry {
    kind: u8,
    reserved: u8,
    name_len: U16,
    /// CRC-32C of the map's id, the entry's position, and the entry with this field zero.
    checksum: U32,
    words: [U64; 7],
}

const ENTRY_LEN: usize = size_of::<RawEntry>();

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned, Clone, Copy)]
#[repr(C)]
struct FileWords {
    /// Position of the checksums of its blocks in the checksum file.
    first_checksum: U64,
    size: U64,
    inode: U64,
    mtime_ns: I64,
    ctime_ns: I64,
    reserved: [U64; 2],
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned, Clone, Copy)]
#[repr(C)]
struct MappingWords {
    first_block: U64,
    blocks: U64,
    extents: U64,
    /// Bytes of content, without padding of blocks.
    len: U64,
    /// Position of the previous mapping's entry, or 0.
    previous: U64,
    /// Number of checksums allocated up to and including this mapping.
    checksums_end: U64,
    origin_len: U64,
}

/// The contents of a mapping's entry.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct MappingEntry {
    pub(super) first_block: u64,
    pub(super) blocks: u64,
    pub(super) extents: u64,
    pub(super) len: u64,
    pub(super) previous: u64,
    pub(super) checksums_end: u64,
    pub(super) label: String,
    pub(super) origin: String,
}

/// A parsed entry.
pub(super) enum Parsed {
    Source(ExtentSource, u64),
    Mapping(MappingEntry),
}

/// Longest label or origin of an entry.
pub(super) const LABEL_MAX: usize = 4096;

/// Appends the entry of `source` to `out`, whose end is at position `at` of the table.
pub(super) fn push_source(
    out: &mut Vec<u8>,
    id: u64,
    at: u64,
    source: &ExtentSource,
    checksum: u64,
) {
    match source {
        ExtentSource::Computed(object) => {
            push(out, id, at, COMPUTED, &[0; 56], object.as_str(), "")
        }
        ExtentSource::Image(digest) => push(out, id, at, IMAGE, &[0; 56], &digest.to_string(), ""),
        ExtentSource::File { object, identity } => {
            let words = FileWords {
                first_checksum: checksum.into(),
                size: identity.size.into(),
                inode: identity.inode.into(),
                mtime_ns: identity.mtime_ns.into(),
                ctime_ns: identity.ctime_ns.into(),
                reserved: [0.into(); 2],
            };
            push(out, id, at, FILE, words.as_bytes(), object.as_str(), "");
        }
    }
}

/// The same for a mapping.
pub(super) fn push_mapping(out: &mut Vec<u8>, id: u64, at: u64, mapping: &MappingEntry) {
    let words = MappingWords {
        first_block: mapping.first_block.into(),
        blocks: mapping.blocks.into(),
        extents: mapping.extents.into(),
        len: mapping.len.into(),
        previous: mapping.previous.into(),
        checksums_end: mapping.checksums_end.into(),
        origin_len: (mapping.origin.len() as u64).into(),
    };
    push(out, id, at, MAPPING, words.as_bytes(), &mapping.label, &mapping.origin);
}

fn push(out: &mut Vec<u8>, id: u64, at: u64, kind: u8, words: &[u8], name: &str, origin: &str) {
    let mut entry = RawEntry::new_zeroed();
    entry.kind = kind;
    entry.name_len = (name.len() as u16).into();
    entry.words.as_mut_bytes().copy_from_slice(words);
    let begin = out.len();
    out.extend_from_slice(entry.as_bytes());
    out.extend_from_slice(name.as_bytes());
    out.extend_from_slice(origin.as_bytes());
    out.resize(begin + (out.len() - begin).next_multiple_of(ENTRY_ALIGN as usize), 0);
    let sum = entry_sum(id, at, &out[begin..]);
    out[begin + 4..begin + 8].copy_from_slice(&sum.to_le_bytes());
}

fn entry_sum(id: u64, at: u64, bytes: &[u8]) -> u32 {
    let mut covered = Vec::with_capacity(16 + bytes.len());
    covered.extend_from_slice(&id.to_le_bytes());
    covered.extend_from_slice(&at.to_le_bytes());
    covered.extend_from_slice(bytes);
    covered[20..24].fill(0);
    ChecksumKind::Crc32c.of(&covered) as u32
}

/// Parses the entry at position `at` of the table `bytes`; also returns its length.
pub(super) fn parse_entry(bytes: &[u8], id: u64, at: u64) -> Result<(Parsed, u64)> {
    let bad = || corrupt(format!("the entry at {at} of the source table is damaged"));
    let rest = usize::try_from(at).ok().and_then(|at| bytes.get(at..)).ok_or_else(bad)?;
    let (entry, _) = RawEntry::ref_from_prefix(rest).map_err(|_| bad())?;
    let mapping = MappingWords::read_from_bytes(entry.words.as_bytes()).map_err(|_| bad())?;
    let origin_len = match entry.kind {
        MAPPING if mapping.origin_len.get() <= LABEL_MAX as u64 => {
            mapping.origin_len.get() as usize
        }
        MAPPING => return Err(bad()),
        _ => 0,
    };
    let name_len = usize::from(entry.name_len.get());
    let len = (ENTRY_LEN + name_len + origin_len).next_multiple_of(ENTRY_ALIGN as usize);
    let whole = rest.get(..len).ok_or_else(bad)?;
    if entry.checksum.get() != entry_sum(id, at, whole) {
        return Err(bad());
    }
    let text = |start: usize, len: usize| {
        std::str::from_utf8(&whole[start..start + len]).map_err(|_| bad())
    };
    let name = text(ENTRY_LEN, name_len)?;
    let parsed = match entry.kind {
        COMPUTED => Parsed::Source(ExtentSource::Computed(ObjectId::new(name)?), 0),
        IMAGE => Parsed::Source(ExtentSource::Image(name.parse::<Digest>().map_err(|_| bad())?), 0),
        FILE => {
            let words = FileWords::read_from_bytes(entry.words.as_bytes()).map_err(|_| bad())?;
            let identity = FileIdentity {
                inode: words.inode.get(),
                size: words.size.get(),
                mtime_ns: words.mtime_ns.get(),
                ctime_ns: words.ctime_ns.get(),
            };
            let source = ExtentSource::File { object: ObjectId::new(name)?, identity };
            Parsed::Source(source, words.first_checksum.get())
        }
        MAPPING => Parsed::Mapping(MappingEntry {
            first_block: mapping.first_block.get(),
            blocks: mapping.blocks.get(),
            extents: mapping.extents.get(),
            len: mapping.len.get(),
            previous: mapping.previous.get(),
            checksums_end: mapping.checksums_end.get(),
            label: name.to_owned(),
            origin: text(ENTRY_LEN + name_len, origin_len)?.to_owned(),
        }),
        _ => return Err(bad()),
    };
    Ok((parsed, len as u64))
}
