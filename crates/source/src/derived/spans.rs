//! Unpacked spans, kept for those who want another part of them.
//!
//! A chunk is shorter than a span, and neighbours are read together: what one of them has unpacked
//! is there for the others. Invariants: a span is fetched once, however many want it; what is kept
//! has a bound, and so has what is unpacked at a time.

use std::sync::{Arc, Mutex, PoisonError};

use burgeon_block::Result;
use bytes::Bytes;
use tokio::sync::{OnceCell, Semaphore};

/// Spans that are kept: as many as flights of an image may want, each two.
const SPANS_MAX: usize = 64;
/// Bytes of spans that are kept: 32 MiB.
const BYTES_MAX: u64 = 32 << 20;
/// What is fetched and unpacked at a time, in KiB, both counted: 64 MiB, which is the longest span alone.
/// Commonly a span has 0.7 MiB, so that the network is not waited for.
const WORK_MAX: u32 = 64 << 10;

/// A layer, and which span of it.
pub(super) type Key = (u32, u32);
type Cell = Arc<OnceCell<Bytes>>;

pub(super) struct Spans {
    /// What was wanted last is last.
    kept: Mutex<Vec<(Key, Cell)>>,
    work: Semaphore,
}

impl Spans {
    pub(super) fn new() -> Self {
        Self { kept: Mutex::default(), work: Semaphore::new(WORK_MAX as usize) }
    }

    /// The span `key`, which `make` makes of `len` bytes in all, if nobody has.
    pub(super) async fn get(
        &self,
        key: Key,
        len: u64,
        make: impl Future<Output = Result<Bytes>>,
    ) -> Result<Bytes> {
        let cell = self.cell(key);
        let is_new = !cell.initialized();
        let bytes = cell.get_or_try_init(|| async {
            let share = len.div_ceil(1 << 10).clamp(1, WORK_MAX.into()) as u32;
            let _working = self.work.acquire_many(share).await;
            make.await
        });
        let bytes = bytes.await.cloned();
        if is_new {
            trim(&mut self.kept.lock().unwrap_or_else(PoisonError::into_inner));
        }
        bytes
    }

    /// Whether somebody has the span, or makes it.
    pub(super) fn has(&self, key: Key) -> bool {
        let kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        // Whoever makes it holds it, too; of one that failed only what is kept is left.
        let is_of_use = |cell: &Cell| cell.initialized() || Arc::strong_count(cell) > 1;
        kept.iter().any(|(other, cell)| *other == key && is_of_use(cell))
    }

    /// Whoever wants the span from now on makes it anew.
    pub(super) fn forget(&self, key: Key) {
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        kept.retain(|(other, _)| *other != key);
    }

    fn cell(&self, key: Key) -> Cell {
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        let known = kept.iter().position(|(other, _)| *other == key);
        let cell = known.map(|at| kept.remove(at).1).unwrap_or_default();
        kept.push((key, Arc::clone(&cell)));
        trim(&mut kept);
        cell
    }
}

/// Lets go of what was wanted longest ago, if there is too much.
fn trim(kept: &mut Vec<(Key, Cell)>) {
    let len = |cell: &Cell| cell.get().map_or(0, |bytes| bytes.len() as u64);
    let mut bytes: u64 = kept.iter().map(|(_, cell)| len(cell)).sum();
    while bytes > BYTES_MAX && kept.len() > 1 {
        // Those that are being made have no bytes yet.
        let oldest = kept.iter().position(|(_, cell)| cell.initialized()).unwrap_or(0);
        bytes -= len(&kept.remove(oldest).1);
    }
    while kept.len() > SPANS_MAX {
        kept.remove(0);
    }
}

#[cfg(test)]
mod tests {
    use burgeon_block::{Error, ErrorKind};
    use bytes::Bytes;

    use super::{BYTES_MAX, Spans};
    use crate::waiting;

    #[test]
    fn what_is_kept_has_a_bound_and_what_failed_is_not_here() {
        let spans = Spans::new();
        let len = BYTES_MAX as usize / 4;
        let one = |n: u32| {
            let spans = &spans;
            async move {
                let make = async {
                    // The others begin before it ends.
                    tokio::task::yield_now().await;
                    Ok(Bytes::from(vec![0; len]))
                };
                spans.get((0, n), 1, make).await.unwrap();
            }
        };
        waiting(futures_util::future::join_all((0..20).map(one)));
        let kept = spans.kept.lock().unwrap();
        let bytes: u64 = kept.iter().map(|(_, cell)| cell.get().unwrap().len() as u64).sum();
        assert_eq!((kept.len(), bytes), (4, BYTES_MAX));
        drop(kept);
        assert!(spans.has((0, 19)) && !spans.has((0, 0)));
        let fails = async { Err(Error::new(ErrorKind::Unavailable, "away")) };
        waiting(spans.get((1, 0), 1, fails)).unwrap_err();
        assert!(!spans.has((1, 0)));
    }
}
