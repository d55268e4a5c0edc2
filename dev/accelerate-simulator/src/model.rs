//! The contents that each sector of a slow device may have.

use std::collections::BTreeSet;

use super::disk::SECTOR;

/// A version of a sector: 0 are zeros, all others are written once.
pub(crate) type Version = u64;

/// The bytes of a version of a sector.
pub(crate) fn bytes_of(sector: usize, version: Version) -> [u8; SECTOR] {
    let mut bytes = [0; SECTOR];
    if version > 0 {
        for (at, word) in bytes.chunks_exact_mut(8).enumerate() {
            let value = version << 20 ^ (sector as u64) << 6 ^ at as u64;
            word.copy_from_slice(&value.to_le_bytes());
        }
    }
    bytes
}

/// The versions that a sector may have.
#[derive(Clone, Default)]
struct Sector {
    /// Versions that a read may return now.
    now: BTreeSet<Version>,
    /// Versions that may be there after a power failure.
    durable: BTreeSet<Version>,
}

/// One slow device, as its user knows it.
pub(crate) struct Model {
    sectors: Vec<Sector>,
    /// The sectors whose two sets may differ.
    volatile: BTreeSet<usize>,
}

impl Model {
    pub(crate) fn new(sectors: usize) -> Self {
        let zero = || BTreeSet::from([0]);
        let sectors = (0..sectors).map(|_| Sector { now: zero(), durable: zero() }).collect();
        Self { sectors, volatile: BTreeSet::new() }
    }

    pub(crate) fn sectors(&self) -> usize {
        self.sectors.len()
    }

    /// A write of `version` returned: without an error if `done`.
    pub(crate) fn written(&mut self, sector: usize, version: Version, done: bool) {
        let Sector { now, durable } = &mut self.sectors[sector];
        if done {
            now.clear();
        }
        now.insert(version);
        durable.insert(version);
        self.volatile.insert(sector);
    }

    /// A discard returned.
    pub(crate) fn discarded(&mut self, sector: usize) {
        self.written(sector, 0, false);
    }

    /// A flush returned without an error.
    pub(crate) fn flushed(&mut self) {
        for sector in std::mem::take(&mut self.volatile) {
            let Sector { now, durable } = &mut self.sectors[sector];
            durable.clone_from(now);
        }
    }

    /// Another program has written, durably.
    pub(crate) fn overwritten(&mut self, sector: usize, version: Version) {
        let only = BTreeSet::from([version]);
        self.sectors[sector] = Sector { now: only.clone(), durable: only };
    }

    /// The power has failed.
    pub(crate) fn lost_power(&mut self) {
        for sector in std::mem::take(&mut self.volatile) {
            let Sector { now, durable } = &mut self.sectors[sector];
            now.clone_from(durable);
        }
    }

    /// The device returned `bytes`; from now on it has to return them again.
    pub(crate) fn read(&mut self, sector: usize, bytes: &[u8]) -> Result<(), String> {
        let version = self.check(sector, bytes)?;
        if self.sectors[sector].now.len() > 1 {
            self.sectors[sector].now = BTreeSet::from([version]);
            self.volatile.insert(sector);
        }
        Ok(())
    }

    /// `bytes` are one of the allowed versions.
    pub(crate) fn check(&self, sector: usize, bytes: &[u8]) -> Result<Version, String> {
        let now = &self.sectors[sector].now;
        let fits = |version: &&Version| bytes == bytes_of(sector, **version);
        let found = now.iter().find(fits).copied();
        found.ok_or_else(|| {
            let first = bytes.first_chunk().map_or(0, |word| u64::from_le_bytes(*word));
            let version = (first ^ (sector as u64) << 6) >> 20;
            format!("sector {sector} holds version {version}, instead of one of {now:?}")
        })
    }
}
