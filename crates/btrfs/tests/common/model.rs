//! A tree as plain values, made from a `Tree` or from a seed's items, for comparison.

use std::collections::BTreeMap;

use burgeon_btrfs::{InodeBody, Tree, for_each_item};

use super::{Seed, TEMPLATE, get_u16, get_u32, get_u64};

/// An inode and everything attached to it, in the terms of the subvolume.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(crate) struct ModelEntry {
    pub(crate) mode: u32,
    pub(crate) owner: (u32, u32),
    pub(crate) rdev: u64,
    pub(crate) size: u64,
    pub(crate) bytes: u64,
    pub(crate) links: u32,
    pub(crate) time: (i64, u32),
    pub(crate) nodatasum: bool,
    pub(crate) inline: Vec<u8>,
    /// File offset, address, length; joined where both are contiguous.
    pub(crate) extents: Vec<(u64, u64, u64)>,
    pub(crate) xattrs: BTreeMap<Vec<u8>, Vec<u8>>,
    /// Names and inode numbers, in order.
    pub(crate) entries: Vec<(Vec<u8>, u64)>,
}

impl ModelEntry {
    fn extent(&mut self, offset: u64, address: u64, len: u64) {
        match self.extents.last_mut() {
            Some((o, a, l)) if *o + *l == offset && *a + *l == address => *l += len,
            _ => self.extents.push((offset, address, len)),
        }
    }
}

/// Inodes by number.
pub(crate) type Model = BTreeMap<u64, ModelEntry>;

pub(crate) fn of_tree(tree: &Tree) -> Model {
    let mut model = Model::new();
    for (i, inode) in tree.inodes.iter().enumerate() {
        let mut entry = ModelEntry {
            mode: inode.mode,
            owner: (inode.uid, inode.gid),
            rdev: inode.rdev,
            size: inode.size,
            links: 0,
            time: (inode.mtime_s, inode.mtime_ns),
            nodatasum: inode.nodatasum,
            ..ModelEntry::default()
        };
        if let InodeBody::Inline(span) = inode.body {
            entry.inline = tree.bytes(span).to_vec();
            entry.bytes = inode.size;
        }
        for extent in tree.extents_of(inode) {
            entry.extent(extent.file_offset, extent.address, extent.len);
            entry.bytes += extent.len;
        }
        for xattr in tree.xattrs_of(inode) {
            let (name, value) = (tree.bytes(xattr.name), tree.bytes(xattr.value));
            entry.xattrs.insert(name.to_vec(), value.to_vec());
        }
        model.insert(256 + i as u64, entry);
    }
    for dirent in &tree.dirents {
        let (parent, child) = (256 + u64::from(dirent.parent), 256 + u64::from(dirent.inode));
        let name = tree.bytes(dirent.name).to_vec();
        let directory = model.get_mut(&parent).unwrap();
        directory.size += 2 * name.len() as u64;
        directory.entries.push((name, child));
        model.get_mut(&child).unwrap().links += 1;
    }
    model.get_mut(&256).unwrap().links = 1;
    model
}

pub(crate) fn of_seed(seed: &Seed) -> Model {
    let mut model = Model::new();
    for_each_item(&seed.info, &TEMPLATE, seed, 256, |(number, kind, offset), item| {
        let entry = model.entry(number).or_default();
        let u64_at = |at| get_u64(item, at);
        match kind {
            1 => {
                (entry.size, entry.bytes) = (u64_at(16), u64_at(24));
                entry.links = get_u32(item, 40);
                entry.owner = (get_u32(item, 44), get_u32(item, 48));
                (entry.mode, entry.rdev) = (get_u32(item, 52), u64_at(56));
                entry.nodatasum = u64_at(64) == 1;
                entry.time = (u64_at(112) as i64, get_u32(item, 120));
                for at in [124, 136, 148] {
                    assert_eq!(item[at..at + 12], item[112..124], "all times are one");
                }
            }
            24 => {
                let mut at = 0;
                while at < item.len() {
                    let (value, name) = (get_u16(item, at + 25), get_u16(item, at + 27));
                    let start = at + 30;
                    let middle = start + usize::from(name);
                    at = middle + usize::from(value);
                    let name = item[start..middle].to_vec();
                    assert_eq!(entry.xattrs.insert(name, item[middle..at].to_vec()), None);
                }
            }
            96 => entry.entries.push((item[30..].to_vec(), u64_at(0))),
            108 if item[20] == 0 => entry.inline = item[21..].to_vec(),
            108 => entry.extent(offset, u64_at(21), u64_at(45)),
            _ => {}
        }
        Ok(())
    })
    .unwrap();
    model
}

/// The block checksums a seed holds, by address.
pub(crate) fn checksums(seed: &Seed) -> BTreeMap<u64, Vec<u8>> {
    let mut all = BTreeMap::new();
    for_each_item(&seed.info, &TEMPLATE, seed, 7, |(_, _, address), item| {
        for (index, sum) in item.chunks(seed.info.checksum.size()).enumerate() {
            all.insert(address + index as u64 * 4096, sum.to_vec());
        }
        Ok(())
    })
    .unwrap();
    all
}
