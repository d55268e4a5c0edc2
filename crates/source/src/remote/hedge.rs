use std::{
    future::Future,
    pin::pin,
    sync::atomic::{AtomicI64, AtomicU64, Ordering::Relaxed},
    time::Duration,
};

use burgeon_block::Result;
use futures_util::future::{Either, select};
use tokio::time::{Instant, sleep};

/// Shortest time after which a request counts as slow: below it, a hedge costs more than it can
/// gain.
const PATIENCE_MIN: Duration = Duration::from_millis(100);
/// A request is slow when it takes this many times the average.
const SLOW: u32 = 4;
/// Requests per hedge: at most 1/16 more requests than without.
const REQUESTS_A_HEDGE: i64 = 16;
/// Most hedges that can be saved up.
const SAVED_MAX: i64 = 4;

/// Sends a second request when the first is slow, and takes the first good answer.
#[derive(Debug)]
pub(crate) struct Hedge {
    /// Duration of a request, in microseconds: a moving average in which each new one weighs 1/8.
    /// 0 while unknown. The estimate of a volume (`volume/src/fetch/path.rs`) cannot take its
    /// place: it has the best of late, which all requests exceed fourfold on a busy path, and it
    /// belongs to one image, while the images of a store share this average.
    usual_us: AtomicU64,
    /// Requests not yet spent on a hedge.
    saved: AtomicI64,
}

impl Hedge {
    pub(crate) fn new() -> Self {
        Self { usual_us: AtomicU64::new(0), saved: AtomicI64::new(REQUESTS_A_HEDGE) }
    }

    /// Returns the answer of `ask`; when it is slow, calls `hedged` and asks a second time.
    pub(crate) async fn ask<T, F: Future<Output = Result<T>>>(
        &self,
        ask: impl Fn() -> F,
        hedged: impl FnOnce(),
    ) -> Result<T> {
        let begun = Instant::now();
        let first = pin!(ask());
        let answer = match select(first, pin!(sleep(self.patience()))).await {
            Either::Left((answer, _)) => answer,
            Either::Right(((), first)) if self.may_hedge() => {
                hedged();
                match select(first, pin!(ask())).await {
                    Either::Left((Err(_), other)) => other.await,
                    Either::Right((Err(_), other)) => other.await,
                    Either::Left((answer, _)) | Either::Right((answer, _)) => answer,
                }
            }
            Either::Right(((), first)) => first.await,
        };
        if answer.is_ok() {
            self.note(begun.elapsed());
        }
        answer
    }

    fn patience(&self) -> Duration {
        match self.usual_us.load(Relaxed) {
            // No average yet, and the first request includes making the connection.
            0 => Duration::from_secs(1),
            usual => (Duration::from_micros(usual) * SLOW).max(PATIENCE_MIN),
        }
    }

    fn may_hedge(&self) -> bool {
        let take = |saved| (saved >= REQUESTS_A_HEDGE).then_some(saved - REQUESTS_A_HEDGE);
        self.saved.fetch_update(Relaxed, Relaxed, take).is_ok()
    }

    /// Races between the load and the store only blur an average.
    fn note(&self, took: Duration) {
        let took = u64::try_from(took.as_micros()).unwrap_or(u64::MAX).clamp(1, 1 << 32);
        let usual = match self.usual_us.load(Relaxed) {
            0 => took,
            usual => (usual * 7 + took) / 8,
        };
        self.usual_us.store(usual.max(1), Relaxed);
        let save = |saved| (saved < SAVED_MAX * REQUESTS_A_HEDGE).then_some(saved + 1);
        let _ = self.saved.fetch_update(Relaxed, Relaxed, save);
    }
}

#[cfg(test)]
mod tests {
    use std::{cell::Cell, future::pending, time::Duration};

    use burgeon_block::{Error, ErrorKind, Result};
    use tokio::time::sleep;

    use super::{Hedge, REQUESTS_A_HEDGE};

    /// `answers[n]` is the `n`th answer: its delay in ms, and whether it is good. Returns the
    /// winner and the number of hedges.
    async fn asked(hedge: &Hedge, answers: &[(u64, bool)]) -> (Result<usize>, u32) {
        let (asked, hedges) = (Cell::new(0), Cell::new(0));
        let ask = || {
            let n = asked.replace(asked.get() + 1);
            async move {
                match answers.get(n) {
                    None => pending().await,
                    Some((ms, good)) => {
                        sleep(Duration::from_millis(*ms)).await;
                        good.then_some(n).ok_or_else(|| Error::new(ErrorKind::Unavailable, "no"))
                    }
                }
            }
        };
        let answer = hedge.ask(ask, || hedges.set(hedges.get() + 1)).await;
        (answer, hedges.get())
    }

    #[tokio::test(start_paused = true)]
    async fn slow_requests_are_hedged_and_the_first_good_answer_wins() {
        let hedge = Hedge::new();
        assert!(matches!(asked(&hedge, &[(20, true)]).await, (Ok(0), 0)));
        for (answers, winner) in [
            (&[(90_000, true), (20, true)][..], Some(1)),
            (&[(150, true), (90_000, true)], Some(0)),
            (&[(150, false), (200, true)], Some(1)),
            (&[(300, true), (10, false)], Some(0)),
            (&[(150, false), (200, false)], None),
        ] {
            for _ in 0..REQUESTS_A_HEDGE {
                assert_eq!(asked(&hedge, &[(20, true)]).await.1, 0, "a quick answer is enough");
            }
            let (answer, hedges) = asked(&hedge, answers).await;
            assert_eq!((answer.ok(), hedges), (winner, 1), "{answers:?}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_slow_store_gets_a_bounded_number_of_hedges() {
        let hedge = Hedge::new();
        let mut hedges = 0;
        for n in 0..160 {
            // Alternating, so that the average never catches up.
            let ms = if n % 2 == 0 { 10 } else { 5000 };
            hedges += asked(&hedge, &[(ms, true), (9000, true)]).await.1;
        }
        assert!((1..=160 / REQUESTS_A_HEDGE as u32 + 1).contains(&hedges), "{hedges}");
    }
}
