//! Which blocks the cache device keeps: a policy is an admission and a replacement.
//!
//! ```text
//!              first miss            second miss (a ghost)         eviction
//!   adaptive   to a queue in memory  to the cache device           CLOCK of the set
//!   tinylfu    to a queue in memory  when asked for more often than the set's victim
//!   clock      to the cache device                                 CLOCK of the set
//!   fifo       to the cache device                                 the set's oldest
//! ```
//!
//! `adaptive` has three strictnesses, and goes on with the one that misses least on a sample
//! (`judge.rs`):
//!
//! ```text
//!   open     first misses, too, go to the cache device: the content is dead, or grows old quickly
//!   normal   as the table says
//!   strict   one of eight ghosts gets in, and only if the slot at the set's hand was not hit since
//!            the last round; else that slot ages. A loop that is longer than the cache keeps a part
//!            of itself, instead of pushing itself out
//! ```
//!
//! Invariants:
//! - A slot that [`BlockPolicy::miss`] gives out is reserved for its caller until
//!   [`BlockPolicy::release`].
//! - Nothing here is stored: a policy starts anew with each start, and can be replaced at any time.

mod ghosts;
mod judge;
mod sketch;
mod window;

use std::collections::HashSet;

use self::{ghosts::Ghosts, judge::Judge, sketch::Sketch, window::Window};
use crate::{
    keys::Key,
    sets::{Sets, Slot, WAYS},
};

/// The policies that a user can choose.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PolicyKind {
    /// The default.
    Adaptive,
    /// Admits everything.
    Clock,
    /// Admits everything, evicts the oldest.
    Fifo,
    /// Admits by frequency.
    TinyLfu,
}

impl PolicyKind {
    /// All of them, with their names.
    pub const ALL: [(Self, &str); 4] = [
        (Self::Adaptive, "adaptive"),
        (Self::Clock, "clock"),
        (Self::Fifo, "fifo"),
        (Self::TinyLfu, "tinylfu"),
    ];

    /// The policy of this name.
    pub fn parse(name: &str) -> Option<Self> {
        Self::ALL.iter().find(|(_, known)| *known == name).map(|(kind, _)| *kind)
    }

    /// Its name.
    pub fn name(self) -> &'static str {
        Self::ALL.iter().find(|(kind, _)| *kind == self).map_or("?", |(_, name)| name)
    }
}

/// Destination of a block that was fetched, or leaves the queue in memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fate {
    /// Into this slot, which is reserved and empty.
    Slot(Slot),
    /// Into memory.
    Memory,
    /// It is not kept.
    Dropped,
}

/// The consequences of a miss.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Outcome {
    /// Of the block that was missed.
    pub fate: Fate,
    /// A block that leaves memory in return.
    pub leaves: Option<(Key, Fate)>,
}

/// Strictness of admission to the cache device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Strictness {
    Open,
    Normal,
    Strict,
}

/// The most ghosts, which are 256 MB.
const GHOSTS_MAX: u64 = 128 << 20;
/// The most blocks in memory, which are 64 MiB.
const WINDOW_MAX: u64 = 16 << 10;

/// The state of a policy.
pub struct BlockPolicy {
    kind: PolicyKind,
    /// Of each set, the way to look at next.
    hands: Box<[u8]>,
    ghosts: Ghosts,
    window: Window,
    sketch: Option<Sketch>,
    strictness: Strictness,
    /// Of `adaptive`, unless it is a trial itself.
    judge: Option<Box<Judge>>,
    /// State of the random numbers.
    drawn: u64,
    reserved: HashSet<Slot>,
}

impl BlockPolicy {
    /// A policy for an index of this size.
    pub fn new(kind: PolicyKind, sets: &Sets) -> Self {
        let judge = (kind == PolicyKind::Adaptive).then(|| Box::new(Judge::new(sets.sets())));
        Self { judge, ..Self::fixed(kind, Strictness::Normal, sets) }
    }

    /// A policy whose strictness stays.
    fn fixed(kind: PolicyKind, strictness: Strictness, sets: &Sets) -> Self {
        let slots = u64::from(sets.slots());
        let ghosts = if kind == PolicyKind::Adaptive { slots.min(GHOSTS_MAX) } else { 0 };
        let window = (slots / 100).min(WINDOW_MAX);
        Self {
            kind,
            hands: vec![0; sets.sets() as usize].into_boxed_slice(),
            ghosts: Ghosts::new(ghosts),
            window: Window::new(window as usize),
            sketch: (kind == PolicyKind::TinyLfu).then(|| Sketch::new(slots)),
            strictness,
            judge: None,
            drawn: 1,
            reserved: HashSet::new(),
        }
    }

    /// Its kind.
    pub fn kind(&self) -> PolicyKind {
        self.kind
    }

    /// The most blocks that it keeps in memory.
    pub fn memory_blocks(sets: &Sets) -> u64 {
        (u64::from(sets.slots()) / 100).min(WINDOW_MAX)
    }

    /// Counts a hit of a slot that holds `key`.
    pub fn hit(&mut self, sets: &Sets, key: Key, slot: Slot) {
        if self.kind != PolicyKind::Fifo {
            sets.touch(slot);
        }
        self.count(key);
    }

    /// Counts a request.
    fn count(&mut self, key: Key) {
        if let Some(judge) = &mut self.judge
            && judge.samples(key)
        {
            self.strictness = judge.request(key, self.strictness);
        }
        if let Some(sketch) = &mut self.sketch {
            sketch.add(key);
        }
    }

    /// Counts a hit if `key` is in memory.
    pub fn hit_memory(&mut self, key: Key) -> bool {
        let hit = self.window.touch(key);
        if hit {
            self.count(key);
        }
        hit
    }

    /// Forgets that `key` is in memory.
    pub fn forget(&mut self, key: Key) -> bool {
        self.window.remove(key)
    }

    /// Decides about `key`, which is neither in a slot nor in memory.
    pub fn miss(&mut self, sets: &Sets, key: Key) -> Outcome {
        self.count(key);
        match self.kind {
            PolicyKind::Clock | PolicyKind::Fifo => {
                Outcome { fate: self.place(sets, key), leaves: None }
            }
            PolicyKind::Adaptive => {
                let known = self.ghosts.take(key);
                if self.strictness == Strictness::Open || (known && self.proves_itself(sets, key)) {
                    return Outcome { fate: self.place(sets, key), leaves: None };
                }
                if known {
                    self.ghosts.add(key);
                }
                self.window.push(key);
                let leaves =
                    self.window.overflow().map(|(key, hit)| (key, self.leave(sets, key, hit)));
                Outcome { fate: Fate::Memory, leaves }
            }
            PolicyKind::TinyLfu => {
                self.window.push(key);
                let leaves = self.window.overflow().map(|(key, _)| (key, self.compare(sets, key)));
                Outcome { fate: Fate::Memory, leaves }
            }
        }
    }

    /// Goes on as `next`, with the slots that are reserved now.
    pub fn succeed(&mut self, next: Self) {
        let reserved = std::mem::take(&mut self.reserved);
        *self = Self { reserved, ..next };
    }

    /// The caller has filled the slot, or given it up.
    pub fn release(&mut self, slot: Slot) {
        self.reserved.remove(&slot);
    }

    /// Reserves the slot of a block that is written anew. `None` if somebody fills it.
    pub fn reserve(&mut self, slot: Slot) -> Option<Slot> {
        self.reserved.insert(slot).then_some(slot)
    }

    /// Adaptive: the fate of a block that leaves memory.
    fn leave(&mut self, sets: &Sets, key: Key, hit: bool) -> Fate {
        let has_room = self.free_way(sets, sets.home(key)).is_some();
        let open = self.strictness == Strictness::Open;
        if has_room || open || (hit && self.proves_itself(sets, key)) {
            return self.place(sets, key);
        }
        self.ghosts.add(key);
        Fate::Dropped
    }

    /// True if a ghost may get in. Strictly, the slot at the set's hand must not have been hit
    /// lately, or it ages; and one of eight gets in, because blocks that all get in push each other
    /// out.
    fn proves_itself(&mut self, sets: &Sets, key: Key) -> bool {
        if self.strictness != Strictness::Strict {
            return true;
        }
        let set = sets.home(key);
        let hand = &mut self.hands[set as usize];
        let slot = set * WAYS as u32 + u32::from(*hand);
        if sets.clock(slot) == 0 {
            self.drawn = self.drawn.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            return self.drawn >> 61 == 0;
        }
        *hand = (*hand + 1) % WAYS as u8;
        sets.age(slot);
        false
    }

    /// TinyLFU: the fate of a block that leaves memory.
    fn compare(&mut self, sets: &Sets, key: Key) -> Fate {
        let set = sets.home(key);
        if self.free_way(sets, set).is_some() {
            return self.place(sets, key);
        }
        let Some(victim) = self.victim(sets, set) else { return Fate::Dropped };
        let Some(sketch) = &self.sketch else { return Fate::Dropped };
        let count = |key| sketch.count(key);
        if sets.key_of(victim).is_none_or(|old| count(key) > count(old)) {
            self.take(sets, victim)
        } else {
            Fate::Dropped
        }
    }

    fn place(&mut self, sets: &Sets, key: Key) -> Fate {
        let set = sets.home(key);
        match self.free_way(sets, set).or_else(|| self.victim(sets, set)) {
            Some(slot) => self.take(sets, slot),
            None => Fate::Dropped,
        }
    }

    /// Empties and reserves a slot.
    fn take(&mut self, sets: &Sets, slot: Slot) -> Fate {
        if self.kind == PolicyKind::Adaptive
            && let Some(old) = sets.key_of(slot)
        {
            self.ghosts.add(old);
        }
        if sets.is_used(slot) {
            sets.clear(slot);
        }
        self.reserved.insert(slot);
        Fate::Slot(slot)
    }

    fn free_way(&self, sets: &Sets, set: u32) -> Option<Slot> {
        let first = set * WAYS as u32;
        let is_free = |slot: &Slot| !sets.is_used(*slot) && !self.reserved.contains(slot);
        (first..first + WAYS as u32).find(is_free)
    }

    /// The next slot of a full set whose clock is 0; those before it age.
    fn victim(&mut self, sets: &Sets, set: u32) -> Option<Slot> {
        for _ in 0..WAYS * 5 {
            let hand = &mut self.hands[set as usize];
            let slot = set * WAYS as u32 + u32::from(*hand);
            *hand = (*hand + 1) % WAYS as u8;
            if self.reserved.contains(&slot) {
                continue;
            }
            if sets.clock(slot) == 0 {
                return Some(slot);
            }
            sets.age(slot);
        }
        None
    }
}
