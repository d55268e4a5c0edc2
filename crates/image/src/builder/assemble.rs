//! From pieces of files to chunks in packs.
//!
//! ```text
//!   wave k+1: input ── pieces, digested in parallel        ┐
//!   wave k:   chunks ── digested, checksummed, compressed   ├ at the same time, on all cores
//!   wave k-1: stored bytes ── appended to packs, in order   ┘
//!   between waves, in order: each piece is known (refer to it), long (a chunk of its own) or
//!   short (joins the open group)
//! ```
//!
//! Invariants: placement depends only on the pieces and their order, never on timing; memory is
//! bounded by three waves; every input byte is read once.

use std::collections::{HashMap, hash_map::Entry};

use burgeon_block::{BLOCK_SIZE, ByteRange, ChecksumKind, Digest, ObjectId, Result};
use rayon::prelude::*;

use super::{compress::compress, grouping::Grouping, meter::Meter, reuse::Known};
use crate::{
    Codec,
    manifest::{ChunkEntry, Manifest},
    pack::PackWriter,
};

/// A part of a file's data: at most [`crate::CHUNK_MAX`] bytes, starting at a block boundary.
pub(super) struct Piece {
    pub(super) node: u32,
    pub(super) file_offset: u64,
    /// Padded with zeros to whole blocks.
    pub(super) data: Vec<u8>,
    pub(super) digest: Digest,
    /// Position of the bytes in layers that will be read again; gaps are zeros.
    pub(super) origins: Vec<Origin>,
}

/// A run of bytes of an uncompressed layer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Origin {
    /// Offset in the piece; later, in the lazy address space, from 0.
    pub at: u64,
    /// Number of the layer; the lowest is 0.
    pub layer: u32,
    /// Offset in the layer.
    pub offset: u64,
    /// Length in bytes.
    pub len: u32,
}

/// One batch of an input: about `WAVE_LEN` bytes.
#[derive(Default)]
pub(super) struct Wave {
    pub(super) pieces: Vec<Piece>,
    /// Nodes with their data, which is stored in the manifest.
    pub(super) inline: Vec<(u32, Box<[u8]>)>,
    /// A profile wants these pieces together: they are stored again, in chunks of their own.
    pub(super) comes_first: bool,
}

/// A source of pieces.
pub(super) trait Input: Send {
    /// The next wave; `None` at the end.
    fn next(&mut self) -> Result<Option<Wave>>;
}

/// A piece of a file in a chunk.
#[derive(Clone, Copy)]
pub(super) struct Extent {
    pub(super) node: u32,
    pub(super) file_offset: u64,
    pub(super) chunk: u32,
    /// Offset in the chunk.
    pub(super) offset: u32,
    pub(super) len: u32,
}

/// Positions of the files' bytes.
#[derive(Default)]
pub(super) struct Placed {
    pub(super) extents: Vec<Extent>,
    pub(super) inline: Vec<(u32, Box<[u8]>)>,
    /// Origins with the number of their chunk; offsets are relative to the chunk.
    origins: Vec<(u32, Origin)>,
}

/// Placeholder for the range of a derived chunk until it is known.
pub(super) const NOWHERE: ByteRange = ByteRange::at(0, 0).unwrap();

struct RawChunk {
    index: u32,
    data: Vec<u8>,
    digest: Option<Digest>,
    /// It may be in an earlier pack.
    reusable: bool,
}

/// Storage of a chunk.
enum Stored {
    New(Codec, Vec<u8>),
    /// In a pack of an earlier image: index into [`Known`]'s chunks.
    Known(u32),
    /// Not stored: it can be read from its origin.
    Derived,
}

struct DoneChunk {
    index: u32,
    blocks: u8,
    digest: Digest,
    checksums: Vec<u8>,
    stored: Stored,
    /// It may be in an earlier pack, or share a pack with chunks that may.
    reusable: bool,
}

/// An object, before the number of objects is known.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
enum ObjectRef {
    New(u32),
    Known(u32),
    Derived,
}

#[derive(Clone, Copy)]
struct PlacedChunk {
    blocks: u8,
    place: ObjectRef,
    stored: ByteRange,
    codec: Codec,
    digest: Digest,
}

/// Turns pieces into chunks.
pub(super) struct Assembler<'a> {
    pub(super) level: i32,
    pub(super) checksum: ChecksumKind,
    pub(super) grouping: Grouping,
    pub(super) known: &'a Known,
    pub(super) meter: &'a Meter<'a>,
    /// Chunks are described but not stored: all pieces have origins.
    pub(super) derived: bool,
}

/// The result of the assembler.
pub(super) struct Assembled {
    pub(super) placed: Placed,
    pub(super) manifest: Manifest,
    /// Bytes compressed into new packs, and bytes found in earlier ones (both as stored).
    pub(super) new_bytes: u64,
    pub(super) known_bytes: u64,
    /// Origins of derived chunks, by lazy address from 0.
    pub(super) origins: Vec<Origin>,
}

impl Assembler<'_> {
    /// Consumes `input` to its end.
    pub(super) fn run(&self, input: &mut impl Input, packs: PackWriter) -> Result<Assembled> {
        let mut placer = Placer { grouping: self.grouping, ..Placer::default() };
        let mut storer =
            Storer { known: self.known, packs, chunks: vec![], checksums: vec![], apart: false };
        let (mut raw, mut done) = (Vec::new(), Vec::new());
        let mut ended = false;
        while !ended || !raw.is_empty() || !done.is_empty() {
            let (next, (processed, written)) = rayon::join(
                || placer.next_wave(input, &mut ended),
                || rayon::join(|| self.process_all(raw), || storer.store(done)),
            );
            written?;
            done = processed?;
            raw = next?;
            self.meter.pending(raw.iter().map(|chunk| chunk.data.len() as u64).sum());
            self.meter.stored(storer.packs.stored_bytes());
        }
        self.meter.end();
        storer.finish(self.checksum, placer.placed)
    }

    fn process_all(&self, raw: Vec<RawChunk>) -> Result<Vec<DoneChunk>> {
        raw.into_par_iter().with_max_len(1).map(|chunk| self.process(chunk)).collect()
    }

    /// Processes a chunk in one pass, while its bytes are in the processor's cache.
    fn process(&self, chunk: RawChunk) -> Result<DoneChunk> {
        let RawChunk { index, data, digest, reusable } = chunk;
        let digest = digest.unwrap_or_else(|| Digest::of(&data));
        let checksum_len = self.checksum.size();
        let mut checksums = Vec::with_capacity(data.len() / BLOCK_SIZE as usize * checksum_len);
        for block in data.chunks(BLOCK_SIZE as usize) {
            checksums.extend_from_slice(&self.checksum.of(block).to_le_bytes()[..checksum_len]);
        }
        let len = data.len() as u64;
        let blocks = (len / BLOCK_SIZE) as u8;
        let known = if reusable { self.known.find(&digest, blocks) } else { None };
        let stored = match known {
            Some(index) => Stored::Known(index),
            None if self.derived => Stored::Derived,
            None => {
                let (codec, bytes) = compress(data, self.level)?;
                Stored::New(codec, bytes)
            }
        };
        self.meter.done(len);
        Ok(DoneChunk { index, blocks, digest, checksums, stored, reusable })
    }
}

/// Assigns pieces to chunks.
#[derive(Default)]
struct Placer {
    grouping: Grouping,
    /// Pieces of this image: chunk and offset.
    seen: HashMap<Digest, (u32, u32)>,
    placed: Placed,
    /// Chunks numbered so far.
    chunks: u32,
    group: Vec<u8>,
    group_index: u32,
    /// The current pieces are those that the profile puts first.
    first: bool,
}

impl Placer {
    /// Takes the next wave and returns the chunks that it completes.
    fn next_wave(&mut self, input: &mut impl Input, ended: &mut bool) -> Result<Vec<RawChunk>> {
        let mut out = Vec::new();
        if *ended {
            return Ok(out);
        }
        match input.next()? {
            Some(wave) => {
                if self.first && !wave.comes_first {
                    self.close_group(&mut out);
                }
                self.first = wave.comes_first;
                self.placed.inline.extend(wave.inline);
                wave.pieces.into_iter().for_each(|piece| self.place(piece, &mut out));
            }
            None => {
                *ended = true;
                self.close_group(&mut out);
            }
        }
        Ok(out)
    }

    fn reserve(&mut self) -> u32 {
        self.chunks += 1;
        self.chunks - 1
    }

    fn place(&mut self, piece: Piece, out: &mut Vec<RawChunk>) {
        let len = piece.data.len();
        let (chunk, offset) = match self.seen.get(&piece.digest) {
            Some(at) => *at,
            None => {
                let alone = self.grouping.is_alone(len);
                let at = if alone { (self.reserve(), 0) } else { self.join_group(&piece, out) };
                self.seen.insert(piece.digest, at);
                let of_chunk =
                    |origin: &Origin| (at.0, Origin { at: u64::from(at.1) + origin.at, ..*origin });
                self.placed.origins.extend(piece.origins.iter().map(of_chunk));
                if alone {
                    let (data, digest) = (piece.data, Some(piece.digest));
                    out.push(RawChunk { index: at.0, data, digest, reusable: !self.first });
                }
                at
            }
        };
        let (node, file_offset) = (piece.node, piece.file_offset);
        self.placed.extents.push(Extent { node, file_offset, chunk, offset, len: len as u32 });
    }

    /// Appends a short piece to the open group, which is closed first if it must be cut here.
    fn join_group(&mut self, piece: &Piece, out: &mut Vec<RawChunk>) -> (u32, u32) {
        if self.grouping.ends(self.group.len(), piece.data.len(), &piece.digest) {
            self.close_group(out);
        }
        if self.group.is_empty() {
            self.group_index = self.reserve();
        }
        let offset = self.group.len() as u32;
        self.group.extend_from_slice(&piece.data);
        (self.group_index, offset)
    }

    fn close_group(&mut self, out: &mut Vec<RawChunk>) {
        if !self.group.is_empty() {
            let data = std::mem::take(&mut self.group);
            let (index, reusable) = (self.group_index, !self.first);
            out.push(RawChunk { index, data, digest: None, reusable });
        }
    }
}

/// Writes finished chunks to packs and tables.
struct Storer<'a> {
    known: &'a Known,
    packs: PackWriter,
    chunks: Vec<Option<PlacedChunk>>,
    checksums: Vec<Vec<u8>>,
    /// The previous chunk is one that the profile puts first.
    apart: bool,
}

impl Storer<'_> {
    /// Appends chunks to packs, in order.
    fn store(&mut self, done: Vec<DoneChunk>) -> Result<()> {
        for chunk in done {
            // Chunks that come first get packs of their own, which are the same however the rest
            // is stored.
            if std::mem::replace(&mut self.apart, !chunk.reusable) && chunk.reusable {
                self.packs.close()?;
            }
            let (place, stored, codec) = match chunk.stored {
                Stored::New(codec, bytes) => {
                    let (pack, stored) = self.packs.append(&bytes)?;
                    (ObjectRef::New(pack), stored, codec)
                }
                Stored::Known(index) => {
                    let known = &self.known.chunks[index as usize];
                    (ObjectRef::Known(known.object), known.stored, known.codec)
                }
                // The position in the object is known after the last chunk.
                Stored::Derived => (ObjectRef::Derived, NOWHERE, Codec::Raw),
            };
            let (blocks, digest) = (chunk.blocks, chunk.digest);
            let index = chunk.index as usize;
            if index >= self.chunks.len() {
                self.chunks.resize_with(index + 1, || None);
                self.checksums.resize_with(index + 1, Vec::new);
            }
            self.chunks[index] = Some(PlacedChunk { blocks, place, stored, codec, digest });
            self.checksums[index] = chunk.checksums;
        }
        Ok(())
    }

    /// Closes the packs and numbers the objects by first use.
    fn finish(self, checksum: ChecksumKind, mut placed: Placed) -> Result<Assembled> {
        let new_bytes = self.packs.stored_bytes();
        let packs = self.packs.finish()?;
        let mut known_bytes = 0;
        let mut objects = Vec::new();
        let mut number_of = HashMap::new();
        let mut chunks = Vec::with_capacity(self.chunks.len());
        let mut starts = Vec::with_capacity(self.chunks.len());
        let mut next = 0;
        for chunk in self.chunks.into_iter().flatten() {
            let PlacedChunk { blocks, mut stored, codec, digest, place } = chunk;
            let mut number = |object: ObjectId| match number_of.entry(place) {
                Entry::Occupied(number) => *number.get(),
                Entry::Vacant(entry) => {
                    objects.push(object);
                    *entry.insert(objects.len() as u32 - 1)
                }
            };
            let len = u64::from(blocks) * BLOCK_SIZE;
            let object = match place {
                ObjectRef::New(index) => number(packs[index as usize].clone()),
                ObjectRef::Known(index) => {
                    known_bytes += stored.len();
                    number(self.known.objects[index as usize].clone())
                }
                // The only object; its layout is that of the lazy address space.
                ObjectRef::Derived => {
                    stored = ByteRange::at(next, len).unwrap_or(NOWHERE);
                    0
                }
            };
            starts.push(next);
            next += len;
            chunks.push(ChunkEntry { blocks, object, stored, codec, digest });
        }
        placed.origins.sort_unstable_by_key(|(chunk, origin)| (*chunk, origin.at));
        let origins = placed.origins.drain(..);
        let origins = origins
            .map(|(chunk, origin)| Origin { at: starts[chunk as usize] + origin.at, ..origin });
        let origins = origins.collect();
        let manifest = Manifest {
            tree: Default::default(),
            checksum,
            chunks,
            objects,
            block_checksums: self.checksums.concat(),
        };
        Ok(Assembled { placed, manifest, new_bytes, known_bytes, origins })
    }
}
