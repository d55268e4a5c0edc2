//! The directory under a mount: opened once, checked, locked, and mounted onto.
//!
//! ```text
//!   open (O_PATH) ─► lock ─► directory? no mount point? empty? ─► (the mount is made) ─► move_mount onto it
//!         └ autofs: neither locked nor read, which would wait for the mount that is being made
//! ```
//! All steps use the one descriptor. The path may lead elsewhere when the mount is made: the owner
//! of a directory above can replace it, also by a symlink.
//!
//! Invariants: the mount lands on the directory that was checked, or nowhere (held by
//! `tests/paths.rs`); an automount at the directory is not triggered (no test shows this yet).

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
use burgeon_daemon::{Fsid, btrfs_fsid};
use rustix::{
    fs::{
        AtFlags, Dir, FileType, FlockOperation, Mode, OFlags, StatxAttributes, StatxFlags, flock,
        fstat, fstatfs, open, statx,
    },
    io::Errno,
};

use crate::{exit::Busy, namespace::Namespace};

/// `AUTOFS_SUPER_MAGIC`.
const AUTOFS: u64 = 0x0187;

/// `BTRFS_SUPER_MAGIC`.
const BTRFS: u64 = 0x9123_683e;

/// The inode of a btrfs subvolume's root.
const SUBVOLUME_ROOT: u64 = 256;

/// A directory, opened without any access to it.
pub(crate) struct Opened {
    /// Opened with `O_PATH`: any other opening would set off an automount.
    directory: OwnedFd,
    /// The user's path.
    shown: PathBuf,
    /// The mount namespace of the directory, if it is another one.
    namespace: Option<Namespace>,
}

/// An empty directory without a mount on it, locked for the lifetime of this value.
pub(super) struct MountPoint {
    opened: Opened,
    /// Has the lock; an automount point has none.
    _locked: Option<File>,
}

impl Opened {
    /// Opens `path` in `namespace`, following symlinks.
    pub(crate) fn new(path: &Path, namespace: Option<Namespace>) -> Result<Self> {
        let shown = path.display();
        // A slash at the end would set off an automount.
        let plain: PathBuf = path.components().collect();
        let look = || open(&plain, OFlags::PATH | OFlags::CLOEXEC, Mode::empty());
        let opened = match &namespace {
            Some(namespace) => namespace.within(look)?,
            None => look(),
        };
        let directory = opened.map_err(|errno| {
            let why = match errno {
                Errno::NOENT => ": make it with mkdir",
                Errno::NOTDIR => ": it is not a directory",
                _ => "",
            };
            let what = format!("cannot mount at {shown}{why}");
            match errno {
                Errno::NOTDIR => Error::new(ErrorKind::Invalid, what),
                _ => Error::io(what, errno.into()),
            }
        })?;
        let opened = Self { directory, shown: path.to_owned(), namespace };
        let stat = fstat(&opened.directory).map_err(|e| opened.cannot_look(e.into()))?;
        if FileType::from_raw_mode(stat.st_mode) != FileType::Directory {
            let what = format!("cannot mount at {shown}: it is not a directory");
            return Err(Error::new(ErrorKind::Invalid, what).into());
        }
        if opened.path()?.to_str().is_none() {
            let what = format!("cannot mount at {shown}: its name is not UTF-8");
            return Err(Error::new(ErrorKind::Invalid, what).into());
        }
        Ok(opened)
    }

    /// Its present absolute path.
    pub(crate) fn path(&self) -> Result<PathBuf> {
        Ok(fs::read_link(self.link()).map_err(|e| self.cannot_look(e))?)
    }

    /// A path that leads to this directory, whatever its own path is now.
    pub(crate) fn link(&self) -> PathBuf {
        PathBuf::from(format!("/proc/self/fd/{}", self.directory.as_raw_fd()))
    }

    /// The btrfs whose root is mounted here.
    pub(crate) fn btrfs_root(&self) -> Result<Option<Fsid>> {
        if self.file_system()? != BTRFS || !self.is_mounted_on()? {
            return Ok(None);
        }
        let stat = fstat(&self.directory).map_err(|e| self.cannot_look(e.into()))?;
        match stat.st_ino {
            SUBVOLUME_ROOT => Ok(btrfs_fsid(&self.link())?),
            _ => Ok(None),
        }
    }

    /// Locks the directory and checks it. The lock excludes a second mount at the same time, which
    /// would hide the first one's files.
    pub(super) fn take(self) -> Result<MountPoint> {
        let shown = self.shown.display();
        if self.file_system()? == AUTOFS {
            // Empty, and the kernel has each user wait for the one mount.
            return Ok(MountPoint { opened: self, _locked: None });
        }
        let flags = (OFlags::DIRECTORY | OFlags::NONBLOCK).bits() as i32;
        let directory = File::options()
            .read(true)
            .custom_flags(flags)
            .open(self.link())
            .map_err(|e| Error::io(format!("cannot mount at {shown}"), e))?;
        // If the other mount is in place already, this opened its root, which nobody locks.
        let locked = flock(&directory, FlockOperation::NonBlockingLockExclusive);
        if locked == Err(Errno::WOULDBLOCK) {
            return Err(Busy(format!(
                "cannot mount at {shown}: another process has locked it (flock), perhaps another \
                 `burgeon mount`"
            ))
            .into());
        }
        if self.is_mounted_on()? {
            return Err(Busy(format!(
                "cannot mount at {shown}: something is mounted there already; unmount it first"
            ))
            .into());
        }
        if !self.is_empty(&directory)? {
            let what = format!(
                "cannot mount at {shown}: it is not empty, and its content would be hidden"
            );
            return Err(Error::new(ErrorKind::Invalid, what).into());
        }
        Ok(MountPoint { opened: self, _locked: Some(directory) })
    }

    /// Succeeds if something can be mounted here now.
    pub(crate) fn check(self) -> Result<()> {
        self.take().map(drop)
    }

    fn file_system(&self) -> Result<u64> {
        let stat = fstatfs(&self.directory).map_err(|e| self.cannot_look(e.into()))?;
        Ok(stat.f_type as u64)
    }

    fn is_mounted_on(&self) -> Result<bool> {
        let flags = AtFlags::EMPTY_PATH | AtFlags::NO_AUTOMOUNT;
        let stat = statx(&self.directory, "", flags, StatxFlags::BASIC_STATS)
            .map_err(|e| self.cannot_look(e.into()))?;
        if stat.stx_attributes_mask.contains(StatxAttributes::MOUNT_ROOT) {
            return Ok(stat.stx_attributes.contains(StatxAttributes::MOUNT_ROOT));
        }
        // Linux before 5.8 does not report mount roots, but the device differs from the parent's.
        let device = |path: &Path| fs::metadata(path).map(|metadata| metadata.dev());
        let (here, above) = (device(&self.link()), device(&self.link().join("..")));
        let here = here.map_err(|e| self.cannot_look(e))?;
        Ok(here != above.map_err(|e| self.cannot_look(e))?)
    }

    fn is_empty(&self, directory: &File) -> Result<bool> {
        let names = Dir::read_from(directory).map_err(|e| self.cannot_look(e.into()))?;
        for name in names {
            let name = name.map_err(|e| self.cannot_look(e.into()))?;
            if !matches!(name.file_name().to_bytes(), b"." | b"..") {
                return Ok(false);
            }
        }
        Ok(true)
    }

    fn cannot_look(&self, error: std::io::Error) -> Error {
        Error::io(format!("cannot look at {}", self.shown.display()), error)
    }
}

impl MountPoint {
    /// Its present absolute path.
    pub(super) fn path(&self) -> Result<PathBuf> {
        self.opened.path()
    }

    /// Moves the detached `mount` onto the directory and returns the path. Closes the mount's
    /// descriptor, which would keep the mount busy.
    pub(super) fn attach(self, mount: OwnedFd) -> Result<PathBuf> {
        let opened = &self.opened;
        let attach = || burgeon_daemon::attach(&mount, &opened.directory);
        let attached = match &opened.namespace {
            Some(namespace) => namespace.within(attach)?,
            None => attach(),
        };
        attached.map_err(|e| {
            let what = format!("cannot mount at {}", opened.shown.display());
            Error::with_source(e.kind(), what, e)
        })?;
        drop(mount);
        self.path()
    }
}
