//! Images of layers: archives, each of which says what is different from those below it.
//!
//! ```text
//!   once, in parallel:  Layers::index ── every header of a layer, its data passed over
//!   then:               Merge         ── which files last, and where their data is
//!   once more:          Wanted        ── the data of these alone, as of any archive
//! ```
//!
//! What a layer puts and a later one takes away is not in the image. Memory: the headers, bounded
//! by [`LayerLimits`]; never data.

use std::{
    io::{self, Read},
    iter::Peekable,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
};

use burgeon_block::{Error, ErrorKind, ObjectId, ObjectStore, Result};

use super::{
    super::{
        OnProgress, Options, Progress, Report,
        assemble::{Assembler, Origin},
        check_options, manifest_of,
        meter::Meter,
        pool, publish,
        reuse::Known,
    },
    Archive, Archives, Counted, Reader, TarInput,
    merge::{Merge, Place, too_many},
    reader::Entry,
};
use crate::{corrupt, pack::write_packs};

/// What layers may take, all of an image together.
#[derive(Clone, Copy, Debug)]
pub struct LayerLimits {
    /// Entries.
    pub entries: u64,
    /// Bytes of names, link targets and attributes.
    pub names: u64,
    /// Bytes of the archives, not compressed.
    pub unpacked: u64,
}

impl Default for LayerLimits {
    /// 4 Mi entries (at 300 bytes each 1.2 GiB of memory, more than any image is known to have),
    /// 512 MiB of names, 256 GiB unpacked.
    fn default() -> Self {
        Self { entries: 4 << 20, names: 512 << 20, unpacked: 256 << 30 }
    }
}

/// Reads the headers of an image's layers.
#[derive(Debug)]
pub struct Layers {
    limits: LayerLimits,
    entries: AtomicU64,
    names: AtomicU64,
    unpacked: AtomicU64,
}

/// What one layer says.
pub struct LayerIndex {
    /// All of them, in order.
    entries: Vec<Entry>,
    unpacked: u64,
}

/// A layer to build from.
pub struct Layer {
    /// What it says.
    pub index: LayerIndex,
    /// Opens the very archive that the index is of, decompressed.
    pub open: OpenLayer,
}

/// Opens a layer's archive, decompressed.
pub type OpenLayer = Box<dyn FnOnce() -> Result<Box<dyn Read + Send>> + Send>;

impl Layers {
    /// For the layers of one image, none of which is read yet.
    pub fn new(limits: LayerLimits) -> Self {
        let (entries, names, unpacked) = Default::default();
        Self { limits, entries, names, unpacked }
    }

    /// Reads a layer, decompressed, to its end. Several threads may read one each.
    ///
    /// Errors: `Corrupt` for a damaged or hostile archive, `Invalid` where the limits end.
    pub fn index(&self, archive: impl Read) -> Result<LayerIndex> {
        let mut reader = Reader::new(Bounded { inner: archive, layers: self, read: 0 });
        let mut entries = Vec::new();
        while let Some(mut entry) = reader.next()? {
            reader.skip(entry.stored_len)?;
            // The data is read later, from the archive.
            entry.map = None;
            let xattrs = entry.xattrs.iter().map(|(name, value)| name.len() + value.len());
            let names = entry.path.len() + entry.link.len() + xattrs.sum::<usize>();
            take(&self.names, names as u64, self.limits.names)
                .ok_or_else(|| over("bytes of names and attributes", self.limits.names))?;
            take(&self.entries, 1, self.limits.entries)
                .ok_or_else(|| too_many(self.limits.entries))?;
            entries.push(entry);
        }
        reader.finish()?;
        let unpacked = reader.data().read;
        Ok(LayerIndex { entries, unpacked })
    }
}

/// Adds to what is taken; `None` if that is more than `limit`.
fn take(taken: &AtomicU64, more: u64, limit: u64) -> Option<()> {
    (taken.fetch_add(more, Relaxed).saturating_add(more) <= limit).then_some(())
}

fn over(what: &str, limit: u64) -> Error {
    let what =
        format!("the layers have more than {limit} {what}: unpack them, and build from the folder");
    Error::new(ErrorKind::Invalid, what)
}

/// An archive that ends with an error where the limit ends.
struct Bounded<'a, R> {
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
/// Errors: `Corrupt` for layers that do not fit together or are not what their index says,
/// `Invalid` for a tree that btrfs cannot hold; those of opening and reading the layers.
pub fn from_layers(
    store: &impl ObjectStore,
    name: &str,
    layers: Vec<Layer>,
    options: &Options,
    progress: OnProgress<'_>,
) -> Result<Report> {
    build(store, name, layers, options, progress, None)
}

/// Gives the object that a described image's data is in, made of where that lies in the layers:
/// by address, from 0 to the length that is the second.
pub type OnDescribed<'a> = &'a (dyn Fn(&[Origin], u64) -> Result<ObjectId> + Sync);

/// Publishes an image of `layers` as [`from_layers`] does, but stores no data: that lies, as it is
/// in the lazy address space, in the one object that `object` gives, which can be read from the
/// layers.
pub fn describe_layers(
    store: &impl ObjectStore,
    name: &str,
    layers: Vec<Layer>,
    options: &Options,
    progress: OnProgress<'_>,
    object: OnDescribed<'_>,
) -> Result<Report> {
    build(store, name, layers, options, progress, Some(object))
}

fn build(
    store: &impl ObjectStore,
    name: &str,
    layers: Vec<Layer>,
    options: &Options,
    progress: OnProgress<'_>,
    object: Option<OnDescribed<'_>>,
) -> Result<Report> {
    check_options(name, options)?;
    pool(options)?.install(|| {
        let lease = store.begin_write()?;
        let reuse = options.reuse && object.is_none();
        let known = if reuse { Known::read(store)? } else { Known::default() };
        let limits = LayerLimits::default();
        let mut merge = Merge::new(limits.entries as usize);
        let (mut text_acls, mut total, mut entries_total) = (0, 0, 0);
        let mut archives = Vec::with_capacity(layers.len());
        for (number, layer) in (0..).zip(layers) {
            let entries = layer.index.entries;
            merge.layer(number, &entries)?;
            text_acls += entries.iter().filter(|entry| entry.text_acl).count() as u64;
            entries_total += entries.len() as u64;
            total += layer.index.unpacked;
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
        let meter = Meter::new(&report);
        let wanted = Wanted {
            archives: archives.into_iter(),
            wanted: wanted.into_iter().peekable(),
            next: (0, 0),
            bytes: Arc::clone(&bytes),
            traced: object.is_some(),
        };
        let mut input = TarInput::new(wanted, &entries);
        let Options { level, checksum, .. } = *options;
        let derived = object.is_some();
        let assembler = Assembler { level, checksum, known: &known, meter: &meter, derived };
        let mut assembled =
            write_packs(store, lease.scratch(), |packs| assembler.run(&mut input, packs))?;
        let (new_bytes, reused_bytes) = (assembled.new_bytes, assembled.known_bytes);
        if let Some(object) = object.filter(|_| !assembled.manifest.chunks.is_empty()) {
            let len = assembled.manifest.data_range().len();
            assembled.manifest.objects = vec![object(&assembled.origins, len)?];
        }
        let manifest = manifest_of(&nodes, assembled)?;
        let image = publish(store, name, &manifest, level)?;
        Ok(Report { new_bytes, reused_bytes, acls_left_out: text_acls, ..Report::of(image) })
    })
}

/// The layers, read for the files that have lasted.
struct Wanted {
    archives: std::vec::IntoIter<(u32, OpenLayer)>,
    wanted: Peekable<std::vec::IntoIter<(Place, u32)>>,
    next: Place,
    bytes: Arc<AtomicU64>,
    /// Whether to keep where the data was read.
    traced: bool,
}

impl Archives for Wanted {
    fn traced(&self) -> Option<u32> {
        self.traced.then_some(self.next.0)
    }

    fn next(&mut self) -> Result<Option<Archive>> {
        for (number, open) in self.archives.by_ref() {
            match self.wanted.peek() {
                Some(((layer, _), _)) if *layer == number => {
                    self.next = (number, 0);
                    let archive = Counted { inner: open()?, bytes: Arc::clone(&self.bytes) };
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

    fn add(&mut self, _entry: Entry) -> Result<Option<u32>> {
        let place = self.next;
        self.next.1 += 1;
        Ok(self.wanted.next_if(|(wanted, _)| *wanted == place).map(|(_, node)| node))
    }
}
