//! A queue whose members leave from any place: the tickets grow with each arrival.

use std::collections::BTreeMap;

pub(super) struct Queue<T> {
    next: u64,
    members: BTreeMap<u64, T>,
}

impl<T> Default for Queue<T> {
    fn default() -> Self {
        Self { next: 0, members: BTreeMap::new() }
    }
}

impl<T> Queue<T> {
    /// Appends a member; its ticket is needed to remove it.
    pub(super) fn push(&mut self, member: T) -> u64 {
        let ticket = self.next;
        self.next += 1;
        self.members.insert(ticket, member);
        ticket
    }

    pub(super) fn remove(&mut self, ticket: u64) -> Option<T> {
        self.members.remove(&ticket)
    }

    /// Replaces the member with this ticket, which keeps its place.
    pub(super) fn replace(&mut self, ticket: u64, member: T) {
        if let Some(place) = self.members.get_mut(&ticket) {
            *place = member;
        }
    }

    /// The member that has been here longest.
    pub(super) fn first(&self) -> Option<(u64, &T)> {
        self.members.first_key_value().map(|(ticket, member)| (*ticket, member))
    }
}
