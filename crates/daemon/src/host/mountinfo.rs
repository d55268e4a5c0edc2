//! Reads `/proc/<pid>/mountinfo`.

use std::{
    ffi::OsString,
    fs,
    os::unix::ffi::OsStringExt,
    path::{Path, PathBuf},
};

use burgeon_block::{Error, Result};

/// One mount of a mount namespace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MountInfo {
    /// The mount's number, which no other mount of any namespace has while it exists.
    pub id: u64,
    /// `st_dev` of the superblock, major and minor.
    pub device: (u32, u32),
    /// The mounted part of the file system: a path, or for `nsfs` a name such as
    /// `mnt:[4026532281]`.
    pub root: PathBuf,
    /// The mount point.
    pub target: PathBuf,
    /// Such as `btrfs`.
    pub fs_type: String,
    /// Such as `/dev/loop3`.
    pub source: PathBuf,
    /// Options of the superblock, separated by commas.
    pub super_options: String,
}

/// The mounts listed in `path`, in mount order. Malformed lines are skipped.
pub fn read(path: &Path) -> Result<Vec<MountInfo>> {
    let bytes =
        fs::read(path).map_err(|e| Error::io(format!("cannot read {}", path.display()), e))?;
    Ok(bytes.split(|&c| c == b'\n').filter_map(parse_line).collect())
}

fn parse_line(line: &[u8]) -> Option<MountInfo> {
    let mut fields = line.split(|&c| c == b' ');
    let id = text(fields.next()?)?.parse().ok()?;
    let _parent = fields.next()?;
    let (major, minor) =
        text(fields.next()?)?.split_once(':').map(|(a, b)| (a.to_owned(), b.to_owned()))?;
    let root = path(fields.next()?);
    let target = path(fields.next()?);
    let mut rest = fields.skip_while(|field| *field != b"-").skip(1);
    Some(MountInfo {
        id,
        device: (major.parse().ok()?, minor.parse().ok()?),
        root,
        target,
        fs_type: text(rest.next()?)?,
        source: path(rest.next()?),
        super_options: text(rest.next()?)?,
    })
}

fn text(field: &[u8]) -> Option<String> {
    String::from_utf8(field.to_vec()).ok()
}

/// Undoes the kernel's octal escapes of space, tab, newline and backslash.
fn path(field: &[u8]) -> PathBuf {
    let mut bytes = Vec::with_capacity(field.len());
    let mut rest = field;
    while let Some((&first, tail)) = rest.split_first() {
        let escape = (first == b'\\').then(|| rest.get(1..4)).flatten();
        let code = escape
            .and_then(|digits| std::str::from_utf8(digits).ok())
            .and_then(|digits| u8::from_str_radix(digits, 8).ok());
        match code {
            Some(code) => {
                bytes.push(code);
                rest = &rest[4..];
            }
            None => {
                bytes.push(first);
                rest = tail;
            }
        }
    }
    PathBuf::from(OsString::from_vec(bytes))
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::{parse_line, read};

    #[test]
    fn a_line_with_escapes_and_optional_fields() {
        let line = br"36 35 98:0 /mnt1 /mnt\0402 rw,noatime shared:1 master:2 - btrfs /dev/loop3 rw,errors=x";
        let mount = parse_line(line).unwrap();
        assert_eq!((mount.id, mount.device), (36, (98, 0)));
        assert_eq!(mount.target, Path::new("/mnt 2"));
        assert_eq!(
            (mount.fs_type.as_str(), mount.source.as_path()),
            ("btrfs", Path::new("/dev/loop3"))
        );
        assert_eq!(parse_line(b"36 35 98:0 / /x rw"), None);
    }

    #[test]
    fn our_own_namespace_has_a_root() {
        let mounts = read(Path::new("/proc/self/mountinfo")).unwrap();
        assert!(mounts.iter().any(|mount| mount.target == Path::new("/")));
    }
}
