//! The cache as one owner of chunks sees it, and limits of what owners have in it.

use std::{os::fd::BorrowedFd, sync::Arc};

use burgeon_block::Result;

use super::Cache;
use crate::{
    CacheState, ChunkKey, ChunkStore, Here, Hold, Place, Why,
    owners::{ChunkOwner, NOBODY, Number, OwnedBytes, Scope},
    shared::lock,
    slots::parts,
};

/// Chunks that are claimed, or evicted, under one hold of the store's lock.
const BATCH: usize = 256;

/// The cache, whose chunks that come through here are those of one owner.
struct OwnedStore {
    cache: Arc<Cache>,
    owner: Number,
}

impl Cache {
    /// The same cache, in which admitted chunks are those of `owner`.
    pub fn for_owner(self: &Arc<Self>, owner: &ChunkOwner) -> Arc<dyn ChunkStore> {
        let number = lock(&self.shared.admin).owners.join(owner);
        Arc::new(OwnedStore { cache: Arc::clone(self), owner: number })
    }

    /// The chunks with these keys that nobody owns are those of `owner` from now on. Chunks beyond
    /// its limits are evicted before this returns.
    pub fn claim(&self, owner: &ChunkOwner, keys: &[ChunkKey]) {
        let shared = &*self.shared;
        for keys in keys.chunks(BATCH) {
            let mut admin = lock(&shared.admin);
            let number = admin.owners.join(owner);
            for key in keys {
                let Some(slot) = shared.index.find(key, &shared.slots) else { continue };
                let (Some(chunk), Some(place)) =
                    (shared.slots.chunk(slot), shared.slots.place(slot))
                else {
                    continue;
                };
                let is_free = admin.owners.of(slot) == NOBODY && !admin.is_lent(slot);
                if number != NOBODY && is_free {
                    let bytes = chunk.about.bytes();
                    admin.owners.went(slot, bytes);
                    admin.owners.came((slot, place), bytes, number, &shared.slots);
                }
            }
            admin.owners.leave(number);
        }
        self.keep_limits();
    }

    /// Replaces the limits of owners' chunks. Chunks beyond them are evicted before this returns,
    /// as far as they are not held.
    pub fn limit_owners(&self, limits: Vec<(Scope, u64)>) {
        lock(&self.shared.admin).owners.set_limits(limits, &self.shared.slots);
        self.keep_limits();
    }

    /// The limits of owners' chunks.
    pub fn limits(&self) -> Vec<(Scope, u64)> {
        lock(&self.shared.admin).owners.limits()
    }

    /// True if one of them is about `owner`.
    pub fn is_limited(&self, owner: &ChunkOwner) -> bool {
        self.limits().iter().any(|(scope, _)| scope.has(owner))
    }

    fn keep_limits(&self) {
        let count = self.limits().len();
        (0..count).for_each(|limit| self.keep_limit(limit));
        self.shared.wake();
    }

    /// Evicts chunks of one limit until it holds, or all that are left are held.
    fn keep_limit(&self, limit: usize) {
        let shared = &*self.shared;
        let mut in_vain = 0;
        loop {
            let mut admin = lock(&shared.admin);
            for _ in 0..BATCH {
                let Some(looks) = admin.owners.looks_if_exceeded(limit) else { return };
                if in_vain > looks {
                    return;
                }
                match admin.evict_of(limit, &shared.slots, &shared.index, &shared.arenas) {
                    Some(evicted) => {
                        shared.tally.evicted.add(evicted);
                        in_vain = 0;
                    }
                    // Others may follow those that are held.
                    None => in_vain += 1,
                }
            }
        }
    }

    /// Bytes of chunks on the disk, by owner.
    pub fn owned_bytes(&self) -> OwnedBytes {
        lock(&self.shared.admin).owners.bytes()
    }
}

impl Drop for OwnedStore {
    fn drop(&mut self) {
        lock(&self.cache.shared.admin).owners.leave(self.owner);
    }
}

impl OwnedStore {
    /// Counts the chunk at `place` as shared, if another owner has brought it.
    fn count_shared(&self, place: Place) {
        let shared = &*self.cache.shared;
        let Some((slot, _)) = parts(place) else { return };
        let owner = lock(&shared.admin).owners.of(slot);
        if owner != NOBODY && owner != self.owner {
            let bytes = shared.slots.chunk(slot).map_or(0, |chunk| chunk.about.bytes());
            shared.tally.shared.add(bytes);
        }
    }
}

impl ChunkStore for OwnedStore {
    /// Volumes remember the place, so that this is asked once a chunk.
    fn find(&self, key: &ChunkKey) -> Option<Place> {
        let place = self.cache.find(key)?;
        self.count_shared(place);
        Some(place)
    }

    fn is_at(&self, place: Place, key: &ChunkKey) -> bool {
        self.cache.is_at(place, key)
    }

    fn read(&self, place: Place, offset: u32, buf: &mut [u8]) -> bool {
        self.cache.read(place, offset, buf)
    }

    fn try_read(&self, place: Place, offset: u32, buf: &mut [u8]) -> Here {
        self.cache.try_read(place, offset, buf)
    }

    fn local_file(&self, file: u32) -> Option<BorrowedFd<'_>> {
        self.cache.local_file(file)
    }

    fn is_lasting(&self, place: Place) -> bool {
        self.cache.is_lasting(place)
    }

    fn touch(&self, place: Place) {
        self.cache.touch(place);
    }

    fn doubt(&self, place: Place, key: &ChunkKey) {
        self.cache.doubt(place, key);
    }

    fn may_admit(&self, key: &ChunkKey, len: u32, why: Why) -> bool {
        self.cache.may_admit_of(self.owner, key, len, why)
    }

    fn admit(&self, key: ChunkKey, bytes: &[u8], why: Why) -> Option<Place> {
        self.cache.admit_of(self.owner, key, bytes, why)
    }

    fn hold(&self, keys: &[ChunkKey]) -> Result<Hold> {
        self.cache.hold(keys)
    }

    fn make_room(&self, bytes: u64) -> u64 {
        self.cache.make_room(bytes)
    }

    fn state(&self) -> CacheState {
        self.cache.state()
    }

    fn sync(&self) -> Result<()> {
        self.cache.sync()
    }
}
