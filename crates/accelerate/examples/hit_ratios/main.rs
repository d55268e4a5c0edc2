//! Hit ratios of the policies, beside RANDOM, LRU and the best possible (Belady, 1966).
//!
//! ```text
//!   requests of 4 KiB ──► a cache of C blocks, with one policy ──► hits ÷ requests, in per cent
//!                                                             └──► blocks written to the cache device
//! ```
//!
//! `make bench-accelerate` runs it. Arguments: names of parts (zipf, scan, loop, drift) [default:
//! all], or `trace FILE`, whose requests are little-endian block numbers of 32 bits.

mod caches;
mod traces;

use std::{env, fs, process::ExitCode};

use caches::{Cache, Junk, best, cache};

const GIB: u64 = 1 << 30;
const BLOCK: u64 = 4096;
/// The cache of the zipf, scan and loop.
const SLOTS: u32 = (4 * GIB / BLOCK) as u32;
/// Requests of the zipf: 60 C.
const REQUESTS: usize = 60 * SLOTS as usize;
/// Requests between two looks at the hit ratio.
const LOOK: usize = SLOTS as usize / 4;
const NAMES: [&str; 6] = ["adaptive", "tinylfu", "clock", "fifo", "RANDOM", "LRU"];

fn main() -> ExitCode {
    let arguments: Vec<String> = env::args().skip(1).collect();
    if let [part, path] = arguments.as_slice()
        && part == "trace"
    {
        return trace(path);
    }
    let wanted = |part: &str| arguments.is_empty() || arguments.iter().any(|name| name == part);
    if wanted("zipf") {
        zipf();
    }
    if wanted("scan") {
        scan();
    }
    if wanted("loop") {
        looped();
    }
    if wanted("drift") {
        shares("drift", &traces::drift(4_000_000, 1 << 20, 7));
    }
    ExitCode::SUCCESS
}

/// Hits and written blocks of one run.
struct Run {
    /// Hits, of each [`LOOK`] requests.
    looks: Vec<usize>,
    /// Hit ratio of the last eighth, in per cent.
    steady: f64,
    written: u64,
}

fn run(cache: &mut dyn Cache, requests: &[u32]) -> Run {
    let before = cache.written();
    let tail = requests.len() - requests.len() / 8;
    let (mut looks, mut hits, mut late) = (Vec::new(), 0, 0);
    for (at, block) in requests.iter().enumerate() {
        let hit = usize::from(cache.read(*block));
        hits += hit;
        late += if at >= tail { hit } else { 0 };
        if (at + 1) % LOOK == 0 {
            looks.push(std::mem::take(&mut hits));
        }
    }
    let steady = percent(late, requests.len() - tail);
    Run { looks, steady, written: cache.written() - before }
}

fn percent(part: usize, of: usize) -> f64 {
    100.0 * part as f64 / of as f64
}

fn zipf() {
    println!("zipf 1.2 of 4 KiB over a cache of 4 GiB, 60 C requests; hit % of the last eighth,");
    println!("GiB written, and C requests until within 2 points of the former\n");
    println!(
        "{:>4} {:>9} {:>6} {:>7} {:>8} {:>7}",
        "GiB", "policy", "start", "hit %", "written", "to 2 pt"
    );
    for (gib, aim) in [(8, 98.9), (16, 98.1), (32, 97.4), (48, 97.1)] {
        let requests = traces::zipf(gib * GIB / BLOCK, REQUESTS, 1);
        let (hits, _) = best(&requests, SLOTS as usize, REQUESTS - REQUESTS / 8);
        println!("{gib:>4} {:>9} {:>6} {hits:>7.2}   (aim of adaptive: {aim})", "OPT", "");
        for name in NAMES {
            for junk in [Junk::None, Junk::Hot] {
                let mut cache = cache(name, SLOTS);
                junk.fill(cache.as_mut(), SLOTS);
                let run = run(cache.as_mut(), &requests);
                let close = |hits: &usize| percent(*hits, LOOK) >= run.steady - 2.0;
                let to = run.looks.iter().position(close).unwrap_or(0) + 1;
                println!(
                    "{gib:>4} {name:>9} {:>6} {:>7.2} {:>8.1} {:>7.2}",
                    junk.name(),
                    run.steady,
                    (run.written * BLOCK) as f64 / GIB as f64,
                    to as f64 / 4.0
                );
            }
        }
    }
}

fn scan() {
    println!(
        "\na scan of 4 C in the middle of a zipf of 16 GiB: hits below the ratio before it, and"
    );
    println!("writes\n");
    let requests = traces::zipf(16 * GIB / BLOCK, 40 * SLOTS as usize, 1);
    let (before, after) = requests.split_at(requests.len() / 2);
    for name in NAMES {
        let mut cache = cache(name, SLOTS);
        let steady = run(cache.as_mut(), before).steady;
        let written = cache.written();
        let first = (16 * GIB / BLOCK) as u32;
        for block in first..first + 4 * SLOTS {
            cache.read(block);
        }
        let share = percent((cache.written() - written) as usize, 4 * SLOTS as usize);
        let below = |hits: &usize| (steady / 100.0 * LOOK as f64 - *hits as f64).max(0.0);
        let lost: f64 = run(cache.as_mut(), after).looks.iter().map(below).sum();
        println!("{name:>9}: {lost:>8.0} hits lost, {share:>5.1} % of the scan written");
    }
}

fn looped() {
    println!("\nloops over a cache of 256 Ki blocks: hit % of the last of 12 rounds\n");
    let slots = SLOTS / 4;
    println!("{:>9} {:>7} {:>7} {:>7} {:>7}", "", "1.05 C", "1.3 C", "1.7 C", "3 C");
    for name in NAMES {
        let hits = [1.05, 1.3, 1.7, 3.0].map(|times| {
            let len = (f64::from(slots) * times) as u32;
            let mut cache = cache(name, slots);
            let hits = (0..12).map(|_| (0..len).filter(|block| cache.read(*block)).count());
            percent(hits.last().unwrap_or(0), len as usize)
        });
        println!("{name:>9} {:>7.2} {:>7.2} {:>7.2} {:>7.2}", hits[0], hits[1], hits[2], hits[3]);
    }
}

/// Miss ratios and writes for caches of shares of a trace's blocks.
fn shares(name: &str, requests: &[u32]) {
    let blocks = requests.iter().max().map_or(0, |max| *max as usize + 1);
    println!(
        "\n{name}: {} requests, {blocks} blocks; miss %, and writes in % of the requests\n",
        requests.len()
    );
    print!("{:>9}", "");
    let shares = [1, 5, 10, 25, 50];
    shares.iter().for_each(|share| print!("{:>10} % ", share));
    println!();
    let slots = shares.map(|share| (blocks * share / 100).next_multiple_of(16) as u32);
    print!("{:>9}", "OPT");
    for slots in slots {
        let (hits, written) = best(requests, slots as usize, 0);
        print!(" {:>5.1}/{:>5.1}", 100.0 - hits, percent(written as usize, requests.len()));
    }
    println!();
    for name in NAMES {
        print!("{name:>9}");
        for slots in slots {
            let mut cache = cache(name, slots);
            let hits = requests.iter().filter(|block| cache.read(**block)).count();
            let written = percent(cache.written() as usize, requests.len());
            print!(" {:>5.1}/{written:>5.1}", 100.0 - percent(hits, requests.len()));
        }
        println!();
    }
}

fn trace(path: &str) -> ExitCode {
    match fs::read(path) {
        Ok(bytes) => {
            let numbers =
                bytes.chunks_exact(4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]]));
            shares(path, &traces::dense(numbers));
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("cannot read the trace {path}: {error}");
            ExitCode::FAILURE
        }
    }
}
