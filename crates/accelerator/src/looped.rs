//! The process that attaches a loop device to a FUSE file: it may wait for the server, which the
//! supervisor must not.

use std::{
    ffi::OsString,
    io::{copy, sink, stdin, stdout},
    os::fd::{FromRawFd, OwnedFd},
    process::ExitCode,
};

use burgeon_block::{Error, ErrorKind, Result};
use burgeon_frontend::{Connection, LoopDevice, LoopOptions};
use serde_json::json;

use crate::control::{ControlAnswer, send};

/// The main function of the helper: attaches a loop device to the FUSE file of the mount
/// `arguments[0]`, prints its path, and holds it until its input ends.
pub fn loop_process(arguments: &[OsString]) -> ExitCode {
    let number = |at: usize| arguments.get(at)?.to_str()?.parse::<i32>().ok();
    let attach = || -> Result<LoopDevice> {
        let wrong = || {
            Error::new(
                ErrorKind::Invalid,
                "the helper that makes the loop device got wrong arguments",
            )
        };
        let (mount, block) = (number(0).ok_or_else(wrong)?, number(2).ok_or_else(wrong)?);
        let name = arguments.get(1).map(|name| name.to_string_lossy()).ok_or_else(wrong)?;
        // SAFETY: the supervisor has left this number open for this process, and nothing else here
        // uses it.
        let mount = unsafe { OwnedFd::from_raw_fd(mount) };
        let file = Connection::open_writable_file_of(&mount)?;
        let name = format!("burgeon/{name}");
        let options = LoopOptions { name: &name, read_only: false, discard: true };
        LoopDevice::attach_with_blocks(&file, options, block as u32)
    };
    let attached = attach();
    let document = attached.as_ref().map(|device| json!(device.path()));
    let document = document.map_err(|e| Error::new(e.kind(), e.to_string()));
    if send(&mut stdout(), &ControlAnswer::from(document)).is_err() {
        return ExitCode::FAILURE;
    }
    let _ = copy(&mut stdin(), &mut sink());
    if attached.is_ok() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
