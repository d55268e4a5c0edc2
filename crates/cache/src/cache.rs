//! The store over a folder of arenas.
//!
//! ```text
//!   Cache ─┬─ seam: what volumes ask ─┬─► read ◄── resolve: no lock
//!          │                          └─► admit ─► the disk; refused: memory, first in first out
//!          └─ upkeep, one thread: evict ─► punch ─► journal, checkpoint ─► empty arenas
//! ```
//!
//! Invariants, and the tests that hold them:
//! - The limit and the floor hold at every moment, with bytes in flight counted; an admission that
//!   would break them is refused (`tests/crashes.rs`).
//! - After a crash, a key gives its bytes or a miss, once the caller has verified them
//!   (`tests/crashes.rs`).
//! - A failing file system closes the gate, and costs a reader no more than a miss.
//! - No lock is held across I/O but that of the upkeep, for which no reader waits.

mod owned;
mod seam;

use std::{
    path::Path,
    sync::{Arc, Mutex, atomic::AtomicBool},
    thread::JoinHandle,
};

use burgeon_block::{Error, Result};

use crate::{
    Amount, CacheReport, CacheSettings, ChunkKey,
    disk::{CacheDisk, DiskFolder},
    lending::{ArenaRange, LentRange},
    policy::ChunkPolicy,
    scrub,
    shared::{Shared, lock},
    upkeep::{self, Upkeep},
};

/// The host's cache: chunks in a folder, bounded.
pub struct Cache {
    shared: Arc<Shared>,
    /// Only the upkeep's thread and those who ask for its work wait for this lock.
    upkeep: Arc<Mutex<Upkeep>>,
    thread: Option<JoinHandle<()>>,
}

impl Cache {
    /// Opens the cache in the folder `path`, and makes it if it is not there. While another server
    /// has the folder, this one keeps nothing, and tries again.
    pub fn open(
        path: &Path,
        settings: CacheSettings,
        policy: Box<dyn ChunkPolicy>,
    ) -> Result<Self> {
        Self::open_lending(path, settings, policy, Vec::new())
    }

    /// The same; the chunks in the ranges `lent` are lent, before any is evicted.
    pub fn open_lending(
        path: &Path,
        settings: CacheSettings,
        policy: Box<dyn ChunkPolicy>,
        lent: Vec<LentRange>,
    ) -> Result<Self> {
        let mut cache =
            Self::over_lending(Arc::new(DiskFolder::new(path)?), settings, policy, lent);
        let (shared, upkeep) = (cache.shared.clone(), cache.upkeep.clone());
        let thread = std::thread::Builder::new().name("cache".to_owned());
        let thread = thread.spawn(move || upkeep::run(&upkeep, &shared));
        let failed = |error| Error::io("cannot start the cache's thread", error);
        cache.thread = Some(thread.map_err(failed)?);
        Ok(cache)
    }

    /// The cache on `disk`, without a thread of its own: the caller calls [`Self::upkeep`].
    pub fn over(
        disk: Arc<dyn CacheDisk>,
        settings: CacheSettings,
        policy: Box<dyn ChunkPolicy>,
    ) -> Self {
        Self::over_lending(disk, settings, policy, Vec::new())
    }

    /// [`Self::open_lending`] on `disk`, as [`Self::over`].
    pub fn over_lending(
        disk: Arc<dyn CacheDisk>,
        settings: CacheSettings,
        policy: Box<dyn ChunkPolicy>,
        lent: Vec<LentRange>,
    ) -> Self {
        let shared = Arc::new(Shared::new(disk, settings, policy));
        let cache = Self { shared, upkeep: Arc::default(), thread: None };
        // Before the first round, which loads the chunks and evicts those beyond the limit.
        cache.lend(lent);
        cache.upkeep();
        cache
    }

    /// One round of upkeep: space, records, arenas.
    pub fn upkeep(&self) {
        self.free(0);
    }

    /// One round, which frees at least `extra` bytes, as far as they are here.
    fn free(&self, extra: u64) {
        upkeep::round(&self.upkeep, &self.shared, extra);
    }

    /// Evicts at least `bytes`, as far as they are here and not held; returns the bytes freed. The
    /// file system counts them as free then.
    pub fn evict(&self, bytes: u64) -> u64 {
        let before = self.shared.tally.punched.get();
        let mut freed = 0;
        // A round has an end, so that records are written in between.
        while freed < bytes {
            self.free(bytes - freed);
            let now = self.shared.tally.punched.get() - before;
            if now == freed {
                break;
            }
            freed = now;
        }
        // btrfs gives space back with a commit, and the caller looks at what is free now.
        if freed > 0
            && let Err(error) = self.shared.disk.settle()
        {
            tracing::debug!(%error, "evicted space is free later");
        }
        freed
    }

    /// Forgets these chunks, held or not.
    pub fn drop_keys(&self, keys: &[ChunkKey]) {
        for key in keys {
            self.shared.forget(key);
        }
        self.upkeep();
    }

    /// Changes the bounds. Chunks beyond them are evicted before this returns, as far as they are
    /// not held.
    pub fn resize(&self, limit: Option<Amount>, keep_free: Amount) {
        {
            let mut settings = lock(&self.shared.settings);
            settings.limit = limit;
            settings.keep_free = keep_free;
        }
        let punched = || self.shared.tally.punched.get();
        loop {
            let before = punched();
            self.upkeep();
            let report = self.report();
            if report.used <= report.limit || punched() == before {
                return;
            }
        }
    }

    /// The place of the chunk with `key` on the disk: a hint, because it may be evicted or moved at
    /// any moment.
    pub fn range_of(&self, key: &ChunkKey) -> Option<ArenaRange> {
        let shared = &*self.shared;
        let chunk = shared.slots.chunk(shared.index.find(key, &shared.slots)?)?;
        // The slot may have been given to another chunk in between.
        if chunk.key != *key {
            return None;
        }
        let arena = shared.arenas.get(chunk.location.arena)?.id();
        let range = ArenaRange { arena, block: chunk.location.block, blocks: chunk.about.blocks() };
        (arena != 0).then_some(range)
    }

    /// True if the chunk with `key` is here, and lent.
    pub fn is_lent(&self, key: &ChunkKey) -> bool {
        let shared = &*self.shared;
        let Some(slot) = shared.index.find(key, &shared.slots) else { return false };
        let admin = lock(&shared.admin);
        // The slot may have been given to another chunk in between.
        shared.slots.chunk(slot).is_some_and(|chunk| chunk.key == *key) && admin.is_lent(slot)
    }

    /// The chunks in these ranges are lent from now on, and no others.
    pub fn lend(&self, ranges: Vec<LentRange>) {
        let mut upkeep = lock(&self.upkeep);
        upkeep.lend(&self.shared, ranges);
        drop(upkeep);
        self.shared.wake();
    }

    /// Empties the arena in which the chunk with `key` lies, as if there were too many.
    #[cfg(feature = "testing")]
    pub fn empty_arena_of(&self, key: &ChunkKey) -> Result<()> {
        let shared = &*self.shared;
        let slot = shared.index.find(key, &shared.slots);
        let chunk = slot.and_then(|slot| shared.slots.chunk(slot));
        chunk.map_or(Ok(()), |chunk| lock(&self.upkeep).empty_arena(shared, chunk.location.arena))
    }

    /// Reads every chunk once, at most `bytes_per_second`, and forgets those whose bytes are not
    /// what was written. Returns the bytes read, and the chunks forgotten. Ends early when `stop`.
    pub fn scrub(&self, bytes_per_second: u64, stop: &AtomicBool) -> (u64, u64) {
        scrub::run(&self.shared, bytes_per_second, stop)
    }

    /// Records what came and went: a server that ends now forgets nothing.
    pub fn flush(&self) {
        lock(&self.upkeep).flush(&self.shared, true);
    }

    /// The figures of now.
    pub fn report(&self) -> CacheReport {
        self.shared.report()
    }
}

impl Drop for Cache {
    fn drop(&mut self) {
        self.shared.stop();
        if let Some(thread) = self.thread.take() {
            // A panic of the thread was reported by its hook.
            thread.join().unwrap_or_default();
        }
    }
}
