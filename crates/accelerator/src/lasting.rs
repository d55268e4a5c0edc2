//! The distributions of a device's requests, in the folder of its cache: the memory of the counters
//! goes with its supervisor.
//!
//! ```text
//!   accelerate/NAME/histograms/DEVICE   { "write_ns": [[largest value of a bucket, number], …], … }
//!   attach ──► into the memory, once       30 s after the last time, after a `flush`, at the end ──► replaced, durably
//! ```
//!
//! Invariants: a file is old or new, never half of either. The server looks at each tidying, so
//! what is lost with supervisor and server is little older than [`EVERY`] and the time between two
//! of these.

use std::{
    collections::BTreeMap,
    fs::{self, File},
    io::{self, Read},
    path::{Path, PathBuf},
    sync::{Mutex, PoisonError},
    time::{Duration, Instant},
};

use burgeon_block::{Counters, Error, Result};

use crate::{
    durable::put_durably,
    times::{Kind, Times},
};

/// The shortest time between two stores that nobody asks for.
pub(crate) const EVERY: Duration = Duration::from_secs(30);
/// The longest file: all buckets of all kinds are a tenth of it.
const LEN_MAX: u64 = 1 << 20;

/// More requests than a device answers in a century; sums of so many do not overflow.
const COUNT_MAX: u64 = 1 << 52;

/// Numbers by the largest values of their buckets, by the names of the kinds.
type Document = BTreeMap<String, Vec<(u64, u64)>>;

/// The file of one device.
pub(crate) struct Lasting {
    path: PathBuf,
    stored: Mutex<(Instant, Document)>,
}

impl Lasting {
    /// The file of the device `name` in the folder `folder`.
    pub(crate) fn of(folder: &Path, name: &str) -> Self {
        Self { path: folder.join(name), stored: Mutex::new((Instant::now(), Document::new())) }
    }

    /// Puts the stored values into `times`. A file that cannot be read counts as empty.
    pub(crate) fn restore(&self, times: &Times) {
        let document = match self.read() {
            Ok(document) => document,
            Err(error) => {
                let path = self.path.display();
                tracing::warn!(%path, %error, "the stored histograms of a device are lost");
                return;
            }
        };
        for (kind, key) in Kind::all() {
            if let Some(filled) = document.get(key) {
                times.of(kind).restore(filled.iter().copied());
            }
        }
    }

    fn read(&self) -> io::Result<Document> {
        let mut text = Vec::new();
        match File::open(&self.path) {
            Ok(file) => file.take(LEN_MAX).read_to_end(&mut text)?,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Document::new()),
            Err(error) => return Err(error),
        };
        let document: Document = serde_json::from_slice(&text)?;
        if document.values().flatten().any(|(_, count)| *count > COUNT_MAX) {
            return Err(io::Error::other("it counts more requests than there can be"));
        }
        Ok(document)
    }

    /// Stores the values if they have changed, and were stored long ago or the caller wants it
    /// `now`.
    pub(crate) fn store(&self, times: &Times, engine: &Counters, now: bool) -> Result<()> {
        let mut stored = self.stored.lock().unwrap_or_else(PoisonError::into_inner);
        let (last, known) = &mut *stored;
        if !now && last.elapsed() < EVERY {
            return Ok(());
        }
        let filled = |kind| times.with(engine, kind).filled().collect::<Vec<_>>();
        let document: Document =
            Kind::all().map(|(kind, key)| (key.to_owned(), filled(kind))).collect();
        *last = Instant::now();
        if document == *known {
            return Ok(());
        }
        let failed = |e: io::Error| Error::io(format!("cannot write {}", self.path.display()), e);
        let text = serde_json::to_vec(&document).map_err(|e| failed(e.into()))?;
        self.path.parent().map_or(Ok(()), fs::create_dir_all).map_err(failed)?;
        put_durably(&self.path, &text).map_err(failed)?;
        *known = document;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use burgeon_block::Counters;

    use super::Lasting;
    use crate::times::{Kind, Times};

    const HUGE: &str = "{\"write_ns\": [[1, 18446744073709551615], [2, 18446744073709551615]]}";

    #[test]
    fn distributions_come_back_with_the_hits_of_the_engine() {
        let folder = tempfile::tempdir().unwrap();
        let (times, engine) = (Times::default(), Counters::default());
        (0..100).for_each(|value| times.of(Kind::WriteSize).record(value << 9));
        times.of(Kind::ReadCache).record(70);
        engine.hit_latency.record(90);
        let lasting = Lasting::of(&folder.path().join("histograms"), "data");
        lasting.store(&times, &engine, false).unwrap();
        assert!(!folder.path().join("histograms").exists(), "it is stored too often");
        lasting.store(&times, &engine, true).unwrap();
        let (after, none) = (Times::default(), Counters::default());
        lasting.restore(&after);
        for (kind, key) in Kind::all() {
            assert_eq!(after.with(&none, kind), times.with(&engine, kind), "{key}");
        }
        assert_eq!(after.of(Kind::ReadCache).snapshot().count(), 2);
        // Damage is an empty file, not an end.
        for text in ["", "{", "{\"write_ns\": [[1]]}", "[]", HUGE] {
            std::fs::write(folder.path().join("histograms/data"), text).unwrap();
            let times = Times::default();
            lasting.restore(&times);
            assert_eq!(times.of(Kind::Write).snapshot().count(), 0, "{text}");
        }
    }
}
