//! The folder of a cache that is full of chunks of 256 KiB, made without their bytes: its arenas
//! are holes, and its checkpoint lists them.

use std::{
    fs::{self, File},
    io::{BufWriter, Result, Write as _},
    path::Path,
};

use burgeon_cache::{
    ChunkKey, Domain, KeyKind, arena_name, checkpoint,
    journal::{Event, Record},
};

const BLOCKS: u32 = 64;
const ARENA_BLOCKS: u32 = 1 << 22;
const GROUP: usize = 2048;

/// The key of chunk `n`.
pub(crate) fn key(n: u32) -> ChunkKey {
    ChunkKey::new(&Domain::PUBLIC, KeyKind::Chunk, &n.to_le_bytes())
}

fn record(n: u32) -> Record {
    let per_arena = ARENA_BLOCKS / BLOCKS;
    let (arena, block) = (1 + n / per_arena, n % per_arena * BLOCKS);
    Record { event: Event::Admitted, key: key(n), arena, block, about: BLOCKS }
}

/// Makes the folder, of so many chunks. It takes 28 bytes a chunk.
pub(crate) fn make(folder: &Path, chunks: u32) -> Result<()> {
    fs::create_dir_all(folder)?;
    for arena in 1..=chunks.div_ceil(ARENA_BLOCKS / BLOCKS) {
        let file = File::create(folder.join(arena_name(arena)))?;
        file.set_len(u64::from(ARENA_BLOCKS) * 4096)?;
    }
    let (number, id) = (1, 7);
    let file = File::create(folder.join(format!("checkpoint-{number:016x}")))?;
    let mut file = BufWriter::new(file);
    file.write_all(&checkpoint::header(number, id))?;
    let mut groups = 0;
    for first in (0..chunks).step_by(GROUP) {
        let end = chunks.min(first + GROUP as u32);
        let group: Vec<Record> = (first..end).map(record).collect();
        file.write_all(&checkpoint::encode_group(&group, id, groups))?;
        groups += 1;
    }
    file.write_all(&checkpoint::encode_end(chunks.into(), id, groups))?;
    file.flush()
}
