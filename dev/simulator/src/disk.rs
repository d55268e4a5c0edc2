//! A disk that survives crashes, with the bytes that a crash leaves.

use std::{
    collections::BTreeMap,
    os::fd::BorrowedFd,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use burgeon_block::{BLOCK_SIZE, ByteRange, Error, ErrorKind, LocalFile, Result};
use burgeon_cache::disk::{CacheDisk, DiskFile, IoMode, Space};
use testkit::Rng;

const SECTOR: usize = 512;
const BLOCK: usize = BLOCK_SIZE as usize;
/// Number of the file of recorded checksums; the others are those of the cache.
const CHECKSUMS: usize = 0;

/// The end of a life of the machine.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Crash {
    /// The process is gone, the kernel lives on: nothing is lost.
    Kill,
    /// Each sector that was not synced survives with a chance of this many in 256.
    Power(u8),
}

/// A simulated file for recorded checksums, the folder of a cache, and everything that can go
/// wrong with them.
#[derive(Clone)]
pub struct Disk(Arc<Mutex<State>>);

struct State {
    rng: Rng,
    files: Vec<File>,
    names: BTreeMap<String, usize>,
    /// The names before each change since they were last synced, the oldest first.
    history: Vec<BTreeMap<String, usize>>,
    /// Bytes for all files.
    capacity: u64,
    off: bool,
    faults: Faults,
    log: DiskLog,
    rotten_ever: u64,
    has_lost_power: bool,
}

/// A file; what lies beyond its bytes is a hole.
#[derive(Default)]
struct File {
    /// The bytes that a reader sees.
    now: Vec<u8>,
    /// Blocks that are no holes.
    allocated: Vec<bool>,
    /// The bytes that survive a power failure.
    durable: Vec<u8>,
    durable_allocated: Vec<bool>,
    /// Offsets and lengths written since the last sync.
    unsynced: Vec<(usize, usize)>,
}

/// Faults while the machine runs.
#[derive(Clone, Copy, Default, Debug)]
pub(crate) struct Faults {
    /// Writes that still succeed before the file system is full.
    pub(crate) space_left: Option<u64>,
    /// The chance of 256 that a write fails.
    pub(crate) write_eio: u8,
    /// The chance of 256 that a read fails.
    pub(crate) read_eio: u8,
    /// The power fails within this write, counted from now.
    pub(crate) off_at_write: Option<u64>,
}

/// Events since the machine was started.
#[derive(Clone, Copy, Default, Debug)]
pub(crate) struct DiskLog {
    pub(crate) writes: u64,
    pub(crate) write_errors: u64,
    pub(crate) read_errors: u64,
    /// A write of checksums failed for good, and another was tried after it.
    pub(crate) written_after_eio: bool,
    eio: bool,
}

impl Disk {
    /// A disk of `capacity` bytes: without a file.
    pub fn new(seed: u64, capacity: u64) -> Self {
        Self(Arc::new(Mutex::new(State {
            rng: Rng::new(seed),
            files: vec![File::default()],
            names: BTreeMap::new(),
            history: Vec::new(),
            capacity,
            off: false,
            faults: Faults::default(),
            log: DiskLog::default(),
            rotten_ever: 0,
            has_lost_power: false,
        })))
    }

    /// The file of recorded checksums, as a process opens it.
    pub fn checksums(&self) -> SimFile {
        SimFile { disk: self.clone(), number: CHECKSUMS }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn set_faults(&self, faults: Faults) {
        self.state().faults = faults;
    }

    pub(crate) fn faults(&self) -> Faults {
        self.state().faults
    }

    pub(crate) fn log(&self) -> DiskLog {
        self.state().log
    }

    /// True if the power has failed.
    pub fn is_off(&self) -> bool {
        self.state().off
    }

    /// True if a write of checksums has failed for good in this life.
    pub(crate) fn has_failed(&self) -> bool {
        self.state().log.eio
    }

    /// True if the power failed in an earlier life.
    pub(crate) fn has_lost_power(&self) -> bool {
        self.state().has_lost_power
    }

    /// Bits that have rotted in all lives.
    pub(crate) fn rotten(&self) -> u64 {
        self.state().rotten_ever
    }

    /// Ends this life and begins the next, without faults.
    pub fn restart(&self, crash: Crash) {
        let mut state = self.state();
        if let Crash::Power(chance) = crash {
            state.lose_power(chance);
        }
        state.off = false;
        state.faults = Faults::default();
        state.log = DiskLog::default();
    }

    /// Flips a bit of a block that holds data; `false` if none does.
    pub(crate) fn rot(&self, rng: &mut Rng) -> bool {
        let mut state = self.state();
        let of = |(number, file): (usize, &File)| {
            let blocks = file.allocated.iter().enumerate().filter(|(_, is)| **is);
            blocks.map(|(block, _)| (number, block)).collect::<Vec<_>>()
        };
        let blocks: Vec<_> = state.files.iter().enumerate().flat_map(of).collect();
        if blocks.is_empty() {
            return false;
        }
        let (number, block) = *rng.pick(&blocks);
        let at = block * BLOCK + rng.below(BLOCK_SIZE) as usize;
        let bit = 1 << rng.below(8);
        let file = &mut state.files[number];
        for bytes in [&mut file.now, &mut file.durable] {
            if let Some(byte) = bytes.get_mut(at) {
                *byte ^= bit;
            }
        }
        state.rotten_ever += 1;
        true
    }
}

impl File {
    fn put(&mut self, offset: usize, bytes: &[u8]) {
        let end = offset + bytes.len();
        if self.now.len() < end.next_multiple_of(BLOCK) {
            self.now.resize(end.next_multiple_of(BLOCK), 0);
            self.allocated.resize(self.now.len() / BLOCK, false);
        }
        self.now[offset..end].copy_from_slice(bytes);
        self.allocated[offset / BLOCK..end.div_ceil(BLOCK)].fill(true);
        self.unsynced.push((offset, bytes.len()));
    }

    fn get(&self, offset: usize, buf: &mut [u8]) {
        buf.fill(0);
        if let Some(bytes) = self.now.get(offset..) {
            let len = bytes.len().min(buf.len());
            buf[..len].copy_from_slice(&bytes[..len]);
        }
    }

    fn free(&mut self, blocks: std::ops::Range<usize>) {
        for block in blocks.start..blocks.end.min(self.allocated.len()) {
            self.now[block * BLOCK..(block + 1) * BLOCK].fill(0);
            self.allocated[block] = false;
        }
    }

    fn sync(&mut self) {
        self.durable.clone_from(&self.now);
        self.durable_allocated.clone_from(&self.allocated);
        self.unsynced.clear();
    }

    fn lose_power(&mut self, rng: &mut Rng, chance: u8) {
        let mut happens = |of_256: u8| of_256 > 0 && rng.below(256) < u64::from(of_256);
        let unsynced = std::mem::take(&mut self.unsynced);
        self.durable.resize(self.now.len(), 0);
        self.durable_allocated.resize(self.allocated.len(), false);
        let mut garbage = Vec::new();
        for (offset, len) in unsynced {
            for at in (offset..(offset + len).min(self.now.len())).step_by(SECTOR) {
                let end = (at + SECTOR).min(offset + len).min(self.now.len());
                if happens(chance) {
                    self.durable[at..end].copy_from_slice(&self.now[at..end]);
                    self.durable_allocated[at / BLOCK] = true;
                } else if happens(8) && !self.durable_allocated[at / BLOCK] {
                    // The file system had the block's place, not yet its bytes.
                    garbage.push(at..end);
                    self.durable_allocated[at / BLOCK] = true;
                }
            }
        }
        for range in garbage {
            let len = range.len();
            self.durable[range].copy_from_slice(&rng.bytes(len));
        }
        self.now.clone_from(&self.durable);
        self.allocated.clone_from(&self.durable_allocated);
    }
}

impl State {
    fn fail(kind: ErrorKind, what: &str) -> Error {
        Error::new(kind, format!("simulated: {what}"))
    }

    fn on(&self) -> Result<()> {
        if self.off { Err(Self::fail(ErrorKind::LocalIo, "the power is off")) } else { Ok(()) }
    }

    fn chance(&mut self, of_256: u8) -> bool {
        of_256 > 0 && self.rng.below(256) < u64::from(of_256)
    }

    fn read(&mut self, number: usize, offset: u64, buf: &mut [u8]) -> Result<()> {
        self.on()?;
        let chance = self.faults.read_eio;
        if !buf.is_empty() && self.chance(chance) {
            self.log.read_errors += 1;
            return Err(Self::fail(ErrorKind::LocalIo, "a sector cannot be read"));
        }
        self.files[number].get(offset as usize, buf);
        Ok(())
    }

    /// Writes some sectors only, as a write that fails or is cut off may do.
    fn put_some(&mut self, number: usize, offset: usize, bytes: &[u8]) {
        for (index, sector) in bytes.chunks(SECTOR).enumerate() {
            if self.chance(128) {
                self.files[number].put(offset + index * SECTOR, sector);
            }
        }
    }

    fn write(&mut self, number: usize, offset: u64, buf: &[u8]) -> Result<()> {
        self.on()?;
        self.log.writes += 1;
        self.log.written_after_eio |= self.log.eio && number == CHECKSUMS;
        let offset = offset as usize;
        if let Some(left) = self.faults.off_at_write {
            if left == 0 {
                self.put_some(number, offset, buf);
                self.off = true;
                return self.on();
            }
            self.faults.off_at_write = Some(left - 1);
        }
        match self.faults.space_left {
            Some(0) => {
                self.put_some(number, offset, buf);
                self.log.write_errors += 1;
                return Err(Self::fail(ErrorKind::NoSpace, "the file system is full"));
            }
            Some(left) => self.faults.space_left = Some(left - 1),
            None => {}
        }
        let chance = self.faults.write_eio;
        if self.chance(chance) {
            self.put_some(number, offset, buf);
            self.log.write_errors += 1;
            self.log.eio |= number == CHECKSUMS;
            return Err(Self::fail(ErrorKind::LocalIo, "a sector cannot be written"));
        }
        self.files[number].put(offset, buf);
        Ok(())
    }

    fn change_names(&mut self) -> Result<()> {
        self.on()?;
        self.history.push(self.names.clone());
        Ok(())
    }

    fn number(&self, name: &str) -> Result<usize> {
        let missing = || Self::fail(ErrorKind::NotFound, "there is no such file");
        self.names.get(name).copied().ok_or_else(missing)
    }

    fn lose_power(&mut self, chance: u8) {
        self.has_lost_power = true;
        let kept = self.rng.below(self.history.len() as u64 + 1) as usize;
        if kept < self.history.len() {
            self.names = self.history[kept].clone();
        }
        self.history.clear();
        for number in 0..self.files.len() {
            let mut file = std::mem::take(&mut self.files[number]);
            file.lose_power(&mut self.rng, chance);
            self.files[number] = file;
        }
    }
}

/// A file of a [`Disk`].
pub struct SimFile {
    disk: Disk,
    number: usize,
}

impl LocalFile for SimFile {
    fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<()> {
        self.disk.state().read(self.number, offset, buf)
    }

    fn write_at(&self, offset: u64, buf: &[u8]) -> Result<()> {
        self.disk.state().write(self.number, offset, buf)
    }

    fn sync(&self) -> Result<()> {
        let mut state = self.disk.state();
        state.on()?;
        state.files[self.number].sync();
        Ok(())
    }
}

impl DiskFile for SimFile {
    fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<()> {
        LocalFile::read_at(self, offset, buf)
    }

    fn write_at(&self, offset: u64, buf: &[u8]) -> Result<()> {
        LocalFile::write_at(self, offset, buf)
    }

    fn punch(&self, range: ByteRange) -> Result<()> {
        let mut state = self.disk.state();
        state.on()?;
        let [start, end] = [range.start(), range.end()].map(|at| at as usize / BLOCK);
        state.files[self.number].free(start..end);
        Ok(())
    }

    fn clear(&self) -> Result<()> {
        let mut state = self.disk.state();
        state.on()?;
        let file = &mut state.files[self.number];
        (file.now, file.allocated) = Default::default();
        Ok(())
    }

    fn sizes(&self) -> Result<(u64, u64)> {
        let state = self.disk.state();
        state.on()?;
        let file = &state.files[self.number];
        let blocks = file.allocated.iter().filter(|is| **is).count() as u64;
        Ok((file.now.len() as u64, blocks * BLOCK_SIZE))
    }

    fn sync(&self) -> Result<()> {
        LocalFile::sync(self)
    }

    fn identity(&self) -> u64 {
        self.number as u64 + 1
    }

    fn waiting_fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}

impl CacheDisk for Disk {
    fn take(&self) -> Result<bool> {
        self.state().on().map(|()| true)
    }

    fn check(&self) -> Result<()> {
        self.state().on()
    }

    fn list(&self) -> Result<Vec<String>> {
        let state = self.state();
        state.on()?;
        Ok(state.names.keys().cloned().collect())
    }

    fn create(&self, name: &str, _: IoMode) -> Result<Box<dyn DiskFile>> {
        let mut state = self.state();
        state.change_names()?;
        state.files.push(File::default());
        let number = state.files.len() - 1;
        state.names.insert(name.to_owned(), number);
        Ok(Box::new(SimFile { disk: self.clone(), number }))
    }

    fn open(&self, name: &str, _: IoMode) -> Result<Box<dyn DiskFile>> {
        let number = self.state().number(name)?;
        Ok(Box::new(SimFile { disk: self.clone(), number }))
    }

    fn rename(&self, from: &str, to: &str) -> Result<()> {
        let mut state = self.state();
        let number = state.number(from)?;
        state.change_names()?;
        state.names.remove(from);
        state.names.insert(to.to_owned(), number);
        Ok(())
    }

    fn remove(&self, name: &str) -> Result<()> {
        let mut state = self.state();
        state.number(name)?;
        state.change_names()?;
        state.names.remove(name);
        Ok(())
    }

    fn sync(&self) -> Result<()> {
        let mut state = self.state();
        state.on()?;
        state.history.clear();
        Ok(())
    }

    fn space(&self) -> Result<Space> {
        let state = self.state();
        state.on()?;
        let named = state.names.values().map(|number| &state.files[*number]);
        let blocks = named.flat_map(|file| &file.allocated).filter(|is| **is).count() as u64;
        let free = state.capacity.saturating_sub(blocks * BLOCK_SIZE);
        Ok(Space { size: state.capacity, free })
    }

    fn settle(&self) -> Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use burgeon_block::LocalFile;

    use super::{Crash, Disk};

    #[test]
    fn synced_bytes_survive_and_the_rest_may_not() {
        let (mut lost, mut kept, mut torn) = (0, 0, 0);
        for seed in 0..50 {
            let disk = Disk::new(seed, 1 << 16);
            let file = disk.checksums();
            LocalFile::write_at(&file, 0, &[1; 4096]).unwrap();
            LocalFile::sync(&file).unwrap();
            LocalFile::write_at(&file, 8192, &[2; 4096]).unwrap();
            disk.restart(Crash::Power(128));
            let mut block = [0; 4096];
            LocalFile::read_at(&file, 0, &mut block).unwrap();
            assert_eq!(block, [1; 4096]);
            LocalFile::read_at(&file, 8192, &mut block).unwrap();
            match block.iter().filter(|byte| **byte == 2).count() {
                0 => lost += 1,
                4096 => kept += 1,
                _ => torn += 1,
            }
        }
        assert!(torn > 40, "{lost} {kept} {torn}");
        let disk = Disk::new(0, 1 << 16);
        let file = disk.checksums();
        LocalFile::write_at(&file, 8192, &[2; 4096]).unwrap();
        let mut block = [0; 4096];
        disk.restart(Crash::Kill);
        LocalFile::read_at(&file, 8192, &mut block).unwrap();
        assert!(block == [2; 4096], "a kill loses nothing");
        disk.restart(Crash::Power(0));
        LocalFile::read_at(&file, 8192, &mut block).unwrap();
        assert!(block != [2; 4096], "never synced");
    }
}
