//! The table of living chunks: a slot each, which says where the chunk lies.
//!
//! ```text
//!   place:  1 << 62 │ generation, 22 bits │ slot, 26 bits
//!   word:   generation, 22 bits │ location, 42 bits          0: the slot is vacant
//!   location: (arena, 20 bits │ block, 22 bits) + 1
//! ```
//!
//! A place names a slot and its generation, which changes when the chunk leaves: an older place is
//! stale then. A chunk that moves keeps its place. 28 bytes and a bit a slot.
//!
//! Invariants: a slot's key does not change while the index holds the slot; resolving a place
//! takes no lock (`tests/interleavings.rs`).

use std::sync::OnceLock;

use crate::{
    ChunkKey, Place,
    sync::{AtomicU32, AtomicU64, Ordering, SEGMENT},
};

/// Segments of a table.
const SEGMENTS: usize = if SEGMENT > 64 { SLOTS_MAX as usize / SEGMENT } else { 2 };
/// Most slots.
pub(crate) const SLOTS_MAX: u32 = 1 << 26;
/// Blocks that an arena can have.
pub(crate) const ARENA_BLOCKS_MAX: u32 = 1 << 22;
const SLOT_BITS: u32 = 26;
const LOCATION_BITS: u32 = 42;
const GENERATION_MASK: u64 = (1 << (64 - LOCATION_BITS)) - 1;
const LOCATION_MASK: u64 = (1 << LOCATION_BITS) - 1;
const ON_DISK: u64 = 1 << 62;
const BLOCKS_BITS: u32 = 11;

/// The place of a chunk in an arena.
#[derive(Clone, Copy, PartialEq, Eq, Debug, PartialOrd, Ord)]
pub(crate) struct Location {
    /// Index of the arena in the table of this process.
    pub(crate) arena: u32,
    /// Its first block in there.
    pub(crate) block: u32,
}

impl Location {
    fn pack(self) -> u64 {
        (u64::from(self.arena) << 22 | u64::from(self.block)) + 1
    }

    fn unpack(word: u64) -> Option<Self> {
        let packed = (word & LOCATION_MASK).checked_sub(1)?;
        Some(Self { arena: (packed >> 22) as u32, block: packed as u32 & (ARENA_BLOCKS_MAX - 1) })
    }
}

/// Length of a chunk in blocks, and a part of its CRC-32C.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct About(u32);

impl About {
    pub(crate) fn new(blocks: u32, crc: u32) -> Self {
        Self(blocks | crc << BLOCKS_BITS)
    }

    pub(crate) fn from_bits(bits: u32) -> Self {
        Self(bits)
    }

    pub(crate) fn to_bits(self) -> u32 {
        self.0
    }

    pub(crate) fn blocks(self) -> u32 {
        self.0 & ((1 << BLOCKS_BITS) - 1)
    }

    /// Bytes of its blocks.
    pub(crate) fn bytes(self) -> u64 {
        u64::from(self.blocks()) * burgeon_block::BLOCK_SIZE
    }
}

/// A living chunk.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Chunk {
    pub(crate) key: ChunkKey,
    pub(crate) location: Location,
    pub(crate) about: About,
}

struct Segment {
    keys: Box<[[AtomicU64; 2]]>,
    words: Box<[AtomicU64]>,
    abouts: Box<[AtomicU32]>,
    touched: Box<[AtomicU64]>,
}

impl Segment {
    fn new() -> Self {
        Self {
            keys: (0..SEGMENT).map(|_| [AtomicU64::new(0), AtomicU64::new(0)]).collect(),
            words: (0..SEGMENT).map(|_| AtomicU64::new(0)).collect(),
            abouts: (0..SEGMENT).map(|_| AtomicU32::new(0)).collect(),
            touched: (0..SEGMENT / 64).map(|_| AtomicU64::new(0)).collect(),
        }
    }
}

/// All slots, in segments that are made when they are needed.
pub(crate) struct Slots {
    segments: Box<[OnceLock<Segment>]>,
}

impl Default for Slots {
    fn default() -> Self {
        let segments = (0..SEGMENTS).map(|_| OnceLock::new()).collect();
        Self { segments }
    }
}

impl Slots {
    #[inline]
    fn at(&self, slot: u32) -> Option<(&Segment, usize)> {
        let segment = self.segments.get(slot as usize / SEGMENT)?.get()?;
        Some((segment, slot as usize % SEGMENT))
    }

    /// Fills the vacant `slot`, which the caller owns; returns the chunk's place.
    pub(crate) fn fill(&self, slot: u32, chunk: &Chunk) -> Option<Place> {
        let segment = self.segments.get(slot as usize / SEGMENT)?.get_or_init(Segment::new);
        let at = slot as usize % SEGMENT;
        let key = chunk.key.as_bytes();
        for (half, bytes) in segment.keys[at].iter().zip(key.chunks_exact(8)) {
            half.store(u64::from_le_bytes(bytes.try_into().ok()?), Ordering::Relaxed);
        }
        segment.abouts[at].store(chunk.about.to_bits(), Ordering::Relaxed);
        let generation = segment.words[at].load(Ordering::Relaxed) >> LOCATION_BITS;
        // The chunk was written before: whoever sees the word sees its bytes, key and length.
        let word = generation << LOCATION_BITS | chunk.location.pack();
        segment.words[at].store(word, Ordering::Release);
        place(slot, generation)
    }

    /// Makes the chunk's place stale. The caller took it out of the index.
    pub(crate) fn vacate(&self, slot: u32) {
        let Some((segment, at)) = self.at(slot) else { return };
        let generation = segment.words[at].load(Ordering::Relaxed) >> LOCATION_BITS;
        let next = (generation + 1) & GENERATION_MASK;
        segment.words[at].store(next << LOCATION_BITS, Ordering::Release);
        let bit = 1 << (at % 64);
        segment.touched[at / 64].fetch_and(!bit, Ordering::Relaxed);
    }

    /// The chunk lies at `to` from now on; its place remains.
    pub(crate) fn relocate(&self, slot: u32, to: Location) {
        let Some((segment, at)) = self.at(slot) else { return };
        let generation = segment.words[at].load(Ordering::Relaxed) >> LOCATION_BITS;
        segment.words[at].store(generation << LOCATION_BITS | to.pack(), Ordering::Release);
    }

    /// Location and length in blocks of the chunk at `place`, unless it is stale.
    #[inline]
    pub(crate) fn resolve(&self, place: Place) -> Option<(Location, u32)> {
        let (slot, generation) = parts(place)?;
        let (segment, at) = self.at(slot)?;
        let word = segment.words[at].load(Ordering::Acquire);
        if word >> LOCATION_BITS != generation {
            return None;
        }
        let blocks = About(segment.abouts[at].load(Ordering::Relaxed)).blocks();
        Some((Location::unpack(word)?, blocks))
    }

    /// The current place of the chunk in `slot`.
    pub(crate) fn place(&self, slot: u32) -> Option<Place> {
        let (segment, at) = self.at(slot)?;
        let word = segment.words[at].load(Ordering::Acquire);
        Location::unpack(word)?;
        place(slot, word >> LOCATION_BITS)
    }

    /// The key in `slot`; only meaningful while the slot is filled.
    pub(crate) fn key(&self, slot: u32) -> Option<ChunkKey> {
        let (segment, at) = self.at(slot)?;
        let [low, high] = &segment.keys[at];
        let low = u128::from(low.load(Ordering::Relaxed));
        let high = u128::from(high.load(Ordering::Relaxed));
        Some(ChunkKey::from((low | high << 64).to_le_bytes()))
    }

    /// The chunk in `slot`, if it is filled. Without the store's lock, it may be another one a
    /// moment later.
    pub(crate) fn chunk(&self, slot: u32) -> Option<Chunk> {
        let (segment, at) = self.at(slot)?;
        let word = segment.words[at].load(Ordering::Acquire);
        let location = Location::unpack(word)?;
        let key = self.key(slot)?;
        let about = About(segment.abouts[at].load(Ordering::Acquire));
        (segment.words[at].load(Ordering::Acquire) == word).then_some(Chunk {
            key,
            location,
            about,
        })
    }

    /// Remembers that the chunk at `place` was read.
    #[inline]
    pub(crate) fn touch(&self, place: Place) {
        let Some((segment, at)) = parts(place).and_then(|(slot, _)| self.at(slot)) else { return };
        let bit = 1 << (at % 64);
        // A hot chunk's cache line is not written at each hit.
        if segment.touched[at / 64].load(Ordering::Relaxed) & bit == 0 {
            segment.touched[at / 64].fetch_or(bit, Ordering::Relaxed);
        }
    }

    /// Tells `each` of the slots below `end` that were touched since the last call.
    pub(crate) fn drain_touched(&self, end: u32, mut each: impl FnMut(u32)) {
        for (index, segment) in self.segments.iter().enumerate() {
            let first = index * SEGMENT;
            let Some(segment) = segment.get().filter(|_| first < end as usize) else { return };
            for (index, word) in segment.touched.iter().enumerate() {
                if word.load(Ordering::Relaxed) == 0 {
                    continue;
                }
                let mut bits = word.swap(0, Ordering::Relaxed);
                while bits != 0 {
                    each((first + index * 64) as u32 + bits.trailing_zeros());
                    bits &= bits - 1;
                }
            }
        }
    }
}

fn place(slot: u32, generation: u64) -> Option<Place> {
    Place::from_bits(ON_DISK | generation << SLOT_BITS | u64::from(slot))
}

/// Slot and generation of a place on disk.
pub(crate) fn parts(place: Place) -> Option<(u32, u64)> {
    let bits = place.to_bits();
    let slot = bits as u32 & (SLOTS_MAX - 1);
    (bits & ON_DISK != 0).then_some((slot, bits >> SLOT_BITS & GENERATION_MASK))
}
