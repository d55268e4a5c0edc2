//! Stops a process that opens a directory, until the test lets it go on: a race with a fixed
//! outcome.

use std::{
    ffi::CString,
    fs::{self, File},
    io::{Read, Write},
    os::{
        fd::{AsRawFd, FromRawFd, OwnedFd},
        unix::ffi::OsStrExt,
    },
    path::{Path, PathBuf},
};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::PATIENCE;

/// Directories that nobody can open to read them until the test says so (fanotify).
pub struct OpensOf(File);

/// A process that waits in `open`. It goes on when this is dropped.
pub struct WaitingOpen<'a> {
    gate: &'a File,
    directory: OwnedFd,
}

impl OpensOf {
    /// From now on every `open` of one of `directories` waits. The test itself must open none.
    pub fn directories(directories: &[PathBuf]) -> Self {
        let flags = libc::FAN_CLASS_CONTENT | libc::FAN_CLOEXEC;
        // SAFETY: makes a descriptor, and touches no memory of ours.
        let gate = unsafe { libc::fanotify_init(flags, (libc::O_RDONLY | libc::O_CLOEXEC) as _) };
        assert!(gate >= 0, "fanotify_init: {}", std::io::Error::last_os_error());
        // SAFETY: the descriptor was made just now and has no other owner.
        let gate = unsafe { File::from_raw_fd(gate) };
        for directory in directories {
            let path = CString::new(directory.as_os_str().as_bytes()).unwrap_or_default();
            let mask = libc::FAN_OPEN_PERM | libc::FAN_ONDIR;
            let (add, here) = (libc::FAN_MARK_ADD, libc::AT_FDCWD);
            // SAFETY: the path ends with a zero and outlives the call.
            let done =
                unsafe { libc::fanotify_mark(gate.as_raw_fd(), add, mask, here, path.as_ptr()) };
            assert_eq!(done, 0, "{directory:?}: {}", std::io::Error::last_os_error());
        }
        Self(gate)
    }

    /// Waits for the next `open`.
    pub fn next(&self) -> WaitingOpen<'_> {
        const LEN: usize = size_of::<libc::fanotify_event_metadata>();
        let mut event = [0; LEN];
        let mut gate = &self.0;
        let patience = Timespec { tv_sec: PATIENCE.as_secs() as i64, tv_nsec: 0 };
        let came = poll(&mut [PollFd::new(gate, PollFlags::IN)], Some(&patience));
        assert_eq!(came, Ok(1), "nobody opens them");
        gate.read_exact(&mut event).unwrap_or_else(|error| panic!("fanotify: {error}"));
        // The descriptor lies behind the lengths and the mask.
        let fd: [u8; 4] = event[16..20].try_into().unwrap_or_default();
        // SAFETY: the kernel has opened the descriptor for us, and nobody else has it.
        let directory = unsafe { OwnedFd::from_raw_fd(i32::from_ne_bytes(fd)) };
        WaitingOpen { gate, directory }
    }
}

impl WaitingOpen<'_> {
    /// The directory that is opened.
    pub fn path(&self) -> PathBuf {
        let link = format!("/proc/self/fd/{}", self.directory.as_raw_fd());
        fs::read_link(Path::new(&link)).unwrap_or_default()
    }
}

impl Drop for WaitingOpen<'_> {
    fn drop(&mut self) {
        let mut answer = [0; 8];
        answer[..4].copy_from_slice(&self.directory.as_raw_fd().to_ne_bytes());
        answer[4..].copy_from_slice(&libc::FAN_ALLOW.to_ne_bytes());
        let mut gate = self.gate;
        // Without an answer the other side goes on when the gate is closed.
        let _ = gate.write_all(&answer);
    }
}
