use std::sync::Arc;

use burgeon_block::{BLOCK_SIZE, ByteRange, ChecksumKind, Digest, ObjectId};
use burgeon_btrfs::{DATA_START, Tree};
use burgeon_image::{AddressMap, ChunkEntry, Codec, Manifest};
use testkit::Rng;

/// An image small enough to know by heart: its map, every byte of it, and the objects that a
/// sound source serves.
pub struct Model {
    /// The volume's address map.
    pub map: Arc<AddressMap>,
    /// The bytes from `DATA_START` on.
    pub bytes: Vec<u8>,
    /// Objects and their content.
    pub objects: Vec<(ObjectId, Vec<u8>)>,
    /// The source verifies its answers, and the map knows neither digests nor checksums.
    pub(crate) verified: bool,
    /// Chunks of which the map has a wrong checksum, though a right digest.
    pub(crate) slandered: Vec<u32>,
}

/// The object that is read straight through; chunk [`THROUGH_CHUNK`] lies in it.
pub(crate) const THROUGH: &str = "file/disk";
const THROUGH_CHUNK: usize = 2;

impl Model {
    /// An image of `chunks` chunks whose lengths depend on `shape`, and whose bytes on `content`
    /// or, if they are shared, on `shape` alone; in a pack named after `content` and a file outside
    /// the store. If it is `verified`, its chunks are in a derived object instead, of layers that
    /// nobody has read.
    pub fn new(shape: u64, content: u64, chunks: usize, verified: bool) -> Self {
        Self::slandering(shape, content, chunks, verified, false)
    }

    /// The same, with wrong checksums for some blocks of cached chunks: an image that would make
    /// the cache forget them.
    pub(crate) fn slandering(
        shape: u64,
        content: u64,
        chunks: usize,
        verified: bool,
        slanders: bool,
    ) -> Self {
        let (mut lengths, mut rng) = (Rng::new(shape), Rng::new(content));
        let kind = *rng.pick(&[ChecksumKind::Crc32c, ChecksumKind::Xxhash64]);
        let mut bytes = Vec::new();
        let mut stored = [Vec::new(), Vec::new()];
        let mut entries = Vec::new();
        let mut of_content = Rng::new(content);
        let (mut checksums, mut slandered) = (Vec::new(), Vec::new());
        // Manifests of earlier versions have no identities.
        let is_of_earlier = content.is_multiple_of(4);
        for index in 0..chunks {
            let blocks = *lengths.pick(&[1, 2, 3, 5, 16, 64]) as u8;
            let mut rng = match lengths.below(3) {
                0 => Rng::new(shape ^ (index as u64 + 1) << 32),
                _ => Rng::new(of_content.bits()),
            };
            let raw = content_of(&mut rng, blocks);
            let object = usize::from(index == THROUGH_CHUNK && !verified);
            let compress = object == 0 && rng.below(2) == 0 && !verified;
            let (codec, pack) = match compress.then(|| zstd::bulk::compress(&raw, 1)) {
                Some(Ok(pack)) => (Codec::Zstd, pack),
                _ if verified && object == 0 => (Codec::Verified, raw.clone()),
                _ => (Codec::Raw, raw[..stored_len(&raw)].to_vec()),
            };
            let start = stored[object].len() as u64;
            entries.push(ChunkEntry {
                blocks,
                object: object as u32,
                stored: range(start, pack.len() as u64),
                codec,
                // Of a verified chunk the identity that the source gives it.
                digest: match codec {
                    Codec::Verified if is_of_earlier => Digest::from([0; Digest::LEN]),
                    _ => Digest::of(&raw),
                },
            });
            let is_slandered = slanders && object == 0 && !verified && of_content.below(2) == 0;
            if is_slandered {
                slandered.push(index as u32);
            }
            let sums = raw.chunks(BLOCK_SIZE as usize).map(|block| match verified {
                true => 0,
                // The first block, and no other.
                false => kind.of(block) ^ u64::from(is_slandered && block == &raw[..block.len()]),
            });
            checksums.extend(sums.flat_map(|sum| sum.to_le_bytes().into_iter().take(kind.size())));
            stored[object].extend(pack);
            bytes.extend(raw);
        }
        let first = match verified {
            true => format!("derived/{}", Digest::of(&content.to_le_bytes())),
            false => format!("packs/{content}"),
        };
        let names = [first, THROUGH.to_owned()];
        let names = names.map(|name| match ObjectId::new(name) {
            Ok(name) => name,
            Err(error) => unreachable!("{error}"),
        });
        let manifest = Manifest {
            tree: Tree::default(),
            checksum: kind,
            chunks: entries,
            objects: names.to_vec(),
            block_checksums: checksums,
        };
        let map = match AddressMap::from_manifest(&manifest) {
            Ok(map) => Arc::new(map),
            Err(error) => unreachable!("the model's own manifest: {error}"),
        };
        let objects = names.into_iter().zip(stored).collect();
        Self { map, bytes, objects, verified, slandered }
    }

    /// Lazy addresses of the image.
    pub fn range(&self) -> ByteRange {
        self.map.data_range()
    }

    /// The content of `range` of the image.
    pub fn expected(&self, range: ByteRange) -> &[u8] {
        &self.bytes[(range.start() - DATA_START) as usize..][..range.len() as usize]
    }

    /// Bytes that the cache can come to hold.
    pub fn cacheable_bytes(&self) -> u64 {
        let chunks = (0..self.map.chunk_count()).map(|index| self.map.chunk(index));
        chunks.filter(|chunk| chunk.object == 0).map(|chunk| chunk.range.len()).sum()
    }

    /// True if all of `range` can come to lie in the cache.
    pub fn cacheable(&self, range: ByteRange) -> bool {
        (0..self.map.chunk_count()).all(|index| {
            let chunk = self.map.chunk(index);
            chunk.object == 0 || chunk.range.intersect(range).is_none()
        })
    }
}

/// Compressible bytes; no two blocks are alike, and the last may end in zeros.
fn content_of(rng: &mut Rng, blocks: u8) -> Vec<u8> {
    let mut raw = rng.bytes(usize::from(blocks) * BLOCK_SIZE as usize);
    for part in raw.chunks_mut(64) {
        let fill = part[0];
        part[8..].fill(fill);
    }
    if rng.below(3) == 0 {
        let len = raw.len();
        raw[len - 1 - rng.below(BLOCK_SIZE - 1) as usize..].fill(0);
    }
    raw
}

/// Length without the zeros that pad the last block: they need not be stored.
fn stored_len(raw: &[u8]) -> usize {
    let last_block = raw.len() - BLOCK_SIZE as usize;
    raw.iter().rposition(|byte| *byte != 0).map_or(1, |last| last + 1).max(last_block + 1)
}

pub(crate) fn range(start: u64, len: u64) -> ByteRange {
    match ByteRange::at(start, len) {
        Some(range) => range,
        None => unreachable!("a range of the model overflows"),
    }
}
