//! Writes to the log, and requests that meet dirty blocks.
//!
//! Invariant: a change of the slow device never passes a dirty version of a block. A write that
//! meets one goes to the log, in every mode; an erasure waits until all are written back.

use burgeon_block::{BLOCK_SIZE, Error, ErrorKind, LocalFile, Result};

use crate::{
    backing::SlowDevice, device::CachedDevice, drain::DRAINED_MAX, locks::Locked, mode::Mode,
    write_back::lost,
};

/// Times that an erasure finds new dirty blocks in its range, until it fails.
const ROUNDS_MAX: u32 = 16;

impl<C: LocalFile, S: SlowDevice + 'static> CachedDevice<C, S> {
    /// Fails if the range has a dirty block, and the cache device has failed.
    pub(crate) fn refuse_dirty(&self, at: u64, len: u64) -> Result<()> {
        let (first, end) = (at / BLOCK_SIZE, (at + len).div_ceil(BLOCK_SIZE));
        self.store.refuse_gone(self.name(), at, len)?;
        let log = self.store.log.as_ref();
        match log.and_then(|log| log.first_in(self.key(first), end)) {
            Some(key) if self.store.has_failed() => {
                Err(lost(self.name().to_owned(), key, "the cache device has failed"))
            }
            _ => Ok(()),
        }
    }

    /// True if a write goes to the log, for the holder of the range's lock.
    pub(crate) fn goes_to_log(&self, at: u64, len: u64, sequential: bool) -> Result<bool> {
        self.refuse_dirty(at, len)?;
        let is_whole = at + len <= self.whole_blocks() * BLOCK_SIZE;
        let wants = self.mode() == Mode::WriteBack && !sequential;
        let Some(log) = self.store.usable_log().filter(|_| is_whole) else { return Ok(false) };
        Ok((wants && log.takes_more()) || self.meets_dirty(at, len))
    }

    fn meets_dirty(&self, at: u64, len: u64) -> bool {
        let (first, end) = (at / BLOCK_SIZE, (at + len).div_ceil(BLOCK_SIZE));
        let log = self.store.log.as_ref();
        log.is_some_and(|log| log.first_in(self.key(first), end).is_some())
    }

    /// Writes to the log, for the holder of the range's lock; false if it has no room, and the
    /// write may bypass it.
    pub(crate) fn write_log(&self, at: u64, bytes: &[u8]) -> Result<bool> {
        let (first, end) = (at / BLOCK_SIZE, (at + bytes.len() as u64).div_ceil(BLOCK_SIZE));
        let start = first * BLOCK_SIZE;
        let stop = at + bytes.len() as u64;
        let mut pages = self.store.pages((end - first) * BLOCK_SIZE)?;
        let content = pages.bytes_mut();
        let block = BLOCK_SIZE as usize;
        if !at.is_multiple_of(BLOCK_SIZE) {
            self.read_blocks(first, &mut content[..block], true)?;
        }
        let is_edge = !stop.is_multiple_of(BLOCK_SIZE);
        if is_edge && (end - first > 1 || at.is_multiple_of(BLOCK_SIZE)) {
            let last = content.len() - block;
            self.read_blocks(end - 1, &mut content[last..], true)?;
        }
        content[(at - start) as usize..(stop - start) as usize].copy_from_slice(bytes);
        for block in first..end {
            let slot = self.store.forget(self.key(block));
            slot.into_iter().for_each(|slot| self.store.release(slot));
        }
        match self.store.log_blocks(self.key(first), content, &self.counts) {
            Ok(()) => Ok(true),
            Err(error) if self.meets_dirty(at, bytes.len() as u64) => Err(error),
            Err(error) => {
                let (device, end) = (self.name(), at + bytes.len() as u64);
                tracing::warn!(device, range = %format_args!("{at}..{end}"), %error, "a write bypasses the log");
                Ok(false)
            }
        }
    }

    /// Locks a range without dirty blocks, which are written back first.
    pub(crate) fn lock_clean(&self, at: u64, len: u64) -> Result<Locked<'_>> {
        for _ in 0..ROUNDS_MAX {
            let locked = self.lock(at, len);
            self.refuse_dirty(at, len)?;
            if !self.meets_dirty(at, len) {
                return Ok(locked);
            }
            // Writing back needs no lock of a block, but writers wait for this one.
            drop(locked);
            let before = self.store.log_position();
            while self.store.drain(self.number, before, DRAINED_MAX)? > 0 {}
        }
        let what = format!("{} is written to faster than it is written back", self.name());
        Err(Error::new(ErrorKind::Unavailable, what))
    }
}
