//! The data path: where lazy bytes are located, fetched, verified, cached and served.
//!
//! ```text
//!   LazyDevice ── superblocks of one mount, zeros between, and the lazy data of ──┐
//!                                                                                ▼
//!   Volume   try_read ─► CacheFile: presence bits ─► read ─► block checksums ─► Served
//!            read ─────► flight table ─► one task a chunk:                     or Absent
//!                          fetch (retry, deadline) ─► decompress ─► digest
//!                          ─► wake every waiter ─► cache write ─► presence bits
//!                          + those behind it, as much as a round trip carries
//!            follow ───► rows of flights, one request each, in the order of a profile
//!            fill ─────► the same flights, when no reader waits
//! ```
//!
//! Invariants, and the tests that hold them:
//! - Nothing unverified is served: fetched bytes match their chunk's digest, cached bytes their
//!   block's checksum, on every read (`tests/volume.rs`, and the simulator).
//! - One flight a chunk; every waiter shares its result; a dropped reader kills nobody's flight.
//! - A reader never waits for a cache write, and a failing cache never fails a read.
//! - The presence bits are a hint: they are set after the write, and a lost, torn, rotten or
//!   foreign block behind a set bit is a miss.
//! - The flight table and the presence bits agree in every order of their steps
//!   (`tests/interleavings.rs`).
//! - No lock is held across I/O, and a hit allocates nothing (`tests/no_allocation.rs`).

mod ahead;
mod area;
mod brought;
mod budget;
mod cache;
mod device;
mod direct;
mod fetch;
mod fill;
mod flights;
mod fly;
mod follow;
mod limits;
mod outage;
mod pace;
mod pool;
mod presence;
mod read_log;
mod seats;
mod seen;
mod sync;
mod volume;

pub use area::{AreaStatus, OpenImage, VirtualArea};
pub use brought::BroughtBytes;
pub use budget::Budget;
pub use cache::CacheState;
pub use device::LazyDevice;
pub use direct::{Access, DirectFile};
pub use fill::{Fill, FillProgress, FillState};
pub use follow::{Follow, FollowProgress, FollowState};
pub use limits::{FLIGHTS_MAX, Limits};
pub use read_log::Recording;
pub use seats::Room;
pub use seen::SEEN_LEN;
pub use volume::{Status, Volume};
