//! Trees that break a rule are refused with `Invalid`; no input makes the writer panic.

#![allow(clippy::unwrap_used, reason = "a test")]

mod common;

use burgeon_block::ErrorKind;
use burgeon_btrfs::{
    BlobRange, DATA_START, Dirent, FileExtent, Inode, InodeBody, SeedOptions, Tree, Xattr,
    write_seed,
};
use common::{Builder, DIR, FILE, LINK, Template, colliding, options};
use proptest::prelude::*;

const DATA_END: u64 = DATA_START + (1 << 20);
const CHECKSUMS: [u8; 1024] = [1; 1024];

fn write(tree: &Tree) -> burgeon_block::Result<()> {
    write_seed(tree, &CHECKSUMS, &options(DATA_END), &Template::default()).map(|_| ())
}

/// Asserts that a small valid tree is refused after `change`, with `expected` in the message.
#[track_caller]
fn refused(expected: &str, change: impl FnOnce(&mut Tree)) {
    let mut tree = good();
    write(&tree).unwrap();
    change(&mut tree);
    let error = write(&tree).expect_err(expected);
    assert_eq!(error.kind(), ErrorKind::Invalid);
    assert!(error.to_string().contains(expected), "{expected:?} expected: {error}");
}

const DIRECTORY: usize = 1;
const DATA: usize = 2;
const INLINE: usize = 3;
const SYMLINK: usize = 4;
const FIFO: usize = 5;
const SECOND: usize = 6;

fn good() -> Tree {
    let mut b = Builder::new();
    let directory = b.dir(0, "directory");
    b.mapped(directory, "data", 20_000, &[(0, DATA_START, 8192), (16384, DATA_START, 4096)]);
    b.inline(directory, "inline", b"text");
    b.symlink(0, "symlink", b"target");
    b.add(0, "fifo", 0o010644);
    let second = b.mapped(0, "second", 4096, &[(0, DATA_START + 65536, 4096)]);
    b.xattrs(second, &[(b"user.a", b"1"), (b"user.b", b"2")]);
    b.finish().clone()
}

fn with_bytes(tree: &mut Tree, bytes: &[u8]) -> BlobRange {
    tree.push_bytes(bytes).unwrap()
}

#[test]
fn invalid_inodes_are_refused() {
    refused("no root", |t| t.inodes.clear());
    refused("is not a directory", |t| t.inodes[0].mode = FILE);
    refused("not a file mode", |t| t.inodes[DATA].mode = 0o644);
    refused("not a file mode", |t| t.inodes[DATA].mode |= 1 << 20);
    refused("nanoseconds", |t| t.inodes[DATA].mtime_ns = 1_000_000_000);
    refused("device number", |t| t.inodes[FIFO].rdev = 1);
    refused("device number", |t| {
        t.inodes[FIFO].mode = 0o020644;
        t.inodes[FIFO].rdev = 1 << 32;
    });
    refused("bytes long", |t| t.inodes[DATA].size = 1 << 63);
    refused("bytes long", |t| t.inodes[FIFO].size = 1);
    refused("bytes long", |t| t.inodes[DIRECTORY].size = 1);
    refused("needs a target", |t| t.inodes[SYMLINK].body = InodeBody::None);
    refused("beyond the end of the blob", |t| {
        t.inodes[INLINE].body = InodeBody::Inline(BlobRange { start: u64::MAX, len: 4 });
    });
    refused("do not fit", |t| t.inodes[INLINE].size = 3);
    refused("do not fit", |t| {
        let span = with_bytes(t, &[1; 4096]);
        (t.inodes[INLINE].body, t.inodes[INLINE].size) = (InodeBody::Inline(span), 4096);
    });
    refused("empty or contains", |t| {
        t.inodes[SYMLINK].body = InodeBody::Inline(BlobRange { start: 0, len: 0 });
        t.inodes[SYMLINK].size = 0;
    });
    refused("empty or contains", |t| {
        let span = with_bytes(t, b"a\0b");
        (t.inodes[SYMLINK].body, t.inodes[SYMLINK].size) = (InodeBody::Inline(span), 3);
    });
    refused("only a file can have extents", |t| {
        t.inodes[FIFO].body = InodeBody::Extents { first: 0, count: 1 };
    });
    refused("extents are beyond", |t| {
        t.inodes[DATA].body = InodeBody::Extents { first: u32::MAX, count: u32::MAX };
    });
    refused("without checksums", |t| t.inodes[DIRECTORY].nodatasum = true);
}

#[test]
fn invalid_names_are_refused() {
    for name in [&b""[..], b".", b"..", b"a/b", b"a\0b", &[b'x'; 256]] {
        refused("is not a file name", |t| t.dirents[0].name = with_bytes(t, name));
    }
    refused("beyond the end of the blob", |t| t.dirents[0].name.start = 1 << 40);
    refused("there is no inode", |t| t.dirents[0].inode = 99);
    refused("is not a directory", |t| t.dirents[0].parent = 99);
    refused("is not a directory", |t| t.dirents[0].parent = DATA as u32);
    refused("there twice", |t| {
        let name = t.dirents[0].name;
        t.dirents[1].name = name;
    });
    refused("not side by side", |t| {
        let first = t.dirents.remove(0);
        t.dirents.push(first);
    });
    refused("too many names with one hash", |t| {
        for name in colliding(!1, "x", 600) {
            let name = with_bytes(t, &name);
            t.dirents.insert(0, Dirent { parent: 0, inode: FIFO as u32, name });
        }
    });
}

#[test]
fn invalid_links_are_refused() {
    let link = |t: &mut Tree, inode: usize, name: &str| {
        let name = with_bytes(t, name.as_bytes());
        t.dirents.insert(0, Dirent { parent: 0, inode: inode as u32, name });
    };
    refused("has 0 names", |t| {
        t.dirents.pop();
    });
    refused("has 2 names", |t| link(t, DIRECTORY, "again"));
    refused("has 1 names", |t| link(t, 0, "root"));
    refused("has 65536 names", |t| (0..65535).for_each(|n| link(t, FIFO, &n.to_string())));
    refused("inside itself", |t| {
        t.inodes.push(Inode { mode: DIR, ..Inode::default() });
        t.inodes.push(Inode { mode: DIR, ..Inode::default() });
        let name = with_bytes(t, b"circle");
        t.dirents.push(Dirent { parent: 7, inode: 8, name });
        t.dirents.push(Dirent { parent: 8, inode: 7, name });
    });
    refused("inside itself", |t| {
        t.inodes.push(Inode { mode: DIR, ..Inode::default() });
        let name = with_bytes(t, b"circle");
        t.dirents.push(Dirent { parent: 7, inode: 7, name });
    });
    refused("too many names with one hash", |t| {
        // They fill one INODE_REF, and the rest share one INODE_EXTREF.
        for name in colliding(256, "x", 3000) {
            let name = with_bytes(t, &name);
            t.dirents.insert(0, Dirent { parent: 0, inode: FIFO as u32, name });
        }
    });
}

#[test]
fn invalid_xattrs_are_refused() {
    refused("attributes are beyond", |t| t.inodes[DATA].xattr_count = 3);
    refused("beyond the end of the blob", |t| t.xattrs[0].value.start = 1 << 60);
    for name in [&b""[..], b"user.\0", &[b'x'; 256]] {
        refused("empty or too long", |t| t.xattrs[0].name = with_bytes(t, name));
    }
    refused("empty or too long", |t| t.xattrs[0].value = with_bytes(t, &[0; 16300]));
    refused("there twice", |t| t.xattrs[1].name = t.xattrs[0].name);
    refused("attributes with one hash", |t| {
        let first = t.xattrs.len() as u32;
        for name in colliding(!1, "user.", 600) {
            let name = with_bytes(t, &name);
            t.xattrs.push(Xattr { name, value: BlobRange::default() });
        }
        (t.inodes[SECOND].xattr_first, t.inodes[SECOND].xattr_count) = (first, 600);
    });
}

#[test]
fn invalid_extents_are_refused() {
    let extent = |change: fn(&mut FileExtent)| {
        refused("cannot be", |t| change(&mut t.extents[1]));
    };
    extent(|e| e.file_offset += 1);
    extent(|e| e.address += 1);
    extent(|e| e.len += 1);
    extent(|e| e.len = 0);
    extent(|e| e.len += 4096);
    extent(|e| e.file_offset = 4096);
    extent(|e| e.file_offset = u64::MAX - 4095);
    extent(|e| e.address = DATA_START - 4096);
    extent(|e| e.address = DATA_END);
    extent(|e| e.address = u64::MAX - 4095);
    extent(|e| e.len = u64::MAX - 4095);
    refused("belong to another", |t| {
        t.inodes[SECOND].body = InodeBody::Extents { first: 0, count: 3 };
        t.inodes[SECOND].size = 20_000;
    });
    refused("with checksums and to one without", |t| {
        t.extents[2].address = DATA_START;
        t.inodes[SECOND].nodatasum = true;
    });
}

#[test]
fn invalid_options_are_refused() {
    let tree = good();
    let refused = |options: &SeedOptions, checksums: &[u8], expected: &str| {
        let error =
            write_seed(&tree, checksums, options, &Template::default()).expect_err(expected);
        assert_eq!(error.kind(), ErrorKind::Invalid);
        assert!(error.to_string().contains(expected), "{error}");
    };
    for end in [0, DATA_START - 4096, DATA_END + 1, u64::MAX, 8 << 60] {
        refused(&options(end), &CHECKSUMS, "the lazy data ends at");
    }
    refused(&options(DATA_END), &CHECKSUMS[..17 * 4 - 1], "17 block checksums are needed");
    let little = SeedOptions { metadata_bytes_max: 16384 * 10, ..options(DATA_END) };
    refused(&little, &CHECKSUMS, "bytes of metadata");
}

/// A few bytes of input must not become gigabytes of metadata, or take hours.
#[test]
fn small_trees_with_huge_metadata_are_refused_at_once() {
    let options = options(DATA_START + (1 << 40));
    let refused = |tree: &Tree| {
        let error = write_seed(tree, &[], &options, &Template::default()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
    };
    // Each file ends one block after the previous one: every file is cut at all of these ends.
    let mut b = Builder::new();
    for n in 1..12_000u64 {
        let file = b.mapped(0, n.to_string(), n * 4096, &[(0, DATA_START, n * 4096)]);
        b.tree.inodes[file as usize].nodatasum = true;
    }
    refused(b.finish());
    // All files share the same large attributes, or very many small ones.
    for (count, value) in [(1, vec![7; 16_000]), (5000, Vec::new())] {
        let mut b = Builder::new();
        let first = b.add(0, "first", FILE);
        let names: Vec<_> = (0..count).map(|n| format!("user.{n}").into_bytes()).collect();
        let all: Vec<(&[u8], &[u8])> = names.iter().map(|n| (&n[..], &value[..])).collect();
        b.xattrs(first, &all);
        for n in 0..20_000 {
            let file = b.add(0, n.to_string(), FILE) as usize;
            b.tree.inodes[file].xattr_count = count;
        }
        refused(b.finish());
    }
}

/// Numbers that are often nearly valid.
fn number(most: u64) -> impl Strategy<Value = u64> {
    prop_oneof![6 => 0..=most, 1 => any::<u64>(), 1 => (0..4u64).prop_map(|n| u64::MAX - n)]
}

fn span() -> impl Strategy<Value = BlobRange> {
    (number(40), number(20)).prop_map(|(start, len)| BlobRange { start, len: len as u32 })
}

fn inode() -> impl Strategy<Value = Inode> {
    let mode = prop_oneof![Just(DIR), Just(FILE), Just(LINK), Just(0o020644), any::<u32>()];
    let body = prop_oneof![
        Just(InodeBody::None),
        span().prop_map(InodeBody::Inline),
        (number(6), number(4)).prop_map(|(first, count)| InodeBody::Extents {
            first: first as u32,
            count: count as u32
        }),
    ];
    let attributes = (number(100_000), number(5), any::<i64>(), any::<u32>(), any::<bool>());
    (mode, body, attributes, (number(3), number(3))).prop_map(
        |(mode, body, (size, rdev, mtime_s, mtime_ns, nodatasum), (first, count))| Inode {
            mode,
            size: match body {
                InodeBody::Inline(span) if size % 2 == 0 => u64::from(span.len),
                _ if mode == DIR => size % 2,
                _ => size,
            },
            rdev: if mode == 0o020644 { rdev } else { rdev / 5 },
            mtime_s,
            mtime_ns: mtime_ns % 1_100_000_000,
            body,
            xattr_first: first as u32,
            xattr_count: count as u32,
            nodatasum: nodatasum && mode == FILE,
            ..Inode::default()
        },
    )
}

fn tree() -> impl Strategy<Value = Tree> {
    let dirent = (number(8), number(8), span()).prop_map(|(parent, inode, name)| Dirent {
        parent: parent as u32,
        inode: inode as u32,
        name,
    });
    let extent =
        (number(4), number(300), number(9)).prop_map(|(offset, address, len)| FileExtent {
            file_offset: offset.wrapping_mul(4096),
            address: DATA_START.wrapping_add(address.wrapping_mul(4096)),
            len: len.wrapping_mul(4096),
        });
    let xattr = (span(), span()).prop_map(|(name, value)| Xattr { name, value });
    (
        proptest::collection::vec(inode(), 0..9),
        proptest::collection::vec(dirent, 0..9),
        proptest::collection::vec(extent, 0..9),
        proptest::collection::vec(xattr, 0..4),
        proptest::collection::vec(any::<u8>(), 0..60),
    )
        .prop_map(|(inodes, dirents, extents, xattrs, blob)| Tree {
            inodes,
            dirents,
            extents,
            xattrs,
            blob,
        })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, ..ProptestConfig::default() })]

    #[test]
    fn wild_trees_never_panic(tree in tree()) {
        if let Err(error) = write(&tree) {
            prop_assert_eq!(error.kind(), ErrorKind::Invalid);
        }
    }

    /// A valid tree with one number changed: refused, or written and then valid.
    #[test]
    fn slightly_invalid_trees_never_panic(which in 0..24usize, index in any::<usize>(), to in number(70_000)) {
        let mut tree = good();
        change(&mut tree, which, index, to);
        let template = Template::default();
        match write_seed(&tree, &CHECKSUMS, &options(DATA_END), &template) {
            Err(error) => prop_assert_eq!(error.kind(), ErrorKind::Invalid),
            Ok(info) => {
                let seed = common::Seed { info, pieces: template.into_pieces() };
                prop_assert!(seed.check().is_ok(), "{:?}", seed.check());
                prop_assert_eq!(common::model::of_seed(&seed), common::model::of_tree(&tree));
            }
        }
    }
}

fn change(tree: &mut Tree, which: usize, index: usize, to: u64) {
    let inodes = tree.inodes.len();
    let inode = &mut tree.inodes[index % inodes];
    let dirents = tree.dirents.len();
    let dirent = &mut tree.dirents[index % dirents];
    let extents = tree.extents.len();
    let extent = &mut tree.extents[index % extents];
    let xattrs = tree.xattrs.len();
    let xattr = &mut tree.xattrs[index % xattrs];
    match which {
        0 => inode.mode = to as u32,
        1 => inode.mode ^= 1 << (to % 32),
        2 => inode.rdev = to,
        3 => inode.size = to,
        4 => inode.mtime_s = to as i64,
        5 => inode.mtime_ns = to as u32,
        6 => inode.body = InodeBody::None,
        7 => inode.body = InodeBody::Inline(BlobRange { start: to, len: index as u32 }),
        8 => inode.body = InodeBody::Extents { first: to as u32, count: index as u32 },
        9 => inode.xattr_first = to as u32,
        10 => inode.xattr_count = to as u32,
        11 => inode.nodatasum = !inode.nodatasum,
        12 => dirent.parent = to as u32,
        13 => dirent.inode = to as u32,
        14 => dirent.name.start = to,
        15 => dirent.name.len = to as u32,
        16 => extent.file_offset = to,
        17 => extent.address = to,
        18 => extent.address = DATA_START.wrapping_add(to.wrapping_mul(4096)),
        19 => extent.len = to,
        20 => extent.len = to.wrapping_mul(4096),
        21 => xattr.name.len = to as u32,
        22 => xattr.value.len = to as u32,
        _ => tree.blob.truncate(to as usize),
    }
}
