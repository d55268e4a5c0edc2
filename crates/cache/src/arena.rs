//! Arenas: sparse files in which a chunk gets the next place when it is admitted. No place is given
//! twice, and no name is used again, so a record that is older than its arena finds no other
//! chunk's bytes.
//!
//! ```text
//!   arena-0000002a   ▓▓▓▓▓▓▓▓░░░░▓▓▓▓▓▓░░▓▓▓▓|          ▓ living   ░ punched   | the next place
//! ```
//!
//! An arena without living chunks is retired: its file is emptied and removed. Its descriptor
//! stays, because readers without a lock may hold it, and serves a later arena under a new name;
//! the generation in a place keeps old places stale.

use std::sync::{
    OnceLock,
    atomic::{AtomicU32, AtomicU64, Ordering::Relaxed},
};

use crate::disk::DiskFile;

/// Most arenas at once, and so most descriptors.
pub(crate) const ARENAS_MAX: usize = 1024;
/// Retired arenas that wait before their files are used again.
const RETIRED: usize = 8;

pub(crate) struct Arena {
    pub(crate) file: Box<dyn DiskFile>,
    /// Its reads wait for a disk.
    pub(crate) waits: bool,
    /// The number in its name; 0 while it is retired.
    pub(crate) id: AtomicU32,
    /// Bytes of the places that were given, and not yet freed.
    pub(crate) live: AtomicU64,
    /// Bytes of lent chunks among them.
    pub(crate) lent: AtomicU64,
    /// Bytes of address space: up to the next place.
    pub(crate) len: AtomicU64,
    /// The order in which arenas were retired; 0 before, and while the file is still emptied.
    pub(crate) retired: AtomicU64,
}

impl Arena {
    pub(crate) fn new(file: Box<dyn DiskFile>, id: u32, len: u64) -> Self {
        let waits = file.waiting_fd().is_some();
        let [live, lent, retired] = [const { AtomicU64::new(0) }; 3];
        Self { file, waits, id: id.into(), live, lent, len: len.into(), retired }
    }

    pub(crate) fn id(&self) -> u32 {
        self.id.load(Relaxed)
    }
}

/// The table of arenas: it only grows, so that readers need no lock.
pub(crate) struct Arenas {
    table: Box<[OnceLock<Arena>]>,
    count: AtomicU32,
}

impl Default for Arenas {
    fn default() -> Self {
        let table = (0..ARENAS_MAX + RETIRED + 1).map(|_| OnceLock::new()).collect();
        Self { table, count: AtomicU32::new(0) }
    }
}

impl Arenas {
    #[inline]
    pub(crate) fn get(&self, index: u32) -> Option<&Arena> {
        self.table.get(index as usize)?.get()
    }

    /// Adds an arena; only one thread does so at a time. `None` if the table is full.
    pub(crate) fn push(&self, arena: Arena) -> Option<u32> {
        let index = self.count.load(Relaxed);
        self.table.get(index as usize)?.set(arena).ok()?;
        self.count.store(index + 1, Relaxed);
        Some(index)
    }

    /// All arenas that are not retired, with their indices.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (u32, &Arena)> {
        let all = (0..self.count.load(Relaxed)).filter_map(|n| Some((n, self.get(n)?)));
        all.filter(|(_, arena)| arena.id() != 0)
    }

    /// The retired arena that is to be used again, once enough wait.
    pub(crate) fn oldest_retired(&self) -> Option<(u32, &Arena)> {
        let all = (0..self.count.load(Relaxed)).filter_map(|n| Some((n, self.get(n)?)));
        let order = |arena: &Arena| arena.retired.load(Relaxed);
        let retired: Vec<_> =
            all.filter(|(_, arena)| arena.id() == 0 && order(arena) != 0).collect();
        let is_enough = retired.len() > RETIRED;
        retired.into_iter().filter(|_| is_enough).min_by_key(|(_, arena)| order(arena))
    }

    /// Bytes of address space of all arenas.
    pub(crate) fn address_space(&self) -> u64 {
        self.iter().map(|(_, arena)| arena.len.load(Relaxed)).sum()
    }

    /// The same without arenas that hold lent chunks: those stay as long as there may be more.
    pub(crate) fn counted_address_space(&self) -> u64 {
        let counted = self.iter().filter(|(_, arena)| arena.lent.load(Relaxed) == 0);
        counted.map(|(_, arena)| arena.len.load(Relaxed)).sum()
    }
}

/// The name of the file of a retired arena that waits for its next name.
pub(crate) fn spare(index: u32) -> String {
    format!("spare-{index:08x}")
}

/// The name of the file of the arena with this number.
pub fn name(id: u32) -> String {
    format!("arena-{id:08x}")
}

/// The number in an arena's name.
pub(crate) fn id_of(name: &str) -> Option<u32> {
    let digits = name.strip_prefix("arena-").filter(|digits| digits.len() == 8)?;
    u32::from_str_radix(digits, 16).ok().filter(|id| *id != 0)
}
