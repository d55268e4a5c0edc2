//! Dirty blocks of one device: written back for it alone, or given up.
//!
//! ```text
//!   the oldest dirty blocks of the device ─► log durable ─► by address to the slow device ─► slow sync
//!        ─► identity, index and log durable ─► the device's own tail past them, durable ─► clean
//! ```
//!
//! The segments of the log are freed by `write_back`, which finds nothing of this device in them.
//! While a device with dirty blocks is not attached, the oldest segments cannot be freed; then this
//! is how the other devices are written back.
//!
//! Invariant: after any error the blocks stay in the log, and are written again.

use std::ops::Range;

use burgeon_block::{BLOCK_SIZE, Error, ErrorKind, LocalFile, Result};

use crate::{
    backing::SlowDevice,
    device::CachedDevice,
    dirty_ranges::{Dirty, dirty_of},
    format::DEVICES_MAX,
    keys::Key,
    log::{DirtyVersion, Log, WriteBackScope},
    store::CacheStore,
    throttle::{AtOnce, Throttle, Waiting},
    write_back::{TURN, lost},
};

/// Blocks that are written back in one step, 64 MiB: what a step holds in memory, and what is lost
/// of its work if the server dies.
pub(crate) const DRAINED_MAX: usize = 16384;

impl<C: LocalFile, S: SlowDevice + 'static> CachedDevice<C, S> {
    /// Writes back dirty blocks whose records are below `before` ([`CacheStore::log_position`]),
    /// the oldest first, about `blocks` of them. Returns how many are left below it.
    pub fn write_back(&self, before: u64, blocks: usize) -> Result<u64> {
        self.store.drain(self.number, before, blocks)
    }
}

impl<C: LocalFile> CacheStore<C> {
    /// The record of the log below which everything is older than this moment.
    pub fn log_position(&self) -> u64 {
        self.log.as_ref().map_or(0, Log::next)
    }

    /// As [`CachedDevice::write_back`].
    pub(crate) fn drain(&self, device: u8, before: u64, blocks: usize) -> Result<u64> {
        let Some(log) = self.usable_log() else { return Ok(0) };
        let _waiting = Waiting::new(&self.waiting);
        let _turn = self.locks.lock(TURN);
        self.drain_in_turn(log, device, (before, blocks), &AtOnce)
    }

    fn drain_in_turn(
        &self,
        log: &Log,
        device: u8,
        (before, blocks): (u64, usize),
        throttle: &dyn Throttle,
    ) -> Result<u64> {
        let (tail, versions, left) = log.oldest_of(device, before, blocks);
        if versions.is_empty() {
            return Ok(0);
        }
        if let Some((key, _)) = versions.iter().find(|(_, entry)| entry.is_lost()) {
            return Err(lost(self.name_of(*key), *key, "its copy in the log is damaged"));
        }
        self.write_versions(log, &versions, throttle)?;
        self.settle(&versions)?;
        self.store_tail(device, tail)?;
        log.remove(device, tail);
        Ok(left)
    }

    /// The records below `tail` have nothing of the device any more. The cache is given up if this
    /// cannot be recorded.
    fn store_tail(&self, device: u8, tail: u64) -> Result<()> {
        let stored = self.change_record(device, |record| {
            record.tail = record.tail.get().max(tail).into();
        });
        stored.or_else(|error| self.give_up(&error).and(Err(error)))
    }

    /// Makes versions durable that were written back: syncs slow devices, identities, index and
    /// log. From then on no older version of their blocks can come back.
    pub(crate) fn settle(&self, versions: &[(Key, DirtyVersion)]) -> Result<()> {
        let of = |device: u8| {
            let its = move |(key, _): &&(Key, _)| key.device == device;
            versions.iter().filter(its).copied()
        };
        let devices: std::collections::BTreeSet<u8> =
            versions.iter().map(|(key, _)| key.device).collect();
        for device in &devices {
            self.attached(*device)?.sync_logged()?;
        }
        let identified = devices.iter().try_for_each(|device| {
            let backing = self.attached(*device)?;
            backing.identity.note_written(of(*device));
            self.put_identity(*device, &backing.identity)
        });
        let stored = identified.and_then(|()| self.store_index());
        stored.or_else(|error| self.give_up(&error).and(Err(error)))
    }

    /// Writes back every attached device for itself, because they cannot be written back together:
    /// one with dirty blocks is not attached, or fails.
    pub(crate) fn write_back_apart(
        &self,
        log: &Log,
        together: Result<()>,
        want: WriteBackScope,
        throttle: &dyn Throttle,
    ) -> Result<()> {
        if self.has_failed() {
            return together;
        }
        let before = match want {
            WriteBackScope::Older(before) => log.younger(before),
            WriteBackScope::Room | WriteBackScope::All => log.next(),
        };
        let devices: Vec<u8> =
            (0..DEVICES_MAX as u8).filter(|device| self.attached(*device).is_ok()).collect();
        let mut drained = Ok(());
        for device in devices {
            // In steps, of which each is recorded: a server that dies begins with the next one.
            let done = loop {
                match self.drain_in_turn(log, device, (before, DRAINED_MAX), throttle) {
                    Ok(0) => break Ok(()),
                    Ok(_) if want == WriteBackScope::Room && log.has_room() => return Ok(()),
                    Ok(_) => {}
                    Err(error) => break Err(error),
                }
            };
            drained = drained.and(done);
            if self.has_failed() {
                return drained;
            }
        }
        match want {
            WriteBackScope::Room if log.has_room() => Ok(()),
            WriteBackScope::Room => {
                let why = drained.and(together).err().map(|error| error.to_string());
                let what = format!("the log is full: {}", why.unwrap_or_default());
                Err(Error::new(ErrorKind::NoSpace, what))
            }
            WriteBackScope::Older(_) | WriteBackScope::All => drained,
        }
    }

    /// A device with dirty blocks that is not attached.
    pub(crate) fn absent(&self, log: &Log) -> Option<u8> {
        let has_dirty =
            |device: &u8| log.first_in(Key { device: *device, block: 0 }, u64::MAX).is_some();
        (0..DEVICES_MAX as u8).filter(has_dirty).find(|device| self.attached(*device).is_err())
    }

    /// The bytes that the slow devices do not have yet.
    pub fn dirty_devices(&self) -> Vec<Dirty> {
        let known = self.known_numbers().into_iter();
        self.log.as_ref().map_or(Vec::new(), |log| dirty_of(known, &log.state().map))
    }

    /// The bytes that cannot be read any more, because the cache device has failed.
    pub fn gone(&self) -> Vec<Dirty> {
        let mut gone = self.gone.clone();
        if self.has_failed() {
            gone.extend(self.dirty_devices());
        }
        gone
    }

    /// Bytes of the log, and those of them that hold no free segment.
    pub fn log_fill(&self) -> (u64, u64) {
        let (taken, all) = self.log.as_ref().map_or((0, 0), Log::fill);
        (all * BLOCK_SIZE, taken * BLOCK_SIZE)
    }

    /// The error of a request that meets bytes which are lost with the cache device.
    pub(crate) fn refuse_gone(&self, name: &str, at: u64, len: u64) -> Result<()> {
        let its = self.gone.iter().filter(|dirty| dirty.name == name);
        let mut ranges = its.flat_map(|dirty| &dirty.ranges);
        match ranges.find(|range| range.start < at.saturating_add(len) && at < range.end) {
            Some(Range { start, end }) => {
                let what = format!(
                    "bytes {start} to {end} of {name} were dirty: the cache device has failed"
                );
                Err(Error::new(ErrorKind::Corrupt, what))
            }
            None => Ok(()),
        }
    }

    /// Gives up the dirty blocks of a device that is not attached. Returns their bytes.
    pub(crate) fn drop_dirty(&self, device: u8) -> Result<u64> {
        let Some(log) = self.usable_log() else { return Ok(0) };
        let _turn = self.locks.lock(TURN);
        let (bytes, tail) = (log.count(Some(device)) * BLOCK_SIZE, log.next());
        self.store_tail(device, tail)?;
        log.remove(device, tail);
        Ok(bytes)
    }
}
