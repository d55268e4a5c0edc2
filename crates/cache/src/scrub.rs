use std::{
    sync::atomic::{AtomicBool, Ordering::Relaxed},
    time::{Duration, Instant},
};

use burgeon_block::{BLOCK_SIZE, ChecksumKind, Pages};

use crate::{
    shared::{Shared, lock},
    slots::{About, Chunk},
};

/// Longest wait before `stop` is looked at again.
const NAP: Duration = Duration::from_millis(100);

/// Chunks of one scrub that are told by lines of the log: of a disk that rots whole, the others are
/// events of the level debug.
const LINES_MAX: u64 = 16;

/// Makes an event of a chunk that was wrong.
fn report(chunk: &Chunk, is_read: bool, forgotten: u64) {
    let (key, arena, block) = (&chunk.key, chunk.location.arena, chunk.location.block);
    let why = if is_read { "its bytes are wrong" } else { "it cannot be read" };
    if forgotten <= LINES_MAX {
        tracing::error!(?key, arena, block, why, "a scrub of the cache has forgotten a chunk");
    } else {
        tracing::debug!(?key, arena, block, why, "a scrub of the cache has forgotten a chunk");
    }
}

/// [`crate::Cache::scrub`].
pub(crate) fn run(shared: &Shared, bytes_per_second: u64, stop: &AtomicBool) -> (u64, u64) {
    let (begin, mut read, mut forgotten) = (Instant::now(), 0, 0);
    let end = lock(&shared.admin).slots_end;
    for slot in 0..end {
        let Some(chunk) = shared.slots.chunk(slot) else { continue };
        let blocks = chunk.about.blocks();
        let Some(mut pages) = Pages::zeroed(u64::from(blocks) * BLOCK_SIZE) else { break };
        let Some(arena) = shared.arenas.get(chunk.location.arena) else { continue };
        let offset = u64::from(chunk.location.block) * BLOCK_SIZE;
        let is_read = arena.file.read_at(offset, pages.bytes_mut()).is_ok();
        let crc = ChecksumKind::Crc32c.of(pages.bytes()) as u32;
        // Only what is still there is wrong; what was evicted meanwhile reads as zeros.
        if (!is_read || About::new(blocks, crc) != chunk.about)
            && shared.slots.chunk(slot) == Some(chunk)
        {
            let is_forgotten = shared.forget(&chunk.key);
            forgotten += u64::from(is_forgotten);
            // Bytes that cannot be read are not known to be wrong.
            let count = if is_read { &shared.tally.doubted } else { &shared.tally.read_errors };
            count.add(1);
            if is_forgotten {
                report(&chunk, is_read, forgotten);
            }
        }
        read += pages.bytes().len() as u64;
        let due = Duration::from_secs_f64(read as f64 / bytes_per_second.max(1) as f64);
        while !stop.load(Relaxed) && begin.elapsed() < due {
            std::thread::sleep((due.saturating_sub(begin.elapsed())).min(NAP));
        }
        if stop.load(Relaxed) {
            break;
        }
    }
    (read, forgotten)
}
