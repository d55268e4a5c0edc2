//! One growth step of a sprout, in a helper process: the step mounts the file system once more,
//! which waits for every other btrfs mount in progress (`helper.rs`).
//!
//! ```text
//!   fallocate ─► fsync ─► LOOP_SET_CAPACITY ─► mount once more ─► btrfs adopts the new size
//! ```
//!
//! An interrupted step can be repeated from the beginning.

use std::{
    fs::File,
    os::fd::AsRawFd,
    path::{Path, PathBuf},
};

use burgeon_block::{BLOCK_SIZE, Error, ErrorKind, Result};
use burgeon_btrfs::SUBVOLUME;
use burgeon_frontend::btrfs_mount::{Btrfs, MountAccess};
use serde::{Deserialize, Serialize};

use crate::{
    id::Fsid,
    state::{
        files,
        space::{self, HOST_LEFT},
    },
};

/// The smallest step, in bytes: with less room than this the host counts as full.
const STEP_MIN: u64 = 64 << 20;

/// `ioctl_loop`: the device adopts its file's new size.
const LOOP_SET_CAPACITY: libc::c_ulong = 0x4c07;

/// Parameters of a growth step.
#[derive(Serialize, Deserialize, Debug)]
pub(crate) struct Grow {
    pub(crate) fsid: Fsid,
    /// The sprout's file.
    pub(crate) path: PathBuf,
    /// Its loop device.
    pub(crate) device: PathBuf,
    /// The device's number in the file system.
    pub(crate) device_id: u64,
    /// Current size in bytes.
    pub(crate) reserved: u64,
    /// Wanted size in bytes; the host may have room for less.
    pub(crate) wanted: u64,
}

/// Result of a growth step.
#[derive(Serialize, Deserialize, Debug)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Step {
    /// The sprout has this size now, in bytes.
    Taken(u64),
    /// The mount is gone.
    Gone,
    /// The file system is read-only.
    ReadOnly,
}

/// Grows the file first, then the loop device, then btrfs.
pub(crate) fn grow(grow: &Grow) -> Result<Step> {
    let Grow { fsid, path, device, device_id, reserved, wanted } = grow;
    // Never mount it writable to find out: that would undo the user's `mount -o remount,ro`. If
    // btrfs has forced it read-only, the kernel refuses and logs a line.
    if Btrfs::mount(device, SUBVOLUME, MountAccess::ReadOnly)?.is_read_only()? {
        return Ok(Step::ReadOnly);
    }
    let failed = |e| Error::io(format!("cannot grow {}", path.display()), e);
    let free = space::free_space(path.parent().unwrap_or(path))?;
    let step = (wanted - reserved).min(free.saturating_sub(HOST_LEFT));
    if step < STEP_MIN.min(wanted - reserved) {
        let what = format!(
            "the host has {} MiB free, of which Burgeon leaves {} MiB unused: free some space",
            free >> 20,
            HOST_LEFT >> 20
        );
        return Err(Error::new(ErrorKind::NoSpace, what));
    }
    let to = reserved + step / BLOCK_SIZE * BLOCK_SIZE;
    let file = files::open(path, File::options().read(true).write(true)).map_err(failed)?;
    space::reserve(&file, *reserved, to - reserved, path)?;
    file.sync_all().map_err(failed)?;
    take_new_size(device).map_err(failed)?;
    let mount = Btrfs::mount(device, SUBVOLUME, MountAccess::Writable)?;
    if Fsid(mount.fsid()?) != *fsid {
        // The mount ended meanwhile, and the device may belong to another mount.
        return Ok(Step::Gone);
    }
    mount.grow_device(*device_id)?;
    Ok(Step::Taken(to))
}

fn take_new_size(device: &Path) -> std::io::Result<()> {
    let device = File::open(device)?;
    // SAFETY: LOOP_SET_CAPACITY takes a number that it ignores.
    match unsafe { libc::ioctl(device.as_raw_fd(), LOOP_SET_CAPACITY as _, 0) } {
        0 => Ok(()),
        _ => Err(std::io::Error::last_os_error()),
    }
}
