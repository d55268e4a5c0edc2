//! Cost of a hit: `cargo run --release -p burgeon-volume --example hit_path [BLOCKS]`.
//!
//! Reads one materialised image again and again, 4 KiB at a time at pseudo-random places, and
//! prints nanoseconds and allocations a hit: over the host's cache in a folder on this disk and,
//! if there is one, in `/dev/shm`. Run it under `valgrind --tool=callgrind` to see where the
//! instructions go.

#[path = "../tests/common/mod.rs"]
mod common;
#[path = "../tests/common/counting.rs"]
mod counting;

use std::{path::Path, sync::Arc, time::Instant};

use burgeon_block::{BLOCK_SIZE, Error, Pages};
use burgeon_cache::{Amount, Cache, CacheSettings, ChunkOwner, Domain, policy::Clock};
use burgeon_volume::{CacheAccess, LazyDevice, VolumeLimits};
use common::{Image, Source, TestVolume, hit, image};

#[global_allocator]
static ALLOCATOR: counting::Counting = counting::Counting;

fn measure(
    what: &str,
    image: &Image,
    folder: &Path,
    reads: u64,
) -> Result<(), Box<dyn std::error::Error>> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let settings = CacheSettings { keep_free: Amount::Bytes(0), ..CacheSettings::default() };
    let cache = Arc::new(Cache::open(folder, settings, Box::<Clock>::default())?);
    // As a server has it.
    let owner = ChunkOwner { image: "image".to_owned(), store: "store".to_owned() };
    let access = CacheAccess { store: cache.for_owner(&owner), domain: Domain::PUBLIC };
    let (map, source) = (Arc::clone(&image.map), Source::of(image));
    let volume = TestVolume::new(map, source, access, VolumeLimits::default());
    let progress = runtime.block_on(async { volume.fill().ended().await });
    if progress.done_bytes != progress.total_bytes {
        return Err(format!("the image could not be filled: {progress:?}").into());
    }
    let data = image.map.data_range();
    let device = LazyDevice::new(volume, Arc::default(), data.end(), Vec::new())?;
    let mut block = Pages::zeroed(BLOCK_SIZE).ok_or("no memory")?;
    let (mut place, mut served) = (1u64, 0);
    let (before, start) = (counting::allocations(), Instant::now());
    for _ in 0..reads {
        place =
            place.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let index = (place >> 33) % (data.len() / BLOCK_SIZE);
        let is_hit = hit(&device, data.start() + index * BLOCK_SIZE, block.bytes_mut())?;
        served += u64::from(is_hit);
    }
    let ns = start.elapsed().as_nanos() as f64 / reads as f64;
    let allocations = counting::allocations() - before;
    println!("{what}: {ns:.0} ns a 4 KiB hit, {allocations} allocations in {served} hits");
    if served != reads || allocations != 0 {
        return Err(Error::new(burgeon_block::ErrorKind::Corrupt, "not every hit was one").into());
    }
    Ok(())
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let reads = std::env::args().nth(1).map_or(Ok(200_000), |reads| reads.parse())?;
    let image = image(1);
    let dir = tempfile::tempdir_in(".")?;
    measure("cache on this disk", &image, &dir.path().join("cache"), reads)?;
    if let Ok(dir) = tempfile::tempdir_in("/dev/shm") {
        measure("cache in memory", &image, &dir.path().join("cache"), reads)?;
    }
    Ok(())
}
