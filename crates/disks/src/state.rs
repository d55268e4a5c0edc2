//! The file of all records.
//!
//! ```text
//!   disks/state       "burgeon disks 1 <digest of the rest>\n", then JSON
//!   disks/state.old   the state before; read if the other is missing or damaged
//!   disks/lock        locked while the file is read, continued and replaced
//! ```
//!
//! Invariants: a reader sees the old state or the new one, also after a power failure; damage is
//! noticed; no symlink is followed to any of these files; a state of a newer version is neither
//! read nor replaced. Held by the tests below and the fuzz target `disks`.

use std::{
    collections::BTreeMap,
    fs::{self, File, OpenOptions},
    io::{self, Read, Write},
    os::unix::fs::{DirBuilderExt, OpenOptionsExt},
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use burgeon_block::{Digest, Error, ErrorKind, Result};
use rustix::fs::{FlockOperation, OFlags, flock};
use serde::{Deserialize, Serialize};

use crate::record::DiskRecord;

const MAGIC: &str = "burgeon disks ";
const VERSION: &str = "1";
/// The longest file that is read: ten times [`DISKS_MAX`] records.
pub const STATE_MAX: usize = 8 << 20;
/// Records that are kept; that of the disk that was seen least recently goes first.
const DISKS_MAX: usize = 1024;
/// The longest time that a command waits for another.
const LOCK_TIME: Duration = Duration::from_secs(10);

/// The records of all disks, by identity.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct DiskRecords {
    /// The records.
    pub disks: BTreeMap<String, DiskRecord>,
}

impl DiskRecords {
    /// Reads the bytes of a state file.
    pub fn decode(bytes: &[u8]) -> Result<Self> {
        let damaged = |why: &str| Error::new(ErrorKind::Corrupt, format!("it is damaged: {why}"));
        if bytes.len() > STATE_MAX {
            return Err(damaged("it is too long"));
        }
        let end = bytes.iter().take(200).position(|b| *b == b'\n');
        let (head, rest) = bytes.split_at(end.ok_or_else(|| damaged("it has no head"))?);
        let rest = &rest[1..];
        let head = str::from_utf8(head).ok().and_then(|head| head.strip_prefix(MAGIC));
        let words: Vec<&str> = head.ok_or_else(|| damaged("another head"))?.split(' ').collect();
        match words.as_slice() {
            [VERSION, digest] if *digest == Digest::of(rest).to_string() => {}
            [VERSION, ..] => return Err(damaged("its digest differs")),
            [version, ..] => {
                let what = format!("it is of version {version}: upgrade burgeon");
                return Err(Error::new(ErrorKind::UnsupportedFormat, what));
            }
            [] => return Err(damaged("another head")),
        }
        let state: Self = serde_json::from_slice(rest).map_err(|e| damaged(&e.to_string()))?;
        if state.disks.len() > DISKS_MAX {
            return Err(damaged("it has too many disks"));
        }
        Ok(state)
    }

    /// The bytes of the file.
    pub fn encode(&self) -> Result<Vec<u8>> {
        let failed = |e| Error::with_source(ErrorKind::Invalid, "cannot describe the disks", e);
        let body = serde_json::to_vec(self).map_err(failed)?;
        let head = format!("{MAGIC}{VERSION} {}\n", Digest::of(&body));
        Ok([head.as_bytes(), &body].concat())
    }

    /// The record of `key`, perhaps a new one in place of the one seen least recently.
    pub fn record(&mut self, key: &str) -> &mut DiskRecord {
        if !self.disks.contains_key(key) && self.disks.len() >= DISKS_MAX {
            let oldest = self.disks.iter().min_by_key(|(_, record)| record.last_s);
            if let Some(oldest) = oldest.map(|(key, _)| key.clone()) {
                self.disks.remove(&oldest);
            }
        }
        self.disks.entry(key.to_owned()).or_default()
    }
}

/// The state in `folder`, locked.
#[derive(Debug)]
pub struct Locked {
    folder: PathBuf,
    state: DiskRecords,
    _lock: File,
}

impl Locked {
    /// Locks and reads the state in `folder`, which is made if it is missing.
    pub fn open(folder: &Path) -> Result<Self> {
        let failed = |e| Error::io(format!("cannot make {}", folder.display()), e);
        match fs::DirBuilder::new().mode(0o700).create(folder) {
            Err(e) if e.kind() != io::ErrorKind::AlreadyExists => return Err(failed(e)),
            _ => {}
        }
        let is_folder = folder.symlink_metadata().map_err(failed)?.is_dir();
        if !is_folder {
            let what = format!("{} is not a directory: remove it", folder.display());
            return Err(Error::new(ErrorKind::Invalid, what));
        }
        let lock = take_lock(&folder.join("lock"))?;
        let state = read(folder)?;
        Ok(Self { folder: folder.to_owned(), state, _lock: lock })
    }

    /// The records, to be continued.
    pub fn state(&mut self) -> &mut DiskRecords {
        &mut self.state
    }

    /// Replaces the file, durably.
    pub fn publish(self) -> Result<()> {
        let path = self.folder.join("state");
        let failed = |e| Error::io(format!("cannot write {}", path.display()), e);
        let new = self.folder.join("state.new");
        let bytes = self.state.encode()?;
        let mut options = OpenOptions::new();
        let mut file =
            open(&new, options.write(true).create(true).truncate(true)).map_err(failed)?;
        file.write_all(&bytes).and_then(|()| file.sync_all()).map_err(failed)?;
        // Only a sound state becomes the old one.
        if read_one(&path).is_ok() {
            fs::rename(&path, self.folder.join("state.old")).map_err(failed)?;
        }
        fs::rename(&new, &path).map_err(failed)?;
        File::open(&self.folder).and_then(|folder| folder.sync_all()).map_err(failed)
    }
}

/// Opens a regular file that is no symlink.
fn open(path: &Path, options: &mut OpenOptions) -> io::Result<File> {
    let flags = OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let file = options.mode(0o600).custom_flags(flags.bits() as i32).open(path)?;
    if !file.metadata()?.is_file() {
        let what = "it is not a regular file: remove it";
        return Err(io::Error::new(io::ErrorKind::InvalidData, what));
    }
    Ok(file)
}

fn take_lock(path: &Path) -> Result<File> {
    let failed = |e| Error::io(format!("cannot lock {}", path.display()), e);
    let file = open(path, OpenOptions::new().write(true).create(true)).map_err(failed)?;
    let end = Instant::now() + LOCK_TIME;
    loop {
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Ok(file),
            Err(rustix::io::Errno::WOULDBLOCK | rustix::io::Errno::INTR) => {}
            Err(e) => return Err(failed(e.into())),
        }
        if Instant::now() >= end {
            let what = format!(
                "another process has held {} for {} s: end that one, then try again",
                path.display(),
                LOCK_TIME.as_secs()
            );
            return Err(Error::new(ErrorKind::Unavailable, what));
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

fn read_one(path: &Path) -> Result<DiskRecords> {
    let failed = |e| Error::io(format!("cannot read {}", path.display()), e);
    let file = open(path, OpenOptions::new().read(true)).map_err(failed)?;
    let mut bytes = Vec::new();
    file.take(STATE_MAX as u64 + 1).read_to_end(&mut bytes).map_err(failed)?;
    DiskRecords::decode(&bytes)
        .map_err(|e| Error::with_source(e.kind(), format!("cannot read {}", path.display()), e))
}

/// The state, or the one before if that is damaged: the kernel's counters bridge the difference.
fn read(folder: &Path) -> Result<DiskRecords> {
    let damaged = match read_one(&folder.join("state")) {
        Err(e) if matches!(e.kind(), ErrorKind::Corrupt | ErrorKind::NotFound) => e,
        other => return other,
    };
    match (damaged.kind(), read_one(&folder.join("state.old"))) {
        (_, Ok(state)) => Ok(state),
        (ErrorKind::NotFound, Err(e)) if e.kind() == ErrorKind::NotFound => {
            Ok(DiskRecords::default())
        }
        (ErrorKind::NotFound, Err(e)) => Err(e),
        _ => {
            let what = format!(
                "{damaged}; move it away to begin the totals anew, at the kernel's counters since \
                 the last boot"
            );
            Err(Error::new(ErrorKind::Corrupt, what))
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::fs::symlink, path::Path};

    use burgeon_block::ErrorKind;

    use super::{DISKS_MAX, DiskRecords, Locked};

    fn with(key: &str, last_s: u64) -> DiskRecords {
        let mut state = DiskRecords::default();
        state.record(key).last_s = last_s;
        state
    }

    fn publish(folder: &Path, state: DiskRecords) {
        let mut locked = Locked::open(folder).unwrap();
        *locked.state() = state;
        locked.publish().unwrap();
    }

    #[test]
    fn a_damaged_state_gives_way_to_the_one_before_and_then_to_an_error() {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path().join("disks");
        publish(&folder, with("a", 1));
        publish(&folder, with("a", 2));
        let read = || Locked::open(&folder).map(|mut locked| locked.state().clone());
        assert_eq!(read().unwrap(), with("a", 2));
        let sound = fs::read(folder.join("state")).unwrap();
        for at in 0..sound.len() {
            let mut damaged = sound.clone();
            damaged[at] ^= 4;
            // A later version may have made it.
            if DiskRecords::decode(&damaged).is_err_and(|e| e.kind() != ErrorKind::Corrupt) {
                continue;
            }
            fs::write(folder.join("state"), &damaged).unwrap();
            assert_eq!(read().unwrap(), with("a", 1), "{at}");
        }
        // A damaged state never becomes the old one.
        publish(&folder, with("a", 3));
        fs::remove_file(folder.join("state")).unwrap();
        assert_eq!(read().unwrap(), with("a", 1));
        fs::write(folder.join("state"), &sound[..40]).unwrap();
        fs::write(folder.join("state.old"), "").unwrap();
        let error = read().unwrap_err();
        assert!(error.kind() == ErrorKind::Corrupt, "{error}");
        assert!(error.to_string().contains("move it away"), "{error}");
    }

    #[test]
    fn a_newer_version_is_neither_read_nor_replaced() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("state"), "burgeon disks 2 x\n").unwrap();
        let error = Locked::open(folder.path()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::UnsupportedFormat);
        assert!(error.to_string().contains("upgrade"), "{error}");
    }

    #[test]
    fn symlinks_and_fifos_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let target = folder.path().join("target");
        fs::write(&target, "precious").unwrap();
        for name in ["lock", "state", "state.new"] {
            let inner = folder.path().join(name);
            let link = inner.join(name);
            fs::create_dir(&inner).unwrap();
            symlink(&target, &link).unwrap();
            let opened = Locked::open(&inner).and_then(Locked::publish);
            assert!(opened.is_err(), "{name}");
            fs::remove_file(&link).unwrap();
            let mode = rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR;
            rustix::fs::mknodat(rustix::fs::CWD, &link, rustix::fs::FileType::Fifo, mode, 0)
                .unwrap();
            assert!(Locked::open(&inner).and_then(Locked::publish).is_err(), "{name}");
        }
        assert_eq!(fs::read(&target).unwrap(), b"precious");
    }

    #[test]
    fn the_number_of_records_is_bounded() {
        let mut state = DiskRecords::default();
        for n in 0..DISKS_MAX as u64 + 5 {
            state.record(&n.to_string()).last_s = n;
        }
        assert_eq!(state.disks.len(), DISKS_MAX);
        assert!(!state.disks.contains_key("0") && state.disks.contains_key("1028"));
        let bytes = state.encode().unwrap();
        assert_eq!(DiskRecords::decode(&bytes).unwrap(), state);
    }
}
