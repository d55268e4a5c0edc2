//! The manifest: the description of an image, without its data.
//!
//! ```text
//!   PARAMS   counts and lengths               INODES   columns    DIRENTS  columns   NAMES  bytes
//!   INLINE   small files, symlink targets     XATTRS   columns    XATTR_BYTES      EXTENTS columns
//!   CHUNKS   columns, DIGESTS 32 B each       CHECKSUMS one per 4 KiB block, as in btrfs
//!   OBJECTS  names of packs
//! ```
//!
//! Spans are not stored: names, bodies and xattrs are stored in the order of their owners, so a
//! tree has exactly one encoding, and no encoding can point out of bounds. Columns are byte
//! planes (all lowest bytes, then all second bytes, …), which compress well with zstd.
//!
//! Invariants: the result of [`Manifest::decode`] satisfies every rule in `validate.rs`; the same
//! manifest encodes to the same bytes. The property tests in `tests/` check both.

mod decode;
mod encode;
mod validate;

use burgeon_block::{BLOCK_SIZE, ByteRange, ChecksumKind, Digest, ObjectId};
use burgeon_btrfs::{DATA_START, Tree};
use zerocopy::{
    FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned,
    little_endian::{U16, U64},
};

use crate::{chunk::Codec, container::Format};

const FORMAT: Format = Format { magic: *b"BURGMANI", what: "manifest" };

const PARAMS: u32 = 1;
const INODES: u32 = 2;
const DIRENTS: u32 = 3;
const NAMES: u32 = 4;
const INLINE: u32 = 5;
const EXTENTS: u32 = 6;
const XATTRS: u32 = 7;
const XATTR_BYTES: u32 = 8;
const CHUNKS: u32 = 9;
const DIGESTS: u32 = 10;
const CHECKSUMS: u32 = 11;
const OBJECTS: u32 = 12;

const INODE_WIDTHS: [usize; 10] = [2, 4, 4, 8, 8, 8, 4, 1, 4, 2];
const DIRENT_WIDTHS: [usize; 3] = [4, 4, 1];
const EXTENT_WIDTHS: [usize; 3] = [8, 8, 8];
const XATTR_WIDTHS: [usize; 2] = [1, 2];
const CHUNK_WIDTHS: [usize; 5] = [1, 1, 4, 8, 4];

const BODY_NONE: u64 = 0;
const BODY_INLINE: u64 = 1;
const BODY_EXTENTS: u64 = 2;
const NODATASUM: u64 = 0x80;

/// Section PARAMS.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned, Clone, Copy, Default)]
#[repr(C)]
struct Params {
    inodes: U64,
    dirents: U64,
    names_len: U64,
    inline_len: U64,
    extents: U64,
    xattrs: U64,
    xattr_bytes_len: U64,
    chunks: U64,
    blocks: U64,
    objects: U64,
    objects_len: U64,
    checksum_kind: U16,
    reserved: [u8; 6],
}

/// A row of the chunk table. Chunks are contiguous from `DATA_START`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ChunkEntry {
    /// Length in blocks of 4 KiB, 1 to 64.
    pub blocks: u8,
    /// Index of the object that holds it.
    pub object: u32,
    /// Range in the object.
    pub stored: ByteRange,
    /// Encoding of the stored bytes.
    pub codec: Codec,
    /// BLAKE3 of the raw bytes; of [`Codec::Verified`] [`crate::Chunk::digest`].
    pub digest: Digest,
}

impl ChunkEntry {
    /// Length in bytes.
    pub fn len(&self) -> u64 {
        u64::from(self.blocks) * BLOCK_SIZE
    }

    /// Never true for a valid chunk.
    pub fn is_empty(&self) -> bool {
        self.blocks == 0
    }
}

/// The description of an image, without its data.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Manifest {
    /// Names, attributes, and the position of each file's content.
    pub tree: Tree,
    /// The kind of [`Self::block_checksums`].
    pub checksum: ChecksumKind,
    /// The lazy address space, chunk by chunk.
    pub chunks: Vec<ChunkEntry>,
    /// The objects that hold chunks.
    pub objects: Vec<ObjectId>,
    /// One checksum for each block of the lazy address space, little-endian, dense.
    pub block_checksums: Vec<u8>,
}

impl Manifest {
    /// The lazy address space.
    pub fn data_range(&self) -> ByteRange {
        let blocks = (self.block_checksums.len() / self.checksum.size()) as u64;
        ByteRange::at(DATA_START, blocks * BLOCK_SIZE).unwrap_or(EMPTY)
    }

    /// True if the data was never read completely: no file has checksums in btrfs then, and
    /// [`Self::block_checksums`] are zeros.
    pub fn lacks_checksums(&self) -> bool {
        self.chunks.iter().any(|chunk| chunk.codec == Codec::Verified)
    }

    /// Address of each chunk, and one past the last.
    pub fn chunk_addresses(&self) -> Vec<u64> {
        let mut next = DATA_START;
        let starts = self.chunks.iter().map(|chunk| {
            let address = next;
            next += chunk.len();
            address
        });
        let mut addresses: Vec<u64> = starts.collect();
        addresses.push(next);
        addresses
    }
}

const EMPTY: ByteRange = match ByteRange::at(DATA_START, 0) {
    Some(range) => range,
    None => unreachable!(),
};

/// Limits on the resources that a manifest may require.
#[derive(Clone, Copy, Debug)]
pub struct ManifestLimits {
    /// Decoded bytes of all sections together.
    pub bytes_max: u64,
    /// Bytes of lazy data.
    pub data_max: u64,
    /// Extent items that the btrfs writer has to make of the extents, which may overlap.
    pub items_max: u64,
}

impl Default for ManifestLimits {
    /// 8 GiB decoded (some 50 million files), 1 PiB of data, 2³⁰ items.
    fn default() -> Self {
        Self { bytes_max: 8 << 30, data_max: 1 << 50, items_max: 1 << 30 }
    }
}

/// Longest encoded manifest, in bytes, that is read from a store: 4 GiB.
pub(crate) const ENCODED_MAX: u64 = 4 << 30;
