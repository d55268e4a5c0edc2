//! Another mount namespace: that of a process, or one that a file is bound to.

use std::{fs::File, os::fd::AsFd, path::PathBuf, thread};

use anyhow::Result;
use burgeon_block::{Error, ErrorKind};
use rustix::{
    io::Errno,
    thread::{LinkNameSpaceType, UnshareFlags, move_into_link_name_space, unshare_unsafe},
};

/// A mount namespace.
pub(crate) struct Namespace {
    file: File,
    shown: String,
}

impl Namespace {
    /// Opens the namespace that `text` names as for mount(8): the number of a process, or a path.
    pub(crate) fn open(text: &str) -> Result<Self> {
        let is_process = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
        let path = match is_process {
            true => PathBuf::from(format!("/proc/{text}/ns/mnt")),
            false => PathBuf::from(text),
        };
        let shown = path.display().to_string();
        let file = File::open(&path)
            .map_err(|e| Error::io(format!("cannot open the mount namespace {shown}"), e))?;
        let namespace = Self { file, shown };
        namespace.within(|| ())?;
        Ok(namespace)
    }

    /// Calls `what` in a thread that is in the namespace.
    pub(crate) fn within<T: Send>(&self, what: impl FnOnce() -> T + Send) -> Result<T> {
        let enter = || -> Result<T> {
            // SAFETY: only this thread gets its own current directory, and it ends soon.
            unsafe { unshare_unsafe(UnshareFlags::FS) }.map_err(|e| self.cannot_enter(e))?;
            move_into_link_name_space(self.file.as_fd(), Some(LinkNameSpaceType::Mount))
                .map_err(|e| self.cannot_enter(e))?;
            Ok(what())
        };
        let done = thread::scope(|scope| scope.spawn(enter).join());
        done.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    }

    fn cannot_enter(&self, errno: Errno) -> Error {
        let what = format!("cannot enter the mount namespace {}", self.shown);
        match errno {
            Errno::INVAL => {
                let what = format!(
                    "{what}: it is not a mount namespace; give a process, or a file such as /proc/PID/ns/mnt"
                );
                Error::new(ErrorKind::Invalid, what)
            }
            errno => Error::io(what, errno.into()),
        }
    }
}
