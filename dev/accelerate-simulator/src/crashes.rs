//! Power failures at each write of some operations, in turn.

use burgeon_accelerate::{Mode, Trust, policy::PolicyKind};
use testkit::Rng;

use super::{
    disk::SECTOR,
    run::{LEN_MAX, Report, World},
};

/// Runs some operations again and again, and lets the power fail within each write that they make,
/// in turn; then everything is read. Returns the number of failures.
pub fn crash_at_every_write(seed: u64) -> Result<u64, String> {
    for at in 0.. {
        let mut world = World::new(seed)?;
        world.power.fail_after(Some(at));
        world.operate()?;
        if !world.power.is_off() {
            return Ok(at);
        }
        world.compare_after_power_failure().map_err(|e| format!("seed {seed}, write {at}: {e}"))?;
    }
    Ok(0)
}

/// Runs some operations again and again, and lets the process die within each write that they make,
/// in turn; its write lands before or after the next process starts. Then everything is read, by
/// this process and the next ones. Returns the number of deaths.
pub fn die_at_every_write(seed: u64) -> Result<u64, String> {
    for at in 0.. {
        let mut world = World::new(seed)?;
        world.choose(Mode::WriteBack, PolicyKind::Clock);
        world.power.die_after(at);
        world.operate()?;
        if !world.power.is_off() {
            return Ok(at);
        }
        let compared = world.compare_after_death();
        compared.map_err(|e| format!("seed {seed}, write {at}: {e}"))?;
    }
    Ok(0)
}

/// Caches blocks, writes them round the cache, through it or to the log, and lets the power fail
/// within each write of the tidying or the writing back that follows.
pub fn crash_while_tidying(seed: u64) -> Result<(), String> {
    let mode = Mode::ALL[seed as usize % 3].0;
    for at in 0..16 {
        let mut world = World::new(seed)?;
        let mut rng = Rng::new(seed);
        let first = rng.below(64) as usize * 8;
        world.choose(mode, PolicyKind::Clock);
        for part in 0..4 {
            world.read_at(0, first + part * LEN_MAX as usize, LEN_MAX as usize)?;
        }
        world.tidy(0);
        for part in 0..4 {
            let start = first + part * LEN_MAX as usize + 8 * rng.below(2) as usize;
            world.write_at(0, start, 8 * (1 + rng.below(3) as usize), false);
        }
        world.power.fail_after(Some(at));
        match mode {
            Mode::WriteBack => world.write_back_all(),
            Mode::WriteAround | Mode::WriteThrough => world.tidy(0),
        }
        if !world.power.is_off() {
            // It may fail a little later, too.
            world.power.fail_after(Some(0));
            world.write_at(1, 0, 8, false);
        }
        world.compare_after_power_failure().map_err(|e| format!("seed {seed}, write {at}: {e}"))?;
    }
    Ok(())
}

/// Lets the power fail within each write of a growth of the cache and of the start that follows, in
/// turn; then everything is read. At last the new space is used before it fails. Returns the number
/// of failures within the growth itself, and within all of it.
pub fn crash_while_growing(seed: u64) -> Result<(u64, u64), String> {
    crash_while_changing(seed, World::grow, |report| (report.growths, report.cut_growths))
}

/// The same for a move of the cache to another disk, the writing back before it included.
pub fn crash_while_replacing(seed: u64) -> Result<(u64, u64), String> {
    let counts = |report: &Report| (report.replacements, report.cut_replacements);
    crash_while_changing(seed, World::replace, counts)
}

fn crash_while_changing(
    seed: u64,
    change: fn(&mut World) -> Result<(), String>,
    counts: fn(&Report) -> (u64, u64),
) -> Result<(u64, u64), String> {
    let mut within = 0;
    for at in 0.. {
        let mut world = World::new(seed)?;
        world.choose(Mode::WriteBack, PolicyKind::Clock);
        world.operate()?;
        world.power.fail_after(Some(at));
        change(&mut world)?;
        let is_done = !world.power.is_off();
        if is_done {
            if counts(&world.report).0 == 0 {
                return Err(format!("seed {seed}: nothing was changed"));
            }
            world.power.fail_after(None);
            world.choose(Mode::WriteBack, PolicyKind::Clock);
            (0..4).try_for_each(|_| world.operate())?;
            world.power.fail_after(Some(0));
            world.write_at(1, 0, 8, false);
        }
        world.compare_after_power_failure().map_err(|e| format!("seed {seed}, write {at}: {e}"))?;
        within += counts(&world.report).1;
        if is_done {
            return Ok((within, at));
        }
    }
    Ok((within, 0))
}

impl World {
    /// After a power failure the user vouches for the devices; everything is read, and once more
    /// without the cache.
    fn compare_after_power_failure(&mut self) -> Result<(), String> {
        self.end_process();
        self.power.on_again();
        self.slow.iter().chain([&self.cache]).for_each(|disk| disk.lose_power());
        self.models.iter_mut().for_each(|model| model.lost_power());
        for trust in [Trust::Warm, Trust::Cold] {
            self.start(trust)?;
            for number in 0..2 {
                self.read_all(number)?;
            }
            self.end_process();
        }
        Ok(())
    }

    /// Reads of the next process give the same after a late write of the dead process lands, and
    /// after more deaths.
    fn compare_after_death(&mut self) -> Result<(), String> {
        self.die()?;
        let both = |world: &mut Self| (0..2).try_for_each(|number| world.read_all(number));
        if self.rng.below(2) == 0 {
            both(self)?;
        }
        let mode = self.rng.pick(&Mode::ALL).0;
        self.choose(mode, PolicyKind::Clock);
        for _ in 0..self.rng.below(12) {
            let number = self.rng.below(2) as usize;
            self.write(number);
        }
        self.cache.land();
        both(self)?;
        self.end_process();
        self.start(Trust::Warm)?;
        both(self)?;
        for number in 0..2 {
            self.flush(number)?;
        }
        self.compare_after_power_failure()
    }

    pub(crate) fn write_back_all(&mut self) {
        for device in self.running.iter().flatten() {
            // A failure shows in later requests.
            drop(device.store().write_back_all());
        }
    }

    fn choose(&mut self, mode: Mode, kind: PolicyKind) {
        for device in self.running.iter().flatten() {
            // It stays, if the power is off.
            drop(device.set_mode(mode));
            device.store().set_policy(kind);
        }
    }

    fn read_all(&mut self, number: usize) -> Result<(), String> {
        let sectors = self.models[number].sectors();
        for first in (0..sectors).step_by(128) {
            self.read_at(number, first, (sectors - first).min(128))?;
        }
        Ok(())
    }
}

const _: () = assert!(SECTOR == 512, "a block is 8 sectors");

impl World {
    /// Some operations on either device, until the power fails.
    fn operate(&mut self) -> Result<(), String> {
        for _ in 0..60 {
            let number = self.rng.below(2) as usize;
            match self.rng.below(10) {
                0..3 => self.read(number)?,
                3..7 => self.write(number),
                7 => self.flush(number)?,
                _ => self.tidy(number),
            }
            if self.power.is_off() {
                break;
            }
        }
        Ok(())
    }
}
