//! Compares policies of eviction: the bytes that each fetches, as a share of all bytes read.
//!
//! ```text
//!   trace of chunks ──► a store of some chunks, with one policy ──► misses ÷ reads, in per cent
//! ```
//!
//! Chunks have one length, so shares of chunks are shares of bytes. The traces are made here, from
//! fixed seeds: starts of images whose versions share most chunks, a popular set that a scan
//! interrupts, a loop, and all of these in turn. OPT knows the future (Belady, 1966): no policy
//! fetches less. SIEVE (Zhang and others, NSDI 2024), S3-FIFO (Yang and others, SOSP 2023) and LRU
//! are written from their descriptions, without extensions; so are W-TinyLFU and LIRS of the crate.
//! "Adaptive" is a queue in memory of 1 % of the room, ghosts, and a clock. `make
//! bench-cache` runs it; `BENCH=FILE` adds a recorded trace: the number of each chunk that was
//! read, in four bytes, little-endian.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, HashSet, VecDeque},
    env, fs, io,
    path::{Path, PathBuf},
};

use burgeon_cache::{
    Why,
    policy::{ChunkPolicy, Clock, Forecast, Lirs, Pressure, Random, TinyLfu},
};

const CHUNK: u32 = 256 << 10;
const SHARES: [u64; 3] = [10, 30, 60];

/// Aims of the host's policy: points above OPT in the mean, points above RANDOM in any row, and per
/// cent of later hits that a scan costs.
const MEAN_MAX: f64 = 12.0;
const ROW_MAX: f64 = 2.0;
const SCAN_MAX: f64 = 1.0;

/// A store with a policy.
trait Store {
    /// Reads a chunk; true if it is here.
    fn read(&mut self, key: u64) -> bool;
}

/// A store that asks a policy of the crate, as the cache does.
struct Ours {
    policy: Box<dyn ChunkPolicy>,
    slots: HashMap<u64, u32>,
    keys: Vec<u64>,
    room: usize,
}

impl Store for Ours {
    fn read(&mut self, key: u64) -> bool {
        if let Some(slot) = self.slots.get(&key) {
            self.policy.touched(*slot);
            return true;
        }
        self.policy.missed(key, CHUNK);
        let is_full = self.keys.len() == self.room;
        let pressure = if is_full { Pressure::Full } else { Pressure::Room };
        if !self.policy.admit(key, CHUNK, Why::Read, pressure) {
            return false;
        }
        let slot = match is_full.then(|| self.policy.victim()).flatten() {
            Some(victim) => {
                self.policy.removed(victim);
                self.slots.remove(&self.keys[victim as usize]);
                self.keys[victim as usize] = key;
                victim
            }
            None => {
                self.keys.push(key);
                self.keys.len() as u32 - 1
            }
        };
        self.slots.insert(key, slot);
        self.policy.inserted(slot, key, CHUNK, Why::Read);
        false
    }
}

/// The least recently used chunk goes.
#[derive(Default)]
struct Lru {
    room: usize,
    clock: u64,
    last: HashMap<u64, u64>,
    order: BTreeMap<u64, u64>,
}

impl Store for Lru {
    fn read(&mut self, key: u64) -> bool {
        self.clock += 1;
        let before = self.last.insert(key, self.clock);
        if let Some(before) = before {
            self.order.remove(&before);
        } else if self.last.len() > self.room
            && let Some((_, oldest)) = self.order.pop_first()
        {
            self.last.remove(&oldest);
        }
        self.order.insert(self.clock, key);
        before.is_some()
    }
}

/// A queue in the order of arrival; a hand passes chunks that were read since it came by.
#[derive(Default)]
struct Sieve {
    room: usize,
    /// By arrival: the chunk, and whether it was read.
    queue: BTreeMap<u64, (u64, bool)>,
    arrivals: HashMap<u64, u64>,
    clock: u64,
    hand: u64,
}

impl Store for Sieve {
    fn read(&mut self, key: u64) -> bool {
        if let Some(entry) = self.arrivals.get(&key).and_then(|at| self.queue.get_mut(at)) {
            entry.1 = true;
            return true;
        }
        while self.queue.len() >= self.room {
            let next = self.queue.range(self.hand..).next().or_else(|| self.queue.iter().next());
            let Some((&at, &(victim, was_read))) = next else { break };
            self.hand = at + 1;
            if was_read {
                self.queue.insert(at, (victim, false));
            } else {
                self.queue.remove(&at);
                self.arrivals.remove(&victim);
            }
        }
        self.clock += 1;
        self.queue.insert(self.clock, (key, false));
        self.arrivals.insert(key, self.clock);
        false
    }
}

/// A small queue for what is new, a main one for what was read again, and ghosts of the small one.
#[derive(Default)]
struct S3Fifo {
    room: usize,
    small: VecDeque<u64>,
    main: VecDeque<u64>,
    ghosts: VecDeque<u64>,
    is_ghost: HashSet<u64>,
    uses: HashMap<u64, u8>,
}

impl S3Fifo {
    fn evict(&mut self) {
        if self.small.len() * 10 >= self.room
            && let Some(key) = self.small.pop_front()
        {
            if self.uses.get(&key).is_some_and(|uses| *uses > 1) {
                self.uses.insert(key, 0);
                self.main.push_back(key);
                return;
            }
            self.uses.remove(&key);
            self.ghosts.push_back(key);
            self.is_ghost.insert(key);
            if self.ghosts.len() > self.room
                && let Some(old) = self.ghosts.pop_front()
            {
                self.is_ghost.remove(&old);
            }
            return;
        }
        let Some(key) = self.main.pop_front().or_else(|| self.small.pop_front()) else { return };
        match self.uses.get_mut(&key) {
            Some(uses) if *uses > 0 => {
                *uses -= 1;
                self.main.push_back(key);
            }
            _ => _ = self.uses.remove(&key),
        }
    }
}

impl Store for S3Fifo {
    fn read(&mut self, key: u64) -> bool {
        if let Some(uses) = self.uses.get_mut(&key) {
            *uses = (*uses + 1).min(3);
            return true;
        }
        while self.uses.len() >= self.room {
            self.evict();
        }
        self.uses.insert(key, 0);
        match self.is_ghost.remove(&key) {
            true => self.main.push_back(key),
            false => self.small.push_back(key),
        }
        false
    }
}

/// A small queue in memory; a clock of what leaves it and was read again, there or soon after a
/// miss. If nearly all chunks that the hand finds are dead, it is given first misses, too.
#[derive(Default)]
struct Adaptive {
    room: usize,
    queue: VecDeque<u64>,
    /// The same, and whether each was read again.
    queued: HashMap<u64, bool>,
    /// Ghosts with the time of their end, which a later one of the same chunk replaces.
    ghosts: VecDeque<(u64, u64)>,
    ends: HashMap<u64, u64>,
    time: u64,
    clock: Vec<(u64, u8)>,
    places: HashMap<u64, usize>,
    hand: usize,
    /// Chunks that the hand passes for each victim, lately.
    passed: f64,
}

impl Adaptive {
    /// Skips for each victim below which the chunks of the clock count as dead.
    const DEAD: f64 = 0.02;

    fn queue_room(&self) -> usize {
        (self.room / 100).max(1)
    }

    fn leave_queue(&mut self, key: u64, is_used: bool) {
        let room = (self.room - self.queue_room()).max(1);
        if self.clock.len() < room {
            self.places.insert(key, self.clock.len());
            self.clock.push((key, 0));
        } else if is_used || self.passed < Self::DEAD {
            self.replace_victim(key);
        } else {
            self.time += 1;
            self.ends.insert(key, self.time);
            self.ghosts.push_back((key, self.time));
            if self.ghosts.len() > self.room
                && let Some((old, end)) = self.ghosts.pop_front()
                && self.ends.get(&old) == Some(&end)
            {
                self.ends.remove(&old);
            }
        }
    }

    fn replace_victim(&mut self, key: u64) {
        let mut passed = 0.0;
        while self.clock[self.hand].1 > 0 {
            self.clock[self.hand].1 -= 1;
            self.hand = (self.hand + 1) % self.clock.len();
            passed += 1.0;
        }
        self.passed += (passed - self.passed) / 256.0;
        let (victim, _) = std::mem::replace(&mut self.clock[self.hand], (key, 0));
        self.places.remove(&victim);
        self.places.insert(key, self.hand);
        self.hand = (self.hand + 1) % self.clock.len();
    }
}

impl Store for Adaptive {
    fn read(&mut self, key: u64) -> bool {
        if let Some(place) = self.places.get(&key) {
            let uses = &mut self.clock[*place].1;
            *uses = (*uses + 1).min(3);
            return true;
        }
        if let Some(is_used) = self.queued.get_mut(&key) {
            *is_used = true;
            return true;
        }
        let is_second_miss = self.ends.remove(&key).is_some();
        self.queue.push_back(key);
        self.queued.insert(key, is_second_miss);
        if self.queue.len() > self.queue_room()
            && let Some(old) = self.queue.pop_front()
        {
            let is_used = self.queued.remove(&old).unwrap_or_default();
            self.leave_queue(old, is_used);
        }
        false
    }
}

/// The misses of a store that knows the future.
fn opt(trace: &[u64], room: usize) -> usize {
    let mut next = vec![usize::MAX; trace.len()];
    let mut seen = HashMap::new();
    for (at, key) in trace.iter().enumerate().rev() {
        next[at] = seen.insert(*key, at).unwrap_or(usize::MAX);
    }
    // Those that are here, by their next use.
    let (mut here, mut uses, mut misses) = (HashMap::new(), BTreeSet::new(), 0);
    for (at, key) in trace.iter().enumerate() {
        match here.remove(key) {
            Some(due) => _ = uses.remove(&(due, *key)),
            None => misses += 1,
        }
        here.insert(*key, next[at]);
        uses.insert((next[at], *key));
        if here.len() > room
            && let Some((_, last)) = uses.pop_last()
        {
            here.remove(&last);
        }
    }
    misses
}

/// Numbers that look random (xorshift*, Marsaglia 2003).
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, end: u64) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33) % end
    }

    /// Below `end`, small numbers more often.
    fn skewed(&mut self, end: u64) -> u64 {
        let most = self.below(end) + 1;
        self.below(most)
    }
}

/// Ten versions of three images, each started three times in turn; a version has `changed` per
/// cent of new chunks. A start reads a tenth of its image, in runs, and a few others.
fn starts(changed: u64, seed: u64) -> Vec<u64> {
    const CHUNKS: u64 = 4000;
    let mut numbers = Numbers(seed);
    let mut fresh = 1 << 32;
    let mut images: Vec<Vec<u64>> =
        (0..3).map(|image| (0..CHUNKS).map(|chunk| image * CHUNKS + chunk).collect()).collect();
    let runs: Vec<u64> = (0..20).map(|_| numbers.below(CHUNKS - 20)).collect();
    let mut trace = Vec::new();
    for _ in 0..10 {
        for _ in 0..3 {
            for image in &images {
                let run = |start: &u64| image[*start as usize..][..20].iter().copied();
                trace.extend(runs.iter().flat_map(run));
                trace.extend((0..40).map(|_| image[numbers.skewed(CHUNKS) as usize]));
            }
        }
        for image in &mut images {
            for chunk in image.iter_mut() {
                if numbers.below(100) < changed {
                    fresh += 1;
                    *chunk = fresh;
                }
            }
        }
    }
    trace
}

/// Reads of a popular set, before and after a scan.
fn popular(chunks: u64) -> [Vec<u64>; 2] {
    let mut numbers = Numbers(7);
    [(); 2].map(|()| (0..chunks * 20).map(|_| numbers.skewed(chunks)).collect())
}

/// A scan of four times the store.
fn scanned(room: u64) -> impl Iterator<Item = u64> {
    (0..4 * room).map(|chunk| (1 << 40) + chunk)
}

/// A popular set, a scan, and the popular set again.
fn scan(chunks: u64, room: u64) -> Vec<u64> {
    let [before, after] = popular(chunks);
    before.into_iter().chain(scanned(room)).chain(after).collect()
}

/// Hits of `after` that a scan between it and `before` costs, in per cent of those without it.
fn lost_to_a_scan(stores: [&mut dyn Store; 2], [before, after]: [&[u64]; 2], room: u64) -> f64 {
    let [quiet, scanned_over] = stores.map(|store| {
        before.iter().for_each(|key| {
            store.read(*key);
        });
        store
    });
    scanned(room).for_each(|key| {
        scanned_over.read(key);
    });
    let [without, with] = [quiet, scanned_over]
        .map(|store| after.iter().filter(|key| store.read(**key)).count() as f64);
    (without - with) * 100.0 / without.max(1.0)
}

/// Prints what a scan costs of later hits, for each policy; returns the most for the first one.
fn print_scans(chunks: u64) -> f64 {
    let mut most: f64 = 0.0;
    println!("\nlater hits that a scan of four times the store costs, in per cent\n");
    let all = popular(chunks);
    for share in SHARES {
        let room = chunks * share / 100;
        let fitting: Vec<u64> = (0..40).flat_map(|_| 0..room * 95 / 100).collect();
        let rows = [
            ("popular set, 2 reads a chunk", [&all[0][..], &all[1][..2 * chunks as usize]]),
            ("popular set, 20 reads a chunk", [&all[0][..], &all[1][..]]),
            ("95 % of the store, in turn", [&fitting[..], &fitting[..]]),
        ];
        for (name, reads) in rows {
            print!("{name:<30} {share:>3}%       ");
            let pairs = policies(room as usize).into_iter().zip(policies(room as usize));
            for (at, (one, other)) in pairs.enumerate() {
                let (mut one, mut other) = (one.1, other.1);
                let lost = lost_to_a_scan([&mut *one, &mut *other], reads, room);
                print!(" {lost:>14.1}");
                most = if at == 0 { most.max(lost) } else { most };
            }
            println!();
        }
    }
    most
}

fn policies(room: usize) -> Vec<(&'static str, Box<dyn Store>)> {
    let ours = |policy| Box::new(Ours { policy, slots: HashMap::new(), keys: Vec::new(), room });
    let limit = room as u64 * u64::from(CHUNK);
    vec![
        ("Forecast", ours(Box::new(Forecast::new(limit, 1)))),
        ("W-TinyLFU", ours(Box::<TinyLfu>::default())),
        ("LIRS", ours(Box::<Lirs>::default())),
        ("Clock", ours(Box::<Clock>::default())),
        ("Adaptive", Box::new(Adaptive { room, ..Adaptive::default() })),
        ("S3-FIFO", Box::new(S3Fifo { room, ..S3Fifo::default() })),
        ("SIEVE", Box::new(Sieve { room, ..Sieve::default() })),
        ("LRU", Box::new(Lru { room, ..Lru::default() })),
        ("RANDOM", ours(Box::new(Random::new(1)))),
    ]
}

/// The chunk numbers in `file`, four bytes each.
fn recorded(file: &Path) -> io::Result<Vec<u64>> {
    let numbers = fs::read(file)?;
    let numbers = numbers.chunks_exact(4).map(<[u8; 4]>::try_from);
    Ok(numbers.flatten().map(|bytes| u64::from(u32::from_le_bytes(bytes))).collect())
}

/// A trace, by the room of the store in which it is read.
type Trace = Box<dyn Fn(u64) -> Vec<u64>>;

fn main() -> io::Result<()> {
    const LOOP: u64 = 3000;
    let mixed = |_| {
        let parts =
            [starts(5, 3), (0..LOOP).cycle().take(4 * LOOP as usize).collect(), starts(30, 4)];
        parts.concat()
    };
    let made: [(&str, u64, Trace); 5] = [
        ("starts, 5 % changed", 0, Box::new(|_| starts(5, 1))),
        ("starts, 30 % changed", 0, Box::new(|_| starts(30, 2))),
        ("popular, scan, popular", LOOP, Box::new(|room| scan(LOOP, room))),
        (
            "loop of 1.7 times the store",
            LOOP,
            Box::new(|room| (0..room * 17 / 10).cycle().take(30 * room as usize).collect()),
        ),
        ("starts, loop, starts", 0, Box::new(mixed)),
    ];
    let mut traces: Vec<(String, u64, Trace)> =
        made.map(|(name, chunks, trace)| (name.to_owned(), chunks, trace)).into();
    for file in env::args_os().skip(1).map(PathBuf::from) {
        let trace = recorded(&file)?;
        let name = file.file_name().unwrap_or_default().to_string_lossy().into_owned();
        traces.push((name, 0, Box::new(move |_| trace.clone())));
    }
    println!("bytes fetched in per cent of those read, and in brackets what is more than OPT's\n");
    let names: Vec<_> = policies(1).into_iter().map(|(name, _)| name).collect();
    print!("{:<28} {:>5} {:>6}", "trace", "store", "OPT");
    names.iter().for_each(|name| print!(" {name:>14}"));
    println!();
    let mut sums = vec![(0.0, f64::MIN); names.len()];
    let (mut rows, mut above_random) = (0, f64::MIN);
    for (name, chunks, trace) in &traces {
        for share in SHARES {
            let distinct = match chunks {
                0 => trace(0).into_iter().collect::<HashSet<_>>().len() as u64,
                chunks => *chunks,
            };
            let room = distinct * share / 100;
            let trace = trace(room);
            let percent = |misses: usize| misses as f64 * 100.0 / trace.len() as f64;
            let best = percent(opt(&trace, room as usize));
            print!("{name:<28} {share:>4}% {best:>6.1}");
            let mut row = Vec::new();
            for (sum, (_, mut store)) in sums.iter_mut().zip(policies(room as usize)) {
                let missed = trace.iter().filter(|key| !store.read(**key)).count();
                let more = percent(missed) - best;
                row.push(more);
                *sum = (sum.0 + more, sum.1.max(more));
                print!(" {:>6.1} ({more:>4.1})", percent(missed));
            }
            println!();
            rows += 1;
            let (forecast, random) = (row[0], row[row.len() - 1]);
            above_random = above_random.max(forecast - random);
        }
    }
    for (what, of) in [
        (
            "mean above OPT",
            Box::new(|sum: &(f64, f64)| sum.0 / f64::from(rows)) as Box<dyn Fn(&_) -> f64>,
        ),
        ("most above OPT", Box::new(|sum: &(f64, f64)| sum.1)),
    ] {
        print!("{what:<41}");
        sums.iter().for_each(|sum| print!(" {:>14.1}", of(sum)));
        println!();
    }
    let scans = print_scans(LOOP);
    let mean = sums[0].0 / f64::from(rows);
    let held = [
        ("the mean is at most 12 points above OPT", mean <= MEAN_MAX),
        ("no row is more than 2 points worse than RANDOM", above_random <= ROW_MAX),
        ("a scan costs less than 1 % of later hits", scans < SCAN_MAX),
    ];
    println!("\nForecast, the policy of the host's cache:");
    for (aim, is_held) in held {
        println!("  {aim}: {}", if is_held { "yes" } else { "NO" });
    }
    if held.iter().all(|(_, is_held)| *is_held) {
        return Ok(());
    }
    Err(io::Error::other("Forecast misses an aim"))
}
