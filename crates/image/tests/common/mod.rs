//! Shared parts of this crate's tests: a store in a folder, and an image read back.

#![allow(clippy::unwrap_used, dead_code, unreachable_pub)] // helpers of tests; not every test uses all

pub mod archives;

use std::{collections::BTreeMap, path::Path};

use burgeon_block::{BlockSource, ByteRange, ObjectId};
use burgeon_btrfs::{Inode, InodeBody, Tree};
use burgeon_image::{Manifest, ManifestLimits, builder, catalog, decode_chunk};
use burgeon_source::Directory;

pub fn store() -> (tempfile::TempDir, Directory) {
    let folder = tempfile::tempdir().unwrap();
    let store = Directory::create(folder.path().join("store")).unwrap();
    (folder, store)
}

pub fn options() -> builder::BuildOptions {
    builder::BuildOptions { level: 1, threads: Some(2), ..builder::BuildOptions::default() }
}

/// The options of a host that has always used `store`.
pub fn options_with(store: &Directory) -> builder::BuildOptions {
    builder::BuildOptions { provenance: Some(provenance(store)), ..options() }
}

/// The provenance records of that host.
pub fn provenance(store: &Directory) -> catalog::Provenance {
    catalog::Provenance::new(store.root().with_file_name("provenance"), "store")
}

pub fn from_directory(store: &Directory, name: &str, path: &Path) -> builder::BuildReport {
    builder::from_directory(store, name, path, &options_with(store), &|_| ()).unwrap()
}

pub fn load(store: &Directory, report: &builder::BuildReport) -> Manifest {
    catalog::load(store, &report.image.digest().unwrap(), &ManifestLimits::default()).unwrap()
}

/// Incompressible bytes, the same for the same seed.
pub fn noise(seed: u64, len: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state as u8
    };
    (0..len).map(|_| next()).collect()
}

/// Inode of each path, `""` for the root; a directory precedes its entries.
pub fn paths(tree: &Tree) -> BTreeMap<Vec<u8>, u32> {
    let mut path_of: BTreeMap<u32, Vec<u8>> = BTreeMap::from([(0, Vec::new())]);
    let mut paths = BTreeMap::from([(Vec::new(), 0)]);
    for dirent in &tree.dirents {
        let mut path = path_of[&dirent.parent].clone();
        if !path.is_empty() {
            path.push(b'/');
        }
        path.extend_from_slice(tree.bytes(dirent.name));
        path_of.insert(dirent.inode, path.clone());
        paths.insert(path, dirent.inode);
    }
    paths
}

pub fn inode<'a>(manifest: &'a Manifest, path: &str) -> &'a Inode {
    &manifest.tree.inodes[paths(&manifest.tree)[path.as_bytes()] as usize]
}

/// All bytes of the lazy address space, every chunk checked.
pub fn data(store: &Directory, manifest: &Manifest) -> Vec<u8> {
    data_of(store, manifest)
}

/// The same from any source.
pub fn data_of(source: &impl BlockSource, manifest: &Manifest) -> Vec<u8> {
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let mut data = Vec::new();
    for chunk in &manifest.chunks {
        let object: &ObjectId = &manifest.objects[chunk.object as usize];
        let stored = runtime.block_on(source.read(object, chunk.stored)).unwrap();
        let mut raw = vec![0; chunk.len() as usize];
        decode_chunk(chunk.codec, &stored, &mut raw, &chunk.digest).unwrap();
        data.extend(raw);
    }
    let blocks = data.chunks(4096);
    let size = manifest.checksum.size();
    for (block, checksum) in blocks.zip(manifest.block_checksums.chunks(size)) {
        assert_eq!(manifest.checksum.of(block).to_le_bytes()[..size], *checksum);
    }
    data
}

/// A regular file's content.
pub fn content(manifest: &Manifest, data: &[u8], inode: &Inode) -> Vec<u8> {
    if let InodeBody::Inline(span) = inode.body {
        return manifest.tree.bytes(span).to_vec();
    }
    let mut content = vec![0; inode.size as usize];
    for extent in manifest.tree.extents_of(inode) {
        let address = (extent.address - manifest.data_range().start()) as usize;
        let end = (extent.file_offset + extent.len).min(inode.size);
        let len = (end - extent.file_offset) as usize;
        let at = extent.file_offset as usize;
        content[at..at + len].copy_from_slice(&data[address..address + len]);
    }
    content
}

/// The parts of a file that are not holes.
pub fn data_ranges(manifest: &Manifest, inode: &Inode) -> Vec<ByteRange> {
    let mut ranges: Vec<ByteRange> = Vec::new();
    for extent in manifest.tree.extents_of(inode) {
        let range = ByteRange::at(extent.file_offset, extent.len).unwrap();
        match ranges.last_mut() {
            Some(last) if last.end() == range.start() => {
                *last = ByteRange::new(last.start(), range.end()).unwrap();
            }
            _ => ranges.push(range),
        }
    }
    ranges
}
