//! The gate before the cache's writes: closed by a failed one for a while.
//!
//! ```text
//!   open ── a write fails ──► closed ── the pause is over ──► one more try ── succeeds ──► open
//!                               └── it fails again: the pause doubles, up to its maximum
//! ```
//!
//! Invariant: a failing file system sees at most one failing write a pause, beside those in flight
//! (`tests::the_pause_doubles_until_a_write_succeeds`).

use std::{
    sync::{Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use burgeon_block::{Error, ErrorKind};

use crate::CacheState;

struct Closed {
    until: Instant,
    pause: Duration,
    state: CacheState,
}

pub(crate) struct Gate {
    closed: Mutex<Option<Closed>>,
    pause_min: Duration,
    pause_max: Duration,
}

impl Gate {
    pub(crate) fn new(pause_min: Duration, pause_max: Duration) -> Self {
        Self { closed: Mutex::new(None), pause_min, pause_max }
    }

    fn guard(&self) -> MutexGuard<'_, Option<Closed>> {
        self.closed.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// True if a write may be tried.
    pub(crate) fn is_open(&self) -> bool {
        self.guard().as_ref().is_none_or(|closed| Instant::now() >= closed.until)
    }

    pub(crate) fn state(&self) -> CacheState {
        self.guard().as_ref().map_or(CacheState::Writing, |closed| closed.state.clone())
    }

    /// A write succeeded.
    pub(crate) fn written(&self) {
        let mut closed = self.guard();
        // Writes that were in flight when the gate closed prove nothing.
        if closed.as_ref().is_some_and(|closed| Instant::now() >= closed.until) {
            tracing::info!("the cache is written again");
            *closed = None;
        }
    }

    /// A write failed with `error`.
    pub(crate) fn close(&self, error: &Error) {
        let reason = error.to_string();
        let state = match error.kind() {
            ErrorKind::NoSpace => CacheState::NoSpace { reason },
            _ => CacheState::Stopped { reason },
        };
        let now = Instant::now();
        let mut closed = self.guard();
        let pause = match closed.as_ref() {
            None => {
                let pause = self.pause_min;
                tracing::warn!(%error, ?pause, "caching is paused");
                pause
            }
            Some(closed) if now < closed.until => return,
            Some(closed) => (closed.pause * 2).min(self.pause_max),
        };
        *closed = Some(Closed { until: now + pause, pause, state });
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use burgeon_block::{Error, ErrorKind};

    use super::Gate;
    use crate::CacheState;

    #[test]
    fn the_pause_doubles_until_a_write_succeeds() {
        let gate = Gate::new(Duration::from_secs(10), Duration::from_secs(35));
        let expire = || gate.guard().as_mut().unwrap().until = Instant::now();
        let full = Error::new(ErrorKind::NoSpace, "full");
        for pause in [10, 20, 35, 35] {
            gate.close(&full);
            gate.close(&full);
            gate.written();
            assert!(!gate.is_open(), "writes in flight prove nothing");
            assert_eq!(gate.guard().as_ref().unwrap().pause, Duration::from_secs(pause));
            assert_eq!(gate.state(), CacheState::NoSpace { reason: "full".into() });
            expire();
            assert!(gate.is_open());
        }
        gate.written();
        assert_eq!(gate.state(), CacheState::Writing);
        gate.close(&Error::new(ErrorKind::LocalIo, "broken"));
        assert_eq!(gate.state(), CacheState::Stopped { reason: "broken".into() });
    }
}
