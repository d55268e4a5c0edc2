//! Reads all objects of an image and reports damage.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::atomic::{AtomicU64, Ordering::Relaxed},
};

use burgeon_block::{
    BLOCK_SIZE, ByteRange, Digest, Error, ErrorKind, ObjectId, ObjectKind, ObjectStore, Result,
};
use bytes::Bytes;
use rayon::prelude::*;

use super::load;
use crate::{Manifest, ManifestLimits, Paths, corrupt, decode_chunk, pack};

/// A damaged or missing object, in the store or outside it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Damage {
    /// The object.
    pub object: ObjectId,
    /// The problem; the first if there are several.
    pub what: String,
    /// Number of unreadable chunks of the image.
    pub chunks: u64,
    /// Paths in the image of the files that contain these chunks, sorted.
    pub files: Vec<Vec<u8>>,
}

/// The result of [`verify`].
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Verified {
    /// Chunks read.
    pub chunks: u64,
    /// Bytes read, as stored.
    pub bytes: u64,
    /// The damage; empty if the image is intact.
    pub damage: Vec<Damage>,
}

/// Reads bytes of an object, in the store or outside it.
pub type Read<'a> = &'a (dyn Fn(&ObjectId, ByteRange) -> Result<Bytes> + Sync);

/// Reads all of the image `digest`: its manifest, every chunk, and every block against its
/// checksum. `progress` receives the stored bytes read and the total. Errors: only those that
/// prevent verification; a damaged manifest is one, because the chunks are then unknown.
pub fn verify(
    store: &impl ObjectStore,
    digest: &Digest,
    read: Read<'_>,
    progress: &(dyn Fn(u64, u64) + Sync),
) -> Result<Verified> {
    let manifest = load(store, digest, &ManifestLimits::default())?;
    let addresses = manifest.chunk_addresses();
    let total = manifest.chunks.iter().map(|chunk| chunk.stored.len()).sum();
    let done = AtomicU64::new(0);
    let bad: Vec<(u32, Error)> = (0..manifest.chunks.len())
        .into_par_iter()
        .filter_map(|index| {
            let result = check_chunk(&manifest, index, addresses[index], read);
            let len = manifest.chunks[index].stored.len();
            progress(done.fetch_add(len, Relaxed) + len, total);
            result.err().map(|error| (index as u32, error))
        })
        .collect();
    // Of packs, also checks bytes outside this image's chunks, unless a chunk was already
    // damaged.
    let told: BTreeSet<u32> =
        bad.iter().map(|(chunk, _)| manifest.chunks[*chunk as usize].object).collect();
    let whole = |object: &u32| {
        if told.contains(object) {
            return None;
        }
        let name = &manifest.objects[*object as usize];
        check_pack(store, name).err().map(|error| (*object, error))
    };
    let numbers: Vec<u32> = (0..manifest.objects.len() as u32).collect();
    let bad_packs: Vec<(u32, Error)> = numbers.par_iter().filter_map(whole).collect();
    let damage = damage(&manifest, &addresses, bad, bad_packs);
    Ok(Verified { chunks: manifest.chunks.len() as u64, bytes: total, damage })
}

fn check_chunk(manifest: &Manifest, index: usize, address: u64, read: Read<'_>) -> Result<()> {
    let chunk = &manifest.chunks[index];
    let stored = read(&manifest.objects[chunk.object as usize], chunk.stored)?;
    let mut raw = vec![0; chunk.len() as usize];
    decode_chunk(chunk.codec, &stored, &mut raw, &chunk.digest)?;
    if manifest.lacks_checksums() {
        return Ok(());
    }
    let size = manifest.checksum.size();
    let first = ((address - manifest.data_range().start()) / BLOCK_SIZE) as usize;
    let checksums = manifest.block_checksums.chunks_exact(size).skip(first);
    for (block, checksum) in raw.chunks_exact(BLOCK_SIZE as usize).zip(checksums) {
        if manifest.checksum.of(block).to_le_bytes()[..size] != *checksum {
            return Err(corrupt("the manifest has another checksum for a block of this chunk"));
        }
    }
    Ok(())
}

/// Checks all bytes of a pack against its name.
fn check_pack(store: &impl ObjectStore, object: &ObjectId) -> Result<()> {
    let Some(name) = object.below(ObjectKind::Pack) else { return Ok(()) };
    let bytes = store.get(object, pack::LEN_MAX)?;
    pack::check_header(&bytes)?;
    if Digest::of(&bytes) == name.parse()? {
        Ok(())
    } else {
        Err(corrupt(
            "its bytes do not match the digest in its name, though this image's chunks are sound",
        ))
    }
}

/// Groups the problems by object.
fn damage(
    manifest: &Manifest,
    addresses: &[u64],
    bad: Vec<(u32, Error)>,
    bad_packs: Vec<(u32, Error)>,
) -> Vec<Damage> {
    let mut by_object: BTreeMap<u32, (String, Vec<u32>)> = BTreeMap::new();
    for (chunk, error) in bad {
        let object = manifest.chunks[chunk as usize].object;
        let what = match error.kind() {
            ErrorKind::NotFound => "it is missing".to_owned(),
            _ => error.to_string(),
        };
        by_object.entry(object).or_insert_with(|| (what, vec![])).1.push(chunk);
    }
    for (object, error) in bad_packs {
        by_object.insert(object, (error.to_string(), vec![]));
    }
    let gather = |(object, (what, chunks)): (u32, (String, Vec<u32>))| Damage {
        object: manifest.objects[object as usize].clone(),
        what,
        files: files_of(manifest, addresses, &chunks),
        chunks: chunks.len() as u64,
    };
    by_object.into_iter().map(gather).collect()
}

/// The files that have a byte in one of `chunks` (sorted).
fn files_of(manifest: &Manifest, addresses: &[u64], chunks: &[u32]) -> Vec<Vec<u8>> {
    let starts: Vec<u64> = chunks.iter().map(|chunk| addresses[*chunk as usize]).collect();
    let ends: Vec<u64> = chunks.iter().map(|chunk| addresses[*chunk as usize + 1]).collect();
    let paths = Paths::new(&manifest.tree);
    let mut files = BTreeSet::new();
    for dirent in &manifest.tree.dirents {
        let inode = &manifest.tree.inodes[dirent.inode as usize];
        let hit = manifest.tree.extents_of(inode).iter().any(|extent| {
            // The first damaged chunk that ends after the extent's start.
            let index = ends.partition_point(|end| *end <= extent.address);
            starts.get(index).is_some_and(|start| *start < extent.address + extent.len)
        });
        if hit {
            files.insert(paths.of_dirent(dirent));
        }
    }
    files.into_iter().collect()
}
