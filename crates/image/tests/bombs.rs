//! Small inputs that claim to be huge: a separate process refuses each of them, with an error
//! that names the reason, within 5 s of processor time (15 s unoptimised) and below 256 MiB of
//! memory.
//!
//! A new bomb is a function that writes it, and a line of `BOMBS`.

#![allow(clippy::unwrap_used)] // helpers of tests

mod common;

use std::{
    fs::{self, File},
    io::{BufWriter, Read, Write},
    path::Path,
    time::Duration,
};

use burgeon_block::ChecksumKind;
use burgeon_btrfs::{Inode, Tree};
use burgeon_image::{Manifest, ManifestLimits, builder};
use common::*;
use testkit::measure;

const MEMORY_MAX: u64 = 256 << 20;
const CPU_MAX: Duration = Duration::from_secs(if cfg!(debug_assertions) { 15 } else { 5 });
const BLOCK: usize = 512;

/// Name, writer, maximum length in bytes, expected message.
type Bomb = (&'static str, fn(&Path), u64, &'static str);

const BOMBS: [Bomb; 11] = [
    ("a sparse map that is one number", long_number, 64 << 10, "sparse map of a file"),
    ("a map of one-byte pieces", one_byte_pieces, 20 << 20, "more than"),
    ("pieces of a layer in one block", pieces_in_blocks, 40 << 20, "more than"),
    ("records of sparse pieces", sparse_records, 128 << 10, "more than 262144 pieces"),
    ("the same header again and again", same_header, 736 << 10, "more than"),
    ("attributes for all entries", global_attributes, 64 << 10, "more than"),
    ("attributes of each entry", attribute_flood, 1 << 20, "more than"),
    ("attributes of one entry", many_attributes, 1 << 20, "more than 10000 attributes"),
    ("small files of zeros", small_files, 736 << 10, "more than"),
    ("deep paths", deep_paths, 1 << 20, "more than"),
    ("a window of xz of 4 GiB", xz_window, 469 << 10, "128 MiB of memory"),
];

#[test]
fn bombs_are_refused() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    for (name, make, len_max, said) in BOMBS {
        let input = || {
            let path = folder.path().join("bomb");
            make(&path);
            assert!(fs::metadata(&path).unwrap().len() <= len_max, "{name}: not small any more");
            path
        };
        let refused = measure("bombs_are_refused", name, input, |path| {
            let (_folder, store) = store();
            let archive = File::open(path).unwrap();
            match builder::from_tar(&store, "bomb", archive, None, &options(), &|_| ()) {
                Ok(report) => format!("made an image of {} files", report.image.inodes),
                Err(error) => error.to_string(),
            }
        });
        let Some(refused) = refused else { continue };
        println!("{name}: {refused:?}");
        assert!(refused.said.contains(said), "{name}: {refused:?}");
        assert!(refused.peak_bytes < MEMORY_MAX, "{name}: {refused:?}");
        assert!(refused.cpu < CPU_MAX, "{name}: {refused:?}");
    }
}

/// Manifests that declare 5 GiB of small files, and as much as their length allows: they consist
/// of frames of zeros, which compress to almost nothing.
#[test]
fn manifests_are_refused() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    for (name, frames, said) in
        [("5 GiB", 5 << 10, "declares 5368"), ("what is allowed", 60, "belong to nothing")]
    {
        let input = || {
            let path = folder.path().join("manifest");
            fs::write(&path, manifest(frames)).unwrap();
            path
        };
        let refused = measure("manifests_are_refused", name, input, |path| {
            let bytes = fs::read(path).unwrap();
            Manifest::decode(&bytes, &ManifestLimits::default()).unwrap_err().to_string()
        });
        let Some(refused) = refused else { continue };
        println!("{name}: {refused:?}");
        assert!(refused.said.contains(said), "{name}: {refused:?}");
        assert!(refused.peak_bytes < MEMORY_MAX, "{name}: {refused:?}");
        assert!(refused.cpu < CPU_MAX, "{name}: {refused:?}");
    }
}

/// A manifest of an empty folder whose section of small files is `mib` MiB of zeros. See
/// `docs/format.md`, "Files of sections".
fn manifest(mib: usize) -> Vec<u8> {
    const HEADER: usize = 64;
    const ENTRY: usize = 48;
    const PARAMS: u32 = 1;
    const INLINE: u32 = 5;
    let inodes = vec![Inode { mode: 0o040755, ..Inode::default() }];
    let empty = Manifest {
        tree: Tree { inodes, ..Tree::default() },
        checksum: ChecksumKind::Crc32c,
        chunks: Vec::new(),
        objects: Vec::new(),
        block_checksums: Vec::new(),
    };
    let (sound, _) = empty.encode(1).unwrap();
    let u32_at = |at: usize| u32::from_le_bytes(sound[at..at + 4].try_into().unwrap());
    let u64_at = |at: usize| u64::from_le_bytes(sound[at..at + 8].try_into().unwrap()) as usize;
    let sections = u32_at(12) as usize;
    let mut bytes = sound[..HEADER + ENTRY * sections].to_vec();
    let frame = zstd::bulk::compress(&vec![0; 1 << 20], 3).unwrap();
    for entry in (HEADER..HEADER + ENTRY * sections).step_by(ENTRY) {
        let (start, len) = (u64_at(entry + 8), u64_at(entry + 16));
        let mut stored = sound[start..start + len].to_vec();
        match u32_at(entry) {
            PARAMS => stored[24..32].copy_from_slice(&((mib as u64) << 20).to_le_bytes()),
            INLINE => {
                let lens = (frame.len() as u32).to_le_bytes().repeat(mib);
                stored = [lens, frame.repeat(mib)].concat();
                bytes[entry + 4..entry + 8].copy_from_slice(&1u32.to_le_bytes());
                bytes[entry + 24..entry + 32].copy_from_slice(&((mib as u64) << 20).to_le_bytes());
            }
            _ => {}
        }
        let at = bytes.len() as u64;
        bytes[entry + 8..entry + 16].copy_from_slice(&at.to_le_bytes());
        bytes[entry + 16..entry + 24].copy_from_slice(&(stored.len() as u64).to_le_bytes());
        let sum = ChecksumKind::Xxhash64.of(&stored);
        bytes[entry + 32..entry + 40].copy_from_slice(&sum.to_le_bytes());
        bytes.extend(stored);
    }
    let len = bytes.len() as u64;
    bytes[40..48].copy_from_slice(&len.to_le_bytes());
    bytes[HEADER - 8..HEADER].fill(0);
    let sum = ChecksumKind::Xxhash64.of(&bytes[..HEADER + ENTRY * sections]);
    bytes[HEADER - 8..HEADER].copy_from_slice(&sum.to_le_bytes());
    bytes
}

/// A tar header.
fn header(name: &str, kind: u8, size: u64) -> Vec<u8> {
    let mut header = vec![0; BLOCK];
    header[..name.len()].copy_from_slice(name.as_bytes());
    header[100..107].copy_from_slice(b"0000644");
    for (at, len) in [(108, 7), (116, 7), (136, 11)] {
        header[at..at + len].fill(b'0');
    }
    header[124..135].copy_from_slice(format!("{size:011o}").as_bytes());
    header[156] = kind;
    header[257..263].copy_from_slice(b"ustar\0");
    header[148..156].fill(b' ');
    let sum: u32 = header.iter().map(|byte| u32::from(*byte)).sum();
    header[148..154].copy_from_slice(format!("{sum:06o}").as_bytes());
    header[154] = 0;
    header
}

/// A header and its data.
fn entry(name: &str, kind: u8, data: &[u8]) -> Vec<u8> {
    let mut entry = header(name, kind, data.len() as u64);
    entry.extend_from_slice(data);
    entry.resize(entry.len().next_multiple_of(BLOCK), 0);
    entry
}

/// An extended header with these keys and values.
fn pax(kind: u8, pairs: impl IntoIterator<Item = (String, String)>) -> Vec<u8> {
    let mut records = String::new();
    for (key, value) in pairs {
        let len = key.len() + value.len() + 3;
        let digits = (1..).find(|digits| (len + digits).to_string().len() == *digits).unwrap();
        records += &format!("{} {key}={value}\n", len + digits);
    }
    entry("records", kind, records.as_bytes())
}

fn pair(key: &str, value: impl ToString) -> (String, String) {
    (key.to_owned(), value.to_string())
}

/// `first`, and then `again` repeated: zstd's frames may be concatenated.
fn zstd_again(path: &Path, first: &[u8], again: &[u8], times: usize) {
    let mut file = BufWriter::new(File::create(path).unwrap());
    file.write_all(&zstd::bulk::compress(first, 3).unwrap()).unwrap();
    let frame = zstd::bulk::compress(again, 3).unwrap();
    (0..times).for_each(|_| file.write_all(&frame).unwrap());
    file.flush().unwrap();
}

/// The header of a sparse file of format 1.0, with `stored_len` bytes of map and data.
fn sparse(size: u64, stored_len: u64) -> Vec<u8> {
    let pairs = [
        pair("GNU.sparse.major", 1),
        pair("GNU.sparse.minor", 0),
        pair("GNU.sparse.realsize", size),
    ];
    [pax(b'x', pairs), header("sparse", b'0', stored_len)].concat()
}

fn long_number(path: &Path) {
    // More than the reader may allocate, if it keeps the digits.
    let (digits, times) = (vec![b'0'; 16 << 20], 20);
    let len = (digits.len() * times) as u64;
    zstd_again(path, &sparse(1 << 20, len), &digits, times);
}

/// Files whose map lists single bytes at intervals of `stride`.
fn files_of_bytes(path: &Path, files: usize, pieces: u64, stride: u64) {
    let mut file = BufWriter::new(File::create(path).unwrap());
    let mut map = format!("{pieces}\n");
    (0..pieces).for_each(|n| map += &format!("{}\n1\n", n * stride));
    let mut data = map.into_bytes();
    data.resize(data.len().next_multiple_of(BLOCK), 0);
    data.extend(vec![b'x'; pieces as usize]);
    let head = sparse(pieces * stride, data.len() as u64);
    data.resize(data.len().next_multiple_of(BLOCK), 0);
    for _ in 0..files {
        file.write_all(&head).unwrap();
        file.write_all(&data).unwrap();
    }
    file.write_all(&[0; 2 * BLOCK]).unwrap();
}

fn one_byte_pieces(path: &Path) {
    files_of_bytes(path, 4, 1 << 18, 256 << 10);
}

fn pieces_in_blocks(path: &Path) {
    files_of_bytes(path, 12, 1 << 18, 2);
}

fn sparse_records(path: &Path) {
    let map = "0,".repeat(7 << 20) + "0,0";
    let pairs = [pair("GNU.sparse.map", map), pair("GNU.sparse.size", 1)];
    zstd_again(path, &[pax(b'x', pairs), header("a", b'0', 0)].concat(), &[0; 2 * BLOCK], 1);
}

fn same_header(path: &Path) {
    let again = header("empty", b'0', 0).repeat((64 << 20) / BLOCK);
    zstd_again(path, &header("first", b'0', 0), &again, 100);
}

fn global_attributes(path: &Path) {
    let pairs = (0..6).map(|n| pair(&format!("SCHILY.xattr.user.{n}"), "v".repeat(10_000)));
    let again = header("empty", b'0', 0).repeat((64 << 20) / BLOCK);
    zstd_again(path, &pax(b'g', pairs), &again, 4);
}

fn attribute_flood(path: &Path) {
    let pairs = (0..60).map(|n| pair(&format!("SCHILY.xattr.user.{n}"), "v".repeat(10_000)));
    let again = [pax(b'x', pairs), header("empty", b'0', 0)].concat().repeat(100);
    zstd_again(path, &header("first", b'0', 0), &again, 40);
}

fn many_attributes(path: &Path) {
    let pairs = (0..400_000).map(|n| pair(&format!("SCHILY.xattr.user.{n}"), ""));
    zstd_again(path, &pax(b'x', pairs), &header("a", b'0', 0), 1);
}

fn small_files(path: &Path) {
    let again = entry("small", b'0', &[0; 2000]).repeat(20_000);
    zstd_again(path, &header("first", b'0', 0), &again, 100);
}

fn deep_paths(path: &Path) {
    let mut entries = Vec::new();
    for n in 0..1000 {
        let name = format!("{n:04}/{}", "d/".repeat(2045));
        entries.extend(entry("././@LongLink", b'L', name.as_bytes()));
        entries.extend(header("x", b'5', 0));
    }
    zstd_again(path, &entries, &[0; 2 * BLOCK], 1);
}

fn xz_window(path: &Path) {
    let zeros = 270 << 20;
    let options = liblzma::stream::LzmaOptions::new_preset(0).unwrap();
    let mut filters = liblzma::stream::Filters::new();
    filters.lzma2(&options);
    let stream =
        liblzma::stream::Stream::new_stream_encoder(&filters, liblzma::stream::Check::None);
    let mut xz = liblzma::write::XzEncoder::new_stream(Vec::new(), stream.unwrap());
    xz.write_all(&header("zeros", b'0', zeros)).unwrap();
    std::io::copy(&mut std::io::repeat(0).take(zeros + 2 * BLOCK as u64), &mut xz).unwrap();
    let mut bytes = xz.finish().unwrap();
    // The header of the first block: length in words, flags, LZMA2, a byte, the window.
    let len = (usize::from(bytes[12]) + 1) * 4;
    assert_eq!(bytes[14..16], [0x21, 1]);
    bytes[16] = 40;
    let mut sum = flate2::Crc::new();
    sum.update(&bytes[12..12 + len - 4]);
    bytes[12 + len - 4..12 + len].copy_from_slice(&sum.sum().to_le_bytes());
    fs::write(path, bytes).unwrap();
}
