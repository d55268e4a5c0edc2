//! A cached device at rest: flushes, tidying, comparing.

use std::ops::Range;

use burgeon_block::{BLOCK_SIZE, Error, ErrorKind, LocalFile, Result};

use crate::{
    backing::SlowDevice,
    counters::{Count, Counts},
    device::CachedDevice,
    locks::BlockRange,
    marks::Idle,
    mode::Mode,
    sets::Slot,
};

impl<C: LocalFile, S: SlowDevice + 'static> CachedDevice<C, S> {
    /// Makes every change durable that returned before.
    pub fn flush(&self) -> Result<()> {
        self.counts.add(Count::Flushes, 1);
        self.backing.check()?;
        let is_gone =
            || self.is_dirty() || self.store.refuse_gone(self.name(), 0, u64::MAX).is_err();
        if self.store.has_failed() && is_gone() {
            let what = format!("{} has dirty blocks, and its cache device has failed", self.name());
            let error = Error::new(ErrorKind::LocalIo, what);
            self.backing.note_lost(&error);
            return Err(error);
        }
        self.store.barrier()?;
        // In write-back, the log is all that most flushes are about.
        if self.mode() == Mode::WriteBack && !self.backing.pending.is_any() {
            return self.backing.check();
        }
        self.backing.sync()
    }

    /// Dirty blocks in the log, also those that are on the slow device already.
    pub fn dirty(&self) -> u64 {
        self.store.log.as_ref().map_or(0, |log| log.count(Some(self.number)))
    }

    /// True if there are any.
    pub fn is_dirty(&self) -> bool {
        let log = self.store.log.as_ref();
        log.is_some_and(|log| log.first_in(self.key(0), u64::MAX).is_some())
    }

    /// True if it has no dirty blocks, and gets none before its mode is write-back.
    pub fn is_settled(&self) -> bool {
        // A write that has chosen the log before the first look shows at one of the next two.
        let is_clean = || !self.is_dirty();
        self.mode() != Mode::WriteBack && is_clean() && self.logging.in_flight() == 0 && is_clean()
    }

    /// Seconds since the oldest of the cache's dirty blocks may have been written, by the clock of
    /// the writing back.
    pub fn dirty_seconds(&self, now: u64) -> Option<u64> {
        let log = self.store.log.as_ref().filter(|_| self.is_dirty())?;
        log.oldest_birth().map(|born| now.saturating_sub(born))
    }

    /// Compares the blocks of this device in `slots` with the slow device; returns how many there
    /// are, and how many differ. Those are dropped.
    pub fn compare(&self, slots: Range<Slot>) -> Result<(u64, u64)> {
        let (mut compared, mut wrong) = (0, 0);
        let (mut cached, mut slow) = (self.store.pages(BLOCK_SIZE)?, self.store.pages(BLOCK_SIZE)?);
        for slot in slots {
            let Some(key) = self.store.sets().key_of(slot).filter(|k| k.device == self.number)
            else {
                continue;
            };
            let _locked = self.lock(key.block * BLOCK_SIZE, BLOCK_SIZE);
            // The slow device does not have a dirty block yet.
            let is_dirty = self.store.log.as_ref().is_some_and(|log| log.find(key).is_some());
            if is_dirty || self.store.get(key, cached.bytes_mut(), &Counts::default()).is_none() {
                continue;
            }
            self.slow.read_at(key.block * BLOCK_SIZE, slow.bytes_mut())?;
            // A cache that was given up keeps blocks that are written round it.
            if self.store.has_failed() {
                break;
            }
            compared += 1;
            if slow.bytes() != cached.bytes() {
                wrong += 1;
                let forgotten = self.store.forget(key);
                forgotten.into_iter().for_each(|slot| self.store.release(slot));
            }
        }
        Ok((compared, wrong))
    }

    /// Reads the samples again that lose their marks, which is durable when this returns.
    fn refresh_identity(&self, idle: &[Idle]) -> Result<()> {
        let identity = &self.backing.identity;
        if self.is_settled() {
            identity.leave();
        }
        if !identity.is_kept() {
            return Ok(());
        }
        let cleared = |region: u32| idle.binary_search_by_key(&region, Idle::region).is_ok();
        identity.refresh(&self.samples(&cleared), cleared);
        self.store.put_identity(self.number, identity)
    }

    /// Changes what becomes of writes; those in work end as they began. Dirty blocks stay so until
    /// they are written back. An error if write-back cannot begin; then the mode stays.
    pub fn set_mode(&self, mode: Mode) -> Result<()> {
        if mode == Mode::WriteBack && !self.store.has_failed() {
            let _turn = self.store.locks.lock(self.tidying());
            if !self.backing.identity.is_kept() {
                let samples = self.samples(&|_| false);
                self.store.take_identity(self.number, &self.backing.identity, &samples)?;
            }
            self.put_mode(mode);
        } else {
            self.put_mode(mode);
        }
        Ok(())
    }

    /// The range of the locks that stands for tidying this device.
    fn tidying(&self) -> BlockRange {
        let first = 2 + u64::from(self.number);
        BlockRange { device: u8::MAX, first, end: first + 1 }
    }

    /// Has the counters of all attached devices take what was written beside their blocks; what no
    /// block caused is this device's.
    fn charge_overhead(&self) {
        self.store.overhead.divide(self.number);
        for (at, backing) in self.store.backings().iter().enumerate() {
            let Some(backing) = backing else { continue };
            backing.counts.add(Count::CacheMetaBytes, self.store.overhead.take(at));
        }
    }

    /// Clears the marks of regions that are idle, after making the slow device and the index
    /// durable; stores the counters.
    pub fn tidy(&self) -> Result<()> {
        if self.store.has_failed() {
            return Ok(());
        }
        self.backing.check()?;
        let _turn = self.store.locks.lock(self.tidying());
        let idle = self.marks.idle();
        if !idle.is_empty() {
            self.backing.sync()?;
        }
        let stored = self.refresh_identity(&idle);
        let stored = stored.and_then(|()| self.store.store_index()).and_then(|()| {
            self.marks.clear(&idle, &self.bitmaps())?;
            self.charge_overhead();
            let counters = self.counts.all().map(Into::into);
            self.store.change_record(self.number, |record| record.counters = counters)
        });
        stored.or_else(|error| {
            self.counts.add(Count::CacheErrors, 1);
            self.store.give_up(&error)
        })
    }
}
