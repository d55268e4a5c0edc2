//! The extent map: mappings are permanent, and damage never gives a different answer.

#![allow(clippy::unwrap_used)]

use std::{
    fs,
    path::Path,
    sync::{Arc, Mutex},
};

use burgeon_block::{BLOCK_SIZE, ByteRange, Digest, ErrorKind, FileIdentity, ObjectId, Result};
use burgeon_image::{
    Content, ExtentMap, ExtentSource, ExtentWriter, Mapping,
    extents::{AREA_MAX, CHECKSUMS_MAX, LogFile, LogView},
};

const SIZE: u64 = 4 << 60;

fn computed(len: u64) -> Content {
    let object = ObjectId::new("computed/block-number").unwrap();
    Content { source: ExtentSource::Computed(object), offset: 0, len }
}

fn file(name: &str, size: u64) -> Content {
    let object = ObjectId::new(format!("file/{name}")).unwrap();
    let identity = FileIdentity { inode: 7, size, mtime_ns: -5, ctime_ns: 1 << 60 };
    Content { source: ExtentSource::File { object, identity }, offset: 0, len: size }
}

fn image(offset: u64, len: u64) -> Content {
    Content { source: ExtentSource::Image(Digest::of(b"an image")), offset, len }
}

fn mapping(extents: Vec<Content>) -> Mapping {
    Mapping { label: "models/llama.bin".into(), origin: "/srv/llama.bin".into(), extents }
}

fn created() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    ExtentWriter::create(folder.path(), SIZE).unwrap();
    folder
}

/// Range of an extent, its source, its offset there, and the position of its checksums.
type Known = (ByteRange, ExtentSource, u64, u64);

/// The contents of a map: position and source of each extent.
fn content(map: &ExtentMap) -> Vec<Known> {
    let end = map.mappings().unwrap().last().map_or(0, |last| last.range.end());
    let mut at = 0;
    let mut all = Vec::new();
    while at < end {
        let extent = map.find(at).unwrap();
        at = extent.range.end();
        all.push((extent.range, (*extent.source).clone(), extent.offset, extent.first_checksum));
    }
    all
}

#[test]
fn a_mapping_is_found_by_any_later_process() {
    let folder = created();
    let reader = ExtentMap::open(folder.path()).unwrap();
    assert_eq!(reader.find(0).unwrap_err().kind(), ErrorKind::Unmapped);

    let mut writer = ExtentWriter::open(folder.path()).unwrap();
    let first =
        mapping(vec![computed(3 << 40), file("a", 5000), file("a", 5000), image(8192, 4096)]);
    let range = writer.map(&first).unwrap();
    assert_eq!((range.start(), range.len()), (0, (3 << 40) + 2 * 8192 + 4096));
    let positions: Vec<_> = first.positions().collect();
    assert_eq!(positions, [0, 3 << 40, (3 << 40) + 8192, (3 << 40) + 16384]);
    let second = writer.map(&mapping(vec![file("b", 1)])).unwrap();
    assert_eq!(second, ByteRange::at(range.end(), 4096).unwrap());

    assert_eq!(reader.find(0).unwrap_err().kind(), ErrorKind::Unmapped, "not looked yet");
    reader.refresh().unwrap();
    let seen = content(&reader);
    assert_eq!(seen.len(), 5);
    assert_eq!(seen[1].1, first.extents[1].source);
    assert_eq!((seen[1].3, seen[2].3, seen[4].3), (0, 0, 2), "one file, one set of checksums");
    assert_eq!(
        (seen[3].2, seen[3].1.clone()),
        (8192, ExtentSource::Image(Digest::of(b"an image")))
    );
    let inside = reader.find((3 << 40) - 1).unwrap();
    assert_eq!((inside.range.start(), inside.range.end()), (0, 3 << 40));
    for beyond in [second.end(), SIZE - 1, u64::MAX] {
        assert_eq!(reader.find(beyond).unwrap_err().kind(), ErrorKind::Unmapped);
    }
    assert_eq!(reader.images().unwrap(), [Digest::of(b"an image")]);

    drop(writer);
    let mut writer = ExtentWriter::open(folder.path()).unwrap();
    let third = writer.map(&mapping(vec![computed(1)])).unwrap();
    assert_eq!(third.start(), second.end());
    assert_eq!(writer.free(), SIZE - third.end());
    let map = ExtentMap::open(folder.path()).unwrap();
    assert_eq!(content(&map)[..5], seen);
    let mappings = map.mappings().unwrap();
    assert_eq!(mappings, writer.mappings().unwrap());
    let ranges: Vec<_> = mappings.iter().map(|mapping| mapping.range).collect();
    assert_eq!(ranges, [range, second, third]);
    assert_eq!((mappings[0].extents, mappings[0].len), (4, (3 << 40) + 10_000 + 4096));
    assert_eq!(mappings[1].label, "models/llama.bin");
    assert_eq!(mappings[1].origin, "/srv/llama.bin");
}

#[test]
fn a_tree_of_many_files_is_one_mapping() {
    let folder = created();
    let mut writer = ExtentWriter::open(folder.path()).unwrap();
    let files: Vec<_> = (0..20_000).map(|n| file(&format!("tree/{n}"), n % 9000 + 1)).collect();
    let all = mapping(files);
    let range = writer.map(&all).unwrap();
    let map = ExtentMap::open(folder.path()).unwrap();
    assert_eq!(map.records(), 20_001);
    for (wanted, position) in all.extents.iter().zip(all.positions()) {
        let extent = map.find(range.start() + position).unwrap();
        assert_eq!(*extent.source, wanted.source);
        assert_eq!(extent.range.start(), range.start() + position);
        assert_eq!(extent.range.len(), wanted.len.next_multiple_of(BLOCK_SIZE));
    }
}

#[test]
fn invalid_mappings_are_refused_and_change_nothing() {
    let folder = created();
    let mut writer = ExtentWriter::open(folder.path()).unwrap();
    let first = writer.map(&mapping(vec![computed(1)])).unwrap();
    let unaligned = Content { offset: 512, ..computed(4096) };
    let misnamed = |source| Content { source, ..computed(1) };
    let object = |name: &str| ObjectId::new(name).unwrap();
    let mut beyond = file("short", 4096);
    beyond.len = 4097;
    let mut cut = file("cut", 10_000);
    cut.len = 5000;
    let identity = FileIdentity { inode: 1, size: 1, mtime_ns: 0, ctime_ns: 0 };
    for (bad, kind) in [
        (vec![], ErrorKind::Invalid),
        (vec![computed(0)], ErrorKind::Invalid),
        (vec![unaligned], ErrorKind::Invalid),
        (vec![misnamed(ExtentSource::Computed(object("packs/a")))], ErrorKind::Invalid),
        (
            vec![misnamed(ExtentSource::File { object: object("packs/a"), identity })],
            ErrorKind::Invalid,
        ),
        (vec![beyond], ErrorKind::Invalid),
        (vec![cut], ErrorKind::Invalid),
        (vec![image(0, 5000)], ErrorKind::Invalid),
        (vec![computed(SIZE)], ErrorKind::NoSpace),
        (vec![computed(SIZE - 4096), computed(1)], ErrorKind::NoSpace),
        (vec![computed(AREA_MAX); 3], ErrorKind::NoSpace),
        (vec![file("vast", CHECKSUMS_MAX * BLOCK_SIZE + 1)], ErrorKind::NoSpace),
        (vec![computed(1), computed(u64::MAX)], ErrorKind::Invalid),
    ] {
        let error = writer.map(&mapping(bad)).unwrap_err();
        assert_eq!(error.kind(), kind, "{error}");
    }
    let long = Mapping { label: "x".repeat(5000), ..mapping(vec![computed(1)]) };
    assert_eq!(writer.map(&long).unwrap_err().kind(), ErrorKind::Invalid);
    let next = writer.map(&mapping(vec![computed(SIZE - 4096)])).unwrap();
    assert_eq!((next.start(), next.end()), (first.end(), SIZE), "to the last byte");
    assert_eq!(writer.map(&mapping(vec![computed(1)])).unwrap_err().kind(), ErrorKind::NoSpace);
    let map = ExtentMap::open(folder.path()).unwrap();
    assert_eq!(content(&map).len(), 2);
    assert_eq!(map.find(SIZE - 1).unwrap().range, next);
}

#[test]
fn a_map_has_one_writer_and_is_created_once() {
    let folder = created();
    let _writer = ExtentWriter::open(folder.path()).unwrap();
    let error = ExtentWriter::open(folder.path()).err().unwrap();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    let error = ExtentWriter::create(folder.path(), SIZE).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
    for size in [0, 4097, AREA_MAX + 4096] {
        let error = ExtentWriter::create(&folder.path().join("other"), size).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
    }
    let error = ExtentMap::open(&folder.path().join("nowhere")).err().unwrap();
    assert_eq!(error.kind(), ErrorKind::NotFound, "{error}");
}

/// A map of three mappings; returns its contents.
fn sample(folder: &Path) -> Vec<Known> {
    let mut writer = ExtentWriter::open(folder).unwrap();
    writer.map(&mapping(vec![computed(1 << 40), file("a", 5000)])).unwrap();
    writer.map(&mapping(vec![image(0, 8192), image(1 << 20, 4096)])).unwrap();
    writer.map(&mapping(vec![file("b", 1), file("c", 70_000)])).unwrap();
    content(&ExtentMap::open(folder).unwrap())
}

/// True if each address has its previous answer or none.
fn same_or_error(map: &ExtentMap<Memory>, before: &[Known]) -> bool {
    before.iter().all(|(range, source, offset, checksum)| {
        [range.start(), range.end() - 1].into_iter().all(|at| match map.find(at) {
            Ok(extent) => {
                (extent.range, &*extent.source, extent.offset, extent.first_checksum)
                    == (*range, source, *offset, *checksum)
            }
            Err(error) => matches!(error.kind(), ErrorKind::Corrupt | ErrorKind::Unmapped),
        })
    })
}

/// A file in memory.
#[derive(Clone)]
struct Memory(Arc<Mutex<Vec<u8>>>);

impl LogFile for Memory {
    fn size(&self) -> Result<u64> {
        Ok(self.0.lock().unwrap().len() as u64)
    }

    fn view(&self, len: u64) -> Result<LogView> {
        Ok(self.0.lock().unwrap()[..len as usize].to_vec().into())
    }

    fn write_at(&self, offset: u64, bytes: &[u8]) -> Result<()> {
        let mut file = self.0.lock().unwrap();
        let end = offset as usize + bytes.len();
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

const NAMES: [&str; 2] = ["extents", "sources"];

/// Both files of the sample, in memory, and their contents.
fn sample_bytes() -> ([Vec<u8>; 2], Vec<Known>) {
    let folder = created();
    let before = sample(folder.path());
    (NAMES.map(|name| fs::read(folder.path().join(name)).unwrap()), before)
}

fn logs(files: &[Vec<u8>; 2]) -> [Memory; 2] {
    files.clone().map(|bytes| Memory(Arc::new(Mutex::new(bytes))))
}

#[test]
fn a_flipped_bit_never_gives_a_different_answer() {
    let (good, before) = sample_bytes();
    let end = before.last().unwrap().0.end();
    let mut refused = 0;
    for which in 0..2 {
        for bit in 0..good[which].len() * 8 {
            let mut bad = good.clone();
            bad[which][bit / 8] ^= 1 << (bit % 8);
            let place = format!("{}, bit {bit}", NAMES[which]);
            match ExtentMap::over(logs(&bad)) {
                Ok(map) => {
                    assert!(same_or_error(&map, &before), "{place}");
                    let _ = (map.mappings(), map.images());
                }
                Err(error) => {
                    let kinds = [ErrorKind::Corrupt, ErrorKind::UnsupportedFormat];
                    assert!(kinds.contains(&error.kind()), "{place}: {error}");
                    refused += 1;
                }
            }
            // No address is allocated twice, either.
            if let Ok(mut writer) = ExtentWriter::over(logs(&bad)) {
                let range = writer.map(&mapping(vec![computed(1)])).unwrap();
                assert!(range.start() >= end, "{place}: {range}");
            }
        }
    }
    assert_eq!(refused, 2 * 64 * 8, "what makes a map unusable is its headers alone");
}

#[test]
fn a_truncated_file_is_an_older_map_or_an_error() {
    let (good, before) = sample_bytes();
    for which in 0..2 {
        for len in 0..good[which].len() {
            let mut cut = good.clone();
            cut[which].truncate(len);
            match ExtentMap::over(logs(&cut)) {
                Ok(map) => assert!(same_or_error(&map, &before), "{}, {len}", NAMES[which]),
                Err(error) => {
                    assert_eq!(error.kind(), ErrorKind::Corrupt, "{}, {len}", NAMES[which]);
                }
            }
        }
    }
}

#[test]
fn a_damaged_record_is_an_error_only_for_adjacent_addresses() {
    let folder = created();
    let mut writer = ExtentWriter::open(folder.path()).unwrap();
    writer.map(&mapping(vec![computed(8192); 700])).unwrap();
    drop(writer);
    let files = NAMES.map(|name| fs::read(folder.path().join(name)).unwrap());
    let before = content(&ExtentMap::open(folder.path()).unwrap());
    assert_eq!(before.len(), 700);
    // Also those through which others are found; low bits and high ones.
    for record in [0, 1, 2, 127, 128, 129, 200, 256, 384, 512, 640, 699] {
        for (byte, bit) in [(0, 1), (0, 4), (1, 1), (7, 128)] {
            let mut damaged = files.clone();
            damaged[0][64 + record * 24 + byte] ^= bit;
            let map = ExtentMap::over(logs(&damaged)).unwrap();
            for (index, known) in before.iter().enumerate() {
                let is_next = (index..=index + 1).contains(&record);
                let found = map.find(known.0.start());
                match found {
                    Ok(extent) => assert!(extent.range == known.0 && !is_next, "{record}, {index}"),
                    Err(error) => assert!(is_next, "{record}, {byte}, {bit}, {index}: {error}"),
                }
            }
        }
    }
}

#[test]
fn verification_finds_damage_and_unfinished_mappings() {
    let (files, _) = sample_bytes();
    let open = |files: &[Vec<u8>; 2]| ExtentMap::over(logs(files)).unwrap();
    assert_eq!(open(&files).verify().unwrap(), Vec::<String>::new());
    for log in [0, 1] {
        let mut damaged = files.clone();
        damaged[log][64] ^= 1;
        assert_eq!(open(&damaged).verify().unwrap_err().kind(), ErrorKind::Corrupt, "{log}");
    }
    // The last end is missing.
    let mut cut = files.clone();
    cut[0].truncate(files[0].len() - 24);
    assert_eq!(open(&cut).verify().unwrap(), ["models/llama.bin"]);
}

#[test]
fn files_of_two_maps_are_refused() {
    let (one, two) = (created(), created());
    sample(one.path());
    sample(two.path());
    fs::copy(one.path().join("sources"), two.path().join("sources")).unwrap();
    let error = ExtentMap::open(two.path()).err().unwrap();
    assert_eq!(error.kind(), ErrorKind::Corrupt, "{error}");
}

#[test]
fn later_versions_and_unknown_features_are_unsupported() {
    let folder = created();
    let path = folder.path().join("extents");
    let good = fs::read(&path).unwrap();
    for (at, writing_only) in [(8, false), (24, true), (32, false)] {
        let mut bytes = good.clone();
        bytes[at] += 1;
        let sum = xxhash(&bytes[..56]);
        bytes[56..64].copy_from_slice(&sum.to_le_bytes());
        fs::write(&path, &bytes).unwrap();
        let error = ExtentWriter::open(folder.path()).err().unwrap();
        assert_eq!(error.kind(), ErrorKind::UnsupportedFormat, "byte {at}: {error}");
        assert_eq!(ExtentMap::open(folder.path()).is_ok(), writing_only, "byte {at}");
    }
}

fn xxhash(bytes: &[u8]) -> u64 {
    burgeon_block::ChecksumKind::Xxhash64.of(bytes)
}

/// A map of version 1, made by another program according to `docs/format.md`: it opens forever,
/// and current code writes the same bytes.
#[test]
fn a_map_of_version_1_opens_and_is_written_identically() {
    let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/v1/area");
    let map = ExtentMap::open(&fixture).unwrap();
    let digest: Digest = "d3".repeat(32).parse().unwrap();
    let of_image = |offset, len| Content { source: ExtentSource::Image(digest), offset, len };
    let mappings = [
        mapping(vec![computed(1 << 40), file("a", 5000)]),
        mapping(vec![of_image(0, 8192), of_image(1 << 20, 4096)]),
    ];
    let found = content(&map);
    let wanted = mappings.iter().flat_map(|mapping| &mapping.extents);
    for (wanted, (range, source, offset, _)) in wanted.zip(&found) {
        assert_eq!((source, *offset), (&wanted.source, wanted.offset));
        assert_eq!(range.len(), wanted.len.next_multiple_of(BLOCK_SIZE));
    }
    assert_eq!((found.len(), map.size()), (4, 1 << 50));
    assert_eq!(map.images().unwrap(), [digest]);

    let files = logs(&ExtentWriter::headers(1 << 50, 0x0123_4567_89ab_cdef).unwrap());
    let mut writer = ExtentWriter::over(files.clone()).unwrap();
    for mapping in &mappings {
        writer.map(mapping).unwrap();
    }
    assert_eq!(writer.mappings().unwrap(), map.mappings().unwrap());
    for (name, file) in NAMES.iter().zip(files) {
        assert!(fs::read(fixture.join(name)).unwrap() == *file.0.lock().unwrap(), "{name}");
    }
}

type Once = Arc<Mutex<Option<Box<dyn FnOnce() + Send>>>>;

/// A file in memory; a callback runs just before its length is read again.
struct Overtaken {
    memory: Memory,
    first: Once,
}

impl LogFile for Overtaken {
    fn size(&self) -> Result<u64> {
        let first = self.first.lock().unwrap().take();
        first.into_iter().for_each(|first| first());
        self.memory.size()
    }

    fn view(&self, len: u64) -> Result<LogView> {
        self.memory.view(len)
    }

    fn write_at(&self, offset: u64, bytes: &[u8]) -> Result<()> {
        self.memory.write_at(offset, bytes)
    }

    fn sync(&self) -> Result<()> {
        self.memory.sync()
    }
}

#[test]
fn a_view_is_never_followed_by_an_older_one() {
    let ([extents, sources], _) = sample_bytes();
    let header = fs::read(created().path().join("extents")).unwrap().len();
    let first = Once::default();
    let log = |bytes: &[u8], first: &Once| {
        let memory = Memory(Arc::new(Mutex::new(bytes.to_vec())));
        (memory.clone(), Overtaken { memory, first: Arc::clone(first) })
    };
    // Nothing is mapped yet.
    let (appended, extents_log) = log(&extents[..header], &Once::default());
    let (_, sources_log) = log(&sources, &first);
    let map = Arc::new(ExtentMap::over([extents_log, sources_log]).unwrap());
    assert_eq!(map.find(0).unwrap_err().kind(), ErrorKind::Unmapped);
    // Between the two reads of a refresh, something is mapped, and another refresh sees it.
    let other = Arc::clone(&map);
    *first.lock().unwrap() = Some(Box::new(move || {
        *appended.0.lock().unwrap() = extents;
        other.refresh().unwrap();
        other.find(0).unwrap();
    }));
    map.refresh().unwrap();
    assert!(first.lock().unwrap().is_none(), "nothing came between");
    map.find(0).unwrap();
}
