//! Loads the chunks that an earlier server left: a checkpoint, and the journals that follow it.

use std::{collections::HashMap, sync::atomic::Ordering::Relaxed};

use burgeon_block::{BLOCK_SIZE, Result};

use crate::{
    Why,
    arena::{self, ARENAS_MAX, Arena},
    checkpoint::{self, Step},
    disk::{DiskFile, IoMode},
    journal::{self, Event, RECORD, Record},
    owners::NOBODY,
    persist::{Persist, UNFINISHED, checkpoint_name, journal_name, number_of, remove_older},
    shared::{Shared, lock},
    slots::{ARENA_BLOCKS_MAX, About, Chunk, Location, SLOTS_MAX},
};

/// Journals that are read at a start before a checkpoint replaces them.
const JOURNALS: usize = 4;
/// Bytes that are read at once: whole groups and records.
const PART: usize = 1 << 20;

/// Index and length in blocks of the arena with each number.
type Known = HashMap<u32, (u32, u32)>;

/// Loads what is in the folder, which this server has just taken, and adds to `gaps` the arenas
/// that take more space than their chunks, each with the bytes. Files that cannot be read are as if
/// they were not there.
pub(crate) fn run(
    shared: &Shared,
    persist: &mut Persist,
    gaps: &mut Vec<(u32, u64)>,
) -> Result<()> {
    let names = shared.disk.list()?;
    let known = open_arenas(shared, &names)?;
    let newest = names.iter().filter_map(|name| number_of(name, "checkpoint-")).max();
    let mut highest = 0;
    if let Some(number) = newest {
        let mut known = Lookup { known: &known, last: None };
        read_checkpoint(shared, number, &mut |records: &[Record]| {
            let mut admin = lock(&shared.admin);
            for record in records {
                highest = highest.max(record.arena);
                if let Some(chunk) = known.chunk(record) {
                    admin.insert(&chunk, (Why::Read, NOBODY), &shared.slots, &shared.index);
                }
            }
        });
    }
    let mut known = Lookup { known: &known, last: None };
    let mut apply = |record: Record| {
        highest = highest.max(record.arena);
        apply(shared, &mut known, record);
    };
    let journals = names.iter().filter_map(|name| number_of(name, "journal-"));
    let mut journals: Vec<u64> = journals.filter(|number| *number >= newest.unwrap_or(0)).collect();
    journals.sort_unstable();
    let mut len = 0;
    for number in &journals {
        len += read_journal(shared, *number, &mut apply);
    }
    let next = shared.next_arena.load(Relaxed).max(u64::from(highest) + 1);
    shared.next_arena.store(next, Relaxed);
    count(shared, gaps);

    let number = journals.last().copied().or(newest).unwrap_or(0);
    persist.number = persist.number.max(number);
    persist.loaded = journals;
    let is_long = len > lock(&shared.settings).journal_len;
    persist.wants_checkpoint = is_long || persist.loaded.len() > JOURNALS;
    // A file that stays is tried again by the next server; loading twice would be worse.
    let stays = |file: &str, error| tracing::warn!(file, %error, "an old file of the cache stays");
    for name in names.iter().filter(|name| *name == UNFINISHED || name.starts_with("spare-")) {
        shared.disk.remove(name).unwrap_or_else(|error| stays(name, error));
    }
    let older = remove_older(shared, newest.unwrap_or(0));
    older.unwrap_or_else(|error| stays("an older journal or checkpoint", error));
    Ok(())
}

/// Counts the chunks' space in each arena, and what the arena takes beyond it.
fn count(shared: &Shared, gaps: &mut Vec<(u32, u64)>) {
    let mut admin = lock(&shared.admin);
    // Space that replays freed may be in use again: the gaps count.
    admin.freed.clear();
    admin.records.clear();
    let mut used = 0;
    for slot in 0..admin.slots_end {
        let Some(chunk) = shared.slots.chunk(slot) else { continue };
        let bytes = u64::from(chunk.about.blocks()) * BLOCK_SIZE;
        if let Some(arena) = shared.arenas.get(chunk.location.arena) {
            arena.live.fetch_add(bytes, Relaxed);
        }
        used += bytes;
    }
    for (index, arena) in shared.arenas.iter() {
        let taken = arena.file.sizes().map_or(0, |(_, taken)| taken);
        let leaked = taken.saturating_sub(arena.live.load(Relaxed));
        if leaked > 0 {
            gaps.push((index, leaked));
            used += leaked;
        }
    }
    admin.used += used;
}

fn open_arenas(shared: &Shared, names: &[String]) -> Result<Known> {
    let mut ids: Vec<(u32, &String)> =
        names.iter().filter_map(|name| Some((arena::id_of(name)?, name))).collect();
    ids.sort_unstable();
    let mut known = Known::new();
    for (id, name) in ids.into_iter().rev() {
        // A name is used once, also that of a file that cannot be opened.
        let next = shared.next_arena.load(Relaxed).max(u64::from(id) + 1);
        shared.next_arena.store(next, Relaxed);
        let file = match shared.disk.open(name, IoMode::Blocks) {
            Ok(file) if known.len() < ARENAS_MAX - 1 => file,
            Ok(_) => {
                if let Err(error) = shared.disk.remove(name) {
                    tracing::warn!(file = name, %error, "a surplus arena of the cache stays");
                }
                continue;
            }
            Err(error) => {
                tracing::warn!(file = name, %error, "cannot open an arena of the cache: it is left out");
                continue;
            }
        };
        let Ok((len, _)) = file.sizes() else { continue };
        let len = len.min(u64::from(ARENA_BLOCKS_MAX) * BLOCK_SIZE);
        if let Some(index) = shared.arenas.push(Arena::new(file, id, len)) {
            known.insert(id, (index, len.div_ceil(BLOCK_SIZE) as u32));
        }
    }
    Ok(known)
}

/// The arenas by their numbers, the last one at hand.
struct Lookup<'a> {
    known: &'a Known,
    last: Option<(u32, (u32, u32))>,
}

impl Lookup<'_> {
    /// The chunk of the record, if its arena is here and long enough.
    fn chunk(&mut self, record: &Record) -> Option<Chunk> {
        if self.last.is_none_or(|(id, _)| id != record.arena) {
            self.last = Some((record.arena, *self.known.get(&record.arena)?));
        }
        let (_, (arena, blocks)) = self.last?;
        let about = About::from_bits(record.about);
        let location = Location { arena, block: record.block };
        let fits = record.block + about.blocks() <= blocks;
        fits.then_some(Chunk { key: record.key, location, about })
    }
}

fn apply(shared: &Shared, known: &mut Lookup<'_>, record: Record) {
    let mut admin = lock(&shared.admin);
    let current = shared.index.find(&record.key, &shared.slots);
    let current = current.and_then(|slot| Some((slot, shared.slots.chunk(slot)?)));
    let chunk = known.chunk(&record);
    if let Some((slot, current)) = current {
        let is_same = chunk.is_some_and(|chunk| chunk.location == current.location);
        if is_same == (record.event == Event::Admitted) {
            return;
        }
        admin.remove(slot, &shared.slots, &shared.index, &shared.arenas);
        admin.freed.clear();
        admin.records.clear();
    }
    if let Some(chunk) = chunk.filter(|_| record.event == Event::Admitted) {
        admin.insert(&chunk, (Why::Read, NOBODY), &shared.slots, &shared.index);
    }
}

/// Reads a file from `offset` on in parts; `each` says how many of its bytes it used, and `None`
/// to end.
fn read_parts(
    file: &dyn DiskFile,
    mut offset: u64,
    len: u64,
    mut each: impl FnMut(&[u8]) -> Option<usize>,
) -> u64 {
    let mut buf = vec![0; PART];
    while offset < len {
        let part = buf.len().min((len - offset) as usize);
        if file.read_at(offset, &mut buf[..part]).is_err() {
            break;
        }
        match each(&buf[..part]) {
            Some(used) if used > 0 => offset += used as u64,
            _ => break,
        }
    }
    offset
}

fn read_checkpoint(shared: &Shared, number: u64, each: &mut impl FnMut(&[Record])) {
    let Ok(file) = shared.disk.open(&checkpoint_name(number), IoMode::Bytes) else { return };
    let Ok((len, taken)) = file.sizes() else { return };
    let mut header = [0; checkpoint::HEADER];
    let is_read = file.read_at(0, &mut header).is_ok();
    let reader = checkpoint::CheckpointReader::decode_header(&header, number).filter(|_| is_read);
    let Some(mut reader) = reader else { return };
    let mut is_whole = false;
    // A length alone claims nothing: the file may be one hole.
    let entries = (len.min(taken) / checkpoint::ENTRY as u64).min(SLOTS_MAX.into());
    shared.index.reserve(entries as usize);
    lock(&shared.admin).policy.expect(entries as usize);
    let mut group = Vec::with_capacity(checkpoint::GROUP);
    read_parts(&*file, header.len() as u64, len, |part| {
        let mut used = 0;
        loop {
            let step = reader.decode(&part[used..], |record| group.push(record));
            each(&group);
            group.clear();
            match step {
                Step::Group(len) => used += len,
                // The group goes on in the next part, if there is one.
                Step::More => return (part.len() == PART).then_some(used),
                Step::End => {
                    is_whole = true;
                    return None;
                }
                Step::Bad => return None,
            }
        }
    });
    if !is_whole {
        tracing::warn!(number, "a checkpoint of the cache is damaged: the rest is fetched again");
    }
}

fn read_journal(shared: &Shared, number: u64, each: &mut impl FnMut(Record)) -> u64 {
    let Ok(file) = shared.disk.open(&journal_name(number), IoMode::Bytes) else { return 0 };
    let Ok((len, _)) = file.sizes() else { return 0 };
    let mut header = [0; RECORD];
    let is_read = file.read_at(0, &mut header).is_ok();
    let reader = journal::JournalReader::decode_header(&header, number).filter(|_| is_read);
    let Some(mut reader) = reader else { return 0 };
    read_parts(&*file, RECORD as u64, len, |part| {
        let whole = part.len() / RECORD * RECORD;
        reader.decode(&part[..whole], &mut *each).then_some(whole)
    })
}
