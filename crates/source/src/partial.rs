//! Objects that come over a network: a process that is killed leaves to the next what it had.
//!
//! ```text
//!   tmp/partial-<object>   ── append, append, kill -9 ──► the next process appends ──► publish_file: a rename
//! ```
//!
//! Invariants: one process at a time has a part, by its flock; a part is only a beginning, whose bytes
//! nobody has checked. The collector removes parts that nobody has, and so does a later writer when
//! they are a week old.

use std::{
    fs::{self, File},
    io::{Seek, SeekFrom},
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
};

use burgeon_block::{ObjectId, Result};
use rustix::fs::FlockOperation;

use crate::directory::{Directory, doing};

/// The beginning of an object that is not there yet.
#[derive(Debug)]
pub struct Partial {
    path: PathBuf,
    file: File,
    len: u64,
}

impl Directory {
    /// What is here of `object`, to go on with; `None` while another process does. More than
    /// `len_max` bytes are no beginning of it.
    pub fn partial(&self, object: &ObjectId, len_max: u64) -> Result<Option<Partial>> {
        // The collector does not look while it is opened and not yet locked.
        let _shared = self.lock(FlockOperation::LockShared)?;
        let tmp = self.tmp();
        fs::create_dir_all(&tmp).map_err(doing("make", &tmp))?;
        let path = tmp.join(format!("partial-{}", object.as_str().replace('/', "-")));
        let mut file = File::options()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(&path)
            .map_err(doing("open", &path))?;
        if rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive).is_err() {
            return Ok(None);
        }
        // Another process may have published it, or removed it, just before.
        let here = fs::metadata(&path).is_ok_and(|here| {
            file.metadata().is_ok_and(|of| (of.dev(), of.ino()) == (here.dev(), here.ino()))
        });
        if !here {
            return Ok(None);
        }
        let mut len = file.seek(SeekFrom::End(0)).map_err(doing("read", &path))?;
        if len > len_max {
            file.set_len(0).map_err(doing("empty", &path))?;
            len = file.seek(SeekFrom::Start(0)).map_err(doing("empty", &path))?;
        }
        Ok(Some(Partial { path, file, len }))
    }
}

impl Partial {
    /// Where it is: what is complete is published from there.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Bytes that were there.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether nothing was there.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The file, which goes on at its end.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// Removes it: what it has is of no use.
    pub fn remove(self) {
        // Best effort: the collector does otherwise.
        let _ = fs::remove_file(&self.path);
    }
}
