//! Space: extents and their users, block groups, free space, checksums.

use burgeon_block::{ByteRange, Result};
use rayon::prelude::*;

use super::{
    NodeSource, Take,
    chunks::Chunk,
    corrupt, ensure,
    files::{Files, Use},
    nodes::Reader,
    roots::Roots,
};
use crate::{
    DATA_START, SUBVOLUME,
    format::{
        GENERATION, Key, NODE_SIZE, SECTOR, VIRTUAL_SUBVOLUME, data_ref_hash, group, kind, object,
    },
    info::SeedInfo,
};

const FLAG_DATA: u64 = 1;
const FLAG_TREE_BLOCK: u64 = 2;

/// A range of the lazy address space, in bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Range {
    pub(super) start: u64,
    pub(super) len: u64,
}

impl Range {
    fn end(&self) -> u64 {
        self.start.saturating_add(self.len)
    }
}

/// The contents of the extent tree and related trees.
pub(super) struct Space {
    pub(super) extents: Vec<Range>,
    uses: Vec<Use>,
    /// Number of uses, which are sorted, in lazy data; the remaining ones are in the virtual
    /// area.
    lazy_uses: usize,
    nodes: Vec<(u64, u8, u64)>,
    with_checksums: Vec<Range>,
}

/// A block group: start, length, used bytes, flags.
type Group = (u64, u64, u64, u64);

#[derive(Default)]
struct SpaceBatch {
    extents: Vec<Range>,
    /// Number of uses that each extent claims.
    claims: Vec<u64>,
    uses: Vec<Use>,
    /// Addresses used by the virtual area's subvolume.
    virtual_uses: Vec<u64>,
    nodes: Vec<(u64, u8, u64)>,
    groups: Vec<Group>,
}

impl SpaceBatch {
    fn item(&mut self, key: Key, item: &[u8]) -> Result<()> {
        let mut take = Take(item);
        match key.kind {
            kind::METADATA_ITEM => {
                let good = take.u64s()? == [1, GENERATION, FLAG_TREE_BLOCK]
                    && take.u8()? == kind::TREE_BLOCK_REF;
                ensure(good, || "it is not a node of this seed".into())?;
                self.nodes.push((key.objectid, key.offset as u8, take.u64()?));
                take.end()
            }
            kind::EXTENT_ITEM => self.extent(key, take),
            kind::EXTENT_DATA_REF => {
                // The extent may be in another batch: the length is filled in later.
                let hash = self.reference(&mut take, key.objectid, 0)?;
                ensure(hash <= key.offset, || "it is not where its hash says".into())?;
                take.end()
            }
            kind::BLOCK_GROUP_ITEM => {
                let [used, object, flags] = take.u64s()?;
                ensure(object == object::FIRST_CHUNK_TREE, || "it is of another tree".into())?;
                self.groups.push((key.objectid, key.offset, used, flags));
                take.end()
            }
            _ => Err(corrupt("it does not belong into an extent tree")),
        }
    }

    fn extent(&mut self, key: Key, mut take: Take) -> Result<()> {
        let [claims, generation, flags] = take.u64s()?;
        let good = generation == GENERATION && flags == FLAG_DATA;
        ensure(good, || "it is not a data extent of this seed".into())?;
        let mut last = u64::MAX;
        while !take.is_empty() {
            let inline = take.u8()? == kind::EXTENT_DATA_REF;
            ensure(inline, || "it is used by something else than a file".into())?;
            let hash = self.reference(&mut take, key.objectid, key.offset)?;
            ensure(hash <= last, || "its uses are out of order".into())?;
            last = hash;
        }
        self.extents.push(Range { start: key.objectid, len: key.offset });
        self.claims.push(claims);
        Ok(())
    }

    fn reference(&mut self, take: &mut Take, address: u64, len: u64) -> Result<u64> {
        let [root, inode, file_offset] = take.u64s()?;
        if root == VIRTUAL_SUBVOLUME {
            self.virtual_uses.push(address);
        }
        let once = matches!(root, SUBVOLUME | VIRTUAL_SUBVOLUME) && take.u32()? == 1;
        ensure(once, || "a file uses it in a way that is not ours".into())?;
        self.uses.push(Use { address, len, inode, file_offset });
        Ok(data_ref_hash(root, inode, file_offset))
    }
}

pub(super) fn read(
    reader: &Reader<impl NodeSource>,
    roots: &Roots,
    chunks: &[Chunk],
) -> Result<Space> {
    let root = roots.of(object::EXTENT_TREE)?;
    let batches = reader.batches(object::EXTENT_TREE, root, SpaceBatch::item)?;
    let mut all = SpaceBatch::default();
    for mut batch in batches {
        all.extents.append(&mut batch.extents);
        all.claims.append(&mut batch.claims);
        all.uses.append(&mut batch.uses);
        all.virtual_uses.append(&mut batch.virtual_uses);
        all.nodes.append(&mut batch.nodes);
        all.groups.append(&mut batch.groups);
    }
    check_extents(&all.extents, chunks, reader.info)?;
    all.uses.par_sort_unstable();
    fill_lengths(&all.extents, &all.claims, &mut all.uses)?;
    check_groups(&all, chunks, reader.info)?;
    check_free_space(reader, roots, chunks, &all.extents)?;
    let area_start = reader.info.virtual_area.map_or(u64::MAX, ByteRange::start);
    let lazy_uses = all.uses.partition_point(|one| one.address < area_start);
    // Each side of the border is used by its own subvolume alone.
    let right = all.virtual_uses.len() == all.uses.len() - lazy_uses
        && all.virtual_uses.iter().all(|address| *address >= area_start);
    ensure(right, || "an extent is used by the other subvolume".into())?;
    let with_checksums = read_checksums(reader, roots)?;
    Ok(Space { extents: all.extents, uses: all.uses, lazy_uses, nodes: all.nodes, with_checksums })
}

/// Lazy extents lie in lazy data, each inside one data chunk, and none overlaps another.
fn check_extents(extents: &[Range], chunks: &[Chunk], info: &SeedInfo) -> Result<()> {
    let mut before = DATA_START;
    let mut chunks = chunks.iter().filter(|chunk| chunk.flags == group::DATA).peekable();
    for extent in extents {
        let Range { start, len } = *extent;
        let whole = start.is_multiple_of(SECTOR) && len > 0 && len.is_multiple_of(SECTOR);
        let inside = |range: ByteRange| {
            let area = info.virtual_area.is_some_and(|area| area.covers(range));
            whole && (range.end() <= info.data_end || area)
        };
        let end = ByteRange::at(start, len).filter(|range| inside(*range)).map(ByteRange::end);
        let end = end.ok_or_else(|| corrupt(format!("the extent at {start} leaves the data")))?;
        ensure(start >= before, || format!("the extent at {start} overlaps the one before"))?;
        before = end;
        while chunks.next_if(|chunk| chunk.end() <= start).is_some() {}
        let inside = chunks.peek().is_some_and(|chunk| chunk.start <= start && end <= chunk.end());
        ensure(inside, || format!("the extent at {start} is not in one chunk"))?;
    }
    Ok(())
}

/// Fills in the lengths of uses that were listed apart from their extent, and counts the uses.
fn fill_lengths(extents: &[Range], claims: &[u64], uses: &mut [Use]) -> Result<()> {
    let mut at = 0;
    for (extent, claims) in extents.iter().zip(claims) {
        let first = at;
        while let Some(found) = uses.get_mut(at).filter(|found| found.address == extent.start) {
            found.len = extent.len;
            at += 1;
        }
        uses[first..at].sort_unstable();
        let count = (at - first) as u64;
        ensure(count == *claims, || {
            format!("the extent at {} has {count} uses, not {claims}", extent.start)
        })?;
    }
    ensure(at == uses.len(), || "an extent is used but not there".into())
}

fn check_groups(all: &SpaceBatch, chunks: &[Chunk], info: &SeedInfo) -> Result<()> {
    let node = NODE_SIZE as u64;
    let mut extents = all.extents.iter().peekable();
    let mut nodes = all.nodes.iter().peekable();
    let mut groups = all.groups.iter();
    let mut total = 0;
    for chunk in chunks {
        let mut used = 0;
        while let Some(extent) = extents.next_if(|extent| extent.start < chunk.end()) {
            used += extent.len;
        }
        while nodes.next_if(|(address, ..)| *address < chunk.end()).is_some() {
            used += node;
        }
        let group = groups.next().copied();
        let expected = (chunk.start, chunk.len, used, chunk.flags);
        ensure(group == Some(expected), || format!("{group:?} should be {expected:?}"))?;
        total += used;
    }
    ensure(groups.next().is_none(), || "there is a block group without a chunk".into())?;
    ensure(total == info.bytes_used, || format!("{total} bytes are used in all"))
}

fn check_free_space(
    reader: &Reader<impl NodeSource>,
    roots: &Roots,
    chunks: &[Chunk],
    extents: &[Range],
) -> Result<()> {
    let root = roots.of(object::FREE_SPACE_TREE)?;
    let batches: Vec<Vec<_>> =
        reader.batches(object::FREE_SPACE_TREE, root, |found: &mut Vec<_>, key, item| {
            let info = match key.kind {
                kind::FREE_SPACE_INFO => {
                    let mut take = Take(item);
                    let (count, flags) = (take.u32()?, take.u32()?);
                    ensure(flags == 0, || "it is kept as bitmaps".into())?;
                    take.end()?;
                    Some(count)
                }
                _ => {
                    let good = key.kind == kind::FREE_SPACE_EXTENT && item.is_empty();
                    ensure(good, || "it does not belong into a free space tree".into())?;
                    None
                }
            };
            found.push((key.objectid, key.offset, info));
            Ok(())
        })?;
    let mut found = batches.into_iter().flatten();
    let wrong = || corrupt("the free space tree is not what the extents leave");
    let mut extents = extents.iter().peekable();
    for chunk in chunks {
        let mut used: Vec<Range> = Vec::new();
        match chunk.flags {
            group::SYSTEM => used.push(Range { start: chunk.start, len: reader.info.system_used }),
            group::METADATA => {
                used.push(Range { start: chunk.start, len: reader.info.metadata_used });
            }
            _ => used.extend(std::iter::from_fn(|| {
                extents.next_if(|extent| extent.start < chunk.end()).copied()
            })),
        }
        let mut free = Vec::new();
        let mut at = chunk.start;
        used.push(Range { start: chunk.end(), len: 0 });
        for range in used {
            if at < range.start {
                free.push((at, range.start - at, None));
            }
            at = range.end();
        }
        let info = (chunk.start, chunk.len, Some(free.len() as u32));
        for expected in std::iter::once(info).chain(free) {
            if found.next() != Some(expected) {
                return Err(wrong());
            }
        }
    }
    if found.next().is_some() { Err(wrong()) } else { Ok(()) }
}

/// The ranges that have checksums: ascending, adjacent ones joined.
fn read_checksums(reader: &Reader<impl NodeSource>, roots: &Roots) -> Result<Vec<Range>> {
    let size = reader.info.checksum.size();
    let root = roots.of(object::CSUM_TREE)?;
    let batches: Vec<Vec<Range>> =
        reader.batches(object::CSUM_TREE, root, |ranges: &mut Vec<Range>, key, item| {
            let whole = (key.objectid, key.kind) == (object::EXTENT_CSUM, kind::EXTENT_CSUM)
                && key.offset.is_multiple_of(SECTOR)
                && !item.is_empty()
                && item.len().is_multiple_of(size);
            ensure(whole, || "it holds no whole checksums".into())?;
            let len = (item.len() / size) as u64 * SECTOR;
            append(ranges, Range { start: key.offset, len })
        })?;
    let mut all = Vec::new();
    batches.into_iter().flatten().try_for_each(|range| append(&mut all, range))?;
    Ok(all)
}

fn append(ranges: &mut Vec<Range>, range: Range) -> Result<()> {
    match ranges.last_mut() {
        Some(last) if last.end() == range.start => last.len += range.len,
        Some(last) if last.end() > range.start => {
            return Err(corrupt(format!("the blocks at {} have two checksums", range.start)));
        }
        _ => ranges.push(range),
    }
    Ok(())
}

impl Space {
    /// Checks that files use exactly the extents that claim so, and have checksums exactly where
    /// they require them.
    pub(super) fn check_files(&self, files: &Files) -> Result<()> {
        let lazy = &self.uses[..self.lazy_uses];
        if lazy.len() != files.uses.len() {
            return Err(corrupt("files and extents disagree on how often extents are used"));
        }
        let differs = lazy.iter().zip(&files.uses).find(|(ours, theirs)| ours != theirs);
        if let Some((ours, theirs)) = differs {
            return Err(corrupt(format!(
                "extents and files disagree: {ours:?} in the extent tree, {theirs:?} in a file"
            )));
        }
        let mut with_checksums: Vec<Range> = Vec::new();
        for same in lazy.chunk_by(|a, b| a.address == b.address) {
            let without = same.iter().filter(|one| files.nodatasum.contains(&one.inode)).count();
            ensure(without == 0 || without == same.len(), || {
                format!("the extent at {} is both with and without checksums", same[0].address)
            })?;
            if without == 0 {
                append(&mut with_checksums, Range { start: same[0].address, len: same[0].len })?;
            }
        }
        ensure(with_checksums == self.with_checksums, || {
            "the blocks with checksums are not those of files with checksums".into()
        })
    }

    /// Checks that the virtual area is one file without checksums, each byte at its address.
    pub(super) fn check_virtual_area(&self, info: &SeedInfo, files: &Files) -> Result<()> {
        let uses = &self.uses[self.lazy_uses..];
        let mut end = info.virtual_area.map_or(0, ByteRange::start);
        let start = end;
        for (ours, theirs) in uses.iter().zip(&files.uses) {
            let straight = ours.address == end && ours.file_offset == ours.address - start;
            ensure(ours == theirs && straight && files.nodatasum.contains(&ours.inode), || {
                format!("the virtual area at {end} is {ours:?}, in its file {theirs:?}")
            })?;
            end += ours.len;
        }
        let good = uses.len() == files.uses.len()
            && end == info.virtual_area.map_or(0, ByteRange::end)
            && files.nodatasum.len() == usize::from(info.virtual_area.is_some());
        ensure(good, || "the virtual area is not one file".into())
    }

    /// Checks that each node is visited once from a root, and that the metadata items list each
    /// node, in address order and without a gap.
    pub(super) fn check_nodes(&self, visited: &[(u64, u8, u64)]) -> Result<()> {
        ensure(visited == self.nodes, || {
            "the nodes reached from the roots are not those in the extent tree".into()
        })
    }
}
