//! The dirty bytes of slow devices, as ranges.

use std::{collections::BTreeMap, ops::Range};

use burgeon_block::BLOCK_SIZE;

use crate::{dirty_version::DirtyVersion, keys::Key};

/// The bytes of a slow device that only the cache has.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Dirty {
    /// Name of the device in the cache.
    pub name: String,
    /// In order, apart from each other, at least one.
    pub ranges: Vec<Range<u64>>,
}

impl Dirty {
    /// Their number.
    pub fn bytes(&self) -> u64 {
        self.ranges.iter().map(|range| range.end - range.start).sum()
    }
}

/// The dirty bytes of known devices, by their numbers.
pub(crate) fn dirty_of(
    known: impl Iterator<Item = (u8, String)>,
    map: &BTreeMap<Key, DirtyVersion>,
) -> Vec<Dirty> {
    let dirty = known.map(|(device, name)| {
        let mut ranges: Vec<Range<u64>> = Vec::new();
        let keys = Key { device, block: 0 }..=Key { device, block: u64::MAX };
        for (key, _) in map.range(keys) {
            let at = key.block * BLOCK_SIZE;
            match ranges.last_mut() {
                Some(last) if last.end == at => last.end += BLOCK_SIZE,
                _ => ranges.push(at..at + BLOCK_SIZE),
            }
        }
        Dirty { name, ranges }
    });
    dirty.filter(|dirty| !dirty.ranges.is_empty()).collect()
}
