//! The kernel's side of a device: a FUSE file below a loop device, or a ublk device.
//!
//! | | FUSE + loop | ublk |
//! |---|---|---|
//! | requests of a dead server | are sent again while a process holds `/dev/fuse` (Linux 6.9) | the kernel keeps them |
//! | after the last user | the loop device goes, and the file with it | the supervisor removes the device |
//!
//! A ublk device carries a number that names its cache and its slow device, so that its supervisor
//! knows it again.

use std::{
    fs::File,
    io::{copy, sink, stdin, stdout},
    os::{
        fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
        unix::fs::OpenOptionsExt,
    },
    path::Path,
    process::{Command, ExitCode, Stdio},
};

use burgeon_block::{Digest, Error, ErrorKind, Result};
use burgeon_frontend::{
    Connection,
    ublk::{self, Control, Queues},
};
use serde_json::json;

use crate::{
    control::{ControlAnswer, Transport, send},
    disk::Disk,
    folder::CacheFolder,
    limits::shape_of,
    plan::PlanFront,
};

/// The driver's control device.
const CONTROL: &str = "/dev/ublk-control";
/// The upper half of the numbers of our devices.
const OWNER_MAGIC: u64 = 0x4275_6163 << 32;

/// The kernel's side of a device, as the supervisor has it.
pub(crate) enum Front {
    Fuse { device: OwnedFd, resends: bool },
    Ublk { number: u32 },
}

/// A front that is being made.
pub(crate) struct NewFront {
    pub(crate) front: Front,
    /// Over FUSE: it leads to the file.
    pub(crate) connection: Option<Connection>,
    /// Why it is not the best one.
    pub(crate) note: Option<String>,
}

/// The number of the ublk device of `name` in the cache of `folder`.
pub(crate) fn owner_of(folder: &CacheFolder, name: &str) -> u64 {
    let mut known = folder.path().as_os_str().as_encoded_bytes().to_vec();
    known.push(0);
    known.extend(name.as_bytes());
    let digest = Digest::of(&known).to_string();
    OWNER_MAGIC | u64::from_str_radix(&digest[..8], 16).unwrap_or(0)
}

impl Front {
    /// Makes the front of a slow device, as `transport` wants it.
    pub(crate) fn make(
        transport: Transport,
        folder: &CacheFolder,
        name: &str,
        slow: &Disk,
    ) -> Result<NewFront> {
        if transport != Transport::Fuse {
            load_driver();
            match add(owner_of(folder, name), slow) {
                Ok(front) => return Ok(NewFront { front, connection: None, note: None }),
                Err(error) if transport == Transport::Ublk => return Err(error),
                // A kernel without ublk is common; one that refuses a device is worth a note.
                Err(_) if !Path::new(CONTROL).exists() => {}
                Err(error) => {
                    tracing::warn!(device = name, %error, "cannot use ublk: taking FUSE");
                    let note = format!("the device uses FUSE, not ublk: {error}");
                    return Ok(NewFront { note: Some(note), ..over_fuse(name)? });
                }
            }
        }
        over_fuse(name)
    }

    /// True if the kernel has the requests of a dead server served by the next one, writes among
    /// them.
    pub(crate) fn resends(&self) -> bool {
        match self {
            Self::Fuse { resends, .. } => *resends,
            Self::Ublk { .. } => true,
        }
    }

    /// The name shown to users.
    pub(crate) fn transport(&self) -> Transport {
        match self {
            Self::Fuse { .. } => Transport::Fuse,
            Self::Ublk { .. } => Transport::Ublk,
        }
    }

    /// The descriptor that a server inherits.
    pub(crate) fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        match self {
            Self::Fuse { device, .. } => Some(device.as_fd()),
            Self::Ublk { .. } => None,
        }
    }

    pub(crate) fn plan(&self) -> PlanFront {
        match self {
            Self::Fuse { device, .. } => PlanFront::Fuse { fd: device.as_raw_fd() },
            Self::Ublk { number } => PlanFront::Ublk { number: *number },
        }
    }

    /// Removes a ublk device without users. A FUSE file goes with its last user.
    pub(crate) fn remove(&self) -> Result<()> {
        match self {
            Self::Fuse { .. } => Ok(()),
            Self::Ublk { number } => Control::open()?.remove(*number),
        }
    }
}

fn over_fuse(name: &str) -> Result<NewFront> {
    let connection = Connection::writable(&format!("burgeon/{name}"))?;
    let device = connection.device().try_clone_to_owned();
    let device = device.map_err(|e| Error::io("cannot copy a descriptor", e))?;
    let front = Front::Fuse { device, resends: connection.resends() };
    Ok(NewFront { front, connection: Some(connection), note: None })
}

/// Adds a ublk device in front of `slow`, in place of one that an attachment has left unfinished.
fn add(owner: u64, slow: &Disk) -> Result<Front> {
    let mut control = Control::open()?;
    for number in ublk::numbers() {
        let is_its = |device: ublk::UblkDevice| device.owner == owner;
        if control.device(number)?.is_some_and(is_its) && is_unused(number) {
            control.remove(number)?;
        }
    }
    let number = control.add(&shape_of(slow), owner, Queues::default())?.number;
    Ok(Front::Ublk { number })
}

/// The ublk device `number`, if it is that of `owner` and was started.
pub(crate) fn known_device(number: u32, owner: u64) -> Result<bool> {
    let device = Control::open()?.device(number)?;
    Ok(device.is_some_and(|device| device.owner == owner && device.started))
}

/// True if nothing holds the block device exclusively, as a mounted file system does.
pub(crate) fn is_unused(number: u32) -> bool {
    let opened = File::options()
        .read(true)
        .custom_flags(libc::O_EXCL | libc::O_CLOEXEC)
        .open(ublk::block_path(number));
    opened.map_or_else(|error| error.raw_os_error() != Some(libc::EBUSY), |_| true)
}

/// Loads the driver; it has no alias that would load it when its device is opened.
fn load_driver() {
    if !Path::new(CONTROL).exists() {
        // The device shows if it worked.
        let mut modprobe = Command::new("modprobe");
        modprobe.args(["--quiet", "ublk_drv"]).stdin(Stdio::null());
        let _ = modprobe.output();
    }
}

/// The main function of the process that starts the ublk device `arguments[0]`, which the process
/// `arguments[1]` serves; it may wait for that, which the supervisor must not. Prints its path.
pub fn ublk_process(arguments: &[std::ffi::OsString]) -> ExitCode {
    let number = |at: usize| arguments.get(at)?.to_str()?.parse::<u32>().ok();
    let start = || {
        let wrong = || {
            let what = "the helper that starts a ublk device got wrong arguments";
            Error::new(ErrorKind::Invalid, what)
        };
        let (device, opener) = (number(0).ok_or_else(wrong)?, number(1).ok_or_else(wrong)?);
        Control::open()?.start(device, opener)
    };
    let started: Result<_> = start();
    let is_started = started.is_ok();
    let answer = ControlAnswer::from(started.map(|path| json!(path)));
    if send(&mut stdout(), &answer).is_err() || !is_started {
        return ExitCode::FAILURE;
    }
    let _ = copy(&mut stdin(), &mut sink());
    ExitCode::SUCCESS
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::{OWNER_MAGIC, owner_of};
    use crate::folder::CacheFolder;

    #[test]
    fn each_device_of_each_cache_has_a_number_of_its_own() {
        let folders = ["/a/fast", "/b/fast"].map(|path| CacheFolder::at(Path::new(path)));
        let numbers = ["x", "y"].map(|name| folders.each_ref().map(|at| owner_of(at, name)));
        let mut all = numbers.concat();
        all.sort_unstable();
        all.dedup();
        assert_eq!(all.len(), 4);
        assert!(all.iter().all(|number| number >> 32 == OWNER_MAGIC >> 32));
    }
}
