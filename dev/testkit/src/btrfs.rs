//! The view of btrfs itself on a mount: its devices, its own checker, its own operations.

use std::{
    fs::{self, File},
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, bail};

use crate::mountinfo::mounts_of;

/// Drops clean pages, directory entries and inodes, so that the next read asks the devices.
pub fn drop_caches() {
    rustix::fs::sync();
    fs::write("/proc/sys/vm/drop_caches", "3").expect("cannot drop caches: needs root");
}

/// The block devices of the btrfs mounted at `mounted`, seed devices among them.
pub fn btrfs_devices(mounted: &Path) -> Result<Vec<PathBuf>> {
    // The kernel's list by file system: the mount table names only one device.
    let mount = mounts_of("thread-self")?.into_iter().rev().find(|mount| mount.at == mounted);
    let mount = mount.with_context(|| format!("{mounted:?} is not mounted"))?;
    let source = mount.source.strip_prefix("/dev/").context("mount without a device")?;
    for entry in fs::read_dir("/sys/fs/btrfs")? {
        let devices = entry?.path().join("devices");
        if devices.join(source).exists() {
            let names = fs::read_dir(devices)?.map(|d| Ok(Path::new("/dev").join(d?.file_name())));
            return names.collect();
        }
    }
    bail!("no btrfs has the device {source}")
}

/// Runs stock `btrfs check` on the btrfs mounted at `mounted`, which nothing must be writing.
pub fn btrfs_check(mounted: &Path) -> Result<()> {
    rustix::fs::sync();
    let devices = btrfs_devices(mounted)?;
    let device = devices.first().context("no device")?;
    let output = Command::new("btrfs")
        .args(["check", "--readonly", "--force"])
        .arg(device)
        .output()
        .context("cannot run btrfs: install the package btrfs-progs")?;
    let text = [output.stdout, output.stderr].concat();
    let text = String::from_utf8_lossy(&text);
    if !output.status.success() || !text.contains("no error found") {
        bail!("btrfs check of {devices:?}: {} {text}", output.status);
    }
    Ok(())
}

/// Makes `to` share all extents of `from`.
pub fn reflink(from: &Path, to: &Path) -> Result<()> {
    let (from, to) = (File::open(from)?, File::create_new(to)?);
    rustix::fs::ioctl_ficlone(&to, &from).context("reflink")
}

/// A read-write snapshot of the subvolume `from` as `to`.
pub fn snapshot(from: &Path, to: &Path) -> Result<()> {
    let output =
        Command::new("btrfs").args(["subvolume", "snapshot"]).arg(from).arg(to).output()?;
    if !output.status.success() {
        bail!("snapshot: {}", String::from_utf8_lossy(&output.stderr));
    }
    Ok(())
}
