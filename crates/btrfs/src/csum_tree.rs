//! The checksum tree: the given block checksums, in items as long as a leaf allows.

use crate::{
    extents::Extents,
    format::{ITEM_HEADER, Key, LEAF_SPACE, SECTOR, kind, object},
    geometry::DATA_START,
    nodes::{ItemOut, Items},
};

/// One item: checksums of consecutive blocks.
struct Piece {
    address: u64,
    blocks: u64,
}

pub(crate) struct CsumTree<'a> {
    checksums: &'a [u8],
    size: u64,
    pieces: Vec<Piece>,
}

/// Items of a segment: 64 full leaves.
const SEGMENT: usize = 64;

impl<'a> CsumTree<'a> {
    /// `checksums` holds one of `size` bytes for each block from [`DATA_START`] to the end of the
    /// last range with checksums.
    pub(crate) fn new(extents: &Extents, checksums: &'a [u8], size: usize) -> Self {
        let size = size as u64;
        // As the kernel's MAX_CSUM_ITEMS.
        let most = (LEAF_SPACE - 2 * ITEM_HEADER) as u64 / size - 1;
        let mut pieces = Vec::new();
        for range in &extents.with_checksums {
            let mut address = range.start;
            while address < range.end() {
                let blocks = ((range.end() - address) / SECTOR).min(most);
                pieces.push(Piece { address, blocks });
                address += blocks * SECTOR;
            }
        }
        Self { checksums, size, pieces }
    }
}

impl Items for CsumTree<'_> {
    fn segments(&self) -> usize {
        self.pieces.len().div_ceil(SEGMENT)
    }

    fn emit(&self, segment: usize, out: &mut impl ItemOut) {
        for piece in self.pieces.iter().skip(segment * SEGMENT).take(SEGMENT) {
            let len = (piece.blocks * self.size) as usize;
            let at = ((piece.address - DATA_START) / SECTOR * self.size) as usize;
            out.item(Key::new(object::EXTENT_CSUM, kind::EXTENT_CSUM, piece.address), len, |to| {
                to.copy_from_slice(&self.checksums[at..at + len]);
            });
        }
    }
}
