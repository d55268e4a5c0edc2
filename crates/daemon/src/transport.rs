//! The transport of a mount's lazy data: a ublk device if the kernel has ublk, else a FUSE file and
//! a loop device, over io_uring if requested.
//!
//! | | FUSE file + loop | FUSE over io_uring | ublk |
//! |---|---|---|---|
//! | in-flight requests when the server dies | stay in slots that the supervisor holds | are lost: `EIO`, and a new connection | the kernel issues them again |
//! | while there is no server | `EIO` | `EIO` | readers wait |
//! | after the last umount | everything detaches itself | the same | the device must be removed (`supervisor/watch.rs`) |
//!
//! A ublk device carries the id of its mount, so that its owner can be identified without any file.

use std::{
    fs::File,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    path::{Path, PathBuf},
    process::Command,
};

use burgeon_block::{Error, Result, Shape};
use burgeon_frontend::{
    Connection, btrfs_mount,
    ublk::{self, Control, Queues},
};

use crate::{
    host::system::{self, module_is_there},
    id::MountId,
    ipc::protocol::TransportRequest,
    state::record::Transport,
};

/// The upper half of the owner number of our ublk devices; the lower half is the mount's id.
const OWNER_MAGIC: u64 = 0x4275_7267 << 32;

/// The name of a mount over a plain file, shown to users.
pub(crate) const PLAIN: &str = "file + loop";

/// The requested transport.
#[derive(Clone, Copy)]
pub(crate) struct TransportOptions {
    pub(crate) transport: TransportRequest,
    /// Over FUSE: use io_uring if the kernel allows it.
    pub(crate) fast: bool,
}

/// A transport while its mount is made.
pub(crate) enum Channel {
    Fuse(Connection, Transport),
    Ublk(u32),
    /// All data is in this file: nothing is served.
    Plain(File),
}

impl Channel {
    /// Makes the requested transport for `size` bytes. Also returns a note for the user if it is
    /// not the best one. [`remove_devices`] removes it.
    pub(crate) fn open(
        options: TransportOptions,
        id: MountId,
        size: u64,
    ) -> Result<(Self, Option<String>)> {
        let fuse = || {
            let (connection, transport) = connect(id, options.fast)?;
            let note = options.fast.then(|| fast_note(transport));
            Ok((Self::Fuse(connection, transport), note))
        };
        match options.transport {
            TransportRequest::Fuse => fuse(),
            TransportRequest::Ublk => Ok((Self::Ublk(add(id, size)?), None)),
            TransportRequest::Auto => match add(id, size) {
                Ok(number) => Ok((Self::Ublk(number), None)),
                // A kernel without ublk is common; one that refuses a device is worth a note.
                Err(_) if !Path::new(CONTROL).exists() => fuse(),
                Err(e) => {
                    tracing::warn!(mount = %id, error = %e, "cannot use ublk: taking FUSE");
                    let (channel, note) = fuse()?;
                    let fast = note.map(|note| format!("; {note}")).unwrap_or_default();
                    Ok((channel, Some(format!("the mount uses FUSE, not ublk: {e}{fast}"))))
                }
            },
        }
    }

    pub(crate) fn transport(&self) -> Transport {
        match self {
            Self::Fuse(_, transport) => *transport,
            Self::Ublk(number) => Transport::Ublk { number: *number },
            Self::Plain(_) => Transport::default(),
        }
    }

    /// The descriptor that leads to the lazy data: the detached mount of the FUSE file, or the
    /// plain file.
    pub(crate) fn data(&self) -> Option<BorrowedFd<'_>> {
        match self {
            Self::Fuse(connection, _) => Some(connection.mount()),
            Self::Plain(file) => Some(file.as_fd()),
            Self::Ublk(_) => None,
        }
    }

    /// Aborts a transport whose server does not answer: everything that waits for it fails.
    pub(crate) fn abort(&self) {
        let aborted = match self {
            Self::Fuse(connection, _) => connection.number().and_then(Connection::abort),
            Self::Ublk(number) => Control::open().and_then(|mut control| control.stop(*number)),
            Self::Plain(_) => Ok(()),
        };
        if let Err(e) = aborted {
            tracing::error!(error = %e, "processes that wait for the server may hang");
        }
    }

    /// True if nothing is served.
    pub(crate) fn is_plain(&self) -> bool {
        matches!(self, Self::Plain(_))
    }

    /// The name shown to users.
    pub(crate) fn name(&self) -> &'static str {
        match self {
            Self::Plain(_) => PLAIN,
            _ => self.transport().name(),
        }
    }

    /// The descriptor that the supervisor must keep, if there is one.
    pub(crate) fn kept(&self) -> Result<Option<OwnedFd>> {
        let Self::Fuse(connection, _) = self else { return Ok(None) };
        let kept = connection.device().try_clone_to_owned();
        kept.map(Some).map_err(|e| Error::io("cannot keep the FUSE device", e))
    }
}

/// A connection for the mount `id`: over io_uring, if requested and allowed by the kernel.
pub(crate) fn connect(id: MountId, rings: bool) -> Result<(Connection, Transport)> {
    let name = format!("burgeon:{id}");
    let connection = match rings && system::fuse_rings().is_ok() {
        true => Connection::with_rings(&name)?,
        false => Connection::new(&name)?,
    };
    let transport = match connection.has_rings() {
        true => Transport::Rings { connection: connection.number()? },
        false => Transport::Fuse,
    };
    Ok((connection, transport))
}

/// The note for a user of `--fast`.
fn fast_note(transport: Transport) -> String {
    if transport != Transport::Fuse {
        return "--fast: if the serving process dies, reads of data that is not in memory are EIO \
                until the next one serves; without --fast they wait for it"
            .to_owned();
    }
    let reason = system::fuse_rings().err().unwrap_or("the kernel did not offer it".to_owned());
    format!("--fast is not possible, so this is a mount without it: {reason}")
}

const CONTROL: &str = "/dev/ublk-control";

fn add(id: MountId, size: u64) -> Result<u32> {
    Ok(Control::open()?
        .add(&Shape::read_only(size), OWNER_MAGIC | id.number(), Queues::default())?
        .number)
}

/// True if the ublk driver is loaded, so that mounts may have its devices. A server in a root of
/// its own has no `/dev`.
pub(crate) fn uses_ublk() -> bool {
    Path::new(CONTROL).exists()
        || !Path::new("/dev").exists() && Path::new("/sys/module/ublk_drv").exists()
}

/// Loads the ublk driver; it has no alias that would load it when its device is opened. Before the
/// server and the opener start, whose sandboxes depend on it.
pub(crate) fn load_driver() {
    if !uses_ublk() && module_is_there("ublk_drv") {
        // The device shows if it worked.
        let _ = Command::new("modprobe").arg("ublk_drv").output();
    }
}

/// Removes the device of a mount, if it has one. Call this before the mount's folder is removed:
/// the folder tells a later supervisor that a device is ours.
pub(crate) fn remove_devices(id: MountId) {
    for number in devices_of(id) {
        // btrfs remembers devices by number, and numbers are reused. A stale entry only costs a
        // warning in the kernel's log.
        let _ = btrfs_mount::forget(&ublk::block_path(number));
        if let Err(e) = Control::open().and_then(|mut control| control.remove(number)) {
            tracing::warn!(mount = %id, error = %e, "the mount leaves a device behind");
        }
    }
}

/// The ublk devices of a mount.
pub(crate) fn devices_of(id: MountId) -> Vec<u32> {
    let numbers = ublk::numbers();
    if numbers.is_empty() {
        return numbers;
    }
    let Ok(mut control) = Control::open() else { return Vec::new() };
    let owner = OWNER_MAGIC | id.number();
    let mut is_its =
        |number: u32| matches!(control.device(number), Ok(Some(device)) if device.owner == owner);
    numbers.into_iter().filter(|number| is_its(*number)).collect()
}

/// Unused ublk devices of mounts that are not in `known`: leftovers of a dead daemon whose state
/// directory is gone or another one. Excludes a mounted device, which waits for its next server.
pub(crate) fn leftover_devices(known: &[MountId]) -> Vec<u32> {
    let numbers = ublk::numbers();
    if numbers.is_empty() {
        return numbers;
    }
    let Ok(mut control) = Control::open() else { return Vec::new() };
    let is_known = |owner: u64| known.iter().any(|id| owner == OWNER_MAGIC | id.number());
    let mut is_leftover = |number: u32| match control.device(number) {
        Ok(Some(device)) => {
            device.owner >> 32 == OWNER_MAGIC >> 32
                && device.waits
                && !is_known(device.owner)
                && is_unused(number)
        }
        _ => false,
    };
    numbers.into_iter().filter(|number| is_leftover(*number)).collect()
}

/// Removes a device found by [`leftover_devices`].
pub(crate) fn remove_leftover_device(number: u32) -> Result<()> {
    let _ = btrfs_mount::forget(&ublk::block_path(number));
    Control::open()?.remove(number)
}

/// True if nothing holds the block device exclusively, as a mounted file system does.
pub(crate) fn is_unused(number: u32) -> bool {
    use std::os::unix::fs::OpenOptionsExt;
    let device: PathBuf = ublk::block_path(number);
    let opened = std::fs::File::options()
        .read(true)
        .custom_flags(libc::O_EXCL | libc::O_CLOEXEC)
        .open(device);
    match opened {
        Ok(_) => true,
        Err(e) => matches!(e.raw_os_error(), Some(libc::ENOENT | libc::ENXIO | libc::ENODEV)),
    }
}
