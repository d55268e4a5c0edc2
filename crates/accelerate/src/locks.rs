//! Locks of ranges of blocks, which are held across I/O; no mutex is.
//!
//! Invariants: a block has at most one holder. A thread that waits for a block holds no other
//! range, except through [`Locks::try_lock`], which never waits. The holder of a block may wait for
//! a turn (a range of no device), whose holder waits for no block: so nobody waits in a circle. For
//! the turn to tidy no holder of a block waits, so its holder may wait for blocks.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

/// A range of blocks of a device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct BlockRange {
    pub(crate) device: u8,
    pub(crate) first: u64,
    /// One past the last.
    pub(crate) end: u64,
}

impl BlockRange {
    fn meets(&self, other: &Self) -> bool {
        self.device == other.device && self.first < other.end && other.first < self.end
    }
}

/// The ranges in use.
#[derive(Default)]
pub(crate) struct Locks {
    held: Mutex<Vec<BlockRange>>,
    freed: Condvar,
}

/// A range that its holder alone changes, until it is dropped.
pub(crate) struct Locked<'a> {
    locks: &'a Locks,
    span: BlockRange,
}

impl Locks {
    fn held(&self) -> MutexGuard<'_, Vec<BlockRange>> {
        // No code that can panic runs under this lock.
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for the range.
    pub(crate) fn lock(&self, span: BlockRange) -> Locked<'_> {
        let mut held = self.held();
        while held.iter().any(|other| other.meets(&span)) {
            held = self.freed.wait(held).unwrap_or_else(PoisonError::into_inner);
        }
        held.push(span);
        Locked { locks: self, span }
    }

    /// The range, if nobody has a part of it.
    pub(crate) fn try_lock(&self, span: BlockRange) -> Option<Locked<'_>> {
        let mut held = self.held();
        if held.iter().any(|other| other.meets(&span)) {
            return None;
        }
        held.push(span);
        Some(Locked { locks: self, span })
    }
}

impl Drop for Locked<'_> {
    fn drop(&mut self) {
        let mut held = self.locks.held();
        if let Some(at) = held.iter().position(|span| *span == self.span) {
            held.swap_remove(at);
        }
        self.locks.freed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::{
        sync::atomic::{AtomicU32, Ordering::SeqCst},
        thread,
    };

    use super::{BlockRange, Locks};

    #[test]
    fn ranges_that_meet_exclude_each_other() {
        let (locks, inside) = (Locks::default(), AtomicU32::new(0));
        thread::scope(|scope| {
            for thread in 0..4 {
                let (locks, inside) = (&locks, &inside);
                scope.spawn(move || {
                    for _ in 0..2000 {
                        let _locked =
                            locks.lock(BlockRange { device: 1, first: thread, end: thread + 4 });
                        assert_eq!(inside.fetch_add(1, SeqCst), 0);
                        inside.fetch_sub(1, SeqCst);
                    }
                });
            }
        });
        let span = BlockRange { device: 1, first: 4, end: 6 };
        let locked = locks.lock(span);
        assert!(locks.try_lock(BlockRange { first: 5, ..span }).is_none());
        assert!(locks.try_lock(BlockRange { device: 2, ..span }).is_some());
        assert!(locks.try_lock(BlockRange { first: 6, end: 7, ..span }).is_some());
        drop(locked);
        assert!(locks.try_lock(span).is_some());
    }
}
