//! Changes of the cache that need it to be served by nobody, as `burgeon-accelerator` makes them.

use burgeon_accelerate::{Trust, create_for, destroy, dirty_in, grow, read_super};
use burgeon_block::ErrorKind;

use super::run::{CACHE_LEN, DEVICE_LEN, World, new_cache};

impl World {
    /// Makes a change, within which the power fails at times.
    pub(crate) fn change(
        &mut self,
        change: fn(&mut Self) -> Result<(), String>,
    ) -> Result<(), String> {
        if self.rng.below(2) == 0 {
            self.power.fail_after(Some(self.rng.below(8)));
        }
        change(self)?;
        self.power.fail_after(None);
        Ok(())
    }

    /// The process ends, the cache takes more of its device, and the next process starts.
    pub(crate) fn grow(&mut self) -> Result<(), String> {
        self.end_process();
        self.restart_disks();
        let Ok(head) = read_super(&self.cache, DEVICE_LEN as u64) else {
            return self.unless_off("the cache cannot be read");
        };
        match grow(&self.cache, (head.layout.size + CACHE_LEN as u64).min(DEVICE_LEN as u64)) {
            Ok(()) => self.report.growths += 1,
            Err(_) if self.power.is_off() => {
                self.report.cut_growths += 1;
                return Ok(());
            }
            // It has the whole device.
            Err(error) if error.kind() == ErrorKind::Invalid && self.is_full() => {}
            Err(error) => return Err(format!("the cache cannot grow: {error}")),
        }
        self.start(Trust::Warm)
    }

    fn is_full(&self) -> bool {
        let head = read_super(&self.cache, DEVICE_LEN as u64);
        head.is_ok_and(|head| head.layout.size == DEVICE_LEN as u64)
    }

    /// The dirty blocks are written back, the process ends, the cache moves to another disk, and
    /// the next process starts.
    pub(crate) fn replace(&mut self) -> Result<(), String> {
        self.write_back_all();
        self.end_process();
        self.restart_disks();
        let size = DEVICE_LEN as u64;
        let (Ok(former), Ok(dirty)) = (read_super(&self.cache, size), dirty_in(&self.cache, size))
        else {
            return self.unless_off("the cache cannot be read");
        };
        if !dirty.is_empty() {
            // A device that failed has kept them.
            return self.start(Trust::Warm);
        }
        let (new, layout) = new_cache(self.rng.bits(), self.logged, &self.power)?;
        let id = (former.id[0] + 1) % 250;
        if let Err(error) = create_for(&new, layout, [id; 16], Some(&former)) {
            self.report.cut_replacements += 1;
            // The former one is still named.
            return self.unless_off(&format!("the cache cannot move: {error}"));
        }
        // Its failure leaves a cache that nobody names.
        let _ = destroy(&self.cache);
        (self.cache, self.lied) = (new, false);
        self.report.replacements += 1;
        if self.power.is_off() {
            self.report.cut_replacements += 1;
            return Ok(());
        }
        self.start(Trust::Cold)
    }

    fn unless_off(&self, error: &str) -> Result<(), String> {
        if self.power.is_off() { Ok(()) } else { Err(error.to_owned()) }
    }
}
