//! Arenas beside the alternative, a sparse file for each image, in one run on ext4, XFS and btrfs:
//! `cargo run --release --locked -p burgeon-cache --example per_image_files`. Needs root, and
//! 3 GiB of disk.
//!
//! ```text
//!   arenas   key ─► place          a second image finds the place: nothing is written
//!   files    key ─► file, offset   a second image clones the range into its own file, or copies it
//!                                  where the file system (ext4) cannot clone; each hit is a
//!                                  `pread` at the chunk's own address, without a table
//! ```
//!
//! Images have 90 % of their chunks in common, and come in a random order. The files are a
//! prototype: neither bounded nor crash-safe, and without an index on the disk, all of which would
//! cost more.

#![allow(clippy::print_stdout)]

use std::{
    collections::HashMap,
    error::Error,
    fs::{self, File, OpenOptions},
    io,
    os::unix::fs::{FileExt as _, OpenOptionsExt as _},
    path::{Path, PathBuf},
    process::Command,
    time::{Duration, Instant},
};

use burgeon_block::Pages;
use burgeon_cache::{
    Amount, Cache, CacheSettings, ChunkKey, ChunkStore as _, Domain, KeyKind, Place, Why,
    policy::Clock,
};
use rustix::{
    fs::{FallocateFlags, OFlags, SeekFrom, copy_file_range, fallocate, fstatvfs, seek, syncfs},
    time::{ClockId, clock_gettime},
};
use testkit::{Mounted, Rng, Space};

type Result<T> = std::result::Result<T, Box<dyn Error>>;

const CHUNK: u64 = 256 << 10;
const CHUNKS: u64 = 512;
/// Of the chunks of an image, those that no other image has.
const OWN: u64 = CHUNKS / 10;
const IMAGES: u64 = 8;
const DISK: u64 = 3 << 30;
/// Chunks of a part that is measured.
const PART: u64 = CHUNKS / 8;
/// Hits of a part.
const HITS: u64 = 512;
/// Chunks of one block in the part that measures a start.
const TINY: u64 = 1 << 15;

/// Images, each with a file, and the places of contents.
struct PerImage {
    files: Vec<File>,
    clones: bool,
    index: HashMap<ChunkKey, Vec<(usize, u64)>>,
}

impl PerImage {
    fn new(folder: &Path, images: u64, clones: bool) -> io::Result<Self> {
        fs::create_dir_all(folder)?;
        let open = |image| direct(&folder.join(format!("image-{image}")));
        let files = (0..images).map(open).collect::<io::Result<_>>()?;
        Ok(Self { files, clones, index: HashMap::new() })
    }

    fn admit(&mut self, image: usize, at: u64, key: ChunkKey, bytes: &[u8]) -> io::Result<()> {
        self.files[image].write_all_at(bytes, at)?;
        self.index.entry(key).or_default().push((image, at));
        Ok(())
    }

    /// Gives `image` a chunk that another one has; false if none has.
    fn share(&mut self, image: usize, at: u64, key: &ChunkKey, buf: &mut [u8]) -> io::Result<bool> {
        let Some(places) = self.index.get_mut(key) else { return Ok(false) };
        let (other, from) = places[0];
        let [from_file, to_file] = [&self.files[other], &self.files[image]];
        if self.clones {
            // Clones where it can (`remap_file_range`): the table's disk use shows it.
            let (mut from, mut to) = (from, at);
            let len = buf.len();
            let copied = copy_file_range(from_file, Some(&mut from), to_file, Some(&mut to), len)?;
            assert_eq!(copied, len);
        } else {
            from_file.read_exact_at(buf, from)?;
            to_file.write_all_at(buf, at)?;
        }
        places.push((image, at));
        Ok(true)
    }

    /// The first image that has the chunk lets it go.
    fn drop_of_first(&mut self, key: &ChunkKey) -> io::Result<()> {
        let Some(places) = self.index.get_mut(key) else { return Ok(()) };
        let (image, at) = places.remove(0);
        punch(&self.files[image], at)
    }

    fn evict(&mut self, key: &ChunkKey) -> io::Result<()> {
        for (image, at) in self.index.remove(key).unwrap_or_default() {
            punch(&self.files[image], at)?;
        }
        Ok(())
    }
}

fn punch(file: &File, at: u64) -> io::Result<()> {
    let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    Ok(fallocate(file, flags, at, CHUNK)?)
}

fn direct(path: &Path) -> io::Result<File> {
    let flags = OFlags::DIRECT.bits() as i32;
    OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .custom_flags(flags)
        .open(path)
}

/// The key of the chunk `n` of an image.
fn key(image: u64, n: u64) -> ChunkKey {
    let content = if n < OWN { image << 32 | n } else { n };
    ChunkKey::new(&Domain::PUBLIC, KeyKind::Chunk, &content.to_le_bytes())
}

fn shuffled(seed: u64, count: u64) -> Vec<u64> {
    let (mut rng, mut all) = (Rng::new(seed), (0..count).collect::<Vec<_>>());
    for n in (1..all.len()).rev() {
        all.swap(n, rng.below(n as u64 + 1) as usize);
    }
    all
}

fn open(folder: &Path) -> Result<Cache> {
    let settings = CacheSettings {
        limit: Some(Amount::Bytes(16 << 30)),
        keep_free: Amount::Bytes(0),
        ..CacheSettings::default()
    };
    Ok(Cache::open(folder, settings, Box::<Clock>::default())?)
}

/// Processor time of this process so far; that of the kernel's own threads is not in it.
fn cpu() -> Duration {
    let now = clock_gettime(ClockId::ProcessCPUTime);
    Duration::new(now.tv_sec as u64, now.tv_nsec as u32)
}

/// Bytes in use, once the file system has settled.
fn used(at: &Path) -> Result<u64> {
    let folder = File::open(at)?;
    syncfs(&folder)?;
    let now = fstatvfs(&folder)?;
    Ok((now.f_blocks - now.f_bfree) * now.f_frsize)
}

/// Extents of a file, as `filefrag` counts them.
fn extents(path: &Path) -> Result<String> {
    let out = Command::new("filefrag").arg(path).output()?;
    let text = String::from_utf8_lossy(&out.stdout).into_owned();
    let count = text.rsplit(": ").next().and_then(|rest| rest.split(' ').next());
    Ok(count.ok_or("filefrag printed no count")?.to_owned())
}

/// The longest file of the folder.
fn longest(folder: &Path) -> Result<PathBuf> {
    let mut files = Vec::new();
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        files.push((entry.metadata()?.len(), entry.path()));
    }
    Ok(files.into_iter().max().ok_or("an empty folder")?.1)
}

/// Time and processor time of one side's repeated parts. The quickest part counts: other work on
/// the machine can only slow one.
#[derive(Clone, Copy)]
struct Best(Duration, Duration);

impl Best {
    const NONE: Self = Self(Duration::MAX, Duration::MAX);

    fn part<T>(&mut self, work: impl FnOnce() -> Result<T>) -> Result<T> {
        let (begun, cpu_before) = (Instant::now(), cpu());
        let done = work()?;
        *self = Self(self.0.min(begun.elapsed()), self.1.min(cpu() - cpu_before));
        Ok(done)
    }

    /// The same for one of `count` things of a part.
    fn show(self, count: u64) -> String {
        let [time, cpu] = [self.0, self.1].map(|time| time.as_secs_f64() * 1e6 / count as f64);
        format!("{time:.1}; {cpu:.1} µs")
    }
}

/// The rows of one file system: name, arenas, files.
type Rows = Vec<(&'static str, String, String)>;

/// Both, on one file system.
struct Pair {
    at: PathBuf,
    cache: Cache,
    files: PerImage,
    /// A chunk's bytes, and a block's.
    chunk: Pages,
    block: Pages,
    /// Of the chunks of the second image.
    places: Vec<Option<Place>>,
    /// Disk space that the first two images took.
    disk: [u64; 2],
    rows: Rows,
}

fn measure(at: &Path, clones: bool) -> Result<Rows> {
    let mut chunk = Pages::zeroed(CHUNK).ok_or("no memory")?;
    Rng::new(7).fill(chunk.bytes_mut());
    let mut pair = Pair {
        at: at.to_owned(),
        cache: open(&at.join("arenas"))?,
        files: PerImage::new(&at.join("files"), IMAGES, clones)?,
        chunk,
        block: Pages::zeroed(4096).ok_or("no memory")?,
        places: vec![None; CHUNKS as usize],
        disk: [0; 2],
        rows: Rows::new(),
    };
    pair.first_image()?;
    pair.other_images()?;
    pair.hits()?;
    pair.evictions()?;
    Ok(pair.rows)
}

impl Pair {
    /// In turns, so that other work on the machine slows both.
    fn first_image(&mut self) -> Result<()> {
        let mut best = [Best::NONE; 2];
        for part in shuffled(1, CHUNKS).chunks(PART as usize) {
            for (side, best) in best.iter_mut().enumerate() {
                let before = used(&self.at)?;
                best.part(|| {
                    for n in part {
                        self.chunk.bytes_mut()[..8].copy_from_slice(&n.to_le_bytes());
                        let (key, bytes) = (key(0, *n), self.chunk.bytes());
                        if side == 0 {
                            self.cache.admit(key, bytes, Why::Read).ok_or("refused")?;
                        } else {
                            self.files.admit(0, n * CHUNK, key, bytes)?;
                        }
                    }
                    Ok(())
                })?;
                self.disk[side] += used(&self.at)?.saturating_sub(before);
            }
        }
        let [a, b] = best.map(|best| best.show(PART));
        self.rows.push(("admission of a chunk: time; processor", a, b));
        let [a, b] = [longest(&self.at.join("arenas"))?, self.at.join("files/image-0")];
        self.rows.push(("extents of the first image's file", extents(&a)?, extents(&b)?));
        Ok(())
    }

    fn other_images(&mut self) -> Result<()> {
        let mut best = [Best::NONE; 2];
        for image in 1..IMAGES {
            let before = used(&self.at)?;
            let (shared, own): (Vec<u64>, Vec<u64>) =
                shuffled(image + 1, CHUNKS).into_iter().partition(|n| *n >= OWN);
            let mut places = vec![None; CHUNKS as usize];
            for n in &own {
                places[*n as usize] =
                    self.cache.admit(key(image, *n), self.chunk.bytes(), Why::Read);
            }
            best[0].part(|| {
                for n in &shared {
                    places[*n as usize] = self.cache.find(&key(image, *n));
                }
                Ok(())
            })?;
            let middle = used(&self.at)?;
            for n in own {
                let (at, key) = (n * CHUNK, key(image, n));
                self.files.admit(image as usize, at, key, self.chunk.bytes())?;
            }
            best[1].part(|| {
                for n in &shared {
                    let (at, key) = (n * CHUNK, key(image, *n));
                    self.files.share(image as usize, at, &key, self.chunk.bytes_mut())?;
                }
                Ok(())
            })?;
            if image == 1 {
                self.places = places;
                self.disk[0] += middle.saturating_sub(before);
                self.disk[1] += used(&self.at)?.saturating_sub(middle);
            }
        }
        let [a, b] = best.map(|best| best.show(CHUNKS - OWN));
        self.rows.push(("first touch of a chunk that another image has", a, b));
        let [a, b] = self.disk.map(|bytes| format!("{:.0} MiB", bytes as f64 / f64::from(1 << 20)));
        self.rows.push(("disk, two images of 128 MiB", a, b));
        let extents = extents(&self.at.join("files/image-1"))?;
        self.rows.push(("extents of the second image's file", "–".into(), extents));
        Ok(())
    }

    /// Reads the second image, in turns.
    fn hits(&mut self) -> Result<()> {
        let (mut rng, mut best) = (Rng::new(9), [Best::NONE; 2]);
        for _ in 0..8 {
            let mut draw = || (rng.below(CHUNKS), rng.below(CHUNK / 4096) * 4096);
            let draws: Vec<_> = (0..HITS).map(|_| draw()).collect();
            best[0].part(|| {
                for (n, offset) in &draws {
                    let place = self.places[*n as usize].ok_or("a chunk is gone")?;
                    assert!(self.cache.read(place, *offset as u32, self.block.bytes_mut()));
                }
                Ok(())
            })?;
            best[1].part(|| {
                for (n, offset) in &draws {
                    let at = n * CHUNK + offset;
                    self.files.files[1].read_exact_at(self.block.bytes_mut(), at)?;
                }
                Ok(())
            })?;
        }
        let [a, b] = best.map(|best| best.show(HITS));
        self.rows.push(("a hit of 4 KiB", a, b));
        let mut best = [Best::NONE; 2];
        for first in (0..CHUNKS).step_by(PART as usize) {
            best[0].part(|| {
                for n in first..first + PART {
                    let place = self.places[n as usize].ok_or("a chunk is gone")?;
                    assert!(self.cache.read(place, 0, self.chunk.bytes_mut()));
                }
                Ok(())
            })?;
            best[1].part(|| {
                for n in first..first + PART {
                    self.files.files[1].read_exact_at(self.chunk.bytes_mut(), n * CHUNK)?;
                }
                Ok(())
            })?;
        }
        let [a, b] = best.map(|best| best.show(PART));
        self.rows.push(("a chunk, when the second image is read in order", a, b));
        Ok(())
    }

    /// One image drops half of the shared chunks; the others are evicted.
    fn evictions(&mut self) -> Result<()> {
        let victims = shuffled(11, CHUNKS).into_iter().filter(|n| *n >= OWN).map(|n| key(0, n));
        let victims: Vec<ChunkKey> = victims.collect();
        // Whole parts.
        let (dropped, evicted) = victims.split_at(victims.len() - 4 * PART as usize);
        let share = |freed: u64, chunks: &[ChunkKey]| {
            let all = chunks.len() as u64 * CHUNK;
            format!("{:.0} %", freed as f64 * 100.0 / all as f64)
        };
        let before = used(&self.at)?;
        for key in dropped {
            self.files.drop_of_first(key)?;
        }
        let back = share(before.saturating_sub(used(&self.at)?), dropped);
        self.rows.push(("one of 8 images drops a chunk: freed of its bytes", "–".into(), back));
        let (mut best, mut freed) = ([Best::NONE; 2], [0; 2]);
        for part in evicted.chunks(PART as usize) {
            let before = used(&self.at)?;
            best[0].part(|| {
                self.cache.drop_keys(part);
                Ok(())
            })?;
            let middle = used(&self.at)?;
            best[1].part(|| Ok(part.iter().try_for_each(|key| self.files.evict(key))?))?;
            freed[0] += before.saturating_sub(middle);
            freed[1] += middle.saturating_sub(used(&self.at)?);
        }
        let [a, b] = best.map(|best| best.show(PART));
        self.rows.push(("eviction of a chunk that 8 images have", a, b));
        let [freed_a, freed_b] = freed.map(|bytes| share(bytes, evicted));
        self.rows.push(("freed of its bytes", freed_a, freed_b));
        Ok(())
    }
}

/// Fills both with many small chunks.
fn fill_tiny(at: &Path) -> Result<()> {
    let mut page = Pages::zeroed(4096).ok_or("no memory")?;
    let cache = open(&at.join("arenas"))?;
    let mut files = PerImage::new(&at.join("files"), 1, false)?;
    // Every other place of the address space is absent.
    for n in shuffled(3, TINY) {
        page.bytes_mut()[..8].copy_from_slice(&(n + 1).to_le_bytes());
        cache.admit(key(9, OWN + n), page.bytes(), Why::Read).ok_or("refused")?;
        files.admit(0, n * 8192, key(9, OWN + n), page.bytes())?;
    }
    cache.flush();
    Ok(())
}

/// After a new mount: loads the index; walks the file.
fn measure_start(at: &Path) -> Result<Rows> {
    let begun = Instant::now();
    let cache = open(&at.join("arenas"))?;
    let loaded = begun.elapsed();
    assert_eq!(cache.report().chunks, TINY);
    let file = File::open(at.join("files/image-0"))?;
    let (begun, mut count, mut from) = (Instant::now(), 0, 0);
    while let Ok(data) = seek(&file, SeekFrom::Data(from)) {
        from = seek(&file, SeekFrom::Hole(data))?;
        count += 1;
    }
    let walked = begun.elapsed();
    assert_eq!(count, TINY);
    let each = |time: Duration| time.as_secs_f64() * 1e6 / TINY as f64;
    let [a, b] = [loaded, walked].map(|time| format!("{:.1} µs", each(time)));
    Ok(vec![("start, for each chunk: index; SEEK walk", a, b)])
}

fn main() -> Result<()> {
    const KINDS: [(&str, &[&str], bool); 3] = [
        ("ext4", &["mkfs.ext4", "-q", "-F"], false),
        ("XFS", &["mkfs.xfs", "-q", "-f"], true),
        ("btrfs", &["mkfs.btrfs", "-q", "-f"], true),
    ];
    let mut table: Vec<(&str, Vec<String>)> = Vec::new();
    for (name, mkfs, clones) in KINDS {
        let rows = {
            let space = Space::new("per-image-files");
            let disk = space.disk_with(&space.path("at"), DISK, mkfs);
            measure(disk.path(), clones)?
        };
        let space = Space::new("per-image-start");
        let at = space.path("at");
        fill_tiny(space.disk_with(&at, DISK, mkfs).path())?;
        // Nothing of it is in memory after a new mount.
        let mut mount = Command::new("mount");
        mount.args(["-o", "loop"]).args([&space.path("disk.img"), &at]);
        mount.status()?.success().then_some(()).ok_or("it cannot be mounted again")?;
        let start = measure_start(Mounted::at(&at).path())?;
        eprintln!("{name} is done");
        for (row, (what, arenas, files)) in rows.into_iter().chain(start).enumerate() {
            if row == table.len() {
                table.push((what, Vec::new()));
            }
            table[row].1.extend([arenas, files]);
        }
    }
    println!("| | ext4: arenas | files | XFS: arenas | files | btrfs: arenas | files |");
    println!("|---|---|---|---|---|---|---|");
    for (what, cells) in table {
        println!("| {what} | {} |", cells.join(" | "));
    }
    Ok(())
}
