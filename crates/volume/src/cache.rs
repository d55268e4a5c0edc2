//! The cache of one image: a sparse file whose offset 0 is the first lazy address.
//!
//! ```text
//!   lazy address   data.start ─────────────── a ───────────── data.end
//!   cache file     0 ──────────────────────── a - data.start ── len
//!   presence       one bit a block, in memory only; at open: where the file is not a hole
//! ```
//!
//! There is no log and no header on disk, so no order of writes to keep: whatever a crash leaves
//! (holes, torn or old blocks, another image's bytes) fails its block's checksum when it is read
//! and is then a miss. The map has these; of an image that nobody has read they lie in a file beside
//! the cache, as they were when its blocks came. A cache write that fails closes the gate: for good
//! after a failed file, for a growing while after a full file system; the volume goes on without
//! writing.

use std::{
    ops::Range,
    sync::{Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use burgeon_block::{
    BLOCK_SIZE, ByteRange, Counter, Counters, Error, ErrorKind, LocalFile, Result,
};
use burgeon_image::AddressMap;
use tokio::time::Instant;

use crate::{Limits, presence::Presence, seen::FirstSeen};

/// Whether fetched chunks are kept.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum CacheState {
    /// They are.
    Writing,
    /// The file system is full: writes start again by themselves.
    NoSpace {
        /// The error that said so.
        reason: String,
    },
    /// The file failed: nothing more is written until the image is mounted anew.
    Stopped {
        /// The error that said so.
        reason: String,
    },
}

enum Gate {
    Open,
    Paused { until: Instant, pause: Duration, reason: String },
    Stopped { reason: String },
}

pub(crate) struct CacheFile<F> {
    file: F,
    data: ByteRange,
    presence: Presence,
    /// Of an image whose map has no checksums: those of what came.
    seen: Option<FirstSeen<F>>,
    /// Nobody could say later what the blocks are: nothing is kept.
    blind: bool,
    gate: Mutex<Gate>,
    pause_min: Duration,
    pause_max: Duration,
    pub(crate) read_errors: Counter,
    pub(crate) write_errors: Counter,
    pub(crate) uncached_chunks: Counter,
}

impl<F: LocalFile> CacheFile<F> {
    /// Opens the cache of the lazy addresses of `map`: every block that is not in a hole may be
    /// there. A file that cannot be looked through is taken as empty. `seen` is the file of checksums,
    /// where the map has none.
    pub(crate) fn open(file: F, seen: Option<F>, map: &AddressMap, limits: &Limits) -> Self {
        let data = map.data_range();
        let blocks = data.len().div_ceil(BLOCK_SIZE);
        let cache = Self {
            file,
            data,
            presence: Presence::new(blocks),
            blind: map.is_unsummed() && seen.is_none(),
            seen: seen.map(|seen| FirstSeen::new(seen, map.identity())),
            gate: Mutex::new(Gate::Open),
            pause_min: limits.no_space_pause_min,
            pause_max: limits.no_space_pause_max,
            read_errors: Counter::default(),
            write_errors: Counter::default(),
            uncached_chunks: Counter::default(),
        };
        if !cache.blind && cache.find_blocks(blocks).is_err() {
            cache.read_errors.add(1);
            cache.presence.clear(0..blocks);
        }
        cache
    }

    fn find_blocks(&self, blocks: u64) -> Result<()> {
        let mut next = 0;
        while let Some(found) = self.file.next_data(next)? {
            let end = found.end().div_ceil(BLOCK_SIZE).min(blocks);
            let start = (found.start() / BLOCK_SIZE).min(end);
            self.presence.set(start..end);
            // A file that names the same range again must not hold us here.
            next = found.end().max(next + 1);
        }
        Ok(())
    }

    fn blocks(&self, range: ByteRange) -> Range<u64> {
        let (start, end) = (range.start() - self.data.start(), range.end() - self.data.start());
        start / BLOCK_SIZE..end.div_ceil(BLOCK_SIZE)
    }

    /// Whether all of `range` may be in the file.
    pub(crate) fn has(&self, range: ByteRange) -> bool {
        self.presence.all(self.blocks(range))
    }

    /// Bytes that may be in the file.
    pub(crate) fn present_bytes(&self) -> u64 {
        self.presence.count() * BLOCK_SIZE
    }

    /// Fills `buf` with the verified bytes of `range`, or says that not all of them are here.
    /// Blocks that are not what they should be are forgotten.
    pub(crate) fn read(
        &self,
        map: &AddressMap,
        range: ByteRange,
        buf: &mut [u8],
        counters: &Counters,
    ) -> bool {
        let blocks = self.blocks(range);
        if !self.presence.all(blocks.clone()) {
            return false;
        }
        if self.file.read_at(range.start() - self.data.start(), buf).is_err() {
            self.read_errors.add(1);
            self.presence.clear(blocks);
            return false;
        }
        if map.is_unsummed() {
            return self.was_seen(blocks, buf, counters);
        }
        let kind = map.checksum_kind();
        let mut good = true;
        let mut address = range.start();
        for bytes in buf.chunks_exact(BLOCK_SIZE as usize) {
            if kind.of(bytes) != map.block_checksum(address) {
                good = false;
                let block = (address - self.data.start()) / BLOCK_SIZE;
                self.forget(block, counters);
            }
            address += BLOCK_SIZE;
        }
        good
    }

    /// Whether `bytes` are `blocks` as they came.
    fn was_seen(&self, blocks: Range<u64>, bytes: &[u8], counters: &Counters) -> bool {
        let Some(seen) = &self.seen else { return false };
        let mut good = true;
        let compared = seen.holds(blocks.start, bytes, |block, differs| {
            good = false;
            // A crash may have taken the entry alone: nothing is wrong with the file then.
            match differs {
                true => self.forget(block, counters),
                false => self.presence.clear(block..block + 1),
            }
        });
        if compared.is_err() {
            self.read_errors.add(1);
            self.presence.clear(blocks);
        }
        good && compared.is_ok()
    }

    /// The file holds something else than `block`.
    fn forget(&self, block: u64, counters: &Counters) {
        counters.cache_corrupt_blocks.add(1);
        self.presence.clear(block..block + 1);
    }

    fn gate(&self) -> MutexGuard<'_, Gate> {
        self.gate.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether a write may be tried now.
    pub(crate) fn may_write(&self) -> bool {
        if self.blind {
            return false;
        }
        match &*self.gate() {
            Gate::Open => true,
            Gate::Paused { until, .. } => Instant::now() >= *until,
            Gate::Stopped { .. } => false,
        }
    }

    /// What becomes of fetched chunks.
    pub(crate) fn state(&self) -> CacheState {
        match &*self.gate() {
            Gate::Open => CacheState::Writing,
            Gate::Paused { reason, .. } => CacheState::NoSpace { reason: reason.clone() },
            Gate::Stopped { reason } => CacheState::Stopped { reason: reason.clone() },
        }
    }

    /// Writes the verified bytes of `range` and then says that they are there.
    pub(crate) fn write(&self, range: ByteRange, bytes: &[u8]) -> Result<()> {
        let blocks = self.blocks(range);
        let offset = range.start() - self.data.start();
        let kept = match &self.seen {
            Some(seen) => seen.keep(blocks.start, bytes),
            None => Ok(()),
        };
        match kept.and_then(|()| self.file.write_at(offset, bytes)) {
            Ok(()) => {
                self.presence.set(blocks);
                let mut gate = self.gate();
                if matches!(*gate, Gate::Paused { .. }) {
                    *gate = Gate::Open;
                }
                Ok(())
            }
            Err(error) => {
                self.close(&error);
                Err(error)
            }
        }
    }

    /// Closes the gate as `error` asks for.
    fn close(&self, error: &Error) {
        self.write_errors.add(1);
        let reason = error.to_string();
        let mut gate = self.gate();
        if error.kind() != ErrorKind::NoSpace {
            *gate = Gate::Stopped { reason };
            return;
        }
        let now = Instant::now();
        let pause = match &*gate {
            Gate::Stopped { .. } => return,
            Gate::Open => self.pause_min,
            // Several writes were under way when the space ended: one lesson, not several.
            Gate::Paused { until, .. } if now < *until => return,
            Gate::Paused { pause, .. } => (*pause * 2).min(self.pause_max),
        };
        *gate = Gate::Paused { until: now + pause, pause, reason };
    }

    /// Makes what was written durable.
    pub(crate) fn sync(&self) -> Result<()> {
        self.seen.as_ref().map_or(Ok(()), FirstSeen::sync)?;
        self.file.sync()
    }
}
