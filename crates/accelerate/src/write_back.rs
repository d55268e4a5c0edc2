//! Writes dirty blocks to their slow devices, and frees the log.
//!
//! ```text
//!   the oldest segments ─► log durable ─► their versions by address, adjoining blocks in one write
//!        ─► slow sync of each device ─► index and log durable ─► tail past them, durable ─► free
//! ```
//!
//! The index comes before the tail: it says that the slots of these blocks hold nothing older. From
//! then on, nothing else hides such a slot. The log is durable before the tail: the versions that
//! have replaced some of these may be volatile until then.
//!
//! It holds no lock of a block: until its segment is free, a block is changed on the slow device by
//! this alone. One thread at a time does it.
//!
//! Invariant: after any error the blocks stay in the log, and are written again.

use std::sync::Arc;

use burgeon_block::{BLOCK_SIZE, Error, ErrorKind, LocalFile, Pages, Result};

use crate::{
    backing::Backing,
    counters::{Count, Counts},
    keys::Key,
    locks::BlockRange,
    log::{DirtyVersion, Heads, Log, Refused, WriteBackScope},
    store::CacheStore,
    throttle::{AtOnce, Moment, Throttle, Waiting},
};

/// The most blocks of one write to a slow device: 1 MiB.
const RUN_MAX: usize = 256;
/// The range of the locks that stands for writing back.
pub(crate) const TURN: BlockRange = BlockRange { device: u8::MAX, first: 1, end: 2 };
const BLOCK: usize = BLOCK_SIZE as usize;

/// When dirty blocks are written back.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DirtyLimits {
    /// Percentage of the log from which on it is written back.
    pub percent: u8,
    /// Age in seconds from which on a block is written back.
    pub seconds: u64,
}

impl Default for DirtyLimits {
    fn default() -> Self {
        Self { percent: 50, seconds: 30 }
    }
}

impl<C: LocalFile> Heads for CacheStore<C> {
    fn open_segment(&self, segment: u32) -> Result<()> {
        self.store_head(|head| head.log.open = Some(segment))
    }

    fn begin_generation(&self, generation: u64, first: u64) -> Result<()> {
        self.store_head(|head| head.log.begin(generation, first))
    }

    fn note_overhead(&self, bytes: u64) {
        self.note_overhead(bytes);
    }
}

impl<C: LocalFile> CacheStore<C> {
    /// Dirty blocks in the log, also those that are on their slow device already; and the
    /// percentage of the log that is in use.
    pub fn dirty(&self) -> (u64, u8) {
        let Some(log) = &self.log else { return (0, 0) };
        let (taken, all) = log.fill();
        (log.count(None), (taken * 100 / all.max(1)) as u8)
    }

    /// The log; `None` if the cache has none, or has failed.
    pub(crate) fn usable_log(&self) -> Option<&Log> {
        self.log.as_ref().filter(|_| !self.has_failed())
    }

    /// Reads the dirty version of a block, for the holder of its lock; false if there is none.
    /// `Corrupt` if it is lost.
    pub(crate) fn get_dirty(&self, key: Key, bytes: &mut [u8], counts: &Counts) -> Result<bool> {
        let Some(log) = &self.log else { return Ok(false) };
        while let Some(entry) = log.find(key) {
            if self.has_failed() {
                return Err(lost(self.name_of(key), key, "the cache device has failed"));
            }
            match log.read(&self.file, key, entry, bytes) {
                Ok(true) => {
                    counts.add(Count::CacheHitBytes, BLOCK_SIZE);
                    return Ok(true);
                }
                // Nobody writes it meanwhile, so it is there, or its segment was retired.
                _ if log.find(key) != Some(entry) => {}
                Ok(false) => {
                    counts.add(Count::CorruptBlocks, 1);
                    return Err(lost(self.name_of(key), key, "its copy in the log is damaged"));
                }
                Err(error) => {
                    self.note_error(counts, &error);
                    return Err(error);
                }
            }
        }
        Ok(false)
    }

    pub(crate) fn name_of(&self, key: Key) -> String {
        self.backing(key.device)
            .map_or_else(|| format!("device {}", key.device), |b| b.name.clone())
    }

    fn backing(&self, device: u8) -> Option<Arc<Backing>> {
        self.backings().get(usize::from(device)).cloned().flatten()
    }

    /// Logs blocks whose lock the caller holds, and writes back the oldest ones if there is no
    /// room.
    pub(crate) fn log_blocks(&self, first: Key, bytes: &[u8], counts: &Counts) -> Result<()> {
        let Some(log) = self.usable_log() else {
            return Err(Error::new(ErrorKind::LocalIo, "the cache has no log"));
        };
        let mut key = first;
        for part in bytes.chunks(log.blocks_max() * BLOCK) {
            loop {
                let mut pages = self.pages(part.len() as u64)?;
                pages.bytes_mut().copy_from_slice(part);
                match log.append(&self.file, self, key, pages) {
                    Ok(()) => break,
                    Err(Refused::Full) => {
                        let _waiting = Waiting::new(&self.waiting);
                        self.write_back(WriteBackScope::Room, &AtOnce)?;
                    }
                    Err(Refused::Failed(error)) => {
                        self.note_error(counts, &error);
                        return Err(error);
                    }
                }
            }
            counts.add(Count::CacheWrittenBytes, part.len() as u64);
            self.overhead.note_blocks(key.device, (part.len() / BLOCK) as u64);
            key.block += (part.len() / BLOCK) as u64;
        }
        Ok(())
    }

    pub(crate) fn pages(&self, len: u64) -> Result<Pages> {
        let what = || Error::new(ErrorKind::Unavailable, "no memory for a request");
        Pages::zeroed(len).ok_or_else(what)
    }

    /// Makes all logged blocks durable. After an error all devices have lost writes: the kernel
    /// reports a failure once.
    pub(crate) fn barrier(&self) -> Result<()> {
        let Some(log) = self.usable_log() else { return Ok(()) };
        log.barrier(&self.file).inspect_err(|error| {
            self.backings().iter().flatten().for_each(|backing| backing.note_lost(error));
        })
    }

    /// Writes back what is older or more than `limits` say; `now` is a clock's seconds.
    pub fn write_back_due(&self, limits: DirtyLimits, now: u64) -> Result<()> {
        while self.write_back_throttled(limits, now, &AtOnce)? {}
        Ok(())
    }

    /// A part of [`Self::write_back_due`] at a rate of the caller's, because others wait for a
    /// turn. True if more may be due.
    pub fn write_back_throttled(
        &self,
        limits: DirtyLimits,
        now: u64,
        throttle: &dyn Throttle,
    ) -> Result<bool> {
        let Some(log) = self.usable_log() else { return Ok(false) };
        log.set_clock(now);
        let too_full = self.dirty().1 >= limits.percent;
        let before = if too_full { u64::MAX } else { now.saturating_sub(limits.seconds) };
        self.write_back(WriteBackScope::Older(before), throttle)
    }

    /// Writes back every dirty block.
    pub fn write_back_all(&self) -> Result<()> {
        let _waiting = Waiting::new(&self.waiting);
        self.write_back(WriteBackScope::All, &AtOnce).map(drop)
    }

    /// True if segments were retired, and there may be more.
    fn write_back(&self, want: WriteBackScope, throttle: &dyn Throttle) -> Result<bool> {
        let Some(log) = self.usable_log() else { return Ok(false) };
        let _turn = self.locks.lock(TURN);
        let together = match self.absent(log) {
            Some(absent) => self.attached(absent).map(drop),
            None => match self.write_back_together(log, want, throttle) {
                Ok(retired) => return Ok(retired),
                // A device that fails must not keep the others from being written back.
                Err(error) => Err(error),
            },
        };
        self.write_back_apart(log, together, want, throttle).map(|()| false)
    }

    /// Writes back segments, the oldest first.
    fn write_back_together(
        &self,
        log: &Log,
        want: WriteBackScope,
        throttle: &dyn Throttle,
    ) -> Result<bool> {
        if want != WriteBackScope::Room {
            log.close_before(if let WriteBackScope::Older(before) = want {
                before
            } else {
                u64::MAX
            });
        }
        let segments = log.oldest(want);
        if segments.is_empty() {
            return match want {
                WriteBackScope::Room if !log.has_room() => Err(Error::new(
                    ErrorKind::NoSpace,
                    "the log of the cache is full: a slow device does not take its dirty blocks (`burgeon accelerate status`)",
                )),
                _ => Ok(false),
            };
        }
        let (tail, versions) = log.versions(&segments);
        if let Some((key, _)) = versions.iter().find(|(_, entry)| entry.is_lost()) {
            return Err(lost(self.name_of(*key), *key, "its copy in the log is damaged"));
        }
        self.write_versions(log, &versions, throttle)?;
        self.settle(&versions)?;
        let stored = self.store_head(|head| head.log.tail = head.log.tail.max(tail));
        stored.or_else(|error| self.give_up(&error).and(Err(error)))?;
        log.free(&segments);
        Ok(true)
    }

    pub(crate) fn attached(&self, device: u8) -> Result<Arc<Backing>> {
        self.backing(device).ok_or_else(|| {
            let names = self.known_numbers();
            let name = names.iter().find(|(number, _)| *number == device);
            let name = name.map_or("a slow device", |(_, name)| name);
            let what = format!("the cache has dirty blocks of {name}, which is not attached");
            Error::new(ErrorKind::Unavailable, what)
        })
    }

    /// Writes versions, which are sorted by address. They are durable in the log before: after a
    /// power failure, a block of the slow device that differs from what is known of it is dirty.
    pub(crate) fn write_versions(
        &self,
        log: &Log,
        versions: &[(Key, DirtyVersion)],
        throttle: &dyn Throttle,
    ) -> Result<()> {
        self.forget_samples(versions)?;
        self.barrier()?;
        let mut rest = versions;
        let mut pages = self.pages(RUN_MAX as u64 * BLOCK_SIZE)?;
        while let Some((first, _)) = rest.first() {
            let adjoins = |(index, (key, _)): (usize, &(Key, DirtyVersion))| {
                key.device == first.device && key.block == first.block + index as u64
            };
            let len = rest.iter().take(RUN_MAX).enumerate().take_while(|run| adjoins(*run)).count();
            let (run, further) = rest.split_at(len);
            let backing = self.attached(first.device)?;
            let bytes = &mut pages.bytes_mut()[..len * BLOCK];
            let (load, waiting) = (&backing.load, &self.waiting);
            throttle.pause(&Moment { load, bytes: bytes.len() as u64, waiting })?;
            for ((key, entry), bytes) in run.iter().zip(bytes.chunks_exact_mut(BLOCK)) {
                if !log.read(&self.file, *key, *entry, bytes)? {
                    backing.counts.add(Count::CorruptBlocks, 1);
                    return Err(lost(backing.name.clone(), *key, "its copy in the log is damaged"));
                }
            }
            let written = backing.slow.write_at(first.block * BLOCK_SIZE, bytes);
            written.inspect_err(|_| backing.counts.add(Count::SlowErrors, 1))?;
            backing.counts.add(Count::SlowWrittenBytes, bytes.len() as u64);
            for ((key, entry), bytes) in run.iter().zip(bytes.chunks_exact(BLOCK)) {
                self.keep_written(log, *key, *entry, bytes, &backing.counts);
            }
            rest = further;
        }
        Ok(())
    }

    /// Has the identities of the devices leave the samples of `versions` out, durably.
    fn forget_samples(&self, versions: &[(Key, DirtyVersion)]) -> Result<()> {
        let mut rest = versions;
        while let Some((first, _)) = rest.first() {
            let len = rest.iter().take_while(|(key, _)| key.device == first.device).count();
            let (its, further) = rest.split_at(len);
            let identity = &self.attached(first.device)?.identity;
            identity.forget(its.iter().map(|(key, _)| key.block));
            self.put_identity(first.device, identity)?;
            rest = further;
        }
        Ok(())
    }

    /// Offers a block to the policy that is on the slow device now, unless somebody has it.
    fn keep_written(
        &self,
        log: &Log,
        key: Key,
        entry: DirtyVersion,
        bytes: &[u8],
        counts: &Counts,
    ) {
        let span = BlockRange { device: key.device, first: key.block, end: key.block + 1 };
        let Some(_locked) = self.locks.try_lock(span) else { return };
        if log.find(key) == Some(entry) && self.sets().find(key).is_none() {
            self.admit(key, bytes, counts);
        }
    }
}

/// A dirty block that cannot be served.
pub(crate) fn lost(name: String, key: Key, why: &str) -> Error {
    let at = key.block * BLOCK_SIZE;
    let what = format!("bytes {at} to {} of {name} were dirty: {why}", at + BLOCK_SIZE);
    Error::new(ErrorKind::Corrupt, what)
}
