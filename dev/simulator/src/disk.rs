//! A disk that survives crashes, with the bytes that a crash leaves.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use burgeon_block::{BLOCK_SIZE, ByteRange, Error, ErrorKind, LocalFile, Result};
use testkit::Rng;

const SECTOR: usize = 512;
const BLOCK: usize = BLOCK_SIZE as usize;
/// Bytes for each block of the first file in the second.
const CHECKSUM: usize = 8;

/// The end of a life of the machine.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Crash {
    /// The process is gone, the kernel lives on: nothing is lost.
    Kill,
    /// Each sector that was not synced survives with a chance of this many in 256.
    Power(u8),
}

/// Two simulated files, a cache and checksums of its blocks, and everything that can go wrong with
/// them.
#[derive(Clone)]
pub struct Disk(Arc<Mutex<State>>);

struct State {
    rng: Rng,
    /// The bytes that a reader sees.
    now: Vec<u8>,
    /// Blocks that are no holes, for [`LocalFile::next_data`].
    allocated: Vec<bool>,
    /// The bytes that survive a power failure.
    durable: Vec<u8>,
    durable_allocated: Vec<bool>,
    /// Offsets and lengths written since the last sync.
    unsynced: Vec<(usize, usize)>,
    off: bool,
    faults: Faults,
    log: DiskLog,
    /// Length of the first file; the second lies behind it.
    first_len: usize,
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
    pub(crate) rotten_blocks: u64,
    /// A write failed for good, and another was tried after it.
    pub(crate) written_after_eio: bool,
    eio: bool,
}

impl Disk {
    /// A file of `len` bytes, and one of checksums of its blocks, all hole.
    pub fn new(seed: u64, len: u64) -> Self {
        let first_len = len as usize;
        let len = first_len + (first_len / BLOCK * CHECKSUM).next_multiple_of(BLOCK);
        let blocks = len / BLOCK;
        Self(Arc::new(Mutex::new(State {
            rng: Rng::new(seed),
            now: vec![0; len],
            allocated: vec![false; blocks],
            durable: vec![0; len],
            durable_allocated: vec![false; blocks],
            unsynced: Vec::new(),
            off: false,
            faults: Faults::default(),
            log: DiskLog::default(),
            first_len,
        })))
    }

    /// The first file, as a process opens it.
    pub fn file(&self) -> SimFile {
        SimFile { disk: self.clone(), base: 0 }
    }

    /// The second one.
    pub(crate) fn checksums(&self) -> SimFile {
        let base = self.state().first_len;
        SimFile { disk: self.clone(), base }
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

    /// True if a write has failed for good in this life.
    pub(crate) fn has_failed(&self) -> bool {
        self.state().log.eio
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
        let blocks: Vec<usize> =
            (0..state.allocated.len()).filter(|b| state.allocated[*b]).collect();
        if blocks.is_empty() {
            return false;
        }
        let at = *rng.pick(&blocks) * BLOCK + rng.below(BLOCK_SIZE) as usize;
        let bit = 1 << rng.below(8);
        state.now[at] ^= bit;
        state.durable[at] ^= bit;
        state.log.rotten_blocks += 1;
        true
    }

    /// Blocks of the first file that are no holes.
    pub(crate) fn blocks(&self) -> u64 {
        let state = self.state();
        let first = &state.allocated[..state.first_len / BLOCK];
        first.iter().filter(|allocated| **allocated).count() as u64
    }

    /// Blocks that are no holes and differ from `expected`.
    pub(crate) fn bad_blocks(&self, expected: &[u8]) -> u64 {
        let state = self.state();
        let blocks = state.now.chunks(BLOCK).zip(expected.chunks(BLOCK)).zip(&state.allocated);
        blocks.filter(|((now, expected), allocated)| **allocated && now != expected).count() as u64
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

    fn put(&mut self, offset: usize, bytes: &[u8]) {
        self.now[offset..offset + bytes.len()].copy_from_slice(bytes);
        self.allocated[offset / BLOCK..(offset + bytes.len()).div_ceil(BLOCK)].fill(true);
        self.unsynced.push((offset, bytes.len()));
    }

    /// Writes some sectors only, as a write that fails or is cut off may do.
    fn put_some(&mut self, offset: usize, bytes: &[u8]) {
        for (index, sector) in bytes.chunks(SECTOR).enumerate() {
            if self.chance(128) {
                self.put(offset + index * SECTOR, sector);
            }
        }
    }

    fn lose_power(&mut self, chance: u8) {
        let unsynced = std::mem::take(&mut self.unsynced);
        for (offset, len) in unsynced {
            for at in (offset..offset + len).step_by(SECTOR) {
                let end = (at + SECTOR).min(offset + len);
                if self.chance(chance) {
                    self.durable[at..end].copy_from_slice(&self.now[at..end]);
                    self.durable_allocated[at / BLOCK] = true;
                } else if self.chance(8) {
                    // The file system had the block's place, not yet its bytes.
                    let garbage = self.rng.bytes(end - at);
                    if !self.durable_allocated[at / BLOCK] {
                        self.durable[at..end].copy_from_slice(&garbage);
                        self.durable_allocated[at / BLOCK] = true;
                    }
                }
            }
        }
        self.now.clone_from(&self.durable);
        self.allocated.clone_from(&self.durable_allocated);
    }
}

/// A file of a [`Disk`], as the volume sees it.
pub struct SimFile {
    disk: Disk,
    /// Its first byte on the disk.
    base: usize,
}

impl LocalFile for SimFile {
    fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<()> {
        let mut state = self.disk.state();
        state.on()?;
        let chance = state.faults.read_eio;
        if state.chance(chance) {
            state.log.read_errors += 1;
            return Err(State::fail(ErrorKind::LocalIo, "a sector cannot be read"));
        }
        buf.copy_from_slice(&state.now[self.base + offset as usize..][..buf.len()]);
        Ok(())
    }

    fn write_at(&self, offset: u64, buf: &[u8]) -> Result<()> {
        let mut state = self.disk.state();
        state.on()?;
        state.log.writes += 1;
        state.log.written_after_eio |= state.log.eio;
        let offset = self.base + offset as usize;
        if let Some(left) = state.faults.off_at_write {
            if left == 0 {
                state.put_some(offset, buf);
                state.off = true;
                return state.on();
            }
            state.faults.off_at_write = Some(left - 1);
        }
        match state.faults.space_left {
            Some(0) => {
                state.put_some(offset, buf);
                state.log.write_errors += 1;
                return Err(State::fail(ErrorKind::NoSpace, "the file system is full"));
            }
            Some(left) => state.faults.space_left = Some(left - 1),
            None => {}
        }
        let chance = state.faults.write_eio;
        if state.chance(chance) {
            state.put_some(offset, buf);
            state.log.write_errors += 1;
            state.log.eio = true;
            return Err(State::fail(ErrorKind::LocalIo, "a sector cannot be written"));
        }
        state.put(offset, buf);
        Ok(())
    }

    fn punch_hole(&self, range: ByteRange) -> Result<()> {
        let mut state = self.disk.state();
        state.on()?;
        let start = self.base + range.start() as usize;
        let end = start + range.len() as usize;
        state.now[start..end].fill(0);
        state.allocated[start / BLOCK..end / BLOCK].fill(false);
        Ok(())
    }

    fn next_data(&self, offset: u64) -> Result<Option<ByteRange>> {
        let state = self.disk.state();
        state.on()?;
        // Only of the first file does anybody ask.
        let len = state.first_len / BLOCK;
        let mut blocks = (offset as usize).div_ceil(BLOCK)..len;
        let Some(start) = blocks.find(|block| state.allocated[*block]) else { return Ok(None) };
        let end = blocks.find(|block| !state.allocated[*block]).unwrap_or(len);
        Ok(ByteRange::new((start * BLOCK) as u64, (end * BLOCK) as u64))
    }

    fn sync(&self) -> Result<()> {
        let mut state = self.disk.state();
        state.on()?;
        let state = &mut *state;
        state.durable.clone_from(&state.now);
        state.durable_allocated.clone_from(&state.allocated);
        state.unsynced.clear();
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use burgeon_block::{ByteRange, LocalFile};

    use super::{Crash, Disk};

    #[test]
    fn what_was_synced_survives_and_the_rest_may_not() {
        let (mut lost, mut kept, mut torn) = (0, 0, 0);
        for seed in 0..50 {
            let disk = Disk::new(seed, 1 << 16);
            disk.file().write_at(0, &[1; 4096]).unwrap();
            disk.file().sync().unwrap();
            disk.file().write_at(8192, &[2; 4096]).unwrap();
            disk.restart(Crash::Power(128));
            let mut block = [0; 4096];
            disk.file().read_at(0, &mut block).unwrap();
            assert_eq!(block, [1; 4096]);
            disk.file().read_at(8192, &mut block).unwrap();
            match block.iter().filter(|byte| **byte == 2).count() {
                0 => lost += 1,
                4096 => kept += 1,
                _ => torn += 1,
            }
        }
        assert!(torn > 40, "{lost} {kept} {torn}");
        let disk = Disk::new(0, 1 << 16);
        disk.file().write_at(8192, &[2; 4096]).unwrap();
        disk.restart(Crash::Kill);
        assert_eq!(disk.file().next_data(0).unwrap(), ByteRange::new(8192, 12288));
        disk.restart(Crash::Power(0));
        let mut block = [0; 4096];
        disk.file().read_at(8192, &mut block).unwrap();
        assert!(block != [2; 4096], "never synced");
    }
}
