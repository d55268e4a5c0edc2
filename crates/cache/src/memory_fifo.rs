//! Chunks that were refused while the cache was full, in memory, first in first out: a refused
//! chunk that is read in two halves is fetched once.

use std::{
    collections::{HashMap, VecDeque},
    sync::{Mutex, MutexGuard, PoisonError, RwLock},
};

use crate::{ChunkKey, Place};

const IN_MEMORY: u64 = 1 << 63;
/// Most entries; a power of two.
const ENTRIES: u64 = 1 << 12;

#[derive(Default)]
struct Queue {
    next: u64,
    bytes: u64,
    order: VecDeque<(u64, ChunkKey, u64)>,
    by_key: HashMap<ChunkKey, u64>,
}

struct Entry {
    number: u64,
    bytes: Box<[u8]>,
}

pub(crate) struct MemoryFifo {
    limit: u64,
    queue: Mutex<Queue>,
    ring: Box<[RwLock<Option<Entry>>]>,
}

impl MemoryFifo {
    pub(crate) fn new(limit: u64) -> Self {
        let ring = (0..ENTRIES).map(|_| RwLock::new(None)).collect();
        Self { limit, queue: Mutex::default(), ring }
    }

    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn find(&self, key: &ChunkKey) -> Option<Place> {
        let number = *self.lock().by_key.get(key)?;
        Place::from_bits(IN_MEMORY | number)
    }

    pub(crate) fn is_here(place: Place) -> bool {
        place.to_bits() & IN_MEMORY != 0
    }

    fn entry(&self, number: u64) -> &RwLock<Option<Entry>> {
        &self.ring[(number % ENTRIES) as usize]
    }

    /// Never waits: an entry that is being replaced right now is a miss.
    pub(crate) fn read(&self, place: Place, offset: u32, buf: &mut [u8]) -> bool {
        let number = place.to_bits() & !IN_MEMORY;
        let Ok(entry) = self.entry(number).try_read() else { return false };
        let bytes = entry
            .as_ref()
            .filter(|entry| entry.number == number)
            .and_then(|entry| entry.bytes.get(offset as usize..)?.get(..buf.len()));
        bytes.map(|bytes| buf.copy_from_slice(bytes)).is_some()
    }

    pub(crate) fn insert(&self, key: ChunkKey, bytes: &[u8]) -> Option<Place> {
        let len = bytes.len() as u64;
        if len > self.limit {
            return None;
        }
        let mut queue = self.lock();
        if let Some(number) = queue.by_key.get(&key) {
            return Place::from_bits(IN_MEMORY | number);
        }
        while queue.bytes + len > self.limit || queue.order.len() as u64 == ENTRIES {
            let (number, key, len) = queue.order.pop_front()?;
            self.clear(&mut queue, number, &key, len);
        }
        let number = queue.next;
        queue.next += 1;
        queue.bytes += len;
        queue.order.push_back((number, key, len));
        queue.by_key.insert(key, number);
        let entry = Entry { number, bytes: bytes.into() };
        *self.entry(number).write().unwrap_or_else(PoisonError::into_inner) = Some(entry);
        Place::from_bits(IN_MEMORY | number)
    }

    fn clear(&self, queue: &mut Queue, number: u64, key: &ChunkKey, len: u64) {
        queue.bytes -= len;
        queue.by_key.remove(key);
        *self.entry(number).write().unwrap_or_else(PoisonError::into_inner) = None;
    }

    /// Forgets `key`, if it is at `place` or wherever it is.
    pub(crate) fn forget(&self, key: &ChunkKey, place: Option<Place>) {
        let mut queue = self.lock();
        let Some(number) = queue.by_key.get(key).copied() else { return };
        if place.is_some_and(|place| place.to_bits() != IN_MEMORY | number) {
            return;
        }
        let Some(at) = queue.order.iter().position(|(other, ..)| *other == number) else { return };
        if let Some((number, key, len)) = queue.order.remove(at) {
            self.clear(&mut queue, number, &key, len);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::MemoryFifo;
    use crate::ChunkKey;

    #[test]
    fn the_oldest_leave_and_their_places_are_stale() {
        let fifo = MemoryFifo::new(100);
        let places: Vec<_> =
            (0..20).map(|n| fifo.insert(ChunkKey::from([n; 16]), &[n; 10]).unwrap()).collect();
        let mut buf = [0; 4];
        for (n, place) in (0u8..).zip(places) {
            let key = ChunkKey::from([n; 16]);
            assert_eq!(fifo.find(&key), (n >= 10).then_some(place));
            assert_eq!(fifo.read(place, 6, &mut buf), n >= 10);
            assert!(n < 10 || buf == [n; 4]);
            assert!(!fifo.read(place, 7, &mut buf));
        }
        fifo.forget(&ChunkKey::from([15; 16]), None);
        assert_eq!(fifo.find(&ChunkKey::from([15; 16])), None);
        assert!(fifo.insert(ChunkKey::from([0; 16]), &[0; 101]).is_none());
    }
}
