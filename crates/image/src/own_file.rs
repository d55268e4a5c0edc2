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
    fs::{
        AtFlags, CWD, FileType, Mode, OFlags, RenameFlags, openat, renameat_with, statat, unlinkat,
    },
    io::Errno,
};

/// Opens `path` with `options` and `flags`. `ELOOP` if it, or a folder above it, is a symlink.
pub fn open_own(path: &Path, options: &mut OpenOptions, flags: OFlags) -> io::Result<File> {
    let (folder, name) = place(path)?;
    // The standard library's options accept only paths. A thread may have descriptors of its own.
    let beneath = PathBuf::from(format!("/proc/thread-self/fd/{}", folder.as_raw_fd())).join(name);
    options.custom_flags((flags | OFlags::NOFOLLOW).bits() as i32).open(beneath)
}

/// Renames `from` to `to`, with the errors of [`open_own`] for a symlink above one of them.
pub fn rename_own(from: &Path, to: &Path, flags: RenameFlags) -> io::Result<()> {
    let ((from, name), (to, new_name)) = (place(from)?, place(to)?);
    Ok(renameat_with(&from, name, &to, new_name, flags)?)
}

/// Removes the file `path`, with the errors of [`open_own`] for a symlink above it.
pub fn remove_own(path: &Path) -> io::Result<()> {
    let (folder, name) = place(path)?;
    Ok(unlinkat(&folder, name, AtFlags::empty())?)
}

/// The folder of `path`, and its name in there.
fn place(path: &Path) -> io::Result<(OwnedFd, &OsStr)> {
    let name = path.file_name().ok_or(io::ErrorKind::InvalidInput)?;
    Ok((open_folder(path.parent().unwrap_or(Path::new("")))?, name))
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

    use rustix::{
        fs::{OFlags, RenameFlags},
        io::Errno,
    };

    use super::{open_own, remove_own, rename_own};

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

        let rename = |from: &str, to: &str| {
            rename_own(&root.join(from), &root.join(to), RenameFlags::NOREPLACE)
        };
        for (from, to) in [("linked/new", "moved"), ("folder/new", "linked/moved")] {
            let error = rename(from, to).unwrap_err();
            assert_eq!(error.raw_os_error(), Some(Errno::LOOP.raw_os_error()), "{from} {to}");
        }
        assert_eq!(
            rename("folder/new", "folder/file").unwrap_err().kind(),
            io::ErrorKind::AlreadyExists
        );
        rename("folder/new", "moved").unwrap();
        assert!(root.join("moved").is_file());
        assert!(remove_own(&root.join("linked/file")).is_err());
        assert!(root.join("folder/file").is_file());
        remove_own(&root.join("folder/file")).unwrap();
        assert!(!root.join("folder/file").exists());
    }
}
