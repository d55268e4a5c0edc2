//! A hit allocates nothing: the server must answer them when there is no memory to be had.

#![allow(clippy::unwrap_used)] // helpers of tests

mod common;
#[path = "common/counting.rs"]
mod counting;

use std::sync::Arc;

use burgeon_block::{BlockDevice, Digest, Now, Pages};
use burgeon_cache::{Amount, Cache, CacheSettings, Domain, policy::Clock};
use burgeon_image::{Content, ExtentSource, ExtentWriter, Mapping};
use burgeon_volume::{CacheAccess, ChecksumFile, LazyDevice, VirtualArea, VolumeLimits};
use common::{DATA_START, Image, Setup, image, image_without_checksums};

#[global_allocator]
static ALLOCATOR: counting::Counting = counting::Counting;

/// A volume over a cache in a folder: the one in memory allocates everywhere.
fn setup_with(image: Image) -> Setup {
    let setup = common::setup_with(image, VolumeLimits::default());
    let path = setup.dir.path().join("cache");
    let settings = CacheSettings { keep_free: Amount::Bytes(0), ..CacheSettings::default() };
    let cache = Cache::open(&path, settings, Box::<Clock>::default()).unwrap();
    let access = CacheAccess { store: Arc::new(cache), domain: Domain::of(b"somebody") };
    let volume =
        common::open(&setup.dir, &setup.image, &setup.source, access, VolumeLimits::default());
    Setup { volume, ..setup }
}

fn setup() -> Setup {
    setup_with(image(1))
}

#[test]
fn hits_and_zeros_and_superblocks_allocate_nothing() {
    hits_allocate_nothing(setup());
    hits_allocate_nothing(setup_with(image_without_checksums(1)));
}

fn hits_allocate_nothing(setup: Setup) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let all = setup.volume.map().data_range();
    runtime.block_on(async {
        setup.read(all).await.unwrap();
        setup.settle().await;
    });
    let superblocks = vec![(65536, Box::new([1; 4096]))];
    let device =
        LazyDevice::new(setup.volume.clone(), setup.counters.clone(), all.end(), superblocks)
            .unwrap();
    let mut pages = Pages::zeroed(1 << 18).unwrap();
    let mut read = |offset: u64, len: usize| {
        let before = counting::allocations();
        let is_hit = common::hit(&device, offset, &mut pages.bytes_mut()[..len]);
        assert_eq!(counting::allocations() - before, 0, "{len} bytes at {offset}");
        assert!(is_hit.unwrap());
    };
    for _ in 0..100 {
        read(DATA_START, 4096);
        read(DATA_START + (60 << 12), 1 << 16);
        read(0, 1 << 17);
        read(DATA_START - 8192, 1 << 14);
    }

    // A miss allocates nothing before it is one.
    let empty = setup_with(image(1));
    let before = counting::allocations();
    let answer = empty.volume.try_read(empty.blocks(0, 1), &mut pages.bytes_mut()[..4096]);
    assert_eq!(counting::allocations() - before, 0);
    assert_eq!(answer.unwrap(), Now::Absent);
}

#[test]
fn a_hit_of_a_mapped_image_allocates_nothing() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let setup = setup();
    let all = setup.volume.map().data_range();
    let source = ExtentSource::Image(Digest::of(b"the image"));
    let extents = vec![Content { source, offset: 0, len: all.len() }];
    ExtentWriter::create(setup.dir.path(), 1 << 40).unwrap();
    let mut writer = ExtentWriter::open(setup.dir.path()).unwrap();
    writer.map(&Mapping { label: "l".into(), origin: "o".into(), extents }).unwrap();
    let volume = Arc::clone(&setup.volume);
    let open = Box::new(move |_: &Digest| Ok(Arc::clone(&volume)));
    let source = setup.source.clone();
    let checksums = setup.dir.path().join("checksums");
    let checksums = Box::new(move |len| ChecksumFile::open(&checksums, len));
    let (dir, limits) = (setup.dir.path(), VolumeLimits::default());
    let area = VirtualArea::open(dir, 1 << 40, source, open, checksums, limits);
    let device =
        LazyDevice::new(setup.volume.clone(), setup.counters.clone(), 1 << 42, Vec::new()).unwrap();
    let device = device.with_area(1 << 41, area).unwrap();
    let mut pages = Pages::zeroed(1 << 16).unwrap();
    runtime.block_on(async {
        setup.read(all).await.unwrap();
        setup.settle().await;
        device.read(1 << 41, pages.bytes_mut()).await.unwrap();
    });
    for offset in [0, 4096, 60 << 12] {
        let before = counting::allocations();
        let answer = device.try_read((1 << 41) + offset, pages.bytes_mut());
        assert_eq!(counting::allocations() - before, 0, "{offset}");
        assert_eq!(answer.unwrap(), Now::Served);
        assert!(pages.bytes() == &setup.image.bytes[offset as usize..][..1 << 16]);
    }
}

#[test]
fn the_counting_allocator_counts() {
    let before = counting::allocations();
    drop(std::hint::black_box(vec![1u8; 100]));
    assert_eq!(counting::allocations() - before, 1);
}
