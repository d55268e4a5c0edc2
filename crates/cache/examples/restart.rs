//! Time and memory of a start with 4 Mi chunks of 256 KiB, 1 TiB in all: `cargo run --release
//! --locked -p burgeon-cache --example restart [FOLDER [CHUNKS]]`.
//!
//! The arenas are files of holes, so that the folder takes 120 MB only.

use std::{
    error::Error,
    fs::{self, File},
    io::{BufWriter, Write as _},
    path::{Path, PathBuf},
    time::Instant,
};

use burgeon_cache::{
    Amount, Cache, CacheSettings, ChunkKey, ChunkStore as _, Domain, KeyKind, checkpoint,
    journal::{Event, Record},
    policy::Clock,
};

const BLOCKS: u32 = 64;
const ARENA_BLOCKS: u32 = 1 << 22;
const GROUP: usize = 2048;

fn key(n: u32) -> ChunkKey {
    ChunkKey::new(&Domain::PUBLIC, KeyKind::Chunk, &n.to_le_bytes())
}

fn record(n: u32) -> Record {
    let per_arena = ARENA_BLOCKS / BLOCKS;
    let (arena, block) = (1 + n / per_arena, n % per_arena * BLOCKS);
    Record { event: Event::Admitted, key: key(n), arena, block, about: BLOCKS }
}

fn build(folder: &Path, chunks: u32) -> Result<(), Box<dyn Error>> {
    fs::create_dir_all(folder)?;
    for arena in 1..=chunks.div_ceil(ARENA_BLOCKS / BLOCKS) {
        let file = File::create(folder.join(format!("arena-{arena:08x}")))?;
        file.set_len(u64::from(ARENA_BLOCKS) * 4096)?;
    }
    let (number, id) = (1, 7);
    let file = File::create(folder.join(format!("checkpoint-{number:016x}")))?;
    let mut file = BufWriter::new(file);
    file.write_all(&checkpoint::header(number, id))?;
    let mut groups = 0;
    for first in (0..chunks).step_by(GROUP) {
        let end = chunks.min(first + GROUP as u32);
        let group: Vec<Record> = (first..end).map(record).collect();
        file.write_all(&checkpoint::encode_group(&group, id, groups))?;
        groups += 1;
    }
    file.write_all(&checkpoint::encode_end(chunks.into(), id, groups))?;
    file.flush()?;
    Ok(())
}

/// Bytes that this process has resident, and the most that it had.
fn resident() -> Result<String, Box<dyn Error>> {
    let status = fs::read_to_string("/proc/self/status")?;
    let lines =
        status.lines().filter(|line| line.starts_with("VmRSS") || line.starts_with("VmHWM"));
    Ok(lines
        .map(|line| line.split_whitespace().collect::<Vec<_>>().join(" "))
        .collect::<Vec<_>>()
        .join(", "))
}

fn main() -> Result<(), Box<dyn Error>> {
    let mut args = std::env::args_os().skip(1);
    let folder = args.next().map_or_else(std::env::temp_dir, PathBuf::from);
    let folder = folder.join(format!("burgeon-restart-{}", std::process::id()));
    let chunks = match args.next() {
        Some(chunks) => chunks.to_string_lossy().parse()?,
        None => 4 << 20,
    };
    let result = measure(&folder, chunks);
    fs::remove_dir_all(&folder)?;
    result
}

fn measure(folder: &Path, chunks: u32) -> Result<(), Box<dyn Error>> {
    build(folder, chunks)?;
    println!("before: {}", resident()?);
    let settings = CacheSettings {
        limit: Some(Amount::Bytes(2 << 40)),
        keep_free: Amount::Bytes(0),
        ..CacheSettings::default()
    };
    let begin = Instant::now();
    let cache = Cache::open(folder, settings, Box::<Clock>::default())?;
    let took = begin.elapsed();
    let report = cache.report();
    println!(
        "{} chunks of {} after {:.2} s; {}",
        report.chunks,
        chunks,
        took.as_secs_f64(),
        resident()?
    );
    let begin = Instant::now();
    let found = (0..chunks).step_by(4).filter(|n| cache.find(&key(*n)).is_some()).count();
    let each = begin.elapsed().as_nanos() as usize / found.max(1);
    println!("{found} of {} keys found, {each} ns each", chunks.div_ceil(4));
    Ok(())
}
