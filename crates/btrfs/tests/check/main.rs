//! Damage is found: one case for each rule of `check`, which fails without that rule.

#![allow(clippy::unwrap_used, reason = "a test")]

#[path = "../common/mod.rs"]
mod common;
mod files;
mod nodes;
mod space;
mod wild;

use burgeon_block::{ChecksumKind, ErrorKind};
use burgeon_btrfs::{DATA_START, DeviceNo, SeedInfo, check, superblock, superblock_offsets};
use common::{Builder, FILE, IDENTITY, Seed, get_u64, leaf_items, pattern};

const ROOT: u64 = 1;
const EXTENT: u64 = 2;
const CHUNK: u64 = 3;
const DEV: u64 = 4;
const TOP: u64 = 5;
const CSUM: u64 = 7;
const UUID: u64 = 9;
const FREE: u64 = 10;
const FILES: u64 = 256;
const RELOC: u64 = -9i64 as u64;

/// Inodes of [`seed`], by number.
const DIRECTORY: u64 = 257;
const DATA: u64 = 258;
const LINKED: u64 = 259;
const SYMLINK: u64 = 260;
const INLINE: u64 = 261;
const DEVICE: u64 = 262;
const PLAIN: u64 = 263;
const SHARED: u64 = 264;
const MANY: u64 = 265;

/// A seed with every kind of item that a rule is about, and trees of several levels.
fn seed() -> Seed {
    let mut b = Builder::new();
    let directory = b.dir(0, "directory");
    b.file(directory, "data", &pattern(1, 40_000));
    let linked = b.inline(directory, "linked", b"some text");
    for n in 0..400 {
        b.link(0, format!("a long name, so that one item does not hold all: {n}"), linked);
    }
    b.symlink(0, "symlink", b"target");
    b.inline(0, "inline", b"text");
    b.add(0, "device", 0o020600);
    let address = b.append(&pattern(2, 8192));
    let plain = b.mapped(0, "plain", 8192, &[(0, address, 8192)]);
    b.tree.inodes[plain as usize].nodatasum = true;
    let address = b.append(&pattern(3, 12288));
    b.mapped(0, "shared", 12288, &[(0, address, 12288)]);
    // After a gap, so that free space and checksums have one, too.
    b.append(&pattern(4, 4096));
    let repeated = b.append(&pattern(5, 4096));
    let runs: Vec<_> = (0..100).map(|n| (n * 8192, repeated, 4096)).collect();
    b.mapped(0, "many", 100 * 8192, &runs);
    b.xattrs(plain, &[(b"user.one", b"1"), (b"user.two", b"2")]);
    b.mapped(0, "shared too", 4096, &[(0, address + 4096, 4096)]);
    (0..300).for_each(|n| {
        b.add(0, format!("filler {n}"), FILE);
    });
    let options = b.options();
    let seed = b.seed(&options);
    seed.check().unwrap();
    seed
}

/// Damages a good seed and asserts that `check` says `expected`.
#[track_caller]
fn broken(expected: &str, damage: impl FnOnce(&mut Seed)) {
    let mut seed = seed();
    damage(&mut seed);
    let error = seed.check().expect_err(expected);
    assert_eq!(error.kind(), ErrorKind::Corrupt, "{error}");
    assert!(error.to_string().contains(expected), "{expected:?} expected: {error}");
}

fn put(at: usize, bytes: impl AsRef<[u8]>) -> impl Fn(&mut [u8]) {
    move |item| item[at..at + bytes.as_ref().len()].copy_from_slice(bytes.as_ref())
}

fn add(at: usize, number: u64) -> impl Fn(&mut [u8]) {
    move |item| {
        let value = get_u64(item, at).wrapping_add(number);
        item[at..at + 8].copy_from_slice(&value.to_le_bytes());
    }
}

#[track_caller]
fn finds(seed: &Seed, expected: &str) {
    let error = seed.check().expect_err(expected).to_string();
    assert!(error.contains(expected), "{expected:?} expected: {error}");
}
