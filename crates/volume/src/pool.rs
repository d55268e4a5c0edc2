use std::sync::Arc;

use burgeon_block::{Error, ErrorKind, Result};
use tokio::sync::Semaphore;

/// A bounded number of threads for work that would hold up the runtime: digests, decompression,
/// writes.
pub(crate) struct Pool(Option<Arc<Semaphore>>);

impl Pool {
    /// At most `threads` at once; with 0 the work is done on the caller's task, in its order.
    pub(crate) fn new(threads: usize) -> Self {
        Self((threads > 0).then(|| Arc::new(Semaphore::new(threads))))
    }

    /// Runs `work` and returns its result. An error only if it panicked or the runtime ends.
    pub(crate) async fn run<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T> {
        let Some(threads) = &self.0 else { return Ok(work()) };
        let permit = Arc::clone(threads).acquire_owned().await;
        let work = move || {
            // The permit goes with the work: a dropped caller does not free its thread early.
            let _permit = permit;
            work()
        };
        tokio::task::spawn_blocking(work).await.map_err(|error| {
            Error::with_source(ErrorKind::Unavailable, "a worker thread of the volume ended", error)
        })
    }
}
