//! The caches to compare: ours, RANDOM, LRU, and the best possible.

use std::collections::BinaryHeap;

use burgeon_accelerate::{
    keys::Key,
    policy::{BlockPolicy, Fate, PolicyKind},
    sets::{Sets, WAYS},
};

pub(super) trait Cache {
    /// Reads a block; true if it is here.
    fn read(&mut self, block: u32) -> bool;

    /// Blocks written to the cache device.
    fn written(&self) -> u64;
}

pub(super) fn cache(name: &str, slots: u32) -> Box<dyn Cache> {
    match PolicyKind::parse(name) {
        Some(kind) => Box::new(Ours::new(kind, slots)),
        None if name == "LRU" => Box::new(Lru::new(slots)),
        None => Box::new(Random::new(slots)),
    }
}

/// The content of a cache at the start.
#[derive(Clone, Copy)]
pub(super) enum Junk {
    None,
    /// Full of blocks of other data, each read eight times.
    Hot,
}

impl Junk {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::None => "empty",
            Self::Hot => "junk",
        }
    }

    pub(super) fn fill(self, cache: &mut dyn Cache, slots: u32) {
        if let Self::Hot = self {
            for _ in 0..8 {
                for block in 0..slots {
                    cache.read((1 << 27) + block);
                }
            }
        }
    }
}

/// The index and a policy of the crate, as the cache uses them.
struct Ours {
    sets: Sets,
    policy: BlockPolicy,
    written: u64,
}

impl Ours {
    fn new(kind: PolicyKind, slots: u32) -> Self {
        let sets = Sets::new(slots / WAYS as u32);
        let policy = BlockPolicy::new(kind, &sets);
        Self { sets, policy, written: 0 }
    }

    fn put(&mut self, key: Key, fate: Fate) {
        if let Fate::Slot(slot) = fate {
            self.sets.publish(slot, key, 0);
            self.policy.release(slot);
            self.written += 1;
        }
    }
}

impl Cache for Ours {
    fn read(&mut self, block: u32) -> bool {
        let key = Key { device: 0, block: block.into() };
        if let Some(slot) = self.sets.find(key) {
            self.policy.hit(&self.sets, key, slot);
            return true;
        }
        if self.policy.hit_memory(key) {
            return true;
        }
        let outcome = self.policy.miss(&self.sets, key);
        self.put(key, outcome.fate);
        if let Some((key, fate)) = outcome.leaves {
            self.put(key, fate);
        }
        false
    }

    fn written(&self) -> u64 {
        self.written
    }
}

const NONE: u32 = u32::MAX;

/// A table by block number, which grows.
#[derive(Default)]
struct Table(Vec<u32>);

impl Table {
    fn get(&self, block: u32) -> u32 {
        self.0.get(block as usize).copied().unwrap_or(NONE)
    }

    fn set(&mut self, block: u32, value: u32) {
        if self.0.len() <= block as usize {
            self.0.resize(block as usize + 1, NONE);
        }
        self.0[block as usize] = value;
    }
}

/// Evicts a random block.
struct Random {
    slots: u32,
    here: Table,
    blocks: Vec<u32>,
    state: u64,
    written: u64,
}

impl Random {
    fn new(slots: u32) -> Self {
        Self { slots, here: Table::default(), blocks: Vec::new(), state: 7, written: 0 }
    }
}

impl Cache for Random {
    fn read(&mut self, block: u32) -> bool {
        if self.here.get(block) != NONE {
            return true;
        }
        self.written += 1;
        if self.blocks.len() < self.slots as usize {
            self.here.set(block, self.blocks.len() as u32);
            self.blocks.push(block);
            return false;
        }
        self.state = self.state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        let slot = (((self.state >> 32) * u64::from(self.slots)) >> 32) as u32;
        self.here.set(std::mem::replace(&mut self.blocks[slot as usize], block), NONE);
        self.here.set(block, slot);
        false
    }

    fn written(&self) -> u64 {
        self.written
    }
}

/// Evicts the block whose last use is the oldest.
struct Lru {
    slots: u32,
    here: Table,
    blocks: Vec<u32>,
    newer: Vec<u32>,
    older: Vec<u32>,
    newest: u32,
    oldest: u32,
    written: u64,
}

impl Lru {
    fn new(slots: u32) -> Self {
        Self {
            slots,
            here: Table::default(),
            blocks: Vec::new(),
            newer: Vec::new(),
            older: Vec::new(),
            newest: NONE,
            oldest: NONE,
            written: 0,
        }
    }

    fn unlink(&mut self, slot: u32) {
        let (newer, older) = (self.newer[slot as usize], self.older[slot as usize]);
        match newer {
            NONE => self.newest = older,
            newer => self.older[newer as usize] = older,
        }
        match older {
            NONE => self.oldest = newer,
            older => self.newer[older as usize] = newer,
        }
    }

    fn link(&mut self, slot: u32) {
        self.newer[slot as usize] = NONE;
        self.older[slot as usize] = self.newest;
        match self.newest {
            NONE => self.oldest = slot,
            newest => self.newer[newest as usize] = slot,
        }
        self.newest = slot;
    }
}

impl Cache for Lru {
    fn read(&mut self, block: u32) -> bool {
        let slot = self.here.get(block);
        if slot != NONE {
            self.unlink(slot);
            self.link(slot);
            return true;
        }
        self.written += 1;
        let slot = if self.blocks.len() < self.slots as usize {
            self.blocks.push(block);
            self.newer.push(NONE);
            self.older.push(NONE);
            self.blocks.len() as u32 - 1
        } else {
            let oldest = self.oldest;
            self.unlink(oldest);
            self.here.set(std::mem::replace(&mut self.blocks[oldest as usize], block), NONE);
            oldest
        };
        self.here.set(block, slot);
        self.link(slot);
        false
    }

    fn written(&self) -> u64 {
        self.written
    }
}

/// The hit ratio after `from` requests, in per cent, and the writes of a cache that knows the
/// future, and may keep a block out.
pub(super) fn best(requests: &[u32], slots: usize, from: usize) -> (f64, u64) {
    let blocks = requests.iter().max().map_or(0, |max| *max as usize + 1);
    let (mut next, mut last) = (vec![NONE; requests.len()], vec![NONE; blocks]);
    for (at, block) in requests.iter().enumerate().rev() {
        next[at] = std::mem::replace(&mut last[*block as usize], at as u32);
    }
    // 0: not here; else the number of its next request.
    let mut here = vec![0; blocks];
    let mut farthest = BinaryHeap::new();
    let (mut hits, mut count, mut written) = (0u64, 0, 0);
    for (at, block) in requests.iter().enumerate() {
        let (soon, place) = (next[at], *block as usize);
        let was_here = here[place] != 0;
        hits += u64::from(was_here && at >= from);
        if soon == NONE {
            count -= usize::from(was_here);
            here[place] = 0;
            continue;
        }
        if !was_here {
            if count == slots {
                while farthest.peek().is_some_and(|(n, b)| here[*b as usize] != *n) {
                    farthest.pop();
                }
                match farthest.peek() {
                    Some((other, block)) if *other > soon => {
                        here[*block as usize] = 0;
                        farthest.pop();
                    }
                    _ => continue,
                }
            } else {
                count += 1;
            }
            written += 1;
        }
        here[place] = soon;
        farthest.push((soon, *block));
    }
    (100.0 * hits as f64 / (requests.len() - from) as f64, written)
}
