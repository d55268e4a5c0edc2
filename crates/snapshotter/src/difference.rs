//! Writes the difference of two trees as a layer of overlayfs: the tree of a container in a mount
//! of its own, and the tree that it began as.
//!
//! ```text
//!   changed ─┐ an entry that is new, or has another inode, time or size ─► copied
//!   before  ─┴ an entry that is gone                                    ─► whiteout: a device 0, 0
//! ```
//!
//! Both are mounts of one seed, so an entry that nobody touched has the same inode and the same
//! times in both, and its data is not read. A container may change its tree meanwhile, so each
//! folder is opened from its parent's descriptor, as in `walk.rs`.
//!
//! Invariants: nothing outside of the trees is read; an entry is left out only if both trees have
//! it untouched; at most [`DEPTH_MAX`] folders are open.

use std::{
    collections::{HashMap, HashSet},
    ffi::{CStr, CString},
    fs::File,
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    path::Path,
};

use rustix::{
    fs::{
        AtFlags, CWD, FileType, Gid, Mode, OFlags, SeekFrom, Stat, Timespec, Timestamps, Uid,
        XattrFlags, chmodat, chownat, ftruncate, lgetxattr, linkat, llistxattr, lsetxattr, mkdirat,
        mknodat, openat, readlinkat, seek, symlinkat, utimensat,
    },
    io::Errno,
};

use crate::tree::{
    DEPTH_MAX, FOLDER, XATTR_MAX, is_untouched, is_whiteout, kind, names, open_file, open_folder,
    path_of, stat,
};

/// Attributes of overlayfs itself, which an entry of a container must not have.
const OVERLAY: &[u8] = b"trusted.overlay.";
/// Properties of files on btrfs, which no other file system takes.
const BTRFS: &[u8] = b"btrfs.";

/// A folder of both trees.
struct Level {
    name: CString,
    changed: OwnedFd,
    /// `None` if the folder is new.
    before: Option<OwnedFd>,
    /// Its folder in the layer, once something has to be written there.
    made: Option<OwnedFd>,
    /// Entries that were not looked at yet.
    left: Vec<CString>,
}

/// Writes the difference into the empty folder `to`.
pub(crate) fn write(changed: &Path, before: &Path, to: &Path) -> io::Result<()> {
    let open = |path: &Path| openat(CWD, path, FOLDER, Mode::empty());
    let root = Level {
        name: CString::default(),
        changed: open(changed)?,
        before: Some(open(before)?),
        made: Some(open(to)?),
        left: Vec::new(),
    };
    Difference { levels: vec![root], links: HashMap::new() }.write()
}

struct Difference {
    levels: Vec<Level>,
    /// The place in the layer of the first name of a file with several names.
    links: HashMap<(u64, u64), CString>,
}

impl Difference {
    fn write(mut self) -> io::Result<()> {
        self.enter()?;
        while let Some(level) = self.levels.last_mut() {
            match level.left.pop() {
                Some(name) => self.look(&name)?,
                None => self.leave()?,
            }
        }
        Ok(())
    }

    fn top(&self) -> &Level {
        &self.levels[self.levels.len() - 1]
    }

    /// Lists the last folder, and writes whiteouts for what is gone from it.
    fn enter(&mut self) -> io::Result<()> {
        let level = self.top();
        let here: HashSet<CString> = names(&level.changed)?.into_iter().collect();
        let gone: Vec<CString> = match &level.before {
            Some(before) => names(before)?.into_iter().filter(|it| !here.contains(it)).collect(),
            None => Vec::new(),
        };
        gone.iter().try_for_each(|name| self.white_out(name))?;
        let last = self.levels.len() - 1;
        self.levels[last].left = here.into_iter().collect();
        Ok(())
    }

    fn white_out(&mut self, name: &CString) -> io::Result<()> {
        Ok(mknodat(self.made()?, name, FileType::CharacterDevice, Mode::empty(), 0)?)
    }

    /// Compares an entry of the last folder, and copies it if it changed.
    fn look(&mut self, name: &CString) -> io::Result<()> {
        let level = self.top();
        let before = match &level.before {
            Some(before) => stat(before, name)?,
            None => None,
        };
        let now = match stat(&level.changed, name)? {
            // A device 0, 0 would be a whiteout in the layer; overlayfs lets no container make one.
            Some(now) if !is_whiteout(&now) => now,
            // Removed meanwhile.
            _ if before.is_some() => return self.white_out(name),
            _ => return Ok(()),
        };
        let is_folder = |stat: &Stat| kind(stat) == FileType::Directory;
        if is_folder(&now) {
            if self.levels.len() >= DEPTH_MAX {
                let what = format!("it has more than {DEPTH_MAX} folders in one another");
                return Err(io::Error::other(what));
            }
            let changed = open_folder(&level.changed, name)?;
            let before_folder = match (&level.before, &before) {
                (Some(folder), Some(stat)) if is_folder(stat) => Some(open_folder(folder, name)?),
                _ => None,
            };
            let (made, left) = (None, Vec::new());
            let next = Level { name: name.clone(), changed, before: before_folder, made, left };
            self.levels.push(next);
            if before.as_ref().is_none_or(|before| !is_untouched(&now, before)) {
                self.made()?;
            }
            return self.enter();
        }
        if before.is_some_and(|before| is_untouched(&now, &before)) {
            return Ok(());
        }
        self.copy(name, &now)
    }

    /// Ends the last folder: its attributes come last, because its entries change its times.
    fn leave(&mut self) -> io::Result<()> {
        let Some(level) = self.levels.pop() else { return Ok(()) };
        let Some(made) = &level.made else { return Ok(()) };
        let stat = rustix::fs::fstat(&level.changed)?;
        copy_attributes((level.changed.as_fd(), c"."), (made.as_fd(), c"."), &stat)
    }

    /// The folder in the layer of the last level, which is made with those above it if need be.
    fn made(&mut self) -> io::Result<BorrowedFd<'_>> {
        for at in 1..self.levels.len() {
            if self.levels[at].made.is_some() {
                continue;
            }
            let (above, here) = self.levels.split_at_mut(at);
            let above = above[at - 1].made.as_ref().ok_or(Errno::BADF)?;
            mkdirat(above, &here[0].name, Mode::RWXU)?;
            here[0].made = Some(openat(above, &here[0].name, FOLDER, Mode::empty())?);
        }
        Ok(self.top().made.as_ref().ok_or(Errno::BADF)?.as_fd())
    }

    /// Copies an entry that is no folder.
    fn copy(&mut self, name: &CString, stat: &Stat) -> io::Result<()> {
        self.made()?;
        let root = self.levels[0].made.as_ref().ok_or(Errno::BADF)?;
        let level = self.top();
        let made = level.made.as_ref().ok_or(Errno::BADF)?;
        let id = (stat.st_dev, stat.st_ino);
        if stat.st_nlink > 1 {
            if let Some(first) = self.links.get(&id) {
                linkat(root, first, made, name, AtFlags::empty())?;
                return Ok(());
            }
            let path = self.levels[1..].iter().flat_map(|it| [it.name.to_bytes(), b"/"]);
            let path = path.chain([name.to_bytes()]).collect::<Vec<_>>().concat();
            self.links.insert(id, CString::new(path)?);
        }
        let level = self.top();
        let made = level.made.as_ref().ok_or(Errno::BADF)?;
        match kind(stat) {
            FileType::RegularFile => copy_file(&level.changed, made, name)?,
            FileType::Symlink => {
                let target = readlinkat(&level.changed, name, Vec::new())?;
                symlinkat(target, made, name)?;
            }
            other => mknodat(made, name, other, Mode::RUSR, stat.st_rdev)?,
        }
        copy_attributes((level.changed.as_fd(), name), (made.as_fd(), name), stat)
    }
}

/// Copies the data of a file; holes stay holes.
fn copy_file(from: &OwnedFd, to: &OwnedFd, name: &CStr) -> io::Result<()> {
    let from = open_file(from, name)?;
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
    let to = File::from(openat(to, name, flags, Mode::RUSR | Mode::WUSR)?);
    let len = from.metadata()?.len();
    let mut at = 0;
    while at < len {
        let start = match seek(&from, SeekFrom::Data(at)) {
            Err(Errno::NXIO) => break,
            start => start?,
        };
        let end = seek(&from, SeekFrom::Hole(start))?.min(len);
        seek(&from, SeekFrom::Start(start))?;
        seek(&to, SeekFrom::Start(start))?;
        let copied = io::copy(&mut io::Read::take(&from, end.saturating_sub(start)), &mut &to)?;
        if copied == 0 {
            break;
        }
        at = start + copied;
    }
    Ok(ftruncate(&to, len)?)
}

/// Copies owner, mode, extended attributes and times.
fn copy_attributes(
    (from, name): (BorrowedFd<'_>, &CStr),
    (to, new): (BorrowedFd<'_>, &CStr),
    stat: &Stat,
) -> io::Result<()> {
    let (uid, gid) = (Uid::from_raw(stat.st_uid), Gid::from_raw(stat.st_gid));
    chownat(to, new, Some(uid), Some(gid), AtFlags::SYMLINK_NOFOLLOW)?;
    if kind(stat) != FileType::Symlink {
        // After the owner, whose change takes set-user-ID away.
        chmodat(to, new, Mode::from_raw_mode(stat.st_mode), AtFlags::empty())?;
    }
    let (source, target) = (path_of(from, name)?, path_of(to, new)?);
    let mut list = vec![0; XATTR_MAX];
    let len = match llistxattr(&*source, &mut list[..]) {
        Err(Errno::OPNOTSUPP) => 0,
        len => len?,
    };
    for attribute in list[..len].split_inclusive(|byte| *byte == 0) {
        let attribute = CStr::from_bytes_with_nul(attribute).map_err(io::Error::other)?;
        if [OVERLAY, BTRFS].iter().any(|it| attribute.to_bytes().starts_with(it)) {
            continue;
        }
        let mut value = vec![0; XATTR_MAX];
        let len = match lgetxattr(&*source, attribute, &mut value[..]) {
            // Removed meanwhile.
            Err(Errno::NODATA) => continue,
            len => len?,
        };
        lsetxattr(&*target, attribute, &value[..len], XattrFlags::empty())?;
    }
    let time = |tv_sec, nanoseconds| Timespec { tv_sec, tv_nsec: nanoseconds as _ };
    let times = Timestamps {
        last_access: time(stat.st_atime, stat.st_atime_nsec),
        last_modification: time(stat.st_mtime, stat.st_mtime_nsec),
    };
    Ok(utimensat(to, new, &times, AtFlags::SYMLINK_NOFOLLOW)?)
}

#[cfg(test)]
mod tests {
    use std::{
        fs,
        os::unix::fs::{MetadataExt, PermissionsExt, symlink},
        path::Path,
    };

    use rustix::fs::{FileType, Mode};

    use super::write;

    /// Links the files of `before` into `changed`: so they have the same inodes, as in two mounts.
    fn linked(before: &Path, changed: &Path) {
        fs::create_dir(changed).unwrap();
        for entry in fs::read_dir(before).unwrap() {
            let path = entry.unwrap().path();
            let to = changed.join(path.file_name().unwrap());
            match path.is_dir() {
                true => linked(&path, &to),
                false => fs::hard_link(&path, &to).unwrap(),
            }
        }
    }

    #[test]
    fn changes_are_copied_and_the_rest_is_not() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        for name in ["before/a/b", "before/gone/below", "before/same"] {
            fs::create_dir_all(path(name)).unwrap();
        }
        for name in [
            "before/a/kept",
            "before/a/hidden",
            "before/a/b/old",
            "before/gone/below/x",
            "before/kept",
        ] {
            fs::write(path(name), name).unwrap();
        }
        linked(&path("before"), &path("changed"));
        fs::remove_dir_all(path("changed/gone")).unwrap();
        fs::write(path("changed/gone"), "a file now").unwrap();
        fs::remove_file(path("changed/a/b/old")).unwrap();
        fs::write(path("changed/a/new"), vec![7; 100_000]).unwrap();
        fs::File::options()
            .write(true)
            .open(path("changed/a/new"))
            .unwrap()
            .set_len(1 << 30)
            .unwrap();
        fs::set_permissions(path("changed/a/new"), fs::Permissions::from_mode(0o4711)).unwrap();
        fs::hard_link(path("changed/a/new"), path("changed/a/newer")).unwrap();
        symlink("../new", path("changed/a/link")).unwrap();
        // A device 0, 0 hides a file as its removal does, and is nothing where there was none.
        fs::remove_file(path("changed/a/hidden")).unwrap();
        for name in ["changed/a/hidden", "changed/a/nothing"] {
            let kind = FileType::CharacterDevice;
            rustix::fs::mknodat(rustix::fs::CWD, path(name), kind, Mode::RUSR, 0).unwrap();
        }
        fs::create_dir(path("layer")).unwrap();
        write(&path("changed"), &path("before"), &path("layer")).unwrap();
        let found = |name: &str| path("layer").join(name).symlink_metadata();
        assert!(found("kept").is_err() && found("a/kept").is_err());
        assert_eq!(fs::read(path("layer/gone")).unwrap(), b"a file now");
        for name in ["a/b/old", "a/hidden"] {
            let whiteout = found(name).unwrap();
            assert_eq!((whiteout.mode() & 0o170_000, whiteout.rdev()), (0o020_000, 0), "{name}");
        }
        assert!(found("a/nothing").is_err());
        let new = found("a/new").unwrap();
        assert_eq!((new.len(), new.mode() & 0o7777, new.nlink()), (1 << 30, 0o4711, 2));
        assert!(new.blocks() * 512 < 1 << 20, "it keeps its hole");
        assert_eq!(new.ino(), found("a/newer").unwrap().ino());
        assert_eq!(fs::read_link(path("layer/a/link")).unwrap(), Path::new("../new"));
        let time = |name: &str| path(name).metadata().unwrap().mtime_nsec();
        assert_eq!(time("layer/a"), time("changed/a"));
    }
}
