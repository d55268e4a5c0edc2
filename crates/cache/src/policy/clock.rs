use super::{ChunkPolicy, Pressure};
use crate::Why;

const EMPTY: u8 = 0;
const SEEN_ONCE: u8 = 1;
const TOUCHED: u8 = 2;

/// CLOCK: a hand walks over the slots, and evicts the next one that was not touched since it last
/// passed. Admits everything.
#[derive(Default)]
pub struct Clock {
    slots: Vec<u8>,
    hand: usize,
    live: usize,
}

impl ChunkPolicy for Clock {
    fn admit(&mut self, _: u64, _: u32, _: Why, _: Pressure) -> bool {
        true
    }

    fn inserted(&mut self, slot: u32, _: u64, _: u32, _: Why) {
        let slot = slot as usize;
        if self.slots.len() <= slot {
            self.slots.resize(slot + 1, EMPTY);
        }
        self.live += usize::from(self.slots[slot] == EMPTY);
        self.slots[slot] = SEEN_ONCE;
    }

    fn removed(&mut self, slot: u32) {
        if let Some(state) = self.slots.get_mut(slot as usize) {
            self.live -= usize::from(*state != EMPTY);
            *state = EMPTY;
        }
    }

    fn touched(&mut self, slot: u32) {
        if let Some(state) = self.slots.get_mut(slot as usize).filter(|state| **state != EMPTY) {
            *state = TOUCHED;
        }
    }

    fn missed(&mut self, _: u64, _: u32) {}

    fn victim(&mut self) -> Option<u32> {
        if self.live == 0 {
            return None;
        }
        loop {
            self.hand = (self.hand + 1) % self.slots.len();
            match &mut self.slots[self.hand] {
                state if *state == TOUCHED => *state = SEEN_ONCE,
                state if *state == SEEN_ONCE => return u32::try_from(self.hand).ok(),
                _ => {}
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Clock;
    use crate::{Why, policy::ChunkPolicy};

    #[test]
    fn touched_slots_outlive_the_others() {
        let mut clock = Clock::default();
        assert_eq!(clock.victim(), None);
        (0..4).for_each(|slot| clock.inserted(slot, 0, 4096, Why::Read));
        clock.touched(1);
        clock.touched(3);
        let mut evicted = Vec::new();
        while let Some(slot) = clock.victim() {
            clock.removed(slot);
            evicted.push(slot);
        }
        assert_eq!(evicted[..2], [2, 0]);
        assert_eq!(evicted.len(), 4);
    }
}
