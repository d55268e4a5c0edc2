//! A small seed of two devices: its metadata in a file, its data computed.
#![allow(dead_code)] // each test binary uses a part

use std::{
    collections::HashMap,
    fs::{self, File},
    os::unix::fs::FileExt,
    path::Path,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering::SeqCst},
    },
};

use burgeon_block::{
    BLOCK_SIZE, BlockDevice, ByteRange, ChecksumKind, Digest, Error, ErrorKind, Now, Result, Shape,
};
use burgeon_btrfs::{
    DATA_START, DeviceNo, Dirent, FileExtent, Identity, Inode, InodeBody, NodeSink, SeedInfo,
    SeedOptions, Tree, Uuids, patch_nodes, superblock, superblock_offsets, write_seed,
};

use crate::common::fill;

pub(crate) const INLINE: &[u8] = b"in the metadata";
const LAZY_LEN: u64 = 5 << 20;

pub(crate) struct Seed {
    pub(crate) info: SeedInfo,
    pub(crate) identity: Identity,
}

/// Template nodes, by address.
struct Nodes(Mutex<Vec<(u64, Vec<u8>)>>);

impl NodeSink for Nodes {
    fn write(&self, physical: u64, nodes: &[u8]) -> Result<()> {
        self.0.lock().unwrap().push((physical, nodes.to_vec()));
        Ok(())
    }
}

impl Seed {
    /// Writes `folder/metadata`, under a new fsid: a root with an inline file and a lazy one.
    pub(crate) fn write(folder: &Path) -> Self {
        Self::write_with(folder, |options| options)
    }

    /// The same with other options.
    pub(crate) fn write_with(folder: &Path, change: impl Fn(SeedOptions) -> SeedOptions) -> Self {
        let mut tree = Tree::default();
        let inline = tree.push_bytes(INLINE).unwrap();
        let (body, size) = (InodeBody::Inline(inline), INLINE.len() as u64);
        let file = Inode { mode: 0o100644, ..Inode::default() };
        tree.inodes.push(Inode { mode: 0o040755, ..Inode::default() });
        tree.inodes.push(Inode { body, size, ..file });
        let body = InodeBody::Extents { first: 0, count: 1 };
        tree.inodes.push(Inode { body, size: LAZY_LEN, ..file });
        tree.extents.push(FileExtent { file_offset: 0, address: DATA_START, len: LAZY_LEN });
        for (inode, name) in [(1, b"inline".as_slice()), (2, b"lazy")] {
            let name = tree.push_bytes(name).unwrap();
            tree.dirents.push(Dirent { parent: 0, inode, name });
        }

        let options =
            SeedOptions::new(DATA_START + LAZY_LEN, Uuids::derive(&Digest::of(b"frontend test")));
        let options = change(options);
        let mut data = vec![0; LAZY_LEN as usize];
        fill(DATA_START, &mut data);
        let checksums: Vec<u8> = data
            .chunks(BLOCK_SIZE as usize)
            .flat_map(|block| (ChecksumKind::Crc32c.of(block) as u32).to_le_bytes())
            .collect();
        let nodes = Nodes(Mutex::default());
        let info = write_seed(&tree, &checksums, &options, &nodes).unwrap();
        let seed = Self { info, identity: Identity { fsid: random_fsid() } };
        seed.write_metadata(&File::create(folder.join("metadata")).unwrap(), nodes);
        seed
    }

    fn write_metadata(&self, file: &File, nodes: Nodes) {
        file.set_len(self.info.metadata_device_size()).unwrap();
        for (address, mut bytes) in nodes.0.into_inner().unwrap() {
            patch_nodes(&self.info, &self.identity, address, &mut bytes).unwrap();
            file.write_all_at(&bytes, address).unwrap();
        }
        for (offset, block) in superblocks(self, DeviceNo::Metadata) {
            file.write_all_at(&block, offset).unwrap();
        }
    }

    /// The content of the file `lazy`.
    pub(crate) fn content(&self) -> Vec<u8> {
        let mut content = vec![0; LAZY_LEN as usize];
        fill(DATA_START, &mut content);
        content
    }
}

fn superblocks(seed: &Seed, device: DeviceNo) -> HashMap<u64, [u8; 4096]> {
    let offsets = superblock_offsets(&seed.info, device).iter().enumerate();
    let block = |mirror| superblock(&seed.info, &seed.identity, device, mirror).unwrap();
    offsets.map(|(mirror, offset)| (*offset, block(mirror))).collect()
}

fn random_fsid() -> [u8; 16] {
    let text = fs::read_to_string("/proc/sys/kernel/random/uuid").unwrap();
    u128::from_str_radix(&text.trim().replace('-', ""), 16).unwrap().to_be_bytes()
}

/// The seed's second device.
pub(crate) struct LazyData {
    size: u64,
    superblocks: HashMap<u64, [u8; 4096]>,
    virtual_area: Option<ByteRange>,
    /// Blocks that may still be read of the virtual area: beyond them it fails.
    limit: Arc<AtomicU64>,
}

impl LazyData {
    /// The blocks of the virtual area that may still be read.
    pub(crate) fn limit(&self) -> Arc<AtomicU64> {
        Arc::clone(&self.limit)
    }

    pub(crate) fn of(seed: &Seed) -> Self {
        Self {
            size: seed.info.data_device_size(),
            superblocks: superblocks(seed, DeviceNo::Data),
            virtual_area: seed.info.virtual_area,
            limit: Arc::new(AtomicU64::new(u64::MAX)),
        }
    }
}

impl BlockDevice for LazyData {
    fn shape(&self) -> Shape {
        Shape::read_only(self.size)
    }

    fn try_read(&self, offset: u64, buf: &mut [u8]) -> Result<Now> {
        let blocks = ByteRange::at(offset, buf.len() as u64).unwrap();
        if self.virtual_area.is_some_and(|area| area.intersect(blocks).is_some()) {
            let count = blocks.len() / BLOCK_SIZE;
            let left = self.limit.fetch_update(SeqCst, SeqCst, |left| left.checked_sub(count));
            left.map_err(|_| Error::new(ErrorKind::Unavailable, "beyond the limit"))?;
            fill(offset, buf);
            return Ok(Now::Served);
        }
        for (index, block) in buf.chunks_exact_mut(BLOCK_SIZE as usize).enumerate() {
            let offset = offset + index as u64 * BLOCK_SIZE;
            match self.superblocks.get(&offset) {
                Some(superblock) => block.copy_from_slice(superblock),
                None if (DATA_START..DATA_START + LAZY_LEN).contains(&offset) => {
                    fill(offset, block)
                }
                None => block.fill(0),
            }
        }
        // Both ways of answering are used.
        Ok(if (offset / BLOCK_SIZE).is_multiple_of(3) { Now::Absent } else { Now::Served })
    }

    async fn read(&self, offset: u64, buf: &mut [u8]) -> Result<()> {
        self.try_read(offset, buf).map(|_| ())
    }
}
