//! Mailbox in which tasks leave the results of misses for a queue's thread.
//!
//! ```text
//!   task: result of its tag ─► bit of its tag ─► eventfd, if it is the word's first bit
//!                                                  │ a read that waits in the queue's ring
//!   thread: ◄──────────────────────────────────────┘ takes all bits, commits their results
//! ```
//!
//! No lock and no allocation: a tag belongs to one request at a time, so each result has one
//! writer.

use std::{
    io,
    os::fd::{AsRawFd, OwnedFd, RawFd},
    sync::atomic::{
        AtomicI32, AtomicU64,
        Ordering::{Acquire, Relaxed, Release},
    },
};

use rustix::event::{EventfdFlags, eventfd};

pub(super) struct Mailbox {
    wake: OwnedFd,
    answered: Vec<AtomicU64>,
    results: Vec<AtomicI32>,
}

impl Mailbox {
    pub(super) fn new(depth: u16) -> io::Result<Self> {
        let depth = usize::from(depth);
        Ok(Self {
            wake: eventfd(0, EventfdFlags::CLOEXEC)?,
            answered: (0..depth.div_ceil(64)).map(|_| AtomicU64::new(0)).collect(),
            results: (0..depth).map(|_| AtomicI32::new(0)).collect(),
        })
    }

    /// Leaves the result of `tag`: bytes, or a negative errno.
    pub(super) fn post(&self, tag: u16, result: i32) {
        let tag = usize::from(tag);
        self.results[tag].store(result, Relaxed);
        // The task that sets the first bit after the thread has looked wakes the thread.
        if self.answered[tag / 64].fetch_or(1 << (tag % 64), Release) == 0 {
            self.ring();
        }
    }

    /// Wakes the thread.
    pub(super) fn ring(&self) {
        // It fails only when 2^64 - 2 wakes have not been read.
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
    }

    /// Takes everything out: tags and results.
    pub(super) fn take(&self, mut with: impl FnMut(u16, i32)) {
        for (word, bits) in self.answered.iter().enumerate() {
            let mut bits = bits.swap(0, Acquire);
            while bits != 0 {
                let tag = word * 64 + bits.trailing_zeros() as usize;
                with(tag as u16, self.results[tag].load(Relaxed));
                bits &= bits - 1;
            }
        }
    }

    /// The descriptor of which a ring reads 8 bytes to be woken.
    pub(super) fn fd(&self) -> RawFd {
        self.wake.as_raw_fd()
    }
}

#[cfg(test)]
mod tests {
    use std::{sync::Arc, thread};

    use super::Mailbox;

    #[test]
    fn every_result_arrives_once() {
        let mailbox = Arc::new(Mailbox::new(100).unwrap());
        let posters: Vec<_> = (0..4u16)
            .map(|n| {
                let mailbox = mailbox.clone();
                thread::spawn(move || {
                    for tag in (n..100).step_by(4) {
                        mailbox.post(tag, i32::from(tag) - 50);
                    }
                })
            })
            .collect();
        let mut seen = [0; 100];
        while seen.iter().sum::<i32>() < 100 {
            let mut count = [0; 8];
            rustix::io::read(&mailbox.wake, &mut count).unwrap();
            mailbox.take(|tag, result| {
                assert_eq!(result, i32::from(tag) - 50);
                seen[usize::from(tag)] += 1;
            });
        }
        posters.into_iter().for_each(|poster| poster.join().unwrap());
        assert_eq!(seen, [1; 100]);
    }
}
