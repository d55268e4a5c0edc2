//! Outages of a source: their lines in the log, and the time that readers wait for their end.
//!
//! ```text
//!   a try fails        ──► note:    `status`, and a line for the first one of an outage
//!   bytes are wrong    ──► wrong:   a line; those of the cache: cached_wrong
//!   a fetch is given up ──► gave_up: a line, and for a moment the same chunk is EIO at once
//!   good bytes         ──► good:    a line; readers that wait for a permit have the whole deadline again
//! ```
//!
//! The kernel asks a second time for a page whose read-ahead failed. Without the memory of chunks
//! that were given up, such a read takes two deadlines. Invariants: at most [`LINES_MAX`] lines a
//! [`LINES_WINDOW`] and volume, and the next line has the number of those left out; each failed
//! try, wrong answer and give-up is one event, of the level debug where its line was left out; at
//! most [`GIVEN_UP_MAX`] chunks are remembered (`tests/volume.rs`).

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use burgeon_block::{ByteRange, Error, ErrorKind, ObjectId, Result};
use tokio::time::Instant;
use tracing::{Value, field::display};

use crate::VolumeLimits;

/// Lines of the log in a [`LINES_WINDOW`]: a failure, its consequence, and its end.
const LINES_MAX: u32 = 3;
const LINES_WINDOW: Duration = Duration::from_secs(60);

/// Chunks that are remembered as given up: more than can be fetched at once in a second.
const GIVEN_UP_MAX: usize = 1024;

/// Makes an event of `$level` if it may be a line of the log, and of the level debug if not.
macro_rules! event {
    ($level:ident, $suppressed:expr, $($rest:tt)+) => {
        match $suppressed {
            Some(suppressed) => tracing::$level!(suppressed, $($rest)+),
            None => tracing::debug!($($rest)+),
        }
    };
}

/// The failures of a source.
pub(crate) struct Outage {
    deadline: Duration,
    given_up_for: Duration,
    image: Arc<str>,
    state: Mutex<State>,
}

/// The number of lines that were left out before one, if there were any.
type Suppressed = Option<u64>;

/// Pause between hashes of chunks for an image with wrong checksums: 64 MB/s of chunks.
const HASH_PAUSE: Duration = Duration::from_millis(4);

#[derive(Default)]
struct State {
    /// The last failure.
    last: Option<String>,
    last_good: Option<Instant>,
    /// Since when tries have failed, and how many.
    since: Option<Instant>,
    failed: u64,
    /// By chunk: when it was given up.
    given_up: HashMap<u64, Instant>,
    is_map_damaged: bool,
    /// When the next chunk of the cache may be hashed, if the map is damaged.
    next_hash: Option<Instant>,
    window: Option<Instant>,
    lines: u32,
    suppressed: u64,
}

impl Outage {
    pub(crate) fn new(limits: &VolumeLimits) -> Self {
        let VolumeLimits { deadline, given_up_for, .. } = *limits;
        let (image, state) = (Arc::clone(&limits.image), Mutex::default());
        Self { deadline, given_up_for, image, state }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The last failure.
    pub(crate) fn last(&self) -> Option<String> {
        self.state().last.clone()
    }

    /// A try to get a range of an object has failed.
    pub(crate) fn note(&self, asked: Option<(&ObjectId, ByteRange)>, error: &Error) {
        let text = error.to_string();
        let suppressed = {
            let mut state = self.state();
            let first = state.since.is_none();
            state.since.get_or_insert_with(Instant::now);
            state.failed += 1;
            state.last = Some(text.clone());
            first.then(|| state.line()).flatten()
        };
        let (image, object, range) = self.fields(asked);
        event!(
            warn,
            suppressed,
            image,
            object,
            range,
            error = text,
            "the source fails: trying again"
        );
    }

    /// The fields of an event about a range of an object.
    fn fields<'a>(
        &'a self,
        asked: Option<(&'a ObjectId, ByteRange)>,
    ) -> (&'a str, Option<impl Value + 'a>, Option<impl Value + 'a>) {
        let (object, range) = asked.unzip();
        (&self.image, object.map(display), range.map(display))
    }

    /// The bytes that came of a range of an object are not those that were stored.
    pub(crate) fn wrong(&self, asked: Option<(&ObjectId, ByteRange)>, error: &Error) {
        let suppressed = self.state().line();
        let (image, object, range) = self.fields(asked);
        event!(error, suppressed, image, object, range, %error, "the source gave wrong bytes");
    }

    /// `blocks` of the chunk at `range` of the image, which the cache held, are not those that were
    /// stored.
    pub(crate) fn cached_wrong(&self, range: ByteRange, blocks: u64) {
        let suppressed = self.state().line();
        let (image, range) = (&*self.image, display(range));
        event!(
            error,
            suppressed,
            image,
            range,
            blocks,
            "the cache held wrong bytes: they are forgotten, and fetched again"
        );
    }

    /// The chunk at `range` of the image cannot be read from the cache.
    pub(crate) fn cached_unreadable(&self, range: ByteRange) {
        let suppressed = self.state().line();
        let (image, range) = (&*self.image, display(range));
        event!(warn, suppressed, image, range, "the cache cannot be read here: fetched again");
    }

    /// The fetch of `key` is given up because of `error`, which its readers get. If it
    /// `timed_out`, the next readers get an error at once, for a moment.
    pub(crate) fn gave_up(
        &self,
        key: Option<u64>,
        asked: Option<(&ObjectId, ByteRange)>,
        error: &Error,
        timed_out: bool,
    ) {
        let suppressed = {
            let mut state = self.state();
            if let Some(key) = key.filter(|_| timed_out) {
                let (now, for_how_long) = (Instant::now(), self.given_up_for);
                if state.given_up.len() >= GIVEN_UP_MAX {
                    state.given_up.retain(|_, when| now < *when + for_how_long);
                }
                if state.given_up.len() < GIVEN_UP_MAX {
                    state.given_up.insert(key, now);
                }
            }
            state.line()
        };
        let (image, object, range) = self.fields(asked);
        event!(error, suppressed, image, object, range, %error, "readers get an I/O error");
    }

    /// Good bytes have come.
    pub(crate) fn good(&self) {
        let ended = {
            let mut state = self.state();
            state.last_good = Some(Instant::now());
            state.given_up.clear();
            let failed = std::mem::take(&mut state.failed);
            state.since.take().and_then(|since| {
                state.line().map(|suppressed| (failed, since.elapsed().as_millis(), suppressed))
            })
        };
        if let Some((failed, ms, suppressed)) = ended {
            tracing::info!(
                image = &*self.image,
                failed,
                ms,
                suppressed,
                "the source answers again"
            );
        }
    }

    /// The map has a wrong checksum for a block whose chunk has the right digest. Told once.
    pub(crate) fn map_is_damaged(&self) {
        let first = !std::mem::replace(&mut self.state().is_map_damaged, true);
        if first {
            tracing::error!(
                image = &*self.image,
                "the image's map file is damaged: some blocks are fetched at every read; unmount the \
                 image everywhere, and the next mount makes the map again"
            );
        }
    }

    /// When a chunk of the cache may be hashed again: at once, unless the map is damaged. Else each
    /// block that is read from such an image would cost the host the hash of a whole chunk.
    pub(crate) fn hash_turn(&self) -> Option<Instant> {
        let mut state = self.state();
        if !state.is_map_damaged {
            return None;
        }
        let now = Instant::now();
        let turn = state.next_hash.map_or(now, |next| next.max(now));
        state.next_hash = Some(turn + HASH_PAUSE);
        Some(turn)
    }

    /// True if [`Self::map_is_damaged`] was called.
    pub(crate) fn is_map_damaged(&self) -> bool {
        self.state().is_map_damaged
    }

    /// An error if the fetch of `key` was given up a moment ago.
    pub(crate) fn check(&self, key: u64) -> Result<()> {
        let state = self.state();
        let when = state.given_up.get(&key).filter(|when| when.elapsed() < self.given_up_for);
        when.map_or(Ok(()), |_| {
            let why = state.last.as_deref().unwrap_or_default();
            let what = format!("a chunk was given up a moment ago: {why}");
            Err(Error::new(ErrorKind::Unavailable, what))
        })
    }

    /// The deadline of a reader that came at `arrived`: counted from then, or from the last good
    /// bytes of the source.
    pub(crate) fn deadline(&self, arrived: Instant) -> Instant {
        self.state().last_good.map_or(arrived, |good| good.max(arrived)) + self.deadline
    }

    /// The error of a reader that got no permit until its deadline.
    pub(crate) fn no_permit(&self) -> Error {
        let seconds = self.deadline.as_secs_f64();
        let why = self.last().unwrap_or_else(|| "the source is slow".to_owned());
        let what = format!("other reads held all fetch permits for {seconds:.0} s: {why}");
        Error::new(ErrorKind::Unavailable, what)
    }
}

impl State {
    /// `None` if the limit of lines is reached; else the number of lines that it suppressed before.
    fn line(&mut self) -> Option<Suppressed> {
        let now = Instant::now();
        if self.window.is_none_or(|begun| now >= begun + LINES_WINDOW) {
            (self.window, self.lines) = (Some(now), 0);
        }
        if self.lines == LINES_MAX {
            self.suppressed += 1;
            return None;
        }
        self.lines += 1;
        Some(Some(std::mem::take(&mut self.suppressed)).filter(|suppressed| *suppressed > 0))
    }
}

#[cfg(test)]
mod tests {
    use burgeon_block::{ByteRange, Error, ErrorKind, ObjectId};
    use tokio::time::{Instant, sleep};

    use super::{GIVEN_UP_MAX, LINES_WINDOW, Outage};
    use crate::VolumeLimits;

    fn away() -> Error {
        Error::new(ErrorKind::Unavailable, "away")
    }

    #[tokio::test(start_paused = true)]
    async fn each_wrong_answer_is_an_event_and_those_without_a_line_are_counted_in_the_next() {
        let events = testkit::Events::gather();
        let outage = Outage::new(&VolumeLimits::default());
        let wrong = Error::new(ErrorKind::Corrupt, "a wrong digest");
        (0..10).for_each(|_| outage.wrong(None, &wrong));
        outage.gave_up(None, None, &wrong, false);
        let said = events.take();
        let of = |level: &str| said.iter().filter(|line| line.starts_with(level)).count();
        assert_eq!((of("ERROR the source gave"), of("DEBUG the source gave")), (3, 7), "{said:?}");
        assert_eq!((of("DEBUG readers get"), said.len()), (1, 11), "{said:?}");
        sleep(LINES_WINDOW).await;
        outage.wrong(None, &wrong);
        let said = events.take();
        assert!(said[0].starts_with("ERROR ") && said[0].contains(" suppressed=8"), "{said:?}");
        assert_eq!(said.len(), 1, "{said:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn each_failed_try_is_an_event_with_its_object_and_range() {
        let events = testkit::Events::gather();
        let outage = Outage::new(&VolumeLimits::default());
        let object = ObjectId::new("packs/a").unwrap();
        let asked = ByteRange::new(0, 4096).map(|range| (&object, range));
        (0..3).for_each(|_| outage.note(asked, &away()));
        outage.gave_up(None, asked, &away(), true);
        let said = events.take();
        let of = |level: &str| said.iter().filter(|line| line.starts_with(level)).count();
        assert_eq!((of("WARN the source fails"), of("DEBUG the source fails")), (1, 2), "{said:?}");
        assert_eq!(of("ERROR readers get an I/O error"), 1, "{said:?}");
        let is_named = |line: &String| line.contains("object=packs/a") && line.contains("range=");
        assert!(said.len() == 4 && said.iter().all(is_named), "{said:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn the_deadline_moves_with_good_bytes_only() {
        let limits = VolumeLimits::default();
        let outage = Outage::new(&limits);
        let arrived = Instant::now();
        sleep(limits.deadline / 2).await;
        outage.note(None, &away());
        assert_eq!(outage.deadline(arrived), arrived + limits.deadline);
        outage.good();
        assert_eq!(outage.deadline(arrived), Instant::now() + limits.deadline);
    }

    #[tokio::test(start_paused = true)]
    async fn give_ups_are_bounded_and_forgotten_with_good_bytes() {
        let limits = VolumeLimits::default();
        let outage = Outage::new(&limits);
        for key in 0..2 * GIVEN_UP_MAX as u64 {
            outage.gave_up(Some(key), None, &away(), true);
        }
        assert_eq!(outage.state().given_up.len(), GIVEN_UP_MAX);
        outage.check(0).unwrap_err();
        sleep(limits.given_up_for).await;
        outage.check(0).unwrap();
        outage.gave_up(Some(3), None, &away(), true);
        assert_eq!(outage.state().given_up.len(), 1, "old ones make room");
        outage.good();
        outage.check(3).unwrap();
        outage.gave_up(Some(4), None, &away(), false);
        outage.gave_up(None, None, &away(), true);
        outage.check(4).unwrap();
    }
}
