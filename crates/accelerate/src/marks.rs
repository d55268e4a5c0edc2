//! The regions of a slow device that may have been written since the index was last stored: its
//! write-intent bitmap.
//!
//! ```text
//!   unmarked ── begin: bit set, block written, cache device synced ──► marked, being written
//!      ▲                                                                   │ end
//!      └── clear: bit cleared, block written ◄── idle since the slow device and the index were stored
//! ```
//!
//! After an unclean stop each cached block of a marked region is dropped. One thread at a time
//! writes bitmaps; threads that come meanwhile share the next write.
//!
//! Invariants (held by the tests below and `dev/accelerate-simulator/tests/accelerate.rs`):
//! - A region is marked durably before the slow device is written there.
//! - A region is not cleared while it is written, or if it was written since the caller looked.

use std::{
    collections::{BTreeSet, HashMap},
    sync::{Condvar, Mutex, MutexGuard, PoisonError},
};

use burgeon_block::Result;

use crate::format::{Block, REGIONS_A_BLOCK, decode_bits, encode_bits};

/// Destination of the bitmaps.
pub(crate) trait Bitmaps {
    /// Writes a block of this device's bitmap.
    fn write(&self, block: u32, bytes: &Block) -> Result<()>;
    /// Makes the written blocks durable.
    fn sync(&self) -> Result<()>;
}

/// The bitmap of one slow device.
pub(crate) struct Marks {
    id: [u8; 16],
    /// The first of its blocks among all bitmaps.
    first_block: u32,
    state: Mutex<State>,
    turn: Condvar,
}

struct State {
    bits: Vec<u8>,
    regions: HashMap<u32, Region>,
    /// Blocks that differ from the stored ones.
    changed: BTreeSet<u32>,
    is_writing: bool,
}

#[derive(Clone, Copy, Default)]
struct Region {
    durable: bool,
    writers: u32,
    /// Grows with each writer.
    written: u64,
}

/// A marked region that nobody wrote at some time.
#[derive(Clone, Copy)]
pub(crate) struct Idle {
    region: u32,
    written: u64,
}

impl Idle {
    pub(crate) fn region(&self) -> u32 {
        self.region
    }
}

const BYTES_A_BLOCK: usize = REGIONS_A_BLOCK as usize / 8;

impl Marks {
    /// A bitmap of `blocks` blocks without a mark; its blocks have yet to be written.
    pub(crate) fn empty(id: [u8; 16], first_block: u32, blocks: u32) -> Self {
        let state = State {
            bits: vec![0; blocks as usize * BYTES_A_BLOCK],
            regions: HashMap::new(),
            changed: (0..blocks).collect(),
            is_writing: false,
        };
        Self { id, first_block, state: Mutex::new(state), turn: Condvar::new() }
    }

    /// A bitmap with all marks, of a device of `regions` regions; its blocks have yet to be
    /// written.
    pub(crate) fn full(id: [u8; 16], first_block: u32, blocks: u32, regions: u32) -> Self {
        let marks = Self::empty(id, first_block, blocks);
        let mut state = marks.state();
        state.bits.fill(0xff);
        let marked = Region { durable: true, ..Region::default() };
        state.regions = (0..regions).map(|region| (region, marked)).collect();
        drop(state);
        marks
    }

    /// The bitmap as it is stored, of a device of `regions` regions. All those of a block that
    /// cannot be read are marked.
    pub(crate) fn load(
        id: [u8; 16],
        first_block: u32,
        blocks: u32,
        regions: u32,
        read: impl Fn(u32, &mut Block) -> Result<()>,
    ) -> Self {
        let marks = Self::empty(id, first_block, blocks);
        let mut state = marks.state();
        state.changed.clear();
        let mut stored = Block::zeroed();
        for block in 0..blocks {
            let at = block as usize * BYTES_A_BLOCK;
            let bits = &mut state.bits[at..at + BYTES_A_BLOCK];
            match read(block, &mut stored) {
                Ok(()) => decode_bits(&stored, first_block + block, id, bits),
                Err(error) => {
                    let first = block * REGIONS_A_BLOCK;
                    let last = regions.min(first + REGIONS_A_BLOCK).saturating_sub(1);
                    tracing::warn!(region = first, last, %error, "these regions count as written");
                    bits.fill(0xff);
                }
            }
        }
        for region in 0..regions {
            if state.bits[region as usize / 8] & 1 << (region % 8) != 0 {
                state.regions.insert(region, Region { durable: true, ..Region::default() });
            }
        }
        drop(state);
        marks
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait<'a>(&'a self, state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        self.turn.wait(state).unwrap_or_else(PoisonError::into_inner)
    }

    /// True if the region is marked.
    pub(crate) fn is_marked(&self, region: u32) -> bool {
        self.state().regions.contains_key(&region)
    }

    /// Number of marked regions.
    pub(crate) fn count(&self) -> u64 {
        self.state().regions.len() as u64
    }

    /// A write of these regions begins; returns when they are marked durably. After an error the
    /// write must not be made, and has not begun.
    pub(crate) fn begin(
        &self,
        regions: std::ops::RangeInclusive<u32>,
        bitmaps: &impl Bitmaps,
    ) -> Result<()> {
        let mut state = self.state();
        for region in regions.clone() {
            let entry = state.regions.entry(region).or_default();
            entry.writers += 1;
            entry.written += 1;
            if !entry.durable {
                state.bits[region as usize / 8] |= 1 << (region % 8);
                state.changed.insert(region / REGIONS_A_BLOCK);
            }
        }
        let durable = |state: &State, region: &u32| {
            state.regions.get(region).is_some_and(|region| region.durable)
        };
        loop {
            if regions.clone().all(|region| durable(&state, &region)) {
                return Ok(());
            }
            if state.is_writing {
                state = self.wait(state);
                continue;
            }
            let waiting: Vec<u32> =
                state.regions.iter().filter(|(_, r)| !r.durable).map(|(at, _)| *at).collect();
            let result;
            (state, result) = self.write(state, bitmaps, true);
            match result {
                Ok(()) => {
                    for region in waiting {
                        state.regions.entry(region).and_modify(|region| region.durable = true);
                    }
                }
                Err(error) => {
                    drop(state);
                    self.end(regions);
                    return Err(error);
                }
            }
        }
    }

    /// The write that [`Self::begin`] began is over, whatever came of it.
    pub(crate) fn end(&self, regions: std::ops::RangeInclusive<u32>) {
        let mut state = self.state();
        for region in regions {
            state.regions.entry(region).and_modify(|region| {
                region.writers = region.writers.saturating_sub(1);
                region.written += 1;
            });
        }
    }

    /// The marked regions that nobody writes now, in order.
    pub(crate) fn idle(&self) -> Vec<Idle> {
        let state = self.state();
        let idle = state.regions.iter().filter(|(_, region)| region.writers == 0);
        let idle = idle.map(|(at, region)| Idle { region: *at, written: region.written });
        let mut idle: Vec<_> = idle.collect();
        idle.sort_unstable_by_key(Idle::region);
        idle
    }

    /// Clears the marks of regions that were not written since they were found idle. The caller has
    /// made the slow device and the index durable meanwhile.
    pub(crate) fn clear(&self, idle: &[Idle], bitmaps: &impl Bitmaps) -> Result<()> {
        let mut state = self.state();
        while state.is_writing {
            state = self.wait(state);
        }
        for Idle { region, written } in idle {
            let same = |now: &Region| now.written == *written && now.writers == 0;
            if state.regions.get(region).is_some_and(same) {
                state.regions.remove(region);
                state.bits[*region as usize / 8] &= !(1 << (region % 8));
                state.changed.insert(region / REGIONS_A_BLOCK);
            }
        }
        // A mark that is lost on its way to being cleared does no harm, so nothing is synced.
        self.write(state, bitmaps, false).1
    }

    /// Stores a new bitmap, durably.
    pub(crate) fn store(&self, bitmaps: &impl Bitmaps) -> Result<()> {
        let state = self.state();
        self.write(state, bitmaps, true).1
    }

    /// Writes the changed blocks, without the lock; the caller has seen that nobody else does.
    fn write<'a>(
        &'a self,
        mut state: MutexGuard<'a, State>,
        bitmaps: &impl Bitmaps,
        durably: bool,
    ) -> (MutexGuard<'a, State>, Result<()>) {
        let changed = std::mem::take(&mut state.changed);
        let encode = |block: &u32| {
            let at = *block as usize * BYTES_A_BLOCK;
            let bits = &state.bits[at..at + BYTES_A_BLOCK];
            (*block, encode_bits(bits, self.first_block + block, self.id))
        };
        let blocks: Vec<_> = changed.iter().map(encode).collect();
        state.is_writing = true;
        drop(state);
        let mut result = blocks.iter().try_for_each(|(block, bytes)| bitmaps.write(*block, bytes));
        if durably {
            result = result.and_then(|()| bitmaps.sync());
        }
        let mut state = self.state();
        state.is_writing = false;
        if result.is_err() {
            state.changed.extend(changed);
        }
        self.turn.notify_all();
        (state, result)
    }
}

#[cfg(test)]
mod tests {
    use burgeon_block::{Error, ErrorKind};

    use super::Marks;

    #[test]
    fn all_regions_of_a_block_that_cannot_be_read_are_marked() {
        let read = |_, _: &mut _| Err(Error::new(ErrorKind::LocalIo, "broken"));
        let events = testkit::Events::gather();
        let marks = Marks::load([7; 16], 0, 1, 20, read);
        let said = events.take().join("\n");
        assert!(said.starts_with("WARN ") && said.contains("region=0 last=19"), "{said}");
        assert!((0..20).all(|region| marks.is_marked(region)));
        assert_eq!(marks.count(), 20);
    }
}
