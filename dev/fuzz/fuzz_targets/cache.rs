//! Any bytes are refused or read as records of the chunk cache that could be; checksums are made
//! good again, so that the rest is reached. A record that is read names blocks within an arena.

#![no_main]

use burgeon_cache::{
    ChunkKey,
    checkpoint::{self, Step},
    journal::{self, Event, Record},
};
use burgeon_fuzz::edits;
use libfuzzer_sys::fuzz_target;

const NUMBER: u64 = 3;
const ID: u64 = 7;
/// Of a journal's record and of both headers; docs/format.md, "Cache".
const RECORD: usize = 40;
const BLOCKS_MAX: u32 = 1024;
const ARENA_BLOCKS: u32 = 1 << 22;

fn record(n: u32) -> Record {
    let event = if n % 3 == 2 { Event::Removed } else { Event::Admitted };
    let key = ChunkKey::from([n as u8; 16]);
    Record { event, key, arena: 1 + n % 5, block: n * 64, about: 1 + n % 64 }
}

fn check(record: Record) {
    let blocks = record.about & 0x7ff;
    assert!((1..=BLOCKS_MAX).contains(&blocks) && record.arena > 0);
    assert!(record.block + blocks <= ARENA_BLOCKS);
}

fn checksum(place: u64, bytes: &[u8]) -> [u8; 4] {
    let covered = [&ID.to_le_bytes(), &place.to_le_bytes(), bytes].concat();
    (burgeon_block::ChecksumKind::Crc32c.of(&covered) as u32).to_le_bytes()
}

fn repair_journal(records: &mut [u8]) {
    for (index, record) in (0..).zip(records.chunks_exact_mut(RECORD)) {
        let (covered, sum) = record.split_at_mut(RECORD - 4);
        sum.copy_from_slice(&checksum(index, covered));
    }
}

/// The same of groups, as far as their counts make sense.
fn repair_checkpoint(mut rest: &mut [u8]) {
    for index in 0.. {
        let Some(count) = rest.first_chunk::<4>() else { return };
        let count = u32::from_le_bytes(*count) as usize;
        let body = if count == 0 { 12 } else { 4 + count.saturating_mul(28) };
        if rest.len() < body.saturating_add(4) {
            return;
        }
        let (group, next) = std::mem::take(&mut rest).split_at_mut(body + 4);
        let (covered, sum) = group.split_at_mut(body);
        sum.copy_from_slice(&checksum(index, covered));
        rest = next;
    }
}

fuzz_target!(|input: &[u8]| {
    let Some((how, input)) = input.split_first() else { return };
    let mut records: Vec<u8> =
        (0..9).flat_map(|n| journal::encode(&record(n as u32), ID, n)).collect();
    let all: Vec<Record> = (0..9).map(record).collect();
    let mut groups = checkpoint::encode_group(&all[..5], ID, 0);
    groups.extend(checkpoint::encode_group(&all[5..], ID, 1));
    groups.extend(checkpoint::encode_end(9, ID, 2));
    for bytes in [&mut records, &mut groups] {
        if how % 2 == 0 {
            *bytes = input.to_vec();
        } else {
            edits(bytes, input);
        }
    }
    if how & 2 == 0 {
        repair_journal(&mut records);
        repair_checkpoint(&mut groups);
    }
    assert!(
        journal::JournalReader::decode_header(input, NUMBER).is_none() || input.len() >= RECORD
    );
    let header = journal::header(NUMBER, ID);
    let mut reader = journal::JournalReader::decode_header(&header, NUMBER).expect("a sound head");
    reader.decode(&records, check);
    let header = checkpoint::header(NUMBER, ID);
    let mut reader =
        checkpoint::CheckpointReader::decode_header(&header, NUMBER).expect("a sound head");
    let mut rest = &groups[..];
    while let Step::Group(len) = reader.decode(rest, check) {
        rest = &rest[len..];
    }
});
