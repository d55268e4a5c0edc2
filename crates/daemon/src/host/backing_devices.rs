//! The backing devices of a path: from its file system down through loop devices and stacked block
//! devices.
//!
//! ```text
//!   path ─► its file system ─► btrfs: every device   ─► loop: the path of its backing file
//!                              a block device           dm, md: the devices below
//!                              overlay: its layers      (and again, DEPTH_MAX times)
//! ```
//!
//! A state directory or a store on a Burgeon mount would wait for itself. A Burgeon mount is
//! recognised by its metadata device: a loop on `…/mounts/<id>/seed`.

use std::{
    fs::{self, File},
    os::{
        fd::{AsFd, AsRawFd},
        unix::fs::{MetadataExt, OpenOptionsExt},
    },
    path::{Path, PathBuf},
};

use burgeon_block::{Error, ErrorKind, Result};
use burgeon_frontend::LoopDevice;
use burgeon_source::beneath::link_to;

use crate::{
    host::mountinfo,
    id::{Fsid, MountId},
};

/// The deepest nesting that is followed. Deeper nesting is refused, too.
const DEPTH_MAX: usize = 16;

/// Refuses `path` if it lies on a Burgeon mount; `what` is its role in the error message.
pub fn refuse_burgeon(path: &Path, what: &str) -> Result<()> {
    refuse(path, path, what)
}

/// Refuses the open `file`, called `shown` in the error message, if it lies on a Burgeon mount.
pub fn refuse_burgeon_file(file: &File, shown: &Path, what: &str) -> Result<()> {
    refuse(&link_to(file), shown, what)
}

/// Refuses the state directory `path` if it lies on a device of `burgeon accelerate`, of any cache:
/// the cache's processes write there.
pub fn refuse_accelerated(path: &Path) -> Result<()> {
    let names = LoopDevice::names()?;
    let numbers: Vec<String> = names
        .iter()
        .filter(|(_, name)| name.starts_with("burgeon/"))
        .map(|(number, _)| format!("loop{number}"))
        .collect();
    let is_accelerated = |device: &Path| {
        let name = fs::canonicalize(device).ok();
        let name = name.as_deref().and_then(Path::file_name).and_then(|name| name.to_str());
        name.is_some_and(|name| numbers.iter().any(|number| number == name))
    };
    // It may have yet to be made.
    let there = path.ancestors().find(|path| path.exists()).unwrap_or(Path::new("/"));
    if !numbers.is_empty() && reaches(there, 0, &is_accelerated)? {
        let what = format!(
            "the state directory {} lies on an accelerated device, which would wait for itself: \
             take a place on another device (--state-dir)",
            path.display()
        );
        return Err(Error::new(ErrorKind::Invalid, what));
    }
    Ok(())
}

fn refuse(path: &Path, shown: &Path, what: &str) -> Result<()> {
    if reaches(path, 0, &is_seed)? {
        return Err(Error::new(
            ErrorKind::Invalid,
            format!(
                "{what} {} lies on a Burgeon mount, which would have to wait for itself: take a \
                 place on another file system",
                shown.display()
            ),
        ));
    }
    Ok(())
}

/// True if a block device, such as `/dev/loop3`, belongs to a Burgeon mount.
pub(crate) fn is_burgeon_device(device: &Path) -> bool {
    let Some(name) = device.file_name().and_then(|name| name.to_str()) else { return false };
    list("/sys/fs/btrfs").iter().any(|fs| {
        let members = list(fs.join("devices"));
        members.iter().any(|member| member.file_name().is_some_and(|m| m == name))
            && members.iter().any(|member| is_seed(member))
    })
}

/// True if `path` lies on a Burgeon mount, of any state directory.
pub fn is_burgeon_mount(path: &Path) -> bool {
    reaches(path, 0, &is_seed).unwrap_or(false)
}

/// The fsid of the btrfs at `path`, or `None` if it is another file system.
pub fn btrfs_fsid(path: &Path) -> Result<Option<Fsid>> {
    // At once: it may be a FIFO.
    let file = fs::File::options().read(true).custom_flags(libc::O_NONBLOCK).open(path);
    let file = file.map_err(|e| Error::io(format!("cannot open {}", path.display()), e))?;
    Ok(fsid_of(&file))
}

/// The fsid of the btrfs of an open file.
pub(crate) fn fsid_of(file: impl AsFd) -> Option<Fsid> {
    /// `struct btrfs_ioctl_fs_info_args`.
    #[repr(C)]
    struct FsInfo {
        max_id: u64,
        num_devices: u64,
        fsid: [u8; 16],
        rest: [u8; 992],
    }
    /// `_IOR(0x94, 31, struct btrfs_ioctl_fs_info_args)`
    const BTRFS_IOC_FS_INFO: libc::c_ulong = 0x8400_941f;
    const { assert!(size_of::<FsInfo>() == 1024) };
    let mut info = FsInfo { max_id: 0, num_devices: 0, fsid: [0; 16], rest: [0; 992] };
    // On other file systems the number may mean another request: ask only btrfs.
    let found = rustix::fs::fstatfs(&file).ok()?;
    if found.f_type as u64 != libc::BTRFS_SUPER_MAGIC as u64 {
        return None;
    }
    // SAFETY: the kernel writes 1,024 bytes, the size of the structure, any of which are valid.
    let result =
        unsafe { libc::ioctl(file.as_fd().as_raw_fd(), BTRFS_IOC_FS_INFO as _, &mut info) };
    (result == 0).then_some(Fsid(info.fsid))
}

/// True if `path` lies on a device, with this sysfs folder, that `is_it` accepts.
fn reaches(path: &Path, depth: usize, is_it: &dyn Fn(&Path) -> bool) -> Result<bool> {
    if depth > DEPTH_MAX {
        return Err(Error::new(
            ErrorKind::Invalid,
            format!("{} lies on more than {DEPTH_MAX} layers of devices", path.display()),
        ));
    }
    let failed = |e| Error::io(format!("cannot look at {}", path.display()), e);
    if let Some(fsid) = btrfs_fsid_if_readable(path) {
        let devices = list(format!("/sys/fs/btrfs/{fsid}/devices"));
        return any(&devices, |device| device_reaches(device, depth + 1, is_it));
    }
    let device = fs::metadata(path).map_err(failed)?.dev();
    let (major, minor) = (libc::major(device), libc::minor(device));
    if major != 0 {
        let device = format!("/sys/dev/block/{major}:{minor}");
        return device_reaches(Path::new(&device), depth + 1, is_it);
    }
    any(&overlay_layers((major, minor)), |layer| match layer.exists() {
        true => reaches(layer, depth + 1, is_it),
        false => Ok(false),
    })
}

/// True if the block device with the sysfs folder `device` leads to one that `is_it` accepts.
fn device_reaches(device: &Path, depth: usize, is_it: &dyn Fn(&Path) -> bool) -> Result<bool> {
    if is_it(device) {
        return Ok(true);
    }
    if let Some(file) = backing_file(device).filter(|file| file.exists()) {
        // A loop on the root of a detached FUSE mount shows `/`, which is misleading: the loop on
        // the seed is examined, too.
        if file != Path::new("/") {
            return reaches(&file, depth + 1, is_it);
        }
    }
    let whole_disk = device
        .join("partition")
        .exists()
        .then(|| fs::canonicalize(device).ok().and_then(|path| path.parent().map(Path::to_owned)));
    if let Some(disk) = whole_disk.flatten() {
        return device_reaches(&disk, depth + 1, is_it);
    }
    any(&list(device.join("slaves")), |below| device_reaches(below, depth + 1, is_it))
}

/// True if a block device is the metadata device of a Burgeon mount.
fn is_seed(device: &Path) -> bool {
    let Some(file) = backing_file(device) else { return false };
    let text = file.to_string_lossy();
    let path = Path::new(text.trim_end_matches(" (deleted)"));
    let mut parts = path.iter().rev().filter_map(|part| part.to_str());
    parts.next() == Some("seed")
        && parts.next().is_some_and(|id| id.parse::<MountId>().is_ok())
        && parts.next() == Some("mounts")
}

/// The backing devices of the mounted btrfs `fsid`, for messages: the files below its loop devices,
/// and its other devices. `None` if it is not mounted.
pub(crate) fn mounted_from(fsid: Fsid) -> Option<String> {
    let devices = list(format!("/sys/fs/btrfs/{fsid}/devices"));
    let names = devices.iter().map(|device| match backing_file(device) {
        Some(file) => file.display().to_string(),
        None => {
            format!("/dev/{}", device.file_name().unwrap_or_default().to_string_lossy())
        }
    });
    let mut names: Vec<_> = names.filter(|name| name != "/").collect();
    names.sort();
    (!devices.is_empty()).then(|| names.join(", "))
}

/// The backing file of a loop device, as sysfs spells it.
pub(crate) fn backing_file(device: &Path) -> Option<PathBuf> {
    let text = fs::read_to_string(device.join("loop/backing_file")).ok()?;
    Some(PathBuf::from(text.trim_end_matches('\n')))
}

/// The loop device on `file`, if there is one.
pub(crate) fn loop_on(file: &Path) -> Option<String> {
    loop_with(|path| path == file, &[file.to_owned()])
}

/// A loop device on a file in `folder`, if there is one.
pub(crate) fn loop_below(folder: &Path) -> Option<String> {
    loop_with(|path| path.starts_with(folder), &list(folder))
}

/// A loop device on one of `files`, or on a file whose path satisfies `test`.
///
/// A path can be spelt differently in another mount namespace, most of all in one that has ended:
/// the kernel then shows it from the root of its file system. A file's identity is the same
/// everywhere, but is unknown once the file is deleted, or to a user who may not open the device.
fn loop_with(test: impl Fn(&Path) -> bool, files: &[PathBuf]) -> Option<String> {
    let identities: Vec<_> = files
        .iter()
        .filter_map(|file| fs::metadata(file).ok())
        .map(|metadata| (metadata.dev(), metadata.ino()))
        .collect();
    let on_it = LoopDevice::files().unwrap_or_default();
    let on_it = on_it.iter().find(|(_, file)| identities.contains(file));
    if let Some((number, _)) = on_it {
        return Some(format!("/dev/loop{number}"));
    }
    let devices = list("/sys/block");
    let on_it = devices.iter().find(|device| backing_file(device).is_some_and(|path| test(&path)));
    on_it.and_then(|device| device.file_name()?.to_str().map(|name| format!("/dev/{name}")))
}

/// The layers of the overlay with this `st_dev`, as far as they are visible here.
fn overlay_layers(device: (u32, u32)) -> Vec<PathBuf> {
    let mounts = mountinfo::read(Path::new("/proc/self/mountinfo")).unwrap_or_default();
    let overlay = mounts.iter().find(|mount| mount.device == device && mount.fs_type == "overlay");
    let options = overlay.map_or("", |mount| mount.super_options.as_str());
    let mut layers = Vec::new();
    for option in options.split(',') {
        if let Some((_, paths)) = option
            .split_once('=')
            .filter(|(key, _)| matches!(*key, "lowerdir" | "lowerdir+" | "upperdir"))
        {
            layers.extend(paths.split(':').filter(|path| !path.is_empty()).map(PathBuf::from));
        }
    }
    layers
}

fn btrfs_fsid_if_readable(path: &Path) -> Option<Fsid> {
    btrfs_fsid(path).ok().flatten()
}

fn list(folder: impl AsRef<Path>) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    entries.map(|entry| entry.path()).collect()
}

fn any(paths: &[PathBuf], mut test: impl FnMut(&Path) -> Result<bool>) -> Result<bool> {
    for path in paths {
        if test(path)? {
            return Ok(true);
        }
    }
    Ok(false)
}

#[cfg(test)]
mod tests {
    use std::{fs, path::Path};

    use burgeon_frontend::{LoopDevice, LoopOptions};

    use super::{is_seed, loop_below, loop_on, reaches, refuse_burgeon};

    #[test]
    fn a_folder_of_the_host_is_fine_and_a_missing_one_is_named() {
        let temp = tempfile::tempdir().unwrap();
        refuse_burgeon(temp.path(), "the state directory").unwrap();
        let error = refuse_burgeon(Path::new("/nowhere/at/all"), "the store").unwrap_err();
        assert!(error.to_string().contains("/nowhere/at/all"));
        assert!(reaches(temp.path(), 17, &is_seed).is_err());
    }

    #[test]
    fn a_loop_is_known_by_its_file_whatever_the_path() {
        let temp = tempfile::tempdir().unwrap();
        let (file, link) = (temp.path().join("sprout"), temp.path().join("elsewhere"));
        fs::write(&file, vec![0; 1 << 20]).unwrap();
        let options = LoopOptions { name: "burgeon test", read_only: true, discard: false };
        let device = LoopDevice::attach(fs::File::open(&file).unwrap(), options).unwrap();
        let expected = Some(device.path().to_str().unwrap().to_owned());
        // The path in sysfs differs from each of these.
        fs::create_dir(&link).unwrap();
        fs::hard_link(&file, link.join("sprout")).unwrap();
        fs::rename(&file, temp.path().join("moved")).unwrap();
        fs::hard_link(temp.path().join("moved"), &file).unwrap();
        assert_eq!(loop_on(&link.join("sprout")), expected);
        assert_eq!(loop_below(&link), expected);
        fs::write(temp.path().join("another"), vec![0; 1 << 20]).unwrap();
        assert_eq!(loop_on(&temp.path().join("another")), None);
        device.detach(std::time::Duration::from_secs(120)).unwrap();
    }

    #[test]
    fn a_metadata_device_is_known_by_its_file() {
        let device = tempfile::tempdir().unwrap();
        fs::create_dir(device.path().join("loop")).unwrap();
        let cases = [
            ("/var/lib/burgeon/mounts/0a1b2c3d/seed\n", true),
            ("/var/lib/burgeon/mounts/0a1b2c3d/seed (deleted)\n", true),
            ("/var/lib/burgeon/mounts/0a1b2c3d/sprout\n", false),
            ("/home/me/seed\n", false),
            ("/\n", false),
        ];
        for (text, expected) in cases {
            fs::write(device.path().join("loop/backing_file"), text).unwrap();
            assert_eq!(is_seed(device.path()), expected, "{text}");
        }
    }
}
