//! The on-disk format of btrfs, as far as a seed needs it: constants, keys, hashes and structs.
//!
//! The authority is `kernel-shared/uapi/btrfs_tree.h` and `kernel-shared/ctree.h` of
//! btrfs-progs. All integers are little-endian; structs are packed.

pub(crate) const NODE_SIZE: usize = 16384;
pub(crate) const SECTOR: u64 = 4096;
pub(crate) const HEADER: usize = 101;
pub(crate) const ITEM_HEADER: usize = 25;
pub(crate) const KEY_POINTER: usize = 33;
/// Bytes of a leaf for items and their headers.
pub(crate) const LEAF_SPACE: usize = NODE_SIZE - HEADER;
/// Longest item.
pub(crate) const ITEM_MAX: usize = LEAF_SPACE - ITEM_HEADER;
/// Children of a full inner node.
pub(crate) const FANOUT: usize = LEAF_SPACE / KEY_POINTER;
/// Offset of the fsid in a node; the checksum covers everything from here on.
pub(crate) const FSID_AT: usize = 32;
pub(crate) const DEV_ITEM_LEN: usize = 98;
/// An EXTENT_ITEM keeps its back references inline up to this size, as the kernel's
/// `BTRFS_MAX_EXTENT_ITEM_SIZE`.
pub(crate) const EXTENT_ITEM_MAX: usize = LEAF_SPACE / 16 - ITEM_HEADER;
/// Name and value of an xattr, together.
pub(crate) const XATTR_MAX: usize = ITEM_MAX - DIR_ENTRY;
pub(crate) const NAME_MAX: usize = 255;
pub(crate) const LINK_MAX: u32 = 65535;
/// Longest content kept in metadata: a sector less one byte.
pub(crate) const INLINE_MAX: u32 = 4095;

/// The whole seed is one transaction.
pub(crate) const GENERATION: u64 = 1;
pub(crate) const FIRST_INODE: u64 = 256;
pub(crate) const SUBVOLUME: u64 = 256;
/// The private subvolume that holds the virtual area's file.
pub(crate) const VIRTUAL_SUBVOLUME: u64 = 257;

/// Sizes of the fixed parts of items that end in a name.
pub(crate) const DIR_ENTRY: usize = 30;
pub(crate) const INODE_REF_HEAD: usize = 10;
pub(crate) const EXTREF_HEAD: usize = 18;

/// Item types.
pub(crate) mod kind {
    pub(crate) const INODE_ITEM: u8 = 1;
    pub(crate) const INODE_REF: u8 = 12;
    pub(crate) const INODE_EXTREF: u8 = 13;
    pub(crate) const XATTR_ITEM: u8 = 24;
    pub(crate) const DIR_ITEM: u8 = 84;
    pub(crate) const DIR_INDEX: u8 = 96;
    pub(crate) const EXTENT_DATA: u8 = 108;
    pub(crate) const EXTENT_CSUM: u8 = 128;
    pub(crate) const ROOT_ITEM: u8 = 132;
    pub(crate) const ROOT_BACKREF: u8 = 144;
    pub(crate) const ROOT_REF: u8 = 156;
    pub(crate) const EXTENT_ITEM: u8 = 168;
    pub(crate) const METADATA_ITEM: u8 = 169;
    pub(crate) const TREE_BLOCK_REF: u8 = 176;
    pub(crate) const EXTENT_DATA_REF: u8 = 178;
    pub(crate) const BLOCK_GROUP_ITEM: u8 = 192;
    pub(crate) const FREE_SPACE_INFO: u8 = 198;
    pub(crate) const FREE_SPACE_EXTENT: u8 = 199;
    pub(crate) const DEV_EXTENT: u8 = 204;
    pub(crate) const DEV_ITEM: u8 = 216;
    pub(crate) const CHUNK_ITEM: u8 = 228;
    pub(crate) const PERSISTENT_ITEM: u8 = 249;
    pub(crate) const UUID_SUBVOL: u8 = 251;
}

/// Tree and other object ids.
pub(crate) mod object {
    pub(crate) const ROOT_TREE: u64 = 1;
    pub(crate) const EXTENT_TREE: u64 = 2;
    pub(crate) const CHUNK_TREE: u64 = 3;
    pub(crate) const DEV_TREE: u64 = 4;
    pub(crate) const FS_TREE: u64 = 5;
    pub(crate) const ROOT_TREE_DIR: u64 = 6;
    pub(crate) const CSUM_TREE: u64 = 7;
    pub(crate) const UUID_TREE: u64 = 9;
    pub(crate) const FREE_SPACE_TREE: u64 = 10;
    pub(crate) const DATA_RELOC_TREE: u64 = -9i64 as u64;
    pub(crate) const EXTENT_CSUM: u64 = -10i64 as u64;
    pub(crate) const DEV_ITEMS: u64 = 1;
    pub(crate) const FIRST_CHUNK_TREE: u64 = 256;
}

/// Flags of block groups and chunks.
pub(crate) mod group {
    pub(crate) const DATA: u64 = 1;
    pub(crate) const SYSTEM: u64 = 2;
    pub(crate) const METADATA: u64 = 4;
}

/// The address of an item in a tree; items are sorted by it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default)]
pub(crate) struct Key {
    pub(crate) objectid: u64,
    pub(crate) kind: u8,
    pub(crate) offset: u64,
}

impl Key {
    pub(crate) const LEN: usize = 17;

    pub(crate) fn new(objectid: u64, kind: u8, offset: u64) -> Self {
        Self { objectid, kind, offset }
    }

    pub(crate) fn write(self, to: &mut [u8]) {
        to[..8].copy_from_slice(&self.objectid.to_le_bytes());
        to[8] = self.kind;
        to[9..17].copy_from_slice(&self.offset.to_le_bytes());
    }
}

/// Writes fields one after another.
pub(crate) struct Put<'a> {
    to: &'a mut [u8],
    at: usize,
}

impl<'a> Put<'a> {
    pub(crate) fn new(to: &'a mut [u8]) -> Self {
        Self { to, at: 0 }
    }

    pub(crate) fn bytes(&mut self, bytes: &[u8]) -> &mut Self {
        self.to[self.at..self.at + bytes.len()].copy_from_slice(bytes);
        self.at += bytes.len();
        self
    }

    pub(crate) fn u8(&mut self, value: u8) -> &mut Self {
        self.bytes(&[value])
    }

    pub(crate) fn u16(&mut self, value: u16) -> &mut Self {
        self.bytes(&value.to_le_bytes())
    }

    pub(crate) fn u32(&mut self, value: u32) -> &mut Self {
        self.bytes(&value.to_le_bytes())
    }

    pub(crate) fn u64(&mut self, value: u64) -> &mut Self {
        self.bytes(&value.to_le_bytes())
    }

    pub(crate) fn u64s(&mut self, values: &[u64]) -> &mut Self {
        values.iter().for_each(|value| {
            self.u64(*value);
        });
        self
    }

    pub(crate) fn zeros(&mut self, len: usize) -> &mut Self {
        self.to[self.at..self.at + len].fill(0);
        self.at += len;
        self
    }

    pub(crate) fn key(&mut self, key: Key) -> &mut Self {
        key.write(&mut self.to[self.at..self.at + Key::LEN]);
        self.at += Key::LEN;
        self
    }

    /// Asserts (in tests) that the struct is as long as its item.
    pub(crate) fn end(&self) {
        debug_assert_eq!(self.at, self.to.len());
    }
}

/// CRC-32C with a given start value and without the final inversion, btrfs's hash function.
fn raw_crc(start: u32, bytes: &[u8]) -> u32 {
    !burgeon_block::crc32c_append(!start, bytes)
}

/// The key offset of a name's DIR_ITEM or XATTR_ITEM.
pub(crate) fn name_hash(name: &[u8]) -> u32 {
    raw_crc(!1, name)
}

/// The key offset of an INODE_EXTREF. Only the low half of the parent's number counts.
pub(crate) fn extref_hash(parent: u64, name: &[u8]) -> u32 {
    raw_crc(parent as u32, name)
}

/// The hash that orders the back references of one extent.
pub(crate) fn data_ref_hash(root: u64, inode: u64, offset: u64) -> u64 {
    let high = raw_crc(!0, &root.to_le_bytes());
    let low = raw_crc(raw_crc(!0, &inode.to_le_bytes()), &offset.to_le_bytes());
    (u64::from(high) << 31) ^ u64::from(low)
}

/// An INODE_ITEM's fields that differ between inodes.
#[derive(Clone, Copy, Default)]
pub(crate) struct InodeFields {
    pub(crate) size: u64,
    pub(crate) bytes: u64,
    pub(crate) links: u32,
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    pub(crate) mode: u32,
    pub(crate) rdev: u64,
    pub(crate) flags: u64,
    pub(crate) time_s: i64,
    pub(crate) time_ns: u32,
}

pub(crate) const INODE_ITEM_LEN: usize = 160;
pub(crate) const INODE_NODATASUM: u64 = 1;

impl InodeFields {
    /// An empty directory of root's.
    pub(crate) fn directory() -> Self {
        Self { links: 1, mode: 0o040755, ..Self::default() }
    }

    pub(crate) fn write(&self, to: &mut [u8]) {
        let mut put = Put::new(to);
        put.u64s(&[GENERATION, GENERATION, self.size, self.bytes, 0]);
        put.u32(self.links).u32(self.uid).u32(self.gid).u32(self.mode);
        put.u64s(&[self.rdev, self.flags, 0]).zeros(32);
        for _ in 0..4 {
            put.u64(self.time_s as u64).u32(self.time_ns);
        }
        put.end();
    }
}

/// A directory entry, also the form of an xattr, whose `location` is all zero and type 8.
pub(crate) fn put_dir_entry(put: &mut Put, location: Key, kind: u8, name: &[u8], data: &[u8]) {
    put.key(location).u64(GENERATION).u16(data.len() as u16).u16(name.len() as u16).u8(kind);
    put.bytes(name).bytes(data);
}

pub(crate) const FILE_TYPE_DIRECTORY: u8 = 2;
pub(crate) const FILE_TYPE_XATTR: u8 = 8;

/// The type number in directory entries for a mode's file type; `None` if there is none.
pub(crate) fn file_type(mode: u32) -> Option<u8> {
    Some(match mode & 0o170000 {
        0o100000 => 1,
        0o040000 => FILE_TYPE_DIRECTORY,
        0o020000 => 3,
        0o060000 => 4,
        0o010000 => 5,
        0o140000 => 6,
        0o120000 => 7,
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::{data_ref_hash, extref_hash, name_hash};

    #[test]
    fn hashes_are_the_kernels() {
        // `btrfs inspect-internal dump-tree` of a filesystem made by mkfs.btrfs 6.2.
        assert_eq!(name_hash(b"default"), 2_378_154_706);
        assert_eq!(name_hash(b""), !1);
        assert_eq!(extref_hash(256 | 1 << 40, b"a"), extref_hash(256, b"a"));
        assert_ne!(data_ref_hash(5, 256, 0), data_ref_hash(256, 5, 0));
    }
}
