//! Places in a layer where unpacking can start.
//!
//! ```text
//!   tar          anywhere; one place every `PLAIN_LEN` bytes
//!   tar+gzip     start of a member, or of a block with the 32 KiB before it
//!   tar+zstd     start of a frame
//!
//!   place ──── span ────► place ──── span ────► …        a span is unpacked as a whole
//! ```
//!
//! A layer with a table of contents has pieces instead of places ([`crate::pieces`]). Invariants:
//! the spans of a layer cover it without gaps, and none is longer than `SPAN_MAX`, which bounds
//! the cost of one read; a span unpacks to exactly its stated length, or to an error.

use std::io::{self, BufRead, Read};

use burgeon_block::{ByteRange, Error, ErrorKind, Result};

use crate::{
    gunzip::Gunzip,
    pieces::{Piece, Pieces},
    places::{Recording, RestartPoint, Start},
    span::{LayerCodec, SPAN_MAX, Span, read},
    unzstd::Unzstd,
};

/// Length of a span of an uncompressed layer: 512 KiB.
const PLAIN_LEN: u64 = 512 << 10;

/// Unpacks a layer and records the places where unpacking can start.
pub struct Recorder<R>(Kind<R>);

enum Kind<R> {
    Plain(R, u64),
    Gzip(Gunzip<R>),
    Zstd(Unzstd<R>),
}

/// The places of a layer where unpacking can start, or its pieces.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Restarts {
    pub(crate) codec: LayerCodec,
    pub(crate) len: u64,
    pub(crate) unpacked: u64,
    /// Sorted by offset; the first is at 0. Empty for an uncompressed or empty layer.
    pub(crate) places: Vec<RestartPoint>,
    /// Used instead of places if the layer is described by its table of contents.
    pub(crate) pieces: Option<Pieces>,
}

impl<R: BufRead> Recorder<R> {
    /// Unpacks `layer`.
    pub fn new(layer: R, codec: LayerCodec) -> Result<Self> {
        let recording = Recording::default();
        Ok(Self(match codec {
            LayerCodec::Plain => Kind::Plain(layer, 0),
            LayerCodec::Gzip => Kind::Gzip(Gunzip::new(layer, Some(recording))),
            LayerCodec::Zstd => {
                let unzstd = Unzstd::new(layer, recording);
                Kind::Zstd(unzstd.map_err(|error| Error::io("cannot start zstd", error))?)
            }
        }))
    }

    /// The number of places found so far, and the bytes that they take in memory.
    pub fn held(&self) -> (u64, u64) {
        match &self.0 {
            Kind::Plain(..) => (0, 0),
            Kind::Gzip(gunzip) => gunzip.held(),
            Kind::Zstd(unzstd) => unzstd.held(),
        }
    }

    /// The places of a layer of `len` bytes, after it has been read to its end.
    ///
    /// Errors: `Invalid` if a span between them is longer than `SPAN_MAX`.
    pub fn finish(self, len: u64) -> Result<Restarts> {
        let (codec, (unpacked, recording)) = match self.0 {
            Kind::Plain(_, read) => (LayerCodec::Plain, (read, Recording::default())),
            Kind::Gzip(gunzip) => (LayerCodec::Gzip, gunzip.finish()),
            Kind::Zstd(unzstd) => (LayerCodec::Zstd, unzstd.finish()),
        };
        let restarts = Restarts { codec, len, unpacked, places: recording.places, pieces: None };
        match restarts.longest() {
            longest if longest <= SPAN_MAX => Ok(restarts),
            longest => {
                let what = format!(
                    "{longest} bytes of it can be unpacked only as a whole, and no more than \
                     {SPAN_MAX} are useful: let its publisher compress it with gzip, or with zstd \
                     in several frames (zstd:chunked)"
                );
                Err(Error::new(ErrorKind::Invalid, what))
            }
        }
    }
}

impl<R: BufRead> Read for Recorder<R> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        match &mut self.0 {
            Kind::Plain(plain, read) => {
                let len = plain.read(buf)?;
                *read += len as u64;
                Ok(len)
            }
            Kind::Gzip(gunzip) => gunzip.read(buf),
            Kind::Zstd(unzstd) => unzstd.read(buf),
        }
    }
}

impl Restarts {
    /// The pieces of a layer of `len` bytes, which must be sorted by stored offset.
    ///
    /// Errors: `Invalid` for pieces that are empty, out of order, outside the layer or too long.
    pub fn of_pieces(codec: LayerCodec, len: u64, pieces: Vec<Piece>) -> Result<Self> {
        let pieces = Pieces::new(len, pieces).ok_or_else(|| {
            let what = "pieces of the layer are out of order, outside of it, longer than 32 MiB, or \
                        inside a far longer compressed stretch";
            Error::new(ErrorKind::Invalid, what)
        })?;
        let unpacked = pieces.unpacked_len();
        Ok(Self { codec, len, unpacked, places: Vec::new(), pieces: Some(pieces) })
    }

    /// Offset of the piece `index` in the unpacked layer; `None` if there is no such piece.
    pub fn piece_start(&self, index: usize) -> Option<u64> {
        self.pieces.as_ref()?.start(index)
    }

    /// The span that contains `offset` of the unpacked layer; `None` beyond its end.
    pub fn span(&self, offset: u64) -> Option<Span> {
        if offset >= self.unpacked {
            return None;
        }
        if let Some(pieces) = &self.pieces {
            return pieces.span(offset);
        }
        if self.codec == LayerCodec::Plain {
            let start = offset / PLAIN_LEN * PLAIN_LEN;
            let range = ByteRange::new(start, (start + PLAIN_LEN).min(self.unpacked))?;
            let index = u32::try_from(offset / PLAIN_LEN).ok()?;
            return Some(Span { index, compressed: range, unpacked: range });
        }
        let next = self.places.partition_point(|place| place.unpacked <= offset);
        let index = next.checked_sub(1)?;
        let from = &self.places[index];
        let until = self.places.get(next).map(|place| (place.compressed, place.unpacked));
        let (compressed, unpacked) = until.unwrap_or((self.len, self.unpacked));
        Some(Span {
            index: u32::try_from(index).ok()?,
            compressed: ByteRange::new(from.compressed, compressed)?,
            unpacked: ByteRange::new(from.unpacked, unpacked)?,
        })
    }

    /// Unpacks a span of this layer from its compressed `bytes`.
    ///
    /// Errors: `Corrupt` if the output has another length than the span (no more than that is
    /// produced), or if a piece does not match its digest.
    pub fn unpack(&self, span: &Span, bytes: &[u8]) -> Result<Vec<u8>> {
        if let Some(pieces) = &self.pieces {
            return pieces.unpack(self.codec, span, bytes);
        }
        let start = self.places.get(span.index as usize).map(|place| &place.start);
        unpack(self.codec, start, bytes, span.unpacked.len())
    }

    /// Length of the longest span in bytes, compressed or unpacked.
    pub(crate) fn longest(&self) -> u64 {
        if self.codec == LayerCodec::Plain {
            return PLAIN_LEN;
        }
        let ends = self.places.iter().skip(1).map(|place| (place.compressed, place.unpacked));
        let ends = ends.chain([(self.len, self.unpacked)]);
        let lens = self.places.iter().zip(ends).map(|(place, (compressed, unpacked))| {
            (compressed - place.compressed).max(unpacked - place.unpacked)
        });
        lens.max().unwrap_or(0)
    }
}

fn unpack(codec: LayerCodec, start: Option<&Start>, bytes: &[u8], len: u64) -> Result<Vec<u8>> {
    let corrupt = |error: io::Error| {
        Error::with_source(ErrorKind::Corrupt, "a part of a layer cannot be unpacked", error)
    };
    let unpacked = match (codec, start) {
        (LayerCodec::Plain, _) => bytes.to_vec(),
        (LayerCodec::Zstd, _) => zstd::bulk::decompress(bytes, len as usize).map_err(corrupt)?,
        (LayerCodec::Gzip, Some(Start::Inside(inside))) => {
            Gunzip::inside(bytes, inside).and_then(|gunzip| read(gunzip, len)).map_err(corrupt)?
        }
        (LayerCodec::Gzip, _) => read(Gunzip::new(bytes, None), len).map_err(corrupt)?,
    };
    if unpacked.len() as u64 == len {
        return Ok(unpacked);
    }
    let what = format!("a part of a layer has {} bytes instead of {len}", unpacked.len());
    Err(Error::new(ErrorKind::Corrupt, what))
}
