//! Residency: which chunks of an image lie in the host's cache, and where.
//!
//! ```text
//!   index ──► table of places ──► read ──► bytes, or their place on a disk; the caller verifies
//!               │ unknown or stale           │ wrong, also when the whole chunk is hashed
//!               ▼                            ▼
//!             find in the cache            doubt: the cache forgets the chunk, unless it has
//!               │ no: a miss                 forgotten it already
//!               ▼
//!             (fetch) ──► admit
//! ```
//!
//! Chunks have the indices of their image; their keys come from [`ChunkKeys`]. This module knows
//! neither addresses nor checksums nor readers. A mount with credentials looks in the public
//! domain first, then in its own, and admits to its own.
//!
//! The bytes of a chunk of which its image has no digest are followed by a seal ([`seal`]).
//!
//! Invariants, and the tests that hold them:
//! - A stale place is harmless: it is not read, or its bytes fail the caller's verification
//!   (`tests::a_stale_place_is_a_miss_or_the_new_place`, the simulator, `tests/interleavings.rs`).
//! - No chunk of another's credentials is found
//!   (`tests::a_chunk_is_found_in_the_public_domain_and_in_its_own`).
//! - Only a chunk that is still at the doubted place is forgotten
//!   (`tests::a_doubt_about_a_stale_place_is_none`).
//! - [`Residency::try_read`] takes no lock and allocates nothing once the place is known.

pub(crate) mod places;
mod seal;

use std::{ops::RangeInclusive, os::fd::BorrowedFd, sync::Arc};

use burgeon_block::{BLOCK_SIZE, Pages, Result};
use burgeon_cache::{CacheState, ChunkKey, ChunkStore, Domain, Here, Hold, Place, Why};

use self::{places::Places, seal::SEAL_LEN};

/// Absent chunks of an image that [`Residency::resident_bytes`] looks for in the cache: some ten
/// milliseconds.
const LOOKED_FOR_MAX: u32 = 1 << 16;

/// The host's cache, for an image that is read with certain credentials.
#[derive(Clone)]
pub struct CacheAccess {
    /// The cache.
    pub store: Arc<dyn ChunkStore>,
    /// The domain of the credentials: chunks are admitted to it.
    pub domain: Domain,
}

/// The keys of an image's chunks.
pub(crate) trait ChunkKeys {
    /// The number of chunks.
    fn count(&self) -> u32;
    /// Length of a chunk in bytes.
    fn len(&self, index: u32) -> u32;
    /// The key of a chunk in `domain`; `None` if nothing identifies its bytes.
    fn key(&self, index: u32, domain: &Domain) -> Option<ChunkKey>;
    /// True if the caller cannot tell right bytes of the chunk from wrong ones: a seal does.
    fn is_sealed(&self, index: u32) -> bool;
    /// Length of a chunk in the cache, with its seal.
    fn cached_len(&self, index: u32) -> u32 {
        self.len(index) + if self.is_sealed(index) { SEAL_LEN } else { 0 }
    }
}

/// A chunk in the cache.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CachedChunk {
    place: Place,
    key: ChunkKey,
}

/// The resident chunks of one image.
pub(crate) struct Residency<K> {
    cache: CacheAccess,
    keys: K,
    places: Places,
    /// The domains in which chunks are looked for. Without one nothing is found and nothing is
    /// kept, because nobody could verify it.
    domains: Box<[Domain]>,
}

impl<K: ChunkKeys> Residency<K> {
    /// The residency of the chunks of `keys` in `cache`.
    pub(crate) fn open(cache: CacheAccess, keys: K) -> Self {
        let own = Some(cache.domain).filter(|domain| *domain != Domain::PUBLIC);
        let domains = [Domain::PUBLIC].into_iter().chain(own).collect();
        Self { cache, places: Places::new(keys.count()), keys, domains }
    }

    /// A residency in which nothing is ever found.
    pub(crate) fn closed(cache: CacheAccess, keys: K) -> Self {
        Self { domains: [].into(), ..Self::open(cache, keys) }
    }

    /// Fills `buf` from `offset` of chunk `index`, with bytes that are not verified, or names their
    /// place in a file of a cache on a disk.
    #[inline]
    pub(crate) fn try_read(&self, index: u32, offset: u32, buf: &mut [u8]) -> Here {
        let known = self.places.get(index);
        if let Some(place) = known {
            let here = self.cache.store.try_read(place, offset, buf);
            if here != Here::Gone {
                self.cache.store.touch(place);
                return here;
            }
        }
        self.try_elsewhere(index, known, offset, buf)
    }

    #[cold]
    fn try_elsewhere(&self, index: u32, not: Option<Place>, offset: u32, buf: &mut [u8]) -> Here {
        let found = self.look_up(index).map(|found| found.place);
        let Some(place) = found.filter(|place| Some(*place) != not) else { return Here::Gone };
        let here = self.cache.store.try_read(place, offset, buf);
        if here != Here::Gone {
            self.cache.store.touch(place);
        }
        here
    }

    /// The same, but it waits for the disk; `false` if the cache does not have them.
    pub(crate) fn read(&self, index: u32, offset: u32, buf: &mut [u8]) -> bool {
        match self.try_read(index, offset, buf) {
            Here::Read => true,
            Here::Gone => false,
            Here::Local(_) => {
                let place = self.places.get(index);
                place.is_some_and(|place| self.cache.store.read(place, offset, buf))
            }
        }
    }

    /// Bytes of these chunks that were read at their places are wrong: the places may be stale, and
    /// are asked for again.
    pub(crate) fn distrust(&self, chunks: RangeInclusive<u32>) {
        for index in chunks {
            self.look_up(index);
        }
    }

    /// A file of the cache, for [`Here::Local`].
    pub(crate) fn local_file(&self, file: u32) -> Option<BorrowedFd<'_>> {
        self.cache.store.local_file(file)
    }

    /// True if chunk `index` is in the cache now.
    pub(crate) fn has(&self, index: u32) -> bool {
        self.place_now(index).is_some()
    }

    /// True if it is, and was kept for more than a while.
    pub(crate) fn has_lastingly(&self, index: u32) -> bool {
        self.place_now(index).is_some_and(|place| self.cache.store.is_lasting(place))
    }

    fn place_now(&self, index: u32) -> Option<Place> {
        // A read of nothing tells a stale place.
        let is_there = |place: &Place| self.cache.store.read(*place, 0, &mut []);
        let known = self.places.get(index).filter(is_there);
        known.or_else(|| self.look_up(index).map(|found| found.place))
    }

    /// Asks the cache for chunk `index`, whatever is known of it.
    pub(crate) fn look_up(&self, index: u32) -> Option<CachedChunk> {
        let (store, known) = (&self.cache.store, self.places.get(index));
        let find = |domain: &Domain| {
            let key = self.keys.key(index, domain)?;
            let known = known.filter(|place| store.is_at(*place, &key));
            Some(CachedChunk { place: known.or_else(|| store.find(&key))?, key })
        };
        let found = self.domains.iter().find_map(find);
        self.places.set(index, found.map(|found| found.place));
        found
    }

    /// The key under which chunk `index` is admitted.
    pub(crate) fn own_key(&self, index: u32) -> Option<ChunkKey> {
        let domain = self.domains.last()?;
        self.keys.key(index, domain)
    }

    /// Fills `buf` with all bytes of chunk `index`, which was found; `None` if they cannot be read,
    /// false if the chunk is sealed and they are not those of the seal.
    pub(crate) fn read_found(
        &self,
        index: u32,
        found: &CachedChunk,
        buf: &mut [u8],
    ) -> Option<bool> {
        let CachedChunk { place, key } = found;
        let read =
            |offset, buf: &mut [u8]| self.cache.store.read(*place, offset, buf).then_some(());
        read(0, buf)?;
        if !self.keys.is_sealed(index) {
            return Some(true);
        }
        let mut block = Pages::zeroed(SEAL_LEN.into())?;
        read(self.keys.len(index), block.bytes_mut())?;
        Some(seal::fits(block.bytes(), key, buf))
    }

    /// True if a chunk that was found was kept for more than a while.
    pub(crate) fn is_lasting(&self, found: &CachedChunk) -> bool {
        self.cache.store.is_lasting(found.place)
    }

    /// The bytes of chunk `index` at `found` are wrong, or cannot be read: the cache forgets them.
    /// False if it has forgotten them already, so that they prove nothing. The caller has hashed
    /// the whole chunk.
    pub(crate) fn doubt(&self, index: u32, found: &CachedChunk) -> bool {
        let CachedChunk { place, key } = found;
        self.places.set(index, None);
        if !self.cache.store.is_at(*place, key) {
            return false;
        }
        self.cache.store.doubt(*place, key);
        true
    }

    /// False if [`Self::admit`] would fail for certain.
    pub(crate) fn may_admit(&self, index: u32, why: Why) -> bool {
        let len = self.keys.cached_len(index);
        self.own_key(index).is_some_and(|key| self.cache.store.may_admit(&key, len, why))
    }

    /// Writes the verified `bytes` of chunk `index`, and then makes them found. False if the cache
    /// does not take them.
    pub(crate) fn admit(&self, index: u32, bytes: &[u8], why: Why) -> bool {
        let Some(key) = self.own_key(index) else { return false };
        let place = if self.keys.is_sealed(index) {
            let sealed = seal::sealed(&key, bytes);
            sealed.and_then(|sealed| self.cache.store.admit(key, sealed.bytes(), why))
        } else {
            self.cache.store.admit(key, bytes, why)
        };
        if place.is_some() {
            self.places.set(index, place);
        }
        place.is_some()
    }

    /// Keeps these chunks from eviction, present or yet to come. `NoSpace` if the cache cannot.
    pub(crate) fn hold(&self, chunks: &[u32]) -> Result<Hold> {
        let keys = |index: &u32| {
            let key = |domain| self.keys.key(*index, domain);
            self.domains.iter().filter_map(key).collect::<Vec<_>>()
        };
        self.cache.store.hold(&chunks.iter().flat_map(keys).collect::<Vec<_>>())
    }

    /// The domain that chunks are admitted to.
    pub(crate) fn domain(&self) -> Domain {
        self.cache.domain
    }

    /// The state of the cache: fetched chunks are kept, or not.
    pub(crate) fn state(&self) -> CacheState {
        self.cache.store.state()
    }

    /// Bytes that are in the cache; of images with more than [`LOOKED_FOR_MAX`] chunks, an
    /// estimate by an even sample.
    pub(crate) fn resident_bytes(&self) -> u64 {
        let count = self.keys.count();
        let step = count.div_ceil(LOOKED_FOR_MAX).max(1);
        let sampled = (0..count).step_by(step as usize);
        let len = |index| u64::from(self.keys.len(index));
        let bytes: u64 = sampled.filter(|index| self.has(*index)).map(len).sum();
        (bytes * u64::from(step)).next_multiple_of(BLOCK_SIZE)
    }

    /// Makes the chunks durable.
    pub(crate) fn sync(&self) -> Result<()> {
        self.cache.store.sync()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use burgeon_cache::{
        ChunkKey, ChunkStore, Domain, KeyKind, Why,
        testing::{Fault, MemoryStore},
    };

    use super::{CacheAccess, ChunkKeys, Residency};

    const LEN: usize = 8192;

    /// Chunks that are named by their index.
    struct Named(u32);

    impl ChunkKeys for Named {
        fn count(&self) -> u32 {
            self.0
        }

        fn len(&self, _: u32) -> u32 {
            LEN as u32
        }

        fn key(&self, index: u32, domain: &Domain) -> Option<ChunkKey> {
            Some(ChunkKey::new(domain, KeyKind::Chunk, &index.to_le_bytes()))
        }

        /// The last one alone.
        fn is_sealed(&self, index: u32) -> bool {
            index + 1 == self.0
        }
    }

    fn residency(store: &MemoryStore, domain: Domain) -> Residency<Named> {
        Residency::open(CacheAccess { store: Arc::new(store.clone()), domain }, Named(4))
    }

    fn store() -> MemoryStore {
        MemoryStore::new(1 << 20)
    }

    fn reads(residency: &Residency<Named>, index: u32) -> Option<u8> {
        let mut buf = [0; 4096];
        residency.read(index, 4096, &mut buf).then_some(buf[7])
    }

    #[test]
    fn admitted_bytes_are_found_and_read_back() {
        let store = store();
        let residency = residency(&store, Domain::PUBLIC);
        assert!(!residency.has(2) && reads(&residency, 2).is_none());
        assert!(residency.admit(2, &[7; LEN], Why::Read));
        assert!(residency.has(2) && !residency.has(1));
        assert_eq!(reads(&residency, 2), Some(7));
        assert_eq!(residency.resident_bytes(), LEN as u64);
    }

    #[test]
    fn a_chunk_is_found_in_the_public_domain_and_in_its_own() {
        let store = store();
        let [public, a, b] = [Domain::PUBLIC, Domain::of(b"a"), Domain::of(b"b")]
            .map(|domain| residency(&store, domain));
        assert!(public.admit(0, &[1; LEN], Why::Read) && a.admit(1, &[2; LEN], Why::Read));
        assert_eq!([&public, &a, &b].map(|from| reads(from, 0)), [Some(1); 3]);
        assert_eq!([&public, &a, &b].map(|from| reads(from, 1)), [None, Some(2), None]);
    }

    #[test]
    fn a_stale_place_is_a_miss_or_the_new_place() {
        let store = store();
        let [one, other] = [(); 2].map(|()| residency(&store, Domain::PUBLIC));
        one.admit(0, &[1; LEN], Why::Read);
        assert_eq!(reads(&other, 0), Some(1));
        store.forget_all();
        assert!(!other.has(0) && reads(&other, 0).is_none());
        one.admit(0, &[1; LEN], Why::Read);
        assert_eq!(reads(&other, 0), Some(1));
        store.forget_all();
        one.admit(0, &[1; LEN], Why::Read);
        // Its place is that of the chunk that was forgotten.
        assert_eq!((reads(&other, 0), other.resident_bytes()), (Some(1), LEN as u64));
    }

    #[test]
    fn a_doubt_about_a_stale_place_is_none() {
        let store = store();
        let residency = residency(&store, Domain::PUBLIC);
        residency.admit(0, &[1; LEN], Why::Read);
        let before = residency.look_up(0).unwrap();
        store.forget_all();
        residency.admit(0, &[1; LEN], Why::Read);
        assert!(!residency.doubt(0, &before), "the chunk is elsewhere now");
        assert!(residency.has(0));
        let now = residency.look_up(0).unwrap();
        assert!(residency.doubt(0, &now) && !residency.has(0));
    }

    #[test]
    fn a_cache_that_fails_or_is_closed_keeps_nothing() {
        let store = store();
        let open = residency(&store, Domain::PUBLIC);
        open.admit(0, &[1; LEN], Why::Read);
        store.fail(Some(Fault::NoSpace));
        assert!(!open.admit(1, &[1; LEN], Why::Read) && !open.may_admit(1, Why::Read));
        assert_eq!(reads(&open, 0), Some(1));
        store.fail(None);
        let access = CacheAccess { store: Arc::new(store.clone()), domain: Domain::PUBLIC };
        let closed = Residency::closed(access, Named(4));
        assert!(!closed.has(0) && !closed.may_admit(0, Why::Read));
        assert!(!closed.admit(1, &[1; LEN], Why::Read) && store.keys().len() == 1);
    }

    #[test]
    fn held_chunks_stay_while_others_come() {
        let store = MemoryStore::new(5 * LEN as u64);
        let residency = residency(&store, Domain::of(b"a"));
        let _hold = residency.hold(&[0]).unwrap();
        residency.admit(0, &[1; LEN], Why::Pin);
        let filler =
            |n: u32| ChunkKey::new(&Domain::PUBLIC, KeyKind::Chunk, &(100 + n).to_le_bytes());
        (0..50).for_each(|n| _ = store.admit(filler(n), &[9; LEN], Why::Read));
        assert!(residency.has(0));
    }
}
