//! From layers in a registry or folder to an image in a store.
//!
//! ```text
//!   manifest ─► LANES_MAX at a time: layer ─► digest ─► spool ─► decompress ─► digest ─► headers
//!   all of them right ─► spool ─► decompress ─► what has lasted ─► image
//! ```
//!
//! Invariants: nothing is built before every layer has shown its digest; a layer that comes over
//! the network is kept in a file without a name, which goes with this process, however that ends.

use std::{
    fs::File,
    io::{self, BufReader, Read, Seek, Write},
    path::Path,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed},
    },
    thread,
};

use burgeon_block::{Error, ErrorKind, ObjectId, ObjectStore, Result};
use burgeon_image::build::{
    self, LayerIndex, LayerLimits, Layers, OnProgress, Options, Origin, Report,
};
use burgeon_layer::{Recorder, Restarts};
use burgeon_source::registry::{Checked, Digest, Digesting, Registry, body_error};

use crate::{
    OnFetch, Work,
    document::{
        Compression, Descriptor, Document, Layer, Manifest, diff_ids, for_this_machine, media_type,
    },
    layout::Layout,
    source::Wanted,
};

/// Layers that are fetched at a time: each may take 128 MiB to decompress.
const LANES_MAX: usize = 4;
/// zstd's window, at most: 2²⁷ bytes, as `zstd --long` writes it.
const ZSTD_WINDOW_LOG_MAX: u32 = 27;
/// Compressed bytes that are read at a time: 256 KiB.
const BUFFER_LEN: usize = 1 << 18;
/// Indexes that point at indexes.
const INDEXES_MAX: usize = 4;

/// Where blobs are.
pub(crate) enum Blobs {
    Layout(Layout),
    Registry(Registry),
}

/// Gives the object that the image's data is in, made of where the layers can be begun, where in
/// them the data lies, and its length.
pub(crate) type OnDescribed<'a> =
    &'a (dyn Fn(&[Restarts], &[Origin], u64) -> Result<ObjectId> + Sync);

/// What a name stands for.
pub(crate) struct Resolved {
    /// Of the image of this machine's platform.
    pub(crate) digest: Digest,
    /// Of the index that it was found by.
    pub(crate) index: Option<Digest>,
    /// Length of the image's manifest, in bytes.
    pub(crate) len: u64,
    /// What kind of document that is.
    pub(crate) media_type: String,
    pub(crate) manifest: Manifest,
}

/// What is wanted.
pub(crate) enum Target {
    Ordinary(Box<Resolved>),
    /// An image of ours.
    Ours(Digest),
}

/// An image of ours is not made of layers.
pub(crate) fn not_built(digest: &Digest) -> Error {
    invalid(&format!(
        "{digest} is an image of Burgeon's, which is not built: `burgeon pull` brings it from a \
         registry, where `skopeo copy` brings it from a folder"
    ))
}

impl Blobs {
    pub(crate) fn document(&self, wanted: &Wanted) -> Result<(Vec<u8>, Digest)> {
        match self {
            Self::Layout(layout) => layout.document(wanted),
            Self::Registry(registry) => match wanted {
                Wanted::Digest(digest) => registry.document(Some(digest)),
                Wanted::Tag(tag) => registry.document_tagged(tag),
                Wanted::Only => registry.document(None),
            },
        }
    }

    fn blob(&self, digest: &Digest) -> Result<Box<dyn Read + Send>> {
        match self {
            Self::Layout(layout) => Ok(Box::new(layout.blob(digest)?)),
            Self::Registry(registry) => Ok(Box::new(registry.blob(digest)?)),
        }
    }

    /// What refers to `image` and is of type `kind`, where that can be asked for.
    pub(crate) fn referrers(&self, image: &Digest, kind: &str) -> Result<Option<Vec<u8>>> {
        match self {
            Self::Layout(_) => Ok(None),
            Self::Registry(registry) => registry.referrers(image, kind),
        }
    }

    /// Finds the ordinary image that is wanted, for this machine.
    pub(crate) fn resolve(&self, wanted: &Wanted) -> Result<Resolved> {
        match self.find(wanted)? {
            Target::Ordinary(resolved) => Ok(*resolved),
            Target::Ours(digest) => Err(not_built(&digest)),
        }
    }

    /// Finds the image that is wanted, for this machine.
    pub(crate) fn find(&self, wanted: &Wanted) -> Result<Target> {
        let (mut bytes, mut digest) = self.document(wanted)?;
        let mut index = None;
        for _ in 0..INDEXES_MAX {
            match Document::parse(&bytes)? {
                Document::Manifest(manifest) => {
                    let (len, media_type) = (bytes.len() as u64, media_type(&bytes));
                    let resolved = Resolved { digest, index, len, media_type, manifest };
                    return Ok(Target::Ordinary(Box::new(resolved)));
                }
                Document::Ours => return Ok(Target::Ours(digest)),
                Document::Index(manifests) => {
                    let chosen = for_this_machine(&manifests)?;
                    chosen.document_size()?;
                    index.get_or_insert(digest);
                    (bytes, digest) = self.document(&Wanted::Digest(chosen.digest()?))?;
                }
            }
        }
        let what = format!("indexes of images are nested deeper than {INDEXES_MAX}");
        Err(Error::new(ErrorKind::Corrupt, what))
    }

    fn config(&self, config: &Descriptor) -> Result<Vec<u8>> {
        self.read(&config.digest()?, config.document_size()?)
    }

    /// All of a blob of `len` bytes.
    pub(crate) fn read(&self, digest: &Digest, len: u64) -> Result<Vec<u8>> {
        let mut bytes = Vec::new();
        let mut blob = Checked::new(self.blob(digest)?, digest.clone(), len);
        blob.read_to_end(&mut bytes)
            .map_err(|error| body_error(&format!("read {digest}"), error))?;
        Ok(bytes)
    }

    /// Builds the image `name` in `store`; `spool` is a folder with room for its layers.
    pub(crate) fn build(
        &self,
        resolved: &Resolved,
        store: &impl ObjectStore,
        name: &str,
        spool: &Path,
        options: &Options,
        (fetching, building): (OnFetch<'_>, OnProgress<'_>),
    ) -> Result<Report> {
        let layers = self.fetch(&resolved.manifest, Reading::Once, spool, fetching)?;
        let layers = layers.into_iter().map(|(layer, _)| layer).collect();
        build::from_layers(store, name, layers, options, building)
    }

    /// Publishes a description of the image as `name` in `store`: its data stays in the layers, and
    /// `object` makes the object of where in them it lies. The rest as [`Self::build`].
    pub(crate) fn describe(
        &self,
        resolved: &Resolved,
        store: &impl ObjectStore,
        name: &str,
        work: &Work<'_>,
        object: OnDescribed<'_>,
    ) -> Result<Report> {
        let layers = self.fetch(&resolved.manifest, Reading::Again, work.spool, work.fetching)?;
        let (layers, restarts): (Vec<_>, Vec<_>) = layers.into_iter().unzip();
        let restarts: Vec<Restarts> = restarts.into_iter().flatten().collect();
        let object = |origins: &[Origin], len| object(&restarts, origins, len);
        build::describe_layers(store, name, layers, work.options, work.building, &object)
    }

    /// Fetches all layers and looks at them.
    fn fetch(
        &self,
        manifest: &Manifest,
        reading: Reading,
        spool: &Path,
        fetching: OnFetch<'_>,
    ) -> Result<Vec<(build::Layer, Option<Restarts>)>> {
        let layers = &manifest.layers;
        let diff_ids = diff_ids(&self.config(&manifest.config)?, layers.len())?;
        let total = layers.iter().fold(0u64, |sum, layer| sum.saturating_add(layer.size));
        let (next, fetched) = (AtomicUsize::new(0), AtomicU64::new(0));
        let headers = Layers::new(LayerLimits::default());
        let done: Mutex<Vec<Option<_>>> = Mutex::new(layers.iter().map(|_| None).collect());
        let lane = || -> Result<()> {
            loop {
                let number = next.fetch_add(1, Relaxed);
                let Some(layer) = layers.get(number) else { return Ok(()) };
                let count = |more| {
                    fetching(fetched.fetch_add(more, Relaxed) + more, total);
                };
                let diff_id = diff_ids[number].as_ref();
                let looked_at =
                    self.fetch_layer(layer, (diff_id, reading), &headers, spool, &count);
                let looked_at = looked_at.inspect_err(|_| {
                    // The others stop where they are done with their layer.
                    next.store(layers.len(), Relaxed);
                })?;
                done.lock().unwrap_or_else(PoisonError::into_inner)[number] = Some(looked_at);
            }
        };
        thread::scope(|scope| {
            let lanes: Vec<_> =
                (0..LANES_MAX.min(layers.len())).map(|_| scope.spawn(lane)).collect();
            let ends = lanes
                .into_iter()
                .map(|lane| lane.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
            ends.collect::<Vec<_>>().into_iter().collect::<Result<()>>()
        })?;
        let done = done.into_inner().unwrap_or_else(PoisonError::into_inner);
        Ok(done.into_iter().flatten().collect())
    }

    /// Fetches one layer and looks at it.
    fn fetch_layer(
        &self,
        layer: &Layer,
        (diff_id, reading): (Option<&Digest>, Reading),
        headers: &Layers,
        spool: &Path,
        count: &(dyn Fn(u64) + Sync),
    ) -> Result<(build::Layer, Option<Restarts>)> {
        let Layer { digest, size, compression } = layer.clone();
        let cannot = |error: Error| {
            Error::with_source(error.kind(), format!("cannot use the layer {digest}"), error)
        };
        let blob = Checked::new(self.blob(&digest).map_err(cannot)?, digest.clone(), size);
        let spooled = match self {
            Self::Layout(_) => None,
            Self::Registry(_) => Some(tempfile::tempfile_in(spool).map_err(|error| {
                Error::io(format!("cannot make a file in {}", spool.display()), error)
            })?),
        };
        let mut tee = Tee { inner: blob, spool: spooled, count };
        let index = look(&mut tee, layer, (diff_id, reading), headers);
        // What is wrong with the bytes themselves says more than what they do to a decoder.
        io::copy(&mut tee, &mut io::sink())
            .map_err(|error| cannot(body_error("read it", error)))?;
        let (index, restarts) = index.map_err(cannot)?;
        let spooled = tee.spool;
        let open: build::OpenLayer = match self {
            Self::Layout(layout) => {
                let layout = layout.clone();
                Box::new(move || {
                    let blob = Checked::new(layout.blob(&digest)?, digest.clone(), size);
                    decompressed(blob, compression)
                })
            }
            Self::Registry(_) => Box::new(move || {
                let mut file = spooled.ok_or_else(|| invalid("the layer was not kept"))?;
                file.rewind().map_err(|error| Error::io("cannot read a layer again", error))?;
                decompressed(file, compression)
            }),
        };
        Ok((build::Layer { index, open }, restarts))
    }
}

/// What is to become of a layer.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Reading {
    /// Its data is kept.
    Once,
    /// Its data stays where it is: where unpacking can begin is kept.
    Again,
}

/// Reads a layer's headers, and checks what it unpacks to.
fn look(
    blob: &mut (impl Read + Send),
    layer: &Layer,
    (diff_id, reading): (Option<&Digest>, Reading),
    headers: &Layers,
) -> Result<(LayerIndex, Option<Restarts>)> {
    let check = |digest: Digest| match diff_id {
        Some(diff_id) if *diff_id != digest => {
            let what = format!("it unpacks to {digest}, but the image says to {diff_id}");
            Err(Error::new(ErrorKind::Corrupt, what))
        }
        _ => Ok(()),
    };
    match reading {
        Reading::Once => {
            let mut archive = Digesting::new(decompressed(blob, layer.compression)?);
            let index = headers.index(&mut archive)?;
            check(archive.digest()).map(|()| (index, None))
        }
        Reading::Again => {
            let blob = BufReader::with_capacity(BUFFER_LEN, blob);
            let mut recorder = Recorder::new(blob, layer.compression.codec())?;
            let mut archive = Digesting::new(&mut recorder as &mut dyn Read);
            let index = headers.index(&mut archive)?;
            check(archive.digest())?;
            Ok((index, Some(recorder.finish(layer.size)?)))
        }
    }
}

fn decompressed<'a>(
    blob: impl Read + Send + 'a,
    compression: Compression,
) -> Result<Box<dyn Read + Send + 'a>> {
    let blob = BufReader::with_capacity(BUFFER_LEN, blob);
    Ok(match compression {
        Compression::None => Box::new(blob),
        Compression::Gzip => Box::new(flate2::bufread::MultiGzDecoder::new(blob)),
        Compression::Zstd => {
            let cannot = |error| Error::io("cannot start zstd", error);
            let mut decoder = zstd::stream::read::Decoder::with_buffer(blob).map_err(cannot)?;
            decoder.window_log_max(ZSTD_WINDOW_LOG_MAX).map_err(cannot)?;
            Box::new(decoder)
        }
    })
}

/// Keeps what is read, and counts it.
struct Tee<'a, R> {
    inner: R,
    spool: Option<File>,
    count: &'a (dyn Fn(u64) + Sync),
}

impl<R: Read> Read for Tee<'_, R> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        let len = self.inner.read(buf)?;
        if let Some(spool) = &mut self.spool {
            spool.write_all(&buf[..len]).map_err(|error| {
                io::Error::other(Error::io(
                    "cannot keep a layer for a while in the state directory",
                    error,
                ))
            })?;
        }
        (self.count)(len as u64);
        Ok(len)
    }
}

fn invalid(what: &str) -> Error {
    Error::new(ErrorKind::Invalid, what)
}
