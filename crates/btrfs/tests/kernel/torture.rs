//! A tree with everything a file system can hold, and the comparison of a mount with it.

use std::{
    collections::BTreeMap,
    ffi::{CString, OsStr},
    fs::{self, File},
    os::unix::{
        ffi::OsStrExt,
        fs::{FileExt, MetadataExt},
    },
    path::Path,
};

use burgeon_btrfs::DATA_START;

use crate::common::{Builder, FILE, colliding, model, pattern};

/// An ACL in its stored form: version 2; owner rwx, user 1000 r-x, group r-x, mask r-x, others
/// none.
const ACL: &[u8] = b"\x02\0\0\0\x01\0\x07\0\xff\xff\xff\xff\x02\0\x05\0\xe8\x03\0\0\
    \x04\0\x05\0\xff\xff\xff\xff\x10\0\x05\0\xff\xff\xff\xff\x20\0\0\0\xff\xff\xff\xff";
/// cap_net_raw=ep, revision 2.
const CAPABILITY: &[u8] = b"\x01\0\0\x02\0\x20\0\0\0\0\0\0\0\0\0\0\0\0\0\0";

pub(crate) fn torture() -> Builder {
    let mut b = Builder::new();
    names(&mut b);
    contents(&mut b);
    sharing(&mut b);
    links(&mut b);
    attributes(&mut b);
    b
}

fn names(b: &mut Builder) {
    let names = b.dir(0, "names");
    for byte in (1..=255u8).filter(|byte| *byte != b'/') {
        b.add(names, [b'_', byte], FILE);
    }
    b.add(names, [0xff; 255], FILE);
    for name in colliding(!1, "name", 300) {
        b.inline(names, &name, &name);
    }
    let mut deep = b.dir(0, "deep");
    (0..200).for_each(|n| deep = b.dir(deep, format!("level {n}")));
    b.inline(deep, "bottom", b"here");
    let wide = b.dir(0, "wide");
    (0..20_000).for_each(|n| {
        b.add(wide, format!("a name of some length {n}"), FILE);
    });
    b.symlink(0, "short link", b"x");
    b.symlink(0, "long link", &[b'y'; 4095]);
}

fn contents(b: &mut Builder) {
    let files = b.dir(0, "files");
    for len in [0, 1, 100, 2047, 2048, 2049, 4095] {
        b.inline(files, format!("inline {len}"), &pattern(len as u64, len));
    }
    for len in [1, 4095, 4096, 4097, 100_000, 5 << 20] {
        b.file(files, format!("lazy {len}"), &pattern(len as u64, len));
    }
    let at = b.append(&pattern(77, 16 << 10));
    b.mapped(files, "hole before", 20_000, &[(16384, at, 4096)]);
    b.mapped(files, "hole inside", 28_000, &[(0, at, 4096), (16384, at + 4096, 12288)]);
    b.mapped(files, "hole behind", 9 << 20, &[(0, at, 8192)]);
    let huge = 1 << 40;
    b.mapped(files, "huge", huge, &[(0, at, 4096), (huge / 2, at, 8192), (huge - 4096, at, 4096)]);
    let hole = b.add(files, "only a hole", FILE);
    b.tree.inodes[hole as usize].size = (1 << 40) + 5;
    let at = b.append(&pattern(78, 64 << 10));
    let plain = b.mapped(files, "no checksums", 60_000, &[(0, at, 61_440)]);
    b.tree.inodes[plain as usize].nodatasum = true;
}

fn sharing(b: &mut Builder) {
    let shared = b.dir(0, "shared");
    let at = b.append(&pattern(80, 256 << 10));
    for n in 0..64u64 {
        let (skip, len) = (n * 4096, (64 - n) * 4096);
        b.mapped(shared, format!("tail {n}"), len, &[(0, at + skip, len)]);
    }
    let one = b.append(&pattern(81, 4096));
    for n in 0..500 {
        b.mapped(shared, format!("same {n}"), 4096 - n % 3, &[(0, one, 4096)]);
    }
    let runs: Vec<_> = (0..300).map(|n| (n * 4096, one, 4096)).collect();
    b.mapped(shared, "repeats", 300 * 4096, &runs);
}

fn links(b: &mut Builder) {
    let links = b.dir(0, "links");
    let other = b.dir(0, "other links");
    let target = b.file(links, "target", &pattern(90, 10_000));
    for n in 0..1500 {
        b.link(links, format!("a link with quite a long name, number {n}"), target);
        b.link(other, format!("another link, number {n}"), target);
    }
    for name in colliding(256 + links, "collides", 60) {
        b.link(links, name, target);
    }
}

fn attributes(b: &mut Builder) {
    let odd = b.dir(0, "attributes");
    let set = |b: &mut Builder, name: &str, mode: u32, rdev: u64| {
        let inode = b.add(odd, name, mode);
        b.tree.inodes[inode as usize].rdev = rdev;
        inode
    };
    set(b, "character", 0o020666, 1 << 20 | 3);
    set(b, "block", 0o060600, 4095 << 20 | 1_048_575);
    set(b, "fifo", 0o010644, 0);
    set(b, "socket", 0o140755, 0);
    set(b, "setuid", 0o104755, 0);
    set(b, "setgid directory", 0o042775, 0);
    set(b, "sticky", 0o041777, 0);
    set(b, "nothing allowed", 0o100000, 0);
    for (n, time) in [(0, 0), (-1, 999_999_999), (-12_345_678_901, 1), (1 << 40, 123_456_789)]
        .into_iter()
        .enumerate()
    {
        let inode = set(b, &format!("time {n}"), FILE, 0) as usize;
        (b.tree.inodes[inode].mtime_s, b.tree.inodes[inode].mtime_ns) = time;
        (b.tree.inodes[inode].uid, b.tree.inodes[inode].gid) = (u32::MAX - 1, 1000 + n as u32);
    }
    let file = set(b, "capable", 0o100755, 0);
    b.xattrs(file, &[(b"security.capability", CAPABILITY), (b"user.empty", b"")]);
    let directory = b.dir(odd, "acl");
    let both: [(&[u8], &[u8]); 2] =
        [(b"system.posix_acl_access", ACL), (b"system.posix_acl_default", ACL)];
    b.xattrs(directory, &both);
    // The kernel keeps the group bits of the mode equal to the mask.
    b.tree.inodes[directory as usize].mode = 0o040750;
    let file = set(b, "many", FILE, 0);
    let names = colliding(!1, "user.", 30);
    let mut many: Vec<(&[u8], &[u8])> = names.iter().map(|n| (&n[..], &n[..])).collect();
    let large = pattern(5, 16_228 - b"user.large".len());
    many.push((b"user.large", &large));
    many.push((b"trusted.any", b"\0\x01"));
    b.xattrs(file, &many);
    let link = b.symlink(odd, "link", b"many");
    b.xattrs(link, &[(b"trusted.link", b"on a symlink")]);
}

/// Compares the mount at `root` with the tree and data of `builder`, entry by entry.
pub(crate) fn compare(builder: &Builder, root: &Path) {
    let expected = model::of_tree(&builder.tree);
    let mut waiting = vec![(256, root.to_path_buf())];
    let mut seen = 0;
    while let Some((number, path)) = waiting.pop() {
        seen += 1;
        let entry = &expected[&number];
        attributes_agree(number, entry, &path);
        match entry.mode & 0o170000 {
            0o040000 => {
                let names = fs::read_dir(&path).unwrap().map(|e| e.unwrap().file_name());
                let names: Vec<Vec<u8>> = names.map(|name| name.as_bytes().to_vec()).collect();
                assert!(names.iter().eq(entry.entries.iter().map(|(name, _)| name)), "{path:?}");
                for (name, child) in &entry.entries {
                    waiting.push((*child, path.join(OsStr::from_bytes(name))));
                }
            }
            0o120000 => {
                let target = fs::read_link(&path).unwrap();
                assert_eq!(target.as_os_str().as_bytes(), entry.inline, "{path:?}");
            }
            0o100000 => content_agrees(builder, entry, &path),
            _ => {}
        }
    }
    assert_eq!(seen, builder.tree.dirents.len() + 1);
}

fn attributes_agree(number: u64, entry: &model::ModelEntry, path: &Path) {
    let found = fs::symlink_metadata(path).unwrap();
    assert_eq!(found.ino(), number, "{path:?}");
    assert_eq!(found.mode(), entry.mode, "{path:?}");
    assert_eq!((found.uid(), found.gid()), entry.owner, "{path:?}");
    assert_eq!(found.size(), entry.size, "{path:?}");
    assert_eq!(found.nlink(), u64::from(entry.links), "{path:?}");
    let device = libc::makedev((entry.rdev >> 20) as u32, (entry.rdev & 0xf_ffff) as u32);
    assert_eq!(found.rdev(), device, "{path:?}");
    let time = (entry.time.0, i64::from(entry.time.1));
    assert_eq!((found.mtime(), found.mtime_nsec()), time, "{path:?}");
    assert_eq!((found.ctime(), found.ctime_nsec()), time, "{path:?}");
    if entry.extents.is_empty() && entry.inline.is_empty() {
        assert_eq!(found.blocks(), 0, "{path:?}");
    }
    assert_eq!(xattrs(path), entry.xattrs, "{path:?}");
}

fn content_agrees(builder: &Builder, entry: &model::ModelEntry, path: &Path) {
    let file = File::open(path).unwrap();
    let read = |offset: u64, len: u64| {
        let mut bytes = vec![0xee; len as usize];
        file.read_exact_at(&mut bytes, offset).unwrap();
        bytes
    };
    if !entry.inline.is_empty() {
        assert_eq!(read(0, entry.size), entry.inline, "{path:?}");
    }
    let mut end = 0;
    for &(offset, address, len) in &entry.extents {
        let hole = (offset - end).min(1 << 20);
        assert!(read(offset - hole, hole).iter().all(|byte| *byte == 0), "{path:?}");
        end = offset + len;
        let len = len.min(entry.size - offset);
        let at = (address - DATA_START) as usize;
        assert!(read(offset, len) == builder.data[at..at + len as usize], "{path:?} at {offset}");
    }
    let hole = (entry.size.saturating_sub(end)).min(1 << 20);
    if entry.inline.is_empty() {
        assert!(read(entry.size - hole, hole).iter().all(|byte| *byte == 0), "{path:?}");
    }
}

fn xattrs(path: &Path) -> BTreeMap<Vec<u8>, Vec<u8>> {
    let path = CString::new(path.as_os_str().as_bytes()).unwrap();
    let mut buffer = vec![0u8; 65536];
    // SAFETY: a valid path and a buffer of the length given.
    let len = unsafe { libc::llistxattr(path.as_ptr(), buffer.as_mut_ptr().cast(), buffer.len()) };
    assert!(len >= 0, "{path:?}: {}", std::io::Error::last_os_error());
    let names = buffer[..len as usize].split_inclusive(|byte| *byte == 0);
    let value = |name: &[u8]| {
        let mut value = vec![0u8; 65536];
        // SAFETY: a valid path, a name that ends in NUL, a buffer of the length given.
        let len = unsafe {
            libc::lgetxattr(
                path.as_ptr(),
                name.as_ptr().cast(),
                value.as_mut_ptr().cast(),
                value.len(),
            )
        };
        assert!(len >= 0, "{path:?}: {}", std::io::Error::last_os_error());
        value.truncate(len as usize);
        value
    };
    names.map(|name| (name[..name.len() - 1].to_vec(), value(name))).collect()
}
