//! A cache device, which all slow devices of a cache share.
//!
//! ```text
//!   open ──► superblock ──► Cold: a new epoch, nothing is known
//!                      └──► Warm: the index as it was stored; `CachedDevice::attach` drops marked regions
//!   store_index: the changed parts, then a sync
//!   give_up: after an error of bitmaps, or many of slots: from then on the cache is gone round
//! ```
//!
//! Invariants:
//! - Once the cache device failed, nothing of it is read or written any more, and the next open is
//!   cold: [`Distrust`] has recorded that elsewhere before the first write bypasses the cache.
//! - One thread at a time stores the index, the superblock or an identity (`TURN` is held).

use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU32, AtomicU64, Ordering::SeqCst},
    },
};

use burgeon_block::{BLOCK_SIZE, ByteRange, Error, ErrorKind, LocalFile, Pages, Result};
use zerocopy::{FromZeros as _, IntoBytes as _};

use crate::{
    backing::Backing,
    counters::{Count, Counts},
    dirty_ranges::{Dirty, dirty_of},
    format::{Block, DEVICES_MAX, SIZE_MIN, Super},
    format::{decode_part, encode_part},
    keys::Key,
    layout::Layout,
    locks::{BlockRange, Locked, Locks},
    log::{Log, Recovered},
    overhead::Overhead,
    policy::{BlockPolicy, Fate, PolicyKind},
    recover::recover,
    sets::{Sets, Slot, check_of},
    tier::HitTier,
};

/// Errors of slots until the cache device counts as failed.
const ERRORS_MAX: u32 = 16;
/// Parts of the index that are read at once: 1 MiB.
const PARTS_A_READ: u32 = 256;
/// The range of [`Locks`] that stands for storing the index.
const TURN: BlockRange = BlockRange { device: u8::MAX, first: 0, end: 1 };

/// The trust in the content of a cache.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Trust {
    /// Somebody else may have written to the slow devices.
    Cold,
    /// Nobody did since the cache was served last, cleanly or not.
    Warm,
}

/// Records, not on the cache device, that the cache must be opened cold from now on, and the bytes
/// that only the cache device has. Durable when it returns.
pub type Distrust = Box<dyn Fn(&[Dirty]) -> Result<()> + Send + Sync>;

/// The attached slow devices, by their numbers.
pub(crate) type Backings = [Option<Arc<Backing>>; DEVICES_MAX];

/// A cache device.
pub struct CacheStore<C> {
    pub(crate) file: C,
    id: [u8; 16],
    pub(crate) layout: Layout,
    trust: Trust,
    sets: Sets,
    pub(crate) locks: Locks,
    /// Dirty blocks; `None` if the cache has no room for a log.
    pub(crate) log: Option<Log>,
    backings: Mutex<Backings>,
    /// Bytes that an earlier process has lost with the cache device.
    pub(crate) gone: Vec<Dirty>,
    /// Threads that wait until more is written back.
    pub(crate) waiting: AtomicU64,
    residents: Mutex<Residents>,
    head: Mutex<Super>,
    epoch: u64,
    errors: AtomicU32,
    pub(crate) overhead: Overhead,
    health: Mutex<Health>,
    distrust: Distrust,
}

/// The policy, and the blocks that it keeps in memory.
pub(crate) struct Residents {
    pub(crate) policy: BlockPolicy,
    memory: HashMap<Key, Pages>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Health {
    Good,
    /// It failed, and this is recorded.
    Failed,
}

/// A block that has left memory for a slot, with its lock.
struct Leaving<'a> {
    key: Key,
    slot: Slot,
    bytes: Pages,
    _locked: Locked<'a>,
}

/// Makes a new cache on `file` of `size` bytes, and overwrites its beginning.
pub fn create(file: &impl LocalFile, size: u64, id: [u8; 16]) -> Result<()> {
    create_with(file, Layout::new(size)?, id)
}

/// [`create`] with a layout of the caller's.
pub fn create_with(file: &impl LocalFile, layout: Layout, id: [u8; 16]) -> Result<()> {
    write_new(file, &Super::new(id, layout))
}

/// Writes the superblock of a new cache.
pub(crate) fn write_new(file: &impl LocalFile, head: &Super) -> Result<()> {
    let block = head.encode();
    for copy in 0..2 {
        file.write_at(copy * BLOCK_SIZE, &block.0)?;
    }
    file.sync()
}

/// Has the cache on `file` take a device or file that has become larger, `size` bytes now. Blocks
/// stay cached, and dirty. Nothing else uses the cache meanwhile. `Invalid` if it cannot grow so.
pub fn grow(file: &impl LocalFile, size: u64) -> Result<()> {
    let mut head = read_super(file, size)?;
    head.layout = head.layout.grown(size)?;
    // Both copies: by the former one, dirty blocks in the new part of the log would be lost.
    for _ in 0..2 {
        head.generation += 1;
        file.write_at(head.generation % 2 * BLOCK_SIZE, &head.encode().0)?;
        file.sync()?;
    }
    Ok(())
}

/// The layout that [`grow`] gives the cache on `file`, which has `now` bytes, once that has `size`
/// bytes. Nothing is written. `Invalid` if it cannot grow so.
pub fn growth(file: &impl LocalFile, now: u64, size: u64) -> Result<Layout> {
    read_super(file, now)?.layout.grown(size)
}

/// Overwrites the superblocks: there is no cache any more.
pub fn destroy(file: &impl LocalFile) -> Result<()> {
    for copy in 0..2 {
        file.write_at(copy * BLOCK_SIZE, &Block::zeroed().0)?;
    }
    file.sync()
}

/// The superblock of the cache on `file`: the newer of two. Errors as of [`Super::decode`].
pub fn read_super(file: &impl LocalFile, size: u64) -> Result<Super> {
    let mut block = Block::zeroed();
    let mut copies = Vec::new();
    for copy in 0..2 {
        file.read_at(copy * BLOCK_SIZE, &mut block.0)?;
        copies.push(Super::decode(&block, size));
    }
    let order = |copy: &Result<Super>| match copy {
        Ok(copy) => (2, copy.generation),
        // Of two errors the one that says more.
        Err(error) => (u8::from(error.kind() != ErrorKind::NotFound), 0),
    };
    copies.into_iter().max_by_key(order).unwrap_or_else(|| Super::decode(&block, size))
}

/// The bytes that only the cache on `file` has. Nothing is written.
pub fn dirty_in(file: &impl LocalFile, size: u64) -> Result<Vec<Dirty>> {
    let head = read_super(file, size)?;
    if head.layout.log_blocks == 0 {
        return Ok(Vec::new());
    }
    let known = head.devices.iter().enumerate().filter(|(_, record)| record.used.get() != 0);
    let known = known.map(|(number, record)| (number as u8, record.name()));
    Ok(dirty_of(known, &found_in(file, &head)?.map))
}

/// The log of a cache.
fn found_in(file: &impl LocalFile, head: &Super) -> Result<Recovered> {
    // Records of an unused number are ignored: its next device is another one.
    let tails = head.devices.each_ref().map(|record| match record.used.get() {
        0 => u64::MAX,
        _ => record.tail.get(),
    });
    let blocks_max = head.layout.blocks_max();
    recover(file, &head.layout, &head.log, head.id, blocks_max, &tails)
}

impl<C: LocalFile> CacheStore<C> {
    /// Opens the cache on `file`, a device or file of `size` bytes.
    pub fn open(
        file: C,
        size: u64,
        trust: Trust,
        kind: PolicyKind,
        distrust: Distrust,
    ) -> Result<Self> {
        let mut head = read_super(&file, size)?;
        if trust == Trust::Cold {
            head.epoch += 1;
        }
        let log = match head.layout.log_blocks {
            0 => None,
            _ => {
                let mut found = found_in(&file, &head)?;
                if head.log.open.is_some() {
                    // A record that the former process still writes must not count.
                    head.log.begin(found.generation + 1, found.next);
                    (found.generation, found.first) = (found.generation + 1, found.next);
                }
                Some(Log::new(head.layout, head.id, found))
            }
        };
        let mut store = Self::new(file, head, trust, kind, distrust);
        store.log = log;
        if trust == Trust::Warm {
            load(&store.file, &store.head().clone(), &store.sets)?;
            // A slot of a dirty block is older than its version in the log.
            store.drop_blocks(|key| store.log.as_ref().is_some_and(|log| log.find(key).is_some()));
        }
        // A cold cache must be cold for a later warm start, too, whichever copy that finds.
        store.store_head(|_| ())?;
        store.store_head(|_| ())?;
        Ok(store)
    }

    /// A cache that has failed before, with these bytes: devices are served without it.
    pub fn failed(file: C, gone: Vec<Dirty>) -> Result<Self> {
        let head = Super::new([0; 16], Layout::new(SIZE_MIN)?);
        let mut store = Self::new(file, head, Trust::Cold, PolicyKind::Fifo, Box::new(|_| Ok(())));
        store.gone = gone;
        *store.health.lock().unwrap_or_else(PoisonError::into_inner) = Health::Failed;
        Ok(store)
    }

    fn new(file: C, head: Super, trust: Trust, kind: PolicyKind, distrust: Distrust) -> Self {
        let sets = Sets::of(&head.layout.sets_of_extents());
        let policy = BlockPolicy::new(kind, &sets);
        Self {
            id: head.id,
            layout: head.layout,
            trust,
            sets,
            locks: Locks::default(),
            log: None,
            backings: Mutex::default(),
            gone: Vec::new(),
            waiting: AtomicU64::new(0),
            residents: Mutex::new(Residents { policy, memory: HashMap::new() }),
            epoch: head.epoch,
            head: Mutex::new(head),
            errors: AtomicU32::new(0),
            overhead: Overhead::default(),
            health: Mutex::new(Health::Good),
            distrust,
            file,
        }
    }

    /// True if it can have dirty blocks.
    pub fn has_log(&self) -> bool {
        self.log.is_some()
    }

    /// The trust in the content at the start.
    pub fn trust(&self) -> Trust {
        self.trust
    }

    /// The index.
    pub fn sets(&self) -> &Sets {
        &self.sets
    }

    /// The cache device.
    pub fn file(&self) -> &C {
        &self.file
    }

    /// Its id.
    pub fn id(&self) -> [u8; 16] {
        self.id
    }

    /// Replaces the policy.
    pub fn set_policy(&self, kind: PolicyKind) {
        let mut residents = self.residents();
        if residents.policy.kind() != kind {
            // Slots that are being filled stay reserved.
            let policy = BlockPolicy::new(kind, &self.sets);
            residents.policy.succeed(policy);
            residents.memory.clear();
        }
    }

    /// The policy's kind.
    pub fn policy(&self) -> PolicyKind {
        self.residents().policy.kind()
    }

    /// Blocks in memory.
    pub fn in_memory(&self) -> u64 {
        self.residents().memory.len() as u64
    }

    /// The turn to store the index, the superblock or an identity.
    pub(crate) fn lock_turn(&self) -> Locked<'_> {
        self.locks.lock(TURN)
    }

    pub(crate) fn backings(&self) -> MutexGuard<'_, Backings> {
        self.backings.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn residents(&self) -> MutexGuard<'_, Residents> {
        self.residents.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn head(&self) -> MutexGuard<'_, Super> {
        self.head.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The cache's identity, for the log.
    fn shown_id(&self) -> String {
        format!("{:032x}", u128::from_be_bytes(self.id()))
    }

    /// True once the cache device has failed: requests bypass it.
    pub fn has_failed(&self) -> bool {
        *self.health.lock().unwrap_or_else(PoisonError::into_inner) == Health::Failed
    }

    /// The cache device failed: records that, and bypasses it from now on.
    pub(crate) fn give_up(&self, error: &Error) -> Result<()> {
        // No record may come after those that are told.
        self.log.iter().for_each(Log::end);
        let dirty = self.dirty_devices();
        // Held across the record: no write may bypass the cache before it is made, and a cache
        // fails once.
        let mut health = self.health.lock().unwrap_or_else(PoisonError::into_inner);
        if *health == Health::Good {
            let cache = self.shown_id();
            tracing::error!(cache, %error, "the cache device failed: requests bypass it");
            (self.distrust)(&dirty)?;
            *health = Health::Failed;
        }
        Ok(())
    }

    /// Counts an error of a slot or of the log.
    pub(crate) fn note_error(&self, counts: &Counts, error: &Error) {
        counts.add(Count::CacheErrors, 1);
        if self.errors.fetch_add(1, SeqCst) + 1 == ERRORS_MAX {
            if let Err(error) = self.give_up(error) {
                let cache = self.shown_id();
                tracing::error!(cache, %error, "cannot record that the cache device failed");
                self.errors.store(ERRORS_MAX / 2, SeqCst);
            }
        } else {
            tracing::warn!(cache = self.shown_id(), %error, "the cache device has an error");
        }
    }

    /// Reads the block of `key` from its slot or memory, for the holder of its lock; `None` if it
    /// is in neither.
    pub(crate) fn get(&self, key: Key, bytes: &mut [u8], counts: &Counts) -> Option<HitTier> {
        let mut residents = self.residents();
        let hit = residents.policy.hit_memory(key);
        if hit && let Some(block) = residents.memory.get(&key) {
            bytes.copy_from_slice(&block.bytes()[..bytes.len()]);
            counts.add(Count::MemoryHitBytes, BLOCK_SIZE);
            return Some(HitTier::Memory);
        }
        let slot = self.sets.find(key)?;
        residents.policy.hit(&self.sets, key, slot);
        drop(residents);
        match self.file.read_at(self.layout.slot_at(slot), bytes) {
            Ok(()) if self.sets.check(slot) == check_of(key, bytes) => {
                counts.add(Count::CacheHitBytes, BLOCK_SIZE);
                return Some(HitTier::Cache);
            }
            // Nobody else fills a slot of this key meanwhile; another key's block may have come.
            Ok(()) if self.sets.find(key) == Some(slot) => counts.add(Count::CorruptBlocks, 1),
            Ok(()) => {}
            Err(error) => self.note_error(counts, &error),
        }
        if self.sets.find(key) == Some(slot) {
            self.sets.clear(slot);
        }
        None
    }

    /// The place of the block on the cache device, for a reader that checks it with
    /// [`Self::is_block`].
    pub(crate) fn place_of(&self, key: Key) -> Option<ByteRange> {
        let slot = self.sets.find(key)?;
        ByteRange::at(self.layout.slot_at(slot), BLOCK_SIZE)
    }

    /// True if `bytes`, which were read at `place`, are the block of `key`.
    pub(crate) fn is_block(
        &self,
        key: Key,
        place: ByteRange,
        bytes: &[u8],
        counts: &Counts,
    ) -> bool {
        let slot = self.sets.find(key).filter(|slot| self.layout.slot_at(*slot) == place.start());
        let Some(slot) = slot.filter(|slot| self.sets.check(*slot) == check_of(key, bytes)) else {
            return false;
        };
        counts.add(Count::CacheHitBytes, BLOCK_SIZE);
        match self.residents.try_lock() {
            Ok(mut residents) => residents.policy.hit(&self.sets, key, slot),
            // Not counted in a sample; the clock counts.
            Err(_) => self.sets.touch(slot),
        }
        true
    }

    /// Keeps a block that was missed, if the policy wants it; for the holder of its lock.
    pub(crate) fn admit(&self, key: Key, bytes: &[u8], counts: &Counts) {
        if self.has_failed() {
            return;
        }
        let (fate, leaving) = {
            let mut residents = self.residents();
            let outcome = residents.policy.miss(&self.sets, key);
            if outcome.fate == Fate::Memory {
                match Pages::zeroed(BLOCK_SIZE) {
                    Some(mut page) => {
                        page.bytes_mut().copy_from_slice(bytes);
                        residents.memory.insert(key, page);
                    }
                    None => drop(residents.policy.forget(key)),
                }
            }
            let leaves = outcome.leaves;
            (outcome.fate, leaves.and_then(|(key, fate)| self.leave(&mut residents, key, fate)))
        };
        if let Fate::Slot(slot) = fate {
            self.fill(key, slot, bytes, counts);
        }
        if let Some(leaving) = leaving {
            self.fill(leaving.key, leaving.slot, leaving.bytes.bytes(), counts);
        }
    }

    /// Takes a block out of memory, and its lock, before anybody can write it.
    fn leave(&self, residents: &mut Residents, key: Key, fate: Fate) -> Option<Leaving<'_>> {
        let bytes = residents.memory.remove(&key);
        let Fate::Slot(slot) = fate else { return None };
        let span = BlockRange { device: key.device, first: key.block, end: key.block + 1 };
        match (bytes, self.locks.try_lock(span)) {
            (Some(bytes), Some(_locked)) => Some(Leaving { key, slot, bytes, _locked }),
            // Somebody reads or writes it: it is not worth a wait.
            _ => {
                residents.policy.release(slot);
                None
            }
        }
    }

    /// Writes a block into a slot that is reserved for it.
    pub(crate) fn fill(&self, key: Key, slot: Slot, bytes: &[u8], counts: &Counts) {
        match self.file.write_at(self.layout.slot_at(slot), bytes) {
            Ok(()) => {
                self.sets.publish(slot, key, check_of(key, bytes));
                counts.add(Count::CacheWrittenBytes, BLOCK_SIZE);
                self.overhead.note_blocks(key.device, 1);
            }
            Err(error) => self.note_error(counts, &error),
        }
        self.release(slot);
    }

    pub(crate) fn release(&self, slot: Slot) {
        self.residents().policy.release(slot);
    }

    /// Forgets a block that is about to change, for the holder of its lock; returns its slot, which
    /// stays reserved for the new content.
    pub(crate) fn forget(&self, key: Key) -> Option<Slot> {
        let mut residents = self.residents();
        residents.memory.remove(&key);
        residents.policy.forget(key);
        let slot = self.sets.find(key)?;
        self.sets.clear(slot);
        residents.policy.reserve(slot)
    }

    /// Empties the slots whose blocks are to go, and returns their number.
    pub(crate) fn drop_blocks(&self, goes: impl Fn(Key) -> bool) -> u64 {
        let mut dropped = 0;
        for slot in 0..self.sets.slots() {
            if self.sets.key_of(slot).is_some_and(&goes) {
                self.sets.clear(slot);
                dropped += 1;
            }
        }
        let mut residents = self.residents();
        let Residents { policy, memory } = &mut *residents;
        memory.retain(|key, _| {
            let stays = !goes(*key);
            if !stays {
                policy.forget(*key);
            }
            stays
        });
        dropped
    }

    /// Counts bytes beside the blocks that are of no device alone.
    pub(crate) fn note_overhead(&self, bytes: u64) {
        self.overhead.note(None, bytes);
    }

    /// Stores the changed parts of the index, durably. The caller gives up the cache if it fails.
    pub(crate) fn store_index(&self) -> Result<()> {
        let _turn = self.locks.lock(TURN);
        let mut taken = Vec::new();
        // Bytes that were not synced may be lost, whichever part failed.
        let give_back = |taken: &[u32]| taken.iter().for_each(|part| self.sets.give_back(*part));
        for part in 0..self.sets.parts() {
            if self.sets.take_changed(part) {
                taken.push(part);
                let block = encode_part(part, self.sets.part(part), self.epoch, self.id);
                let stored = self.file.write_at(self.layout.part_at(part), &block.0);
                stored.inspect_err(|_| give_back(&taken))?;
                self.note_overhead(BLOCK_SIZE);
            }
        }
        self.sync().inspect_err(|_| give_back(&taken))
    }

    /// Makes what was written to the cache device durable.
    pub(crate) fn sync(&self) -> Result<()> {
        let log = self.log.as_ref();
        self.file.sync().inspect_err(|_| log.into_iter().for_each(Log::note_lost))
    }

    /// Changes the superblock, durably.
    pub(crate) fn store_head<T>(&self, change: impl FnOnce(&mut Super) -> T) -> Result<T> {
        self.store_head_of(None, change)
    }

    /// The same for one device.
    pub(crate) fn store_head_of<T>(
        &self,
        device: Option<u8>,
        change: impl FnOnce(&mut Super) -> T,
    ) -> Result<T> {
        let _turn = self.locks.lock(TURN);
        let (block, copy, changed) = {
            let mut head = self.head();
            let changed = change(&mut head);
            head.generation += 1;
            (head.encode(), head.generation % 2, changed)
        };
        let stored = self.file.write_at(copy * BLOCK_SIZE, &block.0).and_then(|()| self.sync());
        self.overhead.note(device, BLOCK_SIZE);
        if stored.is_err() {
            // This copy may be damaged: the next write takes it again, and leaves the other one.
            self.head().generation -= 1;
        }
        stored.map(|()| changed)
    }
}

/// The stored index.
fn load(file: &impl LocalFile, head: &Super, sets: &Sets) -> Result<()> {
    let no_memory = |_| Error::new(ErrorKind::Unavailable, "no memory for a part of the index");
    let mut blocks = Block::new_vec_zeroed(PARTS_A_READ as usize).map_err(no_memory)?;
    let reads = head.layout.parts().flat_map(|parts| {
        let firsts = parts.clone().step_by(PARTS_A_READ as usize);
        firsts.map(move |first| (first, PARTS_A_READ.min(parts.end - first)))
    });
    for (first, count) in reads {
        let blocks = &mut blocks[..count as usize];
        file.read_at(head.layout.part_at(first), blocks.as_mut_bytes())?;
        for (part, block) in (first..).zip(blocks.iter()) {
            if let Some(words) = decode_part(block, part, head.epoch, head.id) {
                sets.load_part(part, words);
            }
        }
    }
    Ok(())
}
