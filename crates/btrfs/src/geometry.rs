//! The layout: the two devices, their chunks, and the caller's options.
//!
//! ```text
//! devid 1  0 ── 64 KiB superblock ── 1 MiB SYSTEM chunk (32 MiB) ── 64 MiB superblock ──
//!          128 MiB METADATA chunk (as long as needed, below 256 GiB) ── 2 MiB of zeros
//! devid 2  0 ── 64 KiB superblock ── 64 MiB superblock ── 256 GiB superblock ──
//!          1 TiB DATA chunks up to the end of the lazy data ── gap up to a multiple of 128 TiB ──
//!          DATA chunks of the virtual area, if there is one ── 64 MiB of zeros
//! ```
//! Logical addresses are physical ones throughout.

use burgeon_block::{ByteRange, ChecksumKind, Digest, Result};

use crate::{
    format::{SECTOR, group},
    invalid,
};

/// Start of the lazy data, in bytes, both in the btrfs address space and on its device.
pub const DATA_START: u64 = 1 << 40;

pub(crate) const MIB: u64 = 1 << 20;
pub(crate) const GIB: u64 = 1 << 30;
pub(crate) const SYSTEM_START: u64 = MIB;
pub(crate) const SYSTEM_LEN: u64 = 32 * MIB;
pub(crate) const METADATA_START: u64 = 128 * MIB;
/// Zeros after the last chunk: libblkid looks for other signatures in a device's last 1.5 MB.
const METADATA_TAIL: u64 = 2 * MIB;
const DATA_TAIL: u64 = 64 * MIB;
/// The VFS ends at 8 EiB; tested up to 7.
const DATA_END_MAX: u64 = 7 << 60;
/// Chunks grow beyond 1 GiB if there would be more than this many, since each costs memory and
/// time at mount. 128 TiB is the largest power of two that kernels accept.
const DATA_CHUNKS_AIM: u64 = 8192;
const DATA_CHUNK_MAX: u64 = 128 << 40;
/// Length of the virtual area's chunks: the longest that kernels accept, 2^32 - 2 stripes of 64
/// KiB, since the memory of a mount grows with their number.
pub(crate) const VIRTUAL_CHUNK: u64 = (256 << 40) - (128 << 10);
/// The virtual area begins at a multiple of this.
const VIRTUAL_ALIGN: u64 = 128 << 40;
/// Largest end of a device, by the VFS's largest file, with room for zeros after the data.
const DEVICE_END_MAX: u64 = i64::MAX as u64 - GIB;
/// A superblock copy lies at 256 GiB.
const METADATA_END_MAX: u64 = 256 * GIB;

/// devid 1: the metadata. A device of its own never waits for the server of lazy data; a
/// transaction that did would abort if the server died.
pub(crate) const METADATA_DEVID: u64 = 1;
/// devid 2: the lazy data.
pub(crate) const DATA_DEVID: u64 = 2;

/// The identifiers in a seed that are the same in all its mounts.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub struct Uuids {
    /// Of the chunk tree; in every node's header.
    pub chunk_tree: [u8; 16],
    /// Of devid 1.
    pub metadata_device: [u8; 16],
    /// Of devid 2.
    pub data_device: [u8; 16],
    /// Of the private top-level subvolume.
    pub top_level: [u8; 16],
    /// Of the subvolume that holds the tree.
    pub subvolume: [u8; 16],
    /// Of the private subvolume with the virtual area; unused without one.
    pub virtual_area: [u8; 16],
}

impl Uuids {
    /// Six identifiers derived from `image` alone, in the form of random (version 4) UUIDs.
    pub fn derive(image: &Digest) -> Self {
        let one = |what: &[u8]| {
            let mut uuid = [0; 16];
            let digest = Digest::of(&[what, image.as_bytes()].concat());
            uuid.copy_from_slice(&digest.as_bytes()[..16]);
            uuid[6] = uuid[6] & 0x0f | 0x40;
            uuid[8] = uuid[8] & 0x3f | 0x80;
            uuid
        };
        Self {
            chunk_tree: one(b"chunk tree"),
            metadata_device: one(b"metadata device"),
            data_device: one(b"data device"),
            top_level: one(b"top level"),
            subvolume: one(b"subvolume"),
            virtual_area: one(b"virtual area"),
        }
    }
}

/// The options of `write_seed`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SeedOptions {
    /// Checksum kind of data blocks and of metadata nodes.
    pub checksum: ChecksumKind,
    /// End of the lazy data: an address, in bytes, a multiple of 4 KiB from [`DATA_START`] on.
    pub data_end: u64,
    /// Bytes of the virtual area, a multiple of [`Self::VIRTUAL_UNIT`] up to
    /// [`Self::VIRTUAL_BYTES_MAX`]; 0 for none.
    pub virtual_bytes: u64,
    /// Longest extent of the virtual area, in bytes, a multiple of 4 KiB; default: a chunk.
    pub virtual_extent_max: u64,
    /// Identifiers common to all mounts.
    pub uuids: Uuids,
    /// Limit of metadata bytes; a tree that needs more is refused.
    pub metadata_bytes_max: u64,
}

impl SeedOptions {
    /// 64 GiB: metadata of about a hundred million files.
    pub const METADATA_BYTES_MAX: u64 = 64 * GIB;
    /// The space below the superblock copy at 256 GiB, which limits [`Self::metadata_bytes_max`].
    pub const METADATA_BYTES_LIMIT: u64 = METADATA_END_MAX - METADATA_START - GIB;

    /// 1 GiB: the virtual area is a multiple of it, and not less.
    pub const VIRTUAL_UNIT: u64 = GIB;
    /// 7 EiB: the VFS ends at 8.
    pub const VIRTUAL_BYTES_MAX: u64 = 7 << 60;

    /// The defaults: no virtual area, crc32c, at most [`Self::METADATA_BYTES_MAX`] of metadata.
    pub fn new(data_end: u64, uuids: Uuids) -> Self {
        Self {
            checksum: ChecksumKind::Crc32c,
            data_end,
            virtual_bytes: 0,
            virtual_extent_max: VIRTUAL_CHUNK,
            uuids,
            metadata_bytes_max: Self::METADATA_BYTES_MAX,
        }
    }
}

/// A chunk and its block group: SINGLE profile, logical = physical.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Chunk {
    pub(crate) start: u64,
    pub(crate) len: u64,
    pub(crate) flags: u64,
    pub(crate) devid: u64,
    pub(crate) used: u64,
}

/// The layout of the lazy data, known before any tree is planned.
#[derive(Clone, Copy)]
pub(crate) struct DataLayout {
    pub(crate) end: u64,
    pub(crate) chunk_len: u64,
    pub(crate) extent_len_max: u64,
}

impl DataLayout {
    /// The layout for lazy data that ends at `end`, an address.
    pub(crate) fn checked(end: u64) -> Result<Self> {
        if !(DATA_START..=DATA_END_MAX).contains(&end) || !end.is_multiple_of(SECTOR) {
            return Err(invalid(format!(
                "the lazy data ends at {end}, which is not a multiple of 4096 between 1 TiB and 7 EiB"
            )));
        }
        Ok(Self::of(end))
    }

    /// The same for an `end` that was already checked.
    pub(crate) fn of(end: u64) -> Self {
        let chunk_len = (end - DATA_START).div_ceil(DATA_CHUNKS_AIM);
        let chunk_len = chunk_len.next_power_of_two().clamp(GIB, DATA_CHUNK_MAX);
        Self { end, chunk_len, extent_len_max: chunk_len / 8 }
    }

    /// The data chunks, at least one, marked unused. The last is cut to whole MiB.
    pub(crate) fn chunks(&self) -> Vec<Chunk> {
        let end = (self.end.max(DATA_START + 1)).next_multiple_of(MIB);
        let mut chunks = Vec::new();
        let mut start = DATA_START;
        while start < end {
            let len = self.chunk_len.min(end - start);
            chunks.push(Chunk { start, len, flags: group::DATA, devid: DATA_DEVID, used: 0 });
            start += len;
        }
        chunks
    }
}

/// The virtual area of `bytes` for lazy data that ends at `data_end`; `None` if `bytes` is 0.
pub(crate) fn virtual_area(data_end: u64, bytes: u64) -> Result<Option<ByteRange>> {
    if bytes == 0 {
        return Ok(None);
    }
    let unit = SeedOptions::VIRTUAL_UNIT;
    if !bytes.is_multiple_of(unit) || bytes > SeedOptions::VIRTUAL_BYTES_MAX {
        return Err(invalid(format!(
            "a virtual area of {bytes} bytes is not a multiple of 1 GiB up to 7 EiB"
        )));
    }
    // One MiB more, since the last chunk of lazy data may be longer than the data.
    let start = (data_end + MIB).next_multiple_of(VIRTUAL_ALIGN);
    let area = ByteRange::at(start, bytes).filter(|area| area.end() <= DEVICE_END_MAX);
    let area = area.ok_or_else(|| {
        invalid(format!("a virtual area of {bytes} bytes behind {data_end} would end above 8 EiB"))
    })?;
    Ok(Some(area))
}

/// The chunks of the virtual area: contiguous and full.
pub(crate) fn virtual_chunks(area: Option<ByteRange>) -> Vec<Chunk> {
    let chunk =
        |(start, len)| Chunk { start, len, flags: group::DATA, devid: DATA_DEVID, used: len };
    area.map_or(Vec::new(), |area| pieces(area, VIRTUAL_CHUNK).map(chunk).collect())
}

/// Cuts `range` into `(start, len)` of `most` bytes each; the last may be shorter.
pub(crate) fn pieces(range: ByteRange, most: u64) -> impl Iterator<Item = (u64, u64)> {
    let mut at = range.start();
    std::iter::from_fn(move || {
        let len = most.min(range.end() - at);
        at += len;
        (len > 0).then_some((at - len, len))
    })
}

/// The chunk for `used` bytes of metadata; always larger, so that free space follows.
pub(crate) fn metadata_chunk(used: u64) -> Chunk {
    let len = (used + 1).next_multiple_of(MIB);
    Chunk { start: METADATA_START, len, flags: group::METADATA, devid: METADATA_DEVID, used }
}

/// Refuses a seed if its `bytes` of metadata exceed the limit.
pub(crate) fn check_metadata_bytes(bytes: u64, options: &SeedOptions) -> Result<()> {
    let most = options.metadata_bytes_max.min(SeedOptions::METADATA_BYTES_LIMIT);
    if bytes > most {
        return Err(invalid(format!(
            "the tree needs {bytes} bytes of metadata or more; at most {most} are allowed"
        )));
    }
    Ok(())
}

pub(crate) fn system_chunk(used: u64) -> Chunk {
    Chunk {
        start: SYSTEM_START,
        len: SYSTEM_LEN,
        flags: group::SYSTEM,
        devid: METADATA_DEVID,
        used,
    }
}

/// A device as its DEV_ITEM describes it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct DevItem {
    pub(crate) id: u64,
    pub(crate) size: u64,
    pub(crate) used: u64,
    pub(crate) uuid: [u8; 16],
}

/// The devices that `chunks` lie on.
pub(crate) fn devices(chunks: &[Chunk], uuids: &Uuids) -> [DevItem; 2] {
    let on = |id: u64, tail: u64, uuid: [u8; 16]| {
        let mine = || chunks.iter().filter(move |chunk| chunk.devid == id);
        let end = mine().map(|chunk| chunk.start + chunk.len).max().unwrap_or(0);
        DevItem { id, size: end + tail, used: mine().map(|chunk| chunk.len).sum(), uuid }
    };
    [
        on(METADATA_DEVID, METADATA_TAIL, uuids.metadata_device),
        on(DATA_DEVID, DATA_TAIL, uuids.data_device),
    ]
}
