//! Thin sprouts: more is promised than reserved, and space is reserved ahead of btrfs.
//!
//! ```text
//!   the file, and so the device:  ├── used by btrfs ──┤── at least one step ──┤
//!                                                                    ▲ grown here, step by step,
//!                                                                      up to the limit
//! ```
//!
//! btrfs only ever sees what is reserved: the device grows after the file has. When the host is
//! full the device stays as it is, and writers get ENOSPC from btrfs as on any full disk; a
//! sparse file would let btrfs write where there is nothing, and abort.
//!
//! Growing needs a moment's access to the mount, which the daemon does not keep: the same
//! devices are mounted once more, detached, and let go of again.

use std::{
    fs::{self, File},
    os::fd::AsRawFd,
    path::{Path, PathBuf},
    sync::Arc,
    thread,
    time::Duration,
};

use burgeon_block::{Error, ErrorKind, Result};
use burgeon_btrfs::SUBVOLUME;
use burgeon_frontend::btrfs_mount::{Access, Btrfs};

use super::{Supervisor, table::Growth};
use crate::{
    id::{Fsid, MountId},
    protocol::WritesState,
    space::{self, THIN_STEP},
};

/// How often the use of thin sprouts is looked at. A disk that writes 2 GB/s takes half a second
/// for a step, and there is always one ahead.
const INTERVAL: Duration = Duration::from_millis(200);

/// How long to leave a host alone that had no space: it is looked at again after this.
const FULL_PAUSE: Duration = Duration::from_secs(5);

/// `ioctl_loop`: the device takes over its file's new size.
const LOOP_SET_CAPACITY: libc::c_ulong = 0x4c07;

/// A thin sprout in use.
struct Thin {
    id: MountId,
    fsid: Fsid,
    path: PathBuf,
    device: PathBuf,
    /// The device's number in its file system.
    device_id: u64,
    /// Bytes of block groups that lie on the seed.
    seed_bytes: u64,
    limit: u64,
    reserved: u64,
}

impl Supervisor {
    /// Looks after thin sprouts as long as there are any; started with the first of them.
    pub(super) fn tend_thin(self: &Arc<Self>) {
        {
            let mut table = self.table();
            if std::mem::replace(&mut table.tending_thin, true) {
                return;
            }
        }
        let supervisor = Arc::clone(self);
        thread::spawn(move || {
            loop {
                let thin = supervisor.thin_sprouts();
                if thin.is_empty() {
                    supervisor.table().tending_thin = false;
                    // One may have been added between the look and the word.
                    if !supervisor.thin_sprouts().is_empty() {
                        supervisor.tend_thin();
                    }
                    return;
                }
                let all_well = thin.iter().all(|sprout| supervisor.tend(sprout));
                thread::sleep(if all_well { INTERVAL } else { FULL_PAUSE });
            }
        });
    }

    fn thin_sprouts(&self) -> Vec<Thin> {
        let table = self.table();
        let mounts = table.mounts.values().filter(|entry| entry.handed_out && !entry.ended);
        mounts
            .filter_map(|entry| {
                let record = &entry.record;
                let WritesState::Sprout(sprout) = &record.writes else { return None };
                let growth = record.growth.as_ref()?;
                Some(Thin {
                    id: record.attach.id,
                    fsid: record.fsid?,
                    path: sprout.path.clone(),
                    device: growth.device.clone(),
                    device_id: growth.device_id,
                    seed_bytes: growth.seed_bytes,
                    limit: sprout.limit,
                    reserved: sprout.reserved,
                })
            })
            .collect()
    }

    /// Grows a sprout if it is time to; false if that was not possible.
    fn tend(&self, thin: &Thin) -> bool {
        let Some(allocated) = allocated(thin.fsid) else { return true };
        let used = allocated.saturating_sub(thin.seed_bytes);
        if thin.reserved >= thin.limit || thin.reserved.saturating_sub(used) >= THIN_STEP {
            return true;
        }
        let to = (thin.reserved + THIN_STEP).min(thin.limit);
        match grow(thin, to) {
            Ok(()) => {
                let changed = self.update(thin.id, |record| {
                    if let WritesState::Sprout(sprout) = &mut record.writes {
                        sprout.reserved = to;
                    }
                });
                changed.is_ok()
            }
            Err(e) => {
                log!("the thin sprout of mount {} does not grow: {e}", thin.id);
                false
            }
        }
    }
}

/// What growing the sprout on `device` takes, found out while its mount was at hand.
pub(crate) fn growth(mount: &Btrfs, device: &Path) -> Result<Growth> {
    let devices = mount.devices()?;
    let sprout = devices.iter().find(|one| one.path == device).ok_or_else(|| {
        let what = format!("btrfs does not list {}", device.display());
        Error::new(ErrorKind::LocalIo, what)
    })?;
    let seed = devices.iter().filter(|one| one.id != sprout.id);
    Ok(Growth {
        device: device.to_owned(),
        device_id: sprout.id,
        seed_bytes: seed.map(|one| one.allocated).sum(),
    })
}

/// Bytes of all block groups of a mounted btrfs.
fn allocated(fsid: Fsid) -> Option<u64> {
    let folder = Path::new("/sys/fs/btrfs").join(fsid.to_string()).join("allocation");
    let mut sum = 0;
    for kind in ["data", "metadata", "system"] {
        let text = fs::read_to_string(folder.join(kind).join("disk_total")).ok()?;
        sum += text.trim().parse::<u64>().ok()?;
    }
    Some(sum)
}

/// File first, then the loop device, then btrfs.
fn grow(thin: &Thin, to: u64) -> Result<()> {
    let failed = |e| Error::io(format!("cannot grow {}", thin.path.display()), e);
    let file = File::options().read(true).write(true).open(&thin.path).map_err(failed)?;
    space::reserve(&file, thin.reserved, to - thin.reserved, &thin.path)?;
    file.sync_all().map_err(failed)?;
    let device = File::open(&thin.device).map_err(failed)?;
    // SAFETY: LOOP_SET_CAPACITY takes a number that it ignores.
    if unsafe { libc::ioctl(device.as_raw_fd(), LOOP_SET_CAPACITY as _, 0) } != 0 {
        return Err(failed(std::io::Error::last_os_error()));
    }
    let mount = Btrfs::mount(&thin.device, SUBVOLUME, Access::Writable)?;
    if Fsid(mount.fsid()?) != thin.fsid {
        // The mount went away meanwhile, and the device is somebody else's now.
        return Ok(());
    }
    mount.grow_device(thin.device_id)
}
