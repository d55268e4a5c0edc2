//! The table of a derived object: it maps each byte of the object to a byte of a layer.
//!
//! ```text
//!   Header 96 │ zstd frame: counts │ layers │ places │ stretches │ pieces │ windows, a frame each
//! ```
//!
//! docs/format.md describes the bytes. The publisher of an index writes the table, so all of it is
//! hostile. Invariants of a table returned by [`Table::decode`]: stretches are in order, do not
//! overlap, and lie within the object and within their unpacked layer; places and pieces are in
//! order and within their layer, and no span is longer than `SPAN_MAX`; windows lie in the table.

use burgeon_block::{ByteRange, Digest, Error, ErrorKind, MemoryMeter, Result};
use zerocopy::{
    FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned,
    little_endian::{U32, U64},
};

use crate::{
    Piece,
    places::{Inside, RestartPoint, Start},
    restart::Restarts,
    span::{LayerCodec, SPAN_MAX},
};

/// Longest table, in bytes: enough for 60 GiB of layers, at 2 KiB a window and 512 KiB a span.
pub const TABLE_MAX: u64 = 256 << 20;
/// Most bytes that the compressed rows may unpack to: four million files.
const ROWS_MAX: u64 = 128 << 20;
/// Most layers of an image; images that are fetched whole have the same limit.
const LAYERS_MAX: u64 = 512;

/// zstd level for rows.
const ROWS_LEVEL: i32 = 9;

/// Flag in the codec of a layer: it has pieces instead of places.
const OF_PIECES: u8 = 0x80;

const MAGIC: [u8; 8] = *b"BURGDERI";
const VERSION: u32 = 1;

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned, Clone, Copy)]
#[repr(C)]
struct Header {
    magic: [u8; 8],
    version: U32,
    header_len: U32,
    compat: U64,
    ro_compat: U64,
    incompat: U64,
    /// SHA-256 of the manifest of the image that the layers belong to.
    image: [u8; 32],
    rows_len: U64,
    rows_stored: U64,
    reserved: U64,
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned, Clone, Copy)]
#[repr(C)]
struct Counts {
    object_len: U64,
    layers: U64,
    places: U64,
    stretches: U64,
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned, Clone, Copy)]
#[repr(C)]
struct LayerRow {
    digest: [u8; 32],
    len: U64,
    unpacked: U64,
    places: U64,
    codec: u8,
    reserved: [u8; 7],
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned, Clone, Copy)]
#[repr(C)]
struct PlaceRow {
    compressed: U64,
    unpacked: U64,
    /// Stored length of the window; 0 if the place needs none.
    window: U32,
    bits: u8,
    partial: u8,
    reserved: [u8; 2],
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned, Clone, Copy)]
#[repr(C)]
struct StretchRow {
    /// Length of the zeros between the previous stretch and this one.
    gap: U64,
    /// Offset in the unpacked layer minus the end of the previous stretch there, wrapping.
    offset: U64,
    len: U32,
    layer: U32,
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned, Clone, Copy)]
#[repr(C)]
struct PieceRow {
    /// Stored offset minus that of the previous piece.
    gap: U64,
    stored: U32,
    skip: U32,
    len: U32,
    reserved: U32,
    digest: [u8; 32],
}

/// Bytes of a derived object that are contiguous in a layer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Stretch {
    /// Offset in the object.
    pub at: u64,
    /// Offset in the unpacked layer.
    pub offset: u64,
    /// Length in bytes, at least 1.
    pub len: u32,
    /// Number of the layer; the lowest is 0.
    pub layer: u32,
}

impl Stretch {
    /// End in the object, exclusive.
    pub fn end(&self) -> u64 {
        self.at + u64::from(self.len)
    }
}

/// A layer and the places where unpacking can start.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct TableLayer {
    /// SHA-256 of the layer blob.
    pub digest: [u8; 32],
    /// Its places or pieces.
    pub restarts: Restarts,
}

impl TableLayer {
    /// Length of the layer blob in bytes.
    pub fn stored_len(&self) -> u64 {
        self.restarts.len
    }

    /// Compression of the layer blob.
    pub fn codec(&self) -> LayerCodec {
        self.restarts.codec
    }
}

/// Maps each byte of a derived object to a byte of a layer, or to zero.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Table {
    /// SHA-256 of the manifest of the image that the layers belong to.
    pub image: [u8; 32],
    /// Length of the object.
    pub object_len: u64,
    /// Lowest layer first.
    pub layers: Vec<TableLayer>,
    /// Sorted by offset in the object, with zeros between them.
    pub stretches: Vec<Stretch>,
}

/// The rows of all layers, in the order of a table.
#[derive(Default)]
struct LayerRows {
    layers: Vec<u8>,
    places: Vec<u8>,
    pieces: Vec<u8>,
    /// Not compressed with the rows.
    windows: Vec<u8>,
}

impl LayerRows {
    fn of(layers: &[TableLayer]) -> Self {
        let mut rows = Self::default();
        for TableLayer { digest, restarts } in layers {
            let pieces = restarts.pieces.as_ref().map(|pieces| &pieces.pieces[..]);
            let row = LayerRow {
                digest: *digest,
                len: restarts.len.into(),
                unpacked: restarts.unpacked.into(),
                places: (pieces.map_or(restarts.places.len(), <[Piece]>::len) as u64).into(),
                codec: restarts.codec as u8 | pieces.map_or(0, |_| OF_PIECES),
                reserved: [0; 7],
            };
            rows.layers.extend_from_slice(row.as_bytes());
            let mut before = 0;
            for piece in pieces.unwrap_or_default() {
                let row = PieceRow {
                    gap: (piece.stored.start() - before).into(),
                    stored: (piece.stored.len() as u32).into(),
                    skip: piece.skip.into(),
                    len: piece.len.into(),
                    reserved: 0.into(),
                    digest: piece.digest,
                };
                rows.pieces.extend_from_slice(row.as_bytes());
                before = piece.stored.start();
            }
            for place in &restarts.places {
                let (bits, partial, window) = match &place.start {
                    Start::Fresh => (0, 0, &[][..]),
                    Start::Inside(inside) => (inside.bits, inside.partial, &inside.window[..]),
                };
                let row = PlaceRow {
                    compressed: place.compressed.into(),
                    unpacked: place.unpacked.into(),
                    window: (window.len() as u32).into(),
                    bits,
                    partial,
                    reserved: [0; 2],
                };
                rows.places.extend_from_slice(row.as_bytes());
                rows.windows.extend_from_slice(window);
            }
        }
        rows
    }
}

impl Table {
    /// Encodes the table. Errors: `Invalid` if it is longer than `decode` accepts.
    pub fn encode(&self) -> Result<Vec<u8>> {
        let places = self.layers.iter().map(|layer| layer.restarts.places.len() as u64).sum();
        let counts = Counts {
            object_len: self.object_len.into(),
            layers: (self.layers.len() as u64).into(),
            places: U64::new(places),
            stretches: (self.stretches.len() as u64).into(),
        };
        let mut rows = counts.as_bytes().to_vec();
        let of_layers = LayerRows::of(&self.layers);
        rows.extend(of_layers.layers);
        rows.extend(of_layers.places);
        let (mut at, mut offset) = (0, 0u64);
        for stretch in &self.stretches {
            let row = StretchRow {
                gap: (stretch.at - at).into(),
                offset: stretch.offset.wrapping_sub(offset).into(),
                len: stretch.len.into(),
                layer: stretch.layer.into(),
            };
            rows.extend_from_slice(row.as_bytes());
            (at, offset) = (stretch.end(), stretch.offset + u64::from(stretch.len));
        }
        rows.extend(of_layers.pieces);
        let stored = zstd::bulk::compress(&rows, ROWS_LEVEL)
            .map_err(|error| Error::io("cannot compress a table", error))?;
        let header = Header {
            magic: MAGIC,
            version: VERSION.into(),
            header_len: (size_of::<Header>() as u32).into(),
            compat: 0.into(),
            ro_compat: 0.into(),
            incompat: 0.into(),
            image: self.image,
            rows_len: (rows.len() as u64).into(),
            rows_stored: (stored.len() as u64).into(),
            reserved: 0.into(),
        };
        let bytes = [header.as_bytes(), &stored, &of_layers.windows].concat();
        if rows.len() as u64 > ROWS_MAX || bytes.len() as u64 > TABLE_MAX {
            let what = "the image has too many files or too large layers for an index";
            return Err(Error::new(ErrorKind::Invalid, what));
        }
        Ok(bytes)
    }

    /// Reads a table.
    ///
    /// Errors: `Corrupt` for bytes that break a rule, `Invalid` if they need more memory than their
    /// length accounts for, `UnsupportedFormat` if they are of a version or need a feature unknown
    /// here.
    pub fn decode(bytes: &[u8]) -> Result<Self> {
        if bytes.len() as u64 > TABLE_MAX {
            return Err(bad("is too long"));
        }
        let (header, rest) = Header::read_from_prefix(bytes).map_err(|_| bad("is cut short"))?;
        if header.magic != MAGIC {
            return Err(bad("is none"));
        }
        if header.version.get() != VERSION || header.incompat.get() != 0 {
            let what = "the table of a derived object is of a newer version: use a newer Burgeon";
            return Err(Error::new(ErrorKind::UnsupportedFormat, what));
        }
        let (rows_len, stored) = (header.rows_len.get(), header.rows_stored.get());
        if rows_len > ROWS_MAX || stored > rest.len() as u64 {
            return Err(bad("claims to be too long"));
        }
        // The rows, packed and decoded; windows are copied.
        let meter = MemoryMeter::of_input(bytes.len() as u64);
        let memory = rows_len.saturating_mul(3).saturating_add(rest.len() as u64);
        meter.promise(memory);
        meter.take(memory).map_err(|error| {
            let what = format!("a table of {} bytes declares {rows_len} bytes", bytes.len());
            Error::with_source(error.kind(), what, error)
        })?;
        let (stored, windows) = rest.split_at(stored as usize);
        let rows = zstd::bulk::decompress(stored, rows_len as usize)
            .map_err(|error| Error::with_source(ErrorKind::Corrupt, CANNOT, error))?;
        if rows.len() as u64 != rows_len {
            return Err(bad("is cut short"));
        }
        let (counts, rest) = Counts::read_from_prefix(&rows).map_err(|_| bad("is cut short"))?;
        let (layers, rest) = take::<LayerRow>(rest, counts.layers.get().min(LAYERS_MAX + 1))?;
        let (places, rest) = take::<PlaceRow>(rest, counts.places.get())?;
        let (stretches, rest) = take::<StretchRow>(rest, counts.stretches.get())?;
        let piece_count = layers.iter().filter(|layer| layer.codec & OF_PIECES != 0);
        let piece_count = piece_count.fold(0u64, |sum, row| sum.saturating_add(row.places.get()));
        let (pieces, rest) = take::<PieceRow>(rest, piece_count)?;
        if !rest.is_empty() || layers.len() as u64 > LAYERS_MAX {
            return Err(bad("does not have its stated length"));
        }
        let layers = read_layers(layers, places, pieces, windows)?;
        let object_len = counts.object_len.get();
        let stretches = read_stretches(stretches, &layers, object_len)?;
        Ok(Self { image: header.image, object_len, layers, stretches })
    }

    /// The stretches that overlap `range` of the object.
    pub fn stretches(&self, range: ByteRange) -> &[Stretch] {
        let first = self.stretches.partition_point(|stretch| stretch.end() <= range.start());
        let rest = &self.stretches[first..];
        &rest[..rest.partition_point(|stretch| stretch.at < range.end())]
    }

    /// The identity of the bytes of `range` of the object: the same in every table in which the
    /// same parts of pieces with the same digests lie at the same offsets of a range of this
    /// length. `None` if a byte is of a layer without pieces, which no digest here is of.
    pub fn identity(&self, range: ByteRange) -> Option<Digest> {
        let mut hasher = blake3::Hasher::new_derive_key(IDENTITY);
        hasher.update(&range.len().to_le_bytes());
        for stretch in self.stretches(range) {
            let pieces = self.layers.get(stretch.layer as usize)?.restarts.pieces.as_ref()?;
            let (from, until) = (stretch.at.max(range.start()), stretch.end().min(range.end()));
            // The decoder has checked that a stretch lies within its layer.
            let offset = stretch.offset + (from - stretch.at);
            let wanted = ByteRange::at(offset, until - from)?;
            for (start, piece) in pieces.overlapping(wanted) {
                let part = ByteRange::at(start, piece.len.into())?.intersect(wanted)?;
                let at = from - range.start() + (part.start() - offset);
                for number in [at, part.len(), part.start() - start] {
                    hasher.update(&number.to_le_bytes());
                }
                hasher.update(&piece.digest);
            }
        }
        Some(hasher.finalize().into())
    }
}

/// BLAKE3's context for [`Table::identity`].
const IDENTITY: &str = "burgeon 2026 identity of a range of pieces";

const CANNOT: &str = "the table of a derived object is invalid";

fn bad(why: &str) -> Error {
    Error::new(ErrorKind::Corrupt, format!("the table of a derived object {why}"))
}

/// Splits off `count` rows; returns them and the remaining bytes.
fn take<T: FromBytes + Immutable + KnownLayout + Unaligned>(
    bytes: &[u8],
    count: u64,
) -> Result<(&[T], &[u8])> {
    let len = usize::try_from(count).ok().and_then(|count| count.checked_mul(size_of::<T>()));
    let (rows, rest) =
        len.and_then(|len| bytes.split_at_checked(len)).ok_or_else(|| bad("is cut short"))?;
    let rows = <[T]>::ref_from_bytes(rows).map_err(|_| bad("is cut short"))?;
    Ok((rows, rest))
}

fn read_layers(
    rows: &[LayerRow],
    places: &[PlaceRow],
    pieces: &[PieceRow],
    windows: &[u8],
) -> Result<Vec<TableLayer>> {
    let (mut places, mut pieces, mut windows) = (places, pieces, windows);
    let mut layers = Vec::with_capacity(rows.len());
    for row in rows {
        let codec = LayerCodec::from_number(row.codec & !OF_PIECES)
            .ok_or_else(|| bad("has a layer that is compressed in an unknown way"))?;
        let (len, unpacked, count) = (row.len.get(), row.unpacked.get(), row.places.get());
        let restarts = if row.codec & OF_PIECES != 0 {
            let own = split(&mut pieces, count)?;
            let restarts = Restarts::of_pieces(codec, len, read_pieces(own)?);
            restarts.map_err(|_| bad("has impossible pieces"))?
        } else {
            let own = split(&mut places, count)?;
            let mut restarts = Restarts { codec, len, unpacked, places: Vec::new(), pieces: None };
            for place in own {
                restarts.places.push(read_place(place, codec, &mut windows)?);
            }
            check(&restarts)?;
            restarts
        };
        if restarts.unpacked != unpacked {
            return Err(bad("has pieces of another length than it states"));
        }
        layers.push(TableLayer { digest: row.digest, restarts });
    }
    match (places, windows) {
        ([], []) => Ok(layers),
        _ => Err(bad("has places of no layer")),
    }
}

/// Removes the first `count` rows from `rows`.
fn split<'a, T>(rows: &mut &'a [T], count: u64) -> Result<&'a [T]> {
    let count = usize::try_from(count).ok();
    let (own, rest) = count
        .and_then(|count| rows.split_at_checked(count))
        .ok_or_else(|| bad("has too few places"))?;
    *rows = rest;
    Ok(own)
}

fn read_pieces(rows: &[PieceRow]) -> Result<Vec<Piece>> {
    let mut start = 0u64;
    let mut piece = |row: &PieceRow| {
        start = start.checked_add(row.gap.get())?;
        let stored = ByteRange::at(start, row.stored.get().into())?;
        Some(Piece { stored, skip: row.skip.get(), len: row.len.get(), digest: row.digest })
    };
    let pieces = rows.iter().map(|row| piece(row).ok_or_else(|| bad("has impossible pieces")));
    pieces.collect()
}

fn read_place(row: &PlaceRow, codec: LayerCodec, windows: &mut &[u8]) -> Result<RestartPoint> {
    let start = match row.window.get() as usize {
        0 => Start::Fresh,
        len => {
            let (window, rest) =
                windows.split_at_checked(len).ok_or_else(|| bad("lacks a window"))?;
            *windows = rest;
            if row.bits > 7 || codec != LayerCodec::Gzip {
                return Err(bad("has an impossible place"));
            }
            let window = window.to_vec();
            Start::Inside(Inside { bits: row.bits, partial: row.partial, window })
        }
    };
    Ok(RestartPoint { compressed: row.compressed.get(), unpacked: row.unpacked.get(), start })
}

/// Checks that the spans cover the layer in order and that none is too long.
fn check(restarts: &Restarts) -> Result<()> {
    let Restarts { codec, len, unpacked, places, .. } = restarts;
    let plain = *codec == LayerCodec::Plain;
    let begins = match places.first() {
        Some(first) => !plain && (first.compressed, first.unpacked) == (0, 0),
        None => *unpacked == 0 || plain && len == unpacked,
    };
    let ascend = places
        .windows(2)
        .all(|pair| pair[0].compressed < pair[1].compressed && pair[0].unpacked < pair[1].unpacked);
    let last = places.last().map_or((0, 0), |last| (last.compressed, last.unpacked));
    if !begins || !ascend || last.0 > *len || last.1 > *unpacked {
        return Err(bad("has places out of order"));
    }
    if restarts.longest() > SPAN_MAX {
        return Err(bad("has places too far from each other"));
    }
    Ok(())
}

fn read_stretches(
    rows: &[StretchRow],
    layers: &[TableLayer],
    object_len: u64,
) -> Result<Vec<Stretch>> {
    let (mut end, mut offset) = (0u64, 0u64);
    let mut stretches = Vec::with_capacity(rows.len());
    for row in rows {
        let at = end.checked_add(row.gap.get());
        offset = offset.wrapping_add(row.offset.get());
        let (len, layer) = (row.len.get(), row.layer.get());
        let unpacked = layers.get(layer as usize).map(|layer| layer.restarts.unpacked);
        let fits = |end: Option<u64>, limit: Option<u64>| {
            end.filter(|end| limit.is_some_and(|limit| *end <= limit))
        };
        let stop = fits(at.and_then(|at| at.checked_add(len.into())), Some(object_len));
        let stop_in_layer = fits(offset.checked_add(len.into()), unpacked);
        let (Some(at), Some(stop), Some(stop_in_layer), 1..) = (at, stop, stop_in_layer, len)
        else {
            return Err(bad("has an impossible stretch"));
        };
        stretches.push(Stretch { at, offset, len, layer });
        (end, offset) = (stop, stop_in_layer);
    }
    Ok(stretches)
}
