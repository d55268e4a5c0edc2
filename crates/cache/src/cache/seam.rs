//! The cache behind the seam of volumes.
//!
//! ```text
//!   read, try_read ──► resolve: a slot's place, no lock ──► arena ── in memory: read
//!                                                            └─ on a disk: try_read names the place
//!   admit ──► the disk (`Shared::keep`), else memory
//! ```

use std::{os::fd::BorrowedFd, sync::atomic::Ordering::Relaxed};

use burgeon_block::{BLOCK_SIZE, ByteRange, FileRange, Result};

use super::Cache;
use crate::{
    CHUNK_LEN_MAX, CacheState, ChunkKey, ChunkStore, Here, Hold, Place, Why,
    arena::Arena,
    hold,
    memory_fifo::MemoryFifo,
    owners::{NOBODY, Number},
    shared::{Shared, lock},
};

impl ChunkStore for Cache {
    fn find(&self, key: &ChunkKey) -> Option<Place> {
        self.shared.place_of(key).or_else(|| self.shared.fifo.find(key))
    }

    fn read(&self, place: Place, offset: u32, buf: &mut [u8]) -> bool {
        let shared = &*self.shared;
        if MemoryFifo::is_here(place) {
            return shared.fifo.read(place, offset, buf);
        }
        let located = shared.locate(place, offset, buf.len() as u64);
        located.is_some_and(|(_, arena, offset)| shared.read_at(arena, offset, buf))
    }

    #[inline]
    fn try_read(&self, place: Place, offset: u32, buf: &mut [u8]) -> Here {
        let shared = &*self.shared;
        let is_read = if MemoryFifo::is_here(place) {
            shared.fifo.read(place, offset, buf)
        } else {
            let len = buf.len() as u64;
            let Some((file, arena, offset)) = shared.locate(place, offset, len) else {
                return Here::Gone;
            };
            match ByteRange::at(offset, len) {
                Some(range) if arena.waits => return Here::Local(FileRange { file, range }),
                _ => shared.read_at(arena, offset, buf),
            }
        };
        if is_read { Here::Read } else { Here::Gone }
    }

    fn local_file(&self, file: u32) -> Option<BorrowedFd<'_>> {
        self.shared.arenas.get(file)?.file.waiting_fd()
    }

    fn is_lasting(&self, place: Place) -> bool {
        !MemoryFifo::is_here(place)
    }

    #[inline]
    fn touch(&self, place: Place) {
        self.shared.slots.touch(place);
    }

    fn doubt(&self, place: Place, key: &ChunkKey) {
        let shared = &*self.shared;
        shared.fifo.forget(key, Some(place));
        let mut admin = lock(&shared.admin);
        let Some(slot) = shared.index.find(key, &shared.slots) else { return };
        if shared.slots.place(slot) == Some(place) {
            let bytes = admin.remove(slot, &shared.slots, &shared.index, &shared.arenas);
            shared.tally.evicted.add(bytes.unwrap_or_default());
            shared.tally.doubted.add(1);
        }
    }

    fn may_admit(&self, key: &ChunkKey, len: u32, why: Why) -> bool {
        self.may_admit_of(NOBODY, key, len, why)
    }

    fn admit(&self, key: ChunkKey, bytes: &[u8], why: Why) -> Option<Place> {
        self.admit_of(NOBODY, key, bytes, why)
    }

    fn hold(&self, keys: &[ChunkKey]) -> Result<Hold> {
        hold::take(&self.shared, keys)
    }

    fn make_room(&self, bytes: u64) -> u64 {
        let shared = &*self.shared;
        let above = || {
            let bounds = shared.disk.space().map(|space| shared.bounds(space, 0, 0));
            bounds.map_or(0, |bounds| bounds.free.saturating_sub(bounds.floor))
        };
        let free = above();
        if free < bytes {
            self.free(bytes - free);
        }
        above()
    }

    fn state(&self) -> CacheState {
        if self.shared.is_taken.load(Relaxed) {
            return self.shared.gate.state();
        }
        match self.shared.gate.state() {
            CacheState::Writing => {
                CacheState::Stopped { reason: "another server has the cache's folder".to_owned() }
            }
            closed => closed,
        }
    }

    fn sync(&self) -> Result<()> {
        lock(&self.upkeep).sync(&self.shared)
    }
}

impl Cache {
    /// [`ChunkStore::may_admit`] for a chunk of this owner.
    pub(super) fn may_admit_of(&self, owner: Number, key: &ChunkKey, len: u32, why: Why) -> bool {
        let shared = &*self.shared;
        let is_open = shared.is_taken.load(Relaxed) && shared.gate.is_open();
        let is_possible = match why {
            Why::Read => is_open || lock(&shared.settings).memory > 0,
            Why::Prefetch => {
                let has_room = lock(&shared.admin).owners.broken(owner, len.into()).is_none();
                has_room && (is_open || lock(&shared.settings).memory > 0)
            }
            // The memory is not for chunks that nobody waits for.
            Why::Fill | Why::Pin => is_open && shared.has_room_for_fill(key, len.into(), owner),
        };
        len <= CHUNK_LEN_MAX && is_possible
    }

    /// [`ChunkStore::admit`] for a chunk of this owner.
    pub(super) fn admit_of(
        &self,
        owner: Number,
        key: ChunkKey,
        bytes: &[u8],
        why: Why,
    ) -> Option<Place> {
        if bytes.is_empty() || bytes.len() > CHUNK_LEN_MAX as usize {
            return None;
        }
        let shared = &*self.shared;
        if let Some(place) = shared.place_of(&key) {
            return Some(place);
        }
        let is_open = shared.is_taken.load(Relaxed) && shared.gate.is_open();
        let kept = if is_open { shared.keep(key, bytes, (why, owner)) } else { Ok(None) };
        match kept {
            Ok(Some(place)) => {
                shared.fifo.forget(&key, None);
                return Some(place);
            }
            Ok(None) => {}
            Err(error) => shared.failed(&error),
        }
        shared.tally.refused.add((bytes.len() as u64).next_multiple_of(BLOCK_SIZE));
        // Chunks that nobody waits for would only push those out that are being read.
        matches!(why, Why::Read | Why::Prefetch).then(|| shared.fifo.insert(key, bytes))?
    }
}

impl Shared {
    /// The number of the arena, itself, and the offset in it, of a part of the chunk at `place`.
    #[inline]
    fn locate(&self, place: Place, offset: u32, len: u64) -> Option<(u32, &Arena, u64)> {
        let (location, blocks) = self.slots.resolve(place)?;
        if u64::from(offset) + len > u64::from(blocks) * BLOCK_SIZE {
            return None;
        }
        let arena = self.arenas.get(location.arena)?;
        Some((location.arena, arena, u64::from(location.block) * BLOCK_SIZE + u64::from(offset)))
    }

    #[inline]
    fn read_at(&self, arena: &Arena, offset: u64, buf: &mut [u8]) -> bool {
        let is_read = arena.file.read_at(offset, buf).is_ok();
        if !is_read {
            self.tally.read_errors.add(1);
        }
        is_read
    }
}
