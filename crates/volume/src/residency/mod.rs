//! Residency: which bytes of an image lie on this host, and where. Today they lie in one sparse
//! file.
//!
//! ```text
//!   range ──► find ──► Place ──► read ──► bytes, not verified ──► the caller verifies them
//!               │ no: a miss                    │ wrong
//!               ▼                               ▼
//!             (fetch) ──► admit: write ──► presence bits      doubt: presence bits are cleared
//! ```
//!
//! Ranges are offsets from the start of the image's data. This module knows neither addresses nor
//! checksums nor readers. There is no log and no header on disk, so no order of writes to keep:
//! after a crash every block that is not in a hole may be resident, and its verification decides.
//!
//! Invariants, and the tests that hold them:
//! - A presence bit is set after the write, never before it
//!   (`tests::a_failed_write_is_not_found`, the simulator, `tests/interleavings.rs`).
//! - A place that cannot be read, or whose bytes were doubted, is not found again until it is
//!   admitted again (`tests::a_doubted_block_is_not_found_until_it_is_admitted_again`).
//! - A failing file costs no reader more than a miss; see [`gate`] for its writes.
//! - [`Residency::find`] and [`Residency::read`] take no lock and allocate nothing.

mod direct;
mod gate;
#[cfg(test)]
pub(crate) mod memory;
pub(crate) mod presence;

use std::ops::Range;

use burgeon_block::{BLOCK_SIZE, Counter, Error, LocalFile, Result};

pub use self::{
    direct::{Access, DirectFile},
    gate::CacheState,
};
use self::{gate::Gate, presence::Presence};
use crate::Limits;

/// Place of resident bytes. It may be stale by the time it is read: verify the bytes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Place {
    offset: u64,
    len: u64,
}

/// The resident bytes of one image.
pub(crate) struct Residency<F> {
    file: F,
    presence: Presence,
    /// Nothing is found and nothing is kept, because nobody could verify it.
    closed: bool,
    gate: Gate,
    pub(crate) read_errors: Counter,
    pub(crate) write_errors: Counter,
}

impl<F: LocalFile> Residency<F> {
    /// The residency of `len` bytes in `file`: every block that is not in a hole may be resident.
    /// A file that cannot be searched for holes is taken as empty.
    pub(crate) fn open(file: F, len: u64, limits: &Limits) -> Self {
        let residency = Self::new(file, len, limits, false);
        let blocks = len.div_ceil(BLOCK_SIZE);
        if residency.find_data(blocks).is_err() {
            residency.read_errors.add(1);
            residency.presence.clear(0..blocks);
        }
        residency
    }

    /// A residency in which nothing is ever found.
    pub(crate) fn closed(file: F, len: u64, limits: &Limits) -> Self {
        Self::new(file, len, limits, true)
    }

    fn new(file: F, len: u64, limits: &Limits, closed: bool) -> Self {
        Self {
            file,
            presence: Presence::new(len.div_ceil(BLOCK_SIZE)),
            closed,
            gate: Gate::new(limits),
            read_errors: Counter::default(),
            write_errors: Counter::default(),
        }
    }

    fn find_data(&self, blocks: u64) -> Result<()> {
        let mut next = 0;
        while let Some(found) = self.file.next_data(next)? {
            let end = found.end().div_ceil(BLOCK_SIZE).min(blocks);
            let start = (found.start() / BLOCK_SIZE).min(end);
            self.presence.set(start..end);
            // A file that names the same range again must not hold the caller here.
            next = found.end().max(next + 1);
        }
        Ok(())
    }

    /// The place of `len` bytes from `offset` on, if all of them may be resident.
    #[inline]
    pub(crate) fn find(&self, offset: u64, len: u64) -> Option<Place> {
        self.presence.all(blocks(offset, len)).then_some(Place { offset, len })
    }

    /// Fills `buf`, which is as long as `place`, with its bytes, not verified; `false` if the file
    /// fails, and then they are not found again.
    pub(crate) fn read(&self, place: Place, buf: &mut [u8]) -> bool {
        if self.file.read_at(place.offset, buf).is_ok() {
            return true;
        }
        self.lost(place);
        false
    }

    /// The bytes at `place` cannot be read or verified: they are not found again.
    pub(crate) fn lost(&self, place: Place) {
        self.read_errors.add(1);
        self.presence.clear(blocks(place.offset, place.len));
    }

    /// Forgets the block `index`, whose bytes were wrong: it is not found until it is admitted
    /// again.
    pub(crate) fn doubt(&self, index: u64) {
        self.presence.clear(index..index + 1);
    }

    /// True if [`Self::admit`] may be tried now.
    pub(crate) fn may_admit(&self) -> bool {
        !self.closed && self.gate.is_open()
    }

    /// Writes verified `bytes` to `offset`, and then makes them found. A failure closes the gate.
    pub(crate) fn admit(&self, offset: u64, bytes: &[u8]) -> Result<()> {
        match self.file.write_at(offset, bytes) {
            Ok(()) => {
                self.presence.set(blocks(offset, bytes.len() as u64));
                self.gate.written();
                Ok(())
            }
            Err(error) => {
                self.failed(&error);
                Err(error)
            }
        }
    }

    /// Closes the gate because of `error`: of a write, or of a record that has to precede one.
    pub(crate) fn failed(&self, error: &Error) {
        self.write_errors.add(1);
        self.gate.close(error);
    }

    /// The state of the cache: fetched chunks are kept, or not.
    pub(crate) fn state(&self) -> CacheState {
        self.gate.state()
    }

    /// Bytes that may be resident.
    pub(crate) fn resident_bytes(&self) -> u64 {
        self.presence.count() * BLOCK_SIZE
    }

    /// Makes the written bytes durable.
    pub(crate) fn sync(&self) -> Result<()> {
        self.file.sync()
    }
}

#[inline]
fn blocks(offset: u64, len: u64) -> Range<u64> {
    offset / BLOCK_SIZE..(offset + len).div_ceil(BLOCK_SIZE)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

    use burgeon_block::{BLOCK_SIZE, ByteRange, Result};

    use super::{Residency, memory::Memory};
    use crate::Limits;

    const LEN: u64 = 16 * BLOCK_SIZE;

    fn range(first: u64, blocks: u64) -> ByteRange {
        ByteRange::at(first * BLOCK_SIZE, blocks * BLOCK_SIZE).unwrap()
    }

    fn residency() -> Residency<Memory> {
        Residency::open(Memory::new(LEN), LEN, &Limits::default())
    }

    impl Residency<Memory> {
        fn found(&self, first: u64, blocks: u64) -> bool {
            self.find(first * BLOCK_SIZE, blocks * BLOCK_SIZE).is_some()
        }

        fn admit_blocks(&self, first: u64, blocks: u64, byte: u8) -> Result<()> {
            self.admit(first * BLOCK_SIZE, &vec![byte; (blocks * BLOCK_SIZE) as usize])
        }
    }

    #[test]
    fn admitted_bytes_are_found_and_read_back() {
        let residency = residency();
        assert!(!residency.found(2, 3));
        residency.admit_blocks(2, 3, 7).unwrap();
        assert!(!residency.found(1, 2) && !residency.found(4, 2));
        let mut buf = [0; 2 * BLOCK_SIZE as usize];
        assert!(residency.read(residency.find(3 * BLOCK_SIZE, 2 * BLOCK_SIZE).unwrap(), &mut buf));
        assert!(buf.iter().all(|byte| *byte == 7));
        assert_eq!(residency.resident_bytes(), 3 * BLOCK_SIZE);
    }

    #[test]
    fn a_doubted_block_is_not_found_until_it_is_admitted_again() {
        let residency = residency();
        residency.admit_blocks(0, 4, 1).unwrap();
        residency.doubt(2);
        assert!(residency.found(0, 2) && !residency.found(0, 4));
        residency.admit_blocks(2, 1, 1).unwrap();
        assert!(residency.found(0, 4));
    }

    #[test]
    fn a_failed_write_is_not_found() {
        let residency = residency();
        residency.file.fails.store(true, Relaxed);
        residency.admit_blocks(0, 1, 1).unwrap_err();
        assert!(!residency.found(0, 1) && !residency.may_admit());
        assert_eq!(residency.write_errors.get(), 1);
    }

    #[test]
    fn a_failed_read_is_a_miss_from_then_on() {
        let residency = residency();
        residency.admit_blocks(0, 4, 1).unwrap();
        let place = residency.find(BLOCK_SIZE, 2 * BLOCK_SIZE).unwrap();
        residency.file.fails.store(true, Relaxed);
        assert!(!residency.read(place, &mut [0; 2 * BLOCK_SIZE as usize]));
        assert!(!residency.found(1, 1) && !residency.found(2, 1));
        assert!(residency.found(0, 1) && residency.found(3, 1));
        assert_eq!(residency.read_errors.get(), 1);
    }

    #[test]
    fn a_file_that_is_opened_again_is_found_where_it_has_no_holes() {
        let mut file = Memory::new(LEN);
        file.data = vec![range(1, 2), range(5, 1)];
        let residency = Residency::open(file, LEN, &Limits::default());
        assert_eq!(residency.resident_bytes(), 3 * BLOCK_SIZE);
        assert!(residency.found(1, 2) && residency.found(5, 1));
        let mut file = Memory::new(LEN);
        file.fails = AtomicBool::new(true);
        let residency = Residency::open(file, LEN, &Limits::default());
        assert_eq!((residency.resident_bytes(), residency.read_errors.get()), (0, 1));
    }

    #[test]
    fn a_closed_residency_keeps_nothing() {
        let mut file = Memory::new(LEN);
        file.data = vec![range(0, 16)];
        let residency = Residency::closed(file, LEN, &Limits::default());
        assert!(!residency.found(0, 1) && !residency.may_admit());
    }
}
