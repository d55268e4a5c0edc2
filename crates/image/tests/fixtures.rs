//! Images made by earlier versions open, with their original content, forever. One folder for
//! each version of the formats; `examples/make_fixture.rs` made the newest.

#![allow(clippy::unwrap_used)] // helpers of tests

mod common;

use std::{fs, path::PathBuf};

use burgeon_block::{ChecksumKind, Digest};
use burgeon_btrfs::InodeBody;
use burgeon_image::{AddressMap, ManifestLimits, catalog};
use burgeon_source::Directory;

use common::*;

/// The images of version 1.
const VERSION_1: [(&str, ChecksumKind, &str); 2] = [
    (
        "crc32c",
        ChecksumKind::Crc32c,
        "946db68b9a421a9eaa10fe4b0e6b01744f14ebb4b58f5160f6884aa2884d30e5",
    ),
    (
        "xxhash64",
        ChecksumKind::Xxhash64,
        "696b548b991def16c66ef637642ade0733564f0e17cdcf1dfd975bb7c863f37f",
    ),
];

fn folder() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/v1")
}

#[test]
fn images_of_version_1_are_intact() {
    let store = Directory::open(folder().join("store")).unwrap();
    let names: Vec<_> = catalog::list(&store).unwrap();
    assert_eq!(names.len(), VERSION_1.len());
    for (name, checksum, digest) in VERSION_1 {
        let digest: Digest = digest.parse().unwrap();
        assert_eq!(catalog::resolve(&store, name).unwrap().digest().unwrap(), digest);
        let read = |object: &_, range| store.read_now(object, range);
        let verified = catalog::verify(&store, &digest, &read, &|_, _| ()).unwrap();
        assert!(verified.damage.is_empty(), "{:?}", verified.damage);

        let manifest = catalog::load(&store, &digest, &ManifestLimits::default()).unwrap();
        assert_eq!(manifest.checksum, checksum);
        let data = data(&store, &manifest);
        let file = |path| content(&manifest, &data, inode(&manifest, path));
        assert_eq!(file("dir/tiny"), b"tiny\n");
        assert_eq!(file("symlink"), b"dir/tiny");
        let pattern: Vec<u8> = (0..300_000u32).map(|n| (n / 1000) as u8).collect();
        assert!(file("dir/pattern") == pattern);
        assert_eq!(file("dir/noise").len(), 12_000);
        let sparse = file("sparse");
        assert!(sparse[1 << 20..(1 << 20) + 4096].iter().all(|byte| *byte == 7));
        assert_eq!(sparse.iter().filter(|byte| **byte != 0).count(), 4097);
        assert_eq!(data_ranges(&manifest, inode(&manifest, "sparse")).len(), 2);

        let paths = paths(&manifest.tree);
        assert_eq!(paths.len(), 10);
        assert_eq!(paths[&b"dir/link"[..]], paths[&b"dir/noise"[..]]);
        let tiny = inode(&manifest, "dir/tiny");
        assert_eq!((tiny.mode, tiny.uid, tiny.gid, tiny.mtime_s), (0o104640, 1000, 50, 3 << 29));
        assert!(matches!(tiny.body, InodeBody::Inline(_)));
        let xattr = manifest.tree.xattrs_of(tiny)[0];
        assert_eq!(manifest.tree.bytes(xattr.name), b"user.key");
        assert_eq!(manifest.tree.bytes(xattr.value), b"value");
        assert_eq!(inode(&manifest, "null").rdev, 1 << 20 | 3);
        assert_eq!(inode(&manifest, "fifo").mode & 0o170000, 0o010000);
    }
}

#[test]
fn maps_of_version_1_open() {
    let store = Directory::open(folder().join("store")).unwrap();
    for (name, checksum, digest) in VERSION_1 {
        let map = AddressMap::open(&folder().join(format!("{name}.map"))).unwrap();
        map.verify().unwrap();
        assert_eq!(map.checksum_kind(), checksum);
        let digest = digest.parse().unwrap();
        let manifest = catalog::load(&store, &digest, &ManifestLimits::default()).unwrap();
        assert_eq!(map.data_range(), manifest.data_range());
        assert_eq!(map.objects(), manifest.objects);
        for (index, chunk) in (0..).zip(&manifest.chunks) {
            let mapped = map.chunk(index);
            assert_eq!(
                (mapped.object, mapped.stored, mapped.codec, mapped.digest),
                (chunk.object, chunk.stored, chunk.codec, chunk.digest)
            );
        }
        // Current code writes the images that it opens identically.
        let rewritten = tempfile::tempdir().unwrap();
        AddressMap::from_manifest(&manifest)
            .unwrap()
            .write_to(&rewritten.path().join("map"))
            .unwrap();
        let was = fs::read(folder().join(format!("{name}.map"))).unwrap();
        assert!(fs::read(rewritten.path().join("map")).unwrap() == was);
    }
}
