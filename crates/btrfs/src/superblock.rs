//! Superblocks: made for each mount and device from the seed's description and the mount's fsid.

use burgeon_block::ChecksumKind;

use crate::{
    format::{FSID_AT, GENERATION, NODE_SIZE, Put, SECTOR, group, object},
    info::SeedInfo,
    patch::Identity,
    small_trees::{chunk_item, chunk_key, dev_item},
};

/// Bytes of a superblock.
pub const SUPERBLOCK_SIZE: usize = 4096;

/// Positions of the copies: 64 KiB, 64 MiB, 256 GiB.
pub(crate) const SUPERBLOCKS: [u64; 3] = [64 << 10, 64 << 20, 256 << 30];
const MAGIC: &[u8; 8] = b"_BHRfS_M";
const SEEDING: u64 = 1 << 32;
/// Written without errors.
const WRITTEN: u64 = 1;
/// MIXED_BACKREF, BIG_METADATA, EXTENDED_IREF, SKINNY_METADATA, NO_HOLES.
const INCOMPAT: u64 = 0x1 | 0x20 | 0x40 | 0x100 | 0x200;
/// FREE_SPACE_TREE and FREE_SPACE_TREE_VALID.
const COMPAT_RO: u64 = 0x3;

/// One of a seed's devices.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum DeviceNo {
    /// devid 1.
    Metadata,
    /// devid 2: the lazy data.
    Data,
}

/// Positions of the superblocks on `device`, in bytes; the index is the mirror's number.
pub fn superblock_offsets(info: &SeedInfo, device: DeviceNo) -> &'static [u64] {
    let size = match device {
        DeviceNo::Metadata => info.metadata_device_size(),
        DeviceNo::Data => info.data_device_size(),
    };
    let fits = |offset: &&u64| **offset + SUPERBLOCK_SIZE as u64 <= size;
    &SUPERBLOCKS[..SUPERBLOCKS.iter().take_while(fits).count()]
}

/// The superblock for `superblock_offsets(info, device)[mirror]`; `None` if that mirror does not
/// exist.
pub fn superblock(
    info: &SeedInfo,
    identity: &Identity,
    device: DeviceNo,
    mirror: usize,
) -> Option<[u8; SUPERBLOCK_SIZE]> {
    let offset = *superblock_offsets(info, device).get(mirror)?;
    let devices = info.device_table();
    let this = devices.get(match device {
        DeviceNo::Metadata => 0,
        DeviceNo::Data => 1,
    })?;
    let chunks = info.chunks();
    let system = chunks.iter().find(|chunk| chunk.flags == group::SYSTEM)?;
    let mut chunk_array = [0; 17 + 80];
    Put::new(&mut chunk_array)
        .key(chunk_key(system))
        .bytes(&chunk_item(system, &info.uuids.metadata_device))
        .end();

    let mut block = [0; SUPERBLOCK_SIZE];
    let mut put = Put::new(&mut block[FSID_AT..]);
    put.bytes(&identity.fsid).u64s(&[offset, WRITTEN | SEEDING]).bytes(MAGIC);
    put.u64s(&[GENERATION, info.root.address, info.chunk_root.address, 0, 0]);
    put.u64s(&[devices.iter().map(|device| device.size).sum(), info.bytes_used]);
    put.u64s(&[object::ROOT_TREE_DIR, devices.len() as u64]);
    let (sector, node) = (SECTOR as u32, NODE_SIZE as u32);
    put.u32(sector).u32(node).u32(node).u32(sector).u32(chunk_array.len() as u32);
    put.u64s(&[GENERATION, 0, COMPAT_RO, INCOMPAT]).u16(info.checksum as u16);
    put.u8(info.root.level).u8(info.chunk_root.level).u8(0);
    put.bytes(&dev_item(this, &identity.fsid));
    // No label; no free space cache of the old kind; the uuid tree is complete.
    put.zeros(256).u64s(&[0, GENERATION]).zeros(16 + 224).bytes(&chunk_array);
    seal(&mut block, info.checksum);
    Some(block)
}

fn seal(block: &mut [u8; SUPERBLOCK_SIZE], kind: ChecksumKind) {
    let checksum = kind.of(&block[FSID_AT..]).to_le_bytes();
    block[..kind.size()].copy_from_slice(&checksum[..kind.size()]);
}
