//! Bodies of HTTP answers, each with a maximum size and a minimum rate.
//!
//! ```text
//!   network ──► Bounded: counts bytes, and the time spent waiting ──► web, registry, wire
//!                  │ more than `len_max` bytes               ──► Excess::TooLong
//!                  └ too few bytes in a window of waiting    ──► Excess::TooSlow
//! ```
//!
//! Invariants: the reader never gets a part that makes the body longer than its maximum; only time
//! in which the reader waits counts, so a slow reader never makes the server look slow.

use std::{
    error, fmt,
    future::{Future, poll_fn},
    pin::Pin,
    task::{Context, Poll},
    time::Duration,
};

use burgeon_block::ErrorKind;
use bytes::{Bytes, BytesMut};
use http_body::{Body, Frame};
use tokio::time::{Instant, Sleep, sleep_until};

/// Time of waiting over which the rate is measured.
pub(crate) const WINDOW: Duration = Duration::from_secs(30);
/// Fewest bytes that must arrive in a [`WINDOW`]: about 1 KiB/s, a fifth of an old modem.
pub(crate) const WINDOW_BYTES: u64 = 32 << 10;

/// The bound that a body exceeds.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Excess {
    /// It is longer than this many bytes.
    TooLong(u64),
    /// Fewer than [`WINDOW_BYTES`] arrived in a [`WINDOW`].
    TooSlow,
}

impl Excess {
    /// The error kind for the reader.
    pub(crate) fn kind(self) -> ErrorKind {
        match self {
            Self::TooLong(_) => ErrorKind::Corrupt,
            Self::TooSlow => ErrorKind::Unavailable,
        }
    }
}

impl fmt::Display for Excess {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::TooLong(len_max) => {
                write!(f, "the answer has more than {len_max} bytes")
            }
            Self::TooSlow => write!(
                f,
                "the answer is too slow: less than {} KiB in {} s",
                WINDOW_BYTES >> 10,
                WINDOW.as_secs()
            ),
        }
    }
}

impl error::Error for Excess {}

/// Why reading a body failed.
#[derive(Debug)]
pub(crate) enum Failed<E> {
    /// It exceeds a bound.
    Excess(Excess),
    /// The connection broke before its end.
    Broken(E),
}

/// A body with bounds.
#[derive(Debug)]
pub(crate) struct Bounded<B> {
    inner: B,
    len_max: u64,
    left: u64,
    rate: Rate,
}

impl<B: Body<Data = Bytes> + Unpin> Bounded<B> {
    /// Bounds `inner` to `len_max` bytes.
    pub(crate) fn new(inner: B, len_max: u64) -> Self {
        Self { inner, len_max, left: len_max, rate: Rate::default() }
    }

    /// The next part; `None` at the end.
    pub(crate) async fn part(&mut self) -> Result<Option<Bytes>, Failed<B::Error>> {
        poll_fn(|cx| self.poll_part(cx)).await.transpose()
    }

    /// Reads the whole body.
    pub(crate) async fn gather(mut self) -> Result<Bytes, Failed<B::Error>> {
        let mut gathered = BytesMut::new();
        while let Some(part) = self.part().await? {
            gathered.extend_from_slice(&part);
        }
        Ok(gathered.freeze())
    }

    fn poll_part(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Bytes, Failed<B::Error>>>> {
        let excess = |excess| Poll::Ready(Some(Err(Failed::Excess(excess))));
        loop {
            let frame = match Pin::new(&mut self.inner).poll_frame(cx) {
                Poll::Ready(frame) => frame,
                Poll::Pending if self.rate.poll_too_slow(cx) => return excess(Excess::TooSlow),
                Poll::Pending => return Poll::Pending,
            };
            // Trailers are not part of the body.
            let part = match frame.transpose().map(|frame| frame.map(Frame::into_data)) {
                Ok(None) => return Poll::Ready(None),
                Ok(Some(Err(_trailers))) => continue,
                Ok(Some(Ok(part))) => part,
                Err(error) => return Poll::Ready(Some(Err(Failed::Broken(error)))),
            };
            let len = part.len() as u64;
            self.rate.arrived(len);
            let Some(left) = self.left.checked_sub(len) else {
                return excess(Excess::TooLong(self.len_max));
            };
            self.left = left;
            return Poll::Ready(Some(Ok(part)));
        }
    }
}

/// A bounded body for a library, which sees its own error type for both failures.
pub(crate) struct Within<B, F> {
    body: Bounded<B>,
    /// Converts an excess to the library's error.
    excess: F,
}

impl<B, F> Within<B, F> {
    pub(crate) fn new(body: Bounded<B>, excess: F) -> Self {
        Self { body, excess }
    }
}

impl<B, F> Body for Within<B, F>
where
    B: Body<Data = Bytes> + Unpin,
    F: Fn(Excess) -> B::Error + Unpin,
{
    type Data = Bytes;
    type Error = B::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, B::Error>>> {
        let this = &mut *self;
        this.body.poll_part(cx).map(|part| {
            part.map(|part| match part {
                Ok(part) => Ok(Frame::data(part)),
                Err(Failed::Excess(excess)) => Err((this.excess)(excess)),
                Err(Failed::Broken(error)) => Err(error),
            })
        })
    }
}

/// The rate at which a body arrives.
#[derive(Default, Debug)]
struct Rate {
    /// Time that the reader has waited in this window.
    waited: Duration,
    /// Bytes that arrived in this window.
    bytes: u64,
    /// When the reader began to wait.
    since: Option<Instant>,
    /// Fires at the window's end if nothing arrives before.
    alarm: Option<Pin<Box<Sleep>>>,
}

impl Rate {
    fn arrived(&mut self, bytes: u64) {
        self.waited += self.since.take().map_or(Duration::ZERO, |since| since.elapsed());
        self.bytes += bytes;
    }

    /// True if the body is too slow; polled while nothing is there, and wakes the task once it is.
    fn poll_too_slow(&mut self, cx: &mut Context<'_>) -> bool {
        loop {
            let is_new = self.since.is_none();
            let since = *self.since.get_or_insert_with(Instant::now);
            let end = since + WINDOW.saturating_sub(self.waited);
            let alarm = self.alarm.get_or_insert_with(|| Box::pin(sleep_until(end)));
            if is_new {
                alarm.as_mut().reset(end);
            }
            if alarm.as_mut().poll(cx).is_pending() {
                return false;
            }
            if self.bytes < WINDOW_BYTES {
                return true;
            }
            (self.waited, self.bytes, self.since) = (Duration::ZERO, 0, None);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{
        convert::Infallible,
        pin::Pin,
        task::{Context, Poll},
        time::Duration,
    };

    use bytes::Bytes;
    use http_body::{Body, Frame};
    use tokio::time::{Instant, Interval, interval, sleep};

    use super::{Bounded, Excess, Failed, WINDOW, WINDOW_BYTES};

    /// Yields `len` bytes at each tick, without end.
    struct Endless {
        ticks: Interval,
        len: usize,
    }

    impl Body for Endless {
        type Data = Bytes;
        type Error = Infallible;

        fn poll_frame(
            mut self: Pin<&mut Self>,
            cx: &mut Context<'_>,
        ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
            let len = self.len;
            self.ticks.poll_tick(cx).map(|_| Some(Ok(Frame::data(vec![0; len].into()))))
        }
    }

    fn endless(seconds: u64, len: usize, len_max: u64) -> Bounded<Endless> {
        Bounded::new(Endless { ticks: interval(Duration::from_secs(seconds)), len }, len_max)
    }

    async fn excess(body: Bounded<Endless>) -> Excess {
        let Err(Failed::Excess(excess)) = body.gather().await else { panic!("it ended") };
        excess
    }

    #[tokio::test(start_paused = true)]
    async fn a_body_has_a_size_and_a_rate() {
        assert_eq!(excess(endless(1, 64 << 10, 1 << 20)).await, Excess::TooLong(1 << 20));
        let begun = Instant::now();
        assert_eq!(excess(endless(5, 1, 1 << 20)).await, Excess::TooSlow);
        assert_eq!(begun.elapsed(), WINDOW);
        // Just fast enough, for an hour.
        let begun = Instant::now();
        let per_second = (WINDOW_BYTES / WINDOW.as_secs()) as usize + 100;
        let len_max = per_second as u64 * 3600;
        assert_eq!(excess(endless(1, per_second, len_max)).await, Excess::TooLong(len_max));
        assert_eq!(begun.elapsed().as_secs(), 3600);
    }

    #[tokio::test(start_paused = true)]
    async fn a_slow_reader_does_not_make_the_server_look_slow() {
        let mut body = endless(1, 1, 1 << 20);
        for _ in 0..20 {
            assert!(matches!(body.part().await, Ok(Some(_))));
            sleep(Duration::from_secs(60)).await;
        }
    }
}
