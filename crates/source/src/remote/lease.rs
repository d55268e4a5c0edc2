//! Leases of writers and collectors on a store without locks.
//!
//! ```text
//!   writer:     put leases/write-<id>   ── then list: a collector there? wait until it is gone
//!   collector:  put leases/collect-<id> ── then list: a writer there? collect nothing
//! ```
//!
//! Each puts its own mark before it looks for the other's, so at least one of the two sees the
//! other: a listing has every mark put before it. A mark is put again every [`RENEW`]; a mark
//! older than [`LEASE`] by the *store's* clock belongs to a dead process, and the next collector
//! removes it. Invariant: a process that could not renew in time publishes and removes nothing
//! more ([`Leases`]).

use std::{
    sync::{Arc, Mutex, PoisonError, Weak},
    time::{Duration, Instant},
};

use burgeon_block::{Collecting, Error, ErrorKind, Lease, ObjectId, ObjectKind, Result};
use bytes::Bytes;
use futures_util::StreamExt;
use object_store::{ObjectMeta, ObjectStoreExt};
use tempfile::TempDir;
use tokio::task::AbortHandle;

use super::RemoteStore;
use crate::location::RemoteUrl;
use crate::{runtime, waiting};

/// Time for which a mark is valid after it was put.
const LEASE: Duration = Duration::from_secs(15 * 60);
/// Renewal interval: four renewals in a row may fail.
const RENEW: Duration = Duration::from_secs(2 * 60);
/// Time for which its owner relies on it: shorter than [`LEASE`] by the longest time of a request
/// started at the last moment (300 s, and 30 s of retries) and half a minute for clocks that run
/// at different speeds.
const RELIED_ON: Duration = Duration::from_secs(9 * 60);
/// Time that a writer waits for a collector.
const WAIT_MAX: Duration = Duration::from_secs(60);
/// Polling interval of that wait.
const LOOK: Duration = Duration::from_millis(500);
/// Most marks that are listed.
const MARKS_MAX: usize = 10_000;

/// The leases of this process.
#[derive(Default, Debug)]
pub(super) struct Leases(Mutex<Vec<Weak<Renewed>>>);

/// Time of a mark's last renewal.
#[derive(Debug)]
struct Renewed(Mutex<Instant>);

impl Leases {
    /// An error if a lease of this process has expired.
    pub(super) fn check(&self, url: &RemoteUrl) -> Result<()> {
        let mut leases = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        leases.retain(|lease| lease.strong_count() > 0);
        let is_good = |lease: &Weak<Renewed>| {
            lease.upgrade().is_none_or(|lease| lease.get().elapsed() < RELIED_ON)
        };
        if leases.iter().all(is_good) {
            return Ok(());
        }
        let minutes = RELIED_ON.as_secs() / 60;
        Err(Error::new(
            ErrorKind::Unavailable,
            format!(
                "the lease of this command in the store {url} could not be renewed for {minutes} minutes, \
                 so others may regard it as expired: run the command again"
            ),
        ))
    }

    fn add(&self, lease: &Arc<Renewed>) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(Arc::downgrade(lease));
    }
}

impl Renewed {
    fn get(&self) -> Instant {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn set(&self, at: Instant) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = at;
    }
}

/// A mark that is renewed, and removed when dropped.
struct Mark {
    store: RemoteStore,
    object: ObjectId,
    renewal: AbortHandle,
    _renewed: Arc<Renewed>,
    /// Folder in which a writer builds its packs.
    scratch: TempDir,
}

impl Mark {
    fn put(store: &RemoteStore, kind: &str) -> Result<Self> {
        let scratch = tempfile::Builder::new().prefix("burgeon-").tempdir();
        let scratch = scratch.map_err(|e| {
            let folder = std::env::temp_dir();
            Error::io(format!("cannot make a folder in {} (TMPDIR)", folder.display()), e)
        })?;
        // The mark has the folder's random name, with the process ID for a human reader.
        let id = scratch.path().file_name().and_then(|name| name.to_str()).unwrap_or_default();
        let object = ObjectKind::Lease.object(format!("{kind}-{}-{id}", std::process::id()))?;
        let renewed = Arc::new(Renewed(Mutex::new(Instant::now())));
        waiting(store.put(&object, Bytes::new()))?;
        store.0.leases.add(&renewed);
        let (again, put, at) = (store.clone(), object.clone(), Arc::clone(&renewed));
        let renewal = runtime().spawn(async move {
            loop {
                tokio::time::sleep(RENEW).await;
                let begun = Instant::now();
                if again.put(&put, Bytes::new()).await.is_ok() {
                    at.set(begun);
                }
            }
        });
        let (store, renewal) = (store.clone(), renewal.abort_handle());
        Ok(Self { store, object, renewal, _renewed: renewed, scratch })
    }

    /// The number of live marks of others that begin with `kind`, and all dead marks.
    fn others(&self, kind: &str) -> Result<(usize, Vec<ObjectMeta>)> {
        let marks = waiting(marks(&self.store))?;
        let own = self.store.path(self.object.as_str())?;
        let now = marks.iter().find(|mark| mark.location == own).map(|mark| mark.last_modified);
        let Some(now) = now else {
            let what = format!(
                "the lease {} of this command is gone, perhaps removed by hand: run the command again",
                self.object
            );
            return Err(Error::new(ErrorKind::Unavailable, what));
        };
        let lease = i64::try_from(LEASE.as_secs()).unwrap_or(i64::MAX);
        let (alive, dead): (Vec<_>, Vec<_>) = marks
            .into_iter()
            .filter(|mark| mark.location != own)
            .partition(|mark| (now - mark.last_modified).num_seconds() < lease);
        let is_kind = |mark: &&ObjectMeta| {
            mark.location.filename().is_some_and(|name| name.starts_with(kind))
        };
        Ok((alive.iter().filter(is_kind).count(), dead))
    }

    fn into_lease(self) -> Lease {
        Lease::new(self.scratch.path().to_owned(), Box::new(self))
    }
}

impl Drop for Mark {
    fn drop(&mut self) {
        self.renewal.abort();
        // If this fails, the mark stays until it expires and a collector removes it.
        let _ = waiting(self.store.delete(&self.object));
    }
}

async fn marks(store: &RemoteStore) -> Result<Vec<ObjectMeta>> {
    let folder = store.path("leases")?;
    let mut listed = store.0.calling.list(Some(&folder)).take(MARKS_MAX + 1);
    let mut marks = Vec::new();
    while let Some(mark) = listed.next().await {
        marks.push(mark.map_err(store.failed("list", "leases"))?);
    }
    if marks.len() > MARKS_MAX {
        let what = format!(
            "{} has more than {MARKS_MAX} objects in leases/: remove those that are older than a day",
            store.0.url
        );
        return Err(Error::new(ErrorKind::Invalid, what));
    }
    Ok(marks)
}

pub(super) fn begin_write(store: &RemoteStore) -> Result<Lease> {
    let mark = Mark::put(store, "write")?;
    let begun = Instant::now();
    while mark.others("collect-")?.0 > 0 {
        if begun.elapsed() > WAIT_MAX {
            return Err(Error::new(
                ErrorKind::Unavailable,
                format!("`burgeon gc` is at work in {}: try again when it is done", store.0.url),
            ));
        }
        std::thread::sleep(LOOK);
    }
    Ok(mark.into_lease())
}

pub(super) fn begin_collect(store: &RemoteStore) -> Result<Collecting> {
    let mark = Mark::put(store, "collect")?;
    if mark.others("collect-")?.0 > 0 {
        return Err(Error::new(
            ErrorKind::Unavailable,
            format!("another `burgeon gc` is at work in {}", store.0.url),
        ));
    }
    let (writers, dead) = mark.others("write-")?;
    for left in dead {
        let deleted = waiting(store.0.calling.delete(&left.location));
        deleted.map_err(store.failed("remove", &left.location))?;
    }
    Ok(Collecting { lease: mark.into_lease(), writers, stale_bytes: 0 })
}
