//! The virtual area: it is written and checked at every size, deterministically, and does not
//! affect the tree. Violations of its rules are found.

#![allow(clippy::unwrap_used, reason = "a test")]

mod common;

use burgeon_block::{ByteRange, ChecksumKind, ErrorKind};
use burgeon_btrfs::{
    DATA_START, DeviceNo, Identity, SeedInfo, SeedOptions, check, patch_nodes, superblock,
};
use common::{Builder, IDENTITY, Seed, Template, get_u64, model, options, pattern};

const TIB: u64 = 1 << 40;
const EIB: u64 = 1 << 60;
const CHUNK: u64 = 256 * TIB - (128 << 10);
const AREA_START: u64 = 128 * TIB;
const EXTENT_TREE: u64 = 2;
const TOP: u64 = 5;
const VIRTUAL: u64 = 257;
const FILE: u64 = 257;

fn builder() -> Builder {
    let mut builder = Builder::new();
    let directory = builder.dir(0, "directory");
    builder.file(directory, "file", &pattern(1, 300_000));
    builder.inline(directory, "inline", b"text");
    builder
}

fn seed(bytes: u64, change: impl Fn(SeedOptions) -> SeedOptions) -> Seed {
    let mut builder = builder();
    let options = change(SeedOptions { virtual_bytes: bytes, ..builder.options() });
    builder.seed(&options)
}

#[test]
fn every_size_is_one_file_and_leaves_the_tree_alone() {
    let without = seed(0, |options| options);
    let tree = model::of_seed(&without);
    let extents = without.check().unwrap().extents;
    assert_eq!(without.info.virtual_area, None);
    for (bytes, chunks) in [
        (1 << 30, 1),
        (16 * TIB, 1),
        (256 * TIB, 2),
        (4 * EIB, (4 * EIB).div_ceil(CHUNK)),
        (7 * EIB, (7 * EIB).div_ceil(CHUNK)),
    ] {
        let seed = seed(bytes, |options| options);
        let report = seed.check().unwrap_or_else(|error| panic!("{bytes} bytes: {error}"));
        let area = ByteRange::at(AREA_START, bytes).unwrap();
        assert_eq!(seed.info.virtual_area, Some(area));
        assert_eq!(report.extents, extents + chunks);
        assert_eq!(model::of_seed(&seed), tree);
        assert_eq!(seed.info.data_device_size(), area.end() + (64 << 20));
        let file: Vec<_> = seed.keys(VIRTUAL).into_iter().filter(|key| key.1 == 108).collect();
        assert_eq!(file.len() as u64, chunks);
        assert!(file.iter().zip(0..).all(|(key, n)| *key == (FILE, 108, n * CHUNK)));
    }
}

#[test]
fn extents_can_be_shorter_than_chunks() {
    for (most, count) in [(1 << 30, 1024 * 300 + 1), (128 * TIB, 3), (CHUNK, 2)] {
        let bytes = 300 * TIB;
        let with = |options| SeedOptions { virtual_extent_max: most, ..options };
        let seed = seed(bytes, with);
        let report = seed.check().unwrap();
        assert_eq!(report.extents - self::seed(0, with).check().unwrap().extents, count);
    }
}

#[test]
fn its_start_depends_only_on_the_end_of_lazy_data() {
    let area = |data_end: u64| {
        let mut builder = Builder::new();
        let options = SeedOptions { virtual_bytes: TIB, ..options(data_end) };
        builder.seed(&options).info.virtual_area.unwrap().start()
    };
    assert_eq!(area(DATA_START), AREA_START);
    assert_eq!(area(AREA_START - (1 << 20)), AREA_START);
    assert_eq!(area(AREA_START - 4096), 2 * AREA_START, "the last chunk is cut to whole MiB");
    assert_eq!(area(AREA_START), 2 * AREA_START);
}

#[test]
fn it_is_deterministic_and_patched_as_any_seed() {
    for checksum in [ChecksumKind::Crc32c, ChecksumKind::Xxhash64] {
        let make = || seed(4 * EIB, |options| SeedOptions { checksum, ..options });
        let template = make();
        assert!(template.pieces == make().pieces);
        let mut mount = template.clone();
        for (piece, start) in mount.pieces.iter_mut().zip(Template::STARTS) {
            patch_nodes(&template.info, &IDENTITY, start, piece).unwrap();
        }
        check(&mount.info, &IDENTITY, &mount).unwrap();
        check(&mount.info, &Identity::TEMPLATE, &mount).expect_err("no template any more");
    }
}

#[test]
fn its_description_round_trips_and_requires_the_feature() {
    let info = seed(4 * EIB, |options| options).info;
    let bytes = info.to_bytes();
    assert_eq!(SeedInfo::from_bytes(&bytes).unwrap(), info);
    assert_eq!(bytes[20..24], [1, 0, 0, 0], "what does not know virtual areas refuses it");
    assert_eq!(seed(0, |options| options).info.to_bytes()[20..24], [0; 4]);
    let edited = |edit: &dyn Fn(&mut Vec<u8>)| {
        let mut bytes = bytes.clone();
        edit(&mut bytes);
        let sum = ChecksumKind::Xxhash64.of(&bytes[..232]);
        bytes[232..].copy_from_slice(&sum.to_le_bytes());
        SeedInfo::from_bytes(&bytes)
    };
    edited(&|_| ()).unwrap();
    let refused = |edit: &dyn Fn(&mut Vec<u8>)| edited(edit).unwrap_err().kind();
    assert_eq!(refused(&|bytes| bytes[20] = 3), ErrorKind::UnsupportedFormat);
    assert_eq!(refused(&|bytes| bytes[20] = 0), ErrorKind::Corrupt, "bytes, but no flag");
    assert_eq!(refused(&|bytes| bytes[184..192].fill(0)), ErrorKind::Corrupt);
    assert_eq!(refused(&|bytes| bytes[184] = 1), ErrorKind::Corrupt, "no whole GiB");
    assert_eq!(refused(&|bytes| bytes[191] = 0x7f), ErrorKind::Corrupt, "beyond 7 EiB");
}

#[test]
fn invalid_sizes_are_refused() {
    let refused = |change: &dyn Fn(SeedOptions) -> SeedOptions| {
        let mut builder = builder();
        let options = change(SeedOptions { virtual_bytes: TIB, ..builder.options() });
        let error = builder.write(&options).err().unwrap();
        assert_eq!(error.kind(), ErrorKind::Invalid);
        error.to_string()
    };
    let with = |bytes| move |options| SeedOptions { virtual_bytes: bytes, ..options };
    assert!(refused(&with(4096)).contains("1 GiB"));
    assert!(refused(&with(7 * EIB + (1 << 30))).contains("7 EiB"));
    let behind = |options| SeedOptions { data_end: 2 * EIB, virtual_bytes: 7 * EIB, ..options };
    assert!(refused(&behind).contains("8 EiB"));
    let extents = |most| move |options| SeedOptions { virtual_extent_max: most, ..options };
    assert!(refused(&extents(0)).contains("whole blocks"));
    assert!(refused(&extents(4097)).contains("whole blocks"));
    let many = |options| SeedOptions { virtual_bytes: EIB, virtual_extent_max: 4096, ..options };
    assert!(refused(&many).contains("metadata"));
}

#[test]
fn violations_of_its_rules_are_found() {
    let good = seed(300 * TIB, |options| options);
    let found = |edit: &dyn Fn(&mut Seed)| {
        let mut seed = good.clone();
        edit(&mut seed);
        let error = seed.check().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Corrupt);
        error.to_string()
    };
    let put = |at: usize, value: u64| {
        move |item: &mut [u8]| item[at..at + 8].copy_from_slice(&value.to_le_bytes())
    };
    let inode = (FILE, 1, 0);
    let extent = (AREA_START, 168, CHUNK);
    let text = found(&|seed| seed.edit_item(VIRTUAL, inode, put(64, 0)));
    assert!(text.contains("virtual area"), "checksums are missing: {text}");
    let text = found(&|seed| seed.edit_item(VIRTUAL, inode, put(16, TIB)));
    assert!(text.contains("size"), "{text}");
    // Two extents swapped, in the file and in the extent tree alike.
    let text = found(&|seed| {
        seed.edit_item(VIRTUAL, (FILE, 108, 0), put(21, AREA_START + 4096));
    });
    assert!(text.contains("virtual area"), "{text}");
    // The tree's own file uses a piece of the area.
    let text = found(&|seed| seed.edit_item(EXTENT_TREE, extent, put(25, 256)));
    assert!(text.contains("other subvolume"), "{text}");
    let text = found(&|seed| seed.edit_item(EXTENT_TREE, extent, put(25, 258)));
    assert!(text.contains("not ours"), "{text}");
    let text = found(&|seed| seed.edit_item(EXTENT_TREE, extent, put(0, 2)));
    assert!(text.contains("uses"), "{text}");
    let text = found(&|seed| {
        let key = seed.keys(TOP).into_iter().find(|key| (key.1, key.2) == (96, 3)).unwrap();
        seed.edit_item(TOP, key, put(0, 256));
    });
    assert!(text.contains("top level"), "{text}");
    let text = found(&|seed| seed.info.virtual_area = None);
    assert!(text.contains("damaged"), "{text}");
    let text = found(&|seed| {
        seed.info.virtual_area = ByteRange::at(AREA_START, 300 * TIB - (1 << 30));
    });
    assert!(text.contains("wrong size"), "{text}");
}

#[test]
fn superblocks_count_the_area() {
    let info = seed(4 * EIB, |options| options).info;
    for device in [DeviceNo::Metadata, DeviceNo::Data] {
        let block = superblock(&info, &IDENTITY, device, 0).unwrap();
        let total = get_u64(&block, 112);
        assert_eq!(total, info.metadata_device_size() + info.data_device_size());
        assert!(get_u64(&block, 120) >= 4 * EIB, "bytes used");
    }
}
