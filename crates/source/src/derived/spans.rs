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
        let bytes = cell.get_or_try_init(|| async {
            let share = len.div_ceil(1 << 10).clamp(1, WORK_MAX.into()) as u32;
            let _working = self.work.acquire_many(share).await;
            make.await
        });
        bytes.await.cloned()
    }

    /// Whether somebody has the span, or makes it.
    pub(super) fn has(&self, key: Key) -> bool {
        let kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        kept.iter().any(|(other, _)| *other == key)
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
        let len = |cell: &Cell| cell.get().map_or(0, |bytes| bytes.len() as u64);
        let mut bytes: u64 = kept.iter().map(|(_, cell)| len(cell)).sum();
        while kept.len() > SPANS_MAX || bytes > BYTES_MAX && kept.len() > 1 {
            bytes -= len(&kept.remove(0).1);
        }
        cell
    }
}
