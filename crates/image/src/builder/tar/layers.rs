//! Images of layers: archives, each of which states its differences from the layers below it.
//!
//! ```text
//!   once, in parallel:  Layers::headers ── all headers of a layer; data is skipped
//!   then:               Merge         ── the live files, and the sources of their data
//!   once more:          LiveArchives  ── the data of these files only
//! ```
//!
//! A file that a later layer removes is not in the image. Memory: the headers, bounded by
//! [`LayerLimits`] and counted on a [`MemoryMeter`]; never data.

use std::{
    io::{self, Read},
    iter::Peekable,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
};

use burgeon_block::{BLOCK_SIZE, Error, ErrorKind, MemoryMeter, ObjectStore, Result};

use super::{
    super::{
        BuildOptions, BuildReport, OnProgress, Progress, assemble::Assembler, check_options,
        manifest_of, meter::Meter, pool, publish, reuse::Known, writing,
    },
    Archive, Archives, Counted, Reader, TarInput, WAVE_LEN,
    entry::TarEntry,
    merge::{EntryRef, Merge, too_many},
};
use crate::{corrupt, pack::write_packs};

/// Limits for all layers of an image together; a single archive counts as one layer.
#[derive(Clone, Copy, Debug)]
pub struct LayerLimits {
    /// Entries.
    pub entries: u64,
    /// Bytes of names, link targets and attributes.
    pub names: u64,
    /// Bytes of the archives, uncompressed.
    pub unpacked: u64,
}

impl Default for LayerLimits {
    /// 4 Mi entries (at 300 bytes each 1.2 GiB of memory, more than any known image), 512 MiB of
    /// names, 256 GiB unpacked.
    fn default() -> Self {
        Self { entries: 4 << 20, names: 512 << 20, unpacked: 256 << 30 }
    }
}

impl LayerLimits {
    /// Limits of a single archive, whose data is streamed and not read twice: 16 TiB unpacked.
    pub(super) fn of_archive() -> Self {
        Self { unpacked: 16 << 40, ..Self::default() }
    }
}

/// Memory that an entry takes until the manifest exists, without its names and data.
const ENTRY_COST: u64 = 352;
/// Bytes of names that fit in a header.
const HEADER_NAMES_MAX: u64 = 355;
/// Memory of an extended attribute, without its bytes.
const XATTR_COST: u64 = 64;
/// Memory of the checksum of a block, in three stages.
pub(super) const BLOCK_COST: u64 = 12;

/// Reads the headers of an image's layers.
#[derive(Debug)]
pub struct Layers {
    limits: LayerLimits,
    meter: Arc<MemoryMeter>,
    entries: AtomicU64,
    names: AtomicU64,
    unpacked: AtomicU64,
}

/// The entries of one layer.
pub struct LayerHeaders {
    /// All entries, in order.
    entries: Vec<TarEntry>,
    unpacked: u64,
    meter: Arc<MemoryMeter>,
}

/// A layer to build from.
pub struct Layer {
    /// Its headers.
    pub headers: LayerHeaders,
    /// Opens the same archive whose headers were read, decompressed.
    pub open: OpenLayer,
}

/// Opens a layer's archive, decompressed.
pub type OpenLayer = Box<dyn FnOnce() -> Result<Box<dyn Read + Send>> + Send>;

impl Layers {
    /// For the layers of one image, before any is read.
    pub fn new(limits: LayerLimits) -> Self {
        let (meter, entries, names, unpacked) = Default::default();
        Self { limits, meter, entries, names, unpacked }
    }

    /// Counts the memory taken. The caller must report the compressed input to it as it arrives.
    pub fn meter(&self) -> &Arc<MemoryMeter> {
        &self.meter
    }

    /// Reads a decompressed layer to its end. Several threads may read one layer each.
    ///
    /// Errors: `Corrupt` for a damaged or hostile archive, `Invalid` beyond a limit.
    pub fn headers(&self, archive: impl Read) -> Result<LayerHeaders> {
        let mut reader = Reader::of_layer(self.bounded(archive));
        let mut entries = Vec::new();
        while let Some(mut entry) = reader.next()? {
            reader.skip(entry.stored_len)?;
            // The data is read later, from the archive.
            entry.map = None;
            self.count(&entry)?;
            entries.push(entry);
        }
        reader.finish()?;
        let unpacked = reader.data().read;
        Ok(LayerHeaders { entries, unpacked, meter: Arc::clone(&self.meter) })
    }

    /// The archive, with an error where the limit for all layers is reached.
    pub(super) fn bounded<R: Read>(&self, archive: R) -> Bounded<'_, R> {
        Bounded { inner: archive, layers: self, read: 0 }
    }

    /// Counts one more entry; `Invalid` if there are too many or they are too long.
    pub(super) fn count(&self, entry: &TarEntry) -> Result<()> {
        let mut amount = Amount::default();
        amount.add(entry);
        self.take(&amount)
    }

    /// Adds `amount`; adds nothing of it if that is `Invalid`.
    pub(super) fn take(&self, amount: &Amount) -> Result<()> {
        let Amount { entries, names, unpacked, own_bytes, memory, headers } = *amount;
        self.meter.headers(headers)?;
        let Self { limits, .. } = self;
        let all = [
            (&self.names, names, limits.names),
            (&self.entries, entries, limits.entries),
            (&self.unpacked, unpacked, limits.unpacked),
        ];
        let over_which =
            all.iter().position(|(taken, more, limit)| take(taken, *more, *limit).is_none());
        let Some(which) = over_which else {
            self.meter.entries(entries, own_bytes);
            self.meter.data(unpacked);
            return self.meter.take(memory.saturating_add(unpacked / BLOCK_SIZE * BLOCK_COST));
        };
        for (taken, more, _) in &all[..=which] {
            taken.fetch_sub(*more, Relaxed);
        }
        Err(match which {
            0 => over("bytes of names and attributes", limits.names),
            1 => too_many(limits.entries),
            _ => over("bytes, unpacked", limits.unpacked),
        })
    }
}

/// The part of the limits that a layer uses.
#[derive(Default)]
pub(super) struct Amount {
    pub(super) entries: u64,
    names: u64,
    pub(super) unpacked: u64,
    /// Bytes of names and attributes in the headers of these entries alone: a record that applies
    /// to all following entries costs nothing to repeat.
    own_bytes: u64,
    memory: u64,
    /// Bytes of headers that are not an entry's own.
    headers: u64,
}

impl Amount {
    /// Adds one entry, without its data.
    pub(super) fn add(&mut self, entry: &TarEntry) {
        let xattrs = entry.xattrs.iter().map(|(name, value)| name.len() + value.len());
        let xattrs = xattrs.sum::<usize>() as u64;
        let names = (entry.path.len() + entry.link.len()) as u64;
        self.names += names + xattrs;
        self.own_bytes += names.min(HEADER_NAMES_MAX) + entry.extended;
        self.entries += 1;
        self.headers += entry.headers;
        // Names and attributes are in memory twice: as read, and in the tree.
        let attributes = entry.xattrs.len() as u64 * XATTR_COST;
        self.memory += ENTRY_COST + 2 * (names + xattrs + attributes);
    }
}

/// Adds to `taken`; `None` beyond `limit`.
fn take(taken: &AtomicU64, more: u64, limit: u64) -> Option<()> {
    (taken.fetch_add(more, Relaxed).saturating_add(more) <= limit).then_some(())
}

fn over(what: &str, limit: u64) -> Error {
    let what =
        format!("the archive has more than {limit} {what}: unpack it, and build from the folder");
    Error::new(ErrorKind::Invalid, what)
}

/// An archive that fails with an error at the limit.
pub(super) struct Bounded<'a, R> {
    inner: R,
    layers: &'a Layers,
    read: u64,
}

impl<R: Read> Read for Bounded<'_, R> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        let len = self.inner.read(buf)?;
        self.read += len as u64;
        let limit = self.layers.limits.unpacked;
        take(&self.layers.unpacked, len as u64, limit)
            .ok_or_else(|| io::Error::other(over("bytes, unpacked", limit)))?;
        Ok(len)
    }
}

/// Builds an image of `layers`, the lowest first, and publishes it in `store` as `name`.
///
/// Errors: `Corrupt` for layers that do not fit together or differ from their headers, `Invalid`
/// for a tree that btrfs cannot hold; those of opening and reading the layers.
pub fn from_layers(
    store: &impl ObjectStore,
    name: &str,
    layers: Vec<Layer>,
    options: &BuildOptions,
    progress: OnProgress<'_>,
) -> Result<BuildReport> {
    check_options(name, options)?;
    pool(options)?.install(|| {
        writing(store, |scratch, added| {
            let known = Known::read(store, options)?;
            let limits = LayerLimits::default();
            let meter =
                layers.first().map(|layer| Arc::clone(&layer.headers.meter)).unwrap_or_default();
            let mut merge = Merge::new(limits.entries as usize, Arc::clone(&meter));
            let (mut text_acls, mut total, mut entries_total) = (0, 0, 0);
            let mut archives = Vec::with_capacity(layers.len());
            for (number, layer) in (0..).zip(layers) {
                let entries = layer.headers.entries;
                merge.layer(number, &entries)?;
                text_acls += entries.iter().filter(|entry| entry.text_acl).count() as u64;
                entries_total += entries.len() as u64;
                total += layer.headers.unpacked;
                archives.push((number, layer.open));
            }
            let (nodes, wanted) = merge.finish();
            let (bytes, entries) = (Arc::new(AtomicU64::new(0)), AtomicU64::new(0));
            let report = |_, stored_bytes| {
                progress(&Progress {
                    entries: entries.load(Relaxed),
                    entries_total: Some(entries_total),
                    bytes: bytes.load(Relaxed),
                    bytes_total: Some(total),
                    stored_bytes,
                });
            };
            let progress = Meter::new(&report);
            let wanted = LiveArchives {
                archives: archives.into_iter(),
                wanted: wanted.into_iter().peekable(),
                next: (0, 0),
                bytes: Arc::clone(&bytes),
            };
            let mut input = TarInput::new(wanted, &meter, WAVE_LEN, &entries);
            let BuildOptions { level, checksum, grouping, .. } = *options;
            let (known, meter, derived) = (&known, &progress, false);
            let assembler = Assembler { level, checksum, grouping, known, meter, derived };
            let assembled =
                write_packs(store, scratch, added, |packs| assembler.run(&mut input, packs))?;
            let (new_bytes, reused_bytes) = (assembled.new_bytes, assembled.known_bytes);
            let manifest = manifest_of(&nodes, assembled)?;
            let image = publish(store, name, &manifest, options)?;
            Ok(BuildReport {
                new_bytes,
                reused_bytes,
                acls_left_out: text_acls,
                ..BuildReport::of(image)
            })
        })
    })
}

/// Reads the layers again, for the data of the live files.
struct LiveArchives {
    archives: std::vec::IntoIter<(u32, OpenLayer)>,
    wanted: Peekable<std::vec::IntoIter<(EntryRef, u32)>>,
    next: EntryRef,
    bytes: Arc<AtomicU64>,
}

impl Archives for LiveArchives {
    type Archive = Archive;
    const ARE_LAYERS: bool = true;

    fn next(&mut self) -> Result<Option<Archive>> {
        for (number, open) in self.archives.by_ref() {
            match self.wanted.peek() {
                Some(((layer, _), _)) if *layer == number => {
                    self.next = (number, 0);
                    let bytes = Arc::clone(&self.bytes);
                    // Their memory was counted when they were indexed.
                    let archive = Counted { inner: open()?, bytes, memory: None };
                    return Ok(Some(Box::new(archive)));
                }
                Some(((layer, _), _)) if *layer < number => break,
                _ => {}
            }
        }
        match self.wanted.peek() {
            None => Ok(None),
            Some(_) => Err(corrupt("a layer is shorter than it was when it was looked at")),
        }
    }

    fn add(&mut self, _entry: TarEntry) -> Result<Option<u32>> {
        let place = self.next;
        self.next.1 += 1;
        Ok(self.wanted.next_if(|(wanted, _)| *wanted == place).map(|(_, node)| node))
    }
}
