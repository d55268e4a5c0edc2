use super::{ChunkPolicy, Pressure, rng::Rng};
use crate::Why;

const ABSENT: u32 = u32::MAX;

/// Evicts a random chunk and admits everything: the floor below which no policy may fall.
pub struct Random {
    slots: Vec<u32>,
    /// The index of each slot in `slots`.
    places: Vec<u32>,
    rng: Rng,
}

impl Random {
    /// A policy whose choices follow from `seed`.
    pub fn new(seed: u64) -> Self {
        Self { slots: Vec::new(), places: Vec::new(), rng: Rng::new(seed) }
    }
}

impl ChunkPolicy for Random {
    fn admit(&mut self, _: u64, _: u32, _: Why, _: Pressure) -> bool {
        true
    }

    fn inserted(&mut self, slot: u32, _: u64, _: u32, _: Why) {
        self.removed(slot);
        if self.places.len() <= slot as usize {
            self.places.resize(slot as usize + 1, ABSENT);
        }
        self.places[slot as usize] = self.slots.len() as u32;
        self.slots.push(slot);
    }

    fn removed(&mut self, slot: u32) {
        let Some(place) = self.places.get_mut(slot as usize) else { return };
        let at = std::mem::replace(place, ABSENT);
        if at == ABSENT {
            return;
        }
        self.slots.swap_remove(at as usize);
        if let Some(moved) = self.slots.get(at as usize) {
            self.places[*moved as usize] = at;
        }
    }

    fn touched(&mut self, _: u32) {}

    fn missed(&mut self, _: u64, _: u32) {}

    fn victim(&mut self) -> Option<u32> {
        let count = u32::try_from(self.slots.len()).ok().filter(|count| *count > 0)?;
        self.slots.get(self.rng.below(count) as usize).copied()
    }
}
