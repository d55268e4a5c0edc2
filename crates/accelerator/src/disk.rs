//! Devices and files of this machine, opened so that nobody else opens them.

use std::{
    fs::{self, File, OpenOptions},
    io::{self, Seek, SeekFrom},
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::fs::{FileExt, FileTypeExt, MetadataExt, OpenOptionsExt},
    },
    path::{Path, PathBuf},
};

use burgeon_accelerate::SlowDevice;
use burgeon_block::{ByteRange, Erase, Error, ErrorKind, LocalFile, Result, read_or_zeros};
use rustix::{
    fs::{FallocateFlags, FlockOperation, OFlags, fallocate, flock, ioctl_blksszget},
    io::Errno,
};

/// Unit of requests to a file, in bytes.
const FILE_BLOCK: u32 = 512;

/// A block device with direct I/O, or a regular file.
pub struct Disk {
    file: File,
    path: PathBuf,
    size: u64,
    logical_block: u32,
}

impl Disk {
    /// Opens `path` for this process and those that inherit it alone. `Unavailable` if it is
    /// mounted, or in use by others; `Invalid` if it cannot be written to, or is neither file nor
    /// block device.
    pub fn open(path: &Path) -> Result<Self> {
        let what = format!("cannot open {}", path.display());
        let metadata = fs::metadata(path).map_err(|e| Error::io(&what, e))?;
        let is_block = metadata.file_type().is_block_device();
        if !is_block && !metadata.is_file() {
            let what = format!("{} is neither a block device nor a file", path.display());
            return Err(Error::new(ErrorKind::Invalid, what));
        }
        let flags = if is_block { OFlags::EXCL | OFlags::DIRECT } else { OFlags::empty() };
        let mut options = OpenOptions::new();
        options.read(true).write(true).custom_flags(flags.bits() as i32);
        let file = options.open(path).map_err(|error| match Errno::from_io_error(&error) {
            Some(Errno::BUSY) => in_use(path),
            Some(Errno::ROFS | Errno::ACCESS | Errno::PERM) => read_only(path),
            _ => Error::io(&what, error),
        })?;
        if is_block && is_read_only(metadata.rdev()) {
            return Err(read_only(path));
        }
        if !is_block {
            match flock(&file, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => {}
                Err(Errno::WOULDBLOCK) => return Err(in_use(path)),
                Err(errno) => return Err(Error::io(what, errno.into())),
            }
            // Its last user may have removed it meanwhile.
            let same = |now: fs::Metadata, own: fs::Metadata| {
                (now.dev(), now.ino()) == (own.dev(), own.ino())
            };
            let own = file.metadata().map_err(|e| Error::io(&what, e))?;
            if !fs::metadata(path).is_ok_and(|now| same(now, own)) {
                let what = format!("{} was removed while it was opened", path.display());
                return Err(Error::new(ErrorKind::NotFound, what));
            }
        }
        Self::adopt(file, path)
    }

    /// A file that [`Self::open`] has opened, in this process or in one that passed it on.
    pub fn adopt(file: File, path: &Path) -> Result<Self> {
        let what = format!("cannot read the size of {}", path.display());
        let size = (&file).seek(SeekFrom::End(0)).map_err(|e| Error::io(&what, e))?;
        let is_block =
            file.metadata().map_err(|e| Error::io(&what, e))?.file_type().is_block_device();
        let logical_block = match is_block {
            true => ioctl_blksszget(&file).map_err(|e| Error::io(&what, e.into()))?,
            false => FILE_BLOCK,
        };
        let size = size - size % u64::from(logical_block);
        if size == 0 {
            let what = format!("{} is empty", path.display());
            return Err(Error::new(ErrorKind::Invalid, what));
        }
        Ok(Self { file, path: path.to_owned(), size, logical_block })
    }

    /// Unit of requests in bytes.
    pub fn logical_block(&self) -> u32 {
        self.logical_block
    }

    /// Its path, as it was given.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Its place, by which it is known again: of a loop device that of its file, because its own is
    /// another file's later.
    pub(crate) fn origin(&self) -> PathBuf {
        let known = fs::canonicalize(&self.path).unwrap_or_else(|_| self.path.clone());
        let Some((major, minor)) = self.numbers() else { return known };
        file_below(&format!("{major}:{minor}")).unwrap_or(known)
    }

    /// Major and minor number of a block device.
    pub(crate) fn numbers(&self) -> Option<(u32, u32)> {
        let device = self.device()?;
        Some((rustix::fs::major(device), rustix::fs::minor(device)))
    }

    /// The number of a block device.
    fn device(&self) -> Option<u64> {
        let metadata = self.file.metadata().ok()?;
        metadata.file_type().is_block_device().then(|| metadata.rdev())
    }

    /// Its size in bytes.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Makes a file of `size` bytes of it, which are allocated. `Invalid` for a device, and for one
    /// that is larger.
    pub fn extend(&mut self, size: u64) -> Result<()> {
        let path = self.path.display();
        if self.numbers().is_some() {
            let what = format!("{path} is a device, whose size is its own: leave --size out");
            return Err(Error::new(ErrorKind::Invalid, what));
        }
        let failed = |e| Error::io(format!("cannot make {path} larger"), e);
        let now = self.file.metadata().map_err(failed)?.len();
        if size < now {
            let what = format!("{path} has {now} bytes, and does not shrink to {size}");
            return Err(Error::new(ErrorKind::Invalid, what));
        }
        let extended = match fallocate(&self.file, FallocateFlags::empty(), 0, size) {
            Err(Errno::OPNOTSUPP) => self.file.set_len(size),
            done => done.map_err(Into::into),
        };
        // A part of it would be of no use.
        extended.inspect_err(|_| drop(self.file.set_len(now))).map_err(failed)?;
        self.size = size - size % u64::from(self.logical_block);
        Ok(())
    }

    /// A descriptor to pass on.
    pub fn descriptor(&self) -> Result<OwnedFd> {
        let what = || format!("cannot copy the descriptor of {}", self.path.display());
        self.file.as_fd().try_clone_to_owned().map_err(|e| Error::io(what(), e))
    }

    fn failed(&self, verb: &str, error: io::Error) -> Error {
        Error::io(format!("cannot {verb} {}", self.path.display()), error)
    }
}

fn in_use(path: &Path) -> Error {
    let what = format!(
        "{} is in use: unmount it, or detach the cache, LVM, RAID or loop device that has it",
        path.display()
    );
    Error::new(ErrorKind::Unavailable, what)
}

fn read_only(path: &Path) -> Error {
    Error::new(ErrorKind::Invalid, format!("{} is read-only", path.display()))
}

fn is_read_only(device: u64) -> bool {
    let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
    let ro = fs::read_to_string(format!("/sys/dev/block/{major}:{minor}/ro"));
    ro.is_ok_and(|ro| ro.trim() == "1")
}

/// The serial number of a block device, as its driver tells it.
fn serial_of(device: u64) -> Option<String> {
    let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
    serial_in(&PathBuf::from(format!("/sys/dev/block/{major}:{minor}")))
}

/// The file below the loop device with these numbers, and its offset in that.
pub(crate) fn file_below(numbers: &str) -> Option<PathBuf> {
    let read = |what: &str| {
        let text = fs::read_to_string(format!("/sys/dev/block/{numbers}/loop/{what}")).ok()?;
        Some(text.trim_end_matches('\n').to_owned())
    };
    let file = read("backing_file")?;
    Some(match read("offset").as_deref() {
        None | Some("0") => file.into(),
        Some(offset) => format!("{file}, from byte {offset}").into(),
    })
}

/// Stands between the serial number of a disk and the number of a partition.
pub(crate) const PARTITION: &str = ", partition ";

/// That of the device whose folder in sysfs this is; a partition has that of its disk, and its
/// number.
fn serial_in(folder: &Path) -> Option<String> {
    let read = |path: PathBuf| {
        let text = fs::read_to_string(path).ok()?;
        let text: String = text.split_whitespace().collect::<Vec<_>>().join(" ");
        (!text.is_empty()).then_some(text)
    };
    let partition = read(folder.join("partition"));
    let disk = match partition {
        Some(_) => fs::canonicalize(folder).ok()?.parent()?.to_owned(),
        None => folder.to_owned(),
    };
    let places = ["wwid", "device/wwid", "serial", "device/serial", "dm/uuid"];
    let serial = places.iter().find_map(|place| read(disk.join(place)))?;
    Some(partition.map_or(serial.clone(), |number| format!("{serial}{PARTITION}{number}")))
}

impl AsFd for Disk {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

impl LocalFile for Disk {
    fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<()> {
        read_or_zeros(&self.file, offset, buf).map_err(|e| self.failed("read", e))
    }

    fn write_at(&self, offset: u64, buf: &[u8]) -> Result<()> {
        self.file.write_all_at(buf, offset).map_err(|e| self.failed("write", e))
    }

    fn sync(&self) -> Result<()> {
        self.file.sync_data().map_err(|e| self.failed("flush", e))
    }
}

impl SlowDevice for Disk {
    fn size(&self) -> u64 {
        self.size
    }

    fn serial(&self) -> Option<String> {
        self.device().and_then(serial_of)
    }

    fn erase(&self, range: ByteRange, how: Erase) -> Result<()> {
        let flags = match how {
            // A hole reads as zeros, which a discard may.
            Erase::Discard | Erase::Zeroes { unmap: true } => {
                FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE
            }
            Erase::Zeroes { unmap: false } => {
                FallocateFlags::ZERO_RANGE | FallocateFlags::KEEP_SIZE
            }
        };
        fallocate(&self.file, flags, range.start(), range.len()).map_err(|errno| match errno {
            Errno::OPNOTSUPP | Errno::NODEV | Errno::NOSYS => {
                let what = format!("{} cannot erase", self.path.display());
                Error::new(ErrorKind::UnsupportedFormat, what)
            }
            errno => self.failed("erase a part of", errno.into()),
        })
    }
}

#[cfg(test)]
mod tests {
    use burgeon_accelerate::SlowDevice;
    use burgeon_block::{ByteRange, Erase, ErrorKind, LocalFile};

    use super::{Disk, serial_in};

    #[test]
    fn a_partition_has_the_serial_number_of_its_disk() {
        let folder = tempfile::tempdir().unwrap();
        let disk = folder.path().join("sda");
        std::fs::create_dir_all(disk.join("device")).unwrap();
        std::fs::create_dir_all(disk.join("sda2")).unwrap();
        std::fs::write(disk.join("sda2/partition"), "2\n").unwrap();
        assert_eq!(serial_in(&disk), None);
        std::fs::write(disk.join("device/wwid"), " t10.ATA   DISK  77 \n").unwrap();
        assert_eq!(serial_in(&disk).unwrap(), "t10.ATA DISK 77");
        assert_eq!(serial_in(&disk.join("sda2")).unwrap(), "t10.ATA DISK 77, partition 2");
    }

    #[test]
    fn a_file_has_one_user_and_is_erased() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("disk");
        std::fs::write(&path, vec![7; 8192 + 100]).unwrap();
        let mut disk = Disk::open(&path).unwrap();
        assert_eq!(disk.size(), 8192);
        assert_eq!(Disk::open(&path).map(drop).unwrap_err().kind(), ErrorKind::Unavailable);
        disk.erase(ByteRange::at(4096, 4096).unwrap(), Erase::Zeroes { unmap: true }).unwrap();
        let mut bytes = [1; 8192];
        disk.read_at(0, &mut bytes).unwrap();
        assert!(bytes[..4096] == [7; 4096] && bytes[4096..] == [0; 4096]);
        let error = disk.extend(4096).unwrap_err().to_string();
        assert!(error.contains("does not shrink"), "{error}");
        disk.extend(20_480).unwrap();
        assert_eq!(disk.size(), 20_480);
        drop(disk);
        assert_eq!(Disk::open(&path).unwrap().size(), 20_480);
        assert_eq!(Disk::open(folder.path()).map(drop).unwrap_err().kind(), ErrorKind::Invalid);
    }
}
