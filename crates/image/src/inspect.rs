use burgeon_block::ByteRange;
use burgeon_btrfs::Dirent;

use crate::{Codec, Manifest, Paths};

/// A line of `inspect --map`: a piece of a file and its location.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct MapLine {
    /// Path in the image, from `/` on; a file with hard links has lines for every name.
    pub path: Vec<u8>,
    /// Offset in the file, in bytes.
    pub file_offset: u64,
    /// Lazy addresses: the piece of the extent that lies in one chunk.
    pub addresses: ByteRange,
    /// The chunk's number.
    pub chunk: u32,
    /// Index of the object that holds the chunk, in [`Manifest::objects`].
    pub object: u32,
    /// Range of the chunk in the object.
    pub stored: ByteRange,
    /// Its encoding.
    pub codec: Codec,
}

impl Manifest {
    /// File → address → chunk → object, file by file in listing order. Files without lazy data
    /// have no line. Takes 8 bytes of memory per chunk and per inode.
    pub fn map_lines(&self) -> impl Iterator<Item = MapLine> + '_ {
        let paths = Paths::new(&self.tree);
        let addresses = self.chunk_addresses();
        self.tree.dirents.iter().flat_map(move |dirent| lines_of(self, dirent, &paths, &addresses))
    }
}

fn lines_of(
    manifest: &Manifest,
    dirent: &Dirent,
    paths: &Paths<'_>,
    addresses: &[u64],
) -> Vec<MapLine> {
    let Some(inode) = manifest.tree.inodes.get(dirent.inode as usize) else { return vec![] };
    let extents = manifest.tree.extents_of(inode);
    if extents.is_empty() {
        return vec![];
    }
    let path = paths.of_dirent(dirent);
    let mut lines = Vec::new();
    for extent in extents {
        let Some(range) = ByteRange::at(extent.address, extent.len) else { continue };
        let first = addresses.partition_point(|start| *start <= range.start()).saturating_sub(1);
        for (index, pair) in addresses.windows(2).enumerate().skip(first) {
            let chunk = &manifest.chunks[index];
            let part = ByteRange::new(pair[0], pair[1]).and_then(|chunk| chunk.intersect(range));
            let Some(part) = part else { break };
            lines.push(MapLine {
                path: path.clone(),
                file_offset: extent.file_offset + (part.start() - range.start()),
                addresses: part,
                chunk: index as u32,
                object: chunk.object,
                stored: chunk.stored,
                codec: chunk.codec,
            });
        }
    }
    lines
}
