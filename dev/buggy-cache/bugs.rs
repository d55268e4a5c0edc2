//! The bugs that the cache's tests must find: texts of `crates/cache/src` and their replacements.
//!
//! Each text occurs exactly once in its file, or `build.rs` says which one does not. [`SWITCH`]
//! stands for the question whether the bug is on; while it is off, the copy must behave as the
//! original does.

#[path = "../buggy-accelerate/bug.rs"]
mod bug;

use bug::bug;
pub use bug::{Bug, SWITCH};

/// All of them.
pub const BUGS: &[Bug] = &[
    bug(
        "SyncLeavesArenas",
        "a sync makes the records durable, and not the chunks",
        &[(
            "upkeep.rs",
            "            arena.file.sync()?;",
            "            if !BUG { arena.file.sync()?; }",
        )],
    ),
    bug(
        "SyncLeavesJournal",
        "a sync makes the chunks durable, and not the records",
        &[(
            "persist.rs",
            "        self.journal.as_ref().map_or(Ok(()), |journal| journal.file.sync())?;
        shared.disk.sync()",
            "        if !BUG { self.journal.as_ref().map_or(Ok(()), |journal| journal.file.sync())?; }
        shared.disk.sync()",
        )],
    ),
    bug(
        "SyncLeavesLoadedJournals",
        "a sync makes its own server's records durable, and not those of the one before, which was killed",
        &[(
            "persist.rs",
            "        for number in &self.loaded {",
            "        for number in self.loaded.iter().filter(|_| !BUG) {",
        )],
    ),
    bug(
        "SyncLeavesNames",
        "a sync makes the journal durable, and not its name",
        &[(
            "persist.rs",
            "        shared.disk.sync()\n    }\n}",
            "        if BUG { return Ok(()); }
        shared.disk.sync()\n    }\n}",
        )],
    ),
    bug(
        "RemoveBeforeCheckpoint",
        "older journals are removed before the checkpoint in their place is whole",
        &[(
            "persist.rs",
            "        let file = shared.disk.create(UNFINISHED, IoMode::Bytes)?;",
            "        if BUG { remove_older(shared, self.number)?; }
        let file = shared.disk.create(UNFINISHED, IoMode::Bytes)?;",
        )],
    ),
    bug(
        "CheckpointNotSynced",
        "a checkpoint gets its name before its bytes are durable",
        &[(
            "persist.rs",
            "        checkpoint.file.sync()?;",
            "        if !BUG { checkpoint.file.sync()?; }",
        )],
    ),
    bug(
        "LoadLastJournal",
        "a start reads the newest journal alone",
        &[(
            "load.rs",
            "    journals.sort_unstable();",
            "    journals.sort_unstable();
    if BUG { journals.drain(..journals.len().saturating_sub(1)); }",
        )],
    ),
    bug(
        "LoadJournalsBackwards",
        "a start applies the newest journal first",
        &[(
            "load.rs",
            "    journals.sort_unstable();",
            "    journals.sort_unstable();
    if BUG { journals.reverse(); }",
        )],
    ),
    bug(
        "LoadJournalsAlone",
        "a start reads no checkpoint",
        &[(
            "load.rs",
            "    if let Some(number) = newest {",
            "    if let Some(number) = newest.filter(|_| !BUG) {",
        )],
    ),
    bug(
        "KeepWithoutPunching",
        "the space of evicted chunks is counted as free, and stays taken",
        &[(
            "upkeep.rs",
            "            if let Err(error) = arena.file.punch(range) {",
            "            if BUG {
                punched += settle(shared, &freed[run..next]);
                continue;
            }
            if let Err(error) = arena.file.punch(range) {",
        )],
    ),
    bug(
        "LeftSpaceIsFree",
        "the space that a crash left without chunks does not count",
        &[(
            "load.rs",
            "        if leaked > 0 {",
            "        if leaked > 0 && !BUG {",
        )],
    ),
    bug(
        "NothingBecomesFree",
        "evicted chunks count as long as the server runs",
        &[(
            "upkeep.rs",
            "    let mut admin = lock(&shared.admin);
    admin.used = admin.used.saturating_sub(bytes);
    bytes",
            "    if BUG { return bytes; }
    let mut admin = lock(&shared.admin);
    admin.used = admin.used.saturating_sub(bytes);
    bytes",
        )],
    ),
    bug(
        "DoubtIsIdle",
        "a chunk whose bytes were wrong is found again",
        &[(
            "cache/seam.rs",
            "        if shared.slots.place(slot) == Some(place) {",
            "        if shared.slots.place(slot) == Some(place) && !BUG {",
        )],
    ),
    bug(
        "ClosedForEver",
        "after a failed write nothing is kept any more",
        &[(
            "gate.rs",
            "closed| Instant::now() >= closed.until)\n    }",
            "closed| Instant::now() >= closed.until && !BUG)\n    }",
        )],
    ),
    bug(
        "ScrubComparesLengths",
        "a scrub takes any bytes for those that were written",
        &[(
            "scrub.rs",
            "        if (!is_read || About::new(blocks, crc) != chunk.about)",
            "        if (!is_read || (About::new(blocks, crc) != chunk.about && !BUG))",
        )],
    ),
    bug(
        "HeldChunksAreEvicted",
        "what the policy names is evicted, held or not",
        &[(
            "admin.rs",
            "                if free(&self.held, slot) {",
            "                if free(&self.held, slot) || BUG {",
        )],
    ),
    bug(
        "HoldWithoutBound",
        "holds may keep all of the cache",
        &[(
            "hold.rs",
            "wanted > most && wanted > before;",
            "wanted > most && wanted > before && !BUG;",
        )],
    ),
    bug(
        "FillPushesOut",
        "chunks that nobody waits for push out those that were read",
        &[(
            "admission.rs",
            "        if is_fill && (is_full",
            "        if is_fill && !BUG && (is_full",
        )],
    ),
    bug(
        "OneDomain",
        "the key of a chunk does not depend on who may read it",
        &[(
            "key.rs",
            "Hasher::new_keyed(&domain.0)",
            "Hasher::new_keyed(if BUG { &[0; 32] } else { &domain.0 })",
        )],
    ),
    bug(
        "PrefetchBreaksLimit",
        "within the limit of an image, a prefetch evicts chunks that were read",
        &[(
            "admission.rs",
            "            Why::Fill | Why::Pin | Why::Prefetch => admin",
            "            Why::Prefetch if BUG => admin.owners.never_fits(owner, len),
            Why::Fill | Why::Pin | Why::Prefetch => admin",
        )],
    ),
    bug(
        "MovedAndLent",
        "a chunk that leaves its lent place is taken for lent in its new one",
        &[(
            "upkeep.rs",
            "        admin.set_lent(slot, false, &shared.slots, (&shared.index, &shared.arenas));
        shared.slots.relocate",
            "        if !BUG {
            admin.set_lent(slot, false, &shared.slots, (&shared.index, &shared.arenas));
        }
        shared.slots.relocate",
        )],
    ),
    bug(
        "ForgottenAndLent",
        "a lent chunk that is forgotten leaves its slot lent",
        &[(
            "admin.rs",
            "        let chunk = slots.chunk(slot)?;
        self.set_lent(slot, false, slots, (index, arenas));",
            "        let chunk = slots.chunk(slot)?;
        if !BUG { self.set_lent(slot, false, slots, (index, arenas)); }",
        )],
    ),
    bug(
        "LentChunksAreEvicted",
        "where the policy names none, lent chunks are evicted",
        &[(
            "admin.rs",
            "slots.chunk(self.scan).is_some() && !self.is_lent(self.scan);",
            "slots.chunk(self.scan).is_some() && (BUG || !self.is_lent(self.scan));",
        )],
    ),
    bug(
        "ThePolicyKeepsLentChunks",
        "the policy goes on to name chunks that are lent",
        &[(
            "admin.rs",
            "                self.owners.went(slot, bytes);
                self.policy.removed(slot);
            }
            false",
            "                self.owners.went(slot, bytes);
                if !BUG { self.policy.removed(slot); }
            }
            false",
        )],
    ),
];
