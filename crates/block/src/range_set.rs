use std::collections::BTreeMap;

use crate::ByteRange;

/// A set of bytes, stored as ranges that neither touch nor overlap.
#[derive(Clone, Default, Debug)]
pub struct RangeSet {
    /// Start to end.
    ranges: BTreeMap<u64, u64>,
}

impl RangeSet {
    /// Adds `range` and returns the parts of it that were missing, in ascending order.
    pub fn insert(&mut self, range: ByteRange) -> Vec<ByteRange> {
        let new = self.missing(range);
        if !range.is_empty() {
            let (mut start, mut end) = (range.start(), range.end());
            while let Some((first, last)) = self.ranges.range(..=end).next_back() {
                let (first, last) = (*first, *last);
                if last < start {
                    break;
                }
                self.ranges.remove(&first);
                (start, end) = (start.min(first), end.max(last));
            }
            self.ranges.insert(start, end);
        }
        new
    }

    /// The parts of `range` that are not in the set, in ascending order.
    pub fn missing(&self, range: ByteRange) -> Vec<ByteRange> {
        let mut missing = Vec::new();
        let mut at = range.start();
        let before = self.ranges.range(..=at).next_back();
        let from = before.map_or(at, |(start, _)| *start);
        for (start, end) in self.ranges.range(from..range.end()) {
            missing.extend(ByteRange::new(at, *start).filter(|gap| !gap.is_empty()));
            at = at.max(*end);
        }
        missing.extend(ByteRange::new(at, range.end()).filter(|gap| !gap.is_empty()));
        missing
    }

    /// Number of ranges.
    pub fn len(&self) -> usize {
        self.ranges.len()
    }

    /// True if the set is empty.
    pub fn is_empty(&self) -> bool {
        self.ranges.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::RangeSet;
    use crate::ByteRange;

    #[test]
    fn agrees_with_a_bitmap() {
        // This crate has no other random numbers for tests.
        let mut state = 1u64;
        let mut random = |below: u64| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (state >> 33) % below
        };
        for _ in 0..200 {
            let (mut set, mut bits) = (RangeSet::default(), [false; 64]);
            for _ in 0..40 {
                let start = random(64);
                let range = ByteRange::new(start, start + random(65 - start)).unwrap();
                let mut new = Vec::new();
                for gap in set.insert(range) {
                    assert!(!gap.is_empty() && range.covers(gap));
                    new.extend(gap.start()..gap.end());
                }
                let inside = range.start()..range.end();
                let expected: Vec<u64> = inside.filter(|at| !bits[*at as usize]).collect();
                assert_eq!(new, expected);
                bits[range.start() as usize..range.end() as usize].fill(true);
                let edges = (0..64).filter(|at| bits[*at] && (*at == 0 || !bits[*at - 1]));
                assert_eq!(set.len(), edges.count());
            }
        }
    }
}
