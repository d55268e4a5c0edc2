//! Profiles: made of addresses, merged, translated to another image, read back, and used by
//! builds.

#![allow(clippy::unwrap_used)] // helpers of tests

mod common;

use std::{fs, path::Path, time::Duration};

use burgeon_block::{ByteRange, ChecksumKind, Digest, ErrorKind, ObjectStore};
use burgeon_btrfs::{Dirent, FileExtent, Inode, InodeBody, Tree};
use burgeon_image::{
    DATA_START, Manifest, Profile, ProfileRead, builder, catalog, list_profiles, load_profile,
    profile_object, publish_profile, remove_profile,
};

use common::*;

const BLOCK: u64 = 4096;

fn plant(root: &Path) {
    fs::create_dir_all(root.join("lib")).unwrap();
    for (name, seed, len) in
        [("a", 1, 20_000), ("b", 2, 9_000), ("big", 3, 1_500_000), ("c", 4, 12_000)]
    {
        fs::write(root.join("lib").join(name), noise(seed, len)).unwrap();
    }
    fs::write(root.join("tiny"), b"tiny").unwrap();
}

/// The lazy addresses of `len` bytes of a file from `offset` on, which lie in one extent.
fn addresses(manifest: &Manifest, path: &str, offset: u64, len: u64) -> ByteRange {
    let extents = manifest.tree.extents_of(inode(manifest, path));
    let extent = extents.iter().find(|e| e.file_offset + e.len > offset).unwrap();
    ByteRange::at(extent.address + offset - extent.file_offset, len).unwrap()
}

/// Path, offset and length of each read.
fn reads(profile: &Profile) -> Vec<(String, u64, u64)> {
    let path = |file: u32| String::from_utf8(profile.files[file as usize].clone()).unwrap();
    profile.reads.iter().map(|read| (path(read.file), read.offset, read.len)).collect()
}

fn read(path: &str, offset: u64, len: u64) -> (String, u64, u64) {
    (path.to_owned(), offset, len)
}

#[test]
fn addresses_become_files_in_order_and_runs_are_merged() {
    let (folder, store) = store();
    plant(&folder.path().join("tree"));
    let report = from_directory(&store, "x", &folder.path().join("tree"));
    let (manifest, image) = (load(&store, &report), report.image.digest().unwrap());
    let at = |path, offset, len| addresses(&manifest, path, offset, len);
    let order = [
        at("lib/c", 0, BLOCK),
        at("lib/big", 8 * BLOCK, 4 * BLOCK),
        at("lib/a", BLOCK, 1),
        at("lib/big", 10 * BLOCK, 4 * BLOCK),
        ByteRange::at(0, BLOCK).unwrap(),
        ByteRange::at(u64::MAX - BLOCK, BLOCK).unwrap(),
    ];
    let first = Profile::of(&manifest, image, &order);
    assert_eq!(
        reads(&first),
        [
            read("/lib/c", 0, BLOCK),
            read("/lib/big", 8 * BLOCK, 4 * BLOCK),
            read("/lib/a", BLOCK, BLOCK),
            read("/lib/big", 12 * BLOCK, 2 * BLOCK),
        ]
    );
    assert_eq!((first.runs, first.bytes()), (1, 8 * BLOCK));
    let places: Vec<_> = first.addresses().collect();
    assert_eq!(places[1], order[1]);

    let second =
        Profile::of(&manifest, image, &[at("lib/big", 9 * BLOCK, BLOCK), at("lib/b", 0, BLOCK)]);
    let merged = first.merge(&second);
    assert_eq!(
        reads(&merged),
        [
            read("/lib/big", 9 * BLOCK, BLOCK),
            read("/lib/b", 0, BLOCK),
            read("/lib/c", 0, BLOCK),
            read("/lib/big", 8 * BLOCK, BLOCK),
            read("/lib/big", 10 * BLOCK, 2 * BLOCK),
            read("/lib/a", BLOCK, BLOCK),
            read("/lib/big", 12 * BLOCK, 2 * BLOCK),
        ]
    );
    assert_eq!(merged.runs, 2);
    let piece = merged.reads[4];
    assert_eq!(piece.addresses(), at("lib/big", 10 * BLOCK, 2 * BLOCK));
    // Ranges that no run reads any more are dropped eventually; those that all runs read stay.
    let many = (0..20).fold(first, |profile, _| profile.merge(&second));
    assert_eq!(reads(&many), reads(&second));
    assert_eq!(many.runs, 21);
}

/// A hostile profile may name as many ranges of one file as that file has extents.
#[test]
fn many_ranges_of_a_file_with_many_extents_cost_little() {
    const COUNT: u64 = 100_000;
    let folder = tempfile::tempdir().unwrap();
    let input = || folder.path().to_owned();
    let name = "many_ranges_of_a_file_with_many_extents_cost_little";
    let taken = testkit::measure(name, "translate", input, |_| {
        let (root, file) = (Inode { mode: 0o040755, ..Inode::default() }, 0o100644);
        let body = InodeBody::Extents { first: 0, count: COUNT as u32 };
        let file = Inode { mode: file, size: COUNT * 2 * BLOCK, body, ..Inode::default() };
        let mut tree = Tree { inodes: vec![root, file], ..Tree::default() };
        let name = tree.push_bytes(b"file").unwrap();
        tree.dirents.push(Dirent { parent: 0, inode: 1, name });
        let extent = |n: u64| {
            let (file_offset, address) = (2 * n * BLOCK, DATA_START + n * BLOCK);
            FileExtent { file_offset, address, len: BLOCK }
        };
        tree.extents = (0..COUNT).map(extent).collect();
        let (checksum, none) = (ChecksumKind::Crc32c, Vec::new);
        let (chunks, objects) = Default::default();
        let manifest = Manifest { tree, checksum, chunks, objects, block_checksums: none() };
        let read = |n: u64| ProfileRead {
            file: 0,
            offset: n * BLOCK,
            address: DATA_START,
            len: (2 * COUNT - n) * BLOCK,
            age: 0,
        };
        // Each range contains those before it.
        let reads = (0..COUNT).map(|n| read(2 * (COUNT - n) - 1)).collect();
        let (image, files) = (Digest::of(b"image"), vec![b"/file".to_vec()]);
        let profile = Profile { image, runs: 1, files, reads };
        let translated = profile.translate(&manifest, image);
        format!("{} ranges", translated.reads.len())
    });
    let Some(taken) = taken else { return };
    // The first block of the file is in no range.
    assert_eq!(taken.said, format!("{} ranges", COUNT - 1));
    assert!(taken.cpu < Duration::from_secs(5), "{taken:?}");
}

#[test]
fn a_profile_is_stored_with_its_image_and_removed_with_it() {
    let (folder, store) = store();
    plant(&folder.path().join("tree"));
    let report = from_directory(&store, "x", &folder.path().join("tree"));
    let (manifest, image) = (load(&store, &report), report.image.digest().unwrap());
    assert!(load_profile(&store, &image).unwrap().is_none());
    let profile = Profile::of(&manifest, image, &[addresses(&manifest, "lib/a", 0, BLOCK)]);
    publish_profile(&store, &profile).unwrap();
    assert_eq!(load_profile(&store, &image).unwrap().unwrap(), profile);
    catalog::gc(&store, &[], false).unwrap();
    assert_eq!(list_profiles(&store).unwrap(), [image]);
    remove_profile(&store, &image).unwrap();
    assert!(list_profiles(&store).unwrap().is_empty());
    publish_profile(&store, &profile).unwrap();
    catalog::remove(&store, "x", "me").unwrap();
    catalog::gc(&store, &[], false).unwrap();
    assert!(list_profiles(&store).unwrap().is_empty());
    // A profile of another image is refused.
    let object = profile_object(&burgeon_block::Digest::of(b"other")).unwrap();
    store.publish(&object, &profile.encode().unwrap()).unwrap();
    let other = burgeon_block::Digest::of(b"other");
    assert_eq!(load_profile(&store, &other).unwrap_err().kind(), ErrorKind::Corrupt);
}

fn sample() -> Profile {
    let read = |file, offset: u64, address: u64| ProfileRead {
        file,
        offset: offset * BLOCK,
        address: DATA_START + address * BLOCK,
        len: 3 * BLOCK,
        age: 1,
    };
    Profile {
        image: burgeon_block::Digest::of(b"image"),
        runs: 3,
        files: vec![b"/a".to_vec(), b"/b/\xff".to_vec()],
        reads: vec![read(0, 0, 7), read(1, 1 << 30, 100), read(0, 3, 1 << 40)],
    }
}

#[test]
fn damaged_and_hostile_bytes_are_refused() {
    let profile = sample();
    let bytes = profile.encode().unwrap();
    assert_eq!(Profile::decode(&bytes).unwrap(), profile);
    for at in 0..bytes.len() {
        let mut bad = bytes.clone();
        bad[at] ^= 0x20;
        assert!(Profile::decode(&bad).is_err(), "byte {at}");
        assert!(Profile::decode(&bytes[..at]).is_err(), "cut at {at}");
    }
    let refused = |spoil: &dyn Fn(&mut Profile)| {
        let mut bad = sample();
        spoil(&mut bad);
        let error = Profile::decode(&bad.encode().unwrap()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Corrupt, "{error}");
    };
    refused(&|bad| bad.reads[0].file = 2);
    refused(&|bad| bad.reads[1].len = 0);
    refused(&|bad| bad.reads[1].offset = u64::MAX / BLOCK * BLOCK);
    refused(&|bad| bad.reads[1].address = u64::MAX / BLOCK * BLOCK);
    refused(&|bad| bad.files[0] = b"relative".to_vec());
    refused(&|bad| bad.files[0] = b"/nul\0".to_vec());
    refused(&|bad| bad.files[0].clear());
    refused(&|bad| bad.reads = vec![bad.reads[0]; (1 << 18) + 1]);
    let mut bad = sample();
    bad.files[0] = [b"/".to_vec(), vec![b'a'; 5000]].concat();
    assert_eq!(bad.encode().unwrap_err().kind(), ErrorKind::Invalid);
}

#[test]
fn a_build_stores_the_reads_of_a_profile_first_and_together() {
    let (folder, store) = store();
    let root = folder.path().join("tree");
    plant(&root);
    let before = from_directory(&store, "before", &root);
    let manifest = load(&store, &before);
    let order = [
        addresses(&manifest, "lib/c", 0, 3 * BLOCK),
        // The third and the first piece of a big file.
        addresses(&manifest, "lib/big", 512 << 10, BLOCK),
        addresses(&manifest, "lib/a", 0, BLOCK),
        addresses(&manifest, "lib/big", 0, BLOCK),
    ];
    let mut profile = Profile::of(&manifest, before.image.digest().unwrap(), &order);
    let lost = profile.files.len() as u32;
    profile.files.push(b"/not/there".to_vec());
    profile.reads.push(ProfileRead { file: lost, ..profile.reads[0] });
    let options = builder::BuildOptions { profile: Some(profile), ..options_with(&store) };
    let built = || builder::from_directory(&store, "after", &root, &options, &|_| ()).unwrap();
    let report = built();
    let after = load(&store, &report);
    let starts: Vec<u64> = [("lib/c", 0), ("lib/a", 0), ("lib/big", 512 << 10), ("lib/big", 0)]
        .map(|(path, offset)| addresses(&after, path, offset, BLOCK).start() - DATA_START)
        .to_vec();
    // Short files share a chunk; each piece of a big one has its own.
    assert_eq!(starts, [0, 3 * BLOCK, 8 * BLOCK, (8 + 64) * BLOCK]);
    let hot = after.chunks.iter().take(3);
    let new: Vec<_> = hot.map(|chunk| &after.objects[chunk.object as usize]).collect();
    assert!(new.iter().all(|object| **object == *new[0] && !manifest.objects.contains(object)));
    assert!(
        after.chunks[3..]
            .iter()
            .any(|chunk| { manifest.objects.contains(&after.objects[chunk.object as usize]) })
    );
    // The same files.
    let (old_data, new_data) = (data(&store, &manifest), data(&store, &after));
    for path in ["lib/a", "lib/b", "lib/big", "lib/c", "tiny"] {
        let same = content(&after, &new_data, inode(&after, path));
        assert!(same == fs::read(root.join(path)).unwrap(), "{path}");
        assert!(same == content(&manifest, &old_data, inode(&manifest, path)), "{path}");
    }
    // The new image has the profile, at its own addresses.
    let image = report.image.digest().unwrap();
    let carried = load_profile(&store, &image).unwrap().unwrap();
    assert_eq!((carried.image, carried.reads.len()), (image, 4));
    assert_eq!(carried.addresses().next().unwrap().start(), DATA_START);
    assert_eq!(built().image.digest().unwrap(), image, "the same again gives the same");
}
