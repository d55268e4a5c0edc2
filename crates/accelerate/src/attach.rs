//! The beginning of a cached device.
//!
//! ```text
//!   dirty blocks of it in the log? ──► is it the device that they belong to (`identity`)?
//!   Warm ──► blocks of marked regions are dropped
//!   Cold ──► all blocks are dropped; slow sync ──► identity ──► no marks
//! ```
//!
//! Invariant: dirty blocks never meet a device that is not theirs. They are written back to it, or
//! the caller has accepted their loss.

use std::sync::{
    Arc, Mutex,
    atomic::{AtomicU64, AtomicUsize},
};

use burgeon_block::{BLOCK_SIZE, Error, ErrorKind, LocalFile, Result};

use crate::{
    backing::{Backing, Pending, SlowDevice},
    counters::{Count, Counts},
    device::{CachedDevice, DeviceOptions},
    format::{DeviceRecord, REGION},
    identity::{Clean, Identity},
    keys::Key,
    locks::BlockRange,
    marks::Marks,
    mode::Mode,
    records::DeviceBitmaps,
    sets::check_of,
    store::{CacheStore, Trust},
    throttle::Load,
};

/// The state that an attachment begins with.
struct Begun {
    marks: Marks,
    /// Blocks that were dropped.
    dropped: u64,
    /// The slow device has lost what was written before.
    is_lost: bool,
}

impl<C: LocalFile, S: SlowDevice + 'static> CachedDevice<C, S> {
    /// Attaches `slow` as `name`. A new device, and one that others may have written to (`trust`,
    /// or that of its store), begins without content.
    ///
    /// `Invalid` if the device had another size when it was attached last, or if the cache has
    /// dirty blocks of another device of this name.
    pub fn attach(
        store: Arc<CacheStore<C>>,
        slow: S,
        name: &str,
        trust: Trust,
        options: DeviceOptions,
    ) -> Result<Self> {
        if store.has_failed() {
            // It is served all the same, without a cache.
            return Ok(Self::without_cache(store, slow, name, options));
        }
        let known = match store.record(name) {
            Some(known) => Self::known(&store, &slow, known, options)?,
            None => None,
        };
        let is_warm = known.is_some() && trust == Trust::Warm && store.trust() == Trust::Warm;
        let (number, record) = match known {
            Some(known) => known,
            None => store.add_record(name, slow.size())?,
        };
        let blocks = slow.size() / BLOCK_SIZE;
        let identity = Arc::new(Identity::new(slow.serial(), blocks, store.id(), number));
        let begun = Self::begin(&store, &slow, (number, record), &identity, (is_warm, options));
        match begun {
            Ok(Begun { marks, dropped, is_lost }) => {
                let known = (number, record, identity);
                let device = Self::new(store, slow, name, known, marks, options);
                device.counts.add(Count::DroppedBlocks, dropped);
                // The kernel reports a loss once, and its users wait for the report.
                if is_lost && options.is_in_use {
                    device.counts.note_lost();
                }
                Ok(device)
            }
            Err(error) if options.is_in_use => {
                store.give_up(&error)?;
                Ok(Self::without_cache(store, slow, name, options))
            }
            Err(error) => Err(error),
        }
    }

    fn without_cache(
        store: Arc<CacheStore<C>>,
        slow: S,
        name: &str,
        options: DeviceOptions,
    ) -> Self {
        let number = store.record(name).map_or(0, |(number, _)| number);
        let (record, marks) = (DeviceRecord::empty(), Marks::empty(store.id(), 0, 0));
        let identity = Arc::new(Identity::new(None, 0, store.id(), number));
        Self::new(store, slow, name, (number, record, identity), marks, options)
    }

    /// The record of a device that was attached before; `None` if it is to be attached as a new
    /// one.
    fn known(
        store: &CacheStore<C>,
        slow: &S,
        (number, record): (u8, DeviceRecord),
        options: DeviceOptions,
    ) -> Result<Option<(u8, DeviceRecord)>> {
        let name = record.name();
        let dirty = store.log.as_ref().map_or(0, |log| log.count(Some(number)));
        let (size, former) = (slow.size(), record.size.get());
        let differs = if size != former {
            Err(Error::new(ErrorKind::Invalid, format!("it has {size} bytes, and had {former}")))
        } else if dirty > 0 && !options.is_in_use {
            let marks = store.load_marks(&record);
            let is_left_out = |block: u64| {
                options.is_changed || marks.is_marked((block * BLOCK_SIZE / REGION) as u32)
            };
            store.compare_identity(number, slow, is_left_out)
        } else {
            Ok(())
        };
        match differs {
            Ok(()) => Ok(Some((number, record))),
            Err(error) if dirty == 0 => {
                let what = format!(
                    "{name} is not the device that was attached last: {error}. Attach it by another \
                     name (--name)"
                );
                Err(Error::new(error.kind(), what))
            }
            // A device that could not be read may be the right one.
            Err(error)
                if options.accepts_loss
                    && matches!(error.kind(), ErrorKind::Invalid | ErrorKind::Corrupt) =>
            {
                let lost = store.drop_dirty(number)?;
                tracing::warn!(
                    device = name,
                    bytes = lost,
                    "another device has its name: its dirty bytes are given up"
                );
                if size == former {
                    return Ok(store.record(&name));
                }
                store.forget_device(&name)?;
                Ok(None)
            }
            Err(error) => {
                let what = format!(
                    "the cache has {} bytes that the slow device {name} does not have yet, and this \
                     is another device: {error}. Attach the device that they belong to, or accept \
                     their loss",
                    dirty * BLOCK_SIZE
                );
                Err(Error::new(error.kind(), what))
            }
        }
    }

    fn begin(
        store: &CacheStore<C>,
        slow: &S,
        (number, record): (u8, DeviceRecord),
        identity: &Identity,
        (is_warm, options): (bool, DeviceOptions),
    ) -> Result<Begun> {
        let first = record.bitmap_first.get();
        let is_its = |key: Key| key.device == number;
        let dirty = store.log.as_ref().map_or(0, |log| log.count(Some(number)));
        let keeps_identity = dirty > 0 || options.mode == Mode::WriteBack;
        if is_warm {
            let marks = store.load_marks(&record);
            let is_marked = |key: Key| marks.is_marked((key.block * BLOCK_SIZE / REGION) as u32);
            let dropped = store.drop_blocks(|key| is_its(key) && is_marked(key));
            // Without dirty blocks, nobody has kept the stored one.
            if keeps_identity && (dirty == 0 || !store.adopt_identity(number, identity)?) {
                let clean = Samples { store, slow, number, marks: &marks, cleared: &|_| false };
                store.take_identity(number, identity, &clean)?;
            }
            return Ok(Begun { marks, dropped, is_lost: false });
        }
        let dropped = store.drop_blocks(is_its);
        store.store_index()?;
        // No mark has the writes of an earlier process without a cache, and they may be volatile: a
        // power failure must not leave them in the cache alone.
        let blocks = record.bitmap_blocks.get();
        let synced = slow.sync().inspect_err(|error| {
            let device = record.name();
            tracing::warn!(device, %error, "cannot flush it: all of its regions count as written");
        });
        let regions = record.size.get().div_ceil(REGION) as u32;
        let marks = match synced {
            Ok(()) => Marks::empty(store.id(), first, blocks),
            Err(_) => Marks::full(store.id(), first, blocks, regions),
        };
        if keeps_identity {
            // Before the marks go: they tell which samples of the stored one do not count.
            let clean = Samples { store, slow, number, marks: &marks, cleared: &|_| false };
            store.take_identity(number, identity, &clean)?;
        }
        marks.store(&DeviceBitmaps { store, number, first })?;
        store.put_record(number, record)?;
        Ok(Begun { marks, dropped, is_lost: synced.is_err() })
    }

    fn new(
        store: Arc<CacheStore<C>>,
        slow: S,
        name: &str,
        (number, record, identity): (u8, DeviceRecord, Arc<Identity>),
        marks: Marks,
        options: DeviceOptions,
    ) -> Self {
        let slow = Arc::new(slow);
        let counts = Counts::from_stored(record.counters.map(|counter| counter.get()));
        let pending = Arc::new(Pending::after_another());
        let backing = Backing::new(slow.clone(), name, counts.clone(), pending, identity);
        let device = Self {
            store,
            slow,
            name: name.to_owned(),
            number,
            record,
            marks,
            counts,
            streams: Mutex::default(),
            mode: AtomicUsize::new(options.mode as usize),
            cutoff: AtomicU64::new(options.cutoff),
            backing: Arc::new(backing),
            logging: Load::default(),
        };
        device.register();
        device
    }

    /// Has its dirty blocks written back to it.
    fn register(&self) {
        if !self.store.has_failed() {
            self.store.backings()[usize::from(self.number)] = Some(self.backing.clone());
        }
    }

    /// Counts in `shared` from now on. If that memory has not been used, it goes on from the stored
    /// counters; else an earlier process has counted there since they were stored.
    pub fn count_in(mut self, shared: Counts) -> Self {
        let (mut values, before) = (self.counts.all(), self.record.counters);
        if shared.all().iter().any(|value| *value > 0) {
            values.iter_mut().zip(before).for_each(|(value, stored)| *value -= stored.get());
        }
        shared.add_all(values);
        if self.counts.has_lost() {
            shared.note_lost();
        }
        self.counts = shared;
        let (counts, pending) = (self.counts.clone(), self.backing.pending.clone());
        let (slow, identity) = (self.slow.clone(), self.backing.identity.clone());
        self.backing = Arc::new(Backing::new(slow, &self.name, counts, pending, identity));
        self.register();
        self
    }

    /// Its blocks, of which those of `cleared` regions may be sampled although they are marked.
    pub(crate) fn samples<'a>(&'a self, cleared: &'a dyn Fn(u32) -> bool) -> Samples<'a, C, S> {
        Samples {
            store: &self.store,
            slow: &self.slow,
            number: self.number,
            marks: &self.marks,
            cleared,
        }
    }
}

/// The blocks of a slow device that only this process changes.
pub(crate) struct Samples<'a, C, S> {
    store: &'a CacheStore<C>,
    slow: &'a S,
    number: u8,
    marks: &'a Marks,
    cleared: &'a dyn Fn(u32) -> bool,
}

impl<C: LocalFile, S: SlowDevice> Clean for Samples<'_, C, S> {
    fn checks(&self, first: u64, count: u64) -> Vec<(u64, u32)> {
        let end = (first + count).min(self.slow.size() / BLOCK_SIZE);
        let Some(count) = end.checked_sub(first).filter(|count| *count > 0) else {
            return Vec::new();
        };
        // Nobody writes them meanwhile, but for the writing back, which writes dirty ones.
        let _locked = self.store.locks.lock(BlockRange { device: self.number, first, end });
        let is_clean = |block: u64| {
            let key = Key { device: self.number, block };
            let region = (block * BLOCK_SIZE / REGION) as u32;
            (!self.marks.is_marked(region) || (self.cleared)(region))
                && self.store.log.as_ref().is_none_or(|log| log.find(key).is_none())
        };
        let clean: Vec<u64> = (first..end).filter(|block| is_clean(*block)).collect();
        let Ok(mut pages) = self.store.pages(count * BLOCK_SIZE) else { return Vec::new() };
        // A block that cannot be read is no sample.
        if clean.is_empty() || self.slow.read_at(first * BLOCK_SIZE, pages.bytes_mut()).is_err() {
            return Vec::new();
        }
        let check = |block: u64| {
            let at = ((block - first) * BLOCK_SIZE) as usize;
            let bytes = &pages.bytes()[at..at + BLOCK_SIZE as usize];
            (block, check_of(Key { device: self.number, block }, bytes))
        };
        clean.into_iter().map(check).collect()
    }
}
