//! The subvolume: names, back references and inodes agree, and everything is reachable from the
//! root.
//!
//! A million names are compared without storing one: each of the three places that record a name
//! sums up hashes of its records, and the sums must be equal.

use std::collections::BTreeSet;

use burgeon_block::{ChecksumKind, Result};
use rayon::prelude::*;

use super::{
    NodeSource, Take, corrupt, ensure,
    inode::{InodeFacts, Stated},
    nodes::Reader,
};
use crate::{
    format::{
        FILE_TYPE_DIRECTORY, FILE_TYPE_XATTR, FIRST_INODE, GENERATION, Key, NAME_MAX, extref_hash,
        file_type, kind, name_hash,
    },
    info::TreeRoot,
};

/// The contents of the subvolume.
#[derive(Default)]
pub(super) struct Files {
    pub(super) inodes: u64,
    pub(super) names: u64,
    /// By address.
    pub(super) uses: Vec<Use>,
    /// Inodes without data checksums.
    pub(super) nodatasum: BTreeSet<u64>,
}

/// The use of an extent by a file of the tree or of the virtual area's subvolume.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) struct Use {
    pub(super) address: u64,
    pub(super) len: u64,
    pub(super) inode: u64,
    pub(super) file_offset: u64,
}

/// Sums of hashes. The two sums of each pair must be equal.
#[derive(Default, Clone, Copy)]
struct Sums {
    /// (parent, index, child, name), by DIR_INDEX and by INODE_REF or INODE_EXTREF.
    by_index: u64,
    by_reference: u64,
    /// (parent, child, type, name), by DIR_INDEX and by DIR_ITEM.
    typed_by_index: u64,
    typed_by_item: u64,
    /// (child, type), by DIR_INDEX and, once per name, by INODE_ITEM.
    types_by_index: u64,
    types_by_inode: u64,
}

/// The contents of one batch of leaves. Its first and last inode may continue in a neighbour.
#[derive(Default)]
struct FileBatch {
    first: Option<InodeFacts>,
    last: Option<InodeFacts>,
    sums: Sums,
    files: Files,
    /// Child and parent of directories.
    parents: Vec<(u64, u64)>,
}

pub(super) fn read(reader: &Reader<impl NodeSource>, tree: u64, root: TreeRoot) -> Result<Files> {
    let batches = reader.batches(tree, root, FileBatch::item)?;
    let mut all = FileBatch::default();
    for batch in batches {
        all.join(batch)?;
    }
    if let Some(last) = all.last.take() {
        all.finish(last)?;
    }
    all.check_sums()?;
    all.parents.sort_unstable();
    check_parents(&all.parents)?;
    let mut files = all.files;
    files.uses.par_sort_unstable();
    Ok(files)
}

impl FileBatch {
    fn item(&mut self, key: Key, item: &[u8]) -> Result<()> {
        if self.last.as_ref().is_none_or(|last| last.number != key.objectid) {
            let done = self.last.replace(InodeFacts::new(key.objectid));
            match (&self.first, done) {
                (_, None) => {}
                // The first inode may have begun in the previous batch.
                (None, done) => self.first = done,
                (Some(_), Some(done)) => self.finish(done)?,
            }
        }
        let Some(facts) = self.last.as_mut() else { return Ok(()) };
        let mut take = Take(item);
        match key.kind {
            kind::INODE_ITEM => {
                ensure(key.offset == 0, || "an inode is at offset 0".into())?;
                facts.stated = Some(Stated::read(item)?);
            }
            kind::INODE_REF => {
                while !take.is_empty() {
                    self.reference(key.objectid, key.offset, &mut take)?;
                }
            }
            kind::INODE_EXTREF => {
                while !take.is_empty() {
                    let parent = take.u64()?;
                    let name = self.reference(key.objectid, parent, &mut take)?;
                    let hash = u64::from(extref_hash(parent, name));
                    ensure(hash == key.offset, || "a name is not where its hash says".into())?;
                }
            }
            kind::XATTR_ITEM => {
                let mut seen = Vec::new();
                while !take.is_empty() {
                    let (location, kind, name, _) = entry(&mut take)?;
                    let good = location == Key::default() && kind == FILE_TYPE_XATTR;
                    ensure(good, || "it is not an extended attribute".into())?;
                    check_hash(&mut seen, name, key.offset)?;
                }
            }
            kind::DIR_ITEM => self.dir_item(key, take)?,
            kind::DIR_INDEX => self.dir_index(key, take)?,
            kind::EXTENT_DATA => {
                if let Some((address, len)) = facts.extent(key.offset, take)? {
                    let (inode, file_offset) = (key.objectid, key.offset);
                    self.files.uses.push(Use { address, len, inode, file_offset });
                }
            }
            _ => return Err(corrupt("it does not belong into a subvolume")),
        }
        Ok(())
    }

    fn reference<'a>(&mut self, child: u64, parent: u64, take: &mut Take<'a>) -> Result<&'a [u8]> {
        let index = take.u64()?;
        let len = usize::from(take.u16()?);
        let name = take.bytes(len)?;
        let Some(facts) = self.last.as_mut() else { return Ok(name) };
        if (child, parent, index, name) == (FIRST_INODE, FIRST_INODE, 0, b"..") {
            facts.is_root = true;
            return Ok(name);
        }
        facts.names += 1;
        facts.parent = parent;
        let sum = &mut self.sums.by_reference;
        *sum = sum.wrapping_add(hash(&[parent, index, child], name));
        Ok(name)
    }

    fn dir_item(&mut self, key: Key, mut take: Take) -> Result<()> {
        let mut seen = Vec::new();
        while !take.is_empty() {
            let (child, kind, name) = child_entry(&mut take)?;
            check_hash(&mut seen, name, key.offset)?;
            let sum = &mut self.sums.typed_by_item;
            *sum = sum.wrapping_add(hash(&[key.objectid, child, u64::from(kind)], name));
        }
        Ok(())
    }

    fn dir_index(&mut self, key: Key, mut take: Take) -> Result<()> {
        let (child, kind, name) = child_entry(&mut take)?;
        take.end()?;
        let sums = &mut self.sums;
        let add = |sum: &mut u64, what| *sum = sum.wrapping_add(what);
        add(&mut sums.by_index, hash(&[key.objectid, key.offset, child], name));
        add(&mut sums.typed_by_index, hash(&[key.objectid, child, u64::from(kind)], name));
        add(&mut sums.types_by_index, hash(&[child, u64::from(kind)], b""));
        self.files.names += 1;
        match self.last.as_mut() {
            Some(facts) => facts.entry(key.offset, name.len()),
            None => Ok(()),
        }
    }

    /// Adds the next batch.
    fn join(&mut self, next: FileBatch) -> Result<()> {
        let Sums { by_index, by_reference, typed_by_index, typed_by_item, .. } = next.sums;
        let sums = &mut self.sums;
        for (sum, more) in [
            (&mut sums.by_index, by_index),
            (&mut sums.by_reference, by_reference),
            (&mut sums.typed_by_index, typed_by_index),
            (&mut sums.typed_by_item, typed_by_item),
            (&mut sums.types_by_index, next.sums.types_by_index),
            (&mut sums.types_by_inode, next.sums.types_by_inode),
        ] {
            *sum = sum.wrapping_add(more);
        }
        self.files.inodes += next.files.inodes;
        self.files.names += next.files.names;
        self.files.uses.extend(next.files.uses);
        self.files.nodatasum.extend(next.files.nodatasum);
        self.parents.extend(next.parents);
        for facts in [next.first, next.last].into_iter().flatten() {
            match self.last.take() {
                Some(mine) if mine.number == facts.number => self.last = Some(mine.join(facts)?),
                Some(mine) => {
                    self.finish(mine)?;
                    self.last = Some(facts);
                }
                None => self.last = Some(facts),
            }
        }
        Ok(())
    }

    /// Adds an inode whose items are complete.
    fn finish(&mut self, facts: InodeFacts) -> Result<()> {
        let number = facts.number;
        let stated = facts.check().map_err(|why| corrupt(format!("inode {number} {why}")))?;
        let kind = file_type(stated.mode).unwrap_or(0);
        let types = hash(&[number, u64::from(kind)], b"").wrapping_mul(facts.names);
        self.sums.types_by_inode = self.sums.types_by_inode.wrapping_add(types);
        if kind == FILE_TYPE_DIRECTORY && !facts.is_root {
            self.parents.push((number, facts.parent));
        }
        if stated.nodatasum {
            self.files.nodatasum.insert(number);
        }
        self.files.inodes += 1;
        Ok(())
    }

    fn check_sums(&self) -> Result<()> {
        let sums = &self.sums;
        ensure(sums.by_index == sums.by_reference, || {
            "directories and back references disagree on names".into()
        })?;
        ensure(sums.typed_by_index == sums.typed_by_item, || {
            "directories disagree with themselves on names".into()
        })?;
        ensure(sums.types_by_index == sums.types_by_inode, || {
            "directories and inodes disagree on types".into()
        })
    }
}

/// A hash of a name and its numbers.
fn hash(numbers: &[u64], name: &[u8]) -> u64 {
    let mut bytes = [0; 3 * 8 + NAME_MAX];
    let mut at = 0;
    for number in numbers {
        bytes[at..at + 8].copy_from_slice(&number.to_le_bytes());
        at += 8;
    }
    // Names were checked to be short; longer ones need not be distinguished.
    let len = name.len().min(NAME_MAX);
    bytes[at..at + len].copy_from_slice(&name[..len]);
    ChecksumKind::Xxhash64.of(&bytes[..at + len])
}

/// A directory entry or extended attribute: location, type, name, value.
fn entry<'a>(take: &mut Take<'a>) -> Result<(Key, u8, &'a [u8], &'a [u8])> {
    let (location, generation) = (take.key()?, take.u64()?);
    let (data, len, kind) = (usize::from(take.u16()?), usize::from(take.u16()?), take.u8()?);
    ensure(generation == GENERATION, || "it is of another generation".into())?;
    Ok((location, kind, take.bytes(len)?, take.bytes(data)?))
}

/// A directory entry of an inode: its number, type and name.
fn child_entry<'a>(take: &mut Take<'a>) -> Result<(u64, u8, &'a [u8])> {
    let (location, kind, name, value) = entry(take)?;
    let good = value.is_empty() && (location.kind, location.offset) == (kind::INODE_ITEM, 0);
    ensure(good, || "it names no inode".into())?;
    let bad_byte = name.iter().any(|byte| matches!(byte, 0 | b'/'));
    let good = (1..=NAME_MAX).contains(&name.len()) && !bad_byte && !matches!(name, b"." | b"..");
    ensure(good, || format!("\"{}\" is not a file name", name.escape_ascii()))?;
    Ok((location.objectid, kind, name))
}

/// Checks that the hash of a name matches its key, and that the name is not in `seen`, which
/// holds the names of that hash.
fn check_hash<'a>(seen: &mut Vec<&'a [u8]>, name: &'a [u8], offset: u64) -> Result<()> {
    let right = u64::from(name_hash(name)) == offset;
    ensure(right, || "a name is not where its hash says".into())?;
    ensure(!seen.contains(&name), || format!("\"{}\" is there twice", name.escape_ascii()))?;
    seen.push(name);
    Ok(())
}

/// Checks that every directory's chain of parents ends at the root. `parents` holds child and
/// parent, by child.
fn check_parents(parents: &[(u64, u64)]) -> Result<()> {
    let find = |number: u64| {
        let index = parents.binary_search_by_key(&number, |(child, _)| *child);
        index.map_err(|_| corrupt(format!("{number} is not a directory")))
    };
    let mut reached = vec![false; parents.len()];
    let mut way = Vec::new();
    for start in 0..parents.len() {
        let mut at = start;
        while !reached[at] {
            // Marked in advance: a cycle ends here, not at the root.
            reached[at] = true;
            way.push(at);
            let up = parents[at].1;
            if up == FIRST_INODE {
                way.clear();
                break;
            }
            at = find(up)?;
        }
        ensure(!way.contains(&at), || format!("directory {} is inside itself", parents[at].0))?;
        way.clear();
    }
    Ok(())
}
