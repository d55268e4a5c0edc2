//! Finds the record of an address among millions of records with few memory accesses.
//!
//! ```text
//!   leaps    every 128th of the steps: 40 kB for 100 million records, always cached
//!     └─► steps    the start of the first record of every page: 8 bytes for 170 records
//!           └─► a page of the map: every 16th of its records, then 16 of them
//! ```
//!
//! The cost of a lookup is memory latency, not comparisons: a binary search waits for one cache
//! line after another, and for one page after another. A lookup therefore reads all starts of a
//! stage in any order, so that memory delivers their lines in parallel, and touches only one page
//! of the map.

use std::ops::Range;

use burgeon_block::BLOCK_SIZE;

use super::format::{HEADER_LEN, RECORD_LEN};

/// Steps between two leaps.
const LEAP: usize = 128;
/// Records of a page between two that are read first.
const STRIDE: u64 = 16;
/// Pages scanned near damaged records.
const NEAR_MAX: usize = 4;

/// Starts of records in memory: 8 bytes per page of the map, plus the leaps.
#[derive(Clone, Default)]
pub(super) struct Lookup {
    steps: Vec<u64>,
    leaps: Vec<u64>,
}

/// The first record that begins in page `page` of the map.
fn first_of(page: usize) -> u64 {
    (page as u64 * BLOCK_SIZE).saturating_sub(HEADER_LEN).div_ceil(RECORD_LEN)
}

impl Lookup {
    /// Adds those of the first `records` records that it lacks. `start` returns the start
    /// of a record, or `None` if it is damaged.
    pub(super) fn extend(&mut self, records: u64, start: impl Fn(u64) -> Option<u64>) {
        while first_of(self.steps.len()) < records {
            // An unknown start repeats the previous one, so that other searches stay correct.
            let before = self.steps.last().copied().unwrap_or(0);
            self.steps.push(start(first_of(self.steps.len())).unwrap_or(before));
        }
        self.leaps.extend(self.steps.iter().step_by(LEAP).skip(self.leaps.len()));
    }

    /// The last of `records` records that begins at `block` or before; `None` if none does. Any
    /// record if a nearby one is damaged.
    pub(super) fn count(
        &self,
        block: u64,
        records: u64,
        start: impl Fn(u64) -> u64,
    ) -> Option<u64> {
        let page = self.step(block)?;
        let (first, end) = (first_of(page), first_of(page + 1).min(records));
        let is_before = |record: &u64| start(*record) <= block;
        let strides = (first..end).step_by(STRIDE as usize).filter(is_before).count() as u64;
        let first = first + strides.saturating_sub(1) * STRIDE;
        let rest = (first..end.min(first + STRIDE)).filter(is_before).count() as u64;
        Some(first + rest.saturating_sub(1))
    }

    /// The records that include the last one beginning at `block` or before, unless it is
    /// damaged.
    pub(super) fn near(&self, block: u64, records: u64) -> Range<u64> {
        let last = self.step(block).unwrap_or(0);
        let key = self.steps.get(last).copied().unwrap_or(0);
        // A page whose start is unknown has the start of a previous page.
        let first = self.steps.partition_point(|start| *start < key);
        let first = first.max(last.saturating_sub(NEAR_MAX));
        // Two records may begin at the same block, on both sides of a page border.
        first_of(first.saturating_sub(1))..records.min(first_of(last + 1))
    }

    /// The last page whose first record begins at `block` or before.
    fn step(&self, block: u64) -> Option<usize> {
        let leap = self.leaps.partition_point(|start| *start <= block).checked_sub(1)? * LEAP;
        let steps = &self.steps[leap..self.steps.len().min(leap + LEAP)];
        Some(leap + steps.iter().filter(|start| **start <= block).count().checked_sub(1)?)
    }
}

#[cfg(test)]
mod tests {
    use super::{LEAP, Lookup, first_of};

    /// Starts 3, 3, 13, 13, 23 …: an end and the next extent may begin at the same block.
    fn start(record: u64) -> u64 {
        record / 2 * 10 + 3
    }

    #[test]
    fn a_page_holds_the_records_that_begin_in_it() {
        assert_eq!([0, 1, 2, 3].map(first_of), [0, 168, 339, 510]);
    }

    #[test]
    fn the_last_start_at_or_before_is_found() {
        let page = first_of(1);
        for records in [1, 2, page - 1, page, page + 1, first_of(LEAP), first_of(3 * LEAP) + 5] {
            let mut lookup = Lookup::default();
            // In parts, as a map grows.
            lookup.extend(records / 3, |record| Some(start(record)));
            lookup.extend(records, |record| Some(start(record)));
            for record in (0..records).step_by(97).chain([records - 1]) {
                for block in [start(record), start(record) + 9] {
                    let last = (record | 1).min(records - 1);
                    assert_eq!(lookup.count(block, records, start), Some(last), "{records}");
                    assert!(lookup.near(block, records).contains(&last), "{records}");
                }
            }
            assert_eq!(lookup.count(2, records, start), None);
        }
        assert_eq!(Lookup::default().count(0, 0, |_| 0), None);
        assert!(Lookup::default().near(0, 0).is_empty());
    }

    #[test]
    fn unknown_pages_hide_no_others() {
        let records = first_of(2 * LEAP);
        let unknown = [0, 5, 6, 128, 130].map(first_of);
        let mut lookup = Lookup::default();
        lookup.extend(records, |record| (!unknown.contains(&record)).then(|| start(record)));
        for record in (1..records).step_by(31) {
            let near = lookup.near(start(record), records);
            assert!(near.contains(&(record | 1)), "{record}: {near:?}");
            assert!(near.end - near.start <= first_of(7));
        }
    }
}
