//! The cost of our part of a hit, in instructions: one queue over plain memory instead of a
//! driver, and a device all of whose data is in its cache.
//!
//! ```text
//!   cargo xtask budget ── callgrind ──► this test ──► answer_hits: HITS times
//!                                                     descriptor ─► locate, cache, checksum ─► copy, commit
//! ```
//!
//! One thread and fixed data, so two runs count the same.

#![allow(clippy::unwrap_used)]

use std::{fs::File, sync::atomic::AtomicUsize};

use burgeon_block::{BLOCK_SIZE, BlockSource, ByteRange, ChecksumKind, Digest, ObjectId};
use burgeon_btrfs::Tree;
use burgeon_cache::{
    Amount, Cache, CacheSettings, ChunkOwner, Domain, disk::DiskFolder, policy::Clock,
};
use burgeon_image::{AddressMap, ChunkEntry, Codec, DATA_START, Manifest};
use burgeon_volume::{CacheAccess, ChecksumFile, LazyDevice, Volume, VolumeLimits};
use bytes::Bytes;
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

use super::{super::mailbox::Mailbox, *};
use crate::{engine::ReadOnly, slots::Slots};

/// Requests that are answered.
const HITS: u64 = 100_000;
/// Requests between two looks at the ring. Under load the driver hands out many at once.
const BATCH: u16 = 32;
/// 4 MiB of data in chunks of 64 blocks.
const CHUNKS: u64 = 16;
const CHUNK_LEN: u64 = 64 * BLOCK_SIZE;

/// One pack in memory.
struct Pack(Bytes);

impl BlockSource for Pack {
    async fn read(&self, _object: &ObjectId, range: ByteRange) -> burgeon_block::Result<Bytes> {
        Ok(self.0.slice(range.start() as usize..range.end() as usize))
    }
}

/// No two blocks alike.
fn content() -> Vec<u8> {
    (0..CHUNKS * CHUNK_LEN / 8)
        .flat_map(|n| (n.wrapping_mul(0x9e37_79b9_7f4a_7c15)).to_le_bytes())
        .collect()
}

fn manifest(content: &[u8]) -> Manifest {
    let checksum = ChecksumKind::Crc32c;
    let blocks = content.chunks(BLOCK_SIZE as usize);
    let chunks = content.chunks(CHUNK_LEN as usize).zip(0..);
    Manifest {
        tree: Tree::default(),
        checksum,
        chunks: chunks
            .map(|(bytes, index)| ChunkEntry {
                blocks: (CHUNK_LEN / BLOCK_SIZE) as u8,
                object: 0,
                stored: ByteRange::at(index * CHUNK_LEN, CHUNK_LEN).unwrap(),
                codec: Codec::Raw,
                digest: Digest::of(bytes),
            })
            .collect(),
        objects: vec![ObjectId::new("packs/hits").unwrap()],
        block_checksums: blocks.flat_map(|b| (checksum.of(b) as u32).to_le_bytes()).collect(),
    }
}

/// All that is counted: everything between a request in shared memory and its commit.
#[inline(never)]
fn answer_hits<D: BlockDevice>(queue: &mut Queue<D, ReadOnly>, hits: u64) {
    for hit in 0..hits {
        let tag = hit % u64::from(BATCH);
        queue.handle(tag as u16);
        if tag == u64::from(BATCH) - 1 {
            turn_over(&mut queue.ring);
        }
    }
}

/// Gives all commands to the kernel, which refuses them, for the file is no device.
fn turn_over(ring: &mut Ring) {
    ring.ring.submit().unwrap();
    ring.fetching -= ring.ring.completion().count() as u16;
}

/// Asks for a block, as the driver does.
fn request(file: &File, tag: u16, offset: u64) {
    let at = descriptors_offset(0) + u64::from(tag) * size_of::<Descriptor>() as u64;
    let sectors = (BLOCK_SIZE >> SECTOR_SHIFT) as u32;
    file.write_all_at(&(u64::from(sectors) << 32 | u64::from(OP_READ)).to_le_bytes(), at).unwrap();
    file.write_all_at(&(offset >> SECTOR_SHIFT).to_le_bytes(), at + 8).unwrap();
}

#[test]
fn a_queue_answers_hits_from_the_cache() {
    // In memory: the ring would read what lies on a disk.
    let folder = tempfile::tempdir_in("/dev/shm").unwrap();
    let content = content();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let map = Arc::new(AddressMap::from_manifest(&manifest(&content)).unwrap());
    // Without a thread of its own.
    let disk = Arc::new(DiskFolder::new(folder.path()).unwrap());
    let settings = CacheSettings { keep_free: Amount::Bytes(0), ..CacheSettings::default() };
    let cache = Arc::new(Cache::over(disk, settings, Box::<Clock>::default()));
    // As a server has it.
    let owner = ChunkOwner { image: "image".to_owned(), store: "store".to_owned() };
    let access = CacheAccess { store: cache.for_owner(&owner), domain: Domain::PUBLIC };
    let pack = Pack(content.clone().into());
    let volume = Volume::<_, ChecksumFile>::new(map, pack, access, VolumeLimits::default());
    let filled = runtime.block_on(async { volume.fill().ended().await });
    assert_eq!(filled.done_bytes, content.len() as u64);
    let counters = Arc::default();
    let device = LazyDevice::new(volume, counters, 2 * DATA_START, Vec::new()).unwrap();

    // In place of the driver: a queue's descriptors, and a place for bytes.
    let file: File = memfd_create("hits", MemfdFlags::CLOEXEC).unwrap().into();
    ftruncate(&file, data_offset(1, 0)).unwrap();
    let places: Vec<_> = (0..u64::from(BATCH)).map(|n| n * 37 % (CHUNKS * 64)).collect();
    for (place, tag) in places.iter().zip(0..) {
        request(&file, tag, DATA_START + place * BLOCK_SIZE);
    }
    let slots = Arc::new(Slots::create().unwrap());
    let engine = Engine::new(Arc::new(device), slots.clone(), runtime.handle().clone(), 0).unwrap();
    let shared = Arc::new(Shared {
        file,
        mailboxes: vec![Mailbox::new(BATCH).unwrap()],
        running: AtomicUsize::new(1),
        life: engine.life().clone(),
    });
    let mut queue = Queue::new(0, BATCH, shared.clone(), Arc::new(engine)).unwrap();
    turn_over(&mut queue.ring);
    answer_hits(&mut queue, HITS);
    assert_eq!(slots.counters().hits.get(), HITS);
    println!("{HITS} hits");
    for (place, tag) in places.iter().zip(0..) {
        let mut answer = vec![0; BLOCK_SIZE as usize];
        shared.file.read_exact_at(&mut answer, data_offset(0, tag)).unwrap();
        let at = (place * BLOCK_SIZE) as usize;
        assert!(answer == content[at..at + BLOCK_SIZE as usize], "tag {tag}");
    }
}
