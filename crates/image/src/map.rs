//! The address map: the part of an image's description that the serving process needs.
//!
//! ```text
//!   header, section table │ PARAMS │ CHUNKS 64 B each │ OBJECTS │ CHECKSUMS 4 or 8 B per block
//! ```
//!
//! A local file that is mapped, so that an idle mount costs no memory. Invariants: chunks fill
//! the lazy address space without a gap; opening verifies everything but CHECKSUMS. A wrong
//! checksum can make a good block look bad (it is fetched again), never a bad one look good, and
//! the kernel has its own copy; [`AddressMap::verify`] checks CHECKSUMS, too.

use std::{
    fs::File,
    io::Write,
    path::{Path, PathBuf},
};

use burgeon_block::{BLOCK_SIZE, ByteRange, ChecksumKind, Digest, Error, ObjectId, Result};
use burgeon_btrfs::DATA_START;
use rustix::fs::OFlags;
use zerocopy::{
    FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned,
    little_endian::{U16, U32, U64},
};

use crate::{
    CHUNK_MAX,
    chunk::{Chunk, Codec},
    container::{self, Container, Format, Section},
    corrupt,
    manifest::Manifest,
    mapped::Mapped,
    objects, open_own,
};

const FORMAT: Format = Format { magic: *b"BURGAMAP", what: "address map" };
const PARAMS: u32 = 1;
const CHUNKS: u32 = 2;
const OBJECTS: u32 = 3;
const CHECKSUMS: u32 = 4;

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned, Clone, Copy)]
#[repr(C)]
struct Params {
    blocks: U64,
    chunks: U64,
    objects: U64,
    checksum_kind: U16,
    reserved: [u8; 6],
}

/// A chunk as the map stores it: 64 bytes.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned, Clone, Copy)]
#[repr(C)]
struct MapChunk {
    /// Block number, relative to DATA_START.
    first_block: U64,
    stored_start: U64,
    stored_len: U32,
    object: U32,
    blocks: u8,
    codec: u8,
    reserved: [u8; 6],
    digest: [u8; Digest::LEN],
}

const CHUNK_LEN: usize = size_of::<MapChunk>();

/// Source of each lazy address, and checksum of each block.
pub struct AddressMap {
    bytes: Mapped,
    container: Container,
    checksum: ChecksumKind,
    blocks: u64,
    chunks: ByteRange,
    checksums: ByteRange,
    objects: Vec<ObjectId>,
    lacks_checksums: bool,
    path: Option<PathBuf>,
}

impl AddressMap {
    /// The map of an image.
    pub fn from_manifest(manifest: &Manifest) -> Result<Self> {
        Self::parse(Mapped::Owned(encode(manifest)?), None)
    }

    /// Opens a file written by [`Self::write_to`]. `Corrupt` if it is damaged,
    /// `UnsupportedFormat` if its version is unknown.
    pub fn open(path: &Path) -> Result<Self> {
        let named = |error: Error| {
            let kind = error.kind();
            Error::with_source(kind, format!("cannot use the map {}", path.display()), error)
        };
        Self::parse(Mapped::open(path)?, Some(path)).map_err(named)
    }

    /// Opens a map in memory.
    pub fn from_bytes(bytes: Vec<u8>) -> Result<Self> {
        Self::parse(Mapped::Owned(bytes), None)
    }

    fn parse(bytes: Mapped, path: Option<&Path>) -> Result<Self> {
        let container = Container::parse(FORMAT, &bytes)?;
        let params = container.read(&bytes, PARAMS, size_of::<Params>() as u64)?;
        let params = Params::read_from_bytes(&params)
            .map_err(|_| corrupt("the map's parameters are cut short"))?;
        let checksum = ChecksumKind::from_number(params.checksum_kind.get())
            .ok_or_else(|| corrupt("the map's block checksums are of an unknown kind"))?;
        container.verify(&bytes, CHUNKS)?;
        let chunks = container.raw_range(CHUNKS)?;
        let checksums = container.raw_range(CHECKSUMS)?;
        let blocks = params.blocks.get();
        let fits = blocks.checked_mul(checksum.size() as u64) == Some(checksums.len())
            && params.chunks.get().checked_mul(CHUNK_LEN as u64) == Some(chunks.len())
            && params.chunks.get() < u64::from(u32::MAX)
            && blocks.checked_mul(BLOCK_SIZE).is_some_and(|len| len < 1 << 60);
        if !fits {
            return Err(corrupt("the map's lengths do not fit together"));
        }
        let names = container.read(&bytes, OBJECTS, container.raw_len(OBJECTS)?)?;
        let objects = objects::decode(&names, params.objects.get())?;
        let path = path.map(Path::to_owned);
        let lacks_checksums = false;
        let mut map = Self {
            bytes,
            container,
            checksum,
            blocks,
            chunks,
            checksums,
            objects,
            lacks_checksums,
            path,
        };
        map.lacks_checksums = map.check_chunks()?;
        Ok(map)
    }

    /// True if the checksums of its blocks were unknown when it was made:
    /// [`Self::block_checksum`] is then meaningless.
    pub fn lacks_checksums(&self) -> bool {
        self.lacks_checksums
    }

    /// Checks all chunks; returns whether any of them is verified by its source.
    fn check_chunks(&self) -> Result<bool> {
        let (mut next, mut verified) = (0, false);
        for index in 0..self.chunk_count() {
            let chunk = self.entry(index);
            let fits = chunk.first_block.get() == next
                && (1..=CHUNK_MAX as u64 / BLOCK_SIZE).contains(&chunk.blocks.into())
                && u64::from(chunk.stored_len.get()) <= u64::from(chunk.blocks) * BLOCK_SIZE
                && ByteRange::at(chunk.stored_start.get(), chunk.stored_len.get().into()).is_some()
                && (chunk.object.get() as usize) < self.objects.len()
                && Codec::from_number(chunk.codec).is_some();
            if !fits {
                return Err(corrupt(format!("chunk {index} of the map is impossible")));
            }
            next += u64::from(chunk.blocks);
            verified |= chunk.codec == Codec::Verified as u8;
        }
        match next == self.blocks {
            true => Ok(verified),
            false => Err(corrupt("the chunks of the map leave a gap")),
        }
    }

    /// A checksum of the map's content, which identifies it.
    pub fn identity(&self) -> u64 {
        self.container.checksum()
    }

    /// Checks every byte against its checksum, including those that opening skips.
    pub fn verify(&self) -> Result<()> {
        self.container.verify(&self.bytes, CHECKSUMS)
    }

    /// Writes the map to `path`, durably and atomically (via `path` with `.tmp`).
    pub fn write_to(&self, path: &Path) -> Result<()> {
        let tmp = path.with_extension("tmp");
        let write = || {
            let mut options = File::options();
            options.write(true).create(true).truncate(true);
            let mut file = open_own(&tmp, &mut options, OFlags::empty())?;
            file.write_all(&self.bytes)?;
            file.sync_all()?;
            std::fs::rename(&tmp, path)?;
            File::open(path.parent().unwrap_or(Path::new("/")))?.sync_all()
        };
        write().map_err(|error| Error::io(format!("cannot write {}", path.display()), error))
    }

    /// The contents of its file.
    pub(crate) fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// The file it was opened from.
    pub fn path(&self) -> Option<&Path> {
        self.path.as_deref()
    }

    /// The lazy address space: whole blocks from `DATA_START` on.
    pub fn data_range(&self) -> ByteRange {
        // The length was checked when the map was read.
        ByteRange::at(DATA_START, self.blocks * BLOCK_SIZE).unwrap_or(self.chunks)
    }

    /// The kind of the block checksums.
    pub fn checksum_kind(&self) -> ChecksumKind {
        self.checksum
    }

    /// The number of chunks.
    pub fn chunk_count(&self) -> u32 {
        (self.chunks.len() / CHUNK_LEN as u64) as u32
    }

    /// The chunk that holds `address`; `None` outside [`Self::data_range`]. Takes some tens of
    /// nanoseconds to a microsecond; allocates nothing.
    pub fn chunk_at(&self, address: u64) -> Option<u32> {
        if !self.data_range().contains(address) {
            return None;
        }
        let block = (address - DATA_START) / BLOCK_SIZE;
        // A chunk has 1 to 64 blocks, which bounds the search on both sides.
        let count = self.chunk_count();
        let blocks_max = CHUNK_MAX as u64 / BLOCK_SIZE;
        let mut low = (block / blocks_max).min(u64::from(count - 1)) as u32;
        // The first guess is right if all chunks before it are of full length.
        if self.entry(low).first_block.get() + u64::from(self.entry(low).blocks) > block {
            return Some(low);
        }
        let mut high = (block + 1).min(u64::from(count)) as u32;
        while high - low > 1 {
            let middle = low + (high - low) / 2;
            if self.entry(middle).first_block.get() <= block {
                low = middle;
            } else {
                high = middle;
            }
        }
        Some(low)
    }

    /// The range of chunk `index`, which must be below [`Self::chunk_count`].
    pub fn chunk_range(&self, index: u32) -> ByteRange {
        let entry = self.entry(index);
        let start = DATA_START + entry.first_block.get() * BLOCK_SIZE;
        // It was checked when the map was read.
        ByteRange::at(start, u64::from(entry.blocks) * BLOCK_SIZE).unwrap_or(self.chunks)
    }

    /// Chunk `index`, which must be below [`Self::chunk_count`]. Allocates nothing.
    pub fn chunk(&self, index: u32) -> Chunk {
        let entry = self.entry(index);
        // It was checked when the map was read.
        let stored = ByteRange::at(entry.stored_start.get(), entry.stored_len.get().into());
        Chunk {
            range: self.chunk_range(index),
            object: entry.object.get(),
            stored: stored.unwrap_or(self.chunks),
            codec: Codec::from_number(entry.codec).unwrap_or(Codec::Raw),
            digest: entry.digest.into(),
        }
    }

    /// The checksum of the block at `address`, which must lie in [`Self::data_range`]. Allocates
    /// nothing.
    pub fn block_checksum(&self, address: u64) -> u64 {
        let size = self.checksum.size();
        let at = self.checksums.start() + (address - DATA_START) / BLOCK_SIZE * size as u64;
        let mut value = [0; 8];
        value[..size].copy_from_slice(&self.bytes[at as usize..at as usize + size]);
        u64::from_le_bytes(value)
    }

    /// Object `index`, as used in chunks.
    pub fn object(&self, index: u32) -> &ObjectId {
        &self.objects[index as usize]
    }

    /// All objects.
    pub fn objects(&self) -> &[ObjectId] {
        &self.objects
    }

    fn entry(&self, index: u32) -> &MapChunk {
        let at = self.chunks.start() as usize + index as usize * CHUNK_LEN;
        match MapChunk::ref_from_bytes(&self.bytes[at..at + CHUNK_LEN]) {
            Ok(chunk) => chunk,
            Err(_) => unreachable!("the slice has the struct's length and it needs no alignment"),
        }
    }
}

fn encode(manifest: &Manifest) -> Result<Vec<u8>> {
    let mut chunks = Vec::with_capacity(manifest.chunks.len() * CHUNK_LEN);
    let mut first_block = 0;
    for chunk in &manifest.chunks {
        let entry = MapChunk {
            first_block: first_block.into(),
            stored_start: chunk.stored.start().into(),
            stored_len: (chunk.stored.len() as u32).into(),
            object: chunk.object.into(),
            blocks: chunk.blocks,
            codec: chunk.codec as u8,
            reserved: [0; 6],
            digest: *chunk.digest.as_bytes(),
        };
        chunks.extend_from_slice(entry.as_bytes());
        first_block += u64::from(chunk.blocks);
    }
    let params = Params {
        blocks: first_block.into(),
        chunks: (manifest.chunks.len() as u64).into(),
        objects: (manifest.objects.len() as u64).into(),
        checksum_kind: (manifest.checksum as u16).into(),
        reserved: [0; 6],
    };
    let plain = |kind, raw| Section { kind, raw, level: None };
    let sections = vec![
        plain(PARAMS, params.as_bytes().to_vec()),
        plain(CHUNKS, chunks),
        plain(OBJECTS, objects::encode(&manifest.objects)),
        plain(CHECKSUMS, manifest.block_checksums.clone()),
    ];
    container::encode(FORMAT, sections)
}
