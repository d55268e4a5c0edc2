//! The description of a seed in a few hundred bytes: all that superblocks and patching need. Byte
//! table: `docs/format-seed.md`.

use burgeon_block::{ByteRange, ChecksumKind, Error, ErrorKind, Result};

use crate::{
    format::{GENERATION, NODE_SIZE, Put},
    geometry::{
        Chunk, DATA_START, DataLayout, DevItem, METADATA_START, SYSTEM_LEN, SYSTEM_START,
        SeedOptions, Uuids, devices, metadata_chunk, system_chunk, virtual_area, virtual_chunks,
    },
};

const MAGIC: &[u8; 8] = b"BURGSEED";
const VERSION: u32 = 1;
/// Incompatible feature: there is a virtual area.
const VIRTUAL_AREA: u32 = 1;
/// Devices of every seed.
const DEVICES: u8 = 2;

/// The position of a tree's root node.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TreeRoot {
    /// Its address in bytes, on the metadata device.
    pub address: u64,
    /// Its level; 0 is a leaf.
    pub level: u8,
}

/// Describes a seed written by `write_seed`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SeedInfo {
    /// Checksum kind of nodes and data blocks.
    pub checksum: ChecksumKind,
    /// Identifiers common to all mounts.
    pub uuids: Uuids,
    /// End of the lazy data, an address in bytes.
    pub data_end: u64,
    /// Addresses of the virtual area, if there is one. Its offset `o` is at address `start + o`
    /// of the data device.
    pub virtual_area: Option<ByteRange>,
    /// Bytes of nodes in the system chunk.
    pub system_used: u64,
    /// Bytes of nodes in the metadata chunk.
    pub metadata_used: u64,
    /// Bytes used in all chunks together.
    pub bytes_used: u64,
    /// Root of the root tree.
    pub root: TreeRoot,
    /// Root of the chunk tree.
    pub chunk_root: TreeRoot,
}

impl SeedInfo {
    /// Bytes of the encoded form.
    pub const ENCODED_LEN: usize = 240;
    const CHECKSUM_AT: usize = Self::ENCODED_LEN - 8;

    /// The generation of every node.
    pub fn generation(&self) -> u64 {
        GENERATION
    }

    /// Size in bytes of devid 1, which holds the metadata.
    pub fn metadata_device_size(&self) -> u64 {
        self.device_table()[0].size
    }

    /// Size in bytes of the device with the lazy data.
    pub fn data_device_size(&self) -> u64 {
        self.device_table()[1].size
    }

    /// Range of the chunk tree's nodes on the metadata device.
    pub fn chunk_nodes(&self) -> ByteRange {
        range(SYSTEM_START, self.system_used)
    }

    /// Range of all other nodes on the metadata device.
    pub fn metadata_nodes(&self) -> ByteRange {
        range(METADATA_START, self.metadata_used)
    }

    pub(crate) fn layout(&self) -> DataLayout {
        DataLayout::of(self.data_end)
    }

    /// All chunks; the used bytes of data chunks are not recorded.
    pub(crate) fn chunks(&self) -> Vec<Chunk> {
        let mut chunks = vec![system_chunk(self.system_used), metadata_chunk(self.metadata_used)];
        chunks.extend(self.layout().chunks());
        chunks.extend(virtual_chunks(self.virtual_area));
        chunks
    }

    pub(crate) fn device_table(&self) -> [DevItem; 2] {
        devices(&self.chunks(), &self.uuids)
    }

    /// The encoded form: versioned, checksummed, [`Self::ENCODED_LEN`] bytes.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = vec![0; Self::ENCODED_LEN];
        let mut put = Put::new(&mut bytes);
        let incompat = if self.virtual_area.is_some() { VIRTUAL_AREA } else { 0 };
        put.bytes(MAGIC).u32(VERSION).zeros(8).u32(incompat).u32(Self::ENCODED_LEN as u32);
        put.u16(self.checksum as u16).u8(DEVICES);
        put.u8(self.root.level).u8(self.chunk_root.level).zeros(7);
        put.u64s(&[self.data_end, self.system_used, self.metadata_used, self.bytes_used]);
        put.u64s(&[self.root.address, self.chunk_root.address]);
        let uuids = &self.uuids;
        put.bytes(&uuids.chunk_tree).bytes(&uuids.metadata_device).bytes(&uuids.data_device);
        put.bytes(&uuids.top_level).bytes(&uuids.subvolume).bytes(&uuids.virtual_area);
        put.u64(self.virtual_area.map_or(0, ByteRange::len));
        let sum = ChecksumKind::Xxhash64.of(&bytes[..Self::CHECKSUM_AT]);
        bytes[Self::CHECKSUM_AT..].copy_from_slice(&sum.to_le_bytes());
        bytes
    }

    /// Decodes the output of [`Self::to_bytes`]. Errors: `UnsupportedFormat` for an unknown
    /// version or feature, `Corrupt` for anything else.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self> {
        let corrupt = |why: &str| {
            Error::new(ErrorKind::Corrupt, format!("the description of a seed is damaged: {why}"))
        };
        if bytes.len() < 24 || !bytes.starts_with(MAGIC) {
            return Err(corrupt("it does not begin as one"));
        }
        let get = Get(bytes);
        let (version, incompat) = (get.u32(8), get.u32(20));
        if version != VERSION || incompat & !VIRTUAL_AREA != 0 {
            return Err(Error::new(
                ErrorKind::UnsupportedFormat,
                format!("a seed of version {version}, features {incompat:#x}: upgrade Burgeon"),
            ));
        }
        let sum = |bytes: &[u8]| ChecksumKind::Xxhash64.of(&bytes[..Self::CHECKSUM_AT]);
        if bytes.len() != Self::ENCODED_LEN
            || get.u32(24) as usize != bytes.len()
            || get.u64(Self::CHECKSUM_AT) != sum(bytes)
        {
            return Err(corrupt("its length or checksum is wrong"));
        }
        let kind = ChecksumKind::from_number(u16::from_le_bytes([bytes[28], bytes[29]]));
        let Some(checksum) = kind.filter(|_| bytes[30] == DEVICES) else {
            return Err(corrupt("its checksum kind or number of devices is unknown"));
        };
        let info = Self {
            checksum,
            uuids: Uuids {
                chunk_tree: get.uuid(88),
                metadata_device: get.uuid(104),
                data_device: get.uuid(120),
                top_level: get.uuid(136),
                subvolume: get.uuid(152),
                virtual_area: get.uuid(168),
            },
            data_end: get.u64(40),
            virtual_area: None,
            system_used: get.u64(48),
            metadata_used: get.u64(56),
            bytes_used: get.u64(64),
            root: TreeRoot { address: get.u64(72), level: bytes[31] },
            chunk_root: TreeRoot { address: get.u64(80), level: bytes[32] },
        };
        let senseless = || corrupt("its numbers make no sense");
        let virtual_bytes = get.u64(184);
        if (incompat == VIRTUAL_AREA) != (virtual_bytes > 0) {
            return Err(senseless());
        }
        info.check(virtual_bytes).ok_or_else(senseless)
    }

    /// Checks the assumptions of arithmetic on the fields, and adds the virtual area.
    fn check(mut self, virtual_bytes: u64) -> Option<Self> {
        let node = NODE_SIZE as u64;
        let used =
            |bytes: u64, most: u64| (bytes.is_multiple_of(node) && bytes <= most).then_some(());
        used(self.system_used, SYSTEM_LEN)?;
        used(self.metadata_used, SeedOptions::METADATA_BYTES_LIMIT)?;
        DataLayout::checked(self.data_end).ok()?;
        self.virtual_area = virtual_area(self.data_end, virtual_bytes).ok()?;
        let nodes = self.system_used + self.metadata_used;
        (self.bytes_used <= self.data_end - DATA_START + nodes + virtual_bytes).then_some(())?;
        let inside = |root: TreeRoot, nodes: ByteRange| {
            let whole = ByteRange::at(root.address, node)?;
            (nodes.covers(whole) && root.level < 8).then_some(())
        };
        inside(self.root, self.metadata_nodes())?;
        inside(self.chunk_root, self.chunk_nodes())?;
        Some(self)
    }
}

fn range(start: u64, len: u64) -> ByteRange {
    ByteRange::at(start, len).unwrap_or_else(|| unreachable!("bounded by the layout"))
}

/// Reads fields of a buffer of known length.
struct Get<'a>(&'a [u8]);

impl Get<'_> {
    fn array<const N: usize>(&self, at: usize) -> [u8; N] {
        let mut array = [0; N];
        array.copy_from_slice(&self.0[at..at + N]);
        array
    }

    fn u32(&self, at: usize) -> u32 {
        u32::from_le_bytes(self.array(at))
    }

    fn u64(&self, at: usize) -> u64 {
        u64::from_le_bytes(self.array(at))
    }

    fn uuid(&self, at: usize) -> [u8; 16] {
        self.array(at)
    }
}
