//! Whether the daemon sees the folder that its client means.
//!
//! The daemon has a mount namespace of its own. What is mounted after it was started reaches it only
//! where mounts are shared; else it sees what lies below, and would wait for a store that never comes.

use std::{fs, os::unix::fs::MetadataExt, path::Path};

use burgeon_block::{Error, ErrorKind, Result};
use serde::{Deserialize, Serialize};

/// A folder, as its file system knows it in every namespace.
#[derive(Serialize, Deserialize, Debug, Clone, Copy, PartialEq, Eq)]
pub struct Seen {
    device: u64,
    inode: u64,
}

impl Seen {
    /// What lies at `folder` for this process; `None` if nothing can be seen there.
    pub fn of(folder: &Path) -> Option<Self> {
        let metadata = fs::metadata(folder).ok()?;
        Some(Self { device: metadata.dev(), inode: metadata.ino() })
    }

    /// `Unavailable` if something else, or nothing, lies at `folder` for this process.
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
