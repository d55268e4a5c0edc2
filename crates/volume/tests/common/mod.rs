//! A small image in memory, a source that can be told to misbehave, and a cache in memory.
#![allow(dead_code, clippy::unwrap_used)]

use std::{
    collections::VecDeque,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use burgeon_block::{
    BLOCK_SIZE, BlockDevice, BlockSource, ByteRange, ChecksumKind, Counters, Digest, Error,
    ErrorKind, LocalFile, Now, ObjectId, ObjectKind, Result, Verdict,
};
use burgeon_btrfs::Tree;
use burgeon_cache::{ChunkKey, Domain, KeyKind, testing::MemoryStore};
use burgeon_image::{AddressMap, ChunkEntry, Codec, Manifest};
use burgeon_volume::{CacheAccess, ChecksumFile, RECORDED_CHECKSUM_LEN, Volume, VolumeLimits};
use bytes::Bytes;
use tokio::sync::Semaphore;

pub(crate) const DATA_START: u64 = 1 << 40;
/// Blocks of each chunk of the test image.
pub(crate) const CHUNKS: [u64; 6] = [64, 1, 3, 64, 17, 5];

/// The bytes of an image, how they are stored, and its map.
pub(crate) struct Image {
    pub(crate) map: Arc<AddressMap>,
    pub(crate) bytes: Vec<u8>,
    pub(crate) packs: Vec<(ObjectId, Vec<u8>)>,
}

/// An image whose bytes depend on `seed`; odd chunks are compressed; object 0 is `object`.
pub(crate) fn image_at(seed: u64, object: &str) -> Image {
    image_with(seed, object, |_| {})
}

/// The same with a manifest that `damage` has changed.
pub(crate) fn image_with(seed: u64, object: &str, damage: impl Fn(&mut Manifest)) -> Image {
    let mut rng = testkit::Rng::new(seed);
    let (mut bytes, mut stored, mut chunks) = (Vec::new(), Vec::new(), Vec::new());
    for (index, blocks) in CHUNKS.into_iter().enumerate() {
        let mut raw = rng.bytes((blocks * BLOCK_SIZE) as usize);
        // Compressible, and no two blocks alike.
        raw.chunks_mut(64).for_each(|part| part[8..].fill(index as u8));
        let (codec, pack) = match index % 2 {
            0 => (Codec::Raw, raw.clone()),
            _ => (Codec::Zstd, zstd::bulk::compress(&raw, 3).unwrap()),
        };
        chunks.push(ChunkEntry {
            blocks: blocks as u8,
            object: 0,
            stored: ByteRange::at(stored.len() as u64, pack.len() as u64).unwrap(),
            codec,
            digest: Digest::of(&raw),
        });
        bytes.extend(raw);
        stored.extend(pack);
    }
    let kind = ChecksumKind::Crc32c;
    let checksums =
        bytes.chunks(BLOCK_SIZE as usize).flat_map(|block| (kind.of(block) as u32).to_le_bytes());
    let object = ObjectId::new(object).unwrap();
    let mut manifest = Manifest {
        tree: Tree::default(),
        checksum: kind,
        chunks,
        objects: vec![object.clone()],
        block_checksums: checksums.collect(),
    };
    damage(&mut manifest);
    let map = Arc::new(AddressMap::from_manifest(&manifest).unwrap());
    Image { map, bytes, packs: vec![(object, stored)] }
}

/// An image whose source verifies some of its chunks, so that nobody knows their checksums.
pub(crate) fn image_without_checksums(seed: u64) -> Image {
    verified_image(seed, 0, |_| {})
}

/// The same in the derived object of this number, with a manifest that `change` has changed.
pub(crate) fn verified_image(seed: u64, object: u8, change: impl Fn(&mut Manifest)) -> Image {
    image_with(seed, &format!("derived/{}", format!("{object:02x}").repeat(32)), |manifest| {
        // [`Source::identity`] is the digest of the bytes, too.
        for chunk in manifest.chunks.iter_mut().filter(|chunk| chunk.codec == Codec::Raw) {
            chunk.codec = Codec::Verified;
        }
        manifest.block_checksums.fill(0);
        change(manifest);
    })
}

pub(crate) fn image(seed: u64) -> Image {
    image_at(seed, "packs/test")
}

/// A fault of the source, in place of a right answer.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Fault {
    Unavailable,
    NotFound,
    Truncated,
    WrongByte,
    Stall,
    Panic,
}

/// The packs of an image; faults are used up one a read.
pub(crate) struct Store {
    packs: Vec<(ObjectId, Vec<u8>)>,
    pub(crate) faults: Mutex<VecDeque<Fault>>,
    pub(crate) always: Mutex<Option<Fault>>,
    pub(crate) reads: AtomicU64,
    /// Each answer takes one permit.
    pub(crate) gate: Semaphore,
    /// Duration of each answer.
    pub(crate) latency: Mutex<Duration>,
}

/// A handle that tests keep a second one of.
#[derive(Clone)]
pub(crate) struct Source(pub(crate) Arc<Store>);

impl Source {
    pub(crate) fn of(image: &Image) -> Self {
        Self(Arc::new(Store {
            packs: image.packs.clone(),
            faults: Mutex::default(),
            always: Mutex::default(),
            reads: AtomicU64::new(0),
            gate: Semaphore::new(Semaphore::MAX_PERMITS),
            latency: Mutex::default(),
        }))
    }

    /// From now on each answer takes `latency`.
    pub(crate) fn slow_down(&self, latency: Duration) {
        *self.0.latency.lock().unwrap() = latency;
    }

    pub(crate) fn reads(&self) -> u64 {
        self.0.reads.load(Ordering::Relaxed)
    }

    pub(crate) fn fail(&self, faults: impl IntoIterator<Item = Fault>) {
        self.0.faults.lock().unwrap().extend(faults);
    }

    pub(crate) fn fail_always(&self, fault: impl Into<Option<Fault>>) {
        *self.0.always.lock().unwrap() = fault.into();
    }

    /// Holds all answers back until [`Self::open`].
    pub(crate) fn close(&self) {
        self.0.gate.forget_permits(Semaphore::MAX_PERMITS);
    }

    pub(crate) fn open(&self) {
        self.0.gate.add_permits(1 << 20);
    }
}

impl BlockSource for Source {
    async fn read(&self, object: &ObjectId, range: ByteRange) -> Result<Bytes> {
        self.0.reads.fetch_add(1, Ordering::Relaxed);
        self.0.gate.acquire().await.unwrap().forget();
        let latency = *self.0.latency.lock().unwrap();
        if !latency.is_zero() {
            tokio::time::sleep(latency).await;
        }
        let pack = self.0.packs.iter().find(|(name, _)| name == object);
        let pack = &pack.unwrap_or_else(|| panic!("{object} was never there")).1;
        let mut bytes = pack[range.start() as usize..range.end() as usize].to_vec();
        let fault = self.0.faults.lock().unwrap().pop_front();
        let always = *self.0.always.lock().unwrap();
        match fault.or(always) {
            None => {}
            Some(Fault::Unavailable) => {
                return Err(Error::new(ErrorKind::Unavailable, "the store is away"));
            }
            Some(Fault::NotFound) => {
                return Err(Error::new(ErrorKind::NotFound, "the pack is gone"));
            }
            Some(Fault::Truncated) => bytes.truncate(bytes.len() / 2),
            Some(Fault::WrongByte) => *bytes.last_mut().unwrap() ^= 1,
            Some(Fault::Panic) => panic!("the source has a bug"),
            Some(Fault::Stall) => tokio::time::sleep(Duration::MAX).await,
        }
        Ok(bytes.into())
    }

    async fn identity(&self, object: &ObjectId, range: ByteRange) -> Result<Option<Digest>> {
        let is_it = |(name, _): &&(ObjectId, Vec<u8>)| name == object;
        let derived = self.0.packs.iter().find(is_it).filter(|_| object.is(ObjectKind::Derived));
        let bytes = derived.map(|(_, pack)| &pack[range.start() as usize..range.end() as usize]);
        Ok(bytes.map(Digest::of))
    }
}

pub(crate) type TestVolume = Volume<Source, ChecksumFile>;

/// Bytes that the cache of a test holds at most: several images.
const CACHE_LEN: u64 = 16 << 20;

/// A volume of `image`, over a cache and a folder of its own.
pub(crate) struct Setup {
    pub(crate) dir: tempfile::TempDir,
    pub(crate) image: Image,
    pub(crate) source: Source,
    pub(crate) store: MemoryStore,
    pub(crate) volume: Arc<TestVolume>,
    pub(crate) counters: Arc<Counters>,
}

pub(crate) fn setup_with(image: Image, limits: VolumeLimits) -> Setup {
    let (dir, store) = (tempfile::tempdir().unwrap(), MemoryStore::new(CACHE_LEN));
    let source = Source::of(&image);
    let volume = open(&dir, &image, &source, public(&store), limits);
    Setup { dir, image, source, store, volume, counters: Arc::default() }
}

pub(crate) fn setup() -> Setup {
    setup_with(image(1), VolumeLimits::default())
}

/// The cache, for images that are read without credentials.
pub(crate) fn public(store: &MemoryStore) -> CacheAccess {
    CacheAccess { store: Arc::new(store.clone()), domain: Domain::PUBLIC }
}

pub(crate) fn open(
    dir: &tempfile::TempDir,
    image: &Image,
    source: &Source,
    cache: CacheAccess,
    limits: VolumeLimits,
) -> Arc<TestVolume> {
    let map = Arc::clone(&image.map);
    if map.lacks_checksums() {
        let len = image.bytes.len() as u64 / BLOCK_SIZE * RECORDED_CHECKSUM_LEN;
        let checksums = ChecksumFile::open(&dir.path().join("checksums"), len).unwrap();
        return Volume::without_checksums(map, source.clone(), cache, checksums, limits);
    }
    Volume::new(map, source.clone(), cache, limits)
}

/// The key of a chunk with a digest or an identity, in the public domain.
pub(crate) fn key(image: &Image, chunk: u32) -> ChunkKey {
    let chunk = image.map.chunk(chunk);
    let len = chunk.range.len().to_le_bytes();
    let kind = match chunk.codec {
        Codec::Verified => KeyKind::Verified,
        Codec::Raw | Codec::Zstd => KeyKind::Chunk,
    };
    ChunkKey::new(&Domain::PUBLIC, kind, &[chunk.digest.as_bytes(), &len[..]].concat())
}

impl Setup {
    /// The lazy addresses of `blocks` blocks from block `first`.
    pub(crate) fn blocks(&self, first: u64, blocks: u64) -> ByteRange {
        ByteRange::at(DATA_START + first * BLOCK_SIZE, blocks * BLOCK_SIZE).unwrap()
    }

    pub(crate) fn expected(&self, range: ByteRange) -> &[u8] {
        let start = (range.start() - DATA_START) as usize;
        &self.image.bytes[start..][..range.len() as usize]
    }

    /// Reads as a frontend does and compares.
    pub(crate) async fn read(&self, range: ByteRange) -> Result<()> {
        read(&self.volume, &self.image, range, &self.counters).await
    }

    /// Waits until no fetch is in flight, cache writes included.
    pub(crate) async fn settle(&self) {
        while self.volume.status().in_flight > 0 {
            tokio::task::yield_now().await;
        }
    }
}

/// Answers from local data as a frontend does, which itself reads what lies on a disk; `false` if
/// something has to be fetched.
pub(crate) fn hit<D: BlockDevice>(device: &D, offset: u64, buf: &mut [u8]) -> Result<bool> {
    let mut done = 0;
    for _ in 0..64 {
        let at = offset + done as u64;
        match device.try_read(at, &mut buf[done..])? {
            Now::Served => return Ok(true),
            Now::Absent => return Ok(false),
            Now::Local(from) => {
                let piece = &mut buf[done..][..from.range.len() as usize];
                let file = device.local_file(from.file).unwrap();
                rustix::io::pread(file, &mut *piece, from.range.start()).unwrap();
                if device.verify(at, piece, from) == Verdict::Good {
                    done += piece.len();
                }
            }
        }
        if done == buf.len() {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Reads, compares and counts as a frontend does.
pub(crate) async fn read<F: LocalFile + 'static>(
    volume: &Arc<Volume<Source, F>>,
    image: &Image,
    range: ByteRange,
    counters: &Counters,
) -> Result<()> {
    let mut pages = burgeon_block::Pages::zeroed(range.len()).unwrap();
    let buf = pages.bytes_mut();
    if volume.try_read(range, buf)? == Now::Served {
        counters.hits.add(1);
    } else {
        volume.read(range, buf, counters).await.inspect_err(|_| counters.failed_reads.add(1))?;
        counters.misses.add(1);
    }
    let start = (range.start() - DATA_START) as usize;
    assert!(*buf == image.bytes[start..][..range.len() as usize], "wrong bytes for {range}");
    Ok(())
}

/// A file of checksums that fails when told to, and counts the tries.
pub(crate) struct FlakyFile {
    pub(crate) inner: ChecksumFile,
    pub(crate) state: Arc<FlakyState>,
}

#[derive(Default)]
pub(crate) struct FlakyState {
    pub(crate) write_error: Mutex<Option<i32>>,
    pub(crate) read_error: Mutex<Option<i32>>,
    pub(crate) writes: AtomicU64,
}

impl FlakyState {
    pub(crate) fn writes(&self) -> u64 {
        self.writes.load(Ordering::Relaxed)
    }
}

fn fail(what: &str, error: &Mutex<Option<i32>>) -> Result<()> {
    match *error.lock().unwrap() {
        Some(errno) => Err(Error::io(what, std::io::Error::from_raw_os_error(errno))),
        None => Ok(()),
    }
}

impl LocalFile for FlakyFile {
    fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<()> {
        fail("cannot read the checksums", &self.state.read_error)?;
        self.inner.read_at(offset, buf)
    }

    fn write_at(&self, offset: u64, buf: &[u8]) -> Result<()> {
        self.state.writes.fetch_add(1, Ordering::Relaxed);
        fail("cannot write the checksums", &self.state.write_error)?;
        self.inner.write_at(offset, buf)
    }

    fn sync(&self) -> Result<()> {
        self.inner.sync()
    }
}
