//! The answer to `burgeon status`, as it goes over the socket and out as JSON.

use std::path::PathBuf;

use burgeon_source::Location;
use serde::{Deserialize, Serialize};

use super::{DigestText, MountAttributes, WritesState};
use crate::id::{Fsid, MountId};

/// The state of everything.
#[derive(Serialize, Deserialize, Debug)]
pub struct Status {
    /// Burgeon's version.
    pub version: String,
    /// The supervisor's process id.
    pub supervisor_pid: u32,
    /// The serving process's id, while there is one.
    pub server_pid: Option<u32>,
    /// How often the serving process had to be started again.
    pub server_restarts: u64,
    /// The mounts.
    pub mounts: Vec<MountStatus>,
}

/// One mount.
#[derive(Serialize, Deserialize, Debug, Clone)]
pub struct MountStatus {
    /// Its identity.
    pub id: MountId,
    /// The image, as the user typed it.
    pub image: String,
    /// Its name in the store, where there are several: `sha256:…` is all of an ordinary image,
    /// `…/index` and `…/contents` are what it takes to read it lazily.
    #[serde(default)]
    pub name: String,
    /// The manifest's digest.
    pub digest: DigestText,
    /// The store that it is of.
    pub store: Location,
    /// Where it was placed.
    pub target: PathBuf,
    /// The btrfs that the user sees.
    pub fsid: Option<Fsid>,
    /// `preparing`, `serving`, `recovering` (the serving process is being started) or `failed`.
    pub state: String,
    /// Why it failed.
    pub problem: Option<String>,
    /// What the source answered last when it did not give good bytes.
    pub last_source_error: Option<String>,
    /// The block device with the lazy data.
    pub device: Option<PathBuf>,
    /// How the kernel reaches it, such as `FUSE file + loop`.
    pub transport: String,
    /// Where the writes go.
    pub writes: WritesState,
    /// btrfs has made the file system read-only, though the mount was made writable. The daemon leaves
    /// that to its client, whose mount namespace has the mount ([`crate::read_only`]).
    #[serde(default)]
    pub forced_read_only: bool,
    /// The attributes of the mount itself, as it was made.
    pub attributes: MountAttributes,
    /// Bytes of data in the image, distinct chunks once.
    pub data_bytes: u64,
    /// Bytes of it that are local, over all mounts of the image.
    pub materialised_bytes: Option<u64>,
    /// The image's cache and what is under way in it, over all mounts of the image.
    pub cache: Option<CacheStatus>,
    /// How far fetching everything is, if that was asked for.
    pub fill: Option<FillStatus>,
    /// How bringing what the profile says goes, if that was asked for.
    pub profile: Option<ProfileStatus>,
    /// The paths that are pinned.
    #[serde(default)]
    pub pins: Vec<String>,
    /// How far fetching them is.
    #[serde(default)]
    pub pinned: Option<FillStatus>,
    /// Reads and their answers since the mount was made.
    pub reads: ReadStatus,
    /// How the virtual area is, if there is one.
    pub area: Option<AreaStatus>,
    /// The most that may be fetched for this mount, in bytes.
    pub fetch_limit: Option<u64>,
    /// Reads that were refused because of it.
    pub over_limit_reads: u64,
}

/// How a virtual area is.
#[derive(Serialize, Deserialize, Debug, Clone)]
pub struct AreaStatus {
    /// Its length in bytes.
    pub size: u64,
    /// Why its map cannot be used; then nothing that is mapped can be read.
    #[serde(default)]
    pub problem: Option<String>,
    /// Reads that failed because of that.
    #[serde(default)]
    pub lost_reads: u64,
    /// Reads of addresses to which nothing is mapped.
    pub unmapped_reads: u64,
    /// The last of these addresses.
    pub last_unmapped: Option<u64>,
    /// Fetches of files that were replaced or changed since they were mapped.
    pub changed_reads: u64,
    /// The last of these, with the file's name.
    pub last_changed: Option<String>,
}

/// The cache of an image since its serving process was started, over all mounts of the image.
#[derive(Serialize, Deserialize, Debug, Clone)]
pub struct CacheStatus {
    /// `writing`; `full` (no space: it tries again by itself); `stopped` (the file failed).
    pub state: String,
    /// The error that said so.
    pub reason: Option<String>,
    /// Reads of the cache file that failed; they were fetched instead.
    pub read_errors: u64,
    /// Writes of the cache file that failed.
    pub write_errors: u64,
    /// Chunks that were served and not kept.
    pub uncached_chunks: u64,
    /// Chunks being fetched, or written to the cache, now.
    pub flights: u64,
    /// Reads that wait for a chunk now.
    pub waiting_readers: u64,
    /// Bytes that came because they lie behind what was read, since the serving process was
    /// started, uncompressed.
    #[serde(default)]
    pub ahead_bytes: u64,
    /// Of these, bytes that were read since.
    #[serde(default)]
    pub ahead_read_bytes: u64,
}

/// The state of what the mount's fetch limit has stopped.
pub const OVER_LIMIT: &str = "over-limit";

/// How far fetching everything in the background is.
#[derive(Serialize, Deserialize, Debug, Clone)]
pub struct FillStatus {
    /// `running`, `done`, `stopped`, `over-limit` or `cache-full`.
    pub state: String,
    /// Bytes that can be cached.
    pub total_bytes: u64,
    /// Bytes of these that are local.
    pub done_bytes: u64,
    /// Bytes of these that the source would not give right.
    pub failed_bytes: u64,
}

/// How bringing what a profile says goes.
#[derive(Serialize, Deserialize, Debug, Clone)]
pub struct ProfileStatus {
    /// `loading`, `none` (there was none), `recorded` (since then), `unusable`, `running`, `done`, `stopped` or `over-limit`.
    pub state: String,
    /// Why it is unusable.
    pub problem: Option<String>,
    /// Bytes of the chunks that it touches, uncompressed.
    pub total_bytes: u64,
    /// Of these, bytes that need not be asked for any more.
    pub done_bytes: u64,
    /// Bytes that came for it, as stored.
    pub fetched_bytes: u64,
    /// Requests that it took.
    pub requests: u64,
    /// Bytes that profiles have brought since the serving process was started, uncompressed, over
    /// all mounts of the image.
    pub brought_bytes: u64,
    /// Of these, bytes that were read since.
    pub read_bytes: u64,
}

/// The counters of one mount.
#[derive(Serialize, Deserialize, Debug, Clone, Default)]
pub struct ReadStatus {
    /// Reads answered from local bytes.
    pub hits: u64,
    /// Reads that waited for a fetch.
    pub misses: u64,
    /// Hits of all reads, 0 to 1; `None` before the first read.
    pub hit_ratio: Option<f64>,
    /// Chunks fetched.
    pub fetches: u64,
    /// Bytes fetched, as stored.
    pub fetched_bytes: u64,
    /// Bytes fetched for no reader in particular: for the profile, for what is pinned, to fill.
    #[serde(default)]
    pub background_bytes: u64,
    /// Latency of hits.
    pub local_latency: Latency,
    /// Latency of misses.
    pub source_latency: Latency,
    /// Cached blocks found wrong and fetched again.
    pub cache_corrupt_blocks: u64,
    /// Chunks that arrived wrong.
    pub source_corrupt_chunks: u64,
    /// Failed tries to read from the source.
    pub source_errors: u64,
    /// Reads answered with an error.
    pub failed_reads: u64,
    /// Requests a new serving process took over from the one before.
    pub replayed: u64,
}

/// Quantiles in microseconds; `None` where nothing was measured.
#[derive(Serialize, Deserialize, Debug, Clone, Default)]
pub struct Latency {
    /// Half of the reads took at most this.
    pub p50_us: Option<f64>,
    /// 90 % did.
    pub p90_us: Option<f64>,
    /// 99 % did.
    pub p99_us: Option<f64>,
}
