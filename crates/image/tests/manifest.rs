//! Manifests and maps: round trips of arbitrary trees, and refusal of invalid input.

#![allow(clippy::unwrap_used)] // helpers of tests

use burgeon_block::{BLOCK_SIZE, ByteRange, ChecksumKind, Digest, ErrorKind, ObjectId};
use burgeon_btrfs::{BlobRange, DATA_START, Dirent, FileExtent, Inode, InodeBody, Tree, Xattr};
use burgeon_image::{AddressMap, ChunkEntry, Codec, Manifest, ManifestLimits};
use proptest::prelude::*;

const DIR: u32 = 0o040755;
const FILE: u32 = 0o100644;

fn chunk(blocks: u8, start: u64, digest: u8) -> ChunkEntry {
    ChunkEntry {
        blocks,
        object: 0,
        stored: ByteRange::at(start, u64::from(blocks) * BLOCK_SIZE).unwrap(),
        codec: Codec::Raw,
        digest: Digest::from([digest; 32]),
    }
}

fn pack() -> ObjectId {
    ObjectId::new(format!("packs/{}", "ab".repeat(32))).unwrap()
}

struct Builder(Tree);

impl Builder {
    fn new() -> Self {
        let root = Inode { mode: DIR, ..Inode::default() };
        Self(Tree { inodes: vec![root], ..Tree::default() })
    }

    fn span(&mut self, bytes: &[u8]) -> BlobRange {
        self.0.push_bytes(bytes).unwrap()
    }

    fn name(&mut self, parent: u32, name: &[u8], inode: u32) {
        let name = self.span(name);
        self.0.dirents.push(Dirent { parent, inode, name });
    }

    fn inode(&mut self, parent: u32, name: &[u8], inode: Inode) -> u32 {
        let number = self.0.inodes.len() as u32;
        self.0.inodes.push(inode);
        self.name(parent, name, number);
        number
    }

    fn extents(&mut self, extents: &[(u64, u64, u64)]) -> InodeBody {
        let first = self.0.extents.len() as u32;
        let blocks = |n| n * BLOCK_SIZE;
        self.0.extents.extend(extents.iter().map(|(offset, address, len)| FileExtent {
            file_offset: blocks(*offset),
            address: DATA_START + blocks(*address),
            len: blocks(*len),
        }));
        InodeBody::Extents { first, count: extents.len() as u32 }
    }
}

/// Two directories, a hole, shared data, an inline file, a link, a symlink, a device, an xattr.
fn sample() -> Manifest {
    let mut tree = Builder::new();
    let dir = tree.inode(0, b"dir", Inode { mode: DIR, uid: 7, ..Inode::default() });
    let body = tree.extents(&[(0, 0, 3), (5, 1, 2)]);
    let file = Inode { mode: FILE, size: 7 * BLOCK_SIZE - 5, body, ..Inode::default() };
    let file = tree.inode(0, b"file", file);
    tree.name(0, b"link", file);
    let body = InodeBody::Inline(tree.span(b"dir/x"));
    tree.inode(0, b"sym", Inode { mode: 0o120777, size: 5, body, ..Inode::default() });
    let body = InodeBody::Inline(tree.span(b"tiny"));
    let mut tiny = Inode { mode: FILE, size: 4, body, mtime_s: -5, ..Inode::default() };
    (tiny.xattr_first, tiny.xattr_count) = (0, 1);
    let xattr = Xattr { name: tree.span(b"user.a"), value: tree.span(b"") };
    tree.0.xattrs.push(xattr);
    tree.inode(dir, b"\xff\x01", tiny);
    let node = Inode { mode: 0o020600, rdev: 5 << 20 | 1, ..Inode::default() };
    tree.inode(dir, b"node", node);
    Manifest {
        tree: tree.0,
        checksum: ChecksumKind::Crc32c,
        chunks: vec![chunk(1, 64, 1), chunk(3, 4160, 2)],
        objects: vec![pack()],
        block_checksums: (0..16).collect(),
    }
}

fn decode(bytes: &[u8]) -> burgeon_block::Result<Manifest> {
    Manifest::decode(bytes, &ManifestLimits::default())
}

/// The tree as a reader sees it, in any order of the blob.
fn seen(manifest: &Manifest) -> Vec<String> {
    let tree = &manifest.tree;
    let names = tree
        .dirents
        .iter()
        .map(|dirent| format!("{} {} {:?}", dirent.parent, dirent.inode, tree.bytes(dirent.name)));
    let inodes = tree.inodes.iter().map(|inode| {
        let body = match inode.body {
            InodeBody::Inline(span) => format!("{:?}", tree.bytes(span)),
            _ => format!("{:?}", tree.extents_of(inode)),
        };
        let xattrs = tree.xattrs_of(inode).iter();
        let xattrs: Vec<_> = xattrs.map(|x| (tree.bytes(x.name), tree.bytes(x.value))).collect();
        let plain = Inode { body: InodeBody::None, xattr_first: 0, ..*inode };
        format!("{plain:?} {body} {xattrs:?}")
    });
    names.chain(inodes).collect()
}

#[test]
fn a_manifest_round_trips_to_the_same_bytes() {
    let manifest = sample();
    let (bytes, digest) = manifest.encode(3).unwrap();
    assert_eq!(digest, Digest::of(&bytes));
    let again = decode(&bytes).unwrap();
    assert_eq!(seen(&again), seen(&manifest));
    assert_eq!((&again.chunks, &again.objects), (&manifest.chunks, &manifest.objects));
    assert_eq!(again.block_checksums, manifest.block_checksums);
    assert_eq!(again.encode(3).unwrap().0, bytes);
}

#[test]
fn the_map_agrees_with_the_manifest() {
    let manifest = sample();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("map");
    AddressMap::from_manifest(&manifest).unwrap().write_to(&path).unwrap();
    let map = AddressMap::open(&path).unwrap();
    map.verify().unwrap();
    assert_eq!(map.data_range(), manifest.data_range());
    assert_eq!(map.chunk_count(), 2);
    assert_eq!(map.chunk_at(DATA_START - 1), None);
    assert_eq!(map.chunk_at(DATA_START + 4 * BLOCK_SIZE), None);
    for (block, chunk) in [0, 1, 1, 1].into_iter().enumerate() {
        let address = DATA_START + block as u64 * BLOCK_SIZE;
        assert_eq!(map.chunk_at(address), Some(chunk));
        assert_eq!(map.chunk_at(address + BLOCK_SIZE - 1), Some(chunk));
        let checksum = &manifest.block_checksums[4 * block..4 * block + 4];
        assert_eq!(map.block_checksum(address).to_le_bytes()[..4], *checksum);
    }
    let second = map.chunk(1);
    assert_eq!(second.range, ByteRange::at(DATA_START + BLOCK_SIZE, 3 * BLOCK_SIZE).unwrap());
    assert_eq!(second.digest, manifest.chunks[1].digest);
    assert_eq!(second.stored, manifest.chunks[1].stored);
    assert_eq!(map.object(second.object), &pack());

    let bytes = std::fs::read(&path).unwrap();
    std::fs::write(&path, &bytes[..bytes.len() - 1]).unwrap();
    assert_eq!(AddressMap::open(&path).err().unwrap().kind(), ErrorKind::Corrupt);
}

/// Each change makes the manifest invalid: it can be neither written nor read.
#[test]
fn hostile_manifests_are_refused() {
    type Change = fn(&mut Manifest);
    let rename = |manifest: &mut Manifest, index: usize, name: &[u8]| {
        let name = manifest.tree.push_bytes(name).unwrap();
        manifest.tree.dirents[index].name = name;
    };
    for name in [&b""[..], b".", b"..", b"a/b", b"/etc", b"a\0b", &[b'x'; 256], b"file"] {
        let mut manifest = sample();
        rename(&mut manifest, 0, name);
        let error = manifest.encode(1).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Corrupt, "{name:?}");
    }
    let changes: &[(&str, Change)] = &[
        ("no root", |m| m.tree.inodes.clear()),
        ("root is a file", |m| m.tree.inodes[0].mode = FILE),
        ("a cycle", |m| m.tree.dirents[0].parent = 1),
        ("a directory with two names", |m| m.tree.dirents[1].inode = 1),
        ("a name for nothing", |m| m.tree.dirents[1].inode = 99),
        ("a name in a file", |m| m.tree.dirents[5].parent = 2),
        ("names of a directory in two places", |m| m.tree.dirents.swap(2, 4)),
        ("an inode without a name", |m| {
            m.tree.inodes.push(Inode { mode: FILE, ..Inode::default() })
        }),
        ("no such type", |m| m.tree.inodes[2].mode = 0o030644),
        ("more mode bits", |m| m.tree.inodes[2].mode |= 1 << 20),
        ("no such nanosecond", |m| m.tree.inodes[2].mtime_ns = 1_000_000_000),
        ("an absurd size", |m| m.tree.inodes[2].size = u64::MAX),
        ("extents beyond the end", |m| m.tree.inodes[2].size = BLOCK_SIZE),
        ("overlapping extents", |m| m.tree.extents[1].file_offset = 2 * BLOCK_SIZE),
        ("extents out of order", |m| m.tree.extents.swap(0, 1)),
        ("an unaligned extent", |m| m.tree.extents[0].address += 1),
        ("an extent before the data", |m| m.tree.extents[0].address = DATA_START - BLOCK_SIZE),
        ("an extent after the data", |m| m.tree.extents[0].len += 2 * BLOCK_SIZE),
        ("an empty extent", |m| m.tree.extents[1].len = 0),
        ("a directory with data", |m| m.tree.inodes[1].body = m.tree.inodes[2].body),
        ("a symlink of the wrong length", |m| m.tree.inodes[3].size = 4),
        ("a file with a device number", |m| m.tree.inodes[2].rdev = 1),
        ("two xattrs of one name", |m| {
            m.tree.xattrs.push(m.tree.xattrs[0]);
            m.tree.inodes[4].xattr_count = 2;
        }),
        ("a chunk too many", |m| m.chunks.push(m.chunks[0])),
        ("a chunk of no blocks", |m| m.chunks[0].blocks = 0),
        ("a chunk too long", |m| m.chunks[0].blocks = 65),
        ("a chunk in no object", |m| m.chunks[0].object = 1),
        ("a chunk stored as nothing", |m| m.chunks[0].stored = ByteRange::at(64, 0).unwrap()),
        ("a raw chunk of another length", |m| {
            m.chunks[0].stored = ByteRange::at(64, 4097).unwrap();
        }),
        ("half a checksum", |m| m.block_checksums.truncate(15)),
        ("a chunk in a manifest", |m| m.objects[0] = ObjectId::new("manifests/x").unwrap()),
        ("a chunk in the clouds", |m| {
            m.objects[0] = ObjectId::new("packs/../x").unwrap_or(ObjectId::new("packs/x").unwrap())
        }),
    ];
    for (what, change) in changes {
        let mut manifest = sample();
        change(&mut manifest);
        let error = manifest.encode(1).expect_err(what);
        assert_eq!(error.kind(), ErrorKind::Corrupt, "{what}: {error}");
    }
}

#[test]
fn manifests_beyond_the_limits_are_refused() {
    let (bytes, _) = sample().encode(1).unwrap();
    let usual = ManifestLimits::default();
    for limits in [
        ManifestLimits { bytes_max: 100, ..usual },
        ManifestLimits { data_max: 3 * BLOCK_SIZE, ..usual },
        ManifestLimits { items_max: 2, ..usual },
    ] {
        let error = Manifest::decode(&bytes, &limits).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
    }
}

#[test]
fn every_flipped_bit_and_truncation_is_found() {
    let (bytes, _) = sample().encode(1).unwrap();
    for at in 0..bytes.len() {
        for bit in 0..8 {
            let mut bad = bytes.clone();
            bad[at] ^= 1 << bit;
            assert!(decode(&bad).is_err(), "bit {bit} of byte {at}");
        }
        assert!(decode(&bytes[..at]).is_err(), "cut at {at}");
    }
}

prop_compose! {
    fn arbitrary_manifest()(
        files in prop::collection::vec(
            (any::<u64>(), prop::collection::vec(any::<u8>(), 0..300), 0u64..6, any::<u16>()),
            0..40,
        ),
        blocks in prop::collection::vec(1u8..=64, 1..6),
        xxhash in any::<bool>(),
    ) -> Manifest {
        let total: u64 = blocks.iter().map(|n| u64::from(*n)).sum();
        let mut tree = Builder::new();
        let mut dirs = vec![0u32];
        let mut named = Vec::new();
        for (number, (random, bytes, kind, small)) in files.into_iter().enumerate() {
            let parent = dirs[random as usize % dirs.len()];
            let mut name = number.to_string().into_bytes();
            name.extend(bytes.iter().filter(|b| **b != 0 && **b != b'/').take(200));
            let mut inode = Inode {
                uid: random as u32, gid: (random >> 32) as u32, mtime_s: random as i64,
                mtime_ns: (random % 1_000_000_000) as u32, ..Inode::default()
            };
            let number = tree.0.inodes.len() as u32;
            match kind {
                0 => { inode.mode = DIR; dirs.push(number); }
                1 if !bytes.is_empty() => {
                    inode.mode = FILE | 0o4000;
                    inode.size = bytes.len() as u64;
                    inode.body = InodeBody::Inline(tree.span(&bytes));
                }
                2 => { inode.mode = 0o060600; inode.rdev = random; }
                3 => {
                    inode.mode = FILE;
                    let at = u64::from(small) % total;
                    let hole = random % 1000;
                    inode.body = tree.extents(&[(hole, at, total - at), (hole + total, 0, 1)]);
                    inode.size = (hole + total + 1) * BLOCK_SIZE - random % BLOCK_SIZE;
                }
                _ => {
                    inode.mode = 0o010000 | u32::from(small) & 0o7777;
                    inode.xattr_first = tree.0.xattrs.len() as u32;
                    inode.xattr_count = 1;
                    let xattr = Xattr { name: tree.span(b"user.x"), value: tree.span(&bytes) };
                    tree.0.xattrs.push(xattr);
                }
            }
            tree.0.inodes.push(inode);
            named.push((parent, number, name));
        }
        named.sort();
        for (parent, number, name) in named {
            tree.name(parent, &name, number);
        }
        let mut start = 0;
        let chunks = blocks.iter().enumerate().map(|(index, blocks)| {
            let mut entry = chunk(*blocks, 0, index as u8);
            entry.stored = ByteRange::at(start, 100).unwrap();
            entry.codec = Codec::Zstd;
            start += 100 + u64::from(*blocks);
            entry
        }).collect();
        let checksum = if xxhash { ChecksumKind::Xxhash64 } else { ChecksumKind::Crc32c };
        let block_checksums = (0..total as usize * checksum.size()).map(|n| n as u8).collect();
        Manifest { tree: tree.0, checksum, chunks, objects: vec![pack()], block_checksums }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn arbitrary_manifests_round_trip(manifest in arbitrary_manifest()) {
        let (bytes, digest) = manifest.encode(1).unwrap();
        let again = decode(&bytes).unwrap();
        prop_assert_eq!(seen(&again), seen(&manifest));
        prop_assert_eq!(&again.chunks, &manifest.chunks);
        prop_assert_eq!(again.encode(1).unwrap().1, digest);
        let map = AddressMap::from_manifest(&manifest).unwrap();
        let addresses = manifest.chunk_addresses();
        for (index, pair) in (0u32..).zip(addresses.windows(2)) {
            prop_assert_eq!(map.chunk_at(pair[0]), Some(index));
            prop_assert_eq!(map.chunk_at(pair[1] - 1), Some(index));
            prop_assert_eq!(map.chunk(index).range, ByteRange::new(pair[0], pair[1]).unwrap());
        }
    }

    #[test]
    fn arbitrary_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..400)) {
        prop_assert!(decode(&bytes).is_err());
        prop_assert!(AddressMap::from_bytes(bytes).is_err());
    }
}
