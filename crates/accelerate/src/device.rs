//! A slow device with a cache in front of it.
//!
//! ```text
//!   read    lock the blocks ─► memory, or a slot whose check is right ─► done
//!                          └─► slow device ─► admit (policy)
//!   write   write-back: to the log (dirty), with all that overlaps a dirty block; else round it:
//!           lock the blocks ─► mark the regions durably ─► forget the blocks ─► slow device
//!                          ─► write-through: the new content into the slots
//!   flush   slow device; the marks are durable already. Write-back: the cache device (`upkeep`)
//!   tidy    now and then: slow device, index ─► clear the marks of idle regions
//! ```
//!
//! Invariants (`dev/accelerate-simulator`):
//! - A block is forgotten before the slow device's copy changes, and is kept again only after that
//!   has succeeded: whatever a write leaves behind, no older version is served after it.
//! - A failed flush fails all later flushes and changes: the kernel may have thrown away the data.
//! - A write that the cache cannot mark is made only after the cache was given up.

use std::{
    ops::RangeInclusive,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, AtomicUsize, Ordering::SeqCst},
    },
};

use burgeon_block::{BLOCK_SIZE, ByteRange, Erase, Error, ErrorKind, LocalFile, Pages, Result};

use crate::{
    backing::{Backing, SlowDevice},
    counters::{Count, Counts},
    format::{DeviceRecord, REGION},
    keys::Key,
    locks::{BlockRange, Locked},
    marks::Marks,
    mode::Mode,
    records::DeviceBitmaps,
    sets::Slot,
    store::CacheStore,
    streams::Streams,
    throttle::Load,
    tier::HitTier,
};

/// Settings of a device.
#[derive(Clone, Copy, Debug)]
pub struct DeviceOptions {
    /// Treatment of writes.
    pub mode: Mode,
    /// Length in bytes of a sequence of requests from which on they bypass the cache; 0 for
    /// never.
    pub cutoff: u64,
    /// It has users already: if the cache device fails, it is served without it.
    pub is_in_use: bool,
    /// It was written to without the cache, whose device had failed: its content is not compared.
    pub is_changed: bool,
    /// Dirty blocks of another device of this name are given up.
    pub accepts_loss: bool,
}

impl DeviceOptions {
    /// Options of an unused device whose content has not changed since its last attachment.
    pub fn new(mode: Mode) -> Self {
        Self { mode, cutoff: 0, is_in_use: false, is_changed: false, accepts_loss: false }
    }
}

/// A slow device behind a cache.
pub struct CachedDevice<C: LocalFile, S> {
    pub(crate) store: Arc<CacheStore<C>>,
    pub(crate) slow: Arc<S>,
    pub(crate) name: String,
    pub(crate) number: u8,
    pub(crate) record: DeviceRecord,
    pub(crate) marks: Marks,
    pub(crate) counts: Counts,
    pub(crate) streams: Mutex<Streams>,
    /// Its place in [`Mode::ALL`].
    pub(crate) mode: AtomicUsize,
    pub(crate) cutoff: AtomicU64,
    pub(crate) backing: Arc<Backing>,
    /// Writes that may go to the log.
    pub(crate) logging: Load,
}

impl<C: LocalFile, S> Drop for CachedDevice<C, S> {
    fn drop(&mut self) {
        let mut backings = self.store.backings();
        let own = &mut backings[usize::from(self.number)];
        if own.as_ref().is_some_and(|backing| Arc::ptr_eq(backing, &self.backing)) {
            *own = None;
        }
    }
}

/// Slots that a write keeps reserved for its blocks; given back when it is dropped.
struct Slots<'a, C: LocalFile> {
    store: &'a CacheStore<C>,
    slots: Vec<Option<Slot>>,
}

impl<C: LocalFile> Drop for Slots<'_, C> {
    fn drop(&mut self) {
        self.slots.iter().flatten().for_each(|slot| self.store.release(*slot));
    }
}

impl<C: LocalFile, S: SlowDevice + 'static> CachedDevice<C, S> {
    /// The slow device.
    pub fn slow(&self) -> &S {
        &self.slow
    }

    /// The cache.
    pub fn store(&self) -> &Arc<CacheStore<C>> {
        &self.store
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its counters.
    pub fn counts(&self) -> &Counts {
        &self.counts
    }

    /// Regions of 1 MiB that are marked as perhaps newer than the cache.
    pub fn marked(&self) -> u64 {
        self.marks.count()
    }

    /// Treatment of writes.
    pub fn mode(&self) -> Mode {
        Mode::ALL.get(self.mode.load(SeqCst)).map_or(Mode::WriteThrough, |(mode, _)| *mode)
    }

    pub(crate) fn put_mode(&self, mode: Mode) {
        self.mode.store(mode as usize, SeqCst);
    }

    /// Length of a sequence of requests from which on they bypass the cache; 0 for never.
    pub fn cutoff(&self) -> u64 {
        self.cutoff.load(SeqCst)
    }

    /// Changes the length.
    pub fn set_cutoff(&self, cutoff: u64) {
        self.cutoff.store(cutoff, SeqCst);
    }

    /// True if a flush has failed, of this process or an earlier one that counted in the same
    /// memory.
    pub fn is_broken(&self) -> bool {
        self.counts.has_lost()
    }

    pub(crate) fn key(&self, block: u64) -> Key {
        Key { device: self.number, block }
    }

    /// Whole blocks; the rest behind them is never cached.
    pub(crate) fn whole_blocks(&self) -> u64 {
        self.slow.size() / BLOCK_SIZE
    }

    pub(crate) fn lock(&self, at: u64, len: u64) -> Locked<'_> {
        let (first, end) = (at / BLOCK_SIZE, (at + len).div_ceil(BLOCK_SIZE));
        self.store.locks.lock(BlockRange { device: self.number, first, end })
    }

    /// True if a request belongs to a long sequence.
    fn is_sequential(&self, at: u64, len: u64) -> bool {
        let cutoff = self.cutoff();
        let mut streams = self.streams.lock().unwrap_or_else(PoisonError::into_inner);
        let sequential = streams.note(at, len) >= cutoff && cutoff > 0;
        if sequential {
            self.counts.add(Count::BypassedBytes, len);
        }
        sequential
    }

    /// A block that lies on the cache device, whole and alone. Never waits.
    pub fn place_of(&self, at: u64) -> Option<ByteRange> {
        let is_block = at.is_multiple_of(BLOCK_SIZE) && at / BLOCK_SIZE < self.whole_blocks();
        if !is_block || self.store.has_failed() {
            return None;
        }
        self.store.place_of(self.key(at / BLOCK_SIZE))
    }

    /// True if `bytes`, which were read at `place` of the cache device, are those at `at`.
    pub fn is_block(&self, at: u64, place: ByteRange, bytes: &[u8]) -> bool {
        let good = self.store.is_block(self.key(at / BLOCK_SIZE), place, bytes, &self.counts);
        if good {
            self.counts.add(Count::ReadBytes, BLOCK_SIZE);
        }
        good
    }

    /// Reads whole logical blocks. Returns the slowest tier that it took some from.
    pub fn read(&self, at: u64, buf: &mut [u8]) -> Result<HitTier> {
        let len = buf.len() as u64;
        self.counts.add(Count::ReadBytes, len);
        if self.store.has_failed() {
            self.refuse_dirty(at, len)?;
            return self.read_slow(at, buf).map(|()| HitTier::Slow);
        }
        let sequential = self.is_sequential(at, len);
        let _locked = self.lock(at, len);
        let blocks = at.is_multiple_of(BLOCK_SIZE) && len.is_multiple_of(BLOCK_SIZE);
        if blocks {
            return self.read_blocks(at / BLOCK_SIZE, buf, sequential);
        }
        // The incomplete block at the end is never cached.
        let whole = self.whole_blocks() * BLOCK_SIZE;
        let (buf, tail) = buf.split_at_mut(whole.saturating_sub(at).min(len) as usize);
        if !tail.is_empty() {
            self.read_slow(at.max(whole), tail)?;
        }
        let slowest = if tail.is_empty() { HitTier::Memory } else { HitTier::Slow };
        if buf.is_empty() {
            return Ok(slowest);
        }
        let (first, end) = (at / BLOCK_SIZE, (at + buf.len() as u64).div_ceil(BLOCK_SIZE));
        let mut pages = self.store.pages((end - first) * BLOCK_SIZE)?;
        let of_blocks = self.read_blocks(first, pages.bytes_mut(), sequential)?;
        let skip = (at - first * BLOCK_SIZE) as usize;
        buf.copy_from_slice(&pages.bytes()[skip..skip + buf.len()]);
        Ok(slowest.max(of_blocks))
    }

    /// Reads from the slow device alone.
    fn read_slow(&self, at: u64, buf: &mut [u8]) -> Result<()> {
        let _request = self.backing.load.begin();
        self.slow.read_at(at, buf).inspect_err(|_| self.counts.add(Count::SlowErrors, 1))?;
        self.counts.add(Count::MissBytes, buf.len() as u64);
        self.counts.add(Count::SlowReadBytes, buf.len() as u64);
        Ok(())
    }

    /// Reads blocks whose lock the caller holds: runs of misses in one read each.
    pub(crate) fn read_blocks(
        &self,
        first: u64,
        buf: &mut [u8],
        sequential: bool,
    ) -> Result<HitTier> {
        let block_len = BLOCK_SIZE as usize;
        let count = buf.len() / block_len;
        let (mut missed, mut slowest) = (0, HitTier::Memory);
        for at in 0..=count {
            if at < count {
                let part = &mut buf[at * block_len..(at + 1) * block_len];
                let key = self.key(first + at as u64);
                let tier = match self.store.get_dirty(key, part, &self.counts)? {
                    true => Some(HitTier::Cache),
                    false => self.store.get(key, part, &self.counts),
                };
                slowest = slowest.max(tier.unwrap_or(HitTier::Slow));
                if tier.is_none() {
                    missed += 1;
                    continue;
                }
            }
            if missed > 0 {
                let from = at - missed;
                let run = &mut buf[from * block_len..at * block_len];
                self.read_slow((first + from as u64) * BLOCK_SIZE, run)?;
                if !sequential {
                    self.keep(first + from as u64, run);
                }
                missed = 0;
            }
        }
        Ok(slowest)
    }

    /// Offers blocks to the policy.
    fn keep(&self, first: u64, bytes: &[u8]) {
        for (block, bytes) in (first..).zip(bytes.chunks_exact(BLOCK_SIZE as usize)) {
            if block < self.whole_blocks() {
                self.store.admit(self.key(block), bytes, &self.counts);
            }
        }
    }

    /// Writes whole logical blocks; with `fua`, they are durable when this returns.
    pub fn write(&self, at: u64, bytes: &[u8], fua: bool) -> Result<()> {
        let len = bytes.len() as u64;
        self.counts.add(Count::WrittenBytes, len);
        let sequential = self.is_sequential(at, len);
        // The incomplete block at the end is in no log.
        let whole = self.whole_blocks() * BLOCK_SIZE;
        if at < whole && at + len > whole {
            let (blocks, tail) = bytes.split_at((whole - at) as usize);
            self.write_part(at, blocks, sequential)?;
            self.write_part(whole, tail, sequential)?;
        } else if len > 0 {
            self.write_part(at, bytes, sequential)?;
        }
        if fua { self.flush() } else { Ok(()) }
    }

    /// Writes to the log, or round it.
    fn write_part(&self, at: u64, bytes: &[u8], sequential: bool) -> Result<()> {
        let len = bytes.len() as u64;
        self.backing.check()?;
        let logging = self.logging.begin();
        let locked = self.lock(at, len);
        if self.goes_to_log(at, len, sequential)? && self.write_log(at, bytes)? {
            return Ok(());
        }
        drop(logging);
        self.change(
            (at, len, locked),
            |_| {
                self.slow.write_at(at, bytes)?;
                self.counts.add(Count::SlowWrittenBytes, len);
                Ok(())
            },
            |slots, old| {
                if self.mode() != Mode::WriteAround {
                    self.renew(at, bytes, slots, old, sequential);
                }
            },
        )
    }

    /// Erases whole logical blocks.
    pub fn erase(&self, range: ByteRange, how: Erase) -> Result<()> {
        let (at, len) = (range.start(), range.len());
        if len == 0 {
            return Ok(());
        }
        self.backing.check()?;
        let locked = self.lock_clean(at, len)?;
        self.change((at, len, locked), |_| self.slow.erase(range, how), |_, _| ())?;
        self.counts.add(Count::ErasedBytes, len);
        Ok(())
    }

    /// Changes the slow device at `at`, in the order that the module describes. `after` gets the
    /// reserved slots and the former content of blocks that change in part. No block is dirty.
    fn change(
        &self,
        (at, len, locked): (u64, u64, Locked<'_>),
        change: impl FnOnce(&Self) -> Result<()>,
        after: impl FnOnce(&mut [Option<Slot>], &Edges),
    ) -> Result<()> {
        let _pending = self.backing.pending.begin();
        let _request = self.backing.load.begin();
        let regions = (at / REGION) as u32..=((at + len - 1) / REGION) as u32;
        if !self.mark(regions.clone())? {
            drop(locked);
            let done = change(self);
            return done.inspect_err(|error| self.note_slow_error(error));
        }
        let edges = self.edges(at, len);
        let (first, end) = (at / BLOCK_SIZE, (at + len).div_ceil(BLOCK_SIZE));
        let slots = (first..end).map(|block| self.store.forget(self.key(block))).collect();
        let mut slots = Slots { store: &self.store, slots };
        let done = change(self);
        match &done {
            Ok(()) => after(&mut slots.slots, &edges),
            Err(error) => self.note_slow_error(error),
        }
        drop(slots);
        self.marks.end(regions);
        done
    }

    fn note_slow_error(&self, error: &Error) {
        // A device that cannot erase has no fault.
        if error.kind() != ErrorKind::UnsupportedFormat {
            self.counts.add(Count::SlowErrors, 1);
        }
    }

    pub(crate) fn bitmaps(&self) -> DeviceBitmaps<'_, C> {
        let first = self.record.bitmap_first.get();
        DeviceBitmaps { store: &self.store, number: self.number, first }
    }

    /// Marks regions durably; false if the cache is gone round instead.
    fn mark(&self, regions: RangeInclusive<u32>) -> Result<bool> {
        if self.store.has_failed() {
            return Ok(false);
        }
        match self.marks.begin(regions, &self.bitmaps()) {
            Ok(()) => Ok(true),
            Err(error) => {
                self.counts.add(Count::CacheErrors, 1);
                self.store.give_up(&error)?;
                Ok(false)
            }
        }
    }

    /// The cached content of the first and last block of a change, where it covers them in part.
    fn edges(&self, at: u64, len: u64) -> Edges {
        let end = at + len;
        let edge = |block: u64, is_partial: bool| {
            let mut page = Pages::zeroed(BLOCK_SIZE).filter(|_| is_partial)?;
            let counts = Counts::default();
            self.store.get(self.key(block), page.bytes_mut(), &counts).map(|_| page)
        };
        let (first, last) = (at / BLOCK_SIZE, (end - 1) / BLOCK_SIZE);
        let starts_inside = !at.is_multiple_of(BLOCK_SIZE);
        let ends_inside = !end.is_multiple_of(BLOCK_SIZE);
        if first == last {
            return Edges { first: edge(first, starts_inside || ends_inside), last: None };
        }
        Edges { first: edge(first, starts_inside), last: edge(last, ends_inside) }
    }

    /// Puts written blocks into the cache: into their slots, or where the policy wants them.
    fn renew(
        &self,
        at: u64,
        bytes: &[u8],
        slots: &mut [Option<Slot>],
        old: &Edges,
        sequential: bool,
    ) {
        let (first, end) = (at / BLOCK_SIZE, at + bytes.len() as u64);
        let count = slots.len();
        for (index, slot) in slots.iter_mut().enumerate() {
            let block = first + index as u64;
            let (start, stop) = (block * BLOCK_SIZE, (block + 1) * BLOCK_SIZE);
            let mut merged = None;
            let content = if start >= at && stop <= end {
                &bytes[(start - at) as usize..(stop - at) as usize]
            } else {
                let edge = if index == 0 { &old.first } else { &old.last };
                let (Some(edge), Some(mut page)) = (edge, Pages::zeroed(BLOCK_SIZE)) else {
                    continue;
                };
                debug_assert!(index == 0 || index + 1 == count);
                let (from, to) = (start.max(at), stop.min(end));
                page.bytes_mut().copy_from_slice(edge.bytes());
                page.bytes_mut()[(from - start) as usize..(to - start) as usize]
                    .copy_from_slice(&bytes[(from - at) as usize..(to - at) as usize]);
                merged.insert(page).bytes()
            };
            if block >= self.whole_blocks() || self.store.has_failed() {
                continue;
            }
            match slot.take() {
                Some(slot) => self.store.fill(self.key(block), slot, content, &self.counts),
                None if !sequential => self.store.admit(self.key(block), content, &self.counts),
                None => {}
            }
        }
    }
}

/// Former content of blocks that change in part.
struct Edges {
    first: Option<Pages>,
    last: Option<Pages>,
}
