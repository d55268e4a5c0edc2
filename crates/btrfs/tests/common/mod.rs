//! Shared parts of the tests: a builder of trees with real content, and a template in memory.
#![allow(dead_code, clippy::unwrap_used, reason = "each test uses its part")]

pub(crate) mod grow;
pub(crate) mod model;

use std::{fs::File, os::unix::fs::FileExt, path::Path, sync::Mutex};

use burgeon_block::{ChecksumKind, Digest, Result};
use burgeon_btrfs::{
    CheckReport, DATA_START, DeviceNo, Dirent, FileExtent, Identity, Inode, InodeBody, NODE_SIZE,
    NodeSink, NodeSource, Patcher, SeedInfo, SeedOptions, Tree, Uuids, Xattr, check, for_each_item,
    superblock, superblock_offsets, write_seed,
};

pub(crate) const DIR: u32 = 0o040755;
pub(crate) const FILE: u32 = 0o100644;
pub(crate) const LINK: u32 = 0o120777;
pub(crate) const IDENTITY: Identity = Identity { fsid: *b"\xf5id of one mount" };

/// The nodes of a template, as two contiguous pieces of memory.
#[derive(Default)]
pub(crate) struct Template(Mutex<[Vec<u8>; 2]>);

impl Template {
    pub(crate) const STARTS: [u64; 2] = [1 << 20, 128 << 20];

    pub(crate) fn into_pieces(self) -> [Vec<u8>; 2] {
        self.0.into_inner().unwrap()
    }
}

impl NodeSink for Template {
    fn write(&self, physical: u64, nodes: &[u8]) -> Result<()> {
        let piece = usize::from(physical >= Self::STARTS[1]);
        let at = (physical - Self::STARTS[piece]) as usize;
        let bytes = &mut self.0.lock().unwrap()[piece];
        if bytes.len() < at + nodes.len() {
            bytes.resize(at + nodes.len(), 0);
        }
        assert!(bytes[at..at + nodes.len()].iter().all(|b| *b == 0), "{physical} written twice");
        bytes[at..at + nodes.len()].copy_from_slice(nodes);
        Ok(())
    }
}

/// A seed in memory, to be checked and damaged.
#[derive(Clone)]
pub(crate) struct Seed {
    pub(crate) info: SeedInfo,
    pub(crate) pieces: [Vec<u8>; 2],
}

/// The identity of a template.
pub(crate) const TEMPLATE: Identity = Identity::TEMPLATE;

impl NodeSource for Seed {
    fn read(&self, physical: u64, nodes: &mut [u8]) -> Result<()> {
        let piece = usize::from(physical >= Template::STARTS[1]);
        let at = (physical - Template::STARTS[piece]) as usize;
        nodes.copy_from_slice(&self.pieces[piece][at..at + nodes.len()]);
        Ok(())
    }
}

impl Seed {
    pub(crate) fn check(&self) -> Result<CheckReport> {
        check(&self.info, &TEMPLATE, self)
    }

    /// All nodes.
    pub(crate) fn nodes(&mut self) -> impl Iterator<Item = &mut [u8]> {
        self.pieces.iter_mut().flat_map(|piece| piece.chunks_exact_mut(NODE_SIZE))
    }

    /// Changes the nodes that `choose` selects, and updates their checksums.
    pub(crate) fn edit_nodes(
        &mut self,
        choose: impl Fn(&Header) -> bool,
        mut edit: impl FnMut(&mut [u8]),
    ) {
        let kind = self.info.checksum;
        let mut found = false;
        for node in self.nodes().filter(|node| choose(&Header::of(node))) {
            edit(node);
            let sum = kind.of(&node[32..]).to_le_bytes();
            node[..kind.size()].copy_from_slice(&sum[..kind.size()]);
            found = true;
        }
        assert!(found, "no node to damage");
    }

    /// Changes the body of the item `key` of `tree`.
    pub(crate) fn edit_item(&mut self, tree: u64, key: (u64, u8, u64), edit: impl Fn(&mut [u8])) {
        let mut found = false;
        self.edit_nodes(
            |header| header.owner == tree && header.level == 0,
            |node| {
                for (other, range) in leaf_items(node) {
                    if other == key {
                        edit(&mut node[range]);
                        found = true;
                    }
                }
            },
        );
        assert!(found, "no item {key:?} in tree {tree}");
    }

    /// Changes the key of an item, also in inner nodes.
    pub(crate) fn edit_key(&mut self, tree: u64, key: (u64, u8, u64), to: (u64, u8, u64)) {
        let mut found = false;
        let edit = |node: &mut [u8]| {
            let (count, step) = (get_u32(node, 96) as usize, if node[100] == 0 { 25 } else { 33 });
            for slot in node[101..].chunks_exact_mut(step).take(count) {
                if (get_u64(slot, 0), slot[8], get_u64(slot, 9)) == key {
                    slot[..8].copy_from_slice(&to.0.to_le_bytes());
                    slot[8] = to.1;
                    slot[9..17].copy_from_slice(&to.2.to_le_bytes());
                    found = true;
                }
            }
        };
        self.edit_nodes(|header| header.owner == tree, edit);
        assert!(found, "no item {key:?} in tree {tree}");
    }

    /// Removes the last item of the only leaf of a tree.
    pub(crate) fn drop_last_item(&mut self, tree: u64) {
        self.edit_nodes(
            |header| header.owner == tree,
            |node| {
                let (last, (_, range)) =
                    leaf_items(node).into_iter().enumerate().next_back().unwrap();
                node[range].fill(0);
                node[101 + last * 25..101 + last * 25 + 25].fill(0);
                node[96..100].copy_from_slice(&(last as u32).to_le_bytes());
            },
        );
    }

    /// The keys of a tree's items, in order.
    pub(crate) fn keys(&self, tree: u64) -> Vec<(u64, u8, u64)> {
        let mut keys = Vec::new();
        for_each_item(&self.info, &TEMPLATE, self, tree, |key, _| {
            keys.push(key);
            Ok(())
        })
        .unwrap();
        keys
    }

    /// The first key of a type in a tree.
    pub(crate) fn key(&self, tree: u64, kind: u8) -> (u64, u8, u64) {
        self.keys(tree).into_iter().find(|key| key.1 == kind).unwrap()
    }
}

/// The header fields by which a test selects nodes.
pub(crate) struct Header {
    pub(crate) address: u64,
    pub(crate) owner: u64,
    pub(crate) level: u8,
}

impl Header {
    fn of(node: &[u8]) -> Self {
        Self { address: get_u64(node, 48), owner: get_u64(node, 88), level: node[100] }
    }
}

pub(crate) fn get_u64(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap())
}

pub(crate) fn get_u32(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap())
}

pub(crate) fn get_u16(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes(bytes[at..at + 2].try_into().unwrap())
}

/// The items of a leaf: key and range of the body.
pub(crate) fn leaf_items(node: &[u8]) -> Vec<((u64, u8, u64), std::ops::Range<usize>)> {
    (0..get_u32(node, 96) as usize)
        .map(|index| {
            let at = 101 + index * 25;
            let key = (get_u64(node, at), node[at + 8], get_u64(node, at + 9));
            let start = 101 + get_u32(node, at + 17) as usize;
            (key, start..start + get_u32(node, at + 21) as usize)
        })
        .collect()
}

/// Builds a [`Tree`] and its lazy data.
pub(crate) struct Builder {
    pub(crate) tree: Tree,
    /// Lazy data, from `DATA_START` on.
    pub(crate) data: Vec<u8>,
    entries: Vec<Dirent>,
}

impl Builder {
    pub(crate) fn new() -> Self {
        let mut builder = Self { tree: Tree::default(), data: Vec::new(), entries: Vec::new() };
        builder.inode(DIR, InodeBody::None, 0);
        builder
    }

    pub(crate) fn inode(&mut self, mode: u32, body: InodeBody, size: u64) -> u32 {
        let number = self.tree.inodes.len() as u32;
        self.tree.inodes.push(Inode {
            mode,
            body,
            size,
            mtime_s: 1_700_000_000 + i64::from(number),
            mtime_ns: number,
            ..Inode::default()
        });
        number
    }

    pub(crate) fn link(&mut self, parent: u32, name: impl AsRef<[u8]>, inode: u32) {
        let name = self.tree.push_bytes(name.as_ref()).unwrap();
        self.entries.push(Dirent { parent, inode, name });
    }

    pub(crate) fn add(&mut self, parent: u32, name: impl AsRef<[u8]>, mode: u32) -> u32 {
        let inode = self.inode(mode, InodeBody::None, 0);
        self.link(parent, name, inode);
        inode
    }

    pub(crate) fn dir(&mut self, parent: u32, name: impl AsRef<[u8]>) -> u32 {
        self.add(parent, name, DIR)
    }

    pub(crate) fn symlink(&mut self, parent: u32, name: impl AsRef<[u8]>, target: &[u8]) -> u32 {
        let inode = self.inline(parent, name, target);
        self.tree.inodes[inode as usize].mode = LINK;
        inode
    }

    pub(crate) fn inline(&mut self, parent: u32, name: impl AsRef<[u8]>, content: &[u8]) -> u32 {
        let body = InodeBody::Inline(self.tree.push_bytes(content).unwrap());
        let inode = self.inode(FILE, body, content.len() as u64);
        self.link(parent, name, inode);
        inode
    }

    /// Appends lazy data, padded to a block, and returns its address.
    pub(crate) fn append(&mut self, content: &[u8]) -> u64 {
        let address = DATA_START + self.data.len() as u64;
        self.data.extend_from_slice(content);
        self.data.resize(self.data.len().next_multiple_of(4096), 0);
        address
    }

    /// A file of `(file offset, address, len)`.
    pub(crate) fn mapped(
        &mut self,
        parent: u32,
        name: impl AsRef<[u8]>,
        size: u64,
        extents: &[(u64, u64, u64)],
    ) -> u32 {
        let first = self.tree.extents.len() as u32;
        self.tree.extents.extend(extents.iter().map(|&(file_offset, address, len)| FileExtent {
            file_offset,
            address,
            len,
        }));
        let body = InodeBody::Extents { first, count: extents.len() as u32 };
        let inode = self.inode(FILE, body, size);
        self.link(parent, name, inode);
        inode
    }

    /// A file with lazy data of its own.
    pub(crate) fn file(&mut self, parent: u32, name: impl AsRef<[u8]>, content: &[u8]) -> u32 {
        let address = self.append(content);
        let size = content.len() as u64;
        self.mapped(parent, name, size, &[(0, address, size.next_multiple_of(4096))])
    }

    /// All xattrs of an inode.
    pub(crate) fn xattrs(&mut self, inode: u32, xattrs: &[(&[u8], &[u8])]) {
        let first = self.tree.xattrs.len() as u32;
        for (name, value) in xattrs {
            let (name, value) =
                (self.tree.push_bytes(name).unwrap(), self.tree.push_bytes(value).unwrap());
            self.tree.xattrs.push(Xattr { name, value });
        }
        let inode = &mut self.tree.inodes[inode as usize];
        (inode.xattr_first, inode.xattr_count) = (first, xattrs.len() as u32);
    }

    /// Groups the names by directory, and returns the tree.
    pub(crate) fn finish(&mut self) -> &Tree {
        let mut entries = self.entries.clone();
        entries.sort_by_key(|entry| entry.parent);
        self.tree.dirents = entries;
        &self.tree
    }

    pub(crate) fn checksums(&self, kind: ChecksumKind) -> Vec<u8> {
        let of = |block: &[u8]| kind.of(block).to_le_bytes()[..kind.size()].to_vec();
        self.data.chunks(4096).flat_map(of).collect()
    }

    pub(crate) fn options(&self) -> SeedOptions {
        options(DATA_START + self.data.len() as u64)
    }

    pub(crate) fn write(&mut self, options: &SeedOptions) -> Result<(SeedInfo, Template)> {
        let template = Template::default();
        let checksums = self.checksums(options.checksum);
        let info = write_seed(self.finish(), &checksums, options, &template)?;
        Ok((info, template))
    }

    pub(crate) fn seed(&mut self, options: &SeedOptions) -> Seed {
        let (info, template) = self.write(options).unwrap();
        Seed { info, pieces: template.into_pieces() }
    }
}

/// Four bytes that, after `prefix`, turn a CRC-32C register from `start` into `target`: used to
/// make names with the same hash.
pub(crate) fn forge(start: u32, prefix: &[u8], target: u32) -> [u8; 4] {
    let step = |byte: u32| (0..8).fold(byte, |c, _| (c >> 1) ^ ((c & 1) * 0x82f6_3b78));
    let table: Vec<u32> = (0..256).map(step).collect();
    let after =
        prefix.iter().fold(start, |crc, byte| (crc >> 8) ^ table[usize::from(crc as u8 ^ byte)]);
    let mut back = target;
    for _ in 0..4 {
        let index = table.iter().position(|entry| entry >> 24 == back >> 24).unwrap();
        back = (back ^ table[index]) << 8 | index as u32;
    }
    (back ^ after).to_le_bytes()
}

/// `count` different names with the same hash, for a register that begins as `start`: `!1` for
/// directories and xattrs, the parent's number for extended references.
pub(crate) fn colliding(start: u32, prefix: &str, count: usize) -> Vec<Vec<u8>> {
    let name = |n: usize| {
        let prefix = format!("{prefix}{n}-");
        [prefix.as_bytes(), &forge(start, prefix.as_bytes(), 0x1234_5678)].concat()
    };
    let legal = |name: &Vec<u8>| !name.iter().any(|byte| matches!(byte, 0 | b'/'));
    (0..).map(name).filter(legal).take(count).collect()
}

pub(crate) fn options(data_end: u64) -> SeedOptions {
    SeedOptions::new(data_end, Uuids::derive(&Digest::of(b"a test's image")))
}

/// Writes the devices of one mount to files: `<dir>/metadata` and `<dir>/data`.
pub(crate) fn write_devices(
    dir: &Path,
    info: &SeedInfo,
    identity: &Identity,
    template: Template,
    data: &[u8],
) {
    let metadata = File::create(dir.join("metadata")).unwrap();
    metadata.set_len(info.metadata_device_size()).unwrap();
    let patcher = Patcher::new(info, identity);
    for (mut nodes, start) in template.into_pieces().into_iter().zip(Template::STARTS) {
        patcher.patch(start, &mut nodes).unwrap();
        metadata.write_all_at(&nodes, start).unwrap();
    }
    let put = |file: &File, device: DeviceNo| {
        for (mirror, offset) in superblock_offsets(info, device).iter().enumerate() {
            let block = superblock(info, identity, device, mirror).unwrap();
            file.write_all_at(&block, *offset).unwrap();
        }
    };
    put(&metadata, DeviceNo::Metadata);
    let file = File::create(dir.join("data")).unwrap();
    file.set_len(info.data_device_size()).unwrap();
    put(&file, DeviceNo::Data);
    file.write_all_at(data, DATA_START).unwrap();
}

/// Bytes that differ from block to block and from seed to seed.
pub(crate) fn pattern(seed: u64, len: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()
    };
    let mut bytes: Vec<u8> = (0..len.div_ceil(8)).flat_map(|_| next()).collect();
    bytes.truncate(len);
    bytes
}
