//! Time and memory of a start with 4 Mi chunks of 256 KiB, 1 TiB in all: `cargo run --release
//! --locked -p burgeon-cache --example restart [FOLDER [CHUNKS]]`.
//!
//! It fails if the start misses its aims.

#[path = "../tests/common/full.rs"]
mod full;

use std::{
    error::Error,
    fs,
    path::{Path, PathBuf},
    time::Instant,
};

use burgeon_cache::{Amount, Cache, CacheSettings, ChunkStore as _, policy::Forecast};

/// The aims: seconds, and MB of memory, for [`CHUNKS`].
const AIM: (f64, u64) = (2.0, 200);
/// 1 TiB.
const CHUNKS: u32 = 4 << 20;
const LIMIT: u64 = 2 << 40;

/// The most memory that this process has had resident, in MB.
fn most_resident() -> Result<u64, Box<dyn Error>> {
    let status = fs::read_to_string("/proc/self/status")?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let kib = line.and_then(|line| line.split_whitespace().next()).ok_or("no VmHWM in status")?;
    Ok(kib.parse::<u64>()? * 1024 / 1_000_000)
}

fn main() -> Result<(), Box<dyn Error>> {
    let mut args = std::env::args_os().skip(1);
    let folder = args.next().map_or_else(std::env::temp_dir, PathBuf::from);
    let folder = folder.join(format!("burgeon-restart-{}", std::process::id()));
    let chunks = match args.next() {
        Some(chunks) => chunks.to_string_lossy().parse()?,
        None => CHUNKS,
    };
    let result = measure(&folder, chunks);
    fs::remove_dir_all(&folder)?;
    result
}

fn measure(folder: &Path, chunks: u32) -> Result<(), Box<dyn Error>> {
    full::make(folder, chunks)?;
    println!("{} MB of memory before the start", most_resident()?);
    let settings = CacheSettings {
        limit: Some(Amount::Bytes(LIMIT)),
        keep_free: Amount::Bytes(0),
        ..CacheSettings::default()
    };
    let begin = Instant::now();
    let cache = Cache::open(folder, settings, Box::new(Forecast::new(LIMIT, 1)))?;
    let took = begin.elapsed();
    let report = cache.report();
    let (seconds, memory) = (took.as_secs_f64(), most_resident()?);
    println!("{} chunks of {chunks} after {seconds:.2} s; {memory} MB of memory", report.chunks);
    let begin = Instant::now();
    let found = (0..chunks).step_by(4).filter(|n| cache.find(&full::key(*n)).is_some()).count();
    let each = begin.elapsed().as_nanos() as usize / found.max(1);
    println!("{found} of {} keys found, {each} ns each", chunks.div_ceil(4));
    match seconds <= AIM.0 && memory < AIM.1 && found == chunks.div_ceil(4) as usize {
        true => Ok(()),
        false => Err(format!("the aim is {} s and {} MB", AIM.0, AIM.1).into()),
    }
}
