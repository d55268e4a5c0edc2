//! The tree of a container: its root, and the file systems of the kernel in it.
//!
//! Invariant: `fill` runs after `enter`, when the process has no tree but the container's. So a
//! symlink of the image leads nowhere else.

use std::{
    ffi::CString,
    fs::{self, File},
    io,
    os::fd::OwnedFd,
    path::Path,
};

use burgeon_block::{Error, Result};
use rustix::{
    fs::{CWD, FileType, Mode, OFlags, makedev, mknodat, open},
    io::Errno,
    mount::{
        MountFlags, MoveMountFlags, OpenTreeFlags, UnmountFlags, mount, mount_bind,
        mount_bind_recursive, mount_remount, move_mount, open_tree, unmount,
    },
    process::{chdir, pivot_root},
};

use crate::{
    defaults::{FILE_SYSTEMS, FileSystem, MASKED, NETWORK_FILES, READ_ONLY},
    spec::{ContainerOptions, Network},
};

/// Devices of each container: name, major and minor number.
const DEVICES: [(&str, u32, u32); 6] = [
    ("null", 1, 3),
    ("zero", 1, 5),
    ("full", 1, 7),
    ("random", 1, 8),
    ("urandom", 1, 9),
    ("tty", 5, 0),
];

const LINKS: [(&str, &str); 5] = [
    ("fd", "/proc/self/fd"),
    ("stdin", "/proc/self/fd/0"),
    ("stdout", "/proc/self/fd/1"),
    ("stderr", "/proc/self/fd/2"),
    ("ptmx", "pts/ptmx"),
];

/// Makes the mount at `root` the root of this process's mount namespace, which has no other tree
/// then. Files of the host that a container in its network needs come along.
pub(crate) fn enter(root: &Path, options: &ContainerOptions) -> Result<()> {
    let failed = |errno: Errno| Error::io("cannot enter the container's root", errno.into());
    let files = match options.network {
        Network::Host => NETWORK_FILES.iter().filter_map(copy_of_mount).collect(),
        Network::None => Vec::new(),
    };
    chdir(root).map_err(failed)?;
    // The old root lies over the new one then, and is taken off.
    pivot_root(".", ".").map_err(failed)?;
    unmount(".", UnmountFlags::DETACH).map_err(failed)?;
    chdir("/").map_err(failed)?;
    for (path, file) in files {
        place(path, &file)?;
    }
    Ok(())
}

/// A detached, read-only copy of the mount of a file of the host, if there is one.
fn copy_of_mount(path: &&'static str) -> Option<(&'static str, OwnedFd)> {
    let flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
    Some((path, open_tree(CWD, *path, flags).ok()?))
}

/// Mounts `file` at `path`. An image whose root is read-only, and without the file, has none.
fn place(path: &'static str, file: &OwnedFd) -> Result<()> {
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let _ = fs::create_dir_all("/etc");
    let made = open(path, flags | OFlags::NOFOLLOW, Mode::from_bits_truncate(0o644));
    match (made, Path::new(path).symlink_metadata()) {
        (_, Ok(metadata)) if metadata.is_file() => {}
        // A symlink or a folder of the image stays as it is.
        _ => return Ok(()),
    }
    let failed =
        |errno: Errno| Error::io(format!("cannot mount {path} in the container"), errno.into());
    move_mount(file, "", CWD, path, MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH).map_err(failed)?;
    let flags = MountFlags::BIND | MountFlags::RDONLY | MountFlags::NOSUID | MountFlags::NODEV;
    mount_remount(path, flags, c"").map_err(failed)
}

/// Mounts the file systems of the kernel, and the volumes; hides paths; then makes the root
/// read-only if that is wanted.
pub(crate) fn fill(volumes: &[String], read_only: bool) -> Result<()> {
    for it in &FILE_SYSTEMS {
        match mount_one(it) {
            // Without control groups of the second version there is nothing to see.
            Err(_) if it.kind == "cgroup2" => {}
            mounted => mounted?,
        }
        if it.target == "/dev" {
            make_devices()?;
        }
    }
    for path in volumes {
        let options = &["nosuid", "nodev", "mode=755"];
        let failed = |errno: Errno| {
            let what = format!("cannot mount the volume {:?} in the container", path);
            Error::io(what, errno.into())
        };
        mount_at(path, "tmpfs", "tmpfs", options).map_err(failed)?;
    }
    MASKED.iter().try_for_each(|path| hide(path))?;
    READ_ONLY.iter().try_for_each(|path| protect(path))?;
    if read_only {
        let flags = MountFlags::BIND | MountFlags::RDONLY | MountFlags::NOSUID | MountFlags::NODEV;
        mount_remount("/", flags, c"").map_err(|errno| {
            Error::io("cannot make the container's root read-only", errno.into())
        })?;
    }
    Ok(())
}

fn mount_one(it: &FileSystem) -> Result<()> {
    mount_at(it.target, it.kind, it.source, it.options).map_err(|errno| {
        Error::io(format!("cannot mount {} in the container", it.target), errno.into())
    })
}

fn mount_at(path: &str, kind: &str, source: &str, options: &[&str]) -> rustix::io::Result<()> {
    let (mut flags, mut data) = (MountFlags::empty(), Vec::new());
    for option in options {
        match *option {
            "nosuid" => flags |= MountFlags::NOSUID,
            "noexec" => flags |= MountFlags::NOEXEC,
            "nodev" => flags |= MountFlags::NODEV,
            "ro" => flags |= MountFlags::RDONLY,
            "relatime" => flags |= MountFlags::RELATIME,
            "strictatime" => flags |= MountFlags::STRICTATIME,
            other => data.push(other),
        }
    }
    // A read-only root without the folder makes the mount fail, with a better error.
    let _ = fs::create_dir_all(path);
    let data = CString::new(data.join(",")).map_err(|_| Errno::INVAL)?;
    mount(source, path, kind, flags, &*data)
}

fn make_devices() -> Result<()> {
    let failed = |name: &str, error: io::Error| {
        Error::io(format!("cannot make /dev/{name} in the container"), error)
    };
    for (name, major, minor) in DEVICES {
        let mode = Mode::from_bits_truncate(0o666);
        let path = format!("/dev/{name}");
        mknodat(CWD, path, FileType::CharacterDevice, mode, makedev(major, minor))
            .map_err(|errno| failed(name, errno.into()))?;
    }
    for (name, target) in LINKS {
        std::os::unix::fs::symlink(target, format!("/dev/{name}"))
            .map_err(|error| failed(name, error))?;
    }
    Ok(())
}

/// Hides a file below `/dev/null`, and a folder below an empty one.
fn hide(path: &str) -> Result<()> {
    let hidden = match fs::metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Ok(metadata) if metadata.is_dir() => {
            mount("tmpfs", path, "tmpfs", MountFlags::RDONLY, Some(c"size=0"))
        }
        _ => mount_bind("/dev/null", path),
    };
    hidden.map_err(|errno| Error::io(format!("cannot hide {path} of the container"), errno.into()))
}

fn protect(path: &str) -> Result<()> {
    if File::open(path).is_err_and(|error| error.kind() == io::ErrorKind::NotFound) {
        return Ok(());
    }
    let flags = MountFlags::BIND
        | MountFlags::RDONLY
        | MountFlags::NOSUID
        | MountFlags::NODEV
        | MountFlags::NOEXEC;
    let protected = mount_bind_recursive(path, path).and_then(|()| mount_remount(path, flags, c""));
    protected
        .map_err(|errno| Error::io(format!("cannot protect {path} of the container"), errno.into()))
}
