//! The thread of a server that writes dirty blocks back.
//!
//! ```text
//!   each second ──► what is older, or more, than the limits say ──► the slow device, by address
//!                   pause: auto   at once while nobody else uses the slow device; else a fifth of the time
//!                          rate   so many bytes a second
//!   an error ──► kept for `status`; again after 2, 4, 8, 10 s
//! ```
//!
//! Invariant: it ends soon after it is told to, whatever the throttle says; what is left stays in
//! the log.

use std::{
    sync::{
        Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering::SeqCst},
    },
    time::{Duration, Instant},
};

use burgeon_accelerate::{CacheStore, DirtyLimits, Moment, Throttle};
use burgeon_block::{Error, ErrorKind, Result};
use serde::{Deserialize, Serialize};

use crate::disk::Disk;

/// Time between two looks.
const LOOK: Duration = Duration::from_secs(1);
/// The longest time between two attempts after errors.
const RETRY_MAX: Duration = Duration::from_secs(10);
/// Time between two looks within a pause.
const SLICE: Duration = Duration::from_millis(5);
/// Beside other users, the writing back takes one part of so many of the time.
const PARTS: u32 = 5;
/// The longest pause.
const PAUSE_MAX: Duration = Duration::from_secs(1);

/// Settings of the writing back, of the whole cache.
#[derive(Serialize, Deserialize, Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct WriteBackSettings {
    /// Percentage of the log from which on it is written back.
    pub(crate) percent: u8,
    /// Age in seconds from which on it is.
    pub(crate) seconds: u64,
    /// Bytes a second; 0 for as many as the slow device's idle time allows.
    pub(crate) rate: u64,
}

impl Default for WriteBackSettings {
    fn default() -> Self {
        let DirtyLimits { percent, seconds } = DirtyLimits::default();
        Self { percent, seconds, rate: 0 }
    }
}

/// The writing back of a server.
pub(crate) struct WritingBack {
    begun: Instant,
    state: Mutex<State>,
    ending: Condvar,
    is_ending: AtomicBool,
}

struct State {
    settings: WriteBackSettings,
    /// Everything is written back at once: nobody keeps the requests of a successor.
    is_all: bool,
    error: Option<String>,
}

impl WritingBack {
    pub(crate) fn new(settings: WriteBackSettings) -> Self {
        let state = State { settings, is_all: false, error: None };
        Self {
            begun: Instant::now(),
            state: Mutex::new(state),
            ending: Condvar::new(),
            is_ending: AtomicBool::new(false),
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // No code that can panic runs under this lock.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn settings(&self) -> WriteBackSettings {
        self.state().settings
    }

    pub(crate) fn set(&self, settings: WriteBackSettings) {
        self.state().settings = settings;
    }

    /// From now on, everything is written back as soon as possible.
    pub(crate) fn write_all(&self) {
        self.state().is_all = true;
    }

    /// The error of the last attempt.
    pub(crate) fn error(&self) -> Option<String> {
        self.state().error.clone()
    }

    /// Seconds of the clock by which dirty blocks have their age.
    pub(crate) fn now(&self) -> u64 {
        self.begun.elapsed().as_secs()
    }

    /// Has [`Self::run`] return.
    pub(crate) fn end(&self) {
        self.is_ending.store(true, SeqCst);
        // It has either seen that, or waits.
        drop(self.state());
        self.ending.notify_all();
    }

    /// Until [`Self::end`].
    pub(crate) fn run(&self, store: &CacheStore<Disk>) {
        let mut wait = LOOK;
        while !self.is_ending.load(SeqCst) {
            let (limits, rate) = {
                let State { settings, is_all, .. } = *self.state();
                match is_all {
                    true => (DirtyLimits { percent: 0, seconds: 0 }, u64::MAX),
                    false => {
                        let WriteBackSettings { percent, seconds, rate } = settings;
                        (DirtyLimits { percent, seconds }, rate)
                    }
                }
            };
            let throttle = Throttled { of: self, rate, last: Mutex::new((Instant::now(), 0, 0)) };
            let done = store.write_back_throttled(limits, self.now(), &throttle);
            wait = match &done {
                Ok(true) => Duration::ZERO,
                Ok(false) => LOOK,
                Err(_) if wait < LOOK => LOOK,
                Err(_) => (2 * wait).min(RETRY_MAX),
            };
            let error = done.err().map(|error| error.to_string());
            let mut state = self.state();
            if self.is_ending.load(SeqCst) {
                return;
            }
            if let Some(error) = error.as_ref().filter(|error| state.error.as_ref() != Some(error))
            {
                tracing::error!(%error, "dirty blocks are not written back, and stay in the cache");
            }
            state.error = error;
            drop(self.ending.wait_timeout(state, wait));
        }
    }
}

/// The throttle of one round.
struct Throttled<'a> {
    of: &'a WritingBack,
    rate: u64,
    /// The end of the last pause, the bytes of the write behind it, and the users' requests until
    /// then.
    last: Mutex<(Instant, u64, u64)>,
}

/// The pause before the next write, after one that took `took` for `bytes`.
fn pause_after(took: Duration, bytes: u64, rate: u64, is_used: bool) -> Duration {
    let pause = match rate {
        0 if is_used => took * (PARTS - 1),
        0 | u64::MAX => Duration::ZERO,
        rate => Duration::from_secs_f64(bytes as f64 / rate as f64).saturating_sub(took),
    };
    pause.min(PAUSE_MAX)
}

impl Throttle for Throttled<'_> {
    fn pause(&self, moment: &Moment<'_>) -> Result<()> {
        let last = || self.last.lock().unwrap_or_else(PoisonError::into_inner);
        let (begun, bytes, requests) = *last();
        let is_used = moment.load.in_flight() > 0 || moment.load.begun() != requests;
        let pause = pause_after(begun.elapsed(), bytes, self.rate, is_used && bytes > 0);
        let until = Instant::now() + pause;
        loop {
            if self.of.is_ending.load(SeqCst) {
                return Err(Error::new(
                    ErrorKind::Unavailable,
                    "the server of the cache is ending",
                ));
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() || moment.waiting.load(SeqCst) > 0 {
                break;
            }
            std::thread::sleep(left.min(SLICE));
        }
        *last() = (Instant::now(), moment.bytes, moment.load.begun());
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::{PAUSE_MAX, pause_after};

    #[test]
    fn the_throttle_follows_the_users_or_the_rate() {
        let took = Duration::from_millis(10);
        assert_eq!(pause_after(took, 1 << 20, 0, false), Duration::ZERO);
        assert_eq!(pause_after(took, 1 << 20, 0, true), Duration::from_millis(40));
        assert_eq!(pause_after(took, 1 << 20, 10 << 20, true), Duration::from_millis(90));
        assert_eq!(pause_after(took, 1 << 20, 1 << 40, false), Duration::ZERO);
        assert_eq!(pause_after(took, 1 << 20, u64::MAX, true), Duration::ZERO);
        assert_eq!(pause_after(took, 1 << 30, 1, true), PAUSE_MAX);
    }
}
