//! Replaces the FUSE file below the loop device of a mounted file system, in a helper process.
//!
//! ```text
//!   lock ─► freeze ─► LOOP_CHANGE_FD ─► thaw            one at a time for each mount
//! ```
//!
//! `supervisor/reconnect.rs` explains the freeze, `helper.rs` the separate process.
//!
//! Invariant: the lock is held from before the freeze until after the thaw. So a later supervisor
//! that finds "frozen" in the record thaws after an earlier supervisor's helper has finished, never
//! in the middle of its exchange.

use std::{
    fs::File,
    os::fd::{AsRawFd, OwnedFd},
    path::{Path, PathBuf},
};

use burgeon_block::{Error, Result};
use burgeon_btrfs::SUBVOLUME;
use burgeon_frontend::{
    Connection,
    btrfs_mount::{Access, Btrfs},
};
use serde::{Deserialize, Serialize};

use crate::state::files::Lock;

/// `ioctl_loop`: replaces a read-only loop's backing file by another one of the same size.
const LOOP_CHANGE_FD: libc::c_ulong = 0x4c06;

/// `linux/fs.h`: `_IOWR('X', 119, int)` and `_IOWR('X', 120, int)`.
const FIFREEZE: libc::c_ulong = 0xc004_5877;
const FITHAW: libc::c_ulong = 0xc004_5878;

/// The mount to change.
#[derive(Serialize, Deserialize, Debug)]
pub(crate) struct Exchange {
    /// The loop device with the lazy data.
    pub(crate) data_device: PathBuf,
    /// The device of the sprout, if the mount is writable.
    pub(crate) sprout: Option<PathBuf>,
    /// Lock file in the mount's folder.
    pub(crate) lock: PathBuf,
}

/// Puts the FUSE file of the mount `fuse` below the loop device.
pub(crate) fn change_over(exchange: &Exchange, fuse: &OwnedFd) -> Result<()> {
    let device = &exchange.data_device;
    let failed = |e| Error::io(format!("cannot change the file of {}", device.display()), e);
    let _lock = Lock::take(&exchange.lock)?;
    let file = Connection::open_file_of(fuse)?;
    let loop_device = File::open(device).map_err(failed)?;
    let frozen = match &exchange.sprout {
        Some(sprout) => Some(Frozen::new(sprout)?),
        None => None,
    };
    let changed = number_ioctl(&loop_device, LOOP_CHANGE_FD, file.as_raw_fd());
    drop(frozen);
    changed.map_err(failed)
}

/// Thaws a file system that a killed exchange has left frozen.
pub(crate) fn thaw(exchange: &Exchange) -> Result<()> {
    let Some(sprout) = &exchange.sprout else { return Ok(()) };
    let _lock = Lock::take(&exchange.lock)?;
    let root = open_root(sprout)?;
    // Dropping it thaws; on a file system that is not frozen this has no effect.
    drop(Frozen(root));
    Ok(())
}

/// Opens the root of the file system on `device` by mounting it once more, read-only if btrfs has
/// forced the file system read-only: it cannot be mounted writable then.
fn open_root(device: &Path) -> Result<File> {
    let mounted = Btrfs::mount(device, SUBVOLUME, Access::Writable);
    let mounted =
        mounted.or_else(|e| Btrfs::mount(device, SUBVOLUME, Access::ReadOnly).map_err(|_| e));
    mounted?.open_root()
}

/// A frozen file system: it accepts no writes and has none outstanding until this is dropped.
struct Frozen(File);

impl Frozen {
    /// Freezes the file system on `device`.
    fn new(device: &Path) -> Result<Self> {
        let root = open_root(device)?;
        match number_ioctl(&root, FIFREEZE, 0) {
            Ok(()) => Ok(Self(root)),
            // A killed helper has left it frozen.
            Err(e) if e.raw_os_error() == Some(libc::EBUSY) => Ok(Self(root)),
            Err(e) => Err(Error::io("cannot freeze the file system", e)),
        }
    }
}

impl Drop for Frozen {
    fn drop(&mut self) {
        match number_ioctl(&self.0, FITHAW, 0) {
            // It was not frozen.
            Err(e) if e.raw_os_error() == Some(libc::EINVAL) => {}
            Err(e) => tracing::error!(error = %e, "a file system stays frozen"),
            Ok(()) => {}
        }
    }
}

fn number_ioctl(file: &File, request: libc::c_ulong, number: i32) -> std::io::Result<()> {
    // SAFETY: the requests used here take a number and touch no memory of this process.
    match unsafe { libc::ioctl(file.as_raw_fd(), request as _, number) } {
        0 => Ok(()),
        _ => Err(std::io::Error::last_os_error()),
    }
}
