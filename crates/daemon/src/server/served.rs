//! A mount in the server: served, or refused.
//!
//! ```text
//!   Mount ─┬─► attach, descriptors, slots: for the next supervisor or server
//!          ├─► device ─► volume of its image
//!          ├─► server: hit threads, stopped when it is dropped
//!          └─► background work: profile prefetch, fill, pinned data
//! ```

use std::{os::fd::OwnedFd, sync::Arc};

use burgeon_frontend::{FuseServer, Slots, ublk};
use burgeon_volume::{Fill, ProfilePrefetch};

use super::volumes::{Device, ImageVolume};
use crate::state::record::Attach;

/// A served mount, with everything that a new supervisor would need.
pub(super) struct Mount {
    pub(super) attach: Attach,
    pub(super) volume: Arc<ImageVolume>,
    pub(super) device: Arc<Device>,
    pub(super) fuse: Option<OwnedFd>,
    pub(super) slots: Arc<Slots>,
    pub(super) server: AnyServer,
    pub(super) number: u64,
    pub(super) prefetching: Prefetching,
    pub(super) fill: Option<Fill>,
    /// Fetches of the pinned data; `None` until the pins are known.
    pub(super) pinned: Option<Vec<Fill>>,
}

/// A mount that cannot be served.
pub(super) struct Refused {
    pub(super) attach: Attach,
    pub(super) fuse: Option<OwnedFd>,
    pub(super) slots: Arc<Slots>,
    pub(super) _server: AnyServer,
    pub(super) number: u64,
}

/// A mount's server; stopped when it is dropped.
#[expect(dead_code, reason = "held for their effect on drop")]
pub(super) enum AnyServer {
    Fuse(FuseServer),
    Ublk(ublk::UblkServer),
}

impl AnyServer {
    /// The process that has opened its ublk device.
    pub(super) fn opener(&self) -> Option<u32> {
        match self {
            Self::Fuse(_) => None,
            Self::Ublk(server) => Some(server.opener()),
        }
    }
}

/// Progress of a mount's profile prefetch.
pub(super) enum Prefetching {
    /// The profile is being loaded.
    Loading,
    /// There is none.
    None,
    /// The profile cannot be used.
    Unusable(String),
    /// Its data is being prefetched, or has been.
    Begun(ProfilePrefetch),
}
