//! Opening files in a folder of Burgeon's own, such as the state directory.
//!
//! Invariant: no symlink is followed, in any component of the path. A symlink there was created
//! by another program or a restored backup, and leads to unintended files.

use std::{
    ffi::OsStr,
    fs::{File, OpenOptions},
    io,
    os::{
        fd::{AsRawFd, OwnedFd},
        unix::fs::OpenOptionsExt,
    },
    path::{Component, Path, PathBuf},
};

use rustix::{
    fs::{AtFlags, CWD, FileType, Mode, OFlags, openat, statat},
    io::Errno,
};

/// Opens `path` with `options` and `flags`. `ELOOP` if it, or a folder above it, is a symlink.
pub fn open_own(path: &Path, options: &mut OpenOptions, flags: OFlags) -> io::Result<File> {
    let name = path.file_name().ok_or(io::ErrorKind::InvalidInput)?;
    let folder = open_folder(path.parent().unwrap_or(Path::new("")))?;
    // The standard library's options accept only paths. A thread may have descriptors of its own.
    let beneath = PathBuf::from(format!("/proc/thread-self/fd/{}", folder.as_raw_fd())).join(name);
    options.custom_flags((flags | OFlags::NOFOLLOW).bits() as i32).open(beneath)
}

/// Opens a folder component by component: `openat2` is unknown to tools such as valgrind, which
/// counts the instructions of a hit.
fn open_folder(path: &Path) -> io::Result<OwnedFd> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let start = if path.is_absolute() { "/" } else { "." };
    let mut folder = openat(CWD, start, flags, Mode::empty())?;
    for part in path.components() {
        if !matches!(part, Component::RootDir | Component::CurDir) {
            folder = match openat(&folder, part.as_os_str(), flags, Mode::empty()) {
                Err(Errno::NOTDIR) if is_symlink(&folder, part.as_os_str()) => {
                    return Err(Errno::LOOP.into());
                }
                opened => opened?,
            };
        }
    }
    Ok(folder)
}

/// True if `name` in `folder` is a symlink: `O_DIRECTORY` reports one like any other file.
fn is_symlink(folder: &OwnedFd, name: &OsStr) -> bool {
    statat(folder, name, AtFlags::SYMLINK_NOFOLLOW)
        .is_ok_and(|stat| FileType::from_raw_mode(stat.st_mode) == FileType::Symlink)
}

#[cfg(test)]
mod tests {
    use std::{fs, io, os::unix::fs::symlink};

    use rustix::{fs::OFlags, io::Errno};

    use super::open_own;

    #[test]
    fn no_symlink_is_followed_in_any_part_of_a_path() {
        let temp = tempfile::tempdir().unwrap();
        let root = temp.path().canonicalize().unwrap();
        fs::create_dir(root.join("folder")).unwrap();
        fs::write(root.join("folder/file"), "content").unwrap();
        symlink("file", root.join("folder/link")).unwrap();
        symlink("folder", root.join("linked")).unwrap();
        let open = |name: &str| {
            let mut options = fs::OpenOptions::new();
            open_own(&root.join(name), options.read(true), OFlags::empty())
        };
        assert_eq!(io::read_to_string(open("folder/file").unwrap()).unwrap(), "content");
        for name in ["folder/link", "linked/file", "linked/link"] {
            let error = open(name).unwrap_err();
            assert_eq!(error.raw_os_error(), Some(Errno::LOOP.raw_os_error()), "{name}");
        }
        assert_eq!(open("folder/none").unwrap_err().kind(), io::ErrorKind::NotFound);
        let mut options = fs::OpenOptions::new();
        options.write(true).create(true);
        assert!(open_own(&root.join("linked/new"), &mut options, OFlags::empty()).is_err());
        open_own(&root.join("folder/new"), &mut options, OFlags::empty()).unwrap();
        assert!(root.join("folder/new").is_file());
    }
}
