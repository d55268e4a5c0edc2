//! Makes an image in a store from layers in a registry or folder.
//!
//! ```text
//!   manifest ─► LANES_MAX at a time: layer ─► digest ─► spool ─► decompress ─► digest ─► scan
//!   build:     scans headers; if all are valid ─► spool ─► decompress ─► surviving files ─► image
//!   describe:  scans everything, once; the spool becomes an object, which the image is read from
//!   list:      parses a table of contents (TOC), and does not fetch the layer
//! ```
//!
//! Invariants: nothing is published under a name before the digests of all layers read, and of all
//! TOCs, have been checked; data needed only for a build is in unnamed temporary files, which
//! disappear with this process even if it is killed.

use std::{
    collections::HashSet,
    fs::{self, File},
    io::{self, BufReader, Read, Seek},
    path::Path,
    sync::{
        Mutex, MutexGuard, OnceLock, PoisonError,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed},
    },
    thread,
};

use crate::{
    Work,
    blobs::{Blobs, Resolved},
    document::{Compression, Layer, diff_ids},
    spool::{CountedPlaces, LayerRoom, Metered, Spool, Tee, given_up},
    toc,
    unpacked::{ReadLayers, Unpacked, digest_of, mislisted},
};
use burgeon_block::{Error, ErrorKind, MemoryMeter, ObjectId, ObjectStore, Result};
use burgeon_image::builder::{self, BuildReport, Description, Gunzip, LayerLimits, Layers};
use burgeon_layer::{LayerCodec, Recorder, Restarts};
use burgeon_source::{
    Directory,
    opening::{Manner, open_checked},
    registry::{Checked, Digesting, OciDigest, body_error},
};
use rustix::fs::{FlockOperation, flock};

/// Layers fetched in parallel; together they need 160 MiB to decompress (`layer/src/unzstd.rs`).
const LANES_MAX: usize = 4;
/// Largest unpacked layer: that of all layers of an image together.
const UNPACKED_MAX: u64 = 256 << 30;
/// Size of reads of compressed data: 256 KiB.
const BUFFER_LEN: usize = 1 << 18;

impl Blobs {
    /// Builds the image `name` in `store`.
    pub(crate) fn build(
        &self,
        resolved: &Resolved,
        store: &impl ObjectStore,
        name: &str,
        work: &Work<'_>,
    ) -> Result<BuildReport> {
        let all = Layers::new(LayerLimits::default());
        let layers = self.fetch(resolved, work, &|layer_fetch| {
            let Layer { digest, size, compression, .. } = layer_fetch.layer.clone();
            let spool = match self {
                Self::Layout(_) => None,
                Self::Registry(_) => Some(tempfile::tempfile_in(work.spool).map_err(|error| {
                    Error::io(format!("cannot make a file in {}", work.spool.display()), error)
                })?),
            };
            let spool = spool.map(Spool::of);
            let (headers, spooled) = self.read_layer(layer_fetch, work.own, spool, |blob| {
                let blob = layer_fetch.metered(blob, all.meter());
                let mut archive = Digesting::new(decompressed(blob, compression)?);
                let headers = all.headers(&mut archive)?;
                layer_fetch.check(archive.digest()).map(|()| headers)
            })?;
            let open: builder::OpenLayer = match (self, spooled) {
                (Self::Layout(layout), _) => {
                    let layout = layout.clone();
                    Box::new(move || {
                        let blob = Checked::new(layout.blob(&digest)?, digest.clone(), size);
                        decompressed(blob, compression)
                    })
                }
                (Self::Registry(_), spooled) => Box::new(move || {
                    let mut file = spooled.ok_or_else(|| {
                        invalid(
                            "the fetched layer is no longer \
                        there",
                        )
                    })?;
                    file.rewind().map_err(|error| Error::io("cannot read a layer again", error))?;
                    decompressed(file, compression)
                }),
            };
            Ok(builder::Layer { headers, open })
        })?;
        builder::from_layers(store, name, layers, work.options, work.building)
    }

    /// Describes the image's layers and the places where unpacking can start, with an error for
    /// each layer that has too few. With `keep`, the fetched layers are stored. With `tocs`,
    /// layers with a usable TOC are not fetched; `tocs` collects the reasons why others were.
    pub(crate) fn describe(
        &self,
        resolved: &Resolved,
        work: &Work<'_>,
        keep: Option<&Keep<'_>>,
        tocs: Option<&Tocs>,
    ) -> Result<(Vec<Description>, Vec<Result<Restarts>>)> {
        let layers = Layers::new(LayerLimits::default());
        let described = self.fetch(resolved, work, &|layer_fetch| {
            let Layer { digest, size, compression, toc } = layer_fetch.layer;
            if let (Some(tocs), Some(place)) = (tocs, toc) {
                let listed = toc::fetch(self, layer_fetch.layer, place).and_then(|stored| {
                    let _one = tocs.one_at_a_time();
                    let toc = toc::read(layer_fetch.layer, place, &stored)?;
                    if !layer_fetch.is_repeated {
                        layers.meter().input(stored.len());
                    }
                    let listed = layers.list(&toc.files, layer_fetch.number, work.options)?;
                    Ok((listed, Ok(toc.restarts)))
                });
                match listed {
                    Ok(listed) => {
                        tocs.used.fetch_add(1, Relaxed);
                        (layer_fetch.count)(*size);
                        return Ok(listed);
                    }
                    Err(error) => tocs.refused(digest, &error),
                }
            }
            let object = self.layer_object(digest)?;
            // A repeated layer is stored already.
            let keep = keep.filter(|_| !layer_fetch.is_repeated);
            let partial = match keep {
                Some(keep) => keep.own.partial(&object, *size)?,
                None => None,
            };
            // If another process is fetching the layer, this one uses a file of its own.
            let path = keep.map(|keep| match &partial {
                Some(partial) => partial.path().to_owned(),
                None => keep.scratch.join(format!("layer-{}", layer_fetch.number)),
            });
            let spool = path.as_deref().zip(keep).map(|(path, keep)| {
                let (allocate, must) = (work.allocate, keep.must);
                let room = LayerRoom { allocate, digest, size: *size, must };
                Spool::lasting(path, partial.as_ref(), room)
            });
            let described = self.read_layer(layer_fetch, work.own, spool.transpose()?, |blob| {
                let blob = layer_fetch.metered(blob, layers.meter());
                let blob = BufReader::with_capacity(BUFFER_LEN, blob);
                let mut recorder =
                    CountedPlaces::new(Recorder::new(blob, compression.codec())?, layers.meter());
                let mut archive = Digesting::new(&mut recorder);
                let description =
                    layers.describe(&mut archive, layer_fetch.number, work.options)?;
                layer_fetch.check(archive.digest())?;
                Ok((description, recorder.inner.finish(*size)))
            });
            let (described, kept) = match described {
                Ok(described) => described,
                Err(error) => return Err(given_up(partial, error)),
            };
            match (keep, path, kept) {
                (Some(keep), Some(path), Some(file)) => {
                    // Before it is published, so that it is never without a lock.
                    let _ = flock(&file, FlockOperation::NonBlockingLockShared);
                    keep.own.publish_file(&object, &path)?;
                    keep.stored.lock().unwrap_or_else(PoisonError::into_inner).push(file);
                }
                (Some(keep), Some(path), None) => {
                    if stored_layer(Some(keep.own), &object, *size).is_none() {
                        keep.unstored.fetch_add(1, Relaxed);
                    }
                    // Its bytes are gone; the collector removes a file that stays.
                    let _ = fs::remove_file(path);
                }
                _ => {}
            }
            // Until it is published, nobody else may have the file: they would rename it as well.
            drop(partial);
            Ok(described)
        })?;
        Ok(described.into_iter().unzip())
    }

    /// Reads all layers to their end, and notes the digests of what they unpack to, whether or not
    /// the image states them, and whether their TOCs list what they hold.
    pub(crate) fn unpack(&self, resolved: &Resolved, work: &Work<'_>) -> Result<()> {
        let read = |layer_fetch: &LayerFetch<'_>| {
            let toc = self.usable_toc(layer_fetch.layer)?;
            let compression = layer_fetch.layer.compression;
            let unpack = |blob: &mut (dyn Read + Send)| {
                let compare =
                    |archive: &mut dyn Read| toc.as_ref().and_then(|toc| mislisted(archive, toc));
                let archive = decompressed(blob, compression)?;
                let (digest, mislisted) = digest_of(archive, UNPACKED_MAX, compare)?;
                layer_fetch.unpacked.get_or_init(|| digest);
                mislisted.map(|what| layer_fetch.mislisted.get_or_init(|| what));
                Ok(())
            };
            self.read_layer(layer_fetch, work.own, None, unpack)
        };
        // A TOC takes memory until its layer is read.
        let has_toc = resolved.manifest.layers.iter().any(|layer| layer.toc.is_some());
        self.fetch_in(if has_toc { 1 } else { LANES_MAX }, resolved, work, &read).map(drop)
    }

    /// The TOC by which a layer would be mounted. One that is invalid is not used.
    fn usable_toc(&self, layer: &Layer) -> Result<Option<toc::Toc>> {
        let Some(place) = &layer.toc else { return Ok(None) };
        match toc::fetch(self, layer, place).and_then(|stored| toc::read(layer, place, &stored)) {
            Ok(toc) => Ok(Some(toc)),
            Err(error) if error.kind() == ErrorKind::Corrupt => {
                let object = layer.digest.to_string();
                tracing::warn!(object, %error, "the layer's table of contents is not used");
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }

    /// Fetches all layers and returns the result of `take` for each.
    fn fetch<T: Send>(
        &self,
        resolved: &Resolved,
        work: &Work<'_>,
        take: &(dyn Fn(&LayerFetch<'_>) -> Result<T> + Sync),
    ) -> Result<Vec<T>> {
        self.fetch_in(LANES_MAX, resolved, work, take)
    }

    /// The same, at most `lanes` at a time.
    fn fetch_in<T: Send>(
        &self,
        lanes: usize,
        resolved: &Resolved,
        work: &Work<'_>,
        take: &(dyn Fn(&LayerFetch<'_>) -> Result<T> + Sync),
    ) -> Result<Vec<T>> {
        let layers = &resolved.manifest.layers;
        // Those of a part of the image come first.
        let diff_ids = diff_ids(self.configuration(resolved)?, resolved.layers)?;
        let total = layers.iter().fold(0u64, |sum, layer| sum.saturating_add(layer.size));
        let fetched = AtomicU64::new(0);
        let done: Mutex<Vec<Option<T>>> = Mutex::new(layers.iter().map(|_| None).collect());
        let count = |more| (work.fetching)(fetched.fetch_add(more, Relaxed) + more, total);
        let mut seen = HashSet::new();
        let (first, repeated): (Vec<_>, Vec<_>) =
            (0..layers.len()).partition(|number| seen.insert(&layers[*number].digest));
        // Repeated layers wait until the first of them is stored.
        for (numbers, is_repeated) in [(first, false), (repeated, true)] {
            let next = AtomicUsize::new(0);
            let lane = || -> Result<()> {
                while let Some(number) = numbers.get(next.fetch_add(1, Relaxed)).copied() {
                    let (layer, diff_id) = (&layers[number], diff_ids[number].as_ref());
                    let layer_fetch = LayerFetch {
                        number: number as u32,
                        layer,
                        diff_id,
                        is_repeated,
                        count: &count,
                        content: work.content,
                        read: work.read,
                        unpacked: OnceLock::new(),
                        mislisted: OnceLock::new(),
                    };
                    let taken = take(&layer_fetch).inspect_err(|_| {
                        // The other lanes stop after their current layer.
                        next.store(numbers.len(), Relaxed);
                    })?;
                    done.lock().unwrap_or_else(PoisonError::into_inner)[number] = Some(taken);
                }
                Ok(())
            };
            in_lanes(lanes.min(numbers.len()), &lane)?;
        }
        let done = done.into_inner().unwrap_or_else(PoisonError::into_inner);
        Ok(done.into_iter().flatten().collect())
    }

    /// The bytes of a layer: first those in `spool`, then the rest from its location.
    fn rest(&self, layer: &Layer, spool: Option<&Spool<'_>>) -> Result<Box<dyn Read + Send>> {
        let Some(Spool { path, len: len @ 1.., .. }) = spool else {
            return self.blob(&layer.digest);
        };
        let first = open_checked(path, Manner::Stored)
            .map_err(|error| Error::io(format!("cannot open {}", path.display()), error))?;
        let first = first.take(*len);
        if *len == layer.size {
            return Ok(Box::new(first));
        }
        Ok(Box::new(first.chain(self.blob_from(&layer.digest, *len)?)))
    }

    /// Reads one layer to its end and checks it: from `own` if it is stored there, else from
    /// `spool` and then its location. New bytes are appended to `spool`, whose file is returned,
    /// unless there was no room for it.
    fn read_layer<'a, T>(
        &self,
        layer_fetch: &LayerFetch<'a>,
        own: Option<&Directory>,
        mut spool: Option<Spool<'a>>,
        look: impl FnOnce(&mut (dyn Read + Send)) -> Result<T>,
    ) -> Result<(T, Option<File>)> {
        let Layer { digest, size, .. } = layer_fetch.layer;
        let cannot = |error: Error| {
            Error::with_source(error.kind(), format!("cannot use the layer {digest}"), error)
        };
        let object = self.layer_object(digest)?;
        let stored = stored_layer(own, &object, *size);
        let is_stored = stored.is_some();
        let given = || content_blob(layer_fetch.content?, digest, *size);
        let blob = match stored.or_else(given) {
            Some(file) => Box::new(file),
            None => self.rest(layer_fetch.layer, spool.as_ref()).map_err(cannot)?,
        };
        if is_stored && let Some(spool) = &mut spool {
            // The stored layer is read and copied from its beginning.
            spool.empty()?;
        }
        let blob = Checked::new(blob, digest.clone(), *size);
        let mut tee = Tee::new(blob, spool, layer_fetch.count);
        let looked_at = look(&mut tee);
        // An error in the bytes explains more than the decoder's error that it causes.
        if let Err(error) = io::copy(&mut tee, &mut io::sink()) {
            let error = cannot(body_error("read it", error));
            if let Some(own) = own.filter(|_| is_stored && tee.is_bad) {
                own.remove(&object)?;
                let what = "a stored layer was damaged, and has been removed: try again";
                return Err(Error::with_source(error.kind(), what, error));
            }
            return Err(error);
        }
        layer_fetch.is_whole();
        Ok((looked_at.map_err(cannot)?, tee.spool))
    }
}

/// Runs `lane` in `lanes` threads; the error of any of them.
fn in_lanes(lanes: usize, lane: &(dyn Fn() -> Result<()> + Sync)) -> Result<()> {
    thread::scope(|scope| {
        let lanes: Vec<_> = (0..lanes).map(|_| scope.spawn(lane)).collect();
        let ends = lanes
            .into_iter()
            .map(|lane| lane.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
        ends.collect::<Vec<_>>().into_iter().collect()
    })
}

/// Opens the layer `object` of `size` bytes in `own`, if it is stored there.
fn stored_layer(own: Option<&Directory>, object: &ObjectId, size: u64) -> Option<File> {
    let file = open_checked(&own?.path_of(object), Manner::Stored).ok()?;
    file.metadata().is_ok_and(|of| of.len() == size).then_some(file)
}

/// Opens the blob `digest` of `size` bytes in `content`, if it is there. Others may remove it at
/// any time.
fn content_blob(content: &Path, digest: &OciDigest, size: u64) -> Option<File> {
    let file = open_checked(&content.join(digest.hex()), Manner::Stored).ok()?;
    file.metadata().is_ok_and(|of| of.len() == size).then_some(file)
}

/// The use of TOCs for an image.
#[derive(Default)]
pub(crate) struct Tocs {
    used: AtomicUsize,
    refused: Mutex<Vec<String>>,
    /// Together they describe no valid tree.
    unfit: AtomicBool,
    /// Locked while a TOC is parsed: at most one at a time takes memory for that.
    reading: Mutex<()>,
}

impl Tocs {
    /// True if any TOC was used.
    pub(crate) fn is_used(&self) -> bool {
        self.used() > 0
    }

    /// Number of TOCs used.
    pub(crate) fn used(&self) -> usize {
        self.used.load(Relaxed)
    }

    fn one_at_a_time(&self) -> MutexGuard<'_, ()> {
        self.reading.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records that the TOCs of the image `digest` describe no valid tree together.
    pub(crate) fn unfit(&self, digest: &OciDigest, error: &Error) {
        self.refused(digest, error);
        self.unfit.store(true, Relaxed);
    }

    /// True if the TOCs describe no valid tree together.
    pub(crate) fn is_unfit(&self) -> bool {
        self.unfit.load(Relaxed)
    }

    /// The reasons why TOCs were not used.
    pub(crate) fn into_refused(self) -> Vec<String> {
        self.refused.into_inner().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records why the layer or image `digest` had to be read.
    fn refused(&self, digest: &OciDigest, error: &Error) {
        let why = format!(
            "{digest} was read as a whole, because its table of contents cannot be used: {error}"
        );
        self.refused.lock().unwrap_or_else(PoisonError::into_inner).push(why);
    }
}

/// The store and folder for fetched layers.
pub(crate) struct Keep<'a> {
    pub(crate) own: &'a Directory,
    /// A private folder on the same file system.
    pub(crate) scratch: &'a Path,
    /// True if the image is of no use unless all layers are stored.
    pub(crate) must: bool,
    /// Number of layers that were not stored, because there was no room.
    pub(crate) unstored: AtomicUsize,
    /// The stored layers, locked: none is evicted before the image is complete.
    pub(crate) stored: Mutex<Vec<File>>,
}

impl Keep<'_> {
    /// The note for the user about layers that were not stored.
    pub(crate) fn note(&self) -> Option<String> {
        let unstored = self.unstored.load(Relaxed);
        (unstored > 0).then(|| {
            let layers = if unstored == 1 { "layer" } else { "layers" };
            format!(
                "{unstored} {layers} not stored: the disk would have less free space than Burgeon \
                 leaves (`burgeon cache resize --keep-free`); the data is fetched when it is read"
            )
        })
    }
}

/// A layer while it is fetched.
struct LayerFetch<'a> {
    number: u32,
    layer: &'a Layer,
    diff_id: Option<&'a OciDigest>,
    /// True if a lower layer of the image has the same digest.
    is_repeated: bool,
    /// Called with the number of bytes just fetched.
    count: &'a (dyn Fn(u64) + Sync),
    /// As in [`Work`].
    content: Option<&'a Path>,
    read: &'a ReadLayers,
    /// Digest of the unpacked layer.
    unpacked: OnceLock<OciDigest>,
    /// The first difference between the layer and its TOC.
    mislisted: OnceLock<String>,
}

impl LayerFetch<'_> {
    /// Tells that all bytes of the layer were those of its digest: only then does the digest of
    /// what they unpack to say something about it.
    fn is_whole(&self) {
        if let Some(unpacked) = self.unpacked.get() {
            self.read.add(Unpacked {
                layer: self.layer.digest.to_string(),
                diff_id: unpacked.to_string(),
                stated: self.diff_id.map(OciDigest::to_string),
                mislisted: self.mislisted.get().cloned(),
            });
        }
    }

    /// Counts the bytes of `blob` as input on `meter`. A repeated layer is the same input: else it
    /// would account for memory as often as its image lists it.
    fn metered<'a, R>(&self, inner: R, meter: &'a MemoryMeter) -> Metered<'a, R> {
        Metered { inner, meter: (!self.is_repeated).then_some(meter) }
    }

    /// Compares the digest of the unpacked layer with its diff ID.
    fn check(&self, digest: OciDigest) -> Result<()> {
        let digest = self.unpacked.get_or_init(|| digest);
        match self.diff_id {
            Some(diff_id) if diff_id != digest => {
                let what = format!(
                    "its unpacked content has the digest {digest}, but the image \
                    states {diff_id}"
                );
                Err(Error::new(ErrorKind::Corrupt, what))
            }
            _ => Ok(()),
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
        Compression::Gzip => Box::new(Gunzip::new(blob)),
        // `Recorder` bounds the windows of all layers together.
        Compression::Zstd => Box::new(Recorder::new(blob, LayerCodec::Zstd)?),
    })
}

fn invalid(what: &str) -> Error {
    Error::new(ErrorKind::Invalid, what)
}

#[cfg(test)]
mod tests {
    use std::{fs, fs::File, io, sync::OnceLock};

    use burgeon_block::ObjectStore;
    use burgeon_source::{Directory, registry::OciDigest};

    use super::{LayerFetch, ReadLayers, Spool};
    use crate::{
        blobs::Blobs,
        document::{Compression, Layer},
        layout::Layout,
    };

    /// The stored layer may be the only copy, and other images may need it.
    #[test]
    fn a_stored_layer_is_removed_only_if_it_is_damaged() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("oci-layout"), "{}").unwrap();
        let blobs = Blobs::Layout(Layout::open(folder.path()).unwrap());
        let own = Directory::create(folder.path().join("store")).unwrap();
        let (good, bad) = (vec![1; 100_000], vec![2; 100_000]);
        let digest = OciDigest::of(&good);
        let object = blobs.layer_object(&digest).unwrap();
        let size = good.len() as u64;
        let layer = Layer { digest, size, compression: Compression::None, toc: None };
        let (count, read_layers) = (&|_| (), &ReadLayers::default());
        let layer_fetch = LayerFetch {
            number: 0,
            layer: &layer,
            diff_id: None,
            is_repeated: false,
            count,
            content: None,
            read: read_layers,
            unpacked: OnceLock::new(),
            mislisted: OnceLock::new(),
        };
        let read = |spool: Option<File>| {
            let look = |blob: &mut (dyn io::Read + Send)| {
                // `read_layer` reports errors after reading the rest.
                let _ = io::copy(blob, &mut io::sink());
                Ok(())
            };
            blobs.read_layer(&layer_fetch, Some(&own), spool.map(Spool::of), look).map(drop)
        };
        // Every write to this file fails, as on a full disk.
        let full = || Some(File::options().write(true).open("/dev/full").unwrap());
        own.publish(&object, &good).unwrap();
        read(None).unwrap();
        let error = read(full()).unwrap_err();
        assert!(!error.to_string().contains("damaged"), "{error}");
        assert_eq!(own.len(&object).unwrap(), Some(size));
        own.publish(&object, &bad).unwrap();
        let error = read(None).unwrap_err();
        assert!(error.to_string().contains("damaged"), "{error}");
        assert_eq!(own.len(&object).unwrap(), None);
    }
}
