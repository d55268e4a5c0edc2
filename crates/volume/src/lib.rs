//! The data path: where lazy bytes are located, fetched, verified, cached and served.
//!
//! ```text
//!   device.rs   LazyDevice: superblocks of one mount, zeros, mapped content (area/), and lazy data of
//!      ▼
//!   volume.rs   Volume: one image, for all its mounts
//!      ├── residency/   local bytes, and their places: one sparse file
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
//! - The presence bits are a hint: they are set after the write, and a lost, torn, rotten or
//!   foreign block behind a set bit is a miss.
//! - The single-flight table and the presence bits agree in every order of their steps
//!   (`tests/interleavings.rs`).
//! - No lock is held across I/O, and a hit allocates nothing (`tests/no_allocation.rs`).

mod area;
mod background;
mod budget;
mod device;
mod fetch;
mod limits;
mod pool;
mod read_log;
mod recorded;
mod residency;
mod sync;
mod verify;
mod volume;

pub use area::{AreaStatus, OpenImage, VirtualArea};
pub use background::{
    Fill, FillProgress, FillState, PrefetchedBytes, ProfilePrefetch, ProfileProgress, ProfileState,
};
pub use budget::Budget;
pub use device::LazyDevice;
pub use fetch::permits::SharedPermits;
pub use limits::{FETCHES_MAX, Limits};
pub use read_log::Recording;
pub use recorded::RECORDED_CHECKSUM_LEN;
pub use residency::{Access, CacheState, DirectFile};
pub use volume::{Status, Volume};
