//! Manifests that somebody has made with care, so that every digest and checksum is right, and
//! that no `build` would make: each verb refuses them, and nothing is left.

#![allow(clippy::unwrap_used)]

use std::{fs, io::Write, path::Path};

use burgeon_block::{ChecksumKind, Digest};
use testkit::{Burgeon, Pattern, Space};

const PROGRAM: &str = env!("CARGO_BIN_EXE_burgeon");
const DAMAGED: i32 = 4;

// docs/format.md: the outer form, the order of a manifest's sections, the widths of columns.
const HEADER: usize = 64;
const ENTRY: usize = 48;
const FRAME: usize = 1 << 20;
const INODES: usize = 1;
const DIRENTS: usize = 2;
const NAMES: usize = 3;
const EXTENTS: usize = 5;
const INODE_WIDTHS: [usize; 10] = [2, 4, 4, 8, 8, 8, 4, 1, 4, 2];
const DIRENT_WIDTHS: [usize; 3] = [4, 4, 1];
const EXTENT_WIDTHS: [usize; 3] = [8, 8, 8];

/// A manifest taken apart.
#[derive(Clone)]
struct Sections {
    header: Vec<u8>,
    sections: Vec<Section>,
}

#[derive(Clone)]
struct Section {
    kind: [u8; 4],
    /// As it will be stored.
    bytes: Vec<u8>,
    is_zstd: bool,
    /// The length that it claims to unpack to.
    raw_len: u64,
}

fn number(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap())
}

impl Sections {
    fn of(bytes: &[u8]) -> Self {
        let count = u32::from_le_bytes(bytes[12..16].try_into().unwrap()) as usize;
        let sections = (0..count).map(|index| {
            let entry = &bytes[HEADER + ENTRY * index..][..ENTRY];
            let (start, len) = (number(entry, 8) as usize, number(entry, 16) as usize);
            let (stored, raw_len) = (&bytes[start..start + len], number(entry, 24));
            let bytes = if entry[4] == 0 { stored.to_vec() } else { unpack(stored, raw_len) };
            Section { kind: entry[..4].try_into().unwrap(), bytes, is_zstd: false, raw_len }
        });
        Self { header: bytes[..HEADER].to_vec(), sections: sections.collect() }
    }

    /// Everything with sound checksums.
    fn bytes(&self) -> Vec<u8> {
        let sum = |bytes: &[u8]| ChecksumKind::Xxhash64.of(bytes).to_le_bytes();
        let (mut table, mut content) = (self.header.clone(), Vec::new());
        let start = HEADER + ENTRY * self.sections.len();
        for section in &self.sections {
            table.extend(section.kind);
            table.extend(u32::from(section.is_zstd).to_le_bytes());
            table.extend(((start + content.len()) as u64).to_le_bytes());
            table.extend((section.bytes.len() as u64).to_le_bytes());
            table.extend(section.raw_len.to_le_bytes());
            table.extend(sum(&section.bytes));
            table.extend([0; 8]);
            content.extend(&section.bytes);
        }
        table[40..48].copy_from_slice(&((start + content.len()) as u64).to_le_bytes());
        table[HEADER - 8..HEADER].fill(0);
        let checksum = sum(&table);
        table[HEADER - 8..HEADER].copy_from_slice(&checksum);
        [table, content].concat()
    }

    fn rename(&mut self, from: &str, to: &str) {
        let names = &mut self.sections[NAMES].bytes;
        let at = names.windows(from.len()).position(|name| name == from.as_bytes()).unwrap();
        names[at..at + to.len()].copy_from_slice(to.as_bytes());
    }

    fn planes(&mut self, section: usize, widths: &[usize], column: usize) -> (&mut [u8], usize) {
        let bytes = &mut self.sections[section].bytes;
        let rows = bytes.len() / widths.iter().sum::<usize>();
        let before = widths[..column].iter().sum::<usize>() * rows;
        (&mut bytes[before..before + widths[column] * rows], rows)
    }

    fn get(&mut self, section: usize, widths: &[usize], column: usize, row: usize) -> u64 {
        let (planes, rows) = self.planes(section, widths, column);
        let bytes = planes.chunks(rows).enumerate();
        bytes.map(|(plane, bytes)| u64::from(bytes[row]) << (8 * plane)).sum()
    }

    fn set(&mut self, section: usize, widths: &[usize], column: usize, row: usize, value: u64) {
        let (planes, rows) = self.planes(section, widths, column);
        for (plane, bytes) in planes.chunks_mut(rows).enumerate() {
            bytes[row] = (value >> (8 * plane)) as u8;
        }
    }

    /// The row of a name.
    fn row(&mut self, name: &str) -> usize {
        let (lens, rows) = self.planes(DIRENTS, &DIRENT_WIDTHS, 2);
        let lens: Vec<_> = lens[..rows].iter().map(|len| usize::from(*len)).collect();
        let names = &self.sections[NAMES].bytes;
        let mut at = 0;
        let found = lens.iter().position(|len| {
            at += len;
            names[at - len..at] == *name.as_bytes()
        });
        found.unwrap()
    }

    /// The inode of a row of names.
    fn inode(&mut self, row: usize) -> u32 {
        let deltas = (0..=row).map(|row| self.get(DIRENTS, &DIRENT_WIDTHS, 1, row) as u32);
        deltas.fold(0, u32::wrapping_add)
    }
}

/// The frames of a compressed section.
fn unpack(stored: &[u8], raw_len: u64) -> Vec<u8> {
    let frames = (raw_len as usize).div_ceil(FRAME);
    let (mut raw, mut at) = (Vec::new(), 4 * frames);
    for frame in 0..frames {
        let len = u32::from_le_bytes(stored[4 * frame..4 * frame + 4].try_into().unwrap()) as usize;
        raw.extend(zstd::bulk::decompress(&stored[at..at + len], FRAME).unwrap());
        at += len;
    }
    raw
}

/// A frame of `len` zeros: a few KiB that unpack to all of it.
fn bomb(len: usize) -> Vec<u8> {
    let frame = zstd::bulk::compress(&vec![0; len], 3).unwrap();
    [&(frame.len() as u32).to_le_bytes()[..], &frame].concat()
}

fn sample(space: &Space) -> std::path::PathBuf {
    let tree = space.make_folder("tree");
    for name in ["xx", "aaaa", "dupa", "dupb"] {
        fs::write(tree.join(name), name.repeat(1000)).unwrap();
    }
    fs::create_dir_all(tree.join("zz/ee")).unwrap();
    Pattern { seed: 1, blocks: 8 }.write(&tree.join("large")).unwrap();
    // Three blocks, a hole of two, three blocks.
    let hole = fs::File::options().write(true).open(tree.join("large")).unwrap();
    let punch = rustix::fs::FallocateFlags::PUNCH_HOLE | rustix::fs::FallocateFlags::KEEP_SIZE;
    rustix::fs::fallocate(&hole, punch, 3 * 4096, 2 * 4096).unwrap();
    tree
}

/// Lets the name `image` stand for the manifest `bytes`.
fn plant(store: &Path, bytes: &[u8]) {
    let digest = Digest::of(bytes).to_string();
    fs::write(store.join("manifests").join(&digest), bytes).unwrap();
    let path = store.join("images/image");
    let mut record: serde_json::Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    record["manifest"] = digest.into();
    writeln!(fs::File::create(&path).unwrap(), "{record}").unwrap();
}

#[test]
fn hostile_manifests_are_refused_by_every_verb() {
    let space = Space::new("hostile");
    let burgeon = Burgeon::new(PROGRAM, &space);
    burgeon.build(&sample(&space), "image");
    let store = burgeon.state().join("store");
    let sound = fs::read_dir(store.join("manifests")).unwrap().next().unwrap().unwrap().path();
    let sound = fs::read(sound).unwrap();
    let point = space.make_folder("at");
    let at = point.to_str().unwrap();
    // Taken apart and put together again it is as good as before.
    plant(&store, &Sections::of(&sound).bytes());
    let mounted = burgeon.mount("image", &point, &["--read-only"]);
    assert_eq!(fs::read(point.join("xx")).unwrap(), "xx".repeat(1000).as_bytes());
    burgeon.umount(mounted);
    let images = || fs::read_dir(burgeon.state().join("images")).unwrap().count();
    let before = images();

    type Change = fn(&mut Sections);
    let changes: [(&str, Change); 9] = [
        ("not a file name", |m| m.rename("xx", "..")),
        ("not a file name", |m| m.rename("aaaa", "/etc")),
        ("twice in one directory", |m| m.rename("dupb", "dupa")),
        ("contain each other", |m| {
            let (outer, inner) = (m.row("zz"), m.row("ee"));
            assert_eq!(inner, outer + 1, "zz is the last name of the root");
            let (parent, inside) = (m.inode(outer), m.inode(inner));
            // Both are differences to the row before.
            m.set(DIRENTS, &DIRENT_WIDTHS, 0, outer, inside.into());
            m.set(DIRENTS, &DIRENT_WIDTHS, 0, inner, parent.wrapping_sub(inside).into());
        }),
        ("longer than a file can be", |m| {
            let row = m.row("large");
            let inode = m.inode(row) as usize;
            m.set(INODES, &INODE_WIDTHS, 4, inode, u64::MAX);
        }),
        ("extents overlap", |m| {
            let (_, rows) = m.planes(EXTENTS, &EXTENT_WIDTHS, 0);
            // The second extent of a file: the one that does not begin at 0.
            let row = (0..rows).find(|row| m.get(EXTENTS, &EXTENT_WIDTHS, 0, *row) > 0).unwrap();
            m.set(EXTENTS, &EXTENT_WIDTHS, 0, row, 1);
        }),
        ("section", |m| m.sections[NAMES].raw_len = 1 << 50),
        ("section", |m| {
            let section = &mut m.sections[NAMES];
            (section.bytes, section.is_zstd) = (bomb(64 << 20), true);
        }),
        ("version 9", |m| m.header[8] = 9),
    ];
    for (message, change) in changes {
        let mut hostile = Sections::of(&sound);
        change(&mut hostile);
        plant(&store, &hostile.bytes());
        for arguments in [&["inspect", "image"][..], &["verify", "image"], &["mount", "image", at]]
        {
            burgeon.fails(arguments, DAMAGED, message);
        }
        assert_eq!(fs::read_dir(burgeon.state().join("mounts")).unwrap().count(), 0, "{message}");
        assert!(testkit::wait_until(std::time::Duration::from_secs(10), || {
            space.mounts().is_empty()
        }));
    }
    for folder in fs::read_dir(burgeon.state().join("images")).unwrap() {
        let folder = folder.unwrap().path();
        let files = fs::read_dir(&folder).unwrap().count();
        // Of those that were refused, only the lock of their preparation.
        assert!(files <= 1 || folder.join("ready.json").exists(), "{folder:?}: {files} files");
    }
    assert_eq!(images(), before + 9);
    plant(&store, &sound);
    let mounted = burgeon.mount("image", &point, &["--read-only"]);
    burgeon.umount(mounted);
}
