//! Records of the chunks whose space plain files share with the host's cache.
//!
//! ```text
//!   mounts/<id>/plain                       plain.lent
//!   images/<digest>/complete/plain, summed  plain.lent, summed.lent        beside the file, as long as it is there
//!
//!   plain.lent:  magic │ ranges of arenas, 24 bytes each: identity, arena, block, blocks, 0
//! ```
//!
//! The command that clones chunks writes the record; the server reads all of them, and lends the
//! chunks (`burgeon_cache::LentRange`).
//!
//! Invariants, held by the tests below and `crates/cli/tests/let_go_reflink.rs`:
//! - A record is written after the space is shared, and removed before it no longer is. So a
//!   lost one costs the cache room that it has, and nothing else.
//! - Less privileged processes can write to the folders of images: records are bounded, in number
//!   and all together, and say nothing but that chunks take no space. The floor is that of the file
//!   system all the same.

use std::{
    collections::BTreeSet,
    fs::{self, File},
    io::{self, BufReader, BufWriter, Read, Write},
    os::unix::fs::{MetadataExt, OpenOptionsExt},
    path::{Path, PathBuf},
};

use burgeon_block::{Error, ErrorKind, Result};
use burgeon_cache::{ArenaRange, LentRange};
use burgeon_image::{remove_own, rename_own};
use rustix::fs::RenameFlags;

use super::{files, paths::StateDir};

const MAGIC: [u8; 8] = *b"BURGLEN1";
const RANGE: usize = 24;
/// Most ranges of all records: 24 MiB of memory. Each has one chunk at least, mostly many, of up to
/// 256 KiB; the chunks of others are not lent.
pub(crate) const RANGES_MAX: usize = 1 << 20;
/// Most records that are looked at. Those of mounts come first.
const RECORDS_MAX: usize = 1 << 14;

/// The record of the plain file at `plain`.
fn record(plain: &Path) -> PathBuf {
    plain.with_extension("lent")
}

/// Records that the plain file at `plain` shares `ranges`.
pub(crate) fn write(plain: &Path, ranges: &[LentRange]) -> Result<()> {
    let path = record(plain);
    let new = path.with_extension("lent-new");
    let write = || {
        let mut options = File::options();
        options.write(true).create(true).truncate(true).mode(0o600);
        let mut file = BufWriter::new(files::open(&new, &mut options)?);
        file.write_all(&MAGIC)?;
        for LentRange { identity, range } in ranges {
            file.write_all(&identity.to_le_bytes())?;
            for number in [range.arena, range.block, range.blocks, 0] {
                file.write_all(&number.to_le_bytes())?;
            }
        }
        // Not synced: what a crash takes counts again.
        file.flush()?;
        rename_own(&new, &path, RenameFlags::empty())
    };
    write().map_err(|e| Error::io(format!("cannot write {}", path.display()), e))
}

/// Forgets the record of the plain file at `plain`, which is about to be removed.
pub(crate) fn forget(plain: &Path) -> Result<()> {
    let path = record(plain);
    match remove_own(&path) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => {
            Err(Error::io(format!("cannot remove {}", path.display()), e))
        }
        _ => Ok(()),
    }
}

/// Moves the record of a plain file that was moved from `from` to `to`.
pub(crate) fn follow(from: &Path, to: &Path) {
    let moved = match rename_own(&record(from), &record(to), RenameFlags::empty()) {
        // It shares nothing. A record that is there is of an earlier file, which shares no more.
        Err(error) if error.kind() == io::ErrorKind::NotFound => forget(to),
        Err(error) => Err(Error::io("cannot move the record of lent chunks", error)),
        Ok(()) => Ok(()),
    };
    if let Err(error) = moved {
        tracing::debug!(to = %to.display(), %error, "the record of lent chunks stays behind");
    }
}

/// A record as it was at one moment, wherever its plain file is.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) struct Seen {
    inode: u64,
    changed: (i64, i64),
    len: u64,
}

/// The records of all plain files, with their paths.
pub(crate) fn all(state: &StateDir) -> Vec<(Seen, PathBuf)> {
    let folders = |folder: PathBuf| fs::read_dir(folder).into_iter().flatten().flatten();
    let mounts = folders(state.mounts()).map(|mount| mount.path().join("plain"));
    let images = folders(state.images()).flat_map(|image| {
        let complete = image.path().join("complete");
        [complete.join("plain"), complete.join("summed")]
    });
    let seen = |plain: PathBuf| {
        let path = record(&plain);
        let is = path.symlink_metadata().ok().filter(fs::Metadata::is_file)?;
        let changed = (is.mtime(), is.mtime_nsec());
        Some((Seen { inode: is.ino(), changed, len: is.len() }, path))
    };
    mounts.chain(images).filter_map(seen).take(RECORDS_MAX).collect()
}

/// The ranges of all records, and which records those are. One that cannot be read, or is beyond
/// the bound, lends nothing.
pub(crate) fn read_all(state: &StateDir) -> (BTreeSet<Seen>, Vec<LentRange>) {
    read_at_most(state, RANGES_MAX)
}

fn read_at_most(state: &StateDir, ranges_max: usize) -> (BTreeSet<Seen>, Vec<LentRange>) {
    let (mut seen, mut ranges) = (BTreeSet::new(), Vec::new());
    for (record, path) in all(state) {
        seen.insert(record);
        match read(&path, ranges_max - ranges.len()) {
            Ok(more) => ranges.extend(more),
            Err(error) => tracing::warn!(%error, "the chunks of a plain file count as any others"),
        }
    }
    (seen, ranges)
}

/// The ranges of a record, which has `ranges_max` at most.
fn read(path: &Path, ranges_max: usize) -> Result<Vec<LentRange>> {
    let failed = |e| Error::io(format!("cannot read {}", path.display()), e);
    let file = files::open(path, File::options().read(true)).map_err(failed)?;
    let len = file.metadata().map_err(failed)?.len();
    let mut file = BufReader::new(file);
    let mut magic = MAGIC;
    file.read_exact(&mut magic).map_err(failed)?;
    let count = (len - MAGIC.len() as u64) / RANGE as u64;
    if magic != MAGIC {
        let what = format!("{} is no record of lent chunks", path.display());
        return Err(Error::new(ErrorKind::Corrupt, what));
    }
    if count > ranges_max as u64 {
        let what = format!(
            "{} has {count} ranges of lent chunks, and {RANGES_MAX} are kept of all records",
            path.display()
        );
        return Err(Error::new(ErrorKind::Invalid, what));
    }
    let mut ranges = Vec::new();
    for _ in 0..count {
        let mut words = [[0; 4]; RANGE / 4];
        file.read_exact(words.as_flattened_mut()).map_err(failed)?;
        let [low, high, arena, block, blocks, _] = words.map(u32::from_le_bytes);
        let identity = u64::from(low) | u64::from(high) << 32;
        ranges.push(LentRange { identity, range: ArenaRange { arena, block, blocks } });
    }
    Ok(ranges)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use burgeon_block::Digest;
    use burgeon_cache::{ArenaRange, LentRange};

    use super::{all, follow, forget, read_all, read_at_most, record, write};
    use crate::{
        id::MountId,
        state::{complete, files, paths::StateDir},
    };

    fn lent(arena: u32) -> LentRange {
        let range = ArenaRange { arena, block: arena + 1, blocks: arena + 2 };
        LentRange { identity: u64::from(arena) << 40 | 1, range }
    }

    fn with_image_and_mount() -> (tempfile::TempDir, StateDir, Digest, MountId) {
        let temp = tempfile::tempdir().unwrap();
        let state = StateDir::open(&temp.path().join("state")).unwrap();
        let (image, id) = (Digest::of(b"image"), MountId::random().unwrap());
        files::make_folder(&state.image(&image)).unwrap();
        files::make_folder(&complete::folder(&state, &image)).unwrap();
        files::make_folder(&state.mount(id)).unwrap();
        (temp, state, image, id)
    }

    #[test]
    fn records_are_found_wherever_their_files_are_and_end_with_them() {
        let (_temp, state, image, id) = with_image_and_mount();
        let mount = state.plain_file(id);
        let [plain, summed] =
            ["plain", "summed"].map(|name| complete::folder(&state, &image).join(name));
        write(&plain, &[lent(1), lent(2)]).unwrap();
        write(&summed, &[lent(3)]).unwrap();
        let (seen, mut ranges) = read_all(&state);
        ranges.sort();
        assert_eq!((seen.len(), ranges), (2, vec![lent(1), lent(2), lent(3)]));
        // The record of a moved file is the same one.
        follow(&plain, &mount);
        assert_eq!(read_all(&state).0, seen);
        assert!(record(&mount).exists());
        follow(&plain, &mount);
        forget(&mount).unwrap();
        forget(&mount).unwrap();
        assert_eq!(read_all(&state).1, [lent(3)]);
        write(&summed, &[lent(4)]).unwrap();
        let (again, ranges) = read_all(&state);
        assert!(again.is_disjoint(&seen) && ranges == [lent(4)]);
        // A file without a record is put in the place of one that had one.
        follow(&plain, &summed);
        assert_eq!(read_all(&state).1, []);
    }

    #[test]
    fn all_records_together_are_bounded() {
        let (_temp, state, image, id) = with_image_and_mount();
        let of_mount = [lent(1), lent(2), lent(3)];
        write(&state.plain_file(id), &of_mount).unwrap();
        write(&complete::folder(&state, &image).join("plain"), &[lent(4), lent(5)]).unwrap();
        let lent = |ranges_max| read_at_most(&state, ranges_max).1.len();
        assert_eq!([5, 4, 3, 2, 1].map(lent), [5, 3, 3, 2, 0]);
        assert_eq!(read_at_most(&state, 4).1, of_mount, "a mount's come first");
    }

    #[test]
    fn a_damaged_record_lends_nothing() {
        let temp = tempfile::tempdir().unwrap();
        let state = StateDir::open(&temp.path().join("state")).unwrap();
        let id = MountId::random().unwrap();
        files::make_folder(&state.mount(id)).unwrap();
        let path = record(&state.plain_file(id));
        write(&state.plain_file(id), &[lent(1)]).unwrap();
        let whole = fs::read(&path).unwrap();
        for damaged in
            [&whole[..0], &whole[..7], &whole[..20], &[&b"XURGLEN1"[..], &whole[8..]].concat()]
        {
            fs::write(&path, damaged).unwrap();
            assert_eq!(read_all(&state).1, []);
        }
        fs::File::options().write(true).open(&path).unwrap().set_len(1 << 40).unwrap();
        assert_eq!(read_all(&state).1, [], "too many");
        fs::remove_file(&path).unwrap();
        std::os::unix::fs::symlink("/etc/passwd", &path).unwrap();
        assert!(all(&state).is_empty());
    }
}
