//! The store over a folder of arenas.
//!
//! ```text
//!   admit ── bounds ── policy ── next place ── one direct write ── slot, index ── journal, later
//!              │ full or behind                                        │
//!              └──► memory, first in first out          read ◄── resolve: no lock
//!   upkeep, one thread: evict ── punch ── journal, checkpoint ── empty arenas
//! ```
//!
//! Invariants, and the tests that hold them:
//! - The limit and the floor hold at every moment, with bytes in flight counted; an admission that
//!   would break them is refused (`tests/crashes.rs`).
//! - After a crash, a key gives its bytes or a miss, once the caller has verified them
//!   (`tests/crashes.rs`).
//! - A failing file system closes the gate, and costs a reader no more than a miss.
//! - No lock is held across I/O but that of the upkeep, for which no reader waits.

mod seam;

use std::{
    path::Path,
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
    thread::JoinHandle,
    time::Duration,
};

use burgeon_block::{BLOCK_SIZE, ChecksumKind, Error, ErrorKind, Pages, Result};

use crate::{
    CHUNK_LEN_MAX, ChunkKey, Place, Report, Settings, Why,
    admin::{Admin, Freed, Room},
    arena::{self, Arena, Arenas, spare},
    disk::{Access, Disk, Folder, Space},
    gate::Gate,
    hold,
    index::Index,
    journal::Event,
    memory_fifo::MemoryFifo,
    policy::{Policy, Pressure},
    report::Tally,
    settings::Bounds,
    slots::{ARENA_BLOCKS_MAX, About, Chunk, Location, Slots},
    upkeep::Upkeep,
};

/// Longest wait for an arena that another thread makes.
const MAKING_MAX: Duration = Duration::from_secs(1);
/// Pause between two looks at the file system's space.
const TICK: Duration = Duration::from_millis(200);

pub(crate) struct Shared {
    pub(crate) disk: Arc<dyn Disk>,
    pub(crate) settings: Mutex<Settings>,
    pub(crate) slots: Slots,
    pub(crate) index: Index,
    pub(crate) arenas: Arenas,
    pub(crate) admin: Mutex<Admin>,
    pub(crate) fifo: MemoryFifo,
    pub(crate) gate: Gate,
    pub(crate) tally: Tally,
    /// True while this server has the folder.
    pub(crate) is_taken: AtomicBool,
    pub(crate) next_arena: AtomicU64,
    /// Only the upkeep's thread and those who ask for its work wait for this lock.
    pub(crate) upkeep: Mutex<Upkeep>,
    wake: (Mutex<Wake>, Condvar),
    /// An arena was made, or could not be; goes with `admin`.
    made: Condvar,
}

#[derive(Default)]
struct Wake {
    now: bool,
    stop: bool,
}

/// The host's cache: chunks in a folder, bounded.
pub struct Cache {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl Cache {
    /// Opens the cache in the folder `path`, and makes it if it is not there. While another server
    /// has the folder, this one keeps nothing, and tries again.
    pub fn open(path: &Path, settings: Settings, policy: Box<dyn Policy>) -> Result<Self> {
        let mut cache = Self::over(Arc::new(Folder::new(path)?), settings, policy);
        let shared = cache.shared.clone();
        let thread = std::thread::Builder::new().name("cache".to_owned());
        let thread = thread.spawn(move || shared.run());
        let failed = |error| Error::io("cannot start the cache's thread", error);
        cache.thread = Some(thread.map_err(failed)?);
        Ok(cache)
    }

    /// The cache on `disk`, without a thread of its own: the caller calls [`Self::upkeep`].
    pub fn over(disk: Arc<dyn Disk>, settings: Settings, policy: Box<dyn Policy>) -> Self {
        let seed = std::hash::BuildHasher::hash_one(&std::hash::RandomState::new(), 0);
        let shared = Arc::new(Shared {
            disk,
            slots: Slots::default(),
            index: Index::new(seed),
            arenas: Arenas::default(),
            admin: Mutex::new(Admin::new(policy)),
            fifo: MemoryFifo::new(settings.memory),
            gate: Gate::new(settings.pause_min, settings.pause_max),
            tally: Tally::default(),
            is_taken: AtomicBool::new(false),
            next_arena: AtomicU64::new(1),
            upkeep: Mutex::default(),
            wake: (Mutex::default(), Condvar::new()),
            made: Condvar::new(),
            settings: Mutex::new(settings),
        });
        shared.upkeep(0);
        Self { shared, thread: None }
    }

    /// One round of upkeep: space, records, arenas.
    pub fn upkeep(&self) {
        self.shared.upkeep(0);
    }

    /// Evicts at least `bytes`, as far as they are here and not held; returns the bytes freed.
    pub fn evict(&self, bytes: u64) -> u64 {
        let before = self.shared.tally.punched.get();
        let mut freed = 0;
        // A round has an end, so that records are written in between.
        while freed < bytes {
            self.shared.upkeep(bytes - freed);
            let now = self.shared.tally.punched.get() - before;
            if now == freed {
                break;
            }
            freed = now;
        }
        freed
    }

    /// Forgets these chunks, held or not.
    pub fn drop_keys(&self, keys: &[ChunkKey]) {
        for key in keys {
            self.shared.forget(key);
        }
        self.shared.upkeep(0);
    }

    /// Changes the bounds. Chunks beyond them are evicted before this returns, as far as they are
    /// not held.
    pub fn resize(&self, limit: Option<crate::Amount>, keep_free: crate::Amount) {
        {
            let mut settings = lock(&self.shared.settings);
            settings.limit = limit;
            settings.keep_free = keep_free;
        }
        let punched = || self.shared.tally.punched.get();
        loop {
            let before = punched();
            self.shared.upkeep(0);
            let report = self.report();
            if report.used <= report.limit || punched() == before {
                return;
            }
        }
    }

    /// Reads every chunk once, at most `bytes_per_second`, and forgets those whose bytes are not
    /// what was written. Returns the bytes read, and the chunks forgotten. Ends early when `stop`.
    pub fn scrub(&self, bytes_per_second: u64, stop: &AtomicBool) -> (u64, u64) {
        crate::scrub::run(&self.shared, bytes_per_second, stop)
    }

    /// Records what came and went: a server that ends now forgets nothing.
    pub fn flush(&self) {
        lock(&self.shared.upkeep).flush(&self.shared, true);
    }

    /// The figures of now.
    pub fn report(&self) -> Report {
        self.shared.report()
    }
}

impl Drop for Cache {
    fn drop(&mut self) {
        lock(&self.shared.wake.0).stop = true;
        self.shared.wake.1.notify_all();
        if let Some(thread) = self.thread.take() {
            // A panic of the thread was reported by its hook.
            thread.join().unwrap_or_default();
        }
    }
}

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Shared {
    fn run(&self) {
        loop {
            let wake = lock(&self.wake.0);
            let waited = self.wake.1.wait_timeout_while(wake, TICK, |wake| !wake.now && !wake.stop);
            let mut wake = waited.unwrap_or_else(PoisonError::into_inner).0;
            wake.now = false;
            let stop = wake.stop;
            drop(wake);
            self.upkeep(0);
            if stop {
                // What is not recorded is fetched again by the next server.
                lock(&self.upkeep).flush(self, true);
                return;
            }
        }
    }

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
                Room::At(location) => return Ok(Some(location)),
                Room::Wait => {
                    let admin = lock(&self.admin);
                    let waited = self.made.wait_timeout_while(admin, MAKING_MAX, |it| it.making);
                    drop(waited.unwrap_or_else(PoisonError::into_inner));
                }
                Room::MakeArena => self.make_arena(bounds)?,
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
        admin.current = Some(crate::admin::Current { arena, next: 0, end: blocks });
        Ok(())
    }

    fn try_make_arena(&self, bounds: Bounds) -> Result<(u32, u32)> {
        let blocks = self.arena_blocks(bounds.limit);
        if self.arenas.address_space() > bounds.limit.saturating_mul(2) {
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
        let file = self.disk.create(&arena::name(id), Access::Blocks)?;
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

    fn report(&self) -> Report {
        let space = self.disk.space().unwrap_or(Space { size: 0, free: 0 });
        let (used, chunks, held, hit_permille) = {
            let admin = lock(&self.admin);
            (admin.used, admin.chunks, admin.held_bytes, admin.reuse.hit_permille())
        };
        let (bounds, tally) = (self.bounds(space, used, 0), &self.tally);
        Report {
            used,
            limit: bounds.limit,
            floor: bounds.floor,
            free: space.free,
            chunks,
            held,
            admitted: tally.admitted.get(),
            refused: tally.refused.get(),
            evicted: tally.evicted.get(),
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

    /// False if the rules of fill forbid the chunk now.
    fn has_room_for_fill(&self, key: &ChunkKey, len: u64) -> bool {
        let Ok(bounds) = self.bounds_now() else { return false };
        let admin = lock(&self.admin);
        let is_held = admin.held.contains_key(key);
        let taken = if is_held { admin.held_bytes } else { admin.used };
        taken + len <= hold::most(bounds.limit)
    }

    /// Tells the policy, and the estimate for a cache of `limit`, which chunks were hit.
    pub(crate) fn look_at_hits(&self, admin: &mut Admin, limit: u64) {
        let Admin { policy, reuse, slots_end, .. } = admin;
        self.slots.drain_touched(*slots_end, |slot| {
            policy.touched(slot);
            if let Some(chunk) = self.slots.chunk(slot) {
                let len = u64::from(chunk.about.blocks()) * BLOCK_SIZE;
                reuse.read(self.index.hash(&chunk.key), len as u32, limit);
            }
        });
    }

    /// True if the policy and the rules of fill want the chunk in a cache with these bounds.
    fn wants(&self, key: &ChunkKey, len: u64, why: Why, bounds: Bounds) -> bool {
        let hash = self.index.hash(key);
        let mut guard = lock(&self.admin);
        let admin = &mut *guard;
        if why == Why::Read {
            admin.policy.missed(hash, len as u32);
            admin.reuse.read(hash, len as u32, bounds.limit);
        }
        let above = bounds.free.saturating_sub(bounds.floor);
        let is_full = admin.used + len + bounds.headroom > bounds.limit
            || admin.started - bounds.finished + len + bounds.headroom > above;
        let is_held = admin.held.contains_key(key);
        if is_held {
            return admin.held_bytes + len <= hold::most(bounds.limit);
        }
        // Filling pushes nothing out that was read.
        let is_fill = matches!(why, Why::Fill | Why::Pin);
        if is_fill && (is_full || admin.used + len > hold::most(bounds.limit)) {
            return false;
        }
        if !is_full {
            return true;
        }
        self.look_at_hits(admin, bounds.limit);
        admin.policy.admit(hash, len as u32, why, Pressure::Full)
    }

    /// [`ChunkStore::admit`] for a chunk that goes to the disk; `Ok(None)` if it is refused.
    fn keep(&self, key: ChunkKey, bytes: &[u8], why: Why) -> Result<Option<Place>> {
        let blocks = (bytes.len() as u64).div_ceil(BLOCK_SIZE) as u32;
        let len = u64::from(blocks) * BLOCK_SIZE;
        let bounds = self.bounds_now()?;
        if !self.wants(&key, len, why, bounds) {
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
        let inserted = is_open.then(|| admin.insert(&chunk, why, &self.slots, &self.index));
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

    fn place_of(&self, key: &ChunkKey) -> Option<Place> {
        let slot = self.index.find(key, &self.slots)?;
        let place = self.slots.place(slot)?;
        // The slot may have been given to another chunk in between.
        (self.slots.key(slot)? == *key).then_some(place)
    }
}
