//! Prefetched bytes, and how many of them were read since: the measure of useless prefetch.

use std::ops::Range;

use burgeon_block::{BLOCK_SIZE, ByteRange, Counter};

use super::block_bits::BlockBits;

/// Why a run is fetched, to tell whether that was of use.
#[derive(Clone, Copy)]
pub(crate) enum Purpose {
    /// A profile names its chunks.
    Profile,
    /// They lie behind a chunk that a reader fetches.
    ReadAhead,
}

/// One bit a block: prefetched, and not read yet.
pub(crate) struct Prefetched {
    data: ByteRange,
    unread: BlockBits,
    bytes: Counter,
}

/// Bytes of a volume that were fetched before anybody read them.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct PrefetchedBytes {
    /// All of them, uncompressed, whole chunks.
    pub prefetched: u64,
    /// Of these, bytes that were read since.
    pub read: u64,
}

impl Prefetched {
    pub(crate) fn new(data: ByteRange) -> Self {
        let unread = BlockBits::new(data.len().div_ceil(BLOCK_SIZE));
        Self { data, unread, bytes: Counter::default() }
    }

    fn blocks(&self, range: ByteRange) -> Range<u64> {
        let (start, end) = (range.start() - self.data.start(), range.end() - self.data.start());
        start / BLOCK_SIZE..end.div_ceil(BLOCK_SIZE)
    }

    /// The chunk at `range` was prefetched.
    pub(crate) fn note(&self, range: ByteRange) {
        self.bytes.add(range.len());
        self.unread.set(self.blocks(range));
    }

    /// `range` was read.
    pub(crate) fn read(&self, range: ByteRange) {
        if self.unread.any(self.blocks(range)) {
            self.unread.clear(self.blocks(range));
        }
    }

    pub(crate) fn bytes(&self) -> PrefetchedBytes {
        let prefetched = self.bytes.get();
        let read = prefetched.saturating_sub(self.unread.count() * BLOCK_SIZE);
        PrefetchedBytes { prefetched, read }
    }
}

#[cfg(test)]
mod tests {
    use burgeon_block::{BLOCK_SIZE, ByteRange};

    use super::{Prefetched, PrefetchedBytes};

    #[test]
    fn each_block_counts_as_read_once_and_only_if_it_was_prefetched() {
        let blocks = |first: u64, len: u64| {
            ByteRange::at((1 << 40) + first * BLOCK_SIZE, len * BLOCK_SIZE).unwrap()
        };
        let prefetched = Prefetched::new(blocks(0, 100));
        prefetched.note(blocks(10, 20));
        for range in [blocks(0, 5), blocks(12, 2), blocks(13, 2), blocks(28, 10)] {
            prefetched.read(range);
        }
        let expected = PrefetchedBytes { prefetched: 20 * BLOCK_SIZE, read: 5 * BLOCK_SIZE };
        assert_eq!(prefetched.bytes(), expected);
    }
}
