//! The root tree, and the trees that are the same in every seed.

use std::collections::BTreeMap;

use burgeon_block::{Error, ErrorKind, Result};

use super::{NodeSource, Take, ensure, nodes::Reader};
use crate::{
    SUBVOLUME,
    format::{FIRST_INODE, GENERATION, Key, NODE_SIZE, kind, object},
    info::TreeRoot,
};

const TREES: [u64; 8] = [
    object::EXTENT_TREE,
    object::DEV_TREE,
    object::FS_TREE,
    object::CSUM_TREE,
    object::UUID_TREE,
    object::FREE_SPACE_TREE,
    SUBVOLUME,
    object::DATA_RELOC_TREE,
];

/// Where the trees are.
pub(super) struct Roots(BTreeMap<u64, (TreeRoot, u64)>);

impl Roots {
    pub(super) fn of(&self, tree: u64) -> Result<TreeRoot> {
        let root = self.0.get(&tree).map(|(root, _)| *root);
        root.ok_or_else(|| Error::new(ErrorKind::NotFound, format!("there is no tree {tree}")))
    }
}

pub(super) fn read(reader: &Reader<impl NodeSource>) -> Result<Roots> {
    let uuids = &reader.info.uuids;
    let mut roots = BTreeMap::new();
    let parts: Vec<Vec<_>> =
        reader.parts(object::ROOT_TREE, reader.info.root, |found: &mut Vec<_>, key, item| {
            if key.kind == kind::ROOT_ITEM {
                let uuid = match key.objectid {
                    object::FS_TREE => uuids.top_level,
                    SUBVOLUME => uuids.subvolume,
                    _ => [0; 16],
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
                let good = (parent, child) == (object::FS_TREE, SUBVOLUME)
                    && (dir, index, name) == (FIRST_INODE, 2, b"tree");
                ensure(good, || "it names no subvolume of the top level".into())?;
                found.push((0, (TreeRoot { address: 0, level: 0 }, 0)));
            }
            Ok(())
        })?;
    let (references, trees): (Vec<_>, Vec<_>) =
        parts.into_iter().flatten().partition(|(tree, _)| *tree == 0);
    ensure(references.len() == 2, || "the subvolume is not named in both directions".into())?;
    roots.extend(trees);
    let complete = roots.keys().copied().eq(TREES);
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
        let parts: Vec<Vec<_>> =
            reader.parts(tree, roots.of(tree)?, |all: &mut Vec<_>, key, item| {
                all.push((key, item.to_vec()));
                Ok(())
            })?;
        Ok(parts.into_iter().flatten().collect())
    };
    let uuids = &reader.info.uuids;
    let mut expected: Vec<_> = [(uuids.top_level, object::FS_TREE), (uuids.subvolume, SUBVOLUME)]
        .map(|(uuid, tree)| {
            let halves = [0, 8].map(|at| {
                let mut half = [0; 8];
                half.copy_from_slice(&uuid[at..at + 8]);
                u64::from_le_bytes(half)
            });
            let key = Key::new(halves[0], kind::UUID_SUBVOL, halves[1]);
            (key, tree.to_le_bytes().to_vec())
        })
        .into();
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
        let subvolume = Key::new(SUBVOLUME, kind::ROOT_ITEM, u64::MAX);
        !entries.contains(&key.kind) || (location == Some(subvolume) && item.ends_with(b"tree"))
    };
    let good = kinds(&top) == [directory, entries].concat() && top.iter().all(names_subvolume);
    ensure(good, || "the top level holds something else than the subvolume".into())
}

impl Roots {
    /// Checks that each tree's size is what its root item says.
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
