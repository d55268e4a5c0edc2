//! Removal, collection, verification and inspection of images.

#![allow(clippy::unwrap_used)] // helpers of tests

mod common;

use std::{
    fs,
    io::Read,
    os::unix::process::ExitStatusExt,
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use burgeon_block::{Digest, ErrorKind, ObjectId, ObjectStore};
use burgeon_image::{builder, catalog};
use burgeon_source::{Directory, Objects, References};

use common::*;

fn plant(root: &Path, seed: u64) {
    fs::create_dir_all(root.join("dir")).unwrap();
    fs::write(root.join("dir/common"), noise(1, 600_000)).unwrap();
    fs::write(root.join("dir/own"), noise(seed, 700_000)).unwrap();
    fs::write(root.join("dir/tiny"), b"tiny").unwrap();
}

/// Two images, "a" and "b", that share a file.
fn two() -> (tempfile::TempDir, Directory, [Digest; 2]) {
    let (folder, store) = store();
    let digests = [("a", 7), ("b", 8)].map(|(name, seed)| {
        let root = folder.path().join(name);
        plant(&root, seed);
        from_directory(&store, name, &root).image.digest().unwrap()
    });
    (folder, store, digests)
}

fn verify(store: &Directory, digest: &Digest) -> catalog::Verified {
    let objects = Objects::new(store.clone(), References::Refuse);
    let read = |object: &ObjectId, range| objects.read_blocking(object, range);
    catalog::verify(store, digest, &read, &|_, _| ()).unwrap()
}

#[test]
fn removed_images_are_collected_and_shared_packs_stay() {
    let (_folder, store, [a, b]) = two();
    let nothing = catalog::gc(&store, &[], false).unwrap();
    assert_eq!((nothing.manifests, nothing.packs, nothing.bytes), (0, 0, 0));

    let removed = catalog::remove(&store, "a", "me").unwrap().unwrap();
    assert_eq!(removed.digest().unwrap(), a);
    assert_eq!(catalog::remove(&store, "a", "me").unwrap_err().kind(), ErrorKind::NotFound);
    // The packs of a hold the common file, which b refers to; only the manifest is collected.
    let planned = catalog::gc(&store, &[], true).unwrap();
    assert!(catalog::load_bytes(&store, &a).is_ok());
    let done = catalog::gc(&store, &[], false).unwrap();
    assert_eq!(planned, done);
    assert_eq!((done.manifests, done.packs), (1, 0));
    assert!(verify(&store, &b).damage.is_empty());

    catalog::remove(&store, "b", "me").unwrap();
    // The images this host needs stay, even without a name.
    let kept = catalog::gc(&store, &[b], false).unwrap();
    assert_eq!((kept.manifests, kept.packs), (0, 0));
    let all = catalog::gc(&store, &[], false).unwrap();
    assert_eq!((all.manifests, all.packs), (1, 2));
    assert!(all.bytes > 1_900_000);
    assert!(store.list("packs").unwrap().is_empty());
}

#[test]
fn one_image_is_collected_and_others_without_a_name_stay() {
    let (folder, store, [a, b]) = two();
    let root = folder.path().join("c");
    plant(&root, 9);
    let c = from_directory(&store, "c", &root).image.digest().unwrap();
    catalog::remove(&store, "a", "me").unwrap();
    assert!(!catalog::gc_image(&store, &[c], "c").unwrap(), "this host needs it");
    let packs = store.list("packs").unwrap().len();
    assert!(catalog::gc_image(&store, &[], "c").unwrap());
    assert_eq!(catalog::resolve(&store, "c").unwrap_err().kind(), ErrorKind::NotFound);
    assert_eq!(catalog::load_bytes(&store, &c).unwrap_err().kind(), ErrorKind::NotFound);
    assert!(store.list("packs").unwrap().len() < packs);
    // An image whose name was removed waits for a collection of all, and so do its packs.
    for image in [&a, &b] {
        assert!(verify(&store, image).damage.is_empty());
    }
    assert!(catalog::gc_image(&store, &[], "c").unwrap(), "it is gone already");
    // One more name keeps the image.
    let b = catalog::resolve(&store, "b").unwrap();
    catalog::publish_alias(&store, &b, "other").unwrap();
    assert!(catalog::gc_image(&store, &[], "b").unwrap());
    assert!(verify(&store, &b.digest().unwrap()).damage.is_empty());
}

#[test]
fn an_image_whose_manifest_is_damaged_can_be_collected_alone() {
    let (_folder, store, [a, b]) = two();
    let manifest = store.root().join(format!("manifests/{a}"));
    assert!(manifest.exists(), "{}", manifest.display());
    fs::write(&manifest, b"damaged").unwrap();
    assert!(catalog::gc_image(&store, &[], "a").unwrap());
    assert_eq!(catalog::resolve(&store, "a").unwrap_err().kind(), ErrorKind::NotFound);
    assert!(verify(&store, &b).damage.is_empty());
    // The name of one that is gone keeps no other collection back.
    assert!(catalog::gc(&store, &[], false).unwrap().manifests == 0);
    assert!(verify(&store, &b).damage.is_empty());
}

#[test]
fn a_name_whose_record_is_damaged_can_be_removed() {
    let (_folder, store, [_, b]) = two();
    fs::write(store.root().join("images/a"), b"{").unwrap();
    assert_eq!(catalog::gc(&store, &[], false).unwrap_err().kind(), ErrorKind::Corrupt);
    assert_eq!(catalog::remove(&store, "a", "me").unwrap(), None);
    assert_eq!(catalog::gc(&store, &[], false).unwrap().manifests, 1);
    assert!(verify(&store, &b).damage.is_empty());
    // A record of a newer Burgeon is not damaged.
    fs::write(store.root().join("images/a"), b"{\"format\":9}").unwrap();
    let newer = catalog::remove(&store, "a", "me").unwrap_err();
    assert_eq!(newer.kind(), ErrorKind::UnsupportedFormat);
}

#[test]
fn other_hosts_keep_the_images_they_need() {
    let (_folder, store, [a, b]) = two();
    catalog::publish_roots(&store, "other", &[a]).unwrap();
    catalog::publish_roots(&store, "me", &[b]).unwrap();
    let error = catalog::remove(&store, "a", "me").unwrap_err();
    assert!(error.to_string().contains("host other"), "{error}");
    // Another name keeps it: this one may be removed.
    let root = _folder.path().join("a");
    from_directory(&store, "a2", &root);
    catalog::remove(&store, "a", "me").unwrap();
    catalog::remove(&store, "a2", "me").unwrap_err();
    // This host's need does not keep the name, only the image.
    catalog::remove(&store, "b", "me").unwrap();
    assert_eq!(catalog::gc(&store, &[], false).unwrap().manifests, 0);
    // An unreadable record may need anything.
    fs::write(store.root().join("roots/third"), b"{").unwrap();
    for error in [
        catalog::gc(&store, &[], false).unwrap_err(),
        catalog::remove(&store, "a2", "me").unwrap_err(),
    ] {
        assert!(error.to_string().contains("roots/third"), "{error}");
    }
    fs::write(
        store.root().join("roots/third"),
        b"{\"format\":2,\"host\":\"third\",\"written_s\":0,\"manifests\":[]}",
    )
    .unwrap();
    assert_eq!(catalog::gc(&store, &[], false).unwrap_err().kind(), ErrorKind::UnsupportedFormat);
    catalog::forget_host(&store, "third").unwrap();
    catalog::forget_host(&store, "other").unwrap();
    catalog::publish_roots(&store, "me", &[]).unwrap();
    catalog::remove(&store, "a2", "me").unwrap();
    assert_eq!(catalog::gc(&store, &[], false).unwrap().manifests, 2);
    let gone = catalog::publish_roots(&store, "me", &[a]).unwrap_err();
    assert_eq!(gone.kind(), ErrorKind::NotFound);
}

#[test]
fn nothing_is_collected_while_a_need_is_unknown() {
    let (_folder, store, [a, _]) = two();
    store.publish(&ObjectId::new(format!("packs/{}", "00".repeat(32))).unwrap(), b"x").unwrap();
    let object = catalog::manifest_object(&a).unwrap();
    let good = store.get(&object, 1 << 20).unwrap();
    let mut bad = good.to_vec();
    bad[200] ^= 1;
    store.publish(&object, &bad).unwrap();
    let error = catalog::gc(&store, &[], false).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Corrupt, "{error}");
    store.publish(&object, &good).unwrap();
    let name = ObjectId::new("images/a").unwrap();
    let record = store.get(&name, 1 << 20).unwrap();
    store.publish(&name, b"not json").unwrap();
    assert_eq!(catalog::gc(&store, &[], false).unwrap_err().kind(), ErrorKind::Corrupt);
    assert_eq!(catalog::resolve(&store, "a").unwrap_err().kind(), ErrorKind::Corrupt);
    store.publish(&name, &record).unwrap();
    // A running build may rely on anything.
    let lease = store.begin_write().unwrap();
    let waiting = catalog::gc(&store, &[], false).unwrap();
    assert_eq!((waiting.builds, waiting.packs), (1, 0));
    drop(lease);
    assert_eq!(catalog::gc(&store, &[], false).unwrap().packs, 1);
}

/// Paths of the two packs of [`two`], that of "a" first.
fn packs(store: &Directory, digest: &Digest) -> Vec<PathBuf> {
    let manifest = catalog::load(store, digest, &burgeon_image::ManifestLimits::default()).unwrap();
    manifest.objects.iter().map(|object| store.path_of(object)).collect()
}

#[test]
fn damage_is_found_and_named() {
    let (_folder, store, [a, b]) = two();
    let whole = verify(&store, &b);
    assert!(whole.damage.is_empty() && whole.bytes > 1_200_000 && whole.chunks >= 4);
    let (first, second) = (packs(&store, &a)[0].clone(), packs(&store, &b)[1].clone());
    let files = |verified: &catalog::Verified| -> Vec<String> {
        let files = verified.damage.iter().flat_map(|damage| &damage.files);
        files.map(|path| String::from_utf8(path.clone()).unwrap()).collect()
    };
    type Harm = fn(&Path, &Path);
    let harms: [(&str, Harm); 4] = [
        ("flipped", |path, _| {
            let mut bytes = fs::read(path).unwrap();
            let at = bytes.len() - 5;
            bytes[at] ^= 1;
            fs::write(path, bytes).unwrap();
        }),
        ("truncated", |path, _| {
            let bytes = fs::read(path).unwrap();
            fs::write(path, &bytes[..bytes.len() - 1]).unwrap();
        }),
        ("missing", |path, _| fs::remove_file(path).unwrap()),
        ("swapped", |path, other| fs::copy(other, path).map(drop).unwrap()),
    ];
    for (what, harm) in harms {
        let good = fs::read(&second).unwrap();
        harm(&second, &first);
        let verified = verify(&store, &b);
        assert_eq!(verified.damage.len(), 1, "{what}");
        assert_eq!(files(&verified), ["/dir/own"], "{what}");
        let name = second.file_name().unwrap().to_str().unwrap();
        assert!(verified.damage[0].object.as_str().ends_with(name), "{what}");
        assert!(verify(&store, &a).damage.is_empty(), "{what}: the other image is whole");
        fs::write(&second, good).unwrap();
    }
    // Damage outside this image's chunks is reported, too: here in a pack that b shares.
    let mut bytes = fs::read(&first).unwrap();
    let at = bytes.len() - 5;
    bytes[at] ^= 1;
    fs::write(&first, bytes).unwrap();
    let verified = verify(&store, &b);
    assert_eq!((verified.damage.len(), verified.damage[0].chunks), (1, 0));
    assert_eq!(files(&verify(&store, &a)), ["/dir/own"]);
}

#[test]
fn the_map_of_an_image_covers_its_files() {
    let (_folder, store, [a, _]) = two();
    let manifest = catalog::load(&store, &a, &burgeon_image::ManifestLimits::default()).unwrap();
    let lines: Vec<_> = manifest.map_lines().collect();
    let of = |path: &[u8]| lines.iter().filter(|line| line.path == path).collect::<Vec<_>>();
    let own = of(b"/dir/own");
    assert_eq!(own.len(), 3);
    assert_eq!(own[0].file_offset, 0);
    assert_eq!(own[1].file_offset, 262_144);
    assert_eq!(own.iter().map(|line| line.addresses.len()).sum::<u64>(), 700_416);
    assert!(of(b"/dir/tiny").is_empty());
    for line in &lines {
        let chunk = manifest.chunks[line.chunk as usize];
        assert_eq!((line.object, line.stored), (chunk.object, chunk.stored));
    }
}

/// An archive of one file of noise, of any length.
struct Endless(u64);

impl Read for Endless {
    fn read(&mut self, buf: &mut [u8]) -> std::io::Result<usize> {
        let len = buf.len().min(512);
        self.0 += 1;
        if self.0 == 1 {
            let mut header = vec![0; 512];
            header[0] = b'f';
            header[100..108].copy_from_slice(b"0000644\0");
            header[124..136].copy_from_slice(b"77777777777\0");
            header[156] = b'0';
            let sum: u32 = header.iter().map(|byte| u32::from(*byte)).sum::<u32>() + 8 * 32;
            header[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
            buf[..512].copy_from_slice(&header);
            return Ok(512);
        }
        buf[..len].copy_from_slice(&noise(self.0, len));
        Ok(len)
    }
}

/// With `BURGEON_TEST_STORE`, the process that the next test kills; otherwise, the archive is
/// truncated.
#[test]
fn an_interrupted_build_leaves_nothing() {
    if let Some(path) = std::env::var_os("BURGEON_TEST_STORE") {
        let store = Directory::create(PathBuf::from(path)).unwrap();
        builder::from_tar(&store, "endless", Endless(0), None, &options(), &|_| ()).unwrap();
    }
    let (_folder, store) = store();
    let cut = Endless(0).take(3 << 20);
    let error = builder::from_tar(&store, "cut", cut, None, &options(), &|_| ()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Corrupt, "{error}");
    assert!(store.list("images").unwrap().is_empty() && store.list("tmp").unwrap().is_empty());
}

#[test]
fn a_killed_build_leaves_nothing_visible_and_is_collected() {
    let (_folder, store) = store();
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "an_interrupted_build_leaves_nothing"])
        .env("BURGEON_TEST_STORE", store.root())
        .spawn()
        .unwrap();
    // Wait for a published pack: the build is then half-way.
    while store.list("packs").unwrap().is_empty() {
        assert!(child.try_wait().unwrap().is_none(), "the build ended by itself");
        std::thread::sleep(Duration::from_millis(10));
    }
    // A running build is left alone.
    let alive = catalog::gc(&store, &[], false).unwrap();
    assert_eq!((alive.builds, alive.packs), (1, 0));
    child.kill().unwrap();
    assert_eq!(child.wait().unwrap().signal(), Some(9));
    assert!(catalog::list(&store).unwrap().is_empty());
    let done = catalog::gc(&store, &[], false).unwrap();
    assert!(done.builds == 0 && done.packs > 0, "{done:?}");
    assert!(store.list("packs").unwrap().is_empty() && store.list("tmp").unwrap().is_empty());
}
