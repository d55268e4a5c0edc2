//! The root tree, and the trees that are the same in every seed.

use std::collections::BTreeMap;

use burgeon_block::{Error, ErrorKind, Result};

use super::{NodeSource, Take, ensure, nodes::Reader};
use crate::{
    SUBVOLUME,
    format::{FIRST_INODE, GENERATION, Key, NODE_SIZE, VIRTUAL_SUBVOLUME, kind, object},
    info::{SeedInfo, TreeRoot},
};

/// The last exists only with a virtual area.
const TREES: [u64; 9] = [
    object::EXTENT_TREE,
    object::DEV_TREE,
    object::FS_TREE,
    object::CSUM_TREE,
    object::UUID_TREE,
    object::FREE_SPACE_TREE,
    SUBVOLUME,
    VIRTUAL_SUBVOLUME,
    object::DATA_RELOC_TREE,
];

/// The required subvolumes: number, index in the top level, name, UUID.
fn subvolumes(info: &SeedInfo) -> Vec<(u64, u64, &'static [u8], [u8; 16])> {
    let mut all = vec![(SUBVOLUME, 2, b"tree".as_slice(), info.uuids.subvolume)];
    let area = (VIRTUAL_SUBVOLUME, 3, b"virtual".as_slice(), info.uuids.virtual_area);
    all.extend(info.virtual_area.map(|_| area));
    all
}

/// The roots of all trees.
pub(super) struct Roots(BTreeMap<u64, (TreeRoot, u64)>);

impl Roots {
    pub(super) fn of(&self, tree: u64) -> Result<TreeRoot> {
        let root = self.0.get(&tree).map(|(root, _)| *root);
        root.ok_or_else(|| Error::new(ErrorKind::NotFound, format!("there is no tree {tree}")))
    }
}

pub(super) fn read(reader: &Reader<impl NodeSource>) -> Result<Roots> {
    let uuids = &reader.info.uuids;
    let subvolumes = subvolumes(reader.info);
    let mut roots = BTreeMap::new();
    let batches: Vec<Vec<_>> =
        reader.batches(object::ROOT_TREE, reader.info.root, |found: &mut Vec<_>, key, item| {
            if key.kind == kind::ROOT_ITEM {
                let uuid = match key.objectid {
                    object::FS_TREE => uuids.top_level,
                    number => {
                        let known = subvolumes.iter().find(|known| known.0 == number);
                        known.map_or([0; 16], |known| known.3)
                    }
                };
                found.push((key.objectid, root_item(item, &uuid)?));
            } else if matches!(key.kind, kind::ROOT_REF | kind::ROOT_BACKREF) {
                let mut take = Take(item);
                let [dir, index] = take.u64s()?;
                let len = usize::from(take.u16()?);
                let name = take.bytes(len)?;
                let (parent, child) = match key.kind {
                    kind::ROOT_REF => (key.objectid, key.offset),
                    _ => (key.offset, key.objectid),
                };
                let known = |known: &(u64, u64, &[u8], _)| {
                    (child, index, name) == (known.0, known.1, known.2)
                };
                let good = subvolumes.iter().any(known);
                ensure(good && (parent, dir) == (object::FS_TREE, FIRST_INODE), || {
                    "it names no subvolume of the top level".into()
                })?;
                found.push((0, (TreeRoot { address: 0, level: 0 }, 0)));
            }
            Ok(())
        })?;
    let (references, trees): (Vec<_>, Vec<_>) =
        batches.into_iter().flatten().partition(|(tree, _)| *tree == 0);
    ensure(references.len() == 2 * subvolumes.len(), || {
        "the subvolume is not named in both directions".into()
    })?;
    roots.extend(trees);
    let without = reader.info.virtual_area.is_none().then_some(VIRTUAL_SUBVOLUME);
    let expected = TREES.into_iter().filter(|tree| Some(*tree) != without);
    let complete = roots.keys().copied().eq(expected);
    ensure(complete, || "the root tree lacks a tree, or has too many".into())?;
    Ok(Roots(roots))
}

fn root_item(item: &[u8], uuid: &[u8; 16]) -> Result<(TreeRoot, u64)> {
    let mut take = Take(item);
    take.bytes(160)?;
    let [generation, dir, address, _limit, bytes, _snapshot, flags] = take.u64s()?;
    let references = take.u32()?;
    take.bytes(17 + 1)?;
    let level = take.u8()?;
    let generation_again = take.u64()?;
    let good = generation == GENERATION
        && generation_again == GENERATION
        && references == 1
        && flags == 0
        && matches!(dir, 0 | FIRST_INODE)
        && level < 8;
    ensure(good, || "it is not a root of this seed".into())?;
    ensure(take.array()? == *uuid, || "the tree has another UUID".into())?;
    take.bytes(439 - 263)?;
    take.end()?;
    Ok((TreeRoot { address, level }, bytes))
}

/// Checks the uuid tree, the top level and the data relocation tree, and the sizes of all trees.
pub(super) fn check_small(reader: &Reader<impl NodeSource>, roots: &Roots) -> Result<()> {
    let all = |tree: u64| -> Result<Vec<(Key, Vec<u8>)>> {
        let batches: Vec<Vec<_>> =
            reader.batches(tree, roots.of(tree)?, |all: &mut Vec<_>, key, item| {
                all.push((key, item.to_vec()));
                Ok(())
            })?;
        Ok(batches.into_iter().flatten().collect())
    };
    let uuids = &reader.info.uuids;
    let subvolumes = subvolumes(reader.info);
    let mut trees = vec![(uuids.top_level, object::FS_TREE)];
    trees.extend(subvolumes.iter().map(|(number, _, _, uuid)| (*uuid, *number)));
    let mut expected: Vec<_> = trees
        .into_iter()
        .map(|(uuid, tree)| {
            let halves = [0, 8].map(|at| {
                let mut half = [0; 8];
                half.copy_from_slice(&uuid[at..at + 8]);
                u64::from_le_bytes(half)
            });
            let key = Key::new(halves[0], kind::UUID_SUBVOL, halves[1]);
            (key, tree.to_le_bytes().to_vec())
        })
        .collect();
    expected.sort();
    let found = all(object::UUID_TREE)?;
    ensure(found == expected, || "the uuid tree is not that of the subvolumes".into())?;

    let directory = [kind::INODE_ITEM, kind::INODE_REF];
    let entries = [kind::DIR_ITEM, kind::DIR_INDEX];
    let kinds = |items: &[(Key, Vec<u8>)]| -> Vec<u8> {
        items.iter().filter(|(key, _)| key.objectid == FIRST_INODE).map(|(k, _)| k.kind).collect()
    };
    let reloc = all(object::DATA_RELOC_TREE)?;
    ensure(kinds(&reloc) == directory, || "the data relocation tree is not empty".into())?;
    let top = all(object::FS_TREE)?;
    let names_subvolume = |(key, item): &(Key, Vec<u8>)| {
        let location = Take(item).key().ok();
        let known = |known: &(u64, u64, &[u8], _)| {
            let index = key.kind == kind::DIR_ITEM || key.offset == known.1;
            let subvolume = Key::new(known.0, kind::ROOT_ITEM, u64::MAX);
            location == Some(subvolume) && item.ends_with(known.2) && index
        };
        !entries.contains(&key.kind) || subvolumes.iter().any(known)
    };
    let entries_of_all = entries.iter().flat_map(|kind| vec![*kind; subvolumes.len()]);
    let expected: Vec<u8> = directory.into_iter().chain(entries_of_all).collect();
    let good = kinds(&top) == expected && top.iter().all(names_subvolume);
    ensure(good, || "the top level holds something else than its subvolumes".into())
}

impl Roots {
    /// Checks that each tree's size matches its root item.
    pub(super) fn check_sizes(&self, nodes: &[(u64, u8, u64)]) -> Result<()> {
        let mut sizes: BTreeMap<u64, u64> = BTreeMap::new();
        for (_, _, owner) in nodes {
            *sizes.entry(*owner).or_default() += NODE_SIZE as u64;
        }
        for (tree, (_, bytes)) in &self.0 {
            let real = sizes.get(tree).copied().unwrap_or(0);
            ensure(real == *bytes, || format!("tree {tree} has {real} bytes, not {bytes}"))?;
        }
        Ok(())
    }
}
