//! A run: chunks whose stored bytes lie one after another in an object, fetched with one request.
//!
//! ```text
//!   fetch_run ──► one try ──► cut ──► each chunk: verify ──► finish (chunk.rs)
//!                  │ failed            │ wrong
//!                  └───────────────────┴──► the chunk is fetched alone, with all tries
//! ```
//!
//! Background work alone fetches runs. Invariant: every chunk of a run ends as any other fetch
//! does, however the request for the run ends (held by the simulator).

use std::sync::Arc;

use burgeon_block::{BlockSource, ByteRange, LocalFile};
use burgeon_cache::Why;
use burgeon_image::Chunk;
use bytes::Bytes;
use tokio::{sync::mpsc, time::Instant};

use super::{
    Begun, chunk::ChunkRequest, in_flight::Cost, read_object, retry::FetchRequest,
    shared_keys::FetchRight,
};
use crate::{Volume, background::prefetched::Purpose};

/// A chunk of a run, whose fetch has begun.
pub(crate) struct RunChunk {
    pub(crate) index: u32,
    pub(crate) begun: Begun,
}

/// Held by chunks that are not kept yet, or known not to be; nothing is ever sent.
pub(crate) type Ending = mpsc::Sender<()>;

impl<S, F> Volume<S, F>
where
    S: BlockSource + 'static,
    F: LocalFile + 'static,
{
    /// The first chunk of a run, and where the run is stored; `None` for an empty one.
    fn stored_run(&self, run: &[RunChunk]) -> Option<(Chunk, ByteRange)> {
        let [first, last] = [run.first()?, run.last()?].map(|it| self.map.chunk(it.index));
        Some((first, ByteRange::new(first.stored.start(), last.stored.end())?))
    }

    /// Bytes of a run that the source has to fetch.
    pub(crate) fn bytes_to_fetch(&self, run: &[RunChunk]) -> u64 {
        self.stored_run(run).map_or(0, |(first, range)| {
            self.source.bytes_to_fetch(self.map.object(first.object), range)
        })
    }

    /// Fetches a run, and says whether its request gave all of it. Returns when that was answered;
    /// `ending` is held until its chunks were verified and kept.
    pub(crate) async fn fetch_run(
        self: Arc<Self>,
        run: Vec<RunChunk>,
        purpose: Purpose,
        ending: Ending,
    ) -> bool {
        let Some((chunk, range)) = self.stored_run(&run) else { return true };
        let to_fetch = self.bytes_to_fetch(&run);
        // A chunk that another image has begun to fetch since is fetched twice: a run is one
        // request.
        let turns: Vec<_> = run.iter().map(|chunk| self.claim(chunk.index)?.ok()).collect();
        let deadline = self.engine.outage.deadline(Instant::now());
        let asking = read_object(&self.source, self.map.object(chunk.object), range);
        let mut cost = Cost::default();
        let answer = self.engine.once(range.len(), to_fetch, deadline, asking, &mut cost).await;
        let answer = answer.inspect_err(|error| {
            self.engine.outage.note(Some((self.map.object(chunk.object), range)), error);
            self.engine.unclaimed.source_errors.add(cost.source_errors);
        });
        let start = chunk.stored.start();
        for (RunChunk { index, begun }, turn) in run.into_iter().zip(turns) {
            let stored = self.map.chunk(index).stored;
            let at = (stored.start() - start) as usize;
            let bytes = answer.as_ref().ok().map(|all| all.slice(at..at + stored.len() as usize));
            // A chunk that is fetched alone has no more time than the run had.
            let begun = Begun { deadline, ..begun };
            let (this, ending) = (Arc::clone(&self), ending.clone());
            tokio::spawn(async move {
                this.run_chunk(index, (begun, turn), purpose, bytes).await;
                drop(ending);
            });
        }
        answer.is_ok()
    }

    /// One chunk of a run, of which `stored` has come.
    async fn run_chunk(
        self: Arc<Self>,
        index: u32,
        (begun, turn): (Begun, Option<FetchRight>),
        purpose: Purpose,
        stored: Option<Bytes>,
    ) {
        let Some(stored) = stored else {
            // Another image may have begun to fetch it meanwhile.
            let claim = turn.map(Ok).or_else(|| self.claim(index));
            return self.fetch_task(index, begun, Why::Prefetch, (claim, false)).await;
        };
        let Begun { in_flight, permits, deadline } = begun;
        let mut cost = Cost { fetched_bytes: stored.len() as u64, ..Cost::default() };
        let mut request = ChunkRequest::new(&*self, index);
        let result = match self.engine.verify(&mut request, stored, &mut cost).await {
            Ok(pages) => {
                cost.materialised_bytes = pages.bytes().len() as u64;
                Ok(pages)
            }
            Err(error) => {
                self.engine.outage.note(request.asked(), &error);
                self.fetch(index, deadline, &mut cost).await
            }
        };
        if result.is_ok() {
            self.background_work.was_prefetched(self.map.chunk(index).range, purpose);
        }
        self.finish(index, in_flight, permits, (result, Some(Why::Prefetch)), cost).await;
        drop(turn);
    }
}
