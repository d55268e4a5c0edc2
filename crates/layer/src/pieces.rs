//! Layers described by a table of contents (TOC): pieces that are unpacked and checked one by one.
//!
//! ```text
//!   stored:    │ header │ piece 0 │ header │ piece 1 │ piece 2 │ …     each in a member or frame
//!   unpacked:  piece 0 │ piece 1 │ piece 2 │ …                         headers are left out
//!              └── span 0 ──────┘ └── span 1 …                         about 512 KiB, one request
//! ```
//!
//! Such a layer is never read as a whole: its *unpacked* bytes are those of its pieces alone,
//! concatenated. Invariants: pieces are sorted by stored offset; no span is longer than
//! `SPAN_MAX`, stored or unpacked; an unpacked piece matches its SHA-256 in the TOC, or is an
//! error. Formats: eStargz (`docs/estargz.md` of stargz-snapshotter) and zstd:chunked
//! (`containers-storage-zstd-chunked(5)`).

use std::io::{self, Read};

use burgeon_block::{ByteRange, Error, ErrorKind, Result};
use sha2::{Digest, Sha256};

use crate::{
    gunzip::Gunzip,
    span::{LayerCodec, SPAN_LEN, SPAN_MAX, Span, read},
};

/// Most bytes that are unpacked for each byte of a layer's pieces.
const WORK_MAX: u64 = 4;

/// A part of a layer listed in a table of contents.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Piece {
    /// Its stored range, which begins with a member or a frame.
    pub stored: ByteRange,
    /// Unpacked bytes of that member or frame before the piece.
    pub skip: u32,
    /// Its length, unpacked, in bytes; at least 1.
    pub len: u32,
    /// SHA-256 of the unpacked piece.
    pub digest: [u8; 32],
}

/// The pieces of a layer.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Pieces {
    pub(crate) pieces: Vec<Piece>,
    /// Start of each piece in the unpacked layer, and the end of the last piece.
    starts: Vec<u64>,
    /// Index of the first piece of each span.
    spans: Vec<u32>,
}

impl Pieces {
    /// Groups the pieces of a layer of `len` bytes into spans. `None` if any is empty, out of
    /// order, outside the layer or too long.
    pub(crate) fn new(len: u64, pieces: Vec<Piece>) -> Option<Self> {
        let mut starts = Vec::with_capacity(pieces.len() + 1);
        let (mut spans, mut at, mut span) = (Vec::new(), 0u64, (0, 0));
        // Bytes to unpack, for this span and in all: pieces may share a member or lie deep in one.
        let (mut work, mut all_work) = (0, 0u64);
        let mut before = (0, 0, 0, 0);
        for (index, piece) in (0..).zip(&pieces) {
            let Piece { stored, skip, len: unpacked, .. } = *piece;
            let order = (stored.start(), skip, stored.end());
            let after = (order.0, order.1) >= (before.0, before.1) && order.2 >= before.2;
            let inside = u64::from(skip) + u64::from(unpacked);
            let longest = inside.max(stored.len());
            if !after || stored.end() > len || unpacked == 0 || longest > SPAN_MAX {
                return None;
            }
            // Pieces of one member are unpacked together, up to the end of the last.
            let shared = match index > 0 && before.0 == order.0 {
                true => u64::from(before.1) + before.3,
                false => 0,
            };
            before = (order.0, order.1, order.2, u64::from(unpacked));
            let (span_stored, span_at) = span;
            let more = inside.saturating_sub(shared);
            work += more;
            all_work = all_work.saturating_add(more);
            if index == 0
                || at - span_at >= SPAN_LEN
                || stored.end() - span_stored > SPAN_LEN
                || work > SPAN_MAX
            {
                spans.push(index);
                span = (stored.start(), at);
                work = inside;
            }
            starts.push(at);
            at = at.checked_add(unpacked.into())?;
        }
        starts.push(at);
        // Real layers have little data between pieces.
        let likely = at.saturating_mul(WORK_MAX).saturating_add(SPAN_MAX);
        (all_work <= likely).then_some(Self { pieces, starts, spans })
    }

    /// Length of the unpacked layer.
    pub(crate) fn unpacked_len(&self) -> u64 {
        self.starts.last().copied().unwrap_or(0)
    }

    /// Offset of the piece `index` in the unpacked layer; `None` if there is no such piece.
    pub(crate) fn start(&self, index: usize) -> Option<u64> {
        self.starts[..self.pieces.len()].get(index).copied()
    }

    /// The span that contains `offset`, which is below the layer's end.
    pub(crate) fn span(&self, offset: u64) -> Option<Span> {
        let next = self.spans.partition_point(|first| self.starts[*first as usize] <= offset);
        let index = u32::try_from(next.checked_sub(1)?).ok()?;
        let of_span = self.of_span(index);
        let (first, last) = (of_span.start, of_span.end.checked_sub(1)?);
        let stored = (self.pieces[first].stored.start(), self.pieces[last].stored.end());
        Some(Span {
            index,
            compressed: ByteRange::new(stored.0, stored.1)?,
            unpacked: ByteRange::new(self.starts[first], self.starts[last + 1])?,
        })
    }

    /// The pieces that hold a byte of `range` of the unpacked layer, each with its start there.
    pub(crate) fn overlapping(&self, range: ByteRange) -> impl Iterator<Item = (u64, &Piece)> {
        let first = self.starts.partition_point(|start| *start <= range.start());
        let starts = self.starts.iter().copied().zip(&self.pieces);
        let inside = starts.skip(first.saturating_sub(1));
        inside.take_while(move |(start, _)| *start < range.end())
    }

    fn of_span(&self, index: u32) -> std::ops::Range<usize> {
        let first = |span: usize| self.spans.get(span).map_or(self.pieces.len(), |at| *at as usize);
        first(index as usize)..first(index as usize + 1)
    }

    /// Unpacks the pieces of a span from its stored `bytes`.
    pub(crate) fn unpack(&self, codec: LayerCodec, span: &Span, bytes: &[u8]) -> Result<Vec<u8>> {
        let corrupt = |what: String| Error::new(ErrorKind::Corrupt, what);
        let mut out = Vec::with_capacity(span.unpacked.len() as usize);
        let pieces = &self.pieces[self.of_span(span.index)];
        // Several pieces may lie in one member.
        for together in pieces.chunk_by(|a, b| a.stored.start() == b.stored.start()) {
            let (mut stored, mut len) = (together[0].stored, 0);
            for piece in together {
                // The ends ascend, so the last is the farthest.
                stored = piece.stored;
                len = len.max(u64::from(piece.skip) + u64::from(piece.len));
            }
            let start = (stored.start() - span.compressed.start()) as usize;
            let member = bytes.get(start..start + stored.len() as usize);
            let member = member.ok_or_else(|| corrupt("a part of a layer is cut short".into()))?;
            let unpacked = begin(codec, member, len).map_err(|error| {
                let what = "a part of a layer cannot be unpacked";
                Error::with_source(ErrorKind::Corrupt, what, error)
            })?;
            for piece in together {
                let part =
                    unpacked.get(piece.skip as usize..).and_then(|on| on.get(..piece.len as usize));
                let part = part.ok_or_else(|| corrupt("a part of a layer is too short".into()))?;
                if Sha256::digest(part)[..] != piece.digest {
                    let at = piece.stored;
                    return Err(corrupt(format!(
                        "{at} of a layer do not match the digest in its table of contents"
                    )));
                }
                out.extend_from_slice(part);
            }
        }
        Ok(out)
    }
}

/// At most the first `len` unpacked bytes of `member`.
fn begin(codec: LayerCodec, member: &[u8], len: u64) -> io::Result<Vec<u8>> {
    match codec {
        LayerCodec::Plain => Ok(member[..member.len().min(len as usize)].to_vec()),
        LayerCodec::Gzip => read(Gunzip::new(member, None), len),
        LayerCodec::Zstd => {
            // Bulk decompression needs no window, and suffices if the piece ends the frame.
            if let Ok(bytes) = zstd::bulk::decompress(member, len as usize) {
                return Ok(bytes);
            }
            let mut bytes = Vec::with_capacity(len as usize);
            zstd::stream::read::Decoder::with_buffer(member)?.take(len).read_to_end(&mut bytes)?;
            Ok(bytes)
        }
    }
}

#[cfg(test)]
mod tests {
    use burgeon_block::{ByteRange, ErrorKind};
    use sha2::{Digest, Sha256};
    use testkit::gzip;

    use super::Piece;
    use crate::{LayerCodec, Restarts};

    /// A layer of members, each with a header of 3 bytes and its pieces.
    fn layer(codec: LayerCodec, members: &[&[&[u8]]]) -> (Vec<u8>, Vec<Piece>) {
        let (mut stored, mut pieces) = (b"what comes before".to_vec(), Vec::new());
        for parts in members {
            let start = stored.len();
            let raw = [b"hdr", &parts.concat()[..], b"and padding"].concat();
            let member = match codec {
                LayerCodec::Plain => raw,
                LayerCodec::Zstd => zstd::bulk::compress(&raw, 3).unwrap(),
                LayerCodec::Gzip => gzip(&raw, 6),
            };
            stored.extend(member);
            let mut skip = 3;
            for part in *parts {
                pieces.push(Piece {
                    stored: ByteRange::new(start as u64, stored.len() as u64).unwrap(),
                    skip,
                    len: part.len() as u32,
                    digest: Sha256::digest(part).into(),
                });
                skip += part.len() as u32;
            }
        }
        (stored, pieces)
    }

    #[test]
    fn pieces_are_unpacked_and_checked_one_by_one() {
        let long = vec![7; 700 << 10];
        let members: [&[&[u8]]; 4] = [&[b"a"], &[b"bb", b"ccc"], &[&long], &[b"d"]];
        for codec in [LayerCodec::Plain, LayerCodec::Gzip, LayerCodec::Zstd] {
            let (stored, pieces) = layer(codec, &members);
            let restarts = Restarts::of_pieces(codec, stored.len() as u64, pieces.clone()).unwrap();
            assert_eq!(restarts.piece_start(3), Some(6));
            assert_eq!(restarts.piece_start(5), None);
            let (mut at, mut all, mut spans) = (0, Vec::new(), 0);
            while let Some(span) = restarts.span(at) {
                let range = span.compressed.start() as usize..span.compressed.end() as usize;
                let unpacked = restarts.unpack(&span, &stored[range.clone()]).unwrap();
                assert_eq!(unpacked.len() as u64, span.unpacked.len());
                let mut caught = 0;
                for at in range.clone().take(300) {
                    let mut bad = stored[range.clone()].to_vec();
                    bad[at - range.start] ^= 1;
                    match restarts.unpack(&span, &bad) {
                        // The change was in a header or in padding.
                        Ok(same) => assert!(same == unpacked, "{codec:?} at {at}"),
                        Err(error) => {
                            assert_eq!(error.kind(), ErrorKind::Corrupt);
                            caught += 1;
                        }
                    }
                }
                assert!(caught > 0);
                let short = &stored[range.start..range.end - 1];
                assert_eq!(restarts.unpack(&span, short).unwrap_err().kind(), ErrorKind::Corrupt);
                all.extend(unpacked);
                at = span.unpacked.end();
                spans += 1;
            }
            assert_eq!(all, [b"abbccc", &long[..], b"d"].concat());
            assert!((2..=3).contains(&spans), "{spans}: small ones go together, long ones do not");
        }
    }

    #[test]
    fn impossible_pieces_are_refused() {
        let piece = |start, end, skip, len| Piece {
            stored: ByteRange::new(start, end).unwrap(),
            skip,
            len,
            digest: [0; 32],
        };
        let made =
            |pieces: &[Piece]| Restarts::of_pieces(LayerCodec::Gzip, 100 << 20, pieces.to_vec());
        made(&[]).unwrap();
        made(&[piece(0, 9, 0, 1), piece(0, 9, 1, 1), piece(9, 10, 0, 32 << 20)]).unwrap();
        for bad in [
            &[piece(0, 9, 0, 0)][..],
            &[piece(0, 9, 1, 32 << 20)],
            &[piece(0, (32 << 20) + 1, 0, 1)],
            &[piece(99 << 20, (100 << 20) + 1, 0, 1)],
            &[piece(9, 10, 0, 1), piece(0, 11, 0, 1)],
            &[piece(0, 10, 0, 1), piece(1, 9, 0, 1)],
            &[piece(0, 9, 5, 1), piece(0, 9, 4, 1)],
        ] {
            assert_eq!(made(bad).unwrap_err().kind(), ErrorKind::Invalid, "{bad:?}");
        }
    }
}
