//! The place of an archive: standard output, or a file that appears when it is complete.
//!
//! ```text
//!   O_TMPFILE, without a name ─► written, synced ─► linked beside its place ─► renamed onto it
//!     └ unknown to the file system: a hidden name from the beginning, removed on failure
//! ```

use std::{
    fs::{self, File},
    io::{self, IsTerminal, Write},
    os::{
        fd::{AsFd, AsRawFd},
        unix::fs::OpenOptionsExt,
    },
    path::{Path, PathBuf},
    process,
};

use anyhow::Result;
use burgeon_block::{Error, ErrorKind};
use rustix::fs::{AtFlags, CWD, OFlags, linkat};

use crate::exit::Usage;

/// An archive holds files that only their owners may read.
const MODE: u32 = 0o600;

/// The requested place.
pub(super) enum Destination {
    StandardOutput,
    /// A regular file, or nothing yet.
    File(PathBuf),
}

/// An archive that is being written.
pub(super) struct Unfinished {
    file: File,
    shown: String,
    /// The place; `None` for standard output.
    place: Option<Place>,
    len: u64,
}

struct Place {
    path: PathBuf,
    /// The hidden name.
    hidden: PathBuf,
    /// True while the hidden name exists.
    has_name: bool,
}

impl Destination {
    /// Checks the place that the user has named.
    pub(super) fn new(path: &Path) -> Result<Self> {
        if path == Path::new("-") {
            if io::stdout().is_terminal() {
                let what = "an archive would go to the terminal: name a file with -o FILE, or \
                            redirect standard output";
                return Err(Usage(what.to_owned()).into());
            }
            return Ok(Self::StandardOutput);
        }
        let shown = path.display();
        // The file that a symlink leads to is replaced, not the symlink.
        let path = fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
        match fs::symlink_metadata(&path) {
            Ok(metadata) if metadata.is_file() => Ok(Self::File(path)),
            Ok(metadata) if metadata.is_dir() => {
                let what = format!("cannot write {shown}: it is a directory; name a file in it");
                Err(Error::new(ErrorKind::Invalid, what).into())
            }
            Ok(_) => {
                let what = format!(
                    "cannot write {shown}: it is no regular file; redirect standard output to it: \
                     burgeon export … > {shown}"
                );
                Err(Error::new(ErrorKind::Invalid, what).into())
            }
            Err(_) => Ok(Self::File(path)),
        }
    }

    pub(super) fn is_standard_output(&self) -> bool {
        matches!(self, Self::StandardOutput)
    }

    pub(super) fn create(self) -> Result<Unfinished> {
        let path = match self {
            Self::File(path) => path,
            Self::StandardOutput => {
                let shown = "standard output".to_owned();
                let file = io::stdout().as_fd().try_clone_to_owned();
                let file = file.map_err(|e| Error::io(format!("cannot write {shown}"), e))?.into();
                return Ok(Unfinished { file, shown, place: None, len: 0 });
            }
        };
        let shown = path.display().to_string();
        let failed = |e| Error::io(format!("cannot write {shown}"), e);
        let name = path.file_name().ok_or_else(|| {
            Error::new(ErrorKind::Invalid, format!("cannot write {shown}: it names no file"))
        })?;
        let folder = match path.parent() {
            Some(parent) if parent != Path::new("") => parent,
            _ => Path::new("."),
        };
        let mut hidden = std::ffi::OsString::from(".");
        hidden.push(name);
        hidden.push(format!(".burgeon-{}", process::id()));
        let hidden = folder.join(hidden);
        let mut options = File::options();
        options.write(true).mode(MODE);
        let nameless = options.clone().custom_flags(OFlags::TMPFILE.bits() as i32).open(folder);
        let (file, has_name) = match nameless {
            Ok(file) => (file, false),
            Err(e) if is_unknown(&e) => {
                (options.create_new(true).open(&hidden).map_err(failed)?, true)
            }
            Err(e) => return Err(failed(e).into()),
        };
        let place = Some(Place { path, hidden, has_name });
        Ok(Unfinished { file, shown, place, len: 0 })
    }
}

/// True if the file system knows no files without names.
fn is_unknown(error: &io::Error) -> bool {
    let unknown = [rustix::io::Errno::OPNOTSUPP, rustix::io::Errno::ISDIR];
    error.raw_os_error().is_some_and(|code| unknown.iter().any(|e| e.raw_os_error() == code))
}

impl Unfinished {
    /// Puts the complete archive in its place; returns its length in bytes.
    pub(super) fn publish(mut self) -> Result<u64> {
        let shown = self.shown.clone();
        let failed = |e| Error::io(format!("cannot write {shown}"), e);
        let Some(place) = &mut self.place else { return Ok(self.len) };
        self.file.sync_all().map_err(failed)?;
        if !place.has_name {
            let file = format!("/proc/self/fd/{}", self.file.as_raw_fd());
            linkat(CWD, file, CWD, &place.hidden, AtFlags::SYMLINK_FOLLOW)
                .map_err(|e| failed(e.into()))?;
            place.has_name = true;
        }
        fs::rename(&place.hidden, &place.path).map_err(failed)?;
        place.has_name = false;
        Ok(self.len)
    }

    /// Appends `bytes`.
    pub(super) fn put(&mut self, bytes: &[u8]) -> Result<()> {
        self.file
            .write_all(bytes)
            .map_err(|e| Error::io(format!("cannot write {}", self.shown), e))?;
        self.len += bytes.len() as u64;
        Ok(())
    }
}

impl Drop for Unfinished {
    fn drop(&mut self) {
        if let Some(place) = self.place.as_ref().filter(|place| place.has_name) {
            let _ = fs::remove_file(&place.hidden);
        }
    }
}
