//! From files to a mounted btrfs: block devices, the seed's two, the sprout's.
//!
//! Every loop detaches itself with its last user, and after this the only user is btrfs: when
//! the last mount goes, they go, whoever unmounts it and whoever is still alive. A ublk device
//! stays, and the supervisor removes it (`supervisor/watch.rs`).

use std::{
    fs::File,
    os::fd::OwnedFd,
    path::{Path, PathBuf},
};

use burgeon_block::{Error, ErrorKind, Result};
use burgeon_btrfs::SUBVOLUME;
use burgeon_frontend::{
    LoopDevice, LoopOptions,
    btrfs_mount::{Access, Btrfs},
    ublk::Control,
};

use crate::{
    chain,
    id::{Fsid, MountId},
    protocol::MountAttributes,
    sprout::Plan,
    supervisor::{Growth, growth},
    transport::Channel,
    writes::{self, Record},
};

/// What the kernel has been given, and what it gave.
pub(crate) struct Plumbed {
    /// The detached mount.
    pub(crate) mount: OwnedFd,
    /// The file system that the user sees.
    pub(crate) fsid: Fsid,
    pub(crate) data_device: PathBuf,
    /// All loop devices of the mount.
    pub(crate) loops: Vec<PathBuf>,
    /// For growing sprouts.
    pub(crate) growth: Option<Growth>,
}

/// Mounts what `plan` says: the lazy data behind `channel`, which the process `server_pid` must
/// serve already, and the seed's metadata in `folder`.
pub(crate) fn plumb(
    id: MountId,
    channel: &Channel,
    server_pid: u32,
    folder: &Path,
    plan: &Plan,
    attributes: MountAttributes,
) -> Result<Plumbed> {
    let attach = |file: &File, what: &str, read_only: bool| {
        let name = format!("burgeon {what} {id}");
        LoopDevice::attach(file, LoopOptions { name: &name, read_only, discard: false })
    };
    let (data, data_path) = match channel {
        Channel::Fuse(connection, _) => {
            let data = attach(&connection.open_file()?, "data", true)?;
            let path = data.path().to_owned();
            (Some(data), path)
        }
        Channel::Ublk(number) => (None, Control::open()?.start(*number, server_pid)?),
    };
    let metadata = attach(&open(&folder.join("seed"), false)?, "metadata", true)?;
    let seed_devices = [metadata.path(), data_path.as_path()];
    if let Some(sprout) = plan.sprout.as_ref().filter(|sprout| !sprout.is_new)
        && let Some(record) = &sprout.record
    {
        writes::check_sprout(record, &sprout.path)?;
        refuse_copy(record)?;
    }
    let sprout = match &plan.sprout {
        Some(sprout) if !sprout.is_device => {
            refuse_second_use(&sprout.path)?;
            Some(attach(&open(&sprout.path, true)?, "sprout", false)?)
        }
        _ => None,
    };
    let sprout_path = match (&sprout, &plan.sprout) {
        (Some(device), _) => Some(device.path()),
        (None, Some(sprout)) => Some(sprout.path.as_path()),
        (None, None) => None,
    };
    let is_new = plan.sprout.as_ref().is_some_and(|sprout| sprout.is_new);
    let btrfs = match sprout_path {
        None => Btrfs::mount_seed(&seed_devices, SUBVOLUME)?,
        Some(path) if is_new => Btrfs::mount_new_sprout(&seed_devices, path, SUBVOLUME)?,
        Some(path) => Btrfs::mount_sprout(&seed_devices, path, SUBVOLUME, Access::Writable)?,
    };
    let growth = match (&plan.sprout, sprout_path) {
        (Some(sprout), Some(path)) if sprout.thin => Some(growth(&btrfs, path, sprout.reserved)?),
        _ => None,
    };
    // Before anybody but this process can reach the mount.
    btrfs.set_attributes(attributes.flags())?;
    let loops = [data.as_ref(), Some(&metadata), sprout.as_ref()];
    let loops = loops.into_iter().flatten().map(|device| device.path().to_owned()).collect();
    Ok(Plumbed {
        fsid: Fsid(btrfs.fsid()?),
        growth,
        mount: btrfs.into_fd(),
        data_device: data_path,
        loops,
    })
}

/// A copy of writes that are mounted is the same file system to the kernel, which has it once.
/// Left to itself it says "File exists".
fn refuse_copy(record: &Record) -> Result<()> {
    let Some(fsid) = record.sprout_fsid else { return Ok(()) };
    let Some(devices) = chain::mounted_from(fsid) else { return Ok(()) };
    Err(Error::new(
        ErrorKind::Unavailable,
        format!(
            "the writes {:?} are mounted already, as the btrfs {fsid} on {devices}: they or those \
             are a copy, and only one of them can be mounted at a time; unmount the other first",
            record.name
        ),
    ))
}

/// One file below two loops would be one file system mounted twice. Locks exclude that among
/// daemons that know of each other; this is for the rest, such as a mount that a later version
/// has made.
fn refuse_second_use(file: &Path) -> Result<()> {
    match chain::loop_on(file) {
        None => Ok(()),
        Some(device) => Err(Error::new(
            ErrorKind::Unavailable,
            format!("{} is in use below {device}: unmount that first", file.display()),
        )),
    }
}

fn open(path: &Path, writable: bool) -> Result<File> {
    File::options()
        .read(true)
        .write(writable)
        .open(path)
        .map_err(|e| Error::io(format!("cannot open {}", path.display()), e))
}
