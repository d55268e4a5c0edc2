//! Finds mounts whose file system btrfs has forced read-only.
//!
//! ```text
//!   /proc/self/mountinfo:  … /mnt/a rw,nosuid … - btrfs /dev/loop7 ro,nodiscard,…
//!                                   the mount                      the file system
//! ```
//!
//! Burgeon makes the file system of every writable mount writable. After an error of its own, btrfs
//! makes it read-only until its umount: it refuses `mount -o remount,rw`.
//!
//! Invariants: nothing is mounted to find this out; the caller's namespace is examined first, and
//! others only for mounts that it does not have.

use std::{collections::HashMap, ffi::OsString, fs, path::Path};

use crate::{
    host::{mount_namespaces, mountinfo},
    id::Fsid,
    ipc::protocol::{DaemonStatus, MountStatus},
    state::record::WritesState,
};

/// The read-only state of the file system on each device, such as `loop7`.
type ReadOnly = HashMap<OsString, bool>;

/// Marks in `status` the mounts that were forced read-only, as seen by the calling process.
pub fn note(status: &mut DaemonStatus) {
    let own = file_systems(Path::new("/proc/thread-self/mountinfo"));
    let mut elsewhere = None;
    for mount in &mut status.mounts {
        let (WritesState::Sprout(_), Some(fsid)) = (&mount.writes, mount.fsid) else { continue };
        let found = is_read_only(&own, fsid)
            .or_else(|| is_read_only(elsewhere.get_or_insert_with(in_other_namespaces), fsid));
        mount.forced_read_only = found.unwrap_or(false);
    }
}

impl MountStatus {
    /// The problem of a mount that was forced read-only, and its remedy.
    pub fn read_only_problem(&self) -> Option<(String, &'static str)> {
        let WritesState::Sprout(sprout) = &self.writes else { return None };
        if !self.forced_read_only {
            return None;
        }
        let found = "btrfs has forced the file system read-only after an error, which the kernel log names \
                     (`dmesg | grep -i btrfs`), or somebody has remounted it (`mount -o remount,rw` undoes that); \
                     nothing can be written, reads go on";
        let remedy = match sprout.name {
            Some(_) => {
                "unmount it and mount it again with the same --writes: data that was synced before is kept"
            }
            None => {
                "copy the files you need, because its writes are discarded at umount; then unmount it and mount it again"
            }
        };
        Some((found.to_owned(), remedy))
    }
}

fn is_read_only(file_systems: &ReadOnly, fsid: Fsid) -> Option<bool> {
    let devices = fs::read_dir(format!("/sys/fs/btrfs/{fsid}/devices")).ok()?;
    let names = devices.flatten().map(|device| device.file_name());
    let states: Vec<_> = names.filter_map(|name| file_systems.get(&name)).collect();
    (!states.is_empty()).then(|| states.into_iter().all(|read_only| *read_only))
}

/// Each btrfs of the mount namespace, by the device name in mountinfo.
fn file_systems(path: &Path) -> ReadOnly {
    let mounts = mountinfo::read(path).unwrap_or_default();
    let btrfs = mounts.into_iter().filter(|mount| mount.fs_type == "btrfs");
    btrfs
        .filter_map(|mount| {
            // btrfs calls `/dev/mapper/x` `dm-0`.
            let device = fs::canonicalize(&mount.source).unwrap_or(mount.source);
            let read_only = mount.super_options.split(',').next() == Some("ro");
            Some((device.file_name()?.to_owned(), read_only))
        })
        .collect()
}

fn in_other_namespaces() -> ReadOnly {
    let others = mount_namespaces::others().into_iter();
    others.flat_map(|other| file_systems(&other.task.join("mountinfo"))).collect()
}
