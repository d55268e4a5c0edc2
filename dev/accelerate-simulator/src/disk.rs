//! A disk with a volatile cache.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use burgeon_accelerate::SlowDevice;
use burgeon_block::{ByteRange, Erase, Error, ErrorKind, LocalFile, Result};
use testkit::Rng;

pub(crate) const SECTOR: usize = 512;
/// Bytes of the identities, behind the log.
const IDENTITIES: usize = 32 * 4096;

/// Power that several disks share: it may fail within the write of a number.
#[derive(Clone, Default)]
pub(crate) struct Power(Arc<Mutex<PowerState>>);

#[derive(Default)]
struct PowerState {
    off: bool,
    /// It is not the power but the process that ends within the write.
    only_process: bool,
    writes: u64,
    fails_at: Option<u64>,
}

impl Power {
    fn state(&self) -> MutexGuard<'_, PowerState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The power fails within the write that comes after `writes` more.
    pub(crate) fn fail_after(&self, writes: Option<u64>) {
        let mut state = self.state();
        state.fails_at = writes.map(|writes| state.writes + writes);
        state.only_process = false;
    }

    /// The process dies within the write that comes after `writes` more.
    pub(crate) fn die_after(&self, writes: u64) {
        self.fail_after(Some(writes));
        self.state().only_process = true;
    }

    /// True if the process died, and the power did not fail.
    pub(crate) fn has_died(&self) -> bool {
        let state = self.state();
        state.off && state.only_process
    }

    pub(crate) fn is_off(&self) -> bool {
        self.state().off
    }

    pub(crate) fn on_again(&self) {
        *self.state() = PowerState::default();
    }

    pub(crate) fn writes(&self) -> u64 {
        self.state().writes
    }

    /// Counts a write or sync; true if the power fails within it.
    fn fails_now(&self) -> bool {
        let mut state = self.state();
        state.writes += 1;
        state.off |= state.fails_at.is_some_and(|at| state.writes > at);
        state.off
    }
}

/// Faults while the machine runs: chances of 256.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub(crate) struct Faults {
    pub(crate) read: u8,
    pub(crate) write: u8,
    pub(crate) sync: u8,
    /// Says that it synced, and did not.
    pub(crate) lies: bool,
    /// Every request fails.
    pub(crate) dead: bool,
    pub(crate) full: bool,
}

/// A simulated disk; clones are the same disk.
#[derive(Clone)]
pub(crate) struct Disk(Arc<Mutex<State>>);

struct State {
    rng: Rng,
    power: Power,
    now: Vec<u8>,
    durable: Vec<u8>,
    /// Sectors written since the last sync.
    unsynced: Vec<usize>,
    faults: Faults,
    /// Writes to these bytes may land after the death of the process that made them.
    late_range: std::ops::Range<usize>,
    /// Such a write.
    late: Option<(usize, Vec<u8>)>,
    /// Errors given since the start of the machine.
    errors: u64,
}

impl Disk {
    pub(crate) fn new(seed: u64, len: usize, power: &Power) -> Self {
        Self(Arc::new(Mutex::new(State {
            rng: Rng::new(seed),
            power: power.clone(),
            now: vec![0; len],
            durable: vec![0; len],
            unsynced: Vec::new(),
            faults: Faults::default(),
            late_range: 0..0,
            late: None,
            errors: 0,
        })))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn set_faults(&self, faults: Faults) {
        self.state().faults = faults;
    }

    /// True if it may fail requests, or has.
    pub(crate) fn is_faulty(&self) -> bool {
        let state = self.state();
        state.errors > 0 || state.faults != Faults::default()
    }

    /// Loses what was not synced, for the most part.
    pub(crate) fn lose_power(&self) {
        let mut state = self.state();
        let State { rng, now, durable, unsynced, .. } = &mut *state;
        let chance = rng.below(257);
        for sector in unsynced.drain(..) {
            let range = sector * SECTOR..(sector + 1) * SECTOR;
            if rng.below(256) < chance {
                durable[range.clone()].copy_from_slice(&now[range]);
            }
        }
        now.clone_from(durable);
        state.late = None;
        state.restart();
    }

    /// Writes to these bytes may land late.
    pub(crate) fn set_late_range(&self, range: std::ops::Range<usize>) {
        self.state().late_range = range;
    }

    /// The write of a dead process lands, if there is one.
    pub(crate) fn land(&self) {
        let mut state = self.state();
        if let Some((offset, bytes)) = state.late.take() {
            state.put(offset, &bytes, true);
        }
    }

    /// Flips a bit of the first `len` bytes, behind the first blocks, and behind those that may not
    /// be lost: the log, and the identities, whose second copies may not be durable yet
    /// (`crates/accelerate/tests/identities.rs` has their rot).
    pub(crate) fn rot(&self, len: usize) {
        let mut state = self.state();
        let bytes = len as u64;
        let kept = if state.late_range.is_empty() { 0 } else { state.late_range.end + IDENTITIES };
        let first = (bytes / 4).max(kept as u64);
        let at = (first + state.rng.below(bytes - first)) as usize;
        state.now[at] ^= 1;
        state.durable[at] ^= 1;
    }

    /// A new life of the machine or the process, without faults.
    pub(crate) fn restart(&self) {
        self.state().restart();
    }

    /// The bytes of a sector, as another program reads them.
    pub(crate) fn sector(&self, sector: usize) -> [u8; SECTOR] {
        let state = self.state();
        std::array::from_fn(|at| state.now[sector * SECTOR + at])
    }

    /// Writes a sector as another program would: durably.
    pub(crate) fn put_sector(&self, sector: usize, bytes: &[u8]) {
        let mut state = self.state();
        let range = sector * SECTOR..(sector + 1) * SECTOR;
        state.now[range.clone()].copy_from_slice(bytes);
        state.durable[range].copy_from_slice(bytes);
    }
}

impl State {
    fn restart(&mut self) {
        self.faults = Faults::default();
        self.errors = 0;
    }

    fn fails(&mut self, chance: u8, what: &str) -> Result<()> {
        if self.power.is_off() {
            return Err(Error::new(ErrorKind::LocalIo, "simulated: the power is off"));
        }
        if self.faults.dead || (chance > 0 && self.rng.below(256) < u64::from(chance)) {
            self.errors += 1;
            return Err(Error::new(ErrorKind::LocalIo, format!("simulated: {what} fails")));
        }
        Ok(())
    }

    fn put(&mut self, offset: usize, bytes: &[u8], all: bool) {
        for (index, sector) in bytes.chunks(SECTOR).enumerate() {
            if all || self.rng.below(2) == 0 {
                let at = offset + index * SECTOR;
                self.now[at..at + sector.len()].copy_from_slice(sector);
                self.unsynced.push(at / SECTOR);
            }
        }
    }

    fn write(&mut self, offset: usize, bytes: &[u8]) -> Result<()> {
        let chance = self.faults.write;
        if !self.power.is_off() && self.power.fails_now() {
            if self.power.has_died() && self.late_range.contains(&offset) {
                self.late = Some((offset, bytes.to_vec()));
            } else {
                let all = self.power.has_died() && self.rng.below(2) == 0;
                self.put(offset, bytes, all);
            }
        }
        if let Err(error) = self.fails(chance, "a write") {
            if !self.power.is_off() && !self.faults.dead {
                // A write may be made, and fail all the same.
                let all = self.rng.below(4) == 0;
                self.put(offset, bytes, all);
            }
            return Err(error);
        }
        if self.faults.full {
            self.errors += 1;
            return Err(Error::new(ErrorKind::NoSpace, "simulated: the disk is full"));
        }
        self.put(offset, bytes, true);
        Ok(())
    }
}

impl LocalFile for Disk {
    fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<()> {
        let mut state = self.state();
        let chance = state.faults.read;
        state.fails(chance, "a read")?;
        let at = offset as usize;
        buf.copy_from_slice(&state.now[at..at + buf.len()]);
        Ok(())
    }

    fn write_at(&self, offset: u64, buf: &[u8]) -> Result<()> {
        self.state().write(offset as usize, buf)
    }

    fn sync(&self) -> Result<()> {
        let mut state = self.state();
        let chance = state.faults.sync;
        if !state.power.is_off() {
            state.power.fails_now();
        }
        state.fails(chance, "a sync")?;
        if !state.faults.lies {
            let State { now, durable, unsynced, .. } = &mut *state;
            for sector in unsynced.drain(..) {
                let range = sector * SECTOR..(sector + 1) * SECTOR;
                durable[range.clone()].copy_from_slice(&now[range]);
            }
        }
        Ok(())
    }
}

impl SlowDevice for Disk {
    fn size(&self) -> u64 {
        self.state().now.len() as u64
    }

    fn erase(&self, range: ByteRange, how: Erase) -> Result<()> {
        let mut state = self.state();
        // A discard of an odd sector is ignored.
        if how == Erase::Discard && !(range.start() / SECTOR as u64).is_multiple_of(2) {
            return state.fails(0, "a discard");
        }
        state.write(range.start() as usize, &vec![0; range.len() as usize])
    }
}

#[cfg(test)]
mod tests {
    use burgeon_block::LocalFile;

    use super::{Disk, Power};

    #[test]
    fn synced_bytes_survive_and_the_rest_may_not() {
        let mut outcomes = std::collections::BTreeSet::new();
        for seed in 0..50 {
            let power = Power::default();
            let disk = Disk::new(seed, 8192, &power);
            disk.write_at(0, &[1; 4096]).unwrap();
            disk.sync().unwrap();
            disk.write_at(0, &[2; 4096]).unwrap();
            disk.lose_power();
            let mut bytes = [0; 4096];
            disk.read_at(0, &mut bytes).unwrap();
            assert!(bytes.iter().all(|byte| [1, 2].contains(byte)));
            outcomes.insert((bytes.contains(&1), bytes.contains(&2)));
        }
        assert_eq!(outcomes.len(), 3, "{outcomes:?}");
    }
}
