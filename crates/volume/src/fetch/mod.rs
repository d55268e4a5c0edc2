//! The fetch engine: everything between "these bytes are not resident" and verified bytes.
//!
//! ```text
//!   join_or_start ──► in_flight.rs: one fetch a key ──► permits.rs: bounded memory
//!         │ a new one: its task                              │
//!         ▼                                                  ▼
//!   ask: retry.rs ──► one try: timeout ──► source ──► verify ──► publish ──► waiters
//!         │               ├── outage.rs: deadlines, give-ups, the log
//!         │               └── path.rs: how long an answer takes, how much comes at once
//!         └── wrong: once more; unavailable: again until the deadline
//! ```
//!
//! A [`FetchEngine`] serves one key space: the chunks of an image ([`chunk`], [`run`]), or those
//! of the mapped files of a mount (`area/file.rs`). Bytes that are never cached have no key to
//! share, and come through the same [`FetchEngine::ask`] ([`through`]). Images that have chunks in
//! common wait for each other's fetches in [`shared_keys`].
//!
//! Invariants, and the tests that hold them:
//! - At most one fetch of a key is in flight, and every waiter shares its result; a dropped reader
//!   ends no fetch (held by the simulator and `tests/interleavings.rs`).
//! - Residency is asked once under the table's lock, so a chunk that has just been kept is not
//!   fetched again (`tests/interleavings.rs`).
//! - A reader waits until the deadline of [`outage::Outage`] at most, its wait for a permit
//!   included (`tests/volume.rs`).
//! - Every question to a source goes through [`FetchEngine::ask`] or [`FetchEngine::once`]: one
//!   retry policy, one estimate of the path.

mod cached;
pub(crate) mod chunk;
pub(crate) mod in_flight;
pub(crate) mod outage;
pub(crate) mod path;
pub(crate) mod permits;
pub(crate) mod retry;
pub(crate) mod run;
pub(crate) mod shared_keys;
mod through;

use std::{convert::Infallible, sync::Arc};

use burgeon_block::{BlockSource, ByteRange, Counters, Error, ErrorKind, ObjectId, Result};
use bytes::Bytes;
use tokio::time::{Instant, timeout_at};

use self::{
    in_flight::{InFlight, InFlightTable, Waiter},
    outage::Outage,
    path::PathEstimate,
    permits::{BackgroundPermit, Permit, PermitPool, Permits},
};
use crate::{Budget, VolumeLimits};

/// The fetches of one key space.
pub(crate) struct FetchEngine {
    in_flight: InFlightTable,
    pub(crate) permits: PermitPool,
    pub(crate) background_permits: PermitPool,
    pub(crate) outage: Outage,
    pub(crate) path: PathEstimate,
    /// Counters of the fetches that no reader claims.
    pub(crate) unclaimed: Arc<Counters>,
    limits: VolumeLimits,
}

/// Result of joining or starting the fetch of a key.
pub(crate) enum Joined<P = Infallible> {
    /// Its bytes are resident, here.
    Resident(P),
    /// It is in flight.
    InFlight(Waiter),
    /// It would have to be fetched, and there is no permit now.
    NoPermit,
}

/// A fetch that has begun: the state that its task owns.
pub(crate) struct Begun {
    pub(crate) in_flight: InFlight,
    pub(crate) permits: Permits,
    /// When it is given up.
    pub(crate) deadline: Instant,
}

impl FetchEngine {
    pub(crate) fn new(limits: &VolumeLimits) -> Self {
        let shared = &limits.shared;
        Self {
            in_flight: InFlightTable::default(),
            permits: PermitPool::new(limits.fetches_max, shared.fetches.clone()),
            background_permits: PermitPool::new(
                limits.background_fetches,
                shared.background.clone(),
            ),
            outage: Outage::new(limits),
            path: PathEstimate::default(),
            unclaimed: Arc::default(),
            limits: limits.clone(),
        }
    }

    /// Fetches in flight now.
    pub(crate) fn in_flight(&self) -> usize {
        self.in_flight.len()
    }

    /// Joins the fetch of `key`, finds its bytes with `resident`, or starts a fetch with `start`,
    /// which takes `permit` if there is one. For a reader: refused for a while after a give-up.
    pub(crate) fn join_or_start<P>(
        &self,
        key: u64,
        permit: Option<Permit>,
        deadline: Instant,
        resident: impl FnOnce() -> Option<P>,
        start: impl FnOnce(Begun),
    ) -> Result<Joined<P>> {
        let taken = || permit.or_else(|| self.permits.try_take());
        self.join_or_begin(key, deadline, resident, start, || {
            self.outage.check(key)?;
            Ok(taken().map(|permit| Permits::new(permit, None)))
        })
    }

    /// The same, but waits for a permit until the deadline of a reader that came at `arrived`.
    pub(crate) async fn join_or_start_patiently<P>(
        &self,
        key: u64,
        arrived: Instant,
        resident: impl Fn() -> Option<P>,
        start: impl Fn(Begun),
    ) -> Result<Joined<P>> {
        let mut permit = None;
        loop {
            let deadline = self.outage.deadline(arrived);
            match self.join_or_start(key, permit.take(), deadline, &resident, &start)? {
                Joined::NoPermit => {}
                joined => return Ok(joined),
            }
            permit = match timeout_at(deadline, self.permits.take()).await {
                Ok(permit) => permit,
                // Others have got good bytes meanwhile.
                Err(_) if self.outage.deadline(arrived) > deadline => continue,
                Err(_) => return Err(self.outage.no_permit()),
            };
        }
    }

    /// The same for background work: a new fetch takes `background`, and waits for its other
    /// permit without end.
    pub(crate) async fn join_or_start_in_background<P>(
        &self,
        key: u64,
        background: Option<BackgroundPermit>,
        resident: impl Fn() -> Option<P>,
        start: impl Fn(Begun),
    ) -> Joined<P> {
        let (mut permit, mut background) = (None, background);
        loop {
            let deadline = self.outage.deadline(Instant::now());
            let permits = || {
                let fetch = permit.take().or_else(|| self.permits.try_take());
                Ok(fetch.map(|fetch| Permits::new(fetch, background.take())))
            };
            match self.join_or_begin(key, deadline, &resident, &start, permits) {
                Ok(Joined::NoPermit) | Err(_) => permit = self.permits.take().await,
                Ok(joined) => return joined,
            }
        }
    }

    /// Both permits of a background fetch, if there are some now.
    pub(crate) fn try_background_permits(&self, payer: Option<Arc<Budget>>) -> Option<Permits> {
        let permit = self.background_permits.try_take()?;
        let fetch = self.permits.try_take()?;
        Some(Permits::new(fetch, Some(BackgroundPermit::new(permit, payer))))
    }

    /// Begins a fetch of `key` if it is neither resident nor in flight.
    pub(crate) fn begin_new<P>(
        &self,
        key: u64,
        permits: Permits,
        resident: impl FnOnce() -> Option<P>,
    ) -> Option<Begun> {
        let deadline = self.outage.deadline(Instant::now());
        let mut begun = None;
        // Neither can the permits be missing, nor has a reader to be refused.
        let _ = self.join_or_begin(
            key,
            deadline,
            resident,
            |new| begun = Some(new),
            || Ok(Some(permits)),
        );
        begun
    }

    /// The one place that decides who fetches.
    fn join_or_begin<P>(
        &self,
        key: u64,
        deadline: Instant,
        resident: impl FnOnce() -> Option<P>,
        start: impl FnOnce(Begun),
        permits: impl FnOnce() -> Result<Option<Permits>>,
    ) -> Result<Joined<P>> {
        let mut table = self.in_flight.lock();
        if let Some(waiter) = table.join(key) {
            return Ok(Joined::InFlight(waiter));
        }
        if let Some(place) = resident() {
            return Ok(Joined::Resident(place));
        }
        let Some(permits) = permits()? else { return Ok(Joined::NoPermit) };
        let (in_flight, waiter) = table.insert(key);
        drop(table);
        start(Begun { in_flight, permits, deadline });
        Ok(Joined::InFlight(waiter))
    }
}

/// The bytes of `range` of `object`, as many as were asked for.
pub(crate) async fn read_object(
    source: &impl BlockSource,
    object: &ObjectId,
    range: ByteRange,
) -> Result<Bytes> {
    let bytes = source.read(object, range).await?;
    check_len(object, range, &bytes).map(|()| bytes)
}

/// Refuses an answer that is not as long as it was asked to be.
pub(crate) fn check_len(object: &ObjectId, range: ByteRange, bytes: &Bytes) -> Result<()> {
    if bytes.len() as u64 == range.len() {
        return Ok(());
    }
    let message = format!("{} gave {} bytes for {range}", object.shown(), bytes.len());
    Err(Error::new(ErrorKind::Corrupt, message))
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use burgeon_block::{Error, ErrorKind, Pages};
    use tokio::time::Instant;

    use super::{
        Begun, FetchEngine, Joined,
        in_flight::{Cost, Fetched},
    };
    use crate::{SharedPermits, VolumeLimits};

    /// An engine with permits for `fetches` fetches, and the fetches that it has begun.
    struct Setup {
        engine: FetchEngine,
        begun: Mutex<Vec<Begun>>,
        limits: VolumeLimits,
    }

    impl Setup {
        fn new(fetches: usize) -> Self {
            let shared = SharedPermits::new(fetches, fetches);
            let limits = VolumeLimits { shared, ..VolumeLimits::default() };
            Self { engine: FetchEngine::new(&limits), begun: Mutex::default(), limits }
        }

        fn start(&self, begun: Begun) {
            self.begun.lock().unwrap().push(begun);
        }

        fn begun(&self) -> usize {
            self.begun.lock().unwrap().len()
        }

        fn now(&self, key: u64, resident: Option<u8>) -> burgeon_block::Result<Joined<u8>> {
            let deadline = self.engine.outage.deadline(Instant::now());
            let start = |begun| self.start(begun);
            self.engine.join_or_start(key, None, deadline, || resident, start)
        }

        async fn patiently(&self, key: u64) -> burgeon_block::Result<Joined<u8>> {
            let start = |begun| self.start(begun);
            self.engine.join_or_start_patiently(key, Instant::now(), || None, start).await
        }

        /// Ends the fetch that was begun last.
        fn end(&self) {
            let Begun { in_flight, permits, .. } = self.begun.lock().unwrap().pop().unwrap();
            let unclaimed = self.engine.unclaimed.clone();
            let pages = Ok(Pages::zeroed(4096).unwrap());
            let fetched = Fetched::new(pages, Cost::default(), unclaimed, permits);
            in_flight.publish(fetched.into());
            in_flight.end(true);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_second_wish_joins_the_first_and_resident_bytes_start_nothing() {
        let setup = Setup::new(4);
        assert!(matches!(setup.now(1, Some(9)), Ok(Joined::Resident(9))));
        let Ok(Joined::InFlight(mut first)) = setup.now(1, None) else { panic!("not started") };
        // In flight comes before resident: its bytes are newer.
        let Ok(Joined::InFlight(mut second)) = setup.now(1, Some(9)) else { panic!("not joined") };
        assert_eq!((setup.begun(), setup.engine.in_flight()), (1, 1));
        setup.end();
        for waiter in [&mut first, &mut second] {
            assert_eq!(waiter.fetched().await.unwrap().bytes().unwrap().len(), 4096);
        }
        assert!(first.ended().await);
        assert_eq!(setup.engine.in_flight(), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn without_a_permit_a_patient_reader_waits_and_another_does_not() {
        let setup = Setup::new(1);
        let Ok(Joined::InFlight(_)) = setup.now(1, None) else { panic!("not started") };
        assert!(matches!(setup.now(2, None), Ok(Joined::NoPermit)));
        let start = Instant::now();
        let error = setup.patiently(2).await.err().expect("there is no permit");
        assert_eq!(error.kind(), ErrorKind::Unavailable);
        assert_eq!(start.elapsed(), setup.limits.deadline);
        let ends = async {
            tokio::time::sleep(setup.limits.deadline / 2).await;
            setup.end();
        };
        let (joined, ()) = tokio::join!(setup.patiently(2), ends);
        assert!(matches!(joined, Ok(Joined::InFlight(_))));
        assert_eq!(setup.begun(), 1);
    }

    #[tokio::test(start_paused = true)]
    async fn after_a_give_up_readers_are_refused_for_a_moment_and_background_work_is_not() {
        let setup = Setup::new(4);
        let away = Error::new(ErrorKind::Unavailable, "away");
        setup.engine.outage.gave_up(Some(1), None, &away, true);
        assert_eq!(setup.now(1, None).err().map(|error| error.kind()), Some(away.kind()));
        assert!(matches!(setup.now(2, None), Ok(Joined::InFlight(_))));
        let permits = setup.engine.try_background_permits(None).unwrap();
        let begun = setup.engine.begin_new(1, permits, || None::<u8>);
        assert!(begun.is_some(), "background work may ask");
        drop(begun);
        tokio::time::sleep(setup.limits.given_up_for).await;
        assert!(matches!(setup.now(1, None), Ok(Joined::InFlight(_))));
    }

    #[tokio::test(start_paused = true)]
    async fn background_work_joins_without_a_permit_and_leaves_some_to_readers() {
        let setup = Setup::new(1);
        let Ok(Joined::InFlight(_)) = setup.now(1, None) else { panic!("not started") };
        let start = |begun| setup.start(begun);
        let background = &setup.engine;
        let joined = background.join_or_start_in_background(1, None, || None::<u8>, start).await;
        assert!(matches!(joined, Joined::InFlight(_)));
        assert_eq!(setup.begun(), 1);
        assert!(background.try_background_permits(None).is_none());
        assert!(background.background_permits.try_take().is_some(), "it was given back");
    }
}
