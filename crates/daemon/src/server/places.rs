//! The places of chunks in the host's cache, for a command that clones them
//! (`let_go/clone.rs`), and the chunks that are lent since.

use std::{collections::BTreeSet, sync::Arc, thread};

use burgeon_block::BLOCK_SIZE;
use burgeon_cache::{ArenaRange, Domain};
use burgeon_volume::{cached_len, chunk_key};

use super::{Serving, lock};
use crate::{
    id::MountId,
    ipc::{
        link::FromServer,
        protocol::{ChunkPlaces, PlacedRun},
    },
    state::loans,
};

/// Chunks that are looked for at once: some ten milliseconds, and an answer of a megabyte.
const LOOKED_FOR_MAX: u32 = 1 << 14;

impl Serving {
    /// Tells the places of a mount's chunks, in a thread of its own.
    pub(super) fn tell_places(self: &Arc<Self>, number: u64, id: MountId, first: u32) {
        let serving = Arc::clone(self);
        thread::spawn(move || {
            let places = serving.places(id, first);
            serving.tell(&FromServer::Places { number, places });
        });
    }

    fn places(&self, id: MountId, first: u32) -> ChunkPlaces {
        let volume = lock(&self.mounts).get(&id).map(|mount| Arc::clone(&mount.volume));
        let Some(volume) = volume else { return ChunkPlaces::default() };
        let map = volume.map();
        let own = Some(volume.domain()).filter(|domain| *domain != Domain::PUBLIC);
        let domains: Vec<_> = [Domain::PUBLIC].into_iter().chain(own).collect();
        let end = map.chunk_count().min(first.saturating_add(LOOKED_FOR_MAX));
        let mut runs = Runs::default();
        for chunk in first..end {
            let keys = domains.iter().filter_map(|domain| chunk_key(map, chunk, domain));
            let cached = cached_len(map, chunk) / BLOCK_SIZE;
            let is_whole = |range: &ArenaRange| u64::from(range.blocks) == cached;
            let found = keys.filter_map(|key| self.cache.range_of(&key)).find(is_whole);
            // Without the seal, which lies between the bytes of two chunks.
            let blocks = (map.chunk_range(chunk).len() / BLOCK_SIZE) as u32;
            found.into_iter().for_each(|range| runs.add(chunk, ArenaRange { blocks, ..range }));
        }
        ChunkPlaces { runs: runs.runs, next: (end < map.chunk_count()).then_some(end) }
    }

    /// Lends the chunks of the plain files that are there now, and no others.
    pub(super) fn look_at_loans(&self) {
        // Held while records are read: nobody on the path of a read asks for it.
        let mut seen = lock(&self.loans);
        let now = loans::all(&self.state).into_iter().map(|(record, _)| record);
        if *seen == now.collect::<BTreeSet<_>>() {
            return;
        }
        let (now, ranges) = loans::read_all(&self.state);
        tracing::debug!(plain_files = now.len(), ranges = ranges.len(), "chunks are lent");
        *seen = now;
        self.cache.lend(ranges);
    }

    /// The same, if any are lent now: nobody may have told of the end of a plain file.
    pub(super) fn look_after_loans(&self) {
        let are_there = !lock(&self.loans).is_empty();
        if are_there {
            self.look_at_loans();
        }
    }
}

/// Places of chunks, in ascending order of these.
#[derive(Default)]
struct Runs {
    runs: Vec<PlacedRun>,
    /// The block after the last run.
    end: u32,
}

impl Runs {
    fn add(&mut self, chunk: u32, range: ArenaRange) {
        let ArenaRange { arena, block, blocks } = range;
        let end = self.end;
        self.end = block + blocks;
        if let Some(last) = self.runs.last_mut()
            && (last.first + last.count, last.arena, end) == (chunk, arena, block)
        {
            last.count += 1;
            return;
        }
        self.runs.push(PlacedRun { first: chunk, count: 1, arena, block });
    }
}

#[cfg(test)]
mod tests {
    use burgeon_cache::ArenaRange;

    use super::Runs;
    use crate::ipc::protocol::PlacedRun;

    #[test]
    fn only_chunks_that_follow_in_both_orders_are_one_run() {
        let mut runs = Runs::default();
        let range = |arena, block, blocks| ArenaRange { arena, block, blocks };
        let places = [(0, range(1, 0, 64)), (1, range(1, 64, 3)), (2, range(1, 68, 1))];
        let more = [(4, range(1, 69, 1)), (5, range(2, 70, 1)), (6, range(2, 71, 9))];
        places.into_iter().chain(more).for_each(|(chunk, range)| runs.add(chunk, range));
        let run = |first, count, arena, block| PlacedRun { first, count, arena, block };
        let expected = [run(0, 2, 1, 0), run(2, 1, 1, 68), run(4, 1, 1, 69), run(5, 2, 2, 70)];
        assert_eq!(runs.runs, expected);
    }
}
