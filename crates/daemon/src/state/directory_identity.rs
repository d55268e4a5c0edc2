//! Directory identity: checks that the daemon sees the same folder as its client.
//!
//! The daemon may be in a copy of its starter's mount namespace (`host/namespace.rs`), or its
//! client in another one. A later mount is visible to it only if mounts are shared; otherwise the
//! daemon sees the folder below it, and would wait for a store that never appears.

use std::{fs, os::unix::fs::MetadataExt, path::Path};

use burgeon_block::{Error, ErrorKind, Result};
use serde::{Deserialize, Serialize};

/// A folder's identity in its file system, the same in every namespace.
#[derive(Serialize, Deserialize, Debug, Clone, Copy, PartialEq, Eq)]
pub struct DirectoryIdentity {
    device: u64,
    inode: u64,
}

impl DirectoryIdentity {
    /// The identity of `folder` as this process sees it; `None` if it sees nothing there.
    pub fn of(folder: &Path) -> Option<Self> {
        let metadata = fs::metadata(folder).ok()?;
        Some(Self { device: metadata.dev(), inode: metadata.ino() })
    }

    /// `Unavailable` if this process sees another folder, or none, at `folder`.
    pub(crate) fn check(self, folder: &Path) -> Result<()> {
        if Self::of(folder) == Some(self) {
            return Ok(());
        }
        let message = format!(
            "the daemon does not see the store {}: it is on a file system that was mounted after the daemon \
             was started, and mounts are private there: end the daemon with `burgeon shutdown` and mount \
             again, or make the mount shared (`mount --make-rshared /`) before the daemon is started",
            folder.display()
        );
        Err(Error::new(ErrorKind::Unavailable, message))
    }
}
