//! Entries of a tree that a container may change meanwhile.
//!
//! Each folder is opened from its parent's descriptor, on the same mount and through no symlink, so
//! nothing outside of the tree is looked at.

use std::{
    ffi::{CStr, CString},
    fs::File,
    io,
    os::fd::{AsRawFd, BorrowedFd, OwnedFd},
};

use rustix::{
    fs::{
        AtFlags, Dir, FileType, Mode, OFlags, ResolveFlags, Stat, fgetxattr, fstat, lgetxattr,
        openat2, statat,
    },
    io::Errno,
};

/// Folders in one another: images have at most 2047.
pub(crate) const DEPTH_MAX: usize = 2048;
/// The longest list of names, and the longest value, of extended attributes: Linux has no longer
/// ones.
pub(crate) const XATTR_MAX: usize = 64 << 10;
/// Most bytes of the names of one folder: a million of usual ones.
const NAMES_MAX: usize = 64 << 20;

/// Flags for opening a folder.
pub(crate) const FOLDER: OFlags =
    OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

const RESOLVE: ResolveFlags =
    ResolveFlags::NO_XDEV.union(ResolveFlags::NO_SYMLINKS).union(ResolveFlags::BENEATH);

/// A mark of overlayfs for a removed entry.
pub(crate) fn is_whiteout(stat: &Stat) -> bool {
    kind(stat) == FileType::CharacterDevice && stat.st_rdev == 0
}

pub(crate) fn kind(stat: &Stat) -> FileType {
    FileType::from_raw_mode(stat.st_mode)
}

pub(crate) fn is_folder(stat: &Stat) -> bool {
    kind(stat) == FileType::Directory
}

/// Nobody has touched the entry: a change of anything sets the time of the change.
pub(crate) fn is_untouched(now: &Stat, before: &Stat) -> bool {
    let of = |it: &Stat| {
        let times = (it.st_mtime, it.st_mtime_nsec, it.st_ctime, it.st_ctime_nsec);
        (it.st_ino, it.st_size, it.st_mode, it.st_uid, it.st_gid, it.st_rdev, times)
    };
    of(now) == of(before)
}

pub(crate) fn stat(folder: &OwnedFd, name: &CStr) -> io::Result<Option<Stat>> {
    match statat(folder, name, AtFlags::SYMLINK_NOFOLLOW) {
        Err(Errno::NOENT) => Ok(None),
        other => Ok(Some(other?)),
    }
}

/// The names in a folder, in no order.
pub(crate) fn names(folder: &OwnedFd) -> io::Result<Vec<CString>> {
    let (mut names, mut bytes) = (Vec::new(), 0);
    for entry in Dir::read_from(folder)? {
        let name = entry?.file_name().to_owned();
        if !matches!(name.to_bytes(), b"." | b"..") {
            bytes += name.as_bytes_with_nul().len() + size_of::<CString>();
            names.push(name);
        }
        if bytes > NAMES_MAX {
            let what = format!("the names in one of its folders take more than {NAMES_MAX} bytes");
            return Err(io::Error::other(what));
        }
    }
    Ok(names)
}

pub(crate) fn open_folder(parent: &OwnedFd, name: &CStr) -> rustix::io::Result<OwnedFd> {
    openat2(parent, name, FOLDER, Mode::empty(), RESOLVE)
}

/// Opens a regular file for reading.
pub(crate) fn open_file(folder: &OwnedFd, name: &CStr) -> io::Result<File> {
    // A container may put a device of the host there meanwhile: opening that could have an effect.
    let path = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let found = openat2(folder, name, path, Mode::empty(), RESOLVE)?;
    if kind(&fstat(&found)?) != FileType::RegularFile {
        return Err(io::Error::other("a file was replaced while it was copied"));
    }
    File::open(format!("/proc/self/fd/{}", found.as_raw_fd()))
}

/// A path for calls that take no descriptor of the folder.
pub(crate) fn path_of(folder: BorrowedFd<'_>, name: &CStr) -> io::Result<CString> {
    let begin = format!("/proc/self/fd/{}/", folder.as_raw_fd()).into_bytes();
    Ok(CString::new([&begin[..], name.to_bytes()].concat())?)
}

/// The value of an extended attribute of an entry, if it has that attribute.
pub(crate) fn attribute(
    folder: BorrowedFd<'_>,
    name: &CStr,
    attribute: &CStr,
) -> io::Result<Option<Vec<u8>>> {
    let path = path_of(folder, name)?;
    value(|buffer| lgetxattr(&*path, attribute, buffer))
}

/// The same of an open folder.
pub(crate) fn attribute_of(folder: &OwnedFd, attribute: &CStr) -> io::Result<Option<Vec<u8>>> {
    value(|buffer| fgetxattr(folder, attribute, buffer))
}

fn value(get: impl Fn(&mut [u8]) -> rustix::io::Result<usize>) -> io::Result<Option<Vec<u8>>> {
    // Nearly all are short.
    for size in [256, XATTR_MAX] {
        let mut value = vec![0; size];
        match get(&mut value) {
            Ok(len) => {
                value.truncate(len);
                return Ok(Some(value));
            }
            Err(Errno::NODATA | Errno::OPNOTSUPP) => return Ok(None),
            Err(Errno::RANGE) if size < XATTR_MAX => {}
            Err(e) => return Err(e.into()),
        }
    }
    Ok(None)
}
