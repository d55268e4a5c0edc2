//! Clones chunks from the host's cache: they take no space of their own.
//!
//! ```text
//!   server: arena and block of each resident chunk, a page at a time          hints: it parses what
//!     ─► FICLONERANGE from the arena to the chunk's address                   strangers send
//!         ─► read again: is it what the image's map says? ── no ─► cleared, and copied later
//!             ─► plain.lent: the server counts and evicts these no more
//! ```
//!
//! Invariants (`crates/cli/tests/let_go_reflink.rs`):
//! - Nothing that the server says, or has written, is trusted: a range of the file is cloned only
//!   if its bytes, read from there, have the digest of the map. From then on no write to the arena
//!   changes it. Whatever goes wrong before is a hole.
//! - No path of the server's is used: an arena is a regular file of the cache's folder, by number.

use std::{
    fs::File,
    io,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
};

use burgeon_block::{BLOCK_SIZE, ByteRange, Digest, Error, Result};
use burgeon_cache::{ArenaRange, LentRange, arena_name, disk::identity};
use burgeon_frontend::reflink::clone_blocks;
use burgeon_image::{AddressMap, Codec};
use burgeon_volume::cached_len;
use rustix::{
    fs::{CWD, Mode, OFlags, openat},
    io::Errno,
};

use super::{Job, copy::in_threads, daemon::Daemon, plain_file::NewPlain, sums::Sums};
use crate::{
    ipc::protocol::{CacheRequest, PlacedRun},
    state::{cache_dir::CacheDir, files, loans::RANGES_MAX, paths::StateDir},
};

/// Bytes that are cloned by one call: readers of the arena may have to wait for it.
const CLONED_MAX: u64 = 64 << 20;

/// The chunks that a plain file has in common with the cache.
pub(super) struct Cloned {
    /// A bit a chunk.
    chunks: Vec<AtomicU64>,
    bytes: AtomicU64,
}

impl Cloned {
    fn none(map: &AddressMap) -> Self {
        let words = map.chunk_count().div_ceil(64);
        Self { chunks: (0..words).map(|_| AtomicU64::new(0)).collect(), bytes: 0.into() }
    }

    fn add(&self, chunk: u32, bytes: u64) {
        self.chunks[chunk as usize / 64].fetch_or(1 << (chunk % 64), Relaxed);
        self.bytes.fetch_add(bytes, Relaxed);
    }

    fn has(&self, chunk: u32) -> bool {
        self.chunks[chunk as usize / 64].load(Relaxed) >> (chunk % 64) & 1 == 1
    }

    /// Their bytes.
    pub(super) fn bytes(&self) -> u64 {
        self.bytes.load(Relaxed)
    }

    /// The data that is not cloned.
    pub(super) fn rest<'a>(
        &'a self,
        map: &'a AddressMap,
    ) -> impl Iterator<Item = ByteRange> + Send + 'a {
        let mut next = 0;
        std::iter::from_fn(move || {
            let first = (next..map.chunk_count()).find(|chunk| !self.has(*chunk))?;
            let end = (first..map.chunk_count()).find(|chunk| self.has(*chunk));
            next = end.unwrap_or(map.chunk_count());
            ByteRange::new(map.chunk_range(first).start(), map.chunk_range(next - 1).end())
        })
    }
}

/// Clones the chunks of the mount that are in the cache to `new`, adds their checksums to `sums`,
/// and has them lent. Where that is impossible, nothing is cloned.
pub(super) fn resident(
    job: &Job<'_>,
    daemon: &mut Daemon<'_>,
    new: &NewPlain,
    sums: Option<&Sums>,
) -> Result<Cloned> {
    let (cloned, mut lent) = (Cloned::none(job.map), Vec::new());
    let mut arenas = Arenas { folder: CacheDir::read(job.state).folder(job.state), last: None };
    // Reads are of the disk, and memory is left to others.
    new.read_directly(true);
    let (mut next, mut can_clone) = (Some(0), true);
    while let Some(first) = next.filter(|_| can_clone) {
        let Some(places) = daemon.places(first) else { break };
        let mut here = Vec::new();
        for run in usable(&places.runs, first, job.map.chunk_count()) {
            match arenas.clone_to(new, &run, job.map)? {
                Outcome::Cloned(identity) => here.push((run, identity)),
                Outcome::NotThis => {}
                Outcome::Impossible => {
                    can_clone = false;
                    break;
                }
            }
        }
        let chunks = here.iter().flat_map(|(run, _)| run.first..run.first + run.count);
        in_threads(job.state, chunks, |chunk, buffer| {
            verify(job, new, sums, chunk, buffer, &cloned)
        })?;
        here.iter().for_each(|(run, identity)| lend(&cloned, job.map, run, *identity, &mut lent));
        next = places.next.filter(|next| *next > first);
    }
    new.read_directly(false);
    if !lent.is_empty() {
        // Those beyond count in the cache, which does no harm.
        lent.truncate(RANGES_MAX);
        new.record_lent(&lent)?;
        // Every answer of the server is given after it has looked at the records. The room for the
        // rest is no such question where it is looked for in another subvolume of a btrfs.
        daemon.of_cache(CacheRequest::Show)?;
    }
    Ok(cloned)
}

/// The runs of an answer that can be right: in ascending order from chunk `first` on, and of some
/// of the `count` chunks that there are.
fn usable(runs: &[PlacedRun], first: u32, count: u32) -> impl Iterator<Item = PlacedRun> + '_ {
    let mut next = first;
    runs.iter().copied().filter(move |run| {
        let end = run.first.checked_add(run.count).filter(|end| *end <= count);
        let is_usable = run.first >= next && run.count > 0 && end.is_some();
        next = end.filter(|_| is_usable).unwrap_or(next);
        is_usable
    })
}

/// The bytes of a run in the mount's data.
fn data_of(run: &PlacedRun, map: &AddressMap) -> Option<ByteRange> {
    let last = map.chunk_range(run.first + run.count - 1);
    ByteRange::new(map.chunk_range(run.first).start(), last.end())
}

enum Outcome {
    /// Cloned, from the arena of this identity, and not verified.
    Cloned(u64),
    /// Not these chunks.
    NotThis,
    /// Nothing can be cloned: the file system has no such thing, or the cache is on another one.
    Impossible,
}

/// The arenas of the cache, of which the last one is open.
struct Arenas {
    folder: PathBuf,
    last: Option<(u32, File, u64)>,
}

impl Arenas {
    fn open(&mut self, arena: u32) -> Option<(&File, u64)> {
        if self.last.as_ref().is_none_or(|(last, _, _)| *last != arena) {
            let path = self.folder.join(arena_name(arena));
            let file = files::open(&path, File::options().read(true)).ok()?;
            let identity = identity(&file);
            self.last = Some((arena, file, identity));
        }
        self.last.as_ref().map(|(_, file, identity)| (file, *identity))
    }

    /// Clones the chunks of a run, as far as they lie where it says.
    fn clone_to(&mut self, new: &NewPlain, run: &PlacedRun, map: &AddressMap) -> Result<Outcome> {
        let Some(to) = data_of(run, map) else { return Ok(Outcome::NotThis) };
        let from = ByteRange::at(u64::from(run.block) * BLOCK_SIZE, to.len());
        let (Some((file, identity)), Some(from)) = (self.open(run.arena), from) else {
            return Ok(Outcome::NotThis);
        };
        let clone = |at: u64| {
            let part = ByteRange::at(from.start() + at, CLONED_MAX.min(from.len() - at));
            part.map_or(Ok(()), |part| clone_blocks(file, part, &new.file, to.start() + at))
        };
        let mut parts = (0..from.len()).step_by(CLONED_MAX as usize);
        let Err(error) = parts.try_for_each(clone) else { return Ok(Outcome::Cloned(identity)) };
        tracing::debug!(%error, arena = run.arena, "chunks are copied");
        // A file system that cannot clone perhaps cannot clear a file, either.
        if is_impossible(&error) {
            return Ok(Outcome::Impossible);
        }
        // It may have cloned a part.
        new.clear(to)?;
        Ok(Outcome::NotThis)
    }
}

/// True if no range of these files can be cloned: the file system has no such thing, or there are
/// two.
fn is_impossible(error: &Error) -> bool {
    let errno = error.cause::<io::Error>().and_then(Errno::from_io_error);
    matches!(errno, Some(Errno::OPNOTSUPP | Errno::XDEV | Errno::NOTTY))
}

/// True if plain files can share the blocks of the cache's arenas, as far as nameless files of the
/// two folders can tell.
pub(super) fn is_possible(state: &StateDir) -> bool {
    can_clone(&CacheDir::read(state).folder(state), &state.mounts())
}

fn can_clone(from: &Path, to: &Path) -> bool {
    let nameless = |folder: &Path| -> io::Result<File> {
        let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
        let file = File::from(openat(CWD, folder, flags, Mode::RUSR | Mode::WUSR)?);
        // A hole is cloned as any other block.
        file.set_len(BLOCK_SIZE).map(|()| file)
    };
    let (Ok(from), Ok(to), Some(block)) =
        (nameless(from), nameless(to), ByteRange::at(0, BLOCK_SIZE))
    else {
        // Nobody knows: the first chunk will tell.
        return true;
    };
    clone_blocks(&from, block, &to, 0).err().is_none_or(|error| !is_impossible(&error))
}

/// Reads a cloned chunk from the file. If it is wrong, its place is a hole again.
fn verify(
    job: &Job<'_>,
    new: &NewPlain,
    sums: Option<&Sums>,
    chunk: u32,
    buffer: &mut [u8],
    cloned: &Cloned,
) -> Result<()> {
    let chunk_of_map = job.map.chunk(chunk);
    let range = chunk_of_map.range;
    let (bytes, rest) = buffer.split_at_mut(range.len() as usize);
    let is_read = new.file.read_exact_at(bytes, range.start()).is_ok();
    let is_right = is_read
        && match chunk_of_map.codec {
            Codec::Raw | Codec::Zstd => Digest::of(bytes) == chunk_of_map.digest,
            // Only its source knows.
            Codec::Verified => {
                let right = &mut rest[..bytes.len()];
                job.device.read(range.start(), right)?;
                bytes == right
            }
        };
    if !is_right {
        return new.clear(range);
    }
    sums.map_or(Ok(()), |sums| sums.add(range, bytes))?;
    cloned.add(chunk, range.len());
    job.done(range.len());
    Ok(())
}

/// Adds the places of the cloned chunks of a run to `lent`, with their seals: a chunk is lent as a
/// whole.
fn lend(
    cloned: &Cloned,
    map: &Arc<AddressMap>,
    run: &PlacedRun,
    identity: u64,
    lent: &mut Vec<LentRange>,
) {
    let mut block = run.block;
    for chunk in run.first..run.first + run.count {
        let blocks = (map.chunk_range(chunk).len() / BLOCK_SIZE) as u32;
        let cached = (cached_len(map, chunk) / BLOCK_SIZE) as u32;
        let range = ArenaRange { arena: run.arena, block, blocks: cached };
        block = block.saturating_add(blocks);
        if !cloned.has(chunk) {
            continue;
        }
        match lent.last_mut() {
            Some(last)
                if (last.identity, last.range.arena) == (identity, run.arena)
                    && last.range.block.checked_add(last.range.blocks) == Some(range.block) =>
            {
                last.range.blocks += cached;
            }
            _ => lent.push(LentRange { identity, range }),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{io, path::Path};

    use burgeon_block::{Error, ErrorKind};

    use super::{can_clone, is_impossible, usable};
    use crate::ipc::protocol::PlacedRun;

    #[test]
    fn nothing_is_cloned_in_memory_and_between_file_systems() {
        let (temp, memory) = (tempfile::tempdir().unwrap(), Path::new("/dev/shm"));
        assert!(!can_clone(memory, memory));
        assert!(!can_clone(temp.path(), memory));
        assert!(can_clone(&temp.path().join("missing"), temp.path()), "nobody knows");
    }

    #[test]
    fn only_errors_of_all_ranges_end_cloning() {
        let of = |errno| {
            let error = Error::io("cannot clone", io::Error::from_raw_os_error(errno));
            is_impossible(&Error::with_source(ErrorKind::LocalIo, "cannot", error))
        };
        assert!([libc::EOPNOTSUPP, libc::EXDEV, libc::ENOTTY].map(of).iter().all(|it| *it));
        assert!(![libc::EINVAL, libc::ENOSPC, libc::EIO].map(of).iter().any(|it| *it));
    }

    #[test]
    fn runs_that_cannot_be_right_are_passed_over() {
        let run = |first, count| PlacedRun { first, count, arena: 1, block: 0 };
        let good = [run(10, 2), run(12, 1), run(90, 10)];
        let bad = [run(3, 8), run(11, 1), run(10, 3), run(50, 0), run(95, 6), run(u32::MAX, 2)];
        let all: Vec<_> = usable(&good, 10, 100).collect();
        assert_eq!(all, good);
        for wrong in bad {
            let said = [good[0], wrong, good[1], wrong, good[2], wrong];
            let used: Vec<_> = usable(&said, 10, 100).collect();
            assert_eq!(used, good, "{wrong:?}");
        }
    }
}
