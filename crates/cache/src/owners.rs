//! The owners of chunks, an image of a store each, and the limits of what their chunks take.
//!
//! ```text
//!   admit ─► owner of the slot ─► bytes of the owner, and of each limit that is about it
//!                                    └─ beyond a limit: the oldest chunk of that limit which was
//!                                       not read since it came, or was looked at, is evicted
//! ```
//!
//! A chunk has one owner: the one that admitted it or, for a chunk of an earlier server, the first
//! one that claims it. Chunks that images share count for that one alone.
//!
//! Invariants (`tests/owners.rs`):
//! - An owner has a number as long as it has chunks or somebody admits some for it; then another
//!   one gets the number.
//! - The chunks of a limit never take more than it says, except held ones when it is lowered.
//! - Nobody comes here on the path of a hit; everything is under the store's lock.

use std::collections::{HashMap, HashSet, VecDeque};

use crate::{
    Place,
    slots::{Slots, parts},
};

/// The owner of chunks.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct ChunkOwner {
    /// The image.
    pub image: String,
    /// The store that it is read from.
    pub store: String,
}

/// The owners that a limit is about.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub enum Scope {
    /// All owners of this image.
    Image(String),
    /// All owners with this store.
    Store(String),
}

impl Scope {
    pub(crate) fn has(&self, owner: &ChunkOwner) -> bool {
        match self {
            Self::Image(image) => *image == owner.image,
            Self::Store(store) => *store == owner.store,
        }
    }
}

/// Bytes of chunks by owner.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct OwnedBytes {
    /// Of each owner that has chunks, or for which somebody admits some.
    pub owners: Vec<(ChunkOwner, u64)>,
    /// Of chunks that nobody has claimed since this process was started.
    pub unclaimed: u64,
}

/// The number of an owner.
pub(crate) type Number = u16;
/// The number of no owner.
pub(crate) const NOBODY: Number = 0;
/// The bit beside a slot's owner: its chunk was read since it came, or was looked at.
const READ: u16 = 1 << 15;
/// Chunks of a limit that are looked at for one victim.
const LOOKS: usize = 1024;

#[derive(Default)]
struct Owned {
    /// `None` for nobody, and for a number that is free.
    owner: Option<ChunkOwner>,
    bytes: u64,
    /// Those that admit chunks for it.
    users: usize,
    /// Its limits, as indices.
    limits: Vec<usize>,
}

struct Limited {
    scope: Scope,
    most: u64,
    used: u64,
    chunks: usize,
    /// Places of its chunks, the oldest first; some are stale.
    queue: VecDeque<Place>,
}

impl Limited {
    /// `is_mine` says whether the chunk in a slot is one of the limit's.
    fn add(&mut self, place: Place, bytes: u64, slots: &Slots, is_mine: impl Fn(u32) -> bool) {
        self.used += bytes;
        self.chunks += 1;
        self.queue.push_back(place);
        if self.queue.len() > 2 * self.chunks + LOOKS {
            // A chunk that was lent may be in it twice.
            let mut known = HashSet::new();
            let mut stays = |place: &Place| {
                current(*place, slots).is_some_and(&is_mine) && known.insert(*place)
            };
            self.queue.retain(&mut stays);
        }
    }
}

/// True if the owner of the chunk in `slot` has this limit.
fn has_limit(owned: &[Owned], of_slot: &[u16], slot: u32, limit: usize) -> bool {
    let owner = of_slot.get(slot as usize).map_or(NOBODY, |word| word & !READ);
    owned[usize::from(owner)].limits.contains(&limit)
}

/// The slot of the chunk at `place`, if it is still there.
fn current(place: Place, slots: &Slots) -> Option<u32> {
    let (slot, _) = parts(place)?;
    (slots.place(slot) == Some(place)).then_some(slot)
}

pub(crate) struct Owners {
    numbers: HashMap<ChunkOwner, Number>,
    /// By number.
    owned: Vec<Owned>,
    /// Numbers that no owner has any more.
    free: Vec<Number>,
    limits: Vec<Limited>,
    /// By slot: the owner's number and [`READ`]. Nobody owns the slots beyond its end.
    of_slot: Vec<u16>,
}

impl Default for Owners {
    fn default() -> Self {
        Self {
            numbers: HashMap::new(),
            owned: vec![Owned::default()],
            free: Vec::new(),
            limits: Vec::new(),
            of_slot: Vec::new(),
        }
    }
}

impl Owners {
    /// The number of `owner`, until [`Self::leave`]. [`NOBODY`] if there are as many owners as
    /// there may be.
    pub(crate) fn join(&mut self, owner: &ChunkOwner) -> Number {
        let number = match (self.numbers.get(owner), self.free.pop()) {
            (Some(number), free) => {
                self.free.extend(free);
                *number
            }
            (None, Some(free)) => free,
            (None, None) if self.owned.len() >= usize::from(READ) => return NOBODY,
            (None, None) => {
                self.owned.push(Owned::default());
                (self.owned.len() - 1) as Number
            }
        };
        if self.owned[usize::from(number)].owner.is_none() {
            let limits = self.limits_of(owner);
            self.owned[usize::from(number)] =
                Owned { owner: Some(owner.clone()), limits, ..Owned::default() };
            self.numbers.insert(owner.clone(), number);
        }
        self.owned[usize::from(number)].users += 1;
        number
    }

    /// Ends one [`Self::join`].
    pub(crate) fn leave(&mut self, number: Number) {
        let owned = &mut self.owned[usize::from(number)];
        owned.users = owned.users.saturating_sub(1);
        self.forget_unused(number);
    }

    /// Makes the number free if nothing needs it any more.
    fn forget_unused(&mut self, number: Number) {
        let owned = &mut self.owned[usize::from(number)];
        if owned.users > 0 || owned.bytes > 0 {
            return;
        }
        if let Some(owner) = owned.owner.take() {
            owned.limits.clear();
            self.numbers.remove(&owner);
            self.free.push(number);
        }
    }

    fn limits_of(&self, owner: &ChunkOwner) -> Vec<usize> {
        let limits = self.limits.iter().enumerate();
        limits.filter(|(_, limit)| limit.scope.has(owner)).map(|(index, _)| index).collect()
    }

    /// The owner of the chunk in `slot`.
    pub(crate) fn of(&self, slot: u32) -> Number {
        self.of_slot.get(slot as usize).map_or(NOBODY, |word| word & !READ)
    }

    /// The chunk of `bytes` in `slot`, at `place`, is the owner's from now on.
    pub(crate) fn came(&mut self, at: (u32, Place), bytes: u64, owner: Number, slots: &Slots) {
        let (slot, place) = at;
        self.owned[usize::from(owner)].bytes += bytes;
        if owner == NOBODY {
            return;
        }
        if self.of_slot.len() <= slot as usize {
            self.of_slot.resize(slot as usize + 1, NOBODY);
        }
        self.of_slot[slot as usize] = owner;
        let Self { owned, limits, of_slot, .. } = self;
        for limit in &owned[usize::from(owner)].limits {
            let is_mine = |slot| has_limit(owned, of_slot, slot, *limit);
            limits[*limit].add(place, bytes, slots, is_mine);
        }
    }

    /// The chunk of `bytes` in `slot` is gone, or lent.
    pub(crate) fn went(&mut self, slot: u32, bytes: u64) {
        let owner = usize::from(self.of(slot));
        let owned = &mut self.owned[owner];
        owned.bytes = owned.bytes.saturating_sub(bytes);
        for limit in &owned.limits {
            let limit = &mut self.limits[*limit];
            limit.used = limit.used.saturating_sub(bytes);
            limit.chunks = limit.chunks.saturating_sub(1);
        }
        if let Some(word) = self.of_slot.get_mut(slot as usize) {
            *word = NOBODY;
        }
        self.forget_unused(owner as Number);
    }

    /// The chunk in `slot` was read.
    pub(crate) fn touched(&mut self, slot: u32) {
        if let Some(word) = self.of_slot.get_mut(slot as usize).filter(|word| **word != NOBODY) {
            *word |= READ;
        }
    }

    /// A limit of the owner that `more` bytes would break.
    pub(crate) fn broken(&self, owner: Number, more: u64) -> Option<usize> {
        let limits = &self.owned[usize::from(owner)].limits;
        limits.iter().copied().find(|limit| {
            let limit = &self.limits[*limit];
            limit.used + more > limit.most
        })
    }

    /// True if the owner has a limit that is smaller than `len`.
    pub(crate) fn never_fits(&self, owner: Number, len: u64) -> bool {
        let limits = &self.owned[usize::from(owner)].limits;
        limits.iter().any(|limit| self.limits[*limit].most < len)
    }

    /// The number of vain looks for a victim after which all chunks of the limit were looked at;
    /// `None` if they do not exceed it.
    pub(crate) fn looks_if_exceeded(&self, limit: usize) -> Option<usize> {
        let limit = self.limits.get(limit).filter(|limit| limit.used > limit.most)?;
        Some(limit.queue.len() / LOOKS + 1)
    }

    /// The chunk of a limit that goes next: the oldest one that was not read, or else the oldest;
    /// none that is held.
    pub(crate) fn victim(
        &mut self,
        limit: usize,
        slots: &Slots,
        is_held: impl Fn(u32) -> bool,
    ) -> Option<u32> {
        let Self { owned, limits, of_slot, .. } = self;
        let queue = &mut limits.get_mut(limit)?.queue;
        for spares_read in [true, false] {
            for _ in 0..queue.len().min(LOOKS) {
                let place = queue.pop_front()?;
                let Some(slot) = current(place, slots) else { continue };
                // It may have been lent, and be another owner's now.
                if !has_limit(owned, of_slot, slot, limit) {
                    continue;
                }
                let word = of_slot.get_mut(slot as usize)?;
                let was_read = *word & READ != 0;
                *word &= !READ;
                let stays = is_held(slot) || spares_read && was_read;
                if !stays {
                    return Some(slot);
                }
                queue.push_back(place);
            }
        }
        None
    }

    /// Replaces the limits. Their chunks are then as old as their slots.
    pub(crate) fn set_limits(&mut self, limits: Vec<(Scope, u64)>, slots: &Slots) {
        let is_same = |(limit, (scope, most)): (&Limited, &(Scope, u64))| {
            limit.scope == *scope && limit.most == *most
        };
        if limits.len() == self.limits.len() && self.limits.iter().zip(&limits).all(is_same) {
            return;
        }
        let begun =
            |(scope, most)| Limited { scope, most, used: 0, chunks: 0, queue: VecDeque::new() };
        self.limits = limits.into_iter().map(begun).collect();
        let by_owner: Vec<_> =
            self.numbers.iter().map(|(owner, at)| (*at, self.limits_of(owner))).collect();
        for (number, limits) in by_owner {
            self.owned[usize::from(number)].limits = limits;
        }
        for slot in 0..self.of_slot.len() as u32 {
            let limits = &self.owned[usize::from(self.of(slot))].limits;
            if limits.is_empty() {
                continue;
            }
            let (Some(chunk), Some(place)) = (slots.chunk(slot), slots.place(slot)) else {
                continue;
            };
            for limit in limits {
                // All of its chunks come, each once.
                self.limits[*limit].add(place, chunk.about.bytes(), slots, |_| true);
            }
        }
    }

    /// The limits, in bytes.
    pub(crate) fn limits(&self) -> Vec<(Scope, u64)> {
        self.limits.iter().map(|limit| (limit.scope.clone(), limit.most)).collect()
    }

    /// The bytes of all owners.
    pub(crate) fn bytes(&self) -> OwnedBytes {
        let bytes = |number: &Number| self.owned[usize::from(*number)].bytes;
        let mut owners: Vec<_> =
            self.numbers.iter().map(|(owner, number)| (owner.clone(), bytes(number))).collect();
        owners.sort_unstable();
        OwnedBytes { owners, unclaimed: bytes(&NOBODY) }
    }
}
