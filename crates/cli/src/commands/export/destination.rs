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
        unix::fs::{MetadataExt, OpenOptionsExt},
    },
    path::{Path, PathBuf},
    process,
};

use anyhow::Result;
use burgeon_block::{Error, ErrorKind};
use rustix::{
    fs::{AtFlags, CWD, Mode, OFlags, fcntl_getfl, fstat, linkat, open},
    io::Errno,
};

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
    place: Option<OutputFile>,
    len: u64,
}

struct OutputFile {
    path: PathBuf,
    /// The hidden name, while the file has it.
    hidden: Option<PathBuf>,
}

/// Hidden names that are tried: one may be left of a killed process of the same number.
const NAMES_MAX: u32 = 16;

/// Calls `make` with hidden names beside `path` until one is free; returns its result and the name.
fn with_hidden_name<T>(
    path: &Path,
    make: impl Fn(&Path) -> io::Result<T>,
) -> io::Result<(T, PathBuf)> {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let mut number = 0;
    loop {
        let hidden = path.with_file_name(format!(".{name}.burgeon-{}-{number}", process::id()));
        match make(&hidden) {
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists && number < NAMES_MAX => number += 1,
            made => return made.map(|made| (made, hidden)),
        }
    }
}

/// True if the stream was closed when the program began: the standard library opens /dev/null in
/// its place, for reading and writing, which no redirection does.
fn is_closed(stream: impl AsFd) -> io::Result<bool> {
    let is_null = fs::metadata("/dev/null")?.rdev() == fstat(&stream)?.st_rdev;
    Ok(is_null && fcntl_getfl(&stream)?.contains(OFlags::RDWR))
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
            if is_closed(io::stdout())? {
                let what = "standard output is closed, so the archive would be lost: redirect it, \
                            or name a file with -o FILE";
                return Err(Usage(what.to_owned()).into());
            }
            return Ok(Self::StandardOutput);
        }
        let shown = path.display();
        // The file that a symlink leads to is replaced, not the symlink. The kernel follows it,
        // because it refuses those that others have planted in /tmp.
        let path = match open(path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty()) {
            Ok(found) => fs::read_link(format!("/proc/self/fd/{}", found.as_raw_fd())),
            Err(Errno::NOENT) => Ok(path.to_owned()),
            Err(e) => Err(e.into()),
        };
        let path = path.map_err(|e| Error::io(format!("cannot write {shown}"), e))?;
        match fs::symlink_metadata(&path) {
            Ok(metadata) if metadata.is_file() => Ok(Self::File(path)),
            Ok(metadata) if metadata.is_dir() => {
                let what = format!("cannot write {shown}: it is a directory; name a file in it");
                Err(Error::new(ErrorKind::Invalid, what).into())
            }
            Ok(_) => {
                let what = format!(
                    "cannot write {shown}: it is not a regular file; redirect standard output to it: \
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
        if path.file_name().is_none() {
            let what = format!("cannot write {shown}: it names no file");
            return Err(Error::new(ErrorKind::Invalid, what).into());
        }
        let folder = match path.parent() {
            Some(parent) if parent != Path::new("") => parent,
            _ => Path::new("."),
        };
        let mut options = File::options();
        options.write(true).mode(MODE);
        let nameless = options.clone().custom_flags(OFlags::TMPFILE.bits() as i32).open(folder);
        let (file, hidden) = match nameless {
            Ok(file) => (file, None),
            Err(e) if is_unknown(&e) => {
                options.create_new(true);
                let made = with_hidden_name(&path, |hidden| options.open(hidden));
                let (file, hidden) = made.map_err(failed)?;
                (file, Some(hidden))
            }
            Err(e) => return Err(failed(e).into()),
        };
        let place = Some(OutputFile { path, hidden });
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
        let hidden = match place.hidden.take() {
            Some(hidden) => hidden,
            None => {
                let file = format!("/proc/self/fd/{}", self.file.as_raw_fd());
                let link =
                    |hidden: &Path| Ok(linkat(CWD, &file, CWD, hidden, AtFlags::SYMLINK_FOLLOW)?);
                with_hidden_name(&place.path, link).map_err(failed)?.1
            }
        };
        let renamed = fs::rename(&hidden, &place.path);
        if renamed.is_err() {
            place.hidden = Some(hidden);
        }
        renamed.map_err(failed)?;
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
        if let Some(hidden) = self.place.as_ref().and_then(|place| place.hidden.as_ref()) {
            let _ = fs::remove_file(hidden);
        }
    }
}
