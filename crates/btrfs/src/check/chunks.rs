//! Devices and chunks: logical equals physical, nothing overlaps, and no chunk covers a
//! superblock.

use burgeon_block::{ByteRange, Result};

use super::{NodeSource, Take, ensure, nodes::Reader};
use crate::{
    DATA_START,
    format::{group, kind, object},
    geometry::{DATA_DEVID, METADATA_DEVID},
    info::{SeedInfo, TreeRoot},
    superblock::{SUPERBLOCK_SIZE, SUPERBLOCKS},
};

/// A chunk of the chunk tree.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Chunk {
    pub(super) start: u64,
    pub(super) len: u64,
    pub(super) flags: u64,
    devid: u64,
}

impl Chunk {
    pub(super) fn end(&self) -> u64 {
        self.start + self.len
    }
}

#[derive(Default)]
struct ChunkBatch {
    devices: Vec<(u64, u64, u64)>,
    chunks: Vec<Chunk>,
}

/// Reads the chunk tree and the device tree; returns the chunks in address order.
pub(super) fn read(reader: &Reader<impl NodeSource>, dev_root: TreeRoot) -> Result<Vec<Chunk>> {
    let info = reader.info;
    let batches = reader.batches(
        object::CHUNK_TREE,
        info.chunk_root,
        |batch: &mut ChunkBatch, key, item| {
            match key.kind {
                kind::DEV_ITEM => batch.devices.push(device(reader, key.offset, item)?),
                kind::CHUNK_ITEM => batch.chunks.push(chunk(reader, key.offset, item)?),
                _ => ensure(false, || "it does not belong into a chunk tree".into())?,
            }
            Ok(())
        },
    )?;
    let devices: Vec<_> = batches.iter().flat_map(|batch| batch.devices.clone()).collect();
    let chunks: Vec<_> = batches.into_iter().flat_map(|batch| batch.chunks).collect();
    for pair in chunks.windows(2) {
        ensure(pair[0].end() <= pair[1].start, || format!("{pair:?} overlap"))?;
    }
    let ids = devices.iter().map(|(id, ..)| *id);
    ensure(ids.eq([METADATA_DEVID, DATA_DEVID]), || "a device is missing".into())?;
    for (id, size, used) in devices {
        let of_info = if id == METADATA_DEVID {
            info.metadata_device_size()
        } else {
            info.data_device_size()
        };
        let mine = || chunks.iter().filter(|chunk| chunk.devid == id);
        let end = mine().map(Chunk::end).max().unwrap_or(0);
        ensure(size == of_info && end <= size, || format!("device {id} has a wrong size"))?;
        let real: u64 = mine().map(|chunk| chunk.len).sum();
        ensure(used == real, || format!("device {id} uses {real} bytes, not {used}"))?;
    }
    check_kinds(&chunks, info)?;
    check_device_extents(reader, dev_root, &chunks)?;
    Ok(chunks)
}

fn device(reader: &Reader<impl NodeSource>, id: u64, item: &[u8]) -> Result<(u64, u64, u64)> {
    let mut take = Take(item);
    let [devid, size, used] = take.u64s()?;
    take.bytes(12 + 30)?;
    let uuids = &reader.info.uuids;
    let uuid = if id == METADATA_DEVID { uuids.metadata_device } else { uuids.data_device };
    ensure(devid == id && take.array()? == uuid, || "the device is another one".into())?;
    ensure(take.array()? == reader.fsid, || "the device is another filesystem's".into())?;
    take.end()?;
    Ok((devid, size, used))
}

fn chunk(reader: &Reader<impl NodeSource>, start: u64, item: &[u8]) -> Result<Chunk> {
    let mut take = Take(item);
    let [len, owner, stripe_len, flags] = take.u64s()?;
    let (sizes, stripes) = ([take.u32()?, take.u32()?, take.u32()?], take.u16()?);
    take.u16()?;
    let form = owner == object::EXTENT_TREE
        && stripe_len == 65536
        && sizes == [65536, 65536, 4096]
        && stripes == 1;
    ensure(form, || "the chunk is not of profile SINGLE".into())?;
    let [devid, physical] = take.u64s()?;
    ensure(physical == start, || format!("its physical address is {physical}"))?;
    let (expected, uuid) = match flags == group::DATA {
        true => (DATA_DEVID, reader.info.uuids.data_device),
        false => (METADATA_DEVID, reader.info.uuids.metadata_device),
    };
    let right = devid == expected && take.array()? == uuid;
    ensure(right, || "the chunk lies on the wrong device".into())?;
    take.end()?;
    // Shorter than 2^32 - 1 stripes.
    let sane = start.is_multiple_of(4096) && len > 0 && len.is_multiple_of(4096) && len < 1 << 48;
    ensure(sane && start.checked_add(len).is_some(), || "the chunk has a wrong length".into())?;
    for superblock in SUPERBLOCKS {
        let apart = start >= superblock + SUPERBLOCK_SIZE as u64 || start + len <= superblock;
        ensure(apart, || format!("the chunk covers the superblock at {superblock}"))?;
    }
    Ok(Chunk { start, len, flags, devid })
}

/// One system chunk, one metadata chunk, then data from [`DATA_START`] to the end without a gap,
/// then the virtual area without a gap.
fn check_kinds(chunks: &[Chunk], info: &SeedInfo) -> Result<()> {
    let wrong = || "the chunks do not cover system, metadata and data".to_string();
    let flags = |index: usize| chunks.get(index).map(|chunk| chunk.flags);
    ensure(flags(0) == Some(group::SYSTEM) && flags(1) == Some(group::METADATA), wrong)?;
    let area_start = info.virtual_area.map_or(u64::MAX, ByteRange::start);
    let lazy = chunks.partition_point(|chunk| chunk.start < area_start);
    let cover = |chunks: &[Chunk], start: u64| {
        let mut end = start;
        for chunk in chunks {
            ensure(chunk.flags == group::DATA && chunk.start == end, wrong)?;
            end = chunk.end();
        }
        Ok(end)
    };
    let lazy_end = cover(chunks.get(2..lazy).unwrap_or_default(), DATA_START)?;
    ensure((info.data_end..=area_start).contains(&lazy_end), wrong)?;
    let end = cover(&chunks[lazy..], area_start)?;
    ensure(end == info.virtual_area.map_or(area_start, ByteRange::end), wrong)
}

fn check_device_extents(
    reader: &Reader<impl NodeSource>,
    root: TreeRoot,
    chunks: &[Chunk],
) -> Result<()> {
    let uuid = reader.info.uuids.chunk_tree;
    let batches: Vec<Vec<_>> =
        reader.batches(object::DEV_TREE, root, |found: &mut Vec<_>, key, item| {
            if key.kind != kind::DEV_EXTENT {
                let stats = key.kind == kind::PERSISTENT_ITEM && item.iter().all(|b| *b == 0);
                return ensure(stats, || "the device counts errors".into());
            }
            let mut take = Take(item);
            let [tree, object, chunk, len] = take.u64s()?;
            let good = (tree, object) == (object::CHUNK_TREE, object::FIRST_CHUNK_TREE)
                && take.array()? == uuid
                && chunk == key.offset;
            ensure(good, || "it is not an extent of a chunk of this seed".into())?;
            found.push((key.objectid, chunk, len));
            Ok(())
        })?;
    let found: Vec<_> = batches.into_iter().flatten().collect();
    let mut expected: Vec<_> =
        chunks.iter().map(|chunk| (chunk.devid, chunk.start, chunk.len)).collect();
    expected.sort_unstable();
    ensure(found == expected, || "the device extents are not those of the chunks".into())
}
