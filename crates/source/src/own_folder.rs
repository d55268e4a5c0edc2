//! A folder in a store that others may write to: what it names is reached by its descriptor, so
//! that no symlink in its place leads elsewhere, however quickly it is put there.

use std::{
    ffi::{OsStr, OsString},
    fs::{self, File},
    io,
    os::{fd::AsRawFd, unix::fs::OpenOptionsExt},
    path::{Path, PathBuf},
};

use burgeon_block::{Error, ErrorKind, Result};
use rustix::fs::OFlags;

/// A folder of the store, held open: whatever takes its place, nothing else is reached. It may be
/// missing.
pub(crate) struct OwnFolder {
    path: PathBuf,
    held: Option<File>,
}

impl OwnFolder {
    /// Opens the folder `path`. `Invalid` if it is a symlink, or no folder.
    pub(crate) fn open(path: &Path) -> Result<Self> {
        let flags = OFlags::DIRECTORY | OFlags::NOFOLLOW;
        let opened = File::options().read(true).custom_flags(flags.bits() as i32).open(path);
        let held = match opened {
            Ok(held) => Some(held),
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            Err(error) if error.kind() == io::ErrorKind::NotADirectory => {
                let what = format!(
                    "{} is not a folder, or a symlink, which Burgeon does not follow in a store: put a \
                     folder in its place",
                    path.display()
                );
                return Err(Error::with_source(ErrorKind::Invalid, what, error));
            }
            Err(error) => return Err(doing("open", path)(error)),
        };
        Ok(Self { path: path.to_owned(), held })
    }

    /// The path of its entry `name` by the open descriptor. Without `/proc` it is the folder's own
    /// path, as it was checked at the opening.
    pub(crate) fn reach(&self, name: &OsStr) -> PathBuf {
        self.base().join(name)
    }

    fn base(&self) -> PathBuf {
        let held = self.held.as_ref().map(|held| format!("/proc/self/fd/{}", held.as_raw_fd()));
        let held = held.map(PathBuf::from).filter(|held| held.exists());
        held.unwrap_or_else(|| self.path.clone())
    }

    /// The names of all entries.
    pub(crate) fn names(&self) -> Result<Vec<OsString>> {
        if self.held.is_none() {
            return Ok(Vec::new());
        }
        let failed = doing("list", &self.path);
        let entries = fs::read_dir(self.base()).map_err(&failed)?;
        entries.map(|entry| entry.map(|entry| entry.file_name()).map_err(&failed)).collect()
    }

    /// The results of `with` for all entries. `verb` is for errors.
    pub(crate) fn each<T>(
        &self,
        verb: &str,
        with: impl Fn(&Path) -> io::Result<T>,
    ) -> Result<Vec<T>> {
        let made = self
            .names()?
            .into_iter()
            .map(|name| with(&self.reach(&name)).map_err(doing(verb, &self.path.join(&name))));
        made.collect()
    }
}

/// Converts an I/O error: "cannot `verb` `path`".
pub(crate) fn doing<'a>(verb: &'a str, path: &'a Path) -> impl Fn(io::Error) -> Error + 'a {
    move |error| Error::io(format!("cannot {verb} {}", path.display()), error)
}
