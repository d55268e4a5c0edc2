//! Lifetime totals: a thread looks at all counters every ten seconds, and writes what is new.
//!
//! ```text
//!   counters of each mount (shared memory) ─┐
//!   cache of the server (an order) ─────────┴► looked at ─► `totals`, durably ─► exported
//!   a released mount: its last counters ────┘
//! ```
//!
//! Invariants: what is exported is durable, so it never goes down (`cli/tests/metrics.rs`); no lock
//! is held while the file is written, and only one thread writes it at a time.

use std::{
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    thread,
    time::Duration,
};

use burgeon_block::Result;
use burgeon_metrics::{CacheValues, Totals, Values};

use super::{Supervisor, table::MountEntry};
use crate::{
    id::MountId,
    ipc::{link::CacheOrder, protocol::HostCache},
    state::{paths::StateDir, totals},
};

/// Time between two looks: the most that a crash loses.
const PERIOD: Duration = Duration::from_secs(10);

/// Time limit for the server's figures of the cache; the next look asks again.
const ANSWER_MAX: Duration = Duration::from_secs(1);

/// The totals of this supervisor.
#[derive(Default)]
pub(super) struct Counting {
    /// The totals; `None` before the file was read, and if a later version has written it.
    last: Mutex<Option<Totals>>,
    /// The totals in the file.
    durable: Mutex<Option<Arc<Totals>>>,
    /// Held while the file is written.
    writing: Mutex<()>,
    /// The last write failed, and the log has its error.
    is_failing: AtomicBool,
}

impl Counting {
    /// Reads the file.
    pub(super) fn begin(state: &StateDir) -> Self {
        match totals::read(state) {
            Ok(read) => Self {
                durable: Mutex::new(Some(Arc::new(read.clone()))),
                last: Mutex::new(Some(read)),
                ..Self::default()
            },
            Err(error) => {
                tracing::error!(%error, "no lifetime totals are counted");
                Self::default()
            }
        }
    }

    /// True if the totals were written. A full disk is one event of the log, however long it is
    /// full.
    fn has_written(&self, written: Result<()>) -> bool {
        let was_failing = self.is_failing.swap(written.is_err(), Relaxed);
        match &written {
            Err(error) if !was_failing => {
                tracing::warn!(%error, "metrics stay as they are: the totals cannot be written");
            }
            Ok(()) if was_failing => tracing::info!("the totals of metrics are written again"),
            _ => {}
        }
        written.is_ok()
    }

    /// The totals that a crash cannot lose.
    pub(super) fn durable(&self) -> Option<Arc<Totals>> {
        lock(&self.durable).clone()
    }
}

impl Supervisor {
    /// Looks and writes as long as this process lives.
    pub(super) fn count_for_ever(&self) {
        loop {
            self.count();
            thread::sleep(PERIOD);
        }
    }

    /// Looks at all counters and writes the totals.
    pub(super) fn count(&self) {
        let cache = self.cache_figures();
        let _writing = lock(&self.counting.writing);
        let (mounts, server): (Vec<_>, _) = {
            let table = self.table();
            (table.mounts.values().map(counters).collect(), table.server_pid)
        };
        let mut new = {
            let mut last = lock(&self.counting.last);
            let Some(last) = last.as_mut() else { return };
            for (id, store, values) in mounts {
                last.look(&id, &store, values);
            }
            match (server, cache) {
                (Some(pid), Some((of, cache))) if of == pid => last.look_at_cache(pid, cache),
                (Some(pid), _) => last.look_at_server(pid),
                (None, _) => {}
            }
            last.clone()
        };
        new.forget(|id| self.is_gone(id));
        new.seen_unix_seconds = totals::now();
        let is_old = |durable: Arc<Totals>| durable.is_same(&new) && durable.seen_unix_seconds > 0;
        let is_new = !self.counting.durable().is_some_and(is_old);
        if is_new && !self.counting.has_written(totals::publish(&self.state, &new)) {
            return;
        }
        if let Some(last) = lock(&self.counting.last).as_mut() {
            last.forget(|id| !new.has(id) && self.is_gone(id));
        }
        *lock(&self.counting.durable) = Some(Arc::new(new));
    }

    /// Takes the last counters of a mount that is released.
    /// While it is in the table, it is not forgotten, so nothing counts twice.
    pub(super) fn count_last(&self, id: MountId) {
        let last = self.table().mounts.get(&id).map(counters);
        let Some((id, store, values)) = last else { return };
        if let Some(last) = lock(&self.counting.last).as_mut() {
            last.look(&id, &store, values);
        }
    }

    /// True if there is no such mount, and none will be made of its folder.
    fn is_gone(&self, id: &str) -> bool {
        let is_known = id.parse().is_ok_and(|id: MountId| self.table().mounts.contains_key(&id));
        !is_known && !self.state.mounts().join(id).exists()
    }

    /// The counters of the server's cache, and the process of that server.
    fn cache_figures(&self) -> Option<(u32, CacheValues)> {
        let mut table = self.table();
        let pid = table.server_pid?;
        let number = table.order(CacheOrder::Show)?;
        let waited = self.changed.wait_timeout_while(table, ANSWER_MAX, |table| {
            !table.cache_answers.contains_key(&number) && table.server_pid == Some(pid)
        });
        let mut table = waited.unwrap_or_else(PoisonError::into_inner).0;
        let (answer, failure) = table.take_answer(number)?;
        failure.is_none().then(|| (pid, values(&answer.cache)))
    }
}

fn counters(entry: &MountEntry) -> (String, String, Values) {
    let attach = &entry.record.attach;
    (attach.id.to_string(), attach.store.to_string(), Values::of(entry.slots.counters()))
}

fn values(cache: &HostCache) -> CacheValues {
    CacheValues {
        admitted: cache.admitted,
        refused: cache.refused,
        evicted: cache.evicted,
        written: cache.written,
        doubted: cache.doubted,
        read_errors: cache.read_errors,
        write_errors: cache.write_errors,
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use burgeon_block::{Error, ErrorKind};
    use tracing_subscriber::{
        Layer,
        layer::{Context, SubscriberExt},
    };

    use super::Counting;

    /// The levels of all events.
    struct Levels(Arc<Mutex<Vec<tracing::Level>>>);
    impl<S: tracing::Subscriber> Layer<S> for Levels {
        fn on_event(&self, event: &tracing::Event<'_>, _: Context<'_, S>) {
            self.0.lock().unwrap().push(*event.metadata().level());
        }
    }

    #[test]
    fn an_outage_is_one_event_and_its_end_another() {
        let seen = Arc::new(Mutex::new(Vec::new()));
        let subscriber = tracing_subscriber::registry().with(Levels(seen.clone()));
        tracing::subscriber::with_default(subscriber, || {
            let counting = Counting::default();
            assert!(counting.has_written(Ok(())));
            for _ in 0..3 {
                let full = Error::new(ErrorKind::NoSpace, "the disk is full");
                assert!(!counting.has_written(Err(full)));
            }
            assert!(counting.has_written(Ok(())) && counting.has_written(Ok(())));
        });
        assert_eq!(*seen.lock().unwrap(), [tracing::Level::WARN, tracing::Level::INFO]);
    }
}
