//! The attributes that pax records give to a file.
//!
//! Records are parsed once. Invariant: applying the attributes to an entry costs no more than they
//! add to it, because global records apply to every entry after them.

use burgeon_block::Result;

use super::{
    super::xattrs::{self, Xattrs},
    acl::{self, Acl},
    entry::TarEntry,
    records::{Records, decimal, time},
};
use crate::corrupt;

/// Attributes from pax records, which override the header.
#[derive(Debug, Default)]
pub(super) struct Attributes {
    path: Option<Vec<u8>>,
    link: Option<Vec<u8>>,
    size: Option<u64>,
    uid: Option<u32>,
    gid: Option<u32>,
    mtime: Option<(i64, u32)>,
    access: Option<TextAcl>,
    default: Option<TextAcl>,
    /// An ACL of another kind of file system, such as NFS.
    foreign_acl: bool,
    xattrs: Xattrs,
}

/// A textual ACL, translated; `None` if that is impossible.
type TextAcl = Option<Acl>;

/// The name of an attribute in a keyword, in which GNU tar escapes `=` and `%`.
fn unescaped(name: &str) -> String {
    // In this order: `%253D` stands for `%3D`.
    name.replace("%3D", "=").replace("%25", "%")
}

impl Attributes {
    /// Parses `records`.
    pub(super) fn of(records: &Records) -> Result<Self> {
        let id = |value: &[u8]| {
            u32::try_from(decimal(value)?)
                .map_err(|_| corrupt("an id of the archive does not fit in 32 bits"))
        };
        let mut all = Self::default();
        for (key, value) in records.iter() {
            match key {
                "path" => all.path = Some(value.to_vec()),
                "linkpath" => all.link = Some(value.to_vec()),
                "size" => all.size = Some(decimal(value)?),
                "uid" => all.uid = Some(id(value)?),
                "gid" => all.gid = Some(id(value)?),
                "mtime" => all.mtime = Some(time(value)?),
                "SCHILY.acl.access" => all.access = Some(acl::translate(value)),
                "SCHILY.acl.default" => all.default = Some(acl::translate(value)),
                _ if key.starts_with("SCHILY.acl.") => all.foreign_acl = true,
                _ => {
                    let name = key.strip_prefix("SCHILY.xattr.").map(unescaped);
                    if let Some(name) =
                        name.filter(|name| xattrs::wanted_of_archive(name.as_bytes()))
                    {
                        all.xattrs.push((name.into_bytes().into(), value.into()));
                    }
                }
            }
        }
        Ok(all)
    }

    /// The path, if there is one.
    pub(super) fn path(&self) -> Option<&[u8]> {
        self.path.as_deref()
    }

    /// Gives the attributes to `entry`.
    pub(super) fn apply(&self, entry: &mut TarEntry) {
        if let Some(path) = &self.path {
            entry.path.clone_from(path);
        }
        if let Some(link) = &self.link {
            entry.link.clone_from(link);
        }
        if let Some(size) = self.size {
            entry.stored_len = size;
            if entry.kind != b'S' {
                entry.size = size;
            }
        }
        entry.uid = self.uid.unwrap_or(entry.uid);
        entry.gid = self.gid.unwrap_or(entry.gid);
        (entry.mtime_s, entry.mtime_ns) = self.mtime.unwrap_or((entry.mtime_s, entry.mtime_ns));
        let is_folder = matches!(entry.kind, b'5' | b'D');
        for (name, acl, fits) in [
            (&b"system.posix_acl_access"[..], &self.access, true),
            (b"system.posix_acl_default", &self.default, is_folder),
        ] {
            let Some(acl) = acl else { continue };
            text_acl(entry, name, acl.as_ref().filter(|_| fits));
        }
        entry.text_acl |= self.foreign_acl;
        if self.xattrs.is_empty() && entry.xattrs.is_empty() {
            return;
        }
        entry.xattrs.extend_from_slice(&self.xattrs);
        // If two have the same name, the later one counts.
        entry.xattrs.reverse();
        entry.xattrs.sort_by(|a, b| a.0.cmp(&b.0));
        entry.xattrs.dedup_by(|a, b| a.0 == b.0);
    }
}

/// Takes an ACL, unless an xattr record has stated it more exactly.
fn text_acl(entry: &mut TarEntry, name: &[u8], acl: Option<&Acl>) {
    match acl {
        Some(Acl::Value(value)) => {
            if entry.xattrs.iter().all(|(other, _)| **other != *name) {
                entry.xattrs.push((name.into(), value.as_slice().into()));
            }
        }
        Some(Acl::Minimal) => {}
        None => entry.text_acl = true,
    }
}
