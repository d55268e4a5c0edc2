//! All living chunks at one time; docs/format.md, "Cache".
//!
//! ```text
//!   header │ count, entries, checksum │ count, entries, checksum │ … │ 0, total, checksum
//! ```
//!
//! It is written part by part while chunks come and go: what changes meanwhile is in the journal
//! that begins with it. It gets its name when it is whole; of one that is damaged later, the
//! groups before the damage are read.

use crate::journal::{Event, Record, crc, word};

const MAGIC: [u8; 8] = *b"BURGCKPT";
const VERSION: u32 = 1;
pub(crate) const HEADER: usize = 40;
pub(crate) const ENTRY: usize = 28;
/// Most entries of a group.
pub(crate) const GROUP: usize = 2048;
/// Most chunks, as many as there are slots.
const CHUNKS_MAX: u64 = crate::slots::SLOTS_MAX as u64;

/// The head of the checkpoint with this number; `id` is random and covers its groups.
pub fn header(number: u64, id: u64) -> [u8; HEADER] {
    let mut header = [0; HEADER];
    header[..8].copy_from_slice(&MAGIC);
    header[8..12].copy_from_slice(&VERSION.to_le_bytes());
    header[16..24].copy_from_slice(&number.to_le_bytes());
    header[24..32].copy_from_slice(&id.to_le_bytes());
    let sum = crc(0, 0, &header[..36]);
    header[36..].copy_from_slice(&sum.to_le_bytes());
    header
}

/// A group of 1 to 2048 chunks; `index` counts the groups.
pub fn encode_group(records: &[Record], id: u64, index: u64) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(8 + records.len() * ENTRY);
    bytes.extend_from_slice(&(records.len() as u32).to_le_bytes());
    records.iter().for_each(|record| bytes.extend_from_slice(&record.body()));
    let sum = crc(id, index, &bytes);
    bytes.extend_from_slice(&sum.to_le_bytes());
    bytes
}

/// The end of a checkpoint of `total` chunks, after `index` groups.
pub fn encode_end(total: u64, id: u64, index: u64) -> Vec<u8> {
    let mut bytes = vec![0; 4];
    bytes.extend_from_slice(&total.to_le_bytes());
    let sum = crc(id, index, &bytes);
    bytes.extend_from_slice(&sum.to_le_bytes());
    bytes
}

/// The answer of [`CheckpointReader::decode`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Step {
    /// A group took this many bytes.
    Group(usize),
    /// It needs more bytes.
    More,
    /// The checkpoint is whole.
    End,
    /// It is none.
    Bad,
}

/// Reads a checkpoint part by part.
pub struct CheckpointReader {
    id: u64,
    groups: u64,
    total: u64,
}

impl CheckpointReader {
    /// The reader of the checkpoint with this head and number; `None` if it is not one.
    pub fn decode_header(bytes: &[u8], number: u64) -> Option<Self> {
        let id = u64::from_le_bytes(bytes.get(24..32)?.try_into().ok()?);
        let sound = bytes.get(..HEADER)? == header(number, id);
        sound.then_some(Self { id, groups: 0, total: 0 })
    }

    /// Reads the group at the start of `bytes`. Entries that cannot be make it bad.
    pub fn decode(&mut self, bytes: &[u8], mut each: impl FnMut(Record)) -> Step {
        let Some(count) = word(bytes, 0) else { return Step::More };
        let body = match count as usize {
            0 => 12,
            count if count <= GROUP => 4 + count * ENTRY,
            _ => return Step::Bad,
        };
        let Some(sum) = word(bytes, body) else { return Step::More };
        if sum != crc(self.id, self.groups, &bytes[..body]) {
            return Step::Bad;
        }
        if count == 0 {
            let is_all = bytes[4..12] == self.total.to_le_bytes();
            return if is_all { Step::End } else { Step::Bad };
        }
        for entry in bytes[4..body].chunks_exact(ENTRY) {
            match Record::of_body(Event::Admitted, entry) {
                Some(record) if self.total < CHUNKS_MAX => each(record),
                _ => return Step::Bad,
            }
            self.total += 1;
        }
        self.groups += 1;
        Step::Group(body + 4)
    }
}
