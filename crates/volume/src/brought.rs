//! What a profile has brought, or reading ahead, and nobody has read yet.

use burgeon_block::{BLOCK_SIZE, ByteRange, Counter};

use crate::presence::Presence;

/// One bit a block, so that useless prefetch can be measured.
pub(crate) struct Brought {
    data: ByteRange,
    unread: Presence,
    bytes: Counter,
}

/// Bytes that have been brought into a volume before anybody read them.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct BroughtBytes {
    /// All of them, uncompressed, whole chunks.
    pub brought: u64,
    /// Of these, bytes that were read since.
    pub read: u64,
}

impl Brought {
    pub(crate) fn new(data: ByteRange) -> Self {
        let unread = Presence::new(data.len().div_ceil(BLOCK_SIZE));
        Self { data, unread, bytes: Counter::default() }
    }

    fn blocks(&self, range: ByteRange) -> std::ops::Range<u64> {
        let (start, end) = (range.start() - self.data.start(), range.end() - self.data.start());
        start / BLOCK_SIZE..end.div_ceil(BLOCK_SIZE)
    }

    /// A chunk has come.
    pub(crate) fn note(&self, range: ByteRange) {
        self.bytes.add(range.len());
        self.unread.set(self.blocks(range));
    }

    /// Somebody reads.
    pub(crate) fn read(&self, range: ByteRange) {
        if self.unread.any(self.blocks(range)) {
            self.unread.clear(self.blocks(range));
        }
    }

    pub(crate) fn bytes(&self) -> BroughtBytes {
        let brought = self.bytes.get();
        let read = brought.saturating_sub(self.unread.count() * BLOCK_SIZE);
        BroughtBytes { brought, read }
    }
}
