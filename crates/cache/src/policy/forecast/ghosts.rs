//! Evicted and refused chunks, by a tag of the key: four bytes each, in sets of eight.
//!
//! ```text
//!   tag: 16 bits │ last use: 13 bits, in 4 ticks │ uses: 3 bits, 0 = empty
//! ```
//!
//! Six of eight entries are the latest; two are of one key in 32, which stay for about 8 turns
//! of the cache: without them, nothing would be known of longer intervals.

use super::AGE_UNIT;

const WAYS: usize = 8;
const RARE_WAYS: usize = 2;
const RARE: u32 = 32;
/// Ticks of a slot in one tick of a ghost.
const COARSE: u16 = 4;

#[derive(Clone, Copy, Default)]
struct Entry(u32);

impl Entry {
    fn new(tag: u32, at: u16, uses: u32) -> Self {
        Self(tag << 16 | u32::from(at / COARSE % (1 << 13)) << 3 | uses)
    }

    fn uses(self) -> u32 {
        self.0 & 7
    }

    fn tag(self) -> u32 {
        self.0 >> 16
    }

    fn is_rare(self) -> bool {
        self.tag().is_multiple_of(RARE)
    }

    fn age(self, now: u16) -> u16 {
        let at = (self.0 >> 3) as u16 % (1 << 13);
        (now / COARSE).wrapping_sub(at) % (1 << 13) * COARSE
    }
}

/// A chunk that is not stored, as far as it is remembered.
#[derive(Clone, Copy)]
pub(super) struct Ghost {
    pub(super) uses: u32,
    pub(super) age: u16,
}

#[derive(Default)]
pub(super) struct Ghosts {
    entries: Vec<Entry>,
}

impl Ghosts {
    /// Makes room for about `count` entries, and forgets all if that changes much.
    pub(super) fn fit(&mut self, count: usize) {
        let wanted = count / WAYS * WAYS;
        let now = self.entries.len();
        if wanted > now + now / 4 || wanted < now / 2 {
            // Not both at once: they are megabytes.
            self.entries = Vec::new();
            self.entries = vec![Entry::default(); wanted];
        }
    }

    pub(super) fn memory(&self) -> usize {
        self.entries.capacity() * size_of::<Entry>()
    }

    pub(super) fn len(&self) -> usize {
        self.entries.len()
    }

    fn set(&mut self, hash: u32) -> &mut [Entry] {
        let sets = self.entries.len() / WAYS;
        let set = ((u64::from(hash) * sets as u64) >> 32) as usize;
        &mut self.entries[set * WAYS..][..WAYS.min(sets * WAYS)]
    }

    pub(super) fn find(&mut self, hash: u32, now: u16) -> Option<Ghost> {
        let tag = hash & 0xffff;
        let entry = self.set(hash).iter().find(|it| it.uses() > 0 && it.tag() == tag)?;
        Some(Ghost { uses: entry.uses(), age: entry.age(now) })
    }

    pub(super) fn take(&mut self, hash: u32, now: u16) -> Option<Ghost> {
        let ghost = self.find(hash, now)?;
        let tag = hash & 0xffff;
        self.set(hash).iter_mut().filter(|it| it.tag() == tag).for_each(|it| *it = Entry(0));
        Some(ghost)
    }

    /// Remembers a chunk of at least one use, last used at `at`.
    pub(super) fn put(&mut self, hash: u32, at: u16, uses: u32, now: u16) {
        let set = self.set(hash);
        let rare = set.iter().filter(|it| it.uses() > 0 && it.is_rare()).count();
        let new = Entry::new(hash & 0xffff, at, uses);
        let many = rare + usize::from(new.is_rare()) > RARE_WAYS;
        let rank = |it: &Entry| match it.uses() {
            0 => (2, 0),
            _ => (u32::from(it.is_rare() == many), it.age(now)),
        };
        if let Some(place) = set.iter_mut().max_by_key(|it| rank(it)) {
            *place = new;
        }
    }

    /// The entry at `index`, for the census; one too old to tell its age is forgotten.
    pub(super) fn at(&mut self, index: usize, now: u16) -> Option<Ghost> {
        let entry = self.entries.get_mut(index).filter(|it| it.uses() > 0)?;
        let age = entry.age(now);
        if u32::from(age) > AGE_UNIT * 60 {
            *entry = Entry(0);
            return None;
        }
        Some(Ghost { uses: entry.uses(), age })
    }
}

#[cfg(test)]
mod tests {
    use super::{Entry, Ghosts};

    #[test]
    fn a_ghost_tells_its_uses_and_its_age_once() {
        let mut ghosts = Ghosts::default();
        assert!(ghosts.find(7, 0).is_none());
        ghosts.put(7, 0, 1, 0);
        ghosts.fit(64);
        ghosts.put(7, 65_000, 3, 65_000);
        let ghost = ghosts.take(7, 464).expect("the ghost is there");
        assert_eq!((ghost.uses, ghost.age), (3, 1000), "the clock wrapped in between");
        assert!(ghosts.take(7, 464).is_none());
    }

    #[test]
    fn rare_ghosts_outlive_the_others() {
        let mut ghosts = Ghosts::default();
        ghosts.fit(8);
        let (rare, other) = (64, 65);
        assert!(Entry::new(rare, 0, 1).is_rare() && !Entry::new(other, 0, 1).is_rare());
        ghosts.put(rare, 0, 1, 0);
        ghosts.put(other, 0, 1, 0);
        (1..32).for_each(|tag| ghosts.put(tag, 4 * tag as u16, 1, 4 * tag as u16));
        assert!(ghosts.find(rare, 128).is_some());
        assert!(ghosts.find(other, 128).is_none());
    }
}
