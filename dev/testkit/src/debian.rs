//! A Debian root file system, debootstrapped once and kept.

use std::{
    fs::{self, File},
    path::PathBuf,
    process::Command,
};

use anyhow::{Context, Result, bail};

use crate::space::target_folder;

const RELEASE: &str = "bookworm";
const MIRROR: &str = "http://deb.debian.org/debian";

/// The path of a root file system of Debian 12, minimal variant. The first call makes it with
/// debootstrap (network, about a minute); later ones, of other test programs too, find it. In the
/// lab, which has no network, it is the host's.
pub fn debian_root() -> Result<PathBuf> {
    let base = target_folder();
    fs::create_dir_all(&base)?;
    // One test program makes it, the others wait.
    let lock = File::create(base.join("debian.lock"))?;
    rustix::fs::flock(&lock, rustix::fs::FlockOperation::LockExclusive)?;
    let root = base.join(format!("debian-{RELEASE}"));
    if root.join("etc/debian_version").exists() {
        return Ok(root);
    }
    let unfinished = base.join(format!("debian-{RELEASE}.unfinished"));
    if unfinished.exists() {
        fs::remove_dir_all(&unfinished)?;
    }
    fs::create_dir(&unfinished)?;
    // In a mount namespace of its own: debootstrap mounts /proc and may fail before it unmounts.
    // And it takes a path with spaces apart, so it works in one without.
    let script = r#"mount --bind "$1" /mnt && exec debootstrap --variant=minbase "$2" /mnt "$3""#;
    let output = Command::new("unshare")
        .args(["--mount", "sh", "-c", script, "sh"])
        .arg(&unfinished)
        .arg(RELEASE)
        .arg(std::env::var("BURGEON_DEBIAN_MIRROR").unwrap_or(MIRROR.into()))
        .output()
        .context("cannot run debootstrap: install the package debootstrap")?;
    if !output.status.success() {
        let log = String::from_utf8_lossy(&output.stdout);
        let last: Vec<&str> = log.lines().rev().take(5).collect();
        bail!("debootstrap failed: {last:?} {}", String::from_utf8_lossy(&output.stderr));
    }
    fs::rename(&unfinished, &root)?;
    Ok(root)
}
