//! The answer to `burgeon status`, sent over the socket and printed as JSON.

use std::path::PathBuf;

use burgeon_source::Location;
use serde::{Deserialize, Serialize};

use super::{DigestText, MountAttributes, WritesState};
use crate::id::{Fsid, MountId};

/// The status of the daemon and its mounts.
#[derive(Serialize, Deserialize, Debug)]
pub struct DaemonStatus {
    /// Burgeon's version.
    pub version: String,
    /// The supervisor's process id.
    pub supervisor_pid: u32,
    /// The server's process id, while there is one.
    pub server_pid: Option<u32>,
    /// False if there is one that did not report when this status was asked for.
    #[serde(default = "yes")]
    pub server_answers: bool,
    /// Number of restarts of the server.
    pub server_restarts: u64,
    /// The opener's process id, while there is one.
    #[serde(default)]
    pub opener_pid: Option<u32>,
    /// The mounts.
    pub mounts: Vec<MountStatus>,
    /// The host's cache, while a server has it.
    #[serde(default)]
    pub cache: Option<HostCache>,
}

fn yes() -> bool {
    true
}

/// The host's cache, which all images share. Space is in bytes; counts are since the server was
/// started.
#[derive(Serialize, Deserialize, Debug, Clone, Default)]
#[serde(default)]
pub struct HostCache {
    /// Its folder.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub folder: Option<PathBuf>,
    /// The reason why it keeps nothing now.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub problem: Option<String>,
    /// The folders of earlier caches, which nobody uses.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub earlier: Vec<PathBuf>,
    /// A scrub reads it.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub scrubbing: bool,
    /// Bytes that it takes now.
    pub used: u64,
    /// Most that it may take now; stored layers included, if it has a limit of its own.
    pub limit: u64,
    /// Bytes of stored layers that may be evicted, beside the chunks; the server does not know
    /// them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub layers: Option<u64>,
    /// Bytes of the file system that it leaves free.
    pub floor: u64,
    /// Bytes of the file system that are free now.
    pub free: u64,
    /// Chunks in it.
    pub chunks: u64,
    /// Bytes of chunks that pins keep.
    pub held: u64,
    /// Bytes of chunks that came.
    pub admitted: u64,
    /// Bytes of chunks that were not taken.
    pub refused: u64,
    /// Bytes of chunks that went.
    pub evicted: u64,
    /// Bytes of chunks that an image found in the cache, and another image had fetched; missing
    /// from servers of earlier versions.
    #[serde(default)]
    pub shared: u64,
    /// Bytes of chunks that share their space with plain files (`burgeon let-go`), beside `used`
    /// and outside of limits; missing from servers of earlier versions.
    #[serde(default)]
    pub lent: u64,
    /// Bytes written to the disk.
    pub written: u64,
    /// Chunks that were wrong, and were fetched again.
    pub doubted: u64,
    /// Reads that failed; the chunks were fetched instead.
    pub read_errors: u64,
    /// Writes that failed.
    pub write_errors: u64,
    /// Estimated hits, in thousandths of the reads of chunks, of caches of half the size, this
    /// size, and twice the size; `None` until enough was read.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hit_permille: Option<[u16; 3]>,
    /// Bytes read since the server was started.
    pub read: ReadBytes,
    /// Bytes read in the last minute; the server looks every ten seconds.
    pub read_in_a_minute: ReadBytes,
    /// Bytes read in the last hour.
    pub read_in_an_hour: ReadBytes,
}

impl HostCache {
    /// The reason why it has no room for one chunk; `None` if it has.
    pub fn lacks_space(&self) -> Option<String> {
        let Self { limit, free, floor, .. } = self;
        (*limit < u64::from(burgeon_cache::CHUNK_LEN_MAX)).then(|| {
            let mib = |bytes: &u64| bytes >> 20;
            match free <= floor {
                true => format!(
                    "{} MiB of its disk are free, and it leaves {} MiB free: free some space, or lower \
                     that (`burgeon cache resize --keep-free SIZE`)",
                    mib(free),
                    mib(floor)
                ),
                false => format!(
                    "it may take {limit} bytes, less than a chunk: raise its limit (`burgeon cache \
                     resize SIZE`)"
                ),
            }
        })
    }
}

/// Bytes that mounts have read.
#[derive(Serialize, Deserialize, Debug, Clone, Copy, Default, PartialEq, Eq)]
#[serde(default)]
pub struct ReadBytes {
    /// Of reads that local bytes alone have answered.
    pub hit: u64,
    /// Of reads that had to wait for a fetch.
    pub miss: u64,
    /// Fetched from sources, as they send it: for reads, and in the background.
    pub fetched: u64,
}

impl ReadBytes {
    /// The share of hits in percent; `None` if nothing was read.
    pub fn hit_ratio(&self) -> Option<f64> {
        let all = self.hit.saturating_add(self.miss);
        (all > 0).then(|| self.hit as f64 * 100.0 / all as f64)
    }
}

/// One mount.
#[derive(Serialize, Deserialize, Debug, Clone)]
pub struct MountStatus {
    /// Its identity.
    pub id: MountId,
    /// The image, as the user typed it.
    pub image: String,
    /// Its name in the store, if it has several: `sha256:…` for all of an OCI image, `…/index` and
    /// `…/contents` for the data needed to read it lazily.
    #[serde(default)]
    pub name: String,
    /// The manifest's digest.
    pub digest: DigestText,
    /// Its store.
    pub store: Location,
    /// Its mount point.
    pub target: PathBuf,
    /// The fsid that the user sees.
    pub fsid: Option<Fsid>,
    /// `preparing`, `serving`, `recovering` (the server is being started) or `failed`.
    pub state: String,
    /// The reason of the failure.
    pub problem: Option<String>,
    /// The source's last answer that was not valid data.
    pub last_source_error: Option<String>,
    /// The block device with the lazy data.
    pub device: Option<PathBuf>,
    /// The transport, such as `FUSE file + loop`.
    pub transport: String,
    /// The place of writes.
    pub writes: WritesState,
    /// btrfs has made the file system of a writable mount read-only. The daemon leaves this field
    /// to its client, whose mount namespace has the mount ([`crate::read_only`]).
    #[serde(default)]
    pub forced_read_only: bool,
    /// The processes that hold a mount which is mounted nowhere any more, as after a lazy umount.
    /// The daemon leaves this field to its client, who may see them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub held_by: Option<String>,
    /// The attributes with which the mount was made.
    pub attributes: MountAttributes,
    /// Bytes of data in the image, each distinct chunk once.
    pub data_bytes: u64,
    /// Bytes of these that are local, over all mounts of the image.
    pub materialised_bytes: Option<u64>,
    /// The image's cache and its in-flight fetches, over all mounts of the image.
    pub cache: Option<CacheStatus>,
    /// Progress of fetching everything, if requested.
    pub fill: Option<FillStatus>,
    /// Progress of the profile prefetch, if requested.
    pub profile: Option<ProfileStatus>,
    /// The pinned paths.
    #[serde(default)]
    pub pins: Vec<String>,
    /// Progress of fetching them.
    #[serde(default)]
    pub pinned: Option<FillStatus>,
    /// Reads and their answers since the mount was made.
    pub reads: ReadStatus,
    /// State of the virtual area, if there is one.
    pub area: Option<AreaStatus>,
    /// Fetch limit of this mount, in bytes.
    pub fetch_limit: Option<u64>,
    /// Reads that were refused because of the fetch limit.
    pub over_limit_reads: u64,
}

/// State of a virtual area.
#[derive(Serialize, Deserialize, Debug, Clone)]
pub struct AreaStatus {
    /// Its length in bytes.
    pub size: u64,
    /// The reason why its map cannot be used; then no mapping can be read.
    #[serde(default)]
    pub problem: Option<String>,
    /// Reads that failed because of that.
    #[serde(default)]
    pub lost_reads: u64,
    /// Reads of unmapped addresses.
    pub unmapped_reads: u64,
    /// The last of these addresses.
    pub last_unmapped: Option<u64>,
    /// Fetches of files that were replaced or changed since they were mapped.
    pub changed_reads: u64,
    /// The last of these, with the file's name.
    pub last_changed: Option<String>,
}

/// The cache as an image sees it, since its server was started. Errors are those of the host's
/// cache.
#[derive(Serialize, Deserialize, Debug, Clone)]
pub struct CacheStatus {
    /// `writing`; `full` (no space: it retries by itself); `stopped` (its files failed).
    pub state: String,
    /// The error that led to this state.
    pub reason: Option<String>,
    /// Reads of the cache that failed; they were fetched instead.
    pub read_errors: u64,
    /// Writes of the cache that failed.
    pub write_errors: u64,
    /// Chunks that were served and not cached.
    pub uncached_chunks: u64,
    /// Chunks being fetched, or written to the cache, now.
    #[serde(alias = "flights")]
    pub in_flight: u64,
    /// Reads that wait for a chunk now.
    pub waiting_readers: u64,
    /// Bytes prefetched because they follow bytes that were read, since the server was started,
    /// uncompressed.
    #[serde(default)]
    pub ahead_bytes: u64,
    /// Of these, bytes that were read since.
    #[serde(default)]
    pub ahead_read_bytes: u64,
}

/// The state of work that the mount's fetch limit has stopped.
pub const OVER_LIMIT: &str = "over-limit";

/// The state of work for which the cache has no space.
pub const CACHE_FULL: &str = "cache-full";

/// Progress of fetching everything in the background.
#[derive(Serialize, Deserialize, Debug, Clone)]
pub struct FillStatus {
    /// `running`, `done`, `stopped`, `over-limit` or `cache-full`.
    pub state: String,
    /// Bytes that can be cached.
    pub total_bytes: u64,
    /// Bytes of these that are local.
    pub done_bytes: u64,
    /// Bytes of these for which the source gave no valid data.
    pub failed_bytes: u64,
}

/// Progress of a profile prefetch.
#[derive(Serialize, Deserialize, Debug, Clone)]
pub struct ProfileStatus {
    /// `loading`, `none` (there was none), `recorded` (since then), `unusable`, `running`, `done`,
    /// `stopped` or `over-limit`.
    pub state: String,
    /// The reason why it is unusable.
    pub problem: Option<String>,
    /// Bytes of the chunks that it touches, uncompressed.
    pub total_bytes: u64,
    /// Bytes of these that no longer need a request.
    pub done_bytes: u64,
    /// Bytes fetched for it, as stored.
    pub fetched_bytes: u64,
    /// Requests made for it.
    pub requests: u64,
    /// Bytes prefetched by profiles since the server was started, uncompressed, over all mounts of
    /// the image.
    #[serde(alias = "brought_bytes")]
    pub prefetched_bytes: u64,
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
    /// Bytes fetched without a reader: for the profile, for pins, to fill.
    #[serde(default)]
    pub background_bytes: u64,
    /// Latency of hits.
    pub local_latency: Latency,
    /// Latency of misses.
    pub source_latency: Latency,
    /// Cached blocks with wrong contents, which were fetched again.
    pub cache_corrupt_blocks: u64,
    /// Chunks received with wrong contents.
    pub source_corrupt_chunks: u64,
    /// Failed attempts to read from the source.
    pub source_errors: u64,
    /// Reads answered with an error.
    pub failed_reads: u64,
    /// Requests that a new server took over from its predecessor.
    pub replayed: u64,
}

/// A read that had to wait.
#[derive(Serialize, Deserialize, Debug, Clone, PartialEq, Eq)]
pub struct WaitStatus {
    /// Its number in the mount; a new server begins with 1.
    pub number: u64,
    /// Its end, in microseconds since 1970.
    pub ended_unix_us: u64,
    /// Its length in time, in microseconds.
    pub took_us: u64,
    /// The first lazy address.
    pub address: u64,
    /// Bytes.
    pub len: u64,
    /// `source` if it waited for a fetch, `cache` if not.
    pub tier: String,
    /// The object with the data; `None` for a virtual area.
    pub object: Option<String>,
    /// Failed attempts to fetch.
    pub failed_tries: u64,
    /// The kind of the error with which it was answered.
    pub error: Option<String>,
}

/// Quantiles in microseconds; `None` without measurements.
#[derive(Serialize, Deserialize, Debug, Clone, Default)]
pub struct Latency {
    /// Half of the reads took at most this.
    pub p50_us: Option<f64>,
    /// 90 % of the reads took at most this.
    pub p90_us: Option<f64>,
    /// 99 % of the reads took at most this.
    pub p99_us: Option<f64>,
}
