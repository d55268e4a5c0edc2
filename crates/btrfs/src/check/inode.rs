//! One inode: its item must agree with its other items.

use burgeon_block::Result;

use super::{Take, ensure};
use crate::format::{
    FILE_TYPE_DIRECTORY, GENERATION, INLINE_MAX, INODE_NODATASUM, SECTOR, file_type,
};

/// The contents of an INODE_ITEM.
#[derive(Clone, Copy)]
pub(super) struct Stated {
    pub(super) mode: u32,
    pub(super) nodatasum: bool,
    size: u64,
    bytes: u64,
    links: u32,
    rdev: u64,
}

impl Stated {
    pub(super) fn read(item: &[u8]) -> Result<Self> {
        let mut take = Take(item);
        let [generation, transaction, size, bytes, _group] = take.u64s()?;
        let [links, _uid, _gid, mode] = [take.u32()?, take.u32()?, take.u32()?, take.u32()?];
        let [rdev, flags, _sequence] = take.u64s()?;
        take.bytes(32)?;
        let good = generation == GENERATION
            && transaction == GENERATION
            && matches!(flags, 0 | INODE_NODATASUM);
        ensure(good, || "it is not an inode of this seed".into())?;
        for _ in 0..4 {
            take.u64()?;
            ensure(take.u32()? < 1_000_000_000, || "a time has too many nanoseconds".into())?;
        }
        take.end()?;
        Ok(Self { mode, nodatasum: flags == INODE_NODATASUM, size, bytes, links, rdev })
    }
}

/// The contents of all items of an inode read so far.
pub(super) struct InodeFacts {
    pub(super) number: u64,
    pub(super) stated: Option<Stated>,
    /// True for the root, which names itself `..`.
    pub(super) is_root: bool,
    /// Number of its names, and the parent of the last.
    pub(super) names: u64,
    pub(super) parent: u64,
    /// Entries of a directory: number, total length of names, first and next index.
    entries: u64,
    entry_bytes: u64,
    indexes: Option<(u64, u64)>,
    inline: Option<u64>,
    /// File extents: total bytes, start of the first, end of the last.
    extent_bytes: u64,
    extents: Option<(u64, u64)>,
}

impl InodeFacts {
    pub(super) fn new(number: u64) -> Self {
        Self {
            number,
            stated: None,
            is_root: false,
            names: 0,
            parent: 0,
            entries: 0,
            entry_bytes: 0,
            indexes: None,
            inline: None,
            extent_bytes: 0,
            extents: None,
        }
    }

    /// Adds an entry of this directory.
    pub(super) fn entry(&mut self, index: u64, name_len: usize) -> Result<()> {
        let (first, next) = self.indexes.unwrap_or((index, index));
        ensure(index == next, || "the entry before is missing".into())?;
        self.indexes = Some((first, index.saturating_add(1)));
        self.entries += 1;
        self.entry_bytes += name_len as u64;
        Ok(())
    }

    /// Adds a file extent; returns its address and length unless it is inline.
    pub(super) fn extent(&mut self, offset: u64, mut take: Take) -> Result<Option<(u64, u64)>> {
        let [generation, ram] = take.u64s()?;
        let coding = take.bytes(4)?;
        let kind = take.u8()?;
        let plain = generation == GENERATION && coding.iter().all(|byte| *byte == 0);
        ensure(plain, || "it is not a plain extent of this seed".into())?;
        if kind == 0 {
            let good = ram == take.0.len() as u64
                && (1..=u64::from(INLINE_MAX)).contains(&ram)
                && (offset, self.inline, self.extents) == (0, None, None);
            ensure(good, || "it cannot be inline".into())?;
            self.inline = Some(ram);
            return Ok(None);
        }
        let [address, disk_len, from, len] = take.u64s()?;
        take.end()?;
        let whole = kind == 1 && (disk_len, from, ram) == (len, 0, len) && len > 0;
        ensure(whole && address != 0, || "it is not a whole extent".into())?;
        let aligned = offset.is_multiple_of(SECTOR) && len.is_multiple_of(SECTOR);
        let end = offset.checked_add(len).filter(|_| aligned && self.inline.is_none());
        let (first, before) = self.extents.unwrap_or((offset, offset));
        let good = end.is_some() && offset >= before;
        ensure(good, || "it overlaps the extent before".into())?;
        self.extents = Some((first, end.unwrap_or(u64::MAX)));
        self.extent_bytes = self.extent_bytes.saturating_add(len);
        Ok(Some((address, len)))
    }

    /// Adds the items of the same inode in later leaves.
    pub(super) fn join(mut self, next: Self) -> Result<Self> {
        let at = self.number;
        self.stated = self.stated.or(next.stated);
        self.is_root |= next.is_root;
        if next.names > 0 {
            self.parent = next.parent;
        }
        self.names += next.names;
        self.entries += next.entries;
        self.entry_bytes += next.entry_bytes;
        self.extent_bytes = self.extent_bytes.saturating_add(next.extent_bytes);
        self.inline = self.inline.or(next.inline);
        if let (Some((_, next_index)), Some((first, _))) = (self.indexes, next.indexes) {
            ensure(first == next_index, || format!("directory {at} lacks an entry"))?;
        }
        if let (Some((_, end)), Some((first, _))) = (self.extents, next.extents) {
            ensure(first >= end, || format!("extents of inode {at} overlap"))?;
        }
        self.indexes = merge(self.indexes, next.indexes);
        self.extents = merge(self.extents, next.extents);
        Ok(self)
    }

    /// Compares all items; the error describes the problem.
    pub(super) fn check(&self) -> Result<Stated, String> {
        let stated = self.stated.ok_or("is not there")?;
        let kind = file_type(stated.mode).filter(|_| stated.mode & !0o177777 == 0);
        let kind = kind.ok_or("has a mode that is none")?;
        let right = |good: bool, what: &str| if good { Ok(()) } else { Err(what.to_string()) };
        let is_directory = kind == FILE_TYPE_DIRECTORY;
        let names = if self.is_root { 1 } else { self.names };
        right(u64::from(stated.links) == names && names > 0, "has a wrong number of links")?;
        right(!is_directory || names == 1, "is a directory with two names")?;
        right(!self.is_root || (is_directory && self.names == 0), "cannot be the root")?;
        right(is_directory || self.indexes.is_none(), "has entries and is not a directory")?;
        let first = self.indexes.map_or(2, |(first, _)| first);
        right(first == 2, "lacks its first entry")?;
        let has_body = self.inline.is_some() || self.extents.is_some();
        right(matches!(kind, 1 | 7) || !has_body, "has content and is not a file")?;
        right(kind == 1 || !stated.nodatasum, "is not a file and has no checksums")?;
        right(
            matches!(kind, 3 | 4) || stated.rdev == 0,
            "has a device number and is not a device",
        )?;
        let bytes = self.inline.unwrap_or(self.extent_bytes);
        right(stated.bytes == bytes, "has a wrong number of bytes")?;
        let size = match (kind, self.inline) {
            (FILE_TYPE_DIRECTORY, _) => stated.size == 2 * self.entry_bytes,
            (7, inline) => inline == Some(stated.size),
            (1, Some(inline)) => inline == stated.size,
            (1, None) => {
                let end = self.extents.map_or(0, |(_, end)| end);
                stated.size <= i64::MAX as u64 && end <= stated.size.next_multiple_of(SECTOR)
            }
            _ => stated.size == 0,
        };
        right(size, "has a wrong size")?;
        Ok(stated)
    }
}

/// The start of `one` and the end of `other`.
fn merge(one: Option<(u64, u64)>, other: Option<(u64, u64)>) -> Option<(u64, u64)> {
    match (one, other) {
        (Some((first, _)), Some((_, end))) => Some((first, end)),
        (one, other) => one.or(other),
    }
}
