//! State that readers, admissions and the upkeep share: slots and index, arenas, the state under
//! the store's lock, and space for chunks.
//!
//! ```text
//!   reserve ─► the next place of the current arena ─► write ─► (found) … forget ─► punched later
//!      └─ no room: make_arena, one thread; the others wait for it
//! ```
//!
//! Invariants: a reservation never breaks the limit or the floor, with bytes in flight counted
//! (`tests/crashes.rs`); no lock is held across I/O.

use std::{
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};

use burgeon_block::{BLOCK_SIZE, Error, ErrorKind, Result};

use crate::{
    CHUNK_LEN_MAX, CacheReport, CacheSettings, ChunkKey, Place,
    admin::{Admin, Current, Freed, Reservation},
    arena::{self, Arena, Arenas, spare},
    disk::{CacheDisk, IoMode, Space},
    gate::Gate,
    index::KeyIndex,
    memory_fifo::MemoryFifo,
    policy::ChunkPolicy,
    report::Tally,
    settings::Bounds,
    slots::{ARENA_BLOCKS_MAX, Location, Slots},
};

/// Longest wait for an arena that another thread makes.
const MAKING_MAX: Duration = Duration::from_secs(1);
/// Pause between two looks at the file system's space.
const TICK: Duration = Duration::from_millis(200);

pub(crate) struct Shared {
    pub(crate) disk: Arc<dyn CacheDisk>,
    pub(crate) settings: Mutex<CacheSettings>,
    pub(crate) slots: Slots,
    pub(crate) index: KeyIndex,
    pub(crate) arenas: Arenas,
    pub(crate) admin: Mutex<Admin>,
    pub(crate) fifo: MemoryFifo,
    pub(crate) gate: Gate,
    pub(crate) tally: Tally,
    /// True while this server has the folder.
    pub(crate) is_taken: AtomicBool,
    pub(crate) next_arena: AtomicU64,
    wake: (Mutex<Wake>, Condvar),
    /// An arena was made, or could not be; goes with `admin`.
    made: Condvar,
}

#[derive(Default)]
struct Wake {
    now: bool,
    stop: bool,
}

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Shared {
    pub(crate) fn new(
        disk: Arc<dyn CacheDisk>,
        settings: CacheSettings,
        policy: Box<dyn ChunkPolicy>,
    ) -> Self {
        let seed = std::hash::BuildHasher::hash_one(&std::hash::RandomState::new(), 0);
        Self {
            disk,
            slots: Slots::default(),
            index: KeyIndex::new(seed),
            arenas: Arenas::default(),
            admin: Mutex::new(Admin::new(policy)),
            fifo: MemoryFifo::new(settings.memory),
            gate: Gate::new(settings.pause_min, settings.pause_max),
            tally: Tally::default(),
            is_taken: AtomicBool::new(false),
            next_arena: AtomicU64::new(1),
            wake: (Mutex::default(), Condvar::new()),
            made: Condvar::new(),
            settings: Mutex::new(settings),
        }
    }

    /// Waits until there is work for the upkeep, or for a tick. False once it shall end.
    pub(crate) fn wait_for_work(&self) -> bool {
        let wake = lock(&self.wake.0);
        let waited = self.wake.1.wait_timeout_while(wake, TICK, |wake| !wake.now && !wake.stop);
        let mut wake = waited.unwrap_or_else(PoisonError::into_inner).0;
        wake.now = false;
        !wake.stop
    }

    /// Wakes the thread of the upkeep.
    pub(crate) fn wake(&self) {
        lock(&self.wake.0).now = true;
        self.wake.1.notify_one();
    }

    /// The bounds now; `used` is [`Admin::used`].
    pub(crate) fn bounds(&self, space: Space, used: u64, finished: u64) -> Bounds {
        let settings = *lock(&self.settings);
        let floor = settings.keep_free.of(space.size);
        let all = used.saturating_add(space.free.saturating_sub(floor));
        let limit = settings.limit.map_or(all, |limit| limit.of(space.size).min(all));
        let headroom = (limit / 16).min(64 << 20);
        Bounds { limit, floor, free: space.free, finished, headroom }
    }

    /// Length of the next arena, in blocks.
    pub(crate) fn arena_blocks(&self, limit: u64) -> u32 {
        let longest = lock(&self.settings).arena_len.max(u64::from(CHUNK_LEN_MAX));
        let len = (limit / 16).clamp(CHUNK_LEN_MAX.into(), longest);
        (len / BLOCK_SIZE).min(ARENA_BLOCKS_MAX.into()) as u32
    }

    /// Counts a failed write and closes the gate.
    pub(crate) fn failed(&self, error: &Error) {
        self.tally.write_errors.add(1);
        self.gate.close(error);
    }

    /// The place of the chunk with `key` on the disk.
    pub(crate) fn place_of(&self, key: &ChunkKey) -> Option<Place> {
        let slot = self.index.find(key, &self.slots)?;
        let place = self.slots.place(slot)?;
        // The slot may have been given to another chunk in between.
        (self.slots.key(slot)? == *key).then_some(place)
    }

    /// Space for a chunk of `blocks`, or the reason for a refusal.
    pub(crate) fn reserve(&self, blocks: u32, bounds: Bounds) -> Result<Option<Location>> {
        // Several times: the arena that was just made may have been filled by others.
        for _ in 0..3 {
            let room = {
                let mut admin = lock(&self.admin);
                let bytes = u64::from(blocks) * BLOCK_SIZE;
                let above = bounds.free.saturating_sub(bounds.floor);
                let in_flight = admin.started - bounds.finished;
                if admin.used + bytes > bounds.limit || in_flight + bytes > above {
                    return Ok(None);
                }
                admin.reserve(blocks, &self.arenas)
            };
            match room {
                Reservation::At(location) => return Ok(Some(location)),
                Reservation::Wait => {
                    let admin = lock(&self.admin);
                    let waited = self.made.wait_timeout_while(admin, MAKING_MAX, |it| it.making);
                    drop(waited.unwrap_or_else(PoisonError::into_inner));
                }
                Reservation::MakeArena => self.make_arena(bounds)?,
            }
        }
        Ok(None)
    }

    /// Makes the next arena; the caller was told to by [`Admin::reserve`].
    fn make_arena(&self, bounds: Bounds) -> Result<()> {
        let made = self.try_make_arena(bounds);
        let mut admin = lock(&self.admin);
        admin.making = false;
        self.made.notify_all();
        let (arena, blocks) = made?;
        if self.arenas.get(arena).is_none_or(|arena| arena.id() == 0) {
            return Err(Error::new(ErrorKind::Unavailable, "the cache's folder was removed"));
        }
        admin.current = Some(Current { arena, next: 0, end: blocks });
        Ok(())
    }

    fn try_make_arena(&self, bounds: Bounds) -> Result<(u32, u32)> {
        let blocks = self.arena_blocks(bounds.limit);
        if self.arenas.counted_address_space() > bounds.limit.saturating_mul(2) {
            self.wake();
            return Err(Error::new(ErrorKind::Unavailable, "the cache's arenas are not empty yet"));
        }
        let id = self.next_arena.fetch_add(1, Relaxed);
        let id = u32::try_from(id).map_err(|_| {
            Error::new(
                ErrorKind::NoSpace,
                "all names of arenas are used: remove the cache's folder",
            )
        })?;
        if let Some((index, arena)) = self.arenas.oldest_retired() {
            arena.retired.store(0, Relaxed);
            self.disk.rename(&spare(index), &arena::name(id))?;
            arena.id.store(id, Relaxed);
            return Ok((index, blocks));
        }
        let file = self.disk.create(&arena::name(id), IoMode::Blocks)?;
        let index = self.arenas.push(Arena::new(file, id, 0)).ok_or_else(|| {
            Error::new(ErrorKind::Unavailable, "the cache has as many arenas as it may")
        })?;
        Ok((index, blocks))
    }

    /// The space of a write that failed, or of a chunk that was here already.
    pub(crate) fn abandon(&self, location: Location, blocks: u32, write_failed: bool) {
        let mut admin = lock(&self.admin);
        admin.finished += u64::from(blocks) * BLOCK_SIZE;
        admin.freed.push(Freed { location, blocks });
        if write_failed && admin.current.as_ref().is_some_and(|it| it.arena == location.arena) {
            // A file that failed is not written again.
            admin.current = None;
        }
    }

    /// Writes `bytes` to `location` and counts them.
    pub(crate) fn write(&self, location: Location, bytes: &[u8]) -> Result<()> {
        let gone = || Error::new(ErrorKind::LocalIo, "an arena of the cache is gone");
        let arena = self.arenas.get(location.arena).ok_or_else(gone)?;
        arena.file.write_at(u64::from(location.block) * BLOCK_SIZE, bytes)?;
        self.tally.written.add((bytes.len() as u64).next_multiple_of(BLOCK_SIZE));
        Ok(())
    }

    /// Forgets `key`, wherever it is. True if it was on the disk.
    pub(crate) fn forget(&self, key: &ChunkKey) -> bool {
        self.fifo.forget(key, None);
        let mut admin = lock(&self.admin);
        let Some(slot) = self.index.find(key, &self.slots) else { return false };
        let bytes = admin.remove(slot, &self.slots, &self.index, &self.arenas);
        self.tally.evicted.add(bytes.unwrap_or_default());
        bytes.is_some()
    }

    /// Tells the policy, and the estimate for a cache of `limit`, which chunks were hit.
    pub(crate) fn look_at_hits(&self, admin: &mut Admin, limit: u64) {
        let Admin { policy, reuse, slots_end, owners, .. } = admin;
        self.slots.drain_touched(*slots_end, |slot| {
            policy.touched(slot);
            owners.touched(slot);
            if let Some(chunk) = self.slots.chunk(slot) {
                let len = u64::from(chunk.about.blocks()) * BLOCK_SIZE;
                reuse.read(self.index.hash(&chunk.key), len as u32, limit);
            }
        });
    }

    /// The figures of now.
    pub(crate) fn report(&self) -> CacheReport {
        let space = self.disk.space().unwrap_or(Space { size: 0, free: 0 });
        let (used, lent, chunks, held, hit_permille) = {
            let admin = lock(&self.admin);
            let (used, lent) = (admin.used, admin.lent_bytes);
            (used, lent, admin.chunks, admin.held_bytes, admin.reuse.hit_permille())
        };
        let (bounds, tally) = (self.bounds(space, used, 0), &self.tally);
        CacheReport {
            used,
            limit: bounds.limit,
            floor: bounds.floor,
            free: space.free,
            chunks,
            lent,
            held,
            admitted: tally.admitted.get(),
            refused: tally.refused.get(),
            evicted: tally.evicted.get(),
            shared: tally.shared.get(),
            punched: tally.punched.get(),
            moved: tally.moved.get(),
            written: tally.written.get(),
            doubted: tally.doubted.get(),
            read_errors: tally.read_errors.get(),
            write_errors: tally.write_errors.get(),
            hit_permille,
            address_space: self.arenas.address_space(),
        }
    }
    /// Ends the thread of the upkeep.
    pub(crate) fn stop(&self) {
        lock(&self.wake.0).stop = true;
        self.wake.1.notify_all();
    }

    pub(crate) fn bounds_now(&self) -> Result<Bounds> {
        let (used, finished) = {
            let admin = lock(&self.admin);
            (admin.used, admin.finished)
        };
        Ok(self.bounds(self.disk.space()?, used, finished))
    }

    /// Bytes that the chunk with `key` takes on the disk: none, if it is lent.
    pub(crate) fn counted_len_of(&self, key: &ChunkKey, admin: &Admin) -> u64 {
        let slot = self.index.find(key, &self.slots).filter(|slot| !admin.is_lent(*slot));
        let chunk = slot.and_then(|slot| self.slots.chunk(slot));
        chunk.map_or(0, |chunk| chunk.about.bytes())
    }
}
