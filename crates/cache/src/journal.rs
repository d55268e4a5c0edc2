//! Records of what came and went since the last checkpoint; docs/format.md, "Cache".
//!
//! They are written behind. A record that is lost costs a miss, or space that the next start frees;
//! a record too many costs a miss, too, as every chunk is verified when it is read.

use burgeon_block::ChecksumKind;

use crate::{CHUNK_LEN_MAX, ChunkKey, slots::About};

pub(crate) const RECORD: usize = 40;
const MAGIC: [u8; 8] = *b"BURGJRNL";
const VERSION: u32 = 1;
const BLOCKS_MAX: u32 = CHUNK_LEN_MAX / 4096;

/// An event in the life of a chunk.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Event {
    /// It lies there now.
    Admitted,
    /// It is not there any more.
    Removed,
}

/// One record of a journal, or one entry of a checkpoint.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Record {
    /// The event.
    pub event: Event,
    /// The chunk.
    pub key: ChunkKey,
    /// The number of its arena.
    pub arena: u32,
    /// Its first block in the arena.
    pub block: u32,
    /// Length in blocks, 11 bits, and the low 21 bits of the CRC-32C of its blocks.
    pub about: u32,
}

impl Record {
    /// The record, unless its fields cannot be.
    pub(crate) fn checked(self) -> Option<Self> {
        let blocks = About::from_bits(self.about).blocks();
        let fits = (1..=BLOCKS_MAX).contains(&blocks)
            && self.arena != 0
            && self.block <= crate::slots::ARENA_BLOCKS_MAX - blocks;
        fits.then_some(self)
    }

    /// Its place and length, 28 bytes, as journal and checkpoint have them.
    pub(crate) fn body(&self) -> [u8; 28] {
        let mut body = [0; 28];
        body[..16].copy_from_slice(self.key.as_bytes());
        body[16..20].copy_from_slice(&self.arena.to_le_bytes());
        body[20..24].copy_from_slice(&self.block.to_le_bytes());
        body[24..].copy_from_slice(&self.about.to_le_bytes());
        body
    }

    pub(crate) fn of_body(event: Event, body: &[u8]) -> Option<Self> {
        let key: [u8; 16] = body.get(..16)?.try_into().ok()?;
        let [arena, block, about] = [16, 20, 24].map(|at| word(body, at));
        let (arena, block, about) = (arena?, block?, about?);
        Self { event, key: key.into(), arena, block, about }.checked()
    }
}

pub(crate) fn word(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_le_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}

pub(crate) fn crc(id: u64, place: u64, bytes: &[u8]) -> u32 {
    let mut covered = Vec::with_capacity(bytes.len() + 16);
    covered.extend_from_slice(&id.to_le_bytes());
    covered.extend_from_slice(&place.to_le_bytes());
    covered.extend_from_slice(bytes);
    ChecksumKind::Crc32c.of(&covered) as u32
}

/// The head of the journal with this number; `id` is random and covers its records.
pub fn header(number: u64, id: u64) -> [u8; RECORD] {
    let mut header = [0; RECORD];
    header[..8].copy_from_slice(&MAGIC);
    header[8..12].copy_from_slice(&VERSION.to_le_bytes());
    header[16..24].copy_from_slice(&number.to_le_bytes());
    header[24..32].copy_from_slice(&id.to_le_bytes());
    let sum = crc(0, 0, &header[..36]);
    header[36..].copy_from_slice(&sum.to_le_bytes());
    header
}

/// The bytes of the record with this `index` in the journal with `id`.
pub fn encode(record: &Record, id: u64, index: u64) -> [u8; RECORD] {
    let mut bytes = [0; RECORD];
    bytes[0] = match record.event {
        Event::Admitted => 1,
        Event::Removed => 2,
    };
    bytes[4..32].copy_from_slice(&record.body());
    let sum = crc(id, index, &bytes[..36]);
    bytes[36..].copy_from_slice(&sum.to_le_bytes());
    bytes
}

/// Reads a journal part by part.
pub struct JournalReader {
    id: u64,
    next: u64,
}

impl JournalReader {
    /// The reader of the journal with this head and number; `None` if it is not one.
    pub fn decode_header(bytes: &[u8], number: u64) -> Option<Self> {
        let id = u64::from_le_bytes(bytes.get(24..32)?.try_into().ok()?);
        (bytes.get(..RECORD)? == header(number, id)).then_some(Self { id, next: 0 })
    }

    /// The records in `bytes`, which follow those of the last call. False at the first that is not
    /// whole and sound: the journal ends there.
    pub fn decode(&mut self, bytes: &[u8], mut each: impl FnMut(Record)) -> bool {
        for bytes in bytes.chunks(RECORD) {
            let sound =
                word(bytes, 36) == Some(crc(self.id, self.next, &bytes[..36.min(bytes.len())]));
            let event = match bytes[0] {
                1 if sound => Event::Admitted,
                2 if sound => Event::Removed,
                _ => return false,
            };
            let Some(record) = Record::of_body(event, &bytes[4..32]) else { return false };
            each(record);
            self.next += 1;
        }
        true
    }
}
