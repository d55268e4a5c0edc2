//! The retry policy, for every request to a source.
//!
//! ```text
//!   try ──► answer ──► verified ──► done
//!    ▲        │          └── LocalIo: this host fails, given up at once
//!    │        │          └── wrong:   asked once more (`VolumeLimits::refetches`), then given up
//!    └────────┴── unavailable: again after 0.05, 0.1, … 2 s, until the deadline
//! ```
//!
//! Invariant: a try ends after `VolumeLimits::try_timeout` and all of them at the deadline (held
//! by the simulator and `tests`).

use std::time::Duration;

use burgeon_block::{ByteRange, Error, ErrorKind, ObjectId, Result};
use tokio::time::{Instant, sleep, timeout};

use super::{FetchEngine, in_flight::Cost};
use crate::VolumeLimits;

/// A request to a source, and how its answer is verified.
pub(crate) trait FetchRequest: Send {
    /// The source's answer: as many bytes as were asked for.
    type Answer: Send;
    /// The answer after its verification.
    type Verified: Send;

    /// The key for which a give-up is remembered.
    fn key(&self) -> Option<u64>;

    /// The bytes that are asked for, named for an error.
    fn name(&self) -> String;

    /// The requested range, for the log, if it is a range of one object.
    fn asked(&self) -> Option<(&ObjectId, ByteRange)> {
        None
    }

    /// Bytes that are asked for.
    fn len_asked(&self) -> u64;

    /// Of these, bytes that the source has to fetch over the path that [`super::path`] estimates.
    fn bytes_to_fetch(&self) -> u64 {
        0
    }

    /// True if the next answer shows whether the last one, which was found wrong, was. The request
    /// then reports it itself.
    fn is_disputed(&self) -> bool {
        false
    }

    /// Asks the source once. Dropped when it takes too long.
    fn ask(&mut self) -> impl Future<Output = Result<Self::Answer>> + Send;

    /// `Corrupt` if the source is to blame, `LocalIo` if this host is.
    fn verify(
        &mut self,
        answer: Self::Answer,
    ) -> impl Future<Output = Result<Self::Verified>> + Send;
}

impl FetchEngine {
    /// The verified answer to `request`, which is asked as often as the policy allows, until
    /// `deadline`. Fetches, bytes and errors are added to `cost`.
    pub(crate) async fn ask<Q: FetchRequest>(
        &self,
        request: &mut Q,
        deadline: Instant,
        cost: &mut Cost,
    ) -> Result<Q::Verified> {
        let mut tries = Tries::new(&self.limits, deadline);
        loop {
            let (len, to_fetch) = (request.len_asked(), request.bytes_to_fetch());
            let error = match self.once(len, to_fetch, deadline, request.ask(), cost).await {
                Ok(answer) => match self.verify(request, answer, cost).await {
                    Ok(verified) => return Ok(verified),
                    Err(error) if error.kind() == ErrorKind::LocalIo => {
                        self.outage.gave_up(request.key(), request.asked(), &error, false);
                        return Err(error);
                    }
                    Err(error) => error,
                },
                Err(error) => error,
            };
            if error.kind() != ErrorKind::Corrupt || !request.is_disputed() {
                self.outage.note(request.asked(), &error);
            }
            let again = tries.after(error, request.name()).await;
            again.inspect_err(|error| {
                let (key, asked) = (request.key(), request.asked());
                self.outage.gave_up(key, asked, error, tries.timed_out);
            })?;
        }
    }

    /// One try: the answer of `asking` for `len` bytes, `to_fetch` of which have to be fetched.
    /// `Unavailable` if it takes too long.
    pub(crate) async fn once<T>(
        &self,
        len: u64,
        to_fetch: u64,
        deadline: Instant,
        asking: impl Future<Output = Result<T>>,
        cost: &mut Cost,
    ) -> Result<T> {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(Error::new(ErrorKind::Unavailable, "there is no time left to ask"));
        }
        let patience = self.limits.try_timeout.min(left);
        let sent = self.path.sent(to_fetch, Instant::now());
        let answer = timeout(patience, asking).await.unwrap_or_else(|_| {
            let message = format!("no answer within {:.1} s", patience.as_secs_f64());
            Err(Error::new(ErrorKind::Unavailable, message))
        });
        match &answer {
            Ok(_) => {
                self.path.answered(&sent, Instant::now());
                cost.fetched_bytes += len;
            }
            Err(_) => cost.source_errors += 1,
        }
        answer
    }

    /// Verifies an answer, and counts it.
    pub(crate) async fn verify<Q: FetchRequest>(
        &self,
        request: &mut Q,
        answer: Q::Answer,
        cost: &mut Cost,
    ) -> Result<Q::Verified> {
        let verified = request.verify(answer).await;
        match &verified {
            Ok(_) => {
                cost.fetches += 1;
                self.outage.good();
            }
            Err(error) if error.kind() == ErrorKind::Corrupt => {
                cost.source_corrupt_chunks += 1;
                if !request.is_disputed() {
                    self.outage.wrong(request.asked(), error);
                }
            }
            Err(_) => {}
        }
        verified
    }
}

/// The tries of one request.
struct Tries {
    deadline: Instant,
    pause: Duration,
    pause_max: Duration,
    refetches: u32,
    tries: u32,
    /// True if the deadline has ended them.
    timed_out: bool,
}

impl Tries {
    fn new(limits: &VolumeLimits, deadline: Instant) -> Self {
        Self {
            deadline,
            pause: limits.backoff_min,
            pause_max: limits.backoff_max,
            refetches: limits.refetches,
            tries: 1,
            timed_out: false,
        }
    }

    /// Waits until the next try is due, or returns `error` as the last word.
    async fn after(&mut self, error: Error, name: String) -> Result<()> {
        self.tries += 1;
        if error.kind() == ErrorKind::Unavailable {
            if Instant::now() + self.pause < self.deadline {
                sleep(self.pause).await;
                self.pause = (self.pause * 2).min(self.pause_max);
                return Ok(());
            }
            self.timed_out = true;
        } else if self.refetches > 0 {
            self.refetches -= 1;
            return Ok(());
        }
        // Readers of a device understand EIO: a missing pack is no ENOENT to them.
        let kind = match error.kind() {
            kind @ (ErrorKind::Corrupt | ErrorKind::LocalIo) => kind,
            _ => ErrorKind::Unavailable,
        };
        let message = format!("cannot fetch {name}, given up after {} tries", self.tries - 1);
        Err(Error::with_source(kind, message, error))
    }
}

#[cfg(test)]
mod tests {
    use std::{collections::VecDeque, future::pending};

    use burgeon_block::{Error, ErrorKind, Result};
    use tokio::time::Instant;

    use super::{Cost, FetchEngine, FetchRequest};
    use crate::VolumeLimits;

    /// End of a try.
    #[derive(Clone, Copy)]
    enum End {
        Good,
        Fails(ErrorKind),
        Wrong(ErrorKind),
        Silence,
    }

    /// A source that answers as told, and then always as told last.
    struct Scripted(VecDeque<End>);

    impl FetchRequest for Scripted {
        type Answer = End;
        type Verified = ();

        fn key(&self) -> Option<u64> {
            Some(7)
        }

        fn name(&self) -> String {
            "what was told".to_owned()
        }

        fn len_asked(&self) -> u64 {
            100
        }

        async fn ask(&mut self) -> Result<End> {
            let last = self.0.back().copied().unwrap();
            match if self.0.len() > 1 { self.0.pop_front().unwrap() } else { last } {
                End::Fails(kind) => Err(Error::new(kind, "told to fail")),
                End::Silence => pending().await,
                end => Ok(end),
            }
        }

        async fn verify(&mut self, answer: End) -> Result<()> {
            match answer {
                End::Wrong(kind) => Err(Error::new(kind, "told to be wrong")),
                _ => Ok(()),
            }
        }
    }

    async fn ask(ends: &[End]) -> (Result<()>, Cost, FetchEngine) {
        let limits = VolumeLimits::default();
        let engine = FetchEngine::new(&limits);
        let mut cost = Cost::default();
        let deadline = Instant::now() + limits.deadline;
        let mut source = Scripted(ends.iter().copied().collect());
        let answer = engine.ask(&mut source, deadline, &mut cost).await;
        (answer, cost, engine)
    }

    #[tokio::test(start_paused = true)]
    async fn a_wrong_answer_is_asked_for_once_more() {
        let wrong = End::Wrong(ErrorKind::Corrupt);
        let (answer, cost, _) = ask(&[wrong, End::Good]).await;
        answer.unwrap();
        assert_eq!((cost.fetches, cost.fetched_bytes, cost.source_corrupt_chunks), (1, 200, 1));
        let (answer, cost, engine) = ask(&[wrong]).await;
        assert_eq!(answer.unwrap_err().kind(), ErrorKind::Corrupt);
        assert_eq!((cost.fetches, cost.source_corrupt_chunks), (0, 2));
        engine.outage.check(7).expect("a wrong answer is no outage");
    }

    #[tokio::test(start_paused = true)]
    async fn a_source_that_is_away_is_asked_until_the_deadline() {
        for end in [End::Fails(ErrorKind::Unavailable), End::Silence] {
            let (start, limits) = (Instant::now(), VolumeLimits::default());
            let (answer, cost, engine) = ask(&[end]).await;
            assert_eq!(answer.unwrap_err().kind(), ErrorKind::Unavailable);
            assert!(start.elapsed() <= limits.deadline);
            assert!(start.elapsed() + limits.try_timeout >= limits.deadline);
            assert!(cost.source_errors >= 3, "{cost:?}");
            engine.outage.check(7).expect_err("it is not asked for again at once");
        }
        let (answer, cost, _) = ask(&[End::Fails(ErrorKind::Unavailable), End::Good]).await;
        answer.unwrap();
        assert_eq!((cost.fetches, cost.source_errors), (1, 1));
    }

    #[tokio::test(start_paused = true)]
    async fn a_failure_of_this_host_is_not_asked_for_again() {
        let (answer, cost, _) = ask(&[End::Wrong(ErrorKind::LocalIo), End::Good]).await;
        assert_eq!(answer.unwrap_err().kind(), ErrorKind::LocalIo);
        assert_eq!((cost.fetched_bytes, cost.source_corrupt_chunks), (100, 0));
        let (answer, _, _) = ask(&[End::Fails(ErrorKind::NotFound), End::Good]).await;
        answer.unwrap();
    }
}
