//! Random trees are written, checked, read back and compared with the input.

#![allow(clippy::unwrap_used, reason = "a test")]

mod common;

use burgeon_block::ChecksumKind;
use burgeon_btrfs::{DATA_START, InodeBody, SeedInfo, SeedOptions, write_seed};
use common::{
    Builder, Seed, Template, colliding,
    grow::{grow, step},
    model, options, pattern,
};
use proptest::prelude::*;

/// Writes, checks, reads back and compares.
fn verify(builder: &mut Builder, options: &SeedOptions) -> Seed {
    let seed = builder.seed(options);
    let report = seed.check().unwrap();
    assert_eq!(report.inodes, builder.tree.inodes.len() as u64);
    assert_eq!(report.names, builder.tree.dirents.len() as u64);
    let (expected, found) = (model::of_tree(&builder.tree), model::of_seed(&seed));
    for (number, entry) in &expected {
        assert_eq!(Some(entry), found.get(number), "inode {number}");
    }
    assert_eq!(expected.len(), found.len());
    let size = options.checksum.size();
    let all = builder.checksums(options.checksum);
    for (address, sum) in model::checksums(&seed) {
        let at = ((address - DATA_START) / 4096) as usize * size;
        assert_eq!(sum, all[at..at + size], "the checksum of the block at {address}");
    }
    assert_eq!(SeedInfo::from_bytes(&seed.info.to_bytes()).unwrap(), seed.info);
    seed
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

    #[test]
    fn random_trees_come_back(
        steps in proptest::collection::vec(step(), 0..120),
        xxhash in any::<bool>(),
    ) {
        let mut builder = grow(&steps);
        let mut options = builder.options();
        if xxhash {
            options.checksum = ChecksumKind::Xxhash64;
        }
        verify(&mut builder, &options);
    }
}

#[test]
fn the_smallest_tree_round_trips() {
    let mut builder = Builder::new();
    let options = builder.options();
    let seed = verify(&mut builder, &options);
    assert_eq!(seed.info.data_end, DATA_START);
}

#[test]
fn names_and_xattrs_with_one_hash_round_trip() {
    let mut builder = Builder::new();
    for name in colliding(!1, "name", 300) {
        builder.add(0, name, common::FILE);
    }
    let file = builder.file(0, "file", b"content");
    let names = colliding(!1, "user.", 40);
    let xattrs: Vec<(&[u8], &[u8])> = names.iter().map(|n| (&n[..], &b"value"[..])).collect();
    builder.xattrs(file, &xattrs);
    let options = builder.options();
    verify(&mut builder, &options);
}

#[test]
fn hard_links_spill_into_extended_references() {
    let mut builder = Builder::new();
    let file = builder.file(0, "file", b"content");
    // More than one INODE_REF holds, for each of two parents; some with the same hash.
    let other = builder.dir(0, "other");
    for parent in [0, other] {
        for n in 0..2000 {
            builder.link(parent, format!("a long enough name, number {n}"), file);
        }
        // Names that sort first: references fill up in the order of names.
        for name in colliding(256 + parent, "\u{1}", 50) {
            builder.link(parent, name, file);
        }
    }
    let options = builder.options();
    let seed = verify(&mut builder, &options);
    assert!(seed.keys(256).iter().any(|key| key.1 == 13), "there are extended references");
}

#[test]
fn the_maximum_number_of_links_round_trips() {
    let mut builder = Builder::new();
    let file = builder.inline(0, "0", b"x");
    (1..65535).for_each(|n| builder.link(0, n.to_string(), file));
    let options = builder.options();
    verify(&mut builder, &options);
}

#[test]
fn widely_shared_extents_spill_their_references() {
    let mut builder = Builder::new();
    let address = builder.append(&pattern(1, 64 << 10));
    for n in 0..3000u64 {
        // Different parts of one range, so that it is cut everywhere.
        let (skip, len) = (n % 16 * 4096, (16 - n % 16) * 4096);
        builder.mapped(0, format!("file {n}"), len, &[(0, address + skip, len)]);
    }
    // One file that uses the same extent many times.
    let runs: Vec<_> = (0..500).map(|n| (n * 8192, address, 4096)).collect();
    builder.mapped(0, "repeats", 500 * 8192, &runs);
    let options = builder.options();
    let seed = verify(&mut builder, &options);
    assert!(seed.keys(2).iter().any(|key| key.1 == 178), "there are keyed references");
}

#[test]
fn a_split_directory_and_file_round_trip() {
    let mut builder = Builder::new();
    let directory = builder.dir(0, "directory");
    for n in 0..60_000 {
        builder.add(directory, format!("entry {n}"), common::FILE);
    }
    let address = builder.append(&pattern(1, 4096));
    let runs: Vec<_> = (0..40_000).map(|n| (n * 8192, address, 4096)).collect();
    builder.mapped(0, "file", 40_000 * 8192, &runs);
    let options = builder.options();
    verify(&mut builder, &options);
}

#[test]
fn a_file_of_one_tebibyte_is_cut_at_every_128_mib() {
    let mut builder = Builder::new();
    let len = 1 << 40;
    let file = builder.mapped(0, "plain", len, &[(0, DATA_START, len)]);
    builder.tree.inodes[file as usize].nodatasum = true;
    let options = options(DATA_START + len);
    let template = Template::default();
    let info = write_seed(builder.finish(), &[], &options, &template).unwrap();
    let seed = Seed { info, pieces: template.into_pieces() };
    assert_eq!(seed.check().unwrap().extents, 8192);
    assert_eq!(model::of_seed(&seed), model::of_tree(&builder.tree));
}

#[test]
fn exbibytes_of_lazy_data_take_larger_chunks() {
    let mut builder = Builder::new();
    let len = 4 << 60;
    let file = builder.mapped(0, "plain", len, &[(0, DATA_START, len)]);
    builder.tree.inodes[file as usize].nodatasum = true;
    let options = options(DATA_START + len);
    let template = Template::default();
    let info = write_seed(builder.finish(), &[], &options, &template).unwrap();
    let seed = Seed { info, pieces: template.into_pieces() };
    let report = seed.check().unwrap();
    assert_eq!(report.extent_bytes, len);
    assert!(info.data_device_size() < 8 << 60);
}

#[test]
fn bytes_do_not_depend_on_the_number_of_threads() {
    let mut builder = Builder::new();
    let directory = builder.dir(0, "directory");
    for n in 0..30_000u64 {
        builder.file(directory, format!("entry {n}"), &n.to_le_bytes());
    }
    let options = builder.options();
    let mut with = |threads: usize| {
        let pool = rayon_pool(threads);
        let seed = pool.install(|| builder.seed(&options));
        (seed.info, seed.pieces)
    };
    let one = with(1);
    assert!(one == with(4), "four threads write something else than one");
    assert!(one == with(1), "the same again is something else");
}

fn rayon_pool(threads: usize) -> rayon::ThreadPool {
    rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap()
}

#[test]
fn an_empty_inline_file_is_an_empty_file() {
    let mut builder = Builder::new();
    builder.inline(0, "empty", b"");
    let options = builder.options();
    let seed = verify(&mut builder, &options);
    assert!(matches!(builder.tree.inodes[1].body, InodeBody::Inline(_)));
    assert!(!seed.keys(256).contains(&(257, 108, 0)));
}
