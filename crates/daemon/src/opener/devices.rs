//! The devices of ublk, which the server names by number: it may open no device itself.

use std::{
    fs::{self, File, OpenOptions},
    io,
    os::{
        fd::AsRawFd,
        unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt},
    },
    path::Path,
};

/// Opens `/dev/ublkcN`, which is a device of the ublk driver and nothing else.
pub(super) fn open_queues(number: u32) -> io::Result<File> {
    open_checked(
        Path::new(&format!("/dev/ublkc{number}")),
        Path::new(&format!("/sys/class/ublk-char/ublkc{number}/dev")),
    )
}

/// Opens the character device `path` for reading and writing, if it is the one that the file
/// `expected` of sysfs describes.
fn open_checked(path: &Path, expected: &Path) -> io::Result<File> {
    let expected = fs::read_to_string(expected)?;
    let flags = libc::O_PATH | libc::O_NOFOLLOW | libc::O_CLOEXEC;
    let found = OpenOptions::new().read(true).custom_flags(flags).open(path)?;
    let metadata = found.metadata()?;
    let (major, minor) = (rustix::fs::major(metadata.rdev()), rustix::fs::minor(metadata.rdev()));
    if !metadata.file_type().is_char_device() || expected.trim() != format!("{major}:{minor}") {
        return Err(io::Error::from_raw_os_error(libc::ENODEV));
    }
    // The compared file, even if the name has got another one.
    let found = format!("/proc/self/fd/{}", found.as_raw_fd());
    OpenOptions::new().read(true).write(true).open(found)
}

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::fs::symlink, path::Path};

    use super::{open_checked, open_queues};

    #[test]
    fn only_the_device_that_the_driver_names_is_opened() {
        let folder = tempfile::tempdir().unwrap();
        let [null, zero, link, file] =
            ["null", "zero", "link", "file"].map(|name| folder.path().join(name));
        fs::write(&null, "1:3\n").unwrap();
        fs::write(&zero, "1:5\n").unwrap();
        fs::write(&file, "").unwrap();
        symlink("/dev/null", &link).unwrap();
        let device = Path::new("/dev/null");
        open_checked(device, &null).unwrap();
        for (path, expected) in [(device, &zero), (&link, &null), (&file, &null)] {
            let refused = open_checked(path, expected).unwrap_err();
            assert_eq!(refused.raw_os_error(), Some(libc::ENODEV), "{path:?} {expected:?}");
        }
        assert!(open_checked(device, &folder.path().join("none")).is_err());
        assert!(open_queues(u32::MAX).is_err());
    }
}
