//! Records of the log: a descriptor block, and the dirty blocks themselves, in one write.
//!
//! ```text
//!   head block: number, generation, place, the first record of the generation, the number below
//!               which all of its records are durable, device and block and check of each block
//!   then        up to 252 blocks
//! ```
//!
//! Invariants (held by the tests below): decoding never panics. A record counts only at its own
//! place of its own cache, so a copy of it that a user writes into the log as data never counts.

use burgeon_block::BLOCK_SIZE;
use zerocopy::{
    FromBytes, Immutable, IntoBytes, KnownLayout,
    little_endian::{U32, U64},
};

use crate::{
    format::{Block, BlockKind, DEVICES_MAX, seal, sealed},
    keys::Key,
};

/// The most blocks of a record.
pub(crate) const BLOCKS_MAX: usize = 252;

/// Offset of the description, behind the head of every block.
const RAW_AT: usize = 40;

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct Raw {
    place: U32,
    count: U32,
    first: U64,
    durable: U64,
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct RawEntry {
    block: U64,
    device: U32,
    check: U32,
}

const ENTRIES_AT: usize = RAW_AT + size_of::<Raw>();
const _: () = assert!(ENTRIES_AT + BLOCKS_MAX * size_of::<RawEntry>() <= BLOCK_SIZE as usize);

/// The description of a record.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct LogRecord {
    /// Records are numbered through, across generations.
    pub(crate) number: u64,
    pub(crate) generation: u64,
    /// The number of the generation's first record.
    pub(crate) first: u64,
    /// Of this generation, all records below this number were durable before this one was written.
    pub(crate) durable: u64,
    /// Key and check of each block.
    pub(crate) blocks: Vec<(Key, u32)>,
}

impl LogRecord {
    /// As a block, for the block `place` of the log.
    pub(crate) fn encode(&self, place: u32, id: [u8; 16]) -> Box<Block> {
        let mut block = Block::zeroed();
        let raw = Raw {
            place: place.into(),
            count: (self.blocks.len() as u32).into(),
            first: self.first.into(),
            durable: self.durable.into(),
        };
        block.0[RAW_AT..ENTRIES_AT].copy_from_slice(raw.as_bytes());
        let entries = block.0[ENTRIES_AT..].chunks_exact_mut(size_of::<RawEntry>());
        for (entry, (key, check)) in entries.zip(&self.blocks) {
            let raw = RawEntry {
                block: key.block.into(),
                device: u32::from(key.device).into(),
                check: (*check).into(),
            };
            entry.copy_from_slice(raw.as_bytes());
        }
        seal(&mut block, BlockKind::Record, self.number, self.generation, id);
        block
    }

    /// The record that `block` describes, if it is a whole one of this cache and place.
    pub(crate) fn decode(block: &[u8], place: u32, id: [u8; 16]) -> Option<Self> {
        let (number, generation) = sealed(block, BlockKind::Record, id)?;
        let (raw, entries) = Raw::ref_from_prefix(block.get(RAW_AT..)?).ok()?;
        let count = raw.count.get() as usize;
        if raw.place.get() != place || !(1..=BLOCKS_MAX).contains(&count) {
            return None;
        }
        let entries = entries.chunks_exact(size_of::<RawEntry>()).take(count);
        let blocks = entries.map(|entry| {
            let entry = RawEntry::ref_from_bytes(entry).ok()?;
            let device = u8::try_from(entry.device.get()).ok()?;
            let key = Key { device, block: entry.block.get() };
            (usize::from(device) < DEVICES_MAX).then_some((key, entry.check.get()))
        });
        let blocks: Vec<_> = blocks.collect::<Option<_>>()?;
        let (first, durable) = (raw.first.get(), raw.durable.get());
        (blocks.len() == count).then_some(Self { number, generation, first, durable, blocks })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const ID: [u8; 16] = [7; 16];

    fn record(count: u64) -> LogRecord {
        let key = |block| Key { device: (block % 16) as u8, block: block << 20 };
        let blocks = (0..count).map(|block| (key(block), block as u32 * 3)).collect();
        LogRecord { number: 9, generation: 4, first: 7, durable: 8, blocks }
    }

    #[test]
    fn a_record_comes_back_at_its_own_place_alone() {
        for count in [1, BLOCKS_MAX as u64] {
            let block = record(count).encode(5, ID);
            assert_eq!(LogRecord::decode(&block.0, 5, ID), Some(record(count)));
            assert_eq!(LogRecord::decode(&block.0, 6, ID), None);
            assert_eq!(LogRecord::decode(&block.0, 5, [8; 16]), None);
        }
        assert_eq!(LogRecord::decode(&record(0).encode(5, ID).0, 5, ID), None);
    }

    proptest! {
        #[test]
        fn hostile_records_do_no_harm(
            at in 0usize..4096,
            bytes in proptest::collection::vec(any::<u8>(), 1..64),
            sealed: bool,
        ) {
            let mut block = record(20).encode(5, ID);
            let end = (at + bytes.len()).min(4096);
            block.0[at..end].copy_from_slice(&bytes[..end - at]);
            if sealed {
                seal(&mut block, BlockKind::Record, 9, 4, ID);
            }
            if let Some(read) = LogRecord::decode(&block.0, 5, ID) {
                prop_assert!(read.blocks.len() <= BLOCKS_MAX);
                prop_assert!(read.blocks.iter().all(|(key, _)| key.device < 16));
            }
        }
    }
}
