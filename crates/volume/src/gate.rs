//! The gate before the file of recorded checksums: closed by a failed write, for good or for a
//! while. The cache has a gate of its own.
//!
//! ```text
//!   open ── no space ──► paused ── the pause is over, a write succeeds ──► open
//!     │                    └── it fails again: the pause doubles, up to its maximum
//!     └──── any other error ──► stopped, until the image is mounted again
//! ```
//!
//! Invariant: a file that failed is never written again
//! (`tests::a_failed_file_is_not_written_again`), and a full file system sees at most one failing
//! write a pause (`tests::the_pause_doubles_until_space_is_back`).

use std::{
    sync::{Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use burgeon_block::{Error, ErrorKind};
use tokio::time::Instant;

use crate::{CacheState, VolumeLimits};

enum State {
    Open,
    Paused { until: Instant, pause: Duration, reason: String },
    Stopped { reason: String },
}

pub(crate) struct Gate {
    state: Mutex<State>,
    pause_min: Duration,
    pause_max: Duration,
}

impl Gate {
    pub(crate) fn new(limits: &VolumeLimits) -> Self {
        let (pause_min, pause_max) = (limits.no_space_pause_min, limits.no_space_pause_max);
        Self { state: Mutex::new(State::Open), pause_min, pause_max }
    }

    fn guard(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn is_open(&self) -> bool {
        match &*self.guard() {
            State::Open => true,
            State::Paused { until, .. } => Instant::now() >= *until,
            State::Stopped { .. } => false,
        }
    }

    pub(crate) fn state(&self) -> CacheState {
        match &*self.guard() {
            State::Open => CacheState::Writing,
            State::Paused { reason, .. } => CacheState::NoSpace { reason: reason.clone() },
            State::Stopped { reason } => CacheState::Stopped { reason: reason.clone() },
        }
    }

    /// A write succeeded: there is space again.
    pub(crate) fn written(&self) {
        let mut state = self.guard();
        if matches!(*state, State::Paused { .. }) {
            *state = State::Open;
        }
    }

    /// A write failed with `error`.
    pub(crate) fn close(&self, error: &Error) {
        let reason = error.to_string();
        let mut state = self.guard();
        if error.kind() != ErrorKind::NoSpace {
            *state = State::Stopped { reason };
            return;
        }
        let now = Instant::now();
        let pause = match &*state {
            State::Stopped { .. } => return,
            State::Open => self.pause_min,
            // Several writes were in flight when the space ended: that doubles the pause once.
            State::Paused { until, .. } if now < *until => return,
            State::Paused { pause, .. } => (*pause * 2).min(self.pause_max),
        };
        *state = State::Paused { until: now + pause, pause, reason };
    }
}

#[cfg(test)]
mod tests {
    use burgeon_block::{Error, ErrorKind};
    use tokio::time::{Duration, Instant, advance};

    use super::Gate;
    use crate::{CacheState, VolumeLimits};

    fn full() -> Error {
        Error::new(ErrorKind::NoSpace, "full")
    }

    #[tokio::test(start_paused = true)]
    async fn the_pause_doubles_until_space_is_back() {
        let limits = VolumeLimits::default();
        let gate = Gate::new(&limits);
        let mut pause = limits.no_space_pause_min;
        for _ in 0..10 {
            gate.close(&full());
            // Writes that were in flight fail, too.
            gate.close(&full());
            let closed = Instant::now();
            while !gate.is_open() {
                advance(Duration::from_millis(500)).await;
            }
            assert_eq!(closed.elapsed(), pause);
            pause = (pause * 2).min(limits.no_space_pause_max);
        }
        assert_eq!(gate.state(), CacheState::NoSpace { reason: "full".into() });
        gate.written();
        assert_eq!(gate.state(), CacheState::Writing);
    }

    #[tokio::test(start_paused = true)]
    async fn a_failed_file_is_not_written_again() {
        let gate = Gate::new(&VolumeLimits::default());
        gate.close(&Error::new(ErrorKind::LocalIo, "broken"));
        gate.close(&full());
        gate.written();
        advance(Duration::from_secs(1 << 20)).await;
        assert!(!gate.is_open());
        assert_eq!(gate.state(), CacheState::Stopped { reason: "broken".into() });
    }
}
