//! The places of the parts of a cache device.
//!
//! ```text
//!   extent 0    from block 2: bitmaps │ log │ identities │ index │ slots
//!   extent 1…   each growth:            log │              index │ slots
//!
//!   blocks of the log, parts of the index and slots are numbered through, extent by extent
//! ```
//!
//! Sizes follow from the end of each extent and its part of the log, so the superblock stores
//! these. A segment of the log lies in one extent, and its length is that of the first log: a
//! growth changes no place that a record names.
//!
//! Invariants (held by the tests below): parts do not overlap, and end within the device.

use std::ops::Range;

use burgeon_block::{BLOCK_SIZE, Error, ErrorKind, Result};

use crate::{
    keys::KeyMapping,
    sets::{SETS_A_PART, WAYS},
};

/// The most slow devices of one cache.
pub const DEVICES_MAX: usize = 16;
/// The smallest cache device.
pub const SIZE_MIN: u64 = 1 << 20;
/// The smallest and the largest log, in blocks.
pub const LOG_MIN: u32 = 64;
const LOG_MAX: u32 = 4 << 20;
/// The most extents: a cache can grow seven times.
pub(crate) const EXTENTS_MAX: usize = 8;
/// The smallest growth, in bytes.
const GROWTH_MIN: u64 = 512 << 10;
/// 2^32 slots, which are 16 TiB.
const SETS_MAX: u32 = u32::MAX / WAYS as u32;

/// A stretch of the device, in blocks. Numbers are those of the whole cache.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
struct Extent {
    /// Bytes of the device that are used, with this extent.
    size: u64,
    log_first: u64,
    log_blocks: u32,
    index_first: u64,
    sets: u32,
    /// The numbers of its first block of the log, part of the index and set.
    first_place: u32,
    first_part: u32,
    first_set: u32,
}

impl Extent {
    fn slots_first(&self) -> u64 {
        self.index_first + u64::from(self.sets.div_ceil(SETS_A_PART))
    }
}

/// The places of the parts.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Layout {
    /// Bytes of the cache device that are used.
    pub size: u64,
    /// Blocks of all bitmaps.
    pub bitmap_blocks: u32,
    /// Blocks of the log.
    pub log_blocks: u32,
    /// Sets of the index.
    pub sets: u32,
    extents: [Extent; EXTENTS_MAX],
    count: usize,
}

/// Sets that fit into so many blocks, with their index.
fn sets_in(blocks: u64) -> u32 {
    let parts = u64::from(SETS_A_PART);
    let sets = blocks.saturating_sub(1) * parts / (parts * WAYS as u64 + 1);
    sets.min(SETS_MAX.into()) as u32
}

fn invalid(what: String) -> Error {
    Error::new(ErrorKind::Invalid, what)
}

impl Layout {
    /// The layout of a device of `size` bytes with a log of a tenth of it, at most 16 GiB;
    /// `Invalid` below [`SIZE_MIN`].
    pub fn new(size: u64) -> Result<Self> {
        let log = (size / BLOCK_SIZE / 10).min(u64::from(LOG_MAX)) as u32;
        Self::with_log(size, if log < LOG_MIN { 0 } else { log })
    }

    /// The layout with a log of `log_blocks` blocks: none, or [`LOG_MIN`] to a quarter of the size.
    pub fn with_log(size: u64, log_blocks: u32) -> Result<Self> {
        if size < SIZE_MIN {
            let what = format!("a cache of {size} bytes is too small: {SIZE_MIN} are the least");
            return Err(invalid(what));
        }
        let blocks = size / BLOCK_SIZE;
        let fits = (LOG_MIN..=LOG_MAX).contains(&log_blocks) && u64::from(log_blocks) <= blocks / 4;
        if log_blocks != 0 && !fits {
            return Err(invalid(format!(
                "a log of {log_blocks} blocks does not fit into {size} bytes"
            )));
        }
        // Enough for slow devices of about 500 times the size, 64 GiB at least.
        let bitmap_blocks = (blocks / 16_384).clamp(2 * DEVICES_MAX as u64, 1 << 16) as u32;
        let log_first = 2 + u64::from(bitmap_blocks);
        // Two identities a device.
        let identities = if log_blocks == 0 { 0 } else { 2 * DEVICES_MAX as u64 };
        let index_first = log_first + u64::from(log_blocks) + identities;
        let sets = sets_in(blocks - index_first);
        let first = Extent { size, log_first, log_blocks, index_first, sets, ..Extent::default() };
        let mut extents = [Extent::default(); EXTENTS_MAX];
        extents[0] = first;
        Ok(Self { size, bitmap_blocks, log_blocks, sets, extents, count: 1 })
    }

    /// The layout after a growth to `size` bytes: a tenth of the new space is for the log, if there
    /// is one. `Invalid` if the cache cannot grow so.
    pub fn grown(&self, size: u64) -> Result<Self> {
        let (now, least) = (self.size, self.size.next_multiple_of(BLOCK_SIZE) + GROWTH_MIN);
        if size < now {
            return Err(invalid(format!("a cache of {now} bytes does not shrink to {size}")));
        }
        if size < least {
            let what = format!(
                "a cache of {now} bytes does not grow to {size}: {least} are the least, so make its \
                 device or file larger"
            );
            return Err(invalid(what));
        }
        let segment = self.segment_blocks();
        let room = (LOG_MAX - self.log_blocks.min(LOG_MAX)) as u64;
        let log = match self.log_blocks {
            0 => 0,
            _ => ((size - now) / BLOCK_SIZE / 10).min(room) as u32,
        };
        self.extended(size, log / segment * segment)
    }

    /// The layout with one more extent that ends at `size` bytes and has a log of `log_blocks`.
    pub(crate) fn extended(&self, size: u64, log_blocks: u32) -> Result<Self> {
        if self.count == EXTENTS_MAX {
            let what = format!(
                "the cache has grown {} times, which is the most: put another device under it \
                 (`burgeon accelerate replace`)",
                EXTENTS_MAX - 1
            );
            return Err(invalid(what));
        }
        let last = self.extents[self.count - 1];
        let log_first = last.size.div_ceil(BLOCK_SIZE);
        let blocks = (size / BLOCK_SIZE).saturating_sub(log_first);
        let fits = u64::from(log_blocks) <= blocks / 4
            && log_blocks.is_multiple_of(self.segment_blocks())
            && log_blocks <= LOG_MAX - self.log_blocks
            && (log_blocks == 0 || self.log_blocks > 0);
        if blocks < GROWTH_MIN / BLOCK_SIZE || !fits {
            return Err(Error::new(ErrorKind::Corrupt, "an extent of the cache makes no sense"));
        }
        let index_first = log_first + u64::from(log_blocks);
        let sets = sets_in(blocks - u64::from(log_blocks)).min(SETS_MAX - self.sets);
        if sets == 0 {
            let what = format!("a cache has at most {SETS_MAX} sets of 64 KiB");
            return Err(invalid(what));
        }
        let segments = last.log_blocks / self.segment_blocks() * self.segment_blocks();
        let next = Extent {
            size,
            log_first,
            log_blocks,
            index_first,
            sets,
            first_place: last.first_place + segments,
            first_part: last.first_part + last.sets.div_ceil(SETS_A_PART),
            first_set: last.first_set + last.sets,
        };
        let mut grown = *self;
        grown.extents[self.count] = next;
        grown.count += 1;
        (grown.size, grown.sets) = (size, self.sets + sets);
        grown.log_blocks += log_blocks;
        Ok(grown)
    }

    fn all(&self) -> &[Extent] {
        &self.extents[..self.count]
    }

    /// Of each extent the bytes that are used with it, the blocks of its log, and its sets.
    pub(crate) fn extents(&self) -> impl Iterator<Item = (u64, u32, u32)> + '_ {
        self.all().iter().map(|extent| (extent.size, extent.log_blocks, extent.sets))
    }

    /// Sets of each extent.
    pub(crate) fn sets_of_extents(&self) -> Vec<u32> {
        self.all().iter().map(|extent| extent.sets).collect()
    }

    /// Parts of the index that adjoin each other on the device.
    pub(crate) fn parts(&self) -> impl Iterator<Item = Range<u32>> + '_ {
        let parts = |e: &Extent| e.first_part..e.first_part + e.sets.div_ceil(SETS_A_PART);
        self.all().iter().map(parts)
    }

    /// Blocks that a slow device can have.
    pub(crate) fn blocks_max(&self) -> u64 {
        let each = self.all().iter().map(|extent| KeyMapping::new(extent.sets).blocks_max());
        each.max().unwrap_or(0)
    }

    /// Blocks of a segment of the log.
    pub(crate) fn segment_blocks(&self) -> u32 {
        (self.extents[0].log_blocks / 16).clamp(4, 4096)
    }

    /// Segments of the log.
    pub(crate) fn segments(&self) -> u32 {
        let size = self.segment_blocks();
        self.all().iter().map(|extent| extent.log_blocks / size).sum()
    }

    /// The extent in which the number lies that `first` gives of each extent.
    fn extent(&self, number: u32, first: impl Fn(&Extent) -> u32) -> &Extent {
        let found = self.all().iter().rev().find(|extent| first(extent) <= number);
        found.unwrap_or(&self.extents[0])
    }

    /// Offset of a block of the log.
    pub(crate) fn log_at(&self, place: u32) -> u64 {
        let extent = self.extent(place, |extent| extent.first_place);
        (extent.log_first + u64::from(place - extent.first_place)) * BLOCK_SIZE
    }

    /// Offset of a copy of a device's identity. The cache has a log.
    pub(crate) fn identity_at(&self, device: u8, copy: u64) -> u64 {
        let Extent { log_first, log_blocks, .. } = self.extents[0];
        let block = 2 * u64::from(device) + copy % 2;
        (log_first + u64::from(log_blocks) + block) * BLOCK_SIZE
    }

    /// Offset of a block of the bitmaps.
    pub(crate) fn bitmap_at(&self, block: u32) -> u64 {
        (2 + u64::from(block)) * BLOCK_SIZE
    }

    /// Offset of a part of the index.
    pub(crate) fn part_at(&self, part: u32) -> u64 {
        let extent = self.extent(part, |extent| extent.first_part);
        (extent.index_first + u64::from(part - extent.first_part)) * BLOCK_SIZE
    }

    /// Offset of a slot.
    pub fn slot_at(&self, slot: u32) -> u64 {
        let extent = self.extent(slot / WAYS as u32, |extent| extent.first_set);
        let slot = slot - extent.first_set * WAYS as u32;
        (extent.slots_first() + u64::from(slot)) * BLOCK_SIZE
    }
}

#[cfg(test)]
mod tests {
    use burgeon_block::{BLOCK_SIZE, ErrorKind};

    use super::{DEVICES_MAX, EXTENTS_MAX, Layout, SIZE_MIN};
    use crate::sets::{SETS_A_PART, WAYS};

    #[test]
    fn the_parts_fill_the_device_and_do_not_overlap() {
        for size in [SIZE_MIN, 100 << 20, 1 << 30, (1 << 40) + 12_345, 20 << 40] {
            let layout = Layout::new(size).unwrap();
            let slots = u64::from(layout.sets) * WAYS as u64;
            let end = layout.slot_at((slots - 1) as u32) + BLOCK_SIZE;
            assert!(end <= size, "{size}: {end}");
            assert!(layout.bitmap_at(layout.bitmap_blocks) == layout.log_at(0));
            let last = layout.identity_at(DEVICES_MAX as u8 - 1, 1);
            let behind = layout.log_at(layout.log_blocks);
            match layout.log_blocks {
                0 => assert_eq!(behind, layout.part_at(0)),
                _ => {
                    assert!(layout.identity_at(0, 0) == behind && last + 4096 == layout.part_at(0))
                }
            }
            assert!(layout.part_at(layout.sets.div_ceil(SETS_A_PART)) == layout.slot_at(0));
            assert!(size > 1 << 44 || end > size - size / 50 - (1 << 18), "{size}: {end}");
        }
        assert_eq!(Layout::new(SIZE_MIN - 1).unwrap_err().kind(), ErrorKind::Invalid);
    }

    #[test]
    fn a_growth_moves_nothing_and_overlaps_nothing() {
        for first in [SIZE_MIN, (100 << 20) + 777, 3 << 30] {
            let mut layout = Layout::new(first).unwrap();
            while layout.count < EXTENTS_MAX {
                let before = layout;
                layout = layout.grown(before.size + before.size / 2 + 513).unwrap();
                // Numbered parts keep their places.
                let places = before.segments() * before.segment_blocks();
                assert!((0..places).all(|at| before.log_at(at) == layout.log_at(at)));
                let parts: u32 = before.parts().map(|parts| parts.len() as u32).sum();
                assert!((0..parts).all(|part| before.part_at(part) == layout.part_at(part)));
                let slots = before.sets * WAYS as u32;
                let some = (0..slots).step_by(997).chain([slots - 1]);
                some.for_each(|slot| assert_eq!(before.slot_at(slot), layout.slot_at(slot)));
                assert_eq!(before.identity_at(3, 1), layout.identity_at(3, 1));
                assert_eq!(before.segment_blocks(), layout.segment_blocks());
                // New parts lie behind the former end, in order, and within the new one.
                let end_of_log = match layout.log_blocks - before.log_blocks {
                    0 => before.size.next_multiple_of(BLOCK_SIZE),
                    more => {
                        assert!(layout.log_at(places) >= before.size);
                        assert_eq!(
                            layout.segments() - before.segments(),
                            more / layout.segment_blocks()
                        );
                        layout.log_at(places + more - 1) + BLOCK_SIZE
                    }
                };
                assert_eq!(layout.part_at(parts), end_of_log);
                let more = (layout.sets - before.sets).div_ceil(SETS_A_PART);
                assert_eq!(layout.part_at(parts + more - 1) + BLOCK_SIZE, layout.slot_at(slots));
                let end = layout.slot_at(layout.sets * WAYS as u32 - 1) + BLOCK_SIZE;
                assert!(end <= layout.size, "{first}: {end}");
                assert!(end > layout.size - (layout.size - before.size) / 50 - (1 << 18));
                assert_eq!(layout.log_blocks > 0, before.log_blocks > 0);
            }
            let what = layout.grown(1 << 40).unwrap_err().to_string();
            assert!(what.contains("grown 7 times"), "{what}");
        }
    }

    #[test]
    fn a_growth_that_is_none_is_refused_with_its_limit() {
        let layout = Layout::new(8 << 20).unwrap();
        for (size, why) in [(4 << 20, "does not shrink"), (8 << 20, "8912896 are the least")] {
            let error = layout.grown(size).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Invalid);
            assert!(error.to_string().contains(why), "{error}");
        }
        let large = Layout::new(17 << 40).unwrap();
        assert!(large.grown(20 << 40).unwrap_err().to_string().contains("at most"));
    }
}
