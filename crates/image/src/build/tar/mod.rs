//! Images of tar archives.
//!
//! The archive is read as a stream, once; what it says becomes nodes at once and its data goes
//! through the same waves as that of a directory. Invariant: a name cannot leave the tree: `..`,
//! absolute names and names below anything but a directory are refused. (Several archives, one
//! above the other: `layers`.)

mod acl;
mod layers;
mod merge;
mod reader;
mod records;
mod tree;

use std::{
    io::{self, BufRead, BufReader, Read},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
};

use burgeon_block::{BLOCK_SIZE, Digest, Error, ObjectStore, Result};
use rayon::prelude::*;

pub use self::layers::{Layer, LayerIndex, LayerLimits, Layers, OpenLayer, from_layers};
use self::{
    reader::{Entry, Reader, cannot_read},
    tree::ArchiveTree,
};
use super::{
    OnProgress, Options, Progress, Report,
    assemble::{Assembler, Input, Piece, Wave},
    check_options, manifest_of,
    meter::Meter,
    pool, publish,
    read::WAVE_LEN,
    reuse::Known,
};
use crate::{CHUNK_MAX, INLINE_MAX, pack::write_packs};

/// Builds an image of a tar archive (plain, or compressed with gzip, zstd or xz, which is
/// recognised) and publishes it in `store` as `name`. `len` is the archive's length in bytes, if
/// known, for progress.
///
/// Errors: `Corrupt` for an archive that is damaged, truncated or hostile, `Invalid` for one
/// that btrfs cannot hold.
pub fn from_tar(
    store: &impl ObjectStore,
    name: &str,
    archive: impl Read + Send + 'static,
    len: Option<u64>,
    options: &Options,
    progress: OnProgress<'_>,
) -> Result<Report> {
    check_options(name, options)?;
    pool(options)?.install(|| {
        let lease = store.begin_write()?;
        let known = if options.reuse { Known::read(store)? } else { Known::default() };
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
        let meter = Meter::new(&report);
        let archive = decompressed(Counted { inner: archive, bytes: consumed.clone() })?;
        let one = OneArchive { archive: Some(archive), tree: ArchiveTree::new() };
        let mut input = TarInput::new(one, &entries);
        let Options { level, checksum, .. } = *options;
        let assembler = Assembler { level, checksum, known: &known, meter: &meter };
        let assembled =
            write_packs(store, lease.scratch(), |packs| assembler.run(&mut input, packs))?;
        let (new_bytes, reused_bytes) = (assembled.new_bytes, assembled.known_bytes);
        let acls_left_out = input.archives.tree.text_acls;
        let manifest = manifest_of(&input.archives.tree.into_nodes(), assembled)?;
        let image = publish(store, name, &manifest, level)?;
        Ok(Report { new_bytes, reused_bytes, acls_left_out, ..Report::of(image) })
    })
}

/// Counts what is read.
struct Counted<R> {
    inner: R,
    bytes: Arc<AtomicU64>,
}

impl<R: Read> Read for Counted<R> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        let len = self.inner.read(buf)?;
        self.bytes.fetch_add(len as u64, Relaxed);
        Ok(len)
    }
}

/// The archive itself, by what it begins with.
fn decompressed(archive: impl Read + Send + 'static) -> Result<Box<dyn Read + Send>> {
    let mut archive = BufReader::with_capacity(1 << 20, archive);
    let start = archive.fill_buf().map_err(cannot_read)?;
    Ok(match start {
        [0x1f, 0x8b, ..] => Box::new(flate2::bufread::MultiGzDecoder::new(archive)),
        [0x28, 0xb5, 0x2f, 0xfd, ..] => {
            let decoder = zstd::stream::read::Decoder::with_buffer(archive);
            Box::new(decoder.map_err(|error| Error::io("cannot start zstd", error))?)
        }
        [0xfd, b'7', b'z', b'X', b'Z', 0, ..] => {
            Box::new(liblzma::bufread::XzDecoder::new_multi_decoder(archive))
        }
        _ => Box::new(archive),
    })
}

/// A file whose data is being read.
struct Open {
    node: u32,
    size: u64,
    /// What is still to be read: offset and length, in reverse order.
    rest: Vec<(u64, u64)>,
}

type Archive = Box<dyn Read + Send>;

/// What is read, and what becomes of it.
trait Archives: Send {
    /// The next archive, once the one before has ended.
    fn next(&mut self) -> Result<Option<Archive>>;

    /// Takes an entry; returns its node if that wants the data that follows.
    fn add(&mut self, entry: Entry) -> Result<Option<u32>>;
}

/// A single archive, whose entries add up to a tree while they are read.
struct OneArchive {
    archive: Option<Archive>,
    tree: ArchiveTree,
}

impl Archives for OneArchive {
    fn next(&mut self) -> Result<Option<Archive>> {
        Ok(self.archive.take())
    }

    fn add(&mut self, entry: Entry) -> Result<Option<u32>> {
        self.tree.add(entry)
    }
}

/// Reads archives wave by wave.
struct TarInput<'a, A> {
    archives: A,
    /// The archive that is being read.
    reader: Option<Reader<Archive>>,
    open: Option<Open>,
    ended: bool,
    entries: &'a AtomicU64,
}

impl<'a, A: Archives> TarInput<'a, A> {
    fn new(archives: A, entries: &'a AtomicU64) -> Self {
        Self { archives, reader: None, open: None, ended: false, entries }
    }

    /// Reads the header of the next entry. Data, if any, is then open.
    fn next_entry(&mut self) -> Result<()> {
        let Some(reader) = &mut self.reader else {
            self.reader = self.archives.next()?.map(Reader::new);
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
                let mut rest = map.unwrap_or_else(|| vec![(0, size)]);
                rest.retain(|(_, len)| *len > 0);
                rest.reverse();
                self.open = Some(Open { node, size, rest });
                Ok(())
            }
            None => reader.skip(stored_len),
        }
    }

    /// Reads data of the open file: `limit` bytes or, as only a window's end ends a wave (a block
    /// or a small file must not be cut in two), up to `CHUNK_MAX` more.
    fn read_data(&mut self, open: &mut Open, limit: u64, wave: &mut Cutter) -> Result<()> {
        let Some(reader) = &mut self.reader else { return Ok(()) };
        let small = open.size <= u64::from(INLINE_MAX);
        while let Some((offset, len)) = open.rest.pop() {
            let window = offset / u64::from(CHUNK_MAX);
            let window_end = (window + 1) * u64::from(CHUNK_MAX);
            let now = len.min(window_end - offset);
            if small {
                wave.inline(open, offset, now, reader.data())?;
            } else {
                wave.piece(open, offset, now, reader.data())?;
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

/// Cuts data into pieces: whole blocks, up to a chunk.
#[derive(Default)]
struct Cutter {
    /// Node, whether it is a big file, offset, data.
    pieces: Vec<(u32, bool, u64, Vec<u8>)>,
    inline: Vec<(u32, Vec<u8>)>,
    bytes: u64,
}

impl Cutter {
    /// Reads `len` bytes at `offset` of the file, within one window of `CHUNK_MAX`.
    fn piece(&mut self, open: &Open, offset: u64, len: u64, from: &mut impl Read) -> Result<()> {
        let start = offset / BLOCK_SIZE * BLOCK_SIZE;
        let same_window = |at: u64| at / u64::from(CHUNK_MAX) == offset / u64::from(CHUNK_MAX);
        let joins = self.pieces.last().is_some_and(|(node, _, at, data)| {
            let end = (at + data.len() as u64).next_multiple_of(BLOCK_SIZE);
            *node == open.node && same_window(*at) && start <= end
        });
        if !joins {
            let big = open.size > u64::from(CHUNK_MAX);
            let data = Vec::with_capacity(len.next_multiple_of(BLOCK_SIZE) as usize);
            self.pieces.push((open.node, big, start, data));
        }
        let Some((_, _, at, data)) = self.pieces.last_mut() else { return Ok(()) };
        data.resize((offset - *at) as usize, 0);
        read_onto(data, len, from)?;
        self.bytes += len;
        Ok(())
    }

    /// Reads a part of a small file, whose holes do not count.
    fn inline(&mut self, open: &Open, offset: u64, len: u64, from: &mut impl Read) -> Result<()> {
        if self.inline.last().is_none_or(|(node, _)| *node != open.node) {
            self.inline.push((open.node, Vec::new()));
        }
        let Some((_, data)) = self.inline.last_mut() else { return Ok(()) };
        data.resize(offset as usize, 0);
        read_onto(data, len, from)?;
        if open.rest.is_empty() {
            data.resize(open.size as usize, 0);
        }
        self.bytes += len;
        Ok(())
    }

    fn finish(self) -> Wave {
        let digest = |(node, of_big_file, file_offset, mut data): (u32, bool, u64, Vec<u8>)| {
            data.resize(data.len().next_multiple_of(BLOCK_SIZE as usize), 0);
            let digest = Digest::of(&data);
            Piece { node, file_offset, data, digest, of_big_file }
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
        let mut cutter = Cutter::default();
        while !self.ended && cutter.bytes < WAVE_LEN {
            match self.open.take() {
                Some(mut open) => {
                    self.read_data(&mut open, WAVE_LEN, &mut cutter)?;
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
