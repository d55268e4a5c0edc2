//! Serves the status socket: a snapshot to each client, of which nothing is read.
//!
//! Invariants: at most [`CLIENTS_MAX`] clients at a time, each for at most [`CLIENT_TIME`]; the
//! state is looked at once a second at most, however many ask; no lock is held while a client is
//! served.

use std::{
    io::Write,
    os::unix::net::{UnixListener, UnixStream},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicUsize, Ordering::SeqCst},
    },
    thread,
    time::{Duration, Instant},
};

use burgeon_block::{Error, Result};
use burgeon_metrics::{CacheNow, MOUNTS_MAX, MetricsSnapshot, MountNow};

use super::Supervisor;
use crate::ipc::{
    protocol::{HostCache, MountStatus, WritesState},
    wire,
};

/// Concurrent clients; a host has one or two.
const CLIENTS_MAX: usize = 8;

/// Time for a client to take its snapshot.
const CLIENT_TIME: Duration = Duration::from_secs(5);

/// A snapshot that is this young is given to the next client, too.
const FRESH: Duration = Duration::from_secs(1);

/// Pause after a failed accept, most likely for lack of descriptors.
const PAUSE: Duration = Duration::from_millis(100);

/// The last snapshot, as it is sent.
pub(super) type Recent = Mutex<Option<(Instant, Arc<Vec<u8>>)>>;

impl Supervisor {
    /// Accepts clients as long as this process lives.
    pub(super) fn tell_status(self: &Arc<Self>, socket: &UnixListener) {
        let clients = Arc::new(AtomicUsize::new(0));
        loop {
            let Ok((stream, _)) = socket.accept() else {
                thread::sleep(PAUSE);
                continue;
            };
            if clients.fetch_add(1, SeqCst) >= CLIENTS_MAX {
                clients.fetch_sub(1, SeqCst);
                continue;
            }
            let (supervisor, counted) = (Arc::clone(self), Arc::clone(&clients));
            let spawned = thread::Builder::new().spawn(move || {
                let sent = supervisor.snapshot().and_then(|bytes| send(&stream, &bytes));
                if let Err(error) = sent {
                    tracing::debug!(%error, "a reader of the status was cut off");
                }
                counted.fetch_sub(1, SeqCst);
            });
            if spawned.is_err() {
                clients.fetch_sub(1, SeqCst);
            }
        }
    }

    /// The message for a client.
    fn snapshot(&self) -> Result<Arc<Vec<u8>>> {
        let recent = || self.recent.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((at, bytes)) = &*recent()
            && at.elapsed() < FRESH
        {
            return Ok(Arc::clone(bytes));
        }
        let status = self.status();
        let snapshot = MetricsSnapshot {
            version: status.version,
            has_server: status.server_pid.is_some() && status.server_answers,
            mount_count: status.mounts.len() as u64,
            mounts_now: status.mounts.into_iter().take(MOUNTS_MAX).map(mount).collect(),
            cache_now: status.cache.as_ref().map(cache),
            differing_layers: self.state.differing_layers(),
            ..MetricsSnapshot::default()
        };
        let snapshot = match self.counting.durable() {
            Some(totals) => snapshot.with_totals(&totals),
            None => snapshot,
        };
        let bytes = Arc::new(encode(snapshot)?);
        *recent() = Some((Instant::now(), Arc::clone(&bytes)));
        Ok(bytes)
    }
}

/// The message. A snapshot that does not fit loses mounts, and not its totals.
fn encode(mut snapshot: MetricsSnapshot) -> Result<Vec<u8>> {
    loop {
        let left = snapshot.mounts_now.len().max(snapshot.mounts.len()) / 2;
        match wire::encode(&snapshot) {
            Err(_) if left > 0 => {
                snapshot.mounts_now.truncate(left);
                let kept: Vec<_> = snapshot.mounts_now.iter().map(|mount| &mount.id).collect();
                snapshot.mounts.retain(|id, _| kept.contains(&id));
            }
            done => return done,
        }
    }
}

/// Sends the message, however slowly it is taken, within the time of a client.
fn send(mut stream: &UnixStream, bytes: &[u8]) -> Result<()> {
    let failed = |e| Error::io("cannot send the status", e);
    let end = Instant::now() + CLIENT_TIME;
    let mut left = bytes;
    while !left.is_empty() {
        let time = end.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
        stream.set_write_timeout(Some(time)).map_err(failed)?;
        let sent = match stream.write(left) {
            Err(e) if e.kind() == std::io::ErrorKind::Interrupted => 0,
            other => other.map_err(failed)?,
        };
        left = &left[sent..];
        if Instant::now() >= end && !left.is_empty() {
            return Err(failed(std::io::ErrorKind::TimedOut.into()));
        }
    }
    Ok(())
}

fn mount(status: MountStatus) -> MountNow {
    let reserved_bytes = match &status.writes {
        WritesState::Sprout(sprout) => sprout.reserved,
        WritesState::ReadOnly => 0,
    };
    MountNow {
        id: status.id.to_string(),
        image: status.image,
        target: status.target.display().to_string(),
        store: status.store.to_string(),
        transport: status.transport,
        is_serving: status.state == "serving",
        data_bytes: status.data_bytes,
        local_bytes: status.materialised_bytes,
        waiting_readers: status.cache.as_ref().map(|cache| cache.waiting_readers),
        in_flight: status.cache.as_ref().map(|cache| cache.in_flight),
        reserved_bytes,
    }
    .shortened()
}

fn cache(cache: &HostCache) -> CacheNow {
    CacheNow {
        used: cache.used,
        limit: cache.limit,
        floor: cache.floor,
        free: cache.free,
        held: cache.held,
        lent: cache.lent,
        chunks: cache.chunks,
        hit_in_an_hour: cache.read_in_an_hour.hit,
        miss_in_an_hour: cache.read_in_an_hour.miss,
    }
}

#[cfg(test)]
mod tests {
    use burgeon_metrics::{MOUNTS_MAX, MetricsSnapshot, MountNow, Totals, Values};

    use super::encode;
    use crate::ipc::wire::MESSAGE_MAX;

    fn snapshot(text: &str) -> MetricsSnapshot {
        let mut totals = Totals::default();
        let mut mounts_now = Vec::new();
        for number in 0..MOUNTS_MAX {
            let id = format!("{number:08x}");
            totals.look(&id, text, Values::default());
            let [image, target, store] = [(); 3].map(|()| text.to_owned());
            let mount = MountNow { id, image, target, store, ..MountNow::default() };
            mounts_now.push(mount);
        }
        MetricsSnapshot { mounts_now, mount_count: 5000, ..MetricsSnapshot::default() }
            .with_totals(&totals)
    }

    #[test]
    fn a_snapshot_is_one_message_however_long_the_paths_are() {
        let mut long = snapshot(&"x".repeat(4096));
        long.mounts_now = long.mounts_now.into_iter().map(MountNow::shortened).collect();
        let all = long.mounts_now.len();
        let bytes = encode(long).unwrap();
        let sent: MetricsSnapshot = serde_json::from_slice(&bytes[4..]).unwrap();
        assert_eq!((sent.mounts_now.len(), sent.mounts.len()), (all, all));

        // A message that cannot be shortened loses mounts: totals of stores stay.
        let bytes = encode(snapshot(&"x".repeat(4096))).unwrap();
        assert!(bytes.len() <= MESSAGE_MAX + 4);
        let sent: MetricsSnapshot = serde_json::from_slice(&bytes[4..]).unwrap();
        assert_eq!((sent.stores.len(), sent.mount_count), (1, 5000));
        assert!(!sent.mounts_now.is_empty());
        assert_eq!(sent.mounts_now.len(), sent.mounts.len());
    }
}
