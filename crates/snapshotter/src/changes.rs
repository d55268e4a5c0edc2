//! The changes of a container: of its tree against the tree that it began as.
//!
//! ```text
//!   native   its own mount, and the chain's: all entries of both; one with the same inode, times
//!            and size in both is untouched, and not read
//!   overlay  the upper folder, and the layers below it: only the entries of the upper folder, and
//!            of an opaque folder also those below
//! ```
//!
//! An entry that was touched is compared as containerd's differ compares: by its attributes, its
//! capabilities, its size and its time; its data is read only if all of these are equal. So the
//! changes are the same as containerd's, but for one case: containerd takes files with equal times
//! of a fraction of a second for equal, and here their data is compared as well.
//!
//! Invariants: the changes come in the order of their paths, a folder before its entries; nothing
//! outside of the trees is read; at most [`DEPTH_MAX`] folders are entered.

use std::{
    ffi::CString,
    fs::File,
    io::{self, Read, Write},
    os::fd::{AsFd, OwnedFd},
    path::Path,
    sync::atomic::{AtomicBool, Ordering},
};

use rustix::fs::{CWD, FileType, Mode, Stat, openat, readlinkat};

use crate::{
    before::{Before, Found, check_data, is_opaque},
    layer::{Epoch, LayerWriter},
    tree::{
        DEPTH_MAX, FOLDER, attribute, is_folder, is_untouched, is_whiteout, kind, names, open_file,
        open_folder, stat,
    },
};

/// Bytes of two files that are compared at a time.
const COMPARED: usize = 64 << 10;

/// True if two files of mounts of one seed have the same data for certain, by what is known without
/// reading it.
pub(crate) type IsShared<'a> = &'a dyn Fn(&File, &File) -> bool;

/// The two trees.
#[derive(Debug)]
pub(crate) struct Trees {
    /// The container's own mount, or its upper folder.
    now: OwnedFd,
    before: Before,
    is_overlay: bool,
}

impl Trees {
    /// A container with a mount of its own, and the mount of its chain, both of one seed.
    pub(crate) fn native(now: &Path, before: &Path) -> io::Result<Self> {
        let now = openat(CWD, now, FOLDER, Mode::empty())?;
        Ok(Self { now, before: Before::tree(before)?, is_overlay: false })
    }

    /// The upper folder of an overlay, and the folders below it, the nearest first.
    pub(crate) fn overlay(upper: &Path, lower: &[impl AsRef<Path>]) -> io::Result<Self> {
        let now = openat(CWD, upper, FOLDER, Mode::empty())?;
        Ok(Self { now, before: Before::layers(lower)?, is_overlay: true })
    }

    /// Writes the changes as a layer. Ends with an error soon after `stop` is set.
    pub(crate) fn write<W: Write>(
        self,
        to: W,
        epoch: Option<Epoch>,
        is_shared: IsShared<'_>,
        stop: &AtomicBool,
    ) -> io::Result<W> {
        let layer = LayerWriter::new(to, self.now.try_clone()?, epoch);
        let (levels, path, is_overlay) = (Vec::new(), Vec::new(), self.is_overlay);
        let mut walk = Walk { layer, levels, path, is_overlay, is_shared, stop };
        walk.enter(self.now, self.before)?;
        walk.run()?;
        walk.layer.finish()
    }
}

/// A folder of the changed tree.
struct Level {
    now: OwnedFd,
    before: Before,
    /// Entries of `before` are gone if it does not have them.
    hides: bool,
    /// The length of its path.
    path: usize,
    /// Names that were not looked at yet, the last one first.
    left: Vec<CString>,
}

struct Walk<'a, W> {
    layer: LayerWriter<W>,
    levels: Vec<Level>,
    /// The path of the last level's current entry.
    path: Vec<u8>,
    is_overlay: bool,
    is_shared: IsShared<'a>,
    stop: &'a AtomicBool,
}

impl<W: Write> Walk<'_, W> {
    fn run(&mut self) -> io::Result<()> {
        while let Some(level) = self.levels.last_mut() {
            check(self.stop)?;
            self.path.truncate(level.path);
            let Some(name) = level.left.pop() else {
                self.levels.pop();
                continue;
            };
            if level.path > 0 {
                self.path.push(b'/');
            }
            self.path.extend(name.to_bytes());
            self.look(&name)?;
        }
        Ok(())
    }

    /// Lists a folder whose path is the current one.
    fn enter(&mut self, now: OwnedFd, before: Before) -> io::Result<()> {
        if self.levels.len() >= DEPTH_MAX {
            let what = format!("it has more than {DEPTH_MAX} folders in one another");
            return Err(io::Error::other(what));
        }
        let mut left = names(&now)?;
        // Also below an opaque folder, where it could be a renamed one.
        let is_opaque = self.is_overlay && !self.levels.is_empty() && is_opaque(&now)?;
        // An overlay says itself what was removed, unless it hides all of the folder below, and
        // then also all folders in that. The root cannot be hidden.
        let hides = match self.levels.last() {
            Some(above) if self.is_overlay => above.hides || is_opaque,
            Some(_) => true,
            None => !self.is_overlay,
        };
        if hides {
            left.extend(before.names()?);
        }
        left.sort_unstable_by(|a, b| b.cmp(a));
        left.dedup();
        self.levels.push(Level { now, before, hides, path: self.path.len(), left });
        Ok(())
    }

    /// Compares the current entry.
    fn look(&mut self, name: &CString) -> io::Result<()> {
        let Some(level) = self.levels.last() else { return Ok(()) };
        let before = level.before.find(name)?;
        // A device 0, 0 is a whiteout. No container above overlayfs can make one; one that a native
        // container made in place of a file counts as its removal.
        let now = stat(&level.now, name)?.filter(|now| !is_whiteout(now));
        let Some(now) = now else {
            return match before {
                Some(_) => self.layer.remove(&self.path),
                None => Ok(()),
            };
        };
        if self.is_overlay {
            check_data(&level.now, name, &now)?;
        } else if before.as_ref().is_some_and(|before| is_untouched(&now, before.stat())) {
            // Its other names are untouched as well: a new name changes the time of the inode.
            return match before {
                Some(Found::Folder(_, before)) => self.enter_entry(name, before),
                _ => Ok(()),
            };
        }
        let same = match &before {
            Some(before) => self.is_same(name, &now, before)?,
            None => false,
        };
        self.layer.add((&level.now, name), &self.path, &now, same)?;
        match before {
            _ if !is_folder(&now) => Ok(()),
            Some(Found::Folder(_, before)) => self.enter_entry(name, before),
            _ => self.enter_entry(name, Before::default()),
        }
    }

    fn enter_entry(&mut self, name: &CString, before: Before) -> io::Result<()> {
        let Some(level) = self.levels.last() else { return Ok(()) };
        let now = open_folder(&level.now, name)?;
        self.enter(now, before)
    }

    /// True if the current entry is what it was.
    fn is_same(&self, name: &CString, now: &Stat, found: &Found) -> io::Result<bool> {
        let before = found.stat();
        let attributes = |it: &Stat| (it.st_mode, it.st_uid, it.st_gid, it.st_rdev);
        if attributes(now) != attributes(before) {
            return Ok(false);
        }
        let Some(level) = self.levels.last() else { return Ok(false) };
        let at = match found {
            Found::Other(_, at) => *at,
            // The nearest folder that has it decides, as for the attributes.
            Found::Folder(_, inside) => {
                return Ok(capability(&level.now, name)? == inside.capability()?);
            }
        };
        let Some(folder) = level.before.folder(at) else { return Ok(false) };
        if capability(&level.now, name)? != capability(folder, name)? {
            return Ok(false);
        }
        let content = |it: &Stat| (it.st_size, it.st_mtime, it.st_mtime_nsec);
        if content(now) != content(before) {
            return Ok(false);
        }
        match kind(now) {
            FileType::Symlink => {
                let target = |folder: &OwnedFd| readlinkat(folder, name, Vec::new());
                Ok(target(&level.now)? == target(folder)?)
            }
            FileType::RegularFile if now.st_size > 0 => {
                let (now, before) = (open_file(&level.now, name)?, open_file(folder, name)?);
                // Addresses of two file systems say nothing about one another, unless both are of
                // one seed.
                let is_shared = !self.is_overlay && (self.is_shared)(&now, &before);
                Ok(is_shared || is_equal(now, before, self.stop)?)
            }
            _ => Ok(true),
        }
    }
}

fn capability(folder: &OwnedFd, name: &CString) -> io::Result<Option<Vec<u8>>> {
    attribute(folder.as_fd(), name, c"security.capability")
}

/// True if both files have the same data.
fn is_equal(mut one: File, mut other: File, stop: &AtomicBool) -> io::Result<bool> {
    let [mut a, mut b] = [(); 2].map(|()| Vec::with_capacity(COMPARED));
    loop {
        check(stop)?;
        for (file, buffer) in [(&mut one, &mut a), (&mut other, &mut b)] {
            buffer.clear();
            file.take(COMPARED as u64).read_to_end(buffer)?;
        }
        match a == b {
            true if a.is_empty() => return Ok(true),
            true => {}
            false => return Ok(false),
        }
    }
}

/// Fails if a difference is to stop.
pub(crate) fn check(stop: &AtomicBool) -> io::Result<()> {
    match stop.load(Ordering::Relaxed) {
        true => Err(io::Error::other("it was cancelled")),
        false => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use std::{fs, io, sync::atomic::AtomicBool};

    use rustix::fs::{XattrFlags, setxattr};

    use super::Trees;

    /// Needs root, as the attributes of overlayfs do.
    #[test]
    fn a_renamed_folder_below_an_opaque_one_is_not_understood() {
        let folder = tempfile::tempdir().unwrap();
        let (upper, lower) = (folder.path().join("upper"), folder.path().join("lower"));
        fs::create_dir_all(upper.join("new/moved")).unwrap();
        fs::create_dir_all(lower.join("old")).unwrap();
        fs::write(lower.join("old/file"), "its data lies below").unwrap();
        let set = |name: &str, attribute: &str, value: &[u8]| {
            setxattr(upper.join(name), attribute, value, XattrFlags::empty()).unwrap();
        };
        let write = || -> io::Result<usize> {
            let trees = Trees::overlay(&upper, &[&lower]).unwrap();
            let stop = AtomicBool::new(false);
            Ok(trees.write(Vec::new(), None, &|_, _| false, &stop)?.len())
        };
        set("new", "trusted.overlay.opaque", b"y");
        assert!(write().unwrap() > 1024);
        set("new/moved", "trusted.overlay.redirect", b"/old");
        assert_eq!(write().unwrap_err().kind(), io::ErrorKind::Unsupported);
    }
}
