//! What is said over the API socket: a request, then one reply, as often as the client likes.
//!
//! The socket lies in the state directory's `run/` folder, and the other side must be root or
//! the daemon's own user (checked on the socket, not believed). [`Reply::Mounted`] brings the
//! detached mount as a descriptor; whoever closes it without having moved it into place has
//! unmounted it.

mod status;

use std::path::PathBuf;

use burgeon_block::{Error, ErrorKind};
use burgeon_source::{Access, Location};
use serde::{Deserialize, Serialize};

pub use self::status::{
    AreaStatus, CacheStatus, FillStatus, Latency, MountStatus, OVER_LIMIT, ProfileStatus,
    ReadStatus, Status,
};
pub use crate::{
    id::DigestText,
    state::{
        attributes::{AccessTimes, AttributesRequest, MountAttributes, OtherAttributes},
        record::{SproutState, WritesState},
    },
};
use crate::{id::MountId, state::seen::Seen};

/// What a client asks for.
#[derive(Serialize, Deserialize, Debug)]
#[serde(tag = "call", rename_all = "kebab-case")]
pub enum Request {
    /// Make a detached mount: answered by [`Reply::Mounted`] and a descriptor.
    Mount(Box<MountRequest>),
    /// Run a credential helper for the server, which may execute nothing: answered by
    /// [`Reply::HelperSaid`].
    AskHelper {
        /// The helper's name, without `docker-credential-`.
        helper: String,
        /// The registry that it is asked about.
        registry: String,
    },
    /// The mount has been moved to `target` in the client's namespace.
    Placed {
        /// Which mount.
        id: MountId,
        /// Where it is now.
        target: PathBuf,
    },
    /// Give content addresses in the virtual area: answered by [`Reply::Mapped`] and a descriptor
    /// of the area's file, to clone from.
    Map(MapRequest),
    /// Everything that is mapped: answered by [`Reply::Mappings`].
    Mappings {
        /// Into which mount.
        id: MountId,
    },
    /// Record from now on which lazy data is read, until [`Request::Recorded`], or until this
    /// client is gone.
    Record {
        /// In which mount.
        id: MountId,
    },
    /// End recording: answered by [`Reply::Recorded`] and a descriptor.
    Recorded {
        /// In which mount.
        id: MountId,
    },
    /// Keep these bytes in the cache: fetched now, and again when the cache was lost.
    Pin {
        /// Of which mount.
        id: MountId,
        /// What the user calls them; what was pinned by this name is replaced.
        path: String,
        /// First lazy address and length in bytes; none: let go what was pinned by this name.
        ranges: Vec<(u64, u64)>,
    },
    /// Everything about the daemon and its mounts.
    Status,
    /// Wait until the mount is released, at most so long.
    AwaitRelease {
        /// Which mount.
        id: MountId,
        /// Longest wait.
        timeout_ms: u64,
    },
    /// End the daemon; refused while something is mounted.
    Shutdown {
        /// End it all the same: reads of data that is not local fail from then on.
        force: bool,
    },
}

/// A mount that is wanted. Paths are absolute: the daemon's working directory is not the user's.
#[derive(Serialize, Deserialize, Debug, Clone)]
pub struct MountRequest {
    /// The image's name in the store, or the reference of an artifact: kept writes know it by that.
    pub image: String,
    /// Which image it is, where the client knows: a name in a store is whoever's who can write there.
    #[serde(default)]
    pub digest: Option<DigestText>,
    /// What the user typed: for messages and `status`.
    #[serde(default)]
    pub shown: Option<String>,
    /// The store; `None` is the one in the state directory.
    pub store: Option<Location>,
    /// What lies there for the client, if it is a folder.
    #[serde(default)]
    pub store_seen: Option<Seen>,
    /// The store does not answer, or is not to be asked: what this host has of the image is to do.
    #[serde(default)]
    pub store_away: bool,
    /// What the client's environment says about using stores; secret.
    #[serde(default)]
    pub access: Access,
    /// What happens to writes.
    pub writes: WritesRequest,
    /// Whether to fetch everything in the background.
    pub fill: bool,
    /// How the kernel is to reach the lazy data.
    #[serde(default)]
    pub transport: TransportRequest,
    /// Whether requests are to come over io_uring, where the kernel allows it. Then reads fail
    /// while the serving process is started again. Of no effect over ublk.
    #[serde(default)]
    pub fast: bool,
    /// Where it will be placed: for messages and `status` only.
    pub target: PathBuf,
    /// Bytes of the virtual area; 0 for none. With named writes that exist: what they were made
    /// with, or 0.
    #[serde(default)]
    pub virtual_bytes: u64,
    /// The most that may be fetched for this mount, in bytes.
    #[serde(default)]
    pub fetch_limit: Option<u64>,
    /// What to bring first.
    #[serde(default)]
    pub profile: ProfileRequest,
    /// The attributes of the mount itself.
    #[serde(default)]
    pub attributes: AttributesRequest,
}

/// What to bring first into a mount.
#[derive(Serialize, Deserialize, Debug, Clone, PartialEq, Eq, Default)]
#[serde(tag = "kind", content = "path", rename_all = "kebab-case")]
pub enum ProfileRequest {
    /// Nothing.
    #[default]
    None,
    /// What has been recorded for the image, beside it or on this host.
    Auto,
    /// What this file says, which is a profile of the image.
    File(PathBuf),
}

/// Content to be mapped into a mount.
#[derive(Serialize, Deserialize, Debug, Clone)]
pub struct MapRequest {
    /// Into which mount.
    pub id: MountId,
    /// What the user calls it: the path it will appear at.
    pub label: String,
    /// Where it comes from, for a user to read.
    pub origin: String,
    /// At most [`CONTENTS_MAX`].
    pub contents: Vec<MapContent>,
    /// The absolute path of the directory that the files of [`MapContent::File`] lie in; what the client
    /// has open there is on this message.
    #[serde(default)]
    pub tree: Option<PathBuf>,
    /// What the client's environment says about using stores; secret.
    #[serde(default)]
    pub access: Access,
}

/// Contents of one request: with paths of up to 4 KiB each they fit in one message, on average.
pub const CONTENTS_MAX: usize = 8192;

/// A piece of content: it is mapped from a block border.
#[derive(Serialize, Deserialize, Debug, Clone)]
#[serde(tag = "kind", rename_all = "kebab-case")]
pub enum MapContent {
    /// Bytes that are made up.
    Computed {
        /// Such as `block-number`.
        name: String,
        /// How many, at least 1.
        len: u64,
    },
    /// All of a local file that is not empty.
    File {
        /// Its path in the request's tree; absolute if there is none.
        path: PathBuf,
        /// What the client sees there, to find out whether the daemon sees the same.
        inode: u64,
        /// Its size in bytes.
        size: u64,
        /// The number of its file system.
        #[serde(default)]
        device: Option<u64>,
        /// When it was last changed: seconds and nanoseconds.
        #[serde(default)]
        changed: Option<(i64, i64)>,
    },
    /// All lazy data of an image.
    Image {
        /// Its manifest.
        digest: DigestText,
        /// Where its chunks are; `None` is the store in the state directory.
        store: Option<Location>,
        /// What lies there for the client, if it is a folder.
        #[serde(default)]
        store_seen: Option<Seen>,
        /// Bytes of lazy data, to find out whether the daemon sees the same.
        len: u64,
    },
}

impl MapContent {
    /// Bytes of content.
    pub fn len(&self) -> u64 {
        match self {
            Self::Computed { len, .. } | Self::Image { len, .. } => *len,
            Self::File { size, .. } => *size,
        }
    }

    /// Whether there is nothing to map.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// What has been mapped.
#[derive(Serialize, Deserialize, Debug, Clone)]
pub struct MappingStatus {
    /// What the user called it.
    pub label: String,
    /// Where it comes from.
    pub origin: String,
    /// Where it begins in the virtual area, in bytes.
    pub start: u64,
    /// Bytes of content.
    pub len: u64,
    /// How many extents it has.
    pub extents: u64,
}

/// How the kernel is to reach a mount's lazy data.
#[derive(Serialize, Deserialize, Debug, Clone, Copy, PartialEq, Eq, Default)]
#[serde(rename_all = "kebab-case")]
pub enum TransportRequest {
    /// Over ublk where that is there, else over FUSE.
    #[default]
    Auto,
    /// Over ublk, or not at all.
    Ublk,
    /// Over a FUSE file and a loop device.
    Fuse,
}

/// What happens to writes into a mount.
#[derive(Serialize, Deserialize, Debug, Clone, PartialEq, Eq)]
#[serde(tag = "kind", rename_all = "kebab-case")]
pub enum WritesRequest {
    /// There are none: the mount is read-only.
    ReadOnly,
    /// They go to a new sprout.
    Kept(SproutRequest),
}

impl WritesRequest {
    /// The name under which they are kept.
    pub fn name(&self) -> Option<&str> {
        match self {
            Self::Kept(sprout) => sprout.name.as_deref(),
            Self::ReadOnly => None,
        }
    }
}

/// The sprout that is wanted.
#[derive(Serialize, Deserialize, Debug, Clone, PartialEq, Eq, Default)]
pub struct SproutRequest {
    /// Its name; without one it is discarded at umount.
    pub name: Option<String>,
    /// Its size in bytes; `None` takes the default.
    pub limit: Option<u64>,
    /// Reserve the size in steps, as it is written to.
    pub thin: bool,
    /// A block device of the user's instead of a file.
    pub device: Option<PathBuf>,
}

/// The daemon's answer.
#[derive(Serialize, Deserialize, Debug)]
#[serde(tag = "reply", rename_all = "kebab-case")]
pub enum Reply {
    /// It is done and there is nothing to say.
    Done,
    /// The mount is ready, its descriptor is on this message.
    Mounted(Mounted),
    /// What a credential helper printed, or why it did not.
    HelperSaid(Result<String, String>),
    /// The contents lie one after another from `start` on, in bytes, each from a block border.
    Mapped {
        /// Offset in the virtual area's file, whose descriptor is on this message.
        start: u64,
        /// What the user should know, in sentences.
        #[serde(default)]
        notes: Vec<String>,
    },
    /// Oldest first.
    Mappings {
        /// Bytes of the virtual area.
        size: u64,
        /// What is mapped into it; of many, the newest.
        mappings: Vec<MappingStatus>,
        /// How many older ones there are.
        older: u64,
    },
    /// What was read while it was recorded is in the file whose descriptor is on this message:
    /// start and end of each range of lazy addresses, 8 bytes each, in order of first use.
    Recorded {
        /// Whether there was more than could be taken note of.
        cut_short: bool,
    },
    /// The state of everything.
    Status(Box<Status>),
    /// It was not done.
    Failed(Failure),
}

/// An error on its way to another process.
#[derive(Serialize, Deserialize, Debug, Clone)]
pub struct Failure {
    /// Its kind, as [`kind_name`] spells it.
    pub kind: String,
    /// The message.
    pub what: String,
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self { kind: kind_name(error.kind()).to_owned(), what: error.to_string() }
    }
}

impl From<Failure> for Error {
    fn from(failure: Failure) -> Self {
        let kind = KINDS.iter().find(|(_, name)| *name == failure.kind);
        Error::new(kind.map_or(ErrorKind::LocalIo, |(kind, _)| *kind), failure.what)
    }
}

const KINDS: [(ErrorKind, &str); 9] = [
    (ErrorKind::Invalid, "invalid"),
    (ErrorKind::NotFound, "not-found"),
    (ErrorKind::Unavailable, "unavailable"),
    (ErrorKind::Corrupt, "corrupt"),
    (ErrorKind::NoSpace, "no-space"),
    (ErrorKind::UnsupportedFormat, "unsupported-format"),
    (ErrorKind::LocalIo, "local-io"),
    (ErrorKind::Unmapped, "unmapped"),
    (ErrorKind::OverLimit, "over-limit"),
];

/// How a kind of error is spelled in JSON.
pub fn kind_name(kind: ErrorKind) -> &'static str {
    KINDS.iter().find(|(known, _)| *known == kind).map_or("local-io", |(_, name)| name)
}

/// A mount that has just been made.
#[derive(Serialize, Deserialize, Debug, Clone)]
pub struct Mounted {
    /// Its identity.
    pub id: MountId,
    /// The manifest that is mounted.
    pub digest: DigestText,
    /// The block device with the lazy data.
    pub device: PathBuf,
    /// How the kernel reaches it, such as `FUSE file + loop`.
    pub transport: String,
    /// Bytes of btrfs metadata.
    pub metadata_bytes: u64,
    /// Where the writes go.
    pub writes: WritesState,
    /// The attributes of the mount itself.
    pub attributes: MountAttributes,
    /// What the user should know, in sentences.
    pub notes: Vec<String>,
}

#[cfg(test)]
mod tests {
    use burgeon_block::{Error, ErrorKind};

    use super::{Failure, KINDS, Reply, Request};

    #[test]
    fn an_error_keeps_its_kind_and_words_on_the_way() {
        for (kind, _) in KINDS {
            let there = Reply::Failed(Error::new(kind, "no luck").into());
            let text = serde_json::to_string(&there).unwrap();
            let Reply::Failed(failure) = serde_json::from_str(&text).unwrap() else { panic!() };
            let back = Error::from(failure);
            assert_eq!((back.kind(), back.to_string().as_str()), (kind, "no luck"));
        }
        let unknown = Failure { kind: "later".into(), what: "x".into() };
        assert_eq!(Error::from(unknown).kind(), ErrorKind::LocalIo);
    }

    #[test]
    fn unknown_calls_are_refused() {
        assert!(serde_json::from_str::<Request>(r#"{"call":"explode"}"#).is_err());
        assert!(serde_json::from_str::<Request>(r#"{"call":"status"}"#).is_ok());
    }
}
