//! Profiles: the lazy data that programs read first, by image.
//!
//! ```text
//!   record: addresses, in order of first use ──► Profile::of ──► merge with stored one ──► store
//!   mount:  Profile ──► addresses ──► prefetched in that order
//!   build:  Profile of an earlier image of the tree ──► files by path ──► order of packs;
//!           and by path to the addresses of the new image
//! ```
//!
//! A profile is a hint, and anybody with write access to the store controls it. It is therefore
//! bounded and clipped to the image's own lazy data; the worst it can cause is the prefetch of
//! unused data. Invariants: the result of [`Profile::decode`] satisfies the rules in `format.rs`;
//! no block of a file is in it twice. `tests/profile.rs` checks both.

mod format;
mod store;

use std::collections::HashMap;

use burgeon_block::{BLOCK_SIZE, ByteRange, Digest, RangeSet};
use burgeon_btrfs::{FileExtent, Tree};

pub use self::{
    format::PROFILE_MAX,
    store::{list_profiles, load_profile, profile_object, publish_profile, remove_profile},
};
use crate::{Manifest, Paths};

/// Most ranges in a profile: with files of 64 KiB on average, 16 GiB.
pub const READS_MAX: usize = 1 << 18;
/// Number of runs without a read after which a range is dropped.
const AGE_MAX: u8 = 8;

/// The reads of an image by programs, in order of first use.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Profile {
    /// The image: digest of its manifest.
    pub image: Digest,
    /// Number of runs it was recorded in.
    pub runs: u32,
    /// Paths in the image, from `/` on.
    pub files: Vec<Vec<u8>>,
    /// Reads, in prefetch order.
    pub reads: Vec<ProfileRead>,
}

/// Whole blocks of a file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ProfileRead {
    /// Index in [`Profile::files`].
    pub file: u32,
    /// Offset in the file, in bytes.
    pub offset: u64,
    /// Address in the image's lazy address space, in bytes.
    pub address: u64,
    /// Length in bytes.
    pub len: u64,
    /// Runs since it was last read.
    pub age: u8,
}

impl ProfileRead {
    /// Its lazy addresses.
    pub fn addresses(&self) -> ByteRange {
        // Ends were checked when it was decoded or created.
        ByteRange::at(self.address, self.len).unwrap_or_else(|| unreachable!("checked"))
    }

    /// The part of it at `part`, a range of its file that it covers.
    fn part(&self, part: ByteRange) -> Self {
        let address = self.address + (part.start() - self.offset);
        Self { offset: part.start(), address, len: part.len(), ..*self }
    }

    fn in_file(&self) -> ByteRange {
        ByteRange::at(self.offset, self.len).unwrap_or_else(|| unreachable!("checked"))
    }
}

impl Profile {
    /// The profile of one run that read `addresses`, in this order, of the image `manifest` with
    /// digest `image`. Addresses outside the image's lazy data, and ranges after the first
    /// [`READS_MAX`], are left out.
    pub fn of(manifest: &Manifest, image: Digest, addresses: &[ByteRange]) -> Self {
        let paths = Paths::new(&manifest.tree);
        let owners = Owners::of(&manifest.tree);
        let mut making = Making::default();
        for range in addresses {
            for (inode, piece, offset) in owners.pieces(*range) {
                let read = ProfileRead {
                    file: 0,
                    offset,
                    address: piece.start(),
                    len: piece.len(),
                    age: 0,
                };
                making.add(read, || paths.of_inode(inode), inode.into());
            }
        }
        making.finish(image, 1)
    }

    /// Merges two profiles of one image: the reads of `newer`, in its order, then the reads only
    /// in this one, in its order, except those not read for several runs.
    pub fn merge(&self, newer: &Self) -> Self {
        let mut making = Making::default();
        let old = self.reads.iter().map(|read| (self, read, 1));
        let old = old.filter(|(_, read, _)| read.age < AGE_MAX);
        for (profile, read, age) in newer.reads.iter().map(|read| (newer, read, 0)).chain(old) {
            let path = &profile.files[read.file as usize];
            let number = making.number(path);
            making.add(ProfileRead { age: read.age + age, ..*read }, || path.clone(), number);
        }
        making.finish(newer.image, self.runs.saturating_add(newer.runs))
    }

    /// The same files and ranges in another image of the same or a similar tree; those missing
    /// there are left out.
    pub fn translate(&self, manifest: &Manifest, image: Digest) -> Self {
        let found = find(&manifest.tree, &self.files);
        let mut making = Making::default();
        let mut covered: HashMap<u32, RangeSet> = HashMap::new();
        for read in &self.reads {
            let inode = found[read.file as usize];
            let Some(inode) =
                inode.and_then(|at| Some((at, manifest.tree.inodes.get(at as usize)?)))
            else {
                continue;
            };
            let extents = manifest.tree.extents_of(inode.1);
            // Only new parts: any number of reads may cover the same extents.
            let parts = covered.entry(inode.0).or_default().insert(read.in_file());
            for part in parts {
                let end = |extent: &FileExtent| extent.file_offset + extent.len;
                let first = extents.partition_point(|extent| end(extent) <= part.start());
                let extents = extents[first..].iter();
                for extent in extents.take_while(|extent| extent.file_offset < part.end()) {
                    let range = ByteRange::at(extent.file_offset, extent.len);
                    let Some(part) = range.and_then(|range| range.intersect(part)) else {
                        continue;
                    };
                    let address = extent.address + (part.start() - extent.file_offset);
                    let (offset, len) = (part.start(), part.len());
                    let path = || self.files[read.file as usize].clone();
                    let read = ProfileRead { offset, address, len, ..*read };
                    making.add(read, path, inode.0.into());
                }
            }
        }
        making.finish(image, self.runs)
    }

    /// Lazy addresses, in prefetch order.
    pub fn addresses(&self) -> impl Iterator<Item = ByteRange> + '_ {
        self.reads.iter().map(ProfileRead::addresses)
    }

    /// Total bytes of its reads.
    pub fn bytes(&self) -> u64 {
        self.reads.iter().map(|read| read.len).fold(0, u64::saturating_add)
    }
}

/// A profile under construction; knows which blocks of which file it contains.
#[derive(Default)]
struct Making {
    files: Vec<Vec<u8>>,
    reads: Vec<ProfileRead>,
    /// For each file number: index in `files`, and the ranges of the file.
    known: HashMap<u64, (u32, RangeSet)>,
    numbers: HashMap<Vec<u8>, u64>,
}

impl Making {
    /// A number that identifies `path`.
    fn number(&mut self, path: &[u8]) -> u64 {
        if let Some(number) = self.numbers.get(path) {
            return *number;
        }
        let number = self.numbers.len() as u64;
        self.numbers.insert(path.to_owned(), number);
        number
    }

    /// Adds the new parts of `read`, in the file that `number` identifies.
    fn add(&mut self, read: ProfileRead, path: impl FnOnce() -> Vec<u8>, number: u64) {
        let (file, seen) = self.known.entry(number).or_insert_with(|| {
            self.files.push(path());
            (self.files.len() as u32 - 1, RangeSet::default())
        });
        for part in seen.insert(read.in_file()) {
            let next = ProfileRead { file: *file, ..read.part(part) };
            if let Some(last) = self.reads.last_mut()
                && (last.file, last.age) == (next.file, next.age)
                && last.offset + last.len == next.offset
                && last.address + last.len == next.address
                && last.len + next.len <= format::LEN_MAX
            {
                last.len += next.len;
            } else if self.reads.len() < READS_MAX {
                self.reads.push(next);
            }
        }
    }

    fn finish(self, image: Digest, runs: u32) -> Profile {
        Profile { image, runs, files: self.files, reads: self.reads }
    }
}

/// The file of each lazy address: the first in address order if there are several.
struct Owners(Vec<(ByteRange, u32, u64)>);

impl Owners {
    fn of(tree: &Tree) -> Self {
        let mut extents = Vec::new();
        for (number, inode) in (0u32..).zip(&tree.inodes) {
            extents.extend(tree.extents_of(inode).iter().map(|extent| (extent, number)));
        }
        extents.sort_by_key(|(extent, number)| (extent.address, *number, extent.file_offset));
        let mut owners: Vec<(ByteRange, u32, u64)> = Vec::new();
        for (extent, number) in extents {
            let covered = owners.last().map_or(0, |(range, ..)| range.end());
            let skip = covered.saturating_sub(extent.address);
            let Some(rest) = extent.len.checked_sub(skip).filter(|rest| *rest > 0) else {
                continue;
            };
            let range = ByteRange::at(extent.address + skip, rest);
            owners.extend(range.map(|range| (range, number, extent.file_offset + skip)));
        }
        Self(owners)
    }

    /// The parts of `range` that belong to files: inode, addresses, offset in the file.
    fn pieces(&self, range: ByteRange) -> impl Iterator<Item = (u32, ByteRange, u64)> + '_ {
        let range = range.to_blocks();
        let first = self.0.partition_point(|(owner, ..)| owner.end() <= range.start());
        let owners = self.0[first..].iter().take_while(move |(o, ..)| o.start() < range.end());
        owners.filter_map(move |(owner, inode, offset)| {
            let part = owner.intersect(range)?;
            Some((*inode, part, offset + (part.start() - owner.start())))
        })
    }
}

/// The inode of each path that exists.
fn find(tree: &Tree, paths: &[Vec<u8>]) -> Vec<Option<u32>> {
    let names =
        tree.dirents.iter().map(|dirent| ((dirent.parent, tree.bytes(dirent.name)), dirent));
    let names: HashMap<_, u32> = names.map(|(name, dirent)| (name, dirent.inode)).collect();
    let inode_of = |path: &Vec<u8>| {
        let mut parts = path.split(|byte| *byte == b'/').filter(|part| !part.is_empty());
        parts.try_fold(0, |at, part| names.get(&(at, part)).copied())
    };
    paths.iter().map(inode_of).collect()
}

/// Rounds `len` down to whole blocks.
const fn whole_blocks(len: u64) -> u64 {
    len / BLOCK_SIZE * BLOCK_SIZE
}
