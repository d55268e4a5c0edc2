//! The directory under a mount: opened once, checked, locked, and mounted onto.
//!
//! ```text
//!   open ─► lock ─► directory? no mount point? empty? ─► (the mount is made) ─► move_mount onto it
//! ```
//! All steps use the one descriptor. The path may lead elsewhere when the mount is made: the owner
//! of a directory above can replace it, also by a symlink.
//!
//! Invariant (held by `tests/paths.rs`): the mount lands on the directory that was checked, or
//! nowhere.

use std::{
    fs::{self, File},
    os::{
        fd::{AsRawFd, OwnedFd},
        unix::fs::{MetadataExt, OpenOptionsExt},
    },
    path::{Path, PathBuf},
};

use anyhow::Result;
use burgeon_block::{Error, ErrorKind};
use rustix::{
    fs::{AtFlags, Dir, FlockOperation, OFlags, StatxAttributes, StatxFlags, flock, statx},
    io::Errno,
};

use crate::exit::Busy;

/// An empty directory without a mount on it, locked for the lifetime of this value.
pub(super) struct MountPoint {
    directory: File,
    /// The user's path.
    shown: PathBuf,
}

impl MountPoint {
    /// Opens and locks `path`, following symlinks, and checks it. The lock excludes a second mount
    /// at the same time, which would hide the first one's files.
    pub(super) fn take(path: &Path) -> Result<Self> {
        let shown = path.display();
        let opened = File::options()
            .read(true)
            .custom_flags((OFlags::DIRECTORY | OFlags::NONBLOCK).bits() as i32)
            .open(path);
        let directory = opened.map_err(|e| {
            let why = match e.kind() {
                std::io::ErrorKind::NotFound => ": make it with mkdir",
                std::io::ErrorKind::NotADirectory => ": it is not a directory",
                _ => "",
            };
            let what = format!("cannot mount at {shown}{why}");
            match e.kind() {
                std::io::ErrorKind::NotADirectory => Error::new(ErrorKind::Invalid, what),
                _ => Error::io(what, e),
            }
        })?;
        let point = Self { directory, shown: path.to_owned() };
        if point.path()?.to_str().is_none() {
            let what = format!("cannot mount at {shown}: its name is not UTF-8");
            return Err(Error::new(ErrorKind::Invalid, what).into());
        }
        // If the other mount is in place already, this opened its root, which nobody locks.
        let locked = flock(&point.directory, FlockOperation::NonBlockingLockExclusive);
        if locked == Err(Errno::WOULDBLOCK) {
            return Err(Busy(format!(
                "cannot mount at {shown}: another process has locked it (flock), perhaps another \
                 `burgeon mount`"
            ))
            .into());
        }
        if point.is_mounted_on()? {
            return Err(Busy(format!(
                "cannot mount at {shown}: something is mounted there already; unmount it first"
            ))
            .into());
        }
        if !point.is_empty()? {
            let what = format!(
                "cannot mount at {shown}: it is not empty, and its content would be hidden"
            );
            return Err(Error::new(ErrorKind::Invalid, what).into());
        }
        Ok(point)
    }

    /// Its present absolute path.
    pub(super) fn path(&self) -> Result<PathBuf> {
        Ok(fs::read_link(self.link()).map_err(|e| self.cannot_look(e))?)
    }

    /// Moves the detached `mount` onto the directory and returns the path. Closes the mount's
    /// descriptor, which would keep the mount busy.
    pub(super) fn attach(self, mount: OwnedFd) -> Result<PathBuf> {
        burgeon_daemon::attach(&mount, &self.directory)
            .map_err(|e| Error::with_source(e.kind(), self.cannot_mount(), e))?;
        self.path()
    }

    fn is_mounted_on(&self) -> Result<bool> {
        let stat = statx(&self.directory, "", AtFlags::EMPTY_PATH, StatxFlags::BASIC_STATS)
            .map_err(|e| self.cannot_look(e.into()))?;
        if stat.stx_attributes_mask.contains(StatxAttributes::MOUNT_ROOT) {
            return Ok(stat.stx_attributes.contains(StatxAttributes::MOUNT_ROOT));
        }
        // Linux before 5.8 does not report mount roots, but the device differs from the parent's.
        let device = |path: &Path| fs::metadata(path).map(|metadata| metadata.dev());
        let (here, above) = (self.directory.metadata(), device(&self.link().join("..")));
        let here = here.map(|metadata| metadata.dev()).map_err(|e| self.cannot_look(e))?;
        Ok(here != above.map_err(|e| self.cannot_look(e))?)
    }

    fn is_empty(&self) -> Result<bool> {
        let names = Dir::read_from(&self.directory).map_err(|e| self.cannot_look(e.into()))?;
        for name in names {
            let name = name.map_err(|e| self.cannot_look(e.into()))?;
            if !matches!(name.file_name().to_bytes(), b"." | b"..") {
                return Ok(false);
            }
        }
        Ok(true)
    }

    fn link(&self) -> PathBuf {
        PathBuf::from(format!("/proc/self/fd/{}", self.directory.as_raw_fd()))
    }

    fn cannot_mount(&self) -> String {
        format!("cannot mount at {}", self.shown.display())
    }

    fn cannot_look(&self, error: std::io::Error) -> Error {
        Error::io(format!("cannot look at {}", self.shown.display()), error)
    }
}
