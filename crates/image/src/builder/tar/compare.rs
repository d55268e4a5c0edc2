//! Compares a table of contents (TOC) with the archive that it lists.
//!
//! ```text
//!   archive:  header │ data         │ header │ …        Listed:  file, part │ part, file, …
//!                └─ equal? ──────────────────────────────────────┘      │
//!                      └─ SHA-256 of each part, zeros between them ─────┘
//! ```
//!
//! Invariants: a list that passes describes the same tree as the archive, but for what tools leave
//! out of it: parts of a second, and access control lists (ACL). The memory taken does not grow
//! with the archive.

use std::io::{self, Read};

use burgeon_block::Result;

use super::{
    entry::{TarEntry, show},
    listed::{FilePart, Listed},
    reader::{Reader, cannot_read},
};
use crate::builder::xattrs::{Xattrs, wanted_of_archive};

/// The attributes that hold ACLs: an archive may have them as text, and no TOC has that.
const ACL: &[u8] = b"system.posix_acl_";
/// Longest text about a difference, in characters.
const TEXT_MAX: usize = 500;

/// The SHA-256 of all bytes of a stream.
pub type Sha256<'a> = &'a dyn Fn(&mut dyn Read) -> io::Result<[u8; 32]>;

/// The first difference between the unpacked `archive` of a layer and `files`, its list in the
/// archive's order: a sentence without a full stop, of at most 500 characters. The archive is read
/// up to there.
///
/// Errors: `Corrupt` for an archive that is damaged or hostile.
pub fn first_difference(
    archive: impl Read,
    files: &[Listed],
    sha256: Sha256<'_>,
) -> Result<Option<String>> {
    let mut reader = Reader::of_layer(archive);
    let mut files = files.iter();
    let found = loop {
        match (reader.next()?, files.next()) {
            (None, None) => break None,
            (None, Some(file)) => {
                break Some(format!("{} is listed, and not in the layer", show(&file.path)));
            }
            (Some(entry), None) => {
                break Some(format!("{} is in the layer, and not listed", show(&entry.path)));
            }
            (Some(entry), Some(file)) => {
                if let Some(what) = of_attributes(&entry, file) {
                    break Some(what);
                }
                if !entry.is_regular() {
                    reader.skip(entry.stored_len)?;
                } else if !has_parts(&mut Data::of(&entry, reader.data()), file, sha256)? {
                    break Some(format!("the data of {} is not what is listed", show(&file.path)));
                }
            }
        }
    };
    Ok(found.map(|what| what.chars().take(TEXT_MAX).collect()))
}

fn of_attributes(entry: &TarEntry, file: &Listed) -> Option<String> {
    let (path, listed) = (plain(&entry.path), plain(&file.path));
    if path != listed {
        let (path, listed) = (show(path), show(listed));
        return Some(format!("{listed} is listed in the place of {path}"));
    }
    let is_regular = entry.is_regular();
    let kind = if is_regular { b'0' } else { entry.kind };
    let is_hard_link = kind == b'1';
    let is_device = matches!(kind, b'3' | b'4');
    let pairs = [
        ("another type", kind == file.kind),
        ("another target", !matches!(kind, b'1' | b'2') || has_target(entry, file)),
        ("another size", !is_regular || entry.size == file.size),
        ("another device number", !is_device || (entry.major, entry.minor) == file.device),
        // A hard link has the attributes of its target, whatever its header says.
        ("another mode", is_hard_link || entry.mode & 0o7777 == file.mode & 0o7777),
        ("another owner", is_hard_link || (entry.uid, entry.gid) == (file.uid, file.gid)),
        // TOCs round it.
        ("another time", is_hard_link || entry.mtime_s.abs_diff(file.mtime_s) <= 1),
        ("other extended attributes", is_hard_link || has_attributes(&entry.xattrs, &file.xattrs)),
    ];
    let (what, _) = pairs.iter().find(|(_, is_equal)| !is_equal)?;
    Some(format!("{what} of {} than in the layer", show(path)))
}

/// The path without redundant parts: `./` and `/` in front, `/` behind.
fn plain(mut path: &[u8]) -> &[u8] {
    loop {
        path = match path {
            [b'.', b'/', rest @ ..] | [b'/', rest @ ..] | [rest @ .., b'/'] => rest,
            b"." => b"",
            _ => return path,
        };
    }
}

fn has_target(entry: &TarEntry, file: &Listed) -> bool {
    match entry.kind {
        b'1' => plain(&entry.link) == plain(&file.link),
        _ => entry.link == file.link,
    }
}

/// True if the list has the wanted attributes of the archive, and no others. ACLs may be missing.
fn has_attributes(archive: &Xattrs, list: &Xattrs) -> bool {
    let wanted = |all: &Xattrs| {
        let mut all: Xattrs =
            all.iter().filter(|(name, _)| wanted_of_archive(name)).cloned().collect();
        all.sort();
        all.dedup_by(|a, b| a.0 == b.0);
        all
    };
    let (archive, list) = (wanted(archive), wanted(list));
    let may_be_missing = |name: &[u8]| name.starts_with(ACL);
    list.iter().all(|one| archive.contains(one))
        && archive.iter().all(|one| list.contains(one) || may_be_missing(&one.0))
}

/// True if the data has the parts that are listed, and zeros between them.
fn has_parts(data: &mut impl Read, file: &Listed, sha256: Sha256<'_>) -> Result<bool> {
    let mut at = 0;
    for FilePart { at: start, len, digest, .. } in file.parts.iter().copied() {
        let Some(gap) = start.checked_sub(at) else { return Ok(false) };
        if !is_zero(&mut data.take(gap))? {
            return Ok(false);
        }
        let mut part = data.take(len.into());
        let found = sha256(&mut part).map_err(cannot_read)?;
        if part.limit() > 0 || found != digest {
            return Ok(false);
        }
        at = start.saturating_add(len.into());
    }
    is_zero(data)
}

/// Reads to the end, or to the first byte that is not zero.
fn is_zero(data: &mut impl Read) -> Result<bool> {
    let mut bytes = [0; 1 << 14];
    loop {
        match data.read(&mut bytes).map_err(cannot_read)? {
            0 => return Ok(true),
            len if bytes[..len].iter().any(|byte| *byte != 0) => return Ok(false),
            _ => {}
        }
    }
}

/// The data of a file of an archive, holes included.
struct Data<'a, R> {
    input: &'a mut R,
    /// Offset and length of what is stored, the last one first.
    stored: Vec<(u64, u64)>,
    at: u64,
    size: u64,
}

impl<'a, R> Data<'a, R> {
    fn of(entry: &TarEntry, input: &'a mut R) -> Self {
        let mut stored = entry.map.clone().unwrap_or_else(|| vec![(0, entry.stored_len)]);
        stored.reverse();
        Self { input, stored, at: 0, size: entry.size }
    }
}

impl<R: Read> Read for Data<'_, R> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        while self.stored.pop_if(|(start, len)| *start + *len <= self.at).is_some() {}
        let (start, len) = self.stored.last().copied().unwrap_or((self.size, 0));
        let is_stored = len > 0 && start <= self.at;
        let end = if is_stored { start + len } else { start.min(self.size) };
        let limit = end.saturating_sub(self.at).min(buf.len() as u64) as usize;
        if limit == 0 {
            return Ok(0);
        }
        let len = match is_stored {
            true => self.input.read(&mut buf[..limit])?,
            false => {
                buf[..limit].fill(0);
                limit
            }
        };
        if len == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        self.at += len as u64;
        Ok(len)
    }
}
