//! Chunks that are lent: another file shares their space, so that to evict them would free nothing.
//!
//! ```text
//!   range_of ─► (the caller clones the range of the arena into a file of its own, and verifies it)
//!   lend     ─► chunks in lent ranges: found and read as before, not in `used`, never evicted
//!   lend, with fewer ranges ─► counted again; evicted if the cache is beyond its limit now
//! ```
//!
//! Invariants (`tests/lending.rs`):
//! - `used` is the bytes of the living chunks that are not lent, of those in flight, and of those
//!   not punched yet. A lent chunk that leaves, or moves, is counted until its space is punched.
//! - A chunk is lent only at a place of a lent range, as a whole: its seal, if it has one
//!   (`volume/src/residency/seal.rs`), is a block that nobody shares, and is not counted either.
//!   No place is given twice, and an arena of another cache has another identity, so no other chunk
//!   is taken for a lent one.
//! - A loan survives no restart: the caller lends again, before anything is evicted
//!   ([`crate::Cache::open_lending`]). It outlives a folder that goes and comes back.
//! - A lent chunk is not among the bytes that holds keep: nothing could take its space.

use crate::shared::{Shared, lock};

/// Slots that are looked at under one hold of the store's lock.
const BATCH: u32 = 1024;

/// Blocks of an arena.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct ArenaRange {
    /// The number in the arena's name.
    pub arena: u32,
    /// The first block.
    pub block: u32,
    /// The number of blocks.
    pub blocks: u32,
}

/// Blocks of an arena that another file shares.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct LentRange {
    /// The arena's file ([`crate::disk::identity`]).
    pub identity: u64,
    /// The blocks.
    pub range: ArenaRange,
}

/// Lends the chunks in these ranges, which are [`merged`], and counts all others.
pub(crate) fn apply(shared: &Shared, ranges: &[LentRange]) {
    if ranges.is_empty() && lock(&shared.admin).lent_chunks == 0 {
        return;
    }
    let is_lent = |slot| {
        let chunk = shared.slots.chunk(slot)?;
        let arena = shared.arenas.get(chunk.location.arena)?;
        let (identity, id) = (arena.file.identity(), arena.id());
        let (block, blocks) = (chunk.location.block, chunk.about.blocks());
        let key = |lent: &LentRange| (lent.identity, lent.range.arena, lent.range.block);
        let after = ranges.partition_point(|lent| key(lent) <= (identity, id, block));
        let lent = ranges.get(after.checked_sub(1)?)?;
        let end = u64::from(lent.range.block) + u64::from(lent.range.blocks);
        let is_of_arena = identity != 0 && (lent.identity, lent.range.arena) == (identity, id);
        Some(is_of_arena && u64::from(block) + u64::from(blocks) <= end)
    };
    let mut next = 0;
    loop {
        let mut admin = lock(&shared.admin);
        let end = admin.slots_end.min(next + BATCH);
        if next == end {
            break;
        }
        for slot in next..end {
            let is_lent = is_lent(slot).unwrap_or(false);
            let tables = (&shared.index, &shared.arenas);
            admin.set_lent(slot, is_lent, &shared.slots, tables);
        }
        next = end;
    }
}

/// Sorted, and those that touch or overlap are one.
pub(crate) fn merged(mut ranges: Vec<LentRange>) -> Vec<LentRange> {
    ranges.sort_unstable();
    ranges.dedup_by(|next, before| {
        let end = |range: ArenaRange| u64::from(range.block) + u64::from(range.blocks);
        let touches = (next.identity, next.range.arena) == (before.identity, before.range.arena)
            && u64::from(next.range.block) <= end(before.range);
        if touches {
            let end = end(next.range).max(end(before.range));
            before.range.blocks = (end - u64::from(before.range.block)).min(u32::MAX.into()) as u32;
        }
        touches
    });
    ranges
}

#[cfg(test)]
mod tests {
    use super::{ArenaRange, LentRange, merged};

    #[test]
    fn ranges_that_touch_are_one() {
        let lent = |arena, block, blocks| LentRange {
            identity: 7,
            range: ArenaRange { arena, block, blocks },
        };
        let other = LentRange { identity: 8, ..lent(1, 0, 9) };
        let all = vec![other, lent(1, 20, 4), lent(1, 0, 10), lent(2, 10, 1), lent(1, 10, 2)];
        assert_eq!(merged(all), [lent(1, 0, 12), lent(1, 20, 4), lent(2, 10, 1), other]);
        let overlap = vec![lent(1, 0, 10), lent(1, 2, 3), lent(1, 0, 10), lent(1, 8, 8)];
        assert_eq!(merged(overlap), [lent(1, 0, 16)]);
        let huge = vec![lent(1, 0, u32::MAX), lent(1, u32::MAX, u32::MAX)];
        assert_eq!(merged(huge), [lent(1, 0, u32::MAX)]);
    }
}
