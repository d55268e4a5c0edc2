//! Measures and removes the trees of snapshots, in which containers may still write.
//!
//! Each folder is opened from its parent's descriptor, and a folder is entered only if it lies on
//! the same mount (`RESOLVE_NO_XDEV`): so a symlink or a mount that appears meanwhile leads
//! nowhere.
//!
//! Invariants: nothing outside of the tree is counted or removed; a mount in the tree stays, and
//! stops the removal with `EBUSY`; at most [`DEPTH_MAX`] descriptors are open. Held by the tests
//! below.

use std::{
    collections::HashSet,
    ffi::CString,
    fs::File,
    io,
    os::fd::{AsFd, OwnedFd},
    path::Path,
};

use rustix::{
    fs::{AtFlags, Dir, FileType, Mode, OFlags, ResolveFlags, openat2, renameat, statat, unlinkat},
    io::Errno,
};

use crate::model::Usage;

/// Folders in one another that are entered, and so descriptors: images have at most 2047.
const DEPTH_MAX: usize = 2048;
/// Depth at which removal moves a folder up to the root of the tree, instead of going deeper.
const REMOVE_DEPTH: usize = 32;
/// Most entries that are counted: more than any image or container has.
const ENTRIES_MAX: u64 = 64 << 20;

/// An open folder and its unread entries.
struct Level {
    folder: OwnedFd,
    entries: Dir,
    name: CString,
}

impl Level {
    fn open(parent: impl AsFd, name: CString) -> rustix::io::Result<Self> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let resolve = ResolveFlags::NO_XDEV | ResolveFlags::NO_SYMLINKS | ResolveFlags::BENEATH;
        let folder = openat2(parent, &name, flags, Mode::empty(), resolve)?;
        let entries = Dir::read_from(&folder)?;
        Ok(Self { folder, entries, name })
    }

    /// The next entry but `.` and `..`.
    fn next(&mut self) -> rustix::io::Result<Option<CString>> {
        while let Some(entry) = self.entries.read() {
            let name = entry?.file_name().to_owned();
            if !matches!(name.to_bytes(), b"." | b"..") {
                return Ok(Some(name));
            }
        }
        Ok(None)
    }
}

fn opened(path: &Path) -> io::Result<(File, CString)> {
    let parent = path.parent().ok_or(Errno::INVAL)?;
    let name = path.file_name().ok_or(Errno::INVAL)?;
    Ok((File::open(parent)?, CString::new(name.as_encoded_bytes())?))
}

/// The allocated bytes and the inodes of a tree, each hard-linked file counted once. Entries that
/// vanish meanwhile are not counted.
pub(crate) fn usage(path: &Path) -> io::Result<Usage> {
    let (parent, name) = opened(path)?;
    let mut usage = Usage::default();
    let mut linked = HashSet::new();
    let mut count = |folder: &OwnedFd, name: &CString| -> io::Result<bool> {
        let stat = match statat(folder, name, AtFlags::SYMLINK_NOFOLLOW) {
            Err(Errno::NOENT) => return Ok(false),
            other => other?,
        };
        let is_folder = FileType::from_raw_mode(stat.st_mode) == FileType::Directory;
        if !is_folder && stat.st_nlink > 1 && !linked.insert((stat.st_dev, stat.st_ino)) {
            return Ok(false);
        }
        usage.bytes += stat.st_blocks as u64 * 512;
        usage.inodes += 1;
        if usage.inodes > ENTRIES_MAX {
            return Err(io::Error::other(format!("it has more than {ENTRIES_MAX} entries")));
        }
        Ok(is_folder)
    };
    count(&parent.into(), &name)?;
    let (parent, _) = opened(path)?;
    let mut levels = vec![Level::open(&parent, name)?];
    while let Some(level) = levels.last_mut() {
        let Some(name) = level.next()? else {
            levels.pop();
            continue;
        };
        if !count(&level.folder, &name)? {
            continue;
        }
        match Level::open(&level.folder, name) {
            Ok(next) if levels.len() < DEPTH_MAX => levels.push(next),
            Ok(_) => {
                let what = format!("it has more than {DEPTH_MAX} folders in one another");
                return Err(io::Error::other(what));
            }
            // Removed, replaced, or a mount.
            Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP | Errno::XDEV) => {}
            Err(e) => return Err(e.into()),
        }
    }
    Ok(usage)
}

/// Removes a tree. A missing one is removed already.
pub(crate) fn remove(path: &Path) -> io::Result<()> {
    let (parent, name) = opened(path)?;
    if unlink(&parent, &name)? {
        return Ok(());
    }
    let mut levels = vec![Level::open(&parent, name)?];
    let mut moved = 0_u64;
    while let Some(level) = levels.last_mut() {
        let Some(name) = level.next()? else {
            let Some(level) = levels.pop() else { break };
            match levels.last() {
                Some(above) => leave(&above.folder, &level.name)?,
                None if moved > 0 => {
                    // Folders that were moved up may have been added behind the reader.
                    moved = 0;
                    levels.push(Level::open(&parent, level.name)?);
                }
                None => leave(&parent, &level.name)?,
            }
            continue;
        };
        if unlink(&level.folder, &name)? {
            continue;
        }
        if levels.len() < REMOVE_DEPTH {
            let level = &levels[levels.len() - 1];
            let next = Level::open(&level.folder, name)?;
            levels.push(next);
            continue;
        }
        // Free names in the root of the tree: an entry of that name would be replaced if it is an
        // empty folder, and otherwise refuses, so the next one is tried.
        loop {
            moved += 1;
            let free = CString::new(format!(".removed-{moved}"))?;
            let (root, level) = (&levels[0], &levels[levels.len() - 1]);
            match renameat(&level.folder, &name, &root.folder, &free) {
                Err(Errno::NOTEMPTY | Errno::EXIST | Errno::NOTDIR) => {}
                other => break other?,
            }
        }
    }
    Ok(())
}

/// Removes an empty folder; one that got entries meanwhile is an error, and the removal is
/// repeated.
fn leave(parent: impl AsFd, name: &CString) -> rustix::io::Result<()> {
    match unlinkat(parent, name, AtFlags::REMOVEDIR) {
        Err(Errno::NOENT) => Ok(()),
        other => other,
    }
}

/// Unlinks anything but a folder with entries; false for that.
fn unlink(parent: impl AsFd, name: &CString) -> rustix::io::Result<bool> {
    let parent = parent.as_fd();
    match unlinkat(parent, name, AtFlags::empty()) {
        Ok(()) | Err(Errno::NOENT) => return Ok(true),
        Err(Errno::ISDIR) => {}
        // An immutable file has the same errno as a folder on some file systems.
        Err(Errno::PERM) => match statat(parent, name, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(stat) if FileType::from_raw_mode(stat.st_mode) == FileType::Directory => {}
            _ => return Err(Errno::PERM),
        },
        Err(e) => return Err(e),
    }
    match unlinkat(parent, name, AtFlags::REMOVEDIR) {
        Ok(()) | Err(Errno::NOENT) => Ok(true),
        Err(Errno::NOTEMPTY | Errno::EXIST) => Ok(false),
        Err(e) => Err(e),
    }
}

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::fs::symlink};

    use super::{remove, usage};

    #[test]
    fn a_tree_is_measured_and_removed_without_following_symlinks() {
        let folder = tempfile::tempdir().unwrap();
        let outside = folder.path().join("outside");
        fs::create_dir(&outside).unwrap();
        fs::write(outside.join("big"), vec![1; 1 << 20]).unwrap();
        let tree = folder.path().join("tree");
        fs::create_dir_all(tree.join("a/b")).unwrap();
        fs::write(tree.join("a/f"), vec![1; 8192]).unwrap();
        fs::hard_link(tree.join("a/f"), tree.join("a/g")).unwrap();
        symlink(&outside, tree.join("a/link")).unwrap();
        let found = usage(&tree).unwrap();
        assert_eq!(found.inodes, 5, "tree, a, b, f, link");
        assert!((8192..1 << 20).contains(&found.bytes), "{found:?}");
        remove(&tree).unwrap();
        assert!(!tree.exists() && outside.join("big").exists());
        remove(&tree).unwrap();
        assert!(usage(&tree).is_err());
    }

    #[test]
    fn a_tree_deeper_than_any_path_is_removed() {
        let folder = tempfile::tempdir().unwrap();
        let tree = folder.path().join("tree");
        fs::create_dir(&tree).unwrap();
        fs::write(tree.join(".removed-1"), "in the way").unwrap();
        // Made in pieces, each moved below the next, because a path has at most 4096 bytes.
        for _ in 0..12 {
            let piece = folder.path().join("piece");
            let deep = ["name-of-32-bytes-name-of-32-bytes"; 100].join("/");
            fs::create_dir_all(piece.join(&deep)).unwrap();
            fs::write(piece.join("file"), "x").unwrap();
            fs::rename(tree.join("deep"), piece.join(&deep).join("deep")).ok();
            fs::rename(&piece, tree.join("deep")).unwrap();
        }
        assert!(usage(&tree).unwrap().inodes > 1200);
        remove(&tree).unwrap();
        assert!(!tree.exists());
    }
}
