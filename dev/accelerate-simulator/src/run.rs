//! One run of the simulated machine.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering::SeqCst},
};

use burgeon_accelerate::{
    CacheStore, CachedDevice, Cells, Counts, DeviceOptions, Dirty, DirtyLimits, Mode, Trust,
    create_with,
    format::{LOG_MIN, Layout},
    policy::PolicyKind,
};
use burgeon_block::{BLOCK_SIZE, ByteRange, Erase, Error, ErrorKind};
use testkit::Rng;

use super::{
    disk::{Disk, Faults, Power, SECTOR},
    model::{Model, bytes_of},
};

/// Of the cache when it is made, and of its device.
pub(crate) const CACHE_LEN: usize = 1 << 20;
pub(crate) const DEVICE_LEN: usize = 3 * CACHE_LEN;
/// Two slow devices; the second ends within a block.
const SLOW_LENS: [usize; 2] = [3 << 20, (2 << 20) + 5 * SECTOR];
const NAMES: [&str; 2] = ["first", "second"];
/// Sectors of the longest request.
pub(crate) const LEN_MAX: u64 = 40;

/// The events of a run, counted.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub struct Report {
    /// Operations on the devices.
    pub operations: u64,
    /// Power failures.
    pub power_failures: u64,
    /// Deaths of the process.
    pub kills: u64,
    /// Clean stops.
    pub stops: u64,
    /// Starts that kept the content.
    pub warm: u64,
    /// Bytes that came from the cache device.
    pub hit_bytes: u64,
    /// Deaths of the cache device while it was served.
    pub dead_caches: u64,
    /// Writes of all disks.
    pub writes: u64,
    /// Dirty blocks that a process left to the next one.
    pub inherited: u64,
    /// Writes of dead processes that came after their death.
    pub late: u64,
    /// Growths of the cache.
    pub growths: u64,
    /// Growths within which the power failed.
    pub cut_growths: u64,
    /// Moves of the cache to another disk.
    pub replacements: u64,
    /// Moves within which the power failed.
    pub cut_replacements: u64,
}

/// Memory of counters that outlives the process.
#[derive(Default)]
struct SharedCells(Cells);

impl AsRef<Cells> for SharedCells {
    fn as_ref(&self) -> &Cells {
        &self.0
    }
}

/// The machine.
pub(crate) struct World {
    pub(crate) rng: Rng,
    pub(crate) power: Power,
    pub(crate) cache: Disk,
    pub(crate) slow: [Disk; 2],
    pub(crate) models: [Model; 2],
    version: u64,
    /// The record of `Distrust`.
    distrusted: Arc<AtomicBool>,
    /// The cache has a log. Then nothing is promised over a cache device that lies.
    pub(crate) logged: bool,
    /// Seconds.
    clock: u64,
    /// The cache device has lied since it was opened cold.
    pub(crate) lied: bool,
    /// Another program has written, and no start since has dropped the content: nobody vouches.
    has_foreign: bool,
    pub(crate) running: Option<[CachedDevice<Disk, Disk>; 2]>,
    /// Counters of the devices, which the supervisor holds.
    cells: [Arc<SharedCells>; 2],
    /// A flush of the device has failed in this life of the supervisor.
    failed: [bool; 2],
    pub(crate) report: Report,
}

/// A disk for a cache, and the layout of that.
pub(crate) fn new_cache(seed: u64, logged: bool, power: &Power) -> Result<(Disk, Layout), String> {
    let disk = Disk::new(seed, DEVICE_LEN, power);
    let layout = Layout::with_log(CACHE_LEN as u64, if logged { LOG_MIN } else { 0 });
    let layout = layout.map_err(|e| e.to_string())?;
    if logged {
        let first = (2 + layout.bitmap_blocks as usize) * BLOCK_SIZE as usize;
        disk.set_late_range(first..first + LOG_MIN as usize * BLOCK_SIZE as usize);
    }
    Ok((disk, layout))
}

impl World {
    /// A machine whose cache has a log if `seed` is odd.
    pub(crate) fn new(seed: u64) -> Result<Self, String> {
        let mut rng = Rng::new(seed);
        let power = Power::default();
        let logged = seed % 2 == 1;
        let (cache, layout) = new_cache(rng.bits(), logged, &power)?;
        let slow = SLOW_LENS.map(|len| Disk::new(rng.bits(), len, &power));
        create_with(&cache, layout, [3; 16]).map_err(|e| e.to_string())?;
        let mut world = Self {
            rng,
            power,
            cache,
            slow,
            models: SLOW_LENS.map(|len| Model::new(len / SECTOR)),
            version: 0,
            distrusted: Arc::default(),
            logged,
            clock: 0,
            lied: false,
            has_foreign: false,
            running: None,
            cells: Default::default(),
            failed: [false; 2],
            report: Report::default(),
        };
        world.start(Trust::Cold)?;
        Ok(world)
    }

    /// Starts the process. `Warm` only if nothing speaks against it.
    pub(crate) fn start(&mut self, trust: Trust) -> Result<(), String> {
        let cold = trust == Trust::Cold || self.has_foreign || self.distrusted.load(SeqCst);
        let trust = if cold { Trust::Cold } else { Trust::Warm };
        let (witness, power) = (self.distrusted.clone(), self.power.clone());
        let distrust = Box::new(move |_: &[Dirty]| {
            if power.is_off() {
                return Err(Error::new(ErrorKind::LocalIo, "simulated: the power is off"));
            }
            witness.store(true, SeqCst);
            Ok(())
        });
        let (kind, _) = *self.rng.pick(&PolicyKind::ALL);
        let store = CacheStore::open(self.cache.clone(), DEVICE_LEN as u64, trust, kind, distrust);
        // The supervisor goes on with a device in use, whatever has become of the cache device.
        let is_in_use = self.cache.is_faulty();
        let store = match store {
            Ok(store) => Arc::new(store),
            Err(_) if self.power.is_off() => return Ok(()),
            Err(_) if is_in_use && self.logged => {
                // Dirty blocks are not gone round: the device waits for its cache.
                self.cache.restart();
                return self.start(trust);
            }
            Err(_) if is_in_use => {
                self.distrusted.store(true, SeqCst);
                Arc::new(
                    CacheStore::failed(self.cache.clone(), Vec::new())
                        .map_err(|e| e.to_string())?,
                )
            }
            Err(error) => return Err(format!("cannot open the cache: {error}")),
        };
        let mut devices = Vec::new();
        for ((slow, name), cells) in self.slow.iter().zip(NAMES).zip(&self.cells) {
            let (mode, _) = *self.rng.pick(&Mode::ALL);
            let is_changed = self.distrusted.load(SeqCst);
            let options = DeviceOptions {
                cutoff: 48 << 10,
                is_in_use,
                is_changed,
                ..DeviceOptions::new(mode)
            };
            match CachedDevice::attach(store.clone(), slow.clone(), name, trust, options) {
                Ok(device) => devices.push(device.count_in(Counts::shared(cells.clone()))),
                Err(_) if self.power.is_off() => return Ok(()),
                Err(error) => return Err(format!("cannot attach {name}: {error}")),
            }
        }
        // Only now the content is as cold as it has to be.
        if !store.has_failed() {
            self.distrusted.store(false, SeqCst);
            self.lied &= trust == Trust::Warm;
            self.has_foreign &= trust == Trust::Warm;
        }
        self.report.warm += u64::from(trust == Trust::Warm);
        self.running = devices.try_into().ok();
        Ok(())
    }

    /// The supervisor ends, with the memory of the counters.
    fn end_supervisor(&mut self) {
        self.failed = [false; 2];
        self.cells = Default::default();
    }

    pub(crate) fn end_process(&mut self) {
        for device in self.running.take().iter().flatten() {
            use burgeon_accelerate::Count;
            self.report.hit_bytes += device.counts().get(Count::CacheHitBytes);
            self.report.dead_caches += u64::from(device.store().has_failed());
            self.report.inherited += device.dirty();
        }
    }

    /// One step.
    fn step(&mut self) -> Result<(), String> {
        let number = self.rng.below(2) as usize;
        match self.rng.below(203) {
            0..90 => self.read(number)?,
            90..150 => self.write(number),
            150..158 => self.erase(number),
            158..170 => self.flush(number)?,
            170..178 => {
                let in_between = self.rng.below(2) == 0;
                if in_between {
                    self.power.fail_after(Some(self.rng.below(7)));
                }
                self.tidy(number);
                if in_between {
                    self.power.fail_after(None);
                }
            }
            178..181 => {
                if let Some(devices) = &self.running {
                    // It stays, if the device cannot be read.
                    drop(devices[number].set_mode(self.rng.pick(&Mode::ALL).0));
                    devices[number].store().set_policy(self.rng.pick(&PolicyKind::ALL).0);
                }
            }
            181..184 => self.change_faults(number),
            184..188 => self.kill()?,
            188..191 => self.stop()?,
            191..195 => self.cut_the_power()?,
            195..197 => self.cache.rot(CACHE_LEN),
            197 if self.logged => self.power.die_after(self.rng.below(12)),
            198 if self.logged => {
                self.report.late += 1;
                self.cache.land();
            }
            200 => self.change(Self::grow)?,
            201 => self.change(Self::replace)?,
            _ => {
                self.cache.set_faults(Faults::default());
                self.slow[number].set_faults(Faults::default());
            }
        }
        if self.power.has_died() {
            self.die()?;
        } else if self.power.is_off() {
            self.cut_the_power()?;
        }
        self.report.operations += 1;
        Ok(())
    }

    pub(crate) fn tidy(&mut self, number: usize) {
        self.clock += 5;
        if let Some(devices) = &self.running {
            // A failure shows in later requests.
            if self.rng.below(3) > 0 {
                drop(devices[number].tidy());
            }
            let limits = DirtyLimits {
                percent: self.rng.below(120) as u8,
                seconds: 10 + self.rng.below(100),
            };
            drop(devices[number].store().write_back_due(limits, self.clock));
            if self.rng.below(6) == 0 {
                let blocks = 1 + self.rng.below(20) as usize;
                drop(devices[number].write_back(u64::MAX, blocks));
            }
        }
    }

    /// A range of sectors, often one that came before.
    fn range(&mut self, number: usize) -> (usize, usize) {
        let sectors = self.models[number].sectors() as u64;
        let mut first = match self.rng.below(4) {
            0 => self.rng.below(sectors),
            1 => sectors - 1 - self.rng.below(24),
            _ => self.rng.below(sectors / 5) + self.rng.below(2) * sectors / 2,
        };
        let mut len = 1 + self.rng.below(LEN_MAX);
        if self.rng.below(4) > 0 {
            first -= first % 8;
            len = len.next_multiple_of(8);
        }
        (first as usize, len.min(sectors - first) as usize)
    }

    pub(crate) fn read(&mut self, number: usize) -> Result<(), String> {
        let (first, len) = self.range(number);
        self.read_at(number, first, len)
    }

    pub(crate) fn read_at(
        &mut self,
        number: usize,
        first: usize,
        len: usize,
    ) -> Result<(), String> {
        let Some(devices) = &self.running else { return Ok(()) };
        let device = &devices[number];
        let at = (first * SECTOR) as u64;
        let mut bytes = vec![0; len * SECTOR];
        // As a transport does: from the cache device itself, if the block lies there.
        if bytes.len() as u64 >= BLOCK_SIZE
            && let Some(place) = device.place_of(at)
        {
            use burgeon_block::LocalFile;
            let block = &mut bytes[..BLOCK_SIZE as usize];
            if self.cache.read_at(place.start(), block).is_ok() && device.is_block(at, place, block)
            {
                self.report.hit_bytes += BLOCK_SIZE;
                for (sector, bytes) in (first..).zip(block.chunks(SECTOR)) {
                    self.models[number].read(sector, bytes)?;
                }
            }
        }
        match device.read(at, &mut bytes) {
            Ok(_) => {
                for (sector, bytes) in (first..).zip(bytes.chunks(SECTOR)) {
                    let what = |error| format!("{}: a read: {error}", NAMES[number]);
                    self.models[number].read(sector, bytes).map_err(what)?;
                }
                Ok(())
            }
            Err(error) => self.excuse(number, &format!("a read failed: {error}")),
        }
    }

    /// An error needs a faulty slow device, or no power; or a cache device with dirty blocks.
    fn excuse(&self, number: usize, error: &str) -> Result<(), String> {
        let faulty = self.slow[number].is_faulty() || (self.logged && self.cache.is_faulty());
        if self.power.is_off() || faulty {
            return Ok(());
        }
        Err(format!("{}: {error}", NAMES[number]))
    }

    pub(crate) fn write(&mut self, number: usize) {
        let (first, len) = self.range(number);
        let fua = self.rng.below(8) == 0;
        self.write_at(number, first, len, fua);
    }

    pub(crate) fn write_at(&mut self, number: usize, first: usize, len: usize, fua: bool) {
        let Some(devices) = &self.running else { return };
        self.version += 1;
        let version = self.version;
        let bytes: Vec<u8> = (first..first + len).flat_map(|s| bytes_of(s, version)).collect();
        let done = devices[number].write((first * SECTOR) as u64, &bytes, fua).is_ok();
        for sector in first..first + len {
            self.models[number].written(sector, version, done);
        }
        if fua && done {
            self.models[number].flushed();
        }
    }

    fn erase(&mut self, number: usize) {
        let (first, len) = self.range(number);
        let zeroes = self.rng.below(2) == 0;
        let how = if zeroes { Erase::Zeroes { unmap: false } } else { Erase::Discard };
        let Some(devices) = &self.running else { return };
        let Some(range) = ByteRange::at((first * SECTOR) as u64, (len * SECTOR) as u64) else {
            return;
        };
        let done = devices[number].erase(range, how).is_ok();
        for sector in first..first + len {
            match zeroes {
                true => self.models[number].written(sector, 0, done),
                false => self.models[number].discarded(sector),
            }
        }
    }

    pub(crate) fn flush(&mut self, number: usize) -> Result<(), String> {
        let Some(devices) = &self.running else { return Ok(()) };
        match devices[number].flush() {
            Ok(()) if self.failed[number] => {
                return Err(format!("{}: a flush succeeded after one had failed", NAMES[number]));
            }
            Ok(()) => self.models[number].flushed(),
            Err(_) => self.failed[number] = true,
        }
        Ok(())
    }

    fn change_faults(&mut self, number: usize) {
        let chance = 1 + self.rng.below(64) as u8;
        let mut faults = Faults::default();
        match self.rng.below(7) {
            0 => faults.read = chance,
            1 => faults.write = chance,
            2 => faults.sync = chance,
            3 => faults.lies = true,
            4 => faults.dead = true,
            5 => faults.full = true,
            _ => {}
        }
        if self.rng.below(3) > 0 {
            faults.lies &= !self.logged;
            self.lied |= faults.lies;
            self.cache.set_faults(faults);
        } else {
            // Nothing is promised over a slow device that lies.
            faults.lies = false;
            self.slow[number].set_faults(faults);
        }
    }

    /// The slow devices alone hold all that was written.
    fn compare_slow(&self) -> Result<(), String> {
        if self.logged {
            return Ok(());
        }
        self.compare_all_slow()
    }

    fn compare_all_slow(&self) -> Result<(), String> {
        for (number, (slow, model)) in self.slow.iter().zip(&self.models).enumerate() {
            for sector in 0..model.sectors() {
                let what = |error| format!("{} without the cache: {error}", NAMES[number]);
                model.check(sector, &slow.sector(sector)).map_err(what)?;
            }
        }
        Ok(())
    }

    /// The process dies; the kernel lives on, with the claims on all devices.
    fn kill(&mut self) -> Result<(), String> {
        self.end_process();
        self.report.kills += 1;
        self.compare_slow()?;
        self.restart_disks();
        if self.failed.contains(&true) && self.rng.below(2) == 0 {
            // The user gives the device up, and attaches it anew.
            self.end_supervisor();
            return self.start(Trust::Cold);
        }
        if self.rng.below(4) == 0 {
            // The next server may find that the cache device is partly dead.
            let chance = 1 << self.rng.below(8);
            let dead = self.rng.below(4) == 0;
            self.cache.set_faults(Faults {
                read: 0,
                write: chance,
                sync: chance,
                dead,
                ..Faults::default()
            });
        }
        self.start(Trust::Warm)
    }

    /// The process has died within a write, which may land later.
    pub(crate) fn die(&mut self) -> Result<(), String> {
        self.end_process();
        self.power.on_again();
        self.report.kills += 1;
        self.restart_disks();
        if self.rng.below(3) == 0 {
            self.report.late += 1;
            self.cache.land();
        }
        self.start(Trust::Warm)
    }

    /// The process ends in order; then perhaps another program writes.
    fn stop(&mut self) -> Result<(), String> {
        let mut is_clean = true;
        for device in self.running.iter().flatten() {
            drop(device.tidy());
            is_clean &= device.store().write_back_all().is_ok() && device.dirty() == 0;
        }
        self.end_process();
        if self.power.is_off() {
            return Ok(());
        }
        if !is_clean {
            if !self.logged {
                return Err("dirty blocks without a log".to_owned());
            }
            self.restart_disks();
            return self.start(Trust::Warm);
        }
        self.report.stops += 1;
        self.compare_all_slow()?;
        self.restart_disks();
        if self.rng.below(2) == 0 {
            return self.start(Trust::Warm);
        }
        self.end_supervisor();
        self.has_foreign = true;
        for _ in 0..20 {
            let number = self.rng.below(2) as usize;
            let (first, _) = self.range(number);
            self.version += 1;
            self.slow[number].put_sector(first, &bytes_of(first, self.version));
            self.models[number].overwritten(first, self.version);
        }
        self.start(Trust::Cold)
    }

    pub(crate) fn restart_disks(&mut self) {
        self.cache.restart();
        self.slow.iter().for_each(Disk::restart);
    }

    fn cut_the_power(&mut self) -> Result<(), String> {
        self.end_process();
        self.end_supervisor();
        self.report.power_failures += 1;
        self.report.writes += self.power.writes();
        self.power.on_again();
        for disk in self.slow.iter().chain([&self.cache]) {
            disk.lose_power();
        }
        self.models.iter_mut().for_each(Model::lost_power);
        self.compare_slow()?;
        // The user may vouch for the devices, if the cache device has told the truth.
        let vouches = !self.lied && self.rng.below(2) == 0;
        if self.rng.below(4) == 0 {
            self.power.fail_after(Some(self.rng.below(200)));
        }
        self.start(if vouches { Trust::Warm } else { Trust::Cold })
    }
}

/// Runs 400 operations by `seed`. The error tells which promise was broken.
pub fn simulate(seed: u64) -> Result<Report, String> {
    let mut world = World::new(seed).map_err(|error| format!("seed {seed}: {error}"))?;
    for step in 0..400 {
        world.step().map_err(|error| format!("seed {seed}, step {step}: {error}"))?;
    }
    world.stop().map_err(|error| format!("seed {seed}, at the end: {error}"))?;
    world.report.writes += world.power.writes();
    Ok(world.report)
}
