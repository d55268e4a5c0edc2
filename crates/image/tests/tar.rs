//! Images of tar archives: equal to those of the original directory; hostile archives are
//! refused.

#![allow(clippy::unwrap_used)] // helpers of tests

mod common;

use std::{
    fs,
    io::Read,
    os::unix::fs::{FileExt, symlink},
    path::Path,
    process::Command,
};

use burgeon_block::{ErrorKind, ObjectStore};
use burgeon_btrfs::InodeBody;
use burgeon_image::{Manifest, builder};
use burgeon_source::Directory;

use common::{archives::*, *};

fn plant(root: &Path) {
    fs::create_dir_all(root.join("dir/sub")).unwrap();
    fs::write(root.join("dir/empty"), b"").unwrap();
    fs::write(root.join("dir/small"), b"small").unwrap();
    fs::write(root.join("dir/big"), noise(1, 1_000_000)).unwrap();
    fs::write(root.join("dir/sub/odd"), noise(2, 70_001)).unwrap();
    fs::hard_link(root.join("dir/big"), root.join("dir/sub/link")).unwrap();
    let long = "n".repeat(200);
    fs::create_dir(root.join(&long)).unwrap();
    fs::write(root.join(&long).join(&long), b"long name").unwrap();
    symlink("t".repeat(300), root.join("dir/symlink")).unwrap();
    symlink(&long, root.join("short")).unwrap();
    for (name, at) in [("sparse", 1 << 20), ("tail", (9 << 20) - 5000), ("odd-sparse", 513 * 512)] {
        let sparse = fs::File::create(root.join(name)).unwrap();
        sparse.set_len(9 << 20).unwrap();
        sparse.write_all_at(&noise(3, 5000), at).unwrap();
    }
    fs::File::create(root.join("hole")).unwrap().set_len(1 << 30).unwrap();
    fs::File::create(root.join("small-hole")).unwrap().set_len(1000).unwrap();
    rustix::fs::setxattr(
        root.join("dir/big"),
        "user.a",
        b"x\0=y\n",
        rustix::fs::XattrFlags::empty(),
    )
    .unwrap();
    for (index, path) in ["dir/big", "dir", "short"].into_iter().enumerate() {
        let time = rustix::fs::Timespec { tv_sec: -3 * index as i64, tv_nsec: 123_456_789 };
        let times = rustix::fs::Timestamps { last_access: time, last_modification: time };
        let flags = rustix::fs::AtFlags::SYMLINK_NOFOLLOW;
        rustix::fs::utimensat(rustix::fs::CWD, root.join(path), &times, flags).unwrap();
    }
}

/// Each path with its attributes, except those that the archive's format may lose.
fn described(store: &Directory, manifest: &Manifest, nanos: bool, holes: bool) -> Vec<String> {
    let data = data(store, manifest);
    let mut first_of = std::collections::HashMap::new();
    let describe = |(path, number): (Vec<u8>, u32)| {
        let path = String::from_utf8(path).unwrap();
        let inode = &manifest.tree.inodes[number as usize];
        let first = first_of.entry(number).or_insert_with(|| path.clone()).clone();
        let tree = &manifest.tree;
        let xattrs = tree.xattrs_of(inode).iter();
        let xattrs: Vec<_> = xattrs.map(|x| (tree.bytes(x.name), tree.bytes(x.value))).collect();
        let is_file = inode.mode & 0o170000 != 0o040000;
        let content = match is_file && inode.size < 1 << 27 {
            true => burgeon_block::Digest::of(&content(manifest, &data, inode)).to_string(),
            false => String::new(),
        };
        let ranges = if holes { data_ranges(manifest, inode) } else { vec![] };
        let mut time = (inode.mtime_s, inode.mtime_ns);
        if !nanos {
            time = (0, 0);
        }
        format!(
            "{path} = {first} {:o} {} {} {} {time:?} {xattrs:?} {content} {ranges:?} {}",
            inode.mode,
            inode.uid,
            inode.gid,
            inode.size,
            matches!(inode.body, InodeBody::None)
        )
    };
    paths(&manifest.tree).into_iter().map(describe).collect()
}

#[test]
fn textual_acls_equal_those_of_the_directory() {
    let (folder, store) = store();
    let root = folder.path().join("tree");
    fs::create_dir_all(root.join("dir")).unwrap();
    fs::write(root.join("file"), "x").unwrap();
    fs::write(root.join("plain"), "x").unwrap();
    // Numbers without a name on this host: they are numbers in the archive, too.
    let set = |arguments: &[&str]| {
        let set = Command::new("setfacl").args(arguments).current_dir(&root).status();
        assert!(set.unwrap().success(), "{arguments:?}");
    };
    set(&["-m", "u:54321:rwx,g:54322:r--,m::rx", "file"]);
    set(&["-m", "u:54321:r--", "dir"]);
    set(&["-d", "-m", "u:54323:rwx", "dir"]);
    let directory = load(&store, &from_directory(&store, "dir", &root));
    let bytes = archive(&root, &["--format=pax", "--acls"]);
    assert!(bytes.windows(17).any(|part| part == b"SCHILY.acl.access"));
    let reader = std::io::Cursor::new(bytes.clone());
    let report = builder::from_tar(&store, "tar", reader, None, &options(), &|_| ()).unwrap();
    assert_eq!(report.acls_left_out, 0);
    let expected = described(&store, &directory, false, true);
    assert_eq!(directory.tree.xattrs.len(), 3, "two access lists and a default one");
    assert_eq!(described(&store, &load(&store, &report), false, true), expected);
    // An unknown name: its ACL is left out, and reported.
    let at = bytes.windows(10).position(|part| part == b"user:54321").unwrap();
    let mut named = bytes;
    named[at..at + 10].copy_from_slice(b"user:abcde");
    let reader = std::io::Cursor::new(named);
    let report = builder::from_tar(&store, "tar", reader, None, &options(), &|_| ()).unwrap();
    assert_eq!(report.acls_left_out, 1);
}

#[test]
fn an_archive_gives_the_same_image_as_its_directory() {
    let (folder, store) = store();
    let root = folder.path().join("tree");
    plant(&root);
    let report = from_directory(&store, "dir", &root);
    let directory = load(&store, &report);
    // Sparse maps in three formats, xattrs, times with nanoseconds, names above 100 bytes.
    let pax = ["--format=pax", "--xattrs", "--xattrs-include=*", "--sparse"];
    for version in ["0.0", "0.1", "1.0"] {
        let version = format!("--sparse-version={version}");
        let bytes = archive(&root, &[&pax[..], &[version.as_str()]].concat());
        let manifest = from_tar(&store, bytes).unwrap();
        let expected = described(&store, &directory, true, true);
        assert_eq!(described(&store, &manifest, true, true), expected, "{version}");
    }
    fs::write(root.join("dir/big"), b"").unwrap();
    let directory = load(&store, &from_directory(&store, "dir", &root));
    let without_xattrs = |manifest: &Manifest, holes| {
        let mut manifest = manifest.clone();
        manifest.tree.inodes.iter_mut().for_each(|inode| inode.xattr_count = 0);
        described(&store, &manifest, false, holes)
    };
    let expected = without_xattrs(&directory, true);
    let gnu = from_tar(&store, archive(&root, &["--format=gnu", "--sparse"])).unwrap();
    assert_eq!(without_xattrs(&gnu, true), expected);
    // Many pieces: a map that continues after the header.
    let pieces = fs::File::create(root.join("pieces")).unwrap();
    pieces.set_len(8 << 20).unwrap();
    (0..60u64).for_each(|n| pieces.write_all_at(&noise(n, 4096), n * 131_072).unwrap());
    let directory = load(&store, &from_directory(&store, "dir", &root));
    let gnu = from_tar(&store, archive(&root, &["--format=gnu", "--sparse"])).unwrap();
    assert_eq!(without_xattrs(&gnu, true), without_xattrs(&directory, true));
}

#[test]
fn compressed_archives_are_detected_and_their_ends_checked() {
    let (folder, store) = store();
    let (plain, expected) = one_file(folder.path(), &store);
    for program in ["gzip", "zstd", "xz"] {
        let packed = pipe(&plain, program);
        assert_eq!(from_tar(&store, packed.clone()).unwrap(), expected, "{program}");
        let cut = packed[..packed.len() - 5].to_vec();
        assert!(from_tar(&store, cut).is_err(), "{program}");
        let mut flipped = packed;
        let middle = flipped.len() / 2;
        flipped[middle] ^= 1;
        assert!(from_tar(&store, flipped).is_err(), "{program}");
    }
    for len in [512, 1024, 1536, 50_000] {
        let error = from_tar(&store, plain[..len].to_vec()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Corrupt, "{len}: {error}");
    }
}

/// An extended header of `records`; each record's length includes itself.
fn pax(records: &[&str]) -> Vec<u8> {
    let record = |text: &&str| {
        let len = text.len() + 4;
        let len = if len > 99 { len + 1 } else { len };
        format!("{len} {text}\n")
    };
    pax_raw(&records.iter().map(record).collect::<String>())
}

fn pax_raw(records: &str) -> Vec<u8> {
    let mut bytes = header(b"pax", b'x', records.len() as u64, b"");
    bytes.extend(records.as_bytes());
    bytes.resize(bytes.len().next_multiple_of(512), 0);
    bytes
}

#[test]
fn hostile_archives_are_refused() {
    let (_folder, store) = store();
    let file = |name: &[u8]| header(name, b'0', 0, b"");
    let cases: Vec<(&str, Vec<Vec<u8>>)> = vec![
        ("a parent", vec![file(b"../evil")]),
        ("a parent inside", vec![file(b"a/../../evil")]),
        ("an absolute name", vec![file(b"/etc/passwd")]),
        ("through a circle of symlinks", vec![header(b"a", b'2', 0, b"a"), file(b"a/b")]),
        (
            "through a symlink to a file",
            vec![file(b"f"), header(b"a", b'2', 0, b"f"), file(b"a/b")],
        ),
        ("below a file", vec![file(b"a"), file(b"a/b")]),
        ("a link to nothing", vec![header(b"a", b'1', 0, b"b")]),
        ("a link outside", vec![header(b"a", b'1', 0, b"../b")]),
        ("a link to a directory", vec![header(b"d", b'5', 0, b""), header(b"a", b'1', 0, b"d")]),
        ("a file for a directory", vec![header(b"d", b'5', 0, b""), file(b"d")]),
        ("a file for the root", vec![header(b"./", b'6', 0, b"")]),
        ("an empty symlink", vec![header(b"a", b'2', 0, b"")]),
        ("an unknown type", vec![header(b"a", b'Z', 0, b"")]),
        ("several volumes", vec![header(b"a", b'M', 0, b"")]),
        ("an absurd header", vec![header(b"a", b'x', 1 << 32, b"")]),
        ("a bad record", vec![pax_raw("9 path\n\n"), file(b"a")]),
        ("a name with NUL", vec![pax(&["path=a\0b"]), file(b"a")]),
        ("a long part", vec![pax(&[&format!("path={}", "n".repeat(300))]), file(b"a")]),
        (
            "a map beyond the end",
            vec![
                pax(&["GNU.sparse.map=0,512", "GNU.sparse.size=5"]),
                header(b"a", b'0', 512, b""),
                vec![0; 512],
            ],
        ),
        (
            "a map out of order",
            vec![
                pax(&["GNU.sparse.map=512,256,0,256", "GNU.sparse.size=4096"]),
                header(b"a", b'0', 512, b""),
                vec![0; 512],
            ],
        ),
        ("data longer than the archive", vec![header(b"a", b'0', 1 << 30, b"")]),
    ];
    for (what, parts) in cases {
        let error = from_tar(&store, ended(&parts)).expect_err(what);
        assert_eq!(error.kind(), ErrorKind::Corrupt, "{what}: {error}");
        let by_record = error.to_string().contains("extended header");
        assert_eq!(by_record, what == "a bad record", "{what}: {error}");
    }
    assert!(store.list("images").unwrap().is_empty());
    assert!(store.list("tmp").unwrap().is_empty());
}

/// `header` with the number at `at`, 12 bytes long, in binary.
fn with_number(mut header: Vec<u8>, at: usize, number: u64) -> Vec<u8> {
    header[at..at + 4].copy_from_slice(&[0x80, 0, 0, 0]);
    header[at + 4..at + 12].copy_from_slice(&number.to_be_bytes());
    seal(&mut header);
    header
}

/// GNU's old sparse format: one piece at `offset` of a file of `size` bytes.
fn sparse(name: &[u8], size: u64, offset: u64, len: u64) -> Vec<u8> {
    let header = with_number(header(name, b'S', len, b""), 483, size);
    with_number(with_number(header, 386, offset), 398, len)
}

#[test]
fn sizes_near_integer_limits_are_refused() {
    let (_folder, store) = store();
    let cases: [(&str, Vec<Vec<u8>>); 4] = [
        ("a file", vec![with_number(header(b"a", b'0', 0, b""), 124, u64::MAX)]),
        (
            "a file by record",
            vec![pax(&[&format!("size={}", u64::MAX)]), header(b"a", b'0', 0, b"")],
        ),
        ("holes", vec![sparse(b"a", u64::MAX, u64::MAX - 600, 512), vec![1; 512]]),
        ("a directory", vec![with_number(header(b"a/", b'5', 0, b""), 124, u64::MAX)]),
    ];
    for (what, parts) in cases {
        let error = from_tar(&store, ended(&parts)).expect_err(what);
        assert_eq!(error.kind(), ErrorKind::Corrupt, "{what}: {error}");
    }
    // Each of these is as long as a file can be: their sum exceeds 64 bits.
    let longest = i64::MAX as u64 - 4096;
    let files = [b"a", b"b", b"c"].map(|name| [sparse(name, longest, 4096, 512), vec![1; 512]]);
    let manifest = from_tar(&store, ended(&files.concat())).unwrap();
    assert_eq!(inode(&manifest, "c").size, longest);
}

#[test]
fn of_privileged_attributes_an_archive_gives_capabilities_alone() {
    let (_folder, store) = store();
    let refused = ["trusted.overlay.redirect", "trusted.any", "security.selinux", "security.ima"];
    let taken = ["security.capability", "user.a"];
    let records: Vec<_> =
        refused.iter().chain(&taken).map(|name| format!("SCHILY.xattr.{name}=v")).collect();
    let records: Vec<_> = records.iter().map(String::as_str).collect();
    let all = ended(&[pax(&records), header(b"a", b'0', 0, b"")]);
    let manifest = from_tar(&store, all).unwrap();
    let xattrs = manifest.tree.xattrs_of(inode(&manifest, "a")).iter();
    let names: Vec<_> = xattrs.map(|xattr| manifest.tree.bytes(xattr.name)).collect();
    assert_eq!(names, taken.map(str::as_bytes));
}

#[test]
fn many_records_take_little_time() {
    let (_folder, store) = store();
    // Near the longest header: examining each record before adding one would take hours.
    let records: String = (0..800_000).map(|n| format!("15 k{n:07}=vv\n")).collect();
    let all = ended(&[pax_raw(&records), header(b"a", b'0', 0, b"")]);
    assert_eq!(inode(&from_tar(&store, all).unwrap(), "a").size, 0);
    let attributes: String =
        (0..400_000).map(|n| format!("35 SCHILY.xattr.user.{n:07}=vvvvv\n")).collect();
    let all = ended(&[pax_raw(&attributes), header(b"a", b'0', 0, b"")]);
    assert!(from_tar(&store, all).is_err(), "more than an inode can have");
    // Headers that add up, and records that apply to every following file.
    let twice = ended(&[pax_raw(&records), pax_raw(&records), header(b"a", b'0', 0, b"")]);
    assert_eq!(from_tar(&store, twice).unwrap_err().kind(), ErrorKind::Corrupt);
    let mut global = pax_raw(&records);
    global[156] = b'g';
    seal(&mut global[..512]);
    let all = ended(&[global, header(b"a", b'0', 0, b"")]);
    assert_eq!(from_tar(&store, all).unwrap_err().kind(), ErrorKind::Corrupt);
}

#[test]
fn pieces_of_one_block_stay_together_at_the_end_of_a_wave() {
    let (_folder, store) = store();
    // A wave is 32 MiB: it is full in the middle of the second file.
    for (name, size) in [("block", 100_000), ("inline", 2000)] {
        let map = "GNU.sparse.map=0,512,1024,512,1536,64";
        let manifest = from_tar(
            &store,
            ended(&[
                header(b"first", b'0', (32 << 20) - 512, b""),
                vec![1; (32 << 20) - 512],
                pax(&[map, &format!("GNU.sparse.size={size}")]),
                header(name.as_bytes(), b'0', 1088, b""),
                [vec![2; 512], vec![3; 576], vec![0; 448]].concat(),
            ]),
        )
        .unwrap();
        let mut expected = vec![0; size];
        expected[..512].fill(2);
        expected[1024..1600].fill(3);
        let all = common::data(&store, &manifest);
        assert!(content(&manifest, &all, inode(&manifest, name)) == expected, "{name}");
    }
}

#[test]
fn later_entries_replace_earlier_ones_and_missing_directories_are_made() {
    let (_folder, store) = store();
    let data = |byte| vec![byte; 512];
    let manifest = from_tar(
        &store,
        ended(&[
            header(b"a/b/c", b'0', 512, b""),
            data(1),
            header(b"a/b/link", b'1', 0, b"./a/b/c"),
            header(b"a/b/c", b'0', 512, b""),
            data(2),
            header(b"null", b'3', 0, b""),
        ]),
    )
    .unwrap();
    let all = common::data(&store, &manifest);
    assert_eq!(content(&manifest, &all, inode(&manifest, "a/b/c")), data(2));
    assert_eq!(content(&manifest, &all, inode(&manifest, "a/b/link")), data(1));
    assert_eq!(inode(&manifest, "a").mode, 0o040755);
    assert_eq!(inode(&manifest, "null").mode, 0o020644);
}

/// An archive with all features, to be damaged.
fn varied() -> Vec<u8> {
    ended(&[
        header(b"d/", b'5', 0, b""),
        pax(&["SCHILY.xattr.user.a=abcd", "mtime=12.3456789"]),
        header(b"d/f", b'0', 700, b""),
        vec![3; 1024],
        header(b"d/l", b'1', 0, b"d/f"),
        header(b"s", b'2', 0, b"d/f"),
        pax(&["GNU.sparse.map=0,512,4096,512", "GNU.sparse.size=8192"]),
        header(b"h", b'0', 1024, b""),
        vec![4; 1024],
        pax(&["GNU.sparse.major=1", "GNU.sparse.minor=0", "GNU.sparse.realsize=9999"]),
        header(b"i", b'0', 1024, b""),
        [b"1\n4096\n512\n".to_vec(), vec![0; 501], vec![5; 512]].concat(),
        header(b"long", b'L', 300, b""),
        [vec![b'n'; 200], vec![0; 312]].concat(),
        header(b"cut", b'0', 10, b""),
        vec![6; 512],
    ])
}

proptest::proptest! {
    #![proptest_config(proptest::test_runner::Config::with_cases(300))]

    /// Damaged anywhere, with valid header checksums: refused, or an image that satisfies the
    /// rules; never a panic, never more memory than the archive's length justifies.
    #[test]
    fn damaged_archives_are_refused_or_consistent(
        edits in proptest::collection::vec((0usize..10_000, proptest::prelude::any::<u8>()), 1..6),
        cut in 0usize..20_000,
    ) {
        let (_folder, store) = store();
        let mut bytes = varied();
        let len = bytes.len();
        for (at, value) in edits {
            bytes[at % len] = value;
            let block = at % len / 512 * 512;
            seal(&mut bytes[block..block + 512]);
        }
        bytes.truncate(cut.max(len / 2));
        if let Ok(manifest) = from_tar(&store, bytes) {
            manifest.validate(&burgeon_image::ManifestLimits::default()).unwrap();
            data(&store, &manifest);
        }
    }
}

#[test]
fn the_undamaged_archive_is_valid() {
    let (_folder, store) = store();
    let manifest = from_tar(&store, varied()).unwrap();
    let all = data(&store, &manifest);
    assert_eq!(content(&manifest, &all, inode(&manifest, "d/f")), [3; 700]);
    assert_eq!(content(&manifest, &all, inode(&manifest, "h"))[4096..4608], [4; 512]);
    assert_eq!(content(&manifest, &all, inode(&manifest, "i"))[4096..4608], [5; 512]);
    assert_eq!(inode(&manifest, "i").size, 9999);
    assert_eq!(inode(&manifest, &"n".repeat(200)).size, 10);
    assert_eq!(inode(&manifest, "d/f").mtime_ns, 345_678_900);
}

#[test]
fn an_archive_ends_soon_after_its_end() {
    let (folder, store) = store();
    let root = folder.path().join("tree");
    fs::create_dir_all(&root).unwrap();
    let bytes = archive(&root, &[]);
    let build = |tail: u64| {
        let reader = std::io::Cursor::new(bytes.clone()).chain(std::io::repeat(0).take(tail));
        builder::from_tar(&store, "tar", reader, None, &options(), &|_| ())
    };
    build(1 << 20).unwrap();
    let error = build(65 << 20).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Corrupt);
    assert!(error.to_string().contains("after its end"), "{error}");
}

#[test]
fn devices_and_links_that_linux_and_btrfs_lack_are_refused_by_their_path() {
    let (_folder, store) = store();
    let device = |major: u32, minor: u32| {
        let mut file = header(b"dev/odd", b'3', 0, b"");
        file[329..337].copy_from_slice(format!("{major:07o}\0").as_bytes());
        file[337..345].copy_from_slice(format!("{minor:07o}\0").as_bytes());
        seal(&mut file);
        from_tar(&store, ended(&[file]))
    };
    device(4095, 1048575).unwrap();
    for (major, minor) in [(2097151, 2097151), (1, 1 << 20), (4096, 0)] {
        let error = device(major, minor).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Corrupt, "{error}");
        let what = format!("\"dev/odd\" in the archive is the device {major}:{minor}");
        assert!(error.to_string().contains(&what), "{error}");
    }
    let mut names = vec![header(b"file", b'0', 0, b"")];
    names.extend((1..65535).map(|n| header(format!("link-{n}").as_bytes(), b'1', 0, b"file")));
    from_tar(&store, ended(&names)).unwrap();
    names.push(header(b"one-more", b'1', 0, b"file"));
    let error = from_tar(&store, ended(&names)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::UnsupportedFormat, "{error}");
    assert!(error.to_string().starts_with("/file has 65536 names"), "{error}");
}

/// btrfs keeps names of one hash in one item of 16 KiB.
#[test]
fn names_of_one_hash_that_no_item_holds_are_refused_by_the_build() {
    let (_folder, store) = store();
    let hash = |name: &[u8]| burgeon_block::ChecksumKind::Crc32c.of(name) as u32;
    // CRC-32C is affine: for names of equal length, hashes differ by a function of the bytes'
    // difference.
    let zero = hash(&[0; 40]);
    let bit = |n: usize| {
        let mut name = [0; 40];
        name[n / 8] = 1 << (n % 8);
        hash(&name) ^ zero
    };
    // Changes of the first 36 bytes that preserve all 32 bits: Gauss over the low four bits of
    // each byte.
    let mut rows: Vec<(u32, [u8; 40])> = Vec::new();
    let mut kernel: Vec<[u8; 40]> = Vec::new();
    for n in (0..36 * 8).filter(|n| n % 8 < 4) {
        let (mut sum, mut change) = (bit(n), [0u8; 40]);
        change[n / 8] = 1 << (n % 8);
        for (other, by) in &rows {
            if sum ^ other < sum {
                sum ^= other;
                change.iter_mut().zip(by).for_each(|(to, by)| *to ^= by);
            }
        }
        match sum {
            0 => kernel.push(change),
            _ => {
                rows.push((sum, change));
                rows.sort_by_key(|row| std::cmp::Reverse(row.0));
            }
        }
    }
    let name = |n: usize| {
        let mut name = [b'p'; 40];
        let changes = kernel.iter().take(16).enumerate().filter(|(bit, _)| n >> bit & 1 == 1);
        for (_, change) in changes {
            name.iter_mut().zip(change).for_each(|(to, by)| *to ^= by);
        }
        name
    };
    let file = |n: usize| header(&name(n), b'0', 0, b"");
    assert!((1..300).all(|n| hash(&name(n)) == hash(&name(0)) && name(n) != name(n - 1)));
    from_tar(&store, ended(&(0..200).map(file).collect::<Vec<_>>())).unwrap();
    let error = from_tar(&store, ended(&(0..300).map(file).collect::<Vec<_>>())).unwrap_err();
    let text = format!("{error} {error:?}");
    assert!(error.kind() == ErrorKind::Invalid && text.contains("one hash"), "{text}");
}
