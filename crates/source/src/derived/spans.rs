//! A cache of unpacked spans.
//!
//! A chunk is shorter than a span, and neighbours are read together, so the span that one of them
//! unpacks serves the others. This is a single-flight of its own, below the two of the volume:
//! those go by chunk and key, and a fetch that asks for a span already holds its place and permits
//! there. To take a second turn in the same table, it would wait for itself. Invariants: concurrent
//! readers of a span share one fetch; the cache and the spans being unpacked have bounds.

use std::sync::{Arc, Mutex, PoisonError};

use burgeon_block::Result;
use bytes::Bytes;
use tokio::sync::{OnceCell, Semaphore};

/// Most spans that are kept: two for each in-flight fetch of an image.
const SPANS_MAX: usize = 64;
/// Most bytes of spans that are kept: 32 MiB.
const BYTES_MAX: u64 = 32 << 20;
/// Most data being fetched and unpacked, both counted, in KiB: 64 MiB, the longest span alone. A
/// common span has 0.7 MiB, so there is room for enough in-flight fetches.
const WORK_MAX: u32 = 64 << 10;

/// A layer, and the number of a span in it.
pub(super) type Key = (u32, u32);
type Cell = Arc<OnceCell<Bytes>>;

pub(super) struct Spans {
    /// The most recently used is last.
    kept: Mutex<Vec<(Key, Cell)>>,
    work: Semaphore,
}

impl Spans {
    pub(super) fn new() -> Self {
        Self { kept: Mutex::default(), work: Semaphore::new(WORK_MAX as usize) }
    }

    /// The span `key`; `make` makes it, which takes `len` bytes in all, unless another reader has.
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

    /// True if the span is here or being made.
    pub(super) fn has(&self, key: Key) -> bool {
        let kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        // A maker holds a reference too; a failed span has only this one.
        let is_of_use = |cell: &Cell| cell.initialized() || Arc::strong_count(cell) > 1;
        kept.iter().any(|(other, cell)| *other == key && is_of_use(cell))
    }

    /// Forgets the span: later readers make it again.
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

/// Evicts the least recently used spans that exceed the bounds.
fn trim(kept: &mut Vec<(Key, Cell)>) {
    let len = |cell: &Cell| cell.get().map_or(0, |bytes| bytes.len() as u64);
    let mut bytes: u64 = kept.iter().map(|(_, cell)| len(cell)).sum();
    while bytes > BYTES_MAX && kept.len() > 1 {
        // Spans being made have no bytes yet.
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
    fn the_cache_is_bounded_and_omits_failed_spans() {
        let spans = Spans::new();
        let len = BYTES_MAX as usize / 4;
        let one = |n: u32| {
            let spans = &spans;
            async move {
                let make = async {
                    // Lets the others begin first.
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
