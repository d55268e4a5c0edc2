//! The protocol of the API socket: a request, then one reply, as often as the client likes.
//!
//! The socket lies in the state directory's `run/` folder, and the other side must be root or the
//! daemon's own user (verified by the credentials of the socket). [`Reply::Mounted`] comes with the
//! detached mount as a descriptor; closing it without having moved the mount into place unmounts
//! it.

mod status;

use std::path::PathBuf;

use burgeon_block::{Error, ErrorKind};
use burgeon_source::{Access, Location};
use serde::{Deserialize, Serialize};

pub use self::status::{
    AreaStatus, CACHE_FULL, CacheStatus, DaemonStatus, FillStatus, HostCache, Latency, MountStatus,
    OVER_LIMIT, ProfileStatus, ReadBytes, ReadStatus, WaitStatus,
};
pub use crate::{
    id::DigestText,
    state::{
        attributes::{AccessTimes, AttributesRequest, MountAttributes, OtherAttributes},
        cache::{CacheAmount, CachePart, PartLimit},
        record::{SproutState, WritesState},
    },
};
use crate::{
    id::MountId,
    state::{directory_identity::DirectoryIdentity, space::LIMIT_MIN},
};

/// A client's request.
#[derive(Serialize, Deserialize, Debug)]
#[serde(tag = "call", rename_all = "kebab-case")]
pub enum Request {
    /// Make a detached mount: answered by [`Reply::Mounted`] and a descriptor.
    Mount(Box<MountRequest>),
    /// Run a credential helper for a server of an earlier version, which has no message for it on
    /// its link: answered by [`Reply::HelperSaid`].
    AskHelper {
        /// The helper's name, without `docker-credential-`.
        helper: String,
        /// The registry that it is asked about.
        registry: String,
    },
    /// The mount has been moved to `target` in the client's namespace.
    Placed {
        /// The mount.
        id: MountId,
        /// Its present mount point.
        target: PathBuf,
    },
    /// Assign addresses in the virtual area to contents: answered by [`Reply::Mapped`] and a
    /// descriptor of the area's file, to clone from.
    Map(MapRequest),
    /// List all mappings: answered by [`Reply::Mappings`].
    Mappings {
        /// The mount.
        id: MountId,
    },
    /// Record the reads of lazy data from now on, until [`Request::Recorded`] or the end of the
    /// connection.
    Record {
        /// The mount.
        id: MountId,
    },
    /// End recording: answered by [`Reply::Recorded`] and a descriptor.
    Recorded {
        /// The mount.
        id: MountId,
    },
    /// Keep these bytes in the cache: fetch them now, and again if the cache is lost.
    Pin {
        /// The mount.
        id: MountId,
        /// The user's name for them; replaces earlier pins of this name.
        path: String,
        /// First lazy address and length in bytes; none: unpin this name.
        ranges: Vec<(u64, u64)>,
    },
    /// Everything about the daemon and its mounts.
    Status,
    /// Do something with the host's cache: answered by [`Reply::Cache`].
    Cache(CacheRequest),
    /// Ask how the mount can be let go: answered by [`Reply::LetGo`].
    BeginLetGo {
        /// The mount.
        id: MountId,
        /// Reserve all that its writes may still take, if it can be let go at once.
        reserve: bool,
    },
    /// Put the plain file, which the client has made (`crate::let_go`), below the mount: no process
    /// of ours is needed for it any more.
    LetGo {
        /// The mount.
        id: MountId,
    },
    /// Change level and format of the log until the daemon starts again; answered by
    /// [`Reply::Log`], also if nothing is to change.
    Log {
        /// The level: `error`, `warn`, `info`, `debug` or `off`.
        level: Option<String>,
        /// Lines of JSON.
        json: Option<bool>,
    },
    /// List the last reads of a mount that had to wait: answered by [`Reply::Waits`].
    Waits {
        /// The mount.
        id: MountId,
        /// Only those with higher numbers.
        after: u64,
    },
    /// Ask where the host's cache holds chunks of the mount's image, from one on: answered by
    /// [`Reply::Places`].
    Places {
        /// The mount.
        id: MountId,
        /// The first chunk.
        first: u32,
    },
    /// Wait until the mount is released, up to a time limit.
    AwaitRelease {
        /// The mount.
        id: MountId,
        /// Time limit in milliseconds.
        timeout_ms: u64,
    },
    /// End the daemon; refused while something is mounted.
    Shutdown {
        /// End it nevertheless: reads of data that is not local fail from then on.
        force: bool,
    },
}

impl Request {
    /// The name of its kind, as in the message.
    pub(crate) fn name(&self) -> &'static str {
        match self {
            Self::Mount(_) => "mount",
            Self::AskHelper { .. } => "ask-helper",
            Self::Placed { .. } => "placed",
            Self::Map(_) => "map",
            Self::Mappings { .. } => "mappings",
            Self::Record { .. } => "record",
            Self::Recorded { .. } => "recorded",
            Self::Pin { .. } => "pin",
            Self::Status => "status",
            Self::Cache(_) => "cache",
            Self::BeginLetGo { .. } => "begin-let-go",
            Self::LetGo { .. } => "let-go",
            Self::Log { .. } => "log",
            Self::Waits { .. } => "waits",
            Self::Places { .. } => "places",
            Self::AwaitRelease { .. } => "await-release",
            Self::Shutdown { .. } => "shutdown",
        }
    }
}

/// A request about the host's cache.
#[derive(Serialize, Deserialize, Debug, Clone)]
#[serde(tag = "do", rename_all = "kebab-case")]
pub enum CacheRequest {
    /// Show its figures.
    Show,
    /// Change its bounds, now and for later daemons; `None` leaves a bound as it is.
    Resize {
        /// Most that it takes.
        limit: Option<CacheAmount>,
        /// Space that it leaves free.
        keep_free: Option<CacheAmount>,
        /// Changed limits of single images and stores. Missing from earlier clients.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        parts: Vec<PartLimit>,
    },
    /// Free so many bytes.
    Evict {
        /// The bytes.
        bytes: u64,
    },
    /// Forget the chunks of an image, also those that other images share.
    Drop {
        /// The image.
        digest: DigestText,
    },
    /// Read every chunk, and forget those that are damaged.
    Scrub {
        /// Limit of the rate.
        bytes_per_second: u64,
    },
}

/// A part of the cache, its chunks and its limit. A chunk counts for the image that fetched it.
#[derive(Serialize, Deserialize, Debug, Clone, PartialEq, Eq)]
pub struct PartOfCache {
    /// The part.
    #[serde(flatten)]
    pub part: CachePart,
    /// Bytes of its chunks.
    pub bytes: u64,
    /// Its limit, if it has one of its own.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub limit: Option<u64>,
}

/// The end of a request about the host's cache.
#[derive(Serialize, Deserialize, Debug, Clone, Default)]
pub struct CacheAnswer {
    /// Bytes freed or read.
    pub bytes: u64,
    /// Chunks forgotten.
    pub chunks: u64,
    /// The cache after that.
    pub cache: HostCache,
    /// Its images and stores: those with the most bytes, and all that have a limit.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub parts: Vec<PartOfCache>,
    /// Bytes of chunks that no image has claimed since the server was started.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unclaimed: Option<u64>,
}

/// The places of some of a mount's chunks in the files of the host's cache: hints, which may be
/// stale when they arrive.
#[derive(Serialize, Deserialize, Debug, Clone, Default)]
pub struct ChunkPlaces {
    /// In ascending order of chunks.
    pub runs: Vec<PlacedRun>,
    /// The first chunk that was not looked for; `None` after the last one.
    pub next: Option<u32>,
}

/// Chunks one after another that lie one after another in an arena.
#[derive(Serialize, Deserialize, Debug, Clone, Copy, PartialEq, Eq)]
pub struct PlacedRun {
    /// The first chunk.
    pub first: u32,
    /// The number of chunks.
    pub count: u32,
    /// The number in the arena's name.
    pub arena: u32,
    /// The first block in the arena.
    pub block: u32,
}

/// A requested mount. Paths are absolute: the daemon's working directory is not the user's.
#[derive(Serialize, Deserialize, Debug, Clone)]
pub struct MountRequest {
    /// The image's name in the store, or the reference of an artifact; records of kept writes use
    /// it.
    pub image: String,
    /// The image's digest, if the client knows it: a name in a store can be changed by all of its
    /// writers.
    #[serde(default)]
    pub digest: Option<DigestText>,
    /// The image as the user typed it: for messages and `status`.
    #[serde(default)]
    pub shown: Option<String>,
    /// The store; `None` is the one in the state directory.
    pub store: Option<Location>,
    /// Directory identity of the store as the client sees it, if it is a folder.
    #[serde(default, rename = "store_seen")]
    pub store_identity: Option<DirectoryIdentity>,
    /// The store is unreachable, or must not be contacted: use this host's copy of the image.
    #[serde(default)]
    pub store_away: bool,
    /// The client's environment for using stores; secret.
    #[serde(default)]
    pub access: Access,
    /// The place of writes.
    pub writes: WritesRequest,
    /// Fetch everything in the background.
    pub fill: bool,
    /// The transport of the lazy data.
    #[serde(default)]
    pub transport: TransportRequest,
    /// Use io_uring if the kernel allows it. Then reads fail while the server restarts. No effect
    /// over ublk.
    #[serde(default)]
    pub fast: bool,
    /// The future mount point: for messages and `status` only.
    pub target: PathBuf,
    /// Bytes of the virtual area; 0 for none. With existing named writes: their recorded size, or
    /// 0.
    #[serde(default)]
    pub virtual_bytes: u64,
    /// Fetch limit of this mount, in bytes.
    #[serde(default)]
    pub fetch_limit: Option<u64>,
    /// The profile to prefetch.
    #[serde(default)]
    pub profile: ProfileRequest,
    /// The attributes of the mount itself.
    #[serde(default)]
    pub attributes: AttributesRequest,
}

/// The profile to prefetch for a mount.
#[derive(Serialize, Deserialize, Debug, Clone, PartialEq, Eq, Default)]
#[serde(tag = "kind", content = "path", rename_all = "kebab-case")]
pub enum ProfileRequest {
    /// No profile.
    #[default]
    None,
    /// The profile recorded for the image, in its store or on this host.
    Auto,
    /// This file, a profile of the image.
    File(PathBuf),
}

/// Content to be mapped into a mount.
#[derive(Serialize, Deserialize, Debug, Clone)]
pub struct MapRequest {
    /// The mount.
    pub id: MountId,
    /// The user's name for it: the path at which it will appear.
    pub label: String,
    /// Its origin, for users.
    pub origin: String,
    /// At most [`CONTENTS_MAX`].
    pub contents: Vec<MapContent>,
    /// The absolute path of the directory with the files of [`MapContent::File`]; the client's
    /// descriptor of it is sent along.
    #[serde(default)]
    pub tree: Option<PathBuf>,
    /// The client's environment for using stores; secret.
    #[serde(default)]
    pub access: Access,
}

/// Limit of contents per request: with average paths they fit in one message.
pub const CONTENTS_MAX: usize = 8192;

/// A piece of content: its mapping starts at a block boundary.
#[derive(Serialize, Deserialize, Debug, Clone)]
#[serde(tag = "kind", rename_all = "kebab-case")]
pub enum MapContent {
    /// Computed bytes.
    Computed {
        /// Such as `block-number`.
        name: String,
        /// Length in bytes, at least 1.
        len: u64,
    },
    /// A whole local file, not empty.
    File {
        /// Its path in the request's tree; absolute if there is none.
        path: PathBuf,
        /// The inode that the client sees, to check that the daemon sees the same file.
        inode: u64,
        /// Its size in bytes.
        size: u64,
        /// The number of its file system, for the same check.
        #[serde(default)]
        device: Option<u64>,
        /// Its last change, in seconds and nanoseconds, for the same check.
        #[serde(default)]
        changed: Option<(i64, i64)>,
    },
    /// All lazy data of an image.
    Image {
        /// Its manifest.
        digest: DigestText,
        /// The store with its chunks; `None` is the store in the state directory.
        store: Option<Location>,
        /// Directory identity of the store as the client sees it, if it is a folder.
        #[serde(default, rename = "store_seen")]
        store_identity: Option<DirectoryIdentity>,
        /// Bytes of lazy data, to check that the daemon sees the same image.
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

    /// True if there is nothing to map.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// A mapping.
#[derive(Serialize, Deserialize, Debug, Clone)]
pub struct MappingStatus {
    /// The user's name for it.
    pub label: String,
    /// Its origin.
    pub origin: String,
    /// Its offset in the virtual area, in bytes.
    pub start: u64,
    /// Bytes of content.
    pub len: u64,
    /// Number of extents.
    pub extents: u64,
}

/// The transport of a mount's lazy data.
#[derive(Serialize, Deserialize, Debug, Clone, Copy, PartialEq, Eq, Default)]
#[serde(rename_all = "kebab-case")]
pub enum TransportRequest {
    /// ublk if available, else FUSE.
    #[default]
    Auto,
    /// ublk, or an error.
    Ublk,
    /// A FUSE file and a loop device.
    Fuse,
}

/// The place of writes into a mount.
#[derive(Serialize, Deserialize, Debug, Clone, PartialEq, Eq)]
#[serde(tag = "kind", rename_all = "kebab-case")]
pub enum WritesRequest {
    /// No writes: the mount is read-only.
    ReadOnly,
    /// A new sprout.
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

impl WritesRequest {
    /// Bytes that a new sprout takes at least, at once, in the state directory.
    pub(crate) fn first_bytes(&self) -> Option<u64> {
        match self {
            Self::Kept(sprout) if sprout.device.is_none() && !sprout.thin => {
                Some(sprout.limit.unwrap_or(LIMIT_MIN))
            }
            Self::Kept(sprout) if sprout.device.is_none() => Some(LIMIT_MIN),
            Self::Kept(_) | Self::ReadOnly => None,
        }
    }
}

/// The requested sprout.
#[derive(Serialize, Deserialize, Debug, Clone, PartialEq, Eq, Default)]
pub struct SproutRequest {
    /// Its name; an unnamed sprout is discarded at umount.
    pub name: Option<String>,
    /// Its size in bytes; `None` takes the default.
    pub limit: Option<u64>,
    /// Reserve the space in steps, while it is written to.
    pub thin: bool,
    /// A user's block device instead of a file.
    pub device: Option<PathBuf>,
}

/// The daemon's answer.
#[derive(Serialize, Deserialize, Debug)]
#[serde(tag = "reply", rename_all = "kebab-case")]
pub enum Reply {
    /// Success, without further results.
    Done,
    /// The mount is ready; its descriptor is sent along.
    Mounted(Mounted),
    /// The output of a credential helper, or the reason why there is none.
    HelperSaid(Result<String, String>),
    /// The contents lie one after another from `start` on, in bytes, each at a block boundary.
    Mapped {
        /// Offset in the virtual area's file, whose descriptor is sent along.
        start: u64,
        /// Notes for the user, in sentences.
        #[serde(default)]
        notes: Vec<String>,
    },
    /// Oldest first.
    Mappings {
        /// Bytes of the virtual area.
        size: u64,
        /// The mappings; only the newest if there are many.
        mappings: Vec<MappingStatus>,
        /// Number of older mappings that are not listed.
        older: u64,
    },
    /// The file whose descriptor is sent along has the recorded reads: start and end of each range
    /// of lazy addresses, 8 bytes each, in order of first use.
    Recorded {
        /// There were more reads than fit.
        cut_short: bool,
    },
    /// The status of the daemon and its mounts.
    Status(Box<DaemonStatus>),
    /// The request about the host's cache is done.
    Cache(CacheAnswer),
    /// The manner in which a mount can be let go.
    LetGo {
        /// The reason why only the next mount of the image can have the plain file; none if this
        /// one can.
        later: Option<String>,
    },
    /// The last reads that had to wait.
    Waits {
        /// The oldest first; earlier ones may have been forgotten.
        waits: Vec<WaitStatus>,
    },
    /// The places of chunks in the host's cache.
    Places(ChunkPlaces),
    /// Level and format of the log now.
    Log {
        /// The level.
        level: String,
        /// Lines are JSON.
        json: bool,
    },
    /// The request failed.
    Failed(WireError),
}

/// An error in a message to another process.
#[derive(Serialize, Deserialize, Debug, Clone)]
pub struct WireError {
    /// The name of its kind ([`ErrorKind::name`]).
    pub kind: String,
    /// The message.
    pub what: String,
}

impl From<Error> for WireError {
    fn from(error: Error) -> Self {
        Self { kind: error.kind().name().to_owned(), what: error.to_string() }
    }
}

impl From<WireError> for Error {
    fn from(failure: WireError) -> Self {
        Error::new(ErrorKind::from_name(&failure.kind), failure.what)
    }
}

/// A mount that has just been made.
#[derive(Serialize, Deserialize, Debug, Clone)]
pub struct Mounted {
    /// Its identity.
    pub id: MountId,
    /// The mounted manifest.
    pub digest: DigestText,
    /// The block device with the lazy data.
    pub device: PathBuf,
    /// The transport, such as `FUSE file + loop`.
    pub transport: String,
    /// Bytes of btrfs metadata.
    pub metadata_bytes: u64,
    /// The place of writes.
    pub writes: WritesState,
    /// The attributes of the mount itself.
    pub attributes: MountAttributes,
    /// Notes for the user, in sentences.
    pub notes: Vec<String>,
}

#[cfg(test)]
mod tests {
    use burgeon_block::{Digest, Error, ErrorKind};

    use super::{DirectoryIdentity, MapContent, Reply, Request, WireError};

    #[test]
    fn an_error_keeps_its_kind_and_words_on_the_way() {
        for (kind, _) in ErrorKind::ALL {
            let there = Reply::Failed(Error::new(kind, "no luck").into());
            let text = serde_json::to_string(&there).unwrap();
            let Reply::Failed(failure) = serde_json::from_str(&text).unwrap() else { panic!() };
            let back = Error::from(failure);
            assert_eq!((back.kind(), back.to_string().as_str()), (kind, "no luck"));
        }
        let unknown = WireError { kind: "later".into(), what: "x".into() };
        assert_eq!(Error::from(unknown).kind(), ErrorKind::LocalIo);
    }

    #[test]
    fn a_store_is_seen_under_the_name_that_earlier_versions_know() {
        let store_identity = DirectoryIdentity::of(std::path::Path::new("/"));
        let digest = Digest::of(b"image").into();
        let content = MapContent::Image { digest, store: None, store_identity, len: 1 };
        let text = serde_json::to_value(&content).unwrap();
        assert!(text["store_seen"].is_object(), "{text}");
    }

    #[test]
    fn unknown_calls_are_refused() {
        assert!(serde_json::from_str::<Request>(r#"{"call":"explode"}"#).is_err());
        assert!(serde_json::from_str::<Request>(r#"{"call":"status"}"#).is_ok());
    }
}
