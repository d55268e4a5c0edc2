use std::{
    collections::{HashMap, HashSet},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use burgeon_block::{Error, ErrorKind, Result};

use crate::{
    CHUNK_LEN_MAX, CacheState, ChunkKey, ChunkStore, Hold, Place, Why,
    policy::{ChunkPolicy, Clock, Pressure},
};

/// A failure that a [`MemoryStore`] is told to show until it is told otherwise.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fault {
    /// Reads fail.
    Read,
    /// Admissions fail, as on a full file system.
    NoSpace,
    /// Admissions fail, as on a broken one.
    Write,
}

struct Entry {
    key: ChunkKey,
    slot: u32,
    bytes: Vec<u8>,
}

struct Inner {
    limit: u64,
    used: u64,
    places: HashMap<ChunkKey, Place>,
    entries: HashMap<Place, Entry>,
    slots: Vec<Option<Place>>,
    free: Vec<u32>,
    held: HashMap<ChunkKey, u32>,
    policy: Box<dyn ChunkPolicy>,
    next: u64,
    fault: Option<Fault>,
    admitted: u64,
    evicted: u64,
    finds: u64,
}

/// A bounded chunk store in memory, for tests. It locks and allocates everywhere.
#[derive(Clone)]
pub struct MemoryStore(Arc<Mutex<Inner>>);

impl MemoryStore {
    /// A store of at most `limit` bytes that evicts by CLOCK.
    pub fn new(limit: u64) -> Self {
        Self::with_policy(limit, Box::new(Clock::default()))
    }

    /// Lookups of chunks so far.
    pub fn finds(&self) -> u64 {
        self.lock().finds
    }

    /// The same with another policy.
    pub fn with_policy(limit: u64, policy: Box<dyn ChunkPolicy>) -> Self {
        Self(Arc::new(Mutex::new(Inner {
            limit,
            used: 0,
            places: HashMap::new(),
            entries: HashMap::new(),
            slots: Vec::new(),
            free: Vec::new(),
            held: HashMap::new(),
            policy,
            next: 1,
            fault: None,
            admitted: 0,
            evicted: 0,
            finds: 0,
        })))
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Shows `fault` from now on, or none.
    pub fn fail(&self, fault: Option<Fault>) {
        self.lock().fault = fault;
    }

    /// Forgets `key`: its place is stale from now on. True if it was here.
    pub fn forget(&self, key: &ChunkKey) -> bool {
        let mut inner = self.lock();
        let place = inner.places.get(key).copied();
        place.is_some_and(|place| inner.remove(place))
    }

    /// Forgets everything.
    pub fn forget_all(&self) {
        let mut inner = self.lock();
        let places: Vec<Place> = inner.places.values().copied().collect();
        for place in places {
            inner.remove(place);
        }
    }

    /// Flips a bit of the byte at `offset` of the chunk with `key`. True if there is one.
    pub fn corrupt(&self, key: &ChunkKey, offset: u32) -> bool {
        let mut inner = self.lock();
        let place = inner.places.get(key).copied();
        let entry = place.and_then(|place| inner.entries.get_mut(&place));
        let byte = entry.and_then(|entry| entry.bytes.get_mut(offset as usize));
        byte.map(|byte| *byte ^= 1).is_some()
    }

    /// The keys that are here, sorted.
    pub fn keys(&self) -> Vec<ChunkKey> {
        let mut keys: Vec<ChunkKey> = self.lock().places.keys().copied().collect();
        keys.sort();
        keys
    }

    /// Bytes that are here; never above the limit.
    pub fn used(&self) -> u64 {
        self.lock().used
    }

    /// Chunks admitted so far, and chunks evicted for others.
    pub fn admitted_and_evicted(&self) -> (u64, u64) {
        let inner = self.lock();
        (inner.admitted, inner.evicted)
    }
}

impl Inner {
    fn remove(&mut self, place: Place) -> bool {
        let Some(entry) = self.entries.remove(&place) else { return false };
        self.used -= entry.bytes.len() as u64;
        self.places.remove(&entry.key);
        self.slots[entry.slot as usize] = None;
        self.free.push(entry.slot);
        self.policy.removed(entry.slot);
        true
    }

    /// Evicts until `bytes` more fit; false if what is held does not leave them.
    fn evict_for(&mut self, bytes: u64) -> bool {
        let mut skipped = HashSet::new();
        while self.used + bytes > self.limit {
            let Some(slot) = self.policy.victim() else { return false };
            let Some(place) = self.slots[slot as usize] else { return false };
            if self.held.contains_key(&self.entries[&place].key) {
                // A policy may name a held chunk again before it has named all others.
                skipped.insert(slot);
                if skipped.len() >= self.entries.len() {
                    return false;
                }
                self.policy.touched(slot);
                continue;
            }
            self.remove(place);
            self.evicted += 1;
        }
        true
    }

    fn insert(&mut self, key: ChunkKey, bytes: &[u8], why: Why) -> Option<Place> {
        if let Some(place) = self.places.get(&key) {
            return Some(*place);
        }
        let (len, hash) = (bytes.len() as u64, hash(&key));
        if matches!(self.fault, Some(Fault::NoSpace | Fault::Write)) {
            return None;
        }
        let full = self.used + len > self.limit;
        if full && !self.policy.admit(hash, len as u32, why, Pressure::Full) {
            return None;
        }
        if !self.evict_for(len) {
            return None;
        }
        let place = Place::from_bits(self.next)?;
        self.next += 1;
        let slot = self.free.pop().unwrap_or_else(|| {
            self.slots.push(None);
            (self.slots.len() - 1) as u32
        });
        self.slots[slot as usize] = Some(place);
        self.used += len;
        self.places.insert(key, place);
        self.entries.insert(place, Entry { key, slot, bytes: bytes.to_vec() });
        self.policy.inserted(slot, hash, len as u32, why);
        self.admitted += 1;
        Some(place)
    }
}

fn hash(key: &ChunkKey) -> u64 {
    key.as_bytes().iter().take(8).fold(0, |hash, byte| hash << 8 | u64::from(*byte))
}

struct Release {
    store: MemoryStore,
    keys: Vec<ChunkKey>,
}

impl Drop for Release {
    fn drop(&mut self) {
        let mut inner = self.store.lock();
        for key in &self.keys {
            if let Some(count) = inner.held.get_mut(key) {
                *count -= 1;
                if *count == 0 {
                    inner.held.remove(key);
                }
            }
        }
    }
}

impl ChunkStore for MemoryStore {
    fn find(&self, key: &ChunkKey) -> Option<Place> {
        let mut inner = self.lock();
        inner.finds += 1;
        let place = inner.places.get(key).copied();
        if place.is_none() {
            inner.policy.missed(hash(key), 0);
        }
        place
    }

    fn read(&self, place: Place, offset: u32, buf: &mut [u8]) -> bool {
        let inner = self.lock();
        let bytes = inner
            .entries
            .get(&place)
            .and_then(|entry| entry.bytes.get(offset as usize..)?.get(..buf.len()));
        match bytes {
            Some(bytes) if inner.fault != Some(Fault::Read) => buf.copy_from_slice(bytes),
            _ => return false,
        }
        true
    }

    fn touch(&self, place: Place) {
        let mut inner = self.lock();
        if let Some(slot) = inner.entries.get(&place).map(|entry| entry.slot) {
            inner.policy.touched(slot);
        }
    }

    fn doubt(&self, place: Place, key: &ChunkKey) {
        let mut inner = self.lock();
        if inner.places.get(key) == Some(&place) {
            inner.remove(place);
        }
    }

    fn may_admit(&self, _: &ChunkKey, len: u32, _: Why) -> bool {
        let inner = self.lock();
        u64::from(len) <= inner.limit && !matches!(inner.fault, Some(Fault::NoSpace | Fault::Write))
    }

    fn admit(&self, key: ChunkKey, bytes: &[u8], why: Why) -> Option<Place> {
        let sound = !bytes.is_empty() && bytes.len() <= CHUNK_LEN_MAX as usize;
        if sound { self.lock().insert(key, bytes, why) } else { None }
    }

    fn hold(&self, keys: &[ChunkKey]) -> Result<Hold> {
        let mut inner = self.lock();
        let new = keys.iter().filter(|key| !inner.held.contains_key(*key));
        let len = |key: &ChunkKey| {
            let place = inner.places.get(key)?;
            Some(inner.entries[place].bytes.len() as u64)
        };
        let wanted: u64 = new.chain(inner.held.keys()).filter_map(len).sum();
        let most = inner.limit / 5 * 4;
        if wanted > most {
            let limit = inner.limit;
            let what = format!(
                "cannot keep {wanted} bytes in a cache of {limit} bytes, of which {most} can be \
                 kept: raise the limit"
            );
            return Err(Error::new(ErrorKind::NoSpace, what));
        }
        for key in keys {
            *inner.held.entry(*key).or_default() += 1;
        }
        drop(inner);
        Ok(Hold::new(Release { store: self.clone(), keys: keys.to_vec() }))
    }

    fn make_room(&self, bytes: u64) -> u64 {
        let mut inner = self.lock();
        let limit = inner.limit;
        inner.evict_for(bytes.min(limit));
        limit - inner.used
    }

    fn state(&self) -> CacheState {
        let reason = "told to fail".to_owned();
        match self.lock().fault {
            Some(Fault::NoSpace) => CacheState::NoSpace { reason },
            Some(Fault::Write) => CacheState::Stopped { reason },
            _ => CacheState::Writing,
        }
    }

    fn sync(&self) -> Result<()> {
        Ok(())
    }
}
