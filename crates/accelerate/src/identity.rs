//! The identity of a slow device: its serial number, and checks of some of its blocks.
//!
//! ```text
//!   samples   the blocks of the first MiB, and one of each 64th of the device
//!   take      reads all of them: when write-back begins, and at a cold start
//!   tidy      reads those again whose regions are about to lose their marks
//!   writing   back: samples of the blocks go, durably, before these are written; their new checks are
//!             durable before the log's tail moves past them
//! ```
//!
//! A device is compared only when the cache has dirty blocks of it. Marked regions are left out,
//! because only the device itself knows how much of them it has. Dirty blocks are not: the slow
//! device has their former content until they are written back. Blocks that differ between two file
//! systems, such as the superblock, are dirty first of all.
//!
//! Invariant: the content of a sample that is not in a marked region is durably what the newest
//! whole copy says. So each copy is durable before a mark is cleared, before a block is written
//! back, and before the tail moves.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Mutex, MutexGuard, PoisonError},
};

use burgeon_block::BLOCK_SIZE;
use zerocopy::{
    FromBytes, FromZeros as _, Immutable, IntoBytes, KnownLayout,
    little_endian::{U32, U64},
};

use crate::{
    dirty_version::DirtyVersion,
    format::{Block, BlockKind, REGION, seal, sealed},
    keys::Key,
    sets::check_of,
};

/// Bytes of a serial number; longer ones are cut.
const SERIAL_MAX: usize = 128;
/// Blocks of the first MiB.
pub(crate) const FIRST: u64 = REGION / BLOCK_SIZE;
/// Blocks behind it that are sampled.
const SPREAD: u64 = 64;
/// No device has as many.
const BLOCKS_MAX: u64 = 1 << 40;
const SAMPLES_MAX: usize = (FIRST + SPREAD) as usize;
/// Single blocks that one tidying reads: a disk is not kept from its users for long.
const READS_MAX: usize = 8;
/// Offset of the content, behind the head of every block.
const RAW_AT: usize = 40;

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct Raw {
    serial: [u8; SERIAL_MAX],
    count: U32,
    samples: [RawSample; SAMPLES_MAX],
}

#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct RawSample {
    block: U64,
    check: U32,
}

const _: () = assert!(RAW_AT + size_of::<Raw>() <= BLOCK_SIZE as usize);

/// The identity of one slow device.
pub(crate) struct Identity(Mutex<State>);

#[derive(Default)]
struct State {
    serial: String,
    /// The blocks to sample, behind the first MiB.
    places: Vec<u64>,
    samples: BTreeMap<u64, u32>,
    /// Blocks that are being written back: what was read of them before is no sample.
    written_back: BTreeSet<u64>,
    /// Of the newest copy.
    sequence: u64,
    is_kept: bool,
    changed: bool,
}

/// A part of a slow device that is stable while it is read.
pub(crate) trait Clean {
    /// The checks of blocks that are neither dirty nor in a marked region, of `count` from `first`
    /// on.
    fn checks(&self, first: u64, count: u64) -> Vec<(u64, u32)>;
}

impl Identity {
    /// An identity that is not kept yet, of a device with `blocks` whole blocks.
    pub(crate) fn new(serial: Option<String>, blocks: u64, id: [u8; 16], device: u8) -> Self {
        let serial = cut(serial.unwrap_or_default());
        let state = State { serial, places: places(blocks, id, device), ..State::default() };
        Self(Mutex::new(state))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // No code that can panic runs under this lock.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// True if it is kept: the device may have dirty blocks.
    pub(crate) fn is_kept(&self) -> bool {
        self.state().is_kept
    }

    /// From now on it is not kept, because nothing is dirty.
    pub(crate) fn leave(&self) {
        let mut state = self.state();
        state.is_kept = false;
        state.samples.clear();
        state.written_back.clear();
    }

    /// Goes on from a stored one.
    pub(crate) fn adopt(&self, stored: Stored) {
        let mut state = self.state();
        (state.samples, state.sequence) = (stored.samples, stored.sequence);
        state.is_kept = true;
    }

    /// Reads all samples.
    pub(crate) fn take(&self, device: &impl Clean) {
        let places = {
            let mut state = self.state();
            state.samples.clear();
            state.is_kept = true;
            state.places.clone()
        };
        let mut samples = device.checks(0, FIRST);
        samples.extend(places.into_iter().flat_map(|place| device.checks(place, 1)));
        self.add(samples);
        self.state().changed = true;
    }

    /// Adds samples that were missing when they were read. What is there by now was written back
    /// since.
    fn add(&self, samples: Vec<(u64, u32)>) {
        let mut state = self.state();
        state.changed |= !samples.is_empty();
        for (block, check) in samples {
            if !state.written_back.contains(&block) {
                state.samples.entry(block).or_insert(check);
            }
        }
    }

    /// Reads the samples again that lie in regions of `cleared`, and some of those that are
    /// missing.
    pub(crate) fn refresh(&self, device: &impl Clean, cleared: impl Fn(u32) -> bool) {
        let (first, stale, missing) = {
            let mut state = self.state();
            let before = state.samples.len();
            state.samples.retain(|block, _| !cleared(region_of(*block)));
            state.changed |= state.samples.len() != before;
            let absent = state.places.iter().filter(|place| !state.samples.contains_key(place));
            let (stale, missing): (Vec<u64>, Vec<u64>) =
                absent.partition(|place| cleared(region_of(**place)));
            (cleared(0), stale, missing)
        };
        let mut samples = if first { device.checks(0, FIRST) } else { Vec::new() };
        let places = stale.into_iter().chain(missing).take(READS_MAX);
        samples.extend(places.flat_map(|place| device.checks(place, 1)));
        self.add(samples);
    }

    /// The next copy and its sequence, to be stored; `None` if nothing has changed.
    pub(crate) fn next_copy(&self, device: u8, id: [u8; 16]) -> Option<(Box<Block>, u64)> {
        let mut state = self.state();
        if !state.changed {
            return None;
        }
        state.changed = false;
        state.sequence += 1;
        Some((encode(&state, device, id), state.sequence))
    }

    /// The copy `sequence` may be damaged: the next one takes its place.
    pub(crate) fn note_damaged(&self, sequence: u64) {
        let mut state = self.state();
        (state.changed, state.sequence) = (true, sequence - 1);
    }

    /// The next copy comes after the copy `sequence`.
    pub(crate) fn go_on_from(&self, sequence: u64) {
        let mut state = self.state();
        state.sequence = state.sequence.max(sequence);
    }

    /// These blocks are about to be written back: nobody knows what the slow device has of them
    /// until that is durable.
    pub(crate) fn forget(&self, blocks: impl Iterator<Item = u64>) {
        let mut state = self.state();
        for block in blocks {
            if state.is_sampled(block) {
                state.written_back.insert(block);
                state.changed |= state.samples.remove(&block).is_some();
            }
        }
    }

    /// The slow device has these versions, durably.
    pub(crate) fn note_written(&self, versions: impl Iterator<Item = (Key, DirtyVersion)>) {
        let mut state = self.state();
        if !state.is_kept {
            return;
        }
        for (key, entry) in versions {
            if state.is_sampled(key.block) {
                state.written_back.remove(&key.block);
                state.samples.insert(key.block, entry.check);
                state.changed = true;
            }
        }
    }
}

impl State {
    /// True if the block is in the first MiB, or one of the others that are sampled.
    fn is_sampled(&self, block: u64) -> bool {
        block < FIRST || self.places.binary_search(&block).is_ok()
    }
}

/// A serial number as it is stored.
pub(crate) fn cut(mut serial: String) -> String {
    while serial.len() > SERIAL_MAX {
        serial.pop();
    }
    serial
}

fn region_of(block: u64) -> u32 {
    (block * BLOCK_SIZE / REGION) as u32
}

/// A block of each 64th of what lies behind the first MiB, different ones in each cache.
fn places(blocks: u64, id: [u8; 16], device: u8) -> Vec<u64> {
    let part = blocks.saturating_sub(FIRST) / SPREAD;
    let mut places = Vec::new();
    for number in 0..SPREAD.min(part * SPREAD) {
        let key = Key { device, block: number };
        let offset = u64::from(check_of(key, &id)) % part;
        places.push(FIRST + number * part + offset);
    }
    places
}

/// An identity as a cache device has it.
pub(crate) struct Stored {
    pub(crate) serial: String,
    pub(crate) samples: BTreeMap<u64, u32>,
    pub(crate) sequence: u64,
}

impl Stored {
    /// `None` if the block holds no whole identity of this device and cache.
    pub(crate) fn decode(block: &Block, device: u8, id: [u8; 16]) -> Option<Self> {
        let (number, sequence) = sealed(&block.0, BlockKind::Identity, id)?;
        let (raw, _) = Raw::ref_from_prefix(block.0.get(RAW_AT..)?).ok()?;
        if number != u64::from(device) || raw.count.get() as usize > SAMPLES_MAX {
            return None;
        }
        let serial = raw.serial.split(|byte| *byte == 0).next().unwrap_or_default();
        let samples = raw.samples.iter().take(raw.count.get() as usize);
        Some(Self {
            serial: String::from_utf8_lossy(serial).into_owned(),
            samples: samples
                .map(|sample| (sample.block.get(), sample.check.get()))
                .filter(|(block, _)| *block < BLOCKS_MAX)
                .collect(),
            sequence,
        })
    }
}

fn encode(state: &State, device: u8, id: [u8; 16]) -> Box<Block> {
    let mut raw = Raw::new_zeroed();
    raw.serial[..state.serial.len()].copy_from_slice(state.serial.as_bytes());
    raw.count = (state.samples.len() as u32).into();
    for (raw, (block, check)) in raw.samples.iter_mut().zip(&state.samples) {
        *raw = RawSample { block: (*block).into(), check: (*check).into() };
    }
    let mut block = Block::zeroed();
    block.0[RAW_AT..RAW_AT + size_of::<Raw>()].copy_from_slice(raw.as_bytes());
    seal(&mut block, BlockKind::Identity, device.into(), state.sequence, id);
    block
}

#[cfg(test)]
mod tests {
    use super::{FIRST, SPREAD, places};

    #[test]
    fn samples_are_spread_over_the_device() {
        for blocks in [0, 10, FIRST, FIRST + 63, FIRST + 64, FIRST + 1000, 1 << 30] {
            let places = places(blocks, [7; 16], 3);
            assert!(places.is_sorted_by(|a, b| a < b) && places.iter().all(|at| *at < blocks));
            let expected = if blocks < FIRST + SPREAD { 0 } else { SPREAD as usize };
            assert_eq!(places.len(), expected, "{blocks}");
        }
        assert_ne!(places(1 << 30, [7; 16], 3), places(1 << 30, [8; 16], 3));
    }
}
