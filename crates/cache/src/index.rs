//! The index: key → slot, in shards with a short lock each.
//!
//! A shard is a table of slot numbers with linear probing. The keys lie in the slots alone, so an
//! entry takes 4 bytes, and 5 to 8 with the free entries of its table.

use std::sync::PoisonError;

use crate::{
    ChunkKey,
    slots::Slots,
    sync::{Mutex, MutexGuard},
};

const SHARDS: usize = 64;
/// Entries of a shard's first table.
const FIRST: usize = 16;

#[derive(Default)]
struct Shard {
    /// 0: free; else the slot's number and one.
    table: Vec<u32>,
    len: usize,
}

pub(crate) struct KeyIndex {
    shards: Box<[Mutex<Shard>]>,
    /// Keeps the makers of images from choosing digests that meet in one place of the table.
    seed: u64,
}

impl KeyIndex {
    pub(crate) fn new(seed: u64) -> Self {
        Self { shards: (0..SHARDS).map(|_| Mutex::new(Shard::default())).collect(), seed }
    }

    /// Makes room for `keys`, so that filling an empty index moves nothing.
    pub(crate) fn reserve(&self, keys: usize) {
        // Some shards get more than their part: a few standard deviations of it.
        let part = keys / SHARDS;
        let len = (part + part / 64 + FIRST) / 4 * 5;
        for shard in &self.shards {
            let mut shard = shard.lock().unwrap_or_else(PoisonError::into_inner);
            if shard.table.is_empty() {
                shard.table = vec![0; len];
            }
        }
    }

    /// The hash of a key: the same as long as this index lives.
    pub(crate) fn hash(&self, key: &ChunkKey) -> u64 {
        let bits = u128::from_le_bytes(*key.as_bytes());
        let (low, high) = (bits as u64 ^ self.seed, (bits >> 64) as u64);
        let product = u128::from(low | 1) * u128::from(high ^ self.seed.rotate_left(32));
        (product as u64 ^ (product >> 64) as u64).wrapping_add(low)
    }

    fn shard(&self, hash: u64) -> MutexGuard<'_, Shard> {
        let shard = &self.shards[(hash >> 58) as usize % SHARDS];
        shard.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn find(&self, key: &ChunkKey, slots: &Slots) -> Option<u32> {
        let hash = self.hash(key);
        let shard = self.shard(hash);
        let at = shard.search(hash, |slot| slots.key(slot).as_ref() == Some(key))?;
        Some(shard.table[at] - 1)
    }

    /// Inserts `key` with the filled `slot`, unless the key has another one, which is returned.
    pub(crate) fn insert(&self, key: &ChunkKey, slot: u32, slots: &Slots) -> Result<(), u32> {
        let hash = self.hash(key);
        let mut shard = self.shard(hash);
        if let Some(at) = shard.search(hash, |slot| slots.key(slot).as_ref() == Some(key)) {
            return Err(shard.table[at] - 1);
        }
        if (shard.len + 1) * 5 > shard.table.len() * 4 {
            shard.grow(|slot| slots.key(slot).map_or(0, |key| self.hash(&key)));
        }
        shard.put(hash, slot + 1);
        shard.len += 1;
        Ok(())
    }

    /// Removes `key`, if it has `slot`.
    pub(crate) fn remove(&self, key: &ChunkKey, slot: u32, slots: &Slots) -> bool {
        let hash = self.hash(key);
        let mut shard = self.shard(hash);
        let Some(at) = shard.search(hash, |other| other == slot) else { return false };
        shard.remove(at, |slot| slots.key(slot).map_or(0, |key| self.hash(&key)));
        shard.len -= 1;
        true
    }
}

impl Shard {
    fn home(&self, hash: u64) -> usize {
        (((hash & u64::from(u32::MAX)) * self.table.len() as u64) >> 32) as usize
    }

    fn next(&self, at: usize) -> usize {
        if at + 1 == self.table.len() { 0 } else { at + 1 }
    }

    fn search(&self, hash: u64, is_it: impl Fn(u32) -> bool) -> Option<usize> {
        if self.table.is_empty() {
            return None;
        }
        let mut at = self.home(hash);
        // At least a fifth of the table is free, so this ends.
        while self.table[at] != 0 {
            if is_it(self.table[at] - 1) {
                return Some(at);
            }
            at = self.next(at);
        }
        None
    }

    fn put(&mut self, hash: u64, entry: u32) {
        let mut at = self.home(hash);
        while self.table[at] != 0 {
            at = self.next(at);
        }
        self.table[at] = entry;
    }

    fn grow(&mut self, hash: impl Fn(u32) -> u64) {
        let len = (self.table.len() + self.table.len() / 2).max(FIRST);
        let old = std::mem::replace(&mut self.table, vec![0; len]);
        for entry in old.into_iter().filter(|entry| *entry != 0) {
            self.put(hash(entry - 1), entry);
        }
    }

    /// Frees the entry `hole`, and moves those back that probed past it.
    fn remove(&mut self, mut hole: usize, hash: impl Fn(u32) -> u64) {
        let len = self.table.len();
        let mut at = self.next(hole);
        while self.table[at] != 0 {
            let home = self.home(hash(self.table[at] - 1));
            if (at + len - home) % len >= (at + len - hole) % len {
                self.table[hole] = self.table[at];
                hole = at;
            }
            at = self.next(at);
        }
        self.table[hole] = 0;
    }
}
