//! The kernel's tables of mounts, whose paths may hold spaces.

use std::{ffi::OsString, fs, io, os::unix::ffi::OsStringExt, path::PathBuf};

/// A mount.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct MountLine {
    /// The mount point.
    pub at: PathBuf,
    /// The options of this mount, separated by commas; not those of its file system.
    pub options: String,
    /// The device, or the name that the file system gives instead of one.
    pub source: String,
}

/// The mounts that `process` sees, in mount order: a process id, or `thread-self`.
pub fn mounts_of(process: &str) -> io::Result<Vec<MountLine>> {
    let table = fs::read(format!("/proc/{process}/mountinfo"))?;
    Ok(table.split(|b| *b == b'\n').filter_map(parse_line).collect())
}

/// `36 35 98:0 /root /mount/point rw,noatime shared:1 - ext4 /dev/root rw`.
fn parse_line(line: &[u8]) -> Option<MountLine> {
    let mut fields = line.split(|b| *b == b' ');
    let at = unescape(fields.nth(4)?);
    let text = |field: &[u8]| String::from_utf8_lossy(&unescape(field)).into_owned();
    let options = text(fields.next()?);
    fields.find(|field| *field == b"-")?;
    let source = text(fields.nth(1)?);
    Some(MountLine { at: OsString::from_vec(at).into(), options, source })
}

/// Undoes the kernel's octal escapes (`\040` is a space).
fn unescape(text: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(text.len());
    let mut rest = text;
    while let Some((first, tail)) = rest.split_first() {
        if *first == b'\\' && tail.len() >= 3 {
            out.push(tail[..3].iter().fold(0u8, |n, d| n.wrapping_mul(8).wrapping_add(d - b'0')));
            rest = &tail[3..];
        } else {
            out.push(*first);
            rest = tail;
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::{parse_line, unescape};

    #[test]
    fn a_line_may_hold_spaces_and_optional_fields() {
        let line = br"36 35 98:0 / /a\040b ro,noatime shared:1 master:2 - btrfs /dev/loop3 rw,x=y";
        let line = parse_line(line).unwrap();
        assert_eq!(line.at, std::path::Path::new("/a b"));
        assert_eq!((line.options.as_str(), line.source.as_str()), ("ro,noatime", "/dev/loop3"));
        assert_eq!(unescape(br"/a\040b\134"), b"/a b\\");
        assert!(parse_line(b"").is_none());
    }
}
