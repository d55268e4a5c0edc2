//! Admission of a chunk to the disk.
//!
//! ```text
//!   bounds ─► policy, rules of fill ─► a place ─► one direct write ─► slot, index ─► journal, later
//!     │ full        │ not wanted        │ none        │ failed
//!     └─────────────┴───────────────────┴─────────────┴──► refused
//! ```
//!
//! Invariant: a chunk is found after its bytes were written, never before
//! (`tests/interleavings.rs`).

use burgeon_block::{BLOCK_SIZE, ChecksumKind, Error, ErrorKind, Pages, Result};

use crate::{
    ChunkKey, Place, Why,
    admin::Admin,
    hold,
    journal::Event,
    owners::Number,
    policy::Pressure,
    settings::Bounds,
    shared::{Shared, lock},
    slots::{About, Chunk},
};

impl Shared {
    /// False if the rules of fill forbid the chunk now.
    pub(crate) fn has_room_for_fill(&self, key: &ChunkKey, len: u64, owner: Number) -> bool {
        let Ok(bounds) = self.bounds_now() else { return false };
        let admin = lock(&self.admin);
        if admin.owners.broken(owner, len.next_multiple_of(BLOCK_SIZE)).is_some() {
            return false;
        }
        let is_held = admin.held.contains_key(key);
        let taken = if is_held { admin.held_bytes } else { admin.used };
        taken + len <= hold::most(bounds.limit)
    }

    /// True if the policy, the owner's limits and the rules of fill want the chunk in a cache with
    /// these bounds.
    fn wants(&self, key: &ChunkKey, len: u64, (why, owner): (Why, Number), bounds: Bounds) -> bool {
        let hash = self.index.hash(key);
        let mut guard = lock(&self.admin);
        let admin = &mut *guard;
        if why == Why::Read {
            admin.policy.missed(hash, len as u32);
            admin.reuse.read(hash, len as u32, bounds.limit);
        }
        // Filling pushes nothing out that was read, and a prefetch nothing within a limit of its
        // owner.
        let is_fill = matches!(why, Why::Fill | Why::Pin);
        let is_beyond = match why {
            Why::Fill | Why::Pin | Why::Prefetch => admin.owners.broken(owner, len).is_some(),
            Why::Read => admin.owners.never_fits(owner, len),
        };
        if is_beyond {
            return false;
        }
        let above = bounds.free.saturating_sub(bounds.floor);
        let is_full = admin.used + len + bounds.headroom > bounds.limit
            || admin.started - bounds.finished + len + bounds.headroom > above;
        let is_held = admin.held.contains_key(key);
        if is_held {
            return admin.held_bytes + len <= hold::most(bounds.limit);
        }
        if is_fill && (is_full || admin.used + len > hold::most(bounds.limit)) {
            return false;
        }
        if !is_full {
            return true;
        }
        self.look_at_hits(admin, bounds.limit);
        admin.policy.admit(hash, len as u32, why, Pressure::Full)
    }

    /// [`crate::ChunkStore::admit`] for a chunk of an owner that goes to the disk; `Ok(None)` if it
    /// is refused.
    pub(crate) fn keep(
        &self,
        key: ChunkKey,
        bytes: &[u8],
        (why, owner): (Why, Number),
    ) -> Result<Option<Place>> {
        let blocks = (bytes.len() as u64).div_ceil(BLOCK_SIZE) as u32;
        let len = u64::from(blocks) * BLOCK_SIZE;
        let bounds = self.bounds_now()?;
        if !self.wants(&key, len, (why, owner), bounds) {
            return Ok(None);
        }
        // Before the chunk is written: the owner's chunks may all be held.
        if !self.make_room_of(&mut lock(&self.admin), owner, len, bounds.limit) {
            return Ok(None);
        }
        let reserved = self.reserve(blocks, bounds);
        let location = match reserved {
            Ok(Some(location)) => location,
            Ok(None) => {
                self.wake();
                return Ok(None);
            }
            Err(error) if error.kind() == ErrorKind::Unavailable => return Ok(None),
            Err(error) => return Err(error),
        };
        let (written, crc) = match bytes.len() as u64 == len {
            true => (self.write(location, bytes), ChecksumKind::Crc32c.of(bytes)),
            false => match Pages::zeroed(len) {
                Some(mut pages) => {
                    pages.bytes_mut()[..bytes.len()].copy_from_slice(bytes);
                    (self.write(location, pages.bytes()), ChecksumKind::Crc32c.of(pages.bytes()))
                }
                None => (Err(Error::new(ErrorKind::LocalIo, "no memory for a chunk")), 0),
            },
        };
        if let Err(error) = written {
            self.abandon(location, blocks, true);
            return Err(error);
        }
        self.gate.written();
        let chunk = Chunk { key, location, about: About::new(blocks, crc as u32) };
        let mut admin = lock(&self.admin);
        // The folder may have been removed since the place was reserved, and the arena with it.
        let is_open = self.arenas.get(location.arena).is_some_and(|arena| arena.id() != 0);
        let may_come = is_open && self.make_room_of(&mut admin, owner, len, bounds.limit);
        let inserted =
            may_come.then(|| admin.insert(&chunk, (why, owner), &self.slots, &self.index));
        let Some(place) = inserted.flatten() else {
            drop(admin);
            self.abandon(location, blocks, false);
            return Ok(self.place_of(&key));
        };
        admin.finished += len;
        admin.record(Event::Admitted, &chunk, &self.arenas);
        let is_low = admin.used + bounds.headroom > bounds.limit;
        drop(admin);
        self.tally.admitted.add(len);
        if is_low || bounds.free < bounds.floor + bounds.headroom {
            self.wake();
        }
        Ok(Some(place))
    }

    /// Evicts chunks of the owner until `len` more bytes are within its limits. False if its chunks
    /// are held.
    fn make_room_of(&self, admin: &mut Admin, owner: Number, len: u64, limit: u64) -> bool {
        if admin.owners.broken(owner, len).is_some() {
            self.look_at_hits(admin, limit);
        }
        while let Some(broken) = admin.owners.broken(owner, len) {
            let evicted = admin.evict_of(broken, &self.slots, &self.index, &self.arenas);
            let Some(evicted) = evicted else { return false };
            self.tally.evicted.add(evicted);
        }
        true
    }
}
