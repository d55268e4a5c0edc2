//! Measures writing and patching a seed with a million files (or the number in the first
//! argument), compared with plain copies of as many bytes on the same machine.
//!
//! `cargo run --release -p burgeon-btrfs --example million [FILES]`

#![allow(clippy::unwrap_used, reason = "an example")]

use std::{
    fs::File,
    hint::black_box,
    os::unix::fs::FileExt,
    time::{Duration, Instant},
};

use burgeon_block::{ByteRange, ChecksumKind, Digest, Error, Result};
use burgeon_btrfs::{
    DATA_START, Dirent, FileExtent, Identity, Inode, InodeBody, NodeSink, NodeSource, Patcher,
    SeedInfo, SeedOptions, Tree, Uuids, check, write_seed,
};

const FILES_A_DIRECTORY: usize = 50;
const PASSES: usize = 3;

fn main() {
    let files = std::env::args().nth(1).map_or(1_000_000, |text| text.parse().unwrap());
    let tree = tree(files);
    let blocks = tree.extents.iter().map(|extent| extent.len / 4096).sum::<u64>() as usize;
    let checksums = vec![0x5a; blocks * 8];
    let data_end = DATA_START + blocks as u64 * 4096;
    println!("{files} files, {} extents, {} names", tree.extents.len(), tree.dirents.len());
    for checksum in [ChecksumKind::Crc32c, ChecksumKind::Xxhash64] {
        let options = SeedOptions {
            checksum,
            ..SeedOptions::new(data_end, Uuids::derive(&Digest::of(b"million")))
        };
        measure(&tree, &checksums, &options);
    }
}

fn measure(tree: &Tree, checksums: &[u8], options: &SeedOptions) {
    let discard = Discard;
    let (written, _) = best(|| write_seed(tree, checksums, options, &discard).unwrap());
    let file = Template(tempfile::tempfile().unwrap());
    let (to_file, info) = best(|| write_seed(tree, checksums, options, &file).unwrap());
    let nodes = info.metadata_nodes();
    let mut bytes = vec![0; nodes.len() as usize];
    file.read(nodes.start(), &mut bytes).unwrap();
    let mut copy = vec![1; bytes.len()];
    let (copied, ()) = best(|| black_box(&mut copy).copy_from_slice(black_box(&bytes)));
    let scratch = tempfile::tempfile().unwrap();
    let (copied_to_file, ()) = best(|| {
        for (index, piece) in bytes.chunks(1 << 20).enumerate() {
            scratch.write_all_at(piece, (index << 20) as u64).unwrap();
        }
    });
    let ratio = |time: Duration| time.as_secs_f64() / copied.as_secs_f64();
    println!("\n{}: {} MB of metadata", options.checksum, bytes.len() / 1_000_000);
    let line = |what: &str, time: Duration| {
        println!("{what:<34}{:>7.0} ms{:>8.1} × a copy", time.as_secs_f64() * 1e3, ratio(time));
    };
    line("plain copy in memory", copied);
    line("plain copy to a file", copied_to_file);
    line("write_seed, thrown away", written);
    line("write_seed, to a file", to_file);
    let memory = Memory { nodes, bytes: &bytes, file: &file };
    let (checked, report) = best(|| check(&info, &Identity::TEMPLATE, &memory).unwrap());
    line("check", checked);
    println!("{report:?}");
    measure_patching(&info, &bytes, &mut copy, nodes);
}

/// Copies and patches in pieces of 1 MiB, as for a mount, and compares with the copy alone.
fn measure_patching(info: &SeedInfo, bytes: &[u8], copy: &mut [u8], nodes: ByteRange) {
    let patcher = Patcher::new(info, &Identity { fsid: *b"a mount's own id" });
    let pass = |copy: &mut [u8], patch: bool| {
        for (index, piece) in bytes.chunks(1 << 20).enumerate() {
            let at = index << 20;
            let to = &mut copy[at..at + piece.len()];
            to.copy_from_slice(piece);
            if patch {
                patcher.patch(nodes.start() + at as u64, to).unwrap();
            }
        }
    };
    let (copied, ()) = best(|| pass(black_box(copy), false));
    let (patched, ()) = best(|| pass(black_box(copy), true));
    let rate = |time: Duration| bytes.len() as f64 / 1e9 / time.as_secs_f64();
    println!(
        "copy {:.1} GB/s, copy and patch {:.1} GB/s: {:.2} of a copy",
        rate(copied),
        rate(patched),
        rate(patched) / rate(copied)
    );
}

/// The shortest time of a few passes, and the result of the last.
fn best<T>(mut work: impl FnMut() -> T) -> (Duration, T) {
    let mut pass = || {
        let start = Instant::now();
        let result = work();
        (start.elapsed(), result)
    };
    let (mut shortest, mut result) = pass();
    for _ in 1..PASSES {
        let (time, again) = pass();
        shortest = shortest.min(time);
        result = again;
    }
    (shortest, result)
}

/// A tree like a package manager's: mostly files of a few blocks, a third of them tiny.
fn tree(files: usize) -> Tree {
    let mut tree = Tree::default();
    let directory = Inode { mode: 0o040755, mtime_s: 1_700_000_000, ..Inode::default() };
    let file = Inode { mode: 0o100644, ..directory };
    tree.inodes.push(directory);
    let directories = files.div_ceil(FILES_A_DIRECTORY);
    for n in 0..directories {
        let name = tree.push_bytes(format!("directory-{n}").as_bytes()).unwrap();
        tree.inodes.push(directory);
        tree.dirents.push(Dirent { parent: 0, inode: n as u32 + 1, name });
    }
    let content = tree.push_bytes(&[b'x'; 700]).unwrap();
    let mut address = DATA_START;
    for n in 0..files {
        let name = tree.push_bytes(format!("file-{n}.txt").as_bytes()).unwrap();
        let parent = (n / FILES_A_DIRECTORY) as u32 + 1;
        tree.dirents.push(Dirent { parent, inode: tree.inodes.len() as u32, name });
        if n % 3 == 0 {
            let body = InodeBody::Inline(content);
            tree.inodes.push(Inode { body, size: u64::from(content.len), ..file });
            continue;
        }
        let len = (n as u64 % 7 + 1) * 4096;
        let first = tree.extents.len() as u32;
        tree.extents.push(FileExtent { file_offset: 0, address, len });
        address += len;
        let body = InodeBody::Extents { first, count: 1 };
        tree.inodes.push(Inode { body, size: len - 100, ..file });
    }
    tree
}

struct Discard;

impl NodeSink for Discard {
    fn write(&self, _: u64, nodes: &[u8]) -> Result<()> {
        black_box(nodes);
        Ok(())
    }
}

struct Template(File);

impl NodeSink for Template {
    fn write(&self, physical: u64, nodes: &[u8]) -> Result<()> {
        self.0.write_all_at(nodes, physical).map_err(|error| Error::io("the template", error))
    }
}

impl NodeSource for Template {
    fn read(&self, physical: u64, nodes: &mut [u8]) -> Result<()> {
        self.0.read_exact_at(nodes, physical).map_err(|error| Error::io("the template", error))
    }
}

/// The nodes in memory, except those of the chunk tree, which come from the file.
struct Memory<'a> {
    nodes: ByteRange,
    bytes: &'a [u8],
    file: &'a Template,
}

impl NodeSource for Memory<'_> {
    fn read(&self, physical: u64, nodes: &mut [u8]) -> Result<()> {
        if !self.nodes.contains(physical) {
            return self.file.read(physical, nodes);
        }
        let at = (physical - self.nodes.start()) as usize;
        nodes.copy_from_slice(&self.bytes[at..at + nodes.len()]);
        Ok(())
    }
}
