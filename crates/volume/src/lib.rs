//! The data path: where lazy bytes are located, fetched, verified, cached and served.
//!
//! ```text
//!   device.rs   LazyDevice: superblocks of one mount, zeros, mapped content (area/), and lazy data of
//!      ▼
//!   volume.rs   Volume: one image, for all its mounts
//!      ├── residency/   resident chunks, and their places in the host's cache
//!      ├── keys.rs      the identity of chunks in that cache
//!      ├── verify.rs    checksums of blocks: those of the map, or recorded ones
//!      ├── fetch/       all other bytes: single-flight, permits, retries, deadlines, the path
//!      └── background/  fetches that no reader asked for: profile prefetch, read-ahead, fill
//!
//!   a miss      try_read ─► Absent; read ─► join or start ─► fetch task ─► ask ─► source
//!               ─► verify ─► publish ─► the reader copies        (docs/architecture.md walks it)
//! ```
//!
//! Invariants, and the tests that hold them:
//! - Nothing unverified is served: fetched bytes match their chunk's digest, resident bytes their
//!   block's checksum, on every read (`tests/volume.rs`, and the simulator).
//! - One fetch a chunk; every waiter shares its result; a dropped reader ends nobody's fetch.
//! - A reader never waits for a cache write, and a failing cache never fails a read.
//! - A place in the cache is a hint: a lost, torn, rotten, foreign or evicted block is a miss. An
//!   image's checksums alone never make the cache forget a chunk (the simulator).
//! - The single-flight table and the table of places agree in every order of their steps
//!   (`tests/interleavings.rs`).
//! - No lock is held across I/O, and a hit allocates nothing (`tests/no_allocation.rs`).

mod area;
mod background;
mod budget;
mod checksum_file;
mod device;
mod fetch;
mod gate;
mod keys;
mod limits;
#[cfg(test)]
mod memory;
mod pool;
mod read_log;
mod recorded;
mod residency;
mod sync;
mod verify;
mod volume;
mod waits;

pub use area::{AreaHealth, OpenChecksums, OpenImage, VirtualArea};
pub use background::{
    Fill, FillProgress, FillState, PrefetchedBytes, ProfilePrefetch, ProfileProgress, ProfileState,
};
pub use budget::Budget;
pub use burgeon_cache::CacheState;
pub use checksum_file::ChecksumFile;
pub use device::LazyDevice;
pub use fetch::{permits::SharedPermits, shared_keys::SharedKeys};
pub use keys::{cached_len, chunk_key, chunk_keys};
pub use limits::{FETCHES_MAX, VolumeLimits};
pub use read_log::Recording;
pub use recorded::RECORDED_CHECKSUM_LEN;
pub use residency::CacheAccess;
pub use volume::{Volume, VolumeStatus};
pub use waits::{KEPT as WAITS_KEPT, SHORTEST as SHORTEST_WAIT, Wait};
