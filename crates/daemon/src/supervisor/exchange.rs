//! Replaces the file below the loop device of a mounted file system, in a helper process: a dead
//! FUSE file by a new one (`reconnect.rs`), or one that is served by a plain file (`plain.rs`).
//!
//! ```text
//!   lock ─► the steps of `order.rs`            one at a time for each mount
//! ```
//!
//! `supervisor/reconnect.rs` explains the freeze, `helper.rs` the separate process.
//!
//! Invariants:
//! - The lock is held from before the first step until after the last. So a later supervisor that
//!   finds "frozen" in the record thaws after an earlier supervisor's helper has finished, never in
//!   the middle of its exchange.
//! - A command that unmounts holds the same lock (`orphan.rs`): it waits for an exchange, and an
//!   exchange waits for it (`crates/cli/tests/kill_apart.rs`). Another process's umount is kept out
//!   by the pin.
//! - Nothing is done to a file system that has been released, or to one that was mounted since.

use std::{
    fs::{self, File},
    os::{
        fd::{AsRawFd, OwnedFd},
        unix::fs::MetadataExt,
    },
    path::{Path, PathBuf},
    time::Duration,
};

use burgeon_block::{Error, ErrorKind, Result};
use burgeon_btrfs::SUBVOLUME;
use burgeon_frontend::{
    Connection, LoopDevice,
    btrfs_mount::{Btrfs, MountAccess},
};
use serde::{Deserialize, Serialize};

use crate::{id::Fsid, state::files::Lock};

pub(crate) mod order;
pub(crate) mod probe;

/// `ioctl_loop`: replaces a read-only loop's backing file by another one of the same size.
const LOOP_CHANGE_FD: libc::c_ulong = 0x4c06;

/// `linux/fs.h`: `_IOWR('X', 119, int)` and `_IOWR('X', 120, int)`.
const FIFREEZE: libc::c_ulong = 0xc004_5877;
const FITHAW: libc::c_ulong = 0xc004_5878;

/// Time limit for another exchange, or a command that unmounts, to release the lock; less than a
/// helper has.
const LOCK_MAX: Duration = Duration::from_secs(60);

/// The mount to change.
#[derive(Serialize, Deserialize, Debug)]
pub(crate) struct Exchange {
    /// The file system.
    pub(crate) fsid: Fsid,
    /// The loop device with the lazy data.
    pub(crate) data_device: PathBuf,
    /// A device of the file system with local data: it is mounted once more by that.
    pub(crate) local_device: PathBuf,
    /// The mount is writable.
    pub(crate) writable: bool,
    /// Lock file in the mount's folder.
    pub(crate) lock: PathBuf,
}

/// Puts the FUSE file of the mount `fuse` below the loop device.
pub(crate) fn change_over(exchange: &Exchange, fuse: &OwnedFd) -> Result<()> {
    let _lock = exchange.lock()?;
    let file = Connection::open_file_of(fuse)?;
    let loop_device = exchange.open_device()?;
    order::exchange(&Live { exchange, loop_device, file, is_served: false })
}

/// Puts the plain `file` below the loop device of a mount that is served: its requests in work are
/// answered first.
pub(crate) fn change_to_plain(exchange: &Exchange, file: OwnedFd) -> Result<()> {
    let _lock = exchange.lock()?;
    let loop_device = exchange.open_device()?;
    order::exchange(&Live { exchange, loop_device, file: file.into(), is_served: true })
}

/// Thaws a file system that a killed exchange has left frozen.
pub(crate) fn thaw(exchange: &Exchange) -> Result<()> {
    if !exchange.writable {
        return Ok(());
    }
    let _lock = exchange.lock()?;
    thaw_at(&exchange.pin()?, &exchange.data_device);
    Ok(())
}

impl Exchange {
    fn lock(&self) -> Result<Lock> {
        Lock::take_within(&self.lock, LOCK_MAX)?.ok_or_else(|| {
            Error::new(
                ErrorKind::Unavailable,
                format!(
                    "the btrfs {} has been unmounted or reconnected by another process for {} s, \
                     which does not finish: the kernel's log (dmesg) says more",
                    self.fsid,
                    LOCK_MAX.as_secs()
                ),
            )
        })
    }

    /// While it is open, the loop cannot be detached and its number reused.
    fn open_device(&self) -> Result<File> {
        let device = &self.data_device;
        File::open(device)
            .map_err(|e| Error::io(format!("cannot change the file of {}", device.display()), e))
    }

    /// Opens the root of the file system by mounting it once more, read-only if btrfs has forced it
    /// read-only: it cannot be mounted writable then.
    fn pin(&self) -> Result<File> {
        let instance = self.instance()?;
        let mount = |access| Btrfs::mount(&self.local_device, SUBVOLUME, access);
        let mounted = match self.writable {
            true => mount(MountAccess::Writable)
                .or_else(|e| mount(MountAccess::ReadOnly).map_err(|_| e)),
            false => mount(MountAccess::ReadOnly),
        };
        let root = mounted?.open_root()?;
        // If its last user has unmounted it just now, it was mounted anew.
        if self.instance()? != instance { Err(self.is_over()) } else { Ok(root) }
    }

    /// A number that no other mounted file system of this machine has or had: mounted again, the
    /// same one has another. `NotFound` if it is not mounted on the data device.
    fn instance(&self) -> Result<u64> {
        let folder = Path::new("/sys/fs/btrfs").join(self.fsid.to_string());
        let name = self.data_device.file_name().unwrap_or_default();
        let instance = fs::metadata(&folder).map(|folder| folder.ino());
        match folder.join("devices").join(name).symlink_metadata() {
            Ok(_) => instance.map_err(|_| self.is_over()),
            Err(_) => Err(self.is_over()),
        }
    }

    fn is_over(&self) -> Error {
        Error::new(ErrorKind::NotFound, format!("the btrfs {} is not mounted any more", self.fsid))
    }
}

/// A mount of the kernel.
struct Live<'a> {
    exchange: &'a Exchange,
    loop_device: File,
    /// The new file.
    file: File,
    /// The old file is served, so its requests end by themselves.
    is_served: bool,
}

impl order::Mounted for Live<'_> {
    type Pin = File;

    fn fail_old_requests(&self) -> Result<()> {
        if self.is_served {
            return Ok(());
        }
        let (major, minor) = LoopDevice::backing_device(&self.loop_device)?;
        // Only now is that surely the mount's connection, because a detached loop's number is
        // reused.
        self.exchange.instance()?;
        let new = self.file.metadata().map(|metadata| libc::minor(metadata.dev()));
        if major == 0 && new.is_ok_and(|new| new != minor) {
            Connection::abort(minor)?;
        }
        Ok(())
    }

    fn pin(&self) -> Result<File> {
        self.exchange.pin()
    }

    fn freeze(&self, pin: &File) -> Result<()> {
        if !self.exchange.writable {
            return Ok(());
        }
        match number_ioctl(pin, FIFREEZE, 0) {
            // A killed helper has left it frozen.
            Err(e) if e.raw_os_error() != Some(libc::EBUSY) => {
                Err(Error::io("cannot freeze the file system", e))
            }
            _ => Ok(()),
        }
    }

    fn change_file(&self) -> Result<()> {
        let device = &self.exchange.data_device;
        number_ioctl(&self.loop_device, LOOP_CHANGE_FD, self.file.as_raw_fd())
            .map_err(|e| Error::io(format!("cannot change the file of {}", device.display()), e))
    }

    fn thaw(&self, pin: &File) {
        if self.exchange.writable {
            thaw_at(pin, &self.exchange.data_device);
        }
    }
}

fn thaw_at(root: &File, device: &Path) {
    match number_ioctl(root, FITHAW, 0) {
        // It was not frozen.
        Err(e) if e.raw_os_error() == Some(libc::EINVAL) => {}
        Err(e) => {
            tracing::error!(device = %device.display(), error = %e, "a file system stays frozen");
        }
        Ok(()) => {}
    }
}

fn number_ioctl(file: &File, request: libc::c_ulong, number: i32) -> std::io::Result<()> {
    // SAFETY: the requests used here take a number and touch no memory of this process.
    match unsafe { libc::ioctl(file.as_raw_fd(), request as _, number) } {
        0 => Ok(()),
        _ => Err(std::io::Error::last_os_error()),
    }
}
