//! Chunks that their source verifies: shared by their identity, which the source has to confirm,
//! and verified by their seal in the cache.
#![allow(clippy::unwrap_used)]

mod common;

use std::sync::Arc;

use burgeon_block::{BLOCK_SIZE, Counters, Digest, ErrorKind, Now, Pages};
use burgeon_cache::{Domain, testing::MemoryStore};
use burgeon_image::{Codec, Manifest};
use burgeon_volume::{CacheAccess, VolumeLimits};
use common::{Fault, Image, Source, TestVolume, image_with, key, open, public, verified_image};

/// Indices of the verified chunks of a test image.
const VERIFIED: [u32; 3] = [0, 2, 4];

/// An image in a derived object of its own, with a record of checksums of its own.
struct Mounted {
    _dir: tempfile::TempDir,
    image: Image,
    source: Source,
    volume: Arc<TestVolume>,
    counters: Counters,
}

impl Mounted {
    fn new(image: Image, cache: CacheAccess) -> Self {
        let (dir, source) = (tempfile::tempdir().unwrap(), Source::of(&image));
        let volume = open(&dir, &image, &source, cache, VolumeLimits::default());
        Self { _dir: dir, image, source, volume, counters: Counters::default() }
    }

    async fn read(&self, chunk: u32) -> burgeon_block::Result<()> {
        let range = self.image.map.chunk(chunk).range;
        let read = common::read(&self.volume, &self.image, range, &self.counters).await;
        while self.volume.status().in_flight > 0 {
            tokio::task::yield_now().await;
        }
        read
    }

    async fn read_all(&self) {
        for chunk in VERIFIED {
            self.read(chunk).await.unwrap();
        }
    }

    /// True if the chunk's bytes are served without a wait.
    fn is_hit(&self, chunk: u32) -> bool {
        let range = self.image.map.chunk(chunk).range;
        let mut pages = Pages::zeroed(range.len()).unwrap();
        self.volume.try_read(range, pages.bytes_mut()).unwrap() == Now::Served
    }
}

fn unchanged(_: &mut Manifest) {}

/// Two images of the same bytes, in different derived objects, over one cache.
fn two(store: &MemoryStore) -> [Mounted; 2] {
    [1, 2].map(|object| Mounted::new(verified_image(1, object, unchanged), public(store)))
}

#[tokio::test]
async fn images_of_different_objects_share_chunks_and_verify_them() {
    let store = MemoryStore::new(16 << 20);
    let [one, other] = two(&store);
    one.read_all().await;
    let admitted = store.admitted_and_evicted().0;
    assert!(!other.is_hit(0), "it has no record yet");
    other.read_all().await;
    assert_eq!((one.source.reads(), other.source.reads()), (3, 0));
    assert_eq!(store.admitted_and_evicted().0, admitted);
    assert!(VERIFIED.into_iter().all(|chunk| other.is_hit(chunk)));
    // Its hits are held to the checksums that it has recorded.
    assert!(store.corrupt(&key(&other.image, 4), 9 * BLOCK_SIZE as u32));
    assert!(!other.is_hit(4));
    other.read(4).await.unwrap();
    assert_eq!(other.source.reads(), 1);
    assert_eq!(other.counters.cache_corrupt_blocks.get(), 1);
    assert!(one.is_hit(4), "the chunk was replaced for both");
}

#[tokio::test]
async fn a_private_image_takes_public_chunks_over_and_gives_none_away() {
    let store = MemoryStore::new(16 << 20);
    let private = |name: &[u8], object| {
        let access = CacheAccess { domain: Domain::of(name), ..public(&store) };
        Mounted::new(verified_image(1, object, unchanged), access)
    };
    let [a, b] = [private(b"a", 1), private(b"b", 2)];
    let public = Mounted::new(verified_image(1, 3, unchanged), public(&store));
    a.read(0).await.unwrap();
    b.read(0).await.unwrap();
    public.read(0).await.unwrap();
    public.read(2).await.unwrap();
    let reads = || [&a, &b, &public].map(|image| image.source.reads());
    assert_eq!(reads(), [1, 1, 2]);
    // The public chunk is used where it is.
    a.read(2).await.unwrap();
    assert!(a.is_hit(2) && store.keys().len() == 4, "{:?}", store.keys());
    assert_eq!(reads(), [1, 1, 2]);
}

/// A manifest is not believed: else the bytes of its own object would be served for the other's.
#[tokio::test]
async fn a_manifest_with_the_identity_of_another_image_poisons_nothing() {
    let store = MemoryStore::new(16 << 20);
    let victim = Mounted::new(verified_image(1, 1, unchanged), public(&store));
    let identity = victim.image.map.chunk(0).digest;
    let hostile = verified_image(7, 2, |manifest| manifest.chunks[0].digest = identity);
    let hostile = Mounted::new(hostile, public(&store));
    assert_eq!(key(&hostile.image, 0), key(&victim.image, 0));
    assert_eq!(hostile.read(0).await.unwrap_err().kind(), ErrorKind::Corrupt);
    assert!(store.keys().is_empty(), "nothing was admitted");
    hostile.read(2).await.unwrap();
    // The run of a profile goes another way.
    let range = hostile.image.map.chunk(0).range;
    let prefetch = hostile.volume.prefetch_profile([range].into_iter(), None);
    prefetch.ended().await;
    while hostile.volume.status().in_flight > 0 {
        tokio::task::yield_now().await;
    }
    assert_eq!(store.keys(), [key(&hostile.image, 2)]);
    victim.read(0).await.unwrap();
    assert_eq!(victim.source.reads(), 1);
}

#[tokio::test]
async fn a_source_that_does_not_verify_a_chunk_is_not_believed_either() {
    let store = MemoryStore::new(16 << 20);
    let image = image_with(1, "packs/unverified", |manifest| {
        manifest.chunks[0].codec = Codec::Verified;
        manifest.block_checksums.fill(0);
    });
    let unverified = Mounted::new(image, public(&store));
    assert_eq!(unverified.read(0).await.unwrap_err().kind(), ErrorKind::Corrupt);
    assert!(store.keys().is_empty());
}

#[tokio::test]
async fn a_rotten_or_missing_seal_is_a_miss_that_heals() {
    for (offset, is_in_seal) in [(0, true), (31, true), (5, false)] {
        let store = MemoryStore::new(16 << 20);
        let [one, other] = two(&store);
        one.read(2).await.unwrap();
        let len = one.image.map.chunk(2).range.len() as u32;
        let at = if is_in_seal { len + offset } else { offset };
        assert!(store.corrupt(&key(&one.image, 2), at));
        other.read(2).await.unwrap();
        assert_eq!(other.source.reads(), 1, "byte {at}");
        assert_eq!(other.counters.cache_corrupt_blocks.get(), 1);
        // The chunk was written again, with a seal that is right.
        let third = Mounted::new(verified_image(1, 3, unchanged), public(&store));
        third.source.fail_always(Fault::Unavailable);
        third.read(2).await.unwrap();
        assert!(one.is_hit(2) && other.is_hit(2) && third.is_hit(2));
    }
}

/// The manifests of earlier versions have no identities.
#[tokio::test]
async fn without_an_identity_a_chunk_is_shared_within_its_object() {
    let store = MemoryStore::new(16 << 20);
    let forget = |manifest: &mut Manifest| {
        manifest.chunks.iter_mut().for_each(|chunk| {
            if chunk.codec == Codec::Verified {
                chunk.digest = Digest::from([0; 32]);
            }
        });
    };
    let [one, same, other] =
        [1, 1, 2].map(|object| Mounted::new(verified_image(1, object, forget), public(&store)));
    for mounted in [&one, &same, &other] {
        mounted.read_all().await;
    }
    assert_eq!([&one, &same, &other].map(|mounted| mounted.source.reads()), [3, 0, 3]);
}
