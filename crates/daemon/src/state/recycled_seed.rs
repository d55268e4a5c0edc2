//! Recycled seeds: named writes can be mounted again on a full disk, because the space is reserved.
//!
//! ```text
//!   umount:  mounts/<id>/seed ── rename ──► writes/<name>/recycled-seed     the copy, megabytes
//!   mount:   writes/<name>/recycled-seed ── rename ──► mounts/<id>/seed     overwritten in place
//!
//!   run/ballast   BALLAST bytes, released while such a mount is made (folders and records), and
//!                 while a daemon begins (sockets)
//! ```
//!
//! The contents of a recycled seed are not trusted: every byte of it that btrfs reads is written
//! anew, at the same addresses. Invariant: nothing here is needed; a missing file only costs disk
//! space.

use std::{
    fs::{self, File},
    os::unix::fs::OpenOptionsExt,
};

use burgeon_block::{Error, ErrorKind};

use crate::state::{
    files,
    paths::StateDir,
    record::{MountRecord, WritesState},
    space, writes,
};

/// The file of a recycled seed, beside the record of its writes.
const FILE: &str = "recycled-seed";

/// Its name in earlier versions.
const FORMER_FILE: &str = "spare";

/// A mount makes a folder, two records (each twice, for a moment), checksums and perhaps the
/// cache's folder: eight blocks. With blocks of 64 KiB that is 512 KiB; the double leaves room for
/// blocks that a full disk does not give back.
const BALLAST: u64 = 1 << 20;

/// The smallest useful ballast: eight blocks of 4 KiB.
const BALLAST_MIN: u64 = 32 << 10;

/// Releases the ballast unless there is as much free space without it.
pub(crate) fn lend(state: &StateDir) {
    if space::free_space(state.root()).is_ok_and(|free| free < BALLAST) {
        // A failure is the same as no ballast.
        let _ = files::open(&ballast(state), File::options().write(true).truncate(true));
    }
}

/// Reserves as much ballast as there is room for.
pub(crate) fn refill(state: &StateDir) {
    let path = ballast(state);
    let mut options = File::options();
    let file = files::open(&path, options.write(true).create(true).truncate(false).mode(0o600));
    let Ok(file) = file else { return };
    let has = file.metadata().map_or(0, |metadata| metadata.len());
    let mut len = BALLAST;
    while len >= BALLAST_MIN && len > has {
        if space::reserve(&file, 0, len, &path).is_ok() {
            return;
        }
        len /= 2;
    }
}

fn ballast(state: &StateDir) -> std::path::PathBuf {
    state.run().join("ballast")
}

/// Moves the recycled seed of the writes `name`, if there is one, to the place of a mount's seed.
pub(crate) fn take(state: &StateDir, name: &str, seed: &std::path::Path) {
    let folder = writes::folder(state, name);
    // The one with the present name is the later one, so it replaces the other.
    for file in [FORMER_FILE, FILE] {
        let _ = fs::rename(folder.join(file), seed);
    }
}

/// Keeps the seed of an ended mount as the recycled seed of its writes.
pub(crate) fn keep(state: &StateDir, record: &MountRecord) {
    let WritesState::Sprout(sprout) = &record.writes else { return };
    let Some(name) = &sprout.name else { return };
    let folder = writes::folder(state, name);
    let seed = state.mount(record.attach.id).join("seed");
    if folder.join("record.json").exists() {
        let _ = fs::rename(seed, folder.join(FILE));
    }
}

/// Adds advice to the error of a mount that failed because the state directory is full.
pub(crate) fn explain(state: &StateDir, error: Error) -> Error {
    let is_full = error.kind() == ErrorKind::NoSpace
        && space::free_space(state.root()).is_ok_and(|free| free < BALLAST);
    if !is_full {
        return error;
    }
    let what = format!(
        "the file system of the state directory {} is full: free some space on it; `burgeon gc` \
         removes unneeded data, `burgeon writes list` shows kept writes",
        state.root().display()
    );
    Error::with_source(ErrorKind::NoSpace, what, error)
}

#[cfg(test)]
mod tests {
    use super::{BALLAST, FILE, FORMER_FILE, ballast, refill, take};
    use crate::state::{paths::StateDir, writes};

    #[test]
    fn a_recycled_seed_of_an_earlier_version_is_taken_and_a_later_one_is_preferred() {
        let temp = tempfile::tempdir().unwrap();
        let state = StateDir::open(temp.path()).unwrap();
        let (folder, seed) = (writes::folder(&state, "w"), temp.path().join("seed"));
        std::fs::create_dir_all(&folder).unwrap();
        take(&state, "w", &seed);
        assert!(!seed.exists());
        for (files, taken) in [(&[FORMER_FILE][..], FORMER_FILE), (&[FORMER_FILE, FILE], FILE)] {
            for file in files {
                std::fs::write(folder.join(file), file).unwrap();
            }
            take(&state, "w", &seed);
            assert_eq!(std::fs::read_to_string(&seed).unwrap(), taken);
            assert_eq!(std::fs::read_dir(&folder).unwrap().count(), 0, "none is left over");
        }
    }

    #[test]
    fn the_ballast_is_reserved_once() {
        use std::os::unix::fs::MetadataExt;
        let temp = tempfile::tempdir().unwrap();
        let state = StateDir::open(temp.path()).unwrap();
        for _ in 0..2 {
            refill(&state);
            let metadata = std::fs::metadata(ballast(&state)).unwrap();
            assert_eq!(metadata.len(), BALLAST);
            assert!(metadata.blocks() * 512 >= BALLAST);
        }
    }
}
