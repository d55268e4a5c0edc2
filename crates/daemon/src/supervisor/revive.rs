//! Mounts over FUSE that lost supervisor and server, or a server that they were bound to by
//! io_uring, work again without being unmounted. (A ublk device just waits for its next server.)
//!
//! ```text
//!   btrfs ── loop ── a FUSE file whose connection is dead: EIO
//!                └── LOOP_CHANGE_FD ──► a new FUSE file, with a server
//! ```
//!
//! The kernel takes the change for one of the medium: from 6.17 on it then throws out every
//! inode that nobody has open, *with its dirty data* (measured on 6.18: a file written a second
//! before came out empty). So a writable file system is frozen around the change: frozen, it has
//! nothing dirty. From 6.19 on the kernel would shut the file system down; there it is left as
//! it is, and a umount and mount bring it back.
//!
//! A supervisor that dies between freeze and thaw has written down that it was about to: the next
//! one thaws (`crates/cli/tests/kill.rs`).

use std::{
    fs::File,
    os::fd::{AsRawFd, OwnedFd},
    path::{Path, PathBuf},
    sync::Arc,
    thread,
};

use burgeon_block::{Error, ErrorKind, Result};
use burgeon_btrfs::SUBVOLUME;
use burgeon_frontend::{
    Connection, Slots,
    btrfs_mount::{Access, Btrfs},
};

use super::{
    LOST_INTERVAL, Supervisor,
    recover::is_alive,
    table::{Entry, MountRecord, Serving},
};
use crate::{
    id::MountId,
    protocol::WritesState,
    system,
    transport::{self, Transport},
};

/// The first kernel that may shut a file system down when its device changes over.
const KERNEL_SHUTS_DOWN: (u32, u32) = (6, 19);

/// `ioctl_loop`: the read-only loop's backing file becomes another one of the same size.
const LOOP_CHANGE_FD: libc::c_ulong = 0x4c06;

/// `linux/fs.h`: `_IOWR('X', 119, int)` and `_IOWR('X', 120, int)`.
const FIFREEZE: libc::c_ulong = 0xc004_5877;
const FITHAW: libc::c_ulong = 0xc004_5878;

/// How a mount comes back.
pub(crate) struct Revival {
    record: MountRecord,
    connection: Connection,
}

impl Supervisor {
    /// Takes the mount into the table, and with it the name of its writes: nobody may mount them
    /// a second time meanwhile.
    pub(super) fn begin_revival(&self, mut record: MountRecord) -> Result<()> {
        let id = record.attach.id;
        let (connection, fuse, transport) = connect_anew(&record)?;
        record.attach.transport = transport;
        let entry = self.entry(record.clone(), Some(fuse), Slots::create()?)?;
        let revival = Some(Revival { record, connection });
        self.table().add(Entry { lost: true, reviving: true, revival, ..entry });
        self.note_transport(id, transport);
        Ok(())
    }

    /// A server has died, and with it what the kernel had given it over io_uring. Fails those
    /// requests at once, and puts their mounts on the way to a new connection. The server must be
    /// gone; the next one is told of the new connections.
    pub(super) fn reconnect_rings(self: &Arc<Self>) {
        let records: Vec<_> =
            self.table().mounts.values().map(|entry| entry.record.clone()).collect();
        for record in records {
            let Transport::Rings { connection } = record.attach.transport else { continue };
            let id = record.attach.id;
            if let Err(e) = Connection::abort(connection) {
                log!("the readers of mount {id} may hang: {e}");
            }
            if let Err(e) = self.reconnect(record) {
                log!("mount {id} has lost its server for good: {e}");
                if let Some(entry) = self.table().mounts.get_mut(&id) {
                    entry.serving = Serving::No(e);
                }
            }
        }
    }

    fn reconnect(self: &Arc<Self>, record: MountRecord) -> Result<()> {
        let id = record.attach.id;
        let (connection, fuse, transport) = connect_anew(&record)?;
        let begin = {
            let mut table = self.table();
            let Some(entry) = table.mounts.get_mut(&id) else { return Ok(()) };
            if !entry.handed_out {
                // Its maker sees the failure and clears up.
                return Ok(());
            }
            // They belong to the old connection, whose numbers mean others on the new one.
            entry.slots.forget_requests();
            entry.fuse = Some(fuse);
            entry.record.attach.transport = transport;
            (entry.serving, entry.lost) = (Serving::Awaited, true);
            entry.revival = Some(Revival { record: entry.record.clone(), connection });
            let begin = !std::mem::replace(&mut entry.reviving, true);
            table.attach(id);
            begin
        };
        self.note_transport(id, transport);
        if begin {
            self.spawn_reviver(id);
        }
        Ok(())
    }

    fn note_transport(&self, id: MountId, transport: Transport) {
        // On a full disk it cannot be; serving the mount again is worth more.
        if let Err(e) = self.update(id, |record| record.attach.transport = transport) {
            log!("it cannot be written down how mount {id} is served: {e}");
        }
    }

    /// Looks after the mount's revivals: there may be a next one before one is done.
    pub(super) fn spawn_reviver(self: &Arc<Self>, id: MountId) {
        let supervisor = Arc::clone(self);
        thread::spawn(move || {
            while let Some(revival) = supervisor.next_revival(id) {
                supervisor.finish_revival(id, revival);
            }
        });
    }

    /// The mount's next revival; `None`, and its reviver is to end, if there is none.
    fn next_revival(&self, id: MountId) -> Option<Revival> {
        let mut table = self.table();
        let entry = table.mounts.get_mut(&id)?;
        let next = entry.revival.take();
        entry.reviving = next.is_some();
        next
    }

    /// Puts the new FUSE file below the mount's loop device. If that fails, the mount stays as
    /// it is, and is cleared up after once it is unmounted.
    fn finish_revival(&self, id: MountId, revival: Revival) {
        let Revival { record, connection } = revival;
        let revived = self.await_taken_on(id).and_then(|()| {
            let file = connection.open_file()?;
            self.change_over(&record, &file)
        });
        if let Some(entry) = self.table().mounts.get_mut(&id) {
            // Its server has died, too: what became of this one does not matter.
            if entry.revival.is_some() {
                return;
            }
            match revived {
                Ok(()) => {
                    log!("mount {id} is served again");
                    entry.lost = false;
                    return;
                }
                Err(e) => {
                    log!("mount {id} has lost its server for good: {e}");
                    entry.serving = Serving::No(e);
                }
            }
        }
        drop(connection);
        self.thaw(&record);
        while is_alive(&record) {
            thread::sleep(LOST_INTERVAL);
            if self.table().mounts.get(&id).is_some_and(|entry| entry.revival.is_some()) {
                return;
            }
        }
        if let Some(entry) = self.table().mounts.get_mut(&id) {
            entry.lost = false;
        }
        self.release(id);
    }
}

impl Supervisor {
    fn change_over(&self, record: &MountRecord, file: &File) -> Result<()> {
        refuse_shutdown()?;
        let Some(device) = &record.data_device else { return Ok(()) };
        let failed = |e| Error::io(format!("cannot change the file of {}", device.display()), e);
        let loop_device = File::open(device).map_err(failed)?;
        let Some(sprout) = writable_device(record) else {
            return number_ioctl(&loop_device, LOOP_CHANGE_FD, file.as_raw_fd()).map_err(failed);
        };
        let id = record.attach.id;
        // Written down first: should this process die now, its successor has to thaw. On a full
        // disk it cannot be; serving the mount again is worth more.
        self.note_frozen(id, true);
        let frozen = Frozen::new(&sprout)?;
        let changed = number_ioctl(&loop_device, LOOP_CHANGE_FD, file.as_raw_fd());
        drop(frozen);
        self.note_frozen(id, false);
        changed.map_err(failed)
    }

    /// Thaws what a supervisor has left frozen that died here.
    pub(super) fn thaw(&self, record: &MountRecord) {
        let Some(device) = writable_device(record).filter(|_| record.frozen) else { return };
        let root =
            Btrfs::mount(&device, SUBVOLUME, Access::Writable).and_then(|mount| mount.open_root());
        match root.map(Frozen) {
            // Dropped, it thaws; if it was not frozen yet, that changes nothing.
            Ok(frozen) => drop(frozen),
            Err(e) => log!("mount {} may stay frozen: {e}", record.attach.id),
        }
        self.note_frozen(record.attach.id, false);
    }

    fn note_frozen(&self, id: MountId, frozen: bool) {
        if let Err(e) = self.update(id, |record| record.frozen = frozen) {
            log!("it cannot be written down whether mount {id} is frozen: {e}");
        }
    }
}

/// A new connection for the mount, of the kind it had, as far as the kernel still allows it: its
/// ends, and what it is.
fn connect_anew(record: &MountRecord) -> Result<(Connection, OwnedFd, Transport)> {
    let rings = matches!(record.attach.transport, Transport::Rings { .. });
    let (connection, transport) = transport::connect(record.attach.id, rings)?;
    let fuse = connection.device().try_clone_to_owned();
    let fuse = fuse.map_err(|e| Error::io("cannot keep the FUSE device", e))?;
    Ok((connection, fuse, transport))
}

fn refuse_shutdown() -> Result<()> {
    if system::kernel_version().is_none_or(|version| version >= KERNEL_SHUTS_DOWN) {
        return Err(Error::new(
            ErrorKind::Unavailable,
            "this kernel cannot change the file below a mounted file system: unmount it and mount \
             it again",
        ));
    }
    Ok(())
}

/// The device of a mount's sprout: the last of its loops, or the user's.
pub(super) fn writable_device(record: &MountRecord) -> Option<PathBuf> {
    let WritesState::Sprout(sprout) = &record.writes else { return None };
    if sprout.path.starts_with("/dev") {
        return Some(sprout.path.clone());
    }
    record.loops.last().cloned()
}

/// A file system that takes no writes, and has none outstanding, as long as this lives.
struct Frozen(File);

impl Frozen {
    /// Freezes the file system on `device`, reached by mounting it once more.
    fn new(device: &Path) -> Result<Self> {
        let root = Btrfs::mount(device, SUBVOLUME, Access::Writable)?.open_root()?;
        match number_ioctl(&root, FIFREEZE, 0) {
            Ok(()) => Ok(Self(root)),
            // Somebody who died here had frozen it.
            Err(e) if e.raw_os_error() == Some(libc::EBUSY) => Ok(Self(root)),
            Err(e) => Err(Error::io("cannot freeze the file system", e)),
        }
    }
}

impl Drop for Frozen {
    fn drop(&mut self) {
        match number_ioctl(&self.0, FITHAW, 0) {
            // It was not frozen.
            Err(e) if e.raw_os_error() == Some(libc::EINVAL) => {}
            Err(e) => log!("a file system stays frozen: {e}"),
            Ok(()) => {}
        }
    }
}

fn number_ioctl(file: &File, request: libc::c_ulong, number: i32) -> std::io::Result<()> {
    // SAFETY: the requests that this is called with take a number and touch no memory of ours.
    match unsafe { libc::ioctl(file.as_raw_fd(), request as _, number) } {
        0 => Ok(()),
        _ => Err(std::io::Error::last_os_error()),
    }
}
