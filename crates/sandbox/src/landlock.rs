//! Landlock: restricts the files that a process can reach, and its signals and sockets.
//!
//! Each version of the kernel's interface has more rights than the one before; a ruleset handles
//! all rights of the running kernel, and so denies everything that no rule allows. Linux 6.1 has
//! version 2, 6.12 version 6, 6.18 version 7. The system calls are used directly: they are three.

use std::{
    io,
    os::fd::{AsRawFd, FromRawFd, OwnedFd},
    path::Path,
};

use burgeon_block::{Error, Result};
use rustix::fs::{FileType, Mode, OFlags};

/// The access allowed at a path and below it.
#[derive(Clone, Copy, Debug)]
pub(crate) enum AccessRights {
    /// Reading files, listing folders.
    Read,
    /// The same, and writing, making and removing files, folders and sockets.
    Write,
    /// Reading, writing and controlling devices.
    Device,
}

// Constants of `linux/landlock.h`.
const WRITE_FILE: u64 = 1 << 1;
const READ_FILE: u64 = 1 << 2;
const READ_DIR: u64 = 1 << 3;
const REMOVE_DIR: u64 = 1 << 4;
const REMOVE_FILE: u64 = 1 << 5;
const MAKE_DIR: u64 = 1 << 7;
const MAKE_REG: u64 = 1 << 8;
const MAKE_SOCK: u64 = 1 << 9;
/// Renaming from one folder to another; since version 2.
const REFER: u64 = 1 << 13;
/// Since version 3.
const TRUNCATE: u64 = 1 << 14;
/// Since version 5.
const IOCTL_DEV: u64 = 1 << 15;
/// All rights of version 1: the lowest thirteen.
const FIRST_RIGHTS: u64 = (1 << 13) - 1;
/// The rights that a rule on a file, not a folder, may give.
const FILE_RIGHTS: u64 = WRITE_FILE | READ_FILE | TRUNCATE | IOCTL_DEV;
const BIND_TCP: u64 = 1;
const CONNECT_TCP: u64 = 2;
/// Scopes: abstract sockets of other processes, and signals to them.
const SCOPES: u64 = 3;
const VERSION_FLAG: libc::c_ulong = 1;
const RULE_PATH_BENEATH: libc::c_ulong = 1;

#[repr(C)]
struct RulesetAttributes {
    files: u64,
    network: u64,
    scopes: u64,
}

#[repr(C, packed)]
struct PathBeneath {
    allowed: u64,
    parent: i32,
}

/// Rules that are not in force yet.
pub(crate) struct Ruleset {
    file: OwnedFd,
    handled: u64,
}

impl Ruleset {
    /// Denies everything that this kernel can deny, access to files only if `files`; `None` on a
    /// kernel that can deny nothing of it.
    pub(crate) fn new(network: bool, files: bool) -> Result<Option<Self>> {
        let version = version();
        // Rights other than to files begin with version 4.
        if version < if files { 1 } else { 4 } {
            return Ok(None);
        }
        let since = |first: i32, rights: u64| if version >= first { rights } else { 0 };
        let handled = match files {
            true => FIRST_RIGHTS | since(2, REFER) | since(3, TRUNCATE) | since(5, IOCTL_DEV),
            false => 0,
        };
        let attributes = RulesetAttributes {
            files: handled,
            network: since(4, if network { BIND_TCP } else { BIND_TCP | CONNECT_TCP }),
            scopes: since(6, SCOPES),
        };
        // SAFETY: the kernel reads the structure, whose size is given; fields that it does not know
        // are zero, as it demands.
        let made = unsafe {
            libc::syscall(
                libc::SYS_landlock_create_ruleset,
                &attributes,
                size_of::<RulesetAttributes>(),
                0,
            )
        };
        let file = descriptor(made).map_err(|e| Error::io("cannot make a Landlock ruleset", e))?;
        Ok(Some(Self { file, handled }))
    }

    /// Allows `access` at and below `path`, following symlinks. `NotFound` if there is nothing.
    pub(crate) fn allow(&self, path: &Path, access: AccessRights) -> Result<()> {
        let failed = |e| Error::io(format!("cannot allow {} in a sandbox", path.display()), e);
        let parent = rustix::fs::open(path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())
            .map_err(|e| failed(e.into()))?;
        let stat = rustix::fs::fstat(&parent).map_err(|e| failed(e.into()))?;
        let mut allowed = self.handled
            & match access {
                AccessRights::Read => READ_FILE | READ_DIR,
                AccessRights::Write => {
                    READ_FILE
                        | READ_DIR
                        | WRITE_FILE
                        | TRUNCATE
                        | REMOVE_DIR
                        | REMOVE_FILE
                        | MAKE_DIR
                        | MAKE_REG
                        | MAKE_SOCK
                        | REFER
                }
                AccessRights::Device => READ_FILE | READ_DIR | WRITE_FILE | IOCTL_DEV,
            };
        if FileType::from_raw_mode(stat.st_mode) != FileType::Directory {
            allowed &= FILE_RIGHTS;
        }
        let rule = PathBeneath { allowed, parent: parent.as_raw_fd() };
        // SAFETY: the kernel reads the structure, which fits this kind of rule; both descriptors
        // are open.
        let added = unsafe {
            libc::syscall(
                libc::SYS_landlock_add_rule,
                self.file.as_raw_fd(),
                RULE_PATH_BENEATH,
                &rule,
                0,
            )
        };
        if added == 0 { Ok(()) } else { Err(failed(io::Error::last_os_error())) }
    }

    /// Enforces the rules for this thread, and those that it starts later.
    pub(crate) fn enter(self) -> Result<()> {
        // SAFETY: the call takes an open descriptor and flags.
        let entered =
            unsafe { libc::syscall(libc::SYS_landlock_restrict_self, self.file.as_raw_fd(), 0) };
        if entered == 0 {
            return Ok(());
        }
        Err(Error::io("cannot put Landlock rules in force", io::Error::last_os_error()))
    }
}

/// The version of this kernel's interface; 0 or less if it has none, or if Landlock is disabled.
fn version() -> i32 {
    // SAFETY: with this flag the kernel takes no structure and returns a number.
    unsafe {
        libc::syscall(
            libc::SYS_landlock_create_ruleset,
            std::ptr::null::<RulesetAttributes>(),
            0,
            VERSION_FLAG,
        ) as i32
    }
}

fn descriptor(returned: libc::c_long) -> io::Result<OwnedFd> {
    if returned < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just returned this descriptor, and nothing else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(returned as i32) })
}
