//! Digests of prepared files that this process has read before.
//!
//! New named writes record the digests of the files that they are based on. All containers of an
//! image are based on the same files, which are more than 128 MiB, mostly holes: reading them for
//! each container took as long as mounting it.
//!
//! Invariants: a file is known by its inode, its length and the time of its last change of data. A
//! file that was written to is read again. At most [`KNOWN_MAX`] files are known; no lock is held
//! while one is read.

use std::{
    collections::BTreeMap,
    os::unix::fs::MetadataExt,
    path::Path,
    sync::{Mutex, PoisonError},
    time::Duration,
};

use burgeon_block::{Digest, Error, Result};

use crate::state::{files, prepared::digest_file};

/// Two files an image.
const KNOWN_MAX: usize = 256;

/// Kernels before 6.13 count times in ticks of up to 10 ms: a file that was written to just now may
/// be written to once more without a later time.
const SETTLED: Duration = Duration::from_secs(1);

/// A file as it was read: hard links share it, and change the time of its status only.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct FileState {
    device: u64,
    inode: u64,
    len: u64,
    modified: (i64, i64),
}

impl FileState {
    /// And whether each later change gives it another time.
    fn of(path: &Path) -> Result<(Self, bool)> {
        let opened = files::open(path, std::fs::File::options().read(true));
        let found = opened.and_then(|file| file.metadata());
        let found = found.map_err(|e| Error::io(format!("cannot read {}", path.display()), e))?;
        let modified = (found.mtime(), found.mtime_nsec());
        let age = found.modified().ok().and_then(|at| at.elapsed().ok());
        let is_settled = age.is_some_and(|age| age > SETTLED);
        let (device, inode, len) = (found.dev(), found.ino(), found.len());
        Ok((Self { device, inode, len, modified }, is_settled))
    }
}

static KNOWN: Mutex<BTreeMap<FileState, Digest>> = Mutex::new(BTreeMap::new());

/// BLAKE3 and length of a prepared file, which is read only if it has changed or is not known.
pub(crate) fn known_digest(path: &Path) -> Result<(Digest, u64)> {
    let (before, is_settled) = FileState::of(path)?;
    let known = || KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(digest) = known().get(&before) {
        return Ok((*digest, before.len));
    }
    let (digest, len) = digest_file(path)?;
    // One that changes meanwhile is not known.
    if is_settled && FileState::of(path)?.0 == before && len == before.len {
        let mut known = known();
        if known.len() >= KNOWN_MAX {
            known.clear();
        }
        known.insert(before, digest);
    }
    Ok((digest, len))
}

#[cfg(test)]
mod tests {
    use std::{
        fs,
        fs::FileTimes,
        time::{Duration, SystemTime},
    };

    use burgeon_block::Digest;

    use super::known_digest;

    #[test]
    fn a_file_is_read_once_until_it_changes() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("seed");
        fs::write(&path, "first").unwrap();
        let first = (Digest::of(b"first"), 5);
        // One that was written just now is read again.
        assert_eq!(known_digest(&path).unwrap(), first);
        fs::write(&path, "prior").unwrap();
        assert_eq!(known_digest(&path).unwrap(), (Digest::of(b"prior"), 5));
        fs::write(&path, "first").unwrap();
        let an_hour_ago = SystemTime::now() - Duration::from_secs(3600);
        let set = |time| {
            let file = fs::File::options().write(true).open(&path).unwrap();
            file.set_times(FileTimes::new().set_modified(time)).unwrap();
        };
        set(an_hour_ago);
        assert_eq!(known_digest(&path).unwrap(), first);
        // Under another name, as each container has it.
        let link = folder.path().join("link");
        fs::hard_link(&path, &link).unwrap();
        // Other data that pretends to be old would be seen if the file were read.
        fs::write(&path, "other").unwrap();
        set(an_hour_ago);
        assert_eq!(known_digest(&link).unwrap(), first);
        set(SystemTime::UNIX_EPOCH);
        assert_eq!(known_digest(&path).unwrap(), (Digest::of(b"other"), 5));
        fs::write(&path, "longer").unwrap();
        assert_eq!(known_digest(&path).unwrap(), (Digest::of(b"longer"), 6));
        fs::remove_file(&path).unwrap();
        assert!(known_digest(&path).is_err());
    }
}
