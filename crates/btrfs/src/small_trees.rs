//! The trees with few items: chunks, devices, roots, free space, uuids, the private top level
//! and the (empty) data relocation tree.

use crate::{
    SUBVOLUME,
    extents::Extents,
    format::{
        DEV_ITEM_LEN, DIR_ENTRY, FILE_TYPE_DIRECTORY, FIRST_INODE, GENERATION, INODE_ITEM_LEN,
        INODE_REF_HEAD, InodeFields, Key, NODE_SIZE, Put, SECTOR, VIRTUAL_SUBVOLUME, kind,
        name_hash, object, put_dir_entry,
    },
    geometry::{Chunk, DevItem, Uuids},
    info::TreeRoot,
    nodes::{ItemList, ItemOut},
};

/// The subvolumes and their names in the private top level, in the order of its entries.
const NAMES: [(u64, &[u8]); 2] = [(SUBVOLUME, b"tree"), (VIRTUAL_SUBVOLUME, b"virtual")];
/// The index of a directory's first entry.
const FIRST_INDEX: u64 = 2;
const STRIPE_LEN: u64 = 65536;
const CHUNK_ITEM_LEN: usize = 80;
/// A subvolume that can be named, as opposed to one being deleted.
const INODE_ROOT_ITEM_INIT: u64 = 1 << 31;

/// Number, name and index of each subvolume of the top level.
fn subvolumes(with_virtual: bool) -> impl Iterator<Item = (u64, &'static [u8], u64)> {
    let count = if with_virtual { 2 } else { 1 };
    NAMES.into_iter().take(count).zip(FIRST_INDEX..).map(|((id, name), index)| (id, name, index))
}

/// Collects items in any order.
#[derive(Default)]
pub(crate) struct Collector(Vec<(Key, Vec<u8>)>);

impl Collector {
    pub(crate) fn add(&mut self, key: Key, len: usize, fill: impl FnOnce(&mut Put)) {
        self.item(key, len, |to| {
            let mut put = Put::new(to);
            fill(&mut put);
            put.end();
        });
    }

    pub(crate) fn root_directory(&mut self, size: u64) {
        self.item(Key::new(FIRST_INODE, kind::INODE_ITEM, 0), INODE_ITEM_LEN, |to| {
            InodeFields { size, ..InodeFields::directory() }.write(to);
        });
        crate::fs_tree::put_root_ref(self);
    }

    pub(crate) fn sorted(mut self) -> ItemList {
        self.0.sort_unstable_by_key(|(key, _)| *key);
        ItemList(self.0)
    }
}

impl ItemOut for Collector {
    fn item(&mut self, key: Key, len: usize, fill: impl FnOnce(&mut [u8])) {
        let mut bytes = vec![0; len];
        fill(&mut bytes);
        self.0.push((key, bytes));
    }
}

/// A DEV_ITEM, which is also part of the superblock. `fsid` is zero in a template.
pub(crate) fn dev_item(device: &DevItem, fsid: &[u8; 16]) -> [u8; DEV_ITEM_LEN] {
    let mut item = [0; DEV_ITEM_LEN];
    let mut put = Put::new(&mut item);
    let sector = SECTOR as u32;
    put.u64s(&[device.id, device.size, device.used]).u32(sector).u32(sector).u32(sector);
    put.zeros(30).bytes(&device.uuid).bytes(fsid).end();
    item
}

pub(crate) fn chunk_key(chunk: &Chunk) -> Key {
    Key::new(object::FIRST_CHUNK_TREE, kind::CHUNK_ITEM, chunk.start)
}

/// A CHUNK_ITEM; that of the system chunk is also in the superblock.
pub(crate) fn chunk_item(chunk: &Chunk, device_uuid: &[u8; 16]) -> [u8; CHUNK_ITEM_LEN] {
    let mut item = [0; CHUNK_ITEM_LEN];
    let mut put = Put::new(&mut item);
    put.u64s(&[chunk.len, object::EXTENT_TREE, STRIPE_LEN, chunk.flags]);
    put.u32(STRIPE_LEN as u32).u32(STRIPE_LEN as u32).u32(SECTOR as u32).u16(1).u16(0);
    put.u64s(&[chunk.devid, chunk.start]).bytes(device_uuid).end();
    item
}

fn uuid_of(devices: &[DevItem], devid: u64) -> [u8; 16] {
    devices.iter().find(|device| device.id == devid).map_or([0; 16], |device| device.uuid)
}

pub(crate) fn chunk_tree(devices: &[DevItem], chunks: &[Chunk]) -> ItemList {
    let mut items = Collector::default();
    for device in devices {
        let key = Key::new(object::DEV_ITEMS, kind::DEV_ITEM, device.id);
        items.add(key, DEV_ITEM_LEN, |put| {
            put.bytes(&dev_item(device, &[0; 16]));
        });
    }
    for chunk in chunks {
        items.add(chunk_key(chunk), CHUNK_ITEM_LEN, |put| {
            put.bytes(&chunk_item(chunk, &uuid_of(devices, chunk.devid)));
        });
    }
    items.sorted()
}

pub(crate) fn dev_tree(devices: &[DevItem], chunks: &[Chunk], uuids: &Uuids) -> ItemList {
    let mut items = Collector::default();
    for device in devices {
        // Error counters, all zero.
        items.add(Key::new(0, kind::PERSISTENT_ITEM, device.id), 40, |put| {
            put.zeros(40);
        });
    }
    for chunk in chunks {
        items.add(Key::new(chunk.devid, kind::DEV_EXTENT, chunk.start), 48, |put| {
            let owner = [object::CHUNK_TREE, object::FIRST_CHUNK_TREE];
            put.u64s(&owner).u64s(&[chunk.start, chunk.len]).bytes(&uuids.chunk_tree);
        });
    }
    items.sorted()
}

/// A tree's root in the root tree.
pub(crate) struct Root {
    pub(crate) tree: u64,
    pub(crate) root: TreeRoot,
    pub(crate) bytes: u64,
}

pub(crate) fn root_tree(roots: &[Root], uuids: &Uuids) -> ItemList {
    const ROOT_ITEM_LEN: usize = 439;
    let mut items = Collector::default();
    for root in roots {
        let (dir, uuid) = match root.tree {
            object::FS_TREE => (FIRST_INODE, uuids.top_level),
            SUBVOLUME => (FIRST_INODE, uuids.subvolume),
            VIRTUAL_SUBVOLUME => (FIRST_INODE, uuids.virtual_area),
            object::DATA_RELOC_TREE => (FIRST_INODE, [0; 16]),
            _ => (0, [0; 16]),
        };
        items.add(Key::new(root.tree, kind::ROOT_ITEM, 0), ROOT_ITEM_LEN, |put| {
            let mut inode = [0; INODE_ITEM_LEN];
            InodeFields {
                size: 3,
                bytes: NODE_SIZE as u64,
                flags: if dir == 0 { 0 } else { INODE_ROOT_ITEM_INIT },
                ..InodeFields::directory()
            }
            .write(&mut inode);
            put.bytes(&inode);
            put.u64s(&[GENERATION, dir, root.root.address, 0, root.bytes, 0, 0]);
            put.u32(1).zeros(17).u8(0).u8(root.root.level).u64(GENERATION);
            put.bytes(&uuid).zeros(32);
            let changed = if dir == 0 { 0 } else { GENERATION };
            put.u64s(&[changed, changed, 0, 0]).zeros(48 + 64);
        });
    }
    let with_virtual = roots.iter().any(|root| root.tree == VIRTUAL_SUBVOLUME);
    for (id, name, index) in subvolumes(with_virtual) {
        let forth = Key::new(object::FS_TREE, kind::ROOT_REF, id);
        let back = Key::new(id, kind::ROOT_BACKREF, object::FS_TREE);
        for key in [forth, back] {
            items.add(key, 18 + name.len(), |put| {
                put.u64s(&[FIRST_INODE, index]).u16(name.len() as u16).bytes(name);
            });
        }
    }
    default_subvolume(&mut items);
    items.sorted()
}

/// The directory that names the default subvolume: the top level, as with mkfs.
fn default_subvolume(items: &mut Collector) {
    let name = b"default";
    let dir = object::ROOT_TREE_DIR;
    items.item(Key::new(dir, kind::INODE_ITEM, 0), INODE_ITEM_LEN, |to| {
        InodeFields { bytes: NODE_SIZE as u64, ..InodeFields::directory() }.write(to);
    });
    items.add(Key::new(dir, kind::INODE_REF, dir), INODE_REF_HEAD + 2, |put| {
        put.u64(0).u16(2).bytes(b"..");
    });
    let hash = u64::from(name_hash(name));
    items.add(Key::new(dir, kind::DIR_ITEM, hash), DIR_ENTRY + name.len(), |put| {
        let location = Key::new(object::FS_TREE, kind::ROOT_ITEM, u64::MAX);
        put_dir_entry(put, location, FILE_TYPE_DIRECTORY, name, &[]);
    });
    let reference = Key::new(object::FS_TREE, kind::INODE_REF, dir);
    items.add(reference, INODE_REF_HEAD + name.len(), |put| {
        put.u64(0).u16(name.len() as u16).bytes(name);
    });
}

/// The private top level: a directory of the subvolumes.
pub(crate) fn top_level(with_virtual: bool) -> ItemList {
    let mut items = Collector::default();
    let lengths = subvolumes(with_virtual).map(|(_, name, _)| name.len() as u64);
    items.root_directory(2 * lengths.sum::<u64>());
    for (id, name, index) in subvolumes(with_virtual) {
        let hash = u64::from(name_hash(name));
        for (kind, offset) in [(kind::DIR_ITEM, hash), (kind::DIR_INDEX, index)] {
            items.add(Key::new(FIRST_INODE, kind, offset), DIR_ENTRY + name.len(), |put| {
                let location = Key::new(id, kind::ROOT_ITEM, u64::MAX);
                put_dir_entry(put, location, FILE_TYPE_DIRECTORY, name, &[]);
            });
        }
    }
    items.sorted()
}

pub(crate) fn data_reloc_tree() -> ItemList {
    let mut items = Collector::default();
    items.root_directory(0);
    items.sorted()
}

pub(crate) fn uuid_tree(uuids: &Uuids, with_virtual: bool) -> ItemList {
    let mut items = Collector::default();
    let trees = [
        (uuids.top_level, object::FS_TREE),
        (uuids.subvolume, SUBVOLUME),
        (uuids.virtual_area, VIRTUAL_SUBVOLUME),
    ];
    for (uuid, tree) in trees.into_iter().take(if with_virtual { 3 } else { 2 }) {
        let number = u128::from_le_bytes(uuid);
        let key = Key::new(number as u64, kind::UUID_SUBVOL, (number >> 64) as u64);
        items.add(key, 8, |put| {
            put.u64(tree);
        });
    }
    items.sorted()
}

/// Free extents of every block group. Their number does not depend on the used bytes of the two
/// metadata chunks: both begin with nodes and end with free space.
pub(crate) fn free_space_tree(chunks: &[Chunk], extents: &Extents) -> ItemList {
    let mut items = ItemList(Vec::new());
    let mut data = extents.all.iter().peekable();
    for chunk in chunks {
        let end = chunk.start + chunk.len;
        let mut free: Vec<(u64, u64)> = Vec::new();
        let mut at = chunk.start;
        if chunk.flags == crate::format::group::DATA {
            while let Some(extent) = data.next_if(|extent| extent.start < end) {
                if at < extent.start {
                    free.push((at, extent.start - at));
                }
                at = extent.end();
            }
            if chunk.used == chunk.len {
                // Also an extent of the virtual area, which is not in the table.
                at = end;
            }
        } else {
            at += chunk.used;
        }
        if at < end {
            free.push((at, end - at));
        }
        let mut info = vec![0; 8];
        Put::new(&mut info).u32(free.len() as u32);
        items.0.push((Key::new(chunk.start, kind::FREE_SPACE_INFO, chunk.len), info));
        for (start, len) in free {
            items.0.push((Key::new(start, kind::FREE_SPACE_EXTENT, len), Vec::new()));
        }
    }
    items
}
