//! The unit of unpacking: a part of a layer that is unpacked as a whole.
//!
//! Invariant: no span is longer than [`SPAN_MAX`], compressed or unpacked, which bounds the cost of
//! one read; [`crate::restart`], [`crate::pieces`] and [`crate::table`] check it.

use std::io::{self, Read};

use burgeon_block::ByteRange;

/// Least distance between two places, unpacked: 512 KiB. A place inside a gzip member takes about
/// 2 KiB, one per cent of the compressed span.
pub(crate) const SPAN_LEN: u64 = 512 << 10;
/// Longest span, compressed or unpacked: 32 MiB. A layer with a longer one cannot be read lazily.
pub(crate) const SPAN_MAX: u64 = 32 << 20;

/// A part of a layer that is unpacked as a whole.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Span {
    /// Number of the span in the layer.
    pub index: u32,
    /// Range in the layer blob.
    pub compressed: ByteRange,
    /// Range in the unpacked layer.
    pub unpacked: ByteRange,
}

/// Compression of a layer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum LayerCodec {
    /// Uncompressed.
    Plain = 0,
    /// gzip, of one or more members.
    Gzip = 1,
    /// zstd, of one or more frames.
    Zstd = 2,
}

impl LayerCodec {
    pub(crate) fn from_number(number: u8) -> Option<Self> {
        [Self::Plain, Self::Gzip, Self::Zstd].into_iter().find(|codec| *codec as u8 == number)
    }
}

/// At most the first `len` bytes of `reader`.
pub(crate) fn read(reader: impl Read, len: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::with_capacity(len as usize);
    reader.take(len).read_to_end(&mut bytes)?;
    Ok(bytes)
}
