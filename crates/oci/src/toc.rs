//! Tables of contents (TOC) that publishers put into layers, so that these need not be read first.
//!
//! ```text
//!   image's manifest ─► annotations of a layer: digest of its TOC ─► the layer's end ─► TOC
//!   TOC ─┬─ files, their attributes                          ─► Listed
//!          └─ parts of files: stored offset, SHA-256           ─► pieces of the layer
//!
//!   eStargz         a gzip member with stargz.index.json; its offset is in the footer   tar+gzip
//!   zstd:chunked    a skippable frame; its offset is in annotations                     tar+zstd
//! ```
//!
//! Invariants: a TOC is trusted only by its digest in the image's manifest, which is itself
//! trusted by digest; an invalid TOC is not used, and its layer is read like one without.
//! Formats: `docs/estargz.md` of stargz-snapshotter; `containers-storage-zstd-chunked(5)`.

use std::{fmt, io::Read};

use base64::{Engine, engine::general_purpose::STANDARD};
use burgeon_block::{ByteRange, Error, ErrorKind, MemoryMeter, Result};
use burgeon_image::builder::{FilePart, Listed, Xattrs};
use burgeon_layer::{LayerCodec, Piece, Restarts};
use burgeon_source::registry::OciDigest;
use chrono::DateTime;
use serde::{
    Deserialize, Deserializer,
    de::{DeserializeSeed, Error as _, IgnoredAny, MapAccess, SeqAccess, Visitor},
};

use crate::{
    blobs::Blobs,
    document::{Layer, TocPlace},
};

/// Longest compressed TOC: 64 MiB.
const STORED_MAX: u64 = 64 << 20;
/// Longest TOC: 128 MiB, half a million files in parts. (The TOC of an eStargz layer is itself
/// a piece, so at most 32 MiB.)
const TOC_MAX: u64 = 128 << 20;
/// Most entries of a TOC; the limit for all layers of an image together is the same.
const ENTRIES_MAX: usize = 4 << 20;
/// Most attributes of one file. Linux limits the list of their names to 64 KiB.
const ATTRIBUTES_MAX: usize = 10_000;
/// Memory that an entry, and an attribute, takes besides its strings until the layer is listed.
const ENTRY_COST: u64 = 480;
const ATTRIBUTE_COST: usize = 64;
/// Length of the footer of an eStargz layer, which holds the offset of the TOC.
const FOOTER_LEN: u64 = 51;
/// Name of the file in an eStargz layer that holds the TOC.
const STARGZ_TOC: &str = "stargz.index.json";
const TAR_BLOCK: usize = 512;

/// The contents of a layer, from its TOC.
pub(crate) struct Toc {
    /// In the archive's order.
    pub(crate) files: Vec<Listed>,
    pub(crate) restarts: Restarts,
}

/// A compressed TOC.
pub(crate) struct CompressedToc {
    bytes: Vec<u8>,
    /// Its range in the layer.
    at: ByteRange,
}

impl CompressedToc {
    pub(crate) fn new(bytes: Vec<u8>, at: ByteRange) -> Self {
        Self { bytes, at }
    }

    /// Its length in bytes.
    pub(crate) fn len(&self) -> u64 {
        self.bytes.len() as u64
    }
}

/// Fetches the TOC of a layer from its location.
///
/// Errors: if the TOC cannot be fetched.
pub(crate) fn fetch(blobs: &Blobs, layer: &Layer, place: &TocPlace) -> Result<CompressedToc> {
    let at = match place {
        TocPlace::Stargz { .. } => return stargz(blobs, layer),
        TocPlace::Chunked { stored, .. } => *stored,
    };
    if at.len() > STORED_MAX || at.end() > layer.size {
        return Err(unusable("it is too long, or beyond the layer's end"));
    }
    let mut bytes = vec![0; at.len() as usize];
    let mut blob = blobs.blob_from(&layer.digest, at.start())?;
    blob.read_exact(&mut bytes).map_err(cannot_read)?;
    Ok(CompressedToc { bytes, at })
}

/// Decompresses, checks and parses the fetched TOC of a layer.
///
/// Errors: if the TOC is invalid, or takes more memory than its stored length and its entries
/// account for.
pub(crate) fn read(layer: &Layer, place: &TocPlace, stored: &CompressedToc) -> Result<Toc> {
    let CompressedToc { bytes, at } = stored;
    let meter = MemoryMeter::of_input(stored.len());
    let json = match place {
        TocPlace::Stargz { digest } => {
            let json = in_archive(bytes, &meter)?;
            check(&json, digest)?;
            json
        }
        TocPlace::Chunked { digest, len, .. } => {
            check(bytes, digest)?;
            if *len > TOC_MAX {
                return Err(unusable("it is too long"));
            }
            count_json(&meter, *len)?;
            let mut json = Vec::new();
            let decoder = zstd::stream::read::Decoder::new(&bytes[..]).map_err(cannot_read)?;
            decoder.take(*len).read_to_end(&mut json).map_err(cannot_read)?;
            json
        }
    };
    let mut toc = ParsedToc::of(&json, &meter)?;
    toc.check_covered()?;
    if let TocPlace::Stargz { digest } = place {
        // The TOC is the last file of the archive.
        let (path, size) = (STARGZ_TOC.into(), json.len() as u64);
        toc.files.push(Listed { path, kind: b'0', size, ..Listed::default() });
        let (file, part) = (toc.files.len() - 1, (at.start(), TAR_BLOCK as u64));
        toc.chunks.push(TocChunk { file, at: 0, len: size, part, digest: digest.bytes() });
        toc.ends.push(at.end());
    }
    toc.ends.push(at.start());
    toc.finish(layer.compression.codec(), layer.size)
}

fn check(bytes: &[u8], digest: &OciDigest) -> Result<()> {
    if OciDigest::of(bytes) == *digest {
        return Ok(());
    }
    Err(unusable("it does not match the digest that the image gives: forged, or damaged"))
}

pub(crate) fn unusable(why: &str) -> Error {
    Error::new(ErrorKind::Corrupt, why)
}

fn cannot_read(error: std::io::Error) -> Error {
    Error::with_source(ErrorKind::Corrupt, "it cannot be read", error)
}

/// Fetches the TOC of an eStargz layer: a gzip member with a file of the archive.
fn stargz(blobs: &Blobs, layer: &Layer) -> Result<CompressedToc> {
    // Most TOCs are shorter, so that one request fetches the TOC and the footer.
    let guess = (layer.size / 256).clamp(64 << 10, 2 << 20).min(layer.size);
    let tail_start = layer.size - guess;
    let mut tail = vec![0; guess as usize];
    blobs.blob_from(&layer.digest, tail_start)?.read_exact(&mut tail).map_err(cannot_read)?;
    let footer = tail.len().checked_sub(FOOTER_LEN as usize).map(|start| &tail[start..]);
    let start = footer.and_then(toc_start);
    let at = start.and_then(|start| ByteRange::new(start, layer.size - FOOTER_LEN));
    let at = at.ok_or_else(|| unusable("its end is not that of an eStargz layer"))?;
    if at.len() > STORED_MAX {
        return Err(unusable("it is too long"));
    }
    let bytes = if at.start() >= tail_start {
        tail.split_off((at.start() - tail_start) as usize)
    } else {
        let mut bytes = vec![0; at.len() as usize];
        blobs.blob_from(&layer.digest, at.start())?.read_exact(&mut bytes).map_err(cannot_read)?;
        bytes
    };
    Ok(CompressedToc { bytes, at })
}

/// Accounts for the text of a TOC before it is decompressed.
fn count_json(meter: &MemoryMeter, len: u64) -> Result<()> {
    meter.promise(len);
    meter.take(len)
}

/// Unpacks the TOC from a member with a file of the archive.
fn in_archive(member: &[u8], meter: &MemoryMeter) -> Result<Vec<u8>> {
    let mut unpacked = flate2::read::GzDecoder::new(member);
    let mut header = [0; TAR_BLOCK];
    unpacked.read_exact(&mut header).map_err(cannot_read)?;
    let len = std::str::from_utf8(&header[124..135]).ok();
    let len = len.and_then(|len| u64::from_str_radix(len, 8).ok()).filter(|len| *len <= TOC_MAX);
    let named = header.starts_with(STARGZ_TOC.as_bytes()) && header[STARGZ_TOC.len()] == 0;
    let len = len
        .filter(|_| named)
        .ok_or_else(|| unusable("it is not at the offset that the layer states"))?;
    count_json(meter, len)?;
    let mut json = Vec::new();
    unpacked.take(len).read_to_end(&mut json).map_err(cannot_read)?;
    Ok(json)
}

/// The TOC's offset from the footer, which is an empty gzip member with an extra field.
fn toc_start(footer: &[u8]) -> Option<u64> {
    let (head, rest) = footer.split_at_checked(16)?;
    let (offset, rest) = rest.split_at_checked(16)?;
    let right =
        head[..4] == [0x1f, 0x8b, 8, 4] && head[12..14] == *b"SG" && rest.starts_with(b"STARGZ");
    let offset = std::str::from_utf8(offset).ok().filter(|_| right)?;
    u64::from_str_radix(offset, 16).ok()
}

/// An entry of the TOC: a file, or a further part of the previous file.
#[derive(Deserialize, Default)]
#[serde(rename_all = "camelCase", default)]
struct TocEntry {
    #[serde(rename = "type")]
    kind: String,
    name: String,
    link_name: String,
    mode: u32,
    uid: u32,
    gid: u32,
    size: u64,
    modtime: Option<String>,
    dev_major: u32,
    dev_minor: u32,
    xattrs: Option<Attributes>,
    digest: String,
    offset: u64,
    end_offset: u64,
    inner_offset: u64,
    chunk_size: u64,
    chunk_offset: u64,
    chunk_digest: String,
    chunk_type: String,
}

/// Names and values of at most `ATTRIBUTES_MAX` attributes.
#[derive(Default)]
struct Attributes(Vec<(String, String)>);

impl<'de> Deserialize<'de> for Attributes {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(AttributesVisitor)
    }
}

struct AttributesVisitor;

impl<'de> Visitor<'de> for AttributesVisitor {
    type Value = Attributes;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("attributes")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Attributes, A::Error> {
        let mut all = Vec::new();
        while let Some(pair) = map.next_entry()? {
            if all.len() == ATTRIBUTES_MAX {
                let what = format!("a file has more than {ATTRIBUTES_MAX} attributes");
                return Err(A::Error::custom(what));
            }
            all.push(pair);
        }
        Ok(Attributes(all))
    }
}

/// A part of a file that is stored as one piece.
struct TocChunk {
    file: usize,
    at: u64,
    len: u64,
    /// Offset of its member or frame, and the number of unpacked bytes there before it.
    part: (u64, u64),
    digest: [u8; 32],
}

#[derive(Default)]
struct ParsedToc {
    files: Vec<Listed>,
    chunks: Vec<TocChunk>,
    /// Offsets in the layer at which pieces may end.
    ends: Vec<u64>,
    /// Bytes of the last file listed so far, zeros included.
    covered: u64,
}

/// Parses a TOC entry by entry: parsed as a whole it could take many times its length.
#[derive(Clone, Copy)]
struct TocReader<'a>(&'a MemoryMeter);

impl<'de> Visitor<'de> for TocReader<'_> {
    /// The version, and the parsed entries or the error of the first invalid one.
    type Value = (Option<u32>, Option<Result<ParsedToc>>);

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a table")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let (mut version, mut entries) = (None, None);
        while let Some(key) = map.next_key::<String>()? {
            match key.as_str() {
                "version" if version.is_none() => version = Some(map.next_value()?),
                "entries" if entries.is_none() => {
                    entries = Some(map.next_value_seed(EntriesReader(self.0))?);
                }
                "version" | "entries" => {
                    return Err(A::Error::custom("it has its version or its entries twice"));
                }
                _ => drop(map.next_value::<IgnoredAny>()?),
            }
        }
        Ok((version, entries))
    }
}

struct EntriesReader<'a>(&'a MemoryMeter);

impl<'de> DeserializeSeed<'de> for EntriesReader<'_> {
    type Value = Result<ParsedToc>;

    fn deserialize<D: Deserializer<'de>>(self, from: D) -> Result<Self::Value, D::Error> {
        from.deserialize_seq(self)
    }
}

impl<'de> Visitor<'de> for EntriesReader<'_> {
    type Value = Result<ParsedToc>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("entries")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut entries: A) -> Result<Self::Value, A::Error> {
        let (mut parsed, mut count) = (Ok(ParsedToc::default()), 0);
        while let Some(entry) = entries.next_element::<TocEntry>()? {
            count += 1;
            parsed = parsed.and_then(|parsed| {
                if count > ENTRIES_MAX {
                    return Err(unusable("it has too many entries"));
                }
                entry.count(self.0)?;
                parsed.and(&entry)
            });
        }
        Ok(parsed)
    }
}

impl TocEntry {
    /// Accounts for the memory of the entry.
    fn count(&self, meter: &MemoryMeter) -> Result<()> {
        let attributes = self.xattrs.iter().flat_map(|all| &all.0);
        let attributes: usize =
            attributes.map(|(name, value)| name.len() + value.len() + ATTRIBUTE_COST).sum();
        let names = (self.name.len() + self.link_name.len() + attributes) as u64;
        meter.entries(1, names);
        meter.take(ENTRY_COST + names)
    }
}

impl ParsedToc {
    fn of(json: &[u8], meter: &MemoryMeter) -> Result<Self> {
        let mut json = serde_json::Deserializer::from_slice(json);
        let toc = json.deserialize_map(TocReader(meter));
        let (version, entries) = toc.and_then(|toc| json.end().map(|()| toc)).map_err(|error| {
            Error::with_source(ErrorKind::Corrupt, "it cannot be parsed", error)
        })?;
        match (version, entries) {
            (Some(1), Some(entries)) => entries,
            (Some(_), Some(_)) => Err(unusable("it is of an unknown version")),
            _ => Err(unusable("it has no version or no entries")),
        }
    }

    /// Adds an entry.
    fn and(mut self, entry: &TocEntry) -> Result<Self> {
        let texts = [&entry.name, &entry.link_name];
        let attributes = entry.xattrs.iter().flat_map(|all| &all.0).map(|(name, _)| name);
        let mut texts = texts.into_iter().chain(attributes);
        if texts.any(|text| text.contains(char::REPLACEMENT_CHARACTER)) {
            return Err(unusable(
                "a name in it is not UTF-8, so it differs from the name in the archive",
            ));
        }
        if entry.kind != "chunk" {
            self.check_covered()?;
            self.files.push(listed(entry)?);
        }
        let is_chunk = matches!(entry.kind.as_str(), "reg" | "chunk");
        let file = self.files.last();
        let file = file.filter(|file| file.kind == b'0' && *file.path == *entry.name.as_bytes());
        match file.map(|file| file.size) {
            Some(size) if is_chunk && size > 0 => self.chunk(entry, size)?,
            None if is_chunk => return Err(unusable("it has a chunk that belongs to no file")),
            _ => {}
        }
        Ok(self)
    }

    /// Checks that the parts of the last file cover it.
    fn check_covered(&mut self) -> Result<()> {
        let covered = std::mem::take(&mut self.covered);
        match self.files.last() {
            Some(file) if file.size != covered => {
                let (path, size) = (String::from_utf8_lossy(&file.path), file.size);
                Err(unusable(&format!("it lists {covered} bytes of {path:?}, which has {size}")))
            }
            _ => Ok(()),
        }
    }

    /// Adds a part of the last file, which has `size` bytes.
    fn chunk(&mut self, entry: &TocEntry, size: u64) -> Result<()> {
        self.ends.extend([entry.offset, entry.end_offset]);
        let at = entry.chunk_offset;
        let rest = size.checked_sub(at).filter(|_| at == self.covered);
        let rest = rest.ok_or_else(|| unusable("the chunks of a file in it are out of order"))?;
        let len = if entry.chunk_size == 0 { rest } else { entry.chunk_size };
        self.covered = at.saturating_add(len);
        if entry.chunk_type == "zeros" {
            return Ok(());
        }
        let digest = match entry.chunk_digest.as_str() {
            "" if len == size => &entry.digest,
            digest => digest,
        };
        self.chunks.push(TocChunk {
            file: self.files.len() - 1,
            at,
            len,
            part: (entry.offset, entry.inner_offset),
            digest: digest.parse::<OciDigest>()?.bytes(),
        });
        Ok(())
    }

    fn finish(mut self, codec: LayerCodec, layer_len: u64) -> Result<Toc> {
        let too_long = || unusable("a chunk in it is longer than 32 MiB, or outside the layer");
        self.ends.sort_unstable();
        self.chunks.sort_by_key(|chunk| chunk.part);
        let mut pieces = Vec::with_capacity(self.chunks.len());
        for TocChunk { len, part: (start, skip), digest, .. } in &self.chunks {
            let next = self.ends.partition_point(|end| end <= start);
            let end = self.ends.get(next).copied().unwrap_or(layer_len);
            let stored = ByteRange::new(*start, end).ok_or_else(too_long)?;
            let len = u32::try_from(*len).map_err(|_| too_long())?;
            let skip = u32::try_from(*skip).map_err(|_| too_long())?;
            pieces.push(Piece { stored, skip, len, digest: *digest });
        }
        let restarts = Restarts::of_pieces(codec, layer_len, pieces)?;
        for (index, chunk) in self.chunks.iter().enumerate() {
            let offset = restarts.piece_start(index).unwrap_or(0);
            let TocChunk { at, len, digest, .. } = *chunk;
            let part = FilePart { at, len: len as u32, offset, digest };
            self.files[chunk.file].parts.push(part);
        }
        for file in &mut self.files {
            file.parts.sort_unstable_by_key(|part| part.at);
        }
        Ok(Toc { files: self.files, restarts })
    }
}

fn listed(entry: &TocEntry) -> Result<Listed> {
    let kind = match entry.kind.as_str() {
        "reg" => b'0',
        "hardlink" => b'1',
        "symlink" => b'2',
        "char" => b'3',
        "block" => b'4',
        "dir" => b'5',
        "fifo" => b'6',
        other => {
            let kind: String = other.chars().take(20).collect();
            return Err(unusable(&format!("it has a file of the unknown type {kind:?}")));
        }
    };
    let mut xattrs = Xattrs::new();
    for (name, value) in entry.xattrs.iter().flat_map(|all| &all.0) {
        let value = STANDARD
            .decode(value)
            .map_err(|_| unusable("an extended attribute in it is not base64"))?;
        xattrs.push((name.as_bytes().into(), value.into()));
    }
    let (mtime_s, mtime_ns) = time(entry.modtime.as_deref())?;
    Ok(Listed {
        path: entry.name.as_bytes().to_vec(),
        link: entry.link_name.as_bytes().to_vec(),
        kind,
        mode: entry.mode,
        uid: entry.uid,
        gid: entry.gid,
        size: if kind == b'0' { entry.size } else { 0 },
        mtime_s,
        mtime_ns,
        device: (entry.dev_major, entry.dev_minor),
        xattrs,
        parts: Vec::new(),
    })
}

/// Seconds and nanoseconds since 1970. A missing time, or one in year 1, is zero.
fn time(text: Option<&str>) -> Result<(i64, u32)> {
    let Some(text) = text.filter(|text| !text.is_empty() && !text.starts_with("0001-01-01")) else {
        return Ok((0, 0));
    };
    let time =
        DateTime::parse_from_rfc3339(text).map_err(|_| unusable("a time in it is invalid"))?;
    Ok((time.timestamp(), time.timestamp_subsec_nanos().min(999_999_999)))
}
