//! Images of directories contain the whole directory, and all content only once.

#![allow(clippy::unwrap_used)] // helpers of tests

mod common;

use std::{
    fs,
    os::unix::{
        ffi::OsStrExt,
        fs::{FileExt, MetadataExt, PermissionsExt, symlink},
    },
    path::Path,
    sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
};

use burgeon_block::{
    ByteRange, Collecting, Digest, Error, ErrorKind, Lease, ObjectId, ObjectStore, Result,
};
use burgeon_btrfs::InodeBody;
use burgeon_image::{INLINE_MAX, Wanted, builder, catalog};
use burgeon_source::{Objects, References};

use common::*;

/// Files of every size class, links, odd names, holes, an xattr.
fn plant(root: &Path) {
    fs::create_dir_all(root.join("a/b/empty")).unwrap();
    let sizes = [0, 1, 2047, 2048, 2049, 4096, 5000, 100_000, 262_144, 262_145, 1_500_000];
    for (seed, size) in (1..).zip(sizes) {
        fs::write(root.join(format!("a/file-{size}")), noise(seed, size)).unwrap();
    }
    fs::write(root.join("a/b/copy"), noise(8, 100_000)).unwrap();
    fs::write(root.join("zeros"), vec![0; 600_000]).unwrap();
    fs::hard_link(root.join("a/file-5000"), root.join("link")).unwrap();
    symlink("a/nowhere", root.join("sym")).unwrap();
    let odd = std::ffi::OsStr::from_bytes(b"odd \xff\n name");
    fs::write(root.join(odd), b"odd").unwrap();
    let sparse = fs::File::create(root.join("sparse")).unwrap();
    sparse.set_len(5 << 20).unwrap();
    sparse.write_all_at(&noise(50, 10_000), 1 << 20).unwrap();
    sparse.write_all_at(&noise(51, 300_000), (3 << 20) + 4096).unwrap();
    fs::File::create(root.join("hole")).unwrap().set_len(1 << 40).unwrap();
    fs::set_permissions(root.join("a/file-1"), fs::Permissions::from_mode(0o4751)).unwrap();
    rustix::fs::mknodat(
        rustix::fs::CWD,
        root.join("fifo"),
        rustix::fs::FileType::Fifo,
        0o640.into(),
        0,
    )
    .unwrap();
}

fn compare(store: &burgeon_source::Directory, root: &Path, report: &builder::BuildReport) {
    let manifest = load(store, report);
    let data = data(store, &manifest);
    compare_with(root, &manifest, &data);
}

fn compare_with(root: &Path, manifest: &burgeon_image::Manifest, data: &[u8]) {
    let paths = paths(&manifest.tree);
    let mut seen = 0;
    let mut pending = vec![root.to_owned()];
    while let Some(path) = pending.pop() {
        let relative = path.strip_prefix(root).unwrap().as_os_str().as_bytes();
        let number = paths.get(relative).unwrap_or_else(|| panic!("{path:?} is missing"));
        let inode = &manifest.tree.inodes[*number as usize];
        let is = fs::symlink_metadata(&path).unwrap();
        assert_eq!(
            (inode.mode, inode.uid, inode.gid, inode.mtime_s, i64::from(inode.mtime_ns)),
            (is.mode(), is.uid(), is.gid(), is.mtime(), is.mtime_nsec()),
            "{path:?}"
        );
        seen += 1;
        if is.is_dir() {
            pending.extend(fs::read_dir(&path).unwrap().map(|entry| entry.unwrap().path()));
        } else if is.is_symlink() {
            let target = fs::read_link(&path).unwrap();
            assert_eq!(content(manifest, data, inode), target.as_os_str().as_bytes());
        } else if is.is_file() {
            assert_eq!(inode.size, is.len(), "{path:?}");
            if is.len() < 1 << 30 {
                assert!(content(manifest, data, inode) == fs::read(&path).unwrap(), "{path:?}");
            }
        }
    }
    assert_eq!(seen, paths.len(), "the image has more than the directory");
}

#[test]
fn an_image_has_the_contents_of_the_directory() {
    let (folder, store) = store();
    let root = folder.path().join("tree");
    plant(&root);
    let report = from_directory(&store, "test", &root);
    compare(&store, &root, &report);
    let manifest = load(&store, &report);
    assert!(report.changed.is_empty() && report.mounts_left_out.is_empty());

    // Small files are in the metadata, links are one inode, copies share their data.
    for (path, inline) in [("a/file-2048", true), ("a/file-2049", false)] {
        let body = inode(&manifest, path).body;
        assert_eq!(matches!(body, InodeBody::Inline(_)), inline, "{path} {INLINE_MAX}");
    }
    let paths = paths(&manifest.tree);
    assert_eq!(paths[&b"link"[..]], paths[&b"a/file-5000"[..]]);
    let extents = |path| manifest.tree.extents_of(inode(&manifest, path));
    assert_eq!(extents("a/b/copy"), extents("a/file-100000"));
    // A big file is one extent where its chunks are contiguous, except for a short tail.
    assert!(extents("a/file-1500000").len() <= 2);
    // Holes are preserved.
    assert_eq!(inode(&manifest, "hole").body, InodeBody::None);
    assert_eq!(inode(&manifest, "hole").size, 1 << 40);
    let range = |start, len| ByteRange::at(start, len).unwrap();
    assert_eq!(
        data_ranges(&manifest, inode(&manifest, "sparse")),
        [range(1 << 20, 12288), range((3 << 20) + 4096, 303_104)]
    );
    assert_eq!(fs::read_dir(store.root().join("tmp")).unwrap().count(), 0);
}

#[test]
fn the_same_tree_gives_the_same_image_with_any_number_of_threads() {
    let (folder, store) = store();
    let root = folder.path().join("tree");
    plant(&root);
    let first = from_directory(&store, "one", &root).image.digest().unwrap();
    for threads in [1, 3, 8] {
        let (_other, fresh) = common::store();
        let options = builder::BuildOptions { threads: Some(threads), ..options() };
        let report = builder::from_directory(&fresh, "x", &root, &options, &|_| ()).unwrap();
        assert_eq!(report.image.digest().unwrap(), first, "{threads} threads");
    }
    // Also in the same store, where every chunk exists already.
    let again = from_directory(&store, "two", &root);
    assert_eq!(again.image.digest().unwrap(), first);
    assert_eq!(again.new_bytes, 0);
    assert!(again.reused_bytes > 1 << 20);
}

#[test]
fn a_second_image_stores_only_new_chunks() {
    let (folder, store) = store();
    let root = folder.path().join("tree");
    plant(&root);
    from_directory(&store, "one", &root);
    let packs = store.list("packs").unwrap();
    fs::write(root.join("a/new"), noise(99, 300_000)).unwrap();
    let report = from_directory(&store, "two", &root);
    assert!((300_000..700_000).contains(&report.new_bytes), "{}", report.new_bytes);
    compare(&store, &root, &report);
    // Chunks that the store has lost are stored again.
    store.remove(&packs[0]).unwrap();
    let report = from_directory(&store, "three", &root);
    compare(&store, &root, &report);
}

#[test]
fn files_that_change_while_they_are_read_are_reported() {
    let (folder, store) = store();
    let root = folder.path().join("tree");
    fs::create_dir(&root).unwrap();
    fs::write(root.join("steady"), noise(1, 10_000)).unwrap();
    fs::write(root.join("log"), noise(2, 10_000)).unwrap();
    let done = AtomicBool::new(false);
    // The first progress report comes between scanning and reading.
    let progress = |_: &builder::Progress| {
        if !done.swap(true, Relaxed) {
            fs::write(root.join("log"), noise(3, 5_000)).unwrap();
        }
    };
    let report = builder::from_directory(&store, "x", &root, &options(), &progress).unwrap();
    assert_eq!(report.changed, [root.join("log")]);
    load(&store, &report);
    // Added and removed names change their directory.
    let done = AtomicBool::new(false);
    let progress = |_: &builder::Progress| {
        if !done.swap(true, Relaxed) {
            fs::write(root.join("new"), b"new").unwrap();
        }
    };
    let report = builder::from_directory(&store, "x", &root, &options(), &progress).unwrap();
    assert_eq!(report.changed, std::slice::from_ref(&root));
}

#[test]
fn attributes_are_stored_as_in_the_kernel() {
    let (folder, store) = store();
    let root = folder.path().join("tree");
    fs::create_dir(&root).unwrap();
    fs::write(root.join("file"), b"x").unwrap();
    fs::write(root.join("big"), noise(1, 5000)).unwrap();
    symlink("file", root.join("link")).unwrap();
    // A capability (v2, cap_net_raw), an ACL (user 7: rw), a long value, a default ACL.
    let capability = [1, 0, 0, 2, 0, 0x20, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    let entry = |tag: u16, mode: u16, id: u32| {
        [&tag.to_le_bytes()[..], &mode.to_le_bytes(), &id.to_le_bytes()].concat()
    };
    let none = u32::MAX;
    let acl = [
        2u32.to_le_bytes().to_vec(),
        [entry(1, 6, none), entry(2, 6, 7), entry(4, 4, none)].concat(),
        [entry(0x10, 6, none), entry(0x20, 4, none)].concat(),
    ]
    .concat();
    let long = noise(2, 3000);
    let given: [(&str, &str, &[u8]); 5] = [
        ("file", "security.capability", &capability),
        ("file", "system.posix_acl_access", &acl),
        ("big", "user.long", &long),
        ("", "system.posix_acl_default", &acl),
        ("", "trusted.root", b""),
    ];
    let flags = rustix::fs::XattrFlags::empty();
    for (path, name, value) in given {
        rustix::fs::setxattr(root.join(path), name, value, flags).unwrap();
    }
    rustix::fs::lsetxattr(root.join("link"), "trusted.link", b"l", flags).unwrap();
    for (name, kind, major, minor) in [
        ("null", rustix::fs::FileType::CharacterDevice, 1, 3),
        ("disk", rustix::fs::FileType::BlockDevice, 259, 1_048_575),
        ("socket", rustix::fs::FileType::Socket, 0, 0),
    ] {
        let device = rustix::fs::makedev(major, minor);
        let at = root.join(name);
        rustix::fs::mknodat(rustix::fs::CWD, at, kind, 0o600.into(), device).unwrap();
    }
    let report = from_directory(&store, "x", &root);
    let manifest = load(&store, &report);
    let xattrs = |path: &str| -> Vec<(String, Vec<u8>)> {
        let xattrs = manifest.tree.xattrs_of(inode(&manifest, path)).iter();
        let text = |span| String::from_utf8(manifest.tree.bytes(span).to_vec()).unwrap();
        let pair = |x: &burgeon_btrfs::Xattr| (text(x.name), manifest.tree.bytes(x.value).to_vec());
        xattrs.map(pair).filter(|(name, _)| name != "security.selinux").collect()
    };
    for (path, name, value) in given {
        assert!(xattrs(path).contains(&(name.to_owned(), value.to_vec())), "{path} {name}");
    }
    assert_eq!(xattrs("link"), [("trusted.link".to_owned(), b"l".to_vec())]);
    assert_eq!(inode(&manifest, "null").rdev, 1 << 20 | 3);
    assert_eq!(inode(&manifest, "disk").rdev, 259 << 20 | 1_048_575);
    assert_eq!(inode(&manifest, "socket").mode, 0o140600);
    compare(&store, &root, &report);
}

/// Needs root, as the kernel tests do: the thread changes its user, or mounts in a private
/// namespace.
#[test]
fn unreadable_files_are_listed() {
    let (folder, store) = store();
    let root = folder.path().join("tree");
    plant(&root);
    fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o755)).unwrap();
    for secret in ["a/file-1", "a/file-2047"] {
        fs::set_permissions(root.join(secret), fs::Permissions::from_mode(0o600)).unwrap();
    }
    fs::set_permissions(root.join("a/b"), fs::Permissions::from_mode(0o700)).unwrap();
    let mine = folder.path().join("mine");
    fs::create_dir(&mine).unwrap();
    std::os::unix::fs::chown(&mine, Some(65534), Some(65534)).unwrap();
    let work = move || {
        let nobody = rustix::thread::Uid::from_raw(65534);
        rustix::thread::set_thread_res_uid(nobody, nobody, nobody).unwrap();
        let store = burgeon_source::Directory::create(mine.join("store")).unwrap();
        let error = builder::from_directory(&store, "x", &root, &options(), &|_| ()).unwrap_err();
        let error = error.to_string();
        for path in ["a/file-1:", "a/file-2047:", "a/b:", "3 files", "run as root"] {
            assert!(error.contains(path), "{path} in {error}");
        }
        assert!(store.list("images").unwrap().is_empty());
    };
    std::thread::spawn(work).join().unwrap();
    drop(store);
}

/// Runs `work` in a thread with a private mount namespace and a tmpfs at `at`.
fn with_tmpfs(at: &Path, options: &std::ffi::CStr, work: impl FnOnce() + Send + 'static) {
    use rustix::mount::{MountFlags, MountPropagationFlags, mount, mount_change};
    let (at, options) = (at.to_owned(), options.to_owned());
    let work = move || {
        // SAFETY: the flags affect only this thread's view of mounts and directories.
        unsafe {
            let own = rustix::thread::UnshareFlags::NEWNS | rustix::thread::UnshareFlags::FS;
            rustix::thread::unshare_unsafe(own).unwrap();
        }
        let private = MountPropagationFlags::PRIVATE | MountPropagationFlags::REC;
        mount_change("/", private).unwrap();
        mount("none", &at, "tmpfs", MountFlags::empty(), Some(options.as_c_str())).unwrap();
        work();
    };
    std::thread::spawn(work).join().unwrap();
}

#[test]
fn mounts_below_are_left_out_and_reported() {
    let (folder, store) = store();
    let root = folder.path().join("tree");
    fs::create_dir_all(root.join("mnt")).unwrap();
    with_tmpfs(&root.join("mnt"), c"size=1m", move || {
        fs::write(root.join("mnt/inside"), b"x").unwrap();
        let report = from_directory(&store, "x", &root);
        assert_eq!(report.mounts_left_out, [root.join("mnt")]);
        assert_eq!(paths(&load(&store, &report).tree).len(), 2);
        let options = builder::BuildOptions { cross_mounts: true, ..options() };
        let report = builder::from_directory(&store, "x", &root, &options, &|_| ()).unwrap();
        assert!(report.mounts_left_out.is_empty());
        compare(&store, &root, &report);
    });
}

#[test]
fn a_full_store_is_an_error_and_keeps_its_images() {
    let (folder, _) = store();
    let root = folder.path().join("tree");
    plant(&root);
    let full = folder.path().join("full");
    fs::create_dir(&full).unwrap();
    with_tmpfs(&full.clone(), c"size=4m", move || {
        let store = burgeon_source::Directory::create(full.join("store")).unwrap();
        let before = from_directory(&store, "before", &root);
        fs::write(root.join("more"), noise(77, 3_000_000)).unwrap();
        let build =
            || builder::from_directory(&store, "after", &root, &options_with(&store), &|_| ());
        let error = build().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NoSpace, "{error}");
        assert_eq!(catalog::resolve(&store, "after").unwrap_err().kind(), ErrorKind::NotFound);
        assert!(store.list("tmp").unwrap().is_empty());
        load(&store, &before);
        catalog::gc(&store, &[], false).unwrap();
        // After freeing space the build succeeds.
        fs::write(root.join("more"), noise(77, 300_000)).unwrap();
        compare(&store, &root, &build().unwrap());
    });
}

#[test]
fn progress_reaches_its_totals() {
    let (folder, store) = store();
    let root = folder.path().join("tree");
    plant(&root);
    let last = std::sync::Mutex::new(builder::Progress::default());
    let calls = AtomicU64::new(0);
    let progress = |progress: &builder::Progress| {
        calls.fetch_add(1, Relaxed);
        *last.lock().unwrap() = *progress;
    };
    let report = builder::from_directory(&store, "x", &root, &options(), &progress).unwrap();
    let last = last.into_inner().unwrap();
    assert!(calls.into_inner() >= 2);
    assert_eq!(Some(last.bytes), last.bytes_total);
    assert_eq!(Some(last.entries), last.entries_total);
    assert_eq!(last.entries, report.image.inodes);
    assert_eq!(last.stored_bytes, report.new_bytes);
}

#[test]
fn names_are_resolved_listed_and_suggested() {
    let (folder, store) = store();
    let root = folder.path().join("tree");
    fs::create_dir(&root).unwrap();
    let error = catalog::resolve(&store, "debian:12").unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotFound);
    let report = from_directory(&store, "debian:12", &root);
    let record = catalog::resolve(&store, "debian:12").unwrap();
    assert_eq!(record, report.image);
    let listed = catalog::list(&store).unwrap();
    assert_eq!(listed.len(), 1);
    assert_eq!(listed[0].0, "debian:12");
    let error = catalog::resolve(&store, "debian").unwrap_err();
    assert!(error.to_string().contains("did you mean debian:12?"), "{error}");
}

#[test]
fn an_impossible_image_is_refused_and_leaves_nothing() {
    let (folder, store) = store();
    let file = folder.path().join("file");
    fs::write(&file, b"x").unwrap();
    let build = |name: &str, path: &Path, options: &builder::BuildOptions| {
        builder::from_directory(&store, name, path, options, &|_| ()).unwrap_err().kind()
    };
    assert_eq!(build("x", &file, &options()), ErrorKind::Invalid);
    assert_eq!(build("x", &folder.path().join("none"), &options()), ErrorKind::NotFound);
    assert_eq!(build("-x", folder.path(), &options()), ErrorKind::Invalid);
    let level = builder::BuildOptions { level: 23, ..options() };
    assert_eq!(build("x", folder.path(), &level), ErrorKind::Invalid);
    assert!(store.list("images").unwrap().is_empty());
    assert!(store.list("tmp").unwrap().is_empty());
}

#[test]
fn bytes_outside_the_store_are_referenced() {
    let (folder, store) = store();
    let path = folder.path().join("disk.img");
    let disk = fs::File::create(&path).unwrap();
    disk.write_all_at(&noise(1, 700_001), 1 << 20).unwrap();
    let report = builder::by_reference(&store, "disk", &path, &options(), &|_| ()).unwrap();
    let manifest = load(&store, &report);
    assert!(store.list("packs").unwrap().is_empty());
    assert_eq!(
        manifest.objects,
        [burgeon_source::Reference::object(&path.canonicalize().unwrap()).unwrap()]
    );
    let file = inode(&manifest, "disk.img");
    assert_eq!(file.size, (1 << 20) + 700_001);
    let objects = burgeon_source::Objects::new(store.clone(), burgeon_source::References::Allow);
    let data = data_of(&objects, &manifest);
    assert!(content(&manifest, &data, file) == fs::read(&path).unwrap());
    // The hole before the data takes no lazy data in the image.
    assert_eq!(manifest.data_range().len(), 700_001u64.next_multiple_of(4096));

    let objects = burgeon_source::Objects::new(store.clone(), burgeon_source::References::Refuse);
    for pattern in
        [builder::Pattern::Byte(0), builder::Pattern::Byte(7), builder::Pattern::BlockNumber]
    {
        let size = 600 << 10;
        let report = builder::computed(&store, "c", pattern, size, &options(), &|_| ()).unwrap();
        let manifest = load(&store, &report);
        assert_eq!(inode(&manifest, "data").size, size);
        assert_eq!(data_of(&objects, &manifest).len(), 600 << 10);
    }
}

#[test]
fn an_image_is_prepared_for_mounting() {
    let (folder, store) = store();
    let root = folder.path().join("tree");
    plant(&root);
    let report = from_directory(&store, "test", &root);
    let digest = report.image.digest().unwrap();
    let manifest = load(&store, &report);
    let limits = burgeon_image::ManifestLimits::default();
    let has = |name| folder.path().join(name).exists();
    let mut told = 0;
    let on_map = || {
        assert!(has("map") && !has("seed"), "whoever needs the map alone need not wait");
        told += 1;
    };
    let info = burgeon_image::prepare(
        &store,
        &digest,
        folder.path(),
        Wanted::default(),
        &limits,
        |_| {},
        on_map,
    );
    let info = info.unwrap();
    assert_eq!(told, 1);
    let written = fs::read(folder.path().join("seed.info")).unwrap();
    assert_eq!(burgeon_btrfs::SeedInfo::from_bytes(&written).unwrap(), info);
    assert_eq!(info.data_end, manifest.data_range().end());
    assert!(folder.path().join("seed").metadata().unwrap().len() > info.metadata_nodes().start());
    let map = burgeon_image::AddressMap::open(&folder.path().join("map")).unwrap();
    assert_eq!(map.data_range(), manifest.data_range());
    let kept = fs::read(folder.path().join("manifest")).unwrap();
    assert_eq!(burgeon_block::Digest::of(&kept), digest);
}

#[test]
fn a_directory_by_reference_has_the_same_contents() {
    let (folder, store) = store();
    let root = folder.path().join("tree");
    plant(&root);
    let report = builder::by_reference(&store, "there", &root, &options(), &|_| ()).unwrap();
    assert_eq!((report.new_bytes, report.changed.len()), (0, 0));
    let there = load(&store, &report);
    assert!(there.objects.iter().all(|object| object.as_str().starts_with("file/")));
    let objects = burgeon_source::Objects::new(store.clone(), burgeon_source::References::Allow);
    compare_with(&root, &there, &data_of(&objects, &there));
}

/// An image of another host, or a pulled one, may state a wrong position for a chunk.
#[test]
fn chunks_are_reused_from_images_that_this_host_has_made_or_verified() {
    let (folder, store) = store();
    let root = folder.path().join("tree");
    fs::create_dir(&root).unwrap();
    for n in 0..4 {
        fs::write(root.join(format!("file-{n}")), noise(n, 256 << 10)).unwrap();
    }
    let honest = from_directory(&store, "honest", &root);
    let manifest = load(&store, &honest);
    let mut lie = manifest.clone();
    for (index, chunk) in lie.chunks.iter_mut().enumerate() {
        let other = &manifest.chunks[(index + 1) % manifest.chunks.len()];
        (chunk.stored, chunk.codec) = (other.stored, other.codec);
    }
    let (_other, shared) = common::store();
    for pack in store.list("packs").unwrap() {
        shared.publish(&pack, &store.get(&pack, 1 << 30).unwrap()).unwrap();
    }
    let (bytes, digest) = lie.encode(3).unwrap();
    shared.publish(&catalog::manifest_object(&digest).unwrap(), &bytes).unwrap();
    let objects = Objects::new(shared.clone(), References::Refuse);
    let read = |object: &ObjectId, range| objects.read_blocking(object, range);
    let verify = |digest: &Digest| catalog::verify(&shared, digest, &read, &|_, _| ()).unwrap();
    assert!(!verify(&digest).damage.is_empty());

    let built = from_directory(&shared, "built", &root);
    assert_eq!(built.reused_bytes, 0);
    assert_eq!(verify(&built.image.digest().unwrap()).damage, []);
    // A manifest that differs from its digest is not trusted, even if this host made the
    // original.
    let made = catalog::manifest_object(&built.image.digest().unwrap()).unwrap();
    shared.publish(&made, &bytes).unwrap();
    assert_eq!(from_directory(&shared, "again", &root).reused_bytes, 0);

    // A foreign image that was verified completely is as good as one of this host.
    let (_other, third) = common::store();
    let trusted = honest.image.digest().unwrap();
    for folder in ["packs", "manifests"] {
        for object in store.list(folder).unwrap() {
            third.publish(&object, &store.get(&object, 1 << 30).unwrap()).unwrap();
        }
    }
    assert_eq!(from_directory(&third, "before", &root).reused_bytes, 0);
    let (_other, fourth) = common::store();
    for folder in ["packs", "manifests"] {
        for object in store.list(folder).unwrap() {
            fourth.publish(&object, &store.get(&object, 1 << 30).unwrap()).unwrap();
        }
    }
    common::provenance(&fourth).update(&trusted, |known| known.verified = true).unwrap();
    assert_eq!(from_directory(&fourth, "after", &root).new_bytes, 0);
}

/// A store that accepts packs and then is full.
struct Full<'a>(&'a burgeon_source::Directory);

impl ObjectStore for Full<'_> {
    fn publish_file(&self, object: &ObjectId, from: &Path) -> Result<()> {
        self.0.publish_file(object, from)
    }

    fn publish(&self, _: &ObjectId, _: &[u8]) -> Result<()> {
        Err(Error::new(ErrorKind::LocalIo, "no space left on device"))
    }

    fn get(&self, object: &ObjectId, len_max: u64) -> Result<bytes::Bytes> {
        self.0.get(object, len_max)
    }

    fn len(&self, object: &ObjectId) -> Result<Option<u64>> {
        self.0.len(object)
    }

    fn list(&self, prefix: &str) -> Result<Vec<ObjectId>> {
        self.0.list(prefix)
    }

    fn remove(&self, object: &ObjectId) -> Result<()> {
        self.0.remove(object)
    }

    fn begin_write(&self) -> Result<Lease> {
        self.0.begin_write()
    }

    fn begin_collect(&self) -> Result<Collecting> {
        self.0.begin_collect()
    }
}

#[test]
fn a_build_that_fails_leaves_no_pack_or_says_so() {
    let (folder, store) = store();
    let root = folder.path().join("tree");
    plant(&root);
    let packs = || store.list("packs").unwrap();
    let fails = || {
        let options = builder::BuildOptions { reuse: false, ..options() };
        let built = builder::from_directory(&Full(&store), "new", &root, &options, &|_| ());
        built.unwrap_err().to_string()
    };
    let said = fails();
    assert!(said.contains("no space left") && !said.contains("gc"), "{said}");
    assert_eq!(packs(), []);
    // Packs remain if another build is running.
    let other = store.begin_write().unwrap();
    let said = fails();
    assert!(said.contains("no space left") && said.contains("until `burgeon gc`"), "{said}");
    assert!(!packs().is_empty());
    drop(other);
    catalog::gc(&store, &[], false).unwrap();
    assert_eq!(packs(), []);
    // Packs that an image uses existed before.
    from_directory(&store, "old", &root);
    let before = packs();
    fails();
    assert_eq!(packs(), before);
}
