//! A FUSE file system that is one regular file and lies at no path.
//!
//! ```text
//!   /dev/fuse ◄── fsopen("fuse"), fd=…, rootmode=100444 ── fsmount ──► a detached mount
//!       │                                                                   │ /proc/self/fd/N
//!    Server                                                          LoopDevice opens the file
//! ```
//!
//! The loop's descriptor of the file keeps the file system alive when the mount's is closed; when
//! the loop lets go, the file system goes and the server's reads end. So nothing stale can be left
//! in any namespace, whichever process dies.

use std::{
    fs::{File, OpenOptions},
    io,
    os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
};

use burgeon_block::{Error, ErrorKind, Result};
use rustix::{
    fs::{AtFlags, Mode, OFlags, StatxFlags, open, openat, statx},
    io::Errno,
    mount::{
        FsMountFlags, FsOpenFlags, MountAttrFlags, fsconfig_create, fsconfig_set_flag,
        fsconfig_set_string, fsmount, fsopen,
    },
};

use crate::{
    fuse::{self, Features},
    sys::failed,
};

/// The two ends of one FUSE file system: the descriptor that a server answers on, and the
/// detached mount that holds the file.
pub struct Connection {
    device: OwnedFd,
    mount: OwnedFd,
    rings: bool,
    resends: bool,
    writable: bool,
}

impl Connection {
    /// Makes the file system and answers the kernel's first question, so that any server can go
    /// on from here. `/proc` shows `name` as the mount's source.
    ///
    /// Errors name the missing part: `/dev/fuse`, FUSE in the kernel, or CAP_SYS_ADMIN.
    pub fn new(name: &str) -> Result<Self> {
        Self::open(name, Features::default())
    }

    /// As [`Connection::new`], with requests over io_uring where the kernel offers that;
    /// [`Connection::has_rings`] says whether it did.
    pub fn with_rings(name: &str) -> Result<Self> {
        Self::open(name, Features { rings: true, writes: false })
    }

    /// As [`Connection::new`], for a file that is written to, with [`serve_writable`].
    ///
    /// [`serve_writable`]: crate::serve_writable
    pub fn writable(name: &str) -> Result<Self> {
        Self::open(name, Features { rings: false, writes: true })
    }

    /// As [`Connection::writable`], with requests over io_uring where the kernel offers that.
    pub fn writable_with_rings(name: &str) -> Result<Self> {
        Self::open(name, Features { rings: true, writes: true })
    }

    fn open(name: &str, features: Features) -> Result<Self> {
        let device = open("/dev/fuse", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())
            .map_err(|errno| cannot_open(errno.into()))?;
        let context = fsopen("fuse", FsOpenFlags::FSOPEN_CLOEXEC)
            .map_err(|e| failed("cannot make a FUSE file system", e))?;
        let set = |key, value: &str| {
            fsconfig_set_string(&context, key, value)
                .map_err(|e| failed(format!("FUSE refuses the option {key}={value}"), e))
        };
        set("source", name)?;
        set("fd", &device.as_raw_fd().to_string())?;
        set("rootmode", &format!("{:o}", fuse::FILE_MODE))?;
        set("user_id", "0")?;
        set("group_id", "0")?;
        // The process that sets up the loop may run with another group than 0.
        fsconfig_set_flag(&context, "allow_other")
            .map_err(|e| failed("FUSE refuses the option allow_other", e))?;
        fsconfig_create(&context).map_err(|e| failed("cannot make a FUSE file system", e))?;
        let attributes = MountAttrFlags::MOUNT_ATTR_NOSUID
            | MountAttrFlags::MOUNT_ATTR_NODEV
            | MountAttrFlags::MOUNT_ATTR_NOEXEC;
        let mount = fsmount(&context, FsMountFlags::FSMOUNT_CLOEXEC, attributes)
            .map_err(|e| failed("cannot mount a FUSE file system", e))?;
        let (rings, resends) = greet(&device, features)?;
        Ok(Self { device, mount, rings, resends, writable: features.writes })
    }

    /// True if requests come over io_uring: then it must be served with
    /// [`ServeOptions::rings`](crate::ServeOptions::rings).
    pub fn has_rings(&self) -> bool {
        self.rings
    }

    /// True if the kernel sends the unanswered requests of a dead server again, with the payloads
    /// of their writes.
    pub fn resends(&self) -> bool {
        self.resends
    }

    /// The descriptor to serve on. The supervisor keeps one as long as the mount may live: with
    /// the last one, the kernel fails every request.
    pub fn device(&self) -> BorrowedFd<'_> {
        self.device.as_fd()
    }

    /// The detached mount, for [`Connection::open_file_of`] in another process.
    pub fn mount(&self) -> BorrowedFd<'_> {
        self.mount.as_fd()
    }

    /// As [`Connection::open_file_of`]; for writing, too, if the connection is writable.
    pub fn open_file(&self) -> Result<File> {
        open_file(self.mount.as_fd(), self.writable)
    }

    /// Opens the file for a loop device; from then on the file keeps the file system alive.
    ///
    /// Waits for the server, so it must be running, in another thread or process. The wait cannot
    /// be interrupted once the server has read the request, and does not end while a process holds
    /// [`Connection::device`]. So the process that calls this must not be the one that holds it.
    pub fn open_file_of(mount: impl AsFd) -> Result<File> {
        open_file(mount.as_fd(), false)
    }

    /// As [`Connection::open_file_of`], for a connection that is writable.
    pub fn open_writable_file_of(mount: impl AsFd) -> Result<File> {
        open_file(mount.as_fd(), true)
    }

    /// The kernel's number of this connection, for [`Connection::abort`].
    pub fn number(&self) -> Result<u32> {
        // DONT_SYNC: asks the kernel only, so it works while no server runs.
        let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
        let status = statx(&self.mount, "", flags, StatxFlags::TYPE)
            .map_err(|e| failed("cannot ask for the number of a FUSE connection", e))?;
        Ok(status.stx_dev_minor)
    }

    /// Ends a connection whose server does not answer: every request on it fails at once. The
    /// only way out for processes that wait uninterruptibly.
    pub fn abort(number: u32) -> Result<()> {
        let what = format!("cannot abort the FUSE connection {number}");
        let abort = || -> Result<(), Errno> {
            let context = fsopen("fusectl", FsOpenFlags::FSOPEN_CLOEXEC)?;
            fsconfig_create(&context)?;
            let control =
                fsmount(&context, FsMountFlags::FSMOUNT_CLOEXEC, MountAttrFlags::empty())?;
            let path = format!("{number}/abort");
            let file = openat(&control, path, OFlags::WRONLY | OFlags::CLOEXEC, Mode::empty())?;
            rustix::io::write(&file, b"1")?;
            Ok(())
        };
        abort().map_err(|e| failed(what, e))
    }

    /// Closes the mount and keeps the serving end: the file system now lives exactly as long as
    /// the files opened on it.
    pub fn into_device(self) -> OwnedFd {
        self.device
    }
}

fn open_file(mount: BorrowedFd<'_>, writable: bool) -> Result<File> {
    let what = "cannot open the FUSE file; is its server running?";
    let file = OpenOptions::new()
        .read(true)
        .write(writable)
        .open(format!("/proc/self/fd/{}", mount.as_raw_fd()))
        .map_err(|e| failed(what, e))?;
    // On 6.12 a loop on a FUSE file has size 0 unless the file's size was asked for before.
    let len = file.metadata().map_err(|e| failed(what, e))?.len();
    if len == 0 {
        return Err(Error::new(ErrorKind::Invalid, "the FUSE file is empty: nothing to mount"));
    }
    Ok(file)
}

fn cannot_open(cause: io::Error) -> Error {
    let what = match cause.raw_os_error() {
        Some(libc::ENOENT | libc::ENXIO | libc::ENODEV) => {
            "cannot open /dev/fuse: load the module (modprobe fuse), or give the container the \
             device 10:229"
        }
        _ => "cannot open /dev/fuse",
    };
    failed(what, cause)
}

/// Answers INIT, and says whether requests come over io_uring, and whether they are sent again. It
/// is there as soon as the file system is made, so this does not wait.
fn greet(device: &OwnedFd, features: Features) -> Result<(bool, bool)> {
    let mut request = [0; fuse::READ_BUFFER_MIN];
    let what = "cannot agree with the kernel on the FUSE protocol";
    let len = rustix::io::retry_on_intr(|| rustix::io::read(device, &mut request))
        .map_err(|e| failed(what, e))?;
    match fuse::answer_init(&request[..len], features) {
        fuse::Init::Reply { bytes, rings, resends } => {
            rustix::io::write(device, &bytes).map_err(|e| failed(what, e))?;
            Ok((rings, resends))
        }
        fuse::Init::Unusable => Err(Error::new(
            ErrorKind::UnsupportedFormat,
            format!("{what}: it does not offer parallel direct reads; Linux 6.1 or later does"),
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::cannot_open;

    #[test]
    fn a_missing_device_has_a_way_out() {
        let error = cannot_open(std::io::Error::from_raw_os_error(libc::ENOENT));
        assert!(error.to_string().contains("modprobe fuse"), "{error}");
    }
}
