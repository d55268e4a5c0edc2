//! W-TinyLFU (Einziger, Friedman, Manes, ACM TOS 2017), to compare the cache's policy with.
//!
//! ```text
//!   new ─► window, 1 % ── its oldest ──► contest ◄── oldest ── probation ◄─ overflow ─ protected
//!                                           │ read more often stays             │ read     ▲
//!                                           ▼ the other is evicted              └──────────┘
//! ```
//!
//! Invariants: a stored slot is a member of exactly one queue; a slot that was offered and not
//! evicted is not offered again before all others, or before the next chunk arrives. Everything is
//! admitted, because the window is on the disk, too.

use super::{ChunkPolicy, Pressure, order::Queue, sketch::Sketch};
use crate::Why;

/// The window's share of the stored bytes.
const WINDOW: u64 = 100;
/// Per cent of the bytes outside of the window that are protected.
const PROTECTED: u64 = 80;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum In {
    Window,
    Probation,
    Protected,
    /// Outside of the others since it was offered as a victim.
    Offered,
}
const QUEUES: usize = 4;

#[derive(Clone, Copy)]
struct Entry {
    hash: u64,
    bytes: u32,
    queue: In,
    ticket: u64,
}

/// Evicts, of the oldest chunk of a small window and the oldest of the others, the one that was
/// read less often.
#[derive(Default)]
pub struct TinyLfu {
    slots: Vec<Option<Entry>>,
    queues: [Queue<u32>; QUEUES],
    bytes: [u64; QUEUES],
    stored: usize,
    /// Most bytes that were ever stored: below them, room is only lent by an eviction.
    most: u64,
    sketch: Sketch,
}

impl TinyLfu {
    fn entry(&self, slot: u32) -> Option<Entry> {
        self.slots.get(slot as usize).copied().flatten()
    }

    fn put(&mut self, slot: u32, entry: Entry, queue: In) {
        let ticket = self.queues[queue as usize].push(slot);
        self.bytes[queue as usize] += u64::from(entry.bytes);
        self.slots[slot as usize] = Some(Entry { queue, ticket, ..entry });
    }

    fn take(&mut self, slot: u32) -> Option<Entry> {
        let entry = self.slots.get_mut(slot as usize)?.take()?;
        self.queues[entry.queue as usize].remove(entry.ticket);
        self.bytes[entry.queue as usize] -= u64::from(entry.bytes);
        Some(entry)
    }

    fn shift(&mut self, slot: u32, queue: In) {
        if let Some(entry) = self.take(slot) {
            self.put(slot, entry, queue);
        }
    }

    fn oldest(&self, queue: In) -> Option<u32> {
        self.queues[queue as usize].first().map(|(_, slot)| *slot)
    }

    fn total(&self) -> u64 {
        self.bytes.iter().sum()
    }

    fn reads(&self, slot: u32) -> u8 {
        self.entry(slot).map_or(0, |entry| self.sketch.estimate(entry.hash))
    }

    fn limit_protected(&mut self) {
        let others = self.bytes[In::Probation as usize] + self.bytes[In::Protected as usize];
        while self.bytes[In::Protected as usize] > others * PROTECTED / 100
            && let Some(slot) = self.oldest(In::Protected)
        {
            self.shift(slot, In::Probation);
        }
    }
}

impl ChunkPolicy for TinyLfu {
    fn admit(&mut self, _: u64, _: u32, _: Why, _: Pressure) -> bool {
        true
    }

    fn inserted(&mut self, slot: u32, hash: u64, bytes: u32, _: Why) {
        while let Some(skipped) = self.oldest(In::Offered) {
            self.shift(skipped, In::Probation);
        }
        if self.slots.len() <= slot as usize {
            self.slots.resize(slot as usize + 1, None);
        }
        self.removed(slot);
        self.put(slot, Entry { hash, bytes, queue: In::Window, ticket: 0 }, In::Window);
        self.stored += 1;
        self.sketch.reserve(self.stored);
        if self.total() > self.most {
            self.most = self.total();
            // There was room for this one: nothing has to leave for the oldest of the window.
            while self.bytes[In::Window as usize] > self.most / WINDOW
                && let Some(oldest) = self.oldest(In::Window).filter(|oldest| *oldest != slot)
            {
                self.shift(oldest, In::Probation);
            }
        }
    }

    fn removed(&mut self, slot: u32) {
        self.stored -= usize::from(self.take(slot).is_some());
    }

    fn touched(&mut self, slot: u32) {
        let Some(entry) = self.entry(slot) else { return };
        self.sketch.count(entry.hash);
        let is_new = entry.queue == In::Window;
        self.shift(slot, if is_new { In::Window } else { In::Protected });
        self.limit_protected();
    }

    fn missed(&mut self, key_hash: u64, _: u32) {
        self.sketch.count(key_hash);
    }

    fn victim(&mut self) -> Option<u32> {
        let others = self.oldest(In::Probation).or_else(|| self.oldest(In::Protected));
        let is_full = self.bytes[In::Window as usize] >= self.total() / WINDOW;
        let candidate = self.oldest(In::Window).filter(|_| is_full || others.is_none());
        let victim = match (candidate, others) {
            (Some(candidate), Some(other)) if self.reads(candidate) > self.reads(other) => {
                self.shift(candidate, In::Probation);
                Some(other)
            }
            (Some(candidate), _) => Some(candidate),
            (None, other) => other,
        };
        let victim = victim.or_else(|| self.oldest(In::Offered))?;
        self.shift(victim, In::Offered);
        Some(victim)
    }
}

#[cfg(test)]
mod tests {
    use super::{In, TinyLfu};
    use crate::{Why, policy::ChunkPolicy};

    /// A hundred chunks that were never read again; the last one is the window.
    fn full() -> TinyLfu {
        let mut policy = TinyLfu::default();
        (0..100).for_each(|slot| policy.inserted(slot, slot.into(), 4096, Why::Read));
        policy
    }

    #[test]
    fn the_chunk_that_was_read_less_often_loses_the_contest() {
        let mut policy = full();
        assert_eq!(policy.victim(), Some(99), "the newer one of two that are equal");
        let mut policy = full();
        (0..3).for_each(|_| policy.missed(99, 4096));
        assert_eq!(policy.victim(), Some(0));
        assert_eq!(policy.entry(99).map(|entry| entry.queue), Some(In::Probation));
    }

    #[test]
    fn each_queue_keeps_its_share_of_the_bytes() {
        let mut policy = full();
        (0..99).for_each(|slot| policy.touched(slot));
        assert_eq!(policy.bytes[In::Window as usize], 4096);
        assert_eq!(policy.bytes[In::Protected as usize], 79 * 4096);
        for new in 0..300 {
            let slot = policy.victim().expect("it is full");
            policy.removed(slot);
            policy.inserted(slot, 1000 + new, 4096, Why::Read);
            assert_eq!(policy.bytes[In::Window as usize], 4096);
            assert_eq!(policy.total(), 100 * 4096);
        }
        let queued: usize = policy.slots.iter().flatten().count();
        assert_eq!(queued, 100);
    }
}
