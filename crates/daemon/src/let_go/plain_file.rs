//! A plain file that is being made: `plain.new` until all of it is there.
//!
//! Invariants (`crates/cli/tests/let_go.rs`, `let_go_reflink.rs`):
//! - One command at a time makes it: it is locked.
//! - The record of lent chunks is there only while the file may share space with the cache.
//! - Dropped before it is published, it is removed. A command that is killed leaves it to the next
//!   one, which begins again.

use std::{
    fs::{self, File},
    os::unix::fs::{MetadataExt, OpenOptionsExt},
    path::{Path, PathBuf},
};

use burgeon_block::{ByteRange, Error, ErrorKind, Result};
use burgeon_cache::LentRange;
use rustix::fs::{
    Advice, FallocateFlags, FlockOperation, OFlags, fadvise, fallocate, fcntl_getfl, fcntl_setfl,
    flock,
};

use super::sums::{Sums, publish_own};
use crate::state::{files, loans};

pub(super) struct NewPlain {
    pub(super) file: File,
    /// Its name when it is published.
    path: PathBuf,
    is_published: bool,
}

impl NewPlain {
    /// Makes it, of `size` bytes, all of them holes.
    pub(super) fn begin(path: &Path, size: u64) -> Result<Self> {
        let new = path.with_extension("new");
        let failed = |e| Error::io(format!("cannot make {}", new.display()), e);
        let mut options = File::options();
        options.read(true).write(true).create(true).truncate(false).mode(0o600);
        let file = files::open(&new, &mut options).map_err(failed)?;
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {}
            Err(rustix::io::Errno::WOULDBLOCK) => return Err(another()),
            Err(e) => return Err(failed(e.into())),
        }
        // Another command may have finished the file between its opening and its lock: then it lies
        // below a mount, and must not be cut off.
        let identity = |it: &fs::Metadata| (it.dev(), it.ino());
        let locked = file.metadata().map_err(failed)?;
        if new.symlink_metadata().ok().as_ref().map(identity) != Some(identity(&locked)) {
            return Err(another());
        }
        let made = Self { file, path: path.to_owned(), is_published: false };
        // Those of a command that was killed.
        loans::forget(&made.path)?;
        made.file.set_len(0).and_then(|()| made.file.set_len(size)).map_err(|e| {
            let what = format!(
                "cannot make {}, a sparse file of {} GiB (some file systems have none so large: XFS \
                 and btrfs have)",
                new.display(),
                size >> 30
            );
            Error::io(what, e)
        })?;
        Ok(made)
    }

    /// Has it read past the page cache or not, where the file system allows it.
    pub(super) fn read_directly(&self, is_direct: bool) {
        let set = fcntl_getfl(&self.file).and_then(|mut flags| {
            flags.set(OFlags::DIRECT, is_direct);
            fcntl_setfl(&self.file, flags)
        });
        if let Err(error) = set {
            tracing::debug!(%error, is_direct, "the plain file is read as it is");
        }
    }

    /// Makes a hole of `range`.
    pub(super) fn clear(&self, range: ByteRange) -> Result<()> {
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        let cleared =
            rustix::io::retry_on_intr(|| fallocate(&self.file, flags, range.start(), range.len()));
        let failed = |e: rustix::io::Errno| Error::io("cannot clear cloned bytes", e.into());
        cleared.map_err(failed)
    }

    /// Records that it shares these ranges of the cache.
    pub(super) fn record_lent(&self, ranges: &[LentRange]) -> Result<()> {
        loans::write(&self.path, ranges)
    }

    /// Makes it durable, and gives it its name.
    pub(super) fn publish(mut self, sums: Option<&Sums>) -> Result<()> {
        let failed = |e| Error::io(format!("cannot write {}", self.path.display()), e);
        self.file.sync_all().map_err(failed)?;
        // It is read through the loop device from now on, directly.
        let _ = fadvise(&self.file, 0, None, Advice::DontNeed);
        // The file is of use only with its checksums.
        sums.map_or(Ok(()), Sums::publish)?;
        publish_own(&self.path.with_extension("new"), &self.path).map_err(failed)?;
        self.is_published = true;
        files::sync_parent(&self.path)
    }
}

impl Drop for NewPlain {
    fn drop(&mut self) {
        if self.is_published {
            return;
        }
        let new = self.path.with_extension("new");
        let removed = loans::forget(&self.path).and_then(|()| files::remove_file(&new));
        if let Err(error) = removed {
            tracing::warn!(%error, "a part of a plain file stays until the next let-go");
        }
    }
}

pub(super) fn another() -> Error {
    let what = "another `burgeon let-go` copies the same data: wait for it";
    Error::new(ErrorKind::Unavailable, what)
}
