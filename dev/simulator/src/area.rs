//! Mapped files that are replaced, lie and go away, while the machine dies again and again.
//!
//! The promise: a read gives the bytes that were mapped, or an error; an error only while the file
//! gives reason. A file that keeps its identity and has other bytes is believed in blocks that
//! were never read: so here it lies only about those that were, and whose checksums are kept: not
//! about what a power failure may have taken.

use std::{
    collections::BTreeSet,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use burgeon_block::{
    BLOCK_SIZE, BlockSource, ByteRange, Counters, Error, ErrorKind, FileIdentity, ObjectId, Pages,
    Result,
};
use burgeon_image::{Content, ExtentMap, ExtentSource, ExtentWriter, Mapping};
use burgeon_volume::{VirtualArea, VolumeLimits};
use bytes::Bytes;
use testkit::Rng;

use crate::{
    Crash, Disk, SimFile,
    extents::{SimLog, quiet},
    model::range,
    world::runtime,
};

const OPERATIONS: u64 = 60;

/// The current behaviour of the file.
#[derive(Clone)]
enum Mood {
    Honest,
    Gone,
    Replaced,
    /// A byte that differs.
    Lying(usize),
}

#[derive(Clone)]
struct OneFile(Arc<Mutex<(Mood, FileIdentity, Vec<u8>)>>);

impl OneFile {
    fn state(&self) -> MutexGuard<'_, (Mood, FileIdentity, Vec<u8>)> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl BlockSource for OneFile {
    async fn read(&self, object: &ObjectId, _: ByteRange) -> Result<Bytes> {
        Err(Error::new(ErrorKind::NotFound, format!("{object} is not here")))
    }

    async fn read_identified(
        &self,
        object: &ObjectId,
        range: ByteRange,
    ) -> Result<(FileIdentity, Bytes)> {
        let state = self.state();
        let (mood, identity, bytes) = &*state;
        let mut bytes = bytes[range.start() as usize..range.end() as usize].to_vec();
        let mut identity = *identity;
        match mood {
            Mood::Honest => {}
            Mood::Gone => {
                return Err(Error::new(ErrorKind::NotFound, format!("{object} is gone")));
            }
            Mood::Replaced => {
                identity.inode += 1;
                bytes.iter_mut().for_each(|byte| *byte ^= 0x55);
            }
            Mood::Lying(at) if range.contains(*at as u64) => {
                bytes[at - range.start() as usize] ^= 1;
            }
            Mood::Lying(_) => {}
        }
        Ok((identity, bytes.into()))
    }
}

type SimArea = VirtualArea<OneFile, SimFile, SimLog>;

/// Lives of a machine that reads a mapped file, by seed. How many reads there were.
pub fn simulate_mapped_file(seed: u64) -> Result<u64, String> {
    let runtime = runtime()?;
    let mut run = Run::new(seed).map_err(|error| format!("seed {seed}: {error}"))?;
    runtime.block_on(run.all()).map_err(|error| format!("seed {seed}: {error}"))
}

struct Run {
    rng: Rng,
    file: OneFile,
    bytes: Vec<u8>,
    logs: [SimLog; 2],
    disk: Disk,
    /// Blocks whose checksums are kept, and those of them that no power failure takes.
    seen: BTreeSet<usize>,
    durable: BTreeSet<usize>,
}

impl Run {
    fn new(seed: u64) -> Result<Self> {
        let mut rng = Rng::new(seed);
        let len = 1 + rng.below(300_000) as usize;
        let bytes = rng.bytes(len);
        let identity = FileIdentity { inode: 1, size: len as u64, mtime_ns: 2, ctime_ns: 3 };
        let headers = ExtentWriter::headers(1 << 40, rng.bits())?;
        let logs = quiet(rng.bits(), headers);
        let source = ExtentSource::File { object: ObjectId::new("file/a")?, identity };
        let extents = vec![Content { source, offset: 0, len: len as u64 }];
        let mapping = Mapping { label: "a".into(), origin: "a".into(), extents };
        ExtentWriter::over(logs.clone())?.map(&mapping)?;
        let file = OneFile(Arc::new(Mutex::new((Mood::Honest, identity, bytes.clone()))));
        let disk = Disk::new(rng.bits(), 1 << 20);
        let (seen, durable) = Default::default();
        Ok(Self { rng, file, bytes, logs, disk, seen, durable })
    }

    fn boot(&self) -> Result<Arc<SimArea>, String> {
        let map = ExtentMap::over(self.logs.clone()).map_err(|error| error.to_string())?;
        let limits = VolumeLimits { cpu_threads: 0, write_threads: 0, ..VolumeLimits::default() };
        let no_image = |_: &_| Err(Error::new(ErrorKind::NotFound, "there are no images"));
        let (file, disk) = (self.file.clone(), self.disk.checksums());
        Ok(VirtualArea::over_files(map, file, disk, Box::new(no_image), limits))
    }

    async fn all(&mut self) -> Result<u64, String> {
        let mut area = self.boot()?;
        let mut reads = 0;
        for _ in 0..OPERATIONS {
            match self.rng.below(10) {
                0..6 => {
                    self.read(&area).await?;
                    reads += 1;
                }
                6..8 => self.change_mood(),
                8 => {
                    area.sync().map_err(|error| error.to_string())?;
                    self.durable = self.seen.clone();
                }
                _ => {
                    let power = self.rng.below(2) == 0;
                    self.disk.restart(if power { Crash::Power(128) } else { Crash::Kill });
                    if power {
                        self.seen = self.durable.clone();
                        // It may lie about what was forgotten: let it be honest again.
                        self.file.state().0 = Mood::Honest;
                    }
                    area = self.boot()?;
                }
            }
        }
        Ok(reads)
    }

    fn change_mood(&mut self) {
        let seen: Vec<usize> = self.seen.iter().copied().collect();
        let mood = match self.rng.below(4) {
            0 => Mood::Gone,
            1 => Mood::Replaced,
            2 if !seen.is_empty() => {
                let block = *self.rng.pick(&seen) * BLOCK_SIZE as usize;
                let len = (self.bytes.len() - block).min(BLOCK_SIZE as usize);
                Mood::Lying(block + self.rng.below(len as u64) as usize)
            }
            _ => Mood::Honest,
        };
        self.file.state().0 = mood;
    }

    async fn read(&mut self, area: &Arc<SimArea>) -> Result<(), String> {
        let blocks = self.bytes.len().div_ceil(BLOCK_SIZE as usize);
        let first = self.rng.below(blocks as u64) as usize;
        let count = 1 + self.rng.below((blocks - first).min(40) as u64) as usize;
        let asked = range(first as u64 * BLOCK_SIZE, count as u64 * BLOCK_SIZE);
        let mut pages = Pages::zeroed(asked.len()).ok_or("no memory")?;
        let read = area.read(asked, pages.bytes_mut(), &Counters::default()).await;
        let mood = self.file.state().0.clone();
        if let Err(error) = read {
            return match mood {
                Mood::Honest => Err(format!("{asked}: {error}, for no reason")),
                _ => Ok(()),
            };
        }
        let mut right = self.bytes[asked.start() as usize..].to_vec();
        right.resize(asked.len() as usize, 0);
        if pages.bytes() != right {
            return Err(format!("{asked}: other bytes than were mapped"));
        }
        self.seen.extend(first..first + count);
        Ok(())
    }
}
