use std::fmt;

use crate::BLOCK_SIZE;

/// Bytes `start..end` of an object, a file or an address space; `start <= end` always holds.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ByteRange {
    start: u64,
    end: u64,
}

impl ByteRange {
    /// `start..end`, or `None` if it would run backwards.
    pub fn new(start: u64, end: u64) -> Option<Self> {
        (start <= end).then_some(Self { start, end })
    }

    /// `len` bytes from `start`, or `None` if the end does not fit in 64 bits.
    pub const fn at(start: u64, len: u64) -> Option<Self> {
        match start.checked_add(len) {
            Some(end) => Some(Self { start, end }),
            None => None,
        }
    }

    /// The first byte.
    pub fn start(self) -> u64 {
        self.start
    }

    /// One past the last byte.
    pub fn end(self) -> u64 {
        self.end
    }

    /// Length in bytes.
    pub fn len(self) -> u64 {
        self.end - self.start
    }

    /// True if it holds no byte.
    pub fn is_empty(self) -> bool {
        self.start == self.end
    }

    /// True if `address` lies inside.
    pub fn contains(self, address: u64) -> bool {
        self.start <= address && address < self.end
    }

    /// True if all of `other` lies inside.
    pub fn covers(self, other: Self) -> bool {
        self.start <= other.start && other.end <= self.end
    }

    /// The common part, if it holds a byte.
    pub fn intersect(self, other: Self) -> Option<Self> {
        let (start, end) = (self.start.max(other.start), self.end.min(other.end));
        (start < end).then_some(Self { start, end })
    }

    /// The smallest range of whole blocks that covers this one.
    pub fn to_blocks(self) -> Self {
        let end = self.end.div_ceil(BLOCK_SIZE).saturating_mul(BLOCK_SIZE);
        Self { start: self.start / BLOCK_SIZE * BLOCK_SIZE, end }
    }
}

impl fmt::Debug for ByteRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}..{}", self.start, self.end)
    }
}

impl fmt::Display for ByteRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "bytes {}..{}", self.start, self.end)
    }
}

#[cfg(test)]
mod tests {
    use super::ByteRange;

    #[test]
    fn never_runs_backwards_or_overflows() {
        assert_eq!(ByteRange::new(2, 1), None);
        assert_eq!(ByteRange::at(u64::MAX, 1), None);
        assert!(ByteRange::at(u64::MAX, 0).unwrap().is_empty());
    }

    #[test]
    fn intersects_only_where_a_byte_is_shared() {
        let a = ByteRange::new(0, 10).unwrap();
        assert_eq!(a.intersect(ByteRange::new(10, 20).unwrap()), None);
        assert_eq!(a.intersect(ByteRange::new(5, 20).unwrap()), ByteRange::new(5, 10));
        assert!(a.covers(ByteRange::new(3, 10).unwrap()));
        assert!(!a.contains(10));
    }

    #[test]
    fn rounds_outwards_to_blocks() {
        assert_eq!(ByteRange::new(1, 4097).unwrap().to_blocks(), ByteRange::new(0, 8192).unwrap());
        assert_eq!(ByteRange::new(0, 4096).unwrap().to_blocks(), ByteRange::new(0, 4096).unwrap());
    }
}
