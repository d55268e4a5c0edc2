//! Turns files into a mounted btrfs on block devices: the seed's two, and the sprout's.
//!
//! ```text
//!   supervisor: plumb ── MountParts ──► helper: assemble ── Plumbed and the mount ──► supervisor
//!                 ▲ ◄── Started ── a ublk device has appeared, and was not read
//!                 └─ does its server live? ─ Proceed ──► it may be read
//! ```
//!
//! Every loop detaches itself with its last user, and after this the only user is btrfs: the loops
//! end with the last mount, independent of any daemon process. A ublk device stays until the
//! supervisor removes it (`supervisor/watch.rs`).

pub(crate) mod parts;

use std::{fs::File, os::fd::OwnedFd, path::Path};

use burgeon_block::{Error, ErrorKind, Result};
use burgeon_btrfs::SUBVOLUME;
use burgeon_frontend::{
    Connection, LoopDevice, LoopOptions,
    btrfs_mount::{Btrfs, MountAccess},
    ublk::Control,
};

use self::parts::{MountParts, Plumbed, SproutPart};
use crate::{
    host::backing_devices,
    id::{Fsid, MountId},
    state::{
        attributes::MountAttributes,
        files,
        paths::StateDir,
        writes::{self, WritesRecord},
    },
    supervisor::{
        growth,
        helper::{self, Outcome, Task},
        plan::Plan,
    },
    transport::Channel,
};

/// Mounts `plan`: the lazy data behind `channel`, which must be served already, over ublk by a
/// device that the process `opener` has opened, and the seed's metadata in the mount's folder. A
/// device is read only after `is_served`, and that error is returned if not. Also returns the
/// detached mount.
pub(crate) fn plumb(
    state: &StateDir,
    id: MountId,
    (channel, opener): (&Channel, u32),
    plan: &Plan,
    attributes: MountAttributes,
    is_served: impl FnOnce() -> Result<()>,
) -> Result<(Plumbed, OwnedFd)> {
    if let Some(sprout) = &plan.sprout {
        if let Some(record) = sprout.record.as_ref().filter(|_| !sprout.is_new) {
            writes::check_sprout(record, &sprout.path)?;
            refuse_copy(record)?;
        }
        if !sprout.is_device {
            refuse_second_use(&sprout.path)?;
        }
    }
    let parts = MountParts {
        id,
        ublk: channel.transport().device().map(|number| (number, opener)),
        is_plain: channel.is_plain(),
        seed: state.mount(id).join("seed"),
        sprout: plan.sprout.as_ref().map(|sprout| SproutPart {
            path: sprout.path.clone(),
            is_device: sprout.is_device,
            is_new: sprout.is_new,
            thin: sprout.thin,
            reserved: sprout.reserved,
        }),
        attributes,
    };
    let sent: Vec<_> = channel.data().into_iter().collect();
    let task = Task::Plumb(parts);
    let (outcome, fds) = helper::run_in_steps(state, &task, &sent, is_served, || channel.abort())?;
    match (outcome, fds.into_iter().next()) {
        (Outcome::Plumbed(plumbed), Some(mount)) => Ok((plumbed, mount)),
        _ => Err(Error::new(ErrorKind::LocalIo, "the process that mounts gave no mount")),
    }
}

/// Makes the block devices of `parts` and mounts them, in a helper process: each step may wait for
/// the server. Over FUSE, `sent` is the mount of the FUSE file; it may also be the plain file. A
/// ublk device is read only after `may_proceed`.
pub(crate) fn assemble(
    parts: &MountParts,
    sent: Option<OwnedFd>,
    may_proceed: impl FnOnce() -> Result<()>,
) -> Result<(Plumbed, OwnedFd)> {
    let attach = |file: &File, what: &str, read_only: bool| {
        let name = format!("burgeon {what} {}", parts.id);
        LoopDevice::attach(file, LoopOptions { name: &name, read_only, discard: false })
    };
    let (data, data_device) = match (parts.ublk, sent) {
        (Some((number, opener)), _) => {
            let path = Control::open()?.start(number, opener)?;
            may_proceed()?;
            (None, path)
        }
        (None, Some(sent)) => {
            let file = match parts.is_plain {
                true => File::from(sent),
                false => Connection::open_file_of(&sent)?,
            };
            let data = attach(&file, "data", true)?;
            let path = data.path().to_owned();
            (Some(data), path)
        }
        (None, None) => {
            let what = "the request has neither a ublk device nor a file of the lazy data";
            return Err(Error::new(ErrorKind::Invalid, what));
        }
    };
    let metadata = attach(&open(&parts.seed, false)?, "metadata", true)?;
    let seed_devices = [metadata.path(), data_device.as_path()];
    let sprout = match &parts.sprout {
        Some(sprout) if !sprout.is_device => {
            Some(attach(&open(&sprout.path, true)?, "sprout", false)?)
        }
        _ => None,
    };
    let sprout_path = match (&sprout, &parts.sprout) {
        (Some(device), _) => Some(device.path()),
        (None, Some(sprout)) => Some(sprout.path.as_path()),
        (None, None) => None,
    };
    let is_new = parts.sprout.as_ref().is_some_and(|sprout| sprout.is_new);
    let btrfs = match sprout_path {
        None => Btrfs::mount_seed(&seed_devices, SUBVOLUME)?,
        Some(path) if is_new => Btrfs::mount_new_sprout(&seed_devices, path, SUBVOLUME)?,
        Some(path) => Btrfs::mount_sprout(&seed_devices, path, SUBVOLUME, MountAccess::Writable)?,
    };
    let growth = match (&parts.sprout, sprout_path) {
        (Some(sprout), Some(path)) if sprout.thin => Some(growth(&btrfs, path, sprout.reserved)?),
        _ => None,
    };
    // Before any other process can reach the mount.
    btrfs.set_attributes(parts.attributes.flags())?;
    let loops = [data.as_ref(), Some(&metadata), sprout.as_ref()];
    let loops = loops.into_iter().flatten().map(|device| device.path().to_owned()).collect();
    let fsid = Fsid(btrfs.fsid()?);
    Ok((Plumbed { fsid, data_device, loops, growth }, btrfs.into_fd()))
}

/// Refuses to mount a copy of mounted writes: to the kernel both are the same file system. Its own
/// error would be "File exists".
fn refuse_copy(record: &WritesRecord) -> Result<()> {
    let Some(fsid) = record.sprout_fsid else { return Ok(()) };
    let Some(devices) = backing_devices::mounted_from(fsid) else { return Ok(()) };
    Err(Error::new(
        ErrorKind::Unavailable,
        format!(
            "the writes {:?} are mounted already, as the btrfs {fsid} on {devices}: they or those \
             are a copy, and only one of them can be mounted at a time; unmount the other first",
            record.name
        ),
    ))
}

/// Refuses a file that a loop already uses: one file below two loops is one file system mounted
/// twice. Locks prevent that between daemons that know of each other; this check covers the rest,
/// such as a mount made by a later version.
fn refuse_second_use(file: &Path) -> Result<()> {
    match backing_devices::loop_on(file) {
        None => Ok(()),
        Some(device) => Err(Error::new(
            ErrorKind::Unavailable,
            format!("{} is in use below {device}: unmount that first", file.display()),
        )),
    }
}

fn open(path: &Path, writable: bool) -> Result<File> {
    files::open(path, File::options().read(true).write(writable))
        .map_err(|e| Error::io(format!("cannot open {}", path.display()), e))
}
