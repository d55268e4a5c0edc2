//! The extent map of a virtual area through power failures, with a model that knows each mapping.
//!
//! ```text
//!   map, map, … ──► ExtentWriter ──► two SimLogs, of which a power failure keeps any sectors, and
//!                                    any length, of what was not synced
//!   after each start: what was promised is there, what was ever seen is never anything else
//! ```

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use burgeon_block::{
    BLOCK_SIZE, ByteRange, Digest, Error, ErrorKind, FileIdentity, ObjectId, Result,
};
use burgeon_image::{
    Content, ExtentMap, ExtentSource, ExtentWriter, Mapping,
    extents::{LogFile, LogView},
};
use testkit::Rng;

const SECTOR: usize = 512;
/// Small enough that the area ends in some runs.
const SIZE: u64 = 1 << 40;

/// A defect of the writer, put into the files below it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum MapBug {
    /// A mapping is announced before it is durable.
    NoSync,
    /// The targets of extents are never made durable.
    NoSourceSync,
    /// A start of the machine forgets the newest mapping, and gives its addresses again.
    ReuseAddresses,
    /// A damaged record is taken as a sound one.
    SkipRecordChecksum,
}

impl MapBug {
    /// All of them.
    pub const ALL: [Self; 4] =
        [Self::NoSync, Self::NoSourceSync, Self::ReuseAddresses, Self::SkipRecordChecksum];
}

#[derive(Clone, Default)]
struct Log {
    now: Vec<u8>,
    durable: Vec<u8>,
    unsynced: Vec<(usize, usize)>,
}

struct Machine {
    rng: Rng,
    logs: [Log; 2],
    /// The durable state before the newest mapping.
    before: [Vec<u8>; 2],
    operations: u64,
    off_at: Option<u64>,
    off: bool,
    bug: Option<MapBug>,
}

/// One of the two files of a map.
#[derive(Clone)]
pub(crate) struct SimLog {
    machine: Arc<Mutex<Machine>>,
    which: usize,
}

/// The files of a map with `headers`, to which nothing happens.
pub(crate) fn quiet(seed: u64, headers: [Vec<u8>; 2]) -> [SimLog; 2] {
    logs_of(&Arc::new(Mutex::new(Machine::new(seed, headers, None))))
}

fn logs_of(machine: &Arc<Mutex<Machine>>) -> [SimLog; 2] {
    [0, 1].map(|which| SimLog { machine: Arc::clone(machine), which })
}

impl SimLog {
    fn machine(&self) -> MutexGuard<'_, Machine> {
        self.machine.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Machine {
    fn new(seed: u64, headers: [Vec<u8>; 2], bug: Option<MapBug>) -> Self {
        let before = headers.clone();
        let logs = headers.map(|header| Log {
            now: header.clone(),
            durable: header,
            unsynced: Vec::new(),
        });
        let rng = Rng::new(seed);
        Self { rng, logs, before, operations: 0, off_at: None, off: false, bug }
    }

    /// The power fails within some operation.
    fn operate(&mut self) -> Result<()> {
        self.off |= self.off_at == Some(self.operations);
        self.operations += 1;
        if self.off {
            return Err(Error::new(ErrorKind::LocalIo, "simulated: the power is off"));
        }
        Ok(())
    }

    fn restart(&mut self) {
        for log in &mut self.logs {
            log.lose_power(&mut self.rng);
        }
        if self.bug == Some(MapBug::ReuseAddresses) {
            for (log, before) in self.logs.iter_mut().zip(&self.before) {
                log.now.clone_from(before);
                log.durable.clone_from(before);
            }
        }
        (self.off, self.off_at, self.operations) = (false, None, 0);
    }

    /// Flips a bit behind the headers.
    fn rot(&mut self) {
        let which = self.rng.below(2) as usize;
        let len = self.logs[which].now.len();
        if len > 64 {
            let at = 64 + self.rng.below(len as u64 - 64) as usize;
            let bit = 1 << self.rng.below(8);
            self.logs[which].now[at] ^= bit;
            self.logs[which].durable = self.logs[which].now.clone();
            if which == 0 && self.bug == Some(MapBug::SkipRecordChecksum) {
                reseal(&mut self.logs[0].now, at);
            }
        }
    }
}

/// Makes the record around `at` look sound.
fn reseal(extents: &mut [u8], at: usize) {
    let index = (at - 64) / 24;
    let start = 64 + index * 24;
    if start + 24 > extents.len() {
        return;
    }
    let mut covered = extents[48..56].to_vec();
    covered.extend((index as u64).to_le_bytes());
    covered.extend(&extents[start..start + 20]);
    let sum = burgeon_block::ChecksumKind::Crc32c.of(&covered) as u32;
    extents[start + 20..start + 24].copy_from_slice(&sum.to_le_bytes());
}

impl Log {
    fn put(&mut self, offset: usize, bytes: &[u8]) {
        let end = offset + bytes.len();
        if self.now.len() < end {
            self.now.resize(end, 0);
        }
        self.now[offset..end].copy_from_slice(bytes);
        self.unsynced.push((offset, bytes.len()));
    }

    fn lose_power(&mut self, rng: &mut Rng) {
        for (offset, len) in std::mem::take(&mut self.unsynced) {
            for at in (offset / SECTOR * SECTOR..offset + len).step_by(SECTOR) {
                if rng.below(2) == 0 {
                    continue;
                }
                let (start, end) = (at.max(offset), (at + SECTOR).min(offset + len));
                if self.durable.len() < end {
                    self.durable.resize(end, 0);
                }
                self.durable[start..end].copy_from_slice(&self.now[start..end]);
            }
        }
        self.now.clone_from(&self.durable);
    }
}

impl LogFile for SimLog {
    fn size(&self) -> Result<u64> {
        Ok(self.machine().logs[self.which].now.len() as u64)
    }

    fn view(&self, len: u64) -> Result<LogView> {
        match self.machine().logs[self.which].now.get(..len as usize) {
            Some(bytes) => Ok(bytes.to_vec().into()),
            None => Err(Error::new(ErrorKind::LocalIo, "simulated: beyond the end")),
        }
    }

    fn write_at(&self, offset: u64, bytes: &[u8]) -> Result<()> {
        let mut machine = self.machine();
        let machine = &mut *machine;
        let on = machine.operate();
        let log = &mut machine.logs[self.which];
        if on.is_err() {
            // The write that the power failed in is half done.
            let half = machine.rng.below(bytes.len() as u64 + 1) as usize;
            log.put(offset as usize, &bytes[..half]);
            return on;
        }
        log.put(offset as usize, bytes);
        Ok(())
    }

    fn sync(&self) -> Result<()> {
        let mut machine = self.machine();
        machine.operate()?;
        let lies = match machine.bug {
            Some(MapBug::NoSync) => true,
            Some(MapBug::NoSourceSync) => self.which == 1,
            _ => false,
        };
        if !lies {
            let log = &mut machine.logs[self.which];
            log.durable.clone_from(&log.now);
            log.unsynced.clear();
        }
        Ok(())
    }
}

/// All content that an address was ever seen to have.
struct Known {
    range: ByteRange,
    mapping: Mapping,
    /// True if [`ExtentWriter::map`] has returned it.
    promised: bool,
}

struct Run {
    rng: Rng,
    machine: Arc<Mutex<Machine>>,
    known: Vec<Known>,
    /// Mapping that was being added when the power failed: there as a whole, or not at all.
    attempted: Option<Mapping>,
    rotten: bool,
    mapped: u64,
}

/// Maps, with the power failing at operation `first` and again, after the next start, at
/// operation `second`; then maps with bits rotting. How many operations the first life had.
pub fn map_through_power_failures(
    seed: u64,
    first: u64,
    second: u64,
    bug: Option<MapBug>,
) -> Result<u64, String> {
    let mut run = Run::new(seed, bug)?;
    let operations = run.life(Some(first))?;
    run.machine().restart();
    run.life(Some(second))?;
    run.machine().restart();
    run.life(None)?;
    run.rot()?;
    Ok(operations)
}

impl Run {
    fn new(seed: u64, bug: Option<MapBug>) -> Result<Self, String> {
        let mut rng = Rng::new(seed);
        let headers = ExtentWriter::headers(SIZE, rng.bits()).map_err(|e| e.to_string())?;
        let machine = Machine::new(rng.bits(), headers, bug);
        let machine = Arc::new(Mutex::new(machine));
        Ok(Self { rng, machine, known: Vec::new(), attempted: None, rotten: false, mapped: 0 })
    }

    fn machine(&self) -> MutexGuard<'_, Machine> {
        self.machine.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn logs(&self) -> [SimLog; 2] {
        logs_of(&self.machine)
    }

    /// Starts, checks, maps some; ends early when the power fails.
    fn life(&mut self, off_at: Option<u64>) -> Result<u64, String> {
        let map = ExtentMap::over(self.logs()).map_err(|error| format!("no map: {error}"))?;
        self.check(&map)?;
        self.attempted = None;
        self.machine().off_at = off_at;
        let Ok(mut writer) = ExtentWriter::over(self.logs()) else {
            return if self.machine().off {
                Ok(0)
            } else {
                Err("the map cannot be written".into())
            };
        };
        for _ in 0..4 {
            let mapping = self.some_mapping();
            let durable = [0, 1].map(|which| self.machine().logs[which].durable.clone());
            self.machine().before = durable;
            match writer.map(&mapping) {
                Ok(range) => {
                    self.overlaps(range)?;
                    self.known.push(Known { range, mapping, promised: true });
                }
                Err(_) if self.machine().off => {
                    self.attempted = Some(mapping);
                    break;
                }
                Err(error) if error.kind() == ErrorKind::NoSpace => {}
                Err(error) => return Err(format!("cannot map: {error}")),
            }
            map.refresh().map_err(|error| format!("cannot follow: {error}"))?;
            self.check(&map)?;
        }
        // A reader may have seen a mapping that was not yet promised.
        if self.machine().off && map.refresh().is_ok() {
            self.check(&map)?;
        }
        Ok(self.machine().operations)
    }

    fn overlaps(&self, range: ByteRange) -> Result<(), String> {
        match self.known.iter().find(|known| known.range.intersect(range).is_some()) {
            Some(known) => Err(format!("{range} was given before, as part of {}", known.range)),
            None => Ok(()),
        }
    }

    fn some_mapping(&mut self) -> Mapping {
        let count = *self.rng.pick(&[1, 1, 2, 5, 40]);
        let extents = (0..count).map(|_| self.some_content()).collect();
        self.mapped += 1;
        Mapping { label: format!("mapping {}", self.mapped), origin: "somewhere".into(), extents }
    }

    fn some_content(&mut self) -> Content {
        let bits = *self.rng.pick(&[8, 14, 36]);
        let size = 1 + self.rng.below(1 << bits);
        let object = |name: String| match ObjectId::new(name) {
            Ok(object) => object,
            Err(error) => unreachable!("{error}"),
        };
        match self.rng.below(3) {
            0 => Content {
                source: ExtentSource::Computed(object("computed/block-number".into())),
                offset: self.rng.below(100) * BLOCK_SIZE,
                len: size,
            },
            1 => {
                let time = self.rng.below(1 << 60) as i64;
                let identity =
                    FileIdentity { inode: self.rng.bits(), size, mtime_ns: time, ctime_ns: -time };
                let object = object(format!("file/{}", self.rng.below(10)));
                Content { source: ExtentSource::File { object, identity }, offset: 0, len: size }
            }
            _ => Content {
                source: ExtentSource::Image(Digest::of(&[self.rng.below(3) as u8])),
                offset: self.rng.below(100) * BLOCK_SIZE,
                len: size.next_multiple_of(BLOCK_SIZE),
            },
        }
    }

    /// Compares the answers of `map` with its earlier ones.
    fn check(&mut self, map: &ExtentMap<SimLog>) -> Result<(), String> {
        if let Some(attempted) = self.attempted.clone() {
            let found = map.mappings().map_err(|error| format!("no list: {error}"))?;
            if let Some(found) = found.iter().find(|found| found.label == attempted.label) {
                let known = self.known.iter().any(|known| known.mapping.label == found.label);
                if !known {
                    self.overlaps(found.range)?;
                    let (range, mapping) = (found.range, attempted);
                    self.known.push(Known { range, mapping, promised: false });
                }
            }
        }
        let mut checksums: Vec<(u64, u64)> = Vec::new();
        for known in &self.known {
            let there = self.check_mapping(map, known, &mut checksums)?;
            if !there && known.promised && !self.rotten {
                return Err(format!("{} was promised and is gone", known.mapping.label));
            }
        }
        checksums.sort_unstable();
        match checksums.windows(2).find(|pair| pair[0].1 > pair[1].0) {
            Some(pair) => Err(format!("two files share checksums: {pair:?}")),
            None => Ok(()),
        }
    }

    /// True if `known` is there, whole, and itself.
    fn check_mapping(
        &self,
        map: &ExtentMap<SimLog>,
        known: &Known,
        checksums: &mut Vec<(u64, u64)>,
    ) -> Result<bool, String> {
        let mut there = 0;
        let mut before = None;
        for (content, position) in known.mapping.extents.iter().zip(known.mapping.positions()) {
            let at = known.range.start() + position;
            let extent = match map.find(at) {
                Ok(extent) => extent,
                Err(error) if error.kind() == ErrorKind::Unmapped => continue,
                Err(error) if error.kind() == ErrorKind::Corrupt && self.rotten => continue,
                Err(error) => return Err(format!("{at}: {error}")),
            };
            let blocks = content.len.next_multiple_of(BLOCK_SIZE);
            let right = *extent.source == content.source
                && extent.offset == content.offset
                && extent.range.start() == at
                && extent.range.len() == blocks;
            if !right {
                return Err(format!("{at} of {}: is {extent:?} now", known.mapping.label));
            }
            if let (ExtentSource::File { identity, .. }, true) =
                (&content.source, before != Some(&content.source))
            {
                let first = extent.first_checksum;
                checksums.push((first, first + identity.size.div_ceil(BLOCK_SIZE)));
            }
            before = Some(&content.source);
            there += 1;
        }
        match there {
            0 => Ok(false),
            all if all == known.mapping.extents.len() || self.rotten => Ok(true),
            some => Err(format!("{}: {some} of its extents are there", known.mapping.label)),
        }
    }

    /// A bit rots: errors, and never another answer or an address again.
    fn rot(&mut self) -> Result<(), String> {
        self.rotten = true;
        self.machine().rot();
        let Ok(map) = ExtentMap::over(self.logs()) else { return Ok(()) };
        self.check(&map)?;
        let mapping = self.some_mapping();
        let writer = ExtentWriter::over(self.logs());
        match writer.and_then(|mut writer| writer.map(&mapping)) {
            Ok(range) => self.overlaps(range),
            Err(_) => Ok(()),
        }
    }
}
