//! Images of tar archives.
//!
//! The archive is read once, as a stream: headers become nodes at once, and data passes through
//! the same waves as that of a directory. Invariant: a name cannot leave the tree: `..`, absolute
//! names and names below anything but a directory are refused; symlinks above a name are followed
//! within the tree. (For several layers see `layers`; for layers that keep their data, `describe`
//! and `listed`.)

mod acl;
mod attributes;
mod compare;
mod describe;
mod entry;
mod gzip;
mod layers;
mod listed;
mod merge;
mod reader;
mod records;
mod resolve;
mod tree;

use std::{
    io::{self, BufRead, BufReader, Read},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
};

use burgeon_block::{BLOCK_SIZE, Digest, Error, MemoryMeter, ObjectStore, Result};
use rayon::prelude::*;

pub use self::{
    compare::{Sha256, first_difference},
    describe::{Description, OnDescribed, describe_layers},
    gzip::Gunzip,
    layers::{Layer, LayerHeaders, LayerLimits, Layers, OpenLayer, from_layers},
    listed::{FilePart, Listed},
};
use self::{
    entry::TarEntry,
    layers::{BLOCK_COST, Bounded},
    reader::{Reader, cannot_read},
    tree::ArchiveTree,
};
use super::{
    BuildOptions, BuildReport, OnProgress, Progress,
    assemble::{Assembler, Input, Origin, Piece, Wave},
    check_options, manifest_of,
    meter::Meter,
    pool, publish,
    reuse::Known,
    writing,
};
use crate::{CHUNK_MAX, INLINE_MAX, pack::write_packs};

/// Bytes of a wave: 16 MiB. Three are in memory, besides a decoder's window of up to 128 MiB.
const WAVE_LEN: u64 = 16 << 20;
/// Memory limit for xz: `xz -9` needs 65 MiB.
const XZ_MEMORY_MAX: u64 = 96 << 20;
/// Memory of a piece of a file until the manifest exists, without its data.
const PIECE_COST: u64 = 128;
/// Additional memory of a piece listed in a sparse file's map.
const MAPPED_COST: u64 = 96;

/// Builds an image of a tar archive (plain, or compressed with gzip, zstd or xz, which is
/// detected) and publishes it in `store` as `name`. `len` is the archive's length in bytes, if
/// known, for progress.
///
/// Errors: `Corrupt` for an archive that is damaged, truncated or hostile; `Invalid` for one that
/// btrfs cannot hold, or that takes more memory than its size and entries justify.
pub fn from_tar(
    store: &impl ObjectStore,
    name: &str,
    archive: impl Read + Send + 'static,
    len: Option<u64>,
    options: &BuildOptions,
    progress: OnProgress<'_>,
) -> Result<BuildReport> {
    check_options(name, options)?;
    pool(options)?.install(|| {
        writing(store, |scratch, added| {
            let known = Known::read(store, options)?;
            let consumed = Arc::new(AtomicU64::new(0));
            let entries = AtomicU64::new(0);
            let report = |_, stored_bytes| {
                progress(&Progress {
                    entries: entries.load(Relaxed),
                    entries_total: None,
                    bytes: consumed.load(Relaxed),
                    bytes_total: len,
                    stored_bytes,
                });
            };
            let meter = &Meter::new(&report);
            let layers = Layers::new(LayerLimits::of_archive());
            let memory = Some(Arc::clone(layers.meter()));
            let archive =
                decompressed(Counted { inner: archive, bytes: consumed.clone(), memory })?;
            let archive = Some(layers.bounded(archive));
            let tree = ArchiveTree::new(layers.meter());
            let one = OneArchive { archive, layers: &layers, tree };
            let mut input = TarInput::new(one, layers.meter(), WAVE_LEN, &entries);
            let BuildOptions { level, checksum, grouping, .. } = *options;
            let (known, derived) = (&known, false);
            let assembler = Assembler { level, checksum, grouping, known, meter, derived };
            let assembled =
                write_packs(store, scratch, added, |packs| assembler.run(&mut input, packs))?;
            let (new_bytes, reused_bytes) = (assembled.new_bytes, assembled.known_bytes);
            let acls_left_out = input.archives.tree.text_acls;
            let manifest = manifest_of(&input.archives.tree.into_nodes(), assembled)?;
            let image = publish(store, name, &manifest, options)?;
            Ok(BuildReport { new_bytes, reused_bytes, acls_left_out, ..BuildReport::of(image) })
        })
    })
}

/// Counts bytes read, also as input for the memory limit.
struct Counted<R> {
    inner: R,
    bytes: Arc<AtomicU64>,
    memory: Option<Arc<MemoryMeter>>,
}

impl<R: Read> Read for Counted<R> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        let len = self.inner.read(buf)?;
        self.bytes.fetch_add(len as u64, Relaxed);
        self.memory.iter().for_each(|meter| meter.input(len as u64));
        Ok(len)
    }
}

/// The decompressed archive; the format is detected from the first bytes.
fn decompressed(archive: impl Read + Send + 'static) -> Result<Box<dyn Read + Send>> {
    let mut archive = BufReader::with_capacity(1 << 20, archive);
    let start = archive.fill_buf().map_err(cannot_read)?;
    Ok(match start {
        [0x1f, 0x8b, ..] => Box::new(Gunzip::new(archive)),
        [0x28, 0xb5, 0x2f, 0xfd, ..] => {
            let decoder = zstd::stream::read::Decoder::with_buffer(archive);
            Box::new(decoder.map_err(|error| Error::io("cannot start zstd", error))?)
        }
        [0xfd, b'7', b'z', b'X', b'Z', 0, ..] => {
            let flags = liblzma::stream::CONCATENATED;
            let stream = liblzma::stream::Stream::new_stream_decoder(XZ_MEMORY_MAX, flags)
                .map_err(|error| Error::io("cannot start xz", error.into()))?;
            Box::new(liblzma::bufread::XzDecoder::new_stream(archive, stream))
        }
        _ => Box::new(archive),
    })
}

/// A file whose data is being read.
struct Open {
    node: u32,
    size: u64,
    /// Remaining data: offset and length, in reverse order.
    rest: Vec<(u64, u64)>,
}

type Archive = Box<dyn Read + Send>;

/// An archive with its read position.
struct Positioned<R> {
    archive: R,
    at: u64,
}

impl<R: Read> Read for Positioned<R> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        let len = self.archive.read(buf)?;
        self.at += len as u64;
        Ok(len)
    }
}

/// The archives to read, and the handling of their entries.
trait Archives: Send {
    type Archive: Read + Send;
    /// Their digests tell that they are whole.
    const ARE_LAYERS: bool;

    /// The next archive, once the previous one has ended.
    fn next(&mut self) -> Result<Option<Self::Archive>>;

    /// Takes an entry; returns its node if the data that follows is wanted.
    fn add(&mut self, entry: TarEntry) -> Result<Option<u32>>;

    /// The number of the current layer, if its data will be read again on demand.
    fn traced(&self) -> Option<u32> {
        None
    }
}

/// A single archive, whose entries are added to a tree as they are read.
struct OneArchive<'a> {
    archive: Option<Bounded<'a, Archive>>,
    layers: &'a Layers,
    tree: ArchiveTree<'a>,
}

impl<'a> Archives for OneArchive<'a> {
    type Archive = Bounded<'a, Archive>;
    const ARE_LAYERS: bool = false;

    fn next(&mut self) -> Result<Option<Self::Archive>> {
        Ok(self.archive.take())
    }

    fn add(&mut self, entry: TarEntry) -> Result<Option<u32>> {
        self.layers.count(&entry)?;
        self.tree.add(entry)
    }
}

/// Reads archives wave by wave.
struct TarInput<'a, A: Archives> {
    archives: A,
    meter: &'a MemoryMeter,
    /// The current archive.
    reader: Option<Reader<Positioned<A::Archive>>>,
    open: Option<Open>,
    ended: bool,
    /// Approximate bytes of a wave.
    wave_len: u64,
    entries: &'a AtomicU64,
}

impl<'a, A: Archives> TarInput<'a, A> {
    fn new(archives: A, meter: &'a MemoryMeter, wave_len: u64, entries: &'a AtomicU64) -> Self {
        Self { archives, meter, reader: None, open: None, ended: false, wave_len, entries }
    }

    /// Reads the header of the next entry and opens its data, if any.
    fn next_entry(&mut self) -> Result<()> {
        let Some(reader) = &mut self.reader else {
            let archive = self.archives.next()?;
            let reader = if A::ARE_LAYERS { Reader::of_layer } else { Reader::new };
            self.reader = archive.map(|archive| reader(Positioned { archive, at: 0 }));
            self.ended = self.reader.is_none();
            return Ok(());
        };
        let Some(mut entry) = reader.next()? else {
            reader.finish()?;
            self.reader = None;
            return Ok(());
        };
        let stored_len = entry.stored_len;
        let map = entry.map.take();
        let size = entry.size;
        let node = self.archives.add(entry)?;
        self.entries.fetch_add(1, Relaxed);
        match node {
            Some(node) => {
                self.meter.take(map.as_ref().map_or(0, |map| map.len() as u64 * MAPPED_COST))?;
                let mut rest = map.unwrap_or_else(|| vec![(0, size)]);
                rest.retain(|(_, len)| *len > 0);
                rest.reverse();
                self.open = Some(Open { node, size, rest });
                Ok(())
            }
            None => reader.skip(stored_len),
        }
    }

    /// Reads data of the open file: `limit` bytes, and up to `CHUNK_MAX` more, because a wave
    /// ends only at the end of a window (a block or a small file must not be split).
    fn read_data(&mut self, open: &mut Open, limit: u64, wave: &mut Cutter<'_>) -> Result<()> {
        let Some(reader) = &mut self.reader else { return Ok(()) };
        let traced = self.archives.traced();
        let small = open.size <= u64::from(INLINE_MAX);
        while let Some((offset, len)) = open.rest.pop() {
            let window = offset / u64::from(CHUNK_MAX);
            let window_end = (window + 1) * u64::from(CHUNK_MAX);
            let now = len.min(window_end - offset);
            if small {
                wave.inline(open, offset, now, reader.data())?;
            } else {
                let origin = traced.map(|layer| (layer, reader.data().at));
                wave.piece(open, offset, now, origin, reader.data())?;
            }
            if now < len {
                open.rest.push((offset + now, len - now));
            }
            let same_window = |(at, _): &(u64, u64)| at / u64::from(CHUNK_MAX) == window;
            if wave.bytes >= limit && !open.rest.last().is_some_and(same_window) {
                return Ok(());
            }
        }
        Ok(())
    }
}

/// A piece that is being read.
struct Cut {
    node: u32,
    offset: u64,
    data: Vec<u8>,
    origins: Vec<Origin>,
}

/// Cuts data into pieces: whole blocks, up to a chunk.
struct Cutter<'a> {
    meter: &'a MemoryMeter,
    pieces: Vec<Cut>,
    inline: Vec<(u32, Vec<u8>)>,
    /// Bytes of whole blocks and of inlined data, plus the cost of each piece and inlined file.
    bytes: u64,
}

impl<'a> Cutter<'a> {
    fn new(meter: &'a MemoryMeter) -> Self {
        Self { meter, pieces: Vec::new(), inline: Vec::new(), bytes: 0 }
    }

    /// Reads `len` bytes at `offset` of the file, within one window of `CHUNK_MAX`; `origin` is
    /// the layer and the offset in it.
    fn piece(
        &mut self,
        open: &Open,
        offset: u64,
        len: u64,
        origin: Option<(u32, u64)>,
        from: &mut impl Read,
    ) -> Result<()> {
        let start = offset / BLOCK_SIZE * BLOCK_SIZE;
        let same_window = |at: u64| at / u64::from(CHUNK_MAX) == offset / u64::from(CHUNK_MAX);
        let joins = self.pieces.last().is_some_and(|last| {
            let end = (last.offset + last.data.len() as u64).next_multiple_of(BLOCK_SIZE);
            last.node == open.node && same_window(last.offset) && start <= end
        });
        if !joins {
            let data = Vec::with_capacity(len.next_multiple_of(BLOCK_SIZE) as usize);
            let (node, offset, origins) = (open.node, start, Vec::new());
            self.pieces.push(Cut { node, offset, data, origins });
        }
        let Some(cut) = self.pieces.last_mut() else { return Ok(()) };
        let at = offset - cut.offset;
        // Blocks, not bytes: one byte of a sparse file takes the whole block around it.
        let blocks = |len: u64| len.div_ceil(BLOCK_SIZE);
        let new = blocks(at + len).saturating_sub(blocks(cut.data.len() as u64));
        self.meter.data(len);
        self.meter.take(PIECE_COST + new * BLOCK_COST)?;
        self.bytes += PIECE_COST + new * BLOCK_SIZE;
        cut.data.resize(at as usize, 0);
        read_onto(&mut cut.data, len, from)?;
        if let Some((layer, offset)) = origin {
            cut.origins.push(Origin { at, layer, offset, len: len as u32 });
        }
        Ok(())
    }

    /// Reads a part of a small file, whose holes do not count.
    fn inline(&mut self, open: &Open, offset: u64, len: u64, from: &mut impl Read) -> Result<()> {
        if self.inline.last().is_none_or(|(node, _)| *node != open.node) {
            // The data is in memory as read, in the tree, and as a part of the manifest.
            self.meter.promise(4 * open.size);
            self.meter.take(3 * open.size)?;
            self.bytes += PIECE_COST + open.size;
            self.inline.push((open.node, Vec::new()));
        }
        let Some((_, data)) = self.inline.last_mut() else { return Ok(()) };
        data.resize(offset as usize, 0);
        read_onto(data, len, from)?;
        if open.rest.is_empty() {
            data.resize(open.size as usize, 0);
        }
        Ok(())
    }

    fn finish(self) -> Wave {
        let digest = |cut: Cut| {
            let Cut { node, offset: file_offset, mut data, origins } = cut;
            data.resize(data.len().next_multiple_of(BLOCK_SIZE as usize), 0);
            let digest = Digest::of(&data);
            Piece { node, file_offset, data, digest, origins }
        };
        Wave {
            pieces: self.pieces.into_par_iter().map(digest).collect(),
            inline: self.inline.into_iter().map(|(node, data)| (node, data.into())).collect(),
            comes_first: false,
        }
    }
}

fn read_onto(data: &mut Vec<u8>, len: u64, from: &mut impl Read) -> Result<()> {
    let read = from.take(len).read_to_end(data).map_err(cannot_read)?;
    if (read as u64) < len {
        return Err(cannot_read(io::ErrorKind::UnexpectedEof.into()));
    }
    Ok(())
}

impl<A: Archives> Input for TarInput<'_, A> {
    fn next(&mut self) -> Result<Option<Wave>> {
        if self.ended {
            return Ok(None);
        }
        let mut cutter = Cutter::new(self.meter);
        while !self.ended && cutter.bytes < self.wave_len {
            match self.open.take() {
                Some(mut open) => {
                    self.read_data(&mut open, self.wave_len, &mut cutter)?;
                    if !open.rest.is_empty() {
                        self.open = Some(open);
                    }
                }
                None => self.next_entry()?,
            }
        }
        Ok(Some(cutter.finish()))
    }
}
