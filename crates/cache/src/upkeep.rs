//! The upkeep: one thread gives space back, empties arenas, and writes what came and went.
//!
//! ```text
//!   round: take the folder and load ─► evict and punch ─► gaps ─► arenas ─► journal ─► checkpoint
//! ```
//!
//! It holds its own lock across I/O. Readers and admissions never wait for that lock; they wake
//! this thread, and do without.

use std::sync::{Mutex, atomic::Ordering::Relaxed};

use burgeon_block::{BLOCK_SIZE, ByteRange, ErrorKind, Pages, Result};

use crate::{
    admin::Freed,
    arena::{self, ARENAS_MAX, Arena, spare},
    hold,
    journal::Event,
    lending::{self, LentRange},
    load,
    persist::Persist,
    shared::{Shared, lock},
    slots::Chunk,
};

/// Most bytes that are evicted before they are punched.
const BATCH: u64 = 32 << 20;
/// Most victims that are chosen under one hold of the store's lock.
const VICTIMS: usize = 64;
/// Most batches of one round, so that records are written in between.
const BATCHES: usize = 64;

#[derive(Default)]
pub(crate) struct Upkeep {
    persist: Persist,
    /// Arenas that may hold bytes of no chunk, each with their number.
    gaps: Vec<(u32, u64)>,
    /// Lent ranges, also of chunks that are loaded later.
    lent: Vec<LentRange>,
    retired: u64,
}

/// The thread: a round at each tick and whenever somebody asks, until [`Shared::stop`].
pub(crate) fn run(upkeep: &Mutex<Upkeep>, shared: &Shared) {
    while shared.wait_for_work() {
        round(upkeep, shared, 0);
    }
    round(upkeep, shared, 0);
    // The next server fetches again what is not recorded.
    lock(upkeep).flush(shared, true);
}

/// One round, which frees at least `extra` bytes, as far as they are here.
pub(crate) fn round(upkeep: &Mutex<Upkeep>, shared: &Shared, extra: u64) {
    let mut upkeep = lock(upkeep);
    if let Err(error) = upkeep.round(shared, extra) {
        shared.failed(&error);
    }
}

impl Upkeep {
    fn round(&mut self, shared: &Shared, extra: u64) -> Result<()> {
        let is_open = shared.gate.is_open();
        if shared.is_taken.load(Relaxed)
            && let Err(error) = shared.disk.check()
        {
            // An error of another kind tells nothing about the files.
            if error.kind() != ErrorKind::NotFound {
                return Err(error);
            }
            tracing::warn!(%error, "the cache was removed, and begins anew");
            self.reset(shared);
        }
        if !shared.is_taken.load(Relaxed) {
            if !is_open || !shared.disk.take()? {
                return Ok(());
            }
            load::run(shared, &mut self.persist, &mut self.gaps)?;
            lending::apply(shared, &self.lent);
            shared.gate.written();
            shared.is_taken.store(true, Relaxed);
        }
        // Also while the gate is closed: what is freed may open it.
        self.balance(shared, extra)?;
        self.punch(shared)?;
        if is_open {
            if self.close_a_gap(shared)? && !self.gaps.is_empty() {
                shared.wake();
            }
            self.empty_arenas(shared)?;
            self.flush(shared, false);
        }
        Ok(())
    }

    /// Lends the chunks in these ranges, also those that are loaded later, and no others.
    pub(crate) fn lend(&mut self, shared: &Shared, ranges: Vec<LentRange>) {
        self.lent = lending::merged(ranges);
        if shared.is_taken.load(Relaxed) {
            lending::apply(shared, &self.lent);
        }
    }

    /// Writes the records that wait; `all` of them, or when there are enough.
    pub(crate) fn flush(&mut self, shared: &Shared, all: bool) {
        if let Err(error) = self.persist.write(shared, all) {
            shared.failed(&error);
        }
    }

    pub(crate) fn sync(&mut self, shared: &Shared) -> Result<()> {
        for (_, arena) in shared.arenas.iter() {
            arena.file.sync()?;
        }
        self.persist.sync(shared)
    }

    /// Evicts and punches until limit and floor have their headroom.
    fn balance(&mut self, shared: &Shared, mut extra: u64) -> Result<()> {
        for _ in 0..BATCHES {
            let bounds = shared.bounds_now()?;
            let used = {
                let mut admin = lock(&shared.admin);
                shared.look_at_hits(&mut admin, bounds.limit);
                admin.used
            };
            let below_floor = bounds.floor.saturating_sub(bounds.free);
            let excess = (used + bounds.headroom).saturating_sub(bounds.limit) + below_floor;
            let excess = excess.max(extra);
            if excess == 0 {
                return Ok(());
            }
            // Chunks that nobody can find go before those that are found.
            if self.close_a_gap(shared)? {
                continue;
            }
            let evicted = self.evict(shared, excess.min(BATCH), bounds.limit);
            let punched = self.punch(shared)?;
            extra = extra.saturating_sub(punched);
            if evicted == 0 && punched == 0 {
                return Ok(());
            }
            if bounds.free < bounds.floor + bounds.headroom {
                // Else the same lack would be made good again and again.
                shared.disk.settle()?;
            }
        }
        // There is more to do: readers' misses may be recorded in between.
        shared.wake();
        Ok(())
    }

    /// Takes chunks of at least `bytes` from the index, unless only held ones are left.
    fn evict(&mut self, shared: &Shared, bytes: u64, limit: u64) -> u64 {
        let mut evicted = 0;
        let held_max = hold::most(limit);
        {
            let mut admin = lock(&shared.admin);
            shared.look_at_hits(&mut admin, limit);
        }
        while evicted < bytes {
            let mut admin = lock(&shared.admin);
            let mut found = false;
            for _ in 0..VICTIMS {
                let Some(slot) = admin.victim(&shared.slots, held_max) else { break };
                let removed = admin.remove(slot, &shared.slots, &shared.index, &shared.arenas);
                let Some(removed) = removed else {
                    // The policy names a slot that the store does not know.
                    admin.policy.removed(slot);
                    continue;
                };
                found = true;
                evicted += removed;
                if evicted >= bytes {
                    break;
                }
            }
            if !found {
                break;
            }
        }
        shared.tally.evicted.add(evicted);
        evicted
    }

    /// Gives the space of forgotten chunks back, adjoining ones at once. Returns the bytes.
    fn punch(&mut self, shared: &Shared) -> Result<u64> {
        let mut freed = std::mem::take(&mut lock(&shared.admin).freed);
        freed.sort_unstable();
        let mut punched = 0;
        let mut next = 0;
        while next < freed.len() {
            let first = freed[next];
            let mut end = first.location.block + first.blocks;
            let run = next;
            next += 1;
            while next < freed.len()
                && freed[next].location.arena == first.location.arena
                && freed[next].location.block <= end
            {
                end = end.max(freed[next].location.block + freed[next].blocks);
                next += 1;
            }
            let Some(arena) = shared.arenas.get(first.location.arena) else { continue };
            let [start, end] = [first.location.block, end].map(|at| u64::from(at) * BLOCK_SIZE);
            let Some(range) = ByteRange::new(start, end) else { continue };
            if let Err(error) = arena.file.punch(range) {
                lock(&shared.admin).freed.extend(&freed[run..]);
                return Err(error);
            }
            punched += settle(shared, &freed[run..next]);
        }
        shared.tally.punched.add(punched);
        Ok(punched)
    }

    /// Frees what a crash left in one arena beside its chunks; false if no such arena is known.
    fn close_a_gap(&mut self, shared: &Shared) -> Result<bool> {
        let Some((index, leaked)) = self.gaps.pop() else { return Ok(false) };
        if let Some(arena) = shared.arenas.get(index) {
            let mut living: Vec<(u32, u32)> = chunks_in(shared, index)
                .into_iter()
                .filter_map(|slot| shared.slots.chunk(slot))
                .filter(|chunk| chunk.location.arena == index)
                .map(|chunk| (chunk.location.block, chunk.about.blocks()))
                .collect();
            living.sort_unstable();
            let mut next = 0;
            let end = (arena.len.load(Relaxed) / BLOCK_SIZE) as u32;
            for (block, blocks) in living.into_iter().chain([(end, 0)]) {
                if block > next {
                    let [from, to] = [next, block].map(|at| u64::from(at) * BLOCK_SIZE);
                    let range = ByteRange::new(from, to);
                    range.map_or(Ok(()), |range| arena.file.punch(range))?;
                }
                next = next.max(block + blocks);
            }
        }
        let mut admin = lock(&shared.admin);
        admin.used = admin.used.saturating_sub(leaked);
        shared.tally.punched.add(leaked);
        Ok(true)
    }

    /// Retires empty arenas, and empties one when the address space is used up.
    fn empty_arenas(&mut self, shared: &Shared) -> Result<()> {
        self.retire(shared)?;
        let bounds = shared.bounds_now()?;
        let arena_len = u64::from(shared.arena_blocks(bounds.limit)) * BLOCK_SIZE;
        let count = shared.arenas.iter().count();
        let space = shared.arenas.counted_address_space();
        // One is emptied before the next is needed; a small cache is not emptied for it.
        let ahead = arena_len.min(bounds.limit / 4);
        if space <= bounds.limit.saturating_mul(2) - ahead && count < ARENAS_MAX {
            return Ok(());
        }
        let current = lock(&shared.admin).current.as_ref().map(|current| current.arena);
        let emptiest = shared.arenas.iter().filter(|(index, _)| Some(*index) != current);
        // An arena that is still being made is not there yet, or has chunks in flight.
        // Lent chunks that move are lent no more: such arenas come last, and only for a descriptor.
        let order = |arena: &Arena| (arena.lent.load(Relaxed), arena.live.load(Relaxed));
        let emptiest = emptiest.min_by_key(|(_, arena)| order(arena));
        let may_go = |arena: &Arena| arena.lent.load(Relaxed) == 0 || count >= ARENAS_MAX;
        let Some((index, _)) = emptiest.filter(|(_, arena)| may_go(arena)) else { return Ok(()) };
        self.empty_arena(shared, index)
    }

    /// Moves the chunks of an arena, as far as the budget goes, forgets the others, and retires it.
    pub(crate) fn empty_arena(&mut self, shared: &Shared, index: u32) -> Result<()> {
        for slot in chunks_in(shared, index) {
            let Some(chunk) = shared.slots.chunk(slot) else { continue };
            if chunk.location.arena != index {
                continue;
            }
            let bytes = u64::from(chunk.about.blocks()) * BLOCK_SIZE;
            let is_held = lock(&shared.admin).held.contains_key(&chunk.key);
            let budget = shared.tally.admitted.get() / 10;
            let may_move = is_held || shared.tally.moved.get() + bytes <= budget;
            if !(may_move && self.relocate(shared, slot, &chunk)?) {
                shared.forget(&chunk.key);
            }
        }
        self.punch(shared)?;
        self.retire(shared)
    }

    /// Writes the chunk to the next place. False if there is none, or it cannot be read.
    fn relocate(&mut self, shared: &Shared, slot: u32, chunk: &Chunk) -> Result<bool> {
        let blocks = chunk.about.blocks();
        let bytes = u64::from(blocks) * BLOCK_SIZE;
        let Some(mut pages) = Pages::zeroed(bytes) else { return Ok(false) };
        let Some(arena) = shared.arenas.get(chunk.location.arena) else { return Ok(false) };
        let from = u64::from(chunk.location.block) * BLOCK_SIZE;
        if arena.file.read_at(from, pages.bytes_mut()).is_err() {
            shared.tally.read_errors.add(1);
            return Ok(false);
        }
        let Some(to) = shared.reserve(blocks, shared.bounds_now()?).unwrap_or_default() else {
            return Ok(false);
        };
        if let Err(error) = shared.write(to, pages.bytes()) {
            shared.abandon(to, blocks, true);
            return Err(error);
        }
        let mut admin = lock(&shared.admin);
        if shared.slots.chunk(slot) != Some(*chunk) {
            drop(admin);
            shared.abandon(to, blocks, false);
            return Ok(true);
        }
        // The plain file that it is lent to shares the space that it leaves.
        admin.set_lent(slot, false, &shared.slots, (&shared.index, &shared.arenas));
        shared.slots.relocate(slot, to);
        admin.finished += bytes;
        admin.freed.push(Freed { location: chunk.location, blocks });
        admin.record(Event::Removed, chunk, &shared.arenas);
        admin.record(Event::Admitted, &Chunk { location: to, ..*chunk }, &shared.arenas);
        drop(admin);
        shared.tally.moved.add(bytes);
        Ok(true)
    }

    /// Removes the files of arenas without a chunk.
    fn retire(&mut self, shared: &Shared) -> Result<()> {
        for (index, arena) in shared.arenas.iter() {
            let id = {
                let admin = lock(&shared.admin);
                let is_current = admin.current.as_ref().is_some_and(|it| it.arena == index);
                if is_current || admin.making || arena.live.load(Relaxed) > 0 {
                    continue;
                }
                arena.len.store(0, Relaxed);
                arena.id.swap(0, Relaxed)
            };
            self.gaps.retain(|(gap, leaked)| {
                if *gap == index {
                    let mut admin = lock(&shared.admin);
                    admin.used = admin.used.saturating_sub(*leaked);
                }
                *gap != index
            });
            arena.file.clear()?;
            shared.disk.rename(&arena::name(id), &spare(index))?;
            self.retired += 1;
            arena.retired.store(self.retired, Relaxed);
        }
        Ok(())
    }

    /// Forgets everything: the folder is gone, or another one.
    fn reset(&mut self, shared: &Shared) {
        shared.is_taken.store(false, Relaxed);
        let (end, arenas) = {
            let mut admin = lock(&shared.admin);
            admin.current = None;
            // From here on no chunk is inserted that was written to one of these.
            let close = |(index, arena): (u32, &Arena)| {
                arena.id.store(0, Relaxed);
                index
            };
            (admin.slots_end, shared.arenas.iter().map(close).collect::<Vec<_>>())
        };
        for slot in 0..end {
            lock(&shared.admin).remove(slot, &shared.slots, &shared.index, &shared.arenas);
        }
        let mut admin = lock(&shared.admin);
        let freed = std::mem::take(&mut admin.freed);
        admin.records.clear();
        drop(admin);
        settle(shared, &freed);
        for (_, leaked) in self.gaps.drain(..) {
            let mut admin = lock(&shared.admin);
            admin.used = admin.used.saturating_sub(leaked);
        }
        for arena in arenas.into_iter().filter_map(|index| shared.arenas.get(index)) {
            arena.len.store(0, Relaxed);
            // The file has no name any more; its space goes with its bytes.
            if let Err(error) = arena.file.clear() {
                tracing::warn!(%error, "space of a removed cache stays in use until the server ends");
            }
        }
        self.persist = Persist::default();
    }
}

/// Counts the space of `freed` as free. Returns the bytes.
fn settle(shared: &Shared, freed: &[Freed]) -> u64 {
    let mut bytes = 0;
    for freed in freed {
        let len = u64::from(freed.blocks) * BLOCK_SIZE;
        if let Some(arena) = shared.arenas.get(freed.location.arena) {
            arena.live.fetch_sub(len, Relaxed);
        }
        bytes += len;
    }
    let mut admin = lock(&shared.admin);
    admin.used = admin.used.saturating_sub(bytes);
    bytes
}

/// The slots of the chunks in an arena.
fn chunks_in(shared: &Shared, arena: u32) -> Vec<u32> {
    let end = lock(&shared.admin).slots_end;
    let is_there =
        |slot: &u32| shared.slots.chunk(*slot).is_some_and(|chunk| chunk.location.arena == arena);
    (0..end).filter(is_there).collect()
}
