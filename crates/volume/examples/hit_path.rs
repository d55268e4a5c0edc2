//! Cost of a hit: `cargo run --release -p burgeon-volume --example hit_path [BLOCKS]`.
//!
//! Reads one materialised image again and again, 4 KiB at a time at pseudo-random places, and
//! prints nanoseconds and allocations a hit: once over a cache in memory (our own work: presence,
//! copy, checksum), once over the real cache file with direct I/O (that and the kernel's). Run it
//! under `valgrind --tool=callgrind` to see where the instructions go.

#[path = "../tests/common/mod.rs"]
mod common;
#[path = "../tests/common/counting.rs"]
mod counting;

use std::{
    sync::{Arc, Mutex, PoisonError},
    time::Instant,
};

use burgeon_block::{BLOCK_SIZE, ByteRange, Counters, Error, LocalFile, Now, Pages, Result};
use burgeon_volume::{Limits, Volume};
use common::{Image, Source, cache_file, image};

#[global_allocator]
static ALLOCATOR: counting::Counting = counting::Counting;

/// A cache in memory.
struct Memory(Mutex<Vec<u8>>);

impl Memory {
    fn with<T>(&self, work: impl FnOnce(&mut Vec<u8>) -> T) -> T {
        work(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl LocalFile for Memory {
    fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<()> {
        self.with(|bytes| buf.copy_from_slice(&bytes[offset as usize..][..buf.len()]));
        Ok(())
    }

    fn write_at(&self, offset: u64, buf: &[u8]) -> Result<()> {
        self.with(|bytes| bytes[offset as usize..][..buf.len()].copy_from_slice(buf));
        Ok(())
    }

    fn punch_hole(&self, range: ByteRange) -> Result<()> {
        self.with(|bytes| bytes[range.start() as usize..range.end() as usize].fill(0));
        Ok(())
    }

    fn next_data(&self, _offset: u64) -> Result<Option<ByteRange>> {
        Ok(None)
    }

    fn sync(&self) -> Result<()> {
        Ok(())
    }
}

fn measure<F: LocalFile + 'static>(
    what: &str,
    image: &Image,
    file: F,
    reads: u64,
) -> Result<(), Box<dyn std::error::Error>> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let counters = Counters::default();
    let volume = Volume::new(Arc::clone(&image.map), Source::of(image), file, Limits::default());
    let progress = runtime.block_on(async { volume.fill().ended().await });
    if progress.done_bytes != progress.total_bytes {
        return Err(format!("the image could not be filled: {progress:?}").into());
    }
    let data = image.map.data_range();
    let mut block = Pages::zeroed(BLOCK_SIZE).ok_or("no memory")?;
    let (mut place, mut served) = (1u64, 0);
    let (before, start) = (counting::allocations(), Instant::now());
    for _ in 0..reads {
        place =
            place.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let index = (place >> 33) % (data.len() / BLOCK_SIZE);
        let range = ByteRange::at(data.start() + index * BLOCK_SIZE, BLOCK_SIZE).ok_or("range")?;
        let answer = volume.try_read(range, block.bytes_mut(), &counters)?;
        served += u64::from(answer == Now::Served);
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
    let memory = Memory(Mutex::new(vec![0; image.bytes.len()]));
    measure("cache in memory", &image, memory, reads)?;
    let file = cache_file(&dir, &image);
    measure(&format!("cache file, {}", file.access()), &image, file, reads)
}
