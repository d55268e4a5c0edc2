//! LIRS (Jiang and Zhang, SIGMETRICS 2002), to compare the cache's policy with.
//!
//! ```text
//!   stack, by the last read:  top ─ … near │ far, stored │ far, gone … ─ bottom, always near
//!   queue of far, stored ones, by the last read ──► victims
//! ```
//!
//! *Near* chunks (99 % of the bytes) were read twice within the stack's span; *far* ones were not.
//! A far chunk that is read while it is on the stack becomes near, and the bottom one becomes far.
//!
//! Invariants: near chunks are on the stack and in no queue; stored far ones are in exactly one
//! queue; the bottom of the stack is near or the stack is empty; there are at most twice as many
//! chunks that are gone as most chunks were stored. A slot that was offered and not evicted is not
//! offered again before all others, or before the next chunk arrives.

use std::collections::HashMap;

use super::{ChunkPolicy, Pressure, order::Queue};
use crate::Why;

/// The share of the stored bytes that is far.
const FAR: u64 = 100;
/// Chunks on the stack that are gone, for each stored one.
const GONE: usize = 2;

#[derive(Clone, Copy)]
enum Member {
    Stored(u32),
    /// The hash of its key, and its ticket among those that are gone.
    Gone(u64, u64),
}

#[derive(Clone, Copy)]
struct Entry {
    hash: u64,
    bytes: u32,
    /// The ticket on the stack.
    stack: Option<u64>,
    /// Far: the ticket in the queue, or among those that were offered.
    queue: Option<(bool, u64)>,
}

/// Evicts chunks whose last two reads lie farthest apart.
#[derive(Default)]
pub struct Lirs {
    slots: Vec<Option<Entry>>,
    /// Tickets grow to the top.
    stack: Queue<Member>,
    queue: Queue<u32>,
    offered: Queue<u32>,
    /// By the hash of the key: the ticket on the stack.
    gone: HashMap<u64, u64>,
    /// Hashes in the order in which they went.
    went: Queue<u64>,
    stored: usize,
    most_stored: usize,
    near_bytes: u64,
    bytes: u64,
    most_bytes: u64,
}

impl Lirs {
    fn entry(&mut self, slot: u32) -> Option<&mut Entry> {
        self.slots.get_mut(slot as usize)?.as_mut()
    }

    /// Puts a stored chunk on top of the stack.
    fn raise(&mut self, slot: u32) {
        let ticket = self.stack.push(Member::Stored(slot));
        let before = self.entry(slot).and_then(|entry| entry.stack.replace(ticket));
        before.map(|before| self.stack.remove(before));
    }

    fn leave_queue(&mut self, slot: u32) {
        let Some(left) = self.entry(slot).and_then(|entry| entry.queue.take()) else { return };
        let (is_offered, ticket) = left;
        if is_offered { &mut self.offered } else { &mut self.queue }.remove(ticket);
    }

    fn enter_queue(&mut self, slot: u32, is_offered: bool) {
        self.leave_queue(slot);
        let queue = if is_offered { &mut self.offered } else { &mut self.queue };
        let ticket = queue.push(slot);
        if let Some(entry) = self.entry(slot) {
            entry.queue = Some((is_offered, ticket));
        }
    }

    fn forget_gone(&mut self, hash: u64) -> bool {
        let Some(ticket) = self.gone.remove(&hash) else { return false };
        if let Some(Member::Gone(_, went)) = self.stack.remove(ticket) {
            self.went.remove(went);
        }
        true
    }

    /// Removes far chunks from the bottom of the stack.
    fn prune(&mut self) {
        while let Some((ticket, member)) = self.stack.first() {
            match *member {
                Member::Gone(hash, _) => _ = self.forget_gone(hash),
                Member::Stored(slot) => match self.entry(slot) {
                    Some(entry) if entry.queue.is_none() => return,
                    entry => {
                        if let Some(entry) = entry {
                            entry.stack = None;
                        }
                        self.stack.remove(ticket);
                    }
                },
            }
        }
    }

    /// Makes the chunk at the bottom far, if there is one.
    fn demote(&mut self) -> bool {
        let Some((ticket, Member::Stored(slot))) = self.stack.first().map(|(at, it)| (at, *it))
        else {
            return false;
        };
        self.stack.remove(ticket);
        if let Some(entry) = self.entry(slot) {
            entry.stack = None;
            self.near_bytes -= u64::from(self.slots[slot as usize].map_or(0, |it| it.bytes));
        }
        self.enter_queue(slot, false);
        self.prune();
        true
    }

    /// Makes a stored chunk near, at the top of the stack.
    fn promote(&mut self, slot: u32) {
        self.leave_queue(slot);
        self.raise(slot);
        self.near_bytes += u64::from(self.slots[slot as usize].map_or(0, |it| it.bytes));
        while self.near_bytes > self.most_bytes - self.most_bytes / FAR && self.demote() {}
    }
}

impl ChunkPolicy for Lirs {
    fn admit(&mut self, _: u64, _: u32, _: Why, _: Pressure) -> bool {
        true
    }

    fn inserted(&mut self, slot: u32, hash: u64, bytes: u32, _: Why) {
        while let Some(skipped) = self.offered.first().map(|(_, slot)| *slot) {
            self.enter_queue(skipped, false);
        }
        self.removed(slot);
        if self.slots.len() <= slot as usize {
            self.slots.resize(slot as usize + 1, None);
        }
        self.slots[slot as usize] = Some(Entry { hash, bytes, stack: None, queue: None });
        self.stored += 1;
        self.most_stored = self.most_stored.max(self.stored);
        self.bytes += u64::from(bytes);
        let is_room = self.bytes > self.most_bytes;
        self.most_bytes = self.most_bytes.max(self.bytes);
        let near_most = self.most_bytes - self.most_bytes / FAR;
        let has_room = is_room && self.near_bytes + u64::from(bytes) <= near_most;
        if self.forget_gone(hash) || has_room {
            return self.promote(slot);
        }
        self.enter_queue(slot, false);
        self.raise(slot);
        self.prune();
    }

    fn removed(&mut self, slot: u32) {
        let Some(entry) = self.entry(slot).copied() else { return };
        self.leave_queue(slot);
        self.slots[slot as usize] = None;
        self.stored -= 1;
        self.bytes -= u64::from(entry.bytes);
        if entry.queue.is_none() {
            self.near_bytes -= u64::from(entry.bytes);
        }
        match entry.stack {
            Some(ticket) if entry.queue.is_some() => {
                self.forget_gone(entry.hash);
                let went = self.went.push(entry.hash);
                self.stack.replace(ticket, Member::Gone(entry.hash, went));
                self.gone.insert(entry.hash, ticket);
            }
            Some(ticket) => _ = self.stack.remove(ticket),
            None => {}
        }
        while self.gone.len() > GONE * self.most_stored
            && let Some(oldest) = self.went.first().map(|(_, hash)| *hash)
        {
            self.forget_gone(oldest);
        }
        self.prune();
    }

    fn touched(&mut self, slot: u32) {
        let Some(entry) = self.entry(slot).copied() else { return };
        match (entry.queue, entry.stack) {
            (Some(_), Some(_)) => self.promote(slot),
            (Some(_), None) => {
                self.enter_queue(slot, false);
                self.raise(slot);
            }
            (None, _) => self.raise(slot),
        }
        self.prune();
    }

    fn missed(&mut self, _: u64, _: u32) {}

    fn victim(&mut self) -> Option<u32> {
        if self.queue.first().is_none() {
            self.demote();
        }
        let next = self.queue.first().or_else(|| self.offered.first());
        let victim = next.map(|(_, slot)| *slot)?;
        self.enter_queue(victim, true);
        Some(victim)
    }
}

#[cfg(test)]
mod tests {
    use super::{GONE, Lirs, Member};
    use crate::{Why, policy::ChunkPolicy};

    fn check(policy: &Lirs) {
        let bottom = policy.stack.first().map(|(_, member)| *member);
        let is_near =
            |slot: u32| policy.slots[slot as usize].is_some_and(|entry| entry.queue.is_none());
        assert!(bottom.is_none_or(|it| matches!(it, Member::Stored(slot) if is_near(slot))));
        assert!(policy.gone.len() <= GONE * policy.most_stored);
        let stored = || policy.slots.iter().flatten();
        let near = stored().filter(|entry| entry.queue.is_none());
        assert!(near.clone().all(|entry| entry.stack.is_some()));
        assert_eq!(near.map(|entry| u64::from(entry.bytes)).sum::<u64>(), policy.near_bytes);
        assert_eq!(stored().count(), policy.stored);
        assert!(policy.near_bytes <= policy.most_bytes - policy.most_bytes / 100);
    }

    #[test]
    fn the_stack_ends_with_a_near_chunk_and_the_gone_are_bounded() {
        let mut policy = Lirs::default();
        let mut numbers = crate::policy::rng::Rng::new(1);
        let mut stored = vec![None; 100];
        for _ in 0..20_000 {
            let hash = u64::from(numbers.below(600).min(numbers.below(600)));
            let found = stored.iter().position(|it| *it == Some(hash));
            let free = stored.iter().position(Option::is_none);
            match (found, free) {
                (Some(slot), _) if numbers.below(20) == 0 => {
                    policy.removed(slot as u32);
                    stored[slot] = None;
                }
                (Some(slot), _) => policy.touched(slot as u32),
                (None, free) => {
                    let slot = free.unwrap_or_else(|| {
                        let victim = policy.victim().expect("it is full");
                        policy.removed(victim);
                        victim as usize
                    });
                    stored[slot] = Some(hash);
                    let bytes = 4096 * (1 + numbers.below(8));
                    policy.inserted(slot as u32, hash, bytes, Why::Read);
                }
            }
            check(&policy);
        }
        assert!(!policy.gone.is_empty() && policy.near_bytes > policy.bytes / 2);
    }

    #[test]
    fn a_chunk_that_comes_back_soon_is_near() {
        let mut policy = Lirs::default();
        (0..100).for_each(|slot| policy.inserted(slot, slot.into(), 4096, Why::Read));
        for round in 0..2 {
            // The first chunk is the only far one; after its return it is on the stack.
            assert_eq!(policy.victim(), Some(0), "round {round}");
            policy.removed(0);
            policy.inserted(0, 0, 4096, Why::Read);
        }
        assert_eq!(policy.victim(), Some(1), "the oldest of the near ones is far now");
    }
}
