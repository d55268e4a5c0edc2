//! The jobs of one mount, run by its task.
//!
//! ```text
//!   Attach ─┬─ served already ──────► as Refresh
//!           ├─ its files are good ──► served; a refusing server of it ends first
//!           └─ they are not ────────► refusing: every read is EIO at once; the supervisor
//!                                     recreates the files, and attaches again
//!   Refresh ─► new mappings and pins are seen
//!   Ended ───► forgotten, unless a later server has taken the mount over
//! ```
//!
//! Invariant: one server at a time has a mount's slots (`tests/interleavings.rs`). Jobs of a mount
//! never run concurrently, so each may check first and act then.

use std::{os::fd::OwnedFd, path::Path, pin::Pin, sync::Arc};

use burgeon_block::{BlockDevice, Error, ErrorKind, Result};
use burgeon_frontend::{End, Slots, serve, ublk};
use burgeon_source::References;

use super::{
    Serving, lock,
    refusing::Refusing,
    served::{AnyServer, Mount, Prefetching, Refused},
    volumes::{Device, ImageVolume, Origin},
};
use crate::{
    host::system::Identity,
    id::MountId,
    ipc::link::{FromServer, sort_descriptors},
    log,
    state::{
        access, files,
        pins::Pins,
        record::{Attach, Transport},
    },
};

/// A job of a mount.
pub(super) enum Job {
    /// Serve it. If it is served already: see new mappings and pins.
    Attach {
        number: Option<u64>,
        /// Answer its reads with `EIO` if it cannot be served.
        refuse: bool,
        /// The folders that this server writes to, as the host sees them.
        folders: Vec<Option<Identity>>,
        attach: Box<Attach>,
        fds: Vec<OwnedFd>,
    },
    /// See new mappings and pins.
    Refresh { number: u64 },
    /// Start or stop recording reads.
    Record { on: bool },
    /// The mount's server of this number has ended.
    Ended { server: u64, end: End },
}

type Ended = Pin<Box<dyn Future<Output = End> + Send>>;

impl Serving {
    pub(super) fn perform(self: &Arc<Self>, id: MountId, job: Job) {
        match job {
            Job::Attach { number, refuse, folders, attach, fds } => {
                let error = self.attach(*attach, fds, refuse, &folders).err().map(Into::into);
                let served = lock(&self.mounts).contains_key(&id);
                let refused = lock(&self.refused).contains_key(&id);
                let opener = lock(&self.mounts).get(&id).and_then(|mount| mount.server.opener());
                self.tell(&FromServer::Attached { id, number, error, served, refused, opener });
            }
            Job::Refresh { number } => {
                let error = self.refresh(id).err().map(Into::into);
                self.tell(&FromServer::Refreshed { id, number, error });
            }
            Job::Record { on } => {
                let (cut_short, error) = match self.record(id, on) {
                    Ok(cut_short) => (cut_short, None),
                    Err(e) => (false, Some(e.into())),
                };
                self.tell(&FromServer::Recorded { id, on, cut_short, error });
            }
            Job::Ended { server, end } => self.forget(id, server, end),
        }
    }

    fn attach(
        self: &Arc<Self>,
        attach: Attach,
        fds: Vec<OwnedFd>,
        refuse: bool,
        folders: &[Option<Identity>],
    ) -> Result<()> {
        let Some((fuse, slots)) = sort_descriptors(attach.transport, fds) else {
            let what = format!("mount {} came without its descriptors", attach.id);
            return Err(Error::new(ErrorKind::Invalid, what));
        };
        if lock(&self.mounts).contains_key(&attach.id) {
            // An adopting supervisor reports its state; one of another version announces a new
            // mapping this way.
            return self.refresh(attach.id);
        }
        self.make_way_for(attach.id, attach.transport);
        self.make_way_if_replaced(folders);
        let slots = Arc::new(Slots::from_fd(slots)?);
        match self.device_of(&attach, &slots) {
            Ok((volume, device)) => self.take_on(attach, fuse, slots, volume, device),
            Err(e) if refuse => {
                self.refuse(attach, fuse, slots, &e)?;
                Err(e)
            }
            Err(e) => Err(e),
        }
    }

    /// Opens the files that a mount is served from.
    fn device_of(
        self: &Arc<Self>,
        attach: &Attach,
        slots: &Arc<Slots>,
    ) -> Result<(Arc<ImageVolume>, Arc<Device>)> {
        let access = access::kept(&self.state.mount(attach.id))?;
        let references = if attach.references { References::Allow } else { References::Refuse };
        let map = attach.seed.join("map");
        let volume = self.volume(Origin::of(attach, &access), &map, references)?;
        let device = Arc::new(self.lazy_device(attach, &access, &volume, slots)?);
        Ok((volume, device))
    }

    fn take_on(
        self: &Arc<Self>,
        attach: Attach,
        fuse: Option<OwnedFd>,
        slots: Arc<Slots>,
        volume: Arc<ImageVolume>,
        device: Arc<Device>,
    ) -> Result<()> {
        self.end_refusing(attach.id);
        let (kept, server, ended) = self.serve(&attach, fuse, &slots, &device)?;
        let (id, number, pins) = (attach.id, self.next_server(), attach.pins.clone());
        let mount = Mount {
            attach,
            volume,
            device,
            fuse: kept,
            slots,
            server,
            number,
            prefetching: Prefetching::Loading,
            fill: None,
            pinned: None,
        };
        let transport = mount.attach.transport;
        self.start_background(id, mount);
        // All bytes that its readers get from here on count.
        drop(self.look_at_reads());
        if let Err(e) = self.fetch_pinned(id, &pins) {
            // Pins only affect speed; the mount is served.
            tracing::warn!(mount = %id, error = %e, "cannot fetch pinned files");
        }
        self.watch(id, number, transport, ended);
        Ok(())
    }

    /// Answers the mount's reads with `EIO`, unless it does so already.
    fn refuse(
        self: &Arc<Self>,
        attach: Attach,
        fuse: Option<OwnedFd>,
        slots: Arc<Slots>,
        why: &Error,
    ) -> Result<()> {
        let id = attach.id;
        if lock(&self.refused).contains_key(&id) {
            return Ok(());
        }
        tracing::error!(mount = %id, error = %why, "cannot serve the mount: its reads are EIO");
        let device = Arc::new(Refusing::instead_of(&attach, &self.options.driver)?);
        let (fuse, server, ended) = self.serve(&attach, fuse, &slots, &device)?;
        let (transport, number) = (attach.transport, self.next_server());
        lock(&self.refused).insert(id, Refused { attach, fuse, slots, _server: server, number });
        self.watch(id, number, transport, ended);
        Ok(())
    }

    /// Stops the server that refuses the mount's reads: requests it has not answered stay in the
    /// slots, or with the driver, for the next one.
    fn end_refusing(&self, id: MountId) {
        let refused = lock(&self.refused).remove(&id);
        // Joins its threads.
        drop(refused);
    }

    /// Serves `device`; also returns the descriptor that is kept for a supervisor.
    fn serve<D: BlockDevice>(
        &self,
        attach: &Attach,
        fuse: Option<OwnedFd>,
        slots: &Arc<Slots>,
        device: &Arc<D>,
    ) -> Result<(Option<OwnedFd>, AnyServer, Ended)> {
        let mut options = self.options.clone();
        options.rings = matches!(attach.transport, Transport::Rings { .. });
        let kept = fuse.as_ref().map(OwnedFd::try_clone).transpose();
        let kept = kept.map_err(|e| Error::io("cannot keep the FUSE device", e))?;
        let (slots, device) = (Arc::clone(slots), Arc::clone(device));
        Ok(match (fuse, attach.transport) {
            (None, Transport::Ublk { number }) => {
                let server = ublk::serve(number, slots, device, &options)?;
                let ended = Box::pin(server.ended());
                (kept, AnyServer::Ublk(server), ended)
            }
            (Some(fuse), _) => {
                let server = serve(fuse, slots, device, &options)?;
                let ended = Box::pin(server.ended());
                (kept, AnyServer::Fuse(server), ended)
            }
            (None, Transport::Fuse | Transport::Rings { .. }) => {
                return Err(Error::new(ErrorKind::Invalid, "a FUSE mount came without FUSE"));
            }
        })
    }

    /// Reports the end of its server to the mount's task.
    fn watch(self: &Arc<Self>, id: MountId, number: u64, transport: Transport, ended: Ended) {
        let serving = Arc::clone(self);
        self.runtime.spawn(async move {
            let end = ended.await;
            if let (End::Failed(errno), Transport::Ublk { .. }) = (end, transport) {
                // The device stays, and waits for a server.
                log::prepare_to_end();
                tracing::error!(mount = %id, errno, "ending: this server cannot go on with the mount, and the next one takes it over");
                std::process::exit(1);
            }
            // Stopped by this process: another server has the mount.
            if end != End::Stopped {
                // Joining the mount's threads would block the runtime.
                serving.add(id, Job::Ended { server: number, end });
            }
        });
    }

    /// Sees new mappings and pins. For a refused mount this is left to a later attach.
    fn refresh(&self, id: MountId) -> Result<()> {
        let found = lock(&self.mounts)
            .get(&id)
            .map(|mount| (Arc::clone(&mount.device), mount.attach.pins.clone()));
        let Some((device, pins)) = found else {
            return Err(Error::new(ErrorKind::Unavailable, format!("mount {id} is not served")));
        };
        device.area().map_or(Ok(()), |area| area.refresh())?;
        self.fetch_pinned(id, &pins)
    }

    /// Starts to fetch the pins in the file `pins`, and drops the earlier pins. Returns when the
    /// amount is known.
    fn fetch_pinned(&self, id: MountId, pins: &Path) -> Result<()> {
        let ranges = Pins::read(pins)?.ranges();
        let device = lock(&self.mounts).get(&id).map(|mount| Arc::clone(&mount.device));
        let Some(device) = device else { return Ok(()) };
        let fills = self.runtime.block_on(device.fill_ranges(&ranges))?;
        if let Some(mount) = lock(&self.mounts).get_mut(&id) {
            mount.pinned = Some(fills);
        }
        Ok(())
    }

    /// Has the pins of all mounts fetched as far as they are not here, and held if there is space
    /// now: what the cache may keep has changed.
    pub(super) fn fetch_pins_again(&self) {
        let pins = |(id, mount): (&MountId, &Mount)| (*id, mount.attach.pins.clone());
        let all: Vec<_> = lock(&self.mounts).iter().map(pins).collect();
        for (id, pins) in all {
            if let Err(error) = self.fetch_pinned(id, &pins) {
                tracing::warn!(mount = %id, %error, "cannot fetch the pinned files again");
            }
        }
    }

    /// A server of the mount has ended by itself: the mount is over, unless another has taken it
    /// over.
    fn forget(&self, id: MountId, server: u64, end: End) {
        let mount = {
            let mut mounts = lock(&self.mounts);
            let is_it = mounts.get(&id).is_some_and(|mount| mount.number == server);
            if is_it { mounts.remove(&id) } else { None }
        };
        let refused = {
            let mut refused = lock(&self.refused);
            let is_it = refused.get(&id).is_some_and(|mount| mount.number == server);
            if is_it { refused.remove(&id) } else { None }
        };
        if mount.is_none() && refused.is_none() {
            return;
        }
        tracing::info!(mount = %id, ?end, "the mount is over");
        let mut is_damaged = false;
        if let Some(mount) = mount {
            if let Some(fill) = &mount.fill {
                fill.stop();
            }
            let Mount { server, fuse, volume, device, .. } = mount;
            is_damaged = volume.status().is_map_damaged;
            drop(server);
            drop(device);
            drop(fuse);
            drop(volume);
        }
        drop(refused);
        self.volumes.sweep();
        self.tell(&FromServer::Ended { id, is_damaged });
        let orphaned = lock(&self.link).is_none();
        if orphaned && self.is_idle() {
            let _ = files::remove_file(&self.state.run().join("adopt.sock"));
            std::process::exit(0);
        }
    }
}
