//! Partial downloads: after a kill, the next process resumes with the bytes already received.
//!
//! ```text
//!   tmp/partial-<object> ── append, kill -9 ──► next process appends ──► publish_file: rename
//! ```
//!
//! Invariants: at most one process has a partial object, by its flock; its bytes are the beginning
//! of the object, unverified. The collector removes partial objects that no process has, and a
//! later writer does so when they are a week old.

use std::{
    fs::{self, File},
    io::{Seek, SeekFrom},
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
};

use burgeon_block::{ObjectId, Result};
use rustix::fs::FlockOperation;

use crate::{
    directory::{Directory, open_own_file},
    own_folder::doing,
};

/// The beginning of an object that is not complete yet.
#[derive(Debug)]
pub struct Partial {
    path: PathBuf,
    file: File,
    len: u64,
}

impl Directory {
    /// Opens the partial `object` to resume it; `None` while another process has it. Empties it if
    /// it is longer than `len_max` bytes.
    pub fn partial(&self, object: &ObjectId, len_max: u64) -> Result<Option<Partial>> {
        // Keeps the collector away between the open and the flock.
        let _shared = self.lock(FlockOperation::LockShared)?;
        let path = self.make_tmp()?.join(format!("partial-{}", object.as_str().replace('/', "-")));
        let mut options = File::options();
        options.read(true).write(true).create(true).truncate(false);
        let mut file = open_own_file(&path, &mut options).map_err(doing("open", &path))?;
        if rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive).is_err() {
            return Ok(None);
        }
        // Another process may just have published or removed it.
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
    /// Its path, from which the complete object is published.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Bytes present when it was opened.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// True if it was empty when it was opened.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The file, positioned at its end.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// Removes it: its bytes are of no use.
    pub fn remove(self) {
        // Best effort: otherwise the collector removes it.
        let _ = fs::remove_file(&self.path);
    }
}
