//! Loop devices by ioctl: direct I/O, 4 KiB blocks.
//!
//! Every one detaches itself when its last user is gone (autoclear): this handle, or the file
//! system mounted on it. So a plain `umount`, or the death of the process that set it up, leaves
//! nothing.
//!
//! A device that is written to gets a number of its own (`loop_range.rs`), because the kernel keeps
//! with the number whether it has discard.

use std::{
    ffi::c_ulong,
    fs::{self, File, OpenOptions},
    io,
    os::{
        fd::{AsFd, AsRawFd},
        unix::fs::OpenOptionsExt,
    },
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

use burgeon_block::{BLOCK_SIZE, Error, ErrorKind, Result};
use rustix::fs::{FileType, Mode, makedev, mknodat};

use crate::{
    loop_range::{self, open_control},
    sys::{failed, ioctl_number, ioctl_struct},
};

const LOOP_CLR_FD: c_ulong = 0x4C01;
const LOOP_GET_STATUS64: c_ulong = 0x4C05;
const LOOP_CHANGE_FD: c_ulong = 0x4C06;
const LOOP_SET_CAPACITY: c_ulong = 0x4C07;
const LOOP_CONFIGURE: c_ulong = 0x4C0A;
const LOOP_CTL_GET_FREE: c_ulong = 0x4C82;
const LO_FLAGS_READ_ONLY: u32 = 1;
const LO_FLAGS_AUTOCLEAR: u32 = 4;
const LO_FLAGS_DIRECT_IO: u32 = 16;
const LOOP_MAJOR: u32 = 7;

/// Another process may take the device that we were told is free; so often we ask again.
const ATTEMPTS_MAX: u32 = 64;

/// `struct loop_info64` of `linux/loop.h`.
#[repr(C)]
struct LoopInfo {
    device: u64,
    inode: u64,
    rdevice: u64,
    offset: u64,
    size_limit: u64,
    number: u32,
    encrypt_type: u32,
    encrypt_key_size: u32,
    flags: u32,
    file_name: [u8; 64],
    crypt_name: [u8; 64],
    encrypt_key: [u8; 32],
    init: [u64; 2],
}

impl LoopInfo {
    const EMPTY: Self = Self {
        device: 0,
        inode: 0,
        rdevice: 0,
        offset: 0,
        size_limit: 0,
        number: 0,
        encrypt_type: 0,
        encrypt_key_size: 0,
        flags: 0,
        file_name: [0; 64],
        crypt_name: [0; 64],
        encrypt_key: [0; 32],
        init: [0; 2],
    };
}

/// `struct loop_config` of `linux/loop.h`.
#[repr(C)]
struct LoopConfig {
    fd: u32,
    block_size: u32,
    info: LoopInfo,
    reserved: [u64; 8],
}

/// Options of a loop device.
#[derive(Clone, Copy, Debug)]
pub struct LoopOptions<'a> {
    /// Name that `losetup` and [`LoopDevice::names`] show; at most 63 bytes are kept.
    pub name: &'a str,
    /// Refuse writes. Needed when the file was opened read-only.
    pub read_only: bool,
    /// Pass discards on to the file. Off for reserved space: each discard would give some back. The
    /// mount option `nodiscard` is not enough, because `fstrim` trims mounts all the same.
    pub discard: bool,
}

/// A loop device. Dropping the handle leaves it to its other users, if any; with the last one it
/// detaches itself.
pub struct LoopDevice {
    device: File,
    number: u32,
    path: PathBuf,
}

impl LoopDevice {
    /// Attaches a free loop device to `file`: direct I/O, blocks of 4 KiB.
    ///
    /// `LocalIo` when none is free or the privilege is missing; the text says which.
    pub fn attach(file: impl AsFd, options: LoopOptions<'_>) -> Result<Self> {
        Self::attach_with_blocks(file, options, BLOCK_SIZE as u32)
    }

    /// As [`Self::attach`], with blocks of `block_size` bytes: a power of two from 512 to 4096.
    pub fn attach_with_blocks(
        file: impl AsFd,
        options: LoopOptions<'_>,
        block_size: u32,
    ) -> Result<Self> {
        let control = open_control().map_err(no_loop)?;
        let of_its_own = !options.read_only;
        for _ in 0..ATTEMPTS_MAX {
            let number = match of_its_own {
                true => loop_range::add(&control),
                false => ioctl_number(&control, LOOP_CTL_GET_FREE, 0),
            };
            let number = number.map_err(|e| none_free(Some(e)))?;
            let (device, path) = match open_node(number, options.read_only) {
                Ok(opened) => opened,
                // Another daemon took the unused number for a leftover, and removed it.
                Err(_) if of_its_own && !loop_range::exists(number) => continue,
                Err(error) => return Err(error),
            };
            match configure(&device, file.as_fd(), options, block_size) {
                Ok(()) => {
                    let this = Self { device, number, path };
                    if of_its_own && !options.discard {
                        this.turn_off_discard()?;
                    }
                    return Ok(this);
                }
                // Another process was faster.
                Err(error) if matches!(error.raw_os_error(), Some(libc::EBUSY | libc::ENXIO)) => {}
                Err(error) => {
                    return Err(failed(format!("cannot set up {}", path.display()), error));
                }
            }
        }
        Err(none_free(None))
    }

    /// The device's path, such as `/dev/loop7`.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The device's number: 7 for `/dev/loop7`.
    pub fn number(&self) -> u32 {
        self.number
    }

    /// True if reads and writes go around the page cache. The kernel quietly does without when
    /// the file's system cannot do it.
    pub fn is_direct(&self) -> Result<bool> {
        Ok(self.info()?.flags & LO_FLAGS_DIRECT_IO != 0)
    }

    /// Takes over the file's new, greater size.
    pub fn grow(&self) -> Result<()> {
        ioctl_number(&self.device, LOOP_SET_CAPACITY, 0)
            .map_err(|e| failed(format!("cannot grow {}", self.path.display()), e))?;
        Ok(())
    }

    /// Swaps the file under a read-only device that is in use, for one of the same size and
    /// content.
    pub fn change_file(&self, file: impl AsFd) -> Result<()> {
        ioctl_number(&self.device, LOOP_CHANGE_FD, file.as_fd().as_raw_fd() as c_ulong)
            .map_err(|e| failed(format!("cannot swap the file of {}", self.path.display()), e))?;
        Ok(())
    }

    /// Detaches and waits up to `limit` until the file is let go. `Invalid` if the device is still
    /// used then; it goes with its last user.
    pub fn detach(self, limit: Duration) -> Result<()> {
        let what = format!("cannot detach {}", self.path.display());
        match ioctl_number(&self.device, LOOP_CLR_FD, 0) {
            Err(error) if error.raw_os_error() != Some(libc::ENXIO) => Err(failed(what, error)),
            _ => {
                let Self { device, number, path } = self;
                drop(device);
                Self::wait_until_free(number, limit).map_err(|_| {
                    let what =
                        format!("{} is still in use: unmount its file system", path.display());
                    Error::new(ErrorKind::Invalid, what)
                })
            }
        }
    }

    /// `Unavailable` if the device at `path` is mounted, or in use by another device.
    pub fn is_unused(path: &Path) -> Result<()> {
        let exclusive = OpenOptions::new().read(true).custom_flags(libc::O_EXCL).open(path);
        exclusive.map(drop).map_err(|error| match error.raw_os_error() {
            Some(libc::EBUSY) => {
                let what = format!("{} is in use: unmount its file system first", path.display());
                Error::new(ErrorKind::Unavailable, what)
            }
            _ => failed(format!("cannot open {}", path.display()), error),
        })
    }

    /// Waits up to `limit` until the loop device `number` has no file. Detaching is asynchronous.
    pub fn wait_until_free(number: u32, limit: Duration) -> Result<()> {
        let bound = PathBuf::from(format!("/sys/block/loop{number}/loop"));
        let deadline = Instant::now() + limit;
        while bound.exists() {
            if Instant::now() >= deadline {
                let what = format!("/dev/loop{number} is still in use");
                return Err(Error::new(ErrorKind::Invalid, what));
            }
            thread::sleep(Duration::from_millis(1));
        }
        Ok(())
    }

    /// Numbers and names ([`LoopOptions::name`]) of all loop devices in use, ours and others'.
    pub fn names() -> Result<Vec<(u32, String)>> {
        let name = |info: &LoopInfo| {
            let name = info.file_name.split(|byte| *byte == 0).next().unwrap_or_default();
            String::from_utf8_lossy(name).into_owned()
        };
        Ok(in_use()?.iter().map(|(number, info)| (*number, name(info))).collect())
    }

    /// Numbers of all loop devices in use with the `st_dev` and `st_ino` of the file below: what
    /// does not depend on where, or whether, this process sees that file.
    pub fn files() -> Result<Vec<(u32, (u64, u64))>> {
        Ok(in_use()?.iter().map(|(number, info)| (*number, (info.device, info.inode))).collect())
    }

    /// Major and minor number of the file system of the file below `device`, an open loop device.
    /// They are constant while it is open, unless its file is exchanged.
    pub fn backing_device(device: &File) -> Result<(u32, u32)> {
        let info = status(device).map_err(|e| failed("cannot ask a loop device", e))?;
        Ok((libc::major(info.device), libc::minor(info.device)))
    }

    fn info(&self) -> Result<LoopInfo> {
        status(&self.device).map_err(|e| failed(format!("cannot ask {}", self.path.display()), e))
    }

    fn turn_off_discard(&self) -> Result<()> {
        let knob = format!("/sys/block/loop{}/queue/discard_max_bytes", self.number);
        fs::write(&knob, "0").map_err(|e| failed(format!("cannot turn off discard at {knob}"), e))
    }
}

impl AsFd for LoopDevice {
    fn as_fd(&self) -> std::os::fd::BorrowedFd<'_> {
        self.device.as_fd()
    }
}

/// All loop devices in use, ours and others', by number.
fn in_use() -> Result<Vec<(u32, LoopInfo)>> {
    let blocks = fs::read_dir("/sys/block").map_err(|e| failed("cannot list /sys/block", e))?;
    let number = |entry: &fs::DirEntry| -> Option<u32> {
        let number = entry.file_name().to_str()?.strip_prefix("loop")?.parse().ok()?;
        entry.path().join("loop").exists().then_some(number)
    };
    let numbers = blocks.flatten().filter_map(|entry| number(&entry));
    // One that is gone meanwhile, or not ours to open, is none of ours.
    let info = |number| status(&File::open(format!("/dev/loop{number}")).ok()?).ok();
    let mut all: Vec<_> = numbers.filter_map(|n| Some((n, info(n)?))).collect();
    all.sort_unstable_by_key(|(number, _)| *number);
    Ok(all)
}

fn status(device: &File) -> io::Result<LoopInfo> {
    let mut info = LoopInfo::EMPTY;
    // SAFETY: LOOP_GET_STATUS64 writes one `loop_info64`; every bit pattern is valid for it.
    unsafe { ioctl_struct(device, LOOP_GET_STATUS64, &mut info)? };
    Ok(info)
}

fn configure(
    device: &File,
    file: impl AsFd,
    options: LoopOptions<'_>,
    block_size: u32,
) -> io::Result<()> {
    let mut info = LoopInfo::EMPTY;
    info.flags = LO_FLAGS_AUTOCLEAR | LO_FLAGS_DIRECT_IO;
    if options.read_only {
        info.flags |= LO_FLAGS_READ_ONLY;
    }
    let name = options.name.as_bytes();
    let len = name.len().min(info.file_name.len() - 1);
    info.file_name[..len].copy_from_slice(&name[..len]);
    let mut config =
        LoopConfig { fd: file.as_fd().as_raw_fd() as u32, block_size, info, reserved: [0; 8] };
    // SAFETY: LOOP_CONFIGURE reads one `loop_config` and writes nothing.
    unsafe { ioctl_struct(device, LOOP_CONFIGURE, &mut config)? };
    Ok(())
}

/// Opens `/dev/loopN`; makes it where `/dev` is a plain directory, as in many containers.
fn open_node(number: u32, read_only: bool) -> Result<(File, PathBuf)> {
    let path = PathBuf::from(format!("/dev/loop{number}"));
    let open = || {
        OpenOptions::new().read(true).write(!read_only).custom_flags(libc::O_CLOEXEC).open(&path)
    };
    let opened = match open() {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            let device = makedev(LOOP_MAJOR, number);
            let made = mknodat(
                rustix::fs::CWD,
                &path,
                FileType::BlockDevice,
                Mode::RUSR | Mode::WUSR,
                device,
            );
            made.map_err(io::Error::from).and_then(|()| open())
        }
        opened => opened,
    };
    let file = opened.map_err(|e| failed(format!("cannot open {}", path.display()), e))?;
    Ok((file, path))
}

fn no_loop(cause: io::Error) -> Error {
    let what = match cause.raw_os_error() {
        Some(libc::ENOENT | libc::ENXIO | libc::ENODEV) => {
            "cannot open /dev/loop-control: load the module (modprobe loop), or give the container \
             the device 10:237"
        }
        _ => "cannot open /dev/loop-control",
    };
    failed(what, cause)
}

fn none_free(cause: Option<io::Error>) -> Error {
    let what = "no loop device is free: detach one that is not needed (losetup -a lists them, \
                losetup -d detaches), or load the module with a greater max_loop";
    match cause {
        Some(cause) => failed(what, cause),
        None => Error::new(ErrorKind::LocalIo, what),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn structures_have_the_kernels_sizes() {
        assert_eq!(size_of::<LoopInfo>(), 232);
        assert_eq!(size_of::<LoopConfig>(), 304);
    }

    #[test]
    fn errors_have_a_way_out() {
        let missing = no_loop(io::Error::from_raw_os_error(libc::ENOENT)).to_string();
        assert!(missing.contains("modprobe loop"), "{missing}");
        let full = none_free(Some(io::Error::from_raw_os_error(libc::ENOSPC))).to_string();
        assert!(
            full.starts_with("no loop device is free") && full.contains("losetup -a"),
            "{full}"
        );
    }
}
