//! The index of an image, as its record has it.
//!
//! Invariant: the digest of its manifest can name a file.

use std::time::SystemTime;

use burgeon_block::{Error, ErrorKind, Result};
use serde::{Deserialize, Serialize};

/// Most records. When there are more images, the indexes of those that are gone make room.
pub(crate) const INDEXES_MAX: usize = 10_000;

/// The index of an image: the record of what was done about it.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct ImageIndex {
    /// The image as it was typed.
    pub image: String,
    /// The digest of its manifest.
    pub manifest: String,
    /// Its state: made, left out or failed.
    pub state: IndexState,
    /// Number of tries.
    pub tries: u32,
    /// When the state changed.
    pub changed: SystemTime,
    /// When its last snapshot was found gone.
    pub unused_since: Option<SystemTime>,
    /// It could not be removed; when that is tried again. Known to this process alone.
    #[serde(skip)]
    pub(crate) stuck_until: Option<SystemTime>,
}

/// The state of an index.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum IndexState {
    /// It is being made, or the process died meanwhile.
    Begun,
    /// The host has it.
    Made {
        /// Its size.
        bytes: u64,
    },
    /// It could not be made; why.
    Failed(String),
    /// It is not worth it, or not wanted; why.
    LeftOut(String),
}

/// The host's configuration of indexes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct IndexPolicy {
    /// They are made.
    pub is_on: bool,
    /// Bytes of those of images that containerd no longer has.
    pub kept: u64,
}

/// The result of an attempt to make an index.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum IndexMade {
    /// It was made.
    Made {
        /// Its size.
        bytes: u64,
    },
    /// The host had it.
    WasThere {
        /// Its size.
        bytes: u64,
    },
    /// The image does not get one; why.
    LeftOut(String),
}

impl ImageIndex {
    /// The name of its record.
    pub(crate) fn record_name(&self) -> Result<&str> {
        hex_of(&self.manifest).ok_or_else(|| {
            let what = format!("{:?} is not the digest of a manifest", self.manifest);
            Error::new(ErrorKind::Invalid, what)
        })
    }

    /// The index as a new process sees it: the limits by which it was left out may have changed.
    pub(crate) fn at_start(self) -> Self {
        match self.state {
            IndexState::LeftOut(why) => Self {
                state: IndexState::Failed(why),
                tries: 0,
                changed: SystemTime::UNIX_EPOCH,
                ..self
            },
            _ => self,
        }
    }

    /// Its size, if it was made.
    pub(crate) fn bytes(&self) -> u64 {
        match self.state {
            IndexState::Made { bytes } => bytes,
            _ => 0,
        }
    }
}

/// The digits of a SHA-256, which can name a file.
pub(crate) fn hex_of(digest: &str) -> Option<&str> {
    let is_hex = |b: u8| b.is_ascii_digit() || (b'a'..=b'f').contains(&b);
    let (_, hex) = digest.split_once(':').filter(|(kind, _)| *kind == "sha256")?;
    Some(hex).filter(|hex| hex.len() == 64 && hex.bytes().all(is_hex))
}
