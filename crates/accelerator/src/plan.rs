//! The plan of a server: the one document that its supervisor gives it, with the numbers of the
//! descriptors that it inherits.

use std::{os::fd::RawFd, path::PathBuf};

use serde::{Deserialize, Serialize};

use crate::writing_back::WriteBackSettings;

/// The cache and the devices that a server serves.
#[derive(Serialize, Deserialize, Debug)]
pub(crate) struct Plan {
    pub(crate) cache: PathBuf,
    pub(crate) cache_fd: RawFd,
    pub(crate) listener_fd: RawFd,
    /// The file that is made when the content must not be used any more.
    pub(crate) distrust: PathBuf,
    pub(crate) policy: String,
    pub(crate) writing_back: WriteBackSettings,
    /// Documents of devices that may have dirty blocks.
    pub(crate) owners: PathBuf,
    /// Distributions of the devices.
    pub(crate) histograms: PathBuf,
    /// The cache device had failed.
    pub(crate) is_distrusted: bool,
    /// Content of an earlier server may be used.
    pub(crate) warm: bool,
    /// A cache that cannot be opened is gone round.
    pub(crate) goes_round: bool,
    pub(crate) devices: Vec<PlanDevice>,
    /// Made before the cache is opened. If that fails, it is served as it was, unless nobody knows
    /// which device has it then.
    pub(crate) change: Option<CacheChange>,
}

/// A change of the cache that needs it to be served by nobody.
#[derive(Serialize, Deserialize, Clone, Debug)]
pub(crate) enum CacheChange {
    /// It takes its whole device; its file gets `size` bytes before.
    Grow { size: Option<u64> },
    /// It moves to another device.
    Replace {
        /// Its folder.
        folder: PathBuf,
        cache: PathBuf,
        cache_fd: RawFd,
        log_size: Option<u64>,
    },
}

#[derive(Serialize, Deserialize, Debug)]
pub(crate) struct PlanDevice {
    pub(crate) name: String,
    pub(crate) slow: PathBuf,
    pub(crate) slow_fd: RawFd,
    pub(crate) front: PlanFront,
    pub(crate) slots_fd: RawFd,
    pub(crate) counters_fd: RawFd,
    pub(crate) mode: String,
    pub(crate) cutoff: u64,
    pub(crate) warm: bool,
    /// Its users wait, so it is served without a cache that cannot be used.
    pub(crate) is_in_use: bool,
    pub(crate) accept_loss: bool,
    /// The kernel sends the requests of a dead server again.
    pub(crate) resends: bool,
}

/// The kernel's side of a device.
#[derive(Serialize, Deserialize, Clone, Copy, Debug)]
pub(crate) enum PlanFront {
    Fuse { fd: RawFd },
    Ublk { number: u32 },
}
