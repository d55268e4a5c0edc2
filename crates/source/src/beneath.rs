//! Opens files in folders that other users own.
//!
//! The owner of a folder can replace any name in it with a symlink or another folder at any time,
//! and so lead a root process that opens a path through it to files that only root may read. So a
//! tree is opened once, and everything in it by name from there; a path that was resolved before
//! is opened without following symlinks, or not at all.
//!
//! Invariants: no function here leaves the directory it was given, and only [`open_within`] follows
//! symlinks, in that directory.

use std::{
    fs::File,
    io,
    os::fd::{AsFd, AsRawFd, OwnedFd},
    path::{Path, PathBuf},
};

use rustix::{
    fs::{CWD, Mode, OFlags, ResolveFlags, openat2},
    io::Errno,
};

/// Tries of a lookup that races with a rename: the kernel reports the race instead of waiting.
const TRIES: u32 = 16;

/// Opens the relative path `name` in or below the directory `folder`. `ELOOP` if a part of it is a
/// symlink, unless `flags` say to open the last one itself.
pub fn open_beneath(folder: impl AsFd, name: &Path, flags: OFlags) -> io::Result<OwnedFd> {
    let within = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
    open(folder, name, flags, within)
}

/// Opens the relative path `name` in or below the directory `folder`, or `folder` itself if the
/// name is empty. Symlinks are followed as long as they stay there; `EXDEV` for one that leads
/// elsewhere.
pub(crate) fn open_within(folder: impl AsFd, name: &Path, flags: OFlags) -> io::Result<OwnedFd> {
    let name = if name.as_os_str().is_empty() { Path::new(".") } else { name };
    open(folder, name, flags, ResolveFlags::BENEATH | ResolveFlags::NO_MAGICLINKS)
}

/// Opens the absolute `path`. `ELOOP` if a part of it is a symlink.
pub fn open_without_symlinks(path: &Path, flags: OFlags) -> io::Result<OwnedFd> {
    if !path.is_absolute() {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    open(CWD, path, flags, ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS)
}

/// A path to the open file itself, whatever its own path now refers to.
pub fn link_to(file: &impl AsFd) -> PathBuf {
    PathBuf::from(format!("/proc/self/fd/{}", file.as_fd().as_raw_fd()))
}

/// Opens `file`, an `O_PATH` descriptor, for reading. Check its type first: opening a device or a
/// FIFO has side effects.
pub fn open_again(file: impl AsFd, flags: OFlags) -> io::Result<File> {
    let flags = flags | OFlags::RDONLY | OFlags::CLOEXEC;
    Ok(rustix::fs::open(link_to(&file), flags, Mode::empty())?.into())
}

fn open(
    folder: impl AsFd,
    name: &Path,
    flags: OFlags,
    resolve: ResolveFlags,
) -> io::Result<OwnedFd> {
    let flags = flags | OFlags::CLOEXEC;
    let mut tries = 0;
    loop {
        match openat2(&folder, name, flags, Mode::empty(), resolve) {
            Err(Errno::AGAIN | Errno::INTR) if tries < TRIES => tries += 1,
            opened => return Ok(opened?),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{fs, io, os::unix::fs::symlink, path::Path};

    use rustix::{fs::OFlags, io::Errno};

    use super::{open_again, open_beneath, open_within, open_without_symlinks};

    fn errno(result: io::Result<impl Sized>) -> Option<Errno> {
        result.err().and_then(|error| Errno::from_io_error(&error))
    }

    #[test]
    fn symlinks_are_refused_and_lookups_stay_in_the_folder() {
        let temp = tempfile::tempdir().unwrap();
        let root = temp.path().canonicalize().unwrap();
        fs::create_dir_all(root.join("tree/folder")).unwrap();
        fs::write(root.join("secret"), "secret").unwrap();
        fs::write(root.join("tree/folder/file"), "file").unwrap();
        symlink("../secret", root.join("tree/out")).unwrap();
        symlink("folder", root.join("tree/within")).unwrap();
        let tree = fs::File::open(root.join("tree")).unwrap();
        let look = |name: &str| open_beneath(&tree, Path::new(name), OFlags::PATH);
        let file = look("folder/file").unwrap();
        assert_eq!(io::read_to_string(open_again(file, OFlags::empty()).unwrap()).unwrap(), "file");
        for name in ["out", "within", "within/file"] {
            assert_eq!(errno(look(name)), Some(Errno::LOOP), "{name}");
        }
        for name in ["../secret", "/secret", "folder/../../secret"] {
            assert_eq!(errno(look(name)), Some(Errno::XDEV), "{name}");
        }
        let within = |name: &str| open_within(&tree, Path::new(name), OFlags::PATH);
        assert!(within("").is_ok() && within("within/file").is_ok());
        for name in ["out", "../secret", "/secret", "within/../../secret"] {
            assert_eq!(errno(within(name)), Some(Errno::XDEV), "{name}");
        }
        let link = Path::new("out");
        assert!(open_beneath(&tree, link, OFlags::PATH | OFlags::NOFOLLOW).is_ok());
        let absolute = |name: &str| open_without_symlinks(&root.join(name), OFlags::PATH);
        assert!(absolute("tree/folder/file").is_ok());
        assert_eq!(errno(absolute("tree/within/file")), Some(Errno::LOOP));
        assert!(open_without_symlinks(Path::new("relative"), OFlags::PATH).is_err());
    }
}
