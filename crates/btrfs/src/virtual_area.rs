//! The virtual area: one huge file without data checksums, in a private subvolume of its own.
//!
//! ```text
//!   subvolume 257   "virtual" in the top level, next to "tree"
//!     inode 256     its root
//!     inode 257     "area": nodatasum, as long as the virtual area
//!       offset o ── extents ──► address start + o          every extent whole, in one chunk
//!   chunks          [ 256 TiB - 128 KiB ][ … ][ rest ]     every chunk full
//! ```
//! Mapped content is cloned from this file into a running filesystem. Nothing here depends on the
//! content mapped later: an address gets its meaning later, and only once.

use burgeon_block::{ByteRange, Result};

use crate::{
    format::{
        DIR_ENTRY, FIRST_INODE, INODE_ITEM_LEN, INODE_NODATASUM, INODE_REF_HEAD, InodeFields, Key,
        SECTOR, VIRTUAL_SUBVOLUME, file_type, kind, name_hash, put_dir_entry,
    },
    fs_tree::put_file_extent,
    geometry::{Chunk, SeedOptions, check_metadata_bytes, pieces, virtual_area, virtual_chunks},
    invalid,
    nodes::{ItemList, ItemOut},
    small_trees::Collector,
};

/// Name and number of the one file.
pub(crate) const NAME: &[u8] = b"area";
pub(crate) const INODE: u64 = FIRST_INODE + 1;
const MODE: u32 = 0o100600;
/// Metadata bytes of an extent: its items in the extent tree (with a block group) and in the
/// subvolume, and its chunk's items in the chunk, device and free space trees.
const EXTENT_COST: u64 = 78 + 49 + 78 + 105 + 73 + 33;

/// The plan of the virtual area; empty without one.
pub(crate) struct VirtualArea {
    pub(crate) range: Option<ByteRange>,
    pub(crate) chunks: Vec<Chunk>,
    /// Start and length, ascending, without a gap.
    pub(crate) extents: Vec<(u64, u64)>,
}

impl VirtualArea {
    pub(crate) fn new(options: &SeedOptions) -> Result<Self> {
        let most = options.virtual_extent_max;
        if most == 0 || !most.is_multiple_of(SECTOR) {
            return Err(invalid(format!("extents of {most} bytes are not whole blocks")));
        }
        let range = virtual_area(options.data_end, options.virtual_bytes)?;
        let chunks = virtual_chunks(range);
        let count = options.virtual_bytes.div_ceil(most) + chunks.len() as u64;
        check_metadata_bytes(count.saturating_mul(EXTENT_COST), options)?;
        let inside = |chunk: &Chunk| ByteRange::at(chunk.start, chunk.len);
        let extents =
            chunks.iter().filter_map(inside).flat_map(|chunk| pieces(chunk, most)).collect();
        Ok(Self { range, chunks, extents })
    }

    /// Approximate upper bound of its metadata.
    pub(crate) fn cost(&self) -> u64 {
        2 * self.extents.len() as u64 * EXTENT_COST
    }

    /// The chunk that begins where an extent does.
    pub(crate) fn chunk_at(&self, start: u64) -> Option<&Chunk> {
        let index = self.chunks.binary_search_by_key(&start, |chunk| chunk.start).ok()?;
        self.chunks.get(index)
    }

    /// Offset in the file of the extent at `address`.
    pub(crate) fn file_offset(&self, address: u64) -> u64 {
        address - self.range.map_or(0, ByteRange::start)
    }

    /// The subvolume with the file; `None` without a virtual area.
    pub(crate) fn subvolume(&self) -> Option<(u64, ItemList)> {
        let size = self.range?.len();
        let mut items = Collector::default();
        items.root_directory(2 * NAME.len() as u64);
        let hash = u64::from(name_hash(NAME));
        for (kind, offset) in [(kind::DIR_ITEM, hash), (kind::DIR_INDEX, 2)] {
            let key = Key::new(FIRST_INODE, kind, offset);
            items.add(key, DIR_ENTRY + NAME.len(), |put| {
                let location = Key::new(INODE, kind::INODE_ITEM, 0);
                put_dir_entry(put, location, file_type(MODE).unwrap_or(0), NAME, &[]);
            });
        }
        items.item(Key::new(INODE, kind::INODE_ITEM, 0), INODE_ITEM_LEN, |to| {
            let (bytes, flags) = (size, INODE_NODATASUM);
            InodeFields { size, bytes, links: 1, mode: MODE, flags, ..InodeFields::default() }
                .write(to);
        });
        let reference = Key::new(INODE, kind::INODE_REF, FIRST_INODE);
        items.add(reference, INODE_REF_HEAD + NAME.len(), |put| {
            put.u64(2).u16(NAME.len() as u16).bytes(NAME);
        });
        for &(start, len) in &self.extents {
            put_file_extent(INODE, self.file_offset(start), start, len, &mut items);
        }
        Some((VIRTUAL_SUBVOLUME, items.sorted()))
    }
}
