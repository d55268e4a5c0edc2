//! Small files that are published atomically, and durably before the call returns. No symlink is
//! followed to any of them.

use std::{
    fs::{self, File, OpenOptions},
    io::{self, Read, Write},
    os::unix::fs::{MetadataExt, OpenOptionsExt},
    path::Path,
    thread,
    time::{Duration, Instant},
};

use burgeon_block::{Error, ErrorKind, Result};
use burgeon_image::open_own;
use rustix::{
    fs::{FlockOperation, OFlags, flock},
    io::Errno,
};
use serde::{Serialize, de::DeserializeOwned};

/// Longest record that is read, in bytes; records take a few hundred.
const RECORD_LEN_MAX: u64 = 1 << 20;

/// Interval of attempts to take a lock within a time limit.
const LOCK_PAUSE: Duration = Duration::from_millis(10);

/// Opens the file `path` of the state directory with `options`. No symlink is followed in any part
/// of the path, and only a regular file is opened: opening a FIFO would block.
pub(crate) fn open(path: &Path, options: &mut OpenOptions) -> io::Result<File> {
    let odd = || {
        let what = "it is not a regular file, or a part of its path is a symlink, which Burgeon \
            does not follow: remove it";
        io::Error::new(io::ErrorKind::InvalidData, what)
    };
    let opened = open_own(path, options, OFlags::NONBLOCK).map_err(|error| {
        match Errno::from_io_error(&error) {
            // A symlink; a FIFO or a socket; a directory.
            Some(Errno::LOOP | Errno::NXIO | Errno::ISDIR) => odd(),
            _ => error,
        }
    })?;
    if opened.metadata()?.is_file() { Ok(opened) } else { Err(odd()) }
}

/// Opens `path` for reading, wherever it is and whatever it is, without waiting for a writer of a
/// FIFO.
pub(crate) fn open_at_once(path: &Path) -> io::Result<File> {
    OpenOptions::new().read(true).custom_flags(OFlags::NONBLOCK.bits() as i32).open(path)
}

/// Reads the file `path` of the state directory. `Corrupt` if it is longer than any record.
pub(crate) fn read(path: &Path) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    open(path, OpenOptions::new().read(true))
        .and_then(|file| file.take(RECORD_LEN_MAX + 1).read_to_end(&mut bytes))
        .map_err(|e| Error::io(format!("cannot read {}", path.display()), e))?;
    if bytes.len() as u64 > RECORD_LEN_MAX {
        let what = format!("{} is damaged: it is longer than any record", path.display());
        return Err(Error::new(ErrorKind::Corrupt, what));
    }
    Ok(bytes)
}

/// Removes anything but a file at `path`, so that the file can be made anew; a non-empty directory
/// stays.
pub(crate) fn make_way(path: &Path) -> Result<()> {
    let Ok(metadata) = path.symlink_metadata() else { return Ok(()) };
    if metadata.is_file() {
        return Ok(());
    }
    let removed = match metadata.is_dir() {
        true => fs::remove_dir(path),
        false => fs::remove_file(path),
    };
    let shown = path.display();
    tracing::warn!(file = %shown, "was not a regular file, and is made anew");
    removed.map_err(|e| {
        Error::io(format!("{shown} is not a file: remove it; the next mount makes it again"), e)
    })
}

/// Publishes `bytes` as `path`: a reader sees the old file or the new one, also after power loss.
pub(crate) fn publish(path: &Path, bytes: &[u8]) -> Result<()> {
    let failed = |e| Error::io(format!("cannot write {}", path.display()), e);
    let temp = path.with_extension("new");
    let mut options = OpenOptions::new();
    options.write(true).create(true).truncate(true).mode(0o600);
    let mut file = open(&temp, &mut options).map_err(failed)?;
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

/// Reads a record of [`publish_json`]. `NotFound` if there is none, `Corrupt` if it is damaged.
pub(crate) fn read_json<T: DeserializeOwned>(path: &Path) -> Result<T> {
    serde_json::from_slice(&read(path)?).map_err(|e| {
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

/// Removes a file; a missing file is no error.
pub(crate) fn remove_file(path: &Path) -> Result<()> {
    match fs::remove_file(path) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
            Err(Error::io(format!("cannot remove {}", path.display()), e))
        }
        _ => Ok(()),
    }
}

/// Removes a folder and its contents; a missing folder is no error.
pub(crate) fn remove_folder(path: &Path) -> Result<()> {
    match fs::remove_dir_all(path) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
            Err(Error::io(format!("cannot remove {}", path.display()), e))
        }
        _ => Ok(()),
    }
}

/// A lock that is held until this value is dropped or its process ends: a leftover lock file does
/// not lock.
#[derive(Debug)]
pub struct Lock {
    file: File,
}

impl Lock {
    /// Takes the lock `path`, or returns `None` if another process has it.
    pub fn try_take(path: &Path) -> Result<Option<Self>> {
        let file = open_lock(path)?;
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => Ok(Some(Self { file })),
            Err(rustix::io::Errno::WOULDBLOCK) => Ok(None),
            Err(e) => Err(Error::io(format!("cannot lock {}", path.display()), e.into())),
        }
    }

    /// Takes the lock `path`, and waits for its current holder.
    pub fn take(path: &Path) -> Result<Self> {
        let file = open_lock(path)?;
        loop {
            match flock(&file, FlockOperation::LockExclusive) {
                Ok(()) => return Ok(Self { file }),
                Err(rustix::io::Errno::INTR) => {}
                Err(e) => {
                    return Err(Error::io(format!("cannot lock {}", path.display()), e.into()));
                }
            }
        }
    }

    /// Takes the lock `path`; `None` if its holder does not release it within `limit`.
    pub(crate) fn take_within(path: &Path, limit: Duration) -> Result<Option<Self>> {
        let begun = Instant::now();
        loop {
            match Self::try_take(path)? {
                None if begun.elapsed() < limit => thread::sleep(LOCK_PAUSE),
                taken => return Ok(taken),
            }
        }
    }
}

impl Lock {
    /// False if `path` leads to another file than the locked one, or to none. True if that cannot
    /// be told.
    pub(crate) fn is_at(&self, path: &Path) -> bool {
        match (self.file.metadata(), fs::symlink_metadata(path)) {
            (Ok(own), Ok(there)) => (own.dev(), own.ino()) == (there.dev(), there.ino()),
            (_, Err(e)) => !matches!(
                e.kind(),
                std::io::ErrorKind::NotFound | std::io::ErrorKind::NotADirectory
            ),
            (Err(_), _) => true,
        }
    }
}

fn open_lock(path: &Path) -> Result<File> {
    let mut options = OpenOptions::new();
    options.write(true).create(true).truncate(false).mode(0o600);
    let opened = open(path, &mut options).or_else(|e| match e.kind() {
        // The lock tells who lives there, also where nothing can be written any more.
        std::io::ErrorKind::ReadOnlyFilesystem => open(path, OpenOptions::new().read(true)),
        _ => Err(e),
    });
    opened.map_err(|e| Error::io(format!("cannot open the lock {}", path.display()), e))
}

/// Makes a private folder if it is missing.
pub(crate) fn make_folder(path: &Path) -> Result<()> {
    match fs::create_dir(path) {
        Err(e) if e.kind() != std::io::ErrorKind::AlreadyExists => {
            Err(Error::io(format!("cannot make {}", path.display()), e))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use burgeon_block::ErrorKind;

    use super::{Lock, make_way, publish, publish_json, read, read_json};

    #[test]
    fn a_symlink_or_a_fifo_is_no_file_of_the_state_directory() {
        let temp = tempfile::tempdir().unwrap();
        let (elsewhere, path) = (temp.path().join("elsewhere"), temp.path().join("record.json"));
        publish_json(&elsewhere, &7u32).unwrap();
        std::os::unix::fs::symlink(&elsewhere, &path).unwrap();
        let error = read_json::<u32>(&path).unwrap_err();
        assert!(format!("{error:?}").contains("not a regular file"), "{error:?}");
        assert!(Lock::try_take(&path).is_err());
        std::os::unix::fs::symlink(&elsewhere, path.with_extension("new")).unwrap();
        assert!(publish_json(&path, &8u32).is_err());
        assert_eq!(read_json::<u32>(&elsewhere).unwrap(), 7);
        // A file behind a symlinked folder is refused, too.
        std::fs::create_dir(temp.path().join("folder")).unwrap();
        publish_json(&temp.path().join("folder/record.json"), &9u32).unwrap();
        std::os::unix::fs::symlink("folder", temp.path().join("linked")).unwrap();
        let linked = temp.path().join("linked/record.json");
        assert!(read_json::<u32>(&linked).is_err() && read(&linked).is_err());
        assert!(publish_json(&linked, &10u32).is_err());
        assert_eq!(read_json::<u32>(&temp.path().join("folder/record.json")).unwrap(), 9);
        let fifo = temp.path().join("fifo");
        let mode = rustix::fs::Mode::from_raw_mode(0o600);
        let kind = rustix::fs::FileType::Fifo;
        rustix::fs::mknodat(rustix::fs::CWD, &fifo, kind, mode, 0).unwrap();
        assert!(Lock::try_take(&fifo).is_err());
        assert!(read_json::<u32>(&fifo).is_err());
        for path in [&fifo, &path, &temp.path().join("missing")] {
            make_way(path).unwrap();
            assert!(path.symlink_metadata().is_err());
        }
        make_way(&elsewhere).unwrap();
        assert_eq!(read_json::<u32>(&elsewhere).unwrap(), 7);
        std::fs::create_dir_all(path.join("full")).unwrap();
        assert!(make_way(&path).unwrap_err().to_string().contains("remove it"));
    }

    #[test]
    fn a_file_that_is_longer_than_any_record_is_refused() {
        let temp = tempfile::tempdir().unwrap();
        let path = temp.path().join("record.json");
        // A number with spaces around it: what was cut off would not be missed.
        let mut bytes = vec![b' '; super::RECORD_LEN_MAX as usize + 1];
        bytes[0] = b'7';
        std::fs::write(&path, &bytes).unwrap();
        assert_eq!(read(&path).unwrap_err().kind(), ErrorKind::Corrupt);
        assert_eq!(read_json::<u32>(&path).unwrap_err().kind(), ErrorKind::Corrupt);
        std::fs::write(&path, &bytes[1..]).unwrap();
        assert_eq!(read(&path).unwrap().len(), bytes.len() - 1);
    }

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
