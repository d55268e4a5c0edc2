//! The state of the store under its one lock: the policy, the space in use, the next place, and the
//! chunks still to be punched and recorded. Nobody does I/O under this lock, and no hit takes it.

use std::{collections::HashMap, sync::atomic::Ordering::Relaxed};

use burgeon_block::BLOCK_SIZE;

use crate::{
    ChunkKey, Why,
    arena::Arenas,
    index::KeyIndex,
    journal::{Event, Record},
    owners::{NOBODY, Number, Owners},
    policy::ChunkPolicy,
    reuse::Reuse,
    slots::{Chunk, Location, SLOTS_MAX, Slots},
};

/// Most records that wait to be written; beyond, a checkpoint has to say what they said.
const RECORDS_MAX: usize = 1 << 17;
/// Held chunks that a policy may name in a row before another is looked for.
const HELD_IN_A_ROW: u32 = 64;

/// Space of an arena that nobody needs any more.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) struct Freed {
    pub(crate) location: Location,
    pub(crate) blocks: u32,
}

/// The arena in which the next places lie.
pub(crate) struct Current {
    pub(crate) arena: u32,
    pub(crate) next: u32,
    pub(crate) end: u32,
}

/// Space for chunks in an arena.
pub(crate) enum Reservation {
    At(Location),
    /// The current arena is full: the caller makes the next one.
    MakeArena,
    /// Somebody else makes it just now.
    Wait,
}

pub(crate) struct Admin {
    pub(crate) policy: Box<dyn ChunkPolicy>,
    pub(crate) reuse: Reuse,
    /// Bytes of living chunks that are not lent, of those being written, and of those not punched
    /// yet.
    pub(crate) used: u64,
    /// Bytes whose writes have begun, and those whose writes have returned: never less than is in
    /// flight, if the second is read before the file system's free space and the first after it.
    pub(crate) started: u64,
    pub(crate) finished: u64,
    pub(crate) chunks: u64,
    /// Lent chunks (`lending.rs`): a bit a slot, none beyond its end; their number and bytes.
    lent: Vec<u64>,
    pub(crate) lent_chunks: u64,
    pub(crate) lent_bytes: u64,
    free: Vec<u32>,
    pub(crate) slots_end: u32,
    pub(crate) current: Option<Current>,
    pub(crate) making: bool,
    pub(crate) held: HashMap<ChunkKey, u32>,
    pub(crate) held_bytes: u64,
    pub(crate) owners: Owners,
    pub(crate) freed: Vec<Freed>,
    pub(crate) records: Vec<Record>,
    pub(crate) records_lost: bool,
    scan: u32,
}

impl Admin {
    pub(crate) fn new(policy: Box<dyn ChunkPolicy>) -> Self {
        Self {
            policy,
            reuse: Reuse::default(),
            used: 0,
            started: 0,
            finished: 0,
            chunks: 0,
            lent: Vec::new(),
            lent_chunks: 0,
            lent_bytes: 0,
            free: Vec::new(),
            slots_end: 0,
            current: None,
            making: false,
            held: HashMap::new(),
            held_bytes: 0,
            owners: Owners::default(),
            freed: Vec::new(),
            records: Vec::new(),
            records_lost: false,
            scan: 0,
        }
    }

    /// The next place for `blocks`, which counts as used and in flight from now on.
    pub(crate) fn reserve(&mut self, blocks: u32, arenas: &Arenas) -> Reservation {
        let fitting = self.current.as_mut().filter(|current| current.end - current.next >= blocks);
        let Some(current) = fitting else {
            if self.making {
                return Reservation::Wait;
            }
            self.current = None;
            self.making = true;
            return Reservation::MakeArena;
        };
        let location = Location { arena: current.arena, block: current.next };
        current.next += blocks;
        let bytes = u64::from(blocks) * BLOCK_SIZE;
        if let Some(arena) = arenas.get(location.arena) {
            arena.live.fetch_add(bytes, Relaxed);
            arena.len.store(u64::from(current.next) * BLOCK_SIZE, Relaxed);
        }
        self.used += bytes;
        self.started += bytes;
        Reservation::At(location)
    }

    pub(crate) fn record(&mut self, event: Event, chunk: &Chunk, arenas: &Arenas) {
        if self.records.len() >= RECORDS_MAX {
            self.records_lost = true;
            return;
        }
        let Some(arena) = arenas.get(chunk.location.arena) else { return };
        self.records.push(Record {
            event,
            key: chunk.key,
            arena: arena.id(),
            block: chunk.location.block,
            about: chunk.about.to_bits(),
        });
    }

    /// Makes the written `chunk` found, as one of `owner`. `None` if its key is found already, or
    /// all slots are taken.
    pub(crate) fn insert(
        &mut self,
        chunk: &Chunk,
        (why, owner): (Why, Number),
        slots: &Slots,
        index: &KeyIndex,
    ) -> Option<crate::Place> {
        let slot = match self.free.pop() {
            Some(slot) => slot,
            None if self.slots_end < SLOTS_MAX => {
                self.slots_end += 1;
                self.slots_end - 1
            }
            None => return None,
        };
        let place = slots.fill(slot, chunk);
        if index.insert(&chunk.key, slot, slots).is_err() {
            slots.vacate(slot);
            self.free.push(slot);
            return None;
        }
        let bytes = chunk.about.blocks() * BLOCK_SIZE as u32;
        self.chunks += 1;
        if self.held.contains_key(&chunk.key) {
            self.held_bytes += u64::from(bytes);
        }
        self.policy.inserted(slot, index.hash(&chunk.key), bytes, why);
        if let Some(place) = place {
            self.owners.came((slot, place), bytes.into(), owner, slots);
        }
        place
    }

    /// Forgets the chunk in `slot`; its space is freed by the next punch.
    pub(crate) fn remove(
        &mut self,
        slot: u32,
        slots: &Slots,
        index: &KeyIndex,
        arenas: &Arenas,
    ) -> Option<u64> {
        let chunk = slots.chunk(slot)?;
        self.set_lent(slot, false, slots, (index, arenas));
        if !index.remove(&chunk.key, slot, slots) {
            return None;
        }
        slots.vacate(slot);
        self.free.push(slot);
        self.policy.removed(slot);
        self.chunks -= 1;
        let (blocks, bytes) = (chunk.about.blocks(), chunk.about.bytes());
        self.owners.went(slot, bytes);
        if self.held.contains_key(&chunk.key) {
            self.held_bytes = self.held_bytes.saturating_sub(bytes);
        }
        self.freed.push(Freed { location: chunk.location, blocks });
        self.record(Event::Removed, &chunk, arenas);
        Some(bytes)
    }

    /// True if the chunk in `slot` is lent.
    pub(crate) fn is_lent(&self, slot: u32) -> bool {
        self.lent.get(slot as usize / 64).is_some_and(|word| word >> (slot % 64) & 1 == 1)
    }

    /// Lends the chunk in `slot`, which then takes no space, has no owner and is not evicted; or
    /// counts it again.
    pub(crate) fn set_lent(
        &mut self,
        slot: u32,
        is_lent: bool,
        slots: &Slots,
        (index, arenas): (&KeyIndex, &Arenas),
    ) {
        if is_lent == self.is_lent(slot) {
            return;
        }
        let (Some(chunk), Some(place)) = (slots.chunk(slot), slots.place(slot)) else { return };
        let Some(arena) = arenas.get(chunk.location.arena) else { return };
        let (word, bytes) = (slot as usize / 64, chunk.about.bytes());
        if self.lent.len() <= word {
            self.lent.resize(word + 1, 0);
        }
        self.lent[word] ^= 1 << (slot % 64);
        let held = if self.held.contains_key(&chunk.key) { bytes } else { 0 };
        match is_lent {
            true => {
                self.held_bytes = self.held_bytes.saturating_sub(held);
                self.used = self.used.saturating_sub(bytes);
                arena.lent.fetch_add(bytes, Relaxed);
                self.lent_bytes += bytes;
                self.lent_chunks += 1;
                self.owners.went(slot, bytes);
                self.policy.removed(slot);
            }
            false => {
                self.held_bytes += held;
                self.used += bytes;
                arena.lent.fetch_sub(bytes, Relaxed);
                self.lent_bytes -= bytes;
                self.lent_chunks -= 1;
                self.owners.came((slot, place), bytes, NOBODY, slots);
                self.policy.inserted(slot, index.hash(&chunk.key), bytes as u32, Why::Read);
            }
        }
    }

    /// Forgets the next chunk of an owners' limit. `None` if all of them are held.
    pub(crate) fn evict_of(
        &mut self,
        limit: usize,
        slots: &Slots,
        index: &KeyIndex,
        arenas: &Arenas,
    ) -> Option<u64> {
        let held = &self.held;
        let is_held = |slot| slots.key(slot).is_some_and(|key| held.contains_key(&key));
        let slot = self.owners.victim(limit, slots, is_held)?;
        self.remove(slot, slots, index, arenas)
    }

    /// The next slot to evict: not one that is held, or lent.
    pub(crate) fn victim(&mut self, slots: &Slots, held_max: u64) -> Option<u32> {
        if self.chunks == self.lent_chunks {
            return None;
        }
        let free = |held: &HashMap<ChunkKey, u32>, slot| {
            slots.key(slot).is_some_and(|key| !held.contains_key(&key))
        };
        if self.held.is_empty() || self.held_bytes > held_max {
            // A limit that became smaller than the holds comes first.
            if let Some(slot) = self.policy.victim() {
                return Some(slot);
            }
        } else {
            for _ in 0..HELD_IN_A_ROW {
                let Some(slot) = self.policy.victim() else { break };
                if free(&self.held, slot) {
                    return Some(slot);
                }
            }
        }
        // The policy names held chunks only, or none: the next one that is not held.
        for _ in 0..self.slots_end {
            self.scan = (self.scan + 1) % self.slots_end;
            let may_go = slots.chunk(self.scan).is_some() && !self.is_lent(self.scan);
            if may_go && free(&self.held, self.scan) {
                return Some(self.scan);
            }
        }
        None
    }
}
