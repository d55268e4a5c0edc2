//! A seeded tree of everything that a file system image has to carry.
//!
//! ```text
//!   names/     every byte, 255 bytes, hash collisions (one DIR_ITEM holds 64 names)
//!   sizes/     around every boundary: empty, inline, block, chunk; random, text, zeros, twins
//!   sparse/    holes at the start, in the middle, at the end; up to 1 TiB
//!   links/     hard links beyond one INODE_REF item, across folders, to special files; symlinks
//!   special/   devices with large numbers, fifos, sockets, a whiteout
//!   attrs/     xattrs (colliding, empty, binary), ACLs, capabilities, setuid, odd owners, times
//!   many/      one folder with many entries
//!   deep/      a long chain of folders
//!   random/    what the seed gives
//! ```
//!
//! Invariant: one seed makes one tree, the host's inode numbers and change times aside.

use std::{
    collections::HashMap,
    ffi::OsStr,
    fs,
    os::unix::{ffi::OsStrExt, fs::PermissionsExt},
    path::{Path, PathBuf},
};

use anyhow::{Context, Result};
use rustix::{
    fs::{AtFlags, CWD, FileType, Gid, Mode, Timespec, Timestamps, Uid},
    fs::{XattrFlags, chownat, lremovexattr, lsetxattr, mknodat, utimensat},
};

use crate::Rng;

/// The number of files of each kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TortureSize {
    /// Every kind once or so: seconds to make and compare.
    Small,
    /// Thousands of entries, tens of megabytes.
    Full,
}

impl TortureSize {
    pub(crate) fn choose(self, small: usize, full: usize) -> usize {
        match self {
            Self::Small => small,
            Self::Full => full,
        }
    }
}

/// The maker of one tree.
pub struct Torture {
    pub(crate) root: PathBuf,
    pub(crate) rng: Rng,
    pub(crate) size: TortureSize,
    folders: Vec<PathBuf>,
}

impl Torture {
    /// Makes the tree of `seed` in the new folder `root`. Needs root: device nodes, owners,
    /// capabilities.
    pub fn make(root: &Path, seed: u64, size: TortureSize) -> Result<()> {
        let rng = Rng::new(seed);
        let mut torture = Self { root: root.to_path_buf(), rng, size, folders: Vec::new() };
        torture.all().with_context(|| format!("making the torture tree of seed {seed}"))
    }

    /// Removes the parts of such a tree that an archive does not carry: attributes of root.
    pub fn forget_privileged_attributes(root: &Path) -> Result<()> {
        let folder = root.join("attrs");
        lremovexattr(folder.join("xattrs"), "trusted.burgeon")?;
        lremovexattr(folder.join("xattr-symlink"), "trusted.on-a-link")?;
        Ok(())
    }

    fn all(&mut self) -> Result<()> {
        fs::create_dir(&self.root).with_context(|| format!("{:?}", self.root))?;
        self.folders.push(self.root.clone());
        self.names()?;
        self.sizes()?;
        self.sparse()?;
        self.links()?;
        self.special()?;
        self.attributes()?;
        self.many()?;
        self.deep()?;
        self.random()?;
        // Folders last and deepest first: making an entry changes its folder's time.
        for folder in std::mem::take(&mut self.folders).iter().rev() {
            self.stamp(folder)?;
        }
        Ok(())
    }

    pub(crate) fn folder(&mut self, parent: &Path, name: &[u8]) -> Result<PathBuf> {
        let path = parent.join(OsStr::from_bytes(name));
        fs::create_dir(&path).with_context(|| format!("{path:?}"))?;
        self.folders.push(path.clone());
        Ok(path)
    }

    pub(crate) fn file(&mut self, folder: &Path, name: &[u8], content: &[u8]) -> Result<PathBuf> {
        let path = folder.join(OsStr::from_bytes(name));
        fs::write(&path, content).with_context(|| format!("{path:?}"))?;
        self.stamp(&path)?;
        Ok(path)
    }

    /// A modification time of the seed's: before 1970, far ahead, with every nanosecond.
    pub(crate) fn stamp(&mut self, path: &Path) -> Result<()> {
        let seconds = match self.rng.below(8) {
            0 => -((self.rng.below(1 << 31)) as i64),
            1 => 1 << 33,
            2 => 0,
            _ => 1_600_000_000 + self.rng.below(100_000_000) as i64,
        };
        let nanoseconds = *self.rng.pick(&[0, 1, 999_999_999, 123_456_789]);
        set_time(path, seconds, nanoseconds)
    }

    fn names(&mut self) -> Result<()> {
        let root = self.root.clone();
        let names = self.folder(&root, b"names")?;
        for byte in (1..=255u8).filter(|b| !matches!(b, b'/' | b'.')) {
            self.file(&names, &[byte], &[byte])?;
        }
        for len in [2, 8, 127, 128, 254, 255] {
            let mut name = self.rng.bytes(len);
            name.iter_mut().filter(|b| matches!(b, 0 | b'/')).for_each(|b| *b = b'_');
            self.file(&names, &name, b"long")?;
        }
        for name in ["...", " ", "-rf", "*", "a\nb", "\u{202e}x", "ünïcödé", "%s%n", "\\", "'\""]
        {
            self.file(&names, name.as_bytes(), name.as_bytes())?;
        }
        let collisions = self.folder(&root, b"collisions")?;
        for name in colliding_names(&mut self.rng, b"", 6) {
            self.file(&collisions, &name, &name)?;
        }
        Ok(())
    }

    fn special(&mut self) -> Result<()> {
        let root = self.root.clone();
        let folder = self.folder(&root, b"special")?;
        let nodes = [
            ("null", FileType::CharacterDevice, 1, 3),
            ("whiteout", FileType::CharacterDevice, 0, 0),
            ("large-minor", FileType::BlockDevice, 7, 0xf_ffff),
            ("large-major", FileType::CharacterDevice, 0xfff, 0x100),
            ("loop-like", FileType::BlockDevice, 259, 65_536),
            ("fifo", FileType::Fifo, 0, 0),
            ("socket", FileType::Socket, 0, 0),
        ];
        for (name, kind, major, minor) in nodes {
            let path = folder.join(name);
            let mode = Mode::from_raw_mode(0o640);
            mknodat(CWD, &path, kind, mode, rustix::fs::makedev(major, minor))
                .with_context(|| format!("{path:?}"))?;
            self.stamp(&path)?;
        }
        let second = folder.join("fifo-again");
        fs::hard_link(folder.join("fifo"), second)?;
        Ok(())
    }

    fn attributes(&mut self) -> Result<()> {
        let root = self.root.clone();
        let folder = self.folder(&root, b"attrs")?;
        for mode in [0o000, 0o400, 0o4755, 0o2755, 0o1644, 0o7777, 0o6711] {
            let path = self.file(&folder, format!("mode-{mode:o}").as_bytes(), b"#!/bin/sh\n")?;
            fs::set_permissions(&path, fs::Permissions::from_mode(mode))?;
        }
        for (uid, gid) in [(1, 2), (65_534, 65_534), (100_000, 165_536), (u32::MAX - 1, 7)] {
            let path = self.file(&folder, format!("owner-{uid}-{gid}").as_bytes(), b"")?;
            set_owner(&path, uid, gid)?;
        }
        self.xattrs(&folder)?;
        let capable = self.file(&folder, b"capability", b"net")?;
        // VFS_CAP_REVISION_2 with the effective bit, CAP_NET_RAW | CAP_NET_BIND_SERVICE permitted.
        let mut value = vec![1, 0, 0, 2];
        value.extend([(1u32 << 13 | 1 << 10).to_le_bytes(), [0; 4], [0; 4], [0; 4]].concat());
        set_xattr(&capable, b"security.capability", &value)?;
        let listed = self.file(&folder, b"acl", b"acl")?;
        set_xattr(&listed, b"system.posix_acl_access", &acl(1000))?;
        let inherits = self.folder(&folder, b"default-acl")?;
        set_xattr(&inherits, b"system.posix_acl_access", &acl(1001))?;
        set_xattr(&inherits, b"system.posix_acl_default", &acl(1002))?;
        let sticky = self.folder(&folder, b"sticky")?;
        set_owner(&sticky, 33, 33)?;
        fs::set_permissions(&sticky, fs::Permissions::from_mode(0o3777))?;
        let closed = self.folder(&folder, b"closed")?;
        self.file(&closed, b"inside", b"root sees it")?;
        fs::set_permissions(&closed, fs::Permissions::from_mode(0o000))?;
        Ok(())
    }

    fn xattrs(&mut self, folder: &Path) -> Result<()> {
        let many = self.file(folder, b"xattrs", b"many")?;
        for index in 0..20 {
            let value = self.rng.bytes(index * 3);
            set_xattr(&many, format!("user.n{index:02}").as_bytes(), &value)?;
        }
        set_xattr(&many, b"trusted.burgeon", b"seen by root only")?;
        let large = self.file(folder, b"xattr-large", &[])?;
        let value = self.rng.bytes(3000);
        set_xattr(&large, b"user.large", &value)?;
        let colliding = self.file(folder, b"xattr-collisions", b"c")?;
        for name in colliding_names(&mut self.rng, b"user.", 4) {
            set_xattr(&colliding, &name, &name)?;
        }
        let link = folder.join("xattr-symlink");
        std::os::unix::fs::symlink("xattrs", &link)?;
        set_xattr(&link, b"trusted.on-a-link", b"yes")?;
        self.stamp(&link)?;
        let directory = self.folder(folder, b"xattr-folder")?;
        set_xattr(&directory, b"user.folder", b"")?;
        Ok(())
    }

    fn many(&mut self) -> Result<()> {
        let root = self.root.clone();
        let folder = self.folder(&root, b"many")?;
        for index in 0..self.size.choose(300, 6000) {
            let path = folder.join(format!("entry-{index}"));
            fs::write(&path, index.to_string())?;
            set_time(&path, index as i64, 0)?;
        }
        Ok(())
    }

    fn deep(&mut self) -> Result<()> {
        let mut folder = self.root.clone();
        for level in 0..self.size.choose(20, 120) {
            folder = self.folder(&folder, format!("deep-{level}").as_bytes())?;
        }
        self.file(&folder, b"bottom", b"here")?;
        Ok(())
    }

    fn random(&mut self) -> Result<()> {
        let root = self.root.clone();
        let top = self.folder(&root, b"random")?;
        let mut folders = vec![top];
        for index in 0..self.size.choose(60, 1500) {
            let parent = self.rng.pick(&folders).clone();
            if self.rng.below(8) == 0 {
                folders.push(self.folder(&parent, format!("d{index}").as_bytes())?);
                continue;
            }
            let len = 1usize << self.rng.below(17);
            let len = self.rng.below(len as u64) as usize;
            let content = self.content(len);
            let path = self.file(&parent, format!("f{index}").as_bytes(), &content)?;
            let mode = self.rng.below(0o1000) as u32;
            fs::set_permissions(&path, fs::Permissions::from_mode(mode))?;
        }
        Ok(())
    }
}

/// Sets the modification time, of a symlink itself, too.
pub(crate) fn set_time(path: &Path, seconds: i64, nanoseconds: i64) -> Result<()> {
    let time = Timespec { tv_sec: seconds, tv_nsec: nanoseconds };
    let times = Timestamps { last_access: time, last_modification: time };
    utimensat(CWD, path, &times, AtFlags::SYMLINK_NOFOLLOW).with_context(|| format!("{path:?}"))
}

fn set_owner(path: &Path, uid: u32, gid: u32) -> Result<()> {
    let (uid, gid) = (Uid::from_raw(uid), Gid::from_raw(gid));
    chownat(CWD, path, Some(uid), Some(gid), AtFlags::SYMLINK_NOFOLLOW)
        .with_context(|| format!("{path:?}"))
}

fn set_xattr(path: &Path, name: &[u8], value: &[u8]) -> Result<()> {
    lsetxattr(path, OsStr::from_bytes(name), value, XattrFlags::empty())
        .with_context(|| format!("{path:?}: {}", name.escape_ascii()))
}

/// An access control list in the kernel's xattr form: owner rwx, user `uid` r-x, group r--,
/// mask r-x, others nothing.
fn acl(uid: u32) -> Vec<u8> {
    const ANY: u32 = u32::MAX;
    let entries =
        [(0x01u16, 7u16, ANY), (0x02, 5, uid), (0x04, 4, ANY), (0x10, 5, ANY), (0x20, 0, ANY)];
    let mut bytes = 2u32.to_le_bytes().to_vec();
    for (tag, permissions, id) in entries {
        bytes.extend(tag.to_le_bytes());
        bytes.extend(permissions.to_le_bytes());
        bytes.extend(id.to_le_bytes());
    }
    bytes
}

/// 2^`pairs` names whose CRC-32C is the same, so that btrfs puts all of them in one item.
///
/// CRC is affine: two strings of one length that collide from one start collide from every
/// start, so each of `pairs` places may hold either half of a colliding pair.
fn colliding_names(rng: &mut Rng, prefix: &[u8], pairs: usize) -> Vec<Vec<u8>> {
    let mut names = vec![prefix.to_vec()];
    let mut seen: HashMap<u32, [u8; 7]> = HashMap::new();
    let mut found = 0;
    while found < pairs {
        let mut part = [0u8; 7];
        part.iter_mut().for_each(|byte| *byte = b'a' + rng.below(26) as u8);
        let Some(twin) = seen.insert(crc32c::crc32c(&part), part).filter(|twin| *twin != part)
        else {
            continue;
        };
        let with = |part: [u8; 7]| names.iter().map(move |n| [n.as_slice(), &part].concat());
        names = with(part).chain(with(twin)).collect();
        seen.clear();
        found += 1;
    }
    names
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::colliding_names;
    use crate::Rng;

    #[test]
    fn colliding_names_differ_and_collide() {
        let names = colliding_names(&mut Rng::new(1), b"user.", 5);
        assert_eq!(names.iter().collect::<BTreeSet<_>>().len(), 32);
        // As btrfs hashes them: CRC-32C from ~1, not inverted at the end.
        let hashes: BTreeSet<u32> = names.iter().map(|n| crc32c::crc32c_append(1, n)).collect();
        assert_eq!(hashes.len(), 1);
    }
}
