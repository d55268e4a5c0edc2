//! Extended attributes of files of any type, without following symlinks.

use std::{
    ffi::CStr,
    os::fd::{AsRawFd, BorrowedFd},
    path::Path,
};

use rustix::{
    fs::{fgetxattr, flistxattr, getxattr, lgetxattr, listxattr, llistxattr},
    io::Errno,
};

/// Names and values, sorted by name.
pub type Xattrs = Vec<(Box<[u8]>, Box<[u8]>)>;

/// The attributes of an open file of any type that belong to the tree, not to the file system it
/// is on. `link` is its path below `/proc/self/fd`, the only access to the attributes of a file
/// opened with `O_PATH`.
pub fn of_link(link: &Path) -> std::io::Result<Xattrs> {
    Ok(collect(|buf| listxattr(link, buf), |name, buf| getxattr(link, name, buf))?)
}

/// True if an xattr belongs to the tree, not to the file system it is on.
pub(super) fn wanted(name: &[u8]) -> bool {
    let prefixes: [&[u8]; 3] = [b"user.", b"security.", b"trusted."];
    prefixes.iter().any(|prefix| name.starts_with(prefix) && name.len() > prefix.len())
        || name == b"system.posix_acl_access"
        || name == b"system.posix_acl_default"
}

/// True if an xattr is taken from an archive. Of the namespaces reserved for the kernel and root,
/// only file capabilities are accepted, which a `nosuid` mount ignores: the others are labels and
/// records of the originating host (SELinux, IMA) or control overlayfs.
pub(super) fn wanted_of_archive(name: &[u8]) -> bool {
    let is_privileged = name.starts_with(b"security.") || name.starts_with(b"trusted.");
    wanted(name) && (!is_privileged || name == b"security.capability")
}

/// The attributes of an open file.
pub(super) fn of_open_file(file: BorrowedFd<'_>) -> rustix::io::Result<Xattrs> {
    collect(|buf| flistxattr(file, buf), |name, buf| fgetxattr(file, name, buf))
}

/// The attributes of `name` in the open directory `dir`.
pub(super) fn of_entry(dir: BorrowedFd<'_>, name: &CStr) -> rustix::io::Result<Xattrs> {
    // There is no llistxattrat; this path refers to the open directory, however long its own path
    // is.
    let mut path = format!("/proc/self/fd/{}/", dir.as_raw_fd()).into_bytes();
    path.extend_from_slice(name.to_bytes());
    let path = path.as_slice();
    collect(|buf| llistxattr(path, buf), |name, buf| lgetxattr(path, name, buf))
}

fn collect(
    list: impl Fn(&mut [u8]) -> rustix::io::Result<usize>,
    get: impl Fn(&CStr, &mut [u8]) -> rustix::io::Result<usize>,
) -> rustix::io::Result<Xattrs> {
    // Most files have no or few attributes: one call suffices.
    let names = match whole(1024, &list) {
        Err(Errno::NOTSUP) => return Ok(Vec::new()),
        names => names?,
    };
    let mut xattrs = Vec::new();
    for name in names.split_inclusive(|byte| *byte == 0) {
        let Ok(name) = CStr::from_bytes_with_nul(name) else { continue };
        if !wanted(name.to_bytes()) {
            continue;
        }
        match whole(256, |buf| get(name, buf)) {
            Ok(value) => xattrs.push((name.to_bytes().into(), value.into())),
            // Removed since it was listed.
            Err(Errno::NODATA) => {}
            Err(error) => return Err(error),
        }
    }
    xattrs.sort();
    Ok(xattrs)
}

/// Calls `get` with a buffer that is large enough.
fn whole(
    len: usize,
    get: impl Fn(&mut [u8]) -> rustix::io::Result<usize>,
) -> rustix::io::Result<Vec<u8>> {
    let mut buf = vec![0; len];
    loop {
        match get(&mut buf) {
            Ok(len) => {
                buf.truncate(len);
                return Ok(buf);
            }
            Err(Errno::RANGE) if buf.len() < 1 << 20 => buf.resize(buf.len() * 4, 0),
            Err(error) => return Err(error),
        }
    }
}
