//! The input: a whole file tree.
//!
//! ```text
//!   dirents ──inode──► inodes ──body──► extents (file offset → lazy address)
//!      │ name             │   └───────► blob    (inline data, symlink targets)
//!      ▼                  ▼ xattr_first, xattr_count
//!     blob              xattrs ──name, value──► blob
//! ```
//!
//! Flat tables that refer to each other by index, so that a million files are a handful of
//! allocations and an image's manifest can hold them as they are.
//!
//! Nothing here is trusted: `write_seed` checks every rule stated below and refuses violations
//! (`Invalid`).

/// Bytes `start .. start + len` of [`Tree::blob`].
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Hash)]
pub struct BlobRange {
    /// First byte.
    pub start: u64,
    /// Length in bytes.
    pub len: u32,
}

/// The content of an inode.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Hash)]
pub enum InodeBody {
    /// Nothing: a directory, a device, a fifo, a socket, or a file that is one hole.
    #[default]
    None,
    /// A small file's bytes (at most 4,095, exactly the file's size) or a symlink's target (1 to
    /// 4,095 bytes without NUL), kept in the metadata.
    Inline(BlobRange),
    /// Entries `first .. first + count` of [`Tree::extents`], ascending by file offset, not
    /// overlapping; gaps are holes.
    Extents {
        /// Index of the first.
        first: u32,
        /// Number of entries.
        count: u32,
    },
}

/// A file, directory, symlink or special file. Its access, change and birth times are its
/// modification time.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Inode {
    /// Type and permissions, `S_IFMT | 07777`.
    pub mode: u32,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// `major << 20 | minor` of a device, else 0.
    pub rdev: u64,
    /// Length in bytes of a file or symlink target, else 0.
    pub size: u64,
    /// Modification time: seconds since 1970, negative before.
    pub mtime_s: i64,
    /// Modification time: nanoseconds after `mtime_s`, below 10⁹.
    pub mtime_ns: u32,
    /// The content.
    pub body: InodeBody,
    /// First of its entries in [`Tree::xattrs`].
    pub xattr_first: u32,
    /// Number of entries. Several inodes may share theirs.
    pub xattr_count: u32,
    /// No checksums for this file's blocks. A block has checksums for all files that share it or
    /// for none.
    pub nodatasum: bool,
}

/// A name in a directory.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Dirent {
    /// Index of the directory's inode.
    pub parent: u32,
    /// Index of the inode named. A directory has one name; another file up to 65,535.
    pub inode: u32,
    /// 1 to 255 bytes without `/` and NUL; not `.` or `..`.
    pub name: BlobRange,
}

/// A contiguous range of a file that is contiguous in the lazy address space. All fields are in
/// whole blocks of 4 KiB.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct FileExtent {
    /// Offset in the file, in bytes.
    pub file_offset: u64,
    /// Lazy address of the first byte, from [`crate::DATA_START`] on.
    pub address: u64,
    /// Length in bytes, a multiple of 4,096; the last may reach past the file's size to the end
    /// of its last block.
    pub len: u64,
}

/// An extended attribute in its stored form: POSIX ACLs and file capabilities are the raw values
/// of `system.posix_acl_access` and `security.capability`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Xattr {
    /// Full name, 1 to 255 bytes without NUL.
    pub name: BlobRange,
    /// Value; name and value together at most 16,228 bytes.
    pub value: BlobRange,
}

/// A file tree. Inode 0 is the root directory; every other inode has at least one name, and
/// every directory can be reached from the root.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Tree {
    /// All inodes; the order decides their numbers.
    pub inodes: Vec<Inode>,
    /// All names: those of one directory adjacent, in `readdir` order.
    pub dirents: Vec<Dirent>,
    /// All file extents; each belongs to at most one inode.
    pub extents: Vec<FileExtent>,
    /// All extended attributes.
    pub xattrs: Vec<Xattr>,
    /// The bytes of all spans.
    pub blob: Vec<u8>,
}

impl Tree {
    /// The bytes of `span`; empty if it lies outside the blob.
    pub fn bytes(&self, span: BlobRange) -> &[u8] {
        let start = usize::try_from(span.start).unwrap_or(usize::MAX);
        let end = start.saturating_add(span.len as usize);
        self.blob.get(start..end).unwrap_or_default()
    }

    /// The extents of `inode`; none if it has another body.
    pub fn extents_of(&self, inode: &Inode) -> &[FileExtent] {
        match inode.body {
            InodeBody::Extents { first, count } => slice(&self.extents, first, count),
            InodeBody::None | InodeBody::Inline(_) => &[],
        }
    }

    /// The xattrs of `inode`.
    pub fn xattrs_of(&self, inode: &Inode) -> &[Xattr] {
        slice(&self.xattrs, inode.xattr_first, inode.xattr_count)
    }

    /// Appends `bytes` to the blob. `None` if they exceed the range of a span.
    pub fn push_bytes(&mut self, bytes: &[u8]) -> Option<BlobRange> {
        let span =
            BlobRange { start: self.blob.len() as u64, len: u32::try_from(bytes.len()).ok()? };
        self.blob.extend_from_slice(bytes);
        Some(span)
    }
}

fn slice<T>(items: &[T], first: u32, count: u32) -> &[T] {
    let first = first as usize;
    items.get(first..first.saturating_add(count as usize)).unwrap_or_default()
}
