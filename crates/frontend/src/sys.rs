//! Helpers of several modules: ioctls, and errors that name a missing privilege.

use std::{
    ffi::{c_int, c_ulong},
    io,
    os::fd::{AsFd, AsRawFd},
};

use burgeon_block::Error;
use rustix::thread::{CapabilitySet, capabilities};

/// An ioctl whose argument is a plain number (often a descriptor, or nothing: 0).
pub(crate) fn ioctl_number(fd: impl AsFd, request: c_ulong, argument: c_ulong) -> io::Result<u32> {
    // SAFETY: the callers use only requests whose argument is a number, so the kernel touches
    // none of our memory.
    let result = unsafe { libc::ioctl(fd.as_fd().as_raw_fd(), request as _, argument) };
    check(result)
}

/// An ioctl whose argument points at a `T`.
///
/// # Safety
/// `request` must read and write at most a `T`, and leave it valid.
pub(crate) unsafe fn ioctl_struct<T>(
    fd: impl AsFd,
    request: c_ulong,
    argument: &mut T,
) -> io::Result<u32> {
    // SAFETY: the pointer is valid for a `T`, and the caller promises the kernel keeps to that.
    let result = unsafe { libc::ioctl(fd.as_fd().as_raw_fd(), request as _, argument as *mut T) };
    check(result)
}

fn check(result: c_int) -> io::Result<u32> {
    u32::try_from(result).map_err(|_| io::Error::last_os_error())
}

/// The error for `what`; where a privilege is missing, it names that and the way out.
pub(crate) fn failed(what: impl Into<String>, cause: impl Into<io::Error>) -> Error {
    let (what, cause) = (what.into(), cause.into());
    match privilege_hint(cause.raw_os_error(), holds_sys_admin()) {
        Some(hint) => Error::io(format!("{what} ({hint})"), cause),
        None => Error::io(what, cause),
    }
}

fn holds_sys_admin() -> bool {
    capabilities(None).is_ok_and(|sets| sets.effective.contains(CapabilitySet::SYS_ADMIN))
}

fn privilege_hint(errno: Option<i32>, holds_sys_admin: bool) -> Option<&'static str> {
    match (errno, holds_sys_admin) {
        (Some(libc::EPERM | libc::EACCES), false) => {
            Some("the capability CAP_SYS_ADMIN is missing: run it as root, or grant it")
        }
        (Some(libc::EPERM | libc::EACCES), true) => Some(
            "CAP_SYS_ADMIN is there, so a sandbox forbids it: look at the container's device, \
             seccomp and LSM rules",
        ),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::privilege_hint;

    #[test]
    fn a_missing_privilege_is_named() {
        assert!(privilege_hint(Some(libc::EPERM), false).unwrap().contains("CAP_SYS_ADMIN"));
        assert!(privilege_hint(Some(libc::EACCES), true).unwrap().contains("sandbox"));
        assert_eq!(privilege_hint(Some(libc::EBUSY), false), None);
    }
}
