//! Writes journal and checkpoints; docs/format.md, "Cache".
//!
//! ```text
//!   journal-7 ── is long ──► journal-8 begins ──► checkpoint-8, part by part ──► renamed:
//!                                                 journal-7 and checkpoint-7 are removed
//! ```

use std::time::Instant;

use burgeon_block::{ErrorKind, Result};

use crate::{
    checkpoint,
    disk::{DiskFile, IoMode, LOCK},
    journal::{self, Event, RECORD, Record},
    shared::{Shared, lock},
    slots::ARENA_BLOCKS_MAX,
};

/// Records that are written without waiting.
const RECORDS: usize = 4096;
/// Groups of a checkpoint that one round writes.
const GROUPS: usize = 128;
/// Slots that one round looks at for them.
const LOOKED_AT: u32 = 1 << 20;

struct Journal {
    file: Box<dyn DiskFile>,
    id: u64,
    records: u64,
}

struct Checkpoint {
    file: Box<dyn DiskFile>,
    id: u64,
    len: u64,
    groups: u64,
    total: u64,
    next_slot: u32,
}

#[derive(Default)]
pub(crate) struct Persist {
    journal: Option<Journal>,
    /// The number of the journal that is written, or was last.
    pub(crate) number: u64,
    /// The journals that were loaded: the server that wrote them may have died before a sync.
    pub(crate) loaded: Vec<u64>,
    checkpoint: Option<Checkpoint>,
    /// The journals are long, or lack something.
    pub(crate) wants_checkpoint: bool,
    last: Option<Instant>,
}

pub(crate) fn journal_name(number: u64) -> String {
    format!("journal-{number:016x}")
}

pub(crate) fn checkpoint_name(number: u64) -> String {
    format!("checkpoint-{number:016x}")
}

/// The number in such a name.
pub(crate) fn number_of(name: &str, prefix: &str) -> Option<u64> {
    let digits = name.strip_prefix(prefix).filter(|digits| digits.len() == 16)?;
    u64::from_str_radix(digits, 16).ok()
}

/// The checkpoint that is being written.
pub(crate) const UNFINISHED: &str = "checkpoint.new";

/// True if a cache in a folder gives this name to a file of its own, also while the file is made.
pub fn is_own_name(name: &str) -> bool {
    let is_spare =
        name.strip_prefix("spare-").is_some_and(|it| u32::from_str_radix(it, 16).is_ok());
    name == LOCK
        || name == UNFINISHED
        || is_spare
        || crate::arena::id_of(name).is_some()
        || ["journal-", "checkpoint-"].iter().any(|prefix| number_of(name, prefix).is_some())
}

fn random() -> u64 {
    std::hash::BuildHasher::hash_one(&std::hash::RandomState::new(), 1)
}

impl Persist {
    /// Writes what waits: all of it, or when there is enough, and goes on with a checkpoint.
    pub(crate) fn write(&mut self, shared: &Shared, all: bool) -> Result<()> {
        let record_age = lock(&shared.settings).record_age;
        let is_due = {
            let admin = lock(&shared.admin);
            let is_old = self.last.is_none_or(|last| last.elapsed() >= record_age);
            self.wants_checkpoint |= admin.records_lost;
            admin.records.len() >= RECORDS || (all || is_old) && !admin.records.is_empty()
        };
        let written = if is_due { self.append(shared) } else { Ok(()) };
        let written = written.and_then(|()| {
            let len_max = lock(&shared.settings).journal_len;
            let is_long =
                self.journal.as_ref().is_some_and(|it| it.records * RECORD as u64 > len_max);
            if self.checkpoint.is_none() && (is_long || self.wants_checkpoint) {
                self.begin_checkpoint(shared)?;
            }
            self.continue_checkpoint(shared)
        });
        if written.is_err() {
            // The journal has a hole now, or no end.
            self.journal = None;
            self.checkpoint = None;
            self.wants_checkpoint = true;
        }
        written
    }

    fn begin_journal(&mut self, shared: &Shared) -> Result<&mut Journal> {
        self.number += 1;
        let file = shared.disk.create(&journal_name(self.number), IoMode::Bytes)?;
        let id = random();
        file.write_at(0, &journal::header(self.number, id))?;
        Ok(self.journal.insert(Journal { file, id, records: 0 }))
    }

    fn append(&mut self, shared: &Shared) -> Result<()> {
        let records = std::mem::take(&mut lock(&shared.admin).records);
        self.last = Some(Instant::now());
        let journal = match self.journal.as_mut() {
            Some(journal) => journal,
            None => self.begin_journal(shared)?,
        };
        let mut bytes = Vec::with_capacity(records.len() * RECORD);
        for (index, record) in (journal.records..).zip(&records) {
            bytes.extend_from_slice(&journal::encode(record, journal.id, index));
        }
        journal.file.write_at((journal.records + 1) * RECORD as u64, &bytes)?;
        journal.records += records.len() as u64;
        shared.tally.written.add(bytes.len() as u64);
        Ok(())
    }

    fn begin_checkpoint(&mut self, shared: &Shared) -> Result<()> {
        lock(&shared.admin).records_lost = false;
        // Whatever comes or goes from here on is in the new journal, too.
        self.append(shared)?;
        // A sync that comes before the checkpoint is whole syncs the new journal alone.
        self.journal.as_ref().map_or(Ok(()), |journal| journal.file.sync())?;
        self.begin_journal(shared)?;
        self.wants_checkpoint = false;
        if shared.disk.list()?.iter().any(|name| name == UNFINISHED) {
            shared.disk.remove(UNFINISHED)?;
        }
        let file = shared.disk.create(UNFINISHED, IoMode::Bytes)?;
        let id = random();
        file.write_at(0, &checkpoint::header(self.number, id))?;
        let len = checkpoint::HEADER as u64;
        self.checkpoint = Some(Checkpoint { file, id, len, groups: 0, total: 0, next_slot: 0 });
        Ok(())
    }

    fn continue_checkpoint(&mut self, shared: &Shared) -> Result<()> {
        let Some(checkpoint) = &mut self.checkpoint else { return Ok(()) };
        let end = lock(&shared.admin).slots_end;
        let last = end.min(checkpoint.next_slot.saturating_add(LOOKED_AT));
        for _ in 0..GROUPS {
            let mut group = Vec::with_capacity(checkpoint::GROUP);
            while group.len() < checkpoint::GROUP && checkpoint.next_slot < last {
                group.extend(record_of(shared, checkpoint.next_slot));
                checkpoint.next_slot += 1;
            }
            if !group.is_empty() {
                let bytes = checkpoint::encode_group(&group, checkpoint.id, checkpoint.groups);
                checkpoint.file.write_at(checkpoint.len, &bytes)?;
                checkpoint.len += bytes.len() as u64;
                checkpoint.groups += 1;
                checkpoint.total += group.len() as u64;
                shared.tally.written.add(bytes.len() as u64);
            }
            if checkpoint.next_slot == last {
                break;
            }
        }
        if checkpoint.next_slot < end {
            shared.wake();
            return Ok(());
        }
        let bytes = checkpoint::encode_end(checkpoint.total, checkpoint.id, checkpoint.groups);
        checkpoint.file.write_at(checkpoint.len, &bytes)?;
        checkpoint.file.sync()?;
        shared.disk.rename(UNFINISHED, &checkpoint_name(self.number))?;
        shared.disk.sync()?;
        self.checkpoint = None;
        remove_older(shared, self.number)
    }

    /// Makes durable what was written, and what a journal with a hole does not say.
    pub(crate) fn sync(&mut self, shared: &Shared) -> Result<()> {
        let is_incomplete = self.wants_checkpoint;
        self.write(shared, true)?;
        while is_incomplete && self.checkpoint.is_some() {
            self.continue_checkpoint(shared)?;
        }
        for number in &self.loaded {
            match shared.disk.open(&journal_name(*number), IoMode::Bytes) {
                Ok(journal) => journal.sync()?,
                // A checkpoint has taken its place.
                Err(error) if error.kind() == ErrorKind::NotFound => {}
                Err(error) => return Err(error),
            }
        }
        self.loaded.clear();
        self.journal.as_ref().map_or(Ok(()), |journal| journal.file.sync())?;
        shared.disk.sync()
    }
}

/// Removes the journals and checkpoints that the checkpoint `number` makes superfluous.
pub(crate) fn remove_older(shared: &Shared, number: u64) -> Result<()> {
    for name in shared.disk.list()? {
        let of = number_of(&name, "journal-").or_else(|| number_of(&name, "checkpoint-"));
        if of.is_some_and(|of| of < number) {
            shared.disk.remove(&name)?;
        }
    }
    Ok(())
}

fn record_of(shared: &Shared, slot: u32) -> Option<Record> {
    let chunk = shared.slots.chunk(slot)?;
    let arena = shared.arenas.get(chunk.location.arena)?.id();
    let record = Record {
        event: Event::Admitted,
        key: chunk.key,
        arena,
        block: chunk.location.block,
        about: chunk.about.to_bits(),
    };
    debug_assert!(chunk.location.block < ARENA_BLOCKS_MAX);
    record.checked()
}
