//! Cuts the lazy address space into btrfs extents.
//!
//! ```text
//!   file A   |────────────────|
//!   file B          |─────────────────|
//!   extents  |──────|─────────|───────|          a cut at every start and end …
//!            ……|……………|……………|……………|……          … and at chunk borders and a grid
//! ```
//! So every file refers only to whole extents, at offset 0 of each, and shared ranges share
//! extents. Before cutting, adjacent extents of a file are joined if both file offsets and
//! addresses are contiguous.

use burgeon_block::Result;
use rayon::prelude::*;

use crate::{
    format::{SECTOR, data_ref_hash},
    geometry::{DATA_START, DataLayout},
    invalid,
    model::Model,
    tree::{FileExtent, InodeBody},
    {FIRST_INODE, SUBVOLUME},
};

/// One btrfs data extent.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Extent {
    pub(crate) start: u64,
    pub(crate) len: u64,
}

impl Extent {
    pub(crate) fn end(&self) -> u64 {
        self.start + self.len
    }
}

/// Consecutive bytes of a file in consecutive extents.
#[derive(Clone, Copy)]
pub(crate) struct Run {
    pub(crate) file_offset: u64,
    address: u64,
    len: u64,
    /// Its extents: `extent .. extent + extents`.
    pub(crate) extent: u32,
    pub(crate) extents: u32,
}

/// A user of an extent.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Reference {
    pub(crate) inode: u32,
    pub(crate) file_offset: u64,
}

impl Reference {
    pub(crate) fn hash(&self) -> u64 {
        data_ref_hash(SUBVOLUME, FIRST_INODE + u64::from(self.inode), self.file_offset)
    }
}

/// All extents, ascending, with the mapping from files to extents and back.
pub(crate) struct Extents {
    pub(crate) all: Vec<Extent>,
    runs: Vec<Run>,
    run_start: Vec<u32>,
    references: Vec<Reference>,
    reference_start: Vec<u32>,
    /// Ranges with checksums: ascending, not adjacent.
    pub(crate) with_checksums: Vec<Extent>,
}

/// Least metadata for an extent: its own item and one of a file.
const EXTENT_COST: u64 = 78 + 78;

impl Extents {
    pub(crate) fn new(model: &Model, layout: &DataLayout, bytes_max: u64) -> Result<Self> {
        let (runs, run_start) = joined_runs(model, layout)?;
        let mut extents = Self {
            all: Vec::new(),
            runs,
            run_start,
            references: Vec::new(),
            reference_start: Vec::new(),
            with_checksums: Vec::new(),
        };
        extents.cut(layout, bytes_max)?;
        extents.refer(bytes_max)?;
        extents.find_with_checksums(model)?;
        Ok(extents)
    }

    /// The runs of a file, ascending.
    pub(crate) fn runs(&self, inode: usize) -> &[Run] {
        &self.runs[self.run_start[inode] as usize..self.run_start[inode + 1] as usize]
    }

    /// Bytes of a file that lie in extents.
    pub(crate) fn bytes(&self, inode: usize) -> u64 {
        self.runs(inode).iter().map(|run| run.len).sum()
    }

    /// Number of a file's extents.
    pub(crate) fn count(&self, inode: usize) -> u64 {
        self.runs(inode).iter().map(|run| u64::from(run.extents)).sum()
    }

    /// The references to an extent, by inode and offset.
    pub(crate) fn references(&self, extent: usize) -> &[Reference] {
        let range = self.reference_start[extent]..self.reference_start[extent + 1];
        &self.references[range.start as usize..range.end as usize]
    }

    fn cut(&mut self, layout: &DataLayout, bytes_max: u64) -> Result<()> {
        let mut ranges: Vec<(u64, u64)> =
            self.runs.par_iter().map(|run| (run.address, run.address + run.len)).collect();
        let mut cuts: Vec<u64> = Vec::with_capacity(2 * ranges.len());
        cuts.extend(ranges.iter().flat_map(|(start, end)| [*start, *end]));
        rayon::join(|| ranges.par_sort_unstable(), || cuts.par_sort_unstable());
        cuts.dedup();
        let mut cuts = cuts.into_iter().peekable();
        for (start, end) in union(&ranges) {
            let mut at = start;
            while at < end {
                while cuts.next_if(|cut| *cut <= at).is_some() {}
                let grid =
                    DATA_START + (at - DATA_START + 1).next_multiple_of(layout.extent_len_max);
                let to = cuts.peek().map_or(end, |cut| *cut).min(grid);
                self.all.push(Extent { start: at, len: to - at });
                at = to;
            }
            if self.all.len() as u64 * EXTENT_COST > bytes_max {
                return Err(too_many(self.all.len() as u64));
            }
        }
        Ok(())
    }

    /// Finds each run's extents and each extent's references.
    fn refer(&mut self, bytes_max: u64) -> Result<()> {
        let all = &self.all;
        self.runs.par_iter_mut().for_each(|run| {
            let first = all.partition_point(|extent| extent.start < run.address);
            // Most runs are one extent; only longer ones need a second search.
            let end = run.address + run.len;
            let after = match all.get(first) {
                Some(extent) if extent.end() == end => first + 1,
                _ => all.partition_point(|extent| extent.start < end),
            };
            (run.extent, run.extents) = (first as u32, (after - first) as u32);
        });
        let total: u64 = self.runs.iter().map(|run| u64::from(run.extents)).sum();
        if total >= u64::from(u32::MAX) || total.saturating_mul(78) > bytes_max {
            return Err(too_many(total));
        }
        let mut next = vec![0u32; all.len() + 1];
        for run in &self.runs {
            next[run.extent as usize..][..run.extents as usize].iter_mut().for_each(|n| *n += 1);
        }
        let mut sum = 0;
        next.iter_mut().for_each(|n| sum += std::mem::replace(n, sum));
        self.reference_start = next.clone();
        self.references = vec![Reference { inode: 0, file_offset: 0 }; total as usize];
        for inode in 0..self.run_start.len() - 1 {
            for run in
                &self.runs[self.run_start[inode] as usize..self.run_start[inode + 1] as usize]
            {
                let first = run.extent as usize;
                let mut file_offset = run.file_offset;
                for extent in first..first + run.extents as usize {
                    let slot = next[extent] as usize;
                    next[extent] += 1;
                    self.references[slot] = Reference { inode: inode as u32, file_offset };
                    file_offset += all[extent].len;
                }
            }
        }
        Ok(())
    }

    fn find_with_checksums(&mut self, model: &Model) -> Result<()> {
        let mut with_checksums: Vec<Extent> = Vec::new();
        for (index, extent) in self.all.iter().enumerate() {
            let nodatasum = |r: &Reference| model.inode(r.inode as usize).nodatasum;
            let references = self.references(index);
            let without_checksums = references.iter().filter(|r| nodatasum(r)).count();
            if without_checksums == references.len() {
                continue;
            }
            if without_checksums > 0 {
                return Err(invalid(format!(
                    "the blocks at {} belong to a file with checksums and to one without",
                    extent.start
                )));
            }
            match with_checksums.last_mut().filter(|last| last.end() == extent.start) {
                Some(last) => last.len += extent.len,
                None => with_checksums.push(*extent),
            }
        }
        self.with_checksums = with_checksums;
        Ok(())
    }
}

fn too_many(extents: u64) -> burgeon_block::Error {
    invalid(format!("the tree needs {extents} extents or more: too much metadata"))
}

/// The union of `ranges`, which are sorted.
fn union(ranges: &[(u64, u64)]) -> impl Iterator<Item = (u64, u64)> + '_ {
    let mut ranges = ranges.iter().copied().peekable();
    std::iter::from_fn(move || {
        let (start, mut end) = ranges.next()?;
        while let Some((_, next_end)) = ranges.next_if(|(next, _)| *next <= end) {
            end = end.max(next_end);
        }
        Some((start, end))
    })
}

fn joined_runs(model: &Model, layout: &DataLayout) -> Result<(Vec<Run>, Vec<u32>)> {
    let mut runs: Vec<Run> = Vec::with_capacity(model.tree.extents.len());
    let mut run_start = Vec::with_capacity(model.inodes() + 1);
    let mut used = 0;
    for i in 0..model.inodes() {
        let inode = model.inode(i);
        run_start.push(runs.len() as u32);
        let InodeBody::Extents { count, .. } = inode.body else { continue };
        used += count as usize;
        if used > model.tree.extents.len() {
            return Err(invalid(format!("inode {i} has extents that belong to another")));
        }
        let mut file_end = 0;
        for extent in model.tree.extents_of(inode) {
            file_end = check_extent(extent, file_end, inode.size, layout.end)
                .ok_or_else(|| invalid(format!("inode {i}: {extent:?} cannot be")))?;
            let FileExtent { file_offset, address, len } = *extent;
            let mine = runs.len() > run_start[i] as usize;
            match runs.last_mut().filter(|last| {
                mine && last.file_offset + last.len == file_offset
                    && last.address + last.len == address
            }) {
                Some(last) => last.len += len,
                None => runs.push(Run { file_offset, address, len, extent: 0, extents: 0 }),
            }
        }
    }
    run_start.push(runs.len() as u32);
    Ok((runs, run_start))
}

/// End of `extent` in the file; `None` if it breaks a rule.
fn check_extent(extent: &FileExtent, before: u64, size: u64, data_end: u64) -> Option<u64> {
    let whole = |value: u64| value.is_multiple_of(SECTOR);
    let end = extent.file_offset.checked_add(extent.len)?;
    let address_end = extent.address.checked_add(extent.len)?;
    let good = extent.len > 0
        && whole(extent.file_offset)
        && whole(extent.address)
        && whole(extent.len)
        && extent.file_offset >= before
        && end <= size.next_multiple_of(SECTOR)
        && extent.address >= DATA_START
        && address_end <= data_end;
    good.then_some(end)
}
