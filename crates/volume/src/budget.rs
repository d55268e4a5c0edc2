//! The fetch limit of a mount: for its readers, its profile, its pins and its fill together.

use std::{ops::Deref, sync::Arc};

use burgeon_block::Counters;

/// The bytes that one mount may fetch. The limit is checked before each fetch, so fetches in
/// flight come on top.
pub struct Budget {
    counters: Box<dyn Deref<Target = Counters> + Send + Sync>,
    limit: u64,
}

impl Budget {
    /// At most `limit` bytes, as the sources send them, over all the life of `counters`.
    pub fn new(
        counters: impl Deref<Target = Counters> + Send + Sync + 'static,
        limit: u64,
    ) -> Arc<Self> {
        Arc::new(Self { counters: Box::new(counters), limit })
    }

    /// True if it is not used up.
    pub fn may_fetch(&self) -> bool {
        self.spent() < self.limit
    }

    pub(crate) fn limit(&self) -> u64 {
        self.limit
    }

    pub(crate) fn spent(&self) -> u64 {
        spent(&self.counters)
    }

    /// Charges bytes of a fetch that no reader was charged for.
    pub(crate) fn charge(&self, bytes: u64) {
        self.counters.background_bytes.add(bytes);
    }
}

/// Bytes that were fetched for a mount.
pub(crate) fn spent(counters: &Counters) -> u64 {
    counters.fetched_bytes.get().saturating_add(counters.background_bytes.get())
}
