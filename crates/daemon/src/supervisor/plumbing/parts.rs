//! The messages between [`super::plumb`] and [`super::assemble`]: the parts of a mount, and the
//! assembled mount.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::{
    id::{Fsid, MountId},
    state::{attributes::MountAttributes, record::Growth},
};

/// The parts of a mount, for the helper that assembles it.
#[derive(Serialize, Deserialize, Debug)]
pub(crate) struct MountParts {
    pub(super) id: MountId,
    /// The ublk device that is served already, and the process that has opened it for that; `None`
    /// over FUSE.
    pub(super) ublk: Option<(u32, u32)>,
    /// The descriptor that is sent along is the plain file with the lazy data.
    pub(super) is_plain: bool,
    /// The seed's metadata.
    pub(super) seed: PathBuf,
    pub(super) sprout: Option<SproutPart>,
    pub(super) attributes: MountAttributes,
}

/// The place of writes.
#[derive(Serialize, Deserialize, Debug)]
pub(crate) struct SproutPart {
    pub(super) path: PathBuf,
    pub(super) is_device: bool,
    pub(super) is_new: bool,
    pub(super) thin: bool,
    pub(super) reserved: u64,
}

/// The devices and names of an assembled mount.
#[derive(Serialize, Deserialize, Debug)]
pub(crate) struct Plumbed {
    /// The fsid that the user sees.
    pub(crate) fsid: Fsid,
    pub(crate) data_device: PathBuf,
    /// All loop devices of the mount.
    pub(crate) loops: Vec<PathBuf>,
    /// For growing sprouts.
    pub(crate) growth: Option<Growth>,
}
