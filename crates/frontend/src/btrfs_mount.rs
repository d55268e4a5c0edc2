//! Mounting btrfs on devices that exist: seeds, sprouts, and how a mount gets into place.
//!
//! ```text
//!   scan(seed 1), scan(seed 2) ──► mount(seed 1, ReadOnly)      a detached, read-only mount
//!                                     ├─ add_device(sprout)     the seed sprouts: a new fsid
//!                                     └─ make_writable
//!   scan(seeds), scan(sprout) ───► mount(sprout, Writable)      later: the same files again
//!   attach(mount, directory)                                    by a process of that namespace
//!   forget(devices)                                             after the last unmount
//! ```
//!
//! btrfs finds the devices of a file system among those it was told of, by fsid and device uuid.
//! So every device is scanned before a mount that needs it: naming one with the mount option
//! `device=` makes 6.1 and 6.12 mount read-only without a word.
//!
//! Mounts are detached: they lie at no path and are gone with their last descriptor, until
//! [`attach`] puts one into the mount namespace of its caller.
//!
//! Invariants (held by `tests/btrfs.rs`): no external program; no mount discards, for that would
//! give reserved space of the sprout back.

use std::{
    ffi::{OsStr, c_ulong},
    fs::{File, OpenOptions},
    io,
    os::{
        fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
        unix::ffi::OsStrExt,
    },
    path::{Path, PathBuf},
};

use burgeon_block::{Error, ErrorKind, Result};
use rustix::{
    fs::{StatVfsMountFlags, fstatvfs},
    io::Errno,
    mount::{
        FsMountFlags, FsOpenFlags, FsPickFlags, MoveMountFlags, fsconfig_create,
        fsconfig_reconfigure, fsconfig_set_flag, fsconfig_set_string, fsmount, fsopen, fspick,
        move_mount,
    },
};

use crate::sys::{failed, ioctl_struct};

pub use rustix::mount::MountAttrFlags;

const SCAN_DEV: c_ulong = 0x5000_9404;
const FORGET_DEV: c_ulong = 0x5000_9405;
const ADD_DEV: c_ulong = 0x5000_940a;
const RESIZE: c_ulong = 0x5000_9403;
const DEV_INFO: c_ulong = 0xd000_941e;
const FS_INFO: c_ulong = 0x8400_941f;

/// Times that devices are scanned for one mount. A damaged device fails as often, and the kernel's
/// log says so each time.
const SCANS_MAX: u32 = 6;

/// `struct btrfs_ioctl_vol_args`.
#[repr(C)]
struct DeviceName {
    fd: i64,
    name: [u8; 4088],
}

/// `struct btrfs_ioctl_fs_info_args`.
#[repr(C)]
struct FsInfo {
    devid_max: u64,
    device_count: u64,
    fsid: [u8; 16],
    rest: [u8; 992],
}

/// `struct btrfs_ioctl_dev_info_args`.
#[repr(C)]
struct DevInfo {
    id: u64,
    uuid: [u8; 16],
    allocated: u64,
    size: u64,
    unused: [u64; 379],
    path: [u8; 1024],
}

/// One device of a mounted file system.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct DeviceInfo {
    /// Its number in the file system: 1 and 2 are the seed's, the sprout has the next.
    pub id: u64,
    /// Its path when it was scanned.
    pub path: PathBuf,
    /// Size in bytes, as the file system knows it.
    pub size: u64,
    /// Bytes of it that chunks take.
    pub allocated: u64,
}

/// The writability of a mount.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum MountAccess {
    /// No writes; the only way to mount a seed alone.
    ReadOnly,
    /// Writes go to the sprout.
    Writable,
}

/// A detached btrfs mount. Unmounted on drop, unless it was attached or something has a file open.
pub struct Btrfs {
    mount: OwnedFd,
}

impl Btrfs {
    /// Mounts a seed of one or two `devices`, read-only, showing the subvolume of id `subvolume`.
    pub fn mount_seed(devices: &[&Path], subvolume: u64) -> Result<Self> {
        let [first, ..] = devices else {
            return Err(Error::new(ErrorKind::Invalid, "a seed needs a device to mount"));
        };
        Self::scan_and_mount(devices, first, subvolume, MountAccess::ReadOnly)
    }

    /// Mounts the file system of `device`, which is one of `devices`. Between the scan and the
    /// mount, and in the middle of it, anybody can make btrfs forget them: all devices that are not
    /// mounted (`btrfs device scan --forget`), or those of another mount, whose numbers are ours by
    /// now. Then they are scanned again.
    fn scan_and_mount(
        devices: &[&Path],
        device: &Path,
        subvolume: u64,
        access: MountAccess,
    ) -> Result<Self> {
        let mut tries = 0;
        loop {
            devices.iter().try_for_each(|device| scan(device))?;
            tries += 1;
            match Self::try_mount(device, subvolume, access) {
                Err((errno, _)) if may_be_forgotten(errno) && tries < SCANS_MAX => {}
                mounted => return mounted.map_err(|(_, error)| error),
            }
        }
    }

    /// Mounts a seed and makes it writable: writes go to `sprout`, an empty device that is
    /// overwritten.
    pub fn mount_new_sprout(seed: &[&Path], sprout: &Path, subvolume: u64) -> Result<Self> {
        let this = Self::mount_seed(seed, subvolume)?;
        this.add_device(sprout)?;
        this.make_writable()?;
        Ok(this)
    }

    /// Mounts a `sprout` that was made on `seed` before.
    pub fn mount_sprout(
        seed: &[&Path],
        sprout: &Path,
        subvolume: u64,
        access: MountAccess,
    ) -> Result<Self> {
        Self::scan_and_mount(&[seed, &[sprout]].concat(), sprout, subvolume, access)
    }

    /// Mounts the file system that `device` belongs to; all its devices have been scanned.
    ///
    /// `NotFound` if one of them is missing, `LocalIo` with the kernel's own words otherwise.
    pub fn mount(device: &Path, subvolume: u64, access: MountAccess) -> Result<Self> {
        Self::try_mount(device, subvolume, access).map_err(|(_, error)| error)
    }

    fn try_mount(
        device: &Path,
        subvolume: u64,
        access: MountAccess,
    ) -> Result<Self, (Errno, Error)> {
        let what = || format!("cannot mount btrfs from {}", device.display());
        let context = fsopen("btrfs", FsOpenFlags::FSOPEN_CLOEXEC);
        let context = context.map_err(|errno| (errno, no_btrfs(errno)))?;
        let create = || -> Result<OwnedFd, Errno> {
            fsconfig_set_string(&context, "source", device)?;
            fsconfig_set_string(&context, "subvolid", subvolume.to_string())?;
            fsconfig_set_flag(&context, "nodiscard")?;
            if access == MountAccess::ReadOnly {
                fsconfig_set_flag(&context, "ro")?;
            }
            fsconfig_create(&context)?;
            fsmount(&context, FsMountFlags::FSMOUNT_CLOEXEC, MountAttrFlags::empty())
        };
        let mount = create().map_err(|errno| (errno, refused(what(), errno, &context)))?;
        Ok(Self { mount })
    }

    /// Adds an empty writable device to a mounted seed: it sprouts. Still read-only until
    /// [`Btrfs::make_writable`]. The device's earlier content is lost.
    pub fn add_device(&self, device: &Path) -> Result<()> {
        name_ioctl(self.open_root()?, ADD_DEV, device).map_err(|cause| {
            let hint = match cause.raw_os_error() {
                Some(libc::EBUSY) => "; it is mounted or held by something else (lsblk shows it)",
                Some(libc::EINVAL | libc::ENOSPC) => "; it may be too small: 256 MiB are enough",
                _ => "",
            };
            failed(format!("cannot add {} to the seed{hint}", device.display()), cause)
        })
    }

    /// From read-only to writable, without discard.
    pub fn make_writable(&self) -> Result<()> {
        let what = "cannot make the mount writable";
        let flags = FsPickFlags::FSPICK_EMPTY_PATH | FsPickFlags::FSPICK_CLOEXEC;
        let context = fspick(&self.mount, "", flags).map_err(|e| failed(what, e))?;
        let reconfigure = || -> Result<(), Errno> {
            fsconfig_set_flag(&context, "rw")?;
            fsconfig_set_flag(&context, "nodiscard")?;
            fsconfig_reconfigure(&context)
        };
        reconfigure().map_err(|errno| refused(what.into(), errno, &context))
    }

    /// The id of the file system that is mounted. A sprout has another than its seed.
    pub fn fsid(&self) -> Result<[u8; 16]> {
        Ok(fs_info(&self.open_root()?)?.fsid)
    }

    /// True if the whole file system is read-only, and not just a mount of it. One that is mounted
    /// elsewhere stays as it is if it is mounted once more with [`MountAccess::ReadOnly`].
    pub fn is_read_only(&self) -> Result<bool> {
        let stat = fstatvfs(self.open_root()?);
        let stat = stat.map_err(|e| failed("cannot ask btrfs whether it is read-only", e))?;
        Ok(stat.f_flag.contains(StatVfsMountFlags::RDONLY))
    }

    /// The devices of the file system, the missing ones left out.
    pub fn devices(&self) -> Result<Vec<DeviceInfo>> {
        let root = self.open_root()?;
        let mut devices = Vec::new();
        for id in 1..=fs_info(&root)?.devid_max {
            let mut info = DevInfo {
                id,
                uuid: [0; 16],
                allocated: 0,
                size: 0,
                unused: [0; 379],
                path: [0; 1024],
            };
            // SAFETY: BTRFS_IOC_DEV_INFO reads and writes one `btrfs_ioctl_dev_info_args`, 4096
            // bytes; every bit pattern is valid for it.
            match unsafe { ioctl_struct(&root, DEV_INFO, &mut info) } {
                Ok(_) => {}
                Err(error) if error.raw_os_error() == Some(libc::ENODEV) => continue,
                Err(error) => return Err(failed("cannot ask btrfs for its devices", error)),
            }
            let path = info.path.split(|byte| *byte == 0).next().unwrap_or_default();
            let path = PathBuf::from(OsStr::from_bytes(path));
            devices.push(DeviceInfo { id, path, size: info.size, allocated: info.allocated });
        }
        Ok(devices)
    }

    /// Takes over a device's new, greater size, while mounted and writable. To do this to a file
    /// system that is mounted elsewhere, [`Btrfs::mount`] it once more: that is the same one.
    pub fn grow_device(&self, id: u64) -> Result<()> {
        name_ioctl(self.open_root()?, RESIZE, Path::new(&format!("{id}:max")))
            .map_err(|e| failed(format!("cannot grow device {id} of the file system"), e))
    }

    /// Opens the root directory of the mount, wherever it is.
    pub fn open_root(&self) -> Result<File> {
        File::open(format!("/proc/self/fd/{}", self.mount.as_raw_fd()))
            .map_err(|e| failed("cannot open the root of a detached mount", e))
    }

    /// Gives the mount attributes of its own, before anybody can reach it: those of `attributes`,
    /// and no other. The file system and its other mounts keep theirs.
    pub fn set_attributes(&self, attributes: MountAttrFlags) -> Result<()> {
        // The mode of access times is one field of several bits: it is replaced as a whole.
        let request = libc::mount_attr {
            attr_set: attributes.bits().into(),
            attr_clr: MountAttrFlags::MOUNT_ATTR__ATIME.bits().into(),
            propagation: 0,
            userns_fd: 0,
        };
        set_mount_attributes(self.mount.as_fd(), &request)
            .map_err(|e| failed("cannot set the mount's attributes", e))
    }

    /// The mount's descriptor: keep it, or hand it to the caller of [`attach`].
    pub fn into_fd(self) -> OwnedFd {
        self.mount
    }
}

impl AsFd for Btrfs {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.mount.as_fd()
    }
}

/// `mount_setattr` of a mount by its descriptor.
pub fn set_mount_attributes(
    mount: BorrowedFd<'_>,
    attributes: &libc::mount_attr,
) -> io::Result<()> {
    // SAFETY: the kernel reads one `mount_attr` of the size that it is told, and an empty path.
    let result = unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            mount.as_raw_fd(),
            c"".as_ptr(),
            libc::AT_EMPTY_PATH,
            std::ptr::from_ref(attributes),
            size_of_val(attributes),
        )
    };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// True if a mount may have failed because btrfs did not know a device: ENOENT, and EINVAL before
/// Linux 6.12; EIO if it is the one with the trees. Damage has the same errors.
fn may_be_forgotten(errno: Errno) -> bool {
    matches!(errno, Errno::NOENT | Errno::INVAL | Errno::IO)
}

/// Tells btrfs of a device, so that a later mount finds it.
pub fn scan(device: &Path) -> Result<()> {
    control(SCAN_DEV, device)
        .map_err(|e| failed(format!("btrfs does not accept the device {}", device.display()), e))
}

/// Makes btrfs forget a device that is not mounted. It is no error if it never knew it.
pub fn forget(device: &Path) -> Result<()> {
    match control(FORGET_DEV, device) {
        Err(error) if error.raw_os_error() != Some(libc::ENOENT) => {
            Err(failed(format!("btrfs does not forget the device {}", device.display()), error))
        }
        _ => Ok(()),
    }
}

/// Puts a detached mount onto `place`, an open directory, in the caller's mount namespace. A path
/// would be looked up again here, and its owner may have redirected it.
///
/// From then on every copy of the mount's descriptor, in whichever process, keeps `umount` from
/// working (EBUSY): close them all.
pub fn attach(mount: impl AsFd, place: impl AsFd) -> Result<()> {
    let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH | MoveMountFlags::MOVE_MOUNT_T_EMPTY_PATH;
    move_mount(mount, "", place, "", flags).map_err(|errno| {
        let hint = match errno {
            Errno::NOENT => ": the directory was removed meanwhile; make it again (mkdir)",
            Errno::NOTDIR => ": the mount point is not a directory",
            Errno::INVAL => ": the mount was attached before, or comes from a closed namespace",
            _ => "",
        };
        failed(format!("cannot put the mount into place{hint}"), errno)
    })
}

fn control(request: c_ulong, device: &Path) -> io::Result<()> {
    let control = OpenOptions::new().read(true).write(true).open("/dev/btrfs-control")?;
    name_ioctl(control, request, device)
}

fn fs_info(root: &File) -> Result<FsInfo> {
    let mut info = FsInfo { devid_max: 0, device_count: 0, fsid: [0; 16], rest: [0; 992] };
    // SAFETY: BTRFS_IOC_FS_INFO reads and writes one `btrfs_ioctl_fs_info_args`, 1024 bytes; every
    // bit pattern is valid for it.
    unsafe { ioctl_struct(root, FS_INFO, &mut info) }
        .map_err(|e| failed("cannot ask btrfs about its file system", e))?;
    Ok(info)
}

fn name_ioctl(on: impl AsFd, request: c_ulong, device: &Path) -> io::Result<()> {
    let mut argument = DeviceName { fd: 0, name: [0; 4088] };
    let name = device.as_os_str().as_bytes();
    // At least one zero has to follow.
    match argument.name.get_mut(..name.len() + 1) {
        Some(room) => room[..name.len()].copy_from_slice(name),
        None => return Err(Errno::NAMETOOLONG.into()),
    }
    // SAFETY: the requests that this is called with read one `btrfs_ioctl_vol_args`.
    unsafe { ioctl_struct(on, request, &mut argument)? };
    Ok(())
}

fn no_btrfs(errno: Errno) -> Error {
    let what = match errno {
        Errno::NODEV => "this kernel has no btrfs: load the module (modprobe btrfs)",
        _ => "cannot begin to mount btrfs",
    };
    failed(what, errno)
}

/// The error of a mount, with the kernel's message in the context.
fn refused(what: String, errno: Errno, context: &OwnedFd) -> Error {
    let hint = match errno {
        Errno::NOENT => "; one of its devices is missing: its seed has to be attached and scanned",
        Errno::INVAL => {
            "; a device of it is missing or damaged: the kernel's log (dmesg) says more"
        }
        Errno::BUSY => "; a device of it is in use by another mount",
        Errno::EXIST => "; another file system with the same fsid is mounted",
        _ => "",
    };
    let mut words = String::new();
    let mut line = [0; 1024];
    // One message a read; none left is an error, and so is a kernel that keeps none.
    while let Ok(len) = rustix::io::read(context, &mut line) {
        words += &format!("; kernel: {}", String::from_utf8_lossy(&line[..len]).trim());
        if len == 0 || words.len() > 4096 {
            break;
        }
    }
    failed(format!("{what}{hint}{words}"), errno)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn structures_have_the_kernels_sizes() {
        assert_eq!(size_of::<DeviceName>(), 4096);
        assert_eq!(size_of::<FsInfo>(), 1024);
        assert_eq!(size_of::<DevInfo>(), 4096);
    }

    #[test]
    fn names_that_do_not_fit_are_refused() {
        let long = "x".repeat(4088);
        let null = File::open("/dev/null").unwrap();
        let error = name_ioctl(null, SCAN_DEV, Path::new(&long)).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::ENAMETOOLONG));
    }
}
