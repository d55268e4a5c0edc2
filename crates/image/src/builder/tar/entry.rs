//! A file of an archive, as its headers describe it.

use super::super::xattrs;

/// A file of an archive. Its data follows in the stream: `stored_len` bytes.
#[derive(Debug, Default)]
pub(super) struct TarEntry {
    pub(super) path: Vec<u8>,
    pub(super) link: Vec<u8>,
    /// The type flag.
    pub(super) kind: u8,
    pub(super) mode: u32,
    pub(super) uid: u32,
    pub(super) gid: u32,
    /// Length of the file, holes included.
    pub(super) size: u64,
    pub(super) mtime_s: i64,
    pub(super) mtime_ns: u32,
    pub(super) major: u32,
    pub(super) minor: u32,
    pub(super) xattrs: xattrs::Xattrs,
    /// Bytes of the headers that describe this entry alone.
    pub(super) extended: u64,
    /// Bytes of all headers before its own, and of the map of its pieces.
    pub(super) headers: u64,
    /// It has a textual ACL that cannot be translated.
    pub(super) text_acl: bool,
    /// Data: offset in the file and length, in order; `None` if there are no holes.
    pub(super) map: Option<Vec<(u64, u64)>>,
    pub(super) stored_len: u64,
}

impl TarEntry {
    /// True for a regular file, which has data of its own.
    pub(super) fn is_regular(&self) -> bool {
        matches!(self.kind, b'0' | 0 | b'7' | b'S')
    }
}

/// A path of an archive, for messages.
pub(super) fn show(path: &[u8]) -> String {
    format!("{:?}", String::from_utf8_lossy(path))
}
