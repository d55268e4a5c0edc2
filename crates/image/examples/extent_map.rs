//! Measures the time to open an extent map and look up addresses, and its memory: `cargo run
//! --release -p burgeon-image --example extent_map [EXTENTS]`, by default 100 million. The map is
//! created in a temporary folder below `TMPDIR`: 24 bytes per extent.

use std::{error::Error, time::Instant};

use burgeon_block::{BLOCK_SIZE, ObjectId};
use burgeon_image::{Content, ExtentMap, ExtentSource, ExtentWriter, Mapping};

/// Extents per call: as many as a large tree has.
const CALL: u64 = 5_000_000;
const LOOKUPS: usize = 2_000_000;
const ROUNDS: usize = 5;
/// Words of the memory that lookups are compared with: a gigabyte, too large for every cache.
const WORDS: u64 = 1 << 27;

fn main() -> Result<(), Box<dyn Error>> {
    let extents = match std::env::args().nth(1) {
        Some(text) => text.parse()?,
        None => 100_000_000,
    };
    let folder = std::env::temp_dir().join(format!("extent-map-{}", std::process::id()));
    std::fs::create_dir(&folder)?;
    let result = run(&folder, extents);
    std::fs::remove_dir_all(&folder)?;
    result
}

fn run(folder: &std::path::Path, extents: u64) -> Result<(), Box<dyn Error>> {
    let mut random = 7;
    ExtentWriter::create(folder, 7 << 60)?;
    let mut writer = ExtentWriter::open(folder)?;
    let source = ExtentSource::Computed(ObjectId::new("computed/block-number")?);
    let start = Instant::now();
    let mut left = extents;
    while left > 0 {
        let count = left.min(CALL);
        let content = |_| {
            let (offset, blocks) = (next(&mut random) % 1000, next(&mut random) % 100 + 1);
            let (offset, len) = (offset * BLOCK_SIZE, blocks * BLOCK_SIZE);
            Content { source: source.clone(), offset, len }
        };
        let extents = (0..count).map(content).collect();
        writer.map(&Mapping { label: "tree".into(), origin: "tree".into(), extents })?;
        left -= count;
    }
    let per_second = extents as f64 / start.elapsed().as_secs_f64();
    println!("mapped: {extents} extents, {:.1} million a second", per_second / 1e6);
    let end = writer.mappings()?.last().map_or(0, |last| last.range.end());
    drop(writer);

    let before = resident()?;
    let mut opening = Vec::new();
    for _ in 0..ROUNDS {
        let start = Instant::now();
        drop(ExtentMap::open(folder)?);
        opening.push(start.elapsed().as_secs_f64());
    }
    opening.sort_by(f64::total_cmp);
    println!("opened: {:.3} s (median of {ROUNDS})", opening[ROUNDS / 2]);

    let map = ExtentMap::open(folder)?;
    let mut tails = Vec::new();
    for _ in 0..ROUNDS {
        let mut times: Vec<u64> = Vec::with_capacity(LOOKUPS);
        for _ in 0..LOOKUPS {
            let at = next(&mut random) % end;
            let start = Instant::now();
            let extent = map.find(at)?;
            times.push(start.elapsed().as_nanos() as u64);
            assert!(extent.range.contains(at));
        }
        times.sort_unstable();
        let quantile = |of_1000: usize| times[LOOKUPS * of_1000 / 1000];
        println!("looked up: {} ns median, {} ns at p99", quantile(500), quantile(990));
        tails.push(quantile(990));
    }
    compare(&mut random);
    tails.sort_unstable();
    println!("lookup at p99: {} ns (median of {ROUNDS} rounds)", tails[ROUNDS / 2]);
    let used = resident()?.saturating_sub(before);
    let bytes = used as f64 / extents as f64;
    println!(
        "memory: {} MB resident, pages of the files included: {bytes:.1} bytes an extent",
        used >> 20
    );
    Ok(())
}

/// Time of an uncached memory access: a lookup takes a few of them.
fn compare(random: &mut u64) {
    let memory: Vec<u64> = (0..WORDS).collect();
    let look = |_| {
        let at = (next(random) % WORDS) as usize;
        let start = Instant::now();
        std::hint::black_box(memory[at]);
        start.elapsed().as_nanos() as u64
    };
    let mut times: Vec<u64> = (0..LOOKUPS).map(look).collect();
    times.sort_unstable();
    let (median, tail) = (times[LOOKUPS / 2], times[LOOKUPS * 99 / 100]);
    println!("one look at a gigabyte of memory: {median} ns median, {tail} ns at p99");
}

/// SplitMix64.
fn next(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut z = *state;
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// Resident bytes of this process, mapped files included.
fn resident() -> Result<u64, Box<dyn Error>> {
    let statm = std::fs::read_to_string("/proc/self/statm")?;
    let pages: u64 = statm.split(' ').nth(1).ok_or("no resident pages")?.parse()?;
    Ok(pages * BLOCK_SIZE)
}
