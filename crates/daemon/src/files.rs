//! Small files that must be whole: published atomically, durable before the call returns.

use std::{
    fs::{self, File, OpenOptions},
    io::{Read, Write},
    os::unix::fs::OpenOptionsExt,
    path::Path,
};

use burgeon_block::{Error, ErrorKind, Result};
use rustix::fs::{FlockOperation, flock};
use serde::{Serialize, de::DeserializeOwned};

/// Longest record that is read back, in bytes; records are a few hundred.
const RECORD_LEN_MAX: u64 = 1 << 20;

/// Publishes `bytes` as `path`: a reader sees the old file or the new one, also after power loss.
pub(crate) fn publish(path: &Path, bytes: &[u8]) -> Result<()> {
    let failed = |e| Error::io(format!("cannot write {}", path.display()), e);
    let temp = path.with_extension("new");
    let mut file = OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o600)
        .open(&temp)
        .map_err(failed)?;
    file.write_all(bytes).and_then(|()| file.sync_all()).map_err(failed)?;
    fs::rename(&temp, path).map_err(failed)?;
    sync_parent(path)
}

/// Publishes `record` as JSON.
pub(crate) fn publish_json(path: &Path, record: &impl Serialize) -> Result<()> {
    let bytes = serde_json::to_vec_pretty(record).map_err(|e| {
        Error::with_source(ErrorKind::Invalid, format!("cannot describe {}", path.display()), e)
    })?;
    publish(path, &bytes)
}

/// Reads a record back. `NotFound` when there is none; `Corrupt` when it is not what
/// [`publish_json`] wrote.
pub(crate) fn read_json<T: DeserializeOwned>(path: &Path) -> Result<T> {
    let failed = |e| Error::io(format!("cannot read {}", path.display()), e);
    let mut bytes = Vec::new();
    File::open(path)
        .and_then(|file| file.take(RECORD_LEN_MAX).read_to_end(&mut bytes))
        .map_err(failed)?;
    serde_json::from_slice(&bytes).map_err(|e| {
        Error::with_source(ErrorKind::Corrupt, format!("{} is damaged", path.display()), e)
    })
}

/// Makes the names in the folder of `path` durable.
pub(crate) fn sync_parent(path: &Path) -> Result<()> {
    let parent = path.parent().unwrap_or(Path::new("/"));
    File::open(parent)
        .and_then(|folder| folder.sync_all())
        .map_err(|e| Error::io(format!("cannot sync {}", parent.display()), e))
}

/// Removes a file; it is no error if it is not there.
pub(crate) fn remove_file(path: &Path) -> Result<()> {
    match fs::remove_file(path) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
            Err(Error::io(format!("cannot remove {}", path.display()), e))
        }
        _ => Ok(()),
    }
}

/// Removes a folder and all in it; it is no error if it is not there.
pub(crate) fn remove_folder(path: &Path) -> Result<()> {
    match fs::remove_dir_all(path) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
            Err(Error::io(format!("cannot remove {}", path.display()), e))
        }
        _ => Ok(()),
    }
}

/// A lock that lives as long as this value and never longer than its process: a stale lock file
/// is no lock.
#[derive(Debug)]
pub struct Lock {
    _file: File,
}

impl Lock {
    /// Takes the lock `path`, or returns `None` if another process has it.
    pub fn try_take(path: &Path) -> Result<Option<Self>> {
        let file = open_lock(path)?;
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => Ok(Some(Self { _file: file })),
            Err(rustix::io::Errno::WOULDBLOCK) => Ok(None),
            Err(e) => Err(Error::io(format!("cannot lock {}", path.display()), e.into())),
        }
    }

    /// Takes the lock `path`, waiting for whoever has it.
    pub fn take(path: &Path) -> Result<Self> {
        let file = open_lock(path)?;
        loop {
            match flock(&file, FlockOperation::LockExclusive) {
                Ok(()) => return Ok(Self { _file: file }),
                Err(rustix::io::Errno::INTR) => {}
                Err(e) => {
                    return Err(Error::io(format!("cannot lock {}", path.display()), e.into()));
                }
            }
        }
    }
}

fn open_lock(path: &Path) -> Result<File> {
    OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        .open(path)
        .map_err(|e| Error::io(format!("cannot open the lock {}", path.display()), e))
}

#[cfg(test)]
mod tests {
    use burgeon_block::ErrorKind;

    use super::{Lock, publish, publish_json, read_json};

    #[test]
    fn a_lock_excludes_until_dropped() {
        let temp = tempfile::tempdir().unwrap();
        let path = temp.path().join("lock");
        let held = Lock::try_take(&path).unwrap();
        assert!(held.is_some());
        assert!(Lock::try_take(&path).unwrap().is_none());
        drop(held);
        assert!(Lock::try_take(&path).unwrap().is_some());
    }

    #[test]
    fn records_round_trip_and_damage_is_told_from_absence() {
        let temp = tempfile::tempdir().unwrap();
        let path = temp.path().join("record.json");
        assert_eq!(read_json::<u32>(&path).unwrap_err().kind(), ErrorKind::NotFound);
        publish_json(&path, &7u32).unwrap();
        publish_json(&path, &8u32).unwrap();
        assert_eq!(read_json::<u32>(&path).unwrap(), 8);
        publish(&path, b"{").unwrap();
        assert_eq!(read_json::<u32>(&path).unwrap_err().kind(), ErrorKind::Corrupt);
    }
}
