//! Any bytes are refused or give an extent map in which every address can be looked up, and to
//! which can be appended. Checksums are made good again, so that the rest is reached.

#![no_main]

use std::sync::{Arc, Mutex};

use burgeon_block::{ChecksumKind, Error, ErrorKind, ObjectId, Result};
use burgeon_fuzz::edits;
use burgeon_image::{
    Content, ExtentMap, ExtentSource, ExtentWriter, Mapping,
    extents::{LogFile, LogView},
};
use libfuzzer_sys::fuzz_target;

const SIZE: u64 = 1 << 40;
const ID: u64 = 7;
/// Of both files; docs/format.md, "Extent map".
const HEADER: usize = 64;
const RECORD: usize = 24;
const ENTRY: usize = 64;
const ENTRY_ALIGN: usize = 16;
const MAPPING: u8 = 4;
const NAME_MAX: u64 = 4096;
/// A file longer than this is none that an edited map has.
const LEN_MAX: usize = 1 << 20;

#[derive(Clone)]
struct Memory(Arc<Mutex<Vec<u8>>>);

impl LogFile for Memory {
    fn size(&self) -> Result<u64> {
        Ok(self.0.lock().expect("no panic before").len() as u64)
    }

    fn view(&self, len: u64) -> Result<LogView> {
        let file = self.0.lock().expect("no panic before");
        Ok(file[..len as usize].to_vec().into())
    }

    fn write_at(&self, offset: u64, bytes: &[u8]) -> Result<()> {
        let mut file = self.0.lock().expect("no panic before");
        let end = offset as usize + bytes.len();
        if end > LEN_MAX {
            return Err(Error::new(ErrorKind::NoSpace, "the file is full"));
        }
        if file.len() < end {
            file.resize(end, 0);
        }
        file[offset as usize..end].copy_from_slice(bytes);
        Ok(())
    }

    fn sync(&self) -> Result<()> {
        Ok(())
    }
}

/// Computes the checksums of all records anew.
fn repair_extents(file: &mut [u8]) {
    let records = file.get_mut(HEADER..).unwrap_or_default().chunks_exact_mut(RECORD);
    for (index, record) in (0u64..).zip(records) {
        let (covered, sum) = record.split_at_mut(RECORD - 4);
        sum.copy_from_slice(&checksum(index, covered));
    }
}

/// The same of all entries, as far as their lengths make sense.
fn repair_sources(file: &mut [u8]) {
    let mut at = HEADER;
    while let Some(entry) = file.get(at..at + ENTRY) {
        let word = |at: usize| u64::from_le_bytes(entry[at..at + 8].try_into().expect("8 bytes"));
        let name = usize::from(u16::from_le_bytes([entry[2], entry[3]]));
        let origin = match (entry[0], word(ENTRY - 8)) {
            (MAPPING, len) if len <= NAME_MAX => len as usize,
            (MAPPING, _) => return,
            _ => 0,
        };
        let len = (ENTRY + name + origin).next_multiple_of(ENTRY_ALIGN);
        let Some(whole) = file.get_mut(at..at + len) else { return };
        whole[4..8].fill(0);
        let sum = checksum(at as u64, whole);
        whole[4..8].copy_from_slice(&sum);
        at += len;
    }
}

fn checksum(place: u64, bytes: &[u8]) -> [u8; 4] {
    let covered = [&ID.to_le_bytes(), &place.to_le_bytes(), bytes].concat();
    (ChecksumKind::Crc32c.of(&covered) as u32).to_le_bytes()
}

fn mapping() -> Mapping {
    let object = ObjectId::new("computed/zeros").expect("a name");
    let content = |n: u64| Content {
        source: ExtentSource::Computed(object.clone()),
        offset: n * 4096,
        len: n + 1,
    };
    Mapping { label: "a".into(), origin: "b".into(), extents: (0..5).map(content).collect() }
}

fuzz_target!(|input: &[u8]| {
    let headers = ExtentWriter::headers(SIZE, ID).expect("a size");
    let logs = headers.map(|header| Memory(Arc::new(Mutex::new(header))));
    {
        let mut writer = ExtentWriter::over(logs.clone()).expect("a sound map");
        for _ in 0..3 {
            writer.map(&mapping()).expect("room");
        }
    }
    let Some((how, rest)) = input.split_first() else { return };
    // Raw files behind sound headers, or edited ones.
    let (one, two) = rest.split_at(rest.len() / 2);
    for (log, input) in logs.iter().zip([one, two]) {
        let mut file = log.0.lock().expect("no panic before");
        if how % 2 == 0 {
            file.truncate(HEADER);
            file.extend_from_slice(input);
        } else {
            edits(&mut file[HEADER..], input);
        }
    }
    if how & 2 == 0 {
        repair_extents(&mut logs[0].0.lock().expect("no panic before"));
        repair_sources(&mut logs[1].0.lock().expect("no panic before"));
    }
    let Ok(map) = ExtentMap::over(logs.clone()) else { return };
    for at in (0..40).map(|n| n * 4096).chain([SIZE - 1, u64::MAX]) {
        if let Ok(extent) = map.find(at) {
            assert!(extent.range.contains(at));
        }
    }
    let _ = (map.mappings(), map.images(), map.verify(), map.refresh());
    if let Ok(mut writer) = ExtentWriter::over(logs)
        && let Ok(range) = writer.map(&mapping())
    {
        map.refresh().expect("what was read before");
        if let Ok(extent) = map.find(range.start()) {
            assert!(extent.range.contains(range.start()));
        }
    }
});
