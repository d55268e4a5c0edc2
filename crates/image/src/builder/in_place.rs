//! An image of a directory whose files stay where they are.
//!
//! ```text
//!   DirectoryInput ── pieces of files, digested ──► a chunk each, in object file/<path>
//!                  └─ small files ──► the manifest
//! ```
//!
//! A chunk is a part of one file, never of several, since files are not contiguous. Identical
//! content becomes one chunk, read from the first file that contains it.

use std::{
    collections::{HashMap, hash_map::Entry},
    path::Path,
    sync::atomic::{AtomicU64, Ordering::Relaxed},
};

use burgeon_block::{BLOCK_SIZE, ByteRange, Digest, ObjectId, ObjectKind, ObjectStore, Result};
use burgeon_btrfs::Tree;
use rayon::prelude::*;

use super::{
    BuildOptions, BuildReport, OnProgress, Progress,
    assemble::{Extent, Input, Piece, Placed},
    nodes, publish,
    read::DirectoryInput,
    scan::Scan,
};
use crate::{
    Codec, invalid,
    manifest::{ChunkEntry, Manifest},
};

/// Builds the image. `path` must be absolute. Runs inside the build's thread pool.
pub(super) fn build(
    store: &impl ObjectStore,
    name: &str,
    path: &Path,
    options: &BuildOptions,
    progress: OnProgress<'_>,
) -> Result<BuildReport> {
    let _lease = store.begin_write()?;
    let scan = Scan::read(path, options.cross_mounts)?;
    let (bytes, entries) = (AtomicU64::new(0), AtomicU64::new(0));
    let others = (scan.nodes.len() - scan.files.len()) as u64;
    let report = || {
        progress(&Progress {
            entries: others + entries.load(Relaxed),
            entries_total: Some(scan.nodes.len() as u64),
            bytes: bytes.load(Relaxed),
            bytes_total: Some(scan.bytes),
            stored_bytes: 0,
        });
    };
    let mut placer = Placer::new(&scan, options);
    let mut input = DirectoryInput::new(&scan, &[], &bytes, &entries);
    report();
    while let Some(wave) = input.next()? {
        placer.placed.inline.extend(wave.inline);
        placer.place(wave.pieces)?;
        report();
    }
    let mut changed = input.changed;
    changed.sort();
    changed.dedup();
    let Placer { mut manifest, placed, .. } = placer;
    manifest.tree = nodes::finish(&scan.nodes, placed, &manifest.chunk_addresses())?;
    let image = publish(store, name, &manifest, options)?;
    let (mounts_left_out, honours) = (scan.mounts, scan.honours);
    Ok(BuildReport { changed, mounts_left_out, honours, ..BuildReport::of(image) })
}

/// Assigns pieces to chunks.
struct Placer<'a> {
    scan: &'a Scan,
    /// Index in `scan.files` of each node that has data.
    file_of: HashMap<u32, usize>,
    /// Number of each file's object.
    object_of: HashMap<u32, u32>,
    seen: HashMap<Digest, u32>,
    placed: Placed,
    manifest: Manifest,
}

impl<'a> Placer<'a> {
    fn new(scan: &'a Scan, options: &BuildOptions) -> Self {
        let files = scan.files.iter().enumerate();
        let manifest = Manifest {
            tree: Tree::default(),
            checksum: options.checksum,
            chunks: Vec::new(),
            objects: Vec::new(),
            block_checksums: Vec::new(),
        };
        Self {
            scan,
            file_of: files.map(|(place, file)| (file.node, place)).collect(),
            object_of: HashMap::new(),
            seen: HashMap::new(),
            placed: Placed::default(),
            manifest,
        }
    }

    fn place(&mut self, pieces: Vec<Piece>) -> Result<()> {
        let kind = self.manifest.checksum;
        let sums = |piece: &Piece| -> Vec<u8> {
            let blocks = piece.data.chunks(BLOCK_SIZE as usize);
            blocks.flat_map(|block| kind.of(block).to_le_bytes()[..kind.size()].to_vec()).collect()
        };
        let checksums: Vec<_> = pieces.par_iter().map(sums).collect();
        for (piece, checksums) in pieces.into_iter().zip(checksums) {
            let Piece { node, file_offset, digest, data, .. } = piece;
            let chunk = match self.seen.get(&digest) {
                Some(chunk) => *chunk,
                None => {
                    let chunk = self.chunk(node, file_offset, data.len() as u64, digest)?;
                    self.manifest.block_checksums.extend(checksums);
                    self.seen.insert(digest, chunk);
                    chunk
                }
            };
            let len = data.len() as u32;
            self.placed.extents.push(Extent { node, file_offset, chunk, offset: 0, len });
        }
        Ok(())
    }

    /// A new chunk: `len` bytes from `offset` of the file; bytes beyond its end are zeros.
    fn chunk(&mut self, node: u32, offset: u64, len: u64, digest: Digest) -> Result<u32> {
        let object = self.object(node)?;
        let rest = self.scan.nodes[node as usize].size.saturating_sub(offset);
        let stored = ByteRange::at(offset, len.min(rest));
        let stored = stored.ok_or_else(|| invalid("a file is longer than Linux allows"))?;
        let blocks = (len / BLOCK_SIZE) as u8;
        self.manifest.chunks.push(ChunkEntry { blocks, object, stored, codec: Codec::Raw, digest });
        Ok(self.manifest.chunks.len() as u32 - 1)
    }

    fn object(&mut self, node: u32) -> Result<u32> {
        let entry = match self.object_of.entry(node) {
            Entry::Occupied(number) => return Ok(*number.get()),
            Entry::Vacant(entry) => entry,
        };
        let file = self.file_of.get(&node).map(|place| &self.scan.files[*place]);
        let file = file.ok_or_else(|| invalid("data of no file was read"))?;
        self.manifest.objects.push(object_of(&self.scan.file_path(file))?);
        Ok(*entry.insert(self.manifest.objects.len() as u32 - 1))
    }
}

/// The object for the file at the absolute `path`.
pub(super) fn object_of(path: &Path) -> Result<ObjectId> {
    match path.to_str().and_then(|path| path.strip_prefix('/')) {
        Some(relative) => ObjectKind::File.object(relative),
        None => Err(invalid(format!("{} is not UTF-8: rename it", path.display()))),
    }
}
