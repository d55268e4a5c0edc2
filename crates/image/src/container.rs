//! Files of sections: the container format of manifests and maps.
//!
//! ```text
//!   Header 64 │ SectionEntry 48 × n │ section │ section │ …            all numbers little-endian
//!   a section:  as it is, or frames:  stored length u32 × frames │ zstd frame │ zstd frame │ …
//!               each frame holds FRAME_LEN raw bytes, the last one the rest
//! ```
//!
//! Invariants: one checksum covers header and section table, and each section's stored bytes have
//! their own; nothing is allocated for a section before its declared length has passed the limit.
//! Frames are compressed and decompressed in parallel; their bounds do not depend on the number
//! of threads, so the same sections give the same bytes.

use burgeon_block::{ByteRange, ChecksumKind, Error, ErrorKind, Result};
use rayon::prelude::*;
use zerocopy::{
    FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned,
    little_endian::{U32, U64},
};

use crate::corrupt;

/// Raw bytes in a frame of a compressed section: 1 MiB.
pub(crate) const FRAME_LEN: usize = 1 << 20;
/// Sections in a file at most; a file with more is refused.
const SECTIONS_MAX: u32 = 256;
/// The version this code writes and reads.
pub(crate) const VERSION: u32 = 1;

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned, Clone, Copy)]
#[repr(C)]
pub(crate) struct Header {
    magic: [u8; 8],
    version: U32,
    sections: U32,
    compat: U64,
    ro_compat: U64,
    incompat: U64,
    len: U64,
    reserved: U64,
    /// xxHash64 of header and section table, with this field zero.
    checksum: U64,
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned, Clone, Copy)]
#[repr(C)]
struct SectionEntry {
    kind: U32,
    encoding: U32,
    offset: U64,
    stored_len: U64,
    raw_len: U64,
    /// xxHash64 of the stored bytes.
    checksum: U64,
    reserved: U64,
}

const HEADER_LEN: usize = size_of::<Header>();
const ENTRY_LEN: usize = size_of::<SectionEntry>();
const ENCODING_RAW: u32 = 0;
const ENCODING_ZSTD: u32 = 1;

/// The magic of a kind of file, and its name in messages.
#[derive(Clone, Copy)]
pub(crate) struct Format {
    pub(crate) magic: [u8; 8],
    pub(crate) what: &'static str,
}

/// A section to be written.
pub(crate) struct Section {
    pub(crate) kind: u32,
    pub(crate) raw: Vec<u8>,
    /// zstd level, or `None` to store the bytes as they are.
    pub(crate) level: Option<i32>,
}

/// The bytes of a file of `sections`.
pub(crate) fn encode(format: Format, sections: Vec<Section>) -> Result<Vec<u8>> {
    let mut entries = Vec::with_capacity(sections.len());
    let mut offset = (HEADER_LEN + ENTRY_LEN * sections.len()) as u64;
    let mut bodies = Vec::with_capacity(sections.len());
    for section in sections {
        let raw_len = section.raw.len() as u64;
        let (encoding, stored) = match section.level {
            Some(level) => (ENCODING_ZSTD, compress(&section.raw, level)?),
            None => (ENCODING_RAW, section.raw),
        };
        entries.push(SectionEntry {
            kind: section.kind.into(),
            encoding: encoding.into(),
            offset: offset.into(),
            stored_len: (stored.len() as u64).into(),
            raw_len: raw_len.into(),
            checksum: ChecksumKind::Xxhash64.of(&stored).into(),
            reserved: 0.into(),
        });
        offset += stored.len() as u64;
        bodies.push(stored);
    }
    let mut bytes = Vec::with_capacity(offset as usize);
    bytes.extend_from_slice(header(format, entries.len() as u32, offset).as_bytes());
    bytes.extend_from_slice(entries.as_bytes());
    let checksum = ChecksumKind::Xxhash64.of(&bytes);
    bytes[HEADER_LEN - 8..HEADER_LEN].copy_from_slice(&checksum.to_le_bytes());
    bodies.iter().for_each(|body| bytes.extend_from_slice(body));
    Ok(bytes)
}

fn header(format: Format, sections: u32, len: u64) -> Header {
    Header {
        magic: format.magic,
        version: VERSION.into(),
        sections: sections.into(),
        compat: 0.into(),
        ro_compat: 0.into(),
        incompat: 0.into(),
        len: len.into(),
        reserved: 0.into(),
        checksum: 0.into(),
    }
}

fn compress(raw: &[u8], level: i32) -> Result<Vec<u8>> {
    let frames = raw
        .par_chunks(FRAME_LEN)
        .map_init(
            || zstd::bulk::Compressor::new(level),
            |compressor, frame| match compressor {
                Ok(compressor) => compressor.compress(frame),
                Err(error) => Err(std::io::Error::new(error.kind(), error.to_string())),
            },
        )
        .collect::<std::io::Result<Vec<_>>>()
        .map_err(|error| Error::io("cannot compress", error))?;
    let mut stored = Vec::with_capacity(frames.iter().map(|frame| frame.len() + 4).sum());
    frames.iter().for_each(|frame| stored.extend_from_slice(&(frame.len() as u32).to_le_bytes()));
    frames.iter().for_each(|frame| stored.extend_from_slice(frame));
    Ok(stored)
}

/// Checks the words at the beginning of every format; unknown versions and features are refused.
pub(crate) fn check_words(
    format: Format,
    magic: [u8; 8],
    version: u32,
    incompat: u64,
) -> Result<()> {
    let what = format.what;
    if magic != format.magic {
        return Err(corrupt(format!("this is no {what}: it begins with {magic:02x?}")));
    }
    if version != VERSION {
        return Err(Error::new(
            ErrorKind::UnsupportedFormat,
            format!(
                "the {what} has format version {version}; this Burgeon reads {VERSION}: use a newer one"
            ),
        ));
    }
    if incompat != 0 {
        return Err(Error::new(
            ErrorKind::UnsupportedFormat,
            format!(
                "the {what} needs features {incompat:#x}, unknown to this Burgeon: use a newer one"
            ),
        ));
    }
    Ok(())
}

/// A file of sections whose header and section table were checked.
pub(crate) struct Container {
    format: Format,
    checksum: u64,
    entries: Vec<SectionEntry>,
}

impl Container {
    /// Checks `bytes`, the whole file. The sections' contents are checked when they are read.
    pub(crate) fn parse(format: Format, bytes: &[u8]) -> Result<Self> {
        let what = format.what;
        let truncated = || corrupt(format!("the {what} is truncated: {} bytes", bytes.len()));
        let (header, rest) = Header::read_from_prefix(bytes).map_err(|_| truncated())?;
        check_words(format, header.magic, header.version.get(), header.incompat.get())?;
        if header.sections.get() > SECTIONS_MAX {
            return Err(corrupt(format!("the {what} declares {} sections", header.sections)));
        }
        let table_len = header.sections.get() as usize * ENTRY_LEN;
        let table = rest.get(..table_len).ok_or_else(truncated)?;
        let mut covered = bytes[..HEADER_LEN + table_len].to_vec();
        covered[HEADER_LEN - 8..HEADER_LEN].fill(0);
        if ChecksumKind::Xxhash64.of(&covered) != header.checksum.get() {
            return Err(corrupt(format!("the {what}'s header does not match its checksum")));
        }
        match header.len.get() {
            len if len > bytes.len() as u64 => return Err(truncated()),
            len if len < bytes.len() as u64 => {
                return Err(corrupt(format!("the {what} has bytes beyond its end")));
            }
            _ => {}
        }
        let entries: Vec<_> = table
            .chunks_exact(ENTRY_LEN)
            .filter_map(|entry| SectionEntry::read_from_bytes(entry).ok())
            .collect();
        for (index, entry) in entries.iter().enumerate() {
            let range = ByteRange::at(entry.offset.get(), entry.stored_len.get());
            let inside = range.is_some_and(|range| {
                range.start() >= (HEADER_LEN + table_len) as u64 && range.end() <= header.len.get()
            });
            let again = entries[..index].iter().any(|other| other.kind == entry.kind);
            if !inside || again {
                return Err(corrupt(format!("section {} of the {what} is impossible", entry.kind)));
            }
        }
        Ok(Self { format, checksum: header.checksum.get(), entries })
    }

    /// The checksum of header and section table, which also covers the checksums of all sections.
    pub(crate) fn checksum(&self) -> u64 {
        self.checksum
    }

    fn entry(&self, kind: u32) -> Result<&SectionEntry> {
        let found = self.entries.iter().find(|entry| entry.kind.get() == kind);
        found.ok_or_else(|| corrupt(format!("the {} lacks section {kind}", self.format.what)))
    }

    /// Raw length of section `kind`, as declared.
    pub(crate) fn raw_len(&self, kind: u32) -> Result<u64> {
        Ok(self.entry(kind)?.raw_len.get())
    }

    /// Range of the uncompressed section `kind` in the file. Its checksum is not checked.
    pub(crate) fn raw_range(&self, kind: u32) -> Result<ByteRange> {
        let entry = self.entry(kind)?;
        let range = ByteRange::at(entry.offset.get(), entry.stored_len.get());
        match range {
            Some(range)
                if entry.encoding.get() == ENCODING_RAW
                    && entry.raw_len.get() == entry.stored_len.get() =>
            {
                Ok(range)
            }
            _ => Err(corrupt(format!(
                "section {kind} of the {} is compressed, or its range is invalid",
                self.format.what
            ))),
        }
    }

    /// Checks the stored bytes of section `kind` against their checksum.
    pub(crate) fn verify(&self, bytes: &[u8], kind: u32) -> Result<()> {
        self.stored(bytes, self.entry(kind)?).map(drop)
    }

    fn stored<'a>(&self, bytes: &'a [u8], entry: &SectionEntry) -> Result<&'a [u8]> {
        let (start, len) = (entry.offset.get() as usize, entry.stored_len.get() as usize);
        let stored = bytes.get(start..start.saturating_add(len));
        match stored {
            Some(stored) if ChecksumKind::Xxhash64.of(stored) == entry.checksum.get() => Ok(stored),
            _ => Err(corrupt(format!(
                "section {} of the {} does not match its checksum",
                entry.kind, self.format.what
            ))),
        }
    }

    /// The raw bytes of section `kind`, which must have length `raw_len`.
    pub(crate) fn read(&self, bytes: &[u8], kind: u32, raw_len: u64) -> Result<Vec<u8>> {
        let entry = self.entry(kind)?;
        let bad = |why: &str| corrupt(format!("section {kind} of the {} {why}", self.format.what));
        if entry.raw_len.get() != raw_len {
            return Err(bad("has a length that does not fit the rest"));
        }
        let stored = self.stored(bytes, entry)?;
        match entry.encoding.get() {
            ENCODING_RAW if stored.len() as u64 == raw_len => Ok(stored.to_vec()),
            ENCODING_RAW => Err(bad("has two lengths")),
            ENCODING_ZSTD => {
                decompress(stored, raw_len).ok_or_else(|| bad("does not decompress as declared"))
            }
            other => Err(Error::new(
                ErrorKind::UnsupportedFormat,
                format!("section {kind} of the {} has encoding {other}", self.format.what),
            )),
        }
    }
}

fn decompress(stored: &[u8], raw_len: u64) -> Option<Vec<u8>> {
    let frames = usize::try_from(raw_len.div_ceil(FRAME_LEN as u64)).ok()?;
    let (table, mut rest) = stored.split_at_checked(frames.checked_mul(4)?)?;
    let mut parts = Vec::with_capacity(frames);
    for len in table.chunks_exact(4) {
        let len = u32::from_le_bytes(len.try_into().ok()?);
        let (part, after) = rest.split_at_checked(len as usize)?;
        parts.push(part);
        rest = after;
    }
    if !rest.is_empty() {
        return None;
    }
    let mut raw = vec![0; usize::try_from(raw_len).ok()?];
    let fits = raw.par_chunks_mut(FRAME_LEN).zip(parts).all(|(raw, part)| {
        zstd::bulk::decompress_to_buffer(part, raw).is_ok_and(|len| len == raw.len())
    });
    fits.then_some(raw)
}

#[cfg(test)]
mod tests {
    use super::*;

    const FORMAT: Format = Format { magic: *b"TESTFILE", what: "test file" };

    fn sample() -> Vec<u8> {
        let big: Vec<u8> = (0..3 * FRAME_LEN + 5).map(|n| (n / 7) as u8).collect();
        let sections = vec![
            Section { kind: 1, raw: b"raw".to_vec(), level: None },
            Section { kind: 2, raw: big, level: Some(1) },
            Section { kind: 3, raw: Vec::new(), level: Some(1) },
        ];
        encode(FORMAT, sections).unwrap()
    }

    #[test]
    fn sections_round_trip() {
        let bytes = sample();
        let container = Container::parse(FORMAT, &bytes).unwrap();
        assert_eq!(container.read(&bytes, 1, 3).unwrap(), b"raw");
        let raw = container.read(&bytes, 2, (3 * FRAME_LEN + 5) as u64).unwrap();
        assert!(raw.iter().enumerate().all(|(n, byte)| *byte == (n / 7) as u8));
        assert_eq!(container.read(&bytes, 3, 0).unwrap(), b"");
        assert!(container.read(&bytes, 4, 0).is_err());
        assert!(container.read(&bytes, 2, 5).is_err());
    }

    #[test]
    fn every_flipped_byte_and_truncation_is_found() {
        let bytes = sample();
        let whole = |bytes: &[u8]| -> Result<()> {
            let container = Container::parse(FORMAT, bytes)?;
            (1..=3).try_for_each(|kind| container.verify(bytes, kind))
        };
        whole(&bytes).unwrap();
        for at in (0..bytes.len()).step_by(if bytes.len() > 4096 { 7 } else { 1 }) {
            let mut bad = bytes.clone();
            bad[at] ^= 0x10;
            assert!(whole(&bad).is_err(), "byte {at}");
            assert!(whole(&bytes[..at]).is_err(), "cut at {at}");
        }
    }

    #[test]
    fn unknown_versions_and_features_are_unsupported() {
        for (at, value) in [(8, 2), (32, 1)] {
            let mut bytes = sample();
            bytes[at] = value;
            let error = Container::parse(FORMAT, &bytes).err().unwrap();
            assert_eq!(error.kind(), ErrorKind::UnsupportedFormat, "{error}");
        }
    }

    #[test]
    fn an_oversized_frame_is_refused() {
        let bomb = zstd::bulk::compress(&vec![0; 64 << 20], 1).unwrap();
        let mut stored = (bomb.len() as u32).to_le_bytes().to_vec();
        stored.extend(&bomb);
        assert_eq!(decompress(&stored, 100), None);
        assert_eq!(decompress(&stored, FRAME_LEN as u64), None);
    }
}
