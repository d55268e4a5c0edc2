//! The tree that a container began as: one folder, or the merged layers of overlayfs.
//!
//! ```text
//!   layers, the nearest first   a/ ─┐
//!                               a/ ─┴► one folder `a`   until an opaque one
//!                               whiteout of b           nothing below it is seen
//! ```
//!
//! Layers are read one by one and nothing is mounted, because only the changed names are looked up.
//! A layer with a form that is not understood here, such as redirected folders, is refused with
//! `Unsupported`: the caller then has the difference made by someone who mounts.

use std::{
    collections::{BTreeMap, btree_map::Entry},
    ffi::{CStr, CString},
    io,
    os::fd::{AsFd, OwnedFd},
    path::Path,
};

use rustix::fs::{CWD, FileType, Mode, Stat, openat};

use crate::tree::{
    FOLDER, attribute, attribute_of, is_folder, is_whiteout, kind, names, open_folder, stat,
};

/// A folder of that tree; without any, it does not exist there.
#[derive(Debug, Default)]
pub(crate) struct Before {
    /// The nearest first.
    folders: Vec<OwnedFd>,
    is_overlay: bool,
}

/// An entry of that tree.
#[derive(Debug)]
pub(crate) enum Found {
    Folder(Stat, Before),
    /// Anything else, in the folder with this number.
    Other(Stat, usize),
}

impl Found {
    pub(crate) fn stat(&self) -> &Stat {
        let (Self::Folder(stat, _) | Self::Other(stat, _)) = self;
        stat
    }
}

impl Before {
    /// One tree, as it is.
    pub(crate) fn tree(path: &Path) -> io::Result<Self> {
        let folder = openat(CWD, path, FOLDER, Mode::empty())?;
        Ok(Self { folders: vec![folder], is_overlay: false })
    }

    /// Layers of overlayfs, the nearest first.
    pub(crate) fn layers(paths: &[impl AsRef<Path>]) -> io::Result<Self> {
        let open = |path: &Path| openat(CWD, path, FOLDER, Mode::empty());
        let folders = paths.iter().map(|path| Ok(open(path.as_ref())?));
        Ok(Self { folders: folders.collect::<io::Result<_>>()?, is_overlay: true })
    }

    /// The folder with this number.
    pub(crate) fn folder(&self, at: usize) -> Option<&OwnedFd> {
        self.folders.get(at)
    }

    /// The capabilities of the folder.
    pub(crate) fn capability(&self) -> io::Result<Option<Vec<u8>>> {
        match self.folders.first() {
            Some(folder) => attribute_of(folder, c"security.capability"),
            None => Ok(None),
        }
    }

    pub(crate) fn find(&self, name: &CStr) -> io::Result<Option<Found>> {
        let mut first = None;
        let mut folders = Vec::new();
        for (at, folder) in self.folders.iter().enumerate() {
            let Some(found) = stat(folder, name)? else { continue };
            if is_whiteout(&found) {
                break;
            }
            if !is_folder(&found) {
                if first.is_some() {
                    break;
                }
                if self.is_overlay {
                    check_data(folder, name, &found)?;
                }
                return Ok(Some(Found::Other(found, at)));
            }
            let opened = open_folder(folder, name)?;
            first.get_or_insert(found);
            let ends = self.is_overlay && is_opaque(&opened)?;
            folders.push(opened);
            if ends {
                break;
            }
        }
        let is_overlay = self.is_overlay;
        Ok(first.map(|stat| Found::Folder(stat, Self { folders, is_overlay })))
    }

    /// The names of all entries, sorted.
    pub(crate) fn names(&self) -> io::Result<Vec<CString>> {
        // False: a layer has removed it from those below.
        let mut all = BTreeMap::new();
        for folder in &self.folders {
            for name in names(folder)? {
                if let Entry::Vacant(entry) = all.entry(name) {
                    let found = stat(folder, entry.key())?;
                    entry.insert(found.is_some_and(|found| !is_whiteout(&found)));
                }
            }
        }
        Ok(all.into_iter().filter_map(|(name, is_there)| is_there.then_some(name)).collect())
    }
}

fn unsupported(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::Unsupported, format!("one of its layers has {what}"))
}

/// True if the folder of a layer hides those below it.
pub(crate) fn is_opaque(folder: &OwnedFd) -> io::Result<bool> {
    if attribute_of(folder, c"trusted.overlay.redirect")?.is_some() {
        return Err(unsupported("a renamed folder whose entries lie elsewhere"));
    }
    match attribute_of(folder, c"trusted.overlay.opaque")?.as_deref() {
        None => Ok(false),
        Some(b"y") => Ok(true),
        Some(_) => Err(unsupported("whiteouts in attributes")),
    }
}

/// Refuses a file of a layer that has no data of its own.
pub(crate) fn check_data(folder: &OwnedFd, name: &CStr, found: &Stat) -> io::Result<()> {
    let is_file = kind(found) == FileType::RegularFile;
    if is_file && attribute(folder.as_fd(), name, c"trusted.overlay.metacopy")?.is_some() {
        return Err(unsupported("a file with attributes alone"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::{ffi::CString, fs, path::Path};

    use rustix::fs::{CWD, FileType, Mode, mknodat};

    use super::{Before, Found};

    fn whiteout(path: &Path) {
        mknodat(CWD, path, FileType::CharacterDevice, Mode::empty(), 0).unwrap();
    }

    #[test]
    fn layers_are_merged_down_to_whiteouts_and_files() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        for name in ["1/merged", "2/merged", "2/typed/below", "2/file/below", "3/merged", "3/gone"]
        {
            fs::create_dir_all(path(name)).unwrap();
        }
        for name in ["1/typed", "1/merged/a", "2/merged/b", "3/merged/b", "3/merged/c", "3/last"] {
            fs::write(path(name), name).unwrap();
        }
        fs::create_dir(path("1/file")).unwrap();
        fs::write(path("3/file"), "a file below folders").unwrap();
        whiteout(&path("2/gone"));
        whiteout(&path("1/merged/b"));
        let all = Before::layers(&[path("1"), path("2"), path("3")]).unwrap();
        let names = |before: &Before| -> Vec<CString> { before.names().unwrap() };
        assert_eq!(names(&all), [c"file", c"last", c"merged", c"typed"].map(CString::from));
        assert!(all.find(c"gone").unwrap().is_none() && all.find(c"none").unwrap().is_none());
        assert!(matches!(all.find(c"typed").unwrap(), Some(Found::Other(_, 0))));
        assert!(matches!(all.find(c"last").unwrap(), Some(Found::Other(_, 2))));
        let inside = |name| match all.find(name).unwrap() {
            Some(Found::Folder(_, before)) => before,
            other => panic!("{other:?}"),
        };
        let merged = inside(c"merged");
        assert_eq!(names(&merged), [c"a", c"c"].map(CString::from));
        assert!(merged.find(c"b").unwrap().is_none());
        assert_eq!(names(&inside(c"file")), [c"below"].map(CString::from));
        assert!(names(&Before::default()).is_empty());
        // One tree is read as it is.
        let one = Before::tree(&path("1/merged")).unwrap();
        assert_eq!(names(&one), [c"a"].map(CString::from));
    }
}
