//! The serving end of a device, over FUSE or ublk.

use std::{
    pin::Pin,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering::SeqCst},
    },
    time::{Duration, Instant},
};

use burgeon_block::{ErrorKind, Result};
use burgeon_frontend::{
    End, FuseServer, ServeOptions, Slots, serve_writable,
    ublk::{self, UblkServer},
};
use tokio::runtime::Handle;

use super::take;
use crate::{
    control::Transport,
    device::Served,
    front::is_unused,
    plan::{PlanDevice, PlanFront},
};

/// A server without a supervisor leaves an unused ublk device alone for so long.
const UNUSED_MAX: Duration = Duration::from_secs(5);

enum Server {
    Fuse(FuseServer),
    Ublk(UblkServer),
}

/// A device that is served to the kernel.
pub(super) struct FrontServer {
    /// `None` once it has ended.
    server: Arc<Mutex<Option<Server>>>,
    /// The kernel has let go of the device.
    ended: Arc<AtomicBool>,
    options: ServeOptions,
    ublk: Option<u32>,
    unused: Mutex<Option<Instant>>,
}

impl FrontServer {
    /// Serves `device` as `plan` has it; takes it over from a server that has died. A ublk device
    /// in use that is gone counts as ended.
    pub(super) fn begin(
        plan: &PlanDevice,
        slots: Arc<Slots>,
        device: Arc<Served>,
        runtime: &Handle,
    ) -> Result<Self> {
        let options = ServeOptions::new(runtime.clone());
        let (server, ublk) = match plan.front {
            PlanFront::Fuse { fd } => {
                (serve_writable(take(fd), slots, device, &options).map(Server::Fuse), None)
            }
            PlanFront::Ublk { number } => {
                let served = ublk::serve_writable(number, slots, device, &options);
                (served.map(Server::Ublk), Some(number))
            }
        };
        let server = match server {
            Err(error) if error.kind() == ErrorKind::NotFound && plan.is_in_use => {
                tracing::error!(device = plan.name, %error, "the device in front was removed: detach it");
                None
            }
            server => Some(server?),
        };
        let ended = Arc::new(AtomicBool::new(server.is_none()));
        let (unused, server) = (Mutex::new(None), Arc::new(Mutex::new(server)));
        let this = Self { server, ended, options, ublk, unused };
        this.watch(runtime);
        Ok(this)
    }

    /// Notes the end of the device, and lets go of it: a ublk device goes with its last descriptor.
    fn watch(&self, runtime: &Handle) {
        let ending: Pin<Box<dyn Future<Output = End> + Send>> = match &*lock(&self.server) {
            Some(Server::Fuse(server)) => Box::pin(server.ended()),
            Some(Server::Ublk(server)) => Box::pin(server.ended()),
            None => return,
        };
        let (server, ended) = (self.server.clone(), self.ended.clone());
        runtime.spawn(async move {
            if ending.await == End::Unmounted {
                let over = lock(&server).take();
                tokio::task::block_in_place(|| drop(over));
                ended.store(true, SeqCst);
            }
        });
    }

    pub(super) fn transport(&self) -> Transport {
        if self.ublk.is_some() { Transport::Ublk } else { Transport::Fuse }
    }

    pub(super) fn has_ended(&self) -> bool {
        self.ended.load(SeqCst)
    }

    /// Takes no more requests, and gives those in work `drain` to end.
    pub(super) fn stop(&self, drain: Duration) {
        match lock(&self.server).take() {
            Some(Server::Fuse(server)) => drop(server.stop(drain)),
            Some(Server::Ublk(server)) => server.stop(drain),
            None => {}
        }
    }

    /// Ends a ublk device that nobody has used for a while: without a supervisor nobody else does.
    /// A loop device goes by itself.
    pub(super) fn end_if_unused(&self) {
        let Some(number) = self.ublk.filter(|_| !self.has_ended()) else { return };
        let mut unused = self.unused.lock().unwrap_or_else(PoisonError::into_inner);
        if !is_unused(number) {
            *unused = None;
        } else if unused.get_or_insert_with(Instant::now).elapsed() >= UNUSED_MAX
            && let Err(error) = self.options.driver.stop(number)
        {
            tracing::warn!(number, %error, "an unused ublk device stays");
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
