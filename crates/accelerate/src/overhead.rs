//! Bytes that are written to the cache device beside the blocks, until the counters of their
//! devices have them.
//!
//! ```text
//!   of one device   its bitmaps, identity and record
//!   of all          index, heads of the log, the rest of the superblock ─► divided among the devices
//!                   by the blocks that each of them has had written meanwhile
//! ```
//!
//! Invariant (held by the test below): each byte is counted once, and none for a device that writes
//! nothing while another one does.

use std::sync::atomic::{AtomicU64, Ordering::SeqCst};

use crate::format::DEVICES_MAX;

/// Bytes that no device has counted yet.
#[derive(Default)]
pub(crate) struct Overhead {
    of: [AtomicU64; DEVICES_MAX],
    of_all: AtomicU64,
    /// Blocks since the last division.
    blocks: [AtomicU64; DEVICES_MAX],
}

impl Overhead {
    /// Notes bytes of one device, or of all.
    pub(crate) fn note(&self, device: Option<u8>, bytes: u64) {
        let of = device.and_then(|device| self.of.get(usize::from(device)));
        of.unwrap_or(&self.of_all).fetch_add(bytes, SeqCst);
    }

    /// Notes that a device has had blocks written.
    pub(crate) fn note_blocks(&self, device: u8, blocks: u64) {
        if let Some(of) = self.blocks.get(usize::from(device)) {
            of.fetch_add(blocks, SeqCst);
        }
    }

    /// Divides the bytes of all; without any blocks, `device` has them.
    pub(crate) fn divide(&self, device: u8) {
        let bytes = self.of_all.swap(0, SeqCst);
        let blocks = self.blocks.each_ref().map(|blocks| blocks.swap(0, SeqCst));
        let all: u64 = blocks.iter().sum();
        if all == 0 {
            return self.note(Some(device), bytes);
        }
        let (mut before, mut given) = (0u64, 0);
        for (of, blocks) in self.of.iter().zip(blocks) {
            before += blocks;
            // The sum of the parts is exact.
            let until = (u128::from(bytes) * u128::from(before) / u128::from(all)) as u64;
            of.fetch_add(until - given, SeqCst);
            given = until;
        }
    }

    /// The bytes of a device since the last call.
    pub(crate) fn take(&self, device: usize) -> u64 {
        self.of.get(device).map_or(0, |of| of.swap(0, SeqCst))
    }
}

#[cfg(test)]
mod tests {
    use super::Overhead;
    use crate::format::DEVICES_MAX;

    #[test]
    fn bytes_are_counted_once_and_for_the_device_that_writes() {
        let overhead = Overhead::default();
        let take = || -> Vec<u64> { (0..DEVICES_MAX).map(|at| overhead.take(at)).collect() };
        overhead.note(Some(3), 4096);
        overhead.note(None, 10_000);
        [(0, 1), (5, 2)].iter().for_each(|(device, blocks)| overhead.note_blocks(*device, *blocks));
        // Another one is tidied.
        overhead.divide(1);
        let taken = take();
        assert_eq!((taken[0], taken[1], taken[3], taken[5]), (3333, 0, 4096, 6667));
        assert_eq!(taken.iter().sum::<u64>(), 14_096);
        overhead.note(None, 4096);
        overhead.divide(1);
        overhead.divide(2);
        let taken = take();
        assert_eq!((taken[1], taken.iter().sum::<u64>()), (4096, 4096));
    }
}
