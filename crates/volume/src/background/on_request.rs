//! Prefetch of a range that somebody asked for, as `burgeon prefetch` does: once, and as far as
//! there are permits now.

use std::sync::Arc;

use burgeon_block::{BlockSource, ByteRange, LocalFile};
use burgeon_cache::Why;

use crate::Volume;

impl<S, F> Volume<S, F>
where
    S: BlockSource + 'static,
    F: LocalFile + 'static,
{
    /// Starts to fetch the chunks of `range` that are neither resident nor in flight, as far as
    /// there are permits for background work, and returns how many it started. A hint: the rest
    /// is dropped.
    pub fn prefetch(self: &Arc<Self>, range: ByteRange) -> usize {
        let mut started = 0;
        let mut next = range.start();
        while next < range.end() {
            let Some(index) = self.map.chunk_at(next) else { break };
            let chunk = self.map.chunk(index).range;
            next = chunk.end();
            if self.is_through(index) || self.residency.has(index) {
                continue;
            }
            let Some(permits) = self.engine.try_background_permits(None) else { break };
            if let Some(begun) = self.begin_new(index, permits) {
                self.start(index, begun, Why::Prefetch, false);
                started += 1;
            }
        }
        started
    }
}
