//! The record of a mount: its parts, its server's parameters, and the place of its writes.
//!
//! ```text
//!   mounts/<id>/mount.json   MountRecord ─┬─ Attach        all that a server needs to serve it
//!                                         ├─ WritesState   its sprout
//!                                         └─ Growth        input for growing the sprout
//! ```
//!
//! Invariant: fields are only added, with a default, so that records of earlier versions stay
//! readable; [`MOUNT_FORMAT`] changes when that is not possible.

use std::{
    fs,
    path::{Path, PathBuf},
};

use burgeon_block::{Error, ErrorKind, Result};
use burgeon_source::Location;
use serde::{Deserialize, Serialize};

use crate::{
    id::{DigestText, Fsid, MountId},
    state::{attributes::MountAttributes, files, paths::StateDir},
};

/// Contents of `mounts/<id>/mount.json`, from which a crash is recovered.
#[derive(Serialize, Deserialize, Debug, Clone)]
pub(crate) struct MountRecord {
    /// [`MOUNT_FORMAT`].
    pub(crate) format: u32,
    /// The image as the user typed it.
    pub(crate) image: String,
    /// The image's name in its store; empty in records of earlier versions.
    #[serde(default)]
    pub(crate) name: String,
    pub(crate) digest: DigestText,
    pub(crate) target: PathBuf,
    pub(crate) writes: WritesState,
    /// The attributes of the user's mount; they are never changed here.
    #[serde(default = "MountAttributes::unrestricted")]
    pub(crate) attributes: MountAttributes,
    /// The parameters sent to the server; includes the id and the seed's fsid.
    pub(crate) attach: Attach,
    /// The btrfs that the user sees: the sprout's, or the seed's when read-only.
    pub(crate) fsid: Option<Fsid>,
    /// The block device with the lazy data.
    pub(crate) data_device: Option<PathBuf>,
    /// All block devices of the mount that are loops, the writable one last.
    pub(crate) loops: Vec<PathBuf>,
    /// Bytes of lazy data in the image.
    pub(crate) data_bytes: u64,
    /// Parameters of a growing sprout.
    pub(crate) growth: Option<Growth>,
    /// A supervisor is about to freeze the file system, or has frozen it: its successor thaws it.
    #[serde(default)]
    pub(crate) frozen: bool,
    /// Its lazy data lies in the plain file of its folder, and no process of ours is needed.
    #[serde(default)]
    pub(crate) plain: bool,
    /// That file is its image's, and goes back to it (`complete.rs`).
    #[serde(default)]
    pub(crate) plain_of_image: Option<Plain>,
}

impl MountRecord {
    /// True if the kernel still has its file system, on the data device that it names: fsids are
    /// random, so no other file system can match.
    pub(crate) fn is_alive(&self) -> bool {
        let (Some(fsid), Some(device)) = (self.fsid, &self.data_device) else { return false };
        let Some(name) = device.file_name() else { return false };
        Path::new("/sys/fs/btrfs").join(fsid.to_string()).join("devices").join(name).exists()
    }
}

impl MountRecord {
    /// `Unavailable`, with the reason, if its data cannot become a plain file.
    pub(crate) fn check_copy(&self) -> Result<()> {
        if self.attach.area.is_none() {
            return Ok(());
        }
        let what = "it has a virtual area, whose content Burgeon serves as long as it is mounted";
        Err(Error::new(ErrorKind::Unavailable, what))
    }

    /// The reason why the file below it cannot be exchanged, whatever the kernel bears.
    pub(crate) fn check_exchange(&self) -> std::result::Result<(), &'static str> {
        match self.attach.transport.device() {
            None => Ok(()),
            Some(_) => {
                Err("its data comes from a ublk device, which cannot be exchanged while it is \
                     mounted")
            }
        }
    }
}

/// A file with all lazy data of an image, by the seeds that know its checksums.
#[derive(Serialize, Deserialize, Clone, Copy, PartialEq, Eq, Debug)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Plain {
    /// All of the image.
    Described,
    /// Those that were prepared with the checksums of a complete copy (`complete.rs`).
    #[serde(rename = "summed")]
    WithChecksums,
}

/// Parameters for growing a sprout.
#[derive(Serialize, Deserialize, Debug, Clone)]
pub(crate) struct Growth {
    /// The sprout's device.
    pub(crate) device: PathBuf,
    /// The device's number in the file system.
    pub(crate) device_id: u64,
    /// Bytes of block groups that lie on the seed.
    pub(crate) seed_bytes: u64,
}

/// The version of [`MountRecord`].
pub(crate) const MOUNT_FORMAT: u32 = 1;

/// Everything the server needs to know about a mount: a part of its record, and the content of a
/// message. It is a format of the state directory, so later versions only add fields.
#[derive(Serialize, Deserialize, Debug, Clone)]
pub(crate) struct Attach {
    pub(crate) id: MountId,
    /// The folder with `map` and `seed.info`: of the prepared image or of the named writes.
    pub(crate) seed: PathBuf,
    /// A path beside the image's recorded checksums; earlier versions had a cache file there.
    pub(crate) cache: PathBuf,
    /// The store with the chunks.
    pub(crate) store: Location,
    /// Objects outside the store may be opened.
    pub(crate) references: bool,
    /// The fsid of the mount's seed.
    pub(crate) fsid: Fsid,
    /// Fetch everything in the background.
    pub(crate) fill: bool,
    /// The transport of the kernel's reads.
    #[serde(default)]
    pub(crate) transport: Transport,
    /// The folder with the map of the virtual area, if there is one.
    #[serde(default)]
    pub(crate) area: Option<PathBuf>,
    /// Fetch limit of this mount, in bytes.
    #[serde(default)]
    pub(crate) fetch_limit: Option<u64>,
    /// The profile to prefetch first, if any.
    #[serde(default)]
    pub(crate) profile: Option<ProfileSource>,
    /// The file with the pins, if any.
    #[serde(default)]
    pub(crate) pins: PathBuf,
}

/// The places to look for an image's profile.
#[derive(Serialize, Deserialize, Debug, Clone)]
pub(crate) struct ProfileSource {
    /// The image.
    pub(crate) image: DigestText,
    /// A local file.
    pub(crate) file: PathBuf,
    /// Look in the store, too; no profile at all is no error.
    pub(crate) auto: bool,
    /// The store's profile, if it has been fetched.
    #[serde(default)]
    pub(crate) stored: Option<PathBuf>,
}

/// The transport of a mount; `mount.json` of versions before ublk has none.
#[derive(Serialize, Deserialize, Debug, Clone, Copy, PartialEq, Eq, Default)]
#[serde(tag = "kind", rename_all = "kebab-case")]
pub(crate) enum Transport {
    #[default]
    Fuse,
    Rings {
        /// The number of the FUSE connection, used to abort it.
        connection: u32,
    },
    Ublk {
        /// `N` of `/dev/ublkbN`.
        number: u32,
    },
}

impl Transport {
    /// The number of its ublk device, if it has one.
    pub(crate) fn device(self) -> Option<u32> {
        match self {
            Self::Ublk { number } => Some(number),
            Self::Fuse | Self::Rings { .. } => None,
        }
    }

    /// The name shown to users.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Fuse => "FUSE file + loop",
            Self::Rings { .. } => "FUSE file over io_uring + loop",
            Self::Ublk { .. } => "ublk",
        }
    }
}

/// The place of a mount's writes.
#[derive(Serialize, Deserialize, Debug, Clone, PartialEq, Eq)]
#[serde(tag = "kind", rename_all = "kebab-case")]
pub enum WritesState {
    /// No writes.
    ReadOnly,
    /// A sprout.
    Sprout(SproutState),
}

/// A sprout in use.
#[derive(Serialize, Deserialize, Debug, Clone, PartialEq, Eq)]
pub struct SproutState {
    /// Its name, or `None` if it is discarded at umount.
    pub name: Option<String>,
    /// The file or device.
    pub path: PathBuf,
    /// Largest size, in bytes.
    pub limit: u64,
    /// Reserved bytes: less than `limit` only if it grows.
    pub reserved: u64,
    /// It grows while it is written to.
    pub thin: bool,
}

/// The mounts that have a folder.
pub(crate) fn mount_ids(state: &StateDir) -> Vec<MountId> {
    let entries = fs::read_dir(state.mounts()).into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect()
}

/// The record of a mount; `UnsupportedFormat` if a later version made it.
pub(crate) fn read_record(state: &StateDir, id: MountId) -> Result<MountRecord> {
    /// All that a later version's record has for certain.
    #[derive(Deserialize)]
    struct Format {
        format: u32,
    }
    let path = state.mount(id).join("mount.json");
    let (format, read) = match files::read_json::<MountRecord>(&path) {
        Ok(record) => (record.format, Ok(record)),
        Err(error) => match files::read_json::<Format>(&path) {
            Ok(Format { format }) => (format, Err(error)),
            Err(_) => return Err(error),
        },
    };
    if format == MOUNT_FORMAT {
        return read;
    }
    Err(Error::new(
        ErrorKind::UnsupportedFormat,
        format!("{} was made by another version of Burgeon (format {format})", path.display()),
    ))
}
