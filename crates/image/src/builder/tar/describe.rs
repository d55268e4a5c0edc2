//! Descriptions of layers: images whose data stays in the layers.
//!
//! ```text
//!   in parallel, on arrival:       Layers::describe ── headers, and digest and checksums of
//!                                                      every chunk, also of removed files
//!   or from a table of contents:   Layers::list     ── the same without digests and checksums
//!   then:                          Merge            ── the live files
//!                                  Whole            ── their chunks, one after another
//! ```
//!
//! A layer is read once, before the layers above it are known. Chunks may therefore contain dead
//! bytes next to live ones; wholly dead chunks are dropped. Memory: the manifest data of all
//! layers, inlined files included, which is bounded by [`super::LayerLimits`] and counted on the
//! layers' [`MemoryMeter`]; and three waves of data per layer.

use std::{
    io::Read,
    sync::{Arc, atomic::AtomicU64},
};

use burgeon_block::{
    BLOCK_SIZE, ByteRange, ChecksumKind, MemoryMeter, ObjectId, ObjectStore, Result,
};

use super::{
    super::{
        BuildOptions, BuildReport,
        assemble::{Assembled, Assembler, Extent, Origin, Placed},
        check_options, manifest_of,
        meter::Meter,
        pool, pool_of, publish,
        reuse::Known,
    },
    Archives, TarInput,
    entry::TarEntry,
    layers::{Bounded, LayerLimits, Layers},
    merge::Merge,
};
use crate::{
    corrupt,
    manifest::{ChunkEntry, Manifest},
    pack::PackWriter,
};

/// Bytes of a wave: 8 MiB, since layers come over a network. Each layer being read takes three
/// waves.
const WAVE_LEN: u64 = 8 << 20;
/// Threads per layer: one reads, the others digest.
const THREADS_MAX: usize = 4;

/// The description of one layer.
pub struct Description {
    pub(super) entries: Vec<TarEntry>,
    /// Its nodes are the layer's entries; its origins name this layer only.
    pub(super) assembled: Assembled,
    pub(super) meter: Arc<MemoryMeter>,
}

impl Layers {
    /// Reads the decompressed layer `number` of the image (the lowest is 0) to its end. Several
    /// threads may read one layer each.
    ///
    /// Errors: those of [`Self::headers`].
    pub fn describe(
        &self,
        archive: impl Read + Send,
        number: u32,
        options: &BuildOptions,
    ) -> Result<Description> {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let threads = options.threads.unwrap_or(cores + 1).min(THREADS_MAX);
        pool_of(threads)?.install(|| {
            let archive = Some(self.bounded(archive));
            let one = OneLayer { layers: self, number, archive, entries: Vec::new() };
            let read = AtomicU64::new(0);
            let mut input = TarInput::new(one, self.meter(), WAVE_LEN, &read);
            let (known, meter) = (&Known::default(), &Meter::new(&|_, _| ()));
            let BuildOptions { level, checksum, grouping, .. } = *options;
            let assembler = Assembler { level, checksum, grouping, known, meter, derived: true };
            let assembled = assembler.run(&mut input, PackWriter::none())?;
            let meter = Arc::clone(self.meter());
            Ok(Description { entries: input.archives.entries, assembled, meter })
        })
    }
}

/// A layer of which all data is wanted.
struct OneLayer<'a, R> {
    layers: &'a Layers,
    number: u32,
    archive: Option<Bounded<'a, R>>,
    entries: Vec<TarEntry>,
}

impl<'a, R: Read + Send> Archives for OneLayer<'a, R> {
    type Archive = Bounded<'a, R>;
    const ARE_LAYERS: bool = true;

    fn next(&mut self) -> Result<Option<Self::Archive>> {
        Ok(self.archive.take())
    }

    fn add(&mut self, entry: TarEntry) -> Result<Option<u32>> {
        self.layers.count(&entry)?;
        let number = self.entries.len() as u32;
        let has_data = entry.is_regular();
        self.entries.push(entry);
        Ok(has_data.then_some(number))
    }

    fn traced(&self) -> Option<u32> {
        Some(self.number)
    }
}

/// Returns the object that holds a described image's data, and gives each verified chunk the
/// identity that the object has for the chunk's stored range. The arguments are the origins in the
/// layers, by address from 0, and the chunks, by address.
pub type OnDescribed<'a> = &'a (dyn Fn(&[Origin], &mut [ChunkEntry]) -> Result<ObjectId> + Sync);

/// Publishes an image of `layers`, the lowest first, in `store` as `name`, without storing data:
/// the data is in the one object that `object` returns, which has the layout of the lazy address
/// space and can be read from the layers.
///
/// Errors: `Corrupt` for layers that do not fit together, `Invalid` for a tree that btrfs cannot
/// hold.
pub fn describe_layers(
    store: &impl ObjectStore,
    name: &str,
    layers: Vec<Description>,
    options: &BuildOptions,
    object: OnDescribed<'_>,
) -> Result<BuildReport> {
    check_options(name, options)?;
    pool(options)?.install(|| {
        let _lease = store.begin_write()?;
        let meter = layers.first().map(|layer| Arc::clone(&layer.meter)).unwrap_or_default();
        let mut merge = Merge::new(LayerLimits::default().entries as usize, meter);
        let mut acls_left_out = 0;
        for (number, layer) in (0..).zip(&layers) {
            merge.layer(number, &layer.entries)?;
            acls_left_out += layer.entries.iter().filter(|entry| entry.text_acl).count() as u64;
        }
        let (nodes, wanted) = merge.finish();
        let mut wanted = wanted.into_iter().peekable();
        let mut whole = Whole::default();
        for (number, layer) in (0..).zip(layers) {
            let mut node_of = vec![None; layer.entries.len()];
            while let Some(((_, entry), node)) = wanted.next_if(|((layer, _), _)| *layer == number)
            {
                node_of[entry as usize] = Some(node);
            }
            whole.add(layer.assembled, &node_of)?;
        }
        let mut assembled = whole.finish(options.checksum);
        if !assembled.manifest.chunks.is_empty() {
            let chunks = &mut assembled.manifest.chunks;
            assembled.manifest.objects = vec![object(&assembled.origins, chunks)?];
        }
        let manifest = manifest_of(&nodes, assembled)?;
        let image = publish(store, name, &manifest, options)?;
        Ok(BuildReport { acls_left_out, ..BuildReport::of(image) })
    })
}

/// The live data of all layers, one after another.
#[derive(Default)]
struct Whole {
    placed: Placed,
    chunks: Vec<ChunkEntry>,
    block_checksums: Vec<u8>,
    origins: Vec<Origin>,
    /// Length of the lazy address space so far.
    end: u64,
}

impl Whole {
    /// Adds a layer; an entry is live if it has a node.
    fn add(&mut self, layer: Assembled, node_of: &[Option<u32>]) -> Result<()> {
        let Assembled { placed, manifest, origins, .. } = layer;
        let node_of = |entry: u32| node_of.get(entry as usize).copied().flatten();
        let mut lasts = vec![false; manifest.chunks.len()];
        for extent in &placed.extents {
            lasts[extent.chunk as usize] |= node_of(extent.node).is_some();
        }
        // Number in the image of each chunk of the layer.
        let mut moved = Vec::with_capacity(lasts.len());
        let (mut at, mut sums, checksum_len) = (0, 0, manifest.checksum.size());
        let mut origins = origins.into_iter().peekable();
        for (chunk, lasts) in manifest.chunks.into_iter().zip(lasts) {
            let (len, sums_len) = (chunk.len(), usize::from(chunk.blocks) * checksum_len);
            if lasts {
                moved.push(self.chunks.len() as u32);
                let stored = ByteRange::at(self.end, len);
                let stored = stored
                    .ok_or_else(|| corrupt("the layers have more data than an image can hold"))?;
                self.chunks.push(ChunkEntry { stored, ..chunk });
                self.block_checksums.extend(&manifest.block_checksums[sums..sums + sums_len]);
            } else {
                moved.push(u32::MAX);
            }
            while let Some(origin) = origins.next_if(|origin| origin.at < at + len) {
                if lasts {
                    self.origins.push(Origin { at: origin.at - at + self.end, ..origin });
                }
            }
            at += len;
            sums += sums_len;
            self.end += if lasts { len } else { 0 };
        }
        let lasting = |extent: Extent| {
            let chunk = moved[extent.chunk as usize];
            node_of(extent.node).map(|node| Extent { node, chunk, ..extent })
        };
        self.placed.extents.extend(placed.extents.into_iter().filter_map(lasting));
        let inline = placed.inline.into_iter();
        self.placed.inline.extend(inline.filter_map(|(entry, data)| Some((node_of(entry)?, data))));
        Ok(())
    }

    fn finish(self, checksum: ChecksumKind) -> Assembled {
        debug_assert_eq!(
            self.block_checksums.len() as u64,
            self.end / BLOCK_SIZE * checksum.size() as u64
        );
        let Self { placed, chunks, block_checksums, origins, .. } = self;
        let (tree, objects) = Default::default();
        let manifest = Manifest { tree, checksum, chunks, objects, block_checksums };
        Assembled { placed, manifest, new_bytes: 0, known_bytes: 0, origins }
    }
}
