//! The virtual area: computed, local and image content at its addresses, the same for ever.

#![allow(clippy::unwrap_used)]

mod common;

use std::{
    collections::HashMap,
    sync::{Arc, Mutex},
};

use burgeon_block::{
    BLOCK_SIZE, BlockDevice, BlockSource, ByteRange, Counters, Digest, Error, ErrorKind,
    FileIdentity, Now, ObjectId, Pages, Result,
};
use burgeon_cache::testing::MemoryStore;
use burgeon_image::{Content, ExtentMap, ExtentSource, ExtentWriter, Mapping};
use burgeon_volume::{
    ChecksumFile, LazyDevice, OpenChecksums, OpenImage, VirtualArea, Volume, VolumeLimits,
};
use bytes::Bytes;
use common::{Fault, Image, image, public};

const SIZE: u64 = 1 << 50;
const AREA_START: u64 = 1 << 41;

/// Local files, an image's packs, and `computed/…`: each block is full of its number's low byte.
#[derive(Clone)]
struct World(Arc<State>);

struct State {
    packs: common::Source,
    files: Mutex<HashMap<ObjectId, (FileIdentity, Vec<u8>)>>,
}

impl World {
    fn put(&self, name: &str, identity: FileIdentity, bytes: &[u8]) {
        let object = ObjectId::new(format!("file/{name}")).unwrap();
        self.0.files.lock().unwrap().insert(object, (identity, bytes.to_vec()));
    }

    fn remove(&self, name: &str) {
        self.0.files.lock().unwrap().remove(&ObjectId::new(format!("file/{name}")).unwrap());
    }
}

impl BlockSource for World {
    async fn read(&self, object: &ObjectId, range: ByteRange) -> Result<Bytes> {
        self.0.packs.read(object, range).await
    }

    fn read_now(&self, object: &ObjectId, range: ByteRange, buf: &mut [u8]) -> Option<Result<()>> {
        object.as_str().starts_with("computed/").then(|| {
            let blocks = range.start() / BLOCK_SIZE..;
            buf.chunks_mut(BLOCK_SIZE as usize).zip(blocks).for_each(|(b, n)| b.fill(n as u8));
            Ok(())
        })
    }

    async fn read_identified(
        &self,
        object: &ObjectId,
        range: ByteRange,
    ) -> Result<(FileIdentity, Bytes)> {
        let files = self.0.files.lock().unwrap();
        let gone = || Error::new(ErrorKind::NotFound, format!("{object} is gone"));
        let (identity, bytes) = files.get(object).ok_or_else(gone)?;
        let end = (range.end() as usize).min(bytes.len());
        let bytes = Bytes::copy_from_slice(&bytes[(range.start() as usize).min(end)..end]);
        Ok((*identity, bytes))
    }
}

fn identity(size: usize) -> FileIdentity {
    FileIdentity { inode: 5, size: size as u64, mtime_ns: 1, ctime_ns: 2 }
}

fn content(name: &str, bytes: &[u8]) -> Content {
    let object = ObjectId::new(format!("file/{name}")).unwrap();
    let source = ExtentSource::File { object, identity: identity(bytes.len()) };
    Content { source, offset: 0, len: bytes.len() as u64 }
}

fn computed(len: u64) -> Content {
    let object = ObjectId::new("computed/block-number").unwrap();
    Content { source: ExtentSource::Computed(object), offset: 0, len }
}

type Device = LazyDevice<World, ChecksumFile>;

struct Setup {
    dir: tempfile::TempDir,
    image: Image,
    world: World,
    writer: ExtentWriter,
    device: Device,
    counters: Arc<Counters>,
}

fn noise(seed: u64, len: usize) -> Vec<u8> {
    testkit::Rng::new(seed).bytes(len)
}

fn setup() -> Setup {
    let dir = tempfile::tempdir().unwrap();
    let image = image(3);
    let state = State { packs: common::Source::of(&image), files: Mutex::default() };
    ExtentWriter::create(dir.path(), SIZE).unwrap();
    let writer = ExtentWriter::open(dir.path()).unwrap();
    let (world, counters) = (World(Arc::new(state)), Arc::default());
    let device = device(&dir, &image, &world, &counters);
    Setup { dir, image, world, writer, device, counters }
}

/// Opens the checksums that an area has recorded in `dir`.
fn checksums(dir: &tempfile::TempDir) -> OpenChecksums<ChecksumFile> {
    let path = dir.path().join("checksums");
    Box::new(move |len| ChecksumFile::open(&path, len))
}

/// The start of a server.
fn device(
    dir: &tempfile::TempDir,
    image: &Image,
    world: &World,
    counters: &Arc<Counters>,
) -> Device {
    let limits = VolumeLimits::default();
    let cache = public(&MemoryStore::new(1 << 20));
    let volume = Volume::new(Arc::clone(&image.map), world.clone(), cache, limits.clone());
    let mapped = Arc::clone(&volume);
    let open: OpenImage<World, ChecksumFile> = Box::new(move |digest| match digest {
        digest if *digest == Digest::of(b"the image") => Ok(Arc::clone(&mapped)),
        digest => Err(Error::new(ErrorKind::NotFound, format!("there is no image {digest}"))),
    });
    let area = VirtualArea::open(dir.path(), SIZE, world.clone(), open, checksums(dir), limits);
    LazyDevice::new(volume, Arc::clone(counters), AREA_START + SIZE, Vec::new())
        .unwrap()
        .with_area(AREA_START, area)
        .unwrap()
}

impl Setup {
    fn map(&mut self, extents: Vec<Content>) -> u64 {
        let mapping = Mapping { label: "l".into(), origin: "o".into(), extents };
        let range = self.writer.map(&mapping).unwrap();
        self.area().refresh().unwrap();
        range.start()
    }

    fn area(&self) -> &Arc<VirtualArea<World, ChecksumFile>> {
        self.device.area().unwrap()
    }

    /// Reads `len` bytes from `offset` of the area as a frontend does.
    async fn read(&self, offset: u64, len: u64) -> Result<Vec<u8>> {
        let mut pages = Pages::zeroed(len).unwrap();
        let buf = pages.bytes_mut();
        buf.fill(0xee);
        if self.device.try_read(AREA_START + offset, buf)? == Now::Absent {
            self.device.read(AREA_START + offset, buf).await?;
        }
        Ok(buf.to_vec())
    }

    async fn kind(&self, offset: u64) -> ErrorKind {
        let error = self.read(offset, BLOCK_SIZE).await.unwrap_err();
        assert_eq!(error.errno(), libc::EIO);
        error.kind()
    }

    /// The server ends and another begins.
    fn restart(&mut self) {
        self.device = device(&self.dir, &self.image, &self.world, &self.counters);
    }
}

#[tokio::test]
async fn every_kind_of_content_reads_as_what_it_is() {
    let mut setup = setup();
    let data = setup.image.map.data_range();
    let bytes = noise(1, 200_001);
    setup.world.put("a", identity(bytes.len()), &bytes);
    let whole = ExtentSource::Image(Digest::of(b"the image"));
    let image = Content { source: whole, offset: 0, len: data.len() };
    let start = setup.map(vec![computed(1 << 40), content("a", &bytes), image]);
    assert_eq!(start, 0);
    let blocks = setup.read((1 << 40) - 2 * BLOCK_SIZE, 3 * BLOCK_SIZE).await.unwrap();
    assert_eq!((blocks[0], blocks[4096], &blocks[8192..]), (0xfe, 0xff, &bytes[..4096]));

    let mut padded = bytes.clone();
    padded.resize(bytes.len().next_multiple_of(BLOCK_SIZE as usize), 0);
    assert!(setup.read(1 << 40, padded.len() as u64).await.unwrap() == padded);
    let image_start = (1 << 40) + padded.len() as u64;
    assert!(setup.read(image_start, data.len()).await.unwrap() == setup.image.bytes);
    let odd = setup.read(image_start - BLOCK_SIZE, 3 * BLOCK_SIZE).await.unwrap();
    assert!(odd[..4096] == padded[padded.len() - 4096..]);
    assert!(odd[4096..] == setup.image.bytes[..8192]);

    // Below the area the device is unchanged, and data that was read as mapped is in its cache.
    while setup.device.volume().status().in_flight > 0 {
        tokio::task::yield_now().await;
    }
    let mut pages = Pages::zeroed(BLOCK_SIZE).unwrap();
    assert_eq!(setup.device.try_read(data.start(), pages.bytes_mut()).unwrap(), Now::Served);
    assert!(pages.bytes() == &setup.image.bytes[..4096]);
    assert_eq!(setup.device.try_read(1 << 30, pages.bytes_mut()).unwrap(), Now::Served);
    assert!(pages.bytes().iter().all(|byte| *byte == 0));

    setup.restart();
    assert!(setup.read(1 << 40, padded.len() as u64).await.unwrap() == padded);
    assert_eq!(setup.area().status().changed_reads, 0);
}

#[tokio::test]
async fn a_block_that_was_never_mapped_is_an_error_that_status_names() {
    let mut setup = setup();
    assert_eq!(setup.kind(0).await, ErrorKind::Unmapped);
    setup.map(vec![computed(4096)]);
    assert_eq!(setup.kind(8192).await, ErrorKind::Unmapped);
    setup.read(0, 8192).await.unwrap_err();
    let status = setup.area().status();
    assert_eq!((status.unmapped_reads, status.last_unmapped), (3, Some(4096)));
    assert_eq!(status.records, 2);
    assert!(setup.read(0, 4096).await.unwrap().iter().all(|byte| *byte == 0));
}

#[tokio::test(start_paused = true)]
async fn a_file_that_was_replaced_or_changed_is_an_error_that_names_it() {
    let mut setup = setup();
    let bytes = noise(2, 100_000);
    let was = identity(bytes.len());
    setup.world.put("a", was, &bytes);
    let at = setup.map(vec![content("a", &bytes)]);
    assert!(setup.read(at, 8192).await.unwrap() == bytes[..8192]);
    for changed in [
        FileIdentity { inode: 6, ..was },
        FileIdentity { size: was.size + 1, ..was },
        FileIdentity { size: 50_000, ..was },
        FileIdentity { mtime_ns: 9, ..was },
        FileIdentity { ctime_ns: 9, ..was },
    ] {
        setup.world.put("a", changed, &bytes);
        assert_eq!(setup.kind(at).await, ErrorKind::Corrupt, "{changed:?}");
        let named = setup.area().status().last_changed.unwrap();
        assert!(named.starts_with("/a was changed"), "{named}");
    }
    // A source that shrank.
    setup.world.put("a", was, &bytes[..10_000]);
    assert_eq!(setup.kind(at + 65536).await, ErrorKind::Corrupt);
    setup.world.remove("a");
    assert_eq!(setup.kind(at).await, ErrorKind::Unavailable);
    setup.world.put("a", was, &bytes);
    assert!(setup.read(at, 8192).await.unwrap() == bytes[..8192], "it is back");
}

#[tokio::test]
async fn other_bytes_under_the_same_identity_are_refused_also_by_the_next_server() {
    let mut setup = setup();
    let mut bytes = noise(3, 1 << 20);
    let was = identity(bytes.len());
    setup.world.put("a", was, &bytes);
    let at = setup.map(vec![content("a", &bytes)]);
    setup.read(at + 131_072, 4096).await.unwrap();
    let block = 131_072 + 40_000;
    bytes[block] ^= 1;
    setup.world.put("a", was, &bytes);
    for _ in 0..2 {
        assert_eq!(setup.kind(at + 131_072).await, ErrorKind::Corrupt);
        setup.restart();
    }
    let before = setup.area().status().last_changed;
    assert_eq!(before, None, "the last server's");
    // Blocks that were never read are recorded now.
    assert!(setup.read(at, 4096).await.unwrap() == bytes[..4096]);
    bytes[block] ^= 1;
    setup.world.put("a", was, &bytes);
    assert!(setup.read(at, 1 << 20).await.unwrap() == bytes);
}

#[tokio::test]
async fn a_missing_image_is_an_error_until_it_is_there() {
    let mut setup = setup();
    let source = ExtentSource::Image(Digest::of(b"another"));
    let at = setup.map(vec![Content { source, offset: 0, len: 4096 }]);
    assert_eq!(setup.kind(at).await, ErrorKind::Unavailable);
    let error = setup.area().status().last_source_error.unwrap();
    assert!(error.contains(&Digest::of(b"another").to_string()), "{error}");
    // Beyond the end of an image that is there.
    let source = ExtentSource::Image(Digest::of(b"the image"));
    let at = setup.map(vec![Content { source, offset: 1 << 30, len: 4096 }]);
    assert!(setup.read(at, 4096).await.is_err());
}

#[tokio::test]
async fn an_image_whose_source_failed_is_found_anew_when_something_is_mapped() {
    let setup = setup();
    let dir = tempfile::tempdir().unwrap();
    let source = ExtentSource::Image(Digest::of(b"the image"));
    let extents = vec![Content { source, offset: 0, len: 4096 }];
    ExtentWriter::create(dir.path(), SIZE).unwrap();
    let mapping = Mapping { label: "l".into(), origin: "o".into(), extents };
    ExtentWriter::open(dir.path()).unwrap().map(&mapping).unwrap();
    let opened = Arc::new(Mutex::new(0));
    let counted = Arc::clone(&opened);
    let (map, world) = (Arc::clone(&setup.image.map), setup.world.clone());
    let open: OpenImage<World, ChecksumFile> = Box::new(move |_| {
        let mut opened = counted.lock().unwrap();
        *opened += 1;
        let cache = public(&MemoryStore::new(1 << 20));
        Ok(Volume::new(Arc::clone(&map), world.clone(), cache, VolumeLimits::default()))
    });
    let (world, limits) = (setup.world.clone(), VolumeLimits::default());
    let area = VirtualArea::open(dir.path(), SIZE, world, open, checksums(&dir), limits);
    let mut pages = Pages::zeroed(4096).unwrap();
    let block = ByteRange::at(0, 4096).unwrap();
    setup.world.0.packs.fail_always(Fault::NotFound);
    area.read(block, pages.bytes_mut(), &setup.counters).await.unwrap_err();
    setup.world.0.packs.fail_always(None);
    for count in [2, 2] {
        area.refresh().unwrap();
        area.read(block, pages.bytes_mut(), &setup.counters).await.unwrap();
        assert_eq!(*opened.lock().unwrap(), count);
    }
}

#[tokio::test]
async fn without_its_map_every_read_is_an_error_until_it_is_back() {
    let mut setup = setup();
    let at = setup.map(vec![computed(1 << 20)]);
    let (here, away) = (setup.dir.path().join("extents"), setup.dir.path().join("away"));
    std::fs::rename(&here, &away).unwrap();
    let events = testkit::Events::gather();
    setup.restart();
    let said = events.take();
    assert!(said[0].starts_with("ERROR mapped content cannot be read"), "{said:?}");
    for read in 1..=3 {
        assert!(events.take().is_empty(), "it is told once");
        assert_eq!(setup.kind(at + (read << 12)).await, ErrorKind::Corrupt);
        let status = setup.area().status();
        assert_eq!((status.lost_reads, status.records, status.size), (read, 0, SIZE));
        assert!(status.problem.unwrap().contains("No such file"));
        setup.area().refresh().unwrap();
    }
    let error = setup.device.fill_ranges(&[ByteRange::at(AREA_START, 4096).unwrap()]).await;
    assert_eq!(error.err().unwrap().kind(), ErrorKind::Corrupt);
    // The map of an area of another size is not this one's.
    let other = tempfile::tempdir().unwrap();
    ExtentWriter::create(other.path(), SIZE / 2).unwrap();
    let open: OpenImage<World, ChecksumFile> = Box::new(|_| unreachable!("nothing is mapped"));
    let (world, limits) = (setup.world.clone(), VolumeLimits::default());
    let area = VirtualArea::open(other.path(), SIZE, world, open, checksums(&other), limits);
    assert_eq!(area.size(), SIZE);
    assert!(area.status().problem.unwrap().contains("this area has"));
    std::fs::rename(&away, &here).unwrap();
    assert_eq!(setup.kind(at).await, ErrorKind::Corrupt, "until it is looked at again");
    setup.area().refresh().unwrap();
    assert_eq!(setup.read(at + 4096, 4096).await.unwrap(), vec![1; 4096]);
    let status = setup.area().status();
    assert_eq!((status.problem, status.lost_reads, status.records), (None, 4, 2));
}

#[tokio::test]
async fn beyond_its_fetch_limit_a_mount_answers_what_is_local_and_no_more() {
    let mut setup = setup();
    let bytes = noise(4, 1 << 20);
    setup.world.put("a", identity(bytes.len()), &bytes);
    let image = Content {
        source: ExtentSource::Image(Digest::of(b"the image")),
        offset: 0,
        len: setup.image.map.data_range().len(),
    };
    let at = setup.map(vec![computed(1 << 40), content("a", &bytes), image]);
    let image_at = at + (1 << 40) + (1 << 20);
    setup.restart();
    let limit = 4 << 20;
    let device = device(&setup.dir, &setup.image, &setup.world, &setup.counters);
    setup.device = device.with_fetch_limit(limit);
    setup.read(image_at, 4096).await.unwrap();
    while setup.device.volume().status().in_flight > 0 {
        tokio::task::yield_now().await;
    }
    let mut read = 0;
    let error = loop {
        match setup.read(at + read, 1 << 20).await {
            Ok(_) => read += 1 << 20,
            Err(error) => break error,
        }
    };
    assert_eq!(error.kind(), ErrorKind::OverLimit);
    assert!(error.to_string().contains("--fetch-limit"), "{error}");
    assert!(setup.counters.fetched_bytes.get() <= limit + (1 << 20));
    assert_eq!(setup.kind(at + (1 << 40)).await, ErrorKind::OverLimit, "a file");
    assert_eq!(setup.kind(image_at + (150 << 12)).await, ErrorKind::OverLimit, "an image");
    assert_eq!(setup.device.over_limit_reads(), 3);
    setup.read(image_at, 4096).await.unwrap();
}

#[test]
fn an_area_that_does_not_fit_is_refused() {
    let setup = setup();
    let data = setup.image.map.data_range();
    for start in [data.start(), data.end() - 4096, AREA_START + 4096, 1, u64::MAX - 4095] {
        let area = Arc::clone(setup.area());
        let volume = Arc::clone(setup.device.volume());
        let counters = Arc::clone(&setup.counters);
        let device = LazyDevice::new(volume, counters, AREA_START + SIZE, Vec::new()).unwrap();
        assert!(device.with_area(start, area).is_err(), "{start}");
    }
    assert_eq!(ExtentMap::open(setup.dir.path()).unwrap().size(), SIZE);
}
